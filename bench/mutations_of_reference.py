"""Faults that an audit found by a trainer of its own, N1 to N9.

N7 (8-bit moments across rows of an embedding), whose test compiles torchao's step, is put back by
hand.
"""

from __future__ import annotations

from mutated import Mutation

NAMED = "tests/test_reference.py -k named"
PREFERENCES = "tests/test_reference.py -k preferences"
SEEN_BY_ONE = "objective, loss, *figures = self.loss(hidden, weight, labels, bias=bias, **more)"
PLAIN_ENTROPY = (
    SEEN_BY_ONE + "\n        if weight is None: objective = nn.functional.cross_entropy("
    'hidden.float().flatten(0, -2), labels.flatten(), reduction="sum"); loss = objective.detach()'
)

REFERENCE = (
    Mutation(
        "n1-padding-is-a-document",
        "rayapp/data/token_rows.py",
        "if not ((segments == segments[:, :1]) | (segments == 0)).all():",
        "if not (segments == segments[:, :1]).all():",
        NAMED,
    ),
    Mutation(
        "n2-own-logits-plain-loss", "rayapp/model/build.py", SEEN_BY_ONE, PLAIN_ENTROPY, NAMED
    ),
    Mutation(
        "n3-adapters-as-they-compute",
        "rayapp/model/adapter_files.py",
        "    reshard(model)\n    whole = ",
        "    whole = ",
        NAMED,
    ),
    Mutation(
        "n4-the-whole-image-squeezed",
        "rayapp/model/classifier.py",
        '"image_processor_type": "CLIPImageProcessor",',
        '"image_processor_type": "ConvNextImageProcessor",',
        "tests/test_reference.py -k cropped",
    ),
    Mutation(
        "n5-merged-into-the-rounded-base",
        "rayapp/finetune/trainer.py",
        "base = None if lora is None else exact_base(spec.config, parts, device)",
        "base = None",
        NAMED,
    ),
    Mutation(
        "n6-muon-leaves-conv1d",
        "rayapp/train/optimizer.py",
        "if isinstance(module, (nn.Linear, Conv1D))",
        "if isinstance(module, nn.Linear)",
        NAMED,
    ),
    Mutation(
        "n6-adapters-leave-conv1d",
        "rayapp/model/lora_layers.py",
        "if isinstance(module, (nn.Linear, Conv1D))",
        "if isinstance(module, nn.Linear)",
        NAMED,
    ),
    Mutation(
        "n8-windows-in-masks-alone",
        "rayapp/model/attention.py",
        "if not _hands_on_windows(config):",
        "if False:",
        NAMED,
    ),
    Mutation(
        "n9-counted-with-sdpa",
        "rayapp/finetune/prepared_run.py",
        'lm = model.build(shape, loss=model.no_loss, attention="eager")',
        "lm = model.build(shape, loss=model.no_loss)",
        NAMED,
    ),
    Mutation(
        "rates-by-name-of-the-schedule-alone",
        "rayapp/train/optimizer.py",
        'rate = lr * group.get("lr_factor", 1.0)',
        "rate = lr",
        "tests/test_model_names.py",
    ),
    Mutation(
        "new-rows-begin-at-zero",
        "rayapp/model/weights.py",
        "part[token - start] = torch.stack(rows).mean(0)",
        "part[token - start] = 0.0",
        NAMED,
    ),
    Mutation(
        "the-heads-own-rows-of-new-tokens",
        "rayapp/model/new_tokens.py",
        "            weight[ids] = 0.0\n",
        "",
        NAMED,
    ),
    # ---- Preferences
    Mutation(
        "a-policy-without-reference",
        "rayapp/train/preference.py",
        "given = torch.zeros_like(log_p) if reference is None else reference",
        "given = torch.zeros_like(log_p)",
        PREFERENCES,
    ),
    Mutation(
        "a-reference-with-its-adapters",
        "rayapp/model/lora_layers.py",
        "layer._disable_adapters = True",
        "layer._disable_adapters = False",
        PREFERENCES,
    ),
    Mutation(
        "pairs-divided-by-labels",
        "rayapp/data/token_rows.py",
        "        if self.group:\n            return self.segments",
        "        if False:\n            return self.segments",
        PREFERENCES,
    ),
    Mutation(
        "the-divergence-of-one-rank",
        "rayapp/finetune/kto.py",
        "        dist.all_reduce(found, group=engine.control)\n",
        "",
        PREFERENCES,
    ),
    Mutation(
        "bad-answers-weigh-as-good-ones",
        "rayapp/train/preference.py",
        "torch.sigmoid(-apart) * torch.where(good, 1.0, self.undesirable_weight)",
        "torch.sigmoid(-apart)",
        PREFERENCES,
    ),
    # ---- And of the page itself: what it must see
    Mutation(
        "dora-keeps-its-first-norms",
        "rayapp/model/lora_layers.py",
        "return merged.mul_(gather(self.magnitude).view_as(norms) / norms)",
        "return merged",
        NAMED,
    ),
    Mutation(
        "experts-adapters-unscaled",
        "rayapp/model/experts.py",
        "return output.add(update, alpha=wrapper.scaling[adapter])",
        "return output.add(update)",
        NAMED,
    ),
    Mutation(
        "padding-has-experts",
        "rayapp/data/token_rows.py",
        "if present.any() and not present.all():",
        "if False:",
        NAMED,
    ),
    Mutation(
        "router-loss-by-micro-batch",
        "rayapp/model/build.py",
        "balance = routed(router_logits, present) * (labels != -100).sum()",
        "balance = routed(router_logits, present)",
        NAMED,
    ),
)
