"""How long a conversion with the optimizer's state takes, beside a plain copy and beside DeepSpeed's own.

    python benchmarks/universal.py            1 GiB of masters and moments, four directions
    python benchmarks/universal.py --tiny     a few MiB, some seconds
    python benchmarks/universal.py --only "ZeRO-1 TP4 DP2 to universal" --runs 5

A llama of 89 M parameters: float32 masters and two moments of each, rounded weights beside them where
the format has both. The peer is ``ds_to_universal`` of DeepSpeed, with one worker and with two; the other
directions have none. What it wrote is compared with what shardweave wrote, tensor by tensor and bit by bit,
after the clocks.

All sides take turns and read from a warm page cache; all fsync what they wrote, or none does. Imports are
not counted. Seconds are of the wall, CPU those of all processes of a side; ratios are of the best of the
runs, and of medians. Memory is the peak of a process above what it had after its imports, of the largest
where there are several. ``read`` and ``written`` are bytes through system calls over bytes of the source.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np

from shardweave.convert import Geometry, Zero, convert, prepare
from shardweave.dialects import hf
from shardweave.models import from_config
from shardweave.store import universal_write
from shardweave.store.manifest import TensorSpec
from shardweave.store.optimizer import OptimizerRecord

LARGE: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 2816, "vocab_size": 16384,
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 176, "vocab_size": 1000,
}  # fmt: skip
STATES = ("exp_avg", "exp_avg_sq")
SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8}
OURS, COPY = "shardweave", "cp -r"


@dataclass(frozen=True)
class Direction:
    """A conversion: the source's name, what is asked for, and whether DeepSpeed has a converter for it."""

    title: str
    source: str
    wanted: dict[str, Any]
    peer: bool = False


SOURCES: dict[str, dict[str, Any]] = {
    "zero1": {"to": "deepspeed", "zero": Zero(stage=1, dp=2, tp=4), "dtype": "bfloat16"},
    "zero2": {"to": "deepspeed", "zero": Zero(stage=2, dp=2), "dtype": "bfloat16"},
    "megatron": {"to": "megatron", "geometry": Geometry(tp=4), "dtype": "bfloat16"},
}
"""How each source is made from ``universal``; DeepSpeed and Megatron leave the same layout."""
DIRECTIONS = (
    Direction("ZeRO-1 TP4 DP2 to universal", "zero1", {"to": "universal"}, peer=True),
    Direction(
        "universal to ZeRO-3 DP8",
        "universal",
        {"to": "deepspeed", "zero": Zero(stage=3, dp=8, dtype="bfloat16")},
    ),
    Direction("ZeRO-2 DP2 to DCP", "zero2", {"to": "dcp"}),
    Direction("Megatron TP4 to DCP", "megatron", {"to": "dcp"}),
)


# --- sources ------------------------------------------------------------------------------------


def make(folder: Path, sizes: dict[str, Any]) -> None:
    """A universal checkpoint of random numbers: the peer compares replicas by value, so none is NaN."""
    config = {"model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": False, **sizes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    arrays = hf.layout(from_config(config)).arrays(0)
    specs = []
    for name, (buffer, _) in arrays.items():
        keys = [name, *(f"optim/{name}/{state}" for state in STATES)]
        specs += [TensorSpec(key, "float32", buffer.shape) for key in keys]
    flat = [name for name, (buffer, _) in arrays.items() if len(buffer.shape) == 1]
    groups = (
        {"params": [name for name in arrays if name not in flat], **SETTINGS, "weight_decay": 0.1},
        {"params": flat, **SETTINGS, "weight_decay": 0.0},
    )
    records = {"optimizer": OptimizerRecord(dict.fromkeys(arrays, 1000), groups)}
    manifest = universal_write.allocate(folder, specs, records=records)
    chance = np.random.default_rng(0)
    for tensor in manifest.tensors.values():
        (extent,) = tensor.extents
        with (folder / extent.file).open("r+b") as file:
            file.seek(extent.start)
            file.write(chance.standard_normal(math.prod(tensor.shape), np.float32).tobytes())
    universal_write.finish(manifest, fsync=False)


def made(work: Path, name: str, sizes: dict[str, Any]) -> Path:
    """The source of a name, made when it is first asked for."""
    if not (work / "universal").exists():
        make(work / "universal", sizes)
    if not (work / name).exists():
        job = prepare(work / "universal", **SOURCES[name])
        convert(job, work / name, digests=False, fsync=False)
    return work / name


# --- what is measured, each in a process of its own -----------------------------------------------


def shardweave_(src: Path, dst: Path, title: str, memory_bytes: int, fsync: bool) -> Callable[[], None]:
    import torch  # noqa: F401 - its memory is not the conversion's

    direction = next(each for each in DIRECTIONS if each.title == title)

    def run() -> None:
        convert(prepare(src, **direction.wanted), dst, memory_bytes=memory_bytes, fsync=fsync)

    return run


def deepspeed_(src: Path, dst: Path, workers: int, fsync: bool, *options: str) -> Callable[[], None]:
    from deepspeed.checkpoint.ds_to_universal import main, parse_arguments

    tag = (src / "latest").read_text().strip()
    places = ["--input_folder", str(src / tag), "--output_folder", str(dst)]
    counts = ["--num_extract_workers", str(workers), "--num_merge_workers", str(workers)]
    sys.argv = ["ds_to_universal", *places, *counts, *options]

    def run() -> None:
        main(parse_arguments())
        if fsync:
            sync(dst)

    return run


def child(args: argparse.Namespace) -> None:
    """Run one side; print what it took beyond the imports."""
    way, src, dst, title = args.child
    if way == OURS:
        run = shardweave_(Path(src), Path(dst), title, args.memory_mib << 20, args.fsync)
    else:
        workers = int(way.split()[1])
        run = deepspeed_(Path(src), Path(dst), workers, args.fsync)
    base, before, used = _status("VmRSS"), _io(), _cpu()
    start = time.perf_counter()
    run()
    seconds, used, after = time.perf_counter() - start, _cpu() - used, _io()
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    peak = max(_status("VmHWM"), of_children) - base
    print(json.dumps([seconds, used, peak, *(after[k] - before[k] for k in ("rchar", "wchar"))]))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _io() -> dict[str, int]:
    """Of this process and of those that it waited for."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


# --- the comparison -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One turn of a side: seconds of the wall and of processors, peak memory, bytes read and written."""

    seconds: float
    cpu_s: float
    peak_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


def measure(way: str, src: Path, dst: Path, title: str, args: argparse.Namespace) -> Run:
    """What one side took, in a fresh process."""
    shutil.rmtree(dst, ignore_errors=True)
    command = [sys.executable, __file__, "--memory-mib", str(args.memory_mib), *["--fsync"] * args.fsync]
    done = subprocess.run(
        [*command, "--child", way, str(src), str(dst), title], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr.strip()[-2000:]}")
    return Run(*json.loads(done.stdout.splitlines()[-1]))


def copy(src: Path, dst: Path, fsync: bool) -> Run:
    shutil.rmtree(dst, ignore_errors=True)
    used, start = _cpu(), time.perf_counter()
    subprocess.run(["cp", "-r", str(src), str(dst)], check=True)
    if fsync:
        sync(dst)
    return Run(time.perf_counter() - start, _cpu() - used)


def files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def compare(direction: Direction, src: Path, work: Path, args: argparse.Namespace) -> None:
    """Every side in turn; prints the table, and compares what they wrote."""
    for path in files_in(src):
        path.read_bytes()
    out, size = work / "out", sum(path.stat().st_size for path in files_in(src))
    peers = [f"ds_to_universal {n}" for n in (1, 2)] if direction.peer and not args.no_peer else []
    runs: dict[str, list[Run]] = {way: [] for way in (COPY, OURS, *peers)}
    for _ in range(args.runs):
        for way, mine in runs.items():
            if way == COPY:
                mine.append(copy(src, out, args.fsync))
            else:
                mine.append(measure(way, src, out, direction.title, args))
            if way == OURS:
                files = sum(1 for _ in files_in(out))
                if peers:
                    shutil.rmtree(work / "ours", ignore_errors=True)
                    out.rename(work / "ours")
    print(f"\n{direction.title}, {size / 2**20:.0f} MiB in {sum(1 for _ in files_in(src))} files")
    heads = ("best s", "median s", "of cp -r", "median", "CPU s", "peak MiB", "read", "written")
    print(f"{'':18}" + "".join(f"{head:>10}" for head in heads))
    base = min(run.seconds for run in runs[COPY])
    middle = statistics.median(run.seconds for run in runs[COPY])
    for way, mine in runs.items():
        best, median = (f(run.seconds for run in mine) for f in (min, statistics.median))
        line = f"{way:18}{best:10.3f}{median:10.3f}{best / base:10.2f}{median / middle:10.2f}"
        line += f"{min(run.cpu_s for run in mine):10.2f}"
        if way != COPY:
            line += f"{max(run.peak_bytes for run in mine) / 2**20:10.0f}"
            line += "".join(
                f"{max(getattr(run, which) for run in mine) / size:10.3f}"
                for which in ("read_bytes", "written_bytes")
            )
        print(line)
    print(f"files made: shardweave {files}", end="")
    if peers:
        done = subprocess.run(
            [sys.executable, __file__, "--keep", str(src), str(out)], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        made_by_peer = list(files_in(out))
        temporary = [path for path in made_by_peer if "tmp" in path.relative_to(out).parts]
        print(f", ds_to_universal {len(made_by_peer)}, of them {len(temporary)} temporary", end="")
        print(f"; {same(work / 'ours', out)} tensors, equal to the bit", end="")
        shutil.rmtree(work / "ours")
    print()
    shutil.rmtree(out, ignore_errors=True)


def same(ours: Path, theirs: Path) -> int:
    """Compare what two converters wrote of each weight; returns how many tensors there were.

    Raises:
        SystemExit: One has another tensor, or other bits.
    """
    import torch

    def tensor(path: Path) -> torch.Tensor:
        found = torch.load(path, weights_only=False)
        return found["param"] if isinstance(found, dict) else torch.as_tensor(found)

    (zero,) = (path for path in ours.rglob("zero") if path.is_dir())
    names = sorted(str(path.relative_to(zero)) for path in zero.glob("*/*.pt"))
    peers = sorted(str(path.relative_to(theirs / "zero")) for path in (theirs / "zero").glob("*/*.pt"))
    if names != peers:
        raise SystemExit(f"not the same files: {sorted(set(names) ^ set(peers))[:5]}")
    for name in names:
        a, b = tensor(zero / name), tensor(theirs / "zero" / name)
        words = {8: torch.int64, 4: torch.int32}[a.element_size()]
        if a.dtype != b.dtype or not torch.equal(a.view(words), b.view(words)):
            raise SystemExit(f"{name} differs: {a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)}")
    return len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description="Conversions with optimizer state beside a plain copy.")
    parser.add_argument("--tiny", action="store_true", help="a few MiB instead of about 1 GiB")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--fsync", action="store_true", help="wait for the disk, on all sides")
    parser.add_argument("--no-peer", action="store_true", help="leave DeepSpeed out")
    parser.add_argument("--memory-mib", type=int, default=128, help="what buffers of shardweave may take")
    parser.add_argument("--only", action="append", choices=[each.title for each in DIRECTIONS])
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--keep", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
    elif args.keep:
        deepspeed_(*args.keep, 1, False, "--keep_temp_folder")()
    else:
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            for direction in DIRECTIONS:
                if args.only is None or direction.title in args.only:
                    src = made(Path(name), direction.source, TINY if args.tiny else LARGE)
                    compare(direction, src, Path(name), args)


if __name__ == "__main__":
    main()
