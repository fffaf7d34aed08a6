"""Check the model card: its metadata, that its snippet runs, and whose README is left alone."""

from __future__ import annotations

import ast
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_folders import RunFolder, eventful
from transformers import LlamaConfig, LlamaForCausalLM

from rayapp import model
from rayapp.data import tokens
from rayapp.model.source import published
from rayapp.report import write_card
from rayapp.storage import open_storage

BASE = {"name": "meta-llama/Llama-3.1-8B", "id": "meta-llama/Llama-3.1-8B", "license": "llama3.1"}


def ended(folder: Path, **result: Any) -> RunFolder:
    """A run that is done, with a base in its plan."""
    run = eventful(open_storage(str(folder)))
    plan = json.loads(run.run.read("plan.json")) | {
        "base": BASE,
        "parts": {"files": "d1ge57"},
        "stops": {"<|e|>": 2, "x": 0},
    }
    run.run.write("plan.json", json.dumps(plan).encode())
    values = json.loads(run.run.read("result.json"))
    run.run.write("result.json", json.dumps(values | {"status": "done"} | result).encode())
    return run


def test_a_card_asks_as_the_training_did(tmp_path: Path) -> None:
    """Another system message, or none, gave 0 of 40 right answers where the run had 31."""
    shown = [{"asked": 'Is "it" late?', "before": "a", "after": "b", "wanted": "c"}]
    task = {"score": "exact", "items": 1, "shown": shown}
    task |= {name: {"value": 0.5, "low": 0.0, "high": 1.0} for name in ("before", "after")}
    task["difference"] = {"value": 0.25, "low": -0.125, "high": 0.625}
    run = ended(tmp_path, tasks={"tickets": task})
    config = yaml.safe_load(run.run.read("config.yaml"))
    config["data"]["kind"], config["model"]["path"] = "chat", "/x/model-a.q4_1-0123456789ab"
    run.run.write("config.yaml", yaml.safe_dump(config).encode())
    plan = json.loads(run.run.read("plan.json"))
    plan |= {
        "system": "One word: </late> or /now",
        "base": {"name": config["model"]["path"]},
    }
    run.run.write("plan.json", json.dumps(plan).encode())
    run.run.write("model/adapter_config.json", b"{}")
    _, text = card_of(run)
    chat = re.search(r"^chat = (\[.*?^\])$", text, re.MULTILINE | re.DOTALL)
    assert chat is not None and ast.literal_eval(chat[1]) == [
        {"role": "system", "content": plan["system"]},
        {"role": "user", "content": 'Is "it" late?'},
    ]
    assert "from its weights, as the quantised file `a.q4_1` holds them" in text
    scores = "50 % (0 to 100); 50 % (0 to 100); difference +25 points (-12 to 62)"
    assert f"| tickets, right (exact) of 1 items, before and after | {scores} |" in text
    assert "rayapp merge" in text and "</summary>" in text and text.rstrip().endswith("</details>")


def card_of(run: RunFolder) -> tuple[dict[str, Any], str]:
    write_card(run.run)
    text = run.run.read("model/README.md").decode()
    _, front, rest = text.split("---\n", 2)
    return yaml.safe_load(front), rest


def test_a_card_says_what_was_trained_on_what_and_how(tmp_path: Path) -> None:
    check = {"rows": 4, "difference": 2e-7, "why": None}
    run = ended(tmp_path, export_check=check)
    front, text = card_of(run)
    assert front["base_model"] == BASE["id"] and front["license"] == "llama3.1"
    assert front["library_name"] == "transformers" and front["pipeline_tag"] == "text-generation"
    assert front["tags"][0] == "rayapp"
    assert "`d1ge57`" not in text and "| d1ge57 |" in text and "| 23,348 |" in text
    assert "`6b36ea2d5c628742`" in text and "| 1.2 % |" in text
    assert "its logits on 4 rows differ by 2e-07 of their norm" in text
    assert "The base's licence is llama3.1." in text
    assert "| a generation ends at | `<\\|e\\|>` (2), `x` (0) |" in text and "eos_token" not in text
    run.run.write("model/adapter_config.json", b"{}")
    assert "eos_token_id=[2, 0],\n" in card_of(run)[1]
    folded = yaml.safe_load(re.search(r"````yaml\n(.*?)````", text, re.DOTALL)[1])  # type: ignore[index]
    assert folded["train"] == json.loads(json.dumps(run.config.model_dump(mode="json")))["train"]
    assert "cluster" not in folded and "storage" not in folded["run"]
    drawn = ET.fromstring(run.run.read("model/loss.svg"))
    assert drawn.tag.endswith("svg") and any(each.tag.endswith("polyline") for each in drawn)


def test_a_users_own_readme_stays(tmp_path: Path) -> None:
    run = ended(tmp_path)
    run.run.write("model/README.md", b"mine")
    write_card(run.run)
    assert run.run.read("model/README.md") == b"mine" and not run.run.exists("model/loss.svg")
    run.run.delete("model/README.md")
    card_of(run)
    before = run.run.read("model/README.md")
    run.run.write("result.json", run.run.read("result.json").replace(b"1.98", b"1.11"))
    write_card(run.run)  # its own, it writes anew
    assert run.run.read("model/README.md") != before


def test_the_snippet_of_a_card_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended(tmp_path)
    folder = tmp_path / "eventful" / "model"
    shape = LlamaConfig(
        vocab_size=259,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokens.byte_tokenizer().save_pretrained(folder)
    _, text = card_of(run)
    monkeypatch.chdir(folder)
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], {})  # type: ignore[index]
    assert "The ship" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"README.md": "---\nlicense: mit\n---\nx"}, {"id": None, "license": "mit"}),
        (
            {"README.md": "---\nbase_model: a/b\n---\nx", "LICENSE": "# Own Licence 1\n\nText"},
            {"id": "a/b", "license": "other", "license_name": "Own Licence 1"},
        ),
        ({"README.md": "---\n: [\n---\nx"}, {"id": None}),
        ({}, {"id": None}),
    ],
)
def test_the_licence_is_that_of_the_bases_folder(
    tmp_path: Path, files: dict[str, str], expected: dict[str, Any]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert published(model.resolve(str(tmp_path))) == expected
