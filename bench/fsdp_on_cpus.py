"""FSDP2 of accelerate on CPUs, for the trainers of others that benches compare with.

accelerate knows FSDP on accelerators only, and on CPUs would wrap the model in DDP. Its FSDP2 code
runs on CPUs as it is once its state says FSDP; that is all that is set here.
"""

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType


def allow_fsdp_on_cpus() -> None:
    """Let accelerate's state choose FSDP on CPUs as it does on GPUs."""
    plain = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs) -> None:
        plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init
