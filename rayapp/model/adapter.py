"""Read an exported adapter (peft's LoRA): to train it further, or to merge it into its base.

adapter = read_adapter("runs/first/model", folder)      # None if the folder holds a whole model
load_adapters(model, adapter)                           # after add_adapters() and load_weights()
merge_adapters(model, adapter)                          # or: add it to the weights of the base
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rayapp.config import Lora
from rayapp.model import lora_layers
from rayapp.model.adapter_files import StackReader, expert_parts, peft_name, stacked_shapes
from rayapp.model.build import LanguageModel, base_state, build, no_loss
from rayapp.model.experts import parameter_names
from rayapp.model.files import ShardReader, Stored, read_header
from rayapp.model.init import fill, whole_of
from rayapp.model.new_tokens import ROWS, RowsUpdate
from rayapp.storage import Readable, read_json

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_NAMED = 3
MERGE = "Merge it into its base with peft, and give the merged model"
# peft's settings that are read here, or that change nothing of what an adapter computes. Of all
# others, also those of later versions, an adapter must have none.
KNOWN = {
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "lora_alpha", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "r", "revision", "target_modules", "target_parameters",
    "task_type", "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip
# Values of init_lora_weights that leave the base as it is; peft changes it for others (PiSSA,
# OLoRA, CorDA, LoftQ, LoRA-GA), each time that it opens the adapter.
PLAIN_INITS = (True, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """An exported adapter."""

    name: str
    """The path that the user gave."""
    folder: Readable
    base: str
    """The model that it was trained on, as its adapter_config.json names it."""
    lora: Lora
    tokens: tuple[int, ...] = ()
    """Tokens with trained rows in the embedding and the head."""


def read_adapter(name: str, folder: Readable) -> Adapter | None:
    """Return the adapter in a folder; None if it has a config.json or no adapter_config.json.

    Raises: ValueError if it is not a LoRA that can be trained here, or does not name its base.
    """
    if folder.exists("config.json") or (values := read_json(folder, SETTINGS)) is None:
        return None
    if unsupported := list(_unsupported(values)):
        drawn = "niter" in str(values.get("init_lora_weights"))  # anew by each opening
        inexact = drawn or values.get("alora_invocation_tokens")
        cure = "peft cannot merge it either: train one without that" if inexact else MERGE
        raise ValueError(
            f"model.path={name} is an adapter of another kind: it has {', '.join(unsupported)}. "
            f"Only LoRA, DoRA and rsLoRA on a base as it is published are trained here. {cure}"
        )
    base, revision = values.get("base_model_name_or_path"), values.get("revision")
    if not isinstance(base, str) or not _lasts(base):
        raise ValueError(
            f"model.path={name} is an adapter without its base: {SETTINGS} names it "
            f"{base!r}, which is no absolute path, URL or hub id. Write one there"
        )
    if revision not in (None, "main") and "://" not in base and not os.path.isabs(base):
        raise ValueError(
            f"model.path={name} is an adapter of revision {revision} of its base {base}, and only "
            f"main is fetched. Run hf download {base} --revision {revision} --local-dir FOLDER, "
            f"and write the folder's absolute path into {SETTINGS}"
        )
    if not folder.exists(WEIGHTS):
        raise ValueError(f"model.path={name} has no {WEIGHTS}: the adapter was not copied whole")
    stored = read_header(folder, WEIGHTS)
    try:
        lora, tokens = Lora.of_peft(values, stored), tokens_of(values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(repr(error).split())
        raise ValueError(
            f"model.path={name} has a damaged {SETTINGS}: {why:.200}. Copy the folder anew"
        ) from error
    return Adapter(name, folder, base, lora, tokens)


def tokens_of(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens whose rows an adapter has trained, as its settings name them.

    Raises: ValueError if the embedding and the head have rows of different tokens.
    """
    named = values.get("trainable_token_indices") or ()
    lists = list(named.values()) if isinstance(named, Mapping) else [named]
    if any(each != lists[0] for each in lists):
        raise ValueError("trainable_token_indices names other tokens for the head")
    return tuple(int(token) for token in lists[0]) if lists else ()


def _unsupported(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings of an adapter_config.json that are neither known here nor peft's own."""
    import peft

    defaults = peft.LoraConfig().to_dict() | {"peft_type": "LORA"}
    for name, value in values.items():
        usual = PLAIN_INITS if name == "init_lora_weights" else (defaults.get(name),)
        if value and value not in usual and name not in KNOWN:
            yield f"{name} {value!s:.60}"


def _lasts(base: str) -> bool:
    """Return whether a path means the same in every working folder."""
    relative = base.startswith(".") or os.path.isdir(base)
    named = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base) is not None
    return "://" in base or os.path.isabs(base) or (named and not relative)


def adapter_problems(adapter: Adapter, config: PretrainedConfig) -> list[str]:
    """Return what prevents using an adapter on a base of this configuration; reads headers only."""
    model = build(config, loss=no_loss, attention="eager")
    names = lora_layers.linear_names(model.hf)
    every = {name.rpartition(".")[2] for name, _ in model.hf.named_modules()}
    others = set(adapter.lora.targets) - set(names)
    if beside := sorted(others & every):
        return [
            f"model.path={adapter.name} adapts {', '.join(beside)} of its base {adapter.base}, and "
            f"only the linear layers of the blocks are adapted here: {', '.join(names)}. {MERGE}"
        ]
    wrong = {
        "linear layer": others,
        "parameter": set(adapter.lora.target_parameters) - set(parameter_names(model.hf)),
    }
    if missing := [f"{what} {', '.join(sorted(each))}" for what, each in wrong.items() if each]:
        return [
            f"model.path={adapter.name} is no adapter of its base {adapter.base}, whose blocks "
            f"have no {' and no '.join(missing)}. Correct base_model_name_or_path in {SETTINGS}, "
            "or merge it with peft"
        ]
    lora_layers.add_adapters(model, adapter.lora, adapter.tokens)
    return _misfits(adapter, model, read_header(adapter.folder, WEIGHTS))


def _misfits(adapter: Adapter, model: LanguageModel, stored: dict[str, Stored]) -> list[str]:
    """Name the tensors that are missing, of another shape, or of no layer of the model."""
    wanted = {peft_name(name): tuple(p.shape) for name, p in lora_layers.trained(model.hf).items()}
    shapes = stacked_shapes(stored, expert_parts(model.hf))
    lacking, more = wanted.keys() - shapes.keys(), shapes.keys() - wanted.keys()
    layers = {name.partition(".lora_")[0] for name in shapes}
    alone = {name for name in lacking if name.partition(".lora_")[0] not in layers}
    whole = {name for name in more if ".lora_" not in name}
    differ = {name for name in wanted.keys() & shapes.keys() if wanted[name] != shapes[name]}
    damaged = f"{WEIGHTS} and {SETTINGS} do not belong together. Copy the folder anew"
    wrong = [
        ("lacks", lacking - alone, damaged),
        (
            "adapts a part of the layers, without",
            alone,
            f"adapters here are of all layers of a name. {MERGE}; if the part was not meant, copy "
            "the folder anew",
        ),
        ("has whole weights,", whole, f"as peft stores resized embeddings. {MERGE}"),
        ("has tensors of no adapter,", more - whole, damaged),
        (f"does not fit its base {adapter.base} in", differ, damaged),
    ]
    return [
        f"model.path={adapter.name} {what} {', '.join(sorted(names)[:MAX_NAMED])}"
        f"{f' and {len(names) - MAX_NAMED} more' if len(names) > MAX_NAMED else ''}: {why}"
        for what, names, why in wrong
        if names
    ]


def adapted(hf: PreTrainedModel, folder: str) -> Any:
    """Return a whole model with the adapter in a local folder, as peft opens it.

    The embedding grows by the adapter's new tokens, as by AutoPeftModelForCausalLM.
    """
    import peft

    with open(os.path.join(folder, SETTINGS), encoding="utf-8") as file:
        size = max(tokens_of(json.load(file)), default=-1) + 1
    if size > len(cast(Any, hf.get_input_embeddings()).weight):
        hf.resize_token_embeddings(size, mean_resizing=False)
    with warnings.catch_warnings():  # peft 0.21 asks transformers 5 by a name that is deprecated
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return peft.PeftModel.from_pretrained(hf, folder)


@torch.no_grad()
def load_adapters(model: LanguageModel, adapter: Adapter) -> None:
    """Fill the model's adapters with the stored ones.

    Raises: ValueError if a tensor is missing or has another shape.
    """
    reader = _reader(adapter, model)
    for name, parameter in lora_layers.trained(model.hf).items():
        fill(parameter, reader.rows(peft_name(name)).to(parameter.dtype))


@torch.no_grad()
def merge_adapters(model: LanguageModel, adapter: Adapter) -> None:
    """Add the adapter's update to the weights of the base, in fp32; all ranks call it.

    Raises: ValueError if a tensor is missing or has another shape.
    """
    probe = build(model.hf.config, loss=no_loss, attention="eager")
    lora_layers.add_adapters(probe, adapter.lora, adapter.tokens)
    reader = _reader(adapter, probe)
    weights = base_state(model.hf, keep_vars=True)
    shared = {peft_name(name) for name in lora_layers.trained(probe.hf)}
    for name, update in lora_layers.updates(probe.hf).items():
        layer = update.layer
        if isinstance(update, RowsUpdate):
            rows = peft_name(f"{layer}.{ROWS}")
            if rows in shared:  # a tied head has none
                changed = replace(update, rows=reader.rows(rows))
                _merge(weights[name], changed)
            continue
        left, right = (
            reader.rows(peft_name(f"{layer}.{factor}.{lora_layers.ADAPTER}.weight")).float()
            for factor in ("lora_A", "lora_B")
        )
        magnitude = update.magnitude
        if magnitude is not None:
            key = f"{layer}.{lora_layers.MAGNITUDE}.{lora_layers.ADAPTER}.weight"
            magnitude = reader.rows(peft_name(key)).float()
        _merge(weights[name], replace(update, left=left, right=right, magnitude=magnitude))


def _merge(weight: Any, update: lora_layers.LoraUpdate | RowsUpdate) -> None:
    """Add an update with whole factors to a weight."""
    merged = update.merged(whole_of(weight).cpu().float(), lambda factor: factor)
    fill(weight, merged.to(weight.dtype))


def _reader(adapter: Adapter, model: LanguageModel) -> ShardReader:
    stored = read_header(adapter.folder, WEIGHTS)
    if wrong := _misfits(adapter, model, stored):
        raise ValueError("\n".join(wrong))
    return StackReader(adapter.folder, stored, expert_parts(model.hf))
