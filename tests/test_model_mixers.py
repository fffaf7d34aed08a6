"""Layers that mix along the sequence without attention, document by document; attention's sinks."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support import mixing
from support.architectures import ARCHITECTURES
from test_model_documents import CPU, model_of
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from rayapp.model import LanguageModel, build, scans
from rayapp.model.activations import checkpoint_activations
from rayapp.model.attention import choose_attention
from rayapp.model.mixers import keeps_documents_apart, split_documents
from rayapp.train.loss import chunked_cross_entropy

BY_KIND = {each.kind: each for each in ARCHITECTURES}
SPLIT = ["Qwen3Next", "Qwen3_5Text", "Lfm2", "GraniteMoeHybrid", "FalconH1", "Mamba2"]
# Its masks are made without positions; the boundaries that this kernel is given reach its mixers.
ATTENTION = {"GraniteMoeHybrid": "varlen"}
DOCUMENTS = [(0, 0, 40), (0, 40, 100), (1, 0, 100)]  # row, start, end


def filled(kind: str, attention: str | None = None) -> LanguageModel:
    """Build the small model of docs/models.md with random weights."""
    config = BY_KIND[kind].config()
    name = attention or choose_attention("auto", config, "cpu", torch.float32)
    lm = build(config, loss=partial(chunked_cross_entropy, chunk=64), attention=name)
    lm.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for buffer in lm.buffers():
        buffer.data.fill_(0.5)
    return lm


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and labels of two rows with three documents."""
    torch.manual_seed(1)
    ids = torch.randint(3, 512, (2, 100))
    labels = ids.roll(-1, 1)
    for row, _, end in DOCUMENTS:
        labels[row, end - 1] = -100
    return ids, labels


def packed_loss(lm: LanguageModel) -> Any:
    """Return the loss of the rows, packed."""
    ids, labels = rows()
    lengths = [torch.arange(end - start) for _, start, end in DOCUMENTS]
    bounds = torch.tensor([0, 40, 100, 200], dtype=torch.int32)
    return lm(ids, labels, torch.cat(lengths).reshape(2, 100), bounds, 100)[0]


def loss_of_each(lm: LanguageModel) -> Any:
    """Return the sum of the losses of the documents, each by itself."""
    ids, labels = rows()
    return sum(lm(ids[r : r + 1, a:b], labels[r : r + 1, a:b])[0] for r, a, b in DOCUMENTS)


def gradients(lm: LanguageModel, loss: Any) -> dict[str, torch.Tensor]:
    lm.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("by_row", [True, False], ids=["by row", "by document"])
@pytest.mark.parametrize("kind", SPLIT)
def test_packed_documents_give_the_loss_and_gradients_of_each_alone(
    kind: str, by_row: bool
) -> None:
    lm = filled(kind, ATTENTION.get(kind, "eager")).eval()
    if kind not in ATTENTION:
        assert not keeps_documents_apart(lm, CPU)
        with torch.no_grad():
            packed, alone = packed_loss(lm), loss_of_each(lm)
        assert abs(packed - alone) > 1e-6 * alone, "the documents see one another"
    assert split_documents(lm, by_row) and keeps_documents_apart(lm, CPU)
    with torch.no_grad():
        packed, alone = packed_loss(lm), loss_of_each(lm)
    assert abs(packed - alone) < 1e-6 * alone
    together, each = gradients(lm, packed_loss(lm)), gradients(lm, loss_of_each(lm))
    assert together.keys() == each.keys()
    for name, gradient in each.items():
        assert (together[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-5, name


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Have transformers take packages with kernels, which run here; return what was called."""
    called = []
    for name, package in mixing.packages().items():
        monkeypatch.setitem(sys.modules, name, package)
    of_packages, held = use_kernel_func_from_hub_with_fallback, []

    def replaced(hf: Any) -> None:
        guarded(hf)
        for module in hf.modules():
            functions = inspect.unwrap(type(module).forward).__globals__
            for name, scan in scans.scans_of(module).items():
                kernel = of_packages(scan.name, scan.package)(scan.reference)
                found = inspect.getclosurevars(kernel).nonlocals
                if not found["is_new_implementation"] or scan.kernel is not None:
                    continue

                def run(*args: Any, call: Any = kernel, what: str = scan.name, **kw: Any) -> Any:
                    called.append(what)
                    return call(*args, **kw)

                held.append((functions, name, scan))
                functions[name] = replace(scan, kernel=run)

    guarded = scans.guard
    monkeypatch.setattr(scans, "guard", replaced)
    monkeypatch.setattr(scans, "on_gpu", lambda tensor: True)
    yield called
    for functions, name, scan in held:
        functions[name] = scan


@pytest.mark.parametrize("kind", SPLIT)
def test_kernels_run_once_for_each_row(kind: str, kernels: list[str]) -> None:
    """In plain PyTorch; they give the loss and gradients of each document alone."""
    attention = ATTENTION.get(kind, "eager")
    alone = loss_of_each(reference := filled(kind, attention).eval())
    expected = gradients(reference, alone)
    lm = filled(kind, attention).eval()
    assert split_documents(lm) and keeps_documents_apart(lm, CPU)
    kernels.clear()
    packed = packed_loss(lm)
    mixers = sum(scans.takes_rows(module) for module in lm.hf.modules())
    assert Counter(kernels) == dict.fromkeys(set(kernels), mixers) and len(set(kernels)) <= 2
    assert abs(packed - alone) < 1e-5 * alone
    for name, gradient in gradients(lm, packed).items():
        assert (expected[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-5, name


def test_a_kernel_is_for_gpus_alone() -> None:
    def kernel(*args: Any) -> Any:
        raise AssertionError("no kernel runs here")

    row = torch.ones(1, 2, 3)
    found = scans.Scan("f", "fla", kernel, lambda x, y: x + y, frozenset({"x", "y"}))
    assert torch.equal(found(row, 1, cu_seqlens=None), row + 1)
    found = scans.kernel_packages(filled("Qwen3Next").hf)
    assert list(found) == ["causal-conv1d", "flash-linear-attention"]


def test_recomputation_runs_document_by_document_too() -> None:
    plain, saving = filled("Lfm2").train(), filled("Lfm2").train()
    checkpoint_activations(saving, "full")
    for lm in (plain, saving):
        split_documents(lm)
    expected, found = (gradients(lm, packed_loss(lm)) for lm in (plain, saving))
    assert all(torch.allclose(found[name], expected[name]) for name in expected)


def test_a_model_without_such_layers_is_not_split() -> None:
    lm = model_of("Falcon", {})
    assert not split_documents(lm) and not keeps_documents_apart(lm, CPU)


def test_a_recurrent_model_needs_no_positions() -> None:
    lm = model_of("Mamba", {})
    assert not lm.takes_positions and not keeps_documents_apart(lm, CPU)
    assert not split_documents(lm), "its scan takes no boundaries"
    assert split_documents(lm, by_row=False) and keeps_documents_apart(lm, CPU)


def test_a_mixer_that_returns_more_than_a_tensor_runs_by_document() -> None:
    lm = model_of("RecurrentGemma", {})
    assert not keeps_documents_apart(lm, CPU) and not split_documents(lm)
    assert split_documents(lm, by_row=False) and keeps_documents_apart(lm, CPU)


@pytest.mark.parametrize("window", [4, 64])
def test_sinks_are_those_of_transformers(window: int) -> None:
    """The kernel with sinks against transformers' eager attention, document by document."""
    ours, theirs = (filled("GptOss", name) for name in ("varlen", "eager"))
    for lm in (ours, theirs):
        for module in lm.hf.modules():
            if getattr(module, "sliding_window", None):
                module.sliding_window = window
        lm.hf.config.sliding_window = window
    for name, parameter in ours.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    theirs.load_state_dict(ours.state_dict())
    found, expected = packed_loss(ours.eval()), loss_of_each(theirs.eval())
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    gradient, reference = gradients(ours, found), gradients(theirs, expected)
    assert any(name.endswith("sinks") for name in reference)
    for name, wanted in reference.items():
        assert (gradient[name] - wanted).norm() <= 1e-3 * wanted.norm() + 1e-5, name


def test_sinks_take_their_share_with_dropout_too() -> None:
    from rayapp.model.by_document import by_document, with_dropout

    torch.manual_seed(0)
    q, k, v = (torch.randn(12, 2, 8) for _ in range(3))
    sinks, bounds = torch.randn(2), torch.tensor([0, 5, 12], dtype=torch.int32)
    for window in (-1, 2):
        expected, _ = by_document(q, k, v, sinks, bounds, window, 0.3)
        found = with_dropout(q, k, v, sinks, bounds, window, 0.3, 0.0)
        assert torch.allclose(found, expected, atol=1e-6)
