"""Labelled images: find and index them once; read, decode and augment in the run's order.

images = prepare(recipe, storage / ".prepared")          # every file is decoded once
dataset = stream(images, transform, order, first_step, world) # Ray Data tasks decode and augment
"""

from rayapp.data.images.augment import Transform
from rayapp.data.images.batches import StepImages, held_out_batches, local_steps, step_images
from rayapp.data.images.index import ImageRecipe, Images, load
from rayapp.data.images.indexing import prepare
from rayapp.data.images.sources import ImageSource, find

__all__ = [
    "ImageRecipe",
    "ImageSource",
    "Images",
    "StepImages",
    "Transform",
    "find",
    "held_out_batches",
    "load",
    "local_steps",
    "prepare",
    "step_images",
]
