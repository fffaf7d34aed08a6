"""The report of a run: it shows what the run recorded, in a page that a browser shows well."""

from __future__ import annotations

import base64
import csv
import hashlib
import html.parser
import itertools
import json
import logging
import math
import re
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from browser import READY, Browser, Page, needs_chromium, open_report
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from run_folders import HOSTILE, RunFolder, eventful

from rayapp import report
from rayapp.__main__ import main
from rayapp.config import Config, load
from rayapp.config.fields import IMAGES
from rayapp.observe import metrics
from rayapp.observe.columns import Columns
from rayapp.observe.figures import lines_below
from rayapp.observe.goodput import account, read_events
from rayapp.observe.metrics import MetricsLine, line_of
from rayapp.observe.metrics_log import MetricsLog
from rayapp.observe.run_folder import METRICS, REPORT
from rayapp.observe.status import read
from rayapp.report import comparison, folder, tables, timeline
from rayapp.report import pages as written
from rayapp.report.chart import (
    BOTTOM,
    BUCKETS,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    smooth,
    svg,
    thin,
)
from rayapp.report.charts import charts_of
from rayapp.storage import Storage, StorageError, open_storage

TINY = str(Path(__file__).parent.parent / "configs" / "tiny_cpu.yaml")
SCRIPTS = 5  # the data, BokehJS and three own ones
VOID = {"meta", "link", "img", "input", "br", "wbr"}


class Reader(html.parser.HTMLParser):
    """A page's elements: their texts by name, without scripts in that of others; attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str, str | None]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.texts.setdefault(tag, []).append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"{tag} ends what it has not begun"

    def handle_data(self, data: str) -> None:
        for tag in self._open if self._open[-1:] != ["script"] else ["script"]:
            self.texts[tag][-1] += data


def page_of(run: Storage) -> Reader:
    report.write(run)
    return Reader(run.read(REPORT).decode())


def data_of(page: Reader) -> dict[str, dict[str, Any]]:
    """Return the page's charts by id."""
    (text,) = (one for one in page.texts["script"] if one.startswith('{"charts"'))
    return {chart["id"]: chart for chart in json.loads(text)["charts"]}


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


# ---- What it shows ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["local", "s3"])
def test_the_page_holds_what_the_run_recorded(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path) if where == "local" else f"s3://{request.getfixturevalue('s3_bucket')}/runs"
    run = eventful(open_storage(url), steps=200).run
    lines = metrics.read(run)
    shown = data_of(page_of(run))
    points = shown["loss"]["points"]["0"]
    assert points["step"] == [line["step"] for line in lines] == list(range(1, 201))
    tokens = list(itertools.accumulate(line["tokens"] for line in lines))
    assert points["tokens"] == tokens
    for chart, names in {
        "loss": ["loss", "loss_per_byte"],
        "throughput": ["tokens_per_s"],
        "memory": ["peak_forward_gib", "peak_backward_gib", "peak_optimizer_gib"],
        "gradient": ["grad_norm"],
        "rate": ["lr"],
    }.items():
        for name in names:
            wanted = [line[name] for line in lines]
            assert shown[chart]["points"]["0"][name] == pytest.approx(wanted, rel=1e-5), name
    parts = shown["step-time"]["points"]["0"]
    names = {"data wait": "data_wait_s", "checkpoint stall": "checkpoint_stall_s"}
    names |= {"evaluation": "eval_s"}
    for label, name in names.items():
        assert parts[label] == pytest.approx([line[name] for line in lines], rel=1e-5), label
    summed = [
        sum(values) for values in zip(*(parts[n] for n in ["computing", *names]), strict=True)
    ]
    assert summed == pytest.approx([line["step_s"] for line in lines], rel=1e-4)
    held = shown["loss"]["points"]["0-held"]
    found = {line["step"]: line["eval_loss"] for line in lines if line["eval_loss"] is not None}
    found[200] = json.loads(run.read("result.json"))["eval_loss"]
    assert dict(zip(held["step"], held["eval_loss"], strict=True)) == pytest.approx(found, rel=1e-5)


def test_headline_and_goodput_are_those_of_the_account(storage: Storage) -> None:
    run = eventful(storage, steps=200).run
    sums = account(read_events(run), Columns.read(run))
    page = page_of(run)
    text = page.texts["body"][0]
    assert f"${sums.cost_usd:.2f}" in text and sums.lost_steps == 25
    assert f"{100 * sums.goodput['step']:.3g} %" in text
    shown = {each.label: each.value for each in tables.headline(folder.read(run))}
    assert shown["Steps"] == "200", shown
    bars = timeline.goodput(folder.read(run))
    spent = {cause: share for cause, share in sums.goodput.items() if share}
    assert {bar.key: bar.share for bar in bars} == pytest.approx(spent)
    assert math.fsum(bar.share for bar in bars) == pytest.approx(1.0)
    for one in sums.interruptions:
        assert one["reason"] in text
    for part in ("1.9800", "is not UTF-8", "the node of rank 8", "2.60.0", "Held-out loss"):
        assert part in text


def test_plan_and_measured_are_compared(storage: Storage) -> None:
    run = RunFolder(storage, steps=60)
    run.plan()
    plan = json.loads(run.run.read("plan.json"))
    run.train(60, peak_gib=plan["peak_gib"]["high"] + 1.0)
    run.end()
    rows = {row[0]: row for row in timeline.planned(folder.read(run.run))}
    assert rows["memory"][4] == "above"
    ratio = (plan["peak_gib"]["high"] + 1.0) / plan["peak_gib"]["value"]
    assert rows["memory"][3] == f"{ratio:.2f}"
    assert rows["tokens/s"][4] == "within"
    foretold = rows["time of a step, predicted by its first ten"]
    assert float(foretold[1][:-2]) == pytest.approx(float(foretold[2][:-2]), rel=0.2)
    marks = data_of(page_of(run.run))["memory"]["marks"]
    assert [mark["value"] for mark in marks] == [plan["peak_gib"]["value"], plan["capacity_gib"]]


def test_the_timeline_has_every_second_once(storage: Storage) -> None:
    run = eventful(storage, steps=200)
    read = folder.read(run.run)
    found = timeline.spans(read)
    assert found[0].start_s == 0.0
    for one, following in itertools.pairwise(found):
        assert one.end_s == pytest.approx(following.start_s, abs=1e-3)
    assert read.account is not None
    assert found[-1].end_s == pytest.approx(read.account.wall_s, abs=1e-3)
    kinds = ["start", "train", "recovery", "train", "recovery", "train", "start", "train", "end"]
    assert [one.kind for one in found] == kinds
    recovered_s = sum(one.end_s - one.start_s for one in found if one.kind == "recovery")
    share = read.account.goodput["recovery"]
    assert recovered_s == pytest.approx(share * read.account.wall_s, abs=0.1)
    moments = timeline.moments(read)
    assert [one.kind for one in moments] == ["preemption", "failure", "pause"]
    assert moments[-1].text == "nothing ran for 11 h"
    assert read.seconds[-1] <= read.account.wall_s < 3600.0


def test_a_comparison_says_what_differs_and_what_came_out(storage: Storage) -> None:
    runs = []
    for number, rate in enumerate(("1e-4", "3e-4")):
        run = RunFolder(storage, f"run-{number}", 80, seed=number, train__lr=rate)
        run.plan()
        run.train(80 - 30 * number)
        run.end()
        runs.append(run.run)
    page = report.compare(runs, f"{storage.url}/pages/both.html")
    shown = Reader(Path(page).read_text(encoding="utf-8"))
    rows = comparison.differing([folder.read(run) for run in runs])
    assert [(row.label, row.cells) for row in rows] == [("train.lr", ["0.0001", "0.0003"])]
    steps = [len(points["step"]) for points in data_of(shown)["rate"]["points"].values()]
    assert steps == [80, 50]
    # A run of 80 or 50 steps tells its loss by the mean of the last 10.
    losses = [np.mean([line["loss"] for line in metrics.read(run)[-10:]]) for run in runs]
    results = {row.label: row for row in comparison.results([folder.read(run) for run in runs])}
    assert results["training loss"].cells == [f"{loss:.4f}" for loss in losses]
    assert results["training loss"].best == {losses.index(min(losses))}
    assert results["held-out loss"].best == frozenset()  # both are the same


def planned_run(storage: Storage, name: str, seed: int, **parts: Any) -> Storage:
    """Leave a done run whose plan has these parts of a fingerprint."""
    run = RunFolder(storage, name, 40, seed=seed)
    run.plan()
    plan = json.loads(run.run.read("plan.json"))
    plan |= {"fingerprint": f"{hash(tuple(parts.items())):016x}", "parts": parts}
    run.run.write("plan.json", json.dumps(plan).encode())
    run.train(40)
    run.end(eval_loss=2.0 + seed / 10, eval_loss_per_byte=0.5 + seed / 10)
    return run.run


def test_only_what_is_comparable_is_compared(storage: Storage) -> None:
    """Losses of other data or another tokenizer are neither in one chart nor called better."""
    runs = [
        planned_run(storage, "short", 2, files="aa", tokenizer="11", seq_len=256),
        planned_run(storage, "long", 3, files="aa", tokenizer="11", seq_len=512),
        planned_run(storage, "other-data", 1, files="bb", tokenizer="11", seq_len=256),
        planned_run(storage, "other-tokenizer", 0, files="aa", tokenizer="22", seq_len=256),
    ]
    read = [folder.read(run) for run in runs]
    assert [group.places for group in comparison.groups(read)] == [[0, 1], [2], [3]]
    results = {row.label: row for row in comparison.results(read)}
    assert results["held-out loss"].best == {0}
    assert results["group"].cells == ["A", "A", "B", "C"]
    page = Reader(Path(report.compare(runs, f"{storage.url}/c.html")).read_text("utf-8"))
    shown = data_of(page)
    drawn = {name: {line["run"] for line in shown[name]["lines"]} for name in shown}
    assert drawn["loss-A"] == {0, 1} and drawn["loss-B"] == {2} and drawn["loss-C"] == {3}
    assert drawn["throughput"] == {0, 1, 2, 3} and "loss" not in drawn
    text = " ".join(page.texts["section"][0].split())
    assert "not comparable" in text and "Group A: short, long (data" in text
    alike = Reader(Path(report.compare(runs[:2], f"{storage.url}/d.html")).read_text("utf-8"))
    assert "loss" in data_of(alike) and "not comparable" not in alike.texts["body"][0]


def test_the_norm_that_gradients_are_clipped_to_is_drawn(storage: Storage) -> None:
    run = RunFolder(storage, steps=3, train__grad_clip="0.5")
    for norm in (0.4, 0.5, 0.6):
        run.train(1, grad_norm=norm)
    other = RunFolder(storage, "other", steps=3, train__grad_clip="none")
    other.train(3)
    shown, without = (data_of(page_of(each.run))["gradient"] for each in (run, other))
    (mark,) = shown["marks"]
    assert (mark["label"], mark["value"]) == ("train.grad_clip", 0.5) and not without["marks"]
    assert "In 1 of 3 steps it was clipped." in page_of(run.run).texts["p"]


def test_an_adapters_fields_that_are_at_their_defaults_are_no_rows(storage: Storage) -> None:
    plain, lora = RunFolder(storage, "a"), RunFolder(storage, "b", model__lora="{alpha: 8}")
    runs = [folder.read(each.run) for each in (plain, lora)]
    own = [row for row in comparison.settings(runs[1]) if "lora" in row[0]]
    assert own == [["model.lora.rank", "16", "none"], ["model.lora.alpha", "8.0", "32.0"]]
    rows = {row.label: row.cells for row in comparison.differing(runs)}
    assert rows == {"model.lora.rank": ["n/a", "16"], "model.lora.alpha": ["n/a", "8.0"]}


def test_a_run_says_how_to_repeat_it(storage: Storage) -> None:
    run = RunFolder(storage)
    run.train(3)
    assert tables.repeat(folder.read(run.run)) == [
        f"python -m rayapp.finetune {run.run.url}/config.yaml --run.name=demo-again"
    ]
    run.pause(10.0)
    command = "-m rayapp.finetune my.yaml --data.path=s3://KEY:word/1@bucket/a"
    run.events[-1] |= {"commit": "0123456789ab+", "command": command, "user": "ada"}
    run.interrupt()
    page = page_of(run.run)
    assert "--data.path=s3://***@bucket/a" in page.texts["body"][0]
    assert b"word/1" not in run.run.read(REPORT)
    assert page.texts["pre"][0].splitlines()[0] == "git checkout 0123456789ab"
    assert "Files of the checkout had been changed" in page.texts["body"][0]
    rows = dict(tables.environment(folder.read(run.run)))
    assert rows["git commit"] == "0123456789ab+" and rows["started by"] == "ada"
    assert rows["command"] == f"python {command}"
    far = replace(folder.read(run.run), url="s3://bucket/runs/demo")
    assert tables.repeat(far)[1:] == [
        "aws s3 cp s3://bucket/runs/demo/config.yaml config.yaml",
        "python -m rayapp.finetune config.yaml --run.name=demo-again",
    ]


def test_the_users_own_metrics_have_charts(storage: Storage) -> None:
    run = RunFolder(storage, eval__metrics="[my:sharpness, my:calibration]")
    for step in range(1, 7):
        own = {"sharpness": 0.1 * step, "calibration": None}
        held = {"eval_loss": 2.0, "eval_metrics": own} if step % 2 == 0 else {}
        run.train(1, **held)
    shown = data_of(page_of(run.run))
    points = shown["metric-0"]["points"]["0"]
    assert shown["metric-0"]["title"] == "sharpness" and points["step"] == [2, 4, 6]
    assert points["value"] == pytest.approx([0.2, 0.4, 0.6])
    assert "metric-1" not in shown  # it is not finite at any step


def test_the_first_run_has_a_held_out_curve() -> None:
    config = load(TINY, None, Config)
    assert config.train.max_steps // config.eval.every_steps >= 4


def test_what_is_not_known_has_no_place(storage: Storage) -> None:
    for run in (real_run(storage), classifier_run(storage)):
        page = page_of(run)
        assert "n/a" not in page.texts["body"][0], run.url
        assert "Cost" not in page.texts["dt"]
    stopped = RunFolder(storage, "stopped")
    stopped.train(3)
    stopped.interrupt()  # no step came after it
    assert "n/a" not in page_of(stopped.run).texts["body"][0]
    both = report.compare([stopped.run, RunFolder(storage, "fresh").run], f"{storage.url}/c.html")
    assert "n/a" not in Reader(Path(both).read_text("utf-8")).texts["body"][0]


def test_runs_of_one_name_are_told_apart(storage: Storage) -> None:
    runs = [RunFolder(storage / place, "demo").run for place in ("here", "there")]
    text = Path(report.compare(runs, f"{storage.url}/c.html")).read_text(encoding="utf-8")
    assert "here/demo" in Reader(text).texts["table"][0]


# ---- Runs that are not as they should be -----------------------------------------------------


def test_a_run_that_has_not_begun(storage: Storage) -> None:
    page = page_of(RunFolder(storage).run)
    text = page.texts["body"][0]
    assert data_of(page) == {} and "n/a" not in text
    assert "no step is recorded yet" in text and "dl" not in page.texts


def test_one_step(storage: Storage) -> None:
    run = RunFolder(storage)
    run.plan(bad=False)
    run.train(1)
    page = page_of(run.run)
    assert data_of(page)["loss"]["points"]["0"]["step"] == [1]
    assert page.texts["h1"][0].split() == ["demo", "lost"]
    assert "they are written at the end" in page.texts["p"]


def test_losses_that_are_not_finite(storage: Storage) -> None:
    run = RunFolder(storage)
    run.train(3)
    run.interrupt()
    run.train(2, loss=math.nan, loss_per_byte=math.nan, grad_norm=math.inf, skipped=True)
    page = page_of(run.run)
    assert data_of(page)["loss"]["points"]["0"]["loss"][3:] == [None, None]
    text = page.texts["body"][0]
    assert "2 steps have a loss that is not finite" in text and "2 steps were skipped" in text
    nothing = RunFolder(storage, "nothing")
    nothing.train(2, loss=math.nan, loss_per_byte=None)
    assert "loss" not in data_of(page_of(nothing.run))


def test_a_run_that_failed_says_why(storage: Storage) -> None:
    run = RunFolder(storage)
    run.train(4)
    run.end("failed", 'rank 0: a < b & "c"')
    page = page_of(run.run)
    assert page.texts["h1"][0].split() == ["demo", "failed"]
    assert 'rank 0: a < b & "c"' in page.texts["p"]


def test_a_rank_that_lags_is_named_by_report_and_status(storage: Storage) -> None:
    run = RunFolder(storage)
    run.train(1, rank_s={"0": 0.5, **{str(rank): 0.25 for rank in range(1, 32)}})
    run.train(1, at=1, lagging=(lags := "rank 0 on a<b computes 100% longer than the median rank"))
    page = page_of(run.run)
    assert "rank 0" in page.texts["th"] and "0.5 s" in page.texts["td"]
    assert sum(text.startswith("rank ") for text in page.texts["th"]) == 8  # the slowest
    assert lags in page.texts["p"] and lags in lines_below(read(run.run))


def test_a_run_whose_events_were_deleted(storage: Storage) -> None:
    """As the message of a damaged events.jsonl says: it goes on without its history."""
    run = RunFolder(storage, events=False, config=TINY)
    run.train(30)
    run.end(wall_s=100.0, goodput={"step": 0.7}, interruptions=[], cost_usd=None)
    run.run.write("config.yaml", b"run: {name: older}\nnone_such: {field: 1}\n")
    lines = [{k: v for k, v in line.items() if "peak_f" not in k} for line in metrics.read(run.run)]
    run.run.write(METRICS, "".join(json.dumps(line) + "\n" for line in lines).encode())
    page = page_of(run.run)
    assert page.texts["h1"][0].split() == ["older", "done"]
    assert timeline.goodput(folder.read(run.run)) == timeline.spans(folder.read(run.run)) == []
    assert set(data_of(page)["memory"]["points"]["0"]["peak_forward_gib"]) == {None}


def test_what_a_run_has_written_stays_text(storage: Storage) -> None:
    run = hostile(storage)
    page = page_of(run)
    scripts = page.texts["script"]
    assert len(scripts) == SCRIPTS and "broken out" not in "".join(scripts[1:])
    assert "img" not in page.texts and not [a for a in page.attributes if a[1].startswith("on")]
    assert page.texts["body"][0].count("broken out") >= 5
    both = Reader(Path(report.compare([run, run], f"{storage.url}/c.html")).read_text("utf-8"))
    assert len(both.texts["script"]) == SCRIPTS and "img" not in both.texts


def hostile(storage: Storage) -> Storage:
    """Make a run whose texts try to leave their place."""
    run = RunFolder(storage)
    run.plan()
    run.train(3)
    run.interrupt(HOSTILE, HOSTILE)
    run.train(3)
    run.end(samples=[[HOSTILE, HOSTILE]], versions={HOSTILE: HOSTILE})
    plan = json.loads(run.run.read("plan.json"))
    plan["data"] |= {"bad": {HOSTILE: 3}, "examples": [[HOSTILE, HOSTILE]]}
    run.run.write("plan.json", json.dumps(plan).encode())
    text = run.config.to_yaml().replace("name: demo", f"name: {json.dumps(HOSTILE)}")
    run.run.write("config.yaml", text.encode())
    return run.run


def test_nothing_is_loaded_from_anywhere(storage: Storage) -> None:
    run = eventful(storage, steps=60).run
    page = page_of(run)
    places = {a[2] for a in page.attributes if a[1] in ("src", "href", "action", "srcset")}
    assert places == {"data:,", "#main", "https://bokeh.org"}  # the last is a link
    assert not [a for a in page.attributes if a[1] == "style"]
    (policy,) = (a[2] for a in page.attributes if a[2] and a[2].startswith("default-src"))
    assert policy.startswith("default-src 'none'; ") and "connect-src" not in policy

    def digests(texts: list[str]) -> set[str]:
        return {base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in texts}

    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    assert allowed == digests(page.texts["script"][1:])
    assert "unsafe-eval" not in policy and "'unsafe-inline'" not in policy.split("style-src")[0]


def test_a_real_run(storage: Storage) -> None:
    """60 steps of configs/tiny_cpu.yaml on 2 workers, as they were left."""
    run = real_run(storage)
    lines, result = metrics.read(run), json.loads(run.read("result.json"))
    page = page_of(run)
    assert data_of(page)["loss"]["points"]["0"]["loss"] == pytest.approx(
        [line["loss"] for line in lines], rel=1e-5
    )
    text = page.texts["body"][0]
    assert f"{result['eval_loss']:.4f}" in text and result["samples"][0][1] in text
    assert f"{result['tokens_per_s']:,.0f}" in text and "4.262M parameters" in text
    stretches = timeline.spans(folder.read(run))
    assert [one.kind for one in stretches] == ["start", "train", "end"]
    assert stretches[-1].end_s == pytest.approx(result["wall_s"], abs=0.1)


def test_a_classifiers_run(storage: Storage) -> None:
    """Images instead of tokens; every class, and what is taken for what."""
    run = classifier_run(storage)
    page = page_of(run)
    text = " ".join(page.texts["body"][0].split())
    for part in (
        "cat5 of 771.4 % dog4 of 580 % owl3 of 3100 %",  # cells have nothing between them
        "catdog2 dogcat1",
        "Images2,685315 held out",
        "damaged (OSError)60.2 % for example disc/cut.jpg damaged (OSError) The drawn set has six",
        "Top-180 %top-5 100 %, step 3",
        "Images/s641320 per worker",
    ):
        assert part in text, part
    for absent in ("Samples", "Documents", "tokens"):
        assert absent not in text, absent
    shown = data_of(page)
    assert shown["throughput"]["points"]["0"]["images_per_s"] == [640.0, 641.0, 642.0]
    assert shown["accuracy"]["points"]["0"]["eval_top1"] == [0.8]


def classifier_run(storage: Storage) -> Storage:
    """Leave what a short run of images leaves."""
    run = storage / "shapes"
    config = load(str(TINY).replace("tiny_cpu", "vision_cpu"), {"run.storage": storage.url})
    run.write("config.yaml", config.to_yaml().encode())
    data = {
        "images": {"train": 2685, "eval": 315},
        "classes": 3,
        "class_counts": {"cat": 900, "dog": 895, "owl": 890},
        "bytes": 18 * 2**20,
        "duplicates": 0.0,
        "records": 3006,
        "bad": {"damaged (OSError)": 6},
        "examples": [["disc/cut.jpg", "damaged (OSError)"]],
    }
    plan = {"steps": 3, "epochs": 0.1, "parameters": 312_490, "images": 192, "data": data}
    run.write("plan.json", json.dumps(plan).encode())
    log = MetricsLog(run, 0)
    for step in (1, 2, 3):
        log.write(image_record(step))
    log.close()
    classes = {"each": [["cat", 7, 5], ["dog", 5, 4], ["owl", 3, 3]]}
    classes["confused"] = [["cat", "dog", 2], ["dog", "cat", 1]]
    result = {"status": "done", "steps": 3, "eval_loss": 0.5, "eval_top1": 0.8, "eval_top5": 1.0}
    result |= {"images_per_s": 641.0, "images_per_s_per_gpu": 320.5, "classes": classes}
    run.write("result.json", json.dumps(result).encode())
    return run


def image_record(step: int) -> MetricsLine:
    rate = 639.0 + step
    zeros = dict.fromkeys(("data_wait_s", "checkpoint_stall_s", "eval_s", "mfu"), 0.0)
    peaks = {f"peak_{name}gib": 1.0 for name in ("", "forward_", "backward_", "optimizer_")}
    facts = {
        "step": step,
        "epoch": step / 42,
        "loss": 2.0 / step,
        "grad_norm": 1.0,
        "lr": 0.1,
        "step_s": 0.1,
        "skipped": False,
        "workers": 2,
        "attempt": 1,
        "batch_digest": f"{step:016x}",
        "time": 1_795_000_000.0 + step,
        "images": 64,
        "images_per_s": rate,
        "images_per_s_per_gpu": rate / 2,
    }
    return line_of(IMAGES, zeros, peaks, facts)


def real_run(storage: Storage) -> Storage:
    for file in (Path(__file__).parent / "golden" / "run").iterdir():
        (storage / "tiny").write(file.name, file.read_bytes())
    return storage / "tiny"


# ---- Long runs -------------------------------------------------------------------------------


def test_steps_are_read_block_by_block(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunFolder(storage, steps=50)
    run.train(30)
    run.train(20, loss=math.nan)
    monkeypatch.setattr(metrics, "BLOCK_BYTES", 5_000)  # some 7 lines
    whole = run.run.read(METRICS)
    damaged = whole.replace(b'{"step": 20,', b'{"step" 20,')
    for data, missing in ((whole, []), (damaged, [20]), (whole + b'{"step": 51, "lo', [])):
        run.run.write(METRICS, data)
        read_again = Columns.read(run.run, folder.NAMES)
        found = {name: read_again[name] for name in folder.NAMES}
        lines = metrics.read(run.run)
        assert [line["step"] for line in lines] == [s for s in range(1, 51) if s not in missing]
        for name, column in found.items():
            wanted = np.array([line.get(name, math.nan) for line in lines], np.float64)
            np.testing.assert_array_equal(column, wanted, err_msg=name)
    assert "line 20 is not readable" in caplog.text


COLUMNS = st.lists(
    st.lists(st.one_of(st.just(math.nan), st.floats(-1e9, 1e9)), min_size=90, max_size=90),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(COLUMNS, st.integers(2, 20))
def test_thinning_keeps_the_extremes_of_every_bucket(
    columns: list[list[float]], buckets: int
) -> None:
    arrays = [np.array(column) for column in columns]
    kept = thin(arrays, buckets)
    assert kept[0] == 0 and kept[-1] == 89 and (np.diff(kept) > 0).all()
    assert len(kept) <= 2 * buckets * len(arrays) + 2
    edges = np.linspace(0, 90, buckets + 1).astype(int)
    for array, (start, end) in itertools.product(arrays, itertools.pairwise(edges)):
        whole, part = array[start:end], array[kept[(kept >= start) & (kept < end)]]
        if not np.isnan(whole).all():
            assert np.nanmin(whole) == np.nanmin(part) and np.nanmax(whole) == np.nanmax(part)


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=60))
def test_smoothing_is_the_mean_of_the_window(values: list[float | None]) -> None:
    found = smooth(np.array(values, np.float64), window=7)
    for place, mean in enumerate(found):
        around = [v for v in values[max(0, place - 3) : place + 4] if v is not None]
        if not around:
            assert np.isnan(mean)
        else:
            assert mean == pytest.approx(math.fsum(around) / len(around), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("count", [30, 5_000])
def test_a_curve_without_a_script_tells_its_values(count: int) -> None:
    """Of many points the means are a line with dots, below it a spike stays in sight."""
    steps, values = np.arange(1.0, count + 1), np.linspace(4.0, 2.0, count)
    values[count // 2], values[0] = 40_000.0, np.nan
    none = np.full(count, np.nan)
    drawn = ET.fromstring(svg("<loss>", {"a & b": (steps, values), "none": (steps, none)}))
    assert svg("loss", {"none": (steps, none)}) == ""
    assert [each.text for each in drawn if each.tag == "text"][:3] == ["<loss>", "40k", "2"]
    lines = [each.get("points", "").split() for each in drawn if each.tag == "polyline"]
    tips = [each[0].text for each in drawn if each.tag == "circle"]
    assert len(lines) == 2 and len(tips) == min(30, len(lines[-1])) and len(lines[-1]) <= 240
    heights = [float(place.split(",")[1]) for place in lines[0]]
    assert (min(heights), max(heights)) == (TOP, HEIGHT - BOTTOM)
    if count == 30:
        assert tips[0].startswith("step 2: a & b 3.9") and tips[-1] == "step 30: a & b 2"
        assert [float(each.split(",")[0]) for each in lines[0]][::28] == [LEFT, WIDTH - RIGHT]


def test_a_million_steps_are_small_fast_and_lose_no_spike(storage: Storage) -> None:
    few = RunFolder(storage, steps=600)
    few.train(600)
    few.end()
    run = folder.read(few.run)
    count = 1_000_000
    columns = {name: np.resize(column, count) for name, column in run.columns.items()}
    columns["step"] = np.arange(1, count + 1, dtype=np.float64)
    columns["time"] = columns["time"][0] + columns["step"]
    columns["loss"] = columns["loss"] + 0.0
    columns["loss"][777_777] = 99.0
    columns["data_wait_s"][123_456] = 55.0
    began = time.process_time()
    page = written.run_page(replace(run, columns=columns)).decode()
    assert (
        time.process_time() - began < 10.0 and len(page) < 2_000_000
    )  # of which 1.27 MB are BokehJS
    shown = data_of(Reader(page))
    points = shown["loss"]["points"]["0"]
    assert points["loss"][points["step"].index(777_778)] == 99.0
    waits = shown["step-time"]["points"]["0"]
    assert waits["data wait"][waits["step"].index(123_457)] == 55.0
    assert "Of 1,000,000 steps the curves show the lowest and the highest of every 1,667" in page


def test_a_table_has_the_figures_of_its_curve(storage: Storage) -> None:
    run = RunFolder(storage, steps=200)
    run.train(200)
    loss, *_ = charts_of([folder.read(run.run)])
    held = {line["step"]: line["eval_loss"] for line in metrics.read(run.run) if line["eval_loss"]}
    assert loss.head == ["step", "training loss", "held out"]
    assert {int(row[0]): float(row[2]) for row in loss.rows} == pytest.approx(held, rel=1e-4)
    assert BUCKETS * 2 > 200


# ---- The command -----------------------------------------------------------------------------


def test_the_command_writes_one_or_several(
    storage: Storage, tmp_path: Path, capsys: pytest.CaptureFixture[str], s3_bucket: str
) -> None:
    run = RunFolder(storage, "one", steps=20)
    run.train(20)
    far = RunFolder(open_storage(f"s3://{s3_bucket}/runs"), "far", steps=20)
    far.train(10)
    assert main(["report", run.run.url]) == 0
    assert capsys.readouterr().out.strip() == f"{run.run.url}/report.html"
    assert main(["report", far.run.url]) == 0 and far.run.exists("report.html")
    out = str(tmp_path / "pages" / "two.html")
    assert main(["report", run.run.url, far.run.url, f"--out={out}"]) == 0
    assert Reader(Path(out).read_text("utf-8")).texts["h1"] == ["2 runs side by side"]
    capsys.readouterr()
    assert main(["report", run.run.url, str(tmp_path / "none")]) == 2
    assert "none holds no run" in capsys.readouterr().err
    assert main(["report", run.run.url, "--output=x"]) == 2
    assert "Did you mean --out?" in capsys.readouterr().err
    assert main(["report"]) == 2


def test_a_run_does_not_end_by_its_report(
    storage: Storage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(storage)
    run.train(2)
    report.write_for(run.run)
    assert run.run.exists("report.html")
    run.run.delete("report.html")

    def full(*_: object) -> None:
        raise StorageError("write", "report.html", "the disk is full")

    monkeypatch.setattr(type(run.run), "write", full)
    with caplog.at_level(logging.WARNING):
        report.write_for(run.run)
    assert "the disk is full" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(written, "read", lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # what is wrong with the code is not hidden
        report.write_for(run.run)


# ---- Colours ---------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision
# deficiency" (2009), severity 1.0, on linear RGB.
SIGHT = {
    "all": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(color: str) -> Any:
    values = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(light: Any) -> Any:
    """CIELAB of linear RGB under D65."""
    t = XYZ @ np.clip(light, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2."""
    low, high = sorted(float(XYZ[1] @ linear(color)) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


def themes() -> dict[str, dict[str, str]]:
    css = (Path(report.__file__).parent / "page" / "page.css").read_text(encoding="utf-8")
    blocks = [dict(re.findall(r"--(\w+): (#\w{6})", one)) for one in re.findall(r"\{[^{}]*\}", css)]
    light, dark, again = (block for block in blocks if "c0" in block)
    assert dark == again  # chosen by the system, and by the switch
    return {"light": light, "dark": dark}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_four_runs_can_be_told_apart_by_anyone(theme: str) -> None:
    colors = themes()[theme]
    for place in range(6):
        assert contrast(colors[f"c{place}"], colors["card"]) >= 3.0  # WCAG 1.4.11, graphics
    for name in ("text", "quiet", "good", "bad", "accent"):
        assert contrast(colors[name], colors["card"]) >= 4.5, name  # WCAG 1.4.3, text
    for sight, matrix in SIGHT.items():
        seen = [lab(np.array(matrix) @ linear(colors[f"c{place}"])) for place in range(6)]
        for one, other in itertools.combinations(range(6), 2):
            distance = float(np.linalg.norm(seen[one] - seen[other]))
            # 2.3 is just noticeable; dashes differ too, and colours come again after the sixth.
            assert distance >= (25.0 if other < 4 else 12.0), (sight, one, other, distance)


# ---- In a browser ----------------------------------------------------------------------------

# Pixels of a line's own colour inside the plot, for each line that is not faint.
INK = """[...document.querySelectorAll('.plot')].map(holder => {
  const { spec, view } = holder.curve, canvas = view.export('png', true).canvas;
  const { left, top, width, height } = view.frame.bbox.scale(devicePixelRatio);
  const pixels = canvas.getContext('2d').getImageData(left, top, width, height).data;
  return [holder.dataset.chart, spec.lines.filter(line => line.role !== 'faint').map(line => {
    const hex = getComputedStyle(document.documentElement).getPropertyValue(`--c${line.color % 6}`);
    const rgb = [1, 3, 5].map(at => parseInt(hex.trim().slice(at, at + 2), 16));
    let count = 0;
    for (let at = 0; at < pixels.length; at += 4)
      if (rgb.every((value, channel) => Math.abs(value - pixels[at + channel]) < 12)) count++;
    return count;
  })];
})"""
# The widths that the last row of cards or tiles leaves free, for each grid.
FREE = """[...document.querySelectorAll('.grid, .figures')].map(grid => {
  const { right } = grid.getBoundingClientRect();
  const cells = [...grid.children].map(one => one.getBoundingClientRect());
  const rows = Map.groupBy(cells, one => Math.round(one.top));
  return Math.max(...[...rows.values()].map(row => right - Math.max(...row.map(one => one.right))));
})"""
ACROSS = "document.documentElement.scrollWidth"
# The widths of a table of several runs, of its first column, and of what is seen of it at once.
TABLES = """[...document.querySelectorAll('.sides')].map(table =>
  [table.scrollWidth, table.querySelector('th').offsetWidth, table.parentElement.clientWidth])"""


SINGLE = ("eventful", "tiny", "shapes", "fresh", "one")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make the pages of several kinds of runs; return their addresses."""
    storage = open_storage(str(tmp_path_factory.mktemp("runs")))
    runs = [eventful(storage).run]
    for number, steps in enumerate((600, 600, 420)):
        rate = f"{number + 2}e-4"
        data = f"/fsx/projects/summaries/2026-11/experiment-{number}/prepared/texts.jsonl"
        more = {"train__lr": rate, "data__path": data}
        more["model__overrides"] = f"{{intermediate_size: {512 + number}}}"
        run = RunFolder(storage, f"lr-{rate}", steps, seed=number + 1, **more)
        run.plan()
        run.train(steps)
        run.end()
        runs.append(run.run)
    fresh, one = RunFolder(storage, "fresh"), RunFolder(storage, "one")
    one.plan(bad=False)
    one.train(1)
    for run in (runs[0], fresh.run, one.run, real_run(storage), classifier_run(storage)):
        report.write(run)
    # What is best is in the last column too.
    report.compare(runs[::-1], f"{storage.url}/comparison.html")
    report.compare([fresh.run, one.run], f"{storage.url}/short.html")
    names = (*(f"{name}/report" for name in SINGLE), "comparison", "short")
    return {name: f"file://{storage.url}/{name}.html" for name in names}


def fine(page: Page, url: str, width: int = 1280) -> None:
    assert page.problems == []
    # BokehJS has its cursors and icons in itself.
    assert [one for one in page.requests if not one.startswith("data:")] == [url]
    assert page.evaluate(ACROSS) == width, "it is wider than the screen"


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", [*(f"{name}/report" for name in SINGLE), "comparison", "short"])
def test_a_browser_shows_it(
    name: str, width: int, dark: bool, pages: dict[str, str], browser: Browser
) -> None:
    page = open_report(browser, pages[name], width=width, dark=dark)
    fine(page, pages[name], width)
    for table, first, seen in page.evaluate(TABLES):
        assert table <= seen if width > 1000 else first <= 0.5 * seen
    assert max(page.evaluate(FREE), default=0) < 4, "a row is not filled"
    ink = dict(page.evaluate(INK))
    assert bool(ink) == (name != "fresh/report")
    for chart, counts in ink.items():
        if name in ("one/report", "shapes/report", "short"):  # points may lie on each other
            assert max(counts) > 0, chart
        elif chart == "step-time":  # most stalls are less than a pixel
            assert counts[0] > 1000
        else:
            assert min(counts) >= 10, (chart, counts)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 384) == dark
    page.close()


def chart(page: Page, name: str, expression: str) -> Any:
    """Return the value of an expression about a chart of the page."""
    find = f"document.querySelector('.plot[data-chart={name}]').curve"
    return page.evaluate(f"(curve => {expression})({find})")


def legend(page: Page, name: str) -> dict[str, tuple[str, str]]:
    """Return what a chart's legend says: value and step by the line's name."""
    items = chart(
        page,
        name,
        """[...curve.legend.children].map(item =>
        ['.name', 'b', '.at'].map(part => item.querySelector(part).textContent))""",
    )
    return {label: (value, at) for label, value, at in items}


def click(page: Page, query: str) -> None:
    page.evaluate(f"document.querySelector({json.dumps(query)}).click()")
    page.settle()


@needs_chromium
def test_it_can_be_worked_by_mouse_and_keyboard(pages: dict[str, str], browser: Browser) -> None:
    page = open_report(browser, pages["eventful/report"])
    last = "curve.plot.x_range.end"
    assert 600 < chart(page, "loss", last) < 620
    click(page, "[value=tokens]")
    assert chart(page, "loss", last) > 1e8
    click(page, "[value=seconds]")
    assert 10 < chart(page, "loss", last) < 60  # minutes: the pause of 11 hours is left out
    assert chart(page, "loss", "curve.model('x').axis_label") == "time, min"
    highest = "curve.lines[1].y[0]"
    per_token = chart(page, "loss", highest)
    click(page, "[value=byte]")
    assert chart(page, "loss", highest) == pytest.approx(per_token / 4.31, rel=1e-4)
    assert chart(page, "loss", "curve.model('y').axis_label") == "loss, nats per byte"
    top = chart(page, "loss", "curve.plot.y_range.end")
    click(page, "[data-act=log][data-of=loss]")
    assert chart(page, "loss", "curve.plot.y_range.end") < math.log10(top) + 0.2
    click(page, "[value=step]")
    page.evaluate("document.querySelector('[data-chart=loss]').focus()")
    page.press("End")
    said = "document.querySelector('[data-said=loss]').textContent"
    assert "training loss" in page.evaluate(said) and "at step 600" in page.evaluate(said)
    page.press("ArrowLeft")
    assert "at step 599" in page.evaluate(said)
    page.evaluate("document.querySelector('[data-legend=loss] .key').focus()")
    page.press("Enter")
    assert chart(page, "loss", "curve.renderers(0).some(one => one.visible)") is False
    click(page, "#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.evaluate(READY)
    assert all(max(counts) > 0 for _, counts in page.evaluate(INK))  # drawn again in its colours
    fine(page, pages["eventful/report"])
    page.close()


@needs_chromium
def test_hover_and_zoom_are_of_all_charts(pages: dict[str, str], browser: Browser) -> None:
    page = open_report(browser, pages["eventful/report"])
    at_rest = legend(page, "loss")
    assert at_rest["each step"][1] == at_rest["held out"][1] == "step 600"
    value, of = at_rest["training loss"]
    tile = page.evaluate(
        "[...document.querySelectorAll('.figures > div')].map(one => [...one.children].map("
        "part => part.textContent)).find(([name]) => name === 'Training loss')"
    )
    assert float(value) == pytest.approx(float(tile[1]), abs=1e-4) and tile[2].endswith(of)
    assert of == "mean of the last 13 steps"
    place = """(curve => { const { left, width, top } = curve.view.frame.bbox;
      const box = curve.holder.getBoundingClientRect();
      return [box.left + left + width / 2, box.top + top + 20]; })"""
    x, y = page.evaluate(f"{place}(document.querySelector('[data-chart=loss]').curve)")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.settle()
    hovered = {name: legend(page, name) for name in ("loss", "step-time", "gradient")}
    lines = {"loss": "training loss", "step-time": "computing", "gradient": "each step"}
    steps = {hovered[name][line][1] for name, line in lines.items()}
    assert len(steps) == 1 and 290 <= int(steps.pop().removeprefix("step ")) <= 310
    assert hovered["loss"]["held out"][1] in ("step 250", "step 300")  # its own, before the cursor
    for kind, to in (("mousePressed", x), ("mouseMoved", x + 60), ("mouseMoved", x + 120),
                     ("mouseReleased", x + 120)):  # fmt: skip
        page.call("Input.dispatchMouseEvent", type=kind, x=to, y=y, button="left", clickCount=1)
        page.settle()
    ranges = [chart(page, name, "[curve.plot.x_range.start, curve.plot.x_range.end]")
              for name in ("loss", "gradient")]  # fmt: skip
    assert ranges[0] == ranges[1] and 250 < ranges[0][0] < ranges[0][1] < 450
    page.evaluate(
        "document.querySelector('[data-chart=loss]').dispatchEvent(new Event('dblclick'))"
    )
    assert chart(page, "loss", "curve.plot.x_range.end") > 600
    page.close()


@needs_chromium
def test_smoothing_is_chosen(pages: dict[str, str], browser: Browser) -> None:
    page = open_report(browser, pages["eventful/report"])
    losses = np.array(chart(page, "loss", "curve.lines[0].y"), np.float64)
    for place, share in ((0, 0.0), (3, 0.02), (7, 0.2)):
        page.evaluate(f"""(slider => {{ slider.value = {place};
            slider.dispatchEvent(new Event('input')); }})(document.getElementById('smoothing'))""")
        window = 2 * round(share * len(losses) / 2) + 1
        drawn = chart(
            page, "loss", "Array.from(curve.model(1).data.get?.('y') ?? curve.model(1).data.y)"
        )
        assert drawn == pytest.approx(smooth(losses, window).tolist(), rel=1e-6), share
    raw = chart(page, "loss", "Array.from(curve.model(0).data.get?.('y') ?? curve.model(0).data.y)")
    assert raw == pytest.approx(losses.tolist())  # the points under it stay
    assert page.evaluate("document.querySelector('output').textContent") == "121 steps"
    page.close()


@needs_chromium
def test_stalls_are_stacked(pages: dict[str, str], browser: Browser, storage: Storage) -> None:
    page = open_report(browser, pages["eventful/report"])
    tops = chart(page, "step-time", "curve.lines.at(-1).to")
    seconds = [line["step_s"] for line in metrics.read(eventful(storage).run)]
    assert tops == pytest.approx(seconds, rel=1e-4)
    assert chart(page, "step-time", "curve.plot.y_range.end") < 5.0 < max(seconds)
    page.close()


@needs_chromium
def test_a_chart_is_saved(pages: dict[str, str], browser: Browser, tmp_path: Path) -> None:
    page = open_report(browser, pages["eventful/report"])
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    for name, kind in (("loss", "csv"), ("memory", "png")):
        click(page, f"[data-act={kind}][data-of={name}]")
    found = [tmp_path / "eventful-loss.csv", tmp_path / "eventful-memory.png"]
    until = time.monotonic() + 30.0
    while not all(file.exists() for file in found) and time.monotonic() < until:
        page.settle()
    with found[0].open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    losses = chart(page, "loss", "curve.lines[0].y")
    raw = [float(row["loss, nats per token"]) for row in rows if row["line"] == "each step"]
    assert raw == losses and {row["line"] for row in rows} == {
        "each step",
        "training loss",
        "held out",
    }
    with Image.open(found[1]) as image:
        assert image.width > 400 and len(set(image.convert("RGB").get_flattened_data())) > 20
    page.close()


@needs_chromium
def test_runs_are_found_and_sorted(pages: dict[str, str], browser: Browser) -> None:
    page = open_report(browser, pages["comparison"])
    names = "[...document.querySelectorAll('tr[data-run]')].filter(one => !one.hidden)"
    names += ".map(one => one.cells[0].textContent)"
    given = page.evaluate(names)
    click(page, "th[data-column='0'] button")
    assert page.evaluate(names) == sorted(given) != given
    head = "[...document.querySelectorAll('th[data-column]')].find(one => "
    page.evaluate(f"{head} one.textContent === 'steps').querySelector('button').click()")
    assert page.evaluate(names)[0] == "lr-4e-4"  # of 420 steps, the others have 600
    page.evaluate("""(field => { field.value = '2E-4';
        field.dispatchEvent(new Event('input')); })(document.getElementById('search'))""")
    page.settle()
    assert page.evaluate(names) == ["lr-2e-4"]
    assert page.evaluate("document.getElementById('found').textContent") == "1 of 4 runs"
    seen = chart(
        page, "gradient", "curve.spec.lines.map((line, at) => [line.run, curve.shown(at)])"
    )
    hidden = page.evaluate("""document.querySelectorAll('.legend .key:not([hidden])').length""")
    assert {run for run, shown in seen if shown} == {given.index("lr-2e-4")} and hidden > 0
    page.close()


@needs_chromium
def test_a_notebook_shows_it_in_a_frame(storage: Storage, browser: Browser, tmp_path: Path) -> None:
    """A frame that may run scripts but is of no origin, as the button Report makes it."""
    from rayapp.jobs import notebook

    run = eventful(storage, steps=60).run
    text = notebook.report(SimpleNamespace(run=run))
    (tmp_path / "cell.html").write_text(f"<!doctype html>{text}", encoding="utf-8")
    page = browser.open(f"file://{tmp_path}/cell.html")
    page.call("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True)
    attached = (e for e in browser.events if e["method"] == "Target.attachedToTarget")
    frame = next(e["params"] for e in attached if e["params"]["targetInfo"]["type"] == "iframe")
    inside = Page(browser, frame["targetInfo"]["targetId"], frame["sessionId"])
    for domain in ("Runtime", "Log"):
        inside.call(f"{domain}.enable")
    inside.evaluate(READY)
    assert min(dict(inside.evaluate(INK))["loss"]) > 10 and inside.problems == []
    page.close()


@needs_chromium
def test_what_a_run_has_written_does_not_run(storage: Storage, browser: Browser) -> None:
    run = hostile(storage)
    url = f"file://{report.write(run)}"
    page = open_report(browser, url)
    fine(page, url)
    assert page.evaluate("document.title") == HOSTILE
    assert page.evaluate("document.images.length") == 0
    page.close()


@needs_chromium
def test_the_page_may_not_connect(pages: dict[str, str], browser: Browser, tmp_path: Path) -> None:
    """A script that wants to is refused; without the policy the same one gets through."""
    asked: list[str] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    away = f"http://127.0.0.1:{server.server_port}"
    script = f"""new Promise(done => {{
      const image = new Image();
      image.onload = image.onerror = () => done(true);
      image.src = '{away}/image';
      fetch('{away}/fetch', {{mode: 'no-cors'}}).catch(() => 0);
    }})"""
    page = browser.open(pages["eventful/report"])
    page.evaluate(script)
    page.settle()
    assert asked == [] and any("Content Security Policy" in one for one in page.problems)
    (tmp_path / "open.html").write_text("<!doctype html><title>open</title>", encoding="utf-8")
    other = browser.open(f"file://{tmp_path}/open.html")
    other.evaluate(script)
    other.settle()
    assert "/image" in asked and len(other.requests) == 3
    other.evaluate("console.warn('seen')")
    assert any("seen" in one for one in other.problems)  # problems are noticed
    server.shutdown()
    page.close()
    other.close()
