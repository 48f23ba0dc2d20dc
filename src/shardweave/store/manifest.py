"""What a checkpoint folder holds, format by format reduced to one thing: boxes of bytes in files.

Every format that shardweave reads stores plain row-major arrays somewhere inside its files. A
``Manifest`` says which box of which stored tensor lies at which byte of which file; above it
nothing needs to know a format. Readers return one from an existing folder without loading data;
writers return one for a folder they have laid out, whose payload bytes are then filled in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardweave.layout.box import flat_boxes
from shardweave.layout.dtype import DTYPES, itemsize

ITEMSIZE: Mapping[str, int] = {name: itemsize(name) for name in DTYPES}
"""Bytes of one element, by torch's name of the dtype without the ``torch.``."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One box of a stored tensor: row-major, uncompressed, at a byte of a file.

    Attributes:
        offset: First index of the box in the stored tensor, one int a dim.
        shape: Size of the box, one int a dim; same length as ``offset``.
        file: Path of the file relative to the manifest's root, with forward slashes.
        start: First byte of the box in the file.
        strides: Element strides of the box in the file; ``None`` means row-major without gaps.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return math.prod(self.shape)


def run_extents(
    shape: tuple[int, ...], start: int, stop: int, file: str, at: int, dtype: str
) -> Iterator[Extent]:
    """The extents of elements ``start`` to ``stop`` of an array, which lie in a row from byte ``at``."""
    for box in flat_boxes(shape, start, stop):
        yield Extent(box.offset, box.shape, file, at)
        at += box.numel * ITEMSIZE[dtype]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a format stores it: its key there, dtype, full shape, and the boxes it is cut into."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a writer is asked to lay out; its values come later.

    Attributes:
        key: The key it is stored under.
        dtype: torch's name of the dtype without the ``torch.``.
        shape: Full shape.
        chunks: ``(offset, shape)`` of each box it is stored as; empty means one box, the whole tensor.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint folder: every stored tensor, every file with its size, and the format's own records.

    Attributes:
        root: The folder.
        format: Name of the format ("hf", "torch_dist").
        tensors: Stored tensors by key, in the order of the files.
        files: Size in bytes of each data file, by path relative to ``root``.
        records: What the format records beside tensors (for instance Megatron's args), plain values only.
    """

    root: Path
    format: str
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, int]
    records: Mapping[str, Any] = field(default_factory=dict)
