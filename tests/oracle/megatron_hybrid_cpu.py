"""megatron-core's delta nets, gated attention and Mamba2 mixers on CPU processes: load, record, compute.

Run as a script, once a rank: ``python megatron_hybrid_cpu.py RANK WORLD_SIZE STORE CASES OUT``, like
``megatron_cpu.py``. For each case a module is built, ``OUT/<name>.<rank>.in.safetensors`` is loaded into it,
and what it computes of ``OUT/<case input>`` goes to ``OUT/<name>.<rank>.out.safetensors``; its account of
what it stores in a checkpoint to ``OUT/<name>.<rank>.json``.

What is not Megatron's own, because it comes from packages with GPU kernels: the norm of a mixer and its scan
(``mamba_ssm``), the L2 norm of a delta net (``fla``), and Transformer Engine's norm around 0. Plain functions
stand in for them. Megatron's own delta rule is its deterministic one, in plain torch. Helpers of inference
that are written in triton are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_cpu import replace_cuda
from rank_processes import play_all


def replace_kernels() -> None:
    """Packages of GPU kernels, as far as these modules ask for them."""
    import torch
    from torch.nn.functional import conv1d, silu, softplus

    class GatedNorm(torch.nn.Module):
        """RMSNorm by groups, around 1."""

        def __init__(self, size: int, eps: float, group_size: int, dtype: Any, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
            self.eps, self.group_size = eps, group_size

        def forward(self, x: Any) -> Any:
            groups = x.unflatten(-1, (-1, self.group_size))
            return self.weight * (groups * (groups.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(
                -2
            )

    def scan(
        projected: Any, weight: Any, bias: Any, dt_bias: Any, a: Any, D: Any, *, headdim: int, ngroups: int,
        **_: Any,
    ) -> Any:  # fmt: skip
        """The recurrence of Mamba2, step by step, of projections [batch, steps, z + x + B + C + dt]."""
        heads, inner = len(a), len(a) * headdim
        z, x_b_c, dt = projected.split([inner, projected.shape[-1] - inner - heads, heads], -1)
        steps = x_b_c.shape[1]
        x_b_c = conv1d(x_b_c.mT, weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))
        state_size = (x_b_c.shape[1] - inner) // 2 // ngroups
        x, b, c = silu(x_b_c[..., :steps]).mT.split([inner, ngroups * state_size, ngroups * state_size], -1)
        x = x.unflatten(-1, (heads, headdim))
        b, c = (
            each.unflatten(-1, (ngroups, state_size)).repeat_interleave(heads // ngroups, 2)
            for each in (b, c)
        )
        dt = softplus(dt + dt_bias)
        state, found = torch.zeros(len(x), heads, headdim, state_size), []
        for t in range(steps):
            state = state * (dt[:, t] * a).exp()[..., None, None]
            state = state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
            found.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
        return torch.stack(found, 1).flatten(-2) * silu(z)

    def l2norm(x: Any) -> Any:
        return x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()

    for name, content in {
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": None},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": None,
            "mamba_split_conv1d_scan_combined": scan,
        },
        "fla.modules.l2norm": {"l2norm": l2norm},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": None},
    }.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(content)
    # Helpers of inference, written in triton; training does not call them.
    helpers = ModuleType("megatron.core.inference.contexts.attention_context.triton.tensor_ops")
    names = ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")
    vars(helpers).update(dict.fromkeys(names))
    sys.modules[helpers.__name__] = helpers


def config_of(hf: dict[str, Any], *, tp: int) -> Any:
    """What Megatron calls the keys of a config."""
    import torch
    from megatron.core.transformer import TransformerConfig

    given: dict[str, Any] = {"num_attention_heads": hf["num_attention_heads"]}
    if "linear_num_key_heads" in hf:
        names = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
        given |= {f"linear_{name}": hf[f"linear_{name}"] for name in names}
        given |= {"attention_output_gate": True, "layernorm_zero_centered_gamma": True}
    if "ssm_state_size" in hf:
        given |= {
            "mamba_state_dim": hf["ssm_state_size"],
            "mamba_head_dim": hf["mamba_head_dim"],
            "mamba_num_groups": hf["n_groups"],
            "mamba_num_heads": hf["mamba_num_heads"],
        }
    config = TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        layernorm_epsilon=hf.get("rms_norm_eps", hf.get("layer_norm_epsilon")),
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        attention_dropout=0.0,
        **given,
    )
    config.deterministic_mode = True
    return config


def build(kind: str, config: Any, groups: Any) -> Any:
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.enums import AttnMaskType

    class CentredNorm(torch.nn.Module):
        """RMSNorm around 0, as Transformer Engine computes it."""

        def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.empty(hidden_size)), eps

        def forward(self, x: Any) -> Any:
            return (1 + self.weight) * x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()

    if kind == "delta":
        from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

        parts = GatedDeltaNetSubmodules(ColumnParallelLinear, CentredNorm, RowParallelLinear)
        return GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)
    if kind == "mamba":
        from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules

        mixer = MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
        kernel = {"d_conv": config.d_conv}
        return MambaMixer(config, mixer, config.hidden_size, layer_number=1, pg_collection=groups, **kernel)
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=CentredNorm,
        k_layernorm=CentredNorm,
    )
    return SelfAttention(config, attention, 1, attn_mask_type=AttnMaskType.causal, pg_collection=groups)


def records(sharded: dict[str, Any]) -> list[dict[str, Any]]:
    """Megatron's own account of which box of which stored tensor this rank has."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(sharded)
    found, open_ = [], [sharded]
    while open_:
        entry = open_.pop()
        for value in entry.values() if isinstance(entry, dict) else entry:
            if isinstance(value, dict | list):
                open_.append(value)
            elif isinstance(value, ShardedTensor):
                found.append(
                    {"key": value.key, "offset": value.global_offset, "shape": value.local_shape,
                     "global": value.global_shape}
                )  # fmt: skip
    return found


def play(case: dict[str, Any], out: Path, rank: int) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import random
    from safetensors.torch import load_file, save_file

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=case["tp"])
    random.model_parallel_cuda_manual_seed(123)
    config = config_of(case["config"], tp=case["tp"])
    config.d_conv = case["config"].get("conv_kernel")
    module = build(case["kind"], config, ProcessGroupCollection.use_mpu_process_groups())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    loaded = module.load_state_dict(load_file(out / f"{case['name']}.{rank}.in.safetensors"), strict=False)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    report = {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "missing": [key for key in loaded.missing_keys if "_extra_state" not in key],
        "unexpected": loaded.unexpected_keys,
        "sharded": records(module.sharded_state_dict(prefix=case["prefix"], metadata=metadata)),
    }
    given = load_file(out / case["input"])["x"].transpose(0, 1).contiguous()
    with torch.no_grad():
        masked = torch.ones(1, 1, len(given), len(given), dtype=torch.bool).triu(1)
        found = module(given) if case["kind"] == "mamba" else module(given, masked)
    save_file({"y": found[0].transpose(0, 1).contiguous()}, out / f"{case['name']}.{rank}.out.safetensors")
    (out / f"{case['name']}.{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    replace_cuda()
    replace_kernels()
    play_all(play)
