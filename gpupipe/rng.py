"""Random numbers that depend on what they are for, and on nothing that was drawn before.

Philox 4x64-10 turns (key, counter) into four 64-bit words without any state. The key is the seed; the counter is
(operation, epoch, index, occurrence). So the crop of one sample is the same at any batch size, worker count and world
size, and after any resume.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; `numpy.random.Philox` is the same
generator and the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError

U64 = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_WORD = (1 << 64) - 1
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

# Second key word: keeps these streams apart from a plain Philox(seed) that a user may run beside them. ASCII "gpupipe".
KEY_DOMAIN = 0x67707570697065


class Op(IntEnum):
    """What a number is drawn for. The values are part of the pixels: never change or reuse one."""

    CROP = 1
    HORIZONTAL_FLIP = 2
    VERTICAL_FLIP = 3
    JITTER = 4
    GREYSCALE = 5
    SUBSTITUTE = 6
    SHARDS = 7
    WINDOWS = 8
    PADDED_CROP = 9
    APPLY = 10
    CHOICE = 11
    BLUR = 12
    SOLARIZE = 13
    POSTERIZE = 14
    INVERT = 15
    AUTOCONTRAST = 16
    EQUALIZE = 17
    SHARPNESS = 18
    ROTATION = 19
    AFFINE = 20
    TRIVIAL_AUGMENT = 21
    RAND_AUGMENT = 22
    AUTO_AUGMENT = 23
    ERASING = 24
    MIXING = 25
    FUNCTION = 26


def check_seed(seed: object) -> int:
    """A seed as an int, or ConfigError unless it is an integer in [0, 2**63)."""
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool) and 0 <= int(seed) < 1 << 63:
        return int(seed)
    raise ConfigError(
        f"seed={seed!r} is not valid: it must be an integer from 0 to 2**63 - 1",
        field="seed",
        value=seed,
        allowed="an integer from 0 to 2**63 - 1",
    )


def first_counter_word(op: Op, ordinal: int, block: int, view: int = 0) -> int:
    """Counter word 0: the view, the operation, which of several equal steps it is for, and the block of four words.

    The block sits lowest, so that NumPy's generator, which counts up from there, yields the same blocks in order.
    """
    return (view << 48) | (int(op) << 32) | (ordinal << 16) | block


def _multiply(x: U64, multiplier: np.uint64) -> tuple[U64, U64]:
    """High and low word of the 128-bit products, from 32-bit halves."""
    low_m, high_m = multiplier & _LOW, multiplier >> _HALF
    low, high = x & _LOW, x >> _HALF
    cross = low * high_m
    low *= low_m
    low >>= _HALF
    middle = high * low_m
    middle += low
    middle += cross & _LOW
    high *= high_m
    cross >>= _HALF
    high += cross
    middle >>= _HALF
    high += middle
    return high, x * multiplier


def philox(counter: tuple[U64, U64, U64, U64], key: tuple[int, int]) -> tuple[U64, U64, U64, U64]:
    """Philox 4x64-10.

    Args:
        counter: Four arrays of uint64 of one shape; word 0 first.
        key: Two integers in [0, 2**64).

    Returns:
        Four arrays of uint64 of that shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        high1 ^= c1
        high1 ^= np.uint64(k0)
        high0 ^= c3
        high0 ^= np.uint64(k1)
        c0, c1, c2, c3 = high1, low1, high0, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniforms(
    seed: int,
    epoch: int,
    indices: npt.NDArray[np.int64],
    occurrences: npt.NDArray[np.int64],
    first_words: Sequence[int],
) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) for each sample and each block.

    Args:
        seed: In [0, 2**63).
        epoch: In [0, 2**63).
        indices: int64 (n,): positions in the data set.
        occurrences: int64 (n,): how often the index came before in the global order of the epoch.
        first_words: One `first_counter_word` for each block.

    Returns:
        float64 (blocks, 4, n), 53 random bits each.
    """
    blocks, n = len(first_words), len(indices)
    shape = (blocks, n)
    counter = (
        np.repeat(np.asarray(first_words, np.uint64), n).reshape(shape),
        np.full(shape, epoch, np.uint64),
        np.broadcast_to(indices.astype(np.uint64), shape),
        np.broadcast_to(occurrences.astype(np.uint64), shape),
    )
    out = np.empty((blocks, 4, n))
    for position, word in enumerate(philox(counter, (seed, KEY_DOMAIN))):
        np.multiply(word >> np.uint64(11), 2.0**-53, out=out[:, position])
    return out


def stream(op: Op, *, seed: int, epoch: int, number: int) -> np.random.Philox:
    """Words in a row, for what is drawn once an epoch rather than for each sample.

    NumPy promises that the words of a bit generator stay the same in all its versions; of its distributions and
    shuffles it does not. `random_raw(n)` yields the words behind `uniforms` for occurrence 0, block after block.

    Args:
        op: What they are for.
        seed, epoch: In [0, 2**63).
        number: Which of several streams, in the place of a sample's index.
    """
    before = first_counter_word(op, 0, 0) - 1  # NumPy counts up before it draws
    return np.random.Philox(
        key=np.array([seed, KEY_DOMAIN], np.uint64), counter=np.array([before, epoch, number, 0], np.uint64)
    )
