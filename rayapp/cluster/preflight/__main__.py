"""python -m rayapp.cluster.preflight [CONFIG.yaml] [--section.field=value ...]

  --json               print everything as JSON
  --min_gbit_per_s=N   rate that a link between two nodes must reach; by default cluster.instance's
  --timeout_s=180      seconds to wait for one answer

Checks the cluster of cluster.address (RAY_ADDRESS; Ray on this machine without either).
Exit codes: 0 all pass, 1 there are findings, 2 bad config.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from rich.table import Table

from rayapp.cluster.preflight import OPTIONS, read_options
from rayapp.cluster.preflight.assessment import assess
from rayapp.cluster.preflight.facts import (
    ClusterFacts,
    Finding,
    NodeReport,
    Requirements,
    requirements_of,
)
from rayapp.cluster.preflight.network import busbw_mark, link_mark
from rayapp.config import ConfigError, RunConfig, arguments
from rayapp.jobs import secrets
from rayapp.observe.plain import Console
from rayapp.observe.run_folder import Exit, refused
from rayapp.observe.words import number_of_bytes
from rayapp.storage import StorageError, open_storage


def main(argv: list[str]) -> int:
    """Run the command line; return the exit code."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return Exit.DONE
    try:
        config, asked = arguments.read(arguments.flags(argv, {"json"}), OPTIONS)
        numbers = read_options(asked)
        secrets.load()
        return check(config, asked["json"] == "true", *numbers)
    except ConfigError as error:
        return refused(error)
    except secrets.SecretError as error:
        print(f"failed: {error}", file=sys.stderr)
        return Exit.FAILED


def check(config: RunConfig, as_json: bool, min_gbit_per_s: float | None, timeout_s: float) -> int:
    """Survey the cluster, print facts and findings, return the exit code."""
    required = requirements_of(config, min_gbit_per_s)
    storage = config.run.storage
    if "://" not in storage:  # workers have another working folder
        storage = os.path.abspath(os.path.expanduser(storage))
        config = config.with_fields("run", storage=storage)
    try:
        open_storage(storage)
    except StorageError as error:
        raise ConfigError([f"run.storage={storage} is not valid: {error}"]) from None
    from rayapp.cluster.preflight.survey import survey

    with _connected(config):
        facts = survey(config, timeout_s)
    findings = assess(facts, required)
    if as_json:
        values = {
            "passed": not findings,
            "findings": [asdict(finding) for finding in findings],
            "not_judged": not_judged(facts, required),
            "facts": asdict(facts),
        }
        print(json.dumps(values, indent=1))
    else:
        show(facts, findings, required)
    return Exit.FAILED if findings else Exit.DONE


@contextmanager
def _connected(config: RunConfig) -> Iterator[None]:
    import ray

    from rayapp.jobs.client import check_answers, ray_address

    if ray.is_initialized():
        yield
        return
    address = ray_address(config)
    check_answers(address)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def not_judged(facts: ClusterFacts, required: Requirements) -> list[str]:
    """Return a line for each measurement that is only reported, with what is needed to judge it."""
    notes = []
    if facts.links and link_mark(facts, required) is None:
        notes.append("links: set cluster.instance or --min_gbit_per_s")
    if facts.all_reduce and busbw_mark(facts, required) is None:
        why = "gloo has no mark" if facts.backend == "gloo" else "set cluster.instance"
        notes.append(f"all-reduce: {why}")
    if len(facts.ranks) < 2:
        notes.append(f"all-reduce and links: {len(facts.ranks)} worker, nothing to measure")
    if facts.model_problem:
        notes.append(f"kernels: {facts.model_problem}")
    return notes


def show(facts: ClusterFacts, findings: list[Finding], required: Requirements) -> None:
    """Print the page; the findings come last, next to the prompt."""
    console = Console()
    size = f"{len(facts.nodes)} nodes, {len(facts.ranks)} workers"
    console.print(f"[bold]preflight[/bold]  {size}, {facts.backend}", highlight=False)
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    console.print(f"driver     {versions}\n", highlight=False, soft_wrap=True)
    for table in _tables(facts):
        console.print(table)
    if (reduced := facts.all_reduce) is not None:
        took = f"{number_of_bytes(reduced.size_bytes)} in {1000 * reduced.seconds:.3g} ms"
        rate = f"busbw {reduced.busbw / 1e9:.3g} GB/s, {reduced.wrong} wrong"
        console.print(f"all-reduce  {took}, {rate}", highlight=False)
    for note in not_judged(facts, required):
        console.print(f"not judged  {note}", highlight=False, soft_wrap=True)
    console.print()
    for finding in findings:
        where = f"[bold]{finding.node}[/bold]"
        console.print(f"[bold red]FAIL[/bold red]  {where}: {finding.what}: ", end="")
        text = f"{finding.measured}, wanted {finding.wanted}. {finding.fix}"
        console.print(text, highlight=False, soft_wrap=True, markup=False)
    passed = "[bold green]all pass[/bold green]"
    console.print(f"\nfindings: {len(findings)}" if findings else passed, highlight=False)


def _tables(facts: ClusterFacts) -> Iterator[Table]:
    nodes = [(node.name, *_node(node)) for node in facts.nodes]
    yield _table("nodes", "node,GPUs,EFA,shm,disk,files,clock,write,read", nodes)
    devices = list[tuple[str, ...]]()
    for rank in facts.ranks:
        speed = rank.speed
        device = speed.device if speed.index is None else f"{speed.index} {speed.device}"
        rates = f"{speed.flops / 1e12:.3g}", f"{speed.memory_bytes_per_s / 1e9:.3g}"
        network = rank.network or facts.backend
        devices.append((facts.node(rank.node).name, device, speed.precision, *rates, network))
    if devices:
        yield _table("devices", "node,device,precision,TFLOP/s,GB/s,by", devices)
    links = list[tuple[str, ...]]()
    for link in facts.links:
        ends = (facts.node(end).name for end in (link.sender, link.receiver))
        links.append((*ends, f"{link.bytes_per_s * 8 / 1e9:.3g}", str(link.pairs)))
    if links:
        yield _table("links", "from,to,Gbit/s,workers", links)


def _table(title: str, columns: str, rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, box=None, pad_edge=False, title_justify="left", title_style="bold")
    for number, column in enumerate(columns.split(",")):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*row)
    return table


def _node(node: NodeReport) -> list[str]:
    seen, clock, probe = node.facts, node.clock, node.probe
    if seen is None:
        return ["no answer"]
    rates = [probe.write_bytes_per_s, probe.read_bytes_per_s] if probe else [None, None]
    return [
        str(len(seen.devices)),
        str(seen.efa_devices),
        number_of_bytes(seen.shared_memory_bytes),
        number_of_bytes(seen.disk_free_bytes),
        f"{seen.open_files:,}",
        f"{1000 * clock.offset_s:+.0f} ± {1000 * clock.error_s:.0f} ms" if clock else "n/a",
        *("n/a" if rate is None else f"{rate / 1e6:.0f} MB/s" for rate in rates),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
