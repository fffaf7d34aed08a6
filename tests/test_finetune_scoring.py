"""Scores of eval.tasks: the same at any number of workers, kept, and compared with those before."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import processes
import pytest
import torch
import torch.nn.functional as F
from test_train_loop import config_of, inputs, spec_of, worker  # noqa: F401  a fixture
from transformers import AutoModelForCausalLM

from rayapp.config import load
from rayapp.config.code import code_in
from rayapp.config.tasks import EvalTask
from rayapp.data.task_items import Item, TaskItems
from rayapp.data.token_rows import local_steps
from rayapp.data.tokens import load_tokenizer
from rayapp.finetune import scoring as tasks
from rayapp.finetune.code_check import code_digests
from rayapp.finetune.scoring import bootstrapped, compared, estimate, judge_of
from rayapp.observe.records import TaskResult
from rayapp.observe.run_folder import items_file
from rayapp.storage import open_storage
from rayapp.train import schedule
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import LanguageSpec
from rayapp.train.step_sync import CONTINUE, STOP

STEPS = 6
COUNT = 11  # items
CASES = [
    ("exact", " yes\n", "yes", True),
    ("exact", "Yes", "yes", False),
    ("normalised", "The Eiffel  Tower.", "eiffel tower", True),
    ("normalised", "Eiffel", "eiffel tower", False),
    ("number", "3 + 4 = 7, so 1,024 of them.", "#### 1024", True),
    ("number", "about -2.50", "-2.5", True),
    ("number", "7 of 8", "7", False),
    ("number", "none", "7", False),
    ("json", '{"b": 2, "a": [1]}', '{"a": [1], "b": 2.0}', True),
    ("json", 'Here:\n```json\n{"a": 1}\n```\n', '{"a": 1}', True),
    ("json", '{"a": 1}, and more', '{"a": 1}', False),
    ("json", "[" * 100_000, "[]", False),
    ("regex", "It is Paris, France.", r"\bParis\b", True),
    ("regex", "Parisian", r"\bParis\b", False),
]


def test_a_function_of_yours_judges_and_one_that_raises_leaves_its_task_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "judges.py").write_text(
        "def longer(said, wanted):\n    return len(said) > len(wanted)\n\n"
        "def broken(said, wanted):\n    return said[7]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "judges", raising=False)
    longer = judge_of("judges:longer")
    assert longer("abc", "ab") and not longer("a", "ab")
    config = load(None, {"eval.tasks": {"t": {"path": "t.jsonl", "score": "judges:longer"}}})
    assert code_in(config.model_dump()) == [("eval.tasks.t.score", "judges:longer")]
    problems = list[str]()
    code_digests(config, open_storage(str(tmp_path)), problems)
    assert problems == []
    other = load(None, {"eval.tasks": {"t": {"path": "t.jsonl", "score": "judges:absent"}}})
    code_digests(other, open_storage(str(tmp_path)), problems)
    assert "eval.tasks.t.score=judges:absent cannot be imported" in problems[0]
    monkeypatch.setattr(tasks, "generated", lambda *_, **__: ["a word or two", "short"])
    engine: Any = SimpleNamespace(device=None, control=None, interruptible=False)
    items = (Item("q", "a", (1,), (2,)),) * 2
    task = TaskItems("t", EvalTask(path="x", score="judges:broken"), items)
    assert tasks._answers(task, cast(Any, None), engine, 8, stops=()) == []
    assert "eval.tasks.t.score=judges:broken has raised on the answer 'short'" in caplog.text


def items_for(folder: Path, score: str) -> TaskItems:
    """Return questions of several lengths; one answer is what the untrained model gives."""
    tokenizer = load_tokenizer(str(folder / "model"))
    made = []
    for number in range(COUNT):
        asked, wanted = f"Line {number * 7 ** (number % 4)}:", f" {'abc'[number % 3]} says"
        ids = (tokenizer(text)["input_ids"] for text in (asked, wanted))
        made.append(Item(asked, wanted, *map(tuple, ids)))
    if score == "choice":
        answers = [
            (f" {letter} says", tokenizer(f" {letter} says")["input_ids"]) for letter in "abc"
        ]
        made = [
            replace(
                item,
                choices=tuple(
                    replace(item, wanted=text, answer=tuple(ids)) for text, ids in answers
                ),
            )
            for item in made
        ]
    return TaskItems(score, EvalTask(path="x", score=score, max_tokens=8), tuple(made))


def scored(folder: Path, name: str, world: int) -> tuple[Path, Any]:
    """Train; return the run's folder and the summary."""
    config = config_of(folder, name, max_steps=STEPS)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every_steps": 4})})
    spec = replace(
        spec_of(config, folder, STEPS),
        tasks=tuple(items_for(folder, score) for score in ("regex", "loss", "choice", "base")),
    )
    rendezvous, summary = str(folder / f"{name}-{os.urandom(4).hex()}"), folder / f"{name}.json"
    processes.spawn(worker, world, rendezvous, spec, str(summary), False)
    return Path(spec.run_url), json.loads(summary.read_text())


@pytest.fixture(scope="module")
def done(inputs: Path) -> dict[int, tuple[Path, Any]]:  # noqa: F811
    return {world: scored(inputs, f"tasks-{world}", world) for world in (1, 2)}


def test_answers_and_losses_are_the_same_at_any_number_of_workers(
    done: dict[int, tuple[Path, Any]],
) -> None:
    for step in (0, 4, STEPS):
        one, two = (
            [json.loads(line) for line in (run / items_file(step)).read_text().splitlines()]
            for run, _ in done.values()
        )
        assert len(one) == 4 * COUNT
        assert [item.get("answer") for item in one] == [item.get("answer") for item in two]
        losses = [[item["nats"] for item in each if "nats" in item] for each in (one, two)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_scores_are_what_transformers_computes(
    done: dict[int, tuple[Path, Any]],
    inputs: Path,  # noqa: F811
) -> None:
    """Before the first step by the base's folder, at the end by the exported one."""
    run, summary = done[2]
    said = dict[tuple[int, ...], str]()
    for step, folder in ((0, inputs / "model"), (STEPS, run / "model")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        lines = [json.loads(line) for line in (run / items_file(step)).read_text().splitlines()]
        for item, answered, lost in zip(
            items_for(inputs, "loss").items, lines[:COUNT], lines[COUNT : 2 * COUNT], strict=True
        ):
            ids = torch.tensor([[*item.prompt, *item.answer]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(item.prompt) - 1 : -1]
                told = model.generate(
                    torch.tensor([item.prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0
                )
            nats = F.cross_entropy(logits, torch.tensor(item.answer), reduction="sum")
            assert lost["nats"] == pytest.approx(float(nats), rel=1e-3)
            text = load_tokenizer(str(folder)).decode(
                told[0, len(item.prompt) :], skip_special_tokens=True
            )
            assert answered["answer"] == text
        for item, chosen in zip(
            items_for(inputs, "choice").items, lines[2 * COUNT : 3 * COUNT], strict=True
        ):
            losses = {}
            for choice in item.choices:
                with torch.no_grad():
                    logits = model(torch.tensor([[*choice.prompt, *choice.answer]])).logits[0]
                told = logits[len(choice.prompt) - 1 : -1]
                losses[choice.wanted] = F.cross_entropy(
                    told, torch.tensor(choice.answer), reduction="sum"
                )
            assert chosen["answer"] == min(losses, key=lambda each: float(losses[each]))
            assert chosen["right"] == (chosen["answer"] == item.wanted)
        tokenizer = load_tokenizer(str(folder))
        for item, kept in zip(items_for(inputs, "base").items, lines[3 * COUNT :], strict=True):
            said.setdefault(item.prompt, kept["wanted"])
            assert kept["wanted"] == said[item.prompt], "the base's own answer, at each evaluation"
            ids = [*item.prompt, *tokenizer(kept["wanted"], add_special_tokens=False)["input_ids"]]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, len(item.prompt) - 1 : -1]
            nats = F.cross_entropy(logits, torch.tensor(ids[len(item.prompt) :]), reduction="sum")
            assert kept["nats"] == pytest.approx(float(nats), rel=1e-3, abs=1e-3)
    before, after = (summary["tasks"]["loss"][when] for when in ("before", "after"))
    assert after["value"] < before["value"] and before["low"] < before["value"] < before["high"]
    assert summary["eval_metrics"]["loss"] == after["value"]


def test_the_figures_are_in_the_metrics_of_each_evaluation(
    done: dict[int, tuple[Path, Any]],
) -> None:
    run, summary = done[1]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = {line["step"]: line["eval_metrics"] for line in lines if line["eval_metrics"]}
    assert [*told] == [4] and told[4].keys() == {"regex", "loss", "choice", "base"}
    right = summary["tasks"]["regex"]
    assert right["items"] == COUNT and len(right["shown"]) == 6
    assert {item["wanted"] for item in right["shown"]} == {" a says", " b says", " c says"}


def test_other_items_than_before_are_not_compared(
    done: dict[int, tuple[Path, Any]],
    inputs: Path,  # noqa: F811
) -> None:
    run, _ = done[1]
    storage, task = open_storage(str(run)), items_for(inputs, "regex")
    fewer = replace(task, items=task.items[1:])
    lines = (run / items_file(STEPS)).read_bytes().splitlines(keepends=True)
    storage.write(items_file(STEPS + 1), b"".join(lines[1:COUNT]))
    (result,) = compared([fewer], storage, STEPS + 1).values()
    assert result["before"] is None and result["items"] == COUNT - 1
    assert result["difference"] is None
    assert {item["before"] for item in result["shown"]} == {None}


def stopped_worker(rank: int, world: int, spec: LanguageSpec) -> None:
    """Train until someone asks rank 0 to stop as the base is scored."""
    asked: list[int] = []
    original = tasks.leave_now

    def leave(engine: Any) -> int:
        asked.append(1)
        return original(engine)

    tasks.leave_now = leave
    schedule.LeaveWatcher.due = lambda self: STOP if len(asked) >= 3 else CONTINUE  # type: ignore[method-assign]
    rows = spec.data.rows("train")
    context = RankContext(
        torch.device("cpu"), lambda step: local_steps(rows, spec.order, rank, world, step)
    )
    summary = train_rank(spec, context)
    assert (summary["status"], summary["steps"], len(asked)) == ("stopped", 0, 3)


def test_a_stop_ends_the_scoring_before_the_first_step(inputs: Path) -> None:  # noqa: F811
    config = config_of(inputs, "stopped-scoring", max_steps=STEPS)
    spec = replace(spec_of(config, inputs, STEPS), tasks=(items_for(inputs, "regex"),))
    processes.spawn(stopped_worker, 2, str(inputs / "meet-stopped"), spec)
    run = Path(spec.run_url)
    assert not (run / items_file(0)).exists()
    assert not (run / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(("score", "answer", "wanted", "right"), CASES)
def test_an_answer_is_right_or_not(score: str, answer: str, wanted: str, right: bool) -> None:
    assert judge_of(score)(answer, wanted) is right


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    # Source: statsmodels.stats.proportion.proportion_confint(count, of, method="wilson")
    [(0, 64, 0.0, 0.0566), (50, 64, 0.6657, 0.8644), (64, 64, 0.9434, 1.0), (1, 1, 0.2065, 1.0)],
)
def test_a_share_has_the_interval_of_wilson(count: int, of: int, low: float, high: float) -> None:
    found = estimate([True] * count + [False] * (of - count))
    assert found["value"] == count / of
    assert [found["low"], found["high"]] == pytest.approx([low, high], abs=1e-3)


def test_a_loss_has_an_interval_that_holds_the_mean_about_as_often_as_it_says() -> None:
    """Of 200 draws of 40 items from one distribution, 95 % within the binomial's bounds."""
    rng, held = np.random.default_rng(1), 0
    for _ in range(200):
        tokens = rng.integers(5, 30, 40)
        nats = rng.gamma(2.0, 0.75, 40) * tokens
        found = bootstrapped([[nats.tolist(), tokens.tolist()]])
        assert found["value"] == pytest.approx(nats.sum() / tokens.sum())
        held += found["low"] <= 1.5 <= found["high"]
    assert 175 <= held <= 200


def result_of(folder: Path, score: str, *figures: dict[str, list[Any]]) -> TaskResult:
    """Compare the figures of items, by name, before the first step and after one."""
    storage, task = open_storage(str(folder)), TaskItems("t", EvalTask(path="t", score=score), ())
    for step, columns in enumerate(figures):
        lines = [
            {"task": "t", "asked": f"{number}?", "wanted": "w", "answer": "a"}
            | dict(zip(columns, values, strict=True))
            for number, values in enumerate(zip(*columns.values(), strict=True))
        ]
        storage.write(items_file(step), "".join(f"{json.dumps(x)}\n" for x in lines).encode())
    return compared([task], storage, 1)["t"]


def test_a_difference_is_of_the_same_items(tmp_path: Path) -> None:
    """Oracle: the change of the means by numpy, of items drawn by index; both of an item at once.

    The items vary far more than they change, so that intervals without pairs would be wide.
    """
    rng = np.random.default_rng(5)
    tokens, hard = rng.integers(5, 30, 60), rng.gamma(2.0, 0.75, 60)
    one = hard * tokens
    other = (hard - 0.1 + rng.normal(0, 0.02, 60)) * tokens
    right = [rng.random(60) < 0.3 for _ in range(2)]
    drawn = np.random.default_rng(0).integers(0, 60, (2000, 60))
    losses = (other - one)[drawn].sum(1) / tokens[drawn].sum(1)
    shares = right[1][drawn].mean(1) - right[0][drawn].mean(1)
    nats = [{"nats": each.tolist(), "tokens": tokens.tolist()} for each in (one, other)]
    for result, value, resampled in (
        (result_of(tmp_path, "loss", *nats), (other.sum() - one.sum()) / tokens.sum(), losses),
        (
            result_of(tmp_path, "exact", *({"right": each.tolist()} for each in right)),
            right[1].mean() - right[0].mean(),
            shares,
        ),
    ):
        found = result["difference"]
        assert found is not None and found["value"] == pytest.approx(value)
        assert [found["low"], found["high"]] == pytest.approx(
            [np.quantile(resampled, 0.025), np.quantile(resampled, 0.975)]
        )
    assert losses.std() < 0.01 and found["low"] < found["value"] < found["high"]


@pytest.mark.parametrize("score", ["exact", "loss"])
def test_equal_answers_differ_by_nothing(tmp_path: Path, score: str) -> None:
    same = {"right": [True, False, True]} if score == "exact" else {}
    same |= {"nats": [3.1, 0.7, 12.9], "tokens": [3, 1, 7]}
    result = result_of(tmp_path, score, same, same)
    assert result["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}


def test_a_difference_that_is_noise_has_zero_in_its_interval_about_as_often_as_it_says() -> None:
    """Of 200 pairs of scores of the same model, 95 % within the binomial's bounds."""
    rng, held = np.random.default_rng(2), 0
    for _ in range(200):
        easy = rng.random(60)  # how often each item is answered right
        one, other = ((rng.random(60) < easy).tolist() for _ in range(2))
        found = bootstrapped([[one, [1] * 60], [other, [1] * 60]])
        held += found["low"] <= 0 <= found["high"]
    assert 180 <= held <= 198
