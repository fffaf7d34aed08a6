"""Check that whatever is in a run's files, each command tells it and goes on with other runs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_folders import RunFolder
from sampled import sampled

from rayapp.__main__ import main
from rayapp.config import ConfigError
from rayapp.jobs import notebook
from rayapp.jobs.find import runs
from rayapp.jobs.handle import Job
from rayapp.observe import run_folder
from rayapp.observe.columns import ACCOUNTED, Columns
from rayapp.observe.metrics import read
from rayapp.observe.records import Event, Plan, RunResult
from rayapp.observe.run_folder import DamagedFile, Exit, parsed
from rayapp.report import card, folder, pages
from rayapp.storage import Storage, open_storage

HUGE = 10**400
MARKUP = "[/red]\x1b]0;title\x07"
PRECISE = {"goodput": {"step": 0.9, "start": 0.1}, "wall_s": 9.0, "cost_usd": None}
PRECISE |= {"lost_steps": 0, "interruptions": [], "loss": 2.0, "mfu": 0.4, "tokens_per_s": 9.0}
LINES = {"events.jsonl": 0, "metrics.jsonl": -1, "validation.jsonl": 0}  # which one is changed

WRONG: list[tuple[str, str, Any]] = [
    *(("events.jsonl", "user", value) for value in ([], {"a": 1}, 7)),
    *(("events.jsonl", "commit", value) for value in (7, True)),
    *(("events.jsonl", "time", value) for value in (HUGE, 1e308, -1.0, math.nan, "x", None)),
    *(("events.jsonl", "usd_per_hour", value) for value in (HUGE, "x", 1e308)),
    *(("events.jsonl", "event", value) for value in ([], {}, 1, "moved", "ended")),
    ("events.jsonl", "command", ["x"]),
    ("events.jsonl", "submission_id", {"x": 1}),
    ("events.jsonl", "seen_until", []),
    *(("metrics.jsonl", "step", value) for value in (HUGE, "x", None, True, 1.5, -1, [])),
    *(("metrics.jsonl", "time", value) for value in (HUGE, 1e308, None, [])),
    *(("metrics.jsonl", "workers", value) for value in (2.5, HUGE, "x", [], True)),
    *(("metrics.jsonl", "step_s", value) for value in (HUGE, 1e308, math.nan, "x", -5.0)),
    *(("metrics.jsonl", "tokens_by_source", value) for value in ([], "x", {"a": "x"}, {"a": -1})),
    *(("metrics.jsonl", "loss_by_source", value) for value in (["a"], {"a": HUGE})),
    ("metrics.jsonl", "loss", {"a": 1}),
    ("metrics.jsonl", "eval_samples", [["a"]]),
    ("metrics.jsonl", "eval_metrics", {"a": "x"}),
    *(("plan.json", "", value) for value in ([], None, 1, "x")),
    *(("plan.json", "steps", value) for value in (HUGE, "x", 1.5, True, -3)),
    *(("plan.json", "step_s", value) for value in ([], 3, {"value": "x"}, {"value": 1e308})),
    *(("plan.json", "prepared", value) for value in ("x", {}, [1])),
    *(("plan.json", "fingerprint", value) for value in (1, [])),
    *(("plan.json", "data", value) for value in ([], {"train": {}}, {"bad": {"x": "y"}})),
    *(("plan.json", "rendered", value) for value in ({}, [1], [{"documents": [[["a"]]]}])),
    *(("plan.json", "base", value) for value in ([], "x", {"id": 3})),
    *(("result.json", "", value) for value in ([], None, 1)),
    *(("result.json", "status", value) for value in (1, [], MARKUP)),
    *(("result.json", "steps", value) for value in (HUGE, "x", None, -1)),
    *(("result.json", "wall_s", value) for value in (HUGE, 1e308, "x")),
    *(
        ("result.json", "goodput", value)
        for value in ([], {"step": "x"}, {"step": -1.0}, {"x": 1e308})
    ),
    *(("result.json", "interruptions", value) for value in ({}, [1], [{"time": HUGE}])),
    *(("result.json", "samples", value) for value in ([1], [["a"]], "x", {})),
    *(("result.json", "experts", value) for value in ([[]], [["x"]], 3)),
    *(("result.json", "versions", value) for value in ([], {"a": 1})),
    *(("result.json", "eval_loss", value) for value in (HUGE, "x", [])),
    *(("validation.jsonl", "", value) for value in ([], None)),
    *(("validation.jsonl", "eval_loss", value) for value in (HUGE, "x", 1e308)),
    ("validation.jsonl", "step", 1.5),
    *(("activity.json", "", value) for value in ([], None, 1)),
    *(("activity.json", "began", value) for value in (HUGE, "x", math.nan, None, 1e308)),
    *(("activity.json", "phase", value) for value in ([], None, 3)),
    *(("LEASE", "", value) for value in ([], None, 1)),
    *(("LEASE", "pid", value) for value in (HUGE, "x", -1)),
    *(("LEASE", "machine", value) for value in ("x", {"a": 1})),
    *(("submission.json", "", value) for value in ([], None)),
    *(("submission.json", "time", value) for value in (HUGE, "x")),
    *(("submission.json", "shipment", value) for value in ([], {"env": []})),
]
TEXTS: list[tuple[str, bytes]] = [
    (name, data)
    for name in ("events.jsonl", "metrics.jsonl", "plan.json", "result.json", "validation.jsonl")
    for data in (b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"\0" * 9 + b"\n", b'{"a": ' + b"9" * 5000)
]
CONFIGS = (
    "train: []\n",
    "data: {mixture: [a]}\n",
    "data: {mixture: {a: x}}\n",
    "model: {lora: 3}\n",
    "cluster: {instance: [1]}\n",
    "task: [vision]\n",
    "a: &a [x, x]\nb: [*a, *a]\n",
    f"run: {{name: {json.dumps(MARKUP)}}}\n",
    "train: {precision: [bf16]}\n",
    "[1]: 2\n",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with every file, of which one is to be spoilt."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("fine", "odd"):
        run = RunFolder(open_storage(str(root)), name, 20)
        run.plan()
        run.train(3, tokens_by_source={"a": 5}, loss_by_source={"a": 1.0})
        run.interrupt()
        run.end("stopped", "as asked", **PRECISE)
        held = {"step": 2, "eval_loss": 3.0, "seconds": 1.0, "time": 2.0}
        run.run.write("validation.jsonl", json.dumps(held).encode() + b"\n")
        note = {"address": "http://127.0.0.1:9", "submission_id": "a", "time": 1.0, "shipment": {}}
        run.run.write("submission.json", json.dumps(note).encode())
    return root


@pytest.fixture
def odd(made: Path, tmp_path: Path) -> Storage:
    shutil.copytree(made, tmp_path / "runs")
    return open_storage(str(tmp_path / "runs" / "odd"))


def spoil(run: Storage, name: str, field: str, value: Any) -> None:
    if name in ("LEASE", "activity.json"):  # of a run that lives
        events = run.read("events.jsonl").splitlines(keepends=True)
        run.write("events.jsonl", b"".join(events[:-1]))
        run.write("LEASE", b'{"host": "x", "pid": 1, "machine": []}')
        run.write("activity.json", b'{"phase": "exporting", "began": 1.0, "detail": ""}')
    lines = run.read(name).splitlines() if name in LINES else [run.read(name)]
    at = LINES.get(name, 0)
    lines[at] = json.dumps({**json.loads(lines[at]), field: value} if field else value).encode()
    run.write(name, b"\n".join(lines) + b"\n" * (name in LINES))


def told(*argv: str) -> int:
    """Run a command that may refuse or fail in words, and return its exit code."""
    code = main(list(argv))
    assert code in (Exit.DONE, Exit.FAILED, Exit.REFUSED, Exit.STOPPED)
    return code


def look(run: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    """Call whatever reads a run: it tells, and the other run is there."""
    runs_url = run.url.rpartition("/")[0]
    for command in ("list", "du"):
        assert told(command, f"--storage={runs_url}") == Exit.DONE
        out = capsys.readouterr().out
        assert "fine" in out and "odd" in out and "\x1b" not in out
        assert told(command, f"--storage={runs_url}", "--json") == Exit.DONE
        assert {"fine", "odd"} <= set(capsys.readouterr().out.replace('"', "/").split("/"))
    assert told("prune", f"--storage={runs_url}", "--dry_run") in (Exit.DONE, Exit.REFUSED)
    told("status", run.url)
    told("status", run.url, "--json")
    assert told("rm", run.url, "--dry_run") == Exit.DONE or "is no run" in capsys.readouterr().err
    output = "".join(capsys.readouterr())
    assert "\x1b" not in output and "Traceback" not in output
    table = runs(storage=runs_url)._repr_html_()
    assert "fine" in table and "odd" in table and "\x1b" not in table
    assert "\x1b" not in notebook.drawn(Job(run.url))[1]
    for read_it in (pages.run_page, lambda reported: card.card(reported, False), card.curve):
        try:
            read_it(folder.read(run))
        except ConfigError as error:
            assert run.url in str(error) and "is damaged: " in str(error)


@pytest.mark.parametrize(("name", "field", "value"), sampled(WRONG, 5))
def test_an_odd_field_ends_no_command(
    odd: Storage, name: str, field: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(odd, name, field, value)
    look(odd, capsys)


@pytest.mark.parametrize(("name", "data"), sampled(TEXTS, 3))
def test_an_odd_text_ends_no_command(
    odd: Storage, name: str, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    odd.write(name, data)
    look(odd, capsys)


@pytest.mark.parametrize("text", sampled(CONFIGS, 3))
def test_an_odd_config_ends_no_command(
    odd: Storage, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    odd.write("config.yaml", text.encode())
    look(odd, capsys)


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        (Plan, '{"steps": "x"}', "steps: Input should be a valid integer"),
        (Plan, '{"step_s": {"value": 1}}', "step_s.low: Field required"),
        (Plan, "[]", "Input should be an object"),
        (Plan, '{"steps"', "it is not JSON (Expecting ':' delimiter: line 1 column 9 (char 8))"),
        (RunResult, '{"steps": 1}', "status: Field required"),
        (RunResult, '{"status": "done", "cost_usd": 1e40}', "the number 1e40 is out of range"),
        (
            Event,
            f'{{"event": "x", "time": {HUGE}}}',
            f"the number {'1'.ljust(20, '0')} is out of range",
        ),
        (
            Event,
            '{"event": "x", "time": 1e12}',
            "time: Input should be less than or equal to 10000",
        ),
    ],
)
def test_the_reason_is_named(kind: Any, text: str, why: str) -> None:
    with pytest.raises(ValueError) as error:
        parsed(text.encode(), kind)
    assert str(error.value).startswith(why)


def test_what_other_versions_and_other_systems_write_is_read() -> None:
    """Unknown fields stay; NaN, and half of a surrogate pair, are what can be said instead."""
    text = b'{"event": "x", "time": 1, "a": [1], "usd_per_hour": NaN, "user": "a\\ud800"}'
    assert parsed(text, Event) == {
        "event": "x", "time": 1.0, "a": [1], "usd_per_hour": None, "user": "a?",
    }  # fmt: skip


def test_of_a_line_only_what_is_odd_is_left_out(tmp_path: Path) -> None:
    run, names = open_storage(str(tmp_path)), (*ACCOUNTED, "loss")
    lines = [{"attempt": 1, "time": 1.0, "loss": 2.0, "step": step} for step in (1, 2, 3)]
    lines[1] |= {"loss": 1e300}
    whole = "".join(json.dumps(line) + "\n" for line in lines).encode()
    run.write("metrics.jsonl", whole)
    assert Columns.read(run, names)["loss"].tolist() == pytest.approx([2, math.nan, 2], nan_ok=True)
    for odd in ({"step": 1.5}, {"step": -1}, {"attempt": 2**60}, {"time": 1e300}, {"time": None}):
        run.write("metrics.jsonl", whole + json.dumps(lines[0] | odd).encode() + b"\n")
        assert len(Columns.read(run, names)) == 3 == len(read(run))


def test_a_damaged_file_says_where_and_why(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    assert run_folder.read(run, "plan.json", Plan) is None
    run.write("plan.json", b'{"parameters": [1]}')
    with pytest.raises(DamagedFile) as error:
        run_folder.read(run, "plan.json", Plan)
    assert str(error.value) == (
        f"{tmp_path}/plan.json is damaged: parameters: Input should be a valid integer. Delete the "
        "file: the run's next command writes it again"
    )
