"""Decoding as datasets and transformers do; RandAugment's operations by their definitions."""

from __future__ import annotations

import io
import math
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from rayapp.config.vision import ImageDataConfig
from rayapp.data.images import augment

Pixels = NDArray[np.uint8]
SIDE = 37
SEEDS = {1.0: 4, -1.0: 0}  # of each direction


# ---- Decoding ----------------------------------------------------------------------------------


def noise(mode: str, size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    """Return noise in every channel: colours differ below each alpha, and 0 and 255 are there."""
    draw = np.random.default_rng(1).integers(0, 256, (*size[::-1], 4), np.uint8)
    draw[: size[1] // 3, :, 3], draw[size[1] // 2 :, :, 3] = 0, 255
    if mode == "PA":
        return Image.fromarray(draw).convert("P").convert("PA")
    image = Image.fromarray(draw, "RGBA")
    return image.convert("RGB").convert(mode) if mode in ("HSV", "P") else image.convert(mode)


def encoded(image: Image.Image, kind: str, orientation: int = 1, **more: Any) -> bytes:
    out = io.BytesIO()
    if orientation > 1:
        more["exif"] = Image.Exif()
        more["exif"][ExifTags.Base.Orientation] = orientation
    image.save(out, kind, **more)
    return out.getvalue()


def whole(data: bytes, **more: Any) -> Pixels:
    """Return a square image as evaluation decodes it, neither cut nor scaled."""
    assert augment.problem_of(data) is None
    return augment.centred(data, ImageDataConfig(size=SIDE, eval_crop=1.0), **more)


def by_datasets(data: bytes) -> Pixels:
    """Return an image as datasets decodes and transformers converts it."""
    image = datasets.Image().decode_example({"path": None, "bytes": data})
    found: Pixels = convert_to_rgb(image, return_numpy=True)
    return found


KEYED = bytes(range(255, -1, -1))  # a palette's alphas
MODES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"{mode} PNG": (mode, "PNG", {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")},
    **{f"{mode} TIFF": (mode, "TIFF", {}) for mode in ("1", "L", "LA", "P", "PA", "RGB", "RGBA")},
    **{f"{mode} TIFF": (mode, "TIFF", {}) for mode in ("CMYK", "YCbCr", "LAB")},
    **{f"{mode} JPEG": (mode, "JPEG", {}) for mode in ("L", "RGB", "CMYK", "YCbCr")},
    **{f"{mode} WEBP": (mode, "WEBP", {}) for mode in ("HSV", "RGB", "RGBA")},
    **{f"{mode} GIF": (mode, "GIF", {}) for mode in ("1", "L", "P", "RGBA")},
    **{f"{mode} BMP": (mode, "BMP", {}) for mode in ("1", "L", "P", "RGB", "RGBA")},
    "one colour of P": ("P", "PNG", {"transparency": 7}),
    "alphas of P": ("P", "PNG", {"transparency": KEYED}),
    "one level of L": ("L", "PNG", {"transparency": 40}),
    "one colour of RGB": ("RGB", "PNG", {"transparency": (1, 2, 3)}),
    "one colour of a GIF": ("P", "GIF", {"transparency": 7}),
}


@pytest.mark.parametrize("case", MODES)
def test_a_mode_is_decoded_as_datasets_and_transformers_do(case: str) -> None:
    mode, kind, more = MODES[case]
    image = noise(mode)
    if case == "one colour of RGB":
        image.putpixel((0, 0), (1, 2, 3))
    data = encoded(image, kind, **more)
    assert np.array_equal(whole(data), by_datasets(data))


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_an_image_is_turned_as_its_exif_says(kind: str, orientation: int) -> None:
    """Whole; and crops of an oblong one, a JPEG at a fraction of its size too."""
    data = encoded(noise("RGB"), kind, orientation)
    assert np.array_equal(whole(data), by_datasets(data))
    ramp = np.linspace(0, 255, 480 * 300).reshape(300, 480, 1) * [1.0, 0.5, 0.2]
    data = encoded(Image.fromarray(ramp.astype(np.uint8)), kind, orientation)
    upright = encoded(Image.fromarray(by_datasets(data)), "PNG")
    look = ImageDataConfig(size=24, crop_scale=(0.2, 0.6))
    for seed in range(4):
        found = augment.augmented(data, look, seed).astype(int)
        apart = np.abs(found - augment.augmented(upright, look, seed))
        assert apart.max() <= (8 if kind == "JPEG" else 0)
    assert (
        np.abs(augment.centred(data, look).astype(int) - augment.centred(upright, look)).max() < 8
    )


def test_exif_with_a_tag_that_cannot_be_written_again_still_turns() -> None:
    """ImageOps.exif_transpose writes all tags anew, and fails."""
    data = encoded(noise("RGB"), "PNG", 6)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    exif[ExifTags.Base.XResolution] = 1.0
    block = bytearray(exif.tobytes())
    at = block.index(struct.pack(">HH", ExifTags.Base.XResolution, 5))
    block[at + 2 : at + 4] = struct.pack(">H", 2)  # text, where a ratio must be
    spoilt = encoded(noise("RGB"), "PNG", exif=bytes(block))
    with pytest.raises(TypeError), Image.open(io.BytesIO(spoilt)) as image:
        ImageOps.exif_transpose(image)
    assert np.array_equal(whole(spoilt), whole(data))


def test_colours_that_nothing_shows_make_no_difference() -> None:
    for mode, kind in (("RGBA", "PNG"), ("RGBA", "WEBP"), ("LA", "PNG"), ("RGBA", "TIFF")):
        seen = np.asarray(noise(mode)).copy()
        other = seen.copy()
        other[seen[..., -1] == 0] ^= np.uint8(255)
        other[..., -1] = seen[..., -1]
        exact = {"lossless": True, "exact": True} if kind == "WEBP" else {}
        first, second = (encoded(Image.fromarray(v), kind, **exact) for v in (seen, other))
        assert first != second and np.array_equal(whole(first), whole(second)), (mode, kind)


RAMP = np.linspace(0, 65535, SIDE * SIDE).astype(np.uint16).reshape(SIDE, SIDE)
WIDE: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: encoded(Image.fromarray(RAMP), "PNG"),
    "TIFF": lambda: encoded(Image.fromarray(RAMP), "TIFF"),
    "TIFF, big-endian": lambda: encoded(Image.fromarray(RAMP.astype(">u2")), "TIFF"),
    "JPEG 2000": lambda: encoded(Image.fromarray(RAMP), "JPEG2000"),
    "PGM": lambda: encoded(Image.fromarray(RAMP), "PPM"),
    "floats": lambda: encoded(Image.fromarray(RAMP.astype(np.float32) / 65535), "TIFF"),
}


@pytest.mark.parametrize("case", WIDE)
def test_16_bits_and_floats_are_scaled_by_their_range(case: str) -> None:
    found, expected = whole(WIDE[case]()), RAMP / 65535 * 255
    assert np.abs(found - expected[..., None]).max() <= 1
    assert found.min() == 0 and found.max() == 255


def test_a_level_of_16_bits_may_be_transparent() -> None:
    found = whole(encoded(Image.fromarray(RAMP), "PNG", transparency=int(RAMP[3, 4])))
    assert (found[3, 4] == 255).all() and (found[3, 5] == RAMP[3, 5] >> 8).all()


def too_large(mode: str = "1") -> bytes:
    """Return a PNG whose header says 13,377 x 13,377 pixels."""
    data = bytearray(encoded(noise(mode), "PNG"))
    data[16:24] = struct.pack(">II", 13_377, 13_377)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


UNUSABLE: dict[str, tuple[Callable[[], bytes], str]] = {
    "32 bits": (lambda: encoded(Image.fromarray(RAMP.astype(np.int32)), "TIFF"), "of 32-bit int"),
    "8 bits in floats": (lambda: encoded(noise("L").convert("F"), "TIFF"), "of floats outside 0 "),
    "NaN": (lambda: encoded(Image.new("F", (4, 4), math.nan), "TIFF"), "of floats outside 0 to 1"),
    "too large": (too_large, "of more than 67,108,864 pixels"),
    "EPS": (lambda: encoded(noise("RGB"), "EPS"), "not an image"),
    "no image": (lambda: b"text", "not an image"),
    "cut short": (lambda: encoded(noise("RGB"), "PNG")[:900], "damaged (OSError)"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_what_cannot_be_decoded_rightly_is_refused_by_name(case: str) -> None:
    make, reason = UNUSABLE[case]
    assert (augment.problem_of(make()) or "").startswith(reason)


def test_full_memory_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(image: Any) -> None:
        raise MemoryError

    data = encoded(noise("RGB"), "BMP")
    monkeypatch.setattr(Image.Image, "load", full)
    with pytest.raises(MemoryError):
        augment.problem_of(data)


@pytest.mark.filterwarnings("ignore")  # Pillow's, of each tag that is cut short
def test_mutated_files_raise_nothing_else() -> None:
    """Files of every format, cut, flipped and shifted at places drawn from a seed."""
    draw = random.Random(3)
    kinds = [(noise("RGB"), kind) for kind in augment.FORMATS if kind != "PPM"]
    files = [encoded(*each, orientation=6 if each[1] in "JPEG TIFF" else 1) for each in kinds]
    for _ in range(1500):
        data = bytearray(draw.choice(files))
        at = draw.randrange(min(len(data), draw.choice((64, 10**6))))
        end = at + draw.randrange(9)
        data[at:end] = draw.choice((b"", b"\xff\xff\xff\xff", b"\0\0", draw.randbytes(3)))
        augment.problem_of(bytes(data[: draw.choice((len(data), at + 9))]))


def test_an_index_of_version_2_is_decoded_as_it_was() -> None:
    for data in (WIDE["PNG"](), encoded(noise("RGB"), "JPEG", 6), encoded(noise("RGBA"), "PNG")):
        plain = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        assert np.array_equal(whole(data, as_stored=True), plain)
        assert not np.array_equal(whole(data), plain)


# ---- RandAugment -------------------------------------------------------------------------------


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
    monkeypatch.setattr(augment, "OPERATIONS", {name: augment.OPERATIONS[name]})
    image = pixels()
    for magnitude in range(31):
        for sign, seed in SEEDS.items():
            made = augment._operate(Image.fromarray(image), magnitude, random.Random(seed))
            wanted = expected(name, image, magnitude, sign)
            assert np.array_equal(np.asarray(made), wanted), (magnitude, sign)
