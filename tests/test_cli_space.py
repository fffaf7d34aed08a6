"""Check that what a run needs stays, and that the rest is shown and removed."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_data_preparation import here, recipe, tokenizer_url  # noqa: F401  fixtures

from rayapp.__main__ import main
from rayapp.config import Config
from rayapp.config import load as load_config
from rayapp.data import sources, tokens
from rayapp.data.prepared import Prepared, load, mixed
from rayapp.data.recipe import RowRecipe
from rayapp.driver.lease import held
from rayapp.finetune.prepared_run import plan_of
from rayapp.model import resolve
from rayapp.observe.run_folder import CONFIG, EVENTS, PLAN, RESULT, RUN_ID, Exit
from rayapp.order import Order
from rayapp.storage import open_storage

OLD_S = 40 * 86_400
STARTED = {"event": "started", "time": 1.0, "usd_per_hour": None, "seen_until": None}


def write_run(root: Path, name: str, status: str, plan: dict[str, object]) -> Path:
    run = root / name
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "a.distcp").write_bytes(b"x" * 1000)
    (run / CONFIG).write_text("run: {}\n")
    (run / PLAN).write_text(json.dumps(plan))
    ended = {"event": "ended", "time": 2.0, "status": status, "reason": None, "seconds": {}}
    (run / EVENTS).write_text(f"{json.dumps(STARTED)}\n{json.dumps(ended)}\n")
    return run


def grow_old(folder: Path) -> None:
    then = time.time() - OLD_S
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


def blocks(root: Path) -> set[Path]:
    return {path for path in (root / ".prepared" / "tokens").rglob("*") if path.is_file()}


@pytest.fixture
def storage(recipe: RowRecipe, tmp_path: Path) -> tuple[Path, list[Prepared]]:  # noqa: F811
    """Return a storage with four data sets, the last two of other tokens, all of them old."""
    root = tmp_path / "runs"
    bpe = tokens.train_bpe(iter(["hello hello"]), 262)
    tokens.save_tokenizer(bpe, open_storage(str(tmp_path / "bpe")))
    (tmp_path / "other.jsonl").write_text('{"text": "other"}\n' * 30)
    other = replace(recipe, source=sources.find(str(tmp_path / "other.jsonl")))
    recipes = [
        recipe,
        replace(recipe, seq_len=32),
        replace(recipe, tokenizer_url=str(tmp_path / "bpe"), tokenizer_digest="bpe"),
        other,
    ]
    made = [here(each, root / ".prepared") for each in recipes]
    tokens.save_tokenizer(bpe, open_storage(str(root / ".prepared" / "tokenizer-bpe")))
    grow_old(root)
    return root, made


def prune(root: Path, *options: str) -> int:
    return main(["prune", f"--storage={root}", *options])


def test_rows_that_an_unfinished_run_needs_stay_with_their_tokens(
    storage: tuple[Path, list[Prepared]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, made = storage
    write_run(root, "stopped", "stopped", {"prepared": [made[0].fingerprint]})
    write_run(root, "done", "done", {"prepared": [made[2].fingerprint]})
    before = blocks(root)
    assert prune(root, "--dry_run") == Exit.DONE and blocks(root) == before
    assert "would remove rows of 3 recipes" in capsys.readouterr().out
    assert prune(root) == Exit.DONE
    prepared = open_storage(str(root / ".prepared"))
    assert [load(prepared / each.fingerprint) is not None for each in made] == [
        True, False, False, False,
    ]  # fmt: skip
    kept = {root / ".prepared" / "tokens" / n for n in block_names(root, made[0])}
    assert blocks(root) == kept < before
    assert (root / ".prepared" / "tokenizer-bpe" / "tokenizer.json").exists()
    assert prune(root) == Exit.DONE
    assert "removed rows of 0 recipes (0 bytes) and 0\nblocks" in capsys.readouterr().out


def block_names(root: Path, prepared: Prepared) -> list[str]:
    return (root / ".prepared" / prepared.fingerprint / "blocks.txt").read_text().split()


def test_what_was_used_lately_stays(
    storage: tuple[Path, list[Prepared]],
    recipe: RowRecipe,  # noqa: F811
) -> None:
    root, made = storage
    here(recipe, root / ".prepared")  # found: nothing is made
    assert prune(root) == Exit.DONE
    assert sorted(path.name for path in (root / ".prepared").iterdir()) == sorted(
        [made[0].fingerprint, "tokens", "tokenizer-bpe"]
    )
    assert prune(root, "--unused_days=50") == Exit.DONE
    assert (root / ".prepared" / made[0].fingerprint / "manifest.json").exists()


def test_a_mixture_needs_the_rows_of_each_source(storage: tuple[Path, list[Prepared]]) -> None:
    root, made = storage
    parts = {"a": made[0], "b": made[3]}
    both = mixed(open_storage(str(root / ".prepared")), parts, {"a": 1.0, "b": 1.0})
    order = Order.for_mixture(both.sizes, both.weights, 4, 1, 0, 2)
    config = load_config(None, {"train.micro_batch": "4"}, Config)
    ready: Any = SimpleNamespace(config=config, model=resolve(config.model.path))
    plan = plan_of(ready, both, order, 1, "tokenizer", 8)
    write_run(root, "stopped", "stopped", dict(plan))
    assert prune(root) == Exit.DONE
    found = {p.name for p in (root / ".prepared").iterdir()} - {"tokens", "tokenizer-bpe"}
    assert found == {made[0].fingerprint, made[3].fingerprint}


def test_of_an_old_mixture_all_rows_may_be_its_own(storage: tuple[Path, list[Prepared]]) -> None:
    root, _ = storage
    write_run(root, "stopped", "stopped", {"fingerprint": "0" * 16})
    before = sorted((root / ".prepared").rglob("*"))
    assert prune(root) == Exit.DONE and sorted((root / ".prepared").rglob("*")) == before


def test_nothing_is_removed_while_a_run_cannot_be_read(
    storage: tuple[Path, list[Prepared]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = storage
    (write_run(root, "torn", "stopped", {}) / PLAN).write_text('{"fing')
    before = sorted((root / ".prepared").rglob("*"))
    assert prune(root) == Exit.REFUSED and sorted((root / ".prepared").rglob("*")) == before
    assert f"run={root}/torn is unreadable" in capsys.readouterr().err


def test_rows_of_a_run_that_prepares_are_not_pruned_on_its_first_day(
    storage: tuple[Path, list[Prepared]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = storage
    run = write_run(root, "new", "stopped", {})
    with (run / EVENTS).open("a") as file:
        file.write('{"event": "started", "time": 3.0, "usd_per_hour": null, "seen_until": null}\n')
    with held(open_storage(str(run))):
        assert prune(root, "--unused_days=0") == Exit.REFUSED
    assert "--unused_days=0 is too few: new may be preparing" in capsys.readouterr().err


def test_du_shows_sizes_and_who_needs_what(
    storage: tuple[Path, list[Prepared]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, made = storage
    write_run(root, "demo", "stopped", {"prepared": [made[1].fingerprint]})
    assert main(["du", f"--storage={root}", "--json"]) == Exit.DONE
    found = json.loads(capsys.readouterr().out)
    (run,) = found["runs"]
    on_disk = sum(p.stat().st_size for p in (root / "demo").rglob("*") if p.is_file())
    assert (run["name"], run["state"], run["num_bytes"]) == ("demo", "stopped", on_disk)
    by = {rows["name"]: rows["needed_by"] for rows in found["rows"]}
    assert by == {each.fingerprint: ["demo"] * (each is made[1]) for each in made}
    assert found["tokens_bytes"] == sum(path.stat().st_size for path in blocks(root))
    assert found["unneeded_tokens_bytes"] == 0
    assert main(["du", f"--storage={root}"]) == Exit.DONE
    told = capsys.readouterr().out
    assert f"rows {made[1].fingerprint}" in told and "run demo" in told and "no run" in told


def test_rm_removes_a_run_and_nothing_else(
    storage: tuple[Path, list[Prepared]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, made = storage
    run = write_run(root, "demo", "done", {"prepared": [made[0].fingerprint]})
    kept = write_run(root, "demo2", "done", {})
    before = everything(root)
    assert main(["rm", "demo", f"--storage={root}"]) == Exit.REFUSED
    assert "--yes is missing: there is no terminal" in capsys.readouterr().err
    assert main(["rm", "demo", f"--storage={root}", "--dry_run"]) == Exit.DONE
    assert " kB in checkpoints, config.yaml, events.jsonl" in capsys.readouterr().out
    assert everything(root) == before
    assert main(["rm", "demo", f"--storage={root}", "--yes"]) == Exit.DONE
    assert everything(root) == [path for path in before if run not in (path, *path.parents)]
    assert kept.exists() and f"removed {root}/demo: " in capsys.readouterr().out
    assert main(["rm", "demo", f"--storage={root}", "--yes"]) == Exit.REFUSED


def everything(root: Path) -> list[Path]:
    return sorted(root.rglob("*"))


def test_rm_leaves_what_no_run_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, outside = write_run(tmp_path, "demo", "done", {}), tmp_path / "outside"
    mine = ("notes.md", ".git/HEAD", "checkpoints/notes", "logs/mine.txt", "src/config.yaml")
    for path in [run / name for name in mine] + [outside / "thesis"]:
        path.parent.mkdir(exist_ok=True)
        path.write_text("precious")
    (run / "model").symlink_to(outside)
    (run / RESULT).symlink_to(outside / "thesis")
    assert main(["rm", str(run), "--dry_run"]) == Exit.DONE
    told = capsys.readouterr().out
    assert all(name in told.partition("stays: ")[2] for name in (*mine, "model", RESULT))
    assert main(["rm", str(run), "--yes"]) == Exit.DONE
    left = {str(path.relative_to(run)) for path in run.rglob("[!.]*") if not path.is_dir()}
    assert left == {*mine, RESULT} and (run / "model").is_symlink()
    assert (outside / "thesis").read_text() == "precious"


@pytest.mark.parametrize(
    ("files", "is_one"),
    [
        ({CONFIG: "theme: jekyll"}, False),
        ({CONFIG: "run: {}", PLAN: "{}", "metrics.jsonl": ""}, False),
        ({RUN_ID: "12"}, False),
        ({EVENTS: '{"event": "ended", "time": 1}\n'}, False),
        ({EVENTS: "not JSON\n"}, False),
        ({RUN_ID: "0123456789abcdef" * 2 + "\n", EVENTS: "torn"}, True),
        ({EVENTS: f"{json.dumps(STARTED)}\ntorn\n", PLAN: "torn"}, True),
    ],
)
def test_rm_takes_for_a_run_what_only_a_run_writes(
    tmp_path: Path, files: dict[str, str], is_one: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "proj").mkdir()
    for name, text in files.items():
        (tmp_path / "proj" / name).write_text(text)
    assert main(["rm", str(tmp_path / "proj"), "--yes"]) == (Exit.DONE if is_one else Exit.REFUSED)
    assert (tmp_path / "proj").exists() != is_one
    assert is_one or "is no run: it has no RUN_ID" in capsys.readouterr().err


def test_rm_refuses_a_link_and_a_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "runs", "demo", "done", {})
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "runs" / CONFIG).write_text("run: {}")
    before = everything(tmp_path)
    for folder in ("link", "runs"):
        assert main(["rm", str(tmp_path / folder), "--yes"]) == Exit.REFUSED
    assert everything(tmp_path) == before and "is a link" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "code"), [("y", Exit.DONE), ("n", 3), ("", 3), (None, 3)])
def test_rm_asks_at_a_terminal(
    tmp_path: Path, answer: str | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(_: str) -> str:
        if answer is None:
            raise EOFError
        return answer

    run = write_run(tmp_path, "demo", "done", {})
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", asked)
    assert main(["rm", str(run)]) == code and run.exists() == (code != Exit.DONE)


def test_rm_refuses_a_run_that_is_at_work(tmp_path: Path) -> None:
    run = write_run(tmp_path, "demo", "stopped", {})
    with held(open_storage(str(run))):
        assert main(["rm", "demo", f"--storage={tmp_path}", "--yes"]) == Exit.REFUSED
    assert (run / "checkpoints" / "a.distcp").exists()


def test_prune_removes_nothing_behind_a_link_and_nothing_of_another_name(
    storage: tuple[Path, list[Prepared]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, made = storage
    prepared, outside = root / ".prepared", tmp_path / "docs"
    key = "ab" * 16
    for path in (
        outside / "0123456789abcdef" / "ab" / key,
        outside / "thesis.tex",
        prepared / made[0].fingerprint / "id_rsa",
        prepared / "tokens" / "id_rsa",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    (prepared / made[1].fingerprint / "linked").symlink_to(outside)
    (prepared / "0123456789abcdef").symlink_to(outside)
    grow_old(tmp_path)
    assert prune(root) == Exit.DONE
    assert (prepared / made[0].fingerprint / "id_rsa").exists()
    assert (prepared / "tokens" / "id_rsa").exists() and len(blocks(root)) == 1
    assert "stays: id_rsa" in capsys.readouterr().out
    (prepared / "tokens" / "id_rsa").unlink()
    shutil.rmtree(prepared / "tokens")
    for link in (prepared / "tokens", prepared):
        if link.exists():
            shutil.rmtree(link)
        link.symlink_to(outside)
        grow_old(tmp_path)
        assert prune(root, "--unused_days=1") == Exit.DONE == main(["du", f"--storage={root}"])
    assert {path.name for path in outside.rglob("*") if path.is_file()} == {"thesis.tex", key}


def test_a_damaged_run_hides_no_other_from_du(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "fine", "stopped", {"prepared": []})
    write_run(tmp_path, "torn", "stopped", {})
    (tmp_path / "torn" / PLAN).write_text("null")
    (tmp_path / "later").mkdir()
    os.mkfifo(tmp_path / "later" / EVENTS)
    (tmp_path / "later" / "config.yaml").write_text("")
    (tmp_path / ".rayapp-x").mkdir()
    (tmp_path / ".rayapp-x" / "a").write_text("")
    assert main(["du", f"--storage={tmp_path}"]) == Exit.DONE
    told = capsys.readouterr().out
    assert "run fine" in told and "(unreadable)" in told
    assert f"{tmp_path}/torn: {tmp_path}/torn/plan.json is damaged" in told
    assert f"{tmp_path}/later: cannot read {tmp_path}/later/events.jsonl" in told
    assert prune(tmp_path) == Exit.REFUSED
    assert capsys.readouterr().err.count("is unreadable") == 1  # the plan of `later` is not damaged
