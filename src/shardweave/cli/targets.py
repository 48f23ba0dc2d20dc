"""Where a command writes to: a folder, or a URL to which a folder is copied when it is complete."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from shardweave.cli.common import format_bytes, progress, stderr
from shardweave.cli.sources import TargetUrl, folder_name, show
from shardweave.errors import GeometryError, WriteError

if TYPE_CHECKING:
    from shardweave.convert import Company, Job, Report

_CONVERTED = "converted.json"
"""Beside a staged checkpoint: what it is, once it is complete."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a conversion writes.

    Attributes:
        folder: The target of the conversion.
        force: Whether what it holds may be replaced.
        converted: What an earlier run has made of it already, which was not copied to its URL.
    """

    folder: Path
    force: bool
    converted: Report | None = None


def held(dst: Path | TargetUrl) -> list[str]:
    """The names of what a target holds."""
    if isinstance(dst, TargetUrl):
        from shardweave.store.remote_write import look

        return sorted({name.partition("/")[0] for name in look(dst, identity="", force=True)})
    return sorted(path.name for path in dst.iterdir()) if dst.is_dir() else []


@contextmanager
def landing(
    dst: Path | TargetUrl, job: Job, company: Company, *, cache: Path | None, force: bool, quiet: bool
) -> Iterator[Landing]:
    """Where a conversion writes; at the end of the block what is there is copied to the URL, if it is one.

    Args:
        dst: The target that was asked for.
        job: The conversion.
        company: The processes that carry it out; process 0 copies.
        cache: The folder for the files until they are copied; by default a temporary one.
        force: Whether what the target holds may be replaced.
        quiet: Whether to print nothing.

    Raises:
        GeometryError: Several processes have no folder that all of them see.
        WriteError: The disk has no room for the target.
        ShardweaveError: As ``remote_write.look`` and ``remote_write.upload``.
    """
    if not isinstance(dst, TargetUrl):
        yield Landing(dst, force)
        return
    if company.size > 1 and cache is None:
        raise GeometryError(
            "several processes write a target at a URL by way of a folder that all of them see",
            where=dst.shown,
            equation=f"processes({company.size}), and no --cache",
            hint="give --cache FOLDER on a file system that they share",
        )
    from shardweave.convert.carry_out import identity_of
    from shardweave.convert.staging import LAST
    from shardweave.store.remote_write import look, upload

    identity = identity_of(job)
    # A source that is copied lies elsewhere each time; what is uploaded is compared by its bytes.
    form = {key: value for key, value in identity.items() if key not in ("source", "source files")}
    mark = hashlib.blake2b(json.dumps(form).encode(), digest_size=16).hexdigest()
    with ExitStack() as stack:
        root = cache or Path(stack.enter_context(TemporaryDirectory(prefix="shardweave-")))
        work = root.resolve() / f"to-{folder_name(dst)}"
        folder, note = work / "checkpoint", work / _CONVERTED
        is_done = False
        if company.leads:
            look(dst, identity=mark, force=force)
            is_done = _is_converted(note, identity)
            if not is_done:
                _require_room(job, work, dst.shown, quiet=quiet)
                note.unlink(missing_ok=True)
            work.mkdir(parents=True, exist_ok=True)
        is_done = bool(company.meet(decide=lambda _: b"+" if is_done else b""))
        # It is ours: what an earlier run left of the same goes on, of anything else gives way.
        yield Landing(folder, True, _report(job, folder) if is_done else None)
        if company.leads:
            note.write_text(json.dumps(identity))
            with progress("uploading", quiet=quiet) as tell:
                upload(folder, dst, identity=mark, last=LAST, force=force, progress=tell)
            shutil.rmtree(work)
        company.meet()
        show(folder, dst.shown)


def _is_converted(note: Path, identity: dict[str, str]) -> bool:
    """Whether an earlier run has made all of the target."""
    try:
        return bool(json.loads(note.read_text()) == identity)
    except (OSError, ValueError):
        return False


def _require_room(job: Job, work: Path, shown: str, *, quiet: bool) -> None:
    """Say how much is staged, and refuse it where it does not fit."""
    there = (
        [path.stat().st_blocks * 512 for path in work.rglob("*") if path.is_file()] if work.exists() else []
    )
    disk = next(path for path in (work, *work.parents) if path.exists())
    free = shutil.disk_usage(disk).free + sum(there)
    if not quiet:
        stderr().print(
            f"note: {format_bytes(job.num_bytes)} are staged in {disk} and then copied to {shown}",
            style="dim",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    if job.num_bytes > free:
        raise WriteError(
            "the disk has room for a target until it is copied to its URL",
            where=str(disk),
            equation=f"target({job.num_bytes}) > free({free}) bytes",
            hint="name a folder on another disk with --cache",
        )


def _report(job: Job, folder: Path) -> Report:
    """Of a conversion that an earlier run has finished."""
    from shardweave.convert import Report, account
    from shardweave.plan import needed_bytes

    begin = time.monotonic()
    return Report(
        dst=folder,
        num_tensors=len(job.target.specs),
        written_bytes=job.num_bytes,
        needed_bytes=needed_bytes(job.target.layout) + sum(map(len, job.target.constants.values())),
        resumed=sum(max(1, len(spec.chunks)) for spec in job.target.specs),
        seconds=time.monotonic() - begin,
        account=account(job.source, job.plan),
    )
