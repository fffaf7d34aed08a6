"""Check chats under the templates of published models, as the package trl carries them."""

from __future__ import annotations

from typing import Any

import published_templates as published
import pytest

from rayapp.data.chat import ChatTemplate
from rayapp.data.documents import Renderer
from rayapp.data.templates import TemplateError, template_of

pytestmark = pytest.mark.skipif(
    published.folder() is None, reason="the templates are in trl: pip install '.[chat]'"
)
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "No?"},
    {"role": "assistant", "content": "Bye now."},
]
THOUGHT = [
    TURNS[0],
    {**TURNS[1], "reasoning_content": "Two and two."},
    TURNS[2],
    {**TURNS[3], "reasoning_content": "He doubts."},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell it.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}
CALL = {
    "type": "function",
    "id": "call00001",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
CALLING = [
    TURNS[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "sun"},
    {"role": "assistant", "content": "Sun."},
    *TURNS[2:],
]
IN_PARTS = ("idefics3", "llava_next", "smolvlm")  # take content as a list of parts
WITHOUT_TOOLS = (  # what their templates say of tools, calls or the role of a tool
    *("cohere", "cohere2", "gemma", "gemma3", "llama3", "phi3", "phi3_5", "qwen2_5_vl"),
    *("deepseek_r1_distill", "deepseekv3", "lfm2", *IN_PARTS),
)


def say(name: str, chat: dict[str, Any], **settings: str) -> tuple[str, list[str], str | None]:
    """Return the text of a chat, what of it bears loss, and the note or problem."""
    tokenizer = published.tokenizer(published.template(name))
    renderer = Renderer(tokenizer, "chat", **settings)
    assert renderer.chats is not None
    ((text, spans, note),) = renderer.chats.render([chat])
    document, why = renderer.document(chat)
    assert why == note and (document is not None) == bool(text)
    if document is not None:  # the tokens are those of the spans
        said = tokenizer.decode(document.tokens[document.loss])
        assert "".join(said.split()) == "".join("".join(text[a:b] for a, b in spans).split())
    return text, [text[a:b] for a, b in spans], note


@pytest.mark.parametrize("name", published.names())
def test_two_turns_are_rendered_as_the_template_does_and_both_answers_bear_loss(name: str) -> None:
    text, said, note = say(name, {"messages": TURNS})
    tokenizer = published.tokenizer(published.template(name))
    template = ChatTemplate(tokenizer).template  # the model's own, with the day fixed
    messages: list[Any] = TURNS
    if name in IN_PARTS:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TURNS]
    assert note is None
    assert text == tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template)
    assert len(said) == 2 and "It is 4." in said[0] and "Bye now." in said[1]
    assert not any(turn["content"] in "".join(said) for turn in TURNS[::2])
    assert not any(mark in "".join(said) for mark in ("user", "User", "system", "[INST]")[1:])


@pytest.mark.parametrize("name", published.names())
def test_tools_and_calls_are_rendered_or_refused_by_name(name: str) -> None:
    text, said, note = say(name, {"messages": CALLING, "tools": [TOOL]})
    if name in WITHOUT_TOOLS:
        assert not text and str(note).startswith(
            ("has tools, which", "has tool calls, which", "is refused by the chat template (")
        )
        return
    assert note is None and len(said) == 3
    assert "weather" in said[0] and "Rome" in said[0] and "sun" not in said[0]
    assert "Sun." in said[1] and "Bye now." in said[2] and "Tell it." in text
    tokenizer = published.tokenizer(published.template(name))
    template = ChatTemplate(tokenizer)
    messages = template._messages(CALLING)
    expected = tokenizer.apply_chat_template(
        messages, tools=[TOOL], tokenize=False, chat_template=template.template
    )
    assert text == expected


# Read off the templates by hand: what a model writes after the prompt, up to what ends its turn.
BY_HAND: dict[str, tuple[list[str], list[str] | None, list[str]]] = {
    # name: (two turns, with a call, with reasoning)
    "qwen3": (
        ["It is 4.<|im_end|>", "<think>\n\n</think>\n\nBye now.<|im_end|>"],
        [
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
            "<|im_end|>",
            "Sun.<|im_end|>",
            "<think>\n\n</think>\n\nBye now.<|im_end|>",
        ],
        ["It is 4.<|im_end|>", "<think>\nHe doubts.\n</think>\n\nBye now.<|im_end|>"],
    ),
    "gptoss": (
        [
            "<|channel|>final<|message|>It is 4.<|end|>",
            "<|channel|>final<|message|>Bye now.<|return|>",
        ],
        [
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
            "<|channel|>final<|message|>Sun.<|end|>",
            "<|channel|>final<|message|>Bye now.<|return|>",
        ],
        [
            "<|channel|>final<|message|>It is 4.<|end|>",
            "<|channel|>analysis<|message|>He doubts.<|end|><|start|>assistant<|channel|>final"
            "<|message|>Bye now.<|return|>",
        ],
    ),
    "phi3": (
        ["It is 4.<|end|>", "Bye now.<|end|>\n<|endoftext|>"],
        None,
        ["It is 4.<|end|>", "Bye now.<|end|>\n<|endoftext|>"],
    ),
    "deepseek_r1_distill": (
        [
            "It is 4.<\uff5cend\u2581of\u2581sentence\uff5c>",
            "Bye now.<\uff5cend\u2581of\u2581sentence\uff5c>",
        ],
        None,
        [
            "It is 4.<\uff5cend\u2581of\u2581sentence\uff5c>",
            "Bye now.<\uff5cend\u2581of\u2581sentence\uff5c>",
        ],
    ),
    "nemotron_3_nano": (  # the prompt opens <think>, so the model begins by closing it
        ["</think>It is 4.<|im_end|>", "</think>Bye now.<|im_end|>"],
        [
            "</think>\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
            "</function>\n</tool_call>\n<|im_end|>",
            "</think>Sun.<|im_end|>",
            "</think>Bye now.<|im_end|>",
        ],
        ["</think>\nIt is 4.<|im_end|>", "He doubts.\n</think>\nBye now.<|im_end|>"],
    ),
    "llama3_1": (
        ["It is 4.<|eot_id|>", "Bye now.<|eot_id|>"],
        [
            '{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>',
            "Sun.<|eot_id|>",
            "Bye now.<|eot_id|>",
        ],
        ["It is 4.<|eot_id|>", "Bye now.<|eot_id|>"],
    ),
    "gemma": (
        ["It is 4.<end_of_turn>", "Bye now.<end_of_turn>"],
        None,
        ["It is 4.<end_of_turn>", "Bye now.<end_of_turn>"],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_loss_is_where_a_person_reads_it(name: str) -> None:
    plain, called, thought = BY_HAND[name]
    assert say(name, {"messages": TURNS})[1] == plain
    if called is not None:
        assert say(name, {"messages": CALLING, "tools": [TOOL]})[1] == called
    _, said, note = say(name, {"messages": THOUGHT})
    assert said == thought and note == "has reasoning that the chat template leaves out"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3", ["It is 4.<|im_end|>", "Bye now.<|im_end|>"]),
        ("nemotron_3_nano", ["</think>\nIt is 4.<|im_end|>", "Bye now.<|im_end|>"]),
        (
            "gptoss",
            [
                "<|channel|>final<|message|>It is 4.<|end|>",
                "<|start|>assistant<|channel|>final<|message|>Bye now.<|return|>",
            ],
        ),
    ],
)
def test_reasoning_can_be_read_without_loss(name: str, said: list[str]) -> None:
    text, found, _ = say(name, {"messages": THOUGHT}, reasoning="mask")
    assert text == say(name, {"messages": THOUGHT})[0] and "He doubts." in text
    assert found == said
    assert "He doubts." not in "".join(found)


def test_a_call_alone_is_rendered_by_deepseeks_template() -> None:
    """It takes arguments as text, knows no tools, and ends no single call."""
    _, said, note = say("deepseek_r1_distill", {"messages": CALLING})
    assert note is None and len(said) == 3 and said[1].startswith("Sun.<")
    assert "weather" in said[0] and 'json\n{"city": "Rome"}\n```' in said[0]


# ---- Training variants -------------------------------------------------------------------------


@pytest.mark.full
def test_training_variants_are_taken_from_trl() -> None:
    pytest.importorskip("trl.chat_template_utils", reason="pip install '.[chat]'")
    variants = set(published.names(training=True))
    for name in published.names():
        if f"{name}_training" not in variants:
            continue
        tokenizer = published.tokenizer(published.template(name))
        variant = template_of("training", tokenizer)
        assert variant == published.template(f"{name}_training"), name
    thought = template_of("training", published.tokenizer(published.template("qwen3")))
    _, said, note = say("qwen3", {"messages": THOUGHT}, template=thought)
    assert note is None and said == [
        "<think>\nTwo and two.\n</think>\n\nIt is 4.<|im_end|>\n",
        "<think>\nHe doubts.\n</think>\n\nBye now.<|im_end|>\n",
    ]
    with pytest.raises(TemplateError, match=r"training is not possible: trl knows no variant"):
        template_of("training", published.tokenizer(published.template("qwen3") + "x"))
