"""A run's figures as text: one table of their labels and formats, for every place that shows them.

label("peak_gib"), text("peak_gib", 1.5)        # "memory", "1.50 GiB"
figures(progress)                               # {label: text}, for terminals, notebooks and lists
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from rayapp.config.fields import unit_of
from rayapp.observe import words
from rayapp.observe.columns import Columns
from rayapp.observe.metrics import MetricsLine, figure, own_figures
from rayapp.observe.status import Progress
from rayapp.observe.words import UNKNOWN, formed

Format = Callable[[float | None], str]
LOSS: Format = partial(words.fixed, decimals=4)
WHOLE: Format = partial(words.fixed, decimals=0)
TIME: Format = lambda seconds: UNKNOWN if seconds is None else words.clock(seconds)  # noqa: E731

# Label and format by the name of the figure in metrics.jsonl, result.json or plan.json.
FIGURES: dict[str, tuple[str, Format]] = {
    "step": ("steps", WHOLE),
    "loss": ("loss", LOSS),
    "loss_per_byte": ("loss per byte", LOSS),
    "own_loss": ("train.loss", LOSS),
    "eval_loss": ("held-out loss", LOSS),
    "eval_loss_per_byte": ("held-out loss per byte", LOSS),
    "eval_top1": ("top-1", words.share),
    "eval_top5": ("top-5", words.share),
    "grad_norm": ("gradient norm", words.number),
    "lr": ("learning rate", words.number),
    "tokens_per_s": ("tokens/s", WHOLE),
    "tokens_per_s_per_gpu": ("tokens/s per worker", WHOLE),
    "images_per_s": ("images/s", WHOLE),
    "images_per_s_per_gpu": ("images/s per worker", WHOLE),
    "mfu": ("MFU", words.share),
    "step_s": ("time of a step", partial(formed, form=",.4g", unit=" s")),
    "peak_gib": ("memory", partial(formed, form=",.2f", unit=" GiB")),
    "tokens": ("loss-bearing tokens", words.amount),
    "images": ("images", words.amount),
    "workers": ("workers", WHOLE),
    "goodput": ("goodput", words.share),
    "left_s": ("time left", TIME),
    "wall_s": ("time", TIME),
    "cost_usd": ("cost", words.dollars),
    "parameters": ("parameters", words.amount),
    "lost_steps": ("lost steps", WHOLE),
    "hours": ("hours", words.number),
}


def label(name: str) -> str:
    """Return the label of a figure; a figure that is not in the table has its own name."""
    return FIGURES[name][0] if name in FIGURES else name


def text(name: str, value: float | None) -> str:
    """Format a figure; `n/a` if it is not known."""
    return FIGURES[name][1](value) if name in FIGURES else words.number(value)


def shown(values: Mapping[str, object], *names: str, between: str = "  ") -> str:
    """Return labels and texts of figures in one line.

    >>> shown({"loss": None, "eval_top1": 0.9675}, "loss", "eval_top1")
    'loss n/a  top-1 96.8 %'
    """
    return between.join(f"{label(name)} {text(name, figure(values, name))}" for name in names)


def figures(now: Progress) -> dict[str, str]:
    """Return {label: text} of a run's progress; `n/a` for what is not known."""
    line: Mapping[str, object] = now.line or {}
    account = now.account
    own = own_figures(line)
    names = ("loss", *own, unit_of(line).per_s, "mfu", "peak_gib", "workers")
    held = {name: figure(now.held_out, name) for name in ("eval_loss", "eval_top1")}
    held |= now.held_out.get("eval_metrics") or {}
    values = {name: figure(line, name) for name in names} | {
        **{name: value for name, value in held.items() if value is not None},
        "goodput": account.goodput.get("step") if account.wall_s else None,
        "left_s": now.left_s,
        "wall_s": account.wall_s,
        "cost_usd": account.cost_usd,
    }
    found = {label(name): text(name, value) for name, value in values.items()}
    if now.cost_at_end_usd is not None:
        found["cost"] += f" of {words.dollars(now.cost_at_end_usd)}"
    return {"step": f"{now.step:,}" + (f" / {now.num_steps:,}" if now.num_steps else "")} | found


def lines_below(now: Progress) -> list[str]:
    """Return a line for each source of the last step, if there are several; the rank that lags."""
    line: MetricsLine = now.line or cast(MetricsLine, {})
    losses, counts = line.get("loss_by_source") or {}, line.get("tokens_by_source") or {}
    whole = sum(counts.values()) or 1
    return [
        f"{path}: loss {text('loss', losses.get(path))}, {count:,} tokens "
        f"({count / whole:.1%}) of the step"
        for path, count in counts.items()
    ] + list(filter(None, [line.get("lagging")]))


def share_of_waiting(steps: Columns) -> str:
    """Say how long the last 50 steps took, and the shares of data waits and checkpoint stalls."""
    recent = steps["step_s"][-50:].tolist()
    step_s = sum(recent) or 1.0
    shares = (
        f"{steps[name][-50:].sum() / step_s:.2%} {what}"
        for name, what in (
            ("data_wait_s", "waiting for data"),
            ("checkpoint_stall_s", "stalled by checkpoints"),
        )
    )
    return f"last {len(recent)} steps: {statistics.median(recent):.3g} s each, {', '.join(shares)}"
