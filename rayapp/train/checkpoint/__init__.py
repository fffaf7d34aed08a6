"""Distributed checkpoints; a checkpoint exists if and only if its marker file does.

    checkpointer = saver.Checkpointer(run_storage, keep=2, asynchronous=True)
    checkpointer.save(step, tensors, state)                 # returns once the copy is made
    found, skipped = marker.resume_point(run_storage)       # newest that is there; why not newer
    state.load_checkpoint(run_storage, found.name, tensors)

Rank 0 claims a new folder `checkpoints/step-00000500/` by creating `state.json` in it. Each rank
copies its shards to host memory, and a thread writes them to the folder with
torch.distributed.checkpoint while training goes on. When all ranks are done, rank 0 writes the
marker `COMMITTED`, which lists every file with its size and the SHA-256 of each of its blocks.

A resume skips a folder without a valid marker and says why; a later commit deletes it. The same
goes for a checkpoint whose marker has another run's id than the file `RUN_ID` of the run's folder.
`latest` checks the sizes of all files and the content of the small ones. `load_checkpoint` checks
each block that it reads, so that a rank reads only its own part, and only once. A failure on one
rank is a failure on all.
"""
