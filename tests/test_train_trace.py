"""The trace against the formula, and against what a real step takes on this machine."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_trace import trace
from sampled import sampled

from rayapp import model
from rayapp.config import Lora, from_dict
from rayapp.planner.memory import Layout, state_bytes
from rayapp.planner.shape import has_formula, shape_of
from rayapp.planner.trained import with_overrides
from rayapp.presets import PRESETS, config_of
from rayapp.train import planning
from rayapp.train.model_reading import read

ROOT = Path(__file__).parent.parent
RANKS = (8, 32, 128)


def both(
    name: str, world: int, micro_batch: int, seq_len: int, layers: int | None = None, **more: Any
) -> tuple[float, float, int, float]:
    """Return peaks in bytes by trace and formula, and parameter bytes of rank 0 by each."""
    checkpointing = more.get("activation_checkpointing", "none")
    strategy = more.get("strategy", "full_shard")
    replicas = more.get("replicas", 1)
    accumulation = more.get("accumulation", 1)
    fp32 = more.get("param_dtype", torch.bfloat16) is None
    lora = more.get("lora")
    config = copy.deepcopy(model.resolve(name).config)
    text = config.get_text_config()
    text.num_hidden_layers = layers or text.num_hidden_layers
    found = trace(config, world=world, micro_batch=micro_batch, seq_len=seq_len, **more)
    values = with_overrides(config_of(name), {"num_hidden_layers": text.num_hidden_layers})
    shape = (
        shape_of(values)
        if has_formula(values)
        else read(values, seq_len=seq_len, fp32=fp32, lora=lora)
    )
    layout = Layout(
        shape,
        shards=1 if strategy == "no_shard" else world // replicas,
        micro_batch=micro_batch,
        seq_len=seq_len,
        strategy=strategy,
        checkpointing=checkpointing,
        precision="fp32" if fp32 else "bf16",
        loss_chunk=more.get("loss_chunk", 4096),
        accumulates=accumulation > 1,
        lora_rank=None if lora is None else lora.rank,
        lora_experts=() if lora is None else lora.target_parameters,
        new_tokens=more.get("new_tokens", 0),
        on_cpu=True,
    )
    planned = layout.peak().total
    return found.peak_bytes, planned, found.parameter_bytes, state_bytes(layout)["parameters"]


@pytest.mark.parametrize(
    ("name", "world", "more"),
    sampled(
        [
            ("qwen3-0.6b", 8, {}),
            ("qwen3-0.6b", 8, {"loss_chunk": 256, "activation_checkpointing": "full"}),
            ("qwen3-0.6b", 128, {"activation_checkpointing": "full", "accumulation": 2}),
            ("qwen3-0.6b", 16, {"strategy": "hybrid_shard", "replicas": 2}),
            ("qwen3-0.6b", 16, {"strategy": "shard_grad_op", "activation_checkpointing": "full"}),
            ("qwen3-0.6b", 4, {"strategy": "no_shard", "activation_checkpointing": "full"}),
            ("qwen3-0.6b", 8, {"activation_checkpointing": "selective"}),
            ("qwen3-0.6b", 8, {"lora": Lora(rank=16)}),
            ("qwen3-0.6b", 8, {"lora": Lora(rank=16), "activation_checkpointing": "full"}),
            ("qwen3-0.6b", 8, {"lora": Lora(rank=16), "new_tokens": 3}),
            ("qwen3-0.6b", 1, {}),
            ("qwen3-0.6b", 1, {"lora": Lora(rank=16)}),
            ("qwen3-0.6b", 1, {"lora": Lora(rank=16), "param_dtype": None}),
            ("qwen3-0.6b", 1, {"lora": Lora(rank=16), "new_tokens": 3}),
            (
                "qwen3-0.6b",
                4,
                {
                    "strategy": "no_shard",
                    "lora": Lora(rank=16),
                    "activation_checkpointing": "full",
                    "accumulation": 2,
                },
            ),
            ("llama3.1-70b", 8, {"lora": Lora(rank=16)}),  # wide blocks: the forward is the peak
            ("llama3.1-70b", 8, {"lora": Lora(rank=16), "activation_checkpointing": "full"}),
            ("dolly-v2-7b", 8, {}),
            ("mixtral-8x7b", 32, {}),
        ],
        3,
    ),
)
def test_the_formula_is_what_the_step_takes(name: str, world: int, more: dict[str, Any]) -> None:
    traced, planned, shards, planned_shards = both(name, world, 1, 1024, layers=4, **more)
    assert planned == pytest.approx(traced, rel=0.05)
    assert shards == pytest.approx(planned_shards, rel=0.01)


WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "all-full": {"activation_checkpointing": "full"},
    "lora": {"lora": Lora(rank=16)},
    "lora-full": {"lora": Lora(rank=16), "activation_checkpointing": "full"},
}


def presets_and_ways() -> list[Any]:
    """Return each preset in each way; of every preset, `make test-full` takes one, in turn."""
    cells = []
    for number, name in enumerate(sorted(set(PRESETS) - {"tiny"})):
        for turn, way in enumerate(WAYS):
            mark = pytest.mark.full if number % len(WAYS) == turn else pytest.mark.drill
            cells.append(pytest.param(name, WAYS[way], id=f"{name}-{way}", marks=mark))
    return cells


@pytest.mark.parametrize(("name", "more"), presets_and_ways())
def test_a_few_layers_of_every_preset(name: str, more: dict[str, Any]) -> None:
    layers = 6 if name.startswith("gemma3") else 4  # every sixth attends to all
    traced, planned, shards, planned_shards = both(name, 8, 1, 2048, layers=layers, **more)
    assert planned == pytest.approx(traced, rel=0.10)
    assert shards == pytest.approx(planned_shards, rel=0.01)


EXPERTS = ("down_proj", "gate_up_proj")


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_adapters_of_experts(name: str, checkpointing: str) -> None:
    lora = Lora(rank=16, target_parameters=EXPERTS)
    traced, planned, shards, planned_shards = both(
        name, 8, 1, 2048, layers=4, activation_checkpointing=checkpointing, lora=lora
    )
    assert planned == pytest.approx(traced, rel=0.10)
    assert shards == pytest.approx(planned_shards, rel=0.01)


@pytest.mark.drill
@pytest.mark.parametrize("world", RANKS)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"tiny"}))
def test_every_preset_on_8_32_and_128_ranks(name: str, checkpointing: str, world: int) -> None:
    traced, planned, shards, planned_shards = both(
        name, world, 1, 2048, activation_checkpointing=checkpointing
    )
    assert planned == pytest.approx(traced, rel=0.10)
    assert shards == pytest.approx(planned_shards, rel=0.01)


REAL = """
import json, sys, torch, torch.distributed as dist
from functools import partial
from rayapp import model
from rayapp.train.loss import chunked_cross_entropy
from rayapp.train.optimizer import make_optimizers

def peak_kib():  # not ru_maxrss, which a process takes over from the one that started it
    lines = open('/proc/self/status').read().splitlines()
    return int(next(line for line in lines if line.startswith('VmHWM:')).split()[1])

values, rows, seq_len = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
config = model.resolve("tiny").config
for name, value in values.items():
    setattr(config, name, value)

def step(lm, optimizer, rows, seq_len):
    ids = torch.zeros(rows, seq_len, dtype=torch.long)
    lm(ids, ids)[0].backward()
    torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

def make(config):
    lm = model.build(config, loss=partial(chunked_cross_entropy, chunk=4096))
    mesh = model.device_mesh("cpu", strategy="full_shard")
    model.shard(lm, mesh)
    model.init_weights(lm, 0, torch.device("cpu"))
    (adamw,) = make_optimizers('adamw', lm, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    return lm.train(), adamw

step(*make(model.resolve("tiny").config), 1, 64)  # libraries and buffers that a first step loads
before = peak_kib()
lm, optimizer = make(config)
for _ in range(2):
    step(lm, optimizer, rows, seq_len)
print(json.dumps((peak_kib() - before) * 1024))
"""


@pytest.mark.full
def test_the_trace_is_what_a_step_takes_on_this_machine() -> None:
    values = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
    values |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    rows, seq_len = 2, 1024
    done = subprocess.run(
        [sys.executable, "-c", REAL, json.dumps(values), str(rows), str(seq_len)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        # Freed memory goes back at once, so that the peak is of what is alive.
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    config = copy.deepcopy(model.resolve("tiny").config)
    for name, value in values.items():
        setattr(config, name, value)
    traced = trace(config, world=1, micro_batch=rows, seq_len=seq_len, param_dtype=None)
    assert traced.peak_bytes == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("freeze", [(), ("lm_head*",)])  # which is tied
def test_frozen_parameters_have_no_gradients(freeze: tuple[str, ...]) -> None:
    tree = {
        "model": {"path": "qwen3-0.6b", "overrides": {"num_hidden_layers": 3}},
        "data": {"seq_len": 512},
        "train": {"tokens_per_step": 8192, "micro_batch": 1, "freeze": freeze, "compile": False},
        "parallel": {"strategy": "full_shard"},
        "cluster": {"workers": "8", "instance": "g5.48xlarge"},
    }
    layout = planning.plan(from_dict(tree)).question.layout
    assert isinstance(layout, Layout) and layout.accumulates
    config = copy.deepcopy(model.resolve("qwen3-0.6b").config)
    config.num_hidden_layers = 3
    found = trace(config, world=8, micro_batch=1, seq_len=512, accumulation=2, freeze=freeze)
    planned = Layout(**{**vars(layout), "on_cpu": True}).peak().total
    assert planned == pytest.approx(found.peak_bytes, rel=0.05)
