"""Turn an image classifier's config into a question: look up its layers and machines.

    question = ask_images(config, region="us-west-2", images=1_281_167)

Only local files are read, never the network. The number of images comes from the caller or from
`data.count`, else it is unknown. With DDP the plan is for the most workers that the config allows,
since a GPU's memory does not depend on their number; with sharded weights it is for the fewest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rayapp import hardware
from rayapp.config import ConfigError, VisionConfig
from rayapp.hardware import Instance
from rayapp.planner.image_memory import ImageLayout
from rayapp.planner.image_shape import ImageShape, image_shape_of
from rayapp.planner.machines import named_instance, per_worker, price_of, workers_of
from rayapp.planner.question import Question, replica_shards, spare_cpus
from rayapp.planner.shape import UnknownShape
from rayapp.planner.times import Workload, machine_of
from rayapp.planner.trained import read_config_json
from rayapp.presets.images import IMAGE_PRESETS


def ask_images(
    config: VisionConfig,
    *,
    region: str = hardware.DEFAULT_REGION,
    usd_per_hour: float | None = None,
    steps: int | None = None,
    model: Mapping[str, Any] | None = None,
    images: int | None = None,
    capacity_gib: float | None = None,
    on_cpu: bool = False,
) -> Question:
    """Return the question of a config; `model` is its config.json if the caller has it.

    If the config names no instance, `capacity_gib` is the memory of a worker and `on_cpu` says it
    has no GPU.

    Raises:
        ConfigError: with every problem.
    """
    problems: list[str] = []
    shape = _shape(config, model, problems)
    instance = named_instance(config, problems)
    sharded = config.parallel.strategy != "ddp"
    workers, nodes = workers_of(config, instance, most=not sharded)
    shards = replica_shards(config, workers, nodes, problems)
    if problems or shape is None:
        raise ConfigError(problems)
    rows, size = config.train.images_per_step, config.train.micro_batch
    micro_batches = per_worker(rows, size, workers)
    layout = _layout(config, shape, instance, shards, micro_batches)
    layout = replace(layout, on_cpu=layout.on_cpu or (instance is None and on_cpu))
    job = None
    if instance is not None and instance.gpu is not None:
        job = Workload(
            layout, machine_of(instance, nodes, -(-workers // nodes)), 0.0, micro_batches
        )
    images = images or config.data.count
    return Question(
        name=config.run.name,
        job=job,
        layout=layout,
        instance=instance,
        nodes=nodes,
        workers=workers,
        rows_per_step=rows,
        steps=steps if steps is not None else _steps(config, images),
        region=region,
        usd_per_hour=price_of(config, instance, region, usd_per_hour),
        mtbf_hours=config.cluster.mtbf_hours,
        keep=config.checkpoint.keep,
        capacity_gib=None if instance is not None else capacity_gib,
        epoch_rows=images,
        spare_cpus=None if instance is None else spare_cpus(instance, nodes, workers),
    )


def _steps(config: VisionConfig, images: int | None) -> int | None:
    """Return train.max_steps, else the steps of all epochs; None if the images are not known."""
    train = config.train
    if train.max_steps is not None or images is None:
        return train.max_steps
    return -(-images * (train.epochs or 1) // train.images_per_step)


def _layout(
    config: VisionConfig,
    shape: ImageShape,
    instance: Instance | None,
    shards: int,
    micro_batches: int,
) -> ImageLayout:
    train = config.train
    gpu = None if instance is None else instance.gpu
    has_bf16 = gpu is not None and gpu.flops["bf16"] is not None
    wanted = train.precision
    precision = wanted if wanted != "auto" else "bf16" if has_bf16 else "fp32"
    return ImageLayout(
        shape=shape,
        shards=shards,
        micro_batch=train.micro_batch,
        strategy=config.parallel.strategy,
        precision=precision,
        optimizer=train.optimizer,
        compiled=train.compile,
        averaged=train.ema > 0,
        synchronized=config.parallel.sync_batch_norm,
        accumulates=micro_batches > 1,
        on_cpu=instance is not None and instance.gpu is None,
    )


def _shape(
    config: VisionConfig, model: Mapping[str, Any] | None, problems: list[str]
) -> ImageShape | None:
    values = model
    if values is None:
        values = _config_json(config.model.path, problems)
        if values is None:
            return None
        values = {**values, **config.model.overrides}
    try:
        return image_shape_of(values, config.data.size)
    except UnknownShape as error:
        problems.append(f"model.path={config.model.path} is not known: {error}")
        return None


def _config_json(path: str, problems: list[str]) -> Mapping[str, Any] | None:
    preset = IMAGE_PRESETS.get(path)
    if preset is not None:
        return {"model_type": preset.model_type, **preset.fields}
    return read_config_json(path, IMAGE_PRESETS, problems)
