"""Choose what an exported model is tried with: chats and texts like those it was trained on.

probes = probes_of(run, sections, tokenizer, stops_of("runs/demo/model"))
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from rayapp.data import prepared
from rayapp.data.packing import IGNORE
from rayapp.data.tokens import prompt_ids
from rayapp.observe.records import Sections
from rayapp.observe.run_folder import PLAN
from rayapp.storage import Storage, open_storage
from rayapp.storage.inputs import read_json

CHAT, TEXT = "Hello", "The"  # where the run has neither prompts nor rows
ROWS, MOST = 8, 3  # rows that are read; documents of them that are tried
BEGINNING = 16  # tokens of a document without a prompt
LONGEST = 2048  # tokens of a prompt


class Probe(TypedDict):
    """A prompt; a consumer makes its tokens of the messages or the text, if there are any."""

    messages: list[dict[str, str]] | None
    text: str | None
    """Of messages what the chat template makes of them."""
    ids: list[int]
    """Its tokens, by the tokenizer of this environment."""


def chat_probe(tokenizer: Any, prompt: str) -> Probe:
    """Return a user's message, to be answered."""
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return {"messages": messages, "text": text, "ids": prompt_ids(tokenizer, messages, True)}


def text_probe(tokenizer: Any, text: str) -> Probe:
    """Return a text, to be continued."""
    return {"messages": None, "text": text, "ids": prompt_ids(tokenizer, text, False)}


def stops_of(folder: str) -> frozenset[int]:
    """Return the tokens that end a generation by an exported folder."""
    path = Path(folder, "generation_config.json")
    found = json.loads(path.read_bytes()).get("eos_token_id") if path.exists() else None
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])


def probes_of(
    run: Storage, sections: Sections, tokenizer: Any, stops: frozenset[int]
) -> list[Probe]:
    """Return the run's own prompts, as chats if it was trained on chats, and documents.

    A document with answers is cut at the token that ends the first one: there the model has learnt
    to stop.
    """
    prompts: Any = sections.get("eval", {}).get("prompts") or []
    kind = sections.get("data", {}).get("kind")
    found: list[Probe] = []
    if kind != "text":
        ends = (_up_to_end(ids, labels, stops) for ids, labels in _documents(run))
        turns = [ids for ids in ends if ids is not None and len(ids) <= LONGEST][:MOST]
        found = [{"messages": None, "text": None, "ids": ids} for ids in turns]
    if kind == "chat" and tokenizer.chat_template:
        return [chat_probe(tokenizer, prompt) for prompt in prompts or [CHAT]] + found
    if not found and not prompts:
        texts = [tokenizer.decode(ids[:BEGINNING].tolist()) for ids, _ in _documents(run)]
        prompts = [text for text in texts if text.strip()][:MOST] or [TEXT]
    return [text_probe(tokenizer, prompt) for prompt in prompts] + found


def _up_to_end(ids: Any, labels: Any, stops: frozenset[int]) -> list[int] | None:
    """Return a document's tokens [n] up to where the next one is to end the first answer."""
    ends = np.flatnonzero((labels != IGNORE) & np.isin(labels, list(stops)))
    return ids[: ends[0] + 1].tolist() if len(ends) else None


def _documents(run: Storage) -> Iterator[tuple[Any, Any]]:
    """Yield tokens and labels [n] of a few documents, held-out ones if there are; if kept."""
    plan = read_json(run, PLAN) or {}
    for url in plan.get("prepared", []):
        made = prepared.load(open_storage(url))
        if made is None:
            continue
        rows = made.rows("eval" if made.held_out else "train")
        places = np.arange(min(ROWS, len(rows)))
        for ids, labels, segments in rows.read(rows.numbers(places))[
            ["input_ids", "labels", "segments"]
        ].tolist():
            ids, labels, segments = map(np.array, (ids, labels, segments))
            for number in range(1, int(segments.max()) + 1):
                mine = segments == number
                yield ids[mine], labels[mine]
