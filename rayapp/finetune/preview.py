"""Show how the first records of a config's data become documents, before anything is trained.

    for found in preview(check(config, None, 0)):
        found.lengths, found.share_of_loss, runs(found.tokenizer, found.documents[0])

The first records of a few files of each source are read, as in the check; nothing is written.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rayapp.data import first_records, shapes, tokens
from rayapp.data.kinds import ANSWERS, are_labelled, are_pairs, messages_of, problem_of
from rayapp.data.messages import said_by
from rayapp.data.packing import Document, Packed, crossed, pack
from rayapp.data.rendering import Renderer
from rayapp.data.sources import Record, place_of
from rayapp.data.task_items import asked_and_wanted, questions_of, standard_records
from rayapp.finetune.check import CheckedLanguageRun, Input
from rayapp.finetune.ends import described, ends_of
from rayapp.observe.records import Rendered
from rayapp.planner.trained import tokenizer_of

SHOWN, CHARS = 2, 600  # documents of a source, and their characters, in a plan
SEARCHED = 100_000  # records of a source, for the questions of eval.tasks
SAMPLE_BYTES = 2**20  # of the texts that a tokenizer is trained on here; a run takes 16 MiB


@dataclass(frozen=True)
class Preview:
    """What the head of one source becomes."""

    entry: Input
    records: int
    bad: dict[str, int]  # unusable records by reason
    examples: dict[str, str]  # place of the first record of each reason
    notes: dict[str, int]  # documents that lack something of their record, by what
    documents: list[Document]
    roles: list[str]  # of each document of preferences: chosen, rejected, good or bad
    ends: list[str]
    """What ends the answers."""
    packed: Packed
    tokenizer: Any

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [len(document.tokens) for document in self.documents]

    @property
    def share_of_loss(self) -> float:
        """Share of the tokens that bear loss, 0-1."""
        return sum(int(d.loss.sum()) for d in self.documents) / max(1, sum(self.lengths))

    @property
    def duplicates(self) -> int:
        """Documents that repeat an earlier one, token by token."""
        return len(self.documents) - len({d.tokens.tobytes() for d in self.documents})

    def as_dict(self, shown: int) -> dict[str, object]:
        """Return what `rayapp data --json` prints, with so many rendered documents."""
        lengths = self.lengths or [0]
        return {
            "path": self.entry.path,
            "kind": self.entry.kind,
            "format": self.entry.source.format,
            "records": self.records,
            "documents": len(self.documents),
            "bad": self.bad,
            "first_bad": self.examples,
            "notes": self.notes,
            "unused_columns": list(self.entry.unused),
            "ends": self.ends,
            "tokens": {
                "all": sum(lengths),
                "least": min(lengths),
                "median": statistics.median(lengths),
                "most": max(lengths),
                "over_seq_len": sum(length > self.packed.layout.seq_len for length in lengths),
            },
            "share_of_loss": self.share_of_loss,
            "rows": len(self.packed.rows),
            "fill": self.packed.fill,
            "duplicates": self.duplicates,
            "rendered": [
                [{"text": text, "loss": loss} for text, loss in runs(self.tokenizer, document)]
                for document in self.documents[:shown]
            ],
        }


def task_previews(ready: CheckedLanguageRun) -> list[dict[str, Any]]:
    """Return of each of eval.tasks which items tell little, by their places.

    Of `empty` the wanted answer is empty; `trained` are asked in the first SEARCHED records of a
    source, too.
    """
    asked = {
        (task.name, place): list(questions_of(value, task.kind))[-1]
        for task in ready.tasks
        for place, value in task.records
    }
    every, trained, columns = {*asked.values()}, set[tuple[str, ...]](), ready.config.data.columns
    for entry in ready.inputs:
        if not every or entry.kind == "text":  # it has no questions
            continue
        for record in islice(standard_records(entry.source, entry.kind, columns), SEARCHED):
            if record.problem is None and problem_of(record.value, entry.kind) is None:
                trained |= every.intersection(questions_of(record.value, entry.kind))
    return [
        {
            "name": task.name,
            "path": task.task.path,
            "items": len(task.records),
            "empty": [p for p, v in task.records if not asked_and_wanted(v, task.kind)[1].strip()],
            "trained": [place for place, _ in task.records if asked[task.name, place] in trained],
        }
        for task in ready.tasks
    ]


def preview(ready: CheckedLanguageRun) -> list[Preview]:
    """Return a preview of each source of a checked run."""
    own = ready.model.config.get_text_config().vocab_size
    name = tokenizer_of(ready.config, own, ready.model.preset)
    tokenizer = ready.tokenizer or made_tokenizer(ready, name, SAMPLE_BYTES)
    return [_preview(ready, entry, tokenizer) for entry in ready.inputs]


def rendered(ready: CheckedLanguageRun, tokenizer: Any) -> list[Rendered]:
    """Return the first documents of each source, their beginnings where they are long."""
    found = list[Rendered]()
    for entry in ready.inputs:
        every = (each for _, made, _ in _rendered(ready, entry, tokenizer) for each in made or ())
        shown = [beginning(runs(tokenizer, each), CHARS) for each in islice(every, SHOWN)]
        found.append({"path": entry.path, "kind": entry.kind, "documents": shown})
    return found


def system_of(ready: CheckedLanguageRun) -> str:
    """Return the system's message with which the first chats of all sources begin; else ""."""
    found = set()
    for entry in ready.inputs:
        for record in first_records.records(entry.source)[0]:
            value = shapes.standardised(record, entry.kind, ready.config.data.columns).value
            if problem_of(value, entry.kind) is None:
                for first in messages_of(value, entry.kind)[:1]:
                    found.add(said_by(first) if first["role"] == "system" else "")
    return found.pop() if len(found) == 1 else ""


def _rendered(
    ready: CheckedLanguageRun, entry: Input, tokenizer: Any
) -> Iterator[tuple[Record, Document | None, str | None]]:
    """Yield the first records of a source, each with its document and a note, or its problem."""
    data, (records, _) = ready.config.data, first_records.records(entry.source)
    how = (ready.template, data.reasoning, data.special_tokens, entry.source.is_table)
    renderer = Renderer(tokenizer, entry.kind, *how)
    for record in records:
        record = shapes.standardised(record, entry.kind, data.columns, entry.values)
        made = (None, record.problem) if record.problem else renderer.document(record.value)
        yield record, *made


def beginning(document: list[tuple[str, bool]], chars: int) -> list[tuple[str, bool]]:
    """Return the first characters of a document in runs; ` ...` ends one that is longer.

    >>> beginning([("ask ", False), ("answer", True)], 7)
    [('ask ', False), ('ans ...', True)]
    """
    parts: list[tuple[str, bool]] = []
    for text, loss in document:
        if len(text) > chars:
            return [*parts, (f"{text[:chars]} ...", loss)]
        parts.append((text, loss))
        chars -= len(text)
    return parts


def runs(tokenizer: Any, document: Document) -> list[tuple[str, bool]]:
    """Return a document's text in runs: (text, whether its tokens bear loss)."""
    parts: list[tuple[str, bool]] = []
    start = 0
    for end in range(1, len(document.tokens) + 1):
        if end == len(document.tokens) or document.loss[end] != document.loss[start]:
            text = tokenizer.decode(document.tokens[start:end].tolist())
            parts.append((text, bool(document.loss[start])))
            start = end
    return parts


def _preview(ready: CheckedLanguageRun, entry: Input, tokenizer: Any) -> Preview:
    data = ready.config.data
    bad, notes, examples = Counter[str](), Counter[str](), dict[str, str]()
    documents, roles = list[Document](), list[str]()
    made = list(_rendered(ready, entry, tokenizer))
    for record, document, problem in made:
        if document is not None:
            documents += document
            if are_labelled(entry.kind):
                roles.append("good" if record.values[0] else "bad")
            elif are_pairs(entry.kind):
                roles += ANSWERS
            notes.update([problem] if problem else [])
            continue
        assert problem is not None
        bad[problem] += 1
        examples.setdefault(problem, place_of(entry.source, record.file, record.place))
    how = {"best_fit": data.pack, "truncate": data.truncate, "pairs": are_pairs(entry.kind)}
    together = documents
    if are_labelled(entry.kind):
        before = zip(documents, [*documents[-1:], *documents[:-1]], strict=True)
        together = [each for asked, other in before for each in (asked, crossed(asked, other))]
    packed = pack(together, data.seq_len, **how)
    return Preview(
        entry=entry,
        records=len(made),
        bad=dict(bad),
        examples=examples,
        notes=dict(notes),
        documents=documents,
        roles=roles,
        ends=described(ends_of(packed.rows, tokenizer), ready.config, tokenizer),
        packed=packed,
        tokenizer=tokenizer,
    )


def made_tokenizer(ready: CheckedLanguageRun, name: str, sample_bytes: int) -> Any:
    """Make the tokenizer `bytes`, or train one on so many bytes of the sources' texts."""
    if name == "bytes":
        return tokens.byte_tokenizer()
    columns, weights = ready.config.data.columns, sum(entry.weight for entry in ready.inputs)
    texts = (
        text
        for entry in ready.inputs
        for size in [int(sample_bytes * entry.weight / weights)]
        for text in first_records.sample_texts(entry.source, entry.kind, size, columns)
    )
    return tokens.train_bpe(texts, int(name.partition(":")[2]))
