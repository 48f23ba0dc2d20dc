"""A plan carried out live between ranks: one executor, several transports, one protocol.

Which transport fits: ``MemoryTransport`` within a process, ``SharedTransport`` within a host,
``CollectiveTransport`` wherever torch has a backend, ``NixlTransport`` where readers fetch on their own
from host or device memory, without the source taking part. Groups and stores are always passed in.
"""

from __future__ import annotations

from shardweave.move.collective import CollectiveTransport, named_error, process_group
from shardweave.move.executor import MEMORY_BYTES, Report, Schedule, execute, replay, schedule
from shardweave.move.memory import MemoryTransport
from shardweave.move.nixl import NixlTransport
from shardweave.move.shared import SharedTransport
from shardweave.move.transport import Moved, Rendezvous, Transport

__all__ = [
    "MEMORY_BYTES",
    "CollectiveTransport",
    "MemoryTransport",
    "Moved",
    "NixlTransport",
    "Rendezvous",
    "Report",
    "Schedule",
    "SharedTransport",
    "Transport",
    "execute",
    "named_error",
    "process_group",
    "replay",
    "schedule",
]
