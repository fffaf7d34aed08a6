"""What observation costs a step: gauges, Prometheus and all trackers, on and off in one run.

    python bench/observe.py [--steps 1200] [--block 60]

Two ranks train with rayapp's own code, each connected to a Ray that a Prometheus scrapes. Blocks of
steps with it all alternate with blocks without: without, ranks tell Ray nothing, Prometheus is
stopped, and the follower, which tells TensorBoard, MLflow (files) and W&B (offline) as a driver
does, neither looks at the run nor ever hears of those steps, so that the next block does not pay
for them. It stays connected to Ray, as a driver that observes nothing is. What fell due in a block
without (a scrape, a message to a tracker) is done as soon as the next begins, which would charge
what is due every 10 s to 5 s of steps: a sixth of each block passes before it is compared. Each is
compared with its neighbour, so that a machine whose speed drifts does not matter. All share the
machine's cores here; on a cluster only the ranks' part does. Who takes how much CPU is printed too.
"""

import argparse
import contextlib
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from loop_alone import spec_of
from ports import free_port

from rayapp.data.token_rows import local_steps
from rayapp.driver.observe import Observer
from rayapp.driver.ray_workers import CPU_ENVIRONMENT
from rayapp.observe import trackers
from rayapp.observe.gauges import Steps
from rayapp.observe.metrics import MetricsLine
from rayapp.storage import Storage, open_storage
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import LanguageSpec

ROOT = Path(__file__).parent.parent
WARM_UP_BLOCKS = 1
NAME, TOLD = "observed", "told"  # all steps; those of blocks with observation
RAY, PROMETHEUS, FOLLOWER = "Ray's own processes", "Prometheus", "the follower"
SIGNALS = {  # at a block without observation, and at one with it
    PROMETHEUS: (signal.SIGSTOP, signal.SIGCONT),
    FOLLOWER: (signal.SIGUSR1, signal.SIGUSR2),
}


def observed(step: int, block: int) -> bool:
    return step // block % 2 == 1


def settled(step: int, block: int) -> bool:
    return step % block >= block // 6


def train(run: Path, steps: int, block: int) -> None:
    """Train as one rank; tell of the steps of every other block."""
    import ray

    ray.init(address=os.environ["OBSERVED_RAY"], log_to_driver=False)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    spec = spec_of(run, steps, NAME)
    rows, order, gauges = spec.data.rows("train"), spec.order, Steps(NAME, rank)

    def tell(line: MetricsLine) -> None:
        if observed(line["step"], block):
            gauges.step(line)

    context = RankContext(
        torch.device("cpu"),
        lambda first: local_steps(rows, order, rank, world, first),
        on_record=tell,
    )
    train_rank(spec, context)
    gc.collect()  # a gloo thread that frees tensors while Python shuts down aborts the process
    dist.destroy_process_group()


class Paused(Observer):
    """Looks at the run only while it may."""

    def __init__(self, spec: LanguageSpec, run: Storage, may: threading.Event) -> None:
        super().__init__(spec, run)
        self._may = may

    def _look(self, last: bool) -> None:
        self._may.wait()
        super()._look(last)


class PausedTracker:
    """Writes only while it may, so that what waits to be told is not paid for by the next block."""

    def __init__(self, may: threading.Event, tracker: trackers.Tracker) -> None:
        self._may, self._tracker = may, tracker
        self.cut_back, self.close = tracker.cut_back, tracker.close

    def write(self, lines: Sequence[MetricsLine]) -> None:
        self._may.wait()
        self._tracker.write(lines)


def follow(run: Path, steps: int) -> None:
    """Do what the driver does beside a run."""
    import ray

    ray.init(address=os.environ["OBSERVED_RAY"], log_to_driver=False)
    spec = spec_of(run, steps, TOLD)
    told = spec.config.run.model_copy(update={"name": TOLD, "trackers": tuple(trackers.OPEN)})
    spec = replace(spec, config=spec.config.model_copy(update={"run": told}))
    may = threading.Event()
    may.set()
    pause, go_on = SIGNALS[FOLLOWER]
    signal.signal(pause, lambda *_: may.clear())
    signal.signal(go_on, lambda *_: may.set())
    for name, opened in trackers.OPEN.items():
        trackers.OPEN[name] = lambda *args, opened=opened: PausedTracker(may, opened(*args))
    with Paused(spec, open_storage(spec.run_url), may) as observer:
        sys.stdin.readline()
        observer.ended({"status": "done"})


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Return the CPU seconds of a process and of what it has started, as far as it still runs."""
    root, total = psutil.Process(process.pid), 0.0
    for each in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended while being looked at
            times = each.cpu_times()
            total += times.user + times.system
    return total


class Switch:
    """Tells who observes when blocks change, and hands on the observed steps."""

    def __init__(self, storage: Path, block: int, observers: dict[str, Any]) -> None:
        self._from, self._to = storage / NAME / "metrics.jsonl", storage / TOLD / "metrics.jsonl"
        self._block, self._observers, self._read = block, observers, 0
        self._cpu_s = {name: cpu_s(process) for name, process in observers.items()}
        self._phase = (True, False)  # whether steps are observed, and settled
        self._steps: Counter[tuple[bool, bool]] = Counter()
        self._used_s: dict[tuple[bool, bool], Counter[str]] = defaultdict(Counter)

    def look(self) -> None:
        """Hand on the lines of observed steps; say what the next step wants."""
        if not self._from.exists():
            return
        with self._from.open("rb") as file:
            file.seek(self._read)
            written = file.read()  # once: the rest of a line that is being written comes later
        whole = written[: written.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines(keepends=True):
            step = json.loads(line)["step"]
            self._steps[observed(step, self._block), settled(step, self._block)] += 1
            if observed(step, self._block):
                with self._to.open("ab") as told:
                    told.write(line)
            self._set(observed(step + 1, self._block), settled(step + 1, self._block))

    def _set(self, *phase: bool) -> None:
        if phase == self._phase:
            return
        self._count()
        if phase[0] != self._phase[0]:
            for name, process in self._observers.items():
                if name in SIGNALS:
                    process.send_signal(SIGNALS[name][phase[0]])
        self._phase = phase

    def _count(self) -> None:
        for name, process in self._observers.items():
            assert process.poll() is None, f"{process.args} has ended"
            before, self._cpu_s[name] = self._cpu_s[name], cpu_s(process)
            self._used_s[self._phase][name] += self._cpu_s[name] - before

    def told(self) -> int:
        """Return the number of observed steps."""
        return self._steps[True, True] + self._steps[True, False]

    def end(self) -> dict[str, tuple[float, float]]:
        """Let them go on; return their CPU milliseconds for an observed step and for another."""
        self._set(True, False)
        return {
            name: tuple(
                1000 * self._used_s[on, True][name] / self._steps[on, True] for on in (True, False)
            )
            for name in self._observers
        }


def measure(
    storage: Path, steps: int, block: int
) -> tuple[list[float], dict[str, tuple[float, float]]]:
    """Return what a step takes observed over not observed, and `Switch.end` of who observes.

    The first is one ratio for each pair of neighbouring blocks.
    """
    environment = {
        **os.environ,
        **CPU_ENVIRONMENT,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "MLFLOW_TRACKING_URI": f"file://{storage}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_MODE": "offline",
        "OBSERVED_RAY": f"127.0.0.1:{free_port()}",
    }
    quiet = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-m", "rayapp.finetune", "configs/tiny_cpu.yaml"]
    command += [f"--run.storage={storage}", "--run.name=prepared", "--train.max_steps=1"]
    subprocess.run([*command, "--eval.prompts="], cwd=ROOT, check=True, **quiet)
    temporary = Path(tempfile.mkdtemp())
    started = [subprocess.Popen(ray_head(environment["OBSERVED_RAY"], temporary), **quiet)]
    try:
        wait_for(started[0], lambda: (temporary / "prom_metrics_service_discovery.json").exists())
        mine = [str(ROOT / "bench/observe.py"), f"--folder={storage}/prepared"]
        mine += [f"--steps={steps}", f"--block={block}"]
        following = [sys.executable, *mine, "--follow"]
        observers = {
            PROMETHEUS: subprocess.Popen(prometheus(storage, temporary), **quiet),
            FOLLOWER: subprocess.Popen(following, stdin=subprocess.PIPE, **quiet),
        }
        started += observers.values()
        observers[RAY] = started[0]
        last_to_open = f"{TOLD}/wandb/offline-run-*/*.wandb"
        wait_for(observers[FOLLOWER], lambda: any(storage.glob(last_to_open)))
        log = storage / "training.log"
        ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        with log.open("wb") as output:
            logged = quiet | {"stdout": output, "stderr": output}
            training = subprocess.Popen([*ranks, "--standalone", *mine], **logged)
        started.append(training)
        switch = Switch(storage, block, observers)
        while training.poll() is None:
            switch.look()
            time.sleep(0.02)
        assert training.returncode == 0, log.read_text()[-3000:]
        switch.look()
        cpu_ms = switch.end()
        observers[FOLLOWER].communicate(b"\n", timeout=120)
    finally:
        for process in started:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in started:
            process.wait(timeout=60)
        shutil.rmtree(temporary, ignore_errors=True)
    check_told(storage, switch.told())
    return ratios_of(storage / NAME / "metrics.jsonl", block), cpu_ms


def ray_head(address: str, temporary: Path) -> list[str]:
    """Return the command of a Ray of two CPUs that exports its metrics."""
    options = {"port": address.split(":")[1], "temp-dir": str(temporary)}
    names = ("dashboard-port", "dashboard-agent-listen-port", "metrics-export-port")
    options |= {name: str(free_port()) for name in (*names, "ray-client-server-port")}
    options |= {"num-cpus": "2", "object-store-memory": "200000000"}
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"]
    return [*ray, "--disable-usage-stats", *(f"--{name}={v}" for name, v in options.items())]


def prometheus(storage: Path, temporary: Path) -> list[str]:
    """Write what it reads, and return its command."""
    config = (ROOT / "cluster/prometheus/prometheus.yml").read_text()
    (storage / "prometheus.yml").write_text(config.replace("/tmp/ray", str(temporary)))
    shutil.copy(ROOT / "cluster/prometheus/rules.yml", storage)
    command = ["prometheus", f"--config.file={storage}/prometheus.yml"]
    command += [f"--storage.tsdb.path={storage}/tsdb"]
    return [*command, f"--web.listen-address=127.0.0.1:{free_port()}"]


def wait_for(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
    while not ready():
        assert process.poll() is None, f"{process.args} has ended"
        time.sleep(0.5)


def ratios_of(metrics: Path, block: int) -> list[float]:
    """Compare each whole block of steps with its neighbour: observed over not observed."""
    blocks: dict[int, list[float]] = {}
    for line in map(json.loads, metrics.read_bytes().splitlines()):
        if settled(line["step"], block):
            seconds = line["step_s"] - line["checkpoint_stall_s"] - line["eval_s"]
            blocks.setdefault(line["step"] // block, []).append(seconds)
    whole = max(map(len, blocks.values()))
    means = {i: statistics.mean(each) for i, each in blocks.items() if len(each) == whole}
    pairs = list(pairwise(sorted(means)))[WARM_UP_BLOCKS:]
    return [
        means[after] / means[before] if after % 2 == 1 else means[before] / means[after]
        for before, after in pairs
    ]


def check_told(storage: Path, steps: int) -> None:
    """Fail if what was to be measured has not taken place."""
    events = b"".join(path.read_bytes() for path in (storage / TOLD / "tensorboard").iterdir())
    assert events.count(b"speed/step_s") == steps, "TensorBoard was not told all"
    told = list(storage.glob("mlruns/*/*/metrics/loss/loss"))
    assert [len(path.read_text().splitlines()) for path in told] == [steps]
    assert list(storage.glob(f"{TOLD}/wandb/offline-run-*/*.wandb")), "W&B was not told"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--block", type=int, default=60)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.follow:
        follow(options.folder, options.steps)
    elif options.folder:
        train(options.folder, options.steps, options.block)
    else:
        with tempfile.TemporaryDirectory() as storage:
            ratios, cpu_ms = measure(Path(storage), options.steps, options.block)
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"steps observed over not observed: median {middle:.4f} of {len(ratios)} pairs of "
            f"{options.block} steps (quartiles {low:.3f}, {high:.3f})"
        )
        for name, (on_ms, off_ms) in cpu_ms.items():
            print(f"{name}: CPU ms {on_ms:.1f} in an observed step, {off_ms:.1f} in another")


if __name__ == "__main__":
    main()
