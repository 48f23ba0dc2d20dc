"""Live refit: a trainer's weights into a running engine, proved, verified, and served whole or not at all.

>>> from torch.distributed import HashStore
>>> import threading, torch
>>> from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, along, even
>>> w = Tensor("w", (6, 4), "float32")
>>> two = Mesh((("tp", 2),))
>>> rows = along(two, "tp", lambda r: even(w.dims[0], 2, r))
>>> trainer = Layout("trainer", two, (BufferRule("w", (Part(w),), (rows, w.dims[1])),))
>>> engine = Layout("engine", Mesh((), offset=2), (BufferRule("w", (Part(w),), w.dims),))

Three ranks, here as threads: two that train, and one that serves.

>>> store, served = HashStore(), torch.zeros(6, 4)
>>> def seat(rank):
...     return Session(store=store, publishers=(0, 1), receivers=(2,), rank=rank, transport="shared")
>>> def train(rank):
...     Publisher(seat(rank), Source(trainer, {"w": torch.full((3, 4), float(rank))}, rank)).publish(7)
>>> threads = [threading.Thread(target=train, args=(rank,)) for rank in (0, 1)]
>>> for thread in threads: thread.start()
>>> receiver = Receiver(seat(2), Buffers(layout=engine, rank=2, arrays={"w": served}))
>>> receiver.receive().version, receiver.version, served[:, 0].tolist()
(7, 7, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
>>> for thread in threads: thread.join()

Beneath: ``manifest`` and ``joining`` (what publishers own, and together), ``world`` (what the ranks of a
turn conclude), ``meeting`` (how a turn ends one way for all), ``verify`` (what arrived is what was sealed),
``values`` (stored values that are not the logical ones), ``sources`` (what a trainer has), ``engines``.
"""

from __future__ import annotations

from shardweave.refit.joining import merge
from shardweave.refit.manifest import Manifest, decode, encode, fingerprints_of, part_of
from shardweave.refit.publisher import Publisher
from shardweave.refit.receiver import Receiver
from shardweave.refit.session import Refit, Session
from shardweave.refit.sources import Source, from_fsdp2, from_module
from shardweave.refit.target import Buffers, Target

__all__ = [
    "Buffers",
    "Manifest",
    "Publisher",
    "Receiver",
    "Refit",
    "Session",
    "Source",
    "Target",
    "decode",
    "encode",
    "fingerprints_of",
    "from_fsdp2",
    "from_module",
    "merge",
    "part_of",
]
