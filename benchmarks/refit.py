"""What a live refit costs over what its transport could do, and what planning one costs.

    python benchmarks/refit.py            two trainer and two engine processes, 800 MiB of weights
    python benchmarks/refit.py --tiny     small models, a second or two in all

Moving (Megatron TP2 to vLLM TP2, bf16; every fused weight changes its rows; one process a rank):
    dense     6 layers, hidden 2048
    experts   2 layers x 32 experts of the widths of Qwen3-30B-A3B, Megatron EP2 to vLLM TP2: every expert is
              cut by columns and rows

`stage` is the move itself. The raw transport moves the same bytes between the same pairs of ranks, as one
contiguous message a pair (gloo) or one copy a pair from memory of the reader's own (shared), in the same
processes between two turns. Memory on both sides of it was written to before, as that of a stage was in the
first turn, which is not counted. `turn` is everything, from hello to commit, with both checks of the content.

Planning (Megatron to vLLM, Qwen3-30B-A3B: 48 layers x 128 experts): what every rank does in a turn before it
moves, with both layouts known from before (warm), and from nothing (cold).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch.distributed import PrefixStore, TCPStore

from shardweave.dialects import megatron, vllm
from shardweave.layout import Layout
from shardweave.models import from_config
from shardweave.move import process_group, schedule
from shardweave.plan import Plan, cost, needed_bytes, plan
from shardweave.refit import Buffers, Publisher, Receiver, Session, Source
from shardweave.refit.world import Hello, Worlds, manifest_of

PUBLISHERS, RECEIVERS = (0, 1), (2, 3)
TRANSPORTS = ("gloo", "shared")


def config(*, layers: int, hidden: int, ffn: int, experts: int = 0, vocab: int = 32000) -> dict[str, Any]:
    """A model of the Qwen3 families with heads of 128 and a quarter as many KV heads."""
    heads = max(hidden // 128, 8)
    found = {
        "model_type": "qwen3_moe" if experts else "qwen3",
        "dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "head_dim": 128 if hidden >= 512 else 8,
        "intermediate_size": ffn,
        "tie_word_embeddings": False,
    }
    if experts:
        found |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": ffn}
    return found


MODELS = {
    "dense": config(layers=6, hidden=2048, ffn=6144),
    "experts": config(layers=2, hidden=2048, ffn=768, experts=32),
}
TINY = {
    "dense": config(layers=3, hidden=64, ffn=96, vocab=512),
    "experts": config(layers=2, hidden=64, ffn=32, experts=8, vocab=512),
}
QWEN3_30B = config(layers=48, hidden=2048, ffn=768, experts=128, vocab=151936) | {
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}


def sides(model: dict[str, Any], *, tp: int, dp: int = 1) -> tuple[Layout, Layout]:
    """A trainer of ``tp * dp`` ranks with its experts spread over all of them, and an engine of as many."""
    spec = from_config(model)
    ranks = tp * dp
    ep = ranks if "num_experts" in model else 1
    return (
        megatron.layout(spec, megatron.mesh(tp=tp, dp=dp, ep=ep, etp=1 if ep > 1 else tp)),
        vllm.layout(spec, vllm.mesh(tp=ranks, offset=ranks)),
    )


# --- moving -------------------------------------------------------------------------------------


def arrays_of(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """Memory for a rank, touched once."""
    return {
        name: torch.ones(buffer.shape, dtype=getattr(torch, buffer.dtype))
        for name, (buffer, _) in layout.arrays(rank).items()
    }


def pairs(moves: Plan) -> dict[tuple[int, int], int]:
    """Bytes from each rank to each other."""
    return {(src, dst): size for src, dst, size in cost(moves).pairs.tolist()}


def raw_gloo(group: Any, rank: int, messages: dict[tuple[int, int], torch.Tensor]) -> float:
    """One message a pair, all posted before any is waited for; seconds."""
    group.barrier().wait()
    begin = time.perf_counter()
    works = [
        (group.send if src == rank else group.recv)([data], dst if src == rank else src, 0)
        for (src, dst), data in messages.items()
    ]
    for work in works:
        work.wait()
    return time.perf_counter() - begin


def raw_shared(group: Any, rank: int, messages: dict[tuple[int, int], torch.Tensor]) -> float:
    """One copy a pair by its reader. What a publisher copies into its segment is a part of ``seal``."""
    rooms = [torch.ones_like(data) for (_, dst), data in messages.items() if dst == rank]
    group.barrier().wait()
    begin = time.perf_counter()
    for room, ((_, dst), data) in zip(rooms, messages.items(), strict=False):
        if dst == rank:
            room.copy_(data)
    return time.perf_counter() - begin


def rank_main(rank: int, port: int, model: dict[str, Any], transport: str, turns: int, out: Any) -> None:
    torch.set_num_threads(1)
    src, dst = sides(model, tp=2)
    everybody = [*PUBLISHERS, *RECEIVERS]
    store = TCPStore("127.0.0.1", port, is_master=False)
    group = process_group(store=PrefixStore("raw", store), ranks=everybody, rank=rank, timeout_s=60)
    sizes = {pair: size for pair, size in pairs(plan(src, dst)).items() if rank in pair}
    messages = {pair: torch.ones(size, dtype=torch.uint8) for pair, size in sizes.items()}
    session = Session(
        store=PrefixStore("refit", store),
        publishers=PUBLISHERS,
        receivers=RECEIVERS,
        rank=rank,
        transport=transport,
    )
    found = []
    if rank in PUBLISHERS:
        source = Source(src, arrays_of(src, rank), rank)
        member: Publisher | Receiver = Publisher(session, source)
    else:
        member = Receiver(session, Buffers(layout=dst, rank=rank, arrays=arrays_of(dst, rank)))
    for version in range(turns):
        if isinstance(member, Publisher):
            next(iter(member.source.arrays.values())).add_(1)
        raw = (raw_shared if transport == "shared" else raw_gloo)(group, rank, messages)
        group.barrier().wait()
        begin = time.perf_counter()
        done = member.publish(version) if isinstance(member, Publisher) else member.receive()
        whole = time.perf_counter() - begin
        found.append({"raw": raw, "turn": whole, "received": done.bytes_received, **done.seconds})
    out.put((rank, found))
    group.barrier().wait()


def moving(models: dict[str, dict[str, Any]], turns: int) -> None:
    """A line for each model and transport."""
    context = multiprocessing.get_context("spawn")
    print(f"{'':26}{'MiB':>7}{'stage/raw':>11}{'turn/raw':>10}{'moved/needed':>14}   step by step, s")
    for name, model in models.items():
        needed = needed_bytes(sides(model, tp=2)[1])
        for transport in TRANSPORTS:
            store, out = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), context.Queue()
            processes = [
                context.Process(target=rank_main, args=(rank, store.port, model, transport, turns, out))
                for rank in (*PUBLISHERS, *RECEIVERS)
            ]
            for process in processes:
                process.start()
            found = dict(out.get(timeout=120) for _ in processes)
            for process in processes:
                process.join(60)
            warm = range(1, turns)  # the first turn plans, connects and touches its memory

            def slowest(step: str, turn: int, found: dict[int, Any] = found) -> float:
                return max(each[turn].get(step, 0.0) for each in found.values())

            medians = {
                step: statistics.median(slowest(step, turn) for turn in warm)
                for step in ("raw", "turn", "hello", "seal", "stage", "verify", "derive", "vote", "commit")
            }
            moved = sum(each[-1]["received"] for each in found.values())
            steps = "  ".join(f"{s} {v:.3f}" for s, v in medians.items() if s not in ("raw", "turn"))
            raw, stage, turn = (medians[step] for step in ("raw", "stage", "turn"))
            print(
                f"{name + ', ' + transport:26}{needed / 2**20:>7.0f}{raw / stage:>10.2f}x{raw / turn:>9.2f}x"
                f"{moved / needed:>14.3f}   raw {raw:.3f}  {steps}"
            )


# --- planning -----------------------------------------------------------------------------------


def planning(model: dict[str, Any], *, tp: int, dp: int) -> None:
    """What the ranks conclude of a turn: from nothing, with all known, and with one rank restarted."""
    src, dst = sides(model, tp=tp, dp=dp)
    blobs = {"src": manifest_of(src), "dst": manifest_of(dst)}

    def hellos(layout: Layout, name: str, version: int | None, restarted: int = -1) -> dict[int, Hello]:
        return {
            rank: Hello("new" if rank == restarted else "old", "", name, version, 0)
            for rank in layout.mesh.ranks
        }

    def conclude(worlds: Worlds, version: int, restarted: int = -1) -> tuple[Any, float]:
        begin = time.perf_counter()
        world = worlds.conclude(
            hellos(src, "src", version, restarted), hellos(dst, "dst", version - 1), blobs.__getitem__
        )
        return world, time.perf_counter() - begin

    cold = min(conclude(Worlds(), 1)[1] for _ in range(5))
    worlds = Worlds()
    world, _ = conclude(worlds, 1)
    warm = min(conclude(worlds, version)[1] for version in range(2, 12))
    again = conclude(worlds, 12, restarted=0)[1]
    moves = world.ways[0].plan
    begin = time.perf_counter()
    steps = schedule(moves, rank=0)
    scheduled = time.perf_counter() - begin
    figures = cost(moves)
    copies = sum(map(len, steps.rounds)) + len(steps.local)
    print(
        f"ranks {src.mesh.size} to {dst.mesh.size}, "
        f"manifests {', '.join(str(len(blob)) for blob in blobs.values())} bytes"
    )
    print(f"conclude: cold {cold * 1e3:.1f} ms, warm {warm * 1e3:.3f} ms, restart {again * 1e3:.3f} ms")
    print(f"schedule of one rank, made once: {copies:,} copies in {scheduled * 1e3:.0f} ms")
    print(f"bytes moved over needed: {figures.num_bytes / figures.needed_bytes:.3f}")
    print(f"busiest sender over mean: {figures.send_imbalance:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small models, a second or two in all")
    parser.add_argument("--turns", type=int, default=6, help="versions of each model and transport")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    moving(TINY if args.tiny else MODELS, 3 if args.tiny else args.turns)
    print()
    planning(TINY["experts"] if args.tiny else QWEN3_30B, tp=4, dp=2)


if __name__ == "__main__":
    main()
