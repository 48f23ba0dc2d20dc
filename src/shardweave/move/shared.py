"""Ranks on one Linux host: arrays in shared memory that readers map and copy their blocks from.

A segment is a file in memory without a name (``memfd_create``). Readers open it through the
publisher's process, ``/proc/PID/fd/FD``, and the kernel frees it when the last process that maps it is
gone, however that process ended: there is nothing to unlink, so nothing can be left behind. Readers
need the publisher's user and its PID namespace.

Readers map a segment privately: what they would write reaches neither the publisher nor each other.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardweave.errors import TransportError
from shardweave.move.transport import Arrays, Moved, Reads, endpoint_of, pull, tensors
from shardweave.move.views import Rounds
from shardweave.plan import Copy, Plan

if TYPE_CHECKING:
    import torch

_ALIGN = 64
_TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one array lies in a segment."""

    at: int
    dtype: str
    shape: tuple[int, ...]


class SharedTransport:
    """One-sided, between processes of one host.

    A publisher's arrays are copied once into its segment, or live there from the start if they were
    made by ``allocate``. A receiver copies its blocks from the mapped segment to their places, without
    staging. Arrays on a device are copied from and to it in the same way.
    """

    def __init__(self, *, rank: int) -> None:
        self.rank = rank
        self._segment: _Segment | None = None
        self._mapped: dict[int, tuple[bytes, Arrays]] = {}
        self._known: Rounds[Reads] = Rounds()

    def allocate(self, like: Mapping[str, tuple[Sequence[int], str]]) -> dict[str, torch.Tensor]:
        """Arrays that live in this rank's segment, for a publisher that wants no second copy of them.

        Args:
            like: Shape and dtype of each array by name.
        """
        places, size = {}, _TOKEN_BYTES
        for name, (shape, dtype) in like.items():
            at = -(-size // _ALIGN) * _ALIGN
            places[name] = _Place(at, dtype, tuple(shape))
            size = at + _num_bytes(places[name])
        self.close()
        self._segment = _Segment(places, size)
        return dict(self._segment.arrays)

    def offer(self, arrays: Mapping[str, Any]) -> bytes:
        """See ``Transport.offer``. Arrays of the shapes and dtypes offered before reuse the segment."""
        given = tensors(arrays)
        like = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in given.items()}
        if self._segment is None or self._segment.like != like:
            self.allocate(like)
        assert self._segment is not None
        for name, place in self._segment.arrays.items():
            if place.data_ptr() != given[name].data_ptr():
                place.copy_(given[name])
        return self._segment.endpoint

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

        def offered(rank: int) -> Arrays:
            endpoint = endpoint_of(endpoints, rank)
            if rank not in self._mapped or self._mapped[rank][0] != endpoint:
                self._mapped[rank] = endpoint, _map(endpoint, rank)
            return self._mapped[rank][1]

        return pull(copies, rank=self.rank, dst=dst, offered=offered, known=self._known)

    def close(self) -> None:
        """See ``Transport.close``. Readers that have mapped the segment keep what they see."""
        if self._segment is not None:
            self._segment.close()
        self._segment = None
        self._mapped.clear()
        self._known.clear()


class _Segment:
    """The memory of one publisher. The token at its begin tells it from another file of that number."""

    def __init__(self, places: dict[str, _Place], size: int) -> None:
        self.like = {name: (place.shape, place.dtype) for name, place in places.items()}
        self._file = os.memfd_create("shardweave", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._file, size)
            memory = mmap.mmap(self._file, size)
        except BaseException:
            os.close(self._file)
            raise
        token = secrets.token_bytes(_TOKEN_BYTES)
        memory[:_TOKEN_BYTES] = token
        self.arrays = _views(memory, places)
        self.endpoint = json.dumps(
            {
                "file": f"/proc/{os.getpid()}/fd/{self._file}",
                "token": token.hex(),
                "size": size,
                "arrays": {name: [p.at, p.dtype, p.shape] for name, p in places.items()},
            }
        ).encode()

    def close(self) -> None:
        os.close(self._file)
        self.arrays = {}


def _map(endpoint: bytes, rank: int) -> Arrays:
    """The arrays of a publisher, mapped into this process."""
    said = json.loads(endpoint)
    try:
        file = os.open(said["file"], os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(file, said["size"], access=mmap.ACCESS_COPY)
        finally:
            os.close(file)
        found = memory[:_TOKEN_BYTES].hex()
    except (OSError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
    if found != said["token"]:
        raise TransportError(
            "a publisher's segment is there while it is read",
            where=f"rank {rank}, {said['file']}",
            equation=f"token({said['token']}) != {found}",
            hint="the publisher is gone, closed its transport, or runs on another host or in another "
            "container; publish again, or use another transport",
        )
    return _views(
        memory, {name: _Place(at, dtype, tuple(shape)) for name, (at, dtype, shape) in said["arrays"].items()}
    )


def _views(memory: mmap.mmap, places: Mapping[str, _Place]) -> dict[str, torch.Tensor]:
    import torch

    views = {}
    for name, place in places.items():
        dtype, numel = getattr(torch, place.dtype), torch.Size(place.shape).numel()
        # A buffer of no bytes is refused by torch.
        flat = torch.frombuffer(memory, dtype=dtype, count=numel, offset=place.at) if numel else None
        views[name] = (torch.empty(0, dtype=dtype) if flat is None else flat).view(place.shape)
    return views


def _num_bytes(place: _Place) -> int:
    import torch

    dtype: torch.dtype = getattr(torch, place.dtype)
    return torch.Size(place.shape).numel() * dtype.itemsize
