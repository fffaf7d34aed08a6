"""rayapp du, rm and prune: what a storage holds, and how to remove what is not needed.

Beside the runs, in `.prepared`, lie rows (one folder for each recipe), the tokens that rows are
made of, and tokenizers. A run that is not done needs its rows; whoever takes rows writes their
USED file anew. Tokens are needed by the rows whose list of blocks has them. Both can be made again
from the data, rows from tokens in a small part of the time.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rayapp.cli.jobs import command, handle_of, or_none
from rayapp.config import ConfigError, Run, arguments
from rayapp.data.prepared import BLOCKS, USED
from rayapp.data.token_store import FOLDER as TOKENS
from rayapp.driver.lease import held
from rayapp.jobs.find import local_storage
from rayapp.observe.run_folder import CONFIG, DONE, EVENTS, LEASE, LIVE, PLAN, PREPARED, Exit
from rayapp.observe.status import NoRun, summary
from rayapp.observe.words import UNKNOWN, clock
from rayapp.storage import Entry, Storage, open_storage

DAY_S = 86_400.0
AT_ONCE = 16  # folders that are listed, or files that are deleted, at the same time
ROWS = re.compile(r"[0-9a-f]{16}")  # names of folders of rows, or of an index of images


@dataclass
class StoredFolder:
    """A folder of the storage: a run, or rows."""

    name: str
    num_bytes: int
    used_s: float
    state: str = ""
    """Status of a run."""
    needs: list[str] = field(default_factory=list)
    """Folders of rows that a run was begun with, or blocks of tokens that rows were made of."""
    needed_by: list[str] = field(default_factory=list)


@dataclass
class Space:
    """What a storage holds."""

    runs: list[StoredFolder]
    rows: list[StoredFolder]
    tokens: list[Entry]
    """Blocks, with names below the folder of tokens."""
    tokenizer_bytes: int

    def unneeded(self, before_s: float, rows: list[StoredFolder]) -> list[Entry]:
        """Return the blocks, written before a time, that none of these rows were made of."""
        needed = {name for each in rows for name in each.needs}
        return [e for e in self.tokens if e.name not in needed and e.modified_s < before_s]


@command("rayapp du [--storage=URL] [--json]")
def du(argv: list[str]) -> int:
    """Show what runs, rows and tokens take, when they were used last, and who needs them."""
    _, asked = arguments.read_plain(
        arguments.flags(argv, {"json"}), "", {"storage": "none", "json": "false"}
    )
    root = _root(asked["storage"])
    space = measure(root)
    unneeded = _bytes(space.unneeded(time.time(), space.rows))
    if asked["json"] == "true":
        values = {
            "runs": [vars(run) for run in space.runs],
            "rows": [{**vars(rows), "needs": len(rows.needs)} for rows in space.rows],
            "tokens_bytes": _bytes(space.tokens),
            "unneeded_tokens_bytes": unneeded,
            "tokenizers_bytes": space.tokenizer_bytes,
        }
        print(json.dumps(values, indent=2))
        return Exit.DONE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("what", "size", "used", "needed by"):
        table.add_column(name, justify="right" if name == "size" else "left", no_wrap=True)
    for kind, items in (("run", space.runs), ("rows", space.rows)):
        for one in sorted(items, key=lambda each: -each.num_bytes):
            by = f"({one.state})" if one.state else ", ".join(one.needed_by) or "no run"
            age = f"{clock(time.time() - one.used_s)} ago" if one.used_s else UNKNOWN
            table.add_row(f"{kind} {one.name}", _size(one.num_bytes), age, by)
    note = f"{_size(unneeded)} by no rows" if unneeded else ""
    table.add_row("tokens", _size(_bytes(space.tokens)), "", note)
    table.add_row("tokenizers", _size(space.tokenizer_bytes), "", "")
    Console().print(table)
    print(f"in {root.url}")
    return Exit.DONE


@command("rayapp rm RUN [--storage=URL] [--address=URL]")
def rm(argv: list[str]) -> int:
    """Remove a run that no driver works on: its checkpoints, model and metrics."""
    handle, _ = handle_of(argv, {})
    run = handle.run
    size = _bytes(run.list())
    with held(run, say=print):
        for folder in run.dirs():
            run.delete_tree(folder)
        last = (CONFIG, EVENTS)  # so that a run that is removed in part is still one
        names = [entry.name for entry in run.list() if entry.name != LEASE]
        for name in sorted(names, key=last.__contains__):
            run.delete(name)
    above, _, name = run.url.rpartition("/")
    open_storage(above).delete_tree(name)
    print(f"removed {run.url}: {_size(size)}. Its rows are shared: see rayapp prune")
    return Exit.DONE


@command("""rayapp prune [--storage=URL] [--unused_days=30] [--dry_run]

Removes rows that no unfinished run needs, and tokens that no other rows were made of, if they were
not used for that long. Rows are made again from tokens, tokens from the data.

  --unused_days=30   days for which they were not used
  --dry_run          only say what would be removed""")
def prune(argv: list[str]) -> int:
    """Remove rows and tokens that no run needs."""
    known = {"storage": "none", "unused_days": "30", "dry_run": "false"}
    _, asked = arguments.read_plain(arguments.flags(argv, {"dry_run"}), "", known)
    days = arguments.number("unused_days", asked["unused_days"], zero=True)
    root, before_s = _root(asked["storage"]), time.time() - days * DAY_S
    space = measure(root)
    live = [run.name for run in space.runs if run.state in LIVE]
    if live and days < 1:
        why = f"{', '.join(live)} may be preparing rows that its folder does not name yet"
        raise ConfigError([f"--unused_days={days:g} is too few: {why}. Set 1 or more"])
    gone = [rows for rows in space.rows if not rows.needed_by and rows.used_s < before_s]
    blocks = space.unneeded(before_s, [rows for rows in space.rows if rows not in gone])
    if asked["dry_run"] != "true":
        prepared = root / PREPARED
        for rows in gone:
            used = (prepared / rows.name).stat(USED)
            if used is None or used.modified_s < before_s:
                prepared.delete_tree(rows.name)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map((prepared / TOKENS).delete, [entry.name for entry in blocks]))
    done = "would remove" if asked["dry_run"] == "true" else "removed"
    rows_size = sum(rows.num_bytes for rows in gone)
    print(f"{done} rows of {len(gone)} recipes ({_size(rows_size)}) and {len(blocks)} blocks of")
    print(f"tokens ({_size(_bytes(blocks))}) from {root.url}/{PREPARED}")
    return Exit.DONE


def measure(root: Storage) -> Space:
    """Read what a storage holds.

    Raises:
        ConfigError: a run cannot be read, so that what it needs is not known.
    """
    prepared = root / PREPARED
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = list(filter(None, pool.map(lambda name: _run(root / name), root.dirs())))
        names = [name for name in prepared.dirs() if ROWS.fullmatch(name)]
        rows = list(pool.map(lambda name: _rows(prepared / name), names))
    known = {each.name for each in rows}
    for run in runs:
        if run.state == DONE:
            continue
        mine = set(run.needs) & known if known.issuperset(run.needs) else known
        for each in rows:  # of an old mixture it is not known which rows are its own: all may be
            if each.name in mine:
                each.needed_by.append(run.name)
    tokenizers = (name for name in prepared.dirs() if name.startswith("tokenizer-"))
    size = sum(_bytes((prepared / name).list()) for name in tokenizers)
    return Space(runs, rows, (prepared / TOKENS).list(), size)


def _run(run: Storage) -> StoredFolder | None:
    """Return what a run takes and needs; None of a folder that is no run."""
    name = run.url.rpartition("/")[2]
    if name.startswith("."):
        return None
    try:
        now = summary(run)
        plan = json.loads(run.read(PLAN)) if run.exists(PLAN) else {}
        needs = plan.get("prepared", [plan["fingerprint"]] if "fingerprint" in plan else [])
    except NoRun:
        return None
    except (ValueError, LookupError) as error:
        why = " ".join(str(error).split())
        raise ConfigError([f"run={run.url} is unreadable: {why}. Mend it, or delete it"]) from error
    return StoredFolder(name, _bytes(run.list()), now.updated_s or 0.0, now.status, needs)


def _rows(rows: Storage) -> StoredFolder:
    entries = rows.list()
    used = [entry.modified_s for entry in entries if entry.name == USED]
    blocks = rows.read(BLOCKS).decode().split() if rows.exists(BLOCKS) else []
    newest = max((entry.modified_s for entry in entries), default=0.0)
    name = rows.url.rpartition("/")[2]
    return StoredFolder(name, _bytes(entries), used[0] if used else newest, needs=blocks)


def _root(storage: str) -> Storage:
    return open_storage(or_none(storage) or local_storage() or Run().storage)


def _bytes(entries: list[Entry]) -> int:
    return sum(entry.size for entry in entries)


def _size(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{gib:,.1f} GiB" if gib >= 1 else f"{num_bytes / 2**20:,.1f} MiB"
