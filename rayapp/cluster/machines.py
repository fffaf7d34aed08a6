"""Find the machines of a config's cluster; refuse those on which it could not run.

options = bought(config, options, problems)
head, fleets = machines_of("ecs", config, options, problems)
"""

from __future__ import annotations

from dataclasses import replace

from rayapp.cluster import image
from rayapp.cluster.options import Options, bucket
from rayapp.cluster.sizes import HUGEPAGES_HOST_MIB, Fleet, Node, fleet, node
from rayapp.config import RunConfig
from rayapp.hardware import Instance, UnknownInstance, instance
from rayapp.planner.question import named_instance

# The head's machine on EKS also runs the operator, DNS, metrics and the CSI controllers.
SYSTEM_CPUS, SYSTEM_MIB = 2, 4096
# The least that PyTorch's wheels for CUDA 13 have code for.
IMAGE_CAPABILITY = 7.5


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
    for component in sorted({"autoscaling", "kueue"} & set(options.components)):
        problems.append(
            f"component {component} is impossible where cluster.instance is a list: it sees one "
            "group of workers. Set one of them, or leave the component out"
        )
    if not default:
        problems.append(
            f"market={options.market} is ambiguous: cluster.instance is a list. Set the market of "
            f"each there, e.g. {choices[0].instance}:spot; a reservation is of one type"
        )
    return options


def machines_of(
    platform: str, config: RunConfig, options: Options, problems: list[str]
) -> tuple[Node, list[Fleet]] | None:
    """Return the head and the workers on each type of cluster.instance.

    Adds to `problems` why some are impossible.
    """
    found, wrong = list[tuple[Node, Fleet] | None](), list[str]()
    for each in config.alternatives():
        own = list[str]()
        found.append(_machines(platform, each, options, own))
        wrong += own
    problems += dict.fromkeys(wrong)  # what is wrong with the head is so for each
    made = [each for each in found if each is not None]
    return (made[0][0], [workers for _, workers in made]) if len(made) == len(found) else None


def _machines(
    platform: str, config: RunConfig, options: Options, problems: list[str]
) -> tuple[Node, Fleet] | None:
    """Return the head and the workers; add to `problems` why they are impossible."""
    worker_instance = named_instance(config, problems)
    if config.cluster.instance is None:
        problems.append(
            "cluster.instance=none is missing: the cluster's nodes need a type. "
            "Set an EC2 instance type, e.g. g5.12xlarge"
        )
    try:
        head = instance(options.head, "head")
    except UnknownInstance as error:
        problems.append(str(error))
        return None
    if worker_instance is None:
        return None
    if options.efa == "true" and worker_instance.efa_interfaces == 0:
        problems.append(
            f"efa=true is impossible: {worker_instance.name} has no Elastic Fabric Adapter. "
            "Leave --efa out, or set cluster.instance to one that has, e.g. p4d.24xlarge"
        )
    if options.launch == "fargate":
        why = f"Fargate has no GPUs, {worker_instance.name} has {worker_instance.gpus}"
        why = why if worker_instance.gpus else "Fargate gives Ray's object store no shared memory"
        problems.append(f"launch=fargate is impossible: {why}. Leave --launch out")
    storage = config.run.storage
    if storage.startswith("s3://") and not f"{storage}/".startswith(
        f"s3://{bucket(options)}/runs/"
    ):
        problems.append(
            f"run.storage={storage} is out of reach: a run's role may write only to "
            f"s3://{bucket(options)}/runs. Set run.storage to it"
        )
    for what, machine in ((worker_instance.name, worker_instance), (options.head, head)):
        if "x86_64" not in machine.architectures:
            problems.append(f"{what} is impossible: the image is for x86_64. Set another instance")
    problems += _gpu_problems(worker_instance, options)
    kube = platform == "kuberay"
    worker = worker_node(worker_instance, options, kube)
    system = node(head, False, *((SYSTEM_CPUS, SYSTEM_MIB) if kube else (0, 0)))
    for what, room in (("cluster.instance", worker), ("head", system)):
        if room.cpus < 1 or room.memory_mib < 4096:
            problems.append(
                f"{what}={room.instance.name} is too small: {room.cpus} CPUs and "
                f"{room.memory_mib} MiB are left for Ray. Set a larger one"
            )
    workers = fleet(config, worker, problems, data_elsewhere=options.data_nodes > 0)
    return None if workers is None else (system, workers)


def worker_node(machine: Instance, options: Options, kube: bool) -> Node:
    """Return what a worker gets of a machine; on Kubernetes, less the huge pages for EFA."""
    efa = options.efa != "false"
    pages = HUGEPAGES_HOST_MIB if kube and efa and machine.efa_interfaces else 0
    return node(machine, efa, 0, pages)


def _gpu_problems(worker: Instance, options: Options) -> list[str]:
    """Return why the image of these sources cannot use the instance's GPU."""
    gpu, ours = worker.gpu, options.tag in (None, image.tag())
    if gpu is None or not ours or float(gpu.compute_capability) >= IMAGE_CAPABILITY:
        return []
    return [
        f"{worker.name} is impossible: the image's PyTorch has no code for its GPU {gpu.name}. "
        "Build an image with PyTorch's wheels for CUDA 12 and set --tag to it"
    ]
