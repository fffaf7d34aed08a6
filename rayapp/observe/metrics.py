"""Describe each field of a line of metrics.jsonl once, and read the file.

    lines = read(run)                          # of a long run rayapp.observe.columns holds less
    line = last(run)                           # from the end of the file
    for start, data in blocks(run): ...        # whole lines

On S3 the file is in parts while it grows (see rayapp.observe.metrics_log): what follows it is in
`metrics/<first byte>.jsonl`. Every reader reads the parts too, skips a part that begins before the
end of what precedes it, and reads again where an attempt that begins has cut the file meanwhile.
"""

from __future__ import annotations

import json
import logging
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, Literal, Required, TypeAlias, TypeVar, cast

from pydantic import ConfigDict, Field, ValidationError, with_config
from typing_extensions import TypedDict

from rayapp.config.fields import IMAGES, TOKENS, Unit
from rayapp.observe import run_folder
from rayapp.observe.run_folder import METRICS, METRICS_PARTS, MOST, Count, Number, UnixTime
from rayapp.storage import Entry, Storage, StorageError

BLOCK_BYTES = 8 * 2**20
FIRST_BYTES = 16 * 2**10  # several lines; of the first block that `backwards` reads
READINGS = 5  # of a file that is cut back each time; attempts of a run are minutes apart
NEEDED = ("step", "attempt", "time")  # fields that every line has

logger = logging.getLogger("rayapp.observe.metrics")
Reading = TypeVar("Reading", bound=Callable[..., object])

Maybe: TypeAlias = Number | None
ByName: TypeAlias = dict[str, Number | None] | None
Sample: TypeAlias = Annotated[tuple[str, str], Field(strict=False)]
"""(prompt, the model's continuation); a list of two in JSON."""


@dataclass(frozen=True)
class Shown:
    """What a field of a line means, and how trackers and Prometheus show it."""

    text: str
    group: str = ""
    """The group of figures that trackers show it in; "": they do not show it."""
    unit: Unit | None = None
    """What the runs that have the field count; None: all runs have it."""
    live: Literal["gauge", "counter", ""] = "gauge"
    """How it is exported to Prometheus."""
    tag: str = ""
    """What tells its figures apart: `rank`, or what the keys of the mapping are."""


class StepFields(TypedDict, total=False):
    """What is known of each step."""

    step: Required[Annotated[Count, Shown("Optimizer steps done")]]
    epoch: Annotated[Number, Shown("Epochs done", "run")]
    loss: Annotated[Maybe, Shown("Nats per loss-bearing token, or per image", "loss")]
    grad_norm: Annotated[Maybe, Shown("Gradient norm before clipping", "optimizer")]
    lr: Annotated[Number, Shown("Learning rate", "optimizer")]
    mfu: Annotated[Maybe, Shown("Model FLOP/s over the hardware's peak, 0-1", "speed")]
    step_s: Annotated[Number, Shown("Seconds since the step before, with stalls", "speed", live="")]
    data_wait_s: Annotated[
        Number, Shown("Seconds that a rank waits for its rows", "stalls", None, "counter", "rank")
    ]
    checkpoint_stall_s: Annotated[
        Number, Shown("Seconds that saving holds up steps", "stalls", live="counter")
    ]
    eval_s: Annotated[Number, Shown("Seconds of held-out evaluations", "stalls", live="counter")]
    skipped: Annotated[bool, Shown("Whether a bad step left the weights", "optimizer", live="")]
    peak_gib: Annotated[
        Number, Shown("Most GPU memory (else RAM) of a rank so far", "memory", tag="rank")
    ]
    peak_forward_gib: Annotated[Number, Shown("Peak of the forward passes", "memory", live="")]
    peak_backward_gib: Annotated[Number, Shown("Peak of the backward passes", "memory", live="")]
    peak_optimizer_gib: Annotated[Number, Shown("Peak of the update", "memory", live="")]
    workers: Annotated[Count, Shown("Training workers", "run")]
    attempt: Required[Annotated[Count, Shown("Starts of workers that did steps", "run")]]
    batch_digest: Annotated[str, Shown("Digest of all rows of the global batch", live="")]
    rank_s: Annotated[
        ByName, Shown("Own time of each rank in the step before, every 10 steps", "ranks", tag="of")
    ]
    lagging: Annotated[str | None, Shown("The rank that lags, and its node", live="")]
    time: Required[Annotated[UnixTime, Shown("Unix seconds at the end of the step", live="")]]
    loss_per_byte: Annotated[Maybe, Shown("Nats per loss-bearing UTF-8 byte", "loss", TOKENS)]
    tokens: Annotated[Count, Shown("Loss-bearing tokens trained on", "run", TOKENS, "counter")]
    tokens_per_s: Annotated[Number, Shown("Input tokens per second, no stalls", "speed", TOKENS)]
    tokens_per_s_per_gpu: Annotated[Number, Shown("Tokens per second and worker", "speed", TOKENS)]
    own_loss: Annotated[Maybe, Shown("Mean of train.loss over the tokens", "loss", TOKENS)]
    router_loss: Annotated[Maybe, Shown("Unweighted balance of the experts", "loss", TOKENS)]
    expert_imbalance: Annotated[
        Maybe, Shown("Tokens of the busiest expert over the mean, worst layer", "experts", TOKENS)
    ]
    loss_by_source: Annotated[
        ByName, Shown("Loss by source of a mixture", "loss_by_source", TOKENS, tag="source")
    ]
    tokens_by_source: Annotated[
        dict[str, Count] | None,
        Shown("Tokens by source", "tokens_by_source", TOKENS, "counter", "source"),
    ]
    images: Annotated[Count, Shown("Images trained on", "run", IMAGES, "counter")]
    images_per_s: Annotated[Number, Shown("Images per second, no stalls", "speed", IMAGES)]
    images_per_s_per_gpu: Annotated[Number, Shown("Images per second and worker", "speed", IMAGES)]


class HeldOut(TypedDict, total=False):
    """Figures of the held-out data, after a step, of a checkpoint or at the end."""

    eval_loss: Annotated[Maybe, Shown("Held-out nats per token or image", "loss")]
    eval_loss_per_byte: Annotated[Maybe, Shown("Held-out nats per UTF-8 byte", "loss", TOKENS)]
    eval_metrics: Annotated[ByName, Shown("Means of eval.metrics", "metrics", TOKENS, tag="name")]
    eval_loss_by_source: Annotated[
        ByName, Shown("Held-out loss by source", "eval_loss_by_source", TOKENS, tag="source")
    ]
    eval_samples: Annotated[
        list[Sample] | None, Shown("eval.prompts with the likeliest tokens", "", TOKENS, "")
    ]
    eval_top1: Annotated[Maybe, Shown("Held-out images classified right, 0-1", "accuracy", IMAGES)]
    eval_top5: Annotated[Maybe, Shown("Class among the first 5, 0-1", "accuracy", IMAGES)]


@with_config(ConfigDict(strict=True))
class MetricsLine(StepFields, HeldOut, total=False):
    """A line of metrics.jsonl; None: the figure is not finite, or not known.

    A number that FIELDS lacks is a figure of the loss's own (see `Engine.take_sums`).
    """


FIELDS: Mapping[str, Shown] = {
    name: shown
    for name, hint in typing.get_type_hints(MetricsLine, include_extras=True).items()
    for shown in getattr(hint, "__metadata__", ()) or typing.get_args(hint)[0].__metadata__
    if isinstance(shown, Shown)
}
OWN_LOSS = "own_loss"
OWN = Shown("Mean of a figure of the loss over the step", "loss", tag="name")


def columns_of(unit: Unit) -> list[str]:
    """Return the fields of all lines of a run."""
    return [name for name, shown in FIELDS.items() if shown.unit in (None, unit)]


def line_of(unit: Unit, *figures: Mapping[str, object]) -> MetricsLine:
    """Return a line with all fields of a run, None for those that have no figure."""
    line: dict[str, object] = dict.fromkeys(columns_of(unit))
    for each in figures:
        line |= each
    return cast(MetricsLine, line)


def figure(record: Mapping[str, object], name: str) -> float | None:
    """Return a number of a record whose name is computed, None if the record lacks it."""
    value = record.get(name)
    return value if isinstance(value, int | float) and -MOST <= value <= MOST else None


def evaluated(record: Mapping[str, Any]) -> HeldOut:
    """Return the figures of an evaluation in a line or a result; empty if it has none."""
    names = ("eval_loss", "eval_top1", "eval_metrics")
    known = {name: record[name] for name in names if record.get(name) is not None}
    return cast(HeldOut, known)


def held_out_figure(held_out: HeldOut, name: str) -> float | None:
    """Return a figure of an evaluation, or the score of a task; None if it is not known."""
    known = figure(held_out, name)
    return figure(held_out.get("eval_metrics") or {}, name) if known is None else known


def figures_of(line: Mapping[str, object]) -> Iterator[tuple[str, str, float]]:
    """Yield (field, key, number) of all that is known; the key is "" but in a mapping.

    >>> list(figures_of({"loss": 2.5, "margin": 1.0, "mfu": None, "eval_metrics": {"top": 0.5}}))
    [('loss', '', 2.5), ('margin', '', 1.0), ('eval_metrics', 'top', 0.5)]
    """
    for field, value in line.items():
        inside: Mapping[str, object] = value if isinstance(value, Mapping) else {"": value}
        for key in inside:
            if (number := figure(inside, key)) is not None:
                yield field, key, number


def own_figures(line: Mapping[str, object]) -> dict[str, float]:
    """Return what a loss of the user's tells of a step besides the cross-entropy, by name."""
    every = figures_of(line)
    return {f: number for f, key, number in every if not key and (f not in FIELDS or f == OWN_LOSS)}


def parsed(text: bytes) -> MetricsLine | None:
    """Return the line that a text is, with None for what is not of a field's type.

    None: the text is no JSON object, or one of NEEDED is not of its type.
    """
    schema = run_folder.schema(MetricsLine)
    with suppress(ValidationError):  # the fast way
        return cast(MetricsLine, schema.validate_json(text, extra="allow"))
    odd = set[object]()
    try:
        line = json.loads(text)
        schema.validate_python(line)
    except ValidationError as error:
        odd = {each["loc"][0] for each in error.errors() if each["loc"]}
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not odd.isdisjoint(NEEDED):
        return None
    return cast(MetricsLine, line | dict.fromkeys(odd))


def lines_of(
    data: bytes, start: int, storage: Storage, before: int
) -> Iterator[tuple[int, MetricsLine]]:
    """Yield (byte behind it, line) of data at byte `start` of a file, after `before` lines.

    Lines that are not readable are left out, and the log names them; a last line without an end
    is left out silently.
    """
    for number, text in enumerate(data.splitlines(keepends=True), before + 1):
        start += len(text)
        if (line := parsed(text)) is not None:
            yield start, line
        elif text.endswith(b"\n"):  # after a power loss, or an edit
            logger.warning("%s/%s: line %d is not readable", storage.url, METRICS, number)


# ---- The file and its parts -------------------------------------------------------------------


class CutBackError(StorageError):
    """The file has become shorter than it was when its reader looked."""


@dataclass(frozen=True)
class Part:
    """A file that holds bytes `start` to `end` of the whole."""

    name: str
    start: int
    end: int


def entries(storage: Storage) -> list[Entry]:
    """Return the files beside metrics.jsonl that hold what follows it."""
    return [entry for entry in storage.list(METRICS_PARTS) if _start(entry.name) is not None]


def parts(storage: Storage, listed: list[Entry] | None = None) -> list[Part]:
    """Return the files that make up metrics.jsonl, in order; [] if there are none.

    `listed` are the `entries`, if they are known: they are of before this asks for the size of
    metrics.jsonl, as `seal` writes it before it deletes the other parts.
    """
    listed = entries(storage) if listed is None else listed
    whole = storage.size(METRICS)
    found = [] if whole is None else [Part(METRICS, 0, whole)]
    for entry in listed:
        end = found[-1].end if found else 0
        if _start(entry.name) == end:
            found.append(Part(entry.name, end, end + entry.size))
    return found


def _start(name: str) -> int | None:
    digits = name.rpartition("/")[2].removesuffix(".jsonl")
    return int(digits) if digits.isdecimal() else None


def read_bytes(storage: Storage, start: int, end: int, listed: list[Part] | None = None) -> bytes:
    """Return the bytes from `start` to `end`; `listed` are the parts, if they are known.

    Raises: StorageError: they are not there, or cannot be read.
    """
    listed = parts(storage) if listed is None else listed
    while True:
        try:
            data = b"".join(
                storage.read(part.name, low - part.start, high - low)
                for part in listed
                if (low := max(start, part.start)) < (high := min(end, part.end))
            )
        except (FileNotFoundError, StorageError):  # it may have been sealed or cut
            before, listed = listed, parts(storage)
            if listed == before:
                raise
            continue
        if len(data) < end - start:
            raise CutBackError("read", f"{storage.url}/{METRICS}", "it has been cut back meanwhile")
        return data


def read_again(reading: Reading) -> Reading:
    """Return a function that reads again where an attempt that begins cuts the file meanwhile."""

    @wraps(reading)
    def uncut(*args: object, **named: object) -> object:
        for _ in range(READINGS - 1):
            with suppress(CutBackError):
                return reading(*args, **named)
        return reading(*args, **named)

    return cast(Reading, uncut)


def blocks(
    storage: Storage, start: int = 0, listed: list[Part] | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield (first byte, whole lines) from `start` on, last what follows the last newline.

    `listed` are the parts, if they are known.
    """
    listed = parts(storage) if listed is None else listed
    end, rest = listed[-1].end if listed else 0, b""
    for low in range(start, end, BLOCK_BYTES):
        high = min(end, low + BLOCK_BYTES)
        data = rest + read_bytes(storage, low, high, listed)
        lines, newline, rest = data.rpartition(b"\n")
        if lines or newline:
            yield high - len(data), lines + newline
    if rest:
        yield end - len(rest), rest


def backwards(storage: Storage) -> Iterator[tuple[int, bytes]]:
    """Yield (byte behind it, line with its newline) from the last line to the first."""
    listed = parts(storage)
    end, rest, length = listed[-1].end if listed else 0, b"", FIRST_BYTES
    while end > 0:
        start = max(0, end - length)
        data = read_bytes(storage, start, end, listed) + rest
        stop = start + len(data)
        first, *lines = data.splitlines(keepends=True)
        if start == 0:
            lines, first = [first, *lines], b""
        for line in reversed(lines):
            yield stop, line
            stop -= len(line)
        end, rest, length = start, first, min(2 * length, BLOCK_BYTES)


@read_again
def read(storage: Storage) -> list[MetricsLine]:
    """Return the lines of a run's metrics.jsonl, an empty list if there is no such file yet.

    Of a long run `rayapp.observe.columns` holds less. Lines that are not readable are left out: a
    process that was killed leaves a partial last line.
    """
    lines = list[MetricsLine]()
    for start, data in blocks(storage):
        lines += [line for _, line in lines_of(data, start, storage, len(lines))]
    return lines


@read_again
def last(storage: Storage) -> MetricsLine | None:
    """Return the last line of metrics.jsonl, if any; reads only the end of the file."""
    return next(filter(None, (parsed(text) for _, text in backwards(storage))), None)
