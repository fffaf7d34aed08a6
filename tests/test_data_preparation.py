"""Check that every document is in the rows exactly once, whoever makes them and however often."""

from __future__ import annotations

import gzip
import json
import os
import signal
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import corpora
import numpy as np
import pyarrow as pa
import pytest
from test_data_stream import ray_cluster  # noqa: F401  a fixture
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from rayapp import order
from rayapp.data import (
    preparation as prepare,
)
from rayapp.data import (
    rendering,
    sources,
    tokenising,
    tokens,
    unit_rows,
)
from rayapp.data import (
    token_sections as sections,
)
from rayapp.data.packing import IGNORE, Document
from rayapp.data.prepared import BLOCKS, USED, Prepared, load
from rayapp.data.recipe import RowRecipe
from rayapp.data.rendering import Renderer, content_of
from rayapp.data.sources import cutting
from rayapp.data.token_rows import local_steps
from rayapp.storage import Storage, open_storage
from rayapp.storage.processes import machine

S = 16  # positions of a row


def words(number: int) -> str:
    """Return a text of 1 to 60 letters that no other document has."""
    return f"{number:03d} " + "abcdefghij"[: number % 7] * (number % 9)


VALUES: dict[str, Callable[[int], dict[str, Any]]] = {
    "text": lambda n: {"text": words(n) if n % 11 else ""},
    "prompt": lambda n: {"prompt": f"Q{n}?", "completion": words(n)},
    "chat": lambda n: {
        "messages": [
            {"role": "user", "content": f"Q{n}?"},
            {"role": "assistant", "content": words(n)},
        ]
    },
    "apart": lambda n: {
        "messages": [m for k in range(1 + n % 3) for m in VALUES["chat"](n + 300 * k)["messages"]]
    },
}
APART = (  # a template whose answers are written otherwise where the chat goes on
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}:{% else %}"
    "{{ '' if loop.last else '~' }}{{ m.content }}.{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    tokens.save_tokenizer(tokens.byte_tokenizer(), open_storage(folder))
    return folder


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "UNIT_BYTES", 500)


def write_jsonl(path: Path, values: list[Any]) -> sources.DataSource:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return sources.find(str(path))


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_url: str) -> RowRecipe:
    """Return a recipe of 90 texts in about 6 units, a tenth of them held out."""
    source = write_jsonl(tmp_path / "data.jsonl", [VALUES["text"](n) for n in range(90)])
    digest = tokens.tokenizer_digest(tokens.load_tokenizer(tokenizer_url))
    return RowRecipe(source, None, "text", tokenizer_url, digest, 0, S, True, False, 0.1)


def jobs_of(recipe: RowRecipe) -> list[tuple[str, sources.ReadUnit]]:
    fraction = 0.0 if recipe.eval_source else recipe.eval_fraction
    jobs = [("train", unit) for unit in sources.units(recipe.source, fraction)]
    if recipe.eval_source:
        jobs += [("eval", unit) for unit in sources.units(recipe.eval_source, 1.0)]
    return jobs


def make(recipe: RowRecipe, root: Storage, only: slice = slice(None)) -> Storage:
    """Prepare units here, one after the other, as the tasks do; return the folder."""
    storage = root / recipe.fingerprint
    for index, (origin, unit) in list(enumerate(jobs_of(recipe)))[only]:
        prepare.UnitTask(index, origin, unit).run(recipe, root.url, recipe.fingerprint)
    return storage


def here(recipe: RowRecipe, path: Path) -> Prepared:
    """Prepare everything without Ray: `prepare` finds no unit missing."""
    root = open_storage(str(path))
    make(recipe, root)
    return prepare.prepare(recipe, root)


def contents(storage: Storage) -> dict[str, bytes]:
    """Return all files but the manifest, which names its own place, and the time of use."""
    names = {entry.name for entry in storage.list()} - {"manifest.json", USED, BLOCKS}
    return {name: storage.read(name) for name in sorted(names)}


# ---- The ledger --------------------------------------------------------------------------------


def expected_documents(recipe: RowRecipe) -> dict[str, list[Document]]:
    """Return the documents of each split, read and made one by one."""
    how = recipe.kind, recipe.template
    renderer = Renderer(tokens.load_tokenizer(recipe.tokenizer_url), *how)
    found: dict[str, list[Document]] = {"train": [], "eval": []}
    for origin, unit in jobs_of(recipe):
        source = recipe.source if origin == "train" else recipe.eval_source
        assert source is not None
        for piece in unit.pieces:
            for record in sources.read_piece(source, piece):
                document, problem = renderer.document(record.value)
                assert document is not None, problem
                drawn = sources.drawn_of(content_of(record.value, recipe.kind))
                fraction = recipe.eval_fraction
                held_out = origin == "eval" or sources.is_eval(piece, drawn, fraction)
                found["eval" if held_out else "train"] += document
    return found


def segments_of(rows: np.ndarray[Any, Any]) -> list[tuple[bytes, bytes]]:
    """Return (inputs, labels) of every segment of every row, in order."""
    found = []
    for row in rows:
        for number in range(1, int(row["segments"].max()) + 1):
            here = row["segments"] == number
            found.append((row["input_ids"][here].tobytes(), row["labels"][here].tobytes()))
        padding = row["segments"] == 0
        assert (row["labels"][padding] == IGNORE).all() and not row["input_ids"][padding].any()
    return found


def pieces_of(document: Document, truncate: bool) -> list[tuple[bytes, bytes]]:
    """Cut a document as it must be in the rows: S inputs and the next S tokens as labels."""
    labels = np.where(document.loss, document.tokens, np.int32(IGNORE))
    starts = range(0, len(document.tokens) - 1, S)
    cut = [
        (document.tokens[a : a + S][: len(labels) - 1 - a], labels[a + 1 : a + 1 + S])
        for a in starts
    ]
    return [(a.tobytes(), b.tobytes()) for a, b in (cut[:1] if truncate else cut)]


MORE: list[dict[str, Any]] = [{}, {"pack": False}, {"packing": 1, "eval_fraction": 0.0}]


@pytest.mark.parametrize("kind", ["text", "prompt", "chat", "apart"])
@pytest.mark.parametrize("more", MORE, ids=str)
def test_each_document_of_a_row_has_the_numbers_of_its_record(
    recipe: RowRecipe,
    tmp_path: Path,
    kind: str,
    more: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenising, "BATCH_SIZE", 30)  # some texts are made in parts
    numbers = {"reward": lambda n: n / 3, "margin": lambda n: -n}
    given = [VALUES[kind](n) | {name: of(n) for name, of in numbers.items()} for n in range(90)]
    bad = [VALUES[kind](90), VALUES[kind](91) | {"margin": 1, "reward": "much"}]
    source = write_jsonl(tmp_path / "kind.jsonl", [*given, *bad])
    apart = kind == "apart"
    recipe = replace(recipe, source=source, kind="chat" if apart else kind)
    recipe = replace(recipe, template=APART if apart else "", **more)
    plain, recipe = recipe, replace(recipe, values=("margin", "reward"))
    assert plain.fingerprint != recipe.fingerprint
    assert plain.tokens_key(source) != recipe.tokens_key(source)
    prepared = here(recipe, tmp_path / "out")
    assert prepared.columns == 2 and sum(prepared.bad.values()) == 2
    why = {reason.split(",")[0]: place for place, reason in prepared.examples}
    assert why["has no column 'margin'"].endswith("kind.jsonl:91")
    assert why["has a 'reward' that is not a finite number"].endswith("kind.jsonl:92")
    renderer = Renderer(tokens.load_tokenizer(recipe.tokenizer_url), recipe.kind, recipe.template)
    wanted = Counter[tuple[bytes, bytes, bytes]]()
    for number, value in enumerate(given):
        document, _ = renderer.document(value)
        of = np.array([-number, number / 3], np.float32).tobytes()
        wanted.update((*piece, of) for each in document or () for piece in pieces_of(each, False))
    found = Counter[tuple[bytes, bytes, bytes]]()
    for split in ("train", "eval"):
        rows = prepared.rows(split)
        records = rows.read(np.arange(len(rows)))
        assert records["values"].shape == (len(rows), 2, S)
        for row, segments in zip(records, map(segments_of, records[:, None]), strict=True):
            used = row["segments"] > 0
            _, first, which = np.unique(
                row["segments"][used], return_index=True, return_inverse=True
            )
            of = row["values"][:, used][:, first]  # [2, documents]
            assert (row["values"][:, used] == of[:, which]).all()
            assert not row["values"][:, ~used].any()
            found.update((*s, v.tobytes()) for s, v in zip(segments, of.T, strict=True))
    assert found == wanted


def test_without_columns_all_that_is_stored_is_as_before(recipe: RowRecipe, tmp_path: Path) -> None:
    """The digests are those of the code before rows could carry columns."""
    values = [VALUES["prompt"](n) | {"reward": n} for n in range(90)]
    source = write_jsonl(tmp_path / "data.jsonl", values)
    recipe = replace(recipe, source=source, kind="prompt", tokenizer_digest="bytes")
    prepared = here(recipe, tmp_path / "out")
    rows, blocks = blake2b(digest_size=8), blake2b(digest_size=8)
    for name, data in contents(open_storage(prepared.url)).items():
        rows.update(name.encode() + data)
    for path in sorted((tmp_path / "out" / "tokens" / recipe.tokens_key(source)).rglob("*/*")):
        stored, first = path.read_bytes(), sections.HEADER.size
        _, size, _ = sections.HEADER.unpack(stored[:first])  # of the only section
        section = pa.BufferReader(stored[first : first + size])
        blocks.update(pa.CompressedInputStream(section, sections.CODEC).read())
    names = prepared.fingerprint, recipe.tokens_key(source)
    assert names == ("6ff6c3c153754921", "448a490a3312edf3")
    assert rows.hexdigest() == "e0335dfc511bfc89" and blocks.hexdigest() == "576f0945c676552b"


@pytest.mark.parametrize("kind", ["text", "prompt", "chat", "apart"])
@pytest.mark.parametrize(("pack", "truncate"), [(True, False), (False, False), (True, True)])
def test_every_document_is_in_the_rows_once(
    recipe: RowRecipe, tmp_path: Path, kind: str, pack: bool, truncate: bool
) -> None:
    source = write_jsonl(tmp_path / "kind.jsonl", [VALUES[kind](n) for n in range(90)])
    apart = kind == "apart"
    recipe = replace(recipe, source=source, kind="chat" if apart else kind, pack=pack)
    recipe = replace(recipe, truncate=truncate, template=APART if apart else "")
    assert len(jobs_of(recipe)) >= 3
    prepared = here(recipe, tmp_path / "out")
    documents = expected_documents(recipe)
    assert len(documents["eval"]) > 2 and prepared.records == 90 and not prepared.bad
    assert sum(map(len, documents.values())) == (180 if apart else 90)
    assert sum(prepared.notes.values()) == (60 if apart else 0)
    for split in ("train", "eval"):
        rows = prepared.rows(split)
        assert len(rows) == prepared.num_rows(split)
        records = rows.read(np.arange(len(rows)))
        in_rows = segments_of(records)
        left = Counter(in_rows)
        for document in documents[split]:  # reassembled in order, piece by piece
            for piece in pieces_of(document, truncate):
                assert left[piece] > 0, document
                left[piece] -= 1
        assert not left.total(), "rows hold what no document holds"
        firsts = [pieces_of(document, truncate)[:1] for document in documents[split]]
        order_of = {first[0]: number for number, first in enumerate(firsts) if first}
        begun = [order_of[s] for s in in_rows if s in order_of]
        if not pack:
            assert begun == sorted(begun), "rows do not follow the documents"
        counts = prepared.counts[split]
        assert counts["documents"] == len(documents[split])
        assert counts["empty"] == sum(len(d.tokens) == 0 for d in documents[split])
        assert counts["target_tokens"] == (records["labels"] != IGNORE).sum()
        assert counts["target_bytes"] == records["target_bytes"].sum()
        if not truncate:
            bearing = [d.num_bytes[1:][d.loss[1:]].sum() for d in documents[split] if len(d.tokens)]
            assert counts["target_bytes"] == sum(bearing)
        if not pack:
            assert len(in_rows) == len(rows)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("pack", [True, False])
def test_every_epoch_trains_on_every_pair_of_tokens_once(
    recipe: RowRecipe, tmp_path: Path, world: int, pack: bool
) -> None:
    """No two documents share a word: each pair taken goes back to its place in its document."""
    lengths = [n * 7 % 45 for n in range(60)]  # words: 0 to 44, a row holds 16
    ends = np.cumsum(lengths)
    end_of_text = int(ends[-1])
    vocabulary = {f"w{word}": word for word in range(end_of_text)}
    vocabulary[tokens.END_OF_TEXT] = end_of_text
    split = Tokenizer(WordLevel(vocabulary, unk_token=tokens.END_OF_TEXT))
    split.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, eos_token=tokens.END_OF_TEXT)
    tokens.save_tokenizer(tokenizer, open_storage(str(tmp_path / "words")))
    documents = [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
    texts = [" ".join(f"w{word}" for word in document) for document in documents]
    recipe = replace(
        recipe,
        source=write_jsonl(tmp_path / "words.jsonl", [{"text": text} for text in texts]),
        tokenizer_url=str(tmp_path / "words"),
        eval_fraction=0.0,
        pack=pack,
    )
    prepared = here(recipe, tmp_path / "out")
    assert len(prepared.shards["train"]) > 3
    expected = [list(pairwise([*document, end_of_text])) for document in documents]
    place_of = {word: (n, k) for n, d in enumerate(documents) for k, word in enumerate(d)}
    rows = prepared.rows("train")
    plan = order.Order.for_epochs(len(rows), rows_per_step=10, micro_batch=2, seed=5, epochs=3)
    assert len(rows) % 10  # steps lie across the ends of epochs
    ledger: list[Any] = [[[None] * len(pairs) for pairs in expected] for _ in range(3)]
    ranks = [local_steps(rows, plan, rank, world, 0) for rank in range(world)]
    for batch in (batch for together in zip(*ranks, strict=True) for batch in together):
        assert (batch.labels[batch.segments == 0] == IGNORE).all()
        for i, j in np.argwhere(batch.positions != order.EMPTY):
            epoch = (batch.step * 10 + int(batch.positions[i, j])) // len(rows)
            for number in range(1, int(batch.segments[i, j].max()) + 1):
                there = batch.segments[i, j] == number
                pairs = np.stack([batch.input_ids[i, j][there], batch.labels[i, j][there]], 1)
                document, first = place_of[int(pairs[0, 0])]
                place = slice(first, first + len(pairs))
                assert ledger[epoch][document][place] == [None] * len(pairs)
                ledger[epoch][document][place] = [tuple(pair) for pair in pairs.tolist()]
    assert ledger == [expected] * 3


def test_the_report_counts_what_a_person_checks(recipe: RowRecipe, tmp_path: Path) -> None:
    report = here(recipe, tmp_path / "out").report()
    train, rows = report["train"], report["train"]["rows"]
    assert report["fill"] == train["tokens"] / (rows * S) and 0.8 < report["fill"] <= 1
    assert report["loss_share"] == 1.0 and report["records"] == 90 and report["bad"] == {}
    assert sum(train["lengths"].values()) == train["documents"] - train["empty"]


def test_a_single_text_file_is_trained_on_and_held_out_whole(
    recipe: RowRecipe, tmp_path: Path
) -> None:
    text = "".join(f"line {n} {words(n)}\n" for n in range(99))
    (tmp_path / "one.txt").write_text(text)
    recipe = replace(recipe, source=sources.find(str(tmp_path / "one.txt")), eval_fraction=0.2)
    prepared = here(recipe, tmp_path / "out")
    size = {s: prepared.counts[s]["target_bytes"] for s in ("train", "eval")}
    documents = prepared.counts["train"]["documents"] + prepared.counts["eval"]["documents"]
    assert sum(size.values()) == len(text) - documents  # the first byte of each is no target
    assert abs(size["eval"] - 0.2 * len(text)) < 30


def test_a_file_of_its_own_is_held_out(recipe: RowRecipe, tmp_path: Path) -> None:
    held_out = write_jsonl(tmp_path / "eval.jsonl", [VALUES["text"](n) for n in range(200, 240)])
    recipe = replace(recipe, eval_source=held_out, eval_fraction=0.5)  # which then has no effect
    prepared = here(recipe, tmp_path / "out")
    assert prepared.counts["train"]["documents"] == 90
    assert prepared.counts["eval"]["documents"] == 40
    documents = expected_documents(replace(recipe, eval_fraction=0.0))
    for split in ("train", "eval"):
        rows = prepared.rows(split)
        expected = Counter(p for d in documents[split] for p in pieces_of(d, False))
        assert Counter(segments_of(rows.read(np.arange(len(rows))))) == expected


def splits_of(recipe: RowRecipe, path: Path) -> dict[str, Counter[bytes]]:
    """Prepare, and return the documents of each split by their labels."""
    prepared = here(replace(recipe, seq_len=128, pack=False), path)
    found = {}
    for split in ("train", "eval"):
        rows = prepared.rows(split)
        segments = segments_of(rows.read(np.arange(len(rows))))
        found[split] = Counter(labels for _, labels in segments)
    return found


@pytest.mark.parametrize("kind", ["text", "prompt", "chat"])
def test_all_copies_of_a_document_are_held_out_or_none(
    recipe: RowRecipe, tmp_path: Path, kind: str
) -> None:
    """Also with another value in a column that is not trained on, and in another order of keys."""
    values = [VALUES[kind](n) for n in range(1, 91)]
    copies = [dict(reversed([*value.items(), ("id", n)])) for n, value in enumerate(values)]
    source = write_jsonl(tmp_path / "copies.jsonl", [*values, *copies, *values])
    found = splits_of(replace(recipe, source=source, kind=kind), tmp_path / "out")
    assert len(found["eval"]) > 2 and set(found["eval"].values()) == {3}
    assert not found["eval"].keys() & found["train"].keys()


def test_a_line_put_first_and_another_name_move_no_other_document(
    recipe: RowRecipe, tmp_path: Path
) -> None:
    values = [VALUES["text"](n) for n in range(90)]
    before = splits_of(recipe, tmp_path / "before")
    named = write_jsonl(tmp_path / "renamed.jsonl", values)
    assert splits_of(replace(recipe, source=named), tmp_path / "renamed") == before
    longer = write_jsonl(tmp_path / "longer.jsonl", [{"text": "put first"}, *values])
    after = splits_of(replace(recipe, source=longer), tmp_path / "longer")
    added = (after["train"] + after["eval"]) - (before["train"] + before["eval"])
    assert added.total() == 1
    for split in ("train", "eval"):
        assert not before[split] - after[split], f"a document left {split}"


# ---- The same bytes, whoever makes them ---------------------------------------------------------


@pytest.mark.usefixtures("ray_cluster")
def test_ray_makes_the_same_bytes_as_one_process(
    recipe: RowRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 1 task at a time and with 2; the driver itself reads no record."""
    here(recipe, tmp_path / "here")
    expected = contents(open_storage(str(tmp_path / "here")) / recipe.fingerprint)
    assert len(expected) >= 9

    def unread(*args: Any) -> Any:
        raise AssertionError("the driver read the data")

    monkeypatch.setattr(sources, "read_piece", unread)
    seen: list[tuple[int, int]]
    for concurrency in (1, 2):
        root = open_storage(str(tmp_path / f"ray-{concurrency}"))
        seen = []
        prepared = prepare.prepare(recipe, root, concurrency, lambda *at: seen.append(at))  # noqa: B023
        assert contents(root / recipe.fingerprint) == expected
        size = recipe.source.num_bytes
        assert (
            len(seen) == len(jobs_of(recipe)) and seen[-1] == (size, size) and seen == sorted(seen)
        )
        assert prepare.prepare(recipe, root) == prepared


@pytest.mark.usefixtures("ray_cluster")
def test_what_was_cut_off_is_finished(
    recipe: RowRecipe,
    tmp_path: Path,
) -> None:
    """A preparation that ended after 2 units, and one that lost summaries and its manifest."""
    whole = here(recipe, tmp_path / "here")
    expected = contents(open_storage(whole.url))
    root = open_storage(str(tmp_path / "torn"))
    storage = make(recipe, root, slice(2))
    seen: list[tuple[int, int]] = []
    prepared = prepare.prepare(recipe, root, 2, lambda *at: seen.append(at))
    assert contents(storage) == expected and len(seen) == len(jobs_of(recipe)) - 2
    for name in ("unit-00001.json", "unit-00003.json", "manifest.json"):
        storage.delete(name)
    assert prepare.prepare(recipe, root) == prepared and contents(storage) == expected
    assert replace(prepared, url=whole.url) == whole


@pytest.mark.usefixtures("ray_cluster")
def test_shards_that_were_truncated_or_lost_are_made_again(
    recipe: RowRecipe,
    tmp_path: Path,
) -> None:
    prepared = here(recipe, tmp_path / "out")
    storage = open_storage(prepared.url)
    expected = contents(storage)
    for name in ("train-00000.placed.rows", "train-00002.placed.rows"):
        storage.write(name, expected[name][:-7])
    storage.delete("train-00003.rows")
    again = prepare.prepare(recipe, open_storage(str(tmp_path / "out")))
    assert again == prepared and contents(storage) == expected


@pytest.mark.usefixtures("ray_cluster")
def test_two_preparations_at_once(
    recipe: RowRecipe,
    tmp_path: Path,
) -> None:
    here(recipe, tmp_path / "here")
    root, made = open_storage(str(tmp_path / "both")), []
    threads = [
        threading.Thread(target=lambda: made.append(prepare.prepare(recipe, root, 1)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2 and made[0] == made[1]
    expected = contents(open_storage(str(tmp_path / "here")) / recipe.fingerprint)
    assert contents(root / recipe.fingerprint) == expected


@pytest.mark.usefixtures("ray_cluster")
def test_s3_gives_the_same_rows(
    recipe: RowRecipe,
    tmp_path: Path,
    s3_bucket: str,
) -> None:
    """Data, tokenizer and rows on S3."""
    local = here(recipe, tmp_path / "here")
    bucket = open_storage(f"s3://{s3_bucket}")
    (bucket / "in").write("data.jsonl", (tmp_path / "data.jsonl").read_bytes())
    tokens.save_tokenizer(tokens.byte_tokenizer(), bucket / "tokenizer")
    remote = replace(
        recipe, source=sources.find(f"{bucket.url}/in"), tokenizer_url=f"{bucket.url}/tokenizer"
    )
    prepared = prepare.prepare(remote, bucket / "prepared", 2)
    assert prepared.counts == local.counts and prepared.shards == local.shards
    for split in ("train", "eval"):
        ids = np.arange(local.num_rows(split))
        assert (prepared.rows(split).read(ids) == local.rows(split).read(ids)).all()
    changed = order.differences(local.parts, prepared.parts)
    assert changed == ["files"], "an etag is no digest, nothing else differs"


@pytest.mark.full
def test_memory_is_that_of_one_unit(
    recipe: RowRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "UNIT_BYTES", 100_000)
    source = write_jsonl(
        tmp_path / "big.jsonl", [{"text": words(n % 90) * 20} for n in range(2000)]
    )
    recipe = replace(recipe, source=source)
    jobs = jobs_of(recipe)
    assert len(jobs) >= 7
    make(recipe, open_storage(str(tmp_path / "warm")), slice(2))

    def peak(units: slice) -> int:
        tracemalloc.start()
        make(recipe, open_storage(str(tmp_path / f"out{units.stop}")), units)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(slice(7)) < 1.25 * peak(slice(2))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json", "a.csv"])
def test_a_stream_is_packed_in_windows_and_keeps_every_document(
    recipe: RowRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    values = [VALUES["text"](n) for n in range(90)]
    lines = "".join(json.dumps(value) + "\n" for value in values)
    data = {
        "a.jsonl.gz": gzip.compress(lines.encode()),
        "a.json": json.dumps(values).encode(),
        "a.csv": "".join(["text\n", *(f'"{value["text"]}"\n' for value in values)]).encode(),
    }[name]
    (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(unit_rows, "BATCH_TOKENS", 250)
    packed = []
    lay_out = unit_rows.lay_out
    monkeypatch.setattr(
        unit_rows, "lay_out", lambda *a, **k: (packed.append(len(a[0])), lay_out(*a, **k))[1]
    )
    recipe = replace(recipe, source=sources.find(str(tmp_path / name)))
    prepared = here(recipe, tmp_path / "out")
    assert len(jobs_of(recipe)) == 1 and len(packed) > 8 and max(packed) < 60
    found = {
        piece
        for split in ("train", "eval")
        for piece in segments_of(prepared.rows(split).read(np.arange(prepared.num_rows(split))))
    }
    documents = expected_documents(recipe)
    assert found == {p for each in documents.values() for d in each for p in pieces_of(d, False)}
    for split, each in documents.items():
        assert prepared.counts[split]["documents"] == len(each) > 2
    assert prepared.records == 90 and 0 < prepared.duplicates < 0.2  # the empty texts


@pytest.mark.usefixtures("ray_cluster")
def test_a_file_that_breaks_off_ends_the_preparation_by_name(
    recipe: RowRecipe, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text('[{"text": "x"},\n{"text": "y"')
    broken = replace(recipe, source=sources.find(str(tmp_path / "a.json")))
    with pytest.raises(sources.SourceError) as caught:
        prepare.prepare(broken, open_storage(str(tmp_path / "out")))
    assert str(caught.value) == (
        f"{tmp_path}/a.json is not a JSON array: Expecting ',' delimiter at line 2"
    )


def test_large_records_are_tokenised_few_at_a_time(
    recipe: RowRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising, "BATCH_SIZE", 1000)
    sizes = [400, 1, 400, 400, 5000, 400, *[2] * 40]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ""}]
    values = [{"messages": [turns[0], {**turns[1], "content": "x" * size}]} for size in sizes]
    source = write_jsonl(tmp_path / "large.jsonl", values)
    monkeypatch.setattr(cutting, "UNIT_BYTES", 10**6)
    seen: list[int] = []
    made = Renderer.documents
    monkeypatch.setattr(
        Renderer, "documents", lambda self, v: (seen.append(len(v)), made(self, v))[1]
    )
    prepared = here(replace(recipe, source=source, kind="chat"), tmp_path / "out")
    assert prepared.records == len(sizes)
    assert seen == [3, 1, 1, 32, 9]


@pytest.mark.full
@pytest.mark.parametrize("name", ["long.jsonl", "long.jsonl.gz"])
def test_long_texts_in_parts_give_the_rows_of_the_whole(
    recipe: RowRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    values = [{"text": f"{n} " + 'é\u2028 \\ " 😀\n' * (n % 7) ** 3, "id": n} for n in range(60)]
    lines = "".join(json.dumps(v, ensure_ascii=v["id"] % 2 == 0) + "\n" for v in values)
    lines += json.dumps({"text": "half \ud83d of it " * 40}) + "\n"
    data = lines.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    recipe = replace(recipe, source=sources.find(str(tmp_path / name)))
    whole = here(recipe, tmp_path / "whole")
    for module, constant in (
        (rendering, "MAX_ENCODED"),
        (rendering, "FEW_ENCODED"),
        (rendering, "CUT_REACH"),
        (tokenising, "BATCH_SIZE"),
        (sections, "SECTION_TOKENS"),
        (unit_rows, "SPOOL_TOKENS"),
    ):
        monkeypatch.setattr(module, constant, 50)
    parts = here(recipe, tmp_path / "parts")
    folders = [open_storage(str(tmp_path / f)) / recipe.fingerprint for f in ("whole", "parts")]
    assert contents(folders[0]) == contents(folders[1])
    assert parts.records == whole.records == 61
    assert parts.bad == {"has text that is not Unicode (half of a surrogate pair)": 1}
    again = here(replace(recipe, seq_len=2 * S), tmp_path / "parts")  # from the stored tokens
    assert again.counts["train"]["tokens"] == parts.counts["train"]["tokens"]


@pytest.mark.full
@pytest.mark.usefixtures("ray_cluster")
def test_a_part_that_ends_every_process_is_tried_a_few_times_and_named(
    recipe: RowRecipe, tmp_path: Path
) -> None:
    """As a record does that takes more memory than there is."""
    log, driver = tmp_path / "attempts", os.getpid()

    class Deadly(RowRecipe):
        def __getattribute__(self, name: str) -> Any:
            if name == "pad_id" and os.getpid() != driver:
                with log.open("a") as file:
                    file.write("x")
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getattribute__(name)

    unit = sources.units(recipe.source, recipe.eval_fraction)[-1]
    deadly = Deadly(**{field.name: getattr(recipe, field.name) for field in fields(recipe)})
    root = open_storage(str(tmp_path / "out"))
    make(recipe, root, slice(unit.index))
    with pytest.raises(sources.SourceError) as caught:
        prepare.prepare(deadly, root, 1)
    piece = unit.pieces[0]
    assert str(caught.value) == (
        f"{tmp_path}/data.jsonl bytes {piece.start} to {piece.end} cannot be prepared: the "
        "process that reads it died 4 times, as when its memory is full. Split the large records "
        "there, or leave them out"
    )
    assert log.read_text() == "x" * 4


# ---- Tokens are made once ----------------------------------------------------------------------

FIRST_ROWS = {  # digests of the rows that the first version made, by corpus and most units
    ("jsonl", 4096): "91b5774ed0d2f2de",
    ("text", 4096): "d2422767b500ab5e",
    ("one", 4096): "70d08ae03703073e",
    ("gz", 4096): "f628a8841abea2e4",
    ("csv", 4096): "40bb3c50a086e18d",
    ("parquet", 4096): "9c72704d3328f5c1",
    ("prompt", 4096): "ff87b93bb95f806d",
    ("chat", 4096): "5576f340f80dd78e",
    ("jsonl", 3): "b94ef493fe75ab3f",
    ("text", 3): "f168ceae5e14e751",
    ("one", 3): "b56acbeece06d55e",
    ("gz", 3): "f628a8841abea2e4",
    ("csv", 3): "40bb3c50a086e18d",
    ("parquet", 3): "3ed95c0552a453c3",
    ("prompt", 3): "9fdc324c1d866e9d",
    ("chat", 3): "06ed16f08b50e0b1",
}


@pytest.mark.parametrize(("name", "most"), FIRST_ROWS)
def test_rows_are_those_of_the_first_version(
    recipe: RowRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(cutting, "MAX_UNITS", most)
    source = sources.find(corpora.write(tmp_path / name, name))
    kind = name if name in ("prompt", "chat") else "text"
    recipe = replace(recipe, source=source, kind=kind)
    prepared = here(recipe, tmp_path / "out")
    assert corpora.rows_digest(open_storage(prepared.url), 10 * S + 4) == FIRST_ROWS[name, most]
    if name == "jsonl":
        places = [place for place, _ in prepared.examples]
        assert places == [f"{tmp_path}/jsonl/0.jsonl:{n}" for n in (31, 32, 33, 34)]


@pytest.mark.parametrize("name", ["jsonl", "gz", "chat"])
def test_rows_that_are_written_in_windows_from_a_spool_are_the_same(
    recipe: RowRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = sources.find(corpora.write(tmp_path / name, name))
    recipe = replace(recipe, source=source, kind="chat" if name == "chat" else "text")
    whole = here(recipe, tmp_path / "out")
    monkeypatch.setattr(unit_rows, "SPOOL_TOKENS", 50)
    monkeypatch.setattr(unit_rows, "BATCH_BYTES", 3 * (10 * S + 4))
    files: list[int] = []
    made = unit_rows.FileSlices.__init__
    monkeypatch.setattr(unit_rows.FileSlices, "__init__", lambda *a: (files.append(1), made(*a))[1])
    again = here(recipe, tmp_path / "again")
    assert contents(open_storage(again.url)) == contents(open_storage(whole.url)) and files


@pytest.mark.parametrize("units", [slice(2), slice(None)])
def test_shards_of_the_version_before_are_read_and_gone_on_with(
    recipe: RowRecipe, tmp_path: Path, units: slice
) -> None:
    """Two units of it, and the others of this one; or a whole data set."""
    whole = here(recipe, tmp_path / "out")
    found = here(recipe, tmp_path / "earlier")
    storage = open_storage(found.url)
    corpora.make_earlier(storage, 10 * S + 4, units)
    if units.stop:
        storage.delete("manifest.json")
    found = prepare.prepare(recipe, open_storage(str(tmp_path / "earlier")))
    ends = [name.partition(".")[2] for name, _ in found.shards["train"]]
    assert ends[:2] == ["rows", "rows"] and ends[2] == ("placed.rows" if units.stop else "rows")
    ids = np.arange(whole.num_rows("train"))
    assert (found.rows("train").read(ids) == whole.rows("train").read(ids)).all()


ANY_JSON = [b"", b"{", b"null", b"[]", b"7", b'"x"', b"{}", b'{"shards": 1}', b"[" * 10**5, b"\xff"]


def damaged_accounts(text: bytes) -> Iterator[bytes]:
    """Yield other contents of a unit's summary or a manifest."""
    yield from ANY_JSON
    yield text[: len(text) // 2]
    account = json.loads(text)
    for name in account:
        for value in (None, [], {}, "x", -1, [["x"]]):
            if account[name] != value:
                yield json.dumps({**account, name: value}).encode()
    for split, shards in account["shards"].items():
        for other in (shards[::-1], shards[1:], shards[:1] * 2):
            moved = {**account["shards"], split: other}
            yield json.dumps({**account, "shards": moved}).encode()


@pytest.mark.parametrize("name", ["manifest.json", "unit-00001.json"])
def test_a_damaged_account_is_a_missing_one(recipe: RowRecipe, tmp_path: Path, name: str) -> None:
    """Of a data set it is made again from those of its units, of a unit with its rows."""
    whole = here(recipe, tmp_path / "out")
    root, storage = open_storage(str(tmp_path / "out")), open_storage(whole.url)
    text = storage.read(name)
    for data in damaged_accounts(text):
        storage.write(name, data)
        if name != "manifest.json":
            storage.delete("manifest.json")
            units = prepare.whole_units(storage, len(jobs_of(recipe)), S)
            assert sorted(units) == [n for n in range(len(jobs_of(recipe))) if n != 1], data
            make(recipe, root, slice(1, 2))
        assert prepare.prepare(recipe, root) == whole, data
        assert storage.read(name) == text


def test_what_belongs_elsewhere_is_made_again(recipe: RowRecipe, tmp_path: Path) -> None:
    """Summaries that changed places, a file of hashes that is gone, another data set's files."""
    whole = here(recipe, tmp_path / "out")
    root, storage = open_storage(str(tmp_path / "out")), open_storage(whole.url)
    every = set(range(len(jobs_of(recipe))))

    def kept() -> set[int]:
        return set(prepare.whole_units(storage, len(every), S))

    one, two = (storage.read(f"unit-0000{n}.json") for n in (1, 2))
    storage.write("unit-00001.json", two)
    storage.write("unit-00002.json", one)
    assert kept() == every - {1, 2}
    storage.delete("hashes-00003.bin")
    storage.write("hashes-00004.bin", b"")
    assert kept() == every - {1, 2, 3, 4}
    other = replace(recipe, eval_fraction=0.3)
    storage = open_storage(here(other, tmp_path / "out").url)
    for entry in (root / recipe.fingerprint).list():
        storage.write(entry.name, (root / recipe.fingerprint).read(entry.name))
    assert load(storage) is None and not kept()


@pytest.mark.parametrize("found", [*ANY_JSON, b'{"machine": 1}', "ours"])
def test_a_damaged_claim_is_nobodys(recipe: RowRecipe, tmp_path: Path, found: bytes | str) -> None:
    whole = here(recipe, tmp_path / "out")
    root = open_storage(str(tmp_path / "again"))
    blocks = [e.name for e in open_storage(str(tmp_path / "out")).list() if "tokens/" in e.name]
    pid = {"machine": machine(), "pid": "../self", "process": None, "id": ""}
    claim = json.dumps(pid).encode() if isinstance(found, str) else found
    for name in blocks:
        root.write(f"{name}.claim", claim)
    assert here(recipe, tmp_path / "again").counts == whole.counts
    assert not [entry.name for entry in root.list() if entry.name.endswith(".claim")]


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of records of each call of the tokenizer."""
    calls: list[int] = []
    made = Renderer.documents
    monkeypatch.setattr(
        Renderer, "documents", lambda self, v: (calls.append(len(v)), made(self, v))[1]
    )
    return calls


@pytest.mark.parametrize("name", ["jsonl", "text", "gz", "parquet"])
def test_other_rows_of_the_same_documents_take_their_tokens(
    recipe: RowRecipe, tmp_path: Path, tokenised: list[int], name: str
) -> None:
    folder = Path(corpora.write(tmp_path / name, name))
    recipe = replace(recipe, source=sources.find(str(folder)))
    here(recipe, tmp_path / "out")
    whole = sum(tokenised)
    for changed in (
        {"seq_len": 32},
        {"eval_fraction": 0.3},
        {"truncate": True},
        {"pack": False},
        {"pad_id": 3},
        {"eval_fraction": 0.0, "eval_source": recipe.source},
    ):
        tokenised.clear()
        other = replace(recipe, **changed)
        assert here(other, tmp_path / "out").url.endswith(other.fingerprint)
        assert not tokenised, changed
        here(other, tmp_path / f"alone {other.fingerprint}")
        alone = contents(
            open_storage(str(tmp_path / f"alone {other.fingerprint}")) / other.fingerprint
        )
        assert contents(open_storage(str(tmp_path / "out")) / other.fingerprint) == alone
    tokenised.clear()
    last = sorted(folder.iterdir())[-1]
    renamed = last.rename(folder / f"renamed {last.name}")
    here(replace(recipe, source=sources.find(str(folder))), tmp_path / "out")
    assert not tokenised
    if name in ("jsonl", "text"):
        added = renamed.read_bytes().replace(b"b", b"_")
        (folder / f"added {last.name}").write_bytes(added)
        here(replace(recipe, source=sources.find(str(folder))), tmp_path / "out")
        assert 0 < sum(tokenised) < whole / 2


@pytest.mark.parametrize(
    "changed",
    [
        {"tokenizer_digest": "other"},
        {"kind": "prompt"},
        {"columns": {"text": "id"}},
        {"version": 9},
    ],
)
def test_other_tokens_are_made_anew(
    recipe: RowRecipe, tmp_path: Path, tokenised: list[int], changed: dict[str, Any]
) -> None:
    here(recipe, tmp_path / "out")
    tokenised.clear()
    here(replace(recipe, **changed), tmp_path / "out")
    assert tokenised


def test_a_unit_that_was_cut_off_takes_the_blocks_that_are_there(
    recipe: RowRecipe, tmp_path: Path, tokenised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "MAX_UNITS", 2)
    expected = here(recipe, tmp_path / "expected")
    whole = sum(tokenised)
    tokenised.clear()
    made = prepare.tokenised

    def dies(*given: Any) -> Any:
        if len(tokenised) >= 3:
            raise KeyboardInterrupt
        return made(*given)

    monkeypatch.setattr(prepare, "tokenised", dies)
    root = open_storage(str(tmp_path / "out"))
    with pytest.raises(KeyboardInterrupt):
        make(recipe, root)
    monkeypatch.setattr(prepare, "tokenised", made)
    again = here(recipe, tmp_path / "out")
    assert again.counts == expected.counts and sum(tokenised) == whole
    assert contents(open_storage(again.url)) == contents(open_storage(expected.url))


# ---- Fingerprints ------------------------------------------------------------------------------


def test_each_part_changes_the_fingerprint_and_is_named(recipe: RowRecipe, tmp_path: Path) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", [VALUES["text"](1)])
    bpe = tokens.train_bpe(iter(["hello hello"]), 262)
    changes: dict[str, RowRecipe] = {
        "files": replace(recipe, source=other),
        "eval_files": replace(recipe, eval_source=other),
        "tokenizer": replace(recipe, tokenizer_digest=tokens.tokenizer_digest(bpe)),
        "pad_id": replace(recipe, pad_id=1),
        "seq_len": replace(recipe, seq_len=S + 1),
        "kind": replace(recipe, kind="prompt"),
        "pack": replace(recipe, pack=False),
        "truncate": replace(recipe, truncate=True),
        "eval_fraction": replace(recipe, eval_fraction=0.2),
    }
    for name, changed in changes.items():
        assert order.differences(recipe.parts(), changed.parts()) == [name]
    assert len({recipe.fingerprint, *(r.fingerprint for r in changes.values())}) == 10
    moved = replace(recipe, source=replace(recipe.source, root="/elsewhere"), tokenizer_url="/t")
    assert moved.fingerprint == recipe.fingerprint


def test_a_line_added_to_a_file_is_another_data_set(recipe: RowRecipe, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(path.read_bytes() + b'{"text": "more"}\n')
    changed = replace(recipe, source=sources.find(str(path)))
    assert order.differences(recipe.parts(), changed.parts()) == ["files"]


# ---- Bad records -------------------------------------------------------------------------------


def test_bad_records_are_counted_by_reason_with_places(recipe: RowRecipe, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    good = [json.dumps(VALUES["text"](n)) for n in range(60)]
    for number in (3, 17, 18, 40, 41, 42, 58):
        good[number] = {3: "{", 17: "[1]", 58: '{"text": "\\ud83d"}'}.get(number, '{"words": "x"}')
    path.write_text("\n".join(good))
    prepared = here(replace(recipe, source=sources.find(str(path))), tmp_path / "out")
    assert prepared.bad == {
        "is not JSON (Expecting property name enclosed in double quotes)": 1,
        "is not a JSON object": 1,
        "has no column 'text' (it has 'words')": 4,
        "has text that is not Unicode (half of a surrogate pair)": 1,
    }
    assert [place for place, _ in prepared.examples] == [f"{path}:{n}" for n in (4, 18, 19, 59)]
    assert prepared.examples[1][1] == "is not a JSON object" and prepared.records == 60
    assert prepared.bad_share == 7 / 60
    made = prepared.counts["train"]["documents"] + prepared.counts["eval"]["documents"]
    assert made == 53
