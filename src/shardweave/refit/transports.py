"""Transports by name, each made anew for the ranks of a refit from a store, without any global group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from shardweave.errors import GeometryError
from shardweave.move import CollectiveTransport, NixlTransport, SharedTransport, Transport, process_group
from shardweave.move.asking import Asker

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Maker(Protocol):
    """Makes one rank's end of a transport; all ranks call it in the same turn."""

    def __call__(self, *, store: Store, ranks: Sequence[int], rank: int, timeout_s: float) -> Transport:
        """The transport.

        Args:
            store: With a prefix that is used by nobody else.
            ranks: All ranks of the refit, ascending.
            rank: This one.
            timeout_s: The longest that it may wait for others.
        """
        ...


def _gloo(*, store: Store, ranks: Sequence[int], rank: int, timeout_s: float) -> Transport:
    # It reads the store where no bound holds.
    group = Asker().ask(
        lambda: process_group(store=store, ranks=ranks, rank=rank, backend="gloo", timeout_s=timeout_s),
        within_s=2 * timeout_s,
    )
    return CollectiveTransport(group=group, ranks=ranks, timeout_s=timeout_s)


def _nccl(*, store: Store, ranks: Sequence[int], rank: int, timeout_s: float) -> Transport:
    import torch

    group = process_group(store=store, ranks=ranks, rank=rank, backend="nccl", timeout_s=timeout_s)
    device = f"cuda:{torch.cuda.current_device()}"
    return CollectiveTransport(group=group, ranks=ranks, device=device, timeout_s=timeout_s)


def _shared(*, store: Store, ranks: Sequence[int], rank: int, timeout_s: float) -> Transport:
    return SharedTransport(rank=rank)


def _nixl(*, store: Store, ranks: Sequence[int], rank: int, timeout_s: float) -> Transport:
    return NixlTransport(rank=rank, timeout_s=timeout_s)


def _nixl_cuda(*, store: Store, ranks: Sequence[int], rank: int, timeout_s: float) -> Transport:
    return NixlTransport(rank=rank, device="cuda", timeout_s=timeout_s)


MAKERS: dict[str, Any] = {
    "gloo": _gloo,
    "nccl": _nccl,
    "shared": _shared,
    "nixl": _nixl,
    "nixl-cuda": _nixl_cuda,
}


def maker(transport: str | Maker) -> Maker:
    """The maker of a name; a maker as it is.

    Raises:
        GeometryError: The name is of none.
    """
    if not isinstance(transport, str):
        return transport
    if transport not in MAKERS:
        raise GeometryError(
            "a transport is known by its name",
            equation=f"transport({transport!r}) is not one of {', '.join(MAKERS)}",
            hint="use one of these, or give a function that makes a transport",
        )
    found: Maker = MAKERS[transport]
    return found
