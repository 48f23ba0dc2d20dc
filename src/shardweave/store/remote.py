"""Checkpoints from elsewhere: a folder or file at a URL, copied into a local folder first.

Every format is read by byte ranges of local files, so a checkpoint at a URL becomes one: the files
that a known format needs or carries, and no others. The far side is not trusted: its names are
checked like those of an index, its sizes are known before the copy and true after it, and what
changes while it is copied is refused.

A copy can be stopped at any time. Files appear under their names only when they are complete, the
index last; a record beside them says which state of which file each one is, so that the next call
copies what is missing or was changed. Credentials come from where each file system looks for them,
and never appear in a message.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock
from typing import IO, Final

from shardweave.errors import ExistsError, FormatError, ShardweaveError, TruncatedError, WriteError
from shardweave.store import native, torch_dist
from shardweave.store.paths import inside
from shardweave.store.remote_place import Entry, Place, is_url

__all__ = ["RECORD", "fetch", "is_url"]

RECORD: Final = ".shardweave-copy.jsonl"
"""Beside the copied files: the URL, then name, size and state of each; also the lock of the copy."""

_LAST: Final = (torch_dist.INDEX, ".safetensors.index.json", native.MANIFEST)
"""What makes a reader see a checkpoint; copied last."""
_CHUNK_BYTES: Final = 4 << 20
_WORKERS: Final = 8

Progress = Callable[[int, int], None]


def fetch(url: str, folder: Path, *, progress: Progress | None = None) -> Path:
    """Copy the checkpoint at a URL into a folder, or what of it is missing or changed there.

    Args:
        url: A folder, or one ``.safetensors`` or ``.json`` file, at any place that fsspec knows.
        folder: Where the copy is kept: nothing yet, or an earlier copy of the same URL.
        progress: Told ``(bytes done, bytes in all)``, from any thread.

    Returns:
        The folder, or the file in it where the URL names one.

    Raises:
        MissingPackageError: The package for the URL's protocol is not installed.
        RemoteError: The place cannot be listed or read.
        PathError: It lists a name that would leave the folder.
        FormatError: It holds no checkpoint, or files without a size, or changes while it is copied.
        TruncatedError: A file ends before its stated size.
        ExistsError: The folder holds something else, or another process copies into it.
        WriteError: The disk has no room, or refuses a write.

    >>> import tempfile
    >>> origin = Path("tests/data/hf_llama_tied_tiny").resolve()
    >>> with tempfile.TemporaryDirectory() as kept:
    ...     copy = fetch(f"file://{origin}", Path(kept))
    ...     sorted(path.name for path in copy.glob("*.safetensors"))
    ['expected.safetensors', 'model.safetensors']
    """
    place = Place(url)
    entries = place.entries()
    with _Record(folder, place.shown) as record:
        missing = record.prepare(entries)
        room = shutil.disk_usage(folder).free
        needed = sum(entry.size for entry in missing)
        if needed > room:
            raise WriteError(
                "the disk has room for the copy",
                where=str(folder),
                equation=f"missing({needed}) > free({room}) bytes",
                hint="name a folder on another disk with --cache",
            )
        _copy(place, missing, record, sum(entry.size for entry in entries), progress)
        if missing and place.entries() != entries:
            raise FormatError(
                "a checkpoint stays as it is while it is copied",
                where=place.shown,
                equation="sizes or states of its files are others than at the start",
                hint="copy a checkpoint that nobody writes to any more; run the same again",
            )
    return folder / entries[0].name if entries[0].path == place.path else folder


def _copy(
    place: Place, missing: Sequence[Entry], record: _Record, total: int, progress: Progress | None
) -> None:
    """Several files at a time, the index after all others."""
    stop, lock = Event(), Lock()
    done = total - sum(entry.size for entry in missing)

    def tell(count: int) -> None:
        nonlocal done
        if progress is not None:
            with lock:
                done += count
                progress(done, total)

    def one(entry: Entry) -> None:
        try:
            if not stop.is_set():
                _copy_one(place, entry, record.folder, tell, stop)
            if not stop.is_set():
                with lock:
                    record.add(entry)
        except BaseException:
            stop.set()
            raise

    tell(0)
    with ThreadPoolExecutor(max_workers=_WORKERS) as pool:
        try:
            for last in (False, True):
                list(pool.map(one, (e for e in missing if e.name.endswith(_LAST) == last)))
        finally:  # on Ctrl-C too: no worker goes on to the end of its file
            stop.set()


def _copy_one(place: Place, entry: Entry, folder: Path, tell: Callable[[int], None], stop: Event) -> None:
    path = inside(folder, entry.name, where=str(folder))
    part, count = path.with_name(f"{path.name}.part"), 0
    try:
        with place.reading(entry.name), place.open(entry.path) as source, _writing(part):
            path.parent.mkdir(exist_ok=True)
            with part.open("wb") as file:
                while count <= entry.size and not stop.is_set():
                    with place.reading(entry.name):
                        chunk = source.read(_CHUNK_BYTES)
                    if not chunk:
                        break
                    count += len(chunk)
                    if count <= entry.size:
                        file.write(chunk)
                        tell(len(chunk))
                file.flush()
                os.fsync(file.fileno())
            if stop.is_set():
                return
            if count != entry.size:
                raise (TruncatedError if count < entry.size else FormatError)(
                    "a file at a URL has the size that is stated for it",
                    where=f"{place.shown}, {entry.name!r}",
                    equation=f"bytes({count}) {'<' if count < entry.size else '>'} stated({entry.size})",
                    hint="run the same again: the connection broke off, or the file is being written",
                )
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except ShardweaveError:
        raise
    except OSError as error:
        raise WriteError(
            "a copy can be written",
            where=str(path),
            equation=str(error.strerror or error),
            hint="make room or mend the rights, then run the same again",
        ) from error


# --- what is there ------------------------------------------------------------------------------


class _Record:
    """An exclusive hold on a folder of copies, and what is known of them."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self._url = folder, url
        self._known: dict[str, tuple[int, str]] = {}

    def __enter__(self) -> _Record:
        path = self.folder / RECORD
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not path.exists() and any(self.folder.iterdir()):
                raise self._taken("it holds other files")
            self._file: IO[str] = path.open("a+", encoding="utf-8")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise self._taken("another process copies into it") from None
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _taken(self, why: str) -> ExistsError:
        return ExistsError(
            "a folder of copies is empty, or holds an earlier copy of the same URL",
            where=str(self.folder),
            equation=f"{why}; wanted {self._url}",
            hint="name another folder, or wait for the other process",
        )

    def _read(self) -> None:
        self._file.seek(0)
        text = self._file.read()
        first, *lines = text.split("\n")
        if not lines:  # new, or broken off in its first line
            self._file.truncate(0)
            self._write(self._url)
            return
        if json.loads(first) != self._url:
            raise self._taken(f"it holds a copy of {first}")
        for line in lines:
            with suppress(ValueError):  # the last line may have broken off
                name, size, state = json.loads(line)
                self._known[name] = size, state
        if lines[-1]:
            self._file.write("\n")

    def _write(self, value: object) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()

    def add(self, entry: Entry) -> None:
        """Note that a file is copied."""
        with _writing(self.folder / RECORD):
            self._write([entry.name, entry.size, entry.state])

    def prepare(self, entries: Sequence[Entry]) -> list[Entry]:
        """The files that are missing or others now; what is outdated is removed, the index first."""
        missing = [entry for entry in entries if not self._is_kept(entry)]
        names = {entry.name for entry in missing} | (self._known.keys() - {entry.name for entry in entries})
        for name in sorted(names, key=lambda name: (not name.endswith(_LAST), name)):
            path = inside(self.folder, name, where=str(self.folder / RECORD))
            with _writing(path):
                path.unlink(missing_ok=True)
        return missing

    def _is_kept(self, entry: Entry) -> bool:
        """Whether a file is the one that the far side has; where that gives no state, nobody knows."""
        path = inside(self.folder, entry.name, where=str(self.folder))
        same = bool(entry.state) and self._known.get(entry.name) == (entry.size, entry.state)
        return same and path.is_file() and path.stat().st_size == entry.size
