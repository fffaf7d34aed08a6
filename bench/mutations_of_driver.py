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
        "validation",
        "worker",
    )
)
METRICS = "rayapp/observe/metrics.py"
OF_LEASE = "tests/test_driver_lease.py"
OF_STOP = "tests/test_driver_stop.py"
OF_RECOVERY = "tests/test_driver_recovery.py"
OF_PLACEMENT = "tests/test_driver_placement.py"
OF_METRICS = "tests/test_observe_metrics.py"
OF_SUPERVISE = "tests/test_driver_supervise.py"

DRIVER = (
    # ---- One live run per name
    Mutation(
        "lease-taken-without-comparing",
        LEASE,
        "            etag = run.replace_if(LEASE, json.dumps(mine).encode(), entry.etag)\n"
        "            if etag is not None:\n                return mine, etag\n",
        "            run.write(LEASE, json.dumps(mine).encode())\n"
        "            return mine, run.stat(LEASE).etag\n",
        OF_LEASE,
    ),
    Mutation(
        "lease-of-another-deleted",
        LEASE,
        "if entry is not None and entry.etag == self._etag:",
        "if entry is not None:",
        OF_LEASE,
    ),
    Mutation(
        "renewals-end-with-an-error",
        LEASE,
        "                continue\n            if etag is None:",
        "                return\n            if etag is None:",
        OF_LEASE,
    ),
    Mutation(
        "renewal-goes-unseen",
        LEASE,
        "if here or entry.etag != seen:",
        "if here:",
        OF_LEASE,
    ),
    Mutation(
        "pid-of-another-process",
        LEASE,
        'holder["process"] != _process(holder["pid"])',
        '_process(holder["pid"]) is None',
        OF_LEASE,
    ),
    Mutation(
        "lost-lease-not-told",
        LEASE,
        "                self._lost.set()\n",
        "",
        OF_LEASE,
    ),
    # ---- STOP
    Mutation(
        "new-stop-taken-for-old",
        STOP,
        "if entry is not None and entry.etag == self._old:",
        "if entry is not None:",
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
        "            check()\n        return future.result()",
        "            pass\n        return future.result()",
        OF_STOP,
    ),
    # ---- When training is started again
    Mutation(
        "one-failure-too-few",
        RECOVERY,
        "if self._failures > self.max_failures:",
        "if self._failures >= self.max_failures:",
        OF_RECOVERY,
    ),
    Mutation(
        "preemptions-use-up-failures",
        RECOVERY,
        "            self._preemptions += 1\n",
        "            self._preemptions += 1\n            self._failures += 1\n",
        OF_RECOVERY,
    ),
    Mutation(
        "pauses-without-bound",
        RECOVERY,
        "min(LONGEST_PAUSE_S, 2.0**tried)",
        "2.0**tried",
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
        "        if ending.final:\n",
        "        if False:\n",
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
        "        done = bool(wait([fit], timeout=wait_s).done)\n        lease.check()\n",
        "        done = bool(wait([fit], timeout=wait_s).done)\n",
        OF_SUPERVISE,
    ),
    Mutation(
        "stuck-start-cannot-be-stopped",
        SUPERVISE,
        "                end_workers()\n",
        "                pass\n",
        OF_SUPERVISE,
    ),
    Mutation(
        "steps-are-cut-off-by-a-stop",
        SUPERVISE,
        "shown, stepped = line, True",
        "shown = line",
        OF_SUPERVISE,
    ),
    Mutation(
        "pause-cannot-be-stopped",
        SUPERVISE,
        "        check()\n        time.sleep(POLL_S)\n",
        "        time.sleep(POLL_S)\n",
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
        "tests/test_driver_validation.py",
    ),
    # ---- metrics.jsonl
    Mutation(
        "resume-drops-a-line",
        METRICS,
        'if line["step"] <= first_step]',
        'if line["step"] < first_step]',
        OF_METRICS,
    ),
    Mutation(
        "attempt-numbered-twice",
        METRICS,
        "for line in before), default=0)",
        "for line in kept), default=0)",
        OF_METRICS,
    ),
    Mutation(
        "lines-end-with-an-s3-error",
        METRICS,
        "                self._error = error\n                self._changed.set()\n",
        "                self._error = error\n                return\n",
        OF_METRICS,
    ),
    Mutation(
        "not-a-number-in-json",
        METRICS,
        "json.dumps(_finite(asdict(record)), allow_nan=False)",
        "json.dumps(asdict(record))",
        OF_METRICS,
    ),
)
