"""rayapp data: how records become documents, and which of their tokens bear loss."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rayapp.config import Config, arguments
from rayapp.observe.run_folder import Exit

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from rayapp.data.packing import Document
    from rayapp.finetune.preview import Preview

DATA = """rayapp data [CONFIG.yaml] [--section.field=value ...]

Reads the first records of each source, and prints how they are rendered, which tokens bear loss,
what is left out and why, lengths, and how rows are filled. Nothing is trained.

  --show=2     documents that are printed of each source
  --chars=2000 characters that are printed of a document
  --json       print everything as JSON"""

MARKS = "⟦", "⟧"  # around text that bears loss, where there are no colours


def data(argv: list[str]) -> int:
    """Show how records are rendered; see DATA."""
    if "--help" in argv or "-h" in argv:
        print(DATA)
        return Exit.DONE
    known = {"show": "2", "chars": "2000", "json": "false"}
    config, asked = arguments.read(arguments.flags(argv, {"json"}), known, Config)
    shown, chars = (arguments.count(name, asked[name]) for name in ("show", "chars"))
    from rich.console import Console

    from rayapp.driver.main import quieten

    quieten()
    from rayapp.finetune.check import check
    from rayapp.finetune.preview import preview

    found = preview(check(config, None, 0))
    if asked["json"] == "true":
        print(json.dumps([each.as_dict(shown) for each in found], indent=2, ensure_ascii=False))
        return Exit.DONE
    for each in found:
        show(Console(), each, shown, chars)
    return Exit.DONE


def show(console: Console, found: Preview, shown: int, chars: int) -> None:
    """Print a preview."""
    from rich.text import Text

    def say(label: str, text: str) -> None:
        console.print(Text.assemble((f"{label:14}", "bold"), text), soft_wrap=True)

    lengths = found.lengths or [0]
    say("source", f"{found.path}: {found.format}, {found.kind}; the first {found.records} records")
    say(
        "documents",
        f"{len(found.documents)} of {min(lengths)} to {max(lengths)} tokens, "
        f"{found.share_of_loss:.1%} bear loss; {found.duplicates} repeat another",
    )
    over = sum(length > found.seq_len for length in lengths)
    filled = f"{found.rows} of {found.seq_len} tokens, {found.fill:.1%} full"
    say("rows", f"{filled}; {over} documents are longer")
    for why, count in found.bad.items():
        say("unusable", f"{count} {why}, first {found.examples[why]}")
    for what, count in found.notes.items():
        say("left out", f"{count} {what}")
    if found.unused:
        say("not used", f"columns {', '.join(found.unused)}")
    for number, document in enumerate(found.documents[:shown], 1):
        legend = "green" if console.is_terminal else "in brackets"
        console.rule(f"document {number}, what bears loss is {legend}", align="left", style="dim")
        console.print(_rendered(found, document, chars, console.is_terminal), soft_wrap=True)
    console.rule(style="dim")


def _rendered(found: Preview, document: Document, chars: int, colours: bool) -> Text:
    from rich.text import Text

    from rayapp.finetune.preview import runs

    text, left = Text(), chars
    for part, loss in runs(found.tokenizer, document):
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
