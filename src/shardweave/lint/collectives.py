"""Which argument of a collective is its group."""

from __future__ import annotations

from collections.abc import Mapping

from shardweave.lint.facts import Use

__all__ = ["COLLECTIVES", "QUERIES", "WORLDS", "misses_group"]

QUERIES: Mapping[str, int] = {"get_rank": 0, "get_world_size": 0, "get_backend": 0}
"""What asks a group about itself, and the position of its argument ``group``."""

COLLECTIVES: Mapping[str, int] = {
    "all_gather": 2,
    "all_gather_coalesced": 2,
    "all_gather_into_tensor": 2,
    "all_gather_object": 2,
    "all_reduce": 2,
    "all_reduce_coalesced": 2,
    "all_to_all": 2,
    "all_to_all_single": 4,
    "barrier": 0,
    "broadcast": 2,
    "broadcast_object_list": 2,
    "gather": 3,
    "gather_object": 3,
    "irecv": 2,
    "isend": 2,
    "monitored_barrier": 0,
    "P2POp": 3,
    "recv": 2,
    "recv_object_list": 2,
    "reduce": 3,
    "reduce_scatter": 3,
    "reduce_scatter_tensor": 3,
    "scatter": 3,
    "scatter_object_list": 3,
    "send": 2,
    "send_object_list": 2,
    "_all_gather_base": 2,
    "_reduce_scatter_base": 3,
}
"""Collectives of torch.distributed, and the position of their argument ``group``."""

WORLDS = frozenset({"group.WORLD", "GroupMember.WORLD", "_get_default_group", "_world.default_pg"})
"""The default group by name."""


def misses_group(use: Use, name: str) -> bool:
    """Whether a call surely gives no group, or None. Unpacked arguments may give one."""
    position = COLLECTIVES.get(name, QUERIES.get(name, 0))
    if "group" in use.keywords:
        return "group" in use.nones
    if use.positional < 0 or "**" in use.keywords:
        return False
    return use.positional <= position or str(position) in use.nones
