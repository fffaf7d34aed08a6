"""The chat templates of published models, as the package trl carries them, and tokenizers of them.

A tokenizer has the tokens that a template writes: all that look like <|im_end|>, </s> or [INST].
"""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from rayapp.data.tokens import train_bpe

TOKENS = re.compile(
    r"<[|\uff5c][^<>|\uff5c\s{}'\"]+[|\uff5c]>|</?s>|<(?:start|end)_of_turn>|</?think>|</?tool_call>"
    r"|</?tool_response>|\[/?INST\]|<\|?turn\|?>"
    r"|<channel\|>|<\|channel>|<end_of_utterance>|\[e~\[|\]~b\]"
)
NOT_SPECIAL = re.compile(r"</?(think|tool_call|tool_response)>")
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|END_OF_TURN_TOKEN|>", "<turn|>",
)  # fmt: skip


def folder() -> Path | None:
    """Return where trl's templates are; None if it is not installed. trl itself is not imported."""
    spec = importlib.util.find_spec("trl")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) / "chat_templates" if places else None


def names(training: bool = False) -> list[str]:
    found = folder()
    every = sorted(path.stem for path in found.glob("*.jinja")) if found else []
    return [name for name in every if name.endswith("_training") == training]


def template(name: str) -> str:
    found = folder()
    assert found is not None
    return (found / f"{name}.jinja").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _rules() -> str:
    texts = ["user\nWhat is it? assistant\nIt is that. Bye  4.\n\n"] * 3
    return str(train_bpe(iter(texts), 330).backend_tokenizer.to_str())


def tokenizer(text: str) -> Any:
    """Return a tokenizer with a template and its tokens."""
    found = sorted(set(TOKENS.findall(text)))
    rules = Tokenizer.from_str(_rules())
    rules.add_tokens([token for token in found if NOT_SPECIAL.fullmatch(token)])
    rules.add_special_tokens(
        ["<s>", "<|endoftext|>", *(token for token in found if not NOT_SPECIAL.fullmatch(token))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=rules,
        bos_token="<s>",
        eos_token=next((end for end in ENDS if end in text), "<|endoftext|>"),
        chat_template=text,
    )
