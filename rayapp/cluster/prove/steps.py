"""The steps of a proof: up, a run, a spot notice, a lost node, a stop, a comparison, down.

A step that fails ends the proof: those after it are not run, but the cluster goes down all the
same. The disturbed run comes first and is stopped; the undisturbed one then does as many steps, so
that neither depends on how fast the machines are.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Collection

from botocore.exceptions import BotoCoreError, ClientError

from rayapp.cluster.connect import NotReachable, wait_for_tasks
from rayapp.cluster.prove.account import Refused
from rayapp.cluster.prove.page import FAIL, PASS, Step
from rayapp.cluster.prove.proof import Failed, Proof
from rayapp.observe import metrics
from rayapp.observe.attempts import FAILURE, PREEMPTION
from rayapp.observe.goodput import interruptions, read_events
from rayapp.observe.records import Interruption
from rayapp.observe.run_folder import DONE, RESULT, STOPPED
from rayapp.observe.status import Progress
from rayapp.storage import StorageError

logger = logging.getLogger(__name__)

DISTURBED, UNDISTURBED = "prove-disturbed", "prove-undisturbed"
EXPECTED = (Failed, Refused, NotReachable, StorageError, ClientError, BotoCoreError)
WORKERS = 3  # so that two are left after the first fault
SETTINGS = {
    "run.name": DISTURBED,
    "model.path": "tiny",
    "data.path": "stdlib",
    "data.seq_len": "128",
    "data.eval_fraction": "0",
    "train.tokens_per_step": "1024",
    "train.micro_batch": "1",  # 8 a step: each of 1, 2 or 3 workers has some
    "train.max_steps": "100000",  # it is stopped long before
    "train.lr": "1e-4",
    "train.schedule": "constant",
    "train.warmup_steps": "0",
    "train.precision": "fp32",
    "checkpoint.every_steps": "20",
    "checkpoint.every_s": "none",
    "checkpoint.export": "false",
    "cluster.instance": "m5.xlarge",  # 3 CPUs for Ray: one worker and Ray Data
    "cluster.workers": f"1:{WORKERS}",
    "cluster.resources": "{CPU: 2}",
    "cluster.max_failures": "5",
}
BEFORE_STEPS, AFTER_STEPS = 45, 15  # that are done before the first fault, and after each
NODES_S = 1800.0  # until all hosts are there, and their Ray is up
LISTED_S = 300.0  # until they are listed too
RUN_S = 1800.0  # until a run has done what is waited for
LEFT_S = 1200.0  # until what is destroyed is no longer listed
POLL_S = 15.0
# Nats per token. Sums over other numbers of workers differ in their last bits, and thousands of
# steps amplify that. A step from other weights is some tenths off while the loss falls.
LOSS_APART = 0.05

UP, RUN = "the cluster comes up, with all its hosts", "a run trains and saves"
NOTICE = "a spot notice: the run saves, loses no step and goes on"
NODE = "a node is terminated: the run resumes from its checkpoint"
STOP, AGAIN = "the run is stopped, and has saved", "an undisturbed run does as many steps"
SAME = "both had the same batches and losses at every step"
DOWN, LEFT = "cluster, results and images are destroyed", "nothing is left"


def prove(proof: Proof) -> tuple[list[Step], list[str]]:
    """Do all steps; return them, and what is to be removed by hand."""
    steps = {name: Step(name) for name in (UP, RUN, NOTICE, NODE, STOP, AGAIN, SAME, DOWN, LEFT)}
    trials: dict[str, Callable[[Proof], str]] = {
        UP: come_up,
        RUN: train,
        NOTICE: survive_notice,
        NODE: survive_loss,
        STOP: stop,
        AGAIN: train_undisturbed,
        SAME: compare,
    }
    for name, trial in trials.items():
        if not _do(proof, steps[name], trial):
            break
    _do(proof, steps[DOWN], go_down)
    remaining = list[str]()
    _do(proof, steps[LEFT], lambda proof: look_for_left(proof, remaining))
    return list(steps.values()), by_hand(proof, remaining, steps[DOWN].result == PASS)


def _do(proof: Proof, step: Step, trial: Callable[[Proof], str]) -> bool:
    """Do a step and note its result. Whatever goes wrong is noted, as the cluster must go down."""
    proof.say(f"{step.name} ...")
    began = time.monotonic()
    try:
        step.seen, step.result = trial(proof), PASS
    except EXPECTED as error:
        step.seen, step.result = f"{error}", FAIL
    except (Exception, KeyboardInterrupt) as error:
        logger.exception("%s", step.name)
        step.seen, step.result = f"{type(error).__name__}: {error}", FAIL
    step.seconds = time.monotonic() - began
    proof.say(f"{step.result} after {step.seconds:.0f} s: {step.seen}")
    return step.result == PASS


def come_up(proof: Proof) -> str:
    """Do what a user does, `make up-ecs` or `make up-eks`, and wait for all hosts."""
    account, home = proof.account, proof.account.home
    applied = {"ARGS": f"{proof.variables.get('ARGS', '')} -auto-approve".strip()}
    applied |= {"BASE_ARGS": "-auto-approve", "CONFIG": str(proof.config)}
    code = proof.make(f"up-{home}", applied, proof.left_s)
    proof.needs(code, f"make up-{home}")
    if home == "ecs":
        wait_for_tasks(account.name, account.client, min(NODES_S, proof.left_s), proof.say)
    else:
        ready = "--for=condition=RayClusterProvisioned"
        words = ["kubectl", "--namespace", "rayapp", "wait", ready, f"--timeout={NODES_S:.0f}s"]
        proof.needs(proof.command([*words, "raycluster/rayapp"], proof.left_s), "kubectl wait")
    until = time.monotonic() + min(LISTED_S, proof.left_s)
    while (hosts := len(account.workers())) < WORKERS:
        if time.monotonic() > until:
            raise Failed(f"{hosts} of {WORKERS} worker hosts run")
        time.sleep(POLL_S)
    return f"{hosts} worker hosts"


def _rayapp(proof: Proof, *words: str) -> int:
    """Run a command of rayapp as a user does, through `rayapp connect`; return its exit code."""
    account, rayapp = proof.account, [sys.executable, "-m", "rayapp"]
    way = [*rayapp, "connect", account.home, f"--name={account.name}"]
    way += [f"--region={account.region}", "--", *rayapp, *words]
    return proof.command(way, proof.left_s)


def _submit(proof: Proof, name: str, **more: str) -> None:
    fields = {"run.storage": proof.storage, "run.name": name, **more}
    given = [f"--{field}={value}" for field, value in fields.items()]
    proof.needs(_rayapp(proof, "submit", str(proof.config), *given), "rayapp submit")


def train(proof: Proof) -> str:
    """Submit the run that will be disturbed; wait for its first checkpoints."""
    _submit(proof, DISTURBED)
    proof.wait(DISTURBED, lambda now: now.step >= BEFORE_STEPS, RUN_S)
    lines = metrics.read(proof.folder(DISTURBED))
    return f"step {lines[-1]['step']} with {lines[-1]['workers']} workers"


def _interrupted(proof: Proof, kinds: Collection[str], since: int) -> Interruption:
    """Wait until the run has done steps after an interruption of these kinds; return it.

    `since` interruptions are older. That workers are added, as hosts come back, is one too.
    """
    folder, matching = proof.folder(DISTURBED), list[Interruption]()

    def gone_on(now: Progress) -> bool:
        later = interruptions(read_events(folder))[since:]
        matching[:] = [one for one in later if one["kind"] in kinds]
        resumed = bool(matching) and matching[0]["lost_steps"] is not None
        return resumed and now.step >= matching[0]["step"] + AFTER_STEPS

    proof.wait(DISTURBED, gone_on, RUN_S)
    return matching[0]


def _next_fault(proof: Proof) -> tuple[str, int, float]:
    """Return the host to take away now, interruptions of the run so far, and the Unix time.

    The oldest host carries a worker; one that came back may not yet.
    """
    hosts = [host for host in proof.account.workers() if host not in proof.taken]
    if not hosts:
        raise Failed("no worker host is left")
    proof.taken.append(hosts[0])
    return hosts[0], len(interruptions(read_events(proof.folder(DISTURBED)))), time.time()


def _described(proof: Proof, event: Interruption, at: float, host: str) -> str:
    lost, first_s = event["lost_steps"], event["to_first_step_s"]
    workers = [line["workers"] for line in metrics.read(proof.folder(DISTURBED))]
    return (
        f"{host}: noticed after {event['time'] - at:.0f} s at step {event['step']}, "
        f"{lost} steps lost, next step {first_s:.0f} s later, {workers[-1]} workers at the end"
    )


def survive_notice(proof: Proof) -> str:
    """Give one host a spot notice. The run must save, lose no step and go on without it."""
    host, since, at = _next_fault(proof)
    with proof.account.spot_notice(host):
        event = _interrupted(proof, {PREEMPTION}, since)
    description = _described(proof, event, at, host)
    if event["lost_steps"]:
        raise Failed(description)
    return description


def survive_loss(proof: Proof) -> str:
    """Terminate a host without a notice. The run must go on from a checkpoint."""
    host, since, at = _next_fault(proof)
    proof.account.terminate(host)
    event = _interrupted(proof, {FAILURE, PREEMPTION}, since)
    description = _described(proof, event, at, host)
    if event["lost_steps"] is None or event["lost_steps"] >= event["step"]:
        raise Failed(f"it began anew: {description}")
    return description


def stop(proof: Proof) -> str:
    """Stop the run as a user does; it must have saved its last step."""
    code = _rayapp(proof, "stop", f"{proof.storage}/{DISTURBED}")
    result = json.loads(proof.folder(DISTURBED).read(RESULT))
    if result["status"] != STOPPED:
        proof.needs(code, "rayapp stop")
        raise Failed(f"the run is {result['status']}: {result.get('reason')}")
    return f"after step {result['steps']}"


def train_undisturbed(proof: Proof) -> str:
    """Do as many steps in another run, to which nothing happens."""
    steps = metrics.read(proof.folder(DISTURBED))[-1]["step"]
    _submit(proof, UNDISTURBED, **{"train.max_steps": str(steps)})
    proof.wait(UNDISTURBED, lambda now: now.status == DONE, proof.left_s)
    happened = interruptions(read_events(proof.folder(UNDISTURBED)))
    kinds = ", ".join(one["kind"] for one in happened)
    return f"{steps} steps" + (f"; it was interrupted too: {kinds}" if kinds else "")


def compare(proof: Proof) -> str:
    """Compare digests of batches, and losses, of all steps."""
    ours = metrics.read(proof.folder(DISTURBED))
    theirs = metrics.read(proof.folder(UNDISTURBED))
    for name in ("step", "batch_digest"):
        one, other = ([line.get(name) for line in lines] for lines in (ours, theirs))
        if one != other:
            differs = [a == b for a, b in zip(one, other, strict=False)]
            first = differs.index(False) + 1 if False in differs else min(len(one), len(other)) + 1
            raise Failed(f"{name} differs, first at line {first} of {len(one)} and {len(other)}")
    if [line["step"] for line in ours] != list(range(1, len(ours) + 1)):
        raise Failed("the metrics lack a step, or have one twice")
    apart = max(_apart(a["loss"], b["loss"]) for a, b in zip(ours, theirs, strict=True))
    if apart > LOSS_APART:
        raise Failed(f"digests are equal, losses differ by {apart:.2g} nats per token")
    return f"{len(ours)} digests equal, losses within {apart:.1g} nats per token"


def _apart(one: float | None, other: float | None) -> float:
    gap = math.inf if one is None or other is None else abs(one - other)
    return math.inf if math.isnan(gap) else gap


def go_down(proof: Proof) -> str:
    """Destroy the cluster, then the base stack with the results; each twice where it fails."""
    home = proof.account.home
    approved = f"{proof.variables.get('ARGS', '')} -auto-approve".strip()
    base = {"BUCKET": proof.bucket, "BASE_ARGS": "-auto-approve"}
    for stack, more in ((home, {"ARGS": approved}), ("base", base)):
        if proof.make(f"new-{stack}") == 0:  # nothing of it is in Terraform's state
            continue
        code = proof.make(f"down-{stack}", more) and proof.make(f"down-{stack}", more)
        proof.needs(code, f"make down-{stack}")
    insights = proof.account.container_insights()
    proof.account.delete_container_insights()
    return f"and {len(insights)} log groups of Container Insights" if insights else "by Terraform"


def look_for_left(proof: Proof, remaining: list[str]) -> str:
    """List what still has the tags of the stacks in `remaining`, until nothing has them."""
    until = time.monotonic() + LEFT_S
    while True:
        remaining[:] = proof.account.left()
        if not remaining:
            return f"no resource, role or log group of {proof.account.name}"
        if time.monotonic() > until:
            raise Failed(f"{len(remaining)} things are left, listed below")
        time.sleep(POLL_S)


def by_hand(proof: Proof, remaining: list[str], is_down: bool) -> list[str]:
    """Return the commands and things that end the bill, if the proof has not ended it."""
    if is_down:
        return remaining
    account = proof.account
    given = f"NAME={account.name} REGION={account.region}"
    down = [f"make down-{account.home} {given}", f"make down-base {given} BUCKET={proof.bucket}"]
    return down + remaining
