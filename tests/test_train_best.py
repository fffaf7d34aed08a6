"""The best evaluation of a run, when it has enough, and its gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import made, product
from safetensors.torch import load_file

from rayapp.config import ConfigError, load
from rayapp.config.tasks import Condition
from rayapp.train.best import BestSoFar, judged

SHAPE = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}


def taken(best: BestSoFar, *values: float | None) -> list[bool]:
    return [best.take(step, {"eval_loss": value}) for step, value in enumerate(values, 1)]


def test_the_best_is_the_first_of_equals_and_ends_a_run_by_patience() -> None:
    best = BestSoFar("eval_loss", patience=2)
    assert taken(best, None, 3.0, 2.0, 2.0) == [False, True, True, False]
    assert best.best is not None and (best.best["step"], best.best["since"]) == (3, 1)
    assert not best.enough
    assert taken(best, float("nan")) == [False] and best.enough
    again = BestSoFar("eval_loss", patience=3)
    again.resume(best.best)
    assert not again.enough
    again = BestSoFar("dates", higher=True)
    again.resume(best.best)
    assert again.best is None, "the best by another figure"
    assert again.take(5, {"eval_metrics": {"dates": 0.5}})
    assert again.take(6, {"eval_metrics": {"dates": 0.6}}) and not again.enough
    assert not BestSoFar(None, patience=1).take(1, {"eval_loss": 1.0})


@pytest.mark.parametrize(
    ("condition", "value", "before", "met"),
    [
        ("dates >= 0.9", 0.9, None, True),
        ("dates>0.9", 0.9, None, False),
        ("dates < -1.5", -2.0, None, True),
        ("dates <= base + 0.1", 1.0, 0.95, True),
        ("dates <= base - 0.1", 1.0, 0.95, False),
        ("dates >= base", 1.0, 1.0, True),
        ("dates >= base", 1.0, None, False),
        ("dates >= 0.1", None, 1.0, False),
    ],
)
def test_a_condition_is_met(
    condition: str, value: float | None, before: float | None, met: bool
) -> None:
    figures: list[Any] = [{"eval_metrics": {"dates": each}} for each in (value, before)]
    (found,) = judged([Condition.parse(condition)], *figures)
    assert (found["condition"], found["value"], found["met"]) == (condition, value, met)


@pytest.mark.parametrize("text", ["dates = 1", "dates >= 0.9.1", "0.9 <= dates", "a >= base * 2"])
def test_other_text_is_no_condition(text: str) -> None:
    with pytest.raises(ConfigError, match=r"eval\.gate"):
        load(None, {"eval.gate": [text]})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"checkpoint.best": "eval_loss"}, "checkpoint.best=eval_loss is ineffective"),
        ({"checkpoint.best": "dates", "eval.every_steps": 1}, "no evaluation .* figure dates"),
        ({"eval.patience": 2}, "eval.patience=2 is ineffective"),
        ({"eval.gate": "dates > 0.9"}, r"eval.gate=dates > 0.9 is not possible.*Set one of eval_l"),
        ({"eval.gate": "eval_loss < 1", "data.eval_fraction": 0}, "Set one of eval.tasks"),
    ],
)
def test_figures_that_no_evaluation_has_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(None, fields)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, product.Done]:
    """Runs that learn few texts by heart, so that the held-out loss falls and then rises."""
    root = tmp_path_factory.mktemp("runs")
    files = made.make_data(root)
    lines = files["text"].read_text().splitlines()
    (root / "few.jsonl").write_text("\n".join(lines[:6]))
    (root / "others.jsonl").write_text("\n".join(lines[6:16]))
    made.bpe().save_pretrained(root / "tokenizer")
    base = {
        "model.path": "tiny",
        "model.overrides": SHAPE,
        "model.tokenizer": f"{root}/tokenizer",
        "data.path": f"{root}/few.jsonl",
        "data.eval_path": f"{root}/others.jsonl",
        "data.seq_len": 64,
        "train.tokens_per_step": 256,
        "train.micro_batch": 2,
        "train.max_steps": 40,
        "train.lr": 0.004,
        "train.schedule": "constant",
        "train.precision": "fp32",
        "checkpoint.keep": 1,
        "eval.every_steps": 2,
    }
    best = base | {"checkpoint.best": "eval_loss", "eval.patience": 2}
    gates = [f"eval_loss <= base - {less}" for less in (0.1, 9.0)]
    found = product.run(
        [
            product.Run("one", best),
            product.Run("killed", best | {"checkpoint.every_steps": 3}, ((1, 7), (2, None))),
            product.Run("met", best | {"eval.gate": gates[:1]}, ((2, None),)),
            product.Run("whole", best | {"eval.patience": "none"}),
            product.Run("rejected", best | {"eval.gate": gates}),
        ],
        root,
    )
    step = found["one"].summary["best"]["step"]
    until = {"train.max_steps": step, "eval.every_steps": "none"}
    return found | product.run([product.Run("until", base | until)], root)


def weights(done: product.Done) -> dict[str, torch.Tensor]:
    return load_file(done.folder / "model" / "model.safetensors")


def test_a_run_ends_when_it_has_enough_and_exports_the_best(runs: dict[str, product.Done]) -> None:
    one = runs["one"]
    losses = {line["step"]: line["eval_loss"] for line in one.metrics if line["step"] % 2 == 0}
    step = min(losses, key=losses.__getitem__)
    assert step > 2 and one.summary["status"] == "done"
    assert one.summary["steps"] == step + 4 == max(losses) < 40
    assert one.summary["best"]["step"] == step and one.summary["eval_loss"] == losses[step]
    kept = [name.name for name in (one.folder / "checkpoints").iterdir()]
    assert sorted(kept) == [f"step-{step:08d}", f"step-{step + 4:08d}"]
    expected = weights(runs["until"])
    for name, tensor in weights(one).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


def test_a_run_to_its_end_tells_its_last_evaluation_too(runs: dict[str, product.Done]) -> None:
    one, whole = runs["one"].summary, runs["whole"].summary
    assert whole["steps"] == 40 > whole["best"]["step"] >= one["best"]["step"]
    assert whole["last"]["step"] == 40 and whole["last"]["eval_loss"] > whole["eval_loss"]
    assert whole["eval_loss"] <= one["eval_loss"] and "last" not in one


@pytest.mark.parametrize("name", ["killed", "met"])
def test_two_workers_and_a_resume_have_the_same_best(
    runs: dict[str, product.Done], name: str
) -> None:
    one, other = runs["one"].summary, runs[name].summary
    assert other["steps"] == one["steps"] and other["best"]["step"] == one["best"]["step"]
    assert other["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)
    expected = weights(runs["one"])
    for each, tensor in weights(runs[name]).items():
        torch.testing.assert_close(tensor, expected[each], rtol=1e-3, atol=1e-5)


def test_a_model_that_misses_a_condition_is_rejected_and_not_exported(
    runs: dict[str, product.Done],
) -> None:
    met, rejected = runs["met"], runs["rejected"]
    assert [each["met"] for each in met.summary["gate"]] == [True]
    assert [each["met"] for each in rejected.summary["gate"]] == [True, False]
    assert rejected.summary["status"] == "rejected" and rejected.summary["model_path"] is None
    assert "eval_loss <= base - 9.0 (it is" in rejected.summary["reason"]
    assert not Path(rejected.folder, "model").exists()
    before = met.summary["gate"][0]["limit"] + 0.1
    assert before == pytest.approx(8.32, abs=0.05), "of random weights: log(4096)"
