"""Manifests: what a rank or a whole trainer says that it owns, in a few hundred bytes.

A manifest is a layout, and for each rank that it speaks for how to reach it. The layout says families and
dims, so that its size does not grow with layers and experts; names are written once. What changes from one
version to the next (the stamp, endpoints, fingerprints) is apart from what does not, the *structure*: two
manifests of one geometry have one structural hash, and a plan made for it stays good.

Nothing is believed: what is decoded is bounded and proved. ``joining`` puts manifests together.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import msgspec

from shardweave.errors import FormatError, GeometryError
from shardweave.layout import (
    Buffer,
    BufferRule,
    Layout,
    Mesh,
    Part,
    format_layout,
    parse_layout,
    prove,
)
from shardweave.layout.dtype import itemsize
from shardweave.layout.fingerprint import NOTHING, NUM_BYTES, Fingerprint, held
from shardweave.layout.layout import format_ranks

MOST_BYTES = 1 << 24
"""The most that a manifest unpacks to: a thousand times what the largest models need."""

_MAGIC = b"shardweave.manifest/2\n"
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Manifest:
    """What some ranks own.

    Attributes:
        layout: Where the state of all ranks of its mesh is; ``part_of`` makes it that of one rank.
        endpoints: How to reach each rank that the manifest speaks for; bytes that only transports read.
        version: The version of the content; ``None`` where it is not known, which is never version 0.
        fingerprints: For each rank one fingerprint a part of each rule, in order, that of nothing where the
            rank has none of it (see ``fingerprints_of``); empty where nobody took any.
        key: The key that the fingerprints were taken with.

    Law: ``decode(encode(m)) == m``.
    """

    layout: Layout
    endpoints: Mapping[int, bytes]
    version: int | None = None
    fingerprints: Mapping[int, tuple[Fingerprint, ...]] = field(default_factory=dict)
    key: int = 0

    def __post_init__(self) -> None:
        ranks = self.layout.mesh.ranks
        strangers = sorted(set(self.endpoints) - set(ranks))
        if strangers or not self.endpoints:
            self._refuse(
                "a manifest speaks for ranks of its layout",
                f"endpoints of {format_ranks(strangers) if strangers else 'no rank'} on {self.layout.mesh}",
                "give an endpoint, empty if need be, for each rank whose buffers can be read",
            )
        if self.fingerprints and set(self.fingerprints) != set(self.endpoints):
            self._refuse(
                "fingerprints are given for every rank of a manifest or for none",
                f"{len(self.fingerprints)} ranks with fingerprints, {len(self.endpoints)} with endpoints",
                "take them on every rank, at the version that is stamped",
            )
        parts = sum(len(rule.parts) for rule in self.layout.rules)
        for rank, found in self.fingerprints.items():
            if len(found) != parts:
                self._refuse(
                    "a rank has one fingerprint for each part of each buffer",
                    f"rank {rank}: fingerprints({len(found)}) != parts({parts})",
                    "take them with fingerprints_of",
                )
        if not 0 <= self.key < 1 << 64 or not 0 <= (self.version or 0) < 1 << 63:
            self._refuse(
                "the version and the key of a manifest are counted from 0",
                f"version({self.version}), key({self.key})",
                "use a version below 2**63 and a key below 2**64; None is a version that is not known",
            )

    def _refuse(self, rule: str, equation: str, hint: str) -> NoReturn:
        raise GeometryError(rule, where=f"layout {self.layout.name!r}", equation=equation, hint=hint)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the manifest speaks for, ascending."""
        return tuple(sorted(self.endpoints))

    @property
    def structure(self) -> str:
        """A hash of the geometry: which ranks, and what is where on them.

        Law: it does not depend on version, endpoints, fingerprints, or the name of the layout.
        """
        text = f"{self.ranks}\n{format_layout(replace(self.layout, name=''))}"
        return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


# --- what a rank owns ---------------------------------------------------------------------------


def part_of(layout: Layout, rank: int) -> Layout:
    """What one rank holds, as a layout of that rank alone; buffers that it has nothing of are left out.

    Law: its buffers are the rank's. The tensors stay the whole ones, so there are gaps for others to fill.

    >>> from shardweave.layout import Mesh, Tensor, along, even
    >>> mesh, w = Mesh((("tp", 2),)), Tensor("w", (6, 4), "float32")
    >>> rows = along(mesh, "tp", lambda r: even(w.dims[0], 2, r))
    >>> part = part_of(Layout("trainer", mesh, (BufferRule("w", (Part(w),), (rows, w.dims[1])),)), 1)
    >>> print(part.mesh, *part.rules[0].dims)
     @ 1 [3:6] [0:4]
    """
    mesh = Mesh((), offset=rank)
    rules = tuple(rule_of(buffer) for buffer in not_empty(layout, rank))
    return Layout(layout.name, mesh, rules)


def fingerprints_of(
    layout: Layout, rank: int, arrays: Mapping[str, Any], *, key: int = 0
) -> tuple[Fingerprint, ...]:
    """The fingerprints of what a rank holds, one for each part of each rule, in order.

    Args:
        layout: The layout of the manifest.
        rank: The rank.
        arrays: Its stored arrays by name: numpy arrays, or torch tensors on the CPU.
        key: The key of the fingerprints.

    Raises:
        OutsideError, DtypeError: As ``shardweave.layout.fingerprint.held``.
    """
    found: list[Fingerprint] = []
    for rule in layout.rules:
        buffer = rule.at(layout.mesh, rank)
        content = held(buffer, arrays, key=key) if buffer is not None else {}
        found += [content.get(part.tensor, NOTHING) for part in rule.parts]
    return tuple(found)


def not_empty(layout: Layout, rank: int) -> Iterator[Buffer]:
    """The buffers of a rank without those, and without the parts, that it has no element of."""
    for buffer in layout.buffers(rank):
        labels = {run.label for dim in buffer.dims for run in dim.runs if run.label}
        parts = tuple(part for part in buffer.parts if not part.label or part.label in labels)
        if parts and buffer.numel:
            yield replace(buffer, parts=parts)


def rule_of(buffer: Buffer, where: tuple[tuple[str, tuple[int, ...]], ...] = ()) -> BufferRule:
    """The rule of a buffer that is the same on every rank that has it."""
    return BufferRule(
        buffer.name,
        buffer.parts,
        buffer.dims,
        buffer.stacked,
        buffer.numbers,
        where,
        buffer.dtype,
        buffer.transform,
    )


# --- bytes --------------------------------------------------------------------------------------


class _Body(msgspec.Struct, array_like=True, frozen=True):
    layout: str
    ranks: list[int]
    endpoints: list[bytes]
    version: int | None
    fingerprints: list[bytes]
    key: int


def encode(manifest: Manifest) -> bytes:
    """A manifest as bytes. The same manifest gives the same bytes in every process."""
    ranks = manifest.ranks
    body = _Body(
        format_layout(manifest.layout),
        list(ranks),
        [manifest.endpoints[rank] for rank in ranks],
        manifest.version,
        [b"".join(map(bytes, manifest.fingerprints[rank])) for rank in ranks if manifest.fingerprints],
        manifest.key,
    )
    data = msgspec.msgpack.encode(body)
    if len(data) > MOST_BYTES:
        raise FormatError(
            "a manifest is of a sane size",
            where=f"layout {manifest.layout.name!r}",
            equation=f"bytes({len(data)}) > {MOST_BYTES}",
            hint="publish the ranks in several manifests, or shorten their endpoints",
        )
    packed = zlib.compress(data, 9)
    return _MAGIC + _digest(packed) + packed


def decode(data: bytes) -> Manifest:
    """The manifest that ``encode`` wrote. What it allocates is bounded, and its layout is proved.

    Everything is proved of the layout but that it has no gaps, which other manifests may fill; ``merge`` and
    ``plan`` prove that too.

    Raises:
        FormatError: The bytes are no manifest of this version, damaged, or too large.
        NotationError: The layout in them is none.
        GeometryError: Ranks, endpoints and fingerprints do not fit together.
        DtypeError, OverlapError, OutsideError, CutError: The layout is not sound.
    """
    start = len(_MAGIC) + _DIGEST_BYTES
    if data[: len(_MAGIC)] != _MAGIC:
        _refuse("a manifest has a known version", f"{data[: len(_MAGIC)]!r} != {_MAGIC!r}")
    packed = data[start:]
    if data[len(_MAGIC) : start] != _digest(packed):
        _refuse("a manifest has the digest of its bytes", f"{len(data)} bytes with another digest")
    unpack = zlib.decompressobj()
    try:
        body = msgspec.msgpack.decode(unpack.decompress(packed, MOST_BYTES), type=_Body)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        _refuse("a manifest is readable", f"{len(data)} bytes: {error}")
    if not unpack.eof or unpack.unused_data:
        _refuse("a manifest is of a sane size", f"bytes({len(data)}) unpack to more than {MOST_BYTES}")
    lengths = {len(body.ranks), len(body.endpoints), len(body.fingerprints) or len(body.ranks)}
    if len(lengths) > 1 or body.ranks != sorted(set(body.ranks)):
        _refuse(
            "a manifest lists its ranks in order", f"ranks({len(body.ranks)}), columns({sorted(lengths)})"
        )
    layout = parse_layout(body.layout)
    manifest = Manifest(
        layout,
        dict(zip(body.ranks, body.endpoints, strict=True)),
        body.version,
        {rank: _fingerprints(each) for rank, each in zip(body.ranks, body.fingerprints, strict=False)},
        body.key,
    )
    for rule in layout.rules:
        itemsize(rule.dtype)
    try:
        prove(
            layout if manifest.ranks == tuple(layout.mesh.ranks) and layout.mesh.axes else _completed(layout)
        )
    except OverflowError as error:
        _refuse("the numbers of a manifest can be counted with", str(error))
    return manifest


def _fingerprints(data: bytes) -> tuple[Fingerprint, ...]:
    steps = range(0, len(data), NUM_BYTES)
    return tuple(Fingerprint.decode(data[i : i + NUM_BYTES]) for i in steps)


def _completed(layout: Layout) -> Layout:
    """A layout that has no gaps, for others hold all that its ranks do not."""
    rest = tuple(
        BufferRule("rest", (Part(tensor, replica=True),), tensor.dims, tuple(range(tensor.num_dims)))
        for tensor in layout.tensors
    )
    return replace(layout, rules=layout.rules + rest)


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).digest()


def _refuse(rule: str, equation: str) -> NoReturn:
    raise FormatError(rule, where="a manifest", equation=equation, hint="ask its publisher again") from None
