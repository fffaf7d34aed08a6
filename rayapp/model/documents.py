"""Whether a model keeps the documents of a packed row apart, asked of the model itself.

    if not keeps_documents_apart(lm, device): ...

Whether transformers makes a mask of positions that restart, or hands on the documents' boundaries,
differs from model to model; recurrent layers carry a state on, whatever the mask. So no list of
names is kept: the loss of a row's second document is differentiated by what the first one's tokens
are embedded as. Who sees nothing of them has a gradient of zero there, exactly.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from rayapp.model.build import LanguageModel

LENGTH = 8  # tokens of either document


def keeps_documents_apart(model: LanguageModel, device: torch.device) -> bool:
    """Run one row of two documents forward and backward; all ranks together, no state is changed.

    False too for a model that takes no positions, which could not tell where a document begins.
    """
    taker = model.hf.base_model if model.plain_head else model.hf
    if "position_ids" not in inspect.signature(taker.forward).parameters:
        return False
    row = torch.arange(2 * LENGTH, device=device).unsqueeze(0)
    ids = row % model.hf.config.get_text_config().vocab_size
    labels = torch.where((row < LENGTH) | (row == 2 * LENGTH - 1), -100, ids.roll(-1, 1))
    ends = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32, device=device)
    embedded: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        embedded.append(output.requires_grad_())
        output.retain_grad()

    handle = model.hf.get_input_embeddings().register_forward_hook(keep)
    training = model.training
    model.eval()  # without dropout: no random number is drawn
    try:
        with torch.compiler.set_stance("force_eager"):  # no compilation for rows of this length
            objective, _ = model(ids, labels, row % LENGTH, ends, LENGTH)
            objective.backward()
    finally:
        handle.remove()
        model.train(training)
    for parameter in model.parameters():
        parameter.grad = None
    gradient = embedded[0].grad
    assert gradient is not None
    return not gradient.flatten(0, 1)[:LENGTH].any()
