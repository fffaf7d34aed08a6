"""The loop against an oracle: one plain PyTorch process with neither FSDP nor Ray nor our loss.

The oracle opens the same model folder with transformers, reads the same text by itself, and steps
torch's own AdamW; only the order of rows is taken from `rayapp.order`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import late
import numpy as np
import processes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rayapp import model
from rayapp.config import Config, from_dict
from rayapp.data import preparation as prepare
from rayapp.data import sources, tokens
from rayapp.data.prepared import Prepared
from rayapp.data.recipe import RowRecipe
from rayapp.data.token_rows import local_steps
from rayapp.finetune.trainer import mfu_of
from rayapp.observe import metrics
from rayapp.order import Order, StepCounts
from rayapp.storage import open_storage
from rayapp.train import loop, optimizer, own_time, schedule
from rayapp.train.checkpoint import state
from rayapp.train.checkpoint.marker import NoneUsable, latest
from rayapp.train.checkpoint.state import StartAgain, saved_shapes
from rayapp.train.engine import Engine
from rayapp.train.loss_spikes import LEVEL, Spikes
from rayapp.train.own_time import EVERY_STEPS, SAMPLES
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.spec import LanguageSpec
from rayapp.train.step_sync import CONTINUE, RESTART, STOP, Agreement
from rayapp.train.trainer_interface import Trainer

STEPS, SEQ_LEN, ROWS, MICRO_BATCH = 30, 32, 6, 2
SLOW_S = 0.3  # what a state takes to gather in one test
TEXT = "".join(
    f"Line {i}: {'abcdefgh'[i % 8] * (i % 5 + 1)} says {i * i % 97}.\n" for i in range(900)
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file, a model folder of about 50,000 fp32 weights, and its byte tokenizer."""
    folder = tmp_path_factory.mktemp("loop")
    (folder / "text.txt").write_text(TEXT)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=272,  # so that a shard's moments of 8 bits are whole blocks of 256
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    tokens.byte_tokenizer().save_pretrained(folder / "model")
    return folder


def config_of(folder: Path, name: str, **train: Any) -> Config:
    """The run under test; fp32 and no chunk size that divides anything."""
    return from_dict(
        {
            "run": {"name": name, "storage": str(folder / "runs"), "seed": 3},
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder / "text.txt"), "seq_len": SEQ_LEN, "eval_fraction": 0.1},
            "train": {
                "tokens_per_step": ROWS * SEQ_LEN,
                "micro_batch": MICRO_BATCH,
                "max_steps": STEPS,
                "lr": 3e-3,
                "warmup_steps": 5,
                "precision": "fp32",
                "loss_chunk": 50,
                **train,
            },
        }
    )


def prepared_of(config: Config, folder: Path) -> Prepared:
    """Prepare in this process: Ray Data has its own tests."""
    source = sources.find(config.data.path)
    recipe = RowRecipe(
        source=source,
        eval_source=None,
        kind="text",
        tokenizer_url=str(folder / "model"),
        tokenizer_digest="bytes",
        pad_id=0,
        seq_len=SEQ_LEN,
        pack=True,
        truncate=False,
        eval_fraction=config.data.eval_fraction,
    )
    root = open_storage(str(folder / "prepared"))
    for index, unit in enumerate(sources.units(source, config.data.eval_fraction)):
        prepare.UnitTask(index, "train", unit).run(recipe, root.url, recipe.fingerprint)
    return prepare.prepare(recipe, root)


def worker(rank: int, world: int, spec: LanguageSpec, summaries: str, copies_late: bool) -> None:
    """One training process, as under torchrun."""
    if copies_late:
        late.copy_late()
    rows = spec.data.rows("train")
    summary = train_rank(
        spec,
        RankContext(
            torch.device("cpu"), lambda step: local_steps(rows, spec.order, rank, world, step)
        ),
    )
    if rank == 0:
        Path(summaries).write_text(json.dumps(summary))


def spec_of(config: Config, folder: Path, num_steps: int = STEPS) -> LanguageSpec:
    """Return what the processes of a run are told."""
    prepared = prepared_of(config, folder)
    order = Order.for_steps(prepared.num_rows("train"), ROWS, MICRO_BATCH, 3, num_steps)
    url = str(folder / "runs" / config.run.name)
    return LanguageSpec("rayapp.finetune", config, prepared, order, url, str(folder / "model"))


def train(
    config: Config, folder: Path, world: int, num_steps: int = STEPS, copies_late: bool = False
) -> tuple[list[Any], Any]:
    """Run `world` processes; return the lines of metrics.jsonl and the summary."""
    spec = spec_of(config, folder, num_steps)
    summaries = str(folder / f"{config.run.name}.json")
    rendezvous = str(folder / f"{config.run.name}-{os.urandom(4).hex()}")
    processes.spawn(worker, world, rendezvous, spec, summaries, copies_late)
    lines = [
        json.loads(line) for line in Path(spec.run_url, "metrics.jsonl").read_text().splitlines()
    ]
    return lines, json.loads(Path(summaries).read_text())


@pytest.fixture(scope="module")
def two_workers(inputs: Path) -> tuple[list[Any], Any]:
    return train(config_of(inputs, "two"), inputs, world=2)


def oracle(folder: Path) -> tuple[list[float], list[float], float, float]:
    """Train in plain PyTorch; return losses, gradient norms, held-out nats per token and byte."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    data = TEXT.encode()
    boundary = data.index(b"\n", int(len(data) * 0.9) - 1) + 1
    end = tokens.load_tokenizer(str(folder / "model")).eos_token_id
    # Byte tokens are numbered after the 3 special ones by the byte-level alphabet's code points.
    vocabulary = tokens.load_tokenizer(str(folder / "model")).get_vocab()
    letter = {byte: vocabulary[chr(byte)] for byte in range(33, 127)}
    letter[ord(" ")], letter[ord("\n")] = vocabulary["\u0120"], vocabulary["\u010a"]
    pieces = {}
    for split, text in (("train", data[:boundary]), ("eval", data[boundary:])):
        ids = [letter[byte] for byte in text] + [end]
        pieces[split] = [ids[i : i + SEQ_LEN + 1] for i in range(0, len(ids) - 1, SEQ_LEN)]
    decayed = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed_tokens" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=False, foreach=False)

    def loss_of(piece: list[int]) -> torch.Tensor:
        logits = model(input_ids=torch.tensor([piece[:-1]])).logits[0]
        return F.cross_entropy(logits, torch.tensor(piece[1:]), reduction="sum")

    # A packed row holds one full piece here, or the short last one; which row is which is known
    # from `pack`: rows are ordered by their first piece.
    order = Order.for_steps(len(pieces["train"]), ROWS, MICRO_BATCH, 3, STEPS)
    losses, norms = [], []
    for step in range(STEPS):
        batch = [pieces["train"][row] for row in order.rows(step)]
        targets = sum(len(piece) - 1 for piece in batch)
        total = sum((loss_of(piece) for piece in batch), start=torch.zeros(()))
        (total / targets).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        done = (step - 5) / (STEPS - 5)
        rate = 3e-3 * (
            (step + 1) / 5 if step < 5 else 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total) / targets)
    with torch.no_grad():
        held_out = sum(float(loss_of(piece)) for piece in pieces["eval"])
    targets = sum(len(piece) - 1 for piece in pieces["eval"])
    return losses, norms, held_out / targets, held_out / (len(data) - boundary - 1)


def test_two_workers_equal_a_plain_loop_at_every_step(
    inputs: Path, two_workers: tuple[list[Any], Any]
) -> None:
    lines, summary = two_workers
    losses, norms, held_out, per_byte = oracle(inputs)
    np.testing.assert_allclose([line["loss"] for line in lines], losses, rtol=0, atol=1e-4)
    np.testing.assert_allclose([line["grad_norm"] for line in lines], norms, rtol=1e-3)
    assert max(norms) > 1  # so clipping is compared as well
    assert abs(summary["eval_loss"] - held_out) < 1e-4
    assert abs(summary["eval_loss_per_byte"] - per_byte) < 1e-4
    assert losses[-1] < losses[0] - 1  # it has learned something, so the comparison means something


def test_one_and_three_workers_train_alike(
    inputs: Path, two_workers: tuple[list[Any], Any]
) -> None:
    expected, _ = two_workers
    for world in (1, 3):
        lines, _ = train(config_of(inputs, f"world-{world}"), inputs, world)
        assert [line["batch_digest"] for line in lines] == [
            line["batch_digest"] for line in expected
        ]
        np.testing.assert_allclose(
            [line["loss"] for line in lines], [line["loss"] for line in expected], rtol=0, atol=1e-4
        )


def test_a_profile_changes_nothing(inputs: Path, two_workers: tuple[list[Any], Any]) -> None:
    lines, _ = train(config_of(inputs, "profiled", profile_steps="3:5"), inputs, world=2)
    assert [line["loss"] for line in lines] == [line["loss"] for line in two_workers[0]]
    (trace,) = (inputs / "runs/profiled/profiles").iterdir()  # of rank 0
    assert trace.name == "steps-3-4.trace.json.gz"


def test_metrics_count_what_was_trained(two_workers: tuple[list[Any], Any]) -> None:
    lines, summary = two_workers
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["workers"] == 2 and line["attempt"] == 1 for line in lines)
    assert all(0 < line["tokens"] <= ROWS * SEQ_LEN for line in lines)
    assert len({line["batch_digest"] for line in lines}) == STEPS
    assert summary["status"] == "done" and summary["steps"] == STEPS


def test_the_export_has_the_same_held_out_loss(
    inputs: Path, two_workers: tuple[list[Any], Any]
) -> None:
    """Evaluated by transformers alone, on held-out rows read back from the prepared data."""
    _, summary = two_workers
    model = AutoModelForCausalLM.from_pretrained(summary["model_path"], dtype=torch.float32)
    rows = prepared_of(config_of(inputs, "two"), inputs).rows("eval")
    total, targets = 0.0, 0
    for row in rows.read(np.arange(len(rows))):
        length = int((row["segments"] != 0).sum())
        with torch.no_grad():
            logits = model(
                input_ids=torch.from_numpy(row["input_ids"][None, :length].astype(int))
            ).logits[0]
        labels = torch.from_numpy(row["labels"][:length].astype(int))
        total += float(F.cross_entropy(logits, labels, reduction="sum"))
        targets += int((labels != -100).sum())
    assert abs(total / targets - summary["eval_loss"]) < 1e-3


def test_a_run_resumes_bitwise_where_it_was(
    inputs: Path, two_workers: tuple[list[Any], Any]
) -> None:
    """Stop after 12 steps by the stop file's path (a shorter order), then go on to the end."""
    expected, _ = two_workers
    config = config_of(inputs, "resumed")
    spec = spec_of(config, inputs)
    processes.spawn(stopped_worker, 2, str(inputs / "resumed-a"), spec, 12)
    half = [
        json.loads(line) for line in Path(spec.run_url, "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in half] == list(range(1, 13))
    lines, summary = train(config, inputs, world=2)
    assert summary["first_step"] == 12
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["attempt"] for line in lines] == [1] * 12 + [2] * (STEPS - 12)
    for name in ("loss", "grad_norm", "batch_digest", "lr"):
        assert [line[name] for line in lines] == [line[name] for line in expected], name


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("lora", {"model": {"lora": {"rank": 4, "dropout": 0.1}}}),
        ("moved", {"model": {"lora": {"rank": 4}}}),  # to one rank, whose base is not sharded
        ("muon", {"train": {"optimizer": "muon", "schedule": "wsd"}}),
        ("adamw8bit", {"train": {"optimizer": "adamw8bit", "on_spike": "skip"}}),
        ("compile", {"train": {"compile": True}}),
    ],
)
def test_every_optimizer_adapters_and_compiled_blocks_resume_bitwise(
    inputs: Path, name: str, fields: dict[str, Any]
) -> None:
    """From a checkpoint whose copy was made as late as the loop allows it."""
    tree = config_of(inputs, name).model_dump(mode="json")
    for section, values in {"checkpoint": {"every_steps": 5}, **fields}.items():
        tree[section] |= values
    config = from_dict(tree)
    folder = inputs / "runs" / name
    expected, whole = train(config, inputs, 2, num_steps=8, copies_late=True)
    saved = saved_shapes(open_storage(str(folder)), "step-00000008")
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    moved = name in ("adamw8bit", "moved")
    if moved:
        shutil.copytree(folder, inputs / "runs" / f"{name}-alone")
    lines, summary = train(config, inputs, 2, num_steps=8)
    assert summary["first_step"] == 5
    for field in ("loss", "grad_norm", "batch_digest", "lr"):
        assert [line[field] for line in lines] == [line[field] for line in expected], field
    assert summary["eval_loss"] == whole["eval_loss"]
    if name != "compile":
        assert summary["compile"] is None
    else:  # measured before the first step of each attempt
        gain = summary["compile"]
        assert gain["speedup"] == gain["eager_s"] / gain["compiled_s"] > 0
        assert gain["compile_s"] > gain["compiled_s"] and summary["seconds"]["compile"] > 0
    if name == "adamw8bit":  # quantized moments, saved as values that any world can shard
        assert any(tensor.startswith("scales.1.") for tensor in saved)
        (moment,) = (tensor for tensor in saved if tensor.endswith("embed_tokens.weight.exp_avg"))
        assert saved[moment] == (272, 32)
    if moved:
        tree["run"]["name"] = f"{name}-alone"
        alone, at_end = train(from_dict(tree), inputs, 1, num_steps=8)
        assert at_end["first_step"] == 5
        for one, two in zip(alone[5:], lines[5:], strict=True):
            assert one["batch_digest"] == two["batch_digest"]
            assert one["loss"] == pytest.approx(two["loss"], rel=2e-3)
    if name == "lora":  # adapters and their moments alone are saved, and exported as peft does
        tensors = {each for each in saved if each.startswith(("model.", "optimizer.state."))}
        assert tensors and all(".lora_" in name for name in tensors)
        base = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
        adapted = PeftModel.from_pretrained(base, summary["model_path"])
        rows = prepared_of(config, inputs).rows("eval")
        row = rows.read(np.arange(1))[0]
        ids = torch.from_numpy(row["input_ids"][None].astype(int))
        with torch.no_grad():
            changed = adapted(input_ids=ids).logits
            with adapted.disable_adapter():
                assert (adapted(input_ids=ids).logits - changed).abs().max() > 1e-3


def test_mfu_counts_flops_of_documents_over_the_gpus_peak(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of known tokens and pairs, on a GPU of known peak, by the formulas of the paper."""
    shape = LlamaConfig.from_pretrained(inputs / "model")
    lm = model.build(shape, loss=lambda *a, **k: None)  # type: ignore[arg-type]
    parts: Any = SimpleNamespace(lm=lm)
    spec: Any = SimpleNamespace(config=config_of(inputs, "mfu", precision="bf16"))
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    documents = [5, 100, 33]
    tokens, pairs = sum(documents), sum(n * (n + 1) // 2 for n in documents)
    matrices = sum(p.numel() for n, p in lm.named_parameters() if p.ndim == 2 and "embed" not in n)
    # Scores and values: 2 products of 2 FLOPs, 2 layers, 32 wide, and twice that backward.
    expected = 6 * matrices * tokens + 3 * 2 * 2 * 2 * 32 * pairs
    found = mfu_of(spec, parts, gpu)(tokens, pairs, 0.5)
    assert found == pytest.approx(expected / 0.5 / (2 * 989.4e12), rel=1e-3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert mfu_of(spec, parts, gpu)(tokens, pairs, 0.5) is None
    assert mfu_of(spec, parts, torch.device("cpu"))(tokens, pairs, 0.5) is None


@pytest.mark.parametrize("on_spike", ["skip", "stop"])
def test_a_spike_is_skipped_or_stops_and_names_its_rows(inputs: Path, on_spike: str) -> None:
    config = config_of(inputs, f"spike-{on_spike}", on_spike=on_spike, lr=1e-4)
    spec = spec_of(config, inputs, num_steps=22)
    bad_row = int(spec.order.rows(19)[3])
    processes.spawn(spiked_worker, 2, str(inputs / f"spike-{on_spike}-a"), spec, bad_row)
    lines = metrics.read(open_storage(spec.run_url))
    if on_spike == "stop":
        assert [line["step"] for line in lines] == list(range(1, 20))
        return
    assert [line["step"] for line in lines if line["skipped"]] == [20]
    assert lines[19]["loss"] > 1.02 * lines[18]["loss"] > lines[20]["loss"]
    found, _ = latest(open_storage(spec.run_url))
    assert found is not None
    losses = [line["loss"] for line in lines if not line["skipped"]]
    assert found.state["skips"] == 0
    assert found.state["losses"] == pytest.approx(losses, rel=1e-12)


def spiked_worker(rank: int, world: int, spec: LanguageSpec, bad_row: int) -> None:
    """Train on rows of which one, in step 20, makes the model very sure of what is wrong."""
    rows = spec.data.rows("train")
    marker = 258  # a token of the vocabulary that the text never holds
    before: dict[int, Any] = {}

    def steps(first: int) -> Any:
        for batch in local_steps(rows, spec.order, rank, world, first):
            if batch.step == 19:
                batch.input_ids[batch.rows == bad_row] = marker
            yield batch

    from rayapp.finetune import trainer

    make_parts = trainer.make_parts

    def with_hooks(spec: LanguageSpec, device: torch.device) -> trainer.Parts:
        parts = make_parts(spec, device)
        marked: list[torch.Tensor] = []
        lm = parts.lm.hf
        lm.get_input_embeddings().register_forward_hook(
            lambda module, args, output: marked.append((args[0] == marker).any(1)[:, None, None])
        )
        lm.model.norm.register_forward_hook(
            lambda module, args, output: torch.where(marked[-1], output * 40, output)
        )
        return parts

    trainer.make_parts = with_hooks
    original = loop.report_bad

    def weights(engine: Engine) -> list[torch.Tensor]:
        state = engine.model.state_dict()  # a forward pass leaves some whole; this shards them
        return [tensor.to_local().clone() for tensor in state.values()]

    def report_bad(engine: Engine, batch: Any, *found: Any) -> None:
        before[batch.step] = weights(engine)
        try:
            original(engine, batch, *found)
        finally:
            assert all(map(torch.equal, before[batch.step], weights(engine)))

    loop.report_bad = report_bad
    if spec.config.train.on_spike == "skip":
        train_rank(spec, RankContext(torch.device("cpu"), steps))
    else:
        said = rf"step 20: .* is a spike .* highest are rows {bad_row} \("
        with pytest.raises(loop.BadLoss, match=said):
            train_rank(spec, RankContext(torch.device("cpu"), steps))
    assert list(before) == [19]


@pytest.mark.full
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(
    inputs: Path, two_workers: tuple[list[Any], Any]
) -> None:
    """A bit of one rank's shard flips: all ranks refuse it; the next start goes further back."""
    expected, _ = two_workers
    config = config_of(inputs, "damaged")
    spec = spec_of(config, inputs)
    for step in (7, 12):
        processes.spawn(stopped_worker, 2, str(inputs / f"damaged-{step}"), spec, step)
    shard = Path(spec.run_url, "checkpoints", "step-00000012", "__1_0.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    processes.spawn(refusing_worker, 2, str(inputs / "damaged-refused"), spec)
    _, skipped = latest(open_storage(spec.run_url))
    assert len(skipped) == 1 and "step-00000012/__1_0.distcp" not in skipped[0]
    assert skipped[0].startswith(
        "checkpoints/step-00000012 is skipped: __1_0.distcp has another checksum than when it was "
    )
    lines, summary = train(config, inputs, world=2)
    assert summary["first_step"] == 7
    for name in ("step", "loss", "grad_norm", "batch_digest", "lr"):
        assert [line[name] for line in lines] == [line[name] for line in expected], name


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(inputs: Path) -> None:
    """All ranks end with the reason; what the run has done stays as it is."""
    config = config_of(inputs, "all-damaged")
    spec = spec_of(config, inputs)
    processes.spawn(stopped_worker, 2, str(inputs / "all-damaged-a"), spec, 3)
    metrics_file = Path(spec.run_url, "metrics.jsonl")
    before = metrics_file.read_bytes()
    assert before.count(b"\n") == 3
    os.truncate(Path(spec.run_url, "checkpoints", "step-00000003", "__1_0.distcp"), 10)
    processes.spawn(hopeless_worker, 2, str(inputs / "all-damaged-b"), spec)
    assert metrics_file.read_bytes() == before


def hopeless_worker(rank: int, world: int, spec: LanguageSpec) -> None:
    with pytest.raises(NoneUsable, match=r"step-00000003: __1_0.distcp has 10 bytes instead of"):
        train_rank(spec, RankContext(torch.device("cpu"), lambda first: iter(())))


def refusing_worker(rank: int, world: int, spec: LanguageSpec) -> None:
    with pytest.raises(StartAgain, match=r"__1_0.distcp .* is not used again"):
        train_rank(spec, RankContext(torch.device("cpu"), lambda first: iter(())))


def test_a_notice_is_a_checkpoint_and_a_move(inputs: Path) -> None:
    """All ranks ask together; a node that goes leads to a save after that very step.

    Its stall counts all that the save held the step up by, the gathering of the state as well.
    """
    config = config_of(inputs, "noticed")
    spec = spec_of(config, inputs)
    processes.spawn(noticed_worker, 2, str(inputs / "noticed-a"), spec, 5)
    found, skipped = latest(open_storage(spec.run_url))
    assert found is not None and (found.step, skipped) == (5, [])
    lines = Path(spec.run_url, "metrics.jsonl").read_text().splitlines()
    *before, saved = [json.loads(line)["checkpoint_stall_s"] for line in lines]
    assert before == [0.0] * 4 and saved > SLOW_S


def noticed_worker(rank: int, world: int, spec: LanguageSpec, notice_at: int) -> None:
    rows = spec.data.rows("train")
    asked: list[int] = []
    step = 0

    def steps(first: int) -> Any:
        nonlocal step
        for batch in local_steps(rows, spec.order, rank, world, first):
            step = batch.step + 1
            yield batch

    def notice() -> str | None:
        asked.append(step)
        return "rank 1 is taken away" if step == notice_at else None

    gather = state.state_tensors

    def slowly(trainer: Trainer) -> dict[str, Any]:
        time.sleep(SLOW_S)
        return gather(trainer)

    schedule.NOTICE_POLL_S = 0.0
    state.state_tensors = slowly
    summary = train_rank(spec, RankContext(torch.device("cpu"), steps, preemption=notice))
    assert asked == list(range(1, notice_at + 1))  # on each rank
    assert (summary["status"], summary["steps"]) == ("moved", notice_at), summary
    if rank == 0:
        assert (summary["notice"], summary["reason"]) == (True, "rank 1 is taken away")


def stopped_worker(rank: int, world: int, spec: LanguageSpec, stop_after: int) -> None:
    """Train until someone asks rank 0 to stop, at a step boundary that all ranks agree on."""
    rows = spec.data.rows("train")

    def steps(first: int) -> Any:
        for batch in local_steps(rows, spec.order, rank, world, first):
            if batch.step + 1 == stop_after:
                loop_engine_stop.append(True)
            yield batch

    loop_engine_stop: list[bool] = []
    original = loop.agree

    def agree(engine: Engine, batch: Any) -> Agreement:
        engine.leave_due = lambda: STOP if rank == 0 and loop_engine_stop else CONTINUE
        return original(engine, batch)

    loop.agree = agree
    summary = train_rank(spec, RankContext(torch.device("cpu"), steps))
    assert summary["status"] == "stopped" and summary["steps"] == stop_after, summary


def test_a_rank_that_lags_is_named(inputs: Path) -> None:
    spec = spec_of(config_of(inputs, "lagging"), inputs, EVERY_STEPS * SAMPLES + 2)
    processes.spawn(lagging_worker, 2, str(inputs / "lagging-rendezvous"), spec)
    *lines, last = metrics.read(open_storage(spec.run_url))
    told = [line["step"] for line in lines if line["rank_s"]]
    assert told == [number * EVERY_STEPS + 1 for number in range(1, SAMPLES + 1)]
    assert not any(line["lagging"] for line in lines[: EVERY_STEPS * SAMPLES])
    assert str(last["lagging"]).startswith(f"rank 1 on {socket.gethostname()} computes ")


def lagging_worker(rank: int, world: int, spec: LanguageSpec) -> None:
    """A process whose blocks take twenty times as long on rank 1, by its clock."""
    slower = 1 + 19 * rank
    own_time.time = SimpleNamespace(perf_counter=lambda: slower * time.perf_counter())  # type: ignore[assignment]
    rows = spec.data.rows("train")
    steps = lambda step: local_steps(rows, spec.order, rank, world, step)  # noqa: E731
    train_rank(spec, RankContext(torch.device("cpu"), steps))


@pytest.mark.parametrize("why", [pytest.param("stop", marks=pytest.mark.full), "notice"])
def test_an_evaluation_is_given_up_and_follows_the_next_step_instead(
    inputs: Path, why: str
) -> None:
    """All ranks leave at the same batch and save; no figure is of some of the held-out rows."""
    tree = config_of(inputs, f"given-up-{why}").model_dump(mode="json")
    tree["eval"]["every_steps"] = 4
    config = from_dict(tree)
    spec = spec_of(config, inputs, num_steps=7)
    processes.spawn(giving_up_worker, 2, str(inputs / f"given-up-{why}-a"), spec, why)
    found, _ = latest(open_storage(spec.run_url))
    assert found is not None and found.step == 4
    lines, summary = train(config, inputs, world=2, num_steps=7)
    assert summary["first_step"] == 4
    assert [line["step"] for line in lines if line["eval_loss"] is not None] == [5]
    tree["run"]["name"], tree["eval"]["every_steps"] = f"whole-{why}", 1
    expected, whole = train(from_dict(tree), inputs, world=2, num_steps=7)
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in lines] == [line[name] for line in expected], name
    for name in ("eval_loss", "eval_loss_per_byte"):
        assert lines[4][name] == expected[4][name] is not None
        assert summary[name] == whole[name]


def giving_up_worker(rank: int, world: int, spec: LanguageSpec, why: str) -> None:
    """Train until there is a reason to leave, which comes up at the second held-out batch."""
    from rayapp.finetune import trainer

    seen: list[int] = []
    rows, batches = spec.data.rows("train"), trainer.sequential_batches

    def counted(*asked: Any) -> Iterator[Any]:
        for batch in batches(*asked):
            seen.append(batch.step)
            yield batch

    def notice() -> str | None:
        return "rank 1 is taken away" if why == "notice" and len(seen) >= 2 else None

    trainer.sequential_batches = counted
    schedule.NOTICE_POLL_S = 0.0
    schedule.LeaveWatcher.due = lambda self: STOP if why == "stop" and len(seen) >= 2 else CONTINUE  # type: ignore[method-assign]
    summary = train_rank(
        spec,
        RankContext(
            torch.device("cpu"),
            lambda step: local_steps(rows, spec.order, rank, world, step),
            preemption=notice,
        ),
    )
    assert (summary["status"], summary["steps"]) == ({"stop": "stopped"}.get(why, "moved"), 4)
    assert seen == [0, 1]


def test_a_loss_that_is_not_finite_names_the_step_and_the_rows(inputs: Path) -> None:
    config = config_of(inputs, "not-finite")
    spec = spec_of(config, inputs, num_steps=5)
    bad_row = int(spec.order.rows(2)[3])
    processes.spawn(poisoned_worker, 2, str(inputs / "not-finite-a"), spec, bad_row)


def poisoned_worker(rank: int, world: int, spec: LanguageSpec, bad_row: int) -> None:
    """Train on rows of which one, in step 3, makes the model's output not a number."""
    rows = spec.data.rows("train")
    marker = 258  # a token of the vocabulary that the text never holds

    def steps(first: int) -> Any:
        for batch in local_steps(rows, spec.order, rank, world, first):
            batch.input_ids[batch.rows == bad_row] = marker
            yield batch

    from rayapp.finetune import trainer

    original = trainer.make_parts

    def make_parts(spec: LanguageSpec, device: torch.device) -> trainer.Parts:
        parts = original(spec, device)
        embedding = parts.lm.hf.get_input_embeddings()
        embedding.register_forward_hook(
            lambda module, args, output: torch.where(
                (args[0] == marker).unsqueeze(-1), torch.full_like(output, float("nan")), output
            )
        )
        return parts

    trainer.make_parts = make_parts
    with pytest.raises(loop.BadLoss, match="step 3: ") as caught:
        train_rank(spec, RankContext(torch.device("cpu"), steps))
    assert caught.value.step == 3 and caught.value.rows == [bad_row]


# ---- One step of a model of one weight ---------------------------------------------------------


class OneRow:
    """A batch of one row, whose loss the weight is multiplied by."""

    rows = np.zeros((1, 1), int)

    def __init__(self, step: int, loss: float) -> None:
        self.step, self.loss = step, loss

    def counts(self) -> StepCounts:
        return StepCounts(1)

    def digest(self) -> int:
        return 0

    def weights(self) -> np.ndarray[Any, Any]:
        return np.ones((1, 1), int)

    def inputs(self, i: int, rows: slice = slice(None)) -> dict[str, Any]:
        return {"x": np.full(1, self.loss, np.float32)}


class OneWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (self.weight * x).sum()
        return loss, loss


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    init = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=init, rank=0, world_size=1)
    lm = OneWeight()
    made = Engine(
        model=lm,
        optimizers=[torch.optim.SGD(lm.parameters(), lr=0.0)],
        lr_at=lambda step: 0.0,
        device=torch.device("cpu"),
        grad_clip=None,
        control=dist.group.WORLD,
        record=lambda facts, *rest: facts,  # type: ignore[arg-type,return-value]
    )
    yield made
    dist.destroy_process_group()


@pytest.mark.parametrize("leave", [CONTINUE, STOP, RESTART])
def test_who_leaves_saves_and_does_not_evaluate(engine: Engine, leave: int) -> None:
    """A node that is taken away may be gone before an evaluation ends."""
    done: list[str] = []
    engine.leave_due = lambda: leave
    engine.eval_due = lambda step: True
    engine.evaluate = lambda step: done.append("evaluate") or {"eval_loss": 1.0}  # type: ignore[func-returns-value]
    engine.save = lambda step: done.append("save")
    (record,) = loop.train(engine, [OneRow(0, 1.0)])
    assert done == (["evaluate"] if leave == CONTINUE else ["save"]) and engine.left == leave
    assert ("eval_loss" in record) == (leave == CONTINUE)  # type: ignore[operator]


def test_what_is_asked_after_the_ranks_have_agreed_follows_the_next_step(engine: Engine) -> None:
    """The other ranks of this step do not know of it."""
    answers = iter([CONTINUE, STOP])
    engine.leave_due = lambda: next(answers)
    lines: list[Any] = list(loop.train(engine, [OneRow(number, 1.0) for number in range(3)]))
    assert [line["step"] for line in lines] == [1, 2] and engine.left == STOP


@pytest.mark.parametrize(("bad", "fix"), [(9.0, "set train.on_spike=none"), (math.nan, "train.lr")])
def test_skips_in_a_row_end_the_run(engine: Engine, bad: float, fix: str) -> None:
    """So many are none of single rows; a good step between begins the count anew."""
    engine.spikes, engine.skip_bad = Spikes(6.0, [1.0] * 64), True
    losses = [bad + number for number in range(loop.MAX_SKIPS - 1)] + [1.0] + [bad] * 3
    steps = iter([OneRow(number, loss) for number, loss in enumerate(losses)])
    assert [line["skipped"] for line in loop.train(engine, steps)] == [  # type: ignore[index]
        loss != 1.0 for loss in losses
    ]
    assert engine.state()["skips"] == 3
    said = rf"bad step number {loop.MAX_SKIPS} in a row, so those rows are not the cause\..*{fix}"
    with pytest.raises(loop.BadLoss, match=said) as caught:
        list(loop.train(engine, (OneRow(number, bad + number) for number in range(50, 100))))
    assert caught.value.step == 50 + loop.MAX_SKIPS - 3


def test_a_loss_of_ones_own_is_named_where_it_alone_is_not_finite(engine: Engine) -> None:
    """Its objective, or only its gradient; rows whose cross-entropy is not finite are to blame."""
    engine.own_loss = "lab:f"
    engine.model.register_forward_hook(lambda model, given, out: (out[0] * math.nan, out[1]))
    for loss, rows, said in [
        (1.0, [0], "rows 0 .* their cross-entropy is finite, train.loss=lab:f .*; mend lab:f, or"),
        (math.inf, [0], "rows 0 of the prepared data cause it. The weights"),
    ]:
        with pytest.raises(loop.BadLoss, match=said) as caught:
            list(loop.train(engine, [OneRow(0, loss)]))
        assert caught.value.rows == rows
    engine.model._forward_hooks.clear()
    (weight,) = engine.model.parameters()
    weight.register_hook(lambda slope: slope * math.nan)
    with pytest.raises(loop.BadLoss, match=r"each row alone .* train\.loss=lab:f or its gradient"):
        list(loop.train(engine, [OneRow(0, 1.0)]))


@pytest.mark.parametrize(
    ("own", "why"), [("lab:f", "train.loss=lab:f is cut off"), (None, "no tr")]
)
def test_a_first_step_without_a_gradient_ends_the_run(
    engine: Engine, own: str | None, why: str
) -> None:
    engine.own_loss, engine.skip_bad = own, True
    with pytest.raises(loop.BadLoss, match=f"^step 1: the gradient is exactly zero: {why}"):
        list(loop.train(engine, [OneRow(0, 0.0)]))
    assert len(list(loop.train(engine, [OneRow(0, 1.0), OneRow(1, 0.0)]))) == 2
    empty = OneRow(0, 0.0)
    empty.counts = lambda: StepCounts(0)  # type: ignore[method-assign]
    assert len(list(loop.train(engine, [empty]))) == 1, "no token of it bears loss"


def test_figures_of_a_loss_are_in_the_line_by_their_names(engine: Engine) -> None:
    """Without a place that lists them; they cannot hide a figure of the step."""
    engine.take_sums = lambda: {"margin": torch.tensor(6.0)}
    empty = OneRow(0, 1.0)
    empty.counts = lambda: StepCounts(3)  # type: ignore[method-assign]
    (line,) = loop.train(engine, [empty])
    assert line["margin"] == 2.0 and line["loss"] == 1.0 / 3.0  # type: ignore[typeddict-item]
    engine.take_sums = lambda: {"loss": torch.tensor(6.0)}
    with pytest.raises(AssertionError, match="names of their own"):
        list(loop.train(engine, [OneRow(0, 1.0)]))


def test_a_level_that_stays_is_trained_on(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """After LEVEL losses in a row; what is not finite in between is no part of a level."""
    engine.spikes, engine.skip_bad = Spikes(6.0, [1.0] * 64), True
    losses = [2.0] * (LEVEL - 1) + [math.nan] + [2.0] * 20
    steps = [OneRow(number, loss) for number, loss in enumerate(losses)]
    skipped = [line["skipped"] for line in loop.train(engine, steps)]  # type: ignore[index]
    assert skipped == [True] * (2 * LEVEL - 1) + [False] * (len(losses) - 2 * LEVEL + 1)
    assert caplog.messages[-1] == (
        "step 16: its loss and those of the 7 steps before lie near 2.000, a new level"
    )


def test_a_skipped_step_leaves_no_gradient_behind(engine: loop.Engine) -> None:
    """Of a spike, and of a gradient that is not finite though the loss is."""
    (weight,) = engine.model.parameters()
    weight.register_hook(lambda slope: torch.where(slope == 0.5, math.inf, slope))
    engine.spikes, engine.skip_bad, engine.lr_at = Spikes(6.0, [1.0] * 64), True, lambda step: 0.1
    steps = [OneRow(number, loss) for number, loss in enumerate([1.0, 9.0, 1.0, 0.5, 1.0])]
    lines: list[Any] = list(loop.train(engine, steps))
    assert [line["skipped"] for line in lines] == [False, True, False, True, False]
    assert [line["grad_norm"] for line in lines] == [1.0, 9.0, 1.0, math.inf, 1.0]
    assert weight.item() == pytest.approx(1.0 - 3 * 0.1)


def test_weights_that_a_save_reads_do_not_change(engine: loop.Engine) -> None:
    """The next step runs meanwhile, but for its update."""
    (weight,) = engine.model.parameters()
    read: list[float] = []
    engine.lr_at, engine.save_due = lambda step: 0.1, lambda step: step == 1
    engine.settle = lambda: read.append(weight.item())
    list(loop.train(engine, [OneRow(number, 1.0) for number in range(3)]))
    assert read == [pytest.approx(0.9)] and weight.item() == pytest.approx(0.7)


def test_an_evaluation_drops_nothing_out_and_training_goes_on(engine: loop.Engine) -> None:
    modes: list[bool] = []
    engine.model.register_forward_hook(lambda *call: modes.append(engine.model.training))
    batches = [OneRow(0, 1.0)] * 2
    found = loop.evaluate(engine, batches, lambda batch, i, out: {"loss": out[1].item(), "rows": 1})
    assert found == {"loss": 2.0, "rows": 2.0} and modes == [False, False] and engine.model.training


@pytest.mark.parametrize("limit", [None, 0.5, 5.0 - 5e-7, 5.0, 5.1])
def test_a_gradient_is_clipped_as_pytorch_does(limit: float | None) -> None:
    """Above the limit, just at it, and below it, where it is left alone."""
    ours, theirs = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    for each in (ours, theirs):
        each.weight.grad, each.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    assert optimizer.clip(ours, limit) == 5.0
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), math.inf if limit is None else limit)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert torch.equal(mine.grad, other.grad)
