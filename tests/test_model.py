"""Check rayapp.model against transformers' own loading, saving and autograd, on 1 to 3 real ranks.

One spawn per world size does everything on small models and leaves its results in a folder; each
test then compares one kind of result with a reference computed here in one process.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import processes
import psutil
import pytest
import torch
import torch.distributed as dist
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rayapp.config import Lora
from rayapp.model import (
    LanguageModel,
    Unavailable,
    add_adapters,
    build,
    device_mesh,
    export,
    export_adapters,
    init_adapters,
    init_weights,
    load_adapters,
    load_weights,
    merge_adapters,
    num_parameters,
    problems,
    resolve,
    shard,
)
from rayapp.model.activations import ATTENTION, checkpoint_activations
from rayapp.model.attention import choose_attention, varlen_attention
from rayapp.model.files import read_headers
from rayapp.model.init import fill
from rayapp.model.kernels import CompileGain, compile_blocks, measure_compile, use_float8
from rayapp.model.lora_layers import hold_in_4_bits
from rayapp.model.sharding import find_blocks
from rayapp.storage import open_storage
from rayapp.train.loss import chunked_cross_entropy

SIZES = {
    "vocab_size": 250,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama_tied": {"kind": "Llama", "tie_word_embeddings": True, "num_key_value_heads": 2},
    "llama_untied": {"kind": "Llama", "tie_word_embeddings": False, "dtype": torch.bfloat16},
    "gpt_neox": {"kind": "GPTNeoX"},
    "mistral": {"kind": "Mistral", "num_key_value_heads": 2, "sliding_window": 5},
    "mixtral": {  # without its router's loss, which is no sum over documents
        "kind": "Mixtral",
        "num_key_value_heads": 2,
        "num_local_experts": 3,
        "router_aux_loss_coef": 0.0,
    },
    "gemma_capped": {"kind": "Gemma2", "final_logit_softcapping": 3.0, "attention": "eager"},
}
STRATEGIES = {
    "full_shard": {},
    "shard_grad_op": {},
    "no_shard": {},
    "hybrid_shard": {"replicas": 1},
    "offload": {},
}
WORLDS = (1, 2, 3)
SEED = 7


def summed_loss(
    hidden: Tensor, weight: Tensor | None, labels: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the loss that rayapp.model expects, in the plainest way."""
    logits = hidden if weight is None else nn.functional.linear(hidden, weight, bias)
    logits = logits.float().flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100)
    return loss, loss.detach()


def attention_of(name: str) -> str:
    return MODELS[name].get("attention", "sdpa")


def make_config(name: str) -> Any:
    values = {k: v for k, v in MODELS[name].items() if k not in ("kind", "dtype", "attention")}
    return getattr(transformers, MODELS[name]["kind"] + "Config")(**SIZES | values)


def make_folder(name: str, folder: Path) -> None:
    """Save a model with random weights, including norms, in shards of at most 100 KB."""
    torch.manual_seed(1)
    hf = AutoModelForCausalLM.from_config(make_config(name), attn_implementation=attention_of(name))
    for parameter in hf.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    hf.to(MODELS[name].get("dtype", torch.float32)).save_pretrained(folder, max_shard_size="100KB")


def make_batch() -> dict[str, Tensor]:
    """Draw 5 rows of 12 tokens (a number that 2 and 3 ranks do not divide), some without loss."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(250, (5, 12), generator=generator)
    labels = torch.randint(250, (5, 12), generator=generator)
    labels[torch.rand(5, 12, generator=generator) < 0.3] = -100
    lengths = (3, 1, 8)
    position_ids = torch.cat([torch.arange(n) for n in lengths]).repeat(5, 1)
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: LanguageModel, rank: int, world: int) -> dict[str, Tensor]:
    """Run one micro-batch per rank at a time, short ranks with an all-masked one; then gather."""
    batch = make_batch()
    valid = (batch["labels"] != -100).sum()
    turns = -(-len(batch["labels"]) // world)
    total = torch.zeros(())
    for turn in range(turns):
        row = turn * world + rank
        mine = {k: v[row % 5 : row % 5 + 1].clone() for k, v in batch.items()}
        if row >= 5:
            mine["labels"].fill_(-100)
        objective, loss = model(**mine)
        (objective / valid).backward()
        total += loss / valid
    dist.all_reduce(total)
    return {"loss": total} | {
        name.removeprefix("hf."): whole(parameter.grad)
        for name, parameter in model.named_parameters()
    }


def work(rank: int, world: int, root: str) -> None:
    """Do on real ranks everything that the tests look at, and save it under out/<world>."""
    out = Path(root, "out", str(world))
    results: dict[str, Any] = {"stats": {}, "gradients": {}, "init": {}, "files": {}}
    mesh = device_mesh("cpu", strategy="full_shard")
    for name in MODELS:
        source = resolve(f"{root}/{name}")
        model = build(source.config, loss=summed_loss, attention=attention_of(name))
        stats = load_weights(shard(model, mesh), source, "cpu")
        results["stats"][name] = stats
        storage = open_storage(str(out / name))
        results["files"][name] = export(model, storage, max_file_bytes=60_000)
        results["gradients"][name] = gradients(model, rank, world)
        fresh = shard(build(source.config, loss=summed_loss, attention=attention_of(name)), mesh)
        init_weights(fresh, SEED, "cpu")
        results["init"][name] = {n: whole(t).clone() for n, t in fresh.hf.state_dict().items()}
        if name == "llama_tied":
            assert model.hf.lm_head.weight is model.hf.model.embed_tokens.weight
            assert fresh.hf.lm_head.weight is fresh.hf.model.embed_tokens.weight
            results["rotary"] = fresh.hf.model.rotary_emb.inv_freq.clone()
            results["sizes"] = (
                num_parameters(model),
                sum(p.to_local().numel() for p in model.parameters()),
            )
    results["strategies"] = {}
    for strategy, options in STRATEGIES.items():
        kind = "full_shard" if strategy == "offload" else strategy
        source = resolve(f"{root}/llama_tied")
        model = shard(
            build(source.config, loss=summed_loss),
            device_mesh("cpu", strategy=kind, **options),
            strategy=kind,
            cpu_offload=strategy == "offload",
        )
        load_weights(model, source, "cpu")
        results["strategies"][strategy] = gradients(model, rank, world)
    model = build(source.config, loss=summed_loss)
    checkpoint_activations(model, "full")
    shard(model, mesh, param_dtype=torch.bfloat16)
    load_weights(model, source, "cpu")
    results["bf16"] = gradients(model, rank, world)
    results["failure"] = failing_export(model, rank, root)
    results["adapters"] = adapt(mesh, root, out)
    torch.save(results, f"{root}/results-{world}-{rank}.pt")


def adapt(mesh: Any, root: str, out: Path) -> Tensor:
    """Export adapters with values that matter, alone and merged; return the losses of all."""
    source = resolve(f"{root}/llama_tied")
    lora = Lora(rank=3, alpha=12, targets=("q_proj", "down_proj"))
    model = build(source.config, loss=summed_loss)
    add_adapters(model, lora)
    load_weights(shard(model, mesh), source, "cpu")
    init_adapters(model, SEED)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.hf.named_parameters():
        if ".lora_B." in name:  # zeros so far
            fill(parameter.data, torch.randn(parameter.shape, generator=generator) / 9)
    export_adapters(model, open_storage(f"{out}/adapter"), base=f"{root}/llama_tied")
    export(model, open_storage(f"{out}/merged"), dtype=torch.float32)
    objective, loss = model(**make_batch())
    objective.backward()
    for parameter in model.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
    return torch.stack([loss, *map(partial(reopen, mesh, f"{out}/adapter"), (True, False))])


def reopen(mesh: Any, path: str, merge: bool) -> Tensor:
    """Load an exported adapter on its base, or merged into it; return the model's loss."""
    dist.barrier()  # rank 0 has written it
    source = resolve(path)
    assert source.adapter is not None and source.folder.url == source.base
    model = build(source.config, loss=summed_loss)
    if not merge:
        add_adapters(model, source.adapter.lora)
    load_weights(shard(model, mesh), source, "cpu")
    (merge_adapters if merge else load_adapters)(model, source.adapter)
    return model(**make_batch())[1]


def failing_export(model: LanguageModel, rank: int, root: str) -> str:
    """Export to a place where the last rank alone cannot write; return what this rank is told."""
    last = rank == dist.get_world_size() - 1
    Path(root, "blocked").write_text("a file, not a folder")
    storage = open_storage(f"{root}/blocked/x" if last else f"{root}/half")
    try:
        export(model, storage, max_file_bytes=60_000)
    except RuntimeError as error:
        return str(error)
    return "no error"


@dataclass
class Ranks:
    """Hold the folder of input models, and what each rank of each world size left."""

    root: Path
    results: dict[int, list[dict[str, Any]]]

    def reference(self, name: str) -> Any:
        """Load an input model with transformers, in fp32."""
        return AutoModelForCausalLM.from_pretrained(
            self.root / name, dtype=torch.float32, attn_implementation=attention_of(name)
        )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        make_folder(name, root / name)
    results = {}
    for world in WORLDS:
        processes.spawn(work, world, f"{root}/rendezvous-{world}", str(root))
        results[world] = [
            torch.load(root / f"results-{world}-{rank}.pt", weights_only=False)
            for rank in range(world)
        ]
    return Ranks(root, results)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make one small model in several shards, for tests that need no ranks."""
    path = tmp_path_factory.mktemp("model") / "llama"
    make_folder("llama_untied", path)
    return path


@pytest.mark.parametrize("window", [None, 3])
def test_attention_by_boundaries_knows_dropout(window: int | None) -> None:
    """So little of it that nothing is dropped; and the mean over many draws is what it drops of."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)

    def attend(dropout: float) -> Tensor:
        options = {"sliding_window": window, "cu_seq_lens_q": bounds, "max_length_q": 7}
        return varlen_attention(nn.Module(), q, k, v, None, dropout=dropout, **options)[0]

    torch.testing.assert_close(attend(1e-9), attend(0.0))
    assert (attend(0.3) - attend(0.0)).abs().max() > 0.1
    mean = torch.stack([attend(0.3) for _ in range(2000)]).mean(0)
    torch.testing.assert_close(mean, attend(0.0), rtol=0, atol=0.15)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("bounds", [None, [0, 5, 12, 24]])
def test_attention_on_cpus_computes_16_bits_in_fp32(
    window: int | None, bounds: list[int] | None
) -> None:
    """By boundaries and in whole rows: what comes out is rounded once, gradients nearly so."""
    torch.manual_seed(0)
    drawn = [torch.randn(1 if bounds else 2, h, 24 if bounds else 12, 8) for h in (4, 2, 2, 4)]
    found: dict[torch.dtype, list[Tensor]] = {}
    options: dict[str, Any] = {"sliding_window": window}
    if bounds:
        ends = torch.tensor(bounds, dtype=torch.int32)
        options |= {"cu_seq_lens_q": ends, "max_length_q": 12}
    for dtype in (torch.float32, torch.bfloat16):
        *inputs, grad = (each.bfloat16().to(dtype).requires_grad_() for each in drawn)
        out = varlen_attention(nn.Module(), *inputs, None, **options)[0]
        grads = torch.autograd.grad(out, inputs, grad.transpose(1, 2))
        found[dtype] = [out, *grads]
    exact, rounded = found[torch.float32], found[torch.bfloat16]
    assert torch.equal(rounded[0], exact[0].bfloat16())
    for ours, theirs in zip(rounded[1:], exact[1:], strict=True):  # made of what was rounded
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-7, atol=2**-5)


def test_attention_keeps_no_memory_of_lengths_it_has_seen() -> None:
    """Documents have thousands of lengths; torch's bf16 kernels compile something for each."""
    draw = np.random.default_rng(0)

    def attend(length: int) -> None:
        q = torch.randn(1, 4, length, 64, dtype=torch.bfloat16, requires_grad=True)
        ends = torch.tensor([0, length], dtype=torch.int32)
        options = {"cu_seq_lens_q": ends, "max_length_q": length}
        varlen_attention(nn.Module(), q, q, q, None, **options)[0].sum().backward()

    def resident_mib() -> float:
        return psutil.Process().memory_info().rss / 2**20

    attend(512)
    before_mib = resident_mib()
    for length in draw.permutation(np.arange(8, 512))[:120]:
        attend(int(length))
    assert resident_mib() - before_mib < 60


@pytest.mark.parametrize(
    ("values", "dtype", "capability", "why"),
    [
        ({}, torch.bfloat16, (9, 0), None),
        ({}, torch.float32, (9, 0), "in 16 bits"),
        ({"head_dim": 320}, torch.bfloat16, (9, 0), "256 at most, and these have 320"),
        ({}, torch.bfloat16, (7, 5), "needs compute capability 8.0, and an old GPU is older"),
    ],
)
def test_what_a_gpus_kernel_cannot_compute_is_left_to_sdpa(
    values: dict[str, Any],
    dtype: torch.dtype,
    capability: tuple[int, int],
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old GPU")
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, **values)
    best = choose_attention("auto", config, "cuda", dtype)
    assert best == ("varlen" if why is None else "sdpa")
    for asked in ("varlen", "flash") if why else ():
        with pytest.raises(Unavailable, match=f"model.attention={asked} .*{why}.*=auto"):
            choose_attention(asked, config, "cuda", dtype)


@pytest.mark.parametrize("asked", ["sdpa", "flex", "flash", "varlen"])
def test_a_kernel_that_a_model_has_not_is_refused(asked: str) -> None:
    config = transformers.MambaConfig()
    with pytest.raises(Unavailable, match=f"model.attention={asked} .*mamba .*=auto"):
        choose_attention(asked, config, "cuda", torch.bfloat16)


WINDOWED: dict[str, dict[str, Any]] = {  # the kernel that auto takes, and the model
    "Phimoe": {"auto": "sdpa", "num_local_experts": 4},
    "Doge": {"auto": "sdpa"},
    "Mixtral": {"auto": "varlen", "num_local_experts": 4},
    "Mistral": {"auto": "varlen"},
    "Qwen2": {"auto": "varlen", "use_sliding_window": True, "max_window_layers": 1},
    "Qwen2Moe": {"auto": "sdpa", "use_sliding_window": True, "max_window_layers": 1},
}


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_window_that_is_in_a_mask_alone_takes_a_kernel_with_a_mask(kind: str) -> None:
    """A document longer than the window has the loss of eager attention."""
    fields = {name: value for name, value in WINDOWED[kind].items() if name != "auto"}
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, **fields, num_key_value_heads=2, sliding_window=6
    )
    chosen = choose_attention("auto", config, "cpu", torch.float32)
    ids, losses = make_batch()["input_ids"][:, :24], {}
    for attention in ("eager", chosen):
        model = build(config, loss=summed_loss, attention=attention)
        init_weights(model, SEED, "cpu")
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
            losses[attention] = model.eval()(ids, ids.roll(-1, 1))[1]
    torch.testing.assert_close(losses[chosen], losses["eager"])
    assert chosen == WINDOWED[kind]["auto"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", MODELS)
def test_export_of_what_was_loaded_is_the_same_model(ranks: Ranks, name: str, world: int) -> None:
    written = ranks.root / "out" / str(world) / name
    ours, info = AutoModelForCausalLM.from_pretrained(
        written, output_loading_info=True, attn_implementation=attention_of(name)
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    theirs = AutoModelForCausalLM.from_pretrained(
        ranks.root / name, attn_implementation=attention_of(name)
    )
    assert ours.dtype == theirs.dtype
    input_ids = make_batch()["input_ids"]
    assert torch.equal(ours(input_ids).logits, theirs(input_ids).logits)
    names = json.loads((written / "model.safetensors.index.json").read_text())["weight_map"]
    original = json.loads((ranks.root / name / "model.safetensors.index.json").read_text())
    assert names.keys() == original["weight_map"].keys()
    count = len(set(names.values()))
    files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    expected = ["config.json", "generation_config.json", *files, "model.safetensors.index.json"]
    assert all(rank["files"][name] == expected for rank in ranks.results[world])
    assert sorted(path.name for path in written.iterdir()) == expected


def test_each_rank_reads_its_own_part_only(ranks: Ranks) -> None:
    for name in MODELS:
        index = json.loads((ranks.root / name / "model.safetensors.index.json").read_text())
        total = index["metadata"]["total_size"]
        for world in WORLDS:
            stats = [rank["stats"][name] for rank in ranks.results[world]]
            assert sum(rank.bytes_read for rank in stats) == total
            assert all(0.7 < rank.bytes_read * world / total < 1.3 for rank in stats), stats
            assert all(rank.extra == () for rank in stats)
        largest = max(rank.largest_tensor_bytes for rank in stats)
        assert 0 < largest < total / 3


def test_first_weights_do_not_depend_on_the_world(ranks: Ranks) -> None:
    for name in MODELS:
        expected = ranks.results[1][0]["init"][name]
        for world in WORLDS:
            for rank in ranks.results[world]:
                got = rank["init"][name]
                assert got.keys() == expected.keys()
                assert all(torch.equal(got[key], expected[key]) for key in expected)
        matrices = [t for key, t in expected.items() if key.endswith("q_proj.weight")]
        for matrix in matrices:
            assert matrix.std() == pytest.approx(0.02, rel=0.1)  # initializer_range
        assert len({float(matrix[0, 0]) for matrix in matrices}) == len(matrices)


def test_buffers_are_right_after_leaving_meta(ranks: Ranks) -> None:
    expected = ranks.reference("llama_tied").model.rotary_emb.inv_freq
    for world in WORLDS:
        assert all(torch.equal(rank["rotary"], expected) for rank in ranks.results[world])


def test_parameters_are_counted_once_and_held_once(ranks: Ranks) -> None:
    expected = sum(p.numel() for p in ranks.reference("llama_tied").parameters())
    for world in WORLDS:
        sizes = [rank["sizes"] for rank in ranks.results[world]]
        assert {size for size, _ in sizes} == {expected}
        assert sum(held for _, held in sizes) == expected


def reference_gradients(hf: Any) -> dict[str, Tensor]:
    """Compute loss and gradients in one process, each document of each row by itself."""
    batch = make_batch()
    valid = (batch["labels"] != -100).sum()
    total = torch.zeros(())
    for row in range(5):
        for start, stop in ((0, 3), (3, 4), (4, 12)):
            logits = hf(batch["input_ids"][row : row + 1, start:stop]).logits.float()
            labels = batch["labels"][row, start:stop]
            total = total + nn.functional.cross_entropy(logits[0], labels, reduction="sum") / valid
    total.backward()
    return {"loss": total.detach()} | {name: p.grad for name, p in hf.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_plain_autograd_on_unpacked_documents(ranks: Ranks, name: str) -> None:
    expected = reference_gradients(ranks.reference(name))
    for world in WORLDS:
        for rank in ranks.results[world]:
            got = rank["gradients"][name]
            assert got.keys() == expected.keys()
            for key in expected:
                torch.testing.assert_close(got[key], expected[key], rtol=1e-4, atol=1e-5, msg=key)


def test_every_strategy_gives_the_same_gradients(ranks: Ranks) -> None:
    expected = reference_gradients(ranks.reference("llama_tied"))
    for world in WORLDS:
        for strategy in STRATEGIES:
            got = ranks.results[world][0]["strategies"][strategy]
            for key in expected:
                torch.testing.assert_close(got[key], expected[key], rtol=1e-4, atol=1e-5, msg=key)


def test_bf16_with_activation_checkpointing_is_close_to_fp32(ranks: Ranks) -> None:
    expected = reference_gradients(ranks.reference("llama_tied"))
    for world in WORLDS:
        got = ranks.results[world][0]["bf16"]
        for key in expected:
            assert got[key].dtype == torch.float32
            error = (got[key] - expected[key]).norm() / expected[key].norm()
            assert error < 0.03, (key, error)


def test_a_failed_write_is_told_to_every_rank(ranks: Ranks) -> None:
    for world in WORLDS:
        for rank in ranks.results[world]:
            assert f"rank {world - 1}: " in rank["failure"] and "blocked" in rank["failure"]


def unsharded(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    source = resolve(str(folder))
    model = build(source.config, loss=summed_loss, attention=attention_of(name), dtype=dtype)
    load_weights(model, source, "cpu")
    return model


@pytest.mark.parametrize("name", ["llama_untied", "gpt_neox", "mistral", "mixtral"])
def test_packed_loss_equals_each_document_alone(tmp_path: Path, name: str) -> None:
    make_folder(name, tmp_path)
    model = unsharded(tmp_path, name)
    batch = {key: value[:1] for key, value in make_batch().items()}
    batch["labels"][:, ::2] = 5
    alone = [
        model(batch["input_ids"][:, a:b], batch["labels"][:, a:b])[0]
        for a, b in ((0, 3), (3, 4), (4, 12))
    ]
    packed, _ = model(**batch)
    torch.testing.assert_close(packed, sum(alone), rtol=1e-5, atol=1e-5)
    crossing, _ = model(batch["input_ids"], batch["labels"])
    assert abs(crossing - packed) > 1e-3


@pytest.mark.parametrize("name", ["llama_untied", "gemma3"])
def test_head_and_loss_compute_the_labels_that_bear_loss_alone(tmp_path: Path, name: str) -> None:
    """Gemma 3 caps its logits, so that it computes them all."""
    if name == "gemma3":
        sizes = {**SIZES, "head_dim": 8, "final_logit_softcapping": 3.0, "num_key_value_heads": 2}
        model = build(transformers.Gemma3TextConfig(**sizes), loss=summed_loss, attention="eager")
        init_weights(model, SEED, "cpu")
    else:
        make_folder(name, tmp_path)
        model = unsharded(tmp_path, name)
    model.loss = chunked_cross_entropy
    batch, of_source = make_batch(), torch.arange(5) < torch.tensor([[2], [9]])
    of_source[1] &= ~of_source[0]
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found, flops = [], []
    for some in ({}, {"trained": (batch["labels"].flatten() != -100).nonzero().flatten()}):
        with FlopCounterMode(display=False) as counter:
            objective, loss, sources = model(**batch, of_source=of_source, **some)
            gradients = torch.autograd.grad(objective, weights)
        assert sources.sum() == pytest.approx(float(loss), rel=1e-6)
        found.append([objective, sources, *gradients])
        flops.append(counter.get_total_flops())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    vocabulary, width = model.hf.get_output_embeddings().weight.shape
    left_out = int((batch["labels"] == -100).sum()) * vocabulary * width
    products = 0 if name == "gemma3" else 4  # the counter does not know addmm_
    assert flops[0] - flops[1] == products * left_out
    empty = torch.zeros(0, dtype=torch.long)
    masked = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    objective, _ = model(**masked, trained=empty)
    assert objective == 0 and all((g == 0).all() for g in torch.autograd.grad(objective, weights))


def test_router_loss_is_the_familys_own_and_only_in_training() -> None:
    sizes = SIZES | {"num_key_value_heads": 2, "num_local_experts": 3, "router_aux_loss_coef": 0.7}
    torch.manual_seed(2)
    hf = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    model = LanguageModel(hf, summed_loss, None).train()
    ids = torch.randint(250, (3, 12))
    labels = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], 1)
    objective, loss = model(ids, labels)
    expected = hf(input_ids=ids, labels=ids, output_router_logits=True)
    valid = (labels != -100).sum()
    torch.testing.assert_close(objective / valid, expected.loss)
    torch.testing.assert_close(loss / valid, expected.loss - 0.7 * expected.aux_loss)
    assert (objective - loss) / valid > 0.5  # and is no rounding
    router = hf.model.layers[0].mlp.gate.weight
    torch.testing.assert_close(model.take_sums()["router_loss"] / valid, expected.aux_loss)
    assert model.take_sums() == {}
    (ours,) = torch.autograd.grad(objective / valid, router)
    (theirs,) = torch.autograd.grad(expected.loss, router)
    torch.testing.assert_close(ours, theirs)
    objective, loss = model.eval()(ids, labels)
    assert objective == loss and model.take_sums() == {}
    weighted = LanguageModel(hf, summed_loss, None, router_weight=0.2).train()
    objective, loss = weighted(ids, labels)
    torch.testing.assert_close((objective - loss) / valid, 0.2 * expected.aux_loss)
    dense = transformers.Qwen3MoeConfig(**SIZES, num_key_value_heads=2, mlp_only_layers=[0, 1])
    dense = LanguageModel(transformers.Qwen3MoeForCausalLM(dense), summed_loss, None).train()
    objective, loss = dense(ids, labels)  # a mixture whose layers are all dense
    assert dense.router_weight and objective == loss and dense.take_sums() == {}
    none = LanguageModel(hf, summed_loss, None, router_weight=0.0).train()
    objective, loss = none(ids, labels)
    assert objective == loss and none.take_sums() == {}


@pytest.mark.parametrize("name", ["llama_tied", "mistral", "gpt_neox"])
def test_attention_by_boundaries_equals_attention_by_mask(tmp_path: Path, name: str) -> None:
    make_folder(name, tmp_path)
    source, batch = resolve(str(tmp_path)), make_batch()
    ends = torch.tensor([0, 3, 4, 12])
    bounds = torch.cat([ends[:1], *(ends[1:] + 12 * row for row in range(5))]).int()
    found = {}
    for attention in ("sdpa", "varlen"):
        model = build(source.config, loss=summed_loss, attention=attention)
        load_weights(model, source, "cpu")
        objective, _ = model(**batch, boundaries=bounds, longest=8)
        objective.backward()
        plain, _ = model(batch["input_ids"][:, :4], batch["labels"][:, :4])  # within the window
        found[attention] = [objective, plain, *(p.grad for p in model.parameters())]
    torch.testing.assert_close(found["varlen"], found["sdpa"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_adapters_load_in_peft_alone_and_merged(ranks: Ranks, world: int) -> None:
    import peft

    out, batch = ranks.root / "out" / str(world), make_batch()
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    adapted = peft.PeftModel.from_pretrained(ranks.reference("llama_tied"), out / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(out / "merged")
    with torch.no_grad():
        logits = adapted(**inputs, use_cache=False).logits
        torch.testing.assert_close(merged(**inputs, use_cache=False).logits, logits)
        plain = ranks.reference("llama_tied")(**inputs, use_cache=False).logits
    assert (logits - plain).abs().max() > 0.1
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    )
    for rank in ranks.results[world]:
        torch.testing.assert_close(rank["adapters"], loss.expand(3))  # as trained, reopened, merged


def test_a_base_in_4_bits_is_what_bitsandbytes_holds(folder: Path, tmp_path: Path) -> None:
    """Loaded by rows, it computes and is exported with the values that bitsandbytes gives."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
    torch.manual_seed(3)
    hf = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    hf.save_pretrained(tmp_path / "base")
    model = build(resolve(str(tmp_path / "base")).config, loss=summed_loss)
    add_adapters(model, Lora(rank=2))
    whole = sum(p.nbytes for p in model.hf.model.layers.parameters() if not p.requires_grad)
    hold_in_4_bits(model, torch.float32)
    held = sum(p.nbytes for p in model.hf.model.layers.parameters() if not p.requires_grad)
    assert held < whole * 4.6 / 32 + 4 * 64 * 4  # 4 bits and a scale in 64, and the norms
    load_weights(model, resolve(str(tmp_path / "base")), "cpu")
    init_adapters(model, SEED)
    for name, module in hf.named_modules():
        if ".layers." in name and isinstance(module, nn.Linear):
            packed, state = quantize_4bit(module.weight.detach(), blocksize=64, quant_type="nf4")
            module.weight.data = dequantize_4bit(packed, state)
    batch = make_batch()
    _, loss = model(batch["input_ids"], batch["labels"])
    logits = hf(input_ids=batch["input_ids"], use_cache=False).logits
    _, expected = summed_loss(logits, torch.eye(250), batch["labels"])
    torch.testing.assert_close(loss, expected)
    export(model, open_storage(str(tmp_path / "merged")))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, tensor in hf.state_dict().items():
        torch.testing.assert_close(merged[name], tensor)


def test_unknown_targets_of_adapters_are_named() -> None:
    model = build(make_config("gpt_neox"), loss=summed_loss)
    with pytest.raises(ValueError, match=r"targets=q_proj is unknown: .* Set some of dense, "):
        add_adapters(model, Lora(targets=("dense", "q_proj")))


def test_adapters_start_at_the_base_and_the_same_for_any_name(folder: Path) -> None:
    found = []
    for seed in (SEED, SEED, SEED + 1):
        source = resolve(str(folder))
        model = build(source.config, loss=summed_loss)
        add_adapters(model, Lora(rank=3))
        load_weights(model, source, "cpu")
        init_adapters(model, seed)
        found.append({n: p.clone() for n, p in model.named_parameters() if p.requires_grad})
    for name, values in found[0].items():
        assert torch.equal(values, found[1][name])
        if ".lora_B." in name:
            assert not values.any()
        else:
            bound = 1 / values.shape[1] ** 0.5
            assert not torch.equal(values, found[2][name])
            assert values.abs().max() <= bound and values.std() > bound / 3


@pytest.mark.parametrize("tokens", [15, 32])
def test_float8_products_sum_over_multiples_of_16(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weight's gradient sums over tokens; torch._scaled_mm takes multiples of 16 alone."""
    sums = []

    def scaled_mm(a: Any, b: Any, *args: Any, **options: Any) -> Any:
        sums.append(a.shape[1])
        return torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = build(config, loss=summed_loss, attention="sdpa", dtype=torch.bfloat16)
    use_float8(model, torch.device("cuda"))
    block = find_blocks(model.hf)[0].mlp.to_empty(device="cpu")
    block(torch.zeros(1, tokens, 32, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert len(sums) == 9 and all(each % 16 == 0 for each in sums)


@pytest.mark.full
def test_measuring_what_compilation_gains_compiles_nothing_in_vain(folder: Path) -> None:
    """Training goes on with the one graph that was measured, from the numbers before it."""
    from torch._dynamo.utils import counters

    source, batch, found = resolve(str(folder)), make_batch(), []
    for measured in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = build(source.config, loss=summed_loss)
        compile_blocks(model)
        load_weights(model, source, "cpu")
        model.train()
        drawn = torch.get_rng_state()
        if measured:
            gain = measure_compile(model, batch)
            assert min(gain.compile_s, gain.compiled_s, gain.eager_s) > 0
            assert str(gain).startswith("compile: one block ")
            assert counters["stats"]["unique_graphs"] == 1
        assert torch.equal(torch.get_rng_state(), drawn)
        objective, _ = model(**batch)
        objective.backward()
        assert counters["stats"]["unique_graphs"] == 1
        found.append([objective.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_compilation_gains_is_told_in_words() -> None:
    assert str(CompileGain(0.013, 0.010, 20.6)) == (
        "compile: one block 1.30x faster, 21 s to compile"
    )
    assert str(CompileGain(0.010, 0.0125, 3.0)) == (
        "compile: one block 1.25x slower: set train.compile=false, 3 s to compile"
    )


def test_what_is_recomputed_asks_for_no_gradient_of_frozen_embeddings(folder: Path) -> None:
    source, found = resolve(str(folder)), {}
    for mode in ("none", "full", "selective"):
        model = build(source.config, loss=summed_loss)
        add_adapters(model, Lora(rank=3))
        checkpoint_activations(model, mode)
        load_weights(model, source, "cpu")
        init_adapters(model, SEED)
        embedded: list[Tensor] = []
        model.hf.get_input_embeddings().register_forward_hook(
            lambda module, args, output, embedded=embedded: embedded.append(output)
        )
        objective, _ = model.train()(**make_batch())
        objective.backward()
        assert embedded and not any(one.requires_grad for one in embedded), mode
        found[mode] = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in found["none"].values())
    torch.testing.assert_close(found["full"], found["none"])
    torch.testing.assert_close(found["selective"], found["none"])


class Counted(TorchDispatchMode):
    """Count operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[op.name()] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("attention", "kernel"),
    [
        ("sdpa", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        ("varlen", "rayapp::by_document"),
    ],
)
def test_selective_recomputes_the_feed_forward_and_no_attention(
    folder: Path, attention: str, kernel: str
) -> None:
    source, attended, products = resolve(str(folder)), {}, {}
    for mode in ("none", "full", "selective"):
        model = build(source.config, loss=summed_loss, attention=attention)
        checkpoint_activations(model, mode)
        load_weights(model, source, "cpu")
        ends = torch.arange(0, 61, 12, dtype=torch.int32)
        with Counted() as counted:
            objective, _ = model.train()(**make_batch(), boundaries=ends, longest=12)
            objective.backward()
        attended[mode], products[mode] = counted.names[kernel], counted.names["aten::mm"]
    layers = source.config.num_hidden_layers
    assert attended == {"none": layers, "full": 2 * layers, "selective": layers}
    assert products["none"] < products["selective"] < products["full"]


def test_kernels_that_are_kept_exist_by_these_names() -> None:
    importlib.import_module("torch.nn.attention.varlen")
    for name in ATTENTION - {"flex_attention", "flash_attn::_flash_attn_varlen_forward"}:
        namespace, _, op = name.partition("::")
        assert getattr(getattr(torch.ops, namespace), op).default.name() == name
    assert torch.ops.higher_order.flex_attention.name() == "flex_attention"


def test_no_positions_means_no_mask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = unsharded(folder, "llama_untied")
    seen = []
    plain = nn.functional.scaled_dot_product_attention

    def record(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((kwargs.get("attn_mask") is not None, kwargs.get("is_causal")))
        return plain(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", record)
    batch = make_batch()
    model(batch["input_ids"], batch["labels"])
    assert set(seen) == {(False, True)}
    seen.clear()
    model(**batch)
    assert set(seen) == {(True, False)}


def test_head_with_processed_logits_goes_through_the_model_itself() -> None:
    tiny = {"num_key_value_heads": 2}
    for kind, extra, plain in [
        ("Llama", {}, True),
        ("Granite", {"logits_scaling": 1.0}, True),
        ("Granite", {"logits_scaling": 8.0}, False),
        ("Cohere", {"logit_scale": 0.5}, False),
        ("Gemma3Text", {"final_logit_softcapping": None}, True),
        ("Gemma3Text", {"final_logit_softcapping": 30.0}, False),
    ]:
        config = getattr(transformers, kind + "Config")(**SIZES, **tiny, **extra)
        assert build(config, loss=summed_loss).plain_head is plain, (kind, extra)


def test_build_takes_no_memory_and_leaves_the_config_alone() -> None:
    config = make_config("llama_tied")
    before = config.to_dict()
    model = build(config, loss=summed_loss, dtype=torch.bfloat16)
    assert config.to_dict() == before
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert [type(block).__name__ for block in find_blocks(model.hf)] == ["LlamaDecoderLayer"] * 2


def test_preset_and_unknown_path(tmp_path: Path) -> None:
    tiny = resolve("tiny")
    assert tiny.storage is None
    assert problems(tiny, from_scratch=True) == []
    assert ["from_scratch" in p for p in problems(tiny, from_scratch=False)] == [True]
    model = build(tiny.config, loss=summed_loss)
    assert num_parameters(model) == 4096 * 256 + 4 * (4 * 256**2 + 3 * 256 * 704 + 512) + 256
    with pytest.raises(ValueError, match=r"model.path=nope is no folder.*tiny"):
        resolve("nope")


def test_a_hub_id_without_a_network_is_one_line_with_what_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("Got: ConnectError: no name.\nAn error happened. Try again.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"^model\.path=org/name is no local folder") as caught:
        resolve("org/name")
    assert str(caught.value).endswith(
        "cannot be fetched: LocalEntryNotFoundError: Got: ConnectError: no name. Check the name, "
        "the network and HF_TOKEN, or set a folder, smollm2-135m-instruct (weights from the "
        "package index) or tiny (random ones)"
    )


def test_good_folder_has_no_problems(folder: Path) -> None:
    assert problems(resolve(str(folder)), from_scratch=False) == []
    assert problems(resolve(f"file://{folder}"), from_scratch=False) == []


def break_config_missing(path: Path) -> None:
    (path / "config.json").unlink()


def break_config_unknown(path: Path) -> None:
    edit_config(path, model_type="my_own", auto_map={"AutoModelForCausalLM": "evil.Model"})


def break_weights_missing(path: Path) -> None:
    for file in path.glob("*.safetensors*"):
        file.unlink()


def break_only_bin(path: Path) -> None:
    break_weights_missing(path)
    (path / "pytorch_model.bin").write_bytes(b"pickle")


def break_shard_missing(path: Path) -> None:
    (path / shards(path)[1]).unlink()


def break_shard_truncated(path: Path) -> None:
    shard = path / shards(path)[1]
    shard.write_bytes(shard.read_bytes()[:-10])


def break_header(path: Path) -> None:
    shard = path / shards(path)[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:8] + b"x" + data[9:])


def break_header_length(path: Path) -> None:
    shard = path / shards(path)[0]
    shard.write_bytes(struct.pack("<Q", 2**60) + shard.read_bytes()[8:])


def break_tensor_missing(path: Path) -> None:
    edit_config(path, num_hidden_layers=3)


def break_shape(path: Path) -> None:
    edit_config(path, intermediate_size=128)


def break_quantized(path: Path) -> None:
    edit_config(path, quantization_config={"quant_method": "fp8"})


def break_index(path: Path) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps({"weight_map": dict.fromkeys(index["weight_map"])}))


def break_two_sets(path: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(1)}, path / "model.safetensors")


def break_ties(path: Path) -> None:
    edit_config(path, tie_word_embeddings=True)


def break_heads(path: Path) -> None:
    edit_config(path, num_attention_heads=0)


def break_types(path: Path) -> None:
    edit_config(path, hidden_act="nope")


def break_nesting(path: Path) -> None:
    (path / "config.json").write_text("[" * 100_000)


def edit_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def shards(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (break_config_missing, ["no config.json", "Give a Hugging Face model folder"]),
        (break_config_unknown, ["model_type 'my_own'", "never run"]),
        (break_weights_missing, ["no *.safetensors", "model.safetensors.index.json"]),
        (break_only_bin, ["only pickled weights", "save_pretrained"]),
        (break_shard_missing, ["model-00002-of-", "missing", "Copy the file"]),
        (break_shard_truncated, ["model-00002-of-", "truncated", "Copy it anew"]),
        (break_header, ["model-00001-of-", "broken header", "Copy it anew"]),
        (break_header_length, ["model-00001-of-", "broken header", "Copy it anew"]),
        (break_tensor_missing, ["lacks 9", "model.layers.2.", "Copy the whole folder"]),
        (break_shape, ["mlp.gate_proj.weight", "[96, 48]", "[128, 48]", "Correct config.json"]),
        (break_quantized, ["quantized", "unquantized"]),
        (break_index, ["model.safetensors.index.json is no index", "weight_map", "Copy it anew"]),
        (break_two_sets, ["two sets of weights: model.safetensors, ", "and model-00001-of-"]),
        (break_ties, ["model.embed_tokens.weight and lm_head.weight", "Set tie_word_embeddings"]),
        (break_heads, ["damaged", "config.json", "ZeroDivisionError", "Copy it anew"]),
        (break_types, ["cannot be built from", "config.json", "Correct the file"]),
        (break_nesting, ["config.json", "not valid JSON", "recursion", "Copy it anew"]),
    ],
)
def test_problems_say_what_where_and_what_to_do(
    tmp_path: Path, damage: Any, expected: list[str]
) -> None:
    make_folder("llama_untied", tmp_path / "m")
    damage(tmp_path / "m")
    source = resolve(str(tmp_path / "m"))
    found = problems(source, from_scratch=False)
    assert found and all(str(tmp_path) in line and "\n" not in line for line in found)
    if damage is break_weights_missing:
        expected = ["no *.safetensors", "from_scratch=true"]
        assert problems(source, from_scratch=True) == []
    for words in expected:
        assert any(words in line for line in found), (words, found)


# Changes of the first shard's header, and what is said of it.
HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "overlap": (lambda h: h["b"].update(data_offsets=[4, 12]), "'b' begins at byte .* ends at"),
    "gap": (lambda h: h.pop("a") and None, "'b' begins at byte"),
    "negative": (lambda h: h["a"].update(shape=[-2, -1]), "'a' is described as .*-2"),
    "float": (lambda h: h["a"].update(shape=[2.0]), "'a' is described as"),
    "bool": (lambda h: h["a"].update(data_offsets=[False, 8]), "'a' is described as"),
    "dimensions": (lambda h: h["a"].update(shape=[2] + [1] * 100_000), "'a' is described as"),
    "huge": (lambda h: h["a"].update(shape=[2**70, 0]), "'a' is described as"),
    "huge product": (lambda h: h["c"].update(shape=[2**40, 2**40, 0]), "'c' is described as"),
    "dtype": (lambda h: h["a"].update(dtype="F4"), "'a' is described as .*F4"),
    "dtypes": (lambda h: h["a"].update(dtype=[]), "'a' is described as"),
    "nothing": (lambda h: h.update(a=None), "'a' is described as None"),
    "no object": (lambda h: "[]", "has a broken header"),
    "deep": (lambda h: "[" * 100_000, "has a broken header: .*recursion"),
    "long": (lambda h: h.popitem() and None, "is longer than its tensors: "),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_header_is_named(tmp_path: Path, case: str) -> None:
    of = {"a": ([2], [0, 8]), "b": ([2], [8, 16]), "c": ([0], [16, 16]), "d": ([2], [16, 24])}
    header: Any = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        for name, (shape, offsets) in of.items()
    }
    change, expected = HEADERS[case]
    other = change(header)
    text = (other if isinstance(other, str) else json.dumps(other or header)).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
    with pytest.raises(ValueError, match=f"model.safetensors.*{expected}.*Copy it anew"):
        read_headers(open_storage(str(tmp_path)))
    if case != "dimensions":
        with pytest.raises(Exception):  # noqa: B017  the format's own library refuses it too
            load_file(tmp_path / "model.safetensors")


def test_a_left_index_beside_one_file_is_passed_over(tmp_path: Path) -> None:
    make_folder("llama_untied", tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name in shards(tmp_path):
        (tmp_path / name).unlink()
    whole.save_pretrained(tmp_path / "single")
    shutil.copy(tmp_path / "single" / "model.safetensors", tmp_path)
    assert problems(resolve(str(tmp_path)), from_scratch=False) == []


def test_a_model_without_a_dtype_is_exported_in_that_of_its_weights(tmp_path: Path) -> None:
    make_folder("llama_untied", tmp_path / "base")
    edit_config(tmp_path / "base", dtype=None, torch_dtype=None)
    for lora in (None, Lora(rank=2)):
        model = build(resolve(str(tmp_path / "base")).config, loss=summed_loss)
        if lora is not None:
            add_adapters(model, lora)
        load_weights(model, resolve(str(tmp_path / "base")), "cpu")
        export(model, open_storage(str(tmp_path / "out")))
        assert {t.dtype for t in load_file(tmp_path / "out/model.safetensors").values()} == {
            torch.bfloat16
        }


def test_load_refuses_what_problems_refuses(tmp_path: Path) -> None:
    make_folder("llama_untied", tmp_path)
    edit_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"lacks 9 .*model\.layers\.2\."):
        unsharded(tmp_path, "llama_untied")


def test_tied_config_over_two_different_tensors_is_refused(tmp_path: Path) -> None:
    make_folder("llama_untied", tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="Set tie_word_embeddings to false"):
        unsharded(tmp_path, "llama_untied")


def test_load_and_export_on_s3(folder: Path, s3_bucket: str) -> None:
    storage = open_storage(f"s3://{s3_bucket}/in")
    for path in folder.iterdir():
        storage.write(path.name, path.read_bytes())
    source = resolve(f"s3://{s3_bucket}/in")
    assert problems(source, from_scratch=False) == []
    model = build(source.config, loss=summed_loss)
    stats = load_weights(model, source, "cpu")
    assert stats.bytes_read == sum(p.numel() * 2 for p in model.parameters())  # stored in bf16
    export(model, open_storage(f"s3://{s3_bucket}/out"), max_file_bytes=60_000)
    again = build(source.config, loss=summed_loss)
    load_weights(again, resolve(f"s3://{s3_bucket}/out"), "cpu")
    for name, value in again.hf.state_dict().items():
        assert torch.equal(value, model.hf.state_dict()[name])


def test_extra_tensors_are_ignored_and_returned(tmp_path: Path) -> None:
    make_folder("gpt_neox", tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    old = {"gpt_neox.layers.0.attention.masked_bias": torch.zeros(1)}
    save_file(old, tmp_path / "old.safetensors")
    index["weight_map"] |= dict.fromkeys(old, "old.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    source = resolve(str(tmp_path))
    model = build(source.config, loss=summed_loss)
    assert load_weights(model, source, "cpu").extra == tuple(old)


def test_export_writes_one_file_tokenizer_and_settings_of_version_4(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    config = make_config("llama_tied")
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = build(config, loss=summed_loss)
    init_weights(model, SEED, "cpu")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    )
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier export")
    names = export(
        model,
        open_storage(str(tmp_path)),
        tokenizer=tokenizer,
        generation_config=GenerationConfig(temperature=0.5, eos_token_id=7),
        dtype=torch.bfloat16,
    )
    assert names == sorted(os.listdir(tmp_path))
    assert {"model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(names)
    assert AutoTokenizer.from_pretrained(tmp_path)("b")["input_ids"] == [1]
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    assert written["rope_theta"] == 500_000.0
    assert written["rope_scaling"]["rope_type"] == "llama3"
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters
    again = resolve(str(tmp_path))
    assert again.generation_config is not None and again.generation_config.eos_token_id == 7
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert opened.dtype == torch.bfloat16
    for name, value in opened.state_dict().items():
        assert torch.equal(value, model.hf.state_dict()[name].to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text", "Cohere", "Granite", "OPT"])
def test_z_loss_and_smoothing_are_of_the_logits_that_the_model_computes(kind: str) -> None:
    own: dict[str, Any] = {
        "Gemma3Text": {"final_logit_softcapping": 3.0, "head_dim": 8},
        "Cohere": {"logit_scale": 0.5},
        "Granite": {"logits_scaling": 3.0},
        "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    }.get(kind, {})
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        **own,
    )
    loss = partial(chunked_cross_entropy, chunk=3, z_loss=0.1, label_smoothing=0.3)
    model = build(config, loss=loss, attention="eager")
    init_weights(model, SEED, "cpu")
    model.eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    ids = torch.randint(1, 32, (2, 8))
    labels = torch.where(torch.rand(ids.shape) < 0.3, -100, ids.roll(-1, 1))
    logits = model.hf(input_ids=ids, use_cache=False).logits.float().flatten(0, 1)
    valid = labels.flatten() != -100
    smoothed = nn.functional.cross_entropy(
        logits, labels.flatten(), reduction="sum", label_smoothing=0.3
    )
    expected = smoothed + 0.1 * (logits.logsumexp(1) ** 2)[valid].sum()
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(expected, parameters, allow_unused=True)
    objective, summed = model(ids, labels)
    torch.testing.assert_close(objective, expected)
    plain = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    torch.testing.assert_close(summed, plain.detach())
    found = torch.autograd.grad(objective, parameters, allow_unused=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def export_after_evaluation(rank: int, world: int, folder: str, root: str) -> None:
    """Export a sharded model that computes in bf16, whole and adapters, after a forward pass."""
    source = resolve(folder)
    for name, lora in (("whole", None), ("adapters", Lora(rank=3)), ("merged", Lora(rank=3))):
        model = build(source.config, loss=summed_loss)
        if lora is not None:
            add_adapters(model, lora)
        mesh = device_mesh("cpu", strategy="full_shard")
        shard(model, mesh, strategy="full_shard", param_dtype=torch.bfloat16)
        load_weights(model, source, "cpu")
        if lora is not None:
            init_adapters(model, SEED)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1e-3 / 3
            model.eval()(**make_batch())
        storage = open_storage(f"{root}/{name}")
        if name == "adapters":
            export_adapters(model, storage, base="base")
        else:
            export(model, storage, dtype=torch.float32)


def test_what_is_exported_after_an_evaluation_is_not_rounded(folder: Path, tmp_path: Path) -> None:
    processes.spawn(export_after_evaluation, 1, str(tmp_path / "init"), str(folder), str(tmp_path))
    for name in ("whole/model", "adapters/adapter_model", "merged/model"):
        for key, value in load_file(tmp_path / f"{name}.safetensors").items():
            assert not torch.equal(value.bfloat16().float(), value), (name, key)
