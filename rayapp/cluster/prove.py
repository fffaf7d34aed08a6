"""python -m rayapp.cluster.prove ecs|eks [--name=rayapp-prove] [--region=us-west-2] [--yes=1]

  --name=NAME       of stacks that are made for this and destroyed after it
  --email=ADDRESS   who is told of alarms meanwhile; nobody by default
  --api_cidrs=LIST  EKS: networks that may reach the API server, with commas
  --args=ARGS       of Terraform for the cluster's stack, e.g. -var=zone=us-west-2b
  --yes=1           answers the question about the price

`make prove-ecs` and `make prove-eks` run it. It brings up the cluster of `make up-ecs` or `make
up-eks` with CPU instances, trains a tiny model, takes hosts away, compares the run with an
undisturbed one, and destroys all. The page is build/NAME-REGION/prove-ecs.md (or -eks).
Exit codes: 0 all steps pass, 1 one does not, 2 not possible as asked.
"""

from __future__ import annotations

import logging
import platform
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from rayapp.cluster.options import Options, image_tag, option_problems
from rayapp.cluster.proof import Failed, Proof
from rayapp.cluster.sizes import fixed_usd_per_hour
from rayapp.cluster.trials import DISTURBED, FAIL, PASS, TRIALS, WAY_DOWN, WORKERS, Step
from rayapp.config import ConfigError, arguments, load
from rayapp.hardware import PRICE_DATE, instance
from rayapp.observe.run_folder import Exit, refused

logger = logging.getLogger(__name__)

HOMES = {"ecs": "ecs", "eks": "kuberay"}
MAX_HOURS = 2.0  # after which no step goes on, and the cluster goes down
# A month of a KMS key is 1 USD, an action of FIS 0.10 USD a minute; alarms, logs, images, NAT data.
OTHER_USD = 1.5
OPTIONS = {"name": "rayapp-prove", "region": Options.region, "email": "nobody"}
OPTIONS |= {"api_cidrs": "", "args": "", "yes": ""}
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


def main(argv: list[str]) -> int:
    """Run the command line; return the exit code."""
    if "--help" in argv or "-h" in argv or not argv:
        print(__doc__)
        return Exit.DONE if argv else Exit.REFUSED
    try:
        return _main(argv[0], argv[1:])
    except ConfigError as error:
        return refused(error)


def _main(home: str, argv: list[str]) -> int:
    if home not in HOMES:
        raise ConfigError([f"{home} is unknown: there is no such cluster. Set one of ecs, eks"])
    _, asked = arguments.read(argv, OPTIONS)
    name, region = asked["name"], asked["region"]
    client = partial(boto3.client, region_name=region)
    try:
        number = str(client("sts").get_caller_identity()["Account"])
    except (BotoCoreError, ClientError) as error:
        why = f"{error}. Set credentials, as for the AWS CLI"
        raise ConfigError([f"no AWS account: {why}"]) from None
    options = Options(account=number, name=name, region=region)
    if problems := option_problems(HOMES[home], options):
        raise ConfigError(problems)
    folder = Path("build") / f"{name}-{region}"
    config, log = folder / "prove.yaml", folder / f"prove-{home}.log"
    proof = Proof(name, home, region, number, client, config, log)
    if left := proof.left():
        why = f"{len(left)} things have its tags, e.g. {left[0]}, and the proof would destroy them"
        raise ConfigError([f"name={name} is taken: {why}. Remove them, or set another NAME"])
    rate, most = price(home, options)
    print(most)
    if not asked["yes"] and input("Go on? Only yes is taken: ").strip() != "yes":
        print("nothing was started")
        return Exit.REFUSED
    return _prove(proof, options, asked, rate)


def price(home: str, options: Options) -> tuple[float, str]:
    """Return USD per hour with all hosts, at the on-demand price, and a line that says the most.

    Raises:
        ConfigError: a price is not known in the region.
    """
    hosts = {options.head: 1, SETTINGS["cluster.instance"]: WORKERS}
    rate = fixed_usd_per_hour(HOMES[home])
    for name, count in hosts.items():
        usd = instance(name, "cluster.instance").usd_per_hour.get(options.region)
        if usd is None:
            why = f"the price of {name} is not known there. Set REGION to e.g. us-west-2"
            raise ConfigError([f"region={options.region} is impossible: {why}"])
        rate += count * usd
    names = " and ".join(f"{count} x {name}" for name, count in hosts.items())
    return rate, (
        f"cost: at most {MAX_HOURS * rate + OTHER_USD:.2f} USD: {MAX_HOURS:g} hours at {rate:.2f} "
        f"USD/h with {names} (on-demand prices, {options.region}, {PRICE_DATE}; the workers are "
        f"bought as spot), {OTHER_USD:g} USD for all else. All is destroyed at the end."
    )


def _prove(proof: Proof, options: Options, asked: dict[str, str], rate: float) -> int:
    began = time.monotonic()
    given = {"NAME": proof.name, "REGION": proof.region}
    more = {"EMAIL": asked["email"], "API_CIDRS": asked["api_cidrs"], "ARGS": asked["args"]}
    proof.variables = given | more | {"RENDER": f"--market=spot --account={proof.number}"}
    proof.until = began + MAX_HOURS * 3600
    proof.config.parent.mkdir(parents=True, exist_ok=True)
    proof.config.write_text(load(None, SETTINGS).to_yaml(), encoding="utf-8")
    proof.log.write_text("", encoding="utf-8")
    print(f"what the commands print is in {proof.log}", flush=True)
    steps = prove(proof)
    by_hand = proof.remaining
    if steps[-2].result != PASS:
        words = " ".join(f"{key}={value}" for key, value in given.items())
        down = [f"make down-{proof.home} {words}"]
        by_hand = [*down, f"make down-base {words} BUCKET={proof.bucket}", *by_hand]
    hours = (time.monotonic() - began) / 3600
    facts = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "rayapp": f"{image_tag()}, Ray {version('ray')}, Python {platform.python_version()}",
        "region": proof.region,
        "machines": f"{options.head}, {WORKERS} x {SETTINGS['cluster.instance']} as spot",
        "cost": f"at most {hours * rate + OTHER_USD:.2f} USD for {hours:.1f} hours",
    }
    text = page(f"rayapp on {proof.home.upper()}", facts, steps, by_hand)
    path = proof.log.with_suffix(".md")
    path.write_text(masked(text), encoding="utf-8")
    print(f"\n{text}\nwritten to {path}: send it to the maintainers")
    return Exit.DONE if all(step.result == PASS for step in steps) else Exit.FAILED


def prove(proof: Proof) -> list[Step]:
    """Do all steps; the cluster goes down whatever becomes of those before."""
    steps = {name: Step(name) for name in (*TRIALS, *WAY_DOWN)}
    for name, trial in TRIALS.items():
        if not _passes(proof, steps[name], trial):
            break
    for name, trial in WAY_DOWN.items():
        _passes(proof, steps[name], trial)
    return [*steps.values()]


def _passes(proof: Proof, step: Step, trial: Callable[[Proof], str]) -> bool:
    """Do a step and note its result. Whatever goes wrong is noted, as the cluster must go down."""
    print(f"{step.name} ...", flush=True)
    began = time.monotonic()
    try:
        step.seen, step.result = trial(proof), PASS
    except Failed as error:
        step.seen, step.result = f"{error}", FAIL
    except (Exception, KeyboardInterrupt) as error:
        logger.exception("%s", step.name)
        step.seen, step.result = f"{type(error).__name__}: {error}", FAIL
    step.seconds = time.monotonic() - began
    print(f"{step.result} after {step.seconds:.0f} s: {step.seen}", flush=True)
    return step.result == PASS


def page(title: str, facts: dict[str, str], steps: list[Step], by_hand: list[str]) -> str:
    """Return the page as Markdown: what was tried, whether it held, how long it took, what is left.

    `by_hand` are commands and names of things to remove; empty if nothing is left.
    """
    passed = all(step.result == PASS for step in steps)
    lines = [f"# {title}: {PASS if passed else FAIL}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| step | result | seconds | what was seen |", "|---|---|---|---|"]
    for step in steps:
        seconds = "" if step.seconds is None else f"{step.seconds:.0f}"
        seen = " ".join(step.seen.split()).replace("|", "\\|")
        lines.append(f"| {step.name} | {step.result} | {seconds} | {seen} |")
    if by_hand:
        lines += ["", "## To remove by hand", "", "These may cost money until they are gone.", ""]
        lines += [f"- `{each}`" for each in by_hand]
    return "\n".join(lines) + "\n"


def masked(text: str) -> str:
    """Return a page without the account's number, so that it can be sent to others."""
    return re.sub(r"\b\d{12}\b", "ACCOUNT", text)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: what is up goes down
        signal.signal(number, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
