"""Find what the assistant says in a rendered chat, by rendering it again with marks around it.

    words = located(render, messages, text)     # by the number of the message

For templates that render a turn differently when the chat grows (Qwen3, GPT-OSS, DeepSeek): the
text before a turn is then no prefix of the chat's. Marks of private-use characters around each
field's words tell where it is in the full text. That the text with the marks taken out is the text
itself proves that they changed nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE, END = "\ue0a0", "\ue0a1", "\ue0a2"
MARK = re.compile(f"([{OPEN}{CLOSE}])([0-9]+)([rs])([0-9]+){END}")
THOUGHT = re.compile(r"(</?think>)")
REASONING = ("reasoning_content", "thinking", "reasoning")
AFTER_THOUGHT = re.compile(r"\s*</think>\s*")

Json = dict[str, Any]


@dataclass
class Words:
    """Where the words of a message are in the text: [first, last) in characters."""

    first: int
    last: int
    thought: int | None = None
    """The end of its reasoning, if there is any."""
    said: int | None = None
    """The beginning of what follows its reasoning, if anything does."""


def located(
    render: Callable[[list[Any]], str], messages: Sequence[Json], text: str
) -> dict[int, Words] | None:
    """Return the place of each message's words in `text`; None if marks change what is rendered.

    A message whose words the template leaves out is missing.
    """
    if OPEN in text or CLOSE in text:
        return None
    for roles in (("assistant", "user", "system", "tool"), ("assistant",)):
        marker = _Marker()
        some = [marker.message(i, m) if m["role"] in roles else m for i, m in enumerate(messages)]
        try:
            marked = render(some)
        except Exception:  # the template's code may raise anything; so do fewer marks, or none
            continue
        if MARK.sub("", marked) == text:
            return _places(marked)
    return None


def _places(marked: str) -> dict[int, Words]:
    """Return the places by message; words that a template repeats are where they are first."""
    places: dict[int, Words] = {}
    taken = 0
    seen = set()
    for mark in MARK.finditer(marked):
        at = mark.start() - taken
        taken += len(mark[0])
        number, thinks, opens = int(mark[2]), mark[3] == "r", mark[1] == OPEN
        if (mark[1], mark[4]) in seen:
            continue
        seen.add((mark[1], mark[4]))
        words = places.setdefault(number, Words(at, at))
        words.first, words.last = min(words.first, at), max(words.last, at)
        if thinks and not opens:
            words.thought = max(words.thought or 0, at)
        if not thinks and opens and words.said is None:
            words.said = at
    return places


class _Marker:
    """Puts marks around the content of messages, their reasoning and the names of their calls."""

    def __init__(self) -> None:
        self.count = 0

    def message(self, number: int, message: Json) -> Json:
        """Return a marked copy of the message with this number."""
        made = dict(message)
        if isinstance(made.get("content"), list):
            parts = [self.message(number, {"content": part["text"]}) for part in made["content"]]
            made["content"] = [{"type": "text", "text": part["content"]} for part in parts]
        elif isinstance(made.get("content"), str):
            thinks, content = "</think>" in made["content"], ""
            for part in THOUGHT.split(made["content"]):
                if THOUGHT.fullmatch(part):
                    thinks = thinks and part != "</think>"
                    content += part
                else:
                    content += self.around(part, number, "r" if thinks else "s")
            made["content"] = content
        for name in REASONING:
            if isinstance(made.get(name), str):
                made[name] = self.around(made[name], number, "r")
        if made.get("tool_calls"):
            made["tool_calls"] = [self.call(call, number) for call in made["tool_calls"]]
        return made

    def call(self, call: Json, number: int) -> Json:
        """Return a marked copy of a call."""
        if "function" in call:
            return {**call, "function": self.call(call["function"], number)}
        return {**call, "name": self.around(call["name"], number, "s")}

    def around(self, text: str, number: int, what: str) -> str:
        """Put marks around the words of a text, inside its blanks, which templates may trim."""
        words = text.strip()
        if not words:
            return text
        before, _, after = text.partition(words)
        self.count += 1
        ends = f"{number}{what}{self.count}{END}"
        return f"{before}{OPEN}{ends}{words}{CLOSE}{ends}{after}"


def header_of(prompted: str, plain: str, tokens: re.Pattern[str] | None) -> str:
    """Return what a template writes to have the assistant speak: the generation prompt.

    `plain` is the text without it, which may end in something else instead.
    """
    cut = _alike(prompted, plain)
    if tokens is not None:
        inside = (t.start() for t in tokens.finditer(prompted) if t.start() < cut < t.end())
        cut = next(inside, cut)
    return prompted[cut:]


def beginnings(header: str, tokens: re.Pattern[str] | None) -> list[str]:
    """Return a header and its beginnings that end at an added token, the longest first.

    A template may write less before an earlier turn: no opened <think>, for example. A beginning
    holds at least the first token and what follows it, which name the role.
    """
    later = list(tokens.finditer(header))[1:] if tokens is not None else []
    cuts = {len(header), *(t.start() for t in later), *(t.end() for t in later)}
    return [header[:cut] for cut in sorted(cuts, reverse=True) if cut]


def start_of(text: str, low: int, words: Words, headers: Sequence[str]) -> int | None:
    """Return where a turn begins: after the last header before its words; None if there is none."""
    places = ((text.rfind(header, low, words.first), header) for header in headers)
    return next((place + len(header) for place, header in places if place >= 0), None)


def end_of(
    text: str, words: Words, high: int, tail: str | None, tokens: re.Pattern[str] | None
) -> int | None:
    """Return where a turn ends: after the token that ends it; None if it cannot be told.

    `tail` is what follows the turn's words where the chat ends with it, if that is known.
    """
    last = words.last
    same = _alike(text[last:high], tail or "")
    if tail is not None and same == len(tail):
        return last + len(tail.rstrip())
    if tokens is None:
        return None
    ends = [
        token.end() for token in tokens.finditer(text, last, high) if token.end() <= last + same
    ]
    if ends and not text[ends[-1] : last + same].strip(" \n"):
        return ends[-1]
    first = tokens.search(text, last, high)
    return first.end() if first else None


def _alike(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def after_thought(text: str, words: Words, tokens: re.Pattern[str] | None) -> int:
    """Return where a turn goes on after its reasoning and what closes that."""
    assert words.thought is not None
    if closed := AFTER_THOUGHT.match(text, words.thought):
        return closed.end()
    ended = tokens.search(text, words.thought) if tokens is not None else None
    if ended and not text[words.thought : ended.start()].strip():
        return ended.end()
    return max(words.thought, words.said or 0)
