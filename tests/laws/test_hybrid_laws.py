"""Laws of hybrid models: layouts of drawn sizes are proved, and plans between them move what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from shardweave.dialects import megatron, vllm
from shardweave.errors import CutError, GeometryError
from shardweave.layout import Layout, concat, even, prove, whole
from shardweave.models import Model, from_config
from shardweave.models.mixers import delta_segments, mamba_segments
from shardweave.plan import empty, materialise, plan, simulate
from shardweave.refit.values import landing

small = st.integers(1, 3)


@st.composite
def hybrids(draw: st.DrawFn) -> Model:
    """A model of few layers, whose heads and groups are multiples of small numbers."""
    hidden, layers, kernel = 4 * draw(small), draw(st.integers(1, 4)), draw(st.integers(2, 4))
    kv = draw(st.sampled_from([1, 2, 4]))
    common: dict[str, Any] = {
        "vocab_size": draw(st.integers(1, 40)),
        "hidden_size": hidden,
        "num_attention_heads": kv * draw(st.sampled_from([1, 2, 4])),
        "num_key_value_heads": kv,
        "head_dim": 2 * draw(small),
        "intermediate_size": 4 * draw(small),
        "dtype": "float32",
    }
    family = draw(st.sampled_from(["qwen3_next", "qwen3_5_text", "nemotron_h"]))
    groups, each = draw(st.sampled_from([1, 2, 4])), draw(small)
    if family == "nemotron_h":
        sizes = {
            "mamba_num_heads": groups * each,
            "mamba_head_dim": draw(small),
            "ssm_state_size": draw(small),
        }
        sizes |= {
            "n_groups": groups,
            "conv_kernel": kernel,
            "use_bias": False,
            "mlp_bias": draw(st.booleans()),
        }
        pattern = draw(st.text("M*-", min_size=layers, max_size=layers))
        return from_config({"model_type": family, **common, **sizes, "hybrid_override_pattern": pattern})
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    sizes = dict(zip(names, (groups, groups * each, draw(small), draw(small)), strict=True))
    sizes |= {"linear_conv_kernel_dim": kernel, "num_hidden_layers": layers, "attention_bias": False}
    kinds = st.sampled_from(["linear_attention", "full_attention"])
    sizes["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    if family == "qwen3_next":
        sizes |= {"num_experts": 4, "moe_intermediate_size": 4, "shared_expert_intermediate_size": 8}
        sizes["mlp_only_layers"] = draw(st.lists(st.integers(0, layers - 1), max_size=1))
    return from_config({"model_type": family, **common, **sizes})


def held(made: Any, **degrees: Any) -> Layout | None:
    """A layout, or None where the framework refuses the degrees."""
    try:
        return made(**degrees)
    except (GeometryError, CutError) as refused:
        event(f"refused: {refused.rule}")
        return None


@given(hybrids(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 2))
def test_a_refit_moves_what_the_layouts_say(model: Model, tp: int, engine_tp: int, pp: int) -> None:
    def trainer(tp: int) -> Layout:
        stages = megatron.stages(model.num_layers, pp, first=model.num_layers - 1 if pp > 1 else None)
        return megatron.layout(model, megatron.mesh(tp=tp, pp=pp), pipeline=stages)

    def engine(tp: int) -> Layout:
        return vllm.layout(model, vllm.mesh(tp=tp), vocab_multiple=4)

    src, dst = held(trainer, tp=tp), held(engine, tp=engine_tp)
    if src is None or dst is None:
        return
    event("held")
    prove(src, model.tensors)
    prove(dst, model.tensors)
    landed, steps = landing(src, dst)
    count = 1
    values = {}
    for tensor in model.tensors:
        shape = [len(dim) for dim in tensor.dims]
        values[tensor] = np.arange(count, count + tensor.numel, dtype=np.float64).reshape(shape)
        count += tensor.numel
    found = simulate(plan(src, landed), materialise(src, values), into=empty(landed, np.float64, fill=np.nan))
    expected = materialise(landed, values, fill=np.nan)
    for rank, arrays in expected.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[rank][name], array)
    changed = {step.final.name.rpartition(".")[2] for step in steps if step.operations}
    assert changed == ({"A"} if any(True for _ in model.of("mamba")) else set()) | (
        {"weight"} if any(True for _ in model.of("delta")) else set()
    )


@given(hybrids())
def test_checkpoints_are_proved_and_stored_by_segments(model: Model) -> None:
    layout = megatron.checkpoint(model, layer_keys="per_layer")
    prove(layout, model.tensors)
    assert megatron.variant(layout.arrays(0), model).arrays(0).keys() == layout.arrays(0).keys()
    shards = megatron.shards(model, megatron.mesh(), layer_keys="per_layer")
    assert shards.keys() == layout.arrays(0).keys()


@given(hybrids(), st.sampled_from([1, 2, 4]))
def test_the_segments_of_a_rank_are_its_heads(model: Model, tp: int) -> None:
    """Row by row, in plain loops: a rank has a stretch of heads of every segment, segment by segment."""
    layout = held(lambda tp: megatron.layout(model, megatron.mesh(tp=tp)), tp=tp)
    if layout is None:
        return
    for kind, path, segments in (
        ("delta", "self_attention.in_proj.weight", delta_segments),
        ("mamba", "mixer.in_proj.weight", mamba_segments),
    ):
        for block in model.of(kind):
            (rule,) = (rule for rule in layout.rules if rule.name.endswith(path))
            for rank in range(tp):
                buffer = rule.at(layout.mesh, rank)
                assert buffer is not None
                rows = [
                    row
                    for dim in segments(block).values()
                    for row in list(dim)[rank * len(dim) // tp : (rank + 1) * len(dim) // tp]
                ]
                assert list(buffer.dims[1]) == rows


def test_an_even_cut_of_a_fusion_is_another() -> None:
    """The law above can fail: two segments of four rows on two ranks."""
    fused = concat(whole(4, "z"), whole(4, "x"))
    apart = [concat(even(whole(4, "z"), 2, rank), even(whole(4, "x"), 2, rank)) for rank in range(2)]
    assert [even(fused, 2, rank) for rank in range(2)] != apart
