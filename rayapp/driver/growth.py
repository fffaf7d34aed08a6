"""Make a run longer or shorter: the steps that it has done keep their rates, rows and results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from rayapp.config import ConfigError, RunConfig
from rayapp.observe import metrics
from rayapp.observe.records import Plan
from rayapp.observe.run_folder import ASKED, CONFIG, MODEL, PLAN, RESULT
from rayapp.observe.status import read_asked, read_plan
from rayapp.order import Cursor, differences
from rayapp.storage import Storage
from rayapp.train.checkpoint.marker import latest, steps_done


def describe(run: Storage, config: RunConfig, plan: Plan | None = None) -> None:
    """Write config.yaml and plan.json; where the run has steps, write ASKED in their place.

    What describes the steps that are done stays until a command has done another one. Without a
    plan, that of this command stays.
    """
    text, last = config.to_yaml(), metrics.last(run)
    if last is not None:
        before = {"attempt": last["attempt"], "plan": plan} if plan else read_asked(run)
        if before:
            run.write(ASKED, json.dumps({**before, "config": text}, indent=1).encode())
            return
    run.write(CONFIG, text.encode())
    if plan is not None:
        run.write(PLAN, json.dumps(plan, indent=1).encode())


def take(run: Storage, done: bool = False) -> bool:
    """Replace config.yaml and plan.json by ASKED if its command is `done` or has done a step.

    Returns whether nothing waits for a step. The result of the run so far is deleted. ASKED goes
    last: the next command repeats what a killed driver has left.
    """
    asked = read_asked(run)
    if asked is None:
        return True
    last = metrics.last(run)
    if not done and (last is None or last["attempt"] <= asked["attempt"]):
        return False
    run.write(PLAN, json.dumps(asked["plan"], indent=1).encode())
    run.write(CONFIG, asked["config"].encode())
    run.delete(RESULT)
    run.delete(ASKED)
    return True


def growth_problem(run: Storage, before: Any, config: Any, changed: str) -> str | None:
    """Return why a run cannot go on with this length and schedule; None if it can.

    Its length and schedule may change, as long as the steps that it has done are part of it, and
    keep their learning rates; those before `schedule_from` are of no concern to the new one.
    """
    from rayapp.train.optimizer import lr_at

    plan, done, train = read_plan(run), steps_done(run), config.train
    planned: int = plan.get("steps") or 0
    steps: int = planned
    if train.max_steps is not None:
        steps = train.max_steps
    elif (before.train.max_steps, before.train.epochs) != (None, train.epochs):
        data, per_step = cast(dict[str, Any], plan.get("data", {})), config.rows_per_step
        images = data.get("images", {})
        rows: int = images.get("train") or data.get("train", {}).get("rows", 0)
        stages = stages_of(run, plan.get("fingerprint", ""), rows, per_step)
        begun, taken = stages[-1] if stages else (0, 0)
        steps = begun - (taken - (train.epochs or 1) * rows) // per_step
    if steps < done:
        return (
            f"run.name={config.run.name} cannot shrink: {run.url} has done {done} of a run of "
            f"{planned} steps, and this one has {steps}. Set train.max_steps or train.epochs "
            "higher, or another run.name"
        )

    def rate(each: Any, step: int, num_steps: int) -> float | None:
        if step < each.schedule_from:
            return None
        settings = {"peak": each.lr, "schedule": each.schedule, "warmup_steps": each.warmup_steps}
        settings |= {"first": each.schedule_from, "decay": each.decay}
        return lr_at(step, num_steps=num_steps, floor=each.min_lr, **settings)

    compared = range(train.schedule_from, done)
    if all(rate(before.train, n, planned) == rate(train, n, steps) for n in compared):
        return None
    exported = not hasattr(config.model, "init_from")
    begin = f"model.path={run.url}/{MODEL}" if exported else f"model.init_from={run.url}"
    grows = f"cannot {'grow' if steps > planned else 'shrink'} from {planned} to {steps} steps"
    grows = "is taken" if steps == planned else grows
    return (
        f"run.name={config.run.name} {grows}: with train.schedule={train.schedule} the "
        f"{done} steps of {run.url} would have had other learning rates ({changed}). Set "
        f"train.schedule_from={done} for a schedule of the steps to come, or another run.name with "
        f"{begin}"
    )


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
    if newest is None or "cursor" not in newest.state:
        return ()
    stages = tuple((steps, rows) for steps, rows in newest.state.get("stages", ()))
    cursor = Cursor.from_dict(newest.state["cursor"])
    position = cursor.epoch * rows + cursor.row
    steps, before = stages[-1] if stages else (0, 0)
    if cursor.fingerprint != fingerprint:
        return stages
    short = position < before + (newest.step - steps) * rows_per_step
    return (*stages, (newest.step, position)) if short else stages


def changed_data(run: Storage, parts: Mapping[str, object], done: bool = False) -> str | None:
    """Return how the data differ from those of the run's newest checkpoint; None if they do not.

    `parts` are some of the parts of their fingerprint. The plan of a run that is `done` has its
    data where its checkpoints are deleted; a run that has no checkpoint may have other data.
    """
    newest, _ = latest(run)
    before: Any = read_plan(run).get("parts", {}) if done else {}
    if newest is not None:
        before = newest.state.get("data", {})
    known = {name: value for name, value in parts.items() if name in before}
    changed = differences({name: before[name] for name in known}, known)
    at = f"the checkpoint at step {newest.step}" if newest is not None else "the run"
    return f"the data differ from those of {at}: changed {', '.join(changed)}" if changed else None


def refuse_other_data(run: Storage, parts: Mapping[str, object]) -> None:
    """Raise ConfigError if a run with a checkpoint would go on with other data."""
    if changed := changed_data(run, parts):
        what = f"run.name={run.url.rpartition('/')[2]} is taken: {changed}"
        raise ConfigError([f"{what}. Restore them, or set another run.name"])
