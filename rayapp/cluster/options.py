"""What a config does not say about a cluster, how its parts are named, and checks of both."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rayapp.hardware import DEFAULT_REGION, UnknownInstance, instance

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


@dataclass(frozen=True)
class Options:
    """What a config does not say: AWS account, region, image, head, how machines are bought."""

    account: str | None = None
    name: str = "rayapp"
    region: str = DEFAULT_REGION
    tag: str | None = None
    """Tag of the image in the account's registry; None: that of these sources (`image.tag`)."""
    head: str = "m6i.2xlarge"
    data_nodes: int = 0
    """Hosts without GPUs that prepare data beside the workers."""
    data_instance: str = "m6i.8xlarge"
    market: str = "on-demand"
    reservation: str | None = None
    """Id of a capacity reservation, or of a capacity block with market=capacity-block."""
    efa: str = "auto"
    """auto: use EFA if the instance has it; true: refuse an instance without; false: never."""
    launch: str = "ec2"
    components: tuple[str, ...] = ()
    api_cidrs: tuple[str, ...] = ()
    """EKS: networks that may reach the API server over the internet; empty: the VPC alone."""
    nodes: str = "fixed"
    """EKS: fixed, or autoscaled by a cluster autoscaler that is not part of the stack."""
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


def option_problems(platform: str, options: Options) -> list[str]:
    """Return every problem of the options alone, without the config."""
    problems = []
    if platform not in PLATFORMS:
        problems.append(f"{platform} is unknown: no such platform. Set one of ecs, kuberay")
    if options.account is None:
        problems.append(
            "account=none is missing: names of roles and images contain it, and the credentials do "
            "not tell it. Set --account=123456789012"
        )
    problems += malformed({field: getattr(options, field) for field in PATTERNS})
    choices = {
        "market": ("on-demand", "spot", "capacity-block"),
        "efa": ("auto", "true", "false"),
        "launch": ("ec2", "fargate"),
        "nodes": ("fixed", "autoscaled"),
    }
    for field, allowed in choices.items():
        if (value := getattr(options, field)) not in allowed:
            problems.append(f"{field}={value} is unknown. Set one of {', '.join(allowed)}")
    for field in ("prometheus", "grafana"):
        url = getattr(options, field)
        if url is not None and not re.fullmatch(r"https?://[^\s\"'\\${}]+", url):
            problems.append(
                f"{field}={url} is malformed: the URL of a server is expected. Set --{field} to "
                "e.g. http://prometheus.monitoring:9090"
            )
    if options.market == "capacity-block" and options.reservation is None:
        problems.append(
            "reservation=none is missing: a capacity block is used by its id. Set --reservation"
        )
    problems += _component_problems(platform, options)
    problems += [problem for cidr in options.api_cidrs for problem in _cidr_problems(cidr)]
    if options.api_cidrs and platform == "ecs":
        problems.append("api_cidrs is impossible: ECS has no API server of its own. Leave it out")
    if options.queue is not None:
        if platform == "ecs":
            problems.append("queue is impossible: ECS has no Kueue. Leave it out")
        try:
            instance(options.queue.partition(":")[0], "queue")
        except UnknownInstance as error:
            problems.append(str(error))
    if "lustre" in options.components and options.lustre is None:
        problems.append(
            "lustre=none is missing: the volume is that of infra/eks. "
            'Set --lustre="$(terraform -chdir=infra/eks output -json lustre)"'
        )
    return problems


def malformed(values: Mapping[str, str | None]) -> list[str]:
    """Return a problem for each value that PATTERNS does not allow."""
    return [
        f"{field}={value} is malformed: {PATTERNS[field][1]} is expected. Set --{field}"
        for field, value in values.items()
        if value is not None and not re.fullmatch(PATTERNS[field][0], value)
    ]


def _component_problems(platform: str, options: Options) -> list[str]:
    """Return what is wrong with the components and who adds their nodes."""
    problems = []
    for component in options.components:
        if component not in COMPONENTS:
            problems.append(f"component {component} is unknown. Set one of {', '.join(COMPONENTS)}")
        elif platform == "ecs":
            problems.append(f"component {component} is impossible: ECS has none. Leave it out")
    if "autoscaling" in options.components:
        if options.nodes != "autoscaled":
            problems.append(
                "component autoscaling is impossible: the stack has no cluster autoscaler, so the "
                "workers would wait for nodes for ever. Install one and set --nodes=autoscaled, or "
                "leave the component out"
            )
        if "kueue" in options.components:
            problems.append(
                "components autoscaling and kueue exclude each other: Kueue admits no cluster that "
                "Ray's autoscaler scales. Leave one out"
            )
    elif options.nodes == "autoscaled":
        problems.append(
            "nodes=autoscaled is impossible: workers of a fixed number keep their nodes. "
            "Set --components=autoscaling too"
        )
    return problems


def _cidr_problems(cidr: str) -> Iterator[str]:
    what = "networks such as 203.0.113.7/32 are expected. Set --api_cidrs"
    try:
        network = ipaddress.ip_network(cidr)
    except ValueError as error:
        yield f"api_cidrs={cidr} is malformed: {error}; {what}"
    else:
        if network.version != 4 or network.prefixlen < 16:
            yield f"api_cidrs={cidr} is too wide: IPv4 networks of /16 at the widest; {what}"
