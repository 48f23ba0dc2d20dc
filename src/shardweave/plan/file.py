"""The file form of a plan: a digest, both layouts in notation, and the columns as little-endian bytes."""

from __future__ import annotations

import hashlib
import math
import zlib
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from shardweave.errors import FormatError
from shardweave.layout import format_layout, parse_layout, prove
from shardweave.layout.table import Ints
from shardweave.plan.plan import BOX_COLUMNS, MOVE_COLUMNS, Family, Plan
from shardweave.plan.proof import prove_plan

_MAGIC = b"shardweave.plan/1\n"
_DIGEST_BYTES = 16
_COLUMNS = BOX_COLUMNS + MOVE_COLUMNS

# zlib packs at most about a thousandfold, so a file cannot ask for more memory than this many times its size.
_MOST_UNPACKED = 1 << 11


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


class _Body(msgspec.Struct, array_like=True, frozen=True):
    src: str
    dst: str
    families: list[_Family]


def encode(plan: Plan) -> bytes:
    """A plan as bytes. Law: ``encode(decode(b)) == b``, columns and layouts alike.

    The same plan gives the same bytes in every process, so that ranks can compare plans by digest.
    """
    tensors = {tensor: i for i, tensor in enumerate(plan.dst.tensors)}
    families = [
        _Family(tensors[f.tensor], f.src_rule, f.dst_rule, [_pack(getattr(f, name)) for name in _COLUMNS])
        for f in plan.families
    ]
    body = msgspec.msgpack.encode(_Body(format_layout(plan.src), format_layout(plan.dst), families))
    return _MAGIC + _digest(body) + body


def decode(data: bytes) -> Plan:
    """The plan that ``encode`` wrote, proved again. What it allocates is bounded by the size of the file.

    Raises:
        FormatError: The bytes are not a plan of this version, or damaged.
        NotationError, MeshError, BufferRuleError, ModelError: A layout in them is none.
        PlanError, OutsideError, HolderError, OverlapError, GapError: The columns do not do what the
            layouts need.
    """
    start = len(_MAGIC) + _DIGEST_BYTES
    if data[: len(_MAGIC)] != _MAGIC:
        _refuse("a plan file has a known version", f"{data[: len(_MAGIC)]!r} != {_MAGIC!r}")
    body = data[start:]
    if data[len(_MAGIC) : start] != _digest(body):
        _refuse("a plan file has the digest of its bytes", f"{len(data)} bytes with another digest")
    try:
        file = msgspec.msgpack.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _refuse("a plan file is readable", str(error))
    src, dst = parse_layout(file.src), parse_layout(file.dst)
    prove(src)
    prove(dst)
    families = []
    for f in file.families:
        if not 0 <= f.tensor < len(dst.tensors) or len(f.columns) != len(_COLUMNS):
            _refuse(
                "a plan file names tensors of its layouts",
                f"tensor {f.tensor} of {len(dst.tensors)}, {len(f.columns)} columns of {len(_COLUMNS)}",
            )
        columns = (_unpack(column, most=_MOST_UNPACKED * len(data)) for column in f.columns)
        families.append(Family(dst.tensors[f.tensor], f.src_rule, f.dst_rule, *columns))
    plan = Plan(src, dst, tuple(families))
    prove_plan(plan)
    return plan


def save(plan: Plan, path: Path) -> None:
    """Write a plan to a file."""
    path.write_bytes(encode(plan))


def load(path: Path) -> Plan:
    """Read a plan from a file, and prove it."""
    return decode(path.read_bytes())


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _pack(column: Ints) -> _Column:
    width = next(w for w in (1, 2, 4, 8) if w == 8 or int(column.max(initial=0)) < 1 << (8 * w))
    return _Column(width, column.shape, zlib.compress(column.astype(f"<u{width}").tobytes(), 1))


def _unpack(column: _Column, *, most: int) -> Ints:
    size = math.prod(column.shape) * column.width
    if column.width not in (1, 2, 4, 8) or min(column.shape, default=0) < 0 or not 0 <= size <= most:
        _refuse("the columns of a plan have sane sizes", f"shape{column.shape} of width {column.width}")
    unpack = zlib.decompressobj()
    try:
        data = unpack.decompress(column.data, size + 1)
    except zlib.error as error:
        _refuse("the columns of a plan can be unpacked", str(error))
    if len(data) != size:
        _refuse("the columns of a plan have their declared size", f"{len(data)} != {size} bytes")
    return np.frombuffer(data, dtype=f"<u{column.width}").astype(np.int64).reshape(column.shape)


def _refuse(rule: str, equation: str) -> NoReturn:
    raise FormatError(rule, where="a plan file", equation=equation, hint="make the plan again") from None
