"""Check that sources are found, and cut so that each line and row is read once, in order."""

from __future__ import annotations

import gzip
import io
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayapp.data import sources
from rayapp.data.sources import (
    DataSource,
    Record,
    SourceError,
    cutting,
    hub,
    streams,
)
from rayapp.data.sources import (
    pieces as reading,
)
from rayapp.data.sources.parts import opened
from rayapp.storage import open_storage

FILES = {  # of a folder with all that a folder may hold beside the data
    "b.txt": b"two\n",
    "a.txt": b"one\n",
    "sub/c.txt": b"three",
    "sub/deep/d.txt": b"four\n",
    "p[1]/e.md": b"five\n",
    "p1/g.md": b"six\n",
    "p1/p[1]/f.md": b"seven\n",
    "empty.txt": b"",
    ".hidden.txt": b"no\n",
    ".cache/x.txt": b"no\n",
    "_temporary/x.jsonl": b"{}\n",
    "_SUCCESS": b"",
}

ALL = ["a.txt", "b.txt", "empty.txt", "p1/g.md", "p1/p[1]/f.md", "p[1]/e.md"]
ALL += ["sub/c.txt", "sub/deep/d.txt"]

drawn = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(params=["local", "s3"])
def put(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[dict[str, bytes]], str]:
    """Return a function that writes files to a new folder, on a disk or S3, and gives its URL."""
    url = str(tmp_path / "corpus")
    if request.param == "s3":
        url = f"s3://{request.getfixturevalue('s3_bucket')}/corpus"

    def write(files: dict[str, bytes]) -> str:
        for name, data in files.items():
            open_storage(url).write(name, data)
        return url

    return write


def read(source: DataSource, eval_fraction: float = 0.0) -> list[Record]:
    """Read all pieces of all units in order."""
    found = sources.units(source, eval_fraction)
    return [r for unit in found for piece in unit.pieces for r in sources.read_piece(source, piece)]


def refusal(path: str, format: str = "auto") -> str:
    with pytest.raises(SourceError) as caught:
        sources.find(path, format)
    return str(caught.value)


# ---- Finding -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("", ALL),
        ("/", ALL),
        ("/sub", ["c.txt", "deep/d.txt"]),
        ("/b.txt", ["b.txt"]),
        ("/.hidden.txt", [".hidden.txt"]),
        ("/*.txt", ["a.txt", "b.txt", "empty.txt"]),
        ("/[!b].txt", ["a.txt"]),
        ("/?.txt", ["a.txt", "b.txt"]),
        ("/*/*.txt", ["sub/c.txt"]),
        ("/**/*.txt", ["a.txt", "b.txt", "empty.txt", "sub/c.txt", "sub/deep/d.txt"]),
        ("/s*/**/d.txt", ["sub/deep/d.txt"]),
        ("/p[1]/*.md", ["p[1]/e.md"]),
        ("/*/p[1]/*", ["p1/p[1]/f.md"]),
        ("/p[12]/*.md", ["p1/g.md"]),
    ],
)
def test_file_folder_and_glob(
    put: Callable[[dict[str, bytes]], str], path: str, names: list[str]
) -> None:
    source = sources.find(put(FILES) + path)
    assert [file.name for file in source.files] == names
    assert source.format == "text"
    expected = [FILES[next(n for n in FILES if n.endswith(name))].decode() for name in names]
    assert [record.value for record in read(source)] == [text for text in expected if text]


def test_a_name_with_marks_of_a_pattern_is_a_file_if_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "data[1].txt").write_text("x")
    (tmp_path / "data1.txt").write_text("y")
    found = sources.find(str(tmp_path / "data[1].txt"))
    assert [file.name for file in found.files] == ["data[1].txt"]


def test_a_relative_path_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("a.txt", "*.txt", ".", "~", "~/a.txt", "~/*.txt", f"file://{tmp_path}"):
        assert [file.name for file in sources.find(path).files] == ["a.txt"], path
        assert sources.find(path).root == str(tmp_path), path


def test_stdlib_is_the_standard_library_without_its_tests() -> None:
    source = sources.find("stdlib")
    names = [file.name for file in source.files]
    assert names == sorted(names) and {"os.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or name.startswith("test/")]
    text = next(r.value for r in read(source) if r.file == "os.py")
    assert text.encode() == (Path(sysconfig.get_path("stdlib")) / "os.py").read_bytes()


@pytest.mark.parametrize(
    ("files", "path", "format", "words"),
    [
        (
            {"a.txt": b"x", "b.jsonl": b"{}"},
            "",
            "auto",
            "is mixed: it holds jsonl, text. Set data.format",
        ),
        ({"a.xml": b"x", "b.xml": b"x"}, "", "auto", "is of no known kind: a.xml is none"),
        ({".DS_Store": b"x"}, "", "auto", "is of no known kind: .DS_Store is"),
        ({"a.txt": b"x"}, "/b.txt", "auto", "is missing: there is no such file, folder or match"),
        ({"a.txt": b"x"}, "/*.md", "auto", "is missing"),
        ({"a.txt": b"", "b.txt": b""}, "", "auto", "is empty: its 2 files hold 0 bytes"),
        ({"part-0": b"{}", "part-1": b"{}"}, "", "jsonl", "is without jsonl files: it holds 2"),
        ({"a.html": b"<p>"}, "/a.html", "auto", "is of no known kind: a.html is none"),
        ({"part-0": b"words"}, "/part-0", "auto", "is of no known kind: part-0 is none of text,"),
        ({"a.csv": b"q,a", "README.md": b"x"}, "", "auto", "is mixed: it holds csv, text."),
        ({"a.zip": b"PK"}, "/a.zip", "auto", "is a ZIP archive: a.zip is not read. Unpack it"),
        ({"a.jsonl.bz2": b"BZ"}, "", "jsonl", "is compressed with bzip2: a.jsonl.bz2 is not read"),
        ({"a.xlsx": b"PK", "b.txt": b"x"}, "", "auto", "is an Excel workbook: a.xlsx"),
        (
            {"a.parquet": b"words"},
            "/a.parquet",
            "auto",
            "is not readable: a.parquet is not Parquet, as its",
        ),
        (
            {"dataset_dict.json": b"{}", "train/state.json": b"{}", "test/state.json": b"{}"},
            "",
            "auto",
            "is a set of splits: it holds test, train. Set data.path=",
        ),
        ({"a.json": b'\n [\n {"text": "x"}\n]'}, "", "jsonl", "is a JSON array: a.json is not"),
        ({"a.json": b'{"text": "x"}'}, "", "json", "is jsonl: a.json is not json. Set data.format"),
        ({"a.jsonl": b"{}", "b.json": b"[]"}, "", "auto", "is mixed: it holds json, jsonl."),
    ],
)
def test_refusals(
    put: Callable[[dict[str, bytes]], str],
    files: dict[str, bytes],
    path: str,
    format: str,
    words: str,
) -> None:
    url = put(files) + path
    message = refusal(url, format)
    assert message.startswith(f"data.path={url} is ") and words in message


def test_an_empty_folder_and_an_empty_bucket_are_missing(tmp_path: Path, s3_bucket: str) -> None:
    for path in (str(tmp_path), f"s3://{s3_bucket}", f"s3://{s3_bucket}/nothing"):
        assert "is missing" in refusal(path)


def test_the_format_set_by_the_user_decides(put: Callable[[dict[str, bytes]], str]) -> None:
    url = put({"README.md": b"words", "a.jsonl": b'{"text": "x"}', "part-0": b'{"text": "y"}'})
    assert [f.name for f in sources.find(url, "jsonl").files] == ["a.jsonl"]
    assert [f.name for f in sources.find(f"{url}/part-*", "jsonl").files] == ["part-0"]
    assert [f.name for f in sources.find(f"{url}/part-0", "jsonl").files] == ["part-0"]
    url = put({"a.csv": b"q,a", "page.html": b"<p>", "LICENSE": b"words"})
    for name in ("a.csv", "page.html", "LICENSE", "*.csv"):
        assert sources.find(f"{url}/{name}", "text").format == "text", name


@pytest.fixture
def at_commit(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Have the hub's client answer with a commit; return what it is asked."""
    asked: list[tuple[str, str | None]] = []

    def info(self: object, name: str, revision: str | None = None) -> object:
        asked.append((name, revision))
        return SimpleNamespace(sha=f"commit of {revision or 'main'}")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    return asked


def test_hub_ids_are_told_from_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_commit: list[tuple[str, str | None]],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "teknium/OpenHermes-2.5",
        "org/name_200k",
        "allenai/c4:en@train",
    ):
        assert sources.find(name) == DataSource(name, "hub", (), "commit of main")
    (tmp_path / "data").mkdir()
    for name in ("data/train", "org/train.jsonl", "a/b.jsonl.gz", "a/b.zip", "a/b/c", "missing"):
        assert "is missing" in refusal(name)


def test_the_hubs_commit_is_in_the_digest(at_commit: list[tuple[str, str | None]]) -> None:
    first = sources.find("org/name:en@test")
    other = sources.find("org/name:en@test#v2")
    assert at_commit == [("org/name", None), ("org/name", "v2")]
    assert other.version == "commit of v2" and first.digest() != other.digest()
    assert sources.find("org/name#" + "a" * 40).version == "a" * 40 and len(at_commit) == 2


def test_digest_follows_content_and_not_the_root(
    put: Callable[[dict[str, bytes]], str], tmp_path: Path
) -> None:
    url = put({"a.txt": b"one", "b.txt": b"two"})
    first = sources.find(url).digest()
    put({"a.txt": b"one"})
    assert sources.find(url).digest() == first
    put({"a.txt": b"One"})
    changed = sources.find(url).digest()
    put({"c.txt": b"three"})
    assert len({first, changed, sources.find(url).digest()}) == 3
    for folder in ("x", "y"):
        open_storage(str(tmp_path / folder)).write("a.txt", b"same")
    assert len({sources.find(str(tmp_path / folder)).digest() for folder in ("x", "y")}) == 1


# ---- Cutting -----------------------------------------------------------------------------------

LINES = st.lists(
    st.one_of(
        st.sampled_from(["", " ", "\r", "x", "é", "\U0001f600", "\ufeff", "\u2028", "日本" * 9]),
        st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=30),
    ),
    max_size=20,
)
ENDS = st.sampled_from(["\n", "\r\n"])


@drawn
@given(lines=LINES, end=ENDS, closed=st.booleans(), unit_bytes=st.integers(1, 60))
def test_text_pieces_join_to_the_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    end: str,
    closed: bool,
    unit_bytes: int,
) -> None:
    content = end.join(lines) + (end if closed else "")
    (tmp_path / "a.txt").write_bytes(content.encode() or b"x")
    monkeypatch.setattr(cutting, "UNIT_BYTES", unit_bytes)
    source = sources.find(str(tmp_path / "a.txt"))
    records = read(source)
    plain = content.encode() or b"x"
    assert "".join(record.value for record in records) == plain.decode("utf-8-sig")
    assert all(r.problem is None and (r.value.endswith("\n") or r is records[-1]) for r in records)
    for record in records:
        assert plain[record.place :].startswith(record.value.encode())


@drawn
@given(lines=LINES, fraction=st.floats(0.01, 0.99), unit_bytes=st.integers(1, 60))
def test_the_last_bytes_of_one_text_file_are_held_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    fraction: float,
    unit_bytes: int,
) -> None:
    content = "\n".join([*lines, "end"])
    (tmp_path / "a.txt").write_bytes(content.encode())
    monkeypatch.setattr(cutting, "UNIT_BYTES", unit_bytes)
    source = sources.find(str(tmp_path / "a.txt"))
    parts = {False: "", True: ""}
    for unit in sources.units(source, fraction):
        for piece in unit.pieces:
            for record in sources.read_piece(source, piece):
                parts[sources.is_eval(piece, 0, fraction)] += record.value
    assert parts[False] + parts[True] == content.removeprefix("\ufeff")
    size = len(content.encode())
    longest = max(len(line.encode()) for line in [*lines, "end"]) + 1
    assert abs(len(parts[True].encode()) - fraction * size) <= longest + 1


ROWS = st.lists(
    st.one_of(
        st.none(),  # a blank line
        st.dictionaries(st.sampled_from("ab"), st.text(max_size=40) | st.integers(), max_size=2),
    ),
    max_size=15,
)


@drawn
@given(rows=ROWS, end=ENDS, closed=st.booleans(), ascii=st.booleans(), size=st.integers(1, 60))
def test_jsonl_gives_each_line_once_in_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[dict[str, object] | None],
    end: str,
    closed: bool,
    ascii: bool,
    size: int,
) -> None:
    lines = ["  " if row is None else json.dumps(row, ensure_ascii=True) for row in rows]
    if not ascii:
        lines = ["" if row is None else json.dumps(row, ensure_ascii=False) for row in rows]
        lines = [line.encode(errors="replace").decode() for line in lines]
    data = (end.join(lines) + (end if closed else "")).encode() or b"\n"
    (tmp_path / "a.jsonl").write_bytes(data)
    monkeypatch.setattr(cutting, "UNIT_BYTES", size)
    source = sources.find(str(tmp_path / "a.jsonl"))
    records = read(source)
    plain = [json.loads(line) for line in data.split(b"\n") if line.strip()]  # the plain reading
    assert [record.value for record in records] == plain
    numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
    places = [sources.place_of(source, r.file, r.place) for r in records]
    assert places == [f"{tmp_path}/a.jsonl:{number}" for number in numbers]


def test_pieces_on_s3_and_over_several_files(
    put: Callable[[dict[str, bytes]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        f"{n}.jsonl": b"".join(b'{"n": %d}\n' % (100 * n + i) for i in range(12)) for n in range(3)
    }
    monkeypatch.setattr(cutting, "UNIT_BYTES", 50)
    source = sources.find(put(files))
    units = sources.units(source, 0.0)
    assert [unit.index for unit in units] == list(range(len(units))) and len(units) > 6
    assert sum(unit.num_bytes for unit in units) == source.num_bytes
    assert [r.value["n"] for r in read(source)] == [
        100 * n + i for n in range(3) for i in range(12)
    ]


def test_small_files_share_a_unit_and_units_are_never_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(10):
        (tmp_path / f"{n}.txt").write_text("x" * 30)
    monkeypatch.setattr(cutting, "UNIT_BYTES", 100)
    source = sources.find(str(tmp_path))
    assert [len(unit.pieces) for unit in sources.units(source, 0.0)] == [3, 3, 3, 1]
    monkeypatch.setattr(cutting, "UNIT_BYTES", 1)
    monkeypatch.setattr(cutting, "MAX_UNITS", 5)
    assert len(sources.units(source, 0.0)) == 5


def test_jsonl_that_is_broken_says_where(tmp_path: Path) -> None:
    lines = [
        b'{"text": "ok"}',
        b'{"text": ',
        b"[1]",
        b"",
        b'"word"',
        b'{"text": "\xff"}',
        b"[" * 99_999,
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    source = sources.find(str(tmp_path))
    found = [(sources.place_of(source, r.file, r.place), r.problem) for r in read(source)]
    places = [f"{tmp_path}/a.jsonl:{n}" for n in (1, 2, 3, 5, 6, 7)]
    assert [place for place, _ in found] == places
    assert [problem for _, problem in found] == [
        None,
        "is not JSON (Expecting value)",
        "is not a JSON object",
        "is not a JSON object",
        "is not JSON (not UTF-8)",
        "is not JSON (too deep)",
    ]


def test_text_that_is_not_utf8_says_where(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthr\xe9e\n")
    source = sources.find(str(tmp_path))
    (record,) = read(source)
    assert record.problem == "is not UTF-8" and record.value is None
    assert sources.place_of(source, record.file, record.place) == f"{tmp_path}/a.txt:3"


def test_far_places_are_named_by_byte_so_that_a_file_is_not_read_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{}\n" * 10)
    monkeypatch.setattr(reading, "MAX_COUNTED_BYTES", 6)
    source = sources.find(str(tmp_path))
    assert sources.place_of(source, "a.jsonl", 6) == f"{tmp_path}/a.jsonl:3"
    assert sources.place_of(source, "a.jsonl", 9) == f"{tmp_path}/a.jsonl byte 9"


# ---- Parquet and hub ---------------------------------------------------------------------------


def test_parquet_row_groups(
    put: Callable[[dict[str, bytes]], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"messages": [{"role": "user", "content": f"q{n}"}], "n": n} for n in range(25)]
    files = {}
    for name, part in (("a.parquet", rows[:18]), ("b.parquet", rows[18:])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / name, row_group_size=5)
        files[name] = (tmp_path / name).read_bytes()
    monkeypatch.setattr(cutting, "UNIT_BYTES", 1)
    source = sources.find(put(files))
    units = sources.units(source, 0.0)
    groups = [(p.file, p.start, p.end) for unit in units for p in unit.pieces]
    expected = [("a.parquet", n, n + 1) for n in range(4)] + [
        ("b.parquet", n, n + 1) for n in (0, 1)
    ]
    assert groups == expected
    records = read(source)
    assert [record.value for record in records] == rows
    assert [(r.file, r.place) for r in records[16:20]] == [
        ("a.parquet", 16),
        ("a.parquet", 17),
        ("b.parquet", 0),
        ("b.parquet", 1),
    ]
    assert sources.place_of(source, "b.parquet", 1) == "b.parquet row 1"


def test_a_file_that_is_not_parquet_is_named(put: Callable[[dict[str, bytes]], str]) -> None:
    source = sources.find(put({"a.parquet": b"PAR1 and nothing else"}))
    with pytest.raises(SourceError, match=r"corpus/a\.parquet cannot be read as parquet: "):
        sources.units(source, 0.0)


def test_hub_shards_through_datasets_streaming(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_commit: list[tuple[str, str | None]],
) -> None:
    """There is no hub here: `_hub_dataset` gives a real streaming data set of local files."""
    import datasets

    files = []
    for shard in range(3):
        path = tmp_path / f"{shard}.jsonl"
        path.write_text("".join(f'{{"text": "s{shard} r{row}"}}\n' for row in range(4)))
        files.append(str(path))

    def local(name: str, commit: str) -> object:
        assert (name, commit) == ("org/name", "commit of main")
        return datasets.load_dataset(
            "json", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path / "c")
        )

    monkeypatch.setattr(hub, "_dataset", local)
    source = sources.find("org/name")
    assert [len(unit.pieces) for unit in sources.units(source, 0.1)] == [1, 1, 1]
    records = read(source)
    expected = [{"text": f"s{shard} r{row}"} for shard in range(3) for row in range(4)]
    assert [record.value for record in records] == expected
    places = [sources.place_of(source, record.file, record.place) for record in records]
    assert places[5] == "org/name[1] row 1" and len(set(places)) == 12


def test_a_hub_id_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match=r"data\.path=org/no-such cannot be read from the hub"):
        sources.find("org/no-such")
    with pytest.raises(SourceError, match=r"data\.path=org/no-such\S+ cannot be read from the"):
        sources.units(sources.find("org/no-such#" + "a" * 40), 0.0)


# ---- Limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_a_line_beyond_the_limit_is_refused_and_its_end_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(cutting, "UNIT_BYTES", 100)
    monkeypatch.setattr(reading, "LINE_BYTES", 300)
    monkeypatch.setattr(streams, "LINE_BYTES", 300)
    lines = [b'{"text": "%d"}' % n for n in range(8)]
    lines[2] = b'{"text": "' + b"x" * 100_000 + b'"}'
    lines[5] = b'{"text": "' + b"x" * 288 + b'"}'  # 300 bytes
    data = b"\n".join(lines)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    source, read_bytes = sources.find(str(tmp_path)), 0
    storage = type(opened(source.root))
    made = storage.read

    def counted(self: Any, *given: Any, **named: Any) -> bytes:
        nonlocal read_bytes
        found = made(self, *given, **named)
        read_bytes += len(found)
        return found

    monkeypatch.setattr(storage, "read", counted)
    found = read(source)
    bad = [(record.place, record.problem) for record in found if record.problem]
    at = 3 if name.endswith("gz") else (0 if name == "a.txt" else 28)
    assert bad == [(at, "is longer than 256 MiB")]
    if name != "a.txt":
        assert [r.value for r in found if not r.problem] == [
            json.loads(line) for n, line in enumerate(lines) if n != 2
        ]
    assert read_bytes < 3 * len(data)


def test_json_is_too_deep_at_any_place_of_the_program(tmp_path: Path) -> None:
    """The limit is one of depth, not of what is left of Python's stack."""
    deep = [n * "[" + n * "]" for n in (398, 399, 400, 5000)]
    flat = json.dumps([[] for _ in range(5000)])
    text = "".join(f'{{"text": "x", "deep": {value}}}\n' for value in [*deep, flat])
    (tmp_path / "a.jsonl").write_text(text)
    problems = [record.problem for record in read(sources.find(str(tmp_path)))]
    assert problems == [None, None, *["is not JSON (too deep)"] * 2, None]


# ---- Holding out -------------------------------------------------------------------------------


def test_the_held_out_share_is_drawn_by_content(tmp_path: Path) -> None:
    contents = [b"%d" % n for n in range(4000)]

    def held_out(fraction: float) -> set[bytes]:
        split = "hash" if 0 < fraction < 1 else ("eval" if fraction else "train")
        piece = sources.Piece("a.jsonl", 0, 1, split)
        draws = {content: sources.drawn_of(content) for content in contents}
        return {one for one, drawn in draws.items() if sources.is_eval(piece, drawn, fraction)}

    few, some = held_out(0.05), held_out(0.25)
    assert few < some and not held_out(0.0) and len(held_out(1.0)) == 4000
    # 4000 draws: 5 standard deviations of the binomial are 69 and 137.
    assert abs(len(few) - 200) < 69 and abs(len(some) - 1000) < 137
    # In every process, so that none trains on what another one holds out.
    assert sorted(map(int, few))[:8] == [3, 9, 16, 67, 68, 92, 137, 145]


# ---- Row groups --------------------------------------------------------------------------------


def test_a_row_group_is_read_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.bytes(2000).hex() for _ in range(2500)]  # 10 MB
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=len(texts))
    sizes: list[int] = []

    class Counted(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(-1 if size is None else size)
            sizes.append(len(data))
            return data

    source = sources.find(str(tmp_path))
    (unit,) = sources.units(source, 0.0)
    files = SimpleNamespace(open_read=lambda name, etag: Counted(tmp_path / name))
    monkeypatch.setattr(reading, "opened", lambda root: files)
    (piece,) = unit.pieces
    assert [record.value["text"] for record in reading.read_piece(source, piece)] == texts
    assert sum(sizes) > 5e6 and max(sizes) < 4 * reading.PAGE_BYTES
