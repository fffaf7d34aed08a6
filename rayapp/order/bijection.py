"""A keyed bijection of [0, size), which can be evaluated at single positions."""

from __future__ import annotations

from hashlib import shake_256

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

MAX_ROWS = 2**40
NUM_ROUNDS = 16  # 8 and 12 are measurably uneven for 5 to 8 rows: see tests/test_order.py


def permutation(positions: npt.ArrayLike, num_rows: int, seed: int, epoch: int) -> Ints:
    """Return the row at each position of one epoch: a bijection of [0, num_rows).

    `positions` may have any shape; no other position is computed or stored. All arithmetic is on
    integers, so the result is the same on every machine.

    >>> permutation(range(5), num_rows=5, seed=0, epoch=0).tolist()
    [4, 3, 2, 0, 1]
    """
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(outside("num_rows", num_rows, 1, MAX_ROWS))
    places = np.asarray(positions, dtype=np.int64)
    if places.size and not 0 <= places.min() <= places.max() < num_rows:
        raise ValueError(
            f"positions in [{places.min()}, {places.max()}] are out of range: an epoch has "
            f"num_rows={num_rows}. Set positions within [0, {num_rows})"
        )
    return permute(places, num_rows, round_keys("rows", seed, epoch))


def permute(places: Ints, size: int, keys: Words) -> Ints:
    """Encrypt each place repeatedly until it lands inside [0, size) (cycle walking).

    The cipher permutes the smallest power of two >= size, so fewer than 2 passes are needed on
    average. Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", method 2.
    """
    bits = (size - 1).bit_length()
    words = _encrypt(places.ravel().astype(np.uint64), bits, keys)
    outside = np.flatnonzero(words >= size)
    while outside.size:
        words[outside] = _encrypt(words[outside], bits, keys)
        outside = outside[words[outside] >= size]
    return words.astype(np.int64).reshape(places.shape)


def _encrypt(words: Words, bits: int, keys: Words) -> Words:
    """Permute [0, 2**bits) by a Feistel network; the halves differ by one bit if `bits` is odd."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left_mask, right_mask = np.uint64(2**left_bits - 1), np.uint64(2**right_bits - 1)
    left, right = words >> np.uint64(right_bits), words & right_mask
    for left_key, right_key in keys.reshape(-1, 2):  # [rounds] -> [rounds / 2, 2]
        left ^= _mix(right ^ left_key) & left_mask
        right ^= _mix(left ^ right_key) & right_mask
    return (left << np.uint64(right_bits)) | right


def _mix(words: Words) -> Words:
    """Hash 64 bits to 64 bits. Source: the finaliser of splitmix64, Steele et al. 2014."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def round_keys(purpose: str, seed: int, epoch: int) -> Words:
    """Derive the keys of one permutation; each purpose draws from a stream of its own."""
    text = f"{purpose} {seed} {epoch}".encode()
    digest = shake_256(text).digest(8 * NUM_ROUNDS)  # output of any length, unlike blake2b
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def outside(name: str, value: int, low: int, high: int | None) -> str:
    """Return the error text for a number out of range; `high=None` means no upper limit."""
    rule = f">= {low}" if high is None else f"in [{low}, {high}]"
    return f"{name}={value} is out of range: {name} must be {rule}. Set {name} {rule}"
