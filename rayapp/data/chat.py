"""Render chats to text with the tokenizer's template, and find the spans the assistant wrote.

    text, spans, problem = ChatTemplate(tokenizer).render([{"messages": messages}])[0]

A chat is a record with `messages` and optionally `tools` and `chat_template_kwargs`, which are
passed to the template. Spans come from the template's `{% generation %}` marks if it has them, else
from the text that each turn adds to the rendered prefix, else from marks around what the messages
say (rayapp.data.spans). If the template omits tools, calls or a whole answer, the chat is reported
as a problem; if it omits reasoning or words beside calls, the chat is kept and that is noted.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rayapp.data.messages import (
    SILENT,
    SPEAKING,
    THINKING,
    Json,
    in_parts,
    left_out,
    name_of,
    parsed,
    reasoning_of,
    renamed,
    said_by,
    tools_of,
    with_arguments,
    with_text_arguments,
    without_none,
)
from rayapp.data.problems import NOT_UNICODE
from rayapp.data.spans import (
    REASONING,
    Words,
    after_thought,
    beginnings,
    end_of,
    header_of,
    located,
    start_of,
)
from rayapp.data.tokens import CHAT_TEMPLATE, FIRST_TEMPLATE

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Some templates write today's date. Rows must not depend on the day they are made, so these
# templates get a fixed date: the default of Llama 3.1's template.
FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%d', '26') | replace('%b', 'Jul') "
    "| replace('%B', 'July') | replace('%m', '07') | replace('%Y', '2024') | replace('%y', '24') "
    "| replace('%A', 'Friday') | replace('%a', 'Fri') | replace('%H', '00') "
    "| replace('%M', '00') | replace('%S', '00') }}{%- endmacro -%}"
)

# Matches templates that distinguish missing content (a message that only calls tools) from empty.
TESTS_CONTENT = re.compile(r"content['\"\]\s]*\)?\s+is\s+(not\s+)?none", re.IGNORECASE)
TAKES_PARTS = re.compile(r"\bin\s+\w+(\.|\[['\"])content")  # loops over a message's content
TOOL_USE = "tool_use"  # the name of the template that transformers takes for chats with tools
OWN_TEMPLATE = "Set data.chat_template=training, or to a file that"
REFUSED = "is refused by the chat template"
UNSTABLE = (
    "renders differently when it grows, so that what the assistant says cannot be told apart. "
    f"{OWN_TEMPLATE} marks it with {{% generation %}}"
)
NO_WEIGHTS = (
    "has weights, but the chat template's marks do not tell its answers apart. Set "
    "data.chat_template to a file with one {% generation %} around each answer"
)
NO_TOOLS = f"has tools, which the chat template leaves out. {OWN_TEMPLATE} writes them"
NO_CALLS = f"has tool calls, which the chat template leaves out. {OWN_TEMPLATE} writes them"
NO_ANSWER = (
    f"has an assistant message, which the chat template leaves out. {OWN_TEMPLATE} writes it"
)

logger = logging.getLogger("rayapp.data")

Spans: TypeAlias = list[tuple[int, int]]  # [first, last) in characters
# (text, spans that bear loss, None or a note), or ("", [], problem)
Rendered: TypeAlias = tuple[str, Spans, str | None]


class ChatTemplate:
    """Renders chats, i.e. lists of messages with role and content."""

    def __init__(
        self, tokenizer: Any, template: str = "", reasoning: str = "train", pads: bool = False
    ) -> None:
        """`template` replaces the tokenizer's; `reasoning` is data.reasoning.

        With `pads` the chats are from a table, which adds None where a row lacks a field.
        """
        self.of_tools: ChatTemplate | None = None
        if not template:
            template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
            named = tokenizer.chat_template
            if isinstance(named, dict) and TOOL_USE in named:
                self.of_tools = ChatTemplate(tokenizer, named[TOOL_USE], reasoning, pads)
        if not template:
            raise ValueError(
                "data.kind=chat is without a template: the tokenizer has no chat_template. "
                "Set model.tokenizer to one that has, data.chat_template, or use prompt and "
                "completion"
            )
        template = CHAT_TEMPLATE if template == FIRST_TEMPLATE else template
        self.template = (FIXED_DATE if "strftime_now" in template else "") + template
        self.turn_ends = tuple(filter(None, map(str, tokenizer.get_added_vocab())))
        by_length = sorted(self.turn_ends, key=len, reverse=True)
        self.tokens = re.compile("|".join(map(re.escape, by_length))) if by_length else None
        self.no_words = re.compile(
            "(?:" + "|".join([r"\s", *map(re.escape, self.turn_ends)]) + ")*"
        )
        self.tests_content = TESTS_CONTENT.search(template) is not None
        self.takes_parts = TAKES_PARTS.search(template) is not None
        self.marked = GENERATION.search(template) is not None
        self.specials = dict(tokenizer.special_tokens_map)
        self.reasoning, self.pads = reasoning, pads
        self.reads = [name for name in REASONING if reads(template, name)]

    def render(self, chats: Sequence[Mapping[str, Any]]) -> list[Rendered]:
        """Return (text, spans that bear loss, note) or ("", [], problem) per chat.

        Batches are cheaper.
        """
        plain = not any(chat.get("tools") or chat.get("chat_template_kwargs") for chat in chats)
        if self.marked and plain:
            try:
                conversations = [self._messages(chat["messages"]) for chat in chats]
                texts, marks = self._render_all(conversations, {})
                return [
                    self._judged(messages, text, spans, {})
                    for messages, text, spans in zip(conversations, texts, marks, strict=True)
                ]
            except Exception:  # the template refuses one of them; rendering one by one finds it
                logger.debug("a batch of chats is rendered one by one", exc_info=True)
        return [self._one(chat) for chat in chats]

    def _one(self, chat: Mapping[str, Any]) -> Rendered:
        if self.of_tools is not None and chat.get("tools"):
            return self.of_tools._one(chat)
        messages = self._messages(chat["messages"])
        kwargs = chat.get("chat_template_kwargs") or {}
        given = dict(without_none(kwargs) if self.pads else kwargs)
        if tools := tools_of(chat, self.pads):
            given["tools"] = tools
        made = self._attempt(messages, given)
        # Some templates concatenate arguments as text, and some take content in parts only.
        changes = (with_text_arguments, in_parts) if self.takes_parts else (with_text_arguments,)
        for change in () if made[0] else changes:
            if (changed := change(messages)) != messages:
                again = self._attempt(changed, given)
                if again[0]:
                    return again
                made = again if str(made[2]).startswith(REFUSED) else made
        return made

    def _attempt(self, messages: list[Any], given: Json) -> Rendered:
        try:
            text, spans = self._render(messages, given)
            if not self.marked:
                located = self._spans(messages, given, text)
                if located is None:
                    return "", [], UNSTABLE
                spans = located
            if given.get("tools") and self._render(messages, renamed(given))[0] == text:
                return "", [], NO_TOOLS
            return self._judged(messages, text, spans, given)
        except UnicodeEncodeError:
            return "", [], NOT_UNICODE
        except Exception as error:  # a template's code may raise anything
            first = (str(error).splitlines() or [""])[0]
            return "", [], f"{REFUSED} ({type(error).__name__}: {first})"

    def _judged(self, messages: list[Any], text: str, spans: Spans, given: Json) -> Rendered:
        """Refuse a chat if its spans lack calls, or are empty where messages are not.

        Else leave out what bears no loss by its weight, or as reasoning, and note what the template
        has left out.
        """
        answers = [message for message in messages if message["role"] == "assistant"]
        calls = Counter(name_of(call) for m in answers for call in m.get("tool_calls") or ())
        if calls:
            spoken = "".join(text[first:last] for first, last in spans)
            if any(spoken.count(name) < count for name, count in calls.items()):
                return "", [], NO_CALLS
        empty = [self.no_words.fullmatch(text, *span) is not None for span in spans]
        meant = [self._is_empty(message) for message in answers]
        lost = empty != meant if len(empty) == len(meant) else all(empty) and not all(meant)
        if lost:
            return "", [], NO_ANSWER
        weighed = any(message.get("weight") == 0 for message in answers)
        thinks = any(map(reasoning_of, answers))
        if weighed or (thinks and self.reasoning == "mask"):
            chosen = self._chosen(messages, text, spans, given)
            if chosen is None:
                return "", [], NO_WEIGHTS
            spans = chosen
        note = left_out(answers, text) if thinks or calls else None
        pairs = zip(answers, meant, strict=True)
        silent = any(empty and message.get("weight") != 0 for message, empty in pairs)
        return text, spans, SILENT if silent else note

    def _chosen(self, messages: list[Any], text: str, spans: Spans, given: Json) -> Spans | None:
        """Return the spans without answers of weight 0, and without reasoning if that is masked."""
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        places = located(lambda some: self._render(some, given)[0], messages, text) or {}
        if len(spans) == len(numbers):
            owners = numbers
        elif all(number in places for number in numbers):
            ends = [places[number].last for number in numbers]
            owners = [numbers[min(bisect_left(ends, a + 1), len(ends) - 1)] for a, _ in spans]
        else:
            return None
        kept = []
        for (first, last), number in zip(spans, owners, strict=True):
            words = places.get(number)
            if messages[number].get("weight") == 0:
                continue
            if self.reasoning == "mask" and reasoning_of(messages[number]):
                if words is None:
                    return None
                if words.thought is not None:
                    first = max(first, after_thought(text, words, self.tokens))
            if first < last:
                kept.append((first, last))
        return kept

    def _is_empty(self, message: Json) -> bool:
        """Return whether a message has no content, calls or reasoning."""
        fields = any(message.get(name) for name in SPEAKING)
        return not fields and self.no_words.fullmatch(said_by(message)) is not None

    def _spans(self, messages: list[Any], given: Json, full: str) -> Spans | None:
        """Return the spans of a template without marks; None if they cannot be told."""
        try:
            spans = self._spans_by_prefix(messages, given, full)
        except Exception:  # it refuses chats that end where a turn does
            logger.debug("a template refuses the beginning of a chat", exc_info=True)
            spans = None
        return spans if spans is not None else self._spans_by_words(messages, given, full)

    def _spans_by_prefix(self, messages: list[Any], given: Json, full: str) -> Spans | None:
        """Return as spans the text that each assistant turn adds to the rendered prefix."""
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(messages[:index], given, prompted=True)
            after, _ = self._render(messages[: index + 1], given)
            if not (full.startswith(before) and full.startswith(after.rstrip())):
                return None
            start, end = len(before), min(len(after), len(full))
            content = said_by(message).strip()
            alone = full[start:end].lstrip().startswith(content)
            if not alone and before == self._render(messages[:index], given)[0]:
                # The template ignores add_generation_prompt: leave the turn's header out.
                start = max(start, full.find(content, start, end))
            stripped = full[start:end].rstrip()
            if stripped.endswith(self.turn_ends):  # text after the end of turn is the template's
                end = start + len(stripped)
            spans.append((start, end))
        return spans

    def _spans_by_words(self, messages: list[Any], given: Json, full: str) -> Spans | None:
        """Return the spans around the words of each assistant turn, as they are in the full text.

        A turn begins after the generation prompt, and ends where it does as the chat's last one.
        """

        def render(some: list[Any]) -> str:
            return self._render(some, given)[0]

        places = located(render, messages, full)
        if places is None:
            return None
        spans, low = [], 0
        for index, words in sorted(places.items()):
            if messages[index]["role"] == "assistant":
                later = [place.first for i, place in places.items() if i > index]
                high = min(later, default=len(full))
                tail = self._tail(render, messages, index) if later else full[words.last :]
                start = self._start(messages[:index], given, full, low, words)
                end = end_of(full, words, high, tail, self.tokens)
                if start is None or end is None:
                    return None
                spans.append((start, end))
            low = words.last
        return spans

    def _start(
        self, before: list[Any], given: Json, full: str, low: int, words: Words
    ) -> int | None:
        """Return where the turn after `before` begins; None if it cannot be told."""
        prompted = self._render(before, given, prompted=True)[0]
        plain = self._render(before, given)[0]
        if prompted == plain:  # the assistant goes on without a header, as after a tool's answer
            return len(plain) if full.startswith(plain) else words.first
        header = header_of(prompted, plain, self.tokens)
        return start_of(full, low, words, beginnings(header, self.tokens))

    def _tail(
        self, render: Callable[[list[Any]], str], messages: list[Any], index: int
    ) -> str | None:
        """Return what follows the words of a turn where the chat ends with it."""
        try:
            shorter = render(messages[: index + 1])
            places = located(render, messages[: index + 1], shorter)
        except Exception:  # the template refuses a chat that ends here
            return None
        return shorter[places[index].last :] if places and index in places else None

    def _render(
        self, messages: list[Any], given: Json, prompted: bool = False
    ) -> tuple[str, Spans]:
        """Return the text of a chat and the spans that the template marks as generated."""
        if not messages and not prompted:
            return "", []
        (text,), (marks,) = self._render_all([messages], given, prompted)
        return text, marks

    def _render_all(
        self, chats: list[list[Any]], given: Json, prompted: bool = False
    ) -> tuple[list[str], list[Spans]]:
        """Return the text and the marked spans of each chat, rendered as one batch."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=chats,
            chat_template=self.template,
            return_assistant_tokens_mask=self.marked,
            add_generation_prompt=prompted,
            **self.specials,
            **given,
        )
        texts, marks = rendered
        for text in texts:
            text.encode()  # which raises an error for half of a surrogate pair, of any field
        return texts, marks if self.marked else [[] for _ in texts]

    def _messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Json]:
        """Return messages as templates expect them: content as text, call arguments as objects."""
        made = []
        for message in messages:
            plain = without_none(message) if self.pads else dict(message)
            plain = {name: value for name, value in plain.items() if value is not None}
            absent = message.get("content") is None and self.tests_content
            plain["content"] = None if absent else said_by(message)
            if plain["role"] == "assistant":
                self._set_reasoning(plain)
            if plain.get("tool_calls"):
                plain["tool_calls"] = with_arguments(plain["tool_calls"], parsed)
            made.append(plain)
        return made

    def _set_reasoning(self, message: Json) -> None:
        """Drop a message's reasoning if that is asked for; else name it as the template does."""
        given = [name for name in REASONING if message.get(name)]
        if self.reasoning == "drop":
            for name in given:
                del message[name]
            if isinstance(message.get("content"), str):
                message["content"] = THINKING.sub("", message["content"])
        elif given and self.reads and not set(given) & set(self.reads):
            message[self.reads[0]] = message.pop(given[0])


def reads(template: str, name: str) -> bool:
    """Return whether a template reads a field of this name."""
    escaped = re.escape(name)
    return re.search(rf"\.{escaped}\b|['\"]{escaped}['\"]", template) is not None
