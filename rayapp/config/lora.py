"""The settings of low-rank adapters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from rayapp.config.fields import Section, Strings

# model_type of the mixtures whose adapters of experts are stored by expert: those that peft 0.21
# stacks again. vLLM 0.32 takes what is stacked in the files of the others alone.
BY_EXPERT = frozenset({
    "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1",
    "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
    "hunyuan_v1_moe", "longcat_flash", "mellum", "minimax", "minimax_m2", "mixtral", "olmoe",
    "qwen3_moe", "qwen3_next", "solar_open",
})  # fmt: skip
STACKED_IN_VLLM = frozenset({"gpt_oss"})
WHOLE_EXPERTS = {"down_proj", "gate_up_proj"}
NEW_TOKENS = (
    "peft and rayapp open an adapter with the rows of new tokens, vLLM does not: set "
    "model.lora.merge=true to serve it there"
)
PROJECTION = re.compile(r"\.experts\.\d+\.(\w+)\.lora_A\.")  # of an expert
STACKED_IN = {"down_proj": "down_proj", "w2": "down_proj"}  # others are in gate_up_proj


def method(values: Mapping[str, Any]) -> str:
    """Return what the method with these settings is called.

    >>> method({}), method({"dora": True}), method({"rslora": True, "dora": False})
    ('LoRA', 'DoRA', 'rsLoRA')
    """
    return f"{'rs' if values.get('rslora') else ''}{'DoRA' if values.get('dora') else 'LoRA'}"


def opened_by(model_type: str, parameters: Iterable[str]) -> str:
    """Say what opens adapters of these parameters of a mixture's experts.

    >>> opened_by("jamba", WHOLE_EXPERTS).partition(", ")[2]
    'vLLM does not: set model.lora.merge=true to serve it there'
    """
    opened = f"peft and rayapp open the adapters of {model_type}'s experts"
    if model_type not in BY_EXPERT | STACKED_IN_VLLM:
        return f"{opened}, vLLM does not: set model.lora.merge=true to serve it there"
    if not {*parameters} >= WHOLE_EXPERTS:
        both = f"target_parameters={','.join(sorted(WHOLE_EXPERTS))}, or model.lora.merge=true"
        return f"{opened}, vLLM does not without all projections: set model.lora.{both}"
    return f"{opened}, and so does vLLM"


class Lora(Section):
    rank: int = Field(default=16, ge=1, le=2**20)
    """Rank of the two low-rank factors."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update, which is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply the update by alpha / sqrt(rank) instead; a larger rank may then learn faster."""
    dora: bool = False
    """Train the norm and the direction of each output's weights separately (DoRA)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the first factor, 0-1."""
    targets: Strings = ()
    """Names of the linear layers that get adapters; none: all linear layers of the blocks."""
    target_parameters: Strings = ()
    """Names of experts' parameters (gate_up_proj, down_proj) that get an adapter for each expert;
    cannot be combined with DoRA or dropout (peft does not support it)."""
    quantize: Literal["none", "nf4"] = "none"
    """nf4: hold the linear layers of the frozen base in 4 bits (QLoRA); requires bitsandbytes."""
    merge: bool = False
    """true: model/ holds the base with the adapters added, adapter/ the adapters alone. false:
    model/ holds the adapters in peft's format."""

    @property
    def name(self) -> str:
        return method(vars(self))

    @classmethod
    def of_peft(cls, values: Mapping[str, Any], tensors: Iterable[str] = ()) -> Lora:
        """Return the settings in an adapter_config.json, with the names of its tensors.

        Where target_modules is a pattern, or has full names, the tensors tell what is adapted.

        Raises: KeyError, TypeError or ValueError if they are not those of a LoRA.
        """
        targets, tensors = values["target_modules"], list(tensors)
        apart = {match[1] for match in map(PROJECTION.search, tensors) if match}
        plain = not isinstance(targets, str) and not any("." in name for name in targets or ())
        if not plain or values.get("exclude_modules"):
            adapted = {name.partition(".lora_A.")[0] for name in tensors if ".lora_A." in name}
            of_experts = {"base_layer", "experts"} if values.get("target_parameters") else set()
            targets = {name.rpartition(".")[2] for name in adapted} - of_experts
        targets = set(targets or ()) - apart
        if not targets:
            raise ValueError(f"target_modules={values['target_modules']} adapts no linear layer")
        return cls(
            rank=values["r"],
            alpha=values["lora_alpha"],
            dropout=values.get("lora_dropout", 0.0),
            targets=tuple(sorted(targets)),
            target_parameters=tuple(
                sorted(
                    {name.rpartition(".")[2] for name in values.get("target_parameters") or ()}
                    | {STACKED_IN.get(name, "gate_up_proj") for name in apart}
                )
            ),
            dora=bool(values.get("use_dora")),
            rslora=bool(values.get("use_rslora")),
        )
