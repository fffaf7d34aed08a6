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
from rayapp.config.sections import RunConfig, indivisible

Share = Annotated[float, Field(ge=0, le=1)]
ImageStrategy = Literal["ddp", "full_shard", "shard_grad_op", "hybrid_shard"]
Three = Annotated[tuple[float, float, float], BeforeValidator(comma_list)]
Above0 = Annotated[float, Field(gt=0)]
Deviations = Annotated[tuple[Above0, Above0, Above0], BeforeValidator(comma_list)]


class ImageModel(Section):
    path: Text = "resnet-tiny"
    """The image classifier to train: a Hugging Face folder, an s3:// folder, a hub id, or a preset:
    resnet18 to resnet152, efficientnet-b0 to efficientnet-b7, resnet-tiny."""
    from_scratch: bool = False
    """Start from random weights with the shape of this model (always true for a preset)."""
    overrides: Annotated[dict[str, JsonValue], BeforeValidator(mapping)] = Field(
        default_factory=dict
    )
    """Values that replace fields of the model's config.json, e.g. `{depths: [1, 1, 1, 1]}`."""


class RandAugment(Section):
    layers: int = Field(default=2, ge=1)
    """Number of operations applied to each image, one after another."""
    magnitude: int = Field(default=9, ge=0, le=30)
    """Strength of the operations, 0-30."""


class ImageDataConfig(Section):
    path: Text = "shapes"
    """Folder, s3:// folder or mount with one folder per class, tar shards, or Parquet files;
    `shapes` is a data set that rayapp generates."""
    format: Literal["auto", "folder", "tar", "parquet"] = "auto"
    """Layout of the images; auto: detect the layout from the file names."""
    eval_path: OptionalStr = None
    """Held-out images in the same layout; none: hold out eval_fraction of path."""
    eval_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Fraction of the images to hold out, 0-1, chosen by a hash of their names."""
    size: int = Field(default=224, ge=8, le=2048)
    """Height and width, in pixels, of the images that the model gets."""
    eval_crop: float = Field(default=0.875, gt=0, le=1)
    """Centre crop of held-out images, as a fraction of the shorter side after scaling."""
    crop_scale: Annotated[tuple[Share, Share], BeforeValidator(comma_list)] = (0.08, 1.0)
    """Minimum and maximum area of the random crop as a fraction; `1, 1`: a centre crop."""
    flip: Share = 0.5
    """Probability of mirroring an image, 0-1."""
    randaugment: Annotated[RandAugment | None, BeforeValidator(mapping)] = None
    """Random operations on colours and geometry (RandAugment); none: no such operations."""
    mixup: float = Field(default=0.0, ge=0)
    """Alpha of mixup; 0: no mixup. Images are mixed within a micro-batch."""
    cutmix: float = Field(default=0.0, ge=0)
    """Alpha of CutMix; 0: no CutMix. With mixup set too, each pair gets one of the two."""
    mean: Three = (0.485, 0.456, 0.406)
    """Mean of red, green and blue, 0-1, subtracted from the pixels."""
    std: Deviations = (0.229, 0.224, 0.225)
    """Standard deviation of red, green and blue, by which the pixels are divided."""
    count: OptionalInt = Field(default=None, ge=1)
    """Number of training images, for a plan made before the run has counted them."""
    bad_images: Share = 0.01
    """Maximum fraction of files, 0-1, that are damaged or no images; more stop the run, fewer are
    counted, named and skipped."""
    workers: OptionalInt = Field(default=None, ge=1)
    """Number of Ray Data tasks that read, decode and augment; none: the CPUs left free."""


class ImageTrain(TrainSection):
    images_per_step: int = Field(default=256, ge=1)
    """Global batch: images per optimizer step, over all workers."""
    micro_batch: int = Field(default=64, ge=1)
    """Images per forward and backward pass on one worker; also the batch of batch-norm."""
    optimizer: ImageOptimizerName = "sgd"
    """lars: SGD with a learning rate per layer, for large batches."""
    lr: float = Field(default=0.1, gt=0)
    """Peak learning rate."""
    min_lr: Share = 0.0
    """Final learning rate of the cosine, linear and wsd schedules, as a fraction of lr, 0-1."""
    momentum: Beta = 0.9
    """Momentum of sgd (Nesterov's) and lars."""
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(comma_list)] = (0.9, 0.999)
    """AdamW's beta1 and beta2, the decay rates of its two moments."""
    weight_decay: float = Field(default=5e-5, ge=0)
    """Weight decay of kernels and matrices (not norms or biases); decoupled in adamw only."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the target, 0-1, spread over the classes; not in the displayed loss."""
    ema: float = Field(default=0.0, ge=0, lt=1)
    """Decay per step of the moving average of the weights; the average is evaluated and exported.
    0: no average."""
    grad_clip: OptionalFloat = Field(default=None, gt=0)
    """Clip the gradient to this global norm; none: do not clip."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of convolutions and matmuls (autocast); weights and sums stay fp32. auto: bf16 on
    GPUs, fp32 on CPUs."""
    channels_last: bool = True
    """Use the channels-last memory format, which is fast on tensor cores and in oneDNN."""
    compile: bool = False
    """Compile the model with torch.compile."""


class ImageParallel(Section):
    strategy: ImageStrategy = "ddp"
    """ddp: every worker holds the whole model. Others: FSDP's strategies, named as in PyTorch."""
    replicas: OptionalInt = Field(default=None, ge=1)
    """Number of model replicas for hybrid_shard; none: one per node."""
    sync_batch_norm: bool = False
    """true: compute batch-norm statistics over the micro-batches of all workers, so that they
    depend on the number of workers. false: over each micro-batch, so that they do not."""


class VisionConfig(RunConfig):
    """A run that trains an image classifier."""

    MODULE: ClassVar[str] = "rayapp.vision"
    PATH_FIELDS: ClassVar[tuple[str, ...]] = ("data.path", "data.eval_path", "model.path")
    RESUME_SAFE = (*RunConfig.RESUME_SAFE, "data.count")
    ABSENT: ClassVar[Mapping[str, str]] = {
        "model.init_from": "a classifier starts from an exported folder, which contains the "
        "batch-norm statistics and the averaged weights. Set model.path=RUN/model",
    }

    task: Literal["vision"] = "vision"
    """Kind of the model to train."""
    model: ImageModel = ImageModel()
    data: ImageDataConfig = ImageDataConfig()
    train: ImageTrain = ImageTrain()
    parallel: ImageParallel = ImageParallel()

    @property
    def evaluated(self) -> dict[str, bool]:
        """The figures of an evaluation by name, each with whether a higher one is better."""
        return super().evaluated | {"eval_top1": True, "eval_top5": True}

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
                f"data.crop_scale={least}, {most} is not a range: the minimum must be above 0 "
                "and not above the maximum. Set e.g. data.crop_scale=0.08,1",
            )

    @property
    def rows_per_step(self) -> int:
        """Images of one optimizer step, over all workers."""
        return self.train.images_per_step

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches in one optimizer step, over all workers."""
        return self.train.images_per_step // self.train.micro_batch
