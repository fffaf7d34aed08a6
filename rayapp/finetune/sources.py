"""Make the rows of one source of a run: all, or those of the first windows while others follow."""

from __future__ import annotations

from rayapp.config import Config
from rayapp.data import prepare
from rayapp.data.prepared import Prepared, reasons
from rayapp.data.recipe import RowRecipe
from rayapp.data.stream import spare_cpus
from rayapp.data.windows import Windows
from rayapp.observe.activity import Phases
from rayapp.observe.words import number_of_bytes
from rayapp.storage import Storage


def why_all(config: Config) -> str:
    """Return why windows do not begin to train before all are there, as part of a phase."""
    if config.data.window_bytes is None or _begins_early(config):
        return ""
    why = "of a mixture" if config.data.mixture else "without train.max_steps"
    return f" (all windows before the first step, {why})"


def _begins_early(config: Config) -> bool:
    return config.train.max_steps is not None and not config.data.mixture


def rows_of(
    config: Config, recipe: RowRecipe, root: Storage, phases: Phases, first: int | None
) -> tuple[Prepared, Windows | None]:
    """Prepare the rows of a source; of windows, those that the run needs, or the first of them.

    Raises:
        SourceError: the data cannot be read.
    """
    workers, steps = config.data.workers, config.train.max_steps
    if recipe.window_bytes is None:
        return prepare.prepare(recipe, root, workers, phases.bytes_done), None
    windows = Windows(recipe, root, config.run.seed, workers, phases.bytes_done)
    if steps is None or not _begins_early(config):
        return windows.prepare(), None
    needed = max(1, steps * config.rows_per_step)
    if first is None or windows.holds(needed):
        return windows.prepare(needed), None

    def show(done: int, total: int) -> None:
        phases.beside = "" if windows.ended else preparing(windows, needed)

    windows.progress = show
    what = f"data.path={config.data.path}"
    windows.start(
        needed,
        lambda prepared: unusable(prepared, what, config.data.bad_rows),
        spare_cpus(config.cluster.min_workers),
    )
    return windows.wait_for(min(first, needed)), windows


def preparing(windows: Windows, rows: int) -> str:
    """Say which of the windows that hold the first rows of the run is being prepared."""
    number, last, done, total = windows.state(rows)
    about = "~" if last < windows.count else ""
    size = f"{number_of_bytes(done)} of {about}{number_of_bytes(total)}"
    return f"preparing window {number} of {about}{last}, {size}"


def unusable(prepared: Prepared, what: str, limit: float) -> str | None:
    """Return why a source cannot be trained on, None if it can."""
    if prepared.bad_share > limit:
        shown = reasons(prepared.bad, prepared.examples)
        return (
            f"{what} is unusable in {prepared.bad_share:.1%} of its {prepared.records} records: "
            f"{shown}. Correct them, or raise data.bad_rows (now {limit:.1%})"
        )
    if not prepared.counts["train"]["target_tokens"]:
        return f"{what} is empty: no token of its {prepared.records} records bears loss"
    return None
