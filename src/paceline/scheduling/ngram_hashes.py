"""Hashes of n-grams, of many at once and rolled on by a token. Pure arithmetic modulo 2 ** 64.

A polynomial of the tokens, the last one with exponent 0, is rolled on in a step. Before it says where an n-gram is kept, a salt
is added and the bits are mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

_FACTOR = 0x9E3779B97F4A7C15  # odd; 2 ** 64 over the golden ratio
_MIXER = 0xD6E8FEB86659FD93  # odd, with as many ones as zeros
_BITS = 0xFFFFFFFFFFFFFFFF
_HALF = 32


def window_hashes(tokens: NDArray[np.int32], size: int) -> Hashes:
    """Return the hash of every run of `size` tokens, in order."""
    plain: Hashes = tokens.astype(np.int64).view(np.uint64)
    num_windows = len(tokens) - size + 1
    hashes = np.zeros(max(0, num_windows), np.uint64)
    factor = np.uint64(_FACTOR)
    for start in range(size if num_windows > 0 else 0):
        hashes *= factor
        hashes += plain[start : start + num_windows]
    return hashes


def mixed_hashes(hashes: Hashes, salt: int) -> Hashes:
    """Return the hashes with a salt, their bits mixed."""
    found: Any = hashes + np.uint64(salt)
    for _ in range(2):
        found ^= found >> np.uint64(_HALF)
        found *= np.uint64(_MIXER)
    found ^= found >> np.uint64(_HALF)
    return found  # type: ignore[no-any-return]


def salt_of_size(salt: int, size: int) -> int:
    """Return a salt that is another one for n-grams of each size, whose hashes are small numbers alike."""
    return (salt + size * _MIXER) & _BITS


def hash_of(tokens: Sequence[int]) -> int:
    """Return the hash of these tokens, as `window_hashes` has it."""
    found = 0
    for token in tokens:
        found = (found * _FACTOR + token) & _BITS
    return found


def power_of(size: int) -> int:
    """Return what the first of `size` tokens is multiplied by, which `rolled` takes."""
    return pow(_FACTOR, size - 1, 2**64)


def rolled(found: int, power: int, first: int, following: int) -> int:
    """Return the hash without its first token and with one that follows."""
    return ((found - first * power) * _FACTOR + following) & _BITS


def mixed(found: int, salt: int) -> int:
    """Return a hash with a salt, its bits mixed, as `mixed_hashes` has it."""
    found = (found + salt) & _BITS
    for _ in range(2):
        found = ((found ^ found >> _HALF) * _MIXER) & _BITS
    return found ^ found >> _HALF
