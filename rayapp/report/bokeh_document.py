"""The charts as BokehJS draws them: a document without data, which page.js fills, and its script.

Figures and the parts of one have names: `loss`, `loss/0` (a line), `loss/mark/0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bokeh
from bokeh.document import Document
from bokeh.models import (
    BoxAnnotation,
    BoxZoomTool,
    ColumnDataSource,
    FixedTicker,
    GlyphRenderer,
    Label,
    Plot,
    Range1d,
    Span,
)
from bokeh.plotting import figure

from rayapp.report.chart import AREA, DOTS, FAINT, Chart, ChartLine

SCRIPT = Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"
VERSION = bokeh.__version__
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
DASHES: tuple[list[int], ...] = ([], [9, 4], [2, 3], [9, 3, 2, 3])
HEIGHT, WIDE_HEIGHT = 260, 330


def document(charts: Sequence[Chart]) -> dict[str, Any]:
    """Return the document of some charts as JSON, and the id of each chart's figure.

    All charts have one x range, so that a zoom is one of all.
    """
    made, across = Document(), Range1d(name="across")
    roots = {}
    for chart in charts:
        plot = _figure(chart, across)
        made.add_root(plot)
        roots[chart.id] = plot.id
    return {"document": made.to_json(deferred=False), "roots": roots}


def _figure(chart: Chart, across: Range1d) -> Plot:
    plot = figure(
        name=chart.id,
        height=WIDE_HEIGHT if chart.wide else HEIGHT,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools=[BoxZoomTool(dimensions="width")],
        x_range=across,
        y_range=Range1d(),
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_top=8,
        min_border_right=16,
        min_border_bottom=4,
        min_border_left=64,
        lod_threshold=None,
    )
    for name, axis in zip("xy", plot.axis, strict=True):
        axis.update(
            name=f"{chart.id}/{name}",
            ticker=FixedTicker(),
            axis_label=" ",
            axis_label_text_font_style="normal",
            axis_label_standoff=6,
            **{f"{part}_text_font": FONT for part in ("axis_label", "major_label")},
            **{f"{part}_text_font_size": "12px" for part in ("axis_label", "major_label")},
            **{f"{part}_line_color": None for part in ("major_tick", "minor_tick", "axis")},
        )
    plot.xgrid.grid_line_color = None
    plot.ygrid.name = f"{chart.id}/rule"
    for number, mark in enumerate(chart.marks):
        name = f"{chart.id}/mark/{number}"
        plot.add_layout(BoxAnnotation(name=f"{name}/band", level="underlay", line_color=None))
        planned = {"location": mark.value, "dimension": "width", "line_dash": [4, 4]}
        plot.add_layout(Span(name=f"{name}/line", **planned))
        style = {"text_font": FONT, "text_font_size": "11px", "text_align": "right"}
        place = {"x": 0, "y": mark.value, "x_offset": -4}
        plot.add_layout(Label(name=f"{name}/label", text=mark.label, **place, **style))
    for number, line in enumerate(chart.lines):
        name = f"{chart.id}/{number}"
        for renderer in _drawn(plot, name, line):
            renderer.tags = [name]
    return plot


def _drawn(plot: Any, name: str, line: ChartLine) -> list[GlyphRenderer]:
    """Draw a line; return what draws it."""
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
