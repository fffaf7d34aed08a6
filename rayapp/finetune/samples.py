"""Continue prompts with the model as it is, on all ranks together.

    texts = generated(parts, ids, device, control, 32)                      # the likeliest tokens
    texts = generated(parts, ids, device, control, 64, stops={2}, seed=1)   # drawn tokens

transformers' generate runs with its cache of keys and values. Where the whole weights fit beside
what a rank holds, they are gathered once, and the ranks share the groups of prompts. Elsewhere
every rank computes every group, and each block is gathered for each token. The prompts of a group
are the same at any number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationConfig, LogitsProcessor

from rayapp.finetune.model_parts import Parts
from rayapp.model.attention import cached_attention
from rayapp.model.sharding import held
from rayapp.train.loop import Interrupted
from rayapp.train.step_sync import CONTINUE

AT_EVALUATION, AT_END = 32, 64  # tokens of a sample
TEMPERATURE = 0.8  # of drawn tokens


@torch.no_grad()
def generated(
    parts: Parts,
    ids: Sequence[Sequence[int]],
    device: torch.device,
    control: dist.ProcessGroup,
    num_tokens: int,
    *,
    stops: Collection[int] = (),
    seed: int | None = None,
    leave: Callable[[], int] = lambda: CONTINUE,
    room: int = 4096,
) -> list[str]:
    """Return the text behind each prompt: the likeliest tokens, or with a seed drawn ones.

    A token of `stops` ends a text, and is no part of it. PyTorch's own random state is not used.
    `room` is the most tokens of a forward pass of several prompts.

    Raises:
        Interrupted: `leave`, which all ranks call before each token, does not answer CONTINUE.
    """
    lm = parts.lm
    limit = getattr(lm.hf.config.get_text_config(), "max_position_embeddings", None) or 2**30
    ends = [min(len(each) + num_tokens, limit) for each in ids]
    rank, world, dealt = dist.get_rank(), dist.get_world_size(), _fits(parts, device, control)
    groups, mine = _groups(ids, ends, room), dict[int, list[int]]()
    lm.eval()
    try:
        with (
            torch.compiler.set_stance("force_eager"),  # no compilation for rows of this length
            cached_attention(lm.hf),
            held(lm, dealt),
        ):
            _run_token(parts, device)  # what it gathers is held from then on
            for first in range(0, len(groups), world if dealt else 1):
                place = first + (rank if dealt else 0)
                group = groups[place] if place < len(groups) else []
                rows = [ids[row] for row in group]
                count = ends[group[0]] - len(rows[0]) if group else 0
                seeds = None if seed is None else [(seed, row) for row in group]
                chooser = _Chooser(len(rows), count, control, seeds, stops, leave, dealt)
                if group:
                    _generate(parts, rows, device, chooser)
                while chooser.others:
                    chooser.step(None)
                mine |= zip(group, chooser.added, strict=True)
            # In a backward pass FSDP gathers ahead what ran before: the same on all ranks.
            _run_token(parts, device)
    finally:
        lm.train()
    every: list[dict[int, list[int]]] = [{} for _ in range(world)]
    dist.all_gather_object(every, mine, group=control)
    added = {row: tokens for part in every for row, tokens in part.items()}
    # An id of `stops` may not be special.
    said = [[t for t in added.get(row, ()) if t not in stops] for row in range(len(ids))]
    return [str(parts.tokenizer.decode(each, skip_special_tokens=True)) for each in said]


def _fits(parts: Parts, device: torch.device, control: dist.ProcessGroup) -> bool:
    """Return whether the whole weights take at most half of the free memory, on every rank."""
    from ray._private.utils import estimate_available_memory  # within a container's limit

    needed = sum(p.numel() * p.element_size() for p in parts.lm.parameters())
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = estimate_available_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    fits = torch.tensor(int(needed <= free // 2))
    dist.all_reduce(fits, dist.ReduceOp.MIN, group=control)
    return bool(fits)


def _run_token(parts: Parts, device: torch.device) -> None:
    """Run one token through the model, on all ranks."""
    one = torch.zeros(1, 1, dtype=torch.long, device=device)
    parts.head.whole = True
    try:
        parts.lm(one, one)
    finally:
        parts.head.whole = False


def _generate(
    parts: Parts, ids: Sequence[Sequence[int]], device: torch.device, chooser: _Chooser
) -> None:
    """Run transformers' generate on prompts, padded on the left, until all have ended."""
    longest = max(map(len, ids))
    rows = [[0] * (longest - len(each)) + list(each) for each in ids]
    masks = [[0] * (longest - len(each)) + [1] * len(each) for each in ids]
    hf: Any = parts.lm.hf
    hf.generate(
        torch.tensor(rows, device=device),
        attention_mask=torch.tensor(masks, device=device),
        generation_config=GenerationConfig(
            max_new_tokens=chooser.count,
            do_sample=False,
            # Without any, transformers would take those of the config: an id that no token has.
            eos_token_id=sorted(chooser.stops) or [hf.config.get_text_config().vocab_size],
            pad_token_id=0,
        ),
        logits_processor=[chooser],
        synced_gpus=False,  # the chooser keeps the ranks together
    )


def _groups(ids: Sequence[Sequence[int]], ends: Sequence[int], room: int) -> list[list[int]]:
    """Return the places of prompts whose rows together are at most `room` tokens, or of one prompt.

    The shortest prompts come first. All of a group are continued by the same number of tokens. A
    prompt that is empty, or as long as the model's limit, has no continuation.
    """
    places = [place for place, each in enumerate(ids) if 0 < len(each) < ends[place]]
    places.sort(key=lambda place: len(ids[place]))

    def groups_of(most: int) -> list[list[int]]:
        groups: list[list[int]] = []
        for place in places:
            size, more = (len(groups[-1]), ends[groups[-1][0]]) if groups else (most, 0)
            same = groups and more - len(ids[groups[-1][0]]) == ends[place] - len(ids[place])
            if size == most or not same or (size + 1) * ends[place] > room:
                groups.append([])
            groups[-1].append(place)
        return groups

    fewest = len(groups_of(len(ids) + 1))
    return groups_of(-(-len(places) // max(fewest, 1)))  # about equal, so that ranks wait less


class _Chooser(LogitsProcessor):
    """Choose the next tokens of a group's rows, in step with the other ranks.

    Where groups are `dealt`, each rank has one of its own; else all ranks have the same, and rank 0
    chooses.
    """

    def __init__(
        self,
        rows: int,
        count: int,
        control: dist.ProcessGroup,
        seeds: Sequence[tuple[int, int]] | None,
        stops: Collection[int],
        leave: Callable[[], int],
        dealt: bool,
    ) -> None:
        self.count, self.control, self.stops, self.leave = count, control, stops, leave
        self.dealt = self.others = dealt
        """`others`: whether a rank's rows go on."""
        self.generators = None if seeds is None else [_generator(*each) for each in seeds]
        self.added: list[list[int]] = [[] for _ in range(rows)]
        self.going = set(range(rows))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [rows, V] of which the chosen tokens have the highest."""
        chosen = self.step(scores).to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)

    def step(self, scores: torch.Tensor | None) -> torch.Tensor:
        """Choose by scores [rows, V], None of a rank whose rows have ended; return tokens [rows].

        Raises: Interrupted.
        """
        if code := self.leave():
            raise Interrupted(code)
        chosen = torch.zeros(len(self.added), dtype=torch.long)
        if scores is not None and (self.dealt or dist.get_rank() == 0):
            chosen = _choose(scores.float().cpu(), self.generators)
        if not self.dealt:
            dist.broadcast(chosen, src=0, group=self.control)
        for row, token in enumerate(chosen.tolist()):
            if row in self.going:
                self.added[row].append(token)
                if token in self.stops or len(self.added[row]) == self.count:
                    self.going.discard(row)
        if self.dealt:
            going = torch.tensor(len(self.going))
            dist.all_reduce(going, dist.ReduceOp.MAX, group=self.control)
            self.others = bool(going)
        return chosen


def _generator(seed: int, row: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + row)


def _choose(logits: torch.Tensor, generators: Sequence[torch.Generator] | None) -> torch.Tensor:
    """Return a token for each row of logits [rows, V], by the row's own generator if there are."""
    if generators is None:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits / TEMPERATURE, -1)
    drawn = [
        torch.multinomial(row, 1, generator=generator)
        for row, generator in zip(probabilities, generators, strict=True)
    ]
    return torch.cat(drawn)
