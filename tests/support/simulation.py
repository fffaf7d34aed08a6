"""A simulated run: drivers, workers, faults and a storage, judged after every action.

    world = World(seed)
    world.simulate()            # raises Violation

The code of the run's control side is the product's own: lease, fence, stop, supervision, recovery,
journal, resume point, claim, commit and retention. The storage, the clock, the network and what a
worker computes are simulated. What the model leaves out: a write without a condition (of a worker)
takes effect within LATE_S seconds after it was sent, or never; a group is one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, BinaryIO

from judge import KEEP, METADATA, SHARD, Judge, Violation
from rich.console import Console
from scheduler import Killed, Process, Scheduler, SimulatedClock

from rayapp.config import Config, from_dict
from rayapp.driver import lease as leases
from rayapp.driver.checks import check_resumable
from rayapp.driver.lease import Holder, held
from rayapp.driver.stop import Stop, StopAsked
from rayapp.driver.supervise import Command, fit
from rayapp.observe.clock import Call
from rayapp.observe.events import Journal
from rayapp.observe.result import RunFailed
from rayapp.observe.run_folder import CHECKPOINTS, METRICS, RESULT, STOP
from rayapp.order import Order
from rayapp.storage import Entry, Storage, StorageError
from rayapp.storage.base import Entries, Names, changed
from rayapp.train.checkpoint import marker
from rayapp.train.checkpoint.commit import claim, commit, sweep
from rayapp.train.schedule import LeaveWatcher
from rayapp.train.step_sync import CONTINUE, RESTART

LATE_S = 12.0
PATIENCE_S = 120.0  # for which a client repeats a request
STEPS = 16
ROOT = "s3://bucket/runs/demo"
LINE = {"step_s": 1.0, "loss": 2.0, "tokens_per_s": 1.0, "peak_gib": 1.0, "mfu": None}


@dataclass(frozen=True)
class File:
    data: bytes
    etag: str
    at: float


@dataclass(frozen=True)
class SimulatedStorage(Storage):
    """The store as one process sees it: slow, sometimes failing, sometimes late."""

    world: World = field(repr=False)
    process: Process = field(repr=False)

    def child(self, name: str) -> Storage:
        return SimulatedStorage(self._folder_url(name), self.world, self.process)

    __truediv__ = child

    def local_path(self, name: str = "") -> None:
        return None

    def check_writable(self) -> None:
        pass

    def read(
        self, name: str, offset: int = 0, length: int | None = None, etag: str | None = None
    ) -> bytes:
        def act() -> bytes:
            file = self.world.files.get(self._url(name))
            if file is None:
                raise FileNotFoundError(name)
            if etag not in (None, file.etag):
                raise changed(self._url(name))
            return file.data[offset:] if length is None else file.data[offset : offset + length]

        return self._send("read", name, act)

    def stat(self, name: str) -> Entry | None:
        def act() -> Entry | None:
            file = self.world.files.get(self._url(name))
            return file and Entry(name, len(file.data), file.etag, 1.8e9 + file.at)

        return self._send("stat", name, act)

    def list(self, prefix: str = "") -> Entries:
        def act() -> Entries:
            start = self._folder_url(prefix) + "/"
            return [
                Entry(url[len(self.url) + 1 :], len(file.data), file.etag, 1.8e9 + file.at)
                for url, file in sorted(self.world.files.items())
                if url.startswith(start)
            ]

        return self._send("list", prefix, act)

    def dirs(self, prefix: str = "") -> Names:
        def act() -> Names:
            start = self._folder_url(prefix) + "/"
            rests = [url[len(start) :] for url in self.world.files if url.startswith(start)]
            return sorted({rest.split("/")[0] for rest in rests if "/" in rest})

        return self._send("list", prefix, act)

    @contextmanager
    def open_write(self, name: str) -> Iterator[BinaryIO]:
        out = BytesIO()
        yield out
        self.write(name, out.getvalue())

    def write(self, name: str, data: bytes) -> None:
        self._send("write", name, lambda: self.world.put(self.process, self._url(name), data))

    def create(self, name: str, data: bytes) -> str | None:
        return self._send("write", name, lambda: self._put_if(name, data, None), True)

    def replace_if(self, name: str, data: bytes, etag: str) -> str | None:
        return self._send("write", name, lambda: self._put_if(name, data, etag), True)

    def _put_if(self, name: str, data: bytes, etag: str | None) -> str | None:
        file = self.world.files.get(self._url(name))
        if (file.etag if file else None) != etag:
            return None
        return self.world.put(self.process, self._url(name), data)

    def delete(self, name: str) -> None:
        self._send("delete", name, lambda: self.world.remove(self._url(name)))

    def delete_if(self, name: str, etag: str) -> bool:
        def act() -> bool:
            file = self.world.files.get(self._url(name))
            if file is None or file.etag != etag:
                return False
            self.world.remove(self._url(name))
            return True

        return self._send("delete", name, act, True)

    def delete_tree(self, prefix: str) -> None:
        def act() -> None:
            start = self._folder_url(prefix) + "/"
            for url in [url for url in self.world.files if url.startswith(start)]:
                self.world.remove(url)

        self._send("delete", prefix, act)

    def _send(self, what: str, name: str, act: Callable[[], Any], conditional: bool = False) -> Any:
        """Carry out a request now, late, or never, by what the world has in store for it."""
        world, scheduler = self.world, self.world.scheduler
        scheduler.pause(world.latency_s())
        fault = world.fault(self.process)
        if fault == "strange":
            raise ValueError("a library's error that nobody expects")
        silent_s = (
            0.0
            if self.process is world.user
            else max(self.process.cut_off_until, world.outage_until) - scheduler.now
        )
        if fault is None and silent_s <= 0:
            answer = act()
            scheduler.pause(world.latency_s())
            return answer
        if 0 < silent_s <= PATIENCE_S:  # the client repeats the request until it is answered
            scheduler.pause(silent_s)
            return self._send(what, name, act, conditional)
        changes = what in ("write", "delete")
        if changes and fault == "late":
            late_s = world.random.uniform(0.0, 3 * PATIENCE_S if conditional else LATE_S)
            world.later(late_s, act)
        elif changes and fault == "lost":
            act()
        scheduler.pause(world.random.uniform(1.0, PATIENCE_S))
        error = StorageError(what, self._folder_url(name), "no answer (gave up)")
        error.outage = True
        raise error


@dataclass
class Spec:
    """As much of a RunSpec as supervision reads."""

    config: Config
    order: Order
    data: Any = None


class World:
    """One history: its faults are drawn from the seed before it begins."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.scheduler = Scheduler(seed)
        self.random = self.scheduler.random
        self.files: dict[str, File] = {}
        self.history: list[str] = []
        self.storage_process = Process("storage", "storage")
        self.user = Process("user", "laptop")
        self.config = from_dict(
            {
                "run": {"storage": "s3://bucket/runs", "name": "demo"},
                "cluster": {"workers": "1", "gpu": "false", "max_failures": 3},
                "eval": {"checkpoints": False},
            }
        )
        self.order = Order.for_steps(64, 4, 2, seed=3, num_steps=STEPS)
        self.fault_rate = self.random.choice([0.0, 0.0, 0.01, 0.04])
        self.strange_rate = self.random.choice([0.0, 0.0, 0.0, 0.002])
        self.bad_step = self.random.choice([None, None, None, self.random.randrange(STEPS)])
        self.weak_steps = {self.random.randrange(STEPS) for _ in range(self.random.choice([0, 3]))}
        self.outage_until = 0.0
        self.second_at = self.random.choice([None, None, self.random.uniform(0, 300)])
        """When the user gives the command again although a driver is alive."""
        self._etags = 0
        self.judge = Judge(self)
        self.scheduler.after_each = self.judge.check

    # ---- the store ----------------------------------------------------------------------------

    def put(self, process: Process, url: str, data: bytes) -> str:
        self._etags += 1
        etag = f'"{self._etags}"'
        self.files[url] = File(data, etag, self.scheduler.now)
        self.judge.wrote(process, url.removeprefix(f"{ROOT}/"), data)
        return etag

    def remove(self, url: str) -> None:
        if url in self.files:
            self.judge.removes(url.removeprefix(f"{ROOT}/"))
            del self.files[url]

    def later(self, seconds: float, act: Callable[[], Any]) -> None:
        def carry_out() -> None:
            self.scheduler.pause(seconds)
            act()

        self.scheduler.start(self.storage_process, carry_out, "late request")

    def latency_s(self) -> float:
        return self.random.choice([0.01, 0.05, 0.3])

    def fault(self, process: Process) -> str | None:
        if process is self.user:
            return None
        if self.random.random() < self.strange_rate:
            return "strange"
        if self.random.random() < self.fault_rate:
            return self.random.choice(["never", "lost", "late"])
        return None

    def log(self, text: str) -> None:
        self.history.append(f"{self.scheduler.now:8.1f} {text}")

    # ---- the history --------------------------------------------------------------------------

    def simulate(self, limit_s: float = 40_000.0) -> None:
        """Live through the history; raise Violation where it breaks a promise."""
        try:
            with patched(self):
                first = Process("driver 1", "a", self.random.uniform(-5, 5))
                self.scheduler.start(first, lambda: self.drive(first), "driver 1")
                self.scheduler.start(self.user, self._user, "user")
                self.scheduler.start(self.user, lambda: self._chaos(first), "chaos")
                if not self.scheduler.run(limit_s):
                    tasks = ", ".join(task.name for task in self.scheduler.tasks)
                    raise Violation(f"not over after {limit_s:.0f} s: {tasks} go on")
                self.judge.final()
        except Violation as error:
            lines = "\n".join(self.history[-60:])
            raise Violation(f"seed {self.seed}: {error}\n{lines}") from None
        finally:
            self.scheduler.close()

    def _user(self) -> None:
        """Give the command again until the run has ended; perhaps ask it to stop once."""
        number, storage = 1, SimulatedStorage(ROOT, self, self.user)
        stop_at = self.random.choice([None, 0.3, 2.0, self.random.uniform(0, 250)])
        while self.scheduler.now < 20_000:
            self.scheduler.pause(0.1 if self.scheduler.now < 3 else 2.0)
            if stop_at is not None and self.scheduler.now >= stop_at:
                stop_at = None
                self.log("the user asks for a stop")
                self.judge.stop_is_asked()
                storage.write(STOP, b"asked\n")
            drivers = [p for p in self.judge.drivers if p.alive and p.name not in self.judge.ended]
            again = not drivers and number < 9 and not self.judge.over()
            beside = self.second_at is not None and self.scheduler.now >= self.second_at
            if again or beside:
                self.second_at = None if beside else self.second_at
                number += 1
                machine = self.random.choice(["a", "b", f"m{number}"])
                process = Process(f"driver {number}", machine, self.random.uniform(-5, 5))
                self.scheduler.start(process, lambda p=process: self.drive(p), process.name)
            if not drivers and not again and self.scheduler.now > 5:
                return

    def _chaos(self, first: Process) -> None:
        """Do up to three things to the run."""
        for _ in range(self.random.choice([0, 1, 1, 2, 3])):
            self.scheduler.pause(self.random.expovariate(1 / 60.0))
            what = self.random.choice(
                ["kill driver", "suspend driver", "cut driver", "kill workers", "outage", "damage"]
            )
            alive = [p for p in self.judge.drivers if p.alive] or [first]
            target = self.random.choice(alive)
            for_s = self.random.choice([20.0, 100.0, 200.0, 600.0])
            self.log(f"{what} ({target.name}, {for_s:.0f} s)")
            if what == "kill driver":
                target.kill()
            elif what in ("suspend driver", "cut driver"):
                until = "suspended_until" if what == "suspend driver" else "cut_off_until"
                setattr(target, until, self.scheduler.now + for_s)
                self.second_at = self.scheduler.now + self.random.uniform(0, 30)
            elif what == "kill workers":
                for child in target.children:
                    child.kill()
            elif what == "outage":
                self.outage_until = self.scheduler.now + for_s
            else:
                self._damage()

    def _damage(self) -> None:
        """Cut a byte from a shard of one checkpoint, or of all."""
        shards = [url for url in self.files if url.endswith(SHARD)]
        some = shards if self.random.random() < 0.3 else shards[-1:]
        for url in some:
            file = self.files[url]
            self.files[url] = File(file.data[:-1], file.etag, file.at)
            self.judge.damaged_at[url.split("/")[-2]] = self.scheduler.now
            self.log(f"damaged {url.removeprefix(ROOT)}")

    # ---- a driver -----------------------------------------------------------------------------

    def drive(self, process: Process) -> None:
        """What driver/command.py does, without Ray, rows and a report."""
        clock = SimulatedClock(self.scheduler, process)
        run = SimulatedStorage(ROOT, self, process)
        self.judge.begins(process)
        outcome = "failed: ?"
        try:
            stop = Stop(run, clock)
            with held(run, clock=clock) as lease:
                stop.forget_old()
                fenced = lease.fence(run)
                clock.sleep(self.random.uniform(15.0, 40.0))  # Ray starts, rows are prepared
                check_resumable(fenced)
                command = Command(fenced, lease, stop, Journal(fenced), clock)
                with command.journal.command(self.config, clock.time()):
                    spec: Any = Spec(self.config, self.order)
                    workers: Any = SimulatedWorkers(self, process, clock)
                    quiet = Console(quiet=True)
                    summary = fit(command, spec, workers, quiet, lambda spec, ended: None)
                    command.journal.ended(summary["status"], {})
                fenced.write(RESULT, json.dumps({"status": summary["status"]}).encode())
                outcome = summary["status"]
        except StopAsked:
            outcome = "stopped"
        except Killed:
            outcome = "killed"
            raise
        except (RunFailed, OSError, ValueError) as error:  # ConfigError is a ValueError
            outcome = f"failed: {error}"
        finally:
            if process.alive:
                self.log(f"{process.name}: {outcome}")
                self.judge.ends(process, outcome)
                process.kill()


class SimulatedWorkers:
    """A cluster that always has room."""

    def __init__(self, world: World, driver: Process, clock: SimulatedClock) -> None:
        self.world, self.driver, self.clock = world, driver, clock

    def asked_for(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_for_room(self, note: Callable[[str], None], check: Callable[[], None]) -> int:
        check()
        self.clock.sleep(1.0)
        return 1

    def start(self, spec: Spec, workers: int) -> Any:
        return SimulatedAttempt(self.world, self.driver, self.clock)


class SimulatedAttempt:
    """A group of workers, as one process on another machine."""

    def __init__(self, world: World, driver: Process, clock: SimulatedClock) -> None:
        self.world = world
        number = len(driver.children) + 1
        self.group = Process(f"{driver.name}'s group {number}", "w", driver.clock_skew_s)
        driver.children.append(self.group)
        group_clock = SimulatedClock(world.scheduler, self.group)
        self.call = Call(group_clock, lambda: Group(world, driver, self.group).train(), "train")
        self._clock = clock

    def wait(self, seconds: float) -> bool:
        ended = self.call._ended.is_set() or not self.group.alive
        if not ended:
            self._clock.sleep(seconds)
        return self.call._ended.is_set() or not self.group.alive

    def outcome(self) -> Any:
        if not self.call._ended.is_set():
            return RuntimeError("the actor died: its node has died")
        return self.call.error or self.call.result()

    def end(self) -> None:
        self.group.kill()


class Group:
    """What train/rank.py does around the steps, with simulated steps."""

    def __init__(self, world: World, driver: Process, process: Process) -> None:
        self.world, self.driver, self.process = world, driver, process
        self.clock = SimulatedClock(world.scheduler, process)
        self.run = SimulatedStorage(ROOT, world, process)
        self.failures = self.step = 0

    def train(self) -> dict[str, Any]:
        try:
            return self._train()
        except Exception:
            self.world.judge.failed(self.step)
            raise

    def _train(self) -> dict[str, Any]:
        world, entered = self.world, self.clock.time()
        world.judge.resumes(self.process)
        found, _ = marker.resume_point(self.run)
        first = step = self.step = found.step if found else 0
        world.judge.resumed(self.driver, self.process, step)
        lines = [line for line in self._lines() if line["step"] <= step]
        attempt = 1 + max((line["attempt"] for line in self._lines()), default=0)
        self._store(lines)
        watcher = LeaveWatcher(self.run, None, self.clock)
        leave = CONTINUE
        while step < STEPS and leave == CONTINUE:
            self.clock.sleep(world.random.uniform(1.0, 6.0))
            if step == world.bad_step or step in world.weak_steps:
                world.weak_steps.discard(step)
                raise RuntimeError(f"boom in step {step + 1}")
            step += 1
            leave = watcher.due()
            world.judge.steps(self.driver, self.process, step)
            lines.append({**LINE, "step": step, "attempt": attempt, "time": self.clock.time()})
            self._store(lines)
            self.step = step
            if step % 3 == 0 or step == STEPS or leave != CONTINUE:
                self._save(step)
        watcher.close()
        status = "done" if step >= STEPS else "moved" if leave == RESTART else "stopped"
        summary = {"status": status, "steps": step, "first_step": first, "entered": entered}
        return {**summary, "notice": False, "reason": watcher.reason, "seconds": {}}

    def _lines(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in self.run.read(METRICS).splitlines()]
        except FileNotFoundError:
            return []

    def _store(self, lines: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        while True:
            try:
                self.run.write(METRICS, text)
                return
            except StorageError:
                self.clock.sleep(5.0)

    def _save(self, step: int) -> None:
        state = json.dumps({"step": step}).encode()
        try:
            name = claim(self.run, step, state)
            files = {}
            for file in (SHARD, METADATA):
                data = f"{name} {file}".encode()
                (self.run / CHECKPOINTS).write(f"{name}/{file}", data)
                digest = marker.Digest()
                digest.update(data)
                files[file] = digest.file()
            commit(self.run, name, step, state, files)
            self.failures = 0
        except StorageError as error:
            self.failures += 1
            if self.failures == 3:
                raise marker.CheckpointError(
                    f"3 checkpoints in a row could not be saved in {ROOT}: {error}"
                ) from error
            return
        with suppress(StorageError):
            sweep(self.run, name, KEEP)


@contextmanager
def patched(world: World) -> Iterator[None]:
    """Let the lease ask the simulation which process this is, and whether another one lives."""

    def this_process() -> Holder:
        assert world.scheduler.current is not None
        process = world.scheduler.current.process
        pid = world.judge.pid_of(process)
        return Holder(
            id=f"{process.name}-{len(world.judge.holders)}",
            host=process.machine,
            pid=pid,
            process=process.name,
            machine=[process.machine],
        )

    def mark_of(pid: int) -> str | None:
        process = world.judge.drivers[pid - 1]
        return process.name if process.alive else None

    originals = leases.this_process, leases._process
    leases.this_process, leases._process = this_process, mark_of
    try:
        yield
    finally:
        leases.this_process, leases._process = originals
