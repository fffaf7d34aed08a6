"""A loss and metrics of the user's, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from rayapp.train.loss import IGNORE, chunked_cross_entropy
from rayapp.train.own_code import own_loss, token_sums


def nats(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, labels, reduction="none")


def drawn(
    bias: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 9, 8, generator=generator, requires_grad=True)
    weight = torch.randn(11, 8, generator=generator, requires_grad=True)
    labels = torch.randint(0, 11, (2, 9), generator=generator)
    labels[0, :4] = IGNORE
    return hidden, weight, labels, torch.randn(11, requires_grad=True) if bias else None


@pytest.mark.parametrize("chunk", [0, 1, 4, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_cross_entropy_as_ones_own_is_the_built_in_loss(chunk: int, bias: bool) -> None:
    hidden, weight, labels, of_head = drawn(bias)
    wanted, shown = chunked_cross_entropy(hidden, weight, labels, of_head, chunk=4)
    inputs = [each for each in (hidden, weight, of_head) if each is not None]
    gradients = torch.autograd.grad(wanted, inputs)
    found, loss = own_loss(hidden, weight, labels, of_head, function=nats, chunk=chunk)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(loss, shown)
    assert not loss.requires_grad
    for mine, built_in in zip(torch.autograd.grad(found, inputs), gradients, strict=True):
        torch.testing.assert_close(mine, built_in)


def test_logits_of_a_model_that_computes_them_itself_are_taken() -> None:
    hidden, weight, labels, _ = drawn()
    logits = (hidden @ weight.T).detach().requires_grad_()
    found, _ = own_loss(logits, None, labels, function=nats)
    wanted, _ = chunked_cross_entropy(logits, None, labels)
    torch.testing.assert_close(found, wanted)


def test_a_batch_without_loss_has_gradients_of_zero() -> None:
    hidden, weight, labels, _ = drawn()
    objective, loss = own_loss(hidden, weight, torch.full_like(labels, IGNORE), function=nats)
    (gradient,) = torch.autograd.grad(objective, hidden)
    assert float(objective.detach()) == float(loss) == 0.0 and not gradient.any()


@pytest.mark.parametrize("wrong", [lambda x, y: x.sum(), lambda x, y: x, lambda x, y: 1.0])
def test_what_is_not_one_number_a_token_is_refused(wrong: Any) -> None:
    hidden, weight, labels, _ = drawn()
    with pytest.raises(ValueError, match=r"train.loss is not usable.* one number a token"):
        own_loss(hidden, weight, labels, function=wrong)
    with pytest.raises(ValueError, match=r"eval.metrics=a is not usable"):
        token_sums({"a": wrong}, hidden, weight, labels)


@pytest.mark.parametrize("chunk", [0, 3])
def test_metrics_are_summed_over_tokens_that_bear_loss(chunk: int) -> None:
    hidden, weight, labels, bias = drawn()
    functions = {"hit": lambda x, y: (x.argmax(-1) == y).float(), "ones": lambda x, y: y * 0 + 1.0}
    sums = token_sums(functions, hidden, weight, labels, bias, chunk)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    hits = (logits.argmax(-1) == labels)[labels != IGNORE].sum()
    assert sums.tolist() == [float(hits), 14.0]
