"""The two sums that a fingerprint is made of, exactly: words times numbers, and sums times weights.

Where numba is installed a few lines of integers are compiled for the processor, which then waits for memory;
otherwise it is numpy, with doubles whose every partial sum is an integer below 2**53. The bits are the same.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from shardweave.layout.table import Ints

Words: TypeAlias = NDArray[np.int32]

WORD = 4
"""Bytes of a word."""
LANES = 3
MOST_WORDS = 1 << 10
"""Words of a row. Times a word (2**31) and a number (2**21) that is a sum of at most 2**62."""
NUMBER_BITS = 22
"""Bits of a number, with its sign."""
WEIGHT_BITS = 27
"""Bits of a weight, which is from 1 to 2**27."""
MOST_TERMS = 1 << 14
"""Sums that are weighted at once. Times a weight and a third of one (2**21) that is at most 2**62."""
THIRD_BITS = 21
"""Bits of the lower thirds of a sum."""
LOW_BITS = 11
"""The lower half of a number: with the bits of a word (31) and of how many words (10) a double's 52."""

_BLOCK_WORDS = 1 << 16
"""Words that are made doubles at once: what the second-level cache holds."""
_WORTH_BYTES = 1 << 20
"""From arrays of so many bytes on numba is loaded, which takes most of a second, once."""
_LOADING = threading.Lock()


def prepare(num_bytes: int) -> None:
    """Load numba, if that is worth it for so many bytes and was not done before."""
    if num_bytes >= _WORTH_BYTES and not compiled.cache_info().currsize:
        with _LOADING:  # threads that come together wait for one of them
            compiled()


def row_sums(rows: Words, numbers: Words) -> Ints:
    """The sum of each row's words times their numbers: ``(rows, LANES)``.

    Args:
        rows: ``(rows, n)`` of any strides and alignment, ``n`` at most ``MOST_WORDS``, or more where several
            words with no byte in common have one number.
        numbers: ``(LANES, n)``, from ``-2**21`` to ``2**21 - 1``.

    >>> rows, numbers = np.arange(6, dtype=np.int32).reshape(2, 3), np.ones((LANES, 3), dtype=np.int32)
    >>> row_sums(rows, numbers).tolist()
    [[3, 3, 3], [12, 12, 12]]
    """
    found = _loaded()
    if found is None:
        return row_sums_in_doubles(rows, numbers)
    count, width = rows.shape
    numbers, sums = np.ascontiguousarray(numbers), np.empty((count, LANES), dtype=np.int64)
    step, stride = count, rows.strides[0] if count > 1 else WORD * width
    gather = not rows.flags.aligned or stride % WORD or stride < 0 or rows.strides[1] != WORD
    if gather:
        step, stride = max(_BLOCK_WORDS // max(width, 1), 1), WORD * width
    for at in range(0, count, step):
        block = rows[at : at + step]
        block = np.array(block, order="C") if gather else block
        memory = as_strided(block, ((len(block) - 1) * stride // WORD + width,), (WORD,))
        found[0](memory, stride // WORD, numbers, sums[at : at + step])
    return sums


def weighted_thirds(sums: Ints, weights: Ints) -> Ints:
    """The weighted sums of each third of the bits of sums, the highest with the sign first.

    Args:
        sums: ``(parts, length, n, LANES)``, from ``-2**62`` to ``2**62``; ``length`` at most
            ``MOST_TERMS``.
        weights: ``(parts or 1, length, LANES)``, from 1 to ``2**27``.

    Returns:
        ``(3, parts, n, LANES)``: times ``2**42``, ``2**21`` and 1 they add up to the weighted sums.
    """
    parts, _, n, _ = sums.shape
    found = np.zeros((3, parts, n, LANES), dtype=np.int64)
    loaded = _loaded()
    if loaded is not None:
        loaded[1](np.ascontiguousarray(sums), np.ascontiguousarray(weights), found)
        return found
    for i, third in enumerate(in_thirds(sums)):
        np.einsum("plrk,plk->prk", third, weights, out=found[i])
    return found


# --- by numpy alone -----------------------------------------------------------------------------


def row_sums_in_doubles(rows: Words, numbers: Words) -> Ints:
    """As ``row_sums``."""
    count, width = rows.shape
    halves = in_halves(numbers)
    sums = np.empty((count, LANES), dtype=np.int64)
    step = max(_BLOCK_WORDS // max(width, 1), 1)
    for at in range(0, count, step):
        found = (rows[at : at + step].astype(np.float64) @ halves).astype(np.int64)
        sums[at : at + step] = (found[:, :LANES] << LOW_BITS) + found[:, LANES:]
    return sums


def in_halves(numbers: Words) -> NDArray[np.float64]:
    """The upper halves of numbers and their lower ones, ``(n, 2 * LANES)``."""
    low = numbers & (1 << LOW_BITS) - 1
    return np.concatenate([numbers >> LOW_BITS, low]).T.astype(np.float64)


def in_thirds(sums: Any) -> tuple[Any, Any, Any]:
    """The bits of sums, an array's or a tensor's: the highest with the sign, the middle and the lowest."""
    mask = (1 << THIRD_BITS) - 1
    return sums >> 2 * THIRD_BITS, sums >> THIRD_BITS & mask, sums & mask


# --- compiled -----------------------------------------------------------------------------------

_Compiled: TypeAlias = tuple[Callable[[Words, int, Words, Ints], None], Callable[[Ints, Ints, Ints], None]]


@functools.cache
def compiled() -> _Compiled | None:
    """Both sums for this processor; None without numba, or where it is switched off or fails."""
    try:
        from numba import config, int32, int64, njit, types

        if getattr(config, "DISABLE_JIT", 0):
            return None
        words, numbers = (types.Array(int32, ndim, "C", readonly=True) for ndim in (1, 2))
        sums, weights = (types.Array(int64, ndim, "C", readonly=True) for ndim in (4, 3))
        rows: Any = njit(types.void(words, int64, numbers, int64[:, ::1]), nogil=True)(_row_sums)
        thirds: Any = njit(types.void(sums, weights, int64[:, :, :, ::1]), nogil=True)(_weighted_thirds)
    except ImportError:
        return None
    except Exception as error:  # a library that is not there, a compiler that does not know the processor
        warnings.warn(f"numba fails, so numpy takes fingerprints: {error!s:.200}", stacklevel=2)
        return None
    return rows, thirds


def _loaded() -> _Compiled | None:
    """What was compiled, where it was."""
    return compiled() if compiled.cache_info().currsize else None


def _row_sums(memory: Any, stride: int, numbers: Any, sums: Any) -> None:
    """Rows that begin ``stride`` words apart, four at once from four places, which memory gives side by side.

    By slices the compiler knows that no index is negative.
    """
    width, last, quarter = numbers.shape[1], len(sums) - 1, (len(sums) + 3) // 4
    first, second, third = numbers[0], numbers[1], numbers[2]
    for p in range(quarter):
        q, r, s = min(p + quarter, last), min(p + 2 * quarter, last), min(p + 3 * quarter, last)
        row_p, row_q = memory[p * stride :][:width], memory[q * stride :][:width]
        row_r, row_s = memory[r * stride :][:width], memory[s * stride :][:width]
        p1 = p2 = p3 = q1 = q2 = q3 = r1 = r2 = r3 = s1 = s2 = s3 = np.int64(0)
        for j in range(len(row_p)):
            one, two, three = np.int64(first[j]), np.int64(second[j]), np.int64(third[j])
            word = np.int64(row_p[j])
            p1, p2, p3 = p1 + word * one, p2 + word * two, p3 + word * three
            word = np.int64(row_q[j])
            q1, q2, q3 = q1 + word * one, q2 + word * two, q3 + word * three
            word = np.int64(row_r[j])
            r1, r2, r3 = r1 + word * one, r2 + word * two, r3 + word * three
            word = np.int64(row_s[j])
            s1, s2, s3 = s1 + word * one, s2 + word * two, s3 + word * three
        sums[p, 0], sums[p, 1], sums[p, 2] = p1, p2, p3
        sums[q, 0], sums[q, 1], sums[q, 2] = q1, q2, q3
        sums[r, 0], sums[r, 1], sums[r, 2] = r1, r2, r3
        sums[s, 0], sums[s, 1], sums[s, 2] = s1, s2, s3


def _weighted_thirds(sums: Any, weights: Any, found: Any) -> None:
    """Each sum is in registers while its thirds are weighted, which ``in_thirds`` would write to memory."""
    parts, length, n, lanes = sums.shape
    mask = np.int64((1 << THIRD_BITS) - 1)
    for p in range(parts):
        q = p if len(weights) > 1 else 0
        for i in range(length):
            for r in range(n):
                for k in range(lanes):
                    number, weight = sums[p, i, r, k], weights[q, i, k]
                    found[0, p, r, k] += (number >> 2 * THIRD_BITS) * weight
                    found[1, p, r, k] += (number >> THIRD_BITS & mask) * weight
                    found[2, p, r, k] += (number & mask) * weight
