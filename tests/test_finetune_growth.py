"""Check that a run that was made longer goes on: no step is done again, no row lost or repeated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from test_finetune_start import lines_of
from test_train_loop import config_of, inputs, prepared_of, worker  # noqa: F401  a fixture

from rayapp.config import Config, ConfigError
from rayapp.driver.checks import same_run
from rayapp.driver.growth import schedule_problem, stages_of
from rayapp.finetune.prepared_run import check_order, order_of
from rayapp.order import EMPTY, Order
from rayapp.storage import open_storage
from rayapp.train.spec import LanguageSpec


@pytest.mark.parametrize("rows_per_step", [4, 5, 12])
def test_the_rows_after_a_short_last_step_begin_a_new_one(rows_per_step: int) -> None:
    sizes = (10, rows_per_step, 1, 7)
    once = Order.for_epochs(*sizes, epochs=1)
    stages = ((once.num_steps, 10),)
    twice = Order.for_epochs(*sizes, epochs=2, stages=stages)
    thrice = Order.for_epochs(*sizes, epochs=3, stages=(*stages, (twice.num_steps, 20)))
    seen = []
    for step in range(thrice.num_steps):
        assert thrice.step_of(thrice.cursor(step, "")) == step
        rows = thrice.rows(step)
        for shorter in (once, twice):
            if step < shorter.num_steps:
                assert np.array_equal(rows, shorter.rows(step))
        parts = [thrice.micro_batches(step, rank, 2).ravel() for rank in range(2)]
        dealt = sorted(int(row) for part in parts for row in part if row != EMPTY)
        assert dealt == sorted(int(row) for row in rows if row != EMPTY)
        seen += [int(row) for row in rows if row != EMPTY]
    plain = Order.for_steps(*sizes, num_steps=-(-30 // rows_per_step))
    whole = [int(row) for step in range(plain.num_steps) for row in plain.rows(step)]
    assert seen == whole[:30]
    on = Order(*sizes, 50, stages=stages)  # by steps, after a run by epochs
    assert on.cursor(once.num_steps, "").row == 0 and on.rows(once.num_steps)[0] == whole[10]


@pytest.mark.full
def test_a_finished_run_goes_on(inputs: Path) -> None:  # noqa: F811
    """One epoch by one worker, its last step short; a second epoch by two."""
    fields = {"schedule": "constant", "max_steps": None, "tokens_per_step": 22 * 32}
    config = config_of(inputs, "grown", **fields)
    run = open_storage(str(inputs / "runs" / "grown"))
    prepared = prepared_of(config, inputs)
    rows = prepared.num_rows("train")
    assert rows % 22

    def train(epochs: int, world: int) -> LanguageSpec:
        new = config.model_copy(
            update={"train": config.train.model_copy(update={"epochs": epochs})}
        )
        order = order_of(
            new, prepared, stages_of(run, prepared.fingerprint, rows, new.rows_per_step)
        )
        check_order(run, prepared, order)
        spec = LanguageSpec("rayapp.finetune", new, prepared, order, run.url, f"{inputs}/model")
        summary = str(inputs / f"grown-{epochs}.json")
        processes.spawn(worker, world, f"{inputs}/grown-{epochs}", spec, summary, False)
        return spec

    first = train(1, 1)
    before = lines_of(inputs / "runs" / "grown")
    second = train(2, 2)
    lines = lines_of(inputs / "runs" / "grown")
    assert lines[: len(before)] == before
    assert [line["step"] for line in lines] == list(range(1, second.order.num_steps + 1))
    assert first.order.num_steps == len(before) and second.order.stages == ((len(before), rows),)
    assert [line["workers"] for line in lines] == [1] * len(before) + [2] * len(before)
    every = [int(r) for s in range(len(lines)) for r in second.order.rows(s) if r != EMPTY]
    assert sorted(every[:rows]) == sorted(every[rows:]) == list(range(rows))
    another = replace(second.order, seed=4)
    with pytest.raises(ConfigError, match=r"metrics.jsonl is of other rows: step \d+ had"):
        check_order(run, prepared, another)


def begun(folder: Path, **train: Any) -> Config:
    """Make the folder of a finished run of 30 steps, with a checkpoint of the last."""
    from rayapp.train.checkpoint import commit, marker

    config = config_of(folder, "begun", **train)
    run = open_storage(str(folder / "runs" / "begun"))
    run.write("config.yaml", config.to_yaml().encode())
    run.write("plan.json", json.dumps({"steps": 30, "data": {"train": {"rows": 90}}}).encode())
    run.write("result.json", json.dumps({"status": "done", "steps": 30}).encode())
    files = {}
    name = commit.claim(run, 30, b"{}")
    run.write(f"checkpoints/{name}/.metadata", b"")
    digest = marker.Digest()
    files[".metadata"] = digest.file()
    commit.commit(run, name, 30, b"{}", files)
    return config


def longer(config: Config, **fields: Any) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update=fields)})


def test_a_run_may_be_made_longer_where_its_rates_stay(tmp_path: Path) -> None:
    constant = begun(tmp_path, schedule="constant")
    run = open_storage(str(tmp_path / "runs" / "begun"))
    assert same_run(run, constant) == "done"
    for fields in (
        {"max_steps": 40},
        {"max_steps": None, "epochs": 3},
        {"max_steps": 40, "schedule": "wsd"},  # a fall at the end
    ):
        assert same_run(run, longer(constant, **fields)) == "interrupted", fields
    for fields, why in {
        "shorter": ({"max_steps": 20}, "cannot shrink: .* a run of 30 steps, and this one has 20"),
        "falling": ({"max_steps": 40, "schedule": "cosine"}, "cannot grow from 30 to 40 steps"),
        "early": ({"max_steps": 31, "schedule": "wsd"}, "would have had other learning rates"),
        "more": ({"max_steps": 40, "weight_decay": 0.0}, "is taken: .* train.weight_decay"),
    }.values():
        with pytest.raises(ConfigError, match=why):
            same_run(run, longer(constant, **fields))


def test_the_steps_to_come_may_have_a_new_schedule(tmp_path: Path) -> None:
    cosine = begun(tmp_path, schedule="cosine")
    run = open_storage(str(tmp_path / "runs" / "begun"))
    grown = {"max_steps": 40, "lr": 1e-4, "warmup_steps": 2}
    new = longer(cosine, **grown, schedule_from=30)
    assert same_run(run, new) == "interrupted" and schedule_problem(new, run) is None
    with pytest.raises(ConfigError, match="would have had other learning rates"):
        same_run(run, longer(cosine, **grown, schedule_from=29))
    ahead = schedule_problem(longer(cosine, **grown, schedule_from=31), run)
    assert ahead is not None and "ahead of the run: 30 steps are done" in ahead
    assert ahead.endswith("Set train.schedule_from=30")


def test_a_run_whose_schedule_has_an_end_is_refused_with_a_way_out(tmp_path: Path) -> None:
    cosine = begun(tmp_path, schedule="cosine")
    run = open_storage(str(tmp_path / "runs" / "begun"))
    with pytest.raises(ConfigError, match=rf"with model.init_from={run.url}$") as caught:
        same_run(run, longer(cosine, max_steps=40))
    assert "\n" not in str(caught.value)
