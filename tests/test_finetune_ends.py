"""What ends an answer in training ends a generation: of samples, `generate` and every export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import processes
import published_templates
import pytest
import torch
from test_finetune_exported import but_for
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers4 import generated, generated_by_4

from rayapp.config import from_dict
from rayapp.data import preparation as prepare
from rayapp.data import sources
from rayapp.data.packing import pack
from rayapp.data.recipe import RowRecipe
from rayapp.data.rendering import Renderer
from rayapp.data.tokens import CHAT_TEMPLATE
from rayapp.finetune.ends import Ends, described, ends_of, generation_config
from rayapp.generation import generate
from rayapp.model import resolve
from rayapp.order import Order
from rayapp.storage import open_storage
from rayapp.train.spec import LanguageSpec

SPECIALS = ("<eos>", "<|im_start|>", "<|im_end|>", "<|end|>", "<stop>")
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def tokenizer_of(*specials: str, end: str | None = "<eos>", words: tuple[str, ...] = ()) -> Any:
    """Return a tokenizer of bytes with these special tokens, and added words."""
    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rules.train_from_iterator(
        iter([""]),
        trainers.BpeTrainer(
            vocab_size=256 + len(specials), special_tokens=[*specials], initial_alphabet=alphabet
        ),
    )
    rules.add_tokens([AddedToken(word, normalized=False) for word in words])
    return PreTrainedTokenizerFast(tokenizer_object=rules, eos_token=end)


def turn(ends: str, before: str = "") -> str:
    """Return a template whose turns end so, marked as generated with their ends."""
    says = f"{{% generation %}}{before}{{{{ m['content'] }}}}{ends}{{% endgeneration %}}"
    return (
        "{% for m in messages %}{% if m['role'] == 'user' %}<|im_start|>{{ m['content'] }}\n"
        f"{{% else %}}{says}{{% endif %}}{{% endfor %}}"
    )


def chat(*answers: str) -> dict[str, Any]:
    both = [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": a}] for a in answers
    ]
    return {"messages": [message for pair in both for message in pair]}


OK, NO = [chat("ok", "so")] * 20, "is without an end: "
# Tokenizer, kind, template, records; the end tokens, and what is said of answers without one.
ENDS: dict[str, tuple[Any, str, str, list[Any], list[str], str]] = {
    "chatml": (tokenizer_of(*SPECIALS), "chat", CHAT_TEMPLATE, OK, ["<|im_end|>"], ""),
    "not in the vocabulary": (
        tokenizer_of("<eos>"),
        "chat",
        CHAT_TEMPLATE,
        OK,
        [],
        f"data.chat_template=chatml {NO}40 of 40 answers end with 'ok<|im_end|>', which is no ",
    ),
    "space behind": (tokenizer_of(*SPECIALS), "chat", turn("<stop> \n\n"), OK, ["<stop>"], ""),
    "text": (tokenizer_of(*SPECIALS), "chat", turn("\n\n###"), OK, [], f"{NO}40 of 40"),
    "no special token": (
        tokenizer_of("<eos>", words=("<|im_end|>", "ok")),
        "chat",
        CHAT_TEMPLATE,
        OK,
        ["<|im_end|>"],
        "",
    ),
    "a word": (
        tokenizer_of("<eos>", words=("ok",)),
        "chat",
        turn(""),
        [chat("ok", "so")] * 9,
        [],
        f"{NO}18 of 18",
    ),
    "goes on in another": (
        tokenizer_of(*SPECIALS),
        "chat",
        turn("{{ '<stop>' if loop.last else '<|end|>' }}", "{{ 'so<|end|>' if loop.last }}"),
        OK,
        ["<stop>"],
        "",
    ),
    "is quoted": (
        tokenizer_of(*SPECIALS),
        "chat",
        turn("{{ '<stop>' if loop.last else '<|end|>' }}"),
        [*OK, *OK, chat("a <stop> b", "ok")],
        ["<stop>", "<|end|>"],
        "",
    ),
    "prompt": (
        tokenizer_of(*SPECIALS),
        "prompt",
        "",
        [{"prompt": "a", "completion": "b"}],
        ["<eos>"],
        "",
    ),
    "no end of text": (
        tokenizer_of("<x>", end=None),
        "prompt",
        "",
        [{"prompt": "a", "completion": "b"}] * 3,
        [],
        f"model.tokenizer=base {NO}3 of 3 answers end with 'b', which is no special token",
    ),
    "texts": (tokenizer_of(*SPECIALS), "text", "", [{"text": "some"}], ["<eos>"], ""),
}


def ends_in(tokenizer: Any, kind: str, template: str, records: list[Any]) -> Ends:
    made = [one for one, _ in Renderer(tokenizer, kind, template).documents(records)]
    assert None not in made
    documents = [each for document in made for each in document or ()]
    return ends_of(pack(documents, seq_len=8192).rows, tokenizer)


@pytest.mark.parametrize("case", ENDS)
def test_what_ends_answers_is_found_or_said(case: str) -> None:
    tokenizer, kind, template, records, wanted, said = ENDS[case]
    found = ends_in(tokenizer, kind, template, records)
    assert sorted(found.ids) == sorted(tokenizer.convert_tokens_to_ids(wanted))
    data = {"kind": kind, "chat_template": "chatml" if template == CHAT_TEMPLATE else None}
    config = from_dict({"model": {"path": "base"}, "data": {"seq_len": 64, **data}})
    *first, last = ["", *described(found, config, tokenizer)]
    assert bool(said) == (NO in last) and said in last
    assert not said or ("Set eos_token in its" in last) == (kind != "chat")
    assert all(f"{name} (" in " ".join([*first, last]) for name in wanted)


@pytest.mark.parametrize("name", published_templates.names())
def test_the_ends_of_published_templates_are_found(name: str) -> None:
    text = published_templates.template(name)
    found = ends_in(published_templates.tokenizer(text), "chat", text, [chat("ok", "so")])
    assert found.answers == 2 and bool(found.ids) == (name != "glm4moe")  # it writes none


# generation_config.json and config.json of a base, another tokenizer, and the end tokens of all.
SETTINGS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], bool, Any]] = {
    "of another token": ({"eos_token_id": 3}, {}, False, [2, 0, 3]),
    "of several": ({"eos_token_id": [0, 9, 2]}, {"eos_token_id": 7}, False, [2, 0, 9]),
    "empty": ({}, {"eos_token_id": 3, "bos_token_id": 5}, False, [2, 0, 3]),
    "none": (None, {"eos_token_id": [3, 4]}, False, [2, 0, 3, 4]),
    "null": (None, {"eos_token_id": None}, False, [2, 0]),
    "another tokenizer": ({"eos_token_id": [3, 99]}, {}, True, [2, 0, 3]),
    "another, no file": (None, {"eos_token_id": [4, 128_001]}, True, [2, 0, 4]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_the_base_keeps_its_own_end_tokens(case: str, tmp_path: Path) -> None:
    of_file, of_config, another, wanted = SETTINGS[case]
    values = {"model_type": "llama", "bos_token_id": 1, **of_config}
    (tmp_path / "config.json").write_text(json.dumps(values))
    if of_file is not None:
        kept = {"temperature": 0.3} if of_file else {}
        (tmp_path / "generation_config.json").write_text(json.dumps(of_file | kept))
    section = {"path": str(tmp_path), "tokenizer": "other" if another else None}
    config = from_dict({"model": section, "data": {"seq_len": 64}})
    source, tokenizer = resolve(str(tmp_path)), tokenizer_of(*SPECIALS)
    ends = ends_in(tokenizer, "chat", CHAT_TEMPLATE, OK)
    found = generation_config(config, source, source.config, tokenizer, ends)
    assert found.eos_token_id == wanted
    assert found.bos_token_id == (None if another else of_config.get("bos_token_id", 1))
    if of_file:
        assert found.temperature == 0.3 and source.generation_config is not None
        assert source.generation_config.eos_token_id == of_file["eos_token_id"]  # not changed


ADAPTER = {"lora": {"rank": 8}}
MERGED = {"lora": {"rank": 8, "merge": True}}
# The base's generation_config.json, the model section, and the file that says what ends.
RUNS: dict[str, tuple[Any, dict[str, Any], list[int]]] = {
    "whole": ({"eos_token_id": 3}, {}, [2, 0, 3]),
    "empty file": ({}, {}, [2, 0]),
    "adapter": ({"eos_token_id": 3}, ADAPTER, [2, 0, 3]),
    "merged": ({"eos_token_id": 3}, MERGED, [2, 0, 3]),
    "preset": (None, {"path": "tiny", "overrides": {"num_hidden_layers": 1}}, [2, 0]),
}


def trained(folder: Path, case: str) -> tuple[Path, dict[str, Any]]:
    """Train a model to answer ok<|im_end|>; return its run and what the summary says."""
    from test_train_loop import worker

    of_file, section, _ = RUNS[case]
    tokenizer = tokenizer_of(*SPECIALS)
    tokenizer.chat_template = CHAT_TEMPLATE
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=0,
        initializer_range=0.5,  # so that adapters alone can learn it
    )
    torch.manual_seed(0)
    LlamaForCausalLM(shape).save_pretrained(folder / "base")
    (folder / "base" / "generation_config.json").write_text(json.dumps(of_file))
    tokenizer.save_pretrained(folder / "base")
    (folder / "chats.jsonl").write_text((json.dumps(chat("ok")) + "\n") * 60)
    tree: dict[str, Any] = {
        "run": {"name": "run", "storage": str(folder)},
        "model": {"path": str(folder / "base"), **section},
        "data": {"path": str(folder / "chats.jsonl"), "kind": "chat", "seq_len": 64},
        "train": {"tokens_per_step": 256, "micro_batch": 4, "max_steps": 40, "precision": "fp32"},
        "eval": {"prompts": ["hi"]},
    }
    tree["train"]["lr"] = 1e-2
    config = from_dict(tree)
    source = sources.find(str(folder / "chats.jsonl"))
    recipe = RowRecipe(
        source, None, "chat", str(folder / "base"), "bytes", 0, 64, True, False, eval_fraction=0.0
    )
    root = open_storage(str(folder / "prepared"))
    for index, unit in enumerate(sources.units(source, 0.0)):
        prepare.UnitTask(index, "train", unit).run(recipe, root.url, recipe.fingerprint)
    prepared = prepare.prepare(recipe, root)
    order = Order.for_steps(prepared.num_rows("train"), 4, 4, 0, 40)
    url = str(folder / "run")
    spec = LanguageSpec("rayapp.finetune", config, prepared, order, url, str(folder / "base"))
    processes.spawn(worker, 1, str(folder / "meet"), spec, str(folder / "summary"), False)
    return folder / "run", json.loads((folder / "summary").read_text())


@pytest.mark.parametrize("case", but_for(RUNS, "adapter"))
def test_every_export_ends_where_training_does(case: str, tmp_path: Path) -> None:
    run, summary = trained(tmp_path, case)
    wanted = RUNS[case][2]
    folders = [run / "model", *([run / "adapter"] if case == "merged" else [])]
    for folder in folders:
        assert GenerationConfig.from_pretrained(folder).eos_token_id == wanted
    assert summary["samples"] == [["hi", "ok"]]
    said = generate(str(run), "hi", chat=True, temperature=0.0, max_tokens=20)
    assert "".join(said) == "ok"
    if case == "adapter":
        return
    assert json.loads((run / "model" / "config.json").read_text())["eos_token_id"] == wanted
    ids = tokenizer_of(*SPECIALS)(PROMPT)["input_ids"]
    made = tokenizer_of(*SPECIALS)("ok<|im_end|>")["input_ids"]
    assert generated(str(run / "model"), ids) == made
    assert generated_by_4([(run / "model", ids)]) == [made]
