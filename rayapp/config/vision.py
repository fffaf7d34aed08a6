"""The description of a run that trains an image classifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue

from rayapp.config.fields import (
    Beta,
    OptionalFloat,
    OptionalInt,
    OptionalStr,
    Section,
    Text,
    comma_list,
    mapping,
)
from rayapp.config.optimizers import ImageOptimizerName, TrainSection
from rayapp.config.sections import SCHEDULE, RunConfig, indivisible

Share = Annotated[float, Field(ge=0, le=1)]
ImageStrategy = Literal["ddp", "full_shard", "shard_grad_op", "hybrid_shard"]
Three = Annotated[tuple[float, float, float], BeforeValidator(comma_list)]
Above0 = Annotated[float, Field(gt=0)]
Deviations = Annotated[tuple[Above0, Above0, Above0], BeforeValidator(comma_list)]


class ImageModel(Section):
    path: Text = "resnet-tiny"
    """Hugging Face folder, s3:// folder or hub id of an image classifier, or a preset: resnet18 to
    resnet152, efficientnet-b0 to efficientnet-b7, resnet-tiny."""
    from_scratch: bool = False
    """Start from random weights with this model's shape (always so for a preset)."""
    overrides: Annotated[dict[str, JsonValue], BeforeValidator(mapping)] = Field(
        default_factory=dict
    )
    """Fields of the model's config.json to replace, e.g. `{depths: [1, 1, 1, 1]}`."""


class RandAugment(Section):
    layers: int = Field(default=2, ge=1)
    """Operations, one after another, on each image."""
    magnitude: int = Field(default=9, ge=0, le=30)
    """Strength of the operations, 0-30."""


class ImageDataConfig(Section):
    path: Text = "shapes"
    """Folder, s3:// folder or mount that holds a folder for each class, tar shards, or Parquet;
    `shapes` is a set that rayapp draws itself."""
    format: Literal["auto", "folder", "tar", "parquet"] = "auto"
    """How the images lie there; auto goes by the files' names."""
    eval_path: OptionalStr = None
    """Held-out images, laid out alike; none holds out eval_fraction of path."""
    eval_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share held out, 0-1, by a hash of the images' names."""
    size: int = Field(default=224, ge=8, le=2048)
    """Pixels of an image's sides, as the model sees it."""
    eval_crop: float = Field(default=0.875, gt=0, le=1)
    """Held-out images are scaled so that the crop from the middle is this share of the shorter
    side."""
    crop_scale: Annotated[tuple[Share, Share], BeforeValidator(comma_list)] = (0.08, 1.0)
    """Area of the random crop as a share of the image's: least, most; `1, 1` takes the middle."""
    flip: Share = 0.5
    """Probability of mirroring an image, 0-1."""
    randaugment: Annotated[RandAugment | None, BeforeValidator(mapping)] = None
    """Random operations on colours and geometry (RandAugment); none for none."""
    mixup: float = Field(default=0.0, ge=0)
    """Alpha of mixup; 0 for none. Pairs lie in one micro-batch."""
    cutmix: float = Field(default=0.0, ge=0)
    """Alpha of CutMix; 0 for none. With mixup as well each pair takes one of the two."""
    mean: Three = (0.485, 0.456, 0.406)
    """Mean of red, green and blue, 0-1, that is taken off."""
    std: Deviations = (0.229, 0.224, 0.225)
    """Their deviation, that is divided by."""
    count: OptionalInt = Field(default=None, ge=1)
    """How many training images there are, for a plan before the run has counted them itself."""
    bad_images: Share = 0.01
    """Share of files, 0-1, that may be no images or damaged; more stops the run, fewer are counted,
    named and skipped."""
    workers: OptionalInt = Field(default=None, ge=1)
    """Ray Data tasks at once that read, decode and augment; none takes the CPUs left over."""


class ImageTrain(TrainSection):
    images_per_step: int = Field(default=256, ge=1)
    """Global batch: images per optimizer step, over all workers."""
    micro_batch: int = Field(default=64, ge=1)
    """Images in one forward and backward on one worker: what batch-norm takes its statistics of."""
    optimizer: ImageOptimizerName = "sgd"
    """lars: SGD with a rate for each layer (large batches)."""
    max_steps: OptionalInt = Field(default=None, ge=0)
    """Optimizer steps; none is derived from epochs."""
    epochs: OptionalInt = Field(default=None, ge=1)
    """Passes over the data, when max_steps is none (then 1 if this is none too)."""
    lr: float = Field(default=0.1, gt=0)
    """Peak learning rate."""
    min_lr: Share = 0.0
    """Learning rate at the end of cosine, linear and wsd, as a share of lr, 0-1."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after warm-up; wsd stays at the peak and falls at the end."""
    decay: float = Field(default=0.2, gt=0, le=1)
    """Share of the steps, 0-1, over which wsd falls."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from 0."""
    schedule_from: int = Field(default=0, ge=0)
    """Steps done when the schedule begins: a run that is made longer may have a new one, with a
    warm-up and an end of its own, for the steps to come."""
    momentum: Beta = 0.9
    """Of sgd (Nesterov's) and lars."""
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(comma_list)] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    weight_decay: float = Field(default=5e-5, ge=0)
    """Of kernels and matrices; norms and biases have none. Decoupled in adamw alone."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target, 0-1, spread over the classes; not in the loss shown."""
    ema: float = Field(default=0.0, ge=0, lt=1)
    """Decay per step of the moving average of the weights that is evaluated and exported; 0: none
    is kept."""
    on_spike: Literal["none", "skip", "stop"] = "none"
    """At a step whose loss is far above those before it, or not finite: skip leaves the weights as
    they are and goes on, takes 8 such losses in a row that lie close together for a new level, and
    ends the run after 16 such steps in a row; stop ends it at once; both name the rows. none: only
    what is not finite ends the run."""
    spike_sigmas: float = Field(default=6.0, gt=0)
    """How many standard deviations above the mean of the last 64 steps a spike is."""
    grad_clip: OptionalFloat = Field(default=None, gt=0)
    """Largest global norm of the gradient; none does not clip."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of convolutions and matmuls (autocast); weights and sums stay fp32. auto: bf16
    on GPUs, fp32 on CPUs."""
    channels_last: bool = True
    """Lay images out with the channels last, as tensor cores and oneDNN want them."""
    compile: bool = False
    """torch.compile the model."""


class ImageParallel(Section):
    strategy: ImageStrategy = "ddp"
    """ddp: every worker holds the model; the others are FSDP's, with PyTorch's names."""
    replicas: OptionalInt = Field(default=None, ge=1)
    """hybrid_shard: how many copies of the model; none is one per node."""
    sync_batch_norm: bool = False
    """Take batch-norm's statistics over all workers' micro-batches: then the number of workers
    changes them. Otherwise over each micro-batch, which is the same for any number."""


class VisionConfig(RunConfig):
    """A run that trains an image classifier."""

    MODULE: ClassVar[str] = "rayapp.vision"
    PATH_FIELDS: ClassVar[tuple[str, ...]] = ("data.path", "data.eval_path", "model.path")
    RESUME_SAFE: ClassVar[tuple[str, ...]] = (
        "data.workers",
        "data.count",
        "train.on_spike",
        "train.spike_sigmas",
    )
    EXTENSION_FIELDS: ClassVar[tuple[str, ...]] = SCHEDULE
    ABSENT: ClassVar[Mapping[str, str]] = {
        "model.init_from": "a classifier begins with an exported folder, which has batch-norm's "
        "statistics and the averaged weights. Set model.path=RUN/model",
    }

    task: Literal["vision"] = "vision"
    """What is trained."""
    model: ImageModel = ImageModel()
    data: ImageDataConfig = ImageDataConfig()
    train: ImageTrain = ImageTrain()
    parallel: ImageParallel = ImageParallel()

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (fields, problem) for conflicts between fields that are each valid alone."""
        yield from super().conflicts()
        train, data = self.train, self.data
        if train.images_per_step % train.micro_batch:
            field, count, size = "train.images_per_step", train.images_per_step, train.micro_batch
            problem = indivisible(field, count, size, f"{size} images")
            yield (field, "train.micro_batch"), problem
        if not 0 < data.crop_scale[0] <= data.crop_scale[1]:
            least, most = data.crop_scale
            yield (
                ("data.crop_scale",),
                f"data.crop_scale={least}, {most} is not a range: an area is above 0, the least "
                "before the most. Set e.g. data.crop_scale=0.08,1",
            )

    @property
    def rows_per_step(self) -> int:
        """Images of one optimizer step, over all workers."""
        return self.train.images_per_step

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches in one optimizer step, over all workers."""
        return self.train.images_per_step // self.train.micro_batch
