"""Check which losses are told as spikes, and that the state of a resumed run tells the same."""

from __future__ import annotations

import math
import random

import pytest

from rayapp.train.loss_spikes import FEWEST, WINDOW, Spikes


def test_a_noisy_falling_curve_has_no_spike_and_a_jump_is_one() -> None:
    draw, spikes = random.Random(0), Spikes(6.0)
    for step in range(500):
        loss = 8 * math.exp(-step / 120) + 2 + draw.gauss(0, 0.05)
        assert not spikes.is_spike(loss), (step, loss, spikes.threshold())
    assert spikes.is_spike(3.0) and spikes.is_spike(math.nan) and spikes.is_spike(math.inf)
    assert len(spikes.losses) == WINDOW and max(spikes.losses) < 2.5  # a spike joins no window
    assert not spikes.is_spike(2.2)


def test_nothing_but_what_is_not_finite_is_a_spike_at_first() -> None:
    spikes = Spikes(1.0)
    for step in range(FEWEST):
        assert not spikes.is_spike(float(step**3))
    assert Spikes(1.0).is_spike(math.nan)


def test_losses_that_hardly_differ_leave_room_for_a_small_step() -> None:
    spikes = Spikes(6.0, [2.0] * WINDOW)
    assert not spikes.is_spike(2.01) and spikes.is_spike(2.02)


@pytest.mark.parametrize("cut", [3, FEWEST, 70, 150])
def test_a_resumed_run_decides_as_one_that_was_never_interrupted(cut: int) -> None:
    draw = random.Random(1)
    losses = [2 + draw.gauss(0, 0.1) + (3 if draw.random() < 0.05 else 0) for _ in range(200)]
    whole = Spikes(4.0)
    expected = [whole.is_spike(loss) for loss in losses]
    first = Spikes(4.0)
    found = [first.is_spike(loss) for loss in losses[:cut]]
    second = Spikes(4.0, list(first.losses))
    found += [second.is_spike(loss) for loss in losses[cut:]]
    assert found == expected and 2 < sum(expected) < 30
