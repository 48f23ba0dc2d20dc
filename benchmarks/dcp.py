"""How long a save and a load take beside those of torch.distributed.checkpoint, of the same bytes.

    python benchmarks/dcp.py             about 1 GB of bf16, on one process and on two
    python benchmarks/dcp.py --tiny      a few MB, for tests

Both sides save tensors cut by rows over their ranks, load them as they were cut, and load them cut by
columns. They take turns in the same processes; both wait for the disk when they save, or with ``--no-fsync``
neither does; both load from a warm page cache. Seconds are those of the slowest rank, those of processors the
sum of all ranks, and ratios are of the best runs. Every byte that was loaded is compared with what was saved,
after the clock.

shardweave computes a digest of every box that it saves, and compares it when it loads a box whole: in the row
``no digests`` it loads without. torch computes a CRC-32 when it saves and compares nothing.

Memory is the peak of a rank above what it had before, the state itself excepted; ``read`` and ``written`` are
bytes through system calls over bytes of state.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

SHAPES = {"full": ((4096, 4096), 30), "tiny": ((96, 128), 30)}
STEP, LIMIT_S, COLUMNS = 7, 3600, "load by columns"
Tensors = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What is saved: ``count`` tensors of ``shape``."""

    shape: tuple[int, int]
    count: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.count * 2

    def names(self) -> list[str]:
        return [f"model.layers.{i}.mlp.up_proj.weight" for i in range(self.count)]


# --- a rank -------------------------------------------------------------------------------------


class Rank:
    """One of the processes, and what it holds."""

    def __init__(self, rank: int, size: int, meeting: str, sizes: Sizes) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.rank, self.size, self.sizes = rank, size, sizes
        if size > 1:
            dist.init_process_group("gloo", store=dist.FileStore(meeting, size), rank=rank, world_size=size)

    def barrier(self) -> None:
        import torch.distributed as dist

        if self.size > 1:
            dist.barrier()

    def local(self, dim: int, *, filled: bool) -> Tensors:
        """This rank's part of every tensor, with values that differ everywhere or with none that is right."""
        import torch

        rows, columns = self.sizes.shape
        shape = [rows, columns]
        shape[dim] //= self.size
        first = shape[dim] * self.rank
        low = (first, 0) if dim == 0 else (0, first)
        found = {}
        for i, name in enumerate(self.sizes.names()):
            words = torch.full(shape, -1, dtype=torch.int16)
            if filled:
                at = torch.arange(low[0], low[0] + shape[0])[:, None] * 31 + i
                words = ((at + torch.arange(low[1], low[1] + shape[1])) % 16001).to(torch.int16)
            found[name] = words.view(torch.bfloat16)
        return found

    def check(self, dim: int, found: Tensors) -> None:
        import torch

        wanted = self.local(dim, filled=True)
        for name, values in wanted.items():
            if not torch.equal(found[name].view(torch.int16), values.view(torch.int16)):
                raise SystemExit(f"rank {self.rank}: {name} is not what was saved")


def dtensors(rank: Rank, held: Tensors, dim: int) -> Tensors:
    if rank.size == 1:
        return held
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (rank.size,))
    return {name: DTensor.from_local(values, mesh, [Shard(dim)]) for name, values in held.items()}


def torch_save(rank: Rank, held: Tensors, dim: int, folder: Path, fsync: bool) -> Callable[[], None]:
    import torch.distributed.checkpoint as dcp

    state = dtensors(rank, held, dim)
    writer = dcp.FileSystemWriter(folder, sync_files=fsync)
    return lambda: dcp.save(state, storage_writer=writer, no_dist=rank.size == 1) and None


def torch_load(rank: Rank, held: Tensors, dim: int, folder: Path, fsync: bool) -> Callable[[], None]:
    import torch.distributed.checkpoint as dcp

    state = dtensors(rank, held, dim)
    return lambda: dcp.load(state, checkpoint_id=folder, no_dist=rank.size == 1)


def layout_of(rank: Rank, dim: int) -> Any:
    from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, along, even, whole

    mesh = Mesh((("dp", rank.size),))
    rules = []
    for name in rank.sizes.names():
        tensor = Tensor(name, rank.sizes.shape, "bfloat16")
        dims = [whole(n) if d != dim else along(mesh, "dp", lambda r, n=n: even(whole(n), rank.size, r))
                for d, n in enumerate(rank.sizes.shape)]  # fmt: skip
        rules.append(BufferRule(name, (Part(tensor),), tuple(dims)))
    return Layout("dp", mesh, tuple(rules))


def own_save(rank: Rank, held: Tensors, dim: int, folder: Path, fsync: bool) -> Callable[[], None]:
    from torch.distributed import FileStore

    from shardweave.store.native_agree import alone
    from shardweave.store.native_manifest import About
    from shardweave.train.checkpoint import saver, through_store, weights_of

    layout = layout_of(rank, dim)
    exchange = alone
    if rank.size > 1:
        store = FileStore(str(folder.parent / "exchange"), rank.size)
        exchange = through_store(store, rank=rank.rank, size=rank.size, timeout_s=300)
    one = saver(folder, rank=rank.rank, exchange=exchange, fsync=fsync)
    return lambda: one.save(weights_of(layout, rank.rank, held), About(step=STEP)) and None


def own_load(
    rank: Rank, held: Tensors, dim: int, folder: Path, fsync: bool, verify: bool = True
) -> Callable[[], None]:
    from shardweave.train.checkpoint import load_weights

    layout = layout_of(rank, dim)
    return lambda: load_weights(folder, layout=layout, rank=rank.rank, arrays=held, verify=verify) and None


def own_load_unverified(rank: Rank, held: Tensors, dim: int, folder: Path, fsync: bool) -> Callable[[], None]:
    return own_load(rank, held, dim, folder, fsync, verify=False)


@dataclass(frozen=True)
class Job:
    """One thing to do: by whom, and how the tensors are cut."""

    way: Callable[[Rank, Tensors, int, Path, bool], Callable[[], None]]
    dim: int
    saves: bool


JOBS: Mapping[str, Mapping[str, Job]] = {
    "save": {"torch": Job(torch_save, 0, True), "shardweave": Job(own_save, 0, True)},
    "load": {
        "torch": Job(torch_load, 0, False),
        "shardweave": Job(own_load, 0, False),
        "no digests": Job(own_load_unverified, 0, False),
    },
    COLUMNS: {
        "torch": Job(torch_load, 1, False),
        "shardweave": Job(own_load, 1, False),
    },
}


def rank_main(args: argparse.Namespace) -> None:
    """All jobs in turn on one rank; print what each took."""
    rank, size, work = int(args.child[0]), int(args.child[1]), Path(args.child[2])
    me = Rank(rank, size, str(work / "meeting"), Sizes(*SHAPES["tiny" if args.tiny else "full"]))
    for turn in range(args.runs):
        for what, ways in JOBS.items():
            if size == 1 and what == COLUMNS:
                continue
            # Who is first in one turn is last in the next.
            for who in sorted(ways, reverse=bool(turn % 2)):
                took = measure(me, ways[who], work / ("torch" if who == "torch" else "shardweave"), args)
                print(json.dumps([what, who, *took]), flush=True)


def measure(me: Rank, job: Job, folder: Path, args: argparse.Namespace) -> list[float]:
    """Seconds, processor seconds, peak memory, bytes read and written by this rank."""
    me.barrier()
    if me.rank == 0:
        if job.saves:
            shutil.rmtree(folder, ignore_errors=True)
        (folder.parent / "exchange").unlink(missing_ok=True)
    me.barrier()
    held = me.local(job.dim, filled=job.saves)
    work = job.way(me, held, job.dim, folder, not args.no_fsync)
    gc.collect()
    me.barrier()
    base, before, cpu = _reset_peak(), _io(), time.process_time()
    start = time.perf_counter()
    work()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak, after = _status("VmHWM") - base, _io()
    if not job.saves:
        me.check(job.dim, held)
    return [seconds, cpu, peak, after["rchar"] - before["rchar"], after["wchar"] - before["wchar"]]


def _reset_peak() -> int:
    """Let the peak of this process begin anew; what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


# --- the comparison -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one run of all ranks took: the slowest, the largest, and sums."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    read_bytes: int
    written_bytes: int


def compare(size: int, work: Path, args: argparse.Namespace) -> dict[tuple[str, str], list[Run]]:
    """All jobs on so many processes, which do them together."""
    flags = ["--tiny"] * args.tiny + ["--no-fsync"] * args.no_fsync + ["--runs", str(args.runs)]
    command = [sys.executable, __file__, *flags, "--child"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(work)], stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT_S)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(1)
    found: dict[tuple[str, str], list[Run]] = {}
    for lines in zip(*said, strict=True):
        (what, who, *_), *_ = rows = [json.loads(line) for line in lines]
        seconds, cpu, peaks, read, written = zip(*(row[2:] for row in rows), strict=True)
        one = Run(max(seconds), sum(cpu), max(peaks), sum(read), sum(written))
        found.setdefault((what, who), []).append(one)
    return found


def show(size: int, found: Mapping[tuple[str, str], list[Run]], work: Path, needed: int) -> None:
    ranks = "one process" if size == 1 else f"{size} ranks"
    print(f"\n{ranks}, {needed / 1e6:.0f} MB of state")
    heads = ("best s", "median s", "of torch", "cpu s", "of torch", "peak MiB", "read", "written")
    print(f"{'':30}" + "".join(f"{head:>10}" for head in heads))
    for what, ways in JOBS.items():
        if (what, "torch") not in found:
            continue
        for who in ways:
            runs, theirs = found[what, who], found[what, "torch"]
            best, base = (min(run.seconds for run in some) for some in (runs, theirs))
            cpu, cpu_base = (min(run.cpu_seconds for run in some) for some in (runs, theirs))
            line = f"{f'{what}, {who}':30}{best:10.3f}{statistics.median(r.seconds for r in runs):10.3f}"
            line += f"{best / base:10.2f}{cpu:10.3f}{cpu / cpu_base:10.2f}"
            line += f"{max(run.peak_bytes for run in runs) / 2**20:10.0f}"
            line += f"{max(r.read_bytes for r in runs) / needed:10.3f}"
            print(line + f"{max(r.written_bytes for r in runs) / needed:10.4f}")
    for who in ("torch", "shardweave"):
        files = [path for path in (work / who).rglob("*") if path.is_file()]
        num_bytes = sum(path.stat().st_size for path in files)
        print(f"{f'on disk, {who}':30}{len(files):4d} files, {num_bytes / needed:.4f} of the state")


def main() -> None:
    parser = argparse.ArgumentParser(description="Saves and loads beside torch.distributed.checkpoint.")
    parser.add_argument("--tiny", action="store_true", help="a few MB instead of about 1 GB")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], metavar="N", help="how many, in turn")
    parser.add_argument("--no-fsync", action="store_true", help="do not wait for the disk, on either side")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        rank_main(args)
        return
    needed = Sizes(*SHAPES["tiny" if args.tiny else "full"]).num_bytes
    for size in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            found = compare(size, Path(name), args)
            show(size, found, Path(name), needed)


if __name__ == "__main__":
    main()
