"""Real processes with real DTensors: what each rank holds, and what it says of the layout.

Run as a script, once a rank: ``python dtensor_ranks.py RANK WORLD_SIZE STORE CASES OUT``. CASES is a JSON
file with a list of cases; every rank writes ``OUT/<rank>.npz``, its part of each, and ``OUT/<rank>.json``,
the text of the layout that it reads off each tensor.
"""

from __future__ import annotations

import json
import math
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np


def placement(given: list[Any]) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if not given:
        return Replicate()
    dim, split_factor = given
    return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)


def fully_sharded(case: dict[str, Any], device: Any) -> Any:
    """A weight of marker values under ``fully_shard``, on top of tensor parallelism where the mesh has it."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rows, columns = case["shape"]
    linear = torch.nn.Linear(columns, rows, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(rows * columns).reshape(rows, columns))
    rest = [name for name in case["mesh"] if name != "tp"]
    if "tp" in case["mesh"]:
        style = RowwiseParallel() if case["style"] == "row" else ColwiseParallel()
        parallelize_module(linear, device["tp"], style)
    fully_shard(linear, mesh=device[tuple(rest)])
    return linear.weight


def main(rank: int, world_size: int, store: str, cases: str, out: str) -> None:
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    from shardweave.dialects import fsdp

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    held, said = {}, {}
    for case in json.loads(Path(cases).read_text()):
        names, sizes = tuple(case["mesh"]), tuple(case["mesh"].values())
        device = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        if case["made_by"] == "fully_shard":
            tensor = fully_sharded(case, device)
        else:
            whole = torch.arange(math.prod(case["shape"]), dtype=torch.int64).reshape(case["shape"])
            placements = [placement(one) for one in case["placements"]]
            # Scattered from rank 0, but for strided cuts, whose scatter torch has for even sizes only.
            strided = any(one and one[1] > 1 for one in case["placements"])
            source = {"src_data_rank": None} if strided else {}
            tensor = distribute_tensor(whole, device, placements, **source)
        held[case["name"]] = tensor.to_local().detach().numpy()
        said[case["name"]] = str(fsdp.of_dtensor("w", tensor, made_by=case["made_by"]))
    np.savez(Path(out) / f"{rank}.npz", **held)
    (Path(out) / f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
