"""What is tokenised again when a recipe changes, and what preparing takes; without Ray.

    python bench/tokens.py [--mib 32] [--peaks] [--inputs text rows record small]

A corpus of JSONL is prepared, then again with another seq_len, held-out share, name, and one file
more: CPU seconds, blocks made, and bytes on disk, beside raw `encode_batch_fast` of the same texts.
Then the peak memory of a fresh process for each of some inputs: plain text, a Parquet row group, a
single record, and many small files.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import corpus
import numpy as np

from rayapp.data import preparation as prepare
from rayapp.data import sources
from rayapp.data.recipe import RowRecipe

SEQ_LEN, LOW, HIGH = 2048, 400, 120_000
INPUTS = ("text", "rows", "record", "small")
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


def make(recipe: RowRecipe, out: Path) -> float:
    """Prepare every unit in this process; return CPU seconds."""
    start = time.process_time()
    for index, unit in enumerate(sources.units(recipe.source, recipe.eval_fraction)):
        prepare.UnitTask(index, "train", unit).run(recipe, str(out), recipe.fingerprint)
    return time.process_time() - start


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def changes(folder: Path, num_bytes: int) -> None:
    """Print what each change of a recipe takes."""
    rng = np.random.default_rng(0)
    pool = corpus.text_pool(rng)
    corpus.save_tokenizer(folder / "tokenizer", pool, 32_000)
    data, out = folder / "data", folder / "out"
    data.mkdir()
    for number in range(4):
        texts = corpus.documents(rng, pool, LOW, HIGH)
        corpus.write(data / f"{number}.jsonl", texts, num_bytes // 4)

    def recipe() -> RowRecipe:
        return corpus.recipe(str(data), "text", str(folder / "tokenizer"), SEQ_LEN, 0.02)

    def told(label: str, each: RowRecipe) -> None:
        before = len(list((out / "tokens").rglob("*/*/*")))
        seconds, read = make(each, out), each.source.num_bytes
        made = len(list((out / "tokens").rglob("*/*/*"))) - before
        rows, tokens = (size(out / name) / read for name in (each.fingerprint, "tokens"))
        print(
            f"{label}: {seconds:.2f} CPU s ({seconds / read * 1e9:.0f} a GB), {made} blocks made; "
            f"bytes on disk for each of the input: rows {rows:.2f}, tokens {tokens:.2f}",
            flush=True,
        )

    first = recipe()
    told("first", first)
    told("seq_len 4096", replace(first, seq_len=2 * SEQ_LEN))
    told("eval_fraction 0.01", replace(first, eval_fraction=0.01))
    (data / "0.jsonl").rename(data / "9.jsonl")
    told("a file renamed", recipe())
    corpus.write(data / "5.jsonl", corpus.documents(rng, pool, LOW, HIGH), num_bytes // 16)
    told("a sixteenth added", recipe())
    paths = [data / f"{number}.jsonl" for number in (1, 2, 3, 9)]
    texts = [json.loads(line)["text"] for path in paths for line in path.open()]
    _, seconds = corpus.encode_alone(texts, str(folder / "tokenizer"))
    print(f"raw encode_batch_fast of the first: {seconds:.2f} CPU s")


def write_input(kind: str, folder: Path, num_bytes: int) -> None:
    """Write one of INPUTS, of about this size."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(1)
    pool = corpus.text_pool(rng)
    corpus.save_tokenizer(folder / "tokenizer", pool, 32_000)
    data, text = folder / "data", (pool * (num_bytes // len(pool) + 1))[:num_bytes]
    data.mkdir()
    texts, held = [], 0
    for each in corpus.documents(rng, pool, LOW, HIGH if kind == "rows" else 8_000):
        texts.append(each)
        held += len(each)
        if held >= num_bytes:
            break
    if kind == "text":
        (data / "a.txt").write_text(text)
    elif kind == "rows":
        pq.write_table(pa.table({"text": texts}), data / "a.parquet", row_group_size=len(texts))
    elif kind == "record":
        (data / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    else:
        for number, each in enumerate(texts):
            (data / f"{number:06d}.txt").write_text(each)


def alone(folder: Path) -> None:
    """Prepare an input in this process, and print what that takes."""
    recipe = corpus.recipe(str(folder / "data"), "text", str(folder / "tokenizer"), SEQ_LEN, 0.02)
    before = peak()
    seconds = make(recipe, folder / "out")
    print(f"peak {peak():.0f} MiB ({before:.0f} before it), {seconds:.1f} CPU s", flush=True)


def peak() -> float:
    """Return this program's peak memory in MiB; ru_maxrss would count its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--inputs", nargs="*", choices=INPUTS, default=INPUTS)
    parser.add_argument("--peaks", action="store_true", help="leave out the changes of a recipe")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        alone(Path(options.alone))
        return
    os.environ |= ENVIRONMENT
    if not options.peaks:
        with tempfile.TemporaryDirectory() as folder:
            changes(Path(folder), options.mib * 2**20)
    for kind in options.inputs:
        with tempfile.TemporaryDirectory() as folder:
            write_input(kind, Path(folder), options.mib * 2**20)
            print(f"{kind}, {options.mib} MiB: ", end="", flush=True)
            subprocess.run([sys.executable, __file__, "--alone", folder], check=True)


if __name__ == "__main__":
    main()
