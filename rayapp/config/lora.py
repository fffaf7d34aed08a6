"""The settings of low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from rayapp.config.fields import Section, Strings


def method(values: Mapping[str, Any]) -> str:
    """Return what the method with these settings is called.

    >>> method({}), method({"dora": True}), method({"rslora": True, "dora": False})
    ('LoRA', 'DoRA', 'rsLoRA')
    """
    return f"{'rs' if values.get('rslora') else ''}{'DoRA' if values.get('dora') else 'LoRA'}"


class Lora(Section):
    rank: int = Field(default=16, ge=1, le=2**20)
    """Rank of the two low-rank factors."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale; the update is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply the update by alpha / sqrt(rank) instead, so that a larger rank may learn faster."""
    dora: bool = False
    """Train the norm of each output's weights apart from their direction (DoRA)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the first factor, 0-1."""
    targets: Strings = ()
    """Names of linear layers that get adapters; empty means all linear layers of the blocks."""
    target_parameters: Strings = ()
    """Names of experts' parameters (gate_up_proj, down_proj) that get an adapter for each expert;
    not with DoRA or dropout, which peft has for none of them."""
    quantize: Literal["none", "nf4"] = "none"
    """Hold the frozen base's linear layers in 4 bits (QLoRA); needs bitsandbytes."""
    merge: bool = False
    """Add the adapters to the base in model/, and write them alone to adapter/; false: model/ holds
    the adapters, as peft writes them."""

    @property
    def name(self) -> str:
        """What the method is called."""
        return method(vars(self))

    @classmethod
    def of_peft(cls, values: Mapping[str, Any], tensors: Iterable[str] = ()) -> Lora:
        """Return the settings in an adapter_config.json, with the names of its tensors.

        Where target_modules is a pattern, or has full names, the tensors tell what is adapted.

        Raises: KeyError, TypeError or ValueError if they are not those of a LoRA.
        """
        targets = values["target_modules"]
        plain = not isinstance(targets, str) and not any("." in name for name in targets or ())
        if not plain or values.get("exclude_modules"):
            adapted = {name.partition(".lora_A.")[0] for name in tensors if ".lora_A." in name}
            of_experts = {"base_layer", "experts"} if values.get("target_parameters") else set()
            targets = {name.rpartition(".")[2] for name in adapted} - of_experts
        if not targets:
            raise ValueError(f"target_modules={values['target_modules']} adapts no linear layer")
        return cls(
            rank=values["r"],
            alpha=values["lora_alpha"],
            dropout=values.get("lora_dropout", 0.0),
            targets=tuple(sorted(targets)),
            target_parameters=tuple(
                sorted({name.rpartition(".")[2] for name in values.get("target_parameters") or ()})
            ),
            dora=bool(values.get("use_dora")),
            rslora=bool(values.get("use_rslora")),
        )
