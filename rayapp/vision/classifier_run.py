"""Train an image classifier from the driver's side: check, index the images, plan, train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from rich.console import Console

from rayapp.config import ConfigError, VisionConfig
from rayapp.data.images import drawn_shapes, image_sources, indexing
from rayapp.data.images.index import ImageRecipe, Images, load
from rayapp.data.sources import SourceError
from rayapp.driver import checks, command
from rayapp.driver.display import fact
from rayapp.driver.growth import describe, refuse_other_data, schedule_problem, stages_of
from rayapp.driver.placement import on_what_is_there
from rayapp.driver.ray_session import gpus_have_bf16
from rayapp.model import num_parameters
from rayapp.model.classifier import (
    build_classifier,
    class_rows,
    classifier_problems,
    last_layer,
    shape_of_classifier,
)
from rayapp.observe.activity import Phases
from rayapp.observe.records import Plan
from rayapp.observe.result import RunFailed
from rayapp.observe.run_folder import PREPARED
from rayapp.observe.words import number_of_bytes
from rayapp.order import Order
from rayapp.presets import IMAGE_PRESETS
from rayapp.storage import Storage, StorageError, open_storage
from rayapp.train.checkpoint.marker import latest
from rayapp.train.planning import forecast
from rayapp.train.spec import ImageSpec, RunSpec

__all__ = ["RunFailed", "train_classifier"]

MAX_NAMED = 5  # classes


@dataclass(frozen=True)
class CheckedImageRun(command.CheckedRun):
    """What the checks read and resolved."""

    config: VisionConfig
    source: image_sources.ImageSource
    eval_source: image_sources.ImageSource | None

    @property
    def parts(self) -> dict[str, object]:
        parts = ImageRecipe(self.source, self.eval_source, eval_fraction=0.0).parts()
        return {name: parts[name] for name in ("files", "eval_files")}


def check(config: VisionConfig, local_cores: int | None, local_gpus: int) -> CheckedImageRun:
    """Check storage, data, model and number of workers, and whether the planned memory fits.

    `local_cores` is None where the workers run on a running cluster. It draws the images of
    data.path=shapes, if nothing was wrong until then.

    Raises:
        ConfigError: with every problem found.
    """
    config = checks.absolute(config, {"model.path": IMAGE_PRESETS})
    problems = checks.shared_problems(config, local_cores, local_gpus)
    data, path = config.data, config.data.path
    if path == drawn_shapes.NAME and not problems:
        path = drawn_shapes.draw(open_storage(config.run.storage) / PREPARED)
    source = _source(path, data.format, "data.path", problems)
    eval_source = None
    if data.eval_path is not None:
        eval_source = _source(data.eval_path, data.format, "data.eval_path", problems)
    shape = _shape(config, problems)
    if source is None or problems:
        raise ConfigError(problems)
    config = config.with_fields("data", format=source.format)
    run = open_storage(config.run.storage) / config.run.name
    problem = checks.plan_problem(config, lambda each: forecast(each, shape))
    if problem := problem or schedule_problem(config, run):
        raise ConfigError([problem])
    return CheckedImageRun(config, run, source, eval_source)


def _source(
    path: str, format: str, field: str, problems: list[str]
) -> image_sources.ImageSource | None:
    try:
        return image_sources.find(path, format)
    except (SourceError, StorageError) as error:
        problems.append(checks.source_problem(error, path, field))
        return None


def _shape(config: VisionConfig, problems: list[str]) -> Any:
    path = config.model.path
    try:
        shape, source = shape_of_classifier(path, config.model.overrides, ())
    except (ValueError, StorageError) as error:
        problems.append(str(error))
        return None
    problems += classifier_problems(path, None if config.model.from_scratch else source, shape)
    return shape


def settle(ready: CheckedImageRun, gpus: bool) -> CheckedImageRun:
    """Replace train.precision=auto: bf16 on GPUs that have it, else fp32.

    Convolutions in bf16 are no faster on CPUs.
    """
    if ready.config.train.precision != "auto":
        return ready
    precision = "bf16" if gpus and gpus_have_bf16() else "fp32"
    return replace(ready, config=ready.config.with_fields("train", precision=precision))


def prepare(
    ready: CheckedImageRun, gpus: bool, console: Console, phases: Phases
) -> tuple[ImageSpec, None]:
    """Index the images, `describe` the run in its folder, print the plan, and return the spec."""
    config, run = ready.config, ready.run
    images = index(ready, config, phases)
    phases.end("data")
    phases.begin("planning")
    refuse_other_data(run, images.parts)
    of_data = images.fingerprint, images.counts["train"]
    order = order_of(config, images, stages_of(run, *of_data, config.rows_per_step))
    shape, source = shape_of_classifier(config.model.path, config.model.overrides, images.classes)
    rows = [] if config.model.from_scratch or source is None else class_rows(shape, source)
    unknown = [images.classes[number] for number, row in enumerate(rows) if row is None]
    anew = sorted(last_layer(shape)) if unknown else []
    classifier = build_classifier(shape, mean=config.data.mean, std=config.data.std)
    parameters = num_parameters(classifier)
    counted = {"steps": order.num_steps, "images": images.counts["train"]}
    planned = forecast(on_what_is_there(config), shape, on_cpu=not gpus, **counted)
    values = planned.as_dict() if planned else {}
    plan = values | plan_of(config, images, order, parameters) | {"drawn_anew": anew}
    describe(run, config, cast(Plan, plan))
    show(console, config, images, order, parameters, anew, unknown)
    phases.end("plan")
    return RunSpec("rayapp.vision", config, images, order, run.url), None


def index(ready: CheckedImageRun, config: VisionConfig, phases: Phases) -> Images:
    """Make the index of the images, or take that of an earlier run.

    Raises:
        ConfigError: more files are unusable than data.bad_images allows, or nothing is left.
    """
    data = config.data
    fraction = 0.0 if data.eval_path else data.eval_fraction
    recipe = ImageRecipe(ready.source, ready.eval_source, fraction)
    root = open_storage(config.run.storage) / PREPARED
    phases.begin(f"decoding {data.path} once", number_of_bytes(ready.source.num_bytes))
    try:
        told = data.workers, phases.bytes_done
        images = _begun(ready.run, recipe, root) or indexing.prepare(recipe, root, *told)
    except SourceError as error:
        raise ConfigError([str(error)]) from error
    if images.bad_share > data.bad_images:
        shown = "; ".join(f"{place} is {why}" for place, why in images.examples)
        what = f"unusable in {images.bad_share:.1%} of its {images.records} files: {shown}. "
        what += f"Correct them, or raise data.bad_images (now {data.bad_images:.1%})"
        raise ConfigError([f"data.path={data.path} is {what}"])
    if not images.counts["train"]:
        what = f"each of its {images.records} files is either held out or not an image"
        raise ConfigError([f"data.path={data.path} is empty: {what}. Give more images"])
    return images


def _begun(run: Storage, recipe: ImageRecipe, root: Storage) -> Images | None:
    newest, _ = latest(run)
    earlier = replace(recipe, version=2).fingerprint  # the only one that runs were made of
    if newest is None or newest.state["cursor"]["fingerprint"] != earlier:
        return None
    return load(root / earlier)


def order_of(
    config: VisionConfig, images: Images, stages: tuple[tuple[int, int], ...] = ()
) -> Order:
    """Return the order of the run's images; `stages` are those of a run that has grown."""
    train = config.train
    sizes = (train.images_per_step, train.micro_batch, config.run.seed)
    count = images.counts["train"]
    if train.max_steps is None:
        return Order.for_epochs(count, *sizes, train.epochs or 1, stages)
    return replace(Order.for_steps(count, *sizes, train.max_steps), stages=stages)


def plan_of(config: VisionConfig, images: Images, order: Order, parameters: int) -> Plan:
    """Return the fields of plan.json that do not come from the planner."""
    return {
        "parameters": parameters,
        "fingerprint": images.fingerprint,
        "parts": images.parts,
        "steps": order.num_steps,
        "rows_per_step": order.rows_per_step,
        "micro_batches_per_step": config.micro_batches_per_step,
        "images": order.num_steps * order.rows_per_step,
        "epochs": order.num_steps * order.rows_per_step / order.num_rows,
        "data": images.report(),
    }


def show(
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
    train, workers, rows = config.train, config.cluster.min_workers, order.rows_per_step
    micro_batches, each = config.micro_batches_per_step, order.num_micro_batches(workers)
    counts, classes, smallest = images.counts, len(images.classes), min(images.class_counts)
    total = order.num_steps * rows
    norm = "all workers' micro-batches" if config.parallel.sync_batch_norm else "each micro-batch"
    lines = {
        "model": f"{config.model.path}: {parameters:,} parameters, {config.parallel.strategy}, "
        f"{train.precision}; batch-norm over {norm}",
        "data": f"{counts['train']:,} images in {classes:,} classes ({smallest:,} to "
        f"{max(images.class_counts):,} each), {images.num_bytes / 2**20:,.0f} MiB; held out "
        f"{counts['eval']:,}; {images.duplicates:.1%} repeat another",
        "accumulation": f"{rows} images / {train.micro_batch} per micro-batch = "
        f"{micro_batches} micro-batches / {workers} workers = {each} each",
        "steps": f"{order.num_steps:,} x {rows:,} = {total:,} images = "
        f"{total / order.num_rows:.2f} epochs",
    }
    if anew:
        named = ", ".join(unknown[:MAX_NAMED]) + (", ..." if len(unknown) > MAX_NAMED else "")
        lines["drawn anew"] = (
            f"{', '.join(anew)}: the last layer of {config.model.path} has no class of the same "
            f"name for {len(unknown):,} of these {classes:,}: {named}"
        )
    if images.bad:
        reasons = ", ".join(f"{count} {reason}" for reason, count in images.bad.items())
        bad = f"{sum(images.bad.values()):,} of {images.records:,}"
        lines["bad images"] = f"{bad}: {reasons}; e.g. {images.examples[0][0]}"
    for label, text in lines.items():
        fact(console, label, text)


train_classifier = command.Kind(check, settle, prepare).run
