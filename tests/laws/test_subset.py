"""Parts of layouts: their arrays are arrays of the whole, and what they hold is what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardweave.dialects import hf, megatron, vllm
from shardweave.errors import BufferRuleError, UnknownNameError
from shardweave.layout import Layout, Mesh, narrowed, prove, subset
from shardweave.models import from_config
from shardweave.plan import materialise, plan, simulate

MODEL = from_config(
    {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 5,
        "hidden_size": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "vocab_size": 70,
        "dtype": "float32",
        "tie_word_embeddings": False,
    }
)
LAYOUTS: dict[str, Callable[[], Layout]] = {
    "megatron": lambda: megatron.layout(MODEL, megatron.mesh(tp=2, pp=3, ep=2, etp=1), vocab_divisor=3),
    "vllm": lambda: vllm.layout(MODEL, vllm.mesh(tp=2)),
    "hf": lambda: hf.layout(MODEL),
}


@pytest.fixture(params=LAYOUTS)
def whole(request: pytest.FixtureRequest) -> Layout:
    if request.param == "megatron":  # five layers on three stages
        pipeline = megatron.stages(5, 3, first=1, last=2)
        mesh = megatron.mesh(tp=2, pp=3, ep=2, etp=1)
        return megatron.layout(MODEL, mesh, vocab_divisor=3, pipeline=pipeline)
    return LAYOUTS[request.param]()


def test_of_everything_is_the_whole(whole: Layout) -> None:
    assert subset(whole) == whole


@pytest.mark.parametrize("layers", [(1, 3), (4,), range(5)], ids=str)
def test_arrays_of_a_subset_are_arrays_of_the_whole(whole: Layout, layers: Any) -> None:
    part = subset(whole, keep=lambda name: "{layer}" in name, layer=layers)
    prove(part)
    values = {t: np.random.default_rng(7).random([len(d) for d in t.dims]) for t in whole.tensors}
    of_part = {t: _some(values, whole, t) for t in part.tensors}
    all_of, some_of = materialise(whole, values), materialise(part, of_part)
    for rank in whole.mesh.ranks:
        wanted = {
            name
            for name, (buffer, positions) in whole.arrays(rank).items()
            if "layer" in dict(buffer.parts[0].tensor.index) and buffer.dims[0][positions[0]][1] in layers
        }
        assert set(some_of[rank]) == wanted
        for name, array in some_of[rank].items():
            assert np.array_equal(array, all_of[rank][name])


def _some(values: Any, whole: Layout, part: Any) -> Any:
    """The members of a family that a part of it has, out of all."""
    of = next(t for t in whole.tensors if t.name == part.name)
    found = values[of]
    for axis, ((_, mine), (_, every)) in enumerate(zip(part.index, of.index, strict=True)):
        numbers = [n for _, n in every]
        found = np.take(found, [numbers.index(n) for _, n in mine], axis=axis)
    return found


def test_a_source_is_narrowed_within_its_buffers() -> None:
    """Only the keys, and only some experts, of a source that fuses the ones and stacks the others."""
    whole = hf.layout(MODEL, stacked_experts=True)
    fused = LAYOUTS["vllm"]()
    keys = {t: t for t in fused.tensors if "k_proj" in t.name}
    part = narrowed(fused, keys)
    one = Layout("keys", Mesh((), offset=9), tuple(r for r in hf.layout(MODEL).rules if "k_proj" in r.name))
    values = {t: np.random.default_rng(7).random([len(d) for d in t.dims]) for t in fused.tensors}
    moved = simulate(plan(part, one), materialise(fused, values))
    for name, array in materialise(one, values)[9].items():
        assert np.array_equal(moved[9][name], array)
    with pytest.raises(BufferRuleError, match="as a whole or not at all"):
        subset(fused, keep=lambda name: "k_proj" in name)
    with pytest.raises(BufferRuleError, match="it is stacked over 'expert'"):
        subset(whole, keep=lambda name: "experts" in name, expert=(0, 2))


@pytest.mark.parametrize("asked", [{"depth": (1,)}, {"layer": ()}, {"keep": lambda name: False}])
def test_what_there_is_not_is_refused(asked: Any) -> None:
    with pytest.raises(UnknownNameError, match="a subset names what there is"):
        subset(subset(LAYOUTS["vllm"](), keep=lambda name: "{layer}" in name), **asked)
