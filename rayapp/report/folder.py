"""Read a run's folder for its report; what is not there is None or empty.

run = read(open_storage("runs/demo"))
run.status, run.columns["loss"], run.account
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import numpy as np

from rayapp.config.fields import IMAGES, TOKENS, Unit
from rayapp.config.text import flatten
from rayapp.data.report import Counts, DataReport
from rayapp.observe import attempts
from rayapp.observe import status as statuses
from rayapp.observe.columns import Array, Columns
from rayapp.observe.goodput import Account, commands, read_events
from rayapp.observe.records import Event, Interruption, Plan, RunResult, Sections, StoredCost
from rayapp.observe.run_folder import CONFIG, PLAN, DamagedFile
from rayapp.report import evaluations, sources
from rayapp.report.curves import NAMES, window_of
from rayapp.report.evaluations import Held
from rayapp.storage import Storage

# What a page shows of the data.
OF_IMAGES = ("images.train", "images.eval", "class_counts", "classes", "bytes", "duplicates")
OF_TEXT = (
    *(f"{split}.{name}" for split in ("train", "eval") for name in Counts.__annotations__),
    *("fill", "loss_share", "duplicates", "bad"),
)
WARM_UP_SHARE = 0.1  # this share of the steps, the first, is left out of mean rates


@dataclass(frozen=True)
class Pause:
    """A time between two commands, when nothing ran, in Unix seconds."""

    start: float
    end: float


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
    account: Account | None
    """Time and cost; None if the run has no events, or no wall time yet."""
    columns: dict[str, Array]
    """metrics.jsonl by field: [steps], NaN where a line lacks the field."""
    held: list[Held]
    """In order of step."""
    sources: dict[str, sources.SourceFigures] = field(default_factory=dict)
    """By path, of a mixture of several."""

    @property
    def num_lines(self) -> int:
        """Number of steps in metrics.jsonl."""
        return len(self.columns["step"])

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl, 0 without one."""
        return int(self.columns["step"][-1]) if self.num_lines else 0

    @property
    def own_loss(self) -> str:
        """The name of the user's loss, empty without one."""
        return str(self.config.get("train", {}).get("loss") or "").rpartition(":")[2]

    @property
    def unit(self) -> Unit:
        """Whether the run is counted in images or in tokens."""
        return IMAGES if self.task == "vision" else TOKENS

    @cached_property
    def counted(self) -> Array:
        """Loss-bearing tokens, or images, seen up to each step."""
        return np.asarray(np.cumsum(np.nan_to_num(self.columns[self.unit.many])))

    @cached_property
    def pauses(self) -> list[Pause]:
        """Times between the run's commands: from one's last sign of life to the next one's start.

        Signs of life are events, steps, and `seen_until` of the command that follows.
        """
        pauses = []
        every, times = commands(self.events), self.columns["time"]
        for command, following in pairwise(every):
            start = following[0]["time"]
            before = times[(times >= command[0]["time"]) & (times < start)]
            seen = [event["time"] for event in command] + before[-1:].tolist()
            until = following[0].get("seen_until") or 0.0
            pauses.append(Pause(min(max([*seen, until]), start), start))
        return pauses

    @cached_property
    def began(self) -> float:
        """Unix seconds of the first event or the first step's start, whichever is earlier."""
        starts = [event["time"] for event in self.events[:1]]
        if self.num_lines:
            starts.append(float(self.columns["time"][0] - self.columns["step_s"][0]))
        return min(starts, default=0.0)

    def active_s(self, times: Any) -> Array:
        """Return the seconds from the run's beginning to given Unix times, without the pauses."""
        moments = np.asarray(times, np.float64)
        idle = sum(
            (np.clip(moments - pause.start, 0.0, pause.end - pause.start) for pause in self.pauses),
            np.zeros_like(moments),
        )
        return np.asarray(moments - idle - self.began)

    @cached_property
    def seconds(self) -> Array:
        """`active_s` of each step, made non-decreasing in case a clock was set back."""
        return np.asarray(np.maximum.accumulate(self.active_s(self.columns["time"])))

    @property
    def warm_up(self) -> int:
        """Number of first steps left out of mean rates."""
        return int(self.num_lines * WARM_UP_SHARE)

    @cached_property
    def busy_s(self) -> Array:
        """Seconds of each step without its checkpoint stall and evaluation."""
        parts = ("step_s", "checkpoint_stall_s", "eval_s")
        step_s, stall_s, eval_s = (np.nan_to_num(self.columns[part]) for part in parts)
        return np.asarray(step_s - stall_s - eval_s)

    def rate(self, name: str) -> float | None:
        """Return a rate from result.json; else its mean over the steps after warm-up, weighted by
        their `busy_s`.
        """
        result = self.result.get(name)
        if isinstance(result, int | float):
            return float(result)
        busy_s, values = self.busy_s[self.warm_up :], self.columns[name][self.warm_up :]
        known = ~np.isnan(values)
        weight = float(busy_s[known].sum())
        return float((values * busy_s)[known].sum()) / weight if weight > 0 else None

    def last(self, name: str) -> float | None:
        """Return a field of the last step; None if it has none."""
        column = self.columns[name]
        return None if not len(column) or np.isnan(column[-1]) else float(column[-1])

    @property
    def num_recent(self) -> int:
        """Number of steps that are recent: 2 % of the run, but 10 at least."""
        return _num_recent(self.num_lines)

    def recent(self, name: str) -> float | None:
        """Return the mean of a field over the last steps; None if none of them has it."""
        column = self.columns[name][-self.num_recent :] if self.num_lines else np.array([])
        return None if not len(column) or np.isnan(column).all() else float(np.nanmean(column))

    def highest(self, name: str) -> float | None:
        """Return a field's highest value; None if no step has it."""
        column = self.columns[name]
        return None if not len(column) or np.isnan(column).all() else float(np.nanmax(column))

    @property
    def goodput(self) -> dict[str, float] | None:
        """Fractions of the wall time by cause; without events those of result.json."""
        return self.account.goodput if self.account else self.result.get("goodput")

    @property
    def wall_s(self) -> float | None:
        """Seconds in which a command ran; without events those of result.json."""
        return self.account.wall_s if self.account else self.result.get("wall_s")

    @property
    def cost_usd(self) -> float | None:
        """Cost of its machines in USD."""
        return self.account.cost_usd if self.account else self.result.get("cost_usd")

    @property
    def storage(self) -> StoredCost | None:
        """What it kept when it ended, and S3's price; None before."""
        return self.result.get("storage")

    @property
    def interruptions(self) -> list[Interruption]:
        """Dicts of time, kind, reason, step, workers, lost_steps and to_first_step_s."""
        if self.account:
            return self.account.interruptions
        return list(self.result.get("interruptions", []))

    @property
    def lost_steps(self) -> int | None:
        """Steps whose work was lost at interruptions."""
        return self.account.lost_steps if self.account else self.result.get("lost_steps")


def read(storage: Storage) -> ReportedRun:
    """Read a run's folder.

    Raises:
        NoRun: nothing there is a run's.
        DamagedFile: a file of it is not as a run writes it.
        StorageError: it cannot be read.
    """
    steps = Columns.read(storage, NAMES)
    columns = steps.columns()
    now = statuses.read(storage, steps)
    events = read_events(storage)
    result = statuses.read_result(storage)
    text = _text(storage, CONFIG)
    task, config = _sections(storage)
    status, reason = now.status, now.reason
    if not events and not now.live and result:  # an older run: only result.json has its end
        status, reason = str(result.get("status", status)), result.get("reason")
    current: RunResult = cast(RunResult, {}) if now.live else result
    by_source: dict[str, sources.SourceFigures] = {}
    if config.get("data", {}).get("mixture"):
        by_source = sources.read(storage, _num_recent(len(steps)))
        sources.evaluated(by_source, current)
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
        account=now.account if events and now.account.wall_s > 0 else None,
        columns=columns,
        held=evaluations.read(storage, columns, config, current),
        sources=by_source,
    )


def _num_recent(num_lines: int) -> int:
    return min(num_lines, max(10, window_of(num_lines)))


def _text(storage: Storage, name: str) -> str | None:
    try:
        return storage.read(name).decode("utf-8", "replace")
    except FileNotFoundError:
        return None


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

    Raises:
        DamagedFile: it is not.
    """
    plan = statuses.read_plan(storage)
    data = plan.get("data") or DataReport()
    for part in (data, *data.get("sources", {}).values()) if data else ():
        names = flatten(dict(part)).keys()
        for wanted in OF_IMAGES if "images" in data else OF_TEXT:
            if not any(f"{name}.".startswith(f"{wanted}.") for name in names):
                raise DamagedFile(f"{storage.url}/{PLAN}", f"its data is without {wanted}")
    return plan
