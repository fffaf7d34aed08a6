"""Steps of transformers' Trainer with FSDP2, for bench/step.py: the same rows, or padded documents.

run_trainer(options, batches, shape, packed=True, bf16=True)["tokens_per_s"]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fsdp_on_cpus import allow_fsdp_on_cpus
from step import WARM_UP_STEPS, figures
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from rayapp.data.packing import position_ids
from rayapp.data.token_rows import StepRows
from rayapp.train.memory_peaks import Peaks

FILLER = {"input_ids": 0, "labels": -100, "position_ids": 0}


def run_trainer(
    options: argparse.Namespace,
    batches: list[StepRows],
    shape: Any,
    packed: bool,
    bf16: bool,
) -> dict[str, float]:
    """Time its steps; tokens/s of all ranks, and the highest peak of one."""
    examples, counts = examples_of(batches, packed)
    clock, peaks = Clock(), Peaks(torch.device("cpu"))
    hf = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    allow_fsdp_on_cpus()
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_of(options, folder, len(batches), bf16)
        trainer = OwnRows(hf, arguments, callbacks=[clock])
        trainer.rows = torch.utils.data.DataLoader(
            examples, options.micro_batch, collate_fn=partial(collate, packed)
        )
        trainer.train()
        assert isinstance(trainer.model_wrapped, FSDPModule), type(trainer.model_wrapped)
    with peaks.phase("optimizer"):
        pass
    control = dist.new_group(backend="gloo")
    total = torch.tensor(float(sum(counts[WARM_UP_STEPS:])))
    dist.all_reduce(total, group=control)
    seconds = clock.ended - clock.began
    return figures(float(total), seconds, clock.cpu_s, peaks.highest_gib, control)


class OwnRows(Trainer):
    """Each rank has drawn its own rows: no sampler divides them."""

    rows: Any = None

    def get_train_dataloader(self) -> Any:
        return self.rows


class Clock(TrainerCallback):
    """When the first step after the warm-up began, and the last one ended."""

    def __init__(self) -> None:
        self.began, self.ended, self.cpu_s = 0.0, 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARM_UP_STEPS:
            dist.barrier()
            self.began, self.cpu_s = time.perf_counter(), -time.process_time()
        if state.global_step == state.max_steps:
            self.cpu_s += time.process_time()
            dist.barrier()
            self.ended = time.perf_counter()


def examples_of(batches: list[StepRows], packed: bool) -> tuple[list[dict[str, Any]], list[int]]:
    """Return what Trainer collates, and the tokens of each step."""
    examples, counts = [], []
    for batch in batches:
        tokens = 0
        whole = zip(batch.input_ids[0], batch.labels[0], batch.segments[0], strict=True)
        for ids, labels, segments in whole:
            moved = np.concatenate([[-100], labels[:-1]])  # Trainer moves labels by one itself
            example = {"input_ids": ids, "labels": moved, "position_ids": position_ids(segments)}
            if not packed:  # one document a row, padded to the longest of its batch
                document = segments == 1
                example = {"input_ids": ids[document], "labels": moved[document]}
            examples.append(example)
            tokens += len(example["input_ids"])
        counts.append(tokens)
    return examples, counts


def collate(packed: bool, some: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad to the longest."""
    lengths = torch.tensor([len(one["input_ids"]) for one in some])
    longest = int(lengths.max())

    def padded(name: str) -> torch.Tensor:
        rows = [one[name] for one in some]
        pads = [np.pad(r, (0, longest - len(r)), constant_values=FILLER[name]) for r in rows]
        return torch.tensor(np.stack(pads))

    found = {name: padded(name) for name in some[0]}
    if not packed:
        found["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return found


def arguments_of(
    options: argparse.Namespace, folder: str, steps: int, bf16: bool
) -> TrainingArguments:
    """Ask for FSDP2, and for nothing beside the steps."""
    return TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=options.micro_batch,
        learning_rate=1e-4,
        bf16=bf16,
        use_cpu=True,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
        save_strategy="no",
        report_to=[],
        logging_steps=10_000,
        disable_tqdm=True,
        use_cache=False,
        dataloader_num_workers=0,
        accelerator_config={"split_batches": False, "dispatch_batches": False},
        train_sampling_strategy="sequential",
    )
