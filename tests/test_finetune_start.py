"""Check what a run starts from: an exported adapter, or a checkpoint of another run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_train_loop import config_of, inputs, spec_of, train  # noqa: F401  a fixture
from test_train_state import forge
from transformers import AutoModelForCausalLM

from rayapp.config import Config, ConfigError, Lora
from rayapp.finetune.check import check
from rayapp.planner import ask

LORA = Lora(rank=3, alpha=12, targets=("down_proj", "q_proj"))


def with_model(config: Config, **fields: Any) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update=fields)})


def named(config: Config, name: str) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def lines_of(run: Path) -> list[Any]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def first(inputs: Path) -> tuple[list[Any], Path]:  # noqa: F811
    """A run of adapters: its steps, and its exported adapter."""
    config = with_model(config_of(inputs, "first", lr=3e-2), lora=LORA)
    lines, _ = train(config, inputs, world=2, num_steps=10)
    return lines, inputs / "runs" / "first" / "model"


def checked(folder: Path, path: Path, **fields: Any) -> Config:
    config = config_of(folder, "next", schedule="constant")
    config = with_model(config, path=str(path), **fields)
    return check(config, None, 0).config


def problems(folder: Path, path: Path, **fields: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checked(folder, path, **fields)
    assert not any("\n" in line for line in caught.value.problems)
    return caught.value.problems


def test_a_run_goes_on_with_the_adapter_of_another(
    inputs: Path,  # noqa: F811
    first: tuple[list[Any], Path],
) -> None:
    """Its first loss, on the same rows, is lower; the base stays the first run's base."""
    earlier, adapter = first
    config = checked(inputs, adapter)
    assert config.model.lora == LORA
    lines, _ = train(config, inputs, world=2, num_steps=2)
    assert lines[0]["batch_digest"] == earlier[0]["batch_digest"]
    assert lines[0]["loss"] < earlier[0]["loss"] - 0.1
    exported = Path(inputs, "runs", "next", "model", "adapter_config.json")
    assert json.loads(exported.read_text())["base_model_name_or_path"] == str(inputs / "model")


def test_all_weights_of_the_merged_model_can_be_trained(
    inputs: Path,  # noqa: F811
    first: tuple[list[Any], Path],
) -> None:
    import peft

    config = checked(inputs, first[1], adapter="merge")
    assert config.model.lora is None
    train(named(config, "whole"), inputs, world=2, num_steps=0)
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    expected = peft.PeftModel.from_pretrained(base, first[1])
    ids = torch.arange(40)[None] + 10
    whole = AutoModelForCausalLM.from_pretrained(inputs / "runs" / "whole" / "model")
    torch.testing.assert_close(whole(ids).logits, expected(ids).logits)


def test_other_adapters_than_those_in_the_folder_are_refused(
    inputs: Path,  # noqa: F811
    first: tuple[list[Any], Path],
) -> None:
    path = first[1]
    found = problems(inputs, path, lora=Lora(rank=4, alpha=8))
    assert [line.partition(" is in conflict")[0] for line in found] == [
        "model.lora.rank=4",
        "model.lora.alpha=8.0",
        "model.lora.targets=all",
    ]
    assert f"the adapter model.path={path} has 3. Set model.lora.rank=3" in found[0]
    same = LORA.model_copy(update={"targets": ("q_proj", "down_proj"), "dropout": 0.2})
    assert checked(inputs, path, lora=same).model.lora == same
    new = Lora(rank=4, merge=True)
    assert checked(inputs, path, lora=new, adapter="merge").model.lora == new
    assert "no folder holds the base" in problems(inputs, path, lora=Lora(), adapter="merge")[0]
    four = Lora(quantize="nf4", merge=True)
    assert "held in 4 bits" in problems(inputs, path, lora=four, adapter="merge")[0]
    assert "is an adapter of" in problems(inputs, path, from_scratch=True)[0]
    assert "is no adapter" in problems(inputs, inputs / "model", adapter="merge")[0]


def test_a_plan_knows_the_adapter(inputs: Path, first: tuple[list[Any], Path]) -> None:  # noqa: F811
    config = with_model(config_of(inputs, "next"), path=str(first[1]))
    layout = ask(config).layout
    assert layout.shape.hidden == 32 and layout.lora_rank is None
    from rayapp.planner import with_adapters_lora

    layout = ask(with_adapters_lora(config)).layout
    assert layout.lora_rank == 3 and layout.lora_targets == ("down_proj", "q_proj")
    merged = with_model(config, adapter="merge")
    assert with_adapters_lora(merged) == merged


# ---- A checkpoint of another run ---------------------------------------------------------------


@pytest.fixture(scope="module")
def source(inputs: Path) -> Path:  # noqa: F811
    """The folder of a run of two workers that kept the checkpoints of steps 4 and 6."""
    return trained(config_of(inputs, "source"), inputs, steps=6)


def trained(config: Config, folder: Path, steps: int, world: int = 2) -> Path:
    """Train, with a checkpoint every two steps and a config.yaml as the driver writes it."""
    saving = config.checkpoint.model_copy(update={"every_steps": 2})
    config = config.model_copy(update={"checkpoint": saving})
    run = folder / "runs" / config.run.name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config.to_yaml())
    train(config, folder, world=world, num_steps=steps)
    return run


def from_run(folder: Path, init_from: str, name: str = "begun", **fields: Any) -> Config:
    config = with_model(config_of(folder, name, schedule="linear"), init_from=init_from, **fields)
    return check(config, None, 0).config


@pytest.mark.parametrize("step", [None, 4])
def test_a_run_starts_with_the_weights_of_a_checkpoint(
    inputs: Path,  # noqa: F811
    source: Path,
    step: int | None,
) -> None:
    """Loaded by one worker, saved by two; the steps, the rows and the schedule begin anew."""
    given = "source" if step is None else f"{source}@{step}"
    config = from_run(inputs, given, f"begun-{step}")
    assert config.model.init_from == f"{source}@{step or 6}"
    began = trained(config, inputs, steps=0, world=1)
    earlier, reference = lines_of(source), source / "model"
    if step is not None:  # the same weights by a run of so many steps, all of them in the warm-up
        whole = trained(config_of(inputs, "whole-4"), inputs, steps=4)
        assert [line["lr"] for line in lines_of(whole)] == [line["lr"] for line in earlier[:4]]
        reference = whole / "model"
    found, expected = (load_file(f / "model.safetensors") for f in (began / "model", reference))
    assert all(torch.equal(found[name], expected[name]) for name in expected | found)
    lines, _ = train(named(config, f"on-{step}"), inputs, world=2, num_steps=2)
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["lr"] == pytest.approx(3e-3 / 5) and lines[0]["loss"] < earlier[0]["loss"] - 0.1
    assert lines[0]["batch_digest"] == earlier[0]["batch_digest"]


def test_the_checkpoint_is_chosen_once(inputs: Path, source: Path) -> None:  # noqa: F811
    """A run that has begun keeps its checkpoint when the other run has newer ones, or is gone."""
    copy = source.with_name("growing")
    shutil.copytree(source, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    config = from_run(inputs, "growing", "keeps")
    assert config.model.init_from == f"{copy}@4"
    trained(config, inputs, steps=2)
    shutil.copytree(source / "checkpoints" / "step-00000006", copy / "checkpoints/step-00000006")
    assert from_run(inputs, "growing", "keeps") == config
    assert from_run(inputs, "growing", "another").model.init_from == f"{copy}@6"
    shutil.rmtree(copy)
    assert from_run(inputs, "growing", "keeps") == config
    with pytest.raises(ConfigError, match=r"init_from=growing is not usable: .* holds no run"):
        from_run(inputs, "growing", "another")


def test_weights_of_another_model_are_refused_by_name(
    inputs: Path,  # noqa: F811
    source: Path,
    first: tuple[list[Any], Path],
) -> None:
    def problem(init_from: str, **fields: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            from_run(inputs, init_from, "other", **fields)
        (line,) = caught.value.problems
        assert "\n" not in line
        return line

    assert "has none of step 5: there are those of steps 4, 6" in problem("source@5")
    wide = problem("source", overrides={"intermediate_size": 80}, from_scratch=True)
    assert "layers.0.mlp.down_proj.weight is [32, 64] there and [32, 80] here; " in wide
    assert "and 3 more. Set the model.path" in wide
    assert "it trained all weights. Set model.path=" in problem("source", lora=LORA)
    adapters = first[1].parent
    lora = with_model(config_of(inputs, "first"), lora=LORA)
    (adapters / "config.yaml").write_text(lora.to_yaml())
    assert "it trained adapters alone. Set model.path=" in problem("first")
    assert from_run(inputs, "first", lora=LORA).model.lora == LORA
    rank = problem("first", lora=LORA.model_copy(update={"rank": 2}))
    assert "lora_A.default.weight is [3, " in rank and "] there and [2, " in rank
    alpha = problem("first", lora=LORA.model_copy(update={"alpha": 1.0}))
    assert alpha.endswith("it trained adapters on another base. Set model.lora.alpha=12.0")
    shutil.copytree(inputs / "model", inputs / "model-2", dirs_exist_ok=True)
    base = problem("first", lora=LORA, path=str(inputs / "model-2"))
    assert base.endswith(f"on another base. Set model.path={inputs / 'model'}")
    assert "know the tokens of their own" in problem("source", tokenizer="bpe:260")
    forged = shutil.copytree(source, source.with_name("forged"))
    forge(next((forged / "checkpoints").glob("*6")))
    said = problem("forged")
    assert said.startswith(f"model.init_from={forged}@6 is not usable: checkpoints/step-00000006 ")
    assert ".metadata is damaged: it names posix.getcwd" in said
    shard = next((adapters / "checkpoints").glob("*/__0_0.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "init_from=first is not usable: " in problem("first", lora=LORA)
    assert f"{shard.name} has" in problem("first", lora=LORA)
    for given in ("first", str(adapters)):  # the folder is named once
        for step in ("", "@5"):
            assert problem(given + step, lora=LORA).count(str(adapters)) == 1


def test_a_preset_takes_the_tokenizer_and_its_size(inputs: Path, source: Path) -> None:  # noqa: F811
    """A preset brings neither; trained on other data, the tokens would be others."""
    with pytest.raises(ConfigError, match=r"plan.json names no tokenizer. Set model.tokenizer"):
        from_run(inputs, "source", path="tiny")
    plan = {"tokenizer": str(inputs / "model"), "vocabulary": 272}
    (source / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ConfigError, match=r"is \[272, 32\] there and \[272, 256"):
        from_run(inputs, "source", path="tiny")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = from_run(inputs, "source", path="tiny", overrides=small)
    assert config.model.tokenizer == plan["tokenizer"]
    assert config.model.overrides == small | {"vocab_size": 272}
