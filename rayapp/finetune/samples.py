"""Continue the prompts of a run with the model as it is, on all ranks together.

    texts = continued(parts, prompts, device, control, 32)              # the likeliest tokens
    texts = continued(parts, prompts, device, control, 64, seed=1)      # drawn tokens

There is no cache of keys and values: each token is one forward pass of all prompts that fit into
the tokens of a micro-batch. Rows have their final length from the start, since kernels on CPUs keep
code for each length; what lies behind a token cannot affect it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.distributed as dist

from rayapp.finetune.build import Parts
from rayapp.observe.records import Sample
from rayapp.train.loop import Interrupted
from rayapp.train.step_sync import STAY

AT_EVALUATION, AT_END = 32, 64  # tokens of a sample
TEMPERATURE = 0.8  # of drawn tokens


@torch.no_grad()
def continued(
    parts: Parts,
    prompts: Sequence[str],
    device: torch.device,
    control: dist.ProcessGroup,
    num_tokens: int,
    *,
    stops: Collection[int] = (),
    seed: int | None = None,
    leave: Callable[[], int] = lambda: STAY,
    room: int = 4096,
) -> list[Sample]:
    """Continue each prompt by up to `num_tokens`: the likeliest, or with a seed drawn ones.

    A token of `stops` ends a continuation, and is no part of its text.
    Rank 0 chooses the tokens, so that no rank ends before another. PyTorch's own random state is
    not used. `room` is the most tokens of a forward pass of several prompts.

    Raises:
        Interrupted: `leave`, which all ranks call before each token, does not answer STAY.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    limit = getattr(parts.lm.hf.config.get_text_config(), "max_position_embeddings", None) or 2**30
    ids: list[list[int]] = [list(parts.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    added: list[list[int]] = [[] for _ in prompts]
    ends = [min(len(each) + num_tokens, limit) for each in ids]
    parts.lm.eval()
    try:
        with torch.compiler.set_stance("force_eager"):  # no compilation for rows of this length
            for group in _groups(ids, ends, room):
                _extend(parts, ids, added, ends, group, device, control, generator, stops, leave)
    finally:
        parts.head.positions = None
        parts.lm.train()
    # An id of `stops` may not be special.
    said = [[token for token in each if token not in stops] for each in added]
    texts = [str(parts.tokenizer.decode(each, skip_special_tokens=True)) for each in said]
    return list(zip(prompts, texts, strict=True))


def _groups(ids: Sequence[list[int]], ends: Sequence[int], room: int) -> Iterator[list[int]]:
    """Yield the places of prompts whose rows together are at most `room` tokens, or of one prompt.

    A prompt that is empty, or as long as the model's limit, has no continuation.
    """
    group: list[int] = []
    for place, each in enumerate(ids):
        if not 0 < len(each) < ends[place]:
            continue
        if group and (len(group) + 1) * max(ends[k] for k in [*group, place]) > room:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def _extend(
    parts: Parts,
    ids: Sequence[list[int]],
    added: Sequence[list[int]],
    ends: Sequence[int],
    group: Sequence[int],
    device: torch.device,
    control: dist.ProcessGroup,
    generator: torch.Generator | None,
    stops: Collection[int],
    leave: Callable[[], int],
) -> None:
    """Add tokens to the prompts of a group until each is at its end or has an end token."""
    rows = torch.zeros(len(group), max(ends[place] for place in group), dtype=torch.long)
    for row, place in zip(rows, group, strict=True):
        row[: len(ids[place])] = torch.tensor(ids[place])
    rows, going = rows.to(device), set(group)
    while going:
        if code := leave():
            raise Interrupted(code)
        lengths = [len(ids[place]) + len(added[place]) for place in group]
        parts.head.positions = torch.tensor(lengths, device=device) - 1
        logits, _ = parts.lm(rows, rows)
        chosen = _choose(logits.cpu(), generator)
        dist.broadcast(chosen, src=0, group=control)
        for row, place, length, token in zip(rows, group, lengths, chosen.tolist(), strict=True):
            if place not in going:
                continue
            row[length] = token
            added[place].append(token)
            if token in stops or length + 1 == ends[place]:
                going.discard(place)


def _choose(logits: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Return a token for each row of logits [rows, V]."""
    if generator is None:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits / TEMPERATURE, -1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
