"""Random numbers that are functions of a seed, a name and a global index, and of nothing else.

A generator with a state gives other numbers to other layouts: who draws first, and how much, decides. Here
the number of element ``i`` of a tensor is computed from its own index, so that a rank that holds ten elements
of a weight draws these ten, with the bits that one process on the whole weight draws for them. The same goes
for dropout: which elements fall out does not depend on who computes them.

The generator is Philox4x32-10 (Salmon et al., SC 2011). Its counter is the index, its key a digest of seed,
name and step. All else is done in operations that IEEE 754 rounds exactly (no library's logarithm), so that
the bits are the same on any machine, wherever in an array an element lies.

>>> whole = normal(7, "weight", range(10))
>>> bool((normal(7, "weight", range(3, 8)) == whole[3:8]).all())
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardweave.errors import OutsideError
from shardweave.layout.box import Box
from shardweave.layout.table import Ints
from shardweave.train.arrays import Held

Floats = NDArray[np.float64]
Quantile = Callable[[Floats], Floats]
"""What a uniform draw from the open interval (0, 1) becomes."""

_MASK = 0xFFFFFFFF
_CHUNK = 1 << 13
"""Blocks that are computed at once: what they need stays in the second-level cache."""


# --- the generator ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key:
    """Which stream of numbers: two words of the key, and the two upper words of the counter."""

    words: tuple[int, int, int, int]


def key_of(seed: int, name: str, *, step: int = 0) -> Key:
    """The stream of a name. Law: equal arguments, equal streams; others are independent of each other.

    Args:
        seed: Any integer.
        name: Of the tensor or the place, such as ``"model.layers.3.dropout"``; the same on all ranks.
        step: For what is drawn anew at every step.
    """
    digest = blake2b(f"{seed}\0{step}\0{name}".encode(), digest_size=16).digest()
    a, b, c, d = (int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4))
    return Key((a, b, c, d))


def philox(counter: Sequence[Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10 of many counters at once.

    Args:
        counter: Four words, each an integer or an int64 array (numpy or torch) of words below 2**32.
        key: Two words.

    Returns:
        Four words for each counter.

    >>> [f"{word:08x}" for word in philox((0, 0, 0, 0), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 wraps round, which is the product modulo 2**64; the mask undoes the sign of its upper half.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK
        c2, c3 = ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def _blocks(key: Key, blocks: Any) -> tuple[Any, Any]:
    """The two draws of each block: integers below 2**52, as exact as a double that is centred can be."""
    k0, k1, c2, c3 = key.words
    small = not math.prod(blocks.shape) or int(blocks.max()) <= _MASK
    low, high = (blocks, 0) if small else (blocks & _MASK, blocks >> 32)
    a, b, c, d = philox((low, high, c2, c3), (k0, k1))
    return ((a >> 6) << 26) | (b >> 6), ((c >> 6) << 26) | (d >> 6)


def _unit(draws: Any) -> Any:
    """Draws as doubles in the open interval (0, 1), symmetric about its middle."""
    floats = draws.astype(np.float64) if isinstance(draws, np.ndarray) else draws.to(torch.float64)
    floats += 0.5
    floats *= 2.0**-52
    return floats


def _pairs(key: Key, blocks: Ints) -> Floats:
    """The numbers of blocks ``(n, m)``, two for each, side by side: ``(n, 2 * m)``."""
    found = np.empty((*blocks.shape, 2))
    found[..., 0], found[..., 1] = _blocks(key, blocks)
    found += 0.5
    found *= 2.0**-52
    return found.reshape(len(blocks), -1)


# --- numbers of indices -------------------------------------------------------------------------


def uniform(seed: int, name: str, index: Any, *, step: int = 0) -> Any:
    """A number of the open interval (0, 1) for each index.

    Args:
        seed: Any integer.
        name: Of the tensor or the place.
        index: Global indices from 0: a ``range`` of step 1, a numpy array, or a torch tensor of any shape.
        step: For what is drawn anew at every step.

    Returns:
        Doubles in the shape and on the device of the index; numpy for a ``range``.

    Raises:
        OutsideError: An index is negative.
    """
    key = key_of(seed, name, step=step)
    return _at(key, index) if isinstance(index, Tensor) else _numpy(key, index, _as_drawn)


def normal(seed: int, name: str, index: Any, *, step: int = 0) -> Floats:
    """A number of the standard normal distribution for each index; see ``uniform`` for the arguments.

    Law: it is ``normal_quantile(uniform(...))``, to the bit. The result is numpy's.
    """
    return _numpy(key_of(seed, name, step=step), index, normal_quantile)


def _as_drawn(unit: Floats) -> Floats:
    return unit


def _numpy(key: Key, index: Any, quantile: Quantile) -> Floats:
    if isinstance(index, range) and index.step == 1:
        _check_from_zero(min(index, default=0))
        return _box(key, (index.stop,), Box((index,)), quantile)
    return _drawn(key, np.asarray(index, dtype=np.int64), quantile)


def _drawn(key: Key, index: Ints, quantile: Quantile) -> Floats:
    return quantile(_at(key, index).reshape(-1)).reshape(index.shape)


def _at(key: Key, index: Any) -> Any:
    """The uniform draws of any indices, each from its own block."""
    _check_from_zero(int(index.min()) if math.prod(index.shape) else 0)
    on_device = isinstance(index, Tensor) and index.device.type != "cpu"
    found: Any = np.empty(index.shape)
    if isinstance(index, Tensor):
        found = index.new_empty(index.shape, dtype=torch.float64)
    flat, into = index.reshape(-1), found.reshape(-1)
    chunk = _CHUNK << 10 if on_device else _CHUNK  # a device wants large kernels, a processor warm caches
    for start in range(0, len(flat), chunk):
        here = flat[start : start + chunk]
        first, second = _blocks(key, here >> 1)
        into[start : start + chunk] = _unit(first + (second - first) * (here & 1))
    return found


def _check_from_zero(least: int) -> None:
    if least < 0:
        raise OutsideError(
            "random numbers belong to the elements of a tensor",
            equation=f"index({least}) < 0",
            hint="count global indices from 0",
        )


def _box(key: Key, shape: tuple[int, ...], box: Box, quantile: Quantile) -> Floats:
    """The numbers of a box of an array of a shape, many rows of blocks at once.

    Two neighbouring elements share a block. A stretch of a row begins in the first half of one or in the
    second: all rows alike where rows are of even length, and every other one where they are not.
    """
    if not box.dims or any(dim.step != 1 for dim in box.dims):
        flat = np.ravel_multi_index(np.ix_(*box.dims), shape) if box.dims else np.zeros((), np.int64)
        return _drawn(key, np.asarray(flat, dtype=np.int64), quantile)
    if not box.numel:
        return np.empty(box.shape)
    width = len(box.dims[-1])
    found = np.empty((box.numel // width, width))
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    first: Ints = np.full((), box.dims[-1].start, dtype=np.int64)
    for dim, stride in zip(box.dims[:-1], strides, strict=False):
        first = first[..., None] + np.arange(dim.start, dim.stop) * stride
    first = first.reshape(-1)
    if len(found) > 1 and _follow(first, width):
        found, first, width = found.reshape(1, -1), first[:1], found.size
    for side in (0, 1):
        rows = np.flatnonzero((first & 1) == side)
        _fill_rows(key, found, rows, first, side, quantile)
    return found.reshape(box.shape)


def _follow(first: Ints, width: int) -> bool:
    """Whether rows of a width are one stretch."""
    return bool((np.diff(first) == width).all())


def _fill_rows(key: Key, found: Floats, rows: Ints, first: Ints, side: int, quantile: Quantile) -> None:
    """Fill rows that all begin in one half of a block, some rows and columns at a time."""
    width = found.shape[1]
    per_row = -(-(width + side) // 2)
    wide = min(per_row, _CHUNK)
    high = max(1, _CHUNK // wide)
    for top in range(0, len(rows), high):
        some = rows[top : top + high]
        for left in range(0, per_row, wide):
            right = min(left + wide, per_row)
            blocks = (first[some] >> 1)[:, None] + np.arange(left, right)
            begin, end = 2 * left - side, min(2 * right - side, width)
            skip, begin = max(0, -begin), max(0, begin)
            found[some, begin:end] = quantile(_pairs(key, blocks))[:, skip : skip + end - begin]


# --- distributions ------------------------------------------------------------------------------

# The rational approximations of Wichura, Algorithm AS 241 (PPND16), Applied Statistics 37 (1988), highest
# power first: numerator and denominator in the middle, in the tails, and far out.
_MIDDLE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip
_TAIL = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1,
     1.27045825245236838258e0, 3.64784832476320460504e0, 5.76949722146069140550e0,
     4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2,
     1.48103976427480074590e-1, 6.89767334985100004550e-1, 1.67638483018380384940e0,
     2.05319162663775882187e0, 1.0),
)  # fmt: skip
_FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3,
     2.65321895265761230930e-2, 2.96560571828504891230e-1, 1.78482653991729133580e0,
     5.46378491116411436990e0, 6.65790464350110377720e0),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5,
     7.86869131145613259100e-4, 1.48753612908506148525e-2, 1.36929880922735805310e-1,
     5.99832206555887937690e-1, 1.0),
)  # fmt: skip
_LN2 = (6.93147180369123816490e-1, 1.90821492927058770002e-10)
"""The logarithm of 2 as two doubles, the first with room for an exact multiple."""


def normal_quantile(unit: Floats) -> Floats:
    """The value that a standard normal number is below with probability ``unit``, to about 1e-15.

    >>> normal_quantile(np.array([0.5, 0.975])).round(6).tolist()
    [0.0, 1.959964]
    """
    q = unit - 0.5
    found = q * q
    np.subtract(0.180625, found, out=found)
    found = _ratio(_MIDDLE, found)
    found *= q
    flat, outer = found.reshape(-1), np.flatnonzero(np.abs(q) > 0.425)
    if len(outer):
        side = q.reshape(-1)[outer]
        near = unit.reshape(-1)[outer]
        r = np.sqrt(-_log(np.where(side < 0, near, 1.0 - near)))
        value = _ratio(_TAIL, r - 1.6)
        far = np.flatnonzero(r > 5.0)
        if len(far):
            value[far] = _ratio(_FAR, r[far] - 5.0)
        flat[outer] = np.copysign(value, side)
    return found


def _ratio(of: tuple[tuple[float, ...], tuple[float, ...]], x: Floats) -> Floats:
    above, below = (_polynomial(coefficients, x) for coefficients in of)
    above /= below
    return above


def _polynomial(coefficients: Sequence[float], x: Floats) -> Floats:
    value = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        value += coefficient
        value *= x
    value += coefficients[-1]
    return value


def _log(x: Floats) -> Floats:
    """The natural logarithm, of exactly rounded operations: those of libraries differ in their last bits."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = np.where(small, 2 * mantissa, mantissa)
    scale = (exponent - small).astype(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial([2.0 / (2 * k + 1) for k in range(11, 0, -1)] + [0.0], s * s)
    return scale * _LN2[0] + (scale * _LN2[1] + (s * series + 2.0 * s))


@dataclass(frozen=True, slots=True)
class Normal:
    """Draws of the normal distribution."""

    std: float
    mean: float = 0.0

    def __call__(self, unit: Floats) -> Floats:
        """The value at which the distribution reaches ``unit``."""
        value = normal_quantile(unit)
        value *= self.std
        value += self.mean
        return value


@dataclass(frozen=True, slots=True)
class Uniform:
    """Draws of the open interval from ``low`` to ``high``."""

    low: float
    high: float

    def __call__(self, unit: Floats) -> Floats:
        """The value at which the distribution reaches ``unit``."""
        return self.low + (self.high - self.low) * unit


# --- what is done with them ---------------------------------------------------------------------


def init(into: Tensor, held: Held, *, seed: int, quantile: Quantile) -> None:
    """Fill a rank's array with the numbers of the elements that it holds; padding becomes 0.

    The stream is that of the member's name, the index is the place in its shape: a layer, an expert, a row or
    a column has its numbers wherever it lies. They are computed as doubles and then rounded, so that a model
    in bfloat16 begins with the rounded numbers of the one in float64.

    Args:
        into: The array, of the shape that ``held`` says.
        held: What the rank holds in it, from ``held_arrays``.
        seed: Any integer.
        quantile: The distribution: ``Normal(0.02)``, ``Uniform(-1, 1)``, or any function of a uniform draw.

    Laws:
        The parts of all ranks of any layout are, to the bit, those of one process.
    """
    held.check(tuple(into.shape))
    with torch.no_grad():
        into.zero_()
        for part in held.parts:
            values = _box(key_of(seed, part.name), part.shape, part.box, quantile)
            part.view(into).copy_(torch.from_numpy(values))


def dropout(x: Tensor, p: float, *, seed: int, name: str, index: Tensor, step: int = 0) -> Tensor:
    """``x`` without a share ``p`` of its elements, and the rest larger by as much.

    Args:
        x: Any values.
        p: The probability of an element to fall out, below 1.
        seed: Any integer.
        name: Of the place; every use of dropout in a model has its own.
        index: The global index of each element, in a shape that broadcasts to that of ``x``; such as the slot
            in the microbatch times the width, plus the column.
        step: The number of the microbatch, counted through all steps and all data ranks.
    """
    if not 0 <= p < 1:
        raise OutsideError(
            "a share of the elements falls out, and not all",
            where=f"dropout {name!r}",
            equation=f"0 <= p({p}) < 1 does not hold",
            hint="use p=0 for none",
        )
    if not p:
        return x
    kept: Tensor = uniform(seed, name, index.to(torch.int64), step=step) >= p
    return x * (kept.to(x.dtype) / (1 - p))
