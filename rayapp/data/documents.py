"""Turn records into documents: the three kinds of data, and which tokens bear loss.

    document, problem = Renderer(load_tokenizer(folder), "chat").document({"messages": [...]})

In `text` every token bears loss, in `prompt` those of the completion. Both kinds begin with the
tokens that the tokenizer puts before a text (BOS), and end with one end-of-text token, which bears
loss too. In `chat` the assistant's tokens bear loss; the template writes begin and end.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from rayapp.data.chat import SPEAKING, ChatTemplate
from rayapp.data.control import (
    CONTROL,
    IS_TEXT,
    NOT_POSSIBLE,
    TEXT,
    ControlTokens,
)
from rayapp.data.messages import said_by, tools_of
from rayapp.data.packing import Document
from rayapp.data.shapes import COLUMNS
from rayapp.data.sources import LongText
from rayapp.data.tokens import token_bytes

AS_TEXT = re.compile(r"\[\s*\{\s*['\"](role|content)['\"]\s*:")  # as a cell of CSV may hold
MAX_ENCODED = 2**20  # most characters encoded in one call
FEW_ENCODED = 2**18  # where words or lines end
CUT_REACH = 64 * 2**10  # characters that are searched for a line end to cut at
LINE_END = re.compile(r"(?<=\S)\n(?=\S)")
WORD_END = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")

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


def chunks_of(text: str | LongText) -> Iterable[str]:
    """Return a text in chunks of which none is much more than MAX_ENCODED characters."""
    if isinstance(text, LongText):
        return text.parts()
    return (text[start : start + MAX_ENCODED] for start in range(0, len(text), MAX_ENCODED))


def problem_of(value: Any, kind: str) -> str | None:
    """Return why a record is no valid document of this kind, or None; needs no tokenizer."""
    if isinstance(value, str):
        return _problem_of_text(value) if kind == "text" else f"is plain text, not {kind}"
    for name in COLUMNS[kind]:
        if name not in value:
            names = ", ".join(map(repr, sorted(value))) or "none"
            return f"has no column {name!r} (it has {names})"
        if kind != "chat":
            if not isinstance(value[name], str | LongText):
                return f"has a {name!r} that is not text"
            if kind == "prompt" and AS_TEXT.match(value[name]):
                return f"has a {name!r} that is a list of messages written as text"
            if problem := _problem_of_text(value[name]):
                return problem
    return _problem_of_chat(value) if kind == "chat" else None


def _problem_of_text(text: str | LongText) -> str | None:
    try:
        for part in chunks_of(text):
            part.encode()
    except UnicodeEncodeError:
        return "has text that is not Unicode (half of a surrogate pair)"
    return None


def _problem_of_chat(chat: Mapping[str, Any]) -> str | None:
    messages = chat["messages"]
    if isinstance(messages, str) or not hasattr(messages, "__iter__") or not len(messages):
        return "has 'messages' that are not a list of messages"
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return "has a message without role and content"
        if message.get("weight") not in (None, 0, 1):
            return "has a message with a weight that is neither 0 nor 1"
        if problem := _problem_of_content(message):
            return problem
    try:
        names = [tool.get("function", tool)["name"] for tool in tools_of(chat)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return "has 'tools' that are not a list of functions with names"
    if not all(isinstance(name, str) for name in names):
        return "has 'tools' that are not a list of functions with names"
    kwargs = chat.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        return "has 'chat_template_kwargs' that are not an object"
    answers = [message for message in messages if message["role"] == "assistant"]
    if answers and all(message.get("weight") == 0 for message in answers):
        return "has no assistant message with a weight above 0"
    return None if answers else "has no assistant message"


def _problem_of_content(message: Mapping[str, Any]) -> str | None:
    """Return why a message's content or calls are invalid; calls or reasoning may be alone."""
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        return "has 'tool_calls' that are not a list of calls of functions with names"
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant" and any(message.get(name) for name in SPEAKING):
            return None
        if "content" in message:
            return "has a message whose content is not text"
        return "has a message without role and content"
    if not isinstance(content, str) and not (
        isinstance(content, list) and all(map(_is_text_part, content))
    ):
        return "has a message whose content is not text"
    return _problem_of_text(said_by(message))


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def parts_of(chunks: Iterable[str]) -> Iterator[str]:
    """Cut a text into parts of MAX_ENCODED characters, most of them less, after line ends.

    It is given in chunks of any size. A line end between two letters is a token's end for the usual
    tokenizers, so that the tokens are those of the whole text. A longer line is cut anywhere.
    """
    text, start = "", 0
    for chunk in chunks:
        text, start = text[start:] + chunk, 0
        while len(text) - start > MAX_ENCODED:
            end = start + MAX_ENCODED
            newline = LINE_END.search(text, max(start + 1, end - CUT_REACH), end)
            end = newline.end() if newline else end
            yield text[start:end]
            start = end
    yield text[start:]


def pieces_of(part: str) -> Iterator[str]:
    """Cut a part after FEW_ENCODED characters or more, where a token ends for usual tokenizers.

    That is after a line end between two letters, or else between a letter and a space.
    """
    start = 0
    while (cut := _cut_of(part, start)) is not None:
        yield part[start:cut]
        start = cut
    yield part[start:]


def _cut_of(part: str, start: int) -> int | None:
    for end in range(start + FEW_ENCODED, len(part), CUT_REACH):
        for pattern in (LINE_END, WORD_END):
            if found := pattern.search(part, max(start + 1, end - CUT_REACH), end):
                return found.end()
    return None


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
        held, note = np.empty(0, np.int32), None
        begins = True
        parts = parts_of(chunks_of(text_of(value)))
        for piece in (piece for part in parts for piece in pieces_of(part)):
            note = note or self._note(piece)
            (tokens,) = self._encode_whole([piece])
            if not len(held) or (tokens == self.end).all():  # these may be the text's last tokens
                held = np.concatenate([held, tokens])
            else:
                yield self._closed(held, 0, self.bytes_of[held], begins, ends=False), None, True
                held, begins = tokens, False
        yield self._closed(held, 0, self.bytes_of[held], begins), note, False

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
        """Return int32 [tokens] of each text, without special tokens around it.

        Encoding takes some 120 bytes of memory per byte of text, so long texts are encoded in
        parts, unless the tokenizer puts a space before each text.
        """
        if self.adds_space or all(len(text) <= MAX_ENCODED for text in texts):
            return self._encode_whole(texts)
        return [self._encode_parts(text) for text in texts]

    def _encode_parts(self, text: str) -> Tokens:
        ids = bytearray()
        for piece in (piece for part in parts_of([text]) for piece in pieces_of(part)):
            ids += self._encode_whole([piece])[0].data
        return np.frombuffer(ids, np.int32)

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
