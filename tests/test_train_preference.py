"""Preference objectives beside TRL's trainers, and what they take."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import grid, made, product
from torch.utils.data import SequentialSampler

from rayapp.config import Config, ConfigError, load
from rayapp.data import tokens
from rayapp.train.preference import PreferenceLoss

STEPS, PAIRS, LR = 20, 4, 1e-3
SETTINGS = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "kto": 0.1}  # beta


def pairs_in(root: Path) -> Path:
    """Write prompts with two answers each; the tokens of bytes are the same cut anywhere."""
    draw, path = random.Random(3), root / "pairs.jsonl"
    words = ["red", "green", "blue", "seven", "eleven", "north", "south", "river", "stone", "cloud"]

    def text(most: int) -> str:
        return " " + " ".join(draw.choices(words, k=draw.randint(1, most)))

    records = [
        {"prompt": f"Q{n}:{text(4)}", "chosen": text(5), "rejected": text(5) + "."}
        for n in range(STEPS * PAIRS)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def answers_in(root: Path) -> Path:
    """Write the same prompts, each with one of its answers and whether it is good."""
    records = [json.loads(line) for line in pairs_in(root).read_text().splitlines()]
    draw, path = random.Random(4), root / "answers.jsonl"
    lines = []
    for record in records:
        label = draw.random() < 0.6
        answer = record["chosen" if label else "rejected"]
        lines.append({"prompt": record["prompt"], "completion": answer, "label": label})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ours(root: Path, folder: Path, data: Path, objective: str) -> product.Done:
    fields = grid.BASE | {
        "model.path": str(folder),
        "data.path": str(data),
        "data.pack": False,
        "data.eval_fraction": 0,
        "data.seq_len": 128,
        "train.tokens_per_step": 128 * PAIRS,
        "train.micro_batch": 2,
        "train.max_steps": STEPS,
        "train.warmup_steps": 0,
        "train.schedule": "constant",
        "train.lr": LR,
        "train.weight_decay": 0,
        "train.objective": objective,
        "train.beta": SETTINGS[objective],
    }
    if objective == "kto":
        fields["train.undesirable_weight"] = 1.5
    return product.run([product.Run(objective, fields, ((2, None),))], root)[objective]


def trainer_of(objective: str, folder: Path, records: list[dict[str, Any]], out: Path) -> Any:
    """Return TRL's trainer at the same settings, which takes the records in their order."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    shared: dict[str, Any] = {
        "output_dir": str(out),
        "beta": SETTINGS[objective],
        "per_device_train_batch_size": PAIRS,
        "max_steps": STEPS,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "disable_dropout": True,
        "max_length": 128,
    }
    if objective == "simpo":
        more = {"loss_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0.0}
        kind, args = CPOTrainer, CPOConfig(**shared, **more)
    elif objective == "kto":
        args = KTOConfig(**shared, train_sampling_strategy="sequential", undesirable_weight=1.5)
        kind = KTOTrainer
    else:
        loss = {"dpo": "sigmoid", "ipo": "ipo"}[objective]
        kind, args = DPOTrainer, DPOConfig(**shared, loss_type=[loss])

    class InOrder(kind):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dataset = Dataset.from_list(records)
    return InOrder(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)


@pytest.mark.full
@pytest.mark.parametrize("objective", SETTINGS)
def test_trl_has_the_same_losses_and_gradients(objective: str, tmp_path: Path) -> None:
    tokenizer = tokens.byte_tokenizer()
    folder = made.make_model("llama", tmp_path, tokenizer)
    data = (answers_in if objective == "kto" else pairs_in)(tmp_path)
    done = ours(tmp_path, folder, data, objective)
    records = [json.loads(line) for line in data.read_text().splitlines()]
    # The first labelled answer is crossed with the last, and so its row comes last.
    first = int(objective == "kto")
    rows = [int(row) for step in range(STEPS) for row in done.spec.order.rows(step)]
    order = [(row + first) % len(rows) for row in rows]
    trainer = trainer_of(objective, folder, [records[row] for row in order], tmp_path / "trl")
    if objective == "kto":  # ours are answers of the record before; its own are of its batch
        answers = dict(zip(order, trainer.train_dataset["completion_ids"], strict=True))
        others = [answers[(row - 1) % len(order)] for row in order]
        dataset = trainer.train_dataset.remove_columns("KL_completion_ids")
        trainer.train_dataset = dataset.add_column("KL_completion_ids", others)
    losses, compute = list[float](), trainer.compute_loss

    def kept(*args: Any, **more: Any) -> Any:
        loss = compute(*args, **more)
        losses.append(float(loss))
        return loss

    trainer.compute_loss = kept
    trainer.train()
    log = [line for line in trainer.state.log_history if "grad_norm" in line]
    assert len(losses) == len(log) == len(done.metrics) == STEPS
    assert [line["loss"] for line in done.metrics] == pytest.approx(losses, abs=1e-4, rel=1e-5)
    norms = [line["grad_norm"] for line in log]
    assert [line["grad_norm"] for line in done.metrics] == pytest.approx(norms, rel=1e-3)
    shown = ["rewards/chosen", "rewards/margins", "logps/rejected"]
    for name in [*shown, "kl" if objective == "kto" else "rewards/accuracies"]:
        theirs = [line.get(name) for line in log]
        if objective == "simpo" and name.startswith("logps"):  # TRL's are means over tokens
            continue
        ours_now = [line.get(name) for line in done.metrics]  # none of a step without such answers
        assert ours_now == [each and pytest.approx(each, abs=2e-3) for each in theirs], name


def test_the_odds_ratio_is_trl_s() -> None:
    from trl.experimental.orpo import ORPOTrainer

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (6, 2), generator=generator)
    sums = -torch.rand(6, 2, generator=generator) * 20
    loss = PreferenceLoss("orpo", beta=0.3)
    found, rewards = loss._of_pairs(sums, lengths)
    stand_in = type("Settings", (), {"beta": 0.3, "accelerator": torch.ones(1)})()
    means = sums / lengths
    theirs, chosen, rejected, *_ = ORPOTrainer.odds_ratio_loss(stand_in, means[:, 0], means[:, 1])
    torch.testing.assert_close(found, -theirs)
    torch.testing.assert_close(rewards, torch.stack([chosen, rejected], 1))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"train.z_loss": 0.1}, "train.z_loss=0.1 is in conflict: train.objective=dpo is a loss"),
        ({"train.loss": "a:b"}, "train.loss=a:b is in conflict"),
        ({"train.loss_kernel": "liger"}, "train.loss_kernel=liger is in conflict"),
        ({"train.label_smoothing": 0.5}, "only dpo and simpo take it, below 0.5"),
        ({"train.objective": "ipo", "train.label_smoothing": 0.1}, "only dpo and simpo take it"),
    ],
)
def test_what_a_loss_of_pairs_does_not_take(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("(", r"\(")):
        load(None, {"train.objective": "dpo"} | {n: str(v) for n, v in fields.items()}, Config)


def test_objectives_and_records_that_do_not_fit(tmp_path: Path) -> None:
    files = made.make_data(tmp_path)
    for objective, name, problem in (
        ("sft", "pairs", "are preference. Set train.objective=dpo, or data.kind"),
        ("dpo", "text", "are text. Set train.objective=sft, or data.kind to another kind, or name"),
        ("kto", "pairs", "are preference. Set train.objective=dpo, or data.kind to another kind"),
    ):
        fields = {"data.path": str(files[name]), "train.objective": objective}
        with pytest.raises(ConfigError, match=problem):
            product.prepared(
                product.Run(name, grid.BASE | {"model.path": "tiny"} | fields), tmp_path
            )
    windows = {"data.path": str(files["pairs"]), "train.objective": "dpo"}
    windows |= {"data.window_bytes": "1048576", "data.seq_len": "128", "data.bad_rows": "0.2"}
    with pytest.raises(ConfigError, match=r"data\.window_bytes=1048576 is in conflict"):
        product.prepared(product.Run("w", grid.BASE | {"model.path": "tiny"} | windows), tmp_path)
