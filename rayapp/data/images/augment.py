"""Decode and augment an image by a seed alone: the same in any order and in any process.

    pixels = augmented(data, look, seed)        # uint8 [size, size, 3]
    pixels = centred(data, look)                # a held-out image: the middle

`look` is the section `data` of the config: how images are cropped, augmented and mixed.

Random resized crop (Szegedy et al. 2014, as torchvision draws it), mirroring, RandAugment (Cubuk et
al. 2019, arXiv 1909.13719, with torchvision's 14 operations and strengths, but shifts are not cut
to whole pixels and the fill is grey); mixup (Zhang et al.
2017, arXiv 1710.09412) and CutMix (Yun et al. 2019, arXiv 1905.04899) between pairs of a
micro-batch. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where the crop needs no more.
"""

from __future__ import annotations

import io
import math
import random
import struct
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageEnhance, ImageOps, UnidentifiedImageError

from rayapp.config.vision import ImageDataConfig

CROP_TRIES = 10
ASPECT = (3 / 4, 4 / 3)
BINS = 30  # RandAugment's number of magnitudes
GREY = (128, 128, 128)  # fill colour of geometric operations
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "JPEG2000", "AVIF")
MAX_PIXELS = 2**26  # of an image, which takes up to 0.8 GiB to decode
TOO_LARGE = f"of more than {MAX_PIXELS:,} pixels"
TURNS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90"
TURN_OF = {n: Image.Transpose[turn] for n, turn in enumerate(TURNS.split(), 2)}  # by EXIF
# What 280,000 mutated files of FORMATS raised, and what Pillow's ImageFile takes for broken data.
BROKEN = (
    *(OSError, SyntaxError, ValueError, RuntimeError, struct.error),
    *(LookupError, TypeError, EOFError, OverflowError),
)
Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Box = tuple[float, float, float, float]


def seed_of(seed: int, epoch: int, image: int) -> int:
    """Return the 64-bit seed of all random choices for an image in an epoch.

    >>> seed_of(0, 0, 1) != seed_of(0, 1, 1) != seed_of(1, 1, 1)
    True
    """
    text = f"augment {seed} {epoch} {image}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


class Unusable(ValueError):
    """An image that can be read and not trained on; the message is the reason."""


def problem_of(data: bytes) -> str | None:
    """Read a whole file as an image; return why it is unusable, or None if it is usable."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                return TOO_LARGE
            image.draft("RGB", (1, 1))  # a JPEG is read completely, but decoded small
            _rgb(image)
    except UnidentifiedImageError:
        return "not an image"
    except Image.DecompressionBombError:
        return TOO_LARGE
    except Unusable as error:
        return str(error)
    except BROKEN as error:
        return f"damaged ({type(error).__name__})"
    return None


def augmented(data: bytes, look: ImageDataConfig, seed: int, as_stored: bool = False) -> Pixels:
    """Return an image as training sees it, cropped and augmented: uint8 [size, size, 3]."""
    draw = random.Random(seed)
    crop = partial(_crop, scale=look.crop_scale, draw=draw)
    image = _resized(data, crop, look.size, as_stored)
    if draw.random() < look.flip:
        image = ImageOps.mirror(image)
    if look.randaugment is not None:
        for _ in range(look.randaugment.layers):
            image = _operate(image, look.randaugment.magnitude, draw)
    return np.asarray(image)


def centred(data: bytes, look: ImageDataConfig, as_stored: bool = False) -> Pixels:
    """Return an image as evaluation sees it, its centre crop: uint8 [size, size, 3]."""
    middle = partial(_middle, share=look.eval_crop)
    return np.asarray(_resized(data, middle, look.size, as_stored))


def mix(
    images: Pixels, labels: Any, seeds: Any, present: Any, look: ImageDataConfig
) -> tuple[Any, Any]:
    """Mix images j and b - 1 - j of a micro-batch in place; return (other labels, own shares).

    Shapes: images [b, S, S, 3], labels, seeds, present [b] -> int32 [b], float32 [b].
    """
    count = len(labels)
    others, shares = labels.astype(np.int32), np.ones(count, np.float32)
    for j in range(count // 2 if look.mixup or look.cutmix else 0):
        k = count - 1 - j
        if not (present[j] and present[k]):
            continue
        draw = random.Random(int(seeds[j]) ^ int(seeds[k]))
        cuts = bool(look.cutmix) and (not look.mixup or draw.random() < 0.5)
        alpha = look.cutmix if cuts else look.mixup
        share = draw.betavariate(alpha, alpha)
        first, second = images[j].copy(), images[k].copy()
        if cuts:
            rows, columns, share = _patch(images.shape[1], share, draw)
            images[j, rows, columns] = second[rows, columns]
            images[k, rows, columns] = first[rows, columns]
        else:
            images[j] = _blend(first, second, share)
            images[k] = _blend(second, first, share)
        others[j], others[k] = labels[k], labels[j]
        shares[j] = shares[k] = share
    return others, shares


def _blend(first: Pixels, second: Pixels, share: float) -> Pixels:
    mixed = first.astype(np.float32) * share + second.astype(np.float32) * (1.0 - share)
    return np.rint(mixed).astype(np.uint8)


def _patch(size: int, share: float, draw: random.Random) -> tuple[slice, slice, float]:
    """Return the (rows, columns) to replace, and the share of the image that is left."""
    side = math.sqrt(1.0 - share) * size
    rows, columns = (
        slice(round(max(0.0, middle - side / 2)), round(min(size, middle + side / 2)))
        for middle in (draw.random() * size, draw.random() * size)
    )
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return rows, columns, 1.0 - area / size**2


def _crop(size: tuple[int, int], scale: tuple[float, float], draw: random.Random) -> Box:
    """Draw a crop by area and aspect ratio; after CROP_TRIES the largest crop in the middle."""
    width, height = size
    if scale[0] >= 1:
        return _middle(size, 1.0)
    low, high = map(math.log, ASPECT)
    for _ in range(CROP_TRIES):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * draw.random())
        aspect = math.exp(low + (high - low) * draw.random())
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = (int(draw.random() * (room + 1)) for room in (width - w, height - h))
            return left, top, left + w, top + h
    w, h = min(width, round(height * ASPECT[1])), min(height, round(width / ASPECT[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _middle(size: tuple[int, int], share: float) -> Box:
    """Return the centre square whose side is `share` of the shorter side."""
    side = min(size) * share
    left, top = (size[0] - side) / 2, (size[1] - side) / 2
    return left, top, left + side, top + side


def _resized(
    data: bytes, crop: Callable[[tuple[int, int]], Box], side: int, as_stored: bool
) -> Image.Image:
    """Return the box that `crop` chooses by the image's size, as side x side pixels of RGB.

    `as_stored` decodes as before version 3 of the index: by Pillow's conversion alone.
    """
    with Image.open(io.BytesIO(data), formats=None if as_stored else FORMATS) as image:
        if image.format not in ("JPEG", "MPO"):  # Pillow turns a TIFF as it loads it
            image.load()
        turned = not as_stored and image.getexif().get(ExifTags.Base.Orientation) in range(5, 9)
        width, height = size = image.size[::-1] if turned else image.size
        box = crop(size)
        across, down = side / (box[2] - box[0]), side / (box[3] - box[1])
        if max(across, down) < 1:  # a JPEG is decoded at 1/2, 1/4 or 1/8
            least = math.ceil(width * across), math.ceil(height * down)
            image.draft("RGB", least[::-1] if turned else least)
        rgb = image.convert("RGB") if as_stored else _rgb(image)
    x, y = rgb.width / width, rgb.height / height
    part = (box[0] * x, box[1] * y, min(box[2] * x, rgb.width), min(box[3] * y, rgb.height))
    return rgb.resize((side, side), Image.Resampling.BILINEAR, box=part)


def _rgb(image: Image.Image) -> Image.Image:
    """Decode an image to upright 8-bit RGB, as datasets turns it and transformers converts it.

    Transparency is put on white. Both libraries cut 16 bits and floats off at 255: here 16 bits
    are scaled, as Pillow scales those of RGB, and so are floats from 0 to 1.

    Raises:
        Unusable: nothing says what its numbers mean.
    """
    image.load()
    if (turn := TURN_OF.get(image.getexif().get(ExifTags.Base.Orientation, 1))) is not None:
        image = image.transpose(turn)  # not exif_transpose, which fails where it cannot write a tag
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM"):
        values = np.asarray(image)
        levels = (values >> 8).astype(np.uint8)
        levels[values == image.info.get("transparency", -1)] = 255
        image = Image.fromarray(levels)
    elif image.mode == "I":
        raise Unusable("of 32-bit integers, whose range is unknown: save 8 or 16 bits")
    elif image.mode == "F":
        values = np.asarray(image)
        if not (values.min() >= 0 and values.max() <= 1):  # NaN neither
            raise Unusable("of floats outside 0 to 1: save 8 or 16 bits")
        image = Image.fromarray(np.rint(255 * values).astype(np.uint8))
    if image.has_transparency_data:
        seen = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.new("RGB", image.size, "white")
        image.paste(seen, mask=seen)  # as alpha_composite does, with half of its memory
    return image if image.mode == "RGB" else image.convert("RGB")


# ---- RandAugment -------------------------------------------------------------------------------

SHIFT = 150 / 331  # of the width, at most


def _moved(image: Image.Image, *matrix: float) -> Image.Image:
    """Take each pixel (x, y) from (a x + b y + c, d x + e y + f); `matrix` is a to f."""
    kind, nearest = Image.Transform.AFFINE, Image.Resampling.NEAREST
    return image.transform(image.size, kind, matrix, nearest, fillcolor=GREY)


def _enhanced(kind: Any, image: Image.Image, strength: float) -> Image.Image:
    enhanced: Image.Image = kind(image).enhance(1.0 + 0.9 * strength)
    return enhanced


def _solarized(image: Image.Image, strength: float) -> Image.Image:
    return ImageOps.solarize(image, 255 - 255 * round(abs(strength) * BINS) // BINS)


# By a signed strength, -1 to 1: shears by up to 0.3, shifts by SHIFT, turns by 30 degrees.
OPERATIONS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, by: image,
    "shear_x": lambda image, by: _moved(image, 1, 0.3 * by, 0, 0, 1, 0),
    "shear_y": lambda image, by: _moved(image, 1, 0, 0, 0.3 * by, 1, 0),
    "translate_x": lambda image, by: _moved(image, 1, 0, SHIFT * by * image.width, 0, 1, 0),
    "translate_y": lambda image, by: _moved(image, 1, 0, 0, 0, 1, SHIFT * by * image.width),
    "rotate": lambda image, by: image.rotate(30.0 * by, fillcolor=GREY),
    "brightness": partial(_enhanced, ImageEnhance.Brightness),
    "color": partial(_enhanced, ImageEnhance.Color),
    "contrast": partial(_enhanced, ImageEnhance.Contrast),
    "sharpness": partial(_enhanced, ImageEnhance.Sharpness),
    "posterize": lambda image, by: ImageOps.posterize(image, 8 - round(4 * abs(by))),
    "solarize": _solarized,
    "autocontrast": lambda image, by: ImageOps.autocontrast(image),
    "equalize": lambda image, by: ImageOps.equalize(image),
}


def _operate(image: Image.Image, magnitude: int, draw: random.Random) -> Image.Image:
    """Apply one operation, drawn uniformly; directions are drawn too."""
    operation = [*OPERATIONS.values()][int(draw.random() * len(OPERATIONS))]
    sign = 1.0 if draw.random() < 0.5 else -1.0
    return operation(image, sign * magnitude / BINS)
