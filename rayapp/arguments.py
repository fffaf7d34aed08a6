"""The command line that all commands share: `[CONFIG.yaml] [--section.field=value ...]`.

paths, overrides = split(["run.yaml", "--train.lr=1e-3"])
config, options = read(argv, options={"json": "false"})    # options: --names without a dot
runs, options = words(argv, options={"out": "none"})       # a command without a config
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import fire

from rayapp.config import Config, ConfigError, load


def split(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return (what stands alone, what is set); fire reads it, every value stays a string."""

    @fire.decorators.SetParseFn(str)
    def collect(*paths: str, **overrides: str) -> tuple[tuple[str, ...], dict[str, str]]:
        return paths, overrides

    paths, overrides = fire.Fire(collect, command=list(argv), serialize=lambda _: None)
    return list(paths), dict(overrides)


def read(argv: Sequence[str], options: Mapping[str, str]) -> tuple[Config, dict[str, str]]:
    """Return the config and the command's own options, by default as given.

    Raises:
        ConfigError: with every problem.
    """
    paths, overrides = split(argv)
    problems = []
    if len(paths) > 1:
        problems.append(
            f"{' '.join(paths[1:])} is unexpected: one config file is read. "
            "Write --section.field=value"
        )
    own = {name: value for name, value in overrides.items() if "." not in name}
    problems += _unknown(own, options)
    rest = {name: value for name, value in overrides.items() if "." in name}
    try:
        config = load(paths[0] if paths else None, rest)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return config, {**options, **own}


def words(argv: Sequence[str], options: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return what stands alone, and the command's options, by default as given.

    Raises:
        ConfigError: with every option that is unknown.
    """
    alone, own = split(argv)
    if problems := _unknown(own, options):
        raise ConfigError(problems)
    return alone, {**options, **own}


def _unknown(own: Mapping[str, str], options: Mapping[str, str]) -> list[str]:
    problems = []
    for name in [name for name in own if name not in options]:
        near = difflib.get_close_matches(name, options, n=1)
        hint = f"Did you mean --{near[0]}?" if near else f"Known are --{', --'.join(options)}"
        problems.append(f"--{name}={own[name]} is unknown: it is no option here. {hint}")
    return problems
