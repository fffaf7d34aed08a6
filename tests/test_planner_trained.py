"""The model that is planned, checked and trained is one: its vocabulary, and where it starts."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rayapp import model, planner
from rayapp.cli import plans
from rayapp.config import Config, from_dict
from rayapp.data import tokens
from rayapp.driver.checks import plan_problem
from rayapp.finetune import check as checks
from rayapp.finetune import plan_lines as show
from rayapp.finetune.model_parts import model_shape
from rayapp.order import Order
from rayapp.planner import trained
from rayapp.storage import open_storage
from rayapp.train.planning import forecast

OWN = 700
TOKENIZERS = {"bytes": 259, "bpe:300": 300, "bpe:900": 900, "folder": 400, "large": 5000}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model folder, and tokenizers of 400 and 5000 tokens."""
    root = tmp_path_factory.mktemp("folders")
    transformers.LlamaConfig(
        vocab_size=OWN, hidden_size=64, intermediate_size=32, num_hidden_layers=1
    ).save_pretrained(root / "model")
    for name in ("folder", "large"):
        made = tokens.byte_tokenizer()
        made.add_tokens([f"<{number}>" for number in range(TOKENIZERS[name] - len(made))])
        tokens.save_tokenizer(made, open_storage(str(root / name)))
    return root


def drawn(root: Path, path: str, tokenizer: str | None, override: int | None) -> Config:
    named = str(root / tokenizer) if tokenizer in ("folder", "large") else tokenizer
    return from_dict(
        {
            "model": {
                "path": str(root / "model") if path == "model" else path,
                "from_scratch": True,
                "tokenizer": named,
                "overrides": {} if override is None else {"vocab_size": override},
            },
            "data": {"path": "none", "seq_len": 64},
            "train": {"micro_batch": 1, "tokens_per_step": 64},
        }
    )


@settings(deadline=None, max_examples=60)
@given(
    path=st.sampled_from(["tiny", "llama3.2-1b", "dolly-v2-7b", "model"]),
    tokenizer=st.sampled_from([None, *TOKENIZERS]),
    override=st.sampled_from([None, 350, 6000]),
)
def test_what_is_planned_is_checked_and_trained(
    folders: Path, path: str, tokenizer: str | None, override: int | None
) -> None:
    if path == "model" and tokenizer is None:
        tokenizer = "folder"  # a model folder's own tokenizer is loaded alike
    config = drawn(folders, path, tokenizer, override)
    base = model.resolve(config.model.path)
    loaded = None
    if tokenizer in ("folder", "large"):
        loaded = tokens.load_tokenizer(str(folders / tokenizer))
        assert trained.tokens_of(str(folders / tokenizer)) == len(loaded)
    size = TOKENIZERS.get(tokenizer or "", override or base.config.vocab_size)
    assert loaded is None or len(loaded) == size
    fits = path != "model" and override is None
    fits = fits or size <= (override or base.config.vocab_size)
    problem = checks.vocabulary_problem(config, base, loaded)
    assert (problem is None) is fits, problem
    checked = forecast(config, model_shape(base, config, None if loaded is None else len(loaded)))
    of_the_run = model_shape(base, config, size)
    planned = planner.plan(config).question.layout.shape
    assert checked is not None and checked.question.layout.shape == planned
    assert planned.vocabulary == of_the_run.vocab_size
    assert forecast(config, of_the_run).question.layout.shape == planned  # type: ignore[union-attr]
    if fits:
        assert size <= of_the_run.vocab_size


@pytest.mark.parametrize("tokenizer", ["bpe:4096", "bytes"])
def test_the_check_before_a_run_is_of_the_vocabulary_that_is_trained(tokenizer: str) -> None:
    config = from_dict(
        {
            "model": {"path": "llama3.2-1b", "tokenizer": tokenizer},
            "data": {"seq_len": 2048},
            "train": {"micro_batch": 4, "tokens_per_step": 262144, "loss_chunk": 0, "max_steps": 1},
            "cluster": {"workers": 4, "instance": "g5.12xlarge"},
        }
    )
    shape = model_shape(model.resolve("llama3.2-1b"), config, None)
    assert plan_problem(config, lambda each: forecast(each, shape)) is None
    assert planner.plan(config).fits


def test_a_tokenizer_of_a_preset_that_is_not_on_this_machine_is_refused() -> None:
    config = from_dict({"model": {"path": "tiny", "tokenizer": "someone/something"}})
    with pytest.raises(
        planner.ConfigError, match=r"model.tokenizer=someone/something is not on this"
    ):
        planner.plan(config)


def test_the_tokenizer_of_bytes_has_as_many_tokens_as_are_planned() -> None:
    assert len(tokens.byte_tokenizer()) == trained.BYTES_TOKENS
    assert len(tokens.train_bpe(iter(["ab"]), 10)) == trained.tokens_of("bpe:10")


@pytest.mark.parametrize(
    ("path", "from_scratch", "said"),
    [
        ("llama3.1-8b", False, "from random weights: the preset llama3.1-8b has no weights. "),
        ("tiny", True, "To fine-tune, set model.path to a model folder or hub id"),
        ("model", True, "To fine-tune, set model.from_scratch=false"),
        ("model", False, None),
    ],
)
def test_random_weights_are_said_by_plan_and_run(
    folders: Path,
    path: str,
    from_scratch: bool,
    said: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(folders / "model") if path == "model" else path
    words = [f"--model.path={path}", f"--model.from_scratch={from_scratch}"]
    assert plans.plan([*words, "--train.micro_batch=1"]) == (path == "llama3.1-8b")  # too large
    printed = " ".join(capsys.readouterr().out.split())
    config = from_dict(
        {
            "model": {"path": path, "from_scratch": from_scratch, "lora": {"rank": 4}},
            "train": {"micro_batch": 1, "tokens_per_step": 1024},
        }
    )
    counts = {"documents": 1, "tokens": 9, "rows": 1, "lengths": {"2^3": 1}, "split": 0}
    counts |= {"truncated": 0, "cut_tokens": 0}
    report = {"train": counts, "eval": counts, "fill": 1.0, "loss_share": 1.0}
    report |= {"duplicates": 0.0, "bad": {}}
    prepared: Any = SimpleNamespace(report=lambda: report, epoch_rows=1, windows=None, packings=())
    order = Order.for_steps(1, 1, 1, seed=0, num_steps=1)
    out = io.StringIO()
    show.plan(Console(file=out, width=10_000), config, prepared, order, 1000, 12)
    run = " ".join(out.getvalue().split())
    assert "1,000 parameters (12 trained, LoRA)" in run
    whole = config.model_copy(update={"model": config.model.model_copy(update={"lora": None})})
    show.plan(Console(file=out, width=10_000), whole, prepared, order, 1000, 1000)
    assert "1,000 parameters (all trained)" in out.getvalue()
    for text in (printed, run):
        assert (said in text) if said else ("random weights" not in text)
