"""Training of image classifiers that others published, as the planner sees it; `PYTHONPATH=. python
tests/support/published_images.py` writes the table of docs/plan.md.

Sources, read 2026-11-22: NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets,
resnet50v1.5/README.md and efficientnet/README.md (container 21.03; images of a micro-batch from
configs.yml there, EfficientNet's from its own scripts); pytorch-image-models,
results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv (2022).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rayapp.hardware import GPUS, Gpu
from rayapp.planner.image_memory import ImageLayout
from rayapp.planner.image_shape import image_shape_of
from rayapp.planner.image_step import image_step_time
from rayapp.planner.times import Machine, Workload
from rayapp.presets import IMAGE_PRESETS

DOC = Path(__file__).parents[2] / "docs" / "plan.md"
BEGIN, END = "<!-- published images -->", "<!-- end of images -->"

# Mixed precision there is fp16, here bf16: as fast where there are both. V100s have fp16 alone:
# 125 TFLOP/s. The RTX 3090: 71 TFLOP/s with fp32 sums, 936 GB/s, 24 GiB (NVIDIA's GA102 paper).
V100 = {
    name: replace(GPUS[name], flops={**GPUS[name].flops, "bf16": 125e12})
    for name in ("V100-16GB", "V100-32GB")
}
RTX3090 = Gpu(
    "RTX 3090",
    24.0,
    {"fp32": 35.6e12, "tf32": 35.6e12, "bf16": 71e12, "fp8": None},
    936e9,
    None,
    32e9,
    "8.6",
    "NVIDIA GeForce RTX 3090",
)
A100 = GPUS["A100-80GB"]


@dataclass(frozen=True)
class Run:
    """A published figure and the job it belongs to."""

    system: str
    what: str
    job: Workload[ImageLayout]
    images_per_s: float
    excluded: str = ""
    """Why it is not counted."""

    @property
    def predicted(self) -> float:
        """Images a second of all GPUs."""
        return (
            self.job.layout.micro_batch * self.job.machine.ranks / image_step_time(self.job).total_s
        )

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.images_per_s - 1


def run(
    system: str,
    model: str,
    gpu: Gpu,
    gpus: int,
    precision: str,
    micro_batch: int,
    images_per_s: float,
    size: int | None = None,
    excluded: str = "",
) -> Run:
    """Return a run; EfficientNets there are padded as in the paper."""
    preset = IMAGE_PRESETS[model]
    config = {"model_type": preset.model_type, **preset.fields}
    size = size or preset.size
    shape = image_shape_of(config, size, same=True)
    layout = ImageLayout(shape, 1, micro_batch, precision=precision)
    gigabits = 1600 if gpu is A100 else 100
    here = Machine(gpu, min(gpus, 8), max(1, gpus // 8), gigabits * 1e9, efa=True)
    names = {"bf16": "AMP", "fp32": "FP32" if gpu.flops["tf32"] is None else "TF32"}
    what = f"{model}, {size} pixels x {micro_batch}, {names[precision]}, {gpus} x {gpu.name}"
    return Run(system, what, Workload(layout, here), images_per_s, excluded)


# model, GPU, GPUs, precision, images of a micro-batch, images/s of all
NVIDIA = (
    ("resnet50", A100, 1, "fp32", 256, 938),
    ("resnet50", A100, 8, "fp32", 256, 7248),
    ("resnet50", A100, 1, "bf16", 256, 2470),
    ("resnet50", A100, 8, "bf16", 256, 16621),
    ("resnet50", V100["V100-16GB"], 1, "fp32", 112, 367),
    ("resnet50", V100["V100-16GB"], 8, "fp32", 112, 2855),
    ("resnet50", V100["V100-16GB"], 1, "bf16", 256, 1200),
    ("resnet50", V100["V100-16GB"], 8, "bf16", 256, 8322),
    ("resnet50", V100["V100-32GB"], 1, "fp32", 112, 356),
    ("resnet50", V100["V100-32GB"], 8, "fp32", 112, 2766),
    ("resnet50", V100["V100-32GB"], 1, "bf16", 256, 1156),
    ("resnet50", V100["V100-32GB"], 8, "bf16", 256, 8056),
    ("efficientnet-b0", A100, 1, "fp32", 256, 1078),
    ("efficientnet-b0", A100, 8, "fp32", 256, 8193),
    ("efficientnet-b0", A100, 16, "fp32", 256, 16137),
    ("efficientnet-b0", A100, 1, "bf16", 256, 2489),
    ("efficientnet-b0", A100, 8, "bf16", 256, 16652),
    ("efficientnet-b4", A100, 1, "fp32", 64, 157),
    ("efficientnet-b4", A100, 8, "fp32", 64, 1223),
    ("efficientnet-b4", A100, 64, "fp32", 64, 9146),
    ("efficientnet-b4", A100, 1, "bf16", 64, 331),
    ("efficientnet-b4", A100, 8, "bf16", 64, 2570),
    ("efficientnet-b4", A100, 64, "bf16", 64, 18900),
    ("efficientnet-b0", V100["V100-16GB"], 1, "fp32", 128, 655),
    ("efficientnet-b0", V100["V100-16GB"], 8, "fp32", 128, 4672),
    ("efficientnet-b0", V100["V100-16GB"], 1, "bf16", 256, 1301),
    ("efficientnet-b0", V100["V100-16GB"], 8, "bf16", 256, 7789),
    ("efficientnet-b4", V100["V100-16GB"], 1, "fp32", 32, 83),
    ("efficientnet-b4", V100["V100-16GB"], 8, "fp32", 32, 616),
    ("efficientnet-b4", V100["V100-16GB"], 1, "bf16", 32, 204),
    ("efficientnet-b4", V100["V100-16GB"], 8, "bf16", 32, 1366),
)
# model, images of a micro-batch, pixels, images/s on one RTX 3090
TIMM = (
    ("resnet18", 512, 224, 3481.78),
    ("resnet34", 512, 224, 2036.51),
    ("resnet50", 512, 224, 1218.01),
    ("resnet101", 256, 224, 747.89),
    ("efficientnet-b0", 512, 224, 1751.72),
    ("efficientnet-b1", 256, 240, 1325.85),
    ("efficientnet-b2", 256, 256, 978.68),
    ("efficientnet-b4", 96, 320, 354.99),
    ("efficientnet-b4", 64, 380, 241.83),
    ("efficientnet-b5", 32, 456, 113.63),
    ("efficientnet-b6", 16, 528, 64.08),
    ("efficientnet-b7", 8, 600, 37.97),
)
# 8 GPUs in mixed precision are 6 to 7 times one there, in FP32 and TF32 7.1 to 7.8, with the same
# gradients over the same links: the images do not come any faster.
LIMITED = "limited by its input"


def runs() -> list[Run]:
    """Return all of them."""
    found = []
    for model, gpu, gpus, precision, micro_batch, rate in NVIDIA:
        fast = precision == "bf16" and gpus == 8 and model != "efficientnet-b4"
        why = LIMITED if fast else ""
        found.append(run("NVIDIA", model, gpu, gpus, precision, micro_batch, rate, excluded=why))
    for model, micro_batch, size, rate in TIMM:
        found.append(run("timm", model, RTX3090, 1, "bf16", micro_batch, rate, size))
    return found


RUNS = runs()


def table() -> str:
    """Return the table of docs/plan.md."""
    lines = ["| system | run | images/s published | predicted | off by |", "|---|---|---|---|---|"]
    for one in RUNS:
        note = f" ({one.excluded}: not counted)" if one.excluded else ""
        lines.append(
            f"| {one.system} | {one.what}{note} | {one.images_per_s:,.0f} "
            f"| {one.predicted:,.0f} | {one.error:+.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    text = DOC.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    DOC.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
    print(table())
