"""What interleaved layouts cost, as maps and as plans, beside deepspeed's own planner of maps.

    python benchmarks/affine.py                 64 to 4,096 blocks, deepspeed at 64 and 256 of them
    python benchmarks/affine.py --peer 64,512   deepspeed at other counts; it refuses 1,024
    python benchmarks/affine.py --tiny          64 and 128 blocks, a second in all

Blocks of 6 rows in random order over 4 ranks are moved to another random order over 2 ranks. The columns are
milliseconds of processor time: reading the map of the source (with the proof that every element is held and
every shard filled), writing it, its layout, the plan between the two layouts with all its proofs; then
deepspeed's ``from_dict`` and ``plan_transfer`` of the same maps, and how many times as long it plans. Below,
the exponent of a power of the number of blocks that fits each column best: 1 is linear, 2 quadratic.

Last, a checkpoint: 720 weights of a model of 80 layers over 8 ranks, read and proved; deepspeed's column is
``from_dict`` and ``validate``, which count elements.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np

from shardweave.dialects.affine import layout, map_of, read, write
from shardweave.dialects.deepspeed import AutoTP, weight_layout
from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, along, take, whole
from shardweave.layout.affine import AffineMap
from shardweave.plan import plan

COLUMNS = ("read", "write", "layout", "plan", "peer reads", "peer plans")


def interleaved(blocks: int, tp: int, seed: int, rows: int = 6) -> Layout:
    """Blocks in random order, the same number on each rank."""
    ids = np.random.default_rng(seed).permutation(blocks).tolist()
    tensor, mesh, each = Tensor("w", (blocks * rows, 4), "float32"), Mesh((("tp", tp),)), blocks // tp
    held = along(mesh, "tp", lambda r: take(whole(blocks * rows), ids[r * each : (r + 1) * each], rows))
    return Layout(f"tp{tp}", mesh, (BufferRule("w", (Part(tensor),), (held, whole(4))),))


def best(run: Callable[[], Any], rounds: int) -> float:
    """Milliseconds of the quickest of several rounds."""
    seconds = math.inf
    for _ in range(rounds):
        start = time.process_time()
        run()
        seconds = min(seconds, time.process_time() - start)
    return seconds * 1e3


def measure(blocks: int, rounds: int, *, peer: bool) -> dict[str, float]:
    """One row of the table."""
    src, dst = interleaved(blocks, 4, 1), interleaved(blocks, 2, 2)
    maps = [{"w": map_of(each, each.tensors[0])} for each in (src, dst)]
    documents = [write(each) for each in maps]
    made = layout(read(documents[0]), dtype="float32")
    assert made.rules == src.rules
    row = {
        "read": best(lambda: read(documents[0]), rounds),
        "write": best(lambda: write(maps[0]), rounds),
        "layout": best(lambda: layout(maps[0], dtype="float32"), rounds),
        "plan": best(lambda: plan(made, dst), rounds),
    }
    if peer:
        from deepspeed.checkpoint.affine import ParamAffineMap
        from deepspeed.checkpoint.affine_transfer import plan_transfer

        theirs = [ParamAffineMap.from_dict(each["params"]["^w$"]) for each in documents]
        row["peer reads"] = best(lambda: ParamAffineMap.from_dict(documents[0]["params"]["^w$"]), rounds)
        row["peer plans"] = best(lambda: plan_transfer(theirs[1], theirs[0]), 1 if blocks > 64 else rounds)
    return row


def exponent(rows: dict[int, dict[str, float]], name: str) -> str:
    """The power of the number of blocks that a column grows with, by least squares, without the smallest."""
    known = [(math.log(n), math.log(max(row[name], 1e-6))) for n, row in sorted(rows.items()) if name in row]
    known = known[1:] if len(known) > 3 else known
    if len(known) < 2:
        return "-"
    return f"{np.polyfit(*zip(*known, strict=True), 1)[0]:.2f}"


def checkpoint(layers: int, tp: int) -> dict[str, AffineMap]:
    """The maps of a dense model as AutoTP cuts it."""
    model, mesh = AutoTP(tp, num_heads=64, num_kv_heads=8, hidden=8192), Mesh((("tp", tp),))
    kinds: dict[str, tuple[str, tuple[int, ...], int]] = {
        "q_proj": ("column", (8192, 8192), 0),
        "k_proj": ("column", (1024, 8192), 0),
        "v_proj": ("column", (1024, 8192), 0),
        "qkv_proj": ("phi3", (10240, 8192), 0),
        "o_proj": ("row", (8192, 8192), 1),
        "gate_up_proj": ("gate_up", (57344, 8192), 0),
        "down_proj": ("row", (8192, 28672), 1),
        "norm_1": ("", (8192,), 0),
        "norm_2": ("", (8192,), 0),
    }
    maps = {}
    for name, (kind, shape, dim) in kinds.items():
        tensor = Tensor(name, shape, "float32")
        given = Layout("whole", mesh, (BufferRule(name, (Part(tensor),), tensor.dims),))
        if kind:
            given = weight_layout(kind, tensor, mesh, model, dim=dim)
        maps[name] = map_of(given, tensor)
    return {f"layers.{i}.{name}.weight": found for i in range(layers) for name, found in maps.items()}


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="64 and 128 blocks, 2 layers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", default="64,256", help="counts of blocks at which deepspeed is asked")
    parser.add_argument("--no-peer", action="store_true")
    options = parser.parse_args(argv)
    installed = not options.no_peer and importlib.util.find_spec("deepspeed") is not None
    asked = {int(n) for n in options.peer.split(",") if n} if installed else set()
    counts = (64, 128) if options.tiny else (64, 256, 512, 1024, 2048, 4096)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one thread; ms")
    print(f"{'blocks':>8}" + "".join(f"{name:>12}" for name in COLUMNS) + f"{'their plan over ours':>22}")
    rows: dict[int, dict[str, float]] = {}
    for count in counts:
        row = rows[count] = measure(count, options.repeats, peer=count in asked)
        told = "".join(f"{row[name]:12.2f}" if name in row else f"{'-':>12}" for name in COLUMNS)
        ratio = f"{row['peer plans'] / row['plan']:22.0f}" if "peer plans" in row else f"{'-':>22}"
        print(f"{count:>8}{told}{ratio}", flush=True)
    print(f"{'exponent':>8}" + "".join(f"{exponent(rows, name):>12}" for name in COLUMNS))

    maps = checkpoint(2 if options.tiny else 80, 8)
    document = write(maps)
    ours = best(lambda: read(document), options.repeats)
    theirs = "-"
    if installed:
        from deepspeed.checkpoint.affine import ParamAffineMap

        def validate() -> None:
            for entry in document["params"].values():
                ParamAffineMap.from_dict(entry).validate()

        theirs = f"{best(validate, options.repeats):.1f}"
    size = len(json.dumps(document)) / 1e6
    print(f"checkpoint of {len(maps)} weights, {size:.2f} MB: read {ours:.1f} ms, deepspeed {theirs} ms")


if __name__ == "__main__":
    main(sys.argv[1:])
