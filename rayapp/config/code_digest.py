"""A digest of the source that a function of the user's is made of.

    digest = source_digest("train.loss", "mypackage.losses:focal")

That is the statement that defines the function, and what it names in its own package, directly or
by way of other definitions. A definition beside it that it does not name is none of it. Of each
module of which something counts, so do the statements that define nothing (a call, an `if`, a loop)
and what is under a decorator of the package, which may put it into a table.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from importlib.util import find_spec, resolve_name
from pathlib import Path

from rayapp.config.code import CodeError, load_code

ALL = "*"  # every name of a module


def source_digest(field: str, name: str) -> str:
    """Return a digest of the code of a function, without comments and formatting.

    Raises:
        CodeError: it cannot be imported, or has no source.
    """
    load_code(field, name)
    module, _, function = name.partition(":")
    package = _Package(module.partition(".")[0])
    if not package.statements(module):
        raise CodeError(f"{field}={name} is without source: its code cannot be identified")
    parts, seen, todo = set[str](), set[tuple[str, str]](), [(module, function)]
    while todo:
        place = todo.pop()
        if place not in seen:
            seen.add(place)
            for statement in package.reached(*place):
                parts.add(f"{place[0]}\0{ast.unparse(statement)}")
                todo += package.used_by(place[0], statement)
    return blake2b("\0".join(sorted(parts)).encode(), digest_size=8).hexdigest()


class _Package:
    """The modules of a package, parsed as they are asked for."""

    def __init__(self, top: str) -> None:
        self._top, self._parsed = top, dict[str, list[ast.stmt]]()

    def statements(self, module: str) -> list[ast.stmt]:
        """Return the statements of a module; none if it is of another package or has no source."""
        if module not in self._parsed:
            spec = None
            if self._is_own(module):
                with suppress(ModuleNotFoundError):  # what should hold it is no package
                    spec = find_spec(module)
            file = str(spec.origin) if spec is not None and spec.has_location else ""
            source = Path(file).read_bytes() if file.endswith(".py") else b""
            self._parsed[module] = [*_single(ast.parse(source))]
        return self._parsed[module]

    def reached(self, module: str, name: str) -> Iterator[ast.stmt]:
        """Yield the statements of a module that count if `name` is used."""
        body = self.statements(module)
        own = {each for node in body if not self._is_foreign(node) for each in _bound(node)}
        for node in body:
            bound = _bound(node)
            if name in (ALL, *bound) or not bound or own & _decorators(node):
                yield node

    def used_by(self, module: str, statement: ast.stmt) -> Iterator[tuple[str, str]]:
        """Yield (module, name) of what a statement names."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                yield module, node.id
            elif isinstance(node, ast.Import):
                yield from ((each.name, ALL) for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                spec = find_spec(module)
                parent = spec.parent if spec is not None else None
                source = resolve_name("." * node.level + (node.module or ""), parent)
                for each in node.names:
                    below = f"{source}.{each.name}"
                    yield (below, ALL) if self.statements(below) else (source, each.name)

    def _is_own(self, module: str | None) -> bool:
        return (module or "").partition(".")[0] == self._top

    def _is_foreign(self, node: ast.stmt) -> bool:
        """Say whether a statement imports from another package."""
        if isinstance(node, ast.ImportFrom):
            return not node.level and not self._is_own(node.module)
        return isinstance(node, ast.Import) and not self._is_own(node.names[0].name)


def _single(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements that an import of a module runs, those that import by each name."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (ast.Import([each]) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (ast.ImportFrom(node.module, [each], node.level) for each in node.names)
        elif not ast.unparse(node).startswith(("if __name__ == ", "'", '"')):  # a docstring
            yield node


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines; none if it may do anything."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        (alias,) = node.names
        return {alias.asname or alias.name.partition(".")[0]} - {ALL}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
        return {each.id for each in names if isinstance(each.ctx, ast.Store)}
    return set()


def _decorators(node: ast.stmt) -> set[str]:
    """Return the names in a definition's decorators."""
    found = (name for each in getattr(node, "decorator_list", ()) for name in ast.walk(each))
    return {name.id for name in found if isinstance(name, ast.Name)}
