"""Make documents of records by a reading of its own: tokens, and which of them bear loss."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Pairs = tuple[tuple[int, int], ...]  # (input, label) of each position
Marked = tuple[list[int], list[bool]]


def of_text(tokenizer: Any, record: Any) -> Marked:
    """<s> text </s>, all of which bears loss."""
    ids = [tokenizer.bos_token_id, *plain(tokenizer, record["text"]), tokenizer.eos_token_id]
    return ids, [True] * len(ids)


def of_prompt(tokenizer: Any, record: Any) -> Marked:
    """<s> prompt completion </s>, of which the completion and the end bear loss."""
    before = [tokenizer.bos_token_id, *plain(tokenizer, record["prompt"])]
    after = [*plain(tokenizer, record["completion"]), tokenizer.eos_token_id]
    return before + after, [False] * len(before) + [True] * len(after)


def of_chat(tokenizer: Any, record: Any) -> Marked:
    """ChatML, of which what the assistant says and its end of turn bear loss."""
    text, spoken = "", []
    for message in record["messages"]:
        text += f"<|im_start|>{message['role']}\n"
        start, text = len(text), text + f"{message['content']}<|im_end|>"
        spoken += [(start, len(text))] if message["role"] == "assistant" else []
        text += "\n"
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = found["offset_mapping"]
    return found["input_ids"], [any(b > s and a < e for s, e in spoken) for a, b in places]


KINDS = {"text": of_text, "prompt": of_prompt, "chat": of_chat}


def plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def wanted(tokenizer: Any, kind: str, file: Path, seq_len: int, truncate: bool) -> Counter[Pairs]:
    """Return the pieces of all records of a file, with how often each is there."""
    found: Counter[Pairs] = Counter()
    for line in file.read_text().splitlines():
        ids, bears = KINDS[kind](tokenizer, json.loads(line))
        labels = [i if loss else -100 for i, loss in zip(ids, bears, strict=True)]
        pairs = tuple(zip(ids[:-1], labels[1:], strict=True))
        cuts = range(0, len(pairs), seq_len)
        found.update(pairs[start : start + seq_len] for start in (cuts[:1] if truncate else cuts))
    return found


def pieces(rows: list[np.void]) -> Iterator[Pairs]:
    """Yield the pieces that rows hold."""
    for row in rows:
        for number in range(1, int(row["segments"].max()) + 1):
            here = row["segments"] == number
            yield tuple(zip(*(row[n][here].tolist() for n in ("input_ids", "labels")), strict=True))
