"""Run the trials of a sweep with Ray Tune under one budget, and compare them.

    result = sweep("sweep.yaml", max_hours=2)       # what `rayapp sweep --json` prints

A trial is an ordinary run. Its driver is an actor of Tune's that holds no CPU, so that workers find
the room from which the number of trials at a time was counted. Whoever ends a trial (ASHA, the
budget, a user) writes a STOP file into its folder, and the run saves a checkpoint. What a trial has
done is read from its folder, so that the same sweep goes on after a kill.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas
import yaml
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler
from rich.console import Console

from rayapp import report
from rayapp.config import Config, ConfigError, load, reading
from rayapp.config.text import Dumper
from rayapp.data import tokens
from rayapp.driver import placement
from rayapp.driver.checks import same_run
from rayapp.driver.heartbeat import Heartbeat
from rayapp.driver.lease import held
from rayapp.driver.output import captured
from rayapp.driver.ray_session import connected, started_here, uses_gpus
from rayapp.driver.ray_workers import ray_storage
from rayapp.driver.stop import TOLD, Stop, StopAsked, budget_problems, reached, watching
from rayapp.finetune.auto import free_gib
from rayapp.finetune.check import CheckedLanguageRun, absolute, check
from rayapp.finetune.model_parts import model_shape
from rayapp.finetune.prepared_run import finetune, order_of, prepare_beforehand
from rayapp.finetune.sweep_config import Sweep, Trials, read, trials_of
from rayapp.jobs import secrets
from rayapp.jobs.client import ray_address
from rayapp.observe import goodput, metrics
from rayapp.observe.activity import Phases
from rayapp.observe.columns import Columns
from rayapp.observe.metrics import MetricsLine
from rayapp.observe.plain import Console as PlainConsole
from rayapp.observe.run_folder import DONE, FAILED, RAY, REJECTED, STOP, STOPPED
from rayapp.observe.status import NoRun, read_result, summary
from rayapp.observe.words import UNKNOWN, dollars
from rayapp.storage import Storage, open_storage
from rayapp.train.planning import forecast

ASHA = f"{STOPPED} (asha)"  # the state of a trial that ASHA has ended
DRIVER_GIB = 1.0  # of a trial's driver, which imports torch and Ray
HOLDS = {"memory": 2.0**20}  # Tune takes no empty request; each node has gigabytes of this resource

logger = logging.getLogger("rayapp.driver")


def sweep(
    described: str | Mapping[str, Any], console: Console | None = None, **changes: Any
) -> dict[str, Any]:
    """Run a sweep until its trials are done or its budget is spent; return what --json prints.

    Raises:
        ConfigError: it cannot run as described; no trial has been started.
    """
    wanted, phases = read(described, changes), Phases()
    console = console or PlainConsole(force_jupyter=False)
    with captured() as tail, Heartbeat(phases, console, tail):
        secrets.load()
        phases.begin("checking configs, model and data")
        trials = {name: (v, absolute(config)) for name, (v, config) in trials_of(wanted).items()}
        ready = _checked(wanted, trials)
        most = max((each.config for each in ready.values()), key=lambda c: c.cluster.max_workers)
        root, address = open_storage(most.run.storage), ray_address(most)
        control = root / RAY / ".sweep" / wanted.name  # no trial's name begins with a dot
        stop = Stop(control)
        with held(control), stop.on_signal(console):
            stop.forget_old()
            running = Running(wanted, trials, root, stop, console)
            at_once = wanted.concurrency or 1 if address == "local" else 1
            workers = str(at_once * most.cluster.max_workers)
            with connected(most.with_fields("cluster", workers=workers), address):
                _run(running, ready, most, phases)
        phases.begin("comparing the trials")
        result = running.compared()
        phases.begin("")
    return result


def _checked(wanted: Sweep, trials: Trials) -> dict[str, CheckedLanguageRun]:
    """Check each trial as its run does; raise ConfigError with every problem."""
    ready, problems = dict[str, CheckedLanguageRun](), list[str]()
    for name, (_, config) in trials.items():
        problems += budget_problems(config.with_fields("run", max_usd=wanted.max_usd))
        try:
            ready[name] = check(config, None, 0)
            same_run(ready[name].run, ready[name].config, settled=False)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError([*dict.fromkeys(problems)])
    return ready


class Running(TrialProgressCallback):
    """The trials as they run: Tune's thread says which do, another asks them to stop."""

    def __init__(
        self, of: Sweep, trials: Trials, root: Storage, stop: Stop, console: Console
    ) -> None:
        self.sweep, self.trials, self.root, self.stop, self.say = of, trials, root, stop, console
        self.asked: dict[str, str] = {}
        """Why a trial is to end."""
        self.reason: str | None = None
        """Why all are to end."""
        self._live: dict[str, int] = {}  # the trials that run: commands that their runs had before
        self._errors: dict[str, str] = {}
        self._ended = {name: self._spent(name) for name in trials}

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune keeps it, to restore what a sweep reads from its folders

    def on_trial_result(self, *_: Any, **__: Any) -> None:
        pass

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        run = self.root / (name := trial.config["trial"])
        self._live[name] = len(goodput.commands(goodput.read_events(run)))

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        name = trial.config["trial"]
        if error := trial.get_pickled_error() or trial.get_error():
            self._errors[name] = str(error).strip().splitlines()[-1]
        self._ended[name] = self._spent(name)
        del self._live[name]
        row = self.row(name)
        figure = UNKNOWN if row["figure"] is None else f"{row['figure']:.4f}"
        told = f"{name} {row['state']}: {self.sweep.metric} {figure} at step {row['steps']}"
        self.say.print(f"{told}; {took(*self.spent())}", highlight=False, soft_wrap=True)

    on_trial_error = on_trial_complete

    def spent(self) -> tuple[float, float | None]:
        """Return the seconds and USD of all trials; USD is None if a price is not known."""
        live = dict(self._live)
        parts = [self._spent(n, live[n]) if n in live else s for n, s in self._ended.items()]
        usd = [each for _, each in parts if each is not None]
        return sum(each for each, _ in parts), sum(usd) if len(usd) == len(parts) else None

    def _spent(self, name: str, before: int | None = None) -> tuple[float, float | None]:
        """Return what a run has spent; `before` is given while its driver runs."""
        events = goodput.read_events(run := self.root / name)
        if before is None:
            return goodput.spent(events, Columns.read(run, ("time",))["time"], None)
        if len(goodput.commands(events)) <= before:  # it has not written its start yet
            return self._ended[name]
        return goodput.spent(events, np.empty(0), time.time())

    def tend(self) -> None:
        """Write a STOP file for each trial that is to end."""
        limits = self.sweep.max_usd, self.sweep.max_hours
        try:
            if self.reason is None and (told := reached(*limits, *self.spent(), "its trials have")):
                self.reason = f"{told}. The same command with a larger one goes on"
                self.stop.ask()
            if self.reason is None and self.stop.asked():
                self.reason = "asked to stop. The same command goes on"
            for name in list(self._live):
                why, run = self.reason or self.asked.get(name), self.root / name
                if why and not run.exists(STOP):
                    run.write(STOP, f"{TOLD} {self.sweep.name}: {why}\n".encode())
        except OSError as error:  # the next look is another chance
            logger.warning("trials are not asked to stop: %s", error)

    def row(self, name: str) -> dict[str, Any]:
        """Return what is known of a trial from its folder."""
        run, error, result = self.root / name, self._errors.get(name), read_result(self.root / name)
        row = dict.fromkeys(("figure", "low", "high", "usd")) | {"steps": 0, "seconds": 0.0}
        row |= {"trial": name, "parameters": self.trials[name][0], "run": run.url}
        try:
            now = summary(run)
        except NoRun:
            return row | {"state": FAILED if error else "not started", "reason": error}
        by = re.match(rf"{TOLD} \S+: (\w+)", now.reason or "")
        state = f"{STOPPED} ({by[1]})" if by and now.status == STOPPED else now.status
        lines = [result, *reversed(metrics.read(run))]
        known = (metrics.held_out_figure(line, self.sweep.figure) for line in lines)
        row["figure"] = next((value for value in known if value is not None), None)
        if task := (result.get("tasks") or {}).get(self.sweep.figure):
            after = task["after"]
            row |= {"figure": after["value"], "low": after["low"], "high": after["high"]}
        row |= {"seconds": now.account.wall_s, "usd": now.account.cost_usd, "steps": now.step}
        return row | {"state": FAILED if error else state, "reason": error or now.reason}

    def compared(self) -> dict[str, Any]:
        """Return all trials, the best first, and write the page that compares them."""
        config: Config = next(config for _, config in self.trials.values())
        sign = 1.0 if self.sweep.best(config) == "min" else -1.0
        rows = [self.row(name) for name in self.trials]
        last = (None, REJECTED)  # no figure, or a model that eval.gate rejects
        rows.sort(
            key=lambda row: (
                row["state"] in last or row["figure"] in last,
                sign * (row["figure"] or 0.0),
            )
        )
        (seconds, usd), best, page = self.spent(), None, None
        if rows[0]["figure"] is not None and rows[0]["state"] != REJECTED:
            fields = self.trials[rows[0]["trial"]][1].to_overrides()
            if rows[0]["state"] == DONE:
                new = f"{rows[0]['trial'][:60]}-on"
                fields |= {"run.name": new, "model.init_from": rows[0]["run"]}
            words = [f"--{field}={value}" for field, value in fields.items()]
            best = rows[0] | {"command": shlex.join(["rayapp", "finetune", *words])}
        if runs := [self.root / row["trial"] for row in rows if row["steps"]]:
            page = report.compare(runs, f"{self.root.url}/sweep.html")
        told = {"metric": self.sweep.metric, "seconds": seconds, "usd": usd, "reason": self.reason}
        return {"sweep": self.root.url, **told, "trials": rows, "best": best, "page": page}


class Asha(ASHAScheduler):
    """ASHA that has a trial save and leave, where Tune would kill it."""

    def __init__(self, running: Running, mode: str, first: int, steps: int) -> None:
        figure = ("step", running.sweep.metric, mode)
        super().__init__(*figure, max(first, steps - 1), first, stop_last_trials=False)
        self._running = running

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if super().on_trial_result(controller, trial, result) == self.STOP:
            why = f"its {self._metric} at step {result['step']} is not among the best quarter"
            self._running.asked.setdefault(trial.config["trial"], f"asha: {why}")
        return str(self.CONTINUE)


def driver_of(running: Running, todo: Collection[str]) -> Callable[[dict[str, Any]], None]:
    """Return the function of a trial's driver; trials beside `todo` only tell their figures."""
    wanted, root, address = running.sweep, running.root.url, os.environ["RAY_ADDRESS"]
    control = f"{root}/{RAY}/.sweep/{wanted.name}"
    configs = {name: config.to_overrides() for name, (_, config) in running.trials.items()}

    def trial(given: dict[str, Any]) -> None:
        def tell(line: MetricsLine) -> None:
            if (value := metrics.held_out_figure(line, wanted.figure)) is not None:
                tune.report({"step": line["step"], wanted.metric: value})

        name = given["trial"]
        if wanted.scheduler == "asha":  # what it has done before counts for others too
            for line in metrics.read(open_storage(root) / name):
                tell(line)
        if name in todo and not open_storage(control).exists(STOP):
            os.environ["RAY_ADDRESS"] = address
            with open(os.devnull, "w", encoding="utf-8") as nowhere:  # the run keeps its log
                finetune(load(None, configs[name]), PlainConsole(file=nowhere), on_step=tell)

    return trial


def _run(
    running: Running, ready: Mapping[str, CheckedLanguageRun], most: Config, phases: Phases
) -> None:
    """Prepare the data of all trials, show what they would take, and have Tune run them."""
    wanted, gpus, asha = running.sweep, uses_gpus(most), running.sweep.scheduler == "asha"
    free, workers = placement.free_workers(most), most.cluster.max_workers
    rows, gib = list[dict[str, Any]](), 0.0  # of a worker
    try:
        for name, each in ready.items():  # one after the other: equal rows are made once
            made = watching(partial(prepare_beforehand, each, phases), running.stop.check)
            if wanted.metric == "eval_loss" and not made.held_out:
                why = "no data are held out. Set data.eval_fraction or data.eval_path in its config"
                raise ConfigError([f"metric=eval_loss is without figures: {why}"])
            steps = order_of(each.config.with_micro_batch(1), made).num_steps
            ids = None if each.tokenizer is None else tokens.num_ids(each.tokenizer)
            shape = model_shape(each.model, each.config, ids)
            plan = forecast(each.config, shape, steps=steps, on_cpu=not gpus)
            bands = (plan.hours, plan.cost_usd) if plan else (None, None)
            hours, usd = (np.nan if band is None else band.value for band in bands)
            rows.append({"trial": name, "steps": steps, "hours": hours, "USD": usd})
            gib = max(gib, plan.peak_gib.value if plan else 0.0)
    except StopAsked:
        return
    phases.begin("")
    table = pandas.DataFrame(rows)
    total = table[["steps", "hours", "USD"]].sum(skipna=False)
    _show(running.say, pandas.concat([table, pandas.DataFrame([{"trial": "all", **total}])]))
    for limit, unit in (("max_usd", "USD"), ("max_hours", "hours")):
        if (budget := getattr(wanted, limit)) is not None and not total[unit] <= budget:
            told = f"{limit}={budget:g} may end trials early: the plan of all takes"
            running.say.print(f"{told} {total[unit]:.3g} {unit}".replace(" nan ", " n/a "))
    ended = {DONE, REJECTED, ASHA} if asha else {DONE, REJECTED}
    over = [name for name in ready if running.row(name)["state"] in ended]
    todo = [name for name in ready if name not in over]
    free_memory_gib = free_gib(False, 1) if started_here() and not gpus else np.inf
    at_once = wanted.concurrency or room(free, workers, free_memory_gib, gib)
    running.say.print(f"{len(todo)} of {len(ready)} trials to run, at most {at_once} at a time")
    if not todo:
        return
    scheduler: Any = FIFOScheduler()
    if asha:
        every, longest = most.eval.every_steps or 1, int(table["steps"].max())
        scheduler = Asha(running, wanted.best(most), every, longest)
    filesystem, place = ray_storage(f"{running.root.url}/{RAY}")
    os.environ |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_AIR_NEW_OUTPUT": "0"}
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # `Running` tells what happens
    settings = {"name": ".tune", "storage_path": place, "storage_filesystem": filesystem}
    tuner = tune.Tuner(
        tune.with_resources(driver_of(running, todo), HOLDS),
        param_space={"trial": tune.grid_search([*(over if asha else ()), *todo])},
        tune_config=tune.TuneConfig(scheduler=scheduler, max_concurrent_trials=at_once),
        run_config=tune.RunConfig(**settings, callbacks=[running], verbose=0),
    )
    watching(tuner.fit, running.tend)


def room(free: int, workers: int, free_memory_gib: float, gib: float) -> int:
    """Return how many trials fit at a time into the room for `free` workers; 1 waits for its own.

    >>> room(7, 2, 64.0, 4.0), room(7, 2, 20.0, 4.0), room(1, 2, 64.0, 4.0)
    (3, 2, 1)
    """
    by_memory = min(1e9, free_memory_gib) / (DRIVER_GIB + workers * gib)
    return max(1, min(free // workers, int(by_memory)))


def took(seconds: float, usd: float | None) -> str:
    """Say what all trials have taken."""
    return f"all trials took {seconds / 3600:.4f} hours, cost {dollars(usd)}"


def _show(console: Console, table: pandas.DataFrame) -> None:
    text = table.to_string(index=False, na_rep=UNKNOWN, float_format="{:.5g}".format)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def show_result(console: Console, result: Mapping[str, Any]) -> None:
    """Print the table of a sweep, the best trial's config, and the command that goes on from it."""
    rows, best = [row | row["parameters"] for row in result["trials"]], result["best"]
    names = {"figure": result["metric"], "low": "from", "high": "to"}
    columns = ["trial", *rows[0]["parameters"], *names, "steps", "state", "run"]
    table = pandas.DataFrame(rows, columns=columns).rename(columns=names)
    _show(console, table.dropna(axis="columns", how="all"))
    lines = [f"{row['trial']}: {row['reason']}" for row in rows if row["state"] == FAILED]
    lines += [". ".join(filter(None, [took(result["seconds"], result["usd"]), result["reason"]]))]
    if best is not None:
        tree = dict[str, Any]()
        for field, value in best["parameters"].items():
            reading.put(tree, field, value, [])
        lines += [f"the best is {best['trial']}:", "", yaml.dump(tree, Dumper=Dumper)]
        lines += [best["command"], "", f"compared in {result['page']}"]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
