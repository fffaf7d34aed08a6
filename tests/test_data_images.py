"""Images: what is found, indexed, read, and how it is augmented, against independent ways."""

from __future__ import annotations

import collections
import io
import math
import random
import re
import shutil
import tarfile
import threading
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import as_folder, as_parquet, as_tars, drawn, indexed
from PIL import Image

from rayapp.config.vision import ImageDataConfig, RandAugment
from rayapp.data import stream as streams
from rayapp.data.images import augment, batches, drawn_shapes, image_sources, index, indexing
from rayapp.data.images.batches import held_out_batches, image_digest, local_steps, step_images
from rayapp.data.images.image_sources import find
from rayapp.data.images.index import Images
from rayapp.data.images.indexing import prepare
from rayapp.data.sources import DataFile, SourceError
from rayapp.order import EMPTY, Order, combine
from rayapp.storage import StorageError, open_storage

ONE = RandAugment(layers=1)
LOOK = ImageDataConfig(size=24, crop_scale=(0.3, 1.0), randaugment=ONE, mixup=0.4, cutmix=0.4)


def found_in(path: Path) -> list[image_sources.FoundImage]:
    source = find(str(path))
    return list(image_sources.read(source, source.files))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def images(folder: Path) -> Images:
    path = as_folder(folder / "tree", drawn(3, 8))
    return indexed(path, open_storage(str(folder / "prepared")))


# ---- Finding and indexing ----------------------------------------------------------------------


def contents(images: Images, split: str = "train") -> list[tuple[str, bytes]]:
    """Return (class, bytes) of all images, in the index's order."""
    rows = images.rows(split)
    data = rows.read(range(len(rows)))
    return [(images.classes[r["label"]], one) for r, one in zip(rows.records, data, strict=True)]


@pytest.mark.parametrize("layout", ["folder", "tar", "parquet"])
@pytest.mark.parametrize("where", ["here", "s3"])
def test_every_layout_gives_the_same_images(
    layout: str, where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    wanted = drawn(3, 7)
    write = {
        "folder": as_folder,
        "tar": partial(as_tars, per_shard=8),
        "parquet": partial(as_parquet, per_file=11),
    }[layout]
    root = write(tmp_path / "data", wanted)
    url = str(root)
    if where == "s3":
        url = f"s3://{request.getfixturevalue('s3_bucket')}/data"
        for path in filter(Path.is_file, root.rglob("*")):
            open_storage(url).write(str(path.relative_to(root)), path.read_bytes())
    assert find(url).format == layout
    found = indexed(url, open_storage(str(tmp_path / "prepared")))
    assert contents(found) == [(name.partition("/")[0], data) for name, data in wanted]
    assert found.classes == drawn_shapes.CLASSES[:3] and found.class_counts == (7, 7, 7)
    assert found.counts == {"train": 21, "eval": 0} and not found.bad and found.records == 21
    assert found.num_bytes == sum(len(data) for _, data in wanted)


def test_labels_of_tars_without_sidecars(tmp_path: Path) -> None:
    """The folder in the tar, else the tar's own name, as ImageNet's training data come."""
    (_, picture), *_ = drawn(1, 1)
    for tar, member in (("n01440764.tar", "n01440764_1.jpg"), ("rest.tar", "./cat/x.jpg")):
        with tarfile.open(tmp_path / tar, "w") as archive:
            info = tarfile.TarInfo(member)
            info.size = len(picture)
            archive.addfile(info, io.BytesIO(picture))
    found = indexed(tmp_path, open_storage(str(tmp_path / "prepared")))
    assert found.classes == ("cat", "n01440764")


def test_what_cannot_be_trained_on_is_counted_and_named(tmp_path: Path) -> None:
    good = drawn(10, 2)
    path = as_folder(tmp_path / "data", [*good, *drawn_shapes.damaged()])
    (path / "README.txt").write_text("not in a class's folder")
    found = indexed(path, open_storage(str(tmp_path / "prepared")))
    assert contents(found) == sorted(
        (name.partition("/")[0], data) for name, data in good
    ) or sorted(contents(found)) == sorted((n.partition("/")[0], d) for n, d in good)
    assert found.bad == {"damaged (OSError)": 4, "not an image": 2}
    assert found.records == 26 and found.bad_share == pytest.approx(6 / 26)
    assert ("checks/cut-short.jpg", "damaged (OSError)") in found.examples


def test_what_is_held_out_is_known_by_its_name(tmp_path: Path) -> None:
    path = as_folder(tmp_path / "data", drawn(4, 20))
    some = indexed(path, open_storage(str(tmp_path / "prepared")), 0.25)
    more = indexed(path, open_storage(str(tmp_path / "prepared")), 0.5)
    assert sum(some.counts.values()) == 80 and 8 <= some.counts["eval"] <= 35
    held = [data for _, data in contents(some, "eval")]
    assert not set(held) & {data for _, data in contents(some)}
    assert set(held) < {data for _, data in contents(more, "eval")}
    other = as_folder(tmp_path / "other", drawn(2, 3))
    given = indexed(path, open_storage(str(tmp_path / "prepared")), eval_path=other)
    assert given.counts == {"train": 80, "eval": 6} and len(contents(given, "eval")) == 6


def wide(size: int) -> bytes:
    """Return a number as GNU's tar writes one that octal digits cannot hold."""
    return (size % 2**96 | (0 if size < 0 else 2**95)).to_bytes(12, "big")


def header(name: str, size: int, kind: bytes = b"0", **sparse: int) -> bytes:
    """Return the header of a tar's member, with any size and checksum."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    block[156:157], block[124:136] = kind, wide(size)
    if sparse:  # one part of 512 bytes, of so many in all
        block[386:410] = b"%011o\0" % 0 + b"%011o\0" % 512
        block[483:495] = wide(sparse["whole"])
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


GIB, LOST = 2**30, "at byte 1,024 says that it ends at byte"
SPOILT: dict[str, tuple[bytes, str]] = {
    "8 GiB": (header("cat/b.png", 8 * GIB), f"cat/b.png {LOST} 8,589,936,128, and the file has"),
    "2^62": (header("cat/b.png", 2**62), f"cat/b.png {LOST} 4,611,686,018,427,389,440"),
    "below 0": (header("cat/b.png", -1024), f"cat/b.png {LOST} 512"),
    "the same again": (header("cat/b.png", -512), f"cat/b.png {LOST} 1,024"),
    "an unknown kind": (header("x", -512, b"Z"), f"x {LOST} 1,024"),
    "a sparse file": (header("cat/b.png", 2**62, b"S", whole=512), f"cat/b.png {LOST} 4,611"),
    "a long name": (header("x", 8 * GIB, b"L"), "the header at byte 1,024 is of 8,589,934,592 "),
    "a name below 0": (header("x", -512, b"L"), "the header at byte 1,024 is of -512 bytes"),
    "an extended header": (header("x", 2**62, b"x"), "the header at byte 1,024 is of 4,611"),
    "a flipped bit": (header("cat/b.png", 0).replace(b"b.png", b"b.pnf"), "1,024 is damaged"),
    "cut short": (header("cat/b.png", 4000) + b"x" * 700, f"cat/b.png {LOST} 5,536"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_damaged_tar_is_told_with_its_place(case: str, tmp_path: Path) -> None:
    spoilt, words = SPOILT[case]
    first = header("cat/a.png", 4) + b"abcd".ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(first + spoilt + bytes(1024))
    with pytest.raises(SourceError, match=rf"/a\.tar is not a tar .*: .*{re.escape(words)}"):
        found_in(tmp_path)


def test_what_memory_cannot_hold_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members that are sparse, or too large; and a file too large in a class's folder."""
    (name, picture), *_ = drawn(1, 1)
    monkeypatch.setattr(image_sources, "MAX_BYTES", len(picture))
    many = header("cat/large.png", len(picture) + 1) + bytes(-(-len(picture) // 512) * 512)
    sparse = header("cat/sparse.png", 512, b"S", whole=2 * GIB) + b"x" * 512
    good = header("cat/good.png", len(picture)) + picture.ljust(len(many) - 512, b"\0")
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars" / "a.tar").write_bytes(many + sparse + good + bytes(1024))
    path = as_folder(tmp_path / "tree", [(name, picture), ("cat/large.png", picture + b"x")])
    for root, bad in ((tmp_path / "tars", {"stored as a sparse file": 1}), (path, {})):
        found = indexed(root, open_storage(str(tmp_path / "prepared")))
        assert found.bad == bad | {image_sources.TOO_LARGE: 1}
        assert [data for _, data in contents(found)] == [picture]


def test_a_full_memory_ends_the_index_with_the_images_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(data: bytes) -> None:
        raise MemoryError

    path = as_folder(tmp_path / "data", drawn(1, 1))
    monkeypatch.setattr(augment, "problem_of", full)
    with pytest.raises(
        SourceError, match=r"checks/0000\.\w+ cannot be decoded: this machine's mem"
    ):
        indexed(path, open_storage(str(tmp_path / "prepared")))


def test_what_says_that_there_is_no_label_is_no_class(tmp_path: Path) -> None:
    """-1 as ClassLabel has it, null and NaN: in Parquet, and beside the images of a tar."""
    (_, picture), *_ = drawn(1, 1)
    labels = {
        "int": [0, -1, 1, None],
        "float": [0.0, math.nan, 1.0, -1.0],
        "text": ["0", "-1", "1", None],
    }
    for kind, column in labels.items():
        (tmp_path / kind).mkdir()
        table = pa.table({"image": [{"bytes": picture}] * 4, "label": column})
        pq.write_table(table, tmp_path / kind / "a.parquet")
    (tmp_path / "tar").mkdir()
    with tarfile.open(tmp_path / "tar" / "a.tar", "w") as archive:
        for ending in ("cls", "json"):
            for n, label in enumerate(["0", "-1", "1", "null"]):
                text = {"cls": label.replace("null", "-1"), "json": f'{{"label": {label}}}'}[ending]
                for name, data in (("png", picture), (ending, text.encode())):
                    info = tarfile.TarInfo(f"cat/{n}-{ending}.{name}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    for kind in (*labels, "tar"):
        found = indexed(tmp_path / kind, open_storage(str(tmp_path / "prepared")))
        assert found.classes == (("0.0", "1.0") if kind == "float" else ("0", "1")), kind
        assert found.bad == {"without a label": 4 if kind == "tar" else 2}, kind
        assert [r["label"] for r in found.rows("train").records] == [0, 1] * (1 + (kind == "tar"))


def test_one_name_in_two_spellings_is_one_class(tmp_path: Path) -> None:
    """Composed, as Linux has it, and decomposed, as macOS writes it; and 1 beside 01 is stable."""
    (_, picture), *_ = drawn(1, 1)
    names = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    path = as_folder(
        tmp_path / "data", [(f"{name}/{n}.png", picture) for n, name in enumerate(names)]
    )
    found = indexed(path, open_storage(str(tmp_path / "prepared")))
    assert names[0] != names[1] and found.classes == (names[0],) and found.class_counts == (2,)
    assert indexing.class_names({"1", "01", "2"}) == ["01", "1", "2"]


def test_damaged_parquet_is_told_by_its_name(tmp_path: Path) -> None:
    path = as_parquet(tmp_path / "data", drawn(2, 9), 18)
    (file,) = path.iterdir()
    good, draw = file.read_bytes(), random.Random(0)
    told = 0
    for _ in range(30):
        data = bytearray(good)
        for at in draw.sample(range(len(data)), 20):
            data[at] ^= 255
        file.write_bytes(data[: draw.choice((len(data), len(data) // 2))])
        try:
            found_in(path)
        except SourceError as error:
            told += 1
            assert f"/{file.name} is not Parquet that can be read: " in str(error)
    assert told > 15


def test_files_that_end_every_process_are_named(tmp_path: Path) -> None:
    root = as_folder(tmp_path, drawn(2, 1))
    recipe = index.ImageRecipe(find(str(root)), None, 0.0)
    (task,) = indexing.tasks_of(recipe)
    assert task.place(recipe) == f"{recipe.source.files[0].name} (and 1 more files)"


def test_the_fingerprint_tells_how_images_are_decoded() -> None:
    """The one of version 2 is commit 019c8f5's, whose runs go on with it."""
    source = image_sources.ImageSource("s3://b/d", "folder", (DataFile("cat/1.png", 7, ""),))
    assert index.ImageRecipe(source, None, 0.05, version=2).fingerprint == "9d423e55a46af875"
    assert index.ImageRecipe(source, None, 0.05).fingerprint != "9d423e55a46af875"


def test_problems_are_told_in_the_users_words(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"data.path=.* is empty: "):
        find(str(tmp_path))
    path = as_folder(tmp_path / "data", drawn(1, 2))
    with pytest.raises(SourceError, match=r"nothing of data.format=tar: no file with"):
        find(str(path), "tar")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(SourceError, match=r"a.tar is not a tar that can be read"):
        indexed(tmp_path / "bad", open_storage(str(tmp_path / "prepared")))
    other = as_folder(tmp_path / "other", [("dog/1.png", drawn(1, 1)[0][1])])
    with pytest.raises(SourceError, match="classes that the training data lack: dog"):
        indexed(path, open_storage(str(tmp_path / "prepared")), eval_path=other)


def test_an_image_that_changes_is_refused_by_name(tmp_path: Path) -> None:
    path = as_folder(tmp_path / "data", drawn(2, 2))
    found = indexed(path, open_storage(str(tmp_path / "prepared")))
    victim = sorted(filter(Path.is_file, path.rglob("*")))[2]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(StorageError, match=rf"{victim.name}.* are not those that were indexed"):
        found.rows("train").read([2])
    victim.unlink()
    with pytest.raises(StorageError, match="it is gone"):
        found.rows("train").read([2])


def test_the_set_that_rayapp_draws(tmp_path: Path) -> None:
    """Labels that tell the classes apart, several formats and modes, and it is drawn only once."""
    storage = open_storage(str(tmp_path))
    names = [drawn_shapes.one(name, n) for name in drawn_shapes.CLASSES for n in range(3)]
    assert names == [drawn_shapes.one(name, n) for name in drawn_shapes.CLASSES for n in range(3)]
    kinds = collections.Counter(Image.open(io.BytesIO(data)).format for _, data in names)
    assert len(kinds) >= 4
    storage.write(f"{drawn_shapes.NAME}-{drawn_shapes.VERSION}/{drawn_shapes.DONE}", b"there")
    assert drawn_shapes.draw(storage) == f"{storage.url}/{drawn_shapes.NAME}-{drawn_shapes.VERSION}"
    assert [entry.name for entry in storage.list()] == [
        f"{drawn_shapes.NAME}-{drawn_shapes.VERSION}/{drawn_shapes.DONE}"
    ]


# ---- Augmentation ------------------------------------------------------------------------------


def picture(width: int, height: int, mode: str = "RGB", kind: str = "PNG") -> bytes:
    """Encode a smooth gradient: what it shows at a place follows from the place."""
    across = np.linspace(0, 255, width)[None, :, None] * np.array([1, 0, 0.5])
    down = np.linspace(0, 255, height)[:, None, None] * np.array([0, 1, 0.5])
    image = Image.fromarray((across + down).astype(np.uint8)).convert(mode)
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("size", [(40, 30), (500, 400)])
def test_the_middle_is_what_cropping_and_scaling_by_hand_gives(
    kind: str, size: tuple[int, int]
) -> None:
    data, look = picture(*size, kind=kind), ImageDataConfig(size=24, eval_crop=0.75)
    side = 0.75 * min(size)
    left, top = (size[0] - side) / 2, (size[1] - side) / 2
    whole = Image.open(io.BytesIO(data)).convert("RGB")
    box = (left, top, left + side, top + side)
    expected = np.asarray(whole.resize((24, 24), Image.Resampling.BILINEAR, box=box), np.int64)
    found = augment.centred(data, look).astype(np.int64)
    assert found.shape == (24, 24, 3)
    assert np.abs(found - expected).max() <= (0 if kind == "PNG" else 4)  # a JPEG is decoded small


@given(st.integers(0, 2**64 - 1), st.integers(20, 90), st.integers(20, 90))
@settings(max_examples=60, deadline=None)
def test_a_crop_lies_within_the_image_and_has_the_drawn_area(
    seed: int, width: int, height: int
) -> None:
    left, top, right, bottom = augment._crop((width, height), (0.2, 0.8), random.Random(seed))
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    share = (right - left) * (bottom - top) / (width * height)
    assert 0.15 <= share <= 0.9 or right - left == width or bottom - top == height
    aspect = (right - left) / (bottom - top)
    assert 0.65 <= aspect <= 1.5


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((1000, 300), (300, 0, 700, 300)),
        ((300, 1000), (0, 300, 300, 700)),
        ((500, 375), (0, 0, 500, 375)),
        ((375, 500), (0, 0, 375, 500)),
        ((96, 49), (15, 0, 80, 49)),
    ],
)
def test_where_no_crop_fits_the_largest_in_the_middle_is_taken(
    size: tuple[int, int], box: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The boxes are those of torchvision 0.28 and timm 1.0.31: within 3:4 to 4:3 the whole."""
    monkeypatch.setattr(augment, "CROP_TRIES", 0)
    assert augment._crop(size, (0.5, 1.0), random.Random(0)) == box


def test_crops_are_distributed_as_torchvision_draws_them() -> None:
    """Areas are even, log aspects too: means over many draws of an image that any crop fits in."""
    draws = [augment._crop((1000, 1000), (0.1, 0.3), random.Random(n)) for n in range(4000)]
    areas = np.array([(r - x) * (b - y) / 1e6 for x, y, r, b in draws])
    aspects = np.log([(r - x) / (b - y) for x, y, r, b in draws])
    assert areas.mean() == pytest.approx(0.2, abs=0.004)
    assert aspects.mean() == pytest.approx(0.0, abs=0.01)
    assert aspects.std() == pytest.approx(np.log(16 / 9) / 12**0.5, rel=0.03)


def test_the_seed_alone_decides() -> None:
    data, look = (
        picture(60, 50),
        ImageDataConfig(size=16, randaugment=RandAugment(layers=2, magnitude=15)),
    )
    first = [augment.augmented(data, look, seed) for seed in range(20)]
    again = [augment.augmented(data, look, seed) for seed in reversed(range(20))]
    assert all(map(np.array_equal, first, reversed(again)))
    assert len({one.tobytes() for one in first}) == 20
    with ThreadPoolExecutor(4) as pool:
        at_once = pool.map(lambda seed: augment.augmented(data, look, seed), range(20))
        assert all(map(np.array_equal, first, at_once))
    plain = ImageDataConfig(size=16, crop_scale=(1, 1), flip=1.0)
    expected = augment.centred(data, ImageDataConfig(size=16, eval_crop=1.0))[:, ::-1]
    assert np.array_equal(augment.augmented(data, plain, 5), expected)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK", "1", "I;16", "LA"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    kind = "TIFF" if mode in ("CMYK", "I;16") else "PNG"
    assert augment.problem_of(picture(40, 40, mode, kind)) is None
    assert augment.augmented(picture(40, 40, mode, kind), ImageDataConfig(size=16), 1).shape == (
        16,
        16,
        3,
    )


@pytest.mark.parametrize("name", augment.OPERATIONS)
def test_every_operation_of_randaugment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    smooth = np.asarray(Image.open(io.BytesIO(picture(32, 32))))
    rough = np.random.default_rng(0).integers(-9, 9, smooth.shape)
    most = 254  # solarize at magnitude 0 inverts 255 alone
    image = Image.fromarray(np.clip(smooth + rough, 0, most).astype(np.uint8))
    monkeypatch.setattr(augment, "OPERATIONS", {name: augment.OPERATIONS[name]})
    still = augment._operate(image, 0, random.Random(1))
    changed = augment._operate(image, 20, random.Random(1))
    assert changed.size == (32, 32) and changed.mode == "RGB"
    strong = np.abs(np.asarray(changed, np.int64) - np.asarray(image, np.int64)).mean()
    weak = np.abs(np.asarray(still, np.int64) - np.asarray(image, np.int64)).mean()
    if name in ("autocontrast", "equalize"):
        assert strong == weak
    elif name == "identity":
        assert strong == weak == 0
    else:
        assert strong > weak and weak < 1


@given(st.integers(2, 9), st.integers(0, 2**32), st.sampled_from(["mixup", "cutmix", "both"]))
@settings(max_examples=50, deadline=None)
def test_mixing_keeps_every_pixel_and_every_share(count: int, seed: int, kind: str) -> None:
    """What an image gives away its partner has; the target has the pixels' shares."""
    draw = np.random.default_rng(seed)
    images = draw.integers(0, 256, (count, 8, 8, 3), np.uint8)
    labels, seeds = np.arange(count), draw.integers(0, 2**63, count).astype(np.uint64)
    present = draw.random(count) < 0.8
    look = ImageDataConfig(size=8, mixup=0.5 * (kind != "cutmix"), cutmix=0.7 * (kind != "mixup"))
    mixed = images.copy()
    others, shares = augment.mix(mixed, labels, seeds, present, look)
    for j in range(count):
        k = count - 1 - j
        alone = j == k or not (present[j] and present[k])
        if alone:
            assert np.array_equal(mixed[j], images[j]) and others[j] == j and shares[j] == 1
            continue
        assert others[j] == k and shares[j] == shares[k] and 0 <= shares[j] <= 1
        total = mixed[j].astype(int) + mixed[k]
        assert np.abs(total - (images[j].astype(int) + images[k])).max() <= 1
        blend = images[j] * shares[j] + images[k] * (1 - shares[j])
        if np.abs(mixed[j] - blend).max() > 0.51:  # CutMix: each pixel is one of the two
            own = (mixed[j] == images[j]).all(-1)
            assert (own | (mixed[j] == images[k]).all(-1)).all()
            assert own.mean() == pytest.approx(shares[j], abs=0.1)


# ---- Order -------------------------------------------------------------------------------------

# 24 images, 3 micro-batches of 3 a step: step 2 straddles an epoch's end, and the last is short.
ORDER = Order.for_epochs(num_rows=24, rows_per_step=9, micro_batch=3, seed=3, epochs=3)


def by_place(images: Images, world: int, step: int) -> dict[int, tuple[Any, ...]]:
    """Return what all ranks together have of a step, by its place in the step."""
    found = {}
    for rank in range(world):
        batch = step_images(images.rows("train"), LOOK, ORDER, step, rank, world)
        for (i, j), row in np.ndenumerate(batch.rows):
            if row != EMPTY:
                place = (i * world + rank) * ORDER.micro_batch + j
                one = batch.images[i, j].tobytes(), int(batch.labels[i, j])
                more = int(batch.others[i, j]), float(batch.shares[i, j]), batch.digests[i, j]
                found[place] = (int(row), *one, *more)
    return found


@pytest.mark.parametrize("step", range(ORDER.num_steps))
def test_a_step_is_the_same_for_any_number_of_workers(images: Images, step: int) -> None:
    expected = by_place(images, 1, step)
    assert [row for row, *_ in expected.values()] == [r for r in ORDER.rows(step) if r != EMPTY]
    for world in (2, 3, 4):
        found = by_place(images, world, step)
        assert dict(sorted(found.items())) == expected


def test_digests_tell_of_bytes_class_seed_and_place(images: Images) -> None:
    """Made again from the files, by hand."""
    batch = step_images(images.rows("train"), LOOK, ORDER, 2, 0, 1)
    digests = []
    for place, row in enumerate(ORDER.rows(2)):
        data = images.rows("train").read([int(row)])[0]
        label = int(images.rows("train").records[row]["label"])
        epoch = (2 * 9 + place) // 24
        seed = augment.seed_of(3, epoch, int(row))
        digests.append(image_digest(place, index.digest_of(data), label, seed))
    assert combine([batch.digest()]) == combine(digests)
    assert {(2 * 9 + place) // 24 for place in range(9)} == {0, 1}
    assert len({image_digest(*numbers) for numbers in ((0, 1, 2, 3), (1, 0, 2, 3), (0, 1, 3, 2))})


def test_an_image_looks_different_in_every_epoch(images: Images) -> None:
    seen = collections.defaultdict(set)
    plain = ImageDataConfig(size=24)
    for batch in local_steps(images.rows("train"), plain, ORDER, 0, 1, 0):
        for place, row in np.ndenumerate(batch.rows):
            if row != EMPTY:
                seen[int(row)].add(batch.images[place].tobytes())
    assert set(map(len, seen.values())) == {3} and len(seen) == 24


@pytest.mark.parametrize("world", [1, 2, 3])
def test_held_out_images_come_once_and_equally_often_to_all_ranks(
    images: Images, world: int
) -> None:
    rows = images.rows("train")
    every = [list(held_out_batches(rows, LOOK, 5, rank, world)) for rank in range(world)]
    assert len({len(one) for one in every}) == 1
    found = {}
    for batch in (batch for one in every for batch in one):
        for place, row in np.ndenumerate(batch.rows):
            if row != EMPTY:
                assert found.setdefault(int(row), batch.images[place].tobytes())
    assert sorted(found) == list(range(24))
    data = rows.read(range(24))
    assert all(found[n] == augment.centred(data[n], LOOK).tobytes() for n in range(24))


def test_a_micro_batch_gives_the_model_the_images_that_exist(images: Images) -> None:
    batch = step_images(images.rows("train"), LOOK, ORDER, ORDER.num_steps - 1, 0, 2)
    assert batch.rows.shape == (2, 3)
    counts = [len(batch.inputs(i)["images"]) for i in range(2)]
    other = step_images(images.rows("train"), LOOK, ORDER, ORDER.num_steps - 1, 1, 2)
    more = [len(other.inputs(i)["images"]) for i in range(2)]
    assert sum(counts) + sum(more) == 9  # 72 images are 8 whole steps
    assert batch.counts().weight + other.counts().weight == sum(r != EMPTY for r in ORDER.rows(7))
    assert 0 in more  # rank 1 has no second micro-batch


# ---- Through Ray Data --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_here() -> Any:
    import tempfile

    import ray

    temporary = tempfile.mkdtemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=150 * 2**20,
            log_to_driver=False,
            _temp_dir=temporary,
        )
        yield
        ray.shutdown()
    shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.drill  # tests/test_vision_drills.py sees to it in `make test`
def test_ray_data_indexes_as_one_process_does(
    ray_here: None, folder: Path, images: Images, tmp_path: Path
) -> None:
    recipe = index.ImageRecipe(find(str(folder / "tree")), None, 0.0)
    told: list[int] = []
    root = open_storage(str(tmp_path))
    found = prepare(recipe, root, 1, lambda done, total: told.append(done))
    assert contents(found) == contents(images) and found.fingerprint == images.fingerprint
    assert told[-1] == found.num_bytes
    assert prepare(recipe, root) == found and len(told) == 1


@pytest.mark.drill
@pytest.mark.parametrize(("world", "first_step"), [(1, 0), (2, 0), (3, 5)])
def test_the_stream_is_what_one_process_makes(
    ray_here: None, images: Images, world: int, first_step: int
) -> None:
    opened = partial(batches.stream, images, LOOK, ORDER)
    shards = streams.ExactOrder(opened).configure({"train": first_step}, world)
    taken: list[list[batches.StepImages]] = [[] for _ in range(world)]

    def consume(rank: int) -> None:
        micro_batches = ORDER.num_micro_batches(world)
        taken[rank] += batches.steps(shards[rank]["train"], ORDER.micro_batch, micro_batches)

    threads = [threading.Thread(target=consume, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(world):
        expected = list(local_steps(images.rows("train"), LOOK, ORDER, rank, world, first_step))
        assert [one.step for one in taken[rank]] == [one.step for one in expected]
        for one, other in zip(taken[rank], expected, strict=True):
            for name in vars(one).keys() - {"step"}:
                a, b = getattr(one, name), getattr(other, name)
                assert np.array_equal(a, b) and a.dtype == b.dtype, name
