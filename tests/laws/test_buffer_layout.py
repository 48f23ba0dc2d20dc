"""What ranks store: buffers filled by pieces against buffers walked element by element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from strategies import layouts, marked, walked

from shardweave.errors import BufferRuleError, MeshError, ModelError, UnknownNameError
from shardweave.layout import (
    PAD,
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Run,
    Sharded,
    Tensor,
    along,
    concat,
    even,
    pad,
    replicated,
    split,
    whole,
)
from shardweave.layout.buffer import Buffer


def by_pieces(buffer: Buffer, values: dict[Tensor, np.ndarray]) -> dict[str, np.ndarray]:
    """The stored arrays of a buffer, block by block. Padding is NaN."""
    full = np.full([len(dim) for dim in buffer.dims], np.nan)
    written = np.zeros(full.shape, dtype=int)
    for piece in buffer.pieces():
        assert piece.box.shape == piece.at.shape
        assert all(dim.step == 1 for dim in piece.at.dims)
        place = [
            [list(dim).index(("", number)) for number in numbers]
            for dim, numbers in zip(piece.tensor.dims, piece.box.dims, strict=True)
        ]
        at = tuple(slice(dim.start, dim.stop) for dim in piece.at.dims)
        full[at] = values[piece.tensor][np.ix_(*place)]
        written[at] += 1
    padding = np.zeros(full.shape, dtype=bool)
    for i, dim in enumerate(buffer.dims):
        column = np.array([label is PAD for label, _ in dim], dtype=bool)
        padding |= column.reshape([-1 if j == i else 1 for j in range(full.ndim)])
    assert np.array_equal(written, np.where(padding, 0, 1)), "pieces are disjoint and fill"
    ordered = full.transpose(buffer.separate + buffer.stacked)
    return {name: ordered[positions] for name, positions in buffer.members()}


@given(layouts())
def test_pieces_fill_what_the_dims_say(layout: Layout) -> None:
    values = marked(layout)
    for rank in layout.mesh.ranks:
        expected = walked(layout, rank, values)
        stored: dict[str, np.ndarray] = {}
        for buffer in layout.buffers(rank):
            stored |= by_pieces(buffer, values)
            assert buffer.numel == sum(array.size for array in by_pieces(buffer, values).values())
        assert stored.keys() == expected.keys() == layout.arrays(rank).keys()
        for name, array in stored.items():
            np.testing.assert_array_equal(array, expected[name])
            buffer, positions = layout.arrays(rank)[name]
            assert buffer.shape == array.shape and buffer.member(positions) == name


@given(layouts())
def test_ranks_that_a_rule_does_not_tell_apart_hold_the_same(layout: Layout) -> None:
    for rule in layout.rules:
        entries = layout.entries(rule)
        buffers = [rule.at(layout.mesh, rank) for rank in layout.mesh.ranks]
        for a, b in itertools.combinations(range(layout.mesh.size), 2):
            if np.array_equal(entries[a], entries[b]):
                assert buffers[a] == buffers[b]
        for axis in layout.mesh.sizes.keys() - set(rule.axes):
            view = next(v for v in (layout.mesh.axes, *layout.mesh.views) if axis in dict(v))
            if set(rule.axes) <= dict(view).keys():
                for group in layout.mesh.groups(axis):
                    assert len({buffers[rank - layout.mesh.offset] for rank in group}) == 1
        for d, dim in enumerate(rule.dims):
            at = {}
            for rank in layout.mesh.ranks:
                coordinate = layout.mesh.coordinate(rank)
                entry, stride = 0, 1
                for axis in dim.axes if isinstance(dim, Sharded) else ():
                    entry, stride = entry + coordinate[axis] * stride, stride * layout.mesh.axis_size(axis)
                absent = any(coordinate[axis] not in values for axis, values in rule.where)
                at[rank] = -1 if absent else entry
                assert (buffers[rank - layout.mesh.offset] is None) == absent
            assert entries[:, d].tolist() == list(at.values())
            for entry in range(len(dim.dims) if isinstance(dim, Sharded) else 1):
                assert layout.ranks_of(rule, d, entry).tolist() == [r for r, e in at.items() if e == entry]


# --- worked examples ----------------------------------------------------------------------------


EXPERTS = Tensor(
    "layers.{layer}.experts.{expert}.up", (4, 6), "bfloat16", (("layer", whole(3)), ("expert", whole(6)))
)


def test_experts_stacked_and_transposed_layers_apart() -> None:
    mesh = Mesh((("tp", 2), ("ep", 3), ("pp", 2)))
    rule = BufferRule(
        "decoder.{layer}.w13",
        (Part(EXPERTS),),
        (
            along(mesh, "pp", lambda r: split(whole(3), (1, 2), r)),
            along(mesh, "ep", lambda r: even(whole(6), 3, r)),
            along(mesh, "tp", lambda r: even(whole(4), 2, r)),
            whole(6),
        ),
        stacked=(1, 3, 2),
        numbers=(("layer", along(mesh, "pp", lambda r: whole((1, 2)[r]))),),
    )
    layout = Layout("x", mesh, (rule,))
    rank = mesh.rank({"tp": 1, "ep": 2, "pp": 1})
    arrays = layout.arrays(rank)
    assert list(arrays) == ["decoder.0.w13", "decoder.1.w13"]
    (buffer,) = layout.buffers(rank)
    assert buffer.shape == (2, 6, 2)
    whole_tensor = np.arange(3 * 6 * 4 * 6).reshape(3, 6, 4, 6)
    stored = walked(layout, rank, {EXPERTS: whole_tensor})["decoder.1.w13"]
    # Layer 2 of the model is number 1 of this stage; experts 4 and 5; rows 2 and 3, transposed.
    np.testing.assert_array_equal(stored, whole_tensor[2, 4:6, 2:4, :].transpose(0, 2, 1))
    assert [str(piece.box) for piece in buffer.pieces()] == ["[1:3, 4:6, 2:4, 0:6]"]
    assert [str(piece.at) for piece in buffer.pieces()] == ["[0:2, 0:2, 0:2, 0:6]"]


def test_a_rank_without_rows_of_a_part_has_no_piece_of_it() -> None:
    mesh = Mesh((("tp", 2),))
    q, k = Tensor("q", (8, 3), "bfloat16"), Tensor("k", (4, 3), "bfloat16")
    fused = along(mesh, "tp", lambda r: even(concat(whole(8, "q"), whole(4, "k")), 2, r))
    layout = Layout("x", mesh, (BufferRule("qk", (Part(q, "q"), Part(k, "k")), (fused, whole(3))),))
    found = [
        [(p.tensor.name, str(p.box), str(p.at)) for b in layout.buffers(r) for p in b.pieces()]
        for r in (0, 1)
    ]
    assert found[0] == [("q", "[0:6, 0:3]", "[0:6, 0:3]")]
    assert found[1] == [("q", "[6:8, 0:3]", "[0:2, 0:3]"), ("k", "[0:4, 0:3]", "[2:6, 0:3]")]


def test_buffers_exist_where_they_are_said_to() -> None:
    mesh = Mesh((("tp", 2), ("pp", 3)), offset=3)
    tensor = Tensor("scalar", (), "float32")
    rule = BufferRule("s", (Part(tensor),), (), where=(("pp", (0, 2)),))
    layout = Layout("x", mesh, (rule,))
    assert [bool(list(layout.buffers(rank))) for rank in mesh.ranks] == [True, True, False, False, True, True]
    assert layout.exists(rule).tolist() == [True, True, False, False, True, True]
    (buffer,) = layout.buffers(3)
    assert (buffer.shape, buffer.numel, len(list(buffer.pieces()))) == ((), 1, 1)


def test_along_takes_its_axes_first_fastest() -> None:
    mesh = Mesh((("tp", 2), ("cp", 3)))
    both = along(mesh, ("cp", "tp"), lambda c, t: whole(10 * c + t))
    assert both.axes == ("cp", "tp")
    assert [len(dim) for dim in both.dims] == [0, 10, 20, 1, 11, 21]
    rule = BufferRule("w", (Part(Tensor("w", (21,), "int8")),), (both,))
    for rank in mesh.ranks:
        buffer = rule.at(mesh, rank)
        assert buffer is not None
        assert buffer.shape == (10 * mesh.coordinate(rank)["cp"] + mesh.coordinate(rank)["tp"],)


def test_two_arrays_of_one_name_are_refused() -> None:
    tensor = Tensor("l.{layer}", (2,), "int8", (("layer", whole(4)),))
    mesh = Mesh(())
    halves = [
        BufferRule(
            f"s.{{layer}}{tail}", (Part(tensor),), (split(whole(4), (2, 2), i), whole(2)), numbers=numbers
        )
        for i, (tail, numbers) in enumerate([("", ()), ("", (("layer", whole(2)),))])
    ]
    with pytest.raises(UnknownNameError, match=r"'s\.0' comes from"):
        Layout("x", mesh, tuple(halves)).arrays(0)


def test_replicated() -> None:
    rule = BufferRule("w", (Part(Tensor("w", (4,), "int8")),), (whole(4),))
    assert [part.replica for part in replicated(rule).parts] == [True]
    assert replicated(rule).dims == rule.dims


# --- refusals -----------------------------------------------------------------------------------

W = Tensor("w", (4, 6), "bfloat16")
V = Tensor("v", (4, 6), "bfloat16")
L = Tensor("l.{layer}", (4,), "bfloat16", (("layer", whole(3)),))
GRID = Mesh((("tp", 2), ("pp", 2)), ((("ep", 4),),))
HALVES = along(GRID, "tp", lambda r: even(whole(4), 2, r))


@pytest.mark.parametrize(
    ("ask", "equation"),
    [
        (lambda: BufferRule("x", (), ()), "parts()"),
        (lambda: BufferRule("x", (Part(W),), (whole(4),)), "dims(1) != index dims + shape dims(2)"),
        (
            lambda: BufferRule("x", (Part(W, "a"), Part(L, "b")), (whole(4), whole(6))),
            "l.{layer}: 2 dims != w: 2 dims",
        ),
        (lambda: BufferRule("x", (Part(W),), (whole(4), whole(6)), stacked=(0,)), "stacked(0,) of 2 dims"),
        (lambda: BufferRule("x", (Part(W),), (whole(4), whole(6)), stacked=(0, 1, 1)), "stacked(0, 1, 1)"),
        (lambda: BufferRule("x", (Part(W),), (whole(4), whole(6)), stacked=(0, 1, 2)), "stacked(0, 1, 2)"),
        (
            lambda: BufferRule("x", (Part(L),), (whole(3), whole(4))),
            "placeholders() != separate index dims(layer)",
        ),
        (
            lambda: BufferRule("x.{layer}", (Part(L),), (whole(3), whole(4)), stacked=(0, 1)),
            "placeholders(layer)",
        ),
        (
            lambda: BufferRule("x.{layer}", (Part(L),), (pad(whole(3), 4), whole(4))),
            "index dim 'layer' has padding",
        ),
        (
            lambda: BufferRule("x.{layer}", (Part(L),), (whole(3), whole(4)), numbers=(("layer", whole(2)),)),
            "numbers of 'layer'",
        ),
        (
            lambda: BufferRule("x", (Part(W),), (whole(4), whole(6)), numbers=(("layer", whole(2)),)),
            "numbers of",
        ),
        (lambda: BufferRule("x", (Part(W, "a"), Part(V, "b")), (whole(4), whole(6))), "labels in dims []"),
        (
            lambda: BufferRule("x", (Part(W, "a"), Part(V, "a")), (whole(4, "a"), whole(6))),
            "parts ['a', 'a']",
        ),
        (
            lambda: BufferRule("x", (Part(W, "a"), Part(V, "b")), (whole(4, "a"), whole(6, "b"))),
            "labels in dims [0, 1]: ['a', 'b']",
        ),
        (lambda: BufferRule("x", (Part(W, "a"), Part(V, "b")), (whole(8, "a"), whole(6))), "['a'] != parts"),
        (
            lambda: BufferRule("x", (Part(W, ""), Part(V, "b")), (concat(whole(4), whole(4, "b")), whole(6))),
            "['', 'b'] != parts",
        ),
        (
            lambda: BufferRule("x", (Part(W),), (HALVES, along(GRID, "tp", lambda r: even(whole(6), 2, r)))),
            "axes(tp, tp)",
        ),
        (lambda: BufferRule("x", (Part(W),), (HALVES, whole(6)), where=(("tp", (0,)),)), "axes(tp, tp)"),
        (
            lambda: BufferRule("x", (Part(W),), (HALVES, whole(6)), where=(("pp", ()),)),
            "axis 'pp': coordinates()",
        ),
        (
            lambda: BufferRule("x", (Part(W),), (HALVES, whole(6)), where=(("pp", (1, 1)),)),
            "coordinates(1, 1)",
        ),
        (
            lambda: Layout("x", Mesh((("tp", 3),)), (BufferRule("x", (Part(W),), (HALVES, whole(6))),)),
            "coordinates(3) != dims(2)",
        ),
        (
            lambda: Layout(
                "x",
                GRID,
                (
                    BufferRule(
                        "x",
                        (Part(W),),
                        (HALVES, along(GRID, "ep", lambda r: split(whole(6), (3, 1, 1, 1), r))),
                    ),
                ),
            ),
            "axes(tp, ep) on mesh",
        ),
    ],
)
def test_rules_that_contradict_themselves_are_refused(ask: object, equation: str) -> None:
    with pytest.raises(BufferRuleError) as caught:
        ask()  # type: ignore[operator]
    error = caught.value
    assert all([error.rule, error.where, error.equation, error.hint])
    assert equation in error.equation


def test_axes_and_coordinates_that_the_mesh_does_not_have_are_refused() -> None:
    missing = BufferRule("x", (Part(W),), (Sharded(("cp",), (whole(4),)), whole(6)))
    with pytest.raises(MeshError, match="axis 'cp' is not among tp, pp"):
        Layout("x", GRID, (missing,))
    nowhere = BufferRule("x", (Part(W),), (HALVES, whole(6)), where=(("pp", (2,)),))
    with pytest.raises(MeshError, match=r"coordinate\(2\) is not in 0\.\.1"):
        Layout("x", GRID, (nowhere,))


@pytest.mark.parametrize(
    ("name", "shape", "index"),
    [
        ("l.{layer}", (2,), ()),
        ("l", (2,), (("layer", whole(2)),)),
        ("l.{layer}.{layer}", (2,), (("layer", whole(2)),)),
        ("l.{layer}", (2,), (("layer", whole(2, "q")),)),
        ("l.{layer}", (2,), (("layer", pad(whole(3), 2)),)),
        ("l.{layer}", (2,), (("layer", Dim([Run("", 0, 4, 2), Run("", 4, 2)])),)),
        ("l", (-2,), ()),
    ],
)
def test_families_that_contradict_themselves_are_refused(
    name: str, shape: tuple[int, ...], index: tuple[tuple[str, Dim], ...]
) -> None:
    with pytest.raises(ModelError):
        Tensor(name, shape, "int8", index)


def test_a_family_of_many_members_costs_nothing() -> None:
    assert Tensor("l.{layer}", (2,), "int8", (("layer", whole(10**12)),)).numel == 2 * 10**12


def test_names_of_a_family() -> None:
    tensor = Tensor(
        "e.{expert}.l.{layer}",
        (2,),
        "int8",
        (("layer", Dim([Run("", 3, 2)])), ("expert", Dim([Run("", 0, 2, 4)]))),
    )
    assert list(tensor.names()) == ["e.0.l.3", "e.4.l.3", "e.0.l.4", "e.4.l.4"]
    assert tensor.member({"layer": 4, "expert": 0}) == "e.0.l.4"
    assert (tensor.num_dims, tensor.numel) == (3, 8)
