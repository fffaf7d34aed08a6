"""Print a plan as tables and bars in the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from rayapp.hardware import GIB, PRICE_DATE, PRICE_SOURCE
from rayapp.planner.advice import Suggestion
from rayapp.planner.answer import Answer, Band
from rayapp.planner.image_memory import ImageLayout
from rayapp.planner.memory import CONTEXT_BYTES, PROCESS_BYTES

MEANING = {  # of the parts of a step
    "traffic": "reading and writing memory",
    "host": "starting kernels",
    "exposed": "communication that nothing hides",
    "stragglers": "waiting for the slowest rank",
}
BAR = 40  # characters of the longest bar


def show(
    console: Console,
    plan: Answer,
    others: list[Suggestion],
    table: list[Answer],
    best: Answer | None,
    choices: Mapping[str, Answer],
) -> None:
    """Print memory, time, cost, suggestions, scaling, cheapest machines, and notes.

    `choices` are the plans of cluster.instance's list, printed where there are several.
    """
    if len(choices) > 1:
        _choices(console, choices)
    _headline(console, plan)
    _memory(console, plan)
    if plan.step is not None:
        _time(console, plan)
    if others:
        _suggestions(console, plan, others)
    if len(table) > 1:
        _scaling(console, table)
    if best is not None:
        _say(console, f"\n[bold]cheapest[/bold]  {machines(best)}: {_settings(best)}")
        _say(console, f"          {_figures(best)}")
    for reason in plan.reasons:
        _say(console, f"[yellow]note[/yellow]  {reason}")
    if plan.question.usd_per_hour is not None:
        _say(console, f"[dim]prices: {PRICE_SOURCE}, {PRICE_DATE}, {plan.question.region}[/dim]")


def machines(plan: Answer) -> str:
    """Return the nodes and workers of a plan as text."""
    question = plan.question
    if question.instance is None:
        return f"{question.workers} workers" + (" on CPUs" if question.layout.on_cpu else "")
    return f"{question.nodes} x {question.instance.name}, {question.workers} workers"


def band(value: Band | None, form: str = ",.3g", unit: str = "") -> str:
    """Format a value with its band; "n/a" for None.

    >>> band(Band(2.0, 1.5, 2.5), ".1f", " h")
    '2.0 h (1.5 to 2.5)'
    """
    if value is None:
        return "n/a"
    return f"{value.value:{form}}{unit} ({value.low:{form}} to {value.high:{form}})"


def hours(value: Band | None) -> str:
    """Format hours with their band, in minutes where they are less than one.

    >>> hours(Band(0.0788, 0.07, 0.09)), hours(Band(3.0, 2.0, 4.0))
    ('4.73 min (4.2 to 5.4)', '3 h (2 to 4)')
    """
    if value is not None and value.value < 1:
        return band(value.times(60.0), ",.3g", " min")
    return band(value, ",.3g", " h")


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _headline(console: Console, plan: Answer) -> None:
    layout, question = plan.question.layout, plan.question
    verdict = "[green]fits[/green]" if plan.fits else "[red]does not fit[/red]"
    verdict = "[yellow]may or may not fit[/yellow]" if plan.fits is None else verdict
    trains = ""
    if isinstance(layout, ImageLayout):
        shape = layout.shape
        how = f"{shape.macs / 1e9:.2f} GMACs of {shape.size} x {shape.size} pixels"
        norm = "all workers" if layout.synchronized else "each micro-batch"
        rest = f"{how}, batch-norm over {norm}"
        step = f"{question.rows_per_step} images"
    else:
        rest = f"activation checkpointing {layout.checkpointing}"
        step = f"{question.rows_per_step} rows x {layout.seq_len} = "
        step += f"{question.amount_per_step:,} tokens"
        if layout.shape.experts > 1:
            trains = f", {layout.shape.active_parameters:,} for a token"
        if layout.lora_rank is not None:
            trains += f", {layout.trainable:,} trained ({layout.lora_method})"
        elif layout.shape.beside:
            trains += f", {layout.trainable:,} trained (the text decoder)"
    _say(console, f"[bold]{question.name}[/bold]  {verdict} on {machines(plan)}")
    how = f"{layout.strategy}, {layout.precision}, {layout.optimizer}, {rest}"
    _say(console, f"model     {layout.shape.parameters:,} parameters{trains}; {how}")
    size = layout.micro_batch
    dealt = f"{question.rows_per_step // size} micro-batches of {size} / {question.workers} workers"
    _say(console, f"step      {step}; {dealt}")


def _memory(console: Console, plan: Answer) -> None:
    unit = "GPU" if plan.question.job is not None else "worker"
    capacity = "" if plan.capacity_gib is None else f" of {plan.capacity_gib:.1f}"
    peak = band(plan.peak_gib, ".1f", " GiB")
    _say(console, f"\n[bold]memory[/bold]    {peak}{capacity} per {unit}")
    _say(console, f"          at its most in: {plan.peak.phase}")
    largest = max(plan.peak.total / GIB, plan.capacity_gib or 0.0)
    held = f" (CUDA and NCCL {CONTEXT_BYTES / GIB:.1f})"
    if plan.question.layout.on_cpu:
        held = f" (Python, torch and Ray {PROCESS_BYTES / GIB:.2f})"
    for name, size in plan.peak.terms.items():
        if size:
            drawn = "█" * max(1, round(BAR * size / GIB / largest))
            note = held if name == "slack" else ""
            _say(console, f"  {name:12} {size / GIB:8.2f} GiB {drawn}{note}")


def _time(console: Console, plan: Answer) -> None:
    assert plan.step is not None
    _say(console, f"\n[bold]step[/bold]      {band(plan.step_s, '.3g', ' s')}")
    convolved = isinstance(plan.question.layout, ImageLayout)
    for name, seconds in vars(plan.step).items():
        if convolved and name == "attention_s":
            continue
        name = "convolutions" if convolved and name == "matrices_s" else name
        share = seconds / plan.step.total_s
        drawn = "█" * round(BAR * share)
        name = name.removesuffix("_s")
        note = f" ({MEANING[name]})" if name in MEANING and drawn else ""
        _say(console, f"  {name:12} {seconds:8.3f} s   {share:4.0%} {drawn}{note}")
    assert plan.rate is not None
    per_gpu = plan.rate.times(1 / plan.workers)
    rate = band(plan.rate, ",.0f", f" {plan.question.unit.many}/s")
    _say(console, f"[bold]speed[/bold]     {rate}")
    _say(console, f"          {band(per_gpu, ',.0f', ' a GPU')}, MFU {band(plan.mfu, '.1%')}")
    if plan.epoch_hours is not None:
        count = plan.question.epoch_rows
        _say(console, f"[bold]epoch[/bold]     {hours(plan.epoch_hours)}, {count:,} images")
    _say(console, f"[bold]run[/bold]       {_figures(plan)}")
    saving = plan.saving
    if saving is not None and plan.goodput is not None:
        times = f"{saving.stall_s:.2g} s stalled, {saving.upload_s:.0f} s to upload"
        best = f"one every {saving.every_s / 60:.0f} min costs least; goodput {plan.goodput:.1%}"
        _say(console, f"saving    {saving.size_gib:.1f} GiB a checkpoint, {times}; {best}")
        run = "" if saving.usd is None else f"${saving.usd:,.2f} for the run, "
        month = f"${saving.usd_per_month:,.2f} a month for the {plan.question.keep} that are kept"
        _say(console, f"storing   checkpoints in S3 cost {run}then {month}")


def _figures(plan: Answer) -> str:
    each = f"${band(plan.usd_per_1m, ',.3g')} per 1M {plan.question.unit.many}"
    return f"{hours(plan.hours)}, ${band(plan.cost_usd, ',.0f')}, {each}"


def _settings(plan: Answer) -> str:
    layout = plan.question.layout
    size = f"train.micro_batch={layout.micro_batch}"
    if isinstance(layout, ImageLayout):
        return size
    return f"{size} parallel.activation_checkpointing={layout.checkpointing}"


def _figure(value: Band | float | None, form: str) -> str:
    number = value.value if isinstance(value, Band) else value
    return "n/a" if number is None else f"{number:{form}}"


def _suggestions(console: Console, plan: Answer, others: list[Suggestion]) -> None:
    table = _table("faster" if plan.fits else "what would fit")
    table.add_column("set", overflow="fold")
    for name in ("GiB", f"{plan.question.unit.many}/s"):
        table.add_column(name, no_wrap=True)
    for each in others:
        gib, rate = band(each.answer.peak_gib, ".1f"), band(each.answer.rate, ",.0f")
        table.add_row(each.change.replace("[", r"\["), gib, rate)
    console.print()
    console.print(table)


def _choices(console: Console, choices: Mapping[str, Answer]) -> None:
    columns = ("cluster.instance", "nodes", "fits", "GiB", "hours", "USD/h", "USD")
    table = _table("in order of preference", *columns)
    for name, plan in choices.items():
        price, nodes = plan.question.usd_per_hour, plan.question.nodes
        table.add_row(
            name,
            str(nodes),
            {True: "yes", False: "no", None: "perhaps"}[plan.fits],
            _figure(plan.peak_gib, ".1f"),
            _figure(plan.hours, ",.3g"),
            _figure(None if price is None else nodes * price, ",.4g"),
            _figure(plan.cost_usd, ",.0f"),
        )
    console.print(table)
    console.print()


def _scaling(console: Console, answers: list[Answer]) -> None:
    rate = f"{answers[0].question.unit.many}/s"
    epochs = answers[0].epoch_hours is not None
    columns = ["nodes", "GPUs", "fits", "GiB", rate, "efficiency", *["epoch h"] * epochs]
    table = _table("more or fewer nodes, the same step", *columns, "hours", "USD")
    first = next((plan for plan in answers if plan.fits), answers[0])
    assert first.rate is not None
    for plan in answers:
        assert plan.rate is not None
        efficiency = plan.rate.value / plan.workers * first.workers / first.rate.value
        table.add_row(
            str(plan.question.nodes),
            str(plan.workers),
            "yes" if plan.fits else "no",
            _figure(plan.peak_gib, ".1f"),
            _figure(plan.rate, ",.0f"),
            f"{efficiency:.0%}",
            *[_figure(plan.epoch_hours, ",.3g")] * epochs,
            _figure(plan.hours, ",.3g"),
            _figure(plan.cost_usd, ",.0f"),
        )
    console.print()
    console.print(table)
