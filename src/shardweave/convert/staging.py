"""The folder in which a target is staged, and how it becomes the target.

Everything is written below ``DST/.shardweave``, so that nothing outside the target is touched and
no reader takes the target for complete. Its files:

==================  ==============================================================================
``lock``            held by the process that writes
``identity.json``   what is being converted; renamed to ``ready.json`` when all files are complete
``journal.jsonl``   which extents are written
``new/``            the files of the target
``*.N*``            what process N of several has of these: ``lock.N``, ``journal.N.jsonl``
``old/``            what the target held before, moved away first
``cleared``         all of that is moved away
==================  ==============================================================================

Before ``ready.json`` the target holds what it held. From then on it holds no whole checkpoint
until the file that makes a reader see one, moved last, is in place; ``ready.json`` goes after all
else. Publishing can be repeated after a kill at any step.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from shardweave.errors import ExistsError, FormatError, JournalError, PathError
from shardweave.store.sync import sync

FOLDER = ".shardweave"
_IDENTITY, _READY, _CLEARED, _LOCK = "identity.json", "ready.json", "cleared", "lock"
_SEEN_WITHIN_S = 60.0
LAST = (
    ".metadata",
    "shardweave.manifest",
    "model.safetensors.index.json",
    "model.safetensors",
    "rank_0.safetensors",
    "latest",
    "latest_universal",
)
"""What makes a reader see a checkpoint, in any format; moved away first and published last."""


class Staging:
    """An exclusive hold on a target while it is made.

    Args:
        dst: The target folder; made where it does not exist.
        force: Whether what the target holds may be replaced.

    Attributes:
        data: Where the files of the target are staged.
        journal: The path of the journal.

    Raises:
        ExistsError: The target holds something, or another conversion is running into it.
        PathError: The target is a link.
    """

    def __init__(self, dst: Path, *, force: bool) -> None:
        self.dst, self.root = dst, dst / FOLDER
        self.data, self.journal = self.root / "new", self.root / "journal.jsonl"
        self._old, self._force = self.root / "old", force
        self._require_room()
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = _hold(self.root / _LOCK, dst)
        try:
            # Processes of an earlier run may be about to hear that the one which led them is gone.
            for path in self.root.glob(f"{_LOCK}.*"):
                os.close(_hold(path, dst))
            self._require_room()
        except ExistsError:
            self._leave()
            raise

    def _require_room(self) -> None:
        if self.dst.is_symlink():
            raise PathError(
                "a target is a folder of its own",
                where=str(self.dst),
                equation=f"a link to {self.dst.readlink()}",
                hint="name the folder that the link leads to",
            )
        if self.dst.exists() and not self.dst.is_dir():
            raise ExistsError(
                "a target is a folder", where=str(self.dst), equation="a file", hint="name another target"
            )
        held = sorted(self._held())
        if held and not self._force and not self.ready:
            raise ExistsError(
                "a target is empty",
                where=str(self.dst),
                equation=f"it holds {', '.join(held[:5])}{', ...' if len(held) > 5 else ''}",
                hint="name another folder, or replace it with --force",
            )

    def _held(self) -> set[str]:
        return {path.name for path in self.dst.iterdir()} - {FOLDER} if self.dst.exists() else set()

    @property
    def ready(self) -> bool:
        """Whether all files are complete and only have to be moved."""
        return (self.root / _READY).exists()

    def take_up(self, identity: Mapping[str, Any]) -> None:
        """Continue what is staged where it is the conversion described; else begin anew.

        Raises:
            JournalError: Another conversion is staged, and may not be replaced.
        """
        found = self._identity()
        if found == dict(identity):
            return
        if found is not None and not self._force:
            key = next((k for k in identity if found.get(k) != identity[k]), "identity")
            raise JournalError(
                "an unfinished conversion is continued with the same source and options",
                where=str(self.root),
                equation=f"{key}: {found.get(key)!r} then, {identity.get(key)!r} now",
                hint="run the same command as before, or start over with --force",
            )
        if self.ready:
            # Half of another conversion is published. What is left must not look like a checkpoint.
            for name in _in_order(self._held(), last_first=True):
                _remove(self.dst / name)
        marks = [_IDENTITY, _READY]
        for name in [*sorted({p.name for p in self.root.iterdir()} - {*marks, _LOCK}), *marks]:
            _remove(self.root / name)
        write_text(self.root / "identity.tmp", json.dumps(dict(identity)), fsync=True)
        (self.root / "identity.tmp").replace(self.root / _IDENTITY)

    def _identity(self) -> dict[str, Any] | None:
        """What the staged conversion is; empty where that cannot be read."""
        for name in (_READY, _IDENTITY):
            if (self.root / name).exists():
                try:
                    return dict(json.loads((self.root / name).read_text()))
                except (ValueError, TypeError):
                    return {}
        return None

    def publish(self, *, fsync: bool) -> None:
        """Make the staged files the target. May be called again after it broke off."""
        if not self.ready:
            (self.root / _IDENTITY).replace(self.root / _READY)
            _sync_folder(self.root, fsync)
        if self.data.exists():
            if not (self.root / _CLEARED).exists():
                self._old.mkdir(exist_ok=True)
                for name in _in_order(self._held(), last_first=True):
                    (self.dst / name).replace(self._old / name)
                _sync_folder(self.dst, fsync)
                (self.root / _CLEARED).touch()
                _sync_folder(self.root, fsync)
            for name in _in_order((path.name for path in self.data.iterdir()), last_first=False):
                if name in LAST:
                    _sync_folder(self.dst, fsync)
                (self.data / name).replace(self.dst / name)
            _sync_folder(self.dst, fsync)
            # First of the clean-up: while it is there, files may still have to be moved.
            self.data.rmdir()
        last = [self.root / _READY, self.root / _LOCK]
        for path in [*sorted(set(self.root.iterdir()) - set(last)), *last]:
            _remove(path)
        _remove_empty(self.root)

    def _leave(self) -> None:
        """Let go; where nothing is staged, leave nothing behind."""
        if self.root.exists() and not unfinished(self.dst):
            shutil.rmtree(self.root)
            if not self._held():
                self.dst.rmdir()
        os.close(self._lock)
        # Over NFS a file that is open stays in its folder until it is closed.
        if self.root.exists():
            _remove_empty(self.root)

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()


class Part:
    """What one of several processes has in the staging folder of a target; all but process 0 hold a lock.

    Attributes:
        data: Where the files of the target are staged.
        journal: The path of the journal of this process.
        aside: A folder for this process, to lay out files that it does not keep.
        digests: The path of the digests of arrays that this process read again.
    """

    def __init__(self, dst: Path, rank: int) -> None:
        self._dst, self._root, self._rank = dst, dst / FOLDER, rank
        suffix = f".{rank}" if rank else ""
        self.data, self.aside = self._root / "new", self._root / f"layout{suffix}"
        self.journal = self._root / f"journal{suffix}.jsonl"
        self.digests = self._root / f"digests.{rank}.json"
        self._lock: int | None = None

    def others(self) -> list[Path]:
        """The journals of other processes of this conversion, now or earlier."""
        return sorted(set(self._root.glob("journal*.jsonl")) - {self.journal})

    def __enter__(self) -> Part:
        """Hold the target together with process 0, which lets no other conversion in.

        Raises:
            ExistsError: A process of an earlier conversion holds this part.
            FileNotFoundError: The folder of process 0 cannot be seen from here.
        """
        if self._rank:
            # Over NFS a host may take half a minute to see what another has made.
            end = time.monotonic() + _SEEN_WITHIN_S
            while not self._root.exists() and time.monotonic() < end:
                time.sleep(0.1)
            self._lock = _hold(self._root / f"{_LOCK}.{self._rank}", self._dst)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)


def _hold(path: Path, dst: Path) -> int:
    """The descriptor of a file that only this process holds, until it is closed.

    Raises:
        ExistsError: Another process holds it.
    """
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A conversion that just finished took the lock's file with it, and may have filled the target.
        free = os.fstat(lock).st_nlink > 0
    except OSError:
        free = False
    if not free:
        os.close(lock)
        raise ExistsError(
            "one conversion at a time writes a target",
            where=str(dst),
            equation="another process holds it",
            hint="wait for it, or name another target",
        )
    return lock


def unfinished(root: Path) -> bool:
    """Whether a folder holds a conversion that was not finished."""
    folder = root / FOLDER
    return folder.is_dir() and any(path.name != _LOCK for path in folder.iterdir())


def require_finished(root: Path) -> None:
    """Refuse a folder that a conversion has not finished writing, or a file in such a folder.

    Raises:
        FormatError: The conversion is unfinished.
    """
    folder = root.parent if root.is_file() else root
    if unfinished(folder):
        torn = (folder / FOLDER / _READY).exists()
        raise FormatError(
            "a checkpoint is complete",
            where=str(root),
            equation=f"{FOLDER} is there: a conversion into it was not finished",
            hint="run the same conversion again to finish it, or remove "
            + ("the folder" if torn else f"{folder / FOLDER}: what lies beside it was not touched"),
        )


def reserve(path: Path) -> None:
    """Ask for room on the disk for all of a file before its bytes are written.

    A full disk is told at once and not after hours, and what finds its blocks waiting is written
    faster. A file system that cannot do it leaves the file as it is.

    Raises:
        OSError: There is no room.
    """
    # Not `os.posix_fallocate`: where a file system cannot do it, that writes to every block instead.
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if allocate is None or ctypes.sizeof(ctypes.c_long) < 8:
        return
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if size and allocate(file.fileno(), 0, ctypes.c_long(0), ctypes.c_long(size)):
            code = ctypes.get_errno()
            if code in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(code, os.strerror(code), str(path))


def write_text(path: Path, text: str, *, fsync: bool) -> None:
    """Write a small file."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if fsync:
            os.fsync(file.fileno())


def _in_order(names: Iterable[str], *, last_first: bool) -> list[str]:
    return sorted(names, key=lambda name: ((name in LAST) != last_first, name))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_empty(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()


def _sync_folder(path: Path, fsync: bool) -> None:
    if fsync:
        sync(path)
