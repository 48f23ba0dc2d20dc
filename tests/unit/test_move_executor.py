"""What the executor refuses, tells and verifies; ranks are threads of this process."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from shardweave.errors import DigestError, DtypeError, PlanError, ShardweaveError, TransportError
from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, along, even, whole
from shardweave.move import MemoryTransport, Rendezvous, execute, schedule
from shardweave.plan import Plan, plan

W = Tensor("w", (12, 10), "float32")
TWO, THREE = Mesh((("tp", 2),)), Mesh((("tp", 2),), offset=1)


def rows_to_columns(*, rows: int = 12) -> Plan:
    """Ranks 0 and 1 hold rows, ranks 1 and 2 want columns."""
    tensor = Tensor("w", (rows, 10), "float32")
    cut_rows = along(TWO, "tp", lambda r: even(whole(rows), 2, r))
    columns = along(THREE, "tp", lambda r: even(whole(10), 2, r))
    return plan(
        Layout("rows", TWO, (BufferRule("w", (Part(tensor),), (cut_rows, whole(10))),)),
        Layout("columns", THREE, (BufferRule("w", (Part(tensor),), (whole(rows), columns)),)),
    )


WHOLE = torch.arange(120, dtype=torch.float32).view(12, 10) + 1
SRC = {0: {"w": WHOLE[:6].clone()}, 1: {"w": WHOLE[6:].clone()}, 2: {}}
WANTED = {1: WHOLE[:, :5], 2: WHOLE[:, 5:]}


class Lying(MemoryTransport):
    """Reports success, and does to what arrived what it is told to."""

    def __init__(
        self, table: Any, *, rank: int, lie: Callable[[torch.Tensor, torch.Tensor], None] | None
    ) -> None:
        super().__init__(table, rank=rank)
        self.lie = lie

    def run(self, plan: Any, copies: Any, *, dst: Mapping[str, torch.Tensor], **given: Any) -> Any:
        before = {name: tensor.clone() for name, tensor in dst.items()}
        moved = super().run(plan, copies, dst=dst, **given)
        if self.lie is not None:
            for name, tensor in dst.items():
                self.lie(tensor, before[name])
        return moved


def move(
    *,
    lie: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    moves: Mapping[int, Plan] | None = None,
    src: Mapping[int, Any] = SRC,
    dst: Mapping[int, Any] | None = None,
    **given: Any,
) -> tuple[dict[int, Any], dict[int, torch.Tensor]]:
    """What each rank returned or raised, and what the destinations hold."""
    store, table, found = HashStore(), {}, {}
    dst = dst or {0: {}, 1: {"w": torch.full((12, 5), torch.nan)}, 2: {"w": torch.full((12, 5), torch.nan)}}
    ends = {rank: Lying(table, rank=rank, lie=lie) for rank in range(3)}
    endpoints = {rank: ends[rank].offer(src[rank]) for rank in range(3)}
    same = rows_to_columns()

    def one(rank: int) -> None:
        meeting = Rendezvous(store=store, ranks=range(3), rank=rank, timeout_s=10)
        try:
            found[rank] = execute(
                (moves or {}).get(rank, same),
                rank=rank,
                transport=ends[rank],
                src=src[rank],
                dst=dst[rank],
                endpoints=endpoints,
                rendezvous=meeting,
                **given,
            )
        except ShardweaveError as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found, {rank: torch.as_tensor(dst[rank]["w"]) for rank in (1, 2)}


def nothing(tensor: torch.Tensor, before: torch.Tensor) -> None:
    tensor.copy_(before)


def elsewhere(tensor: torch.Tensor, before: torch.Tensor) -> None:
    tensor.copy_(tensor.roll(1, 0))


def one_bit(tensor: torch.Tensor, before: torch.Tensor) -> None:
    tensor.view(torch.int32)[3, 2] ^= 1


def test_an_honest_transport_passes_with_and_without_digests() -> None:
    for verify in (False, True):
        found, got = move(verify=verify)
        assert all(torch.equal(got[rank], WANTED[rank]) for rank in WANTED)
        # Rank 1 keeps its own 6 x 5 block and gets the other; nothing else moves.
        assert [found[rank].bytes_received for rank in range(3)] == [0, 6 * 5 * 4, 12 * 5 * 4]
        assert [found[rank].bytes_local for rank in range(3)] == [0, 6 * 5 * 4, 0]


@pytest.mark.parametrize("lie", [nothing, elsewhere, one_bit])
def test_a_lie_is_seen_in_the_targets_and_caught_by_digests_on_all_ranks(lie: Any) -> None:
    found, got = move(lie=lie)
    assert not any(isinstance(end, Exception) for end in found.values())
    assert not any(torch.equal(got[rank], WANTED[rank]) for rank in WANTED)
    found, _ = move(lie=lie, verify=True)
    # A rank that has a wrong block says so; whoever hears of it first raises that instead of waiting.
    caught = [end for end in found.values() if isinstance(end, DigestError)]
    told = [
        end
        for end in found.values()
        if isinstance(end, TransportError) and "DigestError: a block" in str(end)
    ]
    assert caught and len(caught) + len(told) == 3
    assert re.search(r"rank [01], 'w' \[0:6, .*\] to rank [12], 'w' \[0:6, 0:5\], round 0", caught[0].where)


def test_digests_need_a_rendezvous() -> None:
    with pytest.raises(TransportError, match="rendezvous"):
        execute(
            rows_to_columns(),
            rank=2,
            transport=MemoryTransport({}, rank=2),
            src={},
            dst={"w": torch.empty(12, 5)},
            endpoints={},
            verify=True,
        )


@pytest.mark.parametrize(
    ("held", "error", "text"),
    [
        ({}, PlanError, "nothing != shape(12, 5)"),
        ({"w": torch.zeros(5, 12)}, PlanError, "shape(5, 12) != shape(12, 5)"),
        ({"w": torch.zeros(12, 5, dtype=torch.float64)}, DtypeError, "dtype(float64) != dtype(float32)"),
    ],
)
def test_wrong_arrays_are_refused_on_all_ranks_before_the_first_byte(
    held: Any, error: type[Exception], text: str
) -> None:
    dst = {0: {}, 1: {"w": torch.full((12, 5), torch.nan)}, 2: held}
    found: dict[int, Any] = {}
    store, table = HashStore(), {}
    ends = {rank: MemoryTransport(table, rank=rank) for rank in range(3)}
    endpoints = {rank: ends[rank].offer(SRC[rank]) for rank in range(3)}
    for rank in (2, 0, 1):
        with pytest.raises(ShardweaveError) as caught:
            execute(
                rows_to_columns(),
                rank=rank,
                transport=ends[rank],
                src=SRC[rank],
                dst=dst[rank],
                endpoints=endpoints,
                rendezvous=Rendezvous(store=store, ranks=range(3), rank=rank, timeout_s=5),
            )
        found[rank] = caught.value
    assert type(found[2]) is error and text in str(found[2])
    assert all(type(found[rank]) is TransportError and text in str(found[rank]) for rank in (0, 1))
    assert dst[1]["w"].isnan().all()


def test_ranks_with_other_plans_are_told_before_the_first_byte() -> None:
    other = {0: rows_to_columns(rows=10)}
    src = {**SRC, 0: {"w": WHOLE[:5].clone()}}
    found, got = move(moves=other, src=src)
    assert all(isinstance(found[rank], PlanError | TransportError) for rank in range(3))
    assert all(tensor.isnan().all() for tensor in got.values())
    assert schedule(other[0], rank=1).digest != schedule(rows_to_columns(), rank=1).digest


def test_progress_is_told_of_every_byte_and_numpy_arrays_are_written_in_place() -> None:
    table: dict[int, Any] = {}
    ends = {rank: MemoryTransport(table, rank=rank) for rank in range(3)}
    src = {rank: {name: t.numpy() for name, t in held.items()} for rank, held in SRC.items()}
    endpoints = {rank: ends[rank].offer(src[rank]) for rank in range(2)}
    target, told = np.full((12, 5), np.nan, np.float32), []
    report = execute(
        rows_to_columns(),
        rank=2,
        transport=ends[2],
        src={},
        dst={"w": target},
        endpoints=endpoints,
        memory_bytes=100,
        progress=told.append,
    )
    assert np.array_equal(target, WANTED[2].numpy())
    assert sum(told) == report.bytes_received == 240 and len(told) == report.num_rounds > 2
    assert max(told) <= 100


def test_a_round_has_room_for_an_element() -> None:
    with pytest.raises(PlanError, match=r"memory_bytes\(15\) < 16"):
        schedule(rows_to_columns(), rank=0, memory_bytes=15)


def test_a_rank_that_offered_nothing_is_named() -> None:
    with pytest.raises(TransportError, match=r"rank 0: endpoints of ranks\(1\)"):
        execute(
            rows_to_columns(),
            rank=2,
            transport=MemoryTransport({1: SRC[1]}, rank=2),
            src={},
            dst={"w": torch.empty(12, 5)},
            endpoints={1: b"1"},
        )
