"""Check the form of an attempt's log: what is put into it is found again, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.config import ConfigError
from rayapp.observe import attempt_logs
from rayapp.observe.attempt_logs import (
    ERROR_CHARACTERS,
    GOES_ON,
    MOST_ERRORS,
    name_of,
    read,
    render,
)
from rayapp.storage import Storage, open_storage

LINES = st.lists(
    st.one_of(
        st.text("ab \t=", max_size=12), st.sampled_from(["==== rank 1", "==== end", "====\r"])
    )
).map("\n".join)


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


@given(LINES, st.dictionaries(st.integers(0, 3), LINES, max_size=4), LINES)
def test_sections_are_found_again(output: str, errors: dict[int, str], ending: str) -> None:
    """Whatever a program prints, none of it is taken for a section."""
    text = render("head", output, {f"rank {rank}": each for rank, each in errors.items()}, ending)
    firsts = [line for line in text.splitlines() if line.startswith("==== ")]
    ranks = [f"==== rank {rank}" for rank in errors]
    assert firsts == ["==== driver", *ranks, "==== end"]


def test_an_attempt_and_a_rank_are_chosen(run: Storage) -> None:
    for number in (2, 10):
        errors = {"rank 3": f"Connection closed in {number}", "rank 0": "Traceback\nValueError: x"}
        text = render(f"attempt {number}", "step 1\n", errors, "failed")
        run.write(name_of(number), text.encode())
    run.write("logs/attempt-11.txt.bak", b"")
    assert attempt_logs.numbers(run) == [2, 10]
    assert read(run).startswith("attempt 10\n==== driver\nstep 1\n==== rank 3\n")
    assert read(run).endswith("==== rank 0\nTraceback\nValueError: x\n==== end\nfailed\n")
    assert read(run, 2).startswith("attempt 2\n")
    assert read(run, 2, 3) == "Connection closed in 2\n"
    assert read(run, rank=0) == "Traceback\nValueError: x\n"


def test_what_is_not_kept_is_named(run: Storage) -> None:
    with pytest.raises(ConfigError, match=r"has no log: its driver has not stored one"):
        read(run)
    run.write(name_of(3), render("head", "", {"rank 1": "boom"}, "end").encode())
    run.write(name_of(4), render("head", "", {}, "end").encode())
    with pytest.raises(ConfigError, match=r"attempt=9 has no log in .*\. Set one of 3, 4"):
        read(run, 9)
    with pytest.raises(ConfigError, match=r"rank=2 has left no error in attempt 3\. Set one of 1"):
        read(run, 3, 2)
    with pytest.raises(ConfigError, match=r"rank=2 .* attempt 4\. Leave rank out"):
        read(run, 4, 2)


def test_a_log_is_bounded() -> None:
    """The first cause, which comes last, is never what is left out."""
    errors = {f"rank {rank}": f"{rank} " * 30_000 for rank in range(100)}
    text = render("head", "", errors, "end")
    assert len(text) < (MOST_ERRORS + 1) * ERROR_CHARACTERS
    assert "==== rank 99\n" in text and "==== rank 0\n" not in text


def test_a_terminal_is_not_told_anything(run: Storage) -> None:
    """By whoever can write to the folder."""
    run.write(name_of(1), "\x1b]0;title\x07\x1b[2Jgone\x9b31m\x08\n".encode())
    assert read(run) == "gone31m\n"


def test_a_log_is_followed_to_the_end_of_the_run(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored whole each time, without the beginning that was too long to keep."""

    def store(attempt: int, lines: list[str], ending: str) -> None:
        output = "".join(f"{line}\n" for line in lines)
        run.write(name_of(attempt), render("head", output, {}, ending).encode())

    changes = [
        lambda: None,
        lambda: store(1, ["the plan", "step 1"], GOES_ON),
        lambda: store(1, ["the plan", "step 1", "step 2"], GOES_ON),
        lambda: None,
        lambda: store(1, ["step 2", "step 2", "step 3"], GOES_ON),
        lambda: store(1, ["step 2", "step 2", "step 3"], "again in 2 s"),
        lambda: store(2, ["step 1", "step 2"], GOES_ON),
        lambda: store(2, ["step 1", "step 2", "step 3"], "the command ended without an error"),
    ]

    def ended() -> bool:
        changes.pop(0)()
        return not changes

    monkeypatch.setattr(attempt_logs.time, "sleep", lambda _: None)
    texts = list(attempt_logs.follow(run, ended))
    assert texts == [
        "the plan\nstep 1\n",
        "step 2\n",
        "step 2\nstep 3\n",
        "==== end\nagain in 2 s\n",
        "step 1\nstep 2\n",
        "step 3\n==== end\nthe command ended without an error\n",
    ]


def test_a_run_that_leaves_no_log_is_not_followed_in_silence(run: Storage) -> None:
    with pytest.raises(ConfigError, match=r"has no log: .* the terminal or notebook"):
        list(attempt_logs.follow(run, lambda: True))
