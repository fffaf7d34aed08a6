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

import platform
import signal
import sys
import time
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from rayapp.cluster.options import Options, bucket, image_tag, option_problems
from rayapp.cluster.prove import page
from rayapp.cluster.prove.account import AwsAccount
from rayapp.cluster.prove.proof import Proof
from rayapp.cluster.prove.steps import SETTINGS, WORKERS, prove
from rayapp.cluster.sizes import (
    EKS_USD_PER_HOUR,
    ENDPOINT_USD_PER_HOUR,
    ENDPOINTS,
    NAT_USD_PER_HOUR,
)
from rayapp.config import ConfigError, arguments, load
from rayapp.hardware import PRICE_DATE, instance
from rayapp.observe.run_folder import Exit

HOMES = {"ecs": "ecs", "eks": "kuberay"}
MAX_HOURS = 2.0  # after which no step goes on, and the cluster goes down
# A month of a KMS key is 1 USD, an action of FIS 0.10 USD a minute; alarms, logs, images, NAT data.
OTHER_USD = 1.5
OPTIONS = {
    "name": "rayapp-prove",
    "region": Options.region,
    "email": "nobody",
    "api_cidrs": "",
    "args": "",
    "yes": "",
}


def main(argv: list[str]) -> int:
    """Run the command line; return the exit code."""
    if "--help" in argv or "-h" in argv or not argv:
        print(__doc__)
        return Exit.DONE if argv else Exit.REFUSED
    try:
        return _main(argv[0], argv[1:])
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return Exit.REFUSED


def _main(home: str, argv: list[str]) -> int:
    if home not in HOMES:
        raise ConfigError([f"{home} is unknown: there is no such cluster. Set one of ecs, eks"])
    _, asked = arguments.read(argv, OPTIONS)
    account = _account(home, asked["name"], asked["region"])
    options = Options(account=account.number, name=account.name, region=account.region)
    if problems := option_problems(HOMES[home], options):
        raise ConfigError(problems)
    if left := account.left():
        raise ConfigError(
            [
                f"name={account.name} is taken: {len(left)} things have its tags, e.g. {left[0]}, "
                "and the proof would destroy them. Remove them, or set another NAME"
            ]
        )
    rate, most = price(home, options)
    print(most)
    if not asked["yes"] and input("Go on? Only yes is taken: ").strip() != "yes":
        print("nothing was started")
        return Exit.REFUSED
    return _prove(account, options, asked, rate)


def price(home: str, options: Options) -> tuple[float, str]:
    """Return USD per hour with all hosts, at the on-demand price, and a line that says the most.

    Raises:
        ConfigError: a price is not known in the region.
    """
    hosts = {options.head: 1, SETTINGS["cluster.instance"]: WORKERS}
    rate = NAT_USD_PER_HOUR + ENDPOINTS[HOMES[home]] * ENDPOINT_USD_PER_HOUR
    rate += EKS_USD_PER_HOUR if home == "eks" else 0.0
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


def _account(home: str, name: str, region: str) -> AwsAccount:
    """Return the account of this machine's credentials.

    Raises:
        ConfigError: there are none.
    """
    client = partial(boto3.client, region_name=region)
    try:
        number = str(client("sts").get_caller_identity()["Account"])
    except (BotoCoreError, ClientError) as error:
        raise ConfigError(
            [f"no AWS account: {error}. Set credentials, as for the AWS CLI"]
        ) from None
    return AwsAccount(name, home, region, number, client)


def _prove(account: AwsAccount, options: Options, asked: dict[str, str], rate: float) -> int:
    home, began = account.home, time.monotonic()
    folder = Path("build") / f"{account.name}-{account.region}"
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / "prove.yaml", folder / f"prove-{home}.log"
    config.write_text(load(None, SETTINGS).to_yaml(), encoding="utf-8")
    log.write_text("", encoding="utf-8")
    variables = {
        "NAME": account.name,
        "REGION": account.region,
        "EMAIL": asked["email"],
        "API_CIDRS": asked["api_cidrs"],
        "ARGS": asked["args"],
        "RENDER": f"--market=spot --account={account.number}",
    }
    until = began + MAX_HOURS * 3600
    proof = Proof(account, bucket(options), config, variables, log, until)
    print(f"what the commands print is in {log}", flush=True)
    steps, by_hand = prove(proof)
    hours = (time.monotonic() - began) / 3600
    machines = f"{options.head}, {WORKERS} x {SETTINGS['cluster.instance']} as spot"
    facts = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "rayapp": f"{image_tag()}, Ray {version('ray')}, Python {platform.python_version()}",
        "region": account.region,
        "machines": machines,
        "cost": f"at most {hours * rate + OTHER_USD:.2f} USD for {hours:.1f} hours",
    }
    title = f"rayapp on {home.upper()}"
    outcome = page.ProofPage(title, facts, steps, by_hand)
    path = folder / f"prove-{home}.md"
    path.write_text(page.text(outcome), encoding="utf-8")
    print(f"\n{page.text(outcome, masked=False)}\nwritten to {path}: send it to the maintainers")
    return Exit.DONE if outcome.result == page.PASS else Exit.FAILED


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: what is up goes down
        signal.signal(number, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
