"""Read an image classifier's config.json: its layers, parameters, multiply-adds, kept activations.

ResNets and EfficientNets are laid out layer by layer as transformers builds them; any other family
is refused, because a guess could be wrong without notice. What a layer keeps for its backward pass
is counted from its operations, and tests compare it with what autograd keeps.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rayapp.planner.shape import UnknownShape

CLASSES = 1000  # ImageNet's, where a config.json names none
# Fields of an EfficientNet's config.json with a value for each stage, and transformers' defaults.
STAGES = {
    "in_channels": (32, 16, 24, 40, 80, 112, 192),
    "out_channels": (16, 24, 40, 80, 112, 192, 320),
    "strides": (1, 2, 2, 2, 1, 2, 1),
    "kernel_sizes": (3, 3, 5, 3, 5, 5, 3),
    "expand_ratios": (1, 6, 6, 6, 6, 6, 6),
    "num_block_repeats": (1, 2, 2, 3, 3, 4, 1),
}


@dataclass(frozen=True)
class Convolution:
    """A convolution with its batch-norm and activation; a linear layer is a 1 x 1 on one pixel."""

    inputs: int
    outputs: int
    kernel: int
    side: int
    """Side length of the output in pixels."""
    side_in: int
    """Side length of the input in pixels, explicit padding (a padded copy) included."""
    groups: int = 1
    """Above 1 in a depthwise convolution, in which each channel has its own kernel."""
    bias: bool = False
    norm: bool = True
    """Batch-norm follows the convolution."""
    activation: bool = True
    """An activation follows the convolution or its batch-norm."""

    @property
    def parameters(self) -> int:
        """Parameters of the kernel, the bias, and batch-norm's scale and shift."""
        kernel = self.outputs * self.inputs // self.groups * self.kernel**2
        return kernel + self.outputs * (self.bias + 2 * self.norm)

    @property
    def macs(self) -> int:
        """Multiply-adds of the forward pass, per image."""
        return self.outputs * self.inputs // self.groups * self.kernel**2 * self.side**2

    @property
    def read(self) -> int:
        """Elements of the input, per image."""
        return self.inputs * self.side_in**2

    @property
    def written(self) -> int:
        """Elements of the output, per image."""
        return self.outputs * self.side**2


@dataclass
class Kept:
    """Elements per image that are kept for the backward pass, by kind."""

    values: int = 0
    """Activations in the compute precision."""
    norms: int = 0
    """Kept by batch-norm: its inputs, or the normalised fp32 values if synchronized."""
    indices: int = 0
    """Max-pooling's indices, 8 bytes each."""
    masks: int = 0
    """Dropout's masks, 1 byte each."""


@dataclass
class Moved:
    """Elements per image that elementwise kernels read and write, without batch-norm's."""

    forward: int = 0
    backward: int = 0
    kernels: int = 0
    """Kernel launches of a forward pass, convolutions and batch-norms included."""


@dataclass(frozen=True)
class ImageShape:
    """An image classifier for one image size: convolutions, then a linear layer."""

    model_type: str
    size: int
    classes: int
    layers: tuple[Convolution, ...]
    kept: Kept = field(default_factory=Kept)
    moved: Moved = field(default_factory=Moved)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(layer.parameters for layer in self.layers)

    @cached_property
    def macs(self) -> int:
        """Multiply-adds of the forward pass, per image; each is 2 FLOPs."""
        return sum(layer.macs for layer in self.layers)

    @property
    def normed(self) -> tuple[Convolution, ...]:
        """The layers that have a batch-norm."""
        return tuple(layer for layer in self.layers if layer.norm)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest layer output, per image."""
        return max(layer.written for layer in self.layers)


def image_shape_of(config: Mapping[str, Any], size: int, same: bool = False) -> ImageShape:
    """Return the shape that a config.json describes, for images of `size` x `size` pixels.

    `same` pads EfficientNet's odd sides as its paper does; transformers drops a row instead.

    Raises:
        UnknownShape: the family is another, or the images are too small for it.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        near = difflib.get_close_matches(kind, FAMILIES, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Known are {', '.join(sorted(FAMILIES))}"
        raise UnknownShape(f"model_type={kind} is unknown: its layers are not known. {hint}")
    classes = int(config.get("num_labels") or len(config.get("id2label") or ()) or CLASSES)
    stack = _Stack(size)
    top = FAMILIES[kind](config, stack, same)
    if stack.side < 1:
        raise UnknownShape(f"images of {size} pixels are too small for this {kind}")
    stack.layers.append(Convolution(top, classes, 1, 1, 1, bias=True, norm=False, activation=False))
    stack.kept.values += top
    return ImageShape(kind, size, classes, tuple(stack.layers), stack.kept, stack.moved)


class _Stack:
    def __init__(self, size: int) -> None:
        self.side = size
        self.layers: list[Convolution] = []
        self.kept, self.moved = Kept(), Moved()

    def add(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        stride: int = 1,
        *,
        side_in: int | None = None,
        **more: Any,
    ) -> Convolution:
        """Append a layer; `side_in` is the side of an explicitly padded input."""
        before = self.side if side_in is None else side_in
        pad = kernel // 2 if side_in is None or stride == 1 else 0
        side = (before + 2 * pad - kernel) // stride + 1
        layer = Convolution(inputs, outputs, kernel, side, before, **more)
        self.layers.append(layer)
        self.side = side
        self.kept.norms += layer.written if layer.norm else 0
        self.moved.kernels += 1 + layer.norm + layer.activation
        if layer.activation:
            self.move(2 * layer.written, 3 * layer.written)
        return layer

    def move(self, forward: int, backward: int, kernels: int = 0) -> None:
        self.moved.forward += forward
        self.moved.backward += backward
        self.moved.kernels += kernels


def _resnet(config: Mapping[str, Any], stack: _Stack, same: bool) -> int:
    """Append a ResNet's layers; return the width of its last features. ReLU keeps its output."""
    depths = config.get("depths") or (3, 4, 6, 3)
    widths = config.get("hidden_sizes") or (256, 512, 1024, 2048)
    kind = config.get("layer_type") or "bottleneck"
    width = int(config.get("embedding_size") or 64)
    channels = int(config.get("num_channels") or 3)
    kept = stack.kept
    kept.values += channels * stack.side**2
    stem = stack.add(channels, width, 7, 2)
    kept.values += stem.written
    stack.side = (stack.side - 1) // 2 + 1  # 3 x 3 max-pooling, stride 2, padding 1
    pooled = width * stack.side**2
    kept.indices += pooled
    kept.values += pooled
    moved = stem.written + 5 * pooled  # indices count as four bf16 numbers
    stack.move(moved, moved)
    for stage, (outputs, depth) in enumerate(zip(widths, depths, strict=True)):
        for number in range(depth):
            down = 2 if number == 0 and (stage or config.get("downsample_in_first_stage")) else 1
            early = bool(config.get("downsample_in_bottleneck"))
            _residual(stack, kind, width, int(outputs), down, early)
            width = int(outputs)
    return width


def _residual(
    stack: _Stack, kind: str, inputs: int, outputs: int, stride: int, early: bool
) -> None:
    before = stack.side
    if inputs != outputs or stride != 1:
        stack.add(inputs, outputs, 1, stride, activation=False)
        stack.side = before
    if kind == "bottleneck":
        inner = outputs // 4
        first, second = (stride, 1) if early else (1, stride)
        stack.kept.values += stack.add(inputs, inner, 1, first).written
        stack.kept.values += stack.add(inner, inner, 3, second).written
        last = stack.add(inner, outputs, 1)
    else:
        stack.kept.values += stack.add(inputs, outputs, 3, stride).written
        last = stack.add(outputs, outputs, 3)
    stack.kept.values += last.written
    # The residual sum, in place; ReLU is counted in `add`.
    stack.move(3 * last.written, 3 * last.written, kernels=1)


def _efficientnet(config: Mapping[str, Any], stack: _Stack, same: bool) -> int:
    """Append an EfficientNet's layers; return the width of its features. SiLU keeps its input."""
    divisor = int(config.get("depth_divisor") or 8)
    wider = float(config.get("width_coefficient") or 2.0)
    deeper = float(config.get("depth_coefficient") or 3.1)
    top = int(config.get("hidden_dim") or 2560)
    channels = int(config.get("num_channels") or 3)

    def width(base: int) -> int:
        """Scale a width and round it to the divisor, but not down by more than 10 %."""
        scaled = base * wider
        rounded = max(divisor, int(scaled + divisor / 2) // divisor * divisor)
        return rounded + divisor if rounded < 0.9 * scaled else rounded

    side = stack.side + (1 if not same or stack.side % 2 == 0 else 2)
    stack.kept.values += channels * side**2
    stem = stack.add(channels, width(32), 3, 2, side_in=side)
    stack.kept.values += stem.written
    squeeze = float(config.get("squeeze_expansion_ratio") or 0.25)
    square = tuple(config.get("depthwise_padding") or ())
    number = 0
    stages = zip(*(config.get(name) or usual for name, usual in STAGES.items()), strict=True)
    for before, after, stride, kernel, expand, repeats in (map(int, stage) for stage in stages):
        inputs, outputs = width(before), width(after)
        for repeat in range(math.ceil(deeper * repeats)):
            shortcut = stride == 1 and repeat > 0
            drops = shortcut and number > 0 and float(config.get("drop_connect_rate", 0.2)) > 0
            extra = stack.side % 2 if same else int(number in square)
            narrow = max(1, int(inputs * squeeze))
            sizes = (inputs, inputs * expand, narrow, outputs)
            _mobile(stack, sizes, kernel, stride, shortcut, drops, extra)
            inputs, stride, number = outputs, 1, number + 1
    stack.kept.values += inputs * stack.side**2
    last = stack.add(inputs, top)
    stack.kept.values += 2 * last.written
    stack.move(last.written, last.written)
    return top


def _mobile(
    stack: _Stack,
    sizes: tuple[int, int, int, int],
    kernel: int,
    stride: int,
    shortcut: bool,
    drops: bool,
    extra: int,
) -> None:
    """Append a block: expansion, depthwise convolution, squeeze-and-excitation, projection.

    `sizes` are the channels of the input, inside, of the squeezed and of the output. `extra` pixels
    are padded beside those of an odd side.
    """
    kept = stack.kept
    inputs, inner, narrow, outputs = sizes
    if inner != inputs:
        kept.values += inputs * stack.side**2
        kept.values += stack.add(inputs, inner).written  # SiLU's input
    padded = stack.side
    if stride == 2:  # a zero-padded copy
        padded += 2 * (kernel // 2) - 1 + extra
        stack.move(2 * inner * padded**2, 2 * inner * padded**2, kernels=1)
    kept.values += inner * padded**2
    side_in = padded if stride == 2 else None
    depthwise = stack.add(inner, inner, kernel, stride, side_in=side_in, groups=inner)
    kept.values += 2 * depthwise.written  # SiLU's input; its output, which the gate multiplies
    side, stack.side = stack.side, 1
    stack.add(inner, narrow, bias=True, norm=False)
    stack.add(narrow, inner, bias=True, norm=False)
    kept.values += 2 * narrow + 3 * inner
    stack.side = side
    # Forward the mean reads, the gate reads and writes; backward there are the gradients of both
    # factors and of the mean, and their sum.
    stack.move(3 * depthwise.written, 10 * depthwise.written, kernels=4)
    kept.values += depthwise.written
    last = stack.add(inner, outputs, activation=False)
    if shortcut:
        moved = (3 + 3 * drops) * last.written
        stack.move(moved, moved, kernels=1 + drops)
        kept.masks += last.written if drops else 0


FAMILIES: dict[str, Callable[[Mapping[str, Any], _Stack, bool], int]] = {
    "resnet": _resnet,
    "efficientnet": _efficientnet,
}
