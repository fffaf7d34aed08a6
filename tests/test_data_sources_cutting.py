"""Check what a source is tokenised as: which blocks other files, names and settings leave alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rayapp.data import sources
from rayapp.data.sources import cutting
from rayapp.data.sources.cutting import with_blocks
from rayapp.data.sources.parts import DataFile, DataSource, Piece, ReadUnit


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "UNIT_BYTES", 500)


def keys(path: Path, fraction: float = 0.1) -> list[str]:
    """Return the keys of the blocks of a folder, without repetition."""
    source = sources.find(str(path))
    blocks = [block for unit in sources.units(source, fraction) for block in unit.blocks]
    return list(dict.fromkeys(sources.content_key(source, block.pieces)[0] for block in blocks))


def fill(folder: Path, name: str, first: int = 0, count: int = 40) -> Path:
    folder.mkdir(exist_ok=True)
    rows = [{"text": f"{n} " + "x" * (n % 50)} for n in range(first, first + count)]
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), folder / name, row_group_size=7)
    else:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("suffix", ["jsonl", "txt", "parquet", "csv"])
def test_a_name_a_time_and_a_neighbour_change_no_key(tmp_path: Path, suffix: str) -> None:
    folder = fill(tmp_path / "a", f"b.{suffix}")
    before = keys(folder, 0.0)
    (folder / f"b.{suffix}").rename(folder / f"c.{suffix}")
    os.utime(folder / f"c.{suffix}", (1, 1))
    assert keys(folder, 0.0) == before
    fill(folder, f"a.{suffix}", first=100)
    assert set(before) < set(keys(folder, 0.0))


def test_a_line_that_is_added_changes_the_last_block_alone(tmp_path: Path) -> None:
    before = keys(fill(tmp_path / "a", "a.jsonl", count=90))
    with (tmp_path / "a" / "a.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    after = keys(tmp_path / "a")
    assert len(before) > 3 and after[: len(before) - 1] == before[:-1]
    assert len(set(after) - set(before)) <= 2


def test_a_byte_that_is_changed_within_a_large_file_is_seen(tmp_path: Path) -> None:
    """Size, time, and first and last MiB stay as they are."""
    path, line = tmp_path / "a.jsonl", b'{"text": "' + b"x" * 88 + b'"}\n'
    path.write_bytes(line * 100_000)
    os.utime(path, (1, 1))
    source = sources.find(str(path))
    piece = sources.Piece("a.jsonl", 5_000_000, 5_001_000, "train", source.files[0].size)
    before, bound = sources.content_key(source, (piece,))
    with path.open("r+b") as file:
        file.seek(5_000_450)
        file.write(b"y")
    os.utime(path, (1, 1))
    assert sources.content_key(source, (piece,))[0] != before
    os.utime(path, (2, 2))
    with pytest.raises(Exception, match="was replaced since the run found it"):
        list(sources.read_piece(source, bound[0]))  # what was hashed is what is read


def test_larger_units_of_a_larger_source_have_the_same_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill(tmp_path / "a", "a.jsonl", count=90)
    before = keys(folder)
    monkeypatch.setattr(cutting, "MAX_UNITS", 3)
    assert len(sources.units(sources.find(str(folder)), 0.1)) == 3 < len(before)
    assert keys(folder) == before


NAMES = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=60, unique=True)


def blocks_of(names: list[str]) -> list[tuple[str, ...]]:
    files = tuple(DataFile(name, 20, f"version of {name}") for name in sorted(names))
    source = DataSource("/nowhere", "text", files)
    pieces = tuple(Piece(f.name, 0, 20, "train", 20) for f in files)
    units = [ReadUnit(n, pieces[a : a + 7], 0) for n, a in enumerate(range(0, len(pieces), 7))]
    found = with_blocks(source, units, cell=500)
    taken = [
        (unit.index, piece) for unit in found for block in unit.blocks for _, piece in block.taken
    ]
    assert taken == [(unit.index, piece) for unit in units for piece in unit.pieces]
    for unit in found:
        for block in unit.blocks:
            assert all(block.pieces[n] == piece for n, piece in block.taken)
            assert sum(piece.size for piece in block.pieces) <= 500
    blocks = (block for unit in found for block in unit.blocks)
    return list(dict.fromkeys(tuple(piece.file for piece in b.pieces) for b in blocks))


@settings(deadline=None)
@given(NAMES, st.text("abc", min_size=1, max_size=5))
def test_small_files_share_blocks_and_one_more_changes_few(names: list[str], more: str) -> None:
    assume(more not in names)
    before = blocks_of(names)
    after = blocks_of([*names, more])
    new = [block for block in after if block not in before]
    assert 1 <= len(new) <= 6


def test_small_files_are_few_blocks() -> None:
    names = [f"{number:04d}" for number in range(1000)]
    assert 1000 * 20 / 500 <= len(blocks_of(names)) <= 1000 * 20 / 500 * 4
