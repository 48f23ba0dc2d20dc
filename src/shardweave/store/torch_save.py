"""One stream of ``torch.save``: a zip archive of uncompressed records, one of them a pickle.

The record ``data.pkl`` holds the value; each tensor in it names a storage, and the bytes of storage ``k`` are
the record ``data/k``. Here such a stream is read in place (which bytes of the file are which
tensor) and laid out in advance (which bytes will be the tensor, before anybody has them).

The stream may lie anywhere in a file, one after another, as in the ``.distcp`` files of
torch.distributed.checkpoint. Nothing is decompressed: a compressed record is refused.

Source: torch 2.13 ``torch/serialization.py``, ``torch/_utils.py`` and its zip writer. ``torch.load``
does not check the CRC of a record (a flipped byte loads without a word). Here that of the value is compared
wherever it is read, and those of the tensors by ``verify``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from mmap import MADV_DONTNEED, PAGESIZE, mmap
from typing import Any, Final

from shardweave.errors import DigestError, DtypeError, FormatError, TruncatedError
from shardweave.store import pickles, pickles_write
from shardweave.store.crc import crc32
from shardweave.store.manifest import ITEMSIZE
from shardweave.store.pickles import Allow, Global, Instance, Stored, brief

ALIGNMENT: Final = 64
"""Payloads start at a multiple of this many bytes of their stream, as torch writes them."""

_TYPED: Final[Mapping[str, str]] = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "int64": "LongStorage",
    "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage", "uint8": "ByteStorage",
    "bool": "BoolStorage", "bfloat16": "BFloat16Storage", "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}  # fmt: skip
_DTYPE_OF_STORAGE: Final = {storage: dtype for dtype, storage in _TYPED.items()}

DTYPES: Final = frozenset(ITEMSIZE) | {
    "complex128", "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2", "bits8", "bits16",
    "bits1x8", "bits2x4", "bits4x2", "qint8", "qint32", "quint8", "quint4x2", "quint2x4",
}  # fmt: skip
"""Names that a file may use for a dtype; those without an item size here are refused as `DtypeError`."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes of a file that tensors are views of. ``dtype`` is None where only its users know it."""

    dtype: str | None
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorAt:
    """A tensor of a stream: where its first element lies in the file, and how it strides from there."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements, wherever they lie."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


# --- reading ------------------------------------------------------------------------------------

Buffer = bytes | memoryview | mmap

_LOCAL: Final = struct.Struct("<4s5H3I2H")
_CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
_END: Final = struct.Struct("<4s4H2IH")
_END64: Final = struct.Struct("<4sQ2H2I4Q")
_LOCATOR: Final = struct.Struct("<4sIQI")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_PIECE: Final = 4 << 20
_MARKS: Final = (b"PK\x07\x08", b"PK\x03\x04", b"PK\x01\x02")


def _broken(where: str, equation: str) -> FormatError:
    return FormatError(
        "a torch.save stream is a zip archive of stored records",
        where=where,
        equation=equation,
        hint="fetch the file again; if it stays so, it was not written by torch.save",
    )


def records(data: Buffer, start: int, length: int, *, where: str) -> dict[str, tuple[int, int]]:
    """The records of the stream at ``data[start : start + length]``.

    Args:
        data: The file.
        start: First byte of the stream.
        length: Bytes of the stream.
        where: The file, for messages.

    Returns:
        By name without the archive's own folder: first byte in ``data`` and size in bytes.

    Raises:
        TruncatedError: The stream reaches past the file, or ends before its directory.
        FormatError: It is no zip archive, has compressed or encrypted records, or contradicts itself.
    """
    entries = _entries(data, start, length, where=where)
    return {name: (begin, size) for name, (begin, size, _) in entries.items()}


def verify(
    data: Buffer,
    start: int,
    length: int,
    *,
    where: str,
    skip: Callable[[int, int], bool] = lambda begin, size: False,
) -> int:
    """Compare the records of a stream with the CRCs in its directory.

    torch computes them when it saves, unless it was told not to
    (``torch.serialization.set_crc32_options``), and does not look at them when it loads.

    Args:
        data: The file.
        start: First byte of the stream.
        length: Bytes of the stream.
        where: The file, for messages.
        skip: Whether to leave out a record, by its first byte in ``data`` and its size.

    Returns:
        How many bytes were compared: those of the records that have a CRC.

    Raises:
        DigestError: One differs; what it was saved with is not what it holds.
        TruncatedError, FormatError: As ``records``.
    """
    compared = 0
    for name, (begin, size, crc) in _entries(data, start, length, where=where).items():
        if crc and not skip(begin, size):
            _compare(data, begin, size, crc, where=f"{where}, stream at byte {start}, record {name!r}")
            compared += size
    _release(data, start, start + length)  # the kernel maps what lies around a header, too
    return compared


def _release(data: Buffer, begin: int, stop: int) -> None:
    """What was read of a map stays in the page cache, and is no longer counted as this process's."""
    if isinstance(data, mmap) and stop > begin:
        low = begin // PAGESIZE * PAGESIZE
        data.madvise(MADV_DONTNEED, low, stop - low)


def _compare(data: Buffer, begin: int, size: int, crc: int, *, where: str) -> None:
    found = 0
    with memoryview(data) as view:  # a slice of a map is a copy
        for at in range(begin, begin + size, _PIECE):
            stop = min(at + _PIECE, begin + size)
            found = crc32(view[at:stop], found)
            _release(data, at, stop)
    if found != crc:
        raise DigestError(
            "bytes have the CRC that was stored with them",
            where=where,
            equation=f"crc32({found:08x}) != {crc:08x}",
            hint="the file is damaged, and torch would load it; restore it from its source",
        )


def _entries(data: Buffer, start: int, length: int, *, where: str) -> dict[str, tuple[int, int, int]]:
    """First byte, size and CRC of each record."""
    if start < 0 or length < 0 or start + length > len(data):
        raise TruncatedError(
            "a file holds the streams that its index lists",
            where=where,
            equation=f"start({start}) + length({length}) > file({len(data)})",
            hint="the copy or the save of this file broke off; fetch it again",
        )
    where = f"{where}, stream at byte {start}"
    if length < _END.size or data[start : start + 4] != b"PK\x03\x04":
        raise _broken(where, f"it starts with {bytes(data[start : start + min(length, 4)])!r}")
    stop = start + length - _END.size
    magic, disk, first, here, count, size, offset, comment = _END.unpack_from(data, stop)
    if magic != b"PK\x05\x06" or comment:
        raise TruncatedError(
            "a torch.save stream ends with its zip directory",
            where=where,
            equation=f"its last {_END.size} bytes are no end record",
            hint="the copy or the save of this file broke off; fetch it again",
        )
    stated = here, count, size, offset
    if length >= _END.size + _LOCATOR.size + _END64.size:
        magic, _, at, _ = _LOCATOR.unpack_from(data, stop - _LOCATOR.size)
        if magic == b"PK\x06\x07":
            stop -= _LOCATOR.size + _END64.size
            magic, _, _, _, disk, first, here, count, size, offset = _END64.unpack_from(data, stop)
            if (
                magic != b"PK\x06\x06"
                or start + at != stop
                or any(
                    small not in (big, full)
                    for small, big, full in zip(
                        stated, (here, count, size, offset), (_FULL16, _FULL16, _FULL32, _FULL32), strict=True
                    )
                )
            ):
                raise _broken(where, "the two end records disagree")
    if disk or first or here != count or offset + size != stop - start or count * _CENTRAL.size > size:
        raise _broken(where, f"directory({offset} + {size}) of {count} records, end record at {stop - start}")

    found: dict[str, tuple[int, int, int]] = {}
    folder, at = None, start + offset
    for _ in range(count):
        if at + _CENTRAL.size > stop:
            raise _broken(where, "the directory is shorter than its records")
        magic, _, _, flags, method, _, _, crc, packed, plain, name_len, extra_len, comment, _, _, _, local = (
            _CENTRAL.unpack_from(data, at)
        )
        end = at + _CENTRAL.size + name_len + extra_len + comment
        if magic != b"PK\x01\x02" or end > stop:
            raise _broken(where, f"directory entry at byte {at - start}")
        name = bytes(data[at + _CENTRAL.size : at + _CENTRAL.size + name_len])
        if _FULL32 in (packed, plain, local):
            extra = bytes(data[end - comment - extra_len : end - comment])
            plain, packed, local = _wide(extra, plain, packed, local, where)
        if method or flags & 1 or packed != plain:
            raise _broken(where, f"record {name!r}: method({method}) != 0, or encrypted")
        begin = _begin(data, start, start + offset, local, name, where)
        # What follows a record is its descriptor, another record or the directory, and says so.
        follows = bytes(data[begin + plain : begin + plain + 4])
        if begin + plain > start + offset or follows not in _MARKS:
            raise _broken(where, f"record {name!r}: it does not end at byte {begin - start} + size({plain})")
        head, _, tail = name.partition(b"/")
        folder = head if folder is None else folder
        key = tail.decode("utf-8", "replace")
        if head != folder or not tail or key in found:
            raise _broken(where, f"record {name!r} is there twice or outside the folder of the others")
        found[key] = begin, plain, crc
        at = end
    if at != stop:
        raise _broken(where, f"{stop - at} bytes after the last directory entry")
    return found


def _wide(extra: bytes, plain: int, packed: int, local: int, where: str) -> tuple[int, int, int]:
    """Sizes and position of a record that need 64 bits, from the extra field that zip keeps them in."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            values = [value for (value,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + size // 8 * 8])]
            wide = [values.pop(0) if v == _FULL32 and values else v for v in (plain, packed, local)]
            return wide[0], wide[1], wide[2]
        at += 4 + size
    raise _broken(where, "a record needs 64-bit sizes and has none")


def _begin(data: Buffer, start: int, stop: int, local: int, name: bytes, where: str) -> int:
    """First byte of a record's data, behind its own header."""
    at = start + local
    if at + _LOCAL.size > stop:
        raise _broken(where, f"record {name!r}: its header at byte {local} lies in or behind the directory")
    magic, _, flags, method, _, _, _, _, _, name_len, extra_len = _LOCAL.unpack_from(data, at)
    begin: int = at + _LOCAL.size + name_len + extra_len
    if magic != b"PK\x03\x04" or method or flags & 1 or data[at + 30 : at + 30 + name_len] != name:
        raise _broken(where, f"record {name!r}: its header at byte {local} says something else")
    return begin


def load(data: Buffer, start: int, length: int, *, allow: Allow, where: str) -> Any:
    """The value of a stream, with a `TensorAt` for each tensor; the tensors' bytes are not touched.

    Raises:
        PickleError: The value mentions a name outside ``allow`` (to which the tensors' own are added).
        DigestError: The record with the value does not have the CRC that was stored with it.
        FormatError, TruncatedError: As `records`, and where a tensor reaches outside its storage.
        DtypeError: A dtype that shardweave has no item size for.
    """
    found = _entries(data, start, length, where=where)
    where = f"{where}, stream at byte {start}"
    if "data.pkl" not in found:
        raise _broken(where, "it has no record data.pkl")
    at, size, _ = found.get("byteorder", (0, 0, 0))
    if data[at : at + size] not in (b"", b"little"):
        raise _broken(where, f"byteorder({bytes(data[at : at + min(size, 20)])!r}) != little")

    def stored(key: Any) -> Storage:
        kind, storage, name, _, numel = key if type(key) is tuple and len(key) == 5 else (None, 0, 0, 0, 0)
        if kind != "storage" or type(storage) is not Global or not _is_size(numel) or type(name) is not str:
            raise _broken(where, "a tensor names its storage in an unknown way")
        if f"data/{name}" not in found:
            raise _broken(where, f"storage {name[:40]!r} has no record")
        dtype = _DTYPE_OF_STORAGE.get(storage.name)
        begin, num_bytes, _ = found[f"data/{name}"]
        promised = numel * (1 if dtype is None else _itemsize(dtype, where))
        if promised != num_bytes:
            raise _broken(where, f"storage {name[:40]!r}: promised({promised}) != stored({num_bytes}) bytes")
        return Storage(dtype, begin, num_bytes)

    at, size, crc = found["data.pkl"]
    if crc:  # a flipped bit of a setting is a setting
        _compare(data, at, size, crc, where=f"{where}, record 'data.pkl'")
    allow = Allow({**allow.names, **_TENSOR_NAMES}, others=allow.others)
    return pickles.load(data[at : at + size], allow=allow, where=where, stored=stored)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _itemsize(dtype: str, where: str) -> int:
    if dtype not in ITEMSIZE:
        raise DtypeError(
            "a stored tensor has a dtype of known width",
            where=where,
            equation=f"dtype {dtype} has no known width",
            hint=f"known are {', '.join(ITEMSIZE)}",
        )
    return ITEMSIZE[dtype]


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, meta: Any = None
) -> TensorAt:
    """A tensor whose dtype is named beside a raw storage; with ``dtype`` None the storage knows it."""
    if type(storage) is not Storage or not all(type(part) is tuple for part in (shape, strides)):
        raise TypeError("a tensor is made of something else than a storage, a shape and strides")
    name = dtype.name if type(dtype) is Global and dtype.module == "torch" else storage.dtype
    if name is None or (storage.dtype is not None and name != storage.dtype):
        raise TypeError(f"dtype {name} on a storage of dtype {storage.dtype}")
    if len(shape) != len(strides) or not all(map(_is_size, (offset, *shape, *strides))):
        raise ValueError(f"shape {brief(shape)}, strides {brief(strides)}, offset {brief(offset)}")
    itemsize = _itemsize(name, "a tensor of the pickle")
    numel = math.prod(shape)
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if numel and max(numel, last + 1) * itemsize > storage.num_bytes:
        raise ValueError(
            f"max(numel({numel}), last({last}) + 1) * itemsize({itemsize}) > storage({storage.num_bytes})"
        )
    dense = _row_major(shape)
    steps = tuple(s if size > 1 else d for size, s, d in zip(shape, strides, dense, strict=True))
    start = storage.start + offset * itemsize
    return TensorAt(name, shape, None if steps == dense or not numel else steps, start)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _typed_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, meta: Any = None
) -> TensorAt:
    return _tensor(storage, offset, shape, strides, grad, hooks, None)


def _parameter(tensor: Any, grad: Any, hooks: Any) -> TensorAt:
    if type(tensor) is not TensorAt:
        raise TypeError("a parameter is made of something else than a tensor")
    return tensor


def size(items: Any = ()) -> tuple[int, ...]:
    """What ``torch.Size`` makes of its argument."""
    if type(items) not in (tuple, list) or not all(map(_is_size, items)):
        raise ValueError(f"a torch.Size holds sizes, got {brief(items)}")
    return tuple(items)


_TENSOR_NAMES: Final[Mapping[tuple[str, str], pickles.Builder | None]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _typed_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "Size"): size,
    ("torch.storage", "UntypedStorage"): None,
    ("torch", "UntypedStorage"): None,
    ("collections", "OrderedDict"): pickles.PLAIN["collections", "OrderedDict"],
    **{("torch", storage): None for storage in _TYPED.values()},
    **{("torch", dtype): None for dtype in DTYPES},
}


# --- writing ------------------------------------------------------------------------------------


class Zip:
    """A zip archive as it grows: what goes before the next payload, and the directory for the end."""

    def __init__(self) -> None:
        self.pending, self._directory = bytearray(), bytearray()
        self._length = self._count = 0

    def header(self, name: str, num_bytes: int, crc: int, *, align: bool = False) -> None:
        """The header of a record whose bytes follow, by `payload` or by somebody else."""
        label, at = f"archive/{name}".encode(), self._length
        wide = num_bytes >= _FULL32
        short = _FULL32 if wide else num_bytes
        extra = struct.pack("<2H2Q", 1, 16, num_bytes, num_bytes) if wide else b""
        if align:
            room = -(at + _LOCAL.size + len(label) + len(extra) + 4) % ALIGNMENT
            extra += struct.pack("<2s H", b"FB", room) + b"Z" * room
        version = 45 if wide else 20
        self._add(
            _LOCAL.pack(b"PK\x03\x04", version, 0x0800, 0, 0, 0, crc, short, short, len(label), len(extra))
            + label + extra
        )  # fmt: skip
        far = at >= _FULL32
        numbers = [num_bytes, num_bytes] * wide + [at] * far
        extra = struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
        where = _FULL32 if far else at
        self._directory += _CENTRAL.pack(
            b"PK\x01\x02", 45 if numbers else 20, 45 if numbers else 20, 0x0800, 0, 0, 0, crc, short, short,
            len(label), len(extra), 0, 0, 0, 0, where,
        ) + label + extra  # fmt: skip
        self._count += 1

    def _add(self, data: bytes) -> None:
        self.pending += data
        self._length += len(data)

    def record(self, name: str, data: bytes, *, align: bool = False) -> None:
        """A record whose bytes are known."""
        self.header(name, len(data), crc32(data), align=align)
        self._add(data)

    def take(self, skip: int = 0) -> bytes:
        """What was added since the last call; ``skip`` bytes of payload come next."""
        taken, self.pending = bytes(self.pending), bytearray()
        self._length += skip
        return taken

    def close(self) -> bytes:
        """What is left to be written, the directory at its end."""
        offset, size = self._length, len(self._directory)
        self._add(bytes(self._directory))
        end = self._length
        count = min(self._count, _FULL16)
        if offset >= _FULL32 or count == _FULL16:
            self._add(_END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, self._count, self._count, size, offset))
            self._add(_LOCATOR.pack(b"PK\x06\x07", 0, end, 1))
        self._add(_END.pack(b"PK\x05\x06", 0, 0, count, count, size, min(offset, _FULL32), 0))
        return self.take()


def preamble(pickled: bytes) -> Zip:
    """An archive with all that comes before the first storage."""
    archive = Zip()
    archive.record("data.pkl", pickled)
    archive.record(".format_version", b"1")
    archive.record(".storage_alignment", str(ALIGNMENT).encode())
    archive.record("byteorder", b"little")
    archive.record("version", b"3\n")
    return archive


def rebuild(
    key: str,
    dtype: str,
    shape: tuple[int, ...],
    *,
    offset: int = 0,
    strides: tuple[int, ...] | None = None,
    num_bytes: int | None = None,
) -> Instance:
    """The call that makes a tensor of storage ``key``, as torch itself writes it.

    Args:
        key: Name of the storage among those of the archive.
        dtype: Of the tensor, and of all others of this storage.
        shape: Of the tensor.
        offset: Its first element, counted in the storage.
        strides: In elements; row-major by default.
        num_bytes: Of the storage; by default it is the tensor's own.
    """
    itemsize = _itemsize(dtype, "a tensor to be written")
    num_bytes = math.prod(shape) * itemsize if num_bytes is None else num_bytes
    typed = _TYPED.get(dtype)
    kind = Global("torch", typed) if typed else Global("torch.storage", "UntypedStorage")
    storage = Stored(("storage", kind, key, "cpu", num_bytes // itemsize if typed else num_bytes))
    hooks = Instance(Global("collections", "OrderedDict"))
    args = storage, offset, shape, _row_major(shape) if strides is None else strides, False, hooks
    if typed:
        return Instance(Global("torch._utils", "_rebuild_tensor_v2"), args)
    return Instance(Global("torch._utils", "_rebuild_tensor_v3"), (*args, Global("torch", dtype)))


@lru_cache(maxsize=4096)
def _pickled(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The pickle of one tensor; the chunks of a stacked tensor are thousands of the same shape."""
    return pickles_write.dump(rebuild("0", dtype, shape))


@lru_cache(maxsize=4096)
def frame_sizes(dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of both parts of `frame`, which do not depend on the CRC."""
    head, tail = frame(dtype, shape)
    return len(head), len(tail)


def frame(dtype: str, shape: tuple[int, ...], crc: int = 0) -> tuple[bytes, bytes]:
    """What stands before and after the bytes of one row-major tensor to make them a stream.

    The first part is a multiple of 64 bytes long whatever the CRC is, so the place of the payload is
    known before its bytes are.

    >>> head, tail = frame("bfloat16", (3, 5))
    >>> len(head) % 64, len(head) == len(frame("bfloat16", (3, 5), 0xDEADBEEF)[0])
    (0, True)
    """
    num_bytes = math.prod(shape) * _itemsize(dtype, "a tensor to be written")
    archive = preamble(_pickled(dtype, shape))
    archive.header("data/0", num_bytes, crc, align=True)
    return archive.take(num_bytes), archive.close()


def stream(value: Any) -> bytes:
    """A whole stream of a plain value, stand-ins and tensors as in `to_plain`."""
    payloads: list[bytes] = []

    def tensor(leaf: Mapping[str, Any]) -> Instance:
        payloads.append(leaf["data"])
        return rebuild(str(len(payloads) - 1), leaf["$leaf"], tuple(leaf["shape"]))

    archive = preamble(pickles_write.dump(pickles_write.from_plain(value, leaf=tensor)))
    for i, payload in enumerate(payloads):
        archive.record(f"data/{i}", payload, align=True)
    return archive.close()


def to_plain(value: Any, data: Buffer, *, where: str, max_bytes: int = 1 << 28) -> Any:
    """What `load` returned as plain values; each tensor as ``{"$leaf": dtype, "shape", "data": bytes}``."""
    left = max_bytes

    def leaf(tensor: Any) -> dict[str, Any]:
        nonlocal left
        if type(tensor) is not TensorAt or tensor.strides is not None or tensor.num_bytes > left:
            raise _broken(
                where, f"a tensor beside the sharded ones is strided, or all exceed {max_bytes} bytes"
            )
        left -= tensor.num_bytes
        payload = bytes(data[tensor.start : tensor.start + tensor.num_bytes])
        return {"$leaf": tensor.dtype, "shape": tensor.shape, "data": payload}

    return pickles_write.to_plain(value, leaf=leaf, where=where)
