"""Train an image classifier on Ray.

    python -m rayapp.vision [CONFIG.yaml] [--section.field=value ...]

The package imports its public names on first use, so that a mistake in a config is reported before
torch and Ray are imported.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayapp.vision.classifier_run import RunFailed, train_classifier

__all__ = ["RunFailed", "train_classifier"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rayapp.driver.ray_session import tell_ray

        tell_ray()
        from rayapp.vision import classifier_run

        return getattr(classifier_run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
