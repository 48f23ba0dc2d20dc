"""Carrying out a plan from files to files: bounded memory, several workers, each byte written once.

A task is one extent of the target: a stretch of one file. A worker fills it slab by slab in a
buffer that it keeps, reads each block of the source straight to its place in the slab, writes the
slab, and takes the checksums of the bytes while they are warm.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import xxhash

from shardweave.convert.journal import Journal
from shardweave.convert.slabs import slabs
from shardweave.layout.box import Box, intersect_range
from shardweave.layout.dtype import itemsize
from shardweave.plan import Copy, Plan
from shardweave.store.manifest import Extent, Manifest, StoredTensor
from shardweave.store.paths import inside
from shardweave.store.read import Reader

_SLAB_BYTES = 8 << 20
"""Large enough for the disk, small enough to stay in cache between reading, hashing and writing."""

Progress = Callable[[int], None]
"""Called with the number of bytes that were written since the last call."""


@dataclass(frozen=True, slots=True)
class Task:
    """One extent of the target, and the copies that fill its tensor."""

    tensor: StoredTensor
    number: int
    extent: Extent
    copies: tuple[Copy, ...]
    padded: bool


def tasks(plan: Plan, target: Manifest) -> Iterator[Task]:
    """Every extent of the target in the order of its files; one buffer rule's copies at a time."""
    for number, rule in enumerate(plan.dst.rules):
        buffer = rule.at(plan.dst.mesh, 0)
        if buffer is None:
            continue
        by_name: dict[str, list[Copy]] = defaultdict(list)
        for copy in plan.copies(family for family in plan.families if family.dst_rule == number):
            by_name[copy.dst_name].append(copy)
        padded = any(None in {run.label for run in dim.runs} for dim in buffer.dims)
        for name, _ in buffer.members():
            tensor = target.tensors[name]
            for i, extent in enumerate(tensor.extents):
                yield Task(tensor, i, extent, tuple(by_name[name]), padded)


def execute(
    plan: Plan,
    source: Manifest,
    target: Manifest,
    journal: Journal,
    *,
    memory_bytes: int,
    workers: int,
    crc: bool,
    progress: Progress,
) -> None:
    """Fill every extent of the target that the journal does not have.

    Args:
        plan: From the source's arrays to the target's.
        source: Where to read.
        target: Where to write; its files are laid out.
        journal: What is finished; extended.
        memory_bytes: The most that buffers may take, all workers together.
        workers: Threads; reading, copying, hashing and writing all run without the interpreter's lock.
        crc: Whether the target's format needs CRC-32 beside the digests.
        progress: Told of bytes written.
    """
    # Each worker has a slab, and a scratch buffer of twice its size inside the reader.
    slab_bytes = max(1 << 16, min(_SLAB_BYTES, memory_bytes // (3 * workers)))
    local = threading.local()
    states: list[_Worker] = []

    def run(task: Task) -> None:
        if not hasattr(local, "worker"):
            local.worker = _Worker(source, target, slab_bytes)
            states.append(local.worker)
        facts = local.worker.write(task, crc, progress)
        journal.add(task.tensor.key, task.number, **facts)

    todo = (task for task in tasks(plan, target) if not _finished(task, journal, target, progress))
    try:
        with ThreadPoolExecutor(max_workers=workers) as pool:
            running: set[Future[None]] = {pool.submit(run, task) for task in islice(todo, 2 * workers)}
            try:
                while running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
                    running |= {pool.submit(run, task) for task in islice(todo, len(done))}
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    finally:
        for state in states:
            state.close()


def _finished(task: Task, journal: Journal, target: Manifest, progress: Progress) -> bool:
    """Whether the journal has the extent and its bytes still have the digest that it says."""
    facts = journal.done.get((task.tensor.key, task.number))
    if facts is None:
        return False
    size = task.extent.numel * itemsize(task.tensor.dtype)
    digest = xxhash.xxh3_128()
    with inside(target.root, task.extent.file, where=str(target.root)).open("rb") as file:
        file.seek(task.extent.start)
        for start in range(0, size, _SLAB_BYTES):
            digest.update(file.read(min(_SLAB_BYTES, size - start)))
    if digest.hexdigest() != facts.get("xxh3_128"):
        return False
    progress(size)
    return True


class _Worker:
    """What one thread keeps between tasks: a slab, a reader, and open files."""

    def __init__(self, source: Manifest, target: Manifest, slab_bytes: int) -> None:
        self.target = target
        self.reader = Reader(source)
        self.dtypes = {key: tensor.dtype for key, tensor in source.tensors.items()}
        self.slab = np.empty(slab_bytes, dtype=np.uint8)
        self.files: dict[str, int] = {}

    def close(self) -> None:
        self.reader.close()
        for descriptor in self.files.values():
            os.close(descriptor)
        self.files.clear()

    def write(self, task: Task, crc: bool, progress: Progress) -> Mapping[str, Any]:
        item = itemsize(task.tensor.dtype)
        digest = xxhash.xxh3_128()
        checksum = 0
        at = task.extent.start
        for slab in slabs(task.extent.offset, task.extent.shape, len(self.slab) // item):
            words = self.slab[: slab.numel * item].view(f"<u{item}").reshape(slab.shape)
            if task.padded:
                words[...] = 0
            for copy in task.copies:
                self._fill(copy, slab, words, task.tensor.dtype)
            data = words.reshape(-1).view(np.uint8).data
            self._write(task.extent.file, at, data)
            at += len(data)
            digest.update(data)
            if crc:
                checksum = zlib.crc32(data, checksum)
            progress(len(data))
        return {"xxh3_128": digest.hexdigest(), **({"crc32": checksum} if crc else {})}

    def _fill(self, copy: Copy, slab: Box, words: np.ndarray, dtype: str) -> None:
        """Copy what a copy and a slab have in common from the source to its place in the slab."""
        common = [
            intersect_range(mine, wanted) for mine, wanted in zip(copy.dst_box.dims, slab.dims, strict=True)
        ]
        if not all(len(r) for r in common):
            return
        # How far into the copy each dim of the tensor begins, and in which steps.
        inside_copy = {
            d: (mine.index(r[0]), r.step // mine.step if len(r) > 1 else 1, len(r))
            for d, mine, r in zip(copy.dst_dims, copy.dst_box.dims, common, strict=True)
        }
        blocks = []
        for d, mine in zip(copy.src_dims, copy.src_box.dims, strict=True):
            skip, step, count = inside_copy.get(d, (0, 1, 1))
            blocks.append(
                range(mine[skip], mine[skip] + (count - 1) * step * mine.step + 1, step * mine.step)
            )
        place = words[
            tuple(
                slice(r.start - s.start, r.stop - s.start, r.step)
                for r, s in zip(common, slab.dims, strict=True)
            )
        ]
        offset = [r.start for r in blocks]
        source_dtype = self.dtypes[copy.src_name]
        dense = all(r.step == 1 or len(r) == 1 for r in blocks)
        if dense and source_dtype == dtype:
            self.reader.fill(copy.src_name, offset, copy.to_source(place))
            return
        hull = self.reader.load_box(copy.src_name, offset, [r[-1] - r[0] + 1 for r in blocks])
        block = hull[tuple(slice(None, None, r.step) for r in blocks)]
        place[...] = copy.to_destination(_cast(block, source_dtype, dtype).view(f"<u{itemsize(dtype)}"))

    def _write(self, name: str, at: int, data: memoryview) -> None:
        if name not in self.files:
            path = inside(self.target.root, name, where=str(self.target.root))
            self.files[name] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        done = 0
        while done < len(data):
            done += os.pwrite(self.files[name], data[done:], at + done)


def _cast(block: np.ndarray, source: str, target: str) -> np.ndarray:
    """The values of a block in another dtype, rounded as torch rounds."""
    if source == target:
        return block
    import torch

    words = torch.from_numpy(np.ascontiguousarray(block).view(f"i{itemsize(source)}"))
    values = words.view(getattr(torch, source)).to(getattr(torch, target))
    return values.view(getattr(torch, f"int{8 * itemsize(target)}")).numpy()
