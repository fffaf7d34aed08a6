"""Time from the command to the end of its first step, by where in the data the run resumes.

    python bench/resume.py [--rounds 3] [--mib 200]

A run of 3 epochs over a made-up corpus is started once, which prepares the data, and stopped after
its first steps. From what it has saved, checkpoints are made that say that 5 % or 95 % of the first
epoch, or 5 % of the third, are done: by the training's own code, with the model and optimizer of
those first steps, the state of the step that is claimed, and as many lines of metrics. The command
is then run on each in turn, each time from the same files, and stopped once it has done a step.
"""

import argparse
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import corpus
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml

from rayapp.config import from_dict
from rayapp.data import prepared as prepared_data
from rayapp.finetune.prepared_run import order_of
from rayapp.finetune.trainer import LanguageTrainer
from rayapp.order import Order
from rayapp.storage import open_storage
from rayapp.train.checkpoint import state
from rayapp.train.checkpoint.saver import Checkpointer
from rayapp.train.spec import LanguageSpec

ROOT = Path(__file__).parent.parent
EPOCHS, WORKERS, SEQ_LEN = 3, 2, 256
PLACES = {"at-5": 0.05, "at-95": 0.95, "at-205": 2.05}  # epochs done
TITLES = {"at-5": "5 % of epoch 1", "at-95": "95 % of epoch 1", "at-205": "5 % of epoch 3"}
SETTINGS = {
    "model.tokenizer": "bpe:2048",
    "model.overrides": "{num_hidden_layers: 2, hidden_size: 64, intermediate_size: 128}",
    "data.seq_len": SEQ_LEN,
    "data.eval_fraction": 0,
    "train.tokens_per_step": 16 * SEQ_LEN,
    "train.micro_batch": 8,
    "train.epochs": EPOCHS,
    "train.precision": "fp32",
    "checkpoint.every_s": "none",
    "checkpoint.export": "false",
    "cluster.workers": WORKERS,
}


def first_step(storage: Path, name: str) -> tuple[float, dict[str, float]]:
    """Run the command until it has done a step, then stop it; return the seconds to the end of
    that step, and those of its start by phase."""
    run = storage / name
    values = {"run.storage": storage, "run.name": name, "data.path": storage / "corpus.jsonl"}
    command = [sys.executable, "-m", "rayapp.finetune"]
    command += [f"--{field}={value}" for field, value in {**values, **SETTINGS}.items()]
    before = last_line(run)["step"]
    started = time.time()
    with (storage / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        while (line := last_line(run))["step"] == before:
            assert process.poll() is None, (storage / f"{name}.log").read_text()
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 3, (storage / f"{name}.log").read_text()
    first = next(line for line in lines_of(run) if line["step"] == before + 1)
    assert first["attempt"] == line["attempt"]
    phases = json.loads((run / "result.json").read_text())["start_s"]
    return first["time"] - started, phases


def lines_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def last_line(run: Path) -> dict:
    """Read the end of metrics.jsonl alone: this process shares the cores with what it measures."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return {"step": 0}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        whole = file.read().split(b"\n")[:-1]
    return json.loads(whole[-1]) if whole else {"step": 0}


def spec_of(storage: Path, name: str) -> LanguageSpec:
    """Return what the workers of a run are told."""
    run = storage / name
    config = from_dict(yaml.safe_load((run / "config.yaml").read_text()))
    fingerprint = json.loads((run / "plan.json").read_text())["fingerprint"]
    root = open_storage(str(storage)) / ".prepared"
    prepared = prepared_data.load(root / fingerprint)
    assert prepared is not None
    (tokenizer,) = (storage / ".prepared").glob("tokenizer-*")
    return LanguageSpec(
        "rayapp.finetune", config, prepared, order_of(config, prepared), str(run), str(tokenizer)
    )


def step_at(order: Order, epochs: float) -> int:
    return round(epochs * order.num_rows / order.rows_per_step)


def make_runs(rank: int, init: str, storage: Path) -> None:
    """On each rank: load what the first run has saved, and save it as every place's own."""
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=WORKERS)
    torch.set_num_threads(1)
    spec = spec_of(storage, "first")
    trainer = LanguageTrainer(spec, torch.device("cpu"))
    state.restore(spec, trainer, open_storage(spec.run_url))
    for name, epochs in PLACES.items():
        step = step_at(spec.order, epochs)
        run = storage / "places" / name
        saver = Checkpointer(open_storage(str(run)), keep=1, asynchronous=False)
        values = state.state_values(spec, trainer, step, {})
        saver.save(step, state.state_tensors(trainer), values)
        saver.close()
        if rank == 0:
            line = lines_of(storage / "first")[-1]
            lines = (json.dumps(line | {"step": number + 1}) for number in range(step))
            (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
            config = yaml.safe_load((storage / "first" / "config.yaml").read_text())
            config["run"]["name"] = name
            (run / "config.yaml").write_text(yaml.safe_dump(config))
    del trainer, saver
    gc.collect()  # a gloo thread that frees tensors while Python shuts down aborts the process
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=200)
    options = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory() as folder:
        storage = Path(folder)
        rng = np.random.default_rng(0)
        texts = corpus.documents(rng, corpus.text_pool(rng), 400, 20_000)
        corpus.write(storage / "corpus.jsonl", texts, options.mib * 2**20)
        seconds, phases = first_step(storage, "first")
        order = spec_of(storage, "first").order
        print(
            f"{options.mib} MiB, {order.num_rows:,} rows of {SEQ_LEN} tokens, {order.num_steps:,} "
            f"steps in {EPOCHS} epochs; first start {seconds:.1f} s, of which data "
            f"{phases['data']:.1f} s",
            flush=True,
        )
        mp.spawn(make_runs, (f"file://{storage}/rendezvous", storage), nprocs=WORKERS)
        found: dict[str, list[float]] = {name: [] for name in PLACES}
        starts: dict[str, list[dict[str, float]]] = {name: [] for name in PLACES}
        for number in range(options.rounds):
            # The order turns, so that no place is always the first after another's end.
            names = list(PLACES)[number % len(PLACES) :] + list(PLACES)[: number % len(PLACES)]
            for name in names:
                shutil.rmtree(storage / name, ignore_errors=True)
                shutil.copytree(storage / "places" / name, storage / name)
                seconds, phases = first_step(storage, name)
                found[name].append(seconds)
                starts[name].append(phases)
                print(f"round {number + 1}, {TITLES[name]}: {seconds:.1f} s", flush=True)
    for name, seconds_of in found.items():
        medians = {p: statistics.median(s[p] for s in starts[name]) for p in starts[name][0]}
        parts = ", ".join(f"{phase} {value:.1f}" for phase, value in medians.items())
        print(
            f"{TITLES[name]} (step {step_at(order, PLACES[name])}): median "
            f"{statistics.median(seconds_of):.1f} s ({parts})"
        )
    for name in ("at-95", "at-205"):
        ratios = [a / b for a, b in zip(found[name], found["at-5"], strict=True)]
        print(
            f"{TITLES[name]} over {TITLES['at-5']}: {statistics.median(ratios):.3f}, median of "
            f"{options.rounds} rounds ({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
