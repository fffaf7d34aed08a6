"""What makes an answer right, and the intervals of figures."""

from __future__ import annotations

import numpy as np
import pytest

from rayapp.finetune.scores import estimate, estimated_loss, is_right

CASES = [
    ("exact", " yes\n", "yes", True),
    ("exact", "Yes", "yes", False),
    ("normalised", "The Eiffel  Tower.", "eiffel tower", True),
    ("normalised", "Eiffel", "eiffel tower", False),
    ("number", "3 + 4 = 7, so 1,024 of them.", "#### 1024", True),
    ("number", "about -2.50", "-2.5", True),
    ("number", "7 of 8", "7", False),
    ("number", "none", "7", False),
    ("json", '{"b": 2, "a": [1]}', '{"a": [1], "b": 2.0}', True),
    ("json", 'Here:\n```json\n{"a": 1}\n```\n', '{"a": 1}', True),
    ("json", '{"a": 1}, and more', '{"a": 1}', False),
    ("json", "[" * 100_000, "[]", False),
    ("regex", "It is Paris, France.", r"\bParis\b", True),
    ("regex", "Parisian", r"\bParis\b", False),
]


@pytest.mark.parametrize(("score", "answer", "wanted", "right"), CASES)
def test_an_answer_is_right_or_not(score: str, answer: str, wanted: str, right: bool) -> None:
    assert is_right(score, answer, wanted) is right


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    # Source: statsmodels.stats.proportion.proportion_confint(count, of, method="wilson")
    [(0, 64, 0.0, 0.0566), (50, 64, 0.6657, 0.8644), (64, 64, 0.9434, 1.0), (1, 1, 0.2065, 1.0)],
)
def test_a_share_has_the_interval_of_wilson(count: int, of: int, low: float, high: float) -> None:
    found = estimate([True] * count + [False] * (of - count))
    assert found["value"] == count / of
    assert [found["low"], found["high"]] == pytest.approx([low, high], abs=1e-3)


def test_a_loss_has_an_interval_that_holds_the_mean_about_as_often_as_it_says() -> None:
    """Of 200 draws of 40 items from one distribution, 95 % within the binomial's bounds."""
    rng, held = np.random.default_rng(1), 0
    for _ in range(200):
        tokens = rng.integers(5, 30, 40)
        nats = rng.gamma(2.0, 0.75, 40) * tokens
        found = estimated_loss(nats.tolist(), tokens.tolist())
        assert found["value"] == pytest.approx(nats.sum() / tokens.sum())
        held += found["low"] <= 1.5 <= found["high"]
    assert 175 <= held <= 200
