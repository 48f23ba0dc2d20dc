"""Public reports on gated attention, delta nets and Mamba2 mixers: one test a report, named after it.

Moves are carried out in numpy with every element another number, into targets full of NaN; the right rows are
written down here without a layout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardweave.dialects import hf, megatron, vllm
from shardweave.errors import GapError, GeometryError, ModelError, UnknownNameError
from shardweave.layout import Dim, Layout, concat, cut, prove, whole
from shardweave.models import Model, from_config
from shardweave.plan import empty, materialise, plan, simulate
from shardweave.refit.values import landing

COMMON: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 3, "vocab_size": 64, "dtype": "float32",
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 2, "intermediate_size": 8,
}  # fmt: skip


def qwen(family: str, kind: str, **sizes: Any) -> Model:
    """One layer with a delta net or with attention."""
    given = {
        "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 2,
        "linear_value_head_dim": 2, "linear_conv_kernel_dim": 4, "attention_bias": False,
        "layer_types": [kind], "num_experts": 0,
    }  # fmt: skip
    if family == "qwen3_5_text":
        del given["num_experts"]
    return from_config({"model_type": family, **COMMON, **given, **sizes})


def held(layout: Layout, rank: int, ending: str) -> Dim:
    """What a rank holds of the first shape dim of the array with this ending."""
    (buffer,) = (b for name, (b, _) in layout.arrays(rank).items() if name.endswith(ending))
    return buffer.dims[buffer.stacked[0]]


def stretches(label: str, *bounds: tuple[int, int]) -> Dim:
    return concat(*(cut(whole(stop, label), start, stop) for start, stop in bounds))


def there_and_back(model: Model, *degrees: int) -> None:
    """From one rank through the given degrees of Megatron and back, in the values of the source."""
    layouts = [megatron.layout(model, megatron.mesh(tp=tp)) for tp in degrees]
    values, count = {}, 0
    for tensor in model.tensors:
        shape = [len(dim) for dim in tensor.dims]
        values[tensor] = np.arange(count, count + tensor.numel, dtype=np.float64).reshape(shape)
        count += tensor.numel
    first = state = materialise(layouts[0], values, fill=-1)
    for src, dst in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
        state = simulate(plan(src, dst), state, into=empty(dst, np.float64, fill=-1))
    assert first.keys() == state.keys()
    for rank, arrays in first.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(state[rank][name], array)


def test_b012_slime_1575_a_gate_is_the_fourth_segment_of_each_group() -> None:
    """16 heads of 256 in 2 groups: 9216 rows, of which a rank of two has 4608."""
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}
    model = qwen("qwen3_next", "full_attention", **sizes)
    layout = megatron.layout(model, megatron.mesh(tp=2))
    assert len(held(megatron.layout(model, megatron.mesh(tp=1)), 0, "linear_qkv.weight")) == 9216
    for rank in range(2):
        first = 8 * rank
        queries = [(2 * h * 256, (2 * h + 1) * 256) for h in range(first, first + 8)]
        gates = [((2 * h + 1) * 256, (2 * h + 2) * 256) for h in range(first, first + 8)]
        group = (rank * 256, (rank + 1) * 256)
        right = concat(stretches("q", *queries, *gates), stretches("k", group), stretches("v", group))
        found = held(layout, rank, "linear_qkv.weight")
        assert found == right and len(found) == 4608
    there_and_back(qwen("qwen3_next", "full_attention", **sizes | {"head_dim": 6}), 1, 2)
    (block,) = model.of("gated_attention")
    short = replace(block.tensors["q"], shape=(8191, 3))
    wrong = replace(block, tensors={**block.tensors, "q": short})
    blocks = tuple(wrong if one is block else one for one in model.blocks)
    with pytest.raises(ModelError, match=r"shape\(8191, 3\) != \(8192, 3\)"):
        vllm.layout(replace(model, blocks=blocks), vllm.mesh(tp=2))


def test_b072_megatron_bridge_1690_six_ranges_of_a_delta_net() -> None:
    """5152 rows of q, k, v, z, beta, alpha: a rank of two has a half of each, and not the first 2576."""
    sizes = {"linear_num_key_heads": 16, "linear_key_head_dim": 64}
    sizes |= {"linear_num_value_heads": 16, "linear_value_head_dim": 96}
    model = qwen("qwen3_5_text", "linear_attention", **sizes)
    layout = megatron.layout(model, megatron.mesh(tp=2))
    right = concat(
        stretches("qkv", (0, 512), (1024, 1536), (2048, 2816)),
        stretches("z", (0, 768)),
        stretches("b", (0, 8)),
        stretches("a", (0, 8)),
    )
    assert held(layout, 0, "in_proj.weight") == right and len(right) == 2576
    assert held(layout, 0, "conv1d.weight") == stretches("", (0, 512), (1024, 1536), (2048, 2816))
    there_and_back(model, 2, 4, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_b073_vllm_36242_b_and_a_by_key_head_or_one_after_the_other(rank: int) -> None:
    """16 key heads and 32 value heads: 64 rows of both orders, and each family says which it has."""
    sizes = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    fused = vllm.layout(qwen("qwen3_next", "linear_attention", **sizes), vllm.mesh(tp=2))
    apart = vllm.layout(qwen("qwen3_5_text", "linear_attention", **sizes), vllm.mesh(tp=2))
    assert held(fused, rank, "in_proj_ba.weight") == stretches("", (32 * rank, 32 * rank + 32))
    half = (16 * rank, 16 * rank + 16)
    assert held(apart, rank, "in_proj_ba.weight") == concat(stretches("b", half), stretches("a", half))
    model = qwen("qwen3_next", "linear_attention", **sizes)
    (block,) = model.of("delta")
    orderless = {role: tensor for role, tensor in block.tensors.items() if role != "ba"}
    blocks = tuple(replace(b, tensors=orderless) if b is block else b for b in model.blocks)
    with pytest.raises(ModelError, match=r"missing\(ba\)"):
        vllm.layout(replace(model, blocks=blocks), vllm.mesh(tp=2))


def test_b073_vllm_36242_a_trainer_fills_both_orders() -> None:
    """The value heads of key head 5 are 10 and 11, wherever their rows lie."""
    sizes = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    for family in ("qwen3_next", "qwen3_5_text"):
        model = qwen(family, "linear_attention", **sizes)
        src, dst = megatron.layout(model, megatron.mesh(tp=4)), vllm.layout(model, vllm.mesh(tp=2))
        landed, _ = landing(src, dst)
        # In Megatron's memory beta of head h is h, alpha is 100 + h, on the rank that has the head.
        state = empty(src, np.float64, fill=-1)
        for rank in range(4):
            projection = state[rank]["decoder.layers.0.self_attention.in_proj.weight"]
            projection[-16:-8] = np.arange(8 * rank, 8 * rank + 8)[:, None]
            projection[-8:] = 100 + np.arange(8 * rank, 8 * rank + 8)[:, None]
        moved = simulate(plan(src, landed), state, into=empty(landed, np.float64, fill=np.nan))
        for rank in range(2):
            rows = moved[rank]["model.layers.0.linear_attn.in_proj_ba.weight"][:, 0].tolist()
            heads = range(16 * rank, 16 * rank + 16)
            by_key_head = [v for h in heads[::2] for v in (h, h + 1, 100 + h, 101 + h)]
            one_after_the_other = [*heads, *(100 + h for h in heads)]
            assert rows == (by_key_head if family == "qwen3_next" else one_after_the_other)


def mixer(**sizes: Any) -> Model:
    given = {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128}
    given |= {"conv_kernel": 4, "use_bias": False, "hybrid_override_pattern": "M"}
    return from_config({"model_type": "nemotron_h", **COMMON, "num_hidden_layers": 1, **given, **sizes})


def test_b075_nemo_speech_10966_five_ranges_of_a_mixer() -> None:
    """Mamba2 of 8B: 18560 rows, 4640 on each rank of four."""
    model = mixer()
    assert len(held(megatron.layout(model, megatron.mesh(tp=1)), 0, "in_proj.weight")) == 18560
    layout, engine = megatron.layout(model, megatron.mesh(tp=4)), vllm.layout(model, vllm.mesh(tp=4))
    for rank in range(4):
        inner, group = (2048 * rank, 2048 * rank + 2048), (256 * rank, 256 * rank + 256)
        x, b, c = inner, tuple(8192 + n for n in group), tuple(9216 + n for n in group)
        dt = (18432 + 32 * rank, 18432 + 32 * rank + 32)
        right = stretches("", inner, *(tuple(8192 + n for n in part) for part in (x, b, c)), dt)
        for one in (layout, engine):
            assert held(one, rank, "in_proj.weight") == right and len(right) == 4640
            assert held(one, rank, "conv1d.weight") == stretches("", x, b, c)
            for name in ("D", "dt_bias"):
                assert held(one, rank, name) == stretches("", (32 * rank, 32 * rank + 32))
        assert held(layout, rank, "A_log") == held(engine, rank, ".A") == held(layout, rank, "D")
    there_and_back(mixer(mamba_head_dim=2, ssm_state_size=3), 1, 4, 2)
    names = [name for tensor in model.tensors for name in tensor.names()]
    with pytest.raises(
        UnknownNameError, match=r"unexpected 1 \(backbone\.layers\.0\.mixer\.B_norm\.weight\)"
    ):
        hf.variant([*names, "backbone.layers.0.mixer.B_norm.weight"], model)


def test_b075_nemo_speech_10966_a_lost_segment_is_a_gap() -> None:
    """The proof sees a rank whose dt rows are somebody else's."""
    layout = megatron.layout(mixer(), megatron.mesh(tp=2))
    rules = []
    for rule in layout.rules:
        if rule.name.endswith("in_proj.weight"):
            rows = rule.dims[1]
            assert not isinstance(rows, Dim)
            rule = replace(
                rule,
                parts=(replace(rule.parts[0], replica=True),),
                dims=(rule.dims[0], replace(rows, dims=(rows.dims[0], rows.dims[0])), rule.dims[2]),
            )
        rules.append(rule)
    with pytest.raises(GapError, match=r"in_proj\.weight"):
        prove(replace(layout, rules=tuple(rules)))


def test_ranks_that_no_head_is_left_for_are_refused() -> None:
    with pytest.raises(GeometryError, match=r"segment 'B'.* heads\(8\) % tp\(16\) = 8"):
        megatron.layout(mixer(), megatron.mesh(tp=16))
