"""Check which tokenizer and which rows a run is given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corpora
import numpy as np
import pytest
from test_data_preparation import VALUES, write_jsonl
from test_data_prepared_windows import in_this_process

from rayapp.config import ConfigError, from_dict
from rayapp.data import kinds, recipe, tokens
from rayapp.data import preparation as rows
from rayapp.data import prepared_windows as windows
from rayapp.data.prepared import Prepared
from rayapp.data.prepared_windows import GrowingRows
from rayapp.data.sources import cutting
from rayapp.finetune import plan_lines as show
from rayapp.finetune import prepared_run as prepare
from rayapp.finetune import source_rows as sources
from rayapp.finetune.check import Input
from rayapp.observe.activity import Phases
from rayapp.order import Order
from rayapp.storage import open_storage


def ready_run(folder: Path, path: str, **data: Any) -> Any:
    """Return what the checks would have found, of a run of chats on the model `tiny`."""
    source = write_jsonl(folder / path, [VALUES["chat"](n) for n in range(40)])
    tree = {
        "model": {"path": "tiny", "tokenizer": "bytes"},
        "data": {"path": path, "kind": "chat", "seq_len": 16, **data},
        "run": {"storage": str(folder), "name": "run"},
    }
    shape = SimpleNamespace(vocab_size=259)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: shape), preset=True)
    run = open_storage(str(folder)) / "run"
    inputs = (Input(path, 1.0, "chat", source, None),)
    return SimpleNamespace(
        config=from_dict(tree), inputs=inputs, model=model, tokenizer=None, template="", run=run
    )


@pytest.mark.parametrize("how", ["one", "mixture", "packings", "windows"])
def test_a_run_that_began_with_rows_of_the_version_before_goes_on_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It takes those that are there, and makes the others under their fingerprint."""
    monkeypatch.setattr(windows, "run_tasks", in_this_process)
    monkeypatch.setattr(rows, "run_tasks", in_this_process)
    monkeypatch.setattr(cutting, "PART_BYTES", 128)
    ready = ready_run(tmp_path, "a.jsonl")
    more: dict[str, Any] = {"packings": 2} if how == "packings" else {}
    if how == "mixture":
        other = write_jsonl(tmp_path / "b.jsonl", [VALUES["chat"](n) for n in range(90, 150)])
        ready.inputs = (Input("b.jsonl", 1.0, "chat", other, None), *ready.inputs)
        more = {"mixture": {"a.jsonl": 3.0, "b.jsonl": 1.0}}
    if how == "windows":
        more = {"window_bytes": 1000}
    train = ready.config.train.model_copy(update={"max_steps": 5, "tokens_per_step": 64})
    data = ready.config.data.model_copy(update=more)
    ready.config = ready.config.model_copy(update={"data": data, "train": train})
    url, tokenizer = prepare.shared_tokenizer(ready, Phases())

    def given() -> Prepared:
        return prepare.prepare_rows(ready, url, tokenizer, Phases())[0]

    new = given()
    with monkeypatch.context() as patch:
        chats = replace(kinds.KINDS["chat"], version=kinds.KINDS["chat"].version - 1)
        patch.setattr(recipe, "KINDS", {"chat": chats})
        before = given()
    root = open_storage(str(tmp_path)) / ".prepared"
    for folder in before.folders:
        corpora.make_earlier(root / folder, 10 * 16 + 4)
    assert new.fingerprint != before.fingerprint and given() == new, "a new run"
    ready.run.write("plan.json", json.dumps({"fingerprint": before.fingerprint}).encode())
    began = given()
    assert began.fingerprint == before.fingerprint
    assert {name.partition(".")[2] for name, _ in began.shards["train"]} == {"rows"}
    numbers = began.rows("train").numbers(np.arange(began.num_rows("train")))
    expected = new.rows("train").read(numbers)
    assert (began.rows("train").read(numbers) == expected).all()
    for folder in before.folders:
        (root / folder).delete_tree("")
    again = given()
    assert again.fingerprint == before.fingerprint
    assert (again.rows("train").read(numbers) == expected).all()
    # A command that was refused has written a plan of its own: the newest checkpoint decides.
    ready.run.write("plan.json", json.dumps({"fingerprint": new.fingerprint}).encode())
    newest = SimpleNamespace(state={"cursor": {"fingerprint": before.fingerprint}})
    monkeypatch.setattr(prepare, "latest", lambda _: (newest, []))
    assert given().fingerprint == before.fingerprint


def test_a_template_of_the_users_is_saved_with_the_tokenizer_and_a_training_one_is_not(
    tmp_path: Path,
) -> None:
    template = tokens.CHAT_TEMPLATE + " "
    ready = ready_run(tmp_path, "a.jsonl", chat_template="a.jinja")
    ready.template = template
    url, tokenizer = prepare.shared_tokenizer(ready, Phases())
    assert tokens.load_tokenizer(url).chat_template == tokenizer.chat_template == template
    made = prepare._recipe(ready, ready.inputs[0], url, tokenizer)
    assert not made.template and "chat_template" not in made.parts()

    ready = ready_run(tmp_path, "a.jsonl", chat_template="training", reasoning="mask")
    ready.template = template
    url, tokenizer = prepare.shared_tokenizer(ready, Phases())
    assert tokens.load_tokenizer(url).chat_template == tokens.CHAT_TEMPLATE
    made = prepare._recipe(ready, ready.inputs[0], url, tokenizer)
    assert made.template == template and made.parts()["reasoning"] == "mask"
    assert made.parts()["chat_template"]


def test_a_run_of_windows_prepares_those_that_its_steps_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With epochs it prepares all; the steps are the same."""
    monkeypatch.setattr(windows, "run_tasks", in_this_process)
    monkeypatch.setattr(cutting, "PART_BYTES", 128)
    ready = ready_run(tmp_path, "a.jsonl")
    data = ready.config.data.model_copy(update={"window_bytes": 1000})
    config = ready.config.model_copy(update={"data": data})
    url, tokenizer = prepare.shared_tokenizer(ready, Phases())

    def order_and_rows(**fields: int) -> tuple[Order, Prepared]:
        update = {"max_steps": None, "tokens_per_step": 64, "micro_batch": 2, **fields}
        asked = config.model_copy(update={"train": config.train.model_copy(update=update)})
        ready.config = asked
        prepared, _ = prepare.prepare_rows(ready, url, tokenizer, Phases())
        return prepare.order_of(asked, prepared), prepared

    few, of_few = order_and_rows(max_steps=5)
    assert (0,) < of_few.known < of_few.windows and few.more
    whole, of_whole = order_and_rows(epochs=1)
    assert of_whole.known == of_whole.windows > (3,) and not whole.more
    assert of_whole.epoch_rows == whole.num_rows == len(of_whole.rows("train"))
    assert of_few.epoch_rows == pytest.approx(whole.num_rows, rel=0.5)
    for step in range(5):
        taken = few.rows(step)
        assert taken.tolist() == whole.rows(step).tolist()
        ours, theirs = of_few.rows("train").read(taken), of_whole.rows("train").read(taken)
        assert (ours["input_ids"] == theirs["input_ids"]).all()


def test_a_mixture_of_windows_begins_with_the_first_of_each_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepared beforehand, or while it trains, it has the same steps and counts."""
    monkeypatch.setattr(windows, "run_tasks", in_this_process)
    monkeypatch.setattr(cutting, "PART_BYTES", 128)
    monkeypatch.setattr(sources, "spare_cpus", lambda workers: 2)
    shares = {"a.jsonl": 3.0, "b.jsonl": 1.0}
    ready = ready_run(tmp_path, "a.jsonl")
    other = write_jsonl(tmp_path / "b.jsonl", [VALUES["chat"](n) for n in range(90, 150)])
    ready.inputs = (Input("b.jsonl", 1.0, "chat", other, None), *ready.inputs)
    data = ready.config.data.model_copy(update={"window_bytes": 1000, "mixture": shares})
    update = {"max_steps": 6, "tokens_per_step": 64, "micro_batch": 2}
    train = ready.config.train.model_copy(update=update)
    ready.config = config = ready.config.model_copy(update={"data": data, "train": train})
    url, tokenizer = prepare.shared_tokenizer(ready, Phases())
    phases = Phases()
    first, rest = prepare.prepare_rows(ready, url, tokenizer, phases, first=4)
    assert rest is not None and phases.current.phase == "tokenising 2 sources together"
    assert rest._thread is not None
    rest._thread.join(60)
    assert rest.ended and rest.problem is None and phases.beside == ""
    beforehand, none = prepare.prepare_rows(ready, url, tokenizer, Phases())
    assert none is None and beforehand.known >= first.known
    assert beforehand.known < beforehand.windows, "no more than the steps need"
    assert beforehand.fingerprint == first.fingerprint and len(first.folders) == 2
    whole, began = (prepare.order_of(config, each) for each in (beforehand, first))
    growing = GrowingRows(first, began)
    for step in range(6):
        rows_of_step, order = growing.at(step)
        assert order.rows(step).tolist() == whole.rows(step).tolist()
        ours = rows_of_step.read(order.rows(step))
        assert (ours == beforehand.rows("train").read(whole.rows(step))).all()
    estimates = beforehand.rows_of_sources
    assert sum(estimates) == beforehand.epoch_rows > beforehand.num_rows("train")
    lines = show._ways(config, beforehand, whole)
    every = sum(beforehand.windows)
    assert lines["windows"].startswith(f"{every} of about 1,000 bytes; ")
    for number, path in enumerate(shares):
        known = f"in {beforehand.known[number]} of {beforehand.windows[number]} windows"
        assert known in lines[f"source {path}"]


def test_what_is_wrong_with_a_source_of_windows_is_told_of_that_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "run_tasks", in_this_process)
    ready = ready_run(tmp_path, "a.jsonl")
    bad = write_jsonl(tmp_path / "b.jsonl", [{"messages": 3}] * 9 + [VALUES["chat"](1)])
    ready.inputs = (*ready.inputs, Input("b.jsonl", 1.0, "chat", bad, None))
    shares = {"a.jsonl": 3.0, "b.jsonl": 1.0}
    data = ready.config.data.model_copy(update={"window_bytes": 2**20, "mixture": shares})
    train = ready.config.train.model_copy(update={"max_steps": 2, "tokens_per_step": 64})
    ready.config = ready.config.model_copy(update={"data": data, "train": train})
    url, tokenizer = prepare.shared_tokenizer(ready, Phases())
    with pytest.raises(ConfigError, match=r"data\.mixture=b\.jsonl is unusable in 90"):
        prepare.prepare_rows(ready, url, tokenizer, Phases())
