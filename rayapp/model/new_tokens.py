"""Train the rows of new tokens beside adapters, where the embedding and the head are frozen.

    add_rows(hf, ids=(384, 385))                     # on the meta device, before shard()

As peft's `trainable_token_indices` the rows [tokens, H] replace those of the frozen embedding, and
those of the head: of a tied head the same, of another one rows of its own. peft copies the whole
table at each use and differentiates the copy; here only the rows have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

ROWS = "trainable_tokens_delta"  # peft's name
WIDTH = 64  # columns are added to the head by so many: products of odd widths are slow on GPUs


class NewRows(nn.Module):
    """An embedding or a head, frozen, with trained rows in place of its own."""

    base_layer: Any
    ids: tuple[int, ...]

    def __init__(self, base_layer: nn.Module, ids: Sequence[int], rows: nn.Parameter) -> None:
        super().__init__()
        self.base_layer, self.ids = base_layer, tuple(ids)
        self.register_parameter(ROWS, rows)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: token ids [...] -> [..., H], or hidden states [..., H] -> logits [..., V]."""
        ids = torch.tensor(self.ids, device=x.device)
        out: Tensor = self.base_layer(x)
        rows = getattr(self, ROWS).to(out.dtype)
        if isinstance(self.base_layer, nn.Embedding):
            ids, order = ids.sort()
            place = torch.searchsorted(ids, x).clamp(max=len(ids) - 1)
            scale = getattr(self.base_layer, "embed_scale", 1.0)  # Gemma's
            new = nn.functional.embedding(order[place], rows) * scale
            return torch.where((ids[place] == x).unsqueeze(-1), new.to(out.dtype), out)
        bias = self.base_layer.bias
        own = None if bias is None else bias[ids]
        return out.index_copy(-1, ids, nn.functional.linear(x, rows, own))

    def factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and a frozen weight whose product is the head's, without its bias.

        The logits of the new tokens are columns behind the hidden states, which ones in the weight
        put in their places: the loss so differentiates no whole weight.

        Shapes: hidden [..., H] -> [..., H + n], weight [V, H + n].
        """
        rows, width = getattr(self, ROWS), -(-len(self.ids) // WIDTH) * WIDTH
        logits = nn.functional.linear(hidden, rows.to(hidden.dtype))
        more = pad(logits, (0, width - len(self.ids)))
        with torch.no_grad():
            ids = torch.tensor(self.ids, device=hidden.device)
            weight = pad(self.base_layer.weight.detach(), (0, width))
            weight[ids] = 0.0
            weight[ids, hidden.shape[-1] + torch.arange(len(ids), device=hidden.device)] = 1.0
        return torch.cat([hidden, more], -1), weight


@dataclass(frozen=True)
class RowsUpdate:
    """The update of an embedding or a head [V, H]: rows in place of its own."""

    layer: str
    ids: tuple[int, ...]
    rows: Tensor

    def merged(self, weight: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the whole weight with its update; `gather` makes the rows whole, in fp32."""
        ids = torch.tensor(self.ids, device=weight.device)
        return weight.index_copy(0, ids, gather(self.rows).to(weight))


def add_rows(hf: PreTrainedModel, ids: Sequence[int]) -> None:
    """Train fp32 rows for these tokens in the embedding and the head, whatever their dtype."""
    if not ids:
        return
    table: Any = hf.get_input_embeddings()
    head: Any = hf.get_output_embeddings()
    tied = head.weight is table.weight
    rows = None
    for layer in (table, head):
        names = [name for name, module in hf.named_modules() if module is layer]
        owner, _, key = names[0].rpartition(".")
        if rows is None or not tied:
            shape = len(ids), layer.weight.shape[1]
            rows = nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta"))
        setattr(hf.get_submodule(owner), key, NewRows(layer, ids, rows))


def rows_problem(hf: PreTrainedModel, *, merge: bool) -> str | None:
    """Return why rows of this model cannot be trained beside adapters; None if they can."""
    table, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    if not (isinstance(table, nn.Embedding) and type(head) is nn.Linear):
        return f"the embedding or the head of {hf.config.model_type} is a layer of its own kind"
    if head.bias is not None and not merge:
        return "peft leaves out the head's bias. Set model.lora.merge=true"
    return None
