"""Whole tensors from ranks, replicas compared: the law, and the copies that drift apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardweave.dialects import deepspeed, megatron, vllm
from shardweave.errors import GapError, ReplicaError
from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, along, cut, whole
from shardweave.models import from_config
from shardweave.plan import assemble, materialise

MODEL = from_config(
    {
        "model_type": "qwen3",
        "vocab_size": 90,
        "hidden_size": 24,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 40,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
)


def _values(layout: Layout) -> dict[Tensor, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(7)
    return {
        tensor: rng.standard_normal([len(dim) for dim in tensor.dims]).astype(np.float32)
        for tensor in layout.tensors
    }


def _layouts() -> dict[str, Layout]:
    yuan = Tensor("v_proj.weight", (24, 5), "float32")
    auto = deepspeed.AutoTP(tp=2, num_heads=6, num_kv_heads=6, hidden=5)
    return {
        "megatron tied, pp 2, dp 2": megatron.layout(
            MODEL, megatron.mesh(tp=4, pp=2, dp=2), pipeline=megatron.stages(5, 2, first=2), vocab_divisor=4
        ),
        "vllm, four ranks a KV head": vllm.layout(MODEL, vllm.mesh(tp=8)),
        "deepspeed yuan, heads on two ranks": deepspeed.weight_layout(
            "yuan_value", yuan, Mesh((("tp", 2),)), auto
        ),
    }


@pytest.mark.parametrize("name", _layouts())
def test_assemble_undoes_materialise(name: str) -> None:
    layout = _layouts()[name]
    values = _values(layout)
    found = assemble(layout, materialise(layout, values, fill=np.nan))
    for tensor, array in values.items():
        assert found[tensor].tobytes() == array.tobytes()


@pytest.mark.parametrize("name", _layouts())
def test_b020_a_replica_that_differs_by_one_bit_is_named(name: str) -> None:
    """One copy is one unit in the last place off: it is reported, never picked silently."""
    layout = _layouts()[name]
    values = _values(layout)
    caught = 0
    for rank in layout.mesh.ranks:
        for buffer in layout.buffers(rank):
            for piece in buffer.pieces():
                state = materialise(layout, values, fill=np.nan)
                (array_name, positions) = next(buffer.members())
                if any(positions[i] not in piece.at.dims[d] for i, d in enumerate(buffer.separate)):
                    continue
                spot = tuple(piece.at.dims[d].start for d in buffer.stacked)
                array = state[rank][array_name]
                array.view(np.uint32)[spot] ^= 1
                try:
                    assemble(layout, state)
                except ReplicaError as error:
                    caught += 1
                    assert piece.tensor.name in error.where
                    assert f"rank {rank}" in error.equation and "1 elements differ" in error.equation
                else:
                    # Only what a single place holds can change without a word.
                    assert _num_places(layout, piece.tensor, piece.box.offset) == 1
    assert caught


def _num_places(layout: Layout, tensor: Tensor, element: tuple[int, ...]) -> int:
    return sum(
        element in piece.box
        for rank in layout.mesh.ranks
        for buffer in layout.buffers(rank)
        for piece in buffer.pieces()
        if piece.tensor == tensor
    )


def test_signed_zeros_and_nans_are_told_apart() -> None:
    tensor = Tensor("w", (3,), "float32")
    layout = Layout("copies", Mesh((("dp", 2),)), (BufferRule("w", (Part(tensor),), (whole(3),)),))
    nan = np.array([0x7FC00001, 0, 0x3F800000], np.uint32).view(np.float32)
    same = {0: {"w": nan.copy()}, 1: {"w": nan.copy()}}
    assert assemble(layout, same)[tensor].tobytes() == nan.tobytes()
    for spot, word in ((0, 0x7FC00002), (1, 0x80000000)):
        drifted = {0: {"w": nan.copy()}, 1: {"w": nan.copy()}}
        drifted[1]["w"].view(np.uint32)[spot] = word
        with pytest.raises(ReplicaError, match=f"element \\({spot},\\)"):
            assemble(layout, drifted)


def test_a_gap_is_named_in_the_numbers_of_the_model() -> None:
    mesh = Mesh((("pp", 2),))
    layers = cut(whole(9), 3, 9)
    tensor = Tensor("layers.{layer}.w", (2,), "float32", (("layer", layers),))
    held = along(mesh, "pp", lambda s: cut(layers, 3 * s, 3 * s + 3 - s))
    layout = Layout("stages", mesh, (BufferRule("layers.{layer}.w", (Part(tensor),), (held, whole(2))),))
    with pytest.raises(GapError, match=r"element \(8, 0\).*missing 2 of 12"):
        assemble(layout, materialise(layout, _values(layout)))
