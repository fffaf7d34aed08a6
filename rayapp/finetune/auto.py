"""What `auto` takes: micro-batch, strategy, compiled blocks; and fewer rows after out-of-memory.

    config = as_begun(config, run)                              # what a resumed run must keep
    config = chosen(config, shape, run, gpus, console, steps)   # a value in place of each auto
    smaller = after_failure(spec, error)                        # None: it was not the memory

The rows of a step and their order do not depend on the micro-batch size, so it may change during a
run. If the workers run out of memory, they start again with at most half as many rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from rayapp import planner
from rayapp.config import Config, ConfigError, from_dict
from rayapp.driver import placement
from rayapp.driver.display import fact
from rayapp.driver.ray_session import started_here
from rayapp.hardware import GIB
from rayapp.observe.attempts import causes
from rayapp.observe.records import Summary
from rayapp.observe.status import read_sections
from rayapp.planner.memory import Layout
from rayapp.storage import Storage
from rayapp.train.planning import forecast
from rayapp.train.spec import LanguageSpec

LARGEST_UNPLANNED = 8  # rows of a micro-batch where no plan is possible
UNKNOWN = "whose memory is not planned: nothing is known of the model, or no node is there to ask"
ASK_S = 30.0  # for a node's answer
# The usable share of the free memory of a node without GPUs; Ray ends workers when 95 % of all its
# memory is used.
CPU_SHARE = 0.9
# In the messages of torch's allocators on GPUs and CPUs, of Python's, of Ray's memory monitor, and
# of NVIDIA's libraries: CUBLAS_STATUS_ALLOC_FAILED, ..._INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED.
SIGNS = (
    *("out of memory", "can't allocate memory", "cannot allocate memory", "low on memory"),
    *("_alloc_failed", "_allocation_failed"),
)


def as_begun(config: Config, run: Storage) -> Config:
    """Return the config with the values that `auto` had when the run began, if it has begun.

    The micro-batch, which changes no row, is chosen again.
    """
    began = _began(run)
    if began is None:
        return config
    if config.train.precision == "auto":
        config = config.with_fields("train", precision=began.train.precision)
    if config.train.compile is None:
        config = config.with_fields("train", compile=began.train.compile)
    if config.parallel.strategy == "auto":
        config = config.with_fields("parallel", strategy=began.parallel.strategy)
    return config


def chosen(
    config: Config, shape: Any, run: Storage, gpus: bool, console: Console, steps: int
) -> Config:
    """Replace each `auto` by a value for a run of so many steps, and print the values.

    A resumed run keeps its micro-batch if that still fits.

    Raises:
        ConfigError: not even one row fits.
    """
    train, sharding = config.train, config.parallel.strategy == "auto"
    if None not in (train.micro_batch, train.compile) and not sharding:
        return config
    named, capacity_gib = config.cluster.instance is not None, None
    if not named and (sharding or train.micro_batch is None):
        capacity_gib = _capacity_gib(config, gpus)
    there = placement.on_what_is_there(config)
    plan = forecast(there, shape, steps=steps, capacity_gib=capacity_gib, on_cpu=not gpus)
    if capacity_gib is None and not named and train.micro_batch is None:
        plan = None
    layout = None if plan is None else plan.question.layout
    size, strategy, compiled = LARGEST_UNPLANNED, "full_shard", False
    if isinstance(layout, Layout):
        size, strategy, compiled = layout.micro_batch, layout.strategy, layout.compiled
    said = []
    if train.micro_batch is None:
        if plan is not None and plan.fits is False and not config.cluster.ignore_plan:
            raise ConfigError([_too_large(plan)])
        before = began.train.micro_batch if (began := _began(run)) else None
        kept = before is not None and before <= size
        size = before if kept and before else size
        if plan is None:
            rows = config.rows_per_step
            most = max(1, min(size, rows // config.cluster.min_workers))
            size = max(n for n in range(1, most + 1) if rows % n == 0)
        figures = UNKNOWN if plan is None else _figures(plan.question, size)
        said += [f"micro-batch of {size} rows{', as this run began' if kept else ''}, {figures}"]
    said += [strategy] if sharding else []
    said += ["compiled" if compiled else "not compiled"] if train.compile is None else []
    fact(console, "auto", "; ".join(said))
    compiled = compiled if train.compile is None else train.compile
    config = config.with_fields("train", micro_batch=train.micro_batch or size, compile=compiled)
    return config.with_fields("parallel", strategy=strategy) if sharding else config


def _too_large(plan: planner.Answer) -> str:
    return (
        f"train.micro_batch=auto is impossible: the plan of one row is "
        f"{plan.peak_gib.value:.1f} GiB, and a worker has {plan.capacity_gib:.1f}. Set "
        "parallel.activation_checkpointing=full, a smaller data.seq_len or model, or "
        "cluster.ignore_plan=true to start anyway"
    )


def after_failure(spec: LanguageSpec, error: Summary | Exception) -> LanguageSpec | None:
    """Return the spec with a smaller micro-batch, if `auto` chose it and memory ended the attempt.

    The new size is the largest divisor of the step's rows up to half the old size. Returns None
    for any other ending, and if the size is 1.
    """
    size = spec.config.micro_batch
    if "micro_batch" not in spec.auto or size == 1 or isinstance(error, dict):
        return None
    if not any(out_of_memory(cause) for cause in causes(error)):
        return None
    rows = spec.order.rows_per_step
    half = max(n for n in range(1, size // 2 + 1) if rows % n == 0)
    config = spec.config.with_micro_batch(half)
    return replace(spec, config=config, order=replace(spec.order, micro_batch=half))


def out_of_memory(error: BaseException) -> bool:
    """Say whether an error is an allocator's, or Ray's memory monitor ended the worker.

    A worker that the kernel killed leaves no sign of the cause.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("CUDA out of memory. Tried to"))
    (True, True)
    >>> died = "The actor died. Some common causes include: (1) it was killed by the OOM killer"
    >>> out_of_memory(RuntimeError(died))
    False
    """
    text = str(error).split("Some common causes include")[0].lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in SIGNS)


def _figures(question: planner.Question, size: int) -> str:
    """Return text with the planned memory of a size, and of the next larger divisor of a step."""
    plan = planner.answer(planner.with_micro_batch(question, size))
    rows = question.rows_per_step
    above = (n for n in range(size + 1, rows // question.workers + 1) if rows % n == 0)
    larger = next(above, None)
    more = ""
    if larger is not None:
        next_gib = planner.answer(planner.with_micro_batch(question, larger)).peak_gib.value
        more = f" ({larger} rows: {next_gib:.2f})"
    return f"planned {plan.peak_gib.value:.2f}{more} of {plan.capacity_gib:.2f} GiB a worker"


def _began(run: Storage) -> Config | None:
    """Return the config.yaml of the run's folder, None without such a file."""
    sections = read_sections(run)
    before = None if sections is None else from_dict(sections)
    assert before is None or isinstance(before, Config), "another kind of run has this folder"
    return before


def _capacity_gib(config: Config, gpus: bool) -> float | None:
    """Ask a node of the workers how much memory each may take, in GiB; None without an answer."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if started_here() and not gpus:
        return free_gib(gpus, config.cluster.min_workers)
    need = placement.needs(config)
    del need["CPU"]
    group: Any = None  # not that of a trial of Ray Tune, which has no room for the task
    outside: Any = PlacementGroupSchedulingStrategy(group)
    task = ray.remote(num_cpus=0, num_gpus=need.pop("GPU", 0), resources=need, max_retries=0)(
        free_gib
    )
    asked = task.options(scheduling_strategy=outside).remote(gpus, config.cluster.min_workers)
    if not ray.wait([asked], timeout=ASK_S)[0]:
        ray.cancel(asked)
        return None
    return float(ray.get(asked))


def free_gib(gpus: bool, workers: int) -> float:
    """Return how much memory of this node each of so many workers may take, in GiB."""
    import ray
    import torch
    from ray._private.utils import estimate_available_memory  # psutil's, within a container's limit

    if gpus:
        return torch.cuda.mem_get_info()[0] / GIB
    here = ray.get_runtime_context().get_node_id()
    cpus = next(node["Resources"]["CPU"] for node in ray.nodes() if node["NodeID"] == here)
    free_gib = CPU_SHARE * estimate_available_memory() / GIB
    return free_gib / min(workers, max(1, int(cpus)))
