"""Prepare what training needs: the index of the images, their order, and the plan of the run."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from rich.console import Console

from rayapp.config import ConfigError, VisionConfig
from rayapp.data import images as data_images
from rayapp.data.images import ImageRecipe, Images, load
from rayapp.data.sources import SourceError
from rayapp.driver.growth import describe, refuse_other_data, stages_of
from rayapp.driver.placement import on_what_is_there
from rayapp.model import num_parameters
from rayapp.model.classifier import (
    build_classifier,
    class_rows,
    last_layer,
    shape_of_classifier,
)
from rayapp.observe.activity import Phases
from rayapp.observe.records import Plan
from rayapp.observe.run_folder import PREPARED
from rayapp.observe.words import number_of_bytes
from rayapp.order import Order
from rayapp.storage import Storage, open_storage
from rayapp.train.checkpoint.marker import latest
from rayapp.train.spec import ImageSpec, RunSpec
from rayapp.vision import show
from rayapp.vision.check import CheckedImageRun, forecast

KIND = "rayapp.vision"


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
    there = on_what_is_there(config)
    planned = forecast(there, shape, len(images.classes), on_cpu=not gpus, **counted)
    values = planned.as_dict() if planned else {}
    plan = values | plan_of(config, images, order, parameters) | {"drawn_anew": anew}
    describe(run, config, cast(Plan, plan))
    show.plan(console, config, images, order, parameters, anew, unknown)
    phases.end("plan")
    return RunSpec(KIND, config, images, order, run.url), None


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
        images = _begun(ready.run, recipe, root) or data_images.prepare(
            recipe, root, data.workers, phases.bytes_done
        )
    except SourceError as error:
        raise ConfigError([str(error)]) from error
    problems = []
    if images.bad_share > data.bad_images:
        shown = "; ".join(f"{place} is {why}" for place, why in images.examples)
        problems.append(
            f"data.path={data.path} is unusable in {images.bad_share:.1%} of its {images.records} "
            f"files: {shown}. Correct them, or raise data.bad_images (now "
            f"{data.bad_images:.1%})"
        )
    elif not images.counts["train"]:
        problems.append(
            f"data.path={data.path} is empty: each of its {images.records} files is "
            "either held out or not an image. Give more images"
        )
    if problems:
        raise ConfigError(problems)
    return images


def _begun(run: Storage, recipe: ImageRecipe, root: Storage) -> Images | None:
    """Return the index of an earlier version with which this run has trained, if it has."""
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
