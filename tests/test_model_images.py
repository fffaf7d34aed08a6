"""Check the parts of an image classifier alone: batch-norm, the average, targets, presets."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from transformers import AutoImageProcessor, EfficientNetConfig, ResNetConfig
from transformers.models.auto.modeling_auto import AutoModelForImageClassification

from rayapp.config.vision import ImageDataConfig
from rayapp.data.images.augment import centred
from rayapp.model import num_parameters
from rayapp.model.classifier import (
    Classifier,
    build_classifier,
    forward_flops,
    shape_of_classifier,
    write_processor,
)
from rayapp.model.moving_averages import Average, BatchNorm, Settling, discard, use_batch_norm
from rayapp.presets import IMAGE_PRESETS
from rayapp.storage import open_storage

CHANNELS = 5


# ---- Batch-norm --------------------------------------------------------------------------------


def ours(synchronized: bool) -> BatchNorm:
    torch.manual_seed(1)
    layer = nn.BatchNorm2d(CHANNELS)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    layer.__class__ = BatchNorm
    assert isinstance(layer, BatchNorm)
    layer.synchronized = synchronized
    return layer


def test_alone_it_is_torchs(tmp_path: Path) -> None:
    processes.spawn(_alone, 1, str(tmp_path / "meet"))


def _alone(rank: int, world: int) -> None:
    for synchronized in (False, True):
        layer = ours(synchronized)
        plain = nn.BatchNorm2d(CHANNELS)
        plain.load_state_dict(layer.state_dict())
        for _ in range(3):
            x = torch.randn(4, CHANNELS, 3, 3) * 3 + 1
            inputs = [x.clone().requires_grad_() for _ in range(2)]
            found, wanted = layer(inputs[0]), plain(inputs[1])
            torch.testing.assert_close(found, wanted)
            for output in (found, wanted):
                output.square().sum().backward()
            torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-4)
            Settling([layer]).finish()
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
        torch.testing.assert_close(layer.state_dict(), plain.state_dict())
        layer.eval(), plain.eval()
        torch.testing.assert_close(layer(x), plain(x))


def test_over_ranks_it_is_one_batch(tmp_path: Path) -> None:
    """Unequal parts, one of them empty: outputs, gradients and statistics of the whole."""
    processes.spawn(_over_ranks, 3, str(tmp_path / "meet"))


def _over_ranks(rank: int, world: int) -> None:
    layer = ours(True)
    plain = nn.BatchNorm2d(CHANNELS)
    plain.load_state_dict(layer.state_dict())
    torch.manual_seed(2)
    for counts in ((3, 5, 0), (1, 1, 2)):
        x = torch.randn(sum(counts), CHANNELS, 4, 4) * 2 + 7
        goal = torch.randn_like(x)
        whole = x.clone().requires_grad_()
        plain.zero_grad()
        (plain(whole) * goal).sum().backward()
        own, own_goal = x.split(counts)[rank].clone().requires_grad_(), goal.split(counts)[rank]
        layer.zero_grad()
        output = layer(own)
        (output * own_goal).sum().backward()
        Settling([layer]).finish()
        assert whole.grad is not None and plain.weight.grad is not None
        wanted = whole.grad.split(counts)[rank]
        torch.testing.assert_close(own.grad, wanted, rtol=1e-4, atol=1e-5)
        for name in ("weight", "bias"):  # a rank's part; the loop sums over ranks
            gradient = getattr(layer, name).grad.clone()
            torch.distributed.all_reduce(gradient)
            torch.testing.assert_close(gradient, getattr(plain, name).grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


def test_what_a_skipped_step_had_is_forgotten(tmp_path: Path) -> None:
    processes.spawn(_forgotten, 1, str(tmp_path / "meet"))


def _forgotten(rank: int, world: int) -> None:
    layer, before = ours(False), ours(False).state_dict()
    layer(torch.randn(4, CHANNELS, 3, 3))
    Settling([layer]).forget()
    layer(torch.randn(4, CHANNELS, 3, 3))
    discard([layer])
    Settling([layer]).finish()
    torch.testing.assert_close(layer.state_dict(), before)
    assert layer(torch.randn(0, CHANNELS, 3, 3)).shape == (0, CHANNELS, 3, 3)
    one = layer(torch.full((1, CHANNELS, 1, 1), 3.0))  # nothing varies
    torch.testing.assert_close(one.flatten(), layer.bias)


def test_every_batch_norm_of_a_model_is_ours() -> None:
    """And EfficientNet's keeps 99 % of the old, as its authors mean 0.99."""
    small = EfficientNetConfig(width_coefficient=0.2, depth_coefficient=0.2, hidden_dim=64)
    model = AutoModelForImageClassification.from_config(small)
    count = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert use_batch_norm(model, True) == count > 10
    kept = 0
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert type(module) is BatchNorm and module.synchronized
            # transformers leaves its expanding ones at PyTorch's own 0.1.
            assert module.momentum is not None and round(module.momentum, 6) in (0.01, 0.1)
            kept += module.momentum < 0.05
    assert kept > 5


# ---- The average -------------------------------------------------------------------------------


def test_an_average_is_the_sum_by_hand() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))
    average, weight = Average(model, 0.95), model[0].weight
    expected = weight.detach().clone()
    for update in range(1, 40):
        with torch.no_grad():
            weight.add_(torch.randn_like(weight))
        model[1].running_mean += 1.0
        average.update()
        decay = min(0.95, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * weight.detach()
    live = copy.deepcopy(model.state_dict())
    with average.in_place():
        torch.testing.assert_close(weight.detach(), expected)
        assert 0 < float(model[1].running_mean[0]) < 39  # statistics are averaged too
    torch.testing.assert_close(model.state_dict(), live, rtol=0, atol=0)
    assert int(average.tensors["updates"]) == 39


# ---- The classifier ----------------------------------------------------------------------------

TINY = ResNetConfig(
    embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", num_labels=6
)


def tiny(**options: Any) -> Classifier:
    torch.manual_seed(0)
    model = AutoModelForImageClassification.from_config(TINY).eval()
    return Classifier(model, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_objective_is_torchs_cross_entropy(smoothing: float, channels_last: bool) -> None:
    draw = np.random.default_rng(0)
    images = torch.from_numpy(draw.integers(0, 256, (5, 32, 32, 3), np.uint8))
    labels, others = (torch.from_numpy(draw.integers(0, 6, 5)) for _ in range(2))
    shares = torch.from_numpy(draw.random(5, np.float32))
    classifier = tiny(label_smoothing=smoothing, channels_last=channels_last)
    objective, loss, logits = classifier(images, labels, others, shares)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    pixels = (images.permute(0, 3, 1, 2) / 255 - mean) / std
    torch.testing.assert_close(classifier.normal(images), pixels, check_stride=False)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert classifier.normal(images).is_contiguous(memory_format=layout)
    expected = classifier.hf(pixels).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    target = F.one_hot(labels, 6) * shares[:, None] + F.one_hot(others, 6) * (1 - shares)[:, None]
    for found, smooth in ((objective, smoothing), (loss, 0.0)):
        wanted = F.cross_entropy(expected, target, reduction="sum", label_smoothing=smooth)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not loss.requires_grad


def test_no_images_are_no_loss() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    blank = torch.zeros(0, 32, 32, 3, dtype=torch.uint8)
    classifier = tiny().train()
    use_batch_norm(classifier.hf, False)
    objective, loss, logits = classifier(blank, nothing, nothing, torch.zeros(0))
    objective.backward()
    assert float(loss) == 0 and logits.shape == (0, 6)
    for parameter in classifier.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_classes_are_named_in_the_config() -> None:
    shape, source = shape_of_classifier("resnet18", {"depths": [1, 1, 1, 1]}, ("cat", "dog"))
    assert source is None and shape.num_labels == 2 and shape.depths == [1, 1, 1, 1]
    assert shape.id2label == {0: "cat", 1: "dog"} and shape.label2id == {"cat": 0, "dog": 1}
    with pytest.raises(ValueError, match=r"resnet-tinny .*one of: resnet-tiny, resnet18"):
        shape_of_classifier("resnet-tinny", {}, ())


def test_what_follows_from_an_override_follows(tmp_path: Path) -> None:
    """With another number of stages too, the config opens again as it was saved."""
    shape, _ = shape_of_classifier("resnet-tiny", {"hidden_sizes": [8], "depths": [1]}, ("a", "b"))
    shape.save_pretrained(tmp_path)
    again = ResNetConfig.from_pretrained(tmp_path)
    assert again.stage_names == ["stem", "stage1"] and again.num_labels == 2
    for wrong, words in (
        ({"depth": [1]}, r"is unknown in depth: .* Did you mean depths?"),
        ({"depths": "three"}, r"is not a shape of resnet: .* Correct its fields"),
    ):
        with pytest.raises(ValueError, match=words):
            shape_of_classifier("resnet-tiny", wrong, ())


@pytest.mark.parametrize("name", IMAGE_PRESETS)
def test_presets_are_what_transformers_builds(name: str) -> None:
    """Parameters as torchvision publishes them, and multiply-adds as they are run."""
    preset, classes = IMAGE_PRESETS[name], tuple(map(str, range(1000)))
    shape, _ = shape_of_classifier(name, {}, classes)
    classifier = build_classifier(shape, mean=(0, 0, 0), std=(1, 1, 1))
    assert shape.model_type == preset.model_type
    assert num_parameters(classifier) == preset.parameters
    assert forward_flops(shape, preset.size) / 2e9 == pytest.approx(preset.gmacs, rel=0.01)


@pytest.mark.parametrize("size", [64, 384, 600])
def test_the_exported_processor_crops_as_evaluation_does(size: int, tmp_path: Path) -> None:
    """Half a pixel apart at most, by the rounding of the side and of the crop's place."""
    noise = np.random.default_rng(0).integers(0, 256, (6, 8, 3)).astype(np.uint8)
    image = Image.fromarray(noise).resize((1200, 900), Image.Resampling.BICUBIC)
    data = io.BytesIO()
    image.save(data, "PNG")
    write_processor(open_storage(str(tmp_path)), size, 0.875, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    found = AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="np")
    pixels = (
        centred(data.getvalue(), ImageDataConfig(size=size, eval_crop=0.875)).astype(np.float32)
        / 255
    )
    expected = (pixels - np.float32((0.5, 0.4, 0.3))) / np.float32((0.2, 0.3, 0.4))
    assert found["pixel_values"].shape == (1, 3, size, size)
    apart = np.abs(found["pixel_values"][0].transpose(1, 2, 0) - expected)
    assert apart.max() < 40 / size  # half a pixel of this image
