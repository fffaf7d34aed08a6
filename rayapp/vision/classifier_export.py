"""Check that the exported folder opens in transformers as the classifier that was trained.

check = check_export(spec, classifier, storage / MODEL, device, control)     # all ranks

All ranks classify the first images with the model that they hold. Rank 0 opens the folder and its
image processor on its CPUs, and compares the logits.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayapp.data.images.augment import centred
from rayapp.model.classifier import Classifier
from rayapp.observe.records import ExportCheck
from rayapp.storage import Storage
from rayapp.storage.inputs import local_copy
from rayapp.train.export_check import compared, from_rank_zero, wrong_export
from rayapp.train.spec import ImageSpec

IMAGES = 4
# Largest difference of the logits, as a share of their norm; bf16 keeps 8 bits of a number.
TOLERANCE = {False: 1e-3, True: 5e-2}


@torch.no_grad()
def check_export(
    spec: ImageSpec, classifier: Classifier, folder: Storage, device: torch.device, control: Any
) -> ExportCheck:
    """Compare the exported folder with the model that the ranks hold; all ranks call it.

    Raises:
        WrongExport: on all ranks: it does not open, or is another model.
        RuntimeError: on all ranks: the storage has failed.
    """
    rows, look = spec.data.rows("train"), spec.config.data
    files = rows.read(range(min(IMAGES, len(rows))))
    images = np.stack([centred(data, look, rows.as_stored) for data in files])
    pixels = torch.from_numpy(images).to(device)
    labels = torch.zeros(len(images), dtype=torch.int64, device=device)
    classifier.eval()
    try:
        trained = classifier(pixels, labels, labels, labels.float())[2].float().cpu()
    finally:
        classifier.train()
    tolerance = TOLERANCE[classifier.mixed]
    return from_rank_zero(folder, control, lambda: _compared(folder, images, trained, tolerance))


def _compared(folder: Storage, images: Any, trained: Tensor, tolerance: float) -> ExportCheck:
    import transformers

    with ExitStack() as stack:
        path = local_copy(folder, stack)
        hf, report = transformers.AutoModelForImageClassification.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
        processor = transformers.AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
    if names := [*report["missing_keys"], *report["mismatched_keys"]]:
        raise wrong_export(folder, f"is not the model that was trained: it lacks {names[0]}")
    # They are cropped already.
    inputs = processor(
        images=list(images), do_resize=False, do_center_crop=False, return_tensors="pt"
    )
    logits = hf.eval()(**inputs).logits
    return compared(folder, logits, trained, len(images), "images", tolerance)
