"""The live view of a run in a terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rayapp.observe.columns import Columns
from rayapp.observe.figures import figures, lines_below, share_of_waiting
from rayapp.observe.plain import Console
from rayapp.observe.run_folder import EXIT_CODES
from rayapp.observe.status import Progress
from rayapp.observe.words import BARS
from rayapp.report.chart import means

if TYPE_CHECKING:
    from rayapp.jobs.handle import Job

COLUMNS = 60


def show(job: Job, every_s: float = 2.0, console: Console | None = None) -> str:
    """Redraw the view every `every_s` seconds until the run has ended; return the status."""
    console = console or Console()
    try:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            while True:
                status, now, steps = job.snapshot()
                live.update(render(job.name, status, now, steps), refresh=True)
                if status in EXIT_CODES:
                    break
                time.sleep(every_s)
        if now is None and (reason := job.reason()):
            console.print(reason, highlight=False, markup=False)
        return status
    except KeyboardInterrupt:
        console.print("no longer watched; the run goes on")
        raise


def render(name: str, status: str, now: Progress | None, steps: Columns) -> Group:
    """Return the view of a snapshot."""
    parts: list[Any] = [Text.assemble((name, "bold"), f"  {status}")]
    if now is not None:
        done = min(COLUMNS, round(COLUMNS * now.step / now.num_steps)) if now.num_steps else 0
        parts.append(Text.assemble(("━" * done, "green"), ("━" * (COLUMNS - done), "dim")))
        table, cells = Table.grid(padding=(0, 2)), list(figures(now).items())
        for start in range(0, len(cells), 5):
            row = cells[start : start + 5]
            table.add_row(*(Text.assemble((f"{name} ", "dim"), value) for name, value in row))
        parts.append(table)
        parts += map(Text, lines_below(now))
        if now.activity is not None and now.activity.phase:
            parts.append(Text(now.activity.text(time.time())))
        if now.reason:
            parts.append(Text(now.reason))
    if len(steps):
        loss = steps["loss"]
        losses = means({"loss": loss[~np.isnan(loss)]}, {}, COLUMNS // 2)["loss"]
        parts.append(Text(f"loss {spark(losses.tolist())}"))
        parts.append(Text(share_of_waiting(steps), style="dim"))
    return Group(*parts)


def spark(values: list[float]) -> str:
    """Return values as a line of blocks, scaled from the lowest to the highest.

    >>> spark([0.0, 1.0, 0.5])
    '▁█▅'
    """
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = 7.0 / ((high - low) or 1.0)
    return "".join(BARS[round((value - low) * scale)] for value in values)
