"""Make a run longer: the steps that it has done keep their learning rates and their rows.

problem = growth_problem(run, before, config, changed) or schedule_problem(config, run)
stages = stages_of(run, fingerprint, num_rows, rows_per_step)     # for the order of its rows
"""

from __future__ import annotations

from typing import Any

from rayapp.observe.run_folder import MODEL
from rayapp.observe.status import read_plan
from rayapp.order import Cursor
from rayapp.storage import Storage
from rayapp.train.checkpoint.marker import latest, steps_done


def growth_problem(run: Storage, before: Any, config: Any, changed: str) -> str | None:
    """Return why a run cannot go on with this length and schedule; None if it can.

    It may be made longer, and its schedule changed, as long as the learning rates of the steps that
    it has done stay what they were; those before `schedule_from` are of no concern to the new one.
    """
    from rayapp.train.optimizer import lr_at

    plan, done = read_plan(run), steps_done(run)
    planned: int = plan.get("steps") or 0
    rows = _rows_of(plan)
    train, per_step = config.train, config.rows_per_step
    by_epochs = -(-(train.epochs or 1) * rows // per_step)
    steps: int = by_epochs if train.max_steps is None else train.max_steps
    if steps < planned:
        return (
            f"run.name={config.run.name} cannot shrink: {run.url} holds a run of {planned} steps, "
            f"and this one has {steps}. Set train.max_steps or train.epochs higher, or another "
            "run.name"
        )

    def rate(each: Any, step: int, num_steps: int) -> float | None:
        if step < each.schedule_from:
            return None
        settings = {"peak": each.lr, "schedule": each.schedule, "warmup_steps": each.warmup_steps}
        settings |= {"first": each.schedule_from, "decay": each.decay}
        return lr_at(step, num_steps=num_steps, floor=each.min_lr, **settings)

    begun = range(train.schedule_from, done)
    if all(rate(before.train, n, planned) == rate(train, n, steps) for n in begun):
        return None
    exported = not hasattr(config.model, "init_from")
    begin = f"model.path={run.url}/{MODEL}" if exported else f"model.init_from={run.url}"
    grows = f"cannot grow from {planned} to {steps} steps" if steps > planned else "is taken"
    return (
        f"run.name={config.run.name} {grows}: with train.schedule={train.schedule} the "
        f"{done} steps of {run.url} would have had other learning rates ({changed}). Set "
        f"train.schedule_from={done} for a schedule of the steps to come, or another run.name with "
        f"{begin}"
    )


def _rows_of(plan: Any) -> int:
    """Return the training rows, or images, of a run's plan; 0 if it was not prepared."""
    data = plan.get("data", {})
    rows: int = (
        data["images"]["train"] if "images" in data else data.get("train", {}).get("rows", 0)
    )
    return rows


def schedule_problem(config: Any, run: Storage) -> str | None:
    """Return why the schedule cannot begin at train.schedule_from; None if it can."""
    first, done = config.train.schedule_from, steps_done(run)
    if first <= done:
        return None
    return (
        f"train.schedule_from={first} is ahead of the run: {done} steps are done in {run.url}, and "
        f"the next ones would have no learning rate. Set train.schedule_from={done}"
    )


def stages_of(
    run: Storage, fingerprint: str, rows: int, rows_per_step: int
) -> tuple[tuple[int, int], ...]:
    """Return where the run has ended before with a short last step, by its newest checkpoint.

    `fingerprint` and `rows` are those of the data now.
    """
    newest, _ = latest(run)
    if newest is None:
        return ()
    stages = tuple((steps, rows) for steps, rows in newest.state.get("stages", ()))
    cursor = Cursor.from_dict(newest.state["cursor"])
    position = cursor.epoch * rows + cursor.row
    steps, before = stages[-1] if stages else (0, 0)
    if cursor.fingerprint != fingerprint:  # the ranks refuse it by name
        return stages
    short = position < before + (newest.step - steps) * rows_per_step
    return (*stages, (newest.step, position)) if short else stages
