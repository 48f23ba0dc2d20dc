"""DeepSeek-V2: as V3, without a correction bias and without layers for further tokens.

Source: transformers, ``models/deepseek_v2``: DeepseekV2Config, DeepseekV2Attention, DeepseekV2Moe.
"""

from __future__ import annotations

from shardweave.models.config import MATHS
from shardweave.models.deepseek_v3 import IGNORED, SIZES, layers_of
from shardweave.models.family import Family

FAMILY = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    layers_of,
    shapes=SIZES,
    ignored={**IGNORED, "topk_method": MATHS},
    neutral={"mlp_bias": (False,), "moe_layer_freq": (1,), "scoring_func": ("softmax",)},
)
