"""Resolve a model path to a folder, and read its configuration.

    source = resolve("tiny")                 # a preset: architecture only
    source = resolve("s3://bucket/llama")    # a Hugging Face folder anywhere

A path is tried in this order as: s3:// or file:// URL, existing local folder, preset, hub id. Code
in a model folder is never run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import transformers
import yaml
from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rayapp.config import parse_yaml
from rayapp.model.adapter import SETTINGS, Adapter, read_adapter
from rayapp.presets import OWN, PACKAGES
from rayapp.storage import Readable, open_input, read_json

PRESETS = Path(__file__).parent.parent / "presets"
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)  # of a README.md
LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md", *LICENCES]
SHAPE_PATTERNS = ["*config.json", "adapter_model.safetensors"]  # what `ModelSource.config` takes
TOKENIZER_FILE = re.compile(
    r"(token|vocab|merges|special|added|chat_template|spiece|sentencepiece)"
)


class Published(TypedDict, total=False):
    """What is published of a model."""

    id: str | None
    """On the Hugging Face hub."""
    license: str
    """By the hub's names."""
    license_name: str


@dataclass(frozen=True)
class ModelSource:
    """One model: its folder, and whether it is a preset (no weights).

    Of an adapter, `folder` is that of its base.
    """

    name: str
    folder: Readable
    preset: bool = False
    adapter: Adapter | None = None

    @property
    def base(self) -> str:
        """The model's name without its adapter."""
        return self.name if self.adapter is None else self.adapter.base

    @property
    def storage(self) -> Readable | None:
        """The folder with the weights; None for a preset."""
        return None if self.preset else self.folder

    @cached_property
    def config(self) -> PretrainedConfig:
        """Read config.json.

        Raises: ValueError if it is absent, unreadable, or of an architecture not in transformers.
        """
        values = read_json(self.folder, "config.json")
        if values is None:
            raise ValueError(
                f"model.path={self.name} has no config.json in {self.folder.url}: "
                "without it the architecture is unknown. Give a Hugging Face model folder"
            )
        kind = str(values.get("model_type"))
        if kind not in CONFIG_MAPPING:
            raise ValueError(
                f"model.path={self.name} is of model_type {kind!r}, which transformers "
                f"{transformers.__version__} does not know, and code from a model folder is never "
                "run. Choose a supported architecture or upgrade transformers"
            )
        values = PretrainedConfig._decode_special_floats(values)
        made: PretrainedConfig = self._made("config.json", CONFIG_MAPPING[kind].from_dict, values)
        if self.adapter is not None and self.adapter.tokens:  # they may be new ones
            text = made.get_text_config()
            text.vocab_size = max(text.vocab_size, 1 + max(self.adapter.tokens))
        return made

    @cached_property
    def generation_config(self) -> GenerationConfig | None:
        """The generation_config.json of the adapter, else of the folder; None if there is none.

        Raises: ValueError if it is unreadable.
        """
        folders = [self.folder] if self.adapter is None else [self.adapter.folder, self.folder]
        found = (read_json(folder, "generation_config.json") for folder in folders)
        values = next((values for values in found if values is not None), None)
        if values is None:
            return None
        return self._made("generation_config.json", GenerationConfig.from_dict, values)

    def _made(self, file: str, make: Callable[[Any], Any], values: object) -> Any:
        try:
            return make(values)
        except Exception as error:  # transformers' code, of each family its own, takes the values
            raise ValueError(
                f"model.path={self.name} has a damaged {self.folder.url}/{file}: "
                f"{' '.join(repr(error).split()):.300}. Copy it anew"
            ) from error


def resolve(path: str, patterns: Sequence[str] = HUB_PATTERNS) -> ModelSource:
    """Return the model that `path` names; a hub id is downloaded to the Hugging Face cache.

    If it is an exported adapter, that is its base with the adapter. `patterns` name the files that
    are downloaded.

    Raises: ValueError if it is none of URL, folder, preset and hub id, or cannot be fetched.
    """
    source = _resolve(path, patterns)
    adapter = None if source.preset else read_adapter(path, source.folder)
    if adapter is None:
        return source
    try:
        base = _resolve(adapter.base, patterns)
    except ValueError as error:
        raise ValueError(
            f"model.path={path} is an adapter without its base {adapter.base}: "
            f"{str(error).partition('. ')[0]}. Put the base there, or correct "
            f"base_model_name_or_path in {SETTINGS}"
        ) from error
    if base.preset:
        raise ValueError(
            f"model.path={path} is an adapter on the preset {adapter.base}, which has no weights: "
            "they were drawn when that run began. Go on from its checkpoint, with model.path="
            f"{adapter.base} and model.init_from=RUN"
        )
    return replace(base, name=path, adapter=adapter)


def _resolve(path: str, patterns: Sequence[str]) -> ModelSource:
    """Return the model that `path` names, whatever is in its folder."""
    if "://" in path or os.path.isdir(os.path.expanduser(path)):
        return ModelSource(path, open_input(path))
    if re.fullmatch(r"[\w.-]+", path) and (PRESETS / path / "config.json").is_file():
        return ModelSource(path, open_input(str(PRESETS / path)), preset=True)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return ModelSource(path, open_input(hub_folder(path, patterns)))
    names = ", ".join(sorted(entry.parent.name for entry in PRESETS.glob("*/config.json")))
    raise ValueError(
        f"model.path={path} is no folder, s3:// URL or hub id, and no preset. "
        f"Set an existing folder, org/name, or one of: {names}"
    )


def processor_files(source: ModelSource) -> dict[str, bytes]:
    """Return the files of a multimodal model's processor, by name: they go into its export."""
    return {name: source.folder.read(name) for name in PROCESSOR if source.folder.exists(name)}


def published(source: ModelSource) -> Published:
    """Return the base's id on the hub and its licence, from the front of its README.md.

    Without one there, the licence is the first line of a file LICENSE.
    """
    folder, card = source.folder, "README.md"
    text = folder.read(card).decode("utf-8", "replace") if folder.exists(card) else ""
    front = front_matter(text)
    own = re.fullmatch(r"[\w.-]+/[\w.-]+", source.base) and not os.path.isdir(source.base)
    named = front.get("base_model")
    published: Published = {"id": source.base if own else named if isinstance(named, str) else None}
    for name in ("license", "license_name"):
        if isinstance(value := front.get(name), str):
            published[name] = value
    files = [entry.name for entry in source.folder.list() if entry.name in LICENCES]
    if "license" not in published and files:
        lines = source.folder.read(files[0]).decode("utf-8", "replace").split("\n")
        first = next((line.strip(" #") for line in lines if line.strip(" #")), files[0])
        published |= {"license": "other", "license_name": first}
    return published


def front_matter(text: str) -> dict[str, object]:
    """Return the YAML at the front of a README.md; {} if there is none."""
    match = FRONT.match(text)
    try:
        values = parse_yaml(match[1]) if match else None
    except yaml.YAMLError:  # somebody's README is no reason not to train
        values = None
    return values if isinstance(values, dict) else {}


def hub_folder(name: str, patterns: Sequence[str] = HUB_PATTERNS) -> str:
    """Fetch configuration, safetensors and tokenizer of a hub model; return the local folder.

    Raises: ValueError if it cannot be fetched.
    """
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=[*patterns])
    except (OSError, ValueError) as error:  # network, 401, 404, offline: all derive from these
        why = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"model.path={name} is no local folder, and as a hub id it cannot be fetched: "
            f"{type(error).__name__}: {why}. Check the name, the network and HF_TOKEN, or set a "
            f"folder, {', '.join(PACKAGES)} (weights from the package index) or {OWN} (random ones)"
        ) from error
