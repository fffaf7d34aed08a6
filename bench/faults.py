"""The default job under faults: seconds to the first new step, steps lost, and where time went.

    python bench/faults.py [--steps 120] [--faults "worker killed;driver killed"]

Each fault is done to a run of its own, a third of the way through it, 5 steps past a checkpoint.
Seconds are from the fault to the end of the first step after it; in brackets are those of the last
attempt: Ray's start of a group of workers, then ours, model, restore and first step. A driver that
dies, or a run that is stopped, is started again at once by the same command. The last lines
simulate an hour of the default job, step by step, with the figures just measured: with faults as
often as given there.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from nodes import Node, cluster  # noqa: E402

EVERY = 20  # steps between checkpoints
PER_HOUR = {  # of a busy spot cluster, for the simulation
    "worker killed": 2.0,
    "worker hung": 0.5,
    "driver killed": 0.5,
    "node taken away": 4.0,
    "node lost": 1.0,
}


class Run:
    """One command, and what it leaves."""

    def __init__(self, folder: Path, name: str, steps: int, **settings: object) -> None:
        self.path = folder / name
        self.log = folder / f"{name}.log"
        values = {
            "run.storage": folder,
            "run.name": name,
            "train.max_steps": steps,
            "checkpoint.every_steps": EVERY,
            "checkpoint.every_s": "none",
            "eval.prompts": "",
            **settings,
        }
        self.command = [sys.executable, "-m", "rayapp.finetune", "configs/tiny_cpu.yaml"]
        self.command += [f"--{field}={value}" for field, value in values.items()]
        self.temporary = tempfile.mkdtemp()
        self.start()

    def start(self) -> None:
        """Run the command, for the first time or again."""
        variables = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": self.temporary}
        variables.pop("RAY_ADDRESS", None)
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=variables, stdout=log, stderr=log
            )

    def lines(self) -> list[dict]:
        path = self.path / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def wait_for(self, wanted: Callable[[dict], bool]) -> dict:
        """Return the first line that is wanted, once there is one."""
        while True:
            assert self.process.poll() in (None, 0), self.log.read_text()
            for line in self.lines():
                if wanted(line):
                    return line
            time.sleep(0.05)

    def worker(self, root: int) -> int:
        """Return the PID of the last training worker below a process."""
        below = psutil.Process(root).children(recursive=True)
        return max(process.pid for process in below if "TrainWorker" in " ".join(process.cmdline()))

    def end(self) -> dict:
        assert self.process.wait() == 0, self.log.read_text()
        return json.loads((self.path / "result.json").read_text())


def suffer(folder: Path, fault: str, steps: int) -> dict:
    """Run the job with one fault; return what it cost."""
    name = fault.replace(" ", "-")
    if not fault.startswith("node"):
        run = Run(folder, name, steps, **{"cluster.collective_timeout_s": 15})
        return observe(run, steps, fault, None)
    with cluster(folder) as nodes:
        nodes.append(Node(folder / f"{name}-node.log", cpus=1, seats=1, head=nodes[0]))
        more = {"cluster.workers": "1:2", "cluster.resources": "{seat: 1}"}
        run = Run(folder, name, steps, **more, **{"cluster.address": nodes[0].address})
        return observe(run, steps, fault, nodes[1])


def commit(fault: str, run: Run, node: Node | None) -> None:
    """Do what the fault is called."""
    pid = run.process.pid
    if fault == "worker killed":
        os.kill(run.worker(pid), signal.SIGKILL)
    elif fault == "worker hung":
        os.kill(run.worker(pid), signal.SIGSTOP)
    elif fault in ("driver killed", "stopped"):
        run.process.send_signal(signal.SIGKILL if fault == "driver killed" else signal.SIGINT)
        run.process.wait()
        run.start()
    elif fault == "node taken away":
        node.preempt()
    elif fault == "node lost":
        node.lose()


def observe(run: Run, steps: int, fault: str, node: Node | None) -> dict:
    """Let a run come to its place, do the fault, and return what followed."""
    place = EVERY * max(1, steps // 3 // EVERY) + 5
    attempt = run.wait_for(lambda line: line["step"] >= place)["attempt"]
    started = time.time()
    reached = max(line["step"] for line in run.lines())
    commit(fault, run, node)
    first = None
    while first is None and fault != "none":
        lines = run.lines()
        done = [line["step"] for line in lines if line["attempt"] == attempt]
        reached = max([reached, *done])
        first = next((line for line in lines if line["attempt"] > attempt), None)
        time.sleep(0.05)
    result = run.end()
    return {
        "seconds": first["time"] - started if first else 0.0,
        "lost": reached - first["step"] + 1 if first else 0,
        "goodput": result["goodput"],
        "wall_s": result["wall_s"],
        "step_s": statistics.median(line["step_s"] for line in run.lines()),
        "stall_s": result["checkpoint"]["stall_s"],
        "start_s": result["start_s"],
    }


def simulate(found: dict[str, dict], every_s: float, seed: int = 0) -> dict[str, float]:
    """Return where the seconds of an hour go, when faults come as PER_HOUR has it."""
    draw = random.Random(seed)
    step_s = statistics.median(each["step_s"] for each in found.values())
    stall_s = statistics.median(each["stall_s"] for each in found.values())
    faults = sorted(
        (draw.uniform(0.0, 3600.0), fault)
        for fault, rate in PER_HOUR.items()
        if fault in found
        for _ in range(int(rate) + (draw.random() < rate % 1))
    )
    spent = {"step": 0.0, "checkpoint_stall": 0.0, "lost_work": 0.0, "recovery": 0.0}
    now, since_save, unsaved = 0.0, 0.0, 0.0
    while now < 3600.0:
        if faults and now >= faults[0][0]:
            fault = faults.pop(0)[1]
            if found[fault]["lost"]:  # not a notice, which saves first
                spent["lost_work"] += unsaved
                spent["step"] -= unsaved
            spent["recovery"] += found[fault]["seconds"]
            now += found[fault]["seconds"]
            since_save = unsaved = 0.0
        spent["step"] += step_s
        unsaved += step_s
        since_save += step_s
        now += step_s
        if since_save >= every_s:
            spent["checkpoint_stall"] += stall_s
            now += stall_s
            since_save = unsaved = 0.0
    return {cause: seconds / now for cause, seconds in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--faults", default=";".join(["none", "stopped", *PER_HOUR]), help="separated by semicolons"
    )
    options = parser.parse_args()
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for fault in options.faults.split(";"):
            found[fault] = cost = suffer(Path(folder), fault, options.steps)
            shares = ", ".join(
                f"{cause} {share:.0%}" for cause, share in cost["goodput"].items() if share >= 0.005
            )
            names = ("workers", "model", "restore", "first_step")
            parts = ", ".join(f"{name} {cost['start_s'][name]:.1f}" for name in names)
            print(
                f"{fault}: {cost['seconds']:.1f} s to the first new step ({parts}), {cost['lost']} "
                f"steps lost; {cost['wall_s']:.0f} s in all ({shares})",
                flush=True,
            )
    for every_s in (30.0, 60.0, 300.0):
        shares = ", ".join(f"{c} {v:.1%}" for c, v in simulate(found, every_s).items())
        print(f"an hour with a checkpoint every {every_s:.0f} s: {shares}")


if __name__ == "__main__":
    main()
