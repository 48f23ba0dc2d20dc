"""Ranks of real DeepSpeed on CPU: they train a tiny model, say what they hold, and go on from a checkpoint.

The sizes are odd and differ, so that flat groups need padding; one weight is frozen, one is under two
names, and there are buffers of an integer and a floating dtype. All ranks see the same tokens unless a case
says otherwise: means over two or four equal gradients are exact, so that one run is the reference for every
world size.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

HIDDEN, INNER, VOCAB = 5, 7, 11


def play(case: dict[str, Any], out: Path, rank: int) -> None:
    """One engine: trained or resumed, then asked what it holds, then trained on."""
    import deepspeed
    import deepspeed_training
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    os.environ.update(RANK=str(rank), WORLD_SIZE=sys.argv[2], LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    # A resumed engine begins with other weights: what it holds then comes from the checkpoint.
    # Tensor-parallel ranks hold weights of their own, which meet nowhere: what matters is whose is whose.
    tp = case.get("tp", 1)
    torch.manual_seed((1 if "load" in case else 0) + 10 * (rank % tp))
    model = build(frozen=case.get("frozen", True))
    if case.get("spoil"):  # what only the checkpoint can bring back
        with torch.no_grad():
            for value in (*model.parameters(), *model.buffers()):
                value.mul_(3)
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    params: Any = [weight for _, weight in trained]
    if case.get("groups", 1) == 2:
        params = [
            {"params": [weight for _, weight in trained if weight.dim() > 1], "weight_decay": 0.1},
            {
                "params": [weight for _, weight in trained if weight.dim() == 1],
                "weight_decay": 0.0,
                "lr": 3e-3,
            },
        ]
    settings = {"lr": 1e-2, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.05}
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[case.get("optimizer", "adamw")]
    settings = settings if kind is torch.optim.AdamW else {"lr": 1e-2, "momentum": 0.9}
    settings |= case.get("settings", {})
    dtype = case.get("dtype", "bfloat16")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "memory_efficient_linear": False,  # whose sums are rounded otherwise
            "stage": case["stage"],
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            **case.get("zero", {}),
        },
        "checkpoint": {"load_universal": case.get("universal", False)},
        "steps_per_print": 1000,
        **case.get("config", {}),
    }
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    elif dtype == "float16":
        accelerator = deepspeed.accelerator.get_accelerator()
        accelerator.is_fp16_supported = lambda: True  # torch multiplies such matrices on CPU all the same
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=kind(params, **settings),
        config=config,
        mpu=deepspeed_training.Ranks(tp) if tp > 1 else None,
    )
    client: Any = None
    if "load" in case:
        load = Path(case["load"])
        path, client = engine.load_checkpoint(str(load.parent), tag=load.name)
        assert path is not None
    tokens = torch.Generator().manual_seed(100 + rank * case.get("own_tokens", 0))

    def train() -> float:
        x = torch.randint(0, VOCAB, (2, 8), generator=tokens)
        logits = engine(x[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        return float(loss)

    for _ in range(case.get("skip", 0)):
        torch.randint(0, VOCAB, (2, 8), generator=tokens)
    losses = [train() for _ in range(case.get("steps", 0))]
    if "save" in case:
        engine.save_checkpoint(case["save"], tag="native", client_state={"epoch": 3})
    if case["stage"] < 3:  # which says where the states of a weight lie once its first group has any
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    states = case.get("states", ["exp_avg", "exp_avg_sq"])
    held: dict[str, Any] = {"losses": losses, "client": client, "fp32": {}, **{state: {} for state in states}}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            held["fp32"][name] = safe_get_full_fp32_param(weight).clone()
            for state in states:
                held[state][name] = safe_get_full_optimizer_state(weight, state).clone()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=case["stage"] == 3):
        held["module"] = {name: value.detach().clone() for name, value in model.state_dict().items()}
    held["groups"] = [
        {key: value for key, value in group.items() if key != "params"}
        for group in engine.optimizer.optimizer.param_groups
    ]
    held["optimizer"] = type(engine.optimizer).__name__
    held["then"] = [train() for _ in range(case.get("then", 0))]
    if "out" in case:
        torch.save(held, out / f"{case['out']}.{rank}.pt")
    engine.destroy()


def build(*, frozen: bool) -> Any:
    """The model, the same under the same seed."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(HIDDEN)
            self.up = nn.Linear(HIDDEN, INNER)
            self.down = nn.Linear(INNER, HIDDEN, bias=False)

        def forward(self, x: Any) -> Any:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, HIDDEN)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
            if frozen:
                self.gain = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN), requires_grad=False)
                self.register_buffer("seen", torch.tensor(2**24 + 1))
                self.register_buffer("shift", torch.linspace(-0.25, 0.25, HIDDEN))

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            if frozen:
                x = x * self.gain + self.shift.to(x.dtype)  # stage 3 leaves buffers in float32
            return self.head(x)

    return Model()


if __name__ == "__main__":
    from rank_processes import play_all

    play_all(play)
