"""Score answers, and give a figure its interval.

is_right("json", '{"a": 1}', '{ "a": 1.0 }')
estimate([True, True, False])
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rayapp.observe.records import Estimate

Z = 1.96  # of an interval of 95 %
RESAMPLES = 2000
TOLERANCE = 1e-6  # of numbers, relative
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|-?\.\d+")
FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def is_right(score: str, answer: str, wanted: str) -> bool:
    """Say whether an answer is right by one of eval.tasks' scores.

    >>> is_right("number", "So it is 1,024.", "2 ** 10 = 1024"), is_right("exact", "a", "b")
    (True, False)
    """
    return RIGHT[score](answer, wanted)


def _exact(answer: str, wanted: str) -> bool:
    return answer.strip() == wanted.strip()


def _normalised(answer: str, wanted: str) -> bool:
    """As the evaluation of SQuAD compares: no case, punctuation, articles or spaces."""

    def words(text: str) -> list[str]:
        return ARTICLES.sub(" ", text.casefold().translate(PUNCTUATION)).split()

    return words(answer) == words(wanted)


def _number(answer: str, wanted: str) -> bool:
    """Compare the last numbers, as the evaluation of GSM8K does."""
    found = [NUMBER.findall(text)[-1:] for text in (answer, wanted)]
    if not all(found):
        return False
    mine, other = (float(numbers[0].replace(",", "")) for numbers in found)
    return math.isclose(mine, other, rel_tol=TOLERANCE)


def _json(answer: str, wanted: str) -> bool:
    """Compare values; an answer may have them in a fenced block."""
    fenced = FENCE.search(answer)
    try:
        return bool(json.loads(fenced[1] if fenced else answer) == json.loads(wanted))
    except (ValueError, RecursionError):
        return False


def _regex(answer: str, wanted: str) -> bool:
    return re.search(wanted, answer) is not None


RIGHT: Mapping[str, Callable[[str, str], bool]] = {
    "exact": _exact,
    "normalised": _normalised,
    "number": _number,
    "json": _json,
    "regex": _regex,
}


def estimate(right: Sequence[bool]) -> Estimate:
    """Return the share of right answers with Wilson's interval of 95 %.

    >>> estimate([True] * 9 + [False])
    {'value': 0.9, 'low': 0.596, 'high': 0.982}
    """
    n, share = len(right), sum(right) / len(right)
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return {"value": share, "low": round(low, 3), "high": round(high, 3)}


def estimated_loss(nats: Sequence[float], tokens: Sequence[int]) -> Estimate:
    """Return the mean loss in nats per token with an interval of 95 %, by a bootstrap of items."""
    sums = np.array([nats, tokens], np.float64)  # [2, items]
    drawn = np.random.default_rng(0).integers(len(nats), size=(RESAMPLES, len(nats)))
    losses, counts = sums[:, drawn].sum(-1)  # [resamples] each
    low, high = np.percentile(losses / np.maximum(counts, 1), [2.5, 97.5]).tolist()
    return {"value": sum(nats) / max(sum(tokens), 1), "low": low, "high": high}
