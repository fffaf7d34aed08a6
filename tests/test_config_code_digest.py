"""What of a package is part of a function of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_config_code import folder  # noqa: F401  a fixture

from rayapp.config.code import CodeError
from rayapp.config.code_digest import source_digest

FILES = {
    "__init__.py": """LIMIT = 3
UNUSED = 1
""",
    "losses.py": """import torch
from torch.nn.functional import cross_entropy
from . import LIMIT, shapes, tables as more
from .tables import WEIGHTS, others
from lab_mine.deep.parts import *

GAMMA = 2.0
OTHER = 1.0
names = {}

def register(function):
    names[function.__name__] = function
    return function

def helper(x):
    return x ** GAMMA

def focal(logits, labels):
    from lab_mine import late
    return helper(logits) + shapes.cut(labels) + WEIGHTS + LIMIT + names["added"]() + late.X

@register
def added():
    return 1

@torch.no_grad()
def accuracy(logits, labels):
    return logits + OTHER

class BackgroundWork:
    size = 1

if __name__ == "__main__":
    print(OTHER)
""",
    "shapes.py": "def cut(x):\n    return x\ndef beside():\n    return 2\n",
    "tables.py": "WEIGHTS = 1\nothers = 2\nunused = 3\n",
    "late.py": "X = 1\nprint\n",
    "deep/__init__.py": "",
    "deep/parts.py": "def part():\n    return 1\n",
    "metrics.py": "from .losses import accuracy\nlevel = 1\n",
}


@pytest.fixture
def mine(folder: Path) -> Iterator[Path]:  # noqa: F811
    root = folder / "lab_mine"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    yield root


@pytest.mark.parametrize(
    ("file", "old", "new", "counts"),
    [
        ("losses.py", "helper(logits)", "helper(logits * 2)", True),
        ("losses.py", "GAMMA = 2.0", "GAMMA = 3.0", True),
        ("losses.py", "x ** GAMMA", "x * GAMMA", True),
        ("losses.py", "    return 1\n", "    return 2\n", True),  # of the table
        ("losses.py", "names[function.__name__]", "names['added']", True),
        ("losses.py", "import torch\n", "import torch\ntorch.manual_seed(3)\n", True),
        ("__init__.py", "LIMIT = 3", "LIMIT = 4", True),
        ("tables.py", "WEIGHTS = 1", "WEIGHTS = 2", True),
        ("shapes.py", "return x", "return -x", True),
        ("shapes.py", "return 2", "return 3", True),  # a module that is named counts as a whole
        ("late.py", "X = 1", "X = 2", True),
        ("deep/parts.py", "return 1", "return 2", True),
        ("losses.py", "logits + OTHER", "logits - OTHER", False),
        ("losses.py", "OTHER = 1.0", "OTHER = 1.5", False),
        ("losses.py", "size = 1", "size = 2", False),
        ("losses.py", "print(OTHER)", "print(2)", False),
        ("losses.py", "GAMMA = 2.0", "GAMMA = 2.0  # as in the paper", False),
        ("losses.py", "return helper", "return  helper", False),
        ("tables.py", "others = 2", "others = 3", False),
        ("tables.py", "unused = 3", "unused = 4", False),
        ("__init__.py", "UNUSED = 1", "UNUSED = 2", False),
        ("metrics.py", "level = 1", "level = 2", False),
    ],
)
def test_what_a_function_names_is_part_of_it(
    mine: Path, file: str, old: str, new: str, counts: bool
) -> None:
    before = source_digest("train.loss", "lab_mine.losses:focal")
    assert source_digest("train.loss", "lab_mine.losses:focal") == before
    text = (mine / file).read_text()
    assert old in text
    (mine / file).write_text(text.replace(old, new, 1))
    assert (source_digest("train.loss", "lab_mine.losses:focal") != before) == counts


def test_a_name_is_followed_to_where_it_is_defined(mine: Path) -> None:
    (mine / "__init__.py").write_text("LIMIT = 3\nfrom .losses import focal\n")
    before = source_digest("train.loss", "lab_mine:focal")
    (mine / "metrics.py").write_text("level = 2\n")
    assert source_digest("train.loss", "lab_mine:focal") == before
    (mine / "shapes.py").write_text("def cut(x):\n    return 0\n")
    assert source_digest("train.loss", "lab_mine:focal") != before


def test_code_without_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYAPP_CODE", "xxhash")
    with pytest.raises(CodeError, match=r"^train\.loss=xxhash\._xxhash:xxh64 is without source"):
        source_digest("train.loss", "xxhash._xxhash:xxh64")
