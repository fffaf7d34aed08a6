"""Check which micro-batch auto takes, what it says of it, and what becomes of it in a failure."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import RayActorError
from ray.train.v2.api.exceptions import WorkerGroupError
from rich.console import Console
from torch._dynamo.exc import TorchDynamoException
from transformers import BertConfig

from rayapp import model
from rayapp.config import Config, ConfigError, from_dict, load
from rayapp.finetune import auto, model_parts, plan_lines
from rayapp.finetune.model_parts import compile_gain
from rayapp.order import Order
from rayapp.planner.memory import Layout, with_slack
from rayapp.planner.shape import shape_of
from rayapp.storage import Storage, open_storage
from rayapp.train.spec import LanguageSpec

ROWS, SEQ_LEN, STEPS = 24, 1024, 5
SIZES = (1, 2, 3, 4, 6, 12)  # what divides the rows among 2 workers evenly
SHAPE = model.resolve("llama3.2-1b").config
GIB = 2**30


def config(**cluster: Any) -> Config:
    return from_dict(
        {
            "model": {"path": "llama3.2-1b", "from_scratch": True},
            "data": {"seq_len": SEQ_LEN},
            "train": {
                "tokens_per_step": ROWS * SEQ_LEN,
                "micro_batch": "auto",
                "precision": "bf16",
            },
            "parallel": {"strategy": "full_shard"},
            "cluster": {"workers": "2", **cluster},
        }
    )


def peak_gib(size: int) -> float:
    """Compute the plan of a size on 2 GPUs, past the planner."""
    shape = shape_of(SHAPE.to_dict())
    more = ROWS // size > 2
    return with_slack(Layout(shape, 2, size, SEQ_LEN, accumulates=more).peak()).total / GIB


def choose(
    run: Storage, capacity_gib: float, monkeypatch: pytest.MonkeyPatch, **cluster: Any
) -> tuple[int, str]:
    monkeypatch.setattr(auto, "_capacity_gib", lambda config, gpus: capacity_gib)
    said = io.StringIO()
    console = Console(file=said, width=200)
    found = auto.chosen(config(**cluster), SHAPE, run, True, console, STEPS)
    return found.micro_batch, said.getvalue()


@pytest.mark.parametrize("size", SIZES)
def test_the_largest_that_the_plan_says_fits(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity_gib = peak_gib(size) + 0.001
    found, said = choose(open_storage(str(tmp_path)), capacity_gib, monkeypatch)
    assert found == size
    planned = f"auto           micro-batch of {size} rows, planned {peak_gib(size):.2f}"
    following = next((f" ({n} rows: {peak_gib(n):.2f})" for n in (*SIZES, 8) if n > size), "")
    if size == 6:
        following = f" (8 rows: {peak_gib(8):.2f})"  # no even share, but the next divisor
    assert f"{planned}{following} of {capacity_gib:.2f} GiB a worker; not compiled\n" in said


def test_a_number_is_left_alone_and_nothing_is_asked(tmp_path: Path) -> None:
    asked = config().with_micro_batch(3)
    asked = asked.model_copy(update={"train": asked.train.model_copy(update={"compile": False})})
    run, console = open_storage(str(tmp_path)), Console(file=io.StringIO())
    assert auto.chosen(asked, SHAPE, run, True, console, STEPS) is asked


def test_an_instance_is_not_asked_but_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, said = choose(
        open_storage(str(tmp_path)), 0.0, monkeypatch, instance="g5.12xlarge", workers="4"
    )
    assert found in (1, 2, 3, 6) and " of 22." in said


def test_a_run_that_goes_on_keeps_its_number_while_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_storage(str(tmp_path))
    run.write("config.yaml", config().with_micro_batch(3).to_yaml().encode())
    found, said = choose(run, 1000.0, monkeypatch)
    assert found == 3 and "as this run began" in said
    found, said = choose(run, peak_gib(2) + 0.001, monkeypatch)
    assert found == 2 and "as this run began" not in said


def test_no_room_for_one_row_and_no_formula_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_storage(str(tmp_path))
    with pytest.raises(ConfigError, match=r"train.micro_batch=auto is impossible: the plan of one"):
        choose(run, peak_gib(1) - 0.001, monkeypatch)
    assert choose(run, peak_gib(1) - 0.001, monkeypatch, ignore_plan=True)[0] == 1
    said = io.StringIO()
    monkeypatch.setattr(auto, "_capacity_gib", lambda config, gpus: 1.0)
    found = auto.chosen(
        config(),
        BertConfig(max_position_embeddings=ROWS * SEQ_LEN),
        run,
        True,
        Console(file=said, width=200),
        STEPS,
    )
    unplanned = "micro-batch of 8 rows, whose memory is not planned"
    assert found.micro_batch == 8 and unplanned in said.getvalue()
    monkeypatch.setattr(auto, "_capacity_gib", lambda config, gpus: None)  # no node has answered
    found = auto.chosen(config(), SHAPE, run, True, Console(file=said, width=200), STEPS)
    assert found.micro_batch == 8 and said.getvalue().count(unplanned) == 2


def test_a_begun_run_keeps_what_auto_was(tmp_path: Path) -> None:
    run, asked = open_storage(str(tmp_path)), load(None, {}, Config)
    assert auto.as_begun(asked, run) is asked
    fields = {"train.precision": "fp32", "train.compile": "true", "parallel.strategy": "no_shard"}
    run.write("config.yaml", load(None, fields, Config).to_yaml().encode())
    kept = auto.as_begun(asked, run)
    assert (kept.train.precision, kept.train.compile) == ("fp32", True)
    assert kept.parallel.strategy == "no_shard" and kept.train.micro_batch is None
    other = load(None, {"train.compile": "false", "parallel.strategy": "full_shard"}, Config)
    kept = auto.as_begun(other, run)
    assert (kept.train.compile, kept.parallel.strategy) == (False, "full_shard")


def test_a_worker_without_rows_is_told_with_what_to_set() -> None:
    counts = {"documents": 1, "tokens": 9, "rows": 8, "lengths": {"2^3": 1}, "split": 0}
    counts |= {"truncated": 0, "cut_tokens": 0}
    report = {"train": counts, "eval": counts, "fill": 1.0, "loss_share": 1.0, "duplicates": 0.0}
    report |= {"bad": {}}
    prepared: Any = SimpleNamespace(report=lambda: report, epoch_rows=8, windows=None, packings=())

    def told(size: int) -> str:
        out, order = io.StringIO(), Order.for_steps(8, ROWS, size, seed=0, num_steps=1)
        console = Console(file=out, width=10_000)
        plan_lines.plan(console, config().with_micro_batch(size), prepared, order, 9, 9)
        return out.getvalue()

    assert "1 of 2 workers have no rows for their last micro-batch. Set train.micro_batch=12" in (
        told(24)
    )
    assert "no rows" not in told(12) and "no rows" not in told(3)


def test_auto_stays_eager_where_nothing_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_a_compiler(lm: Any, batch: Any) -> Any:
        raise TorchDynamoException("No working C++ compiler found\nin a long traceback")

    monkeypatch.setattr(model_parts, "measure_compile", without_a_compiler)
    monkeypatch.setattr(model_parts, "step_rows", lambda *args: None)
    monkeypatch.setattr(model_parts, "inputs", lambda *args: {})
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    stances: list[str] = []
    monkeypatch.setattr(torch.compiler, "set_stance", stances.append)
    order, data = SimpleNamespace(num_steps=1), SimpleNamespace(rows=lambda split: None)
    config = from_dict({"train": {"compile": True}})
    spec: Any = SimpleNamespace(config=config, order=order, data=data, auto=("compile",))
    parts: Any = SimpleNamespace(lm=None)
    assert compile_gain(spec, parts, torch.device("cpu")) is None
    assert stances == ["force_eager"]
    said = "compile: not possible here, and so slower: No working C++ compiler found\n"
    assert capsys.readouterr().out == said
    spec.auto = ()
    with pytest.raises(TorchDynamoException):
        compile_gain(spec, parts, torch.device("cpu"))


# ---- Out of memory ---------------------------------------------------------------------------


def spec_of(size: int, auto: tuple[str, ...] = ("micro_batch",)) -> LanguageSpec:
    order = Order.for_steps(100, ROWS, size, seed=0, num_steps=5)
    return LanguageSpec(
        "rayapp.finetune", config().with_micro_batch(size), None, order, "", "", auto
    )  # type: ignore[arg-type]


def of_torch() -> Exception:
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError


MONITOR = RayActorError(
    error_msg="Worker exit detail: Task was killed due to the node running low on memory.\nMemory "
    "on the node was 15.2GB / 16.0GB"
)
ELSEWHERE = RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    "error",
    [
        of_torch(),
        torch.OutOfMemoryError("CUDA out of memory. Tried"),
        MONITOR,
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ],
)
def test_half_is_tried_after_an_error_of_memory(error: Exception) -> None:
    failed = WorkerGroupError("2 workers failed", {0: ELSEWHERE, 1: error})
    halved, before = auto.after_failure(spec_of(12), failed), spec_of(12)
    assert halved is not None
    assert halved.config == before.config.with_micro_batch(6)
    assert halved == replace(
        before, config=halved.config, order=replace(before.order, micro_batch=6)
    )
    for step in range(5):
        assert halved.order.rows(step).tolist() == before.order.rows(step).tolist()
    sizes = [12]
    while smaller := auto.after_failure(spec_of(sizes[-1]), failed):
        sizes.append(smaller.config.micro_batch)
    assert sizes == [12, 6, 3, 1]
    assert halved.accumulation(2) == (
        "train.micro_batch=6: 24 rows / 6 = 4 micro-batches / 2 workers = 2 each"
    )


def test_nothing_is_halved_for_another_reason_or_against_the_users_number() -> None:
    memory = WorkerGroupError("1 worker failed", {1: of_torch()})
    assert auto.after_failure(spec_of(12, auto=()), memory) is None
    assert auto.after_failure(spec_of(12), WorkerGroupError("1", {0: ELSEWHERE})) is None
    assert auto.after_failure(spec_of(12), ValueError("no")) is None
    moved = {"status": "moved", "reason": "2 more workers fit", "notice": False}
    assert auto.after_failure(spec_of(12), moved) is None
