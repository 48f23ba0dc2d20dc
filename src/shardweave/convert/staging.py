"""The folder in which a target is staged, and how it becomes the target.

Everything is written below ``DST/.shardweave``, so that nothing outside the target is touched and
no reader takes the target for complete. Publishing moves the finished files up, the one that
makes a reader see them last; it can be repeated after a kill.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from shardweave.convert import journal
from shardweave.errors import ExistsError, FormatError

FOLDER = ".shardweave"
_READY = "ready"
_LAST = (".metadata", "model.safetensors.index.json", "model.safetensors")
"""What makes a reader see a checkpoint, in any format; published after all else."""


class Staging:
    """An exclusive hold on a target while it is made.

    Args:
        dst: The target folder; made where it does not exist.
        force: Whether a target that holds something, or an unfinished conversion, may be replaced.

    Raises:
        ExistsError: The target holds something, or another conversion is running into it.
    """

    def __init__(self, dst: Path, *, force: bool) -> None:
        if dst.exists() and not dst.is_dir():
            raise ExistsError(
                "a target is a folder", where=str(dst), equation="a file", hint="name another target"
            )
        held = sorted(path.name for path in dst.iterdir() if path.name != FOLDER) if dst.exists() else []
        self.dst, self.root = dst, dst / FOLDER
        publishing = (self.root / _READY).exists()
        if held and not force and not publishing:
            raise ExistsError(
                "a target is empty",
                where=str(dst),
                equation=f"it holds {', '.join(held[:5])}{', ...' if len(held) > 5 else ''}",
                hint="name another folder, or replace it with --force",
            )
        self.data, self.old = self.root / "new", self.root / "old"
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ExistsError(
                "one conversion at a time writes a target",
                where=str(dst),
                equation="another process holds it",
                hint="wait for it, or name another target",
            ) from None

    def continues(self, identity: Mapping[str, Any]) -> bool:
        """Whether the staged conversion is the one described, so that its work can be kept."""
        return journal.describes(self.root, identity)

    def discard(self) -> None:
        """Throw away what an earlier conversion staged."""
        (self.root / _READY).unlink(missing_ok=True)
        for path in (self.data, self.root / "journal.jsonl"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    @property
    def ready(self) -> bool:
        """Whether all files are complete and only have to be moved."""
        return (self.root / _READY).exists()

    def publish(self) -> None:
        """Make the staged files the target. May be called again after it broke off."""
        if not self.ready:
            (self.root / _READY).touch()
            _fsync(self.root)
        if self.data.exists():
            self.old.mkdir(exist_ok=True)
            staged = {path.name for path in self.data.iterdir()}
            placed = {path.name for path in self.dst.iterdir()} - {FOLDER}
            # What is there already and is not staged any more was moved by a publish that broke off.
            if not (self.root / "cleared").exists():
                for name in _in_order(placed, last_first=True):
                    (self.dst / name).replace(self.old / name)
                (self.root / "cleared").touch()
                _fsync(self.root)
            for name in _in_order(staged, last_first=False):
                (self.data / name).replace(self.dst / name)
            _fsync(self.dst)
        # The mark goes last, so that a clean-up that breaks off is finished by the next run.
        for path in (self.data, self.old):
            shutil.rmtree(path, ignore_errors=True)
        for name in ("journal.jsonl", "cleared", _READY, "lock"):
            (self.root / name).unlink(missing_ok=True)
        self.root.rmdir()

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)
        # Nothing was staged: leave nothing behind.
        if error is not None and self.root.exists() and {p.name for p in self.root.iterdir()} <= {"lock"}:
            shutil.rmtree(self.root)
            if not any(self.dst.iterdir()):
                self.dst.rmdir()


def unfinished(root: Path) -> bool:
    """Whether a folder holds a conversion that was not finished."""
    return any((root / FOLDER / name).exists() for name in ("new", "journal.jsonl", _READY))


def require_finished(root: Path) -> None:
    """Refuse a folder that a conversion has not finished writing.

    Raises:
        FormatError: The conversion is unfinished.
    """
    if unfinished(root):
        raise FormatError(
            "a checkpoint is complete",
            where=str(root),
            equation=f"{FOLDER} is there: a conversion into it was not finished",
            hint="run the same conversion again to finish it, or remove the folder",
        )


def _in_order(names: set[str], *, last_first: bool) -> Sequence[str]:
    return sorted(names, key=lambda name: ((name in _LAST) != last_first, name))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
