"""How fast content is fingerprinted, beside a copy of the same bytes and xxh3.

    python benchmarks/fingerprint.py            256 MiB of each kind
    python benchmarks/fingerprint.py --tiny     1 MiB, a second in all

One thread, the best of several runs, in bytes of content a second of processor time. xxh3 sees the same
changes, and does not add up over boxes: a part that was read cannot be checked against a whole.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardweave.layout import Box
from shardweave.layout.fingerprint import fingerprint


def rate(run: Callable[[], object], num_bytes: int, *, repeats: int) -> float:
    """Gigabytes a second of processor time, of the fastest run."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return num_bytes / best / 1e9


def cases(words: NDArray[np.uint64], columns: int) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    target = np.empty_like(words)
    found: dict[str, Callable[[], object]] = {
        "np.copyto": lambda: np.copyto(target, words),
        "xxh3_128": lambda: xxhash.xxh3_128_digest(words),
    }
    for size in (1, 2, 4, 8):
        rows = words.view(f"u{size}").reshape(-1, columns)
        found[f"{size}-byte words"] = lambda rows=rows: fingerprint(rows)
    halves = words.view(np.uint16).reshape(-1, columns)
    found["2-byte words, one row"] = lambda: fingerprint(halves.reshape(-1))
    found["2-byte words, rows of 128"] = lambda: fingerprint(halves.reshape(-1, 128))
    found["2-byte words, transposed"] = lambda: fingerprint(halves.T)
    shifted = Box.of((0, 1), (len(halves), columns - 2))
    found["2-byte words, odd columns"] = lambda: fingerprint(halves[:, 1:-1], shifted)
    return found


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="1 MiB")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    num_bytes = 1 << (20 if options.tiny else 28)
    words = np.random.default_rng(0).integers(0, 1 << 63, num_bytes // 8, dtype=np.uint64)
    machine = platform.processor() or platform.machine()
    print(
        f"{machine}, Python {platform.python_version()}, numpy {np.__version__}; "
        f"{num_bytes >> 20} MiB in rows of 4096 words, one thread, best of {options.repeats}"
    )
    print(f"{'what':26} {'GB/s':>6} {'time over a copy':>16}")
    copy = None
    for name, run in cases(words, 4096).items():
        found = rate(run, num_bytes, repeats=options.repeats)
        copy = copy or found
        print(f"{name:26} {found:6.2f} {copy / found:16.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
