"""Write the report: one HTML file that loads nothing else.

Text that a run has written is escaped everywhere (Jinja2's autoescape, and JSON without `<`). In
addition, the page's Content-Security-Policy allows only the page's own scripts, by their SHA-256
digests, and no connections. Styles are not named by digest: BokehJS makes some as it draws.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rayapp.config import ConfigError
from rayapp.observe import words
from rayapp.observe.plain import redacted
from rayapp.observe.run_folder import REPORT, DamagedFile
from rayapp.report import comparison, tables, timeline
from rayapp.report.chart import AREA, BUCKETS, DOTS, FAINT, Chart, ChartLine
from rayapp.report.charts import charts_of
from rayapp.report.folder import ReportedRun, read
from rayapp.storage import Storage, StorageError, open_storage

PAGE = Path(__file__).parent / "page"
STYLE, SCRIPTS = "page.css", ("text.js", "curve.js", "page.js")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
DASHES: tuple[list[int], ...] = ([], [9, 4], [2, 3], [9, 3, 2, 3])
HEIGHT, WIDE_HEIGHT = 260, 330

logger = logging.getLogger("rayapp.report")


def write(run: Storage, out: str | None = None) -> str:
    """Write the report of a run to its folder, or to the file `out`; return its path or URL.

    Raises:
        NoRun: nothing in this folder is a run's.
        StorageError: it cannot be read or written.
    """
    page = run_page(read(run))
    if out is not None:
        return _save(page, out)
    run.write(REPORT, page)
    return f"{run.url}/{REPORT}"


def compare(runs: Sequence[Storage], out: str) -> str:
    """Write one page of several runs to the file `out`; return its path or URL.

    Raises:
        ConfigError: they are not of one kind.
        NoRun: one of the folders holds no run.
        StorageError: one cannot be read, or the page not be written.
    """
    reported = [read(run) for run in runs]
    kinds = {run.unit.many for run in reported}
    if len(kinds) > 1:
        line = f"RUN is of two kinds: these runs are counted in {' and '.join(sorted(kinds))}. "
        raise ConfigError([f"{line}Compare runs of one kind"])
    names = [run.name for run in reported]
    told_apart = [  # runs of one name have the last two parts of their folders
        replace(run, name="/".join(run.url.rstrip("/").split("/")[-2:]))
        if names.count(run.name) > 1
        else run
        for run in reported
    ]
    return _save(comparison_page(told_apart), out)


def write_for(run: Storage) -> None:
    """Write the report of a run that has just ended; log a warning if that fails."""
    try:
        logger.info("report in %s", write(run))
    except (DamagedFile, StorageError) as error:
        logger.warning("the report is not written: %s", error)


def _save(page: bytes, out: str) -> str:
    folder, _, name = out.replace("\\", "/").rpartition("/")
    storage = open_storage(folder or ("/" if out.startswith("/") else "."))
    storage.write(name, page)
    return f"{storage.url.rstrip('/')}/{name}"


def run_page(run: ReportedRun) -> bytes:
    """Return a run's report.html."""
    return _page("run.html", [run])


def comparison_page(runs: Sequence[ReportedRun]) -> bytes:
    """Return the page that compares runs."""
    return _page("runs.html", runs)


def _page(name: str, runs: Sequence[ReportedRun]) -> bytes:
    import bokeh  # takes a second

    drawn = charts_of(runs)
    static = Path(bokeh.__file__).parent / "server" / "static" / "js"
    sources = [static / "bokeh.min.js"] if drawn else []
    scripts = [_text(each, "</script") for each in [*sources, *(PAGE / own for own in SCRIPTS)]]
    data = {
        "charts": [chart.spec() for chart in drawn],
        "unit": runs[0].unit.many,
        "steps": max(run.num_lines for run in runs),
        "recent": [run.num_recent for run in runs],
        "name": "comparison" if len(runs) > 1 else runs[0].name,
        **document(drawn),
    }
    template = environment().get_template(name)
    page = template.render(
        run=runs[0],
        runs=runs,
        charts=drawn,
        unit=runs[0].unit,
        data=data,
        style=_text(PAGE / STYLE, "</style"),
        scripts=scripts,
        policy=_policy(scripts),
        most_steps=max(run.num_lines for run in runs),
        buckets=BUCKETS,
        version=version("rayapp"),
        bokeh=bokeh.__version__,
        written=words.moment(time.time()),
    )
    return page.encode(errors="replace")


def _policy(scripts: Sequence[str]) -> str:
    """Return a Content-Security-Policy that allows these scripts, own styles, and data: images."""
    digests = (hashlib.sha256(text.encode()).digest() for text in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


@cache
def _text(path: Path, end: str) -> Markup:
    """Return a file to embed in an element, which must not hold the element's closing tag."""
    text = path.read_text(encoding="utf-8").strip()
    assert end not in text.lower() and "<!--" not in text, f"{path} would end its own element"
    return Markup(text)


@cache
def environment() -> Environment:
    """Return the templates of page/; those of pages escape what they show."""
    environment = Environment(
        loader=FileSystemLoader(PAGE),
        autoescape=lambda name: str(name).endswith(".html"),
        finalize=lambda value: redacted(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {"number": words.number, "duration": words.duration}
    environment.filters["quoted"] = partial(json.dumps, ensure_ascii=False)  # a Python literal too
    modules = (comparison, tables, timeline, words)
    environment.globals |= {each.__name__.rpartition(".")[2]: each for each in modules}
    return environment


# ---- What BokehJS draws -----------------------------------------------------------------------


def document(charts: Sequence[Chart]) -> dict[str, Any]:
    """Return a document of figures without data, which page.js fills, and the id of each figure.

    Figures and the parts of one have names: `loss`, `loss/0` (a line), `loss/mark/0`. All have one
    x range, so that a zoom is one of all.
    """
    from bokeh.document import Document
    from bokeh.models import Range1d

    made, across = Document(), Range1d(name="across")
    roots = {}
    for chart in charts:
        plot = _figure(chart, across)
        made.add_root(plot)
        roots[chart.id] = plot.id
    return {"document": made.to_json(deferred=False), "roots": roots}


def _figure(chart: Chart, across: Any) -> Any:
    from bokeh import models
    from bokeh.plotting import figure

    plot = figure(
        name=chart.id,
        height=WIDE_HEIGHT if chart.wide else HEIGHT,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools=[models.BoxZoomTool(dimensions="width")],
        x_range=across,
        y_range=models.Range1d(),
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_top=8,
        min_border_right=16,
        min_border_bottom=4,
        min_border_left=64,
        lod_threshold=None,
    )
    texts, lines = ("axis_label", "major_label"), ("major_tick", "minor_tick", "axis")
    for name, axis in zip("xy", plot.axis, strict=True):
        axis.update(
            name=f"{chart.id}/{name}",
            ticker=models.FixedTicker(),
            axis_label=" ",
            axis_label_text_font_style="normal",
            axis_label_standoff=6,
            **{f"{part}_text_font": FONT for part in texts},
            **{f"{part}_text_font_size": "12px" for part in texts},
            **{f"{part}_line_color": None for part in lines},
        )
    plot.xgrid.grid_line_color = None
    plot.ygrid.name = f"{chart.id}/rule"
    for number, mark in enumerate(chart.marks):
        name = f"{chart.id}/mark/{number}"
        planned = {"location": mark.value, "dimension": "width", "line_dash": [4, 4]}
        style = {"text_font": FONT, "text_font_size": "11px", "text_align": "right", "x_offset": -4}
        for part in (
            models.BoxAnnotation(name=f"{name}/band", level="underlay", line_color=None),
            models.Span(name=f"{name}/line", **planned),
            models.Label(name=f"{name}/label", text=mark.label, x=0, y=mark.value, **style),
        ):
            plot.add_layout(part)
    for number, line in enumerate(chart.lines):
        name = f"{chart.id}/{number}"
        for renderer in _drawn(plot, name, line):
            renderer.tags = [name]
    return plot


def _drawn(plot: Any, name: str, line: ChartLine) -> list[Any]:
    from bokeh.models import ColumnDataSource

    if line.role == AREA:
        source = ColumnDataSource({"x": [], "y1": [], "y2": []}, name=name)
        return [plot.varea("x", "y1", "y2", source=source)]
    source = ColumnDataSource({"x": [], "y": []}, name=name)
    style: dict[str, Any] = {"line_width": 2, "line_dash": DASHES[line.dash % 4]}
    points: dict[str, Any] = {"size": 6, "line_color": None}
    places = source
    if line.role == FAINT:
        style = {"line_width": 1, "line_alpha": 0.4}
    if line.role == DOTS:
        style, points = {"line_width": 1, "line_dash": [3, 4]}, {"size": 8, "line_width": 2}
    else:
        places = ColumnDataSource({"x": [], "y": []}, name=f"{name}/lone")
    return [
        plot.line("x", "y", source=source, line_join="round", **style),
        plot.scatter("x", "y", source=places, **points),
    ]
