"""Made-up corpora and a small model for the benchmarks; nothing is downloaded.

Words are drawn by Zipf's law from a vocabulary of random syllables; documents are slices of one
long text of them, with Pareto-distributed lengths, so that few are long and most are short.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rayapp.data import sources
from rayapp.data.recipe import RowRecipe
from rayapp.data.tokens import load_tokenizer, tokenizer_digest, train_bpe

VOCABULARY = 20_000
POOL_BYTES = 16 * 2**20
SHAPE = 1.16  # of the Pareto distribution: a fifth of the documents holds four fifths of the text
SYLLABLES = [
    consonant + vowel
    for consonant in ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "st", "tr", "ch")
    for vowel in "aeiou"
]


def text_pool(rng: np.random.Generator, num_bytes: int = POOL_BYTES) -> str:
    """Return a long text of sentences."""
    words = [
        "".join(rng.choice(SYLLABLES, size=rng.integers(1, 5))) + rng.choice(["", "n", "s", "r"])
        for _ in range(VOCABULARY)
    ]
    share = 1.0 / np.arange(2, VOCABULARY + 2)
    drawn = rng.choice(VOCABULARY, size=num_bytes // 6, p=share / share.sum())
    ends = rng.choice([" ", " ", " ", " ", " ", " ", ", ", ". ", ".\n"], size=len(drawn))
    text = "".join(words[word] + end for word, end in zip(drawn, ends, strict=True))
    return text[:num_bytes]


def documents(rng: np.random.Generator, pool: str, low: int, high: int) -> Iterator[str]:
    """Yield texts of Pareto-distributed lengths of `low` to `high` characters, without end."""
    while True:
        lengths = np.minimum(low * (1 + rng.pareto(SHAPE, 1024)), high).astype(int)
        starts = rng.integers(0, len(pool) - high, 1024)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            yield pool[start : start + length]


def as_chat(text: str) -> list[dict[str, str]]:
    """Cut a text into turns of a user and an assistant: one pair for every 800 characters."""
    size = -(-len(text) // (1 + len(text) // 800))
    messages = []
    for start in range(0, len(text), size):
        part = text[start : start + size]
        messages.append({"role": "user", "content": part[: size // 3]})
        messages.append({"role": "assistant", "content": part[size // 3 :]})
    return messages


def write(path: Path, texts: Iterator[str], num_bytes: int, chat: bool = False) -> None:
    """Write JSONL of {"text"} or {"messages"} until the file has that size."""
    with path.open("w") as file:
        for text in texts:
            record = {"messages": as_chat(text)} if chat else {"text": text}
            file.write(json.dumps(record) + "\n")
            if file.tell() >= num_bytes:
                return


def encode_alone(texts: list[str], tokenizer_url: str) -> tuple[int, float]:
    """Encode texts by `encode_batch_fast`, and do no more; return tokens and CPU seconds."""
    encode = load_tokenizer(tokenizer_url).backend_tokenizer.encode_batch_fast
    start, tokens = time.process_time(), 0
    for at in range(0, len(texts), 32):
        tokens += sum(map(len, encode(texts[at : at + 32], add_special_tokens=False)))
    return tokens, time.process_time() - start


def save_tokenizer(folder: Path, pool: str, vocabulary: int) -> None:
    """Train a byte-level BPE tokenizer whose chat template marks what the assistant says."""
    train_bpe(iter([pool[: 2**21]]), vocabulary).save_pretrained(folder)


def recipe(
    path: str, kind: str, tokenizer_url: str, seq_len: int, eval_fraction: float
) -> RowRecipe:
    """Return how rayapp prepares a corpus by default."""
    tokenizer = load_tokenizer(tokenizer_url)
    return RowRecipe(
        source=sources.find(path),
        eval_source=None,
        kind=kind,
        tokenizer_url=tokenizer_url,
        tokenizer_digest=tokenizer_digest(tokenizer),
        pad_id=tokenizer.pad_token_id,
        seq_len=seq_len,
        pack=True,
        truncate=False,
        eval_fraction=eval_fraction,
    )


def save_model(folder: Path, seed: int = 0) -> int:
    """Put a Llama with random weights beside the tokenizer in the folder; return its size."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    return model.num_parameters()
