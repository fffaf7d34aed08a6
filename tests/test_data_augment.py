"""RandAugment's operations, written in numpy from their definitions: the same to the last bit."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from rayapp.data.images import augment

Pixels = NDArray[np.uint8]
SIDE = 37
SEEDS = {1.0: 4, -1.0: 0}  # of each direction


def pixels() -> Pixels:
    """Return an image with every level, edges and noise; no channel spans all of 0 to 255."""
    draw = np.random.default_rng(0)
    ramp = np.linspace(20, 230, SIDE * SIDE).reshape(SIDE, SIDE, 1) * [1.0, 0.9, 0.8]
    noisy = ramp + draw.integers(-12, 12, (SIDE, SIDE, 3))
    noisy[10:20, 5:15] = draw.integers(0, 200, (10, 10, 3))
    found: Pixels = np.clip(noisy, 3, 251).astype(np.uint8)
    return found


def blended(degenerate: Any, image: Pixels, factor: float) -> Pixels:
    """Blend as Pillow does: in fp32, clipped, cut off to whole numbers."""
    first, second = (np.asarray(each, np.float32) for each in (degenerate, image))
    mixed = np.clip(first + np.float32(factor) * (second - first), 0, 255)
    found: Pixels = mixed.astype(np.uint8)
    return found


def grey(image: Pixels) -> NDArray[np.int64]:
    """Return the luma of ITU-R 601-2."""
    red, green, blue = (image[..., n].astype(np.int64) for n in range(3))
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def smooth(image: Pixels) -> Pixels:
    """Return 5/13 of each pixel and 1/13 of each neighbour; the edges stay."""
    wide, found = image.astype(np.float64), image.copy()
    total = 4 * wide[1:-1, 1:-1]
    for down in range(3):
        for across in range(3):
            total = total + wide[down : SIDE - 2 + down, across : SIDE - 2 + across]
    found[1:-1, 1:-1] = np.floor(total / 13 + 0.5)
    return found


def by_table(image: Pixels, table_of: Any) -> Pixels:
    """Map each channel by a table that is made of its histogram."""
    tables = [table_of(np.bincount(image[..., n].ravel(), minlength=256)) for n in range(3)]
    channels = [np.asarray(table)[image[..., n]] for n, table in enumerate(tables)]
    found: Pixels = np.stack(channels, -1).astype(np.uint8)
    return found


def stretched(counts: NDArray[np.int64]) -> list[int]:
    low, high = np.flatnonzero(counts)[[0, -1]]
    scale = 255.0 / (high - low)
    return [min(255, max(0, int(level * scale - low * scale))) for level in range(256)]


def equalized(counts: NDArray[np.int64]) -> list[int]:
    step = int(counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
    return [min(255, (step // 2 + int(counts[:level].sum())) // step) for level in range(256)]


def moved(image: Pixels, matrix: tuple[float, ...]) -> Pixels:
    """Take each pixel from where the matrix says, at its centre, in 16 binary places."""
    a, b, c, d, e, f = matrix
    down, across = np.mgrid[:SIDE, :SIDE]

    def place(x: float, y: float, shift: float) -> NDArray[np.int64]:
        first, x_step, y_step = (
            math.floor(v * 65536.0 + 0.5) for v in (shift + x * 0.5 + y * 0.5, x, y)
        )
        at: NDArray[np.int64] = (first + x_step * across + y_step * down) >> 16
        return at

    columns, rows = place(a, b, c), place(d, e, f)
    inside = (columns >= 0) & (columns < SIDE) & (rows >= 0) & (rows < SIDE)
    taken = image[np.clip(rows, 0, SIDE - 1), np.clip(columns, 0, SIDE - 1)]
    found: Pixels = np.where(inside[..., None], taken, np.uint8(128))
    return found


def rotated(image: Pixels, degrees: float) -> Pixels:
    """Rotate counter-clockwise about the centre."""
    angle, half = -math.radians(degrees), SIDE / 2
    cos, sin = math.cos(angle), math.sin(angle)
    shifts = half - cos * half - sin * half, half + sin * half - cos * half
    return moved(image, (cos, sin, shifts[0], -sin, cos, shifts[1]))


def expected(name: str, image: Pixels, magnitude: int, sign: float) -> Pixels:
    """Return what the operation makes of an image, with torchvision's magnitudes."""
    share = magnitude / 30
    signed, factor = sign * share, 1.0 + sign * 0.9 * share
    shift = 150 / 331 * signed * SIDE
    made: dict[str, Any] = {
        "identity": lambda: image,
        "shear_x": lambda: moved(image, (1, 0.3 * signed, 0, 0, 1, 0)),
        "shear_y": lambda: moved(image, (1, 0, 0, 0.3 * signed, 1, 0)),
        "translate_x": lambda: moved(image, (1, 0, shift, 0, 1, 0)),
        "translate_y": lambda: moved(image, (1, 0, 0, 0, 1, shift)),
        "rotate": lambda: rotated(image, 30 * signed),
        "brightness": lambda: blended(np.zeros_like(image), image, factor),
        "color": lambda: blended(grey(image)[..., None], image, factor),
        "contrast": lambda: blended(int(grey(image).mean() + 0.5), image, factor),
        "sharpness": lambda: blended(smooth(image), image, factor),
        "posterize": lambda: image & np.uint8(256 - 2 ** round(share * 4)),
        "solarize": lambda: np.where(image * 30.0 >= 255 * (30 - magnitude), 255 - image, image),
        "autocontrast": lambda: by_table(image, stretched),
        "equalize": lambda: by_table(image, equalized),
    }
    found: Pixels = made[name]()
    return found


@pytest.mark.parametrize("name", augment.OPERATIONS)
def test_an_operation_is_its_definition_bit_for_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every magnitude, in both directions."""
    for sign, seed in SEEDS.items():
        draw = random.Random(seed)
        assert draw.random() >= 0  # which operation
        assert (draw.random() < 0.5) == (sign > 0)
    monkeypatch.setattr(augment, "OPERATIONS", (name,))
    image = pixels()
    for magnitude in range(31):
        for sign, seed in SEEDS.items():
            made = augment._operate(Image.fromarray(image), magnitude, random.Random(seed))
            wanted = expected(name, image, magnitude, sign)
            assert np.array_equal(np.asarray(made), wanted), (magnitude, sign)
