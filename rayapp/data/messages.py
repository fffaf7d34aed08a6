"""The messages of chats: their content, reasoning, calls and tools, as templates expect them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

REASONING = ("reasoning_content", "thinking", "reasoning")
END_OF_THOUGHT = "\ue0a1"  # of the private use area
THINKING = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
NO_REASONING = "has reasoning that the chat template leaves out"
NO_WORDS = "has words beside tool calls that the chat template leaves out"
SILENT = "has an empty answer, which teaches the model to say nothing"
# Fields of a message that rayapp reads; SPEAKING are those of an answer beside its content.
SPEAKING = ("tool_calls", *REASONING)
FIELDS = ("role", "content", "name", "tool_call_id", "weight", *SPEAKING)

Json: TypeAlias = dict[str, Any]
"""A JSON object: from a user's record, or arguments of a template."""


def reasoning_of(message: Json) -> list[str]:
    """Return the reasoning of a message, in its fields or in its content."""
    fields = [message[name].strip() for name in REASONING if message.get(name)]
    thought = THINKING.match(said_by(message))
    return [*fields, thought[1].strip()] if thought else fields


def with_end_of_thought(message: Json) -> Json:
    """Return a copy of a message with a mark behind the words of its reasoning."""
    made = dict(message)
    for name in REASONING:
        if isinstance(made.get(name), str):
            words = made[name].rstrip()
            made[name] = words + END_OF_THOUGHT + made[name][len(words) :]
    content = said_by(message)
    if THINKING.match(content):
        made["content"] = re.sub(r"\s*</think>", rf"{END_OF_THOUGHT}\g<0>", content, count=1)
    return in_parts([made])[0] if isinstance(message.get("content"), list) else made


def left_out(answers: list[Json], texts: Sequence[str]) -> str | None:
    """Return a note on words of the assistant that are in none of the texts."""

    def lacks(words: str) -> bool:
        return all(words not in text for text in texts)

    if any(lacks(words) for message in answers for words in reasoning_of(message)):
        return NO_REASONING
    beside = (m for m in answers if m.get("tool_calls"))
    said = (THINKING.sub("", said_by(message)).strip() for message in beside)
    return NO_WORDS if any(map(lacks, said)) else None


def tools_of(chat: Mapping[str, Any], pads: bool = False) -> list[Json]:
    """Return the tools of a chat, which may be a list or JSON text.

    With `pads` the list is from a table, which adds None where a tool lacks a field of another.

    Raises:
        ValueError: they are not a list of objects.
    """
    tools = chat.get("tools") or []
    if isinstance(tools, str):
        tools, pads = json.loads(tools), False
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("tools are not a list of objects")
    return [without_none(tool) if pads else dict(tool) for tool in tools]


def said_by(message: Mapping[str, Any]) -> str:
    """Return a message's content as text; a list of text parts is joined."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def without_none(value: Any) -> Any:
    """Drop None values at any depth: fields that only other rows of a table have."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def name_of(call: Mapping[str, Any]) -> str:
    """Return the function name of a call or tool."""
    return str(call.get("function", call)["name"])


def with_arguments(calls: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Return a copy of a message's calls with changed arguments."""
    calls = copy.deepcopy(calls)
    for call in calls:
        function = call.get("function", call)
        if "arguments" in function:
            function["arguments"] = change(function["arguments"])
    return calls


def parsed(arguments: Any) -> Any:
    """Parse arguments that are JSON text: most templates serialise the object themselves."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return value if isinstance(value, Mapping) else arguments


def with_text_arguments(messages: list[Any]) -> list[Any]:
    """Return the messages with the arguments of their calls as JSON text, as some templates ask."""

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return [
        {**m, "tool_calls": with_arguments(m["tool_calls"], text)} if m.get("tool_calls") else m
        for m in messages
    ]


def renamed(given: Json) -> Json:
    """Return the template's arguments with renamed tools, to test if it writes tools."""
    tools = copy.deepcopy(given["tools"])
    for tool in tools:
        function = tool.get("function", tool)
        function["name"] = f"{function['name']}_"
    return {**given, "tools": tools}


def in_parts(messages: list[Any]) -> list[Any]:
    """Return messages whose content is a list with one part of text."""
    return [{**m, "content": [{"type": "text", "text": said_by(m)}]} for m in messages]
