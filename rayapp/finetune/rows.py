"""Stream the rows of a language model to the ranks. Imports no torch (see rayapp.train.spec)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rayapp.train.spec import LanguageSpec

if TYPE_CHECKING:
    from rayapp.data.stream import Shard, Stream
    from rayapp.data.token_rows import StepRows


def stream(spec: LanguageSpec, first_step: int, world: int) -> Stream:
    """Return the rows from `first_step` on, for `world` workers."""
    from rayapp.data import stream

    return stream.stream(spec.data, spec.order, first_step, world, spec.config.data.workers)


def steps(spec: LanguageSpec, shard: Shard, world: int) -> Iterator[StepRows]:
    """Yield a rank's batch of each step from its part of the stream."""
    from rayapp.data import stream

    order = spec.order
    count = order.num_micro_batches(world)
    return stream.steps(shard, order.micro_batch, count, order.source_ends)
