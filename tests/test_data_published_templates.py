"""Check chats under the templates of published models, as the package trl carries them."""

from __future__ import annotations

from typing import Any

import published_templates as published
import pytest

from rayapp.data.chat import APART, ChatTemplate
from rayapp.data.messages import NO_REASONING
from rayapp.data.rendering import Renderer
from rayapp.data.tokens import TemplateError, template_of

pytestmark = pytest.mark.skipif(
    published.folder() is None, reason="the templates are in trl: pip install '.[chat]'"
)
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "No?"},
    {"role": "assistant", "content": "Bye now."},
]
SAID = "It is 4.", "Bye now."
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


def say(name: str, chat: dict[str, Any], **settings: str) -> tuple[list[str], list[str], Any]:
    """Return the texts of a chat, what of them bears loss, and the note or problem."""
    tokenizer = published.tokenizer(published.template(name))
    renderer = Renderer(tokenizer, "chat", **settings)
    assert renderer.chats is not None
    ((texts, note),) = renderer.chats.render([chat])
    document, why = renderer.document(chat)
    assert why == note and (document is not None) == bool(texts)
    for each, (text, spans) in zip(document or (), texts, strict=True):
        said = tokenizer.decode(each.tokens[each.loss])  # the tokens are those of the spans
        assert "".join(said.split()) == "".join("".join(text[a:b] for a, b in spans).split())
    return [text for text, _ in texts], [text[a:b] for text, spans in texts for a, b in spans], note


def rendered(name: str, messages: list[dict[str, Any]], **arguments: Any) -> str:
    """Return what transformers renders by the model's own template, with the day fixed."""
    tokenizer = published.tokenizer(published.template(name))
    template = ChatTemplate(tokenizer)
    made: list[Any] = template._messages(messages)
    if name in IN_PARTS:
        made = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in made]
    text = tokenizer.apply_chat_template(
        made, tokenize=False, chat_template=template.template, **arguments
    )
    return str(text)


@pytest.mark.parametrize("chat", [TURNS, THOUGHT], ids=["plain", "thought"])
@pytest.mark.parametrize("name", published.names())
def test_what_bears_loss_is_what_a_model_writes_behind_its_prompt(
    name: str, chat: list[dict[str, Any]]
) -> None:
    """Both answers do, in a text that is, up to the answer's end, that of a chat ending with it."""
    texts, said, _ = say(name, {"messages": chat})
    assert len(said) == 2 and "It is 4." in said[0] and "Bye now." in said[1]
    assert not any(turn["content"] in "".join(said) for turn in TURNS[::2])
    assert len(texts) < 3
    for number, each in ((1, said[0]), (3, said[1])):
        text = texts[0] if number == 1 else texts[-1]
        start = text.index(each)
        switched = [{}, {"enable_thinking": False}, {"enable_thinking": True}]
        prompts = [
            rendered(name, chat[:number], add_generation_prompt=True, **each) for each in switched
        ]
        whole = rendered(name, chat[: number + 1])
        assert text[:start] in prompts
        if "deepseek" not in name:  # its template writes no reasoning, which its prompt begins
            assert whole.startswith(text[: start + len(each)])


@pytest.mark.parametrize("name", published.names())
def test_tools_and_calls_are_rendered_or_refused_by_name(name: str) -> None:
    texts, said, note = say(name, {"messages": CALLING, "tools": [TOOL]})
    if name in WITHOUT_TOOLS:
        assert not texts and str(note).startswith(
            ("has tools, which", "has tool calls, which", "is refused by the chat template (")
        )
        return
    assert len(said) == 3 and (len(texts) > 1) == (note == APART)
    calls = [number for number, each in enumerate(said) if "weather" in each and "Rome" in each]
    assert calls == [1 if name == "gptoss" else 0] and "Sun." in said[1 - calls[0]]
    assert "sun" not in "".join(said) and "Bye now." in said[2] and "Tell it." in texts[-1]
    assert texts[-1] == rendered(name, CALLING, tools=[TOOL])


# Read off the templates by hand: what a model writes after the prompt, up to what ends its turn.
END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
THINKS, SAYS = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
ALSO_SAYS = f"<|end|><|start|>assistant{SAYS}"
CALL_JSON = '{"name": "weather", "arguments": {"city": "Rome"}}'
CALLS = (  # as Nemotron and Qwen 3.5 write a call
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
)
NEMOTRON: Any = (  # its prompt opens <think>, or, with enable_thinking=false, closes it too
    (1, "It is 4.<|im_end|>", "Bye now.<|im_end|>"),
    (1, f"\n{CALLS}\n<|im_end|>", "Sun.<|im_end|>", "Bye now.<|im_end|>"),
    (2, "Two and two.\n</think>\nIt is 4.<|im_end|>", "He doubts.\n</think>\nBye now.<|im_end|>"),
)
QWEN: Any = (  # its prompt opens <think>
    (2, "\n</think>\n\nIt is 4.<|im_end|>", "\n</think>\n\nBye now.<|im_end|>"),
    (
        *(2, f"\n</think>\n\n{CALLS}<|im_end|>", "\n</think>\n\nSun.<|im_end|>"),
        "\n</think>\n\nBye now.<|im_end|>",
    ),
    (
        *(2, "Two and two.\n</think>\n\nIt is 4.<|im_end|>"),
        "He doubts.\n</think>\n\nBye now.<|im_end|>",
    ),
)
CLOSELY: Any = (  # newer ones put no line breaks around the end of a thought
    *NEMOTRON[:2],
    (2, "Two and two.</think>It is 4.<|im_end|>", "He doubts.</think>Bye now.<|im_end|>"),
)
PHI: Any = ((1, "It is 4.<|end|>", "Bye now.<|end|>\n<|endoftext|>"), None, None)
DEEPSEEK: Any = (  # its prompt opens <think>, and no turn of its template has a thought
    (2, f"\n</think>\n\nIt is 4.{END}", f"\n</think>\n\nBye now.{END}"),
    None,
    (2, f"Two and two.\n</think>\n\nIt is 4.{END}", f"He doubts.\n</think>\n\nBye now.{END}"),
)
# Read off the templates by hand: how many documents a chat becomes, and what a model writes after
# each prompt, up to what ends its turn: of two turns, with a call, with reasoning.
BY_HAND: dict[str, Any] = {
    "phi3": PHI,
    "phi3_5": PHI,
    "gptoss": (
        (2, f"{SAYS}It is 4.<|return|>", f"{SAYS}Bye now.<|return|>"),
        (
            *(2, f"{SAYS}Sun.<|return|>"),  # the answer is rendered otherwise later, the call not
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
            f"{SAYS}Bye now.<|return|>",
        ),
        (
            *(2, f"{THINKS}Two and two.{ALSO_SAYS}It is 4.<|return|>"),
            f"{THINKS}He doubts.{ALSO_SAYS}Bye now.<|return|>",
        ),
    ),
    "deepseek_r1_distill": DEEPSEEK,
    "deepseekv3": DEEPSEEK,
    "nemotron_3_nano": NEMOTRON,
    "nemotron_3_super": NEMOTRON,
    "nemotron_3_ultra": CLOSELY,
    "nemotron_3_5_lightning": CLOSELY,
    "qwen3": (
        (
            *(2, "<think>\n\n</think>\n\nIt is 4.<|im_end|>"),
            "<think>\n\n</think>\n\nBye now.<|im_end|>",
        ),
        (
            3,
            f"<think>\n\n</think>\n\n<tool_call>\n{CALL_JSON}\n</tool_call><|im_end|>",
            *("<think>\n\n</think>\n\nSun.<|im_end|>", "<think>\n\n</think>\n\nBye now.<|im_end|>"),
        ),
        (
            *(2, "<think>\nTwo and two.\n</think>\n\nIt is 4.<|im_end|>"),
            "<think>\nHe doubts.\n</think>\n\nBye now.<|im_end|>",
        ),
    ),
    "qwen3_5_think": QWEN,
    "qwen3_6": QWEN,
    "qwen3_5_nothink": (
        (2, "It is 4.<|im_end|>", "Bye now.<|im_end|>"),
        (2, f"{CALLS}<|im_end|>", "Sun.<|im_end|>", "Bye now.<|im_end|>"),
        QWEN[2],
    ),
    "llama3_1": (
        (1, "It is 4.<|eot_id|>", "Bye now.<|eot_id|>"),
        (
            *(1, '{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>'),
            *("Sun.<|eot_id|>", "Bye now.<|eot_id|>"),
        ),
        None,
    ),
    "gemma": ((1, "It is 4.<end_of_turn>", "Bye now.<end_of_turn>"), None, None),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_loss_is_where_a_person_reads_it(name: str) -> None:
    plain, called, thought = BY_HAND[name]
    texts, said, _ = say(name, {"messages": TURNS})
    assert (len(texts), *said) == plain
    if called is not None:
        texts, said, _ = say(name, {"messages": CALLING, "tools": [TOOL]})
        assert (len(texts), *said) == called
    texts, said, note = say(name, {"messages": THOUGHT})
    assert (len(texts), *said) == (thought or plain)
    assert note == (APART if thought else NO_REASONING)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3", ["It is 4.<|im_end|>", "Bye now.<|im_end|>"]),
        ("nemotron_3_nano", ["It is 4.<|im_end|>", "Bye now.<|im_end|>"]),
        ("deepseek_r1_distill", [f"It is 4.{END}", f"Bye now.{END}"]),
        (
            "gptoss",
            [f"{words}<|return|>".join(("<|start|>assistant" + SAYS, "")) for words in SAID],
        ),
    ],
)
def test_reasoning_can_be_read_without_loss(name: str, said: list[str]) -> None:
    texts, found, _ = say(name, {"messages": THOUGHT}, reasoning="mask")
    assert texts == say(name, {"messages": THOUGHT})[0] and "He doubts." in texts[1]
    assert found == said
    unweighed = [TURNS[0], {**THOUGHT[1], "weight": 0}, *THOUGHT[2:]]
    assert say(name, {"messages": unweighed}, reasoning="mask")[:2] == (texts[1:], said[1:])


def test_a_call_alone_is_rendered_by_deepseeks_template() -> None:
    """It takes arguments as text, knows no tools, and ends no single call."""
    _, said, note = say("deepseek_r1_distill", {"messages": CALLING})
    assert note == APART and len(said) == 3 and said[1].startswith("Sun.<")
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
