"""Check that data and run folders act on no terminal, whatever prints them."""

from __future__ import annotations

import ast
import io
import logging
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console
from rich.live import Live
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text
from run_folders import RunFolder

from rayapp import generation
from rayapp.__main__ import main
from rayapp.driver.output import captured
from rayapp.jobs import terminal
from rayapp.jobs.handle import Job
from rayapp.observe.attempts import log_name
from rayapp.observe.plain import Console, PlainStream, escaped, plain_output, plain_text
from rayapp.storage import open_storage

ROOT = Path(__file__).parent.parent
CLIPBOARD = "\x1b]52;c;aGVsbG8=\x1b\\"
ODD = f"a{CLIPBOARD}b\x1b]0;title\x07\x1b[2J\x1b[31mc\x9b32m\x85\x08\x7f\rd\te\ud800\nf"
PLAIN = "abc32md\te\nf"


class Screen(io.StringIO):
    """What a terminal is sent."""

    def isatty(self) -> bool:
        return True


@contextmanager
def screened() -> Iterator[Screen]:
    """Print on a screen; not a fixture, since pytest replaces the streams after those."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        shown = Screen()
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, shown)
        with plain_output():
            yield shown


def test_a_text_is_plain() -> None:
    assert plain_text(ODD) == PLAIN
    assert escaped(f"<b>{CLIPBOARD}") == "&lt;b&gt;"
    assert plain_text("\x1b" * 100_000 + "\x1b]" * 100_000) == "]" * 100_000


def test_what_python_prints_is_plain() -> None:
    with screened() as screen, captured() as tail:
        print(ODD, end="", flush=True)
        print(ODD, file=sys.stderr, end="")
        sys.stdout.writelines([ODD, ODD])
        logging.lastResort.emit(logging.makeLogRecord({"msg": "%s", "args": (ODD,)}))
        logging.StreamHandler().emit(logging.makeLogRecord({"msg": ODD}))
    assert screen.getvalue() == PLAIN * 5 + f"\n{PLAIN}\n" and PLAIN.split("\n")[1] in tail.text()


def test_what_is_streamed_in_pieces_is_plain() -> None:
    model: Any = SimpleNamespace(stream=lambda *_: iter(ODD))
    with screened() as screen:
        generation.talk(model, SimpleNamespace(prompt="x"))
    assert screen.getvalue() == "a]52;c;aGVsbG8=\\b]0;title[2J[31mc32md\te\nf\n"


def test_what_rich_prints_has_its_own_codes_alone() -> None:
    table = Table("x")
    table.add_row(Text(ODD, style="bold"))
    with screened() as screen:
        console = Console()
        for what in (Text(ODD, style="bold red"), table, ODD, f"[link=http://x]{ODD}[/link]"):
            console.print(what, markup=isinstance(what, str))
        with Live(Text(ODD), console=console, auto_refresh=False) as live:
            live.update(Text(f"live {ODD}"), refresh=True)
            print(ODD)
        with Progress(TextColumn("{task.description}"), console=console) as bar:
            bar.add_task(ODD)
    shown = screen.getvalue()
    for code in (CLIPBOARD, "\x1b]", "\x07", "\x1b[2J", "\x9b", "\x08", "\x85", "http", "\ud800"):
        assert code not in shown, repr(code)
    assert "\x1b[1;31m" in shown and "\x1b[2K" in shown  # its colours, and its redrawing


def test_a_bar_that_is_redrawn_stays_a_line_on_a_terminal() -> None:
    stream = PlainStream(shown := Screen())
    for text in ("\r10%", "\r20%", "\n", "\r5%", " of", "\rx"):
        stream.write(text)
    assert shown.getvalue() == "\r10%\r20%\n\r5% ofx"
    PlainStream(piped := io.StringIO()).write("\r10%")
    assert piped.getvalue() == "10%"


def test_an_error_that_passes_is_printed_plain_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    before = sys.stdout
    with plain_output():
        assert sys.stdout is not before
    assert sys.stdout is before
    with pytest.raises(ValueError, match="b"), plain_output():
        raise ValueError(ODD)
    sys.__excepthook__(ValueError, ValueError(ODD), None)
    monkeypatch.setattr(sys, "stdout", before)
    assert shown.getvalue() == f"ValueError: {PLAIN}\n"


@pytest.fixture
def odd(tmp_path: Path) -> RunFolder:
    """A run whose texts hold control characters and rich's markup."""
    run = RunFolder(open_storage(str(tmp_path)), "odd", 9)
    run.plan()
    run.events[0] |= {"user": f"[/red]{CLIPBOARD}", "commit": CLIPBOARD, "command": CLIPBOARD}
    run.train(3)
    run.end("failed", f"[/bold]{ODD.replace(chr(0xD800), '')}")
    run.run.write(log_name(1), f"==== driver\n{CLIPBOARD}said\n".encode())
    return run


def test_a_run_prints_no_codes(odd: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    where = odd.run.url.rpartition("/")[0]
    for words in (
        ["list", f"--storage={where}"],
        ["status", odd.run.url],
        ["watch", odd.run.url],
        ["logs", odd.run.url],
        ["du", f"--storage={where}"],
        ["rm", odd.run.url, "--dry_run"],
        ["report", odd.run.url],
        ["plan", f"--{CLIPBOARD}=x"],
        [CLIPBOARD],
    ):
        main(words)
        told = capsys.readouterr()
        assert not set(told.out + told.err) & set("\x1b\x07\x9b\r"), words
        assert told.out or told.err
    assert "[/red]" in (main(["list", f"--storage={where}"]), capsys.readouterr().out)[1]
    console = Console(file=(screen := Screen()), force_terminal=True)
    terminal.show(Job(odd.run.url), console=console)
    assert "\x1b]" not in screen.getvalue() and "\x1b[1m" in screen.getvalue()


def test_a_terminal_is_shown_colours_and_no_codes_of_a_run(odd: RunFolder) -> None:
    """Of the command as users start it."""
    ours, theirs = pty.openpty()
    shown = list[bytes]()

    def read() -> None:
        while True:
            try:
                shown.append(os.read(ours, 4096))
            except OSError:  # closed at the other side
                return

    reader = threading.Thread(target=read)
    reader.start()
    command = [sys.executable, "-m", "rayapp", "status", odd.run.url]
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, stdout=theirs, stderr=theirs, env=environment, check=False)
    os.close(theirs)
    reader.join(10)
    os.close(ours)
    text = b"".join(shown)
    assert b"\x1b[1modd\x1b[0m" in text and b"failed" in text
    assert b"\x1b]" not in text and b"\x1b[2J" not in text and b"\x07" not in text


def test_no_other_console_prints() -> None:
    made = set()
    for path in sorted((ROOT / "rayapp").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        if any(ast.unparse(call.func) == "Console" for call in calls):
            ours = re.search(
                r"from rayapp\.observe\.plain import (\w+, )*Console\b(?! as)", text, re.MULTILINE
            )
            made |= set() if ours else {str(path.relative_to(ROOT))}
    assert made == set()
    assert issubclass(Console, rich.console.Console)
