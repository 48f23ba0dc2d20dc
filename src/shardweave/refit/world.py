"""What the ranks of a refit come to together: one source, some engines, and the way from one to each.

Everything here is a pure function of what the ranks said, so that every rank concludes the same and
refuses the same. It is kept by what was said, not by who said it: a rank that was restarted, and an engine
that comes or goes, leave the ways to all others as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

import msgspec

from shardweave.errors import FormatError, GeometryError, PlanError, UnknownNameError
from shardweave.layout import Layout, Tensor, narrowed
from shardweave.layout.layout import format_ranks
from shardweave.plan import Plan, plan
from shardweave.refit.joining import merge
from shardweave.refit.manifest import Manifest, decode, encode, part_of
from shardweave.refit.values import Step, landing

MOST_WAYS = 16
"""Ways that are kept; an old one is planned again, in milliseconds."""


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """What a rank says at the begin of a turn.

    Attributes:
        instance: Of the process, so that a restarted one is told from the one before it.
        options: A digest of the options that all ranks must share.
        layout: The digest of a manifest: the layout that this rank holds its part of, or wants it of.
        version: What a publisher offers, and what a receiver serves.
        group: The turn in which this rank's transport was made; -1 if it has none.
        subset: Of a receiver: whether its layout leaves out some of what is published.
        allow_casts: Of a receiver: whether it stores values in a dtype that cannot hold them all.
        origin: Of a publisher: a name for who remembers what it published. Of a receiver: the ``origin`` of
            the world in which it got what it serves.
    """

    instance: str
    options: str
    layout: str
    version: int | None
    group: int
    subset: bool = False
    allow_casts: bool = False
    origin: str = ""


def encode_hello(hello: Hello) -> bytes:
    """A hello as bytes."""
    return msgspec.msgpack.encode(hello)


def decode_hello(data: bytes, rank: int) -> Hello:
    """The hello of a rank.

    Raises:
        FormatError: It is none.
    """
    try:
        return msgspec.msgpack.decode(data, type=Hello)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FormatError(
            "a rank of a refit says what this version of shardweave understands",
            where=f"rank {rank}",
            equation=f"{len(data)} bytes: {error}",
            hint="install one version of shardweave on all ranks",
        ) from error


@dataclass(frozen=True)
class Way:
    """From the publishers to one engine.

    Attributes:
        key: A digest of all that it follows from.
        engine: What the engine holds.
        plan: The copies, into the layout in which content lands.
        steps: What makes the engine's values of those that landed.
    """

    key: str
    engine: Layout
    plan: Plan
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class World:
    """What a turn is about.

    Attributes:
        version: The version that is offered.
        origin: A digest of who offers it. Somebody else may have other content under the same number, as a
            trainer has that went back to a checkpoint: what it offers is not served yet.
        ways: The engines that do not serve it yet, in order of their ranks.
        is_new_group: Whether the transports of all ranks have to be made anew.
    """

    version: int
    origin: str
    ways: tuple[Way, ...]
    is_new_group: bool


def manifest_of(layout: Layout) -> bytes:
    """A layout as every rank of it states it."""
    return encode(Manifest(layout, dict.fromkeys(layout.mesh.ranks, b"")))


class Worlds:
    """Concludes what ranks say, and keeps what it concluded from."""

    def __init__(self, *, ranks_per_node: int | None = None) -> None:
        self.ranks_per_node = ranks_per_node
        self._layouts: dict[str, Layout] = {}
        self._sources: dict[str, Layout] = {}
        self._ways: dict[str, Way] = {}

    def conclude(
        self,
        publishers: Mapping[int, Hello],
        receivers: Mapping[int, Hello],
        read: Callable[[str], bytes],
    ) -> World:
        """The world of a turn.

        Args:
            publishers: What each of them said.
            receivers: The same of these.
            read: Gives the manifest of a digest.

        Raises:
            PlanError: Publishers offer different versions, or ranks were given different options.
            GeometryError: An engine is not complete.
            UnknownNameError: Something is published that an engine does not have.
            ShardweaveError: What ``merge`` and ``plan`` raise.
        """
        hellos = {**publishers, **receivers}
        self._check_alike(hellos)
        version = self._version(publishers)
        source_key, source = self._source(publishers, read)
        offered_by = sorted((rank, hello.origin) for rank, hello in publishers.items())
        origin = blake2b(repr(offered_by).encode(), digest_size=8).hexdigest()
        ways = [
            self._way(source_key, source, digest, receivers[ranks[0]], read)
            for digest, ranks in self._engines(receivers, read).items()
            if any((receivers[rank].version, receivers[rank].origin) != (version, origin) for rank in ranks)
        ]
        groups = {hello.group for hello in hellos.values()}
        return World(version, origin, tuple(ways), len(groups) > 1 or -1 in groups)

    def _check_alike(self, hellos: Mapping[int, Hello]) -> None:
        first = min(hellos)
        for rank, hello in hellos.items():
            if hello.options != hellos[first].options:
                raise PlanError(
                    "all ranks of a session have the same options",
                    where=f"rank {first} and rank {rank}",
                    equation=f"options({hellos[first].options}) != options({hello.options})",
                    hint="give every rank the same publishers, receivers, transport, memory_bytes and "
                    "ranks_per_node, and the same version of shardweave",
                )

    def _version(self, publishers: Mapping[int, Hello]) -> int:
        first = min(publishers)
        version = publishers[first].version
        for rank, hello in publishers.items():
            if hello.version != version:
                raise PlanError(
                    "the publishers of a turn offer one version",
                    where=f"rank {first} and rank {rank}",
                    equation=f"version({version}) != version({hello.version})",
                    hint="publish the same step on every rank",
                )
        if version is None:
            raise PlanError(
                "a publisher offers a version",
                where=f"rank {first}",
                equation="version(None)",
                hint="count versions from 0",
            )
        return version

    def _layout(self, digest: str, read: Callable[[str], bytes]) -> Layout:
        if digest not in self._layouts:
            self._layouts[digest] = decode(read(digest)).layout
        return self._layouts[digest]

    def _source(self, publishers: Mapping[int, Hello], read: Callable[[str], bytes]) -> tuple[str, Layout]:
        said = sorted((rank, hello.layout) for rank, hello in publishers.items())
        key = blake2b(repr(said).encode(), digest_size=16).hexdigest()
        if key not in self._sources:
            layouts = {rank: self._layout(digest, read) for rank, digest in said}
            first = layouts[said[0][0]]
            if len({digest for _, digest in said}) == 1 and set(first.mesh.ranks) == set(layouts):
                self._sources[key] = first
            else:
                self._sources[key] = merge(
                    Manifest(part_of(layout, rank), {rank: b""}) for rank, layout in layouts.items()
                )
        return key, self._sources[key]

    def _engines(
        self, receivers: Mapping[int, Hello], read: Callable[[str], bytes]
    ) -> dict[str, tuple[int, ...]]:
        """The ranks of each engine by the digest of its layout, in order of its first rank."""
        engines: dict[str, tuple[int, ...]] = {}
        for rank in sorted(receivers):
            digest = receivers[rank].layout
            ranks = tuple(self._layout(digest, read).mesh.ranks)
            strange = [
                other
                for other in ranks
                if other not in receivers or receivers[other].layout != digest or rank not in ranks
            ]
            if strange:
                raise GeometryError(
                    "all ranks of an engine receive, and state one layout",
                    where=f"layout {self._layout(digest, read).name!r} of rank {rank}",
                    equation=f"its mesh has {format_ranks(ranks)}; {format_ranks(strange)} "
                    "receive nothing or state another layout",
                    hint="give the mesh of each engine the offset of its first global rank, and the same "
                    "model and degrees to all of its ranks",
                )
            engines.setdefault(digest, ranks)
        return engines

    def _way(
        self, source_key: str, source: Layout, digest: str, hello: Hello, read: Callable[[str], bytes]
    ) -> Way:
        said = (source_key, digest, hello.subset, hello.allow_casts, self.ranks_per_node)
        key = blake2b(repr(said).encode(), digest_size=16).hexdigest()
        if key not in self._ways:
            engine = self._layout(digest, read)
            if hello.subset:
                source = _of(source, engine)
            else:
                _check_wanted(source, engine)
            landed, steps = landing(source, engine, allow_casts=hello.allow_casts)
            made = plan(source, landed, ranks_per_node=self.ranks_per_node, allow_casts=hello.allow_casts)
            while len(self._ways) >= MOST_WAYS:
                self._ways.pop(next(iter(self._ways)))
            self._ways[key] = Way(key, engine, made, steps)
        return self._ways[key]


def _of(source: Layout, engine: Layout) -> Layout:
    """What a source has of the tensors and members that an engine wants; the rest is for the plan to miss."""
    by_name = {tensor.name: tensor for tensor in engine.tensors}
    wanted = {}
    for tensor in source.tensors:
        mine = by_name.get(tensor.name)
        if mine is not None and replace(mine, index=tensor.index) == tensor and _within(mine, tensor):
            wanted[tensor] = mine
    return narrowed(source, wanted)


def _within(some: Tensor, every: Tensor) -> bool:
    """Whether all members of a family are members of another."""
    pairs = zip(some.index, every.index, strict=True)
    return all({n for _, n in a} <= {n for _, n in b} for (_, a), (_, b) in pairs)


def _check_wanted(source: Layout, engine: Layout) -> None:
    strangers = [tensor for tensor in source.tensors if tensor not in engine.holders]
    if strangers:
        raise UnknownNameError(
            "the engine has every tensor that is published",
            where=f"from layout {source.name!r} to layout {engine.name!r}",
            equation=f"{len(strangers)} of {len(source.tensors)} are not there: "
            f"{'; '.join(map(str, strangers[:3]))}",
            hint="describe both sides with one model; a receiver that wants less says subset=True",
        )
