"""Chats as text: by the tokenizer's own template, with what the assistant says told apart.

    text, spans, problem = ChatTemplate(tokenizer).render([messages])[0]

Spans come from the template's `{% generation %}` marks where it has them, else from the text that
each turn adds to the rendered prefix.
"""

from __future__ import annotations

import logging
import re
from typing import Any, TypeAlias

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Some templates write today's date. Rows must not depend on the day they are made, so such a
# template sees the date that Llama 3.1's own uses where it is given none.
FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%d', '26') | replace('%b', 'Jul') "
    "| replace('%B', 'July') | replace('%m', '07') | replace('%Y', '2024') | replace('%y', '24') "
    "| replace('%A', 'Friday') | replace('%a', 'Fri') | replace('%H', '00') "
    "| replace('%M', '00') | replace('%S', '00') }}{%- endmacro -%}"
)

logger = logging.getLogger("rayapp.data")

Spans: TypeAlias = list[tuple[int, int]]  # [first, last) in characters
Rendered: TypeAlias = tuple[str, Spans, str | None]  # text, what of it bears loss, problem


class ChatTemplate:
    """Render chats, lists of messages with role and content."""

    def __init__(self, tokenizer: Any) -> None:
        template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
        if not template:
            raise ValueError(
                "data.kind=chat is without a template: the tokenizer has no chat_template. "
                "Set model.tokenizer to one that has, or use prompt and completion"
            )
        self.template = (FIXED_DATE if "strftime_now" in template else "") + template
        self.turn_ends = tuple(filter(None, map(str, tokenizer.get_added_vocab())))
        self.marked = GENERATION.search(template) is not None
        self.specials = dict(tokenizer.special_tokens_map)

    def render(self, chats: list[list[Any]]) -> list[Rendered]:
        """Return (text, spans of it that bear loss, problem) of each; several cost less at once."""
        if self.marked:
            try:
                texts, marks = self._render_all([_without_none(chat) for chat in chats])
                return [(text, spans, None) for text, spans in zip(texts, marks, strict=True)]
            except Exception:  # the template refuses one of them: one by one says which
                logger.debug("a batch of chats is rendered one by one", exc_info=True)
        return [self._spans(chat) for chat in chats]

    def _spans(self, messages: list[Any]) -> Rendered:
        messages = _without_none(messages)
        try:
            if self.marked:
                text, spans = self._render(messages)
                return text, spans, None
            return self._spans_by_prefix(messages)
        except Exception as error:  # templates run their own code, and refuse in any way they like
            first = (str(error).splitlines() or [""])[0]
            return "", [], f"is refused by the chat template ({type(error).__name__}: {first})"

    def _spans_by_prefix(self, messages: list[Any]) -> Rendered:
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

    def _render(self, messages: list[Any], prompted: bool = False) -> tuple[str, Spans]:
        """Return the text of a chat and the spans that the template marks as generated."""
        if not messages and not prompted:
            return "", []
        (text,), (marks,) = self._render_all([messages], prompted)
        return text, marks

    def _render_all(
        self, chats: list[list[Any]], prompted: bool = False
    ) -> tuple[list[str], list[Spans]]:
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


def _without_none(messages: list[Any]) -> list[dict[str, Any]]:
    """Leave out the columns that only other rows have."""
    return [{k: v for k, v in m.items() if v is not None} for m in messages]
