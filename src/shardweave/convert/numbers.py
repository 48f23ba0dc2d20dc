"""Stored arrays that are one number."""

from __future__ import annotations

from typing import Final

from shardweave.convert.states import HINT
from shardweave.errors import FormatError
from shardweave.store.read import Reader

_NUMBERS: Final = ("float32", "float64", "int32", "int64")


def number(reader: Reader, key: str, where: str) -> float:
    """The value of a tensor that is one number.

    Raises:
        FormatError: It has dims, or is of another dtype.
    """
    tensor = reader.manifest.tensors[key]
    if tensor.shape or tensor.dtype not in _NUMBERS:
        raise FormatError(
            "a count and a setting are numbers",
            where=f"{where}, {key!r}",
            equation=f"{tensor.dtype} {tensor.shape} is none of {', '.join(_NUMBERS)} without dims",
            hint=f"save the state again, or {HINT}",
        )
    return float(reader.load(key))
