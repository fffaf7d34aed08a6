"""Real tokens/s of fine-tuning on chats of mixed lengths: rayapp against TRL's SFTTrainer.

    python bench/sft.py [--rounds 3] [--steps 40]

Needs the extra `bench` (TRL). Both train the same Llama of 4 million parameters on 2 CPU processes
of one thread with FSDP2 over gloo, in bf16, on the same made-up chats, whose lengths follow a
Pareto law (a fifth of them holds four fifths of the text), cut at 512 tokens; only what the
assistant says bears loss. A step is 16 sequences of at most 512 tokens. Only tokens that are not
padding count, and only after 10 steps. rayapp is the real command, Ray included; TRL runs under
torchrun. Arms:

    rayapp               python -m rayapp.finetune
    default              SFTConfig as it is: padding, gradient checkpointing
    default, tuned       without gradient checkpointing, which rayapp does not use either
    grouped, tuned       batches of like lengths too (train_sampling_strategy=group_by_length)
    packing              packing=True, else as it is
    packing, tuned       without gradient checkpointing, and one sequence at a time: TRL makes one
                         long sequence of a batch, whose attention on CPUs costs its length squared
    wrapped, tuned       packing without regard to documents: no mask is needed

The tuned arms get rayapp's allocator settings too. All run in turn, and ratios are taken round by
round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import corpus
import numpy as np
from loop_alone import steady_rate

from rayapp.driver.ray_workers import CPU_ENVIRONMENT

ROOT = Path(__file__).parent.parent
SEQ_LEN, MICRO_BATCH, SEQUENCES = 512, 8, 16
PLAIN = {"per_device_train_batch_size": MICRO_BATCH, "max_length": SEQ_LEN}
TUNED = {**PLAIN, "gradient_checkpointing": False}
PACKED = {**TUNED, "packing": True, "eval_packing": False}
ARMS = {
    "default": PLAIN,
    "default, tuned": TUNED,
    "grouped, tuned": {**TUNED, "train_sampling_strategy": "group_by_length"},
    "packing": {**PLAIN, "packing": True},
    "packing, tuned": {
        **PACKED,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": MICRO_BATCH,
    },
    "wrapped, tuned": {**PACKED, "packing_strategy": "wrapped"},
}


def ours(folder: str, name: str, steps: int) -> float:
    """Run rayapp; return steady real tokens/s."""
    command = [sys.executable, "-m", "rayapp.finetune"]
    command += [f"--run.storage={folder}/runs", f"--run.name={name}"]
    command += [f"--model.path={folder}/model", "--cluster.workers=2"]
    command += [f"--data.path={folder}/chats.jsonl", "--data.kind=chat", "--data.truncate=true"]
    command += [f"--data.seq_len={SEQ_LEN}", "--data.eval_fraction=0"]
    command += [f"--train.max_steps={steps}", f"--train.micro_batch={MICRO_BATCH}"]
    command += [f"--train.tokens_per_step={SEQUENCES * SEQ_LEN}", "--train.precision=bf16"]
    command += ["--train.lr=2e-5", "--checkpoint.every_s=none"]
    subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return steady_rate(Path(folder, "runs", name))


def theirs(folder: str, arm: str, steps: int) -> dict[str, float]:
    """Run TRL; return steady real tokens/s, fill, and what shards the model."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["bench/trl_loop.py", f"{folder}/model", f"{folder}/chats.jsonl", str(steps)]
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if arm.endswith("tuned"):
        settings |= CPU_ENVIRONMENT
    with tempfile.TemporaryDirectory() as output:
        done = subprocess.run(
            [*command, output, json.dumps(ARMS[arm])],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, **settings, "HF_HOME": output},
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"tokens_per_s"')]
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--mib", type=int, default=3, help="size of the chats")
    parser.add_argument("--arms", default=";".join(ARMS), help="of TRL, separated by semicolons")
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {arm: [] for arm in options.arms.split(";")}
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        pool = corpus.text_pool(rng)
        corpus.save_tokenizer(Path(folder, "model"), pool, 4096)
        parameters = corpus.save_model(Path(folder, "model"))
        texts = corpus.documents(rng, pool, 100, 4_000)
        corpus.write(Path(folder, "chats.jsonl"), texts, options.mib * 2**20, chat=True)
        for number in range(1, options.rounds + 1):
            mine = ours(folder, f"bench-{number}", options.steps)
            print(f"round {number}: rayapp {mine:,.0f} tokens/s", flush=True)
            for arm in ratios:
                found = theirs(folder, arm, options.steps)
                ratios[arm].append(mine / found["tokens_per_s"])
                print(
                    f"round {number}: TRL {arm} {found['tokens_per_s']:,.0f} tokens/s, "
                    f"{found['fill']:.0%} of the positions are tokens ({found['sharding']})",
                    flush=True,
                )
    print(f"{parameters:,} parameters, real tokens/s, medians of {options.rounds} rounds")
    for arm, ratio in ratios.items():
        low, high = min(ratio), max(ratio)
        print(f"rayapp / TRL {arm}: {statistics.median(ratio):.2f} ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
