"""Faults in the driver, which starts, watches and restarts a run, and in what it shows."""

from __future__ import annotations

from mutated import Mutation

LEASE, STOP, RECOVERY, PLACEMENT, SUPERVISE, VALIDATION, WORKER = (
    f"rayapp/driver/{name}.py"
    for name in (
        "lease",
        "stop",
        "recovery",
        "placement",
        "supervise",
        "ray_workers",
        "worker",
    )
)
METRICS = "rayapp/observe/metrics_log.py"
OF_LEASE = "tests/test_driver_lease.py"
OF_STOP = "tests/test_driver_stop.py"
OF_RECOVERY = "tests/test_driver_recovery.py"
OF_PLACEMENT = "tests/test_driver_placement.py"
OF_METRICS = "tests/test_observe_metrics.py"
OF_SUPERVISE = "tests/test_driver_supervise.py"
OUTPUT, OF_OUTPUT = "rayapp/driver/output.py", "tests/test_driver_output.py"
OF_RESERVE = "tests/test_driver_output_reserve.py"

DRIVER = (
    # ---- One live run per name
    Mutation(
        "lease-taken-without-comparing",
        LEASE,
        "etag = run.replace_if(LEASE, _text(mine), entry.etag)",
        "etag = run.write(LEASE, _text(mine)) or run.stat(LEASE).etag",
        OF_LEASE,
    ),
    Mutation(
        "lease-of-another-deleted",
        LEASE,
        "self._run.delete_if(LEASE, self._etag)",
        "self._run.delete(LEASE)",
        OF_LEASE,
    ),
    Mutation(
        "renewals-end-with-an-error",
        LEASE,
        'logger.warning("cannot renew the lease, will try again: %s", error)',
        "return",
        OF_LEASE,
    ),
    Mutation(
        "renewal-goes-unseen",
        LEASE,
        "if (here and not ended) or entry.etag != seen:",
        "if here and not ended:",
        OF_LEASE,
    ),
    Mutation(
        "pid-of-another-process",
        LEASE,
        'other["process"] != _process(other["pid"])',
        '_process(other["pid"]) is None',
        OF_LEASE,
    ),
    Mutation(
        "lost-lease-not-told",
        LEASE,
        "            self._lose(holder)\n        else:",
        "            return\n        else:",
        OF_LEASE,
    ),
    # ---- STOP
    Mutation(
        "new-stop-taken-for-old",
        STOP,
        "self._run.delete_if(run_folder.STOP, self._old)",
        "self._run.delete(run_folder.STOP)",
        OF_STOP,
    ),
    Mutation(
        "second-signal-caught",
        STOP,
        "            restore()\n            console.print(",
        "            console.print(",
        OF_STOP,
    ),
    Mutation(
        "signal-kept-from-workers",
        STOP,
        'target=self._tell_workers, name="stop"',
        'target=self.asked, name="stop"',
        f"{OF_STOP} -k signal",
    ),
    Mutation(
        "start-cannot-be-stopped",
        STOP,
        "        check()\n    return call.result()",
        "        pass\n    return call.result()",
        OF_STOP,
    ),
    # ---- When training is started again
    Mutation(
        "one-failure-too-few",
        RECOVERY,
        "if len(times) + 1 > most:",
        "if len(times) + 1 >= most:",
        OF_RECOVERY,
    ),
    Mutation(
        "preemptions-use-up-failures",
        RECOVERY,
        "            self._preemptions += 1\n",
        '            self._preemptions += 1; self._failed_at[STEP] = [float("inf")]\n',
        OF_RECOVERY,
    ),
    Mutation(
        "pauses-without-bound",
        RECOVERY,
        "min(LONGEST_PAUSE_S, 2.0 ** (self._pauses - 1))",
        "2.0 ** (self._pauses - 1)",
        OF_RECOVERY,
    ),
    Mutation(
        "loops-never-forgotten",
        RECOVERY,
        "            self._alike.clear()\n",
        "",
        OF_RECOVERY,
    ),
    Mutation(
        "full-disk-tried-again",
        RECOVERY,
        "        elif ending.final:\n",
        "        elif False:\n",
        OF_RECOVERY,
    ),
    # ---- Room, and the watch over an attempt
    Mutation(
        "no-cpu-for-data",
        PLACEMENT,
        'math.floor((cpus - 1.0) / need["CPU"] + 1e-9)',
        'math.floor(cpus / need["CPU"] + 1e-9)',
        OF_PLACEMENT,
    ),
    Mutation(
        "few-taken-at-once",
        PLACEMENT,
        "if seen == most or (seen >= least and now - since >= SETTLE_S):",
        "if seen >= least:",
        OF_PLACEMENT,
    ),
    Mutation(
        "lost-lease-trains-on",
        SUPERVISE,
        "        while not attempt.wait(POLL_S):\n            lease.check()\n",
        "        while not attempt.wait(POLL_S):\n",
        OF_SUPERVISE,
    ),
    Mutation(
        "stuck-start-cannot-be-stopped",
        SUPERVISE,
        "            if poll.unanswered:\n                attempt.end()\n",
        "            if poll.unanswered:\n",
        OF_SUPERVISE,
    ),
    Mutation(
        "a-step-that-nobody-has-read-yet-is-cut-off",
        SUPERVISE,
        "            self.unanswered = began - self.asked_at >= ANSWER_S\n",
        "            self.unanswered = True\n",
        OF_SUPERVISE,
    ),
    Mutation(
        "steps-are-cut-off-by-a-stop",
        SUPERVISE,
        "            self.stepped = True\n",
        "",
        OF_SUPERVISE,
    ),
    Mutation(
        "pause-cannot-be-stopped",
        SUPERVISE,
        "            self.command.check()\n            self.clock.sleep(POLL_S)\n",
        "            self.clock.sleep(POLL_S)\n",
        OF_SUPERVISE,
    ),
    Mutation(
        "rows-of-another-step",
        WORKER,
        "if head.step != step:",
        "if head.step > step:",
        "tests/test_driver_worker.py",
    ),
    Mutation(
        "validation-twice",
        VALIDATION,
        "or newest.step <= self._asked",
        "or newest.step < self._asked",
        "tests/test_driver_ray_workers_validation.py",
    ),
    # ---- metrics.jsonl
    Mutation(
        "resume-drops-a-line",
        METRICS,
        'if line["step"] <= first_step:',
        'if line["step"] < first_step:',
        OF_METRICS,
    ),
    Mutation(
        "attempt-numbered-twice",
        METRICS,
        "self.attempt = newest + 1",
        "self.attempt = newest",
        OF_METRICS,
    ),
    Mutation(
        "lines-end-with-an-s3-error",
        METRICS,
        "                self._error = error\n",
        "                self._error = error\n                return\n",
        OF_METRICS,
    ),
    Mutation(
        "not-a-number-in-json",
        METRICS,
        "json.dumps(_finite(line), allow_nan=False)",
        "json.dumps(line)",
        OF_METRICS,
    ),
    Mutation(
        "stale-lease-trusted",
        LEASE,
        "return self._lost is None and age_s < LEASE_STOPPED_S",
        "return self._lost is None",
        OF_LEASE,
    ),
    Mutation(
        "late-renewal-is-anothers",
        LEASE,
        'if entry is None or holder is None or holder["id"] != self._holder["id"]:',
        "if True:",
        OF_LEASE,
    ),
    Mutation(
        "thread-dies-in-silence",
        LEASE,
        '            self._lost = f"the lease of {self._run.url} cannot be renewed: {error!r}"\n',
        "            pass\n",
        OF_LEASE,
    ),
    Mutation(
        "write-after-the-lease",
        LEASE,
        "                self.verify()  #",
        "                pass  #",
        OF_LEASE,
    ),
    Mutation(
        "window-without-end",
        RECOVERY,
        "if now - at < window_s",
        "if True",
        OF_RECOVERY,
    ),
    Mutation(
        "stale-lease-trains-on",
        SUPERVISE,
        "                attempt.end()\n            poll.start()",
        "            poll.start()",
        OF_SUPERVISE,
    ),
    # ---- What a command leaves of its end
    Mutation(
        "no-room-for-the-reason",
        SUPERVISE,
        "        command.reserve.free()\n",
        "",
        OF_RESERVE,
    ),
    Mutation(
        "full-disk-is-waited-for",
        SUPERVISE,
        "            raise GiveUp(str(self.command.lease.full))\n",
        "            return\n",
        OF_RESERVE,
    ),
    Mutation(
        "write-without-end-on-a-full-disk",
        LEASE,
        "if self.full is not None and self._clock.monotonic() > until:",
        "if False:",
        OF_RESERVE,
    ),
    Mutation(
        "reserve-that-takes-no-room",
        OUTPUT,
        "file.write(os.urandom(RESERVE_BYTES))",
        "file.truncate(RESERVE_BYTES)",
        OF_RESERVE,
    ),
    Mutation(
        "frames-of-a-bar-are-kept",
        OUTPUT,
        'shown.rpartition("\\r")[2]',
        "shown",
        OF_OUTPUT,
    ),
    Mutation(
        "output-of-the-attempt-before",
        OUTPUT,
        "        self._tail.clear()\n",
        "",
        OF_OUTPUT,
    ),
    Mutation(
        "logs-without-number",
        OUTPUT,
        "if number <= self.number - KEPT:",
        "if False:",
        OF_OUTPUT,
    ),
    Mutation(
        "a-peer-is-blamed",
        "rayapp/observe/attempts.py",
        "RayActorError), follows, rank",
        "RayActorError), rank",
        "tests/test_observe_result.py -k explain",
    ),
    Mutation(
        "first-failure-untold",
        RECOVERY,
        "if ending.kind == attempts.FAILURE and self._first is None:",
        "if ending.kind == attempts.FAILURE:",
        OF_RECOVERY,
    ),
    Mutation(
        "list-costs-its-first-type",
        "rayapp/observe/events.py",
        "list(places).count(choice.place), nodes",
        "len(places), nodes",
        "tests/test_observe_events.py -k list",
    ),
    Mutation(
        "prices-of-a-list-unchecked",
        STOP,
        'known = all(machines(one, 1)["usd_per_hour"] for one in each)',
        'known = any(machines(one, 1)["usd_per_hour"] for one in each)',
        "tests/test_driver_stop_budget.py -k choice",
    ),
)
