"""Documents of a packed row are turned by LongRoPE's factors for their own lengths."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from rayapp.model import LanguageModel, build, init_weights
from rayapp.model.longrope import is_long
from rayapp.train.loss import chunked_cross_entropy

LIMIT = 16
SHAPE = Phi3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    original_max_position_embeddings=LIMIT,
    pad_token_id=0,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
        "original_max_position_embeddings": LIMIT,
    },
)
LENGTHS = ((10, 24, 4), (16, 17, 5))  # of the documents of two rows


def language_model(attention: str) -> LanguageModel:
    lm = build(SHAPE, loss=chunked_cross_entropy, attention=attention)
    init_weights(lm, 0, "cpu")
    for parameter in lm.parameters():
        parameter.data.mul_(20)  # so that positions matter
    return lm


@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_a_document_loses_the_same_beside_a_longer_one(attention: str) -> None:
    lm = language_model(attention)
    hf = AutoModelForCausalLM.from_config(SHAPE, attn_implementation="sdpa")
    hf.load_state_dict({name.removeprefix("hf."): p for name, p in lm.state_dict().items()})
    torch.manual_seed(0)
    ids = torch.randint(3, 64, (2, sum(LENGTHS[0])))
    labels, alone = ids.roll(-1, 1), []
    for row, lengths in enumerate(LENGTHS):
        ends = torch.tensor(lengths).cumsum(0)
        labels[row, ends - 1] = -100
        for start, end in pairwise([0, *ends.tolist()]):
            part = ids[row : row + 1, start:end]
            alone.append(hf(part, labels=part).loss * (end - start - 1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    bounds = torch.tensor([0, *LENGTHS[0], *LENGTHS[1]]).cumsum(0).int()
    _, packed = lm(ids, labels, positions, bounds, max(map(max, LENGTHS)))
    assert float(packed) == pytest.approx(float(sum(alone)), rel=1e-5)


def test_what_is_long() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 2, 0, 1]])
    long = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0, 0]]).bool()
    assert torch.equal(is_long(positions, 3), long)
    assert torch.equal(is_long(torch.arange(5)[None], 4), torch.ones(1, 5).bool())
    assert not is_long(torch.arange(5)[None], 5).any()
