"""Trainings of transformers models under ``fully_shard`` that torch saves, and that go on from what it loads.

A case makes steps, from its own weights or from what it loads, and may save in the end. Every rank takes its
part of the same documents.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import Case, play_all
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM


def sharded(config: dict[str, Any], seed: int, frozen: str) -> Any:
    values = {
        key: copy.deepcopy(value) for key, value in config.items() if key not in ("model_type", "dtype")
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **values),
        attn_implementation="eager", experts_implementation="eager", dtype=torch.float32,
    )  # fmt: skip
    for name, weight in model.named_parameters():
        weight.requires_grad_(not frozen or frozen not in name)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def optimizer_of(model: Any, kind: str, scale: float) -> torch.optim.Optimizer:
    """One of two groups; where it loads, with settings that must not be the ones that it goes on with."""
    params = [weight for weight in model.parameters() if weight.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() > 1], "lr": 1e-2 * scale},
        {"params": [p for p in params if p.dim() == 1], "lr": 3e-3 * scale, "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9 / scale, nesterov=True)
    return torch.optim.AdamW(groups, betas=(0.9, 0.95 / scale), weight_decay=0.1, amsgrad=kind == "amsgrad")


def step(model: Any, optimizer: Any, ids: torch.Tensor) -> float:
    mine = ids.chunk(dist.get_world_size())[dist.get_rank()]
    logits = model(mine).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), mine[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def write(model: Any, optimizer: Any, path: Path) -> None:
    """All weights and states, gathered by torch."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        found = {name: values.clone() for name, values in weights.items()}
        for name, states in state["state"].items():
            found |= {f"optim/{name}/{key}": values.clone() for key, values in states.items()}
        save_file(found, path)


def once(case: Case, weights: dict[str, Any]) -> dict[str, Any]:
    """Files of Hugging Face hold a tied weight once; the module has it twice, in one place."""
    tied = ("lm_head.weight",) if case["config"]["tie_word_embeddings"] else ()
    return {name: values for name, values in weights.items() if name not in tied}


def load(case: Case, model: Any, optimizer: Any) -> None:
    weights, states = get_state_dict(model, optimizer)
    if "hf" in case:
        dcp.load(once(case, weights), storage_reader=HuggingFaceStorageReader(case["hf"]))
        state = {"optim": states} if "load" in case else {}
    else:
        state = {"model": weights, "optim": states}
    if state:
        dcp.load(state, checkpoint_id=case["load"])
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=state.get("optim", states)
    )  # fmt: skip


def play(case: Case, out: Path, rank: int) -> None:
    documents = torch.tensor(json.loads(Path(case["documents"]).read_text()))
    loads = "load" in case or "hf" in case
    model = sharded(case["config"], 1 if loads else 7, case.get("frozen", ""))
    optimizer = optimizer_of(model, case["optimizer"], 2.0 if "load" in case else 1.0)
    if loads:
        load(case, model, optimizer)
        write(model, optimizer, out / f"{case['name']}.loaded.safetensors")
    losses = [step(model, optimizer, documents[i]) for i in range(*case["steps"])]
    if "save" in case:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=case["save"])
        writer = HuggingFaceStorageWriter(case["shards"], save_distributed=True)
        dcp.save(once(case, weights), storage_writer=writer)
    write(model, optimizer, out / f"{case['name']}.end.safetensors")
    if rank == 0:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        (out / f"{case['name']}.json").write_text(json.dumps({"losses": losses, "groups": groups}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    play_all(play)
