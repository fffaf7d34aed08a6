"""Patterns of names: what they match, and what is said of those that match nothing."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from rayapp.config import Config, ConfigError, Lora, from_dict
from rayapp.model import add_adapters, build, no_loss
from rayapp.model.names import described, freeze, lr_factors, names
from rayapp.train.optimizer import make_optimizers, set_lr

SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


def tied(lora: Lora | None = None) -> Any:
    lm = build(LlamaConfig(**SIZES, tie_word_embeddings=True), loss=no_loss)
    if lora is not None:
        add_adapters(lm, lora)
    return lm


def config(**train: Any) -> Config:
    return from_dict({"train": train}, kind=Config)


@pytest.mark.parametrize(
    ("train", "lora", "told", "problem"),
    [
        (
            {"freeze": "lm_head.*"},  # the embedding, by its other name
            None,
            "train.freeze=lm_head.* freezes 1 tensor, 256 parameters",
            None,
        ),
        (
            {"lr_by_name": {"*.q_proj.lora_B.weight": 16}},
            Lora(rank=2),
            "train.lr_by_name=*.q_proj.lora_B.weight at 16 times lr: 2 tensors, 32 parameters",
            None,
        ),
        (
            {"freeze": "model.layer.0.*"},
            None,
            "train.freeze=model.layer.0.* freezes 0 tensors, 0 parameters",
            "train.freeze=model.layer.0.* is unknown: no trained parameter has such a name. Give a "
            "pattern of names such as model.layers.0.",
        ),
        (  # the base is not trained
            {"lr_by_name": {"*.q_proj.weight": 2}},
            Lora(rank=2),
            "train.lr_by_name=*.q_proj.weight at 2 times lr: 0 tensors, 0 parameters",
            "train.lr_by_name=*.q_proj.weight is unknown: no trained parameter has such a name. "
            "Give a pattern of names such as model.layers.",
        ),
        (
            {"freeze": "*"},
            None,
            "train.freeze=* freezes 20 tensors, 1,448 parameters",
            "train.freeze=* is in conflict: it leaves nothing to train. Freeze fewer",
        ),
    ],
)
def test_what_patterns_match_is_told(
    train: dict[str, Any], lora: Lora | None, told: str, problem: str | None
) -> None:
    lines, problems = described(config(**train), tied(lora).hf)
    assert lines == [told]
    assert [text[: len(problem or "")] for text in problems] == ([problem] if problem else [])


def test_the_first_pattern_that_matches_gives_the_rate_and_frozen_parameters_have_none() -> None:
    lm = tied()
    freeze(lm.hf, ["model.embed*"])
    factors = lr_factors(lm.hf, {"model.norm.weight": 4.0, "*norm*": 0.5})
    every = names(lm.hf)
    for kind in ("adamw", "muon"):
        optimizers = make_optimizers(
            kind,  # type: ignore[arg-type]
            lm,
            lr=1.0,
            weight_decay=0.1,
            betas=(0.9, 0.95),
            factors=factors,
        )
        set_lr(optimizers, 0.1)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        rates = {id(p): group["lr"] for group in groups for p in group["params"]}
        assert rates[id(every["model.norm.weight"])] == pytest.approx(0.4)
        assert rates[id(every["model.layers.1.input_layernorm.weight"])] == pytest.approx(0.05)
        assert rates[id(every["model.layers.1.mlp.up_proj.weight"])] == pytest.approx(0.1)
        assert id(every["lm_head.weight"]) not in rates and len(rates) == 19


@pytest.mark.parametrize(
    ("section", "cure"),
    [({"lora": {"rank": 2}}, "Remove train.freeze"), ({"init_from": "a"}, "Set model.path=RUN")],
)
def test_freeze_is_refused_where_it_has_no_meaning(section: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigError, match=rf"train.freeze=.* is in conflict: .*\. {cure}"):
        from_dict({"model": section, "train": {"freeze": "*norm*"}})
