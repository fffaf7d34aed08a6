"""Build, shard, fill and export a Hugging Face causal language model, never whole on one rank.

    source = resolve("meta-llama/Llama-3.1-8B")
    assert not problems(source, from_scratch=False)
    mesh = device_mesh("cuda", strategy="full_shard")
    model = shard(build(source.config, loss=chunked_loss), mesh, param_dtype=torch.bfloat16)
    stats = load_weights(model, source, "cuda")           # or init_weights(model, seed, "cuda")
    optimizer = torch.optim.AdamW(model.parameters())     # only now are there parameters
    objective, loss = model(input_ids, labels)            # both sums over valid tokens
    (objective / global_valid_tokens).backward()
    export(model, open_storage("s3://bucket/model"))

The order of the calls matters. `build` creates shapes on the meta device, `shard` assigns rows to
ranks, and only then is memory allocated and filled: each rank reads its own rows, or draws the
weights and keeps its own rows. `LanguageModel` wraps the HF model and is the FSDP root. Gradients
are summed over ranks, never averaged: the caller divides the loss by the valid tokens of the global
batch. Loading and export use the original names of the tensors, by transformers' conversion tables.
"""

from rayapp.model.adapter import adapter_problems, load_adapters, merge_adapters
from rayapp.model.adapter_files import export_adapters
from rayapp.model.attention import Unavailable
from rayapp.model.build import LanguageModel, build, no_loss, num_parameters
from rayapp.model.export import WrongExport, export
from rayapp.model.init import init_weights
from rayapp.model.lora_layers import add_adapters, init_adapters
from rayapp.model.sharding import device_mesh, num_nodes, shard
from rayapp.model.source import ModelSource, resolve
from rayapp.model.weights import load_weights, problems

__all__ = [
    "LanguageModel",
    "ModelSource",
    "Unavailable",
    "WrongExport",
    "adapter_problems",
    "add_adapters",
    "build",
    "device_mesh",
    "export",
    "export_adapters",
    "init_adapters",
    "init_weights",
    "load_adapters",
    "load_weights",
    "merge_adapters",
    "no_loss",
    "num_nodes",
    "num_parameters",
    "problems",
    "resolve",
    "shard",
]
