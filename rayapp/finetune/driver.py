"""Run a config from the driver's side: check, start Ray, prepare the data, train, report.

    result = finetune(load("configs/tiny_cpu.yaml"))
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress

from rayapp import metrics, model
from rayapp.config import Config, ConfigError
from rayapp.data import prepare, tokens
from rayapp.finetune import checks, display
from rayapp.finetune.training import STOP_FILE, Job, model_shape
from rayapp.order import Order
from rayapp.storage import Storage, open_storage

PREPARED = ".prepared"
TOKENIZER_SAMPLE_BYTES = 16 * 2**20
POLL_S = 0.5
DATA_CPUS = 2  # logical CPUs beside the workers' own, so that Ray Data is never starved
OBJECT_STORE_BYTES = 512 * 2**20  # of a Ray started here on CPUs

# Ray reads these when it is imported. The controller would otherwise look at its workers every 2 s.
ENVIRONMENT = {
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_DATA_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::DeprecationWarning",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
}

logger = logging.getLogger("rayapp.finetune")


class RunFailed(RuntimeError):
    """Training ended without a result; the message says why."""


def finetune(
    config: Config, console: Console | None = None, started: float | None = None
) -> dict[str, Any]:
    """Run a config to its end, or to a stop, and return what result.json holds.

    `started` is when the command began, in Unix seconds, if that was before this call.

    Raises:
        ConfigError: it cannot run as described; nothing has been started.
        RunFailed: it failed on the way; running the same again resumes.
    """
    entered = time.time()
    started = started or entered
    console = console or Console()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    address = _address(config)
    local = address == "local"
    ready = checks.check(config, (os.cpu_count() or 1) if local else None, _gpus_here() if local else 0)
    phases = {"import": entered - started, "check": time.time() - entered}
    config = ready.config
    with _ray(config, address):
        phases["ray"] = time.time() - started - sum(phases.values())
        config = _resolve_precision(config, _gpus(config))
        status = checks.same_run(ready.run, config)
        if status == "done":
            result = json.loads(ready.run.read("result.json"))
            console.print(f"run {config.run.name} is already done", highlight=False)
            display.result(console, result)
            return result
        tokenizer_url, tokenizer = _tokenizer(ready, console)
        prepared = _prepare(ready, config, tokenizer_url, tokenizer, console)
        phases["data"] = time.time() - started - sum(phases.values())
        order = _order(config, prepared)
        job = Job(config, prepared, tokenizer_url, order, ready.run.url)
        parameters = _count_parameters(ready, config, len(tokenizer))
        ready.run.write("config.yaml", config.to_yaml().encode())
        ready.run.write("plan.json", json.dumps(_plan(config, prepared, order, parameters), indent=1).encode())
        ready.run.delete(STOP_FILE)
        display.plan(console, config, prepared, order, parameters)
        phases["plan"] = time.time() - started - sum(phases.values())
        summary = _fit(job, ready.run, console)
        phases["workers"] = summary.pop("entered") - started - sum(phases.values())
    result = _result(config, ready.run, summary, started, phases)
    ready.run.write("result.json", json.dumps(result, indent=1).encode())
    display.result(console, result)
    return result


# ---- Before training -------------------------------------------------------------------------


def _address(config: Config) -> str:
    """Return `local` to start Ray here, else the cluster that is or will be connected to."""
    import ray

    if ray.is_initialized():
        return ray.get_runtime_context().gcs_address
    return config.cluster.address or os.environ.get("RAY_ADDRESS") or "local"


@contextmanager
def _ray(config: Config, address: str) -> Iterator[None]:
    """Connect to the cluster, or start Ray here and end it after."""
    import ray

    if ray.is_initialized():
        _check_cluster(config)
        yield
        return
    options: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.WARNING}
    if address == "local":
        cores = os.cpu_count() or 1
        options |= {"num_cpus": max(cores, config.cluster.max_workers + DATA_CPUS)}
        if not _gpus_here():
            options["object_store_memory"] = OBJECT_STORE_BYTES
    ray.init(address=address, **options)
    try:
        if address != "local":
            _check_cluster(config)
        yield
    finally:
        ray.shutdown()


def _check_cluster(config: Config) -> None:
    """Refuse more workers than the cluster has, or can grow to.

    Raises:
        ConfigError: naming what is there.
    """
    import ray
    from ray._private.state import state  # what an autoscaler may add is in no public call

    resources = ray.cluster_resources()
    limits = state.get_max_resources_from_cluster_config() or {}
    workers = config.cluster.min_workers
    needed = {"CPU": float(workers + 1), **{k: v * workers for k, v in config.cluster.resources.items()}}
    if config.cluster.gpu == "true" or (config.cluster.gpu == "auto" and resources.get("GPU")):
        needed["GPU"] = float(workers)
    short = [
        f"{amount:g} {name} (it has {resources.get(name, 0):g})"
        for name, amount in needed.items()
        if amount > max(resources.get(name, 0), limits.get(name, 0))
    ]
    if short:
        raise ConfigError(
            [
                f"cluster.workers={config.cluster.workers} is more than the cluster can place: it needs "
                f"{', '.join(short)}. Set cluster.workers lower, or add nodes"
            ]
        )


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def _gpus(config: Config) -> bool:
    import ray

    if config.cluster.gpu != "auto":
        return config.cluster.gpu == "true"
    return ray.cluster_resources().get("GPU", 0) >= 1


def _resolve_precision(config: Config, gpus: bool) -> Config:
    """Replace precision `auto` by what is faster: bf16 on GPUs, a measurement on CPUs."""
    if config.train.precision != "auto":
        return config
    precision = "bf16" if gpus or _bf16_is_faster() else "fp32"
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def _bf16_is_faster() -> bool:
    """Multiply matrices of a small model's size in both precisions; take the best of some runs."""
    import torch

    seconds = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(1024, 256, dtype=dtype), torch.ones(256, 1024, dtype=dtype)
        runs = []
        for _ in range(12):
            start = time.perf_counter()
            left @ right
            runs.append(time.perf_counter() - start)
        seconds[dtype] = min(runs)
    torch.set_num_threads(threads)
    return seconds[torch.bfloat16] < 0.8 * seconds[torch.float32]


def _tokenizer(ready: checks.Ready, console: Console) -> tuple[str, Any]:
    """Return (folder that every node can read, tokenizer), training one if the config asks for it."""
    config = ready.config
    root = open_storage(config.run.storage) / PREPARED
    tokenizer = ready.tokenizer
    name = config.model.tokenizer or f"bpe:{ready.model.config.vocab_size}"
    if tokenizer is None and name == "bytes":
        tokenizer = tokens.byte_tokenizer()
    if tokenizer is None:
        trained = root / f"tokenizer-{name.replace(':', '-')}-{ready.source.digest()}"
        if not trained.exists("tokenizer.json"):
            console.print(f"training a tokenizer ({name}) on the data", highlight=False)
            texts = prepare.sample_texts(ready.source, config.data.kind, TOKENIZER_SAMPLE_BYTES)
            tokens.save_tokenizer(tokens.train_bpe(texts, int(name.partition(":")[2])), trained)
        return trained.url, tokens.load_tokenizer(trained.url)
    folder = root / f"tokenizer-{tokens.tokenizer_digest(tokenizer)}"
    if not folder.list():
        tokens.save_tokenizer(tokenizer, folder)
    return folder.url, tokenizer


def _prepare(
    ready: checks.Ready, config: Config, tokenizer_url: str, tokenizer: Any, console: Console
) -> prepare.Prepared:
    """Make or find the rows.

    Raises:
        ConfigError: more records are unusable than data.bad_rows allows, or nothing is left.
    """
    data = config.data
    pad = tokenizer.pad_token_id
    recipe = prepare.Recipe(
        source=ready.source,
        eval_source=ready.eval_source,
        kind=data.kind,
        tokenizer_url=tokenizer_url,
        tokenizer_digest=tokens.tokenizer_digest(tokenizer),
        pad_id=pad if pad is not None else (tokenizer.eos_token_id or 0),
        seq_len=data.seq_len,
        pack=data.pack,
        truncate=data.truncate,
        eval_fraction=data.eval_fraction,
    )
    root = open_storage(config.run.storage) / PREPARED
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("preparing data", total=ready.source.num_bytes)
        prepared = prepare.prepare(
            recipe, root, data.workers, lambda done, total: progress.update(task, completed=done, total=total)
        )
    problems = []
    if prepared.bad_share > data.bad_rows:
        shown = "; ".join(f"{place} {why}" for place, why in prepared.examples)
        problems.append(
            f"data.path={data.path} is unusable in {prepared.bad_share:.1%} of its {prepared.records} "
            f"records: {shown}. Mend them, or allow more with data.bad_rows (now {data.bad_rows:.1%})"
        )
    elif not prepared.counts["train"]["target_tokens"]:
        problems.append(
            f"data.path={data.path} is empty: no token of its {prepared.records} records bears loss"
        )
    if problems:
        raise ConfigError(problems)
    return prepared


def _order(config: Config, prepared: prepare.Prepared) -> Order:
    rows, rows_per_step = prepared.num_rows("train"), config.rows_per_step
    if config.train.max_steps is None:
        return Order.for_epochs(
            rows, rows_per_step, config.train.micro_batch, config.run.seed, config.train.epochs or 1
        )
    return Order.for_steps(
        rows, rows_per_step, config.train.micro_batch, config.run.seed, config.train.max_steps
    )


def _count_parameters(ready: checks.Ready, config: Config, vocabulary: int) -> int:
    shape = model_shape(ready.model, config, vocabulary)
    return model.num_parameters(model.build(shape, loss=lambda *a, **k: None))  # type: ignore[arg-type]


def _plan(config: Config, prepared: prepare.Prepared, order: Order, parameters: int) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "fingerprint": prepared.fingerprint,
        "steps": order.num_steps,
        "rows_per_step": order.rows_per_step,
        "micro_batches_per_step": order.rows_per_step // config.train.micro_batch,
        "tokens": order.num_steps * config.train.tokens_per_step,
        "epochs": order.num_steps * order.rows_per_step / order.num_rows,
        "data": prepared.report(),
    }


# ---- Training --------------------------------------------------------------------------------


def _fit(job: Job, run: Storage, console: Console) -> dict[str, Any]:
    """Train with Ray Train while showing the run's own metrics; return rank 0's summary.

    Raises:
        RunFailed: training failed, with the first worker's reason.
    """
    from ray.train import ScalingConfig
    from ray.train.v2.api.exceptions import TrainingFailedError

    workers = (job.config.cluster.min_workers, job.config.cluster.max_workers)
    scaling = ScalingConfig(
        num_workers=workers[0] if workers[0] == workers[1] else workers,
        use_gpu=_gpus(job.config),
        resources_per_worker={"CPU": 1, **({"GPU": 1} if _gpus(job.config) else {}), **job.config.cluster.resources},
    )
    trainer = _trainer(job, scaling)
    bar = display.Bar(console, job.order.num_steps, job.config.run.name)
    bar.note(f"starting {job.config.cluster.workers} workers")
    # Not in the main thread: there Ray Train would replace our handling of signals by an abort.
    pool = ThreadPoolExecutor(1, thread_name_prefix="fit")
    try:
        with _stop_on_signal(run, console):
            fit = pool.submit(trainer.fit)
            _watch(run, bar, fit)
            summary = fit.result().return_value
    except TrainingFailedError as error:
        raise _failed(run, _reason(error)) from error
    finally:
        pool.shutdown(wait=False)  # after a second Ctrl-C it ends when Ray does
        bar.close()
    assert isinstance(summary, dict), summary
    if summary["status"] == "failed":
        raise _failed(run, summary["reason"])
    return summary


def _trainer(job: Job, scaling: Any) -> Any:
    from ray.train import FailureConfig, LoggingConfig, RunConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from rayapp.data.stream import ExactOrder
    from rayapp.finetune.worker import first_step, work

    return TorchTrainer(
        lambda: work(job),
        torch_config=TorchConfig(backend="nccl" if scaling.use_gpu else "gloo"),
        scaling_config=scaling,
        run_config=RunConfig(
            name=job.config.run.name,
            storage_path=f"{job.config.run.storage}/.ray",
            failure_config=FailureConfig(max_failures=job.config.cluster.max_failures),
            logging_config=LoggingConfig(log_level="WARNING"),
            worker_runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "false"}},
        ),
        datasets={"train": lambda: first_step(job)},
        dataset_config=ExactOrder(job.prepared, job.order),
    )


def _watch(run: Storage, bar: display.Bar, fit: Future[Any]) -> None:
    """Follow metrics.jsonl, which is the run's own record wherever it trains, until `fit` is done."""
    shown, wait_s = None, POLL_S if run.local_path() else 4 * POLL_S
    done = False
    while not done:
        done = bool(wait([fit], timeout=wait_s).done)
        try:
            lines = metrics.read(run)
        except OSError as error:
            logger.warning("cannot read %s: %s", metrics.FILE, error)
            continue
        if lines and lines[-1]["step"] != shown:
            shown = lines[-1]["step"]
            bar.update(lines[-1])


@contextmanager
def _stop_on_signal(run: Storage, console: Console) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a stop at the next step; a second one ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: Any) -> None:
        for each, handler in previous.items():
            signal.signal(each, handler)
        console.print("stopping after this step (once more to end at once)", highlight=False)
        run.write(STOP_FILE, b"signal\n")

    for number in previous:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# ---- After training --------------------------------------------------------------------------


def _reason(error: Exception) -> str:
    """Return the last line of the first worker's own error."""
    failures = getattr(error, "worker_failures", None) or {}
    for rank in sorted(failures):
        cause = failures[rank]
        cause = getattr(cause, "cause", None) or cause
        return str(cause).strip().splitlines()[-1]
    return str(error).strip().splitlines()[-1]


def _failed(run: Storage, reason: str) -> RunFailed:
    """Record in result.json why the run failed, and return the error to raise."""
    lines = metrics.read(run)
    failure = {"status": "failed", "steps": lines[-1]["step"] if lines else 0, "reason": reason}
    run.write("result.json", json.dumps(failure, indent=1).encode())
    return RunFailed(reason)


def _result(
    config: Config, run: Storage, summary: dict[str, Any], started: float, phases: dict[str, float]
) -> dict[str, Any]:
    lines = metrics.read(run)
    wall_s = time.time() - started
    own = [line for line in lines if line["step"] > summary["first_step"]]
    seconds = summary.pop("seconds")
    start_s = wall_s - sum(line["step_s"] for line in own) - sum(
        seconds.get(phase, 0.0) for phase in ("evaluation", "sample", "export")
    )
    known = {"start": start_s, "export": seconds.get("export", 0.0) + seconds.get("sample", 0.0)}
    goodput = metrics.goodput(own, wall_s, known)
    goodput["evaluation"] += seconds.get("evaluation", 0.0) / wall_s
    goodput["other"] = max(0.0, goodput["other"] - seconds.get("evaluation", 0.0) / wall_s)
    steady = own[len(own) // 10 :] or own
    busy_s = sum(line["step_s"] - line["checkpoint_stall_s"] - line["eval_s"] for line in steady)
    tokens_seen = sum(line["tokens_per_s"] * (line["step_s"] - line["checkpoint_stall_s"] - line["eval_s"]) for line in steady)
    return {
        "run": run.url,
        **summary,
        "tokens": sum(line["tokens"] for line in lines),
        "loss": lines[-1]["loss"] if lines else None,
        "tokens_per_s": tokens_seen / busy_s if busy_s else None,
        "mfu": None,
        "goodput": goodput,
        "start_s": phases | {k: v for k, v in seconds.items() if k in ("model", "restore", "first_step")},
        "wall_s": wall_s,
        "cost_usd": None,
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("rayapp", "ray", "torch", "transformers")}
