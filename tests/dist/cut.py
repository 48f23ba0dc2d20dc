"""What tests of the runtime cut over the axes of a grid of ranks, and the groups to put it together again."""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import FileStore

from shardweave.layout import Mesh
from shardweave.train.grid import Group, Groups, connect, plan_groups


def connected(rank: int, folder: Path, **axes: int) -> Groups:
    """Groups of each axis and of all, of a grid of these axes."""
    kinds = {**{name: (name,) for name in axes}, "all": tuple(axes)}
    plan = plan_groups({"model": Mesh(tuple(axes.items()))}, {"model": kinds})
    return connect(plan, rank=rank, store=FileStore(str(folder / "store"), plan.world_size), timeout_s=20)


def columns_of(logits: Tensor, tp: Group) -> Tensor:
    """A rank's columns, padded with what must not matter."""
    width = -(-logits.shape[-1] // tp.size)
    padded = F.pad(logits, (0, width * tp.size - logits.shape[-1]), value=1e4)
    return padded[..., tp.rank * width : (tp.rank + 1) * width].clone()


def own_slots(values: Tensor, tp: Group) -> Tensor:
    return values.chunk(tp.size, -1)[tp.rank]
