"""transformers 4 beside the version that rayapp uses: what it makes of exported folders.

    facts_of_4([folder])[0] == facts(AutoTokenizer.from_pretrained(folder))
    generated_by_4([(folder, ids)])

It is installed below build/, once, and found before that of the environment, whose torch it uses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("transformers==4.57.6", "tokenizers==0.22.2", "huggingface-hub==0.36.0")
FOLDER = ROOT / "build" / "-".join(PACKAGES)
TEXTS = ("hello world", " a  b\n\n日本 é", "x<|im_end|>y</s><image>z", "hello", "")
CHAT = [{"role": "user", "content": "hello"}]


def facts(tokenizer: Any) -> dict[str, Any]:
    """Return what a tokenizer makes of some texts, and its settings."""
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    chat = tokenizer.chat_template
    return {
        "ids": ids,
        "plain": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS],
        "texts": [[tokenizer.decode(i, skip_special_tokens=s) for s in (True, False)] for i in ids],
        "inputs": sorted(tokenizer("a")),
        "special": sorted(map(str, tokenizer.all_special_tokens)),
        "end": [tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "image": getattr(tokenizer, "image_token", None),
        "side": tokenizer.padding_side,
        "last": max(tokenizer.get_vocab().values()),
        "chat": tokenizer.apply_chat_template(CHAT, tokenize=False) if chat else None,
    }


def generated(folder: str, ids: list[int]) -> list[int]:
    """Return what the model in a folder adds to a prompt: the likeliest tokens, 20 at most."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
    added: list[int] = made[0, len(ids) :].tolist()
    return added


def facts_of_4(folders: Sequence[Path]) -> list[Any]:
    """Return the facts of each folder's tokenizer; an error's text if it does not open."""
    return _asked("facts", [[str(folder)] for folder in folders])


def generated_by_4(prompts: Sequence[tuple[Path, list[int]]]) -> list[Any]:
    """Return what each folder's model adds to a prompt; an error's text if it does not open."""
    return _asked("generated", [[str(folder), ids] for folder, ids in prompts])


def _asked(what: str, each: list[Any]) -> list[Any]:
    env = os.environ | {"PYTHONPATH": str(_installed()), "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, __file__, what, json.dumps(each)],
        env=env,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def _installed() -> Path:
    """Return the folder with transformers 4; install it if it is not there."""
    import pytest

    if FOLDER.exists():
        return FOLDER
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as made:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        done = subprocess.run(
            [*command, f"{made}/4", *PACKAGES], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"pip cannot install {', '.join(PACKAGES)}: {done.stderr.strip()[-300:]}")
        if not FOLDER.exists():  # another process may have been faster
            os.rename(f"{made}/4", FOLDER)
    return FOLDER


def _answer(what: str, given: list[Any]) -> Any:
    from transformers import AutoTokenizer

    try:
        return (
            generated(*given)
            if what == "generated"
            else facts(AutoTokenizer.from_pretrained(given[0]))
        )
    except Exception as error:  # the test compares it
        return repr(error)


if __name__ == "__main__":
    import transformers

    assert transformers.__version__.startswith("4."), transformers.__version__
    print(json.dumps([_answer(sys.argv[1], given) for given in json.loads(sys.argv[2])]))
