"""Markers: tensors filled with their own indices, and the indices read back from what became of them.

Each element gets a number that no other element has. A dtype holds whole numbers exactly up to a
limit only, so where there are more elements than that the numbers are written as digits, one
tensor for each digit. Two numberings are used, of which one is shuffled: arithmetic on values,
or a choice made by looking at them, cannot give the same elements under both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import ProbeError
from shardweave.layout.table import Ints

PADDING = -1
"""Stands for the declared pad value among element numbers."""

Shape = tuple[int, ...]

# Whole numbers are exact up to here.
_EXACT = {
    "int64": 2**53,
    "int32": 2**31 - 1,
    "float64": 2**53,
    "float32": 2**24,
    "float16": 2**11,
    "bfloat16": 2**8,
}

# Neighbouring markers are this far apart where there is room, so that sums and products of markers are none.
_STRIDE = 1009


@dataclass(frozen=True)
class Numbering:
    """One numbering of the elements of some tensors, numbered one tensor after the other.

    Attributes:
        shapes: The tensors.
        code: The number of each element.
        element: The element of each number.
        stride: Distance between two markers.
        base: How many digits there are; a power of it is at least the number of elements.
        dtype: The dtype of the marker tensors, by torch's name.
    """

    shapes: Mapping[str, Shape]
    code: Ints
    element: Ints
    stride: int
    base: int
    dtype: str

    @property
    def num_digits(self) -> int:
        """How many tensors it takes to write a number."""
        digits = 1
        while self.base**digits < len(self.code):
            digits += 1
        return digits

    def tensors(self, digit: int, arrays: str) -> dict[str, Any]:
        """The marker tensors of one digit, as arrays of ``numpy`` or of ``torch``."""
        values = (self.code // self.base**digit % self.base) * self.stride + 1
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()])
        pieces = np.split(values, ends[:-1]) if len(ends) else []
        return {
            name: _array(piece.reshape(shape), self.dtype, arrays)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def read(self, digits: Sequence[NDArray[Any]], *, pad: float | None, where: str) -> Ints:
        """The elements that the values stand for, or ``PADDING``.

        Raises:
            ProbeError: A value is neither a marker nor the pad value.
        """
        code = np.zeros(digits[0].shape, dtype=np.int64)
        padded = np.ones(digits[0].shape, dtype=bool)
        wrong = np.zeros(digits[0].shape, dtype=bool)
        for i, values in enumerate(digits):
            is_pad = _equals(values, pad)
            known = ~is_pad & np.isfinite(values) & (values >= 1) & (values <= self.stride * self.base)
            number = np.where(known, values, 1).astype(np.int64)
            known &= (number == np.where(known, values, 1)) & ((number - 1) % self.stride == 0)
            wrong |= ~is_pad & ~known
            padded &= is_pad
            code += np.where(is_pad, 0, (number - 1) // self.stride) * self.base**i
        # Padding is padding in every digit; half of a number is no number.
        wrong |= ~padded & np.logical_or.reduce([_equals(values, pad) for values in digits])
        wrong |= ~padded & (code >= len(self.code))
        if wrong.any():
            position = tuple(int(i) for i in np.argwhere(wrong)[0])
            zero = digits[0][position] == 0
            raise ProbeError(
                "a partition function only moves values",
                where=f"{where}, position {list(position)}",
                equation=f"value({digits[0][position]}) is no marker",
                hint="declare padding with pad=0"
                if zero and pad is None
                else "probe the cut alone, without arithmetic, casts or padding of another value",
            )
        return np.where(padded, PADDING, self.element[np.where(padded, 0, code)] if len(self.element) else 0)


def numberings(shapes: Mapping[str, Shape], dtype: str) -> Iterator[Numbering]:
    """The element order itself, and a shuffled one that is the same in every run."""
    if dtype not in _EXACT:
        raise ProbeError(
            "markers have a dtype that holds whole numbers",
            equation=f"{dtype!r} is not among {', '.join(_EXACT)}",
            hint="use int64, or float64 where the function needs floats",
        )
    total = sum(math.prod(shape) for shape in shapes.values())
    stride = _STRIDE if total * _STRIDE < _EXACT[dtype] else 1
    base = (_EXACT[dtype] - 1) // stride
    for code in (np.arange(total), np.random.default_rng(0).permutation(total)):
        element = np.empty_like(code)
        element[code] = np.arange(total)
        yield Numbering(shapes, code, element, stride, base, dtype)


def values_of(result: Any) -> NDArray[Any]:
    """The values of an array of numpy or torch as a numpy array that does not change with it."""
    if hasattr(result, "detach"):
        result = result.detach().cpu()
        result = (result.double() if result.is_floating_point() else result).numpy()
    values = np.array(result)
    return values.astype(np.float64) if values.dtype.kind == "f" else values


def shares_memory(result: Any, given: Any) -> bool:
    """Whether writing to one array may change the other."""
    if hasattr(result, "untyped_storage") and hasattr(given, "untyped_storage"):
        return bool(
            result.untyped_storage().nbytes()
            and result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        )
    return (
        isinstance(result, np.ndarray) and isinstance(given, np.ndarray) and np.shares_memory(result, given)
    )


def _array(values: Ints, dtype: str, arrays: str) -> Any:
    if arrays == "torch":
        import torch

        return torch.from_numpy(values.copy()).to(getattr(torch, dtype))
    if arrays != "numpy" or dtype == "bfloat16":
        raise ProbeError(
            "markers are arrays of numpy or of torch",
            equation=f"arrays={arrays!r}, dtype={dtype!r}",
            hint='use arrays="numpy" or arrays="torch"; only torch has bfloat16',
        )
    return values.astype(dtype)


def _equals(values: NDArray[Any], pad: float | None) -> NDArray[np.bool_]:
    if pad is None:
        return np.zeros(values.shape, dtype=bool)
    return np.asarray(np.isnan(values) if math.isnan(pad) else values == pad, dtype=bool)
