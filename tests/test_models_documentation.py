"""docs/models.md: what becomes of each architecture, measured with small random models."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from peft import PeftModel
from support.architectures import ARCHITECTURES, Architecture
from test_model_mixers import CPU, loss_of_each, packed_loss
from test_train_model_reading import memory
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rayapp import model
from rayapp.config import Lora
from rayapp.model import small_files
from rayapp.model.attention import choose_attention
from rayapp.model.mixers import keeps_documents_apart, split_documents
from rayapp.model.small_files import write_small_files
from rayapp.storage import open_storage
from rayapp.train.loss import chunked_cross_entropy

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- made by the test -->\n", "<!-- end -->"
CLOSE = 1e-4


def built(architecture: Architecture, lora: Lora | None = None) -> model.LanguageModel:
    config = architecture.config()
    attention = choose_attention("auto", config, "cpu", torch.float32)
    loss = partial(chunked_cross_entropy, chunk=64)
    lm = model.build(config, loss=loss, attention=attention)
    if lora is not None:
        model.add_adapters(lm, lora)
    return lm


@torch.no_grad()
def noisy(lm: model.LanguageModel, names: str) -> None:
    """Add noise to the parameters of these names, so that none of them is without effect."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in lm.named_parameters():
        if names in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def packs(lm: model.LanguageModel) -> str:
    """Return how documents are kept apart; the loss of packed rows must be that of each alone."""
    how = "itself"
    if not keeps_documents_apart(lm, CPU):
        how = "by row" if split_documents(lm) else "no"
    apart = how != "no" and keeps_documents_apart(lm, CPU)
    packed, alone = float(packed_loss(lm.eval())), float(loss_of_each(lm))
    return how if apart and abs(packed - alone) < CLOSE * alone else "no"


@torch.no_grad()
def exports(architecture: Architecture, folder: Path) -> tuple[str, str]:
    """Export a model and adapters on it; open both with transformers and peft; compare logits."""
    ids = torch.randint(3, 512, (1, 64), generator=torch.Generator().manual_seed(2))
    lm = built(architecture)
    model.init_weights(lm, 0, CPU)
    noisy(lm, "")
    model.export(lm, open_storage(str(folder / "model")))
    opened = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    logits = lm.eval().hf(input_ids=ids, use_cache=False).logits
    whole = torch.allclose(opened(input_ids=ids, use_cache=False).logits, logits, atol=1e-3)
    adapted = built(architecture, Lora(rank=4))
    model.load_weights(adapted, model.resolve(str(folder / "model")), CPU)
    model.init_adapters(adapted, 0)
    noisy(adapted, "lora_B")
    model.export_adapters(adapted, open_storage(str(folder / "adapter")), base="base")
    tuned = PeftModel.from_pretrained(opened, folder / "adapter").eval()
    wanted = adapted.eval().hf(input_ids=ids, use_cache=False).logits
    assert not torch.allclose(wanted, logits, atol=1e-3), "the adapters have an effect"
    same = torch.allclose(tuned(input_ids=ids, use_cache=False).logits, wanted, atol=1e-3)
    return yes(whole), yes(same)


def yes(said: bool) -> str:
    return "yes" if said else "no"


def line(architecture: Architecture, folder: Path) -> str:
    """Return the architecture's line of the table."""
    ratios, missed = [], 0
    for checkpointing in ("none", "full"):
        planned, traced, difference = memory(architecture, checkpointing)
        assert planned == pytest.approx(traced, rel=0.10)
        ratios.append(f"{planned / traced:.2f}")
        missed += abs(difference)
    lm = built(architecture)
    model.init_weights(lm, 0, CPU)
    noisy(lm, "")
    whole, adapter = exports(architecture, folder)
    cells = [architecture.name, lm.hf.config.model_type, yes(missed == 0), ", ".join(ratios)]
    return "| " + " | ".join([*cells, packs(lm), whole, adapter]) + " |"


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.kind)
def test_an_exported_config_is_read_as_it_was(architecture: Architecture, tmp_path: Path) -> None:
    """Its names for transformers 4 change no rotary setting of transformers 5."""
    config = architecture.config()
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    write_small_files(hf, open_storage(str(tmp_path)), {}, None, None, torch.bfloat16, {})
    again = AutoConfig.from_pretrained(tmp_path)
    for name in ("rope_parameters", "layer_types"):
        assert getattr(again, name, None) == getattr(config, name, None), name


def test_the_config_of_any_family_is_read_as_it_was() -> None:
    """As above, for every causal model of transformers by its defaults, where it has any."""
    changed, count = {}, 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            values = AutoConfig.for_model(kind).to_dict()
            before = AutoConfig.for_model(**values).to_dict()
        except (KeyError, ValueError, TypeError, StrictDataclassError):
            continue
        count += 1
        after = AutoConfig.for_model(**values | small_files._rotary_of_version_4(values)).to_dict()
        if after.get("rope_parameters") != before.get("rope_parameters"):
            changed[kind] = (before.get("rope_parameters"), after.get("rope_parameters"))
    assert changed == {} and count > 100


@pytest.mark.full
def test_the_page_says_what_becomes_of_each_architecture(tmp_path: Path) -> None:
    lines = [
        "| architecture | model_type | parameters | memory | packs | export | LoRA export |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, architecture in enumerate(ARCHITECTURES):
        lines.append(line(architecture, tmp_path / str(number)))
    assert len(ARCHITECTURES) >= 18
    page = PAGE.read_text(encoding="utf-8")
    made = BEGIN + "\n".join(lines) + "\n" + END
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    if os.environ.get("GOLDEN") == "write":
        PAGE.write_text(before + made + after, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == before + made + after, "if meant so, GOLDEN=write"
    assert " no |" not in made
