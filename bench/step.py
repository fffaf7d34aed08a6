"""The step engine by technique on CPUs, and transformers' Trainer beside it: torch only, no Ray.

    python bench/step.py                                            # 2 workers, a small Llama
    python bench/step.py --only "rayapp, bf16" --rounds 1 --profile 20

Every row of the table is one torchrun of its own; rounds go through all rows in turn, so that what
else the machine does meets all of them. A row is a set of config overrides, and the model is made
as a run makes it. Rows hold packed documents of drawn lengths, the same for all; tokens/s counts
tokens of documents, not padding. "defaults" is what each does when nothing is asked of it: here
packed rows, the precision and kernels that are best, there padded documents in fp32. A row that
fails is a line with its error. bench/gpu.py measures GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from typing import Any

from rayapp.config import Config, load
from rayapp.presets import config_of

WARM_UP_STEPS = 4
SMALL = {"num_hidden_layers": 8, "num_key_value_heads": 2}  # 8 million parameters
VOCABULARY = config_of("tiny")["vocab_size"]
BF16 = {"train.precision": "bf16"}
COMPILED = {"train.compile": "true"}
FULL = {"parallel.activation_checkpointing": "full"}
SELECTIVE = {"parallel.activation_checkpointing": "selective"}
LORA = {"model.lora": "{rank: 16}"}
Row = tuple[str, dict[str, str]]  # the engine, and what is set
ROWS: dict[str, Row] = {
    "Trainer, fp32": ("trainer", {}),
    "rayapp, fp32": ("rayapp", {}),
    "rayapp, fp32, compiled": ("rayapp", COMPILED),
    "Trainer, bf16": ("trainer", BF16),
    "rayapp, bf16": ("rayapp", BF16),
    "rayapp, bf16, compiled": ("rayapp", BF16 | COMPILED),
    "Trainer, defaults": ("padded trainer", {}),
    "rayapp, defaults": ("rayapp", BF16),
    "bf16, no_shard": ("rayapp", BF16 | {"parallel.strategy": "no_shard"}),
    "bf16, shard_grad_op": ("rayapp", BF16 | {"parallel.strategy": "shard_grad_op"}),
    "bf16, full checkpointing": ("rayapp", BF16 | FULL),
    "bf16, selective checkpointing": ("rayapp", BF16 | SELECTIVE),
    "bf16, sdpa attention": ("rayapp", BF16 | {"model.attention": "sdpa"}),
    "bf16, whole logits": ("rayapp", BF16 | {"train.loss_chunk": "0"}),
    "bf16, adamw8bit": ("rayapp", BF16 | {"train.optimizer": "adamw8bit"}),
    "bf16, muon": ("rayapp", BF16 | {"train.optimizer": "muon"}),
    "bf16, LoRA": ("rayapp", BF16 | LORA),
}
RATIOS = (
    ("rayapp, fp32", "Trainer, fp32"),
    ("rayapp, fp32, compiled", "Trainer, fp32"),
    ("rayapp, bf16", "Trainer, bf16"),
    ("rayapp, bf16, compiled", "Trainer, bf16"),
    ("rayapp, defaults", "Trainer, defaults"),
)


def overrides_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what replaces fields of the preset's config.json."""
    return {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": options.seq_len}


def config_for(options: argparse.Namespace, settings: dict[str, str]) -> Config:
    """Return the config of a row."""
    common = {
        "model.path": "tiny",
        "model.overrides": json.dumps(overrides_of(options)),
        "data.seq_len": str(options.seq_len),
        "train.micro_batch": str(options.micro_batch),
        "train.tokens_per_step": str(options.micro_batch * options.workers * options.seq_len),
        "train.precision": "fp32",
    }
    return load(None, common | settings, Config)


def run_rayapp(config: Config, rows: list[Any], profile: Any) -> dict[str, float]:
    """Time steps of rayapp's own engine; `profile` is a profiler of the timed steps, or None."""
    import torch
    from drawn import make_engine, step

    engine = make_engine(config, torch.device("cpu"))
    tokens, began, cpu_s = 0, 0.0, 0.0
    for number, batch in enumerate(rows):
        if number == WARM_UP_STEPS:
            torch.distributed.barrier()
            if profile:
                profile.start()
            began, cpu_s = time.perf_counter(), time.process_time()
        (_, done, *_), _ = step(engine, batch)
        tokens += done if number >= WARM_UP_STEPS else 0
    cpu_s = time.process_time() - cpu_s
    torch.distributed.barrier()
    seconds = time.perf_counter() - began
    if profile:
        profile.stop()
    phases = {f"{name}_gib": gib for name, gib in engine.peaks.take().items()}
    return figures(tokens, seconds, cpu_s, engine.peaks.highest_gib, engine.control) | phases


def figures(
    tokens: float, seconds: float, cpu_s: float, peak_gib: float, control: Any
) -> dict[str, float]:
    """Return a row's figures: tokens of all ranks in `seconds`; CPU seconds and peak of this one.

    CPU time tells on a busy machine too what time tells on cores that nobody else uses.
    """
    import torch
    import torch.distributed as dist

    most, all_cpu_s = torch.tensor(peak_gib), torch.tensor(cpu_s)
    dist.all_reduce(most, dist.ReduceOp.MAX, control)
    dist.all_reduce(all_cpu_s, group=control)
    return {
        "tokens_per_s": tokens / seconds,
        "tokens_per_cpu_s": tokens / float(all_cpu_s),
        "peak_gib": float(most),
    }


def worker(options: argparse.Namespace, row: Row) -> None:
    """Be one rank of a row: print its figures, or its error."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    try:
        found: dict[str, Any] = run_row(options, *row)
    except Exception as error:  # of a kernel or for memory: the other rows are measured
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    dist.destroy_process_group()


def run_row(options: argparse.Namespace, engine: str, settings: dict[str, str]) -> dict[str, float]:
    """Measure one row, and print its profile if one is asked for."""
    import torch
    import torch.distributed as dist
    from drawn import batches
    from trainer_step import run_trainer
    from transformers import LlamaConfig

    profile = torch.profiler.profile() if options.profile else None
    config, count = config_for(options, settings), WARM_UP_STEPS + options.steps
    rows = batches(config, VOCABULARY, count, dist.get_rank())
    if engine == "rayapp":
        found = run_rayapp(config, rows, profile)
    else:
        shape = LlamaConfig(**dict(config_of("tiny")) | overrides_of(options))
        packed, bf16 = engine == "trainer", settings.get("train.precision") == "bf16"
        found = run_trainer(options, rows, shape, packed, bf16)
    if profile and engine == "rayapp" and dist.get_rank() == 0:
        table = profile.key_averages().table(
            "self_cpu_time_total", row_limit=options.profile, max_name_column_width=90
        )
        print(engine, settings, table, sep="\n", file=sys.stderr, flush=True)
    return found


def measure(options: argparse.Namespace, row: Row) -> dict[str, Any]:
    """Run a row in processes of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.workers}", __file__, "--row", json.dumps(row)]
    for name in ("seq_len", "micro_batch", "steps", "workers", "profile"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if row[0] == "rayapp" or options.same_malloc:
        from rayapp.driver.ray_workers import CPU_ENVIRONMENT

        environment |= CPU_ENVIRONMENT
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = {"error": f"the process ended with exit code {done.returncode}"}
    if lines:
        found = json.loads(lines[0].removeprefix("RESULT "))
    if options.profile or "error" in found:
        print(done.stderr, file=sys.stderr)
    return found


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="parts of the names of rows, by semicolons")
    parser.add_argument("--profile", type=int, default=0, help="lines of a profile to show")
    parser.add_argument("--same_malloc", action="store_true", help="Trainer with our malloc too")
    parser.add_argument("--row", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.row:
        worker(options, json.loads(options.row))
        return
    parts = [part for part in options.only.split(";") if part]
    rows = {n: row for n, row in ROWS.items() if not parts or any(part in n for part in parts)}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name, row in rows.items():
            found[name].append(measure(options, row))
            print(f"  {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    print(f"{'':32} {'tokens/s':>10} {'a CPU s':>10} {'peak GiB':>9}")
    for name, results in found.items():
        if errors := [result["error"] for result in results if "error" in result]:
            print(f"{name:32} {errors[0]}")
            results.clear()
            continue
        rate = statistics.median(r["tokens_per_s"] for r in results)
        of_cpu = statistics.median(r["tokens_per_cpu_s"] for r in results)
        peak = max(r["peak_gib"] for r in results)
        print(f"{name:32} {rate:10,.0f} {of_cpu:10,.0f} {peak:9.2f}")
    for ours, theirs in RATIOS:
        pairs = list(zip(found.get(ours, []), found.get(theirs, []), strict=False))
        for what in ("tokens_per_s", "tokens_per_cpu_s") if pairs else ():
            ratios = [a[what] / b[what] for a, b in pairs]
            middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
            print(f"{ours} / {theirs}, {what}: {middle:.2f} ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
