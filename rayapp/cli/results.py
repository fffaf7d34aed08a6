"""rayapp report and generate: what came out of runs, and what a run's model writes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rayapp.config import ConfigError, arguments
from rayapp.observe.run_folder import Exit
from rayapp.observe.status import NoRun
from rayapp.storage import StorageError, open_storage

if TYPE_CHECKING:
    from rayapp.generation import Settings

GIVE_RUN = "Give the folder of a run, <run.storage>/<run.name>"

REPORT = """rayapp report RUN [RUN ...] [--out=FILE]

RUN is a run's folder or s3:// URL. One run: report.html in its folder. Several: one page that
compares them, comparison.html.

  --out=FILE   where to instead"""


def report(argv: list[str]) -> int:
    """Write the report of runs; see REPORT."""
    if "--help" in argv or "-h" in argv or not argv:
        print(REPORT)
        return Exit.DONE if argv else Exit.REFUSED
    from rayapp import report as pages

    runs, asked = arguments.read_words(argv, {"out": "none"})
    if not runs:
        raise ConfigError([f"RUN is missing: there is nothing to report on. {GIVE_RUN}"])
    out = None if asked["out"] == "none" else asked["out"]
    try:
        folders = [open_storage(run) for run in runs]
        if len(folders) == 1:
            print(pages.write(folders[0], out))
        else:
            print(pages.compare(folders, out or "comparison.html"))
    except NoRun as error:
        raise ConfigError([f"RUN={error}. {GIVE_RUN}"]) from None
    except StorageError as error:
        print(f"failed: {error}", file=sys.stderr)
        return Exit.FAILED
    return Exit.DONE


GENERATE = """rayapp generate RUN [--prompt=TEXT] [--option=value ...]

RUN is a run's folder or s3:// URL. Without --prompt each line of the standard input is one; in a
terminal that is a conversation, which Ctrl-D ends.

  --max_tokens=256     most that it writes
  --temperature=0.7    0 takes the likeliest token each time
  --chat               through the tokenizer's chat template, as a run on chats does by itself;
                       --chat=false does not"""


def generate(argv: list[str]) -> int:
    """Let a run's model write; see GENERATE."""
    if "--help" in argv or "-h" in argv or not argv:
        print(GENERATE)
        return Exit.DONE if argv else Exit.REFUSED
    from rayapp import generation

    known = {"prompt": "", "max_tokens": "256", "temperature": "0.7", "chat": "none"}
    run, asked = arguments.read_plain(arguments.flags(argv, ["chat"]), "RUN", known)
    settings = _settings(**asked)
    try:
        with generation.load(run) as model:
            generation.talk(model, settings)
    except KeyboardInterrupt:
        print()
    except StorageError as error:
        print(f"failed: {error}", file=sys.stderr)
        return Exit.FAILED
    return Exit.DONE


def _settings(max_tokens: str, temperature: str, chat: str, prompt: str) -> Settings:
    """Return the settings of generation from the texts of the options.

    Raises:
        ConfigError: with every problem.
    """
    from rayapp.generation import Settings

    problems, chats = [], {"none": None, "true": True, "false": False}
    if not max_tokens.isdecimal() or int(max_tokens) == 0:
        problems.append(
            f"--max_tokens={max_tokens} is not valid: it must be a count above 0. Set 256"
        )
    try:
        heat = float(temperature)
    except ValueError:
        heat = -1.0
    if not 0 <= heat < float("inf"):
        problems.append(f"--temperature={temperature} is not valid: it must be 0 or above. Set 0.7")
    if chat.lower() not in chats:
        problems.append(f"--chat={chat} is not valid: it must be true or false. Leave it out")
    if problems:
        raise ConfigError(problems)
    return Settings(int(max_tokens), heat, chats[chat.lower()], prompt)
