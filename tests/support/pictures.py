"""Small sets of labelled images, and their index, for tests."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayapp.data.images import drawn_shapes
from rayapp.data.images.image_sources import find
from rayapp.data.images.index import VERSION, ImageRecipe, Images
from rayapp.data.images.indexing import prepare, tasks_of
from rayapp.storage import Storage, open_storage


def drawn(classes: int, each: int) -> list[tuple[str, bytes]]:
    """Return (class/file, bytes) of some of the set that rayapp draws itself."""
    return [
        drawn_shapes.one(name, n) for name in drawn_shapes.CLASSES[:classes] for n in range(each)
    ]


def as_folder(root: Path, images: list[tuple[str, bytes]]) -> Path:
    """Write a folder for each class."""
    for name, data in images:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def as_tars(root: Path, images: list[tuple[str, bytes]], per_shard: int) -> Path:
    """Write tar shards whose labels stand beside the images."""
    root.mkdir(parents=True, exist_ok=True)
    for shard, first in enumerate(range(0, len(images), per_shard)):
        with tarfile.open(root / f"shard-{shard:03d}.tar", "w") as archive:
            for number, (name, data) in enumerate(images[first : first + per_shard]):
                folder, _, last = name.partition("/")
                key = f"{first + number:05d}"
                for ending, content in ((last.partition(".")[2], data), ("cls", folder.encode())):
                    info = tarfile.TarInfo(f"{key}.{ending}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
    return root


def as_parquet(root: Path, images: list[tuple[str, bytes]], per_file: int) -> Path:
    """Write Parquet as Hugging Face's data sets have it."""
    root.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, len(images), per_file)):
        part = images[first : first + per_file]
        column = [{"bytes": data, "path": name} for name, data in part]
        labels = [name.partition("/")[0] for name, _ in part]
        table = pa.table({"image": column, "label": labels})
        pq.write_table(table, root / f"part-{number}.parquet", row_group_size=7)
    return root


def indexed(path: Path | str, root: Storage, eval_fraction: float = 0.0, **more: Any) -> Images:
    """Index images in this process: what Ray Data's tasks would do, one after another."""
    held_out = more.get("eval_path")
    held = find(str(held_out)) if held_out else None
    recipe = ImageRecipe(find(str(path)), held, eval_fraction, more.get("version", VERSION))
    for task in tasks_of(recipe):
        task.run(recipe, root.url, recipe.fingerprint)
    return prepare(recipe, open_storage(root.url))
