"""Resolve what a run starts from: an exported adapter, or a checkpoint of another run.

config, problems = with_adapter(config, model.resolve(config.model.path))
config, problems = with_origin(config, run, preset=False)
"""

from __future__ import annotations

import os
from typing import Any

from rayapp import model
from rayapp.config import Config, Lora, Origin, combined_problems
from rayapp.config.text import shown
from rayapp.data import tokens
from rayapp.finetune.model_parts import model_shape
from rayapp.model.adapter import Adapter
from rayapp.model.lora_layers import linear_names
from rayapp.model.new_tokens import rows_problem
from rayapp.model.source import TOKENIZER_FILE
from rayapp.model.weights import misfits_of
from rayapp.observe.run_folder import MODEL, PLAN
from rayapp.observe.status import read_plan, read_sections
from rayapp.storage import Storage, StorageError, open_storage
from rayapp.train.checkpoint.marker import CheckpointError, find, steps_done
from rayapp.train.checkpoint.state import saved_shapes

MAX_NAMED = 3


def with_adapter(config: Config, source: model.ModelSource) -> tuple[Config, list[str]]:
    """Return the config with the settings of the adapter that model.path names, and problems.

    A config whose path is a whole model is returned as it is.
    """
    adapter = source.adapter
    if adapter is None:
        if config.model.adapter == "merge":
            return config, [
                f"model.adapter=merge is in conflict: model.path={config.model.path} is no "
                "adapter. Leave it out"
            ]
        return config, []
    if config.model.from_scratch:
        return config, [
            f"model.from_scratch=true is in conflict: model.path={config.model.path} is an adapter "
            f"of {adapter.base}, which has weights. Set model.from_scratch=false"
        ]
    fields: dict[str, object] = {}
    if config.model.adapter == "merge":
        problems = _merge_problems(config.model.lora)
    else:
        lora = config.model.lora or adapter.lora
        problems = _changes(lora, adapter, source)
        fields["lora"] = lora
    problems += model.adapter_problems(adapter, source.config)
    names = [entry.name for entry in adapter.folder.list()]
    if config.model.tokenizer is None and not any(map(TOKENIZER_FILE.match, names)):
        fields["tokenizer"] = adapter.base
    config = config.with_fields("model", **fields)
    return config, problems + combined_problems(config)


def _merge_problems(lora: Lora | None) -> list[str]:
    """Return why new adapters cannot be trained on a merged adapter."""
    if lora is not None and lora.quantize != "none":
        return [
            f"model.lora.quantize={lora.quantize} is in conflict: model.adapter=merge changes the "
            "weights that would be held in 4 bits. Set model.lora.quantize=none"
        ]
    if lora is not None and not lora.merge:
        return [
            "model.lora.merge=false is in conflict: with model.adapter=merge no folder holds the "
            "base of the new adapters. Set model.lora.merge=true"
        ]
    return []


def with_new_tokens(
    config: Config, source: model.ModelSource, tokenizer: Any, problems: list[str]
) -> tuple[Config, Any]:
    """Return the config and the tokenizer with model.new_tokens, and append to `problems`.

    Tokens of an adapter that training goes on with are the config's.
    """
    names, adapter = config.model.new_tokens, source.adapter
    what = f"model.new_tokens={shown(list(names))}"
    if adapter is not None and config.model.adapter == "train" and (names or adapter.tokens):
        own = tuple(tokenizer.convert_ids_to_tokens(list(adapter.tokens))) if tokenizer else (None,)
        if None in own:
            problems.append(
                f"model.path={config.model.path} has rows of tokens that its tokenizer lacks. Set "
                "model.tokenizer to the one that the adapter was trained with"
            )
        elif names not in ((), own):
            problems.append(
                f"{what} is in conflict: the adapter model.path={config.model.path} has "
                f"{shown(list(own))}. Leave it out, or set model.adapter=merge to add them to the "
                "merged model"
            )
        return config.with_fields("model", new_tokens=own), tokenizer
    if not names:
        return config, tokenizer
    known = tokenizer.get_vocab() if tokenizer is not None and tokenizer.is_fast else None
    if known is None:
        problems.append(
            f"{what} is in conflict: the tokenizer is made for this run, or has no tokenizer.json, "
            "so that nothing can be added to it. Set model.tokenizer to a folder that has one"
        )
    elif there := [f"{name} ({known[name]})" for name in names if name in known]:
        problems.append(
            f"{what} is in conflict: the tokenizer has {', '.join(there)}. Leave out what is there"
        )
    else:
        tokenizer = tokens.with_tokens(tokenizer, names)
        if not all(tokens.pieces(tokenizer, names).values()):
            problems.append(f"{what} is not valid: the tokenizer drops such text. Set other texts")
        problems += _rows_problems(config, source, tokens.num_ids(tokenizer))
    return config, tokenizer


def _rows_problems(config: Config, source: model.ModelSource, size: int) -> list[str]:
    """Return why the model cannot have rows for a tokenizer of that size."""
    shape = model_shape(source, config, size)
    hf = model.build(shape, loss=model.no_loss, attention="eager").hf
    problems = list[str]()
    if source.storage is not None and not config.model.from_scratch:
        problems = misfits_of(hf, source, grown=True)
    lora = config.model.lora
    if lora is not None and (why := rows_problem(hf, merge=lora.merge)):
        what = f"model.new_tokens={shown(list(config.model.new_tokens))}"
        problems.append(f"{what} is not available with model.lora: {why}")
    return problems


def _changes(lora: Lora, adapter: Adapter, source: model.ModelSource) -> list[str]:
    """Name the settings of model.lora that would make other adapters of those in the folder."""
    every = set()
    if not lora.targets:
        shape = model.build(source.config, loss=model.no_loss, attention="eager")
        every = set(linear_names(shape.hf))
    own, found = adapter.lora, list[str]()
    asked = {"rank": lora.rank == own.rank, "alpha": lora.alpha == own.alpha}
    asked |= {"dora": lora.dora == own.dora, "rslora": lora.rslora == own.rslora}
    asked["targets"] = (set(lora.targets) or every) == set(own.targets)
    asked["target_parameters"] = set(lora.target_parameters) == set(own.target_parameters)
    for name in (name for name, same in asked.items() if not same):
        mine, theirs = (_told(getattr(each, name)) for each in (lora, own))
        mine = "all" if name == "targets" and not lora.targets else mine
        found.append(
            f"model.lora.{name}={mine} is in conflict: the adapter model.path={adapter.name} has "
            f"{theirs}. Set model.lora.{name}={theirs}, leave model.lora out, or set "
            "model.adapter=merge to train anew on the merged model"
        )
    return found


def _told(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value).lower()


def with_origin(config: Config, run: Storage, preset: bool) -> tuple[Config, list[str]]:
    """Return the config with the URL and step of the checkpoint in model.init_from, and problems.

    The checkpoint is chosen once: a run that has begun keeps it. A preset, which has no tokenizer,
    gets that of the other run.
    """
    origin = config.origin
    if origin is None:
        return config, []
    own = (read_sections(run) or {}).get("model", {})
    fields: dict[str, object] = {}
    try:
        begun = Origin.parse(own.get("init_from") or "")
        chosen = _chosen(origin, config.run.storage, begun)
        other = open_storage(chosen.run)
        problems = [] if steps_done(run) else _differences(config, other, chosen)
        if preset and config.model.tokenizer is None:
            if chosen == begun:
                fields |= {name: own[name] for name in ("tokenizer", "overrides")}
            else:
                fields |= _made(config, other)
    except (StorageError, CheckpointError, ValueError) as error:
        return config, [f"model.init_from={origin} is not usable: {error}"]
    if (config.model.tokenizer or "").startswith("bpe:"):
        problems.append(
            f"model.tokenizer={config.model.tokenizer} is in conflict: the weights of "
            f"model.init_from={chosen} know the tokens of their own tokenizer. Leave it out"
        )
    return config.with_fields("model", init_from=str(chosen), **fields), problems


def _made(config: Config, run: Storage) -> dict[str, object]:
    """Return the tokenizer of a run on a preset, and its size as that of the vocabulary."""
    plan = read_plan(run)
    if "vocabulary" not in plan:
        raise ValueError(f"{run.url}/{PLAN} names no tokenizer. Set model.tokenizer to that run's")
    overrides = {"vocab_size": plan["vocabulary"], **config.model.overrides}
    return {"tokenizer": plan["tokenizer"], "overrides": overrides}


def _chosen(origin: Origin, storage: str, begun: Origin) -> Origin:
    """Return the URL of the named run, with the step of its checkpoint.

    `begun` is what this run has started with, if it has begun.

    Raises: CheckpointError, ValueError: there is no such run or checkpoint.
    """
    where = os.path.expanduser(origin.run)
    if "/" not in where and not os.path.isdir(where):
        where = f"{storage.rstrip('/')}/{where}"
    other = open_storage(where)
    if begun.run == other.url and origin.step in (None, begun.step):
        return begun
    if read_sections(other) is None:
        raise ValueError(f"{other.url} holds no run. Give the folder of a run, or its name")
    try:
        return Origin(other.url, find(other, origin.step).step)
    except CheckpointError as error:
        where = "" if other.url == origin.run else f"in {other.url}, "
        raise CheckpointError(f"{where}{error}") from error


def _differences(config: Config, run: Storage, origin: Origin) -> list[str]:
    """Name what makes the other run's weights those of another model, as the two configs say."""
    sections = read_sections(run) or {}
    theirs: dict[str, Any] = sections.get("model", {})
    lora, other = config.model.lora, theirs.get("lora")
    of = f"model.init_from={origin} is of another model"
    if (lora is None) != (other is None):
        trained = "all weights" if other is None else "adapters alone"
        return [f"{of}: it trained {trained}. Set model.path={origin.run}/{MODEL} instead"]
    if lora is None or other is None:
        return []
    # The frozen weights are in no checkpoint, so that they must come from the same place.
    mine = {name: getattr(config.model, name) for name in ("path", "adapter", "from_scratch")}
    size = {"vocab_size": None}  # told by the tensors' shapes
    mine["overrides"] = {**config.model.overrides, **size}
    mine["new_tokens"] = list(config.model.new_tokens)
    there = theirs | {"overrides": {**theirs.get("overrides", {}), **size}}
    changed = [name for name in mine if name in theirs and there[name] != mine[name]]
    wrong = [f"Set model.{name}={theirs[name]}" for name in changed]
    if other.get("alpha") != lora.alpha:
        wrong.append(f"Set model.lora.alpha={other.get('alpha')}")
    random = model.resolve(config.model.path).preset or config.model.from_scratch
    seed = sections.get("run", {}).get("seed")
    if random and seed != config.run.seed:
        wrong.append(f"Set run.seed={seed}, with which its frozen weights were drawn")
    return [f"{of}: it trained adapters on another base. {'; '.join(wrong)}"] if wrong else []


def shape_problem(config: Config, run: Storage, shape: Any) -> str | None:
    """Return why the checkpoint in model.init_from does not fill a model of this shape, or None."""
    origin = config.origin
    if origin is None or steps_done(run):
        return None
    storage = open_storage(origin.run)
    try:
        saved = saved_shapes(storage, find(storage, origin.step).name)
    except CheckpointError as error:
        return f"model.init_from={origin} is not usable: {error}. Set another step of it, or run"
    lm = model.build(shape, loss=model.no_loss, attention="eager")
    if config.model.lora is not None:
        model.add_adapters(lm, config.model.lora, range(len(config.model.new_tokens)))
    wanted = {
        f"model.{name}": tuple(p.shape) for name, p in lm.named_parameters() if p.requires_grad
    }
    wrong = [
        f"{name.removeprefix('model.hf.')} is {list(saved.get(name) or ()) or 'absent'} there and "
        f"{list(size)} here"
        for name, size in sorted(wanted.items())
        if saved.get(name) != size
    ]
    if not wrong:
        return None
    more = f" and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
    return (
        f"model.init_from={origin} is of another model: {'; '.join(wrong[:MAX_NAMED])}{more}. "
        "Set the model.path, model.overrides, model.tokenizer and model.lora of that run"
    )
