"""Compare a run of rayapp with the plain trainer, step by step and weight by weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from reference import plain
from reference.product import Done, iterations_in_fp32

LOSS, GRAD_NORM = 1e-6, 1e-5  # nats a token; relative
MARGIN = 1e-5  # of rewards, which are differences of sums of some 100 nats
IN_BF16 = 3e-2
WEIGHTS = 2e-3  # share of what a tensor has moved
# Share of the gradient's norm below which AdamW's divisor makes an update of rounding: of the keys'
# biases, to which softmax is blind, and of single elements whose gradient nearly vanishes in one of
# the first steps. AdamW divides by it, and steps by the whole rate to one side or the other, as the
# processor's order of summation has it. Such elements are left out; those that are 0 count.
ROUNDING = 1e-6


def problems(done: Done) -> list[str]:
    """Train the same by the plain trainer, and say what differs; [] if nothing does."""
    num_steps = done.spec.order.num_steps
    with iterations_in_fp32():
        expected = plain.train(done.config, done.steps(), num_steps, done.held_out())
    rounding = {name: divisor < ROUNDING for name, divisor in expected.divisors.items()}
    return [*_steps(done, expected), *_exports(done, expected, rounding)]


def problems_in_bf16(done: Done) -> list[str]:
    """Say what differs where rounding is: the losses by more than 8 bits do, or the exports.

    Exported adapters are the fp32 masters. A merged model is what peft makes of them and of the
    base as it is stored.
    """
    num_steps = done.spec.order.num_steps
    expected = plain.train(done.config, done.steps(), num_steps, done.held_out())
    gaps = [abs(a["loss"] - b) for a, b in zip(done.metrics, expected.loss, strict=True)]
    found = [f"loss is {max(gaps):.1e} off"] if max(gaps) > IN_BF16 else []
    path, lora = done.config["model"]["path"], done.config["model"]["lora"]
    folder = done.folder / ("adapter" if lora["merge"] else "model")
    adapters = load_file(folder / "adapter_model.safetensors")
    rounded = [name for name, t in adapters.items() if torch.equal(t.bfloat16().float(), t)]
    found += [f"{name} is rounded to bf16" for name in rounded]
    if lora["merge"]:
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        plain.with_new_tokens(base, path, done.config["model"]["new_tokens"])
        merged = PeftModel.from_pretrained(base, folder).merge_and_unload().state_dict()
        opened = AutoModelForCausalLM.from_pretrained(done.folder / "model")
        for name, value in opened.state_dict().items():
            gap = float((value.float() - merged[name].to(value.dtype).float()).abs().max())
            if gap > 1e-6:
                found.append(f"{name} is {gap:.1e} off what peft merges")
    return found


def _steps(done: Done, expected: plain.Outcome) -> list[str]:
    found, pairs = [], done.config["train"]["objective"] != "sft"
    lines = done.metrics
    if [line["step"] for line in lines] != list(range(1, len(expected.loss) + 1)):
        return [f"it has the steps {[line['step'] for line in lines]}"]

    def scale(value: float) -> float:
        return max(1.0, abs(value)) if pairs else 1.0

    for name, limit, relative in (
        ("loss", LOSS, False),
        ("router_loss", LOSS, False),
        ("grad_norm", GRAD_NORM, True),
        ("lr", 1e-12, True),
        ("tokens", 0.0, False),
        ("rewards/margins", MARGIN, False),
    ):
        if name == "rewards/margins" and not pairs:
            continue
        ours = [line[name] for line in lines]
        theirs = getattr(expected, name.rpartition("/")[2])
        if None in ours or None in theirs:
            found += [] if ours == theirs else [f"{name} is {ours[0]}, not {theirs[0]}"]
            continue
        gaps = [
            abs(a - b) / (abs(b) if relative else scale(b))
            for a, b in zip(ours, theirs, strict=True)
        ]
        if not max(gaps) <= limit:
            first = next(step for step, gap in enumerate(gaps, 1) if not gap <= limit)
            found.append(f"{name} is {max(gaps):.1e} off, first at step {first}")
    held_out = done.summary["eval_loss"]
    if (held_out is None) != (expected.eval_loss is None) or (
        expected.eval_loss is not None
        and not abs(held_out - expected.eval_loss) <= LOSS * scale(expected.eval_loss)
    ):
        found.append(f"eval_loss is {held_out}, not {expected.eval_loss}")
    return found


def _exports(done: Done, expected: plain.Outcome, rounding: dict[str, torch.Tensor]) -> list[str]:
    """Compare what is exported; adapters are opened by peft, models by transformers."""
    path, lora = done.config["model"]["path"], done.config["model"]["lora"]
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    new = plain.with_new_tokens(base, path, done.config["model"]["new_tokens"])
    before = base.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    found, exported = [], done.folder / "model"
    if lora is not None:
        folder = done.folder / "adapter" if lora["merge"] else exported
        opened = PeftModel.from_pretrained(base, folder)
        ours, theirs = _adapters(opened), _adapters(expected.model)
        first = dict.fromkeys(theirs, torch.zeros(()))
        for name in theirs:
            table, _, rows = name.removeprefix("base_model.model.").partition(".token_adapter.")
            first |= {name: before[f"{table}.weight"][new]} if rows else {}
        of_adapters = {_peft_name(name): mask for name, mask in rounding.items()}
        found += [f"adapter: {text}" for text in _apart(ours, theirs, first, of_adapters)]
        settings = json.loads((folder / "adapter_config.json").read_text())
        asked = (settings["use_dora"], settings["use_rslora"])
        if asked != (lora["dora"], lora["rslora"]):
            found.append(f"adapter_config.json has use_dora, use_rslora = {asked}")
        if not lora["merge"]:
            return found
        # Of the adapters compared above: a merge spreads each of their elements over a row.
        if lora["target_parameters"]:  # whose factors peft stacks otherwise
            expected.model = opened.merge_and_unload()
        else:
            set_peft_model_state_dict(expected.model, ours)
            expected.model = expected.model.merge_and_unload()
    model, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    if report["missing_keys"] or report["unexpected_keys"]:
        found.append(f"model/ opens with {report}")
    stored = {value.dtype for value in _stored(Path(path)).values()}
    if {value.dtype for value in _stored(exported).values()} != stored:
        found.append("model/ has another dtype than the base")
    theirs = {name: t.to(model.dtype) for name, t in expected.model.state_dict().items()}
    return found + _apart(model.state_dict(), theirs, before, rounding)


def _adapters(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return the adapters' tensors; of experts the updates, whose factors peft stacks otherwise."""
    tensors = dict(get_peft_model_state_dict(model, save_embedding_layers=False))
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            tensors = {key: t for key, t in tensors.items() if not key.startswith(f"{name}.lora_")}
            tensors[name] = module.get_delta_weight("default").detach()
    return tensors


def _peft_name(name: str) -> str:
    """Return the name that peft gives a parameter in a state dict."""
    name = name.replace("vector.default.weight", "vector").removesuffix(".default")
    return name.replace(".default.", ".")


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _apart(ours: Any, theirs: Any, before: Any, rounding: Any) -> list[str]:
    """Return the tensors that differ by more than WEIGHTS of what they have moved.

    Elements of `rounding` are left out.
    """
    if ours.keys() != theirs.keys():
        return [f"its names differ: {sorted(ours.keys() ^ theirs.keys())[:4]}"]
    found = []
    for name, value in theirs.items():
        apart = ours[name].float() - value.float()
        gap = float(apart.masked_fill(rounding.get(name, torch.tensor(False)), 0.0).norm())
        moved = float((value.float() - before[name].float()).norm())
        narrow = 0.0 if value.dtype == torch.float32 else 1e-3 * float(value.float().norm())
        if not gap <= WEIGHTS * moved + narrow + 1e-7:
            found.append(f"{name} is {gap:.1e} off, having moved {moved:.1e}")
    return found[:4]
