"""Where a command reads from: a path, or a URL that is copied to a path before the verb runs.

This and `targets` are the only places of the command line that know of URLs. A source is parsed by
`parse_source`; `Verb` enters `local`, which puts a local path in the place of each URL, so that verbs see
paths only; what they print of such a path goes through `named`, which says the URL again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from shardweave.cli.company import are_several
from shardweave.errors import GeometryError

_SHOWN: ContextVar[Mapping[str, str]] = ContextVar("_SHOWN", default={})  # noqa: B039 - never changed in place
"""The URLs of this command, without secrets, by the paths of their copies."""


class Url(str):
    """A source that is still to be copied."""

    __slots__ = ()


class TargetUrl(str):
    """A target that is written to a folder first."""

    __slots__ = ()

    @property
    def shown(self) -> str:
        """It without secrets."""
        from shardweave.store.remote_place import without_secrets

        return without_secrets(self).rstrip("/")


def parse_source(text: str) -> Path | Url:
    """A URL, or a path that exists."""
    from shardweave.store.remote_place import is_url

    if is_url(text):
        return Url(text)
    if not Path(text).exists():
        raise typer.BadParameter(f"path {text!r} does not exist")
    return Path(text)


def parse_target(text: str) -> Path | TargetUrl:
    """A local path, or a URL."""
    from shardweave.store.remote_place import is_url

    return TargetUrl(text) if is_url(text) else Path(text)


@contextmanager
def local(params: dict[str, Any]) -> Iterator[None]:
    """Copy what the parameters of a command name by URL, and put the paths of the copies in their place.

    The copies are kept in the folder ``cache`` where it is given, and removed at the end, however it
    comes, where it is not.
    """
    _SHOWN.set({})
    urls = {name: value for name, value in params.items() if isinstance(value, Url)}
    if not urls:
        yield
        return
    if are_several():
        raise GeometryError(
            "several processes read a source that all of them see",
            where=", ".join(TargetUrl(url).shown for url in urls.values()),
            equation="a URL, which each of them would copy",
            hint="copy it with one process, as shardweave check URL --cache FOLDER does, then convert that",
        )
    from shardweave.cli.common import progress
    from shardweave.store.remote import fetch
    from shardweave.store.remote_place import without_secrets

    with ExitStack() as stack:
        cache: Path | None = params["cache"]
        root = cache or Path(stack.enter_context(TemporaryDirectory(prefix="shardweave-")))
        for name, url in urls.items():
            shown, folder = without_secrets(url).rstrip("/"), root.resolve() / folder_name(url)
            _SHOWN.set({**_SHOWN.get(), str(folder): shown})
            with progress("copying", quiet=bool(params.get("as_json") or params.get("quiet"))) as tell:
                path = fetch(url, folder, progress=tell)
            # A file's folder has the URL of the file's folder.
            where = shown if path == folder else shown.rpartition("/")[0]
            _SHOWN.set({**_SHOWN.get(), str(folder): where})
            params[name] = path
        yield


def show(path: Path, url: str) -> None:
    """Say a URL where this path would be said."""
    _SHOWN.set({**_SHOWN.get(), str(path): url})


def any_copied() -> bool:
    """Whether this command reads a copy."""
    return bool(_SHOWN.get())


def named(text: object) -> str:
    """A text about files, with the URL in the place of its copy."""
    said = str(text)
    for path, url in _SHOWN.get().items():
        said = said.replace(path, url)
    return said


def folder_name(url: str) -> str:
    """The folder of a URL in a cache: its last part for people, and a digest of all of it.

    >>> folder_name("s3://key:secret@bucket/run/iter_0001000/")
    'iter_0001000-00acc75e'
    """
    from shardweave.store.remote_place import without_secrets

    shown = without_secrets(url).rstrip("/")
    last = re.sub(r"[^\w.-]+", "_", shown.rpartition("/")[2], flags=re.ASCII).lstrip(".")[:80]
    return f"{last}-{hashlib.blake2b(shown.encode(), digest_size=4).hexdigest()}"
