"""Send the steps of metrics.jsonl to TensorBoard, MLflow and W&B.

    tracker = OPEN["tensorboard"](run, config)
    tracker.write(lines); tracker.cut_back(step); tracker.write(lines)
    tracker.close("done", samples)

Only the driver feeds a tracker, from metrics.jsonl: this costs the workers no time, and the key
stays in the driver's environment. `write` gets whole lines in order; `cut_back` means that the
steps after `step` were lost and will be done again. Values that are None are left out. If another
command resumes the run, the tracker continues the same run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import netrc
import os
import re
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rayapp.config import RunConfig
from rayapp.config.text import flatten
from rayapp.observe.metrics import FIELDS, OWN, MetricsLine, figures_of
from rayapp.observe.run_folder import DONE, FAILED, STOPPED, TENSORBOARD
from rayapp.storage import Storage

SHOWN_BY_HPARAMS = ("loss/loss", "loss/eval_loss")
STEP_S = "speed/step_s"  # each line has it
PACKAGES = {"tensorboard": "tensorboardX", "mlflow": "mlflow", "wandb": "wandb"}
INSTALL = {"tensorboard": "tensorboardX", "mlflow": "mlflow-skinny", "wandb": "wandb"}
STORE_S = 30.0  # at least, between two copies of an event file to S3
STORE_BYTES_PER_S = 2 * 2**20  # the average rate of such copies
# Per request, and in characters. Source: MLflow's REST API, "Request Limits", 3.17 (2026-11).
MLFLOW_BATCH, MLFLOW_PARAMS = 1000, 100
MLFLOW_PARAM, MLFLOW_TAG = 500, 5000
PROJECT = "rayapp"


class Tracker(ABC):
    """One run in an experiment tracker."""

    @abstractmethod
    def write(self, lines: Sequence[MetricsLine]) -> None:
        """Send further steps."""

    def cut_back(self, step: int) -> None:  # noqa: B027
        """Take back the steps after this one; MLflow and W&B cannot."""

    @abstractmethod
    def close(self, status: str, samples: Sequence[tuple[str, str]]) -> None:
        """Send how the command ended (done, stopped, failed), and the samples, (prompt, text)."""


def problems(config: RunConfig) -> list[str]:
    """Return which trackers cannot work, as they lack a package, a server or a key."""
    trackers = []
    for name in config.run.trackers:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            trackers.append(
                f"run.trackers={name} is not installed: there is no package {PACKAGES[name]} where "
                f"the driver runs. Run `pip install {INSTALL[name]}`, or leave {name} out"
            )
        elif name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
            trackers.append(
                "run.trackers=mlflow is without a server: MLFLOW_TRACKING_URI is not set. "
                "Export it, e.g. https://mlflow.example.com, where the command runs"
            )
        elif name == "wandb" and not _wandb_may_start():
            trackers.append(
                "run.trackers=wandb is without a key: WANDB_API_KEY is not set, and nobody is "
                "there to be asked. Export it, or WANDB_MODE=offline, where the command runs"
            )
    return trackers


def scalars(line: MetricsLine) -> Iterator[tuple[str, float]]:
    """Yield (group/name, number) of a line's figures, as trackers name them."""
    for field, key, value in figures_of(line):
        if group := FIELDS.get(field, OWN).group:
            yield f"{group}/{plain_name(key or field)}", float(value)


def plain_name(path: str) -> str:
    """Return a name, e.g. a source's path, as every tracker takes it in the name of a figure.

    >>> plain_name("s3://bucket/a.jsonl"), plain_name("/data/b"), plain_name("org/set:en@train")
    ('s3/bucket/a.jsonl', 'data/b', 'org/set:en_train')
    """
    parts = re.sub(r"[^\w./: -]", "_", path.replace("://", "/")).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))


def settings(config: RunConfig) -> dict[str, object]:
    """Return every field of a config by its dotted name, as plain values."""
    return flatten(config.model_dump(mode="json"))


class TensorBoard(Tracker):
    """One event file per command, in the run's folder.

    The file begins with a mark that makes TensorBoard forget the older files, which are deleted,
    and then holds all steps of the run so far. So a command that was killed leaves no gap, and no
    step is there twice.
    """

    def __init__(self, run: Storage, config: RunConfig) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.summary import hparams, text

        self._storage = run / TENSORBOARD
        self._old = [entry.name for entry in self._storage.list()]
        local = self._storage.local_path()
        self._remote = local is None
        self._folder = Path(local or tempfile.mkdtemp(prefix="rayapp-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._due = 0.0
        # Not SummaryWriter, whose flush() does not write what is still in its queue.
        self._file = EventsWriter(str(self._folder / "events"))
        self.cut_back(0)
        self._add(text("config", _verbatim(config.to_yaml())))
        every = settings(config).items()
        plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in every}
        for summary in hparams(plain, dict.fromkeys(SHOWN_BY_HPARAMS)):
            self._add(summary)

    def write(self, lines: Sequence[MetricsLine]) -> None:
        """Add an event for each step; copy the file to S3 at intervals if the run is there."""
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import text

        for line in lines:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(line)]
            self._add(Summary(value=values), line["step"], line["time"])
            for number, pair in enumerate(line.get("eval_samples") or ()):
                shown = text(f"answer/{number}", _verbatim("".join(pair)))
                self._add(shown, line["step"], line["time"])
        self._file.flush()
        if time.monotonic() >= self._due:
            self._store()

    def cut_back(self, step: int) -> None:
        """Tell TensorBoard to forget the steps after this one, or with 0 all that it knows."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._file.write_event(
            Event(step=step + 1 if step else 0, session_log=start, wall_time=time.time())
        )

    def close(self, status: str, samples: Sequence[tuple[str, str]]) -> None:
        """Add the samples, and store the file."""
        from tensorboardX.summary import text

        for number, (prompt, answer) in enumerate(samples):
            self._add(text(f"sample/{number}", _verbatim(prompt + answer)))
        self._file.close()
        self._store()
        if self._remote:
            shutil.rmtree(self._folder)

    def _add(self, summary: Any, step: int = 0, at: float | None = None) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write_event(Event(summary=summary, step=step, wall_time=at or time.time()))

    def _store(self) -> None:
        """Copy the event file if the run is on S3, and delete those of earlier commands."""
        began = time.monotonic()
        stored_bytes = 0
        for path in self._folder.iterdir() if self._remote else ():
            data = path.read_bytes()
            self._storage.write(path.name, data)
            stored_bytes += len(data)
        while self._old:
            self._storage.delete(self._old[-1])
            self._old.pop()
        self._due = began + max(STORE_S, stored_bytes / STORE_BYTES_PER_S)


class MLflow(Tracker):
    """One MLflow run, found again by its tag; no step is sent twice.

    MLflow cannot take a value back: a step that is done again after a failure keeps its first
    values, which are the same if the number of workers is.
    """

    def __init__(self, run: Storage, config: RunConfig) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        earlier = self._client.get_experiment_by_name(name)
        experiment = earlier.experiment_id if earlier else self._client.create_experiment(name)
        tagged = f"tags.`{PROJECT}.run` = '{run.url}'"
        runs = self._client.search_runs([experiment], tagged, max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
            known = runs[0].data.params
            history = self._client.get_metric_history(self._id, STEP_S)
            self._last_sent = max((point.step for point in history), default=0)
        else:
            tags = {f"{PROJECT}.run": run.url}
            made = self._client.create_run(experiment, run_name=config.run.name, tags=tags)
            self._id, known, self._last_sent = made.info.run_id, {}, 0
        new = {name: value for name, value in settings(config).items() if name not in known}
        params = [Param(name, str(value)[:MLFLOW_PARAM]) for name, value in new.items()]
        for start in range(0, len(params), MLFLOW_PARAMS):  # they cannot change
            self._client.log_batch(self._id, params=params[start : start + MLFLOW_PARAMS])

    def write(self, lines: Sequence[MetricsLine]) -> None:
        """Send the new steps, as many per request as the API allows."""
        from mlflow.entities import Metric

        new = [line for line in lines if line["step"] > self._last_sent]
        most = max((sum(1 for _ in scalars(line)) for line in new), default=1)
        per_request = max(1, MLFLOW_BATCH // most)
        for start in range(0, len(new), per_request):
            part = new[start : start + per_request]
            values = [
                Metric(name, value, int(line["time"] * 1000), line["step"])
                for line in part
                for name, value in scalars(line)
            ]
            self._client.log_batch(self._id, metrics=values)
            self._last_sent = part[-1]["step"]

    def close(self, status: str, samples: Sequence[tuple[str, str]]) -> None:
        """Set how the command ended, and store the samples as tags."""
        for number, (prompt, text) in enumerate(samples):
            value = f"{prompt}{text}"[:MLFLOW_TAG]
            self._client.set_tag(self._id, f"{PROJECT}.sample.{number}", value)
        ended = {DONE: "FINISHED", STOPPED: "KILLED"}.get(status, "FAILED")
        self._client.set_terminated(self._id, ended)


class Wandb(Tracker):
    """One W&B run, resumed by its id, a hash of the run's URL."""

    def __init__(self, run: Storage, config: RunConfig) -> None:
        import wandb

        # The CPU and output of the driver say nothing about the training.
        names = ("silent", "disable_code", "disable_git", "x_disable_stats")
        quiet: dict[str, Any] = dict.fromkeys(names, True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=hashlib.sha256(run.url.encode()).hexdigest()[:16],
            name=config.run.name,
            resume="allow",
            config=settings(config),
            dir=os.environ.get("WANDB_DIR") or run.local_path(),
            settings=wandb.Settings(console="off", **quiet),
        )

    def write(self, lines: Sequence[MetricsLine]) -> None:
        """Send the new steps; W&B's steps only go forward."""
        for line in lines:
            if line["step"] >= self._run.step:
                self._run.log(dict(scalars(line)), step=line["step"])

    def close(self, status: str, samples: Sequence[tuple[str, str]]) -> None:
        """Set how the command ended, add the samples, and send what is still queued."""
        self._run.summary.update({"status": status})
        for number, (prompt, text) in enumerate(samples):
            self._run.summary.update({f"sample/{number}": prompt + text})
        self._run.finish(exit_code=int(status == FAILED))


OPEN: dict[str, Callable[[Storage, RunConfig], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": Wandb,
}


def _wandb_may_start() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):  # no file: `wandb login` has not been run
        return False


def _verbatim(text: str) -> str:
    """Indent text as a Markdown code block, since TensorBoard renders text as Markdown."""
    return "".join(f"    {line}\n" for line in text.splitlines())
