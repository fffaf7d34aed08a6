"""Check the form of an attempt's log: what is put into it is found again, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.config import ConfigError
from rayapp.observe import attempts
from rayapp.observe.attempts import (
    ERROR_CHARACTERS,
    GOES_ON,
    MOST_ERRORS,
    log_name,
    read_log,
    render_log,
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
    text = render_log(
        "head", output, {f"rank {rank}": each for rank, each in errors.items()}, ending
    )
    firsts = [line for line in text.splitlines() if line.startswith("==== ")]
    ranks = [f"==== rank {rank}" for rank in errors]
    assert firsts == ["==== driver", *ranks, "==== end"]


def test_an_attempt_and_a_rank_are_chosen(run: Storage) -> None:
    for number in (2, 10):
        errors = {"rank 3": f"Connection closed in {number}", "rank 0": "Traceback\nValueError: x"}
        text = render_log(f"attempt {number}", "step 1\n", errors, "failed")
        run.write(log_name(number), text.encode())
    run.write("logs/attempt-11.txt.bak", b"")
    assert attempts.logged(run) == [2, 10]
    assert read_log(run).startswith("attempt 10\n==== driver\nstep 1\n==== rank 3\n")
    assert read_log(run).endswith("==== rank 0\nTraceback\nValueError: x\n==== end\nfailed\n")
    assert read_log(run, 2).startswith("attempt 2\n")
    assert read_log(run, 2, 3) == "Connection closed in 2\n"
    assert read_log(run, rank=0) == "Traceback\nValueError: x\n"


def test_what_is_not_kept_is_named(run: Storage) -> None:
    with pytest.raises(ConfigError, match=r"has no log: its driver has not stored one"):
        read_log(run)
    run.write(log_name(3), render_log("head", "", {"rank 1": "boom"}, "end").encode())
    run.write(log_name(4), render_log("head", "", {}, "end").encode())
    with pytest.raises(ConfigError, match=r"attempt=9 has no log in .*\. Set one of 3, 4"):
        read_log(run, 9)
    with pytest.raises(ConfigError, match=r"rank=2 has left no error in attempt 3\. Set one of 1"):
        read_log(run, 3, 2)
    with pytest.raises(ConfigError, match=r"rank=2 .* attempt 4\. Leave rank out"):
        read_log(run, 4, 2)


def test_a_log_is_bounded() -> None:
    """The first cause, which comes last, is never what is left out."""
    errors = {f"rank {rank}": f"{rank} " * 30_000 for rank in range(100)}
    text = render_log("head", "", errors, "end")
    assert len(text) < (MOST_ERRORS + 1) * ERROR_CHARACTERS
    assert "==== rank 99\n" in text and "==== rank 0\n" not in text


def test_a_terminal_is_not_told_anything(run: Storage) -> None:
    """By whoever can write to the folder."""
    run.write(log_name(1), "\x1b]0;title\x07\x1b[2Jgone\x9b31m\x08\n".encode())
    assert read_log(run) == "gone31m\n"


def test_a_log_is_followed_to_the_end_of_the_run(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored whole each time, without the beginning that was too long to keep."""

    def store(attempt: int, lines: list[str], ending: str) -> None:
        output = "".join(f"{line}\n" for line in lines)
        run.write(log_name(attempt), render_log("head", output, {}, ending).encode())

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

    monkeypatch.setattr(attempts.time, "sleep", lambda _: None)
    texts = list(attempts.follow_log(run, ended))
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
        list(attempts.follow_log(run, lambda: True))
