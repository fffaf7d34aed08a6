"""rayapp du, rm and prune: what a storage holds, and how to remove what is not needed.

Beside the runs, in `.prepared`, lie rows (one folder for each recipe), the tokens that rows are
made of, tokenizers, and models of GGUF files. A run that is not done needs its rows; whoever takes
rows writes their USED file anew. Tokens are needed by the rows whose list of blocks has them. Both
can be made again from the data, rows from tokens in a small part of the time.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rayapp.cli.jobs import command, handle_of, or_none
from rayapp.config import ConfigError, Run, arguments
from rayapp.data.prepared import BLOCKS, USED
from rayapp.data.token_store import FOLDER as TOKENS
from rayapp.driver.lease import held
from rayapp.jobs.find import UNREADABLE, local_storage, located, reason_of
from rayapp.observe.records import Plan
from rayapp.observe.run_folder import DONE, EVENTS, LEASE, LIVE, OWN, PREPARED, RUN_ID, Exit
from rayapp.observe.status import NoRun, is_run, read_plan, summary
from rayapp.observe.words import UNKNOWN, clock, number_of_bytes
from rayapp.storage import Entry, Storage, open_storage

DAY_S = 86_400.0
AT_ONCE = 16  # folders that are listed, or files that are deleted, at the same time
SHOWN = 10  # names of what stays
ROWS = re.compile(r"[0-9a-f]{16}")  # names of folders of rows, or of an index of images
# Names in such a folder, and those of blocks of tokens; prune removes no others.
ROW_FILE = re.compile(
    r"manifest\.json|USED|blocks\.txt|[a-z]+-[0-9]{5,}(\.placed)?\.(rows|bin|json|npz)"
    r"|(train|eval)\.(records|names)"
)
BLOCK = re.compile(r"[0-9a-f]{16}/[0-9a-f]{2}/[0-9a-f]{32}(\.claim)?")


@dataclass
class StoredFolder:
    """A folder of the storage: a run, or rows."""

    name: str
    num_bytes: int
    used_s: float
    state: str = ""
    """Status of a run."""
    needs: list[str] | None = field(default_factory=list)
    """Folders of rows that a run was begun with, or blocks of tokens that rows were made of; None
    is not known."""
    needed_by: list[str] = field(default_factory=list)
    reason: str | None = None
    """Why a run is unreadable."""


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
        if any(each.needs is None for each in rows):
            return []
        needed = {name for each in rows for name in each.needs or ()}
        ours = (entry for entry in self.tokens if BLOCK.fullmatch(entry.name))
        return [e for e in ours if e.name not in needed and e.modified_s < before_s]


@command("rayapp du [--storage=URL] [--json]")
def du(argv: list[str]) -> int:
    """Show what runs, rows and tokens take, when they were used last, and who needs them."""
    known = {"storage": "none", "json": "false"}
    _, asked = arguments.read_plain(arguments.flags(argv, {"json"}), "", known)
    root = _root(asked["storage"])
    space = measure(root)
    unneeded = _bytes(space.unneeded(time.time(), space.rows))
    if asked["json"] == "true":
        values = {
            "runs": [vars(run) for run in space.runs],
            "rows": [{**vars(rows), "needs": len(rows.needs or ())} for rows in space.rows],
            "tokens_bytes": _bytes(space.tokens),
            "unneeded_tokens_bytes": unneeded,
            "tokenizers_bytes": space.tokenizer_bytes,
        }
        print(json.dumps(values, indent=2))
        return Exit.DONE
    from rich.table import Table
    from rich.text import Text

    from rayapp.observe.plain import Console

    table = Table(box=None, pad_edge=False)
    for name in ("what", "size", "used", "needed by"):
        table.add_column(name, justify="right" if name == "size" else "left", no_wrap=True)
    for kind, items in (("run", space.runs), ("rows", space.rows)):
        for one in sorted(items, key=lambda each: -each.num_bytes):
            by = f"({one.state})" if one.state else ", ".join(one.needed_by) or "no run"
            age = f"{clock(max(0.0, time.time() - one.used_s))} ago" if one.used_s else UNKNOWN
            cells = (f"{kind} {one.name}", number_of_bytes(one.num_bytes), age, by)
            table.add_row(*map(Text, cells))
    note = f"{number_of_bytes(unneeded)} by no rows" if unneeded else ""
    table.add_row("tokens", number_of_bytes(_bytes(space.tokens)), "", note)
    table.add_row("tokenizers, models", number_of_bytes(space.tokenizer_bytes), "", "")
    Console().print(table)
    print(f"in {root.url}")
    for run in space.runs:
        if run.reason is not None:
            print(f"{root.url}/{run.name}: {run.reason}")
    return Exit.DONE


@command("""rayapp rm RUN [--storage=URL] [--address=URL] [--dry_run] [--yes]

Lists the files that a run has written, asks, and removes them. Other files in its folder stay.

  --dry_run      only list what would be removed
  --yes          do not ask; required without a terminal""")
def rm(argv: list[str]) -> int:
    """Remove a run that no driver works on: its checkpoints, model and metrics."""
    argv = arguments.flags(argv, {"dry_run", "yes"})
    handle, asked = handle_of(argv, {"dry_run": "false", "yes": "false"}, located)
    run = handle.run
    if (path := run.local_path()) is not None and os.path.islink(path):
        what = "is a link: rayapp removes no target of a link"
        raise ConfigError([f"run={run.url} {what}. Give the folder itself"])
    if not is_run(run):
        what = f"is no run: it has no {RUN_ID} and no {EVENTS} of a run"
        raise ConfigError([f"run={run.url} {what}. Give the folder of a run"])
    files, stays = _sorted_out(run, OWN)
    own, size = [file.name for file in files], number_of_bytes(_bytes(files))
    parts = dict.fromkeys(name.split("/")[0] for name in own)
    print(f"{run.url}: {size} in {', '.join(parts)}{stays}")
    if asked["dry_run"] == "true":
        return Exit.DONE
    if asked["yes"] != "true" and not _agreed():
        return Exit.STOPPED
    with held(run, say=print):
        last = {EVENTS, RUN_ID}  # removed in part, it is still a run
        _delete(run, [name for name in own if name not in {LEASE, *last}])
        _delete(run, [name for name in own if name in last])
    if not stays:
        above, _, name = run.url.rpartition("/")
        open_storage(above or "/").delete_tree(name)
    print(f"removed {run.url}: {size}. Its rows are shared: see rayapp prune")
    return Exit.DONE


def _delete(root: Storage, names: list[str]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(root.delete, names))


def _sorted_out(folder: Storage, own: re.Pattern[str]) -> tuple[list[Entry], str]:
    """Return the files of a folder that have own names, and a part of a sentence about the rest."""
    files = folder.list()
    ours = [file for file in files if own.fullmatch(file.name)]
    stay = [file.name for file in files if not own.fullmatch(file.name)] + folder.strays()
    more = f" and {len(stay) - SHOWN} more" if len(stay) > SHOWN else ""
    return ours, f"; not rayapp's, stays: {', '.join(stay[:SHOWN])}{more}" if stay else ""


def _agreed() -> bool:
    """Ask whether to go on."""
    if not sys.stdin.isatty():
        raise ConfigError(["--yes is missing: there is no terminal to ask at. Add it"])
    try:
        if input("remove it? [y/N] ").strip().lower() in ("y", "yes"):
            return True
    except EOFError:
        print()
    print("nothing is removed")
    return False


@command("""rayapp prune [--storage=URL] [--unused_days=30] [--dry_run]

Removes unused rows that no unfinished run needs, and unused tokens from which no remaining rows
were made. Rows are made again from tokens, tokens from the data.

  --unused_days=30   only remove what was unused for this many days
  --dry_run          only list what would be removed""")
def prune(argv: list[str]) -> int:
    """Remove rows and tokens that no run needs."""
    known = {"storage": "none", "unused_days": "30", "dry_run": "false"}
    _, asked = arguments.read_plain(arguments.flags(argv, {"dry_run"}), "", known)
    days = arguments.number("unused_days", asked["unused_days"], zero=True)
    root, before_s = _root(asked["storage"]), time.time() - days * DAY_S
    space = measure(root)
    if unknown := [run for run in space.runs if run.needs is None]:
        fix = "Repair it, or delete it"
        raise ConfigError(
            [f"run={root.url}/{run.name} is unreadable: {run.reason}. {fix}" for run in unknown]
        )
    live = [run.name for run in space.runs if run.state in (*LIVE, UNREADABLE)]
    if live and days < 1:
        why = f"{', '.join(live)} may be preparing rows that its folder does not name yet"
        raise ConfigError([f"--unused_days={days:g} is too few: {why}. Set 1 or more"])
    gone = [rows for rows in space.rows if not rows.needed_by and rows.used_s < before_s]
    blocks = space.unneeded(before_s, [rows for rows in space.rows if rows not in gone])
    prepared = root / PREPARED
    _, stays = _sorted_out(prepared / TOKENS, BLOCK) if space.tokens else ([], "")
    for rows in gone:
        files, others = _sorted_out(prepared / rows.name, ROW_FILE)
        stays += others
        used = prepared.stat(f"{rows.name}/{USED}")
        if asked["dry_run"] != "true" and (used is None or used.modified_s < before_s):
            _delete(root, [f"{PREPARED}/{rows.name}/{file.name}" for file in files])
            if not others:
                root.delete_tree(f"{PREPARED}/{rows.name}")
    if asked["dry_run"] != "true":
        _delete(root, [f"{PREPARED}/{TOKENS}/{entry.name}" for entry in blocks])
    done = "would remove" if asked["dry_run"] == "true" else "removed"
    rows_size = sum(rows.num_bytes for rows in gone)
    print(f"{done} rows of {len(gone)} recipes ({number_of_bytes(rows_size)}) and {len(blocks)}")
    tokens = number_of_bytes(_bytes(blocks))
    print(f"blocks of tokens ({tokens}) from {root.url}/{PREPARED}{stays}")
    return Exit.DONE


def measure(root: Storage) -> Space:
    """Read what a storage holds; a run that cannot be read is told with the reason."""
    folders = root.dirs(PREPARED)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = list(filter(None, pool.map(lambda name: _run(root / name), root.dirs())))
        names = [name for name in folders if ROWS.fullmatch(name)]
        rows = list(pool.map(lambda name: _rows(root, name), names))
    known = {each.name for each in rows}
    for run in runs:
        if run.state == DONE:
            continue
        needs = known if run.needs is None else set(run.needs)
        mine = needs if known.issuperset(needs) else known
        for each in rows:  # of an old mixture it is not known which rows are its own: all may be
            if each.name in mine:
                each.needed_by.append(run.name)
    kept = (name for name in folders if name.startswith(("tokenizer-", "model-")))
    size = sum(_bytes(root.list(f"{PREPARED}/{name}")) for name in kept)
    blocks = (root / f"{PREPARED}/{TOKENS}").list() if TOKENS in folders else []
    return Space(runs, rows, blocks, size)


def _run(run: Storage) -> StoredFolder | None:
    name = run.url.rpartition("/")[2]
    if name.startswith("."):
        return None
    found = StoredFolder(name, 0, 0.0, UNREADABLE, None)
    try:
        now = summary(run)
        found.state, found.used_s = now.status, now.updated_s or 0.0
    except NoRun:
        return None
    except Exception as error:
        found.reason = reason_of(error)
    try:
        found.num_bytes = _bytes(run.list())
        plan = Plan() if found.state == DONE else read_plan(run)
        first = [plan["fingerprint"]] if "fingerprint" in plan else []
        found.needs = plan.get("prepared", first)
    except Exception as error:
        found.reason = found.reason or reason_of(error)
    return found


def _rows(root: Storage, name: str) -> StoredFolder:
    folder = f"{PREPARED}/{name}"
    entries = root.list(folder)
    used = [entry.modified_s for entry in entries if entry.name == f"{folder}/{USED}"]
    blocks: list[str] | None
    try:
        blocks = root.read(f"{folder}/{BLOCKS}").decode().split()
    except (OSError, UnicodeDecodeError) as error:
        blocks = [] if isinstance(error, FileNotFoundError) else None
    newest = max((entry.modified_s for entry in entries), default=0.0)
    return StoredFolder(name, _bytes(entries), used[0] if used else newest, needs=blocks)


def _root(storage: str) -> Storage:
    return open_storage(or_none(storage) or local_storage() or Run().storage)


def _bytes(entries: list[Entry]) -> int:
    return sum(entry.size for entry in entries)
