"""The live view of a run in a notebook: HTML without a script, which a saved notebook keeps.

With ipywidgets it has buttons beside it: Stop, Resume, Logs and Report.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rayapp.config.fields import unit_of
from rayapp.observe.activity import TRAINING
from rayapp.observe.columns import Columns
from rayapp.observe.figures import figures, label, share_of_waiting
from rayapp.observe.plain import escaped
from rayapp.observe.run_folder import DONE, EXIT_CODES, DamagedFile
from rayapp.observe.status import Progress
from rayapp.observe.words import UNKNOWN
from rayapp.report.chart import svg

if TYPE_CHECKING:
    from rayapp.jobs.handle import Job

LOG_LINES = 60
REPORT_HEIGHT = 720  # pixels
DAMAGED = "damaged"  # the status of a run with such a file
LOOKING = "<p>looking for the run …</p>"
STYLE = """
.rayapp{font:13px/1.4 system-ui,sans-serif}
.rayapp{max-width:940px}
.rayapp .tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(76px,1fr));gap:6px 14px;
margin:8px 0}.rayapp .tiles b{display:block;font-size:15px;white-space:nowrap}
.rayapp .tiles span,.rayapp small{opacity:.65}
.rayapp .bar{height:8px;border-radius:4px;background:#8884;overflow:hidden}
.rayapp .bar i{display:block;height:100%;background:#0072b2}
.rayapp .curves{display:grid;gap:14px;margin-top:10px;
grid-template-columns:repeat(auto-fill,minmax(max(240px,calc(50% - 7px)),1fr))}
.rayapp svg{background:#8881;border-radius:4px;width:100%}
"""


def in_notebook() -> bool:
    """Say whether this process is a notebook's kernel."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def show_on(make_job: Callable[[], Job], every_s: float) -> threading.Thread:
    """Start a thread that redraws the view in its cell until the run ends or an error occurs.

    `make_job` returns a new handle. With ipywidgets the view has buttons.
    """
    from IPython.display import HTML, display

    try:
        buttons = Buttons(make_job, lambda: watch())
        display(buttons.box)
    except ImportError:
        buttons = None
    handle = display(HTML(LOOKING), display_id=True)

    def show(status: str, text: str) -> None:
        handle.update(HTML(text))
        if buttons is not None:
            buttons.saw(status)

    def draw(job: Job) -> None:
        try:
            status = ""
            while status not in EXIT_CODES:
                time.sleep(every_s if status else 0.0)
                status, text = drawn(job)
                show(status, text)
        except Exception as error:  # nothing can catch it outside this thread: show it in the cell
            show("", f"<p>no longer watched: {escaped(str(error))}</p>")

    def watch() -> threading.Thread:
        job = make_job()
        thread = threading.Thread(target=draw, args=[job], name=f"watch {job.name}", daemon=True)
        thread.start()
        return thread

    return watch()


def drawn(job: Job) -> tuple[str, str]:
    """Return the run's status now, and its view as HTML."""
    try:
        status, now, steps = job.snapshot()
        reason = job.reason() if status in EXIT_CODES else None
    except DamagedFile as error:
        return DAMAGED, f"<p>{escaped(str(error))}</p>"
    return status, render(job.name, status, now, steps, reason)


def render(
    name: str, status: str, now: Progress | None, steps: Columns, reason: str | None = None
) -> str:
    """Return the view of a snapshot as HTML."""
    parts = [f"<style>{STYLE}</style><div class='rayapp'><b>{escaped(name)}</b> {escaped(status)}"]
    if now is not None:
        done = 100 * min(1.0, now.step / now.num_steps) if now.num_steps else 0.0
        parts.append(
            f"<div class='bar' role='progressbar' aria-valuenow='{done:.0f}'>"
            f"<i style='width:{done:.1f}%'></i></div>"
        )
        tiles = "".join(
            f"<div><span>{escaped(what)}</span><b>{escaped(value)}</b></div>"
            for what, value in figures(now).items()
            if value != UNKNOWN
        )
        parts.append(f"<div class='tiles'>{tiles}</div>")
        if now.activity is not None and now.activity.phase not in ("", TRAINING):
            parts.append(f"<div>{escaped(now.activity.text(time.time()))}</div>")
        shares = now.account.goodput.items()
        spent = ", ".join(f"{cause} {share:.0%}" for cause, share in shares if share >= 0.005)
        parts.append(f"<small>time: {escaped(spent)}</small>")
        reason = reason or now.reason
    if steps.last is not None:
        unit = unit_of(steps.last)
        loss, at = f"loss ({unit.loss})", steps["step"]
        charts = {loss: ("loss", "eval_loss"), label(unit.per_s): (unit.per_s,)}
        charts |= {"memory (GiB)": ("peak_gib",), label("grad_norm"): ("grad_norm",)}
        parts.append("<div class='curves'>")
        for title, names in charts.items():
            parts.append(svg(title, {label(name): (at, steps[name]) for name in names}))
        parts.append("</div>")
        parts.append(f"<small>{escaped(share_of_waiting(steps))}</small>")
    if reason:
        parts.append(f"<pre>{escaped(reason)}</pre>")
    return "".join(parts) + "</div>"


class Buttons:
    """A row of buttons, and room for what they show; each works in a thread of its own."""

    def __init__(self, make_job: Callable[[], Job], watch: Callable[[], object]) -> None:
        """`make_job` returns a new handle; `watch()` starts to draw the view again.

        Raises:
            ImportError: ipywidgets is not installed.
        """
        import ipywidgets

        self._make_job, self._watch = make_job, watch
        self.below = ipywidgets.HTML()
        self._shown = ""  # which button's text is below
        self.buttons: dict[str, Any] = {}
        for name, act, tooltip in (
            ("Stop", self._stop, "save a checkpoint and end the run; the same command resumes it"),
            ("Resume", self._resume, "submit the run again, from its newest checkpoint on"),
            ("Logs", self._logs, "show or hide the end of the driver's output"),
            ("Report", report, "show or hide the report of the run as it is"),
        ):
            self.buttons[name] = ipywidgets.Button(description=name, tooltip=tooltip)
            self.buttons[name].on_click(self._in_thread(name, act))
        bar = ipywidgets.HBox(list(self.buttons.values()))
        self.box = ipywidgets.VBox([bar, self.below])

    def saw(self, status: str) -> None:
        """Enable the buttons that make sense in this status."""
        ended = status in EXIT_CODES
        self.buttons["Stop"].disabled = ended
        self.buttons["Resume"].disabled = not ended or status == DONE

    def _in_thread(self, name: str, act: Callable[[Job], str]) -> Callable[[Any], None]:
        def work() -> None:
            try:
                text = act(self._make_job())
            except Exception as error:  # nothing can catch it outside this thread: show it
                text = f"<p>{escaped(str(error))}</p>"
            self.below.value = text
            self.buttons[name].disabled = False

        def clicked(button: Any) -> None:
            hides = self._shown == name and name in ("Logs", "Report")
            self._shown = "" if hides else name
            if hides:
                self.below.value = ""
                return
            button.disabled = True
            threading.Thread(target=work, name=f"button {name}", daemon=True).start()

        return clicked

    def _stop(self, job: Job) -> str:
        job.stop(wait_s=0)
        return "<p>the run saves a checkpoint and ends</p>"

    def _resume(self, job: Job) -> str:
        lines: list[str] = []
        job.resume(say=lines.append)
        self._watch()
        return f"<p>{escaped(' '.join(lines))}</p>"

    def _logs(self, job: Job) -> str:
        text = escaped("\n".join(job.logs().splitlines()[-LOG_LINES:]))
        return f"<pre style='max-height:360px;overflow:auto'>{text}</pre>"


def report(job: Job) -> str:
    """Return the run's report in a frame that may run scripts and is of no origin."""
    from rayapp.report.folder import read
    from rayapp.report.pages import run_page

    page = escaped(run_page(read(job.run)).decode())
    return (
        f"<iframe sandbox='allow-scripts allow-downloads' srcdoc=\"{page}\" "
        f"style='width:100%;height:{REPORT_HEIGHT}px;border:0'></iframe>"
    )
