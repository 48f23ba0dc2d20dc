"""The laws of fingerprints: an exact definition, additivity, independence of layout, sensitivity."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardweave.errors import DtypeError, FormatError, OutsideError
from shardweave.layout import Box, Layout, exact_sums
from shardweave.layout import fingerprint as module
from shardweave.layout.exact_sums import LANES, MOST_TERMS
from shardweave.layout.fingerprint import (
    MODULUS,
    NOTHING,
    PLACE_DIM,
    SEGMENT,
    SEGMENT_DIM,
    Fingerprint,
    fingerprint,
    held,
    lanes_of,
    numbers,
    places,
    total_of,
)
from shardweave.plan import materialise
from shardweave.testing.strategies import layouts

SIZES = (1, 2, 4, 8)
each_size = pytest.mark.parametrize("size", SIZES)


BYTES = 4 * SEGMENT
"""Of a segment."""


@pytest.fixture(params=["numpy", "numba"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What multiplies: numpy, and numba from the first byte."""
    if request.param == "numpy":
        monkeypatch.setattr(exact_sums, "_loaded", lambda: None)
    else:
        assert exact_sums.compiled() is not None, "numba is among the requirements of the tests"
    return str(request.param)


def number(key: int, dim: int, index: int) -> list[int]:
    return [int(n) for n in numbers(key, dim, np.array([[index]]))[0, 0]]


def by_definition(elements: NDArray[np.generic], box: Box, key: int = 0) -> Fingerprint:
    """The sum that the module states, in Python's integers and byte by byte: the highest has the sign."""
    size = elements.dtype.itemsize
    lanes = [0] * LANES
    for place, index in zip(np.ndindex(elements.shape), itertools.product(*box.dims), strict=True):
        *outer, column = index
        for i, byte in enumerate(int(elements[place]).to_bytes(size, "little")):
            word, within = divmod(column * size + i, 4)
            segment, at = divmod(word, SEGMENT)
            factors = [number(key, d, n) for d, n in enumerate(outer)]
            factors += [number(key, SEGMENT_DIM, segment), places(key)[:, at].tolist()]
            value = (byte - 256 * (byte > 127 and within == 3)) << 8 * within
            for lane in range(LANES):
                lanes[lane] += value * math.prod(each[lane] for each in factors)
    return Fingerprint(tuple(lane % MODULUS for lane in lanes))


def random_words(shape: tuple[int, ...], size: int, seed: int = 0) -> NDArray[np.generic]:
    raw = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * size), dtype=np.uint8)
    return raw.view(f"u{size}")


def corner(words: NDArray[np.generic]) -> Box:
    return Box.of((0,) * words.ndim, words.shape)


# --- the definition -----------------------------------------------------------------------------


@each_size
@pytest.mark.parametrize(
    "dims",
    [
        (range(2), range(3), range(9)),
        (range(3, 9, 3), range(1, 4), range(5, 32, 3)),
        (range(7, 9), range(2, 5), range(BYTES // 8 - 4, BYTES // 8 + 5)),  # segments of 8-byte elements
        (range(7, 9), range(2, 5), range(BYTES - 7, BYTES + 2)),
        (range(2), range(3), range(BYTES - 401, BYTES + 400, 100)),
        (range(4094, 4098), range(5)),  # numbers that are kept apart
        (range(0, 30001, 10000), range(5)),
    ],
    ids=str,
)
def test_the_sum_is_the_defined_one(size: int, dims: tuple[range, ...]) -> None:
    box = Box(dims)
    words = random_words(box.shape, size)
    assert fingerprint(words, box, key=5) == by_definition(words, box, key=5)


@each_size
@pytest.mark.parametrize("word", [0, 1, -1], ids=["zeros", "ones", "all bits"])
def test_extreme_words_stay_exact(size: int, word: int) -> None:
    words = np.full((3, 600 // size), word & (1 << 8 * size) - 1, dtype=f"u{size}")
    assert fingerprint(words) == by_definition(words, corner(words))
    assert (fingerprint(words) == NOTHING) == (word == 0)


@pytest.mark.parametrize("word", [-(1 << 31), (1 << 31) - 1])
@pytest.mark.parametrize("place", [-(1 << 21), (1 << 21) - 1])
def test_the_largest_sums_stay_exact(word: int, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole segment of the extreme words and numbers of one sign, in as many rows as are summed at once."""
    table = np.full((LANES, SEGMENT), place, dtype=np.int32)
    monkeypatch.setattr(module, "places", lambda key: table)
    monkeypatch.setattr(module, "numbers", lambda key, dim, i: np.full((*i.shape, LANES), 1 << 27))
    rows = MOST_TERMS // 2
    words = np.broadcast_to(np.full(SEGMENT, word, np.int32), (rows, SEGMENT))
    wanted = place * word * SEGMENT * rows * 2**54 % MODULUS
    assert fingerprint(words).lanes == (wanted,) * LANES


def test_the_largest_sums_are_folded_exactly() -> None:
    for one in (-(1 << 62), 1 << 62, MODULUS - 1):
        sums = np.full((2, MOST_TERMS, 3, LANES), one)
        found = module._fold(sums, np.full((1, MOST_TERMS, LANES), 1 << 27))
        assert (found == MOST_TERMS * 2**27 * one % MODULUS).all()


@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 3), st.booleans())
def test_both_ways_to_sum_are_the_same(count: int, width: int, offset: int, turn: bool) -> None:
    """For rows of any alignment and strides, also those that nobody may write to."""
    memory = np.random.default_rng(width).integers(0, 256, 4 * count * (width + 1) + 3, dtype=np.uint8)
    rows = memory[offset : offset + 4 * count * (width + 1)].view(np.int32).reshape(count, -1)[:, :width]
    rows = rows[::-1] if turn else rows
    rows.flags.writeable = False
    table = places(1)[:, :width]
    assert exact_sums.compiled() is not None
    expected = rows.astype(int) @ table.T.astype(int)
    assert np.array_equal(exact_sums.row_sums(rows, table), expected)
    assert np.array_equal(exact_sums.row_sums_in_doubles(rows, table), expected)


@pytest.mark.parametrize("kernel", ["numba"], indirect=True)
@pytest.mark.parametrize("how", ["absent", "broken", "off"])
def test_without_numba_numpy_does_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = random_words((300, 2 * BYTES), 1)
    assert words.nbytes > exact_sums._WORTH_BYTES
    expected = fingerprint(words)
    exact_sums.compiled.cache_clear()
    said = contextlib.nullcontext()
    if how == "absent":
        monkeypatch.setitem(sys.modules, "numba", None)
    elif how == "off":
        monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    else:

        def no_library(*signature: object, **options: object) -> None:
            raise OSError("Could not find/load shared object file")

        monkeypatch.setattr("numba.njit", no_library)
        said = pytest.warns(UserWarning, match="numba fails, so numpy takes fingerprints: Could not find")
    try:
        with said:
            assert fingerprint(words) == expected
        assert exact_sums._loaded() is None
        assert fingerprint(words) == expected
    finally:
        exact_sums.compiled.cache_clear()


def test_numbers_are_never_zero_and_use_their_whole_range() -> None:
    drawn = numbers(3, 1, np.arange(1 << 16)[None])[0]
    assert drawn.min() > 0 and drawn.max() <= 1 << 27
    # Mean and spread of uniform numbers, and lanes that know nothing of each other.
    unit = drawn / (1 << 27)
    assert abs(unit.mean() - 0.5) < 0.01 and abs(unit.std() - 1 / 12**0.5) < 0.01
    assert unit.min() < 0.001 and unit.max() > 0.999
    assert np.abs(np.corrcoef(unit.T) - np.eye(LANES)).max() < 0.025
    assert not np.array_equal(numbers(3, 2, np.arange(9)[None])[0], drawn[:9])
    assert not np.array_equal(numbers(4, 1, np.arange(9)[None])[0], drawn[:9])


def test_numbers_of_places_are_what_the_bound_needs() -> None:
    drawn = places(3).astype(int)
    assert drawn.shape == (LANES, SEGMENT) and drawn.min() >= -(1 << 21) and drawn.max() < 1 << 21
    unit = drawn / (1 << 21)
    assert abs(unit.mean()) < 0.05 and abs(unit.std() - 2 / 12**0.5) < 0.05
    assert np.abs(np.corrcoef(unit) - np.eye(LANES)).max() < 0.08
    # Modulo 2 any three words in a row are the unit matrix, turned: no change of them is lost in all lanes.
    for at in range(SEGMENT - LANES + 1):
        assert (np.roll(drawn[:, at : at + LANES] % 2, at % LANES, axis=1) == np.eye(LANES)).all()
    # Hardly any number twice: they are of many.
    assert len(np.unique(drawn)) > 0.99 * drawn.size
    assert not np.array_equal(places(4), drawn) and PLACE_DIM != SEGMENT_DIM


# --- additivity ---------------------------------------------------------------------------------


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that tile it: halved again and again, at an index or by every other index."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    boxes = [Box.of((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        dim = box.dims[d]
        at = draw(st.integers(0, len(dim)))
        halves = (dim[::2], dim[1::2]) if draw(st.booleans()) else (dim[:at], dim[at:])
        boxes += [Box((*box.dims[:d], half, *box.dims[d + 1 :])) for half in halves if len(half)]
    return shape, boxes


def inside(words: NDArray[np.generic], box: Box) -> NDArray[np.generic]:
    return words[tuple(slice(dim.start, dim.stop, dim.step) for dim in box.dims)]


@given(tilings(), st.sampled_from(SIZES), st.integers(0, 1 << 64))
def test_tiles_add_up_to_the_whole(tiling: tuple[tuple[int, ...], list[Box]], size: int, key: int) -> None:
    shape, boxes = tiling
    words = random_words((*shape, 1), size)[..., 0]
    total = NOTHING
    for box in boxes:
        total += fingerprint(inside(words, box), box, key=key)
    assert total == fingerprint(words, key=key)


def stacked(words: NDArray[np.generic], boxes: list[Box], key: int = 0) -> list[Fingerprint]:
    """The fingerprints of parts that differ in any dim but the last, taken at once."""
    outer = [np.array(each) for each in list(zip(*(box.dims for box in boxes), strict=True))[:-1]]
    outer = [each[:1] if (each == each[0]).all() else each for each in outer]
    lanes = lanes_of(words, outer, boxes[0].dims[-1], key=key)
    assert total_of(lanes) == sum((Fingerprint(tuple(row)) for row in lanes.tolist()), NOTHING)
    return [Fingerprint(tuple(row)) for row in lanes.tolist()]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5),
    st.integers(0, 2),
    st.sampled_from(SIZES),
)
def test_stacked_parts_are_what_each_is(at: list[tuple[int, int]], columns: int, size: int) -> None:
    boxes = [Box.of((layer, row, 3), (1, 4, columns)) for layer, row in at]
    words = random_words((len(at), 1, 4, max(columns, 1)), size)[..., :columns]
    each = [fingerprint(part, box, key=3) for part, box in zip(words, boxes, strict=True)]
    assert stacked(words, boxes, key=3) == each


def test_more_rows_than_are_weighted_at_once_add_up() -> None:
    """Halves of parts, of rows, and of planes, and rows that are no one matrix as they lie."""
    words = random_words((3, 2, 5000, 8), 2)
    boxes = [Box.of((layer, 7, 0), (2, 5000, 8)) for layer in (5, 1, 9)]
    found = stacked(words, boxes)
    rows = [Box.of((layer, 7 + r, 0), (2, 2500, 8)) for layer in (5, 1, 9) for r in (0, 2500)]
    halves = [fingerprint(words[i // 2, :, i % 2 * 2500 :][:, :2500], r) for i, r in enumerate(rows)]
    assert [a + b for a, b in zip(halves[::2], halves[1::2], strict=True)] == found
    assert stacked(words.swapaxes(1, 2).copy().swapaxes(1, 2), boxes) == found
    many = [Box.of((i, 0), (1, 3)) for i in range(5000)]
    words = random_words((5000, 1, 3), 4)
    assert sum(stacked(words, many), NOTHING) == fingerprint(words[:, 0])


@each_size
def test_blocks_of_any_size_add_up(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, segments and gathered rows in the smallest blocks that there are."""
    words = random_words((2, 5, 3 * BYTES // size + 7), size)
    gathered = words.swapaxes(0, 2).copy().swapaxes(0, 2)
    box = Box((range(2), range(5), range(3, 2 * words.shape[2] + 3, 2)))
    expected, stepped = fingerprint(words), fingerprint(words, box)
    for name, value in {"MOST_TERMS": 4, "_LEAST_ROWS": 2, "_TILE": 3, "_STRIP": 2}.items():
        monkeypatch.setattr(module, name, value)
    assert fingerprint(words) == fingerprint(gathered) == expected
    assert fingerprint(words, box) == fingerprint(gathered, box) == stepped


def test_long_rows_add_up_across_segments() -> None:
    width = 5 * BYTES // 4
    words = random_words((2, width), 2)  # two segments and a half
    for at in (1, BYTES // 2 - 1, BYTES // 2, BYTES + 1):
        left, right = Box.of((0, 0), (2, at)), Box.of((0, at), (2, width - at))
        assert fingerprint(words[:, :at], left) + fingerprint(words[:, at:], right) == fingerprint(words)


def test_a_difference_is_what_is_left() -> None:
    words = random_words((4, 6), 2)
    box = Box.of((1, 0), (2, 6))
    rest = words.copy()
    rest[1:3] = 0
    assert fingerprint(words) - fingerprint(words[1:3], box) == fingerprint(rest)


# --- independence of layout ---------------------------------------------------------------------


@each_size
def test_strides_and_dtype_play_no_part(size: int) -> None:
    words = random_words((5, 6, 8), size)
    expected = fingerprint(words)
    assert fingerprint(np.asfortranarray(words)) == expected
    assert fingerprint(np.ascontiguousarray(words.transpose(2, 0, 1)).transpose(1, 2, 0)) == expected
    assert fingerprint(words[::-1].copy()[::-1]) == expected
    assert fingerprint(words.view(f"i{size}")) == expected
    padded = np.zeros((5, 6, 11), words.dtype)
    padded[..., 3:] = words
    assert fingerprint(padded[..., 3:]) == expected
    unaligned = np.zeros(words.nbytes + 1, np.uint8)[1:]
    unaligned[:] = words.reshape(-1).view(np.uint8)
    assert fingerprint(unaligned.view(words.dtype).reshape(words.shape)) == expected


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.bool]
)
def test_a_torch_tensor_is_seen_in_place(dtype: torch.dtype) -> None:
    values = torch.arange(60).reshape(5, 12).to(dtype)
    expected = fingerprint(values.view(torch.uint8).numpy().view(f"u{values.element_size()}"))
    assert fingerprint(values) == expected
    assert fingerprint(values.T.contiguous().T) == expected
    assert fingerprint(values[:, 1::2], Box((range(5), range(1, 12, 2)))) != expected


@given(layouts())
def test_ranks_add_up_to_the_whole_in_any_layout(layout: Layout) -> None:
    values = {
        tensor: random_words((*(len(dim) for dim in tensor.dims), 1), 4, seed)[..., 0]
        for seed, tensor in enumerate(layout.tensors)
    }
    state = materialise(layout, values, fill=0xDEAD)
    for tensor, words in values.items():
        boxes = itertools.product(
            *([range(r.start, r.last + 1, r.step) for r in dim.runs] for dim in tensor.dims)
        )
        numbers = [[i for _, i in dim] for dim in tensor.dims]
        whole = NOTHING
        for ranges in boxes:
            places = (
                slice(n.index(r[0]), n.index(r[0]) + len(r)) for n, r in zip(numbers, ranges, strict=True)
            )
            whole += fingerprint(words[tuple(places)], Box(ranges), key=7)
        found = NOTHING
        for rule in layout.rules:
            seen = set()
            for rank in layout.mesh.ranks:
                coordinate = layout.mesh.coordinate(rank)
                place = tuple(coordinate[axis] for axis in rule.axes)
                if place not in seen and tensor in {part.tensor for part in rule.parts}:
                    seen.add(place)
                    buffer = rule.at(layout.mesh, rank)
                    assert buffer is not None
                    found += held(buffer, state[rank], key=7)[tensor]
        assert found == whole


# --- sensitivity --------------------------------------------------------------------------------


@each_size
def test_every_flipped_bit_is_seen(size: int) -> None:
    words = random_words((3, 5), size)
    before = fingerprint(words)
    for place in np.ndindex(words.shape):
        for bit in range(8 * size):
            changed = words.copy()
            changed[place] ^= np.array(1 << bit, dtype=words.dtype)
            assert fingerprint(changed) != before


@each_size
def test_every_swap_of_two_words_is_seen(size: int) -> None:
    words = random_words((3, 4, 5), size)
    before = fingerprint(words)
    flat = words.reshape(-1)
    for a, b in itertools.combinations(range(flat.size), 2):
        if flat[a] != flat[b]:
            changed = flat.copy()
            changed[[a, b]] = changed[[b, a]]
            assert fingerprint(changed.reshape(words.shape)) != before


@pytest.mark.parametrize("sign", [1 << 15, 1 << 31, 1 << 63], ids=["2 bytes", "4 bytes", "8 bytes"])
def test_a_swap_of_words_that_differ_in_the_sign_is_seen(sign: int) -> None:
    """The change that sums modulo a power of two see least of."""
    size = sign.bit_length() // 8
    words = np.zeros((2, 64), dtype=f"u{size}")
    seen = set()
    for place in np.ndindex(words.shape):
        words[...] = 0
        words[place] = sign
        seen.add(fingerprint(words))
    assert len(seen) == words.size


@each_size
def test_every_swap_of_rows_and_of_columns_is_seen(size: int) -> None:
    words = random_words((4, 5, 6), size)
    seen = {fingerprint(words)}
    orders = 0
    for d in range(words.ndim):
        for a, b in itertools.combinations(range(words.shape[d]), 2):
            order = list(range(words.shape[d]))
            order[a], order[b] = b, a
            seen.add(fingerprint(np.take(words, order, axis=d)))
            orders += 1
    assert len(seen) == orders + 1


def test_equal_content_elsewhere_is_another() -> None:
    words = random_words((2, 3, 4), 2)
    boxes = [Box.of(at, words.shape) for at in itertools.product((0, 1, 9), (0, 5), (0, 1, 2, 8192))]
    assert len({fingerprint(words, box) for box in boxes}) == len(boxes)


def test_other_keys_are_other_fingerprints() -> None:
    words = random_words((2, 3), 4)
    assert len({fingerprint(words, key=key) for key in (0, 1, 2, 1 << 63)}) == 4


# --- refusals and form --------------------------------------------------------------------------


def test_the_group_and_its_bytes() -> None:
    a, b = fingerprint(random_words((2, 3), 2)), fingerprint(random_words((2, 3), 2, 1))
    assert a + b - b == a and a - a == NOTHING and a + NOTHING == a
    assert Fingerprint.decode(bytes(a)) == a


@pytest.mark.parametrize("data", [b"", bytes(23), bytes(25), b"\xff" * 24])
def test_bytes_of_no_fingerprint_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="residue"):
        Fingerprint.decode(data)


def test_other_shapes_and_words_are_refused() -> None:
    with pytest.raises(OutsideError, match=r"array\(2, 3\) != box\(3, 2\)"):
        fingerprint(np.zeros((2, 3)), Box.of((0, 0), (3, 2)))
    for wrong in (
        np.zeros(3, np.complex128),
        np.zeros(3, ">f4"),
        np.zeros(3, object),
        torch.zeros(3, dtype=torch.complex128),
    ):
        with pytest.raises(DtypeError):
            fingerprint(wrong)
    assert fingerprint(np.zeros((0, 3))) == NOTHING
    rows, some = np.arange(2)[None], np.zeros((3, 2), dtype=np.int64)
    for outer in ([], [rows, rows], [rows[:, :1]], [some[:2]]):
        with pytest.raises(OutsideError, match="stacked parts"):
            lanes_of(np.zeros((3, 2, 4)), outer, range(4))
    assert not lanes_of(np.zeros((3, 2, 4)), [rows], range(4)).any()


def test_memory_that_cannot_be_written_is_read() -> None:
    words = random_words((5, 6), 2)
    frozen = np.frombuffer(words.tobytes(), words.dtype).reshape(words.shape)
    assert fingerprint(frozen) == fingerprint(words)
