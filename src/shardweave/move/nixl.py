"""NIXL: readers fetch what they need from host or device memory, without the source taking part.

Every copy is a READ of contiguous runs, each a remote address, a local address and a length. Where the
runs of the source lie in runs of the destination, they are read to their places; otherwise (another
order of dims, another dtype, or a destination in smaller pieces) they are read to a buffer, each
byte once, and unpacked once. The lists of a round are made at its first run and used again as long as
the schedule, the endpoint and the destination's memory stay the same.
"""

from __future__ import annotations

import base64
import importlib
import json
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardweave.errors import MissingPackageError, TransportError, TransportTimeoutError
from shardweave.layout.table import Ints
from shardweave.move.transport import (
    Arrays,
    Moved,
    Staging,
    aligned,
    endpoint_of,
    tensors,
    wire_dtype,
)
from shardweave.move.views import slices, source_block, target_block
from shardweave.plan import Copy, Plan

if TYPE_CHECKING:
    import torch

_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")


@dataclass(frozen=True, slots=True)
class _Peer:
    """A rank that is read from: its agent, and its arrays as tensors without memory."""

    agent: str
    arrays: Arrays
    address: Mapping[str, int]
    device: Mapping[str, int]
    kind: str


@dataclass(frozen=True, slots=True)
class _Round:
    """The READs of a round, ready to be posted; ``copies`` keeps the key of the cache alive."""

    copies: Sequence[Copy]
    key: tuple[object, ...]
    handles: tuple[tuple[int, Any], ...]
    unpack: tuple[tuple[Copy, torch.Tensor], ...]
    num_bytes: int


class NixlTransport:
    """One-sided, over NIXL's agents: UCX between hosts, over any fabric that it knows, and within one.

    Memory that was offered or written to stays registered, and is to be kept, until ``close``.
    """

    def __init__(
        self, *, rank: int, device: str = "cpu", backend: str = "UCX", timeout_s: float = 60.0
    ) -> None:
        """One rank's end.

        Args:
            rank: This rank.
            device: Where its arrays are; all of them.
            backend: NIXL's name of what moves the bytes.
            timeout_s: The longest that a round may take.

        Raises:
            MissingPackageError: NIXL is not installed.
        """
        api = _import_nixl()
        self.rank, self.device, self.timeout_s = rank, device, timeout_s
        self._agent = api.nixl_agent(
            f"shardweave-{rank}-{uuid.uuid4().hex}", api.nixl_agent_config(backends=[backend])
        )
        self._kind = "DRAM" if device == "cpu" else "VRAM"
        self._offered: tuple[tuple[object, ...], bytes, Any] | None = None
        self._written: dict[tuple[int, int, int], Any] = {}
        self._peers: dict[int, tuple[bytes, _Peer]] = {}
        self._staging = Staging(device)
        self._rounds: dict[int, _Round] = {}

    def offer(self, arrays: Mapping[str, Any]) -> bytes:
        """See ``Transport.offer``. The same memory offered again has the same endpoint."""
        given = tensors(arrays)
        key = tuple((name, t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in given.items())
        if self._offered is not None and self._offered[0] == key:
            return self._offered[1]
        self._withdraw()
        memory = sorted({_memory(tensor) for tensor in given.values() if tensor.numel()})
        registered = self._register(memory) if memory else None
        said = {
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "kind": self._kind,
            "arrays": {
                name: [t.data_ptr(), _device(t), str(t.dtype).removeprefix("torch."), t.shape, t.stride()]
                for name, t in given.items()
            },
        }
        self._offered = key, json.dumps(said).encode(), registered
        return self._offered[1]

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
        reads = [copy for copy in copies if copy.dst_rank == self.rank]
        if not reads:
            return Moved()
        peers = {rank: self._peer(rank, endpoints) for rank in sorted({copy.src_rank for copy in reads})}
        written = {copy.dst_name: dst[copy.dst_name].data_ptr() for copy in reads}
        key = (*written.items(), *((rank, endpoints[rank]) for rank in peers))
        one = self._rounds.get(id(copies))
        if one is None or one.key != key:
            one = self._prepare(plan, copies, reads, dst, peers, key)
            self._rounds[id(copies)] = one
        self._read(one)
        for copy, staged in one.unpack:
            target_block(copy, dst).copy_(copy.to_destination(staged))
        return Moved(received=one.num_bytes)

    def close(self) -> None:
        """See ``Transport.close``."""
        self._forget()
        for registered in self._written.values():
            self._agent.deregister_memory(registered)
        self._withdraw()
        for _, peer in self._peers.values():
            self._agent.remove_remote_agent(peer.agent)
        self._written, self._peers = {}, {}

    def _withdraw(self) -> None:
        if self._offered is not None and self._offered[2] is not None:
            self._agent.deregister_memory(self._offered[2])
        self._offered = None

    def _register(self, memory: Sequence[tuple[int, int, int]]) -> Any:
        return self._agent.register_memory([(*place, "") for place in memory], self._kind)

    def _forget(self) -> None:
        """Drop the lists that were made: they hold addresses of memory that is about to go."""
        for one in self._rounds.values():
            for _, handle in one.handles:
                self._agent.release_xfer_handle(handle)
        self._rounds.clear()

    def _peer(self, rank: int, endpoints: Mapping[int, bytes]) -> _Peer:
        import torch

        endpoint = endpoint_of(endpoints, rank)
        if rank in self._peers:
            known, peer = self._peers[rank]
            if known == endpoint:
                return peer
            self._forget()
            self._agent.remove_remote_agent(peer.agent)
            del self._peers[rank]
        said = json.loads(endpoint)
        try:
            agent = self._agent.add_remote_agent(base64.b64decode(said["metadata"]))
        except Exception as error:
            raise _gone(rank, error) from error
        rows = said["arrays"].items()
        peer = _Peer(
            agent.decode() if isinstance(agent, bytes) else agent,
            {
                name: torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")
                for name, (_, _, dtype, shape, stride) in rows
            },
            {name: row[0] for name, row in rows},
            {name: row[1] for name, row in rows},
            said["kind"],
        )
        self._peers[rank] = endpoint, peer
        return peer

    def _prepare(
        self,
        plan: Plan,
        copies: Sequence[Copy],
        reads: Sequence[Copy],
        dst: Arrays,
        peers: Mapping[int, _Peer],
        key: tuple[object, ...],
    ) -> _Round:
        """The lists of a round: for each source, where to read and where to write."""
        room = sum(
            aligned(copy.dst_box.numel * wire_dtype(plan, copy).itemsize)
            for copy in reads
            if _direct_run(copy, peers[copy.src_rank].arrays, dst) is None
        )
        if not self._staging.holds(room):
            self._forget()
            if self._staging.buffer is not None:
                self._agent.deregister_memory(self._written.pop(_memory(self._staging.buffer)))
        self._staging.begin(room)
        for tensor in [dst[name] for name in {copy.dst_name for copy in reads}] + (
            [] if self._staging.buffer is None else [self._staging.buffer]
        ):
            if (place := _memory(tensor)) not in self._written:
                self._written[place] = self._register([place])
        lists: defaultdict[int, list[tuple[Ints, Ints]]] = defaultdict(list)
        unpack, num_bytes = [], 0
        for copy in reads:
            peer = peers[copy.src_rank]
            far = source_block(copy, peer.arrays)
            near = target_block(copy, dst)
            run = _direct_run(copy, peer.arrays, dst)
            if run is None:
                far = peer.arrays[copy.src_name][slices(copy.src_box)]
                near = self._staging.take(far.shape, far.dtype)
                run = _run(far)
                unpack.append((copy, near))
            # A tensor without memory begins at 0, so its address is how far into the array it begins.
            begin = peer.address[copy.src_name] + int(far.storage_offset()) * far.element_size()
            lists[copy.src_rank].append(
                (
                    _rows(far, begin, run, peer.device[copy.src_name]),
                    _rows(near, near.data_ptr(), run, _device(near)),
                )
            )
            num_bytes += far.nbytes
        handles = []
        for rank, pairs in lists.items():
            try:
                remote, local = (np.concatenate(rows) for rows in zip(*pairs, strict=True))
                handle = self._agent.initialize_xfer(
                    "READ",
                    self._agent.get_xfer_descs(local, self._kind),
                    self._agent.get_xfer_descs(remote, peers[rank].kind),
                    peers[rank].agent,
                )
            except Exception as error:
                raise _gone(rank, error) from error
            handles.append((rank, handle))
        return _Round(copies, key, tuple(handles), tuple(unpack), num_bytes)

    def _read(self, one: _Round) -> None:
        """Post all READs and wait for the last."""
        deadline = time.monotonic() + self.timeout_s
        waiting = []
        try:
            for rank, handle in one.handles:
                waiting.append((rank, handle, _asked(self._agent.transfer, handle, rank)))
            pause = 0.0
            while waiting := [row for row in waiting if row[2] != "DONE"]:
                if time.monotonic() > deadline:
                    late = [rank for rank, _, _ in waiting]
                    raise TransportTimeoutError(
                        "what is read from a rank arrives in time",
                        where=f"rank {self.rank} reads from rank {', '.join(map(str, late[:8]))}",
                        equation=f"timeout_s({self.timeout_s:g}) is over",
                        hint="look at the log of that rank: it stalls or is gone; raise timeout_s if it is "
                        "only slow",
                    )
                time.sleep(pause)
                pause = min(pause + 1e-5, 1e-3)
                waiting = [(r, h, _asked(self._agent.check_xfer_state, h, r)) for r, h, _ in waiting]
        except TransportError:
            # What was posted may still write: its lists are not used again.
            self._rounds = {k: other for k, other in self._rounds.items() if other is not one}
            raise


def _asked(ask: Any, handle: Any, rank: int) -> str:
    try:
        state = str(ask(handle))
    except Exception as error:
        raise _gone(rank, error) from error
    if state == "ERR":
        raise _gone(rank, "ERR")
    return state


def _gone(rank: int, error: object) -> TransportError:
    text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
    return TransportError(
        "the rank that is read from is there and its memory is registered",
        where=f"rank {rank}",
        equation=f"NIXL answers {text:.200}",
        hint="look at the log of that rank: its process is gone, or it offered other memory since",
    )


def _direct_run(copy: Copy, far: Arrays, dst: Arrays) -> int | None:
    """How many elements to read at once straight to their places, or ``None`` where it is not worth it."""
    block, place = source_block(copy, far), target_block(copy, dst)
    run = _run(block, place)
    stored = _run(far[copy.src_name][slices(copy.src_box)])
    return run if block.dtype == place.dtype and run >= stored else None


def _run(*blocks: torch.Tensor) -> int:
    """The length of the stretches that all blocks, of one shape, consist of in row-major order.

    >>> import torch
    >>> whole = torch.zeros(4, 3, 5)
    >>> _run(whole), _run(whole[:, :2]), _run(whole, whole[:, :, ::1].permute(2, 0, 1).reshape(4, 3, 5))
    (60, 10, 60)
    """
    length = 1
    for size, *steps in reversed(list(zip(blocks[0].shape, *(b.stride() for b in blocks), strict=True))):
        if size > 1 and any(step != length for step in steps):
            break
        length *= int(size)
    return length


def _rows(block: torch.Tensor, begin: int, run: int, device: int) -> Ints:
    """One row (address, bytes, device) for each stretch of ``run`` elements of a block."""
    at, inner = np.zeros(1, np.int64), 1
    for size, step in reversed(list(zip(block.shape, block.stride(), strict=True))):
        if inner >= run:
            at = (np.arange(size, dtype=np.int64)[:, None] * step + at).reshape(-1)
        inner *= size
    item = block.element_size()
    rows = np.empty((len(at), 3), np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2] = begin + at * item, run * item, device
    return rows


def _memory(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The whole memory that a tensor is a view of: address, bytes, device."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes(), _device(tensor)


def _device(tensor: torch.Tensor) -> int:
    return tensor.device.index or 0


def _import_nixl() -> Any:
    failures = []
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            failures.append(str(error))
    raise MissingPackageError(
        "NIXL is installed where it is to move bytes",
        equation="; ".join(failures)[:300],
        hint="pip install 'shardweave[nixl]', or use another transport",
    )
