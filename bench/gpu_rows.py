"""The rows of bench/gpu.py in the order of their value, with what others published."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

BF16 = {"train.precision": "bf16"}
COMPILED = BF16 | {"train.compile": "true"}
LORA = COMPILED | {"model.lora": "{rank: 16}"}
CHECKPOINTING = "parallel.activation_checkpointing"


class Published(NamedTuple):
    """A figure that others published for one GPU of the row's job."""

    system: str
    tokens_per_s: float
    mfu: float | None
    """0-1, by the publisher's own count of FLOPs."""
    note: str
    source: str


PRIME = "prime-rl benchmarks/baselines, runs of 2026-01-15"
FOUNDRY = "llm-foundry scripts/train/benchmarking/README.md"
AUTO_MODEL = "NeMo AutoModel docs/performance-summary.md"


@dataclass(frozen=True)
class Row:
    """One measurement. `settings` are config overrides; rows hold `seq_len` tokens each."""

    name: str
    needs_s: float
    """Seconds that it takes on an H100, its build and compilation included."""
    kind: str = "step"
    """step: rayapp's; plain: transformers' own; images; or the name of a check."""
    preset: str = "llama3.2-1b"
    rows: int = 2
    seq_len: int = 4096
    settings: dict[str, str] = field(default_factory=dict)
    masked: float = 0.0
    """Share of the tokens that bear no loss, 0-1."""
    published: Published | None = None

    def small(self) -> dict[str, Any]:
        """Return the overrides of the model that stands for this row's on CPUs."""
        return {
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 2048,
        }


ROWS = (
    Row("llama3.2-1b, compiled, 2 x 4096", 60, settings=COMPILED),
    Row(
        "llama3.2-1b, compiled, 8 x 4096",
        40,
        rows=8,
        settings=COMPILED,
        published=Published("llm-foundry", 45_455, 0.418, "1B, 2048 tokens, 8 H100", FOUNDRY),
    ),
    Row(
        "llama3.1-8b, LoRA, compiled, 2 x 4096",
        60,
        preset="llama3.1-8b",
        settings=LORA,
        published=Published("AutoModel", 12_473, None, "rank 16, drawn data", AUTO_MODEL),
    ),
    Row("check: two host reads a step", 12, kind="host_reads"),
    Row("check: activation checkpointing lowers the peak", 15, kind="checkpointing"),
    Row("check: kernels agree, and with fp32", 25, kind="kernels"),
    Row("check: a checkpoint copied behind the next step", 12, kind="copied_behind"),
    Row("check: an interrupted run resumes bitwise", 20, kind="resumes"),
    Row("check: out of memory halves the micro-batch", 12, kind="out_of_memory"),
    Row(
        "qwen3-0.6b, compiled, 2 x 4096",
        40,
        preset="qwen3-0.6b",
        settings=COMPILED,
        published=Published("prime-rl", 26_005, 0.168, "8,192 tokens a step", PRIME),
    ),
    Row(
        "qwen3-0.6b, compiled, 4 x 4096",
        30,
        preset="qwen3-0.6b",
        rows=4,
        settings=COMPILED,
        published=Published("prime-rl", 25_486, 0.237, "16,384 tokens a step", PRIME),
    ),
    Row("llama3.2-1b, compiled, 4 x 4096", 30, rows=4, settings=COMPILED),
    Row("llama3.2-1b, eager, 2 x 4096", 20, settings=BF16),
    Row("llama3.2-1b, transformers' own step, 2 x 4096", 25, kind="plain", settings=BF16),
    Row(
        "llama3.2-3b, compiled, 2 x 4096",
        50,
        preset="llama3.2-3b",
        settings=COMPILED,
        published=Published("llm-foundry", 24_142, 0.437, "3B, 2048 tokens, 16 H100", FOUNDRY),
    ),
    Row(
        "llama3.2-1b, selective checkpointing, 8 x 4096",
        40,
        rows=8,
        settings=COMPILED | {CHECKPOINTING: "selective"},
    ),
    Row(
        "llama3.2-1b, full checkpointing, 8 x 4096",
        40,
        rows=8,
        settings=COMPILED | {CHECKPOINTING: "full"},
    ),
    Row(
        "llama3.1-8b, adamw8bit, full checkpointing, 2 x 4096",
        75,
        preset="llama3.1-8b",
        settings=COMPILED | {CHECKPOINTING: "full", "train.optimizer": "adamw8bit"},
    ),
    Row("llama3.2-1b, chats with 70 % masked, 2 x 4096", 30, settings=COMPILED, masked=0.7),
    Row(
        "llama3.2-1b, sdpa, 2 x 4096",
        30,
        settings=COMPILED | {"model.attention": "sdpa"},
    ),
    Row(
        "llama3.2-1b, flash, 2 x 4096",
        30,
        settings=COMPILED | {"model.attention": "flash"},
    ),
    Row("llama3.2-1b, fp8, 2 x 4096", 45, settings=COMPILED | {"train.precision": "fp8"}),
    Row(
        "llama3.1-8b, nf4, LoRA, 2 x 4096",
        60,
        preset="llama3.1-8b",
        settings=LORA | {"model.lora": "{rank: 16, quantize: nf4}"},
    ),
    Row("resnet50, 256 images of 224 pixels", 30, kind="images", preset="resnet50", rows=256),
    Row("check: a fine-tuning through Ray", 120, kind="through_ray"),
)
