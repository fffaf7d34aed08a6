"""Print facts and findings as one page, or give them as plain values for JSON."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from rayapp.cluster.preflight.facts import ClusterFacts, NodeReport
from rayapp.cluster.preflight.findings import Finding, Requirements, size
from rayapp.cluster.preflight.network import busbw_mark, link_mark

GBIT = 1e9 / 8  # bytes


def as_dict(
    facts: ClusterFacts, findings: list[Finding], required: Requirements
) -> dict[str, object]:
    """Return facts, findings and what was not judged as plain values."""
    return {
        "passed": not findings,
        "findings": [asdict(finding) for finding in findings],
        "not_judged": not_judged(facts, required),
        "facts": asdict(facts),
    }


def not_judged(facts: ClusterFacts, required: Requirements) -> list[str]:
    """Return a line for each measurement that is only reported, with what is needed to judge it."""
    notes = []
    if facts.links and link_mark(facts, required) is None:
        notes.append("links: set cluster.instance or --min_gbit_per_s")
    if facts.rows and busbw_mark(facts, required) is None:
        why = "gloo has no mark" if facts.backend == "gloo" else "set cluster.instance"
        notes.append(f"collectives: {why}")
    if len(facts.ranks) < 2:
        notes.append(f"collectives and links: {len(facts.ranks)} worker, nothing to measure")
    if facts.model_problem:
        notes.append(f"kernels: {facts.model_problem}")
    return notes


def show(
    console: Console, facts: ClusterFacts, findings: list[Finding], required: Requirements
) -> None:
    """Print the page; the findings come last, next to the prompt."""
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in facts.seconds.items())
    console.print(
        f"[bold]preflight[/bold]  {len(facts.nodes)} nodes, {len(facts.ranks)} workers, "
        f"{facts.backend}; {took}",
        highlight=False,
    )
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    console.print(f"driver     {versions}\n", highlight=False, soft_wrap=True)
    console.print(_nodes(facts))
    if any(rank.speed for rank in facts.ranks):
        console.print(_devices(facts))
    if facts.rows:
        console.print(_rows(facts))
    if facts.links:
        console.print(_links(facts))
    for note in not_judged(facts, required):
        console.print(f"not judged  {note}", highlight=False, soft_wrap=True)
    console.print()
    for finding in findings:
        console.print(
            f"[bold red]FAIL[/bold red]  [bold]{finding.node}[/bold]: {finding.what}: ", end=""
        )
        console.print(
            f"{finding.measured}, wanted {finding.wanted}. {finding.fix}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    if findings:
        console.print(f"\nfindings: {len(findings)}", highlight=False)
    else:
        console.print("[bold green]all pass[/bold green]", highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        left = number == 0
        table.add_column(column, justify="left" if left else "right", no_wrap=left)
    return table


def _nodes(facts: ClusterFacts) -> Table:
    table = _table("nodes", "node", "GPUs", "EFA", "shm", "disk", "files", "clock", "write", "read")
    for node in facts.nodes:
        table.add_row(node.name, *_node(node))
    return table


def _node(node: NodeReport) -> list[str]:
    node_facts, probe = node.facts, node.probe
    if node_facts is None:
        return ["no answer"]
    clock = "n/a"
    if node.clock is not None:
        clock = f"{1000 * node.clock.offset_s:+.0f} ± {1000 * node.clock.error_s:.0f} ms"
    rates = [probe.write_bytes_per_s, probe.read_bytes_per_s] if probe else [None, None]
    return [
        str(len(node_facts.devices)),
        str(node_facts.efa_devices),
        size(node_facts.shared_memory_bytes),
        size(node_facts.disk_free_bytes),
        f"{node_facts.open_files:,}",
        clock,
        *("n/a" if rate is None else f"{rate / 1e6:.0f} MB/s" for rate in rates),
    ]


def _devices(facts: ClusterFacts) -> Table:
    precisions = list(
        dict.fromkeys(name for rank in facts.ranks if rank.speed for name in rank.speed.flops)
    )
    table = _table("devices", "node", "device", *(f"{p} TFLOP/s" for p in precisions), "GB/s", "by")
    for rank in facts.ranks:
        speed = rank.speed
        if speed is None:
            continue
        index = "" if speed.index is None else f"{speed.index} "
        table.add_row(
            facts.node(rank.node).name,
            f"{index}{speed.device}",
            *(f"{speed.flops[p] / 1e12:.3g}" if p in speed.flops else "n/a" for p in precisions),
            f"{speed.memory_bytes_per_s / 1e9:.3g}",
            rank.network or facts.backend,
        )
    return table


def _rows(facts: ClusterFacts) -> Table:
    table = _table(
        "collectives",
        "operation",
        "size (B)",
        "time (us)",
        "algbw (GB/s)",
        "busbw (GB/s)",
        "#wrong",
    )
    for row in facts.rows:
        table.add_row(
            row.operation,
            str(row.size_bytes),
            f"{row.seconds * 1e6:.1f}",
            f"{row.algbw / 1e9:.3g}",
            f"{row.busbw / 1e9:.3g}",
            str(row.wrong),
        )
    return table


def _links(facts: ClusterFacts) -> Table:
    table = _table("links", "from", "to", "Gbit/s", "workers")
    for link in facts.links:
        table.add_row(
            facts.node(link.sender).name,
            facts.node(link.receiver).name,
            f"{link.bytes_per_s / GBIT:.3g}",
            str(link.pairs),
        )
    return table
