"""What a config says about the computation: read as transformers reads it, or refused by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import pytest

from shardweave.errors import ModelError
from shardweave.train.maths import FAMILIES, Maths, maths
from shardweave.train.rotary import Linear, Llama3, Yarn

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "dtype": "float32",
}
LEAST: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "model_type": "llama"},
    "qwen3": {**SIZES, "model_type": "qwen3"},
    "qwen3_moe": {**SIZES, "model_type": "qwen3_moe", "moe_intermediate_size": 11, "num_experts": 12},
}
"""The keys that have to be there, and no other."""

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
FULL, SLIDING = "full_attention", "sliding_attention"


def of(family: str, **changes: Any) -> Maths:
    return maths(LEAST[family] | changes)


# --- what is not said ---------------------------------------------------------------------------


def theirs(family: str, **changes: Any) -> Any:
    """The config of transformers from the same keys."""
    from transformers import AutoConfig

    # It writes into what it is given.
    values = copy.deepcopy(LEAST[family] | changes)
    del values["model_type"]
    return AutoConfig.for_model(family, **values)


def windows_of(config: Any) -> tuple[int | None, ...]:
    """The window of each layer of a model of transformers: what its attention is built with."""
    from transformers import AutoModelForCausalLM

    layers = AutoModelForCausalLM.from_config(config).model.layers
    return tuple(getattr(layer.self_attn, "sliding_window", None) for layer in layers)


CHANGES: dict[str, Mapping[str, Any]] = {
    "least": {},
    "a window without a size": {"use_sliding_window": True},
    "a window of some layers": {"use_sliding_window": True, "max_window_layers": 2},
    "a size without a window": {"sliding_window": 5},
    "a null window": {"use_sliding_window": True, "sliding_window": None},
    "a window": WINDOW,
    "theta beside": {"rope_theta": 5e4},
    "theta within": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    "parameters without theta": {"rope_parameters": {"rope_type": "default"}},
    "linear of old": {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3 without a context": {"rope_parameters": LLAMA3},
    "yarn without a context": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    "a context": {"rope_parameters": LLAMA3, "max_position_embeddings": 512},
}


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_key_means_what_transformers_takes_it_for(family: str, changes: str) -> None:
    given = CHANGES[changes]
    if family == "llama" and any("window" in key for key in given):
        # Its class takes any key, and does nothing with these.
        with pytest.raises(ModelError, match="window"):
            of(family, **given)
        return
    if family == "qwen3_moe" and "max_window_layers" in given:
        given = {key: value for key, value in given.items() if key != "max_window_layers"}
    ours, config = of(family, **given), theirs(family, **given)
    assert ours.eps == config.rms_norm_eps
    assert ours.num_kv_heads == config.num_key_value_heads
    assert ours.model.tied == config.tie_word_embeddings
    assert ours.rotary.theta == config.rope_parameters["rope_theta"]
    context = config.rope_parameters.get("original_max_position_embeddings")
    assert getattr(ours.rotary.scaling, "original", None) == context
    assert ours.windows == windows_of(config)
    if family == "qwen3_moe":
        # More experts for a token than its default would hide what the default is.
        assert (ours.num_experts, ours.top_k) == (config.num_experts, config.num_experts_per_tok)
        assert ours.norm_topk is config.norm_topk_prob is False
        assert sum(len(block.layers) for block in ours.model.of("moe")) == 3


@pytest.mark.peer("transformers")
def test_a_missing_head_dim_is_that_of_the_family() -> None:
    assert of("llama").head_dim == theirs("llama").head_dim == 4
    assert of("qwen3").head_dim == theirs("qwen3").head_dim == 128
    assert not hasattr(theirs("qwen3_moe"), "head_dim")  # hidden_size // num_attention_heads
    assert of("qwen3_moe").head_dim == 4


@pytest.mark.peer("transformers")
def test_a_missing_beginning_is_that_of_transformers() -> None:
    """Of weights that are begun: `runtime.begun` takes 0.02 where there is no `initializer_range`."""
    assert {theirs(family).initializer_range for family in FAMILIES} == {0.02}


# --- what is said -------------------------------------------------------------------------------


def test_windows() -> None:
    assert of("qwen3", **WINDOW, max_window_layers=1).windows == (None, 5, 5)
    assert of("qwen3", **WINDOW, layer_types=[SLIDING, FULL, SLIDING]).windows == (5, None, 5)
    # Layers with types have no use for the number of the first.
    assert of("qwen3", **WINDOW, layer_types=[SLIDING, FULL, FULL], max_window_layers=0).windows == (
        *(5, None, None),
    )
    assert of("qwen3", layer_types=[FULL] * 3).windows == (None, None, None)
    assert of("qwen3_moe", **WINDOW).windows == (5, 5, 5)
    assert of("qwen3_moe", **WINDOW, max_window_layers=1).windows == (5, 5, 5)


def test_positions() -> None:
    inside = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e3}
    assert of("llama", rope_parameters=inside).rotary.scaling == Linear(2.0)
    assert of("llama", rope_parameters=inside, rope_theta=7e3).rotary.theta == 7e3
    assert of("llama", rope_parameters=inside, rope_scaling=dict(inside)).rotary.theta == 7e3
    assert isinstance(of("llama", rope_parameters=LLAMA3).rotary.scaling, Llama3)
    assert isinstance(of("llama", rope_scaling={"type": "yarn", "factor": 2.0}).rotary.scaling, Yarn)
    assert of("llama", rope_scaling=None, rope_parameters=None).rotary.scaling is None


def test_experts() -> None:
    assert of("qwen3_moe", norm_topk_prob=True).norm_topk
    assert of("qwen3_moe", num_experts_per_tok=12).top_k == 12
    sparse = of("qwen3_moe", decoder_sparse_step=2, num_hidden_layers=5, mlp_only_layers=[3]).model.of("moe")
    assert [layer for block in sparse for _, layer in block.layers] == [1]


def test_a_model_without_sparse_layers_has_no_experts() -> None:
    dense = of("qwen3_moe", mlp_only_layers=[0, 1, 2], num_experts_per_tok=99, norm_topk_prob=True)
    assert (dense.num_experts, dense.top_k, dense.norm_topk) == (0, 0, False)


@pytest.mark.parametrize("value", ["null", "said"])
def test_what_says_nothing_is_read(value: str) -> None:
    said = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0} if value == "said" else {}
    null = {"attention_dropout": None, "partial_rotary_factor": None}
    assert of("llama", **(said or null)) == of("llama", hidden_act="silu")


# --- what is not computed -----------------------------------------------------------------------

REFUSED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "hidden_act": ("llama", {"hidden_act": "gelu"}),
    "hidden_act, null": ("llama", {"hidden_act": None}),
    "attention_dropout": ("qwen3", {"attention_dropout": 0.1}),
    "partial_rotary_factor": ("llama", {"partial_rotary_factor": 0.5}),
    "partial_rotary_factor, within": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "rms_norm_eps": ("llama", {"rms_norm_eps": -1e-6}),
    "rms_norm_eps, null": ("llama", {"rms_norm_eps": None}),
    "rms_norm_eps, a text": ("llama", {"rms_norm_eps": "1e-6"}),
    "rope_type": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "rope_type, longrope": ("qwen3", {"rope_scaling": {"type": "longrope", "factor": 2.0}}),
    "rope_theta": ("llama", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}),
    "rope_theta, negative": ("llama", {"rope_theta": -1.0}),
    "rope_scaling": (
        "llama",
        {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "rope_parameters": ("llama", {"rope_parameters": "default"}),
    "full_attention": ("qwen3", {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 1e4}}}),
    "factor": ("qwen3", {"rope_parameters": {"rope_type": "linear"}}),
    "attention_sink": ("llama", {"rope_parameters": {"rope_type": "default", "attention_sink": 2}}),
    "sliding_window": ("qwen3", {"use_sliding_window": True, "sliding_window": 0}),
    "sliding_window, of llama": ("llama", {"sliding_window": 4096}),
    "sliding_window, by type": ("qwen3", {"layer_types": [FULL, SLIDING, FULL]}),
    "use_sliding_window": ("qwen3", {"use_sliding_window": "yes"}),
    "max_window_layers": ("qwen3", {**WINDOW, "max_window_layers": None}),
    "layer_types": ("qwen3", {"layer_types": [FULL, "linear_attention", FULL]}),
    "layer_types, too few": ("qwen3", {**WINDOW, "layer_types": [SLIDING]}),
    "layer_types, of experts": ("qwen3_moe", {**WINDOW, "layer_types": [SLIDING, FULL, FULL]}),
    "num_experts_per_tok": ("qwen3_moe", {"num_experts_per_tok": 13}),
    "num_experts_per_tok, none": ("qwen3_moe", {"num_experts_per_tok": 0}),
    "num_experts_per_tok, null": ("qwen3_moe", {"num_experts_per_tok": None}),
    "num_experts_per_tok, a switch": ("qwen3_moe", {"num_experts_per_tok": True}),
    "num_experts_per_tok, default": ("qwen3_moe", {"num_experts": 7}),
    "norm_topk_prob": ("qwen3_moe", {"norm_topk_prob": None}),
    "norm_topk_prob, a number": ("qwen3_moe", {"norm_topk_prob": 1}),
    "decoder_sparse_step": ("qwen3_moe", {"decoder_sparse_step": 0}),
    "mlp_only_layers": ("qwen3_moe", {"mlp_only_layers": [3]}),
    "quantization_config": ("llama", {"quantization_config": {"quant_method": "fp8"}}),
    "attn_output_gate": ("qwen3", {"attn_output_gate": True}),
    "use_qk_norm": ("qwen3", {"use_qk_norm": False}),
    "logit_scale": ("llama", {"logit_scale": 0.5}),
    "residual_multiplier": ("llama", {"residual_multiplier": 0.2}),
    "original_max_position_embeddings": ("llama", {"original_max_position_embeddings": 64}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_name(case: str) -> None:
    family, changes = REFUSED[case]
    of(family)
    with pytest.raises(ModelError, match=re.escape(case.partition(",")[0])):
        of(family, **changes)


def test_another_family_is_refused() -> None:
    with pytest.raises(ModelError, match="model_type='mixtral'"):
        maths({**SIZES, "model_type": "mixtral"})
    with pytest.raises(ModelError, match="model_type=None"):
        maths(SIZES)
