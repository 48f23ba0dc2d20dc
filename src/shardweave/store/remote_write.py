"""Checkpoints to elsewhere: a finished folder, copied file by file to a URL.

No store of objects renames a folder, so a checkpoint cannot appear there in one step. Instead a mark lies
beside the files from the first to the last: readers here refuse what has one, and what makes any reader see a
checkpoint is written after all else. The mark says which files are complete, with size and digest, so that an
upload that was stopped goes on. The far side is asked for the size of each file that it took, and for a
checksum where it has one. Credentials come from where each file system looks for them, and never appear in a
message.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock
from typing import Any, Final

import xxhash

from shardweave.errors import ExistsError, JournalError, PathError, RemoteError
from shardweave.store.remote_place import UNFINISHED, Place

__all__ = ["look", "upload"]

_MARK: Final = f"{UNFINISHED}/upload.json"
_CHUNK_BYTES: Final = 4 << 20
_WORKERS: Final = 4
_FLAT: Final = frozenset({"file", "local", "memory"})
"""Where the first part of a path is a folder like any other, and no bucket."""

Progress = Callable[[int, int], None]
_Done = dict[str, tuple[int, str]]


def look(url: str, *, identity: str, force: bool = False) -> list[str]:
    """Find out whether a checkpoint may be written to a URL; nothing is written.

    Args:
        url: A folder at any place that fsspec can write to.
        identity: What is to be written; an upload that was stopped goes on where it is the same.
        force: Whether what is there may be replaced.

    Returns:
        The names of the files there.

    Raises:
        MissingPackageError: The package for the URL's protocol is not installed.
        RemoteError: The place cannot be listed, or takes no files.
        ExistsError: It holds something.
        JournalError: It holds a part of something else.
        PathError: It is a whole bucket, and what is there would have to be removed.
    """
    place = Place(url)
    held = _held(place)
    _done(place, held, identity, force=force)
    return sorted(held.keys() - {_MARK})


def upload(
    folder: Path,
    url: str,
    *,
    identity: str,
    last: Collection[str],
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Copy a finished folder to a URL, or what of it is not there yet.

    Args:
        folder: What is copied; nobody writes to it.
        url: As for ``look``.
        identity: As for ``look``.
        last: The names of the files that make a reader see a checkpoint.
        force: As for ``look``.
        progress: Told ``(bytes done, bytes in all)``, by one thread at a time.

    Returns:
        How many files an earlier upload had left.

    Raises:
        RemoteError: The place refuses a file, or has another size or checksum of it.
        MissingPackageError, ExistsError, JournalError, PathError: As ``look``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "model.safetensors").write_bytes(b"1234")
    ...     upload(Path(folder), "memory://doctest/run", identity="a", last=("model.safetensors",))
    ...     look("memory://doctest/run", identity="b", force=True)
    0
    ['model.safetensors']
    """
    place = Place(url)
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    held = _held(place)
    done = _done(place, held, identity, force=force)
    digests = {name: _digests(folder / name) for name in sizes}
    kept = {
        name: mark
        for name, mark in done.items()
        if mark == (sizes.get(name), digests.get(name, ("",))[0]) and held.get(name) == mark[0]
    }
    mark = _Mark(place, identity, kept)
    mark.write()
    # What makes a reader see the checkpoint that was there goes before anything of it does.
    for name in _in_order(held.keys() - {_MARK} - kept.keys(), last, last_first=True):
        with place.writing(name):
            place.fs.rm_file(_path(place, name))
    _put_all(place, folder, sizes, digests, mark, last, progress)
    found = _held(place)
    wrong = [name for name, size in sizes.items() if found.get(name) != size]
    if wrong or found.keys() - sizes.keys() != {_MARK}:
        strangers = sorted(found.keys() - sizes.keys() - {_MARK})
        raise RemoteError(
            "a place at a URL holds what was written to it and nothing else",
            where=place.shown,
            equation=f"missing or of another size: {wrong[:3]}; not written here: {strangers[:3]}",
            hint="let nobody else write there, then run the same command again",
        )
    with place.writing(_MARK):
        place.fs.rm_file(_path(place, _MARK))
    with suppress(Exception):  # where there are no folders, there is none to remove
        place.fs.rmdir(_path(place, UNFINISHED))
    return len(kept)


# --- what is there ------------------------------------------------------------------------------


def _path(place: Place, name: str) -> str:
    return f"{place.path}/{name}"


def _held(place: Place) -> dict[str, int]:
    """The size of each file below the URL, by name."""
    if place.http:
        raise RemoteError(
            "a place at a URL can be written",
            where=place.shown,
            equation="http only reads",
            hint="name a place of a file system or of a store of objects, such as s3:// or gs://",
        )
    place.fs.invalidate_cache()
    with place.reading():
        if not place.fs.exists(place.path):
            return {}
        if place.fs.isfile(place.path):
            raise ExistsError(
                "a target is a folder", where=place.shown, equation="a file", hint="name another target"
            )
        found: Mapping[str, Mapping[str, Any]] = place.fs.find(place.path, detail=True)
    start = f"{place.path}/"
    return {
        path[len(start) :]: int(info.get("size") or 0)
        for path, info in found.items()
        if path.startswith(start) and len(path) > len(start)
    }


def _done(place: Place, held: Mapping[str, int], identity: str, *, force: bool) -> _Done:
    """What an upload of the same has left; refuses what may not be replaced."""
    said: Any = None
    if _MARK in held:
        with place.reading(_MARK):
            text = place.fs.cat_file(_path(place, _MARK))
        with suppress(ValueError):
            said = json.loads(text)
    if isinstance(said, dict) and said.get("identity") == identity and isinstance(said.get("files"), dict):
        with suppress(TypeError, ValueError):
            return {str(name): (int(size), str(digest)) for name, (size, digest) in said["files"].items()}
    if held and not force:
        names = sorted(held.keys() - {_MARK})
        if _MARK in held:
            raise JournalError(
                "an unfinished upload is continued with the same source and options",
                where=place.shown,
                equation="another conversion was being written there",
                hint="run the same command as before, or start over with --force",
            )
        raise ExistsError(
            "a target is empty",
            where=place.shown,
            equation=f"it holds {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}",
            hint="name another folder, or replace it with --force",
        )
    parts = place.path.strip("/").split("/")
    flat = place.url.partition("://")[0].lower() in _FLAT
    if held and (not parts[0] or (len(parts) == 1 and not flat)):
        raise PathError(
            "a target that is replaced is a folder of its own",
            where=place.shown,
            equation=f"it is all that is there, {len(held)} files",
            hint="name a folder in it",
        )
    return {}


class _Mark:
    """What lies beside the files as long as they are no checkpoint."""

    def __init__(self, place: Place, identity: str, done: _Done) -> None:
        self._place, self._identity, self._done = place, identity, dict(done)

    def add(self, name: str, size: int, digest: str) -> None:
        self._done[name] = size, digest
        self.write()

    def has(self, name: str) -> bool:
        return name in self._done

    def write(self) -> None:
        text = json.dumps({"identity": self._identity, "files": self._done})
        with self._place.writing(_MARK):
            self._place.fs.makedirs(_path(self._place, UNFINISHED), exist_ok=True)
            self._place.fs.pipe_file(_path(self._place, _MARK), text.encode())


# --- files --------------------------------------------------------------------------------------


def _digests(path: Path) -> tuple[str, bytes]:
    """xxh3_128, for the mark, and MD5, which is what stores of objects know."""
    fast, known = xxhash.xxh3_128(), hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            fast.update(chunk)
            known.update(chunk)
    return fast.hexdigest(), known.digest()


def _in_order(names: Collection[str], last: Collection[str], *, last_first: bool) -> list[str]:
    return sorted(names, key=lambda name: ((name in last) != last_first, name))


def _put_all(
    place: Place,
    folder: Path,
    sizes: Mapping[str, int],
    digests: Mapping[str, tuple[str, bytes]],
    mark: _Mark,
    last: Collection[str],
    progress: Progress | None,
) -> None:
    """Several files at a time; what makes a reader see a checkpoint after all others."""
    stop, lock, total = Event(), Lock(), sum(sizes.values())
    done = sum(size for name, size in sizes.items() if mark.has(name))

    def tell(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress is not None:
                progress(done, total)

    def one(name: str) -> None:
        if stop.is_set():
            return
        try:
            _put(place, folder / name, name, sizes[name], digests[name][1], tell)
            with lock:
                mark.add(name, sizes[name], digests[name][0])
        except BaseException:
            stop.set()
            raise

    tell(0)
    missing: Sequence[str] = [name for name in sizes if not mark.has(name)]
    with ThreadPoolExecutor(max_workers=_WORKERS) as pool:
        try:
            for is_last in (False, True):
                list(pool.map(one, [name for name in missing if (name in last) == is_last]))
        finally:
            stop.set()


def _put(place: Place, path: Path, name: str, size: int, md5: bytes, tell: Callable[[int], None]) -> None:
    from fsspec.callbacks import Callback

    told = 0

    class Telling(Callback):
        def relative_update(self, inc: int = 1) -> None:
            nonlocal told
            count = min(inc, size - told)  # what is sent again is counted once
            told += count
            tell(count)

    target = _path(place, name)
    with place.writing(name):
        place.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        place.fs.put_file(str(path), target, callback=Telling())
        place.fs.invalidate_cache(target.rpartition("/")[0])
        info = place.fs.info(target)
    if info.get("size") != size:
        raise _torn(place, name, f"size({info.get('size')}) there, size({size}) here")
    found = _md5_of(info)
    if found is not None and found != md5:
        raise _torn(place, name, f"md5({found.hex()}) there, md5({md5.hex()}) here")
    tell(size - told)


def _md5_of(info: Mapping[str, Any]) -> bytes | None:
    """The MD5 of a file's bytes, where its file system says it is that."""
    for key in ("md5Hash", "content_md5", "Content-MD5"):
        said = info.get(key)
        if isinstance(said, bytes | bytearray) and len(said) == 16:
            return bytes(said)
        if isinstance(said, str):
            with suppress(ValueError):
                found = base64.b64decode(said, validate=True)
                if len(found) == 16:
                    return found
    return None


def _torn(place: Place, name: str, equation: str) -> RemoteError:
    return RemoteError(
        "a place at a URL has the bytes that were written to it",
        where=f"{place.shown}/{name}",
        equation=equation,
        hint="run the same command again, which writes what is missing",
    )
