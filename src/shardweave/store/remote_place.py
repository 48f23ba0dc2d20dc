"""What a URL names: the files of a checkpoint there, listed and read through fsspec.

The far side is not trusted. Only files that a known format needs or carries are looked at; their
names are checked like those of an index, their sizes are known before anything is read. Messages of
file systems are passed on without what grants access.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from shardweave.errors import (
    FormatError,
    MissingFileError,
    MissingPackageError,
    PathError,
    RemoteError,
    ShardweaveError,
)
from shardweave.store import native, torch_dist
from shardweave.store.paths import check_name, inside
from shardweave.store.tracker import MOST_BYTES, text_of

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_WEIGHTS: Final = (".safetensors", ".distcp")
_SUFFIXES: Final = (*_WEIGHTS, ".json")
_NAMES: Final = frozenset({
    torch_dist.INDEX, torch_dist.COMMON, torch_dist.TRACKER, native.MANIFEST, "tokenizer.model", "merges.txt",
    "vocab.txt", "chat_template.jinja",
})  # fmt: skip
_STATES: Final = (
    "ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "checksum", "crc32c", "blob_id",
    "generation", "LastModified", "last_modified", "Last-Modified", "updated", "modified", "modificationTime",
    "mtime",
)  # fmt: skip
"""Keys by which file systems tell one state of a file from the next; ``created`` where there is no other."""

UNFINISHED: Final = ".shardweave"
"""What lies in a folder, here and there, as long as it is not finished."""
_BLOCK_BYTES: Final = 4 << 20


# --- URLs ---------------------------------------------------------------------------------------

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://")


def is_url(text: str) -> bool:
    """Whether a text names a place by URL. One letter before the colon is a drive.

    >>> is_url("s3://bucket/iter_0001000"), is_url("iter_0001000"), is_url("C://models")
    (True, False, False)
    """
    return _URL.match(text) is not None


def _parts(url: str) -> tuple[str, str, str, str]:
    """Of a URL: up to ``://``, user and password, host and path, query and fragment."""
    scheme, mark, rest = url.partition("://")
    place, query = re.split(r"(?=[?#])", f"{rest}?", maxsplit=1)
    host = place.partition("/")[0]
    # A password may have a slash in it that nobody quoted; a port is not mistaken for one.
    quoted = "@" in host or re.fullmatch(r"[^:]*(:\d*)?", host)
    user = (host if quoted else place).rpartition("@")[0]
    return scheme + mark, user, place[len(user) + 1 :] if user else place, query[:-1]


def without_secrets(url: str) -> str:
    """The URL without user, password, query and fragment, which may all grant access.

    >>> without_secrets("https://me:secret@host/m.safetensors?X-Amz-Signature=5f")
    'https://host/m.safetensors'
    """
    scheme, _, place, _ = _parts(url)
    return scheme + place


def _clean(text: str, url: str) -> str:
    """A message of somebody else's without the secrets of the URL, or of any that it quotes."""
    _, user, _, query = _parts(url)
    values = [value for _, value in parse_qsl(query.lstrip("?"), keep_blank_values=True)]
    text = re.sub(r"[A-Za-z][A-Za-z0-9+.-]+://[^\s'\"<>)\]]+", lambda match: without_secrets(match[0]), text)
    for secret in sorted(
        {user, *user.split(":", 1), query.lstrip("?"), *values} - {""}, key=len, reverse=True
    ):
        text = text.replace(secret, "***").replace(unquote(secret), "***")
    return text[:200]


# --- the far side -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """A file to copy: its name here, its path there, and what the far side says of it."""

    name: str
    path: str
    size: int
    state: str


class Place:
    """What a URL names, listed and read through fsspec."""

    def __init__(self, url: str) -> None:
        self.url, self.shown = url, without_secrets(url).rstrip("/")
        scheme = url.partition("://")[0]
        if ":" in scheme:
            raise FormatError(
                "a URL names one place",
                where=self.shown,
                equation=f"{scheme!r} chains several",
                hint="unpack the archive, and give the folder that holds the checkpoint",
            )
        from fsspec.core import url_to_fs

        with self.reading():
            try:
                self.fs: AbstractFileSystem
                self.fs, path = url_to_fs(url)
            except ValueError as error:
                if "rotocol not known" not in str(error):
                    raise
                raise ImportError(f"no installed package knows {scheme}://") from None
        self.http = scheme.lower() in ("http", "https")
        self.path: str = path if self.http else path.rstrip("/")

    @contextmanager
    def writing(self, name: str = "") -> Iterator[None]:
        """As ``reading``; what is missing while something is written is an error of the place."""
        where = f"{self.shown}/{name}" if name else self.shown
        try:
            with self.reading(name):
                try:
                    yield
                except FileNotFoundError as error:
                    raise RuntimeError(f"nothing is found there: {error.strerror or error}") from None
        except RemoteError as error:
            raise RemoteError(
                "a place at a URL can be written",
                where=where,
                equation=error.equation.removeprefix("RuntimeError: "),
                hint="check room, rights and credentials, which are taken from where its file system looks "
                "for them; then run the same command again: files that are complete there are kept",
            ) from None

    @contextmanager
    def reading(self, name: str = "") -> Iterator[None]:
        """Errors of any file system as errors of ours, without what grants access."""
        where = f"{self.shown}/{name}" if name else self.shown
        try:
            yield
        except ShardweaveError:
            raise
        except ImportError as error:
            raise MissingPackageError(
                "an optional package is installed where something that needs it is used",
                where=where,
                equation=_clean(str(error), self.url),
                hint="pip install 'shardweave[remote]' for s3, gs and http; for other places the package "
                "that fsspec names",
            ) from None
        except FileNotFoundError:
            raise MissingFileError(
                "a checkpoint exists",
                where=where,
                equation="nothing is found there",
                hint="check the URL; some stores also say this where credentials are missing",
            ) from None
        except Exception as error:  # each file system has its own, and most are no OSError
            raise RemoteError(
                "a place at a URL can be listed and read",
                where=where,
                equation=f"{type(error).__name__}: {_clean(str(error), self.url)}",
                hint="check network and credentials, which are taken from where its file system looks for "
                "them; files that are complete are kept in a folder given with --cache",
            ) from None

    def entries(self) -> list[Entry]:
        """The files to copy, checked, as they are now.

        Raises:
            PathError: A name would leave its folder.
            FormatError: Names clash, a size is missing, or there is no checkpoint.
        """
        self.fs.invalidate_cache()
        with self.reading():
            info = self.fs.info(self.path)
        found = self._folder() if info["type"] == "directory" else self._file(info)
        spelled: dict[str, str] = {}
        for entry in found:
            other = spelled.setdefault(unicodedata.normalize("NFC", entry.name).casefold(), entry.name)
            if other != entry.name:
                raise _clash(self.shown, f"{other!r} and {entry.name!r} are one file on some disks")
        return found

    def _file(self, info: Mapping[str, Any]) -> list[Entry]:
        """One file, and the config beside it, which is found beside a local file too."""
        parts = urlsplit(self.path)
        name = unquote(parts.path) if self.http else self.path.partition("?")[0]
        name = name.rpartition("/")[2]
        if not name.endswith((".safetensors", ".json")):
            raise FormatError(
                "one file at a URL is a .safetensors file",
                where=self.shown,
                equation=f"its name is {name[:80]!r}",
                hint="http cannot list folders: name one file, or the folder at s3://, gs:// or another "
                "place that can"
                if self.http
                else "give the folder that holds the checkpoint",
            )
        found = [self._entry(name, self.path, info)]
        if name.endswith(".safetensors"):
            folder = parts.path.rpartition("/")[0] if self.http else self.path.rpartition("/")[0]
            beside = f"{folder}/config.json"
            if self.http:
                beside = parts._replace(path=beside, query="", fragment="").geturl()
            # Who may not list is told "not permitted" of what is not there.
            with self.reading("config.json"), suppress(FileNotFoundError, PermissionError):
                found.append(self._entry("config.json", beside, self.fs.info(beside)))
        return found

    def _folder(self) -> list[Entry]:
        listed = self._list("")
        if UNFINISHED in listed and self._list(f"{UNFINISHED}/").keys() - {"lock"}:
            raise FormatError(
                "a checkpoint is complete",
                where=self.shown,
                equation=f"{UNFINISHED} is there: a conversion into it was not finished",
                hint="finish the conversion first",
            )
        if torch_dist.TRACKER in listed and torch_dist.INDEX not in listed:
            info = listed[torch_dist.TRACKER]
            entry = self._entry(torch_dist.TRACKER, info["name"], info)
            with self.reading(entry.name), self.open(entry.path) as file:
                said = text_of(file.read(MOST_BYTES))
            name = torch_dist.iteration_folder(said, where=f"{self.shown}/{entry.name}")
            return [*self._wanted(self._list(f"{name}/"), f"{name}/"), entry]
        return self._wanted(listed, "")

    def _wanted(self, listed: Mapping[str, Mapping[str, Any]], prefix: str) -> list[Entry]:
        found = [
            self._entry(prefix + name, info["name"], info)
            for name, info in sorted(listed.items())
            if info["type"] in ("file", "link") and _is_wanted(name)
        ]
        names = {entry.name.removeprefix(prefix) for entry in found}
        if not any(name.endswith(_WEIGHTS) for name in names):
            raise FormatError(
                "a folder holds a checkpoint of one known format",
                where=f"{self.shown}/{prefix}".rstrip("/"),
                equation=f"it holds {', '.join(map(repr, sorted(listed)[:6])) or 'nothing'}",
                hint="hf: *.safetensors and their index; megatron: .metadata and *.distcp, or "
                f"{torch_dist.TRACKER} beside iter_*",
            )
        if torch_dist.INDEX not in names and any(name.endswith(".distcp") for name in names):
            raise MissingFileError(
                "a torch_dist folder has an index",
                where=f"{self.shown}/{prefix}".rstrip("/"),
                equation=f"{torch_dist.INDEX} is not there",
                hint="use an earlier iteration if the save broke off",
            )
        return found

    def _list(self, prefix: str) -> dict[str, Mapping[str, Any]]:
        """What a folder holds, by name; only what the far side places right in it."""
        folder = f"{self.path}/{prefix}".rstrip("/")
        with self.reading(prefix.rstrip("/")):
            infos = [
                # What a link of a local disk leads to, and not the link.
                self.fs.info(info["name"])
                if info.get("islink") and _is_wanted(Path(info["name"]).name)
                else info
                for info in self.fs.ls(folder or "/", detail=True)
            ]
        found: dict[str, Mapping[str, Any]] = {}
        for info in infos:
            path = str(info["name"])
            name = path.rstrip("/") if info["type"] == "directory" else path
            if name == folder:  # object stores list the marker of the folder itself
                continue
            where = f"the listing of {self.shown}"
            start = f"{folder}/"
            if not name.startswith(start) or "/" in name[len(start) :]:
                if info["type"] != "directory" and not _is_wanted(name.rpartition("/")[2]):
                    continue
                check_name(name.removeprefix(start), where=where)
                raise PathError(
                    "a listing names what is in its folder",
                    where=where,
                    equation=f"{name[:200]!r} is not right in {folder!r}",
                    hint="do not use this place unless you know who runs it",
                )
            name = name[len(start) :]
            if name in found and _is_wanted(name):
                raise _clash(self.shown, f"{name[:200]!r} is listed twice")
            found[name] = info
        return found

    def _entry(self, name: str, path: str, info: Mapping[str, Any]) -> Entry:
        where = f"the listing of {self.shown}"
        check_name(name, where=where)
        if "file" in self.fs.protocol:
            # Links are followed by the system here, and guarded as in any local folder.
            inside(Path(path).parent, Path(path).name, where=where)
        size = info.get("size")
        if type(size) is not int or size < 0:
            raise FormatError(
                "the size of a file is known before it is copied",
                where=f"{self.shown}, {name!r}",
                equation=f"size is {size!r}",
                hint="use a server that states Content-Length, or download the file by other means",
            )
        keys = [key for key in _STATES if info.get(key) is not None] or ["created"]
        state = " ".join(f"{key}={info[key]}" for key in keys if info.get(key) is not None)
        return Entry(name, path, size, state)

    def open(self, path: str) -> IO[bytes]:
        """The file at a path, to be read from start to end."""
        # Not every server knows ranges; without blocks, http reads one stream.
        opened: IO[bytes] = self.fs.open(path, "rb", block_size=0 if self.http else _BLOCK_BYTES)
        return opened


def _clash(where: str, equation: str) -> FormatError:
    return FormatError(
        "each file of a checkpoint has a name of its own",
        where=f"the listing of {where}",
        equation=equation,
        hint="do not use this checkpoint unless you know who wrote it; rename one by hand if you do",
    )


def _is_wanted(name: str) -> bool:
    """Whether a file belongs to a checkpoint of a known format, by its name."""
    return name in _NAMES or (name.endswith(_SUFFIXES) and not name.startswith("."))
