"""What the checks of an exported folder share: rank 0 compares, and all ranks have its answer.

check = from_rank_zero(folder, control, lambda: compared(folder, logits, trained, 4, "rows", 1e-3))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rayapp.model import WrongExport
from rayapp.observe.records import ExportCheck
from rayapp.storage import Storage, StorageError


def from_rank_zero(
    folder: Storage, control: Any, compare: Callable[[], ExportCheck]
) -> ExportCheck:
    """Call `compare` on rank 0 and return its result on all ranks of the group; all ranks call it.

    Raises:
        WrongExport: on all ranks: the folder does not open, or is another model.
        RuntimeError: on all ranks: the storage has failed.
    """
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer[0] = compare()
        except WrongExport as error:
            answer[0] = error
        except StorageError as error:
            answer[0] = RuntimeError(str(error))
        except Exception as error:  # whatever transformers meets, users would meet too
            why = (str(error) or repr(error)).splitlines()[0]
            answer[0] = wrong_export(folder, f"does not open: {type(error).__name__}: {why:.300}")
    dist.broadcast_object_list(answer, src=0, group=control)
    if isinstance(answer[0], Exception):
        raise answer[0]
    check: ExportCheck = answer[0]
    return check


def wrong_export(folder: Storage, problem: str) -> WrongExport:
    """Return the error of a folder, e.g. `problem` "does not open: ..."."""
    return WrongExport(
        f"{folder.url} {problem}. The checkpoints are whole: the same command exports them again"
    )


def compared(
    folder: Storage, logits: Tensor, trained: Tensor, count: int, unit: str, tolerance: float
) -> ExportCheck:
    """Compare the folder's logits with those of training, both of one shape, by their norms.

    Args:
        count, unit: how many of what was compared, e.g. 4 and "rows".
        tolerance: the largest difference, as a share of the norm of `trained`.

    Raises: WrongExport: they differ by more.
    """
    difference = float((logits - trained).norm() / trained.norm())
    if not difference <= tolerance:
        raise wrong_export(
            folder,
            f"is another model than was trained: its logits on {count} {unit} differ by "
            f"{difference:.2g} of their norm ({tolerance} may be rounding)",
        )
    return {"rows": count, "difference": difference, "why": None}
