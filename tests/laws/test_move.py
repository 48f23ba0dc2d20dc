"""Laws of moving, on pairs of layouts of one small model that is cut in every way we know."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_layouts import State, layouts, markers, reference

from shardweave.layout import Layout
from shardweave.layout.box import indices
from shardweave.move import MemoryTransport, Report, execute, schedule
from shardweave.plan import Copy, Plan, empty, plan, simulate


def move(moves: Plan, state: State, *, memory_bytes: int) -> tuple[State, dict[int, Report]]:
    into = empty(moves.dst, np.float64, fill=np.nan)
    table: dict[int, Any] = {}
    ends = {r: MemoryTransport(table, rank=r) for r in sorted({*moves.src.mesh.ranks, *moves.dst.mesh.ranks})}
    endpoints = {rank: ends[rank].offer(state[rank]) for rank in moves.src.mesh.ranks}
    reports = {
        rank: execute(
            moves,
            rank=rank,
            transport=end,
            src=state.get(rank, {}),
            dst=into.get(rank, {}),
            endpoints=endpoints,
            memory_bytes=memory_bytes,
        )
        for rank, end in ends.items()
    }
    return into, reports


def assert_same_bits(got: State, wanted: State) -> None:
    assert got.keys() == wanted.keys()
    for rank, arrays in wanted.items():
        assert got[rank].keys() == arrays.keys()
        for name, array in arrays.items():
            assert got[rank][name].tobytes() == array.tobytes(), f"rank {rank}, {name}"


@settings(max_examples=40, deadline=None)
@given(layouts(name="src"), layouts(name="dst"), st.sampled_from([16, 31, 200, 1 << 20]))
def test_moving_is_simulating(src: Layout, dst: Layout, memory_bytes: int) -> None:
    moves = plan(src, dst)
    state = {
        rank: {name: np.array(array, order="C") for name, array in arrays.items()}
        for rank, arrays in reference(src, markers()).items()
    }
    got, reports = move(moves, state, memory_bytes=memory_bytes)
    assert_same_bits(got, simulate(moves, state, into=empty(dst, np.float64, fill=np.nan)))
    local = sum(report.bytes_local for report in reports.values())
    assert local + sum(report.bytes_received for report in reports.values()) == moves.num_bytes


def elements(copies: list[Copy]) -> Counter[tuple[object, ...]]:
    """Every element that is copied, one by one: from where and to where."""
    found: Counter[tuple[object, ...]] = Counter()
    for copy in copies:
        shape = copy.src_box.shape
        numbers = np.arange(copy.src_box.numel).reshape(shape)
        read = list(indices(copy.src_box))
        order = copy.to_destination(numbers).reshape(-1).tolist()
        for at, target in zip(order, indices(copy.dst_box), strict=True):
            found[copy.src_rank, copy.src_name, read[at], copy.dst_rank, copy.dst_name, target] += 1
    return found


@settings(max_examples=25, deadline=None)
@given(layouts(name="src"), layouts(name="dst"), st.sampled_from([97, 1000, 1 << 20]))
def test_rounds_are_the_plan_in_bounded_memory(src: Layout, dst: Layout, memory_bytes: int) -> None:
    moves = plan(src, dst)
    every = [
        schedule(moves, rank=rank, memory_bytes=memory_bytes)
        for rank in sorted({*src.mesh.ranks, *dst.mesh.ranks})
    ]
    assert len({(steps.digest, len(steps.rounds)) for steps in every}) == 1
    done: list[Copy] = []
    sends: defaultdict[tuple[int, int, int], list[object]] = defaultdict(list)
    receives: defaultdict[tuple[int, int, int], list[object]] = defaultdict(list)
    for steps in every:
        done += steps.local
        assert all(copy.src_rank == copy.dst_rank == steps.rank for copy in steps.local)
        for number, copies in enumerate(steps.rounds):
            assert sum(8 * copy.dst_box.numel for copy in copies) <= memory_bytes
            for copy in copies:
                assert copy.src_rank != copy.dst_rank and steps.rank in (copy.src_rank, copy.dst_rank)
                side = sends if copy.src_rank == steps.rank else receives
                blocks = (copy.src_name, copy.src_box, copy.dst_name, copy.dst_box, copy.elements)
                side[number, copy.src_rank, copy.dst_rank].append(blocks)
            done += [copy for copy in copies if copy.dst_rank == steps.rank]
    # Both ends of a pair post the same blocks in the same order.
    assert sends == receives
    assert elements(done) == elements(list(moves.copies()))
