"""Public bug reports that need the algebra alone: one test a report, named after it.

Each uses marker rows, so that a swapped, doubled or lost row shows by value. Targets are filled
with -1 first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from shardweave.errors import CutError, GapError
from shardweave.layout import (
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Sharded,
    Tensor,
    along,
    balanced,
    chunk,
    concat,
    cut,
    even,
    interleave,
    prove,
    repeat,
    select,
    split,
    take,
    whole,
)
from shardweave.layout.table import join, table


def numbers(dim: Dim) -> list[int]:
    return [index for _, index in dim]


def stored(dim: Dim, **tensors: np.ndarray) -> np.ndarray:
    """The rows that a dim holds; the only tensor at hand is `rows`."""
    held = [tensors[label or "rows"][index] for label, index in dim]
    return np.array(held).reshape(len(dim), *next(iter(tensors.values())).shape[1:])


def moved(src: Sequence[Dim], shards: Sequence[np.ndarray], dst: Sequence[Dim]) -> list[np.ndarray]:
    """The shards of `dst`, filled from those of `src` by what their dims have in common."""
    labels = dict.fromkeys(label for dim in dst for label in dim.labels)
    found = [np.full((len(dim), *shards[0].shape[1:]), -1, dtype=shards[0].dtype) for dim in dst]
    for label in labels:
        a, b = table(src, label), table(dst, label)
        common = join(a, b)
        for i in range(len(common)):
            steps = np.arange(common.count[i])
            rows = shards[a.entry[common.row_a[i]]][common.at_a[i] + steps * common.stride_a[i]]
            found[b.entry[common.row_b[i]]][common.at_b[i] + steps * common.stride_b[i]] = rows
    return found


def cover(dims: Sequence[Dim], size: int) -> bool:
    return sorted(index for dim in dims for index in numbers(dim)) == list(range(size))


def rank_dims(parts: int, rule: Callable[[int], Dim]) -> list[Dim]:
    return [rule(r) for r in range(parts)]


def reshards(src: Sequence[Dim], dst: Sequence[Dim], **tensors: np.ndarray) -> None:
    """Moving from one set of shards to the other gives what cutting the whole tensors would have."""
    for got, dim in zip(moved(src, [stored(dim, **tensors) for dim in src], dst), dst, strict=True):
        np.testing.assert_array_equal(got, stored(dim, **tensors))


# --- K04 gate/up order, interleave, transpose ----------------------------------------------------


def gate_up(tp: int, size: int) -> list[Dim]:
    gate, up = whole(size, "gate"), whole(size, "up")
    return rank_dims(tp, lambda r: concat(even(gate, tp, r), even(up, tp, r)))


def test_b026_swiglu_blocks_merge_by_half_and_not_by_block() -> None:
    gate, up = np.arange(32).reshape(8, 4), 100 + np.arange(32).reshape(8, 4)
    four, two, (one,) = gate_up(4, 8), gate_up(2, 8), gate_up(1, 8)
    shards = [stored(dim, gate=gate, up=up) for dim in four]
    np.testing.assert_array_equal(shards[1], np.concatenate([gate[2:4], up[2:4]]))
    (merged,) = moved(four, shards, [one])
    np.testing.assert_array_equal(merged, np.concatenate([gate, up]))
    assert not np.array_equal(merged, np.concatenate(shards)), "a cat of local blocks is something else"
    np.testing.assert_array_equal(moved(four, shards, two)[0], np.concatenate([gate[:4], up[:4]]))
    # Without a gate the same cut is a plain cat.
    plain = rank_dims(4, lambda r: even(whole(8), 4, r))
    (gelu,) = moved(plain, [stored(dim, rows=gate) for dim in plain], [whole(8)])
    np.testing.assert_array_equal(gelu, gate)


def test_b027_a_contiguous_fsdp_shard_is_not_a_gate_up_block() -> None:
    rows = np.arange(16 * 3).reshape(16, 3)
    saved = rank_dims(8, lambda r: chunk(whole(16), 8, r))
    for world in (1, 2, 4, 8, 3):
        reshards(saved, rank_dims(world, lambda r, world=world: chunk(whole(16), world, r)), rows=rows)
    # What the bug wrote: the halves of each shard taken for gate and up.
    wrong = [take(whole(16), [2 * r for r in range(8)] + [2 * r + 1 for r in range(8)])]
    assert numbers(wrong[0])[:3] == [0, 2, 4]
    assert not np.array_equal(stored(wrong[0], rows=rows), rows)


def test_b028_fragments_of_fc1_under_tp_and_fsdp() -> None:
    w, v = np.arange(64).reshape(8, 8), 100 + np.arange(64).reshape(8, 8)
    rows = np.concatenate([w, v])

    def layout(tp: int, dp: int) -> dict[tuple[int, int], Dim]:
        halves = [cut(whole(16), 0, 8), cut(whole(16), 8, 16)]
        local = [concat(*(even(half, tp, r) for half in halves)) for r in range(tp)]
        return {(r, d): chunk(local[r], dp, d) for r in range(tp) for d in range(dp)}

    found = layout(2, 4)
    fragment = {key: numbers(dim)[0] // 2 for key, dim in found.items()}
    assert fragment == {
        (0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3, (0, 2): 4, (0, 3): 5, (1, 2): 6, (1, 3): 7,
    }  # fmt: skip
    assert numbers(found[1, 1]) == [6, 7]
    for geometry in ((1, 1), (4, 2), (2, 2)):
        reshards(list(found.values()), list(layout(*geometry).values()), rows=rows)


def test_b029_a_gathered_tensor_is_reordered_by_its_own_mesh() -> None:
    def gate_rows(ranks: int) -> list[int]:
        gathered = concat(*gate_up(ranks, 8))
        return [at for at, (label, _) in enumerate(gathered) if label == "gate"]

    assert gate_rows(4) == [0, 1, 4, 5, 8, 9, 12, 13]
    assert gate_rows(2) == [0, 1, 2, 3, 8, 9, 10, 11]
    # The sizes come from the mesh and the axis of the tensor: experts are cut by etp, not by tp.
    mesh = Mesh((("tp", 4), ("dp", 2)), ((("etp", 2), ("ep", 4)),))
    for axis, ranks in (("tp", 4), ("etp", 2)):
        held = along(mesh, axis, lambda r, ranks=ranks: gate_up(ranks, 8)[r])
        assert concat(*held.dims) == concat(*gate_up(ranks, 8))


def test_b031_pairs_of_gate_and_up_are_not_split() -> None:
    fused = interleave(whole(3, "gate"), whole(3, "up"))
    assert len(fused) % 2 == 0, "the physical rows divide, the pairs do not"
    with pytest.raises(CutError, match=r"pairs of F=3 .*len\(6\) / block\(2\) % parts\(2\) = 1 != 0"):
        even(fused, 2, 0, block=2, what="pairs of F=3")
    assert [len(balanced(fused, 2, r, block=2)) // 2 for r in range(2)] == [2, 1]
    for rank in range(2):
        held = balanced(fused, 2, rank, block=2)
        assert numbers(held.only("gate")) == numbers(held.only("up"))
    four = interleave(whole(4, "gate"), whole(4, "up"))
    assert concat(*(even(four, 2, r, block=2) for r in range(2))) == four
    assert even(four, 2, 1, block=2) == cut(four, 4, 8)
    # The same for QKV by group: 2 query heads, K, V of head dim 4, three groups on two ranks.
    heads = [even(whole(24, "q"), 3, g) for g in range(3)]
    qkv = concat(
        *(concat(heads[g], even(whole(12, "k"), 3, g), even(whole(12, "v"), 3, g)) for g in range(3))
    )
    assert len(qkv) % 2 == 0
    with pytest.raises(CutError, match=r"len\(48\) / block\(16\)"):
        even(qkv, 2, 0, block=16)


@pytest.mark.parametrize("size", [64, 128])
def test_b032_packing_in_blocks_of_32_is_a_layout_and_not_an_act(size: int) -> None:
    gate, up = whole(size, "gate"), whole(size, "up")
    plain, packed = concat(gate, up), interleave(gate, up, block=32)
    assert str(cut(packed, 0, 128)) == "gate[0:32] up[0:32] gate[32:64] up[32:64]"
    marks = {"gate": np.arange(size), "up": 1000 + np.arange(size)}
    reshards([plain], [packed], **marks)
    reshards([packed], [plain], **marks)
    # Packing what is packed moves nothing, because both sides say what they hold.
    np.testing.assert_array_equal(
        moved([packed], [stored(packed, **marks)], [packed])[0], stored(packed, **marks)
    )
    twice = interleave(cut(packed, 0, size), cut(packed, size, 2 * size), block=32)
    assert twice != packed, "packing twice is seen"
    with pytest.raises(CutError, match=r"lengths\(48\), block\(32\)"):
        interleave(whole(48, "gate"), whole(48, "up"), block=32)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_b033_global_shapes_are_compared_and_local_ones_follow(tp: int) -> None:
    mesh = Mesh((("tp", tp), ("dp", 2)))
    tensor = Tensor("gate_up", (1024, 2048), "bfloat16")
    rows = along(
        mesh,
        "tp",
        lambda r: concat(even(cut(whole(1024), 0, 512), tp, r), even(cut(whole(1024), 512, 1024), tp, r)),
    )
    layout = Layout("x", mesh, (BufferRule("gate_up", (Part(tensor),), (rows, whole(2048))),))
    prove(layout)
    for rank in mesh.ranks:
        (buffer,) = layout.buffers(rank)
        assert buffer.parts[0].tensor.shape == (1024, 2048)
        assert buffer.shape == (1024 // tp, 2048)
        r, n = mesh.coordinate(rank)["tp"], 512 // tp
        assert numbers(buffer.dims[0]) == [*range(r * n, (r + 1) * n), *range(512 + r * n, 512 + (r + 1) * n)]


# --- K18 resharding at its corners ---------------------------------------------------------------


def test_b112_empty_shards_are_legal_on_both_sides() -> None:
    assert [len(chunk(whole(6), 4, r)) for r in range(4)] == [2, 2, 2, 0]
    for n in range(10):
        rows = np.arange(n * 3).reshape(n, 3)
        for world, other in itertools.product(range(1, 13), (1, 2, 3, 5, 8, 12)):
            src = rank_dims(world, lambda r, n=n, world=world: chunk(whole(n), world, r))
            dst = rank_dims(other, lambda r, n=n, other=other: chunk(whole(n), other, r))
            assert cover(src, n)
            reshards(src, dst, rows=rows)
    # 60 layers on 64 ranks, and a matrix cut in both dims with empty rows of shards.
    assert cover(rank_dims(64, lambda r: chunk(whole(60), 64, r)), 60)
    mesh = Mesh((("a", 4), ("b", 3)))
    tensor = Tensor("w", (6, 4), "float32")
    dims = (
        along(mesh, "a", lambda r: chunk(whole(6), 4, r)),
        along(mesh, "b", lambda r: chunk(whole(4), 3, r)),
    )
    layout = Layout("x", mesh, (BufferRule("w", (Part(tensor),), dims),))
    prove(layout)
    (empty,) = layout.buffers(mesh.rank({"a": 3, "b": 0}))
    assert empty.shape == (0, 2) and not list(empty.pieces())


def test_b113_the_global_size_is_an_input() -> None:
    locals_of_ten = (3, 3, 3, 1)
    assert [numbers(split(whole(10), locals_of_ten, r))[0] for r in range(4)] == [0, 3, 6, 9]
    for guess in (3 * 4, 1 * 4):
        with pytest.raises(CutError, match=rf"sum\(3, 3, 3, 1\) = 10 against len\({guess}\)"):
            split(whole(guess), locals_of_ten, 0)
    assert [len(chunk(whole(5), 4, r)) for r in range(4)] == [2, 2, 1, 0]
    # Shards of a tensor of 10 rows declared as 12 leave a gap, and do not pass as whole.
    held = Sharded(("dp",), tuple(split(whole(10), locals_of_ten, r) for r in range(4)))
    rule = BufferRule("w", (Part(Tensor("w", (12, 2), "float32")),), (held, whole(2)))
    with pytest.raises(GapError, match=r"box \[10:12, 0:2\]"):
        prove(Layout("x", Mesh((("dp", 4),)), (rule,)))


def test_b114_the_order_of_cuts_is_not_the_order_of_axes() -> None:
    mesh = Mesh((("tp", 2), ("dp", 2)))  # dp is the outer axis of the mesh
    rows = np.arange(4).reshape(4, 1)
    tp_first = {(d, t): even(even(whole(4), 2, t), 2, d) for d in range(2) for t in range(2)}
    assert {key: numbers(dim) for key, dim in tp_first.items()} == {
        (0, 0): [0],
        (1, 0): [1],
        (0, 1): [2],
        (1, 1): [3],
    }
    assert [tp_first[mesh.coordinate(r)["dp"], mesh.coordinate(r)["tp"]][0][1] for r in mesh.ranks] == [
        0,
        2,
        1,
        3,
    ]
    src = list(tp_first.values())
    reshards(src, [whole(4)], rows=rows)
    reshards(src, rank_dims(2, lambda r: even(whole(4), 2, r)), rows=rows)
    dp_first = [even(even(whole(4), 2, d), 2, t) for d in range(2) for t in range(2)]
    assert [numbers(dim)[0] for dim in dp_first] == [0, 1, 2, 3]
    reshards(src, dp_first, rows=rows)


def test_b115_two_rules_of_uneven_nested_cuts() -> None:
    rows = np.arange(8 * 2).reshape(8, 2)
    nested = [chunk(chunk(whole(8), 3, a), 2, b) for a in range(3) for b in range(2)]
    strided = [chunk(chunk(whole(8), 2, b), 3, a) for a in range(3) for b in range(2)]
    assert [numbers(dim) for dim in nested] == [[0, 1], [2], [3, 4], [5], [6], [7]]
    assert [numbers(dim) for dim in strided] == [[0, 1], [4, 5], [2, 3], [6, 7], [], []]
    assert cover(nested, 8) and cover(strided, 8)
    reshards(nested, strided, rows=rows)
    reshards(strided, nested, rows=rows)
    # Offsets alone are enough to read a file back: the rule that made them is not named.
    offsets = [(dim.runs[0].start, len(dim)) for dim in nested if len(dim)]
    shards = [stored(dim, rows=rows) for dim in nested if len(dim)]
    read = moved([cut(whole(8), at, at + n) for at, n in offsets], shards, strided)
    for got, dim in zip(read, strided, strict=True):
        np.testing.assert_array_equal(got, stored(dim, rows=rows))


@pytest.mark.parametrize("fsdp", [3, 16, 32])
def test_b117_heads_are_permuted_whatever_the_shards_are(fsdp: int) -> None:
    kv, head_dim = 8, 4
    rows = np.arange(kv * head_dim * 5).reshape(kv * head_dim, 5)
    # Rotary halves to rotary pairs: row 2 i + j of a head is row j * head_dim / 2 + i of the other form.
    permuted = rows.reshape(kv, 2, head_dim // 2, 5).transpose(0, 2, 1, 3).reshape(rows.shape)
    heads = [even(whole(kv * head_dim), kv, h) for h in range(kv)]
    pairs = concat(*(interleave(even(head, 2, 0), even(head, 2, 1)) for head in heads))
    np.testing.assert_array_equal(stored(pairs, rows=rows), permuted)
    src = rank_dims(fsdp, lambda r: chunk(whole(kv * head_dim), fsdp, r))
    (exported,) = moved(src, [stored(dim, rows=rows) for dim in src], [pairs])
    np.testing.assert_array_equal(exported, permuted)
    target = rank_dims(5, lambda r: chunk(pairs, 5, r))
    assert target == rank_dims(5, lambda r: select(pairs, chunk(whole(kv * head_dim), 5, r)))
    reshards(src, target, rows=rows)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 4)])
def test_b118_a_scalar_stays_a_scalar(shape: tuple[int, ...]) -> None:
    mesh = Mesh((("dp", 3),))
    tensor = Tensor("step", shape, "int64")
    rule = BufferRule("step", (Part(tensor),), tuple(whole(size) for size in shape))
    layout = Layout("x", mesh, (rule,))
    prove(layout)
    for rank in mesh.ranks:
        (buffer,) = layout.buffers(rank)
        assert buffer.shape == shape
        assert [piece.box.shape for piece in buffer.pieces()] == ([shape] if tensor.numel else [])
    # All ranks hold the same: one class of replicas, and so one writer.
    assert rule.axes == () and len({rule.at(mesh, rank) for rank in mesh.ranks}) == 1


def test_kv_heads_repeat_and_do_not_vanish() -> None:
    """The head count of `2 // 8 == 0` that opens the design: ranks share heads, none is empty."""
    kv = whole(2 * 4, "k")
    held = rank_dims(8, lambda r: even(repeat(kv, 4, block=4), 8, r))
    assert [numbers(dim) for dim in held] == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    with pytest.raises(CutError, match=r"num_kv_heads k\[0:8\]: len\(8\) / block\(4\) % parts\(8\) = 2 != 0"):
        even(kv, 8, 0, block=4, what="num_kv_heads")
