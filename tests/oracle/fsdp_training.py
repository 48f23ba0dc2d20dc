"""A training of transformers models under ``fully_shard``, saved and loaded by torch itself.

A case trains from its own weights and saves after some steps, or loads into a model of other weights. Either
way it writes all of its state, gathered, and makes one step more.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import Case, play_all
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM


@contextmanager
def exact() -> Iterator[None]:
    """What transformers computes in fp32 in models of any dtype is computed in fp64."""
    with patch.object(torch, "float32", torch.float64), patch.object(torch, "float", torch.float64):
        yield


def sharded(config: dict[str, Any], seed: int) -> Any:
    """A model in fp64 with weights so large that each matters."""
    values = {
        key: copy.deepcopy(value) for key, value in config.items() if key not in ("model_type", "dtype")
    }
    with exact():
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values),
            attn_implementation="eager",
            experts_implementation="eager",
        ).double()
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=chance, dtype=torch.float64)
            weight.copy_(drawn * 0.1 + name.endswith("norm.weight"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def adamw(model: Any, settings: dict[str, Any]) -> torch.optim.AdamW:
    """Norms do not decay, as in a run."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = settings["beta1"], settings["beta2"]
    return torch.optim.AdamW(groups, lr=settings["lr"], betas=betas, eps=settings["eps"])


def step(model: Any, optimizer: Any, ids: torch.Tensor) -> float:
    """Each rank takes equally many documents of one length, so that the mean of means is the mean."""
    mine = ids.chunk(dist.get_world_size())[dist.get_rank()]
    with exact():
        logits = model(mine).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), mine[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def write(model: Any, optimizer: Any, path: Path) -> None:
    """Everything, gathered by torch."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        found = {name: values.clone() for name, values in weights.items()}
        for name, states in state["state"].items():
            found |= {f"optim/{name}/{key}": value.clone() for key, value in states.items()}
        save_file(found, path)


def play(case: Case, out: Path, rank: int) -> None:
    documents = torch.tensor(json.loads(Path(case["documents"]).read_text()))
    model = sharded(case["config"], seed=1 if "load" in case else 7)
    optimizer = adamw(model, case["optimizer"] if "load" not in case else {**case["optimizer"], "lr": 5.0})
    options = StateDictOptions(flatten_optimizer_state_dict=case.get("flat", False))
    keys = case.get("keys", ["model", "optim"])
    losses = []
    if "load" in case:
        state = dict(zip(keys, get_state_dict(model, optimizer, options=options), strict=True))
        dcp.load(state, checkpoint_id=case["load"])
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state[keys[0]],
            optim_state_dict=state[keys[1]],
            options=options,
        )
    else:
        losses += [step(model, optimizer, documents[i]) for i in range(case["steps"])]
        state = dict(zip(keys, get_state_dict(model, optimizer, options=options), strict=True))
        if case.get("nested"):
            state = {"app": state, "epoch": torch.tensor([3, 1]), "note": "not of the model"}
        dcp.save(state, checkpoint_id=case["save"])
    write(model, optimizer, out / f"{case['name']}.saved.safetensors")
    losses.append(step(model, optimizer, documents[case["steps"]]))
    write(model, optimizer, out / f"{case['name']}.next.safetensors")
    if rank == 0:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        (out / f"{case['name']}.json").write_text(json.dumps({"losses": losses, "groups": groups}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    play_all(play)
