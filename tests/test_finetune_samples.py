"""Prompts that are continued while a run trains: the answers, and that training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from test_train_loop import config_of, inputs, spec_of, train  # noqa: F401  a fixture
from transformers import AutoModelForCausalLM

from rayapp.config import Config, from_dict
from rayapp.data.rows import local_steps
from rayapp.data.tokens import load_tokenizer
from rayapp.finetune import samples
from rayapp.storage import open_storage
from rayapp.train import schedule, waiting
from rayapp.train.checkpoint.marker import latest
from rayapp.train.engine import Engine
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import LanguageSpec
from rayapp.train.step_sync import STAY, STOP

PROMPTS = ["Line 1", "Line 22: bbb says 4", ""]
STEPS, EVERY = 6, 2


def with_prompts(folder: Path, name: str, prompts: list[str], **sections: Any) -> Config:
    tree = config_of(folder, name, max_steps=STEPS).model_dump(mode="json")
    tree["eval"] |= {"prompts": prompts, "every_steps": EVERY}
    for section, values in sections.items():
        tree[section] |= values
    return from_dict(tree)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_training_is_the_same_with_and_without_prompts(inputs: Path, dropout: float) -> None:  # noqa: F811
    """Dropout draws from the random state, which sampling must leave alone."""
    model = {"lora": {"rank": 4, "dropout": dropout}} if dropout else {}
    found = {}
    for name, prompts in (("asked", PROMPTS), ("plain", [])):
        config = with_prompts(inputs, f"{name}-{dropout}", prompts, model=model)
        found[name] = train(config, inputs, world=2, num_steps=STEPS)
    (lines, summary), (expected, whole) = found["asked"], found["plain"]
    for field in ("loss", "grad_norm", "batch_digest", "eval_loss", "eval_loss_per_byte"):
        assert [line[field] for line in lines] == [line[field] for line in expected], field
    assert summary["eval_loss"] == whole["eval_loss"]
    asked = [line["step"] for line in lines if line["eval_samples"] is not None]
    assert asked == [2, 4] and "eval_samples" not in whole
    assert not any(line["eval_samples"] for line in expected)
    for line in (lines[1], lines[3], summary):
        assert [prompt for prompt, _ in line["eval_samples"]] == PROMPTS
    if not dropout:
        told = dict(summary["eval_samples"])
        assert told == {
            prompt: likeliest(Path(summary["model_path"]), prompt) for prompt in PROMPTS
        }
        assert len(set(told.values())) == len(PROMPTS)  # the rows of a batch are not mixed up


def likeliest(folder: Path, prompt: str) -> str:
    """Continue a prompt by transformers' own greedy search."""
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if not ids.shape[1]:
        return ""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        made = model.generate(
            ids, max_new_tokens=samples.AT_EVALUATION, do_sample=False, pad_token_id=0
        )
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def stopped_worker(rank: int, world: int, spec: LanguageSpec, after: int) -> None:
    """Train until someone asks rank 0 to stop as the prompts are continued."""
    asked: list[int] = []
    original = waiting.ask_all

    def ask(engine: Engine, count: int) -> Any:
        if engine.phases.current.phase == "sampling":
            asked.append(1)
        return original(engine, count)

    waiting.ask_all = ask
    schedule.LeaveWatcher.due = lambda self: STOP if len(asked) >= after else STAY  # type: ignore[method-assign]
    rows = spec.data.rows("train")
    context = RankContext(
        torch.device("cpu"), lambda step: local_steps(rows, spec.order, rank, world, step)
    )
    summary = train_rank(spec, context)
    assert (summary["status"], summary["steps"]) == ("stopped", EVERY)
    assert len(asked) == after  # no token more


def test_a_stop_ends_the_sampling_at_the_next_token(inputs: Path) -> None:  # noqa: F811
    """The evaluation is given up as a whole, and follows the next attempt's first step."""
    spec = spec_of(with_prompts(inputs, "stopped", PROMPTS), inputs, STEPS)
    processes.spawn(stopped_worker, 2, str(inputs / "stopped-meet"), spec, 3)
    newest, _ = latest(open_storage(spec.run_url))
    assert newest is not None and newest.step == EVERY
    lines, _ = train(spec.config, inputs, world=2, num_steps=STEPS)
    evaluated = [line["step"] for line in lines if line["eval_loss"] is not None]
    assert evaluated == [line["step"] for line in lines if line["eval_samples"]] == [3, 4]


def test_prompts_share_a_pass_only_where_a_micro_batch_has_room() -> None:
    ids, ends = [[1] * 4, [], [1] * 6, [1] * 30, [1] * 64], [20, 16, 22, 46, 64]
    assert list(samples._groups(ids, ends, 50)) == [[0, 2], [3]]
    assert list(samples._groups(ids, ends, 10)) == [[0], [2], [3]]
    assert list(samples._groups(ids, ends, 1000)) == [[0, 2, 3]]
