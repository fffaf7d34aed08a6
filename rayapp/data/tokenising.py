"""Read the pieces of a block and tokenise their records, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from rayapp.data import sources, token_sections, tokens
from rayapp.data.recipe import RowRecipe
from rayapp.data.rendering import Renderer, content_of
from rayapp.data.shapes import read_records
from rayapp.data.token_sections import TokenisedRecord, TokenSection

BATCH_RECORDS, BATCH_SIZE = 32, 2**20  # most records, and characters, tokenised in one call

Numbered = tuple[int, sources.Record]  # the number of a piece of the block, and a record of it


def tokenised(
    recipe: RowRecipe, source: sources.DataSource, pieces: Sequence[sources.Piece]
) -> Iterator[TokenSection]:
    """Yield the sections of a block; memory: a section, a batch of records, the longest line.

    Raises:
        SourceError: a file is not of its format, so that the rest cannot be read.
    """
    yield from token_sections.sections(_records(recipe, source, pieces))


def _records(
    recipe: RowRecipe, source: sources.DataSource, pieces: Sequence[sources.Piece]
) -> Iterator[TokenisedRecord]:
    pads = source.is_table or recipe.version is not None  # the version before dropped all None
    how = (recipe.kind, recipe.template, recipe.reasoning, recipe.special_tokens, pads)
    renderer = _renderer(recipe.tokenizer_url, *how)
    records = (
        (number, record)
        for number, piece in enumerate(pieces)
        for record in read_records(source, piece, recipe.kind, recipe.columns, recipe.values)
    )
    for batch in _batches(records):
        made = renderer.documents([r.value for _, r in batch if r.problem is None])
        made.reverse()
        batch.reverse()
        while batch:  # a record, which may be large, is held no longer than it is needed
            number, record = batch.pop()
            document, problem = (None, record.problem) if record.problem else made.pop()
            place, drawn, values = record.place, 0, record.values
            if document is not None:
                drawn = sources.drawn_of(content_of(record.value, recipe.kind))
            del record
            *earlier, last = document or [None]
            for each in earlier:
                yield TokenisedRecord(number, place, each, problem, drawn, more=True, values=values)
            yield TokenisedRecord(number, place, last, problem, drawn, values=values)


def _batches(records: Iterator[Numbered]) -> Iterator[list[Numbered]]:
    """Yield batches of records to tokenise in one call, limited by number and characters."""
    batch: list[Numbered] = []
    held = 0
    for number, record in records:
        size = _size(record.value)
        if batch and (len(batch) == BATCH_RECORDS or held + size > BATCH_SIZE):
            yield batch
            batch, held = [], 0
        batch.append((number, record))
        held += size
    if batch:
        del record
        yield batch


def _size(value: Any) -> int:
    """Return the number of characters of all text in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 0


@lru_cache(maxsize=2)
def _renderer(tokenizer_url: str, *how: Any) -> Renderer:
    return Renderer(tokens.load_tokenizer(tokenizer_url), *how)
