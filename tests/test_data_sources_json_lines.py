"""Check that a long line of JSONL is read as json reads it."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.data import sources
from rayapp.data.sources import json_lines
from rayapp.data.sources import pieces as reading

LETTERS = st.text(st.sampled_from('ab "\\\n\t/é中😀\ud83d\x7f'), max_size=60)
VALUES = st.dictionaries(
    LETTERS,
    LETTERS | st.integers() | st.none() | st.lists(LETTERS | st.dictionaries(LETTERS, LETTERS)),
    max_size=4,
)


def whole(value: Any) -> Any:
    """Return a value with strings in place of its long texts."""
    if isinstance(value, json_lines.LongText):
        return str(value)
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    return [whole(each) for each in value] if isinstance(value, list) else value


def small_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(json_lines, "LARGE", 20)
    patch.setattr(json_lines, "PART_BYTES", 13)


@settings(deadline=None)
@given(VALUES, st.booleans())
def test_a_long_line_has_the_value_that_json_gives(value: Any, ascii_only: bool) -> None:
    line = b'{"before": 1}\n' + json.dumps(value, ensure_ascii=ascii_only).encode(
        "utf-8", "surrogatepass"
    )
    with pytest.MonkeyPatch.context() as patch:
        small_parts(patch)
        found = json_lines.line_value(line + b"\n", 14, len(line), long_texts=True)
        assert found is not None and found[1] is None
        assert whole(found[0]) == json.loads(line[14:])
        for text in filter(lambda each: isinstance(each, json_lines.LongText), found[0].values()):
            assert len(text) > 18 and len(list(text.parts())) > 1


@settings(deadline=None)
@given(VALUES, st.data())
def test_a_long_line_is_refused_where_json_refuses_it(value: Any, data: st.DataObject) -> None:
    line = bytearray(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(line) - 1))
        line[at] = data.draw(st.sampled_from(b'\\"u{}[]:,\x00\xff\x80 1'))
    (value, problem), found = json_lines.json_line(bytes(line)), None
    with pytest.MonkeyPatch.context() as patch:
        small_parts(patch)
        found = json_lines.line_value(bytes(line), 0, len(line), long_texts=True)
    if found is None:
        assert not line.strip()
    else:
        assert (found[1] is None) == (problem is None)
        assert problem is not None or whole(found[0]) == value


@pytest.mark.parametrize("inside", ["\\x", "\x01", "\ud800\\", "\xff"])
def test_what_is_wrong_in_a_long_string_is_named_as_json_names_it(inside: str) -> None:
    around = "é" * json_lines.LARGE
    line = f'{{"text": "{around}{inside}{around}"}}'.encode("utf-8", "surrogatepass")
    line = line.replace("\xff".encode(), b"\xff")
    found = json_lines.line_value(line, 0, len(line), long_texts=True)
    assert found == (None, json_lines.json_line(line)[1]) and found[1]


def test_a_long_string_without_an_end_is_refused() -> None:
    line = b'{"text": "' + b"a" * json_lines.LARGE * 2
    found = json_lines.line_value(line, 0, len(line), long_texts=True)
    assert found == (None, "is not JSON (Unterminated string starting at)")


def test_names_of_columns_are_never_long_texts() -> None:
    name = "a" * json_lines.LARGE * 2
    line = json.dumps({name: name}).encode()
    found = json_lines.line_value(line, 0, len(line), long_texts=True)
    assert found is not None and [*found[0]] == [name]
    assert str(found[0][name]) == name


def test_lines_after_a_large_one_are_read_as_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"text": "a" * n} for n in (1, 300, 2, 40, 500)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (unit,) = sources.units(sources.find(str(tmp_path / "a.jsonl")), 0.0)
    (piece,) = unit.pieces
    plain = list(reading.read_piece(sources.find(str(tmp_path / "a.jsonl")), piece))
    monkeypatch.setattr(reading, "LARGE", 100)
    monkeypatch.setattr(json_lines, "LARGE", 50)
    found = list(reading.read_piece(sources.find(str(tmp_path / "a.jsonl")), piece, True))
    assert [replace(record, value=whole(record.value)) for record in found] == plain
    assert [record.value for record in plain] == lines
    data = (tmp_path / "a.jsonl").read_bytes()
    assert [data[record.place :].split(b"\n")[0] for record in plain] == [
        json.dumps(line).encode() for line in lines
    ]


def test_a_large_line_is_held_once(tmp_path: Path) -> None:
    """As the bytes that were read; its text is decoded in parts."""
    size = 16 * 2**20
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * size}) + "\n")
    source = sources.find(str(tmp_path / "a.jsonl"))
    unit, *_ = sources.units(source, 0.0)
    tracemalloc.start()
    try:
        (record,) = sources.read_piece(source, unit.pieces[0], long_texts=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(record.value["text"]) == size and peak < 1.3 * size
