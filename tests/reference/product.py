"""Run rayapp's own check, preparation and training in plain processes of a gloo group, without Ray.

    done = run([Run("name", {"model.path": ...}, legs=((2, 5), (3, None)))], folder)

All runs whose next leg has the same number of workers share the processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import processes
import torch
import yaml
from rich.console import Console

from rayapp.config import Config, load
from rayapp.data import preparation as preparation
from rayapp.data.token_rows import TokenRows, local_steps
from rayapp.finetune.check import check, settle
from rayapp.finetune.prepared_run import prepare
from rayapp.observe.activity import Phases
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import LanguageSpec

Legs = tuple[tuple[int, int | None], ...]


@dataclass(frozen=True)
class Run:
    """A run by its overrides, and its legs: (workers, steps after which they leave; None: all)."""

    name: str
    overrides: dict[str, Any]
    legs: Legs = ((1, None),)


@dataclass(frozen=True)
class Done:
    """What a run has left."""

    spec: LanguageSpec
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    folder: Path

    def steps(self, count: int | None = None) -> list[list[list[np.void]]]:
        """Return the rows of each step's micro-batches."""
        order, rows = self.spec.order, self.spec.data.rows("train")
        found = []
        for step in range(order.num_steps if count is None else count):
            ids = [number for number in order.rows(step) if number >= 0]
            size = order.micro_batch
            parts = [ids[start : start + size] for start in range(0, len(ids), size)]
            found.append([list(rows.read(np.array(part))) for part in parts])
        return found

    def held_out(self) -> list[np.void]:
        """Return the rows of the held-out data."""
        rows: TokenRows = self.spec.data.rows("eval")
        return list(rows.read(np.arange(len(rows))))


def run(runs: list[Run], root: Path) -> dict[str, Done]:
    """Prepare and train the runs, and return what each has left, by name."""
    specs = {each.name: prepared(each, root) for each in runs}
    for leg in range(max(len(each.legs) for each in runs)):
        going = [each for each in runs if len(each.legs) > leg]
        for world in sorted({each.legs[leg][0] for each in going}):
            mine = [
                (specs[each.name], each.legs[leg][1])
                for each in going
                if each.legs[leg][0] == world
            ]
            processes.spawn(_train, world, str(root / f"meet-{leg}-{world}"), mine)
    return {name: _read(spec) for name, spec in specs.items()}


def prepared(run: Run, root: Path) -> LanguageSpec:
    """Check and prepare a run as `rayapp finetune` does, in this process."""
    fields = {"run.name": run.name, "run.storage": f"{root}/runs", "run.trackers": "none"}
    fields |= {"cluster.workers": run.legs[0][0], "checkpoint.every_s": "none"}
    fields |= {"parallel.strategy": "full_shard", "train.compile": False}  # auto asks Ray
    if run.legs[0][1] is not None:
        fields["checkpoint.every_steps"] = run.legs[0][1]
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in {**fields, **run.overrides}.items()
    }
    with mock.patch.object(preparation, "run_tasks", _in_this_process):
        ready = settle(check(load(None, texts, Config), os.cpu_count(), 0), gpus=False)
        return prepare(ready, False, Console(quiet=True), Phases())[0]


def iterations_in_fp32() -> Any:
    """Let Muon iterate in fp32: in bf16, the last bit of a gradient moves an update by 2^-8."""
    return mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor)


def _in_this_process(recipes: Any, url: str, tasks: Any, *_: Any) -> Iterator[Any]:
    for task in tasks:
        recipe = recipes[task.source]
        task.run(recipe, url, recipe.fingerprint)
        yield task


def _train(rank: int, world: int, runs: list[tuple[LanguageSpec, int | None]]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    for spec, until in runs:
        rows = spec.data.rows("train")

        def steps(first: int, spec: Any = spec, rows: Any = rows, until: Any = until) -> Any:
            if first == 0:
                torch.manual_seed(spec.config.run.seed)  # for dropout, as the plain trainer does
            whole = local_steps(rows, spec.order, rank, world, first)
            return whole if until is None else islice(whole, until - first)

        try:
            with iterations_in_fp32():
                summary = train_rank(spec, RankContext(torch.device("cpu"), steps))
        except Exception as error:
            error.add_note(f"in the run {spec.config.run.name}")
            raise
        if rank == 0:
            text = json.dumps(summary, default=str)
            Path(spec.run_url.removeprefix("file://"), "summary.json").write_text(text)


def unread(spec: LanguageSpec) -> Done:
    """Return a run that is prepared, and has not begun."""
    folder = Path(spec.run_url.removeprefix("file://"))
    return Done(spec, yaml.safe_load((folder / "config.yaml").read_text()), [], {}, folder)


def _read(spec: LanguageSpec) -> Done:
    folder = Path(spec.run_url.removeprefix("file://"))
    return Done(
        spec,
        yaml.safe_load((folder / "config.yaml").read_text()),
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()],
        json.loads((folder / "summary.json").read_text()),
        folder,
    )
