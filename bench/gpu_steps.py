"""Measure the steps of one row of bench/gpu.py on this rank's device.

    figures = measure(row, torch.device("cuda"))

Wall time is of steps without the profiler, device time of the steps after them under it. Idle time
is when no kernel runs, by the phase in which the host launched the kernel that ends the gap.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from drawn import LR, batches, make_engine, step
from gpu_rows import Row
from torch import nn

from rayapp import hardware, model
from rayapp.config import Config, VisionConfig, load
from rayapp.data.images.batches import StepImages
from rayapp.data.packing import position_ids
from rayapp.data.token_rows import StepRows
from rayapp.hardware import GIB
from rayapp.model.classifier import forward_flops, shape_of_classifier
from rayapp.model.init import allocate, local_part
from rayapp.model.quantize import Linear4bit
from rayapp.order import Order
from rayapp.planner.flops import model_flops
from rayapp.planner.shape import shape_of
from rayapp.presets import config_of
from rayapp.train.engine import Engine
from rayapp.train.memory_peaks import Peaks
from rayapp.train.planning import plan
from rayapp.vision.classifier_trainer import ImageTrainer

WARM_UP, TIMED, PROFILED = 4, 8, 3
SMALL_SEQ_LEN, SMALL_IMAGES, SMALL_PIXELS = 256, 4, 48  # on CPUs
BETWEEN = "between"
Span = tuple[int, int]


class NotHere(Exception):
    """A row that this machine cannot run; the message says what is missing."""


def measure(row: Row, device: torch.device) -> dict[str, Any]:
    """Run a row's steps; return its figures."""
    if row.kind == "images":
        return _images(row, device)
    config = config_of_row(row, device)
    vocabulary = model_values(row, device)["vocab_size"]
    count = WARM_UP + TIMED + PROFILED
    rows = batches(config, vocabulary, count, dist.get_rank(), masked=row.masked)
    if row.kind == "plain":
        run, engine = _plain(config, model_values(row, device), device), None
    else:
        engine = engine_of(config, device)
        run = _steps_of(engine)
    found = _timed(run, rows, engine, device)
    tokens = sum(batch.counts().tokens for batch in rows) / count
    pairs = sum(batch.counts().attended_pairs for batch in rows) / count
    found["tokens_per_step"] = round(tokens)
    found["tokens_per_s"] = tokens * 1e3 / found["wall_ms"]
    found["mfu"] = _mfu(config, model_values(row, device), pairs / tokens, found["tokens_per_s"])
    return found | ({} if row.kind == "plain" else {"plan": _planned(config, device)})


def config_of_row(row: Row, device: torch.device) -> Config:
    """Return the config of a row's run."""
    seq_len = row.seq_len if device.type == "cuda" else SMALL_SEQ_LEN
    settings = {
        "model.path": row.preset,
        "model.overrides": json.dumps(model_values(row, device, overrides=True)),
        "data.seq_len": str(seq_len),
        "train.micro_batch": str(row.rows),
        "train.tokens_per_step": str(row.rows * seq_len * dist.get_world_size()),
        "train.lr": str(LR),
        "cluster.workers": str(dist.get_world_size()),
    }
    return load(None, settings | row.settings, Config)


def model_values(row: Row, device: torch.device, *, overrides: bool = False) -> dict[str, Any]:
    """Return the config.json of a row's model, or only what replaces fields of the preset's."""
    small = {} if device.type == "cuda" else row.small()
    values = dict(config_of(row.preset))
    seq_len = row.seq_len if device.type == "cuda" else SMALL_SEQ_LEN
    more = {"vocab_size": values["vocab_size"], **small, "max_position_embeddings": seq_len}
    return more if overrides else values | more


def engine_of(config: Config, device: torch.device) -> Engine:
    """Build a row's engine with weights drawn on the device.

    Raises:
        NotHere: the machine lacks what the settings need.
    """
    try:
        lora = config.model.lora
        if lora is not None and lora.quantize == "nf4":
            import bitsandbytes  # noqa: F401
        with mock.patch.object(model, "init_weights", draw):
            engine = make_engine(config, device)
    except (model.Unavailable, ImportError) as error:
        raise NotHere(str(error)) from error
    engine.peaks = MarkedPeaks(device)
    return engine


@torch.no_grad()
def draw(lm: Any, seed: int, device: torch.device) -> None:
    """Allocate a model and draw its weights on the device: a host takes a minute for 8 billion."""
    allocate(lm, device)
    for module in lm.modules():
        for name, parameter in module.named_parameters(recurse=False):
            part = local_part(parameter)
            if isinstance(module, Linear4bit):
                if name == "packed":
                    part.view(torch.uint8).random_(0, 256)
                elif name == "scales":
                    part.view(torch.float32).fill_(0.02)
            elif parameter.ndim == 1:
                part.fill_(0.0 if name == "bias" else 1.0)
            else:
                part.normal_(0, 0.02)


class MarkedPeaks(Peaks):
    """The memory peaks of a step, whose phases a profiler sees by name."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase."""
        with torch.profiler.record_function(name), super().phase(name):
            yield


def _steps_of(engine: Engine) -> Callable[[Any], None]:
    def run(batch: Any) -> None:
        step(engine, batch)

    return run


def _timed(
    run: Callable[[Any], None], rows: list[Any], engine: Engine | None, device: torch.device
) -> dict[str, Any]:
    """Run the warm-up, the timed and the profiled steps."""
    cuda = device.type == "cuda"
    for batch in rows[:WARM_UP]:
        run(batch)
    if engine is not None:
        engine.peaks.highest_gib = 0.0  # of steps alone, not of building the model
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    _wait(device)
    began = time.perf_counter()
    for batch in rows[WARM_UP : WARM_UP + TIMED]:
        run(batch)
    _wait(device)
    found: dict[str, Any] = {"wall_ms": (time.perf_counter() - began) * 1e3 / TIMED}
    found["peak_gib"] = engine.peaks.highest_gib if engine is not None else None
    if cuda:
        allocated = torch.cuda.max_memory_allocated(device) / GIB
        found["peak_gib"] = max(allocated, found["peak_gib"] or 0.0)
        found["reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIB
        found |= _profiled(run, rows[WARM_UP + TIMED :], device)
    return found


def _profiled(run: Callable[[Any], None], rows: list[Any], device: torch.device) -> dict[str, Any]:
    """Return the milliseconds of a step in which the device is busy, and idle by phase."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for batch in rows:
            run(batch)
        _wait(device)
    kernels, launches, phases = list[tuple[int, int, int]](), dict[int, int](), []
    for event in profile.profiler.kineto_results.events():
        start, end = event.start_ns(), event.start_ns() + event.duration_ns()
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            kernels.append((start, end, event.correlation_id()))
        elif event.name() in ("forward", "backward", "optimizer"):
            phases.append((start, end, event.name()))
        elif event.name().startswith("cu"):
            launches[event.correlation_id()] = start
    launched = [(start, end, launches.get(number, start)) for start, end, number in kernels]
    busy_ns, idle_ns = idle_by_phase(launched, phases)
    scale = 1e-6 / len(rows)
    return {
        "device_ms": busy_ns * scale,
        "idle_ms": {name: ns * scale for name, ns in sorted(idle_ns.items())},
    }


def idle_by_phase(
    kernels: list[tuple[int, int, int]], phases: list[tuple[int, int, str]]
) -> tuple[int, dict[str, int]]:
    """Return the time in which any kernel runs, and the gaps by phase of the host.

    Kernels are (start, end, time of the launch), phases (start, end, name). A gap belongs to the
    phase in which the kernel at its end was launched; outside of all phases it is BETWEEN.
    """
    busy, idle, until = 0, dict[str, int](), None
    for start, end, launched in sorted(kernels):
        if until is None:
            until = start
        if start > until:
            names = (name for first, last, name in phases if first <= launched < last)
            name = next(names, BETWEEN)
            idle[name] = idle.get(name, 0) + start - until
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return busy, idle


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def _plain(
    config: Config, values: dict[str, Any], device: torch.device
) -> Callable[[StepRows], None]:
    """Return transformers' own step: fp32 weights, bf16 autocast, packed rows, fused AdamW."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device(device):
        hf = AutoModelForCausalLM.from_config(LlamaConfig(**values), dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(hf.parameters(), lr=LR, fused=True)

    def run(batch: StepRows) -> None:
        ids, labels = (
            torch.from_numpy(a[0]).long().to(device) for a in (batch.input_ids, batch.labels)
        )
        positions = torch.from_numpy(position_ids(batch.segments[0])).to(device)
        moved = nn.functional.pad(labels, (1, 0), value=-100)[:, :-1]  # transformers moves labels
        with torch.autocast(device.type, torch.bfloat16):
            loss = hf(input_ids=ids, labels=moved, position_ids=positions, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def _images(row: Row, device: torch.device) -> dict[str, Any]:
    """Measure an image classifier's steps on drawn images, which the host hands over each step."""
    cuda = device.type == "cuda"
    size = 224 if cuda else SMALL_PIXELS
    number = row.rows if cuda else SMALL_IMAGES
    settings = {
        "model.path": row.preset,
        "data.path": "drawn",
        "data.size": str(size),
        "train.images_per_step": str(number * dist.get_world_size()),
        "train.micro_batch": str(number),
        "train.precision": "bf16",
        "cluster.workers": str(dist.get_world_size()),
    }
    config = load(None, settings, VisionConfig)
    order = Order.for_steps(1_000_000, number, number, 0, 100)
    data = SimpleNamespace(classes=[f"class {i}" for i in range(1000)], held_out=0)
    spec: Any = SimpleNamespace(config=config, data=data, order=order)
    engine = ImageTrainer(spec, device).engine(dist.new_group(backend="gloo"))
    engine.peaks = MarkedPeaks(device)
    draw_, count = np.random.default_rng(0), WARM_UP + TIMED + PROFILED
    images = draw_.integers(0, 256, (1, number, size, size, 3), np.uint8)
    labels = draw_.integers(0, 1000, (1, number), np.int32)
    ones, digests = np.ones((1, number), np.float32), np.ones((1, number), np.uint64)
    ids = np.arange(number)[None]
    rows = [StepImages(i, images, labels, labels, ones, digests, ids) for i in range(count)]
    found = _timed(_steps_of(engine), rows, engine, device)
    found["images_per_s"] = number * dist.get_world_size() * 1e3 / found["wall_ms"]
    peak = _peak_flops("bf16")
    shape, _ = shape_of_classifier(config.model.path, config.model.overrides, ())
    flops = 3 * forward_flops(shape, size) * found["images_per_s"] / dist.get_world_size()
    return found | {"mfu": None if peak is None else flops / peak}


def _mfu(
    config: Config, values: dict[str, Any], context: float, tokens_per_s: float
) -> float | None:
    peak, lora = _peak_flops("bf16"), config.model.lora
    if peak is None:
        return None
    flops = model_flops(shape_of(values), context, None if lora is None else lora.rank)
    return tokens_per_s / dist.get_world_size() * flops / peak


def _peak_flops(precision: str) -> float | None:
    gpu = _card()
    return None if gpu is None else gpu.flops[precision]


def _card() -> hardware.Gpu | None:
    if not torch.cuda.is_available():
        return None
    return hardware.gpu_from_device_name(torch.cuda.get_device_name())


def _planned(config: Config, device: torch.device) -> dict[str, float | None]:
    """Return the plan's figures of the row's job on this card; without one, memory alone."""
    card = _card()
    if card is not None:
        each = (i for i in hardware.INSTANCES.values() if i.gpu == card)
        instance = min(each, key=lambda i: i.gpus).name
        config = config.model_copy(
            update={"cluster": config.cluster.model_copy(update={"instance": instance})}
        )
    answer = plan(config, **({} if card is not None else {"on_cpu": True}))
    rate = None if answer.rate is None else answer.rate.value
    alive = answer.question.layout.peak().total / GIB
    return {"tokens_per_s": rate, "peak_gib": alive, "with_slack_gib": answer.peak_gib.value}
