"""A loss and a metric, one number a token."""

import torch
from torch.nn.functional import cross_entropy


def focal(logits: torch.Tensor, labels: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """Return the focal loss of each token (Lin et al. 2017, arXiv 1708.02002).

    Shapes: logits float32 [c, V], labels int64 [c] -> nats [c].
    """
    nats = cross_entropy(logits, labels, reduction="none")
    return (1.0 - torch.exp(-nats)) ** gamma * nats


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return 1 for each token that the model finds likeliest, else 0: float [c]."""
    return (logits.argmax(-1) == labels).float()
