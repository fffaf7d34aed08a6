"""Check which micro-batch auto takes, what it says of it, and what becomes of it in a failure."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import RayActorError
from ray.train.v2.api.exceptions import WorkerGroupError
from rich.console import Console
from transformers import BertConfig

from rayapp import model
from rayapp.config import Config, ConfigError, from_dict
from rayapp.finetune import micro_batch
from rayapp.order import Order
from rayapp.planner.memory import Layout, with_slack
from rayapp.planner.shape import shape_of
from rayapp.storage import Storage, open_storage
from rayapp.train.spec import LanguageSpec

ROWS, SEQ_LEN = 24, 1024
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
    monkeypatch.setattr(micro_batch, "_capacity_gib", lambda config, gpus: capacity_gib)
    said = io.StringIO()
    console = Console(file=said, width=200)
    found = micro_batch.chosen(config(**cluster), SHAPE, run, True, console)
    return found.micro_batch, said.getvalue()


@pytest.mark.parametrize("size", SIZES)
def test_the_largest_that_the_plan_says_fits(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity_gib = peak_gib(size) + 0.001
    found, said = choose(open_storage(str(tmp_path)), capacity_gib, monkeypatch)
    assert found == size
    planned = f"auto = {size} rows, planned {peak_gib(size):.2f}"
    following = next((f" ({n} rows: {peak_gib(n):.2f})" for n in (*SIZES, 8) if n > size), "")
    if size == 6:
        following = f" (8 rows: {peak_gib(8):.2f})"  # no even share, but the next divisor
    assert f"{planned}{following} of {capacity_gib:.2f} GiB a worker\n" in said


def test_a_number_is_left_alone_and_nothing_is_asked(tmp_path: Path) -> None:
    asked = config().with_micro_batch(3)
    run, console = open_storage(str(tmp_path)), Console(file=io.StringIO())
    assert micro_batch.chosen(asked, SHAPE, run, True, console) is asked


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
    with pytest.raises(ConfigError, match=r"train.micro_batch=auto is not available: .* of bert"):
        micro_batch.chosen(config(), BertConfig(), run, True, Console(file=io.StringIO()))


# ---- Out of memory ---------------------------------------------------------------------------


def spec_of(size: int, auto: bool = True) -> LanguageSpec:
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
    halved, before = micro_batch.after_failure(spec_of(12), failed), spec_of(12)
    assert halved is not None
    assert halved.config == before.config.with_micro_batch(6)
    assert halved == replace(
        before, config=halved.config, order=replace(before.order, micro_batch=6)
    )
    for step in range(5):
        assert halved.order.rows(step).tolist() == before.order.rows(step).tolist()
    sizes = [12]
    while smaller := micro_batch.after_failure(spec_of(sizes[-1]), failed):
        sizes.append(smaller.config.micro_batch)
    assert sizes == [12, 6, 3, 1]
    assert halved.accumulation(2) == (
        "train.micro_batch=6: 24 rows / 6 = 4 micro-batches / 2 workers = 2 each"
    )


def test_nothing_is_halved_for_another_reason_or_against_the_users_number() -> None:
    memory = WorkerGroupError("1 worker failed", {1: of_torch()})
    assert micro_batch.after_failure(spec_of(12, auto=False), memory) is None
    assert micro_batch.after_failure(spec_of(12), WorkerGroupError("1", {0: ELSEWHERE})) is None
    assert micro_batch.after_failure(spec_of(12), ValueError("no")) is None
    moved = {"status": "moved", "reason": "2 more workers fit", "notice": False}
    assert micro_batch.after_failure(spec_of(12), moved) is None
