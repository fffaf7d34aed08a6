"""Preflight: the assess on drawn clusters, NCCL's own lines, real clusters with one fault each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
import ray
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from nodes import Node, cluster, with_jobs
from patience import PATIENCE_S
from ports import free_port
from processes import spawn
from support.architectures import ARCHITECTURES

from rayapp import __main__ as entry
from rayapp.cluster.preflight import __main__ as command
from rayapp.cluster.preflight import facts, group_worker, node_probe
from rayapp.cluster.preflight import survey as surveying
from rayapp.cluster.preflight.assessment import assess
from rayapp.cluster.preflight.facts import (
    AllReduce,
    ClockOffset,
    ClusterFacts,
    Device,
    Finding,
    Link,
    Probe,
    Rank,
    Requirements,
    Silence,
    Speed,
)
from rayapp.config import Config, load
from rayapp.hardware import INSTANCES, Instance, instance
from rayapp.jobs import SubmitOptions, prepare

ROOT = Path(__file__).parent.parent
GIB = 2**30
drawn = settings(deadline=None, max_examples=30)  # of this machine's time, not of the clusters
VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "transformers": "5.23.0"}


# --- NCCL's log: lines as its versions and those of aws-ofi-nccl write them --------------------

HOST = "ip-10-0-0-1:79:79 [0] NCCL INFO "
EFA_2022 = ["NET/OFI Selected Provider is efa (found 1 nics)", "Using network AWS Libfabric"]
EFA_2024 = ["NET/OFI Selected Provider is efa (found 16 nics)", "Using network Libfabric"]
EFA_2026 = [
    "NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)",
    "Initialized NET plugin Libfabric",
    "Assigned NET plugin Libfabric to comm",
    "Using network Libfabric",
]
NO_PLUGIN = [
    "NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open shared "
    "object file: No such file or directory",
    "NET/Plugin : No plugin found, using internal implementation",
    "NET/IB : No device found.",
    "NET/Socket : Using [0]ens3:172.31.12.210<0>",
]
LOGS = {
    "efa, 2022": (EFA_2022, "efa"),
    "efa, 2024": (EFA_2024, "efa"),
    "efa, 2026": (EFA_2026, "efa"),
    "efa, a channel": ([*EFA_2022, "Ring 00 : 15 -> 16 [send] via NET/AWS Libfabric/0"], "efa"),
    "efa, GPUDirect": (
        [*EFA_2024, "Channel 00/0 : 0[0] -> 8[0] [send] via NET/Libfabric/0/GDRDMA"],
        "efa",
    ),
    "tcp through libfabric": (
        ["NET/OFI Selected Provider is tcp;ofi_rxm (found 4 nics)", "Using network AWS Libfabric"],
        "tcp",
    ),
    "no plug-in, old": (NO_PLUGIN, "socket"),
    "no plug-in": ([*NO_PLUGIN, "Using network Socket"], "socket"),
    "plug-in found, not taken": ([EFA_2024[0], *NO_PLUGIN[2:], "Using network Socket"], "socket"),
    "sockets carry the channel": (
        [EFA_2024[0], "Ring 00 : 15 -> 0 [receive] via NET/Socket/0"],
        "socket",
    ),
    "infiniband": (["NET/IB : Using [0]mlx5_0:1/IB ; OOB enp41s0f1:<0>"], "ib"),
    "infiniband, used": (
        ["NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>", "Using network IB"],
        "ib",
    ),
    "another plug-in": (["Assigned NET plugin Socket to comm"], "socket"),
    "before a communicator": (["Bootstrap : Using eth0:10.36.29.253<0>"], None),
    "one node": (["Channel 00/1 : 0[0] -> 1[1] via P2P/IPC"], None),
    "nothing": ([], None),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_network_is_read_from_nccls_log(name: str) -> None:
    lines, network = LOGS[name]
    assert group_worker.network_of(HOST + line for line in lines) == network


# --- the assess ---------------------------------------------------------------------------------


def healthy(nodes: int, kind: Instance | None) -> ClusterFacts:
    """Return the facts of a cluster that has what it should: 3 % around its sheet's figures."""
    gpu, lanes = (kind.gpu, kind.gpus) if kind else (None, 1)
    found, ranks = [], []
    for number in range(nodes):
        devices = tuple(
            Device(i, f"GPU-{i}", gpu.device_name, 0, False) for i in range(lanes if gpu else 0)
        )
        seen = facts.NodeFacts(
            host=f"host-{number}",
            versions=VERSIONS,
            devices=devices,
            efa_devices=kind.efa_interfaces if kind else 0,
            shared_memory_bytes=64 * GIB,
            disk="/tmp/ray",
            disk_bytes=500 * GIB,
            disk_free_bytes=300 * GIB,
            open_files=65536,
            memlock_bytes=None,
        )
        id = f"{number:08x}" + 48 * "0"
        resources = {"CPU": 8.0, "GPU": float(len(devices)), "object_store_memory": 30.0 * GIB}
        found.append(
            facts.NodeReport(
                id,
                f"10.0.{number // 256}.{number % 256}",
                f"host-{number}",
                resources,
                seen,
                ClockOffset(0.001, 0.002),
                Probe(2**25, 200e6, 400e6, shared=True),
            )
        )
        for lane in range(lanes):
            jitter = 1 + 0.03 * ((number * 7 + lane) % 3 - 1)
            flops, memory = 50e9, 10e9
            if gpu:
                sheet = 0.8 * (gpu.flops["bf16"] or 20e12)
                flops = gpu.measured_flops.get("bf16") or sheet
                memory = 0.9 * gpu.memory_bytes_per_s
            speed = Speed(
                gpu.device_name if gpu else "cpu",
                lane if gpu else None,
                "bf16" if gpu else "fp32",
                flops * jitter,
                memory * jitter,
            )
            network = "efa" if kind and kind.efa_interfaces else "socket"
            ranks.append(Rank(len(ranks), id, speed, network if gpu else None, "2.28.3"))
    rate = 0.9 * kind.network_bits_per_s / 8 if kind else 1e9
    bus = rate if nodes > 1 or gpu is None else 0.8 * (gpu.nvlink_bytes_per_s or 1e10)
    links = [
        Link(found[a].id, found[b].id, rate, lanes)
        for pairs in group_worker.rounds([[n] for n in range(nodes)])
        for a, b in pairs
    ]
    return ClusterFacts(
        versions=VERSIONS,
        backend="nccl" if gpu else "gloo",
        storage="s3://bucket/runs",
        nodes=tuple(found),
        ranks=tuple(ranks),
        all_reduce=AllReduce(2**30, 1.0, bus, 0) if len(ranks) > 1 else None,
        links=tuple(links),
    )


def with_node(known: ClusterFacts, number: int, **changes: Any) -> ClusterFacts:
    """Return the facts with something of one node's NodeFacts, or of the node, changed."""
    node = known.nodes[number]
    inner = {k: v for k, v in changes.items() if k in facts.NodeFacts.__dataclass_fields__}
    outer = {k: v for k, v in changes.items() if k not in inner}
    assert node.facts is not None
    node = replace(node, facts=replace(node.facts, **inner), **outer)
    return replace(known, nodes=(*known.nodes[:number], node, *known.nodes[number + 1 :]))


def with_speed(known: ClusterFacts, rank: int, **changes: Any) -> ClusterFacts:
    one = known.ranks[rank]
    one = replace(one, speed=replace(one.speed, **changes))
    return replace(known, ranks=(*known.ranks[:rank], one, *known.ranks[rank + 1 :]))


EFA_KINDS = [name for name, one in INSTANCES.items() if one.efa_interfaces and one.gpus > 1]
GPU_KINDS = [name for name, one in INSTANCES.items() if one.gpus]


@drawn
@given(nodes=st.integers(1, 40), name=st.sampled_from([None, *GPU_KINDS]))
def test_a_healthy_cluster_of_any_kind_passes(nodes: int, name: str | None) -> None:
    kind = instance(name) if name else None
    known = healthy(nodes, kind)
    if kind is not None and kind.efa_interfaces == 0:
        known = replace(known, ranks=tuple(replace(one, network="socket") for one in known.ranks))
    assert assess(known, Requirements(kind)) == []


def only(findings: list[Finding], node: str, *words: str) -> Finding:
    """Return the one finding, which names this node and has these words."""
    assert len(findings) == 1, findings
    (one,) = findings
    assert one.node == node
    text = f"{one.what} {one.measured} {one.wanted}"
    assert all(word in text for word in words), text
    assert one.fix
    return one


FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "shared memory": ({"shared_memory_bytes": 2**26}, ("/dev/shm", "67.1 MB", "33.3 GB")),
    "a version": (
        {"versions": {**VERSIONS, "transformers": "4.57.1"}},
        ("transformers differs", "4.57.1", "5.23.0"),
    ),
    "a disk": ({"disk_free_bytes": 10 * GIB}, ("/tmp/ray is full", "10.7 GB", "537 GB")),
    "open files": ({"open_files": 1024}, ("open files", "1,024", "4,096")),
    "locked memory": ({"memlock_bytes": 65536}, ("locked memory", "65.5 kB")),
    "a clock": ({"clock": ClockOffset(-7.0, 0.01)}, ("clock", "-7.0 s")),
    "storage": ({"probe": Probe(2**25, error="AccessDenied")}, ("run.storage", "AccessDenied")),
    "a folder of its own": ({"probe": Probe(2**25, 1, 1, shared=False)}, ("folder of its own",)),
    "EFA devices": ({"efa_devices": 3}, ("EFA devices are missing", "3", "32")),
}


@pytest.mark.parametrize("fault", FAULTS)
@drawn
@given(nodes=st.integers(3, 40), data=st.data())
def test_a_fault_of_one_node_is_found_and_nothing_else(
    fault: str, nodes: int, data: st.DataObject
) -> None:
    changes, words = FAULTS[fault]
    kind = instance("p5.48xlarge")
    bad = data.draw(st.integers(0, nodes - 1))
    known = with_node(healthy(nodes, kind), bad, **changes)
    only(assess(known, Requirements(kind)), known.nodes[bad].name, *words)


@drawn
@given(nodes=st.integers(1, 40), data=st.data(), share=st.floats(0.2, 0.75))
def test_a_slow_gpu_is_named_by_node_and_index(
    nodes: int, data: st.DataObject, share: float
) -> None:
    kind = instance("p5.48xlarge")
    known = healthy(nodes, kind)
    rank = data.draw(st.integers(0, len(known.ranks) - 1))
    slow = with_speed(known, rank, flops=share * 720e12, throttled=("hardware slowdown",))
    node, index = rank // 8, rank % 8
    found = assess(slow, Requirements(kind))
    only(found, known.nodes[node].name, f"GPU {index} ", "bf16", "hardware slowdown")
    slow = with_speed(known, rank, memory_bytes_per_s=share * 3352e9 * 0.9)
    only(assess(slow, Requirements(kind)), known.nodes[node].name, f"GPU {index} ", "memory slowly")


def test_a_slow_gpu_is_found_among_its_like_where_there_is_no_sheet() -> None:
    known = healthy(2, instance("p5.48xlarge"))
    for rank in range(16):
        known = with_speed(known, rank, device="NVIDIA Unheard-of")
    assert assess(known, Requirements()) == []
    slow = with_speed(known, 11, memory_bytes_per_s=0.8 * 0.9 * 3352e9)
    only(assess(slow, Requirements()), known.nodes[1].name, "GPU 3", "median")


@drawn
@given(nodes=st.integers(2, 40), data=st.data(), name=st.sampled_from(EFA_KINDS))
def test_a_slow_link_is_named_by_its_nodes(nodes: int, data: st.DataObject, name: str) -> None:
    kind = instance(name)
    known = healthy(nodes, kind)
    bad = data.draw(st.integers(0, len(known.links) - 1))
    link = replace(known.links[bad], bytes_per_s=0.1 * known.links[bad].bytes_per_s)
    slow = replace(known, links=(*known.links[:bad], link, *known.links[bad + 1 :]))
    sender, receiver = known.node(link.sender).name, known.node(link.receiver).name
    only(assess(slow, Requirements(kind)), f"{sender} -> {receiver}", "the link is slow")


def test_links_without_a_mark_are_reported_and_not_judged() -> None:
    known = healthy(3, None)
    slow = replace(known, links=tuple(replace(one, bytes_per_s=1.0) for one in known.links))
    assert assess(slow, Requirements()) == []
    assert any("--min_gbit_per_s" in note for note in command.not_judged(slow, Requirements()))
    assert len(assess(slow, Requirements(gbit_per_s=1.0))) == 6
    assert assess(known, Requirements(gbit_per_s=7.9)) == []  # healthy is 8 Gbit/s
    assert command.not_judged(known, Requirements(gbit_per_s=7.9)) == [
        "all-reduce: gloo has no mark"
    ]


def test_sockets_where_there_is_efa_fail() -> None:
    kind = instance("p5.48xlarge")
    known = healthy(3, kind)
    ranks = tuple(
        replace(one, network="socket") if one.node == known.nodes[1].id else one
        for one in known.ranks
    )
    known = replace(known, ranks=ranks)
    only(assess(known, Requirements(kind)), known.nodes[1].name, "EFA", "socket")
    only(
        assess(known, Requirements()), known.nodes[1].name, "EFA", "socket"
    )  # its devices say it is there


def test_a_node_without_kernels_for_the_models_layers_is_named() -> None:
    known = healthy(2, instance("g5.12xlarge"))
    ranks = list(known.ranks)
    ranks[4] = replace(ranks[4], missing_kernels=("causal-conv1d", "mamba-ssm"))
    found = assess(replace(known, ranks=tuple(ranks)), Requirements())
    wanted = "Install causal-conv1d and mamba-ssm"
    assert wanted in only(found, known.nodes[1].name, "no causal-conv1d and mamba-ssm").fix
    unread = replace(known, model_problem="model.path=org/base cannot be fetched")
    assert assess(unread, Requirements()) == []
    assert "kernels: model.path=org/base cannot be fetched" in command.not_judged(
        unread, Requirements()
    )


def test_gpus_that_are_missing_broken_or_others_are_named() -> None:
    kind = instance("p5.48xlarge")
    known = healthy(3, kind)
    node = known.nodes[2]
    assert node.facts is not None
    devices = list(node.facts.devices)
    seven = with_node(known, 2, devices=tuple(devices[:7]))
    only(assess(seven, Requirements(kind)), node.name, "driver does not show", "7 GPUs", "8")
    devices[3] = replace(devices[3], ecc_errors=2)
    broken = with_node(known, 2, devices=tuple(devices))
    only(assess(broken, Requirements(kind)), node.name, "GPU 3", "memory errors", "2")
    devices[3] = replace(devices[3], ecc_errors=None, remap_pending=True)
    only(
        assess(with_node(known, 2, devices=tuple(devices)), Requirements(kind)),
        node.name,
        "remapped",
    )
    other = replace(devices[0], name="NVIDIA A10G")
    another = with_node(known, 2, devices=(other, *node.facts.devices[1:]))
    only(assess(another, Requirements(kind)), node.name, "another GPU", "NVIDIA A10G", "H100")
    resources = {**node.resources, "GPU": 4.0}
    only(
        assess(with_node(known, 2, resources=resources), Requirements(kind)),
        node.name,
        "fewer GPUs",
        "4",
    )


def test_a_cluster_without_the_gpus_that_are_wanted_fails() -> None:
    known = healthy(2, None)
    only(assess(known, Requirements(gpus=True)), "cluster", "no GPU", "cluster.gpu=true")
    found = assess(known, Requirements(instance("g5.12xlarge"), gbit_per_s=1))
    only(found, "cluster", "no GPU", "g5.12xlarge")
    assert assess(known, Requirements(instance("g5.12xlarge"), gbit_per_s=1, gpus=False)) == []


def test_an_all_reduce_that_is_slow_or_wrong_is_found() -> None:
    kind = instance("p5.48xlarge")
    known = healthy(2, kind)
    assert known.all_reduce is not None
    slow = replace(known.all_reduce, busbw=200e9)
    found = assess(replace(known, all_reduce=slow), Requirements(kind))
    only(found, "cluster", "all-reduce is slow", "200 GB/s", "288 GB/s")
    wrong = replace(known.all_reduce, wrong=3)
    found = assess(replace(known, all_reduce=wrong), Requirements(kind))
    only(found, "cluster", "wrong values", "3")


def test_who_does_not_answer_is_named() -> None:
    known = healthy(3, None)
    known = replace(
        known,
        nodes=(known.nodes[0], replace(known.nodes[1], facts=None, clock=None, probe=None)),
        ranks=known.ranks[:1],
        links=(),
        silences=(Silence(known.nodes[1].id, "starting a process", "no answer within 180 s"),),
    )
    only(assess(known, Requirements()), known.nodes[1].name, "starting a process", "180 s")


# --- what workers do together ------------------------------------------------------------------


@drawn
@given(nodes=st.integers(2, 30), lanes=st.integers(1, 4))
def test_every_link_of_the_ring_is_measured_once_in_each_direction(nodes: int, lanes: int) -> None:
    ranks = [[lanes * node + lane for lane in range(lanes)] for node in range(nodes)]
    seen = []
    for pairs in group_worker.rounds(ranks):
        links = {(a // lanes, b // lanes) for a, b in pairs}
        assert len(pairs) == lanes * len(links)
        assert all(a % lanes == b % lanes for a, b in pairs)
        ends = [end for link in links for end in link]
        assert len(ends) == len(set(ends)), "a node is in two links at once"
        seen += sorted(links)
    ring = {(a, (a + 1) % nodes) for a in range(nodes)}
    assert len(seen) == len(set(seen))
    assert set(seen) == ring | {(b, a) for a, b in ring}


def _measure(rank: int, world: int, folder: str) -> None:
    steps: list[str] = []
    cpu = torch.device("cpu")
    found: dict[str, Any] = {"all_reduce": vars(group_worker.all_reduce(cpu, steps.append))}
    plan = group_worker.rounds([[0], [1], [2]])
    found["links"] = list(group_worker.link_rates(plan, cpu, steps.append).items())
    honest = dist.all_reduce

    def corrupt(tensor: torch.Tensor, **options: Any) -> Any:
        done = honest(tensor, **options)
        if tensor.numel() > 2 and rank == 1:
            tensor[:5] += 1.0
        return done

    dist.all_reduce = corrupt
    found["wrong"] = group_worker.all_reduce(cpu, steps.append).wrong
    dist.all_reduce = honest
    found["steps"] = steps
    Path(folder, str(rank)).write_text(json.dumps(found))


def test_an_all_reduce_and_links_between_processes(tmp_path: Path) -> None:
    """busbw is nccl-tests' by its definition, the same on all ranks; wrong values are seen."""
    spawn(_measure, 3, str(tmp_path / "rendezvous"), str(tmp_path))
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    reduced = found[0]["all_reduce"]
    assert reduced == found[1]["all_reduce"] == found[2]["all_reduce"]
    assert reduced["size_bytes"] % 4 == 0 and reduced["wrong"] == 0
    algbw = reduced["size_bytes"] / reduced["seconds"]
    assert reduced["busbw"] == pytest.approx(4 / 3 * algbw)
    assert [one["wrong"] for one in found] == [5, 5, 5]
    measured = {tuple(pair): rate for one in found for pair, rate in one["links"]}
    assert set(measured) == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)}
    assert all(rate > 1e6 for rate in measured.values())
    assert all(one["steps"][0] == "all-reduce of 1,048,576 bytes" for one in found)


# --- storage, commands -------------------------------------------------------------------------


def test_the_probe_leaves_nothing_and_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "mark").write_bytes(b"")
    found = node_probe.probe(str(tmp_path), "mark", size=2**20)
    assert found.error is None and found.shared is True
    assert (found.write_bytes_per_s or 0) > 0 and (found.read_bytes_per_s or 0) > 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["mark"]
    assert node_probe.probe(str(tmp_path), "elsewhere", size=2**10).shared is False
    (tmp_path / "file").write_bytes(b"")
    assert "cannot" in str(node_probe.probe(str(tmp_path / "file" / "runs"), "", size=2**10).error)


def test_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--min_gbit_per_s=fast", "--timeout_s=0"):
        assert command.main([word]) == 2
        assert word in capsys.readouterr().err
    assert command.main(["--min_gbit_per=1"]) == 2
    assert "Did you mean --min_gbit_per_s?" in capsys.readouterr().err
    assert command.main(["--cluster.instance=p5.48xlage", "--cluster.address=local"]) == 2
    assert "Did you mean p5.48xlarge?" in capsys.readouterr().err
    assert command.main(["--run.storage=gs://bucket", "--cluster.address=local"]) == 2
    assert "run.storage=gs://bucket" in capsys.readouterr().err
    address = f"127.0.0.1:{free_port()}"
    assert command.main([f"--cluster.address={address}"]) == 2
    assert f"cluster.address={address} is not reachable" in capsys.readouterr().err
    assert entry.main(["preflight", "--timeout_s=soon", "--run.storage=/shared"]) == 2
    assert "--timeout_s=soon" in capsys.readouterr().err


def test_the_job_is_no_run() -> None:
    config = Config.model_validate({"run": {"name": "demo", "storage": "s3://bucket/runs"}})
    order = prepare(
        config, SubmitOptions(tags={"team": "x"}), "rayapp.cluster.preflight", ["--json=true"]
    )
    assert order.entrypoint == (
        "exec python -m rayapp.cluster.preflight --run.name=demo --run.storage=s3://bucket/runs"
        " --json=true"
    )
    assert order.name == "preflight"
    # without the run among them it would be listed as the run itself
    assert order.metadata() == {"job_name": "preflight", "rayapp.tag.team": "x"}
    assert prepare(config, SubmitOptions()).metadata() == {
        "job_name": "demo",
        "rayapp.run": "s3://bucket/runs/demo",
    }


# --- real clusters -----------------------------------------------------------------------------


def preflight(
    head: Node, storage: str, *options: str, inside: Sequence[str] = (), **variables: str
) -> tuple[int, dict[str, Any]]:
    """Run the command on a cluster; return its exit code and what it says."""
    arguments = [f"--cluster.address={head.address}", f"--run.storage={storage}", "--json"]
    done = subprocess.run(
        [*inside, sys.executable, "-m", "rayapp.cluster.preflight", *arguments, *options],
        env={**os.environ, "RAY_AUTH_MODE": "disabled", **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with cluster(tmp_path_factory.mktemp("head")) as nodes:
        yield nodes[0]


@contextlib.contextmanager
def node(head: Node, folder: Path, **how: Any) -> Iterator[Node]:
    one = Node(folder / "node.log", cpus=2, seats=0, head=head, **how)
    try:
        yield one
    finally:
        one.end()
        wait_until_gone(head)


def wait_until_gone(head: Node) -> None:
    """Wait until Ray has missed the node, so that the next test does not see it."""
    code = (
        f"import ray, time; ray.init('{head.address}', log_to_driver=False)\n"
        "while sum(one['Alive'] for one in ray.nodes()) > 1: time.sleep(0.2)"
    )
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=PATIENCE_S)


def newest(found: dict[str, Any]) -> str:
    """Return how findings name the node that is not the head."""
    (one,) = (
        facts.NodeReport(**{**one, "facts": None, "clock": None, "probe": None}).name
        for one in found["facts"]["nodes"]
        if "node:__internal_head__" not in one["resources"]
    )
    return one


def no_namespaces() -> str | None:
    """Say why this machine gives no namespaces; None if it does."""
    if shutil.which("unshare") is None or shutil.which("ip") is None or shutil.which("tc") is None:
        return "util-linux and iproute2 are not installed"
    done = subprocess.run(["unshare", "-m", "-n", "true"], capture_output=True, text=True)
    return f"no right to make namespaces: {done.stderr.strip()}" if done.returncode else None


needs_namespaces = pytest.mark.skipif(no_namespaces() is not None, reason=str(no_namespaces()))


@pytest.mark.full
def test_two_nodes_pass(head: Node, tmp_path: Path) -> None:
    with node(head, tmp_path):
        code, found = preflight(head, str(tmp_path / "runs"), "--min_gbit_per_s=0.1")
    assert found["findings"] == []
    assert code == 0
    seen = found["facts"]
    assert len(seen["nodes"]) == len(seen["ranks"]) == len(seen["links"]) == 2
    for one in seen["nodes"]:
        assert one["facts"]["versions"] == seen["versions"]
        assert one["facts"]["shared_memory_bytes"] == shutil.disk_usage("/dev/shm").total
        assert abs(one["clock"]["offset_s"]) <= one["clock"]["error_s"] + 0.01  # the same clock
        assert one["probe"]["shared"] is True
        assert one["probe"]["write_bytes_per_s"] > 0 < one["probe"]["read_bytes_per_s"]
    assert seen["all_reduce"]["busbw"] > 1e6 and seen["all_reduce"]["wrong"] == 0
    assert all(rank["speed"]["flops"] > 1e8 for rank in seen["ranks"])
    assert not any(path.is_file() for path in (tmp_path / "runs").rglob("*"))


@pytest.mark.full
def test_workers_on_gpus_look_for_the_kernels_of_the_models_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real workers, on a GPU that Ray alone counts; one of the two packages can be imported."""

    class OnCpu(group_worker.GroupWorker):
        def __init__(self, gpu: bool) -> None:
            assert gpu
            super().__init__(gpu=False)

    monkeypatch.setattr(surveying, "GroupWorker", OnCpu)
    functions = "def causal_conv1d_fn(x): ...\ndef causal_conv1d_update(x): ...\n"
    (tmp_path / "causal_conv1d.py").write_text(functions)
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    (hybrid,) = (each for each in ARCHITECTURES if each.kind == "Qwen3Next")
    hybrid.config().save_pretrained(tmp_path / "hybrid")
    (tmp_path / "empty").mkdir()
    found = {}
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory() as temporary:  # short: Ray makes sockets below it
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=1,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": search}},
            _temp_dir=temporary,
        )
        try:
            for path in (str(tmp_path / "hybrid"), "tiny", str(tmp_path / "empty")):
                fields = {"model.path": path, "run.storage": str(tmp_path / "runs")}
                found[path] = surveying.survey(load(None, fields, Config), PATIENCE_S)
        finally:
            ray.shutdown()
    first, others, unread = found.values()
    assert [rank.missing_kernels for rank in first.ranks] == [("flash-linear-attention",)]
    assert [rank.missing_kernels for rank in others.ranks] == [()] and not others.silences
    assert first.model_problem is None and "has no config.json" in str(unread.model_problem)


@pytest.mark.drill
@needs_namespaces
def test_tiny_shared_memory_is_named(head: Node, tmp_path: Path) -> None:
    """The node's /dev/shm is a tmpfs of 32 MiB in a mount namespace of its own."""
    mount = 'mount -t tmpfs -o size=32m tmpfs /dev/shm && exec "$@"'
    with node(head, tmp_path, inside=["unshare", "-m", "sh", "-c", mount, "sh"]):
        code, found = preflight(head, str(tmp_path / "runs"))
    assert code == 1
    (finding,) = found["findings"]
    assert finding["node"] == newest(found)
    assert "/dev/shm" in finding["what"] and finding["measured"] == "33.6 MB"


@pytest.mark.drill
def test_a_version_that_differs_is_named(head: Node, tmp_path: Path) -> None:
    """The node's processes find another transformers' metadata first."""
    other = tmp_path / "site" / "transformers-4.57.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.1\n")
    search = os.pathsep.join(filter(None, [str(other.parent), os.environ.get("PYTHONPATH")]))
    with node(head, tmp_path, variables={"PYTHONPATH": search}):
        code, found = preflight(head, str(tmp_path / "runs"))
    assert code == 1
    (finding,) = found["findings"]
    assert finding["node"] == newest(found)
    assert (finding["what"], finding["measured"]) == ("transformers differs", "4.57.1")


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[dict[str, dict[str, str]]]:
    """Run S3 with IAM on; yield the environment of one who may write to s3://runs, and who not."""
    url = f"http://127.0.0.1:{free_port()}"
    emulator = [sys.executable, str(Path(__file__).parent / "support" / "aws_emulator.py")]
    base = {name: v for name, v in os.environ.items() if not name.startswith("AWS_")}
    with (tmp_path / "aws.log").open("w") as log:
        process = subprocess.Popen(
            [*emulator, "-H", "127.0.0.1", "-p", url.rpartition(":")[2]],
            env=base,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        tell(url, str(10**9), process)
        admin: dict[str, Any] = {"endpoint_url": url, "region_name": "us-east-1"}
        admin |= {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
        boto3.client("s3", **admin).create_bucket(Bucket="runs")
        iam, found = boto3.client("iam", **admin), {}
        for user, actions in {"may": ["s3:*"], "denied": ["s3:ListBucket", "s3:GetObject"]}.items():
            iam.create_user(UserName=user)
            rule = {"Effect": "Allow", "Action": actions, "Resource": "*"}
            policy = json.dumps({"Version": "2012-10-17", "Statement": [rule]})
            iam.put_user_policy(UserName=user, PolicyName="p", PolicyDocument=policy)
            key = iam.create_access_key(UserName=user)["AccessKey"]
            found[user] = {
                "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
                "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ENDPOINT_URL_S3": url,
                "AWS_EC2_METADATA_DISABLED": "true",
            }
        tell(url, "0", process)
        yield found
    finally:
        process.kill()
        process.wait(timeout=PATIENCE_S)


def tell(url: str, free_calls: str, process: subprocess.Popen[bytes]) -> None:
    """Let moto pass so many calls before it asks IAM; wait for it to be up."""
    headers = {"Content-Type": "text/plain"}
    request = urllib.request.Request(f"{url}/moto-api/reset-auth", free_calls.encode(), headers)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            urllib.request.urlopen(request, timeout=10).read()
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        else:
            return


@pytest.mark.drill
def test_a_node_that_s3_denies_is_named(aws: dict[str, dict[str, str]], tmp_path: Path) -> None:
    first = Node(tmp_path / "head.log", cpus=3, seats=1, variables=aws["may"])
    second = None
    try:
        second = Node(tmp_path / "n.log", cpus=2, seats=0, head=first, variables=aws["denied"])
        code, found = preflight(first, "s3://runs/here", **aws["may"])
    finally:
        if second is not None:
            second.end()
        first.end()
    assert code == 1
    (finding,) = found["findings"]
    assert finding["node"] == newest(found)
    assert "s3://runs/here" in finding["what"]
    assert "denied" in finding["measured"].casefold()
    (writes,) = (one["probe"] for one in found["facts"]["nodes"] if one["probe"]["error"] is None)
    assert writes["write_bytes_per_s"] > 0


@contextlib.contextmanager
def two_machines() -> Iterator[list[list[str]]]:
    """Make two network namespaces with a wire between them; yield the command into each."""
    names = [f"pf-{os.getpid()}-{side}" for side in "ab"]
    wires = [f"pf{os.getpid() % 10**7}{side}" for side in "ab"]

    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)

    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", wires[0], "netns", names[0], "type", "veth",
            "peer", "name", wires[1], "netns", names[1])  # fmt: skip
        for number, (name, wire) in enumerate(zip(names, wires, strict=True)):
            run("ip", "-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", wire)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", wire, "up")
            # Ray takes the address by which it would reach the world for a machine's own.
            run("ip", "-n", name, "route", "add", "default", "via", f"10.77.0.{2 - number}")
        yield [
            ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={wire}"]
            for name, wire in zip(names, wires, strict=True)
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)


@pytest.mark.drill
@needs_namespaces
def test_a_slowed_link_is_named(tmp_path: Path) -> None:
    """The second machine's wire sends 50 Mbit/s at most (tc tbf); before, it passes."""
    with two_machines() as (first, second):
        one = Node(tmp_path / "head.log", cpus=3, seats=1, ip="10.77.0.1", inside=first)
        two = None
        try:
            two = Node(tmp_path / "n.log", cpus=2, seats=0, head=one, ip="10.77.0.2", inside=second)
            asked = (one, str(tmp_path / "runs"), "--min_gbit_per_s=0.2")
            code, found = preflight(*asked, inside=first)
            assert found["findings"] == [] and code == 0
            wire = second[-1].partition("=")[2]
            limit = ["tc", "qdisc", "add", "dev", wire, "root", "tbf"]
            limit += ["rate", "50mbit", "burst", "64kb", "latency", "50ms"]
            subprocess.run([*second, *limit], check=True, timeout=30)
            code, found = preflight(*asked, inside=first)
        finally:
            if two is not None:
                two.end()
            one.end()
    assert code == 1
    (finding,) = found["findings"]
    (sender,) = (node for node in found["facts"]["nodes"] if node["address"] == "10.77.0.2")
    assert finding["node"].startswith(newest(found) + " -> ")
    (link,) = (x for x in found["facts"]["links"] if x["sender"] == sender["id"])
    assert 0.02 < link["bytes_per_s"] * 8 / 1e9 < 0.055


@pytest.mark.drill
def test_a_node_that_hangs_is_named_in_time(head: Node, tmp_path: Path) -> None:
    """All of a node's processes are stopped; Ray takes it for alive for some time still."""
    with node(head, tmp_path) as one:
        root = psutil.Process(one.process.pid)
        for process in [root, *root.children(recursive=True)]:
            process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        code, found = preflight(head, str(tmp_path / "runs"), "--timeout_s=20")
        assert time.monotonic() - started < 200
    assert code == 1
    assert [one["node"] for one in found["findings"]] == [newest(found)]


@pytest.mark.drill
def test_it_runs_as_a_job(tmp_path: Path) -> None:
    """Sent over the Jobs API and followed; what it returns is what preflight returned."""
    storage = f"--run.storage={tmp_path / 'runs'}"
    send = [sys.executable, "-m", "rayapp", "preflight", storage]
    with with_jobs(tmp_path, cpus=2, workers=1) as environment:
        done = subprocess.run(
            [*send, "--json"],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout[done.stdout.index("{") :])
        assert len(found["facts"]["nodes"]) == 2 and found["passed"]
        more = [*send, "--min_gbit_per_s=1e6"]
        done = subprocess.run(
            more, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 1, done.stdout + done.stderr
        assert "the link is slow" in done.stdout and "--min_gbit_per_s" in done.stdout
