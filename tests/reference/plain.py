"""Train a language model as its config says, by PyTorch, transformers and peft alone.

    outcome = train(config, steps, num_steps, held_out)

One document at a time, eager attention, all logits, fp32. AdamW, Muon, schedules, clipping and the
experts' balance are written from their papers. `config` is a run's config.yaml. A step is a list of
micro-batches, each a list of prepared rows: input_ids, labels, and segments that number the
documents of a row (0: padding).
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

Config = dict[str, Any]
Rows = list[np.void]


@dataclass
class Outcome:
    """What each step gave; the trained model, and each element's smallest divisor in AdamW."""

    model: nn.Module
    divisors: dict[str, Tensor]
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    router_loss: list[float | None] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    eval_loss: float | None = None


def train(config: Config, steps: list[list[Rows]], num_steps: int, held_out: Rows) -> Outcome:
    """Train on the given steps of a run of `num_steps`, then evaluate."""
    torch.set_num_threads(1)
    settings, model = config["train"], open_model(config).train()
    for pattern in settings["freeze"]:
        for name, p in names(model):
            p.requires_grad_(p.requires_grad and not fnmatchcase(name, pattern))
    weight, optimizer = router_weight(model, settings), Optimizer(model, settings)
    divisors = optimizer.divisors
    pairs = settings["objective"] != "sft"
    reference = copy.deepcopy(model).eval() if pairs else None
    outcome = Outcome(
        model, {name: divisors[id(p)] for name, p in model.named_parameters() if id(p) in divisors}
    )
    torch.manual_seed(config["run"]["seed"])  # for dropout
    for step, micro_batches in enumerate(steps):
        tokens, loss, balance = sum(map(bearing, micro_batches)), 0.0, 0.0
        divisor, margin = sum(map(num_pairs, micro_batches)) if pairs else tokens, 0.0
        every, kto = [row for rows in micro_batches for row in rows], settings["objective"] == "kto"
        if kto and reference is not None:
            divergence, good = divergence_of(model, reference, every), labelled_good(every)
            shares = {True: sum(good) / divisor, False: 1 - sum(good) / divisor}
        for rows in micro_batches:
            if reference is not None and kto:
                objective, rewards = answer_losses(model, reference, rows, settings, divergence)
                part, of_router = float(objective.detach()), 0.0
                margin += sum(value / shares[is_good] for is_good, value in rewards)
            elif reference is not None:
                objective, apart = pair_losses(model, reference, rows, settings)
                part, of_router, margin = float(objective.detach()), 0.0, margin + apart
            else:
                objective, part, of_router = losses(model, rows, settings, weight)
            (objective / divisor).backward()
            loss, balance = loss + part, balance + of_router
        outcome.tokens, outcome.loss = [*outcome.tokens, tokens], [*outcome.loss, loss / divisor]
        outcome.margins.append(margin / divisor)
        outcome.router_loss.append(balance / tokens if weight else None)
        outcome.grad_norm.append(clip(model, settings["grad_clip"]))
        outcome.lr.append(rate(step, num_steps, settings))
        optimizer.step(outcome.lr[-1])
    if held_out:
        with torch.no_grad():
            if reference is not None:
                model.eval()
                if settings["objective"] == "kto":
                    apart = divergence_of(model, reference, held_out)
                    total, _ = answer_losses(model, reference, held_out, settings, apart)
                else:
                    total, _ = pair_losses(model, reference, held_out, settings)
                outcome.eval_loss = float(total) / num_pairs(held_out)
                return outcome
            found = [losses(model.eval(), [row], settings, 0.0)[1] for row in held_out]
        outcome.eval_loss = sum(found) / bearing(held_out)
    return outcome


def open_model(config: Config) -> nn.Module:
    """Load the model in fp32, with adapters if the config asks for them."""
    path, lora, overrides = (config["model"][name] for name in ("path", "lora", "overrides"))
    exact = {"dtype": torch.float32, "attn_implementation": "eager"}
    hf = AutoModelForCausalLM.from_pretrained(path, **exact, **overrides)
    new = with_new_tokens(hf, path, config["model"]["new_tokens"])
    return hf if lora is None else with_adapters(hf, lora, config["run"]["seed"], new)


@torch.no_grad()
def with_new_tokens(hf: Any, path: str, tokens: list[str]) -> list[int]:
    """Let transformers resize the model; a new row is the mean of the token's old pieces'."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    pieces = [tokenizer(token, add_special_tokens=False)["input_ids"] for token in tokens]
    new = list(range(len(tokenizer), len(tokenizer) + len(tokens)))
    if new and new[-1] >= hf.config.vocab_size:
        hf.resize_token_embeddings(new[-1] + 1, mean_resizing=False)
    layers = hf.get_input_embeddings(), hf.get_output_embeddings()
    for table in {id(layer.weight): layer.weight for layer in layers}.values():
        for token, old in zip(new, pieces, strict=True):
            table[token] = table[old].mean(0)
    return new


def names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with its names in the files of the model or of peft's adapter."""
    for name, p in model.named_parameters(remove_duplicate=False):
        name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        yield name.replace(".default.", "."), p


def with_adapters(hf: Any, lora: Config, seed: int, new: list[int]) -> nn.Module:
    """Let peft add adapters to the blocks' linear layers, and draw their first factors."""
    head, kinds = hf.get_output_embeddings(), (nn.Linear, Conv1D)
    found = {name: m for name, m in hf.named_modules() if isinstance(m, kinds) and m is not head}
    layers = {name.rpartition(".")[2]: module for name, module in found.items()}
    settings = LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        lora_dropout=lora["dropout"],
        target_modules=list(lora["targets"]) or list(layers),
        target_parameters=list(lora["target_parameters"]) or None,
        use_dora=lora["dora"],
        use_rslora=lora["rslora"],
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
        task_type="CAUSAL_LM",
        trainable_token_indices=trained_rows(hf, new) if new else None,
    )
    if lora["quantize"] == "nf4":
        round_to_4_bits(hf)
    model = get_peft_model(hf, settings)
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:  # as rayapp documents it: by (seed, name), within 1 / sqrt(in)
            text = f"{seed}:{name.removeprefix('base_model.model.')}"
            digest = hashlib.sha256(text.encode()).digest()
            drawn = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            values = torch.zeros(parameter.shape).uniform_(-1, 1, generator=drawn)
            parameter.data = values / math.sqrt(parameter.shape[1])
    return model


def trained_rows(hf: Any, new: list[int]) -> dict[str, list[int]]:
    """Return the new tokens by the names of the embedding and of a head that is not tied."""
    layers = {id(m.weight): m for m in (hf.get_output_embeddings(), hf.get_input_embeddings())}
    return {name: new for name, m in hf.named_modules() if m in layers.values()}


@torch.no_grad()
def round_to_4_bits(hf: Any) -> None:
    """Give the blocks' linear layers the values that bitsandbytes holds of them."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for module in hf.modules():
        head = module is hf.get_output_embeddings()
        if isinstance(module, nn.Linear) and not head and module.in_features % 64 == 0:
            packed, state = quantize_4bit(module.weight, blocksize=64, quant_type="nf4")
            module.weight.copy_(dequantize_4bit(packed, state))


def losses(
    model: nn.Module, rows: Rows, settings: Config, router_weight: float
) -> tuple[Tensor, float, float]:
    """Return the objective of a micro-batch, its cross-entropy, and the router's loss; all sums."""
    objective, loss, routers = torch.zeros(()), 0.0, []
    for ids, labels, present in sequences(rows):
        valid = labels != -100
        if not valid.any() and not router_weight:
            continue
        routed = {"output_router_logits": True} if router_weight else {}
        output = model(input_ids=ids[None], use_cache=False, **routed)
        if router_weight:
            routers.append([torch.softmax(p.float()[present], -1) for p in output.router_logits])
        logits = output.logits[0].float()[valid]
        log_p = torch.log_softmax(logits, -1)
        entropy = F.nll_loss(log_p, labels[valid], reduction="sum")
        smooth, squared = settings["label_smoothing"], torch.logsumexp(logits, -1) ** 2
        objective = objective + (1 - smooth) * entropy - smooth * log_p.mean(-1).sum()
        objective = objective + settings["z_loss"] * squared.sum()
        loss += float(entropy.detach())
    if not router_weight:
        return objective, loss, 0.0
    balance = bearing(rows) * balance_of(routers, model.config.num_experts_per_tok)
    return objective + router_weight * balance, loss, float(balance.detach())


def pair_losses(
    model: nn.Module, reference: nn.Module, rows: Rows, settings: Config
) -> tuple[Tensor, float]:
    """Return the sum of the losses of pairs, and of the margins of their rewards."""
    objective, beta, gamma = settings["objective"], settings["beta"], settings["margin"]
    total, margins, wrong = torch.zeros(()), 0.0, settings["label_smoothing"]
    answers = [each for each in sequences(rows) if (each[1] != -100).any()]
    for chosen, rejected in zip(answers[::2], answers[1::2], strict=True):
        (c, n), (r, m) = log_p(model, *chosen[:2]), log_p(model, *rejected[:2])
        with torch.no_grad():
            before = [log_p(reference, *each[:2])[0] for each in (chosen, rejected)]
        by_length, gains = c / n - r / m, (c - before[0], r - before[1])
        if objective == "orpo":
            odds = [torch.log(p / (1 - p)) for p in (torch.exp(c / n), torch.exp(r / m))]
            total = total - c / n - beta * torch.log(torch.sigmoid(odds[0] - odds[1]))
            margins += beta * float(by_length.detach())
            continue
        if objective == "ipo":
            total = total + (gains[0] / n - gains[1] / m - 1 / (2 * beta)) ** 2
        else:
            by_reference = beta * (gains[0] - gains[1])
            x = by_reference if objective == "dpo" else beta * by_length - gamma
            p = torch.sigmoid(x)
            total = total - (1 - wrong) * torch.log(p) - wrong * torch.log(1 - p)
        total = total - settings["sft_weight"] * c / n
        apart = by_length if objective == "simpo" else gains[0] - gains[1]
        margins += beta * float(apart.detach())
    return total, margins


def answers_of(rows: Rows) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each record's answer and, after it, its prompt with the answer to another one."""
    return [each for each in sequences(rows) if (each[1] != -100).any()]


def labelled_good(rows: Rows) -> list[bool]:
    return [
        bool(row["values"][0][row["segments"] == number][0])
        for row in rows
        for number in range(1, int(row["segments"].max()) + 1, 2)
    ]


@torch.no_grad()
def divergence_of(model: nn.Module, reference: nn.Module, rows: Rows) -> float:
    """Return the mean gain of the answers to other prompts, at least 0 (arXiv 2402.01306, 3.2)."""
    others = answers_of(rows)[1::2]
    gains = [log_p(model, *each[:2])[0] - log_p(reference, *each[:2])[0] for each in others]
    return max(0.0, float(sum(gains)) / len(gains))


def answer_losses(
    model: nn.Module, reference: nn.Module, rows: Rows, settings: Config, divergence: float
) -> tuple[Tensor, list[tuple[bool, float]]]:
    """Return the sum of the answers' losses; of each, whether it is good, and its signed reward."""
    total, rewards = torch.zeros(()), []
    for (ids, labels, _), good in zip(answers_of(rows)[::2], labelled_good(rows), strict=True):
        with torch.no_grad():
            before = log_p(reference, ids, labels)[0]
        gain = log_p(model, ids, labels)[0] - before
        side, weight = (1, 1.0) if good else (-1, settings["undesirable_weight"])
        value = torch.sigmoid(side * settings["beta"] * (gain - divergence))
        total = total + weight * (1 - value)
        rewards.append((good, side * settings["beta"] * float(gain.detach())))
    return total, rewards


def log_p(model: nn.Module, ids: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the labels' log-probabilities, and their number."""
    valid = labels != -100
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()[valid]
    return -F.cross_entropy(logits, labels[valid], reduction="sum"), int(valid.sum())


def num_pairs(rows: Rows) -> int:
    return sum(int(row["segments"].max()) for row in rows) // 2


def bearing(rows: Rows) -> int:
    return sum(int((row["labels"] != -100).sum()) for row in rows)


def sequences(rows: Rows) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (ids, labels, whether it is no padding) of each document, or of each row of one."""
    alone = all(row["segments"].max() <= 1 for row in rows)
    for row in rows:
        ids, labels = (torch.from_numpy(row[n].astype(np.int64)) for n in ("input_ids", "labels"))
        cuts = [] if alone else np.flatnonzero(np.diff(row["segments"].astype(int))) + 1
        for start, end in itertools.pairwise([0, *cuts, len(ids)]):
            here = slice(start, end)
            yield ids[here], labels[here], torch.from_numpy(row["segments"][here] > 0)


def balance_of(routers: list[list[Tensor]], chosen: int) -> Tensor:
    """Return Switch Transformer's balance (arXiv 2101.03961, eq. 4) over all layers' tokens.

    `routers` holds the probabilities [tokens, experts] of each sequence and layer; the shares of
    each of the chosen experts are added.
    """
    p = torch.cat([layer for layers in zip(*routers, strict=True) for layer in layers])
    experts = p.shape[1]
    shares = F.one_hot(p.topk(chosen, -1).indices, experts).float().mean(0).sum(0)
    return experts * (shares * p.mean(0)).sum()


def router_weight(model: nn.Module, settings: Config) -> float:
    """Return the weight of the experts' balance in the objective."""
    asked, own = settings["router_loss"], getattr(model.config, "router_aux_loss_coef", 0.0)
    return own if asked == "auto" else (asked if own else 0.0)


def rate(step: int, num_steps: int, settings: Config) -> float:
    """Return the learning rate of a step, from 0."""
    peak, floor, warm = settings["lr"], settings["min_lr"], settings["warmup_steps"]
    if step < warm:
        return peak * (step + 1) / warm
    falls: dict[str, Callable[[float], float]] = {
        "constant": lambda done: 1.0,
        "cosine": lambda done: floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)),
        "linear": lambda done: floor + (1 - floor) * (1 - done),
    }
    start, shape = warm, settings["schedule"]
    if shape == "wsd":
        start, shape = max(warm, num_steps - max(1, round(settings["decay"] * num_steps))), "linear"
    return peak * falls[shape](max(0, step - start) / (num_steps - start))


def clip(model: nn.Module, limit: float | None) -> float:
    """Scale the gradient to a norm of at most `limit`; return the norm before."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    if limit is not None and norm > limit:
        torch._foreach_mul_(gradients, limit / norm)
    return norm


class Optimizer:
    """AdamW (arXiv 1711.05101), with Muon (arXiv 2502.16982) for hidden matrices if so asked."""

    def __init__(self, model: Any, settings: Config) -> None:
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        tables |= {id(p) for name, p in model.named_parameters() if ".trainable_tokens_" in name}
        layers = [m for m in model.modules() if isinstance(m, (nn.Linear, Conv1D))]
        hidden = {id(m.weight) for m in layers if m is not model.get_output_embeddings()} - tables
        self.betas, self.steps, self.parameters = settings["betas"], 0, []
        self.factors: dict[int, float] = {}
        for pattern, factor in reversed(settings.get("lr_by_name", {}).items()):
            found = {id(p): factor for name, p in names(model) if fnmatchcase(name, pattern)}
            self.factors |= found
        for p in model.parameters():
            decay = settings["weight_decay"] if p.ndim > 1 and id(p) not in tables else 0.0
            muon = settings["optimizer"] == "muon" and id(p) in hidden
            if p.requires_grad:
                moments = torch.zeros_like(p.data), torch.zeros_like(p.data)
                self.parameters.append((p, decay, muon, moments))
        # sqrt(v_hat) + eps of AdamW as a share of the gradient's norm, the smallest of all steps;
        # no step counts for an element before its first gradient.
        self.divisors = {
            id(p): torch.full_like(p.data, math.inf)
            for p, _, muon, _ in self.parameters
            if not muon
        }

    @torch.no_grad()
    def step(self, peak: float) -> None:
        """Update all parameters that have a gradient, and clear it."""
        self.steps += 1
        found = [p.grad for p, *_ in self.parameters if p.grad is not None]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in found))
        for p, decay, muon, (first, second) in self.parameters:
            gradient, p.grad = p.grad, None
            if gradient is None:
                continue
            lr = peak * self.factors.get(id(p), 1.0)
            p.mul_(1 - lr * decay)
            if muon:
                first.lerp_(gradient, 0.05)
                update = orthogonal(gradient.lerp(first, 0.95))
                p.sub_(lr * 0.2 * math.sqrt(max(p.shape)) * update)
                continue
            b1, b2 = self.betas
            first.mul_(b1).add_(gradient, alpha=1 - b1)
            second.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
            root = (second / (1 - b2**self.steps)).sqrt() + 1e-8
            share = torch.where(second > 0, root / norm, math.inf)
            torch.minimum(self.divisors[id(p)], share, out=self.divisors[id(p)])
            p.sub_(lr / (1 - b1**self.steps) * first / root)


def orthogonal(matrix: Tensor) -> Tensor:
    """Bring the singular values near 1, by five quintic Newton-Schulz iterations in bf16."""
    x = matrix.bfloat16()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).float()
