"""Models: what a config means, against recorded files, shapes by hand and published totals; and refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardweave.errors import FormatError, MissingFileError, ModelError
from shardweave.models import FAMILIES, Model, from_config

DENSE = ("llama", "mistral", "qwen2", "qwen3")


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    found = [(name, tensor.shape) for tensor in model.tensors for name in tensor.names()]
    assert len(dict(found)) == len(found), "two tensors have one name"
    return dict(found)


@pytest.fixture
def tiny(data_dir: Path) -> Any:
    def read(family: str, **changes: Any) -> dict[str, Any]:
        config = json.loads((data_dir / "configs" / "tiny" / f"{family}.json").read_text()) | changes
        return {key: value for key, value in config.items() if value is not ...}

    return read


# --- what files hold ------------------------------------------------------------------------------


RECORDED = [
    "hf_llama_tiny",
    "hf_llama_tied_tiny",
    "hf_qwen3_tiny",
    "hf_qwen3moe_tiny",
    "hf_gpt2_tiny",
    "hf_gptbigcode_tiny",
    "hf_gptbigcode_mha_tiny",
]


@pytest.mark.parametrize("name", RECORDED)
def test_names_and_shapes_are_those_of_recorded_files(data_dir: Path, name: str) -> None:
    recorded = json.loads((data_dir / "configs" / f"{name}.json").read_text())
    model = from_config(recorded["config"])
    assert shapes(model) == {key: tuple(shape) for key, shape in recorded["tensors"].items()}
    assert model.dtype == "float32"


@pytest.mark.parametrize("family", ["opt", "gemma2", "gpt_neox", 3, None])
def test_unknown_families_are_refused_with_the_list(tiny: Any, family: object) -> None:
    with pytest.raises(ModelError, match=f"{family!r} is not one of llama, mistral, .*qwen3_moe"):
        from_config(tiny("llama", model_type=family))


# --- shapes by hand -------------------------------------------------------------------------------


def attention(layer: int, *, num_kv_heads: int = 2) -> dict[str, tuple[int, ...]]:
    kv = num_kv_heads * 8
    rows = {"q_proj": (48, 30), "k_proj": (kv, 30), "v_proj": (kv, 30), "o_proj": (30, 48)}
    return {f"model.layers.{layer}.self_attn.{name}.weight": shape for name, shape in rows.items()}


def ffn(layer: int, size: int = 22) -> dict[str, tuple[int, ...]]:
    rows = {"gate_proj": (size, 30), "up_proj": (size, 30), "down_proj": (30, size)}
    return {f"model.layers.{layer}.mlp.{name}.weight": shape for name, shape in rows.items()}


def norms(layer: int, names: tuple[str, ...] = ("input", "post_attention")) -> dict[str, tuple[int, ...]]:
    return {f"model.layers.{layer}.{name}_layernorm.weight": (30,) for name in names}


OUTSIDE = {"model.embed_tokens.weight": (53, 30), "model.norm.weight": (30,), "lm_head.weight": (53, 30)}


def merged(*parts: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {key: shape for part in parts for key, shape in part.items()}


@pytest.mark.parametrize("family", DENSE)
def test_dense_families(tiny: Any, family: str) -> None:
    expected = merged(OUTSIDE, *(merged(attention(i), ffn(i), norms(i)) for i in range(3)))
    for i in range(3):
        if family == "qwen2":
            expected |= {
                f"model.layers.{i}.self_attn.{c}_proj.bias": (n,)
                for c, n in zip("qkv", (48, 16, 16), strict=True)
            }
        if family == "qwen3":
            expected |= {f"model.layers.{i}.self_attn.{c}_norm.weight": (8,) for c in "qk"}
    assert shapes(from_config(tiny(family))) == expected


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_attention_bias_is_on_all_four(tiny: Any, family: str) -> None:
    biased = shapes(from_config(tiny(family, attention_bias=True)))
    plain = shapes(from_config(tiny(family)))
    last = 6 if family == "qwen3_moe" else 2
    added = {key: shape for key, shape in biased.items() if key not in plain}
    assert len(added) == 4 * (last + 1) and plain.items() <= biased.items()
    rows = {"q": 48, "k": 16, "v": 16, "o": 30}
    assert {added[f"model.layers.{last}.self_attn.{c}_proj.bias"] for c in rows} == {
        (n,) for n in rows.values()
    }
    assert added[f"model.layers.{last}.self_attn.o_proj.bias"] == (30,)


def test_mlp_bias_is_on_all_three(tiny: Any) -> None:
    added = (
        shapes(from_config(tiny("llama", mlp_bias=True))).items() - shapes(from_config(tiny("llama"))).items()
    )
    rows = {"gate": 22, "up": 22, "down": 30}
    assert added == {(f"model.layers.{i}.mlp.{c}_proj.bias", (n,)) for i in range(3) for c, n in rows.items()}


def test_qwen3_moe_layers_are_sparse_or_dense_by_rule(tiny: Any) -> None:
    # Step 2 makes layers 1, 3 and 5 sparse; the list takes 3 away.
    model = from_config(tiny("qwen3_moe"))
    (moe,), (mlp,) = model.of("moe"), model.of("mlp")
    assert [n for _, n in moe.layers] == [1, 5] and [n for _, n in mlp.layers] == [0, 2, 3, 4, 6]
    assert moe.sizes == {"num_experts": 5, "ffn_size": 14, "hidden_size": 30}
    found = shapes(model)
    assert found["model.layers.5.mlp.gate.weight"] == (5, 30)
    assert found["model.layers.5.mlp.experts.4.down_proj.weight"] == (30, 14)
    assert found["model.layers.3.mlp.down_proj.weight"] == (30, 22)
    assert "model.layers.3.mlp.gate.weight" not in found


@pytest.mark.parametrize(
    "changes", [{"num_experts": 0}, {"mlp_only_layers": [1, 3, 5]}, {"decoder_sparse_step": 8}]
)
def test_qwen3_moe_without_sparse_layers_is_qwen3(tiny: Any, changes: dict[str, Any]) -> None:
    sparse = from_config(tiny("qwen3_moe", moe_intermediate_size=..., **changes))
    assert shapes(sparse) == shapes(from_config(tiny("qwen3", num_hidden_layers=7)))


def test_mixtral_names(tiny: Any) -> None:
    found = shapes(from_config(tiny("mixtral")))
    moe = "model.layers.2.block_sparse_moe"
    assert found[f"{moe}.gate.weight"] == (5, 30)
    expert = {f"{moe}.experts.4.w1.weight": (22, 30), f"{moe}.experts.4.w3.weight": (22, 30)}
    assert expert.items() <= found.items() and found[f"{moe}.experts.4.w2.weight"] == (30, 22)
    (block,) = from_config(tiny("mixtral")).of("moe")
    assert [block.tensors[role].name[-9:-7] for role in ("gate", "up", "down")] == ["w1", "w3", "w2"]
    assert len(found) == 3 + 3 * (2 + 4 + 1 + 5 * 3)


def test_nemotron_nas_layers_differ(tiny: Any) -> None:
    expected = merged(
        OUTSIDE,
        merged(norms(0), attention(0, num_kv_heads=2), ffn(0, 22)),
        merged(norms(1), attention(1, num_kv_heads=3), ffn(1, 34)),
        merged(norms(2, ("post_attention",)), ffn(2, 22)),
        merged(norms(3, ("input",)), attention(3, num_kv_heads=2)),
        # Layer 4 has nothing. Two thirds of 15 * 30 is 300, up to a multiple of 256.
        merged(norms(5), attention(5, num_kv_heads=3), ffn(5, 512)),
    )
    model = from_config(tiny("nemotron-nas"))
    assert shapes(model) == expected
    held = {(b.sizes["num_kv_heads"], tuple(n for _, n in b.layers)) for b in model.of("attention")}
    assert held == {(2, (0, 3)), (3, (1, 5))}
    for block in model.blocks:
        assert all(
            tensor.index[0] == ("layer", block.layers) for tensor in block.tensors.values() if block.layers
        )


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("chatglm", "nemotron_h")])
def test_tied_means_an_alias_and_no_head(tiny: Any, family: str) -> None:
    tied, untied = (from_config(tiny(family, tie_word_embeddings=tie)) for tie in (True, False))
    of = FAMILIES[family]
    assert tied.aliases == {"lm_head.weight": of.prefix + of.embedding} and untied.aliases == {}
    assert tied.tied and not untied.tied
    (embedding,) = tied.of("embedding")
    assert untied.numel - tied.numel == embedding.sizes["vocab_size"] * embedding.sizes["hidden_size"]
    assert shapes(untied).keys() - shapes(tied).keys() == {"lm_head.weight"}
    assert from_config(tiny(family)) == (tied if of.tied else untied), "what a config does not say"


# --- both spellings -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_of_transformers_4_and_5_mean_the_same(tiny: Any, family: str) -> None:
    new = tiny(family, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    old = tiny(
        family, rope_theta=1e6, rope_scaling={"type": "yarn", "factor": 4.0}, torch_dtype="float32", dtype=...
    )
    assert from_config(new) == from_config(old)


def test_number_of_experts_has_two_spellings(tiny: Any) -> None:
    other = tiny("qwen3_moe", num_local_experts=5, num_experts=...)
    assert from_config(other) == from_config(tiny("qwen3_moe"))
    with pytest.raises(ModelError, match=r"num_experts\(5\) != num_local_experts\(4\)"):
        from_config(tiny("qwen3_moe", num_local_experts=4))


def test_what_absent_and_null_heads_mean(tiny: Any) -> None:
    def sizes(config: dict[str, Any]) -> tuple[int, int]:
        (block,) = from_config(config).of("attention")
        return block.sizes["num_kv_heads"], block.sizes["head_dim"]

    assert sizes(tiny("llama", num_key_value_heads=..., head_dim=...)) == (6, 5)
    for family in (*DENSE, "qwen3_moe", "mixtral"):
        assert sizes(tiny(family, num_key_value_heads=None, head_dim=None)) == (6, 5)
    assert sizes(tiny("qwen3", head_dim=...)) == (2, 128)
    assert sizes(tiny("qwen3_moe", head_dim=...)) == (2, 5)
    # The classes of these families have defaults of their own (8, 32, 32, 4, 8), so absence says nothing.
    for family in ("mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"):
        with pytest.raises(ModelError, match="num_key_value_heads is not given"):
            from_config(tiny(family, num_key_value_heads=...))


def test_dtype_argument_and_prefix(tiny: Any) -> None:
    model = from_config(tiny("llama"), dtype="bfloat16", prefix="model.language_model.")
    assert {tensor.dtype for tensor in model.tensors} == {model.dtype} == {"bfloat16"}
    plain = shapes(from_config(tiny("llama")))
    assert shapes(model) == {
        name.replace("model.", "model.language_model.", 1): shape for name, shape in plain.items()
    }


# --- known models ---------------------------------------------------------------------------------


def known(family: str, **sizes: Any) -> Model:
    return from_config({"model_type": family, "torch_dtype": "bfloat16", **sizes})


def test_totals_of_published_models() -> None:
    """Published parameter counts, to the parameter."""
    llama = {"num_attention_heads": 32, "num_hidden_layers": 32, "hidden_size": 4096}
    assert known("llama", **llama, vocab_size=32000, intermediate_size=11008).numel == 6_738_415_616
    llama |= {"num_key_value_heads": 8, "intermediate_size": 14336}
    assert known("llama", **llama, vocab_size=128256).numel == 8_030_261_248
    assert known("mistral", **llama, vocab_size=32000).numel == 7_241_732_096
    assert known("mixtral", **llama, vocab_size=32000, num_local_experts=8).numel == 46_702_792_704
    qwen2 = {"num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 24, "hidden_size": 896}
    qwen2 |= {"vocab_size": 151936, "intermediate_size": 4864}
    assert known("qwen2", **qwen2, tie_word_embeddings=True).numel == 494_032_768
    qwen3 = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 36,
        "hidden_size": 4096,
    }
    qwen3 |= {"vocab_size": 151936, "intermediate_size": 12288}
    assert known("qwen3", **qwen3).numel == 8_190_735_360
    moe = {"num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 48, "hidden_size": 2048}
    moe |= {"vocab_size": 151936, "intermediate_size": 6144, "head_dim": 128}
    assert known("qwen3_moe", **moe, moe_intermediate_size=768, num_experts=128).numel == 30_532_122_624


def test_total_of_nemotron_super_49b() -> None:
    """Llama-3.3-Nemotron-Super-49B-v1: 49 of 80 layers have attention; six feed-forward sizes."""
    free = [1.3125, 2.625, 2.625, 1.3125, 5.25, 1.3125, 2.625, 1.3125, 1.3125, 1.3125]
    late = [
        1.3125,
        1.0,
        1.0,
        1.3125,
        1.0,
        1.0,
        1.0,
        1.3125,
        1.3125,
        0.5,
        0.5,
        1.0,
        1.0,
        0.5,
        0.5,
        1.0,
        0.5,
        0.5,
    ]
    plan = [(8, 2.625)] + [(8, 5.25)] * 5 + [(None, 2.625)] * 2 + [(8, 5.25)] * 3 + [(None, 3.28125)]
    plan += (
        [(8, 5.25)] * 30
        + [(None, m) for m in free]
        + [(8, 5.25)]
        + [(None, m) for m in late]
        + [(8, 5.25)] * 9
    )
    blocks = [
        {
            "attention": {"n_heads_in_group": group, "no_op": group is None},
            "ffn": {"ffn_mult": m, "no_op": False},
        }
        for group, m in plan
    ]
    sizes = {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80, "vocab_size": 128256}
    assert known("nemotron-nas", **sizes, block_configs=blocks).numel == 49_867_145_216


# --- refusals -------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": ...}, "model_type=None is not one of llama"),
    ("llama", {"model_type": "deepseek_v1"}, "model_type='deepseek_v1' is not one of llama"),
    ("llama", {"model_type": ["llama"]}, "is not one of llama"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    ("llama", {"attn_output_gate": True}, "attn_output_gate=True is not False"),
    ("llama", {"use_qk_norm": True}, "use_qk_norm=True is not False"),
    ("qwen3", {"use_qk_norm": False}, "use_qk_norm=False is not True"),
    (
        "llama",
        {"qk_norm_type": "l2"},
        "every key of a config is understood: config of llama: qk_norm_type='l2'",
    ),
    ("llama", {"num_experts": 5}, "num_experts=5"),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map"),
    ("llama", {"sliding_window": 16}, "sliding_window=16"),
    ("llama", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "per_layer_config"),
    ("llama", {"pruned_heads": {"1": [0]}}, "pruned_heads"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ("llama", {"architectures": ["LlamaForCausalLM", "LlamaModel"]}, "LlamaModel"),
    ("llama", {"hidden_size": ...}, "hidden_size is not given"),
    ("llama", {"hidden_size": None}, "hidden_size=None"),
    ("llama", {"hidden_size": -30}, "hidden_size=-30"),
    ("llama", {"hidden_size": 30.0}, "hidden_size=30.0"),
    ("llama", {"vocab_size": True}, "vocab_size=True"),
    ("llama", {"vocab_size": "53"}, "vocab_size='53'"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ("llama", {"num_key_value_heads": 4}, r"num_attention_heads\(6\) % num_key_value_heads\(4\) = 2 != 0"),
    ("llama", {"num_key_value_heads": 12}, r"num_attention_heads\(6\) % num_key_value_heads\(12\) = 6 != 0"),
    (
        "llama",
        {"head_dim": None, "hidden_size": 32},
        r"hidden_size\(32\) % num_attention_heads\(6\) = 2 != 0",
    ),
    ("llama", {"attention_bias": 1}, "attention_bias=1"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false'"),
    ("llama", {"dtype": ...}, "dtype=None is not one of bfloat16"),
    ("llama", {"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
    ("llama", {"dtype": ["float32"]}, "dtype="),
    ("llama", {"torch_dtype": "bfloat16"}, r"dtype\('float32'\) != torch_dtype\('bfloat16'\)"),
    (
        "qwen2",
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        r"layer_types\[1\]='linear",
    ),
    ("qwen3", {"layer_types": ["full_attention"]}, r"num_hidden_layers\(3\)"),
    ("qwen3_moe", {"mlp_only_layers": [7]}, r"mlp_only_layers=\[7\] with num_hidden_layers\(7\)"),
    ("qwen3_moe", {"mlp_only_layers": [True]}, r"mlp_only_layers=\[True\]"),
    ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers=3"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ("qwen3_moe", {"moe_intermediate_size": ...}, "moe_intermediate_size is not given"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 14}, "shared_expert_intermediate_size=14"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts=0"),
    ("nemotron-nas", {"num_hidden_layers": 5}, r"len\(block_configs\)\(6\) != num_hidden_layers\(5\)"),
    ("nemotron-nas", {"block_configs": ...}, "block_configs"),
    ("nemotron-nas", {"o_proj_bias": True}, "o_proj_bias=True is not False"),
]


@pytest.mark.parametrize(
    ("family", "changes", "message"), REFUSED, ids=lambda v: v if isinstance(v, str) else None
)
def test_refused_with_the_reason(tiny: Any, family: str, changes: dict[str, Any], message: str) -> None:
    from_config(tiny(family))
    with pytest.raises(ModelError, match=message):
        from_config(tiny(family, **changes))


@pytest.mark.parametrize(
    ("layer", "part", "changes", "message"),
    [
        (0, "attention", {"n_heads_in_group": 4}, r"num_attention_heads\(6\) is not n_heads_in_group\(4\)"),
        (0, "attention", {"num_key_value_heads": 3}, r"n_heads_in_group\(3\) \* num_key_value_heads\(3\)"),
        (0, "attention", {"n_heads_in_group": None}, r"block_configs\[0\], attention: n_heads_in_group=None"),
        (
            1,
            "attention",
            {"replace_with_linear": True},
            r"block_configs\[1\], attention: replace_with_linear=True",
        ),
        (1, "attention", {"mamba": {"num_heads": 2}}, "mamba="),
        (1, "attention", {"no_op": "yes"}, "no_op='yes'"),
        (0, "ffn", {"gated": False}, "gated=False is not True"),
        (0, "ffn", {"moe": {"num_local_experts": 4}}, "moe="),
        (0, "ffn", {"ffn_mult": 15.0}, r"intermediate_size\(22\) != 512 of ffn_mult\(15.0\)"),
        (5, "ffn", {"ffn_mult": -1.0}, "ffn_mult=-1.0"),
        (5, "ffn", {"ffn_mult": float("inf")}, "ffn_mult=inf"),
        (5, "ffn", {"bias": True}, r"block_configs\[5\], ffn: bias=True"),
    ],
)
def test_refused_blocks_of_nemotron_nas(
    tiny: Any, layer: int, part: str, changes: dict[str, Any], message: str
) -> None:
    config = tiny("nemotron-nas")
    config["block_configs"][layer][part] |= changes
    with pytest.raises(ModelError, match=message):
        from_config(config)


def test_refused_parts_of_nemotron_nas(tiny: Any) -> None:
    config = tiny("nemotron-nas")
    config["block_configs"][2] = "attention"
    with pytest.raises(ModelError, match=r"block_configs\[2\]='attention'"):
        from_config(config)
    config = tiny("nemotron-nas")
    del config["block_configs"][2]["ffn"]
    with pytest.raises(ModelError, match=r"block_configs\[2\]: ffn=None"):
        from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_key_is_in_one_list_and_ignored_keys_change_nothing(tiny: Any, family: str) -> None:
    keys = FAMILIES[family].keys
    assert not keys.shapes & set(keys.ignored) and not keys.shapes & set(FAMILIES[family].ignored)
    assert not set(keys.ignored) & set(keys.neutral)
    config = dict(FAMILIES[family].respelled(tiny(family), ""))
    plain = from_config(config)
    assert from_config(config | dict.fromkeys(keys.ignored, "anything")) == plain
    neutral = {key: values[0] for key, values in keys.neutral.items()}
    assert from_config(config | neutral) == plain


@pytest.mark.parametrize("family", FAMILIES)
def test_each_key_that_shapes_tensors_is_read(tiny: Any, family: str) -> None:
    read: set[str] = set()

    class Recording(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

    config = FAMILIES[family].respelled(tiny(family, tie_word_embeddings=False), "")
    from_config(Recording(config))
    # Families of no KV heads and no feed-forward size of their own know these keys as null only.
    gpt = {"num_key_value_heads", "intermediate_size", "head_dim"}
    spared = {
        **dict.fromkeys(("gpt2", "gptj", "codegen", "bloom"), gpt),
        # The config of these tests is of a new decoder, for which this key means nothing.
        "falcon": gpt | {"multi_query"},
        "yuan": {"num_key_value_heads", "head_dim"},
        "gpt_bigcode": {"intermediate_size", "head_dim"},
        # A feed-forward of nemotron-nas has its size in the block, which the neutral value states.
        "nemotron-nas": {"num_key_value_heads", "intermediate_size"},
        "qwen3_5_moe_text": {"intermediate_size"},
        "mamba2": {"num_attention_heads", "num_key_value_heads", "intermediate_size"},
    }
    assert FAMILIES[family].keys.shapes - spared.get(family, set()) <= read


# --- files ----------------------------------------------------------------------------------------


def test_a_path_is_a_file_or_its_folder(tiny: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny("llama")))
    assert from_config(file) == from_config(tmp_path) == from_config(tiny("llama"))
    with pytest.raises(MissingFileError, match=r"none.config\.json"):
        from_config(tmp_path / "none" / "config.json")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"hidden_size": 30, "hidden_size": 60}', "\xff", "[" * 100_000],
    ids=["empty", "a list", "cut", "a key twice", "not utf-8", "nested without end"],
)
def test_what_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match="one JSON object"):
        from_config(file)
