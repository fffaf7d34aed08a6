"""Which model a run trains: its vocabulary, and whether its weights are drawn at random.

    vocabulary_of(config, own=128_256, preset=True)      # before a tokenizer is loaded or trained
    vocabulary_of(config, own=128_256, preset=True, tokens=len(tokenizer))

The plan, the checks before a run, and the run itself all ask here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from rayapp.config import Config
from rayapp.presets import PRESETS

BYTES_TOKENS = 259
"""Of the tokenizer `bytes`, and the fewest of one that is trained: bytes and special tokens."""


def is_preset(path: str) -> bool:
    """Tell whether a model path means a preset: a folder of that name comes first."""
    return path in PRESETS and not os.path.isdir(os.path.expanduser(path))


def read_config_json(
    path: str, presets: Iterable[str], problems: list[str]
) -> Mapping[str, Any] | None:
    """Return the config.json of a model's local folder; None, and a problem, where it has none."""
    file = Path(os.path.expanduser(path)) / "config.json"
    if file.is_file():
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            problems.append(f"{file} is not valid JSON: {error}. Copy it anew")
            return None
    problems.append(
        f"model.path={path} is not at hand: a plan needs the model's config.json and never uses "
        f"the network. Give a local folder, or one of {', '.join(presets)}"
    )
    return None


def tokenizer_of(config: Config, own: int, preset: bool) -> str:
    """Return the tokenizer that is used: a preset without one trains one of the model's size.

    `own` is the vocabulary that the model's config.json says.
    """
    own = cast(int, config.model.overrides.get("vocab_size", own))
    return config.model.tokenizer or (f"bpe:{own}" if preset else config.model.path)


def is_made(tokenizer: str) -> bool:
    """Tell a tokenizer that is made for the run from one that is loaded."""
    return tokenizer == "bytes" or tokenizer.startswith("bpe:")


def tokens_of(tokenizer: str) -> int | None:
    """Return how many tokens it has; None where it is not a local folder with tokenizer.json.

    One that is trained has at most so many: fewer where the data gives no more.
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
    """Return for how many tokens the trained model has embeddings; None if that is not at hand.

    `own` is what the model's config.json says, `tokens` the size of its tokenizer where that is
    loaded. A preset takes the vocabulary of a tokenizer that is made for the run, and room for one
    that is not; model.overrides come first, and a model folder keeps its own.
    """
    own = cast(int, config.model.overrides.get("vocab_size", own))
    if not preset or "vocab_size" in config.model.overrides:
        return own
    tokenizer = tokenizer_of(config, own, preset)
    size = tokens_of(tokenizer) if tokens is None else tokens
    if size is None or is_made(tokenizer):
        return size
    return max(size, own)


def random_weights(config: Config) -> str | None:
    """Say that a run starts from random weights and what to set; None if it does not."""
    path = config.model.path
    if is_preset(path):
        source = PRESETS[path].source
        name = f"model.path={source}" if "/" in source else "model.path to a model folder or hub id"
        return f"from random weights: the preset {path} is a shape alone. To fine-tune, set {name}"
    if config.model.from_scratch:
        return (
            f"from random weights: model.from_scratch=true leaves those of {path} unread. "
            "To fine-tune, set model.from_scratch=false"
        )
    return None
