"""Render chats to text with the tokenizer's template, and find the spans the assistant wrote.

    text, spans, problem = ChatTemplate(tokenizer).render([{"messages": messages}])[0]

A chat is a record with `messages` and optionally `tools` and `chat_template_kwargs`, which are
passed to the template. Spans come from the template's `{% generation %}` marks if it has them, else
from the text that each turn adds to the rendered prefix. If the template omits tools, calls or a
whole answer, the chat is reported as a problem.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

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
SPEAKING = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # beside the content
OWN_TEMPLATE = "Set model.tokenizer to a copy of its folder with a chat_template.jinja that"
UNSTABLE = (
    "renders differently when it grows, so that what the assistant says cannot be told apart. "
    f"{OWN_TEMPLATE} marks it with {{% generation %}}"
)
NO_TOOLS = f"has tools, which the chat template leaves out. {OWN_TEMPLATE} writes them"
NO_CALLS = f"has tool calls, which the chat template leaves out. {OWN_TEMPLATE} writes them"
NO_ANSWER = (
    f"has an assistant message, which the chat template leaves out. {OWN_TEMPLATE} writes it"
)

logger = logging.getLogger("rayapp.data")

Spans: TypeAlias = list[tuple[int, int]]  # [first, last) in characters
Rendered: TypeAlias = tuple[str, Spans, str | None]  # text, spans that bear loss, problem


Json: TypeAlias = dict[str, Any]
"""A JSON object: from a user's record, or arguments of a template."""


class ChatTemplate:
    """Renders chats, i.e. lists of messages with role and content."""

    def __init__(self, tokenizer: Any) -> None:
        template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
        if not template:
            raise ValueError(
                "data.kind=chat is without a template: the tokenizer has no chat_template. "
                "Set model.tokenizer to one that has, or use prompt and completion"
            )
        self.template = (FIXED_DATE if "strftime_now" in template else "") + template
        self.turn_ends = tuple(filter(None, map(str, tokenizer.get_added_vocab())))
        self.no_words = re.compile(
            "(?:" + "|".join([r"\s", *map(re.escape, self.turn_ends)]) + ")*"
        )
        self.tests_content = TESTS_CONTENT.search(template) is not None
        self.marked = GENERATION.search(template) is not None
        self.specials = dict(tokenizer.special_tokens_map)

    def render(self, chats: Sequence[Mapping[str, Any]]) -> list[Rendered]:
        """Return (text, spans that bear loss, problem) per chat; batches are cheaper."""
        plain = not any(chat.get("tools") or chat.get("chat_template_kwargs") for chat in chats)
        if self.marked and plain:
            try:
                conversations = [self._messages(chat["messages"]) for chat in chats]
                texts, marks = self._render_all(conversations, {})
                return [
                    self._judged(messages, text, spans)
                    for messages, text, spans in zip(conversations, texts, marks, strict=True)
                ]
            except Exception:  # the template refuses one of them; rendering one by one finds it
                logger.debug("a batch of chats is rendered one by one", exc_info=True)
        return [self._one(chat) for chat in chats]

    def _one(self, chat: Mapping[str, Any]) -> Rendered:
        messages = self._messages(chat["messages"])
        given = dict(_without_none(chat.get("chat_template_kwargs") or {}))
        if tools := tools_of(chat):
            given["tools"] = tools
        made = self._attempt(messages, given)
        if made[2] and (as_text := _with_text_arguments(messages)) != messages:
            again = self._attempt(as_text, given)  # some templates concatenate arguments as text
            return made if again[2] else again
        return made

    def _attempt(self, messages: list[Any], given: Json) -> Rendered:
        try:
            if self.marked:
                text, spans = self._render(messages, given)
            else:
                text, spans, problem = self._spans_by_prefix(messages, given)
                if problem:
                    return text, spans, problem
            if given.get("tools") and self._render(messages, _renamed(given))[0] == text:
                return "", [], NO_TOOLS
            return self._judged(messages, text, spans)
        except Exception as error:  # a template's code may raise anything
            first = (str(error).splitlines() or [""])[0]
            return "", [], f"is refused by the chat template ({type(error).__name__}: {first})"

    def _judged(self, messages: list[Any], text: str, spans: Spans) -> Rendered:
        """Refuse a chat if its spans lack calls, or are empty where messages are not."""
        answers = [message for message in messages if message["role"] == "assistant"]
        calls = Counter(_name(call) for m in answers for call in m.get("tool_calls") or ())
        if calls:
            said = "".join(text[first:last] for first, last in spans)
            if any(said.count(name) < count for name, count in calls.items()):
                return "", [], NO_CALLS
        empty = [self.no_words.fullmatch(text, *span) is not None for span in spans]
        meant = [self._is_empty(message) for message in answers]
        lost = empty != meant if len(empty) == len(meant) else all(empty) and not all(meant)
        return ("", [], NO_ANSWER) if lost else (text, spans, None)

    def _is_empty(self, message: Json) -> bool:
        """Return whether a message has no content, calls or reasoning."""
        fields = any(message.get(name) for name in SPEAKING)
        return not fields and self.no_words.fullmatch(message.get("content") or "") is not None

    def _spans_by_prefix(self, messages: list[Any], given: Json) -> Rendered:
        """Return as spans the text that each assistant turn adds to the rendered prefix."""
        full, _ = self._render(messages, given)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(messages[:index], given, prompted=True)
            after, _ = self._render(messages[: index + 1], given)
            if not (full.startswith(before) and full.startswith(after.rstrip())):
                return "", [], UNSTABLE
            start, end = len(before), min(len(after), len(full))
            content = (message.get("content") or "").strip()
            alone = full[start:end].lstrip().startswith(content)
            if not alone and before == self._render(messages[:index], given)[0]:
                # The template ignores add_generation_prompt: leave the turn's header out.
                start = max(start, full.find(content, start, end))
            stripped = full[start:end].rstrip()
            if stripped.endswith(self.turn_ends):  # text after the end of turn is the template's
                end = start + len(stripped)
            spans.append((start, end))
        return full, spans, None

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
        return texts, marks if self.marked else [[] for _ in texts]

    def _messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Json]:
        """Return messages as templates expect them: content as text, call arguments as objects."""
        made = []
        for message in messages:
            plain = _without_none(message)
            absent = message.get("content") is None and self.tests_content
            plain["content"] = None if absent else said_by(message)
            if plain.get("tool_calls"):
                plain["tool_calls"] = _with_arguments(plain["tool_calls"], _parsed)
            made.append(plain)
        return made


def tools_of(chat: Mapping[str, Any]) -> list[Json]:
    """Return the tools of a chat, which may be a list or JSON text.

    Raises:
        ValueError: they are not a list of objects.
    """
    tools = chat.get("tools") or []
    if isinstance(tools, str):
        tools = json.loads(tools)
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("tools are not a list of objects")
    return [_without_none(tool) for tool in tools]


def said_by(message: Mapping[str, Any]) -> str:
    """Return a message's content as text; a list of text parts is joined."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _without_none(value: Any) -> Any:
    """Drop None values at any depth: columns that only other rows of a table have."""
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _name(call: Mapping[str, Any]) -> str:
    """Return the function name of a call or tool."""
    return str(call.get("function", call)["name"])


def _with_arguments(calls: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Return a copy of a message's calls with changed arguments."""
    calls = copy.deepcopy(calls)
    for call in calls:
        function = call.get("function", call)
        if "arguments" in function:
            function["arguments"] = change(function["arguments"])
    return calls


def _parsed(arguments: Any) -> Any:
    """Parse arguments that are JSON text: most templates serialise the object themselves."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return value if isinstance(value, Mapping) else arguments


def _with_text_arguments(messages: list[Any]) -> list[Any]:
    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return [
        {**m, "tool_calls": _with_arguments(m["tool_calls"], text)} if m.get("tool_calls") else m
        for m in messages
    ]


def _renamed(given: Json) -> Json:
    """Return the template's arguments with renamed tools, to test if it writes tools."""
    tools = copy.deepcopy(given["tools"])
    for tool in tools:
        function = tool.get("function", tool)
        function["name"] = f"{function['name']}_"
    return {**given, "tools": tools}
