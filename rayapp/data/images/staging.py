"""Copy a set of images from one storage to another, verify it, and resume interrupted copies.

    report = stage("s3://bucket/imagenet/val", "/lustre/imagenet/val", labels="val.csv")

Every file is read once, decoded, written, and read back; its size and SHA-256 must equal those of
what was read. A ledger below `.staged` in the target records finished files: a file is not copied
again while source and target are unchanged. Files that are damaged or no images are counted, named
and left out. Tar and Parquet files are copied whole, and the images in them are decoded as a check.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256

from rayapp.config import ConfigError
from rayapp.data.images import sources
from rayapp.data.images.augment import problem_of
from rayapp.data.images.labels import Labels, folders_of, labels_at, synsets_at
from rayapp.data.prepared import MAX_EXAMPLES
from rayapp.data.sources import SourceError
from rayapp.storage import Entry, Readable, Storage, StorageError, open_storage
from rayapp.storage.inputs import open_input

LEDGER = ".staged"
SEGMENT_FILES, SEGMENT_S = 5000, 10.0  # ledger intervals: most work that a resumed copy repeats
BLOCK_BYTES = 8 * 2**20
MOST_AT_ONCE = 512  # files
NO_CLASS = "in no folder of a class"
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Done:
    """What was done with one file."""

    target: str
    source_etag: str
    target_etag: str
    size: int
    digest: str
    problem: str | None = None
    """Why the file was left out; None if it was copied."""
    within: tuple[tuple[str, str], ...] = ()
    """(place, reason) of the unusable images in a tar or Parquet file."""
    images: int = 1


@dataclass
class Staged:
    """The result of a copy."""

    source: str
    target: str
    copied: int = 0
    copied_bytes: int = 0
    there: int = 0
    """Files that an earlier command had copied."""
    images: int = 0
    classes: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    """Number of unusable files or images by reason."""
    examples: list[tuple[str, str]] = field(default_factory=list)
    foreign: int = 0
    """Files in the target that are not in the source."""
    foreign_examples: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """Return JSON values."""
        return asdict(self) | {"bad": dict(self.bad)}


class TooManyBad(SourceError):
    """More files than allowed are no images, or damaged."""


def stage(
    source: str,
    target: str,
    *,
    labels: Labels | str | None = None,
    synsets: Sequence[str] | str | None = None,
    bad_images: float = 0.01,
    parallel: int = 32,
    progress: Progress | None = None,
) -> Staged:
    """Copy the images of `source` to `target`, verify them, and resume a copy that was cut off.

    Both are folders or S3 URLs. With `labels`, flat images go to class folders; `synsets` are the
    class names in the order of numeric labels. Both may be given as the path or URL of their file.
    `bad_images` is the share of files, 0-1, that may be unusable. `parallel` is the number of
    files at once. `progress` is called with (bytes done, bytes in all).

    Raises:
        ConfigError: bad_images or parallel is out of range.
        SourceError: nothing is there, or too much of it is unusable.
        LabelError: labels and images do not belong together.
        StorageError: a storage says no, or what was read back is not what was written.
    """
    _check_numbers(bad_images, parallel)
    labels = labels_at(labels) if isinstance(labels, str) else labels
    synsets = synsets_at(synsets) if isinstance(synsets, str) else synsets
    here, there = open_input(source), open_storage(target)
    _check_apart(here, there)
    entries = [one for one in here.list() if one.size and not sources.hidden(one.name)]
    if not entries:
        raise SourceError(f"SOURCE={source} is empty: there is no file in it. Correct it")
    names = [one.name for one in entries]
    format = sources.format_of(names)
    places = _places(names, format, labels, synsets)
    there.check_writable()
    ledger = _Ledger(there)
    present = {one.name: one for one in there.list() if not sources.hidden(one.name)}
    report = Staged(here.url, there.url)
    wanted = {place for place in places.values() if place}
    foreign = sorted(present.keys() - wanted)
    report.foreign, report.foreign_examples = len(foreign), foreign[:MAX_EXAMPLES]
    total, finished = sum(one.size for one in entries), 0
    copy = _Copy(here, there, format, NO_CLASS if labels is None else sources.UNLABELLED)
    classes = set()
    with ledger:
        for entry, done, new in _each(entries, places, ledger, present, copy, parallel):
            finished += entry.size
            _count(report, entry, done, new)
            if new:
                ledger.add(done)
            if not done.problem and format == "folder":
                classes.add(done.target.partition("/")[0])
            if progress:
                progress(finished, total)
            if sum(report.bad.values()) > bad_images * max(len(entries), report.images):
                raise TooManyBad(_too_many(report, len(entries), bad_images))
    report.classes = len(classes)
    return report


def _check_numbers(bad_images: float, parallel: int) -> None:
    problems = []
    if not 0 <= bad_images <= 1:
        problems.append(f"bad_images={bad_images} is not a share: set a number from 0 to 1")
    if not 0 < parallel <= MOST_AT_ONCE:
        problems.append(f"parallel={parallel} is not valid: set 1 to {MOST_AT_ONCE} files at once")
    if problems:
        raise ConfigError(problems)


def _check_apart(here: Readable, there: Storage) -> None:
    first, second = (f"{one.url.rstrip('/')}/" for one in (here, there))
    if first.startswith(second) or second.startswith(first):
        raise SourceError(
            f"TARGET={there.url} is in SOURCE={here.url}, or the other way round: a copy would be "
            "copied. Give folders that lie apart"
        )


def _places(
    names: Sequence[str], format: str, labels: Labels | None, synsets: Sequence[str] | None
) -> dict[str, str | None]:
    """Return the target name of each file; None if it has no class or another format."""
    if format != "folder":
        kept = sources.SUFFIXES[format]
        return {name: name if name.lower().endswith(kept) else None for name in names}
    places: dict[str, str | None] = {name: name if "/" in name else None for name in names}
    flat = [name for name in names if "/" not in name]
    if labels is None:
        if len(flat) == len(names):
            raise SourceError(
                f"SOURCE is flat: its {len(flat):,} files, such as {flat[0]}, lie in no folder of "
                "a class. Give --labels=FILE, or the folder above"
            )
        return places
    for name, label in folders_of(labels, flat, synsets).items():
        places[name] = None if label is None else f"{label}/{name}"
    return places


def _each(
    entries: list[Entry],
    places: dict[str, str | None],
    ledger: _Ledger,
    present: dict[str, Entry],
    copy: _Copy,
    parallel: int,
) -> Iterator[tuple[Entry, Done, bool]]:
    """Yield (file, what was done, whether this command did it) as files finish."""
    waiting: dict[Future[Done], Entry] = {}
    with ThreadPoolExecutor(parallel, thread_name_prefix="stage") as pool:
        try:
            for entry in entries:
                place = places[entry.name]
                known = ledger.of(entry, place, present)
                if known is not None:
                    yield entry, known, False
                    continue
                waiting[pool.submit(copy.file, entry, place)] = entry
                while len(waiting) >= 4 * parallel:
                    yield from _ended(waiting)
            while waiting:
                yield from _ended(waiting)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _ended(waiting: dict[Future[Done], Entry]) -> Iterator[tuple[Entry, Done, bool]]:
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    for future in done:
        entry = waiting.pop(future)
        yield entry, future.result(), True


def _count(report: Staged, entry: Entry, done: Done, new: bool) -> None:
    bad = [(entry.name, done.problem)] if done.problem else list(done.within)
    for place, problem in bad:
        report.bad[problem] += 1
        if len(report.examples) < MAX_EXAMPLES:
            report.examples.append((place, problem))
    report.images += 0 if done.problem else done.images
    if not done.problem and new:
        report.copied += 1
        report.copied_bytes += done.size
    elif not done.problem:
        report.there += 1


def _too_many(report: Staged, count: int, limit: float) -> str:
    shown = "; ".join(f"{place} is {why}" for place, why in report.examples[:5])
    return (
        f"SOURCE={report.source} is unusable in {sum(report.bad.values()):,} of {count:,} files: "
        f"{shown}. Mend them, or allow more with --bad_images (now {limit:.1%})"
    )


class _Copy:
    """Copies one file at a time, on any thread."""

    def __init__(self, here: Readable, there: Storage, format: str, homeless: str) -> None:
        self.here, self.there, self.format = here, there, format
        self.homeless = homeless  # reason for leaving out an image without a target

    def file(self, entry: Entry, place: str | None) -> Done:
        """Copy one file and verify it, unless it is unusable."""
        if self.format != "folder":
            return self._whole(entry, place)
        data, problem = b"", sources.TOO_LARGE if entry.size > sources.MAX_BYTES else None
        if problem is None:
            data = self.here.read(entry.name, 0, entry.size, entry.etag)
            problem = problem_of(data)
        if place is None or problem is not None:
            return Done(place or "", entry.etag, "", entry.size, "", problem or self.homeless)
        self.there.write(place, data)
        digest = sha256(data).hexdigest()
        return self._verified(entry, place, digest)

    def _whole(self, entry: Entry, place: str | None) -> Done:
        """Copy a tar or Parquet file block by block, verify it, and decode its images."""
        if place is None:
            return Done("", entry.etag, "", entry.size, "", f"not a {self.format} file")
        digest = sha256()
        with (
            self.here.open_read(entry.name, entry.etag) as source,
            self.there.open_write(place) as target,
        ):
            while block := source.read(BLOCK_BYTES):
                digest.update(block)
                target.write(block)
        done = self._verified(entry, place, digest.hexdigest())
        bad, count = [], 0
        try:
            for image in sources.read(
                self.there.url, self.format, (sources.ImageFile(place, entry.size),)
            ):
                problem = sources.problem_of(image)
                count += problem is None
                if problem is not None:
                    bad.append((image.name, problem))
        except SourceError:
            self.there.delete(place)
            why = f"no {self.format} file that can be read"
            return Done(place, entry.etag, "", entry.size, "", why)
        values = {**vars(done), "within": tuple(bad), "images": count}
        return Done(**values)

    def _verified(self, entry: Entry, place: str, digest: str) -> Done:
        """Read back what was written, and compare its size and SHA-256.

        Raises:
            StorageError: it is something else.
        """
        again = sha256()
        with self.there.open_read(place) as written:
            while block := written.read(BLOCK_BYTES):
                again.update(block)
        staged = self.there.stat(place)
        if staged is None or staged.size != entry.size or again.hexdigest() != digest:
            why = "what was read back differs from what was written"
            raise StorageError("verify", f"{self.there.url}/{place}", why, "Check the storage")
        return Done(place, entry.etag, staged.etag, entry.size, digest)


class _Ledger:
    """The record of files that earlier commands and this one have finished."""

    def __init__(self, target: Storage) -> None:
        self._storage, self._id = target / LEDGER, uuid.uuid4().hex
        self._new: list[Done] = []
        self._segment, self._written = 0, time.monotonic()
        self._known: dict[tuple[str, str, int], Done] = {}
        for name in sorted((one.modified_s, one.name) for one in self._storage.list()):
            for line in self._storage.read(name[1]).decode().splitlines():
                values = json.loads(line)
                values["within"] = tuple(map(tuple, values["within"]))
                self._keep(Done(**values))

    def _keep(self, done: Done) -> None:
        self._known[(done.target, done.source_etag, done.size)] = done

    def of(self, entry: Entry, place: str | None, present: dict[str, Entry]) -> Done | None:
        """Return what was done with a file, if it and its copy are unchanged since; else None."""
        done = self._known.get((place or "", entry.etag, entry.size))
        if done is None or done.problem is not None:
            return done
        copy = present.get(done.target)
        return done if copy is not None and copy.etag == done.target_etag else None

    def add(self, done: Done) -> None:
        """Record a finished file; write a segment when it is large or old enough."""
        self._new.append(done)
        late = time.monotonic() - self._written > SEGMENT_S
        if len(self._new) >= SEGMENT_FILES or late:
            self.write()

    def __enter__(self) -> _Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Write the rest; after another error, a StorageError of this write is suppressed."""
        with nullcontext() if kind is None else suppress(StorageError):
            self.write()

    def write(self) -> None:
        """Write the new records as one segment."""
        if self._new:
            text = "".join(json.dumps(asdict(done)) + "\n" for done in self._new)
            self._storage.write(f"{self._id}-{self._segment:06d}.jsonl", text.encode())
            self._segment += 1
        self._new, self._written = [], time.monotonic()
