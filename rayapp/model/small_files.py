"""Write what a Hugging Face folder holds beside its weights: index, tokenizer, config.json.

write_small_files(hf, storage, {"model.safetensors": {"lm_head.weight": 4096}}, tokenizer, ...)
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from rayapp.model.files import INDEX, SINGLE
from rayapp.storage import Storage

TOKENIZER = "tokenizer_config.json"
ROTARY_TYPES_OF_VERSION_4 = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def write_small_files(
    hf: PreTrainedModel,
    storage: Storage,
    sizes: Mapping[str, Mapping[str, int]],
    tokenizer: Any,
    generation_config: GenerationConfig | None,
    dtype: torch.dtype,
    processor: Mapping[str, bytes],
) -> list[str]:
    """Write everything but weights, delete weights of an earlier export; return the names.

    `sizes` are the bytes of the tensors in each file of weights.
    """
    small: dict[str, bytes] = {**processor}
    if len(sizes) > 1:
        small[INDEX] = _index(sizes)
    generation_config = generation_config or getattr(hf, "generation_config", None)
    small |= small_files_of(tokenizer, generation_config)
    stops = None if generation_config is None else generation_config.eos_token_id
    small["config.json"] = config_json(hf, dtype, stops)
    for entry in storage.list():
        ours = entry.name == INDEX or entry.name == SINGLE or entry.name.startswith("model-0")
        if ours and entry.name not in sizes and entry.name not in small:
            storage.delete(entry.name)  # transformers would prefer a stale single file
    for name, data in small.items():
        storage.write(name, data)
    return list(small)


def small_files_of(tokenizer: Any, generation_config: GenerationConfig | None) -> dict[str, bytes]:
    """Return what a whole model's folder and an adapter's have alike."""
    small: dict[str, bytes] = {}
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    small[path.relative_to(folder).as_posix()] = path.read_bytes()
        values = json.loads(small[TOKENIZER])
        if pieces := getattr(tokenizer, "pieces", None):  # see rayapp.data.tokens
            small["tokenizer.model"] = pieces
        small[TOKENIZER] = _tokenizer_config(tokenizer, values)
    if generation_config is not None:
        # Not save_pretrained: it refuses settings that many published models have.
        text = generation_config.to_json_string(use_diff=True)
        small["generation_config.json"] = text.encode()
    return small


def _tokenizer_config(tokenizer: Any, values: dict[str, Any]) -> bytes:
    """Write tokenizer_config.json so that transformers 4 reads it too, and makes the same tokens.

    Version 5 has a list under a name that version 4 has for a mapping, and has other classes. Most
    classes of version 4 change what tokenizer.json says (LlamaTokenizerFast adds BOS).
    PreTrainedTokenizerFast takes it as it is, with the settings that are written here.
    """
    for name in ("backend", "is_local", "local_files_only"):  # of this process
        values.pop(name, None)
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    if "model_specific_special_tokens" in values:
        values["extra_special_tokens"] = values.pop("model_specific_special_tokens")
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        values |= {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": tokenizer.model_input_names,
            "padding_side": tokenizer.padding_side,
            "add_prefix_space": (rules["pre_tokenizer"] or {}).get("add_prefix_space", False),
        }
    if getattr(tokenizer, "pieces", None):  # llama.cpp takes all else that it knows from here
        ids, bos, eos = tokenizer("a")["input_ids"], tokenizer.bos_token_id, tokenizer.eos_token_id
        added = tokenizer.added_tokens_decoder.items()
        values |= {
            "add_prefix_space": tokenizer.tokenize("a")[0].startswith("\u2581"),
            "add_bos_token": bos is not None and ids[0] == bos,
            "add_eos_token": eos is not None and ids[-1] == eos,
            "added_tokens_decoder": {str(i): token.__getstate__() for i, token in added},
        }
    return (json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _index(sizes: Mapping[str, Mapping[str, int]]) -> bytes:
    weight_map = {tensor: name for name, tensors in sizes.items() for tensor in tensors}
    total = sum(size for tensors in sizes.values() for size in tensors.values())
    values = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def config_json(hf: PreTrainedModel, dtype: torch.dtype, stops: int | list[int] | None) -> bytes:
    """Write config.json so that transformers 4 reads it too.

    Version 5 renamed torch_dtype to dtype, in some families num_experts to num_local_experts, and
    moved the rotary settings into rope_parameters. Version 4 ignores unknown fields, and would use
    its defaults without a warning.
    """
    config = deepcopy(hf.config)
    config.architectures = [type(hf).__name__.removeprefix("FSDP")]
    config.dtype = dtype
    if stops is not None:
        config.eos_token_id = config.get_text_config().eos_token_id = stops
    values = json.loads(config.to_json_string(use_diff=True))
    values["torch_dtype"] = values["dtype"]
    for section in (values, values.get("text_config", {})):
        section |= _rotary_of_version_4(section)
        for old, new in config.get_text_config().attribute_map.items():
            if old == "num_experts" and new in section:
                section[old] = section[new]
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def _rotary_of_version_4(section: dict[str, Any]) -> dict[str, Any]:
    """Return a decoder's rotary settings under the names of transformers 4."""
    rope: dict[str, Any] = section.get("rope_parameters") or {}
    found: dict[str, Any] = {}
    kind = str(section.get("model_type"))
    if "full_attention" in rope:  # layers with a window have settings of their own
        local = rope.get("sliding_attention") or {}
        found |= {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
        rope = rope["full_attention"] or {}  # none: these layers have no positions
    if "rope_theta" not in rope:
        return found
    if rope.get("rope_type", "default") not in ROTARY_TYPES_OF_VERSION_4:
        return {}  # it has no such model, and version 5 would read these fields as all there is
    neox = kind.startswith("gpt_neox")
    found["rotary_emb_base" if neox else "rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        name = "rotary_pct" if neox else "partial_rotary_factor"
        found[name] = rope["partial_rotary_factor"]
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    if kind == "phi3" and "rope_scaling" in found:  # it takes no other fields
        factors = {name: rope[name] for name in ("short_factor", "long_factor")}
        found["rope_scaling"] = {"type": "longrope", **factors}
    return found
