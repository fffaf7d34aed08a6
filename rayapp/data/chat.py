"""Render chats to text with the tokenizer's template, and find the spans the assistant wrote.

    [(text, spans)], note = ChatTemplate(tokenizer).render([{"messages": messages}])[0]

A chat is a record with `messages` and optionally `tools` and `chat_template_kwargs`, which are
passed to the template. A span is what a model would write when it is asked for that answer, behind
the text that it would read then. Where the template renders an answer otherwise once the chat goes
on, the chat becomes several texts: one that ends with that answer, and one of the whole chat, in
which the answer is only read. Spans come from the template's `{% generation %}` marks if it has
them, else they are what an answer adds to the generation prompt. If the template omits tools, calls
or a whole answer, the chat is reported as a problem; if it omits reasoning or words beside calls,
the chat is kept and that is noted.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from rayapp.data.kinds import NOT_UNICODE
from rayapp.data.messages import (
    END_OF_THOUGHT,
    REASONING,
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
    with_end_of_thought,
    with_text_arguments,
    without_none,
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
# What templates call the switch that opens a thought in the generation prompt, or closes it.
SWITCHES = ("enable_thinking", "thinking")
OPENED = re.compile(r"<think>\s*$")  # the end of a prompt after which a model thinks first
CLOSED, CLOSING = "\n</think>\n\n", re.compile(r"\s*</think>\s*")
OWN_TEMPLATE = "Set data.chat_template=training, or to a file that"
REFUSED = "is refused by the chat template"
NO_PROMPT = (
    "has an answer that does not follow the chat template's own generation prompt, so that what "
    f"the assistant says cannot be told apart. {OWN_TEMPLATE} marks it with {{% generation %}}"
)
NO_THOUGHT = (
    "has reasoning whose end in the chat template's text cannot be told. Set data.reasoning to "
    "train or drop"
)
SWITCHED = "has answers that follow the generation prompt"
CLOSES = "has answers without reasoning, where the prompt opens a thought that the answer closes"
APART = (
    "has answers that the chat template renders otherwise once the chat goes on: a document of "
    "its own ends with each such answer"
)
NO_TOOLS = f"has tools, which the chat template leaves out. {OWN_TEMPLATE} writes them"
NO_CALLS = f"has tool calls, which the chat template leaves out. {OWN_TEMPLATE} writes them"
NO_ANSWER = (
    f"has an assistant message, which the chat template leaves out. {OWN_TEMPLATE} writes it"
)

logger = logging.getLogger("rayapp.data")

Spans: TypeAlias = list[tuple[int, int]]  # [first, last) in characters
# (texts, each with the spans that bear loss; None or a note), or ([], problem)
Rendered: TypeAlias = tuple[list[tuple[str, Spans]], str | None]


class GivenAnswer(NamedTuple):
    """An answer as a model gives it: the chat ends with it."""

    text: str
    spans: Spans
    note: str | None


class _CannotTellError(Exception):
    """Where an answer's words are cannot be told; the message is the chat's problem."""


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
        blanks = "|".join([r"\s", *map(re.escape, self.turn_ends)])
        self.no_words = re.compile(f"(?:{blanks})*")
        self.tests_content = TESTS_CONTENT.search(template) is not None
        self.takes_parts = TAKES_PARTS.search(template) is not None
        self.marked = GENERATION.search(template) is not None
        self.specials = dict(tokenizer.special_tokens_map)
        self.reasoning, self.pads = reasoning, pads
        self.reads = [name for name in REASONING if reads(template, name)]

    def render(self, chats: Sequence[Mapping[str, Any]]) -> list[Rendered]:
        """Return (texts with the spans that bear loss, note) or ([], problem) per chat.

        Batches are cheaper.
        """
        if self.marked and all(map(_is_plain, chats)):
            try:
                conversations = [self._messages(chat["messages"]) for chat in chats]
                texts, marks = self._render_all(conversations, {})
                return [
                    self._judged(messages, [(text, spans)], [text[a:b] for a, b in spans], None)
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
                made = again if str(made[1]).startswith(REFUSED) else made
        return made

    def _attempt(self, messages: list[Any], given: Json) -> Rendered:
        try:
            full, _ = self._render(messages, given)
            if given.get("tools") and self._render(messages, renamed(given))[0] == full:
                return [], NO_TOOLS
            numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            answers = {i: self._answer(messages[: i + 1], given) for i in numbers}
            said = ["".join(each.text[a:b] for a, b in each.spans) for each in answers.values()]
            wanted = {i: each for i, each in answers.items() if messages[i].get("weight") != 0}
            texts = self._texts(full, wanted)
            notes = [each.note for each in wanted.values() if each.note]
            note = APART if len(texts) > 1 else next(iter(notes), None)
            return self._judged(messages, texts, said, note)
        except UnicodeEncodeError:
            return [], NOT_UNICODE
        except _CannotTellError as problem:
            return [], str(problem)
        except Exception as error:  # a template's code may raise anything
            first = (str(error).splitlines() or [""])[0]
            return [], f"{REFUSED} ({type(error).__name__}: {first})"

    def _texts(self, full: str, answers: Mapping[int, GivenAnswer]) -> list[tuple[str, Spans]]:
        """Return the fewest texts that have each answer as it is where the chat ends with it."""
        texts: dict[int, tuple[str, Spans]] = {}  # by the last answer that it has
        rest, text = dict(answers), full
        while rest:
            kept = {i: found for i, each in rest.items() if (found := self._kept(text, each))}
            if kept:
                spans = [(a, b) for each in kept.values() for a, b in each if a < b]
                texts[max(kept)] = text, spans
            rest = {i: each for i, each in rest.items() if i not in kept}
            text = rest[max(rest)].text if rest else ""
        return [texts[last] for last in sorted(texts)] or [(full, [])]

    def _kept(self, text: str, answer: GivenAnswer) -> Spans:
        """Return the spans of an answer that a longer text has too; none if it lacks some words.

        What ends the answer may go on otherwise in the longer text, behind a token that ends it.
        """
        *spans, (first, last) = answer.spans
        if text.startswith(answer.text[:last]):
            return answer.spans
        same = alike(text, answer.text)
        ends = self.tokens.finditer(answer.text, first, last) if self.tokens else ()
        end = max((token.end() for token in ends if token.end() <= same), default=first)
        whole = end > first and self.no_words.fullmatch(answer.text, end, last)
        return [*spans, (first, end)] if whole else []

    def _judged(
        self, messages: list[Any], texts: list[tuple[str, Spans]], said: list[str], note: str | None
    ) -> Rendered:
        """Refuse a chat if what is said lacks calls, or is empty where messages are not.

        Else note what the template has left out, or `note`.
        """
        answers = [message for message in messages if message["role"] == "assistant"]
        calls = Counter(name_of(call) for m in answers for call in m.get("tool_calls") or ())
        if any("".join(said).count(name) < count for name, count in calls.items()):
            return [], NO_CALLS
        empty = [self.no_words.fullmatch(each) is not None for each in said]
        meant = [self._is_empty(message) for message in answers]
        if empty != meant if len(empty) == len(meant) else all(empty) and not all(meant):
            return [], NO_ANSWER
        weighed = [message for message in answers if message.get("weight") != 0]
        if any(map(self._is_empty, weighed)):
            return texts, SILENT
        return texts, left_out(weighed, [text for text, _ in texts]) or note

    def _is_empty(self, message: Json) -> bool:
        """Return whether a message has no content, calls or reasoning."""
        fields = any(message.get(name) for name in SPEAKING)
        return not fields and self.no_words.fullmatch(said_by(message)) is not None

    def _answer(self, messages: list[Any], given: Json) -> GivenAnswer:
        """Return the last message as the answer that a model gives to those before it."""
        text, marks = self._render(messages, given)
        before, message = messages[:-1], messages[-1]
        if self.marked:
            prompt = self._render(before, given, prompted=True)[0] if before else ""
            begins, note = alike(text, prompt), None
            spans = [(first, last) for first, last in marks if last > begins]
        else:
            text, start, note = self._told_apart(text, before, message, given)
            stripped = text.rstrip()  # the white space behind the end of a turn is the template's
            end = len(stripped if stripped.endswith(self.turn_ends) else text)
            spans = [(start, max(start, end))]
        spans = spans or [(len(text), len(text))]
        if self.reasoning == "mask" and reasoning_of(message):
            begins = self._after_thought(text, messages, given)
            spans = [(max(first, begins), max(last, begins)) for first, last in spans]
        return GivenAnswer(text, spans, note)

    def _told_apart(
        self, text: str, before: list[Any], message: Json, given: Json
    ) -> tuple[str, int, str | None]:
        """Return (text, where what the assistant says begins in it, note)."""
        for prompt, note in self._prompts(before, given):
            if text.startswith(prompt):
                start, content = len(prompt), said_by(message).strip()
                alone = text[start:].lstrip().startswith(content)
                if not alone and prompt == self._render(before, given)[0]:
                    # The template ignores add_generation_prompt: leave the turn's header out.
                    start = max(start, text.find(content, start))
                return text, start, note
        prompt = self._render(before, given, prompted=True)[0]
        opened = OPENED.search(prompt)
        place = opened.start() if opened else len(prompt)
        thought, rest = "\n".join(reasoning_of(message)), text[place:]
        written = "<think>" in rest or (thought and thought in rest)
        if not opened or not text.startswith(prompt[:place]) or written:
            raise _CannotTellError(NO_PROMPT)
        text = prompt + thought + CLOSED + rest.lstrip("\n")
        text.encode()  # which raises an error for half of a surrogate pair
        masked = len(thought + CLOSED) if thought and self.reasoning == "mask" else 0
        return text, len(prompt) + masked, None if thought else CLOSES

    def _prompts(self, before: list[Any], given: Json) -> Iterator[tuple[str, str | None]]:
        """Yield the generation prompts of a template, its default one first, each with a note."""
        yield self._render(before, given, prompted=True)[0], None
        for name in SWITCHES:
            if name not in given and re.search(rf"\b{name}\b", self.template):
                for value in (False, True):
                    note = f"{SWITCHED} of {name}={str(value).lower()}: generate so too"
                    switched = {**given, name: value}
                    yield self._render(before, switched, prompted=True)[0], note

    def _after_thought(self, text: str, messages: list[Any], given: Json) -> int:
        """Return where the last message goes on after its reasoning; 0 if that is left out."""
        marked, _ = self._render([*messages[:-1], with_end_of_thought(messages[-1])], given)
        if END_OF_THOUGHT not in marked:
            return 0
        if marked.replace(END_OF_THOUGHT, "") != text:
            raise _CannotTellError(NO_THOUGHT)
        place = marked.rindex(END_OF_THOUGHT) - marked.count(END_OF_THOUGHT) + 1
        if closed := CLOSING.match(text, place):
            return closed.end()
        ended = self.tokens.search(text, place) if self.tokens else None
        return ended.end() if ended and not text[place : ended.start()].strip() else place

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


def _is_plain(chat: Mapping[str, Any]) -> bool:
    """Return whether a chat has text alone: no tools, arguments, reasoning or weights."""
    return not (chat.get("tools") or chat.get("chat_template_kwargs")) and not any(
        message.get("weight") == 0 or reasoning_of(message) for message in chat["messages"]
    )


def alike(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    places = range(min(len(one), len(other)))
    return bisect_left(places, True, key=lambda place: one[: place + 1] != other[: place + 1])


def reads(template: str, name: str) -> bool:
    """Return whether a template reads a field of this name."""
    escaped = re.escape(name)
    return re.search(rf"\.{escaped}\b|['\"]{escaped}['\"]", template) is not None
