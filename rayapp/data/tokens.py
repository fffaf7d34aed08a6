"""Turn records into token documents: tokenizers, the three kinds of data, what bears loss.

    tokenizer = load_tokenizer(folder)
    document, problem = Renderer(tokenizer, "chat").document({"messages": [...]})

text: every token bears loss. prompt: the completion does. Both begin with what the tokenizer puts
before a text (BOS) and end with one end-of-text token, which bears loss too. chat: what the
assistant says does, by the template's own `{% generation %}` marks where it has them, else by the
text that each turn adds to the rendered prefix; begin and end are the template's.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rayapp.packing import Document
from rayapp.storage import Storage, open_storage

END_OF_TEXT = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = [END_OF_TEXT, "<|im_start|>", "<|im_end|>"]
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".distcp")
# Some templates write today's date. Rows must not depend on the day they are made, so such a
# template sees the date that Llama 3.1's own uses where it is given none.
FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%d', '26') | replace('%b', 'Jul') "
    "| replace('%B', 'July') | replace('%m', '07') | replace('%Y', '2024') | replace('%y', '24') "
    "| replace('%A', 'Friday') | replace('%a', 'Fri') | replace('%H', '00') "
    "| replace('%M', '00') | replace('%S', '00') }}{%- endmacro -%}"
)
COLUMNS = {"text": ("text",), "prompt": ("prompt", "completion"), "chat": ("messages",)}

logger = logging.getLogger("rayapp.data")

Tokens: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
Made: TypeAlias = tuple[Document | None, str | None]  # (document, None) or (None, problem)


def train_bpe(texts: Iterator[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer that exports as tokenizer.json; deterministic in `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def byte_tokenizer() -> Any:
    """Return a tokenizer of one token a byte."""
    return train_bpe(iter([""]), vocab_size=256 + len(SPECIALS))


def _wrap(tokenizer: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: Any, storage: Storage) -> None:
    """Write the tokenizer's files into a storage folder."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                storage.write(path.relative_to(folder).as_posix(), path.read_bytes())


@lru_cache(maxsize=4)
def load_tokenizer(url: str) -> Any:
    """Load a tokenizer from a local or s3:// folder, or a hub id; once per process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tasks fork and share cores
    if "://" not in url:
        return _from_folder(url)
    storage = open_storage(url)
    with tempfile.TemporaryDirectory() as folder:
        for entry in storage.list():
            if "/" not in entry.name and not entry.name.endswith(WEIGHTS):
                (Path(folder) / entry.name).write_bytes(storage.read(entry.name))
        return _from_folder(folder)


def _from_folder(url: str) -> Any:
    """Load from a folder, or a hub id.

    What save_tokenizer left has no model beside it to decide the class: looking it up by
    AutoTokenizer would import torch, 2 CPU seconds and 130 MiB in every process that prepares data.
    """
    settings = Path(url) / "tokenizer_config.json"
    saved = settings.is_file() and not (Path(url) / "config.json").exists()
    if saved and json.loads(settings.read_bytes()).get("tokenizer_class") == "TokenizersBackend":
        from transformers import TokenizersBackend

        return TokenizersBackend.from_pretrained(url)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(url)


def tokenizer_digest(tokenizer: Any) -> str:
    """Return 16 hex digits of what decides a token sequence: rules, special tokens, template."""
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        del rules["truncation"], rules["padding"]  # state of the last call, not rules
    else:
        rules = sorted(tokenizer.get_vocab().items())
    ids = tokenizer.bos_token_id, tokenizer.eos_token_id
    parts = json.dumps([rules, tokenizer.chat_template, ids])
    return blake2b(parts.encode(), digest_size=8).hexdigest()


def token_bytes(tokenizer: Any) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Return how many UTF-8 bytes each token stands for: uint16 [vocabulary]; special tokens 0.

    Byte-level tokens hold one letter per byte; sentencepiece-like ones write a space as U+2581 and
    a raw byte as <0x0A>; tokens added to either are plain text.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_tokens, *SPECIALS}
    special |= {token.content for token in added.values() if token.special}
    byte_level = tokenizer.is_fast and '"ByteLevel"' in json.dumps(
        json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder")
    )
    table = np.zeros(len(tokens), np.uint16)
    for index, token in enumerate(tokens):
        if token is None or token in special:
            continue
        if index in added:
            table[index] = len(token.encode())
        elif byte_level:
            table[index] = len(token)
        elif len(token) == 6 and token.startswith("<0x"):
            table[index] = 1
        else:
            table[index] = len(token.replace("\u2581", " ").encode())
    return table


def kind_of(columns: Mapping[str, Any]) -> str | None:
    """Return the kind whose columns are all there, or None."""
    for kind in ("chat", "prompt", "text"):
        if all(name in columns for name in COLUMNS[kind]):
            return kind
    return None


def problem_of(value: Any, kind: str) -> str | None:
    """Say what keeps a record from being a document of this kind, or None; needs no tokenizer."""
    if isinstance(value, str):
        return _problem_of_text(value) if kind == "text" else f"is plain text, not {kind}"
    for name in COLUMNS[kind]:
        if name not in value:
            found = ", ".join(map(repr, sorted(value))) or "none"
            return f"has no column {name!r} (it has {found})"
        if kind != "chat":
            if not isinstance(value[name], str):
                return f"has a {name!r} that is not text"
            if problem := _problem_of_text(value[name]):
                return problem
    return _problem_of_messages(value["messages"]) if kind == "chat" else None


def _problem_of_text(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has text that is not Unicode (half of a surrogate pair)"
    return None


def _problem_of_messages(messages: Any) -> str | None:
    if isinstance(messages, str) or not hasattr(messages, "__iter__") or not len(messages):
        return "has 'messages' that are not a list of messages"
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            return "has a message without role and content"
        if not isinstance(message["content"], str):
            return "has a message whose content is not text"
        if problem := _problem_of_text(message["content"]):
            return problem
    return None if any(m["role"] == "assistant" for m in messages) else "has no assistant message"


class Renderer:
    """Make documents of one kind with one tokenizer."""

    def __init__(self, tokenizer: Any, kind: str) -> None:
        self.tokenizer, self.kind = tokenizer, kind
        self.bytes_of = token_bytes(tokenizer)
        self.end = tokenizer.eos_token_id
        self.opening, self.adds_space = _opening(tokenizer, self.bytes_of)
        template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
        self.template = (FIXED_DATE if "strftime_now" in template else "") + template
        self.turn_ends = tuple(filter(None, map(str, tokenizer.get_added_vocab())))
        self.marked = GENERATION.search(template) is not None
        self.specials = dict(tokenizer.special_tokens_map)
        if kind == "chat" and not template:
            raise ValueError(
                "data.kind=chat is without a template: the tokenizer has no chat_template. "
                "Set model.tokenizer to one that has, or use prompt and completion"
            )
        if tokenizer.is_fast:  # a tokenizer.json may ask for them
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
        elif kind == "chat":
            raise ValueError(
                f"data.kind=chat is not possible with {type(tokenizer).__name__}: it cannot say "
                "which text a token stands for. Set model.tokenizer to one with a tokenizer.json"
            )

    def document(self, value: Any) -> tuple[Document | None, str | None]:
        """Return (document, None) or (None, problem); an empty text is a document of no tokens."""
        (made,) = self.documents([value])
        return made

    def documents(self, values: Sequence[Any]) -> list[tuple[Document | None, str | None]]:
        """Return what `document` would for each value; several at once cost less."""
        problems = [problem_of(value, self.kind) for value in values]
        good = [value for value, problem in zip(values, problems, strict=True) if problem is None]
        if self.kind == "text":
            made = self._texts([v if isinstance(v, str) else v["text"] for v in good])
        elif self.kind == "prompt":
            made = self._prompts(good)
        else:
            made = self._chats([list(value["messages"]) for value in good])
        rest = iter(made)
        return [next(rest) if problem is None else (None, problem) for problem in problems]

    def _texts(self, texts: list[str]) -> list[Made]:
        documents: list[Made] = []
        for text, tokens in zip(texts, self._encode(texts), strict=True):
            num_bytes = self._bytes(tokens, text)
            loss = np.ones(len(tokens), bool)
            documents.append((self._closed(tokens, loss, num_bytes), None))
        return documents

    def _prompts(self, values: list[Any]) -> list[Made]:
        prompts = [value["prompt"] for value in values]
        completions = [value["completion"] for value in values]
        encoded = self._encode([*prompts, *completions])
        documents: list[Made] = []
        for place, completion in enumerate(completions):
            before, after = encoded[place], encoded[len(values) + place]
            tokens = np.concatenate([before, after])
            num_bytes = np.concatenate([self.bytes_of[before], self._bytes(after, completion)])
            loss = np.arange(len(tokens)) >= len(before)
            documents.append((self._closed(tokens, loss, num_bytes), None))
        return documents

    def _encode(self, texts: list[str]) -> list[Tokens]:
        """Return int32 [tokens] of each text, with nothing that the tokenizer puts around it."""
        if self.tokenizer.is_fast:
            encode = self.tokenizer.backend_tokenizer.encode_batch_fast
            return [np.asarray(e.ids, np.int32) for e in encode(texts, add_special_tokens=False)]
        plain = partial(self.tokenizer, add_special_tokens=False, verbose=False)
        return [np.asarray(plain(text)["input_ids"], np.int32) for text in texts]

    def _bytes(self, tokens: Tokens, text: str) -> np.ndarray[Any, Any]:
        """Return the bytes of each token [n], without the space that some tokenizers put first."""
        num_bytes = self.bytes_of[tokens]
        if self.adds_space and len(tokens) and int(num_bytes.sum()) == len(text.encode()) + 1:
            num_bytes[0] -= 1
        return num_bytes

    def _closed(
        self, tokens: Tokens, loss: np.ndarray[Any, Any], num_bytes: np.ndarray[Any, Any]
    ) -> Document:
        """Put the opening before the tokens and one end of text after them."""
        if not len(tokens):
            return Document(tokens, loss, num_bytes)
        count = len(tokens)
        while count and loss[count - 1] and tokens[count - 1] == self.end:  # it was in the text
            count -= 1
        opening = self.opening
        if np.array_equal(tokens[: len(opening)], opening):  # it was in the text
            opening = opening[:0]
        first = len(opening)
        size = first + count + (self.end is not None)
        whole = np.empty(size, np.int32)
        bears_loss, byte_counts = np.zeros(size, bool), np.zeros(size, np.uint16)
        here = slice(first, first + count)
        whole[:first], byte_counts[:first] = opening, self.bytes_of[opening]
        whole[here], bears_loss[here], byte_counts[here] = (
            tokens[:count],
            loss[:count],
            num_bytes[:count],
        )
        if self.end is not None:
            whole[-1], bears_loss[-1] = self.end, True
        return Document(whole, bears_loss, byte_counts)

    def _chats(self, chats: list[list[Any]]) -> list[Made]:
        rendered = self._rendered(chats)
        texts = [text for text, _, problem in rendered if problem is None]
        encode = self.tokenizer.backend_tokenizer.encode_batch
        encoded = iter(encode(texts, add_special_tokens=False))
        documents: list[Made] = []
        for _, spans, problem in rendered:
            if problem is not None:
                documents.append((None, problem))
                continue
            encoding = next(encoded)
            tokens = np.asarray(encoding.ids, np.int32)
            loss = np.zeros(len(tokens), bool)
            for first, last in spans:
                loss[_tokens_of(encoding, len(tokens), first, last)] = True
            documents.append((Document(tokens, loss, self.bytes_of[tokens]), None))
        return documents

    def _rendered(
        self, chats: list[list[Any]]
    ) -> list[tuple[str, list[tuple[int, int]], str | None]]:
        """Return what `_spans` does for each chat; with marks in the template at one go."""
        if self.marked:
            try:
                texts, marks = self._render_all([_without_none(chat) for chat in chats])
                return [(text, spans, None) for text, spans in zip(texts, marks, strict=True)]
            except Exception:  # the template refuses one of them: one by one says which
                logger.debug("a batch of chats is rendered one by one", exc_info=True)
        return [self._spans(chat) for chat in chats]

    def _spans(self, messages: list[Any]) -> tuple[str, list[tuple[int, int]], str | None]:
        """Return (text of the chat, spans of it that bear loss, problem)."""
        messages = _without_none(messages)
        try:
            if self.marked:
                text, spans = self._render(messages)
                return text, spans, None
            return self._spans_by_prefix(messages)
        except Exception as error:  # templates run their own code, and refuse in any way they like
            first = (str(error).splitlines() or [""])[0]
            return "", [], f"is refused by the chat template ({type(error).__name__}: {first})"

    def _spans_by_prefix(
        self, messages: list[Any]
    ) -> tuple[str, list[tuple[int, int]], str | None]:
        """Find what each assistant turn adds to the text rendered so far."""
        full, _ = self._render(messages)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(messages[:index], prompted=True)
            after, _ = self._render(messages[: index + 1])
            if not (full.startswith(before) and full.startswith(after.rstrip())):
                problem = "renders differently when it grows: the template is not prefix-stable"
                return "", [], problem
            start, end = len(before), min(len(after), len(full))
            content = message["content"].strip()
            alone = full[start:end].lstrip().startswith(content)
            if not alone and before == self._render(messages[:index])[0]:
                # The template ignores add_generation_prompt: the turn's header is no answer.
                start = max(start, full.find(content, start, end))
            stripped = full[start:end].rstrip()
            if stripped.endswith(self.turn_ends):  # what follows the end of turn is the template's
                end = start + len(stripped)
            spans.append((start, end))
        return full, spans, None

    def _render(
        self, messages: list[Any], prompted: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a chat and the spans that the template marks as generated."""
        if not messages and not prompted:
            return "", []
        (text,), (marks,) = self._render_all([messages], prompted)
        return text, marks

    def _render_all(
        self, chats: list[list[Any]], prompted: bool = False
    ) -> tuple[list[str], list[list[tuple[int, int]]]]:
        """Return the text and the marked spans of each chat; several at once cost less."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=chats,
            chat_template=self.template,
            return_assistant_tokens_mask=self.marked,
            add_generation_prompt=prompted,
            **self.specials,
        )
        texts, marks = rendered
        return texts, marks if self.marked else [[] for _ in texts]


def _tokens_of(encoding: Any, count: int, first: int, last: int) -> slice:
    """Return the tokens of the characters [first, last); one that straddles the start is theirs.

    A search asks for the places of some ten tokens, which never go back; `encoding.offsets` would
    make a tuple for every token.
    """
    place, tokens = encoding.token_to_chars, range(count)
    begin = bisect_left(tokens, True, key=lambda i: place(i)[0] >= first or place(i)[1] > first)
    return slice(begin, bisect_left(tokens, True, key=lambda i: place(i)[0] >= last))


def _without_none(messages: list[Any]) -> list[dict[str, Any]]:
    """Leave out the columns that only other rows have."""
    return [{k: v for k, v in m.items() if v is not None} for m in messages]


def _opening(tokenizer: Any, bytes_of: np.ndarray[Any, Any]) -> tuple[Tokens, bool]:
    """Return what the tokenizer puts before a text, int32 [n], and whether it adds a space too."""
    around = tokenizer("a", verbose=False)["input_ids"]
    plain = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    first = next((i for i in range(len(around)) if around[i : i + len(plain)] == plain), 0)
    return np.asarray(around[:first], np.int32), int(bytes_of[plain].sum()) == 2
