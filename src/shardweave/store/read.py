"""Reading stored tensors through a manifest, whatever the format: boxes of bytes become one array.

Every byte goes from the file straight to its place when both sides are contiguous there, and
through one small buffer when they are not. Before anything is allocated, the boxes are proved to
cover the tensor exactly once and to lie inside their files. After that proof a file that shrinks
is still noticed, because every read is repeated until it is complete.
"""

from __future__ import annotations

import math
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import (
    DtypeError,
    FormatError,
    GapError,
    MissingFileError,
    OutsideError,
    OverlapError,
    TruncatedError,
    UnknownNameError,
)
from shardweave.store.manifest import ITEMSIZE, Extent, Manifest, StoredTensor
from shardweave.store.paths import inside

Array = NDArray[Any]

_MAX_OPEN = 64
_MAX_EXPANDED = 1 << 30
_BUFFER_BYTES = 16 << 20
_NUMPY = {
    "bool": "?", "uint8": "u1", "int8": "i1", "uint16": "<u2", "int16": "<i2", "uint32": "<u4",
    "int32": "<i4", "uint64": "<u8", "int64": "<i8", "float16": "<f2", "float32": "<f4", "float64": "<f8",
    "complex64": "<c8",
}  # fmt: skip


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that carries a stored dtype; unsigned words of its size where numpy has none.

    >>> numpy_dtype("float32").name, numpy_dtype("bfloat16").name, numpy_dtype("float8_e5m2").name
    ('float32', 'uint16', 'uint8')
    """
    if dtype not in ITEMSIZE:
        raise DtypeError(
            "a stored dtype is unknown",
            equation=f"dtype={dtype!r} not in {sorted(ITEMSIZE)}",
            hint="convert the tensor to a listed dtype with the software that wrote it",
        )
    return np.dtype(_NUMPY.get(dtype, f"<u{ITEMSIZE[dtype]}"))


def load(manifest: Manifest, key: str) -> Array:
    """A stored tensor, whole: ``Reader(manifest).load(key)`` with the files closed afterwards."""
    with Reader(manifest) as reader:
        return reader.load(key)


def iter_rows(manifest: Manifest, key: str, *, max_bytes: int) -> Iterator[tuple[tuple[int, ...], Array]]:
    """A stored tensor in slabs: ``Reader(manifest).iter_rows`` with the files closed afterwards."""
    with Reader(manifest) as reader:
        yield from reader.iter_rows(key, max_bytes=max_bytes)


class Reader:
    """Reads tensors of one manifest and keeps their files open in between; use one a thread.

    Values of dtypes that numpy lacks come as unsigned words, so no bit is ever interpreted.

    Args:
        manifest: Of any format.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._open: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._scratch = np.empty(0, np.uint8)
        self._proved: str | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. The reader may be used again."""
        while self._open:
            os.close(self._open.popitem()[1][0])

    def load(self, key: str) -> Array:
        """A whole tensor in one new array.

        Raises:
            UnknownNameError: No tensor of that key.
            GapError, OverlapError, OutsideError: The boxes do not tile the tensor.
            MissingFileError, PathError, TruncatedError: A file is not there, elsewhere, or too short.
        """
        tensor = self._tensor(key)
        return self.load_box(key, (0,) * len(tensor.shape), tensor.shape)

    def load_box(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Array:
        """One box of a tensor in one new array; reads only the files and rows that it touches.

        Raises:
            OutsideError: The box leaves the tensor. Otherwise as ``load``.
        """
        tensor = self._tensor(key)
        self._prove(tensor)
        offset, shape = tuple(offset), tuple(shape)
        self._check_box(tensor, offset, shape)
        item = ITEMSIZE[tensor.dtype]
        if math.prod(shape) * item > _MAX_EXPANDED:
            self._refuse_expansion(tensor, math.prod(shape) * item)
        out = np.empty(shape, f"<u{item}")
        self._fill(tensor, offset, out)
        return out.view(numpy_dtype(tensor.dtype))

    def fill(self, key: str, offset: Sequence[int], out: Array) -> None:
        """Read the box of the shape of ``out`` at ``offset`` into ``out``, a view with any strides.

        Args:
            key: The tensor.
            offset: First index of the box.
            out: Words of the size of the tensor's dtype.

        Raises:
            OutsideError: The box leaves the tensor. Otherwise as ``load``.
        """
        tensor = self._tensor(key)
        self._prove(tensor)
        self._check_box(tensor, tuple(offset), out.shape)
        self._fill(tensor, offset, out)

    def iter_rows(self, key: str, *, max_bytes: int) -> Iterator[tuple[tuple[int, ...], Array]]:
        """A tensor in slabs of at most ``max_bytes`` (but at least one element) in row-major order.

        A slab is as many whole rows as fit. When one row does not fit, the row is cut the same way
        along the next dim. So the bytes of all slabs, one after the other, are the tensor's row-major
        bytes, however the files cut it. A tensor without elements has no slab.

        Yields:
            The slab's offset in the tensor, and the slab.
        """
        tensor = self._tensor(key)
        self._prove(tensor)
        shape, item = tensor.shape, ITEMSIZE[tensor.dtype]
        if not math.prod(shape):
            return
        if not shape:
            yield (), self.load_box(key, (), ())
            return
        rows = [math.prod(shape[d + 1 :]) * item for d in range(len(shape))]
        dim = next((d for d, row in enumerate(rows) if row <= max_bytes), len(shape) - 1)
        step = max(1, max_bytes // rows[dim])
        tail = shape[dim + 1 :]
        for outer in np.ndindex(shape[:dim]):
            for start in range(0, shape[dim], step):
                offset = (*outer, start, *(0 for _ in tail))
                yield (
                    offset,
                    self.load_box(key, offset, (*(1 for _ in outer), min(step, shape[dim] - start), *tail)),
                )

    def _check_box(self, tensor: StoredTensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if not len(offset) == len(shape) == len(tensor.shape) or not all(
            0 <= o <= o + n <= size for o, n, size in zip(offset, shape, tensor.shape, strict=True)
        ):
            raise OutsideError(
                "a box must lie inside its tensor",
                where=repr(tensor.key),
                equation=f"offset={offset} shape={shape} tensor shape={tensor.shape}",
                hint="ask for a box within the tensor's shape",
            )

    def _tensor(self, key: str) -> StoredTensor:
        try:
            return self.manifest.tensors[key]
        except KeyError:
            raise UnknownNameError(
                "a checkpoint holds no tensor of this key",
                where=str(self.manifest.root),
                equation=f"key={key!r}",
                hint="list the manifest's tensors and use one of their keys",
            ) from None

    def _prove(self, tensor: StoredTensor) -> None:
        """The boxes tile the tensor and lie inside their files; nothing was allocated yet."""
        if tensor.key == self._proved:
            return
        item = numpy_dtype(tensor.dtype).itemsize
        _prove_tiling(tensor)
        for extent in tensor.extents:
            if not extent.numel:
                continue
            end = extent.start + _span(extent.shape, _strides(extent)) * item
            size = self._file(extent.file)[1]
            if end > size:
                raise TruncatedError(
                    "a file ends before the bytes of a tensor",
                    where=f"{tensor.key!r} in {extent.file!r}",
                    equation=f"bytes {extent.start}..{end} of a file of {size} bytes",
                    hint="copy or download the file again",
                )
        self._proved = tensor.key

    def _refuse_expansion(self, tensor: StoredTensor, wanted: int) -> None:
        """Strides of 0 let a small file promise an array that no memory holds."""
        stored = sum(self._file(name)[1] for name in {e.file for e in tensor.extents})
        if wanted > stored:
            raise FormatError(
                "a large tensor must not be larger than the files that hold it",
                where=repr(tensor.key),
                equation=f"bytes of the array={wanted} > bytes of its files={stored}",
                hint="read it in slabs with iter_rows if the repetition is meant",
            )

    def _file(self, name: str) -> tuple[int, int]:
        """Descriptor and size of a file, from the few that are kept open."""
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        path = inside(self.manifest.root, name, where=str(self.manifest.root))
        fd = open_regular(path)
        if len(self._open) >= _MAX_OPEN:
            os.close(self._open.popitem(last=False)[1][0])
        self._open[name] = fd, os.fstat(fd).st_size
        return self._open[name]

    def _fill(self, tensor: StoredTensor, offset: Sequence[int], out: Array) -> None:
        if not out.size:
            return
        low = np.array(offset, np.int64)
        high = low + np.array(out.shape, np.int64)
        offsets = np.array([e.offset for e in tensor.extents], np.int64).reshape(
            len(tensor.extents), low.size
        )
        ends = offsets + np.array([e.shape for e in tensor.extents], np.int64).reshape(
            len(tensor.extents), low.size
        )
        begin, end = np.maximum(offsets, low), np.minimum(ends, high)
        for i in np.flatnonzero((begin < end).all(axis=1)):
            extent = tensor.extents[i]
            strides = _strides(extent)
            first = extent.start + out.itemsize * sum(
                int(a) * s for a, s in zip(begin[i] - offsets[i], strides, strict=True)
            )
            cut: list[Any] = [
                slice(int(a), int(b)) for a, b in zip(begin[i] - low, end[i] - low, strict=True)
            ]
            target = out[(*cut, ...)]
            where = f"{tensor.key!r} in {extent.file!r}"
            self._copy(self._file(extent.file)[0], first, strides, target, where=where)

    def _copy(self, fd: int, start: int, strides: tuple[int, ...], out: Array, *, where: str) -> None:
        """Read one strided box of a file into a view, halving it until what lies between fits the buffer."""
        span = _span(out.shape, strides)
        # Only the strides of dims longer than one say where elements lie.
        dense = span == out.size and all(
            n == 1 or s == math.prod(out.shape[d + 1 :])
            for d, (n, s) in enumerate(zip(out.shape, strides, strict=True))
        )
        if dense and out.flags.c_contiguous:
            read_into(fd, start, out.reshape(-1).view(np.uint8).data, where=where)
        elif span * out.itemsize <= _BUFFER_BYTES:
            words = self._words(span, out.dtype)
            read_into(fd, start, words.view(np.uint8).data, where=where)
            steps = tuple(s * out.itemsize for s in strides)
            out[...] = np.lib.stride_tricks.as_strided(words, out.shape, steps, writeable=False)
        else:
            dim = max(range(out.ndim), key=lambda d: (out.shape[d] - 1) * strides[d])
            half = out.shape[dim] // 2
            parts = np.split(out, [half], axis=dim)
            self._copy(fd, start, strides, parts[0], where=where)
            self._copy(fd, start + half * strides[dim] * out.itemsize, strides, parts[1], where=where)

    def _words(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Room for what lies between wanted elements; kept, because fresh memory is slow to touch."""
        if self._scratch.nbytes < count * dtype.itemsize:
            self._scratch = np.empty(count * dtype.itemsize, np.uint8)
        return self._scratch[: count * dtype.itemsize].view(dtype)


def open_regular(path: Path) -> int:
    """A read-only descriptor of a regular file; anything that could block or is no file is refused."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingFileError(
            "a file of the checkpoint is missing", where=str(path), hint="copy or download it again"
        ) from None
    except OSError as error:
        raise FormatError(
            "a file of the checkpoint cannot be opened",
            where=str(path),
            equation=str(error),
            hint="check its rights",
        ) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError(
            "a file of the checkpoint must be a regular file",
            where=str(path),
            hint="replace it by the file itself",
        )
    return fd


def read_into(fd: int, start: int, buffer: memoryview, *, where: str) -> None:
    """Fill a buffer from a file position, however short the single reads are.

    Raises:
        TruncatedError: The file ends first.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], start + done)
        if count <= 0:
            raise TruncatedError(
                "a file ends before the bytes that were promised",
                where=where,
                equation=f"bytes {start}..{start + len(buffer)} wanted, {done} read",
                hint="copy or download the file again",
            )
        done += count


def _strides(extent: Extent) -> tuple[int, ...]:
    if extent.strides is not None:
        return extent.strides
    return tuple(math.prod(extent.shape[d + 1 :]) for d in range(len(extent.shape)))


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a box that is not empty, both included."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _prove_tiling(tensor: StoredTensor) -> None:
    """Each element lies in exactly one box: all boxes inside, volumes add up, no two overlap."""
    rank = len(tensor.shape)
    for extent in tensor.extents:
        lengths = {len(extent.offset), len(extent.shape), len(_strides(extent))}
        if (
            lengths != {rank}
            or min((*extent.offset, *extent.shape, *_strides(extent), extent.start, 0)) < 0
            or any(
                o + n > size for o, n, size in zip(extent.offset, extent.shape, tensor.shape, strict=False)
            )
        ):
            raise OutsideError(
                "a stored box must lie inside its tensor, with strides and start that are not negative",
                where=f"{tensor.key!r} in {extent.file!r}",
                equation=f"{extent} of tensor shape={tensor.shape}",
                hint="the checkpoint is damaged or its reader is wrong; do not use it",
            )
    boxes = [e for e in tensor.extents if e.numel]
    held, needed = sum(e.numel for e in boxes), math.prod(tensor.shape)
    if held < needed:
        raise GapError(
            "the stored boxes do not cover the tensor",
            where=repr(tensor.key),
            equation=f"sum of box sizes={held} != tensor size={needed}",
            hint="a file or a part of the checkpoint is missing; do not load it partially",
        )
    clash = _overlap(boxes) if len(boxes) > 1 else None
    if clash or held > needed:
        pair = clash or (boxes[0], boxes[-1])
        raise OverlapError(
            "two stored boxes hold the same element",
            where=repr(tensor.key),
            equation=" and ".join(f"offset={e.offset} shape={e.shape} in {e.file!r}" for e in pair),
            hint="name one of them as the owner; the checkpoint does not say which is right",
        )


def _overlap(boxes: Sequence[Extent]) -> tuple[Extent, Extent] | None:
    """Two boxes that share an element, or none; sorted along the dim that separates most."""
    low = np.array([e.offset for e in boxes], np.int64).reshape(len(boxes), -1)
    high = low + np.array([e.shape for e in boxes], np.int64).reshape(len(boxes), -1)
    if not low.shape[1]:
        return boxes[0], boxes[1]
    dim = int(np.argmax([len(np.unique(low[:, d])) for d in range(low.shape[1])]))
    order = np.argsort(low[:, dim], kind="stable")
    low, high = low[order], high[order]
    last = np.searchsorted(low[:, dim], high[:, dim], side="left")
    for i, stop in enumerate(last):
        near = slice(i + 1, int(stop))
        hit = np.flatnonzero(((low[near] < high[i]) & (low[i] < high[near])).all(axis=1))
        if hit.size:
            return boxes[order[i]], boxes[order[i + 1 + int(hit[0])]]
    return None
