"""Published shapes of image classifiers: fields of their config.json, parameters, multiply-adds.

    IMAGE_PRESETS["resnet50"].parameters, IMAGE_PRESETS["efficientnet-b7"].size

A preset is a shape without weights. Parameters are those that torchvision publishes for the same
shapes with 1,000 classes. Multiply-adds at `size` pixels are counted on transformers' models. They
equal the published ones for ResNet and are up to 11 % lower for EfficientNet, whose padding
transformers rounds differently where a side is odd. A test compares both with what transformers
builds and runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ImagePreset:
    """A shape, with its parameters and multiply-adds at 1,000 classes."""

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


TINY = {
    "layer_type": "basic",
    "embedding_size": 32,
    "hidden_sizes": [32, 64, 128],
    "depths": [1, 1, 1],
}
IMAGE_PRESETS = {
    # rayapp's own, for tests and `make vision`; its figures are for 1,000 classes and 48 pixels.
    "resnet-tiny": ImagePreset("resnet", 440_200, 0.0096, 48, TINY),
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
