"""Ask the real vLLM what a rank holds: load a checkpoint of markers, read the parameters back.

Every element of the checkpoint is another whole number, from 1 on. vLLM's model class is built for
one rank of a deployment, every parameter is filled with NaN, and vLLM's own ``load_weights`` fills
it; what a parameter then holds says where each of its elements came from. 0 is what vLLM filled in,
NaN what it never wrote.

The ranks of a deployment are asked one after the other in one process: vLLM's process groups are
replaced by objects that answer "rank r of n". ``--worlds`` asks real gloo worlds instead, with
nothing replaced, and is compared with the same question in one process.

One choice is replaced: of the kernel that computes the experts. On a CPU it refuses expert
parallelism, and sizes that are no multiple of 32, before any parameter is made; it takes no part in
loading except through the size that it wants rows padded to, which a case states.

    python tests/oracle/make_vllm_layouts.py --write     write tests/data/vllm_layouts.json
    python tests/oracle/make_vllm_layouts.py             compare with it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

RECORDING = Path(__file__).parents[1] / "data" / "vllm_layouts.json"
PAD = -1
Config = Mapping[str, Any]
Entry = dict[str, Any]

DEPLOYMENT: Config = {
    "tp": 1,
    "pp": 1,
    "dp": 1,
    "expert_parallel": False,
    "redundant_experts": 0,
    "placement": "linear",
    "layer_partition": None,
    "vocab_multiple": 64,
    "expert_multiple": 1,
    "drafter": False,
}


# --- the cases ----------------------------------------------------------------------------------

ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron-nas": "DeciLMForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def config(family: str, layers: int, hidden: int, heads: int, kv: int, head_dim: int, ffn: int, vocab: int,
           **more: Any) -> dict[str, Any]:  # fmt: skip
    """A Hugging Face config; sizes as small as the question allows."""
    return {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "dtype": "float32",
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        **more,
    }


def moe(layers: int, experts: int, expert_ffn: int, **more: Any) -> dict[str, Any]:
    given = {"num_experts": experts, "moe_intermediate_size": expert_ffn, "num_experts_per_tok": 2}
    return config("qwen3_moe", layers, 20, 8, 4, 4, 56, 71, **given, **more)


def latent(layers: int, heads: int, further: int = 0, **more: Any) -> dict[str, Any]:
    """A DeepSeek config; every size differs from those that it meets."""
    given: dict[str, Any] = {
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "moe_intermediate_size": 24,
        "n_group": 5,
        "n_routed_experts": 10,
        "n_shared_experts": 3,
        "num_experts_per_tok": 4,
        "num_nextn_predict_layers": further,
        "q_lora_rank": 22,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "scoring_func": "sigmoid",
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "v_head_dim": 5,
    }
    found = config("deepseek_v3", layers, 20, heads, heads, 4, 56, 71, **{**given, **more})
    del found["head_dim"]
    return found


def nas_layer(group: int | None, ffn: float | None) -> dict[str, Any]:
    attention = {"n_heads_in_group": group, "no_op": group is None, "replace_with_linear": False}
    return {
        "attention": attention,
        "ffn": {"ffn_mult": ffn, "no_op": ffn is None, "replace_with_linear": False},
    }


def cases() -> Iterator[tuple[str, Config, Config]]:
    """Name, config and deployment of every case; no two sizes of a case are equal by accident."""
    twelve = config("qwen3", 2, 20, 12, 4, 6, 28, 199)
    biased = {"attention_bias": True, "mlp_bias": True}
    tied = {"tie_word_embeddings": True}
    nas = [nas_layer(6, 1.0), nas_layer(None, 24.0), nas_layer(3, None), nas_layer(12, 48.0)]
    dense = {"mlp_only_layers": [1], "decoder_sparse_step": 1}
    ep = {"expert_parallel": True}
    yield "64 heads, 2 kv heads, tp 8", config("qwen3", 1, 12, 64, 2, 2, 24, 67), {"tp": 8}
    yield "12 heads, 4 kv heads, tp 2", twelve, {"tp": 2}
    yield "12 heads, 4 kv heads, tp 4", twelve, {"tp": 4}
    yield "24 heads, 4 kv heads, tp 8", config("llama", 1, 48, 24, 4, 3, 40, 131), {"tp": 8}
    yield "16 heads, 1 kv head, tp 4", config("llama", 1, 32, 16, 1, 3, 28, 131), {"tp": 4}
    yield "20 heads, 10 kv heads, tp 5", config("mistral", 2, 18, 20, 10, 4, 35, 320), {"tp": 5}
    yield "all biases, tp 4 over 2 kv heads", config("llama", 2, 24, 12, 2, 6, 28, 131, **biased), {"tp": 4}
    model = config("qwen2", 7, 12, 6, 2, 2, 16, 131, **tied)
    yield "qkv bias, tied, 7 layers, pp 3", model, {"tp": 2, "pp": 3}
    yield "tied without pp", config("qwen3", 1, 12, 6, 3, 4, 15, 380, **tied), {"tp": 3, "dp": 2}
    model = config("llama", 5, 12, 6, 2, 2, 16, 131)
    yield "uneven stages", model, {"tp": 2, "pp": 2, "layer_partition": [4, 1]}
    model = config("nemotron-nas", 4, 24, 12, 12, 2, 256, 131, num_key_value_heads=None, block_configs=nas)
    del model["intermediate_size"]
    yield "layers that differ", model, {"tp": 4, "pp": 2}
    yield "vocabulary 49159, tp 2", config("llama", 1, 4, 2, 2, 2, 6, 49159), {"tp": 2}
    yield "vocabulary 151936, tp 8", config("llama", 1, 8, 8, 8, 2, 24, 151936), {"tp": 8}
    yield "a rank of padding only", config("llama", 1, 4, 4, 4, 2, 12, 67), {"tp": 4}
    model = config("llama", 1, 24, 24, 24, 2, 72, 129280)
    yield "vocabulary 129280, tp 24, padded to 192", model, {"tp": 24, "vocab_multiple": 192}
    yield "experts cut by tp, a dense layer", moe(3, 10, 24, **dense), {"tp": 4}
    yield "experts cut by tp * dp", moe(2, 10, 24), {"tp": 2, "dp": 3}
    yield "10 experts, ep 4", moe(2, 10, 22), {"tp": 4, **ep}
    yield "10 experts, ep 2 * 2 over dp, pp 3", moe(7, 10, 22), {"tp": 2, "dp": 2, "pp": 3, **ep}
    yield "10 experts and 2 redundant, ep 4", moe(1, 10, 22), {"tp": 4, **ep, "redundant_experts": 2}
    yield "3 experts and 5 redundant, ep 2", moe(1, 3, 22), {"tp": 2, **ep, "redundant_experts": 5}
    yield "10 experts dealt out, ep 4", moe(1, 10, 22), {"tp": 4, **ep, "placement": "round_robin"}
    yield "rows of experts padded to 16", moe(1, 3, 22), {"tp": 2, "expert_multiple": 16}
    yield "rows of whole experts padded to 16", moe(1, 6, 22), {"tp": 4, **ep, "expert_multiple": 16}
    sizes = {"num_experts": 6, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 28}
    model = config("qwen2_moe", 2, 24, 6, 2, 4, 56, 71, **sizes, num_experts_per_tok=2)
    yield "a shared expert, dp 2", model, {"tp": 2, "dp": 2}
    yield "a shared expert, ep 4 over dp", model, {"tp": 2, "dp": 2, **ep}
    routed = {"num_local_experts": 6, "num_experts_per_tok": 2}
    yield (
        "mixtral, tied, pp 2",
        config("mixtral", 3, 20, 8, 4, 4, 24, 71, **routed, **tied),
        {"tp": 2, "pp": 2},
    )
    yield "latent attention, tp 4 over experts", latent(2, 12), {"tp": 4}
    yield "latent attention, plain queries, tp 2, pp 3", latent(7, 6, q_lora_rank=None), {"tp": 2, "pp": 3}
    yield (
        "latent attention, layers for further tokens, ep 2 * 2 over dp",
        latent(2, 6, 2),
        {"tp": 2, "dp": 2, **ep},
    )
    yield (
        "a drafter of two layers, ep 2 * 2 over dp",
        latent(2, 6, 2),
        {"tp": 2, "dp": 2, **ep, "drafter": True},
    )
    model = latent(1, 6, first_k_dense_replace=0, n_shared_experts=1)
    yield "latent attention, 10 experts and 2 redundant, ep 2", model, {"tp": 2, **ep, "redundant_experts": 2}


def refusals() -> Iterator[tuple[str, Config, Config]]:
    """What vLLM cannot hold; where its ``error`` is empty it goes on without a word."""
    yield "6 ranks over 4 kv heads", config("llama", 1, 36, 12, 4, 2, 24, 192), {"tp": 6}
    yield "10 kv heads over 4 ranks", config("llama", 1, 20, 20, 10, 2, 24, 192), {"tp": 4}
    yield "query heads over ranks", config("llama", 1, 20, 10, 5, 2, 24, 192), {"tp": 4}
    yield "ffn over ranks", config("llama", 1, 36, 12, 4, 2, 30, 192), {"tp": 4}
    yield "padded vocabulary over ranks", config("llama", 1, 24, 24, 24, 2, 72, 129280), {"tp": 24}
    yield "expert ffn over tp * dp", moe(1, 6, 22), {"tp": 2, "dp": 2}
    given = {"tp": 4, "expert_parallel": True, "redundant_experts": 1}
    yield "redundant experts that do not divide", moe(1, 10, 22), given
    model = config("llama", 5, 12, 6, 2, 2, 16, 131)
    yield "layers over explicit stages", model, {"pp": 2, "layer_partition": [4, 2]}
    yield "latent heads over ranks", latent(1, 6), {"tp": 4}
    yield "biases of latent attention", latent(1, 6, attention_bias=True), {"tp": 2}
    yield "a tied head beside latent attention", latent(1, 6, tie_word_embeddings=True), {"tp": 2}
    model = config("qwen3", 1, 12, 6, 2, 2, 16, 131, attention_bias=True)
    yield "an o_proj bias that the class does not have", model, {"tp": 2}
    yield "a head dim that the class does not read", config("qwen2", 1, 12, 6, 2, 4, 16, 131), {"tp": 2}


# --- asking -------------------------------------------------------------------------------------


def checkpoint(model: Config) -> dict[str, np.ndarray]:
    """The tensors of a model under their Hugging Face names; element by element 1, 2, 3, ..."""
    if model["model_type"] == "deepseek_v3":
        return marked(latent_shapes(model))
    layers, hidden, vocab = (model[k] for k in ("num_hidden_layers", "hidden_size", "vocab_size"))
    heads, d = model["num_attention_heads"], model["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        at, kv, ffn = f"model.layers.{i}.", model["num_key_value_heads"], model.get("intermediate_size")
        block = model["block_configs"][i] if "block_configs" in model else None
        if block:
            kv = 0 if block["attention"]["no_op"] else heads // block["attention"]["n_heads_in_group"]
            # The rule of DeciLM: two thirds of the multiple, rounded up to 256.
            mult = block["ffn"]["ffn_mult"]
            ffn = 0 if mult is None else -(-int(2 * mult * hidden / 3) // 256) * 256
        if kv:
            shapes[f"{at}input_layernorm.weight"] = (hidden,)
            for name, rows, columns in (
                ("q", heads * d, hidden),
                ("k", kv * d, hidden),
                ("v", kv * d, hidden),
                ("o", hidden, heads * d),
            ):
                shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, columns)
                if model.get("attention_bias") or (
                    model["model_type"] in ("qwen2", "qwen2_moe") and name != "o"
                ):
                    shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
            if model["model_type"].startswith("qwen3"):
                shapes |= {f"{at}self_attn.{name}_norm.weight": (d,) for name in "qk"}
        if not ffn:
            continue
        shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
        names, module = ("gate_proj", "up_proj", "down_proj"), "mlp"
        experts = model.get("num_experts", 0)
        if i in model.get("mlp_only_layers", ()):
            experts = 0
        if model["model_type"] == "mixtral":
            names, module, experts = ("w1", "w3", "w2"), "block_sparse_moe", model["num_local_experts"]
        if experts:
            shapes[f"{at}{module}.gate.weight"] = (experts, hidden)
            ffn = model.get("moe_intermediate_size", ffn)
        if shared := model.get("shared_expert_intermediate_size"):
            shapes[f"{at}mlp.shared_expert_gate.weight"] = (1, hidden)
            shapes[f"{at}mlp.shared_expert.gate_proj.weight"] = (shared, hidden)
            shapes[f"{at}mlp.shared_expert.up_proj.weight"] = (shared, hidden)
            shapes[f"{at}mlp.shared_expert.down_proj.weight"] = (hidden, shared)
        for prefix in [f"{at}{module}.experts.{e}." for e in range(experts)] or [f"{at}{module}."]:
            for name, shape in zip(names, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True):
                shapes[f"{prefix}{name}.weight"] = shape
                if model.get("mlp_bias"):
                    shapes[f"{prefix}{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not model["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return marked(shapes)


def latent_shapes(model: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of DeepSeek-V3's files, layers for further tokens and their copies included."""
    hidden, heads, rank = (model[k] for k in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    nope, rope, v = (model[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    experts, ffn, last = (
        model[k] for k in ("n_routed_experts", "moe_intermediate_size", "num_hidden_layers")
    )
    table = {"embed_tokens": (model["vocab_size"], hidden)}
    shapes: dict[str, tuple[int, ...]] = {f"model.{name}.weight": shape for name, shape in table.items()}
    for i in range(last + model["num_nextn_predict_layers"]):
        q_rank = model["q_lora_rank"]
        found: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.kv_a_proj_with_mqa": (rank + rope, hidden),
            "self_attn.kv_a_layernorm": (rank,),
            "self_attn.kv_b_proj": (heads * (nope + v), rank),
            "self_attn.o_proj": (hidden, heads * v),
        }
        if q_rank is None:
            found["self_attn.q_proj"] = (heads * (nope + rope), hidden)
        else:
            found["self_attn.q_a_proj"] = (q_rank, hidden)
            found["self_attn.q_a_layernorm"] = (q_rank,)
            found["self_attn.q_b_proj"] = (heads * (nope + rope), q_rank)
        modules = {"mlp": model["intermediate_size"]}
        if i >= model["first_k_dense_replace"]:
            found["mlp.gate"] = (experts, hidden)
            modules = {f"mlp.experts.{e}": ffn for e in range(experts)}
            modules["mlp.shared_experts"] = ffn * model["n_shared_experts"]
        for module, rows in modules.items():
            found |= {f"{module}.gate_proj": (rows, hidden), f"{module}.up_proj": (rows, hidden)}
            found[f"{module}.down_proj"] = (hidden, rows)
        if i >= last:
            found |= {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
            found |= {"shared_head.norm": (hidden,), "shared_head.head": (model["vocab_size"], hidden)}
            found |= table
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in found.items()}
        if "mlp.gate" in found:
            shapes[f"model.layers.{i}.mlp.gate.e_score_correction_bias"] = (experts,)
        if model.get("attention_bias"):
            biased = [f"self_attn.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")]
            shapes |= {f"model.layers.{i}.{n}.bias": found[n][:1] for n in biased if n in found}
    shapes["model.norm.weight"] = (hidden,)
    if not model["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (model["vocab_size"], hidden)
    return shapes


def marked(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Tensors of these shapes, element by element 1, 2, 3, ..."""
    ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes.values())])
    assert ends[-1] < 2**24, "a marker is a whole number in float32"
    return {
        name: np.arange(start + 1, start + 1 + np.prod(shape), dtype=np.float32).reshape(shape)
        for (name, shape), start in zip(shapes.items(), ends[:-1].tolist(), strict=True)
    }


class _Group:
    """Answers what a model asks its process group while it is built: rank r of n."""

    def __init__(self, size: int, rank: int) -> None:
        self.world_size, self.rank_in_group, self.rank = size, rank, rank
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = SimpleNamespace(size=lambda: size, rank=lambda: rank)


@contextlib.contextmanager
def _groups(tp: int, pp: int, dp: int, rank: int) -> Iterator[None]:
    """vLLM's groups at a rank of a deployment, whose rank order it states: dp, pp, tp, the last fastest."""
    import vllm.distributed.parallel_state as state

    t, p, d = rank % tp, rank // tp % pp, rank // tp // pp
    stubs = {
        "_TP": _Group(tp, t),
        "_PP": _Group(pp, p),
        "_DP": _Group(dp, d),
        "_EP": _Group(tp * dp, d * tp + t),
        "_PCP": _Group(1, 0),
        "_DCP": _Group(1, 0),
        "_WORLD": _Group(tp * pp * dp, rank),
    }
    before = {name: getattr(state, name) for name in stubs}
    vars(state).update(stubs)
    try:
        yield
    finally:
        vars(state).update(before)


@contextlib.contextmanager
def _kernel(given: Config) -> Iterator[None]:
    """Expert kernels and layers as the case wants them; see the module's docstring."""
    from vllm.model_executor.layers import vocab_parallel_embedding as vocab
    from vllm.model_executor.layers.fused_moe import expert_map_manager as placing
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    def padded(backend: Any, hidden: int, rows: int) -> tuple[int, int]:
        return hidden, -(-rows // given["expert_multiple"]) * given["expert_multiple"]

    def placed(*_: Any, **__: Any) -> str:
        return str(given["placement"])

    replaced: list[tuple[Any, str, Any]] = [
        (method, "select_unquantized_moe_backend", lambda moe_config: (UnquantizedMoeBackend.TRITON, None)),
        (method, "unquantized_round_up_hidden_size_and_intermediate_size", padded),
        # Only some models and backends deal experts out; how it is done is vLLM's.
        (placing, "determine_expert_placement_strategy", placed),
        (placing.ExpertMapManager, "_determine_placement_strategy", placed),
    ]
    # The padding is an argument of the class that the models here leave at its default.
    for cls in (vocab.VocabParallelEmbedding, vocab.ParallelLMHead):
        defaults = cls.__init__.__defaults__
        assert defaults is not None and defaults.count(vocab.DEFAULT_VOCAB_PADDING_SIZE) == 1
        new = tuple(given["vocab_multiple"] if x == vocab.DEFAULT_VOCAB_PADDING_SIZE else x for x in defaults)
        replaced.append((cls.__init__, "__defaults__", new))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


class _Attributes(dict[str, Any]):
    """A dict whose keys are attributes too, as the blocks of a DeciLM config are."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


@cache
def _register_nemotron_nas() -> None:
    """Give transformers the config class that this family brings as remote code."""
    from transformers import AutoConfig, LlamaConfig

    class NemotronNasConfig(LlamaConfig):
        model_type = "nemotron-nas"

        def __init__(self, block_configs: Sequence[Config] = (), **more: Any) -> None:
            super().__init__(**more)
            self.block_configs = [
                _Attributes({part: _Attributes(sizes) for part, sizes in block.items()})
                for block in block_configs
            ]

    AutoConfig.register("nemotron-nas", NemotronNasConfig)


@cache
def _vllm_config(model: str) -> Any:
    from vllm.config import DeviceConfig, ModelConfig, ParallelConfig, VllmConfig

    _register_nemotron_nas()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(model)
        model_config = ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
        )
        return VllmConfig(
            model_config=model_config, parallel_config=ParallelConfig(), device_config=DeviceConfig("cpu")
        )


def load(model: Config, deployment: Config, *, plain: bool = False) -> dict[str, np.ndarray]:
    """The parameters of the rank that the current process groups say, after vLLM has loaded the markers.

    Args:
        model: The config.
        deployment: What differs from ``DEPLOYMENT``.
        plain: Leave vLLM's choice of kernels alone.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    given = {**DEPLOYMENT, **deployment}
    whole = _vllm_config(json.dumps(model))
    whole.compilation_config.static_forward_context.clear()
    # The load balancer is refused on a CPU when a config is validated, which is over by now.
    whole.parallel_config.enable_expert_parallel = given["expert_parallel"]
    whole.parallel_config.enable_eplb = given["redundant_experts"] > 0
    whole.parallel_config.eplb_config.num_redundant_experts = given["redundant_experts"]
    if given["layer_partition"] is not None:
        os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, given["layer_partition"]))
    try:
        with (
            contextlib.nullcontext() if plain else _kernel(given),
            set_current_vllm_config(whole),
            set_default_torch_dtype(torch.float32),
        ):
            built = drafting(whole) if given["drafter"] else initialize_model(whole)
            for parameter in built.parameters():
                parameter.data.fill_(float("nan"))
            built.load_weights((name, torch.from_numpy(x)) for name, x in checkpoint(model).items())
    finally:
        os.environ.pop("VLLM_PP_LAYER_PARTITION", None)
    return {name: parameter.detach().numpy() for name, parameter in built.named_parameters()}


def drafting(whole: Any) -> Any:
    """vLLM's model of the layers for further tokens, which asks a speculative config for its own config."""
    from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP

    draft = SimpleNamespace(hf_config=whole.model_config.hf_config)
    speculative = SimpleNamespace(draft_model_config=draft, enable_adaptive_verification=False)
    object.__setattr__(whole, "speculative_config", speculative)
    try:
        return DeepSeekMTP(vllm_config=whole, prefix="")
    finally:
        object.__setattr__(whole, "speculative_config", None)


def ask(model: Config, deployment: Config, rank: int) -> dict[str, Entry]:
    """What one rank holds, in the words of the recording; copies are called by the tensor's name."""
    given = {**DEPLOYMENT, **deployment}
    with _groups(given["tp"], given["pp"], given["dp"], rank):
        found = describe(model, load(model, deployment))
    for entry in found.values() if given["drafter"] else ():
        entry["of"] = [re.sub(r"layers\.\d+\.(?=embed_tokens)", "", name) for name in entry["of"]]
        entry["of"] = [re.sub(r".*\.shared_head\.head\.", "lm_head.", name) for name in entry["of"]]
    return found


# --- reading the markers ------------------------------------------------------------------------


def describe(model: Config, parameters: Mapping[str, np.ndarray]) -> dict[str, Entry]:
    """For every parameter its shape, the tensors that it holds, and the runs of each dim.

    A run is ``[tensor, start, count, step]`` of indices of the source; tensor counts ``of``, is -1
    for all of them, and null for padding. Dim 0 of stacked experts counts experts.
    """
    full = checkpoint(model)
    names = list(full)
    starts = np.array([x.flat[0] for x in full.values()], dtype=np.int64)
    return {name: _describe(x, full, names, starts) for name, x in parameters.items()}


def _describe(x: np.ndarray, full: Mapping[str, np.ndarray], names: list[str], starts: np.ndarray) -> Entry:
    held = ~np.isnan(x) & (x > 0)
    padding = sorted({"unwritten" if np.isnan(v) else "zero" for v in x[~held][:1]})
    if not held.any():
        return {"shape": list(x.shape), "of": [], "padding": padding, "dims": None}
    anchor = [int(i) for i in np.argwhere(held)[0]]
    source = np.where(held, np.searchsorted(starts, np.where(held, x, 1), side="right") - 1, PAD)
    of = sorted({int(s) for s in np.unique(source) if s != PAD})
    families = list(dict.fromkeys(re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", names[s]) for s in of))
    family = {s: families.index(re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", names[s])) for s in of}
    expert = {s: int(m[1]) if (m := re.search(r"\.experts\.(\d+)\.", names[s])) else 0 for s in of}
    by_number = {(family[s], expert[s]): s for s in of}
    stacked = x.ndim - full[names[of[0]]].ndim
    several = len(families) > 1
    lines: list[list[tuple[int, int] | None]] = []
    for dim in range(x.ndim):
        line = []
        for i in range(x.shape[dim]):
            at = (*anchor[:dim], i, *anchor[dim + 1 :])
            if source[at] == PAD:
                line.append(None)
                continue
            s = int(source[at])
            if dim < stacked:
                line.append((-1, expert[s]))
                continue
            inner = np.unravel_index(int(x[at]) - int(starts[s]), full[names[s]].shape)[dim - stacked]
            line.append((family[s] if several and dim == stacked else -1, int(inner)))
        lines.append(line)
    _check_product(x, held, lines, by_number, stacked, full, names, starts)
    return {
        "shape": list(x.shape),
        "of": families,
        "padding": padding,
        "dims": [_runs(line) for line in lines],
    }


def _check_product(
    x: np.ndarray,
    held: np.ndarray,
    lines: list[list[tuple[int, int] | None]],
    by_number: Mapping[tuple[int, int], int],
    stacked: int,
    full: Mapping[str, np.ndarray],
    names: list[str],
    starts: np.ndarray,
) -> None:
    """The dims were read along one line each; every element must be what they say together."""
    experts = lines[0] if stacked else [(-1, 0)]
    expected = np.full(x.shape if stacked else (1, *x.shape), np.nan)
    rows, columns = lines[stacked], (lines[stacked + 1] if x.ndim - stacked > 1 else [(-1, 0)])
    inner = [-1 if c is None else c[1] for c in columns]
    for e, expert in enumerate(experts):
        for i, row in enumerate(rows):
            if expert is None or row is None:
                continue
            s = by_number[max(row[0], 0), expert[1]]
            width = full[names[s]].shape[-1] if full[names[s]].ndim > 1 else 1
            values = starts[s] + row[1] * width + np.array(inner)
            line = np.where(np.array(inner) < 0, np.nan, values)
            expected[e, i] = line if x.ndim - stacked > 1 else line[0]
    expected = expected.reshape(x.shape)
    assert np.array_equal(np.isnan(expected), ~held), "padding is not a product of dims"
    assert np.array_equal(expected[held], x[held]), "the parameter is not a product of dims"


def _runs(line: Sequence[tuple[int, int] | None]) -> list[list[int | None]]:
    """Stretches of one source with one step, as long as possible from the left."""
    runs: list[list[int | None]] = []
    for entry in line:
        last = runs[-1] if runs else None
        label, index = (None, 0) if entry is None else entry
        if last is None or last[0] != label:
            runs.append([label, index, 1, 1])
        elif label is None:
            last[2] += 1  # type: ignore[operator]
        elif last[2] == 1 and index > last[1]:  # type: ignore[operator]
            last[2], last[3] = 2, index - last[1]  # type: ignore[operator]
        elif last[2] > 1 and index == last[1] + last[2] * last[3]:  # type: ignore[operator]
            last[2] += 1  # type: ignore[operator]
        else:
            runs.append([label, index, 1, 1])
    return runs


# --- recording ----------------------------------------------------------------------------------


def by_parameter(ranks: Mapping[int, Mapping[str, Entry]]) -> dict[str, list[Entry]]:
    """Per parameter the distinct entries, each with the ranks that hold it."""
    found: dict[str, list[Entry]] = {}
    for rank, parameters in ranks.items():
        for name, entry in parameters.items():
            same = next(
                (e for e in found.setdefault(name, []) if {**e, "ranks": 0} == {**entry, "ranks": 0}), None
            )
            if same is None:
                found[name].append({"ranks": [rank], **entry})
            else:
                same["ranks"].append(rank)
    return found


def record() -> dict[str, Any]:
    import torch
    import vllm

    done = []

    def add(name: str, model: Config, deployment: Config, ranks: Mapping[int, Mapping[str, Entry]]) -> None:
        parameters = by_parameter(ranks)
        done.append({"name": name, "config": model, "deployment": deployment, "parameters": parameters})
        print(f"{name}: {len(ranks)} ranks, {len(parameters)} parameters", file=sys.stderr)

    for name, model, deployment in cases():
        size = int(np.prod([deployment.get(axis, 1) for axis in ("tp", "pp", "dp")]))
        add(name, model, deployment, {rank: ask(model, deployment, rank) for rank in range(size)})
    for name, model, deployment in worlds():
        add(f"{name}, in processes", model, deployment, world(model, deployment))
    refused = []
    for name, model, deployment in refusals():
        try:
            ask(model, deployment, 0)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        else:
            said = ""
        refused.append({"name": name, "config": model, "deployment": deployment, "error": said})
        print(f"{name}: {said}", file=sys.stderr)
    return {
        "format": "vllm_layouts/1",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "doc": " ".join((describe.__doc__ or "").split()),
        "cases": done,
        "refusals": refused,
    }


def dumps(recording: Mapping[str, Any]) -> str:
    """JSON with a line for each entry, so that differences can be read."""
    text = json.dumps({**recording, "cases": [], "refusals": []})[:-1].rsplit('"cases"', 1)[0]
    lines = []
    for case in recording["cases"]:
        head = json.dumps({k: v for k, v in case.items() if k != "parameters"})[:-1]
        entries = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(e)}" for name, e in case["parameters"].items()
        )
        lines.append(f'{head}, "parameters": {{\n{entries}}}}}')
    refusals = ",\n".join(json.dumps(case) for case in recording["refusals"])
    return f'{text}"cases": [\n' + ",\n".join(lines) + f'],\n"refusals": [\n{refusals}]}}\n'


# --- real worlds --------------------------------------------------------------------------------


def _in_world(rank: int, size: int, port: int, model: Config, deployment: Config, file: str) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(_vllm_config(json.dumps(model))):
        init_distributed_environment(size, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(deployment.get("tp", 1), deployment.get("pp", 1), backend="gloo")
    Path(file).write_text(json.dumps(describe(model, load(model, deployment, plain=True))))


def world(model: Config, deployment: Config, *, timeout_s: float = 120) -> dict[int, dict[str, Entry]]:
    """What the ranks of a real gloo world hold, with nothing of vLLM replaced."""
    size = deployment.get("tp", 1) * deployment.get("pp", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(size)]
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--in-world",
                    json.dumps((r, size, port, model, deployment, str(f))),
                ],
                env=environment,
            )
            for r, f in enumerate(files)
        ]
        try:
            codes = [process.wait(timeout_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert codes == [0] * size, codes
        return {rank: json.loads(file.read_text()) for rank, file in enumerate(files)}


def worlds() -> Iterator[tuple[str, Config, Config]]:
    """Sizes that vLLM's expert kernels take on a CPU."""
    sizes = {"num_experts": 6, "moe_intermediate_size": 192, "num_experts_per_tok": 2}
    yield "qwen3, tp 2", config("qwen3", 2, 40, 12, 4, 8, 56, 199), {"tp": 2}
    yield "qwen3_moe, tp 2", config("qwen3_moe", 2, 96, 8, 4, 16, 160, 199, **sizes), {"tp": 2}
    yield "qwen3_moe, tp 2, pp 2", config("qwen3_moe", 3, 96, 8, 4, 16, 160, 199, **sizes), {"tp": 2, "pp": 2}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {RECORDING.name}")
    parser.add_argument("--worlds", action="store_true", help="compare real gloo worlds with one process")
    parser.add_argument("--in-world", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_world:
        _in_world(*json.loads(arguments.in_world))
        return 0
    if arguments.worlds:
        different = []
        for name, model, deployment in worlds():
            real = world(model, deployment)
            same = all(real[rank] == ask(model, deployment, rank) for rank in real)
            print(f"{name}: {len(real)} ranks, {'equal to' if same else 'DIFFERENT FROM'} one process")
            different += [] if same else [name]
        return int(bool(different))
    text = dumps(record())
    if arguments.write:
        RECORDING.write_text(text)
        return 0
    if text != RECORDING.read_text():
        print(f"{RECORDING.name} says something else", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
