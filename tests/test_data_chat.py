"""Check that of a chat exactly what the assistant says bears loss, whatever the template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rayapp.data.chat import APART, CLOSES, SWITCHED, ChatTemplate
from rayapp.data.kinds import NOT_UNICODE
from rayapp.data.messages import SILENT
from rayapp.data.packing import Document
from rayapp.data.rendering import Renderer
from rayapp.data.tokens import (
    CHAT_TEMPLATE,
    FIRST_TEMPLATE,
    load_tokenizer,
    save_tokenizer,
    tokenizer_digest,
    train_bpe,
)
from rayapp.storage import open_storage

CONFIGS = Path(__file__).parents[1] / "configs"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (  # as Llama 3.2: a default system turn with a date, contents trimmed, BOS first
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}"
    "{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' }}"
    "{{ system | trim }}<|eot_id|>"
    "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
MISTRAL = (  # no generation prompt, strict about turns
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
MARKED = FIRST_TEMPLATE.replace("'role'", '"role"')  # marks, and writes neither tools nor calls
HEADERS = (  # writes the header of the assistant's turn only with the turn
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
LAST_ONLY = (  # like Qwen3: what the last turn holds goes away when the chat grows
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4.\n\nAnything else?"},
    {"role": "user", "content": "No. 日本"},
    {"role": "assistant", "content": "Bye é \U0001f600"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
SAID = [turn["content"] for turn in TURNS if turn["role"] == "assistant"]


def tokenizer_with(template: str, trim_offsets: bool | None = None) -> Any:
    """Return a BPE tokenizer with the template; `trim_offsets` gives it Llama 3's own offsets."""
    texts = ["user\nWhat is it? assistant\nIt is that. Bye  4.\n\n"] * 3
    rules = Tokenizer.from_str(train_bpe(iter(texts), 330).backend_tokenizer.to_str())
    rules.add_special_tokens(["<s>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"])
    if trim_offsets is not None:
        rules.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return PreTrainedTokenizerFast(
        tokenizer_object=rules,
        bos_token="<s>",
        eos_token="<|endoftext|>",
        chat_template=template,
    )


def masked(tokenizer: Any, document: Document) -> str:
    return str(tokenizer.decode(document.tokens[document.loss], skip_special_tokens=False))


def rendered(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[str, str]:
    """Return (all text, text that bears loss)."""
    document, problem = Renderer(tokenizer, "chat").document({"messages": messages})
    assert problem is None and document is not None and not document.earlier, problem
    return str(tokenizer.decode(document.tokens)), masked(tokenizer, document)


@pytest.mark.parametrize("trim", [None, True, False])
@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHAT_TEMPLATE, "<|im_end|>"),
        (CHATML, "<|im_end|>"),
        (LLAMA, "<|eot_id|>"),
        (MISTRAL, "<|endoftext|>"),
        (HEADERS, "<|im_end|>"),
    ],
    ids=["marked", "chatml", "llama", "mistral", "headers"],
)
def test_loss_is_on_what_the_assistant_says_and_its_end(
    template: str, end: str, trim: bool | None
) -> None:
    tokenizer = tokenizer_with(template, trim)
    chats = [TURNS, TURNS[:2]] if template is MISTRAL else [TURNS, TURNS[:2], [SYSTEM, *TURNS]]
    for messages in chats:
        text, said = rendered(tokenizer, messages)
        wanted = "".join(m["content"] + end for m in messages if m["role"] == "assistant")
        if template is MISTRAL:  # it writes a space before an answer, in the answer's first token
            said = "".join(part.strip() + end for part in said.split(end)[:-1])
        assert said == wanted
        if "strftime" not in template:
            assert text == tokenizer.apply_chat_template(messages, tokenize=False)


# The first letter is none that could be one token with the line break of the header.
SPACED = st.from_regex(r"[abé4日.][ \nabé4日.]{0,12}", fullmatch=True)


@settings(max_examples=150, deadline=None)
@given(contents=st.lists(SPACED, min_size=2, max_size=6), trim=st.booleans(), marked=st.booleans())
def test_contents_with_blanks_at_their_ends(contents: list[str], trim: bool, marked: bool) -> None:
    roles = ["user", "assistant"] * 3
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    tokenizer = TRIMMED[trim, marked]
    _, said = rendered(tokenizer, messages)
    assert said == "".join(content + "<|im_end|>" for content in contents[1::2])


TRIMMED = {
    (trim, marked): tokenizer_with(CHAT_TEMPLATE if marked else CHATML, trim)
    for trim in (True, False)
    for marked in (True, False)
}


@pytest.mark.parametrize(
    "tags",
    [
        ("{% generation %}", "{% endgeneration %}"),
        ("{%- generation -%}", "{%- endgeneration -%}"),
        ("{%generation%}", "{%endgeneration%}"),
        ("{%+ generation +%}", "{%+ endgeneration +%}"),
        ("{%-  generation\t%}", "{%- endgeneration %}"),
    ],
)
def test_marks_are_recognised_however_they_are_written(tags: tuple[str, str]) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}:{% if m['role'] == 'assistant' %}"
        + tags[0]
        + "{{ m['content'] }}<|im_end|>"
        + tags[1]
        + "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_with(template)
    assert ChatTemplate(tokenizer).marked
    assert rendered(tokenizer, TURNS)[1] == "".join(text + "<|im_end|>" for text in SAID)


def test_marks_agree_with_transformers_own_mask() -> None:
    """transformers names it `assistant_masks` (5.23); there is one mask a token."""
    tokenizer = tokenizer_with(CHAT_TEMPLATE)
    theirs = tokenizer.apply_chat_template(
        TURNS, return_dict=True, return_assistant_tokens_mask=True
    )
    assert set(theirs) >= {"input_ids", "assistant_masks"}
    ours, _ = Renderer(tokenizer, "chat").document({"messages": TURNS})
    assert ours is not None and ours.tokens.tolist() == theirs["input_ids"]
    assert ours.loss.tolist() == [bool(bit) for bit in theirs["assistant_masks"]]


def test_a_mark_that_ends_in_a_blank_does_not_spill_over() -> None:
    """Where offsets are trimmed, no token holds that blank; transformers 5.23 then masks all."""
    template = (
        "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}"
        "{% generation %} {{ m['content'] }} {% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}<|im_end|>{% endfor %}"
    )
    _, said = rendered(tokenizer_with(template, trim_offsets=True), TURNS)
    assert re.sub(r"\s+", " ", said).strip() == re.sub(r"\s+", " ", " ".join(SAID))


UPPER = CHATML.replace(  # writes an answer otherwise where the chat goes on
    "{{ m['content'] }}",
    "{{ m['content'] | upper if m['role'] == 'assistant' and not loop.last else m['content'] }}",
)


@pytest.mark.parametrize("template", [LAST_ONLY, UPPER], ids=["last only", "upper"])
def test_an_answer_that_is_rendered_otherwise_later_is_trained_where_the_chat_ends_with_it(
    template: str,
) -> None:
    tokenizer, thought = tokenizer_with(template), "<think>\n\n</think>\n\n"
    document, note = Renderer(tokenizer, "chat").document({"messages": TURNS})
    assert document is not None and note == APART
    for each, turns, answer in zip(document, (TURNS[:2], TURNS), SAID, strict=True):
        said = f"{thought}{answer}<|im_end|>" if template is LAST_ONLY else f"{answer}<|im_end|>"
        assert tokenizer.decode(each.tokens) == tokenizer.apply_chat_template(turns, tokenize=False)
        assert masked(tokenizer, each) == said


def test_an_answer_behind_no_prompt_of_the_template_is_refused() -> None:
    template = LAST_ONLY.replace("assistant\n{% endif %}", "other\n{% endif %}")
    document, problem = Renderer(tokenizer_with(template), "chat").document({"messages": TURNS})
    assert document is None and problem is not None
    assert problem.startswith("has an answer that does not follow the chat template's own gener")
    assert "Set data.chat_template=training, or to a file that marks it with {% gen" in problem


@pytest.mark.parametrize("opens", ["<think>\n", "<think>\n\n</think>\n\n"])
def test_a_prompt_that_opens_a_thought_is_followed_by_it(opens: str) -> None:
    """Of a template whose turns have none (DeepSeek), or a switch of its prompt fits (Nemotron)."""
    prompt = "assistant\n" + opens
    template = CHATML.replace("assistant\n", prompt).replace(
        "{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}"
    )
    closed = "</think>" in opens
    template = template.replace(prompt, f"assistant\n{{% if not thinking %}}{opens}{{% endif %}}")
    wrong = Renderer(tokenizer_with(template), "chat").document({"messages": TURNS[:2]})
    assert wrong[0] is not None and str(wrong[1]) == (
        f"{SWITCHED} of thinking=true: generate so too"
    )
    template = template.replace("{% if not thinking %}", "{% if 1 %}")
    document, note = Renderer(tokenizer_with(template), "chat").document({"messages": TURNS[:2]})
    if closed:
        assert document is None and str(note).startswith("has an answer that does not follow")
        return
    assert document is not None and note == CLOSES
    thoughts = [
        {**TURNS[1], "reasoning_content": "Hm."},
        {**TURNS[1], "content": f"<think>\nHm.\n</think>\n\n{SAID[0]}"},
    ]
    tokenizer = tokenizer_with(template)
    assert masked(tokenizer, document) == f"\n</think>\n\n{SAID[0]}<|im_end|>"
    for answer in thoughts:
        document, note = Renderer(tokenizer, "chat").document({"messages": [TURNS[0], answer]})
        assert document is not None and note is None
        assert masked(tokenizer, document) == f"Hm.\n</think>\n\n{SAID[0]}<|im_end|>"


def test_a_refusal_of_the_template_is_a_problem_of_the_record_and_not_a_crash() -> None:
    renderer = Renderer(tokenizer_with(MISTRAL), "chat")
    bad = {"messages": [TURNS[1], TURNS[0]]}
    (first, none), (second, problem) = renderer.documents([{"messages": TURNS}, bad])
    assert first is not None and none is None and second is None
    words = "is refused by the chat template (TemplateError: Conversation roles must alternate)"
    assert problem == words


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = tokenizer_with(CHATML)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"data\.kind=chat is without a template"):
        Renderer(tokenizer, "chat")


def test_a_config_for_chats_takes_the_tokenizer_of_a_model_with_a_template() -> None:
    """The hub's base models have none."""
    trees = {p.name: yaml.safe_load(p.read_text()) for p in CONFIGS.glob("*.yaml")}
    names = {
        name: tree["model"].get("tokenizer", tree["model"]["path"])
        for name, tree in trees.items()
        if tree["data"].get("kind") == "chat"
    }
    assert names == {"llama3_8b_sft.yaml": "meta-llama/Llama-3.1-8B-Instruct"}


def test_rows_do_not_depend_on_the_day() -> None:
    text, _ = rendered(tokenizer_with(LLAMA), TURNS)
    assert text.startswith(
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024"
    )
    direct = LLAMA.replace("%d %b %Y", "%Y-%m-%d %H:%M:%S %A")
    assert "Date: 2024-07-26 00:00:00 Friday\n" in rendered(tokenizer_with(direct), TURNS)[0]


def test_columns_that_parquet_fills_with_nothing_are_left_out() -> None:
    template = CHATML.replace(
        "{{ m['content'] }}", "{% if 'tool_calls' in m %}CALLS{% endif %}{{ m['content'] }}"
    )
    filled: list[Any] = [{**turn, "tool_calls": None} for turn in TURNS]
    tokenizer = tokenizer_with(template)
    assert rendered(tokenizer, filled) == rendered(tokenizer, TURNS)


# ---- Tools, calls, reasoning, parts ------------------------------------------------------------

HERMES = (  # like Qwen 2.5: tools in the system's turn, calls as JSON
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JOINED = (  # like DeepSeek: asks whether there is content, takes arguments as text
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "<|im_start|>assistant\n{% for c in m['tool_calls'] %}"
    "{{ c['function']['name'] + ' ' + c['function']['arguments'] }}{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_CALLS = HERMES.replace(
    "{{ m['content'] }}{% for c",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% for c",
).replace(
    "{% endfor %}<|im_end|>\n{% endfor %}",
    "{% endfor %}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}",
)
THINKING = (  # as Qwen3, but of every turn
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['reasoning_content'] %}<think>\n{{ m['reasoning_content'] }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}{% for c in m['tool_calls'] %}<tool_call>{{ c['function'] | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"in": "Rome"}'}}
CALLING: list[dict[str, Any]] = [
    TURNS[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "Sun."},
]


def made(template: str, **chat: Any) -> tuple[str, str]:
    """Return (all text, text that bears loss), or ("", problem)."""
    tokenizer = tokenizer_with(template)
    document, problem = Renderer(tokenizer, "chat").document(chat)
    if document is None:
        return "", str(problem)
    return str(tokenizer.decode(document.tokens)), masked(tokenizer, document)


@pytest.mark.parametrize("template", [HERMES, MARKED_CALLS], ids=["prefix", "marked"])
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
def test_tools_and_calls_are_in_the_text_and_calls_bear_loss(template: str, tools: Any) -> None:
    text, said = made(template, messages=CALLING, tools=tools)
    schema = (
        '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'
    )
    assert text.startswith(f"<|im_start|>system\n{schema}\n<|im_end|>\n")
    call = '<tool_call>{"name": "weather", "arguments": {"in": "Rome"}}</tool_call>'
    assert said == f"{call}<|im_end|>Sun.<|im_end|>"


def test_a_template_that_asks_for_content_and_joins_arguments_gets_both_as_it_wants() -> None:
    assert made(JOINED, messages=CALLING)[1] == 'weather {"in": "Rome"}<|im_end|>Sun.<|im_end|>'


def test_keyword_arguments_of_the_record_reach_the_template() -> None:
    template = "{% if style %}{{ style }}\n{% endif %}" + CHATML
    text, _ = made(template, messages=TURNS, chat_template_kwargs={"style": "short"})
    assert text.startswith("short\n<|im_start|>user") and text.count("short") == 1


@pytest.mark.parametrize("template", [MARKED, CHATML, LLAMA], ids=["marked", "chatml", "llama"])
def test_what_a_template_leaves_out_is_a_problem_of_the_record(template: str) -> None:
    """The words are those of other fields, which these templates do not write."""
    answer = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    found = {
        "tools": made(template, messages=TURNS, tools=[TOOL]),
        "calls": made(template, messages=CALLING),
        "said and called": made(template, messages=[TURNS[0], {**CALLING[1], "content": "Hm."}]),
        "reasoning": made(template, messages=[TURNS[0], answer]),
        "later reasoning": made(template, messages=[*TURNS, TURNS[0], answer]),
    }
    ends = {
        "tools": "has tools, which",
        "calls": "has tool calls, which",
        "said and called": "has tool calls, which",
        "reasoning": "has an assistant message, which",
        "later reasoning": "has an assistant message, which",
    }
    for name, (text, problem) in found.items():
        assert not text and problem.startswith(ends[name]), (name, text, problem)
        assert "the chat template leaves out. Set data.chat_template=training" in problem
    empty = [TURNS[0], {"role": "assistant", "content": ""}]
    assert made(template, messages=empty)[0], "an answer that is meant to be empty"
    both = [TURNS[0], {**TURNS[1], "reasoning_content": "Hm."}]
    _, note = Renderer(tokenizer_with(template), "chat").document({"messages": both})
    assert note == "has reasoning that the chat template leaves out"
    assert made(template, messages=both) == made(template, messages=[TURNS[0], TURNS[1]])


def test_a_template_that_takes_content_as_parts_only_gets_parts() -> None:
    template = CHATML.replace(
        "{{ m['content'] }}", "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}"
    )
    assert made(template, messages=TURNS) == made(CHATML, messages=TURNS)


def test_our_own_template_writes_tools_calls_and_reasoning() -> None:
    both = {**CALLING[3], "reasoning_content": "It shines."}
    beside = {**CALLING[1], "content": "Let me see."}
    text, said = made(CHAT_TEMPLATE, messages=[SYSTEM, *CALLING[:3], both], tools=[TOOL])
    call = '<tool_call>\n{"name": "weather", "arguments": {"in": "Rome"}}\n</tool_call>'
    assert said == f"{call}<|im_end|><think>\nIt shines.\n</think>\n\nSun.<|im_end|>"
    assert text.startswith(
        "<|im_start|>system\nBe brief.\n\nYou may call these functions:\n<tools>\n{"
    )
    assert text.count("<|im_start|>system") == 1 and text.count("Be brief.") == 1
    assert made(CHAT_TEMPLATE, messages=[TURNS[0], beside])[1] == f"Let me see.\n{call}<|im_end|>"
    for messages in (TURNS, [SYSTEM, *TURNS]):
        assert made(CHAT_TEMPLATE, messages=messages) == made(FIRST_TEMPLATE, messages=messages)
    old, new = (tokenizer_with(each) for each in (FIRST_TEMPLATE, CHAT_TEMPLATE))
    assert tokenizer_digest(old) == tokenizer_digest(new), "plain chats have the rows they had"
    assert tokenizer_digest(tokenizer_with(CHATML)) != tokenizer_digest(new)


WITH_NULLS = {  # a tool as JSON Schema has it, in which null is a value
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "in": {"type": ["string", "null"], "default": None, "enum": ["Rome", None]},
                "days": {"const": None, "examples": [None, {"n": None}]},
            },
        },
    },
}


@pytest.mark.parametrize(
    "template", [HERMES, MARKED_CALLS, CHAT_TEMPLATE], ids=["prefix", "marked", "ours"]
)
def test_nulls_that_the_user_wrote_are_rendered(template: str) -> None:
    """In arguments, given as an object or as text, and in tools; as apply_chat_template does."""
    arguments = {"in": None, "days": [None, {"n": None}]}
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    as_text = {**call, "function": {**call["function"], "arguments": json.dumps(arguments)}}
    tokenizer = tokenizer_with(template)
    found = []
    for each in (call, as_text):
        answer = {"role": "assistant", "content": "", "tool_calls": [each]}
        for tools in ([WITH_NULLS], json.dumps([WITH_NULLS])):
            found.append(made(template, messages=[TURNS[0], answer], tools=tools))
    messages = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    whole = tokenizer.apply_chat_template(messages, tools=[WITH_NULLS], tokenize=False)
    assert [text for text, _ in found] == [whole] * 4 and len({said for _, said in found}) == 1
    assert '"default": null' in whole and '{"in": null, "days": [null, {"n": null}]}' in whole


def test_of_a_table_the_fields_of_other_rows_are_left_out() -> None:
    """Structs have the fields of all rows; text of JSON has those that the user wrote."""
    rows = [
        {"messages": [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [CALLED]}]}
        for CALLED in (
            {"type": "function", "function": {"name": "weather", "arguments": {"in": "Rome"}}},
            {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}},
        )
    ]
    padded = pa.Table.from_pylist(rows).to_pylist()
    assert padded[0] != rows[0]
    plain = Renderer(tokenizer_with(HERMES), "chat").documents(rows)
    pads = Renderer(tokenizer_with(HERMES), "chat", pads=True)
    for (one, _), (other, _) in zip(plain, pads.documents(padded), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
    text = {**rows[0], "tools": json.dumps([WITH_NULLS])}
    (whole, _) = pads.document(text)
    assert '"default": null' in str(tokenizer_with(HERMES).decode(whole.tokens))


HALF = "cut \ud83d"


@pytest.mark.parametrize(
    "template",
    [CHAT_TEMPLATE, HERMES, THINKING, LAST_ONLY, JOINED],
    ids=["ours", "hermes", "thinking", "last only", "joined"],
)
def test_half_of_a_surrogate_pair_spoils_its_own_chat_alone(template: str) -> None:
    """In any field that the template writes: told by the text that is rendered."""
    half: list[dict[str, Any]] = [
        {"messages": [{**TURNS[0], "content": HALF}, TURNS[1]]},
        {"messages": [{**TURNS[0], "role": HALF}, TURNS[1]]},
        {"messages": [TURNS[0], {**TURNS[1], "reasoning_content": HALF}]},
        {"messages": [TURNS[0], {**CALLING[1], "content": HALF}, *CALLING[2:]]},
        {"messages": CALLING, "tools": [{**TOOL, "description": HALF}]},
        {"messages": TURNS, "chat_template_kwargs": {"style": HALF}},
    ]
    for arguments in ({"in": HALF}, {HALF: 1}, json.dumps({"in": HALF}), HALF):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        half.append({"messages": [TURNS[0], answer]})
    named = {"type": "function", "function": {"name": HALF, "arguments": {}}}
    half.append({"messages": [TURNS[0], {**CALLING[1], "tool_calls": [named]}]})
    renderer = Renderer(tokenizer_with("{{ style }}" + template), "chat")
    for chat in half:
        (first, _), (document, problem), (last, _) = renderer.documents(
            [{"messages": TURNS}, chat, {"messages": TURNS[:2]}]
        )
        assert first is not None and last is not None
        omits = problem is not None and "the chat template leaves out" in problem
        refuses = problem is not None and problem.startswith("is refused by the chat template")
        assert document is not None or omits or refuses or problem == NOT_UNICODE, (chat, problem)
        assert problem is None or problem.isprintable()
    assert renderer.document(half[0]) == renderer.document(half[5]) == (None, NOT_UNICODE)


SILENCES: list[dict[str, Any]] = [
    {"content": ""},
    {"content": []},
    {"content": " \n"},
    {"content": "", "function_call": {"name": "f", "arguments": "{}"}},
    {"content": "", "refusal": "No."},
    {"content": "", "tool_calls": []},
]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHATML], ids=["marked", "prefix"])
@pytest.mark.parametrize("fields", SILENCES)
def test_an_answer_without_words_is_noted(template: str, fields: dict[str, Any]) -> None:
    renderer = Renderer(tokenizer_with(template), "chat")
    answer = {"role": "assistant", **fields}
    for messages in ([TURNS[0], answer], [*TURNS[:2], TURNS[0], answer]):
        document, note = renderer.document({"messages": messages})
        assert document is not None and note == SILENT
    unweighed = [TURNS[0], {**answer, "weight": 0}, *TURNS]
    assert renderer.document({"messages": unweighed})[1] is None


# ---- Several templates -------------------------------------------------------------------------


def test_chats_with_tools_take_the_template_for_tools() -> None:
    """As `apply_chat_template(tools=)`, of a tokenizer with templates of several names."""
    named = {"default": CHATML, "tool_use": HERMES, "rag": "{{ messages }}"}
    tokenizer = tokenizer_with(CHATML)
    tokenizer.chat_template = named
    chats: list[dict[str, Any]] = [
        {"messages": TURNS},
        {"messages": [{**m, "tool_calls": []} for m in TURNS], "tools": [TOOL]},
        {"messages": TURNS, "tools": []},
        {"messages": TURNS, "tools": json.dumps([TOOL])},
    ]
    for chat in chats:
        (document, problem), tools = Renderer(tokenizer, "chat").document(chat), chat.get("tools")
        assert document is not None, problem
        tools = json.loads(tools) if isinstance(tools, str) else tools
        expected = tokenizer.apply_chat_template(chat["messages"], tools=tools, tokenize=False)
        assert str(tokenizer.decode(document.tokens)) == expected
        assert ("weather" in expected) == bool(tools)
        assert masked(tokenizer, document) == "".join(f"{text}<|im_end|>" for text in SAID)


# ---- Weights and reasoning ---------------------------------------------------------------------

PHI = CHATML + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
SPLIT = CHAT_TEMPLATE.replace(
    "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
).replace(
    "{{ message['content'] or '' }}",
    "{% endgeneration %}{% generation %}{{ message['content'] or '' }}",
)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHATML, LAST_ONLY, PHI, SPLIT])
def test_an_answer_of_weight_0_bears_no_loss(template: str) -> None:
    weighed: list[Any] = [TURNS[0], {**TURNS[1], "weight": 0}, TURNS[2], {**TURNS[3], "weight": 1}]
    plain, whole = made(template, messages=TURNS)
    text, said = made(template, messages=weighed)
    assert text == plain and SAID[0] not in said and SAID[1] in said
    assert whole.endswith(said) and (0 < len(said) < len(whole) or template is LAST_ONLY)
    document, _ = Renderer(tokenizer_with(template), "chat").document({"messages": weighed})
    assert document is not None and not document.earlier


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, THINKING], ids=["marked", "prefix"])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking", "content"])
def test_reasoning_bears_loss_or_is_read_or_left_out(template: str, field: str) -> None:
    answer: dict[str, Any] = {**TURNS[1], field: "Two and two."}
    if field == "content":
        answer["content"] = f"<think>\nTwo and two.\n</think>\n\n{SAID[0]}"
    chat = {"messages": [TURNS[0], answer, *TURNS[2:]]}
    found = {}
    for reasoning in ("train", "mask", "drop"):
        tokenizer = tokenizer_with(template)
        document, note = Renderer(tokenizer, "chat", reasoning=reasoning).document(chat)
        assert document is not None and note is None
        found[reasoning] = (str(tokenizer.decode(document.tokens)), masked(tokenizer, document))
    answers = "".join(f"{text}<|im_end|>" for text in SAID)
    assert found["train"][1] == f"<think>\nTwo and two.\n</think>\n\n{answers}"
    assert found["mask"] == (found["train"][0], answers)
    assert found["drop"][1] == answers and "Two and two." not in found["drop"][0]


def test_reasoning_before_a_call_is_masked_up_to_the_call() -> None:
    calling = [TURNS[0], {**CALLING[1], "reasoning": "Ask."}, *CALLING[2:]]
    tokenizer = tokenizer_with(THINKING)
    document, _ = Renderer(tokenizer, "chat", reasoning="mask").document({"messages": calling})
    assert document is not None and masked(tokenizer, document).startswith("<tool_call>{")


def test_words_beside_a_call_that_are_left_out_are_noted() -> None:
    template = HERMES.replace(
        "{{ m['content'] }}", "{% if not m['tool_calls'] %}{{ m['content'] }}{% endif %}"
    )
    chat = {"messages": [TURNS[0], {**CALLING[1], "content": "Let me see."}, *CALLING[2:]]}
    document, note = Renderer(tokenizer_with(template), "chat").document(chat)
    assert document is not None
    assert note == "has words beside tool calls that the chat template leaves out"


def test_one_chat_that_loses_something_leaves_the_others_of_its_batch_alone() -> None:
    renderer = Renderer(tokenizer_with(MARKED), "chat")
    (one, _), (two, problem), (three, _) = renderer.documents(
        [{"messages": TURNS}, {"messages": CALLING}, {"messages": TURNS[:2]}]
    )
    assert one is not None and two is None and three is not None
    assert str(problem).startswith("has tool calls")


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHATML], ids=["marked", "prefix"])
def test_parts_of_text_are_joined(template: str) -> None:
    parts = [{"type": "text", "text": "It is"}, {"type": "text", "text": " 4."}]
    in_parts = [TURNS[0], {"role": "assistant", "content": parts}]
    joined = [TURNS[0], {"role": "assistant", "content": "It is 4."}]
    assert made(template, messages=in_parts) == made(template, messages=joined)


def test_a_template_file_in_the_tokenizers_folder_is_what_the_messages_advise(
    tmp_path: Path,
) -> None:
    """A copy of the folder with another chat_template.jinja is the way out of a template."""
    save_tokenizer(tokenizer_with(LAST_ONLY), open_storage(str(tmp_path)))
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert rendered(load_tokenizer(str(tmp_path)), TURNS)[1] == "".join(
        text + "<|im_end|>" for text in SAID
    )


def test_a_token_that_straddles_the_start_is_the_answers() -> None:
    """A sentencepiece-like token holds the blank of the prompt and the answer's first word."""
    letters = sorted({*"".join(turn["content"] for turn in TURNS), *"USERAIT:▁\n"})
    vocabulary = {name: n for n, name in enumerate(["<unk>", *letters, "It", "▁It"])}
    merges = [("I", "t"), ("▁", "It")]
    rules = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}USER: {{ m['content'] }} ASSISTANT: "
        "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rules, eos_token="</s>", unk_token="<unk>", chat_template=template
    )
    document, problem = Renderer(tokenizer, "chat").document({"messages": TURNS[:2]})
    assert document is not None and problem is None
    said = tokenizer.convert_ids_to_tokens(document.tokens[document.loss].tolist())
    assert said[:2] == ["▁It", "▁"] and said[-2:] == ["?", "</s>"]
