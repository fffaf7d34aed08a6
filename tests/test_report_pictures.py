"""Pictures of a report and of a comparison, by Chromium, compared with tests/golden/report.

GOLDEN=write draws them anew: look at each before it is committed.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, needs_chromium, open_report
from PIL import Image
from run_folders import RunFolder

from rayapp.report import folder
from rayapp.report import pages as written
from rayapp.report.folder import ReportedRun
from rayapp.storage import Storage, open_storage

GOLDEN = Path(__file__).parent / "golden"
COARSE = 4  # pixels of a picture that are compared as one, so that a letter's edges do not count
TILE = 25  # of those, in a square of its own: a line that is gone is little of a page
FAR = 48.0  # levels, of 255, by which one differs
SHARE = 0.04  # of a tile that may differ so much
WIDTHS = {1400: 1, 420: 2}  # pixels of a screen, and of the picture for each

pytestmark = [pytest.mark.full, needs_chromium]


def named(run: Storage) -> ReportedRun:
    """Read a run as if it lay in `runs`."""
    read, name = folder.read(run), run.url.rpartition("/")[2]
    config = {**read.config, "run": {**read.config.get("run", {}), "storage": "runs"}}
    return replace(read, url=f"runs/{name}", config=config, config_yaml="run: {storage: runs}")


def compared(storage: Storage) -> list[ReportedRun]:
    """Make three runs; the last has other data."""
    runs = []
    for number in range(3):
        run = RunFolder(
            storage, f"lr-{number + 2}e-4", 300, seed=number, train__lr=f"{number + 2}e-4"
        )
        run.plan()
        run.train(300 - 60 * number)
        run.end(eval_loss=1.98 + number / 50)
        runs.append(named(run.run))
    runs[2].plan["fingerprint"] = "aaaabbbbccccdddd"
    return runs


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Write the pages as if it were one moment; return their addresses."""
    storage = open_storage(str(tmp_path_factory.mktemp("runs")))
    for file in (GOLDEN / "run").iterdir():
        (storage / "tiny").write(file.name, file.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written.time, "time", lambda: 1_795_500_000.0)
        patch.setattr(written, "version", lambda _: "0.1.0")
        storage.write("run.html", written.run_page(named(storage / "tiny")))
        storage.write("comparison.html", written.comparison_page(compared(storage)))
    yield {name: f"file://{storage.url}/{name}.html" for name in ("run", "comparison")}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def coarse(picture: Image.Image) -> np.ndarray:
    small = picture.convert("RGB").reduce(COARSE)
    return np.asarray(small, np.float64)


def difference(picture: Image.Image, golden: Image.Image) -> float:
    """Return the share of pixels that differ in the tile that differs most."""
    one, other = coarse(picture), coarse(golden)
    assert one.shape[1] == other.shape[1] and abs(len(one) - len(other)) <= 2, "other sizes"
    height = min(len(one), len(other))
    far = np.abs(one[:height] - other[:height]).max(axis=2) > FAR
    corners = itertools.product(range(0, height, TILE), range(0, far.shape[1], TILE))
    tiles = (far[y : y + TILE, x : x + TILE] for y, x in corners)
    return max(float(tile.sum()) / TILE**2 for tile in tiles)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["run", "comparison"])
def test_a_page_looks_as_it_did(
    name: str, width: int, theme: str, pages: dict[str, str], browser: Browser, tmp_path: Path
) -> None:
    page = open_report(browser, pages[name], width=width, dark=theme == "dark")
    page.screenshot(tmp_path / "page.png")
    page.close()
    with Image.open(tmp_path / "page.png") as taken:
        picture = taken.convert("RGB").reduce(WIDTHS[width])
    path = GOLDEN / "report" / f"{name}-{width}-{theme}.png"
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        file = io.BytesIO()
        picture.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
        path.write_bytes(file.getvalue())
    with Image.open(path) as golden:
        found = difference(picture, golden)
    assert found < SHARE, f"{path.name} differs by {found:.1%}; if meant so, GOLDEN=write"


def test_a_chart_that_is_missing_is_seen() -> None:
    """The tolerance is less than what lines, a tile or colours leave that are gone."""
    with Image.open(GOLDEN / "report" / "run-1400-light.png") as golden:
        whole = golden.convert("RGB")
    for box in ((240, 470, 1240, 700), (140, 150, 380, 230)):  # the loss, the first tile
        without = whole.copy()
        without.paste((255, 255, 255), box)
        assert difference(without, whole) > SHARE, box
    darker = Image.fromarray((np.asarray(whole) * 0.75).astype(np.uint8))
    assert difference(darker, whole) > SHARE
