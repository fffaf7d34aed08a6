"""Build a causal language model on the meta device, as a wrapper around Hugging Face's.

    model = build(source.config, loss=chunked_loss)       # meta device: shapes only

Parameters have no values until init.py or weights.py fills them.

Letters in shapes: B rows, S seq_len, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rayapp.model import longrope, scans
from rayapp.model.attention import BY_BOUNDARIES, IMPLEMENTATIONS
from rayapp.model.experts import Routing
from rayapp.model.new_tokens import ROWS, NewRows
from rayapp.model.quantize import Linear4bit

log = logging.getLogger("rayapp.model")
Switch: TypeAlias = Callable[[], AbstractContextManager[None]]


class Loss(Protocol):
    """Compute summed (objective, cross-entropy) from hidden states; labels of -100 do not count."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        labels: Tensor,
        bias: Tensor | None = None,
        *,
        each: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Shapes: hidden [B, S, H], weight [V, H], labels [B, S], bias [V] -> two scalars.

        If the model computes its logits itself, they are passed as hidden [B, S, V], weight None.
        `each`, zeros fp32 [B S], is filled with the cross-entropy of each label. A loss for rows
        with `values`, or `answers`, `reference` and `kl`, takes these too. A third result, a dict,
        are sums of further figures by name.
        """


def answer_sums(values: Tensor, answers: Tensor) -> Tensor:
    """Sum consecutive values [labels], so many to each of `answers`, [answers] -> [answers].

    The order of the additions is fixed, unlike with index_add on a GPU.
    """
    if not len(answers):
        return values.sum().expand(0)
    return torch.segment_reduce(values, "sum", lengths=answers, unsafe=True)


def no_loss(
    hidden: Tensor,
    weight: Tensor | None,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    each: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Stand in for the loss of a model that is built only for its shapes."""
    raise AssertionError("this model was built for its shapes")


class Wrapper(nn.Module):
    """A module that wraps a Hugging Face model and is the FSDP root."""

    hf: PreTrainedModel
    source_dtype: torch.dtype | None
    """The dtype in the model's original config, before training sets its own."""
    offloaded: bool
    """Sharded parameters are offloaded to host memory."""
    freed: list[Any]
    """The blocks whose gathered parameters are freed after a forward."""
    replicated: list[Any]
    """The FSDP modules of a model that other ranks hold too."""


class LanguageModel(Wrapper):
    """Wrap a Hugging Face causal language model so that its forward returns a summed loss.

    It is the FSDP root: its hook gathers the parameters outside the blocks when forward starts.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        loss: Loss,
        source_dtype: torch.dtype | None,
        attention: str = "sdpa",
        router_weight: float | None = None,
    ) -> None:
        super().__init__()
        self.hf = hf
        for module in beside_text(hf):
            module.requires_grad_(False)
        self.loss = loss
        self.source_dtype = source_dtype
        self.by_boundaries = attention in BY_BOUNDARIES
        self.offloaded = False
        self.plain_head = _head_is_plain(hf)
        self.router_loss, coefficient = _router_loss(hf)
        self.router_weight = coefficient if router_weight is None else router_weight
        self.shows_objective = False
        """Whether the loss's own objective is among the sums of `take_sums`."""
        self._sums: dict[str, list[Tensor]] = {}
        self.routing = Routing(hf)
        taker = hf.base_model if self.plain_head else hf
        self.takes_positions = "position_ids" in inspect.signature(taker.forward).parameters
        self.splits_documents = False
        """Layers that mix along the sequence without attention are told the documents."""
        self.bounds: Tensor | None = None
        """The documents' edges in the micro-batch that is running, for those layers."""
        self.as_reference: Switch | None = None
        """Inside its block the model is the reference of preferences. None: the batches bring the
        reference's log-probabilities, or the loss takes none."""
        self.reference_alone = False
        """The forward pass of preferences returns the log-probability of each answer as third."""

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        boundaries: Tensor | None = None,
        longest: int | None = None,
        present: Tensor | None = None,
        of_source: Tensor | None = None,
        values: Tensor | None = None,
        trained: Tensor | None = None,
        answers: Tensor | None = None,
        reference: Tensor | None = None,
        kl: float | None = None,
    ) -> tuple[Tensor, ...]:
        """Return (objective, cross-entropy) of a micro-batch, summed over labels that are not -100.

        Differentiate the objective: the loss's own, plus the router loss of a mixture of experts.
        `labels[b, s]` is the token that follows `input_ids[b, s]`: already shifted. Positions that
        restart at 0 mark the documents of a packed row; None means one document per row, for which
        the plain causal kernel runs (no mask is built). `boundaries` are the same documents' edges
        with the rows laid end to end, `longest` is the longest document in tokens; kernels without
        a mask need both with position_ids. The router's loss is of the tokens that are `present`
        (bool [B, S]), None for all. With `of_source` (bool [sources, B]: whether a row is of a
        source), the cross-entropy of each source follows, fp64 [sources]. `values` (float32
        [columns, B, S]) are handed to the loss. With `trained` (int64 [labels]), the head and the
        loss compute these places of the labels alone, which must be all that bear loss. Preferences
        come with `answers`, and perhaps a `reference` and `kl` (see train/preference.py), and have
        `trained`.

        Shapes: input_ids, labels, position_ids [B, S], boundaries int32 [documents + 1] -> scalars.
        """
        inputs: dict[str, Any] = {"input_ids": input_ids}
        num_rows, each = len(labels), None
        if of_source is not None:
            each = torch.zeros(labels.numel(), device=labels.device)
        if position_ids is not None and self.takes_positions:
            inputs["position_ids"] = position_ids
        if self.splits_documents:
            self.bounds = None if position_ids is None else boundaries
        if self.by_boundaries and position_ids is not None:
            assert boundaries is not None, "this attention needs the documents' boundaries"
            inputs = {name: value.reshape(1, -1) for name, value in inputs.items()}
            inputs |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
            inputs |= {"max_length_q": longest, "max_length_k": longest}
            labels = labels.reshape(1, -1)
        known = reference is not None and not self.reference_alone
        if answers is not None and self.as_reference is not None and not known:
            assert trained is not None, "preferences come with the places of their labels"
            reference = self._reference(inputs, labels, trained, answers)
            if self.reference_alone:
                return -reference.sum(), -reference.sum(), reference
        routed = self.router_loss if self.training and self.router_weight else None
        if routed:
            inputs["output_router_logits"] = True
        counted = self.training and torch.is_grad_enabled()
        if counted and self.routing.experts:
            self.routing.begin(present, input_ids.device)
        objective, loss, figures, router_logits = self._run(
            inputs, labels, each, values, trained, answers, reference, kl
        )
        if counted and self.shows_objective:
            self._sums.setdefault("own_loss", []).append(objective.detach())
        if torch.is_grad_enabled() or not self.training:
            for name, figure in figures.items():
                self._sums.setdefault(name, []).append(figure)
        self.routing.counting = False  # recomputation in the backward pass does not count
        if routed and router_logits:  # a mixture may have dense layers alone
            balance = routed(router_logits, present) * (labels != -100).sum()
            objective = objective + self.router_weight * balance
            if counted:
                self._sums.setdefault("router_loss", []).append(balance.detach())
        if of_source is None or each is None:
            return objective, loss
        return objective, loss, of_source.double() @ each.double().view(num_rows, -1).sum(1)

    def _run(
        self,
        inputs: dict[str, Any],
        labels: Tensor,
        each: Tensor | None,
        values: Tensor | None,
        trained: Tensor | None,
        answers: Tensor | None = None,
        reference: Tensor | None = None,
        kl: float | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], Any]:
        """Return objective, cross-entropy, the loss's figures and router logits; fill `each`."""
        if self.plain_head:
            output = self.hf.base_model(**inputs, use_cache=False)
            head = cast(Any, self.hf.get_output_embeddings())
            hidden, weight, bias = output.last_hidden_state, head.weight, head.bias
        else:
            output = self.hf(**inputs, use_cache=False)
            hidden, head, weight, bias = output.logits, None, None, None
        of_trained = each
        if trained is not None:
            hidden = hidden.flatten(0, -2).index_select(0, trained)
            labels = labels.flatten().index_select(0, trained)
            values = None if values is None else values.flatten(1).index_select(1, trained)
            of_trained = None if each is None else each.new_zeros(len(trained))
        if isinstance(head, NewRows):
            hidden, weight = head.factors(hidden)
        more: dict[str, Any] = {} if of_trained is None else {"each": of_trained}
        given = {"values": values, "answers": answers, "reference": reference, "kl": kl}
        more |= {name: value for name, value in given.items() if value is not None}
        objective, loss, *figures = self.loss(hidden, weight, labels, bias=bias, **more)
        if trained is not None and each is not None and of_trained is not None:
            each.index_copy_(0, trained, of_trained)
        router_logits = getattr(output, "router_logits", None)
        return objective, loss, figures[0] if figures else {}, router_logits

    @torch.no_grad()
    def _reference(
        self, inputs: dict[str, Any], labels: Tensor, trained: Tensor, answers: Tensor
    ) -> Tensor:
        """Return the log-probability of each answer by the reference, fp32 [answers]."""
        assert self.as_reference is not None
        training, each = self.training, torch.zeros(labels.numel(), device=labels.device)
        self.eval()
        try:
            with self.as_reference():
                self._run(inputs, labels, each, None, trained)
        finally:
            self.train(training)
        return answer_sums(-each[trained], answers)

    @contextmanager
    def answers_alone(self, switch: Switch) -> Iterator[None]:
        """Inside the block, forward passes return each answer's log-probability alone.

        They run inside the block of `switch`: without_adapters, or nullcontext for the policy.
        """
        before, self.as_reference, self.reference_alone = self.as_reference, switch, True
        try:
            yield
        finally:
            self.as_reference, self.reference_alone = before, False

    def take_sums(self) -> dict[str, Tensor]:
        """Return further sums of the micro-batches since the last call, over loss-bearing tokens.

        They are the objective of a loss of the user's own, the figures of a loss of preferences,
        and the router loss without its weight, if it is in the objective.
        """
        sums, self._sums = self._sums, {}
        return {name: torch.stack(parts).sum() for name, parts in sums.items()}


def build(
    config: PretrainedConfig,
    *,
    loss: Loss,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    router_weight: float | None = None,
) -> LanguageModel:
    """Build the model on the meta device, without memory; `attention` is as in attention.py.

    `router_weight` is that of the router loss, None for the config's own.
    """
    source_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else None
    config = copy.deepcopy(config)  # from_config writes dtype and attention into its argument
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATIONS[attention],
            trust_remote_code=False,
        )
    longrope.by_document(hf)
    scans.guard(hf)
    return LanguageModel(hf, loss, source_dtype, attention, router_weight)


def text_of(hf: PreTrainedModel) -> nn.Module:
    """Return what text goes through: of a multimodal model its decoder, else the model itself."""
    multimodal = hf.config.get_text_config() is not hf.config
    return cast(nn.Module, hf.get_decoder()) if multimodal else hf


def beside_text(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the parts of a multimodal model that no text goes through: encoders and projectors.

    They are frozen, and exported as they were loaded.
    """
    text = text_of(hf)
    if text is hf:
        return []
    inside = {id(module) for module in text.modules()}
    return [part for part in hf.base_model.children() if id(part) not in inside]


def num_parameters(model: nn.Module) -> int:
    """Count the parameters of the whole model, tied ones once, sharded or not."""
    return sum(parameter.numel() for parameter in model.parameters())


State: TypeAlias = dict[str, Tensor | Linear4bit]
"""A state dict; a 4-bit weight is represented by its layer."""


def base_state(hf: PreTrainedModel, *, keep_vars: bool = False) -> State:
    """Return the state dict of the base model, without adapters and under its original names.

    peft moves an adapted layer into a child named base_layer; such parts of names are removed. A
    4-bit weight is represented by its layer, which has the weight's shape.
    """
    held = {name: m for name, m in hf.named_modules() if isinstance(m, Linear4bit)}
    state: State = {f"{name}.weight": module for name, module in held.items()}
    for name, tensor in hf.state_dict(keep_vars=keep_vars).items():
        owner, _, key = name.rpartition(".")
        if not of_adapter(name) and not (owner in held and key in ("packed", "scales")):
            state[name] = tensor
    return {without_wrappers(name): value for name, value in state.items()}


def of_adapter(name: str) -> bool:
    """Return whether a parameter of this name is an adapter's."""
    return ".lora_" in name or name.endswith(f".{ROWS}")


def without_wrappers(name: str) -> str:
    """Return the name that a module or parameter has without peft's wrappers.

    >>> without_wrappers("mlp.experts.base_layer.base_layer.down_proj")
    'mlp.experts.down_proj'
    """
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _head_is_plain(hf: PreTrainedModel) -> bool:
    """Return whether the logits are exactly head(hidden states), by running the forward on stubs.

    Softcapping, scaling and multipliers have other config names in every family, so the model's
    code is run: its base model is replaced by one that returns known values, its head by the
    identity. If that forward fails or changes the values, the head is not plain; the whole model's
    forward is then used, which is correct for any model but computes full logits.
    """
    hidden = torch.linspace(-100.0, 100.0, 64).reshape(1, 2, 32)
    head = hf.get_output_embeddings()
    names = {name for name, module in hf.named_children() if module is head}
    if head is None or not names or not isinstance(getattr(head, "weight", None), Tensor):
        return False
    probe = copy.copy(hf)
    identity = nn.Identity()
    identity.register_buffer("weight", torch.zeros(1))  # some models read its dtype
    stubs: dict[str, nn.Module] = dict.fromkeys(names, identity)
    stubs[hf.base_model_prefix] = _KnownHidden(hidden)
    probe.__dict__["_modules"] = {**hf._modules, **stubs}
    try:
        logits = probe(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False).logits
    except Exception as error:  # any failure of the model's code: not plain
        log.info("%s: full logits are used (%r)", type(hf).__name__, error)
        return False
    return logits.shape == hidden.shape and torch.equal(logits, hidden)


def _router_loss(hf: PreTrainedModel) -> tuple[Callable[[Any, Any], Tensor] | None, float]:
    """Return the load-balancing loss of a mixture of experts, from router logits, and its weight.

    They are the family's own function and coefficient (Switch Transformer's, arXiv 2101.03961),
    (None, 0) if it has none. The function takes the tokens of one micro-batch. Since micro-batches
    do not depend on the number of workers, neither does this loss.
    """
    config = hf.config.get_text_config()
    coefficient = getattr(config, "router_aux_loss_coef", None)
    balance = getattr(sys.modules[type(hf).__module__], "load_balancing_loss_func", None)
    num_experts, top_k = (
        getattr(hf, name, None) for name in ("num_experts", "num_experts_per_tok")
    )
    if balance is None or num_experts is None:
        return None, 0.0

    def of(logits: Any, present: Tensor | None) -> Tensor:
        mask = None if present is None else present.reshape(1, -1)
        loss: Tensor = balance(logits, num_experts, top_k=top_k, attention_mask=mask)
        return loss

    return of, float(coefficient or 0.0)


class _KnownHidden(nn.Module):
    """Stand in for a base model: return given hidden states for any input."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        """Return the given hidden states, [1, 2, 32]."""
        return _Output(self.hidden)


class _Output:
    """Stand in for a base model's output: hidden states, and None for everything optional."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]
