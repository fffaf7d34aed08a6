"""Resolve what a run starts from: an adapter that another run, or peft, has exported.

config, problems = with_adapter(config, model.resolve(config.model.path))
"""

from __future__ import annotations

from rayapp import model
from rayapp.config import Config, Lora, combined_problems
from rayapp.model.adapter import Adapter
from rayapp.model.source import TOKENIZER_FILE


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
        problem = _merge_problem(config.model.lora)
        problems = [problem] if problem else []
    else:
        lora = config.model.lora or adapter.lora
        problems = _changes(lora, adapter, source)
        fields["lora"] = lora
    problems += model.adapter_problems(adapter, source.config)
    names = [entry.name for entry in adapter.folder.list()]
    if config.model.tokenizer is None and not any(map(TOKENIZER_FILE.match, names)):
        fields["tokenizer"] = adapter.base
    section = config.model.model_copy(update=fields)
    config = config.model_copy(update={"model": section})
    return config, problems + combined_problems(config)


def _merge_problem(lora: Lora | None) -> str | None:
    """Return why new adapters cannot be trained on a merged adapter; None if they can."""
    if lora is None:
        return None
    if lora.quantize != "none":
        return (
            f"model.lora.quantize={lora.quantize} is in conflict: model.adapter=merge changes the "
            "weights that would be held in 4 bits. Set model.lora.quantize=none"
        )
    if not lora.merge:
        return (
            "model.lora.merge=false is in conflict: with model.adapter=merge no folder holds the "
            "base of the new adapters. Set model.lora.merge=true"
        )
    return None


def _changes(lora: Lora, adapter: Adapter, source: model.ModelSource) -> list[str]:
    """Name the settings of model.lora that would make other adapters of those in the folder."""
    every = set()
    if not lora.targets:
        shape = model.build(source.config, loss=model.no_loss, attention="eager")
        every = set(model.linear_names(shape.hf))
    own = adapter.lora
    asked = {
        "rank": (lora.rank, own.rank, own.rank == lora.rank),
        "alpha": (lora.alpha, own.alpha, own.alpha == lora.alpha),
        "targets": (
            ",".join(lora.targets) or "all",
            ",".join(own.targets),
            set(own.targets) == (set(lora.targets) or every),
        ),
    }
    return [
        f"model.lora.{name}={mine} is in conflict: the adapter model.path={adapter.name} has "
        f"{theirs}. Set model.lora.{name}={theirs}, leave model.lora out, or set "
        "model.adapter=merge to train anew on the merged model"
        for name, (mine, theirs, same) in asked.items()
        if not same
    ]
