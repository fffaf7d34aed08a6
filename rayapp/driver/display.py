"""What the driver prints: progress, results, and the folders that they are in.

A terminal shows a bar that is redrawn; any other output (a job's log, a file) gets a line every
LINE_EVERY_S seconds, and one for the last step.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rayapp.config.fields import IMAGES, unit_of
from rayapp.observe import words
from rayapp.observe.figures import label, shown, text
from rayapp.observe.metrics import HeldOut, MetricsLine, figure, own_figures
from rayapp.observe.records import RunResult, TaskResult
from rayapp.observe.run_folder import DONE, PROFILES, REPORT
from rayapp.observe.words import clock

LINE_EVERY_S = 5.0
MOST_OF_TEXT = 160  # characters
MOST_ITEMS = 3  # of a task
DETAILS = ("rewards/chosen", "rewards/rejected", "logps/", "nll_loss")  # of preferences
HELD_OUT = ("eval_loss", "eval_loss_per_byte", "eval_top1", "eval_top5")


class ProgressBar:
    """Show the progress of a run, one line of metrics.jsonl at a time."""

    def __init__(self, console: Console, num_steps: int, label: str) -> None:
        self.console, self.num_steps = console, num_steps
        self._last_line_s = 0.0
        self._shown: int | None = None
        self._progress: Progress | None = None
        self._task: Any = None
        self._started: tuple[float, int] | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task(label, total=num_steps, figures="")
            self._progress.start()

    def update(self, line: MetricsLine) -> None:
        step = line["step"]
        if step == self._shown:
            return
        self._shown = step
        if self._started is None:
            self._started = (line["time"], step)
        figures = figures_of(line)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, figures=figures)
            return
        now = time.monotonic()
        if now - self._last_line_s >= LINE_EVERY_S or step == self.num_steps:
            self._last_line_s = now
            self.say(f"step {step}/{self.num_steps}  {figures}{self._left('  ', line)}")

    def summary(self, line: MetricsLine) -> str:
        """Return how far the run is: its steps, loss and time left, without a line's details."""
        loss = text("loss", line["loss"])
        return f"step {line['step']}/{self.num_steps}, loss {loss}{self._left(', ', line)}"

    def _left(self, before: str, line: MetricsLine) -> str:
        """Return the time left, after `before`; nothing before the second step of this command."""
        at, first = self._started or (line["time"], line["step"])
        done = line["step"] - first
        if done <= 0:  # it repeats steps
            return ""
        left_s = (self.num_steps - line["step"]) * (line["time"] - at) / done
        return f"{before}{clock(max(0.0, left_s))} left"

    def note(self, text: str) -> None:
        """Show what the run is doing while it takes no steps."""
        if self._progress is not None:
            self._progress.update(self._task, figures=text)
        else:
            self.say(text)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def figures_of(line: MetricsLine) -> str:
    """Format the figures that the progress bar shows of a line of metrics.jsonl."""
    own = [name for name in own_figures(line) if not name.startswith(DETAILS)]
    names = ("loss_per_byte", *own, unit_of(line).per_s, "eval_loss", "eval_top1")
    return "  ".join([shown(line, "loss"), *_known(line, names)])


def held_out(held: HeldOut) -> str:
    """Format the held-out figures of a metrics line or of a result.

    >>> held_out({"eval_loss": 1.5, "eval_top1": 0.9675, "eval_metrics": {"f1": 0.25}})
    'held-out loss 1.5000, top-1 96.8 %, f1 0.25'
    """
    return ", ".join(_known(held, HELD_OUT))


def _known(held: HeldOut, names: Sequence[str]) -> list[str]:
    own = held.get("eval_metrics") or {}
    known = [shown(held, name) for name in names if figure(held, name) is not None]
    return [*known, *(shown(own, name) for name in own if not name.startswith(DETAILS))]


def tasks(console: Console, results: Mapping[str, TaskResult]) -> None:
    """Print the scores of eval.tasks before and after, and some answers side by side."""
    table = Table(*words.TASK_HEAD, box=SIMPLE_HEAD, pad_edge=False)
    for row in words.task_rows(results):
        table.add_row(*map(Text, row))
    console.print(table)
    for _, _, answered in words.task_answers(results):
        for item in answered[:MOST_ITEMS]:
            for what, said in zip(words.TASK_SHOWN, item, strict=True):
                text = " ".join(said.split())
                text = text if len(text) <= MOST_OF_TEXT else f"{text[:MOST_OF_TEXT]} ..."
                console.print(f"{what:>6}  {text}", markup=False, highlight=False, soft_wrap=True)
            console.print()


def result(console: Console, result: RunResult) -> None:
    """Print the run's result and the folders of its files and model."""
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    if result.get("eval_loss") is not None:
        say(held_out(result))
    if result.get("tasks"):
        tasks(console, result["tasks"])
    for line in words.verdicts(result):
        say(line)
    for prompt, answer in result.get("samples", []):
        console.rule("sample", align="left", style="dim")
        console.print(Text.assemble((prompt, "bold"), answer), soft_wrap=True)
        console.rule(style="dim")
    shares = result.get("goodput", {}).items()
    goodput = ", ".join(f"{cause} {share:.0%}" for cause, share in shares if share >= 0.005)
    unit = unit_of(result)
    rate = figure(result, unit.per_s)
    speed = f", {text(unit.per_s, rate)} {label(unit.per_s)}" if rate else ""
    steps = f"{result['status']} after {result['steps']:,} steps"
    say(f"{steps} in {clock(result['wall_s'])}{speed} ({goodput})")
    if result.get("reason"):
        say(result["reason"])
    checkpoint = result.get("checkpoint")
    if checkpoint and checkpoint["stall_s"] is not None and checkpoint["best_every_s"] is not None:
        say(
            f"a checkpoint stalled {1000 * checkpoint['stall_s']:.0f} ms; at the assumed failure "
            f"rate one every {clock(checkpoint['best_every_s'])} costs the least"
        )
    say(f"results in {result['run']}")
    if result.get("profiles"):
        say(f"profile in {result['run']}/{PROFILES}: {', '.join(result['profiles'])}")
    if result.get("model_path"):
        say(f"model in {result['model_path']}")
    for line in next_steps(result):
        say(line)


def next_steps(result: RunResult) -> list[str]:
    """Return what a user does with a run that is done: read its report, use its model.

    >>> next_steps({"status": "done", "run": "runs/a"})
    ['next: open runs/a/report.html']
    """
    if result["status"] != DONE:
        return []
    run = result["run"]
    page = f"{run}/{REPORT}"
    lines = [f"next: aws s3 cp {page} ." if "://" in run else f"next: open {page}"]
    if (path := result.get("model_path")) and unit_of(result) is not IMAGES:
        command = "rayapp" if shutil.which("rayapp") else f"{sys.executable} -m rayapp"
        lines.append(f"      {command} generate {run}")
        if os.path.exists(f"{path}/adapter_config.json"):
            lines.append(f"      {command} merge {run}    # one model of the adapter and its base")
    return lines


def fact(console: Console, label: str, text: str, warns: bool = False) -> None:
    """Print one line of a plan: what it is about, and the plain text, in colour if it warns."""
    shown = f"[yellow]{escape(text)}[/yellow]" if warns else escape(text)
    console.print(f"[bold]{label:14}[/bold] {shown}", highlight=False, soft_wrap=True)
