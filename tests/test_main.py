"""python -m rayapp: commands, exit codes, and a plan that needs neither torch nor a network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rayapp.__main__ import BAD_CONFIG, DONE, main

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


def test_json_is_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", C4, "--json", "--budget_usd=2000"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True and found["workers"] == 32
    assert len(found["scaling"]) >= 3 and found["traced"] is None
    assert found["cheapest"]["cost_usd"]["value"] <= 2000


def test_tables_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", C4, "--deadline_hours=24"]) == DONE
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
    assert main(argv) == DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["nodes"], found["usd_per_hour"], found["region"]) == (1, 20.0, "us-east-1")


def test_the_folder_of_a_run_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(C4).read_text(encoding="utf-8").replace("max_steps: 5000", "epochs: 1")
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    assert main(["plan", str(tmp_path), "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["hours"] is None
    (tmp_path / "plan.json").write_text('{"steps": 900}', encoding="utf-8")
    assert main(["plan", str(tmp_path), "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 900 and found["hours"]["value"] > 0


def test_the_real_step_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", str(ROOT / "configs" / "tiny_cpu.yaml"), "--json", "--trace"]
    assert main(argv) == DONE
    found = json.loads(capsys.readouterr().out)["traced"]
    assert found["planned_gib"] == pytest.approx(found["peak_gib"], rel=0.10)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plna"], "command=plna is unknown: there is no such command. Did you mean plan?"),
        (["zzz"], "Set one of plan, stage, preflight, submit, resume"),
        (["plan", C4, "--cluster.instance=p5.48xlrge"], "Did you mean p5.48xlarge?"),
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
    assert main(argv) == BAD_CONFIG
    assert message in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == DONE
    assert main(["plan", "--help"]) == DONE
    assert "deadline_hours" in capsys.readouterr().out
    assert main([]) == BAD_CONFIG
