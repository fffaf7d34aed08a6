"""Test whether a model tells its attention kernel its sliding windows.

    if not hands_on_windows(config): ...                  # its windows are in the mask alone

A kernel without a mask sees a window only if the model passes it on, which PhiMoE, Qwen2-MoE and
Doge do not in transformers 5.23. The model's code is run on the meta device, with a kernel that
notes which windows it is given, beside those that masks are made of.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
)

log = logging.getLogger("rayapp.model")

PROBE = "rayapp_probe"


def hands_on_windows(config: PretrainedConfig) -> bool:
    """Return whether every window of the masks reaches the attention kernel too."""
    values = config.get_text_config().to_dict().items()
    if not any("window" in name and value for name, value in values):
        return True
    in_masks: set[int | None] = {None}
    given: set[int | None] = {None}

    def mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> None:
        in_masks.add(local_size)

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        given.add(sliding_window)
        rows, heads, length, _ = query.shape
        return value.new_empty(rows, length, heads, value.shape[-1]), None

    AttentionInterface.register(PROBE, attend)
    AttentionMaskInterface.register(PROBE, mask)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=torch.bfloat16,  # experts' kernels take no other
            attn_implementation=PROBE,
            trust_remote_code=False,
        )
        ids = torch.zeros(1, 8, dtype=torch.long)
        try:  # with a mask of tokens, transformers does not look into the positions
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        except Exception as error:  # any failure of the model's code: what it gave so far counts
            log.info("%s: its windows are known in part (%r)", type(model).__name__, error)
    return in_masks <= given
