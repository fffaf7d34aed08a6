"""What the driver prints: the plan as equations, progress, and where the results lie.

A terminal gets a bar that is redrawn; anything else (a job's log, a file) gets a line now and then.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rayapp.config import Config
from rayapp.data.prepared import Prepared
from rayapp.order import Order
from rayapp.progress import duration

LINE_EVERY_S = 5.0


def plan(
    console: Console, config: Config, prepared: Prepared, order: Order, parameters: int
) -> None:
    """Print the run as equations, and what the data is like."""
    train, data = config.train, config.data
    report = prepared.report()
    counts = report["train"]
    workers = config.cluster.min_workers
    rows, seq_len = order.rows_per_step, data.seq_len
    micro_batches = rows // config.micro_batch
    per_worker = -(-micro_batches // workers)
    tokens = order.num_steps * train.tokens_per_step
    epochs = order.num_steps * rows / order.num_rows
    lines = {
        "model": f"{config.model.path}: {parameters:,} parameters, {config.parallel.strategy}, "
        f"{train.precision}",
        "data": f"{counts['documents']:,} documents, {counts['tokens']:,} tokens -> "
        f"{counts['rows']:,} rows of {seq_len} ({report['fill']:.1%} full, "
        f"{report['loss_share']:.1%} bear loss); held out {report['eval']['documents']:,} "
        f"documents, {report['eval']['rows']:,} rows",
        "documents": f"{lengths(counts['lengths'])}; {counts['split']:,} split, "
        f"{counts['truncated']:,} truncated ({counts['cut_tokens']:,} tokens cut), "
        f"{report['duplicates']:.1%} repeat another",
        "rows per step": f"{train.tokens_per_step:,} tokens / {seq_len} = {rows}",
        "accumulation": f"{rows} rows / {config.micro_batch} per micro-batch = {micro_batches} "
        f"micro-batches / {workers} workers = {per_worker} each",
        "steps": f"{order.num_steps:,} x {train.tokens_per_step:,} = {tokens:,} tokens = "
        f"{epochs:.2f} epochs",
    }
    for path, part in report.get("sources", {}).items():
        share = data.mixture[path] / sum(data.mixture.values())
        passes = share * order.num_steps * rows / part["train"]["rows"]
        lines[f"source {path}"] = (
            f"{share:.1%} of the rows; {part['train']['documents']:,} documents, "
            f"{part['train']['tokens']:,} tokens -> {part['train']['rows']:,} rows, "
            f"{passes:.2f} epochs"
        )
    if report["bad"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report["bad"].items())
        lines["bad rows"] = (
            f"{sum(report['bad'].values()):,} of {report['records']:,}: {reasons}; "
            f"e.g. {report['examples'][0][0]}"
        )
    for label, text in lines.items():
        console.print(f"[bold]{label:14}[/bold] {_plain(text)}", highlight=False, soft_wrap=True)


def lengths(counts: dict[str, int]) -> str:
    """Draw how many documents have how many tokens, by powers of two.

    >>> lengths({"2^3": 1, "2^5": 40, "2^6": 20})
    '8 ▁ ▇▄ 128 tokens'
    """
    by_power = {int(name.removeprefix("2^")): count for name, count in counts.items()}
    if not by_power:
        return "none"
    low, high, most = min(by_power), max(by_power), max(by_power.values())
    bars = "".join(
        "▁▂▃▄▅▆▇"[(7 * by_power[power] - 1) // most] if by_power.get(power) else " "
        for power in range(low, high + 1)
    )
    return f"{2**low:,} {bars} {2 ** (high + 1):,} tokens"


class Bar:
    """Progress of a run as its metrics lines come in."""

    def __init__(self, console: Console, num_steps: int, label: str) -> None:
        self.console, self.num_steps, self.label = console, num_steps, label
        self._last_line_s = 0.0
        self._progress: Progress | None = None
        self._task: Any = None
        self._started: tuple[float, int] | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task(label, total=num_steps, figures="")
            self._progress.start()

    def update(self, line: dict[str, Any]) -> None:
        """Show a line of metrics.jsonl."""
        step = line["step"]
        if self._started is None:
            self._started = (line["time"], step)
        figures = (
            f"loss {_number(line['loss'])}  {_number(line['loss_per_byte'])} nats/byte  "
            f"{line['tokens_per_s']:,.0f} tok/s"
        )
        if line.get("eval_loss") is not None:
            figures += f"  held-out {_number(line['eval_loss'])}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, figures=figures)
            return
        now = time.monotonic()
        if now - self._last_line_s >= LINE_EVERY_S or step == self.num_steps:
            self._last_line_s = now
            elapsed, done = line["time"] - self._started[0], step - self._started[1]
            left = (
                "" if not done else f"  {duration((self.num_steps - step) * elapsed / done)} left"
            )
            self.console.print(
                f"step {step}/{self.num_steps}  {figures}{left}", highlight=False, soft_wrap=True
            )

    def note(self, text: str) -> None:
        """Say what is going on before the first step."""
        if self._progress is not None:
            self._progress.update(self._task, figures=text)
        else:
            self.console.print(text, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(_plain(text), highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._progress is not None:
            self._progress.stop()


def result(console: Console, result: dict[str, Any]) -> None:
    """Print what came out and where it lies."""
    loss = result.get("eval_loss")
    if loss is not None:
        per_byte = result["eval_loss_per_byte"]
        console.print(
            f"held-out loss {loss:.4f} nats/token = {_number(per_byte)} nats/byte", highlight=False
        )
    for prompt, text in result.get("samples", []):
        console.rule("sample", align="left", style="dim")
        console.print(
            f"[bold]{_plain(prompt)}[/bold]{_plain(text)}", highlight=False, soft_wrap=True
        )
        console.rule(style="dim")
    goodput = ", ".join(
        f"{cause} {share:.0%}"
        for cause, share in result.get("goodput", {}).items()
        if share >= 0.005
    )
    rate = result.get("tokens_per_s")
    speed = f", {rate:,.0f} tokens/s" if rate else ""
    console.print(
        f"{result['status']} after {result['steps']:,} steps in {duration(result['wall_s'])}"
        f"{speed} ({goodput})",
        highlight=False,
        soft_wrap=True,
    )
    checkpoint = result.get("checkpoint", {})
    if checkpoint.get("stall_s") is not None:
        console.print(
            f"a checkpoint stalled {1000 * checkpoint['stall_s']:.0f} ms; at the assumed failure "
            f"rate one every {duration(checkpoint['best_every_s'])} costs the least",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"results in {result['run']}", highlight=False, soft_wrap=True)
    if result.get("model_path"):
        console.print(f"model in {result['model_path']}", highlight=False, soft_wrap=True)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"
