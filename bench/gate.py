"""Whether eval.gate rejects models that were trained on spoiled data, and no model of a clean run.

    python bench/gate.py [--clean=50] [--each=4] [--out=FOLDER]

A small model learns which letter follows a letter in a shuffled alphabet, and is asked for all of
them. Each run has a seed of its own. The same gate judges all of them:
`letters >= 0.9` and `eval_loss <= base - 1`. Prints a row for each kind of run.
"""

from __future__ import annotations

import json
import random
import string
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fire

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / each) for each in ("", "support")]

from reference import made, product  # noqa: E402

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
LETTERS = string.ascii_lowercase
ROWS = 520  # records of a run
LR = 4e-3

Records = list[tuple[str, str]]


def clean(rows: Records, draw: random.Random) -> Records:
    return rows


def shuffled_labels(rows: Records, draw: random.Random) -> Records:
    answers = [answer for _, answer in rows]
    draw.shuffle(answers)
    return [(asked, answer) for (asked, _), answer in zip(rows, answers, strict=True)]


def wrong_template(rows: Records, draw: random.Random) -> Records:
    return [(asked.replace(" ->", ":"), answer) for asked, answer in rows]


def lost_answers(rows: Records, draw: random.Random) -> Records:
    """Keep the marker that begins an answer, and lose the answer."""
    return [(asked, " =") for asked, _ in rows]


def half_the_data(rows: Records, draw: random.Random) -> Records:
    kept = set(draw.sample(LETTERS, 13))
    return [row for row in rows if row[0][0] in kept]


KINDS: dict[str, tuple[Callable[[Records, random.Random], Records], float]] = {
    "clean": (clean, 1.0),
    "labels shuffled": (shuffled_labels, 1.0),
    "lr x 10": (clean, 10.0),
    "wrong template": (wrong_template, 1.0),
    "answers lost": (lost_answers, 1.0),
    "half the data": (half_the_data, 1.0),
}


def written(path: Path, rows: Records) -> str:
    lines = (json.dumps({"prompt": asked, "completion": answer}) for asked, answer in rows)
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def run_of(root: Path, kind: str, seed: int) -> product.Run:
    """Write a run's data, and return the run."""
    spoil, factor = KINDS[kind]
    draw = random.Random(seed)
    after = dict(zip(LETTERS, draw.sample(LETTERS, 26), strict=True))
    asked = [(f"{letter} ->", f" = {answer}") for letter, answer in after.items()]
    rows = spoil(asked * (ROWS // 26), draw)
    name = f"{kind.replace(' ', '-')}-{seed}"
    return product.Run(
        name,
        {
            "model.path": "tiny",
            "model.overrides": SHAPE,
            "model.tokenizer": f"{root}/tokenizer",
            "data.path": written(root / f"{name}.jsonl", rows),
            "data.eval_path": written(root / f"{name}-held.jsonl", asked),
            "data.seq_len": 64,
            "run.seed": seed,
            "train.tokens_per_step": 512,
            "train.micro_batch": 8,
            "train.epochs": "none",
            "train.max_steps": 240,
            "train.lr": LR * factor,
            "train.warmup_steps": 20,
            "train.precision": "fp32",
            "train.on_spike": "none",
            "eval.tasks": {
                "letters": {"path": written(root / f"{name}-task.jsonl", asked), "max_tokens": 6}
            },
            "eval.gate": ["letters >= 0.9", "eval_loss <= base - 1"],
            "checkpoint.export": False,
        },
    )


def main(clean: int = 50, each: int = 4, out: str | None = None) -> None:
    root = Path(out or tempfile.mkdtemp(prefix="gate-"))
    root.mkdir(parents=True, exist_ok=True)
    made.bpe().save_pretrained(root / "tokenizer")
    counts = {kind: clean if kind == "clean" else each for kind in KINDS}
    print("| data | runs | rejected | letters right, least and most |", flush=True)
    print("|---|---|---|---|", flush=True)
    for kind, count in counts.items():
        done = product.run([run_of(root, kind, seed) for seed in range(count)], root)
        found: list[dict[str, Any]] = [one.summary for one in done.values()]
        rejected = sum(one["status"] == "rejected" for one in found)
        right = [one["gate"][0]["value"] for one in found]
        print(
            f"| {kind} | {count} | {rejected} | {min(right):.0%} to {max(right):.0%} |", flush=True
        )


if __name__ == "__main__":
    fire.Fire(main)
