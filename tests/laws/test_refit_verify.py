"""Laws of sealed sums: a receiver's are the source's after a move, and differ after any damage to it."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_layouts import State, layouts, markers, reference

from shardweave.errors import DigestError, FormatError
from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, along, even, whole
from shardweave.layout.fingerprint import NOTHING, fingerprint
from shardweave.move import MemoryTransport, Schedule, replay, schedule
from shardweave.plan import Copy, Plan, empty, plan, simulate
from shardweave.refit import verify


def stored(layout: Layout) -> State:
    return {
        rank: {name: np.array(array, order="C") for name, array in arrays.items()}
        for rank, arrays in reference(layout, markers()).items()
    }


def every(moves: Plan, *, memory_bytes: int = 1000) -> dict[int, Schedule]:
    ranks = sorted({*moves.src.mesh.ranks, *moves.dst.mesh.ranks})
    return {rank: schedule(moves, rank=rank, memory_bytes=memory_bytes) for rank in ranks}


def seals(steps: dict[int, Schedule], state: Any, *, key: int = 0) -> dict[int, verify.Sums]:
    return {rank: verify.sums(steps[rank], arrays, side="src", key=key) for rank, arrays in state.items()}


def differing(steps: dict[int, Schedule], into: Any, sealed: Any, *, key: int = 0) -> set[tuple[Any, ...]]:
    """Source, receiver and tensor of all that differ."""
    found = set()
    for rank, arrays in into.items():
        got = verify.sums(steps[rank], arrays, side="dst", key=key)
        found |= {(source, rank, tensor) for source, tensor in verify.compare(rank, got, sealed)}
    return found


@settings(max_examples=8, deadline=None)
@given(layouts(name="src"), layouts(name="dst"), st.integers(0, (1 << 64) - 1), st.data())
def test_receivers_hold_what_was_sealed_and_damage_is_named(
    src: Layout, dst: Layout, key: int, data: st.DataObject
) -> None:
    moves = plan(src, dst)
    state, steps = stored(src), every(moves)
    sealed = seals(steps, state, key=key)
    into = simulate(moves, state, into=empty(dst, np.float64, fill=np.nan))
    assert differing(steps, into, sealed, key=key) == set()
    for rank, arrays in into.items():
        read = {source: verify.decode(verify.encode(each)) for source, each in sealed.items()}
        assert read == sealed
        verify.check(rank, verify.sums(steps[rank], arrays, side="dst", key=key), read)
        for (peer, tensor), whole_sum in verify.sums(steps[rank], arrays, side="dst", key=key).items():
            pieces = verify.pieces(steps[rank], arrays, side="dst", peer=peer, tensor=tensor, key=key)
            theirs = verify.pieces(steps[peer], state[peer], side="src", peer=rank, tensor=tensor, key=key)
            assert pieces == theirs == verify.decode_pieces(verify.encode_pieces(theirs))
            assert sum(pieces, NOTHING) == whole_sum

    # One bit of one element that was written.
    copies = [copy for each in steps.values() for copy in verify._copies(each, "dst")]
    copy = data.draw(st.sampled_from(copies))
    index = tuple(data.draw(st.sampled_from(dim)) for dim in copy.dst_box.dims)
    bits = into[copy.dst_rank][copy.dst_name].view(np.uint64)
    bits[index] ^= np.uint64(1) << np.uint64(data.draw(st.integers(0, 63)))
    assert differing(steps, into, sealed, key=key) == {
        (copy.src_rank, copy.dst_rank, copy.family.tensor.name)
    }


# --- damages ------------------------------------------------------------------------------------

EXPERTS, ROWS, COLUMNS = 6, 4, 10
UP = Tensor("experts.{expert}.up", (ROWS, COLUMNS), "bfloat16", (("expert", whole(EXPERTS)),))


def experts(name: str, ranks: int, dim: int, dtype: str = "bfloat16", *, turned: bool = False) -> Layout:
    """Experts, or their columns, dealt to ranks; each expert an array of its own."""
    mesh = Mesh((("ep", ranks),))
    dims = list(UP.dims)
    dims[dim] = along(mesh, "ep", lambda r: even(UP.dims[dim], ranks, r))
    order = (2, 1) if turned else (1, 2)
    return Layout(name, mesh, (BufferRule(UP.name, (Part(UP),), tuple(dims), order, dtype=dtype),))


def values(layout: Layout, *, seed: int) -> dict[int, dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return {
        rank: {
            name: torch.randn(buffer.shape, generator=draw).to(getattr(torch, buffer.dtype))
            for name, (buffer, _) in layout.arrays(rank).items()
        }
        for rank in layout.mesh.ranks
    }


class Move:
    """Experts of two ranks to the columns of five, and the state of both."""

    def __init__(self, src: Layout | None = None, dst: Layout | None = None) -> None:
        self.src = src or experts("src", 2, 0)
        self.dst = dst or experts("dst", 5, 2)
        self.plan = plan(self.src, self.dst, allow_casts=True)
        self.steps = every(self.plan)
        self.state = values(self.src, seed=1)
        self.into = {
            rank: {name: torch.full_like(array, float("nan")) for name, array in arrays.items()}
            for rank, arrays in values(self.dst, seed=2).items()
        }

    def run(self) -> None:
        table: dict[int, Any] = {}
        ends = {rank: MemoryTransport(table, rank=rank) for rank in self.steps}
        endpoints = {rank: ends[rank].offer(arrays) for rank, arrays in self.state.items()}
        for rank, steps in self.steps.items():
            into = self.into.get(rank, {})
            replay(steps, transport=ends[rank], src=self.state.get(rank, {}), dst=into, endpoints=endpoints)

    def target(self, copy: Copy) -> torch.Tensor:
        return self.into[copy.dst_rank][copy.dst_name][verify.slices(copy.dst_box)]


def copies_of(move: Move, source: int, rank: int) -> list[Copy]:
    return list(verify._between(move.steps[rank], "dst", peer=source, tensor=UP.name))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def test_a_whole_move_passes_and_local_copies_count() -> None:
    move = Move()
    sealed = seals(move.steps, move.state)
    assert (1, UP.name) in sealed[1] and len(differing(move.steps, move.into, sealed)) == 10
    move.run()
    assert differing(move.steps, move.into, sealed) == set()


@pytest.mark.parametrize("source", [0, 1])
def test_a_copy_that_was_skipped_is_named(source: int) -> None:
    move = Move()
    sealed = seals(move.steps, move.state)
    move.run()
    copy = copies_of(move, source, 1)[1]
    move.target(copy)[...] = 0
    assert differing(move.steps, move.into, sealed) == {(source, 1, UP.name)}
    with pytest.raises(DigestError, match=rf"rank {source} to rank 1: sealed\(\w+\) != received\(\w+\)\."):
        verify.check(1, verify.sums(move.steps[1], move.into[1], side="dst"), sealed)


def test_parameters_are_sealed_like_tensors() -> None:
    move = Move()
    live = {
        rank: {n: torch.nn.Parameter(a) for n, a in arrays.items()} for rank, arrays in move.state.items()
    }
    assert seals(move.steps, live) == seals(move.steps, move.state)


def test_blocks_that_changed_places_are_named() -> None:
    move = Move()
    sealed = seals(move.steps, move.state)
    move.run()
    first, second = copies_of(move, 0, 3)[:2]
    kept = move.target(first).clone()
    move.target(first).copy_(move.target(second))
    move.target(second).copy_(kept)
    assert differing(move.steps, move.into, sealed) == {(0, 3, UP.name)}


def test_every_flipped_bit_is_named_and_located() -> None:
    move = Move()
    sealed = seals(move.steps, move.state)
    move.run()
    theirs = verify.pieces(move.steps[1], move.state[1], side="src", peer=4, tensor=UP.name)
    for at, copy in enumerate(copies_of(move, 1, 4)):
        for bit in range(16):
            word = bits_of(move.target(copy))[2:3, 1:]
            word ^= torch.tensor(1 << bit).to(torch.int16)
            assert differing(move.steps, move.into, sealed) == {(1, 4, UP.name)}
            mine = verify.pieces(move.steps[4], move.into[4], side="dst", peer=1, tensor=UP.name)
            assert [a != b for a, b in zip(mine, theirs, strict=True)] == [i == at for i in range(len(mine))]
            assert verify.locate(move.steps[4], mine, theirs, peer=1, tensor=UP.name) == copy
            word ^= torch.tensor(1 << bit).to(torch.int16)
    assert differing(move.steps, move.into, sealed) == set()


def test_stale_and_torn_content_is_named() -> None:
    """What a source seals is what must arrive: not the version before it, and no mixture of two."""
    move = Move()
    move.run()  # version 1 stays where it was
    for arrays in move.state.values():
        for array in arrays.values():
            array += 1
    sealed = seals(move.steps, move.state)
    assert len(differing(move.steps, move.into, sealed)) == 10
    move.state[0]["experts.2.up"] += 1  # a step that begins before the last read
    move.run()
    assert differing(move.steps, move.into, sealed) == {(0, rank, UP.name) for rank in range(5)}
    # A step that is complete before the seal is no tear: it is another version.
    move.run()
    assert differing(move.steps, move.into, seals(move.steps, move.state)) == set()


def test_another_receiver_s_sums_and_missing_ones_are_seen() -> None:
    move = Move()
    sealed = seals(move.steps, move.state)
    move.run()
    got = verify.sums(move.steps[2], move.into[2], side="dst")
    assert verify.compare(3, got, sealed) == [(0, UP.name), (1, UP.name)]
    assert verify.compare(2, got, {0: sealed[0]}) == [(1, UP.name)]
    with pytest.raises(DigestError, match=r"sealed\(nothing\)"):
        verify.check(2, got, {0: sealed[0]})
    with pytest.raises(DigestError, match=r"received\(nothing\), and 1 more"):
        verify.check(2, {}, sealed)


# --- casts, order, many copies ------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtypes", [("float32", "bfloat16"), ("bfloat16", "float8_e4m3fn"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("turned", [(False, True), (True, False), (True, True)])
def test_sources_seal_what_a_cast_makes_in_any_order(
    dtypes: tuple[str, str], turned: tuple[bool, bool]
) -> None:
    move = Move(
        experts("src", 2, 0, dtypes[0], turned=turned[0]), experts("dst", 5, 2, dtypes[1], turned=turned[1])
    )
    sealed = seals(move.steps, move.state)
    move.run()
    assert differing(move.steps, move.into, sealed) == set()
    copy = copies_of(move, 0, 2)[0]
    size = move.target(copy).element_size()
    move.target(copy).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])[1, 1] ^= 1
    assert differing(move.steps, move.into, sealed) == {(0, 2, UP.name)}


@pytest.mark.parametrize("small", [0, 1 << 18])
def test_copies_one_by_one_are_those_in_a_stack(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow definition: the fingerprint of each block in the destination's order, added up."""
    move = Move()
    monkeypatch.setattr(verify, "_SMALL_BYTES", small)
    monkeypatch.setattr(verify, "_STACK_BYTES", 250)
    move.run()
    for source in (0, 1):
        for rank in range(5):
            each = [
                fingerprint(move.target(copy)[None], copy.elements, key=9)
                for copy in copies_of(move, source, rank)
            ]
            got = verify.pieces(
                move.steps[rank], move.into[rank], side="dst", peer=source, tensor=UP.name, key=9
            )
            assert list(got) == each and len(each) == 3


# --- refusals -----------------------------------------------------------------------------------


def test_pieces_of_another_plan_are_refused() -> None:
    move = Move()
    move.run()
    mine = verify.pieces(move.steps[1], move.into[1], side="dst", peer=0, tensor=UP.name)
    assert verify.locate(move.steps[1], mine, mine, peer=0, tensor=UP.name) is None
    with pytest.raises(DigestError, match=r"copies\(3\), got\(3\), sealed\(2\)"):
        verify.locate(move.steps[1], mine, mine[:2], peer=0, tensor=UP.name)
    copy = copies_of(move, 0, 1)[0]
    with pytest.raises(
        DigestError, match=r"'experts.\{expert\}.up' \[0:1, 0:4, 2:4\], rank 0, 'experts.0.up'"
    ):
        verify.refuse(copy, mine[0], mine[1])


def test_bytes_of_no_sums_are_refused() -> None:
    move = Move()
    found = seals(move.steps, move.state)[0]
    good = verify.encode(found)
    assert verify.decode(good) == found and verify.decode(verify.encode({})) == {}
    start = len(verify._MAGIC)
    for size in range(len(good)):
        with pytest.raises(FormatError):
            verify.decode(good[:size])
    with pytest.raises(FormatError):
        verify.decode(good + b"\0")
    for at in range(start, start + 40):
        for byte in (0, 0x7F, 0xC0, 0xDD, 0xFF):
            changed = bytearray(good)
            changed[at] = byte
            with contextlib.suppress(FormatError):
                verify.decode(bytes(changed))
    prints = verify.encode_pieces(found.values())[: 2 * 128]
    for body in (
        (["a"], [0, 1], [0, 1], prints),  # no such name
        (["a"], [0, 1], [0, -1], prints),
        (["a"], [1, 0], [0, 0], prints),  # not in order
        (["a"], [1, 1], [0, 0], prints),
        (["a"], [0], [0], prints),
        (["a"], [0, 1], [0, 0], prints[:-1]),
        (["a"], [0, 1], [0, 0], b"\xff" * 256),
        ([1], [0, 1], [0, 0], prints),
    ):
        with pytest.raises(FormatError):
            verify.decode(verify._MAGIC + msgspec.msgpack.encode(body))
