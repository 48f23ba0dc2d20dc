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
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import (
    DtypeError,
    FormatError,
    MissingFileError,
    OutsideError,
    TruncatedError,
    UnknownNameError,
)
from shardweave.store.boxes import Boxes
from shardweave.store.manifest import ITEMSIZE, Manifest, StoredTensor
from shardweave.store.paths import inside
from shardweave.store.tiling import prove_tiling, strides_of

Array = NDArray[Any]

_MAX_OPEN = 64
_MAX_EXPANDED = 1 << 30
_BUFFER_BYTES = 4 << 20
_ROW_BYTES = 1 << 14
"""Rows at least as long go straight to their place; to name each costs more than to copy shorter ones."""
_RUN_BYTES = 1 << 10
"""Rows at least as long, and far apart, are worth a call of the operating system each."""
_GAP_BYTES = 1 << 16
"""What lies between rows is skipped where it is more; less costs less to read than another call."""
_MAX_VECTOR = 1024
"""Rows that one call of the operating system takes at most."""
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
            "the dtype of a stored tensor is known",
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
        self._proved: tuple[str, Boxes] | None = None
        self._sharing = False
        self._held: tuple[int, int, int] | None = None

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
        offset, shape = tuple(offset), tuple(shape)
        boxes = self._prove(tensor)
        self._check_box(tensor, offset, shape)
        item = ITEMSIZE[tensor.dtype]
        if math.prod(shape) * item > _MAX_EXPANDED:
            self._refuse_expansion(tensor, math.prod(shape) * item)
        out = np.empty(shape, f"<u{item}")
        self._fill(tensor, boxes, offset, out)
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
        boxes = self._prove(tensor)
        self._check_box(tensor, tuple(offset), out.shape)
        self._fill(tensor, boxes, offset, out)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Within it, boxes that lie side by side in a file are cut from one read.

        What is read is kept until the end, so the files must not change meanwhile.
        """
        self._sharing = True
        try:
            yield
        finally:
            self._sharing, self._held = False, None

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
                "a box lies inside its tensor",
                where=f"{self.manifest.root}, {tensor.key!r}",
                equation=f"offset={offset} shape={shape} tensor shape={tensor.shape}",
                hint="ask for a box within the tensor's shape",
            )

    def _tensor(self, key: str) -> StoredTensor:
        try:
            return self.manifest.tensors[key]
        except KeyError:
            raise UnknownNameError(
                "a checkpoint holds the tensor that is asked for",
                where=str(self.manifest.root),
                equation=f"key={key!r}",
                hint="list the manifest's tensors and use one of their keys",
            ) from None

    def _prove(self, tensor: StoredTensor) -> Boxes:
        """The boxes tile the tensor and lie inside their files; nothing was allocated yet."""
        if self._proved is not None and tensor.key == self._proved[0]:
            return self._proved[1]
        item = numpy_dtype(tensor.dtype).itemsize
        prove_tiling([tensor], root=self.manifest.root)
        for extent in tensor.extents:
            if not extent.numel:
                continue
            end = extent.start + _span(extent.shape, strides_of(extent)) * item
            size = self._file(extent.file)[1]
            if end > size:
                raise TruncatedError(
                    "a file holds all bytes of its tensors",
                    where=f"{self.manifest.root}, {tensor.key!r} in {extent.file!r}",
                    equation=f"bytes {extent.start}..{end} of a file of {size} bytes",
                    hint="copy or download the file again",
                )
        boxes = Boxes([e.offset for e in tensor.extents], [e.shape for e in tensor.extents])
        self._proved = tensor.key, boxes
        return boxes

    def _refuse_expansion(self, tensor: StoredTensor, wanted: int) -> None:
        """Strides of 0 let a small file promise an array that no memory holds."""
        stored = sum(self._file(name)[1] for name in {e.file for e in tensor.extents})
        if wanted > stored:
            raise FormatError(
                "a large tensor is not larger than the files that hold it",
                where=f"{self.manifest.root}, {tensor.key!r}",
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
            self._held = None  # its number may come back as another file's
        self._open[name] = fd, os.fstat(fd).st_size
        return self._open[name]

    def _fill(self, tensor: StoredTensor, boxes: Boxes, offset: Sequence[int], out: Array) -> None:
        if not out.size:
            return
        low = np.array(offset, np.int64)
        high = low + np.array(out.shape, np.int64)
        for i in boxes.touching(low, high):
            extent = tensor.extents[i]
            strides = strides_of(extent)
            begin, end = np.maximum(boxes.low[i], low), np.minimum(boxes.high[i], high)
            skipped = (begin - boxes.low[i]).tolist()
            first = extent.start + out.itemsize * sum(a * s for a, s in zip(skipped, strides, strict=True))
            cut: list[Any] = [
                slice(a, b) for a, b in zip((begin - low).tolist(), (end - low).tolist(), strict=True)
            ]
            where = f"{self.manifest.root}, {tensor.key!r} in {extent.file!r}"
            bytes_of = extent.start, extent.start + out.itemsize * _span(extent.shape, strides)
            fd = self._file(extent.file)[0]
            self._copy(fd, first, strides, out[(*cut, ...)], extent=bytes_of, where=where)

    def _copy(
        self,
        fd: int,
        start: int,
        strides: tuple[int, ...],
        out: Array,
        *,
        extent: tuple[int, int],
        where: str,
    ) -> None:
        """Read one strided box of a file into a view: rows straight to their place, or through a buffer.

        What lies between short rows is read with them; a box is halved until that fits the buffer.
        """
        span, item = _span(out.shape, strides), out.itemsize
        # The dims from `dim` on are one row: adjacent elements in the file and in the view alike.
        dim, run = out.ndim, 1
        while dim and (
            out.shape[dim - 1] == 1 or (strides[dim - 1], out.strides[dim - 1]) == (run, run * item)
        ):
            dim -= 1
            run *= out.shape[dim]
        follow = all(
            n == 1 or s == math.prod(out.shape[d + 1 :])
            for d, (n, s) in enumerate(zip(out.shape, strides, strict=True))
        )
        if run == out.size:
            read_rows(fd, start, [out], where=where)
        elif run * item >= _ROW_BYTES and follow:
            read_rows(fd, start, [out[index] for index in np.ndindex(out.shape[:dim])], where=where)
        elif run * item >= _RUN_BYTES and (span - out.size) * item > _GAP_BYTES * (out.size // run):
            for index in np.ndindex(out.shape[:dim]):
                at = start + item * sum(i * s for i, s in zip(index, strides, strict=False))
                read_rows(fd, at, [out[index]], where=where)
        elif span * item <= _BUFFER_BYTES:
            row = item * max(1, *(s for n, s in zip(out.shape, strides, strict=True) if n > 1))
            words = self._between(fd, start, span * item, row, extent, where=where)
            steps = tuple(s * item for s in strides)
            out[...] = np.ndarray(out.shape, out.dtype, words.data, strides=steps)
        else:
            # A dim of one index cannot be halved, also where all strides are 0.
            dim = max(range(out.ndim), key=lambda d: (out.shape[d] > 1, (out.shape[d] - 1) * strides[d]))
            half = out.shape[dim] // 2
            parts = np.split(out, [half], axis=dim)
            middle = start + half * strides[dim] * item
            self._copy(fd, start, strides, parts[0], extent=extent, where=where)
            self._copy(fd, middle, strides, parts[1], extent=extent, where=where)

    def _between(
        self, fd: int, start: int, size: int, row: int, extent: tuple[int, int], *, where: str
    ) -> Array:
        """The bytes from the first wanted one to the last, in a buffer: fresh memory is slow to touch.

        While sharing, whole rows of the extent are read, and kept for the boxes beside this one.
        """
        low, high = start, start + size
        if self._sharing:
            low = extent[0] + (start - extent[0]) // row * row
            high = min(extent[1], low + -(-(high - low) // row) * row)
            if high - low > _BUFFER_BYTES:
                low, high = start, start + size
        if self._held != (fd, low, high):
            if self._scratch.nbytes < high - low:
                self._scratch = np.empty(high - low, np.uint8)
            self._held = None
            read_into(fd, low, self._scratch[: high - low].data, where=where)
            self._held = (fd, low, high) if self._sharing else None
        return self._scratch[start - low : start - low + size]


def open_regular(path: Path) -> int:
    """A read-only descriptor of a regular file; anything that could block or is no file is refused."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingFileError(
            "every file of a checkpoint is there", where=str(path), hint="copy or download it again"
        ) from None
    except OSError as error:
        raise FormatError(
            "every file of a checkpoint can be opened",
            where=str(path),
            equation=error.strerror or str(error),
            hint="check its rights, and whether its disk still answers",
        ) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError(
            "every file of a checkpoint is a regular file",
            where=str(path),
            equation="it is a folder, a pipe or a device",
            hint="put the file itself there",
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
                "a file holds all bytes that its index promises",
                where=where,
                equation=f"bytes {start}..{start + len(buffer)} wanted, {done} read",
                hint="copy or download the file again",
            )
        done += count


def read_rows(fd: int, start: int, rows: Sequence[Array], *, where: str) -> None:
    """Fill contiguous arrays with bytes that follow one another in a file.

    Raises:
        TruncatedError: The file ends first.
    """
    for first in range(0, len(rows), _MAX_VECTOR):
        some: Sequence[Any] = rows[first : first + _MAX_VECTOR]
        size = sum(row.nbytes for row in some)
        if os.preadv(fd, some, start) != size:
            # A short read is rare: the end of the file, or a signal.
            at = start
            for row in some:
                read_into(fd, at, row.reshape(-1).view(np.uint8).data, where=where)
                at += row.nbytes
        start += size


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a box that is not empty, both included."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
