"""Judge the network between the workers: EFA, the all-reduce, links between nodes."""

from __future__ import annotations

from collections.abc import Iterator

from rayapp.cluster.preflight.facts import ClusterFacts, Finding, Requirements
from rayapp.observe.words import number_of_bytes

# Lowest accepted share of the network rate that EC2 states. Two p6-b300 reach 0.94 of it in
# nccl-tests (AWS's samples, 2026); with one of 4 network cards lost that is 0.70, which must fail.
NETWORK_SHARE = 0.72
# Lowest accepted share of the NVLink rate. An all-reduce over 8 A100 reaches some 230 of 300 GB/s
# in nccl-tests, 0.77; below the limit a GPU or a switch has lost links.
NVLINK_SHARE = 0.65
# Gloo sends through one TCP flow, and EC2 limits a flow to 5 Gbit/s outside a cluster placement
# group (10 in one): EC2's guide, "Amazon EC2 instance network bandwidth", 2026.
FLOW_BITS_PER_S = 5e9


def efa(facts: ClusterFacts, required: Requirements) -> Iterator[Finding]:
    """Report nodes that have EFA, or should by their instance type, where NCCL does not use it."""
    nodes = {rank.node for rank in facts.ranks}
    if facts.backend != "nccl" or len(nodes) < 2 or facts.all_reduce is None:
        return
    fix = "Use an image with aws-ofi-nccl and libfabric (LD_LIBRARY_PATH), expose /dev/infiniband, "
    fix += "let the security group pass all traffic within itself, and unset FI_PROVIDER and "
    fix += "NCCL_NET"
    for id in sorted(nodes):
        node = facts.node(id)
        has = bool(node.facts and node.facts.efa_devices)
        if not has and not (required.instance and required.instance.efa_interfaces):
            continue
        used = {rank.network for rank in facts.ranks if rank.node == id}
        for network in sorted(used - {"efa"}, key=str):
            seen = network or "its log does not say what it uses"
            yield Finding(node.name, "NCCL does not send through EFA", seen, "efa", fix)


def all_reduce(facts: ClusterFacts, required: Requirements) -> Iterator[Finding]:
    """Report wrong values of the all-reduce, and a busbw below the limit."""
    seen, wanted = facts.all_reduce, busbw_mark(facts, required)
    if seen is not None and seen.wrong:
        what, count = "all-reduce gives wrong values", f"{seen.wrong:,} elements"
        fix = "A GPU or a link corrupts data: run preflight on halves of the nodes to find it"
        yield Finding("cluster", what, count, "0", fix)
    if seen is not None and wanted is not None and seen.busbw < wanted[0]:
        rate = f"{seen.busbw / 1e9:.3g} GB/s busbw at {number_of_bytes(seen.size_bytes)}"
        least = f"{wanted[0] / 1e9:.3g} GB/s ({wanted[1]})"
        fix = "Look at the links and at NCCL's network; put the nodes into one placement group"
        yield Finding("cluster", "all-reduce is slow", rate, least, fix)


def busbw_mark(facts: ClusterFacts, required: Requirements) -> tuple[float, str] | None:
    """Return the busbw in bytes/s that an all-reduce must reach, and where it comes from."""
    if required.instance is None or facts.backend != "nccl":
        return None
    gpu, name = required.instance.gpu, required.instance.name
    if len({rank.node for rank in facts.ranks}) > 1:
        mark = NETWORK_SHARE * required.instance.network_bits_per_s / 8
        return mark, f"{NETWORK_SHARE:g} of {name}'s network"
    if gpu is None or gpu.nvlink_bytes_per_s is None:
        return None
    return NVLINK_SHARE * gpu.nvlink_bytes_per_s, f"{NVLINK_SHARE:g} of NVLink"


def link_mark(facts: ClusterFacts, required: Requirements) -> tuple[float, str] | None:
    """Return the bytes/s that a link must reach, and where it comes from."""
    if required.gbit_per_s is not None:
        return required.gbit_per_s * 1e9 / 8, "--min_gbit_per_s"
    if required.instance is None:
        return None
    bits, what = required.instance.network_bits_per_s, f"{required.instance.name}'s network"
    if facts.backend == "gloo" and bits > FLOW_BITS_PER_S:
        bits, what = FLOW_BITS_PER_S, "what EC2 gives one TCP flow"
    return NETWORK_SHARE * bits / 8, f"{NETWORK_SHARE:g} of {what}"


def links(facts: ClusterFacts, required: Requirements) -> Iterator[Finding]:
    """Report each slow link by its two nodes."""
    if (wanted := link_mark(facts, required)) is None:
        return
    least = f"{wanted[0] * 8 / 1e9:.3g} Gbit/s ({wanted[1]})"
    fix = "Put all nodes into one placement group; replace a node whose links are all slow"
    for link in (link for link in facts.links if link.bytes_per_s < wanted[0]):
        ends = " -> ".join(facts.node(id).name for id in (link.sender, link.receiver))
        rate = f"{link.bytes_per_s * 8 / 1e9:.3g} Gbit/s"
        yield Finding(ends, "the link is slow", rate, least, fix)
