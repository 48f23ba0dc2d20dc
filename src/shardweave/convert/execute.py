"""Carrying out a plan from files to files: bounded memory, several workers, each byte written once.

A task is an extent of the target, a stretch of one file, or a few that share their rows. A worker
fills it slab by slab in a buffer that it keeps, reads each block of the source straight to its
place in the slab, writes the slab, and takes the checksums of the bytes while they are warm.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

import numpy as np
import xxhash

from shardweave.convert.journal import Journal
from shardweave.convert.slabs import slabs
from shardweave.errors import WriteError
from shardweave.layout.box import Box, intersect_range
from shardweave.layout.dtype import itemsize
from shardweave.plan import Copy, Plan
from shardweave.store.boxes import Boxes
from shardweave.store.crc import crc32
from shardweave.store.manifest import Extent, Manifest, StoredTensor
from shardweave.store.paths import inside
from shardweave.store.read import Reader, read_into

_SLAB_BYTES = 4 << 20
"""Large enough to hide the cost of finding what goes where, small enough to stay in cache meanwhile."""
_WRITE_BYTES = 512 << 10
"""What one call writes at most. ext4 takes memory in pieces as large as the call: of 2 MiB there are
seldom enough at hand, and a write then waits until some are made. It costs up to six times as much."""
_MAX_OPEN = 16
"""Files that a worker keeps open to write into, beside those that its reader has."""

Progress = Callable[[int], None]
"""Called with the number of bytes that were finished since the last call."""


@dataclass(frozen=True, slots=True)
class Task:
    """Extents of one array that lie side by side along its last dim, and the copies that fill them."""

    tensor: StoredTensor
    numbers: tuple[int, ...]
    copies: tuple[Copy, ...]
    padded: bool


def tasks(plan: Plan, target: Manifest, mine: Container[tuple[str, int]] | None = None) -> Iterator[Task]:
    """Every extent of the target; one buffer rule's copies at a time, large arrays that are cut first.

    Args:
        plan: From the source's arrays to the target's.
        target: Where extents lie.
        mine: The key and the first number of the tasks that are wanted; all by default.
    """
    stored = [replace(plan.dst, rules=(rule,)).stored() for rule in plan.dst.rules]
    cut = [
        max((t.num_bytes for t in map(target.tensors.__getitem__, keys) if len(t.extents) > 1), default=0)
        for keys in stored
    ]
    families = defaultdict(list)
    for family in plan.families:
        families[family.dst_rule].append(family)
    for number in sorted(range(len(stored)), key=lambda number: -cut[number]):
        by_key: dict[str, list[Copy]] = defaultdict(list)
        for copy in plan.copies(families[number]):
            copy = by_stored_keys(plan, copy)
            by_key[copy.dst_name].append(copy)
        for key, (buffer, _) in stored[number].items():
            padded = any(None in {run.label for run in dim.runs} for dim in buffer.dims)
            tensor, copies = target.tensors[key], by_key[key]
            boxes = Boxes(
                [[r[0] for r in copy.dst_box.dims] for copy in copies],
                [[r[-1] - r[0] + 1 for r in copy.dst_box.dims] for copy in copies],
            )
            for numbers in side_by_side(tensor):
                if mine is not None and (key, numbers[0]) not in mine:
                    continue
                ends = [tensor.extents[numbers[i]] for i in (0, -1)]
                low = np.array(ends[0].offset, np.int64)
                high = np.array(ends[1].offset, np.int64) + np.array(ends[1].shape, np.int64)
                yield Task(tensor, numbers, tuple(copies[c] for c in boxes.touching(low, high)), padded)


def by_stored_keys(plan: Plan, copy: Copy) -> Copy:
    """A copy whose arrays are named as they are stored."""
    if plan.src.mesh.size == 1 == plan.dst.mesh.size:
        return copy
    src, dst = plan.src.key(copy.src_rank, copy.src_name), plan.dst.key(copy.dst_rank, copy.dst_name)
    return replace(copy, src_name=src, dst_name=dst)


def side_by_side(tensor: StoredTensor) -> Iterator[tuple[int, ...]]:
    """The numbers of extents that share their rows, so that one read of a row fills all of them."""

    def rows(number: int) -> object:
        extent = tensor.extents[number]
        return (extent.offset[:-1], extent.shape) if len(extent.shape) > 1 else number

    for _, numbers in groupby(range(len(tensor.extents)), key=rows):
        yield tuple(numbers)


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
    mine: Container[tuple[str, int]] | None = None,
    digests: dict[str, str] | None = None,
) -> int:
    """Fill every extent of the target that is not filled yet.

    Args:
        plan: From the source's arrays to the target's.
        source: Where to read.
        target: Where to write; its files are laid out.
        journal: What is finished; extended.
        memory_bytes: The most that buffers may take, all workers together.
        workers: Threads; reading, copying, hashing and writing all run without the interpreter's lock.
        crc: Whether the target's format needs CRC-32 beside the digests.
        progress: Told of bytes written or found written, by one thread at a time.
        mine: As of ``tasks``.
        digests: Takes the digests of arrays that are cut, of those which one thread fills from their first
            element to their last; of the others they would cost another reading.

    Returns:
        How many extents an earlier run had filled.

    Raises:
        WriteError: The operating system refuses a write.
    """
    # Each worker has a slab, and a buffer of at most the same size inside the reader.
    slab_bytes = max(1 << 16, min(_SLAB_BYTES, memory_bytes // (2 * workers)))
    # What is larger than a thread's share of all is filled by several, or one would keep the others waiting.
    large = sum(tensor.num_bytes for tensor in target.tensors.values()) // workers
    local, telling, stop = threading.local(), threading.Lock(), threading.Event()
    states: list[_Worker] = []

    def tell(count: int) -> None:
        with telling:
            progress(count)
        if stop.is_set():
            raise CancelledError

    def run(chain: Sequence[Task]) -> int:
        if not hasattr(local, "worker"):
            local.worker = _Worker(source, target, slab_bytes, crc, tell)
            states.append(local.worker)
        worker: _Worker = local.worker
        key, held = chain[0].tensor.key, 0
        again = any((key, number) in journal.done for task in chain for number in task.numbers)
        whole = xxhash.xxh3_128() if digests is not None and len(chain) > 1 and not again else None
        for task in chain:
            missing = [n for n in task.numbers if not worker.holds(task, n, journal.done.get((key, n)))]
            for number, facts in worker.write(task, missing, whole):
                journal.add(key, number, facts)
            held += len(task.numbers) - len(missing)
        if digests is not None and whole is not None:
            digests[key] = whole.hexdigest()
        return held

    todo, kept = _chains(tasks(plan, target, mine), large if digests is not None else 0), 0
    try:
        with ThreadPoolExecutor(max_workers=workers) as pool:
            running = {pool.submit(run, chain) for chain in islice(todo, 2 * workers)}
            try:
                while running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    kept += sum(future.result() for future in done)
                    running |= {pool.submit(run, chain) for chain in islice(todo, len(done))}
            except BaseException:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    finally:
        for state in states:
            state.close()
    return kept


def _chains(todo: Iterable[Task], large: int) -> Iterator[Sequence[Task]]:
    """Tasks, those of an array together where they fill it from its first element to its last."""
    for _, of_one in groupby(todo, key=lambda task: task.tensor.key):
        found = list(of_one)
        tensor, stretches = found[0].tensor, [_stretch(task) for task in found]
        order = sorted(range(len(found)), key=lambda i: stretches[i].start)
        ends = [0, *(stretches[i].stop for i in order)]
        in_turn = all(stretches[i].start == end for i, end in zip(order, ends, strict=False))
        if tensor.num_bytes <= large and in_turn and ends[-1] == math.prod(tensor.shape):
            yield [found[i] for i in order]
        else:
            yield from ([task] for task in found)


def _stretch(task: Task) -> range:
    """Which elements a task fills, row-major; empty and before all others where they are not one stretch."""
    shape, extent = task.tensor.shape, task.tensor.extents[task.numbers[0]]
    cut = next((d for d, n in enumerate(extent.shape) if n != 1), len(shape))
    if len(task.numbers) != 1 or extent.shape[cut + 1 :] != shape[cut + 1 :]:
        return range(-1, -1)
    inner = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    start = sum(o * n for o, n in zip(extent.offset, inner, strict=True))
    return range(start, start + extent.numel)


class _Worker:
    """What one thread keeps between tasks: a slab, a reader, and open files."""

    def __init__(
        self, source: Manifest, target: Manifest, slab_bytes: int, crc: bool, tell: Progress
    ) -> None:
        self.target, self.reader = target, Reader(source)
        self.dtypes = {key: tensor.dtype for key, tensor in source.tensors.items()}
        self.slab = np.empty(slab_bytes, dtype=np.uint8)
        self.crc, self.tell = crc, tell
        self.files: OrderedDict[str, int] = OrderedDict()

    def close(self) -> None:
        self.reader.close()
        while self.files:
            os.close(self.files.popitem()[1])

    def holds(self, task: Task, number: int, recorded: Mapping[str, Any] | None) -> bool:
        """Whether the file has the bytes that the journal says."""
        if recorded is None:
            return False
        extent, checksums = task.tensor.extents[number], _Checksums(self.crc)
        size = extent.numel * itemsize(task.tensor.dtype)
        for at in range(0, size, len(self.slab)):
            data = self.slab[: min(len(self.slab), size - at)].data
            read_into(self._file(extent), extent.start + at, data, where=extent.file)
            checksums.update(data)
        if checksums.facts().items() <= recorded.items():
            self.tell(size)
            return True
        return False

    def write(
        self, task: Task, numbers: Sequence[int], whole: xxhash.xxh3_128 | None
    ) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Fill extents in step, so that they share what is read; gives the checksums of each.

        What is written goes into ``whole`` as well.
        """
        if not numbers:
            return
        item = itemsize(task.tensor.dtype)
        extents = [task.tensor.extents[n] for n in numbers]
        most = max(1, len(self.slab) // item // len(numbers))
        checksums, at = [_Checksums(self.crc) for _ in extents], [extent.start for extent in extents]
        for step in zip(*(slabs(e.offset, e.shape, most) for e in extents), strict=True):
            with self.reader.sharing():
                for i, slab in enumerate(step):
                    words = self.slab[: slab.numel * item].view(f"<u{item}").reshape(slab.shape)
                    if task.padded:
                        words[...] = 0
                    for copy in task.copies:
                        self._fill(copy, slab, words, task.tensor.dtype)
                    data = words.reshape(-1).view(np.uint8).data
                    for first in range(0, len(data), _WRITE_BYTES):
                        piece = data[first : first + _WRITE_BYTES]
                        self._write(extents[i], at[i], piece)
                        checksums[i].update(piece)
                        if whole is not None:
                            whole.update(piece)
                        at[i] += len(piece)
                    self.tell(len(data))
        for number, sums in zip(numbers, checksums, strict=True):
            yield number, sums.facts()

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
        # The ellipsis keeps a view where there are no dims, and numpy would give a number.
        inside = zip(common, slab.dims, strict=True)
        at: tuple[Any, ...] = tuple(slice(r.start - s.start, r.stop - s.start, r.step) for r, s in inside)
        place = words[(*at, ...)]
        offset = [r.start for r in blocks]
        source_dtype = self.dtypes[copy.src_name]
        dense = all(r.step == 1 or len(r) == 1 for r in blocks)
        if dense and source_dtype == dtype:
            self.reader.fill(copy.src_name, offset, copy.to_source(place))
            return
        hull = self.reader.load_box(copy.src_name, offset, [r[-1] - r[0] + 1 for r in blocks])
        block = hull[tuple(slice(None, None, r.step) for r in blocks)]
        place[...] = copy.to_destination(cast(block, source_dtype, dtype).view(f"<u{itemsize(dtype)}"))

    def _write(self, extent: Extent, at: int, data: memoryview) -> None:
        done, file = 0, self._file(extent)
        try:
            while done < len(data):
                done += os.pwrite(file, data[done:], at + done)
        except OSError as error:
            raise unwritable(error, f"{extent.file} at byte {at + done}") from error

    def _file(self, extent: Extent) -> int:
        """The file of an extent, open; an array that is cut goes through several, in turn."""
        name = extent.file
        if name not in self.files:
            path = inside(self.target.root, name, where=str(self.target.root))
            if len(self.files) >= _MAX_OPEN:
                os.close(self.files.popitem(last=False)[1])
            self.files[name] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.files.move_to_end(name)
        return self.files[name]


class _Checksums:
    """The checksums that a journal keeps of an extent."""

    def __init__(self, crc: bool) -> None:
        self._digest = xxhash.xxh3_128()
        self._crc = 0 if crc else None

    def update(self, data: memoryview) -> None:
        self._digest.update(data)
        if self._crc is not None:
            self._crc = crc32(data, self._crc)

    def facts(self) -> dict[str, Any]:
        crc = {} if self._crc is None else {"crc32": self._crc}
        return {"xxh3_128": self._digest.hexdigest(), **crc}


def facts_of(data: bytes, *, crc: bool) -> dict[str, Any]:
    """The checksums that a journal keeps of the bytes of a whole extent."""
    checksums = _Checksums(crc)
    checksums.update(memoryview(data))
    return checksums.facts()


def checksums_of(manifest: Manifest, tensor: StoredTensor, number: int) -> dict[str, Any]:
    """The checksums of an extent, read again from its file, which is opened for it."""
    extent, checksums = tensor.extents[number], _Checksums(crc=False)
    size, buffer = extent.numel * itemsize(tensor.dtype), np.empty(_WRITE_BYTES, np.uint8)
    file = os.open(inside(manifest.root, extent.file, where=str(manifest.root)), os.O_RDONLY | os.O_CLOEXEC)
    try:
        for at in range(0, size, len(buffer)):
            data = buffer[: min(len(buffer), size - at)].data
            read_into(file, extent.start + at, data, where=extent.file)
            checksums.update(data)
    finally:
        os.close(file)
    return checksums.facts()


def unwritable(error: OSError, where: str) -> WriteError:
    """The error of a write that the operating system refused."""
    return WriteError(
        "the target can be written",
        where=where,
        equation=error.strerror or str(error),
        hint="make room or mend the rights, then run the same command again: what is written is kept",
    )


def cast(block: np.ndarray, source: str, target: str) -> np.ndarray:
    """The values of a block in another dtype, rounded as torch rounds."""
    if source == target:
        return block
    import torch

    words = torch.from_numpy(np.ascontiguousarray(block).view(f"i{itemsize(source)}"))
    values = words.view(getattr(torch, source)).to(getattr(torch, target))
    # Without dims, numpy's contiguous array has one.
    return values.view(getattr(torch, f"int{8 * itemsize(target)}")).numpy().reshape(block.shape)
