"""Debian's Chromium without a window, over the DevTools protocol on a pipe: no port, no package.

with Browser() as browser:
    page = browser.open("file:///tmp/report.html", width=390, dark=True)
    page.evaluate("document.title"); page.screenshot(path); page.problems; page.requests
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = "/usr/bin/chromium"
TIMEOUT_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # a container's root has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)

# Whether a report has drawn its charts.
READY = """new Promise(done => { const look = () => document.documentElement.dataset.ready == null
  || window.Bokeh && Bokeh.documents.some(one => !one.is_idle)
  ? setTimeout(look, 20) : done(true); look(); })"""

needs_chromium = pytest.mark.skipif(
    not os.access(CHROMIUM, os.X_OK), reason="Debian's chromium is not installed"
)


class Browser:
    """A browser of our own, with a profile that is thrown away."""

    def __enter__(self) -> Browser:
        self._profile = tempfile.mkdtemp()
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4.
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "-", CHROMIUM, *FLAGS, f"--user-data-dir={self._profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._count, self._buffer = 0, b""
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(timeout=10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)  # its helpers may still write

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Open a page in a tab of its own and wait until it is there."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        phone = width < 600
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[theme])
        page.call("Page.navigate", url=url)
        self._receive(lambda m: m.get("method") == "Page.loadEventFired" and page.owns(m))
        page.settle()
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._receive(lambda message: message.get("id") == number)
        assert "error" not in answer, (method, answer["error"])
        return dict(answer["result"])

    def _receive(self, wanted: Any) -> dict[str, Any]:
        """Return the first message that is wanted, keeping the events before it."""
        until = time.monotonic() + TIMEOUT_S
        while True:
            text, found, rest = self._buffer.partition(b"\0")
            if found:
                self._buffer = rest
                message = json.loads(text)
                if "method" in message:
                    self.events.append(message)
                if wanted(message):
                    return dict(message)
                continue
            left = until - time.monotonic()
            assert left > 0 and select.select([self._in], [], [], left)[0], "the browser is silent"
            data = os.read(self._in, 2**20)
            assert data, "the browser has ended"
            self._buffer += data


class Page:
    """A tab."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def owns(self, message: dict[str, Any]) -> bool:
        return bool(message.get("sessionId") == self._session)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, of a promise what it resolves to."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until two more frames have been drawn."""
        frame = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.evaluate(f"{frame}.then(() => true)")

    def press(self, key: str) -> None:
        """Press a key, on what has the focus."""
        codes = {"Enter": 13, " ": 32, "Tab": 9, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowRight": 39}
        more = {"windowsVirtualKeyCode": codes[key], "key": key, "code": key}
        text = {"Enter": "\r", " ": " "}.get(key)
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", **more, **({"text": text} if text else {})
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **more)
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Save a picture, of the whole page or of what is in view."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    @property
    def problems(self) -> list[str]:
        """What the console has warned of, and every error."""
        found = []
        for event in filter(self.owns, self._browser.events):
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                if params["type"] in ("error", "warning", "assert"):
                    found.append(json.dumps(params["args"]))
            elif event["method"] == "Log.entryAdded":
                found.append(f"{params['entry']['level']}: {params['entry']['text']}")
        return found

    @property
    def requests(self) -> list[str]:
        """The addresses of all that was asked for, the page itself included."""
        return [
            event["params"]["request"]["url"]
            for event in filter(self.owns, self._browser.events)
            if event["method"] == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)


def open_report(browser: Browser, url: str, **how: Any) -> Page:
    """Open a report and wait until its charts are drawn."""
    page = browser.open(url, **how)
    page.evaluate(READY)
    page.settle()
    return page
