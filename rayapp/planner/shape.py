"""Read a config.json: the linear layers of a block, parameter counts, LoRA's adapters.

Formulas are for the model types llama, mistral, mixtral, qwen2, qwen3 and gpt_neox of transformers
5. Any other model is read by a function that the caller gives (`ReadModel`), because a guess at its
shape could be wrong without notice: this package imports no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rayapp.planner.measured import Measured

Number = TypeVar("Number", int, float)


class UnknownShape(ValueError):
    """The config.json is unsupported or incomplete, or LoRA targets or images do not suit it."""


@dataclass(frozen=True)
class Linear:
    """A weight matrix [outputs, inputs] of a block, and how many copies a block has."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    """Number of experts; 1 for a dense layer."""
    active: int = 1
    """Copies that one token is routed through."""
    module: bool = True
    """False: it is no nn.Linear of its own, so it cannot get an adapter."""
    blocks: int | None = None
    """Blocks that have it; None: all."""

    @property
    def macs(self) -> int:
        """Multiply-adds of a token."""
        return self.active * self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        """Parameters of all copies."""
        return self.copies * (self.inputs * self.outputs + (self.outputs if self.bias else 0))


@dataclass(frozen=True)
class Shape:
    """A decoder: an embedding, blocks, a final norm and a head.

    The blocks of a family with a formula are identical; those of others may differ.
    """

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Embedding and head are one matrix."""
    linears: tuple[Linear, ...]
    """Linear layers of a block, in order of use; where blocks differ, of each kind of block."""
    gated: bool
    """The MLP has a gate and an up projection; the activation is applied to the gate."""
    fp32_norms: bool
    """Norms compute in fp32 and keep an fp32 copy of their input."""
    rotary: float
    """Fraction of a head's dimensions that rotary embeddings rotate, 0-1."""
    block_norm_parameters: int
    final_norm_parameters: int
    experts: int = 1
    active_experts: int = 1
    beside: int = 0
    """Parameters that no text goes through, e.g. of an encoder of images: frozen."""
    measured: Measured | None = None
    """What was counted, if the family has no formula here."""

    def total(self, count: Callable[[Linear], Number], linears: Iterable[Linear]) -> Number:
        """Return the sum of `count` over these linear layers in all blocks that have them."""
        return sum(
            count(each) * (self.layers if each.blocks is None else each.blocks) for each in linears
        )

    @property
    def all_blocks_parameters(self) -> int:
        """Parameters of all blocks."""
        return self.measured.parameters if self.measured else self.layers * self.block_parameters

    @property
    def block_parameters(self) -> int:
        """Parameters of a block, of the largest where they differ."""
        if self.measured:
            return self.measured.largest
        return sum(linear.parameters for linear in self.linears) + self.block_norm_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; the head has as many."""
        return self.vocabulary * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks, tied ones once."""
        matrices = 1 if self.tied else 2
        return matrices * self.embedding_parameters + self.final_norm_parameters

    @property
    def text_parameters(self) -> int:
        """Parameters of the decoder, tied ones once."""
        return self.all_blocks_parameters + self.root_parameters

    @property
    def parameters(self) -> int:
        """Parameters of the model, tied ones once."""
        return self.text_parameters + self.beside

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: without the experts that it is not routed to."""
        return self.parameters - self.total(
            lambda linear: (linear.copies - linear.active) * linear.inputs * linear.outputs,
            self.linears,
        )


def has_formula(config: Mapping[str, Any]) -> bool:
    """Return whether `shape_of` knows the family of a config.json."""
    return config.get("model_type") in _FAMILIES


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape that a config.json describes, by the formulas of its family.

    Raises:
        UnknownShape: another family, or a field is missing; says which.
    """
    kind = str(config.get("model_type"))
    if kind not in _FAMILIES:
        near = difflib.get_close_matches(kind, _FAMILIES, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Known are {', '.join(_FAMILIES)}"
        raise UnknownShape(f"model_type={kind} is unknown: its shape cannot be planned. {hint}")
    try:
        return _FAMILIES[kind](config)
    except KeyError as error:
        raise UnknownShape(
            f"config.json is incomplete: {error.args[0]} of a {kind} is not in it. "
            "Give the model's own config.json"
        ) from error


def lora_parameters(
    shape: Shape,
    rank: int,
    targets: Sequence[str] = (),
    dora: bool = False,
    experts: Sequence[str] = (),
    *,
    active: bool = False,
) -> int:
    """Count the adapters' parameters: rank * (inputs + outputs) per adapted linear and expert.

    DoRA has a norm of each output too. `active` counts those that one token uses.

    Raises:
        UnknownShape: the blocks have no such target.
    """
    adapted = targeted(shape, targets, experts)
    norms = shape.total(lambda linear: linear.outputs, adapted) if dora else 0
    return norms + rank * shape.total(
        lambda each: (each.active if active else each.copies) * (each.inputs + each.outputs),
        adapted,
    )


def targeted(
    shape: Shape, targets: Sequence[str] = (), experts: Sequence[str] = ()
) -> tuple[Linear, ...]:
    """Return the linear layers of a block that get adapters, and the experts' that are named.

    No targets means all linear layers.

    Raises:
        UnknownShape: the blocks have no such target.
    """
    can = [linear for linear in shape.linears if linear.module]
    names = dict.fromkeys(linear.name for linear in can)
    wrong = [name for name in targets if name not in names]
    if wrong:
        raise UnknownShape(
            f"model.lora.targets={','.join(wrong)} is unknown: a block of {shape.model_type} has "
            f"the linear layers {', '.join(names)}. Set some of these, or none for all"
        )
    of_experts = [linear for linear in shape.linears if linear.copies > 1]
    if wrong := sorted(set(experts) - {linear.name for linear in of_experts}):
        raise UnknownShape(
            f"model.lora.target_parameters={','.join(wrong)} is unknown: a block of "
            f"{shape.model_type} has no such experts. Leave it out"
        )
    return (
        *(linear for linear in can if not targets or linear.name in targets),
        *(linear for linear in of_experts if linear.name in experts),
    )


def kept_linears(shape: Shape) -> tuple[str, ...]:
    """Return the linears whose results rayapp's selective checkpointing keeps.

    Recomputing one value costs as many multiply-adds as its input is wide. Kept are projections
    whose output is no wider than their input, and whose input is no wider than the model.
    """
    return tuple(
        linear.name
        for linear in shape.linears
        if linear.copies == 1
        and linear.outputs <= linear.inputs <= shape.hidden
        and linear.name != "router"
    )


def _dense(
    config: Mapping[str, Any],
    *,
    biases: tuple[bool, bool, bool] = (False, False, False),
    head_norms: int = 0,
    mlp: tuple[Linear, ...] | None = None,
    **more: Any,
) -> Shape:
    """Return a decoder with RMSNorm and a gated MLP, as Llama's.

    `biases` are those of queries, keys and values, of attention's result, and of the MLP. Queries
    and keys have `head_norms` norms over a head's dimensions.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    inner = config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    qkv, out, wide = biases
    linears = (
        Linear("q_proj", hidden, heads * head_dim, qkv),
        Linear("k_proj", hidden, kv_heads * head_dim, qkv),
        Linear("v_proj", hidden, kv_heads * head_dim, qkv),
        Linear("o_proj", heads * head_dim, hidden, out),
    )
    gated = (
        Linear("gate_proj", hidden, inner, wide),
        Linear("up_proj", hidden, inner, wide),
        Linear("down_proj", inner, hidden, wide),
    )
    values: dict[str, Any] = {
        "model_type": config["model_type"],
        "hidden": hidden,
        "layers": config["num_hidden_layers"],
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate": inner,
        "vocabulary": config["vocab_size"],
        "tied": bool(config.get("tie_word_embeddings", False)),
        "linears": linears + (mlp or gated),
        "gated": True,
        "fp32_norms": True,
        "rotary": 1.0,
        "block_norm_parameters": 2 * hidden + head_norms * head_dim,
        "final_norm_parameters": hidden,
    }
    return Shape(**values | more)


def _llama(config: Mapping[str, Any]) -> Shape:
    bias = bool(config.get("attention_bias", False))
    return _dense(config, biases=(bias, bias, bool(config.get("mlp_bias", False))))


def _qwen3(config: Mapping[str, Any]) -> Shape:
    bias = bool(config.get("attention_bias", False))
    return _dense(config, biases=(bias, bias, False), head_norms=2)


def _mixtral(config: Mapping[str, Any]) -> Shape:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    experts, active = config["num_local_experts"], config["num_experts_per_tok"]
    mlp = (
        Linear("router", hidden, experts, module=False),
        # transformers 5 stores an expert's gate and up projections as one matrix.
        Linear("gate_up_proj", hidden, 2 * inner, copies=experts, active=active, module=False),
        Linear("down_proj", inner, hidden, copies=experts, active=active, module=False),
    )
    return _dense(config, mlp=mlp, experts=experts, active_experts=active)


def _gpt_neox(config: Mapping[str, Any]) -> Shape:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    bias = bool(config.get("attention_bias", True))
    linears = (
        Linear("query_key_value", hidden, 3 * hidden, bias),
        Linear("dense", hidden, hidden, bias),
        Linear("dense_h_to_4h", hidden, inner, True),
        Linear("dense_4h_to_h", inner, hidden, True),
    )
    # LayerNorm has a weight and a bias, and computes without an fp32 copy.
    return _dense(
        config,
        linears=linears,
        gated=False,
        fp32_norms=False,
        rotary=config.get("rotary_pct", 0.25),
        block_norm_parameters=4 * hidden,
        final_norm_parameters=2 * hidden,
    )


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], Shape]] = {
    "llama": _llama,
    "mistral": _dense,
    "qwen2": partial(_dense, biases=(True, False, False)),
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "gpt_neox": _gpt_neox,
}
