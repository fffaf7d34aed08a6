"""Draw configs over every technique that leaves a run's numbers as they are, or changes them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from reference import made
from reference.product import Legs, Run

STEPS = 8
BASE: dict[str, Any] = {
    "data.seq_len": 64,
    "data.eval_fraction": 0.1,
    "train.tokens_per_step": 512,
    "train.micro_batch": 2,
    "train.precision": "fp32",
    "train.max_steps": STEPS,
    "train.lr": 1e-3,
    "train.warmup_steps": 2,
}
CHOICES: dict[str, list[Any]] = {
    "data.pack": [True, True, False],
    "data.truncate": [False, False, True],
    "train.schedule": ["cosine", "linear", "constant", "wsd"],
    "train.decay": [0.2, 0.5],
    "train.min_lr": [0.1, 0.0],
    "train.warmup_steps": [0, 2],
    "train.weight_decay": [0.1, 0.0, 1.0],
    "train.betas": ["0.9,0.95", "0.8,0.999"],
    "train.grad_clip": [1.0, 0.3, "none"],
    "train.lr_by_name": [{}, {}, {"*.1.*weight": 0.5, "*": 2.0}],
    "train.z_loss": [0.0, 0.0, 1e-3],
    "train.label_smoothing": [0.0, 0.0, 0.1],
    "train.router_loss": ["auto", 0, 0.2],
    "train.loss_chunk": [4096, 7, 0],
    "parallel.activation_checkpointing": ["none", "full", "selective"],
    "parallel.activation_offload": [False, False, True],
    "parallel.cpu_offload": [False, False, True],
}
ADAPTERS: dict[str, list[Any]] = {
    "rank": [2, 8],
    "alpha": [8, 16],
    "merge": [False, True],
    "dora": [False, True],
    "rslora": [False, True],
    "quantize": ["none", "none", "nf4"],
}
STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")
DRAWN = (  # models by how often they are drawn
    *("llama", "llama_tied", "mistral", "neox", "gpt2", "mixtral", "qwen3", "phi3"),
    *("cohere", "granite", "gemma2", "smollm3", "llama", "mixtral", "gpt2"),
)

PACKED = (
    "afmoe arcee aria_text axk1 axk2 beam bitnet codegen cohere2 cohere2_moe cwm "
    "deepseek_v2 deepseek_v3 deepseek_v32 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 "
    "exaone_moe flex_olmo gemma gemma3_text glm glm4 glm4_moe glm_moe_dsa gpt_neo "
    "gpt_bigcode gptj granite_swa granitemoe helium hunyuan_v1_dense hy_v3 internlm3 jais2 "
    "jetmoe lfm2 minimax_m2 ministral modernbert-decoder nanochat olmo olmo2 olmoe "
    "persimmon phi qwen3_moe seed_oss solar_open stablelm vaultgemma "
)
APART = (  # packed rows of these are refused: they carry a state, or build no mask
    "bamba bloom biogpt falcon falcon_h1 falcon_mamba gpt_oss granitemoehybrid jamba lfm3 "
    "mamba minimax mpt nemotron_h olmo_hybrid qwen3_5_text qwen3_next recurrent_gemma xglm "
    "xlstm "
)


def families(root: Path, every: int = 1) -> list[Run]:
    """Return a run of three steps of each family, or of one in so many."""
    tokenizer, files = made.bpe(), made.make_data(root)
    fields = BASE | {"train.max_steps": 3, "train.z_loss": 1e-3, "data.path": str(files["text"])}
    runs = []
    names = [(name, True) for name in PACKED.split()] + [(name, False) for name in APART.split()]
    for family, packed in names[::every]:
        path = str(made.make_model(family, root, tokenizer))
        runs.append(Run(family, fields | {"model.path": path, "data.pack": packed}))
    return runs


def compiled(root: Path) -> list[Run]:
    """Return runs with compiled blocks: a dense model and experts on a mixture, and of pairs."""
    tokenizer, files = made.bpe(), made.make_data(root)
    fields = BASE | {"data.mixture": {str(files["text"]): 2, str(files["prompt"]): 1}}
    fields |= {"train.compile": True, "parallel.activation_checkpointing": "selective"}
    paths = {name: str(made.make_model(name, root, tokenizer)) for name in ("llama", "mixtral")}
    runs = [Run(name, fields | {"model.path": paths[name]}, ((2, None),)) for name in paths]
    pairs = BASE | {"data.path": str(files["pairs"]), "data.seq_len": 128, "data.bad_rows": 0.2}
    pairs |= {"train.objective": "dpo", "train.compile": True, "train.tokens_per_step": 1024}
    pairs |= {"model.path": paths["llama"], "model.lora": {"rank": 4, "alpha": 8}}
    return [*runs, Run("dpo", pairs, ((1, None),))]


def in_8_bits(root: Path) -> Run:
    """Return a run of AdamW with moments in 8 bits."""
    model, files = made.make_model("llama", root, made.bpe()), made.make_data(root)
    fields = BASE | {"model.path": str(model), "data.path": str(files["text"])}
    return Run("8-bit", fields | {"train.optimizer": "adamw8bit", "train.max_steps": 20})


def named(root: Path) -> list[Run]:
    """Return short runs of two workers, each of which shows a fault (docs/decisions.md)."""
    tokenizer, files = made.bpe(), made.make_data(root)
    short = BASE | {"train.max_steps": 3, "train.warmup_steps": 0, "data.path": str(files["text"])}

    def run(name: str, model: str, legs: Legs = ((2, None),), **more: Any) -> Run:
        path = str(made.make_model(model, root, tokenizer))
        fields = {field.replace("__", "."): value for field, value in more.items()}
        return Run(name, short | {"model.path": path} | fields, legs)

    template = root / "template.jinja"
    text = str(tokenizer.chat_template)
    template.write_text(text.replace("<|im_start|>", "<|turn|>").replace("<|im_end|>", "<|end|>"))
    chats = {"data__path": str(files["chat"]), "data__chat_template": str(template)}
    chats["model__new_tokens"] = ["<|turn|>", "<|end|>"]
    adapters = {"rank": 4, "alpha": 8}
    of_experts = {"target_parameters": ["down_proj", "gate_up_proj"]}
    return [
        run("packed", "llama_tied", train__loss_chunk=7),
        run("rows-apart", "nemotron", data__pack=False),
        run("own-logits", "cohere", train__z_loss=1e-2, train__label_smoothing=0.1),
        run("windows", "qwen2_moe"),
        run("eager", "gemma2"),
        run("padding", "mixtral", data__pack=False),
        run("muon", "gpt2", train__optimizer="muon"),
        run(
            "by-name",
            "llama_tied",
            train__freeze=["lm_head*", "model.layers.0.*"],
            train__lr_by_name={"*.mlp.*": 4.0, "*norm*": 0.5},
        ),
        run("new-tokens", "llama", train__weight_decay=1.0, **chats),
        run("new-rows", "llama_tied", ((2, 1), (3, None)), model__lora=adapters, **chats),
        run("new-rows-merged", "llama", model__lora=adapters | {"merge": True}, **chats),
        run("new-rows-whole-logits", "gemma2", model__lora=adapters, **chats),
        run("lora-plus", "llama", model__lora=adapters, train__lr_by_name={"*.lora_B.*": 16.0}),
        run("dora", "gpt2", model__lora=adapters | {"dora": True, "merge": True}),
        run("experts", "mixtral", model__lora=adapters | of_experts | {"merge": True}),
        run("bf16", "llama", train__precision="bf16", model__lora=adapters),
        run(
            "bf16-new-rows",
            "llama_tied",
            train__precision="bf16",
            model__lora=adapters | {"merge": True},
            **chats,
        ),
        run(
            "bf16-merged", "llama", train__precision="bf16", model__lora=adapters | {"merge": True}
        ),
    ]


def preferences(root: Path) -> list[Run]:
    """Return runs of each objective of pairs, on other numbers of workers when they go on."""
    tokenizer, files = made.bpe(), made.make_data(root)

    def run(name: str, objective: str, legs: Legs, model: str = "llama", **more: Any) -> Run:
        fields = BASE | {"data.path": str(files["pairs"]), "train.objective": objective}
        fields |= {"data.seq_len": 128, "train.tokens_per_step": 1024, "data.bad_rows": 0.2}
        fields |= {"model.path": str(made.make_model(model, root, tokenizer))}
        more = {field.replace("__", "."): value for field, value in more.items()}
        return Run(name, fields | more, legs)

    adapters, chats = {"rank": 4, "alpha": 8}, str(files["chat_pairs"])
    of_experts = {"target_parameters": ["down_proj", "gate_up_proj"]}
    return [
        run("dpo", "dpo", ((1, 3), (2, None))),
        run("dpo-adapters", "dpo", ((2, 3), (3, None)), model__lora=adapters, data__path=chats),
        run(
            "kto",
            "kto",
            ((1, 3), (2, None)),
            data__path=str(files["answers"]),
            train__undesirable_weight=1.5,
        ),
        run(
            "dpo-experts",
            "dpo",
            ((2, None),),
            "mixtral",
            train__router_loss=0,
            model__lora=adapters | of_experts,
        ),
        run("dpo-dora", "dpo", ((2, None),), "gpt2", model__lora=adapters | {"dora": True}),
        run("dpo-sft", "dpo", ((2, None),), train__sft_weight=0.5, train__label_smoothing=0.1),
        run("ipo", "ipo", ((3, 2), (1, None)), train__loss_chunk=7, data__path=chats),
        run("ipo-rows-apart", "ipo", ((2, None),), data__pack=False, model__lora=adapters),
        run("simpo", "simpo", ((2, None),), train__beta=2.0, parallel__cpu_offload=True),
        run("orpo", "orpo", ((2, 4), (1, None)), parallel__activation_checkpointing="full"),
        run("orpo-own-logits", "orpo", ((1, None),), "cohere"),
        run(
            "kto-adapters",
            "kto",
            ((3, 2), (2, None)),
            model__lora=adapters,
            data__path=str(files["chat_answers"]),
            train__micro_batch=2,
        ),
    ]


def draw(count: int, root: Path) -> list[Run]:
    """Return `count` runs, the same for the same count; their models and data are below `root`."""
    generator, tokenizer, files = random.Random(29), made.bpe(), made.make_data(root)
    return [_run(f"drawn-{n:02d}", generator, root, tokenizer, files) for n in range(count)]


def _run(name: str, draw: random.Random, root: Path, tokenizer: Any, files: dict[str, Path]) -> Run:
    model = draw.choice(DRAWN)
    fields = BASE | {field: draw.choice(values) for field, values in CHOICES.items()}
    fields["model.path"] = str(made.make_model(model, root, tokenizer))
    kind = draw.choice(["text", "text", "prompt", "chat", "mixture"])
    if kind == "mixture":
        fields["data.mixture"] = {str(files["text"]): 2, str(files["prompt"]): 1}
    else:
        fields["data.path"] = str(files[kind])
        if draw.random() < 0.2:
            fields |= {"train.max_steps": "none", "train.epochs": 1, "data.truncate": True}
            fields["train.tokens_per_step"] = 2048
    legs = _legs(draw)
    worlds = {world for world, _ in legs}
    fields["parallel.strategy"] = strategy = draw.choice(STRATEGIES)
    if strategy == "hybrid_shard":
        fields["parallel.replicas"] = max(worlds) if len(worlds) == 1 else 1
    if draw.random() < 0.35:
        adapters = {field: draw.choice(values) for field, values in ADAPTERS.items()}
        if model == "gpt2":  # its layers are not held in 4 bits
            adapters["quantize"] = "none"
        if worlds == {1}:  # one order of draws: a row a micro-batch, on one worker
            adapters["dropout"] = 0.2
            fields |= {"data.pack": False, "train.micro_batch": 1}
        fields["model.lora"] = adapters
    elif draw.random() < 0.3:
        fields["train.optimizer"] = "muon"
    if "model.lora" not in fields and draw.random() < 0.3:
        fields["train.freeze"] = ["*.0.*", "*norm*"]
    return Run(name, fields, legs)


def _legs(draw: random.Random) -> Legs:
    """Return one leg, or two of which the second resumes the first's checkpoint."""
    first, second = draw.choice((1, 2, 2, 3)), draw.choice((1, 2, 3))
    return ((first, 3), (second, None)) if draw.random() < 0.3 else ((first, None),)
