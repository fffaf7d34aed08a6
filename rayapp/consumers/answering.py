"""Open model folders in the Python that runs this file, and write what they make of prompts.

    python answering.py transformers request.json answer.json

Any Python with transformers 4.56 or later, or vLLM, runs it: it imports nothing of rayapp. Both
files are lists with an entry for each model; see `Request` and `Answer` of rayapp.consumers.
Everything is computed in float32, so that texts are comparable, and by the likeliest tokens.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def in_transformers(request: dict[str, Any]) -> dict[str, Any]:
    """Answer with transformers, for an adapter with peft."""
    import torch
    import transformers

    folder, base = request["folder"], request["base"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    hf: Any = transformers.AutoModelForCausalLM.from_pretrained(
        base or folder, dtype=torch.float32, trust_remote_code=False
    )
    if base:
        import peft

        hf = peft.PeftModel.from_pretrained(hf, folder)
        hf.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    hf.eval()
    written = []
    for probe in request["probes"]:
        ids = probe["ids"]
        if probe["messages"] is not None:
            made = tokenizer.apply_chat_template(
                probe["messages"], add_generation_prompt=True, return_dict=True
            )
            ids = list(made["input_ids"])
        elif probe["text"] is not None:
            ids = list(tokenizer(probe["text"])["input_ids"])
        tensor = torch.tensor([ids])
        made = hf.generate(
            input_ids=tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=request["tokens"],
            do_sample=False,
            repetition_penalty=1.0,
            temperature=None,
            top_k=None,
            top_p=None,
            pad_token_id=0,
        )
        written.append({"prompt": ids, "ids": made[0, len(ids) :].tolist()})
    return {"written": written, "gaps": [gap_of(hf, each) for each in request["judged"]]}


def gap_of(hf: Any, written: dict[str, Any]) -> float:
    """Return by how much the logits of written tokens are below the largest, at most."""
    import torch

    ids, start = written["prompt"] + written["ids"], len(written["prompt"])
    with torch.no_grad():
        logits = hf(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(written["ids"], dtype=torch.long)[:, None])[:, 0]
    return float((logits.max(1).values - chosen).max()) if written["ids"] else 0.0


def in_vllm(request: dict[str, Any]) -> dict[str, Any]:
    """Answer with vLLM; an adapter is served beside its base, with its own end tokens."""
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    folder, base = request["folder"], request["base"]
    more, lora = {}, None
    if base:
        rank = json.loads(Path(folder, "adapter_config.json").read_bytes())["r"]
        more = {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        lora = LoRARequest("adapter", 1, folder)
    llm = None
    try:
        llm = vllm.LLM(
            base or folder,
            tokenizer=folder,
            generation_config=folder,
            dtype="float32",
            max_model_len=request["room"],
            max_num_seqs=4,
            enforce_eager=True,
            **more,
        )
        settings = vllm.SamplingParams(temperature=0, max_tokens=request["tokens"])
        written = []
        for probe in request["probes"]:
            if probe["messages"] is not None:
                (made,) = llm.chat(probe["messages"], settings, lora_request=lora, use_tqdm=False)
            else:
                given = probe["text"]
                if given is None:
                    given = {"prompt_token_ids": probe["ids"]}
                (made,) = llm.generate(given, settings, lora_request=lora, use_tqdm=False)
            ids = list(made.outputs[0].token_ids)
            written.append({"prompt": list(made.prompt_token_ids), "ids": ids})
    finally:
        del llm
        cleanup_dist_env_and_memory()
    return {"written": written, "gaps": []}


ANSWERING = {"transformers": in_transformers, "vllm": in_vllm}


def main(consumer: str, request: str, answer: str) -> None:
    """Answer each request; what a model's opening raises is its answer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process opens one model after another
    answers = []
    for each in json.loads(Path(request).read_bytes()):
        try:
            answers.append(ANSWERING[consumer](each))
        except Exception as error:  # whatever the consumer raises is what its user would see
            answers.append({"error": f"{type(error).__name__}: {error}"})
        Path(answer).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
