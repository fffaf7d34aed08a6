"""Distributed checkpoints that exist if and only if their marker does.

    checkpointer = saver.Checkpointer(run_storage, keep=2, asynchronous=True)
    checkpointer.save(step, tensors, state)                 # returns once the copy is made
    found, skipped = marker.resume_point(run_storage)       # newest that is there; why not newer
    loader.load(run_storage, found.name, tensors)

Rank 0 takes a fresh folder `checkpoints/step-00000500/` by creating `state.json` in it. Each rank
writes its own shards straight there with torch.distributed.checkpoint, from a copy in host memory
and in a thread, while training goes on. When all ranks are done, rank 0 writes the marker
`COMMITTED`: every file with its size and the SHA-256 of each block of it. A folder without a valid
marker is nothing: it is skipped, named, and swept away after a later commit. So is a checkpoint
whose marker has another run's id than `RUN_ID` in the run's folder. `latest` checks all sizes and
the small files; `load` checks each block that it reads, so that every rank reads no more
than its own part, and once. What fails on one rank fails on all.
"""
