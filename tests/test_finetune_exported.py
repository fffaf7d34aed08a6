"""Check the exported folder against the model that was trained: real runs, and spoilt folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_finetune_start import LORA, named, with_model
from test_train_loop import config_of, inputs, spec_of, train  # noqa: F401  a fixture

from rayapp.config import Config
from rayapp.finetune import exported, trainer
from rayapp.model import WrongExport
from rayapp.observe.run_folder import MODEL
from rayapp.storage import Storage
from rayapp.train.spec import LanguageSpec

QUANTIZED = LORA.model_copy(update={"quantize": "nf4"})
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "whole": ({}, {}, 4),
    "whole-bf16": ({}, {"precision": "bf16"}, 4),
    "adapter": ({"lora": LORA}, {"lr": 3e-2}, 4),
    "merged": ({"lora": LORA.model_copy(update={"merge": True})}, {"lr": 3e-2}, 4),
    "base-in-4-bits": ({"lora": QUANTIZED}, {}, 0),
    "no-base": ({"lora": LORA, "from_scratch": True}, {}, 0),
}


def but_for(names: Any, *fast: str) -> list[Any]:
    """Return parameters of which `make test` runs the fast ones alone."""
    return [pytest.param(n, marks=() if n in fast else pytest.mark.full) for n in names]


@pytest.mark.parametrize("name", but_for(RUNS, "adapter"))
def test_what_a_run_exports_is_what_it_trained(name: str, inputs: Path) -> None:  # noqa: F811
    model, fields, rows = RUNS[name]
    config = with_model(config_of(inputs, f"exported-{name}", **fields), **model)
    _, summary = train(config, inputs, world=2, num_steps=6)
    found = summary["export_check"]
    assert found["rows"] == rows
    if rows:
        assert found["why"] is None
        assert found["difference"] < (1e-5 if fields.get("precision") != "bf16" else 2e-2)
    else:
        assert found["difference"] is None and "the base" in found["why"]


def double(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name)
    save_file(tensors | {name: 2 * tensors[name]}, folder / "model.safetensors", {"format": "pt"})


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def another_rotation(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["rope_theta"] = values["rope_parameters"]["rope_theta"] = 7.0
    (folder / "config.json").write_text(json.dumps(values))


def break_tokenizer(folder: Path, text: str | None = None) -> None:
    file = folder / "tokenizer.json"
    file.write_text(text or file.read_text().replace('"a":', '"aa":'))


def cut_off(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])


DIFFERS = r"is another model than was trained: its logits on 4 rows differ by 0\.\d+ of their norm"
SPOILT: dict[str, tuple[Callable[[Path], None], str, bool]] = {
    "another weight": (double, DIFFERS, False),
    "a weight less": (lose_a_tensor, "lacks 1 of the model's tensors", False),
    "another rotation": (another_rotation, DIFFERS, False),
    "broken tokenizer": (lambda folder: break_tokenizer(folder, "{"), "does not open: ", False),
    "another tokenizer": (break_tokenizer, "has another tokenizer than the run", False),
    "large, a weight less": (lose_a_tensor, "lacks 1 of the model's tensors", True),
    "large, cut off": (cut_off, "is truncated", True),
}


def spoiling_worker(rank: int, world: int, spec: LanguageSpec, case: str) -> None:
    """Train no step, with an export that goes wrong in one way; all ranks raise the same."""
    from test_train_loop import worker

    spoil, said, large = SPOILT[case]
    original = trainer.export_model

    def export(spec: LanguageSpec, parts: Any, ends: Any, storage: Storage, device: Any) -> None:
        original(spec, parts, ends, storage, device)
        if rank == 0:
            spoil(Path((storage / MODEL).url))

    trainer.export_model = export
    exported.MOST_BYTES = 0 if large else exported.MOST_BYTES
    with pytest.raises(WrongExport, match=said) as caught:
        worker(rank, world, spec, "", False)
    assert "\n" not in str(caught.value)
    torch.distributed.barrier()


@pytest.mark.parametrize("case", but_for(SPOILT, "another weight"))
def test_an_export_that_went_wrong_ends_the_run(case: str, inputs: Path) -> None:  # noqa: F811
    name = "spoilt-" + "".join(filter(str.isalpha, case))
    config: Config = named(config_of(inputs, "x"), name)
    spec = spec_of(config, inputs, num_steps=0)
    processes.spawn(spoiling_worker, 2, str(inputs / name), spec, case)
