"""How fast content is fingerprinted, beside a copy of the same bytes and xxh3.

    python benchmarks/fingerprint.py               256 MiB of each kind, one thread
    python benchmarks/fingerprint.py --threads 2   wall time on two
    python benchmarks/fingerprint.py --tiny        1 MiB, a second in all

The best of several rounds, each of which runs every line once, so that a busy machine troubles all alike: in
bytes of content a second of processor time (of wall time with several threads). Four lines say what can be
had: reading the bytes, the integer product alone over them, with a quarter of the lanes, and over a part that
stays in the cache. xxh3
sees the same changes, and does not add up over boxes: a part that was read cannot be checked against a whole.

Last, what ``verify.sums`` takes for thousands of small copies, beyond what their bytes take.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import numpy as np
import torch
import xxhash

from shardweave.layout import Box, BufferRule, Layout, Mesh, Part, Tensor, along, even, whole
from shardweave.layout import fingerprint as module
from shardweave.layout.fingerprint import LANES, SEGMENT, fingerprint, places
from shardweave.move import schedule
from shardweave.plan import plan
from shardweave.refit import verify

Run = Callable[[], object]


def rates(
    runs: dict[str, Run], num_bytes: int, *, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Gigabytes a second of each, in its fastest round."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = clock()
            run()
            best[name] = min(best[name], clock() - start)
    return {name: num_bytes / max(seconds, 1e-9) / 1e9 for name, seconds in best.items()}


def in_numpy(words: torch.Tensor) -> None:
    """The reference, which is what there is where torch is not loaded."""
    exact = module._is_exact
    module._is_exact = lambda torch: False
    try:
        fingerprint(words)
    finally:
        module._is_exact = exact


def cases(words: torch.Tensor, columns: int) -> dict[str, Run]:
    """What is measured, by name. The first is what the others are compared with."""
    target = torch.empty_like(words)
    numbers = torch.from_numpy(places(0))
    blocks = words.view(torch.int8).view(-1, SEGMENT).split(256)
    sums = torch.empty((256, LANES), dtype=torch.int32)
    few, few_sums = numbers[:, :4].contiguous(), torch.empty((256, 4), dtype=torch.int32)
    found: dict[str, Run] = {
        "torch copy_": lambda: target.copy_(words),
        "np.copyto": lambda: np.copyto(target.numpy(), words.numpy()),
        "xxh3_128": lambda: xxhash.xxh3_128_digest(words.numpy()),
        "reading": words.sum,
        "the product": lambda: [torch._int_mm(block, numbers, out=sums) for block in blocks],
        "the product, 4 lanes": lambda: [torch._int_mm(block, few, out=few_sums) for block in blocks],
        "the product in cache": lambda: [torch._int_mm(blocks[0], numbers, out=sums) for _ in blocks],
    }
    for size, dtype in ((1, torch.uint8), (2, torch.int16), (4, torch.int32), (8, torch.int64)):
        rows = words.view(dtype).view(-1, columns)
        found[f"{size}-byte words"] = lambda rows=rows: fingerprint(rows)
    halves = words.view(torch.int16)
    matrix = halves.view(-1, columns)
    shifted = Box.of((0, 1), (len(matrix), columns - 2))
    found["one row"] = lambda: fingerprint(halves)
    found["rows of 2 KiB"] = lambda: fingerprint(halves.view(-1, 1024))
    found["rows of 512 B"] = lambda: fingerprint(halves.view(-1, 256))
    found["rows of 128 B"] = lambda: fingerprint(halves.view(-1, 64))
    found["odd columns"] = lambda: fingerprint(matrix[:, 1:-1], shifted)
    found["transposed"] = lambda: fingerprint(matrix.t())
    found["copy_ transposed"] = lambda: target.view(torch.int16).view(columns, -1).copy_(matrix.t())
    found["without torch"] = lambda: in_numpy(matrix)
    return found


def small_copies(experts: int, *, rounds: int) -> tuple[int, float]:
    """How many copies one rank of a plan of experts has, and microseconds a copy that ``sums`` takes."""
    tensor = Tensor(
        "layers.{layer}.experts.{expert}.up",
        (16, 64),
        "bfloat16",
        (("layer", whole(40)), ("expert", whole(experts))),
    )
    layouts = []
    for name, ranks, dim in (("src", 2, 1), ("dst", 8, 2)):
        mesh, dims = Mesh((("ep", ranks),)), list(tensor.dims)
        dims[dim] = along(mesh, "ep", lambda r, dim=dim, ranks=ranks: even(tensor.dims[dim], ranks, r))
        layouts.append(Layout(name, mesh, (BufferRule(tensor.name, (Part(tensor),), tuple(dims), (2, 3)),)))
    steps = schedule(plan(*layouts), rank=0)
    held = layouts[0].arrays(0)
    arrays = {name: torch.zeros(buffer.shape, dtype=torch.bfloat16) for name, (buffer, _) in held.items()}
    copies = [
        copy for copy in (*steps.local, *(c for each in steps.rounds for c in each)) if not copy.src_rank
    ]
    run = functools.partial(verify.sums, steps, arrays, side="src")
    run()
    seconds = 1 / rates({"sums": run}, 1, rounds=rounds, clock=time.process_time)["sums"] / 1e9
    return len(copies), seconds / len(copies) * 1e6


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="1 MiB")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; wall time if several")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    num_bytes = 1 << (20 if options.tiny else 28)
    words = torch.from_numpy(
        np.random.default_rng(0).integers(-(1 << 63), 1 << 63, num_bytes // 8, dtype=np.int64)
    )
    clock = time.process_time if options.threads == 1 else time.perf_counter
    machine = platform.processor() or platform.machine()
    print(
        f"{machine}, Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}; "
        f"{num_bytes >> 20} MiB in rows of 4096 words, {options.threads} threads, "
        f"best of {options.repeats}"
    )
    print(f"{'what':26} {'GB/s':>6} {'time over a copy':>16}")
    found = rates(cases(words, 4096), num_bytes, rounds=options.repeats, clock=clock)
    copy = next(iter(found.values()))
    for name, rate in found.items():
        print(f"{name:26} {rate:6.2f} {copy / rate:16.2f}", flush=True)
    copies, microseconds = small_copies(8 if options.tiny else 128, rounds=options.repeats)
    print(f"verify.sums of {copies} copies of 256 B: {microseconds:.1f} us a copy")


if __name__ == "__main__":
    main(sys.argv[1:])
