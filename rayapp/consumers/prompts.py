"""Choose what an exported model is tried with: chats and texts like those it was trained on.

A probe has `messages` or a `text` of which a consumer makes tokens itself, or neither, and its
`ids` by the tokenizer of this environment. `text` is also what the chat template makes of messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from rayapp.data import prepared
from rayapp.data.kinds import takes_template
from rayapp.data.packing import IGNORE
from rayapp.data.tokens import prompt_ids
from rayapp.observe.records import Sections
from rayapp.observe.run_folder import PLAN, PREPARED
from rayapp.storage import Storage, open_storage, read_json

CHAT, TEXT = "Hello", "The"  # where the run has neither prompts nor rows
ROWS, MOST = 8, 3  # rows that are read; documents of them that are tried
BEGINNING, LONGEST = 16, 2048  # tokens of a text's beginning, and of a prompt

Probe: TypeAlias = dict[str, Any]


def probe_of(tokenizer: Any, prompt: str, chat: bool) -> Probe:
    """Return a text to be continued, or with `chat` a user's message to be answered."""
    ids = prompt_ids(tokenizer, prompt, chat)
    if not chat:
        return {"messages": None, "text": prompt, "ids": ids}
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return {"messages": messages, "text": text, "ids": ids}


def probes_of(
    run: Storage, sections: Sections, tokenizer: Any, stops: frozenset[int]
) -> list[Probe]:
    """Return the run's own prompts, as chats if it was trained on chats, and documents.

    A document with answers is cut at the token that ends the first one: there the model has learnt
    to stop.
    """
    prompts: Any = sections.get("eval", {}).get("prompts") or []
    kind = sections.get("data", {}).get("kind")
    chat = takes_template(str(kind)) and bool(tokenizer.chat_template)
    ends = [] if kind == "text" else [up_to_end(*each, stops) for each in _documents(run)]
    turns = [ids for ids in ends if ids and len(ids) <= LONGEST][:MOST]
    if not prompts and not chat and not turns:
        texts = [tokenizer.decode(ids[:BEGINNING].tolist()) for ids, _ in _documents(run)]
        prompts = [text for text in texts if text.strip()][:MOST]
    if not prompts and not turns:
        prompts = [CHAT if chat else TEXT]
    asked = [probe_of(tokenizer, prompt, chat) for prompt in prompts or [CHAT] * chat]
    return asked + [{"messages": None, "text": None, "ids": ids} for ids in turns]


def up_to_end(ids: Any, labels: Any, stops: frozenset[int]) -> list[int]:
    """Return a document's tokens [n] up to where the next one is to end its first answer."""
    ends = np.flatnonzero((labels != IGNORE) & np.isin(labels, [*stops]))
    return ids[: ends[0] + 1].tolist() if len(ends) else []


def _documents(run: Storage) -> Iterator[tuple[Any, Any]]:
    """Yield tokens and labels [n] of a few documents, held-out ones if there are; if kept."""
    root = open_storage(run.url.rpartition("/")[0]) / PREPARED
    for name in (read_json(run, PLAN) or {}).get("prepared", []):
        if (made := prepared.load(root / name)) is None:
            continue
        rows = made.rows("eval" if made.held_out else "train")
        for row in rows.read(rows.numbers(np.arange(min(ROWS, len(rows))))):
            for number in range(1, int(row["segments"].max()) + 1):
                mine = row["segments"] == number
                yield row["input_ids"][mine], row["labels"][mine]
