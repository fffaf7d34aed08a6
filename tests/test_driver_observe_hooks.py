"""What hooks are told, in which order, and that they end nothing."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rayapp.config import ConfigError, load
from rayapp.driver import observe
from rayapp.driver.observe import Hooks, opened


class Told:
    """A hook that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_step(self, line: Any) -> None:
        self.calls.append(("step", line["step"]))

    def on_checkpoint(self, step: int, url: str) -> None:
        self.calls.append(("checkpoint", step, url))

    def on_end(self, result: Any) -> None:
        self.calls.append(("end", result["status"]))


def test_calls_come_in_their_order_and_none_after_the_end() -> None:
    told = Told()
    known = Hooks([told])
    known.call("on_step", {"step": 3})
    known.call("on_checkpoint", 3, "url")
    known.call("on_step", {"step": 4})
    known.end({"status": "done"})
    known.call("on_step", {"step": 5})
    assert told.calls == [("step", 3), ("checkpoint", 3, "url"), ("step", 4), ("end", "done")]


def test_an_error_of_a_hook_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def on_step(self, line: Any) -> None:
            raise ZeroDivisionError("mine")

    told = Told()
    known = Hooks([Broken(), told])
    known.call("on_step", {"step": 1})
    known.call("on_step", {"step": 2})
    known.end({"status": "failed", "reason": "x"})
    assert told.calls == [("step", 1), ("step", 2), ("end", "failed")]
    assert caplog.text.count("Broken.on_step failed") == 2 and "mine" in caplog.text


def test_a_hook_that_hangs_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observe, "HOOKS_CLOSE_S", 0.2)
    release = threading.Event()

    class Slow:
        def on_end(self, result: Any) -> None:
            release.wait(30.0)

    known = Hooks([Slow()])
    known.end({"status": "done"})
    assert "are left" in caplog.text
    known.end({"status": "done"})  # the second call waits for nothing
    release.set()


def test_hooks_are_made_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "hooks_here.py").write_text(
        "class Good:\n"
        "    def __init__(self, config, run): self.known = (config.run.name, run)\n"
        "    def on_end(self, result): pass\n"
        "def nothing(config, run): return object()\n"
        "def broken(config, run): raise ValueError('no room')\n"
    )
    config = load(None, {"run.hooks": "hooks_here:Good", "run.name": "a"})
    (good,) = opened(config, "s3://b/a")
    assert good.known == ("a", "s3://b/a")  # type: ignore[attr-defined]
    config = load(None, {"run.hooks": "hooks_here:nothing,hooks_here:broken,hooks_here:absent"})
    with pytest.raises(ConfigError) as refused:
        opened(config, "runs/a")
    first, second, third = refused.value.problems
    assert "hooks_here:nothing is without effect" in first
    assert "hooks_here:broken failed" in second and "no room" in second
    assert "hooks_here:absent cannot be imported" in third
