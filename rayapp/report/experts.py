"""The table of a mixture's experts: how evenly each layer gave them its tokens."""

from __future__ import annotations

from rayapp.observe import words
from rayapp.report.folder import ReportedRun

HEAD = ["layer", "busiest", "its share", "over the mean", "without tokens", "share of each expert"]
BARS = "▁▂▃▄▅▆▇█"


def balance(run: ReportedRun) -> list[list[str]]:
    """Return a row for each layer, as HEAD names its cells; empty without experts.

    The tokens are those of the last attempt, counted at its end.
    """
    return [layer(number, tokens) for number, tokens in enumerate(run.result.get("experts") or ())]


def layer(number: int, tokens: list[int]) -> list[str]:
    """Return the cells of a layer whose experts were given so many tokens.

    >>> layer(0, [10, 30, 0, 40])
    ['0', 'expert 3', '50 %', '2.00', '1 of 4', '▂▆ █']
    """
    whole, most = max(sum(tokens), 1), max(tokens)
    bars = (BARS[(8 * count - 1) // most] if count else " " for count in tokens)
    return [
        str(number),
        f"expert {tokens.index(most)}",
        words.share(most / whole),
        words.fixed(len(tokens) * most / whole, 2),
        f"{tokens.count(0)} of {len(tokens)}",
        "".join(bars),
    ]
