"""Publish runs to a stand-in of the hub: what is sent, to whom, what is refused, and going on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hub import READER, TOKEN, Hub, Repo, hub
from huggingface_hub import constants
from run_folders import RunFolder
from transformers import LlamaConfig, LlamaForCausalLM

from rayapp import model
from rayapp.__main__ import main
from rayapp.config import Lora
from rayapp.data import tokens
from rayapp.storage import Storage, open_storage

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "tiny_cpu.yaml")
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 259}
CARD = b"---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n# Base"
BASE = {"README.md": CARD, "LICENSE": b"Own Licence", "config.json": b'{"model_type": "llama"}'}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has org/base, and a user who has a token."""
    with hub(tmp_path / "store") as made:
        made.repos["org/base"] = Repo(dict(BASE))
        made.repos["org/other"] = Repo({"config.json": b'{"model_type": "qwen3"}'})
        monkeypatch.setattr(constants, "ENDPOINT", made.address)
        template = f"{made.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ada") / "secret" / "llama"
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**SHAPE, **heads)).save_pretrained(folder)
    tokens.byte_tokenizer().save_pretrained(folder)
    return folder


def trained(root: str, base: Path, lora: Lora | None = None, name: str = "demo") -> Storage:
    """A run that is done, with an export as rayapp writes it."""
    made = RunFolder(open_storage(root), name, config=TINY, model__path=str(base))
    made.plan()
    made.train(2)
    made.end()
    plan = json.loads(made.run.read("plan.json")) | {"base": {"name": str(base), "random": False}}
    made.run.write("plan.json", json.dumps(plan).encode())
    made.run.write("RUN_ID", b"5" * 32)
    source = model.resolve(str(base))
    lm = model.build(source.config, loss=model.no_loss)
    if lora is not None:
        model.add_adapters(lm, lora)
    lm.to_empty(device="cpu")
    model.load_weights(lm, source, torch.device("cpu"))
    tokenizer = tokens.load_tokenizer(str(base))
    if lora is None or lora.merge:
        if lora is not None:
            model.init_adapters(lm, 0)
        model.export(lm, made.run / "model", tokenizer=tokenizer)
    else:
        model.init_adapters(lm, 0)
        model.export_adapters(lm, made.run / "model", base=str(base), tokenizer=tokenizer)
    return made.run


def published(run: Storage, *more: str) -> int:
    return main(["publish", run.url, "org/new", "--base=org/base", *more])


KINDS = {
    "full": None,
    "merged": Lora(rank=2, merge=True, targets=("q_proj",)),
    "adapter": Lora(rank=2, targets=("q_proj",)),
}


@pytest.mark.parametrize(
    ("kind", "where"), [("full", "local"), ("merged", "local"), ("adapter", "s3")]
)
def test_what_is_sent_is_whole_and_names_no_place(
    kind: str,
    where: str,
    server: Hub,
    base: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = str(tmp_path / "runs")
    if where == "s3":
        root = f"s3://{request.getfixturevalue('s3_bucket')}/runs"
    run = trained(root, base, KINDS[kind])
    capfd.readouterr()
    if where == "local":
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        code = published(run)
    else:  # in a process of its own, as a user gives the command
        own = {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-m", "rayapp", "publish", run.url, "org/new", "--base=org/base"]
        code = subprocess.run(command, env=os.environ | own, cwd=ROOT).returncode
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    assert out.startswith(f"{server.address}/org/new (private)\nsent: ")
    repo = server.repos["org/new"]
    assert repo.private and repo.commits == ["demo, step 2"]
    files = {name: data for name, data in repo.files.items() if isinstance(data, bytes)}
    assert {*files} == {"LICENSE", "README.md", "loss.svg", ".gitattributes"} | {
        entry.name for entry in (run / "model").list()
    }
    places = [str(base), base.parent.name, run.url, str(tmp_path), TOKEN]
    for name, data in files.items():
        # A host's name may be so short that weights hold it by chance: of them, the header counts.
        whole = not name.endswith(".safetensors")
        told = data if whole else data[8 : 8 + int.from_bytes(data[:8], "little")]
        assert socket.gethostname().encode() not in told, name
        assert not [place for place in places if place.encode() in data], name
        assert name == "README.md" or name in out or name == ".gitattributes"
    assert TOKEN not in out
    assert files["LICENSE"] == b"Own Licence"
    front = yaml.safe_load(files["README.md"].decode().split("---\n")[1])
    assert front["base_model"] == "org/base" and front["license_name"] == "own"
    assert front["library_name"] == ("peft" if kind == "adapter" else "transformers")
    if kind == "adapter":
        settings = json.loads(files["adapter_config.json"])
        assert settings["base_model_name_or_path"] == "org/base"
    weights = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
    assert files[weights] == (run / "model").read(weights)


def test_a_second_command_sends_what_is_missing_or_changed(
    server: Hub, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hf_xet, as it is installed: it stores into a folder in place of a server."""
    run = trained(str(tmp_path), base)
    server.refused = "/commit/"
    assert published(run) == 1
    assert "the stand-in refuses" in capsys.readouterr().err
    server.refused = None
    assert published(run) == 0
    assert "was there" not in capsys.readouterr().out
    repo = server.repos["org/new"]
    repo.files["notes.gguf"] = b"of the user"
    assert published(run) == 0 and len(repo.commits) == 1
    assert "sent" not in capsys.readouterr().out
    (run / "model").write("generation_config.json", b'{"eos_token_id": 7}')
    repo.files["model-00001-of-00002.safetensors"] = b"of an export in two parts"
    assert published(run) == 0 and len(repo.commits) == 2
    assert "sent: 1 files, 0.0 MiB: generation_config.json\n" in capsys.readouterr().out
    assert "notes.gguf" in repo.files and "model-00001-of-00002.safetensors" not in repo.files


def test_a_card_of_the_users_own_gets_the_metadata_that_it_lacks(
    server: Hub, base: Path, tmp_path: Path
) -> None:
    run = trained(str(tmp_path), base)
    (run / "model").write("README.md", b"---\nlicense: mit\n---\n# Mine\n")
    server.repos["org/base"].gated = True
    assert published(run, "--public") == 0
    repo = server.repos["org/new"]
    text = repo.files["README.md"]
    assert isinstance(text, bytes) and text.endswith(b"---\n# Mine\n") and not repo.private
    front = yaml.safe_load(text.decode().split("---\n")[1])
    assert (front["license"], front["base_model"]) == ("mit", "org/base")
    assert "LICENSE" not in repo.files


@pytest.mark.parametrize("base_of", [{"name": "tiny", "random": True}, None])
def test_a_model_without_a_base_on_the_hub_names_none(
    base_of: dict[str, Any] | None, server: Hub, base: Path, tmp_path: Path
) -> None:
    """From random weights, or from a folder that is said to be nowhere on the hub."""
    run = trained(str(tmp_path), base)
    if base_of is not None:
        plan = json.loads(run.read("plan.json")) | {"base": base_of}
        run.write("plan.json", json.dumps(plan).encode())
    Path(base, "LICENSE").write_bytes(b"Folder's")
    more = ["--base=none"] if base_of is None else []
    assert main(["publish", run.url, "org/new", *more]) == 0
    files = server.repos["org/new"].files
    text = files["README.md"]
    assert isinstance(text, bytes) and "base_model" not in yaml.safe_load(text.split(b"---\n")[1])
    assert files.get("LICENSE") == (b"Folder's" if base_of is None else None)


REFUSED: dict[str, tuple[list[str], str]] = {
    "no base": ([], "--base is missing: the run knows its base as /"),
    "unknown base": (["--base=org/none"], "--base=org/none is unknown"),
    "another base": (["--base=org/other"], "=org/other is another model: it is of model_type"),
    "none": (["--base=none"], "is an adapter without a base on the hub"),
    "no target": (["extra"], "set RUN and ORG/NAME"),
    "a token": ([f"--token={TOKEN}"], "a token on the command line is refused"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_published_is_told_before_anything_is_sent(
    case: str, server: Hub, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(str(tmp_path), base, KINDS["adapter"])
    more, expected = REFUSED[case]
    assert main(["publish", run.url, "org/new", *more]) == 2
    told = capsys.readouterr().err
    assert expected in told and TOKEN not in told and "org/new" not in server.repos


def test_a_repository_that_is_not_the_runs_is_left_alone(
    server: Hub, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(str(tmp_path), base)
    server.repos["org/new"] = repo = Repo({"model.bin": b"x"}, private=True)
    assert published(run) == 2 and not repo.commits
    assert "TARGET=org/new has other content: model.bin" in capsys.readouterr().err
    repo.private = False
    assert published(run) == 2
    assert "TARGET=org/new is public" in capsys.readouterr().err
    (run / "model").write("README.md", f"x\nRead {base}/data\n".encode())
    assert published(run) == 2
    assert f"model/README.md, line 14, has {base}: it is a place" in capsys.readouterr().err


def test_what_the_hub_says_is_passed_on(
    server: Hub,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = trained(str(tmp_path), base)

    def told(**settings: Any) -> str:
        for name, value in settings.items():
            if name == "HF_TOKEN":
                monkeypatch.setenv(name, value)
            else:
                monkeypatch.setattr(constants, name, value)
        code = published(run)
        return f"{code} {capsys.readouterr().err}"

    assert "1 failed: cannot publish to org/new: no rights under the namespace org. The token " in (
        told(HF_TOKEN=READER)
    )
    assert "The token is not valid. Run hf auth login" in told(HF_TOKEN="hf_" + "x" * 34)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN")
    assert told().startswith("2 a token of the hub is missing")
    offline = told(HF_TOKEN=TOKEN, HF_HUB_OFFLINE=True)
    assert offline.startswith("1 failed") and "HF_HUB_OFFLINE unset?" in offline
    away = told(HF_HUB_OFFLINE=False, ENDPOINT="http://127.0.0.1:9")
    assert away.startswith("1 failed") and "Is http://127.0.0.1:9 within reach" in away
    assert TOKEN not in offline + away
