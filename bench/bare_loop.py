"""The loop to compare with: FSDP2 in the fewest lines, no Ray, no metrics, no checkpoints.

    torchrun --nproc-per-node=2 bench/bare_loop.py RUN_FOLDER STEPS

Takes the model's shape, the rows and their order from a run that rayapp has made, keeps all rows in
memory, and prints the steady tokens/s. The loss is rayapp's own chunked cross-entropy, so that the
two differ in nothing but the loop around the model.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from rayapp.config import Config, from_dict
from rayapp.data.packing import position_ids, row_dtype
from rayapp.order import Order
from rayapp.storage import open_storage
from rayapp.train.loss import chunked_cross_entropy

WARM_UP_STEPS = 10


class WithLoss(torch.nn.Module):
    """Return the summed loss of a batch; the FSDP root."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = self.model.model(input_ids=ids, position_ids=positions, use_cache=False)
        head = self.model.lm_head.weight
        return chunked_cross_entropy(hidden.last_hidden_state, head, labels)[0]


def load_rows(config, folder: str) -> np.ndarray:
    prepared = open_storage(config.run.storage) / ".prepared"
    fingerprint = json.loads(Path(folder, "plan.json").read_text())["fingerprint"]
    shards = json.loads(prepared.read(f"{fingerprint}/manifest.json"))["shards"]["train"]
    data = b"".join(prepared.read(f"{fingerprint}/{shard}") for shard, _ in shards)
    return np.frombuffer(data, row_dtype(config.data.seq_len))


def main(folder: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = from_dict(yaml.safe_load(Path(folder, "config.yaml").read_text()), kind=Config)
    rows = load_rows(config, folder)
    torch.manual_seed(0)
    shape = AutoConfig.from_pretrained(f"{folder}/model")
    model = WithLoss(AutoModelForCausalLM.from_config(shape, dtype=torch.float32))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.train.precision == "bf16" else None,
        reduce_dtype=torch.float32,
    )
    for block in model.model.model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    order = Order.for_steps(len(rows), config.rows_per_step, config.micro_batch, 0, steps)
    tokens, start = 0, 0.0
    for step in range(steps):
        if step == WARM_UP_STEPS:
            dist.barrier()
            start = time.perf_counter()
        ids = order.micro_batches(step, rank, world)
        for micro in ids:
            batch = rows[micro]
            segments = batch["segments"]
            plain = bool((segments[:, :1] == segments).all())
            positions = None if plain else torch.from_numpy(position_ids(segments))
            inputs = torch.from_numpy(batch["input_ids"].astype(np.int64))
            labels = torch.from_numpy(batch["labels"].astype(np.int64))
            loss = model(inputs, labels, positions) / labels.numel() / len(ids)
            loss.backward()
            if step >= WARM_UP_STEPS:
                tokens += int((segments != 0).sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    seconds = time.perf_counter() - start
    total = torch.tensor(tokens)
    dist.all_reduce(total)
    if rank == 0:
        print(json.dumps({"tokens_per_s": int(total) / seconds}))
    del model, optimizer, loss
    gc.collect()  # a gloo thread that frees tensors while Python shuts down aborts the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
