"""Where the tokens of a microbatch are: numbers worked out by hand, and laws over drawn lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardweave.errors import GeometryError, PlanError
from shardweave.train.sequence import IGNORE, SequenceLayout

layouts = st.builds(
    SequenceLayout,
    st.lists(st.integers(0, 23), min_size=1, max_size=5).map(tuple),
    st.sampled_from(["bshd", "thd"]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["zigzag", "contiguous"]),
)


def test_a_row_in_zigzag() -> None:
    row = SequenceLayout((8,), cp=2)
    assert row.slots(0).tolist() == [[0, 1, 6, 7]]
    assert row.slots(1).tolist() == [[2, 3, 4, 5]]
    assert len(row.dim(1).runs) == 1  # the two parts of the last rank are neighbours


def test_packed_documents_are_cut_each_on_its_own() -> None:
    packed = SequenceLayout((5, 9), "thd", cp=2)
    assert packed.padded == (8, 12)
    assert packed.slots(0).tolist() == [0, 1, 6, 7, 8, 9, 10, 17, 18, 19]
    assert packed.slots(1).tolist() == [2, 3, 4, 5, 11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize(
    ("lengths", "tp", "cp", "padded", "total", "local", "cut"),
    [
        ((5, 9, 16), 1, 2, (8, 12, 16), 36, 18, 18),
        ((5, 9, 16), 2, 2, (8, 16, 16), 40, 20, 10),
        ((100,), 2, 4, (112,), 112, 28, 14),
    ],
)
def test_sizes(
    lengths: tuple[int, ...], tp: int, cp: int, padded: tuple[int, ...], total: int, local: int, cut: int
) -> None:
    packed = SequenceLayout(lengths, "thd", cp, tp)
    assert (packed.padded, packed.shape) == (padded, (total,))
    assert (packed.local_shape(), packed.local_shape(split_tp=True)) == ((local,), (cut,))


@pytest.mark.parametrize(
    ("length", "cp", "real"), [(7, 2, [3, 4]), (698, 4, [170, 176, 176, 176])], ids=["7", "698"]
)
def test_real_tokens_of_a_rank_are_counted_and_not_divided(length: int, cp: int, real: list[int]) -> None:
    packed = SequenceLayout((length,), "thd", cp)
    assert [int(packed.is_real[packed.slots(rank)].sum()) for rank in range(cp)] == real


@pytest.mark.parametrize(("cp", "ratio"), [(2, 1.5), (4, 1.75), (8, 1.875)])
def test_zigzag_balances_causal_work(cp: int, ratio: float) -> None:
    for order, wanted in (("contiguous", ratio), ("zigzag", 1.0)):
        work = [SequenceLayout((4096,), cp=cp, order=order).work(rank) for rank in range(cp)]
        assert max(work) / (sum(work) / cp) == pytest.approx(wanted, rel=1e-3)


@given(layouts)
def test_slots_of_all_ranks_are_all_slots_once(layout: SequenceLayout) -> None:
    every = np.arange(np.prod(layout.shape))
    for ranks in (
        [(c, None) for c in range(layout.cp)],
        [(c, t) for c in range(layout.cp) for t in range(layout.tp)],
    ):
        held = np.concatenate([layout.slots(c, t).reshape(-1) for c, t in ranks])
        assert np.array_equal(np.sort(held), every)


@given(layouts, st.booleans())
def test_join_undoes_local(layout: SequenceLayout, split_tp: bool) -> None:
    values = np.random.default_rng(0).random((layout.num_tokens, 3))
    batch = layout.place(values, fill=np.nan)
    assert np.array_equal(layout.real(batch), values)
    assert np.isnan(batch).any(axis=-1).sum() == batch[..., 0].size - layout.num_tokens
    ranks = [(c, t) for c in range(layout.cp) for t in (range(layout.tp) if split_tp else (None,))]
    parts = [layout.local(batch, c, t) for c, t in ranks]
    joined = layout.join(parts, split_tp=split_tp)
    assert np.array_equal(joined, batch, equal_nan=True)
    tensors = layout.join([torch.from_numpy(part) for part in parts], split_tp=split_tp)
    assert np.array_equal(tensors.numpy(), batch, equal_nan=True)


@given(layouts, st.integers(1, 4))
def test_labels_are_shifted_before_anything_is_cut(layout: SequenceLayout, by: int) -> None:
    """Token by token: the one further on in the same document, or none."""
    values = np.arange(layout.num_tokens) + 1000
    wanted, start = [], 0
    for length in layout.lengths:
        of = values[start : start + length].tolist()
        wanted += [of[i + by] if i + by < length else IGNORE for i in range(length)]
        start += length
    assert layout.shifted(values, by).tolist() == wanted
    assert layout.shifted(torch.from_numpy(values), by).tolist() == wanted


def test_labels_at_the_edges_of_parts() -> None:
    """A public report: label 5 was lost between two ranks, as each shifted its own part."""
    layout = SequenceLayout((8,), cp=2, order="contiguous")
    labels = layout.place(layout.shifted(np.arange(1, 9)), fill=IGNORE)
    assert layout.local(labels, 0).tolist() == [[2, 3, 4, 5]]
    assert layout.local(labels, 1).tolist() == [[6, 7, 8, IGNORE]]


@given(layouts)
def test_positions_travel_with_their_tokens(layout: SequenceLayout) -> None:
    positions = (
        np.concatenate([np.arange(n) for n in layout.lengths]) if layout.num_tokens else np.zeros(0, int)
    )
    assert np.array_equal(layout.real(layout.positions), positions)
    documents = np.repeat(np.arange(len(layout.lengths)), layout.lengths)
    assert np.array_equal(layout.real(layout.documents), documents)


@given(layouts, st.sampled_from([None, 1, 4]))
def test_who_sees_whom(layout: SequenceLayout, window: int | None) -> None:
    """Over all pairs of tokens, from their documents and places in them."""
    slots = layout.tokens
    documents = np.repeat(np.arange(len(layout.lengths)), layout.lengths)
    places = np.concatenate([np.arange(n) for n in layout.lengths]) if len(slots) else np.zeros(0, int)
    seen = layout.sees(slots, slots, window=window)
    for i in range(len(slots)):
        for j in range(len(slots)):
            back = places[i] - places[j]
            wanted = documents[i] == documents[j] and back >= 0 and (window is None or back < window)
            assert seen[i, j] == wanted
    every = np.arange(np.prod(layout.shape))
    pads = np.setdiff1d(every, slots)
    assert layout.sees(pads, every, window=window).sum() == len(pads)  # themselves, and nobody sees them
    assert not layout.sees(slots, pads, window=window).any()


@given(layouts.filter(lambda one: one.order == "zigzag"))
def test_from_one_order_to_the_other(layout: SequenceLayout) -> None:
    try:
        other, moves = layout.to_order("contiguous")
    except PlanError:
        contiguous = SequenceLayout(layout.lengths, layout.form, layout.cp, layout.tp, "contiguous")
        assert contiguous.padded != layout.padded
        return
    batch = np.arange(np.prod(layout.shape)).reshape(layout.shape)
    flat = np.concatenate([layout.local(batch, rank).reshape(-1) for rank in range(layout.cp)])
    wanted = np.concatenate([other.local(batch, rank).reshape(-1) for rank in range(layout.cp)])
    assert np.array_equal(flat[moves], wanted)


@given(st.integers(0, 30), st.integers(1, 4), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))
def test_rows_of_one_length_are_a_packed_row(length: int, rows: int, tp: int, cp: int) -> None:
    batch, packed = (SequenceLayout((length,) * rows, form, cp, tp) for form in ("bshd", "thd"))
    for rank in range(cp):
        by_row = packed.slots(rank).reshape(rows, -1)
        assert np.array_equal(by_row, batch.slots(rank))


def test_a_tensor_of_another_layout_is_refused_by_name() -> None:
    layout = SequenceLayout((128, 128), cp=2)
    layout.check_local(torch.zeros(2, 64, 7), "logits")
    with pytest.raises(PlanError, match=r"logits, bshd of 2 documents.* shape\(2, 128\) != shape\(2, 64\)"):
        layout.check_local(torch.zeros(2, 128, 7), "logits")
    with pytest.raises(PlanError, match="a padded batch"):
        layout.local(torch.zeros(2, 64), 0)
    with pytest.raises(GeometryError, match=r"parts\(1\) != ranks\(2\)"):
        layout.join([torch.zeros(2, 64)])
    assert layout.digest != SequenceLayout((128, 128), "thd", 2).digest


@pytest.mark.parametrize(
    "wrong", [{"form": "sbhd"}, {"order": "ring"}, {"cp": 0}, {"lengths": ()}, {"lengths": (3, -1)}]
)
def test_what_is_no_layout_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(GeometryError, match="a sequence layout has documents"):
        SequenceLayout(**{"lengths": (3,), **wrong})  # type: ignore[arg-type]


def test_documents_that_are_seen_whole_are_packed() -> None:
    with pytest.raises(GeometryError, match=r"packed: .*form\('bshd'\), causal\(False\)"):
        SequenceLayout((3,), causal=False)
    layout = SequenceLayout((3, 5), "thd", 2, causal=False)
    assert layout.digest != SequenceLayout((3, 5), "thd", 2).digest
    assert [layout.work(rank) for rank in range(2)] == [13, 21] and "not causal" in str(layout)
    assert layout.to_order("zigzag")[0] == layout
    nothing = SequenceLayout((), "thd", 2, 3, causal=False)
    assert nothing.local_shape(split_tp=True) == (0,) and nothing.slots(1, 2).tolist() == []
