"""Check the functions of the user's that a config names, before Ray starts.

digests = code_digests(config, run, problems)      # adds to the problems
problems = code_problems(config, vocabulary=32_000)
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

from rayapp.config import Config
from rayapp.config.code import CodeError, digest_of, load_code
from rayapp.config.code_digest import source_digest
from rayapp.data import sources
from rayapp.observe.status import read_plan
from rayapp.storage import Storage
from rayapp.train.checkpoint.marker import steps_done

STARTED_S = time.time()


def code_digests(config: Config, run: Storage, problems: list[str]) -> dict[str, str]:
    """Return digests of the user's code that changes what is trained, by config field.

    Adds a problem for code that cannot be used, or that has changed since the steps were trained
    that a checkpoint of the run holds.
    """
    name, digests = config.train.loss, dict[str, str]()
    try:
        for field, each in _functions(config):
            _forget_if_edited(each)
            load_code(field, each)
        if name is not None:
            digests["train.loss"] = source_digest("train.loss", name)
    except CodeError as error:
        problems.append(str(error))
        return digests
    if name is None or problems:  # the storage may be one of them
        return digests
    before = read_plan(run).get("code", {}).get("train.loss")
    # An earlier version took the digest of the whole package.
    known = {None, digests["train.loss"], digest_of("train.loss", name)}
    if before not in known and steps_done(run):
        problems.append(
            f"train.loss={name} has changed: it is not the code with which the "
            f"{steps_done(run)} steps of {run.url} were trained. Restore it, or set another "
            "run.name"
        )
    return digests


def code_problems(config: Config, vocabulary: int) -> list[str]:
    """Call each loss and metric on a few tokens, and return why some cannot be used."""
    from rayapp.train.own_code import problem_of

    found = (
        problem_of(f"{field}={name}", load_code(field, name), vocabulary, field == "train.loss")
        for field, name in _functions(config)
    )
    return [problem for problem in found if problem is not None]


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
    loss = [] if config.train.loss is None else [("train.loss", config.train.loss)]
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
