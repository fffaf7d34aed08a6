"""What observation costs a step: gauges, Prometheus and all trackers, on and off in one run.

    python bench/observe.py [--steps 400] [--block 10]

Two ranks train with rayapp's own code, each connected to a Ray that a Prometheus scrapes. Blocks of
steps with it all alternate with blocks without: without, ranks tell Ray nothing, and Prometheus and
the process that follows the run for TensorBoard, MLflow (files) and W&B (offline) are stopped, to
catch up in the next block. Each block is compared with its neighbour, so that a machine whose speed
drifts does not matter. All share the machine's cores here; on a cluster only the ranks' part does.
"""

import argparse
import gc
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from loop_alone import job_of

from rayapp.data.rows import local_steps
from rayapp.driver.fit import CPU_ENVIRONMENT
from rayapp.driver.observe import Observer
from rayapp.finetune import training
from rayapp.gauges import Steps
from rayapp.metrics import StepRecord
from rayapp.storage import open_storage

ROOT = Path(__file__).parent.parent
WARM_UP_BLOCKS = 2
NAME = "observed"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def observed(step: int, block: int) -> bool:
    return step // block % 2 == 1


def train(run: Path, steps: int, block: int) -> None:
    """Train as one rank; tell of the steps of every other block."""
    import ray

    ray.init(address=os.environ["OBSERVED_RAY"], log_to_driver=False)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    job = job_of(run, steps, NAME)
    rows, order, gauges = job.prepared.rows("train"), job.order, Steps(NAME, rank)

    def tell(record: StepRecord) -> None:
        if observed(record.step, block):
            gauges.step(record)

    training.run(
        job,
        torch.device("cpu"),
        lambda first: local_steps(rows, order, rank, world, first),
        tell=tell,
    )
    gc.collect()  # a gloo thread that frees tensors while Python shuts down aborts the process
    dist.destroy_process_group()


def follow(run: Path, steps: int) -> None:
    """Do what the driver does beside a run."""
    import ray

    ray.init(address=os.environ["OBSERVED_RAY"], log_to_driver=False)
    job = job_of(run, steps, NAME)
    trackers = ("tensorboard", "mlflow", "wandb")
    told = job.config.run.model_copy(update={"name": NAME, "trackers": trackers})
    job = job.__class__(**vars(job) | {"config": job.config.model_copy(update={"run": told})})
    with Observer(job, open_storage(job.run_url)) as observer:
        sys.stdin.readline()
        observer.ended({"status": "done"})


def measure(storage: Path, steps: int, block: int) -> list[float]:
    """Return observed over unobserved seconds of a step, for each pair of neighbouring blocks."""
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
    run, temporary = storage / "prepared", tempfile.mkdtemp()
    quiet = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-m", "rayapp.finetune", "configs/tiny_cpu.yaml"]
    command += [f"--run.storage={storage}", "--run.name=prepared", "--train.max_steps=1"]
    subprocess.run([*command, "--eval.prompts="], cwd=ROOT, check=True, **quiet)
    config = (ROOT / "cluster/prometheus/prometheus.yml").read_text()
    (storage / "prometheus.yml").write_text(config.replace("/tmp/ray", temporary))
    shutil.copy(ROOT / "cluster/prometheus/rules.yml", storage)
    options = {"port": environment["OBSERVED_RAY"].split(":")[1], "temp-dir": temporary}
    names = ("dashboard-port", "dashboard-agent-listen-port", "metrics-export-port")
    options |= {name: str(free_port()) for name in (*names, "ray-client-server-port")}
    options |= {"num-cpus": "2", "object-store-memory": "200000000"}
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"]
    ray += ["--disable-usage-stats", *(f"--{name}={value}" for name, value in options.items())]
    prometheus = ["prometheus", f"--config.file={storage}/prometheus.yml"]
    prometheus += [f"--storage.tsdb.path={storage}/tsdb"]
    prometheus += [f"--web.listen-address=127.0.0.1:{free_port()}"]
    ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    mine = [
        str(ROOT / "bench/observe.py"),
        f"--folder={run}",
        f"--steps={steps}",
        f"--block={block}",
    ]
    started = [subprocess.Popen(ray, **quiet)]
    try:
        while not Path(temporary, "prom_metrics_service_discovery.json").exists():
            assert started[0].poll() is None, "Ray has not started"
            time.sleep(0.5)
        log = storage / "training.log"
        with log.open("wb") as output:
            logged = quiet | {"stdout": output, "stderr": output}
            training = subprocess.Popen([*ranks, *mine], **logged)
        follower = subprocess.Popen(
            [sys.executable, *mine, "--follow"], stdin=subprocess.PIPE, **quiet
        )
        paused = [subprocess.Popen(prometheus, **quiet), follower]
        started += [training, *paused]
        metrics, on = storage / NAME / "metrics.jsonl", True
        while training.poll() is None:
            step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if on != observed(step + 1, block):
                on = not on
                for process in paused:
                    process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
            time.sleep(0.02)
        assert training.returncode == 0, log.read_text()[-3000:]
        for process in paused:
            assert process.poll() is None, f"{process.args} has ended"
            process.send_signal(signal.SIGCONT)
        follower.communicate(b"\n", timeout=120)
    finally:
        for process in started:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in started:
            process.wait(timeout=60)
        shutil.rmtree(temporary, ignore_errors=True)
    check_told(storage, steps)
    lines = [json.loads(line) for line in metrics.read_bytes().splitlines()]
    blocks: dict[int, list[float]] = {}
    for line in lines:
        blocks.setdefault(line["step"] // block, []).append(
            line["step_s"] - line["checkpoint_stall_s"] - line["eval_s"]
        )
    means = [statistics.mean(blocks[i]) for i in sorted(blocks) if len(blocks[i]) == block]
    pairs = list(enumerate(pairwise(means)))[WARM_UP_BLOCKS:]
    first = min(i for i in blocks if len(blocks[i]) == block)
    return [
        after / before if (first + i + 1) % 2 == 1 else before / after
        for i, (before, after) in pairs
    ]


def check_told(storage: Path, steps: int) -> None:
    """Fail if what was to be measured has not taken place."""
    size = sum(path.stat().st_size for path in (storage / NAME / "tensorboard").iterdir())
    assert size > 500 * steps, "TensorBoard was not told all"
    told = list(storage.glob("mlruns/*/*/metrics/loss/loss"))
    assert len(told) == 1 and len(told[0].read_text().splitlines()) == steps
    assert list(storage.glob(f"{NAME}/wandb/offline-run-*/*.wandb")), "W&B was not told"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.follow:
        follow(options.folder, options.steps)
    elif options.folder:
        train(options.folder, options.steps, options.block)
    else:
        with tempfile.TemporaryDirectory() as storage:
            ratios = measure(Path(storage), options.steps, options.block)
        quarters = statistics.quantiles(ratios, n=4)
        print(
            f"steps observed over not observed: median {statistics.median(ratios):.4f} of "
            f"{len(ratios)} pairs of {options.block} steps (quartiles {quarters[0]:.3f}, "
            f"{quarters[2]:.3f})"
        )


if __name__ == "__main__":
    main()
