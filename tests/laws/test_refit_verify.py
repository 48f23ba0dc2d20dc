"""Laws of sealed sums: a receiver's are the source's after a move, and differ after any damage to it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_layouts import State, layouts, markers, reference

from shardweave.layout import Layout
from shardweave.move import Schedule, schedule
from shardweave.plan import Plan, empty, plan, simulate
from shardweave.refit import verify


def stored(layout: Layout) -> State:
    return {
        rank: {name: np.array(array, order="C") for name, array in arrays.items()}
        for rank, arrays in reference(layout, markers()).items()
    }


def every(moves: Plan) -> dict[int, Schedule]:
    ranks = sorted({*moves.src.mesh.ranks, *moves.dst.mesh.ranks})
    return {rank: schedule(moves, rank=rank, memory_bytes=1000) for rank in ranks}


def seals(steps: dict[int, Schedule], state: State, *, key: int) -> dict[int, verify.Sums]:
    return {r: verify.sums(steps[r], arrays, side="src", key=key) for r, arrays in state.items()}


@settings(max_examples=25, deadline=None)
@given(layouts(name="src"), layouts(name="dst"), st.integers(0, (1 << 64) - 1))
def test_receivers_hold_what_was_sealed(src: Layout, dst: Layout, key: int) -> None:
    moves = plan(src, dst)
    state = stored(src)
    steps = every(moves)
    sealed = seals(steps, state, key=key)
    into = simulate(moves, state, into=empty(dst, np.float64, fill=np.nan))
    for rank, arrays in into.items():
        got = verify.sums(steps[rank], arrays, side="dst", key=key)
        assert verify.compare(rank, got, sealed) == []
        verify.check(rank, got, {r: verify.decode(verify.encode(s)) for r, s in sealed.items()})
