"""Public reports that models and the hf dialect answer: one test each, named after the report."""

from __future__ import annotations

from typing import Any

import pytest

from shardweave.dialects import hf
from shardweave.errors import ModelError, UnknownNameError
from shardweave.layout import prove
from shardweave.models import Model, from_config


def model(family: str = "llama", *, prefix: str = "model.", **changes: Any) -> Model:
    config = {
        "model_type": family,
        "dtype": "bfloat16",
        "vocab_size": 53,
        "hidden_size": 30,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 22,
    }
    return from_config(config | changes, prefix=prefix)


def names(described: Model) -> set[str]:
    return {name for tensor in described.tensors for name in tensor.names()}


def fused_rows(described: Model) -> int:
    (block,) = described.of("attention")
    return sum(block.tensors[role].shape[0] for role in "qkv")


def test_b008_maxtext_4442_kv_count_is_not_ignored() -> None:
    sizes = {"num_attention_heads": 64, "head_dim": 128, "hidden_size": 8192}
    assert fused_rows(model(**sizes, num_key_value_heads=8)) == 64 * 128 + 2 * 8 * 128 == 10240
    assert fused_rows(model(**sizes, num_key_value_heads=64)) == 24576
    # A family whose own default is 8 does not take silence for 64.
    config = {"model_type": "mistral", "dtype": "bfloat16", "vocab_size": 53, "num_hidden_layers": 3, **sizes}
    with pytest.raises(ModelError, match="num_key_value_heads is not given"):
        from_config(config | {"intermediate_size": 22})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_b035_slime_345_tied_head_is_an_alias_untied_head_is_needed(tied: bool, present: bool) -> None:
    described = model("qwen2", tie_word_embeddings=tied)
    stored = names(described) - {"lm_head.weight"} | ({"lm_head.weight"} if present else set())
    if not tied and not present:
        with pytest.raises(UnknownNameError, match=r"missing 1 \(lm_head\.weight\); unexpected 0"):
            hf.variant(stored, described)
        return
    layout = hf.variant(stored, described)
    prove(layout, described.tensors)
    assert set(layout.arrays(0)) == stored
    heads = [rule for rule in layout.rules if rule.name == "lm_head.weight"]
    assert len(heads) == present
    if tied and present:
        # The second copy is declared one: whoever holds both compares them, and nobody picks one silently.
        (part,) = heads[0].parts
        assert part.replica and part.tensor.name == "model.embed_tokens.weight"


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_b037_megatron_bridge_4883_tie_is_found_by_role(prefix: str) -> None:
    tied = model(prefix=prefix, tie_word_embeddings=True)
    assert tied.aliases == {"lm_head.weight": f"{prefix}embed_tokens.weight"}
    once, twice = hf.layout(tied).arrays(0), hf.layout(tied, with_aliases=True).arrays(0)
    assert twice.keys() - once.keys() == {"lm_head.weight"} and once.keys() < twice.keys()
    untied = model(prefix=prefix, tie_word_embeddings=False)
    for with_aliases in (False, True):
        head, _ = hf.layout(untied, with_aliases=with_aliases).arrays(0)["lm_head.weight"]
        assert [part.tensor.name for part in head.parts] == ["lm_head.weight"] and not head.parts[0].replica


@pytest.mark.parametrize("tied", [True, False])
def test_b039_colossalai_6167_files_have_no_padding_rows(tied: bool) -> None:
    described = model(vocab_size=65535, hidden_size=1024, tie_word_embeddings=tied)
    for name, (buffer, _) in hf.layout(described, with_aliases=True).arrays(0).items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert buffer.shape == (65535, 1024)
        assert buffer.numel == sum(piece.box.numel for piece in buffer.pieces())


@pytest.mark.parametrize("key", ["padded_vocab_size", "pad_vocab_size_multiple_of", "unpadded_vocab_size"])
def test_b040_megatron_bridge_1853_only_the_real_vocabulary_is_described(key: str) -> None:
    with pytest.raises(ModelError, match=f"{key}=152064"):
        model(vocab_size=151936, **{key: 152064})


def test_b042_vllm_20843_embedding_and_head_have_one_vocabulary() -> None:
    described = model(vocab_size=49159)
    sizes = [block.sizes["vocab_size"] for block in described.blocks if "vocab_size" in block.sizes]
    rows = [
        t.shape[0] for kind in ("embedding", "head") for b in described.of(kind) for t in b.tensors.values()
    ]
    assert sizes == rows == [49159, 49159]


@pytest.mark.parametrize("mtp", [0, 1, 3])
def test_b063_megatron_bridge_5495_mtp_layers_are_refused_as_a_set(mtp: int) -> None:
    described = model(num_hidden_layers=45)
    extra = {
        f"model.layers.{45 + i}.{name}" for i in range(mtp) for name in ("eh_proj.weight", "enorm.weight")
    }
    if not mtp:
        assert model(num_hidden_layers=45, num_nextn_predict_layers=0) == described
        assert hf.variant(names(described), described) == hf.layout(described)
        return
    with pytest.raises(ModelError, match=f"num_nextn_predict_layers={mtp} is not 0"):
        model(num_hidden_layers=45, num_nextn_predict_layers=mtp)
    with pytest.raises(UnknownNameError, match=rf"missing 0; unexpected {2 * mtp} \(model\.layers\.45\."):
        hf.variant(names(described) | extra, described)


@pytest.mark.parametrize("key", ["mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_layers"])
def test_b065_megatron_bridge_4819_every_spelling_of_mtp_is_known(key: str) -> None:
    assert model(**{key: 0}) == model(**{key: None}) == model()
    with pytest.raises(ModelError, match=f"{key}=2 is not 0"):
        model(**{key: 2})


def test_b067_tensorrt_llm_14457_a_fifth_block_is_not_a_decoder_layer() -> None:
    four, five = model(num_hidden_layers=4), model(num_hidden_layers=5)
    assert four.num_layers == 4
    with pytest.raises(
        UnknownNameError, match=r"missing 0; unexpected 9 \(model\.layers\.4\.input_layernorm\.weight"
    ):
        hf.variant(names(five), four)
    with pytest.raises(
        UnknownNameError, match=r"missing 9 \(model\.layers\.4\.input_layernorm\.weight.*unexpected 0"
    ):
        hf.variant(names(four), five)
