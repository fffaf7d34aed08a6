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
    from rayapp.cluster.preflight import preflight as preflight
    from rayapp.config import Config as Config
    from rayapp.config import ConfigError as ConfigError
    from rayapp.config import RunConfig as RunConfig
    from rayapp.config import VisionConfig as VisionConfig
    from rayapp.config import load as load
    from rayapp.driver.observe import Hook as Hook
    from rayapp.finetune import sweep as sweep
    from rayapp.generation import generate as generate
    from rayapp.jobs import JobError as JobError
    from rayapp.jobs.find import job as job
    from rayapp.jobs.find import runs as runs
    from rayapp.jobs.handle import Job as Job
    from rayapp.jobs.handle import submit as submit
    from rayapp.jobs.results import Result as Result
    from rayapp.observe.status import NoRun as NoRun
    from rayapp.observe.status import Progress as Progress
    from rayapp.planner import Answer as Answer
    from rayapp.train.planning import plan as plan

# Lines of libraries that no user can act on: transformers imports torchao where it is installed,
# which warns of kernels that need a GPU; botocore tells where it has found credentials.
for _name in ("torchao", "torch.utils._pytree", "bitsandbytes", "botocore", "aiobotocore"):
    if (_logger := logging.getLogger(_name)).level == logging.NOTSET:
        _logger.setLevel(logging.WARNING if "botocore" in _name else logging.ERROR)

_HOMES = {
    name: module
    for module, names in {
        "rayapp.cluster.preflight": "preflight",
        "rayapp.config": "Config ConfigError RunConfig VisionConfig load",
        "rayapp.finetune": "sweep",
        "rayapp.generation": "generate",
        "rayapp.jobs": "JobError",
        "rayapp.jobs.find": "job runs",
        "rayapp.jobs.handle": "Job submit",
        "rayapp.jobs.results": "Result",
        "rayapp.driver.observe": "Hook",
        "rayapp.observe.status": "NoRun Progress",
        "rayapp.planner": "Answer",
        "rayapp.train.planning": "plan",
    }.items()
    for name in names.split()
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
