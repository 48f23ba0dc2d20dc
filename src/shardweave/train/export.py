"""The weights of a run as a Hugging Face folder, written by all ranks without gathering a tensor."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardweave.convert.staging import reserve
from shardweave.dialects import hf
from shardweave.errors import ExistsError, UnknownNameError
from shardweave.layout import Layout
from shardweave.layout.dtype import itemsize
from shardweave.models import Model
from shardweave.store import safetensors
from shardweave.store.manifest import Extent, Manifest, TensorSpec
from shardweave.store.native_agree import Exchange, agree, alone, together
from shardweave.store.native_write import SAVING
from shardweave.store.strict_json import some
from shardweave.train.checkpoint import weights_of, words_of

_SLAB_BYTES = 16 << 20
_PREFIX = "model/"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Values, and the box of a stored tensor that they are."""

    extent: Extent
    offset: tuple[int, ...]
    values: Tensor


def save_weights(
    path: Path,
    *,
    layout: Layout,
    rank: int,
    arrays: Mapping[str, Tensor],
    model: Model,
    config: Mapping[str, Any],
    exchange: Exchange = alone,
    number: int = 0,
    dtype: str = "",
    max_file_bytes: int = 5_000_000_000,
    fsync: bool = True,
) -> None:
    """Write the weights that all ranks hold as safetensors files with a ``config.json``.

    The files are laid out first; then every rank writes its boxes to their places, each box one of the ranks
    that hold it, with equal loads. The folder appears whole or not at all.

    Args:
        path: The folder; it is not there yet, or empty.
        layout: What ranks hold.
        rank: The global rank.
        arrays: Its arrays by name.
        model: The model, whose names and order the files have.
        config: Its Hugging Face config.
        exchange: How ranks hear of each other.
        number: This rank, counted from 0 among those that save.
        dtype: Round the weights to this dtype; by default they stay as they are.
        max_file_bytes: Start another file where one would grow beyond this.
        fsync: Whether to wait until the disk has everything. Only tests should not.

    Raises:
        ExistsError: The folder holds something.
        GapError, OverlapError, UnknownNameError: The ranks do not hold the model, each element once.
        WriteError: The disk is full, or the folder cannot be written.
        The error of any rank is that of all, and nothing is left behind.
    """
    path = Path(path)
    staging = path.with_name(SAVING + path.name)

    def first() -> None:
        if number == 0:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise ExistsError(
                    "the folder to write weights into is new",
                    where=str(path),
                    equation="it holds something",
                    hint="name another folder",
                )
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

    try:
        agreed = agree(weights_of(layout, rank, arrays), exchange=exchange, first=first)

        def lay_out() -> bytes:
            if number == 0:
                said = {entry.key: (entry.dtype, entry.shape) for mine in agreed.entries for entry in mine}
                manifest = safetensors.allocate(
                    staging, _specs(model, said, dtype), max_file_bytes=max_file_bytes
                )
                for name in manifest.files:
                    reserve(staging / name)
            return b""

        together(exchange, lay_out)
        shares = agreed.shares[number]

        def write() -> bytes:
            manifest = safetensors.read(staging)
            pieces = []
            for share in shares:
                one = agreed.held[share.entry]
                extent = manifest.tensors[one.key.removeprefix(_PREFIX)].extents[0]
                pieces.append(_Piece(extent, share.offset, one.part(share.offset, share.size)))
            _write(manifest, pieces, dtype, fsync=fsync)
            return b""

        together(exchange, write)

        def publish() -> bytes:
            if number == 0:
                _publish(staging, path, config, fsync=fsync)
            return b""

        together(exchange, publish)
    except BaseException:
        if number == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _specs(model: Model, said: Mapping[str, tuple[str, tuple[int, ...]]], dtype: str) -> list[TensorSpec]:
    """The tensors of the model's files, in their order, each with the dtype that ranks hold it in."""
    wanted = [name for name, _ in hf.layout(model, with_copies=False).arrays(0).items()]
    found = {key.removeprefix(_PREFIX): value for key, value in said.items()}
    different = sorted(set(wanted) ^ set(found))
    if different:
        raise UnknownNameError(
            "ranks hold the tensors of the model, all of them and no other",
            where=f"model of {model.family}",
            equation=f"{len(different)} held or of the model, and not both: {some(map(repr, different))}",
            hint="give the model that the layout was made of",
        )
    return [TensorSpec(name, dtype or found[name][0], found[name][1]) for name in wanted]


def _write(manifest: Manifest, pieces: Sequence[_Piece], dtype: str, *, fsync: bool) -> None:
    """Write boxes to their places, one file after the other."""
    to = getattr(torch, dtype) if dtype else None
    shapes = {t.extents[0]: t.shape for t in manifest.tensors.values()}
    sizes = {t.extents[0]: itemsize(t.dtype) for t in manifest.tensors.values()}
    opened: tuple[str, int] | None = None
    try:
        for piece in sorted(pieces, key=lambda piece: (piece.extent.file, piece.extent.start, piece.offset)):
            if opened is None or opened[0] != piece.extent.file:
                if opened is not None:
                    _close(opened[1], fsync)
                opened = piece.extent.file, os.open(manifest.root / piece.extent.file, os.O_RDWR)
            shape, item = shapes[piece.extent], sizes[piece.extent]
            for offset, values in _slabs(piece.offset, piece.values, item):
                words = np.ascontiguousarray(words_of(values if to is None else values.to(to)))
                for at, data in _stretches(shape, offset, words):
                    _put(opened[1], data, piece.extent.start + at * item)
    finally:
        if opened is not None:
            _close(opened[1], fsync)


def _slabs(offset: tuple[int, ...], values: Tensor, item: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """A box in pieces of bounded size along its first dim, for what is cast or not contiguous."""
    rows = values.shape[0] if values.dim() else 0
    step = max(1, _SLAB_BYTES * rows // max(1, values.numel() * item)) if rows else 1
    if rows <= step:
        yield offset, values
        return
    for at in range(0, rows, step):
        yield (offset[0] + at, *offset[1:]), values[at : at + step]


def _stretches(
    shape: Sequence[int], offset: Sequence[int], words: np.ndarray
) -> Iterator[tuple[int, memoryview]]:
    """A box as stretches that follow one another in its tensor: the first element of each, and its bytes."""
    if not words.size:
        return
    # From this dim on a stretch goes: all dims behind it are whole.
    dim = len(shape)
    while dim and words.shape[dim:] == tuple(shape[dim:]):
        dim -= 1
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    outer = words.shape[:dim]
    rows = words.reshape(*outer, -1)
    first = sum(o * s for o, s in zip(offset, strides, strict=True))
    for index in np.ndindex(outer):
        at = first + sum(i * s for i, s in zip(index, strides, strict=False))
        yield at, rows[index].view(np.uint8).data


def _put(fd: int, data: memoryview, at: int) -> None:
    while len(data):
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done


def _close(fd: int, fsync: bool) -> None:
    try:
        if fsync:
            os.fsync(fd)
    finally:
        os.close(fd)


def _publish(staging: Path, path: Path, config: Mapping[str, Any], *, fsync: bool) -> None:
    manifest = safetensors.read(staging)
    values, dtypes = dict(config), {tensor.dtype for tensor in manifest.tensors.values()}
    if len(dtypes) == 1:
        values["torch_dtype" if "torch_dtype" in values else "dtype"] = next(iter(dtypes))
    with (staging / "config.json").open("w", encoding="utf-8") as file:
        file.write(json.dumps(values, indent=2, sort_keys=True) + "\n")
        file.flush()
        if fsync:
            os.fsync(file.fileno())
    safetensors.finish(manifest, fsync=fsync)
    if path.exists():
        path.rmdir()
    staging.rename(path)
    if fsync:
        fd = os.open(path.parent, os.O_RDONLY)
        _close(fd, fsync)
