"""A set of images that rayapp draws itself: `data.path=shapes`, to try a run with no download.

    url = draw(storage / ".prepared")       # a folder per class; drawn once

Ten classes of shapes and textures in drawn colours, places and sizes, on grounds with noise;
several formats, modes and sizes, and a few files that are no images or damaged, as in the wild.
"""

from __future__ import annotations

import io
import math
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image, ImageDraw

from rayapp.storage import Storage

NAME = "shapes"
VERSION = 1
PER_CLASS = 300
WRITERS = 8
DONE = "README.txt"  # beside the folders of the classes, and written last
CLASSES: tuple[str, ...] = ("checks", "cross", "disc", "dots", "frame")
CLASSES += ("ring", "square", "star", "stripes", "triangle")
FORMATS = (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("BMP", "bmp"), ("GIF", "gif"))
Color = tuple[int, int, int]
Points = list[tuple[float, float]]


def draw(root: Storage) -> str:
    """Draw the data set below a folder, unless it exists; return its URL."""
    storage = root / f"{NAME}-{VERSION}"
    if not storage.exists(DONE):
        with ThreadPoolExecutor(WRITERS) as pool:
            for name in CLASSES:
                numbers = range(PER_CLASS)
                list(pool.map(lambda n, name=name: storage.write(*one(name, n)), numbers))
        for name, data in damaged():
            storage.write(name, data)
        storage.write(DONE, __doc__.encode())
    return storage.url


def one(name: str, number: int) -> tuple[str, bytes]:
    """Return the path and the bytes of one image: the same on every machine."""
    dice = random.Random(f"{name} {number}")
    image = picture(name, dice)
    kind, ending = FORMATS[dice.randrange(len(FORMATS))]
    mode = dice.choice(("RGB", "RGB", "RGB", "L", "P", "RGBA"))
    if kind == "JPEG" and mode in ("P", "RGBA"):
        mode = "RGB"
    image = image.convert(mode)
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 85} if kind in ("JPEG", "WEBP") else {}))
    return f"{name}/{number:04d}.{ending}", out.getvalue()


def damaged() -> list[tuple[str, bytes]]:
    """Return the unusable files that are placed among the images."""
    cut = []
    for number, name in enumerate(CLASSES[:4]):
        out = io.BytesIO()
        picture(name, random.Random(name)).save(out, "JPEG", quality=90)
        cut.append((f"{name}/cut-short.jpg", out.getvalue()[: 200 + 50 * number]))
    return [
        *cut,
        ("disc/notes.txt", b"What is in this folder is round.\n"),
        ("star/page.jpg", b"<html><body>404 Not Found</body></html>"),
    ]


def picture(name: str, dice: random.Random) -> Image.Image:
    """Draw a shape in a colour that contrasts with its background."""
    width, height = dice.randint(48, 96), dice.randint(48, 96)
    ground, front = _color(dice), _color(dice)
    while sum(abs(a - b) for a, b in zip(ground, front, strict=True)) < 200:
        front = _color(dice)
    image = Image.new("RGB", (width, height), ground)
    pencil = ImageDraw.Draw(image)
    radius = min(width, height) * dice.uniform(0.25, 0.4)
    x, y = (dice.uniform(radius, side - radius) for side in (width, height))
    if name in ("checks", "dots", "stripes"):
        _texture(pencil, name, front, image.size, dice)
    else:
        _shape(pencil, name, front, ground, (x, y, radius), dice.uniform(-0.5, 0.5))
    noise = np.random.default_rng(dice.randrange(2**32)).normal(0, 8, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def _color(dice: random.Random) -> Color:
    return dice.randrange(256), dice.randrange(256), dice.randrange(256)


def _shape(
    pencil: ImageDraw.ImageDraw,
    name: str,
    front: Color,
    ground: Color,
    place: tuple[float, float, float],
    turn: float,
) -> None:
    x, y, radius = place

    def corners(radii: list[float], start: float) -> Points:
        step = 2 * math.pi / len(radii)
        angles = [start + turn + step * i for i in range(len(radii))]
        pairs = zip(radii, angles, strict=True)
        return [(x + r * math.cos(a), y + r * math.sin(a)) for r, a in pairs]

    if name in ("disc", "ring"):
        pencil.circle((x, y), radius, fill=front)
        if name == "ring":
            pencil.circle((x, y), 0.55 * radius, fill=ground)
    elif name in ("square", "frame"):
        pencil.polygon(corners([radius] * 4, math.pi / 4), fill=front)
        if name == "frame":
            pencil.polygon(corners([0.55 * radius] * 4, math.pi / 4), fill=ground)
    elif name == "triangle":
        pencil.polygon(corners([radius] * 3, -math.pi / 2), fill=front)
    elif name == "star":
        pencil.polygon(corners([radius, 0.4 * radius] * 5, -math.pi / 2), fill=front)
    else:
        stroke = max(2, round(0.5 * radius))
        for angle in (turn, turn + math.pi / 2):
            across, down = radius * math.cos(angle), radius * math.sin(angle)
            pencil.line((x - across, y - down, x + across, y + down), fill=front, width=stroke)


def _texture(
    pencil: ImageDraw.ImageDraw, name: str, front: Color, size: tuple[int, int], dice: random.Random
) -> None:
    width, height = size
    step = dice.randint(10, 18)
    if name == "stripes":
        slope = dice.uniform(-0.6, 0.6)
        for start in range(-height, width + height, step):
            ends = (start, 0, start + slope * height, height)
            pencil.line(ends, fill=front, width=step // 2)
        return
    for row, top in enumerate(range(0, height, step)):
        for column, left in enumerate(range(0, width, step)):
            if name == "checks" and (row + column) % 2:
                pencil.rectangle((left, top, left + step - 1, top + step - 1), fill=front)
            elif name == "dots":
                pencil.ellipse((left, top, left + step // 2, top + step // 2), fill=front)
