"""A training of a small model by DeepSpeed's own engine, saved by it, with what it says of its state beside.

A case is a dict of ``name``, ``stage``, ``dtype`` (``fp32``, ``bf16``, ``fp16``), ``optimizer`` (``adamw``,
``amsgrad``, ``sgd``, ``nadam``), and optionally ``frozen``, ``tied``, ``tp``, ``experts``, ``llama``,
``zero`` (settings of ``zero_optimization``), ``config`` (settings of the engine). The engine's own functions
gather masters and states, none of ours.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from rank_processes import Case, play_all
from safetensors.torch import save_file

HIDDEN, INNER, WORDS = 7, 11, 23
BIG = 2**24 + 1
"""An integer that float32 rounds."""


class Block(torch.nn.Module):
    """A residual block with a norm, a gate that may be frozen, and a float and an integer buffer."""

    def __init__(self, inner: int, experts: dict[str, int] | None) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.up = torch.nn.Linear(HIDDEN, inner)
        self.down = torch.nn.Linear(inner, HIDDEN, bias=False)
        self.frozen = torch.nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, HIDDEN))
        self.register_buffer("seen", torch.tensor([BIG, inner]))
        self.moe = None
        if experts:
            expert = torch.nn.Sequential(torch.nn.Linear(HIDDEN, 5), torch.nn.Linear(5, HIDDEN, bias=False))
            self.moe = MoE(HIDDEN, expert, num_experts=experts["count"], ep_size=experts["ep"], k=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale.to(x.dtype)
        if self.moe is not None:
            x = x + self.moe(x)[0]
        return x + torch.tanh(self.frozen(x))


class Model(torch.nn.Module):
    """Words in, logits out; 2 blocks of different sizes."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, HIDDEN)
        self.blocks = torch.nn.ModuleList(Block(inner, case.get("experts")) for inner in (INNER, INNER + 2))
        self.head = torch.nn.Linear(HIDDEN, WORDS, bias=False)
        if case.get("tied"):
            self.head.weight = self.words.weight
        if case.get("frozen"):
            for block in self.blocks:
                block.frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Ranks:
    """Tensor-parallel neighbours, as a trainer's own unit tells them to DeepSpeed."""

    def __init__(self, tp: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.tp, self.rank = tp, rank
        for start in range(0, world, tp):
            group = dist.new_group(range(start, start + tp))
            if start <= rank < start + tp:
                self.model = group
        for first in range(tp):
            group = dist.new_group(range(first, world, tp))
            if rank % tp == first:
                self.data = group

    def get_model_parallel_rank(self) -> int:
        return self.rank % self.tp

    def get_model_parallel_world_size(self) -> int:
        return self.tp

    def get_model_parallel_group(self) -> Any:
        return self.model

    def get_data_parallel_rank(self) -> int:
        return self.rank // self.tp

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self.tp

    def get_data_parallel_group(self) -> Any:
        return self.data

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


def llama() -> torch.nn.Module:
    """A model that AutoTP knows how to cut: queries and keys by heads, and the rest by rows or columns."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=12, intermediate_size=22, num_hidden_layers=1, num_attention_heads=6,
            num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=8, tie_word_embeddings=False,
        )
    )  # fmt: skip


def pipeline(case: Case) -> torch.nn.Module:
    """The same model as a pipeline of two stages, whose first and last layer share their weight."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    words = (torch.nn.Embedding, WORDS, HIDDEN)
    return PipelineModule(
        [
            TiedLayerSpec("words", *words),
            *(LayerSpec(Block, inner, None) for inner in (INNER, INNER + 2)),
            TiedLayerSpec("words", *words, forward_fn=lambda tied, x: x @ tied.weight.T),
        ],
        num_stages=case["stages"],
        loss_fn=lambda logits, ids: torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), ids.flatten()
        ),
        partition_method="uniform",
    )


def optimizer_of(model: torch.nn.Module, case: Case) -> torch.optim.Optimizer:
    """Two groups: vectors do not decay, and learn faster."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups: Any = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1, "name": "matrices"},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0, "lr": 0.02, "name": "vectors"},
    ]
    if case.get("one_group"):
        groups = params
    if case.get("experts"):
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    made = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9)),
        "amsgrad": lambda: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
        "sgd": lambda: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
        "nadam": lambda: torch.optim.NAdam(groups, lr=0.01),
    }
    return made[case["optimizer"]]()


def truth(engine: Any, case: Case, rename: Any) -> dict[str, torch.Tensor]:
    """Everything that the engine holds, whole, as its own functions gather it. All ranks have to call it."""
    found: dict[str, torch.Tensor] = {}
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # It links states after the first group's first step, when the other groups have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    states = (
        {key for state in engine.optimizer.optimizer.state.values() for key in state} if case["stage"] else ()
    )
    for name, param in engine.module.named_parameters():
        key = rename(name)
        if hasattr(param, "ds_id"):
            with deepspeed.zero.GatheredParameters([param]):
                found[key] = param.detach().clone()
        else:
            found[key] = param.detach().clone()
        if not param.requires_grad:
            continue
        if not case["stage"] and not hasattr(param, "_hp_mapping"):
            for state, value in engine.optimizer.state[param].items():
                if value is not None and value.dim():
                    found[f"optim/{key}/{state}"] = value.clone()
            continue
        found[f"optim/{key}/master"] = safe_get_full_fp32_param(param).clone()
        for state in states or ("exp_avg", "exp_avg_sq"):
            if state in ("step", "mu_product"):
                continue
            value = safe_get_full_optimizer_state(param, state)
            if value is not None:
                found[f"optim/{key}/{state}"] = value.clone().reshape(found[key].shape)
    kept = set(engine.module.state_dict())
    found |= {name: value.clone() for name, value in engine.module.named_buffers() if name in kept}
    return {key: value.contiguous() for key, value in found.items()}


def play(case: Case, out: Path, rank: int) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    deepspeed.init_distributed(dist_backend="gloo")
    tp = case.get("tp", 1)
    torch.manual_seed(5 + (0 if case.get("llama") else rank % tp))  # AutoTP cuts a model that all ranks have
    model = llama() if case.get("llama") else pipeline(case) if case.get("stages") else Model(case)
    if case.get("experts"):  # ranks hold other experts
        ep, world = case["experts"]["ep"], dist.get_world_size()
        adjacent = case.get("config", {}).get("use_data_before_expert_parallelism")
        own = rank // (world // ep) if adjacent else rank % ep
        torch.manual_seed(70 + own)
        for name, param in model.named_parameters():
            if "experts" in name:
                torch.nn.init.normal_(param, std=0.3)
    torch.manual_seed(11 + rank // tp)
    ids = torch.randint(WORDS, (3, 6))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": case["stage"], "reduce_bucket_size": 100_000, "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0, **case.get("zero", {}),
        },
        **case.get("config", {}),
    }  # fmt: skip
    if case["dtype"] != "fp32":
        config[case["dtype"]] = {"enabled": True}
    if case["dtype"] == "fp16":
        config["fp16"]["initial_scale_power"] = 3
        # DeepSpeed asks for a fast fp16, torch computes it on any CPU.
        get_accelerator().is_fp16_supported = lambda: True
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer_of(model, case),
        config=config,
        mpu=Ranks(tp) if tp > 1 and not case.get("llama") else None,
    )
    for _ in range(case.get("steps", 2)):
        if case.get("stages"):
            engine.train_batch(iter([(ids, ids)]))
            continue
        logits = engine(ids)
        logits = getattr(logits, "logits", logits)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        engine.backward(loss)
        engine.step()
    local = case["experts"]["count"] // case["experts"]["ep"] if case.get("experts") else 0

    def rename(name: str) -> str:
        before, mark, after = name.partition("deepspeed_experts.")
        number, _, rest = after.partition(".")
        return f"{before}{mark}{int(number) + own * local}.{rest}" if mark else name

    save_file(truth(engine, case, rename), out / f"{case['name']}.rank{rank}.safetensors")
    engine.save_checkpoint(out / case["name"], tag="saved", client_state={"note": {"epoch": 3}})


if __name__ == "__main__":
    torch.set_num_threads(1)
    play_all(play)
