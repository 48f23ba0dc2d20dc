"""The runtime at many layouts against one process: what `test_train_matrix.py` asserts, and a command to
look at it.

    python tests/dist/train_matrix.py [SEED]

runs another covering of all pairs of choices than the one that is tested, and prints every cell with its
errors. Ranks are threads of one process, but for the cells of `ON_PROCESSES`, which are run in both ways.
"""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "shared")]

import workers
from plain_decoder import objective as plain_objective
from train_cells import Cell, pairwise
from train_ranks import (
    CONFIG,
    as_numpy,
    assembled,
    batches_of,
    built,
    documents_of,
    fill,
    full_weights,
    parallel_of,
    parts_of,
    runtime_of,
)

from shardweave.testing.world import run_world
from shardweave.train.gradients import check_replicas, measure, sum_gradients
from shardweave.train.grid import Groups
from shardweave.train.optimizer import AdamW, Optimizer, decayed
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import Runtime, group_plan
from shardweave.train.step import Objective, evaluate, forward_backward

BALANCE, ROUTER_Z, MAX_NORM = 0.02, 0.01, 0.5
# An eps far above the rounding of a gradient: where one is as small as that, Adam divides rounding by
# rounding, and two sums of the same numbers in another order take steps of different sign.
ADAM = AdamW(lr=0.02, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1)
BOUNDS = {"float64": 1e-12, "float32": 1e-5}
ON_PROCESSES = (
    Cell("bshd", 1, 2, 1, 1, 2, 1, 1, True, "prompt", "ragged", "ring"),
    Cell("thd", 2, 1, 1, 2, 2, 1, 2, False, "empty_microbatch", "even", "ring"),
    Cell("bshd", 1, 2, 2, 2, 1, 2, 1, True, "empty_microbatch", "ragged", "gather"),
)
"""Cells of 2, 4 and 8 ranks, which together cut over every axis, that processes over gloo are held to."""


def config_of(cell: Cell) -> dict[str, Any]:
    """The layers of the cell, or one for each stretch."""
    return {**CONFIG, "num_hidden_layers": max(cell.layers, cell.pp * cell.vp)}


# --- the ranks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What a rank says of a cell and a dtype; arrays of numpy, as parts of whole tensors."""

    loss: float
    evaluated: float
    norm: float
    zeros: int
    data: int
    logprobs: list[Any]
    grads: list[Any]
    weights: list[Any]


def play(rank: int, *, cells: Sequence[Cell], dtypes: Sequence[str], folder: Path) -> list[Told]:
    """Cells one after the other, each in every dtype, on this rank."""
    found = []
    for number, (cell, dtype) in enumerate(itertools.product(cells, dtypes)):
        runtime = runtime_of(cell, rank, folder / f"store{number}", config_of(cell), dtype)
        found.append(played(runtime, cell))
        runtime.groups.close()
    return found


def in_memory(cell: Cell, dtype: str, *, strict: bool = False) -> dict[int, Told]:
    """What the ranks of a cell say, as threads of this process."""

    def work(groups: Groups) -> Told:
        return played(built(cell, groups, config_of(cell), dtype), cell)

    told = run_world(work, plan=group_plan(parallel_of(cell)), timeout_s=200, strict=strict)
    return dict(enumerate(told))


def on_processes(cells: Sequence[Cell], dtypes: Sequence[str]) -> list[dict[int, Told]]:
    """What ranks say over gloo, cells of one size on one set of processes."""
    (world_size,) = {cell.world_size for cell in cells}
    with tempfile.TemporaryDirectory() as folder:
        ended = workers.run(
            play,
            range(world_size),
            cells=list(cells),
            dtypes=list(dtypes),
            folder=Path(folder),
            within_s=200,
        )
    told = workers.values(ended)
    return [{rank: each[number] for rank, each in told.items()} for number in range(len(cells) * len(dtypes))]


def played(runtime: Runtime, cell: Cell) -> Told:
    """One cell: a step without an update, an evaluation, and two updates."""
    fill(runtime, full_weights(config_of(cell), runtime.dtype))
    data = runtime.parallel.data_rank(runtime.rank)
    batches, what = batches_of(cell, data), Objective(balance=BALANCE, router_z=ROUTER_Z)
    told = evaluate(runtime, batches, what, keep_logprobs=True)
    assert told.logprobs is not None
    plan = reduce_plan(runtime.layout, runtime.rank)
    optimizer = Optimizer(
        runtime.weights,
        plan=plan,
        groups=runtime.groups,
        settings=decayed(ADAM),
        sharded=cell.sharded,
        max_norm=MAX_NORM,
    )
    grads: list[Any] = []
    norms = []
    for step in range(2):
        for weight in runtime.weights.values():
            weight.grad = None
        stepped = forward_backward(runtime, batches, what, step=step)
        own = {name: weight.grad for name, weight in runtime.weights.items()}
        if not grads:
            loss = stepped.report.loss
            summed = sum_gradients(own, plan, runtime.groups)
            grads, norms = parts_of(runtime, summed.arrays()), list(measure(summed, runtime.groups))
        done = optimizer.step(own)
        assert done.ok
    check_replicas(runtime.weights, plan, runtime.groups)
    return Told(
        loss=loss,
        evaluated=told.report.loss,
        norm=norms[0],
        zeros=int(norms[1]),
        data=data,
        logprobs=[as_numpy(each) for each in told.logprobs],
        grads=grads,
        weights=parts_of(runtime, runtime.weights),
    )


# --- one process --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """What one process comes to, in fp64."""

    loss: float
    logprobs: list[list[Tensor]]
    grads: dict[str, Tensor]
    norm: float
    zeros: int
    weights: dict[str, Tensor]


def truth(cell: Cell) -> Truth:
    """Of one process; cells with the same documents and layers share it."""
    return _truth(cell.num_data, cell.mask, cell.lengths, config_of(cell)["num_hidden_layers"])


@cache
def _truth(num_data: int, mask: str, lengths: str, layers: int) -> Truth:
    """The plain decoder on all documents, and the optimizer of torch."""
    cell = Cell("thd", 1, 1, num_data, 1, 1, 1, 1, False, mask, lengths, "ring", layers=layers)
    config = config_of(cell)
    weights = {k: w.requires_grad_() for k, w in full_weights(config, torch.float64).items()}
    documents, masks = documents_of(cell)
    flat = [ids for batches in documents for batch in batches for ids in batch]
    kept = [mask for batches in masks for batch in batches for mask in batch]
    first: Truth | None = None
    still = [w for w in weights.values() if w.dim() == 1]
    moving = [w for w in weights.values() if w.dim() > 1]
    optimizer = torch.optim.AdamW(
        [{"params": moving}, {"params": still, "weight_decay": 0.0}],
        lr=ADAM.rate(1),
        betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )
    for _ in range(2):
        loss, each = plain_objective(flat, kept, weights, config, balance_weight=BALANCE, z_weight=ROUTER_Z)
        optimizer.zero_grad()
        loss.backward()
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if first is None:
            grads = {name: weight.grad.clone() for name, weight in weights.items()}
            norm = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
            zeros = sum(int((grad == 0).sum()) for grad in grads.values())
            left = iter(each)
            logprobs = [
                [torch.cat([next(left).detach() for _ in batch]) for batch in batches]
                for batches in documents
            ]
            first = Truth(loss.item(), logprobs, grads, norm, zeros, weights)
        torch.nn.utils.clip_grad_norm_(weights.values(), MAX_NORM)
        optimizer.step()
    assert first is not None
    return first


# --- the comparison -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """How far a cell is from one process, relative to the size of what is compared."""

    cell: Cell
    dtype: str
    by_kind: dict[str, tuple[float, str]]

    @property
    def worst(self) -> tuple[float, str, str]:
        """The largest error, of what, and where."""
        kind = max(self.by_kind, key=lambda kind: self.by_kind[kind][0])
        return (self.by_kind[kind][0], kind, self.by_kind[kind][1])

    def __str__(self) -> str:
        errors = ", ".join(f"{kind} {error:.1e}" for kind, (error, _) in self.by_kind.items())
        error, kind, where = self.worst
        return f"{self.cell}, {self.dtype}: {errors}; worst {error:.1e} {kind} {where}"


def compare(cell: Cell, dtype: str, told: dict[int, Told], true: Truth) -> Errors:
    """Everything that ranks say against one process."""
    size = abs(true.loss)
    losses = {f"rank {rank}": (t.loss, t.evaluated) for rank, t in told.items()}
    found = {
        "loss": max((abs(value - true.loss) / size, who) for who, pair in losses.items() for value in pair),
        "norm": max((abs(t.norm - true.norm) / true.norm, f"rank {rank}") for rank, t in told.items()),
    }
    each = []
    for rank, t in told.items():
        for number, (got, wanted) in enumerate(zip(t.logprobs, true.logprobs[t.data], strict=True)):
            assert got.shape == tuple(wanted.shape)
            if len(wanted):
                gap = (torch.from_numpy(got).double() - wanted).abs().max().item()
                # Documents of one token have nothing but zeros.
                each.append((gap / (wanted.abs().max().item() or 1.0), f"rank {rank}, microbatch {number}"))
    found["logprobs"] = max(each)
    for kind, wanted in (("grads", true.grads), ("weights", true.weights)):
        got = assembled({rank: getattr(t, kind) for rank, t in told.items()})
        assert set(got) == set(wanted)
        found[kind] = max(relative(got, wanted))
    if dtype == "float64":
        assert {t.zeros for t in told.values()} == {true.zeros}
    return Errors(cell, dtype, found)


def relative(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Iterator[tuple[float, str]]:
    """The error of each parameter over its norm.

    The experts of a layer are one parameter, as models hold them: the gradient of a lone expert with a
    handful of tokens may be the small rest of large terms.
    """
    squares: dict[str, list[float]] = {}
    for name, true in wanted.items():
        sums = squares.setdefault(re.sub(r"experts\.\d+", "experts", name), [0.0, 0.0])
        sums[0] += (got[name].double() - true.detach()).square().sum().item()
        sums[1] += true.detach().square().sum().item()
    for name, (gap, size) in squares.items():
        yield (gap / size if size else gap) ** 0.5, name


def run(cells: Sequence[Cell], dtypes: Sequence[str]) -> Iterator[Errors]:
    """Cells in memory, each in every dtype."""
    for cell, dtype in itertools.product(cells, dtypes):
        true = truth(cell)  # first: what torch imports when an optimizer is made is not for a time of threads
        yield compare(cell, dtype, in_memory(cell, dtype), true)


def differences(one: Mapping[int, Told], other: Mapping[int, Told]) -> list[str]:
    """What two runs of a cell do not have alike to the bit, by rank."""
    assert set(one) == set(other)
    found = []
    for rank, mine in one.items():
        theirs = other[rank]
        for name in ("loss", "evaluated", "norm", "zeros", "data"):
            if getattr(mine, name) != getattr(theirs, name):
                found.append(f"rank {rank}: {name} {getattr(mine, name)!r} != {getattr(theirs, name)!r}")
        for number, pair in enumerate(zip(mine.logprobs, theirs.logprobs, strict=True)):
            if not _alike(*pair):
                found.append(f"rank {rank}: logprobs of microbatch {number}")
        for kind in ("grads", "weights"):
            for (name, at, values), (same, there, wanted) in zip(
                getattr(mine, kind), getattr(theirs, kind), strict=True
            ):
                assert (name, at) == (same, there)
                if not _alike(values, wanted):
                    found.append(f"rank {rank}: {kind} of {name}")
    return found


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


PAGE = """# The matrix

What `python tests/dist/train_matrix.py {seed} PATH` printed: the runtime at layouts that together have
every pair of choices of form, degrees, sharding of the optimizer, masks, lengths and method of attention,
against one process. The model is a qwen3_moe with 2 KV heads, 8 experts and a dense layer among sparse
ones; the reference is written row by row ([`plain_decoder.py`](../tests/shared/plain_decoder.py)), and
the optimizer is torch's. Errors are relative: of log-probabilities to the largest, of gradients and
weights (after two updates with clipping) to the norm of each parameter, and here the worst parameter of
each cell.

Ranks are threads of one process that pass tensors in memory ([a world in memory](testing.md)). Cells of 2, 4
and 8 ranks were run on processes over gloo too, in fp64 and fp32, and every rank came to the same bits, of
all that is compared here:

{both}

Masks: `one` has a single target in the whole step; `empty_rank` leaves a data rank without targets,
`empty_microbatch` a microbatch without tokens. `tests/dist/test_train_matrix.py` asserts 1e-12 in fp64
and 1e-5 in fp32, and the bits of processes.

| layout and batch | log-probabilities | loss | gradients | norm | weights | gradients in fp32 |
|---|---|---|---|---|---|---|
{rows}

{worst}
"""


def page(found: Sequence[Errors], seed: int) -> str:
    """The errors as a page of the documentation."""
    exact = [errors for errors in found if errors.dtype == "float64"]
    short = {errors.cell: errors for errors in found if errors.dtype == "float32"}
    kinds = ("logprobs", "loss", "grads", "norm", "weights")
    rows = []
    for errors in exact:
        cells = [f"{errors.by_kind[kind][0]:.0e}" for kind in kinds]
        cells.append(f"{short[errors.cell].by_kind['grads'][0]:.0e}")
        rows.append(f"| {errors.cell} | {' | '.join(cells)} |")
    worst = [f"- {worst_of(found, dtype)}" for dtype in BOUNDS]
    return PAGE.format(
        seed=seed,
        both="\n".join(f"- {cell}" for cell in ON_PROCESSES),
        rows="\n".join(rows),
        worst="The worst cells:\n\n" + "\n".join(worst),
    )


def worst_of(found: Sequence[Errors], dtype: str) -> Errors:
    """The cell that is farthest from one process."""
    return max((errors for errors in found if errors.dtype == dtype), key=lambda errors: errors.worst[0])


def _main() -> None:
    # What is sent to the ranks has to be found by the name of this module.
    import train_matrix

    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    found: list[Errors] = []
    for errors in train_matrix.run(pairwise(seed), list(BOUNDS)):
        print(errors, flush=True)
        found.append(errors)
    for cell in ON_PROCESSES:
        for dtype, told in zip(BOUNDS, train_matrix.on_processes([cell], list(BOUNDS)), strict=True):
            apart = train_matrix.differences(told, train_matrix.in_memory(cell, dtype))
            print(f"{cell}, {dtype}, on processes:", "the same bits" if not apart else "; ".join(apart))
            assert not apart
    for dtype in BOUNDS:
        print("worst:", worst_of(found, dtype))
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(page(found, seed))


if __name__ == "__main__":
    _main()
