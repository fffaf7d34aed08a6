"""The chunked loss beside all logits and torch's cross_entropy: memory and time, both directions.

    python bench/loss.py                                     # 128,256 words, 8,192 tokens, CPU
    python bench/loss.py --hidden 4096 --precision bf16 --chunks 512,1024
    python bench/loss.py --hidden 576 --vocabulary 49152 --tokens 2048 --chunks 4096 --masked 0.7

Each measurement is a process of its own: the rise of its peak resident memory (VmHWM) from when
inputs are there to after the backward pass, with the gradients of hidden states and weight, which
any loss must give; and the time of the third pass. Rounds take turns. The first `--masked` of the
tokens bear no loss: ours computes the others alone, as a run does.
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

VOCABULARY, TOKENS = 128_256, 8_192  # Llama 3's words


def measure(options: argparse.Namespace, chunk: int | None) -> dict[str, float]:
    """Run the loss in this process; chunk None: all logits by torch."""
    import torch
    from torch.nn.functional import cross_entropy, linear

    from rayapp.train.loss import chunked_cross_entropy
    from rayapp.train.memory_peaks import Peaks

    torch.manual_seed(0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.precision]
    tokens, words = options.tokens, options.vocabulary
    states = torch.randn(tokens, options.hidden, dtype=dtype).requires_grad_()
    weight = torch.empty(words, options.hidden, dtype=dtype).normal_(std=0.02).requires_grad_()
    labels, first = torch.randint(words, (tokens,)), int(options.masked * tokens)
    labels[:first] = -100
    small = slice(64)  # the libraries' own memory is there before the measurement
    linear(states[small], weight[small]).sum().backward()

    def run() -> Any:
        if chunk is None:  # in fp32, as trainers do
            return cross_entropy(linear(states, weight).float(), labels)
        some, theirs = states[first:], labels[first:]
        how = {"chunk": chunk, "compiled": options.compiled}
        return chunked_cross_entropy(some, weight, theirs, **how)[0] / (tokens - first)

    peaks = Peaks(torch.device("cpu"))  # the peak becomes what is resident now
    states.grad = weight.grad = None
    before_gib = resident_gib()
    with peaks.phase("backward"):
        loss = run()
        loss.backward()
    for _ in range(2):
        began = time.perf_counter()
        run().backward()
    seconds = time.perf_counter() - began
    risen_gib = peaks.take()["backward"] - before_gib
    grads_gib = (states.nbytes + weight.nbytes) / 2**30
    return {"seconds": seconds, "gib": risen_gib, "grads_gib": grads_gib, "loss": loss.item()}


def resident_gib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def apart(options: argparse.Namespace, chunk: int | None) -> dict[str, float]:
    """Measure in a new process."""
    call = [sys.executable, __file__, "--one", json.dumps(chunk)]
    for name in ("hidden", "precision", "tokens", "vocabulary", "masked"):
        call += [f"--{name}", str(getattr(options, name))]
    call += ["--compiled"] if options.compiled else []
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--chunks", default="512,1024", help="tokens, by commas")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--masked", type=float, default=0.0, help="share of the tokens, 0-1")
    parser.add_argument("--compiled", action="store_true", help="ours, as with train.compile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options, json.loads(options.one))))
        return
    kinds = [None, *map(int, options.chunks.split(","))]
    found: dict[int | None, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in kinds:
            found[kind].append(apart(options, kind))
            print(f"  {kind}: {found[kind][-1]}", file=sys.stderr, flush=True)
    plain = found.pop(None)
    print(
        f"{options.tokens:,} tokens, {options.vocabulary:,} words, hidden {options.hidden}, "
        f"{options.precision}: all logits {plain[0]['gib']:.2f} GiB, "
        f"{statistics.median(one['seconds'] for one in plain):.2f} s"
    )
    for chunk, ours in found.items():
        seconds = [a["seconds"] / b["seconds"] for a, b in zip(ours, plain, strict=True)]
        memory = statistics.median(b["gib"] / a["gib"] for a, b in zip(ours, plain, strict=True))
        beyond = statistics.median(
            (b["gib"] - b["grads_gib"]) / (a["gib"] - a["grads_gib"])
            for a, b in zip(ours, plain, strict=True)
        )
        apart_by = abs(ours[0]["loss"] / plain[0]["loss"] - 1)
        print(
            f"chunks of {chunk}: memory 1/{memory:.1f} (beyond the gradients it returns "
            f"1/{beyond:.1f}), time x {statistics.median(seconds):.2f} "
            f"({min(seconds):.2f}-{max(seconds):.2f}), loss off by {apart_by:.0e}"
        )


if __name__ == "__main__":
    main()
