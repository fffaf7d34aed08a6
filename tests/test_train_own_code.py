"""A loss and metrics of the user's, token by token."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from rayapp.config import from_dict
from rayapp.finetune.model_parts import OutputHead
from rayapp.finetune.trainer import held_out_losses
from rayapp.train import loop
from rayapp.train.loss import IGNORE, chunked_cross_entropy
from rayapp.train.own_code import RaisedError, columns_of, own_loss, problem_of, token_sums


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


def spread(logits: torch.Tensor, labels: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return nats(logits, labels) + hidden.mul_(2.0).square().mean(-1)


@pytest.mark.parametrize("chunk", [0, 4])
def test_a_function_with_a_parameter_hidden_is_given_the_hidden_states(chunk: int) -> None:
    hidden, weight, labels, bias = drawn()
    bears = labels != IGNORE
    logits = torch.nn.functional.linear(hidden[bears], weight, bias)
    wanted = (nats(logits, labels[bears]) + (2.0 * hidden[bears]).square().mean(-1)).sum()
    found, _ = own_loss(hidden, weight, labels, bias, function=spread, chunk=chunk)
    torch.testing.assert_close(found, wanted)
    inputs = [hidden, weight, bias]
    for mine, plain in zip(*(torch.autograd.grad(x, inputs) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(mine, plain)
    given = ({"spread": spread, "again": spread}, hidden, weight, labels, bias, chunk)
    assert token_sums(*given).tolist() == pytest.approx([float(wanted.detach())] * 2)


def weighted(
    logits: torch.Tensor, labels: torch.Tensor, reward: torch.Tensor, margin: torch.Tensor
) -> torch.Tensor:
    return reward.mul_(2.0) * nats(logits, labels) + margin * logits.square().mean(-1)


@pytest.mark.parametrize("chunk", [0, 4])
def test_a_parameter_of_another_name_is_given_the_column_of_the_records(chunk: int) -> None:
    hidden, weight, labels, bias = drawn()
    columns = {"margin": torch.rand(2, 9), "reward": torch.rand(2, 9), "other": torch.rand(2, 9)}
    bears = labels != IGNORE
    logits = torch.nn.functional.linear(hidden[bears], weight, bias)
    reward, margin = 2.0 * columns["reward"][bears], columns["margin"][bears]
    wanted = (reward * nats(logits, labels[bears]) + margin * logits.square().mean(-1)).sum()
    given = (hidden, weight, labels, bias)
    found, _ = own_loss(*given, function=weighted, chunk=chunk, columns=columns)
    torch.testing.assert_close(found, wanted)
    inputs = [hidden, weight, bias]
    for mine, plain in zip(*(torch.autograd.grad(x, inputs) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(mine, plain)
    sums = token_sums({"a": weighted, "b": weighted}, *given, chunk, columns=columns)
    assert sums.tolist() == pytest.approx([float(wanted.detach())] * 2)


NAMED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "none": (nats, ()),
    "sorted": (weighted, ("margin", "reward")),
    "hidden": (spread, ()),
    "a default": (lambda x, y, gamma=2.0: x, ()),
    "by name": (lambda x, y, *rest, reward, hidden, **more: x, ("reward",)),
    "of C": (torch.nn.functional.relu_, ()),
}


@pytest.mark.parametrize("case", NAMED)
def test_parameters_without_a_default_name_columns(case: str) -> None:
    function, names = NAMED[case]
    assert columns_of(function) == names


def test_rows_without_numbers_have_cross_entropy_alone() -> None:
    """Those of tasks, and of the checks of a model before it is trained."""
    head = OutputHead(from_dict({"train": {"loss": "test_train_own_code:weighted"}}))
    hidden, weight, labels, bias = drawn()
    plain, _ = chunked_cross_entropy(hidden, weight, labels, bias)
    torch.testing.assert_close(head(hidden, weight, labels, bias)[0], plain)
    values = torch.rand(2, 2, 9)  # of margin and reward
    named = dict(zip(("margin", "reward"), values, strict=True))
    wanted, _ = own_loss(hidden, weight, labels, bias, function=weighted, columns=named)
    found, _ = head(hidden, weight, labels, bias, values=values)
    torch.testing.assert_close(found, wanted)


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


def spoils(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found = nats(logits.mul_(0.0), labels)
    labels.zero_()
    return found


@pytest.mark.parametrize("head", ["weight", "no weight"])
def test_what_a_metric_writes_reaches_no_other_and_no_gradient(head: str) -> None:
    hidden, weight, labels, bias = drawn()
    given: tuple[Any, ...] = (hidden, weight, labels, bias)
    if head == "no weight":
        logits = torch.nn.functional.linear(hidden, weight, bias).detach().requires_grad_()
        given = (logits, None, labels)
    alone = token_sums({"nats": nats}, *given)
    both = token_sums({"a": spoils, "nats": nats, "b": spoils, "again": nats}, *given)
    assert both[1] == both[3] == alone[0] != both[0]
    own, _ = own_loss(*given, function=lambda x, y: nats(x.mul_(2.0), y), chunk=4)
    plain, _ = own_loss(*given, function=lambda x, y: nats(x * 2.0, y), chunk=4)
    gradients = [torch.autograd.grad(each, given[0])[0] for each in (own, plain)]
    torch.testing.assert_close(*gradients)


def test_a_metric_that_raises_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    hidden, weight, labels, bias = drawn()
    calls = []

    def raises(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(len(labels))
        raise ValueError("no vocabulary file")

    failed = set[str]()
    given = ({"lab:raises": raises, "lab:nats": nats}, hidden, weight, labels, bias, 4)
    with pytest.raises(RaisedError, match="no vocabulary file"):
        token_sums(*given)
    sums = token_sums(*given, failed)
    assert failed == {"lab:raises"} and sums[0] == 0.0
    assert sums[1] == token_sums({"nats": nats}, hidden, weight, labels, bias, 4)[0]
    assert len(calls) == 2, "once when its error is raised, and once when it is left out"
    (line,) = caplog.messages
    assert line.startswith("eval.metrics=lab:raises raised ValueError: no vocabulary file. It is")


def out_of_memory(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_that_is_used_up_is_no_fault_of_a_function() -> None:
    hidden, weight, labels, _ = drawn()
    with pytest.raises(torch.OutOfMemoryError):
        own_loss(hidden, weight, labels, function=out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        token_sums({"a": out_of_memory}, hidden, weight, labels, failed=set())


def by_place(x: Any, y: Any, z: Any, /) -> Any:
    return x


TRIED: dict[str, tuple[Any, str | None]] = {
    "right": (nats, None),
    "in place": (lambda x, y: nats(x.mul_(2.0), y), None),
    "labels in place": (spoils, "it raised RuntimeError: "),
    "hidden states": (spread, None),
    "of another size": (lambda x, y, hidden: nats(x + hidden, y), "it raised RuntimeError: The si"),
    "fp64": (lambda x, y: nats(x.double(), y), None),
    "a column": (lambda x, y, reward: nats(x, y) * reward.mul_(2.0), None),
    "a column without a name": (by_place, "it raised TypeError: .*position"),
    "one argument": (lambda x: x, "it raised TypeError: .*takes 1 positional"),
    "a sum": (lambda x, y: nats(x, y).sum(), r"a tensor of shape \[4\], and returned \(\)"),
    "a number": (lambda x, y: 1.0, "and returned float"),
    "an array": (lambda x, y: x.detach().numpy()[:, 0], "and returned ndarray"),
    "a wrong name": (lambda x, y: {}["a"], "it raised KeyError: 'a'"),
    "a wrong shape": (lambda x, y: x @ x, "it raised RuntimeError: mat1 and mat2"),
    "detached": (lambda x, y: nats(x.detach(), y), "it is cut off from the logits"),
    "whole numbers": (lambda x, y: (x.argmax(-1) == y).long(), "it is cut off from the logits"),
    "backward": (lambda x, y: nats(x, y).exp_().mul_(2.0).sqrt().exp().mul_(0), "modified by an"),
    "a GPU": (lambda x, y: x.to("cuda"), None),
    "a group": (lambda x, y: torch.distributed.all_reduce(x), None),
}


@pytest.mark.parametrize("case", TRIED)
def test_a_function_is_tried_on_a_few_tokens(case: str) -> None:
    function, why = TRIED[case]
    problem = problem_of("train.loss=lab:f", function, 11, 8, trained=True)
    if why is None:
        assert problem is None
        return
    assert problem is not None and "\n" not in problem
    assert re.match(f"train.loss=lab:f is not usable: .*{why}", problem), problem
    if "cut off" in why:  # a metric needs no gradient
        assert problem_of("eval.metrics=lab:f", function, 11, 8, trained=False) is None


def failing(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    raise ValueError("on this rank")


def test_an_evaluation_has_the_metrics_that_have_failed_on_no_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, weight, labels, bias = drawn()
    names = ["test_train_own_code:failing", "test_train_own_code:nats"]
    head = OutputHead(from_dict({"eval": {"metrics": names}}))
    counts = {"labels": labels.numpy()[None], "target_bytes": np.ones((1, 2, 9))}
    weights = (counts["labels"] != IGNORE).sum(-1)
    batch: Any = SimpleNamespace(**counts, weights=lambda: weights)
    parts: Any = SimpleNamespace(head=head, lm=SimpleNamespace(take_sums=dict))

    def evaluate(engine: Any, batches: Any, measure: Any) -> dict[Any, float]:
        both = [measure(each, 0, head(hidden, weight, labels, bias)) for each in batches]
        return {name: sum(found[name] for found in both) for name in both[0]}

    monkeypatch.setattr(loop, "evaluate", evaluate)
    found = held_out_losses(None, [batch, batch], parts)  # type: ignore[arg-type]
    assert found["eval_metrics"] == {"nats": pytest.approx(found["eval_loss"])}
