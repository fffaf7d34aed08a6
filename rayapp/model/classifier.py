"""Build, distribute and fill an image classifier of transformers, by any strategy.

    classifier = build_classifier(shape, look...)      # meta device: shapes only
    model = distribute(classifier, "ddp", source, seed, device)
    objective, loss, logits = model(images, labels, others, shares)

`Classifier` takes uint8 images from the data pipeline and returns sums over the micro-batch.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageClassification, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

from rayapp.config.text import shown
from rayapp.model.build import Wrapper
from rayapp.model.init import draw_weights, fill, init_weights, local_part, local_slice
from rayapp.model.sharding import device_mesh, shard
from rayapp.model.source import ModelSource, resolve
from rayapp.model.weights import load_weights, misfits_of
from rayapp.presets import IMAGE_PRESETS
from rayapp.storage import Storage

DERIVED = ("out_features", "out_indices", "stage_names")  # from other fields: computed anew


class Classifier(Wrapper):
    """Wrap a Hugging Face image classifier: its forward takes uint8 images and returns sums."""

    def __init__(
        self,
        hf: PreTrainedModel,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
        label_smoothing: float = 0.0,
        compute: torch.dtype = torch.float32,
        channels_last: bool = True,
    ) -> None:
        super().__init__()
        self.hf = hf
        self.source_dtype = torch.float32
        self.offloaded = False
        self.label_smoothing, self.compute = label_smoothing, compute
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        # Whether an empty micro-batch can run. Convolutional models must take it as it is, since a
        # blank image would enter batch-norm's statistics; attention models cannot reshape it.
        self.takes_none = any(isinstance(module, nn.BatchNorm2d) for module in hf.modules())
        self._mean, self._std = tuple(mean), tuple(std)
        self._scale: tuple[Tensor, Tensor] | None = None  # per channel, on the device

    def forward(
        self, images: Tensor, labels: Tensor, others: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return sums over the images of the objective and of the cross-entropy, and the logits.

        Differentiate the objective: the cross-entropy with label smoothing. An image's target is
        its label with weight `shares`, and the class in `others` with weight 1 - `shares`.

        Shapes: images uint8 [b, S, S, 3], labels, others int64 [b], shares float32 [b] -> two
        scalars and [b, classes].
        """
        blank = len(images) == 0 and not self.takes_none
        pixels = images.new_zeros(1, *images.shape[1:]) if blank else images
        with torch.autocast(images.device.type, self.compute, enabled=self.mixed):
            logits = self.hf(self.normal(pixels)).logits
        if blank:  # zero, but in the graph, so that all ranks join the collectives
            nothing = (logits * 0.0).float().sum()
            return nothing, nothing.detach(), logits[:0]
        scores = torch.log_softmax(logits.float(), -1)
        own, other = (-scores.gather(1, c[:, None])[:, 0] for c in (labels, others))
        loss = (shares * own + (1.0 - shares) * other).sum()
        smooth = self.label_smoothing
        objective = (1.0 - smooth) * loss - smooth * scores.mean(-1).sum() if smooth else loss
        return objective, loss.detach(), logits

    @property
    def mixed(self) -> bool:
        """Whether convolutions and matmuls run in a lower precision than fp32."""
        return self.compute != torch.float32

    def normal(self, images: Tensor) -> Tensor:
        """Normalise uint8 [b, S, S, 3] to the model's fp32 [b, 3, S, S], by mean and deviation."""
        if self._scale is None or self._scale[0].device != images.device:
            factors = [1.0 / (255.0 * std) for std in self._std]
            shifts = [mean / std for mean, std in zip(self._mean, self._std, strict=True)]
            made = [torch.tensor(v, device=images.device).view(3, 1, 1) for v in (factors, shifts)]
            self._scale = made[0], made[1]
        factor, shift = self._scale
        pixels = images.permute(0, 3, 1, 2).float() * factor - shift
        return pixels.contiguous(memory_format=self.layout)


def shape_of_classifier(path: str, overrides: Mapping[str, object], classes: Sequence[str]) -> Any:
    """Return (the model's config with these classes, its source or None for a preset).

    Raises: ValueError: it is no image classifier that transformers knows.
    """
    preset, source = IMAGE_PRESETS.get(path), None
    if preset is not None:
        kind, given = CONFIG_MAPPING[preset.model_type], preset.fields
    else:
        try:
            source = resolve(path)
        except ValueError as error:  # it names the presets of language models
            text = str(error).split(" Set an existing folder")[0]
            fix = f"Set an existing folder, org/name, or one of: {', '.join(IMAGE_PRESETS)}"
            raise ValueError(f"{text} {fix}") from None
        kind, given = type(source.config), source.config.to_dict()
    if kind not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"model.path={path} is no image classifier: transformers has none of model_type "
            f"{kind.model_type}. Set e.g. model.path=resnet50"
        )
    if source is not None and not overrides:
        shape = copy.deepcopy(source.config)
    else:
        shape = _shape_with(kind, given, overrides)
    if classes:
        shape.id2label = dict(enumerate(classes))
        shape.label2id = {name: number for number, name in enumerate(classes)}
    return shape, source


def _shape_with(kind: Any, given: Mapping[str, object], overrides: Mapping[str, object]) -> Any:
    known = kind()
    unknown = [name for name in overrides if not hasattr(known, name)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known.to_dict(), n=1)
        hint = f"Did you mean {near[0]}?" if near else "Correct the name, or leave it out"
        raise ValueError(
            f"model.overrides={shown(overrides)} is unknown in {unknown[0]}: the config.json of "
            f"{kind.model_type} has no such field. {hint}"
        )
    given = {name: value for name, value in given.items() if name not in DERIVED}
    try:
        return kind.from_dict({**given, **overrides})
    except (StrictDataclassError, TypeError, ValueError) as error:
        why = str(error).splitlines()[-1].strip()
        raise ValueError(
            f"model.overrides={shown(overrides)} is not a shape of {kind.model_type}: {why}. "
            "Correct its fields"
        ) from error


def build_classifier(shape: PretrainedConfig, **options: Any) -> Classifier:
    """Build the model on the meta device, without memory; `options` are those of `Classifier`."""
    with torch.device("meta"):
        hf = AutoModelForImageClassification.from_config(
            copy.deepcopy(shape), dtype=torch.float32, trust_remote_code=False
        )
    return Classifier(hf, **options)


def classifier_problems(path: str, source: ModelSource | None, shape: Any) -> list[str]:
    """Return the problems that prevent building or filling the model; reads headers only."""
    try:
        classifier = build_classifier(shape)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        return [f"model.path={path} cannot be built: {error!r}. Correct model.overrides"]
    return [] if source is None else misfits_of(classifier.hf, source)


def last_layer(shape: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the parameters whose shapes follow from the number of classes, by name."""
    built = []
    for more in (0, 1):
        other = copy.deepcopy(shape)
        other.num_labels = (shape.num_labels or 0) + more
        built.append(build_classifier(other).hf)
    first, second = (dict(hf.named_parameters()) for hf in built)
    return {n: tuple(p.shape) for n, p in first.items() if p.shape != second[n].shape}


def class_rows(shape: PretrainedConfig, source: ModelSource) -> list[int | None]:
    """Return each class's row in the source's last layer; None if no class there is named so.

    Names are compared in Unicode's composed form (NFC). A name that two classes of the source have,
    such as ImageNet's crane, is none of theirs.
    """
    configs: tuple[Any, Any] = (shape, source.config)
    own, theirs = (
        [unicodedata.normalize("NFC", str(each.id2label[n])) for n in range(each.num_labels)]
        for each in configs
    )
    if own == theirs:
        return [*range(len(own))]
    rows, counts = {name: row for row, name in enumerate(theirs)}, Counter(theirs)
    return [rows[name] if counts[name] == 1 else None for name in own]


def forward_flops(shape: PretrainedConfig, size: int) -> float:
    """Count the FLOPs of one image's forward pass, on meta tensors."""
    classifier = build_classifier(shape).eval()
    with FlopCounterMode(display=False) as counter:
        classifier.hf(torch.empty(1, 3, size, size, device="meta"))
    return float(counter.get_total_flops())


def distribute(
    classifier: Classifier,
    strategy: str,
    source: ModelSource | None,
    seed: int,
    device: torch.device,
    replicas: int = 1,
) -> nn.Module:
    """Shard or wrap the model, fill it, and make its gradients sums over all ranks.

    It is filled from `source`, or drawn from `seed` if that is None. In the last layer, classes
    that the source has under the same name get its rows, and others are drawn.
    """
    if strategy != "ddp":
        mesh = device_mesh(device.type, strategy=strategy, replicas=replicas)
        shard(classifier, mesh, strategy=strategy)
    if source is None:
        init_weights(classifier, seed, device)
        _draw_convolutions(classifier.hf, seed)
    else:
        rows = class_rows(classifier.hf.config, source)
        alike = rows == [*range(source.config.num_labels or 0)]
        names = () if alike else last_layer(classifier.hf.config)
        load_weights(classifier, source, device, drawn=names)
        if not alike:
            head = {n: p for n, p in classifier.hf.named_parameters() if n in names}
            draw_weights(classifier.hf, seed, head)
            _move_rows(head, source, rows)
    if classifier.layout is torch.channels_last:
        _lay_out(classifier)
    if strategy != "ddp":
        return classifier
    where = [device] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        classifier, device_ids=where, forward_sync_buffers=False, gradient_as_bucket_view=True
    )
    wrapped.register_comm_hook(None, lambda state, bucket: _summed(bucket))  # it checks types
    return wrapped


@torch.no_grad()
def _move_rows(
    head: Mapping[str, nn.Parameter], source: ModelSource, rows: Sequence[int | None]
) -> None:
    """Copy rows of the source's last layer, by class, into this rank's part of the model's."""
    theirs = build_classifier(source.config)
    load_weights(theirs, source, "cpu", drawn=theirs.hf.state_dict().keys() - head.keys())
    for name, parameter in head.items():
        values, (first, *_) = theirs.hf.get_parameter(name), local_slice(parameter)[0]
        assert len(parameter) == len(rows), name
        for place, own in enumerate(local_part(parameter)):
            if (row := rows[first + place]) is not None:
                own.copy_(values[row])


@torch.no_grad()
def _lay_out(classifier: Classifier) -> None:
    """Store convolution kernels in channels-last layout, like their inputs."""
    for module in classifier.modules():
        if isinstance(module, nn.Conv2d) and not isinstance(module.weight, DTensor):
            # Not contiguous(), which leaves a 1 x 1 kernel as it is: its gradient's layout would
            # differ from that of DDP's bucket.
            laid_out = torch.empty_like(module.weight, memory_format=torch.channels_last)
            module.weight.data = laid_out.copy_(module.weight)


def _summed(bucket: Any) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients over ranks; the loss is already divided by the global batch."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


@torch.no_grad()
def _draw_convolutions(hf: PreTrainedModel, seed: int) -> None:
    """Draw convolutions as He et al. 2015 (arXiv 1502.01852); set batch-norms to scale 1, shift 0.

    transformers draws EfficientNet's convolutions, and its batch-norms' scales, with a standard
    deviation of 0.02, from which the model does not train. Models without batch-norm are unchanged.
    """
    if not any(isinstance(module, nn.BatchNorm2d) for module in hf.modules()):
        return
    for name, module in hf.named_modules():
        if isinstance(module, nn.Conv2d):
            shape = module.weight.shape
            fan_out = shape[0] * shape[2] * shape[3] // module.groups
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            draw = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            values = torch.randn(shape, generator=draw) * (2.0 / fan_out) ** 0.5
            fill(module.weight, values)
        elif isinstance(module, nn.BatchNorm2d) and module.weight is not None:
            fill(module.weight, torch.ones(module.weight.shape))
            fill(module.bias, torch.zeros(module.bias.shape))


def write_processor(
    storage: Storage, size: int, crop: float, mean: Sequence[float], std: Sequence[float]
) -> None:
    """Write transformers' preprocessor_config.json: how to scale, crop and normalise images.

    CLIP's processor takes both sizes as given. Those that take a share, such as ConvNeXT's, squeeze
    the whole image from size 384 on.
    """
    values = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": round(size / crop)},
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
        "resample": 2,  # bilinear
    }
    storage.write("preprocessor_config.json", json.dumps(values, indent=1).encode())
