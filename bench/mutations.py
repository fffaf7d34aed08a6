"""Which faults the tests find: faults are put back one at a time, and a test must fail on each.

    python bench/mutations.py [NAME ...] [--list]

Each fault is put into a copy of this checkout, and the tests that belong to its file run there, up
to the first that fails. The same tests first run on the copy without a fault, and must pass. They
are fast ones, as in `make test`. A run that takes LONGER times as long as without a fault hangs,
which counts as found. The exit code is 1 if a fault is not found.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from mutated import NO_END, PASSED, Mutation, Verdict, copy_of_checkout, tested, tried
from mutations_of_checkpoints import CHECKPOINTS
from mutations_of_driver import DRIVER
from mutations_of_reference import REFERENCE
from mutations_of_rows import ROWS
from mutations_of_training import TRAINING

MUTATIONS = (*TRAINING, *CHECKPOINTS, *ROWS, *DRIVER, *REFERENCE)
WIDTH = max(len(mutation.name) for mutation in MUTATIONS) + 2
LEAST_S, LONGER = 60.0, 4.0
BASELINE_S = 1200.0
SHOWN = 3000  # characters of output, of a run that went wrong


def chosen(names: list[str]) -> list[Mutation]:
    """Return the mutations of these names, all if there are none; exit if one cannot be made."""
    known = {mutation.name: mutation for mutation in MUTATIONS}
    problems = [f"there is no mutation {name}" for name in names if name not in known]
    if len(known) < len(MUTATIONS):
        problems.append("two mutations have one name")
    wanted = [known[name] for name in names if name in known] if names else list(MUTATIONS)
    problems += [problem for mutation in wanted if (problem := mutation.problem())]
    if problems:
        sys.exit("\n".join(problems))
    return wanted


def limits(tree: Path, mutations: list[Mutation]) -> dict[str, float]:
    """Run each selection of tests on the tree without a fault; return how long it may take."""
    found: dict[str, float] = {}
    for tests in dict.fromkeys(mutation.tests for mutation in mutations):
        verdict = tested(tree, tests, BASELINE_S)
        print(f"without a fault: {verdict.end} in {verdict.seconds:.0f} s: {tests}", flush=True)
        if verdict.end != PASSED:
            sys.exit(verdict.output[-SHOWN:])
        found[tests] = max(LEAST_S, LONGER * verdict.seconds)
    return found


def said(verdict: Verdict) -> str:
    """Say what found a fault."""
    if verdict.end == NO_END:
        return f"time-out {verdict.test}".strip()
    return verdict.test if verdict.killed else f"SURVIVED ({verdict.end})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutations; by default all")
    parser.add_argument("--list", action="store_true", help="print names and files, run nothing")
    options = parser.parse_args()
    mutations = chosen(options.names)
    if options.list:
        print("\n".join(f"{mutation.name:{WIDTH}}{mutation.file}" for mutation in mutations))
        return
    survivors = []
    with tempfile.TemporaryDirectory(prefix="m-", ignore_cleanup_errors=True) as folder:
        tree = copy_of_checkout(Path(folder) / "w")
        limit_of = limits(tree, mutations)
        print(f"\n{'fault':{WIDTH}}{'file':40}{'seconds':>7}  found by")
        for mutation in mutations:
            verdict = tried(tree, mutation, limit_of[mutation.tests])
            took = f"{verdict.seconds:7.0f}"
            print(f"{mutation.name:{WIDTH}}{mutation.file:40}{took}  {said(verdict)}", flush=True)
            if not verdict.killed:
                survivors.append(mutation.name)
                if verdict.end != PASSED:
                    print(verdict.output[-SHOWN:], flush=True)
    print(f"\n{len(mutations) - len(survivors)} of {len(mutations)} faults found")
    if survivors:
        sys.exit(f"not found: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
