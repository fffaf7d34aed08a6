"""Check that each format is found by its content, and gives its records once, with their places."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_sources import at_commit, put, read  # noqa: F401  fixtures

from rayapp.data import sources
from rayapp.data.sources import DataSource, SourceError, streams
from rayapp.storage import open_storage

ROWS = [
    {"prompt": "What is 2 + 2?", "completion": "4"},
    {"prompt": 'He said "no",\nand left.', "completion": "日本 é"},
    {"prompt": "", "completion": "null"},
    {"prompt": "NA", "completion": "007"},
]


def jsonl(rows: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def separated(delimiter: str) -> Callable[[list[dict[str, str]]], bytes]:
    def write(rows: list[dict[str, str]]) -> bytes:
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
        return b"\xef\xbb\xbf" + out.getvalue().encode()

    return write


def parquet(rows: list[dict[str, str]]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def arrow(new: Callable[..., Any]) -> Callable[[list[dict[str, str]]], bytes]:
    def write(rows: list[dict[str, str]]) -> bytes:
        table, out = pa.Table.from_pylist(rows), io.BytesIO()
        with new(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
        return out.getvalue()

    return write


WRITERS: dict[str, tuple[str, Callable[[list[dict[str, str]]], bytes]]] = {
    "jsonl": ("jsonl", jsonl),
    "json": ("json", lambda rows: json.dumps(rows, indent=1).encode()),
    "csv": ("csv", separated(",")),
    "tsv": ("tsv", separated("\t")),
    "parquet": ("parquet", parquet),
    "arrow": ("arrow", arrow(pa.ipc.new_stream)),
    "feather": ("arrow", arrow(pa.ipc.new_file)),
}
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data[:20]) + gzip.compress(data[20:]),
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("form", WRITERS)
def test_each_format_gives_its_records(
    put: Callable[[dict[str, bytes]], str],  # noqa: F811
    form: str,
    packed: str,
) -> None:
    format, write = WRITERS[form]
    suffix = "json" if form == "jsonl" else {"feather": "arrow"}.get(form, form)
    files = {
        f"{number}.{suffix}{packed}": PACKED[packed](write(rows))
        for number, rows in enumerate((ROWS, ROWS[2:]))
    }
    url = put({**files, "LICENSE": b"words"})
    source = sources.find(url)
    assert source.format == format and [file.name for file in source.files] == sorted(files)
    assert [record.value for record in read(source)] == ROWS + ROWS[2:]
    assert sources.find(url, format) == source
    one = sources.find(f"{url}/0.{suffix}{packed}")
    assert one.format == format and [record.value for record in read(one)] == ROWS


def test_a_file_without_a_suffix_is_read_by_its_content(tmp_path: Path) -> None:
    for form, (format, write) in WRITERS.items():
        path = tmp_path / f"part-{form}"
        path.write_bytes(write(ROWS))
        if form in ("csv", "tsv"):
            with pytest.raises(SourceError, match="is of no known kind: part-"):
                sources.find(str(path))
        else:
            assert sources.find(str(path)).format == format
            assert [record.value for record in read(sources.find(str(path)))] == ROWS


def test_places_are_the_lines_in_the_plain_file(tmp_path: Path) -> None:
    places = {}
    for name in ("a.json", "a.jsonl.gz", "a.csv", "a.tsv.zst"):
        write = WRITERS[name.split(".")[1]][1]
        (tmp_path / name).write_bytes(
            PACKED[name[-3:] if name[-3:] == ".gz" else (".zst" if name.endswith(".zst") else "")](
                write(ROWS)
            )
        )
        source = sources.find(str(tmp_path / name))
        found = [sources.place_of(source, r.file, r.place) for r in read(source)]
        assert all(place.startswith(f"{tmp_path}/{name}:") for place in found)
        places[name] = [int(place.rpartition(":")[2]) for place in found]
    assert places == {
        "a.json": [2, 6, 10, 14],
        "a.jsonl.gz": [1, 2, 3, 4],
        "a.csv": [2, 3, 5, 6],
        "a.tsv.zst": [2, 3, 5, 6],
    }


@pytest.mark.parametrize("split", [False, True])
def test_what_save_to_disk_writes(tmp_path: Path, split: bool) -> None:
    made: Any = datasets.Dataset.from_list(ROWS * 700).shuffle(seed=0)
    folder = tmp_path / "saved"
    if split:
        datasets.DatasetDict({"train": made, "test": made.select(range(5))}).save_to_disk(folder)
        with pytest.raises(SourceError, match=r"holds test, train\. Set data\.path=\S+/saved/"):
            sources.find(str(folder))
        folder /= "train"
    else:
        made.save_to_disk(folder, num_shards=2)
    source = sources.find(str(folder))
    assert source.format == "arrow" and len(source.files) == 2 - split
    assert [record.value for record in read(source)] == list(made)
    last = read(source)[-1]
    expected = 2800 if split else 1400
    assert sources.place_of(source, last.file, last.place).endswith(f".arrow row {expected - 1}")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=9) | st.integers())),
    indent=st.sampled_from([None, 0, 2]),
    chunk=st.integers(1, 40),
)
def test_an_array_is_read_chunk_by_chunk(rows: list[Any], indent: int | None, chunk: int) -> None:
    text = json.dumps(rows, indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "CHUNK", chunk)
        found = list(streams._array(io.BufferedReader(io.BytesIO(text)), "a"))  # type: ignore[arg-type]
    assert [record.value for record in found] == json.loads(text.decode("utf-8", "surrogateescape"))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'[{"a": 1}\n{"b": 2}]', "is not a JSON array: line 2 lacks a comma or ]"),
        (b'[{"a": 1},\n{"b": }]', "is not a JSON array: Expecting value at line 2"),
        (b'[{"a": 1},\n{"b": "x', "is not a JSON array: Unterminated string starting at line 2"),
        (b'[{"a": 1}]\n{"b": 2}', "is not a JSON array: line 2 has more after its ]"),
        (b'[{"a": 1},', "is not a JSON array: Expecting value at line 1"),
        (b"[" + b"[" * 99_999, "is not a JSON array: line 1 is too deep"),
    ],
)
def test_a_broken_array_is_named_with_its_line(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "a.json").write_bytes(data)
    source = sources.find(str(tmp_path / "a.json"))
    with pytest.raises(SourceError) as caught:
        read(source)
    assert str(caught.value) == f"{tmp_path}/a.json {words}"


@pytest.mark.parametrize("value", ['"' + "x" * 5000 + '"', json.dumps(list(range(2000)))])
def test_an_object_of_an_array_that_is_too_large_is_told_as_such(
    tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CHUNK", 100)
    monkeypatch.setattr(streams, "OBJECT_BYTES", 2**10)
    (tmp_path / "a.json").write_text('[{"a": 1},\n{"b": ' + value + "}]")
    with pytest.raises(SourceError, match=r"the object at line 2 goes on for more than 0 MiB"):
        read(sources.find(str(tmp_path / "a.json")))
    (tmp_path / "a.json").write_text('[{"a": 1},\n{"b": }, {"c": ' + value + "}]")
    with pytest.raises(SourceError, match="not a JSON array: Expecting value at line 2"):
        read(sources.find(str(tmp_path / "a.json")))


def test_rows_of_csv_that_do_not_fit_are_bad_records(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,completion\na,b\nc\n\n"d\n",e,f\ng,h\nx,"y" z\ni,j\n')
    source = sources.find(str(tmp_path / "a.csv"))
    found = [(record.place, record.problem) for record in read(source) if record.problem]
    assert found == [
        (3, "has 1 fields, but the header has 2"),
        (5, "has 3 fields, but the header has 2"),
        (8, "is not CSV (',' expected after '\"')"),
    ]
    good = [record.value["prompt"] for record in read(source) if not record.problem]
    assert good == ["a", "g", "i"]
    (tmp_path / "b.csv").write_text("a,a\n1,2\n")
    with pytest.raises(SourceError, match=r"b\.csv is without a header: names of columns are"):
        read(sources.find(str(tmp_path / "b.csv")))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.zst", "a.arrow", "a.parquet.gz"])
def test_a_file_that_is_cut_off_is_refused_by_name(tmp_path: Path, name: str) -> None:
    form, _, suffix = name[2:].partition(".")
    data = PACKED[f".{suffix}" if suffix else ""](WRITERS[form][1](ROWS * 400))
    (tmp_path / name).write_bytes(data[: len(data) * 2 // 3])
    after = r"( after (line|row) \d+)?: |"
    with pytest.raises(
        SourceError, match=f"{name} cannot be read as {form}{after}{name} is not to be"
    ):
        read(sources.find(str(tmp_path / name)))


DAMAGE = """
import resource, sys
from pathlib import Path
from rayapp.data import sources

path = Path(sys.argv[1])
data, mib = path.read_bytes(), 2**10
begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def changes():
    for bit in range(0, 8 * len(data), 11):
        at = bit // 8
        yield data[:at] + bytes([data[at] ^ 1 << bit % 8]) + data[at + 1 :]
    for at in range(0, len(data) - 8, 5):
        for large in (b"\\xfe\\xff\\xff\\xff\\x0f", (2**40).to_bytes(8, "little")):
            yield data[:at] + large + data[at + len(large) :]
    for end in range(0, len(data), 31):
        yield data[:end]

told = 0
for changed in changes():
    path.write_bytes(changed)
    try:
        source = sources.find(str(path))
        for unit in sources.units(source, 0.0):
            for piece in unit.pieces:
                sources.content_key(source, (piece,))
                for record in sources.read_piece(source, piece):
                    pass
    except sources.SourceError as error:
        told += 1
        assert path.name in str(error) and "\\n" not in str(error), error
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun) / mib
assert told > 300 and grown < 400, (told, grown)
"""


@pytest.mark.parametrize("form", ["arrow", "feather", "parquet"])
def test_damage_is_told_with_the_file_and_ends_no_process(tmp_path: Path, form: str) -> None:
    """Bits, numbers that are too large, and cuts; pyarrow itself checks little of what it reads."""
    path = tmp_path / f"a.{WRITERS[form][0]}"
    path.write_bytes(WRITERS[form][1](ROWS))
    done = subprocess.run([sys.executable, "-c", DAMAGE, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


def test_a_place_is_told_where_the_rest_cannot_be_read(tmp_path: Path) -> None:
    for form in ("arrow", "jsonl"):
        data = WRITERS[form][1]([{"text": f"{n * 7919} " * 20} for n in range(20_000)])
        path = tmp_path / f"a.{form}.gz"
        path.write_bytes(gzip.compress(data)[:-2000])
        place = "after row" if form == "arrow" else "after line"
        with pytest.raises(SourceError, match=rf"{path} cannot be read as {form} {place} \d+: "):
            read(sources.find(str(path)))
    path = tmp_path / "a.parquet"
    table = pa.Table.from_pylist([{"text": f"{n}" * 400} for n in range(3000)])
    pq.write_table(table, path, row_group_size=1000, write_page_checksum=True, compression="none")
    source, data = sources.find(str(path)), path.read_bytes()
    at = data.index(b"1500" * 100)
    path.write_bytes(data[:at] + b"2" + data[at + 1 :])  # the text would be another one
    with pytest.raises(SourceError, match=rf"{path} cannot be read as parquet: .*CRC"):
        read(source)
    path.unlink()
    with pytest.raises(SourceError, match=rf"{path} cannot be read as parquet: it has gone since"):
        sources.content_key(source, (sources.Piece("a.parquet", 0, 1, "train", len(data)),))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.md.zst"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    data = b"\xef\xbb\xbfone \xef\xbb\xbf\ntw\xe9o" if name == "a.txt" else b"\xef\xbb\xbfone"
    suffix = Path(name).suffix
    (tmp_path / name).write_bytes(PACKED.get(suffix, bytes)(data.replace(b"\xe9", b"")))
    (record,) = read(sources.find(str(tmp_path / name)))
    assert record.value == data.replace(b"\xe9", b"").decode().removeprefix("\ufeff")
    (tmp_path / name).write_bytes(PACKED.get(suffix, bytes)(b"\xef\xbb\xbfone\ntw\xe9o"))
    source = sources.find(str(tmp_path / name))
    (record,) = read(source)
    assert record.problem == "is not UTF-8"
    assert sources.place_of(source, name, record.place) == f"{tmp_path}/{name}:2"


def test_a_line_of_csv_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "LINE_BYTES", 300)
    (tmp_path / "a.csv").write_bytes(b"text,n\na,1\n" + b"\0" * 10_000)
    with pytest.raises(SourceError, match=r"a\.csv is not CSV: line 3 is longer than 256 MiB"):
        read(sources.find(str(tmp_path / "a.csv")))


def test_compression_that_the_name_hides_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(jsonl(ROWS)))
    with pytest.raises(SourceError, match=r"a\.jsonl is compressed with gzip\. End its name in"):
        sources.find(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.csv.gz").write_bytes(WRITERS["csv"][1](ROWS))  # or its first bytes are damaged
    with pytest.raises(SourceError, match=r"a\.csv\.gz .*is neither gzip nor Zstandard"):
        read(sources.find(str(tmp_path / "a.csv.gz")))


def test_json_that_is_no_list_of_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"data": ROWS}, indent=2))
    with pytest.raises(SourceError, match=r"a\.json is one JSON object over several lines"):
        sources.find(str(tmp_path / "a.json"))


def test_compressed_text_is_cut_at_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"line {n} \U0001f600\n" for n in range(200))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr("rayapp.data.sources.streams.TEXT_BYTES", 100)
    records = read(sources.find(str(tmp_path / "a.txt.gz")), 0.1)
    assert "".join(record.value for record in records) == text and len(records) > 20
    assert all(record.value.endswith("\n") and len(record.value) < 130 for record in records)
    assert text.split("\n")[records[5].place - 1] == records[5].value.split("\n")[0]


# ---- A user's own format -----------------------------------------------------------------------

OWN = """
import json

def read(path):
    with open(path) as file:
        for line in file:
            question, answer = line.rstrip().split(" -> ")
            yield {"prompt": question, "completion": answer}

def broken(path):
    yield 7

def fails(path):
    yield {"text": "a"}
    yield {"text": json.loads("{")}

VALUE = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> str:
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pairs.qa").write_text("a? -> b\nc? -> d\n")
    return name


def test_a_users_function_reads_each_file(module: str, tmp_path: Path) -> None:
    source = sources.find("data", f"{module}:read")
    assert [record.value for record in read(source)] == [
        {"prompt": "a?", "completion": "b"},
        {"prompt": "c?", "completion": "d"},
    ]
    assert sources.place_of(source, "pairs.qa", 1) == "pairs.qa row 1"
    (record,) = read(sources.find("data", f"{module}:broken"))
    assert record.problem == "is int, neither a mapping nor text"


def test_a_users_function_that_fails_is_named_with_its_line(module: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        read(sources.find("data", f"{module}:fails"))
    assert str(caught.value) == (
        f"data.format={module}:fails fails on {tmp_path}/data/pairs.qa after row 0: "
        "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 "
        f"(char 1) ({tmp_path}/{module}.py:15, in fails). Correct the function"
    )


def test_the_source_of_a_users_function_is_in_the_digest(module: str, tmp_path: Path) -> None:
    first = sources.find("data", f"{module}:read")
    assert first.digest() != DataSource(first.root, first.format, first.files).digest()
    (tmp_path / f"{module}.py").write_text(OWN + "# a comment\n")
    assert sources.find("data", f"{module}:read").digest() == first.digest()
    (tmp_path / f"{module}.py").write_text(OWN.replace("rstrip", "strip"))
    assert sources.find("data", f"{module}:read").digest() != first.digest()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:read", "cannot be imported: ModuleNotFoundError: No module named"),
        ("{}:nothing", "cannot be imported: AttributeError"),
        ("{}:VALUE", "is not a function: it is int"),
    ],
)
def test_a_users_function_that_is_none_is_named(module: str, name: str, words: str) -> None:
    name = name.format(module)
    with pytest.raises(SourceError) as caught:
        sources.find("data", name)
    assert str(caught.value).startswith(f"data.format={name} {words}")
    assert open_storage("data").list()
