"""docs/configuration.md, made of the typed config."""

from __future__ import annotations

import re

from pydantic.fields import FieldInfo

from rayapp.config import KINDS
from rayapp.config.help import default_of, form_of, limits_of, section_of

HEAD = """# Configuration

Every field of a config, made of the code. A YAML file has the sections as keys; on the command line
a field is `--section.field=value`, which wins over the file. `rayapp finetune --help SECTION`
prints the same, and `rayapp init` writes a config with all fields. What is not valid is refused
before anything starts, every problem at once.
"""
KIND_HEADS = {"finetune": "Language models", "vision": "Image classifiers"}


def reference() -> str:
    """Return the page of all fields: those of language models, then what images have instead."""
    parts, seen = [HEAD], set[str]()
    for kind in KINDS.values():
        command = kind.MODULE.rpartition(".")[2]
        parts.append(f"\n## {KIND_HEADS[command]}: `rayapp {command}`\n")
        for section, info in kind.model_fields.items():
            table = _table(section, info)
            if section_of(info) is None:
                continue
            same = table in seen
            parts.append(f"\n### {command}: {section}\n\n{'As above.' if same else table}\n")
            seen.add(table)
    return "".join(parts)


def _table(section: str, info: FieldInfo) -> str:
    rows = ["| field | values | default | |", "|---|---|---|---|"]
    rows += _rows(section, info)
    return "\n".join(rows)


def _cell(text: str) -> str:
    """Write the pipes of a table's cell so that every reader of Markdown takes them for text."""
    escape = str.maketrans({"|": "&#124;", "<": "&lt;", ">": "&gt;"})
    parts = re.split(r"`([^`]*\|[^`]*)`", text)
    parts[1::2] = [f"<code>{part.translate(escape)}</code>" for part in parts[1::2]]
    return "".join(parts).replace("|", "&#124;")


def _rows(prefix: str, section: FieldInfo) -> list[str]:
    rows, model = [], section_of(section)
    for name, info in model.model_fields.items() if model else ():
        field, inner = f"{prefix}.{name}", section_of(info)
        values = form_of(name, info).split("|")
        form = "a section, or `none`" if inner else ", ".join(f"`{value}`" for value in values)
        limits = limits_of(info)
        cells = [
            f"`{field}`",
            f"{form}{'; ' if limits else ''}{limits}",
            f"`{default_of(name, info)}`",
            " ".join((info.description or "").split()),
        ]
        rows.append("| " + " | ".join(map(_cell, cells)) + " |")
        if inner:
            rows += _rows(field, info)
    return rows
