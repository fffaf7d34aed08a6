"""What a config does not say about a cluster, how its parts are named, and checks of both.

    python -c "from rayapp.cluster.options import image_tag; print(image_tag())"

is what `make image` builds and `render` writes.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rayapp.hardware import DEFAULT_REGION, Instance, UnknownInstance, instance

PLATFORMS = ("ecs", "kuberay")
COMPONENTS = ("autoscaling", "kueue", "lustre", "spot")
PATTERNS = {
    "account": (r"[0-9]{12}", "12 digits"),
    "name": (r"[a-z][a-z0-9-]{1,19}", "2 to 20 lower-case letters, digits and dashes"),
    "region": (r"[a-z]{2}(-[a-z]+)+-[0-9]", "a region such as us-west-2"),
    "tag": (r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", "a tag of an image"),
    "reservation": (r"cr-[0-9a-f]{8,17}", "a capacity reservation such as cr-0123456789abcdef0"),
    "queue": (r"[a-z0-9.-]+:[1-9][0-9]{0,4}", "a type and a number of nodes: p5.48xlarge:32"),
}
SERVER = r"https?://[^\s\"'\\${}]+"
CHOICES = {"market": ("on-demand", "spot", "capacity-block"), "efa": ("auto", "true", "false")}
ROOT = Path(__file__).parents[2]
# What cluster/Dockerfile copies, and the Dockerfile itself.
IMAGE_CONTEXT = (
    *("cluster", "configs", "constraints.txt", "LICENSE"),
    *("pyproject.toml", "rayapp", "README.md", "setup.py"),
)


@dataclass(frozen=True)
class Options:
    """What a config does not say: AWS account, region, image, head, how machines are bought."""

    account: str | None = None
    name: str = "rayapp"
    region: str = DEFAULT_REGION
    tag: str | None = None
    """Tag of the image in the account's registry; None: that of these sources (`image_tag`)."""
    head: str = "m6i.2xlarge"
    data_nodes: int = 0
    """Hosts without GPUs that prepare data beside the workers."""
    data_instance: str = "m6i.8xlarge"
    market: str = "on-demand"
    reservation: str | None = None
    """Id of a capacity reservation, or of a capacity block with market=capacity-block."""
    efa: str = "auto"
    """auto: use EFA if the instance has it; true: refuse an instance without; false: never."""
    components: tuple[str, ...] = ()
    api_cidrs: tuple[str, ...] = ()
    """EKS: networks that may reach the API server over the internet; empty: the VPC alone."""
    lustre: str | None = None
    """Terraform's output `lustre` as JSON, for the component lustre."""
    prometheus: str | None = None
    """URL at which the head reaches a Prometheus of yours; Ray's dashboard then shows charts."""
    grafana: str | None = None
    """URL of a Grafana of yours, for the head and for browsers."""
    retries: int = 2
    """How many new clusters a RayJob may start after its driver or its head is lost."""
    queue: str | None = None
    """TYPE:NODES, all nodes of the platform, for Kueue's queue; None renders no queue."""


def bucket(options: Options) -> str:
    """Return the name of the S3 bucket that infra/base creates."""
    return f"{options.name}-{options.account}-{options.region}"


def stack(platform: str, options: Options) -> str:
    """Return the prefix of the names of what infra/ecs or infra/eks creates."""
    return f"{options.name}-{'ecs' if platform == 'ecs' else 'eks'}"


def image_tag(root: Path = ROOT) -> str:
    """Return the tag of these sources' image: the version, and a hash of all that goes into it.

    The registry's tags are immutable: an image is pushed once, and changed sources get another tag.
    Without sources it is the version alone.
    """
    release = version("rayapp")
    if not (root / "cluster" / "Dockerfile").is_file():  # installed from a wheel
        return release
    digest = hashlib.sha256()
    for name in IMAGE_CONTEXT:
        top = root / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return f"{release}-{digest.hexdigest()[:12]}"


def option_problems(platform: str, options: Options) -> list[str]:
    """Return every problem of the options alone, without the config."""
    ecs, components = platform == "ecs", options.components
    no_block = options.market == "capacity-block" and options.reservation is None
    no_volume = "lustre" in components and options.lustre is None
    checks = {
        f"{platform} is unknown: no such platform. Set ecs or kuberay": platform not in PLATFORMS,
        "account=none is missing: names of roles and images contain it, and the credentials do "
        "not tell it. Set --account=123456789012": options.account is None,
        **dict.fromkeys(malformed({field: getattr(options, field) for field in PATTERNS}), True),
        "reservation=none is missing: a capacity block is used by its id. Set "
        "--reservation": no_block,
        "api_cidrs is impossible: ECS has no API server of its own. Leave it out": ecs
        and options.api_cidrs != (),
        "queue is impossible: ECS has no Kueue. Leave it out": ecs and options.queue is not None,
        "lustre=none is missing: the volume is that of infra/eks. "
        'Set --lustre="$(terraform -chdir=infra/eks output -json lustre)"': no_volume,
        "components autoscaling and kueue exclude each other: Kueue admits no cluster that Ray's "
        "autoscaler scales. Leave one out": {"autoscaling", "kueue"} <= set(components),
    }
    for field, allowed in CHOICES.items():
        text = f"{field}={getattr(options, field)} is unknown. Set one of {', '.join(allowed)}"
        checks[text] = getattr(options, field) not in allowed
    for field in ("prometheus", "grafana"):
        url = getattr(options, field)
        text = f"{field}={url} is malformed: the URL of a server is expected. Set --{field} to "
        text += "e.g. http://prometheus.monitoring:9090"
        checks[text] = url is not None and not re.fullmatch(SERVER, url)
    for component in components:
        known = component in COMPONENTS
        text = f"component {component} is unknown. Set one of {', '.join(COMPONENTS)}"
        checks[text] = not known
        checks[f"component {component} is impossible: ECS has none. Leave it out"] = known and ecs
    problems = [problem for problem, wrong in checks.items() if wrong]
    problems += [problem for cidr in options.api_cidrs if (problem := _cidr_problem(cidr))]
    if options.queue is not None:
        listed(options.queue.partition(":")[0], "queue", problems)
    return problems


def listed(name: str, option: str, problems: list[str]) -> Instance | None:
    """Return an instance type of the table; None, with a new problem, if it is not there."""
    try:
        return instance(name, option)
    except UnknownInstance as error:
        problems.append(str(error))
        return None


def malformed(values: Mapping[str, str | None]) -> list[str]:
    """Return a problem for each value that PATTERNS does not allow."""
    return [
        f"{field}={value} is malformed: {PATTERNS[field][1]} is expected. Set --{field}"
        for field, value in values.items()
        if value is not None and not re.fullmatch(PATTERNS[field][0], value)
    ]


def _cidr_problem(cidr: str) -> str | None:
    what = "networks such as 203.0.113.7/32 are expected. Set --api_cidrs"
    try:
        network = ipaddress.ip_network(cidr)
    except ValueError as error:
        return f"api_cidrs={cidr} is malformed: {error}; {what}"
    if network.version != 4 or network.prefixlen < 16:
        return f"api_cidrs={cidr} is too wide: IPv4 networks of /16 at the widest; {what}"
    return None
