"""Models and the hf dialect against transformers: what it saves, and what it holds in memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardweave.dialects import hf
from shardweave.layout import Layout
from shardweave.models import Model, from_config

pytestmark = pytest.mark.peer("transformers")

CHANGES: dict[str, list[dict[str, Any]]] = {
    "llama": [{"attention_bias": a, "mlp_bias": m} for a in (False, True) for m in (False, True)],
    "mistral": [{}],
    "qwen2": [{}, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}],
    "qwen3": [{}, {"attention_bias": True}],
    "qwen3_moe": [
        {},
        {"attention_bias": True, "mlp_only_layers": [0, 6], "decoder_sparse_step": 1},
        {"mlp_only_layers": [], "decoder_sparse_step": 3},
        {"num_experts": 0},
    ],
    "mixtral": [{}],
    "deepseek_v2": [{}, {"q_lora_rank": 20, "first_k_dense_replace": 0}, {"attention_bias": True}],
    "deepseek_v3": [
        {},
        {"q_lora_rank": None, "num_nextn_predict_layers": 0},
        {"attention_bias": True, "first_k_dense_replace": 0, "n_shared_experts": 1},
        {"attention_bias": True, "q_lora_rank": None, "first_k_dense_replace": 4},
    ],
    "qwen3_next": [
        {},
        {
            "attention_bias": True,
            "full_attention_interval": ...,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 8,
        },
        {"linear_num_value_heads": 2, "num_experts": 0},
    ],
    "qwen3_5_text": [{}, {"attention_bias": True, "layer_types": ..., "num_hidden_layers": 5}],
    "qwen3_5_moe_text": [{}, {"linear_num_key_heads": 4}],
    "nemotron_h": [{}, {"use_bias": True, "mlp_bias": True, "hybrid_override_pattern": "-MM*MM"}],
    "gpt2": [{}, {"n_inner": None, "scale_attn_by_inverse_layer_idx": True}],
    "gptj": [{}, {"n_inner": None}],
    "gpt_bigcode": [{}, {"multi_query": False, "n_inner": None}],
    "codegen": [{}, {"n_inner": None}],
    "bloom": [{}, {"hidden_size": ..., "n_embed": 42}],
    "falcon": [
        {},
        {"num_ln_in_parallel_attn": 1, "bias": True},
        {"num_kv_heads": None, "ffn_hidden_size": None},
        {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": 6},
        {"new_decoder_architecture": False, "multi_query": True, "num_ln_in_parallel_attn": 2, "bias": True},
        {"new_decoder_architecture": False, "parallel_attn": False, "alibi": True, "bias": True},
        {"parallel_attn": False, "num_kv_heads": 3},
    ],
    "phi3": [{}, {"hidden_size": 36, "head_dim": ..., "num_key_value_heads": None}],
    "mamba2": [{}, {"use_bias": True, "expand": 1, "head_dim": 5, "num_heads": 6, "n_groups": 3}],
}
CASES = [
    pytest.param(
        family, changes | {"tie_word_embeddings": tied}, id=f"{family}-{i}-{'tied' if tied else 'untied'}"
    )
    for family, all_changes in CHANGES.items()
    for i, changes in enumerate(all_changes)
    for tied in ((False,) if family == "nemotron_h" else (False, True))
]


@pytest.fixture
def tiny(data_dir: Path) -> Any:
    def read(family: str, **changes: Any) -> dict[str, Any]:
        config = json.loads((data_dir / "configs" / "tiny" / f"{family}.json").read_text()) | changes
        return {key: value for key, value in config.items() if value is not ...}

    return read


def build(config: dict[str, Any], device: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(7)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values))


def save(config: dict[str, Any], folder: Path) -> tuple[Any, dict[str, np.ndarray]]:
    from safetensors.numpy import load_file

    model = build(config, "cpu")
    model.save_pretrained(folder)
    return model, {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def logical(model: Model) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for tensor in model.tensors for name in tensor.names()}


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_a_model_is_what_save_pretrained_writes(
    tiny: Any, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    _, saved = save(tiny(family, **changes), tmp_path)
    # The layers for further tokens that a config may tell of are no part of what transformers builds.
    written = from_config(tmp_path).decoder
    assert logical(written) == {name: array.shape for name, array in saved.items()}
    # The config as given and the config as transformers wrote it out describe one model.
    assert from_config(tiny(family, **changes)) == from_config(tmp_path)
    assert hf.variant(saved, from_config(tmp_path)) == hf.layout(written)


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_a_layout_is_what_is_in_memory(tiny: Any, family: str, changes: dict[str, Any]) -> None:
    held = {
        name: tuple(value.shape)
        for name, value in build(tiny(family, **changes), "meta").state_dict().items()
    }
    # In memory nemotron_h has another prefix than in files.
    model = from_config(tiny(family, **changes), prefix="model." if family == "nemotron_h" else None)
    layout = hf.layout(model.decoder, stacked_experts=True, with_aliases=True)
    assert {name: buffer.shape for name, (buffer, _) in layout.arrays(0).items()} == held
    assert {b.name for b in hf.variant(held, model).buffers(0)} == {b.name for b in layout.buffers(0)}


def stored(layout: Layout, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a layout from logical tensors, element by element of the index dims."""
    arrays = {
        name: np.full(buffer.shape, np.nan, np.float32) for name, (buffer, _) in layout.arrays(0).items()
    }
    for buffer in layout.buffers(0):
        separate = {i: k for k, i in enumerate(buffer.separate)}
        for piece in buffer.pieces():
            index = len(piece.tensor.index)
            names = [name for name, _ in piece.tensor.index]
            numbers = itertools.product(*piece.box.dims[:index])
            for values, at in zip(numbers, itertools.product(*piece.at.dims[:index]), strict=True):
                source = tensors[piece.tensor.member(dict(zip(names, values, strict=True)))]
                block = source[tuple(slice(r.start, r.stop, r.step) for r in piece.box.dims[index:])]
                target = arrays[buffer.member(tuple(at[i] for i in separate))]
                place = tuple(
                    at[i] if i < index else slice(piece.at.dims[i].start, piece.at.dims[i].stop)
                    for i in buffer.stacked
                )
                target[place] = block
    return arrays


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("tied", [False, True])
def test_experts_in_memory_hold_gate_rows_then_up_rows(
    tiny: Any, tmp_path: Path, family: str, tied: bool
) -> None:
    model, saved = save(tiny(family, tie_word_embeddings=tied), tmp_path)
    layout = hf.layout(from_config(tmp_path).decoder, stacked_experts=True, with_aliases=tied)
    held = {name: value.numpy() for name, value in model.state_dict().items()}
    expected = stored(layout, saved)
    assert held.keys() == expected.keys()
    for name, array in held.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize(
    ("family", "absent"),
    [
        ("llama", ("head_dim", "num_key_value_heads", "attention_bias", "mlp_bias")),
        ("mistral", ("head_dim",)),
        ("qwen2", ("head_dim",)),
        ("qwen3", ("head_dim", "attention_bias")),
        ("qwen3_moe", ("head_dim", "attention_bias", "decoder_sparse_step", "mlp_only_layers")),
        ("mixtral", ("head_dim",)),
        ("deepseek_v3", ("num_key_value_heads", "attention_bias", "num_nextn_predict_layers")),
    ],
)
def test_absent_keys_mean_what_they_mean_to_transformers(
    tiny: Any, family: str, absent: tuple[str, ...]
) -> None:
    # A head dim of an odd hidden_size / heads is refused by rotary embeddings: 36 / 6 is even.
    config = tiny(family, hidden_size=36, **dict.fromkeys(absent, ...))
    held = {name: tuple(value.shape) for name, value in build(config, "meta").state_dict().items()}
    layout = hf.layout(from_config(config).decoder, stacked_experts=True)
    assert {name: buffer.shape for name, (buffer, _) in layout.arrays(0).items()} == held


@pytest.mark.parametrize("family", CHANGES)
def test_every_key_that_transformers_writes_is_understood(tiny: Any, tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    values = {key: value for key, value in tiny(family).items() if key != "model_type"}
    config = AutoConfig.for_model(family, **values)
    from_config(json.loads(config.to_json_string(use_diff=False)))
