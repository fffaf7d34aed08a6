"""Fine-tune a causal language model on Ray.

    python -m rayapp.finetune [CONFIG.yaml] [--section.field=value ...]

The package imports its public names on first use, so that a mistake in a config is reported before
torch and Ray are imported.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayapp.finetune.prepared_run import RunFailed, finetune

__all__ = ["RunFailed", "finetune"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rayapp.driver.ray_session import tell_ray

        tell_ray()
        from rayapp.finetune import prepared_run

        return getattr(prepared_run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
