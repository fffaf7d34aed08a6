"""Find the vocabulary of the model that a run trains, and whether it starts from random weights.

The plan, the checks before a run, and the run itself all use these functions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from rayapp.config import Config, ConfigError, Lora
from rayapp.presets import PRESETS, config_of
from rayapp.storage import open_input, read_json

BYTES_TOKENS = 259
"""Tokens of the tokenizer `bytes`, and the minimum of a trained one: 256 bytes and 3 specials."""


def is_preset(path: str) -> bool:
    """Return whether a model path names a preset; a local folder of that name takes precedence."""
    return path in PRESETS and not os.path.isdir(os.path.expanduser(path))


def is_drawn(config: Config) -> bool:
    """Return whether the model is a preset whose weights are random and whose tokenizer is made."""
    path = config.model.path
    weights = path in PRESETS and PRESETS[path].package is not None
    return is_preset(path) and (config.model.from_scratch or not weights)


def read_config_json(
    path: str, presets: Iterable[str], problems: list[str]
) -> Mapping[str, Any] | None:
    """Return the config.json of a local folder; None, with a new problem, if missing or invalid."""
    folder = os.path.expanduser(path)
    if os.path.isfile(f"{folder}/config.json"):
        try:
            return read_json(open_input(folder), "config.json")
        except ValueError as error:
            problems.append(str(error))
            return None
    problems.append(
        f"model.path={path} is not on this machine: a plan needs the model's config.json and never "
        f"uses the network. Give a local folder, or one of {', '.join(presets)}"
    )
    return None


def text_section(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config.json says of the text decoder: all of it, or its text_config."""
    section = values.get("text_config", values)
    assert isinstance(section, Mapping)
    return section


def with_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with fields of the text decoder replaced."""
    if "text_config" in values:
        return {**values, "text_config": {**values["text_config"], **overrides}}
    return {**values, **overrides}


def adapter_at(path: str) -> Mapping[str, Any] | None:
    """Return the adapter_config.json of a local folder that holds no whole model; None if none.

    Raises: ConfigError if it is unreadable.
    """
    folder = os.path.expanduser(path)
    if os.path.isfile(f"{folder}/config.json") or not os.path.isdir(folder):
        return None
    try:
        return read_json(open_input(folder), "adapter_config.json")
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def with_adapters_lora(config: Config) -> Config:
    """Return the config with the `lora` of a local adapter that model.path names and goes on."""
    goes_on = config.model.lora is None and config.model.adapter == "train"
    if not goes_on or (values := adapter_at(config.model.path)) is None:
        return config
    path = config.model.path
    try:
        with open(f"{os.path.expanduser(path)}/adapter_model.safetensors", "rb") as file:
            tensors = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        lora = Lora.of_peft(values, tensors)
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        why = " ".join(repr(error).split())
        raise ConfigError([f"model.path={path} is a damaged adapter: {why:.200}"]) from error
    return config.with_fields("model", lora=lora)


def config_values(config: Config, problems: list[str]) -> Mapping[str, Any] | None:
    """Return the model's config.json with the run's overrides.

    None, with a new problem, if it is not on this machine.
    """
    adapter = adapter_at(config.model.path)
    path = config.model.path if adapter is None else adapter["base_model_name_or_path"]
    by_source = {preset.source: name for name, preset in PRESETS.items()}
    name = by_source.get(path, path)
    values = config_of(name) if is_preset(name) else read_config_json(path, PRESETS, problems)
    if values is None:
        return None
    values = with_overrides(values, config.model.overrides)
    if is_drawn(config) or config.model.new_tokens:
        own, drawn = text_section(values)["vocab_size"], is_drawn(config)
        vocabulary = vocabulary_of(config, own, preset=drawn)
        if vocabulary is None:
            problems.append(
                f"model.tokenizer={config.model.tokenizer} is not on this machine: a plan "
                "needs the tokenizer's size and never uses the network. Give a local folder "
                "with tokenizer.json, or set model.overrides.vocab_size"
            )
            return None
        values = with_overrides(values, {"vocab_size": vocabulary})
    return values


def tokenizer_of(config: Config, own: int, preset: bool) -> str:
    """Return the tokenizer's name: model.tokenizer, else `bpe:N` for a preset, else the model path.

    N is model.overrides.vocab_size, else `own`, the vocabulary in the model's config.json.
    """
    own = cast(int, config.model.overrides.get("vocab_size", own))
    return config.model.tokenizer or (f"bpe:{own}" if preset else config.model.path)


def is_made(tokenizer: str) -> bool:
    """Return whether the tokenizer is made for the run (`bytes`, `bpe:N`) and not loaded."""
    return tokenizer == "bytes" or tokenizer.startswith("bpe:")


def tokens_of(tokenizer: str) -> int | None:
    """Return a tokenizer's number of tokens; None if it is no local folder with tokenizer.json.

    For `bpe:N` this is an upper bound: training on little data may find fewer tokens.
    """
    if tokenizer == "bytes":
        return BYTES_TOKENS
    if tokenizer.startswith("bpe:"):
        return max(BYTES_TOKENS, int(tokenizer.partition(":")[2]))
    file = Path(os.path.expanduser(tokenizer)) / "tokenizer.json"
    if not file.is_file():
        return None
    values = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = values["model"]["vocab"]
    words = set(vocabulary) if isinstance(vocabulary, dict) else {word for word, _ in vocabulary}
    return len(words | {added["content"] for added in values.get("added_tokens", ())})


def vocabulary_of(config: Config, own: int, preset: bool, tokens: int | None = None) -> int | None:
    """Return the number of embeddings of the trained model; None if the tokenizer is not at hand.

    `own` is the vocabulary in the model's config.json, `tokens` the tokenizer's size if it is
    loaded. model.overrides.vocab_size comes first, and a model folder keeps its own vocabulary,
    which grows by model.new_tokens if there is no room for them. A preset takes the size of a
    tokenizer made for the run, else the larger of `own` and the tokenizer's size.
    """
    own = cast(int, config.model.overrides.get("vocab_size", own))
    new = len(config.model.new_tokens)
    keeps = not preset or "vocab_size" in config.model.overrides
    if keeps and not new:
        return own
    tokenizer = tokenizer_of(config, own, preset)
    size = tokens
    if size is None and (size := tokens_of(tokenizer)) is not None:
        size += new
    if size is None and keeps:
        return own + new
    if size is None or is_made(tokenizer):
        return size
    return max(size, own)


def length_problem(config: Config, own: int | None) -> str | None:
    """Return a problem if rows are longer than the model has positions for; `own` is its limit."""
    limit: Any = config.model.overrides.get("max_position_embeddings", own)
    if not limit or config.data.seq_len <= limit:
        return None
    return (
        f"data.seq_len={config.data.seq_len} is above the model's limit: {config.model.path} "
        f"has positions for {limit} tokens. Set data.seq_len={limit} or less"
    )


def random_weights(config: Config) -> str | None:
    """Return a note that a run starts from random weights and what to set; None if it does not."""
    path = config.model.path
    if is_preset(path) and PRESETS[path].package is None:
        source = PRESETS[path].source
        name = f"model.path={source}" if "/" in source else "model.path to a model folder or hub id"
        return f"from random weights: the preset {path} has no weights. To fine-tune, set {name}"
    if config.model.from_scratch:
        return (
            f"from random weights: model.from_scratch=true ignores the weights of {path}. "
            "To fine-tune, set model.from_scratch=false"
        )
    return None
