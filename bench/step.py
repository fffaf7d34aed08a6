"""The step engine by technique, and transformers' Trainer beside it: torch only, no Ray.

    python bench/step.py                                            # 2 CPU workers, a small Llama
    python bench/step.py --device cuda --shape 1b --seq_len 4096    # one GPU

Every row of the table is one torchrun of its own; rounds go through all rows in turn, so that
what else the machine does meets all of them. Rows hold packed documents of drawn lengths, the same
for all; tokens/s counts tokens of documents, not padding. "defaults" is what each does when nothing
is asked of it: here packed rows, the precision and kernels that are best, there padded documents
in fp32.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from rayapp.formulas import mean_context, model_flops
from rayapp.formulas import shape_of as formula_shape
from rayapp.presets import config_of

WARM_UP_STEPS = 4
SHAPES = {"1b": "llama3.2-1b", "3b": "llama3.2-3b", "8b": "llama3.1-8b"}  # presets
SMALL = {  # 8 million parameters
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
BASE: dict[str, Any] = {
    "engine": "rayapp",
    "precision": "fp32",
    "compile": False,
    "checkpointing": "none",
    "offload": False,
    "attention": "auto",
    "optimizer": "adamw",
    "strategy": "full_shard",
    "loss_chunk": 4096,
    "lora": 0,
    "packed": True,
}
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "Trainer, fp32": {"engine": "trainer"},
        "rayapp, fp32": {},
        "rayapp, fp32, compiled": {"compile": True},
        "Trainer, bf16": {"engine": "trainer", "precision": "bf16"},
        "rayapp, bf16": {"precision": "bf16"},
        "rayapp, bf16, compiled": {"precision": "bf16", "compile": True},
        "Trainer, defaults": {"engine": "trainer", "packed": False},
        "rayapp, defaults": {"precision": "bf16"},
        "bf16, no_shard": {"precision": "bf16", "strategy": "no_shard"},
        "bf16, shard_grad_op": {"precision": "bf16", "strategy": "shard_grad_op"},
        "bf16, full checkpointing": {"precision": "bf16", "checkpointing": "full"},
        "bf16, selective checkpointing": {"precision": "bf16", "checkpointing": "selective"},
        "bf16, varlen attention": {"precision": "bf16", "attention": "varlen"},
        "bf16, whole logits": {"precision": "bf16", "loss_chunk": 0},
        "bf16, adamw8bit": {"precision": "bf16", "optimizer": "adamw8bit"},
        "bf16, muon": {"precision": "bf16", "optimizer": "muon"},
        "bf16, LoRA": {"precision": "bf16", "lora": 16},
    },
    "cuda": {
        "Trainer, bf16": {"engine": "trainer", "precision": "bf16"},
        "rayapp, bf16": {"precision": "bf16"},
        "rayapp, bf16, compiled": {"precision": "bf16", "compile": True},
        "bf16, compiled, sdpa": {"precision": "bf16", "compile": True, "attention": "sdpa"},
        "bf16, compiled, selective": {
            "precision": "bf16",
            "compile": True,
            "checkpointing": "selective",
        },
        "bf16, compiled, full": {"precision": "bf16", "compile": True, "checkpointing": "full"},
        "fp8, compiled": {"precision": "fp8", "compile": True},
        "bf16, compiled, adamw8bit": {
            "precision": "bf16",
            "compile": True,
            "optimizer": "adamw8bit",
        },
        "LoRA, bf16, compiled": {"precision": "bf16", "compile": True, "lora": 16},
        "LoRA, bf16, compiled, selective": {
            "precision": "bf16",
            "compile": True,
            "lora": 16,
            "checkpointing": "selective",
        },
    },
}


def values_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the model's config.json."""
    return SMALL if options.shape == "small" else dict(config_of(SHAPES[options.shape]))


def lengths(options: argparse.Namespace, rank: int) -> list[list[int]]:
    """Draw documents that fill rows, [rows][documents]: mostly short, as instructions are."""
    draw = np.random.default_rng(rank)
    rows = []
    for _ in range((WARM_UP_STEPS + options.steps) * options.micro_batch):
        row, left = [], options.seq_len
        while left:
            drawn = int(draw.lognormal(np.log(options.seq_len / 6), 0.8)) + 8
            row.append(min(drawn, left))
            left -= row[-1]
        rows.append(row)
    return rows


def micro_batches(options: argparse.Namespace, rank: int) -> list[dict[str, Any]]:
    """Pack the documents: input_ids, labels and segments [b, S] of every step."""
    draw, rows = np.random.default_rng(rank + 100), lengths(options, rank)
    found = []
    for start in range(0, len(rows), options.micro_batch):
        some = rows[start : start + options.micro_batch]
        segments = np.stack([np.repeat(np.arange(1, len(r) + 1), r) for r in some])
        ids = draw.integers(0, options.vocabulary, segments.shape)
        labels = np.roll(ids, -1, 1)
        ends = np.roll(segments, -1, 1) != segments
        ends[:, -1] = True
        labels[ends] = -100
        found.append({"input_ids": ids, "labels": labels, "segments": segments.astype(np.uint16)})
    return found


def shape_of(options: argparse.Namespace) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**values_of(options) | {"max_position_embeddings": options.seq_len})


def run_rayapp(options: argparse.Namespace, row: dict[str, Any]) -> dict[str, float]:
    """Time steps of rayapp's own engine."""
    import torch
    import torch.distributed as dist

    from rayapp import loop, model
    from rayapp.config import Lora
    from rayapp.data.rows import StepRows
    from rayapp.loss import chunked_cross_entropy
    from rayapp.optim import make_optimizers

    def loss(hidden: Any, weight: Any, labels: Any, bias: Any = None) -> Any:
        return chunked_cross_entropy(hidden, weight, labels, bias, chunk=row["loss_chunk"])

    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    compute = torch.float32 if row["precision"] == "fp32" else torch.bfloat16
    shape = shape_of(options)
    attention = model.choose_attention(row["attention"], shape, options.device)
    frozen = compute if row["lora"] else torch.float32
    lm = model.build(shape, loss=loss, dtype=frozen, attention=attention)
    if row["lora"]:
        model.add_adapters(lm, Lora(rank=row["lora"]))
    if row["precision"] == "fp8":
        model.use_float8(lm, device)
    model.checkpoint_activations(lm, row["checkpointing"])
    if row["compile"]:
        model.compile_blocks(lm)
    if row["offload"]:
        model.offload_activations(lm)
    mesh = model.device_mesh(options.device, strategy=row["strategy"])
    casts = None if compute == torch.float32 else compute
    model.shard(lm, mesh, strategy=row["strategy"], param_dtype=casts)
    model.init_weights(lm, 0, device)
    if row["lora"]:
        model.init_adapters(lm, 0)
    optimizers = make_optimizers(row["optimizer"], lm, lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95))
    control = dist.new_group(backend="gloo")
    engine = loop.Engine(lm.train(), optimizers, lambda step: 1e-4, device, 1.0, control)
    tokens, began = 0, 0.0
    for step, batch in enumerate(micro_batches(options, dist.get_rank())):
        if step == WARM_UP_STEPS:
            synchronize(options)
            began = time.perf_counter()
        zeros = np.zeros((1, options.micro_batch), np.int64)
        rows = StepRows(
            step=step,
            **{name: array[None] for name, array in batch.items()},
            target_bytes=zeros,
            positions=zeros,
            rows=zeros,
        )
        totals = loop.agree(engine, rows)
        loop.train_step(engine, rows, totals)
        tokens += totals.tokens if step >= WARM_UP_STEPS else 0
    synchronize(options)
    seconds = time.perf_counter() - began
    peak = torch.tensor(engine.peaks.highest_gib)
    dist.all_reduce(peak, dist.ReduceOp.MAX, control)
    return {"tokens_per_s": tokens / seconds, "peak_gib": float(peak)}


def run_trainer(options: argparse.Namespace, row: dict[str, Any]) -> dict[str, float]:
    """Time steps of transformers' Trainer with FSDP2: the same rows, or the documents padded."""
    import tempfile

    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from rayapp.memory import Peaks
    from rayapp.packing import position_ids

    rank = int(os.environ["RANK"])
    batches, examples, counts = micro_batches(options, rank), [], []
    for batch in batches:
        tokens = 0
        for ids, labels, segments in zip(*batch.values(), strict=True):
            # Trainer moves labels by one itself.
            moved = np.concatenate([[-100], labels[:-1]])
            if row["packed"]:
                whole = {"input_ids": ids, "labels": moved, "position_ids": position_ids(segments)}
                examples.append(whole)
                tokens += len(ids)
                continue
            document = segments == 1  # one document a row, padded to the longest of its batch
            examples.append({"input_ids": ids[document], "labels": moved[document]})
            tokens += int(document.sum())
        counts.append(tokens)

    def collate(some: list[dict[str, Any]]) -> dict[str, Any]:
        longest = max(len(one["input_ids"]) for one in some)
        filler = {"input_ids": 0, "labels": -100, "position_ids": 0}
        found = {
            name: torch.tensor(
                np.stack(
                    [
                        np.pad(o[name], (0, longest - len(o[name])), constant_values=filler[name])
                        for o in some
                    ]
                )
            )
            for name in some[0]
        }
        if not row["packed"]:
            lengths = torch.tensor([len(o["input_ids"]) for o in some])
            found["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
        return found

    class Clock(TrainerCallback):
        began = ended = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == WARM_UP_STEPS:
                synchronize(options)
                self.began = time.perf_counter()
            if state.global_step == state.max_steps:
                synchronize(options)
                self.ended = time.perf_counter()

    clock = Clock()
    peaks = Peaks(torch.device(options.device))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=len(batches),
            per_device_train_batch_size=options.micro_batch,
            learning_rate=1e-4,
            bf16=row["precision"] == "bf16",
            use_cpu=options.device == "cpu",
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
        hf = AutoModelForCausalLM.from_config(shape_of(options), dtype=torch.float32)

        class Mine(Trainer):
            """Each rank has drawn its own rows: no sampler divides them."""

            def get_train_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(
                    examples, options.micro_batch, collate_fn=collate
                )

        Mine(hf, arguments, callbacks=[clock]).train()
    with peaks.phase("optimizer"):
        pass
    total = torch.tensor([float(sum(counts[WARM_UP_STEPS:]))])
    peak = torch.tensor(peaks.highest_gib)
    if options.device == "cuda":
        total, peak = total.cuda(), peak.cuda()
    dist.all_reduce(total)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    seconds = clock.ended - clock.began
    return {"tokens_per_s": float(total) / seconds, "peak_gib": float(peak)}


def synchronize(options: argparse.Namespace) -> None:
    """Wait for all ranks, and for the GPU."""
    import torch
    import torch.distributed as dist

    if options.device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def worker(options: argparse.Namespace, row: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    torch.manual_seed(0)
    run = {"rayapp": run_rayapp, "trainer": run_trainer}[row["engine"]]
    found = run(options, row)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    gc.collect()
    dist.destroy_process_group()


def measure(options: argparse.Namespace, row: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.workers}", __file__, "--row", json.dumps(row)]
    for name in ("device", "shape", "seq_len", "micro_batch", "steps", "workers"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.device == "cpu" and row["engine"] == "rayapp":
        from rayapp.finetune.fit import CPU_ENVIRONMENT

        environment |= CPU_ENVIRONMENT
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise RuntimeError(f"{row}: no result\n{done.stderr[-3000:]}")


def flops_per_token(options: argparse.Namespace, lora: int) -> float:
    """Return the model FLOPs of a token, forward and backward, for documents as drawn."""
    context = mean_context([length for row in lengths(options, 0) for length in row])
    return model_flops(formula_shape(values_of(options)), context, lora or None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", default="small", choices=["small", *SHAPES])
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="parts of the names of rows, by commas")
    parser.add_argument("--peak_flops", type=float, default=None, help="of one device, dense")
    parser.add_argument("--row", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.vocabulary = values_of(options)["vocab_size"]
    options.workers = options.workers or (2 if options.device == "cpu" else 1)
    if options.row:
        worker(options, json.loads(options.row))
        return
    parts = [part for part in options.only.split(",") if part]
    rows = {
        name: BASE | row
        for name, row in ROWS[options.device].items()
        if not parts or any(part in name for part in parts)
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name, row in rows.items():
            found[name].append(measure(options, row))
            print(f"  {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    print(f"{'':32} {'tokens/s':>10} {'peak GiB':>9} {'MFU':>6}")
    medians = {}
    for name, results in found.items():
        medians[name] = statistics.median(r["tokens_per_s"] for r in results)
        peak = max(r["peak_gib"] for r in results)
        mfu = "n/a"
        if options.peak_flops:
            flops = flops_per_token(options, rows[name]["lora"])
            mfu = f"{medians[name] * flops / options.peak_flops / options.workers:.1%}"
        print(f"{name:32} {medians[name]:10,.0f} {peak:9.2f} {mfu:>6}")
    for ours, theirs in (
        ("rayapp, fp32", "Trainer, fp32"),
        ("rayapp, fp32, compiled", "Trainer, fp32"),
        ("rayapp, bf16", "Trainer, bf16"),
        ("rayapp, bf16, compiled", "Trainer, bf16"),
        ("rayapp, defaults", "Trainer, defaults"),
    ):
        if ours in found and theirs in found:
            ratios = [
                a["tokens_per_s"] / b["tokens_per_s"]
                for a, b in zip(found[ours], found[theirs], strict=True)
            ]
            print(
                f"{ours} / {theirs}: {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f}-{max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
