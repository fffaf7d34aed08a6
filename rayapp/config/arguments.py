"""The command line that all commands share: `[CONFIG.yaml] [--section.field=value ...]`.

paths, overrides = split(["run.yaml", "--train.lr=1e-3"])
config, options = read(argv, options={"json": "false"})    # options: --names without a dot
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

import fire

from rayapp.config import KINDS, ConfigError, Described, fields, load


def split(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split a command line with fire into its words and its options, all of them strings."""

    @fire.decorators.SetParseFn(str)
    def collect(*paths: str, **overrides: str) -> tuple[tuple[str, ...], dict[str, str]]:
        return paths, overrides

    paths, overrides = fire.Fire(collect, command=list(argv), serialize=lambda _: None)
    return list(paths), dict(overrides)


def read(
    argv: Sequence[str], options: Mapping[str, str], kind: type[Described] | None = None
) -> tuple[Described, dict[str, str]]:
    """Read a config and the command's own options.

    `options` holds each option's default. `kind` is the class of the config; None takes it from
    `task`.

    Raises:
        ConfigError: with every problem.
    """
    paths, overrides = split(argv)
    problems = []
    if len(paths) > 1:
        problems.append(
            f"{' '.join(paths[1:])} is unexpected: a command reads one config file. "
            "Write --section.field=value"
        )
    own = {name: value for name, value in overrides.items() if not _of_config(name)}
    problems += _unknown(own, options)
    rest = {name: value for name, value in overrides.items() if _of_config(name)}
    try:
        config = load(paths[0] if paths else None, rest, kind)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return config, {**options, **own}


def read_plain(
    argv: Sequence[str], what: str, options: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """Read a command's one word, such as RUN, and its options.

    `what` names the word in messages; empty: the command takes none. `options` holds each option's
    default.

    Raises:
        ConfigError: with every problem.
    """
    words, own = split(argv)
    problems = _unknown(own, options)
    if what and len(words) != 1:
        problems.append(
            f"{what} is missing: the command needs it. Add it"
            if not words
            else (f"{' '.join(words[1:])} is unexpected: the command takes one {what}. Remove it")
        )
    if not what and words:
        problems.append(f"{' '.join(words)} is unexpected: only options are allowed. Remove it")
    if problems:
        raise ConfigError(problems)
    return words[0] if what else "", {**options, **own}


def read_words(argv: Sequence[str], options: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Read any number of words and the options of a command.

    Raises:
        ConfigError: with every problem.
    """
    words, own = split(argv)
    if problems := _unknown(own, options):
        raise ConfigError(problems)
    return words, {**options, **own}


def flags(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """Return argv with each bare `--name` of `names` written as `--name=true`."""
    return [f"{word}=true" if word.removeprefix("--") in names else word for word in argv]


def number(name: str, text: str, *, zero: bool = False, endless: bool = True) -> float:
    """Parse an option's number.

    It must be above 0; `zero` allows 0, `endless` allows infinity.

    Raises:
        ConfigError: the text is not such a number.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if (value > 0 and (endless or value < float("inf"))) or (zero and value == 0):
        return value
    least = "from 0" if zero else "above 0"
    raise ConfigError([f"--{name}={text} is not valid: it must be a number {least}. Set one"])


def whole_number(name: str, text: str, least: int = 1) -> int:
    """Parse an option's whole number.

    Raises:
        ConfigError: the text is not such a number, or below `least`.
    """
    if text.isascii() and text.isdecimal() and int(text) >= least:
        return int(text)
    what = f"it must be a whole number from {least}"
    raise ConfigError([f"--{name}={text} is not valid: {what}. Set one"])


def count(name: str, text: str) -> int:
    """Parse an option's whole number, from 0; see `whole_number`."""
    return whole_number(name, text, 0)


def _fields_named(name: str) -> list[str]:
    """Return the fields of a config whose section is left out in `name`."""
    known = dict.fromkeys(field for kind in KINDS.values() for field in fields(kind))
    return [field for field in known if field.partition(".")[2] == name]


def _of_config(name: str) -> bool:
    return "." in name or name == "task"


def _unknown(own: Mapping[str, str], options: Mapping[str, str]) -> list[str]:
    problems = []
    for name in own:
        if name not in options:
            near = difflib.get_close_matches(name, options, n=1) or _fields_named(name)
            known = f"Known are --{', --'.join(options)}" if options else "Write --section.field"
            hint = f"Did you mean --{near[0]}?" if near else known
            problems.append(
                f"--{name}={own[name]} is unknown: this command has no such option. {hint}"
            )
    return problems
