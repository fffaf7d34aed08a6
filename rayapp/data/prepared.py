"""Prepared data sets: where their rows are, what they were made from, and mixtures of several.

prepared = load(storage / ".prepared" / fingerprint)
rows = prepared.rows("train")
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
from pydantic import TypeAdapter

from rayapp.data.kinds import are_pairs
from rayapp.data.report import Counts, DataReport, added, summed
from rayapp.data.token_rows import PLACED, TokenRows, checksum_of, seed_of, stored_bytes
from rayapp.order import SOURCE_ROWS, fingerprint
from rayapp.storage import Storage, open_storage

SPLITS = ("train", "eval")
MANIFEST = "manifest.json"
USED = "USED"  # written anew whenever a run takes the rows; its time is that of the last use
BLOCKS = "blocks.txt"  # the blocks of tokens that the rows were made of, below the token folder
MAX_EXAMPLES = 16  # reasons whose first record is named
MAX_REASONS = 5  # reasons in one line
MAX_HASHES = 2**20  # most distinct documents that are compared to count duplicates

Account = TypeVar("Account")


@dataclass(frozen=True)
class Prepared:
    """A prepared data set: the location of its rows, and their counts."""

    url: str
    fingerprint: str
    parts: dict[str, object]
    seq_len: int
    shards: dict[str, list[tuple[str, int]]]
    counts: dict[str, Counts]
    bad: dict[str, int]
    """Unusable records by reason."""
    examples: list[tuple[str, str]]
    """(place, reason) of the first record of each reason."""
    records: int
    duplicates: float
    """Share of the training documents that repeat an earlier one, 0-1."""
    sizes: tuple[int, ...] = ()
    """Training rows of each source of a mixture."""
    weights: tuple[float, ...] = ()
    sources: dict[str, DataReport] = field(default_factory=dict)
    """The report of each source of a mixture, by its path."""
    notes: dict[str, int] = field(default_factory=dict)
    """Records that are used, but of which something is left out, by what it is."""
    places: tuple[str, ...] = ()
    """Folder of each source of a mixture, or of each packing, below `url`."""
    windows: tuple[int, ...] = ()
    """Windows of each source, in the order of whose visits its shards are; empty: no windows."""
    known: tuple[int, ...] = ()
    """Windows of each source that are prepared; the others follow."""
    packings: tuple[int, ...] = ()
    """Rows of each packing, if there are several; the counts are those of the first."""

    @property
    def columns(self) -> int:
        """Columns whose numbers the rows carry; the same of all sources of a mixture."""
        each = (part for name, part in self.parts.items() if name.rpartition(" ")[2] == "values")
        return len(cast(list[str], next(each, [])))

    @property
    def pairs(self) -> bool:
        """Whether the rows hold chosen and rejected documents in turn."""
        each = (part for name, part in self.parts.items() if name.rpartition(" ")[2] == "kind")
        return are_pairs(str(next(each, "")))

    @property
    def held_out_ends(self) -> tuple[int, ...]:
        """The number of held-out rows up to the end of each source; empty unless several."""
        if len(self.sources) < 2:
            return ()
        return tuple(itertools.accumulate(each["eval"]["rows"] for each in self.sources.values()))

    @property
    def windows_rows(self) -> tuple[tuple[int, ...], ...]:
        """Rows of each window that has some, of each source: `Order.windows`."""
        return tuple(tuple(rows for _, rows in shards) for shards in self.shards_of_windows)

    @property
    def shards_of_windows(self) -> list[list[tuple[str, int]]]:
        """The training shards of each source, one of each window that has rows, with their rows."""
        if not self.windows:
            return []
        found, shards = [], iter(self.shards["train"])
        for size in self._sizes:
            mine: list[tuple[str, int]] = []
            while sum(rows for _, rows in mine) < size:
                mine.append(next(shards))
            found.append(mine)
        return found

    @property
    def follow(self) -> tuple[bool, ...]:
        """Whether windows of each source are not prepared: `Order.follow`."""
        return tuple(known < every for known, every in zip(self.known, self.windows, strict=True))

    @property
    def epoch_rows(self) -> int:
        """Rows of an epoch; an estimate while there are windows that are not prepared."""
        return sum(self.rows_of_sources)

    @property
    def turn_rows(self) -> int:
        """Rows after which the same rows come again: `Order.num_rows`."""
        return sum(self.packings) or self.num_rows("train")

    @property
    def rows_of_sources(self) -> tuple[int, ...]:
        """Training rows of each source: estimates while some of its windows are not prepared."""
        if not self.windows:
            return self._sizes
        each = zip(self._sizes, self.windows, self.known, strict=True)
        return tuple(round(rows * windows / max(known, 1)) for rows, windows, known in each)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.sizes or (self.num_rows("train"),)

    def rows(self, split: str) -> TokenRows:
        """Open the rows of `train` or `eval`."""
        firsts = self._firsts_of_windows() if split == "train" and self.windows else None
        how = self.seq_len, firsts, self.columns, self.pairs
        return TokenRows(open_storage(self.url), self.shards[split], *how)

    def _firsts_of_windows(self) -> list[int]:
        """Return the number of each shard's first row; source j begins at j * SOURCE_ROWS."""
        return [
            source * SOURCE_ROWS + first
            for source, rows in enumerate(self.windows_rows)
            for first in np.cumsum([0, *rows])[:-1].tolist()
        ]

    def num_rows(self, split: str) -> int:
        return int(self.counts[split]["rows"])

    @property
    def folders(self) -> list[str]:
        """Names of the folders that hold the rows; a mixture has one for each source."""
        return sorted({*self.places}) or [self.fingerprint]

    @property
    def held_out(self) -> int:
        return self.num_rows("eval")

    @property
    def bad_share(self) -> float:
        """Share of records that are unusable, 0-1."""
        return sum(self.bad.values()) / self.records if self.records else 0.0

    def report(self) -> DataReport:
        train = self.counts["train"]
        capacity = train["rows"] * self.seq_len
        report = DataReport(
            train=train,
            eval=self.counts["eval"],
            fill=train["tokens"] / capacity if capacity else 0.0,
            loss_share=train["target_tokens"] / train["tokens"] if train["tokens"] else 0.0,
            duplicates=self.duplicates,
            records=self.records,
            bad=self.bad,
            examples=self.examples,
        )
        if self.notes:
            report["notes"] = self.notes
        if self.sources:
            report["sources"] = self.sources
        return report


def unit_name(index: int) -> str:
    """Return the name of a unit's summary, which is written when the unit is done."""
    return f"unit-{index:05d}.json"


def reasons(bad: Mapping[str, int], examples: Sequence[tuple[str, str]]) -> str:
    """Return the most frequent reasons for unusable records, each with its first known place.

    >>> reasons({"is not JSON": 3, "is empty": 1}, [("a:7", "is not JSON"), ("a:9", "is empty")])
    'a:7 is not JSON (and 2 more alike); a:9 is empty'
    """
    places = {why: place for place, why in reversed(examples)}
    shown = [
        f"{places.get(why, 'a record')} {why}" + (f" (and {count - 1:,} more alike)" * (count > 1))
        for why, count in Counter(bad).most_common(MAX_REASONS)
    ]
    if len(bad) > len(shown):
        shown.append(f"{len(bad) - len(shown)} other reasons")
    return "; ".join(shown)


def load(storage: Storage) -> Prepared | None:
    """Return a prepared data set; None if its manifest or a shard is missing or not whole."""
    prepared = account_of(storage, MANIFEST, Prepared)
    if prepared is None:
        return None
    sizes = {entry.name: entry.size for entry in storage.list()}
    shards = [shard for split in SPLITS for shard in prepared.shards[split]]
    size = stored_bytes(prepared.seq_len, prepared.columns)
    whole = all(sizes.get(name) == n * size for name, n in shards)
    return replace(prepared, url=storage.url) if whole else None


def write_account(storage: Storage, name: str, values: Mapping[str, object]) -> None:
    """Write a unit's summary or a manifest, with a checksum that is of its place too."""
    checksum = checksum_of(json.dumps(values).encode(), seed_of(f"{storage.url}/{name}"))
    storage.write(name, json.dumps({**values, "checksum": checksum}, indent=1).encode())


_adapter_of = functools.cache(TypeAdapter[Any])  # which takes a millisecond to make


def account_of(storage: Storage, name: str, kind: type[Account]) -> Account | None:
    """Read what `write_account` wrote; None if it is missing, damaged, or belongs elsewhere."""
    try:
        values = json.loads(storage.read(name))
        checksum = values.pop("checksum", None)
        found: Account = _adapter_of(cast(Any, kind)).validate_python(values)
    except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    if checksum is None:  # as in the version before, whose shards have other names
        return None if PLACED in json.dumps(values) else found
    expected = checksum_of(json.dumps(values).encode(), seed_of(f"{storage.url}/{name}"))
    return found if checksum == expected else None


def mixed(root: Storage, parts: Mapping[str, Prepared], weights: Mapping[str, float]) -> Prepared:
    """Return a mixture of prepared data sets under `root`; its rows are those of each part in turn.

    Rows of windows are numbered by source. `parts` are sorted by path. Nothing is written: a part
    may be in several mixtures.
    """
    parts = dict(sorted(parts.items()))  # so that the order in the config does not matter
    names = parts_of_mixture({path: part.parts for path, part in parts.items()}, weights)
    documents = [part.counts["train"]["documents"] for part in parts.values()]
    repeated = sum(n * part.duplicates for n, part in zip(documents, parts.values(), strict=True))
    return Prepared(
        url=root.url,
        fingerprint=fingerprint(names),
        parts=names,
        seq_len=next(iter(parts.values())).seq_len,
        shards={split: _shards_below(parts.values(), split) for split in SPLITS},
        counts={s: summed(part.counts[s] for part in parts.values()) for s in SPLITS},
        bad=added(part.bad for part in parts.values()),
        examples=[each for part in parts.values() for each in part.examples][:MAX_EXAMPLES],
        records=sum(part.records for part in parts.values()),
        duplicates=repeated / max(sum(documents), 1),
        sizes=tuple(part.num_rows("train") for part in parts.values()),
        weights=tuple(weights[path] for path in parts),
        sources={path: part.report() for path, part in parts.items()},
        notes=added(part.notes for part in parts.values()),
        places=tuple(part.fingerprint for part in parts.values()),
        windows=tuple(count for part in parts.values() for count in part.windows),
        known=tuple(count for part in parts.values() for count in part.known),
    )


def _shards_below(parts: Iterable[Prepared], split: str) -> list[tuple[str, int]]:
    """Return the shards of data sets in turn, each with the folder of its data set."""
    return [(f"{part.fingerprint}/{n}", rows) for part in parts for n, rows in part.shards[split]]


def parts_of_mixture(
    parts: Mapping[str, Mapping[str, object]], weights: Mapping[str, float]
) -> dict[str, object]:
    """Return the named parts of a mixture's fingerprint, from those of each source by its path."""
    each = {f"{path} {name}": value for path in parts for name, value in parts[path].items()}
    return {"weights": dict(weights)} | each


def repacked(root: Storage, packings: Sequence[Prepared]) -> Prepared:
    """Return several packings under `root` as one data set; its rows are those of each in turn."""
    first = packings[0]
    held_out = _shards_below(packings[:1], "eval")
    parts = first.parts | {"packings": len(packings)}
    return replace(
        first,
        url=root.url,
        fingerprint=fingerprint(parts),
        parts=parts,
        shards={"train": _shards_below(packings, "train"), "eval": held_out},
        places=tuple(part.fingerprint for part in packings),
        packings=tuple(part.num_rows("train") for part in packings),
    )


def duplicate_share(units: Iterable[np.ndarray[Any, Any]], limit: int = MAX_HASHES) -> float:
    """Return the share of documents that repeat another one, from their hashes uint64 [d].

    It is exact up to `limit` different documents. Beyond that, documents are sampled by their hash:
    all copies of a document are in the sample or none, so that the share stays unbiased.

    >>> duplicate_share([np.array([1, 2, 3], np.uint64), np.array([2, 2], np.uint64)])
    0.4
    """
    kept, copies, level = np.empty(0, np.uint64), np.empty(0, np.int64), 0
    for hashes in units:
        hashes = hashes[hashes % np.uint64(2**level) == 0]
        every = np.concatenate([kept, hashes])
        weights = np.concatenate([copies, np.ones(len(hashes), np.int64)])
        kept, places = np.unique(every, return_inverse=True)
        copies = np.bincount(places, weights, minlength=len(kept)).astype(np.int64)
        while len(kept) > limit:
            level += 1
            stays = kept % np.uint64(2**level) == 0
            kept, copies = kept[stays], copies[stays]
    total = int(copies.sum())
    return (total - len(kept)) / max(total, 1)
