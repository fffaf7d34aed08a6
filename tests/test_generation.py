"""Talk to what a run has exported: the same tokens as transformers, in pieces, from anywhere."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from patience import PATIENCE_S
from run_folders import RunFolder
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import rayapp
from rayapp.__main__ import main
from rayapp.config import ConfigError
from rayapp.data import tokens
from rayapp.generation import Settings, generate, load, talk
from rayapp.storage import Storage, open_storage

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "tiny_cpu.yaml")
RHYME = "one two three four five six seven eight nine ten. "
GREEDY = {"max_tokens": 20, "temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Teach a small model to count, and save it as transformers does."""
    path = tmp_path_factory.mktemp("counting")
    tokenizer = tokens.byte_tokenizer()
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "vocab_size": len(tokenizer)}
    model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=512))
    ids = torch.tensor(tokenizer(RHYME * 5, add_special_tokens=False)["input_ids"])[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(90):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def put(folder: Path, run: Storage) -> None:
    """Lay a model folder into a run."""
    for file in folder.iterdir():
        (run / "model").write(file.name, file.read_bytes())


@pytest.fixture(params=["local", "s3"])
def run(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> str:
    """Make a finished run, on a disk and on S3."""
    where = str(tmp_path)
    if request.param == "s3":
        where = f"s3://{request.getfixturevalue('s3_bucket')}/runs"
    made = finished(open_storage(where))
    put(folder, made)
    return made.url


def finished(storage: Storage, **settings: str) -> Storage:
    made = RunFolder(storage, config=TINY, **settings)
    made.train(2)
    made.end()
    return made.run


def test_it_writes_what_transformers_writes(run: str, folder: Path) -> None:
    pieces = list(generate(run, RHYME + "one two", **GREEDY))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(RHYME + "one two", return_tensors="pt")["input_ids"]
    wanted = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert "".join(pieces) == tokenizer.decode(wanted, skip_special_tokens=True)
    assert "".join(pieces).startswith(" three four") and len(pieces) > 1
    assert rayapp.generate is generate


def test_warmer_is_more_varied(run: str) -> None:
    with load(run) as model:

        def texts(temperature: float) -> list[str]:
            return [
                "".join(generate(model, RHYME, max_tokens=30, temperature=temperature))
                for _ in range(4)
            ]

        assert len(set(texts(0.0))) == 1
        assert len(set(texts(3.0))) == 4
        torch.manual_seed(5)
        first = texts(1.0)
        torch.manual_seed(5)
        assert texts(1.0) == first


def test_pieces_come_while_it_writes_and_leaving_ends_it(run: str) -> None:
    with load(run) as model:
        stream = generate(model, RHYME, max_tokens=400, temperature=0.0)
        first = next(stream)
        assert first and [one for one in threading.enumerate() if one.name == "generate"]
        began = time.monotonic()
        stream.close()
        left_s = time.monotonic() - began
        assert not [one for one in threading.enumerate() if one.name == "generate"]
        began = time.monotonic()
        list(generate(model, RHYME, max_tokens=400, temperature=0.0))
        assert left_s < (time.monotonic() - began) / 2


def test_a_copy_from_s3_is_deleted(folder: Path, s3_bucket: str) -> None:
    made = finished(open_storage(f"s3://{s3_bucket}"))
    put(folder, made)
    with load(made.url) as model:
        path = model.tokenizer.name_or_path
        assert Path(path, "config.json").is_file()
    assert not Path(path).exists()


def test_adapters_are_put_on_their_base(folder: Path, tmp_path: Path) -> None:
    run = finished(open_storage(str(tmp_path)))
    base = AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    )
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    adapted.save_pretrained(tmp_path / "demo" / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path / "demo" / "model")
    ids = tokenizer(RHYME, return_tensors="pt")["input_ids"]
    found = load(run.url)
    with torch.no_grad():
        assert torch.equal(found.model(ids).logits, adapted.eval()(ids).logits)
        assert not torch.allclose(
            found.model(ids).logits, AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        )
    assert "".join(generate(found, RHYME, **GREEDY)) != ""
    spaces = tokenizer.convert_tokens_to_ids("\u0120")  # is no special token, and is not written
    settings = {"eos_token_id": [spaces]}
    (tmp_path / "demo/model/generation_config.json").write_text(json.dumps(settings))
    assert "".join(generate(load(run.url), RHYME + "one", **GREEDY)) == ""
    config = tmp_path / "demo" / "model" / "adapter_config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    for gone, why in ((str(tmp_path / "gone"), "no folder"), ("tiny", "preset")):
        config.write_text(json.dumps(values | {"base_model_name_or_path": gone}), encoding="utf-8")
        with pytest.raises(ConfigError, match=why):
            load(run.url)


def test_chats_go_through_the_template(folder: Path, tmp_path: Path) -> None:
    chat = finished(open_storage(str(tmp_path)), data__kind="chat")
    text = finished(open_storage(str(tmp_path / "text")))
    for one in (chat, text):
        put(folder, one)
    model, plain = load(chat.url), load(text.url)
    assert model.chat and not plain.chat
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = [{"role": "user", "content": "one two"}]
    wanted = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
    raw = tokenizer("one two")["input_ids"]
    auto, with_template, without = (Settings(chat=chat) for chat in (None, True, False))
    assert model._ids("one two", auto).tolist() == [wanted]
    assert model._ids("one two", without).tolist() == plain._ids("one two", auto).tolist() == [raw]
    assert plain._ids("one two", with_template).tolist() == [wanted]
    assert plain._ids(said, auto).tolist() == [wanted]
    plain.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        list(plain.stream("one", Settings(chat=True)))


def test_the_systems_message_is_that_of_the_training(folder: Path, tmp_path: Path) -> None:
    run = finished(open_storage(str(tmp_path)), data__kind="chat")
    put(folder, run)
    run.write("plan.json", json.dumps({"system": "Count."}).encode())
    with load(run.url) as model:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for told, system in ((None, "Count."), ("Sing.", "Sing."), ("", "")):
            said = [{"role": "system", "content": system}] if system else []
            said += [{"role": "user", "content": "one"}]
            wanted = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
            assert model._ids("one", Settings(system=told)).tolist() == [wanted]
        assert model._ids("one", Settings(chat=False)).tolist() == [tokenizer("one")["input_ids"]]


def test_a_conversation_remembers(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = finished(open_storage(str(tmp_path)), data__kind="chat")
    put(folder, run)
    said, asked = iter(["one two", "x" * 600, "three", "four"]), []
    monkeypatch.setattr(
        "builtins.input", lambda _: next(said, None) or (_ for _ in ()).throw(EOFError)
    )
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with load(run.url) as model:
        ids_of = model._ids
        monkeypatch.setattr(
            model, "_ids", lambda *prompt: asked.append(prompt[0]) or ids_of(*prompt)
        )
        talk(model, Settings(max_tokens=5, temperature=0.0))
    roles = [[message["role"] for message in one] for one in asked]
    assert roles == [
        ["user"],
        ["user", "assistant", "user"],
        ["user"],
        ["user", "assistant", "user"],
    ]
    answers = capsys.readouterr().out.splitlines()
    assert asked[1][1]["content"] == answers[0] and asked[3][1]["content"] == answers[1]


def test_a_prompt_must_leave_room(run: str) -> None:
    with load(run) as model:
        with pytest.raises(ConfigError, match="is too long: the model has room for 512"):
            list(generate(model, "x" * 600))
        near = list(generate(model, RHYME * 10, max_tokens=400, temperature=0.0))  # 500 tokens
        assert 0 < len("".join(near)) <= 12


def test_what_fails_while_writing_is_raised(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(run) as model:

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(model.model, "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            list(generate(model, "one"))


# ---- The command -----------------------------------------------------------------------------


def test_what_cannot_be_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = open_storage(str(tmp_path))
    going = RunFolder(storage, "going", config=TINY)
    going.plan()
    going.train(3)
    going.run.write("LEASE", b"{}")
    stopped = RunFolder(storage, "stopped", config=TINY)
    stopped.train(3)
    stopped.end("stopped")
    off = finished(storage / "off", checkpoint__export="false")
    shapes = storage / "shapes"
    shapes.write("config.yaml", b"task: vision\n")
    shapes.write("model/config.json", b"{}")
    for argv, what in (
        ([shapes.url], "is no language model: it trains an image classifier"),
        ([str(tmp_path / "none")], "is no run: it has no config.yaml"),
        ([going.run.url], "it is running, at step 3 of 600, and exports at the end. Wait for it"),
        ([stopped.run.url], "it is stopped at step 3"),
        ([off.url], "checkpoint.export was false"),
        ([], "rayapp generate RUN"),
        (["a", "b"], "b is unexpected: the command takes one RUN"),
        (["a", "--max_tokens=0"], "--max_tokens=0 is not valid"),
        (["a", "--temperature=warm", "--chat=maybe"], "--chat=maybe is not valid"),
        (["a", "--promt=x"], "Did you mean --prompt?"),
    ):
        assert main(["generate", *argv]) == 2, argv
        told = capsys.readouterr()
        assert what in " ".join((told.out + told.err).split()), argv


@pytest.mark.full
def test_prompts_from_the_command_and_from_a_pipe(folder: Path, tmp_path: Path) -> None:
    run = finished(open_storage(str(tmp_path)))
    put(folder, run)
    argv = [sys.executable, "-m", "rayapp", "generate", run.url, "--temperature=0"]
    argv += ["--max_tokens=11"]
    prompts = [f"{RHYME}one two", f"{RHYME}six seven"]
    with load(run.url) as model:
        wanted = ["".join(generate(model, one, max_tokens=11, temperature=0)) for one in prompts]
    assert wanted[0] == " three four" != wanted[1]
    done = subprocess.run(
        argv,
        input="\n\n".join(prompts),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (0, wanted[0] + "\n" + wanted[1] + "\n")
    done = subprocess.run(
        [*argv, f"--prompt={RHYME}one two"], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, " three four\n")


def test_in_a_terminal_it_is_a_conversation(folder: Path, tmp_path: Path) -> None:
    run = finished(open_storage(str(tmp_path)))
    put(folder, run)
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "rayapp", "generate", run.url, "--temperature=0"]
    process = subprocess.Popen(
        [*argv, "--max_tokens=11"],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env=os.environ | {"TERM": "dumb"},
    )
    os.close(theirs)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        limit = time.monotonic() + 90
        while text not in seen:
            left = max(0.0, limit - time.monotonic())
            assert select.select([ours], [], [], left)[0], seen
            seen += os.read(ours, 4096)
        seen = seen.partition(text)[2]

    for _ in range(2):
        until(b"> ")
        os.write(ours, f"{RHYME}one two\n".encode())
        until(b" three four\r\n")
    until(b"> ")
    os.write(ours, b"\x04")
    assert process.wait(timeout=PATIENCE_S) == 0
    os.close(ours)
