"""Check the functions of the user's that a config names, before Ray starts.

digests = code_digests(config, run, problems)      # adds to the problems
problems = code_problems(config, shape)
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

from rayapp.config import Config
from rayapp.config.code import CodeError, digest_of, load_code
from rayapp.config.code_digest import source_digest
from rayapp.config.fields import LABEL
from rayapp.data import sources
from rayapp.observe.status import read_plan
from rayapp.storage import Storage
from rayapp.train.checkpoint.marker import steps_done

LOSS = "train.loss"
STARTED_S = time.time()


def code_digests(config: Config, run: Storage, problems: list[str]) -> dict[str, str]:
    """Return digests of the user's code that changes what is trained, by config field.

    Adds a problem for code that cannot be used, or that has changed since the steps were trained
    that a checkpoint of the run holds.
    """
    name, digests = config.train.loss, dict[str, str]()
    try:
        scores = ((f"eval.tasks.{n}.score", each.score) for n, each in config.eval.tasks.items())
        for field, each in (*_functions(config), *(s for s in scores if ":" in s[1])):
            _forget_if_edited(each)
            load_code(field, each)
        if name is not None:
            digests[LOSS] = source_digest(LOSS, name)
    except CodeError as error:
        problems.append(str(error))
        return digests
    if name is None or problems:  # the storage may be one of them
        return digests
    before = read_plan(run).get("code", {}).get(LOSS)
    # An earlier version took the digest of the whole package.
    known = {None, digests[LOSS], digest_of(LOSS, name)}
    if before not in known and steps_done(run):
        problems.append(
            f"train.loss={name} has changed: it is not the code with which the "
            f"{steps_done(run)} steps of {run.url} were trained. Restore it, or set another "
            "run.name"
        )
    return digests


def columns_of_loss(config: Config) -> tuple[str, ...]:
    """Return the columns of the records that train.loss or train.objective=kto takes."""
    from rayapp.train.own_code import columns_of

    if config.train.objective == "kto":
        return (config.data.columns.get(LABEL, LABEL),)
    name = config.train.loss
    return () if name is None else columns_of(load_code(LOSS, name))


def code_problems(config: Config, shape: Any) -> list[str]:
    """Call each loss and metric on a few tokens, and return why some cannot be used.

    `shape` is the model's config.
    """
    from rayapp import model
    from rayapp.train.own_code import columns_of, problem_of, takes_hidden

    text, columns = shape.get_text_config(), columns_of_loss(config)
    problems, asking = list[str | None](), list[str]()
    for field, name in _functions(config):
        what, function = f"{field}={name}", load_code(field, name)
        sizes = text.vocab_size, text.hidden_size
        problems.append(problem_of(what, function, *sizes, trained=field == LOSS))
        asking += [what] if takes_hidden(function) else []
        problems += [
            f"{what} is not usable: its parameter {each!r} names a column that train.loss does not "
            "take, so that the rows lack it. Give it a default, or let train.loss take it too"
            for each in columns_of(function)
            if each not in columns
        ]
    if asking and not model.build(shape, loss=model.no_loss, attention="eager").plain_head:
        problems += [
            f"{what} is not available: it has a parameter `hidden`, and {shape.model_type} makes "
            "more of its hidden states than a product with its head. Write it with logits alone"
            for what in asking
        ]
    return [problem for problem in problems if problem is not None]


def as_begun(source: sources.DataSource, run: Storage) -> sources.DataSource:
    """Return a source as the run has begun with it.

    An earlier version identified data.format by its whole package.
    """
    if not sources.is_own(source.format):
        return source
    older = replace(source, version=digest_of("data.format", source.format))
    return older if older.digest() in read_plan(run).get("parts", {}).values() else source


def _functions(config: Config) -> list[tuple[str, str]]:
    """Return (field, name) of the loss and the metrics."""
    loss = [] if config.train.loss is None else [(LOSS, config.train.loss)]
    return [*loss, *(("eval.metrics", name) for name in config.eval.metrics)]


def _forget_if_edited(name: str) -> None:
    """Let a package be imported again that was edited while this process (a notebook's) lives."""
    top = name.partition(":")[0].partition(".")[0]
    if top == __name__.partition(".")[0]:
        return
    mine = {each: sys.modules[each] for each in sys.modules if each.partition(".")[0] == top}
    files = [file for module in mine.values() if (file := getattr(module, "__file__", None))]
    if any(os.path.exists(file) and os.path.getmtime(file) > STARTED_S for file in files):
        for each in mine:
            del sys.modules[each]
