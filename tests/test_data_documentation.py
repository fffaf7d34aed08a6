"""docs/data.md: each shape of a record in each format, trained or refused as the page says."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_data_preparation import here, tokenizer_url  # noqa: F401  a fixture
from test_data_sources_streams import PACKED, WRITERS

from rayapp.data import first_records, sources, tokens
from rayapp.data.kinds import are_labelled
from rayapp.data.packing import IGNORE
from rayapp.data.recipe import RowRecipe
from rayapp.data.token_rows import local_steps
from rayapp.order import Order

PAGE = Path(__file__).parents[1] / "docs" / "data.md"
BEGIN, END = "<!-- made by the test -->\n", "<!-- end -->"
KINDS = "text|prompt|chat|preference|unpaired"
ROW = re.compile(rf"^\| ([^|]+) \| ((?:{KINDS})[^|]*) \| `(\{{.*\}})` \|$", re.MULTILINE)
FORMATS = {name: name for name in ("jsonl", "json", "csv", "tsv", "parquet", "arrow")}


def shapes() -> dict[str, tuple[list[str], dict[str, Any]]]:
    """Return the kinds and the row of each shape on the page."""
    found = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return {name: (kinds.split(", "), json.loads(row)) for name, kinds, row in found}


def train(source: sources.DataSource, kind: str, url: str, folder: Path) -> str:
    """Make rows of a source as a run does, take two steps, and say so; or return the refusal."""
    head = first_records.inspect("data", source, kind, 0.0)
    if head.problems:
        problem = re.sub(
            r"^.*? records: \S+ (.*?)(?: \(and .*)?\. Correct.*$", r"\1", head.problems[0]
        )
        return f"refused: {problem}"
    assert not head.unused
    digest = tokens.tokenizer_digest(tokens.load_tokenizer(url))
    recipe = RowRecipe(source, None, head.kind, url, digest, 0, 1024, True, False, 0.0)
    prepared = here(
        replace(recipe, values=("label",)) if are_labelled(head.kind) else recipe, folder / "rows"
    )
    assert not prepared.bad and prepared.counts["train"]["target_tokens"]
    rows = prepared.rows("train")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for step in local_steps(rows, Order.for_steps(len(rows), 1, 1, 0, 2), 0, 1, 0):
        logits = model(torch.from_numpy(step.input_ids[0]).long())
        labels = torch.from_numpy(step.labels[0]).long()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert len(losses) == 2 and losses[1] < losses[0]
    return f"trained ({head.kind})"


def outcome(name: str, kind: str, row: dict[str, Any], format: str, url: str, folder: Path) -> str:
    """Return what becomes of a shape in a format, the same plain and compressed."""
    found = set()
    for packed, pack in PACKED.items():
        place = folder / f"{name}-{kind}-{format}{packed}".replace(" ", "-")
        place.mkdir()
        (place / f"a.{format}{packed}").write_bytes(pack(WRITERS[format][1]([row] * 4)))
        found.add(train(sources.find(str(place)), kind, url, place))
    assert len(found) == 1, found
    return found.pop()


@pytest.mark.full
def test_the_page_says_what_becomes_of_each_shape_in_each_format(
    tmp_path: Path,
    tokenizer_url: str,  # noqa: F811
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    lines = [
        "| shape | " + " | ".join(FORMATS) + " |",
        "|---|" + "---|" * len(FORMATS),
    ]
    every = shapes()
    assert len(every) == 18
    for name, (kinds, row) in every.items():
        for kind in kinds:
            cells = []
            for format in FORMATS:
                asked = "auto" if kind == kinds[0] else kind
                said = outcome(name, asked, row, format, tokenizer_url, tmp_path)
                assert said.startswith((f"trained ({kind})", "refused: has ")), said
                cells.append(said.replace("|", "\\|"))
            label = name if len(kinds) == 1 else f"{name} as {kind}"
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    made = BEGIN + "\n".join(lines) + "\n" + END
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    if os.environ.get("GOLDEN") == "write":
        PAGE.write_text(before + made + after, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == before + made + after, "if meant so, GOLDEN=write"


def test_a_text_file_is_trained_on_in_each_compression(
    tmp_path: Path,
    tokenizer_url: str,  # noqa: F811
) -> None:
    for packed, pack in PACKED.items():
        folder = tmp_path / f"text{packed}"
        folder.mkdir()
        (folder / f"a.txt{packed}").write_bytes(pack(b"Once upon a time, twice.\n" * 30))
        assert train(sources.find(str(folder)), "auto", tokenizer_url, folder) == "trained (text)"


def test_the_example_of_an_own_format_makes_chats(
    tmp_path: Path,
    tokenizer_url: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(PAGE.parents[1])
    folder = tmp_path / "scripts"
    folder.mkdir()
    script = "Customer: Where is my parcel?\nAgent: It arrives today.\n"
    (folder / "a.script").write_text(f"{script}\n{script}Customer: Thanks.\nAgent: Bye.\n")
    source = sources.find(str(folder), "examples.dialogue_format:read")
    (unit,) = sources.units(source, 0.0)
    chats = [record.value for record in sources.read_piece(source, unit.pieces[0])]
    assert [len(chat["messages"]) for chat in chats] == [2, 4]
    assert chats[0]["messages"][1] == {"role": "assistant", "content": "It arrives today."}
    assert train(source, "auto", tokenizer_url, tmp_path) == "trained (chat)"
