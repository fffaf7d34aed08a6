"""rayapp's own training code under torchrun: what Ray's processes cost is the difference.

    torchrun --nproc-per-node=2 bench/loop_alone.py RUN_FOLDER STEPS

Takes config, prepared rows and tokenizer from a run that rayapp has made, trains in a fresh folder
beside it, and prints the steady tokens/s.
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from rayapp.config import Config, from_dict
from rayapp.data import prepared as prepared_data
from rayapp.data.token_rows import local_steps
from rayapp.order import Order
from rayapp.storage import open_storage
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import LanguageSpec

WARM_UP_STEPS = 10


def steady_rate(run: Path) -> float:
    """Return the tokens/s of a run without its first steps and its last, which saves."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steady = lines[WARM_UP_STEPS:-1]
    tokens = sum(
        line["tokens_per_s"] * (line["step_s"] - line["checkpoint_stall_s"] - line["eval_s"])
        for line in steady
    )
    return tokens / sum(line["step_s"] for line in steady)


def spec_of(folder: Path, steps: int, name: str) -> LanguageSpec:
    """Return what trains that run's rows into a fresh folder beside it."""
    config = from_dict(yaml.safe_load((folder / "config.yaml").read_text()), kind=Config)
    off = config.checkpoint.model_copy(update={"export": False})
    config = config.model_copy(update={"checkpoint": off})
    fingerprint = json.loads((folder / "plan.json").read_text())["fingerprint"]
    prepared = prepared_data.load(open_storage(config.run.storage) / ".prepared" / fingerprint)
    assert prepared is not None, f"{folder} has no prepared data"
    order = Order.for_steps(
        prepared.num_rows("train"),
        config.rows_per_step,
        config.micro_batch,
        config.run.seed,
        steps,
    )
    return LanguageSpec(
        "rayapp.finetune",
        config,
        prepared,
        order,
        str(folder.with_name(name)),
        str(folder / "model"),
    )


def main(folder: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    spec = spec_of(folder, steps, f"{folder.name}-alone")
    rows, order = spec.data.rows("train"), spec.order
    train_rank(
        spec,
        RankContext(
            torch.device("cpu"), lambda first: local_steps(rows, order, rank, world, first)
        ),
    )
    if rank == 0:
        print(json.dumps({"tokens_per_s": steady_rate(Path(spec.run_url))}))
    gc.collect()  # a gloo thread that frees tensors while Python shuts down aborts the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
