"""Turn records into documents: the tokens of each kind of record, and which tokens bear loss.

    document, problem = Renderer(load_tokenizer(folder), "chat").document({"messages": [...]})

In `text` every token bears loss, in `prompt` those of the completion, in preferences those of each
answer, which has a document of its own. Documents of texts begin with the
tokens that the tokenizer puts before a text (BOS), and end with one end-of-text token, which bears
loss too. In `chat` the assistant's tokens bear loss; the template writes begin and end.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, assert_never

import numpy as np

from rayapp.config.fields import RecordKind
from rayapp.data.chat import ChatTemplate
from rayapp.data.control import CONTROL, IS_TEXT, NOT_POSSIBLE, TEXT, ControlTokens
from rayapp.data.kinds import ANSWERS, EQUAL, KINDS, problem_of, takes_template
from rayapp.data.messages import SILENT
from rayapp.data.packing import Document
from rayapp.data.tokens import token_bytes

MAX_ENCODED = 2**20  # most characters encoded in one call
FEW_ENCODED = 2**18  # where words or lines end
CUT_REACH = 64 * 2**10  # characters that are searched for a line end to cut at
LINE_END = re.compile(r"(?<=\S)\n(?=\S)")
WORD_END = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")
PIECE_ENDS = (LINE_END, WORD_END)  # where a token ends, for usual tokenizers
AS_JSON = json.JSONEncoder(sort_keys=True, default=str)
Tokens: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
Body: TypeAlias = tuple[Tokens, int, int]
"""Tokens of text; those of the prompt before; bytes of the token after it that no text has."""
# (document, None or a note on what it lacks), or (None, problem)
Made: TypeAlias = tuple[Document | None, str | None]


def content_of(value: Any, kind: RecordKind) -> bytes:
    """Return the content that identifies a valid record: its text columns, and no others.

    Pairs are identified by what both answer.

    >>> content_of({"text": "a", "id": 7}, "text") == content_of("a", "text")
    True
    """
    if kind == "text":
        return str(value if isinstance(value, str) else value["text"]).encode()
    if (asks := KINDS[kind].asks) is not None:
        return AS_JSON.encode(asks(value)).encode()
    return AS_JSON.encode([value[name] for name in KINDS[kind].columns]).encode()


class Renderer:
    """Make documents of one kind with one tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        kind: RecordKind,
        template: str = "",
        reasoning: str = "train",
        special_tokens: str = CONTROL,
        pads: bool = False,
    ) -> None:
        self.tokenizer, self.kind, self.special_tokens = tokenizer, kind, special_tokens
        self.control = ControlTokens(tokenizer)
        self.bytes_of = token_bytes(tokenizer)
        self.end = tokenizer.eos_token_id
        self.opening, self.adds_space = _opening(tokenizer, self.bytes_of)
        how = (template, reasoning, pads)
        self.chats = ChatTemplate(tokenizer, *how) if takes_template(kind) else None
        if tokenizer.is_fast:  # a tokenizer.json may ask for them
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
        elif takes_template(kind):
            raise ValueError(
                f"data.kind={kind} is not possible with {type(tokenizer).__name__}: it cannot say "
                "which text a token stands for. Set model.tokenizer to one with a tokenizer.json"
            )

    def document(self, value: Any) -> Made:
        """Return (document, note) or (None, problem); an empty text gives an empty document."""
        (made,) = self.documents([value])
        return made

    def documents(self, values: Sequence[Any]) -> list[Made]:
        """Return `document(value)` for each value; a batch is cheaper than single calls."""
        problems = [problem_of(value, self.kind) for value in values]
        good = [value for value, problem in zip(values, problems, strict=True) if problem is None]
        match self.kind:
            case "text":
                made = self._texts([v if isinstance(v, str) else v["text"] for v in good])
            case "prompt" | "unpaired":
                made = self._prompts(good)
            case "chat":
                made = self._chats(good)
            case "preference":
                each = [{**v, "completion": v[name]} for v in good for name in ANSWERS]
                made = _paired(self._prompts(each))
            case "chat_unpaired":
                made = self._chats([{**v, "messages": _last_alone(v["messages"])} for v in good])
            case "chat_preference":
                each = [{**v, "messages": _last_alone(v[name])} for v in good for name in ANSWERS]
                made = _paired(self._chats(each))
            case _:
                assert_never(self.kind)
        rest = iter(made)
        return [next(rest) if problem is None else (None, problem) for problem in problems]

    def _texts(self, texts: list[str]) -> list[Made]:
        encoded = self._encode(texts)
        added = map(self._added, encoded, texts)
        documents = self._closed([(tokens, 0, n) for tokens, n in zip(encoded, added, strict=True)])
        return list(zip(documents, map(self._note, texts), strict=True))

    def _note(self, *texts: str) -> str | None:
        as_text = self.special_tokens == TEXT
        return IS_TEXT if as_text and any(map(self.control.are_in, texts)) else None

    def _prompts(self, values: list[Any]) -> list[Made]:
        prompts = [value["prompt"] for value in values]
        completions = [value["completion"] for value in values]
        encoded = self._encode([*prompts, *completions])
        bodies: list[Body] = []
        for place, completion in enumerate(completions):
            before, after = encoded[place], encoded[len(values) + place]
            added = self._added(after, completion)
            bodies.append((np.concatenate([before, after]), len(before), added))
        notes = [
            self._note(*texts) if texts[1].strip() else SILENT
            for texts in zip(prompts, completions, strict=True)
        ]
        return list(zip(self._closed(bodies), notes, strict=True))

    def _encode(self, texts: list[str]) -> list[Tokens]:
        """Return int32 [tokens] of each text, without special tokens around it.

        A tokenizer that puts a space before each text gets each text whole.
        """
        if self.adds_space or max(map(len, texts), default=0) <= MAX_ENCODED:
            return self._encode_whole(texts)
        each = (pieces_of(parts_of(text), PIECE_ENDS) for text in texts)
        return [
            np.concatenate([self._encode_whole([piece])[0] for piece in pieces]) for pieces in each
        ]

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

    def _added(self, tokens: Tokens, text: str) -> int:
        """Return 1 if the tokenizer put a space before a text, which its first token holds."""
        if not self.adds_space or not len(tokens):
            return 0
        return int(self.bytes_of[tokens].sum()) == len(text.encode()) + 1

    def _closed(self, bodies: Sequence[Body]) -> list[Document]:
        """Return documents: the opening tokens (BOS), a body, and one end-of-text token.

        Opening and end are left out where the body has them, or has no token. All tokens bear loss
        but those of the opening and the prompt.
        """
        opening, end = self.opening, np.array([] if self.end is None else [self.end], np.int32)
        laid: list[Tokens] = []
        places = []  # of the body's first token, of the one after it, and of the document's end
        for body, prompt, _ in bodies:
            before, count = opening, len(body)
            while len(end) and count > prompt and body[count - 1] == self.end:
                count -= 1
            if len(opening) and (not len(body) or np.array_equal(body[: len(opening)], opening)):
                before = opening[:0]
            after = end[: len(body)]
            laid += before, body[:count], after
            places.append((len(before), len(before) + count, len(before) + count + len(after)))
        tokens = np.concatenate(laid) if laid else np.empty(0, np.int32)
        num_bytes, loss = self.bytes_of[tokens], np.ones(len(tokens), bool)
        documents, start = [], 0
        for (_, prompt, added), (first, last, size) in zip(bodies, places, strict=True):
            spoken = start + first + prompt
            loss[start:spoken] = False
            if added and first + prompt < last:
                num_bytes[spoken] -= added
            num_bytes[start + last : start + size] = 0
            here = slice(start, start + size)
            documents.append(Document(tokens[here], loss[here], num_bytes[here]))
            start += size
        return documents

    def _chats(self, chats: Sequence[Mapping[str, Any]]) -> list[Made]:
        assert self.chats is not None
        if self.special_tokens == TEXT:
            marked = [self.control.marked(chat) for chat in chats]
            if marked != list(chats):
                return [self._marked(*each) for each in zip(chats, marked, strict=True)]
        return self._plain_chats(chats)

    def _plain_chats(self, chats: Sequence[Mapping[str, Any]]) -> list[Made]:
        assert self.chats is not None
        rendered = self.chats.render(chats)
        texts = [text for each, _ in rendered for text, _ in each]
        encode = self.tokenizer.backend_tokenizer.encode_batch
        encoded = iter(encode(texts, add_special_tokens=False))
        made: list[Made] = []
        for each, note in rendered:
            parts: list[tuple[Tokens, np.ndarray[Any, Any]]] = []
            for _, spans in each:
                encoding = next(encoded)
                tokens = np.asarray(encoding.ids, np.int32)
                loss = np.zeros(len(tokens), bool)
                for first, last in spans:
                    loss[_tokens_of(encoding, len(tokens), first, last)] = True
                parts.append((tokens, loss))
            made.append((self._of_chat(parts), note))
        return made

    def _of_chat(self, parts: Sequence[tuple[Tokens, np.ndarray[Any, Any]]]) -> Document | None:
        """Return the last of a chat's documents, which has the others; None if there is none."""
        made = [Document(tokens, loss, self.bytes_of[tokens]) for tokens, loss in parts]
        return replace(made[-1], earlier=tuple(made[:-1])) if made else None

    def _marked(self, chat: Mapping[str, Any], marked: Mapping[str, Any]) -> Made:
        """Return the document of a chat in which what is said may hold control tokens' text."""
        assert self.chats is not None
        if marked == chat:
            return self._plain_chats([chat])[0]
        if self.control.take_spaces or self.adds_space:
            return None, NOT_POSSIBLE
        ((texts, note),) = self.chats.render([marked])
        document = self._of_chat([self.control.encode(*each) for each in texts])
        return document, note or (IS_TEXT if document else None)


def _paired(made: Sequence[Made]) -> list[Made]:
    """Return each pair of documents as the rejected one, whose `earlier` is the chosen one."""
    pairs: list[Made] = []
    for (chosen, note), (rejected, other) in zip(made[::2], made[1::2], strict=True):
        if chosen is None or rejected is None:
            pairs.append((None, note if chosen is None else other))
        elif np.array_equal(chosen.tokens, rejected.tokens):
            pairs.append((None, EQUAL))
        else:
            assert not (chosen.earlier or rejected.earlier), "one answer bears loss"
            pairs.append((replace(rejected, earlier=(chosen,)), note or other))
    return pairs


def _last_alone(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a chat of which only the last message bears loss."""
    *before, last = messages
    read = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in before]
    return [*read, {**last, "weight": 1}]


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


# ---- Long texts --------------------------------------------------------------------------------
# Encoding takes some 120 bytes of memory per byte of text: a long one is encoded in pieces.


def parts_of(text: str) -> Iterator[str]:
    """Cut a text into parts of MAX_ENCODED characters, most of them less, after line ends.

    A line end between two letters is a token's end for the usual tokenizers, so that the tokens are
    those of the whole text. A longer line is cut anywhere.
    """
    start = 0
    while len(text) - start > MAX_ENCODED:
        end = start + MAX_ENCODED
        newline = LINE_END.search(text, max(start + 1, end - CUT_REACH), end)
        end = newline.end() if newline else end
        yield text[start:end]
        start = end
    yield text[start:]


def pieces_of(parts: Iterable[str], ends: Sequence[re.Pattern[str]]) -> Iterator[str]:
    """Cut each part after FEW_ENCODED characters or more, at the next of these ends."""
    for text in parts:
        start = 0
        while (cut := _cut_of(text, start, ends)) is not None:
            yield text[start:cut]
            start = cut
        yield text[start:]


def _cut_of(text: str, start: int, ends: Sequence[re.Pattern[str]]) -> int | None:
    for end in range(start + FEW_ENCODED, len(text), CUT_REACH):
        for pattern in ends:
            if found := pattern.search(text, max(start + 1, end - CUT_REACH), end):
                return found.end()
    return None
