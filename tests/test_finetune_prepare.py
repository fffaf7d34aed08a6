"""Check which tokenizer and which rows a run is given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_data_prepare import VALUES, write_jsonl

from rayapp.config import from_dict
from rayapp.data import prepare as rows
from rayapp.data import tokens
from rayapp.finetune import prepare
from rayapp.finetune.check import Input
from rayapp.observe.activity import Phases
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


def test_a_run_that_began_with_rows_of_an_earlier_version_goes_on_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = ready_run(tmp_path, "a.jsonl")
    url, tokenizer = prepare.shared_tokenizer(ready, Phases())
    recipe = prepare._recipe(ready, ready.config, ready.inputs[0], url, tokenizer)
    before = replace(recipe, special_tokens="control")
    earlier = [replace(before, version=version) for version in (1, 2)]
    root = open_storage(str(tmp_path)) / ".prepared"
    recipes = (recipe, before, *earlier)
    for each in recipes:
        rows.prepare(each, root)
    assert len({each.fingerprint for each in recipes}) == len(recipes)

    def given() -> str:
        return prepare.prepare_rows(ready, ready.config, url, tokenizer, Phases()).fingerprint

    assert given() == recipe.fingerprint, "a new run"
    for begun in recipes:
        ready.run.write("plan.json", json.dumps({"fingerprint": begun.fingerprint}).encode())
        assert given() == begun.fingerprint
    # A command that was refused has written a plan of its own: the newest checkpoint decides.
    ready.run.write("plan.json", json.dumps({"fingerprint": recipe.fingerprint}).encode())
    for begun in recipes:
        newest = SimpleNamespace(state={"cursor": {"fingerprint": begun.fingerprint}})
        monkeypatch.setattr(prepare, "latest", lambda _, newest=newest: (newest, []))
        assert given() == begun.fingerprint


def test_a_template_of_the_users_is_saved_with_the_tokenizer_and_a_training_one_is_not(
    tmp_path: Path,
) -> None:
    template = tokens.CHAT_TEMPLATE + " "
    ready = ready_run(tmp_path, "a.jsonl", chat_template="a.jinja")
    ready.template = template
    url, tokenizer = prepare.shared_tokenizer(ready, Phases())
    assert tokens.load_tokenizer(url).chat_template == tokenizer.chat_template == template
    recipe = prepare._recipe(ready, ready.config, ready.inputs[0], url, tokenizer)
    assert not recipe.template and "chat_template" not in recipe.parts()

    ready = ready_run(tmp_path, "a.jsonl", chat_template="training", reasoning="mask")
    ready.template = template
    url, tokenizer = prepare.shared_tokenizer(ready, Phases())
    assert tokens.load_tokenizer(url).chat_template == tokens.CHAT_TEMPLATE
    recipe = prepare._recipe(ready, ready.config, ready.inputs[0], url, tokenizer)
    assert recipe.template == template and recipe.parts()["reasoning"] == "mask"
    assert recipe.parts()["chat_template"]
