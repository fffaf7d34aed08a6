"""Tokenise and pack on one core: rayapp against `datasets` + TRL's packing; and the wait for data.

    python bench/data.py [--rounds 3] [--mib 16] [--steps 60]

Two made-up corpora of JSONL, short documents ({"text"}) and chats ({"messages"}), are brought from
the file to packed rows of 512 tokens on disk. rayapp does the `UnitTask` of unit after unit,
without Ray. The other sides run `load_dataset`, a tokenising `map(batched=True)` and TRL's
`pack_dataset` (`bfd` and `wrapped`), with the same tokenizer. All make the mask of what the
assistant says. `raw` encodes the texts of the documents by `encode_batch_fast`, and does no more.
Each run is a fresh process of one thread with fresh folders; they run in turn, and ratios are taken
round by round. Seconds are CPU seconds of the process, all its threads together, so that other load
on the machine counts little. The second ratio leaves out `load_dataset`, which turns JSONL into
Arrow files, while rayapp's time holds all of its reading.

Needs the extra `bench` (TRL).

Then the default job is run, and the time in which rank 0 waits for rows is given as a share of the
time of its steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
SEQ_LEN = 512
ARMS = {"text": ("rayapp", "raw", "bfd", "wrapped"), "chat": ("rayapp", "bfd", "wrapped")}
WARM_UP_STEPS = 10
ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


def ours(path: str, kind: str, tokenizer_url: str, folder: str) -> dict[str, float]:
    """Prepare every unit of a file; return tokens and seconds."""
    import corpus

    from rayapp.data import preparation as prepare
    from rayapp.data import sources
    from rayapp.storage import open_storage

    recipe = corpus.recipe(path, kind, tokenizer_url, SEQ_LEN, 0.0)  # loads the tokenizer
    start = time.process_time()
    units = sources.units(recipe.source, 0.0)
    for index, unit in enumerate(units):
        prepare.UnitTask(index, "train", unit).run(recipe, folder, recipe.fingerprint)
    seconds = time.process_time() - start
    storage = open_storage(folder) / recipe.fingerprint
    made = [
        json.loads(storage.read(f"unit-{i:05d}.json"))["counts"]["train"] for i in range(len(units))
    ]
    # A document of n tokens is n - 1 positions of a row.
    tokens_made = sum(count["tokens"] + count["documents"] for count in made)
    return {"tokens": tokens_made, "seconds": seconds, "read_s": 0.0}


def theirs(
    path: str, kind: str, tokenizer_url: str, folder: str, strategy: str
) -> dict[str, float]:
    """Do the same with `datasets` and TRL; return tokens and seconds."""
    import datasets
    from transformers import AutoTokenizer
    from trl.data_utils import pack_dataset

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_url)

    def texts(batch):
        encoded = tokenizer(
            [text + tokenizer.eos_token for text in batch["text"]],
            add_special_tokens=False,
            return_attention_mask=False,
        )
        return {"input_ids": encoded["input_ids"]}

    def chats(batch):
        encoded = tokenizer.apply_chat_template(
            batch["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        return {"input_ids": encoded["input_ids"], "assistant_masks": encoded["assistant_masks"]}

    start = time.process_time()
    dataset = datasets.load_dataset("json", data_files=path, split="train", cache_dir=folder)
    read = time.process_time()
    dataset = dataset.map(
        texts if kind == "text" else chats, batched=True, remove_columns=dataset.column_names
    )
    packed = pack_dataset(dataset, SEQ_LEN, strategy)
    end = time.process_time()
    tokens = sum(len(ids) for batch in dataset.iter(1000) for ids in batch["input_ids"])
    assert len(packed) > 0
    return {"tokens": tokens, "seconds": end - start, "read_s": read - start}


def raw(path: str, kind: str, tokenizer_url: str, folder: str) -> dict[str, float]:
    """Encode the texts alone; return tokens and seconds."""
    import corpus

    with Path(path).open() as lines:
        texts = [json.loads(line)["text"] for line in lines]
    tokens, seconds = corpus.encode_alone(texts, tokenizer_url)
    return {"tokens": tokens + len(texts), "seconds": seconds, "read_s": 0.0}


SIDES = {
    "rayapp": ours,
    "raw": raw,
    "bfd": partial(theirs, strategy="bfd"),
    "wrapped": partial(theirs, strategy="wrapped"),
}


def arm(name: str, path: str, kind: str, tokenizer: str) -> dict[str, float]:
    """Run one side in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--arm", name, path, kind, tokenizer, folder]
        done = subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, **ONE_THREAD, "HF_HOME": folder, "PYTHONPATH": str(ROOT)},
        )
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(label: str, path: str, kind: str, tokenizer: str, rounds: int) -> None:
    """Run all sides in turn and print medians."""
    rates: dict[str, list[float]] = {name: [] for name in ARMS[kind]}
    ratios: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        found = {name: arm(name, path, kind, tokenizer) for name in ARMS[kind]}
        counts = {int(result["tokens"]) for result in found.values()}
        assert len(counts) == 1, f"the sides do not make the same tokens: {counts}"
        for name, result in found.items():
            rates[name].append(result["tokens"] / result["seconds"])
        for name in ARMS[kind][1:]:
            whole, read = found[name]["seconds"], found[name]["read_s"]
            mine = found["rayapp"]["seconds"]
            ratios.setdefault((name, "file to rows"), []).append(whole / mine)
            if read:
                ratios.setdefault((name, "without load_dataset"), []).append((whole - read) / mine)
    shown = ", ".join(f"{name} {statistics.median(rate):,.0f}" for name, rate in rates.items())
    print(f"{label}: tokens per CPU second, medians of {rounds} rounds: {shown}")
    for (name, what), ratio in ratios.items():
        low, high = min(ratio), max(ratio)
        print(
            f"{label}: rayapp's tokens per CPU second over those of {name}, {what}: "
            f"{statistics.median(ratio):.2f} ({low:.2f}-{high:.2f})",
            flush=True,
        )


def data_wait(storage: str, steps: int) -> None:
    """Run the default job and print which share of its steps it waits for rows."""
    command = [sys.executable, "-m", "rayapp.finetune", "configs/tiny_cpu.yaml"]
    command += [f"--run.storage={storage}", f"--train.max_steps={steps}", "--eval.prompts="]
    quiet = subprocess.DEVNULL
    subprocess.run(command, cwd=ROOT, check=True, stdout=quiet, stderr=quiet)
    text = Path(storage, "tiny", "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    for label, part in (("all", lines), (f"after {WARM_UP_STEPS}", lines[WARM_UP_STEPS:])):
        share = sum(line["data_wait_s"] for line in part) / sum(line["step_s"] for line in part)
        print(f"default job, {label} of {len(lines)} steps: {share:.2%} of the time waits for rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=16, help="size of each corpus")
    parser.add_argument("--steps", type=int, default=60, help="of the default job; 0 leaves it out")
    parser.add_argument("--arm", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        name, *rest = options.arm
        print(json.dumps(SIDES[name](*rest)))
        return
    import corpus
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        pool = corpus.text_pool(rng)
        tokenizer = f"{folder}/tokenizer"
        corpus.save_tokenizer(Path(tokenizer), pool, 16_384)
        for label, kind in (("short documents", "text"), ("chats", "chat")):
            path = Path(folder, f"{kind}.jsonl")
            texts = corpus.documents(rng, pool, 120, 8_000)
            corpus.write(path, texts, options.mib * 2**20, chat=kind == "chat")
            compare(label, str(path), kind, tokenizer, options.rounds)
        if options.steps:
            data_wait(folder, options.steps)


if __name__ == "__main__":
    main()
