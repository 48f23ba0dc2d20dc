"""The manifest of a native checkpoint: msgpack behind a version and a digest, decoded strictly."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn

import msgspec

from shardweave.errors import DigestError, FormatError
from shardweave.store.manifest import StoredTensor

MOST_BYTES = 1 << 30
"""The most that a manifest may have: some million boxes."""

_MAGIC = b"shardweave.checkpoint/1\n"
_FAMILY = b"shardweave.checkpoint/"
DIGEST_BYTES = 16
_MOST_DIMS = 64
_MOST_DEPTH = 64

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MOST_DIMS)]


class ExtentRecord(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A box: where it is in its tensor, the number of its file, its first byte, its xxh3_128."""

    offset: _Shape
    shape: _Shape
    file: _Size
    start: _Size
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class TensorRecord(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A tensor and its boxes."""

    key: str
    dtype: str
    shape: _Shape
    extents: list[ExtentRecord]


class Body(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """All that a manifest says."""

    software: str
    step: _Size
    config: dict[str, Any]
    data: dict[str, Any]
    extras: dict[str, Any]
    files: list[tuple[str, _Size]]
    tensors: list[TensorRecord]


@dataclass(frozen=True, slots=True)
class About:
    """What a checkpoint says beside its tensors; the values of the dicts are plain, as in JSON.

    Attributes:
        step: The number of steps taken.
        config: The Hugging Face config of the model.
        data: Where in the data the run is.
        extras: Whatever else the run wants back: its schedule, its seed.
        software: What wrote it.
    """

    step: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    software: str = ""


def encode(
    files: Mapping[str, int],
    tensors: Iterable[StoredTensor],
    digests: Mapping[str, Sequence[bytes]],
    about: About,
) -> bytes:
    """The bytes of a manifest.

    Args:
        files: Size of each file by name.
        tensors: What they hold.
        digests: By key, that of each extent in order.
        about: The rest.

    Raises:
        FormatError: Something beside the tensors is not plain.
    """
    numbers = {name: i for i, name in enumerate(files)}
    for name, value in (("config", about.config), ("data", about.data), ("extras", about.extras)):
        _require_plain(value, name)
    body = Body(
        about.software,
        about.step,
        dict(about.config),
        dict(about.data),
        dict(about.extras),
        list(files.items()),
        [
            TensorRecord(
                tensor.key,
                tensor.dtype,
                tensor.shape,
                [
                    ExtentRecord(extent.offset, extent.shape, numbers[extent.file], extent.start, digest)
                    for extent, digest in zip(tensor.extents, digests[tensor.key], strict=True)
                ],
            )
            for tensor in tensors
        ],
    )
    data = msgspec.msgpack.encode(body)
    if len(data) > MOST_BYTES:
        raise FormatError(
            "a manifest is small beside its tensors",
            equation=f"{len(data)} bytes > {MOST_BYTES}",
            hint="save with fewer ranks writing, so that tensors are cut into fewer boxes",
        )
    return _MAGIC + hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest() + data


def _require_plain(value: Any, where: str, depth: int = 0) -> None:
    """Numbers, text, lists and dicts by text: what comes back as it was."""
    if value is None or isinstance(value, (bool, float, str)):
        return
    if depth > _MOST_DEPTH:
        _refuse_value(where[:200], f"values within values, more than {_MOST_DEPTH} deep")
    if isinstance(value, int):
        if -(1 << 63) <= value < 1 << 64:
            return
        what = f"integer of {value.bit_length()} bits"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                _refuse_value(f"{where}: key {key!r:.80}", type(key).__name__)
            _require_plain(inner, f"{where}.{key}", depth + 1)
        return
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            _require_plain(inner, f"{where}[{i}]", depth + 1)
        return
    else:
        what = type(value).__name__
    _refuse_value(where, what)


def _refuse_value(where: str, what: str) -> NoReturn:
    raise FormatError(
        "what a checkpoint holds beside its tensors is plain",
        where=where,
        equation=f"found {what}",
        hint="give numbers of 64 bits, text, lists and dicts by text; arrays are tensors under a key",
    )


def decode(data: bytes, *, where: str) -> Body:
    """What ``encode`` wrote.

    Raises:
        DigestError: The bytes are damaged.
        FormatError: They are no manifest of this version, or one that no save writes.
    """
    start = len(_MAGIC) + DIGEST_BYTES
    if not data.startswith(_MAGIC):
        is_other = data.startswith(_FAMILY)
        raise FormatError(
            "a manifest is of a version that is read here",
            where=where,
            equation=f"{data[: len(_MAGIC)]!r} != {_MAGIC!r}",
            hint="read it with the shardweave that wrote it"
            if is_other
            else "it is not what its name says; copy the folder again",
        )
    body = data[start:]
    if data[len(_MAGIC) : start] != hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest():
        raise DigestError(
            "a manifest has the digest of its bytes",
            where=where,
            equation=f"{len(data)} bytes with another digest",
            hint="it is damaged; copy it again, or use the checkpoint before",
        )
    try:
        found = msgspec.msgpack.decode(body, type=Body)
        for name in ("config", "data", "extras"):
            _require_plain(getattr(found, name), name)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            "a manifest is readable",
            where=where,
            equation=str(error),
            hint="do not use it: its digest is right, so it was written so",
        ) from error
    return found
