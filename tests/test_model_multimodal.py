"""Checkpoints of text and images: the text decoder is trained, and the whole is exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_trace import trace
from peft import PeftModel
from reference import grid, made, product
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from rayapp import model
from rayapp.__main__ import main
from rayapp.config import Lora, load
from rayapp.model.build import beside_text
from rayapp.model.lora_layers import linear_names
from rayapp.model.sharding import find_blocks
from rayapp.planner.memory import Layout
from rayapp.train.planning import plan

TEXT = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "head_dim": 16}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": made.VOCABULARY}
TEXT |= {"sliding_window": 16, "query_pre_attn_scalar": 16, "max_position_embeddings": 256}
TEXT |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "pad_token_id": 0}
IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "patch_size": 14}
IMAGES |= {"num_attention_heads": 2, "image_size": 28, "vision_use_head": False}
IMAGE_TOKEN = made.VOCABULARY - 1
PROCESSOR = b'{"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}}'
ADAPTERS = {"rank": 4, "alpha": 8}


def tiny() -> Gemma3Config:
    tokens = {"boi_token_index": IMAGE_TOKEN - 2, "eoi_token_index": IMAGE_TOKEN - 1}
    tokens |= {"image_token_index": IMAGE_TOKEN, "mm_tokens_per_image": 4}
    return Gemma3Config(text_config=dict(TEXT), vision_config=dict(IMAGES), **tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `model`, a small checkpoint, and files of text."""
    root = tmp_path_factory.mktemp("multimodal")
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(tiny()).save_pretrained(root / "model")
    made.bpe().save_pretrained(root / "model")
    (root / "model" / "preprocessor_config.json").write_bytes(PROCESSOR)
    return root


@torch.no_grad()
def logits(hf: Any, image: bool = True) -> torch.Tensor:
    ids = torch.arange(5, 29)[None]
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    if not image:
        found = hf.eval()(input_ids=ids)
    else:
        ids[0, 4:8] = IMAGE_TOKEN
        found = hf.eval()(input_ids=ids, pixel_values=pixels, token_type_ids=ids == IMAGE_TOKEN)
    return torch.as_tensor(found.logits)


def opened(path: Path) -> Any:
    hf, report = AutoModelForImageTextToText.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return hf


def encoder(hf: Any) -> dict[str, torch.Tensor]:
    parts = ("model.vision_tower.", "model.multi_modal_projector.")
    found = {name: t for name, t in hf.state_dict().items() if name.startswith(parts)}
    assert len(found) == len(hf.state_dict()) - len(hf.model.language_model.state_dict()) - 1
    return found


def test_blocks_and_adapters_are_those_of_the_text_decoder() -> None:
    lm = model.build(tiny(), loss=model.no_loss)
    assert [type(block).__name__ for block in find_blocks(lm.hf)] == ["Gemma3DecoderLayer"] * 6
    parts = beside_text(lm.hf)
    assert [type(part).__name__ for part in parts] == [
        "SiglipVisionModel",
        "Gemma3MultiModalProjector",
    ]
    trained = {name for name, p in lm.named_parameters() if p.requires_grad}
    assert trained and all("language_model" in name for name in trained)
    names = linear_names(lm.hf)
    assert "q_proj" in names and "fc1" not in names
    model.add_adapters(lm, Lora(rank=4))
    adapted = {name for name, p in lm.named_parameters() if p.requires_grad}
    assert len(adapted) == 2 * 7 * 6 and all("language_model" in name for name in adapted)


def test_models_of_text_alone_have_nothing_beside_it() -> None:
    for name in ("tiny", "gemma3-1b", "gpt-oss-20b"):
        lm = model.build(model.resolve(name).config, loss=model.no_loss, attention="eager")
        assert beside_text(lm.hf) == []
        assert all(p.requires_grad for p in lm.parameters())


def test_the_plan_counts_the_encoder_beside_the_text(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--data.seq_len=128", "--train.tokens_per_step=1024", "--train.micro_batch=1"]
    machine = ["--cluster.workers=8", "--cluster.instance=g5.48xlarge"]
    machine += ["--parallel.strategy=full_shard", "--train.compile=false"]
    asked = ["plan", f"--model.path={folder / 'model'}", *sizes, *machine]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    hf = opened(folder / "model")
    beside = sum(p.numel() for name, p in hf.named_parameters() if "language_model" not in name)
    assert found["parameters"] == sum(p.numel() for p in hf.parameters())
    assert found["trainable_parameters"] == found["parameters"] - beside
    layout = plan(load(None, dict(each[2:].split("=", 1) for each in asked[1:]))).question.layout
    assert isinstance(layout, Layout)
    config = model.resolve(str(folder / "model")).config
    traced = trace(config, world=8, micro_batch=1, seq_len=128).peak_bytes
    assert replace(layout, on_cpu=True).peak().total == pytest.approx(traced, rel=0.10)
    assert main(asked) == 0
    assert "trained (the text decoder)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.full
def test_the_text_is_trained_and_the_whole_checkpoint_exported(folder: Path) -> None:
    """On two workers; images give the logits that they give with the trained decoder alone."""
    fields = grid.BASE | {"train.max_steps": 2, "train.warmup_steps": 0}
    fields |= {"model.path": str(folder / "model")}
    fields |= {"data.path": str(made.make_data(folder)["text"])}
    runs = [
        product.Run("whole", fields, ((2, None),)),
        product.Run("adapter", fields | {"model.lora": ADAPTERS}, ((2, None),)),
        product.Run("merged", fields | {"model.lora": ADAPTERS | {"merge": True}}, ((2, None),)),
    ]
    done = product.run(runs, folder)
    before = opened(folder / "model")
    for name, each in done.items():
        assert each.summary["export_check"]["difference"] < 1e-5, name
    for name in ("whole", "merged"):
        exported = opened(done[name].folder / "model")
        after = encoder(exported)
        assert all(torch.equal(after[key], value) for key, value in encoder(before).items())
        assert not torch.allclose(logits(exported), logits(before))
        copied = done[name].folder / "model" / "preprocessor_config.json"
        assert copied.read_bytes() == PROCESSOR
    merged = opened(done["merged"].folder / "model")
    tuned = PeftModel.from_pretrained(before, done["adapter"].folder / "model")
    for image in (False, True):
        torch.testing.assert_close(logits(tuned, image), logits(merged, image))
    adapter = model.resolve(str(done["adapter"].folder / "model"))
    assert adapter.adapter is not None
    assert model.adapter_problems(adapter.adapter, adapter.config) == []
    text = json.loads((done["merged"].folder / "model" / "config.json").read_text())["text_config"]
    assert (text["rope_theta"], text["rope_local_base_freq"]) == (1e6, 1e4)
    assert text["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


@pytest.mark.full
def test_the_command_trains_it(folder: Path) -> None:
    sizes = ["--data.seq_len=64", "--train.tokens_per_step=256", "--train.max_steps=2"]
    sizes += ["--train.micro_batch=1", "--train.warmup_steps=0", "--train.precision=fp32"]
    where = [f"--run.storage={folder / 'runs'}", "--run.name=command", "--cluster.workers=1"]
    data = made.make_data(folder)["text"]
    call = [sys.executable, "-m", "rayapp.finetune", f"--model.path={folder / 'model'}"]
    call += [f"--data.path={data}", *sizes, *where]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": tempfile.mkdtemp()}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(call, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained, the text decoder" in done.stdout
    result = json.loads((folder / "runs" / "command" / "result.json").read_text())
    assert result["steps"] == 2 and result["export_check"]["difference"] < 1e-5
    opened(folder / "runs" / "command" / "model")
