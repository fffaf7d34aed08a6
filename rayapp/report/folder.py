"""Read a run's folder for its report; what is not there is None or empty.

run = read(open_storage("runs/demo"))
run.status, run.columns["loss"], run.account
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import numpy as np

from rayapp.config.fields import ACCURACIES, IMAGES, KL, Unit, unit_of
from rayapp.data.report import DataReport
from rayapp.observe import attempts
from rayapp.observe import status as statuses
from rayapp.observe.columns import Array, Columns
from rayapp.observe.goodput import STARTED, Account, read_events, with_ends
from rayapp.observe.metrics import FIELDS, figure, held_out_figure, last, own_figures
from rayapp.observe.records import Evaluated, Event, EventFields, Plan, RunResult, Sections
from rayapp.observe.run_folder import CONFIG, PLAN, DamagedFile
from rayapp.report.chart import window_of
from rayapp.storage import Storage

TEXTS = ("batch_digest", "eval_samples", "lagging")  # fields of a line that are no numbers
NAMES = tuple(
    name
    for name, shown in FIELDS.items()
    if name not in TEXTS and shown.tag in ("", "rank")  # not of several figures
)
# What a page shows of the data.
OF_IMAGES = ("images", "class_counts", "classes", "bytes", "duplicates")
OF_TEXT = ("train", "eval", "fill", "loss_share", "duplicates", "bad")
BY_SOURCE = ("tokens_by_source", "loss_by_source")
WARM_UP_SHARE = 0.1  # this share of the steps, the first, is left out of mean rates


@dataclass(frozen=True)
class ReportedRun:
    """A run as its folder describes it."""

    name: str
    url: str
    status: str
    reason: str | None
    log: str | None
    """The name of the newest attempt's log; None if no attempt has ended."""
    task: str | None
    """`task` of the config; None: a language model."""
    config_yaml: str | None
    config: Sections
    plan: Plan
    result: RunResult
    """result.json; empty while the run is live, as one of an earlier command is out of date."""
    versions: dict[str, str]
    events: list[Event]
    account: Account
    """Time and cost."""
    steps: Columns
    columns: dict[str, Array]
    """metrics.jsonl by field: [steps], NaN where a line lacks the field."""
    held: list[Evaluated]
    """In order of step; result.json counts before metrics.jsonl, that before validation.jsonl."""

    @property
    def num_lines(self) -> int:
        """Number of steps in metrics.jsonl."""
        return len(self.columns["step"])

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl, 0 without one."""
        return int(self.last("step") or 0)

    @property
    def own_loss(self) -> str:
        """The name of the user's loss, empty without one."""
        return str(self.config.get("train", {}).get("loss") or "").rpartition(":")[2]

    @property
    def unit(self) -> Unit:
        """Whether the run is counted in images or in tokens, and what divides its loss."""
        known = self.columns.keys() & {ACCURACIES, KL}  # those of steps are columns of any run
        return IMAGES if self.task == "vision" else unit_of(known)

    @cached_property
    def counted(self) -> Array:
        """Loss-bearing tokens, or images, seen up to each step."""
        return np.asarray(np.cumsum(np.nan_to_num(self.columns[self.unit.many])))

    @property
    def started(self) -> EventFields:
        """The newest event of a start with its command; empty if there is none."""
        return self.newest(STARTED, "command")

    def newest(self, event: str, field: str) -> EventFields:
        """The newest of such events that has this field; empty if there is none."""
        every = (e for e in reversed(self.events) if e["event"] == event)
        return next((e for e in every if cast(Any, e).get(field)), cast(EventFields, {}))

    @cached_property
    def pauses(self) -> list[tuple[float, float]]:
        """Times between two commands, when nothing ran: (start, end) in Unix seconds."""
        ended = with_ends(self.events, self.columns["time"], None)
        starts = ((until, after[0]["time"]) for (_, until), (after, _) in pairwise(ended))
        return [(min(until, start), start) for until, start in starts]

    def active_s(self, times: Any) -> Array:
        """Return the seconds from the run's beginning to given Unix times, without the pauses.

        The beginning is the first event or the first step's start, whichever is earlier.
        """
        moments = np.asarray(times, np.float64)
        starts = [event["time"] for event in self.events[:1]]
        starts += (self.columns["time"][:1] - self.columns["step_s"][:1]).tolist()
        idle = np.zeros_like(moments)
        for start, end in self.pauses:
            idle = idle + np.clip(moments - start, 0.0, end - start)
        return np.asarray(moments - idle - min(starts, default=0.0))

    @cached_property
    def seconds(self) -> Array:
        """`active_s` of each step, made non-decreasing in case a clock was set back."""
        return np.asarray(np.maximum.accumulate(self.active_s(self.columns["time"])))

    @cached_property
    def busy_s(self) -> Array:
        """Seconds of each step after warm-up, without its checkpoint stall and evaluation."""
        parts = ("step_s", "checkpoint_stall_s", "eval_s")
        step_s, stall_s, eval_s = (np.nan_to_num(self.columns[part]) for part in parts)
        return np.asarray(step_s - stall_s - eval_s)[int(self.num_lines * WARM_UP_SHARE) :]

    @property
    def wall_s(self) -> float | None:
        """Seconds in which a command ran; None without events."""
        return self.account.wall_s or None

    def rate(self, name: str) -> float | None:
        """Return a rate from result.json; else its mean over the steps after warm-up, weighted by
        their `busy_s`.
        """
        if (result := figure(self.result, name)) is not None:
            return float(result)
        values = self.columns[name][self.num_lines - len(self.busy_s) :]
        known = ~np.isnan(values)
        weight = float(self.busy_s[known].sum())
        return float((values * self.busy_s)[known].sum()) / weight if weight > 0 else None

    def last(self, name: str) -> float | None:
        return _known(np.mean, self.columns[name][-1:])

    @property
    def num_recent(self) -> int:
        """Number of steps that are recent: 2 % of the run, but 10 at least."""
        return min(self.num_lines, max(10, window_of(self.num_lines)))

    def recent(self, name: str) -> float | None:
        """Return the mean of a field over the last steps; None if none of them has it."""
        return _known(np.mean, self.columns[name][-max(1, self.num_recent) :])

    def highest(self, name: str) -> float | None:
        """Return a field's highest value; None if no step has it."""
        return _known(np.max, self.columns[name])

    def held_values(self, name: str) -> Array:
        """Return a figure of all evaluations, or one of eval.metrics; NaN: not known."""
        return np.array([held_out_figure(line, name) for line in self.held], np.float64)

    @property
    def held_model(self) -> Evaluated | None:
        """The evaluation of the exported model; without `best`, the last one."""
        step = self.result["best"]["step"] if "best" in self.result else None
        of_best = (line for line in self.held if line["step"] == step)
        return next(of_best, self.held[-1] if self.held else None)

    def held_figure(self, name: str) -> float | None:
        """Return a figure of the exported model; None if it is not known."""
        return None if self.held_model is None else figure(self.held_model, name)


def read(storage: Storage) -> ReportedRun:
    """Read a run's folder.

    Raises:
        NoRun: nothing there is a run's.
        DamagedFile: a file of it is not as a run writes it.
        StorageError: it cannot be read.
    """
    own = own_figures(last(storage) or {})
    task, config = _sections(storage)
    parts = [
        f"{name}/{path}"
        for path in config.get("data", {}).get("mixture") or ()
        for name in BY_SOURCE
    ]
    steps = Columns.read(storage, tuple(dict.fromkeys((*NAMES, *own, *parts))))
    now = statuses.read(storage, steps)
    events = read_events(storage)
    result = statuses.read_result(storage)
    status, reason = now.status, now.reason
    if not events and not now.live and result:  # events.jsonl was damaged, and deleted
        status, reason = result["status"], result.get("reason")
    text = storage.read(CONFIG).decode("utf-8", "replace") if storage.exists(CONFIG) else None
    current: RunResult = cast(RunResult, {}) if now.live else result
    account = now.account
    if not account.wall_s:  # nothing is known of its time
        account = replace(account, goodput={}, cost_usd=None)
    at_end: list[Any] = []
    if "steps" in current:
        step = current["best"]["step"] if "best" in current else current["steps"]
        at_end = [{**current, "step": step}, *([current["last"]] if "last" in current else [])]
    held: list[Any] = [*statuses.read_validations(storage), *steps.held, *at_end]
    by_step = {line["step"]: line for line in held if line.get("eval_loss") is not None}
    return ReportedRun(
        name=str(config.get("run", {}).get("name") or storage.url.rstrip("/").rpartition("/")[2]),
        url=storage.url,
        status=status,
        reason=reason,
        log=attempts.log_name(logs[-1]) if (logs := attempts.logged(storage)) else None,
        task=task,
        config_yaml=text,
        config=config,
        plan=_plan(storage),
        result=current,
        versions=result.get("versions", {}),
        events=events,
        account=account,
        steps=steps,
        columns={name: steps[name] for name in (*NAMES, *own)},
        held=[by_step[step] for step in sorted(by_step)],
    )


def _known(function: Any, values: Array) -> float | None:
    """Return a function of the values that are known; None if there are none."""
    known = values[~np.isnan(values)]
    return float(function(known)) if len(known) else None


def _sections(storage: Storage) -> tuple[str | None, Sections]:
    """Return task and sections of a config as plain values; of a damaged one the text is shown."""
    try:
        tree: dict[str, Any] = statuses.read_sections(storage) or {}
    except DamagedFile:
        return None, {}
    sections = {section: values for section, values in tree.items() if isinstance(values, dict)}
    return tree.get("task"), sections


def _plan(storage: Storage) -> Plan:
    """Return the plan; what a page shows of the data is there.

    Raises: DamagedFile: it is not.
    """
    plan = statuses.read_plan(storage)
    data = plan.get("data") or DataReport()
    for part in (data, *data.get("sources", {}).values()) if data else ():
        for wanted in OF_IMAGES if "images" in data else OF_TEXT:
            if wanted not in part:
                raise DamagedFile(f"{storage.url}/{PLAN}", f"its data is without {wanted}")
    return plan
