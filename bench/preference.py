"""DPO with LoRA on SmolLM2-135M on CPUs beside TRL's DPOTrainer: answer tokens a second.

    python bench/preference.py [--rounds 2] [--steps 8]

Both take the same pairs of texts of many lengths, in bf16 and with all cores, and the reference is
the model without its adapters. TRL pads micro-batches of pairs of like length; rayapp packs. The
time is that of optimizer steps alone, without the first two. The weights are random, since time
does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m-instruct"
CORES = len(os.sched_getaffinity(0))
WARM_UP_STEPS = 2
RANK = 16
PAIRS_PER_STEP = 8
SEQ_LEN = 512


def write_pairs(path: Path, count: int) -> None:
    """Write pairs whose lengths vary as those of chats do: few are long."""
    draw = random.Random(0)

    def text(least: int, most: int) -> str:
        size = int(least * (most / least) ** draw.random())
        return "".join(draw.choices("abcdefgh ijklmnop", k=size)) + "x"

    with path.open("w") as out:
        for _ in range(count):
            prompt = text(10, 80)
            record = {"prompt": prompt, "chosen": text(10, 120), "rejected": text(10, 120)}
            out.write(json.dumps(record) + "\n")


def run_rayapp(folder: Path, options: argparse.Namespace, workers: int) -> tuple[float, float]:
    """Return (answer tokens, seconds) of the steps of a run."""
    tokens_per_step = 4 * SEQ_LEN
    asked = {
        "run.storage": folder / "runs",
        "run.name": f"rayapp-{time.time_ns()}",
        "model.path": MODEL,
        "model.from_scratch": "true",
        "model.tokenizer": "bytes",
        "model.lora": f"{{rank: {RANK}}}",
        "data.path": folder / "pairs.jsonl",
        "data.seq_len": SEQ_LEN,
        "data.eval_fraction": 0,
        "train.objective": "dpo",
        "train.tokens_per_step": tokens_per_step,
        "train.micro_batch": 4 // workers,
        "train.max_steps": options.steps,
        "train.precision": "bf16",
        "checkpoint.export": "false",
        "checkpoint.every_steps": "none",
        "cluster.workers": workers,
        "cluster.address": "local",
    }
    command = [sys.executable, "-m", "rayapp.finetune", *(f"--{k}={v}" for k, v in asked.items())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    text = (folder / "runs" / str(asked["run.name"]) / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()][WARM_UP_STEPS:]
    return sum(line["tokens"] for line in lines), sum(line["step_s"] for line in lines)


def run_trl(folder: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Return the same of TRL's trainer: one process, all cores."""
    import peft
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    from rayapp.data import tokens
    from rayapp.presets import config_of

    torch.manual_seed(0)
    tokenizer = tokens.byte_tokenizer()
    shape = AutoConfig.for_model(**dict(config_of(MODEL)))
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    records = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    counted, begun = [0.0], list[float]()

    class Counting(DPOTrainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **more: Any) -> Any:
            done = len(begun) / (PAIRS_PER_STEP // options.pairs)
            if done >= WARM_UP_STEPS:
                counted[0] += float(args[1]["completion_mask"].sum())
            begun.append(time.perf_counter())
            return super().training_step(*args, **more)

    config = DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=options.pairs,
        gradient_accumulation_steps=PAIRS_PER_STEP // options.pairs,
        max_steps=options.steps,
        train_sampling_strategy="group_by_length",
        length_column_name="length",
        remove_unused_columns=False,
        learning_rate=1e-4,
        max_length=SEQ_LEN,
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_strategy="no",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    lora = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = Counting(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
        peft_config=lora,
    )
    each = [sum(map(len, record.values())) for record in records]
    trainer.train_dataset = trainer.train_dataset.add_column("length", each)
    trainer.train()
    first = begun[WARM_UP_STEPS * (PAIRS_PER_STEP // options.pairs)]
    return counted[0], time.perf_counter() - first


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=8, help="of a micro-batch of TRL")
    parser.add_argument("--trl", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def trl_alone(folder: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Run TRL's trainer in a process of its own."""
    own = [f"--{name}={getattr(options, name)}" for name in ("steps", "pairs")]
    command = [sys.executable, __file__, f"--trl={folder}", *own]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(done.stdout + done.stderr)
    tokens, seconds = json.loads(lines[0].removeprefix("RESULT "))
    return tokens, seconds


def main() -> None:
    options = parsed()
    if options.trl:
        print("RESULT " + json.dumps(run_trl(Path(options.trl), options)), flush=True)
        return
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pairs(folder / "pairs.jsonl", 2 * PAIRS_PER_STEP * options.steps)
        for _ in range(options.rounds):
            each = {"TRL": trl_alone(folder, options)}
            each |= {
                f"rayapp, {n} worker{'s' if n > 1 else ''}": run_rayapp(folder, options, n)
                for n in sorted({1, CORES})
            }
            for row, (tokens, seconds) in each.items():
                found.setdefault(row, []).append(tokens / seconds)
                print(f"  {row}: {tokens / seconds:.0f}", file=sys.stderr, flush=True)
    print(f"{'':20} {'answer tokens/s':>16} {'over TRL':>9}")
    for row, rates in found.items():
        ratios = [mine / theirs for mine, theirs in zip(rates, found["TRL"], strict=True)]
        print(f"{row:20} {statistics.median(rates):16,.0f} {statistics.median(ratios):9.2f}")


if __name__ == "__main__":
    main()
