"""Presets: what we count, what transformers builds, and what the makers publish are one number."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from rayapp import model, presets
from rayapp.__main__ import main
from rayapp.model.sharding import find_blocks
from rayapp.planner.shape import Shape, has_formula, shape_of
from rayapp.presets import IMAGE_PRESETS
from rayapp.train.model_reading import read

PAGE = Path(__file__).parent.parent / "docs" / "presets.md"
SCALED = ("granite",)  # families that scale their logits
NAMES = sorted(path.parent.name for path in presets.FOLDER.glob("*/config.json"))


def no_loss(*args: object, **kwargs: object) -> torch.Tensor:
    raise AssertionError("shapes only")


def planned(name: str) -> Shape:
    """Return the shape that a plan is made of: by formula, or by reading the model."""
    config = presets.config_of(name)
    return (
        shape_of(config) if has_formula(config) else read(config, seq_len=16, fp32=False, lora=None)
    )


def test_the_table_lists_every_folder() -> None:
    assert sorted(presets.PRESETS) == NAMES
    with pytest.raises(KeyError):
        presets.config_of("llama9")


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_model_and_the_published_ones(name: str) -> None:
    preset = presets.PRESETS[name]
    shape = planned(name)
    built = model.build(model.resolve(name).config, loss=no_loss, attention="eager")
    assert shape.parameters == model.num_parameters(built)
    if preset.parameters is not None:
        assert shape.parameters == preset.parameters
    assert shape.parameters / 1e9 == pytest.approx(preset.billions, rel=0.08), "as rounded"
    blocks = find_blocks(built.hf)
    assert len(blocks) == shape.layers
    assert {type(block).__name__ for block in blocks} == {preset.block}
    one_block = sum(parameter.numel() for parameter in blocks[0].parameters())
    assert shape.block_parameters == one_block
    assert built.hf.config.model_type == preset.model_type == shape.model_type
    assert built.plain_head == (preset.model_type not in SCALED), "the chunked loss applies"


@pytest.mark.parametrize(
    ("name", "kind", "theta"),
    [
        ("llama2-7b", "default", 1e4),
        ("llama3.1-8b", "llama3", 5e5),
        ("llama3.2-1b", "llama3", 5e5),
        ("mixtral-8x7b", "default", 1e6),
        ("qwen3-8b", "default", 1e6),
        ("smollm3-3b", "default", 5e6),
        ("phi4", "default", 250_000),
        ("gpt-oss-20b", "yarn", 150_000.0),
        ("granite3.3-8b", "default", 1e7),
        ("phi4-mini", "longrope", 1e4),
        ("glm4-9b", "default", 1e4),
    ],
)
def test_rope_is_the_published_one(name: str, kind: str, theta: float) -> None:
    rope = model.resolve(name).config.rope_parameters
    assert (rope["rope_type"], rope["rope_theta"]) == (kind, theta)


@pytest.mark.parametrize(
    ("name", "share"), [("dolly-v2-7b", 0.25), ("phi4-mini", 0.75), ("glm4-9b", 0.5)]
)
def test_these_turn_a_part_of_each_head(name: str, share: float) -> None:
    assert model.resolve(name).config.rope_parameters["partial_rotary_factor"] == share


@pytest.mark.parametrize(
    ("name", "kind", "theta", "local"),
    [("olmo3-7b", "yarn", 5e5, 5e5), ("gemma3-4b", "linear", 1e6, 1e4)],
)
def test_layers_with_a_window_turn_by_settings_of_their_own(
    name: str, kind: str, theta: float, local: float
) -> None:
    text = model.resolve(name).config.get_text_config()
    whole, window = (text.rope_parameters[f"{each}_attention"] for each in ("full", "sliding"))
    assert (whole["rope_type"], whole["rope_theta"]) == (kind, theta)
    assert (window["rope_type"], window["rope_theta"]) == ("default", local)
    period = 6 if name.startswith("gemma3") else 4
    full = [n for n, each in enumerate(text.layer_types, 1) if each == "full_attention"]
    assert full == list(range(period, text.num_hidden_layers + 1, period))


@pytest.mark.parametrize("name", ["gemma3-4b", "gemma3-12b"])
def test_the_encoder_of_images_is_counted_beside_the_text(name: str) -> None:
    shape = planned(name)
    projector = 1152 * shape.hidden + 1152
    assert shape.beside == 416_866_032 + projector
    assert shape.text_parameters == shape.parameters - shape.beside


def test_mixtral_goes_through_the_published_12_9_billion() -> None:
    shape = shape_of(presets.config_of("mixtral-8x7b"))
    idle = sum(
        (linear.copies - linear.active) * linear.inputs * linear.outputs
        for linear in shape.linears
        if linear.copies > 1
    )
    active = shape.parameters - shape.layers * idle
    assert active / 1e9 == pytest.approx(12.9, abs=0.05)  # arXiv 2401.04088


def test_the_text_counts_what_is_published() -> None:
    """All but the tiny one, which is rayapp's own."""
    published = sum(preset.source != "rayapp's own" for preset in presets.PRESETS.values())
    root = Path(__file__).parent.parent
    told = [
        re.findall(r"(\d+) published (?:models|shapes)", (root / name).read_text(encoding="utf-8"))
        for name in ("README.md", "CHANGELOG.md")
    ]
    assert told == [[str(published)]] * 2


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, list[dict[str, object]]]:
    assert main(["presets", "--json"]) == 0
    found: dict[str, list[dict[str, object]]] = json.loads(capsys.readouterr().out)
    return found


def test_the_command_lists_what_models_and_plans_are_made_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = listed(capsys)
    assert [row["preset"] for row in found["language"]] == list(presets.PRESETS)
    for row in found["language"]:
        name = str(row["preset"])
        preset, config = presets.PRESETS[name], model.resolve(name).config
        assert row["parameters"] == (preset.parameters or planned(name).parameters)
        assert row["context"] == config.get_text_config().max_position_embeddings
        assert (row["family"], row["licence"]) == (config.model_type, preset.licence)
        assert row["source"] == preset.source
    assert [row["preset"] for row in found["images"]] == list(IMAGE_PRESETS)
    for row in found["images"]:
        image = IMAGE_PRESETS[str(row["preset"])]
        assert (row["family"], row["parameters"]) == (image.model_type, image.parameters)
        assert (row["gmacs"], row["pixels"]) == (image.gmacs, image.size)
    assert main(["presets"]) == 0
    told = capsys.readouterr().out
    for row in [*found["language"], *found["images"]]:
        assert re.search(rf"^{row['preset']} .* {row['parameters']:,} ", told, re.MULTILINE)


def table(rows: list[dict[str, object]]) -> str:
    """Return rows as a table of Markdown."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    for row in rows:
        values = [f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()]
        lines.append([f"`{values[0]}`", *values[1:]])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def test_the_page_lists_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    found, page = listed(capsys), PAGE.read_text(encoding="utf-8")
    wanted = page
    for kind, rows in found.items():
        begin = f"<!-- {kind}: made by the test -->\n"
        before, _, rest = wanted.partition(begin)
        wanted = before + begin + table(rows) + "<!-- end -->" + rest.partition("<!-- end -->")[2]
    if os.environ.get("GOLDEN") == "write":
        PAGE.write_text(wanted, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == wanted, "if meant so, GOLDEN=write"
    navigation = (PAGE.parents[1] / "mkdocs.yml").read_text(encoding="utf-8")
    assert f": {PAGE.name}\n" in navigation
