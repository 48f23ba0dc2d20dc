"""How long a conversion takes beside a plain copy of the same bytes.

    python benchmarks/convert.py            1 GiB of bf16 weights, Megatron TP4 to Hugging Face and back
    python benchmarks/convert.py --tiny     a few MiB, a second or two in all

Each run of shardweave is followed by ``cp -r`` of its source; both fsync what they wrote, or neither
does, and both read from a warm page cache. The ratio is of the best of the runs; medians stand
beside it. Peers do what comes nearest: torch loads full tensors with ``dcp.load`` and writes them
with ``safetensors``, or reads those and writes them with ``dcp.save``, without unfusing a weight;
megatron-core loads the plain tensors and writes them with ``safetensors``.

Memory is the peak of a process above what it had after ``import torch, shardweave.convert``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from shardweave.convert import Geometry, convert, prepare
from shardweave.dialects import hf
from shardweave.models import from_config
from shardweave.store import safetensors
from shardweave.store.manifest import TensorSpec

LARGE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 32000,
}
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 352,
    "vocab_size": 1000,
}
TP4 = Geometry(tp=4)


@dataclass(frozen=True)
class Run:
    """One way of doing it, measured: seconds of each run, peak memory, and bytes through the system."""

    seconds: list[float]
    rss_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


def make(folder: Path, sizes: dict[str, Any]) -> None:
    """A Hugging Face folder of random bytes; no value is ever looked at."""
    config = {"model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": False, **sizes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    layout = hf.layout(from_config(config))
    specs = [TensorSpec(name, b.dtype, b.shape) for name, (b, _) in layout.arrays(0).items()]
    manifest = safetensors.allocate(folder, specs)
    rng = np.random.default_rng(0)
    for tensor in manifest.tensors.values():
        (extent,) = tensor.extents
        with (folder / extent.file).open("r+b") as file:
            file.seek(extent.start)
            file.write(rng.bytes(tensor.num_bytes))
    safetensors.finish(manifest, fsync=False)


# --- what is measured, each in a process of its own ------------------------------------------------


def shardweave_(src: Path, dst: Path, fsync: bool) -> None:
    if (src / "model.safetensors").exists():
        convert(prepare(src, to="megatron", geometry=TP4), dst, fsync=fsync)
    else:
        convert(prepare(src, to="hf"), dst, fsync=fsync)


def dcp(src: Path, dst: Path, fsync: bool) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    dst.mkdir()
    if (src / "model.safetensors").exists():
        writer = FileSystemWriter(dst, sync_files=fsync)
        save(load_file(src / "model.safetensors"), storage_writer=writer, no_dist=True)
        return
    entries = FileSystemReader(src).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, checkpoint_id=src, no_dist=True)
    save_file(tensors, dst / "model.safetensors")
    if fsync:
        sync(dst)


def megatron_core(src: Path, dst: Path, fsync: bool) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from safetensors.torch import save_file

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    dst.mkdir()
    dist.init_process_group("gloo", init_method=f"file://{dst}.store", rank=0, world_size=1)
    save_file(dist_checkpointing.load_plain_tensors(str(src)), dst / "model.safetensors")
    if fsync:
        sync(dst)


def sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


WAYS: dict[str, Callable[[Path, Path, bool], None]] = {
    "shardweave": shardweave_,
    "torch DCP": dcp,
    "megatron-core": megatron_core,
}


def child(way: str, src: Path, dst: Path, fsync: bool) -> None:
    """Run one way; print what it took beyond the imports."""
    import torch  # noqa: F401 - its memory is not the conversion's

    base, before = _status("VmRSS"), _io()
    start = time.perf_counter()
    WAYS[way](src, dst, fsync)
    seconds = time.perf_counter() - start
    after = _io()
    figures = [seconds, _status("VmHWM") - base, *(after[k] - before[k] for k in ("rchar", "wchar"))]
    print(json.dumps(figures))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


# --- the comparison -------------------------------------------------------------------------------


def measure(way: str, src: Path, work: Path, *, fsync: bool) -> list[float] | None:
    """Seconds, peak memory, bytes read and written by a fresh process; None where it fails."""
    dst = work / "out"
    shutil.rmtree(dst, ignore_errors=True)
    args = [sys.executable, __file__, "--child", way, str(src), str(dst)] + ["--fsync"] * fsync
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{way}: {done.stderr.strip().splitlines()[-1]}")
        return None
    figures: list[float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def copy(src: Path, work: Path, *, fsync: bool) -> float:
    dst = work / "copy"
    shutil.rmtree(dst, ignore_errors=True)
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(src), str(dst)], check=True)
    if fsync:
        sync(dst)
    return time.perf_counter() - start


def compare(src: Path, work: Path, *, runs: int, fsync: bool, peers: bool) -> dict[str, Run]:
    """Every way and a plain copy, in turn."""
    for path in src.rglob("*"):
        path.read_bytes()
    copies: list[float] = []
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS if peers or way == "shardweave"}
    for _ in range(runs):
        copies.append(copy(src, work, fsync=fsync))
        for way in list(found):
            figures = measure(way, src, work, fsync=fsync)
            if figures is None:
                del found[way]
            else:
                found[way].append(figures)
    ways = {
        way: Run([f[0] for f in rows], *(int(max(column)) for column in list(zip(*rows, strict=True))[1:]))
        for way, rows in found.items()
    }
    return {"cp -r": Run(copies), **ways}


def show(title: str, needed: int, ways: dict[str, Run]) -> None:
    base = min(ways["cp -r"].seconds)
    print(f"\n{title}, {needed / 2**20:.0f} MiB of weights")
    print(f"{'':16}{'best s':>9}{'median s':>10}{'of cp -r':>10}{'peak MiB':>10}{'read':>8}{'written':>9}")
    for way, run in ways.items():
        best, median = min(run.seconds), statistics.median(run.seconds)
        line = f"{way:16}{best:9.3f}{median:10.3f}{best / base:10.2f}"
        if run.rss_bytes:
            line += f"{run.rss_bytes / 2**20:10.0f}{run.read_bytes / needed:8.3f}"
            line += f"{run.written_bytes / needed:9.4f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description="Conversion beside a plain copy.")
    parser.add_argument("--tiny", action="store_true", help="a few MiB instead of about 1 GiB")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--fsync", action="store_true", help="wait for the disk, on all sides")
    parser.add_argument("--no-peers", action="store_true", help="leave torch and megatron-core out")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--child", nargs=3, metavar=("WAY", "SRC", "DST"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], Path(args.child[1]), Path(args.child[2]), args.fsync)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        work = Path(name)
        make(work / "hf", TINY if args.tiny else LARGE)
        # As Megatron writes it: a chunk for each rank and layer, and no digests.
        job = prepare(work / "hf", to="megatron", geometry=TP4)
        report = convert(job, work / "tp4", digests=False, fsync=False)
        for title, src in (("Megatron TP4 to Hugging Face", "tp4"), ("Hugging Face to Megatron TP4", "hf")):
            ways = compare(work / src, work, runs=args.runs, fsync=args.fsync, peers=not args.no_peers)
            show(title, report.needed_bytes, ways)


if __name__ == "__main__":
    main()
