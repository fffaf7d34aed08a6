"""The buttons of the live view, by ipywidgets: Stop, Resume, Logs and Report.

The view itself is plain HTML beside them, which a saved notebook keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets

from rayapp.observe.plain import escaped
from rayapp.observe.run_folder import DONE, EXIT_CODES

if TYPE_CHECKING:
    from rayapp.jobs.handle import Job

LOG_LINES = 60
REPORT_HEIGHT = 720  # pixels


class Widget:
    """A row of buttons, and room for what they show; each works in a thread of its own."""

    def __init__(self, make_job: Callable[[], Job], watch: Callable[[], object]) -> None:
        """`make_job` returns a new handle; `watch()` starts to draw the view again."""
        self._make_job, self._watch = make_job, watch
        self.below = ipywidgets.HTML()
        self._shown = ""  # which button's text is below
        self.buttons = {
            name: ipywidgets.Button(description=name, tooltip=tooltip)
            for name, tooltip in {
                "Stop": "save a checkpoint and end the run; the same command resumes it",
                "Resume": "submit the run again: it goes on from its newest checkpoint",
                "Logs": "show or hide the end of the driver's output",
                "Report": "show or hide the report of the run as it is",
            }.items()
        }
        for name, act in {
            "Stop": self._stop,
            "Resume": self._resume,
            "Logs": self._logs,
            "Report": self._report,
        }.items():
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
        lines = job.logs().splitlines()[-LOG_LINES:]
        text = escaped("\n".join(lines))
        return f"<pre style='max-height:360px;overflow:auto'>{text}</pre>"

    def _report(self, job: Job) -> str:
        from rayapp.report.folder import read
        from rayapp.report.render import run_page

        page = escaped(run_page(read(job.run)).decode())
        return (
            f"<iframe sandbox='allow-scripts allow-downloads' srcdoc=\"{page}\" "
            f"style='width:100%;height:{REPORT_HEIGHT}px;border:0'></iframe>"
        )
