"""The file form of a plan: both layouts in notation, and the columns as little-endian bytes."""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec
import numpy as np

from shardweave.errors import FormatError
from shardweave.layout import format_layout, parse_layout
from shardweave.layout.table import Ints
from shardweave.plan.plan import Family, Plan

_MAGIC = "shardweave.plan/1"
_COLUMNS = ("count", "index", "index_step", "src_at", "src_step", "dst_at", "dst_step", "box", "src", "dst")


class _Column(msgspec.Struct, array_like=True, frozen=True):
    """The narrowest unsigned integers that hold the column, compressed."""

    width: int
    shape: tuple[int, ...]
    data: bytes


class _Family(msgspec.Struct, array_like=True, frozen=True):
    tensor: int
    src_rule: int
    dst_rule: int
    columns: list[_Column]


class _File(msgspec.Struct, array_like=True, frozen=True):
    magic: str
    src: str
    dst: str
    families: list[_Family]


def encode(plan: Plan) -> bytes:
    """A plan as bytes. Law: ``decode(encode(p)) == p``, columns and layouts alike."""
    tensors = {tensor: i for i, tensor in enumerate(plan.dst.tensors)}
    families = [
        _Family(
            tensors[f.tensor], f.src_rule, f.dst_rule, [_pack(getattr(f, name)) for name in _COLUMNS]
        )
        for f in plan.families
    ]
    return msgspec.msgpack.encode(_File(_MAGIC, format_layout(plan.src), format_layout(plan.dst), families))


def decode(data: bytes) -> Plan:
    """The plan that ``encode`` wrote, proved again.

    Raises:
        FormatError: The bytes are not a plan of this version.
        HolderError, OverlapError, GapError: The columns do not do what the layouts need.
    """
    from shardweave.plan.proof import prove_plan

    try:
        file = msgspec.msgpack.decode(data, type=_File)
    except msgspec.MsgspecError as error:
        raise FormatError("a plan file is readable", equation=str(error), hint="make the plan again") from error
    if file.magic != _MAGIC:
        raise FormatError(
            "a plan file has a known version", equation=f"{file.magic!r} != {_MAGIC!r}", hint="make the plan again"
        )
    src, dst = parse_layout(file.src), parse_layout(file.dst)
    families = []
    for f in file.families:
        in_range = f.tensor < len(dst.tensors) and f.src_rule < len(src.rules) and f.dst_rule < len(dst.rules)
        if not in_range or len(f.columns) != len(_COLUMNS):
            raise FormatError(
                "a plan file names tensors and buffers of its layouts",
                equation=f"tensor {f.tensor}, buffers {f.src_rule} and {f.dst_rule}",
                hint="make the plan again",
            )
        families.append(Family(dst.tensors[f.tensor], f.src_rule, f.dst_rule, *(_unpack(c) for c in f.columns)))
    plan = Plan(src, dst, tuple(families))
    prove_plan(plan)
    return plan


def save(plan: Plan, path: Path) -> None:
    """Write a plan to a file."""
    path.write_bytes(encode(plan))


def load(path: Path) -> Plan:
    """Read a plan from a file, and prove it."""
    return decode(path.read_bytes())


def _pack(column: Ints) -> _Column:
    width = next(w for w in (1, 2, 4, 8) if w == 8 or int(column.max(initial=0)) < 1 << (8 * w))
    return _Column(width, column.shape, zlib.compress(column.astype(f"<u{width}").tobytes(), 1))


def _unpack(column: _Column) -> Ints:
    size = int(np.prod(column.shape, dtype=np.int64)) * column.width
    if column.width not in (1, 2, 4, 8) or any(n < 0 for n in column.shape) or size > 1 << 34:
        raise FormatError("a plan's columns have sane sizes", equation=f"{column.shape} of width {column.width}", hint="make the plan again")
    unpack = zlib.decompressobj()
    try:
        data = unpack.decompress(column.data, size + 1)
    except zlib.error as error:
        raise FormatError("a plan's columns can be read", equation=str(error), hint="make the plan again") from error
    if len(data) != size:
        raise FormatError("a plan's columns have their declared size", equation=f"{len(data)} != {size} bytes", hint="make the plan again")
    return np.frombuffer(data, dtype=f"<u{column.width}").astype(np.int64).reshape(column.shape)
