"""One safetensors file: its header read from a file and proved, or rendered for a file to come.

A file is 8 bytes of header length (little-endian), a JSON header, and the tensors without a gap in
between. The parser accepts no file that the official reader refuses, and is stricter where readers
disagree: no key twice, no unknown field, no size beyond 63 bits.

Source: the format section of the safetensors README, version 0.8.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardweave.errors import DtypeError, FormatError, TruncatedError
from shardweave.store.manifest import ITEMSIZE, Extent, StoredTensor, TensorSpec
from shardweave.store.read import open_regular
from shardweave.store.strict_json import is_text_map, is_utf8, parse_json, read_bytes

MAX_HEADER_BYTES = 100_000_000
"""The official reader refuses longer headers, so the writer must too."""

DTYPES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_CODES = {name: code for code, name in DTYPES.items()}
_SUB_BYTE = ("F4", "F6_E2M3", "F6_E3M2")
METADATA = "__metadata__"
SHARDS = "DCP_SHARDING_INFO"
"""What torch.distributed.checkpoint calls, in the text pairs of a file, where its tensors begin."""
_MAX_RANK = 64
_HINT = "the header is damaged or was written by hand; save the file again"
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Header:
    """What the head of one file says, proved against the file's size.

    Attributes:
        size: Bytes of the whole file.
        metadata: The file's text pairs.
        tensors: By key, in the order of the bytes.
    """

    size: int
    metadata: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path, name: str, *, shards: bool = False) -> Header:
    """The header of a file, proved; the tensors themselves are not read.

    Args:
        path: The file.
        name: What the manifest calls it.
        shards: Whether it may hold shards of tensors, as `hf_dcp` reads them.

    Raises:
        MissingFileError, TruncatedError, DtypeError, FormatError: With the file and the tensor.
    """
    fd = open_regular(path)
    try:
        return _parse_file(fd, os.fstat(fd).st_size, name, shards, where=str(path))
    finally:
        os.close(fd)


def _parse_file(fd: int, size: int, name: str, shards: bool, *, where: str) -> Header:
    if size < 8:
        raise TruncatedError(
            "a safetensors file starts with 8 bytes of header length",
            where=where,
            equation=f"file size={size}",
            hint="copy or download the file again",
        )
    head = read_bytes(fd, 0, min(size, 64), where=where)
    length = int.from_bytes(head[:8], "little")
    if head.startswith(b"version https://git-lfs"):
        raise FormatError(
            "a safetensors file is the file itself, not its git-lfs pointer",
            where=where,
            equation=f"file size={size}, first bytes={head[:40]!r}",
            hint="fetch the real file with 'git lfs pull'",
        )
    if length > MAX_HEADER_BYTES or head[8:9] not in (b"{", b""):
        raise FormatError(
            "a safetensors file starts with a header that readers accept",
            where=where,
            equation=f"file size={size}, header length={length} of at most {MAX_HEADER_BYTES}, "
            f"first bytes={head[:40]!r}",
            hint="look at its first bytes (an error page? another format?) and download it again",
        )
    if 8 + length > size:
        raise TruncatedError(
            "a file holds its whole header",
            where=where,
            equation=f"8 + header length={length} > file size={size}",
            hint="copy or download the file again",
        )
    header = parse_json(read_bytes(fd, 8, length, where=where), where=where)
    metadata = header.pop(METADATA, {})
    if not is_text_map(metadata):
        raise FormatError(
            f"{METADATA} maps text to text",
            where=where,
            equation=f"found {str(metadata)[:100]!r}",
            hint="save the file again with metadata as strings",
        )
    if SHARDS in metadata and not shards:
        raise FormatError(
            "a file holds whole tensors, not shards of them",
            where=where,
            equation=f"{METADATA} has {SHARDS}",
            hint="give the folder with the files of all ranks, as torch.distributed.checkpoint wrote it",
        )
    return Header(size, metadata, _parse_tensors(header, 8 + length, size, name, where=where))


def _parse_tensors(
    header: Mapping[str, Any], data: int, size: int, name: str, *, where: str
) -> dict[str, StoredTensor]:
    """Every entry of a header proved, in the order of the bytes; together they fill the file."""
    entries = sorted((*_parse_entry(key, entry, where), key) for key, entry in header.items())
    tensors = {}
    end = 0
    for start, stop, dtype, shape, key in entries:
        if start != end:
            raise FormatError(
                "the tensors of a file leave no hole"
                if start > end
                else "the tensors of a file do not overlap",
                where=f"{key!r} in {where}",
                equation=f"data_offsets start={start} != end of the tensor before={end}",
                hint=_HINT,
            )
        end = stop
        extent = Extent((0,) * len(shape), shape, name, data + start)
        tensors[key] = StoredTensor(key, dtype, shape, (extent,))
    if data + end > size:
        raise TruncatedError(
            "a file holds all bytes that its header promises",
            where=where,
            equation=f"header and tensors={data + end} > file size={size}",
            hint="copy or download the file again",
        )
    if data + end < size:
        raise FormatError(
            "a file ends with its last tensor",
            where=where,
            equation=f"header and tensors={data + end} < file size={size}",
            hint="the bytes behind belong to no tensor; save the file again",
        )
    return tensors


def _parse_entry(key: str, entry: Any, where: str) -> tuple[int, int, str, tuple[int, ...]]:
    where = f"{key!r} in {where}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(
            "a tensor is described by dtype, shape and data_offsets",
            where=where,
            equation=f"found {reprlib.repr(entry)}",
            hint=_HINT,
        )
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        small = code in _SUB_BYTE
        raise DtypeError(
            "a dtype is at least a byte wide" if small else "the dtype of a stored tensor is known",
            where=where,
            equation=f"dtype={reprlib.repr(code)} not in {sorted(DTYPES)}",
            hint="store it as uint8 with its packing stated" if small else _HINT,
        )
    dtype = DTYPES[code]
    size = _prove_shape(shape, dtype, where=where)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise FormatError(
            "data_offsets are two whole numbers that span the tensor's bytes",
            where=where,
            equation=f"data_offsets={reprlib.repr(offsets)}, {reprlib.repr(shape)} x {dtype} = {size} bytes",
            hint=_HINT,
        )
    return offsets[0], offsets[1], dtype, tuple(shape)


def _prove_shape(shape: Any, dtype: str, *, where: str) -> int:
    """The bytes of a tensor whose shape is one: no dim and no product of dims beyond 63 bits."""
    if not _are_sizes(shape) or len(shape) > _MAX_RANK:
        raise FormatError(
            f"a shape is a list of at most {_MAX_RANK} whole numbers from 0 to 2**63 - 1",
            where=where,
            equation=f"shape={reprlib.repr(shape)}",
            hint=_HINT,
        )
    # Products are taken as if no dim were 0: readers overflow on them whatever follows.
    if math.prod(max(n, 1) for n in shape) * ITEMSIZE[dtype] >= 2**63:
        raise FormatError(
            "the size of a tensor fits 63 bits",
            where=where,
            equation=f"product of shape={reprlib.repr(shape)} x {dtype} >= 2**63 bytes",
            hint=_HINT,
        )
    numel: int = math.prod(shape)
    return numel * ITEMSIZE[dtype]


def _are_sizes(values: Any) -> bool:
    # bool is an int to Python, and -0 and 1.0 compare like ints: only the exact type counts.
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def check_spec(spec: TensorSpec) -> None:
    """Refuse a tensor that the format cannot hold, before anything is written.

    Raises:
        DtypeError: No code for the dtype.
        FormatError: The key, the shape or the chunks cannot be written.
    """
    where = f"{spec.key!r:.200}"
    if spec.dtype not in _CODES:
        raise DtypeError(
            "a dtype is one that the format has",
            where=where,
            equation=f"dtype={spec.dtype!r} not in {sorted(_CODES)}",
            hint="convert it to a listed dtype first",
        )
    if not is_utf8(spec.key) or spec.key == METADATA:
        raise FormatError(
            "a key is text and not the format's own",
            where=where,
            equation=f"key({spec.key!r:.200})",
            hint="rename the tensor",
        )
    if spec.chunks not in ((), (((0,) * len(spec.shape), spec.shape),)):
        raise FormatError(
            "the format stores each tensor whole",
            where=where,
            equation=f"{len(spec.chunks)} chunks of shape={spec.shape}",
            hint="leave chunks empty",
        )
    _prove_shape(list(spec.shape), spec.dtype, where=where)


def _entry(spec: TensorSpec, start: int) -> dict[str, Any]:
    offsets = [start, start + spec.num_bytes]
    return {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}


def render_header(
    tensors: Sequence[TensorSpec], metadata: Mapping[str, str], name: str
) -> tuple[bytes, Header]:
    """The head of a file to come, padded so that the data starts at a multiple of 64 bytes.

    Tensors lie in the given order. If that would put one at an offset that its element size does not
    divide, larger elements go first, so that readers can map the file and view it.

    Returns:
        Length and JSON as bytes, and the header as ``read_header`` will read it.

    Raises:
        FormatError: Readers would refuse the header.
    """
    ends = [0]
    for spec in tensors:
        ends.append(ends[-1] + spec.num_bytes)
    if any(start % ITEMSIZE[spec.dtype] for start, spec in zip(ends, tensors, strict=False)):
        return render_header(sorted(tensors, key=lambda spec: -ITEMSIZE[spec.dtype]), metadata, name)
    entries = {spec.key: _entry(spec, start) for spec, start in zip(tensors, ends, strict=False)}
    pairs = {METADATA: dict(metadata)} if metadata else {}
    text = json.dumps({**pairs, **entries}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(
            "a header is not longer than readers accept",
            where=name,
            equation=f"{len(tensors)} tensors need {len(text)} bytes > {MAX_HEADER_BYTES}",
            hint="lower max_file_bytes so that fewer tensors share a file, or shorten keys and metadata",
        )
    data = 8 + len(text)
    proved = _parse_tensors(entries, data, data + ends[-1], name, where=name)
    return len(text).to_bytes(8, "little") + text, Header(data + ends[-1], dict(metadata), proved)


def create(root: Path, heads: Mapping[str, tuple[bytes, Header]]) -> dict[str, int]:
    """Make files of full size with the heads that ``render_header`` made, and return the size of each."""
    for name, (head, header) in heads.items():
        with (root / name).open("xb") as file:
            file.write(head)
            file.truncate(header.size)
    return {name: header.size for name, (_, header) in heads.items()}
