"""The proof of plans: each way of breaking one is caught by the right class, with tensor, box and ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_layouts import layouts, markers, reference

from shardweave.errors import (
    DtypeError,
    GapError,
    HolderError,
    OutsideError,
    OverlapError,
    PlanError,
    ShardweaveError,
    TransformError,
)
from shardweave.layout import (
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Run,
    Tensor,
    Transform,
    along,
    even,
    pad,
    split,
    whole,
)
from shardweave.plan import Family, Plan, empty, materialise, plan, prove_plan, simulate
from shardweave.plan.plan import BOX_COLUMNS, MOVE_COLUMNS

UP = Tensor("layers.{layer}.up", (22, 6), "float64", (("layer", whole(3)),))
MESH = Mesh((("tp", 2), ("dp", 2)))


def _layout(name: str, mesh: Mesh, tp: int) -> Layout:
    """Rows padded and cut; the stored array is transposed, so that no dim is like another."""
    rows = along(mesh, "tp", lambda r: even(pad(whole(22), 4 * tp), tp, r))
    return Layout(name, mesh, (BufferRule(UP.name, (Part(UP),), (whole(3), rows, whole(6)), (2, 1)),))


SRC = _layout("from", MESH, 2)
DST = _layout("to", Mesh((("tp", 3),), offset=2), 3)
RIGHT = plan(SRC, DST)


def broken(found: Plan, **columns: Callable[[np.ndarray], np.ndarray]) -> Plan:
    """The plan with columns of its only family replaced by functions of themselves."""
    (family,) = found.families
    changed = {name: change(getattr(family, name).copy()) for name, change in columns.items()}
    return replace(found, families=(replace(family, **changed),))


def at(*index: int, add: int = 0, to: int | None = None) -> Callable[[np.ndarray], np.ndarray]:
    """A column with one value changed."""

    def change(column: np.ndarray) -> np.ndarray:
        column[index] = column[index] + add if to is None else to
        return column

    return change


def test_the_plan_to_be_broken() -> None:
    """24 rows a source rank's 12, 24 a destination rank's 8: pieces [0:8], [8:12] [12:16], [16:22]."""
    (family,) = RIGHT.families
    prove_plan(RIGHT)
    boxes = {(int(family.index[b, 1]), int(family.count[b, 1])) for b in family.box}
    assert boxes == {(0, 8), (8, 4), (12, 4), (16, 6)}
    # Rank 2 is in both: it has rows 0 to 12 and copies what it wants of them to itself.
    assert sorted({(int(s), int(d)) for s, d in zip(family.src, family.dst, strict=True)})[:1] == [(0, 3)]


def without(move: int) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    return {name: lambda column: np.delete(column, move) for name in MOVE_COLUMNS}


def twice(move: int) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    return {name: lambda column: np.insert(column, move, column[move]) for name in MOVE_COLUMNS}


def _move(dst: int, start: int) -> int:
    """The first move to a rank of a box that starts at a row."""
    (family,) = RIGHT.families
    return next(
        m for m in range(len(family.box)) if family.dst[m] == dst and family.index[family.box[m], 1] == start
    )


TAIL = _move(4, 16)
BOX = int(RIGHT.families[0].box[TAIL])
LAST = f"tensor 'layers.{{layer}}.up', box {RIGHT.families[0].elements(BOX)}"
RANKS = f"from rank {RIGHT.families[0].src[TAIL]} to rank 4"


@pytest.mark.parametrize(
    ("error", "message", "columns"),
    [
        (
            GapError,
            "layout 'to', buffer 'layers.{layer}.up', tensor 'layers.{layer}.up', rank 4, box",
            without(TAIL),
        ),
        (OverlapError, "rank 4: box", twice(TAIL)),
        (HolderError, f"{LAST}, {RANKS}: dim 1 of src", {"src_at": at(BOX, 1, add=-1)}),
        (HolderError, f"{LAST}, {RANKS}: dim 1 of dst", {"dst_at": at(BOX, 1, add=1)}),
        (HolderError, ", box [", {"index": at(BOX, 1, add=1)}),
        (HolderError, "dim 0 of src", {"src_at": at(BOX, 0, add=1)}),
        (HolderError, f"{LAST}, from rank 2 to rank 4: dim 1 of src", {"src": at(TAIL, to=2)}),
        (HolderError, f"{LAST}, from rank 5 to rank 4: src(5) has no", {"src": at(TAIL, to=5)}),
        (HolderError, "dst(1) has no", {"dst": at(TAIL, to=1)}),
        (HolderError, "dim 1 of dst", {"dst": at(TAIL, to=2)}),
        (OutsideError, "dim 1 of src: [4:15:2] is not inside [0:12]", {"src_step": at(BOX, 1, to=2)}),
        (OutsideError, "dim 1 of dst: [0:11:2] is not inside [0:8]", {"dst_step": at(BOX, 1, to=2)}),
        (HolderError, "dim 2 of src", {"index_step": at(BOX, 2, to=2)}),
        (OutsideError, f"from rank {RIGHT.families[0].src[TAIL]} to rank 4", {"count": at(BOX, 1, to=99)}),
        # Rows 22 and 23 are padding, which belongs to no element and is never written.
        (
            HolderError,
            "dim 1 of src: [4:12] of [12:22] pad[2] are not the indices [16:24]",
            {"count": at(BOX, 1, to=8)},
        ),
        (OutsideError, "min(count) = 0", {"count": at(BOX, 1, to=0)}),
        (OutsideError, "min(src_at) = -1", {"src_at": at(BOX, 1, to=-1)}),
        (OutsideError, "min(dst_step) = 0", {"dst_step": at(BOX, 2, to=0)}),
        (OutsideError, "is not inside", {"src_step": at(BOX, 1, to=2**62)}),
        (OutsideError, "is not inside", {"src_at": at(BOX, 1, to=2**63 - 1)}),
        (HolderError, "are not the indices", {"index": at(BOX, 1, to=2**63 - 1)}),
        (GapError, "written", {"count": at(BOX, 1, add=-1)}),
        (PlanError, "columns of a plan fit together", {"box": at(TAIL, to=99)}),
        (PlanError, "columns of a plan fit together", {"box": at(TAIL, to=-1)}),
        (PlanError, "columns of a plan fit together", {"src": lambda column: column[1:]}),
        (PlanError, "columns of a plan fit together", {"count": lambda column: column[:, 1:]}),
    ],
)
def test_a_broken_plan_is_refused(
    error: type[ShardweaveError], message: str, columns: dict[str, Any]
) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        prove_plan(broken(RIGHT, **columns))
    assert type(caught.value) is error
    assert "layers.{layer}.up" in str(caught.value)
    assert "hint: " in str(caught.value)


def test_a_gap_is_named_by_element_and_place() -> None:
    with pytest.raises(GapError) as caught:
        prove_plan(broken(RIGHT, **without(TAIL)))
    text = str(caught.value)
    # Rank 4 wants 3 layers, rows 16 to 22, 6 columns, which are rows 0 to 6 of its buffer. Two replicas
    # share the work: one serves a layer and the other two.
    assert "box [0:3, 16:22, 0:6], of which [0:1, 0:6, 0:6] of the buffer is not written" in text
    assert f"rank 4: written {2 * 6 * 6} of {3 * 6 * 6} elements" in text


def test_a_swap_of_equal_volume_is_an_overlap() -> None:
    """One rank gets a box twice and another one gets it never: every sum over ranks is as it should be."""
    src = Layout("a", Mesh((("dp", 2),)), (BufferRule("w", (Part(_W),), (whole(6), whole(5))),))
    mesh = Mesh((("dp", 2), ("tp", 2)), offset=2)
    rows = along(mesh, "tp", lambda r: even(whole(6), 2, r))
    dst = Layout("b", mesh, (BufferRule("w", (Part(_W),), (rows, whole(5))),))
    found = plan(src, dst)
    (family,) = found.families
    dsts = family.dst.copy()
    # Ranks 2 and 3 are replicas of each other: give the second's copy to the first.
    dsts[int(np.flatnonzero(dsts == 3)[0])] = 2
    with pytest.raises(OverlapError, match=r"tensor 'w', rank 2"):
        prove_plan(replace(found, families=(replace(family, dst=dsts),)))


_W = Tensor("w", (6, 5), "float32")


def test_two_families_that_write_one_element_overlap() -> None:
    mesh = Mesh((("pp", 2),))
    low, high = (split(whole(6), (4, 2), i) for i in (0, 1))
    src = Layout(
        "halves",
        mesh,
        tuple(BufferRule(n, (Part(_W),), (d, whole(5))) for n, d in (("low", low), ("high", high))),
    )
    dst = Layout("whole", mesh, (BufferRule("w", (Part(_W),), (whole(6), whole(5))),))
    found = plan(src, dst)
    first, second = found.families
    prove_plan(replace(found, families=(second, first)))
    with pytest.raises(GapError, match=r"ranks 0, 1, box \[0:6, 0:5\], of which \[4:6, 0:5\]"):
        prove_plan(replace(found, families=(first,)))
    with pytest.raises(OverlapError, match=r"overlap"):
        prove_plan(replace(found, families=(first, first, second)))


def test_a_replica_that_does_not_hold_it_is_refused() -> None:
    """Four ranks, two KV heads: ranks 0 and 1 hold head 0. Rank 2 holds head 1 at the same place."""
    kv = Tensor("k", (8, 3), "float32")
    mesh = Mesh((("tp", 4),))
    rows = along(mesh, "tp", lambda r: even(whole(8), 2, r // 2))
    src = Layout("vllm", mesh, (BufferRule("k", (Part(kv, replica=True),), (rows, whole(3))),))
    dst = Layout("one", Mesh((("tp", 1),), offset=4), (BufferRule("k", (Part(kv),), kv.dims),))
    found = plan(src, dst)
    prove_plan(found)
    (family,) = found.families
    move = int(np.flatnonzero(family.src < 2)[0])
    for rank, right in ((0, True), (1, True), (2, False), (3, False)):
        src_column = family.src.copy()
        src_column[move] = rank
        changed = replace(found, families=(replace(family, src=src_column),))
        if right:
            prove_plan(changed)
        else:
            with pytest.raises(
                HolderError, match=rf"tensor 'k', box \[.*, from rank {rank} to rank 4: dim 0 of src"
            ):
                prove_plan(changed)


def test_a_rank_without_the_buffer_is_refused() -> None:
    mesh = Mesh((("pp", 2),))
    rule = BufferRule("w", (Part(_W),), (whole(6), whole(5)), where=(("pp", (1,)),))
    found = plan(
        Layout("a", mesh, (rule,)), Layout("b", Mesh((("dp", 1),), offset=2), (replace(rule, where=()),))
    )
    prove_plan(found)
    with pytest.raises(HolderError, match=r"box \[0:6, 0:5\], from rank 0 to rank 2: src\(0\) has no 'w'"):
        prove_plan(broken(found, src=at(0, to=0)))


def test_a_family_of_a_buffer_that_does_not_hold_the_tensor_is_refused() -> None:
    (family,) = RIGHT.families
    for changed in (
        replace(family, src_rule=1),
        replace(family, dst_rule=-1),
        replace(family, tensor=replace(UP, shape=(22, 7))),
    ):
        with pytest.raises(PlanError, match=r"a plan names a buffer for each tensor that holds it"):
            prove_plan(replace(RIGHT, families=(changed,)))


def test_the_two_sides_store_the_same_values() -> None:
    """A loader that stores -exp(x) is no plain copy: the transform is part of the layout and of the proof."""
    decay = Tensor("layers.{layer}.A_log", (12,), "float32", (("layer", whole(2)),))
    mesh = Mesh((("tp", 2),))
    rule = BufferRule(decay.name, (Part(decay),), decay.dims)
    plain = Layout("trainer", mesh, (rule,))
    stored = Layout("engine", mesh, (replace(rule, transform=Transform("neg_exp")),))
    with pytest.raises(TransformError, match=r"A_log.*identity.*neg_exp"):
        plan(plain, stored)
    with pytest.raises(TransformError, match=r"A_log"):
        prove_plan(replace(plan(plain, plain), dst=stored))
    with pytest.raises(DtypeError, match=r"float31"):
        prove_plan(replace(plan(plain, plain), dst=replace(plain, rules=(replace(rule, dtype="float31"),))))


def test_a_narrower_dtype_must_be_allowed() -> None:
    rule = BufferRule("w", (Part(_W),), _W.dims)
    narrow = Layout("engine", MESH, (replace(rule, dtype="bfloat16"),))
    full = Layout("trainer", MESH, (rule,))
    with pytest.raises(DtypeError, match=r"'w'.*float32 does not fit in bfloat16"):
        plan(full, narrow)
    assert plan(full, narrow, allow_casts=True).num_bytes == 4 * 30 * 2
    assert plan(narrow, full).num_bytes == 4 * 30 * 4


# --- by chance ----------------------------------------------------------------------------------


@given(layouts(name="a"), layouts(name="b"), st.data())
@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
def test_what_passes_is_right(a: Layout, b: Layout, data: st.DataObject) -> None:
    """A plan with any one number changed is refused, or still fills every element with the right value."""
    found = plan(a, b)
    families = list(found.families)
    which = data.draw(st.integers(0, len(families) - 1))
    family = families[which]
    name = data.draw(st.sampled_from([n for n in (*BOX_COLUMNS, *MOVE_COLUMNS) if getattr(family, n).size]))
    column = getattr(family, name).copy()
    place = data.draw(st.integers(0, column.size - 1))
    column.reshape(-1)[place] += data.draw(st.sampled_from([-2, -1, 1, 2, 3]))
    families[which] = replace(family, **{name: column})
    changed = replace(found, families=tuple(families))
    try:
        prove_plan(changed)
    except ShardweaveError:
        return
    values = markers()
    got = simulate(changed, reference(a, values), into=empty(b, np.float64, fill=np.nan))
    for rank, arrays in reference(b, values).items():
        for array_name, array in arrays.items():
            np.testing.assert_array_equal(got[rank][array_name], array)


def test_steps_are_seen_through() -> None:
    """Every third column of a rank, from a source with every second: boxes with steps on both sides."""
    tensor = Tensor("w", (2, 36), "float64")
    layouts_by_step = {}
    for step in (2, 3, 4):
        mesh = Mesh((("tp", step),), offset=step)
        columns = along(mesh, "tp", lambda r, step=step: Dim([Run("", i, 1) for i in range(r, 36, step)]))
        rule = BufferRule("w", (Part(tensor),), (whole(2), columns))
        layouts_by_step[step] = Layout(f"every {step}", mesh, (rule,))
    values = {tensor: np.arange(72.0).reshape(2, 36)}
    for src in layouts_by_step.values():
        for dst in layouts_by_step.values():
            found = plan(src, dst)
            got = simulate(found, reference(src, values), into=empty(dst, np.float64, fill=np.nan))
            for rank, arrays in reference(dst, values).items():
                np.testing.assert_array_equal(got[rank]["w"], arrays["w"])
            family: Family = found.families[0]
            # One box for each pair of phases that meet, not one for each column.
            step = int(np.lcm(src.mesh.size, dst.mesh.size))
            assert len(family.count) == step


def _steps_and_rest() -> tuple[Layout, Layout]:
    """A tensor of nine whose every third element, from 1, lies in one buffer and the rest in another."""
    tensor = Tensor("w", (9,), "float64")
    third = Dim((Run("", 1, 3, 3),))
    rest = Dim(Run("", start, count) for start, count in ((0, 1), (2, 2), (5, 2), (8, 1)))
    seventh = Dim((Run("", 7, 1),))
    src = Layout(
        "parts",
        Mesh(()),
        (
            BufferRule("third", (Part(tensor),), (third,)),
            BufferRule("rest", (Part(tensor),), (rest,)),
            BufferRule("copy", (Part(tensor, replica=True),), (seventh,)),
        ),
    )
    return src, Layout("whole", Mesh(()), (BufferRule("w", (Part(tensor),), (whole(9),)),))


def test_steps_of_several_buffers_meet_in_one() -> None:
    """Boxes with steps and without, from different buffers, interleave in one buffer and do not overlap."""
    src, dst = _steps_and_rest()
    found = plan(src, dst)
    values = {dst.tensors[0]: np.arange(9.0)}
    result = simulate(found, materialise(src, values), into=empty(dst, np.float64, fill=np.nan))
    assert np.array_equal(result[0]["w"], np.arange(9.0))


def test_an_overlap_of_a_step_and_a_plain_box_of_another_buffer_is_seen() -> None:
    """Element 7 comes with every third one, and once more on its own."""
    src, dst = _steps_and_rest()
    found = plan(src, dst)
    one, seven = np.array([[1]]), np.array([[7]])
    extra = Family(
        dst.tensors[0],
        2,
        0,
        count=one,
        index=seven,
        index_step=one,
        src_at=one - 1,
        src_step=one,
        dst_at=seven,
        dst_step=one,
        box=np.array([0]),
        src=np.array([0]),
        dst=np.array([0]),
    )
    with pytest.raises(OverlapError, match=r"box \[7:8\]"):
        prove_plan(replace(found, families=(*found.families, extra)))
