"""Faults in the training loop, in its loss and its optimizers."""

from __future__ import annotations

from mutated import Mutation

LOOP, LOSS, OPTIMIZER = (f"rayapp/train/{name}.py" for name in ("loop", "loss", "optimizer"))
SYNC, SPIKES, SCHEDULE = (
    f"rayapp/train/{name}.py" for name in ("step_sync", "loss_spikes", "schedule")
)
OF_LOOP = "tests/test_train_loop.py"
WHOLE_RUN = f"{OF_LOOP} -k plain_loop"
ONE_STEP = f"{OF_LOOP} -k 'who_leaves or agreed or in_a_row or behind or reads or drops or clipped'"

TRAINING = (
    # ---- The step
    Mutation(
        "loss-by-own-tokens",
        LOOP,
        "(objective / agreement.wait().weight).backward()",
        "(objective / max(dist.get_world_size() * batch.counts().weight, 1)).backward()",
        WHOLE_RUN,
    ),
    Mutation(
        "loop-no-settle",
        LOOP,
        "        waited_s = settle(engine)\n",
        "        waited_s = 0.0\n",
        ONE_STEP,
    ),
    Mutation(
        "clip-by-own-norm",
        OPTIMIZER,
        "        dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))\n",
        "",
        WHOLE_RUN,
    ),
    Mutation(
        "clip-by-value",
        OPTIMIZER,
        "torch._foreach_mul_(shards, limit / (norm + CLIP_EPS))",
        "torch._foreach_clamp_max_(shards, limit)",
        ONE_STEP,
    ),
    Mutation(
        "bad-gradient-stays",
        LOOP,
        "                optimizer.step()\n        for optimizer in engine.optimizers:\n"
        "            optimizer.zero_grad(set_to_none=True)\n",
        "                optimizer.step()\n                optimizer.zero_grad(set_to_none=True)\n",
        ONE_STEP,
    ),
    Mutation(
        "infinite-gradient-is-taken",
        LOOP,
        "finite = math.isfinite(loss) and math.isfinite(grad_norm)",
        "finite = math.isfinite(loss)",
        ONE_STEP,
    ),
    Mutation(
        "skips-never-forgotten",
        LOOP,
        "            engine.skips = 0\n",
        "",
        ONE_STEP,
    ),
    Mutation(
        "rate-of-next-step",
        LOOP,
        "set_lr(engine.optimizers, engine.lr_at(batch.step))",
        "set_lr(engine.optimizers, engine.lr_at(batch.step + 1))",
        WHOLE_RUN,
    ),
    Mutation(
        "leave-without-save",
        LOOP,
        "saved = bool(totals.save or leave or best)",
        "saved = bool(totals.save or best)",
        ONE_STEP,
    ),
    Mutation(
        "leave-alone",
        LOOP,
        "leave = leave_of(engine, totals)",
        "leave = engine.leave_due() or leave_of(engine, totals)",
        ONE_STEP,
    ),
    Mutation(
        "dropout-ends-with-evaluation",
        LOOP,
        "        engine.model.train()\n",
        "        pass\n",
        ONE_STEP,
    ),
    Mutation(
        "held-out-of-one-rank",
        LOOP,
        "    dist.all_reduce(whole, group=engine.control)\n",
        "",
        WHOLE_RUN,
    ),
    # ---- What the ranks agree on, and when they save
    Mutation(
        "digest-loses-a-half",
        SYNC,
        "order.combine([high << 32, low])",
        "order.combine([high, low])",
        "tests/test_train_step_sync.py",
    ),
    Mutation(
        "no-target-divides-by-zero",
        SYNC,
        "return max(self.counts.weight, 1)",
        "return self.counts.weight",
        "tests/test_train_step_sync.py",
    ),
    Mutation(
        "last-step-unsaved",
        SCHEDULE,
        "due = step == self.num_steps or bool(every_steps and step % every_steps == 0)",
        "due = bool(every_steps and step % every_steps == 0)",
        "tests/test_train_schedule.py",
    ),
    Mutation(
        "clock-of-saves-stands",
        SCHEDULE,
        "        if due:\n            self.saved_at = time.monotonic()\n",
        "",
        "tests/test_train_schedule.py",
    ),
    Mutation(
        "room-seen-once",
        SCHEDULE,
        "if before and fitted:",
        "if fitted:",
        "tests/test_train_schedule.py",
    ),
    # ---- Loss, optimizers, spikes
    Mutation(
        "z-loss-half-a-slope",
        LOSS,
        "slope, share = 1 + 2 * z_loss * log_z,",
        "slope, share = 1 + z_loss * log_z,",
        "tests/test_train_loss.py",
    ),
    Mutation(
        "z-loss-of-padding",
        LOSS,
        "added += torch.where(valid, extra, 0).sum()",
        "added += extra.sum()",
        "tests/test_train_loss.py",
    ),
    Mutation(
        "softmax-in-bf16",
        LOSS,
        "log_p = torch.log_softmax(logits.to(sums), 1)",
        "log_p = torch.log_softmax(logits, 1).to(sums)",
        "tests/test_train_loss.py",
    ),
    Mutation(
        "padding-trains-the-head",
        LOSS,
        "_add_product(grad_weight, gradient.T, hidden[part] * valid)",
        "_add_product(grad_weight, gradient.T, hidden[part])",
        "tests/test_train_loss.py",
    ),
    Mutation(
        "first-step-at-rate-zero",
        OPTIMIZER,
        "return peak * (step + 1) / warmup_steps",
        "return peak * step / warmup_steps",
        "tests/test_train_optimizer.py",
    ),
    Mutation(
        "decay-begins-early",
        OPTIMIZER,
        "start = max(warmup_steps, num_steps - max(1, round(decay * num_steps)))",
        "start = max(warmup_steps, max(1, round(decay * num_steps)))",
        "tests/test_train_optimizer.py",
    ),
    Mutation(
        "embeddings-decay",
        OPTIMIZER,
        "matrix = parameter.ndim >= 2 and id(parameter) not in embeddings",
        "matrix = parameter.ndim >= 2",
        "tests/test_train_optimizer.py",
    ),
    Mutation(
        "rate-of-the-first-group",
        OPTIMIZER,
        "        for group in optimizer.param_groups:\n            rate = ",
        "        for group in optimizer.param_groups[:1]:\n            rate = ",
        "tests/test_train_optimizer.py",
    ),
    Mutation(
        "spikes-raise-the-threshold",
        SPIKES,
        "            self.in_a_row.append(loss)\n",
        "            self.in_a_row.append(loss)\n            self.losses.append(loss)\n",
        "tests/test_train_loss_spikes.py",
    ),
    Mutation(
        "diverging-takes-level-after-level",
        SPIKES,
        "if len(self.in_a_row) < LEVEL or self.at_level < RECENT:",
        "if len(self.in_a_row) < LEVEL:",
        "tests/test_train_loss_spikes.py",
    ),
    Mutation(
        "evaluation-holds-up-the-save",
        LOOP,
        "if engine.interruptible and (leave := leave_now(engine)):",
        "if False and (leave := leave_now(engine)):",
        "tests/test_vision_classifier_trainer.py -k by_hand",
    ),
)
