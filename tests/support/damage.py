"""Damage that files suffer, drawn at random: of bytes, of JSON values, of the file as such.

name, how = damage_one(dice, folder)       # changes one file of a folder, and says how
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from random import Random
from typing import Any

ESCAPE = "[/red]\x1b]0;title\x07</script>"
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        1.5,
        2**31,
        2**63,
        10**400,
        1e308,
        -1e308,
        math.nan,
        math.inf,
    ),
    *("", "x", "0", ESCAPE, "a\ud800", "../../etc/passwd", "/etc/hostname", "x" * 10_000),
    *([], {}, [[]], [None], {"": None}, [1, "a"], {"a": {"b": []}}),
)
TEXTS = (
    b"",
    b"\0",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"a":' * 9_000,
    b"9" * 5_000,
)
NO_FILE = ("gone", "folder", "itself", "outside", "fifo", "another", "places")
WAYS = ("bit", "bit", "number", "cut", "insert", "delete", "zeros", "twice", "tail", "text")
WAYS += ("swap", "blocks", "blocks", "lines", "line twice", "line ends")


def of_bytes(dice: Random, data: bytes) -> tuple[bytes, str]:
    """Return changed bytes, and what was done."""
    at = dice.randint(0, max(len(data) - 1, 0))
    many = dice.choice([1, 1, 2, 8, 100, 5_000])
    way = dice.choice(WAYS)
    lines = data.splitlines(keepends=True) or [b""]
    line = dice.randint(0, len(lines) - 1) if way.startswith("line") else 0
    if way == "bit" and data:
        changed = data[at] ^ 1 << dice.randint(0, 7)
        return data[:at] + bytes([changed]) + data[at + 1 :], f"a bit of byte {at} is flipped"
    if way == "number":
        large = dice.choice([b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f", b"9" * 30])
        return data[:at] + large + data[at + len(large) :], f"{large!r} is at byte {at}"
    if way == "blocks" and data:
        parts = dice.choice([n for n in range(1, 100) if len(data) % n == 0])
        one, other = (dice.randint(0, parts - 1) for _ in range(2))
        size = len(data) // parts
        each = [data[at : at + size] for at in range(0, len(data), size)]
        each[one], each[other] = each[other], each[one]
        return b"".join(each), f"blocks {one} and {other} of {parts} change places"
    found = {
        "cut": (data[:at], f"it ends at byte {at}"),
        "insert": (
            data[:at] + dice.randbytes(dice.randint(0, 20)) + data[at:],
            f"bytes more at {at}",
        ),
        "delete": (data[:at] + data[at + many :], f"{many} bytes at {at} are gone"),
        "zeros": (data[:at] + bytes(many) + data[at + many :], f"zeros at {at}"),
        "twice": (data * 2, "it is there twice"),
        "tail": (data + bytes(many), f"{many} zeros follow"),
        "text": (dice.choice(TEXTS), "other content"),
        "lines": (b"".join(lines[:line] + lines[line + 1 :]), f"line {line} is gone"),
        "line twice": (b"".join([*lines[:line], lines[line], *lines[line:]]), f"line {line} twice"),
        "line ends": (data.replace(b"\n", b"\r\n"), "other line ends"),
        "swap": (data[at:] + data[:at], f"the parts before and after byte {at} are swapped"),
    }
    return found.get(way, (data, "nothing"))


def of_values(dice: Random, value: Any) -> tuple[Any, str]:
    """Return a JSON value with an odd value, a missing field or one more at a place in it."""
    inside = isinstance(value, dict | list) and len(value) and dice.randint(0, 4)
    if not inside:
        odd = dice.choice(ODD)
        return odd, f" = {odd!r}"[:60]
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = dice.choice(keys)
    copy = dict(value) if isinstance(value, dict) else list(value)
    way = dice.randint(0, 9)
    if way == 0:
        del copy[key]
        return copy, f".{key} is gone"
    if way == 1 and isinstance(copy, dict):
        copy[dice.choice(["", "x", "__class__", "$ref", "auto_map"])] = copy[key]
        return copy, f".{key} is there twice"
    copy[key], how = of_values(dice, value[key])
    return copy, f".{key}{how}"


def of_json(dice: Random, data: bytes) -> tuple[bytes, str] | None:
    """Return JSON, or a line of JSON lines, with a changed value; None of what is no JSON."""
    lines = data.splitlines()
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        at = dice.randint(0, max(len(lines) - 1, 0))
        try:
            whole, how = of_values(dice, json.loads(lines[at]))
        except (ValueError, IndexError, RecursionError):
            return None
        lines[at] = json.dumps(whole).encode()
        return b"\n".join(lines) + b"\n", f"line {at}{how}"
    whole, how = of_values(dice, whole)
    return json.dumps(whole).encode(), how


def damage_one(dice: Random, folder: Path, pattern: str = "*") -> str:
    """Change, remove or replace one file below a folder; return its name and what was done."""
    files = [path for path in folder.rglob(pattern) if path.is_file() and not path.is_symlink()]
    names = sorted(str(path.relative_to(folder)) for path in files)
    if not names:
        return f"no file is left of {pattern}"
    name = dice.choice(names)
    path, data = folder / name, (folder / name).read_bytes()
    kind = dice.randint(0, 11)
    if kind < 4 and (changed := of_json(dice, data)) is not None:
        path.write_bytes(changed[0])
        return f"{name}: {changed[1]}"
    if kind < 9:
        content, how = of_bytes(dice, data)
        path.write_bytes(content)
        return f"{name}: {how}"
    path.unlink()
    way = dice.choice(NO_FILE)
    if way == "folder":
        path.mkdir()
    elif way == "itself":
        path.symlink_to(path)
    elif way == "outside":
        path.symlink_to("/etc/hostname")
    elif way == "fifo":
        os.mkfifo(path)
    elif way in ("another", "places"):
        other = dice.choice(names)
        content = data if other == name else (folder / other).read_bytes()
        path.write_bytes(content)
        if way == "places":
            (folder / other).write_bytes(data)
        way = f"{way}: {other}"
    return f"{name}: {way}"
