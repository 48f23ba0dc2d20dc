"""Dims: one form for one index sequence, and each way of partitioning against plain lists."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Item, dims, groupings, items_of, labels, regrouped, runs

from shardweave.errors import CutError, OutsideError
from shardweave.layout import (
    PAD,
    Dim,
    Run,
    balanced,
    chunk,
    concat,
    cut,
    even,
    interleave,
    pad,
    parse_dim,
    relabel,
    repeat,
    select,
    split,
    take,
    whole,
)

HUGE = 10**12


def stated_form(items: list[Item]) -> tuple[Run, ...]:
    """The canonical runs by the two rules of `run.py`, index by index."""
    stretches: list[list[Item]] = []
    for label, index in items:
        if (
            stretches
            and stretches[-1][-1] in ((label, index - 1), (PAD, 0))
            and stretches[-1][-1][0] == label
        ):
            stretches[-1].append((label, index))
        else:
            stretches.append([(label, index)])
    found: list[Run] = []
    at = 0
    while at < len(stretches):
        label, first = stretches[at][0]
        if label is PAD or len(stretches[at]) > 1:
            found.append(Run(label, first, len(stretches[at])))
            at += 1
            continue
        singles = []
        for stretch in stretches[at:]:
            if len(stretch) > 1 or stretch[0][0] != label:
                break
            singles.append(stretch[0][1])
        n = 1
        step = singles[1] - singles[0] if len(singles) > 2 else 0
        while step > 1 and n < len(singles) and singles[n] - singles[n - 1] == step:
            n += 1
        n = n if n >= 3 else 1
        found.append(Run(label, first, n, step if n > 1 else 1))
        at += n
    return tuple(found)


# --- one form -----------------------------------------------------------------------------------


@given(st.data(), st.lists(runs(), max_size=8))
def test_the_form_depends_on_the_indices_alone(data: st.DataObject, drawn: list[Run]) -> None:
    items = items_of(drawn)
    assert list(Dim(drawn)) == items
    assert Dim(data.draw(regrouped(items))) == Dim(drawn)
    assert Dim(drawn).runs == stated_form(items)


@given(st.lists(runs(), max_size=5), st.lists(runs(), max_size=5))
def test_dims_are_equal_exactly_when_their_indices_are(a: list[Run], b: list[Run]) -> None:
    assert (Dim(a) == Dim(b)) == (items_of(a) == items_of(b))


def test_every_grouping_of_every_short_sequence_has_one_form() -> None:
    # 0, 2, 4 make progressions, 1 makes stretches with 0 and 2, "a" and padding break both.
    alphabet: list[Item] = [("", 0), ("", 2), ("", 4), ("", 1), ("a", 2), (PAD, 0)]
    compared = 0
    for length in range(7):
        for sequence in itertools.product(alphabet, repeat=length):
            items = list(sequence)
            expected = stated_form(items)
            for grouping in groupings(items):
                assert Dim(grouping).runs == expected, grouping
                compared += 1
    assert compared > 6**6


@given(dims())
def test_a_form_is_its_own_form(dim: Dim) -> None:
    assert Dim(dim.runs) == dim
    assert Dim(Run(label, index, 1) for label, index in dim) == dim
    assert hash(Dim(dim.runs)) == hash(dim)


@given(dims())
def test_a_dim_is_a_sequence(dim: Dim) -> None:
    items = list(dim)
    assert len(dim) == len(items)
    assert [dim[i] for i in range(-len(items), len(items))] == items + items
    assert dim.labels == tuple(dict.fromkeys(label for label, _ in items if label is not PAD))
    for run, at in zip(dim.runs, dim.positions, strict=True):
        assert items[at : at + run.count] == items_of([run])
    for label in dim.labels:
        assert list(dim.only(label)) == [item for item in items if item[0] == label]
    for position in (len(items), -len(items) - 1):
        with pytest.raises(OutsideError, match=f"position\\({position}\\)"):
            dim[position]


def test_the_cost_is_in_runs() -> None:
    assert Dim([Run("", 0, HUGE), Run("", HUGE, HUGE)]) == whole(2 * HUGE)
    assert Dim([Run("", 5, HUGE, 7), Run("", 5 + 7 * HUGE, 2, 7)]).runs == (Run("", 5, HUGE + 2, 7),)
    dim = concat(whole(4 * HUGE, "q"), whole(2 * HUGE, "k"))
    assert even(dim, 2, 1).runs == (Run("q", 3 * HUGE, HUGE), Run("k", 0, 2 * HUGE))
    assert select(dim, Dim([Run("", 0, 2 * HUGE, 3)])).runs == (
        Run("q", 0, (4 * HUGE + 2) // 3, 3),
        Run("k", -(4 * HUGE) % 3, 2 * HUGE - (4 * HUGE + 2) // 3, 3),
    )
    assert interleave(whole(2 * HUGE, "a"), whole(2 * HUGE, "b"), block=HUGE)[3 * HUGE] == ("b", HUGE)
    assert len(pad(whole(HUGE + 1), HUGE)) == 2 * HUGE
    assert repeat(whole(2 * HUGE), 3, block=HUGE)[5 * HUGE - 1] == ("", 2 * HUGE - 1)


# --- ways of partitioning, against plain lists --------------------------------------------------


@given(dims(), dims())
def test_concat(a: Dim, b: Dim) -> None:
    assert list(concat(a, b)) == list(a) + list(b)
    assert concat() == Dim()


@given(dims(), st.data())
def test_cut(dim: Dim, data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(dim)))
    start = data.draw(st.integers(0, stop))
    assert list(cut(dim, start, stop)) == list(dim)[start:stop]


@given(dims(), st.lists(st.integers(0, 30), max_size=4))
def test_split(dim: Dim, cuts: list[int]) -> None:
    edges = [0, *sorted(min(c, len(dim)) for c in cuts), len(dim)]
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    parts = [split(dim, sizes, i) for i in range(len(sizes))]
    assert [list(part) for part in parts] == [list(dim)[a:b] for a, b in itertools.pairwise(edges)]
    assert concat(*parts) == dim


@given(dims(), st.integers(1, 4), st.integers(1, 3))
def test_even(dim: Dim, parts: int, block: int) -> None:
    padded = pad(dim, parts * block)
    items, size = list(padded), len(padded) // parts
    for part in range(parts):
        expected = items[part * size : (part + 1) * size]
        assert list(even(padded, parts, part, block=block)) == expected
        assert split(padded, [size] * parts, part) == even(padded, parts, part)


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("size", range(14))
@pytest.mark.parametrize("parts", range(1, 9))
def test_chunk_and_balanced_are_torchs(size: int, parts: int, block: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rows = torch.arange(size * block).reshape(size, block)
    chunks = [part.flatten().tolist() for part in torch.chunk(rows, parts)]
    chunks += [[]] * (parts - len(chunks))
    splits = [part.flatten().tolist() for part in torch.tensor_split(rows, parts)]
    dim = whole(size * block)
    assert [[i for _, i in chunk(dim, parts, r, block=block)] for r in range(parts)] == chunks
    assert [[i for _, i in balanced(dim, parts, r, block=block)] for r in range(parts)] == splits


@given(dims(), st.integers(1, 3), st.data())
def test_take(dim: Dim, block: int, data: st.DataObject) -> None:
    dim = pad(dim, block)
    items, count = list(dim), len(dim) // block
    ids = data.draw(st.lists(st.integers(0, count - 1), max_size=6)) if count else []
    expected = [item for i in ids for item in items[i * block : (i + 1) * block]]
    assert list(take(dim, ids, block)) == expected


@st.composite
def chains(draw: st.DrawFn) -> tuple[Dim, Dim, Dim]:
    """Three dims that compose: positions of the second in the first, of the third in the second."""

    def inside(size: int) -> Dim:
        found = []
        for _ in range(draw(st.integers(0, 5))):
            if draw(st.integers(0, 9)) == 0:
                found.append(Run(PAD, 0, draw(st.integers(1, 2))))
            elif size:
                start, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 4))
                most = (size - 1 - start) // step + 1
                found.append(Run(draw(labels), start, draw(st.integers(0, most)), step))
        return Dim(found)

    a = draw(dims())
    b = inside(len(a))
    return a, b, inside(len(b))


@given(chains())
def test_select_is_composition(chain: tuple[Dim, Dim, Dim]) -> None:
    a, b, c = chain
    items = list(a)
    assert list(select(a, b)) == [(PAD, 0) if label is PAD else items[i] for label, i in b]
    assert select(select(a, b), c) == select(a, select(b, c))
    assert select(a, whole(len(a))) == a


@given(st.lists(dims(), min_size=1, max_size=3), st.integers(1, 3))
def test_interleave(given_dims: list[Dim], block: int) -> None:
    multiple = max(1, *(len(dim) for dim in given_dims))
    size = multiple + -multiple % block
    equal = [concat(dim, Dim([Run(PAD, 0, size - len(dim))])) for dim in given_dims]
    expected = [
        item for start in range(0, size, block) for dim in equal for item in list(dim)[start : start + block]
    ]
    assert list(interleave(*equal, block=block)) == expected


@given(dims(), st.integers(1, 9))
def test_pad(dim: Dim, multiple: int) -> None:
    padded = list(pad(dim, multiple))
    assert padded[: len(dim)] == list(dim)
    assert set(padded[len(dim) :]) <= {(PAD, 0)}
    assert len(padded) % multiple == 0 and len(padded) - len(dim) < multiple


@given(dims(), st.integers(1, 3), st.integers(1, 3))
def test_repeat(dim: Dim, times: int, block: int) -> None:
    dim = pad(dim, block)
    items = list(dim)
    expected = [
        item
        for start in range(0, len(items), block)
        for _ in range(times)
        for item in items[start : start + block]
    ]
    assert list(repeat(dim, times, block=block)) == expected


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_ranks_beyond_the_heads_share_them(heads: int, times: int, head_dim: int) -> None:
    kv = whole(heads * head_dim, "k")
    shared = repeat(kv, times, block=head_dim)
    for rank in range(heads * times):
        assert even(shared, heads * times, rank) == even(kv, heads, rank // times)


@given(dims(), labels)
def test_relabel(dim: Dim, label: str) -> None:
    assert list(relabel(dim, label)) == [(PAD, 0) if of is PAD else (label, index) for of, index in dim]


def test_an_even_cut_of_a_concatenation_is_not_a_concatenation_of_even_cuts() -> None:
    q, k, v = whole(12, "q"), whole(4, "k"), whole(4, "v")
    fused = [even(concat(q, k, v), 2, r) for r in range(2)]
    cut_first = [concat(*(even(dim, 2, r) for dim in (q, k, v))) for r in range(2)]
    assert [str(dim) for dim in fused] == ["q[0:10]", "q[10:12] k[0:4] v[0:4]"]
    assert [str(dim) for dim in cut_first] == ["q[0:6] k[0:2] v[0:2]", "q[6:12] k[2:4] v[2:4]"]


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "equation"),
    [
        (lambda: cut(whole(5), 2, 6), "0 <= start(2) <= stop(6) <= len(5) does not hold"),
        (lambda: cut(whole(5), 3, 2), "start(3) <= stop(2)"),
        (lambda: cut(whole(5), -1, 2), "start(-1)"),
        (lambda: split(whole(10), (4, 5), 0), "sum(4, 5) = 9 against len(10)"),
        (lambda: split(whole(10), (12, -2), 0), "sum(12, -2) = 10 against len(10)"),
        (lambda: split(whole(10), (4, 6), 2), "part(2) is not in 0..1"),
        (lambda: even(whole(10), 4, 0, what="kv heads"), "len(10) / block(1) % parts(4) = 2 != 0"),
        (lambda: even(whole(12), 4, 0, block=4), "len(12) / block(4) % parts(4) = 3 != 0"),
        (lambda: even(whole(10), 0, 0), "parts(0)"),
        (lambda: even(whole(10), 5, 5), "part(5) is not in 0..4"),
        (lambda: chunk(whole(10), 0, 0), "part(0) is not in 0..-1 of 0 parts"),
        (lambda: chunk(whole(10), 3, -1), "part(-1)"),
        (lambda: balanced(whole(10), 3, 3), "part(3)"),
        (lambda: balanced(whole(10), 3, 0, block=4), "len(10) % block(4) != 0"),
        (lambda: take(whole(10), (0,), 3), "len(10) % block(3) != 0"),
        (lambda: take(whole(10), (0,), 0), "block(0)"),
        (lambda: take(whole(10), (5,), 2), "id(5) is not in 0..4 = len(10) / block(2)"),
        (lambda: take(whole(10), (-1,), 2), "id(-1)"),
        (lambda: select(whole(4), whole(5)), "position(4) >= len(4)"),
        (lambda: interleave(whole(4), whole(6)), "lengths(4, 6), block(1)"),
        (lambda: interleave(whole(4), whole(4), block=3), "block(3)"),
        (lambda: interleave(), "lengths()"),
        (lambda: pad(whole(4), 0), "multiple(0) < 1"),
        (lambda: repeat(whole(4), 0, block=2), "times(0) < 1"),
        (lambda: repeat(whole(4), 2, block=3), "len(4) % block(3) != 0"),
        (lambda: Dim([Run("", 0, -1)]), "count(-1)"),
        (lambda: Dim([Run("", 4, 2, -1)]), "step(-1)"),
        (lambda: Dim([Run("", 4, 2, 0)]), "step(0)"),
        (lambda: Dim([Run("", -1, 2)]), "start(-1)"),
        (lambda: Dim([Run("", 1 << 62, 1 << 62, 2)]), "start("),
        (lambda: Dim([Run("two words", 0, 1)]), "label('two words')"),
    ],
)
def test_what_cannot_be_cut_is_refused(ask: object, equation: str) -> None:
    with pytest.raises(CutError) as caught:
        ask()  # type: ignore[operator]
    error = caught.value
    assert all([error.rule, error.where, error.equation, error.hint])
    assert equation in error.equation


def test_the_message_names_what_was_cut() -> None:
    with pytest.raises(CutError, match=r"kv heads k\[0:2\]: len\(2\)"):
        even(whole(2, "k"), 8, 0, what="kv heads")


@given(dims())
def test_text(dim: Dim) -> None:
    assert parse_dim(str(dim)) == dim
