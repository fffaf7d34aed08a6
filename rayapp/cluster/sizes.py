"""Size a cluster: its machines, each container's share of its machine, USD per hour."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rayapp.cluster.options import Options, bucket, image_tag, listed
from rayapp.config import Choice, ConfigError, RunConfig
from rayapp.hardware import PRICE_DATE, Instance
from rayapp.planner.question import named_instance

HOST_CPUS = 2  # left to the operating system and the agents of ECS or Kubernetes and CloudWatch
HOST_MEMORY_SHARE, HOST_MEMORY_GIB = 0.04, 4.0  # kernel and firmware; agents and kubelet's reserve
OBJECT_STORE_SHARE = 0.3  # Ray's own default
OBJECT_STORE_MAX_BYTES = 200_000_000_000  # Ray's own limit
NCCL_SHARED_MEMORY_MIB = 8192  # of /dev/shm, for NCCL and PyTorch, on top of Ray's object store
# EKS's accelerated AMIs reserve 5128 pages of 2 MiB where the node has EFA; a pod requests 5 GiB of
# them, as AWS's EFA samples do.
HUGEPAGES_HOST_MIB, HUGEPAGES_POD_MIB = 10256, 5120
# An image of some 20 GiB, and Ray's spilled objects.
WORKER_DISK_GIB, HEAD_DISK_GIB, DATA_DISK_GIB = 200, 100, 200
# The head's machine on EKS also runs the operator, DNS, metrics and the CSI controllers.
SYSTEM_CPUS, SYSTEM_MIB = 2, 4096
LEAST_MIB = 4096  # of Ray on any machine
# The least that PyTorch's wheels for CUDA 13 have code for.
IMAGE_CAPABILITY = 7.5


@dataclass(frozen=True)
class Node:
    """What a container gets that has a machine to itself: CPUs, memory, network interfaces."""

    instance: Instance
    cpus: int
    memory_mib: int
    object_store_bytes: int
    shared_memory_mib: int
    interfaces: tuple[str, ...]
    """Kind of the interface on each network card in use: interface, efa or efa-only."""

    @property
    def efa(self) -> int:
        """Number of EFA interfaces."""
        return sum(kind.startswith("efa") for kind in self.interfaces)


@dataclass(frozen=True)
class Fleet:
    """The worker machines of a config."""

    worker: Node
    min_nodes: int
    max_nodes: int
    choice: Choice
    """The type and how it is bought, as cluster.instance names it."""


def node(instance: Instance, efa: bool, reserved_cpus: int = 0, reserved_mib: int = 0) -> Node:
    """Return what a container gets of a machine, less the host's share and what is reserved."""
    cpus = instance.vcpus - min(HOST_CPUS, instance.vcpus // 4) - reserved_cpus
    memory_gib = instance.memory_gib * (1 - HOST_MEMORY_SHARE) - HOST_MEMORY_GIB
    memory_mib = math.floor(memory_gib * 1024) - reserved_mib
    store = min(math.floor(memory_mib * OBJECT_STORE_SHARE) * 2**20, OBJECT_STORE_MAX_BYTES)
    shared_mib = math.ceil(store / 2**20) + min(NCCL_SHARED_MEMORY_MIB, memory_mib // 5)
    return Node(instance, cpus, memory_mib, store, shared_mib, _interfaces(instance, efa))


def _interfaces(instance: Instance, efa: bool) -> tuple[str, ...]:
    """Return the kind of interface on each network card; card 0 carries the IP traffic.

    >>> from rayapp.hardware import instance
    >>> _interfaces(instance("p4d.24xlarge"), efa=True)
    ('efa', 'efa-only', 'efa-only', 'efa-only')
    >>> _interfaces(instance("p6-b300.48xlarge"), efa=True)[:2]
    ('interface', 'efa-only')
    """
    if not efa or instance.efa_interfaces == 0:
        return ("interface",)
    own = instance.first_efa_card == 0  # card 0 has EFA too
    return ("efa" if own else "interface", *["efa-only"] * (instance.efa_interfaces - own))


def machine_variables(machine: Node, disk_gib: int) -> dict[str, object]:
    """Return what Terraform needs to know of a machine."""
    return {
        "instance_type": machine.instance.name,
        "gpus": machine.instance.gpus,
        "interfaces": list(machine.interfaces),
        "disk_gib": disk_gib,
    }


def fleet(
    config: RunConfig, worker: Node, problems: list[str], *, data_elsewhere: bool = False
) -> Fleet | None:
    """Return how many machines the config's workers need; None, and `problems`, if they do not fit.

    A worker needs one CPU, one GPU if the instance has GPUs and cluster.gpu is not false, unless
    `cluster.resources` says otherwise. At least one of the machines' CPUs is left to Ray Data,
    unless other hosts prepare data.
    """
    instance, asked = worker.instance, config.cluster.resources
    gpus = gpus_of(config, instance)
    if config.cluster.gpu == "true" and instance.gpus == 0:
        problems.append(
            f"cluster.gpu=true is impossible: {instance.name} has no GPU. Set cluster.instance to "
            "one that has, e.g. g5.12xlarge"
        )
        return None
    have = {"CPU": float(worker.cpus), "memory": worker.memory_mib * 2.0**20}
    have["object_store_memory"] = float(worker.object_store_bytes)
    need = {"CPU": 1.0, **asked}
    if gpus:
        have["GPU"] = float(instance.gpus)
        need.setdefault("GPU", 1.0)
    if instance.gpu is not None:
        have[f"accelerator_type:{instance.gpu.name.split('-')[0]}"] = 1.0  # as Ray calls it
    for name, amount in need.items():
        if amount > have.get(name, 0.0):
            problems.append(
                f"cluster.resources.{name}={amount:g} is too much: a worker on {instance.name} can "
                f"have {have.get(name, 0.0):g}. Lower it, or set a larger cluster.instance"
            )
    if problems:
        return None
    fits = {name: math.floor(have[name] / amount) for name, amount in need.items() if amount > 0}
    per_node = min(fits.values())
    least = math.ceil(config.cluster.min_workers / per_node)
    most = math.ceil(config.cluster.max_workers / per_node)
    spare = 0 if data_elsewhere else 1
    if config.cluster.max_workers * need["CPU"] > most * worker.cpus - spare:
        most += 1  # else the workers would take all CPUs and Ray Data would starve
    return Fleet(worker, least, max(most, 1), config.cluster.choices[0])


def bought(config: RunConfig, options: Options, problems: list[str]) -> Options:
    """Return the options with the market that cluster.instance names, where it names one.

    Adds to `problems` what contradicts it.
    """
    choices = config.cluster.choices
    default = options.market == "on-demand" and options.reservation is None
    if len(choices) < 2:
        market = choices[0].market if choices else None
        if market not in (None, options.market) and not default:
            problems.append(
                f"market={options.market} is ambiguous: cluster.instance is bought as {market}. "
                "Set one of the two"
            )
        return options if market is None else replace(options, market=market)
    problems += [
        f"component {component} is impossible where cluster.instance is a list: it sees one "
        "group of workers. Set one of them, or leave the component out"
        for component in sorted({"autoscaling", "kueue"} & set(options.components))
    ]
    if not default:
        problems.append(
            f"market={options.market} is ambiguous: cluster.instance is a list. Set the market of "
            f"each there, e.g. {choices[0].instance}:spot; a reservation is of one type"
        )
    return options


def machines_of(
    platform: str, config: RunConfig, options: Options, problems: list[str]
) -> tuple[Node, list[Fleet], Fleet | None]:
    """Return the head, the workers on each type of cluster.instance, and the hosts for data.

    Raises:
        ConfigError: with `problems`, and why some of them are impossible.
    """
    found, wrong = list[Fleet](), list[str]()
    head = listed(options.head, "head", wrong)
    kube = platform == "kuberay"
    reserved = (SYSTEM_CPUS, SYSTEM_MIB) if kube else (0, 0)
    system = None if head is None else node(head, False, *reserved)
    for each in config.alternatives():
        own = list[str]()
        machine = named_instance(each, own)
        if each.cluster.instance is None:
            own.append(
                "cluster.instance=none is missing: the cluster's nodes need a type. "
                "Set an EC2 instance type, e.g. g5.12xlarge"
            )
        if machine is not None and system is not None:
            worker = worker_node(machine, options, kube)
            own += _machine_problems(each, options, worker, system)
            workers = fleet(each, worker, own, data_elsewhere=options.data_nodes > 0)
            found += [] if workers is None else [workers]
        wrong += own
    data = _data_fleet(config, options, found, problems)
    problems += dict.fromkeys(wrong)  # what is wrong with the head is so for each
    if system is None or problems:
        raise ConfigError(problems)
    return system, found, data


def _machine_problems(config: RunConfig, options: Options, worker: Node, head: Node) -> list[str]:
    machine, storage, runs = worker.instance, config.run.storage, f"s3://{bucket(options)}/runs"
    gpu, name = machine.gpu, machine.name
    no_efa = options.efa == "true" and machine.efa_interfaces == 0
    elsewhere = storage.startswith("s3://") and not f"{storage}/".startswith(f"{runs}/")
    too_old = gpu is not None and float(gpu.compute_capability) < IMAGE_CAPABILITY
    checks = {
        f"efa=true is impossible: {name} has no Elastic Fabric Adapter. Leave --efa out, or set "
        "cluster.instance to one that has, e.g. p4d.24xlarge": no_efa,
        f"run.storage={storage} is out of reach: a run's role may write only to {runs}. Set "
        "run.storage to it": elsewhere,
        f"{name} is impossible: the image's PyTorch has no code for its GPU {gpu and gpu.name}. "
        "Build an image with PyTorch's wheels for CUDA 12 and set --tag to "
        "it": too_old and options.tag in (None, image_tag()),
    }
    for field, node in (("cluster.instance", worker), ("head", head)):
        text = f"{node.instance.name} is impossible: the image is for x86_64. Set another instance"
        checks[text] = "x86_64" not in node.instance.architectures
        text = f"{field}={node.instance.name} is too small: {node.cpus} CPUs and "
        text += f"{node.memory_mib} MiB are left for Ray. Set a larger one"
        checks[text] = node.cpus < 1 or node.memory_mib < LEAST_MIB
    return [problem for problem, wrong in checks.items() if wrong]


def _data_fleet(
    config: RunConfig, options: Options, workers: list[Fleet], problems: list[str]
) -> Fleet | None:
    name = options.data_instance
    machine = listed(name, "data_instance", problems) if options.data_nodes else None
    if machine is None:
        return None
    each = node(machine, efa=False)
    why = {
        "it has GPUs, which preparing data does not use. Set one without": machine.gpus > 0,
        "the image is for x86_64. Set another": "x86_64" not in machine.architectures,
        f"{each.memory_mib} MiB are left for Ray. Set a larger one": each.memory_mib < LEAST_MIB,
    }
    problems += [
        f"data_instance={name} is impossible: {reason}, e.g. m6i.8xlarge"
        for reason, wrong in why.items()
        if wrong
    ]
    if any(gpus_of(config, each.worker.instance) == 0 for each in workers):
        problems.append(
            "data_nodes is impossible: workers without GPUs would train on these hosts too. "
            "Leave it out: such workers' hosts prepare data as well"
        )
    return Fleet(each, options.data_nodes, options.data_nodes, Choice(name))


def gpus_of(config: RunConfig, machine: Instance) -> int:
    """Return how many GPUs of a worker's machine Ray has."""
    return machine.gpus if config.cluster.gpu != "false" else 0


def worker_node(machine: Instance, options: Options, kube: bool) -> Node:
    """Return what a worker gets of a machine; on Kubernetes, less the huge pages for EFA."""
    efa = options.efa != "false"
    pages = HUGEPAGES_HOST_MIB if kube and efa and machine.efa_interfaces else 0
    return node(machine, efa, 0, pages)


# us-east-1 and us-west-2. Not included: data through a NAT gateway (0.045 USD per GB) or an
# interface endpoint (0.01 USD per GB), and stored logs. S3 through its endpoint is free.
# Sources, 2026-11-22: NAT, zeonedge.com "Eliminating AWS NAT Gateway Costs" (2026-04-10);
# endpoints, by zone, usage.ai "AWS network costs" (2026-05) and cloudcostkit.com's calculator; EKS,
# AWS's blog "Amazon EKS extended support for Kubernetes versions pricing", by which a version past
# its 14 months costs 0.60.
NAT_USD_PER_HOUR = 0.045
ENDPOINT_USD_PER_HOUR = 0.01
EKS_USD_PER_HOUR = 0.10
ENDPOINTS = {"ecs": 11, "kuberay": 12}  # the lists in infra/ecs/main.tf and infra/eks/main.tf


def fixed_usd_per_hour(platform: str) -> float:
    """Return what a cluster costs without its machines."""
    fixed = NAT_USD_PER_HOUR + ENDPOINTS[platform] * ENDPOINT_USD_PER_HOUR
    return fixed + (EKS_USD_PER_HOUR if platform == "kuberay" else 0.0)


def cost_line(platform: str, fleet: Fleet, head: Instance, region: str, market: str) -> str:
    """Return a line with the cost in USD per hour: with all workers, and idle (head only)."""
    worker, price = fleet.worker.instance, fleet.choice.usd_per_hour
    market, head_usd = fleet.choice.market or market, head.usd_per_hour.get(region)
    fixed = fixed_usd_per_hour(platform)
    idle = f"idle {fixed:.2f} USD/h and the head {head.name} of unknown price"
    if head_usd is not None:
        idle = f"idle {head_usd + fixed:.2f} USD/h with the head {head.name}"
    nodes = f"{fleet.max_nodes} x {worker.name}"
    if price is None and market != "on-demand":
        return f"cost: {nodes} ({market}: price not known here), {idle}, {region}, {PRICE_DATE}"
    price = worker.usd_per_hour.get(region) if price is None else price
    if price is None:
        return f"cost: {nodes}: no on-demand price known in {region}, {idle}"
    busy = "unknown" if head_usd is None else f"{fleet.max_nodes * price + head_usd + fixed:.2f}"
    each = f"{price:g} each, {market.replace('-', ' ')}"
    return f"cost: {busy} USD/h with {nodes} ({each}), {idle}, {region}, {PRICE_DATE}"


def data_cost_line(fleet: Fleet, region: str) -> str:
    """Return a line with what the hosts for data cost while they are up."""
    machine = fleet.worker.instance
    price = machine.usd_per_hour.get(region)
    what = f"data: {fleet.max_nodes} x {machine.name} beside the workers"
    if price is None:
        return f"{what}: no on-demand price known in {region}"
    each = f"{fleet.max_nodes * price:.2f} USD/h more ({price:g} each, on demand)"
    return f"{what}, {each}, {region}, {PRICE_DATE}"
