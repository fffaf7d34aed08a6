"""Hold the code to README's list: a module imports only from lower layers, never from its own."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_LINES, MOST_FILES = 49_497, 255  # of rayapp/
HEAVY = ("torch", "ray.train", "ray.data")  # not at the top of LIGHT, so that `plan` starts fast

SAMPLE = """
# Title

```
make finetune
```

```
1 values    config.py      the typed run description: YAML + overrides, strict
            order.py       which row is where: permutation(seed, epoch), Cursor      pure, no I/O
1 outside   storage/       local and s3:// alike: read, write, list
2 parts     loss.py        chunked cross-entropy, normalised by valid tokens
            model/         meta build, shard
5 faces     __main__.py    python -m rayapp plan|submit|list   (plan and list take --json)
            __init__.py    public names, lazily resolved
configs/    runnable YAML, about 30 lines each          cluster/  declarative files
tests/      test_<module>.py, one to one
```
"""


def read_layers(text: str) -> dict[str, int]:
    """Return {module: layer} of the code block whose first line starts with layer 1.

    A module is as it is listed: `name.py`, or `name/` for a package.
    """
    blocks = [
        block for block in text.split("```")[1::2] if block.partition("\n")[2].startswith("1 ")
    ]
    assert len(blocks) == 1, f"{len(blocks)} code blocks list the modules by layer"
    layers: dict[str, int] = {}
    layer = 0
    for line in blocks[0].splitlines():
        match = re.match(r"(?:(\d) \w+)?\s+(\w+(?:\.py|/))\s+\S", line)
        if match is not None:
            assert match[2] not in layers, f"{match[2]} is listed twice"
            layer = int(match[1]) if match[1] else layer
            layers[match[2]] = layer
    return layers


@pytest.fixture(scope="module")
def layers() -> dict[str, int]:
    return read_layers((ROOT / "README.md").read_text(encoding="utf-8"))


def sources() -> list[Path]:
    return sorted((ROOT / "rayapp").rglob("*.py"))


def home(path: Path) -> str:
    """Return how the list names the module or package that a file belongs to."""
    parts = path.relative_to(ROOT / "rayapp").parts
    return parts[0] if len(parts) == 1 else f"{parts[0]}/"


def imports(tree: ast.AST, package: str, *, deep: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of what is imported when the code runs, not for types alone.

    `from a import b` is `a.b`. Without `deep`, imports inside functions are left out.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(([*up] if node.level else []) + ([node.module] if node.module else []))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from imports(ast.Module([other], []), package, deep=deep)
        elif deep or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports(node, package, deep=deep)


def imports_of(path: Path, *, deep: bool) -> list[tuple[str, str]]:
    """Return (place, dotted name) of a file's imports."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    where = path.relative_to(ROOT)
    return [(f"{where}:{line}", name) for line, name in imports(tree, package, deep=deep)]


def target(name: str, known: set[str]) -> str | None:
    """Return the listed module that a dotted name imports; None for what is not rayapp's."""
    parts = name.split(".")
    if parts[0] != "rayapp":
        return None
    inside = parts[1] if len(parts) > 1 else ""
    return next((m for m in (f"{inside}.py", f"{inside}/") if m in known), "__init__.py")


def test_the_list_is_read() -> None:
    assert read_layers(SAMPLE) == {
        "config.py": 1,
        "order.py": 1,
        "storage/": 1,
        "loss.py": 2,
        "model/": 2,
        "__main__.py": 5,
        "__init__.py": 5,
    }


def test_imports_are_seen() -> None:
    code = (
        "import a.b, c\n"
        "from rayapp import order\n"
        "from . import x\nfrom .y import z\nfrom .. import up\n"
        "if typing.TYPE_CHECKING:\n    import hidden\nelse:\n    import seen\n"
        "def f():\n    class C:\n        from d import e\n"
        "try:\n    import g\nexcept ImportError:\n    pass\n"
        "class D:\n    import h\n"
    )
    everywhere = [name for _, name in imports(ast.parse(code), "rayapp.data", deep=True)]
    assert everywhere == [
        "a.b",
        "c",
        "rayapp.order",
        "rayapp.data.x",
        "rayapp.data.y.z",
        "rayapp.up",
        "seen",
        "d.e",
        "g",
        "h",
    ]
    top = [name for _, name in imports(ast.parse(code), "rayapp.data", deep=False)]
    assert top == [name for name in everywhere if name != "d.e"]
    known = {"order.py", "data/"}
    found = [target(n, known) for n in ("rayapp.order.Order", "rayapp.data", "rayapp", "ray.data")]
    assert found == ["order.py", "data/", "__init__.py", None]


def test_every_module_is_listed_and_every_listed_one_exists(layers: dict[str, int]) -> None:
    present = {home(path) for path in sources()}
    assert not present - layers.keys(), "modules that README's list lacks"
    assert not layers.keys() - present, "modules that are only in README's list"


def test_modules_import_only_from_lower_layers(layers: dict[str, int]) -> None:
    wrong = []
    for path in sources():
        own = home(path)
        for place, name in imports_of(path, deep=True):
            other = target(name, set(layers))
            if other is None or (other == own and own.endswith("/")):
                continue
            if layers.get(other, 99) >= layers.get(own, 99):
                wrong.append(f"{place} ({layers.get(own)}) imports {name} ({layers.get(other)})")
    assert not wrong, "\n".join(wrong)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def test_no_files_import_one_another_in_a_circle() -> None:
    """Imports inside functions count; the package's own __init__ resolves its names lazily."""
    known = {module_of(path) for path in sources()}
    arrows: dict[str, set[str]] = {}
    for path in sources():
        own = module_of(path)
        names = [name.split(".") for _, name in imports_of(path, deep=True)]
        heads = [[".".join(name[:n]) for n in range(len(name), 1, -1)] for name in names]
        arrows[own] = {next((m for m in each if m in known), own) for each in heads} - {own}
    TopologicalSorter(arrows).prepare()  # raises CycleError, which names the circle


def test_low_layers_import_nothing_heavy_at_the_top(layers: dict[str, int]) -> None:
    wrong = [
        f"{place} imports {name}"
        for path in sources()
        if layers.get(home(path), 99) <= 1
        for place, name in imports_of(path, deep=False)
        if any(f"{name}.".startswith(f"{heavy}.") for heavy in HEAVY)
    ]
    assert not wrong, "\n".join(wrong)


def test_documents_name_files_that_exist() -> None:
    files = {f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("[!.]*/**/*.py")}
    files |= {f"/{path.name}" for path in ROOT.glob("*.py")}
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.svg")]
    wrong = [
        f"{text.relative_to(ROOT)}: {name}"
        for text in texts
        for name in re.findall(r"(?<![\w./<>-])[a-z_0-9/]+\.py\b", text.read_text(encoding="utf-8"))
        if not any(file.endswith(f"/{name}") for file in files)
    ]
    assert not wrong, "\n".join(wrong)


def test_recipes_name_symbols_where_they_are() -> None:
    """In CONTRIBUTING: `SYMBOL` in `path`, or `A`, `B` and `C` in `path`."""
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    named = re.findall(r"((?:`\w+`(?:, | and ))*`\w+`) (?:in|of) `([a-z_/0-9]+\.py)`", text)
    assert len(named) >= 8
    wrong = []
    for symbols, path in named:
        (file,) = [each for each in (ROOT / path, ROOT / "rayapp" / path) if each.exists()]
        tree = ast.parse(file.read_text(encoding="utf-8"))
        known = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        known |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        wrong += [f"{path}: {name}" for name in re.findall(r"\w+", symbols) if name not in known]
    assert not wrong, wrong


def test_rayapp_grows_no_more() -> None:
    """A feature pays with lines near it. Lower both numbers when the code allows."""
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in sources())
    assert lines <= MOST_LINES and len(sources()) <= MOST_FILES, (lines, len(sources()))


def test_a_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: each for name, each in places.items() if len(each) > 1}


def test_no_public_function_has_the_name_of_a_room(layers: dict[str, int]) -> None:
    """Importing the room would replace the function."""
    import rayapp

    rooms = {name.rstrip("/").removesuffix(".py") for name in layers}
    assert not rooms & set(rayapp.__all__)


def test_a_file_name_occurs_once() -> None:
    counts = Counter(path.name for path in sources())
    several = {name for name, count in counts.items() if count > 1}
    assert several <= {"__init__.py", "__main__.py"} and "utils.py" not in counts, several


def loaded_by(code: str) -> set[str]:
    """Return the names of the packages that a fresh interpreter has loaded after `code`."""
    code += "\nimport sys\nprint(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_config_is_cheap_to_import(layers: dict[str, int]) -> None:
    heavy = {"torch", "ray", "transformers", "boto3"}
    assert not heavy & loaded_by("import rayapp.config")
    low = sorted(m.rstrip("/").removesuffix(".py") for m, layer in layers.items() if layer <= 1)
    code = "import " + ", ".join(f"rayapp.{name}" for name in low)
    assert not heavy & loaded_by(code), low
