"""A run on one node of Ray with the labels that a rendered cluster gives it, and what it cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nodes import Node, cluster
from patience import PATIENCE_S

from rayapp.observe.goodput import read_events
from rayapp.storage import open_storage

CHOICES = "[m7i.4xlarge, c6i.4xlarge:spot@0.25, r6i.4xlarge@1.5]"


def costs_the_third(folder: Path, label: str) -> None:
    """Train on a node with this option of `ray start`; the run must have the third's price."""
    with cluster(folder) as nodes:
        nodes.append(Node(folder / "worker.log", cpus=2, seats=1, head=nodes[0], more=[label]))
        settings = {
            "run.name": "priced",
            "run.storage": str(folder),
            "run.max_usd": 100,
            "cluster.instance": CHOICES,
            "cluster.workers": 1,
            "cluster.address": nodes[0].address,
            "data.seq_len": 64,
            "train.tokens_per_step": 256,
            "train.micro_batch": 4,
            "train.max_steps": 2,
            "checkpoint.export": "false",
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        done = subprocess.run(
            [sys.executable, "-m", "rayapp.finetune", *options],
            cwd=folder,
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = open_storage(str(folder / "priced"))
    told: list[Any] = [event for event in read_events(run) if "instance" in event]
    assert {(each["nodes"], each["instance"], each["usd_per_hour"]) for each in told} == {
        (1, "r6i.4xlarge@1.5", 1.5)
    }
    ended = read_events(run)[-1]["time"]
    result = json.loads(run.read("result.json"))
    assert result["cost_usd"] == pytest.approx(1.5 * (ended - told[0]["time"]) / 3600, rel=0.01)
    assert json.loads(run.read("plan.json"))["instance"] == "r6i.4xlarge"
    assert "  - r6i.4xlarge@1.5\n" in run.read("config.yaml").decode()  # the list, for the next
