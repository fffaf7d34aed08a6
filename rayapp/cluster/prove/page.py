"""The page of a proof: what was tried, whether it held, and how long it took.

    page = text(proof)      # Markdown

As a file it has no account number, so that it can be sent to others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "not run"


@dataclass
class Step:
    """A row of the page."""

    name: str
    result: str = NOT_RUN
    seconds: float | None = None
    seen: str = ""
    """What was seen; of a failure, why."""


@dataclass
class ProofPage:
    """What a page tells."""

    title: str
    facts: dict[str, str]
    """Versions, machines, date and cost, in order."""
    steps: list[Step] = field(default_factory=list)
    by_hand: list[str] = field(default_factory=list)
    """Commands and names of things to remove; empty if nothing is left."""

    @property
    def result(self) -> str:
        """PASS if every step has passed."""
        return PASS if all(step.result == PASS for step in self.steps) else FAIL


def text(outcome: ProofPage, masked: bool = True) -> str:
    """Return the page as Markdown; `masked` puts ACCOUNT where it has an account number."""
    lines = [f"# {outcome.title}: {outcome.result}", ""]
    lines += [f"- {name}: {value}" for name, value in outcome.facts.items()]
    lines += ["", "| step | result | seconds | what was seen |", "|---|---|---|---|"]
    for step in outcome.steps:
        seconds = "" if step.seconds is None else f"{step.seconds:.0f}"
        seen = " ".join(step.seen.split()).replace("|", "\\|")
        lines.append(f"| {step.name} | {step.result} | {seconds} | {seen} |")
    if outcome.by_hand:
        lines += ["", "## To remove by hand", "", "These may cost money until they are gone.", ""]
        lines += [f"- `{each}`" for each in outcome.by_hand]
    whole = "\n".join(lines) + "\n"
    return re.sub(r"\b\d{12}\b", "ACCOUNT", whole) if masked else whole
