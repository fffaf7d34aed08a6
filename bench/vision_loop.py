"""rayapp's training loop for images against bare DDP, on one of two ranks; vision.py starts it."""

import json
import time
from functools import partial

from vision import IMAGES_PER_STEP, LOOPS, ROOT, WARM_UP_STEPS

from rayapp.config import VisionConfig, load


def loops(rank: int, folder: str, rounds: int, steps: int, model: str) -> None:
    """Run both loops in turn on one of two ranks; rank 0 prints images/s of each round."""
    import torch
    import torch.distributed as dist

    from rayapp.data.images.batches import local_steps
    from rayapp.data.images.image_sources import find
    from rayapp.data.images.index import ImageRecipe
    from rayapp.data.images.index import load as load_index
    from rayapp.storage import open_storage
    from rayapp.train.spec import ImageSpec
    from rayapp.vision.classifier_run import order_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{model}", rank=rank, world_size=2)
    values = settings(folder, steps, model)
    config = load(str(ROOT / "configs/vision_cpu.yaml"), values, VisionConfig)
    recipe = ImageRecipe(find(f"{folder}/data"), None, 0.0)
    images = load_index(open_storage(f"{folder}/index") / recipe.fingerprint)
    assert images is not None
    order = order_of(config, images)
    transform = config.data
    batches = list(local_steps(images.rows("train"), transform, order, rank, 2, 0))
    for number in range(rounds + 1):  # the first of each is thrown away
        spec = ImageSpec("rayapp.vision", config, images, order, f"{folder}/{model}-{number}")
        arms = {
            "rayapp": partial(our_loop, spec, batches),
            "bare": partial(bare_loop, config, batches),
        }
        rates = {name: arms[name]() for name in (list(arms) if number % 2 else reversed(arms))}
        if rank == 0 and number:
            print(json.dumps(rates), flush=True)
    import gc

    gc.collect()  # a gloo thread that frees tensors while Python shuts down aborts the process
    dist.destroy_process_group()


def settings(folder: str, steps: int, model: str) -> dict[str, str]:
    """Return the default job without what a bare loop lacks: average, held-out images, files."""
    values = {"model.path": model, "data.size": str(LOOPS[model])}
    values |= {"run.storage": folder, "run.trackers": "none", "data.eval_fraction": "0"}
    values |= {"train.max_steps": str(steps), "train.epochs": "none", "train.ema": "0"}
    values |= {"checkpoint.every_steps": "none", "checkpoint.every_s": "none"}
    return values | {"checkpoint.export": "false", "train.precision": "fp32"}


def our_loop(spec: object, batches: list) -> float:
    """Train with rayapp's own code, in a fresh folder; return images/s."""
    import torch

    from rayapp.train.rank import RankContext, train_rank

    done: list[float] = []
    device = torch.device("cpu")
    context = RankContext(
        device,
        lambda first: iter(batches),
        on_record=lambda _: done.append(time.perf_counter()),
    )
    train_rank(spec, context)
    # The last step saves.
    return (len(done) - 1 - WARM_UP_STEPS) * IMAGES_PER_STEP / (done[-2] - done[WARM_UP_STEPS - 1])


def bare_loop(config: VisionConfig, batches: list) -> float:
    """Train the same model with DDP and nothing around it; return images/s."""
    import torch
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoModelForImageClassification

    from rayapp.model.classifier import shape_of_classifier

    shape, _ = shape_of_classifier(config.model.path, {}, tuple("abcdefghij"))
    model = AutoModelForImageClassification.from_config(shape)
    model = model.to(memory_format=torch.channels_last).train()
    ddp = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
    train = config.train
    optimizer = torch.optim.SGD(
        ddp.parameters(), train.lr, train.momentum, weight_decay=train.weight_decay, nesterov=True
    )
    mean, std = (torch.tensor(v).view(3, 1, 1) * 255 for v in (config.data.mean, config.data.std))
    done = []
    for batch in batches:
        (pixels,), (labels,) = batch.images, batch.labels
        values = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() - mean) / std
        logits = ddp(values.contiguous(memory_format=torch.channels_last)).logits
        F.cross_entropy(logits, torch.from_numpy(labels).long()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done.append(time.perf_counter())
    return (len(done) - 1 - WARM_UP_STEPS) * IMAGES_PER_STEP / (done[-2] - done[WARM_UP_STEPS - 1])
