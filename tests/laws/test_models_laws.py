"""Laws of models and of the hf dialect: every layout is proved, and holds the model's names once each."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.dialects import hf
from shardweave.errors import GapError, ModelError, OverlapError, UnknownNameError
from shardweave.layout import Layout, prove
from shardweave.models import FAMILIES, Model, from_config

DATA = Path(__file__).parent.parent / "data" / "configs" / "tiny"
TINY = {family: json.loads((DATA / f"{family}.json").read_text()) for family in FAMILIES}
CHOICES = [
    dict(zip(("stacked_experts", "with_aliases"), c, strict=True)) for c in product((False, True), repeat=2)
]


def _can_tie(family: str) -> bool:
    try:
        return from_config(TINY[family] | {"tie_word_embeddings": True}).tied
    except ModelError:
        return False


TIED = {family for family in FAMILIES if _can_tie(family)}

attention = st.sampled_from(
    [{"no_op": True}, *({"n_heads_in_group": n} for n in (1, 2, 3)), {"num_key_value_heads": 2}]
)
ffn = st.sampled_from(
    [{"no_op": True}, {"intermediate_size": 22}, {"intermediate_size": 34}, {"ffn_mult": 15.0}]
)


@st.composite
def models(draw: st.DrawFn) -> Model:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    config: dict[str, Any] = dict(TINY[family])
    if family in TIED:
        config["tie_word_embeddings"] = draw(st.booleans())
    num_layers = draw(st.integers(1, 9))
    spelled = {ours: theirs for theirs, ours in FAMILIES[family].spelled.items() if theirs in config}
    config[spelled.get("num_hidden_layers", "num_hidden_layers")] = num_layers
    if family == "nemotron-nas":
        blocks = st.fixed_dictionaries({"attention": attention, "ffn": ffn})
        config["block_configs"] = draw(st.lists(blocks, min_size=num_layers, max_size=num_layers))
    if family == "deepseek_v3":
        config["first_k_dense_replace"] = draw(st.integers(0, 10))
        config["num_nextn_predict_layers"] = draw(st.integers(0, 2))
        config["q_lora_rank"] = draw(st.sampled_from([None, 20]))
        config["n_shared_experts"] = draw(st.sampled_from([None, 1, 3]))
    if family in ("qwen3_5_text", "qwen3_5_moe_text"):
        kinds = st.sampled_from(["linear_attention", "full_attention"])
        config["layer_types"] = draw(st.lists(kinds, min_size=num_layers, max_size=num_layers))
    if family == "nemotron_h":
        config["hybrid_override_pattern"] = draw(st.text("M*-", min_size=num_layers, max_size=num_layers))
    if family == "qwen3_next":
        config["full_attention_interval"] = draw(st.integers(1, 4))
    if family in ("qwen3_moe", "qwen3_next"):
        config["decoder_sparse_step"] = draw(st.integers(1, 4))
        config["mlp_only_layers"] = draw(st.lists(st.integers(0, num_layers - 1), max_size=4))
    return from_config(config)


@given(models(), st.sampled_from(CHOICES))
def test_every_layout_is_proved_and_holds_the_model_once(model: Model, choices: dict[str, bool]) -> None:
    layout = hf.layout(model, **choices)
    prove(layout, model.tensors)
    stored = sum(buffer.numel for buffer in layout.buffers(0))
    again = {**model.copies, **(model.aliases if choices["with_aliases"] else {})}
    numel = {tensor.name: tensor.numel for tensor in model.tensors}
    assert stored == model.numel + sum(numel[name] for name in again.values())
    assert set(layout.tensors) == set(model.tensors)


@given(models())
def test_each_layer_has_at_most_one_block_of_a_kind(model: Model) -> None:
    further = [n for block in model.of("mtp") for _, n in block.layers]
    numbers = [*range(model.num_layers), *further]
    mixers = (
        *("attention", "gated_attention", "mla", "delta", "mamba"),
        *("conv_attention", "fused_attention", "filtered_attention", "shared_qk_attention"),
    )
    ffns = ("mlp", "moe", "plain_mlp", "conv_mlp", "gate_up_mlp")
    for kinds in (mixers, ("norms", "layer_norms"), ffns):
        layers = [n for kind in kinds for block in model.of(kind) for _, n in block.layers]
        assert len(set(layers)) == len(layers) and set(layers) <= set(numbers)
        if model.family not in ("nemotron-nas", "nemotron_h", "mamba2"):
            assert sorted(layers) == numbers
    if model.family in ("nemotron_h", "mamba2"):
        layers = [n for kind in (*mixers, "plain_mlp") for block in model.of(kind) for _, n in block.layers]
        assert sorted(layers) == numbers


@given(models())
def test_a_decoder_is_the_model_without_layers_for_further_tokens(model: Model) -> None:
    further = tuple(f"layers.{n}." for block in model.of("mtp") for _, n in block.layers)
    names = [name for tensor in model.tensors for name in tensor.names()]
    kept = [name for name in names if not any(part in name for part in further)]
    assert [name for tensor in model.decoder.tensors for name in tensor.names()] == kept
    assert model.decoder.decoder == model.decoder and not model.decoder.copies
    found = hf.variant(kept, model)
    assert set(found.tensors) == set(model.decoder.tensors)


@given(models(), st.sampled_from(CHOICES))
def test_names_decide_the_variant(model: Model, choices: dict[str, bool]) -> None:
    names = set(hf.layout(model, **choices).arrays(0))
    found = hf.variant(names, model)
    assert set(found.arrays(0)) == names
    for less in sorted(names)[:: max(len(names) // 5, 1)]:
        if less in model.aliases or less in model.copies:
            continue
        with pytest.raises(UnknownNameError, match=r"missing 1 .*unexpected 0"):
            hf.variant(names - {less}, model)
    with pytest.raises(UnknownNameError, match=r"missing 0; unexpected 1 \(model\.layers\.99\.weight\)"):
        hf.variant(names | {"model.layers.99.weight"}, model)


def test_the_proof_sees_a_lost_layer_and_a_second_owner() -> None:
    """The laws above can fail: a rule less is a gap, an alias that is no replica an overlap."""
    model = from_config(TINY["llama"] | {"tie_word_embeddings": True})
    layout = hf.layout(model)
    with pytest.raises(GapError):
        prove(Layout("hf", layout.mesh, layout.rules[1:]), model.tensors)
    with pytest.raises(OverlapError):
        prove(Layout("hf", layout.mesh, (*layout.rules, layout.rules[0])), model.tensors)
