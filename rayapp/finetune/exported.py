"""Check that the exported folder opens in transformers (or peft) as the model that was trained.

    check = check_export(spec, parts, storage / MODEL, device, control)     # all ranks

All ranks compute the logits of a few rows with the model that they hold; rank 0 opens the folder
on its CPUs, in the dtype that the blocks were trained in, and compares. The names and shapes of
the tensors are compared first, from the headers of the files; of a model that is too large to be
opened beside the training, they are all that is.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from rayapp import model
from rayapp.finetune.model_parts import Parts, compute_dtype
from rayapp.model.adapter import adapted, read_adapter
from rayapp.observe.records import ExportCheck
from rayapp.storage import Storage, local_copy
from rayapp.train.export_check import compared, from_rank_zero, wrong_export
from rayapp.train.spec import LanguageSpec

ROWS, TOKENS = 4, 64  # rows compared, and tokens of each
MOST_BYTES = 32 * 2**30  # of a model that rank 0 opens; half of the free memory at most
# Largest difference of the logits, as a share of their norm. The orders of summation differ, and
# bf16 keeps 8 bits of a number, fp8 4: wrong weights differ by about 1.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp8": 0.3}


def check_export(
    spec: LanguageSpec, parts: Parts, folder: Storage, device: torch.device, control: Any
) -> ExportCheck:
    """Compare the exported folder with the model that the ranks hold; all ranks call it.

    Raises:
        WrongExport: on all ranks: it does not open, or is another model.
        RuntimeError: on all ranks: the storage has failed.
    """
    rows = _probe(spec)
    ids = pad_sequence(rows, batch_first=True)  # what lies behind a token cannot affect it
    trained = _trained_logits(parts, ids.to(device))
    there = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).bool()
    return from_rank_zero(
        folder, control, lambda: _compared(spec, parts, folder, ids, there, trained)
    )


def _probe(spec: LanguageSpec) -> list[torch.Tensor]:
    """Return the first tokens of the first documents of a few training rows, each [n]."""
    every = spec.data.rows("train")
    places = np.unique(np.linspace(0, len(every) - 1, ROWS).astype(np.int64))
    records = every.read(every.numbers(places))
    return [
        torch.from_numpy(ids[segments == 1][:TOKENS].astype(np.int64))
        for ids, segments in zip(records["input_ids"], records["segments"], strict=True)
    ]


@torch.no_grad()
def _trained_logits(parts: Parts, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [rows, n, V] of the model that the ranks hold, on the CPU."""
    parts.lm.eval()
    parts.head.whole = True
    try:
        logits, _ = parts.lm(ids, ids)
    finally:
        parts.head.whole = False
        parts.lm.train()
    return logits.float().cpu()


@torch.no_grad()
def _compared(
    spec: LanguageSpec,
    parts: Parts,
    folder: Storage,
    ids: torch.Tensor,
    there: torch.Tensor,
    trained: torch.Tensor,
) -> ExportCheck:
    """Compare the logits of ids [rows, n] where there is a token (`there`)."""
    if problems := _problems(parts, folder):
        raise wrong_export(folder, f"is not the model that was trained: {'; '.join(problems)}")
    if why := _not_opened(spec, parts):
        return {"rows": 0, "difference": None, "why": why}
    with ExitStack() as stack:
        hf = _opened(spec, parts, folder, stack)
        logits = hf(input_ids=ids, use_cache=False).logits.float()
    stored = torch.float32 if _is_adapter(spec) else parts.lm.source_dtype or torch.float32
    precision = spec.config.train.precision
    if precision == "fp32" and stored != torch.float32:
        precision = "bf16"
    tolerance = TOLERANCE[precision]
    return compared(folder, logits[there], trained[there], len(ids), "rows", tolerance)


def _is_adapter(spec: LanguageSpec) -> bool:
    lora = spec.config.model.lora
    return lora is not None and not lora.merge


def _not_opened(spec: LanguageSpec, parts: Parts) -> str | None:
    """Return why the folder is not opened here, None if it is."""
    from ray._private.utils import estimate_available_memory  # within a container's limit

    lora, source = spec.config.model.lora, parts.source
    if _is_adapter(spec) and (source.preset or spec.config.model.from_scratch):
        return "the base has no weights outside of the run"
    if _is_adapter(spec) and lora is not None and lora.quantize != "none":
        return "the base was held in 4 bits"
    needed = model.num_parameters(parts.lm) * compute_dtype(spec.config).itemsize
    if needed > min(MOST_BYTES, estimate_available_memory() // 2):
        return f"it takes {needed / 2**30:.1f} GiB"
    return None


def _problems(parts: Parts, folder: Storage) -> list[str]:
    """Compare names and shapes alone, from the headers."""
    adapter = read_adapter(folder.url, folder)
    if adapter is not None:
        return model.adapter_problems(adapter, parts.lm.hf.config)
    return model.problems(model.ModelSource(folder.url, folder), from_scratch=False)


def _opened(spec: LanguageSpec, parts: Parts, folder: Storage, stack: ExitStack) -> Any:
    """Open the folder with transformers; adapters with peft, on their base."""
    import transformers

    path = local_copy(folder, stack)
    base = local_copy(parts.source.folder, stack) if _is_adapter(spec) else path
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=compute_dtype(spec.config), trust_remote_code=False
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if tokenizer.get_vocab() != parts.tokenizer.get_vocab():
        raise wrong_export(folder, "has another tokenizer than the run")
    return (adapted(hf, path) if _is_adapter(spec) else hf).eval()
