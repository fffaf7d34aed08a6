"""Turn records into documents: the three kinds of data, and which tokens bear loss.

    document, problem = Renderer(load_tokenizer(folder), "chat").document({"messages": [...]})

In `text` every token bears loss, in `prompt` those of the completion. Both kinds begin with the
tokens that the tokenizer puts before a text (BOS), and end with one end-of-text token, which bears
loss too. In `chat` the assistant's tokens bear loss; the template writes begin and end.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from rayapp.data.chat import ChatTemplate
from rayapp.data.control import (
    CONTROL,
    IS_TEXT,
    NOT_POSSIBLE,
    TEXT,
    ControlTokens,
)
from rayapp.data.long_texts import (
    LINE_END,
    PIECE_ENDS,
    chunks_of,
    encoded_line_end,
    is_long,
    parts_of,
    pieces_of,
)
from rayapp.data.packing import Document
from rayapp.data.problems import problem_of
from rayapp.data.shapes import COLUMNS
from rayapp.data.sources import LongText
from rayapp.data.tokens import token_bytes

Tokens: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
# (document, None or a note on what it lacks), or (None, problem)
Made: TypeAlias = tuple[Document | None, str | None]


def content_of(value: Any, kind: str) -> Iterator[bytes]:
    """Yield the content that identifies a valid record: its text columns, and no others.

    >>> list(content_of({"text": "a", "id": 7}, "text")) == list(content_of("a", "text"))
    True
    """
    if kind == "text":
        yield from (part.encode() for part in chunks_of(text_of(value)))
    else:
        columns = [value[name] for name in COLUMNS[kind]]
        yield json.dumps(columns, sort_keys=True, default=str).encode()


def text_of(value: Any) -> str | LongText:
    """Return the text of a valid record of kind text."""
    text = value if isinstance(value, str) else value["text"]
    return text if isinstance(text, LongText) else str(text)


class Renderer:
    """Make documents of one kind with one tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        kind: str,
        template: str = "",
        reasoning: str = "train",
        special_tokens: str = CONTROL,
    ) -> None:
        self.tokenizer, self.kind, self.special_tokens = tokenizer, kind, special_tokens
        self.control = ControlTokens(tokenizer)
        self.bytes_of = token_bytes(tokenizer)
        self.end = tokenizer.eos_token_id
        self.opening, self.adds_space = _opening(tokenizer, self.bytes_of)
        self.line_end = encoded_line_end(tokenizer, self.bytes_of) if self.adds_space else None
        self.chats = ChatTemplate(tokenizer, template, reasoning) if kind == "chat" else None
        if tokenizer.is_fast:  # a tokenizer.json may ask for them
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
        elif kind == "chat":
            raise ValueError(
                f"data.kind=chat is not possible with {type(tokenizer).__name__}: it cannot say "
                "which text a token stands for. Set model.tokenizer to one with a tokenizer.json"
            )

    def document(self, value: Any) -> Made:
        """Return (document, note) or (None, problem); an empty text gives an empty document."""
        (made,) = self.documents([value])
        return made

    def in_parts(self, value: Any) -> Iterator[tuple[Document, str | None, bool]]:
        """Yield (document, note, whether it goes on) for each part of a valid text's document.

        Laid end to end they are the document of `document`; the last has the note. Memory is that
        of two parts.
        """
        held, num_bytes = np.empty(0, np.int32), np.empty(0, np.uint16)
        note, begins = None, True
        for piece, tokens, sizes in self._pieces(text_of(value)):
            note = note or self._note(piece)
            if not len(held) or (tokens == self.end).all():  # these may be the last tokens
                tokens, sizes = np.concatenate([held, tokens]), np.concatenate([num_bytes, sizes])
            else:
                yield self._closed(held, 0, num_bytes, begins, ends=False), None, True
                begins = False
            held, num_bytes = tokens, sizes
        yield self._closed(held, 0, num_bytes, begins), note, False

    @property
    def can_cut(self) -> bool:
        """Whether long texts are encoded in pieces."""
        return not self.adds_space or self.line_end is not None

    def documents(self, values: Sequence[Any]) -> list[Made]:
        """Return `document(value)` for each value; a batch is cheaper than single calls."""
        problems = [problem_of(value, self.kind) for value in values]
        good = [value for value, problem in zip(values, problems, strict=True) if problem is None]
        if self.kind == "text":
            made = self._texts([v if isinstance(v, str) else v["text"] for v in good])
        elif self.kind == "prompt":
            made = self._prompts(good)
        else:
            made = self._chats(good)
        rest = iter(made)
        return [next(rest) if problem is None else (None, problem) for problem in problems]

    def _texts(self, texts: list[str]) -> list[Made]:
        documents: list[Made] = []
        for text, tokens in zip(texts, self._encode(texts), strict=True):
            num_bytes = self._bytes(tokens, text)
            documents.append((self._closed(tokens, 0, num_bytes), self._note(text)))
            del tokens, num_bytes
        return documents

    def _note(self, *texts: str) -> str | None:
        as_text = self.special_tokens == TEXT
        return IS_TEXT if as_text and any(map(self.control.are_in, texts)) else None

    def _prompts(self, values: list[Any]) -> list[Made]:
        prompts = [value["prompt"] for value in values]
        completions = [value["completion"] for value in values]
        encoded = self._encode([*prompts, *completions])
        documents: list[Made] = []
        for place, completion in enumerate(completions):
            before, after = encoded[place], encoded[len(values) + place]
            tokens = np.concatenate([before, after])
            num_bytes = np.concatenate([self.bytes_of[before], self._bytes(after, completion)])
            note = self._note(prompts[place], completion)
            documents.append((self._closed(tokens, len(before), num_bytes), note))
        return documents

    def _encode(self, texts: list[str]) -> list[Tokens]:
        """Return int32 [tokens] of each text, without special tokens around it."""
        if not self.can_cut or not any(map(is_long, texts)):
            return self._encode_whole(texts)
        return [self._encode_long(text) for text in texts]

    def _encode_long(self, text: str) -> Tokens:
        ids = bytearray()
        for _, tokens, _ in self._pieces(text):
            ids += tokens.data
        return np.frombuffer(ids, np.int32)

    def _pieces(self, text: str | LongText) -> Iterator[tuple[str, Tokens, np.ndarray[Any, Any]]]:
        """Yield (text, tokens, bytes per token) of the pieces of a text."""
        if self.line_end is None:
            pieces = pieces_of(parts_of(chunks_of(text)), PIECE_ENDS)
        else:
            pieces = pieces_of([str(text)], [LINE_END])
        first = next(pieces)
        (tokens,) = self._encode_whole([first])
        yield first, tokens, self._bytes(tokens, first)
        before = self.line_end or []
        for piece in pieces:
            (tokens,) = self._encode_whole([("\n" if before else "") + piece])
            tokens = np.ascontiguousarray(tokens[len(before) :])
            yield piece, tokens, self.bytes_of[tokens]

    def _encode_whole(self, texts: list[str]) -> list[Tokens]:
        if self.tokenizer.is_fast:
            encode = self.tokenizer.backend_tokenizer.encode_batch_fast
            with self.control.encoded_as(self.special_tokens):
                encodings = encode(texts, add_special_tokens=False)
            return [np.asarray(encoding.ids, np.int32) for encoding in encodings]
        as_text = self.special_tokens == TEXT
        plain = partial(
            self.tokenizer, add_special_tokens=False, split_special_tokens=as_text, verbose=False
        )
        return [np.asarray(plain(text)["input_ids"], np.int32) for text in texts]

    def _bytes(self, tokens: Tokens, text: str) -> np.ndarray[Any, Any]:
        """Return the bytes per token [n], without the space that some tokenizers put first."""
        num_bytes = self.bytes_of[tokens]
        if self.adds_space and len(tokens) and int(num_bytes.sum()) == len(text.encode()) + 1:
            num_bytes[0] -= 1
        return num_bytes

    def _closed(
        self,
        tokens: Tokens,
        prompt: int,
        num_bytes: np.ndarray[Any, Any],
        begins: bool = True,
        ends: bool = True,
    ) -> Document:
        """Add the opening tokens (BOS) and one end-of-text token, unless the text has them.

        All but the first `prompt` tokens bear loss. A part of a document gets the opening if it
        begins the document, and the end if it ends it.
        """
        count = len(tokens)
        if not count:
            return Document(tokens, np.zeros(0, bool), num_bytes)
        while ends and count > prompt and tokens[count - 1] == self.end:  # it was in the text
            count -= 1
        opening = self.opening if begins else self.opening[:0]
        if len(opening) and np.array_equal(tokens[: len(opening)], opening):  # it was in the text
            opening = opening[:0]
        first = len(opening)
        last = first + count
        ends = ends and self.end is not None
        size = last + ends
        whole, byte_counts = np.empty(size, np.int32), np.zeros(size, np.uint16)
        bears_loss = np.ones(size, bool)
        bears_loss[: first + prompt] = False
        if first:
            whole[:first], byte_counts[:first] = opening, self.bytes_of[opening]
        whole[first:last], byte_counts[first:last] = tokens[:count], num_bytes[:count]
        if ends:
            whole[-1] = self.end
        return Document(whole, bears_loss, byte_counts)

    def _chats(self, chats: Sequence[Mapping[str, Any]]) -> list[Made]:
        assert self.chats is not None
        if self.special_tokens == TEXT:
            marked = [self.control.marked(chat) for chat in chats]
            if any(spans != chat for spans, chat in zip(marked, chats, strict=True)):
                each = zip(chats, marked, strict=True)
                return [self._marked(chat, spans) for chat, spans in each]
        return self._plain_chats(chats)

    def _plain_chats(self, chats: Sequence[Mapping[str, Any]]) -> list[Made]:
        assert self.chats is not None
        rendered = self.chats.render(chats)
        texts = [text for text, _, _ in rendered if text]
        encode = self.tokenizer.backend_tokenizer.encode_batch
        encoded = iter(encode(texts, add_special_tokens=False))
        documents: list[Made] = []
        for text, spans, note in rendered:
            if not text:
                documents.append((None, note))
                continue
            encoding = next(encoded)
            tokens = np.asarray(encoding.ids, np.int32)
            loss = np.zeros(len(tokens), bool)
            for first, last in spans:
                loss[_tokens_of(encoding, len(tokens), first, last)] = True
            documents.append((Document(tokens, loss, self.bytes_of[tokens]), note))
        return documents

    def _marked(self, chat: Mapping[str, Any], marked: Mapping[str, Any]) -> Made:
        """Return the document of a chat in which what is said may hold control tokens' text."""
        assert self.chats is not None
        if marked == chat:
            return self._plain_chats([chat])[0]
        if self.control.take_spaces or self.adds_space:
            return None, NOT_POSSIBLE
        ((text, spans, note),) = self.chats.render([marked])
        if not text:
            return None, note
        tokens, loss = self.control.encode(text, spans)
        return Document(tokens, loss, self.bytes_of[tokens]), note or IS_TEXT


def _tokens_of(encoding: Any, count: int, first: int, last: int) -> slice:
    """Return the tokens of the characters [first, last), with a token that straddles the start.

    Token offsets are ascending, so a binary search looks at some ten of them; `encoding.offsets`
    would create a tuple for every token.
    """
    place, tokens = encoding.token_to_chars, range(count)
    begin = bisect_left(tokens, True, key=lambda i: place(i)[0] >= first or place(i)[1] > first)
    return slice(begin, bisect_left(tokens, True, key=lambda i: place(i)[0] >= last))


def _opening(tokenizer: Any, bytes_of: np.ndarray[Any, Any]) -> tuple[Tokens, bool]:
    """Return the tokens put before a text, int32 [n], and whether a space is added too."""
    around = tokenizer("a", verbose=False)["input_ids"]
    plain = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    first = next((i for i in range(len(around)) if around[i : i + len(plain)] == plain), 0)
    return np.asarray(around[:first], np.int32), int(bytes_of[plain].sum()) == 2
