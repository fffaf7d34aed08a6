"""Every value that a config accepts is planned, and trains a step or is refused with a reason."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import processes
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from config_values import choices, ends, pairs
from pictures import as_folder, as_parquet, as_tars, drawn, indexed
from reference import made, product
from rich.console import Console
from sampled import sampled

from rayapp import planner
from rayapp.config import Config, ConfigError, RunConfig, VisionConfig, load
from rayapp.config.fields import PairObjective
from rayapp.config.language import Train
from rayapp.data.images.batches import local_steps
from rayapp.hardware import INSTANCES
from rayapp.planner import plan_tables
from rayapp.storage import open_storage
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import ImageSpec
from rayapp.vision import classifier_run as vision
from rayapp.vision.classifier_run import order_of

KINDS = (Config, VisionConfig)
MACHINES = ("p5.48xlarge", "p4d.24xlarge", "p3.8xlarge", "m7i.4xlarge", "none")
# What goes along with a value, so that it is legal.
WITH: dict[tuple[str, str], dict[str, str]] = {
    ("data.seq_len", "1048576"): {
        "train.tokens_per_step": "8388608",
        "model.overrides": "{max_position_embeddings: 1048576}",
    },
    ("train.tokens_per_step", "8"): {"data.seq_len": "8", "train.micro_batch": "1"},
    ("train.images_per_step", "1"): {"train.micro_batch": "1"},
    ("data.mixture", '{"stdlib": 5e-324}'): {"train.max_steps": "1"},
    ("parallel.replicas", "1"): {"parallel.strategy": "hybrid_shard"},
    ("eval.patience", "1"): {"checkpoint.best": "eval_loss", "eval.every_steps": "1"},
}
NO_AREA = ("data.crop_scale", "0, 0")  # refused: both ends of a crop's area are 0


class PlantedTrain(Train):
    optimizer: Literal["adamw", "planted"] = "adamw"  # type: ignore[assignment]


class Planted(Config):
    train: PlantedTrain = PlantedTrain()


def single(kind: type[RunConfig]) -> Iterator[tuple[str, str]]:
    """Yield every value of every choice, and the ends of every number."""
    for found in (choices(kind), ends(kind)):
        yield from ((name, value) for name, values in found.items() for value in values)


def planned(kind: Any, values: dict[str, str], whole: bool = True) -> planner.Answer | ConfigError:
    """Plan as the command does; `whole` with suggestions, other node counts, JSON and tables."""
    try:
        plan = planner.plan(load(None, values, kind))
        if whole:
            others, table = planner.suggestions(plan.question, 1), planner.scaling(plan.question)
            json.dumps(planner.as_dict(plan, others, table, None))
            plan_tables.show(Console(file=io.StringIO()), plan, others, table, None, {})
        return plan
    except ConfigError as refused:
        return refused
    except Exception as error:
        error.add_note(f"{values}")
        raise


@pytest.mark.parametrize("machine", sampled(MACHINES, 2))
@pytest.mark.parametrize("kind", KINDS)
def test_every_value_is_planned(kind: type[RunConfig], machine: str) -> None:
    gpu = None if machine == "none" else INSTANCES[machine].gpu
    for name, value in single(kind):
        found = planned(
            kind, {"cluster.instance": machine, **WITH.get((name, value), {}), name: value}
        )
        lacks = name == "train.precision" and gpu is not None and gpu.flops.get(value, 0) is None
        assert isinstance(found, ConfigError) == (lacks or (name, value) == NO_AREA), found


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_two_values_together_are_planned_or_refused(kind: type[RunConfig]) -> None:
    """Each value of each choice of a technique with each other one, and with each machine."""
    sections = ("model.", "train.", "parallel.")
    values = {name: each for name, each in choices(kind).items() if name.startswith(sections)}
    found = []
    for number, both in enumerate(pairs({**values, "cluster.instance": [*MACHINES]})):
        machine = {"cluster.instance": MACHINES[number % len(MACHINES)]}
        found.append(isinstance(planned(kind, machine | both, whole=False), planner.Answer))
    assert len(found) > 400 and sum(found) > 0.9 * len(found)


def test_a_value_that_the_planner_does_not_know_is_found() -> None:
    assert ("train.optimizer", "planted") in single(Planted)
    with pytest.raises(KeyError) as caught:
        for name, value in single(Planted):
            planned(Planted, {"cluster.instance": "none", name: value})
    assert "'train.optimizer': 'planted'" in str(caught.value.__notes__)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cheapest_machines_are_found_without_a_named_one(kind: Any) -> None:
    fields = {"train.max_steps": "100", "cluster.instance": "none"}
    question = planner.plan(load(None, fields, kind)).question
    found = planner.cheapest(question, deadline_hours=100.0)
    assert found.cost_usd is not None and found.question.instance is not None


# ---- A step of training ------------------------------------------------------------------------


def files_of(root: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Return the data that each format and each kind of record needs."""
    files = made.make_data(root)
    text = [json.loads(line)["text"] for line in files["text"].read_text().splitlines()]
    table = pa.table({"text": text})
    (root / "a.txt").write_text("\n".join(text))
    (root / "a.json").write_text(json.dumps([{"text": each} for each in text]))
    for name, sign in (("a.csv", ","), ("a.tsv", "\t")):
        with open(root / name, "w", newline="") as file:
            csv.writer(file, delimiter=sign).writerows([["text"], *([each] for each in text)])
    pq.write_table(table, root / "a.parquet")
    with pa.OSFile(str(root / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    ends = {"text": "txt"} | {
        end: end for end in ("jsonl", "json", "csv", "tsv", "parquet", "arrow")
    }
    shutil.copy(files["text"], root / "a.jsonl")
    formats = {("data.format", name): f"{root}/a.{end}" for name, end in ends.items()}
    kinds = {("data.kind", name): str(files[name]) for name in ("prompt", "chat")}
    pairs = {"preference": files["pairs"], "chat_preference": files["chat_pairs"]}
    pairs |= {"unpaired": files["answers"], "chat_unpaired": files["chat_answers"]}
    objectives = get_args(PairObjective)
    kinds |= {("data.kind", name): str(path) for name, path in pairs.items()}
    kinds |= {("train.objective", name): str(files["pairs"]) for name in objectives}
    kinds["train.objective", "kto"] = str(files["answers"])
    return {each: {"data.path": path} for each, path in {**formats, **kinds}.items()}


CPU = "m7i.4xlarge"  # a machine whose memory is known
PAIRS = {"data.seq_len": "128", "data.bad_rows": "0.2"}  # of two answers each
ALONG = {  # what goes along with a value, beside the data, so that it can train
    ("data.kind", "chat"): {"data.chat_template": "chatml"},
    **{("train.objective", name): PAIRS for name in get_args(PairObjective)},
    ("data.kind", "preference"): PAIRS | {"train.objective": "dpo"},
    ("data.kind", "unpaired"): PAIRS | {"train.objective": "kto"},
    ("data.kind", "chat_unpaired"): PAIRS
    | {"train.objective": "kto", "data.chat_template": "chatml"},
    ("data.kind", "chat_preference"): PAIRS
    | {"train.objective": "orpo", "data.chat_template": "chatml"},
    ("train.micro_batch", "auto"): {"cluster.instance": CPU},
    ("parallel.strategy", "auto"): {"cluster.instance": CPU},
}
NO_GPU = "is not available: "
REFUSED = {  # on a machine without a GPU, and without a server of MLflow or a key of W&B
    ("run.trackers", "mlflow"): "is without a server: MLFLOW_TRACKING_URI is not set",
    ("run.trackers", "wandb"): "is without a key: WANDB_API_KEY is not set",
    ("model.adapter", "merge"): "is in conflict: model.path=tiny is no adapter",
    ("model.lora.quantize", "nf4"): "is in conflict: the preset model.path=tiny has no weights",
    ("model.attention", "flash"): f"{NO_GPU}flash attention trains on GPUs only",
    ("model.attention", "flex"): f"{NO_GPU}flex attention trains on GPUs only",
    ("data.format", "hub"): "is in conflict: data.path=",
    ("train.precision", "fp8"): f"{NO_GPU}the workers have no GPU",
    ("train.loss_kernel", "liger"): f"{NO_GPU}the workers have no GPU",
    ("cluster.gpu", "true"): "is more than this machine can place: it has 0 GPUs",
}


@pytest.fixture(autouse=True)
def no_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def checked(kind: Any, prepare: Callable[[str, dict[str, str]], Any], along: Any) -> list[Any]:
    """Prepare a run for each value of each choice; compare those that are refused with REFUSED."""
    specs, refused = [], {}
    for name, values in choices(kind).items():
        for value in values:
            run = f"{name}-{value}"
            try:
                specs.append(prepare(run, along.get((name, value), {}) | {name: value}))
            except ConfigError as error:
                refused[name, value] = str(error)
            except Exception as error:
                error.add_note(run)
                raise
    mine = {each: why for each, why in REFUSED.items() if each[1] in choices(kind).get(each[0], ())}
    unlike = {each: refused.get(each) for each in refused.keys() ^ mine.keys()}
    assert not unlike
    for each, why in mine.items():
        assert f" {why}" in refused[each]
    return specs


def assert_a_step(spec: Any) -> None:
    lines = Path(spec.run_url.removeprefix("file://"), "metrics.jsonl").read_text().splitlines()
    (line,) = map(json.loads, lines)
    assert math.isfinite(line["loss"]) and line["step"] == 1, spec.config.run.name


@pytest.mark.full
def test_every_value_of_a_language_model_trains_a_step_or_is_refused(tmp_path: Path) -> None:
    data = files_of(tmp_path)
    made.bpe().save_pretrained(tmp_path / "tokenizer")
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}
    base = {
        "model.path": "tiny",
        "model.overrides": json.dumps(sizes),
        "model.tokenizer": f"{tmp_path}/tokenizer",
        "data.path": f"{tmp_path}/a.json",
        "data.seq_len": "64",
        "train.tokens_per_step": "128",
        "train.micro_batch": "1",
        "train.max_steps": "1",
    }
    along = {each: data.get(each, {}) | ALONG.get(each, {}) for each in [*data, *ALONG]}

    def prepare(name: str, values: dict[str, str]) -> Any:
        return product.prepared(product.Run(name, base | values), tmp_path)

    specs = checked(Config, prepare, along)
    processes.spawn(product._train, 1, str(tmp_path / "meet"), [(spec, 1) for spec in specs])
    for spec in specs:
        assert_a_step(spec)


@pytest.mark.full
def test_every_value_of_a_classifier_trains_a_step_or_is_refused(tmp_path: Path) -> None:
    pictures = drawn(3, 6)
    root = as_folder(tmp_path / "folder", pictures)
    roots = {
        "tar": as_tars(tmp_path / "tar", pictures, 9),
        "parquet": as_parquet(tmp_path / "parquet", pictures, 9),
    }
    shape = {"embedding_size": 4, "hidden_sizes": [4], "depths": [1]}
    base = {
        "model.path": "resnet-tiny",
        "model.overrides": json.dumps(shape),
        "run.storage": f"{tmp_path}/runs",
        "run.trackers": "none",
        "data.path": str(root),
        "data.size": "32",
        "train.images_per_step": "4",
        "train.micro_batch": "2",
        "train.max_steps": "1",
        "cluster.workers": "1",
    }

    def prepare(name: str, values: dict[str, str]) -> ImageSpec:
        config = load(None, base | values | {"run.name": name}, VisionConfig)
        ready = vision.settle(vision.check(config, os.cpu_count(), 0), gpus=False)
        index = indexed(ready.source.root, open_storage(f"{tmp_path}/runs/.prepared"), 0.05)
        order = order_of(ready.config, index)
        return ImageSpec("rayapp.vision", ready.config, index, order, ready.run.url)

    along = {("data.format", name): {"data.path": str(path)} for name, path in roots.items()}
    specs = checked(VisionConfig, prepare, along)
    processes.spawn(_train_images, 1, str(tmp_path / "meet"), specs)
    for spec in specs:
        assert_a_step(spec)


def _train_images(rank: int, world: int, specs: list[ImageSpec]) -> None:
    for spec in specs:
        rows, look = spec.data.rows("train"), spec.config.data
        steps = list(itertools.islice(local_steps(rows, look, spec.order, rank, world, 0), 1))
        try:
            train_rank(spec, RankContext(torch.device("cpu"), lambda first, steps=steps: steps))
        except Exception as error:
            error.add_note(f"in the run {spec.config.run.name}")
            raise
