"""Write adapters as peft has them on disk; find the factors of experts there.

    export_adapters(model, open_storage("s3://bucket/adapter"), base="meta-llama/Llama-3.1-8B")

peft stacks the factors of a layer's experts in two matrices (`target_parameters`), which vLLM
refuses for most mixtures. In the families of BY_EXPERT, each projection of each expert has a pair
of its own on disk, named as in the base's files. vLLM reads these, peft does on transformers 4, and
stacks them again on transformers 5. gate_proj and up_proj have the same first factor.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rayapp.config.lora import BY_EXPERT, WHOLE_EXPERTS
from rayapp.model.build import LanguageModel
from rayapp.model.experts import expert_factors
from rayapp.model.export import Reverse
from rayapp.model.files import ShardReader, Stored
from rayapp.model.init import whole_of
from rayapp.model.lora_layers import ADAPTER, MAGNITUDE, LoraUpdate, trained, updates
from rayapp.model.new_tokens import ROWS, RowsUpdate
from rayapp.model.sharding import reshard
from rayapp.model.small_files import small_files_of
from rayapp.storage import Readable, Storage


class Projection(NamedTuple):
    """A projection of an expert: a layer on disk that holds a part of a stacked update."""

    expert: int
    half: int | None
    """Which half of the outputs it has; None: all of them."""
    layer: str
    """In peft's files."""


@torch.no_grad()
def export_adapters(
    model: LanguageModel,
    storage: Storage,
    *,
    base: str,
    tokenizer: Any = None,
    generation_config: GenerationConfig | None = None,
) -> list[str]:
    """Write the adapters in peft's format; all ranks call it. Return the names, [] off rank 0."""
    reshard(model)
    whole = {peft_name(name): whole_of(p).cpu() for name, p in trained(model.hf).items()}
    if dist.is_initialized() and dist.get_rank() != 0:
        return []
    adapted: Any = model.hf
    config = adapted.peft_config[ADAPTER]
    config.base_model_name_or_path, config.inference_mode = base, True
    values = config.to_dict()
    rows = [u for u in updates(model.hf).values() if isinstance(u, RowsUpdate)]
    if rows:  # a tied head follows the embedding
        stored = [u for u in rows if peft_name(f"{u.layer}.{ROWS}") in whole]
        values["trainable_token_indices"] = {u.layer: list(u.ids) for u in stored}
    stacks = expert_parts(model.hf)
    if stacks and {*config.target_parameters} >= WHOLE_EXPERTS:  # peft and vLLM read no others so
        for layer, parts in stacks.items():
            left, right = (whole.pop(f"{layer}.lora_{factor}.weight") for factor in "AB")
            whole |= _apart(left, right, parts)
        projections = {part.layer.rpartition(".")[2] for parts in stacks.values() for part in parts}
        values["target_modules"] = {*values["target_modules"], *projections}
        values["target_parameters"] = None
        if values["use_rslora"]:  # by peft's sum over gate_proj's and up_proj's ranks it would grow
            values |= {"use_rslora": False, "lora_alpha": config.lora_alpha * math.sqrt(config.r)}
    files = small_files_of(tokenizer, generation_config)
    files["adapter_model.safetensors"] = save(whole, metadata={"format": "pt"})
    text = json.dumps(values, indent=2, sort_keys=True, default=sorted)
    files["adapter_config.json"] = text.encode()
    for name, data in files.items():
        storage.write(name, data)
    return sorted(files)


def peft_name(name: str) -> str:
    """Return a parameter's name in peft's files."""
    name = name.replace(f"{MAGNITUDE}.{ADAPTER}.weight", MAGNITUDE).replace(f".{ADAPTER}.", ".")
    name = name.replace(f".{ROWS}", f".token_adapter.{ROWS}")
    return f"base_model.model.{name}"


def expert_parts(hf: PreTrainedModel) -> dict[str, list[Projection]]:
    """Return the parts of each stacked layer by its name in peft's files, by expert and half.

    {} if the model has no adapters of experts, or the files have them as peft stacks them.
    """
    every = updates(hf).items()
    stacked = {name: u for name, u in every if isinstance(u, LoraUpdate) and u.experts > 1}
    if not stacked or hf.config.model_type not in BY_EXPERT:
        return {}
    reverse, found = Reverse(hf), {}
    for group in reverse.groups(torch.float32):
        name, _ = group.members[0]
        if (update := stacked.get(name)) is not None:
            # What the conversion of the weight does to numbers tells which rows go where.
            numbers = torch.arange(2 * update.experts).view(-1, 2, 1)
            found[peft_name(update.layer)] = sorted(
                Projection(
                    int(where[0]) // 2,
                    int(where[0]) % 2 if len(where) == 1 else None,
                    peft_name(file_name.removesuffix(".weight")),
                )
                for file_name, tensor in reverse.run(group, {name: numbers}).items()
                for where in [tensor.flatten()]
            )
    return found


def _apart(left: Tensor, right: Tensor, parts: list[Projection]) -> dict[str, Tensor]:
    """Return the factors of each part of a stacked layer."""
    first, second = expert_factors(left, right, 1 + parts[-1].expert)
    tensors = {}
    for expert, half, layer in parts:
        outputs = second[expert] if half is None else second[expert].chunk(2)[half]
        tensors[f"{layer}.lora_A.weight"] = first[expert].clone()
        tensors[f"{layer}.lora_B.weight"] = outputs.clone()
    return tensors


def stacked_shapes(
    stored: dict[str, Stored], stacks: dict[str, list[Projection]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors, those of whole stacks under the stack's name."""
    shapes = {name: where.shape for name, where in stored.items()}
    for layer, parts in stacks.items():
        for factor in "AB":
            names = [f"{part.layer}.lora_{factor}.weight" for part in parts]
            sizes = {shapes.get(name) for name in names}
            size, experts = sizes.pop(), 1 + parts[-1].expert
            if sizes or size is None or len(size) != 2:
                continue
            for name in names:
                del shapes[name]
            whole = (size[0] * experts, size[1])
            if factor == "B":
                whole = (size[0] * len(parts) // experts, size[1] * experts)
            shapes[f"{layer}.lora_{factor}.weight"] = whole
    return shapes


class StackReader(ShardReader):
    """Reads an adapter's tensors; those of experts are stacked as peft has them in memory."""

    def __init__(
        self, folder: Readable, stored: dict[str, Stored], stacks: dict[str, list[Projection]]
    ) -> None:
        super().__init__(folder, stored)
        self.stacks = stacks

    def rows(self, name: str, start: int = 0, count: int | None = None) -> Tensor:
        """Read as ShardReader does; a stack is read whole.

        Raises: ValueError if the projections of an expert do not share their first factor.
        """
        layer, _, factor = name.rpartition(".lora_")
        if name in self.stored or layer not in self.stacks:
            return super().rows(name, start, count)
        experts: dict[int, list[Tensor]] = {}
        for part in self.stacks[layer]:
            read = super().rows(f"{part.layer}.lora_{factor}")
            experts.setdefault(part.expert, []).append(read)
        if factor.startswith("B"):
            whole = torch.stack([torch.cat(halves) for halves in experts.values()])
            return whole.permute(1, 2, 0).reshape(whole.shape[1], -1)
        if not all(torch.equal(halves[0], half) for halves in experts.values() for half in halves):
            raise ValueError(
                f"{self.storage.url} has first factors of its own for each projection of the "
                f"experts in {layer}: they are stacked here with one. Merge it into its base with "
                "peft, and give the merged model"
            )
        return torch.cat([halves[0] for halves in experts.values()])
