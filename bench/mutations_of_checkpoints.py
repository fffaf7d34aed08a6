"""Faults in what a checkpoint holds, in how it is saved, and in what a resume makes of it."""

from __future__ import annotations

from mutated import Mutation

RANK = "rayapp/train/rank.py"
STATE, SAVER, MARKER, STAGING = (
    f"rayapp/train/checkpoint/{name}.py" for name in ("state", "saver", "marker", "staging")
)
COMMIT = "rayapp/train/checkpoint/commit.py"
OF_CHECKPOINT = "tests/test_train_checkpoint.py"
OF_STATE = "tests/test_train_state.py"

CHECKPOINTS = (
    # ---- What a checkpoint holds, and a resume restores
    Mutation(
        "random-numbers-anew",
        STATE,
        '    if "rng" in wanted:\n',
        "    if False:\n",
        OF_STATE,
    ),
    Mutation(
        "resume-a-step-later",
        STATE,
        "return checkpoint.step, checkpoint.state",
        "return checkpoint.step + 1, checkpoint.state",
        OF_STATE,
    ),
    Mutation(
        "losses-not-saved",
        STATE,
        "        **loop,\n",
        "",
        OF_STATE,
    ),
    Mutation(
        "skips-not-restored",
        "rayapp/train/engine.py",
        'state.get("skips", 0)',
        "0",
        OF_STATE,
    ),
    Mutation(
        "resume-on-other-data",
        STATE,
        "if cursor.fingerprint != spec.data.fingerprint:",
        "if False:",
        OF_STATE,
    ),
    Mutation(
        "damage-is-not-remembered",
        STATE,
        "marker.refuse(storage, name, str(damage).partition(NOT_LOADED)[2])\n",
        "pass\n",
        OF_STATE,
    ),
    Mutation(
        "buffers-not-copied",
        STATE,
        "            weights[name] = value.clone()\n",
        "            pass\n",
        OF_STATE,
    ),
    Mutation(
        "checkpoint-before-its-metrics",
        RANK,
        "before_commit=log.wait_stored if log and settings.asynchronous else lambda step: None,",
        "before_commit=lambda step: None,",
        OF_STATE,
    ),
    # ---- How it is saved
    Mutation(
        "settle-waits-for-nothing",
        SAVER,
        "        self._copied.result()\n",
        "        return\n",
        OF_CHECKPOINT,
    ),
    Mutation(
        "copied-in-the-old-dtype",
        STAGING,
        "return type(leaf), type(local), local.shape, local.dtype",
        "return type(leaf), type(local), local.shape",
        OF_CHECKPOINT,
    ),
    Mutation(
        "commit-of-rank-0-alone",
        SAVER,
        "            self._on_rank_0(lambda: self._commit(name, step, state, parts or []))\n",
        "            if self.rank == 0:\n"
        "                self._commit(name, step, state, parts or [])\n",
        OF_CHECKPOINT,
    ),
    Mutation(
        "commit-does-not-wait",
        SAVER,
        "        self.before_commit(step)\n",
        "",
        OF_CHECKPOINT,
    ),
    Mutation(
        "folder-taken-twice",
        COMMIT,
        'if folder.create(f"{name}/{marker.STATE}", state):',
        'if folder.write(f"{name}/{marker.STATE}", state) is None:',
        OF_CHECKPOINT,
    ),
    Mutation(
        "sweep-leaves-the-marker",
        COMMIT,
        '        folder.delete(f"{name}/{marker.MARKER}")\n',
        "",
        OF_CHECKPOINT,
    ),
    Mutation(
        "damaged-ones-are-kept",
        COMMIT,
        "if kept < keep and _is_usable(folder, name, run_id):",
        "if kept < keep:",
        OF_CHECKPOINT,
    ),
    Mutation(
        "keeps-one-too-many",
        COMMIT,
        "claim_run_id(run), 1",
        "claim_run_id(run), 0",
        OF_CHECKPOINT,
    ),
    Mutation(
        "failed-saves-never-forgotten",
        SAVER,
        "self.saved_step, self._failures, self._error = step, 0, None",
        "self.saved_step, self._error = step, None",
        OF_CHECKPOINT,
    ),
    # ---- How it is read
    Mutation(
        "size-unchecked",
        MARKER,
        "if sizes[each] != file.size:",
        "if False:",
        OF_CHECKPOINT,
    ),
    Mutation(
        "checksum-unchecked",
        MARKER,
        "if hashlib.sha256(block).hexdigest() != self._file.sha256[number]:",
        "if False:",
        OF_CHECKPOINT,
    ),
    Mutation(
        "marker-of-another-run",
        MARKER,
        "if marked.run != run:",
        "if False:",
        OF_CHECKPOINT,
    ),
    Mutation(
        "tenth-attempt-before-second",
        MARKER,
        "sorted(ours, key=ours.__getitem__, reverse=True)",
        "sorted(ours, reverse=True)",
        OF_CHECKPOINT,
    ),
    Mutation(
        "begun-anew-where-all-is-damaged",
        MARKER,
        "        if lost:\n",
        "        if False:\n",
        OF_CHECKPOINT,
    ),
    Mutation(
        "no-answer-is-damage",
        MARKER,
        "        except CheckpointError as problem:\n            skipped.append(",
        "        except Exception as problem:\n            skipped.append(",
        OF_CHECKPOINT,
    ),
)
