"""Saving a checkpoint from many ranks: all of it or nothing, each box once, with equal loads.

A save has rounds, in each of which every rank says something and hears all others: what it holds; what that
comes to, where others hold it too; that its file is written, with the digests; that all is published. An
error of one rank is heard by all in the same round and raised by all. Who writes what and the proof of it are
computed by every rank for itself, before the first byte.

Files are written into a folder beside the target, which becomes the target by one rename, after its manifest.
A save that is killed leaves the checkpoint before it as it was.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shardweave.errors import (
    ExistsError,
    FormatError,
    IndexMismatchError,
    MissingFileError,
    ShardweaveError,
)
from shardweave.store import native, native_manifest
from shardweave.store.manifest import TensorSpec
from shardweave.store.native import entry_key
from shardweave.store.native_agree import Agreed, Exchange, agree, alone, file_of, files_of, together
from shardweave.store.native_elect import Entry, Shares, tensors_of
from shardweave.store.native_held import Held, check_values
from shardweave.store.native_manifest import About
from shardweave.store.native_replicas import compare
from shardweave.store.read import Array
from shardweave.store.safetensors_header import read_header, render_header
from shardweave.store.sync import sync

SAVING = ".saving-"
"""How the folder begins in which a checkpoint is written."""

_METADATA = {"format": "shardweave"}


class Saver:
    """Saves the state of a run, one process a rank, again and again.

    Every rank has one and calls it in step with the others.

    Args:
        run: The run folder, one for all ranks, on a file system that all of them see.
        rank: This rank, counted from 0 among those that save.
        exchange: How they hear of each other. Where saves run in the background, it is of their own thread's:
            nothing else may use it meanwhile.
        keep: How many checkpoints to keep; all by default. The newest is never removed.
        compare_replicas: Whether boxes that several ranks hold are compared before one of them is written.
            Each rank reads what it shares with others for that, and copies it from a device, box by box.
        words: Makes what ``Held.values`` are an array of unsigned words of their size.
        fsync: Whether to wait until the disk has everything. Only tests should not.
    """

    def __init__(
        self,
        run: Path,
        *,
        rank: int = 0,
        exchange: Exchange = alone,
        keep: int | None = None,
        compare_replicas: bool = True,
        words: Callable[[Any], Array] = np.asarray,
        fsync: bool = True,
    ) -> None:
        if keep is not None and keep < 1:
            raise FormatError(
                "a run keeps a checkpoint",
                where=str(run),
                equation=f"keep({keep}) < 1",
                hint="keep at least 1, or leave keep out to keep all",
            )
        self.run, self.rank, self.keep = Path(run), rank, keep
        self._exchange, self._words, self._fsync = exchange, words, fsync
        self._compares = compare_replicas
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._last: Agreed | None = None
        self.written_bytes = 0

    def save(self, held: Iterable[Held], about: About, *, in_background: bool = False) -> Path:
        """Save what all ranks hold.

        Args:
            held: What this rank holds.
            about: What else to keep; that of rank 0 counts.
            in_background: Compare what others hold too, copy what this rank writes, and return; the rest is
                done by a thread, and its error is raised by ``wait`` or by the next ``save``. The state may
                be changed once this returns.

        Returns:
            The folder of the checkpoint, which is complete once ``wait`` has returned.

        Raises:
            GapError, OverlapError, OutsideError: The ranks do not hold every element once, or hold padding.
            FormatError, DtypeError: They contradict each other.
            ReplicaError: Ranks hold different bytes of the same box.
            WriteError: The disk is full, or the folder cannot be written.
            Any error of an earlier save in the background; then this one was not begun.
        """
        self.wait()
        folder = self.run / native.step_folder(about.step)
        try:

            def first() -> None:
                if self.rank == 0:
                    native_manifest.encode({}, (), {}, about)  # what cannot be kept is refused first
                    self._stage(folder)

            choices = {"compare_replicas": self._compares, "in_background": in_background}
            agreed = agree(held, exchange=self._exchange, first=first, before=self._last, choices=choices)
            if self._compares:
                compare(agreed, self.rank, exchange=self._exchange, words=self._words)
            ones, entries, shares = agreed.held, agreed.entries, agreed.shares
            self._last = replace(agreed, held=[])  # what is held may be let go of
            mine = shares[self.rank]
            pieces = [ones[share.entry].part(share.offset, share.size) for share in mine]
            if in_background:
                together(self._exchange, lambda: self._copy(pieces))
        except ShardweaveError:
            self._clear(folder)
            raise
        specs = [
            TensorSpec(entry_key(one.key, share.offset, share.size), one.dtype, share.size)
            for share in mine
            for one in [ones[share.entry]]
        ]
        if not in_background:
            self._finish(folder, specs, pieces, entries, shares, about)
            return folder

        def work() -> None:
            try:
                self._finish(folder, specs, pieces, entries, shares, about)
            except BaseException as error:
                self._failed = error

        # Not a daemon: a process that ends meanwhile waits for its last checkpoint.
        self._thread = threading.Thread(target=work, name="shardweave-save")
        self._thread.start()
        return folder

    def _copy(self, pieces: list[Any]) -> bytes:
        """Replace what this rank writes by copies, which nobody changes."""
        for i, piece in enumerate(pieces):
            pieces[i] = np.array(self._words(piece), order="C")
        return b""

    def wait(self) -> None:
        """Wait for a save in the background; its error is raised here, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    # --- the rounds -----------------------------------------------------------------------------

    def _stage(self, folder: Path) -> None:
        """An empty folder beside the target; what earlier saves left half done is removed."""
        self.run.mkdir(parents=True, exist_ok=True)
        if folder.exists() and not (folder / native.MANIFEST).is_file() and any(folder.iterdir()):
            raise ExistsError(
                "the folder of a step holds a checkpoint or is not there",
                where=str(folder),
                equation=f"it holds files and no {native.MANIFEST}",
                hint="move it away; nothing that is not a checkpoint is replaced",
            )
        for path in self.run.glob(f"{SAVING}*"):
            shutil.rmtree(path)
        native.put_back(self.run)
        _staging(folder).mkdir()

    def _clear(self, folder: Path) -> None:
        if self.rank == 0:
            shutil.rmtree(_staging(folder), ignore_errors=True)

    def _finish(
        self,
        folder: Path,
        specs: Sequence[TensorSpec],
        pieces: Sequence[Any],
        entries: Sequence[Sequence[Entry]],
        shares: Shares,
        about: About,
    ) -> None:
        staging, name = _staging(folder), file_of(self.rank)
        try:
            found = together(self._exchange, lambda: self._write(staging / name, specs, pieces))

            def publish() -> bytes:
                if self.rank == 0:
                    digests = [msgspec.msgpack.decode(data, type=list[bytes]) for data in found]
                    self._publish(folder, entries, shares, digests, about)
                return b""

            together(self._exchange, publish)
        except ShardweaveError:
            self._clear(folder)
            raise

    def _write(self, path: Path, specs: Sequence[TensorSpec], pieces: Sequence[Any]) -> bytes:
        """The file of this rank; the digests of its boxes, in order."""
        self.written_bytes = 0
        if not specs:
            return msgspec.msgpack.encode([])
        head, header = render_header(specs, _METADATA, path.name)
        numbers = {spec.key: i for i, spec in enumerate(specs)}
        digests: dict[int, bytes] = {}
        with path.open("xb", buffering=0) as file:

            def write(data: memoryview | bytes) -> None:
                data = memoryview(data)
                while len(data):
                    data = data[file.write(data) :]

            write(head)
            for key, tensor in header.tensors.items():
                number = numbers[key]
                values = self._words(pieces[number])
                shape = tensor.extents[0].shape
                check_values(values, tensor.dtype, shape, where=f"{path}, {tensor.key!r}")
                digests[number] = native.digest_of(values, write)
                self.written_bytes += values.nbytes
            if self._fsync:
                os.fsync(file.fileno())
        return msgspec.msgpack.encode([digests[i] for i in range(len(specs))])

    def _publish(
        self,
        folder: Path,
        entries: Sequence[Sequence[Entry]],
        shares: Shares,
        digests: Sequence[Sequence[bytes]],
        about: About,
    ) -> None:
        """The manifest, the rename, the pointer, and what is not kept any more."""
        staging, files = _staging(folder), files_of(shares)
        sizes: dict[str, int] = {}
        starts: dict[str, int] = {}
        known: dict[str, bytes] = {}
        for rank, name in files.items():
            if not (staging / name).is_file():
                raise MissingFileError(
                    "rank 0 sees the files that all ranks wrote",
                    where=str(staging / name),
                    equation=f"the file of rank {rank} is not there",
                    hint="save into a folder on a file system that all ranks share",
                )
            header = read_header(staging / name, name)
            sizes[name] = header.size
            starts |= {key: tensor.extents[0].start for key, tensor in header.tensors.items()}
            for share, digest in zip(shares[rank], digests[rank], strict=True):
                known[entry_key(entries[rank][share.entry].key, share.offset, share.size)] = digest
        if starts.keys() != known.keys():
            raise IndexMismatchError(
                "files hold the boxes that their ranks were to write",
                where=str(staging),
                equation=f"{len(starts)} boxes in headers != {len(known)} agreed on",
                hint="two runs save into this folder; give each its own",
            )
        tensors, of_key = [], {}
        for tensor in tensors_of(entries, shares, files):
            names = [entry_key(tensor.key, extent.offset, extent.shape) for extent in tensor.extents]
            extents = [
                replace(extent, start=starts[name])
                for extent, name in zip(tensor.extents, names, strict=True)
            ]
            tensors.append(replace(tensor, extents=tuple(extents)))
            of_key[tensor.key] = [known[name] for name in names]
        self._seal(staging, native_manifest.encode(sizes, tensors, of_key, about))
        old = native.replaced(folder)
        if (folder / native.MANIFEST).is_file():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        staging.rename(folder)
        self._sync(self.run)
        self._point(folder.name)
        shutil.rmtree(old, ignore_errors=True)
        self._prune(folder)

    def _seal(self, staging: Path, manifest: bytes) -> None:
        self._put(staging / native.MANIFEST, manifest)
        self._sync(staging)

    def _point(self, name: str) -> None:
        self._put(self.run / native.LATEST, f"{name}\n".encode())
        self._sync(self.run)

    def _put(self, path: Path, data: bytes) -> None:
        """A small file, whole or not at all."""
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            if self._fsync:
                os.fsync(file.fileno())
        temporary.replace(path)

    def _sync(self, folder: Path) -> None:
        if self._fsync:
            sync(folder)

    def _prune(self, newest: Path) -> None:
        """Remove what is older than the newest few, the manifest first: half of one is none."""
        if self.keep is None:
            return
        others = [path for _, path in native.complete_steps(self.run) if path != newest]
        for path in others[: max(0, len(others) - (self.keep - 1))]:
            (path / native.MANIFEST).unlink()
            shutil.rmtree(path)


# --- what ranks hold ----------------------------------------------------------------------------


def _staging(folder: Path) -> Path:
    return folder.with_name(SAVING + folder.name)
