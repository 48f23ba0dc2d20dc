"""Dtypes by torch's names, without torch: their sizes, and which conversions lose nothing."""

from __future__ import annotations

from collections.abc import Mapping

from shardweave.errors import DtypeError

# name -> bytes, kind, and for floats (exponent bits, mantissa bits), for integers (bits, signed)
_DTYPES: Mapping[str, tuple[int, str, int, int]] = {
    "bool": (1, "bool", 0, 0),
    "uint8": (1, "int", 8, 0),
    "int8": (1, "int", 8, 1),
    "uint16": (2, "int", 16, 0),
    "int16": (2, "int", 16, 1),
    "uint32": (4, "int", 32, 0),
    "int32": (4, "int", 32, 1),
    "uint64": (8, "int", 64, 0),
    "int64": (8, "int", 64, 1),
    "float8_e4m3fn": (1, "float", 4, 3),
    "float8_e5m2": (1, "float", 5, 2),
    # Another bias and no negative zero: no other format holds their values and none of theirs is safe.
    "float8_e4m3fnuz": (1, "fnuz", 4, 3),
    "float8_e5m2fnuz": (1, "fnuz", 5, 2),
    "float8_e8m0fnu": (1, "scale", 8, 0),
    "float16": (2, "float", 5, 10),
    "bfloat16": (2, "float", 8, 7),
    "float32": (4, "float", 8, 23),
    "float64": (8, "float", 11, 52),
    "complex64": (8, "complex", 8, 23),
}

DTYPES: tuple[str, ...] = tuple(_DTYPES)


def floating(dtype: str) -> bool:
    """Whether values of a dtype are floating-point numbers of their own, which may be rounded.

    >>> floating("bfloat16"), floating("int64"), floating("float8_e8m0fnu")
    (True, False, False)
    """
    return dtype in _DTYPES and _DTYPES[dtype][1] == "float"


def itemsize(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        DtypeError: The dtype is unknown.
    """
    if dtype not in _DTYPES:
        raise DtypeError(
            "a dtype is known",
            equation=f"dtype({dtype!r}) is not among {', '.join(_DTYPES)}",
            hint="use torch's name without the 'torch.'",
        )
    return _DTYPES[dtype][0]


def lossless(source: str, target: str) -> bool:
    """Whether every value of ``source`` is a value of ``target``.

    >>> lossless("bfloat16", "float32"), lossless("float32", "bfloat16"), lossless("int64", "float32")
    (True, False, False)
    """
    itemsize(source), itemsize(target)
    if source == target:
        return True
    _, kind, a, b = _DTYPES[source]
    _, other, c, d = _DTYPES[target]
    if kind != other:
        return False
    if kind == "float":
        return a <= c and b <= d
    if kind == "int":
        # An unsigned source fits a signed target only with a bit to spare.
        return a <= c and (b == d or (d == 1 and a < c))
    return False
