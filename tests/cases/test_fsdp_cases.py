"""Public bug reports about FSDP and DTensor state: one test a report, named after it.

Geometry and right values are the reports'. Rows carry markers, targets are filled with NaN first, and
what a file holds is read by safetensors.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardweave.convert import open_checkpoint
from shardweave.dialects import fsdp, hf
from shardweave.errors import ReplicaError, ShardweaveError
from shardweave.layout import Layout, Tensor, prove
from shardweave.models import from_config
from shardweave.plan import assemble, empty, materialise, plan, simulate

LLAMA: dict[str, Any] = {
    "model_type": "llama", "dtype": "float32", "vocab_size": 28, "hidden_size": 12, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 2, "intermediate_size": 21,
    "tie_word_embeddings": True,
}  # fmt: skip


def one(tensor: Tensor, mesh: Any, **placements: Any) -> Layout:
    layout = Layout("x", mesh, (fsdp.placed(tensor, mesh, placements),))
    prove(layout, [tensor])
    return layout


def rows(tensor: Tensor) -> np.ndarray:
    return np.arange(math.prod(tensor.shape), dtype=np.float32).reshape(tensor.shape) + 1


def whole(layout: Layout) -> dict[Tensor, np.ndarray]:
    """Values of every tensor of a layout, no two of them equal."""
    at = itertools.accumulate((tensor.numel for tensor in layout.tensors), initial=1)
    return {
        tensor: np.arange(first, first + tensor.numel, dtype=np.float32).reshape(
            [len(d) for d in tensor.dims]
        )
        for tensor, first in zip(layout.tensors, at, strict=False)
    }


def reshards(src: Layout, dst: Layout) -> None:
    """Moving gives each rank of the destination what cutting the whole tensors would have."""
    values = whole(src)
    found = simulate(plan(src, dst), materialise(src, values), into=empty(dst, np.float32, fill=np.nan))
    for rank, arrays in materialise(dst, values).items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[rank][name], array)


# --- K05 tied embeddings and views of one buffer --------------------------------------------------


def test_b038_deepspeed_1896_views_of_one_flat_buffer_are_no_aliases(tmp_path: Path) -> None:
    model = from_config(LLAMA)
    src, target = fsdp.layout(model, fsdp.mesh(dp=4), with_aliases=True), hf.layout(model)
    values = whole(target)
    # All parameters of a rank are views of one buffer, as FSDP allocates them: one storage, many tensors.
    state: dict[int, dict[str, np.ndarray]] = {}
    for rank, arrays in materialise(src, values).items():
        flat = np.concatenate([array.ravel() for array in arrays.values()])
        ends = np.cumsum([array.size for array in arrays.values()])
        views = np.split(flat, ends[:-1])
        state[rank] = {n: v.reshape(a.shape) for (n, a), v in zip(arrays.items(), views, strict=True)}
        assert all(view.base is not None for view in state[rank].values())
    exported = simulate(plan(src, target), state, into=empty(target, np.float32, fill=np.nan))[0]
    expected = materialise(target, values)[0]
    assert exported.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(exported[name], array)
    # The head is the one true alias: stored once, and recorded as another name of the embedding.
    assert model.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in exported
    state[2]["lm_head.weight"] = state[2]["lm_head.weight"] + 1
    with pytest.raises(ReplicaError, match=r"model\.embed_tokens\.weight"):
        assemble(src, state)
    # A flat shard that was saved as if it were the whole has another size than the model declares.
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    for name, shard in {
        "model.embed_tokens.weight": np.zeros(0, np.float32),
        "model.norm.weight": expected["model.norm.weight"][:6].copy(),
    }.items():
        save_file(expected | {name: shard}, tmp_path / "model.safetensors")
        with pytest.raises(ShardweaveError, match=rf"{name}.*\({shard.size}"):
            open_checkpoint(tmp_path)
    save_file(expected, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).model == model


# --- K18 resharding at its corners ----------------------------------------------------------------


@pytest.mark.parametrize(("src", "dst"), [(4, 3), (12, 5), (5, 64)])
def test_b112_pytorch_108869_ranks_beyond_the_rows_hold_nothing(src: int, dst: int) -> None:
    model = from_config(LLAMA)
    layouts = [fsdp.layout(model, fsdp.mesh(dp=world)) for world in (src, dst)]
    for layout in layouts:
        prove(layout, model.tensors)
    reshards(*layouts)
    if dst > 28:
        assert all(not array.size for array in materialise(layouts[1], whole(layouts[1]))[28].values())
    six = one(Tensor("w", (6, 5), "float32"), fsdp.mesh(dp=4), dp=fsdp.Shard(0))
    assert [buffer.shape for rank in range(4) for buffer in six.buffers(rank)] == [
        (2, 5),
        (2, 5),
        (2, 5),
        (0, 5),
    ]


def test_b114_pytorch_129229_tensor_parallel_rows_come_back_in_order() -> None:
    tensor, mesh = Tensor("embed", (4, 1), "float32"), fsdp.mesh(dp=2, tp=2)
    strided = one(tensor, mesh, dp=fsdp.Shard(0, split_factor=2), tp=fsdp.Shard(0))
    nested = one(tensor, mesh, dp=fsdp.Shard(0), tp=fsdp.Shard(0))
    held = {
        (at["dp"], at["tp"]): int(arrays["embed"][0, 0]) - 1
        for rank, arrays in materialise(strided, {tensor: rows(tensor)}).items()
        for at in [mesh.coordinate(rank)]
    }
    assert held == {(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3}
    # Read in the order of the mesh, as if both were plain shards, the rows are permuted.
    state = materialise(strided, {tensor: rows(tensor)})
    assert (assemble(nested, state)[tensor][:, 0] - 1).tolist() == [0, 2, 1, 3]
    assert (assemble(strided, state)[tensor][:, 0] - 1).tolist() == [0, 1, 2, 3]
    for axis in ("dp", "tp"):
        reshards(strided, one(tensor, mesh, **{axis: fsdp.Shard(0)}))
    reshards(strided, nested)


def test_b115_pytorch_124339_uneven_nested_cuts_have_two_answers() -> None:
    tensor, mesh = Tensor("w", (8, 2), "float32"), fsdp.mesh(dp=3, tp=2)
    nested = one(tensor, mesh, dp=fsdp.Shard(0), tp=fsdp.Shard(0))
    strided = one(tensor, mesh, dp=fsdp.Shard(0, split_factor=2), tp=fsdp.Shard(0))

    def table(layout: Layout) -> list[list[int]]:
        return [[i for _, i in buffer.dims[0]] for rank in range(6) for buffer in layout.buffers(rank)]

    assert table(nested) == [[0, 1], [2], [3, 4], [5], [6], [7]]
    assert table(strided) == [[0, 1], [4, 5], [2, 3], [6, 7], [], []]
    reshards(nested, strided)
    reshards(strided, nested)


@pytest.mark.parametrize("world", [3, 16, 32])
def test_b117_torchtitan_4797_heads_leave_any_number_of_ranks(world: int) -> None:
    """8 KV heads of 4 rows on 3, 16 and 32 ranks: half heads, and pieces of heads."""
    config = {**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4}
    model = from_config(config)
    reshards(fsdp.layout(model, fsdp.mesh(dp=world)), hf.layout(model))
    reshards(fsdp.layout(model, fsdp.mesh(dp=world)), fsdp.layout(model, fsdp.mesh(dp=5, offset=40)))


def test_b121_verl_925_a_world_of_one_is_not_special() -> None:
    tensor, mesh = Tensor("w", (7, 3), "float32"), fsdp.mesh(dp=1)
    plain = Layout("x", mesh, (fsdp.placed(tensor, mesh, {}),))
    replicated, sharded = one(tensor, mesh, dp=fsdp.Replicate()), one(tensor, mesh, dp=fsdp.Shard(0))
    states = [materialise(layout, {tensor: rows(tensor)})[0]["w"] for layout in (plain, replicated, sharded)]
    assert len({state.tobytes() for state in states}) == 1
    two = one(tensor, fsdp.mesh(dp=2), dp=fsdp.Shard(0))
    for layout in (plain, replicated, sharded):
        reshards(layout, two)
        reshards(two, layout)
    # A state in which some tensors are cut and some are plain is one layout.
    other = Tensor("v", (5,), "float32")
    rules = (*two.rules, fsdp.placed(other, two.mesh, {"dp": fsdp.Replicate()}))
    mixed = Layout("x", two.mesh, rules)
    prove(mixed, [tensor, other])
    merged = Layout("x", mesh, tuple(fsdp.placed(t, mesh, {}) for t in (tensor, other)))
    reshards(mixed, merged)
