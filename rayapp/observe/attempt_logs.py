"""logs/attempt-N.txt: what the driver printed in attempt N of a run, and the dead ranks' errors.

    read(run)                          # the newest
    read(run, attempt=3, rank=1)       # the error of a rank that died in attempt 3

The last section says how the attempt ended, the one before it has the error that came first.
Attempt N is the Nth time that the driver started workers; what it printed before is part of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rayapp.config import ConfigError
from rayapp.observe.run_folder import LOGS
from rayapp.storage import Storage

MOST_ERRORS = 16
ERROR_CHARACTERS = 20_000
MARK = "==== "
NAME = re.compile(rf"{LOGS}/attempt-([1-9][0-9]{{0,8}})\.txt")
# Escape sequences of terminals (colours, cursor, titles), and other control characters.
CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def name_of(attempt: int) -> str:
    """Return the name of an attempt's log in the run's folder."""
    return f"{LOGS}/attempt-{attempt}.txt"


def plain_text(text: str) -> str:
    """Remove what a terminal would act on; tabs and line ends stay.

    >>> plain_text("\\x1b[31mred\\x1b[0m\\x1b]0;title\\x07\\ta\\r\\n")
    'red\\ta\\n'
    """
    return CONTROL.sub("", text)


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
    found = (NAME.fullmatch(entry.name) for entry in run.list(LOGS))
    return sorted(int(match[1]) for match in found if match)


def read(run: Storage, attempt: int | None = None, rank: int | None = None) -> str:
    """Return the log of an attempt, by default the newest, or the error of one of its ranks.

    Raises:
        ConfigError: it is not kept, or no such rank has failed.
    """
    kept = numbers(run)
    if not kept:
        raise ConfigError([f"run={run.url} has no log: no command of it has ended yet"])
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
