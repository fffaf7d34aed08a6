"""Fine-tune models with PyTorch FSDP on Ray: one config, a laptop CPU or a GPU cluster.

    import rayapp
    job = rayapp.submit("configs/tiny_cpu.yaml", run={"name": "demo", "storage": "s3://b/runs"})
    job.watch()

    from rayapp.finetune import finetune
    result = finetune(rayapp.load("configs/tiny_cpu.yaml"))    # here, without a cluster

The names are resolved when they are asked for, so that `import rayapp` costs nothing.
"""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayapp.cluster.preflight.job import preflight
    from rayapp.config import Config, ConfigError, RunConfig, VisionConfig, load
    from rayapp.generation import generate
    from rayapp.jobs import JobError
    from rayapp.jobs.find import job, runs
    from rayapp.jobs.handle import Job, submit
    from rayapp.jobs.results import Result
    from rayapp.observe.hooks import Hook
    from rayapp.observe.status import NoRun, Progress
    from rayapp.planner import Answer
    from rayapp.train.planning import plan

# Lines of libraries that no user can act on: transformers imports torchao where it is installed,
# which warns of kernels that need a GPU; botocore tells where it has found credentials.
for _name in ("torchao", "torch.utils._pytree", "bitsandbytes", "botocore", "aiobotocore"):
    if (_logger := logging.getLogger(_name)).level == logging.NOTSET:
        _logger.setLevel(logging.WARNING if "botocore" in _name else logging.ERROR)

_HOMES = {
    "Answer": "rayapp.planner",
    "Config": "rayapp.config",
    "ConfigError": "rayapp.config",
    "Hook": "rayapp.observe.hooks",
    "Job": "rayapp.jobs.handle",
    "JobError": "rayapp.jobs",
    "NoRun": "rayapp.observe.status",
    "Progress": "rayapp.observe.status",
    "Result": "rayapp.jobs.results",
    "RunConfig": "rayapp.config",
    "VisionConfig": "rayapp.config",
    "generate": "rayapp.generation",
    "job": "rayapp.jobs.find",
    "load": "rayapp.config",
    "plan": "rayapp.train.planning",
    "preflight": "rayapp.cluster.preflight.job",
    "runs": "rayapp.jobs.find",
    "submit": "rayapp.jobs.handle",
}
__all__ = [
    "Answer",
    "Config",
    "ConfigError",
    "Hook",
    "Job",
    "JobError",
    "NoRun",
    "Progress",
    "Result",
    "RunConfig",
    "VisionConfig",
    "generate",
    "job",
    "load",
    "plan",
    "preflight",
    "runs",
    "submit",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
