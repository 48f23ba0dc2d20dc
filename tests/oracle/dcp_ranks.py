"""Checkpoints as torch saves them from DTensors of every kind, with what is in them, gathered by torch.

A case shards a model in one way, trains it two steps, and saves it with ``dcp.save`` and with the writer for
Hugging Face. Beside that stand ``truth.safetensors``, and ``objects.json`` where there are objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import Case, play_all
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# Tensor parallelism cuts rows into 11 and 11, and these are cut into 6 and 5; all else is uneven at once.
HIDDEN, INNER, EXPERTS, ROWS = 13, 22, 3, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        # Of 4 ranks the last has no expert.
        self.experts = nn.Parameter(torch.randn(EXPERTS, ROWS, HIDDEN))
        self.register_buffer("seen", torch.arange(7) + (1 << 40))
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("scale", torch.tensor(-0.0, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(self.norm(x))))
        return x + y + (x @ self.experts.sum(0).t()).sum(-1, keepdim=True)


def sharded(how: str) -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Block(), Block(), nn.Linear(HIDDEN, 3).bfloat16())
    shard: DeviceMesh
    if how == "fsdp":
        shard = init_device_mesh("cpu", (4,))
    elif how == "hsdp":
        shard = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for block in (model[1], model[2]):
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shard = mesh["dp"]
    for layer in model:
        fully_shard(layer, mesh=shard)
    fully_shard(model, mesh=shard)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, how: str) -> None:
    # Ranks of one tensor parallel group see the same, or else their replicas differ.
    chance = torch.Generator().manual_seed(dist.get_rank() // (2 if how == "tp" else 1))
    for _ in range(2):
        x = model[2](model[1](model[0](torch.randn(6, HIDDEN, generator=chance))))
        model[3](x.bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone().contiguous()


def flat(state: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    if isinstance(state, Mapping):
        return {k: v for key, value in state.items() for k, v in flat(value, (*path, str(key))).items()}
    if isinstance(state, list) and any(isinstance(one, torch.Tensor) for one in state):
        return {k: v for i, value in enumerate(state) for k, v in flat(value, (*path, str(i))).items()}
    return {".".join(path): state}


def play(case: Case, out: Path, rank: int) -> None:
    folder = out / case["name"]
    model = sharded(case["how"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    train(model, optimizer, case["how"])
    options = StateDictOptions(flatten_optimizer_state_dict=case.get("flat", False))
    weights, states = get_state_dict(model, optimizer, options=options)
    app = {
        "note": "kept",
        "raw": b"\x00\x01",
        "history": [1, 2.5, None],
        "rng": [torch.get_rng_state(), "cpu"],
    }
    state = {"model": weights, "optim": states, "app": app}
    found = {key: whole(v) for key, v in flat(state).items() if isinstance(v, torch.Tensor)}
    kinds = {str(v.placements) for v in weights.values() if isinstance(v, DTensor)}
    if rank == 0:
        folder.mkdir()
        save_file(found, folder / "truth.safetensors")
        (folder / "placements.json").write_text(json.dumps(sorted(kinds)))
    dist.barrier()
    writer = dcp.FileSystemWriter(folder / "dcp", thread_count=case.get("threads", 1))
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=case.get("lowest", False))
    dcp.save(state, storage_writer=writer, planner=planner)
    if not case.get("hf"):
        return
    index = {name: 1 + i % 3 for i, name in enumerate(weights)}
    floats = {name: v for name, v in weights.items() if v.is_floating_point()}
    for name, values, more in (
        ("sharded", weights, {"save_distributed": True}),
        ("numbered", weights, {"save_distributed": True, "fqn_to_index_mapping": index}),
        ("consolidated", floats, {"save_distributed": True, "enable_consolidation": True}),
    ):
        # torch adds up what ranks write in a list that is theirs as long as they are.
        dcp.save(dict(values), storage_writer=HuggingFaceStorageWriter(str(folder / name), **more))
    gathered = {name: whole(v) for name, v in weights.items()}
    if rank == 0:
        alone = HuggingFaceStorageWriter(str(folder / "alone"), fqn_to_index_mapping=index)
        dcp.save(gathered, storage_writer=alone, no_dist=True)
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    play_all(play)
