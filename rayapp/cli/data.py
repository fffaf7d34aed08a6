"""rayapp data and prepare: what records become, and the rows of a run made before it starts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rayapp.cli import documented
from rayapp.config import Config, arguments
from rayapp.observe.run_folder import Exit

if TYPE_CHECKING:
    from rich.text import Text

    from rayapp.data.packing import Document
    from rayapp.data.prepared import Prepared
    from rayapp.finetune.preview import Preview
    from rayapp.observe.plain import Console

DATA = """rayapp data [CONFIG.yaml] [--section.field=value ...]

Reads the first records of each source, and prints how they are rendered, which tokens bear loss,
what is left out and why, lengths, and how rows are filled; of eval.tasks the items with an empty
answer, and those that are asked in the data too. Nothing is trained.

  --show=2     number of documents to print of each source
  --chars=2000 maximum number of characters to print of a document
  --json       print everything as JSON"""

PREPARE = """rayapp prepare [CONFIG.yaml] [--section.field=value ...]

Tokenises and packs the data of a run before the run, on CPUs only: here, or on the Ray cluster
that cluster.address names. `rayapp finetune` with the same config then starts with these rows. If
the command is killed, the same command continues its work."""


@documented(DATA)
def data(argv: list[str]) -> int:
    """Show how records are rendered; see DATA."""
    known = {"show": "2", "chars": "2000", "json": "false"}
    config, asked = arguments.read(arguments.flags(argv, {"json"}), known, Config)
    shown, chars = (arguments.count(name, asked[name]) for name in ("show", "chars"))
    from rayapp.finetune.check import check
    from rayapp.finetune.preview import preview, task_previews
    from rayapp.observe.plain import Console

    ready = check(config, None, 0)
    previews, tasks = preview(ready), task_previews(ready)
    if asked["json"] == "true":
        values = [*(each.as_dict(shown) for each in previews), *tasks]
        print(json.dumps(values, indent=2, ensure_ascii=False))
        return Exit.DONE
    for each in previews:
        show(Console(), each, shown, chars)
    for task in tasks:
        print(f"{'task':14}{task['name']}: {task['path']}: {task['items']} items")
        for what, key in (("an empty answer", "empty"), ("in the data too", "trained")):
            if places := task[key]:
                print(f"{what} {len(places)} of {task['items']}, first {', '.join(places[:3])}")
    return Exit.DONE


@documented(PREPARE)
def prepare(argv: list[str]) -> int:
    """Prepare the rows of a run; see PREPARE."""
    config, _ = arguments.read(argv, {}, Config)
    from rayapp.driver.heartbeat import Heartbeat
    from rayapp.driver.output import captured
    from rayapp.driver.ray_session import connected, tell_ray
    from rayapp.jobs import secrets
    from rayapp.jobs.client import ray_address
    from rayapp.observe.activity import Phases
    from rayapp.observe.plain import Console

    tell_ray()
    from rayapp.finetune.check import check
    from rayapp.finetune.prepared_run import prepare_beforehand

    phases = Phases()
    with captured() as tail:
        secrets.load()
        with Heartbeat(phases, Console(force_jupyter=False), tail):
            phases.begin("checking config, model and data")
            ready = check(config, None, 0)
            address = ray_address(config)
            phases.begin(f"starting Ray ({address})")
            # Of the cluster only CPUs are asked for: those of the tasks.
            fields = {"workers": "1", "gpu": "false", "resources": {}}
            with connected(ready.config.with_fields("cluster", **fields), address):
                prepared = prepare_beforehand(ready, phases)
                phases.begin("")
    print(summary(prepared))
    return Exit.DONE


def summary(prepared: Prepared) -> str:
    """Return a line about rows that are prepared."""
    counts = prepared.counts["train"]
    known, every = sum(prepared.known), sum(prepared.windows)
    windows = f", {known} of {every} windows" if every else ""
    return (
        f"prepared: {counts['documents']:,} documents, {counts['tokens']:,} tokens -> "
        f"{counts['rows']:,} rows{windows}, {prepared.held_out:,} held out, in {prepared.url}"
    )


def show(console: Console, preview: Preview, shown: int, chars: int) -> None:
    """Print a preview."""
    from rich.text import Text

    def say(label: str, text: str) -> None:
        console.print(Text.assemble((f"{label:14}", "bold"), text), soft_wrap=True)

    lengths = preview.lengths or [0]
    entry, seq_len = preview.entry, preview.packed.layout.seq_len
    read = f"{entry.source.format}, {entry.kind}; the first {preview.records} records"
    say("source", f"{entry.path}: {read}")
    sizes = f"{len(preview.documents)} of {min(lengths)} to {max(lengths)} tokens"
    share = f"{preview.share_of_loss:.1%} bear loss; {preview.duplicates} repeat another"
    say("documents", f"{sizes}, {share}")
    over = sum(length > seq_len for length in lengths)
    filled = f"{len(preview.packed.rows)} of {seq_len} tokens, {preview.packed.fill:.1%} full"
    say("rows", f"{filled}; {over} documents are longer")
    for line in preview.ends:
        say("ends", line)
    for why, count in preview.bad.items():
        say("unusable", f"{count} {why}, first {preview.examples[why]}")
    for what, count in preview.notes.items():
        say("noted", f"{count} {what}")
    if entry.unused:
        say("not used", f"columns {', '.join(entry.unused)}")
    for number, document in enumerate(preview.documents[:shown], 1):
        legend = "green" if console.is_terminal else "in brackets"
        role = f" ({preview.roles[number - 1]})" if preview.roles else ""
        title = f"document {number}{role}, what bears loss is {legend}"
        console.rule(title, align="left", style="dim")
        console.print(_rendered(preview, document, chars, console.is_terminal), soft_wrap=True)
    console.rule(style="dim")


def _rendered(preview: Preview, document: Document, chars: int, colours: bool) -> Text:
    from rich.text import Text

    from rayapp.finetune.plan_lines import MARKS
    from rayapp.finetune.preview import runs

    text, left = Text(), chars
    for part, loss in runs(preview.tokenizer, document):
        part, rest = part[:left], part[left:]
        left -= len(part)
        if loss and not colours:
            text.append(part.join(MARKS))
        else:
            text.append(part, "green" if loss else "dim")
        if rest:
            text.append(" ... (more: --chars)")
            break
    return text
