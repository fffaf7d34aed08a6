"""python -m rayapp: commands, exit codes, and a plan that needs neither torch nor a network."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from ports import free_port
from run_folders import eventful

from rayapp import config
from rayapp.__main__ import main
from rayapp.cli import COMMANDS, first, jobs
from rayapp.config import Config, ConfigError, RunConfig, VisionConfig, fields, load
from rayapp.config.optimizers import ImageOptimizerName, OptimizerName
from rayapp.config.text import flatten
from rayapp.driver import checks
from rayapp.finetune import check
from rayapp.jobs import client, results
from rayapp.jobs.client import VARIABLES
from rayapp.observe import status
from rayapp.observe.figures import figures
from rayapp.observe.goodput import read_events
from rayapp.observe.result import result_of
from rayapp.observe.run_folder import METRICS, RESULT, Exit
from rayapp.storage import open_storage

ROOT = Path(__file__).parent.parent
C4 = str(ROOT / "configs" / "llama3_1_8b_c4_eks.yaml")

ALONE = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("a plan uses no network")
socket.socket.connect = socket.getaddrinfo = refuse
from rayapp.__main__ import main
code = main(sys.argv[1:])
heavy = {"torch", "ray", "transformers", "boto3"} & {name.split(".")[0] for name in sys.modules}
print(code, sorted(heavy), file=sys.stderr)
"""


@pytest.mark.parametrize("more", [["--json"], [], ["--deadline_hours=24"]])
def test_a_plan_takes_no_torch_and_no_network(more: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "plan", C4, *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.splitlines()[-1] == "0 []"


def test_libraries_print_nothing_that_no_user_can_act_on() -> None:
    """However a process begins; torchao, where it is there, warns of kernels that need a GPU."""
    code = (
        "import rayapp.model, importlib.util as u; u.find_spec('torchao') and __import__('torchao')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    bars = "import transformers.utils.logging as logging; print(logging.is_progress_bar_enabled())"
    for words, shown in ((["presets"], "False"), (["publish"], "True")):
        code = f"from rayapp.__main__ import main; main({words}); {bars}"
        environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_DISABLE_PROGRESS_BARS"}
        out = subprocess.check_output(
            [sys.executable, "-c", code], text=True, cwd=ROOT, env=environment
        )
        assert out.splitlines()[-1] == shown, words


def test_json_is_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", C4, "--json", "--budget_usd=2000"]) == Exit.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True and found["workers"] == 32
    assert len(found["scaling"]) >= 3
    assert found["cheapest"]["cost_usd"]["value"] <= 2000


def test_tables_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", C4, "--deadline_hours=24"]) == Exit.DONE
    text = capsys.readouterr().out
    for part in (
        "fits on 4 x p5.48xlarge",
        "activations",
        "tokens/s",
        "MFU",
        "cheapest",
        "goodput",
    ):
        assert part in text


def test_overrides_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", C4, "--json", "--cluster.workers=8", "--usd_per_hour=20", "--region=us-east-1"]
    assert main(argv) == Exit.DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["nodes"], found["usd_per_hour"], found["region"]) == (1, 20.0, "us-east-1")


def test_each_choice_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    choices = "[g5.12xlarge,p4de.24xlarge:spot@9.5,p5.48xlarge]"
    argv = ["plan", C4, f"--cluster.instance={choices}", "--cluster.workers=8"]
    assert main([*argv, "--json"]) == Exit.FAILED  # a run must fit on each
    found = json.loads(capsys.readouterr().out)
    assert [*found["choices"]] == ["g5.12xlarge", "p4de.24xlarge:spot@9.5", "p5.48xlarge"]
    g5, p4de, p5 = found["choices"].values()
    assert (g5["fits"], p4de["fits"], p5["fits"]) == (False, True, True)
    assert p4de["cost_usd"]["value"] == pytest.approx(9.5 * p4de["hours"]["value"], rel=1e-5)
    assert p5["hours"]["value"] < p4de["hours"]["value"]
    assert found["cost_usd"] == p4de["cost_usd"]  # the first that fits
    assert main([*argv, "--cluster.ignore_plan=true"]) == Exit.DONE
    out = capsys.readouterr().out
    assert out.index("in order of preference") < out.index("fits on 1 x p4de.24xlarge, 8 workers")
    assert " 9.5 " in out and " no " in out
    assert main(["plan", C4, "--cluster.instance=p5.48xlarge", "--json"]) == Exit.DONE
    assert "choices" not in json.loads(capsys.readouterr().out)


def test_the_folder_of_a_run_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(C4).read_text(encoding="utf-8").replace("max_steps: 5000", "epochs: 1")
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    assert main(["plan", str(tmp_path), "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["hours"] is None
    (tmp_path / "plan.json").write_text('{"steps": 900}', encoding="utf-8")
    assert main(["plan", str(tmp_path), "--json"]) == Exit.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 900 and found["hours"]["value"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plna"], "command=plna is unknown: there is no such command. Did you mean plan?"),
        (["zzz"], "Set one of init, completion, finetune, vision, data, prepare, plan"),
        (["plan", C4, "--cluster.instance=p5.48xlrge"], "Did you mean p5.48xlarge?"),
        (["plan", C4, "--cluster.instance=g5.12xlarge,p5.48xlrge"], "Did you mean p5.48xlarge?"),
        (["plan", C4, "--cluster.instance=[a,b]", "--usd_per_hour=3"], "=3 is ambiguous"),
        (["plan", C4, "--deadline_hours=0.01"], "deadline_hours=0.01 is impossible"),
        (["plan", C4, "--deadlin_hours=1"], "Did you mean --deadline_hours?"),
        (["plan", C4, "--budget_usd=much"], "--budget_usd=much is not valid"),
        (["plan", C4, "other.yaml"], "other.yaml is unexpected"),
        (["plan", "no-such.yaml"], "no-such.yaml is not readable"),
        (["plan", C4, "--train.lrr=1"], "Did you mean train.lr?"),
        (["plan", C4, "--model.path=org/none"], "never uses the network"),
    ],
)
def test_bad_input_is_told(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == Exit.REFUSED
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "hint"),
    [("--compile=true", "Did you mean --train.compile?"), ("--nothing=1", "Write --section.field")],
)
def test_a_field_without_its_section_is_found(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["finetune", word]) == Exit.REFUSED
    assert hint in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == Exit.DONE
    told = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"(^| ){name} ", told, re.MULTILINE), name
        assert main([name, "--help"]) == Exit.DONE
        usage, *lines = capsys.readouterr().out.splitlines()
        assert usage.startswith(f"rayapp {name}"), name
        for option in re.findall(r"--(?!option)\w+(?![\w.])", usage):
            assert any(option in line for line in lines), f"{name} {option} is not explained"
    assert main([]) == Exit.REFUSED


@pytest.mark.parametrize("kind", [Config, VisionConfig])
def test_help_has_every_field_with_its_default(
    kind: type[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """What it gives as a default is read as the default."""
    command = kind.MODULE.rpartition(".")[2]
    assert main([command, "--help"]) == Exit.DONE
    told = capsys.readouterr().out
    found = dict(re.findall(r"^  --([\w.]+)=.*\[default: (.*?)[;\]]", told, re.MULTILINE))
    assert set(found) == set(fields(kind)) - {"task"}
    assert max(len(line) for line in told.splitlines() if not line.startswith("  --")) <= 80
    plain = {name: value for name, value in found.items() if name.count(".") == 1}
    assert load(None, plain, kind) == load(None, {}, kind)
    assert main([command, "--help", "train"]) == Exit.DONE
    train = capsys.readouterr().out
    assert "--train.lr=X   [default: " in train and "--run." not in train
    assert main([command, "--help", "trian"]) == Exit.REFUSED
    assert "Set one of run, model" in capsys.readouterr().err


def test_init_writes_a_config_that_can_be_planned_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "demo"]) == Exit.DONE
    assert (
        "next: rayapp data demo.yaml, rayapp plan demo.yaml, rayapp finetune demo.yaml"
        in capsys.readouterr().out
    )
    assert main(["plan", "demo.yaml"]) == Exit.DONE
    config = load("demo.yaml")
    assert isinstance(config, Config)
    assert check.check(config, 2, 0).config.data.kind == "chat"
    given = (tmp_path / "demo.yaml").read_text()
    everything = re.sub(r"^  # (\w+: )", r"  \1", given, flags=re.MULTILINE)
    (tmp_path / "all.yaml").write_text(everything)
    assert set(flatten(load("all.yaml").model_dump())) >= set(flatten(yaml.safe_load(everything)))
    assert main(["init", "demo"]) == Exit.REFUSED
    assert "demo.yaml exists already" in capsys.readouterr().err
    assert (tmp_path / "demo.yaml").read_text() == given
    assert main(["init", "a/b"]) == Exit.REFUSED


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["rayapp", "fi"], ["finetune"]),
        (["rayapp", "finetune", "--train.optimizer", "="], [*get_args(OptimizerName)]),
        (["rayapp", "finetune", "--train.optimizer", "=", "mu"], ["muon"]),
        (["rayapp", "vision", "--train.optimizer", "="], [*get_args(ImageOptimizerName)]),
        (["rayapp", "finetune", "--run.na"], ["--run.name="]),
        (["rayapp", "vision", "--train.images"], ["--train.images_per_step="]),
        (["rayapp", "plan", "de"], ["demo.yaml"]),
    ],
)
def test_a_shell_completes(words: list[str], wanted: list[str], tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").touch()
    text = f"""{first.script(list(COMMANDS))}
COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _rayapp; echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == wanted


def test_the_runs_here_are_listed_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    eventful(open_storage(str(tmp_path / "runs")), "first")
    assert main(["list"]) == Exit.DONE
    told = capsys.readouterr().out
    assert re.search(r"^first +done", told, re.MULTILINE) and f"in {tmp_path}/runs\n" in told
    assert max(map(len, told.partition("in /")[0].splitlines())) <= 80
    assert main(["list", "--json"]) == Exit.DONE
    assert [each["status"] for each in json.loads(capsys.readouterr().out)] == ["done"]
    assert main(["status", "first"]) == Exit.DONE
    assert "first" in capsys.readouterr().out
    (tmp_path / "runs" / "notes").mkdir()
    monkeypatch.setattr(client.JobsClient, "at", None)  # no cluster is asked
    assert main(["status", "frist"]) == Exit.REFUSED
    assert f"run=frist is unknown: {tmp_path}/runs has first. Set" in capsys.readouterr().err


def test_a_folder_without_runs_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    nobody = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(client, "HERE", nobody)
    assert main(["list"]) == Exit.DONE
    begin = "Start one: rayapp finetune tiny_cpu. Find others by --storage=URL or --address=URL\n"
    here = f"no runs in {tmp_path}/runs, and no cluster at {nobody}. {begin}"
    assert capsys.readouterr().out == here
    assert main(["list", "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out) == []
    assert main(["status", "demo"]) == Exit.REFUSED
    told = f"run=demo is unknown: there is no folder runs here, and no cluster at {nobody}. Set"
    assert told in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    (tmp_path / "proj").mkdir()
    (tmp_path / "proj" / "config.yaml").write_text("theme: jekyll")
    for folder in ("runs", "."):
        assert main(["list", f"--storage={folder}"]) == Exit.DONE
        where = os.path.normpath(tmp_path / folder)
        assert capsys.readouterr().out == f"no runs in {where}. {begin}"
    assert main(["status", "proj"]) == Exit.REFUSED and "holds no run" in capsys.readouterr().err
    assert main(["list", f"--address={nobody}"]) == Exit.FAILED  # it was named
    monkeypatch.setenv(VARIABLES[0], nobody)
    assert main(["list"]) == Exit.FAILED


def test_what_list_shows_of_an_ended_run_is_what_its_steps_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = eventful(open_storage(str(tmp_path)))
    run = folder.run
    ended: Any = {"status": "done", "steps": 600, "seconds": {}, "stall_s": None, "commit_s": None}
    result = result_of(folder.config, run, ended, {}, read_events(run))
    for own, shown in ({}, ""), ({"own_loss": 3.5}, "3.5000"):
        run.write(RESULT, json.dumps({**result, **own}).encode())
        assert main(["list", f"--storage={tmp_path}"]) == Exit.DONE
        out = capsys.readouterr().out
        assert ("train.loss" in out) is bool(shown) and shown in out
    run.write(METRICS, b"")  # is not read
    short = status.summary(run)
    eventful(open_storage(str(tmp_path)))
    long = status.read(run)
    assert short.status == long.status and short.step == long.step
    assert figures(short)["loss"] == figures(long)["loss"]
    assert short.account.wall_s == pytest.approx(long.account.wall_s)


def test_a_list_has_chosen_fields_and_is_filtered_and_sorted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, lr, loss in (("a", 1e-3, 2.0), ("b", 1e-4, 1.5), ("c", 1e-3, None)):
        folder = eventful(open_storage(str(tmp_path / name)))
        ended: Any = {"status": "done", "steps": 600, "seconds": {}, "stall_s": None}
        ended |= {"commit_s": None, "eval_loss": loss, "eval_metrics": {"dates": loss}}
        result = result_of(folder.config, folder.run, ended, {}, read_events(folder.run))
        folder.run.write(RESULT, json.dumps(result).encode())
        folder.run.write("config.yaml", f"train: {{lr: {lr}}}\n".encode())
        os.rename(folder.run.local_path() or "", tmp_path / f"run-{name}")

    def listed(*options: str) -> list[dict[str, Any]]:
        assert main(["list", f"--storage={tmp_path}", "--json", *options]) == Exit.DONE
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return found

    def names(*options: str) -> list[str]:
        return [Path(row["run"]).name for row in listed(*options)]

    assert names("--sort=eval_loss") == names("--sort=dates") == ["run-b", "run-a", "run-c"]
    assert names("--sort=train.lr")[0] == "run-b"
    assert set(names("--filter=train.lr=0.001")) == {"run-a", "run-c"}
    assert names("--filter=eval_loss=1.5") == ["run-b"] and names("--filter=status=lost") == []
    assert listed("--fields=train.lr,train.x")[0]["fields"].keys() == {"train.lr", "train.x"}
    assert main(["list", f"--storage={tmp_path}", "--fields=train.lr"]) == Exit.DONE
    out = capsys.readouterr().out
    assert "train.lr" in out and "0.0001" in out and "dates" in out and "held-out" in out


def test_nobody_reads_on() -> None:
    call = f"{sys.executable} -m rayapp finetune --help | head -1"
    done = subprocess.run(call, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("rayapp finetune") and done.stderr == ""


def test_the_console_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["rayapp"].partition(":")
    command = getattr(importlib.import_module(module), function)
    for option, answer in (("--version", f"rayapp {project['version']}"), ("--help", "plan ")):
        monkeypatch.setattr(sys, "argv", ["/somewhere/bin/rayapp", option])
        assert command() == main([option]) == Exit.DONE
        assert capsys.readouterr().out.count(answer) == 2


def test_what_is_typed_is_what_is_sent() -> None:
    """YAML 1.1 would make False, 750, 1.1, 8, None and 255 of these."""
    typed = "{FLAG: no, TIME: 12:30, VERSION: 1.10, COUNT: 010, EMPTY: , NULL: ~, HEX: 0xff}"
    found = jobs._mapping("env", typed)
    assert found == {
        "FLAG": "no", "TIME": "12:30", "VERSION": "1.10", "COUNT": "010", "EMPTY": "",
        "NULL": "~", "HEX": "0xff",
    }  # fmt: skip
    for wrong in ("[a]", "{A: [b]}", "{A: {b: c}}", "a", "{A"):
        with pytest.raises(ConfigError, match="it must be a mapping of names to texts"):
            jobs._mapping("env", wrong)


def test_a_damaged_run_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("good", "plan", "events", "metrics"):
        (tmp_path / name).mkdir()
        started = {"event": "started", "time": 1.0, "usd_per_hour": None, "seen_until": None}
        ended = {"event": "ended", "time": 2.0, "status": "done", "reason": None, "seconds": {}}
        text = f"{json.dumps(started)}\n{json.dumps(ended)}\n"
        (tmp_path / name / "events.jsonl").write_text(text)
    (tmp_path / "plan" / "plan.json").write_text('{"steps"')
    (tmp_path / "events" / "events.jsonl").write_text("{\n")
    (tmp_path / "metrics" / "metrics.jsonl").write_text('{"step": "x"}\n')
    (tmp_path / "no-run").mkdir()
    (tmp_path / "no-run" / "file").write_text("x")
    assert main(["list", f"--storage={tmp_path}", "--json"]) == Exit.DONE
    found = {Path(one["run"]).name: one for one in json.loads(capsys.readouterr().out)}
    assert {name: one["status"] for name, one in found.items()} == {
        "good": "done", "plan": "unreadable", "events": "unreadable", "metrics": "done",
    }  # fmt: skip
    assert f"{tmp_path}/plan/plan.json is damaged" in found["plan"]["reason"]
    assert f"{tmp_path}/events/events.jsonl is damaged" in found["events"]["reason"]
    assert main(["list", f"--storage={tmp_path}"]) == Exit.DONE
    told = capsys.readouterr().out
    assert f"{tmp_path}/plan: {found['plan']['reason']}\n" in told
    for name in ("plan", "events"):
        assert main(["status", str(tmp_path / name)]) == Exit.REFUSED
        error = capsys.readouterr().err
        assert "is damaged" in error and error.count("\n") == 1
        assert main(["report", str(tmp_path / name)]) == Exit.REFUSED
        assert capsys.readouterr().err == error


def test_the_package_shows_its_names() -> None:
    import rayapp

    assert set(rayapp.__all__) <= set(dir(rayapp))


@pytest.mark.parametrize("count", ["inf", "nan", "-5", "0", "0.5", "many"])
def test_a_number_of_images_is_whole(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", str(ROOT / "configs" / "resnet50_imagenet.yaml"), f"--images={count}"]
    assert main(argv) == Exit.REFUSED
    error = capsys.readouterr().err
    assert error.startswith(f"--images={count} is not valid: it must be a ")
    assert error.count("\n") == 1


def test_a_damaged_config_or_result_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For every command that reads it, the one that trains too; the others go on without it."""
    run = tmp_path / "run"
    run.mkdir()
    whole = config.load(None, {"run.name": "run", "run.storage": str(tmp_path)})
    for name, data in {
        "config.yaml": [b"a: [", b"\xff\xfe", b"- a", b""],
        "result.json": [b'{"status"', b"[]", b'{"status": "done"}', b'{"status": 1, "steps": 2}'],
    }.items():
        for damage in data:
            (run / "config.yaml").write_text(whole.to_yaml())
            (run / "result.json").write_text('{"status": "failed", "steps": 0, "reason": "x"}')
            (run / name).write_bytes(damage)
            damaged = f"{run / name} is damaged: "
            with pytest.raises(ConfigError, match=re.escape(damaged)):
                checks.same_run(open_storage(str(run)), whole)
            assert main(["status", str(run)]) in (Exit.DONE, Exit.FAILED)
            assert main(["list", f"--storage={tmp_path}"]) == Exit.DONE
            capsys.readouterr()
            if name == "config.yaml":  # what `resume` sends again
                with pytest.raises(ConfigError, match=re.escape(damaged)):
                    results.config_of(open_storage(str(run)))
                continue
            assert main(["report", str(run)]) == Exit.REFUSED
            error = capsys.readouterr().err
            assert error.startswith(damaged) and error.count("\n") == 1
