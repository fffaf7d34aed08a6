"""Folders as runs leave them, in the size that a test wants: drawn figures in the real records.

    folder = RunFolder(storage, "demo", steps=500); folder.train(500); folder.end("done")

Lines have the real fields and pass the real MetricsLog, the config is a real Config, the plan is
the real planner's, so that a field which changes its name changes here too.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from rayapp import planner
from rayapp.config import Config, load
from rayapp.config.fields import TOKENS
from rayapp.data.prepared import Prepared
from rayapp.data.report import summed
from rayapp.observe.columns import Columns
from rayapp.observe.goodput import ENDED, INTERRUPTED, RESUMED, STARTED, WORKERS, read_events
from rayapp.observe.metrics import MetricsLine, line_of
from rayapp.observe.metrics_log import MetricsLog
from rayapp.observe.result import step_s
from rayapp.observe.run_folder import EVENTS
from rayapp.storage import Storage

ROOT = Path(__file__).parents[2]
C4 = str(ROOT / "configs" / "llama3_1_8b_c4_eks.yaml")
BEGAN = 1_795_000_000.0
START_S, FIRST_STEP_S, RECOVERY_S = 95.0, 14.0, 45.0
VERSIONS = {"rayapp": "0.1.0", "ray": "2.60.0", "torch": "2.13.0", "transformers": "5.23.0"}
HOSTILE = "</script><script>document.title='broken out'</script><img src=x onerror=alert(1)>"


class RunFolder:
    """A run as it goes on: every method is something that happens to it."""

    def __init__(
        self,
        storage: Storage,
        name: str = "demo",
        steps: int = 600,
        *,
        config: str = C4,
        events: bool = True,
        seed: int = 0,
        usd_per_hour: float | None = 220.0,
        nodes: int = 4,
        workers: int = 32,
        **overrides: str,
    ) -> None:
        self.run, self.steps, self.events = storage / name, steps, [] if events else None
        settings = {field.replace("__", "."): value for field, value in overrides.items()}
        self.config = load(
            config, {"run.name": name, "run.storage": storage.url, **settings}, Config
        )
        self.usd_per_hour, self.nodes, self.workers = usd_per_hour, nodes, workers
        self.random = np.random.default_rng(seed)
        self.now, self.step, self.attempt, self.held = BEGAN, 0, 0, None
        self.log: MetricsLog | None = None
        self.run.write("config.yaml", self.config.to_yaml().encode())
        self.add(STARTED, host="head", submission_id=None, seen_until=None, **self.machines)

    @property
    def machines(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "instance": self.config.cluster.instance,
            "usd_per_hour": self.usd_per_hour,
        }

    def add(self, event: str, **facts: Any) -> None:
        if self.events is None:
            return
        self.events.append({"event": event, "time": self.now, **facts})
        text = "".join(json.dumps(each) + "\n" for each in self.events)
        self.run.write(EVENTS, text.encode())

    def plan(self, bad: bool = True) -> None:
        answer = planner.plan(self.config, steps=self.steps).as_dict()
        report = data_report(bad)
        own = {"fingerprint": "6b36ea2d5c628742", "steps": self.steps, "epochs": 0.41}
        self.run.write("plan.json", json.dumps(answer | own | {"data": report}).encode())

    def train(self, steps: int, *, at: int | None = None, **values: Any) -> None:
        """Begin an attempt at a step (by default the next one) and do that many steps."""
        lost = [] if at is None else list(range(at + 1, self.step + 1))
        self.step = self.step if at is None else at
        self.now += START_S if self.log is None else RECOVERY_S
        self.add(WORKERS, workers=self.workers, **self.machines)
        self.log = MetricsLog(self.run, self.step)
        self.attempt += 1
        for count in range(steps):
            self.step += 1
            record = self.record(FIRST_STEP_S if count == 0 else 0.0, **values)
            self.now = record["time"]
            self.log.write(record)
            if count == 0:
                facts = {"attempt": self.attempt, "step": self.step - 1}
                facts |= {"first_step_s": record["step_s"], "lost_steps": len(lost)}
                self.add(RESUMED, lost_s=1.1 * len(lost), **facts)
        self.log.close()

    def record(self, more_s: float = 0.0, **values: Any) -> MetricsLine:
        """Draw the record of a step."""
        part = self.step / self.steps
        loss = 1.9 + 9.0 * math.exp(-9.0 * part**0.6) + float(self.random.normal(0, 0.06))
        stall_s = 0.3 if self.step % 100 == 0 else 0.0
        eval_s = 2.0 if self.step % 50 == 0 else 0.0
        wait_s = float(self.random.exponential(0.004))
        step_s = 1.02 + float(self.random.gamma(2.0, 0.05)) + stall_s + eval_s + wait_s + more_s
        tokens = self.config.train.tokens_per_step
        rate = tokens / (step_s - stall_s - eval_s - more_s)
        peak = 33.0 + 3.0 * min(1.0, self.step / 5)
        held = loss + 0.05 if eval_s else None
        numbers: dict[str, Any] = {
            "step": self.step,
            "epoch": 0.41 * part,
            "loss": loss,
            "loss_per_byte": loss / 4.31,
            "grad_norm": 0.4 + 3.0 * math.exp(-20 * part) + float(self.random.gamma(2.0, 0.03)),
            "lr": 3e-4 * min(self.step / (0.04 * self.steps), 0.5 + 0.5 * math.cos(3.14 * part)),
            "tokens": tokens,
            "tokens_per_s": rate,
            "tokens_per_s_per_gpu": rate / self.workers,
            "mfu": rate / self.workers * 6 * 8.03e9 / 989e12,
            "step_s": step_s,
            "data_wait_s": wait_s,
            "checkpoint_stall_s": stall_s,
            "eval_s": eval_s,
            "skipped": False,
            "peak_gib": peak,
            "peak_forward_gib": peak - 9.0 + float(self.random.normal(0, 0.1)),
            "peak_backward_gib": peak,
            "peak_optimizer_gib": peak - 14.0,
            "workers": self.workers,
            "attempt": self.attempt,
            "batch_digest": f"{self.step:016x}",
            "time": self.now + step_s,
            "eval_loss": held,
            "eval_loss_per_byte": None if held is None else held / 4.31,
        }
        return line_of(TOKENS, numbers, values)

    def interrupt(self, kind: str = "failure", reason: str = "rank 3: the node died") -> None:
        trained_until = self.now
        self.now += 20.0
        self.add(
            INTERRUPTED,
            kind=kind,
            reason=reason,
            step=self.step,
            workers=self.workers,
            trained_until=trained_until,
        )

    def pause(self, seconds: float) -> None:
        """Let the same command be given again after a while."""
        seen_until = self.now
        self.now += seconds
        self.add(STARTED, host="head", submission_id=None, seen_until=seen_until, **self.machines)

    def end(self, status: str = "done", reason: str | None = None, **result: Any) -> None:
        seconds = {"evaluation": 21.0, "sample": 3.0, "export": 48.0} if status == "done" else {}
        self.now += sum(seconds.values())
        self.add(ENDED, status=status, reason=reason, seconds=seconds)
        values: dict[str, Any] = {"status": status, "steps": self.step}
        if status == "failed":
            values |= {"reason": reason}
        else:
            values |= {
                "run": self.run.url,
                "eval_loss": 1.98 if status == "done" else None,
                "eval_loss_per_byte": 0.459 if status == "done" else None,
                "samples": [["The ship", " came into the harbour at dawn, and nobody was there."]],
                "versions": VERSIONS,
            }
            if self.run.exists("plan.json"):
                values["step_s"] = step_s(self.run, Columns.read(self.run))
        self.run.write("result.json", json.dumps(values | result).encode())


def data_report(bad: bool) -> dict[str, Any]:
    """Return the report of a drawn data set, in the words of the real one."""
    shape = {8: 210, 9: 1_460, 10: 5_033, 11: 9_117, 12: 6_020, 13: 1_209, 15: 12}
    train = summed([]) | {
        "documents": sum(shape.values()),
        "split": 1_221,
        "tokens": 61_204_113,
        "target_tokens": 61_204_113,
        "target_bytes": 263_789_727,
        "rows": 7_502,
        "lengths": {f"2^{power}": count for power, count in shape.items()},
    }
    held = summed([]) | {"documents": 231, "tokens": 611_204, "target_tokens": 611_204, "rows": 75}
    reasons = {"is not JSON (Expecting value)": 41, "has no text": 12, "is not UTF-8": 3}
    places = [
        (f"s3://corpus/c4/part-{n:05d}.jsonl:{n * 97}", reason) for n, reason in enumerate(reasons)
    ]
    return Prepared(
        url="s3://corpus/.prepared/6b36ea2d5c628742",
        fingerprint="6b36ea2d5c628742",
        parts={},
        seq_len=8192,
        shards={},
        counts={"train": train, "eval": held},
        bad=reasons if bad else {},
        examples=places if bad else [],
        records=23_348,
        duplicates=0.0123,
    ).report()


def eventful(storage: Storage, name: str = "eventful", steps: int = 600, **more: Any) -> RunFolder:
    """Make a run that was interrupted twice, stopped, and gone on with the next morning."""
    folder = RunFolder(storage, name, steps, **more)
    folder.plan()
    folder.train(steps // 3)
    folder.interrupt("preemption", "the node of rank 8 is taken away in 120 s")
    folder.train(steps // 4)
    folder.interrupt("failure", "rank 17: CUDA error: an illegal memory access was encountered")
    folder.train(30, at=folder.step - 25)
    folder.end("stopped")
    folder.pause(11 * 3600.0)
    folder.log = None
    folder.train(steps - folder.step)
    folder.end("done")
    return folder


def events_of(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the events as they are read back."""
    return read_events(folder.run)
