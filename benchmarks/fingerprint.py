"""How fast content is fingerprinted, beside a copy of the same bytes and xxh3.

    python benchmarks/fingerprint.py               256 MiB of each kind, one thread
    python benchmarks/fingerprint.py --threads 2   wall time, with two threads for torch's copies
    python benchmarks/fingerprint.py --tiny        1 MiB, a second in all

The best of several rounds, each of which runs every line once, so that a busy machine troubles all alike: in
processor time (in wall time with several threads), over a copy of all, or of the same part where that is
measured too. Three lines say what can be had: reading the bytes, and the sums of rows alone, in memory and
over a part that stays in the cache. xxh3 sees the same changes, and does not add up over boxes: a part that
was read cannot be checked against a whole.

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

from shardweave.layout import Box, BufferRule, Layout, Mesh, Part, Tensor, along, even, exact_sums, whole
from shardweave.layout.exact_sums import row_sums
from shardweave.layout.fingerprint import SEGMENT, fingerprint, places
from shardweave.move import schedule
from shardweave.plan import plan
from shardweave.refit import verify

Run = Callable[[], object]
COPY = "torch copy_"


def seconds(runs: dict[str, Run], *, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """What each takes in its fastest round."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = clock()
            run()
            best[name] = min(best[name], max(clock() - start, 1e-9))
    return best


def in_numpy(words: torch.Tensor) -> None:
    """The reference, which is what there is where numba is not installed."""
    loaded, exact_sums._loaded = exact_sums._loaded, lambda: None
    try:
        fingerprint(words)
    finally:
        exact_sums._loaded = loaded


def cases(words: torch.Tensor, columns: int) -> dict[str, Run]:
    """What is measured, by name. Where there is ``copy_`` of a name too, the two are compared."""
    target = torch.empty_like(words)
    numbers = places(0)
    segments = words.view(torch.int32).view(-1, SEGMENT).numpy()
    blocks, cached = (np.split(segments, range(step, len(segments), step)) for step in (4096, 64))
    found: dict[str, Run] = {
        COPY: lambda: target.copy_(words),
        "np.copyto": lambda: np.copyto(target.numpy(), words.numpy()),
        "xxh3_128": lambda: xxhash.xxh3_128_digest(words.numpy()),
        "reading": words.sum,
        "the sums": lambda: [row_sums(block, numbers) for block in blocks],
        "the sums in cache": lambda: [row_sums(cached[0], numbers) for _ in cached],
    }
    for size, dtype in ((1, torch.uint8), (2, torch.int16), (4, torch.int32), (8, torch.int64)):
        rows = words.view(dtype).view(-1, columns)
        found[f"{size}-byte elements"] = lambda rows=rows: fingerprint(rows)
    halves = words.view(torch.int16)
    matrix, copied = halves.view(-1, columns), target.view(torch.int16).view(-1, columns)
    found["one row"] = lambda: fingerprint(halves)
    for length in (2048, 1024, 512, 128):
        found[f"rows of {length} B"] = lambda length=length: fingerprint(halves.view(-1, length // 2))
    for name, first, last in (
        ("half the columns", 0, columns // 2),
        ("a quarter of them", 0, columns // 4),
        ("odd columns", 1, columns - 1),
    ):
        box = Box.of((0, first), (len(matrix), last - first))
        part, place = matrix[:, first:last], copied[:, first:last]
        found[name] = lambda part=part, box=box: fingerprint(part, box)
        found[f"copy_ {name}"] = lambda part=part, place=place: place.copy_(part)
    found["transposed"] = lambda: fingerprint(matrix.t())
    found["copy_ transposed"] = lambda: copied.view(columns, -1).copy_(matrix.t())
    found["without numba"] = lambda: in_numpy(matrix)
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
    took = seconds({"sums": run}, rounds=rounds, clock=time.process_time)["sums"]
    return len(copies), took / len(copies) * 1e6


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
    print(f"{'what':26} {'ms':>6} {'time over a copy':>16}")
    found = seconds(cases(words, 4096), rounds=options.repeats, clock=clock)
    for name, took in found.items():
        copy = found.get(f"copy_ {name}", found[COPY])
        print(f"{name:26} {took * 1e3:6.2f} {took / copy:16.2f}", flush=True)
    copies, microseconds = small_copies(8 if options.tiny else 128, rounds=options.repeats)
    print(f"verify.sums of {copies} copies of 256 B: {microseconds:.1f} us a copy")


if __name__ == "__main__":
    main(sys.argv[1:])
