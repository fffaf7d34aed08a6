"""Fine-tune models with PyTorch FSDP on Ray: one config, a laptop CPU or a GPU cluster.

    import rayapp
    job = rayapp.submit("configs/tiny_cpu.yaml", run={"name": "demo", "storage": "s3://b/runs"})
    job.watch()

    from rayapp.finetune import finetune
    result = finetune(rayapp.load("configs/tiny_cpu.yaml"))    # here, without a cluster

The names are resolved when they are asked for, so that `import rayapp` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayapp.config import Config, ConfigError, load
    from rayapp.generation import generate
    from rayapp.jobs.find import job
    from rayapp.jobs.handle import Job, submit
    from rayapp.jobs.results import Result
    from rayapp.train.planning import plan

_HOMES = {
    "Config": "rayapp.config",
    "ConfigError": "rayapp.config",
    "generate": "rayapp.generation",
    "Job": "rayapp.jobs.handle",
    "Result": "rayapp.jobs.results",
    "job": "rayapp.jobs.find",
    "load": "rayapp.config",
    "plan": "rayapp.train.planning",
    "submit": "rayapp.jobs.handle",
}
__all__ = ["Config", "ConfigError", "Job", "Result", "generate", "job", "load", "plan", "submit"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
