"""Labelled images: find and index them once; read, decode and augment in the run's order.

images = indexing.prepare(recipe, storage / ".prepared")    # every file is decoded once
dataset = batches.stream(images, look, order, first_step, world)   # by Ray Data tasks
"""
