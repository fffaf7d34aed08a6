"""One rank of bench/gpu.py: measure rows until the deadline, and print a record of each."""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import traceback
from typing import Any

import gpu_checks
import torch
import torch.distributed as dist
from gpu_rows import ROWS, Row
from gpu_steps import NotHere, measure

ON_CPU = 0.15  # a small row on 2 cores takes about that part of what the row needs on an H100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--names", type=json.loads, required=True)
    options = parser.parse_args()
    cuda = options.device == "cuda"
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rows = {row.name: row for row in ROWS}
    for name in options.names:
        row = rows[name]
        needs_s = row.needs_s * (1.0 if cuda else ON_CPU)
        enough: list[Any] = [time.time() + needs_s <= options.deadline]
        dist.broadcast_object_list(enough, src=0)
        found: dict[str, Any] = {"skipped": f"it needs {needs_s:.0f} s, and less is left"}
        if enough[0]:
            found = measured(row, device)
        if dist.get_rank() == 0:
            print("RECORD " + json.dumps(found), flush=True)
        gc.collect()
        torch._dynamo.reset()
        if cuda:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def measured(row: Row, device: torch.device) -> dict[str, Any]:
    """Return the record of a row: figures, a check's answer, or why there is none."""
    torch.manual_seed(0)
    began = time.time()
    try:
        if row.kind in gpu_checks.CHECKS:
            passed, detail = gpu_checks.CHECKS[row.kind](device)
            found: dict[str, Any] = {"passed": passed, "detail": detail}
        else:
            found = measure(row, device)
    except NotHere as error:
        found = {"skipped": str(error)}
    except Exception as error:  # of a kernel or for memory: the other rows are measured
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    return found | {"took_s": round(time.time() - began, 1)}


if __name__ == "__main__":
    main()
