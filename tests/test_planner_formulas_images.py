"""Layers of image classifiers against transformers' own models, and against published totals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageClassification, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rayapp.planner.image_memory import ImageLayout
from rayapp.planner.image_shape import ImageShape, image_shape_of
from rayapp.planner.shape import UnknownShape
from rayapp.presets import IMAGE_PRESETS

# An odd size, and what no preset has.
ODD: dict[str, tuple[dict[str, Any], int]] = {
    "resnet-odd": ({"model_type": "resnet", "downsample_in_first_stage": True}, 97),
    "resnet-early": ({"model_type": "resnet", "downsample_in_bottleneck": True}, 97),
    "resnet-narrow": ({"model_type": "resnet", "embedding_size": 256, "num_channels": 1}, 64),
    "efficientnet-odd": ({"model_type": "efficientnet", "width_coefficient": 0.9}, 101),
    "efficientnet-square": (
        {"model_type": "efficientnet", "depthwise_padding": [4, 11], "drop_connect_rate": 0.0},
        89,
    ),
}


# The others differ in the same few numbers; building and running them all takes minutes.
QUICK = ("resnet-tiny", "resnet18", "resnet50", "resnet101", "efficientnet-b0", "efficientnet-b7")


def values_of(name: str) -> tuple[dict[str, Any], int]:
    if name in ODD:
        return ODD[name]
    preset = IMAGE_PRESETS[name]
    return {"model_type": preset.model_type, **preset.fields}, preset.size


def built(values: dict[str, Any]) -> PreTrainedModel:
    """Build a model of 1,000 classes that takes no memory."""
    fields = {name: value for name, value in values.items() if name != "model_type"}
    if values["model_type"] == "efficientnet" and "width_coefficient" in fields:
        fields.setdefault("hidden_dim", 2560)
    config = CONFIG_MAPPING[values["model_type"]](**fields, num_labels=1000)
    if config.model_type == "efficientnet":  # its head is as wide as 1,280 scaled
        from transformers.models.efficientnet.modeling_efficientnet import round_filters

        config.hidden_dim = values["hidden_dim"] = round_filters(config, 1280)
    with torch.device("meta"):
        return AutoModelForImageClassification.from_config(config)


def kept_bytes_of(model: PreTrainedModel, images: torch.Tensor) -> dict[torch.dtype, int]:
    """Return what autograd keeps of a forward pass beside the weights, by type."""
    seen: dict[int, tuple[int, torch.dtype]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = (storage.nbytes(), tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train()(images)
    own = [*model.parameters(), *model.buffers()]
    for tensor in own:
        seen.pop(tensor.untyped_storage()._cdata, None)
    found: dict[torch.dtype, int] = {}
    for size, dtype in seen.values():
        found[dtype] = found.get(dtype, 0) + size
    return found


@pytest.mark.parametrize("name", [*QUICK, *ODD])
def test_parameters_and_multiply_adds_are_those_of_transformers(name: str) -> None:
    values, size = values_of(name)
    model = built(values).eval()
    shape = image_shape_of(values, size)
    assert shape.classes == 1000
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    channels = int(values.get("num_channels", 3))
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, channels, size, size, device="meta"))
    assert 2 * shape.macs == counter.get_total_flops()
    if name in IMAGE_PRESETS:
        assert shape.parameters == IMAGE_PRESETS[name].parameters


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "efficientnet-b0", *ODD])
def test_what_is_kept_is_what_autograd_keeps(name: str) -> None:
    values, size = values_of(name)
    model, count = built(values), 8
    channels = int(values.get("num_channels", 3))
    found = kept_bytes_of(model, torch.empty(count, channels, size, size, device="meta"))
    kept = image_shape_of(values, size).kept
    # A mask of dropout is of bytes on GPUs, and elsewhere of fp32.
    numbers = 4 * count * (kept.values + kept.norms + kept.masks)
    assert found[torch.float32] == pytest.approx(numbers, rel=0.01)
    assert found.get(torch.int64, 0) == 8 * count * kept.indices


def test_published_totals() -> None:
    """He et al. 2015 and torchvision: 25.557 M, 4.09 GMACs; 66.35 M, 37.75 GMACs at 600 pixels."""
    resnet = image_shape_of(values_of("resnet50")[0], 224)
    assert resnet.parameters == 25_557_032 and round(resnet.macs / 1e9, 2) == 4.09
    values, size = values_of("efficientnet-b7")
    ours, papers = (image_shape_of(values, size, same=same) for same in (False, True))
    assert ours.parameters == papers.parameters == 66_347_960
    assert round(papers.macs / 1e9, 2) == 37.75
    assert 0.9 * papers.macs < ours.macs < papers.macs  # where a side is odd a row is dropped
    b0 = image_shape_of(values_of("efficientnet-b0")[0], 224, same=True)
    assert round(b0.macs / 1e9, 2) == 0.39


def shape() -> ImageShape:
    return image_shape_of(values_of("resnet50")[0], 224)


def test_classes_and_sizes() -> None:
    ten = image_shape_of({"model_type": "resnet", "num_labels": 10}, 224)
    assert ten.parameters == shape().parameters - 990 * 2049
    named = image_shape_of({"model_type": "resnet", "id2label": {0: "a", 1: "b"}}, 224)
    assert named.classes == 2
    twice = image_shape_of(values_of("resnet50")[0], 448)
    assert twice.macs / shape().macs == pytest.approx(4, rel=0.01)


def test_other_families_and_tiny_images_are_refused() -> None:
    with pytest.raises(UnknownShape, match=r"model_type=resnt is unknown.*Did you mean resnet"):
        image_shape_of({"model_type": "resnt"}, 224)
    with pytest.raises(UnknownShape, match="too small"):
        image_shape_of({"model_type": "efficientnet", "kernel_sizes": [9] * 7}, 8)


def test_memory_by_its_terms() -> None:
    layout = ImageLayout(shape(), 1, 64, precision="fp32")
    peak = layout.peak()
    parameters = 4 * 25_557_032
    for name in ("parameters", "gradients", "optimizer"):
        assert peak.terms[name] == parameters
    assert peak.terms["activations"] == 64 * layout.kept_bytes
    half = ImageLayout(shape(), 1, 64, precision="bf16")
    assert half.kept_bytes < 0.52 * layout.kept_bytes
    assert half.checkpoint_bytes() == 2 * parameters
    more = ImageLayout(shape(), 4, 64, "full_shard", optimizer="adamw", averaged=True)
    assert more.peak().terms["optimizer"] == 2 * parameters / 4
    assert more.checkpoint_bytes() == 4 * parameters


def test_synchronized_batch_norm_keeps_fp32() -> None:
    plain = ImageLayout(shape(), 1, 64)
    together = ImageLayout(shape(), 1, 64, synchronized=True)
    more = together.kept_bytes - plain.kept_bytes
    assert more == 2 * shape().kept.norms
