"""The store of a session, for those who only look: a TCPStore at HOST:PORT, or the file of a FileStore.

Whoever looks is a client, never the server, and writes nothing. A file is read here and not by torch, whose
FileStore counts its users in the file and waits where a record is cut off.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import socket
import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol

from shardweave.errors import FormatError, NotationError, TransportError, TransportTimeoutError
from shardweave.move.asking import Asker
from shardweave.refit.status import PREFIX

MOST_FILE_BYTES = 1 << 32
_MOST_KEY_BYTES = 1 << 12
_MOST_VALUE_BYTES = 1 << 20
_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})", re.ASCII
)


class Readable(Protocol):
    """What is asked of a store."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        ...

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        ...

    def refresh(self) -> None:
        """See what has come since."""
        ...


def open_place(place: str, *, prefix: str = "", timeout_s: float = 5.0) -> Readable:
    """The store of a session at a place, under the session's prefix; only to be read.

    Args:
        place: ``HOST:PORT`` of a TCPStore, or the path of a FileStore.
        prefix: That of a PrefixStore around it, if the session was given one.
        timeout_s: The longest that connecting takes.

    Raises:
        NotationError: The place is neither.
        TransportError: Nobody answers there.
        TransportTimeoutError: Somebody does, and is no TCPStore, or stalls.
        FormatError: The file is none of a FileStore.
    """
    inner = "/".join(part for part in (prefix.strip("/"), PREFIX) if part)
    if Path(place).is_file():
        return FileView(Path(place), inner)
    match = _ADDRESS.fullmatch(place)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise NotationError(
            "a session is found in the file of its FileStore, or at HOST:PORT of its TCPStore",
            equation=f"{place!r} is no file and no HOST:PORT",
            hint="write trainer-0:29400, [::1]:29400 or the path that the FileStore was given",
        )
    return _connected(match["six"] or match["host"], int(match["port"]), inner, timeout_s)


def _connected(host: str, port: int, prefix: str, timeout_s: float) -> Readable:
    try:
        # torch would try again and again, and say so each time.
        socket.create_connection((host, port), timeout=timeout_s).close()
    except (OSError, UnicodeError) as error:
        raise TransportError(
            "the store of a refit answers",
            where=f"{host}:{port}",
            equation=str(error.strerror if isinstance(error, OSError) and error.strerror else error),
            hint="name host and port of the TCPStore that the session was given; it ends with its process",
        ) from error

    def connect() -> Any:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        store = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        return PrefixStore(prefix, store)

    asker, where = Asker(), f"{host}:{port}"
    store = _in_time(asker, connect, where=where, timeout_s=timeout_s)
    return Bounded(store, asker, where=where, timeout_s=timeout_s)


class Bounded:
    """A store whose answers come in time or not at all."""

    def __init__(self, store: Any, asker: Asker, *, where: str, timeout_s: float) -> None:
        self._store, self._asker, self._where, self._timeout_s = store, asker, where, timeout_s

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return bytes(self._ask(lambda: self._store.get(key)))

    def refresh(self) -> None:
        """Nothing: each question is answered anew."""

    def _ask(self, question: Callable[[], Any]) -> Any:
        return _in_time(self._asker, question, where=self._where, timeout_s=self._timeout_s)


def _in_time(asker: Asker, question: Callable[[], Any], *, where: str, timeout_s: float) -> Any:
    try:
        return asker.ask(question, within_s=timeout_s)
    except TimeoutError as error:
        raise TransportTimeoutError(
            "the store of a refit answers in time",
            where=where,
            equation=f"{error}, timeout_s({timeout_s:g})",
            hint="something else than a TCPStore listens there, or its process stands still; raise --timeout "
            "if it is only slow",
        ) from error
    except (RuntimeError, OSError, ValueError) as error:
        raise TransportError(
            "the store of a refit answers",
            where=where,
            equation=f"{type(error).__name__}: {error!s:.200}",
            hint="something else than a TCPStore listens there, or its process has ended; name host and port "
            "of the store that the session was given",
        ) from error


class FileView:
    """The keys of a FileStore, as its file had them when it was read.

    Source: torch 2.13, FileStore.cpp: records of a length and a key, a length and a value, in the order in
    which they were written; ``/`` before a key sets it, ``-`` before that takes it back.
    """

    def __init__(self, path: Path, prefix: str) -> None:
        self._path, self._prefix = path, prefix
        self.refresh()

    def refresh(self) -> None:
        """Read the file.

        Raises:
            FormatError: It is no FileStore, or holds more than is read.
        """
        self._values: dict[str, bytes] = {}
        with self._path.open("rb") as file:
            with contextlib.suppress(OSError):  # file systems without locks
                fcntl.flock(file, fcntl.LOCK_SH)
            size = self._path.stat().st_size
            if size > MOST_FILE_BYTES:
                self._refuse(f"bytes({size}) > {MOST_FILE_BYTES}")
            while file.tell() < size:
                key = self._record(file, size, _MOST_KEY_BYTES)
                if key is None:
                    self._refuse(f"a key of more than {_MOST_KEY_BYTES} bytes before byte {file.tell()}")
                value = self._record(file, size, _MOST_VALUE_BYTES)
                self._keep(key, value, file.tell())

    def _record(self, file: Any, size: int, most: int) -> bytes | None:
        """The bytes of a record; ``None`` where they are more than is kept."""
        at = file.tell()
        head = file.read(4)
        length = struct.unpack("<I", head)[0] if len(head) == 4 else size
        if file.tell() + length > size:
            self._refuse(f"the record at byte {at} ends after the file, of {size} bytes")
        if length > most:
            file.seek(length, 1)
            return None
        data: bytes = file.read(length)
        return data

    def _keep(self, key: bytes, value: bytes | None, at: int) -> None:
        try:
            name = key.decode()
        except UnicodeDecodeError:
            self._refuse(f"the key before byte {at} is no text")
        deleted, name = name.startswith("-"), name.removeprefix("-")
        if not name.startswith("/"):
            return  # torch's own
        name = name.removeprefix("/").removeprefix(self._prefix)
        if deleted:
            self._values.pop(name, None)
        else:
            self._values[name] = b"\0" * (_MOST_VALUE_BYTES + 1) if value is None else value

    def _refuse(self, equation: str) -> NoReturn:
        raise FormatError(
            "a file at which a session is looked at is that of a FileStore",
            where=str(self._path),
            equation=equation,
            hint="name the path that the session's FileStore was given, or HOST:PORT of its TCPStore",
        )

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return all(f"/{key}" in self._values for key in keys)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._values[f"/{key}"]
