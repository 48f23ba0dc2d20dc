"""What a training step costs with weights in shares, and what the same step costs with FSDP2.

    python benchmarks/shares.py            six turns on 2 and on 4 ranks, a minute or two each
    python benchmarks/shares.py --tiny     a small model, two turns

Forward, backward, gradients and AdamW, fp32, one thread and one process a rank, gloo: 6 layers, hidden 512,
8 query and 2 KV heads, two documents of 512 tokens a rank, all weights shared over all ranks.

The other side is transformers' Qwen3 under ``fully_shard`` of torch, each layer and the rest, and torch's
AdamW. Both begin with the same weights, are in the same processes, and take turns with the same tokens; the
gradients of the first step are compared. Peak memory is that of the operating system, taken in processes of
each one's own: the most that was resident in three steps, over what was before the model was built. How a
model gets there is not counted: this script builds all of it before FSDP2 cuts it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

import torch
import torch.distributed as dist
from torch.distributed import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train import ADAMW, MODELS, TINY

from shardweave.train.arrays import held_arrays
from shardweave.train.batch import microbatch
from shardweave.train.grid import connect
from shardweave.train.optimizer import AdamW, Optimizer
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import build, group_plan
from shardweave.train.step import forward_backward

OURS, THEIRS = "shardweave", "FSDP2"


Grads = dict[str, torch.Tensor]


class Side:
    """One of the two: makes a step and gives its loss; afterwards the whole gradients by name."""

    step: Callable[[], float]
    grads: Callable[[], Grads]


def ours(model: dict[str, Any], rank: int, ranks: int, folder: Path, tokens: torch.Tensor) -> Side:
    """shardweave on this rank."""
    parallel = Parallel(dp=ranks, weight_axes=("dp",))
    store = FileStore(str(folder / "groups"), ranks)
    groups = connect(group_plan(parallel), rank=rank, store=store, timeout_s=120)
    runtime = build(model, parallel=parallel, groups=groups)
    optimizer = Optimizer(
        runtime.weights,
        plan=reduce_plan(runtime.layout, rank),
        groups=groups,
        settings=AdamW(beta1=0.9, beta2=0.95, **ADAMW),
    )
    batch = microbatch(list(tokens.chunk(ranks)[rank]))

    def step() -> float:
        for weight in runtime.weights.values():
            weight.grad = None
        loss = forward_backward(runtime, [batch]).report.loss
        assert optimizer.step({name: weight.grad for name, weight in runtime.weights.items()}).ok
        return loss

    def grads() -> Grads:
        found: Grads = {}
        for name, held in held_arrays(runtime.layout, rank).items():
            for part in held.parts:
                into = found.setdefault(part.name, torch.zeros(part.shape))
                grad = runtime.weights[name].grad
                assert grad is not None
                into[tuple(slice(r.start, r.stop) for r in part.box.dims)] = part.view(grad)
        for grad in found.values():
            dist.all_reduce(grad, group=dist.group.WORLD)
        return found

    side = Side()
    side.step, side.grads = step, grads
    return side


def theirs(model: dict[str, Any], rank: int, ranks: int, tokens: torch.Tensor) -> Side:
    """FSDP2 on this rank, whose default process group is there, with the same weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    groups = connect(group_plan(Parallel()), rank=0, store=None)
    begun = build(model, parallel=Parallel(), groups=groups).weights
    module = Qwen3ForCausalLM(Qwen3Config(**{**model, "attn_implementation": "sdpa"}))
    module.load_state_dict({name: weight.detach() for name, weight in begun.items()})
    del begun
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.95), **ADAMW)
    own = tokens.chunk(ranks)[rank]

    def step() -> float:
        optimizer.zero_grad()
        loss = module(input_ids=own, labels=own, use_cache=False).loss
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=dist.group.WORLD)
        return float(total) / ranks

    def grads() -> Grads:
        return {name: parameter.grad.full_tensor() for name, parameter in module.named_parameters()}

    side = Side()
    side.step, side.grads = step, grads
    return side


def resident(what: str = "VmRSS") -> int:
    """Bytes of this process that are in memory now; with ``VmHWM`` the most since ``forget_peak``."""
    status = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
    return int(status[what].split()[0]) * 1024


def forget_peak() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def rank_main(
    rank: int,
    ranks: int,
    folder: Path,
    model: dict[str, Any],
    length: int,
    turns: int,
    names: list[str],
    out: Any,
) -> None:
    torch.set_num_threads(1)
    import transformers  # noqa: F401  # what it takes is no part of a step's memory, on either side

    dist.init_process_group(
        "gloo",
        store=FileStore(str(folder / "default"), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    chance = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model["vocab_size"], (2 * ranks, length), generator=chance)
    before = resident()
    makes = {
        OURS: lambda: ours(model, rank, ranks, folder, tokens),
        THEIRS: lambda: theirs(model, rank, ranks, tokens),
    }
    sides = {name: makes[name]() for name in names}
    forget_peak()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    far = 0.0
    for turn in range(1 + turns):  # the first warms up
        for name, side in sides.items():
            dist.barrier()
            begin = time.perf_counter()
            losses[name].append(side.step())
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin)
        if not turn and len(names) > 1:
            a, b = (side.grads() for side in sides.values())
            assert set(a) == set(b)
            far = max(float((a[name] - b[name]).norm() / b[name].norm()) for name in a)
    out.put((rank, seconds, losses, far, resident("VmHWM") - before))
    dist.barrier()
    dist.destroy_process_group()


def measure(model: dict[str, Any], ranks: int, *, length: int, turns: int, names: list[str]) -> Any:
    """What rank 0 saw: seconds and losses of each turn, how far gradients are apart, and the largest peak."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        out = context.Queue()
        arguments = (ranks, Path(folder), model, length, turns, names, out)
        processes = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            found = {rank: rest for rank, *rest in (out.get(timeout=500) for _ in processes)}
            for process in processes:
                process.join(60)
        finally:
            for process in processes:
                process.kill()
    seconds, losses, far, _ = found[0]
    return seconds, losses, far, max(peak for *_, peak in found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small model, two turns")
    parser.add_argument("--turns", type=int, default=6, help="steps of each side after the first")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="numbers of ranks")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    print(
        f"{'':10}{'ours, s':>9}{'FSDP2, s':>10}{'ours/theirs':>13}{'least/least':>13}"
        f"{'ours, MiB':>11}{'FSDP2, MiB':>12}{'ratio':>7}   gradients apart, losses"
    )
    models, length = (TINY, 64) if args.tiny else (MODELS, 512)
    model = models["dense"]
    turns = 2 if args.tiny else args.turns
    for ranks in args.ranks:
        seconds, losses, far, _ = measure(model, ranks, length=length, turns=turns, names=[OURS, THEIRS])
        peaks = [measure(model, ranks, length=length, turns=2, names=[name])[3] for name in (OURS, THEIRS)]
        a, b = (each[1:] for each in seconds.values())
        ratio = statistics.median(x / y for x, y in zip(a, b, strict=True))
        shown = ", ".join(f"{each[0]:.3f} to {each[-1]:.3f}" for each in losses.values())
        mine, other = (peak / 2**20 for peak in peaks)
        print(
            f"{f'{ranks} ranks':10}{statistics.median(a):>9.3f}{statistics.median(b):>10.3f}{ratio:>13.2f}"
            f"{min(a) / min(b):>13.2f}{mine:>11.0f}{other:>12.0f}{mine / other:>7.2f}   {far:.1e}, {shown}",
            flush=True,
        )


if __name__ == "__main__":
    main()
