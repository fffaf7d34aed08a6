"""The steps of a proof: up, a run, a spot notice, a lost node, a stop, a comparison, down.

A step that fails ends the proof: those after it are not run, but the cluster goes down all the
same. The disturbed run comes first and is stopped; the undisturbed one then does as many steps, so
that neither depends on how fast the machines are.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rayapp.cluster.proof import POLL_S, Failed, Proof
from rayapp.observe import metrics, status
from rayapp.observe.attempts import FAILURE, PREEMPTION
from rayapp.observe.goodput import interruptions, read_events
from rayapp.observe.records import Interruption
from rayapp.observe.run_folder import DONE, RESULT, STOPPED

DISTURBED, UNDISTURBED = "prove-disturbed", "prove-undisturbed"
WORKERS = 3  # so that two are left after the first fault
BEFORE_STEPS, AFTER_STEPS = 45, 15  # that are done before the first fault, and after each
LISTED_S = 300.0  # until EC2 lists all hosts that are up
RUN_S = 1800.0  # until a run has done what is waited for
LEFT_S = 1200.0  # until what is destroyed is no longer listed
# Nats per token. Sums over other numbers of workers differ in their last bits, and thousands of
# steps amplify that. A step from other weights is some tenths off while the loss falls.
LOSS_APART = 0.05
PASS, FAIL, NOT_RUN = "PASS", "FAIL", "not run"


@dataclass
class Step:
    """A row of the page."""

    name: str
    result: str = NOT_RUN
    seconds: float | None = None
    seen: str = ""
    """What was seen; of a failure, why."""


def come_up(proof: Proof) -> str:
    """Do what a user does, `make up-ecs` or `make up-eks`, and wait until all hosts are listed."""
    up = f"up-{proof.home}"
    applied = {"BASE_ARGS": "-auto-approve", "CONFIG": str(proof.config)}
    applied["ARGS"] = f"{proof.variables['ARGS']} -auto-approve".strip()
    proof.needs(proof.make(up, applied, proof.left_s()), f"make {up}")
    until = time.monotonic() + proof.left_s(LISTED_S)
    while (hosts := len(proof.workers())) < WORKERS:
        if time.monotonic() > until:
            raise Failed(f"{hosts} of {WORKERS} worker hosts run")
        time.sleep(POLL_S)
    return f"{hosts} worker hosts"


def train(proof: Proof) -> str:
    """Submit the run that will be disturbed; wait for its first checkpoints."""
    proof.submit(DISTURBED)
    proof.wait(DISTURBED, lambda now: now.step >= BEFORE_STEPS, RUN_S)
    last = metrics.read(proof.run(DISTURBED))[-1]
    return f"step {last['step']} with {last['workers']} workers"


def survive_notice(proof: Proof) -> str:
    """Give one host a spot notice. The run must save, lose no step and go on without it."""
    event, seen = _without_host(proof, proof.spot_notice, {PREEMPTION})
    if event["lost_steps"]:
        raise Failed(seen)
    return seen


def survive_loss(proof: Proof) -> str:
    """Terminate a host without a notice. The run must go on from a checkpoint."""
    event, seen = _without_host(proof, proof.terminated, {FAILURE, PREEMPTION})
    if event["lost_steps"] is None or event["lost_steps"] >= event["step"]:
        raise Failed(f"it began anew: {seen}")
    return seen


def _without_host(
    proof: Proof, taken: Callable[[str], AbstractContextManager[None]], kinds: set[str]
) -> tuple[Interruption, str]:
    """Take a host away; wait until the run has done steps after an interruption of these kinds.

    The oldest host carries a worker; one that came back may not yet. That workers are added, as
    hosts come back, is an interruption too.
    """
    hosts = [host for host in proof.workers() if host not in proof.taken]
    if not hosts:
        raise Failed("no worker host is left")
    proof.taken.append(hosts[0])
    folder, matching, at = proof.run(DISTURBED), list[Interruption](), time.time()
    since = len(interruptions(read_events(folder)))

    def gone_on(now: status.Progress) -> bool:
        later = interruptions(read_events(folder))[since:]
        matching[:] = [one for one in later if one["kind"] in kinds]
        resumed = bool(matching) and matching[0]["lost_steps"] is not None
        return resumed and now.step >= matching[0]["step"] + AFTER_STEPS

    with taken(hosts[0]):
        proof.wait(DISTURBED, gone_on, RUN_S)
    event, workers = matching[0], metrics.read(folder)[-1]["workers"]
    return event, (
        f"{hosts[0]}: noticed after {event['time'] - at:.0f} s at step {event['step']}, "
        f"{event['lost_steps']} steps lost, next step {event['to_first_step_s']:.0f} s later, "
        f"{workers} workers at the end"
    )


def stop(proof: Proof) -> str:
    """Stop the run as a user does; it must have saved its last step."""
    code = proof.rayapp("stop", f"{proof.storage}/{DISTURBED}")
    result = json.loads(proof.run(DISTURBED).read(RESULT))
    if result["status"] != STOPPED:
        proof.needs(code, "rayapp stop")
        raise Failed(f"the run is {result['status']}: {result.get('reason')}")
    return f"after step {result['steps']}"


def train_undisturbed(proof: Proof) -> str:
    """Do as many steps in another run, to which nothing happens."""
    steps = metrics.read(proof.run(DISTURBED))[-1]["step"]
    proof.submit(UNDISTURBED, **{"train.max_steps": str(steps)})
    proof.wait(UNDISTURBED, lambda now: now.status == DONE, proof.left_s())
    happened = interruptions(read_events(proof.run(UNDISTURBED)))
    kinds = ", ".join(one["kind"] for one in happened)
    return f"{steps} steps" + (f"; it was interrupted too: {kinds}" if kinds else "")


def compare(proof: Proof) -> str:
    """Compare digests of batches, and losses, of all steps."""
    ours, theirs = metrics.read(proof.run(DISTURBED)), metrics.read(proof.run(UNDISTURBED))
    one, other = ([(x.get("step"), x.get("batch_digest")) for x in each] for each in (ours, theirs))
    if one != other:
        both = enumerate(zip(one, other, strict=False))
        first = next((n for n, (a, b) in both if a != b), min(len(one), len(other))) + 1
        raise Failed(f"batches differ, first at line {first} of {len(one)} and {len(other)}")
    if [line["step"] for line in ours] != list(range(1, len(ours) + 1)):
        raise Failed("the metrics lack a step, or have one twice")
    losses = [(a["loss"], b["loss"]) for a, b in zip(ours, theirs, strict=True)]
    gaps = [math.nan if a is None or b is None else abs(a - b) for a, b in losses]
    apart = max(math.inf if math.isnan(gap) else gap for gap in gaps)
    if apart > LOSS_APART:
        raise Failed(f"digests are equal, losses differ by {apart:.2g} nats per token")
    return f"{len(ours)} digests equal, losses within {apart:.1g} nats per token"


def go_down(proof: Proof) -> str:
    """Destroy the cluster, then the base stack with the results; each twice where it fails."""
    approved = f"{proof.variables['ARGS']} -auto-approve".strip()
    base = {"BUCKET": proof.bucket, "BASE_ARGS": "-auto-approve"}
    for stack, more in ((proof.home, {"ARGS": approved}), ("base", base)):
        if proof.make(f"new-{stack}", {}) == 0:  # nothing of it is in Terraform's state
            continue
        down = f"down-{stack}"
        proof.needs(proof.make(down, more) and proof.make(down, more), f"make {down}")
    insights = proof.container_insights()
    for group in insights:
        proof.client("logs").delete_log_group(logGroupName=group)
    return f"and {len(insights)} log groups of Container Insights" if insights else "by Terraform"


def look_for_left(proof: Proof) -> str:
    """List what still has the tags of the stacks, until nothing has them."""
    until = time.monotonic() + LEFT_S
    while remaining := proof.left():
        proof.remaining = remaining
        if time.monotonic() > until:
            raise Failed(f"{len(remaining)} things are left, listed below")
        time.sleep(POLL_S)
    proof.remaining = []
    return f"no resource, role or log group of {proof.name}"


TRIALS: dict[str, Callable[[Proof], str]] = {
    "the cluster comes up, with all its hosts": come_up,
    "a run trains and saves": train,
    "a spot notice: the run saves, loses no step and goes on": survive_notice,
    "a node is terminated: the run resumes from its checkpoint": survive_loss,
    "the run is stopped, and has saved": stop,
    "an undisturbed run does as many steps": train_undisturbed,
    "both had the same batches and losses at every step": compare,
}
WAY_DOWN: dict[str, Callable[[Proof], str]] = {
    "cluster, results and images are destroyed": go_down,
    "nothing is left": look_for_left,
}
