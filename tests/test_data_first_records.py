"""Check what is known of data before they are prepared, and how little is read for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data_preparation import VALUES, words, write_jsonl

from rayapp.data import first_records, sources
from rayapp.data.sources import cutting
from rayapp.data.sources import pieces as reading


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "UNIT_BYTES", 500)


def test_heads_tell_the_kind_and_what_is_wrong(tmp_path: Path) -> None:
    for kind in ("text", "prompt", "chat"):
        source = write_jsonl(tmp_path / f"{kind}.jsonl", [VALUES[kind](n) for n in range(30)])
        assert first_records.inspect(
            str(source.root), source, "auto", 0.0
        ) == first_records.Inspected(kind, (), [])
        assert first_records.inspect(
            str(source.root), source, kind, 0.0
        ) == first_records.Inspected(kind, (), [])
    head = first_records.inspect("given.jsonl", source, "prompt", 0.5)
    (message,) = head.problems
    assert head.kind == "prompt"
    assert message == (
        "data.path=given.jsonl is unusable in 30 of the first 30 records: "
        f"{tmp_path}/chat.jsonl:1 has no column 'prompt' (it has 'messages') (and 29 more alike). "
        "Correct them, set data.kind or data.columns, or allow more with data.bad_rows"
    )


def test_a_column_that_no_record_has_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"ticket": "It is late.", "label": "shipping"}\n' * 9)
    path = str(tmp_path / "a.jsonl")
    columns = {"question": "tickt", "answer": "label"}
    found = first_records.inspect(path, sources.find(path, "auto"), "auto", 0.01, columns)
    assert found.problems == [
        f"data.columns={columns} is wrong: no record of {path} has 'tickt', but 'label', 'ticket'. "
        "Correct the name"
    ]
    assert not first_records.inspect(
        path, sources.find(path, "auto"), "auto", 0.01, {**columns, "question": "ticket"}
    ).problems


def test_data_bad_rows_decides_and_a_head_is_refused_only_if_nothing_is_usable(
    tmp_path: Path,
) -> None:
    def refused(bad: int, records: int, limit: float) -> bool:
        values = [{"words": "x"}] * bad + [VALUES["text"](n) for n in range(records - bad)]
        source = write_jsonl(tmp_path / "a.jsonl", values)
        return bool(first_records.inspect("a.jsonl", source, "text", limit).problems)

    assert not refused(1, 10_000, 0.01) and not refused(63, 10_000, 0.01)
    assert refused(64, 10_000, 0.01) and refused(64, 10_000, 0.9)
    assert not refused(10_000, 10_000, 1.0)
    assert refused(1, 10_000, 0.0), "no bad record is allowed, and one was seen"
    assert refused(1, 10, 0.01) and not refused(1, 10, 0.1), "the head is the whole file"


def test_columns_that_are_not_used_are_told(tmp_path: Path) -> None:
    rows = [{"text": "x", "id": 1}, {"text": "y", "source": None}, {"text": "z", "lang": "en"}]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    assert first_records.inspect("a.jsonl", source, "auto", 0.0).unused == ("id", "lang")
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "x", "lang": "en", "id": 1}] * 3)
    head = first_records.inspect(
        "a.jsonl", source, "auto", 0.0, {"completion": "text", "prompt": "lang"}
    )
    assert head == first_records.Inspected("prompt", ("id",), [])


def test_fields_of_messages_that_are_not_used_are_told(tmp_path: Path) -> None:
    (user, answer), bad = VALUES["chat"](1)["messages"], {"messages": "x", "id": 1}
    rows = [{"messages": [user, {**answer, "refusal": "", "text": "x"}]}, bad]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    head = first_records.inspect("a.jsonl", source, "auto", 0.9)
    assert head.unused == ("id", "messages.refusal", "messages.text")


def test_heads_of_parquet_and_of_nothing(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"text": "x"}] * 3), tmp_path / "a.parquet")
    source = sources.find(str(tmp_path / "a.parquet"))
    assert first_records.inspect(str(source.root), source, "auto", 0.0) == first_records.Inspected(
        "text", (), []
    )
    pq.ParquetWriter(tmp_path / "b.parquet", pa.schema([("text", pa.string())])).close()
    for path, content in (("b.parquet", None), ("c.jsonl", "\n\n")):
        if content:
            (tmp_path / path).write_text(content)
        source = sources.find(str(tmp_path / path))
        (message,) = first_records.inspect(str(source.root), source, "auto", 0.0).problems
        assert "is empty: there is no record in its files" in message


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_samples_are_spread_over_the_corpus_and_read_little_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(first_records, "SAMPLE_BYTES", 200)
    lines = [f"line {n:05d} of the corpus" for n in range(4000)]
    if suffix == "jsonl":
        lines = [json.dumps({"text": line}) for line in lines]
    (tmp_path / f"a.{suffix}").write_text("\n".join(lines))
    source = sources.find(str(tmp_path))
    read: list[int] = []
    line_bytes = reading.line_bytes
    monkeypatch.setattr(
        reading,
        "line_bytes",
        lambda *a: (found := line_bytes(*a), read.append(len(found[1])))[0],
    )
    sample = list(first_records.sample_texts(source, "text", 4000))
    text = "".join(sample)
    assert 2000 <= len(text) <= 6000 and sum(read) < 3 * 4000
    numbers = sorted(int(part[:5]) for part in text.split("line ")[1:] if part[:5].isdigit())
    assert numbers[0] == 0 and numbers[-1] > 3600 and max(np.diff(numbers)) < 400
    chat = write_jsonl(tmp_path / "c.jsonl", [VALUES["chat"](n) for n in range(3)])
    assert list(first_records.sample_texts(chat, "chat", 4000))[:2] == ["Q0?", words(0)]
