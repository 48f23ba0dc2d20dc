"""Affine maps and regions against arrays of every element."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardweave.dialects.affine import exactly, layout, map_of, read, transform_of, write
from shardweave.dialects.affine_views import Views, blocks_of_views
from shardweave.errors import BufferRuleError, ShardweaveError, TransformError
from shardweave.layout import BufferRule, Dim, Layout, Mesh, Part, Run, Tensor, Transform, along, prove
from shardweave.layout.affine import AffineMap, Pieces
from shardweave.layout.affine_layout import layout_of
from shardweave.layout.region import balance, cut, merged
from shardweave.plan import empty, materialise, plan, simulate

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]
Ints = NDArray[np.int64]


@st.composite
def tilings(draw: st.DrawFn, shape: Sequence[int], most: int = 9) -> Boxes:
    """Disjoint boxes that fill a shape, cut again and again."""
    boxes: Boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, most))):
        low, high = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        wide = [d for d in range(len(shape)) if high[d] - low[d] > 1]
        if not wide:
            boxes.append((low, high))
            continue
        d = draw(st.sampled_from(wide))
        at = draw(st.integers(low[d] + 1, high[d] - 1))
        boxes.append((low, (*high[:d], at, *high[d + 1 :])))
        boxes.append(((*low[:d], at, *low[d + 1 :]), high))
    return boxes


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


def columns(boxes: Boxes, dims: int) -> tuple[Ints, Ints]:
    low, high = ([list(box[k]) for box in boxes] for k in (0, 1))
    return np.array(low, dtype=np.int64).reshape(-1, dims), np.array(high, dtype=np.int64).reshape(-1, dims)


def painted(shape: Sequence[int], low: Ints, high: Ints) -> Ints:
    """How often each element of a shape is in a box."""
    number = np.zeros(shape, dtype=np.int64)
    for a, b in zip(low.tolist(), high.tolist(), strict=True):
        number[tuple(slice(x, y) for x, y in zip(a, b, strict=True))] += 1
    return number


# --- regions ------------------------------------------------------------------------------------


@given(st.data())
def test_corners_are_left_exactly_where_elements_are(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    boxes = data.draw(tilings(shape))
    times = data.draw(st.lists(st.integers(-1, 2), min_size=len(boxes), max_size=len(boxes)))
    low, high = columns(boxes, len(shape))
    _, place, number = balance(
        np.zeros(len(boxes) + 1, dtype=np.int64),
        np.concatenate([low, np.zeros((1, len(shape)), dtype=np.int64)]),
        np.concatenate([high, [shape]]),
        np.array([*times, -1], dtype=np.int64),
    )
    held = sum(
        (n * painted(shape, low[i : i + 1], high[i : i + 1]) for i, n in enumerate(times)), start=np.array(-1)
    )
    if not held.any():
        assert not len(place)
    else:
        first = np.argwhere(held)[0]
        assert place[0].tolist() == first.tolist()
        assert number[0] == held[tuple(first)]


@given(st.data())
def test_a_region_has_one_form(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    boxes = data.draw(tilings(shape))
    kept = [box for box in boxes if data.draw(st.booleans())]
    low, high = columns(kept, len(shape))
    number = painted(shape, low, high)
    group = np.zeros(len(kept), dtype=np.int64)
    form = merged(group, low, high)
    assert np.array_equal(painted(shape, *form[1:]), number)
    # However the region is cut: into elements, in any order, or as it already is.
    ones = np.argwhere(number)[:: data.draw(st.sampled_from([1, -1]))]
    for other in (merged(np.zeros(len(ones), dtype=np.int64), ones, ones + 1), merged(*form)):
        assert all(np.array_equal(a, b) for a, b in zip(form, other, strict=True))
    for (a, b), (c, d) in itertools.combinations(zip(form[1].tolist(), form[2].tolist(), strict=True), 2):
        apart = [k for k in range(len(shape)) if (a[k], b[k]) != (c[k], d[k])]
        assert len(apart) > 1 or (b[apart[0]] != c[apart[0]] and d[apart[0]] != a[apart[0]])


@given(st.data())
def test_cut_boxes_are_equal_or_disjoint(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    boxes = [box for _ in range(2) for box in data.draw(tilings(shape, 4)) if data.draw(st.booleans())]
    low, high = columns(boxes, len(shape))
    row, a, b, alike = cut(np.zeros(len(boxes), dtype=np.int64), low, high)
    assert np.array_equal(painted(shape, a, b), painted(shape, low, high))
    assert ((low[row] <= a) & (b <= high[row])).all()
    for i, j in itertools.combinations(range(len(row)), 2):
        both = painted(shape, a[[i, j]], b[[i, j]]).max(initial=0) > 1
        assert (
            both
            == (alike[i] == alike[j])
            == (a[i].tolist() == a[j].tolist() and b[i].tolist() == b[j].tolist())
        )


# --- maps ---------------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn, size: int, ranks: int) -> tuple[list[Dim], bool]:
    """A dim over ranks, in any order, some of it on several of them; and whether some is."""
    bounds = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=6))})
    runs = [Run("", a, b - a) for a, b in itertools.pairwise(bounds)]
    holders = [
        draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=draw(st.sampled_from([1, 1, ranks]))))
        for _ in runs
    ]
    dims = [
        Dim(draw(st.permutations([run for run, held in zip(runs, holders, strict=True) if rank in held])))
        for rank in range(ranks)
    ]
    return dims, any(len(held) > 1 for held in holders)


def evenly(size: int, parts: int) -> list[Dim]:
    bounds = [size * i // parts for i in range(parts + 1)]
    return [Dim([Run("", a, b - a)]) for a, b in itertools.pairwise(bounds)]


@st.composite
def layouts(draw: st.DrawFn, *, most_dims: int = 3) -> tuple[Layout, Tensor]:
    """A tensor over the axis ``tp``, cut in one dim, in none, or in two by a grid of ranks."""
    shape = tuple(draw(st.integers(2, 9)) for _ in range(draw(st.integers(1, most_dims))))
    tensor = Tensor("w", shape, "float32")
    if len(shape) > 1 and draw(st.booleans()):
        outer, inner = draw(st.integers(1, 3)), draw(st.integers(2, 3))
        (first, shared), (second, too) = draw(cuts(shape[0], outer)), draw(cuts(shape[1], inner))
        if shared or too:
            first, second = evenly(shape[0], outer), evenly(shape[1], inner)
        mesh = Mesh((("tp", outer * inner),))
        rules = [
            BufferRule(
                "w",
                (Part(tensor),),
                (first[rank % outer], second[rank // outer], *tensor.dims[2:]),
                where=(("tp", (rank,)),),
            )
            for rank in range(outer * inner)
        ]
        return Layout("affine", mesh, tuple(rules)), tensor
    ranks, dim = draw(st.integers(1, 4)), draw(st.integers(0, len(shape) - 1))
    mesh = Mesh((("tp", ranks),))
    held, shared = draw(cuts(shape[dim], ranks))
    dims: list[Any] = list(tensor.dims)
    dims[dim] = along(mesh, "tp", lambda rank: held[rank])
    return Layout("affine", mesh, (BufferRule("w", (Part(tensor, replica=shared),), tuple(dims)),)), tensor


def told(found: AffineMap) -> list[tuple[Ints, NDArray[Any]]]:
    """For each rank, the element at each place of its shard, and the ranks declared for it."""
    flat = np.arange(int(np.prod(found.shape))).reshape(found.shape)
    shards = []
    for rank, shape in enumerate(found.shards):
        held, sets = np.full(shape, -1, dtype=np.int64), np.full(shape, None, dtype=object)
        pieces = found.of_rank(rank)
        for i in range(len(pieces)):
            at, index = (
                tuple(
                    slice(a, a + n) for a, n in zip(first[i].tolist(), pieces.count[i].tolist(), strict=True)
                )
                for first in (pieces.at, pieces.index)
            )
            assert (held[at] == -1).all()
            held[at] = flat[index]
            sets[at] = np.full(held[at].shape, int(pieces.holders[i]), dtype=object)
        assert (held >= 0).all()
        shards.append((held, sets))
    return shards


@given(layouts())
def test_a_map_says_of_every_element_what_the_layout_says(drawn: tuple[Layout, Tensor]) -> None:
    given_layout, tensor = drawn
    found = map_of(given_layout, tensor)
    flat = np.arange(tensor.numel).reshape(tensor.shape)
    state = materialise(given_layout, {tensor: flat})
    shards = told(found)
    holders = {
        element: tuple(rank for rank, (held, _) in enumerate(shards) if element in held)
        for element in range(tensor.numel)
    }
    for rank, (held, sets) in enumerate(shards):
        assert np.array_equal(held, state[rank]["w"])
        for element, number in zip(held.ravel().tolist(), sets.ravel().tolist(), strict=True):
            assert found.sets[number] == holders[element]


@given(layouts())
def test_maps_and_layouts_and_documents_are_one_another(drawn: tuple[Layout, Tensor]) -> None:
    given_layout, tensor = drawn
    found = map_of(given_layout, tensor)
    made = layout_of(found, tensor, given_layout.mesh)
    prove(made)
    assert map_of(made, tensor) == found
    assert map_of(layout({"w": found}, dtype="float32"), tensor) == found
    document = write({"w": found})
    assert read(document) == {"w": found}
    assert write(read(document)) == document
    values = {tensor: np.arange(tensor.numel, dtype=np.float32).reshape(tensor.shape)}
    state = materialise(given_layout, values)
    moved = simulate(plan(given_layout, made), state, into=empty(made, np.float32, fill=np.nan))
    assert all(moved[rank]["w"].tobytes() == state[rank]["w"].tobytes() for rank in state)


@given(layouts(), st.data())
def test_a_map_does_not_depend_on_how_its_blocks_are_cut(
    drawn: tuple[Layout, Tensor], data: st.DataObject
) -> None:
    found = map_of(*drawn)
    pieces = found.pieces
    rows, offsets, sizes = [], [], []
    for row, count in enumerate(pieces.count.tolist()):
        for low, high in data.draw(tilings(count, 4)):
            rows.append(row)
            offsets.append(low)
            sizes.append([b - a for a, b in zip(low, high, strict=True)])
    order = data.draw(st.permutations(range(len(rows))))
    row, offset, size = (np.array(each, dtype=np.int64)[list(order)] for each in (rows, offsets, sizes))
    parts = Pieces(
        pieces.rank[row],
        pieces.index[row] + offset,
        pieces.at[row] + offset,
        size,
        pieces.holders[row],
        pieces.scale[row],
    )
    again = AffineMap(found.shape, found.shards, parts, [tuple(reversed(ranks)) for ranks in found.sets])
    assert again == found and hash(again) == hash(found)
    assert AffineMap(found.shape, found.shards, found.pieces, found.sets) == found


def is_right(entry: dict[str, Any]) -> bool:
    """Whether a document's map is right, element by element, by the views themselves."""
    shape = entry["logical_shape"]
    numel = int(np.prod(shape))
    held: list[list[tuple[int, tuple[int, ...], float]]] = []
    for each in entry["ranks"].values():
        places: dict[int, tuple[int, tuple[int, ...], float]] = {}
        for p in each["pieces"]:
            for turn in itertools.product(*(range(n) for n in p["shape"])):
                e, at = (
                    p[k][0] + sum(a * b for a, b in zip(turn, p[k][1], strict=True))
                    for k in ("source", "dest")
                )
                if not 0 <= e < numel or at in places:
                    return False
                places[at] = e, tuple(sorted(set(p["locations"]))), p.get("scale", 1.0)
        if sorted(places) != list(range(int(np.prod(each["shard_shape"])))):
            return False
        held.append(list(places.values()))
    for element in range(numel):
        found = [(rank, s, c) for rank, one in enumerate(held) for e, s, c in one if e == element]
        ranks = tuple(rank for rank, _, _ in found)
        if not found or len(set(ranks)) < len(ranks):
            return False
        if any(s != ranks for _, s, _ in found) or len({c for _, _, c in found}) > 1:
            return False
    return True


@given(layouts(most_dims=2), st.data())
def test_a_damaged_map_is_read_exactly_where_it_is_still_right(
    drawn: tuple[Layout, Tensor], data: st.DataObject
) -> None:
    document = copy.deepcopy(write({"w": map_of(*drawn)}))
    entry = document["params"]["^w$"]
    assert is_right(entry)
    ranks = list(entry["ranks"].values())
    full = [each for each in ranks if each["pieces"]]
    pieces = data.draw(st.sampled_from(full))["pieces"]
    number = data.draw(st.integers(0, len(pieces) - 1))
    one = pieces[number]
    side = data.draw(st.sampled_from(["source", "dest"]))
    match data.draw(st.integers(0, 7)):
        case 0:
            del pieces[number]
        case 1:
            pieces.append(copy.deepcopy(one))
        case 2:
            one[side][0] += data.draw(st.integers(-3, 3))
        case 3:
            d = data.draw(st.integers(0, len(one["shape"]) - 1))
            one["shape"][d] += data.draw(st.sampled_from([-1, 1]))
        case 4:
            one["locations"] = sorted(data.draw(st.sets(st.integers(0, len(ranks)), max_size=3)))
        case 5:
            d = data.draw(st.integers(0, len(one["shape"]) - 1))
            one[side][1][d] += data.draw(st.integers(-1, 2))
        case 6:
            other = data.draw(st.sampled_from(pieces))
            one["source"], other["source"] = other["source"], one["source"]
        case 7:
            one["scale"] = data.draw(st.sampled_from([0.5, 1.0, -2.0]))
    try:
        found = read(document)["w"]
    except ShardweaveError as error:
        # What is right and refused is no block: views by other strides than those of the tensor.
        assert not is_right(entry) or isinstance(error, BufferRuleError) or "run into" in error.rule
        return
    assert is_right(entry)
    assert read(write({"w": found})) == {"w": found}


@given(st.data())
def test_strided_views_are_the_blocks_that_numpy_sees(data: st.DataObject) -> None:
    """Any number of axes that go along dims of the whole: blocks at distances, steps, flattened wholes."""
    shape = tuple(data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    flat = np.arange(int(np.prod(shape))).reshape(shape)
    index: list[slice] = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        index.append(
            slice(start, data.draw(st.integers(start + 1, size)), data.draw(st.sampled_from([1, 1, 2, 3])))
        )
    view = flat[tuple(index)]
    strides = [s // flat.itemsize for s in view.strides]
    dense = [int(np.prod(view.shape[d + 1 :])) for d in range(view.ndim)]
    axes = list(zip(view.shape, strides, dense, strict=True))
    # An axis may be written as two, and two that follow one another as one.
    again: list[tuple[int, int, int]] = []
    for n, s, t in axes:
        parts = [k for k in range(2, n) if n % k == 0]
        if parts and data.draw(st.booleans()):
            k = data.draw(st.sampled_from(parts))
            again += [(n // k, s * k, t * k), (k, s, t)]
        elif again and again[-1][1:] == (n * s, n * t) and data.draw(st.booleans()):
            again[-1] = (again[-1][0] * n, s, t)
        else:
            again.append((n, s, t))
    views = Views()
    source, dest = [int(view.ravel()[0]), [a[1] for a in again]], [0, [a[2] for a in again]]
    assert views.add(0, [a[0] for a in again], source, dest)
    blocks = blocks_of_views(views, shape, [view.shape], most=1000, name="w")
    held = np.full(view.shape, -1)
    for i, at, n, _ in zip(*(each.tolist() for each in blocks), strict=True):
        here, there = (tuple(slice(a, a + b) for a, b in zip(first, n, strict=True)) for first in (at, i))
        assert (held[here] == -1).all()
        held[here] = flat[there]
    assert np.array_equal(held, view)


# --- scales -------------------------------------------------------------------------------------


@given(st.integers(-40, 40), st.sampled_from([1.0, -1.0]), st.sampled_from(["fp32", "exp_avg", "exp_avg_sq"]))
def test_a_power_of_two_gives_every_bit_back(exponent: int, sign: float, state: str) -> None:
    scale = sign * 2.0**exponent
    tensor, mesh = Tensor("w", (3, 4), "float32"), Mesh((("tp", 2),))
    rule = BufferRule("w", (Part(tensor),), tensor.dims, transform=Transform("scale", scale))
    found = map_of(Layout("scaled", mesh, (rule,)), tensor)
    assert set(found.pieces.scale.tolist()) == {scale}
    assert layout_of(found, tensor, mesh).rules[0].transform == rule.transform
    transform = transform_of(found, "w", state)
    power = {"fp32": 1, "exp_avg": -1, "exp_avg_sq": -2}[state]
    values = np.random.default_rng(exponent + 40).normal(size=(3, 4)).astype(np.float32)
    values[0, 0], values[1, 1] = np.inf, -0.0
    expected = (values.astype(np.float64) * scale**power).astype(np.float32)
    stored = exactly(transform, values)
    assert stored.tobytes() == expected.tobytes()
    assert exactly(transform, stored, undo=True).tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("dtype", "value", "exponent"),
    [
        ("float32", 1.5e-38, -2),  # becomes subnormal, and an odd one loses its last bit
        ("float32", 1e38, 4),
        ("float16", 6e-5, -11),
        ("float16", 60000.0, 1),
        ("float32", 1.0, -200),
    ],
)
def test_a_value_that_leaves_its_dtype_is_refused(dtype: str, value: float, exponent: int) -> None:
    values = np.array([1.0, value], dtype=dtype)
    values[1] = np.nextafter(values[1], np.array(np.inf, dtype=dtype), dtype=dtype)
    with pytest.raises(TransformError, match="gives every bit back"):
        exactly(Transform("scale", 2.0**exponent), values, name="w")
