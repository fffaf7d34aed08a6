"""The figures of a run as text, for terminals, notebooks and lists."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from rayapp.config.fields import unit_of
from rayapp.observe.columns import Columns
from rayapp.observe.metrics import figure
from rayapp.observe.status import Progress
from rayapp.observe.words import UNKNOWN, clock, formed

OWN = "own loss"  # the label of the figure of train.loss, which most runs lack
RECENT = 50  # steps that `share_of_waiting` covers


def figures(now: Progress) -> dict[str, str]:
    """Return {label: text} of a run's progress; `n/a` for what is not known."""
    line: Mapping[str, object] = now.line or {}
    account, at_end_usd, unit = now.account, now.cost_at_end_usd, unit_of(line)
    return {
        "step": f"{now.step:,}" + (f" / {now.num_steps:,}" if now.num_steps else ""),
        "loss": formed(figure(line, "loss"), ".4f"),
        **({OWN: formed(own, ".4f")} if (own := figure(line, "own_loss")) is not None else {}),
        f"{unit.many}/s": formed(figure(line, unit.per_s), ",.0f"),
        "MFU": formed(figure(line, "mfu"), ".1%"),
        "memory": formed(figure(line, "peak_gib"), ".2f", " GiB"),
        "workers": formed(figure(line, "workers"), "d"),
        "goodput": formed(account.goodput.get("step") if account.wall_s else None, ".0%"),
        "time left": UNKNOWN if now.left_s is None else clock(now.left_s),
        "time": clock(account.wall_s),
        "cost": formed(account.cost_usd, ",.2f", " USD")
        + ("" if at_end_usd is None else f" of {at_end_usd:,.2f}"),
    }


def by_source(now: Progress) -> list[str]:
    """Return a line for each source of the last step, if there are several."""
    if now.line is None:
        return []
    line = now.line
    losses, counts = line.get("loss_by_source") or {}, line.get("tokens_by_source") or {}
    whole = sum(counts.values()) or 1
    return [
        f"{path}: loss {formed(losses.get(path), '.4f')}, {count:,} tokens "
        f"({count / whole:.1%}) of the step"
        for path, count in counts.items()
    ]


def share_of_waiting(steps: Columns) -> str:
    """Say how long the last steps took, and the shares of data waits and checkpoint stalls."""
    recent = steps["step_s"][-RECENT:].tolist()
    step_s = sum(recent) or 1.0
    shares = {
        "waiting for data": steps["data_wait_s"][-RECENT:].sum() / step_s,
        "stalled by checkpoints": steps["checkpoint_stall_s"][-RECENT:].sum() / step_s,
    }
    words = ", ".join(f"{share:.2%} {what}" for what, share in shares.items())
    median_s = statistics.median(recent)
    return f"last {len(recent)} steps: {median_s:.3g} s each, {words}"
