"""Fewer KV heads than ranks, ranks that end inside a head or a group, heads that differ by layer.

The reference is written row by row, without any layout: a fused weight is built by a loop over KV
groups, cut into equal blocks of raw rows, and each row carries its own identity.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from shardweave.dialects import hf, megatron
from shardweave.layout import Dim, Tensor, prove, take, whole
from shardweave.models.spec import Block, Model
from shardweave.plan import empty, materialise, plan, simulate

HIDDEN = 3


def _model(heads: dict[tuple[int, ...], tuple[int, int, int]]) -> Model:
    """A model of attention alone; ``heads`` maps layers to query heads, KV heads and head dim."""
    num_layers = sum(len(layers) for layers in heads)
    blocks = [
        Block(
            "embedding",
            Dim(),
            {"vocab_size": 7, "hidden_size": HIDDEN},
            {"embed": Tensor("e", (7, HIDDEN), "float32")},
        ),
        Block(
            "head",
            Dim(),
            {"vocab_size": 7, "hidden_size": HIDDEN},
            {"head": Tensor("h", (7, HIDDEN), "float32")},
        ),
    ]
    for layers, (num_heads, num_kv_heads, head_dim) in heads.items():
        dim = take(whole(num_layers), layers)
        sizes = {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "hidden_size": HIDDEN,
        }
        rows = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        tensors = {
            role: Tensor(f"layers.{{layer}}.{role}", (n, HIDDEN), "float32", (("layer", dim),))
            for role, n in rows.items()
        }
        blocks.append(Block("attention", dim, sizes, tensors))
    return Model("attention", num_layers, "float32", tuple(blocks))


def _reference(num_heads: int, num_kv_heads: int, head_dim: int, tp: int) -> list[list[tuple[str, int]]]:
    """The rows of each rank: fuse by loops, cut into equal blocks."""
    fused: list[tuple[str, int]] = []
    for group in range(num_kv_heads):
        per_group = num_heads // num_kv_heads
        for head in range(group * per_group, (group + 1) * per_group):
            fused += [("q", head * head_dim + row) for row in range(head_dim)]
        fused += [("k", group * head_dim + row) for row in range(head_dim)]
        fused += [("v", group * head_dim + row) for row in range(head_dim)]
    size = len(fused) // tp
    assert size * tp == len(fused)
    return [fused[r * size : (r + 1) * size] for r in range(tp)]


GEOMETRIES = {
    "64q-2kv-tp8": (64, 2, 128, 8),
    "24q-6kv-tp4": (24, 6, 8, 4),
    "21q-3kv-tp9": (21, 3, 6, 9),
    "16q-8kv-tp1": (16, 8, 4, 1),
    "12q-12kv-tp6": (12, 12, 5, 6),
    "14q-1kv-tp4": (14, 1, 4, 4),
}


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_ranks_own_the_rows_of_the_reference(geometry: tuple[int, int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim, tp = geometry
    live = megatron.layout(
        _model({(0, 1): (num_heads, num_kv_heads, head_dim)}),
        megatron.mesh(tp=tp),
        vocab_divisor=1 if tp == 1 else tp,
    )
    prove(live)
    for rank, rows in enumerate(_reference(num_heads, num_kv_heads, head_dim, tp)):
        (buffer,) = [b for b in live.buffers(rank) if "linear_qkv" in b.name]
        assert list(buffer.dims[1]) == rows


def test_b014_two_ranks_of_eight_own_k_and_v() -> None:
    """64 query heads, 2 KV heads, head dim 128, TP 8: what the report says, number by number."""
    live = megatron.layout(_model({(0,): (64, 2, 128)}), megatron.mesh(tp=8), vocab_divisor=8)
    for rank in range(8):
        (buffer,) = [b for b in live.buffers(rank) if "linear_qkv" in b.name]
        owned = Counter(label for label, _ in buffer.dims[1])
        assert owned == ({"q": 832, "k": 128, "v": 128} if rank in (3, 7) else {"q": 1088})


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_all_ranks_together_rebuild_q_k_v(geometry: tuple[int, int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim, tp = geometry
    model = _model({(0, 1): (num_heads, num_kv_heads, head_dim)})
    live = megatron.layout(model, megatron.mesh(tp=tp, dp=2), vocab_divisor=1 if tp == 1 else tp)
    values = _values(model)
    ranks = _cut_by_hand(values, {(0, 1): (num_heads, num_kv_heads, head_dim)}, tp, dp=2)
    for rank, arrays in ranks.items():
        state = materialise(live, values, fill=np.nan)[rank]
        for name, rows in arrays.items():
            assert np.array_equal(state[name], rows)
    whole_model = hf.layout(model)
    back = simulate(
        plan(live, whole_model),
        materialise(live, values, fill=np.nan),
        into=empty(whole_model, np.float64, fill=np.nan),
    )
    wanted = materialise(whole_model, values)
    for name, array in wanted[0].items():
        assert np.array_equal(back[0][name], array)


def test_heads_that_differ_by_layer() -> None:
    """Every layer with its own heads, over pipeline stages and more ranks than KV heads."""
    heads = {(0, 3): (24, 2, 4), (1,): (16, 4, 4), (2, 4): (8, 8, 4)}
    model = _model(heads)
    live = megatron.layout(
        model, megatron.mesh(tp=4, pp=2), vocab_divisor=4, pipeline=megatron.stages(5, 2, sizes=(3, 2))
    )
    prove(live)
    values = _values(model)
    by_hand = _cut_by_hand(values, heads, 4, dp=1)
    state = materialise(live, values, fill=np.nan)
    for stage, layers in enumerate(((0, 1, 2), (3, 4))):
        for tp in range(4):
            for local, layer in enumerate(layers):
                name = f"decoder.layers.{local}.self_attention.linear_qkv.weight"
                wanted = by_hand[tp][f"decoder.layers.{layer}.self_attention.linear_qkv.weight"]
                assert np.array_equal(state[stage * 4 + tp][name], wanted)
    target = hf.layout(model)
    back = simulate(plan(live, target), state, into=empty(target, np.float64, fill=np.nan))
    for name, array in materialise(target, values)[0].items():
        assert np.array_equal(back[0][name], array)


def _values(model: Model) -> dict[Tensor, np.ndarray]:
    """Every element of every tensor is a number of its own."""
    values, start = {}, 0
    for tensor in model.tensors:
        shape = [len(dim) for dim in tensor.dims]
        values[tensor] = np.arange(start, start + tensor.numel, dtype=np.float64).reshape(shape)
        start += tensor.numel
    return values


def _cut_by_hand(
    values: dict[Tensor, np.ndarray], heads: dict[tuple[int, ...], tuple[int, int, int]], tp: int, *, dp: int
) -> dict[int, dict[str, np.ndarray]]:
    """The fused weight of each rank and layer, stacked row by row; layers numbered as in the model."""
    ranks: dict[int, dict[str, np.ndarray]] = {rank: {} for rank in range(tp * dp)}
    for layers, sizes in heads.items():
        for rank in ranks:
            rows = _reference(*sizes, tp)[rank % tp]
            for at, layer in enumerate(sorted(layers)):
                by_role = {
                    tensor.name[-1]: array[at]
                    for tensor, array in values.items()
                    if tensor.index and [n for _, n in tensor.index[0][1]] == sorted(layers)
                }
                ranks[rank][f"decoder.layers.{layer}.self_attention.linear_qkv.weight"] = np.stack(
                    [by_role[label][row] for label, row in rows]
                )
    return ranks
