"""Score the model as it is on eval.tasks, on all ranks together, and keep its answers.

    figures = score_tasks(spec, parts, engine, stops, step)     # by task; writes items/STEP.jsonl
    results = compared(spec.tasks, storage, step)               # before the first step, and after

An item has one answer at any number of workers: which items are computed together does not depend
on it.
"""

from __future__ import annotations

import json
import logging
import math
import re
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from rayapp.config.code import load_code
from rayapp.config.tasks import LOSSES
from rayapp.data.packing import IGNORE
from rayapp.data.task_items import Item, TaskItems
from rayapp.data.token_rows import StepRows
from rayapp.finetune.model_parts import Parts
from rayapp.finetune.samples import generated
from rayapp.observe.records import Estimate, ScoredItem, TaskResult
from rayapp.observe.run_folder import items_file
from rayapp.storage import Storage
from rayapp.train.engine import Engine, inputs
from rayapp.train.loop import Interrupted
from rayapp.train.step_sync import CONTINUE
from rayapp.train.waiting import leave_now

logger = logging.getLogger("rayapp.training")

SHOWN = 6  # items of each task in the result
LEAST_ROOM = 8192
Z = 1.96  # of an interval of 95 %
RESAMPLES = 2000
TOLERANCE = 1e-6  # of numbers, relative
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|-?\.\d+")
FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def judge_of(score: str) -> Callable[[str, str], object]:
    """Return what says of (answer, wanted) whether it is right, by one of eval.tasks' scores.

    >>> judge_of("number")("So it is 1,024.", "2 ** 10 = 1024"), judge_of("exact")("a", "b")
    (True, False)
    """
    return load_code("score", score, checked=True) if ":" in score else RIGHT[score]


def _normalised(answer: str, wanted: str) -> bool:
    """As the evaluation of SQuAD compares: no case, punctuation, articles or spaces."""

    def words(text: str) -> list[str]:
        return ARTICLES.sub(" ", text.casefold().translate(PUNCTUATION)).split()

    return words(answer) == words(wanted)


def _number(answer: str, wanted: str) -> bool:
    """Compare the last numbers, as the evaluation of GSM8K does."""
    found = [NUMBER.findall(text)[-1:] for text in (answer, wanted)]
    if not all(found):
        return False
    mine, other = (float(numbers[0].replace(",", "")) for numbers in found)
    return math.isclose(mine, other, rel_tol=TOLERANCE)


def _json(answer: str, wanted: str) -> bool:
    """Compare values; an answer may have them in a fenced block."""
    fenced = FENCE.search(answer)
    try:
        return bool(json.loads(fenced[1] if fenced else answer) == json.loads(wanted))
    except (ValueError, RecursionError):
        return False


RIGHT: Mapping[str, Callable[[str, str], bool]] = {
    "exact": lambda answer, wanted: answer.strip() == wanted.strip(),
    "normalised": _normalised,
    "number": _number,
    "json": _json,
    "regex": lambda answer, wanted: re.search(wanted, answer) is not None,
}


def estimate(right: Sequence[bool]) -> Estimate:
    """Return the share of right answers with Wilson's interval of 95 %.

    >>> estimate([True] * 9 + [False])
    {'value': 0.9, 'low': 0.596, 'high': 0.982}
    """
    n, share = len(right), sum(right) / len(right)
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return {"value": share, "low": round(low, 3), "high": round(high, 3)}


def bootstrapped(amounts: Sequence[Sequence[Sequence[float]]]) -> Estimate:
    """Return a ratio of sums over items with an interval of 95 %, by a bootstrap of the items.

    `amounts` [1 or 2, 2, items] are its numerators and denominators, e.g. nats and tokens. Of two
    ratios of the same items it is the second less the first, and each resample has both of an item.
    """
    parts, rng = np.array(amounts, np.float64), np.random.default_rng(0)
    items = parts.shape[-1]
    drawn = (parts[..., rng.integers(items, size=items)].sum(-1) for _ in range(RESAMPLES))
    sums = np.stack([parts.sum(-1), *drawn])  # [1 + resamples, 1 or 2, 2]
    figures = np.diff(sums[..., 0] / np.maximum(sums[..., 1], 1), prepend=0.0)[:, -1]
    low, high = np.percentile(figures[1:], [2.5, 97.5]).tolist()
    return {"value": float(figures[0]), "low": low, "high": high}


def score_tasks(
    tasks: Sequence[TaskItems],
    parts: Parts,
    engine: Engine,
    storage: Storage,
    step: int,
    *,
    stops: Collection[int],
    room: int,
) -> dict[str, float | None]:
    """Return each task's figure after so many steps; rank 0 keeps the items in the run's folder.

    `room` is the most tokens of a forward pass of several items with a loss, whose logits take the
    memory of a training step's. Answers are generated in passes of at least LEAST_ROOM tokens.

    Raises:
        Interrupted: the ranks have agreed to leave.
    """
    scored, figures = list[ScoredItem](), dict[str, float | None]()
    for each in tasks:
        engine.phases.begin("scoring", each.name)
        match each.task.score:
            case "loss":
                found = _losses(each, parts, engine, room)
            case "base":
                said = _said_before(each.name, storage, engine) if step else None
                if said is None:
                    said = _generated(each, parts, engine, max(room, LEAST_ROOM), stops)
                same = len(said) == len(each.items)  # else the run began without these items
                found = _losses(_answered(each, said, parts), parts, engine, room) if same else []
            case "choice":
                found = _choices(each, parts, engine, room)
            case _:
                found = _answers(each, parts, engine, max(room, LEAST_ROOM), stops=stops)
        scored += found
        figures[each.name] = _figure(each, found)["value"] if found else None
    # A function of the user's may judge otherwise elsewhere: all ranks take rank 0's figures.
    agreed = [figures]
    dist.broadcast_object_list(agreed, src=0, group=engine.control)
    if dist.get_rank() == 0:
        text = "".join(json.dumps(item) + "\n" for item in scored)
        storage.write(items_file(step), text.encode())
    return agreed[0]


def leave_if_told(engine: Engine) -> int:
    """Agree with all ranks on whether to leave, where leaving is possible."""
    return leave_now(engine) if engine.interruptible else CONTINUE


def _answers(
    task: TaskItems, parts: Parts, engine: Engine, room: int, *, stops: Collection[int]
) -> list[ScoredItem]:
    """Let the model answer each item, and judge the answers; none if the judge has raised."""
    texts = _generated(task, parts, engine, room, stops)
    scored, judge = list[ScoredItem](), judge_of(task.task.score)
    for item, text in zip(task.items, texts, strict=True):
        try:
            right = bool(judge(text, item.wanted))
        except Exception as error:  # the user's function may raise anything
            where = f"eval.tasks.{task.name}.score={task.task.score}"
            why = f"{type(error).__name__}: {error}"
            logger.warning("%s has raised on the answer %r, and is left out: %s", where, text, why)
            return []
        scored.append({**_told(task, item), "answer": text, "right": right})
    return scored


def _generated(
    task: TaskItems, parts: Parts, engine: Engine, room: int, stops: Collection[int]
) -> list[str]:
    return generated(
        parts,
        [item.prompt for item in task.items],
        engine.device,
        engine.control,
        task.task.max_tokens,
        stops=stops,
        leave=partial(leave_if_told, engine),
        room=room,
    )


def _said_before(name: str, storage: Storage, engine: Engine) -> list[str]:
    """Return what the base answered to a task's items, as rank 0 reads the items of step 0."""
    items = _by_task(storage, 0).get(name, ()) if dist.get_rank() == 0 else ()
    said = [[item["wanted"] for item in items]]
    dist.broadcast_object_list(said, src=0, group=engine.control)
    return said[0]


def _answered(task: TaskItems, said: Sequence[str], parts: Parts) -> TaskItems:
    """Return a task with these texts as the wanted answers."""
    ids = parts.tokenizer(list(said), add_special_tokens=False)["input_ids"] if said else []
    each = zip(task.items, said, map(tuple, ids), strict=True)
    items = (replace(item, wanted=text, answer=answer) for item, text, answer in each)
    return replace(task, items=tuple(items))


def _losses(task: TaskItems, parts: Parts, engine: Engine, room: int) -> list[ScoredItem]:
    items = [_cut(item, parts) for item in task.items]
    each = zip(items, _nats(items, parts, engine, room), strict=True)
    return [{**_told(task, item), "nats": nats, "tokens": len(item.answer)} for item, nats in each]


def _choices(task: TaskItems, parts: Parts, engine: Engine, room: int) -> list[ScoredItem]:
    """Return of each item the likeliest of its choices, by the sum of log-probabilities."""
    every = [_cut(choice, parts) for item in task.items for choice in item.choices]
    nats, scored = iter(_nats(every, parts, engine, room)), list[ScoredItem]()
    for item in task.items:
        losses = [next(nats) for _ in item.choices]
        answer = item.choices[int(np.argmin(losses))].wanted
        scored.append({**_told(task, item), "answer": answer, "right": answer == item.wanted})
    return scored


@torch.no_grad()
def _nats(items: Sequence[Item], parts: Parts, engine: Engine, room: int) -> list[float]:
    """Return the loss of each item's answer in nats; the ranks take groups of items in turn."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups, nats = list(_groups(items, room)), torch.zeros(len(items), dtype=torch.float64)
    parts.lm.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            for first in range(0, len(groups), world):
                if code := leave_if_told(engine):
                    raise Interrupted(code)
                group = groups[first + rank] if first + rank < len(groups) else []
                rows = _rows([items[place] for place in group or groups[0][:1]])
                output = engine.model(**inputs(rows, 0, engine.device))
                if group:
                    nats[group] = output[2].double().cpu()
    finally:
        parts.lm.train()
    dist.all_reduce(nats, group=engine.control)
    return nats.tolist()


def _cut(item: Item, parts: Parts) -> Item:
    """Return an item without the beginning of a prompt that is too long for the model."""
    limit = getattr(parts.lm.hf.config.get_text_config(), "max_position_embeddings", None)
    excess = len(item.prompt) + len(item.answer) - 1 - (limit or 2**30)
    if limit is None or excess <= 0:
        return item
    return Item(item.asked, item.wanted, item.prompt[excess:], item.answer[-limit:])


def _groups(items: Sequence[Item], room: int) -> list[list[int]]:
    """Return the places of items whose rows together are at most `room` tokens, or of one item."""
    groups: list[list[int]] = []
    sizes = [len(item.prompt) + len(item.answer) for item in items]
    for place in sorted(range(len(items)), key=sizes.__getitem__):
        if not groups or (len(groups[-1]) + 1) * sizes[place] > room:
            groups.append([])
        groups[-1].append(place)
    return groups


def _rows(items: Sequence[Item]) -> StepRows:
    """Return items as the rows of a micro-batch, each of a source of its own."""
    longest = max(len(item.prompt) + len(item.answer) - 1 for item in items)
    shape = (1, len(items), longest)
    ids, labels = np.zeros(shape, np.int32), np.full(shape, IGNORE, np.int32)
    segments = np.zeros(shape, np.uint16)
    for row, item in enumerate(items):
        tokens = np.array([*item.prompt, *item.answer], np.int32)
        ids[0, row, : len(tokens) - 1], segments[0, row, : len(tokens) - 1] = tokens[:-1], 1
        answer = tokens[max(len(item.prompt), 1) :]
        labels[0, row, len(tokens) - 1 - len(answer) : len(tokens) - 1] = answer
    numbers = np.arange(len(items))[None]
    none = np.zeros((1, len(items)), np.int64)
    ends = tuple(range(1, len(items) + 1))
    return StepRows(0, ids, labels, segments, none, numbers, numbers, ends)


def _told(task: TaskItems, item: Item) -> ScoredItem:
    return {"task": task.name, "asked": item.asked, "wanted": item.wanted}


def _figure(task: TaskItems, scored: Sequence[ScoredItem]) -> Estimate:
    if task.task.score in LOSSES:
        return bootstrapped([_amounts(task, scored)])
    return estimate([each["right"] for each in scored])


def _amounts(task: TaskItems, scored: Sequence[ScoredItem]) -> list[list[float]]:
    """Return numerators and denominators of a task's figure: [2, items]."""
    if task.task.score in LOSSES:
        return [[each["nats"] for each in scored], [each["tokens"] for each in scored]]
    return [[each["right"] for each in scored], [1.0] * len(scored)]


def compared(tasks: Sequence[TaskItems], storage: Storage, step: int) -> dict[str, TaskResult]:
    """Return each task's score before the first step and after `step`, and their difference.

    They are computed from the run's folder. Where the items were others before, `before` and
    `difference` are None.
    """
    before, after = (_by_task(storage, at) for at in (0, step))
    return {
        task.name: _compared(task, before.get(task.name, ()), after[task.name])
        for task in tasks
        if task.name in after  # its judge has not raised
    }


def _by_task(storage: Storage, step: int) -> Mapping[str, list[ScoredItem]]:
    found: dict[str, list[ScoredItem]] = {}
    if storage.exists(items_file(step)):
        for line in storage.read(items_file(step)).splitlines():
            item: ScoredItem = json.loads(line)
            found.setdefault(item["task"], []).append(item)
    return found


def _compared(
    task: TaskItems, before: Sequence[ScoredItem], after: Sequence[ScoredItem]
) -> TaskResult:
    def questions(items: Sequence[ScoredItem]) -> list[tuple[str, str]]:
        return [(item["asked"], item["wanted"]) for item in items]

    before = before if questions(before) == questions(after) else ()
    pair = [_amounts(task, scored) for scored in (before, after)]
    result: TaskResult = {
        "score": task.task.score,
        "items": len(after),
        "before": _figure(task, before) if before else None,
        "after": _figure(task, after),
        "difference": bootstrapped(pair) if before else None,
    }
    if task.task.score not in LOSSES:
        result["shown"] = [
            {
                "asked": item["asked"],
                "before": before[place]["answer"] if before else None,
                "after": item["answer"],
                "wanted": item["wanted"],
            }
            for place, item in enumerate(after[:SHOWN])
        ]
    return result
