"""Read an exported adapter (peft's LoRA): to train it further, or to merge it into its base.

adapter = read_adapter("runs/first/model", folder)      # None if the folder holds a whole model
load_adapters(model, adapter)                           # after add_adapters() and load_weights()
merge_adapters(model, adapter)                          # or: add it to the weights of the base
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from rayapp.config import Lora
from rayapp.model.build import LanguageModel, base_state, build, no_loss
from rayapp.model.experts import parameter_names
from rayapp.model.files import ShardReader, Stored, read_header
from rayapp.model.init import fill
from rayapp.model.lora import (
    ADAPTER,
    MAGNITUDE,
    add_adapters,
    linear_names,
    peft_name,
    trained,
    updates,
    whole_of,
)
from rayapp.storage import Readable

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_NAMED = 3
# What peft can do and rayapp cannot; each is off in an adapter that has none of it.
UNSUPPORTED = (
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "exclude_modules",
    "trainable_token_indices",
    "lora_bias",
)


@dataclass(frozen=True)
class Adapter:
    """An exported adapter."""

    name: str
    """The path that the user gave."""
    folder: Readable
    base: str
    """The model that it was trained on, as its adapter_config.json names it."""
    lora: Lora


def read_adapter(name: str, folder: Readable) -> Adapter | None:
    """Return the adapter in a folder; None if it has a config.json or no adapter_config.json.

    Raises: ValueError if it is not a LoRA that can be trained here, or does not name its base.
    """
    if folder.exists("config.json") or not folder.exists(SETTINGS):
        return None
    try:
        values = json.loads(folder.read(SETTINGS))
        base = values["base_model_name_or_path"]
        lora = Lora.of_peft(values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(repr(error).split())
        raise ValueError(
            f"model.path={name} has a damaged {SETTINGS}: {why:.200}. Copy the folder anew"
        ) from error
    kind, bias = values.get("peft_type", "LORA"), values.get("bias", "none")
    unsupported = [f"peft_type {kind}"] * (kind != "LORA") + [f"bias {bias}"] * (bias != "none")
    unsupported += [option for option in UNSUPPORTED if values.get(option)]
    if unsupported:
        raise ValueError(
            f"model.path={name} is an adapter of another kind: it has {', '.join(unsupported)}. "
            "Only LoRA, DoRA and rsLoRA are trained here. Merge it into its base with peft, and "
            "give the merged model"
        )
    if not base or not _lasts(base):
        raise ValueError(
            f"model.path={name} is an adapter without its base: {SETTINGS} names it "
            f"{base!r}, which is no absolute path, URL or hub id. Write one there"
        )
    return Adapter(name, folder, base, lora)


def _lasts(base: str) -> bool:
    """Return whether a path means the same in every working folder."""
    relative = base.startswith(".") or os.path.isdir(base)
    named = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base) is not None
    return "://" in base or os.path.isabs(base) or (named and not relative)


def adapter_problems(adapter: Adapter, config: PretrainedConfig) -> list[str]:
    """Return what prevents using an adapter on a base of this configuration; reads headers only."""
    model = build(config, loss=no_loss, attention="eager")
    names = linear_names(model.hf)
    wrong = {
        "linear layer": set(adapter.lora.targets) - set(names),
        "parameter": set(adapter.lora.target_parameters) - set(parameter_names(model.hf)),
    }
    if missing := [f"{what} {', '.join(sorted(each))}" for what, each in wrong.items() if each]:
        return [
            f"model.path={adapter.name} is no adapter of its base {adapter.base}, whose blocks "
            f"have no {' and no '.join(missing)}. Correct base_model_name_or_path in {SETTINGS}"
        ]
    add_adapters(model, adapter.lora)
    if not adapter.folder.exists(WEIGHTS):
        return [f"model.path={adapter.name} has no {WEIGHTS}: the adapter was not copied whole"]
    try:
        stored = read_header(adapter.folder, WEIGHTS)
    except ValueError as error:
        return [str(error)]
    return _misfits(adapter, model, stored)


def _misfits(adapter: Adapter, model: LanguageModel, stored: Mapping[str, Stored]) -> list[str]:
    """Name the tensors that are missing, of another shape, or of no layer of the model."""
    wanted = {peft_name(name): tuple(p.shape) for name, p in trained(model.hf).items()}
    shapes = {name: where.shape for name, where in stored.items()}
    wrong = {
        "lacks": sorted(wanted.keys() - shapes.keys()),
        "has tensors of no adapter,": sorted(shapes.keys() - wanted.keys()),
        f"does not fit its base {adapter.base} in": sorted(
            name for name in wanted.keys() & shapes.keys() if wanted[name] != shapes[name]
        ),
    }
    return [
        f"model.path={adapter.name} {what} {', '.join(names[:MAX_NAMED])}"
        f"{f' and {len(names) - MAX_NAMED} more' if len(names) > MAX_NAMED else ''}: {WEIGHTS} and "
        f"{SETTINGS} do not belong together. Copy the folder anew"
        for what, names in wrong.items()
        if names
    ]


@torch.no_grad()
def load_adapters(model: LanguageModel, adapter: Adapter) -> None:
    """Fill the model's adapters with the stored ones.

    Raises: ValueError if a tensor is missing or has another shape.
    """
    reader = _reader(adapter, model)
    for name, parameter in trained(model.hf).items():
        fill(parameter, reader.rows(peft_name(name)).to(parameter.dtype))


@torch.no_grad()
def merge_adapters(model: LanguageModel, adapter: Adapter) -> None:
    """Add the adapter's update to the weights of the base, in fp32; all ranks call it.

    Raises: ValueError if a tensor is missing or has another shape.
    """
    probe = build(model.hf.config, loss=no_loss, attention="eager")
    add_adapters(probe, adapter.lora)
    reader = _reader(adapter, probe)
    weights = base_state(model.hf, keep_vars=True)
    for name, update in updates(probe.hf).items():
        layer = update.layer
        left, right = (
            reader.rows(peft_name(f"{layer}.{factor}.{ADAPTER}.weight")).float()
            for factor in ("lora_A", "lora_B")
        )
        magnitude = update.magnitude
        if magnitude is not None:
            magnitude = reader.rows(peft_name(f"{layer}.{MAGNITUDE}.{ADAPTER}.weight")).float()
        weight: Any = weights[name]
        stored = replace(update, left=left, right=right, magnitude=magnitude)
        merged = stored.merged(whole_of(weight).float(), lambda factor: factor)
        fill(weight, merged.to(weight.dtype))


def _reader(adapter: Adapter, model: LanguageModel) -> ShardReader:
    stored = read_header(adapter.folder, WEIGHTS)
    if wrong := _misfits(adapter, model, stored):
        raise ValueError("\n".join(wrong))
    return ShardReader(adapter.folder, stored)
