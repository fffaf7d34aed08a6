"""Find alternatives to a plan: settings that fit or are faster, node counts, cheapest machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from rayapp.config import ConfigError
from rayapp.config.language import Strategy
from rayapp.hardware import INSTANCES
from rayapp.planner.answer import Answer, answer
from rayapp.planner.image_memory import ImageLayout
from rayapp.planner.memory import Layout
from rayapp.planner.question import Question, per_worker, shards_of

NODE_COUNTS = (1, 2, 4, 8, 16, 32)  # tried by `scaling` and `cheapest`
Fields: TypeAlias = dict[str, Any]
"""Fields of a layout to replace, by name."""
Changes: TypeAlias = Iterator[tuple[str, Fields]]
# Smallest speed-up (a ratio) worth a suggestion; less is within the model's noise. Estimate.
GAIN = 1.03
# Tokens of a micro-batch from which on CPUs gain nothing by more.
CPU_TOKENS = 4096
# From here on `train.compile: auto` compiles: seconds of steps on a GPU, and model FLOPs of a
# worker by device where the plan has no times. Compiling takes a minute on a GPU, half a minute on
# two cores; it makes steps 1.2 times as fast on a GPU and on CPUs (docs/numbers.md).
COMPILED_S = 300.0
COMPILED_FLOPS = {"cpu": 6e13, "cuda": 1e17}


@dataclass(frozen=True)
class Suggestion:
    """A change of the config, and the plan with that change."""

    change: str
    answer: Answer

    def as_dict(self) -> dict[str, object]:
        """Return JSON values."""
        rate = self.answer.rate
        return {
            "set": self.change,
            "fits": self.answer.fits,
            "peak_gib": self.answer.peak_gib.as_dict(),
            self.answer.question.unit.per_s: None if rate is None else rate.as_dict(),
        }


def suggestions(question: Question, most: int = 5) -> list[Suggestion]:
    """Return up to `most` changes that fit, fastest first; only faster ones if the plan fits."""
    if question.job is None:
        return []
    now = answer(question)
    candidates = []
    for change, other in _variants(question, bool(now.fits)):
        try:
            then = answer(other)
        except ValueError:  # a precision that this GPU cannot compute in
            continue
        if then.fits:
            candidates.append(Suggestion(change, then))
    if now.fits:
        assert now.rate is not None
        limit = GAIN * now.rate.value / question.workers
        candidates = [each for each in candidates if _per_worker(each) > limit]
    candidates.sort(key=_per_worker, reverse=True)
    shown = candidates[:most]
    # More nodes leave the training itself unchanged, so one such change is always listed.
    nodes = [each for each in candidates if each.answer.workers > question.workers]
    if nodes and nodes[0] not in shown:
        shown = [*shown[:-1], nodes[0]]
    return shown


def size_problem(plan: Answer | None) -> str | None:
    """Return an error text: why the run does not fit, and what would. None if it may fit."""
    if plan is None or plan.fits is not False:
        return None
    question = plan.question
    assert question.instance is not None and plan.capacity_gib is not None
    others = suggestions(question, most=2)
    what = " or ".join(suggestion.change for suggestion in others) or "a larger cluster.instance"
    return (
        f"cluster.instance={question.instance.name} is too small: the plan is "
        f"{plan.peak_gib.value:.1f} GiB of "
        f"{plan.capacity_gib:.1f} on each of {question.workers} workers. Set {what}, or "
        "cluster.ignore_plan=true to start anyway"
    )


def _speed(plan: Answer) -> tuple[float, int]:
    rate = 0.0 if plan.rate is None else plan.rate.value
    return rate, plan.question.layout.micro_batch


def _per_worker(suggestion: Suggestion) -> float:
    assert suggestion.answer.rate is not None
    return suggestion.answer.rate.value / suggestion.answer.workers


def _variants(question: Question, fits: bool) -> Iterator[tuple[str, Question]]:
    """Yield (what to set, the changed question): each change alone and with full checkpointing."""
    layout = question.layout
    of_images = isinstance(layout, ImageLayout)
    changed = [
        (change, question.having(**fields), fields)
        for change, fields in (_image_changes if of_images else _text_changes)(question, fits)
        if any(getattr(layout, name) != value for name, value in fields.items())
    ]
    assert question.instance is not None
    for nodes in (2 * question.nodes, 4 * question.nodes):
        workers = nodes * question.instance.gpus
        other = question.on(question.instance, nodes)
        changed.append((f"cluster.workers={workers}", other, {}))
    for change, other, fields in changed:
        if other is None:
            continue
        yield change, other
        if isinstance(other.layout, Layout) and "checkpointing" not in fields:
            both = other.having(checkpointing="full")
            if both is not None and both != other:
                yield f"{change} parallel.activation_checkpointing=full", both


def _micro_batches(now: int, *more: int) -> Changes:
    for size in sorted({1, now // 2, now * 2, now * 4, *more} - {0}, reverse=True):
        yield f"train.micro_batch={size}", {"micro_batch": size}


def _text_changes(question: Question, fits: bool) -> Changes:
    layout = question.layout
    assert isinstance(layout, Layout)
    for mode in ("none", "selective", "full"):
        yield f"parallel.activation_checkpointing={mode}", {"checkpointing": mode}
    yield from _micro_batches(layout.micro_batch)
    yield _whole(question)
    yield "train.compile=true", {"compiled": True}
    for precision in ("bf16", "fp8"):
        yield f"train.precision={precision}", {"precision": precision}
    if layout.optimizer == "adamw":
        yield "train.optimizer=adamw8bit", {"optimizer": "adamw8bit"}
    yield "parallel.cpu_offload=true", {"cpu_offload": True}
    yield "parallel.activation_offload=true", {"activation_offload": True}
    if layout.lora_rank is None and not fits:  # another training task: a last resort
        yield "model.lora={rank: 16}", {"lora_rank": 16}


def _image_changes(question: Question, fits: bool) -> Changes:
    size = question.layout.micro_batch
    yield from _micro_batches(size, size // 4)
    yield "parallel.sync_batch_norm=false", {"synchronized": False}
    yield "train.compile=true", {"compiled": True}
    yield "train.precision=bf16", {"precision": "bf16"}
    yield _whole(question)


def _whole(question: Question) -> tuple[str, Fields]:
    fields = {"strategy": "full_shard", "shards": question.workers}
    return "parallel.strategy=full_shard", fields


def largest_micro_batch(question: Question) -> int | None:
    """Return the best micro-batch in rows that fits; None if none fits or memory is unknown.

    Only sizes that divide the rows of a step are tried, on CPUs up to CPU_TOKENS tokens. Of those
    that fit, it is the largest that gives the busiest worker the fewest rows: 12 rows over 5
    workers give it 3 rows with a micro-batch of 1, but 4 with a micro-batch of 2.
    """
    rows, workers = question.rows_per_step, question.workers
    most = max(1, rows // workers)
    if question.layout.on_cpu:
        most = max(1, min(most, CPU_TOKENS // question.layout.row))
    fitting = [
        size
        for size in range(1, most + 1)
        if rows % size == 0 and answer(with_micro_batch(question, size)).fits
    ]
    return min(
        fitting, key=lambda size: (per_worker(rows, size, workers) * size, -size), default=None
    )


def with_auto(question: Question, *, compiled: bool, strategy: bool, size: bool) -> Question:
    """Return the question with what `auto` takes for the settings that are true.

    Of the strategies that fit it is the fastest; where no times are known, of those with the
    largest micro-batch the one with the least communication. A strategy that shards less must fit
    with the upper end of its band.
    """
    if compiled:
        question = question.having(compiled=compile_pays(question)) or question
    best: Answer | None = None
    for each in _strategies(question) if strategy else (question.layout.strategy,):
        shards = shards_of(each, question.workers, question.workers // question.nodes)
        other = question.having(strategy=each, shards=shards) if strategy else question
        assert other is not None, "the micro-batch is as it was"
        most = largest_micro_batch(other) or 1 if size else other.layout.micro_batch
        found = answer(with_micro_batch(other, most))
        room = found.capacity_gib is not None and found.peak_gib.high <= found.capacity_gib
        if best is None or (room and _speed(found) >= _speed(best)):
            best = found
    assert best is not None
    return best.question


def _strategies(question: Question) -> tuple[Strategy, ...]:
    """Return the strategies to try; without times the last that fits is taken."""
    if question.workers == 1:
        return ("full_shard",)
    even = question.nodes > 1 and question.workers % question.nodes == 0
    across: tuple[Strategy, ...] = ("hybrid_shard",) if even else ()
    return ("full_shard", *across, "shard_grad_op", "no_shard")


def compile_pays(question: Question) -> bool:
    """Say whether a run of a language model is long enough for torch.compile.

    It is if its steps take COMPILED_S by the plan, or, where no times are known, if a worker's
    model FLOPs reach COMPILED_FLOPS. The answer depends on nothing that differs between two
    attempts of a run.
    """
    layout = question.layout
    if question.steps is None or not isinstance(layout, Layout):
        return not layout.on_cpu
    rate = answer(question).rate
    amount = question.steps * question.amount_per_step
    if rate is not None:
        return amount / rate.value >= COMPILED_S
    flops = layout.model_flops() * amount / question.workers
    return flops >= COMPILED_FLOPS["cpu" if layout.on_cpu else "cuda"]


def with_micro_batch(question: Question, size: int) -> Question:
    """Return the question with another micro-batch, which must divide the rows of a step.

    Raises:
        ValueError: it does not divide them.
    """
    changed = question.having(micro_batch=size)
    if changed is None:
        raise ValueError(f"{size} does not divide {question.rows_per_step} rows")
    return changed


def scaling(question: Question) -> list[Answer]:
    """Return the plan of the same step on other node counts of the same instance."""
    if question.instance is None or question.job is None:
        return []
    least = question.layout.micro_batch if isinstance(question.layout, ImageLayout) else 1
    most, counts = question.rows_per_step, sorted({*NODE_COUNTS, question.nodes})
    others = (question.on(question.instance, nodes) for nodes in counts)
    return [answer(each) for each in others if each and each.workers * least <= most]


def cheapest(
    question: Question, *, deadline_hours: float | None = None, budget_usd: float | None = None
) -> Answer:
    """Return the plan on the cheapest machines and settings that meet both limits.

    It tries every GPU instance with a price in the region, node counts up to 32, and for language
    models activation checkpointing and micro-batch. Everything else stays as it is.

    Raises:
        ConfigError: none does; says what the fastest and the cheapest would be.
    """
    if question.steps is None:
        why = "without the number of steps there is no deadline or budget to meet"
        raise ConfigError([f"train.max_steps=none is missing: {why}. Set train.max_steps"])
    candidates = list(_candidates(question))
    if not candidates:
        where = f"no instance with a known price in {question.region}"
        what = f"{where} holds this model on up to 32 nodes. Set model.lora or a smaller model"
        raise ConfigError([f"cluster.instance is not found: {what}"])
    meet = [
        (cost, hours, plan)
        for cost, hours, plan in candidates
        if (deadline_hours is None or hours <= deadline_hours)
        and (budget_usd is None or cost <= budget_usd)
    ]
    if meet:
        return min(meet, key=lambda row: row[:2])[2]
    fast = min(candidates, key=lambda row: (row[1], row[0]))
    cheap = min(candidates, key=lambda row: row[:2])
    limits = {"deadline_hours": deadline_hours, "budget_usd": budget_usd}
    asked = " ".join(f"{name}={value:g}" for name, value in limits.items() if value is not None)
    known = f"the fastest is {_named(fast)}, the cheapest {_named(cheap)}"
    what = "Lower train.max_steps, or raise a limit"
    raise ConfigError([f"{asked} is impossible: {known}. {what}"])


def _candidates(question: Question) -> Iterator[tuple[float, float, Answer]]:
    """Yield (USD, hours, answer) of the fastest setting that fits, per instance and node count."""
    settings = list(_settings(question.layout))
    for instance in INSTANCES.values():
        if instance.gpu is None or question.region not in instance.usd_per_hour:
            continue
        if instance.gpu.flops.get(question.layout.precision) is None:
            continue
        for nodes in NODE_COUNTS:
            rows = list[tuple[float, float, Answer]]()
            for fields in settings:
                other = question.on(instance, nodes, **fields)
                if other is None or other.workers > question.rows_per_step // fields["micro_batch"]:
                    continue
                then = answer(other)
                if then.fits and then.cost_usd is not None and then.hours is not None:
                    rows.append((then.cost_usd.value, then.hours.value, then))
            if rows:
                yield min(rows, key=lambda row: row[1])


def _settings(layout: Layout | ImageLayout) -> Iterator[Fields]:
    if isinstance(layout, ImageLayout):  # batch-norm: its size changes training
        yield {"micro_batch": layout.micro_batch}
        return
    for size in {1, 2, 4, 8, layout.micro_batch}:
        for mode in ("none", "selective", "full"):
            yield {"micro_batch": size, "checkpointing": mode}


def _named(row: tuple[float, float, Answer]) -> str:
    cost, hours, plan = row
    assert plan.question.instance is not None
    name = plan.question.instance.name
    return f"{plan.question.nodes} x {name} with {hours:.3g} hours and ${cost:,.0f}"
