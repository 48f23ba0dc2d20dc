"""A plan carried out between live ranks, over any transport, in bounded memory.

``schedule`` is arithmetic: it deals the copies of a plan into rounds, so that no rank sends and
receives more than ``memory_bytes`` in one. Whatever a transport stages is therefore bounded by that,
and every rank computes the same rounds without asking another. A rank's rounds never go back, and a
round asks only for what its two ranks do in that round, so rounds cannot wait for each other in a ring.

``replay`` does it: local copies at once, then round by round. A schedule is replayed as often as
the geometry stays; ``execute`` is both.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import xxhash

from shardweave.errors import DigestError, DtypeError, PlanError, TransportError
from shardweave.layout import Box, Layout
from shardweave.layout.dtype import itemsize
from shardweave.move.transport import (
    Arrays,
    Moved,
    Rendezvous,
    Staging,
    Transport,
    aligned,
    as_bytes,
    tensors,
)
from shardweave.move.views import source_block, target_block
from shardweave.plan import Copy, Family, Plan

if TYPE_CHECKING:
    import torch

MEMORY_BYTES = 1 << 29
"""The most that a rank sends and receives in a round, unless told otherwise."""

Progress = Callable[[int], None]
"""Called with the bytes that this rank moved since the last call."""

_Forms = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Schedule:
    """What one rank does of a plan, and when.

    Attributes:
        plan: The plan.
        rank: The rank.
        memory_bytes: The most that it sends and receives in a round.
        local: Copies within the rank.
        rounds: For each round, its copies with other ranks; may be empty. As many on every rank.
        digest: The same on all ranks that have the same plan and the same bound.
    """

    plan: Plan
    rank: int
    memory_bytes: int
    local: tuple[Copy, ...]
    rounds: tuple[tuple[Copy, ...], ...]
    digest: str

    @cached_property
    def touched(self) -> tuple[_Forms, _Forms]:
        """The arrays that the rank reads, and those that it writes, by name: their shapes and dtypes."""
        copies = [*self.local, *itertools.chain.from_iterable(self.rounds)]
        reads = {copy.src_name for copy in copies if copy.src_rank == self.rank}
        writes = {copy.dst_name for copy in copies if copy.dst_rank == self.rank}

        def forms(layout: Layout, names: set[str]) -> _Forms:
            wanted = layout.arrays(self.rank) if names else {}
            buffers = {name: wanted[name][0] for name in sorted(names)}
            return {name: (tuple(b.shape), f"torch.{b.dtype}") for name, b in buffers.items()}

        return forms(self.plan.src, reads), forms(self.plan.dst, writes)


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank did.

    Attributes:
        bytes_sent, bytes_received: As the transport counted them.
        bytes_local: Bytes copied within the rank.
        num_rounds: Rounds of the whole move.
        seconds: From the first byte to the last, with the wait for other ranks.
    """

    bytes_sent: int
    bytes_received: int
    bytes_local: int
    num_rounds: int
    seconds: float


# --- when ---------------------------------------------------------------------------------------


def schedule(plan: Plan, *, rank: int, memory_bytes: int = MEMORY_BYTES) -> Schedule:
    """Deal the copies of a plan into rounds.

    Copies keep the plan's order, and each comes in the first round in which both of its ranks have
    room and are not past. One that is larger than the bound is cut along its outermost dims.

    Laws:
        Rounds are the same whichever rank computes them.
        In a round a rank sends and receives at most ``memory_bytes``.
        Local copies and rounds of all ranks are the copies of the plan, each on both of its ranks.

    Args:
        plan: The plan.
        rank: Whose part is wanted.
        memory_bytes: At least ``Staging.ALIGN``.

    Raises:
        PlanError: The bound is too small for one element.
    """
    if memory_bytes < Staging.ALIGN:
        raise PlanError(
            "a round has room for an element",
            where=f"rank {rank}",
            equation=f"memory_bytes({memory_bytes}) < {Staging.ALIGN}",
            hint="allow some megabytes; a round costs a message's latency",
        )
    bound = memory_bytes // Staging.ALIGN * Staging.ALIGN
    dealer, local = _Dealer(bound), []
    mine: defaultdict[int, list[Copy]] = defaultdict(list)
    for family in plan.families:
        item = itemsize(plan.src.rules[family.src_rule].dtype)
        limit = bound // item
        own = (family.src == rank) | (family.dst == rank)
        copies = plan.copies([replace(family, box=family.box[own], src=family.src[own], dst=family.dst[own])])
        shape_of = _Shapes(plan, family)
        sizes: dict[int, tuple[int, list[int]]] = {}
        moves = zip(family.box.tolist(), family.src.tolist(), family.dst.tolist(), own.tolist(), strict=True)
        for box, src, dst, is_own in moves:
            if box not in sizes:
                turns, shape = shape_of(box)
                sizes[box] = turns, [aligned(cut.numel * item) for cut in _cuts(shape, limit)]
            turns, parts = sizes[box]
            for _ in range(turns):
                copy = next(copies) if is_own else None
                if src == dst:
                    local += [copy] if copy else []
                    continue
                rounds = [dealer.deal(src, dst, part) for part in parts]
                if copy:
                    if len(rounds) == 1:
                        mine[rounds[0]].append(copy)
                        continue
                    for number, cut in zip(rounds, _cuts(copy.dst_box.shape, limit), strict=True):
                        mine[number].append(_part(copy, cut))
    return Schedule(
        plan,
        rank,
        memory_bytes,
        tuple(local),
        tuple(tuple(mine[number]) for number in range(dealer.num_rounds)),
        _fingerprint(plan, memory_bytes),
    )


class _Dealer:
    """Which round comes next for each rank, and how full it is."""

    def __init__(self, bound: int) -> None:
        self.bound, self.num_rounds = bound, 0
        self.at: dict[int, tuple[int, int]] = {}

    def deal(self, src: int, dst: int, size: int) -> int:
        """The round of a block, which is at most as large as the bound."""
        a, b = self.at.get(src, (0, 0)), self.at.get(dst, (0, 0))
        number = max(a[0], b[0])
        full = [load if at == number else 0 for at, load in (a, b)]
        if max(full) + size > self.bound:
            number, full = number + 1, [0, 0]
        self.at[src], self.at[dst] = (number, full[0] + size), (number, full[1] + size)
        self.num_rounds = max(self.num_rounds, number + 1)
        return number


class _Shapes:
    """How many single copies a box of a family is, and what shape each has at the destination."""

    def __init__(self, plan: Plan, family: Family) -> None:
        sides = (plan.src.rules[family.src_rule], plan.dst.rules[family.dst_rule])
        stacked = [side.stacked or () for side in sides]
        self.count = family.count.tolist()
        self.walked = [d for d in range(family.tensor.num_dims) if any(d not in dims for dims in stacked)]
        self.dims = stacked[1]

    def __call__(self, box: int) -> tuple[int, tuple[int, ...]]:
        count = self.count[box]
        turns = math.prod(count[d] for d in self.walked)
        return turns, tuple(1 if d in self.walked else count[d] for d in self.dims)


def _cuts(shape: Sequence[int], limit: int) -> Iterator[Box]:
    """Boxes of at most ``limit`` elements that tile a shape, in storage order, each one stretch of it."""
    row = math.prod(shape)
    if row <= limit:
        yield Box.of([0] * len(shape), shape)
        return
    axis = -1
    while row > limit:
        axis += 1
        row //= shape[axis]
    step = limit // row
    for outer in itertools.product(*(range(size) for size in shape[:axis])):
        for at in range(0, shape[axis], step):
            stop = min(at + step, shape[axis])
            dims = (
                [range(i, i + 1) for i in outer] + [range(at, stop)] + [range(n) for n in shape[axis + 1 :]]
            )
            yield Box(tuple(dims))


def _part(copy: Copy, cut: Box) -> Copy:
    """The part of a copy at some positions of its destination block."""
    if cut.shape == copy.dst_box.shape:
        return copy
    at = dict(zip(copy.dst_dims, cut.dims, strict=True))

    def inside(dims: Sequence[int], box: Box) -> Box:
        parts = ((r, at.get(d, range(len(r)))) for d, r in zip(dims, box.dims, strict=True))
        return Box(tuple(r[part.start : part.stop] for r, part in parts))

    return replace(
        copy,
        src_box=inside(copy.src_dims, copy.src_box),
        dst_box=inside(copy.dst_dims, copy.dst_box),
        elements=inside(range(len(copy.elements.dims)), copy.elements),
    )


def _fingerprint(plan: Plan, memory_bytes: int) -> str:
    state = xxhash.xxh3_128(str(memory_bytes).encode())
    for family in plan.families:
        rules = plan.src.rules[family.src_rule], plan.dst.rules[family.dst_rule]
        state.update(
            "\n".join([str(family.tensor), *(f"{rule.name} {rule.dtype}" for rule in rules)]).encode()
        )
        for name in ("count", "src_at", "src_step", "dst_at", "dst_step", "box", "src", "dst"):
            state.update(np.ascontiguousarray(getattr(family, name)).data)
    return state.hexdigest()


# --- doing it -----------------------------------------------------------------------------------


def execute(
    plan: Plan,
    *,
    rank: int,
    transport: Transport,
    src: Mapping[str, Any],
    dst: Mapping[str, Any],
    endpoints: Mapping[int, bytes],
    memory_bytes: int = MEMORY_BYTES,
    rendezvous: Rendezvous | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Carry out one rank's part of a plan: ``replay(schedule(plan, ...), ...)``. Every rank calls it."""
    return replay(
        schedule(plan, rank=rank, memory_bytes=memory_bytes),
        transport=transport,
        src=src,
        dst=dst,
        endpoints=endpoints,
        rendezvous=rendezvous,
        verify=verify,
        progress=progress,
    )


def replay(
    steps: Schedule,
    *,
    transport: Transport,
    src: Mapping[str, Any],
    dst: Mapping[str, Any],
    endpoints: Mapping[int, bytes],
    rendezvous: Rendezvous | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Carry out one rank's part of a plan. Every rank of both layouts calls it.

    What a destination holds that the plan does not write, such as padding, is left as it is. Where
    dtypes differ, the destination casts as torch does; ``plan`` has decided whether it may.

    Law: afterwards ``dst`` is what ``simulate`` makes of all ranks' ``src``, bit for bit.

    Args:
        steps: This rank's schedule.
        transport: This rank's end of a transport.
        src: The arrays that this rank has in the source layout: tensors, or numpy arrays.
        dst: Those of the destination layout, to write to; no memory of ``src``.
        endpoints: What each rank of the source got from ``transport.offer``; unused if two-sided.
        rendezvous: Where ranks agree, before the first byte, that they have one plan and its arrays,
            and after the last, that all are done: then the call returns on all of them or raises on
            all, and sources may be changed. Without it a rank knows of itself only.
        verify: Compare a digest of each block, taken of the source, with what the destination
            then holds. Needs a rendezvous, which carries the digests.
        progress: Told of bytes after each round.

    Raises:
        PlanError, DtypeError: Arrays are not those of the layouts, or ranks have other plans.
        TransportError, TransportTimeoutError: A peer is gone, stalls, or reported a failure.
        DigestError: A block at the destination is not what the source has.
    """
    if verify and rendezvous is None:
        raise TransportError(
            "digests of blocks travel over a rendezvous",
            where=f"rank {steps.rank}",
            equation="verify(True), rendezvous(None)",
            hint="give execute() a rendezvous of all ranks, or leave verify out",
        )
    begin = time.perf_counter()
    try:
        sources, targets = tensors(src), tensors(dst)
        _check(steps, sources, targets)
        if rendezvous is not None:
            _agree(steps, rendezvous)
        local = 0
        for copy in steps.local:
            block = source_block(copy, sources)
            target_block(copy, targets).copy_(block)
            local += block.nbytes
        moved = Moved()
        for copies in steps.rounds:
            now = transport.run(steps.plan, copies, src=sources, dst=targets, endpoints=endpoints)
            moved += now
            if progress is not None:
                progress(now.sent + now.received)
        if rendezvous is not None:
            mine = _digests(steps, sources, targets) if verify else {}
            # A rank that has nothing to do in the last rounds waits for those that have.
            said = rendezvous.exchange(json.dumps(mine).encode(), turns=1 + len(steps.rounds))
            if verify:
                _compare(steps, targets, {rank: json.loads(text) for rank, text in said.items()})
                rendezvous.exchange(b"verified")
    except Exception as error:
        if rendezvous is not None:
            rendezvous.fail(error)
        raise
    return Report(moved.sent, moved.received, local, len(steps.rounds), time.perf_counter() - begin)


def _check(steps: Schedule, src: Arrays, dst: Arrays) -> None:
    """Whether the arrays that a schedule names are those of the layouts."""
    layouts = steps.plan.src, steps.plan.dst
    for layout, touched, arrays in zip(layouts, steps.touched, (src, dst), strict=True):
        for name, (shape, dtype) in touched.items():
            array = arrays.get(name)
            if array is None or array.shape != shape or str(array.dtype) != dtype:
                _refuse(layout, steps.rank, name, array)


def _refuse(layout: Layout, rank: int, name: str, array: torch.Tensor | None) -> NoReturn:
    buffer, where = layout.arrays(rank)[name][0], f"layout {layout.name!r}, rank {rank}, {name!r}"
    got = "nothing" if array is None else f"shape{tuple(array.shape)}"
    if array is None or got != f"shape{buffer.shape}":
        raise PlanError(
            "the arrays of a rank are those of its layout",
            where=where,
            equation=f"{got} != shape{buffer.shape}",
            hint="give the arrays under the names and in the shapes of the layout that was planned",
        )
    raise DtypeError(
        "the arrays of a rank have the dtypes of its layout",
        where=where,
        equation=f"dtype({str(array.dtype).removeprefix('torch.')}) != dtype({buffer.dtype})",
        hint="plan with the dtype that is stored; the plan then says where values are cast",
    )


def _agree(steps: Schedule, rendezvous: Rendezvous) -> None:
    """Every rank has come, with its arrays, and has the same plan."""
    said = rendezvous.exchange(steps.digest.encode())
    others = [rank for rank, digest in said.items() if digest.decode() != steps.digest]
    if others:
        raise PlanError(
            "all ranks of a move have the same plan and the same bound on memory",
            where=f"rank {steps.rank} and rank {', '.join(map(str, others[:8]))}",
            equation=f"digest({steps.digest}) != digest({said[others[0]].decode()})",
            hint="plan on each rank from the same two layouts and options, or send one plan to all",
        )


def _digests(steps: Schedule, src: Arrays, dst: Arrays) -> dict[str, list[str]]:
    """For each rank, the digests of the blocks that it got from this one, as they should be there."""
    import torch

    found: defaultdict[str, list[str]] = defaultdict(list)
    for copy in itertools.chain.from_iterable(steps.rounds):
        if copy.src_rank == steps.rank:
            dtype = getattr(torch, steps.plan.dst.rules[copy.family.dst_rule].dtype)
            found[str(copy.dst_rank)].append(_digest(source_block(copy, src).to(dtype)))
    return found


def _compare(steps: Schedule, dst: Arrays, said: Mapping[int, Mapping[str, list[str]]]) -> None:
    wanted = {rank: iter(of.get(str(steps.rank), ())) for rank, of in said.items()}
    for number, copies in enumerate(steps.rounds):
        for copy in copies:
            if copy.dst_rank != steps.rank:
                continue
            expected, got = next(wanted[copy.src_rank]), _digest(target_block(copy, dst))
            if expected != got:
                raise DigestError(
                    "a block at the destination has the digest that it has at the source",
                    where=f"rank {copy.src_rank}, {copy.src_name!r} {copy.src_box} to "
                    f"rank {copy.dst_rank}, {copy.dst_name!r} {copy.dst_box}, round {number}",
                    equation=f"xxh3({expected}) != xxh3({got})",
                    hint="the transport lost or changed bytes, or the source changed during the move; "
                    "the destination is not to be used",
                )


def _digest(block: Any) -> str:
    return xxhash.xxh3_64_hexdigest(as_bytes(block.contiguous().cpu()).numpy().data)
