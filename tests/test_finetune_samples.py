"""Prompts that are continued while a run trains: the answers, and that training does not notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from test_train_loop import config_of, inputs, spec_of, train  # noqa: F401  a fixture
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers import AutoModelForCausalLM

from rayapp.config import Config, from_dict
from rayapp.data.token_rows import local_steps
from rayapp.data.tokens import load_tokenizer, prompt_ids
from rayapp.finetune import samples
from rayapp.finetune.model_parts import make_parts
from rayapp.storage import open_storage
from rayapp.train import schedule, waiting
from rayapp.train.checkpoint.marker import latest
from rayapp.train.engine import Engine
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import LanguageSpec
from rayapp.train.step_sync import CONTINUE, STOP

PROMPTS = ["Line 1", "Line 22: bbb says 4", ""]
CHATS = ["Hello", "Hi"]
STEPS, EVERY = 6, 2
FULL = pytest.mark.full


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
    schedule.LeaveWatcher.due = lambda self: STOP if len(asked) >= after else CONTINUE  # type: ignore[method-assign]
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


def counting_worker(rank: int, world: int, spec: LanguageSpec, fits: bool, out: str) -> None:
    """Continue chats by 3 and by 9 tokens; write down what each call has run and gathered."""
    parts, gathers, lengths, texts = make_parts(spec, torch.device("cpu")), [0], list[int](), []
    original = _fsdp_param_group.foreach_all_gather

    def gather(*args: Any) -> Any:
        gathers[0] += 1
        return original(*args)

    def see(_: Any, args: Any) -> None:
        lengths.append(args[0].numel())
        texts.append(parts.tokenizer.decode(args[0][-1]))  # the longest

    _fsdp_param_group.foreach_all_gather = gather
    if not fits:
        samples._fits = lambda *_: False
    parts.lm.hf.get_input_embeddings().register_forward_pre_hook(see)
    control, found = torch.distributed.new_group(backend="gloo"), []
    ids = [prompt_ids(parts.tokenizer, chat, True) for chat in CHATS]
    for count in (3, 9):
        gathers[0], lengths[:], texts[:] = 0, [], []
        told = samples.generated(parts, ids, torch.device("cpu"), control, count)
        found.append((gathers[0], list(lengths)))
    Path(out, f"{fits}-{rank}.json").write_text(json.dumps([told, texts[1:2], found]))


@pytest.mark.parametrize("strategy", ["full_shard", pytest.param("no_shard", marks=FULL)])
def test_a_token_is_run_once_and_weights_are_gathered_once_a_call(
    strategy: str,
    inputs: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Where the weights fit, rank 0 runs alone; elsewhere all ranks do, and say the same."""
    parallel = {"strategy": strategy}
    spec = spec_of(with_prompts(inputs, "counted", [], parallel=parallel), inputs, 0)
    for fits in (True, False):
        meet = str(tmp_path / f"meet-{fits}")
        processes.spawn(counting_worker, 2, meet, spec, fits, str(tmp_path))
    (told, asked, short_and_long), rest, everywhere, again = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("True-0", "True-1", "False-0", "False-1")
    )
    tokenizer = load_tokenizer(str(inputs / "model"))
    chat = [{"role": "user", "content": CHATS[0]}]
    wanted = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert asked == [wanted]
    prefill = 2 * len(tokenizer(wanted)["input_ids"])
    assert [lengths for _, lengths in short_and_long] == [
        [1, prefill, *[2] * (count - 1), 1] for count in (3, 9)
    ]
    assert short_and_long[0][0] == short_and_long[1][0]
    assert short_and_long[0][0] == (3 if strategy == "full_shard" else 0)  # blocks, and the rest
    assert [lengths for _, lengths in rest[2]] == [[1, 1], [1, 1]]
    assert rest[0] == told and everywhere == again and everywhere[0] == told
    assert everywhere[2][1][1] == short_and_long[1][1]
    freed = everywhere[2][1][0] - everywhere[2][0][0]
    assert freed == (6 if strategy == "full_shard" else 0)  # the first block, for each token
    assert len(told[0]) > 0
