"""Fine-tune a language model from the driver's side.

result = finetune(load("configs/tiny_cpu.yaml"))
"""

from __future__ import annotations

from rayapp.driver import command
from rayapp.finetune.auto import after_failure
from rayapp.finetune.check import check, settle
from rayapp.finetune.prepared_run import prepare
from rayapp.observe.result import RunFailed

__all__ = ["RunFailed", "finetune"]

finetune = command.Kind(check, settle, prepare, after_failure).run
