"""DeepSeek-V3: names and shapes by hand, published totals, layers for further tokens, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardweave.dialects import hf, megatron, vllm
from shardweave.errors import GeometryError, ModelError, UnknownNameError
from shardweave.layout import prove
from shardweave.models import Model, from_config

TINY = json.loads((Path(__file__).parent.parent / "data/configs/tiny/deepseek_v3.json").read_text())

# The keys of the released config.json, in transformers 4's spelling; its quantisation stands apart.
RELEASED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


def changed(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (TINY | changes).items() if value is not ...}


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    found = [(name, tensor.shape) for tensor in model.tensors for name in tensor.names()]
    assert len(dict(found)) == len(found), "two tensors have one name"
    return dict(found)


def layer(n: int, *, experts: int = 0, further: bool = False) -> dict[str, tuple[int, ...]]:
    """One layer, written out; 6 heads of 8 + 4 for Q and K and 7 for V, ranks 20 and 16."""
    found = {
        "input_layernorm": (30,), "post_attention_layernorm": (30,),
        "self_attn.q_a_proj": (20, 30), "self_attn.q_a_layernorm": (20,), "self_attn.q_b_proj": (72, 20),
        "self_attn.kv_a_proj_with_mqa": (20, 30), "self_attn.kv_a_layernorm": (16,),
        "self_attn.kv_b_proj": (90, 16), "self_attn.o_proj": (30, 42),
    }  # fmt: skip
    for module, size in (("mlp.", 22),) if not experts else (
        *((f"mlp.experts.{e}.", 14) for e in range(experts)), ("mlp.shared_experts.", 42),
    ):  # fmt: skip
        found |= {f"{module}{name}_proj": (size, 30) for name in ("gate", "up")}
        found[f"{module}down_proj"] = (30, size)
    if experts:
        found["mlp.gate"] = (experts, 30)
    if further:
        found |= {"enorm": (30,), "hnorm": (30,), "eh_proj": (30, 60), "shared_head.norm": (30,)}
    named: dict[str, tuple[int, ...]] = {f"model.layers.{n}.{k}.weight": v for k, v in found.items()}
    if experts:
        named[f"model.layers.{n}.mlp.gate.e_score_correction_bias"] = (experts,)
    return named


def test_names_and_shapes() -> None:
    model = from_config(TINY)
    outside = {"model.embed_tokens.weight": (53, 30), "model.norm.weight": (30,), "lm_head.weight": (53, 30)}
    decoder = outside | layer(0) | layer(1, experts=10) | layer(2, experts=10) | layer(3, experts=10)
    assert shapes(model.decoder) == decoder
    further = layer(4, experts=10, further=True) | layer(5, experts=10, further=True)
    assert shapes(model) == decoder | further
    assert model.copies == {
        f"model.layers.{n}.{name}": of
        for n in (4, 5)
        for name, of in (
            ("embed_tokens.weight", "model.embed_tokens.weight"),
            ("shared_head.head.weight", "lm_head.weight"),
        )
    }
    assert model.num_layers == model.decoder.num_layers == 4


def test_queries_that_are_not_compressed() -> None:
    plain = shapes(from_config(changed(q_lora_rank=None, num_nextn_predict_layers=0)))
    assert plain["model.layers.3.self_attn.q_proj.weight"] == (72, 30)
    assert not any("q_a_" in name or "q_b_" in name for name in plain)


def test_biases_are_on_the_way_down_and_out() -> None:
    found = shapes(from_config(changed(attention_bias=True)))
    biases = {
        name: shape
        for name, shape in found.items()
        if name.startswith("model.layers.5.self")
        if "bias" in name
    }
    assert biases == {
        "model.layers.5.self_attn.q_a_proj.bias": (20,),
        "model.layers.5.self_attn.kv_a_proj_with_mqa.bias": (20,),
        "model.layers.5.self_attn.o_proj.bias": (30,),
    }


def test_the_correction_bias_is_float32_whatever_the_weights_are() -> None:
    model = from_config(TINY, dtype="bfloat16")
    biases = {tensor.dtype for tensor in model.tensors if "e_score" in tensor.name}
    assert biases == {"float32"}
    assert {tensor.dtype for tensor in model.tensors if "e_score" not in tensor.name} == {"bfloat16"}


def test_published_totals() -> None:
    """671B, 685B in the files: one layer for a further token with a copy of the embedding and the head."""
    model = from_config(RELEASED)
    assert model.decoder.numel == 671_026_419_200
    stored = sum(buffer.numel for buffer in hf.layout(model).buffers(0))
    assert stored == model.numel + 2 * 129280 * 7168 == 684_489_845_504
    assert len(model.tensors) < 60, "a family over layers and experts is one tensor"


def test_published_totals_of_v2() -> None:
    """DeepSeek-V2-Lite, whose queries are not compressed, and DeepSeek-V2."""
    sizes = {"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408}
    sizes |= {"num_hidden_layers": 27, "num_attention_heads": 16, "n_routed_experts": 64}
    common = {"model_type": "deepseek_v2", "dtype": "bfloat16", "vocab_size": 102400, "kv_lora_rank": 512}
    common |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_shared_experts": 2}
    common |= {"first_k_dense_replace": 1}
    lite = from_config({**common, **sizes, "q_lora_rank": None})
    assert lite.numel == 15_706_484_224
    assert not any("q_a_proj" in tensor.name or "e_score" in tensor.name for tensor in lite.tensors)
    sizes = {"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536}
    sizes |= {"num_hidden_layers": 60, "num_attention_heads": 128, "n_routed_experts": 160}
    assert from_config({**common, **sizes, "q_lora_rank": 1536}).numel == 235_741_434_880


def test_files_in_blocks_of_float8_have_the_published_elements() -> None:
    """DeepSeek-V3 as released, by dtype."""
    quantisation = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    model = from_config(RELEASED | {"quantization_config": {**quantisation, "weight_block_size": [128, 128]}})
    found: dict[str, int] = {}
    for buffer in hf.layout(model).buffers(0):
        found[buffer.dtype] = found.get(buffer.dtype, 0) + buffer.numel
    assert found == {
        "float8_e4m3fn": 680_571_043_840,
        "bfloat16": 3_918_786_560,
        "float32": 41_555_600,
    }


def test_both_spellings() -> None:
    new = {k: v for k, v in RELEASED.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 40}}
    new |= {"head_dim": 64, "qk_head_dim": 192, "rope_interleave": True}
    assert from_config(new) == from_config(RELEASED)
    other = changed(
        num_mtp_layers=2, num_nextn_predict_layers=..., num_local_experts=10, n_routed_experts=...
    )
    assert from_config(other) == from_config(TINY)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_key_value_heads": 3}, r"num_key_value_heads\(3\) != num_attention_heads\(6\)"),
    ({"qk_head_dim": 13}, r"qk_head_dim\(13\) != qk_nope_head_dim\(8\) \+ qk_rope_head_dim\(4\)"),
    ({"head_dim": 8}, r"head_dim\(8\) != qk_rope_head_dim\(4\), and != 8 \+ 4"),
    ({"q_lora_rank": ...}, "q_lora_rank is not given"),
    ({"q_lora_rank": 0}, "q_lora_rank=0"),
    ({"kv_lora_rank": ...}, "kv_lora_rank is not given"),
    ({"v_head_dim": None}, "v_head_dim=None"),
    ({"first_k_dense_replace": ...}, "first_k_dense_replace is not given"),
    ({"n_routed_experts": None}, "n_routed_experts=None"),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers=-1"),
    ({"num_mtp_layers": 1}, r"num_nextn_predict_layers\(2\) != num_mtp_layers\(1\)"),
    ({"topk_method": "greedy"}, "topk_method='greedy' is not noaux_tc"),
    ({"scoring_func": "softmax"}, "scoring_func='softmax' is not sigmoid"),
    ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not 1"),
    ({"rope_interleave": False}, "rope_interleave=False is not True"),
    ({"index_topk": 2048}, "index_topk=2048"),
    ({"architectures": ["DeepseekV3ForSequenceClassification"]}, "DeepseekV3ForCausalLM"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_config(changed(**changes))


def test_names_say_whether_layers_for_further_tokens_are_stored() -> None:
    model = from_config(TINY)
    for choices in ({}, {"with_copies": False}, {"stacked_experts": True}):
        layout = hf.layout(model, **choices)
        prove(layout, model.tensors)
        assert hf.variant(layout.arrays(0), model) == layout
    assert hf.variant(hf.layout(model.decoder).arrays(0), model) == hf.layout(model.decoder)
    names = set(hf.layout(model).arrays(0))
    with pytest.raises(
        UnknownNameError, match=r"missing 0; unexpected 1 \(model\.layers\.6\.enorm\.weight\)"
    ):
        hf.variant({*names, "model.layers.6.enorm.weight"}, model)
    with pytest.raises(UnknownNameError, match=r"missing 1 \(model\.layers\.5\.eh_proj\.weight\)"):
        hf.variant(names - {"model.layers.5.eh_proj.weight"}, model)


# --- dtypes ---------------------------------------------------------------------------------------


def test_the_correction_bias_keeps_its_dtype_in_every_dialect() -> None:
    model = from_config(TINY, dtype="bfloat16")
    layouts = [
        hf.layout(model),
        megatron.layout(model, megatron.mesh(tp=2), vocab_divisor=1),
        megatron.checkpoint(model, layer_keys="per_layer"),
        vllm.layout(model, vllm.mesh(tp=2), dtype="float16"),
    ]
    for layout, others in zip(layouts, ("bfloat16", "bfloat16", "bfloat16", "float16"), strict=True):
        biases = {r.dtype for r in layout.rules if "expert_bias" in r.name or "e_score" in r.name}
        assert biases == {"float32"}, layout.name
        assert {r.dtype for r in layout.rules} == {"float32", others}, layout.name


def test_a_conversion_to_another_dtype_leaves_the_correction_bias_alone(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from shardweave.convert import Geometry, convert, prepare

    model, generator = from_config(TINY), torch.Generator().manual_seed(2)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator)
        for tensor in model.decoder.tensors
        for name in tensor.names()
    }
    (tmp_path / "src").mkdir()
    (tmp_path / "src/config.json").write_text(json.dumps(TINY))
    save_file(tensors, tmp_path / "src/model.safetensors")
    job = prepare(tmp_path / "src", to="megatron", geometry=Geometry(vocab_divisor=1), dtype="bfloat16")
    convert(job, tmp_path / "mc", fsync=False)
    convert(prepare(tmp_path / "mc", to="hf"), tmp_path / "hf", fsync=False)
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        wanted = value if "e_score" in name else value.bfloat16()
        assert found[name].dtype == wanted.dtype and torch.equal(found[name], wanted), name


@pytest.mark.parametrize("tp", [4, 5])
def test_heads_are_cut_whole_or_not_at_all(tp: int) -> None:
    """72 and 90 rows divide by these; 6 heads do not, and Megatron and vLLM both say so."""
    model = from_config(changed(qk_nope_head_dim=16, qk_rope_head_dim=4, v_head_dim=24, hidden_size=40))
    for build in (
        lambda: megatron.layout(model, megatron.mesh(tp=tp), vocab_divisor=1),
        lambda: vllm.layout(model, vllm.mesh(tp=tp), vocab_multiple=20),
    ):
        with pytest.raises(GeometryError, match=rf"num_heads\(6\) % tp\({tp}\) = "):
            build()


def test_a_bias_that_an_engine_has_no_place_for_is_refused_and_not_dropped() -> None:
    model = from_config(changed(attention_bias=True))
    with pytest.raises(GeometryError, match=r"q_a_bias, kv_a_bias, o_bias"):
        megatron.checkpoint(model, layer_keys="per_layer")
    with pytest.raises(ModelError, match=r"unknown\(kv_a_bias, o_bias, q_a_bias\)"):
        vllm.layout(model, vllm.mesh(tp=2))


def test_a_drafter_needs_layers_to_draft_with_on_one_stage() -> None:
    model = from_config(TINY)
    layout = vllm.layout(model, vllm.mesh(tp=2), drafter=True)
    heads = [rule for rule in layout.rules if rule.name.endswith("shared_head.head.weight")]
    assert [part.replica for rule in heads for part in rule.parts] == [False, True]
    prove(layout, layout.tensors)
    with pytest.raises(ModelError, match=r"layers for further tokens\(0\)"):
        vllm.layout(model.decoder, vllm.mesh(tp=2), drafter=True)
    with pytest.raises(ModelError, match=r"tie_word_embeddings\(True\)"):
        vllm.layout(from_config(changed(tie_word_embeddings=True)), vllm.mesh(tp=2), drafter=True)
    with pytest.raises(GeometryError, match=r"pp\(2\)"):
        vllm.layout(model, vllm.mesh(tp=2, pp=2), drafter=True)
