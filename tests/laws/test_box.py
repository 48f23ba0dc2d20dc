"""Boxes against sets of indices, flat intervals against numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import boxes, ranges

from shardweave.errors import OutsideError
from shardweave.layout import Box, contiguous_runs, flat_boxes, flat_interval, intersect, subtract
from shardweave.layout.box import indices, intersect_range

pairs = st.integers(0, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n)))
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(list(dim) for dim in box.dims)))


def flat(shape: tuple[int, ...], box: Box) -> list[int]:
    whole = np.arange(math.prod(shape)).reshape(shape)
    return whole[tuple(slice(dim.start, dim.stop, dim.step) for dim in box.dims)].ravel().tolist()


@st.composite
def boxes_inside(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = draw(shapes)
    dims = []
    for size in shape:
        start = draw(st.integers(0, size))
        dims.append(range(start, draw(st.integers(start, size)), draw(st.sampled_from([1, 1, 2, 3]))))
    return shape, Box(tuple(dims))


@given(pairs)
def test_a_box_is_its_elements(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert len(elements(a)) == a.numel == math.prod(a.shape) == len(list(indices(a)))
    assert list(indices(a)) == sorted(elements(a))
    assert all(index in a for index in elements(a))
    assert [index in a for index in elements(b)] == [index in elements(a) for index in elements(b)]
    if a.numel and b.numel:
        assert (a == b) == (elements(a) == elements(b))
        assert a.offset == tuple(min(index[i] for index in elements(a)) for i in range(len(a.dims)))


def test_a_scalar_has_one_element() -> None:
    scalar = Box(())
    assert (scalar.numel, scalar.shape, () in scalar, (0,) in scalar) == (1, (), True, False)
    assert intersect(scalar, scalar) == scalar
    assert subtract(scalar, scalar) == []
    assert flat_boxes((), 0, 1) == [scalar]
    assert flat_boxes((), 0, 0) == []
    assert flat_interval((), scalar) == (0, 1)
    assert contiguous_runs((), scalar) == (1, 1)


def test_boxes_of_the_same_elements_are_equal() -> None:
    assert Box((range(0, 5, 2),)) == Box((range(0, 6, 2),)) == Box((range(0, 5, 2),))
    assert Box((range(3, 4, 7),)) == Box((range(3, 4),))
    assert Box((range(5, 5),)) == Box((range(9, 2),)) == Box((range(0),))
    assert Box.of((2, 3), (4, 0)).shape == (4, 0)
    assert hash(Box((range(0, 5, 2),))) == hash(Box((range(0, 6, 2),)))


@given(ranges, ranges)
def test_intersection_of_ranges(a: range, b: range) -> None:
    assert list(intersect_range(a, b)) == sorted(set(a) & set(b))


SHORT = sorted(
    {range(a, b, step) for a in range(7) for b in range(a, 8) for step in (1, 2, 3)},
    key=lambda r: (r.start, len(r)),
)


def test_every_pair_of_short_ranges() -> None:
    for a, b in itertools.product(SHORT, repeat=2):
        common = sorted(set(a) & set(b))
        assert list(intersect_range(a, b)) == common
        rest = [i for box in subtract(Box((a,)), Box((b,))) for i in box.dims[0]]
        assert sorted(rest) == sorted(set(a) - set(b))


def test_intersection_costs_no_walk() -> None:
    a, b = range(1, 10**15, 10**6), range(3, 10**15, 10**6 + 1)
    common = intersect_range(a, b)
    assert common.step == 10**6 * (10**6 + 1)
    assert common[0] in a and common[0] in b and common[-1] in a and common[-1] in b
    assert intersect_range(range(0, 10**15, 4), range(1, 10**15, 6)) == range(0)


@given(pairs)
def test_intersect(pair: tuple[Box, Box]) -> None:
    common = intersect(*pair)
    assert (elements(common) if common else set()) == elements(pair[0]) & elements(pair[1])


@given(pairs)
def test_subtract(pair: tuple[Box, Box]) -> None:
    rest = subtract(*pair)
    assert sum(box.numel for box in rest) == len(set().union(*map(elements, rest)))
    assert set().union(*map(elements, rest)) == elements(pair[0]) - elements(pair[1])
    assert all(box.numel for box in rest)


@given(shapes, st.data())
def test_flat_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(start, math.prod(shape)))
    found = flat_boxes(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert [i for box in found for i in flat(shape, box)] == list(range(start, stop))
    at = start
    for box in found:
        assert flat_interval(shape, box) == (at, at + box.numel)
        at += box.numel


@pytest.mark.parametrize("shape", [(2, 3), (3, 1, 2), (2, 2, 3), (4,)])
def test_flat_boxes_of_every_interval(shape: tuple[int, ...]) -> None:
    most = 0
    for start in range(math.prod(shape) + 1):
        for stop in range(start, math.prod(shape) + 1):
            found = flat_boxes(shape, start, stop)
            assert [i for box in found for i in flat(shape, box)] == list(range(start, stop))
            most = max(most, len(found))
    assert most <= 2 * len(shape) - 1


def test_the_bound_of_flat_boxes_is_reached() -> None:
    assert len(flat_boxes((4, 5, 6), 7, 113)) == 5


def check_storage(shape: tuple[int, ...], box: Box) -> None:
    found = flat(shape, box)
    one_stretch = bool(found) and found == list(range(found[0], found[0] + len(found)))
    assert flat_interval(shape, box) == ((found[0], found[-1] + 1) if one_stretch else None)
    count, length = contiguous_runs(shape, box)
    assert count * length == len(found)
    for start in range(0, len(found), max(length, 1)):
        assert found[start : start + length] == list(range(found[start], found[start] + length))
    if all(dim.step == 1 for dim in box.dims) and found:
        # Without steps the stretches are as long as they can be.
        assert count == 1 + sum(b != a + 1 for a, b in itertools.pairwise(found))


@given(boxes_inside())
def test_storage(case: tuple[tuple[int, ...], Box]) -> None:
    check_storage(*case)


@pytest.mark.parametrize("shape", [(2, 3, 2), (3, 2, 3), (2, 1, 4), (5, 3)])
def test_storage_of_every_box(shape: tuple[int, ...]) -> None:
    slices = [
        {range(a, b, step) for a in range(n + 1) for b in range(a, n + 1) for step in (1, 2)} for n in shape
    ]
    for box in {Box(dims) for dims in itertools.product(*slices)}:
        check_storage(shape, box)


@pytest.mark.parametrize(
    ("ask", "equation"),
    [
        (lambda: Box((range(4, 0, -1),)), "step(-1)"),
        (lambda: Box((range(3), range(-1, 4))), "start(-1)"),
        (lambda: Box.of((1,), (-2,)), "shape(-2,)"),
        (lambda: flat_boxes((2, 3), 2, 7), "stop(7) <= numel(6)"),
        (lambda: flat_boxes((2, 3), 3, 2), "start(3) <= stop(2)"),
        (lambda: flat_boxes((2, 3), -1, 2), "start(-1)"),
    ],
)
def test_what_lies_outside_is_refused(ask: object, equation: str) -> None:
    with pytest.raises(OutsideError) as caught:
        ask()  # type: ignore[operator]
    error = caught.value
    assert all([error.rule, error.where, error.equation, error.hint])
    assert equation in error.equation
