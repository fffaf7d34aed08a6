"""Test whether a model keeps the documents of a packed row apart, by running it.

    if not keeps_documents_apart(lm, device): ...

Models differ in whether transformers builds a mask from restarting positions or passes on the
documents' boundaries, and recurrent layers carry their state across documents whatever the mask,
unless they run document by document (mixers.py). So there is no list of model names: the loss of a
row's second document is differentiated with respect to the embeddings of the first document's
tokens. If the model keeps documents apart, that gradient is exactly zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rayapp.model.build import LanguageModel

LENGTH = 8  # tokens per document


def keeps_documents_apart(model: LanguageModel, device: torch.device) -> bool:
    """Return whether the second of two documents in a row is independent of the first.

    All ranks call it together: it runs one forward and one backward pass, then clears the
    gradients; weights and random state stay. False also for a model that can tell by nothing where
    a document begins: it takes no position_ids, and no layer runs document by document.
    """
    if not (model.takes_positions or model.splits_documents):
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
    model.eval()  # no dropout, so that no random numbers are drawn
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
