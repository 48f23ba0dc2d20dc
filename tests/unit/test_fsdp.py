"""The layout of a model under ``fully_shard``: experts, tied heads, the order of cuts, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from shardweave.dialects import fsdp
from shardweave.errors import GeometryError, UnknownNameError
from shardweave.layout import chunk, even, prove, whole
from shardweave.models import from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama", "dtype": "bfloat16", "vocab_size": 53, "hidden_size": 30, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 43,
    "tie_word_embeddings": False,
}  # fmt: skip
MOE: dict[str, Any] = {
    **LLAMA, "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
}  # fmt: skip
UP = "model.layers.{layer}.mlp.up_proj.weight"


def held(layout: Any, rank: int, name: str) -> list[str]:
    """The dims of a buffer of a rank, index dims left out."""
    (buffer,) = [one for one in layout.buffers(rank) if one.name == name]
    return [str(dim) for dim in buffer.dims[len(buffer.separate) :]]


def test_every_weight_is_chunked_by_its_rows() -> None:
    model = from_config(LLAMA)
    layout = fsdp.layout(model, fsdp.mesh(dp=4))
    prove(layout, model.tensors)
    assert [held(layout, r, UP)[0] for r in range(4)] == ["[0:11]", "[11:22]", "[22:33]", "[33:43]"]
    assert held(layout, 3, "model.norm.weight") == ["[24:30]"]
    many = fsdp.layout(model, fsdp.mesh(dp=32))
    prove(many, model.tensors)
    assert held(many, 21, UP) == ["[42:43]", "[0:30]"] and held(many, 22, UP) == ["[]", "[0:30]"]


def test_the_order_of_two_cuts_of_one_dim() -> None:
    model, mesh = from_config(LLAMA), fsdp.mesh(dp=3, tp=2)
    for outer, rule in {
        "tp": lambda dp, tp: chunk(chunk(whole(43), 2, tp), 3, dp),
        "dp": lambda dp, tp: chunk(chunk(whole(43), 3, dp), 2, tp),
    }.items():
        layout = fsdp.layout(model, mesh, tp="tp", outer=outer)
        prove(layout, model.tensors)
        for rank in mesh.ranks:
            at = divmod(rank, 2)
            assert held(layout, rank, UP) == [str(rule(*at)), "[0:30]"]
            # Cut by tp in the other dim, and whole along tp.
            down = held(layout, rank, "model.layers.{layer}.mlp.down_proj.weight")
            assert down == [str(even(whole(30), 3, at[0])), str(chunk(whole(43), 2, at[1]))]
            assert held(layout, rank, "model.norm.weight") == [str(even(whole(30), 3, at[0]))]


def test_axes_that_shard_are_flattened_the_outermost_first() -> None:
    model = from_config(LLAMA)
    two = fsdp.layout(model, fsdp.mesh(dp=2, cp=3), shard=("dp", "cp"))
    one = fsdp.layout(model, fsdp.mesh(dp=6))
    assert [held(two, r, UP) for r in range(6)] == [held(one, r, UP) for r in range(6)]
    swapped = fsdp.layout(model, fsdp.mesh(dp=2, cp=3), shard=("cp", "dp"))
    assert held(swapped, 1, UP) == held(one, 2, UP)


def test_stacked_experts_are_shared_out_whole() -> None:
    model = from_config(MOE)
    layout = fsdp.layout(model, fsdp.mesh(dp=4), stacked_experts=True)
    prove(layout, model.tensors)
    name = "model.layers.{layer}.mlp.experts.gate_up_proj"
    fused = "gate[0:14] up[0:14]"
    assert [held(layout, r, name) for r in (0, 2, 3)] == [
        [e, fused, "[0:30]"] for e in ("[0:2]", "[4:5]", "[]")
    ]
    single = fsdp.layout(model, fsdp.mesh(dp=4))
    assert held(single, 3, "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight") == [
        "[12:14]",
        "[0:30]",
    ]


def test_a_plan_of_ones_own_cuts_experts() -> None:
    model, mesh = from_config(MOE), fsdp.mesh(dp=2, tp=2)
    with pytest.raises(GeometryError, match=r"model of qwen3_moe: plan\(None\)"):
        fsdp.layout(model, mesh, tp="tp")
    down = "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
    layout = fsdp.layout(model, mesh, tp="tp", plan={down: -1})
    prove(layout, model.tensors)
    assert held(layout, 1, down) == ["[0:15]", "[7:14]"]
    assert held(layout, 1, "lm_head.weight") == ["[0:27]", "[0:30]"]


def test_a_tied_head_is_cut_as_the_embedding() -> None:
    model = from_config({**LLAMA, "tie_word_embeddings": True})
    mesh = fsdp.mesh(dp=3, tp=2)
    layout = fsdp.layout(model, mesh, tp="tp", with_aliases=True)
    prove(layout)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    for rank in mesh.ranks:
        first, second = (held(layout, rank, name) for name in names)
        assert first == second
    (alias,) = [rule for rule in layout.rules if rule.name == "lm_head.weight"]
    assert all(part.replica for part in alias.parts)


def test_layouts_that_do_not_fit_are_refused() -> None:
    model, mesh = from_config(LLAMA), fsdp.mesh(dp=3, tp=2)
    with pytest.raises(GeometryError, match=r"tp\(None\) != axes\(tp, dp\)"):
        fsdp.layout(model, mesh)
    with pytest.raises(GeometryError, match=r"shard\(\), replicate\(dp\)"):
        fsdp.layout(model, fsdp.mesh(dp=3), shard=(), replicate=("dp",))
    with pytest.raises(GeometryError, match=r"outer\('fsdp'\)"):
        fsdp.layout(model, mesh, tp="tp", outer="fsdp")
    with pytest.raises(GeometryError, match=r"plan\(1 weights\) without tp"):
        fsdp.layout(model, fsdp.mesh(dp=3), plan={UP: 0})
    with pytest.raises(UnknownNameError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        fsdp.layout(model, mesh, tp="tp", plan={"model.layers.0.mlp.up_proj.weight": 0})
    with pytest.raises(GeometryError, match=r"dim\(2\) of 2 dims"):
        fsdp.layout(model, mesh, tp="tp", plan={UP: 2})
