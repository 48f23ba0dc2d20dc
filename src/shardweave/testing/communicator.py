"""What groups of a world in memory have for a process group: messages, and collectives made of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardweave.errors import TransportError
from shardweave.train.grid import Ranks

if TYPE_CHECKING:
    from shardweave.testing.world import World

Tag = int | str
"""Numbers are the callers'; each collective has its name."""


class Communicator:
    """One rank's end of a group, with the methods of a process group of torch that this package calls.

    Attributes:
        sent_bytes: What this rank has sent in this group so far.
    """

    def __init__(self, world: World, number: int, ranks: Ranks, rank: int) -> None:
        self._world, self._number, self._ranks, self._rank = world, number, ranks, rank
        self._at = ranks.index(rank)
        self.sent_bytes = 0

    def name(self) -> str:
        """Of the backend."""
        return "memory"

    def rank(self) -> int:
        """The position of this rank in the group."""
        return self._at

    def size(self) -> int:
        """The number of ranks."""
        return len(self._ranks)

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> Work:
        """Begin to send one tensor to a position of the group."""
        return self._send(tensors, dst, tag)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> Work:
        """Begin to receive one tensor from a position of the group."""
        return self._recv(tensors, src, tag)

    def alltoall(self, into: Sequence[Tensor], parts: Sequence[Tensor]) -> Works:
        """Begin to send a part to each rank, and to receive one from each."""
        into[self._at].copy_(parts[self._at])
        return self._all(parts, into, "alltoall")

    def allreduce(self, tensors: Sequence[Tensor]) -> Works:
        """Begin to replace a tensor by the sum over ranks, in their order."""
        (tensor,) = tensors
        came = [tensor if at == self._at else torch.empty_like(tensor) for at in range(self.size())]
        return self._all([tensor] * self.size(), came, "allreduce", lambda: _add_up(came, tensor))

    def barrier(self) -> Works:
        """Begin to wait for all ranks."""
        nothing = [torch.empty(0) for _ in self._ranks]
        return self._all(nothing, nothing, "barrier")

    def _allgather_base(self, into: Tensor, part: Tensor) -> Works:
        parts = into.view(self.size(), -1).unbind()
        parts[self._at].copy_(part.view(-1))
        return self._all([part.view(-1)] * self.size(), parts, "allgather")

    def _reduce_scatter_base(self, into: Tensor, parts: Tensor) -> Works:
        own = parts.view(self.size(), -1).unbind()
        came = [own[at] if at == self._at else torch.empty_like(own[self._at]) for at in range(self.size())]
        return self._all(own, came, "reduce_scatter", lambda: _add_up(came, into.view(-1)))

    def abort(self) -> None:
        """Let go of it: messages under way are lost, and whoever waits for one is freed, with an error."""
        self._world.leave(self._number, self._rank)

    def _all(
        self,
        parts: Sequence[Tensor],
        into: Sequence[Tensor],
        tag: str,
        then: Callable[[], None] | None = None,
    ) -> Works:
        others = [(self._at + step) % self.size() for step in range(1, self.size())]
        works = [self._send([parts[at]], at, tag) for at in others]
        works += [self._recv([into[at]], at, tag) for at in reversed(others)]
        return Works(works, then)

    def _send(self, tensors: Sequence[Tensor], dst: int, tag: Tag) -> Work:
        self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        return self._post(tensors, dst, tag, is_send=True)

    def _recv(self, tensors: Sequence[Tensor], src: int, tag: Tag) -> Work:
        return self._post(tensors, src, tag, is_send=False)

    def _post(self, tensors: Sequence[Tensor], peer: int, tag: Tag, *, is_send: bool) -> Work:
        (tensor,) = tensors
        if peer == self._at or not 0 <= peer < self.size():
            raise TransportError(
                "a message goes to another rank of its group",
                where=f"rank {self._rank}",
                equation=f"position({peer}) in a group of size({self.size()}), own position({self._at})",
                hint="positions in a group are counted from 0, whatever its ranks are",
            )
        if not tensor.is_contiguous():
            raise TransportError(
                "a message is contiguous",
                where=f"rank {self._rank}",
                equation=f"{what(tensor)} has strides {tensor.stride()}",
                hint="send a contiguous copy, and receive into memory that is contiguous",
            )
        work = Work(self._world, self._rank, self._ranks[peer], tag, tensor.detach(), is_send)
        self._world.post(self._number, work)
        return work


def _add_up(parts: Sequence[Tensor], into: Tensor) -> None:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    into.copy_(total)


# --- messages -----------------------------------------------------------------------------------


class Work:
    """One end of a message.

    Attributes:
        rank: Whose it is.
        peer: The rank at the other end.
        tag: Of the message.
        tensor: What is sent or received into.
        is_send: Which end it is.
        kept: What the tensor held when it was posted, where that is checked.
        came: What has come and is not in the tensor yet, where that is checked.
        error: What went wrong.
        done: Whether the message is through, or never will be.
        event: Set when it is done, where somebody waits; ``thread`` is who.
    """

    __slots__ = (
        "_world",
        "came",
        "done",
        "error",
        "event",
        "is_send",
        "kept",
        "peer",
        "rank",
        "tag",
        "tensor",
        "thread",
    )

    def __init__(self, world: World, rank: int, peer: int, tag: Tag, tensor: Tensor, is_send: bool) -> None:
        self._world, self.rank, self.peer, self.tag = world, rank, peer, tag
        self.tensor, self.is_send = tensor, is_send
        self.kept: Tensor | None = None
        self.came: Tensor | None = None
        self.error: TransportError | None = None
        self.event: threading.Event | None = None
        self.done, self.thread = False, 0

    @property
    def way(self) -> str:
        """From whom to whom."""
        src, dst = self.ends
        return f"rank {src} to rank {dst}, tag {self.tag}"

    @property
    def ends(self) -> tuple[int, int]:
        """The rank that sends, and the one that receives."""
        return (self.rank, self.peer) if self.is_send else (self.peer, self.rank)

    def wait(self, timeout: object = None) -> None:
        """Until the message was received. The world has a time of its own, so ``timeout`` says nothing here.

        Raises:
            TransportError, TransportTimeoutError: As of ``run_world``.
        """
        if not self.done:
            self._world.wait(self)
        if self.error is not None:
            raise self.error
        if self.kept is None:
            return
        wrong, self.kept = self.check(), None
        if wrong is not None:
            raise wrong
        if self.came is not None:
            self.tensor.copy_(self.came)

    def keep(self) -> None:
        """Note what the tensor holds: what is sent, or what is no number until something has come."""
        if not self.is_send:
            _bytes(self.tensor).fill_(0xFF)
        self.kept = self.tensor.clone()

    def check(self) -> TransportError | None:
        """What is wrong where the tensor is not as it was posted."""
        if self.kept is None:
            return None
        count = int((_bytes(self.tensor) != _bytes(self.kept)).sum())
        if count == 0:
            return None
        act = "sends" if self.is_send else "receives into"
        return TransportError(
            "what is sent or received into is left alone until wait() returns",
            where=self.way,
            equation=f"{count} of {self.tensor.nbytes} bytes of what rank {self.rank} {act} have changed",
            hint="wait before the tensor is written to, or post a copy: a backend may still be at work on it",
        )


class Works:
    """Several messages, and what is to be done when all are through."""

    def __init__(self, works: Sequence[Work], then: Callable[[], None] | None) -> None:
        self._works, self._then = works, then

    def wait(self) -> None:
        """Until all are through. Errors as of each."""
        for work in self._works:
            work.wait()
        then, self._then = self._then, None
        if then is not None:
            then()


def hand_over(send: Work, receipt: Work) -> TransportError | None:
    """Take a message from one end to the other, or say what is wrong with it."""
    ours, theirs = send.tensor, receipt.tensor
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return TransportError(
            "a message is received as what it was sent",
            where=send.way,
            equation=f"sent {what(ours)} of {ours.nbytes} bytes != received as {what(theirs)} of "
            f"{theirs.nbytes} bytes",
            hint="each rank derives shapes and dtypes on its own: compare what they derive them from",
        )
    wrong = send.check()
    if wrong is None and send.kept is not None:
        receipt.came = send.kept
    elif wrong is None:
        theirs.copy_(ours)
    return wrong


def what(tensor: Tensor) -> str:
    """A tensor in an error."""
    return f"{tensor.dtype}{tuple(tensor.shape)}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
