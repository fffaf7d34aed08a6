"""Every strategy and technique against one plain process: the same losses, step by step.

The oracle is transformers (and peft) with torch's own AdamW: no FSDP, no chunks, no rayapp but the
adapters' first values, which it reads from rayapp's export. One spawn trains many combinations.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import processes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from memory_trace import trace
from torch import nn
from transformers import AutoModelForCausalLM

from rayapp import model
from rayapp.config import Config, ConfigError, from_dict
from rayapp.data import tokens
from rayapp.data.token_rows import StepRows
from rayapp.finetune.model_parts import OutputHead, make_parts, technique_problems
from rayapp.finetune.prepared_run import count_parameters
from rayapp.finetune.trainer import held_out_losses
from rayapp.model.kernels import measure_compile
from rayapp.model.mixers import keeps_documents_apart
from rayapp.storage import open_storage
from rayapp.train import loop
from rayapp.train.engine import Engine, inputs
from rayapp.train.loss import liger_cross_entropy

pytestmark = pytest.mark.full

STEPS, LONG, MICRO_BATCHES, ROWS, SEQ_LEN = 20, 50, 4, 2, 16
HELD_OUT = 8  # micro-batches after the last step's
LR = 2e-3
ARCHITECTURES: dict[str, Any] = {
    "llama": {"kind": "Llama", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt_neox": {"kind": "GPTNeoX"},
    "mixtral": {
        "kind": "Mixtral",
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "router_aux_loss_coef": 0.05,
    },
    "mistral": {"kind": "Mistral", "num_key_value_heads": 2, "sliding_window": 8},
    "qwen3": {"kind": "Qwen3", "num_key_value_heads": 2, "head_dim": 16},
}
SIZES = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")
CHECKPOINTING = ("none", "full", "selective")
# What bf16 keeps of a number is 8 bits; two orders of summation differ by as much in a logit.
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


@dataclass(frozen=True)
class Cell:
    """One combination; `more` are further overrides, of a name that tells them apart."""

    architecture: str
    strategy: str = "full_shard"
    checkpointing: str = "none"
    precision: str = "fp32"
    lora: bool = False
    more: tuple[tuple[str, str], ...] = ()
    steps: int = STEPS

    @property
    def workers(self) -> int:
        """2, and 4 where there are 2 replicas to be sharded."""
        return 4 if self.strategy == "hybrid_shard" else 2

    @property
    def name(self) -> str:
        """One word."""
        kind = "lora" if self.lora else "whole"
        parts = (self.architecture, self.strategy, self.checkpointing, self.precision, kind)
        return "-".join([*parts, *(f"{k.rpartition('.')[2]}={v}" for k, v in self.more)])


GRID = [
    Cell(*combination)
    for combination in itertools.product(
        ("llama", "gpt_neox", "mixtral"), STRATEGIES, CHECKPOINTING, ("fp32", "bf16"), (False, True)
    )
]
# Every value with every other value of another kind, mostly; the whole grid is a drill.
SAMPLE = [
    Cell("llama", "full_shard", "selective", "bf16", False),
    Cell("llama", "no_shard", "full", "fp32", True),
    Cell("llama", "hybrid_shard", "none", "bf16", True),
    Cell("gpt_neox", "shard_grad_op", "selective", "fp32", True),
    Cell("gpt_neox", "hybrid_shard", "full", "fp32", False),
    Cell("gpt_neox", "no_shard", "none", "bf16", False),
    Cell("mixtral", "full_shard", "full", "fp32", True),
    Cell("mixtral", "hybrid_shard", "selective", "fp32", False),
    Cell("mixtral", "shard_grad_op", "none", "fp32", False),
]
TECHNIQUES = [
    Cell("llama", more=(("train.compile", "true"),)),
    Cell("llama", "full_shard", "full", more=(("train.compile", "true"),)),
    Cell("llama", "full_shard", "selective", more=(("train.compile", "true"),)),
    Cell("llama", more=(("parallel.activation_offload", "true"),)),
    Cell("llama", "full_shard", "full", more=(("parallel.activation_offload", "true"),)),
    Cell("llama", more=(("parallel.cpu_offload", "true"),)),
    Cell("llama", more=(("model.attention", "sdpa"),)),
    Cell("llama", more=(("train.loss_chunk", "7"),)),
    Cell("llama", "full_shard", "selective", lora=True, more=(("model.lora.quantize", "nf4"),)),
    Cell("gpt_neox", "no_shard", "full", "bf16", True, (("model.lora.quantize", "nf4"),)),
    Cell("llama", lora=True, more=(("train.compile", "true"),)),
]


FIFTY = [Cell(architecture, steps=LONG) for architecture in ARCHITECTURES]


def batches() -> list[dict[str, Any]]:
    """Draw the micro-batches of every step: two documents in some rows, a third without loss."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(LONG * MICRO_BATCHES + HELD_OUT):
        ids = generator.integers(3, 40, (ROWS, SEQ_LEN))
        labels = (ids * 3 + 1) % 37 + 3  # a rule, so that there is something to learn
        labels[generator.random(ids.shape) < 0.3] = -100
        segments = np.ones(ids.shape, np.uint16)
        segments[0, generator.integers(3, 12) :] = 2
        found.append({"input_ids": ids, "labels": labels, "segments": segments})
    return found


def make_folders(root: Path) -> None:
    for name, values in ARCHITECTURES.items():
        torch.manual_seed(1)
        config = getattr(transformers, values["kind"] + "Config")(
            **SIZES | {k: v for k, v in values.items() if k != "kind"}
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
        tokens.byte_tokenizer().save_pretrained(root / name)


def train_cell(cell: Cell, root: str) -> list[float]:
    """Train with rayapp's own parts and steps; return the loss of every step, and held-out."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tree: dict[str, Any] = {
        "run": {"seed": 5},
        "model": {"path": f"{root}/{cell.architecture}"},
        "train": {"lr": LR, "precision": cell.precision, "weight_decay": 0.0, "loss_chunk": 20},
        "parallel": {
            "strategy": cell.strategy,
            "activation_checkpointing": cell.checkpointing,
            "replicas": 2 if cell.strategy == "hybrid_shard" else None,
        },
    }
    if cell.lora:
        tree["model"]["lora"] = {"rank": 4, "alpha": 8}
    for field, value in cell.more:
        *sections, name = field.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[name] = value
    config = from_dict(tree)
    job: Any = SimpleNamespace(config=config, tokenizer_url=tree["model"]["path"])
    device = torch.device("cpu")
    parts = make_parts(job, device)
    if cell.lora:
        model.export_adapters(
            parts.lm, open_storage(f"{root}/adapter-{cell.architecture}"), base="base"
        )
    engine = Engine(parts.lm, parts.optimizers, lambda step: LR, device, 1.0, dist.group.WORLD)
    everything, losses = batches(), []
    assert keeps_documents_apart(parts.lm, device)  # and leaves no trace in the losses
    if ("train.compile", "true") in cell.more:  # it must leave no trace in the losses
        first = {name: array[None] for name, array in everything[rank].items()}
        measure_compile(parts.lm, inputs(rows_of(0, first), 0, device))
    for step in range(cell.steps):
        mine = everything[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES][rank::world]
        arrays = {name: np.stack([m[name] for m in mine]) for name in mine[0]}
        batch = rows_of(step, arrays)
        agreement = loop.agree(engine, batch)
        update = loop.train_step(engine, batch, agreement)
        losses.append(update.sums.loss / agreement.wait().weight)
    held_out = [
        rows_of(0, {name: array[None] for name, array in batch.items()})
        for batch in everything[-HELD_OUT:][rank::world]
    ]
    loss = held_out_losses(engine, held_out, parts)["eval_loss"]
    assert loss is not None
    return [*losses, loss]


def rows_of(step: int, arrays: dict[str, Any]) -> StepRows:
    zeros = np.zeros(arrays["labels"].shape[:2], np.int64)
    return StepRows(step=step, **arrays, target_bytes=zeros, positions=zeros, rows=zeros)


def train_cells(rank: int, world: int, root: str, cells: list[Cell]) -> None:
    found = {}
    for cell in cells:
        torch.manual_seed(0)
        found[cell.name] = train_cell(cell, root)
    if rank == 0:
        Path(root, f"losses-{world}.json").write_text(json.dumps(found))


@torch.no_grad()
def round_to_4_bits(hf: nn.Module) -> None:
    """Give the linear layers of the blocks the values that bitsandbytes holds of them."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for name, module in hf.named_modules():
        if ".layers." in name and isinstance(module, nn.Linear) and module.in_features % 64 == 0:
            packed, state = quantize_4bit(module.weight, blocksize=64, quant_type="nf4")
            module.weight.copy_(dequantize_4bit(packed, state))


def oracle(cell: Cell, root: Path) -> list[float]:
    """Train in this process: masters in fp32, a copy in the compute dtype, one batch at a time."""
    torch.set_num_threads(1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[cell.precision]

    def open_model(dtype: torch.dtype) -> nn.Module:
        hf = AutoModelForCausalLM.from_pretrained(root / cell.architecture, dtype=dtype)
        if ("model.lora.quantize", "nf4") in cell.more:
            round_to_4_bits(hf)
        if cell.lora:
            import peft

            folder = root / f"adapter-{cell.architecture}"
            hf = peft.PeftModel.from_pretrained(hf, folder, is_trainable=True).to(dtype)
        return hf.train()

    masters, compute = open_model(torch.float32), open_model(dtype)
    pairs = [
        (master, copy)
        for master, copy in zip(masters.parameters(), compute.parameters(), strict=True)
        if copy.requires_grad
    ]
    optimizer = torch.optim.AdamW([m for m, _ in pairs], lr=LR, betas=(0.9, 0.95), weight_decay=0)
    coefficient = ARCHITECTURES[cell.architecture].get("router_aux_loss_coef", 0.0)
    everything, losses = batches(), []
    for step in range(cell.steps):
        step_batches = everything[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]
        valid = sum(int((batch["labels"] != -100).sum()) for batch in step_batches)
        total = 0.0
        for batch in step_batches:
            loss, balance = loss_of(compute, batch, bool(coefficient))
            objective = loss
            if coefficient:
                objective = loss + coefficient * balance * int((batch["labels"] != -100).sum())
            (objective / valid).backward()
            total += loss.item()
            for master, copy in pairs:  # gradients are summed in fp32
                if copy.grad is not None:
                    grad = copy.grad.float()
                    master.grad = grad.clone() if master.grad is None else master.grad + grad
                    copy.grad = None
        nn.utils.clip_grad_norm_([m for m, _ in pairs], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, copy in pairs:
                copy.copy_(master)
        losses.append(total / valid)
    held_out = everything[-HELD_OUT:]
    with torch.no_grad():
        total = sum(loss_of(compute.eval(), batch, False)[0].item() for batch in held_out)
    return [*losses, total / sum(int((batch["labels"] != -100).sum()) for batch in held_out)]


def loss_of(hf: nn.Module, batch: dict[str, Any], routed: bool) -> tuple[torch.Tensor, Any]:
    """Return the summed loss of a batch by transformers alone, and what a router adds."""
    segments = torch.from_numpy(batch["segments"].astype(np.int64))
    starts = (segments == 2).int().argmax(1, keepdim=True)
    output = hf(
        input_ids=torch.from_numpy(batch["input_ids"]),
        position_ids=torch.arange(SEQ_LEN) - torch.where(segments == 2, starts, 0),
        use_cache=False,  # with a cache, transformers sees no documents in positions
        **({"output_router_logits": True} if routed else {}),
    )
    loss = F.cross_entropy(
        output.logits.float().flatten(0, 1),
        torch.from_numpy(batch["labels"]).flatten(),
        reduction="sum",
        ignore_index=-100,
    )
    return loss, output.aux_loss if routed else None


def compare(cells: list[Cell], root: Path) -> None:
    """Train the cells and their oracles, and tell every cell that differs at any step."""
    make_folders(root)
    found: dict[str, list[float]] = {}
    for workers in sorted({cell.workers for cell in cells}):
        mine = [cell for cell in cells if cell.workers == workers]
        processes.spawn(train_cells, workers, str(root / f"init-{workers}"), str(root), mine)
        found |= json.loads((root / f"losses-{workers}.json").read_text())
    oracles: dict[Any, list[float]] = {}
    wrong = []
    for cell in cells:
        key = (cell.architecture, cell.precision, cell.lora, "nf4" in cell.name, cell.steps)
        if key not in oracles:
            oracles[key] = oracle(cell, root)
        expected = np.array(oracles[key])
        assert expected[-2] < expected[0] - (0.1 if cell.lora else 0.5)  # it learns
        gap = float(np.abs(np.array(found[cell.name]) - expected).max())
        print(f"{cell.name}: {gap:.1e} nats/token apart at most")
        if not gap < TOLERANCE[cell.precision]:
            wrong.append(f"{cell.name}: {gap:.2g}")
    assert not wrong


def test_a_sample_of_the_grid_equals_one_plain_process(tmp_path: Path) -> None:
    compare(SAMPLE, tmp_path)


def test_every_technique_equals_one_plain_process(tmp_path: Path) -> None:
    compare(TECHNIQUES, tmp_path)


@pytest.mark.drill
def test_the_whole_grid_equals_one_plain_process(tmp_path: Path) -> None:
    assert len(GRID) == 144
    compare(GRID, tmp_path)


@pytest.mark.drill
def test_fifty_steps_of_every_architecture_equal_plain_transformers(tmp_path: Path) -> None:
    """Every step's loss within 1e-4 nats a token, and the held-out loss after the last."""
    compare(FIFTY, tmp_path)


def test_what_this_machine_cannot_do_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = model.resolve("tiny")

    def problems(device_type: str, *missing: str, **train: str) -> list[str]:
        there = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name in missing else there(name)
        )
        found = technique_problems(from_dict({"train": train}), source, device_type)
        monkeypatch.undo()
        return found

    assert problems("cpu", loss_kernel="chunked") == []
    assert problems("cpu", loss_kernel="liger")[0] == (
        "train.loss_kernel=liger is not available: the workers have no GPU. "
        "Set train.loss_kernel=chunked"
    )
    assert problems("cuda", "liger_kernel", loss_kernel="liger") == [
        "train.loss_kernel=liger is not available: the package liger_kernel is not installed. "
        "Install rayapp[liger], or liger-kernel"
    ]
    assert problems("cuda", "torchao", optimizer="adamw8bit") == [
        "train.optimizer=adamw8bit is not available: the package torchao is not installed. "
        "Install rayapp[gpu], or torchao"
    ]
    assert problems("cpu", precision="fp8")[0].startswith("train.precision=fp8 is not available")
    liger = from_dict({"train": {"loss_kernel": "liger"}})
    assert OutputHead(liger).loss is liger_cross_entropy
    assert OutputHead(from_dict({})).loss is not liger_cross_entropy
    with pytest.raises(ConfigError, match=r"train.loss_kernel=liger is in conflict"):
        from_dict({"train": {"loss_kernel": "liger", "z_loss": 1e-4}})


def test_a_model_that_only_eager_attention_computes_is_counted_and_traced(tmp_path: Path) -> None:
    config = transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=16)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    whole = sum(p.numel() for p in hf.parameters())
    assert count_parameters(config, from_dict({}, kind=Config)) == (whole, whole, [])
    tree = {"model": {"lora": {"rank": 4, "targets": ["q_proj"], "dora": True}}}
    lora = from_dict(tree, kind=Config)
    assert count_parameters(config, lora) == (whole, 3 * (4 * (64 + 64) + 64), [])
    tree = {"model": {"path": str(tmp_path), "lora": {"targets": ["q_proj", "none"]}}}
    (found,) = technique_problems(from_dict(tree), model.resolve(str(tmp_path)), "cpu")
    assert found.startswith("model.lora.targets=none is unknown")
    transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4).save_pretrained(tmp_path / "gpt2")
    in_4_bits = from_dict({"model": {"lora": {"quantize": "nf4"}}})
    gpt2 = model.resolve(str(tmp_path / "gpt2"))
    (found,) = technique_problems(in_4_bits, gpt2, "cpu")
    assert found.startswith("model.lora.quantize=nf4 is not available: no layer of gpt2 is an nn")
    assert trace(config, world=1, micro_batch=1, seq_len=16).peak_bytes > 0
