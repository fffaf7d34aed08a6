"""Training runs that others published, as the planner sees them; `PYTHONPATH=. python
tests/support/published_runs.py` writes the table of docs/plan.md.

Sources, read 2026-11-21: llm-foundry scripts/train/benchmarking/README.md; torchtitan
benchmarks/llama3_h100_202412_torchtitan.md, llama3-8b_h200_202506_trainy-whitefiber.md and
docs/performance.md (2024); NeMo AutoModel docs/performance-summary.md; torchao
docs/source/workflows/training.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rayapp.hardware import GPUS, Gpu
from rayapp.planner.memory import FRAGMENTATION, Layout
from rayapp.planner.shape import Linear, Shape, shape_of
from rayapp.planner.step import step_time
from rayapp.planner.times import Machine, Workload
from rayapp.presets import config_of

DOC = Path(__file__).parents[2] / "docs" / "plan.md"
BEGIN, END = "<!-- published runs -->", "<!-- end -->"


@dataclass(frozen=True)
class Run:
    """A published figure and the job it belongs to."""

    system: str
    what: str
    job: Workload
    tokens_per_s_per_gpu: float
    listed: bool = False
    """One of those that the planner was asked to match; the others are its further check."""
    peak_gib: float | None = None
    """Largest reservation of PyTorch's allocator: no CUDA context in it."""
    excluded: str = ""
    """Why it is not counted."""

    @property
    def predicted(self) -> float:
        """Tokens a second and GPU."""
        tokens = self.job.layout.tokens * self.job.micro_batches
        return tokens / step_time(self.job).total_s

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.tokens_per_s_per_gpu - 1

    @property
    def predicted_gib(self) -> float:
        """What the allocator reserves: what is alive and its fragments."""
        terms = self.job.layout.peak().terms
        moving = sum(terms[name] for name in ("activations", "logits", "gathers"))
        return (sum(terms.values()) + FRAGMENTATION["cuda"] * moving) / 2**30


def machine(gpu: Gpu, gpus: int, gigabits: float) -> Machine:
    """Nodes of 8 GPUs with RDMA."""
    return Machine(gpu, min(gpus, 8), max(1, gpus // 8), gigabits * 1e9, efa=True)


def mpt(hidden: int, layers: int, heads: int) -> Shape:
    """MPT's decoder: fused qkv, no biases, GELU, LayerNorm, ALiBi, tied embeddings."""
    linears = (
        Linear("Wqkv", hidden, 3 * hidden),
        Linear("out_proj", hidden, hidden),
        Linear("up_proj", hidden, 4 * hidden),
        Linear("down_proj", 4 * hidden, hidden),
    )
    return Shape(
        model_type="mpt",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=4 * hidden,
        vocabulary=50_368,
        tied=True,
        linears=linears,
        gated=False,
        fp32_norms=False,
        rotary=0.0,
        block_norm_parameters=2 * hidden,
        final_norm_parameters=hidden,
    )


MPT = {
    "70b": mpt(8192, 80, 64),
    "30b": mpt(7168, 48, 56),
    "13b": mpt(5120, 40, 40),
    "7b": mpt(4096, 32, 32),
    "3b": mpt(2560, 32, 20),
    "1b": mpt(2048, 24, 16),
    "760m": mpt(1536, 24, 12),
}
# model, tokens a row, GPUs, rows a micro-batch, micro-batches, full checkpointing, tokens/s/GPU
FOUNDRY = {
    ("H100", 3200): """
        70b 2048 64 8 4 1 1039 | 70b 2048 32 2 16 1 882 | 30b 8192 8 1 21 1 1384
        30b 4096 8 1 21 1 1802 | 30b 2048 32 14 3 1 2308 | 30b 2048 8 3 21 1 2002
        13b 32768 8 1 3 1 1976 | 13b 4096 8 10 3 1 4717 | 13b 2048 64 2 1 0 4800
        13b 2048 8 2 1 0 4792 | 13b 1024 8 40 3 1 5502 | 7b 65536 8 1 2 1 1956
        7b 8192 8 8 2 1 6935 | 7b 4096 8 16 2 1 8611 | 7b 2048 8 6 1 0 10643
        7b 1024 8 64 2 1 10203 | 3b 16384 8 1 6 0 11152 | 3b 4096 8 5 6 0 20964
        3b 2048 16 10 3 0 24142 | 3b 512 8 40 6 0 27965 | 1b 8192 8 3 4 0 29157
        1b 2048 8 14 1 0 45455 | 760m 2048 8 24 2 0 63147 | 760m 4096 8 12 2 0 55459""",
    ("A100-80GB", 1600): """
        70b 2048 64 8 4 1 410 | 70b 2048 32 2 16 1 373 | 30b 4096 8 1 21 1 814
        30b 2048 8 3 21 1 916 | 13b 8192 8 5 3 1 1795 | 13b 2048 8 2 3 0 2262
        7b 32768 8 2 2 1 1672 | 7b 8192 8 8 2 1 3206 | 7b 2048 8 6 2 0 4641
        3b 2048 8 10 2 0 10811 | 1b 2048 8 14 4 0 20513 | 760m 2048 8 24 2 0 32434""",
    ("A100-40GB", 1600): """
        70b 2048 128 4 1 1 376 | 30b 2048 32 4 1 1 857 | 13b 2048 128 16 1 1 1972
        13b 2048 8 4 16 1 1668 | 7b 2048 64 18 1 1 3665""",
}
FOUNDRY_LISTED = (("7b", 2048, 8, "H100"), ("3b", 2048, 16, "H100"), ("1b", 2048, 8, "H100"))


def foundry() -> list[Run]:
    """Return llm-foundry's tables: MPT, FSDP1, eager, plain cross-entropy."""
    runs = []
    for (name, gigabits), text in FOUNDRY.items():
        for row in text.replace("\n", "|").split("|"):
            if not row.strip():
                continue
            size, *numbers = row.split()
            seq_len, gpus, rows, count, full, rate = map(int, numbers)
            layout = Layout(
                MPT[size],
                shards=gpus,
                micro_batch=rows,
                seq_len=seq_len,
                checkpointing="full" if full else "none",
                accumulates=count > 1,
                plain_loss=True,
            )
            job = Workload(layout, machine(GPUS[name], gpus, gigabits), count)
            how = "full" if full else "no"
            what = f"MPT {size}, {seq_len} x {rows}, {how} checkpointing, {gpus} x {name}"
            listed = (size, seq_len, gpus, name) in FOUNDRY_LISTED
            runs.append(Run("llm-foundry", what, job, rate, listed))
    return runs


# torchtitan's selective checkpointing keeps every second product and attention.
EVERY_SECOND = ("q_proj", "v_proj", "gate_proj", "down_proj")
# Its H100s of 2024-12: HBM2e with 2.4 TB/s, 95 GiB, 500 W of 700. Power goes with about the square
# of the clock near the limit, so the rate with its root.
H100_500W = replace(
    GPUS["H100"],
    name="H100 (500 W, HBM2e)",
    memory_gib=95.0,
    memory_bytes_per_s=2400e9,
    measured_flops={
        name: rate * (500 / 700) ** 0.5 for name, rate in GPUS["H100"].measured_flops.items()
    },
)


def titan(
    model: str,
    seq_len: int,
    rows: int,
    checkpointing: str,
    gpu: Gpu,
    gpus: int,
    rate: float,
    *,
    compiled: bool = False,
    precision: str = "bf16",
    listed: bool = False,
    peak_gib: float | None = None,
    excluded: str = "",
) -> Run:
    """Return a torchtitan run: FSDP2, fp32 parameters and reduction."""
    layout = Layout(
        shape_of(config_of(model)),
        shards=gpus,
        micro_batch=rows,
        seq_len=seq_len,
        checkpointing=checkpointing,
        compiled=compiled,
        precision=precision,
        plain_loss=True,
        kept=EVERY_SECOND,
    )
    gigabits = 1600 if gpu.name.startswith("A100") else 3200
    job = Workload(layout, machine(gpu, gpus, gigabits))
    how = f"{precision}{', compiled' if compiled else ''}, {checkpointing} checkpointing"
    what = f"{model}, {seq_len} x {rows}, {how}, {gpus} x {gpu.name}"
    return Run("torchtitan", what, job, rate, listed, peak_gib, excluded)


def torchtitan() -> list[Run]:
    """Return torchtitan's published runs without tensor, pipeline or context parallelism."""
    eight, here = ("llama3.1-8b", 8192, 2, "selective"), {"listed": True}
    runs = []
    for gpus, rates, peaks in (
        (8, (5762, 6667, 8532), (82.4, 77.0, 76.8)),
        (128, (5605, 6514, 8380), (67.0, 62.0, 61.8)),
    ):
        for rate, peak, more in zip(
            rates,
            peaks,
            ({}, {"compiled": True}, {"compiled": True, "precision": "fp8"}),
            strict=True,
        ):
            runs.append(titan(*eight, H100_500W, gpus, rate, **more, **here, peak_gib=peak))
    fp8 = {"compiled": True, "precision": "fp8"}
    runs.append(titan(*eight, GPUS["H200"], 32, 10_938, **fp8, **here))
    runs.append(titan(*eight, GPUS["H200"], 64, 10_753, **fp8, **here))
    a100 = GPUS["A100-80GB"]
    runs.append(titan("llama3.1-8b", 8192, 1, "selective", a100, 64, 2973))
    runs.append(titan("llama3.1-70b", 8192, 1, "full", a100, 64, 331))
    runs.append(titan("llama2-13b", 4096, 2, "none", a100, 64, 2162))
    runs.append(titan("llama2-13b", 4096, 2, "selective", a100, 64, 1904))
    runs.append(titan("llama2-70b", 4096, 2, "full", a100, 64, 353))
    why = "power-limited to an unpublished figure"
    b200 = ("llama3.1-8b", 8192, 1, "full", GPUS["B200"], 8)
    runs.append(titan(*b200, 8308, compiled=True, excluded=why))
    runs.append(titan(*b200, 10_417, compiled=True, precision="fp8", excluded=why))
    return runs


QWEN25_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
}


def automodel() -> list[Run]:
    """Return AutoModel's LoRA runs on one GPU (fused kernels: taken as compiled)."""
    runs = []
    for name, config, rate in (
        ("llama3-8b", config_of("llama3.1-8b"), 12_473),
        ("qwen2.5-7b", QWEN25_7B, 14_110),
    ):
        layout = Layout(
            shape_of(config),
            shards=1,
            micro_batch=2,
            seq_len=4096,
            compiled=True,
            lora_rank=16,
            accumulates=True,
        )
        job = Workload(layout, machine(GPUS["H100"], 1, 3200), 16)
        what = f"{name} LoRA 16, 4096 x 2, 1 x H100"
        runs.append(Run("AutoModel", what, job, rate, listed=True))
    return runs


RUNS = [*torchtitan(), *automodel(), *foundry()]


def table() -> str:
    """Return the table of docs/plan.md."""
    lines = [
        "| system | run | tokens/s/GPU published | predicted | off by | GiB | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in sorted(RUNS, key=lambda one: not one.listed):
        memory = "| | |"
        if run.peak_gib is not None:
            memory = f"| {run.peak_gib} | {run.predicted_gib:.1f} |"
        note = f" ({run.excluded}: not counted)" if run.excluded else ""
        what = f"**{run.what}**" if run.listed else run.what
        lines.append(
            f"| {run.system} | {what}{note} | {run.tokens_per_s_per_gpu:,} "
            f"| {run.predicted:,.0f} | {run.error:+.0%} {memory}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    text = DOC.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    DOC.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
    print(table())
