"""Find the tokens that end what is trained on, and let a generation end there.

ends = ends_of_data(prepared, tokenizer)
settings = generation_config(config, source, shape, tokenizer, ends)
settings.eos_token_id       # of samples, of `rayapp generate` and of every export
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from transformers import GenerationConfig, PretrainedConfig

from rayapp.config import Config
from rayapp.data.kinds import takes_template
from rayapp.data.packing import IGNORE
from rayapp.data.prepared import Prepared
from rayapp.model import ModelSource

SAMPLED_ROWS = 32  # of each source
SHOWN_TOKENS, SHOWN_CHARS = 24, 20  # of an answer that ends in text
MOST_INSIDE = 0.05  # of the answers that a token ends; one may quote it
MOST_ANSWERS = 0.9  # end with the same token, if that is not special
NO_END = "is without an end"


class Ends(NamedTuple):
    """How answers end: runs of loss-bearing tokens, up to a document's end or a prompt."""

    ids: tuple[int, ...]
    """Tokens that end answers, the most frequent first."""
    open: int
    """Answers that end with text, not with a special token."""
    answers: int
    text: str
    """The end of an answer that ends with text."""


def ends_of_data(prepared: Prepared, tokenizer: Any) -> Ends:
    """Return how the answers in some rows of each source end."""
    rows = prepared.rows("train")
    edges = np.cumsum([0, *(prepared.sizes or (len(rows),))]).clip(max=len(rows))
    places = [np.linspace(a, b - 1, SAMPLED_ROWS, dtype=int) for a, b in pairwise(edges) if a < b]
    chosen = np.unique(np.concatenate([np.empty(0, int), *places]))
    return ends_of(rows.read(rows.numbers(chosen)), tokenizer)


def ends_of(rows: np.ndarray[Any, Any], tokenizer: Any) -> Ends:
    """Return how the answers in packed rows end.

    White space behind an end token is passed over. Text at the edge of a row is cut off, and no
    end. A token that answers also go on behind (GPT-OSS' <|end|> of reasoning) ends none.
    """
    special, added = special_ids(tokenizer), set(tokenizer.added_tokens_decoder)
    inside, texts = Counter[int](), list[list[int]]()
    for labels, segments in zip(rows["labels"], rows["segments"], strict=True):
        bears = labels != IGNORE
        joined = bears[:-1] & bears[1:] & (segments[:-1] == segments[1:])
        for last in np.flatnonzero(bears & ~np.append(joined, False)).tolist():
            first = last - int(np.argmin(np.append(joined[:last][::-1], False)))
            answer = labels[first : last + 1].tolist()
            while len(answer) > 1 and _is_space(answer[-1], tokenizer, added):
                answer.pop()
            inside.update(answer[:-1])
            if last + 1 < len(labels) or answer[-1] in special:
                texts.append(answer[-SHOWN_TOKENS:])
    found = Counter(text[-1] for text in texts)
    # An added token that is not special may be a word, or close a call.
    much = MOST_ANSWERS * len(texts)
    ids = [t for t, n in found.most_common() if t in special or (t in added and n >= much)]
    others = [text for text in texts if text[-1] not in ids]
    pure = [t for t in ids if inside[t] <= MOST_INSIDE * found[t]]
    text = tokenizer.decode(others[0])[-SHOWN_CHARS:] if others else ""
    return Ends(tuple(pure or ids), len(others), len(texts), text)


def _is_space(token: int, tokenizer: Any, added: set[int]) -> bool:
    return token not in added and not tokenizer.decode([token]).strip()


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of a tokenizer's special tokens but that of what is unknown."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    return special - {tokenizer.unk_token_id} | {tokenizer.eos_token_id}


def generation_config(
    config: Config, source: ModelSource, shape: PretrainedConfig, tokenizer: Any, ends: Ends
) -> GenerationConfig:
    """Return the base's settings, with which a generation ends where answers do, too.

    `shape` is the model's config. With another tokenizer than the base's own, of the base's end
    tokens those are kept that are special there.
    """
    own = config.model.tokenizer is None and not source.preset
    settings = deepcopy(source.generation_config or GenerationConfig())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(settings, name) is None:
            given = shape if own or name == "eos_token_id" else tokenizer
            setattr(settings, name, getattr(given, name, None))
    kept = settings.eos_token_id
    kept = kept if isinstance(kept, list) else [kept]
    kept = kept if own else [i for i in kept if i in special_ids(tokenizer)]
    stops = [i for i in (*ends.ids, tokenizer.eos_token_id, *kept) if isinstance(i, int)]
    settings.eos_token_id = list(dict.fromkeys(stops)) or None
    settings._from_model_config = False  # or a generation takes those of config.json instead
    return settings


def names_of(ids: Iterable[int], tokenizer: Any) -> dict[str, int]:
    """Return tokens with their ids; of an id that the tokenizer has not, its number."""
    return {tokenizer.convert_ids_to_tokens(i) or str(i): i for i in ids}


def described(ends: Ends, config: Config, tokenizer: Any, stops: Iterable[int] = ()) -> list[str]:
    """Say what ends answers and, by `stops`, a generation; warn of answers that end with text."""
    lines = []
    for what, ids in (("answers end with", ends.ids), ("a generation ends at", stops)):
        named = [f"{name} ({i})" for name, i in names_of(ids, tokenizer).items()]
        lines += [f"{what} {', '.join(named)}"] if named else []
    if not ends.open:
        return lines
    where = f"model.tokenizer={config.model.tokenizer or config.model.path}"
    cure = "eos_token in its tokenizer_config.json"
    if config.data.kind == "auto" or takes_template(config.data.kind):
        template = config.data.chat_template
        where = where if template is None else f"data.chat_template={template}"
        cure = "data.chat_template to a file whose turns end in one, such as {{ eos_token }}, or "
        cure += "model.new_tokens to the template's control tokens"
    lines.append(
        f"{where} {NO_END}: {ends.open} of {ends.answers} answers end with {ends.text!r}, which is "
        f"no special token of the tokenizer, and a generation does not end there. Set {cure}"
    )
    return lines
