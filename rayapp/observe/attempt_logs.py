"""logs/attempt-N.txt: what the driver printed in attempt N of a run, and the dead ranks' errors.

    read(run)                          # the newest
    read(run, attempt=3, rank=1)       # the error of a rank that died in attempt 3
    follow(run, ended)                 # what is added, until the run has ended

The last section says how the attempt ended, the one before it has the error that came first.
Attempt N is the Nth time that the driver started workers; what it printed before is part of it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping

from rayapp.config import ConfigError
from rayapp.observe.plain import plain_text
from rayapp.observe.run_folder import LOGS
from rayapp.storage import Storage

MOST_ERRORS = 16
ERROR_CHARACTERS = 20_000
MARK = "==== "
GOES_ON = "it goes on"  # the end of a log whose attempt has not ended
POLL_S, POLL_S3_S = 1.0, 5.0
NAME = re.compile(rf"{LOGS}/attempt-([1-9][0-9]{{0,8}})\.txt")


def name_of(attempt: int) -> str:
    """Return the name of an attempt's log in the run's folder."""
    return f"{LOGS}/attempt-{attempt}.txt"


def render(head: str, output: str, errors: Mapping[str, str], ending: str) -> str:
    """Return the text of a log; `errors` by the section's name, the first cause last."""
    last = list(errors.items())[-MOST_ERRORS:]
    sections = [("driver", output), *((name, text[-ERROR_CHARACTERS:]) for name, text in last)]
    sections.append(("end", ending))
    return head + "\n" + "".join(f"{MARK}{name}\n{_body(text)}" for name, text in sections)


def _body(text: str) -> str:
    """Return the lines of a section, of which none looks like a section's first line."""
    lines = plain_text(text).splitlines()
    return "".join(f"{' ' if line.startswith(MARK) else ''}{line}\n" for line in lines)


def numbers(run: Storage) -> list[int]:
    """Return the attempts whose logs are kept, in order."""
    matches = (NAME.fullmatch(entry.name) for entry in run.list(LOGS))
    return sorted(int(match[1]) for match in matches if match)


def read(run: Storage, attempt: int | None = None, rank: int | None = None) -> str:
    """Return the log of an attempt, by default the newest, or the error of one of its ranks.

    Raises:
        ConfigError: it is not kept, or no such rank has failed.
    """
    kept = numbers(run)
    if not kept:
        raise ConfigError([_none_of(run)])
    attempt = kept[-1] if attempt is None else attempt
    if attempt not in kept:
        there = ", ".join(map(str, kept))
        raise ConfigError([f"attempt={attempt} has no log in {run.url}. Set one of {there}"])
    text = plain_text(run.read(name_of(attempt)).decode(errors="replace"))
    if rank is None:
        return text
    sections = _sections(text)
    if f"rank {rank}" not in sections:
        failed = ", ".join(name[len("rank ") :] for name in sections if name.startswith("rank "))
        instead = f"Set one of {failed}" if failed else "Leave rank out to see the driver's output"
        raise ConfigError([f"rank={rank} has left no error in attempt {attempt}. {instead}"])
    return sections[f"rank {rank}"]


def follow(run: Storage, ended: Callable[[], bool]) -> Iterator[str]:
    """Yield the newest log, then what is added to it and to later ones, until the run has ended.

    The driver stores a log whole, and only its last part if it is long. Between two looks at S3
    pass POLL_S3_S, elsewhere POLL_S.

    Raises:
        ConfigError: the run has ended and has left no log.
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
            lines = _for_reader(plain_text(run.read(name_of(changed)).decode(errors="replace")))
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
    matches = ((NAME.fullmatch(entry.name), entry.etag) for entry in run.list(LOGS))
    return {int(match[1]): etag for match, etag in matches if match}


def _for_reader(text: str) -> list[str]:
    """Return the lines of a log without its head, and without its end if that is still open."""
    lines = text.partition(f"{MARK}driver\n")[2].splitlines()
    return lines[:-2] if lines[-2:] == [f"{MARK}end", GOES_ON] else lines


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
        if line.startswith(MARK):
            name = line.removeprefix(MARK)
            sections[name] = ""
        elif name:
            sections[name] += f"{line}\n"
    return sections
