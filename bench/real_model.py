"""The step engine on SmolLM2-135M on CPUs beside a plain loop of transformers and peft.

    python bench/real_model.py [--rounds 3] [--only "LoRA"]

The plain loop is one process with all cores: AutoModelForCausalLM in bf16, peft's LoRA or all
weights in fp32 under autocast, sdpa attention, fused AdamW, clipping. Each row of the table is a
command of its own; rounds go through all rows in turn. Rows of tokens are the same for all: packed
documents of drawn lengths. The weights are random, since time does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from rayapp.config import Config, load
from rayapp.driver.ray_workers import CPU_ENVIRONMENT
from rayapp.presets import config_of

MODEL = "smollm2-135m-instruct"
WARM_UP_STEPS = 2
RANK = 16
CORES = len(os.sched_getaffinity(0))
ROWS: dict[str, dict[str, Any]] = {
    f"{engine}, {what}{', compiled' if compiled else ''}{label}": {
        "engine": engine,
        "lora": what == "LoRA",
        "compiled": compiled,
        "workers": workers,
    }
    for what in ("LoRA", "full")
    for compiled in (False, True)
    for engine, workers, label in (
        ("plain", 1, ""),
        ("rayapp", 1, ""),
        ("rayapp", CORES, f", {CORES} workers"),
    )
}


def config_for(options: argparse.Namespace, row: dict[str, Any]) -> Config:
    """Return the config of a row: the step has the same tokens at any number of workers."""
    rows = options.rows // row["workers"]
    return load(
        None,
        {
            "model.path": MODEL,
            "model.from_scratch": "true",
            "model.overrides": json.dumps({"vocab_size": config_of(MODEL)["vocab_size"]}),
            "model.lora": f"{{rank: {RANK}}}" if row["lora"] else "none",
            "data.seq_len": str(options.seq_len),
            "train.tokens_per_step": str(options.rows * options.seq_len),
            "train.micro_batch": str(min(rows, options.micro_batch)),
            "train.precision": "bf16",
            "train.compile": str(row["compiled"]).lower(),
            "parallel.strategy": options.strategy,
        },
        Config,
    )


def run_rayapp(config: Config, rows: list[Any]) -> tuple[float, int]:
    """Return (seconds, tokens of this rank) of the steps after the warm-up."""
    import torch
    from drawn import make_engine, step

    engine = make_engine(config, torch.device("cpu"))
    began, tokens = 0.0, 0
    for number, batch in enumerate(rows):
        if number == WARM_UP_STEPS:
            torch.distributed.barrier()
            began = time.perf_counter()
        (_, done, *_), _ = step(engine, batch)
        tokens += done if number >= WARM_UP_STEPS else 0
    torch.distributed.barrier()
    return time.perf_counter() - began, tokens


def run_plain(row: dict[str, Any], rows: list[Any]) -> tuple[float, int]:
    """Return the same of the plain loop: one process, all cores."""
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rayapp.data.packing import position_ids

    shape = AutoConfig.for_model(**dict(config_of(MODEL)))
    dtype = torch.bfloat16 if row["lora"] else torch.float32
    model: Any = AutoModelForCausalLM.from_config(shape, dtype=dtype)
    if row["lora"]:
        lora = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)
    if row["compiled"]:
        for layer in (model.base_model.model if row["lora"] else model).model.layers:
            layer.compile()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    began, tokens = 0.0, 0
    for number, batch in enumerate(rows):
        if number == WARM_UP_STEPS:
            began = time.perf_counter()
        count = len(batch.input_ids)
        for ids, labels, segments in zip(
            batch.input_ids, batch.labels, batch.segments, strict=True
        ):
            with torch.autocast("cpu", torch.bfloat16, enabled=not row["lora"]):
                loss = model(
                    input_ids=torch.from_numpy(ids).long(),
                    position_ids=torch.from_numpy(position_ids(segments)),
                    shift_labels=torch.from_numpy(labels).long(),
                    labels=torch.from_numpy(labels).long(),
                    use_cache=False,
                ).loss
            (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += int((batch.segments != 0).sum()) if number >= WARM_UP_STEPS else 0
    return time.perf_counter() - began, tokens


def grouped(rows: list[Any], config: Config) -> list[Any]:
    """Join the micro-batches that `drawn.batches` makes into steps of this rank."""
    import dataclasses

    import numpy as np

    size = config.rows_per_step // config.micro_batch // int(config.cluster.workers)
    names = [each.name for each in dataclasses.fields(rows[0]) if each.name != "step"]
    return [
        dataclasses.replace(
            rows[0],
            step=first // size,
            **{
                n: np.concatenate([getattr(r, n) for r in rows[first : first + size]])
                for n in names
                if isinstance(getattr(rows[0], n), np.ndarray)
            },
        )
        for first in range(0, len(rows), size)
    ]


def worker(options: argparse.Namespace, row: dict[str, Any]) -> None:
    """Be one rank of a row: print tokens/s, and the peak of this process."""
    import torch
    import torch.distributed as dist
    from drawn import batches

    from rayapp.train.memory_peaks import Peaks

    torch.set_num_threads(max(1, CORES // row["workers"]))
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    config = config_for(options, row)
    config = config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"workers": str(row["workers"])})}
    )
    each = options.rows // row["workers"] // config.micro_batch
    count = (WARM_UP_STEPS + options.steps) * each
    rows = grouped(batches(config, config_of(MODEL)["vocab_size"], count, dist.get_rank()), config)
    if row["engine"] == "plain":
        seconds, tokens = run_plain(row, rows)
    else:
        seconds, tokens = run_rayapp(config, rows)
    peaks = Peaks(torch.device("cpu"))
    with peaks.phase("optimizer"):
        pass
    if dist.get_rank() == 0:
        found = {"tokens_per_s": tokens / seconds, "peak_gib": peaks.highest_gib}
        print("RESULT " + json.dumps(found), flush=True)
    dist.destroy_process_group()


def measure(options: argparse.Namespace, row: dict[str, Any]) -> dict[str, Any]:
    """Run a row in processes of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={row['workers']}", __file__, "--row", json.dumps(row)]
    for name in ("seq_len", "micro_batch", "steps", "rows", "strategy"):
        command += [f"--{name}", str(getattr(options, name))]
    threads = str(max(1, CORES // row["workers"]))
    environment = os.environ | {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    if row["engine"] == "rayapp" or options.same_malloc:
        environment |= CPU_ENVIRONMENT
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(done.stderr)
    return json.loads(lines[0].removeprefix("RESULT "))


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4, help="of a step, over all workers")
    parser.add_argument("--micro_batch", type=int, default=4, help="at most")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strategy", default="full_shard")
    parser.add_argument("--only", default="", help="parts of the names of rows, by semicolons")
    parser.add_argument("--same_malloc", action="store_true", help="plain loop with our malloc too")
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
    print(f"{'':36} {'tokens/s':>10} {'peak GiB':>9} {'over plain':>12}")
    for name, results in found.items():
        rate = statistics.median(each["tokens_per_s"] for each in results)
        peak = max(each["peak_gib"] for each in results)
        theirs = found.get(", ".join(["plain", *name.split(", ")[1:]][:3]).split(f", {CORES} w")[0])
        ratios = [
            a["tokens_per_s"] / b["tokens_per_s"]
            for a, b in zip(results, theirs or (), strict=False)
        ]
        over = f"{statistics.median(ratios):.2f}" if ratios else ""
        print(f"{name:36} {rate:10,.0f} {peak:9.2f} {over:>12}")


if __name__ == "__main__":
    main()
