"""A stream of ``torch.save`` that holds many tensors, laid out before anybody has their bytes.

What a framework saves as one file is a tree of dicts and lists with tensors in it, some of them views of
one storage. Here the tree is given with stand-ins for its tensors (`View`) and their storages (`Bytes`);
what comes back is where in the file each storage lies, and, once the CRCs of the storages are known, all
bytes around them.

Laws:
    - Where storages lie does not depend on what they hold.
    - ``torch_save.load`` finds each `View` at its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardweave.errors import OutsideError, PickleError
from shardweave.store import pickles_write, torch_save
from shardweave.store.crc import crc32
from shardweave.store.manifest import ITEMSIZE
from shardweave.store.pickles import Instance


@dataclass(frozen=True, slots=True)
class Part:
    """A flat interval of an array in a storage.

    Attributes:
        key: The array.
        start, stop: The interval, in elements of the array, row-major.
        at: Its first byte in the storage.
        copy: The array has its own place elsewhere, and is copied here when that is filled.
    """

    key: str
    start: int
    stop: int
    at: int
    copy: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Bytes:
    """A storage of an archive; two of the same content are two.

    Attributes:
        num_bytes: Its size.
        parts: What is to be filled in, in the order of their places; between them are zeros.
        data: All its bytes, where they are known.
    """

    num_bytes: int
    parts: tuple[Part, ...] = ()
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of an archive.

    Attributes:
        of: The storage that it is a view of.
        dtype: torch's name of the dtype; all views of one storage have the same.
        shape: Its shape.
        offset: Its first element, counted in the storage.
        strides: In elements; ``None`` means row-major.
    """

    of: Bytes
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    strides: tuple[int, ...] | None = None


def constant(data: bytes, dtype: str, shape: tuple[int, ...] = ()) -> View:
    """A tensor whose bytes are known, row-major."""
    return View(Bytes(len(data), data=data), dtype, shape)


@dataclass(frozen=True, slots=True)
class Archive:
    """A stream that was laid out.

    Attributes:
        storages: In the order of the file.
        starts: First byte of each of them in the stream.
        num_bytes: Bytes of the whole stream.
    """

    storages: tuple[Bytes, ...]
    starts: tuple[int, ...]
    num_bytes: int
    _pickled: bytes

    def around(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """What stands before, between and after the storages, and at which byte of the stream.

        Args:
            crcs: The CRC-32 of each storage.
        """
        at, archive = 0, torch_save.preamble(self._pickled)
        for number, (storage, crc) in enumerate(zip(self.storages, crcs, strict=True)):
            archive.header(f"data/{number}", storage.num_bytes, crc, align=True)
            taken = archive.take(storage.num_bytes)
            yield at, taken
            at += len(taken) + storage.num_bytes
        yield at, archive.close()


def lay_out(value: Any) -> Archive:
    """The archive of a tree of plain values, stand-ins and `View` leaves.

    Storages are numbered in the order in which the tree first has them, as ``torch.save`` does.

    Raises:
        OutsideError: A view reaches outside its storage.
        DtypeError: A dtype without an item size.
        PickleError: Views of one storage differ in dtype, or the tree holds something else.

    >>> flat = Bytes(24)
    >>> archive = lay_out({"a": View(flat, "float32", (2, 2)), "b": View(flat, "float32", (2,), offset=4)})
    >>> len(archive.storages), archive.starts[0] % 64
    (1, 0)
    """
    numbers: dict[Bytes, int] = {}
    dtypes: dict[Bytes, str] = {}

    def tensor(view: View) -> Instance:
        number = numbers.setdefault(view.of, len(numbers))
        if dtypes.setdefault(view.of, view.dtype) != view.dtype:
            raise PickleError(
                "all tensors of one storage have one dtype",
                where=f"storage {number}",
                equation=f"dtype({dtypes[view.of]}) and dtype({view.dtype})",
                hint="give each dtype a storage of its own; torch reads them all with the first one's",
            )
        made = torch_save.rebuild(
            str(number), view.dtype, view.shape,
            offset=view.offset, strides=view.strides, num_bytes=view.of.num_bytes,
        )  # fmt: skip
        _check_inside(view, number)
        return made

    pickled = pickles_write.dump(_with_tensors(value, tensor))
    starts, archive = list[int](), torch_save.preamble(pickled)
    end = 0
    for number, storage in enumerate(numbers):
        archive.header(f"data/{number}", storage.num_bytes, 0, align=True)
        starts.append(end + len(archive.take(storage.num_bytes)))
        end = starts[-1] + storage.num_bytes
    return Archive(tuple(numbers), tuple(starts), end + len(archive.close()), pickled)


def stream(value: Any) -> bytes:
    """The whole stream of a tree whose storages are all known.

    Raises:
        PickleError: A storage is to be filled in later; and as `lay_out`.
    """
    archive = lay_out(value)
    known = [storage.data for storage in archive.storages if storage.data is not None]
    if len(known) != len(archive.storages):
        raise PickleError(
            "a stream is written at once where all its bytes are known",
            equation=f"storages known({len(known)}) != storages({len(archive.storages)})",
            hint="lay the archive out and fill it",
        )
    pieces = list(archive.around([crc32(data) for data in known]))
    return b"".join(piece + data for (_, piece), data in zip(pieces, [*known, b""], strict=True))


def _with_tensors(value: Any, tensor: Any) -> Any:
    """The tree with a call of torch in the place of each view."""
    kind = type(value)
    if kind is View:
        return tensor(value)
    if kind is dict:
        return {key: _with_tensors(child, tensor) for key, child in value.items()}
    if kind in (list, tuple):
        return kind(_with_tensors(child, tensor) for child in value)
    if kind is Instance:
        state = None if value.state is None else _with_tensors(value.state, tensor)
        return Instance(value.cls, _with_tensors(value.args, tensor), state)
    return value


def _check_inside(view: View, number: int) -> None:
    strides, numel = view.strides, math.prod(view.shape)
    last = view.offset + numel - 1
    if strides is not None and numel:
        last = view.offset + sum((n - 1) * step for n, step in zip(view.shape, strides, strict=True))
    if numel and not 0 <= view.offset <= last < view.of.num_bytes // ITEMSIZE[view.dtype]:
        raise OutsideError(
            "a tensor lies inside its storage",
            where=f"storage {number}",
            equation=f"offset({view.offset}), last({last}) of {view.of.num_bytes} bytes of {view.dtype}",
            hint="make the storage as long as the tensors that it holds",
        )
