"""Damage whatever rayapp reads, and want each fault told: no raw error, no crash, no wrong content.

`make test-full` tries 300 inputs of each kind. `make fuzz` goes on for FUZZ_S seconds, prints the
seed of each round, and repeats one with SEED. The input that ended a process lies in the test's
temporary folder.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import yaml
from damage import damage_one, of_bytes, of_values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pictures import as_folder, as_parquet, as_tars, drawn, indexed
from test_data_preparation import here, recipe, small_units, tokenizer_url  # noqa: F401  fixtures
from test_data_sources import read
from test_data_sources_streams import PACKED, WRITERS
from test_finetune_check import check
from test_model import make_folder
from test_observe_run_folder import made, told  # noqa: F401  a fixture
from test_train_checkpoint import alone, resumed, save
from transformers import AutoTokenizer

from rayapp import model, planner
from rayapp.config import Config, ConfigError, VisionConfig, from_dict, load
from rayapp.config.vision import ImageDataConfig
from rayapp.data import sources
from rayapp.data.images.augment import centred
from rayapp.data.prepared import load as load_prepared
from rayapp.data.recipe import RowRecipe
from rayapp.data.rendering import Renderer
from rayapp.data.tokens import byte_tokenizer
from rayapp.jobs import notebook
from rayapp.jobs.find import runs
from rayapp.jobs.handle import Job
from rayapp.report import card, folder, pages
from rayapp.storage import StorageError, open_storage
from rayapp.train.checkpoint.marker import NoneUsable

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

INPUTS = 300  # of each kind
ROUND = 50  # of them before `make fuzz` looks at the time
KINDS = 8
FUZZ_S = float(os.environ.get("FUZZ_S", 0))
CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
Judge = Callable[[Path, Random], None]


def fuzz(judge: Judge, whole: Path, tmp_path: Path) -> None:
    """Call a judge with copies of a folder, which it damages as it draws."""
    until = time.monotonic() + FUZZ_S / KINDS
    seeds = (
        [int(os.environ["SEED"])]
        if "SEED" in os.environ
        else iter(lambda: random.getrandbits(32), -1)
    )
    for seed in seeds:
        print(f"SEED={seed}", flush=True)
        round_of(judge, whole, tmp_path, seed, ROUND if FUZZ_S else INPUTS)
        if time.monotonic() >= until:
            return


def round_of(judge: Judge, whole: Path, tmp_path: Path, seed: int, inputs: int) -> None:
    place = tmp_path / "damaged"

    @hypothesis.seed(seed)
    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(st.randoms(use_true_random=True))  # or inputs would be alike
    def one(dice: Random) -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole, place)
        judge(place, dice)

    one()


# ---- Runs and configs --------------------------------------------------------------------------


def test_run_folders(made: Path, tmp_path: Path) -> None:  # noqa: F811
    """Of two runs one is damaged: every command goes on, and shows the other one."""

    def judge(place: Path, dice: Random) -> None:
        how = damage_one(dice, place / "odd")
        hypothesis.note(how)
        url = str(place / "odd")
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            for command in ("list", "du"):
                told(command, f"--storage={place}")
                told(command, f"--storage={place}", "--json")
            told("prune", f"--storage={place}", "--dry_run")
            told("status", url)
            told("status", url, "--json")
            told("rm", url, "--dry_run")
        text = out.getvalue()
        assert "fine" in text and "\x1b" not in text and "Traceback" not in text
        table = runs(storage=str(place))._repr_html_()
        assert "fine" in table and "\x1b" not in table
        run = open_storage(url)
        for read_it in (pages.run_page, lambda reported: card.card(reported, False), card.curve):
            with contextlib.suppress(ConfigError, StorageError):
                read_it(folder.read(run))
        with contextlib.suppress(ConfigError, StorageError):
            notebook.drawn(Job(url))

    fuzz(judge, made, tmp_path)


def test_configs(tmp_path: Path) -> None:
    """What is accepted is planned or refused, and is the same when it is written and read again."""
    (tmp_path / "whole").mkdir()

    def judge(place: Path, dice: Random) -> None:
        path = dice.choice(CONFIGS)
        kind: Any = VisionConfig if "vision" in path.name or "imagenet" in path.name else Config
        data = path.read_bytes()
        for _ in range(dice.randint(1, 3)):
            if dice.random() < 0.5:
                with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
                    value, how = of_values(dice, yaml.safe_load(data))
                    data = yaml.safe_dump(value).encode("utf-8", "surrogatepass")
                    hypothesis.note(how)
            else:
                data, how = of_bytes(dice, data)
                hypothesis.note(how)
        (place / "config.yaml").write_bytes(data)
        try:
            config = load(str(place / "config.yaml"), {}, kind)
        except ConfigError:
            return
        (place / "again.yaml").write_text(config.to_yaml(), encoding="utf-8")
        assert load(str(place / "again.yaml"), {}, kind) == config
        with contextlib.suppress(ConfigError):
            planner.plan(config, steps=10)

    fuzz(judge, tmp_path / "whole", tmp_path)


# ---- Data --------------------------------------------------------------------------------------

RECORDS: list[list[dict[str, Any]]] = [
    [{"text": f"Text {n}: " + "wörds " * (n % 7)} for n in range(20)],
    [{"prompt": f"Q{n}?", "completion": "a\n" * (n % 5)} for n in range(20)],
]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"Q{n}?"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"a": [n, None]}}}
            ]},
            {"role": "tool", "content": "7"},
            {"role": "assistant", "content": f"A{n}."},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "does f"}}],
    }
    for n in range(8)
]  # fmt: skip


@pytest.fixture(scope="module")
def data_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for number, rows in enumerate(RECORDS):
        for form, (_, write) in WRITERS.items():
            suffix = {"feather": "arrow"}.get(form, form)
            for packed in ("", ".gz", ".zst") if form in ("jsonl", "csv") else ("",):
                path = root / f"{form}-{number}.{suffix}{packed}"
                data = write(rows)
                path.write_bytes(gzip.compress(data) if packed == ".gz" else PACKED[packed](data))
    for form in ("jsonl", "json", "parquet", "feather"):
        suffix = {"feather": "arrow"}.get(form, form)
        (root / f"chats-{form}.{suffix}").write_bytes(WRITERS[form][1](CHATS))  # type: ignore[arg-type]
    (root / "plain.txt").write_text("one\ntwo wörds\n" * 50, encoding="utf-8")
    return root


def test_data_files(data_files: Path, tmp_path: Path) -> None:
    """Each record is read and rendered or has its problem; gzip's own checksum lets none change."""
    render_ = {kind: Renderer(byte_tokenizer(), kind) for kind in ("text", "prompt", "chat")}
    names = sorted(path.name for path in data_files.iterdir())

    def records(path: Path) -> list[Any]:
        source = sources.find(str(path))
        for unit in sources.units(source, 0.0):
            for piece in unit.pieces:
                sources.content_key(source, (piece,))
        return [record.value for record in read(source) if record.problem is None]

    whole = {name: records(data_files / name) for name in names}

    def judge(place: Path, dice: Random) -> None:
        name = dice.choice(names)
        (place / "one").mkdir()
        path = place / "one" / name
        shutil.copyfile(place / name, path)
        how = damage_one(dice, place / "one")
        hypothesis.note(how)
        try:
            found = records(path)
        except (ConfigError, StorageError):
            return
        if name.endswith(".gz") and "bit of byte" in how:
            assert found == whole[name]
        kind = "chat" if name.startswith("chats") else ("text" if "-0" in name else "prompt")
        render_[kind].documents(found)

    fuzz(judge, data_files, tmp_path)


def test_images(tmp_path: Path) -> None:
    """Images in folders, tars and Parquet: indexed, or told with the file."""
    some = drawn(2, 5)
    whole = tmp_path / "whole"
    as_folder(whole / "folder", some)
    as_tars(whole / "tars", some, 5)
    as_parquet(whole / "parquet", some, 5)

    def judge(place: Path, dice: Random) -> None:
        kind = dice.choice(["folder", "tars", "parquet"])
        hypothesis.note(damage_one(dice, place / kind))
        with contextlib.suppress(ConfigError, StorageError):
            rows = indexed(place / kind, open_storage(str(place / "index"))).rows("train")
            for data in rows.read(range(len(rows))):
                assert centred(data, ImageDataConfig(size=32)).shape == (32, 32, 3)

    fuzz(judge, whole, tmp_path)


def test_prepared_data(recipe: RowRecipe, tmp_path: Path) -> None:  # noqa: F811
    """Rows come back as they were written or made again, or reading tells; none is another one."""
    before = here(recipe, tmp_path / "whole")
    rows = {
        split: before.rows(split).read(np.arange(before.num_rows(split)))
        for split in ("train", "eval")
    }
    (tmp_path / "whole" / f"{recipe.fingerprint}").joinpath("note").write_text("of nobody")

    def judge(place: Path, dice: Random) -> None:
        for _ in range(dice.randint(1, 3)):
            pattern = dice.choice(["*", "*.rows", "*.rows", "[0-9a-f]" * 32])
            hypothesis.note(damage_one(dice, place, pattern))
        try:
            root = open_storage(str(place))
            found = load_prepared(root / recipe.fingerprint) or here(recipe, place)
            for split, expected in rows.items():
                read_ = found.rows(split).read(np.arange(found.num_rows(split)))
                assert np.array_equal(read_, expected), split
        except (ConfigError, StorageError):
            pass

    fuzz(judge, tmp_path / "whole", tmp_path)


# ---- Models and checkpoints --------------------------------------------------------------------


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with alone(tmp_path_factory.mktemp("group")):
        yield


def loaded(path: str, device: torch.device) -> None:
    """Check a model folder as a run does, and load its weights if nothing is wrong."""
    problems: list[str] = []
    config = from_dict({"model": {"path": path}, "data": {"seq_len": 64}})
    config, source, tokenizer = check._model(config, {"chat"}, problems)
    assert all("\n" not in line for line in problems)
    if problems or source is None:
        return
    lm = model.build(source.config, loss=model.no_loss)
    mesh = model.device_mesh("cpu", strategy="full_shard", replicas=1)
    model.load_weights(model.shard(lm, mesh), source, "cpu")
    Renderer(tokenizer, "chat").documents([CHATS[0], {"messages": []}])


@pytest.mark.usefixtures("group")
def test_model_folders(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    make_folder("llama_untied", whole)
    byte_tokenizer().save_pretrained(whole)

    def judge(place: Path, dice: Random) -> None:
        hypothesis.note(damage_one(dice, place))
        loaded(str(place), torch.device("cpu"))

    fuzz(judge, whole, tmp_path)


def test_tokenizers(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    byte_tokenizer().save_pretrained(whole)
    AutoTokenizer.from_pretrained(whole)

    def judge(place: Path, dice: Random) -> None:
        hypothesis.note(damage_one(dice, place))
        problems: list[str] = []
        tree = {"model": {"path": "tiny", "tokenizer": str(place)}, "data": {"seq_len": 64}}
        _, _, tokenizer = check._model(from_dict(tree), {"chat"}, problems)
        assert all("\n" not in line for line in problems)
        if not problems:
            Renderer(tokenizer, "chat").documents(CHATS)
            Renderer(tokenizer, "text").documents(RECORDS[0])

    fuzz(judge, whole, tmp_path)


@pytest.mark.usefixtures("group")
def test_checkpoints(tmp_path: Path) -> None:
    """Resuming takes a checkpoint whose values are its step's, or says that none is usable."""
    run = open_storage(str(tmp_path / "whole"))
    save(run, 1)
    save(run, 2)

    def judge(place: Path, dice: Random) -> None:
        for _ in range(dice.randint(1, 2)):
            hypothesis.note(damage_one(dice, place))
        with contextlib.suppress(NoneUsable, StorageError):
            resumed(open_storage(str(place)))

    fuzz(judge, tmp_path / "whole", tmp_path)
