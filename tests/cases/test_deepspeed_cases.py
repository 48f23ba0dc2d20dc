"""Public reports about uneven and fused cuts: one test a report, named after it.

The reference is plain numpy on whole arrays; moves go through a plan into arrays full of NaN.
"""

from __future__ import annotations

import itertools
from types import MappingProxyType

import numpy as np
import pytest

from shardweave.dialects import deepspeed
from shardweave.dialects.deepspeed import LAYOUTS, AutoTP, layout_of, weight_layout, widths
from shardweave.errors import CutError, GapError, GeometryError, OverlapError, UnknownNameError
from shardweave.layout import (
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Tensor,
    along,
    concat,
    even,
    parse_layout,
    prove,
    relabel,
    select,
    split,
    take,
    whole,
)
from shardweave.plan import empty, materialise, plan, simulate
from shardweave.plan.simulate import State


def numbers(dim: Dim, label: str = "") -> list[int]:
    return [index for found, index in dim if found == label]


def moved(src: Layout, state: State, dst: Layout) -> State:
    return simulate(plan(src, dst), state, into=empty(dst, np.float64, fill=np.nan))


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(
        a[rank].keys() == b[rank].keys()
        and all(a[rank][name].tobytes() == b[rank][name].tobytes() for name in a[rank])
        for rank in a
    )


def marked(tensor: Tensor) -> dict[Tensor, np.ndarray]:
    return {tensor: np.arange(tensor.numel, dtype=np.float64).reshape(tensor.shape)}


def test_b006_an_unknown_order_of_fused_rows_is_not_guessed() -> None:
    """DeepSpeed#3844: three real orders of fused rows, n = 8 heads of 2 rows, tp = 2."""
    heads, head_dim = 8, 2

    def head(label: str, i: int, count: int = 1) -> Dim:
        return relabel(take(whole(heads * head_dim), range(i, i + count), head_dim), label)

    orders = {
        "bloom": concat(*(head(label, i) for i in range(heads) for label in "qkv")),
        "glm": concat(*(head(label, 0, heads) for label in "qkv")),
        "codegen": concat(*(head(label, i, 2) for i in range(0, heads, 2) for label in "qkv")),
    }
    model = AutoTP(2, num_heads=heads, num_kv_heads=heads, hidden=heads * head_dim)
    held = {name: LAYOUTS[name](fused, 0, model) for name, fused in orders.items()}
    for dim in held.values():
        assert all(sorted(numbers(dim, label)) == list(range(8)) for label in "qkv")
    # Each order has its own rows on rank 0, and taken for another one it shows.
    assert len({tuple(numbers(LAYOUTS[name](whole(48), 0, model))) for name in orders}) == 3
    for cut, stored in itertools.permutations(orders, 2):
        mistaken = LAYOUTS[cut](orders[stored], 0, model)
        assert mistaken != held[stored]
        if "glm" in (cut, stored):
            assert any(sorted(numbers(mistaken, label)) != list(range(8)) for label in "qkv")
    # No class name, no default.
    for block in ("SomeNewBlock", "LlamaDecoderLayer", ""):
        with pytest.raises(UnknownNameError, match="says in which order"):
            layout_of(block)
    with pytest.raises(UnknownNameError, match="'gpt' is not among"):
        deepspeed.shard(Mesh((("tp", 2),)), "gpt", whole(48), model)


def test_b007_value_heads_follow_the_permuted_q_and_k() -> None:
    """DeepSpeed#5428, #8575: 16 heads, tp = 2, rank 0 has value heads 1-4 and 9-12, counted from 1."""
    head_dim, mesh, model = 5, Mesh((("tp", 2),)), AutoTP(2, num_heads=16, num_kv_heads=16)
    value, o_proj = Tensor("v", (80, 3), "float64"), Tensor("o", (3, 80), "float64")
    ids = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    v = weight_layout("yuan_value", value, mesh, model)
    o = weight_layout("yuan_o_proj", o_proj, mesh, model, dim=1)
    for rank in range(2):
        rows = [head * head_dim + i for head in ids[rank] for i in range(head_dim)]
        whole_v, whole_o = marked(value)[value], marked(o_proj)[o_proj]
        assert (materialise(v, marked(value))[rank]["v"] == whole_v[rows]).all()
        assert (materialise(o, marked(o_proj))[rank]["o"] == whole_o[:, rows]).all()
    for layout, tensor in ((v, value), (o, o_proj)):
        prove(layout)
        assert not layout.rules[0].parts[0].replica
        merged = Layout("merged", Mesh((("tp", 1),)), (BufferRule("w", (Part(tensor),), tensor.dims),))
        out = moved(layout, materialise(layout, marked(tensor)), merged)
        assert out[0]["w"].tobytes() == marked(tensor)[tensor].tobytes()
    # One wrong id: the head that is doubled, and the one that is missing, by their rows.
    ids[1][4] = 11
    rows_of = along(mesh, "tp", lambda rank: take(whole(80), ids[rank], head_dim))
    doubled = Layout("doubled", mesh, (BufferRule("v", (Part(value),), (rows_of, whole(3))),))
    with pytest.raises(OverlapError, match=r"indices \[55:60\].*rank 0 and by rank 1"):
        prove(doubled)
    declared = Layout("d", mesh, (BufferRule("v", (Part(value, replica=True),), (rows_of, whole(3))),))
    with pytest.raises(GapError, match=r"box \[60:65, 0:3\].*missing 15 of 240"):
        prove(declared)


def test_b021_an_uneven_cut_keeps_heads_whole() -> None:
    """DeepSpeed#8185, DeepSpeedExamples#1008: q = 16, kv = 8 heads of 128, tp = 3."""
    assert widths(2048, tp=3, num_kv_heads=8, name="q_proj") == (768, 768, 512)
    assert widths(1024, tp=3, num_kv_heads=8, name="k_proj") == (384, 384, 256)
    assert widths(2048, tp=3) == (683, 683, 682)
    q, o = Tensor("q_proj", (2048, 3), "float64"), Tensor("o_proj", (3, 2048), "float64")
    model = AutoTP(3, num_heads=16, num_kv_heads=8)
    mesh = Mesh((("tp", 3),))
    columns = weight_layout("column", q, mesh, model)
    rows = weight_layout("row", o, mesh, model, dim=1)
    assert columns.rules[0].dims[0] == rows.rules[0].dims[1]
    for rank in range(3):
        kv = {row // 128 for row in numbers(LAYOUTS["column"](whole(1024), rank, model))}
        assert {row // 128 // 2 for row in numbers(LAYOUTS["column"](whole(2048), rank, model))} == kv
    # 3 -> 4 -> 3, byte for byte.
    four = weight_layout("column", q, Mesh((("tp", 4),)), AutoTP(4, num_heads=16, num_kv_heads=8))
    before = materialise(columns, marked(q))
    assert [before[rank]["q_proj"].shape for rank in range(3)] == [(768, 3), (768, 3), (512, 3)]
    between = moved(columns, before, four)
    assert same(between, materialise(four, marked(q)))
    assert same(moved(four, between, columns), before)
    # What is written down has the widths; without them there is no cut.
    assert "[0:768] | [768:1536] | [1536:2048]" in str(columns)
    assert parse_layout(str(columns)) == columns
    with pytest.raises(CutError, match="add up"):
        split(whole(2048), (683, 683, 683), 0)
    with pytest.raises(CutError, match=r"len\(2048\).*parts\(3\)"):
        even(whole(2048), 3, 0)
    with pytest.raises(GeometryError, match="num_heads, num_kv_heads = None"):
        LAYOUTS["phi3"](whole(4096), 0, AutoTP(3, hidden=2048))


def test_b022_no_count_is_left_over_from_another_model() -> None:
    """DeepSpeed#8316: 12 heads over 4 are [3, 3, 3, 3], whatever was built before."""

    def stale() -> tuple[int, ...]:
        return AutoTP(4, num_heads=12, num_kv_heads=3).widths(12)

    def fresh() -> tuple[int, ...]:
        return AutoTP(4, num_heads=12).widths(12)

    assert [stale(), fresh()] == [(4, 4, 4, 0), (3, 3, 3, 3)]
    assert [fresh(), stale(), fresh()] == [(3, 3, 3, 3), (4, 4, 4, 0), (3, 3, 3, 3)]
    # Nothing in the module can be changed by building a model.
    kept = [value for name, value in vars(deepspeed).items() if not name.startswith("__")]
    assert not [value for value in kept if isinstance(value, (list, set, dict, bytearray))]
    assert isinstance(LAYOUTS, MappingProxyType)


def test_b024_scale_groups_are_whole_on_every_rank() -> None:
    """omlx#2844: 1856 columns in groups of 64 are 29 groups, 15 + 14 over 2 ranks."""
    model = AutoTP(2, grain=64, name="down_proj")
    cut = [LAYOUTS["row"](whole(1856), rank, model) for rank in range(2)]
    scales = [LAYOUTS["row"](whole(29), rank, AutoTP(2)) for rank in range(2)]
    assert [len(dim) for dim in cut] == [960, 896] == list(widths(1856, tp=2, grain=64))
    assert [len(dim) for dim in scales] == [15, 14]
    for dim, groups in zip(cut, scales, strict=True):
        assert numbers(dim) == [group * 64 + i for group in numbers(groups) for i in range(64)]
    with pytest.raises(CutError, match="parts"):
        even(whole(29), 2, 0)

    rng = np.random.default_rng(3)
    packed = rng.integers(0, 16, (6, 1856)).astype(np.float64)
    scale, zero = rng.random((6, 29)), rng.integers(0, 16, (6, 29)).astype(np.float64)

    def dequantised(columns: list[int], groups: list[int]) -> np.ndarray:
        values = packed[:, columns].reshape(6, len(groups), 64)
        return ((values - zero[:, groups, None]) * scale[:, groups, None]).reshape(6, -1)

    full = dequantised(list(range(1856)), list(range(29)))
    parts = [dequantised(numbers(c), numbers(g)) for c, g in zip(cut, scales, strict=True)]
    assert np.concatenate(parts, axis=1).tobytes() == full.tobytes()
    x = rng.random(1856)
    partial = sum(part @ x[numbers(dim)] for part, dim in zip(parts, cut, strict=True))
    np.testing.assert_allclose(partial, full @ x, rtol=1e-12)


def test_b025_a_small_projection_is_replicated_and_saved_once() -> None:
    """vllm#36329, #37562: b and a of 64 rows stay whole on 4 ranks while their neighbours are cut."""
    b, q = Tensor("b", (64, 3), "float64"), Tensor("q", (256, 3), "float64")
    mesh = Mesh((("tp", 4),))
    four = Layout(
        "four",
        mesh,
        (
            BufferRule("b", (Part(b),), b.dims),
            BufferRule("q", (Part(q),), (along(mesh, "tp", lambda r: even(whole(256), 4, r)), whole(3))),
        ),
    )
    prove(four)
    values = marked(b) | marked(q)
    state = materialise(four, values)
    assert [state[rank]["b"].shape[0] for rank in range(4)] == [64] * 4
    # The axis is not read, so all four are replicas; a file of whole tensors takes each row from one of them.
    assert four.rules[0].axes == () and four.rules[1].axes == ("tp",)
    one = Layout(
        "file",
        Mesh((("file", 1),), offset=4),
        (BufferRule("b", (Part(b),), b.dims), BufferRule("q", (Part(q),), q.dims)),
    )
    saving = plan(four, one)
    written = np.zeros(64)
    for copy in saving.copies():
        if copy.dst_name == "b":
            written[copy.dst_box.dims[0]] += 1
    assert (written == 1).all()
    saved = simulate(saving, state, into=empty(one, np.float64, fill=np.nan))
    assert saved[4]["b"].tobytes() == values[b].tobytes()
    # Into a target that cuts b: 32 rows each.
    pair = Mesh((("tp", 2),))
    cut = along(pair, "tp", lambda r: even(whole(64), 2, r))
    two = Layout("two", pair, (BufferRule("b", (Part(b),), (cut, whole(3))),))
    out = moved(one, saved, two)
    assert [out[rank]["b"].tolist() for rank in range(2)] == [
        values[b][:32].tolist(),
        values[b][32:].tolist(),
    ]


def test_an_even_cut_of_a_fused_weight_is_seen_by_its_labels() -> None:
    """B001 of the same kind, as AutoTP would meet it: no layout cuts through q, k and v unseen."""
    fused = concat(whole(32, "q"), whole(8, "k"), whole(8, "v"))
    model = AutoTP(2, num_heads=8, num_kv_heads=2, hidden=32)
    assert LAYOUTS["phi3"](fused, 0, model) == select(fused, LAYOUTS["phi3"](whole(48), 0, model))
    assert even(fused, 2, 0).labels == ("q",)
    assert LAYOUTS["phi3"](fused, 0, model).labels == ("q", "k", "v")
