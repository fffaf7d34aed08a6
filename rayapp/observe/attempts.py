"""How an attempt to train ended, and its log, logs/attempt-N.txt.

    ending = ending_of(error, last_line, began)
    read_log(run)                          # the newest
    read_log(run, attempt=3, rank=1)       # the error of a rank that died in attempt 3
    follow_log(run, ended)                 # what is added, until the run has ended

An ending is classified by the errors of Ray, its workers and the disk. Attempt N is the Nth time
that the driver started workers. Its log has what the driver printed, before it too, then the errors
of dead ranks, the one that came first last, and at its end how the attempt ended.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rayapp.config import ConfigError
from rayapp.observe.metrics import MetricsLine
from rayapp.observe.plain import plain_text
from rayapp.observe.records import Summary
from rayapp.observe.run_folder import LOGS
from rayapp.observe.words import last_line
from rayapp.storage import Storage, StorageError
from rayapp.storage.base import LOCAL_REASONS

FAILURE, PREEMPTION, RESIZE, NO_ROOM = "failure", "preemption", "resize", "no room"
AGAIN = "start again"  # the workers and the driver saw different checkpoints
# What caused a failure.
STEP = "step"  # an error, or the death of a worker, in a step
START = "start"  # the same before the first step
NODE = "node"  # a machine was lost
NETWORK = "network"  # before the first step, when ranks find one another
STORAGE = "storage"
NETWORK_WORDS = (
    "DistNetworkError",
    "DistStoreError",
    "NCCL error",
    "Connection refused",
    "Connection reset",
    "Connection closed",
    "timed out",
    "Name or service not known",
    "Temporary failure in name resolution",
)
# Errors of ranks whose peers have failed.
FOLLOW_ON_WORDS = (*NETWORK_WORDS, "DistBackendError", "NCCL", "Timed out waiting")
NODE_WORDS = ("its node has died", "node was terminated", "unexpected system error on the node")
# Ray's, where its memory monitor ends a worker, and where a worker's process is just gone.
MONITOR_WORDS, SILENT_WORDS = "running low on memory", "Worker unexpectedly exits with a connection"
LESS_MEMORY = (
    "lower train.micro_batch, data.seq_len or data.workers, or take nodes with more memory"
)
# Messages of full and read-only disks: Python's, Ray's and torch's, and those of our storage; and
# those on a loss of the user's that fails at each call.
FINAL = (
    *(
        words
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
        for words in (os.strerror(number), LOCAL_REASONS[number][0])
    ),
    " is not usable: it ",
)

MOST_ERRORS = 16
ERROR_CHARACTERS = 20_000
SECTION = "==== "
GOES_ON = "it goes on"  # the end of a log whose attempt has not ended
POLL_S, POLL_S3_S = 1.0, 5.0
LOG = re.compile(rf"{LOGS}/attempt-([1-9][0-9]{{0,8}})\.txt")


@dataclass(frozen=True)
class Ending:
    """How an attempt ended before the run was done or was asked to stop."""

    kind: str
    """FAILURE, PREEMPTION, RESIZE, NO_ROOM or AGAIN."""
    reason: str
    step: int
    """Steps done when it ended, whether a checkpoint holds them or not."""
    trained: bool
    """Whether the attempt has done a step; if so, it ended in the step after `step`."""
    final: bool = False
    """Whether another attempt would fail alike, as on a full disk."""
    cause: str = STEP
    """Of a failure: STEP, START, NODE, NETWORK or STORAGE."""


def ending_of(ended: Summary | Exception, last: MetricsLine | None, began: float) -> Ending:
    """Classify how an attempt ended.

    `ended` is rank 0's summary if the workers left (status `moved`), else the error of the attempt.
    `last` is the last line of metrics.jsonl; `began` is the Unix time at which the attempt began.
    """
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
    from ray.train.v2.api.exceptions import PreemptionError

    step = last["step"] if last else 0
    trained = last is not None and last["time"] >= began
    if isinstance(ended, dict):
        kind = PREEMPTION if ended["notice"] else AGAIN if ended.get("again") else RESIZE
        return Ending(kind, ended["reason"], step, trained)
    if isinstance(getattr(ended, "controller_failure", None), WorkerGroupStartupTimeoutError):
        return Ending(NO_ROOM, "the cluster has no room for the workers yet", step, trained)
    taken = isinstance(ended, PreemptionError) or any(
        getattr(cause, "preempted", False) for cause in _deaths(ended).values()
    )
    if taken:
        return Ending(PREEMPTION, reason_of(ended), step, trained)
    final = _final_reason(ended)
    reason, cause = final or reason_of(ended), _cause_of(ended, trained)
    return Ending(FAILURE, reason, step, trained, final is not None, cause)


def _cause_of(error: Exception, trained: bool) -> str:
    deaths = causes(error)
    texts = [f"{type(death).__name__}: {death}" for death in deaths]
    if any(words in text for text in texts for words in NODE_WORDS):
        return NODE
    if any(isinstance(death, StorageError) for death in deaths) or any(
        "could not be saved in" in text for text in texts
    ):
        return STORAGE
    if trained:
        return STEP
    return NETWORK if any(words in t for t in texts for words in NETWORK_WORDS) else START


def _final_reason(error: Exception) -> str | None:
    """Return the first error that another attempt would meet again, None if there is none."""
    reasons = [f"rank {rank}: {_reason(cause)}" for rank, cause in sorted(_deaths(error).items())]
    for line in reasons or [_reason(error)]:
        if any(words in line for words in FINAL):
            return line
    return None


def reason_of(error: Exception) -> str:
    """Say which worker failed first and why."""
    deaths = _deaths(error)
    if not deaths:
        return _reason(error)
    rank = _by_cause(deaths)[0]
    return f"rank {rank}: {_reason(deaths[rank])}"


def tracebacks(error: Exception) -> dict[str, str]:
    """Return {"rank N": its error with the traceback}, the first cause last.

    An error that no rank has raised is one of the workers together.
    """
    deaths = _deaths(error)
    if not deaths:
        return {"workers": str(error)}
    return {f"rank {rank}": str(deaths[rank]) for rank in reversed(_by_cause(deaths))}


def _by_cause(deaths: dict[int, BaseException]) -> list[int]:
    """Return the ranks that ended, those first whose ends explain the others' errors.

    That are dead workers, then errors of other kinds than a lost peer, then the lowest rank.
    """
    from ray.exceptions import RayActorError

    def order(rank: int) -> tuple[bool, bool, int]:
        line = _reason(deaths[rank])
        follows = any(words in line for words in FOLLOW_ON_WORDS)
        return not isinstance(deaths[rank], RayActorError), follows, rank

    return sorted(deaths, key=order)


def causes(error: Exception) -> list[BaseException]:
    """Return the errors that ended the workers, or the error itself if no worker had one."""
    return list(_deaths(error).values()) or [error]


def memory_kill(text: str) -> str | None:
    """Return what Ray's words on a worker's death mean for its memory, None if nothing.

    The kernel's OOM killer leaves no word; Ray then lists it as the first of its guesses.

    >>> memory_kill("1 worker(s) were killed due to the node running low on memory.")[:53]
    'the node was low on memory, so Ray ended the process:'
    >>> memory_kill("ValueError: no such file") is None
    True
    """
    if MONITOR_WORDS in text:
        return f"the node was low on memory, so Ray ended the process: {LESS_MEMORY}"
    if SILENT_WORDS in text:
        return (
            "the process was killed or crashed without a word; Linux's OOM killer kills so where "
            "the memory of the node or its container is used up (`dmesg` there says it): then "
            f"{LESS_MEMORY}"
        )
    return None


def _deaths(error: Exception) -> dict[int, BaseException]:
    """Return the error that ended each worker, by rank."""
    failures = getattr(error, "worker_failures", None) or {}
    return {rank: getattr(failures[rank], "cause", None) or failures[rank] for rank in failures}


def _reason(error: BaseException) -> str:
    if (killed := memory_kill(str(error))) is not None:
        return killed
    text = last_line(error).split(" Some common causes include")[0]
    return text.rpartition("Worker exit detail: ")[2].rstrip(".")


# ---- Logs ------------------------------------------------------------------------------------


def log_name(attempt: int) -> str:
    """Return the file of an attempt's log in the run's folder."""
    return f"{LOGS}/attempt-{attempt}.txt"


def render_log(head: str, output: str, errors: Mapping[str, str], ending: str) -> str:
    """Return the text of a log; `errors` by the section's name, the first cause last."""
    last = list(errors.items())[-MOST_ERRORS:]
    sections = [("driver", output), *((name, text[-ERROR_CHARACTERS:]) for name, text in last)]
    sections.append(("end", ending))
    return head + "\n" + "".join(f"{SECTION}{name}\n{_body(text)}" for name, text in sections)


def _body(text: str) -> str:
    """Return the lines of a section, of which none looks like a section's first line."""
    lines = plain_text(text).splitlines()
    return "".join(f"{' ' if line.startswith(SECTION) else ''}{line}\n" for line in lines)


def logged(run: Storage) -> list[int]:
    """Return the attempts whose logs are kept, in order."""
    return sorted(_etags(run))


def read_log(run: Storage, attempt: int | None = None, rank: int | None = None) -> str:
    """Return the log of an attempt, by default the newest, or the error of one of its ranks.

    Raises: ConfigError: it is not kept, or no such rank has failed.
    """
    kept = logged(run)
    if not kept:
        raise ConfigError([_none_of(run)])
    attempt = kept[-1] if attempt is None else attempt
    if attempt not in kept:
        there = ", ".join(map(str, kept))
        raise ConfigError([f"attempt={attempt} has no log in {run.url}. Set one of {there}"])
    text = plain_text(run.read(log_name(attempt)).decode(errors="replace"))
    if rank is None:
        return text
    sections = _sections(text)
    if f"rank {rank}" not in sections:
        failed = ", ".join(name[len("rank ") :] for name in sections if name.startswith("rank "))
        instead = f"Set one of {failed}" if failed else "Leave rank out to see the driver's output"
        raise ConfigError([f"rank={rank} has left no error in attempt {attempt}. {instead}"])
    return sections[f"rank {rank}"]


def follow_log(run: Storage, ended: Callable[[], bool]) -> Iterator[str]:
    """Yield the newest log, then what is added to it and to later ones, until the run has ended.

    The driver stores a log whole, and only its last part if it is long. Between two looks at S3
    pass POLL_S3_S, elsewhere POLL_S.

    Raises: ConfigError: the run has ended and has left no log.
    """
    number, shown, known = 0, list[str](), dict[int, str]()
    while True:
        last = ended()  # before the look, which then sees all
        etags = _etags(run)
        if not number and etags:
            number = max(etags)
            known = {other: etag for other, etag in etags.items() if other < number}
        for changed in sorted(each for each in etags if etags[each] != known.get(each)):
            known[changed] = etags[changed]
            text = plain_text(run.read(log_name(changed)).decode(errors="replace"))
            lines = text.partition(f"{SECTION}driver\n")[2].splitlines()  # without the head
            lines = lines[:-2] if lines[-2:] == [f"{SECTION}end", GOES_ON] else lines
            added = lines[_overlap(shown, lines) :] if changed == number else lines
            number, shown = changed, lines
            if added:
                yield "".join(f"{line}\n" for line in added)
        if last:
            if not number:
                raise ConfigError([_none_of(run)])
            return
        time.sleep(POLL_S if run.local_path() else POLL_S3_S)


def _none_of(run: Storage) -> str:
    return (
        f"run={run.url} has no log: its driver has not stored one. Look at the terminal or "
        "notebook that it was started in"
    )


def _etags(run: Storage) -> dict[int, str]:
    matches = ((LOG.fullmatch(entry.name), entry.etag) for entry in run.list(LOGS))
    return {int(match[1]): etag for match, etag in matches if match}


def _overlap(before: list[str], after: list[str]) -> int:
    """Return how many lines at the beginning of `after` are the end of `before`.

    >>> _overlap(["a", "b", "b"], ["b", "b", "c"])
    2
    """
    longest = min(len(before), len(after))
    return next(n for n in range(longest, -1, -1) if before[len(before) - n :] == after[:n])


def _sections(text: str) -> dict[str, str]:
    """Return {name: lines} of the sections of a log."""
    sections, name = dict[str, str](), ""
    for line in text.splitlines():
        if line.startswith(SECTION):
            name = line.removeprefix(SECTION)
            sections[name] = ""
        elif name:
            sections[name] += f"{line}\n"
    return sections
