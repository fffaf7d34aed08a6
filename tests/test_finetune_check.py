"""Check that a run that cannot fit is refused before anything starts, and what would fit named."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_driver_growth import train
from tokenizers import Tokenizer
from transformers import AutoConfig, PreTrainedTokenizerFast, ResNetConfig

from rayapp import model
from rayapp.config import ConfigError, from_dict
from rayapp.config.code import digest_of
from rayapp.data.tokens import byte_tokenizer, save_tokenizer
from rayapp.finetune import check, finetune
from rayapp.planner import size_problem
from rayapp.storage import open_storage
from rayapp.train.planning import forecast


def config(**cluster: Any) -> Any:
    return from_dict(
        {
            "model": {"path": "llama3.1-8b", "from_scratch": True},
            "data": {"seq_len": 4096},
            "train": {"tokens_per_step": 32 * 4096, "micro_batch": 1, "precision": "bf16"},
            "cluster": {"gpu": "true", **cluster},
        }
    )


def shape() -> AutoConfig:
    return model.resolve("llama3.1-8b").config


def test_what_cannot_fit_is_refused_and_what_would_is_named() -> None:
    small = config(workers="1", instance="g5.xlarge")
    found = size_problem(forecast(small, shape()))
    assert found is not None
    assert found.startswith("cluster.instance=g5.xlarge is too small: the plan is 1")
    assert found.endswith("or cluster.ignore_plan=true to start anyway")
    full = "parallel.activation_checkpointing=full"
    assert f"Set model.lora={{rank: 16}} {full} or parallel.cpu_offload=true {full}, or " in found
    assert size_problem(forecast(config(workers="8", instance="p5.48xlarge"), shape())) is None


def test_what_is_not_known_is_no_misfit() -> None:
    assert size_problem(forecast(config(workers="1"), shape())) is None  # no instance is named
    assert forecast(config(workers="1"), ResNetConfig()) is None


def test_random_weights_of_a_published_model_are_asked_for() -> None:
    problems: list[str] = []
    preset = from_dict({"model": {"path": "llama3.1-8b"}, "data": {"seq_len": 64}})
    check._model(preset, set(), problems)
    assert problems == [
        "model.path=llama3.1-8b is a preset, which has no weights: the run would train random "
        "ones. Set model.from_scratch=true if you mean that, or model.path=meta-llama/Llama-3.1-8B"
        ", whose licence is: Llama 3.1 Community Licence"
    ]
    for words in ({"path": "llama3.1-8b", "from_scratch": True}, {"path": "tiny"}):
        problems = []
        check._model(from_dict({"model": words, "data": {"seq_len": 64}}), set(), problems)
        assert not problems


def test_ids_without_an_embedding_are_named(tmp_path: Path) -> None:
    """By their highest id: it may be above the number of tokens, and inside the vocabulary."""
    rules = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    found = {}
    for name, ids in {"inside": [280, 287], "beyond": [287, 288, 300, 400, 500]}.items():
        rules["model"]["vocab"] = byte_tokenizer().get_vocab() | {f"<{i}>": i for i in ids}
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(rules)), eos_token="<|endoftext|>"
        )
        save_tokenizer(wrapped, open_storage(str(tmp_path / name)))
        tree = {
            "model": {
                "path": "tiny",
                "tokenizer": str(tmp_path / name),
                "overrides": {"vocab_size": 288},
            },
            "data": {"seq_len": 64},
        }
        problems: list[str] = []
        check._model(from_dict(tree), set(), problems)
        found[name] = problems
    assert found == {
        "inside": [],
        "beyond": [
            f"model.tokenizer={tmp_path}/beyond is too large for the model: it has 264 tokens with "
            "ids up to 500, 288 for '<288>', 300 for '<300>', 400 for '<400>', and tiny has "
            "embeddings for 288. Set model.tokenizer to the one the model was trained with"
        ],
    }


def test_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"tool_use": "x", "rag": "y"}
    save_tokenizer(tokenizer, open_storage(str(tmp_path)))
    tree = {"model": {"path": "tiny", "tokenizer": str(tmp_path)}, "data": {"seq_len": 64}}
    problems: list[str] = []
    check._model(from_dict(tree), {"chat"}, problems)
    assert problems == [
        f"data.kind=chat is without a template: {tmp_path} has no chat_template named default (but "
        "tool_use, rag). Set data.chat_template=chatml, model.tokenizer to another, or "
        "data.kind=prompt if the records can be prompts"
    ]


def test_the_forecast_knows_the_steps_and_the_shape_it_is_given() -> None:
    some = config(workers="8", instance="p5.48xlarge")
    smaller = model.resolve("llama3.1-8b").config
    smaller.num_hidden_layers = 16
    half, whole = forecast(some, smaller, steps=100), forecast(some, shape(), steps=100)
    assert half is not None and whole is not None
    assert half.hours is not None and whole.hours is not None
    assert half.hours.value < whole.hours.value
    assert half.peak_gib.value < whole.peak_gib.value


def test_the_command_refuses_before_it_holds_anything(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    tree = {
        "run": {"storage": str(tmp_path)},
        "model": {"path": "tiny", "overrides": {"num_hidden_layers": 4000}},
        "data": {"path": __file__, "format": "text"},
        "cluster": {"instance": "g5.xlarge", "workers": "1", "address": "local"},
    }
    with pytest.raises(ValueError, match=r"cluster.instance=g5.xlarge is too small: "):
        finetune(from_dict(tree))
    assert not ray.is_initialized()
    assert not (tmp_path / "tiny").exists()


def split_by(pattern: str) -> Callable[[dict[str, Any]], Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return lambda rules: rules.update(pre_tokenizer=split)


# Changes of a tokenizer.json, or what it holds instead, and what is said.
DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "cut": (lambda rules: json.dumps(rules)[:-99], "line 1 column"),
    "deep": (lambda rules: "[" * 100_000, "recursion"),
    "no model": (lambda rules: rules.pop("model") and None, "model"),
    "a number": (lambda rules: rules["model"].update(vocab=7), "line 1 column"),
    "no token": (lambda rules: rules["added_tokens"].append({"id": 3}), "content"),
    "pattern": (split_by("("), "line 1 column"),
    "steps": (split_by("(a+)+$"), "PanicException: Onig"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_tokenizer_is_named(tmp_path: Path, case: str) -> None:
    change, said = DAMAGED[case]
    byte_tokenizer().save_pretrained(tmp_path)
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    text = change(rules)
    (tmp_path / "tokenizer.json").write_text(text or json.dumps(rules))
    problems: list[str] = []
    tree = {"model": {"path": "tiny", "tokenizer": str(tmp_path)}, "data": {"seq_len": 64}}
    check._model(from_dict(tree), {"text"}, problems)
    (line,) = problems
    assert line.startswith(f"model.tokenizer={tmp_path} is not a tokenizer: ") and said in line
    assert "Copy its tokenizer.json and tokenizer_config.json anew" in line and "\n" not in line


LAB = """from torch.nn.functional import cross_entropy
def loss(logits, labels): return cross_entropy(logits, labels, reduction="none")
def metric(logits, labels): return (logits.argmax(-1) == labels).float()
def notes(path): yield from ({"text": line} for line in open(path))
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Write lab.py, check a config that names its functions, and return what the check says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "notes.txt").write_text("a line\n" * 99)
    written = 0

    def checked(code: str, **fields: Any) -> Any:
        nonlocal written
        written += 2
        (tmp_path / "lab.py").write_text(code)
        later = time.time() + written  # Python compares a source's time with that of what it cached
        os.utime(tmp_path / "lab.py", (later, later))
        tree = {
            "run": {"storage": str(tmp_path), "name": "r"},
            "model": {"path": "tiny", "tokenizer": "bytes"},
            "data": {"path": str(tmp_path / "notes.txt"), "seq_len": 64},
            "train": {"tokens_per_step": 128, "micro_batch": 1, "loss": "lab:loss"},
            "eval": {"metrics": ["lab:metric"]},
            "cluster": {"workers": "1", "address": "local"},
        }
        for section, values in fields.items():
            tree[section] |= values
        return check.check(from_dict(tree), 2, 0)

    yield checked
    sys.modules.pop("lab", None)


def test_own_code_is_tried_before_a_run_starts_and_mended_in_the_same_process(lab: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        lab(LAB.replace('reduction="none"', 'reduction="sum"').replace("argmax(-1)", "argmax(0)"))
    loss, metric = caught.value.problems
    assert loss.startswith("train.loss=lab:loss is not usable: it must return one number a token")
    assert metric.startswith("eval.metrics=lab:metric is not usable: it raised RuntimeError: ")
    with pytest.raises(ConfigError, match=r"loss=lab:loss is not usable: it raised TypeError"):
        lab(LAB.replace("loss(logits, labels)", "loss(logits)"))
    assert lab(LAB).code.keys() == {"train.loss"}
    hidden = LAB.replace("(logits, labels): return (", "(logits, labels, hidden): return (")
    lab(hidden)
    with pytest.raises(ConfigError, match=r"metric is not available: .* `hidden`, and granite"):
        lab(hidden, model={"path": "granite3.3-2b", "from_scratch": True})


WEIGHTED = LAB.replace("loss(logits, labels)", "loss(logits, labels, reward, gamma=2.0)")


def test_columns_that_a_loss_names_are_checked_before_a_run_starts(
    lab: Any, tmp_path: Path
) -> None:
    def rows(name: str, *records: dict[str, Any]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in records))
        return str(tmp_path / name)

    good = [{"text": f"line {n}", "reward": n, "id": n} for n in range(30)]
    path = rows("good.jsonl", *good)
    (entry,) = lab(WEIGHTED, data={"path": path}).inputs
    assert (entry.values, entry.unused) == (("reward",), ("id",))
    (entry,) = lab(LAB).inputs
    assert entry.values == ()
    why = r"has no column 'reward', which a parameter of train\.loss names"
    with pytest.raises(ConfigError, match=rf"notes\.txt:1 {why} \(it is text\)"):
        lab(WEIGHTED)
    wrong = rows("wrong.jsonl", *good, {"text": "a", "reward": None})
    with pytest.raises(ConfigError, match=r"wrong\.jsonl:31 has a 'reward' that is not a finite n"):
        lab(WEIGHTED, data={"path": wrong, "bad_rows": 0.0})
    lacking = rows("held.jsonl", *({"text": "a"} for _ in range(9)))
    with pytest.raises(
        ConfigError, match=rf"data\.eval_path=.*held\.jsonl:1 {why} \(it has 'text'"
    ):
        lab(WEIGHTED, data={"path": path, "eval_path": lacking, "eval_fraction": 0.0})
    metric = WEIGHTED.replace("metric(logits, labels)", "metric(logits, labels, reward)")
    lab(metric, data={"path": path})
    with pytest.raises(ConfigError, match=r"^eval\.metrics=lab:metric .* 'id' names a column that"):
        lab(metric.replace("labels, reward):", "labels, id):"), data={"path": path})


def test_own_code_may_change_until_a_checkpoint_holds_steps_of_it(lab: Any, tmp_path: Path) -> None:
    run = open_storage(str(tmp_path / "r"))
    plan = {"steps": 9, "code": dict(lab(LAB).code)}
    run.write("plan.json", json.dumps(plan).encode())
    train(run, 2, 0)
    other = LAB.replace("(logits, labels, red", "(2 * logits, labels, red")
    lab(other)
    train(run, 3, 3)
    said = (
        r"^train\.loss=lab:loss has changed: it is not the code with which the 3 steps of .* were"
    )
    with pytest.raises(ConfigError, match=said):
        lab(other)
    lab(LAB.replace("==", "!="))  # the metric beside it
    plan["code"] = {"train.loss": digest_of("train.loss", "lab:loss")}  # as an earlier version did
    run.write("plan.json", json.dumps(plan).encode())
    lab(LAB.replace("==", "!="))
    with pytest.raises(ConfigError, match=said):
        lab(LAB)


def test_a_format_of_an_earlier_version_is_known_again(lab: Any, tmp_path: Path) -> None:
    data = {"data": {"format": "lab:notes", "kind": "text"}}
    first = lab(LAB, **data)
    edited = lab(LAB.replace("==", "!="), **data)  # the metric beside it
    assert edited.parts == first.parts
    (source,) = {entry.source for entry in edited.inputs}
    older = replace(source, version=digest_of("data.format", "lab:notes"))
    assert older.digest() != source.digest()
    plan = {"steps": 9, "parts": {"files": older.digest()}}
    open_storage(str(tmp_path / "r")).write("plan.json", json.dumps(plan).encode())
    assert lab(LAB.replace("==", "!="), **data).parts["files"] == older.digest()
    assert lab(LAB, **data).parts == first.parts
