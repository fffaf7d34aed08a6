"""The step engine by technique, and transformers' Trainer beside it: torch only, no Ray.

    python bench/step.py                                            # 2 CPU workers, a small Llama
    python bench/step.py --device cuda --shape 1b --seq_len 4096    # one GPU
    python bench/step.py --only "rayapp, bf16" --rounds 1 --profile 20

On CPUs every row of the table is one torchrun of its own, on a GPU all rows of one engine share
one; rounds go through all rows in turn, so that what else the machine does meets all of them. A row
is a set of config overrides, and the model is made as a run makes it. Rows hold packed documents of
drawn lengths, the same for all; tokens/s counts tokens of documents, not padding. "defaults" is
what each does when nothing is asked of it: here packed rows, the precision and kernels that are
best, there padded documents in fp32. A row that fails is a line with its error.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np

from rayapp.config import Config, load
from rayapp.planner.flops import mean_context, model_flops
from rayapp.planner.shape import shape_of as formula_shape
from rayapp.presets import config_of

WARM_UP_STEPS = 4
PRESETS = {"small": "tiny", "1b": "llama3.2-1b", "3b": "llama3.2-3b", "8b": "llama3.1-8b"}
SMALL = {"num_hidden_layers": 8, "num_key_value_heads": 2}  # 8 million parameters
BF16 = {"train.precision": "bf16"}
COMPILED = {"train.compile": "true"}
FULL = {"parallel.activation_checkpointing": "full"}
SELECTIVE = {"parallel.activation_checkpointing": "selective"}
LORA = {"model.lora": "{rank: 16}"}
Row = tuple[str, dict[str, str]]  # the engine, and what is set
ROWS: dict[str, dict[str, Row]] = {
    "cpu": {
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
    },
    "cuda": {
        "Trainer, bf16": ("trainer", BF16),
        "rayapp, bf16": ("rayapp", BF16),
        "rayapp, bf16, compiled": ("rayapp", BF16 | COMPILED),
        "bf16, compiled, sdpa": ("rayapp", BF16 | COMPILED | {"model.attention": "sdpa"}),
        "bf16, compiled, selective": ("rayapp", BF16 | COMPILED | SELECTIVE),
        "bf16, compiled, full": ("rayapp", BF16 | COMPILED | FULL),
        "bf16, compiled, Liger's loss": (
            "rayapp",
            BF16 | COMPILED | {"train.loss_kernel": "liger"},
        ),
        "fp8, compiled": ("rayapp", COMPILED | {"train.precision": "fp8"}),
        "bf16, compiled, adamw8bit": (
            "rayapp",
            BF16 | COMPILED | {"train.optimizer": "adamw8bit"},
        ),
        "LoRA, bf16, compiled": ("rayapp", BF16 | COMPILED | LORA),
        "LoRA, bf16, compiled, selective": ("rayapp", BF16 | COMPILED | LORA | SELECTIVE),
    },
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
    own = SMALL if options.shape == "small" else {}
    vocabulary = config_of(PRESETS[options.shape])["vocab_size"]
    return {**own, "vocab_size": vocabulary, "max_position_embeddings": options.seq_len}


def config_for(options: argparse.Namespace, settings: dict[str, str]) -> Config:
    """Return the config of a row."""
    common = {
        "model.path": PRESETS[options.shape],
        "model.overrides": json.dumps(overrides_of(options)),
        "data.seq_len": str(options.seq_len),
        "train.micro_batch": str(options.micro_batch),
        "train.tokens_per_step": str(options.micro_batch * options.workers * options.seq_len),
        "train.lr": "1e-4",
        "train.precision": "fp32",
    }
    return load(None, common | settings)


def lengths(options: argparse.Namespace, rank: int) -> list[list[int]]:
    """Draw documents that fill rows, [rows][documents]: mostly short, as instructions are."""
    draw = np.random.default_rng(rank)
    rows = []
    for _ in range((WARM_UP_STEPS + options.steps) * options.micro_batch):
        row, left = [], options.seq_len
        while left:
            drawn = int(draw.lognormal(np.log(options.seq_len / 6), 0.8)) + 8
            row.append(min(drawn, left))
            left -= row[-1]
        rows.append(row)
    return rows


def micro_batches(options: argparse.Namespace, rank: int) -> list[dict[str, Any]]:
    """Pack the documents: input_ids, labels and segments [b, S] of every step."""
    draw, rows = np.random.default_rng(rank + 100), lengths(options, rank)
    vocabulary, found = overrides_of(options)["vocab_size"], []
    for start in range(0, len(rows), options.micro_batch):
        some = rows[start : start + options.micro_batch]
        segments = np.stack([np.repeat(np.arange(1, len(r) + 1), r) for r in some])
        ids = draw.integers(0, vocabulary, segments.shape)
        labels = np.roll(ids, -1, 1)
        ends = np.roll(segments, -1, 1) != segments
        ends[:, -1] = True
        labels[ends] = -100
        found.append({"input_ids": ids, "labels": labels, "segments": segments.astype(np.uint16)})
    return found


def run_rayapp(
    options: argparse.Namespace, settings: dict[str, str], profile: Any
) -> dict[str, float]:
    """Time steps of rayapp's own engine; `profile` is a profiler of the timed steps, or None."""
    import torch
    import torch.distributed as dist

    from rayapp.data.rows import StepRows
    from rayapp.data.tokens import byte_tokenizer
    from rayapp.finetune.build import make_parts
    from rayapp.train import loop
    from rayapp.train.engine import Engine

    config = config_for(options, settings)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer().save_pretrained(folder)
        parts = make_parts(argparse.Namespace(config=config, tokenizer_url=folder), device)
    control = dist.new_group(backend="gloo")
    engine = Engine(parts.lm, parts.optimizers, lambda step: 1e-4, device, 1.0, control)
    tokens, began, cpu_s = 0, 0.0, 0.0
    for step, batch in enumerate(micro_batches(options, dist.get_rank())):
        if step == WARM_UP_STEPS:
            synchronize(options)
            if profile:
                profile.start()
            began, cpu_s = time.perf_counter(), time.process_time()
        zeros = np.zeros((1, options.micro_batch), np.int64)
        rows = StepRows(
            step=step,
            **{name: array[None] for name, array in batch.items()},
            target_bytes=zeros,
            positions=zeros,
            rows=zeros,
        )
        agreement = loop.agree(engine, rows)
        loop.train_step(engine, rows, agreement)
        tokens += agreement.wait().sums[1] if step >= WARM_UP_STEPS else 0
    cpu_s = time.process_time() - cpu_s
    synchronize(options)
    seconds = time.perf_counter() - began
    if profile:
        profile.stop()
    phases = {f"{name}_gib": gib for name, gib in engine.peaks.take().items()}
    return figures(tokens, seconds, cpu_s, engine.peaks.highest_gib, control) | phases


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


def synchronize(options: argparse.Namespace) -> None:
    """Wait for all ranks, and for the GPU."""
    import torch
    import torch.distributed as dist

    if options.device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def worker(options: argparse.Namespace, rows: list[Row]) -> None:
    """Be one rank of some rows: print each one's figures, or its error."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    for row in rows:
        torch.manual_seed(0)
        try:
            found: dict[str, Any] = run_row(options, *row)
        except Exception as error:  # of a kernel or for memory: the other rows are measured
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        if dist.get_rank() == 0:
            print("RESULT " + json.dumps(found), flush=True)
        gc.collect()
        if options.device == "cuda":
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def run_row(options: argparse.Namespace, engine: str, settings: dict[str, str]) -> dict[str, float]:
    """Measure one row, and print its profile if one is asked for."""
    import torch
    import torch.distributed as dist
    from trainer_step import run_trainer

    profile = torch.profiler.profile() if options.profile else None
    if engine == "rayapp":
        found = run_rayapp(options, settings, profile)
    else:
        packed, bf16 = engine == "trainer", settings.get("train.precision") == "bf16"
        batches = micro_batches(options, dist.get_rank())
        found = run_trainer(options, batches, shape_of(options), packed, bf16)
    if profile and engine == "rayapp" and dist.get_rank() == 0:
        device = "device" if options.device == "cuda" else "cpu"
        table = profile.key_averages().table(
            f"self_{device}_time_total", row_limit=options.profile, max_name_column_width=90
        )
        print(engine, settings, table, sep="\n", file=sys.stderr, flush=True)
    return found


def shape_of(options: argparse.Namespace) -> Any:
    """Return the model's config, as transformers has it."""
    from transformers import LlamaConfig

    return LlamaConfig(**dict(config_of(PRESETS[options.shape])) | overrides_of(options))


def measure(options: argparse.Namespace, rows: list[Row]) -> Iterator[dict[str, Any]]:
    """Run rows of one engine, one after the other, in processes of their own; yield as they end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.workers}", __file__, "--rows", json.dumps(rows)]
    for name in ("device", "shape", "seq_len", "micro_batch", "steps", "workers", "profile"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.device == "cpu" and (rows[0][0] == "rayapp" or options.same_malloc):
        from rayapp.driver.ray_workers import CPU_ENVIRONMENT

        environment |= CPU_ENVIRONMENT
    missing, failed = len(rows), False
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("RESULT "):
                found = json.loads(line.removeprefix("RESULT "))
                missing, failed = missing - 1, failed or "error" in found
                yield found
        process.wait()
        if options.profile or failed or missing:
            errors.seek(0)
            print(errors.read(), file=sys.stderr)
    for _ in range(missing):
        yield {"error": f"the process ended with exit code {process.returncode}"}


def together(options: argparse.Namespace, rows: dict[str, Row]) -> list[list[str]]:
    """Return the names of rows by process: on a GPU, start-up takes longer than a row's steps."""
    if options.device == "cpu":
        return [[name] for name in rows]
    engines = dict.fromkeys(engine for engine, _ in rows.values())
    return [[name for name, row in rows.items() if row[0] == engine] for engine in engines]


def flops_per_token(options: argparse.Namespace, lora: bool) -> float:
    """Return the model FLOPs of a token, forward and backward, for documents as drawn."""
    context = mean_context([length for row in lengths(options, 0) for length in row])
    values = dict(config_of(PRESETS[options.shape])) | overrides_of(options)
    return model_flops(formula_shape(values), context, 16 if lora else None)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", default="small", choices=list(PRESETS))
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="parts of the names of rows, by semicolons")
    parser.add_argument("--peak_flops", type=float, default=None, help="of one device, dense")
    parser.add_argument("--profile", type=int, default=0, help="lines of a profile to show")
    parser.add_argument("--same_malloc", action="store_true", help="Trainer with our malloc too")
    parser.add_argument("--rows", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.workers = options.workers or (2 if options.device == "cpu" else 1)
    return options


def main() -> None:
    options = parsed()
    if options.rows:
        worker(options, json.loads(options.rows))
        return
    parts = [part for part in options.only.split(";") if part]
    every = ROWS[options.device]
    rows = {n: row for n, row in every.items() if not parts or any(part in n for part in parts)}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for names in together(options, rows):
            for name, result in zip(names, measure(options, [rows[n] for n in names]), strict=True):
                found[name].append(result)
                print(f"  {name}: {result}", file=sys.stderr, flush=True)
    print(f"{'':32} {'tokens/s':>10} {'a CPU s':>10} {'peak GiB':>9} {'MFU':>6}")
    for name, results in found.items():
        if errors := [result["error"] for result in results if "error" in result]:
            print(f"{name:32} {errors[0]}")
            results.clear()
            continue
        rate = statistics.median(r["tokens_per_s"] for r in results)
        of_cpu = statistics.median(r["tokens_per_cpu_s"] for r in results)
        peak = max(r["peak_gib"] for r in results)
        mfu = "n/a"
        if options.peak_flops:
            flops = flops_per_token(options, "model.lora" in rows[name][1])
            mfu = f"{rate * flops / options.peak_flops / options.workers:.1%}"
        print(f"{name:32} {rate:10,.0f} {of_cpu:10,.0f} {peak:9.2f} {mfu:>6}")
    for ours, theirs in RATIOS:
        pairs = list(zip(found.get(ours, []), found.get(theirs, []), strict=False))
        for what in ("tokens_per_s", "tokens_per_cpu_s") if pairs else ():
            ratios = [a[what] / b[what] for a, b in pairs]
            middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
            print(f"{ours} / {theirs}, {what}: {middle:.2f} ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
