"""The proof of layouts: right ones pass, and each class of bug, put back in, is caught and named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import layouts, marked, walked

from shardweave.errors import BufferRuleError, GapError, OutsideError, OverlapError, ShardweaveError
from shardweave.layout import (
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Run,
    Sharded,
    Tensor,
    along,
    balanced,
    concat,
    cut,
    even,
    pad,
    prove,
    repeat,
    replicated,
    split,
    take,
    whole,
)
from shardweave.layout.buffer import axes_of, table_of


@given(layouts())
def test_layouts_that_hold_everything_once_are_proved(layout: Layout) -> None:
    prove(layout)
    values = marked(layout)
    held = [
        v
        for rank in layout.mesh.ranks
        for array in walked(layout, rank, values).values()
        for v in array.ravel()
    ]
    assert set(np.array(held)[~np.isnan(held)]) == {v for whole in values.values() for v in whole.ravel()}


@given(layouts(), st.booleans(), st.data())
def test_an_index_dropped_or_doubled_anywhere_is_caught(
    layout: Layout, doubled: bool, data: st.DataObject
) -> None:
    rule = data.draw(st.sampled_from(layout.rules))
    part = data.draw(st.sampled_from(rule.parts))
    d = data.draw(st.integers(0, len(rule.dims) - 1))
    label, held = rule.label_of(d, part.label), list(table_of(rule.dims[d]))
    places = [(e, i) for e, dim in enumerate(held) for i, (of, _) in enumerate(dim) if of == label]
    entry, at = data.draw(st.sampled_from(places))
    before, after = cut(held[entry], 0, at + doubled), cut(held[entry], at + (not doubled), len(held[entry]))
    held[entry] = concat(before, after)
    dims = list(rule.dims)
    dims[d] = Sharded(axes_of(rule.dims[d]), tuple(held))
    try:
        wrong = replace(rule, dims=tuple(dims), numbers=())
    except BufferRuleError as refused:  # the last index of a label was dropped, or of all labels
        assert "labels in dims" in refused.equation and not doubled
        return
    message = caught(OverlapError if doubled else GapError, Layout("wrong", layout.mesh, (wrong,)))
    # A dim that is not fused belongs to all parts; the first one is named.
    named = part if d in rule.fused else rule.parts[0]
    assert f"tensor {named.tensor.name!r}" in message


# --- each class of bug ---------------------------------------------------------------------------

TP = Mesh((("dp", 2), ("tp", 3)))
W = Tensor("w", (10, 4), "bfloat16")


def rows(*dims: Dim, replica: bool = False, name: str = "w") -> BufferRule:
    """`w` with its rows cut along tp as given."""
    return BufferRule(name, (Part(W, replica=replica),), (Sharded(("tp",), dims), whole(4)))


def caught(kind: type[ShardweaveError], layout: Layout, tensors: tuple[Tensor, ...] | None = None) -> str:
    """The message of the refusal, which must have four parts."""
    with pytest.raises(kind) as refused:
        prove(layout, tensors)
    error = refused.value
    assert type(error) is kind
    assert all([error.rule, error.where, error.equation, error.hint])
    return str(error)


def test_a_rank_without_its_rows() -> None:
    prove(Layout("right", TP, (rows(*(balanced(whole(10), 3, r) for r in range(3))),)))
    message = caught(
        GapError, Layout("wrong", TP, (rows(cut(whole(10), 0, 4), Dim(), cut(whole(10), 7, 10)),))
    )
    assert "layout 'wrong', tensor 'w', box [4:7, 0:4]: missing 12 of 40 elements" in message


@pytest.mark.parametrize(
    ("edges", "kind", "said"),
    [
        ((6, 4), OverlapError, "dim 0, indices [4:6]: held by ranks 0, 1 and by ranks 2, 3"),
        ((4, 4), None, ""),
        ((4, 3), OverlapError, "dim 0, indices [3:4]: held by ranks 0, 1 and by ranks 2, 3"),
        ((3, 4), GapError, "box [3:4, 0:4]: missing 4 of 40 elements"),
    ],
)
def test_a_shifted_cut(edges: tuple[int, int], kind: type[ShardweaveError] | None, said: str) -> None:
    stop, start = edges
    layout = Layout(
        "x", TP, (rows(cut(whole(10), 0, stop), cut(whole(10), start, 7), cut(whole(10), 7, 10)),)
    )
    if kind is None:
        prove(layout)
    else:
        assert said in caught(kind, layout)


def stages(sizes: list[tuple[int, int]], num_layers: int) -> Layout:
    """Layers on pipeline stages, each stage said by its first layer and one past its last."""
    mesh = Mesh((("tp", 2), ("pp", len(sizes))))
    tensor = Tensor("layers.{layer}.w", (3,), "bfloat16", (("layer", whole(num_layers)),))
    held = Sharded(("pp",), tuple(Dim([Run("", first, stop - first)]) for first, stop in sizes))
    return Layout("stages", mesh, (BufferRule("layers.{layer}.w", (Part(tensor),), (held, whole(3))),))


@pytest.mark.parametrize(("num_layers", "pp", "lost"), [(30, 4, "[28:30, 0:3]"), (70, 12, "[60:70, 0:3]")])
def test_floor_division_of_layers(num_layers: int, pp: int, lost: str) -> None:
    floor = num_layers // pp
    message = caught(GapError, stages([(r * floor, (r + 1) * floor) for r in range(pp)], num_layers))
    assert f"tensor 'layers.{{layer}}.w', box {lost}" in message
    edges = [0, *itertools.accumulate(len(balanced(whole(num_layers), pp, r)) for r in range(pp))]
    prove(stages(list(itertools.pairwise(edges)), num_layers))


def test_stages_from_the_last_rank_with_a_remainder() -> None:
    # start = index * own size, with sizes 4, 3, 3 from the last stage on.
    assert "indices [8:12] are not all in [0:10]" in caught(
        OutsideError, stages([(8, 12), (3, 6), (0, 3)], 10)
    )
    assert "ranks 0, 1" in caught(OutsideError, stages([(8, 12), (3, 6), (0, 3)], 10))
    assert "box [6:8, 0:3]" in caught(GapError, stages([(8, 10), (3, 6), (0, 3)], 10))
    prove(stages([(6, 10), (3, 6), (0, 3)], 10))


def test_two_orders_of_cutting_and_fusing_mixed() -> None:
    mesh = Mesh((("tp", 2),))
    sizes = {"q": 12, "k": 4, "v": 4}
    parts = tuple(Part(Tensor(name, (size, 5), "bfloat16"), name) for name, size in sizes.items())
    qkv = [whole(size, name) for name, size in sizes.items()]
    fused = [even(concat(*qkv), 2, r) for r in range(2)]
    cut_first = [concat(*(even(dim, 2, r) for dim in qkv)) for r in range(2)]

    def layout(*dims: Dim, replica: bool = False) -> Layout:
        said = tuple(Part(part.tensor, part.label, replica) for part in parts)
        return Layout("x", mesh, (BufferRule("qkv", said, (Sharded(("tp",), dims), whole(5))),))

    prove(layout(*fused))
    prove(layout(*cut_first))
    message = caught(OverlapError, layout(fused[0], cut_first[1]))
    assert "tensor 'q', dim 0, indices [6:10]: held by rank 0 and by rank 1" in message
    # Called replicas, they still miss the first rows of K.
    assert "tensor 'k', box [0:2, 0:5]" in caught(GapError, layout(fused[0], cut_first[1], replica=True))


def test_an_index_outside() -> None:
    layout = Layout("x", TP, (rows(cut(whole(10), 0, 4), cut(whole(10), 4, 8), cut(whole(12), 8, 12)),))
    message = caught(OutsideError, layout)
    assert "buffer 'w', tensor 'w', dim 0, ranks 4, 5: indices [8:12] are not all in [0:10]" in message


def test_an_index_between_those_of_a_family() -> None:
    mesh = Mesh((("pp", 2),))
    tensor = Tensor(
        "l.{layer}", (3,), "bfloat16", (("layer", Dim([Run("", 0, 4, 2)])),)
    )  # every second layer

    def layout(*dims: Dim) -> Layout:
        return Layout(
            "x", mesh, (BufferRule("l.{layer}", (Part(tensor),), (Sharded(("pp",), dims), whole(3))),)
        )

    prove(layout(Dim([Run("", 0, 2, 2)]), Dim([Run("", 4, 2, 2)])))
    message = caught(OutsideError, layout(Dim([Run("", 0, 2, 2)]), Dim([Run("", 4, 3)])))
    assert "dim 0, rank 1: indices [4:7] are not all in [0:7:2]" in message


def test_padding_counted_as_elements() -> None:
    prove(Layout("x", TP, (rows(*(even(pad(whole(10), 3), 3, r) for r in range(3))),)))
    assert "ranks 4, 5: indices [8:12]" in caught(
        OutsideError, Layout("x", TP, (rows(*(even(whole(12), 3, r) for r in range(3))),))
    )


def test_replicas_are_declared() -> None:
    mesh = Mesh((("tp", 4),))
    k = Tensor("k", (2 * 8, 4), "bfloat16")
    held = along(mesh, "tp", lambda r: even(repeat(whole(16), 2, block=8), 4, r))
    undeclared = Layout("x", mesh, (BufferRule("k", (Part(k),), (held, whole(4))),))
    assert "tensor 'k', dim 0, indices [0:8]: held by rank 0 and by rank 1" in caught(
        OverlapError, undeclared
    )
    prove(Layout("x", mesh, (BufferRule("k", (Part(k, replica=True),), (held, whole(4))),)))


def test_two_buffers_of_one_tensor_are_declared() -> None:
    embed = rows(*(balanced(whole(10), 3, r) for r in range(3)), name="embed")
    head = BufferRule("head", (Part(W),), (cut(whole(10), 2, 5), whole(4)))
    message = caught(OverlapError, Layout("x", TP, (embed, head)))
    assert "tensor 'w', box [2:5, 0:4]: held by buffer 'embed' and by buffer 'head'" in message
    prove(Layout("x", TP, (embed, replicated(head))))
    prove(Layout("x", TP, (replicated(head), embed)))
    assert "box [0:2, 0:4]" in caught(GapError, Layout("x", TP, (replicated(head),)))


def test_buffers_may_share_a_tensor() -> None:
    halves = [
        BufferRule(name, (Part(W),), (cut(whole(10), *edges), whole(4)))
        for name, edges in (("low", (0, 6)), ("high", (6, 10)))
    ]
    prove(Layout("x", TP, tuple(halves)))
    assert "box [6:10, 0:4]" in caught(GapError, Layout("x", TP, (halves[0],)))


def experts(held: Callable[[int], Dim], *, replica: bool = False) -> Layout:
    mesh = Mesh((("ep", 8),))
    tensor = Tensor("experts.{expert}.w", (3,), "bfloat16", (("expert", whole(16)),))
    parts = (Part(tensor, replica=replica),)
    return Layout("x", mesh, (BufferRule("e.{expert}", parts, (along(mesh, "ep", held), whole(3))),))


def test_a_missing_expert() -> None:
    prove(experts(lambda r: take(whole(16), (r, 15 - r))))
    message = caught(GapError, experts(lambda r: take(whole(16), (r,) if r == 4 else (r, 15 - r))))
    assert "tensor 'experts.{expert}.w', box [11:12, 0:3]: missing 3 of 48 elements" in message


def test_local_expert_numbers_taken_for_global_ones() -> None:
    right = experts(lambda r: even(whole(16), 8, r))
    prove(right)
    names = [name for rank in right.mesh.ranks for name in right.arrays(rank)]
    assert sorted(names) == sorted(f"e.{i}" for i in range(16))
    message = caught(OverlapError, experts(lambda r: whole(2)))
    assert "tensor 'experts.{expert}.w', dim 0, indices [0:2]: held by rank 0 and by rank 1" in message
    assert "box [2:16, 0:3]" in caught(GapError, experts(lambda r: whole(2), replica=True))


def test_tensors_that_nobody_holds() -> None:
    other = Tensor("other", (3, 4), "bfloat16")
    right = Layout("x", TP, (rows(*(balanced(whole(10), 3, r) for r in range(3))),))
    assert "tensor 'other', box [0:3, 0:4]: missing 12 of 12" in caught(GapError, right, (other,))
    scalar = Tensor("step", (), "int64")
    assert "tensor 'step', box []: missing 1 of 1" in caught(GapError, right, (scalar,))
    wrong = Layout("x", TP, (rows(cut(whole(10), 0, 4), Dim(), Dim()),))
    caught(GapError, wrong, ())


def test_empty_tensors_need_no_holder() -> None:
    empty = Tensor("none", (0, 4), "bfloat16")
    prove(Layout("x", TP, (BufferRule("none", (Part(empty),), (whole(0), whole(4))),)))
    prove(Layout("x", TP, ()), (empty,))


def test_the_cost_does_not_depend_on_ranks_or_layers() -> None:
    n = 10**12
    mesh = Mesh((("tp", 8), ("dp", 256), ("pp", 8)))
    tensor = Tensor("layers.{layer}.w", (n, 8 * n), "bfloat16", (("layer", whole(n)),))
    held = (
        along(mesh, "pp", lambda r: balanced(whole(n), 8, r)),
        whole(n),
        along(mesh, "tp", lambda r: even(whole(8 * n), 8, r)),
    )
    prove(Layout("x", mesh, (BufferRule("layers.{layer}.w", (Part(tensor),), held),)))
    short = split(whole(8 * n), (n - 1, 1, *(n for _ in range(7))), 0)
    wrong = Sharded(("tp",), (short, *held[2].dims[1:]))
    layout = Layout("x", mesh, (BufferRule("layers.{layer}.w", (Part(tensor),), (*held[:2], wrong)),))
    assert f"box [0:{n}, 0:{n}, {n - 1}:{n}]" in caught(GapError, layout)
