"""Every config that is shipped passes its own checks, with stand-ins where it names the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import as_folder, drawn
from reference import made
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from rayapp.__main__ import main
from rayapp.config import Config, VisionConfig, load
from rayapp.data.kinds import are_pairs, takes_template
from rayapp.finetune import check as language
from rayapp.model import gguf
from rayapp.presets import PRESETS
from rayapp.storage import open_storage
from rayapp.vision import classifier_run as vision

FOLDER = Path(__file__).parent.parent / "configs"
CONFIGS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
SMOLLM = "smollm2-135m-instruct"
SIZES = {"vocab_size": made.VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 4096}
# What the configs say is to be given, below the folder that a command is run from.
MODELS = ("Llama-2-7b-hf", "Llama-2-13b-hf", "Llama-2-70b-hf", "Llama-3.1-8B")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the configs name: small models by their ids, and their data."""
    root = tmp_path_factory.mktemp("configs")
    tokenizer, files = made.bpe(), made.make_data(root)
    instruct = root / "meta-llama" / "Llama-3.1-8B-Instruct"
    tokenizer.save_pretrained(instruct)
    tokenizer.chat_template = None  # base models have none
    torch.manual_seed(0)
    for name in MODELS:
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(root / "meta-llama" / name)
        tokenizer.save_pretrained(root / "meta-llama" / name)
    neox = root / "databricks" / "dolly-v2-7b"
    GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)).save_pretrained(neox)
    tokenizer.save_pretrained(neox)
    for kind, path in {"chat": "chats.jsonl", "prompt": "samsum/train.jsonl"}.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(files[kind].read_bytes())
    (root / "c4" / "en").mkdir(parents=True)
    (root / "c4" / "en" / "part.jsonl").write_bytes(files["text"].read_bytes())
    (root / "tinyshakespeare.txt").write_text("To be, or not to be.\n" * 400)
    as_folder(root / "images", drawn(3, 4))
    shutil.copytree(FOLDER.parent / "examples", root / "examples")
    package = PRESETS[SMOLLM].package
    assert package is not None
    weights = gguf._place(package.file, package.sha256, open_storage(str(root / "runs/.prepared")))
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(weights.url)
    made.bpe().save_pretrained(weights.url)
    weights.write(gguf.READ, b"")
    return root


def section(name: str) -> dict[str, Any]:
    found: dict[str, Any] = load(str(FOLDER / f"{name}.yaml"), {}, kind_of(name)).model_dump()
    return found


def kind_of(name: str) -> Any:
    text = (FOLDER / f"{name}.yaml").read_text()
    return VisionConfig if "task: vision" in text else Config


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_planned_and_fits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is of the shapes that are published; no network is needed."""
    assert main(["plan", str(FOLDER / f"{name}.yaml"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is not False and found["peak_gib"]["value"] > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_it_passes_the_checks_of_a_run(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    kind, more = kind_of(name), {"run.storage": str(place / "runs")}
    on_cluster = section(name)["cluster"]["instance"] is not None
    cores = None if on_cluster else 4
    if kind is VisionConfig:
        if on_cluster:  # what lies there
            more |= {"data.path": str(place / "images"), "data.eval_path": str(place / "images")}
        ready: Any = vision.check(load(str(FOLDER / f"{name}.yaml"), more, kind), cores, 0)
        assert ready.source.files
        return
    ready = language.check(load(str(FOLDER / f"{name}.yaml"), more, kind), cores, 0)
    kind_of_record = ready.inputs[0].kind
    assert are_pairs(kind_of_record) == (ready.config.train.objective != "sft")
    if takes_template(kind_of_record):
        assert ready.tokenizer.chat_template
