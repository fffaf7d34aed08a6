"""Check which losses are told as spikes, and that the state of a resumed run tells the same."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.train import loop
from rayapp.train.loss_spikes import FEWEST, LEVEL, RECENT, SMALLEST_SPREAD, Spikes


def test_a_noisy_falling_curve_has_no_spike_and_a_jump_is_one() -> None:
    draw, spikes = random.Random(0), Spikes(6.0)
    for step in range(500):
        loss = 8 * math.exp(-step / 120) + 2 + draw.gauss(0, 0.05)
        assert not spikes.is_spike(loss), (step, loss, spikes.threshold())
    assert spikes.is_spike(3.0) and spikes.is_spike(math.nan) and spikes.is_spike(math.inf)
    assert len(spikes.losses) == RECENT and max(spikes.losses) < 2.5  # a spike joins no window
    assert not spikes.is_spike(2.2)


def test_nothing_but_what_is_not_finite_is_a_spike_at_first() -> None:
    spikes = Spikes(1.0)
    for step in range(FEWEST):
        assert not spikes.is_spike(float(step**3))
    assert Spikes(1.0).is_spike(math.nan)


def test_losses_that_hardly_differ_leave_room_for_a_small_step() -> None:
    spikes = Spikes(6.0, [2.0] * RECENT)
    assert not spikes.is_spike(2.01) and spikes.is_spike(2.02)


@pytest.mark.parametrize("cut", [3, FEWEST, 70, 150, 223, 230, 260])
def test_a_resumed_run_decides_as_one_that_was_never_interrupted(cut: int) -> None:
    """Also in the middle of spikes in a row, and soon after a new level."""
    draw = random.Random(1)
    losses = [2 + draw.gauss(0, 0.1) + (3 if draw.random() < 0.05 else 0) for _ in range(220)]
    losses += [4 + draw.gauss(0, 0.1) for _ in range(40)] + [6.0] * 20
    whole = Spikes(4.0)
    expected = [whole.is_spike(loss) for loss in losses]
    first = Spikes(4.0)
    found = [first.is_spike(loss) for loss in losses[:cut]]
    second = Spikes(4.0, list(first.losses), list(first.in_a_row), first.at_level)
    found += [second.is_spike(loss) for loss in losses[cut:]]
    assert found == expected and 2 < sum(expected[:220]) < 30
    assert expected[220:] == [True] * (LEVEL - 1) + [False] * (41 - LEVEL) + [True] * 20


# ---- Drawn sequences of losses -----------------------------------------------------------------

FEW = settings(deadline=None, max_examples=25)
SEEDS, LEVELS = st.integers(0, 2**32), st.floats(0.5, 12.0)
NOISES = st.floats(0.0, 0.1)  # of the level
# In standard deviations, or in what counts as one where losses hardly differ.
JUMPS = st.floats(12.0, 1000.0)


def noisy(draw: random.Random, level: float, spread: float, count: int) -> list[float]:
    """Losses around a level, none of them a spike by chance."""
    return [level + spread * max(-3.0, min(3.0, draw.gauss(0, 1))) for _ in range(count)]


def unit_of(level: float, noise: float) -> float:
    return level * max(noise, SMALLEST_SPREAD)


@FEW
@given(SEEDS, LEVELS, NOISES, JUMPS, st.lists(st.integers(1, LEVEL - 1), max_size=4), st.booleans())
def test_spikes_that_do_not_last_are_skipped_and_nothing_else_is(
    seed: int, level: float, noise: float, jump: float, runs: list[int], finite: bool
) -> None:
    draw, spikes = random.Random(seed), Spikes(6.0)
    assert not any(map(spikes.is_spike, noisy(draw, level, level * noise, RECENT)))
    for length in runs:
        for _ in range(length):
            high = level + (jump + 6 * draw.random()) * unit_of(level, noise)
            assert spikes.is_spike(high if finite else math.nan)
        assert not any(map(spikes.is_spike, noisy(draw, level, level * noise, 20)))


@FEW
@given(SEEDS, LEVELS, NOISES, JUMPS)
def test_a_level_that_lasts_is_taken_after_a_few_skips(
    seed: int, level: float, noise: float, jump: float
) -> None:
    """The spread of the losses stays, so that the next spike is seen at once."""
    draw, spikes = random.Random(seed), Spikes(6.0)
    assert not any(map(spikes.is_spike, noisy(draw, level, level * noise, RECENT)))
    risen = level + jump * unit_of(level, noise)
    later = noisy(draw, risen, level * noise / 2, 70)
    found = list(map(spikes.is_spike, later))
    assert found == [True] * (LEVEL - 1) + [False] * (71 - LEVEL)
    assert spikes.is_spike(2 * risen)


@FEW
@given(SEEDS, LEVELS, NOISES, st.floats(2.0, 10.0))
def test_a_run_that_diverges_is_not_taken_for_a_new_level_again_and_again(
    seed: int, level: float, noise: float, growth: float
) -> None:
    """Its loss grows with each update, and stays where it is while steps are skipped."""
    draw, spikes = random.Random(seed), Spikes(6.0)
    assert not any(map(spikes.is_spike, noisy(draw, level, level * noise, RECENT)))
    at, skips, steps = level + 12 * unit_of(level, noise), 0, 0
    while skips < loop.MAX_SKIPS:
        (loss,), steps = noisy(draw, at, level * noise / 2, 1), steps + 1
        if spikes.is_spike(loss):
            skips += 1
        else:
            skips, at = 0, at * growth
        assert steps < 200 and at < 1e9


@FEW
@given(SEEDS, LEVELS, NOISES)
def test_losses_that_rise_while_nothing_is_learned_are_no_level(
    seed: int, level: float, noise: float
) -> None:
    draw, spikes = random.Random(seed), Spikes(6.0)
    assert not any(map(spikes.is_spike, noisy(draw, level, level * noise, RECENT)))
    unit = unit_of(level, noise)
    assert all(spikes.is_spike(level + (12 + 2 * rise) * unit) for rise in range(loop.MAX_SKIPS))
    assert all(spikes.is_spike(bad) for bad in [math.nan, math.inf, -math.inf] * 30)
