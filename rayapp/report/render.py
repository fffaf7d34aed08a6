"""Render the report: one HTML file that loads nothing else.

Text that a run has written is escaped everywhere (Jinja2's autoescape, and JSON without `<`). In
addition, the page's Content-Security-Policy allows only the page's own scripts, by their SHA-256
digests, and no connections. Styles are not named by digest: BokehJS makes some as it draws.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rayapp.observe import words
from rayapp.observe.plain import redacted
from rayapp.observe.run_folder import METRICS
from rayapp.report import charts, comparison, evaluations, experts, provenance, tables, timeline
from rayapp.report.chart import Chart
from rayapp.report.curves import BUCKETS
from rayapp.report.folder import ReportedRun

PAGE = Path(__file__).parent / "page"
STYLES = ("page.css",)
SCRIPTS = ("text.js", "curve.js", "page.js")


def run_page(run: ReportedRun) -> bytes:
    """Return the HTML page of one run."""
    stretches, data = timeline.segments(run), run.plan.get("data", {})
    total_s = max([stretch.end_s for stretch in stretches] + [1e-9])
    return _page(
        "run.html",
        [run],
        charts.of_run(run),
        run=run,
        subtitle=tables.subtitle(run),
        headline=tables.headline(run),
        segments=stretches,
        moments=timeline.moments(run),
        total_s=total_s,
        stretches=[
            [stretch.text, words.duration(stretch.start_s), words.duration(stretch.end_s)]
            for stretch in stretches
        ],
        goodput=tables.goodput(run),
        planned=(planned := tables.planned(run)),
        measured=[[label, value] for label, _, value, *_ in planned if value],
        interruptions=tables.interruptions(run),
        data_facts=tables.data_facts(run),
        lengths=tables.lengths(data["train"]["lengths"]) if "train" in data else [],
        classes=tables.classes(run),
        confusions=tables.confusions(run),
        bad_rows=tables.bad_rows(data),
        examples=data.get("examples", []),
        rendered=run.plan.get("rendered", []),
        records=f"{data.get('records', 0):,}",
        sources=tables.sources(run),
        sources_head=tables.SOURCES_HEAD,
        samples=run.result.get("samples") or [],
        tasks=words.task_rows(tasks := run.result.get("tasks") or {}),
        tasks_head=words.TASK_HEAD,
        task_answers=words.task_answers(tasks),
        task_shown=words.TASK_SHOWN,
        prompts=evaluations.head(run.held),
        answers=evaluations.answers(run.held),
        asked=sum(1 for each in run.held if each.samples),
        experts=experts.balance(run),
        experts_head=experts.HEAD,
        settings=comparison.settings(run),
        environment=provenance.environment(run),
        repeat=provenance.repeat(run),
        commit=comparison.started(run).get("commit") or "",
    )


def comparison_page(runs: Sequence[ReportedRun]) -> bytes:
    """Return the HTML page of several runs."""
    return _page(
        "runs.html",
        runs,
        charts.of_runs(runs),
        runs=runs,
        results=comparison.results(runs),
        differing=comparison.differing(runs),
        goodput=[(run, tables.goodput(run)) for run in runs],
        groups=comparison.groups(runs),
        repeats=[(run, provenance.repeat(run)) for run in runs],
    )


def _page(name: str, of: Sequence[ReportedRun], drawn: Sequence[Chart], **values: Any) -> bytes:
    from rayapp.report import figures  # bokeh takes a second to import

    styles = [_text(PAGE / each, "</style") for each in STYLES]
    sources = [figures.SCRIPT] if drawn else []
    scripts = [_text(each, "</script") for each in [*sources, *(PAGE / own for own in SCRIPTS)]]
    text = (
        _environment()
        .get_template(name)
        .render(
            charts=drawn,
            unit=of[0].unit,
            data={
                "charts": [chart.spec() for chart in drawn],
                "unit": of[0].unit.many,
                "steps": max((run.num_lines for run in of), default=0),
                "name": "comparison" if len(of) > 1 else of[0].name,
                **figures.document(drawn),
            },
            styles=styles,
            scripts=scripts,
            policy=_policy(scripts),
            thinned=_thinned(of),
            version=version("rayapp"),
            bokeh=figures.VERSION,
            written=words.moment(time.time()),
            **values,
        )
    )
    return text.encode(errors="replace")


def _thinned(runs: Sequence[ReportedRun]) -> str:
    """Say how many steps the curves leave out; empty if they show all."""
    most = max(run.num_lines for run in runs)
    if most <= 2 * BUCKETS:
        return ""
    return (
        f"Of {most:,} steps the curves show the lowest and the highest of every "
        f"{-(-most // BUCKETS):,}; all of them are in {METRICS}."
    )


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
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(PAGE),
        autoescape=True,
        finalize=lambda value: redacted(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {"number": words.number, "duration": words.duration}
    return environment
