"""What vLLM holds: the parameters of a rank as they are while its loader fills them.

Linear layers are cut over ``tp``. Fused ones are cut first and fused after: ``qkv_proj`` is a slice
of Q, of K and of V, and ranks beyond the number of KV heads repeat them. Experts are stacked, and
belong to all ``tp * dp`` ranks of a stage: by rows, or by whole experts under expert parallelism.
Latent attention is whole on the way down, where its two parts are fused, and cut by heads on the way up.
The vocabulary is padded, then cut, by one rule for the embedding and the head.

After loading an engine may pack, transpose or drop these parameters; that form is the engine's own
and no layout of it is promised.

Source: vllm 0.32.0, model_executor/layers/{linear,vocab_parallel_embedding}.py, fused_moe/
{routed_experts,expert_map_manager}.py, distributed/{utils,parallel_state}.py,
distributed/eplb/eplb_state.py. tests/data/README.vllm.md says how the rules were checked against it.
"""

from __future__ import annotations

from shardweave.dialects.vllm.layout import layout
from shardweave.dialects.vllm.rules import (
    VOCAB_MULTIPLE,
    kv_heads,
    mesh,
    placed_experts,
    query_heads,
    stages,
    vocabulary,
)

__all__ = [
    "VOCAB_MULTIPLE",
    "kv_heads",
    "layout",
    "mesh",
    "placed_experts",
    "query_heads",
    "stages",
    "vocabulary",
]
