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

from rayapp.model.activations import checkpoint_activations, offload_activations
from rayapp.model.adapter import Adapter, adapter_problems, load_adapters, merge_adapters
from rayapp.model.adapter_files import export_adapters
from rayapp.model.attention import (
    Unavailable,
    attention_problem,
    cached_attention,
    choose_attention,
)
from rayapp.model.build import LanguageModel, Loss, build, no_loss, num_parameters
from rayapp.model.documents import keeps_documents_apart
from rayapp.model.experts import why_not_grouped
from rayapp.model.export import WrongExport, export
from rayapp.model.gguf import config_values, in_folder, needs_folder
from rayapp.model.init import init_weights, whole_of
from rayapp.model.kernels import CompileGain, compile_blocks, measure_compile, use_float8
from rayapp.model.lora_layers import (
    add_adapters,
    hold_in_4_bits,
    init_adapters,
    linear_names,
    takes_4_bits,
    unknown_targets,
    without_adapters,
)
from rayapp.model.mixers import split_documents
from rayapp.model.names import described, freeze, lr_factors, matching
from rayapp.model.new_tokens import rows_problem
from rayapp.model.scans import kernel_packages, missing_kernels
from rayapp.model.sharding import device_mesh, held, num_nodes, shard, sum_over_replicas
from rayapp.model.source import (
    SHAPE_PATTERNS,
    ModelSource,
    processor_files,
    published,
    resolve,
)
from rayapp.model.weights import LoadStats, load_weights, misfits_of, problems

__all__ = [
    "SHAPE_PATTERNS",
    "Adapter",
    "CompileGain",
    "LanguageModel",
    "LoadStats",
    "Loss",
    "ModelSource",
    "Unavailable",
    "WrongExport",
    "adapter_problems",
    "add_adapters",
    "attention_problem",
    "build",
    "cached_attention",
    "checkpoint_activations",
    "choose_attention",
    "compile_blocks",
    "config_values",
    "described",
    "device_mesh",
    "export",
    "export_adapters",
    "freeze",
    "held",
    "hold_in_4_bits",
    "in_folder",
    "init_adapters",
    "init_weights",
    "keeps_documents_apart",
    "kernel_packages",
    "linear_names",
    "load_adapters",
    "load_weights",
    "lr_factors",
    "matching",
    "measure_compile",
    "merge_adapters",
    "misfits_of",
    "missing_kernels",
    "needs_folder",
    "no_loss",
    "num_nodes",
    "num_parameters",
    "offload_activations",
    "problems",
    "processor_files",
    "published",
    "resolve",
    "rows_problem",
    "shard",
    "split_documents",
    "sum_over_replicas",
    "takes_4_bits",
    "unknown_targets",
    "use_float8",
    "whole_of",
    "why_not_grouped",
    "without_adapters",
]
