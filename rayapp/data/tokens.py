"""Train, load, save and identify tokenizers and chat templates, and count the bytes of tokens."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from rayapp.storage import Storage, open_input, open_storage

END_OF_TEXT = "<|endoftext|>"
FIRST_TEMPLATE = (  # of tokenizers made before tools, calls and reasoning were rendered
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT_TEMPLATE = (  # ChatML, with tools and calls as Hermes and Qwen write them
    "{% if tools %}<|im_start|>system\n"
    "{% if messages and messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n\n"
    "{% set messages = messages[1:] %}{% endif %}"
    "You may call these functions:\n<tools>\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}</tools>\nWrite a call as <tool_call>"
    '{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% set thought = message['reasoning_content'] or message['thinking'] or "
    "message['reasoning'] %}"
    "{% if thought %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ message['content'] or '' }}{% for call in message['tool_calls'] or [] %}"
    "{% set call = call['function'] or call %}{% if message['content'] or not loop.first %}"
    "{{ '\n' }}{% endif %}<tool_call>\n"
    "{{ {'name': call['name'], 'arguments': call['arguments']} | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML, TRAINING = "chatml", "training"  # trl's variant, which marks what the assistant says
NO_EXTRA = (
    "data.chat_template=training is not possible: the package trl is not installed. Run "
    "pip install 'rayapp[chat]'"
)
PIECES = "tokenizer.model"  # sentencepiece's: llama.cpp reads it, transformers 5 does not write it
SPECIALS = [END_OF_TEXT, "<|im_start|>", "<|im_end|>"]
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".distcp")


def train_bpe(texts: Iterator[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer; the result depends only on `texts` and `vocab_size`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def byte_tokenizer() -> Any:
    """Return a tokenizer whose tokens are the bytes of UTF-8 and SPECIALS."""
    return train_bpe(iter([""]), vocab_size=256 + len(SPECIALS))


def with_tokens(tokenizer: Any, names: Sequence[str]) -> Any:
    """Return a copy of a tokenizer that has these special tokens too."""
    from transformers import AddedToken

    tokenizer = copy.deepcopy(tokenizer)  # that of the cache keeps its own
    added = [AddedToken(name, special=True, normalized=False) for name in names]
    tokenizer.add_tokens(added, special_tokens=True)
    return tokenizer


def pieces(tokenizer: Any, names: Sequence[str]) -> dict[int, list[int]]:
    """Return by id what a fast tokenizer makes of these tokens' texts without the tokens."""
    from tokenizers import Tokenizer

    if not names:
        return {}
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["added_tokens"] = [t for t in rules["added_tokens"] if t["content"] not in names]
    before = Tokenizer.from_str(json.dumps(rules))
    ids = tokenizer.convert_tokens_to_ids(list(names))
    return {
        token: before.encode(name, add_special_tokens=False).ids
        for token, name in zip(ids, names, strict=True)
    }


def save_tokenizer(tokenizer: Any, storage: Storage) -> None:
    """Write the files of a tokenizer into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                storage.write(path.relative_to(folder).as_posix(), path.read_bytes())
    if pieces := getattr(tokenizer, "pieces", None):
        storage.write(PIECES, pieces)


@lru_cache(maxsize=4)
def load_tokenizer(url: str) -> Any:
    """Load a tokenizer from a local or s3:// folder, or a hub id; once per process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tasks fork and share cores
    if "://" not in url:
        return _from_folder(url)
    storage = open_input(url)
    with tempfile.TemporaryDirectory() as folder:
        for entry in storage.list():
            if "/" not in entry.name and not entry.name.endswith(WEIGHTS):
                (Path(folder) / entry.name).write_bytes(storage.read(entry.name))
        return _from_folder(folder)


def _from_folder(url: str) -> Any:
    """Load from a folder or a hub id, without running code from there; keep its PIECES.

    A folder that save_tokenizer wrote has no config.json, and its class is known. AutoTokenizer
    would import torch to find it: 2 CPU seconds and 130 MiB in every process that prepares data.
    """
    settings = Path(url) / "tokenizer_config.json"
    saved = settings.is_file() and not (Path(url) / "config.json").exists()
    if saved and json.loads(settings.read_bytes()).get("tokenizer_class") == "TokenizersBackend":
        from transformers import TokenizersBackend

        tokenizer = TokenizersBackend.from_pretrained(url)
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(url, trust_remote_code=False)
    pieces = Path(getattr(tokenizer, "vocab_file", None) or Path(url, PIECES))
    if pieces.name == PIECES and pieces.is_file():
        tokenizer.pieces = pieces.read_bytes()
    return tokenizer


def prompt_ids(
    tokenizer: Any, prompt: str | Sequence[Mapping[str, str]], chat: bool, system: str = ""
) -> list[int]:
    """Return the ids of a text, or with `chat` of what the template makes of the messages.

    A text is then the message of a user, behind one of the system's if that is not empty. An
    assistant's turn is begun.
    """
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system and isinstance(prompt, str):
        messages = [{"role": "system", "content": system}, *messages]
    made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(made["input_ids"])


def tokenizer_digest(tokenizer: Any) -> str:
    """Return 16 hex digits of what determines tokens: rules, BOS and EOS, chat template."""
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        del rules["truncation"], rules["padding"]  # state of the last call, not of the rules
    else:
        rules = sorted(tokenizer.get_vocab().items())
    ids = tokenizer.bos_token_id, tokenizer.eos_token_id
    template = tokenizer.chat_template
    if template == CHAT_TEMPLATE:  # the first one, which it replaces, wrote the same of plain chats
        template = FIRST_TEMPLATE
    parts = json.dumps([rules, template, ids])
    return blake2b(parts.encode(), digest_size=8).hexdigest()


def num_ids(tokenizer: Any) -> int:
    """Return the highest id plus one; `len(tokenizer)` is less if there are ids without a token."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def token_bytes(tokenizer: Any) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Return how many UTF-8 bytes each id stands for: uint16 [num_ids]; special tokens 0.

    Byte-level tokens have one character per byte. Sentencepiece-like ones write a space as U+2581
    and a raw byte as <0x0A>. Tokens added to either are plain text.
    """
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_tokens, *SPECIALS}
    special |= {token.content for token in added.values() if token.special}
    byte_level = tokenizer.is_fast and '"ByteLevel"' in json.dumps(
        json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder")
    )
    table = np.zeros(num_ids(tokenizer), np.uint16)
    for token, index in tokenizer.get_vocab().items():
        if token in special:
            continue
        if index in added:
            table[index] = len(token.encode())
        elif byte_level:
            table[index] = len(token)
        elif len(token) == 6 and token.startswith("<0x"):
            table[index] = 1
        else:
            table[index] = len(token.replace("\u2581", " ").encode())
    return table


class TemplateError(ValueError):
    """There is no such template; the message is for the user."""


def template_of(name: str, tokenizer: Any) -> str:
    """Return the text of a template; empty if the tokenizer's own is right for training.

    `tokenizer` is None if it is still to be made.

    Raises:
        TemplateError: there is no such file, or no training variant.
        StorageError: it cannot be read.
    """
    if name == CHATML:
        return CHAT_TEMPLATE
    if name == TRAINING:
        return "" if tokenizer is None else _training(tokenizer)
    folder, _, file = open_storage(name).url.rpartition("/")
    storage = open_storage(folder or "/")
    if not storage.exists(file):
        raise TemplateError(
            f"data.chat_template={name} is missing: there is no such file. Give a file with a "
            f"Jinja template, {CHATML} or {TRAINING}"
        )
    return storage.read(file).decode("utf-8-sig")


def _training(tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise TemplateError(
            "data.chat_template=training is not possible: the tokenizer has no template to take "
            f"the training variant of. Set it to {CHATML} or a file"
        )
    try:
        from trl.chat_template_utils import get_training_chat_template
    except ImportError as error:
        raise TemplateError(NO_EXTRA) from error
    try:
        return get_training_chat_template(tokenizer) or ""
    except ValueError as error:
        first = str(error).splitlines()[0]
        raise TemplateError(
            f"data.chat_template=training is not possible: trl knows no variant ({first}). Set it "
            "to a file"
        ) from error
