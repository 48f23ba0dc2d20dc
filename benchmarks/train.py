"""What a training step costs, and what the same step costs in megatron-core.

    python benchmarks/train.py            six turns of each geometry, a minute or two each
    python benchmarks/train.py --tiny     small models, two turns

Forward, backward, sums of gradients and AdamW, fp32, one thread and one process a rank, gloo:
    dense     6 layers, hidden 512, 8 query and 2 KV heads; alone, TP 2 and TP 4 (two ranks share a KV head)
    experts   4 layers x 8 experts of which a token takes 2, hidden 256; two data ranks, EP 2

Both runtimes are in the same processes and take turns, each with the same tokens and its own weights.
Megatron's model, forward and backward are its own: local spec, allgather dispatcher, no Transformer Engine,
which needs a GPU, and torch.cuda does nothing. Its AdamW is torch's, to which Megatron falls back where
Apex is missing; data ranks sum gradients by an all-reduce for each. Both keep whole states on each data rank.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("PYTHONWARNINGS", "ignore")
sys.path.append(str(Path(__file__).parents[1] / "tests" / "oracle"))

import torch
import torch.distributed as dist
from torch.distributed import FileStore

from shardweave.train.batch import microbatch
from shardweave.train.grid import connect
from shardweave.train.optimizer import AdamW, Optimizer
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import build, group_plan
from shardweave.train.step import forward_backward

GEOMETRIES = {
    "dense": ("dense", Parallel()),
    "dense, TP 2": ("dense", Parallel(tp=2)),
    "dense, TP 4": ("dense", Parallel(tp=4)),
    "experts, EP 2": ("experts", Parallel(dp=2, ep=2)),
}
ADAMW = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.1}


def config(*, layers: int, hidden: int, ffn: int, experts: int = 0, vocab: int) -> dict[str, Any]:
    """A model of the Qwen3 families with eight query heads and two KV heads."""
    found = {
        "model_type": "qwen3_moe" if experts else "qwen3",
        "dtype": "float32",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": hidden // 8,
        "intermediate_size": ffn,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
    }
    if experts:
        found |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": ffn}
        found |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return found


MODELS = {
    "dense": config(layers=6, hidden=512, ffn=1536, vocab=8192),
    "experts": config(layers=4, hidden=256, ffn=256, experts=8, vocab=8192),
}
TINY = {
    "dense": config(layers=2, hidden=64, ffn=96, vocab=512),
    "experts": config(layers=2, hidden=64, ffn=32, experts=4, vocab=512),
}

Step = Callable[[], float]
"""Makes a step and gives its loss."""


def ours(model: dict[str, Any], parallel: Parallel, rank: int, folder: Path, tokens: torch.Tensor) -> Step:
    """A step of shardweave on this rank."""
    store = FileStore(str(folder / "groups"), parallel.world_size)
    groups = connect(group_plan(parallel), rank=rank, store=store, timeout_s=120)
    runtime = build(model, parallel=parallel, groups=groups)
    optimizer = Optimizer(
        runtime.weights,
        plan=reduce_plan(runtime.layout, rank),
        groups=groups,
        settings=AdamW(beta1=0.9, beta2=0.95, **ADAMW),
        sharded=False,
    )
    own = tokens.chunk(parallel.dp)[parallel.mesh.coordinate(rank)["dp"]]
    batch = microbatch(list(own), tp=parallel.tp)

    def step() -> float:
        for weight in runtime.weights.values():
            weight.grad = None
        loss = forward_backward(runtime, [batch]).report.loss
        assert optimizer.step({name: weight.grad for name, weight in runtime.weights.items()}).ok
        return loss

    return step


def megatrons(model: dict[str, Any], parallel: Parallel, tokens: torch.Tensor) -> Step:
    """A step of megatron-core on this rank, whose default process group is there."""
    import train_megatron

    module = train_megatron.build(model, {"tp": parallel.tp, "ep": parallel.ep})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=0.02)
    # The last token of a document has no target: here, one that does not count.
    weights = torch.ones(tokens.shape)
    weights[:, -1] = 0
    one = train_megatron.Step(module, torch.nn.functional.pad(tokens, (0, 1)), weights)
    optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.95), **ADAMW)

    def step() -> float:
        optimizer.zero_grad()
        loss, _ = one.forward_backward()
        optimizer.step()
        return float(loss)

    return step


def rank_main(
    rank: int, folder: Path, model: dict[str, Any], parallel: Parallel, length: int, turns: int, out: Any
) -> None:
    from megatron_cpu import replace_cuda

    torch.set_num_threads(1)
    replace_cuda()
    dist.init_process_group(
        "gloo",
        store=FileStore(str(folder / "default"), parallel.world_size),
        rank=rank,
        world_size=parallel.world_size,
        timeout=timedelta(seconds=120),
    )
    chance = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model["vocab_size"], (2 * parallel.dp, length), generator=chance)
    steps = {
        "shardweave": ours(model, parallel, rank, folder, tokens),
        "megatron-core": megatrons(model, parallel, tokens),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + turns):  # the first warms up
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            losses[name].append(step())
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin)
    out.put((rank, seconds, losses))
    dist.barrier()
    dist.destroy_process_group()


def measure(model: dict[str, Any], parallel: Parallel, *, length: int, turns: int) -> tuple[Any, Any]:
    """Seconds and losses of each runtime and turn, as rank 0 saw them."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        out = context.Queue()
        processes = [
            context.Process(target=rank_main, args=(rank, Path(folder), model, parallel, length, turns, out))
            for rank in range(parallel.world_size)
        ]
        for process in processes:
            process.start()
        try:
            found = {rank: rest for rank, *rest in (out.get(timeout=500) for _ in processes)}
            for process in processes:
                process.join(60)
        finally:
            for process in processes:
                process.kill()
    seconds, losses = found[0]
    return seconds, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small models, two turns")
    parser.add_argument("--turns", type=int, default=6, help="steps of each runtime after the first")
    parser.add_argument("--only", choices=GEOMETRIES, help="one geometry")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    print(
        f"{'':16}{'shardweave, s':>15}{'megatron-core, s':>18}{'ours/theirs':>13}{'least/least':>13}   losses"
    )
    for name, (kind, parallel) in GEOMETRIES.items():
        if args.only not in (None, name):
            continue
        models, length = (TINY, 64) if args.tiny else (MODELS, 512)
        turns = 2 if args.tiny else args.turns
        seconds, losses = measure(models[kind], parallel, length=length, turns=turns)
        a, b = (each[1:] for each in seconds.values())
        ratio = statistics.median(x / y for x, y in zip(a, b, strict=True))
        shown = ", ".join(f"{each[0]:.3f} to {each[-1]:.3f}" for each in losses.values())
        print(
            f"{name:16}{statistics.median(a):>15.3f}{statistics.median(b):>18.3f}{ratio:>13.2f}"
            f"{min(a) / min(b):>13.2f}   {shown}",
            flush=True,
        )


if __name__ == "__main__":
    main()
