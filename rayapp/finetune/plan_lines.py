"""Print the plan of a run as equations, and statistics of its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from rayapp.config import Config
from rayapp.data.prepared import Prepared, reasons
from rayapp.driver.display import fact
from rayapp.finetune.ends import NO_END
from rayapp.observe.records import Rendered
from rayapp.order import Order
from rayapp.planner.trained import random_weights

MARKS = "⟦", "⟧"  # around text that bears loss, where there are no colours


def plan(
    console: Console,
    config: Config,
    prepared: Prepared,
    order: Order,
    parameters: int,
    trainable: int,
    by_name: Sequence[str] = (),
) -> None:
    """Print the plan as equations, and statistics of the data."""
    train, data = config.train, config.data
    report = prepared.report()
    counts = report["train"]
    workers = config.cluster.min_workers
    rows, seq_len = order.rows_per_step, data.seq_len
    micro_batches = rows // config.micro_batch
    per_worker = order.num_micro_batches(workers)
    tokens = order.num_steps * train.tokens_per_step
    epochs = order.num_steps * rows / prepared.epoch_rows
    lora = config.model.lora
    trained = "all trained" if trainable == parameters else f"{trainable:,} trained"
    if trainable < parameters:
        whole = "the text decoder" if not train.freeze else "not what is frozen"
        trained += f", {whole if lora is None else lora.name}"
    lines = {
        "model": f"{config.model.path}: {parameters:,} parameters ({trained}), "
        f"{config.strategy}, {train.precision}",
        "data": f"{counts['documents']:,} documents, {counts['tokens']:,} tokens -> "
        f"{counts['rows']:,} rows of {seq_len} ({report['fill']:.1%} full, "
        f"{report['loss_share']:.1%} bear loss); held out {report['eval']['documents']:,} "
        f"documents, {report['eval']['rows']:,} rows",
        "documents": f"lengths {lengths(counts['lengths'])}; {counts['split']:,} split, "
        f"{counts['truncated']:,} truncated ({counts['cut_tokens']:,} tokens cut), "
        f"{report['duplicates']:.1%} repeat another",
        "rows per step": f"{train.tokens_per_step:,} tokens / {seq_len} = {rows}",
        "accumulation": f"{rows} rows / {config.micro_batch} per micro-batch = {micro_batches} "
        f"micro-batches / {workers} workers = {per_worker} each",
        "steps": f"{order.num_steps:,} x {train.tokens_per_step:,} = {tokens:,} tokens = "
        f"{epochs:.2f} epochs",
    }
    lines |= _ways(config, prepared, order)
    if idle := per_worker * workers - micro_batches:
        lines["idle"] = (
            f"{idle} of {workers} workers have no rows for their last micro-batch. "
            f"Set {_without_idle(rows, workers, data.seq_len)}"
        )
    if report["bad"]:
        lines["bad rows"] = (
            f"{sum(report['bad'].values()):,} of {report['records']:,}: "
            f"{reasons(report['bad'], report['examples'])}"
        )
    if notes := report.get("notes"):
        lines["noted"] = "; ".join(f"{count:,} {what}" for what, count in notes.items())
    for label, text in (*lines.items(), *(("by name", text) for text in by_name)):
        fact(console, label, text)
        if label == "model" and (warning := random_weights(config)):
            fact(console, "", warning, warns=True)


def _without_idle(rows: int, workers: int, seq_len: int) -> str:
    """Return what to set so that all workers have the same number of micro-batches.

    >>> _without_idle(8, 2, 512), _without_idle(3, 2, 512)
    ('train.micro_batch=4', 'train.tokens_per_step=2048')
    """
    if rows % workers == 0:
        return f"train.micro_batch={rows // workers}"
    return f"train.tokens_per_step={-(-rows // workers) * workers * seq_len}"


def _ways(config: Config, prepared: Prepared, order: Order) -> dict[str, str]:
    """Return lines about windows, packings and the sources of a mixture, where there are some."""
    data, report, lines = config.data, prepared.report(), dict[str, str]()
    rows = order.num_steps * order.rows_per_step
    if prepared.windows:
        later = f"; {sum(prepared.known)} are prepared" if order.more else ""
        lines["windows"] = f"{sum(prepared.windows)} of about {data.window_bytes:,} bytes{later}"
    if prepared.packings:
        each = ", ".join(f"{count:,}" for count in prepared.packings)
        lines["packings"] = f"{each} rows, which epochs take in turn"
    parts = report.get("sources", {}).items()
    for number, (path, part) in enumerate(parts):
        share = data.mixture[path] / sum(data.mixture.values())
        passes = share * rows / prepared.rows_of_sources[number]
        every = prepared.windows[number] if order.more else 0
        later = f" in {prepared.known[number]} of {every} windows" if every else ""
        lines[f"source {path}"] = (
            f"{share:.1%} of the rows; {part['train']['documents']:,} documents, "
            f"{part['train']['tokens']:,} tokens -> {part['train']['rows']:,} rows{later}, "
            f"{passes:.2f} epochs"
        )
    return lines


def unused(console: Console, columns: Mapping[str, tuple[str, ...]]) -> None:
    """Print which columns of each source nothing is made of."""
    for path, names in columns.items():
        if names:
            told = f"{path} has columns that are left out: {', '.join(names)}"
            fact(console, "not used", told, warns=True)


def ends(console: Console, lines: list[str]) -> None:
    """Print what ends answers and generations, and in colour what ends none."""
    for line in lines:
        fact(console, "ends", line, warns=NO_END in line)


def records(console: Console, rendered: list[Rendered]) -> None:
    """Print the first document of each source; what bears loss is between brackets."""
    for each in rendered:
        for document in each["documents"][:1]:
            text = "".join(part.join(MARKS) if loss else part for part, loss in document)
            path = each["path"]
            fact(console, "rendered", f"{path}, with loss in {MARKS[0]} {MARKS[1]}: {text}")


def lengths(counts: dict[str, int]) -> str:
    """Draw a histogram of the documents' lengths in tokens, by powers of two.

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
