"""The divergence term of KTO, by which the rows of labelled answers become those of training.

    kto = Kto(lm)
    engine.ready = partial(kto.ready, engine)        # before each step, on all ranks

A row holds, in turn, a prompt with its own answer and the same prompt with the answer to another
one. The second documents give the divergence of the policy from the reference, without gradient;
training and evaluation then run on the first documents alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rayapp.data.token_rows import StepRows
from rayapp.model import LanguageModel
from rayapp.model.build import Switch
from rayapp.train import loop
from rayapp.train.engine import Engine, inputs


class Kto:
    """The model and its reference, on one rank."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm, self.reference = lm, lm.as_reference

    @torch.no_grad()
    def ready(self, engine: Engine, batch: StepRows) -> StepRows:
        """Return the step's own answers, with their reference and the step's divergence."""
        policy = self._sums(engine, batch.alone(1), nullcontext)
        if self.reference is not None:
            batch = replace(batch, reference=self._sums(engine, batch, self.reference))
        assert batch.reference is not None, "the batch or the model has the reference"
        gaps = policy - batch.reference[..., 1::2][..., : policy.shape[-1]]
        found = torch.tensor([gaps.sum(dtype=np.float64), batch.weights().sum()])
        dist.all_reduce(found, group=engine.control)
        total, count = found.tolist()
        return replace(batch, kl=max(0.0, total / max(count, 1.0))).alone(0)

    def _sums(self, engine: Engine, batch: StepRows, switch: Switch) -> np.ndarray[Any, Any]:
        """Return the log-probability of each answer, fp32 [m, b, documents], 0 where is none."""
        counts = batch.segments.max(-1, initial=0)  # [m, b]
        held = np.arange(counts.max(initial=0)) < counts[..., None]
        sums = np.zeros(held.shape, np.float32)
        for i in range(len(held)):
            with self.lm.answers_alone(switch):
                sums[i][held[i]] = engine.model(**inputs(batch, i, engine.device))[2].cpu().numpy()
        return sums

    def held_out(
        self, engine: Engine, batches: Callable[[], Iterable[StepRows]]
    ) -> Iterator[StepRows]:
        """Return the held-out answers with the divergence over all of them.

        Raises:
            loop.Interrupted: the ranks leave.
        """

        def measure(batch: StepRows, i: int, output: tuple[torch.Tensor, ...]) -> dict[str, float]:
            known = 0.0 if batch.reference is None else float(batch.reference[i].sum())
            count = float(batch.weights()[i].sum())
            return {"sum": float(output[2].sum()), "known": known, "count": count}

        def summed(switch: Switch) -> dict[str, float]:
            others = (batch.alone(1) for batch in batches())
            with self.lm.answers_alone(switch):
                return loop.evaluate(engine, others, measure, "computing the divergence")

        policy = summed(nullcontext)
        given = policy["known"] if self.reference is None else summed(self.reference)["sum"]
        kl = max(0.0, (policy["sum"] - given) / max(policy["count"], 1.0))
        return (replace(batch, kl=kl).alone(0) for batch in batches())
