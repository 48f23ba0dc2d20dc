"""The marker probe: it finds what functions do, names where they differ, and is not fooled."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.dialects.deepspeed import LAYOUTS, AutoTP
from shardweave.errors import OverlapError, ProbeError
from shardweave.layout import (
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Run,
    Sharded,
    Tensor,
    chunk,
    concat,
    even,
    interleave,
    pad,
    parse_dim,
    parse_layout,
    prove,
    relabel,
    repeat,
    whole,
)
from shardweave.testing import Found, compare, expect, probe, probe_function, probe_loader, probe_shapes
from shardweave.testing.strategies import cuts

Array = Any


def column(x: Array, rank: int, world: int) -> Array:
    return np.split(x, world)[rank]


def row(x: Array, rank: int, world: int) -> Array:
    return np.split(x, world, axis=1)[rank]


def chunked(x: Array, rank: int, world: int) -> Array:
    size = -(-len(x) // world)
    return x[rank * size : (rank + 1) * size]


def padded_vocab(x: Array, rank: int, world: int) -> Array:
    rows = -len(x) % (8 * world)
    return np.split(np.concatenate([x, np.zeros((rows, x.shape[1]), x.dtype)]), world)[rank]


def qkv(q: Array, k: Array, v: Array, rank: int, world: int) -> Array:
    return np.concatenate([np.split(x, world)[rank] for x in (q, k, v)])


def kv_held_by_many(x: Array, rank: int, world: int) -> Array:
    heads, head_dim = 2, 3
    return x.reshape(heads, head_dim, -1)[rank * heads // world]


def dims(found: Found, d: int = 0) -> list[Dim]:
    assert all(held is not None for held in found.ranks)
    return [held[d] for held in found.ranks if held is not None]


# --- what is found ------------------------------------------------------------------------------


def test_even_cut_of_columns_and_rows() -> None:
    found = probe(column, (6, 5), ranks=3)
    assert dims(found) == [even(whole(6), 3, rank) for rank in range(3)]
    assert dims(found, 1) == [whole(5)] * 3
    assert (found.cut, found.order) == ((0,), (0, 1))
    found = probe(row, (5, 6), ranks=3)
    assert dims(found, 1) == [even(whole(6), 3, rank) for rank in range(3)]
    assert found.cut == (1,)
    prove(found.layout())


def test_chunks_leave_the_last_ranks_short_or_empty() -> None:
    found = probe(chunked, (6, 3), ranks=4)
    assert dims(found) == [chunk(whole(6), 4, rank) for rank in range(4)]
    assert dims(found)[3] == Dim() and dims(found, 1)[3] == whole(3)


def test_fused_qkv_comes_back_with_labels() -> None:
    found = probe(qkv, {"q": (8, 3), "k": (4, 3), "v": (4, 3)}, ranks=2)
    assert str(found) == "rank 0: q[0:4] k[0:2] v[0:2] x [0:3]\nrank 1: q[4:8] k[2:4] v[2:4] x [0:3]"
    layout = found.layout("fused")
    prove(layout)
    assert [part.label for part in layout.rules[0].parts] == ["q", "k", "v"]


def test_gate_and_up_and_their_interleaving() -> None:
    def gate_up(x: Array, rank: int, world: int) -> Array:
        return np.concatenate([np.split(half, world)[rank] for half in np.split(x, 2)])

    found = probe(gate_up, (12, 2), ranks=3)
    assert dims(found) == [LAYOUTS["gate_up"](whole(12), rank, AutoTP(3)) for rank in range(3)]

    def woven(gate: Array, up: Array, rank: int, world: int) -> Array:
        rows = np.stack([gate, up], axis=1).reshape(-1, gate.shape[1])
        return np.split(rows, world)[rank]

    found = probe(woven, {"gate": (6, 2), "up": (6, 2)}, ranks=3)
    both = interleave(whole(6, "gate"), whole(6, "up"))
    assert dims(found) == [even(both, 3, rank) for rank in range(3)]


def test_padded_vocabulary_needs_its_pad_value() -> None:
    found = probe(padded_vocab, (37, 3), ranks=4, pad=0)
    assert dims(found) == [even(pad(whole(37), 32), 4, rank) for rank in range(4)]
    assert [str(dim) for dim in dims(found)] == ["[0:16]", "[16:32]", "[32:37] pad[11]", "pad[16]"]
    prove(found.layout())
    with pytest.raises(ProbeError, match=r"rank 2, position \[5, 0\]: value\(0\) is no marker.*pad=0"):
        probe(padded_vocab, (37, 3), ranks=4)
    nan = probe(
        lambda x, r, n: np.concatenate([x, np.full((3, 2), np.nan)]),
        (5, 2),
        ranks=1,
        dtype="float64",
        pad=math.nan,
    )
    assert dims(nan) == [pad(whole(5), 8)]


def test_heads_held_by_several_ranks_are_replicas() -> None:
    found = probe(kv_held_by_many, (6, 2), ranks=4)
    assert dims(found) == [even(repeat(whole(6), 2, block=3), 4, rank) for rank in range(4)]
    layout = found.layout()
    assert layout.rules[0].parts[0].replica
    prove(layout)
    (rule,) = layout.rules
    with pytest.raises(OverlapError):
        prove(Layout("owned", layout.mesh, (BufferRule("b", (Part(rule.parts[0].tensor),), rule.dims),)))


def test_whole_on_every_rank_is_not_cut() -> None:
    found = probe(lambda x, r, n: x.copy(), (4, 3), ranks=2)
    assert (found.cut, found.aliased) == ((), ())
    assert not found.layout().rules[0].axes


@pytest.mark.parametrize("shape", [(6, 4), (4, 4)])
def test_a_transposed_array(shape: tuple[int, int]) -> None:
    found = probe(lambda x, r, n: np.split(x, n)[r].T, shape, ranks=2)
    assert found.order == (1, 0)
    assert dims(found) == [even(whole(shape[0]), 2, rank) for rank in range(2)]
    buffer = found.layout().rules[0].at(Mesh((("tp", 2),)), 0)
    assert buffer is not None and buffer.shape == (shape[1], shape[0] // 2)
    assert str(found).endswith("stored in the order of dims 1, 0")


def test_a_product_of_three_dims_and_a_permuted_one() -> None:
    found = probe(lambda x, r, n: np.split(x[:, ::2, [4, 1, 0]], n)[r].transpose(2, 0, 1), (6, 4, 5), ranks=3)
    assert found.order == (2, 0, 1)
    assert [str(dim) for dim in found.ranks[1] or ()] == ["[2:4]", "[0:1] [2:3]", "[4:5] [1:2] [0:1]"]


def test_what_is_no_product_is_refused_or_flat() -> None:
    def flat(x: Array, rank: int, world: int) -> Array:
        return np.array_split(x.ravel(), world)[rank]

    with pytest.raises(ProbeError, match=r"array of 1 dims, tensor of 2.*flat=True"):
        probe(flat, (3, 4), ranks=2)
    found = probe(flat, (3, 5), ranks=2, flat=True)
    assert dims(found) == [parse_dim("[0:8]"), parse_dim("[8:15]")]
    assert [str(box) for _, box in found.boxes(0)] == ["[0:1, 0:5]", "[1:2, 0:3]"]
    assert found.cut == (0,) and "flat [8:15]" in str(found)
    with pytest.raises(ProbeError, match="products of dims"):
        found.layout()

    def reshaped(x: Array, rank: int, world: int) -> Array:
        return np.split(x.reshape(x.shape[::-1]), world)[rank]

    with pytest.raises(ProbeError, match=r"rank 0, dim 0: its indices vary along axes \[0, 1\]"):
        probe(reshaped, (3, 4), ranks=2)

    def ragged(x: Array, rank: int, world: int) -> Array:
        return np.triu(np.split(x, world)[rank])

    with pytest.raises(ProbeError, match="padding among elements"):
        probe(ragged, (6, 4), ranks=2, pad=0)


def test_ranks_without_an_array() -> None:
    found = probe(lambda x, r, n: x if r == 1 else None, (3, 2), ranks=3)
    assert found.ranks == (None, (whole(3), whole(2)), None)
    prove(found.layout())


def test_two_cut_dims_are_no_layout_on_one_axis() -> None:
    found = probe(lambda x, r, n: np.split(np.split(x, 2)[r // 2], 2, axis=1)[r % 2], (4, 6), ranks=4)
    assert found.cut == (0, 1)
    assert [str(box) for _, box in found.boxes(3)] == ["[2:4, 3:6]"]
    with pytest.raises(ProbeError, match=r"dims \[0, 1\] differ between ranks"):
        found.layout()


@given(data=st.data(), parts=st.integers(1, 4))
@settings(deadline=None)
def test_what_is_applied_is_found(data: st.DataObject, parts: int) -> None:
    shape = (data.draw(st.sampled_from([5, 8, 12])), data.draw(st.sampled_from([2, 3])))
    held = data.draw(cuts(whole(shape[0]), parts))
    found = probe(lambda x, r, n: x[[i for _, i in held[r]]], shape, ranks=parts)
    assert dims(found) == list(held)
    prove(found.layout())


# --- dtypes and frameworks ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int64", "int32", "float64", "float32", "float16", "bfloat16"])
def test_every_dtype_of_torch(dtype: str) -> None:
    # 66,000 elements: more than float16 and bfloat16 hold whole numbers for.
    found = probe(lambda x, r, n: x.chunk(n)[r], (600, 110), ranks=4, dtype=dtype, arrays="torch")
    assert dims(found) == [chunk(whole(600), 4, rank) for rank in range(4)]


def test_small_dtypes_of_numpy_and_unknown_ones() -> None:
    found = probe(column, (60, 110), ranks=4, dtype="float16")
    assert dims(found) == [even(whole(60), 4, rank) for rank in range(4)]
    with pytest.raises(ProbeError, match="only torch has bfloat16"):
        probe(column, (6, 2), ranks=2, dtype="bfloat16")
    with pytest.raises(ProbeError, match="'uint8' is not among int64"):
        probe(column, (6, 2), ranks=2, dtype="uint8")


def test_a_cast_that_loses_numbers_is_seen() -> None:
    with pytest.raises(ProbeError, match=r"is no marker|!="):
        probe(lambda x, r, n: x.astype(np.float32), (600, 110), ranks=1)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int64", "float16"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x + 1,
        lambda x: x * 2,
        lambda x: (x + np.roll(x, 1, axis=0)) / 2,
        lambda x: -x,
        lambda x: np.sort(x.ravel())[::-1].reshape(x.shape),
    ],
    ids=["plus one", "times two", "mean", "negated", "sorted"],
)
def test_arithmetic_is_refused(spoil: Any, dtype: str) -> None:
    with pytest.raises(ProbeError, match=r"rank \d.*position \[\d+, \d+\].*(is no marker|!=)"):
        probe(lambda x, r, n: spoil(column(x, r, n)), (6, 4), ranks=2, dtype=dtype)


def test_one_changed_element_is_named() -> None:
    def touched(x: Array, rank: int, world: int) -> Array:
        mine = column(x, rank, world).copy()
        if rank == 1:
            mine[2, 1] += 1
        return mine

    with pytest.raises(ProbeError, match=r"rank 1, position \[2, 1\]: value"):
        probe(touched, (6, 4), ranks=2)


def test_input_that_is_changed_is_refused() -> None:
    def scaled(x: Array, rank: int, world: int) -> Array:
        mine = column(x, rank, world)
        kept = mine.copy()
        mine *= 2
        return kept

    with pytest.raises(ProbeError, match="rank 0: the tensor changed during the call"):
        probe(scaled, (6, 4), ranks=2)


def test_a_buffer_that_is_handed_out_twice_is_refused() -> None:
    staging = np.zeros((3, 4), dtype=np.int64)

    def staged(x: Array, rank: int, world: int) -> Array:
        staging[...] = column(x, rank, world)
        return staging

    with pytest.raises(ProbeError, match="rank 0: its values changed while other ranks were cut"):
        probe(staged, (6, 4), ranks=2)


def test_state_between_calls_is_refused() -> None:
    calls: list[int] = []

    def counting(x: Array, rank: int, world: int) -> Array:
        calls.append(rank)
        return np.split(x, world)[len(calls) % world]

    with pytest.raises(ProbeError, match="the same ones every time"):
        probe(counting, (6, 4), ranks=3)


def test_memory_that_is_shared_is_told() -> None:
    assert probe(column, (6, 4), ranks=2).aliased == (0, 1)
    assert probe(lambda x, r, n: x[r::n].copy() if r else x[r::n], (6, 4), ranks=2).aliased == (0,)
    assert probe(lambda x, r, n: x.chunk(n)[r], (6, 4), ranks=2, arrays="torch").aliased == (0, 1)
    assert probe(lambda x, r, n: x.chunk(n)[r].clone(), (6, 4), ranks=2, arrays="torch").aliased == ()


def test_an_element_twice_on_one_rank() -> None:
    def twice(x: Array, rank: int, world: int) -> Array:
        return np.repeat(column(x, rank, world), 2, axis=0)

    with pytest.raises(ProbeError, match=r"\[0, 0\] lies at \[0, 0\] and at \[1, 0\].*duplicates=True"):
        probe(twice, (4, 3), ranks=2)
    found = probe(twice, (4, 3), ranks=2, duplicates=True)
    assert dims(found)[1] == even(repeat(whole(4), 2, block=1), 2, 1)


def test_a_refusal_of_the_function_is_passed_on() -> None:
    with pytest.raises(ProbeError, match="rank 0 of 4: ValueError: array split does not result in an equal"):
        probe(column, (6, 4), ranks=4)
    with pytest.raises(ProbeError, match=r"ranks\(0\) < 1"):
        probe(column, (6, 4), ranks=0)


def test_a_function_that_guesses_from_the_shape() -> None:
    def guessing(x: Array, rank: int, world: int) -> Array:
        axis = 0 if x.shape[0] % world == 0 else 1
        return np.split(x, world, axis=axis)[rank]

    assert [one.cut for one in probe_shapes(column, [(6, 4), (9, 3)], ranks=3)] == [(0,), (0,)]
    with pytest.raises(ProbeError, match=r"shape \(6, 4\): cut dims \[0\].*shape \(5, 9\): cut dims \[1\]"):
        probe_shapes(guessing, [(6, 4), (5, 9)], ranks=3)


# --- comparing ----------------------------------------------------------------------------------


def test_two_groups_that_are_swapped_are_named() -> None:
    def swapped(q: Array, k: Array, v: Array, rank: int, world: int) -> Array:
        return qkv(q, v, k, rank, world)

    shapes = {"q": (8, 3), "k": (4, 3), "v": (4, 3)}
    declared = probe(qkv, shapes, ranks=2)
    difference = compare(probe(swapped, shapes, ranks=2), declared)
    assert difference is not None
    assert (difference.rank, difference.dim, difference.position) == (0, 0, 4)
    assert str(difference) == "rank 0, dim 0, position 4: expected k[0], got v[0]"
    with pytest.raises(ProbeError, match=r"rank 0, dim 0, position 4: expected\(k\[0\]\) != got\(v\[0\]\)"):
        expect(probe(swapped, shapes, ranks=2), declared)


def test_an_even_cut_of_a_concatenation_is_told_from_a_concatenation_of_cuts() -> None:
    declared = [
        concat(*(even(relabel(whole(size), label), 2, rank) for label, size in (("q", 8), ("k", 4))))
        for rank in range(2)
    ]
    found = probe(
        lambda q, k, r, n: column(np.concatenate([q, k]), r, n), {"q": (8, 3), "k": (4, 3)}, ranks=2
    )
    assert str(compare(found, declared)) == "rank 0, dim 0, position 4: expected k[0], got q[4]"


def test_comparing_with_a_layout_a_sharded_dim_and_itself() -> None:
    found = probe(row, (5, 6), ranks=2)
    held = tuple(even(whole(6), 2, rank) for rank in range(2))
    assert compare(found, found) is None
    assert compare(found, found.layout()) is None
    assert compare(found, Sharded(("tp",), held), dim=1) is None
    assert compare(found, held, dim=1) is None
    assert str(compare(found, held)) == "rank 0, dim 0, position 3: expected the end, got [3]"
    assert str(compare(found, held[:1], dim=1)) == "rank 1: expected 1 ranks, got 2 ranks"
    turned = probe(lambda x, r, n: row(x, r, n).T, (5, 6), ranks=2)
    assert str(compare(turned, found)) == "rank 0: expected dims stored [0, 1], got dims stored [1, 0]"
    absent = probe(lambda x, r, n: None if r else row(x, r, n), (5, 6), ranks=2)
    assert str(compare(absent, found)) == "rank 1: expected 2 dims, got nothing"
    two = Layout("two", Mesh((("tp", 2),)), found.layout().rules * 2)
    with pytest.raises(ProbeError, match=r"buffers\(2\)"):
        compare(found, two)


# --- loaders and names --------------------------------------------------------------------------


def load(rank: int, tensors: dict[str, Array]) -> dict[str, Array]:
    gate_up = np.concatenate(
        [np.split(tensors[name], 2)[rank] for name in ("gate_proj.weight", "up_proj.weight")]
    )
    local = {"fc1": gate_up, "fc2": np.split(tensors["down_proj.weight"], 2, axis=1)[rank]}
    return local if rank else {**local, "norm": tensors["norm.weight"].copy()}


SHAPES = {
    "gate_proj.weight": (6, 4),
    "up_proj.weight": (6, 4),
    "down_proj.weight": (4, 6),
    "norm.weight": (4,),
}


def test_a_loader() -> None:
    found = probe_loader(load, SHAPES, ranks=2)
    assert list(found) == ["fc1", "fc2", "norm"]
    fused = concat(Dim((Run("gate_proj.weight", 3, 3),)), Dim((Run("up_proj.weight", 3, 3),)))
    assert found["fc1"].ranks[1] == (fused, whole(4))
    assert found["fc2"].ranks[1] == (whole(4), parse_dim("[3:6]"))
    assert found["norm"].ranks == ((whole(4),), None)
    layout = found["fc1"].layout("fc1")
    prove(layout)
    assert parse_layout(str(layout)) == layout and layout.rules[0].name == "fc1"
    assert layout.tensors == (
        Tensor("gate_proj.weight", (6, 4), "float32"),
        Tensor("up_proj.weight", (6, 4), "float32"),
    )


def test_a_loader_that_forgets_a_tensor() -> None:
    shapes = {**SHAPES, "rotary.inv_freq": (3,)}
    with pytest.raises(ProbeError, match=r"tensor 'rotary.inv_freq': 1 of 5 tensors reach no rank"):
        probe_loader(load, shapes, ranks=2)
    assert len(probe_loader(load, shapes, ranks=2, ignored=["rotary.inv_freq"])) == 3


def test_what_is_no_array_is_refused() -> None:
    with pytest.raises(ProbeError, match="got list"):
        probe_loader(lambda rank, tensors: list(tensors.values()), {"a": (2, 3)}, ranks=1)  # type: ignore
    with pytest.raises(ProbeError, match="rank 0: got str of dtype"):
        probe(lambda x, r, n: "rows", (2, 3), ranks=1)
    with pytest.raises(ProbeError, match="rank 0: got ndarray of dtype bool"):
        probe(lambda x, r, n: x > 3, (2, 3), ranks=1)


def test_a_loader_that_mixes_dims() -> None:
    def flattened(rank: int, tensors: dict[str, Array]) -> dict[str, Array]:
        return {"flat": np.concatenate([tensors["a"].ravel(), tensors["b"]])}

    with pytest.raises(ProbeError, match=r"array 'flat'|tensors of \[1, 2\] dims in one array"):
        probe_loader(flattened, {"a": (2, 3), "b": (4,)}, ranks=1)
    found = probe_loader(flattened, {"a": (2, 3), "b": (4,)}, ranks=1, flat=True)["flat"]
    assert dims(found) == [parse_dim("a[0:6] b[0:4]")]
    assert [(name, str(box)) for name, box in found.boxes(0)] == [("a", "[0:2, 0:3]"), ("b", "[0:4]")]


def test_a_function_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("shardweave_probe_target")
    module.column = column  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shardweave_probe_target", module)
    found = probe_function("shardweave_probe_target:column", shape=(6, 2), tp=2)
    assert dims(found) == [even(whole(6), 2, rank) for rank in range(2)]


@pytest.mark.parametrize("spec", ["nowhere:f", "math", "math:nothing", ":f", "math:"])
def test_a_name_that_is_no_function(spec: str) -> None:
    with pytest.raises(ProbeError, match="MODULE:FUNCTION"):
        probe_function(spec, shape=(6, 2), tp=2)
    with pytest.raises(ProbeError, match="can be called"):
        probe_function("math:pi", shape=(6, 2), tp=2)
