"""A small LLaVA model: a config in which no two widths are alike, and what transformers makes of one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

# 5 by 5 patches, and 2 rows and columns of pixels that are not seen.
TOWER: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_channels": 3,
    "image_size": 22,
    "patch_size": 4,
    "layer_norm_eps": 1e-3,
    "vision_use_head": False,
}
TEXT: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 37,
    "hidden_size": 20,
    "intermediate_size": 26,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}
CONFIG: dict[str, Any] = {
    "model_type": "llava",
    "dtype": "float64",
    "image_token_index": 36,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "vision_config": TOWER,
    "text_config": TEXT,
}


def changed(
    changes: Mapping[str, Any], tower: Mapping[str, Any] | None = None, text: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config with changes of the whole, the tower and the language model; ``...`` leaves a key out."""
    config = {
        **CONFIG,
        "vision_config": {**TOWER, **(tower or {})},
        "text_config": {**TEXT, **(text or {})},
        **changes,
    }
    return {key: value for key, value in config.items() if value is not ...}


def theirs(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A model of transformers with weights so large that each matters; the same in every dtype."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    # It writes into what it is given.
    values = {
        key: value for key, value in copy.deepcopy(dict(config)).items() if key not in ("model_type", "dtype")
    }
    model = LlavaForConditionalGeneration._from_config(LlavaConfig(**values), attn_implementation="eager")
    chance = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=chance, dtype=torch.float64)
            is_norm = "norm" in name and name.endswith("weight")
            weight.copy_((drawn * 0.25 + is_norm).to(torch.bfloat16))  # bits that all dtypes have
    return model.to(dtype)
