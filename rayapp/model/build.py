"""Build a causal language model without memory, and shard it with FSDP2.

    model = build(source.config, loss=chunked_loss)       # meta device: shapes only
    shard(model, device_mesh("cuda", strategy="full_shard"), param_dtype=torch.bfloat16)

A parameter is sharded over the ranks along its first dimension, one all-gather per transformer
block; embeddings, final norm and head belong to the root, whose hook gathers them when
`LanguageModel.forward` starts. Parameters have no values until init.py or weights.py fill them.

Letters in shapes: B rows, S seq_len, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

log = logging.getLogger("rayapp.model")

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")


class Loss(Protocol):
    """Sum the cross-entropy over the labels that are not -100, from hidden states."""

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Shapes: hidden [B, S, H], weight [V, H], labels [B, S], bias [V] -> scalar."""


class LanguageModel(nn.Module):
    """Wrap a Hugging Face causal language model so that its forward returns a summed loss.

    It is the FSDP root: parameters outside the blocks are whole only while its forward runs.
    """

    def __init__(self, hf: PreTrainedModel, loss: Loss, source_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.hf = hf
        self.loss = loss
        self.source_dtype = source_dtype  # what the config asked for, before training's own dtype
        self.offloaded = False  # True: sharded parameters live in host memory
        self.plain_head = _head_is_plain(hf)

    def forward(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        """Sum the loss over the labels of this micro-batch that are not -100.

        `labels[b, s]` is the token that follows `input_ids[b, s]`: already shifted. Positions that
        restart at 0 mark the documents of a packed row; None means one document per row, which
        takes the plain causal kernel (no mask is built).
        Shapes: input_ids, labels, position_ids [B, S] -> scalar.
        """
        if not self.plain_head:
            output = self.hf(input_ids=input_ids, position_ids=position_ids, use_cache=False)
            logits = output.logits.float().flatten(0, 1)  # [B * S, V]
            return nn.functional.cross_entropy(
                logits, labels.flatten(), reduction="sum", ignore_index=-100
            )
        output = self.hf.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        head = cast(nn.Linear, self.hf.get_output_embeddings())
        return self.loss(output.last_hidden_state, head.weight, labels, bias=head.bias)


def build(
    config: PretrainedConfig,
    *,
    loss: Loss,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> LanguageModel:
    """Build the model on the meta device: every shape, no memory."""
    source_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else None
    config = copy.deepcopy(config)  # from_config writes dtype and attention into what it is given
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    return LanguageModel(hf, loss, source_dtype)


def num_parameters(model: nn.Module) -> int:
    """Count the parameters of the whole model, tied ones once, sharded or not."""
    return sum(parameter.numel() for parameter in model.parameters())


def device_mesh(device_type: str, *, strategy: str, replicas: int = 1) -> DeviceMesh:
    """Lay all ranks out as the strategy needs: (shard,), or (replicate, shard).

    Raises: ValueError if `replicas` does not divide the world.
    """
    world = dist.get_world_size()
    if strategy == "no_shard":
        # Replication as HSDP with shard groups of one rank: the same code path, hooks and DTensors
        # as the other strategies, a pure all-reduce on the wire, and it runs on gloo.
        return init_device_mesh(device_type, (world, 1), mesh_dim_names=("replicate", "shard"))
    if strategy == "hybrid_shard":
        if replicas < 1 or world % replicas:
            legal = [n for n in range(1, world + 1) if world % n == 0]
            raise ValueError(
                f"parallel.replicas={replicas} does not divide {world} workers: every replica must "
                f"have the same number of ranks. Set one of {legal}"
            )
        shape = (replicas, world // replicas)
        return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
    assert strategy in STRATEGIES, strategy
    return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))


def shard(
    model: LanguageModel,
    mesh: DeviceMesh,
    *,
    strategy: str = "full_shard",
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    cpu_offload: bool = False,
) -> LanguageModel:
    """Shard every block, then the rest, over `mesh`; gradients become sums over all ranks."""
    assert strategy in STRATEGIES, strategy
    assert mesh.ndim == (2 if strategy in ("hybrid_shard", "no_shard") else 1), (strategy, mesh)
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    offload = OffloadPolicy()
    if cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    free_after_forward = strategy in ("full_shard", "hybrid_shard")
    for block in find_blocks(model.hf):
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=free_after_forward,
            mp_policy=precision,
            offload_policy=offload,
        )
    # The root's backward follows its forward at once, so freeing in between would only cost a
    # second all-gather of embeddings and head.
    fully_shard(
        model, mesh=mesh, reshard_after_forward=False, mp_policy=precision, offload_policy=offload
    )
    model.offloaded = cpu_offload
    _sum_gradients(model)
    return model


def find_blocks(hf: PreTrainedModel) -> list[nn.Module]:
    """Find the transformer blocks: the outermost modules that HF says not to split.

    Raises: ValueError if the model names none and has no list of layers either.
    """
    kinds = set(hf._no_split_modules or ())
    blocks: dict[str, nn.Module] = {}
    for name, module in hf.named_modules():  # parents come first
        inside = any(name.startswith(f"{block}.") for block in blocks)
        if type(module).__name__ in kinds and not inside:
            blocks[name] = module
    if blocks:
        return list(blocks.values())
    lists = [list(module) for module in hf.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(hf).__name__} has no transformer blocks to shard")
    return max(lists, key=len)


def _sum_gradients(model: nn.Module) -> None:
    """Switch off FSDP's division by the world size.

    The loss is already divided by the valid tokens of the global batch. A factor of 1 alone makes
    FSDP use ReduceOp.PREMUL_SUM, which gloo refuses, hence the explicit SUM.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _head_is_plain(hf: PreTrainedModel) -> bool:
    """Tell whether the logits are exactly head(hidden states), by running the forward on stubs.

    Softcapping, scaling and multipliers have a different config name in every family, so the code
    itself is asked: the base model is replaced by one that returns known values, the head by the
    identity. A forward that will not run so is not plain, and then is used whole: correct for any
    model, at the price of full logits.
    """
    hidden = torch.linspace(-100.0, 100.0, 64).reshape(1, 2, 32)
    head = hf.get_output_embeddings()
    names = {name for name, module in hf.named_children() if module is head}
    if head is None or not names or not isinstance(getattr(head, "weight", None), Tensor):
        return False
    probe = copy.copy(hf)
    identity = nn.Identity()
    identity.register_buffer("weight", torch.zeros(1))  # some ask for its dtype
    stubs: dict[str, nn.Module] = dict.fromkeys(names, identity)
    stubs[hf.base_model_prefix] = _KnownHidden(hidden)
    probe.__dict__["_modules"] = {**hf._modules, **stubs}
    try:
        logits = probe(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False).logits
    except Exception as error:  # any failure of foreign code means the same: not plain
        log.info("%s: full logits are used (%r)", type(hf).__name__, error)
        return False
    return logits.shape == hidden.shape and torch.equal(logits, hidden)


class _KnownHidden(nn.Module):
    """Stand in for a base model: return given hidden states for any input."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        """Shapes: returns the hidden states as given, [1, 2, 32]."""
        return _Output(self.hidden)


class _Output:
    """Stand in for a base model's output: hidden states, and None for everything optional."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]
