"""Turn a config into a question for the planner: look up the model's shape and the machines.

Only local files are read, never the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rayapp import hardware
from rayapp.config import Config, ConfigError, Lora, RunConfig, VisionConfig
from rayapp.config.fields import IMAGES, TOKENS, Unit
from rayapp.config.language import Precision
from rayapp.hardware import Instance, UnknownInstance
from rayapp.planner.image_memory import ImageLayout, image_layout
from rayapp.planner.measured import Frozen
from rayapp.planner.memory import Layout
from rayapp.planner.shape import Shape, UnknownShape, has_formula, shape_of
from rayapp.planner.times import Workload, machine_of
from rayapp.planner.trained import config_values, length_problem, text_section


class UnknownModel(ConfigError):
    """The only problem of a config: nothing here gives the model's shape."""


class ReadModel(Protocol):
    """Read the shape of a model that has no formula here from what transformers builds of it."""

    def __call__(
        self, config: Mapping[str, Any], *, seq_len: int, fp32: bool, lora: Lora | None
    ) -> Shape:
        """Return the shape that a config.json describes.

        Raises:
            UnknownShape: transformers cannot build it, or it cannot run on shapes alone.
        """


@dataclass(frozen=True)
class Question:
    """A run with everything that the planner needs to know."""

    name: str
    layout: Layout | ImageLayout
    instance: Instance | None
    nodes: int
    workers: int
    rows_per_step: int
    steps: int | None
    region: str
    usd_per_hour: float | None
    """Price of one instance."""
    mtbf_hours: float
    """Mean time between failures of one worker."""
    capacity_gib: float | None = None
    """GiB available to a worker, as its machine reports; None: the instance's memory."""
    keep: int = 2
    """Committed checkpoints that are kept."""
    epoch_rows: int | None = None
    """Training images per epoch, if known."""

    @property
    def unit(self) -> Unit:
        """The unit of the run: tokens or images."""
        return IMAGES if isinstance(self.layout, ImageLayout) else TOKENS

    @property
    def amount_per_step(self) -> int:
        """Tokens or images per step, all workers together."""
        return self.rows_per_step * self.layout.row

    @property
    def job(self) -> Workload[Any] | None:
        """The step's work; None if the config names no instance, or one without a GPU."""
        if self.instance is None or self.instance.gpu is None:
            return None
        machine = machine_of(self.instance, self.nodes, -(-self.workers // self.nodes))
        count = per_worker(self.rows_per_step, self.layout.micro_batch, self.workers)
        return Workload(self.layout, machine, count)

    @property
    def spare_cpus(self) -> int:
        """CPUs of all nodes beside one per worker, and two per node for the system, at least 1.

        They read, decode and augment images.
        """
        vcpus = 0 if self.instance is None else self.instance.vcpus
        return max(1, self.nodes * max(1, vcpus - 2) - self.workers)

    def having(self, **changes: Any) -> Question | None:
        """Return the question with other fields of the layout.

        None if the micro-batch does not divide the step's rows.
        """
        layout = replace(self.layout, **changes)
        if self.rows_per_step % layout.micro_batch:
            return None
        count = per_worker(self.rows_per_step, layout.micro_batch, self.workers)
        return replace(self, layout=replace(layout, accumulates=count > 1))

    def on(self, instance: Instance, nodes: int, **changes: Any) -> Question | None:
        """Return the question for other machines, with one worker per GPU; see `having`."""
        workers = nodes * instance.gpus
        shards = shards_of(self.layout.strategy, workers, instance.gpus)
        same = self.instance is not None and instance.name == self.instance.name
        price = self.usd_per_hour if same else instance.usd_per_hour.get(self.region)
        other = replace(self, instance=instance, nodes=nodes, workers=workers, usd_per_hour=price)
        return other.having(shards=shards, **changes)


def shards_of(strategy: str, workers: int, replica: int) -> int:
    """Return how many workers each parameter is sharded over; `replica` is a replica's workers."""
    whole = {"full_shard": workers, "shard_grad_op": workers, "no_shard": 1, "ddp": 1}
    return {"auto": workers, **whole}.get(strategy, replica)


def ask(
    config: Config | VisionConfig,
    *,
    region: str = hardware.DEFAULT_REGION,
    usd_per_hour: float | None = None,
    steps: int | None = None,
    model: Mapping[str, Any] | None = None,
    images: int | None = None,
    capacity_gib: float | None = None,
    on_cpu: bool = False,
    read: ReadModel | None = None,
    count: Callable[[Mapping[str, Any], tuple[str, ...]], Frozen] | None = None,
) -> Question:
    """Return the question of a config; `usd_per_hour` overrides the price of one instance.

    `model` is the model's config.json, overrides included, if the caller has it. If the config
    names no instance, `capacity_gib` is the memory of a worker and `on_cpu` says it has no GPU.
    `read` reads a model that no formula is for, `count` counts what train.freeze names. `images` is
    the number of training images of a classifier, by default `data.count`.

    Replicated weights are planned for the most workers that the config allows, since a GPU's memory
    does not depend on their number; sharded weights for the fewest.

    Raises:
        ConfigError: with every problem; UnknownModel if the only one is that the model's shape is
            not known.
    """
    problems: list[str] = []
    instance = named_instance(config, problems)
    cluster, most = config.cluster, config.parallel.strategy == "ddp"
    workers = cluster.max_workers if most else cluster.min_workers
    nodes = nodes_of(instance, workers)
    shards = replica_shards(config, workers, nodes, problems)
    precision = _precision(config, instance)
    layout: Layout | ImageLayout | None
    if isinstance(config, VisionConfig):
        images = images or config.data.count
        layout = image_layout(config, model, precision, problems)
    else:
        layout = _language_layout(config, model, precision, read, count, problems)
    if problems or layout is None:
        unknown = layout is None and len(problems) == 1
        raise (UnknownModel if unknown else ConfigError)(problems)
    no_gpu = instance.gpu is None if instance is not None else on_cpu
    question = Question(
        name=config.run.name,
        layout=layout,
        instance=instance,
        nodes=nodes,
        workers=workers,
        rows_per_step=config.rows_per_step,
        steps=steps if steps is not None else _steps_of(config, images),
        region=region,
        usd_per_hour=price_of(config, instance, region, usd_per_hour),
        mtbf_hours=config.cluster.mtbf_hours,
        keep=config.checkpoint.keep,
        capacity_gib=None if instance is not None else capacity_gib,
        epoch_rows=images,
    ).having(shards=shards, on_cpu=no_gpu)
    assert question is not None, "the config refuses a micro-batch that divides no step"
    return question


def _steps_of(config: Config | VisionConfig, rows: int | None) -> int | None:
    train = config.train
    if train.max_steps is not None or rows is None:
        return train.max_steps
    return -(-rows * (train.epochs or 1) // config.rows_per_step)


def replica_shards(
    config: Config | VisionConfig, workers: int, nodes: int, problems: list[str]
) -> int:
    """Return how many workers each parameter is sharded over; append to `problems`."""
    replicas = config.parallel.replicas or nodes
    strategy = config.parallel.strategy
    if strategy == "hybrid_shard" and workers % replicas:
        those = ", ".join(str(n) for n in range(1, workers + 1) if workers % n == 0)
        problems.append(
            f"parallel.replicas={replicas} does not divide {workers} workers: every replica must "
            f"have the same number. Set one of {those}"
        )
    return shards_of(strategy, workers, workers // replicas)


def counts_of(plan: Mapping[str, Any]) -> dict[str, int]:
    """Return the `steps` and training `images` that a prepared run's plan.json holds, by name."""
    images = (plan.get("data") or {}).get("images") or {}
    counts = {"steps": plan.get("steps"), "images": images.get("train")}
    return {name: int(count) for name, count in counts.items() if count is not None}


def _language_layout(
    config: Config,
    model: Mapping[str, Any] | None,
    precision: Precision,
    read: ReadModel | None,
    count: Callable[[Mapping[str, Any], tuple[str, ...]], Frozen] | None,
    problems: list[str],
) -> Layout | None:
    """Return the layout on one worker; None, with a new problem, if the shape is not known."""
    train, parallel, lora = config.train, config.parallel, config.model.lora
    values = config_values(config, problems) if model is None else model
    if values is None:
        return None
    text = text_section(values)
    limit = text.get("max_position_embeddings", text.get("n_positions"))  # the latter: GPT-2
    if problem := length_problem(config, limit):
        problems.append(problem)
    try:
        if read is None or has_formula(values):
            shape = shape_of(values)
        else:
            fp32 = precision == "fp32"
            shape = read(values, seq_len=config.data.seq_len, fp32=fp32, lora=lora)
    except (UnknownShape, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        problems.append(f"model.path={config.model.path} is not known: {error}")
        return None
    layout = Layout(
        shape=shape,
        shards=1,
        micro_batch=train.micro_batch or 1,  # auto starts at one row, full_shard and eager blocks
        seq_len=config.data.seq_len,
        strategy=config.strategy,
        checkpointing=parallel.activation_checkpointing,
        precision=precision,
        optimizer=train.optimizer,
        compiled=bool(train.compile),
        loss_chunk=train.loss_chunk,
        pairs=train.objective != "sft",
        reference=config.reference() == "adapters off",
        lora_rank=lora.rank if lora else None,
        lora_targets=lora.targets if lora else (),
        lora_experts=lora.target_parameters if lora else (),
        lora_method=lora.name if lora else "LoRA",
        dora=lora is not None and lora.dora,
        new_tokens=len(config.model.new_tokens) if lora else 0,
        quantize=lora.quantize if lora else "none",
        cpu_offload=parallel.cpu_offload,
        activation_offload=parallel.activation_offload,
    )
    if count is not None and train.freeze:
        return replace(layout, frozen=count(values, train.freeze))
    return layout


def _precision(config: Config | VisionConfig, instance: Instance | None) -> Precision:
    if config.train.precision != "auto":
        return config.train.precision
    gpu = None if instance is None else instance.gpu
    if gpu is None:
        return "fp32" if isinstance(config, VisionConfig) else "bf16"
    return "bf16" if gpu.flops["bf16"] is not None else "fp32"


def named_instance(config: RunConfig, problems: list[str] | None = None) -> Instance | None:
    """Return the instance that `cluster.instance` names, the first of a list; None for none.

    An instance that is not in the table is appended to `problems` and gives None; without
    `problems` it raises.

    Raises:
        ConfigError: one is not in the table.
    """
    found, unknown = list[Instance](), list[str]()
    for choice in config.cluster.choices:
        try:
            found.append(hardware.instance(choice.instance))
        except UnknownInstance as error:
            unknown.append(str(error))
    if unknown and problems is None:
        raise ConfigError(unknown)
    if problems is not None:
        problems += unknown
    return found[0] if found and not unknown else None


def nodes_of(instance: Instance | None, workers: int) -> int:
    """Return how many nodes the workers need: one worker per GPU, or one node without GPUs."""
    return 1 if instance is None or not instance.gpus else -(-workers // instance.gpus)


def price_of(
    config: RunConfig, instance: Instance | None, region: str, usd_per_hour: float | None = None
) -> float | None:
    """Return USD per hour of one instance: the argument, else the config, else the price list.

    Of a list in the config its first choice counts. None if none of them has a price; the price
    list has none of spot.
    """
    choice = config.cluster.choices[0] if config.cluster.choices else None
    price = usd_per_hour or config.cluster.usd_per_hour
    if price is None and choice is not None:
        price = choice.usd_per_hour
    if price is None and instance is not None and (choice is None or choice.market != "spot"):
        price = instance.usd_per_hour.get(region)
    return price


def per_worker(rows: int, size: int, workers: int) -> int:
    """Return how many micro-batches of `size` rows a worker runs per step, as Order deals them.

    >>> per_worker(12, 2, 5)
    2
    """
    return -(-rows // size // workers)
