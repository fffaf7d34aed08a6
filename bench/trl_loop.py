"""The trainer to compare with: TRL's SFTTrainer with FSDP2 on CPU processes.

    torchrun --nproc-per-node=2 bench/trl_loop.py MODEL_FOLDER DATA.jsonl STEPS OUTPUT OPTIONS

OPTIONS is a JSON object of more options of SFTConfig. Prints one line of JSON: tokens/s after the
warm-up, in which only real tokens count, how many of the positions they fill, and what sharded the
model.
"""

import gc
import json
import os
import sys
import time

import datasets
import torch
import torch.distributed as dist
from fsdp_on_cpus import allow_fsdp_on_cpus
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

WARM_UP_STEPS = 10


class Count(TrainerCallback):
    """Count real tokens and positions of this rank, and the time, after the warm-up."""

    def __init__(self) -> None:
        self.tokens, self.positions, self.start, self.seconds = 0, 0, 0.0, 0.0

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == WARM_UP_STEPS:
            self.tokens, self.positions, self.start = 0, 0, time.perf_counter()
        self.seconds = time.perf_counter() - self.start


class Trainer(SFTTrainer):
    """SFTTrainer that looks at each batch."""

    count: Count

    def training_step(self, model, inputs, *args, **kwargs):
        mask = inputs.get("attention_mask")
        positions = inputs["input_ids"].numel()
        self.count.positions += positions
        self.count.tokens += positions if mask is None else int(mask.sum())
        return super().training_step(model, inputs, *args, **kwargs)


def main(folder: str, data: str, steps: int, output: str, options: dict) -> None:
    allow_fsdp_on_cpus()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = SFTConfig(
        output_dir=output,
        max_steps=steps,
        fsdp=True,
        fsdp_config={"version": 2},
        use_cpu=True,
        ddp_backend="gloo",
        assistant_only_loss=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    count = Count()
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=config,
        train_dataset=datasets.load_dataset(
            "json", data_files=data, split="train", cache_dir=f"{output}/{os.environ['RANK']}"
        ),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[count],
    )
    trainer.count = count
    trainer.train()
    totals = torch.tensor([count.tokens, count.positions])
    dist.all_reduce(totals)
    tokens, positions = totals.tolist()
    if dist.get_rank() == 0:
        found = {
            "tokens_per_s": tokens / count.seconds,
            "fill": tokens / positions,
            "sharding": type(trainer.model_wrapped).__mro__[1].__name__,
        }
        print(json.dumps(found))
    del trainer
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5]))
