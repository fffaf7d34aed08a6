"""Check what a node's metrics agent shows of a run: names, tags, what is left out, what stays."""

from __future__ import annotations

import io
import math
import re
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rayapp.config.fields import TOKENS
from rayapp.driver.command import _logged
from rayapp.driver.lease import held
from rayapp.driver.observe import Hooks
from rayapp.driver.stop import Stop
from rayapp.driver.supervise import Command
from rayapp.observe.columns import Columns
from rayapp.observe.events import Journal
from rayapp.observe.gauges import (
    FIGURE,
    TEXTS,
    Driver,
    Steps,
    checkpoint_every_s,
    tell_end,
)
from rayapp.observe.goodput import account
from rayapp.observe.metrics import FIELDS, MetricsLine, columns_of, line_of
from rayapp.observe.result import RunFailed
from rayapp.storage import open_storage

OWN_TAGS = ("rank", "cause", "kind", "source", "name", "le")
LONE = ("gauge", "")  # a gauge of the whole run
KINDS = ("failure", "preemption", "resize")
Scrape = Callable[[str], dict[str, float]]


def record(step: int, **values: Any) -> MetricsLine:
    numbers: dict[str, Any] = dict.fromkeys(columns_of(TOKENS), 0.5)
    facts: dict[str, Any] = {
        "step": step,
        "tokens": 64,
        "workers": 2,
        "attempt": 1,
        "skipped": False,
    }
    facts |= {name: None for name, shown in FIELDS.items() if shown.tag in ("source", "name", "of")}
    return line_of(TOKENS, numbers, facts, {"mfu": None, "eval_loss": None}, values)


@pytest.fixture(scope="module")
def scrape() -> Iterator[Scrape]:
    """Start a Ray; yield what returns {name{tags}: value} of one run from the node's agent."""
    import ray

    temporary = tempfile.mkdtemp()  # short: Ray makes sockets below it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_metrics_report_interval_ms", "1000")  # the agent's
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            _temp_dir=temporary,
            _system_config={"metrics_report_interval_ms": 1000},  # this process's
        )
        (node,) = ray.nodes()
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

        def found(run: str) -> dict[str, float]:
            with urllib.request.urlopen(url, timeout=30) as answer:
                text = answer.read().decode()
            values: dict[str, float] = {}
            for line in text.splitlines():
                match = re.fullmatch(r"ray_rayapp_(\w+)\{(.*)\} (\S+)", line)
                tags = dict(re.findall(r'(\w+)="([^"]*)"', match[2])) if match else {}
                if match and tags["run"] == run:
                    own = [tags[name] for name in OWN_TAGS if name in tags]
                    name = ",".join([match[1], *own])
                    values[name] = values.get(name, 0.0) + float(match[3])
            return values

        yield found
        ray.shutdown()
    shutil.rmtree(temporary, ignore_errors=True)


def shown(scrape: Scrape, run: str, values: dict[str, float]) -> dict[str, float]:
    """Wait until a run shows these values, and return all it shows.

    Ray sends what is set whenever its interval ends, in the midst of values that belong together.
    """
    until = time.monotonic() + 30
    while not values.items() <= (found := scrape(run)).items():
        assert time.monotonic() < until, (values, found)
        time.sleep(0.2)
    return found


def test_a_step_is_told_by_rank_0_and_memory_by_each(scrape: Scrape) -> None:
    import ray

    @ray.remote(num_cpus=0)
    class Rank:
        def __init__(self, rank: int) -> None:
            self.told = Steps("steps", rank)

        def step(self, record: MetricsLine) -> None:
            self.told.step(record)

    ranks = [Rank.remote(rank) for rank in (0, 1)]  # type: ignore[attr-defined]
    first = record(1, eval_loss=3.5, checkpoint_stall_s=0.0, eval_s=0.0)
    last = record(2, loss=2.25, step_s=7.0, peak_gib=4.0, checkpoint_stall_s=1.5)
    for each in (first, last):
        ray.get([rank.step.remote(each) for rank in ranks])
    values = {"loss": 2.25, "eval_loss": 3.5, "workers": 2, "peak_gib,0": 4.0, "peak_gib,1": 4.0}
    values |= {"data_wait_s_total,0": 1.0, "data_wait_s_total,1": 1.0, "tokens_total": 128}
    values |= {"checkpoint_stall_s_total": 1.5, "step_s_count": 2}
    values |= {"step_s_bucket,0.5": 1, "step_s_bucket,10.0": 2}
    found = shown(scrape, "steps", values)
    told = {name for name in columns_of(TOKENS) if (FIELDS[name].live, FIELDS[name].tag) == LONE}
    assert {name for name in found if name in FIELDS} == told - {"mfu"}  # unknown is not told
    assert not [name for name in found if name.startswith(("bad_steps", "skipped_steps"))]
    assert len(found) < 60  # series; those of another rank are two


def test_each_source_of_a_mixture_is_told(scrape: Scrape) -> None:
    losses = {"a.jsonl": 2.0, "s3://b/c": 4.0}
    told = Steps("mixed", 0)
    told.step(record(1, loss_by_source=losses, tokens_by_source={"a.jsonl": 60, "s3://b/c": 4}))
    losses |= {"a.jsonl": 1.5, "s3://b/c": None}
    more = {"tokens_by_source": {"a.jsonl": 64, "s3://b/c": 0}}
    told.step(record(2, loss_by_source=losses, eval_loss_by_source={"a.jsonl": 3.0}, **more))
    told.step(record(3, skipped=True, **more))
    values = {"loss_by_source,a.jsonl": 1.5, "loss_by_source,s3://b/c": 4.0}
    values |= {"tokens_by_source_total,a.jsonl": 124, "tokens_by_source_total,s3://b/c": 4}
    shown(scrape, "mixed", values | {"eval_loss_by_source,a.jsonl": 3.0})


def test_figures_of_ones_own_are_told_by_their_names(scrape: Scrape) -> None:
    figures: Any = {"margin": 0.25, "reward gap": 2.0, "own_loss": 3.0, "none": None}
    Steps("own", 0).step(record(1, eval_metrics={"top": 0.5, "failed": None}, **figures))
    values = {"figure,margin": 0.25, "figure,reward gap": 2.0, "eval_metrics,top": 0.5}
    found = shown(scrape, "own", values | {"own_loss": 3.0})
    assert not {"figure,none", "figure,own_loss", "eval_metrics,failed"} & found.keys()


def test_what_is_not_finite_is_counted_not_told(scrape: Scrape) -> None:
    told = Steps("bad", 0)
    told.step(record(1, loss=2.0))
    told.step(record(2, loss=math.nan, skipped=True))
    told.step(record(3, loss=9.0, grad_norm=math.inf, skipped=True))
    told.step(record(4, loss=8.0, skipped=True))  # a spike
    values = {"step": 4, "loss": 8.0, "grad_norm": 0.5}
    shown(
        scrape, "bad", values | {"bad_steps_total": 2, "skipped_steps_total": 3, "tokens_total": 64}
    )
    told.step(record(5, loss=math.nan))
    shown(scrape, "bad", {"step": 5, "bad_steps_total": 3, "loss": 8.0})


def test_a_worker_that_ends_at_once_has_told_why(scrape: Scrape) -> None:
    """The step whose loss ends the run is the last thing that its workers tell."""
    import ray

    @ray.remote(num_cpus=0)
    class Rank:
        def work(self) -> None:
            Steps("ended", 0).bad_step()

    for attempt in (1, 2):
        rank = Rank.remote()  # type: ignore[attr-defined]
        ray.get(rank.work.remote())
        ray.kill(rank)
        shown(scrape, "ended", {"bad_steps_total": attempt})
    assert scrape("ended") == {"bad_steps_total": 2}


@pytest.mark.full
def test_a_gauge_stays_through_a_long_step_and_goes_with_the_run(scrape: Scrape) -> None:
    with Steps("slow", 0) as told:
        told.step(record(1, eval_loss=3.0))
        told.step(record(2))  # without an evaluation
        shown(scrape, "slow", {"step": 2, "tokens_total": 128})
        for _ in range(8):  # Ray shows what was set once for 2 s here
            time.sleep(1)
            found = scrape("slow")
            assert found["step"] == 2 and found["eval_loss"] == 3.0
    until = time.monotonic() + 20
    while "step" in (found := scrape("slow")):
        assert time.monotonic() < until, found
        time.sleep(0.2)
    assert found["tokens_total"] == 128


def test_the_driver_tells_accounts_and_checkpoints(scrape: Scrape) -> None:
    price = {"nodes": 1, "instance": "c7i.2xlarge", "usd_per_hour": 3.6}
    events: list[dict[str, Any]] = [
        {"event": "started", "time": 1000.0, "seen_until": None, **price},
        {"event": "workers", "time": 1000.0, "workers": 2, **price},
    ]
    told = Driver("driven", num_steps=10, started=1005.0)
    told.set(account(events, Columns(), now=1100.0), None, None, planned_step_s=None)
    # Before there is a step or a checkpoint, time counts from the start of this command.
    values = {"last_step_unix_s": 1005.0, "checkpoint_unix_s": 1005.0, "num_steps": 10}
    values |= {"wall_s": 100, "goodput,start": 1.0, "goodput,step": 0.0}
    found = shown(scrape, "driven", values | {f"interruptions,{kind}": 0 for kind in KINDS})
    assert found["cost_usd"] == pytest.approx(0.1)
    assert not {"checkpoint_step", "checkpoint_every_s", "planned_step_s"} & found.keys()

    failure = {"kind": "failure", "reason": "", "step": 3, "workers": 2, "trained_until": 1150.0}
    events += [{"event": "interrupted", "time": 1150.0, **failure}]
    told.set(
        account(events, Columns(), now=1200.0),
        1190.0,
        (7, 1180.0),
        checkpoint_every_s=30.0,
        planned_step_s=2.0,
    )
    values = {"wall_s": 200, "interruptions,failure": 1, "interruptions,preemption": 0}
    values |= {"checkpoint_step": 7, "checkpoint_unix_s": 1180.0, "checkpoint_every_s": 30.0}
    found = shown(scrape, "driven", values | {"last_step_unix_s": 1190.0, "planned_step_s": 2.0})
    assert sum(v for k, v in found.items() if k.startswith("goodput,")) == pytest.approx(1.0)

    # Resumed after a day: what was done before this command is not told as a day without a step.
    told = Driver("resumed", num_steps=10, started=90_000.0)
    told.set(account([], Columns(), now=None), 1190.0, (7, 1180.0))
    values = {"last_step_unix_s": 90_000.0, "checkpoint_unix_s": 90_000.0, "checkpoint_step": 7}
    found = shown(scrape, "resumed", values | {"wall_s": 0.0})
    assert "cost_usd" not in found


@pytest.mark.parametrize(("status", "failed"), [("failed", 1), ("done", 0), ("stopped", 0)])
def test_an_end_is_told_by_a_process_that_ends_at_once(
    scrape: Scrape, status: str, failed: int
) -> None:
    """What a driver that is killed does not tell: so alerts know one from the other."""
    import ray

    @ray.remote(num_cpus=0)
    class Process:
        def end(self) -> None:
            tell_end(f"ends-{status}", status)

    process = Process.remote()  # type: ignore[attr-defined]
    ray.get(process.end.remote())
    ray.kill(process)
    shown(scrape, f"ends-{status}", {"failed": failed})
    told = Driver("goes-on", num_steps=10, started=1000.0)
    told.set(account([], Columns(), now=None), 1190.0, None)
    assert "failed" not in shown(scrape, "goes-on", {"last_step_unix_s": 1190.0})


def test_a_failure_before_training_is_told_too(scrape: Scrape, tmp_path: Path) -> None:
    """No Observer is there yet, and the alert on a failure must fire all the same."""
    run, stop = open_storage(str(tmp_path)), Stop(open_storage(str(tmp_path)))
    with held(run) as lease:
        command = Command(run, lease, stop, Journal(run))
        console = Console(file=io.StringIO())
        with pytest.raises(RunFailed), _logged(command, "ends-early", console, Hooks([])):
            raise RunFailed("the tokenizer cannot be read")
        with _logged(command, "ends-well", console, Hooks([])):
            pass
    shown(scrape, "ends-early", {"failed": 1})
    assert "failed" not in scrape("ends-well"), "the command tells that where it has the result"


def test_checkpoints_are_due_by_time_or_by_steps() -> None:
    slow, pace = np.array([60.0, 2.0, 2.0]), np.array([8.0, math.nan])
    for every_s, every_steps, step_s, expected in [
        (None, None, slow, None),
        (600.0, None, slow, 600.0),
        (600.0, 100, slow[:0], 600.0),
        (600.0, 100, slow, 200.0),
        (None, 100, slow[:0], None),
        (None, 100, pace[:1], 800.0),
        (None, 100, pace, 400.0),
        (None, 100, np.concatenate([100 * slow, np.ones(32)]), 100.0),
    ]:
        assert checkpoint_every_s(every_s, every_steps, step_s) == expected


def test_names_bear_their_unit() -> None:
    assert FIGURE not in FIELDS
    for name in TEXTS:
        assert re.fullmatch(r"[a-z][a-z_]*[15]?", name) and not name.endswith("_seconds")
