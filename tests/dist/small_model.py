"""A small model with everything that makes a gradient's ranks differ, on any degrees; values by numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import FileStore
from worlds import GLOO, MEMORY

from shardweave.layout import (
    BufferRule,
    Dim,
    Layout,
    Part,
    Run,
    Tensor,
    along,
    even,
    pad,
    replicated,
    whole,
)
from shardweave.plan.simulate import materialise
from shardweave.train.grid import GroupPlan, Groups, connect, plan_groups
from shardweave.train.parallel import Parallel

torch.set_num_threads(1)

LAYERS, HIDDEN, ROWS, FFN, VOCAB, EXPERTS = 5, 6, 12, 8, 13, 4
_LAYER = (("layer", whole(LAYERS)),)
_SPARSE = (("layer", Dim([Run("", 1, 2), Run("", 4, 1)])), ("expert", whole(EXPERTS)))
SHAPES = {
    "embed": ((VOCAB, HIDDEN), ()),
    "layers.{layer}.q": ((ROWS, HIDDEN), _LAYER),
    "layers.{layer}.o": ((HIDDEN, ROWS), _LAYER),
    "layers.{layer}.norm": ((HIDDEN,), _LAYER),
    "layers.{layer}.experts.{expert}.up": ((FFN, HIDDEN), _SPARSE),
    "layers.{layer}.experts.{expert}.down": ((HIDDEN, FFN), _SPARSE),
    "norm": ((HIDDEN,), ()),
    "scale": ((), ()),
}
TOPOLOGIES = {
    "one": Parallel(),
    "tp2 ep2 etp1": Parallel(tp=2, ep=2),
    "tp4 ep4 etp1": Parallel(tp=4, ep=4),
    "tp2 cp2 dp2 ep2 etp2": Parallel(tp=2, cp=2, dp=2, ep=2, etp=2),
    "cp2 pp2 etp2, tied": Parallel(cp=2, pp=2, etp=2),
    "dp3 pp2, tied": Parallel(dp=3, pp=2),
    "tp2 dp2 pp2 ep4 etp1, tied, offset": Parallel(tp=2, dp=2, pp=2, ep=4, offset=3),
    "tp2 pp4 etp1 ep2, tied": Parallel(tp=2, pp=4, ep=2),
}

OVER = {
    name: GLOO if name in ("tp2 ep2 etp1", "tp2 dp2 pp2 ep4 etp1, tied, offset") else MEMORY
    for name in TOPOLOGIES
}
"""How the ranks of each are run where values are compared: two and eight of them as processes."""

Arrays = dict[str, NDArray[np.float64]]
State = dict[int, Arrays]
Whole = dict[str, NDArray[np.float64]]
"""Values of whole tensors by template."""


def layout(parallel: Parallel, dtype: str = "float64") -> Layout:
    """Uneven stages, a padded vocabulary, experts in stacks, and an embedding that two stages hold."""
    mesh, pp = parallel.mesh, parallel.pp
    tensors = {name: Tensor(name, shape, dtype, index) for name, (shape, index) in SHAPES.items()}
    first = [LAYERS * s // pp + (0 < s < pp) for s in range(pp + 1)]

    def stage(of: Dim) -> object:
        held = [number for _, number in of]
        return along(mesh, "pp", lambda s: Dim(Run("", n, 1) for n in held if first[s] <= n < first[s + 1]))

    def rule(name: str, *dims: object, where: int | None = None, **more: object) -> BufferRule:
        tensor = tensors[name]
        lead = (stage(tensor.dims[0]),) if tensor.index else ()
        at = () if where is None else (("pp", (where,)),)
        return BufferRule(
            name.replace("experts.{expert}", "experts"),
            (Part(tensor),),
            (*lead, *dims),
            where=at,
            **more,
        )

    def cut(size: int, axis: str, padded: bool = False) -> object:
        parts = mesh.axis_size(axis)
        return along(mesh, axis, lambda r: even(pad(whole(size), parts) if padded else whole(size), parts, r))

    embed = (cut(VOCAB, "tp", padded=True), whole(HIDDEN))
    rules = [
        rule("norm", whole(HIDDEN), where=pp - 1),
        rule("embed", *embed, where=0),
        rule("layers.{layer}.q", cut(ROWS, "tp"), whole(HIDDEN)),
        rule("layers.{layer}.o", whole(HIDDEN), cut(ROWS, "tp")),
        rule("layers.{layer}.norm", whole(HIDDEN)),
        rule(
            "layers.{layer}.experts.{expert}.up",
            cut(EXPERTS, "ep"),
            cut(FFN, "etp"),
            whole(HIDDEN),
            stacked=(1, 2, 3),
        ),
        rule(
            "layers.{layer}.experts.{expert}.down",
            cut(EXPERTS, "ep"),
            whole(HIDDEN),
            cut(FFN, "etp"),
            stacked=(1, 2, 3),
        ),
        rule("scale", where=pp - 1),
    ]
    if pp > 1:
        rules.append(replicated(rule("embed", *embed, where=pp - 1)))
    return Layout("small", mesh, tuple(rules))


def drawn(seed: int) -> Whole:
    """Integers, some of them 0, so that sums are exact in any order."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(-3, 4, [*(len(dim) for _, dim in index), *shape]).astype(np.float64)
        for name, (shape, index) in SHAPES.items()
    }


def stored(layout: Layout, values: Whole, fill: float = np.nan) -> State:
    """What each rank stores of whole values; padding holds a value that must not count."""
    return materialise(layout, {tensor: values[tensor.name] for tensor in layout.tensors}, fill=fill)


def contributions(layout: Layout, seed: int = 0) -> tuple[State, Whole]:
    """What each rank has to say of its arrays, and the sums over those that hold each element."""
    numbers = {
        name: np.arange(1.0, 1 + values.size).reshape(values.shape) for name, values in drawn(0).items()
    }
    holds = stored(layout, numbers, fill=0)
    total = {name: np.zeros(values.size) for name, values in numbers.items()}
    grads: State = {}
    for rank in layout.mesh.ranks:
        mine = drawn(1000 * seed + rank)
        grads[rank] = stored(layout, mine)[rank]
        for name, values in total.items():
            tensor = next(t for t in layout.tensors if t.name == name)
            arrays = [
                array
                for key, array in holds[rank].items()
                if any(part.tensor == tensor for part in layout.arrays(rank)[key][0].parts)
            ]
            elements = np.unique(np.concatenate([a.reshape(-1) for a in arrays])) if arrays else np.zeros(0)
            at = elements[elements > 0].astype(np.int64) - 1
            values[at] += mine[name].reshape(-1)[at]
    return grads, {name: values.reshape(numbers[name].shape) for name, values in total.items()}


def group_plan(parallel: Parallel) -> GroupPlan:
    return plan_groups({"model": parallel.mesh}, {"model": parallel.groups})


def groups(parallel: Parallel, rank: int, folder: Path) -> Groups:
    world = parallel.offset + parallel.world_size
    store = FileStore(str(folder / "store"), world)
    return connect(group_plan(parallel), rank=rank, store=store, timeout_s=20)


def tensors(arrays: Arrays, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array)).to(dtype) for name, array in arrays.items()}
