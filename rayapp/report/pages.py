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

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rayapp.config import ConfigError
from rayapp.observe import words
from rayapp.observe.plain import redacted
from rayapp.observe.run_folder import METRICS, REPORT, DamagedFile
from rayapp.report import comparison, evaluations, tables, timeline
from rayapp.report.chart import BUCKETS
from rayapp.report.charts import charts_of
from rayapp.report.folder import ReportedRun, read
from rayapp.storage import Storage, StorageError, open_storage

PAGE = Path(__file__).parent / "page"
STYLE, SCRIPTS = "page.css", ("text.js", "curve.js", "page.js")

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
    except (DamagedFile, ImportError, StorageError) as error:  # an older image may lack bokeh
        logger.warning("the report is not written: %s", error)


def _save(page: bytes, out: str) -> str:
    folder, _, name = out.replace("\\", "/").rpartition("/")
    storage = open_storage(folder or ("/" if out.startswith("/") else "."))
    storage.write(name, page)
    return f"{storage.url.rstrip('/')}/{name}"


def run_page(run: ReportedRun) -> bytes:
    """Return the HTML page of one run."""
    return _page("run.html", [run])


def comparison_page(runs: Sequence[ReportedRun]) -> bytes:
    """Return the HTML page of several runs."""
    return _page("runs.html", runs)


def _page(name: str, runs: Sequence[ReportedRun]) -> bytes:
    from rayapp.report import bokeh_document  # bokeh takes a second to import

    drawn = charts_of(runs)
    sources = [bokeh_document.SCRIPT] if drawn else []
    scripts = [_text(each, "</script") for each in [*sources, *(PAGE / own for own in SCRIPTS)]]
    data = {
        "charts": [chart.spec() for chart in drawn],
        "unit": runs[0].unit.many,
        "steps": max(run.num_lines for run in runs),
        "name": "comparison" if len(runs) > 1 else runs[0].name,
        **bokeh_document.document(drawn),
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
        thinned=_thinned(runs),
        version=version("rayapp"),
        bokeh=bokeh_document.VERSION,
        written=words.moment(time.time()),
    )
    return page.encode(errors="replace")


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
    modules = (comparison, evaluations, tables, timeline, words)
    environment.globals |= {each.__name__.rpartition(".")[2]: each for each in modules}
    return environment
