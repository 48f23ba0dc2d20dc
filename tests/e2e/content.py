"""Small models, and their weights at each version: a function of the name, the version and the index."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from shardweave.models import Model, from_config

_COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "float32",
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    # No two sizes are equal; the vocabulary is padded on both sides, to different sizes.
    "qwen3": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 96,
        "intermediate_size": 176,
        "num_attention_heads": 8,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "vocab_size": 211,
    },
    "qwen3_moe": _COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 96,
        "intermediate_size": 176,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "num_attention_heads": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "vocab_size": 211,
    },
    "qwen3-64q": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_attention_heads": 64,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": 211,
    },
}

PROMPTS = [[5, 17, 101, 200, 3], [42], [7] * 9, list(range(60, 83)), [210, 0, 1]]
NUM_TOKENS = 8


def model_of(config: dict[str, Any]) -> Model:
    return from_config(config)


def values(config: dict[str, Any], version: int) -> dict[str, np.ndarray]:
    """The weights of a version under the Hugging Face names."""
    found = {}
    for tensor in model_of(config).tensors:
        for name in tensor.names():
            rng = np.random.Generator(np.random.Philox(key=[version, zlib.crc32(name.encode())]))
            drawn = rng.standard_normal(tensor.shape, dtype=np.float32)
            if len(tensor.shape) == 1:
                found[name] = 1 + np.float32(0.2) * drawn
            else:
                found[name] = drawn * np.float32(1.5 / np.sqrt(tensor.shape[-1]))
    return found


def write(config: dict[str, Any], version: int, folder: Path) -> Path:
    """A Hugging Face checkpoint of a version."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(values(config, version), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
