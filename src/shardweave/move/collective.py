"""Point-to-point messages of ``torch.distributed``, over a process group that is passed in.

Each block is one message, in the destination's dim order and the source's dtype. A side whose block
is contiguous in that form takes part in place; the other packs or unpacks it once, in a buffer that
is kept, while other blocks travel. The two decide independently, as nothing on the wire depends on it.

All messages of a round are posted before any is waited for, and every rank posts those of a pair in
the same order, so no order of ranks can make a round wait for itself. Neither the default group nor
any other registered one is read or made.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardweave.errors import TransportError, TransportTimeoutError
from shardweave.move.transport import (
    Arrays,
    Moved,
    Staging,
    aligned,
    as_bytes,
    milliseconds,
    source_block,
    target_block,
    wire_dtype,
)
from shardweave.plan import Copy, Plan

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store


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
        self._staging = Staging(device)
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
        blocks = [self._block(plan, copy, src, dst) for copy in copies]
        self._staging.begin(sum(aligned(size) for _, size, in_place in blocks if not in_place))
        messages = []
        sent = received = 0
        for copy, (block, size, in_place) in zip(copies, blocks, strict=True):
            wire = block if in_place else self._staging.take(block.shape, wire_dtype(plan, copy))
            sends = copy.src_rank == self.rank
            peer = copy.dst_rank if sends else copy.src_rank
            messages.append(_Message(peer, sends, block, wire, in_place))
            sent, received = sent + size * sends, received + size * (not sends)
        # A block is packed just before it is sent and unpacked as soon as it is there, while others travel.
        peers: Sequence[int] = [message.peer for message in messages]
        try:
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
        self._staging.buffer = None
        self._backend, self._broken = None, "close()"

    def _block(self, plan: Plan, copy: Copy, src: Arrays, dst: Arrays) -> tuple[torch.Tensor, int, bool]:
        """This rank's side of a copy, the bytes on the wire, and whether it is a message as it is."""
        dtype = wire_dtype(plan, copy)
        block = source_block(copy, src) if copy.src_rank == self.rank else target_block(copy, dst)
        in_place = block.is_contiguous() and block.dtype == dtype and block.device == self.device
        return block, block.numel() * dtype.itemsize, in_place

    def _exchange(self, messages: Sequence[_Message]) -> None:
        """Post all messages, then wait for each; ``_waits_for`` names the peers of the one at hand."""
        backend, deadline = self._backend, time.monotonic() + self.timeout_s
        # Backends that launch on a device post a round as one operation, or their sends would block.
        together = bool(messages) and bool(getattr(backend, "supports_coalescing", False))
        works = []
        if together:
            for message in messages:
                message.pack()
            backend._start_coalescing()
        for message in messages:
            self._waits_for = [message.peer]
            if message.sends and not together:
                message.pack()
            post = backend.send if message.sends else backend.recv
            works.append(post([as_bytes(message.wire)], self._at[message.peer], 0))
        if together:
            self._waits_for = [message.peer for message in messages]
            backend._end_coalescing().wait(milliseconds(deadline - time.monotonic()))
        for message, work in zip(messages, works, strict=True):
            if not together:
                self._waits_for = [message.peer]
                work.wait(milliseconds(deadline - time.monotonic()))
            message.unpack()
        self._waits_for = []


@dataclass(frozen=True, slots=True)
class _Message:
    """A block that is sent or received: as it lies, or by way of ``wire``."""

    peer: int
    sends: bool
    block: torch.Tensor
    wire: torch.Tensor
    in_place: bool

    def pack(self) -> None:
        if self.sends and not self.in_place:
            self.wire.copy_(self.block)

    def unpack(self) -> None:
        if not self.sends and not self.in_place:
            self.block.copy_(self.wire)


def named_error(error: Exception, where: str, timeout_s: float | None = None) -> TransportError:
    """What a backend of torch raised, as an error of this package that names the timeout where it is known."""
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
