"""Low-rank adapters (peft's LoRA) on a frozen base: add and initialise them.

    add_adapters(model, lora)                             # on the meta device, before shard()
    hold_in_4_bits(model, torch.bfloat16)                 # the frozen base, if so wanted
    init_adapters(model, seed=0)                          # after init_weights() or load_weights()

The forward runs peft's own layers, so an exported adapter gives the same result in peft, also as
DoRA (Liu et al. 2024, arXiv 2402.09353) and rsLoRA (Kalajdzievski 2023, arXiv 2312.03732); adapters
of fused experts are computed by experts.py. Adapters are trained in fp32, whatever the dtype of the
base. Base parameters keep their original names on disk: see `base_state`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rayapp.config import Lora
from rayapp.model.build import LanguageModel, beside_text, of_adapter, without_wrappers
from rayapp.model.experts import compute_adapted, expert_factors, parameter_names
from rayapp.model.init import fill, whole_of
from rayapp.model.new_tokens import ROWS, NewRows, RowsUpdate, add_rows
from rayapp.model.quantize import BLOCK, Linear4bit
from rayapp.model.sharding import find_blocks

ADAPTER = "default"  # peft's name for a model's only adapter
MAGNITUDE = "lora_magnitude_vector"  # of DoRA, [out]


@dataclass(frozen=True)
class LoraUpdate:
    """The update of one weight [out, in]: plus scale * right @ left, then rows of DoRA's norms.

    A weight of experts is [experts, out, in], and so are its factors (see `expert_factors`).
    """

    layer: str
    """The name of the adapted layer."""
    left: Tensor
    """[rank, in]"""
    right: Tensor
    """[out, rank]"""
    scale: float
    magnitude: Tensor | None
    """DoRA's norms of the rows, [out]; None without DoRA."""
    transposed: bool
    """The weight is stored as [in, out] (GPT-2's Conv1D, GPT-OSS's experts)."""
    experts: int = 1
    """Experts that the weight is of."""

    def merged(self, weight: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the whole weight with its update; `gather` makes a factor whole, in fp32."""
        left, right = gather(self.left), gather(self.right)
        if self.experts > 1:
            left, right = expert_factors(left, right, self.experts)
            first, second = (left.mT, right.mT) if self.transposed else (right, left)
            return torch.baddbmm(weight, first, second, alpha=self.scale)
        first, second = (left.T, right.T) if self.transposed else (right, left)
        merged = torch.addmm(weight, first, second, alpha=self.scale)  # weight may be the shard
        if self.magnitude is None:
            return merged
        norms = _row_norms(merged, self.transposed)
        return merged.mul_(gather(self.magnitude).view_as(norms) / norms)


def linear_names(hf: PreTrainedModel) -> list[str]:
    """Return the last name parts (e.g. q_proj) of the blocks' linear layers, sorted.

    Names that peft does not adapt as linear layers are left out: a Mamba's kernels read the weights
    of its out_proj, and names that were once an expert's stand for all experts as one parameter.
    """
    names = {
        name.rpartition(".")[2]
        for block in find_blocks(hf)
        for name, module in block.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    }
    return sorted(_adaptable(hf, names))


def _adaptable(hf: PreTrainedModel, names: set[str]) -> Iterator[str]:
    """Yield the names that peft takes for linear layers of this model."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=sorted(names))
    convert_peft_config_for_transformers(config, hf, None)  # moves experts' to target_parameters
    for name in config.target_modules or ():
        try:
            _check_lora_target_modules_mamba(config, hf, name)
        except ValueError:
            continue
        yield name


def unknown_targets(
    lora: Lora, hf: PreTrainedModel, names: Iterable[str] | None = None
) -> str | None:
    """Return an error text for targets that the blocks do not have; None if they have all.

    `names` are those of the linear layers, if they are at hand.
    """
    names = linear_names(hf) if names is None else names
    if unknown := sorted(set(lora.targets) - set(names)):
        return (
            f"model.lora.targets={','.join(unknown)} is unknown: the model's blocks have no such "
            f"linear layer. Set some of {', '.join(names)}"
        )
    experts = parameter_names(hf)
    if unknown := sorted(set(lora.target_parameters) - set(experts)):
        has = f"Set some of {', '.join(experts)}" if experts else "Leave it out"
        return (
            f"model.lora.target_parameters={','.join(unknown)} is unknown: the model's blocks have "
            f"no experts with such a parameter. {has}"
        )
    return None


def add_adapters(model: LanguageModel, lora: Lora, tokens: Sequence[int] = ()) -> None:
    """Add adapters to the blocks' linear layers (or those in `targets`), and freeze all else.

    Experts' parameters in `target_parameters` get an adapter for each expert, and `tokens` rows of
    their own in the embedding and the head.
    Raises: ValueError if the blocks have no such target.
    """
    import peft

    names = linear_names(model.hf)
    if problem := unknown_targets(lora, model.hf, names):
        raise ValueError(problem)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or names,
        target_parameters=list(lora.target_parameters) or None,
        exclude_modules=_beside(model.hf),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.hf.modules()),
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    peft.inject_adapter_in_model(config, model.hf, ADAPTER)
    compute_adapted(model.hf, ADAPTER)
    add_rows(model.hf, tokens)
    for parameter in trained(model.hf).values():
        parameter.data = parameter.data.float()


def _beside(hf: PreTrainedModel) -> str | None:
    """Return a pattern of the modules that no text goes through; None if there are none."""
    parts = {id(part) for part in beside_text(hf)}
    names = [re.escape(name) for name, module in hf.named_modules() if id(module) in parts]
    return rf"({'|'.join(names)})\..*" if names else None


def hold_in_4_bits(model: LanguageModel, dtype: torch.dtype) -> None:
    """Replace the blocks' frozen linear layers by 4-bit ones; `dtype` is the compute dtype.

    A layer whose input width is no multiple of 64, or whose weight is trained, stays as it is.
    """
    for block in find_blocks(model.hf):
        for name, module in list(block.named_modules()):
            if _fits_4_bits(module) and not module.weight.requires_grad:
                parent, _, key = name.rpartition(".")
                setattr(block.get_submodule(parent), key, Linear4bit(module, dtype))


def takes_4_bits(hf: PreTrainedModel) -> bool:
    """Return whether `hold_in_4_bits` takes a layer of the blocks at all."""
    return any(_fits_4_bits(module) for block in find_blocks(hf) for module in block.modules())


def _fits_4_bits(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.in_features % BLOCK == 0


def trained(hf: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the adapters' parameters by name; {} if there are none."""
    return {name: parameter for name, parameter in hf.named_parameters() if of_adapter(name)}


@torch.no_grad()
def init_adapters(model: LanguageModel, seed: int) -> None:
    """Draw factor A from (seed, name), uniform in +-1/sqrt(in); set factor B to zero, DoRA's norms.

    Rows of tokens begin as the base's. The adapted model so starts equal to its base (Hu et al.
    2021, arXiv 2106.09685), with the same values at any world size. All ranks call it: norms and
    rows are of whole weights.
    """
    for name, parameter in trained(model.hf).items():
        values = torch.zeros(parameter.shape)
        if f".{MAGNITUDE}." in name:
            layer: Any = model.hf.get_submodule(name.partition(f".{MAGNITUDE}.")[0])
            base = layer.base_layer
            whole = base.whole() if isinstance(base, Linear4bit) else whole_of(base.weight).float()
            values = _row_norms(whole.cpu(), isinstance(base, Conv1D)).flatten()
        if name.endswith(f".{ROWS}"):
            layer = model.hf.get_submodule(name.removesuffix(f".{ROWS}"))
            values = whole_of(layer.base_layer.weight)[list(layer.ids)].float()
        if ".lora_A." in name:
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            values.uniform_(-1, 1, generator=generator).div_(math.sqrt(parameter.shape[1]))
        fill(parameter, values)


@contextmanager
def without_adapters(hf: PreTrainedModel) -> Iterator[None]:
    """Compute the frozen base inside the block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in hf.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def updates(hf: PreTrainedModel) -> dict[str, LoraUpdate | RowsUpdate]:
    """Return the adapters' weight updates by the original name of the weight."""
    rows = {
        f"{without_wrappers(name)}.weight": RowsUpdate(name, module.ids, getattr(module, ROWS))
        for name, module in hf.named_modules()
        if isinstance(module, NewRows)
    }
    return rows | {
        f"{without_wrappers(name)}.{getattr(module, 'parameter_name', 'weight')}": LoraUpdate(
            layer=name,
            left=module.lora_A[ADAPTER].weight,
            right=module.lora_B[ADAPTER].weight,
            scale=module.scaling[ADAPTER],
            magnitude=next((layer.weight for layer in module.lora_magnitude_vector.values()), None),
            transposed=isinstance(module.base_layer, Conv1D)
            or getattr(module.get_base_layer(), "is_transposed", False),
            experts=getattr(module, "num_experts", 1),
        )
        for name, module in hf.named_modules()
        if ADAPTER in getattr(module, "lora_A", {})
    }


def _row_norms(weight: Tensor, transposed: bool) -> Tensor:
    """Return the norm of each output's weights: [out, 1], or [1, out] of a transposed weight."""
    return torch.linalg.vector_norm(weight, dim=0 if transposed else 1, keepdim=True)
