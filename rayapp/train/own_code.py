"""Losses and metrics of the user's, computed token by token in chunks (docs/own_code.md).

    problem = problem_of("train.loss=mine.code:focal", function, 32_000, 4096, trained=True)
    objective, loss = own_loss(hidden, weight, labels, function=load_code("train.loss", name))
    sums = token_sums({"accuracy": function}, hidden, weight, labels)

A function sees the tokens that bear loss, at most `chunk` at once: logits float32 [c, V] and labels
int64 [c], and, if a parameter of it is named so, hidden states float32 [c, H]. Each further
parameter without a default names a column of the records: float32 [c] has the number of the record
that the token is of. It may write to all of them. It returns one number a token, float [c], so that
its sum does not depend on how rows are spread over micro-batches and workers.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeAlias

import torch
from torch.utils.checkpoint import checkpoint

from rayapp.observe.words import last_line
from rayapp.train.loss import IGNORE

TRIED_TOKENS = 4
HIDDEN = "hidden"  # the name of the parameter that is given the hidden states
# In the errors of a function that needs what a driver lacks: a GPU, or the group of the workers.
OF_WORKERS = re.compile("cuda|nvidia|triton|process group", re.IGNORECASE)

Columns: TypeAlias = Mapping[str, torch.Tensor]  # by name: a number for each token, float32
NO_COLUMNS: Columns = {}

logger = logging.getLogger("rayapp.training")


class UnusableCode(ValueError):
    """A function of the user's fails at each call; the message names its field."""


class RaisedError(RuntimeError):
    """A function of the user's has raised an error; the message names its field."""


class TokenFunction(Protocol):
    """What train.loss and eval.metrics name."""

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, /, **more: torch.Tensor
    ) -> torch.Tensor:
        """Return one number a token, [c], of logits float32 [c, V] and labels int64 [c].

        A function with a parameter `hidden` is given the hidden states too, float32 [c, H], and
        float32 [c] for each parameter that names a column of the records.
        """
        ...


def takes_hidden(function: TokenFunction) -> bool:
    """Return whether a function has a parameter that is named `hidden`."""
    return any(parameter.name == HIDDEN for parameter in _parameters(function))


def columns_of(function: TokenFunction) -> tuple[str, ...]:
    """Return the columns of the records that a function asks for, sorted.

    They are its parameters after logits and labels that have no default, but for `hidden`.
    """
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = (p for p in _parameters(function)[2:] if p.default is p.empty)
    return tuple(sorted(p.name for p in needed if p.kind not in several and p.name != HIDDEN))


def _parameters(function: TokenFunction) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # written in C
        return []


def problem_of(
    what: str, function: TokenFunction, vocabulary: int, width: int, trained: bool
) -> str | None:
    """Call a function on a few tokens, and return why it cannot be used; None if nothing is wrong.

    What is `trained` is differentiated too. `width` is the size of the hidden states.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TRIED_TOKENS, vocabulary, generator=generator, requires_grad=trained)
    hidden = torch.randn(TRIED_TOKENS, width, generator=generator, requires_grad=trained)
    labels = torch.randint(vocabulary, (TRIED_TOKENS,), generator=generator)
    columns = dict.fromkeys(columns_of(function), torch.ones(TRIED_TOKENS))
    try:
        values = _of_tokens(what, function, logits.clone(), labels, hidden, columns)
        if trained and not values.requires_grad:
            return (
                f"{what} is not usable: it is cut off from the logits, so that it has no gradient "
                "and nothing would be trained. Leave out detach, item, numpy, argmax and no_grad"
            )
        if trained:
            values.sum().backward()
    except Exception as error:  # the user's code may raise anything
        return None if OF_WORKERS.search(str(error)) else _named(what, error)
    return None


def own_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    function: TokenFunction,
    what: str = "train.loss",
    chunk: int = 4096,
    each: torch.Tensor | None = None,
    columns: Columns = NO_COLUMNS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (objective, cross-entropy), sums over labels that are not IGNORE; fp32 scalars.

    Shapes: hidden [..., H], weight [V, H], labels [...], bias [V]; without a weight, `hidden` holds
    the logits [..., V]. The backward pass computes each chunk's logits again, so that at most
    `chunk * V` exist at once. `each`, zeros fp32 [labels], is filled with the cross-entropy of
    each label. `columns` hold a number for each label, in the order of `labels`.

    Raises:
        UnusableCode: the function does not return a number a token, or takes other arguments.
        RaisedError: it raises another error.
    """

    def of_chunk(
        part: torch.Tensor, wanted: torch.Tensor, of: Columns, *head: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = _logits(part, *head)
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        return _of_tokens(what, function, logits, wanted, part, of).sum(), loss

    objective, loss = 0.0 * hidden.sum(dtype=torch.float32), hidden.new_zeros((), dtype=torch.float)
    all_of_them = []
    for some in _chunks(hidden, labels, columns, chunk):
        more, of_labels = checkpoint(of_chunk, *some, weight, bias, use_reentrant=False)
        objective, loss = objective + more, loss + of_labels.sum()
        all_of_them.append(of_labels)
    if each is not None and all_of_them:
        each[labels.reshape(-1) != IGNORE] = torch.cat(all_of_them)
    return objective, loss


@torch.no_grad()
def token_sums(
    functions: Mapping[str, TokenFunction],
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    chunk: int = 4096,
    failed: set[str] | None = None,
    columns: Columns = NO_COLUMNS,
) -> torch.Tensor:
    """Return each function's sum over labels that are not IGNORE, fp64 [functions].

    A function that cannot be used is logged, joins `failed` and is not called again; without
    `failed` its error is raised.
    """
    sums = torch.zeros(len(functions), dtype=torch.float64)
    for part, wanted, of in _chunks(hidden, labels, columns, chunk):
        logits = _logits(part, weight, bias)
        for place, (name, function) in enumerate(functions.items()):
            if name in (failed or ()):
                continue
            if logits._version:  # the function before has written to them
                logits = _logits(part, weight, bias)
            try:
                values = _of_tokens(f"eval.metrics={name}", function, logits, wanted, part, of)
                sums[place] += float(values.sum())
            except (UnusableCode, RaisedError) as error:
                if failed is None:
                    raise
                failed.add(name)
                logger.warning("%s. It is left out of the evaluations", error, exc_info=error)
    return sums


def _chunks(
    hidden: torch.Tensor, labels: torch.Tensor, columns: Columns, chunk: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Columns]]:
    """Yield (hidden [c, H], labels [c], columns [c]) of the tokens that bear loss."""
    flat = labels.reshape(-1)
    bears = flat != IGNORE
    hidden, flat = hidden.reshape(len(flat), hidden.shape[-1])[bears], flat[bears]
    columns = {name: column.reshape(-1)[bears] for name, column in columns.items()}
    size = chunk or max(len(flat), 1)
    for start in range(0, len(flat), size):
        part = slice(start, start + size)
        yield hidden[part], flat[part], {name: each[part] for name, each in columns.items()}


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return new logits, fp32."""
    if weight is None:
        return hidden.to(torch.float32, copy=True)
    return torch.nn.functional.linear(hidden, weight, bias).float()


def _of_tokens(
    what: str,
    function: TokenFunction,
    logits: torch.Tensor,
    labels: torch.Tensor,
    hidden: torch.Tensor,
    columns: Columns,
) -> torch.Tensor:
    more = {name: columns[name].clone() for name in columns_of(function)}
    more |= {HIDDEN: hidden.to(torch.float32, copy=True)} if takes_hidden(function) else {}
    try:
        values = function(logits, labels.clone(), **more)
    except TypeError as error:
        raise UnusableCode(_named(what, error)) from error
    except Exception as error:  # the user's code may raise anything
        # torch's own: out of memory, or the end of what a backward pass computes again.
        if isinstance(error, MemoryError) or type(error).__module__.partition(".")[0] == "torch":
            raise
        raise RaisedError(f"{what} raised {type(error).__name__}: {last_line(error)}") from error
    if not isinstance(values, torch.Tensor) or values.shape != labels.shape:
        shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise UnusableCode(
            f"{what} is not usable: it must return one number a token, a tensor of shape "
            f"[{len(labels)}], and returned {shape}. Return it without a sum or mean over tokens"
        )
    return values.float()


def _named(what: str, error: Exception) -> str:
    """Return the error of a call, with the field that names the function."""
    if isinstance(error, UnusableCode):
        return str(error)
    if isinstance(error, RaisedError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return f"{what} is not usable: it raised {type(error).__name__}: {last_line(error)}"
