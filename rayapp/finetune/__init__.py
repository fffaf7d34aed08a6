"""Fine-tune a causal language model on Ray.

    python -m rayapp.finetune [CONFIG.yaml] [--section.field=value ...]

The package imports its public names on first use, so that a mistake in a config is reported before
torch and Ray are imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayapp.finetune.prepared_run import RunFailed, finetune
    from rayapp.finetune.sweeping import sweep

__all__ = ["RunFailed", "finetune", "sweep"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rayapp.driver.ray_session import tell_ray

        tell_ray()
        module = "sweeping" if name == "sweep" else "prepared_run"
        return getattr(import_module(f"rayapp.finetune.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
