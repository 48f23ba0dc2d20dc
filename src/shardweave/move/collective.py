"""Point-to-point messages of ``torch.distributed``, over a process group that is passed in.

A block of ``SMALL_BYTES`` or more is one message, in the destination's dim order and the source's dtype.
A side whose block is contiguous in that form takes part in place; the other packs or unpacks it once, in
a buffer that is kept, while other blocks travel. The two decide independently, as nothing on the wire
depends on it. Smaller blocks of a pair and dtype share messages of up to ``PACK_BYTES``, one behind the
other without gaps; so do larger ones that the source has to pack and that come to lie one behind the other.
Which do follows from the copies of the round, that both sides have in one order.

Every rank posts what it receives in a round before it sends, and posts the messages of a pair in the same
order, so no order of ranks can make a round wait for itself. What is packed goes through ``ROOM_BYTES``,
round and round, so that little memory is needed and packing seldom waits. Neither the default group nor any
other registered one is read or made.
"""

from __future__ import annotations

import math
import re
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardweave.errors import TransportError, TransportTimeoutError
from shardweave.layout import Box
from shardweave.move.transport import (
    Arrays,
    Moved,
    Staging,
    aligned,
    as_bytes,
    milliseconds,
    wire_dtype,
)
from shardweave.move.views import Place, Rounds, Views
from shardweave.plan import Copy, Plan

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

SMALL_BYTES = 1 << 17
"""From here on, a message of its own costs less over gloo than a copy on each side."""

PACK_BYTES = 1 << 20
"""The most that small blocks share a message of; larger ones were no faster, and leave less to overlap."""

ROOM_BYTES = 1 << 25
"""Room for what is packed and on its way, or as much as the largest message needs."""

STRETCH_BYTES = ROOM_BYTES // 4
"""The most that blocks share a message of which the source packs and which are one stretch where they go."""


def process_group(
    *, store: Store, ranks: Sequence[int], rank: int, backend: str = "gloo", timeout_s: float = 60.0
) -> Any:
    """A process group of these ranks alone, which nothing but its holder knows of.

    Args:
        store: Any store of torch that all ranks reach; keys have a prefix of their own.
        ranks: The global ranks, in the order of the group.
        rank: This one.
        backend: ``gloo`` for host memory, ``nccl`` for memory of the current CUDA device.
        timeout_s: The longest that ranks wait for each other.

    Raises:
        TransportError, TransportTimeoutError: The ranks did not find each other.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    prefixed = PrefixStore(f"shardweave/{backend}", store)
    at, size, timeout = list(ranks).index(rank), len(ranks), milliseconds(timeout_s)
    try:
        if backend == "gloo":
            return dist.ProcessGroupGloo(prefixed, at, size, timeout=timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(prefixed, at, size, options)
    except (RuntimeError, AttributeError) as error:
        raise named_error(error, f"rank {rank} of ranks {_short(ranks)}, {backend}", timeout_s) from error


class CollectiveTransport:
    """Two-sided, over any process group of torch that can send and receive."""

    def __init__(
        self, *, group: Any, ranks: Sequence[int], device: str = "cpu", timeout_s: float = 60.0
    ) -> None:
        """One rank's end.

        Args:
            group: From ``process_group``, or a group of the caller's.
            ranks: The global rank of each rank of the group, in its order.
            device: Where the group sends from: ``cpu`` for gloo, the CUDA device for NCCL. Blocks
                elsewhere are staged there.
            timeout_s: The longest that a round may take.
        """
        import torch
        from torch.distributed import ProcessGroup

        # A registered group is a set of backends; a group from process_group is one itself.
        self._backend: Any = (
            group._get_backend(torch.device(device)) if type(group) is ProcessGroup else group
        )
        self._at = {rank: i for i, rank in enumerate(ranks)}
        self.rank = ranks[group.rank()]
        # A tensor's device has a number, so that of the group gets one too.
        self.device, self.timeout_s = torch.empty(0, device=device).device, timeout_s
        self._staging, self._room = Staging(device), Staging(device)
        self._known: Rounds[_Round] = Rounds()
        self._broken = ""
        self._waits_for: Sequence[int] = ()

    def offer(self, arrays: Mapping[str, Any]) -> bytes:
        """See ``Transport.offer``: nothing is offered, as the source sends."""
        return b""

    def run(
        self,
        plan: Plan,
        copies: Sequence[Copy],
        *,
        src: Arrays,
        dst: Arrays,
        endpoints: Mapping[int, bytes],
    ) -> Moved:
        """See ``Transport.run``."""
        if self._broken:
            raise TransportError(
                "a group whose messages broke off is not used again",
                where=f"rank {self.rank}",
                equation=f"it broke off with {self._broken}",
                hint="make a new group of the ranks that are left",
            )
        known = self._known.of(copies, lambda: _Round.of(plan, copies, self.rank))
        messages = known.messages(src, dst, self.device)
        sent = sum(message.num_bytes for message in messages if message.sends)
        received = sum(message.num_bytes for message in messages if not message.sends)
        peers: Sequence[int] = [message.peer for message in messages]
        try:
            # Backends that launch on a device post a round as one operation, or their sends would block.
            if messages and getattr(self._backend, "supports_coalescing", False):
                self._exchange_together(messages)
            else:
                self._exchange(messages)
        except RuntimeError as error:
            named = named_error(
                error, f"rank {self.rank} and rank {_short(self._waits_for or peers)}", self.timeout_s
            )
            self._broken = named.equation
            # The frames that the error keeps would keep the group, and with it its peers waiting.
            traceback.clear_frames(error.__traceback__)
            raise named from error
        return Moved(sent, received)

    def close(self) -> None:
        """See ``Transport.close``. A group that nobody else refers to ends here, and its peers are freed."""
        self._staging.buffer = self._room.buffer = None
        self._known.clear()
        self._backend, self._broken = None, "close()"

    def _exchange(self, messages: Sequence[_Message]) -> None:
        """Post what is received, then pack and post what is sent; ``_waits_for`` names the peer at hand."""
        deadline = time.monotonic() + self.timeout_s
        arriving = [message for message in messages if not message.sends]
        leaving = [message for message in messages if message.sends]
        self._stage(arriving)
        received = [(message, self._post(message)) for message in arriving]
        packed = [aligned(message.num_bytes) for message in leaving if message.blocks]
        self._room.begin(min(sum(packed), max([ROOM_BYTES, *packed])))
        sent: list[tuple[_Message, Any]] = []
        going: deque[tuple[range, _Message, Any]] = deque()
        at = 0
        for message in leaving:
            if not message.blocks:
                sent.append((message, self._post(message)))
                continue
            if not self._room.holds(at + aligned(message.num_bytes)):
                at = 0
            place = range(at, at + aligned(message.num_bytes))
            # Around the ring, what left first is what is next in the way.
            while any(place.start < other.stop and other.start < place.stop for other, *_ in going):
                self._wait(*going.popleft()[1:], deadline)
            message.stage(self._room.part(at, message.num_bytes))
            message.pack()
            going.append((place, message, self._post(message)))
            at = place.stop
        for message, work in received:
            self._wait(message, work, deadline)
            message.unpack()
        for message, work in (*sent, *((message, work) for _, message, work in going)):
            self._wait(message, work, deadline)
        self._waits_for = []

    def _exchange_together(self, messages: Sequence[_Message]) -> None:
        """Post all messages as one operation, and wait for it."""
        deadline = time.monotonic() + self.timeout_s
        self._stage(messages)
        for message in messages:
            message.pack()
        self._backend._start_coalescing()
        for message in messages:
            self._post(message)
        self._waits_for = [message.peer for message in messages]
        self._backend._end_coalescing().wait(milliseconds(deadline - time.monotonic()))
        for message in messages:
            message.unpack()
        self._waits_for = []

    def _stage(self, messages: Sequence[_Message]) -> None:
        """Give each message that needs it a room of its own."""
        staged = [message for message in messages if message.blocks]
        self._staging.begin(sum(aligned(message.num_bytes) for message in staged))
        for message in staged:
            message.stage(self._staging.take((message.num_bytes // message.dtype.itemsize,), message.dtype))

    def _post(self, message: _Message) -> Any:
        self._waits_for = [message.peer]
        post = self._backend.send if message.sends else self._backend.recv
        return post([message.wire], self._at[message.peer], 0)

    def _wait(self, message: _Message, work: Any, deadline: float) -> None:
        self._waits_for = [message.peer]
        work.wait(milliseconds(deadline - time.monotonic()))


@dataclass(slots=True)
class _Blocks:
    """Which blocks of those that a rank sends, or of those that it receives, are one message."""

    peer: int
    sends: bool
    dtype: torch.dtype
    num_bytes: int = 0
    numbers: list[int] = field(default_factory=list)


class _Stretches:
    """Where blocks lie at the destination that the source packs and that are one stretch there."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._shapes: dict[tuple[str, int, int], tuple[int, ...]] = {}

    def __call__(self, copy: Copy) -> range | None:
        """The elements that a block becomes; nothing if they are no stretch, or are one at the source."""
        family = copy.family
        order = [
            [d for d, dim in zip(dims, box.dims, strict=True) if len(dim) > 1]
            for dims, box in ((copy.src_dims, copy.src_box), (copy.dst_dims, copy.dst_box))
        ]
        source = _stretch(self._shape("src", family.src_rule, copy.src_rank), copy.src_box)
        if source is not None and order[0] == order[1]:
            return None
        return _stretch(self._shape("dst", family.dst_rule, copy.dst_rank), copy.dst_box)

    def _shape(self, side: str, rule: int, rank: int) -> tuple[int, ...]:
        key = side, rule, rank
        if key not in self._shapes:
            layout = self._plan.src if side == "src" else self._plan.dst
            buffer = layout.rules[rule].at(layout.mesh, rank)
            assert buffer is not None  # a copy of it is planned
            self._shapes[key] = buffer.shape
        return self._shapes[key]


def _stretch(shape: Sequence[int], box: Box) -> range | None:
    """The elements of a box of an array, if they lie one behind the other.

    >>> _stretch((4, 6), Box.of((1, 0), (2, 6))), _stretch((4, 6), Box.of((1, 2), (2, 3)))
    (range(6, 18), None)
    """
    begin, step, count = 0, 1, 1
    for size, dim in reversed(list(zip(shape, box.dims, strict=True))):
        if len(dim) > 1 and (dim.step != 1 or count != step):
            return None
        begin, step, count = begin + dim.start * step, step * size, count * len(dim)
    return range(begin, begin + count)


def _in_turn(messages: Sequence[_Blocks], rank: int) -> tuple[_Blocks, ...]:
    """Messages so ordered that no peer waits for what others get first; those of a pair keep their order.

    Each comes when as many bytes have gone before it to its own peer as to others; and each rank begins with
    another peer.
    """
    before: defaultdict[int, int] = defaultdict(int)
    rows = []
    for message in messages:
        rows.append((before[message.peer], (message.peer - rank) % (1 << 32)))
        before[message.peer] += message.num_bytes
    return tuple(messages[i] for i in sorted(range(len(rows)), key=rows.__getitem__))


class _Round:
    """What follows for one rank from the copies of a round: its messages, and where their blocks are."""

    def __init__(self, sent: Views, received: Views, rows: Sequence[_Blocks]) -> None:
        self._views, self._rows = {True: sent, False: received}, tuple(rows)
        self._places: dict[bool, list[Place]] = {}
        self._flat: list[Place | None] = []

    @classmethod
    def of(cls, plan: Plan, copies: Sequence[Copy], rank: int) -> _Round:
        """The messages of a round."""
        sides: dict[bool, list[Copy]] = {True: [], False: []}
        messages: list[_Blocks] = []
        shared: dict[tuple[object, ...], tuple[_Blocks, int]] = {}
        stretch = _Stretches(plan)
        for copy in copies:
            sends, dtype = copy.src_rank == rank, wire_dtype(plan, copy)
            size = copy.dst_box.numel * dtype.itemsize
            pair: tuple[object, ...] = copy.src_rank, copy.dst_rank, dtype
            place, most = None, PACK_BYTES
            if size >= SMALL_BYTES:
                place, most = stretch(copy), STRETCH_BYTES
                pair = *pair, copy.dst_name
            shares = size < SMALL_BYTES or place is not None
            message, end = shared.get(pair, (None, 0)) if shares else (None, 0)
            if message is None or message.num_bytes + size > most or (place and place.start != end):
                message = _Blocks(copy.dst_rank if sends else copy.src_rank, sends, dtype)
                messages.append(message)
            if shares:
                shared[pair] = message, place.stop if place else 0
            message.numbers.append(len(sides[sends]))
            message.num_bytes += size
            sides[sends].append(copy)
        return cls(Views(sides[True], "src"), Views(sides[False], "dst"), _in_turn(messages, rank))

    def messages(self, src: Arrays, dst: Arrays, device: torch.device) -> list[_Message]:
        """The messages of the round between these arrays, over a group that sends from a device."""
        import torch

        views = self._views
        arrays = {True: views[True].arrays(lambda _: src), False: views[False].arrays(lambda _: dst)}
        places = {side: views[side].places(arrays[side]) for side in views}
        if any(places[side] is not self._places.get(side) for side in views):
            self._places = places
            self._flat = [_flat(row, places[row.sends], arrays[row.sends], device) for row in self._rows]
        found = []
        for row, flat in zip(self._rows, self._flat, strict=True):
            own = arrays[row.sends]
            if flat is not None:
                wire, blocks = flat.of(own).view(torch.uint8), []
            else:
                wire, blocks = None, [places[row.sends][i].of(own) for i in row.numbers]
            found.append(_Message(row.peer, row.sends, row.dtype, row.num_bytes, wire, blocks))
        return found


def _flat(
    row: _Blocks, places: Sequence[Place], arrays: Sequence[torch.Tensor], device: torch.device
) -> Place | None:
    """The stretch of an array that a message is, if its blocks, as they lie, are what travels."""
    own = [places[i] for i in row.numbers]
    array, begin = own[0].array, own[0].begin
    end = begin
    for place in own:
        if place.array != array or place.begin != end or not _is_contiguous(place):
            return None
        end += math.prod(place.shape)
    if arrays[array].dtype != row.dtype or arrays[array].device != device:
        return None
    return Place(array, (end - begin,), (1,), begin)


def _is_contiguous(place: Place) -> bool:
    step = 1
    for size, stride in zip(reversed(place.shape), reversed(place.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


@dataclass(slots=True)
class _Message:
    """What is sent or received together.

    Attributes:
        wire: The bytes that travel; those of a message with ``blocks`` once it has room.
        blocks: What is packed or unpacked; nothing where ``wire`` is a stretch of an array.
        pieces: The blocks in ``wire``.
    """

    peer: int
    sends: bool
    dtype: torch.dtype
    num_bytes: int
    wire: torch.Tensor | None
    blocks: Sequence[torch.Tensor]
    pieces: Sequence[torch.Tensor] = ()

    def stage(self, room: torch.Tensor) -> None:
        """Lay all blocks one behind the other in room for them."""
        self.wire = as_bytes(room)
        flat = room.view(self.dtype).split([block.numel() for block in self.blocks])
        self.pieces = [piece.view(block.shape) for piece, block in zip(flat, self.blocks, strict=True)]

    def pack(self) -> None:
        if self.sends:
            for piece, block in zip(self.pieces, self.blocks, strict=False):
                piece.copy_(block)

    def unpack(self) -> None:
        if not self.sends:
            for piece, block in zip(self.pieces, self.blocks, strict=False):
                block.copy_(piece)


def named_error(error: Exception, where: str, timeout_s: float | None = None) -> TransportError:
    """What a backend of torch raised, as an error of this package; names the timeout where it is known."""
    # The first line says it, behind where in torch's sources it was raised.
    line = re.sub(r"^\[[^]]*\] ", "", str(error).strip().partition("\n")[0])
    text = f"{type(error).__name__}: {line:.200}"
    if "imed out" in text or "timeout" in text.lower():
        return TransportTimeoutError(
            "every rank does its part of a round in time",
            where=where,
            equation=text if timeout_s is None else f"timeout_s({timeout_s:g}): {text}",
            hint="look at the log of that rank: it stalls or is gone; raise timeout_s if it is only slow",
        )
    return TransportError(
        "the peers of a round are there",
        where=where,
        equation=text,
        hint="look at the log of that rank: its process is gone, or the network between the two",
    )


def _short(ranks: Sequence[int]) -> str:
    names = [str(rank) for rank in dict.fromkeys(ranks)]
    return ", ".join(names[:8]) + (f", ... {len(names)} in all" if len(names) > 8 else "")
