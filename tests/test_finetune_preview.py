"""Check what is shown of data before training: it is what the run's own rows are made of."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rayapp.__main__ import main
from rayapp.config import load
from rayapp.data.chat import APART
from rayapp.data.messages import SILENT
from rayapp.data.tokens import CHAT_TEMPLATE, byte_tokenizer
from rayapp.finetune.check import CheckedLanguageRun, check
from rayapp.finetune.plan_lines import records
from rayapp.finetune.preview import SHOWN, preview, rendered, runs

CHATS = [
    {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]},
    {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]},
    {"messages": [{"role": "user", "content": "alone"}]},
    {"messages": "none", "id": 1},
]


def checked(folder: Path, **fields: str) -> CheckedLanguageRun:
    given = {name.replace("__", "."): value for name, value in fields.items()}
    config = load(None, {"run.storage": str(folder), "model.tokenizer": "bytes", **given})
    return check(config, None, 0)  # type: ignore[arg-type]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(f"{json.dumps(chat)}\n" for chat in CHATS))
    return path


def test_chats_are_shown_with_what_bears_loss(chats: Path, tmp_path: Path) -> None:
    (found,) = preview(checked(tmp_path, data__path=str(chats), data__bad_rows="0.9"))
    assert (found.entry.kind, found.entry.source.format) == ("chat", "jsonl")
    assert (found.records, found.duplicates) == (4, 1)
    whole = runs(found.tokenizer, found.documents[0])
    assert [text for text, loss in whole if loss] == ["answer<|im_end|>"]
    assert "".join(text for text, _ in whole).startswith("<|im_start|>user\nask<|im_end|>")
    assert found.bad == {
        "has no assistant message": 1,
        "has 'messages' that are not a list of messages": 1,
    }
    assert found.examples["has no assistant message"].endswith("chats.jsonl:3")
    rows, size = found.packed.rows, found.packed.layout.seq_len
    assert len(rows) == 1 and found.packed.fill == pytest.approx((sum(found.lengths) - 2) / size)


def test_items_of_tasks_that_tell_little_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same question as a prompt and as a chat, with another system's message, and in turns."""

    def chat(*said: str) -> dict[str, Any]:
        roles = ("system", *("user", "assistant") * len(said))
        return {"messages": [{"role": r, "content": c} for r, c in zip(roles, said, strict=False)]}

    files = {
        "train": [chat("Be brief.", "one?", "1", "two?", "2"), chat("", "three?", "3")],
        "turns": [
            chat("", "three?", "3"),
            chat("", "one?", "1", "two?", "2"),
            chat("", "two?", "2"),
        ],
        "prompts": [{"prompt": f"{n}? ", "completion": n[:-3]} for n in ("three", "one", "four")],
    }
    for name, rows in files.items():
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in files}
    tasks = {name: paths[name] for name in ("turns", "prompts")}
    words = ["data", f"--data.path={paths['train']}", f"--eval.tasks={json.dumps(tasks)}"]
    words += [f"--run.storage={tmp_path}", "--model.tokenizer=bytes"]
    assert main([*words, "--json"]) == 0
    source, turns, prompts = json.loads(capsys.readouterr().out)
    assert source["documents"] == 2
    assert turns == {
        "name": "turns",
        "path": paths["turns"],
        "items": 3,
        "empty": [],
        "trained": [f"{paths['turns']}:{n}" for n in (1, 2)],
    }
    assert prompts["empty"] == [f"{paths['prompts']}:2"]
    assert prompts["trained"] == [f"{paths['prompts']}:{n}" for n in (1, 2)]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert f"task          prompts: {paths['prompts']}: 3 items\n" in told
    assert f"in the data too 2 of 3, first {paths['prompts']}:1, {paths['prompts']}:2\n" in told
    assert f"an empty answer 1 of 3, first {paths['prompts']}:2\n" in told


def test_each_source_of_a_mixture_is_shown(chats: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words\n" * 50)
    mixture = json.dumps({str(tmp_path / "text.txt"): 1, str(chats): 3})
    ready = checked(
        tmp_path,
        data__mixture=mixture,
        data__bad_rows="0.9",
        train__max_steps="1",
        model__tokenizer="bpe:300",
    )
    text, chat = preview(ready)
    assert (text.entry.kind, chat.entry.kind) == ("text", "chat") and text.share_of_loss == 1.0
    assert text.tokenizer is chat.tokenizer and 259 < len(text.tokenizer) <= 300


def test_a_plan_has_the_beginnings_of_the_first_documents(chats: Path, tmp_path: Path) -> None:
    ready = checked(tmp_path, data__path=str(chats), data__bad_rows="0.9")
    (found,) = rendered(ready, byte_tokenizer())
    assert found["path"] == str(chats) and found["kind"] == "chat"
    assert len(found["documents"]) == SHOWN
    assert ("answer<|im_end|>", True) in found["documents"][0]
    out = io.StringIO()
    records(Console(file=out, width=10_000), [found])
    assert "\u27e6answer<|im_end|>\u27e7" in out.getvalue()


def test_what_is_not_used_is_what_the_template_does_not_read(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "", "refusal": "No.", "tool_plan": "x"}
    path, template = tmp_path / "a.jsonl", tmp_path / "a.jinja"
    path.write_text(json.dumps({"messages": [CHATS[0]["messages"][0], answer], "id": 1}))
    template.write_text(CHAT_TEMPLATE + "{% if false %}{{ message.tool_plan }}{% endif %}")
    fields = {"data__path": str(path), "data__chat_template": str(template)}
    (found,) = preview(checked(tmp_path, **fields))
    assert found.entry.unused == ("id", "messages.refusal") and found.notes == {SILENT: 1}
    (found,) = preview(checked(tmp_path, data__path=str(path)))
    assert found.entry.unused == ("id", "messages.refusal", "messages.tool_plan")


def test_answers_that_are_rendered_otherwise_later_are_documents_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, template = tmp_path / "a.jsonl", tmp_path / "a.jinja"
    path.write_text(json.dumps({"messages": CHATS[0]["messages"][:2] * 3}) + "\n")
    end = "{{ '.' if loop.last and m.role == 'assistant' }}"
    template.write_text(f"{{% for m in messages %}}{{{{ m.content }}}}{end}|{{% endfor %}}")
    argv = ["data", f"--data.path={path}", f"--data.chat_template={template}"]
    assert main([*argv, f"--run.storage={tmp_path}", "--model.tokenizer=bytes"]) == 0
    told = capsys.readouterr().out
    assert "the first 1 records" in told and f"noted         1 {APART}" in told
    assert re.search(r"documents +3 of ", told)


def test_data_that_break_off_later_are_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check reads their beginning; a tokenizer is then trained on more of them."""
    lines = "".join(f'{{"text": "{n}", "id": "{n * 7919:0100d}"}}\n' for n in range(20_000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:-5000])
    argv = ["data", f"--data.path={tmp_path}/a.jsonl.gz", "--model.tokenizer=bpe:300"]
    assert main([*argv, f"--run.storage={tmp_path}"]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path}/a.jsonl.gz cannot be read as jsonl after line" in told
    assert "Traceback" not in told


def test_names_that_are_not_unicode_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = '{"text": "x", "\\ud83d": 1}\n{"text\n'
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_text(lines)
    argv = ["data", f"--data.path={tmp_path}", "--data.bad_rows=0.9", "--model.tokenizer=bytes"]
    for more in ([], ["--json"]):
        assert main([*argv, f"--run.storage={tmp_path}", *more]) == 0
        told = capsys.readouterr().out
        told.encode()
        assert "\\udcff.jsonl:2" in told.replace("\\\\", "\\") and "ud83d" in told


def test_the_command(chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["data", f"--data.path={chats}", "--data.bad_rows=0.9", "--model.tokenizer=bytes"]
    argv += [f"--run.storage={tmp_path}"]
    assert main([*argv, "--show=1"]) == 0
    told = capsys.readouterr().out
    assert told.count("\u27e6answer<|im_end|>\u27e7") == 1
    assert "ends          answers end with <|im_end|> (2)\n" in told
    assert "unusable      1 has no assistant message, first " in told
    assert main([*argv, "--show=1", "--chars=9"]) == 0
    assert "<|im_star ... (more: --chars)" in capsys.readouterr().out
    assert main([*argv, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["documents"] == 2 and found["tokens"]["over_seq_len"] == 0
    assert len(found["rendered"]) == 2
    assert main([*argv, "--show=some"]) == 2
    assert "--show=some is not valid" in capsys.readouterr().err
