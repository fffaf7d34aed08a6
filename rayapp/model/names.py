"""Find parameters by patterns of names, as train.freeze and train.lr_by_name give them.

matching(hf, "model.embed*")             # a tied parameter is found by either of its names
freeze(hf, ("model.embed*",))            # before shard()
lr_factors(hf, {"*.lora_B.*": 16.0})     # {id of a parameter: factor}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel

from rayapp.config import Config
from rayapp.model.build import without_wrappers

MAX_NAMED = 3


def names(hf: PreTrainedModel, *, trained: bool = False) -> dict[str, nn.Parameter]:
    """Return the parameters (only those that are trained) by name, tied ones by each name.

    A weight has its name in the model's files, an adapter's factor its name in peft's files behind
    `base_model.model.`.
    """
    return {
        without_wrappers(name).replace(".default", ""): parameter
        for name, parameter in hf.named_parameters(remove_duplicate=False)
        if parameter.requires_grad or not trained
    }


def matching(hf: PreTrainedModel, pattern: str, *, trained: bool = False) -> list[nn.Parameter]:
    """Return the parameters with a name that the pattern (fnmatch's) matches, each once."""
    every = names(hf, trained=trained).items()
    return list({id(p): p for name, p in every if fnmatchcase(name, pattern)}.values())


def freeze(hf: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Let the parameters with such names have no gradient."""
    for pattern in patterns:
        for parameter in matching(hf, pattern):
            parameter.requires_grad_(False)


def lr_factors(hf: PreTrainedModel, factors: Mapping[str, float]) -> dict[int, float]:
    """Return the factor of the learning rate by the id of a parameter: of the first that matches.

    Parameters that no pattern matches are left out.
    """
    found: dict[int, float] = {}
    for pattern, factor in factors.items():
        for parameter in matching(hf, pattern):
            found.setdefault(id(parameter), factor)
    return found


def described(config: Config, hf: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Freeze what the config says; return what its patterns match, and the problems."""
    told, problems = [], []
    asked = [("freeze", pattern, "freezes") for pattern in config.train.freeze]
    asked += [("lr_by_name", p, f"at {f:g} times lr:") for p, f in config.train.lr_by_name.items()]
    for field, pattern, does in asked:
        found = matching(hf, pattern, trained=True)
        what = f"train.{field}={pattern}"
        freeze(hf, (pattern,) if field == "freeze" else ())
        size = sum(parameter.numel() for parameter in found)
        count = f"{len(found)} tensor{'s' if len(found) != 1 else ''}"
        told.append(f"{what} {does} {count}, {size:,} parameters")
        if not found:
            problems.append(_nothing(what, pattern, hf))
    if config.train.freeze and not problems and not names(hf, trained=True):
        what = f"train.freeze={','.join(config.train.freeze)}"
        problems.append(f"{what} is in conflict: it leaves nothing to train. Freeze fewer")
    return told, problems


def _nothing(what: str, pattern: str, hf: PreTrainedModel) -> str:
    every = list(names(hf, trained=True)) or list(names(hf))
    near = get_close_matches(pattern, every, MAX_NAMED, 0.0)
    return (
        f"{what} is unknown: no trained parameter has such a name. Give a pattern of names such as "
        f"{', '.join(near)}"
    )
