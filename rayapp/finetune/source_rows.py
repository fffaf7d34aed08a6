"""Make the rows of a run's sources: all, or those of the first windows while others follow."""

from __future__ import annotations

from collections.abc import Mapping

from rayapp.config import Config
from rayapp.data import preparation
from rayapp.data.prepared import Prepared, reasons
from rayapp.data.prepared_windows import Preparation, Windows
from rayapp.data.recipe import RowRecipe
from rayapp.data.sources import SourceError
from rayapp.data.stream import spare_cpus
from rayapp.observe.activity import Phases
from rayapp.observe.words import number_of_bytes
from rayapp.order import taken
from rayapp.storage import Storage

Made = dict[str, Prepared]  # by the path of the source


def prepare_each(
    config: Config,
    recipes: Mapping[str, RowRecipe],
    root: Storage,
    phases: Phases,
    problems: list[str],
) -> Made:
    """Prepare all rows of one source after another; add what is wrong to `problems`."""
    made: Made = {}
    why = " (all windows before the first step, without train.max_steps)"
    why = "" if config.data.window_bytes is None else why
    for path, recipe in recipes.items():
        size = number_of_bytes(recipe.source.num_bytes)
        phases.begin(f"tokenising {path}{why}", size)
        workers = config.data.workers, phases.bytes_done
        try:
            if recipe.window_bytes is None:
                made[path] = preparation.prepare(recipe, root, *workers)
            else:
                windows = Windows(recipe, root, config.run.seed)
                (made[path],) = Preparation([windows], *workers).prepare()
        except SourceError as error:
            problems.append(str(error))
    return made


def prepare_windows(
    config: Config,
    recipes: Mapping[str, RowRecipe],
    root: Storage,
    phases: Phases,
    first: int | None,
) -> tuple[Made, Preparation | None]:
    """Prepare the windows that the run needs of all sources.

    With `first`, return when the first so many rows of the run are made, and what goes on to make
    the others, if others follow.

    Raises:
        SourceError: the data cannot be read.
    """
    size = number_of_bytes(sum(recipe.source.num_bytes for recipe in recipes.values()))
    what = next(iter(recipes)) if len(recipes) == 1 else f"{len(recipes)} sources together"
    phases.begin(f"tokenising {what}", size)
    sources = [Windows(recipe, root, config.run.seed) for recipe in recipes.values()]
    windows = Preparation(sources, config.data.workers, phases.bytes_done)
    assert config.train.max_steps is not None, "the rows that are needed are not known"
    needed = _rows_of_sources(config, list(recipes), config.train.max_steps * config.rows_per_step)
    if first is None or windows.holds(needed):
        return dict(zip(recipes, windows.prepare(needed), strict=True)), None

    def show(done: int, total: int) -> None:
        phases.beside = "" if windows.ended else preparing(windows, needed)

    windows.progress = show

    def check(every: list[Prepared]) -> str | None:
        problems = unusable_sources(config, dict(zip(recipes, every, strict=True)))
        return "; ".join(problems) or None

    windows.start(needed, check, spare_cpus(config.cluster.min_workers))
    at_first = _rows_of_sources(config, list(recipes), first)
    least = [min(rows, most) for rows, most in zip(at_first, needed, strict=True)]
    return dict(zip(recipes, windows.wait_for(least), strict=True)), windows


def _rows_of_sources(config: Config, paths: list[str], rows: int) -> list[int]:
    """Return how many rows of each source are among the first of the run, at least one."""
    weights = config.data.mixture
    in_order = sorted(paths)  # as a mixture has them
    counts = taken([weights[path] for path in in_order], rows, config.run.seed) if weights else ()
    by_path = dict(zip(in_order, counts, strict=True)) if weights else dict.fromkeys(paths, rows)
    return [max(1, by_path[path]) for path in paths]


def preparing(windows: Preparation, rows: list[int]) -> str:
    """Say which of the windows that hold the first rows of the run is being prepared."""
    state = windows.state(rows)
    about = "~" if state.needed < state.of else ""
    size = f"{number_of_bytes(state.done)} of {about}{number_of_bytes(state.total)}"
    number = min(state.ready + 1, state.needed)
    return f"preparing window {number} of {about}{state.needed}, {size}"


def unusable_sources(config: Config, made: Made) -> list[str]:
    """Return why each source that cannot be trained on cannot be."""
    field = "data.mixture" if config.data.mixture else "data.path"
    limit, found = config.data.bad_rows, []
    for path, prepared in made.items():
        what, records = f"{field}={path}", prepared.records
        if prepared.bad_share > limit:
            found.append(
                f"{what} is unusable in {prepared.bad_share:.1%} of its {records} records: "
                f"{reasons(prepared.bad, prepared.examples)}. Correct them, or raise data.bad_rows "
                f"(now {limit:.1%})"
            )
        elif not prepared.counts["train"]["target_tokens"]:
            found.append(f"{what} is empty: no token of its {records} records bears loss")
    return found
