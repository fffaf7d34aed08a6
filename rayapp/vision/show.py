"""Print the plan of a run as equations, and statistics of its images."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from rayapp.config import VisionConfig
from rayapp.data.images import Images
from rayapp.order import Order

MAX_NAMED = 5  # classes


def plan(
    console: Console,
    config: VisionConfig,
    images: Images,
    order: Order,
    parameters: int,
    anew: Sequence[str] = (),
    unknown: Sequence[str] = (),
) -> None:
    """Print the plan as equations, and statistics of the images.

    `anew` are the parameters whose rows of the `unknown` classes are drawn and not loaded.
    """
    train, workers = config.train, config.cluster.min_workers
    micro_batches, each = config.micro_batches_per_step, order.num_micro_batches(workers)
    counts, smallest = images.counts, min(images.class_counts)
    total = order.num_steps * order.rows_per_step
    norm = "all workers' micro-batches" if config.parallel.sync_batch_norm else "each micro-batch"
    lines = {
        "model": f"{config.model.path}: {parameters:,} parameters, {config.parallel.strategy}, "
        f"{train.precision}; batch-norm over {norm}",
        "data": f"{counts['train']:,} images in {len(images.classes):,} classes ({smallest:,} to "
        f"{max(images.class_counts):,} each), {images.num_bytes / 2**20:,.0f} MiB; held out "
        f"{counts['eval']:,}; {images.duplicates:.1%} repeat another",
        "accumulation": f"{order.rows_per_step} images / {train.micro_batch} per micro-batch = "
        f"{micro_batches} micro-batches / {workers} workers = {each} each",
        "steps": f"{order.num_steps:,} x {order.rows_per_step:,} = {total:,} images = "
        f"{total / order.num_rows:.2f} epochs",
    }
    if anew:
        named = ", ".join(unknown[:MAX_NAMED]) + (", ..." if len(unknown) > MAX_NAMED else "")
        lines["drawn anew"] = (
            f"{', '.join(anew)}: the last layer of {config.model.path} has no class of the same "
            f"name for {len(unknown):,} of these {len(images.classes):,}: {named}"
        )
    if images.bad:
        reasons = ", ".join(f"{count} {reason}" for reason, count in images.bad.items())
        lines["bad images"] = (
            f"{sum(images.bad.values()):,} of {images.records:,}: {reasons}; "
            f"e.g. {images.examples[0][0]}"
        )
    for label, text in lines.items():
        console.print(f"[bold]{label:14}[/bold] {escape(text)}", highlight=False, soft_wrap=True)
