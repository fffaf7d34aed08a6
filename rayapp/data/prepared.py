"""Prepared data sets: where their rows are, what they were made from, and mixtures of several.

prepared = load(storage / ".prepared" / fingerprint)
rows = prepared.rows("train")
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayapp.data.report import Counts, DataReport, summed
from rayapp.data.rows import TokenRows, stored_bytes
from rayapp.order import fingerprint
from rayapp.storage import Storage, open_storage

SPLITS = ("train", "eval")
USED = "USED"  # written anew whenever a run takes the rows; its time is that of the last use
BLOCKS = "blocks.txt"  # the blocks of tokens that the rows were made of, below the token folder
NOT_STORED = ("sizes", "weights", "sources", "windows", "known")  # fields that no manifest has
MAX_EXAMPLES = 16  # reasons whose first record is named
MAX_REASONS = 5  # reasons in one line
MAX_HASHES = 2**20  # most distinct documents that are compared to count duplicates


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
    windows: int = 0
    """Windows of the training rows, in the order of whose visits the shards are; 0: no windows."""
    known: int = 0
    """Windows that are prepared; the others follow."""

    @property
    def held_out_ends(self) -> tuple[int, ...]:
        """The number of held-out rows up to the end of each source; empty unless several."""
        if len(self.sources) < 2:
            return ()
        return tuple(itertools.accumulate(each["eval"]["rows"] for each in self.sources.values()))

    @property
    def windows_rows(self) -> tuple[tuple[int, ...], ...]:
        """Rows of each window that has some, of each source: `Order.windows`."""
        if not self.windows:
            return ()
        shards, sizes = [], iter([count for _, count in self.shards["train"]])
        for size in self.sizes or (self.num_rows("train"),):
            mine: list[int] = []
            while sum(mine) < size:
                mine.append(next(sizes))
            shards.append(tuple(mine))
        return tuple(shards)

    @property
    def epoch_rows(self) -> int:
        """Rows of an epoch; an estimate while there are windows that are not prepared."""
        rows = self.num_rows("train")
        return round(rows * self.windows / self.known) if self.known else rows

    def rows(self, split: str) -> TokenRows:
        """Open the rows of `train` or `eval`."""
        return TokenRows(open_storage(self.url), self.shards[split], self.seq_len)

    def num_rows(self, split: str) -> int:
        """Number of rows of a split."""
        return int(self.counts[split]["rows"])

    @property
    def folders(self) -> list[str]:
        """Names of the folders that hold the rows; a mixture has one for each source."""
        if not self.weights:
            return [self.fingerprint]
        names = (name for shards in self.shards.values() for name, _ in shards)
        return sorted({name.partition("/")[0] for name in names})

    @property
    def held_out(self) -> int:
        """Number of held-out rows."""
        return self.num_rows("eval")

    @property
    def bad_share(self) -> float:
        """Share of records that are unusable, 0-1."""
        return sum(self.bad.values()) / self.records if self.records else 0.0

    def report(self) -> DataReport:
        """Return the statistics to check before training."""
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
    """Return a prepared data set; None if its manifest is missing or a shard has another size."""
    if not storage.exists("manifest.json"):
        return None
    loaded = {**json.loads(storage.read("manifest.json")), "url": storage.url}
    for split, shards in loaded["shards"].items():
        loaded["shards"][split] = [(name, count) for name, count in shards]
    loaded["examples"] = [(place, why) for place, why in loaded["examples"]]
    prepared = Prepared(**loaded)
    sizes = {entry.name: entry.size for entry in storage.list()}
    shards = [shard for split in SPLITS for shard in prepared.shards[split]]
    seq_len = prepared.seq_len
    whole = all(sizes.get(name) == n * stored_bytes(name, seq_len) for name, n in shards)
    return prepared if whole else None


def mixed(root: Storage, parts: Mapping[str, Prepared], weights: Mapping[str, float]) -> Prepared:
    """Return a mixture of prepared data sets under `root`; its rows are those of each part in turn.

    `parts` are sorted by path. Nothing is written: a part may be in several mixtures.
    """
    shards: dict[str, list[tuple[str, int]]] = {split: [] for split in SPLITS}
    bad: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    parts = dict(sorted(parts.items()))  # so that the order in the config does not matter
    names: dict[str, object] = {"weights": dict(weights)}
    for path, part in parts.items():
        bad.update(part.bad)
        notes.update(part.notes)
        names |= {f"{path} {name}": value for name, value in part.parts.items()}
        for split in SPLITS:
            shards[split] += [(f"{part.fingerprint}/{n}", rows) for n, rows in part.shards[split]]
    documents = [part.counts["train"]["documents"] for part in parts.values()]
    repeated = sum(n * part.duplicates for n, part in zip(documents, parts.values(), strict=True))
    return Prepared(
        url=root.url,
        fingerprint=fingerprint(names),
        parts=names,
        seq_len=next(iter(parts.values())).seq_len,
        shards=shards,
        counts={s: summed(part.counts[s] for part in parts.values()) for s in SPLITS},
        bad=dict(bad),
        examples=[each for part in parts.values() for each in part.examples][:MAX_EXAMPLES],
        records=sum(part.records for part in parts.values()),
        duplicates=repeated / max(sum(documents), 1),
        sizes=tuple(part.num_rows("train") for part in parts.values()),
        weights=tuple(weights[path] for path in parts),
        sources={path: part.report() for path, part in parts.items()},
        notes=dict(notes),
        windows=sum(part.windows for part in parts.values()),
        known=sum(part.known for part in parts.values()),
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
