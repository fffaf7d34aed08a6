"""The live view of a run as one piece of HTML: no script, so that every notebook shows it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rayapp.config.fields import unit_of
from rayapp.observe.activity import TRAINING
from rayapp.observe.columns import Array, Columns
from rayapp.observe.figures import figures, share_of_waiting
from rayapp.observe.plain import escaped
from rayapp.observe.run_folder import EXIT_CODES, DamagedFile
from rayapp.observe.status import Progress
from rayapp.observe.words import UNKNOWN

if TYPE_CHECKING:
    from rayapp.jobs.handle import Job
    from rayapp.jobs.widget import Widget

POINTS = 240  # drawn of a curve at most; see `thin`
WIDTH, HEIGHT = 420, 140
LEFT, TOP, BOTTOM = 48, 22, 18  # margins of a curve
SMOOTHED_FROM = 30  # points
LEVELS = ("peak_gib",)
Places: TypeAlias = list[tuple[int, float]]
COLORS = {  # of goodput's causes; those of a colour-blind safe palette (Okabe and Ito, 2008)
    "step": "#009e73",
    "start": "#56b4e9",
    "waiting": "#a6761d",
    "data_wait": "#e69f00",
    "checkpoint_stall": "#f0e442",
    "evaluation": "#0072b2",
    "export": "#999999",
    "lost_work": "#d55e00",
    "recovery": "#cc79a7",
    "other": "#dddddd",
}
DAMAGED = "damaged"  # the status of a run with such a file
LOOKING = "<p>looking for the run …</p>"
STYLE = """
.rayapp{font:13px/1.4 system-ui,sans-serif}
.rayapp{max-width:940px}
.rayapp .tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(76px,1fr));gap:6px 14px;
margin:8px 0}.rayapp .tiles b{display:block;font-size:15px;white-space:nowrap}
.rayapp .tiles span,.rayapp small{opacity:.65}
.rayapp .bar{height:8px;border-radius:4px;background:#8884;overflow:hidden;display:flex}
.rayapp .bar i{display:block;height:100%}
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


def show(job: Job, every_s: float) -> str:
    """Redraw the view in its cell every `every_s` seconds until the run ends; return the status."""
    from IPython.display import HTML, display

    handle = display(HTML(LOOKING), display_id=True)
    try:
        while True:
            status, text = drawn(job)
            handle.update(HTML(text))
            if status in EXIT_CODES:
                return status
            time.sleep(every_s)
    except KeyboardInterrupt:
        display(HTML("<p>no longer watched; the run goes on</p>"))
        raise


def show_on(make_job: Callable[[], Job], every_s: float) -> threading.Thread:
    """Start a thread that redraws the view in its cell until the run ends or an error occurs.

    `make_job` returns a new handle. With ipywidgets the view has buttons.
    """
    from IPython.display import HTML, display

    widget = _buttons(make_job, lambda: watch())
    if widget is not None:
        display(widget.box)
    handle = display(HTML(LOOKING), display_id=True)

    def show(status: str, text: str) -> None:
        handle.update(HTML(text))
        if widget is not None:
            widget.saw(status)

    def watch() -> threading.Thread:
        return _drawing(make_job(), every_s, show)

    return watch()


def _buttons(make_job: Callable[[], Job], watch: Callable[[], object]) -> Widget | None:
    try:
        from rayapp.jobs.widget import Widget
    except ImportError:
        return None
    return Widget(make_job, watch)


def _drawing(job: Job, every_s: float, show: Callable[[str, str], None]) -> threading.Thread:
    """Start a thread that calls `show(status, HTML)` until the run has ended."""

    def draw() -> None:
        status = ""
        try:
            while status not in EXIT_CODES:
                if status:
                    time.sleep(every_s)
                status, text = drawn(job)
                show(status, text)
        except Exception as error:  # nothing can catch it outside this thread: show it in the cell
            show(status, f"<p>no longer watched: {escaped(str(error))}</p>")

    thread = threading.Thread(target=draw, name=f"watch {job.name}", daemon=True)
    thread.start()
    return thread


def drawn(job: Job) -> tuple[str, str]:
    """Return the run's status now, and its view as HTML."""
    try:
        status, now, steps = job.snapshot()
        reason = job.reason() if status in EXIT_CODES else None
    except DamagedFile as error:
        return DAMAGED, f"<p>{escaped(str(error))}</p>"
    return status, render(job.name, status, now, steps, reason)


def render(
    name: str,
    status: str,
    now: Progress | None,
    steps: Columns,
    reason: str | None = None,
) -> str:
    """Return the view of a snapshot as HTML."""
    parts = [f"<style>{STYLE}</style><div class='rayapp'><b>{escaped(name)}</b> "]
    parts.append(escaped(status))
    if now is not None:
        done = min(1.0, now.step / now.num_steps) if now.num_steps else 0.0
        parts.append(
            f"<div class='bar' role='progressbar' aria-valuenow='{100 * done:.0f}'>"
            f"<i style='width:{100 * done:.1f}%;background:#0072b2'></i></div>"
        )
        tiles = "".join(
            f"<div><span>{escaped(label)}</span><b>{escaped(value)}</b></div>"
            for label, value in figures(now).items()
            if value != UNKNOWN
        )
        parts.append(f"<div class='tiles'>{tiles}</div>")
        if now.activity is not None and now.activity.phase not in ("", TRAINING):
            parts.append(f"<div>{escaped(now.activity.text(time.time()))}</div>")
        parts.append(_goodput(now))
        reason = reason or now.reason
    if steps.last is not None:
        unit = unit_of(steps.last)
        curves = {
            f"loss ({unit.loss})": [("loss", "#0072b2"), ("eval_loss", "#d55e00")],
            f"{unit.many}/s": [(unit.per_s, "#009e73")],
            "memory (GiB)": [("peak_gib", "#cc79a7")],
            "gradient norm": [("grad_norm", "#e69f00")],
        }
        drawn = "".join(_curve(label, steps, series) for label, series in curves.items())
        parts.append(f"<div class='curves'>{drawn}</div>")
        parts.append(f"<small>{escaped(share_of_waiting(steps))}</small>")
    if reason:
        parts.append(f"<pre>{escaped(reason)}</pre>")
    return "".join(parts) + "</div>"


def _goodput(now: Progress) -> str:
    shares = {cause: share for cause, share in now.account.goodput.items() if share > 0.002}
    blocks = "".join(
        f"<i title='{escaped(cause)} {share:.1%}' style='width:{100 * share:.2f}%;"
        f"background:{COLORS.get(cause, COLORS['other'])}'></i>"
        for cause, share in shares.items()
    )
    words = ", ".join(f"{cause} {share:.0%}" for cause, share in shares.items() if share >= 0.005)
    return f"<div class='bar'>{blocks}</div><small>time: {escaped(words)}</small>"


def _curve(label: str, steps: Columns, series: list[tuple[str, str]]) -> str:
    """Return an SVG of fields of metrics.jsonl over steps, with axes, and values on hover.

    Of a field with many points, the line is smoothed and the values are faint below it; a level
    that only rises is drawn as it is.
    """
    known = {name: points(steps, name, POINTS) for name, _ in series}
    values = [value for places in known.values() for _, value in places]
    if not values:
        return ""
    low, high = min(values), max(values)
    first, last = (int(steps["step"][end]) for end in (0, -1))
    across = (WIDTH - LEFT - 8) / max(1, last - first)
    up = (HEIGHT - TOP - BOTTOM) / ((high - low) or 1.0)

    def place(step: float, value: float) -> tuple[float, float]:
        return LEFT + (step - first) * across, HEIGHT - BOTTOM - (value - low) * up

    parts = []
    for name, color in series:
        places = known[name]
        if len(places) == 1:
            x, y = place(*places[0])
            parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.5' fill='{color}'/>")
        elif len(places) >= SMOOTHED_FROM and name not in LEVELS:
            parts.append(_line(places, color, place, 0.3) + _line(smooth(places), color, place))
        elif places:
            parts.append(_line(places, color, place))
    parts += [_hover(name, known[name], place) for name, _ in series]
    label = escaped(label)
    texts = (
        (4, 13, "start", f"<tspan font-weight='600'>{label}</tspan>"),
        (LEFT - 4, TOP + 4, "end", f"{high:.4g}"),
        (LEFT - 4, HEIGHT - BOTTOM, "end", f"{low:.4g}"),
        (LEFT, HEIGHT - 4, "start", f"step {first:,}"),
        (WIDTH - 4, HEIGHT - 4, "end", f"{last:,}"),
    )
    words = "".join(
        f"<text x='{x}' y='{y}' text-anchor='{anchor}'>{text}</text>"
        for x, y, anchor, text in texts
    )
    edge = f"M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - 4}"
    return (
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' font-size='11' fill='currentColor' "
        f"aria-label='{label} from {low:.4g} to {high:.4g}'>"
        f"<path d='{edge}' fill='none' stroke='currentColor' opacity='.4'/>{words}{''.join(parts)}"
        "</svg>"
    )


def _line(points: Places, color: str, place: Callable[..., Any], opacity: float = 1.0) -> str:
    drawn = " ".join("{:.1f},{:.1f}".format(*place(*pair)) for pair in points)
    return (
        f"<polyline fill='none' stroke='{color}' stroke-width='1.5' opacity='{opacity}' "
        f"points='{drawn}'/>"
    )


def _hover(name: str, points: Places, place: Callable[..., Any]) -> str:
    """Return invisible strips whose tooltip is the value there; no script is needed."""
    if not points:
        return ""
    width = (WIDTH - LEFT) / len(points)
    return "".join(
        f"<rect x='{place(step, value)[0] - width / 2:.1f}' y='{TOP}' width='{width:.1f}' "
        f"height='{HEIGHT - TOP - BOTTOM}' fill='transparent'>"
        f"<title>step {step:,}: {escaped(name)} {value:.5g}</title></rect>"
        for step, value in points
    )


def smooth(points: Places) -> Places:
    """Return the mean around each point, of a tenth of all points, or of fewer near the ends.

    As many points are taken before as after it, so that the line does not lag.

    >>> smooth([(1, 4.0), (2, 1.0), (3, 4.0)])
    [(1, 4.0), (2, 3.0), (3, 4.0)]
    """
    sums = np.cumsum([0.0, *(value for _, value in points)])
    half, last = max(1, len(points) // 20), len(points) - 1
    smoothed = []
    for place, (step, _) in enumerate(points):
        reach = min(half, place, last - place)
        total = sums[place + reach + 1] - sums[place - reach]
        smoothed.append((step, float(total) / (2 * reach + 1)))
    return smoothed


def points(steps: Columns, name: str, most: int) -> list[tuple[int, float]]:
    """Return (step, value) where the value is known, at most so many; see `thin`."""
    values = steps[name]
    known = np.flatnonzero(~np.isnan(values))
    kept = known[thin(values[known], most)]
    return list(zip(steps["step"][kept].astype(int).tolist(), values[kept].tolist(), strict=True))


def thin(values: Array, most: int) -> list[int]:
    """Return at most `most` places: the first, the last, the least and greatest of each stretch.

    >>> thin(np.array([1.0, 9.0, 0.0, 1.0, 1.0, 2.0]), 4)
    [0, 1, 2, 5]
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    kept, stretch = {0, count - 1}, math.ceil((count - 2) / max(1, (most - 2) // 2))
    for start in range(1, count - 1, stretch):
        part = values[start : min(start + stretch, count - 1)]
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    return sorted(kept)
