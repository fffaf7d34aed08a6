"""Preference objectives over packed pairs of a chosen and a rejected answer, or labelled answers.

    loss = PreferenceLoss("dpo", beta=0.1)
    objective, shown, figures = loss(hidden, weight, labels, answers=answers, reference=reference)
    (objective / pairs_of_the_whole_global_batch).backward()

Of a pair, let c and r be the log-probabilities of the chosen and of the rejected answer, sums over
their tokens, each less that of the reference model where the objective has one; C and R are the
means over tokens. The loss of a pair is

    dpo    -log sigmoid(beta (c - r))                    Rafailov et al. 2023, arXiv 2305.18290
    ipo    (C - R - 1 / (2 beta))^2                      Azar et al. 2023, arXiv 2310.12036
    simpo  -log sigmoid(beta (C - R) - margin)           Meng et al. 2024, arXiv 2405.14734
    orpo   -C - beta log sigmoid(odds(C) - odds(R))      Hong et al. 2024, arXiv 2403.07691

with odds(x) = x - log(1 - e^x). `sft_weight` times -C, without a reference, can be added to each.

Of an answer that is good or bad, let a be c or r, and kl the mean of a over the batch's prompts
with answers to others of them, at least 0, without gradient. Its loss is

    kto    1 - sigmoid(beta (a - kl)), of bad ones w (1 - sigmoid(beta (kl - a)))
                                                         Ethayarajh et al. 2024, arXiv 2402.01306
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, logsigmoid
from torch.utils.checkpoint import checkpoint

from rayapp.config.fields import ACCURACIES, KL, MARGINS, PairObjective
from rayapp.model.build import answer_sums

CHOSEN, REJECTED = "chosen", "rejected"


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of pairs, summed."""

    objective: PairObjective
    beta: float
    margin: float = 0.0
    sft_weight: float = 0.0
    label_smoothing: float = 0.0
    """Share of pairs, 0-1, that are taken to be the wrong way round (dpo and simpo)."""
    undesirable_weight: float = 1.0
    chunk: int = 4096
    """Labels whose logits exist at once; 0: all."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        labels: Tensor,
        bias: Tensor | None = None,
        *,
        answers: Tensor,
        reference: Tensor | None = None,
        each: Tensor | None = None,
        desirable: Tensor | None = None,
        kl: float = 0.0,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return (objective, the same detached, figures by TRL's names): sums over pairs, fp32.

        Shapes: hidden [labels, H], weight [V, H], labels [labels], none of them IGNORE, bias [V];
        without a weight, `hidden` holds the logits [labels, V]. `answers`, int64 [2 pairs], are the
        numbers of labels of each chosen and rejected answer in turn; `reference`, fp32 [2 pairs],
        are the sums of their log-probabilities by the reference. `each`, zeros fp32 [labels], is
        filled with the pairs' losses, each at the first label of its chosen answer.

        Of kto, the sums are over the answers, `answers` is [answers], and `desirable` [labels] is 1
        at the labels of good ones, else 0. `means` divides the figures.
        """
        log_p = answer_sums(-self._losses(hidden, weight, labels, bias), answers)
        given = torch.zeros_like(log_p) if reference is None else reference
        if self.objective == "kto":
            assert desirable is not None, "labelled answers have a column"
            firsts = answers.cumsum(0) - answers
            losses, figures = self._of_answers(log_p, given, desirable[firsts] > 0, kl)
            if each is not None:
                each[firsts] = losses.detach().float()
            return losses.sum(), losses.detach().sum(), figures
        gains = (log_p - given).view(-1, 2)  # [pairs, 2]
        lengths = answers.view(-1, 2)
        losses, rewards = self._of_pairs(gains, lengths)
        nll = -(log_p.view(-1, 2) / lengths)[:, 0]
        if self.objective == "orpo" or self.sft_weight:
            losses = losses + (1.0 if self.objective == "orpo" else self.sft_weight) * nll
        if each is not None:
            each[(answers.cumsum(0) - answers)[::2]] = losses.detach().float()
        total = losses.sum()
        figures = dict(_figures(log_p.detach().view(-1, 2), rewards.detach(), nll.detach()))
        return total, total.detach(), figures

    def _of_answers(
        self, log_p: Tensor, given: Tensor, good: Tensor, kl: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return each labelled answer's loss [answers], and the sums of the figures."""
        rewards = self.beta * (log_p - given)
        apart = (rewards - self.beta * kl) * torch.where(good, 1.0, -1.0)
        losses = torch.sigmoid(-apart) * torch.where(good, 1.0, self.undesirable_weight)
        right = (apart.detach() > 0).float().sum()
        figures = {ACCURACIES: right, KL: torch.full_like(right, kl * len(log_p))}
        for mine, name in ((good, CHOSEN), (~good, REJECTED)):
            figures[name] = mine.float().sum()
            figures[f"rewards/{name}"] = (rewards.detach() * mine).sum()
            figures[f"logps/{name}"] = (log_p.detach() * mine).sum()
        return losses, figures

    def _losses(
        self, hidden: Tensor, weight: Tensor | None, labels: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return the cross-entropy of each label, fp32 [labels].

        The backward pass computes the logits of each chunk again, so that those of one exist.
        """

        def of_chunk(part: Tensor, wanted: Tensor) -> Tensor:
            logits = part if weight is None else linear(part, weight, bias)
            return cross_entropy(logits.float(), wanted, reduction="none")

        size = self.chunk or max(len(labels), 1)
        parts = [
            checkpoint(of_chunk, *two, use_reentrant=False, preserve_rng_state=False)
            for two in zip(hidden.split(size), labels.split(size), strict=True)
        ]
        return torch.cat(parts)

    def _of_pairs(self, gains: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return each pair's loss [pairs], and the rewards of its two answers [pairs, 2]."""
        means = gains / lengths
        match self.objective:
            case "dpo":
                return self._sigmoid(self.beta * (gains[:, 0] - gains[:, 1])), self.beta * gains
            case "ipo":
                apart = means[:, 0] - means[:, 1] - 1 / (2 * self.beta)
                return apart**2, self.beta * gains
            case "simpo":
                apart = self.beta * (means[:, 0] - means[:, 1]) - self.margin
                return self._sigmoid(apart), self.beta * means
            case "orpo":
                odds = means - torch.log(-torch.expm1(means))
                return -self.beta * logsigmoid(odds[:, 0] - odds[:, 1]), self.beta * means
            case "kto":
                raise AssertionError("kto has no pairs")
            case _:
                assert_never(self.objective)

    def _sigmoid(self, apart: Tensor) -> Tensor:
        wrong = self.label_smoothing
        return -(1 - wrong) * logsigmoid(apart) - wrong * logsigmoid(-apart)


def means(sums: Mapping[str, float], weight: float) -> dict[str, float]:
    """Divide the sums of figures over a batch by its pairs or answers.

    Those of good and of bad answers, whose numbers are figures too, are divided by these numbers;
    they are left out where there is none.
    """
    counts = {name: sums[name] for name in (CHOSEN, REJECTED) if name in sums}
    found = {}
    for name, value in sums.items():
        count = counts.get(name.rpartition("/")[2], weight)
        if name not in counts and count:
            found[name] = value / count
    if counts and all(counts.values()):
        found[MARGINS] = found[f"rewards/{CHOSEN}"] - found[f"rewards/{REJECTED}"]
    return found


def _figures(log_p: Tensor, rewards: Tensor, nll: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the sums over pairs of what TRL reports the means of."""
    yield ACCURACIES, (rewards[:, 0] > rewards[:, 1]).float().sum()
    yield MARGINS, (rewards[:, 0] - rewards[:, 1]).sum()
    for place, name in enumerate((CHOSEN, REJECTED)):
        yield f"rewards/{name}", rewards[:, place].sum()
        yield f"logps/{name}", log_p[:, place].sum()
    yield "nll_loss", nll.sum()
