"""``convert``: from one checkpoint to another, whatever their formats."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardweave.convert.accounting import Account, account
from shardweave.convert.checkpoint import Checkpoint, OptimizerState, Settings
from shardweave.convert.compare import check_replicas
from shardweave.convert.execute import execute, facts_of, unwritable
from shardweave.convert.formats import FORMATS, written
from shardweave.convert.journal import Journal
from shardweave.convert.masters import as_read, with_states
from shardweave.convert.source import open_checkpoint
from shardweave.convert.staging import Staging, reserve, write_text
from shardweave.convert.target import Target, Wanted
from shardweave.errors import DtypeError, GeometryError, JournalError, PathError
from shardweave.layout import Layout, format_layout
from shardweave.plan import Plan, needed_bytes, plan
from shardweave.store import digest, native
from shardweave.store.manifest import Extent, Manifest
from shardweave.store.paths import inside

_BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""What belongs to a model beside its weights and config; copied as it is where the source has it."""

_NO_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion that is decided and proved, before a byte moves."""

    source: Checkpoint
    target: Target
    plan: Plan

    @property
    def num_bytes(self) -> int:
        """Bytes of weights to write, padding included."""
        return sum(spec.num_bytes for spec in self.target.specs)


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did.

    Attributes:
        dst: The target.
        num_tensors: Arrays written.
        written_bytes: Bytes of arrays written.
        needed_bytes: Bytes of weights in them, padding excepted.
        resumed: Extents that an earlier run had finished.
        seconds: Wall time.
        account: Where the source's bytes went.
    """

    dst: Path
    num_tensors: int
    written_bytes: int
    needed_bytes: int
    resumed: int
    seconds: float
    account: Account


@contextmanager
def _uncollected() -> Iterator[None]:
    """Hold the garbage collector back: what is made within has no cycles that it could find.

    A full collection looks at every object of the process; after an import of torch one is due, and
    takes longer than all of the work within.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_uncollected()
def prepare(
    src: Path,
    *,
    to: str,
    config: Path | Mapping[str, Any] | None = None,
    layout: Layout | None = None,
    to_layout: Layout | None = None,
    weights_only: bool = False,
    settings: Settings | None = None,
    **wanted: Any,
) -> Job:
    """Open a source, decide the target, plan and prove; nothing is written.

    The state of an optimizer goes with the weights where both formats have a place for it. A target that
    keeps no masters has weights in full precision; where it is asked for rounded ones, the state is left out.

    Args:
        src: The source folder, or one safetensors file.
        to: The target's format, one of ``FORMATS``.
        config: The model's Hugging Face config; by default the one in the source.
        layout: Which shard of a rank of the source holds what, where its format does not say.
        to_layout: The same of the target.
        weights_only: Whether to leave out the state of the optimizer in any case.
        settings: What reads the settings of the optimizer off a native checkpoint that a run saved;
            ``shardweave.train.interchange.settings_of``.
        wanted: What is asked of the target; the attributes of ``Wanted``.
    """
    form = written(to)
    if to_layout is not None and not form.takes_layout:
        raise GeometryError(
            "a layout is given for targets that store shards of ranks",
            equation=f"to={to}, and layout({to_layout.name})",
            hint="leave it out: the names in this format say what an array is",
        )
    asked = Wanted(layout=to_layout, **wanted)
    source = open_checkpoint(src, config=config, layout=layout)
    state = None
    masters = form.masters(asked)
    # Where a target has no masters, rounded weights would be those that the run goes on with.
    if form.takes_states and not weights_only and (asked.dtype is None or masters != "only"):
        state = states(source, settings=settings)
    if state is not None:
        source, state = with_states(source, state, masters=masters, dtype=asked.dtype)
    if asked.dtype and source.model.scaled:
        raise DtypeError(
            "a dtype is asked of weights whose values are their own",
            where=str(source.manifest.root),
            equation=f"dtype({asked.dtype}), and weights are float8_e4m3fn with scales of blocks",
            hint="leave --dtype out: quantised weights and their scales stay as they are",
        )
    assert form.target is not None, "written() gives no other"
    made = form.target(source, state, asked)
    return Job(source, made, plan(source.layout, made.layout, allow_casts=asked.dtype is not None))


def states(source: Checkpoint, *, settings: Settings | None = None) -> OptimizerState | None:
    """What a checkpoint holds of an optimizer; ``None`` where it, or its format, has weights only.

    Args:
        source: The checkpoint.
        settings: What reads the settings off a native checkpoint that a run saved.

    Raises:
        UnknownNameError: A weight lacks a state that others of its family have, or a state is of no weight.
        OutsideError: A state has another shape than its weight.
        DtypeError: A state has another dtype than that of the other weights of a family.
        FormatError: A count or a setting is no plain value, or weights have settings twice or not at all.
    """
    of = FORMATS[source.format].states
    return None if of is None else of(source, settings)


def convert(
    job: Job,
    dst: Path,
    *,
    force: bool = False,
    memory_bytes: int = 128 << 20,
    workers: int | None = None,
    digests: bool = True,
    fsync: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Carry out a conversion.

    The target appears whole or not at all. A conversion that is killed goes on where it was when it
    is started again in the same way.

    Args:
        job: From ``prepare``.
        dst: The target folder; made where it does not exist.
        force: Whether to replace all that is there, be it an unfinished conversion of something else.
        memory_bytes: The most that buffers may take.
        workers: Threads; by default one a core, at most 8.
        digests: Whether to compare the source with the digests recorded beside it, where there are
            any, and to record one of every array beside the target.
        fsync: Whether to wait until the disk has everything.
        progress: Told ``(bytes done, bytes in all)``, by one thread at a time.

    Raises:
        ExistsError: The target holds something, or another conversion runs into it.
        JournalError: An unfinished conversion of something else is there.
        ReplicaError: Stored copies of one tensor differ.
        DigestError: The source does not have its digests.
        WriteError: The disk is full, or the target may not be written.
    """
    start = time.monotonic()
    _check_apart(job.source.manifest.root, dst)
    books = account(job.source, job.plan)
    try:
        resumed = _carry_out(
            job,
            dst,
            force=force,
            memory_bytes=memory_bytes,
            workers=workers or min(8, os.cpu_count() or 1),
            digests=digests,
            fsync=fsync,
            progress=progress,
        )
    except OSError as error:
        if error.errno not in _NO_WRITE:
            raise
        raise unwritable(error, str(error.filename or dst)) from error
    return Report(
        dst=dst,
        num_tensors=len(job.target.specs),
        written_bytes=job.num_bytes,
        needed_bytes=needed_bytes(job.target.layout) + sum(map(len, job.target.constants.values())),
        resumed=resumed,
        seconds=time.monotonic() - start,
        account=books,
    )


def _carry_out(
    job: Job,
    dst: Path,
    *,
    force: bool,
    memory_bytes: int,
    workers: int,
    digests: bool,
    fsync: bool,
    progress: Callable[[int, int], None] | None,
) -> int:
    """Stage and publish; returns how many extents an earlier run had written."""
    identity, resumed = _identity(job), 0
    with Staging(dst, force=force) as staging:
        if not staging.ready:
            # Before anything is staged: a source that contradicts itself leaves nothing behind.
            if digests and job.source.format == "native":
                native.verify(as_read(job.source.manifest))
            elif digests and (job.source.manifest.root / digest.SIDECAR).exists():
                digest.verify(
                    FORMATS[job.source.format].as_stored(as_read(job.source.manifest)), workers=workers
                )
            check_replicas(job.source)
        staging.take_up(identity)
        if not staging.ready:
            with Journal(staging.journal) as journal:
                manifest = _lay_out(job, staging.data, fresh=not journal.done)
                done = 0

                def tell(count: int) -> None:
                    nonlocal done
                    done += count
                    if progress is not None:
                        progress(done, job.num_bytes)

                resumed = execute(
                    job.plan,
                    job.source.manifest,
                    manifest,
                    journal,
                    memory_bytes=memory_bytes,
                    workers=workers,
                    crc=job.target.crc,
                    progress=tell,
                )
                _write_constants(job, manifest, journal, tell)
                _check_unchanged(job, identity)
                if digests and not job.target.own_digests:
                    digest.write_sidecar(staging.data, _digests(manifest, journal, workers))
                config = _write_beside(job, staging.data, fsync=fsync)
                job.target.finish(manifest, _facts(manifest, journal), config=config, fsync=fsync)
        staging.publish(fsync=fsync)
    return resumed


def _check_apart(src: Path, dst: Path) -> None:
    """Neither folder may lie in the other: a target must not overwrite or hold its source."""
    a, b = src.resolve(), dst.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise PathError(
            "source and target lie apart",
            where=str(dst),
            equation=f"source {a}",
            hint="name a target outside the source folder, and not above it",
        )


def _identity(job: Job) -> dict[str, str]:
    """What makes two conversions the same: the source's bytes as far as files say, and the target's form."""
    manifest = job.source.manifest
    stats = {
        name: [size, (manifest.root / name).stat().st_mtime_ns]
        for name, size in sorted(manifest.files.items())
    }
    specs = [[spec.key, spec.dtype, spec.shape, spec.chunks] for spec in job.target.specs]
    beside = [[key, data.hex()] for key, data in [*job.target.fixed.items(), *job.target.constants.items()]]

    def fingerprint(value: object) -> str:
        return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()

    return {
        "source": str(manifest.root.resolve()),
        "source files": fingerprint(stats),
        "source layout": fingerprint(format_layout(job.source.layout)),
        "config": fingerprint(dict(job.source.config)),
        "format": job.target.format,
        "target layout": fingerprint(format_layout(job.target.layout)),
        "target arrays": fingerprint([specs, job.target.max_file_bytes, beside]),
    }


def _check_unchanged(job: Job, identity: Mapping[str, str]) -> None:
    """A trainer may write its next step over the files that are being read: never publish a mixture."""
    now = _identity(job)["source files"]
    if now != identity["source files"]:
        raise JournalError(
            "a source stays as it is while it is converted",
            where=str(job.source.manifest.root),
            equation=f"sizes and times of its files: {identity['source files']} at the start, {now} now",
            hint="convert a checkpoint that nobody writes to any more; start over with --force",
        )


def _lay_out(job: Job, folder: Path, *, fresh: bool) -> Manifest:
    """The staged files at their full size; those of an earlier run where there are any."""
    if fresh and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    # Where everything lies follows from the target alone. It is laid out aside, so that what an earlier
    # run has written stays, and what it lost is replaced.
    aside = folder.with_name("layout")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    manifest = job.target.allocate(aside)
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            path.parent.mkdir(parents=True, exist_ok=True)
            (aside / name).replace(path)
    shutil.rmtree(aside)
    for name in manifest.files:
        reserve(folder / name)
    return replace(manifest, root=folder)


def _write_constants(job: Job, manifest: Manifest, journal: Journal, tell: Callable[[int], None]) -> None:
    """What the target says of the state as a whole, each a few bytes."""
    for key, data in job.target.constants.items():
        extent = manifest.tensors[key].extents[0]
        with inside(manifest.root, extent.file, where=str(manifest.root)).open("r+b") as file:
            file.seek(extent.start)
            file.write(data)
        journal.add(key, 0, facts_of(data, crc=job.target.crc))
        tell(len(data))


def _digests(manifest: Manifest, journal: Journal, workers: int) -> dict[str, str]:
    """The digest of every array: taken on the way where it is one extent, read again where it is cut."""
    cut = [key for key, tensor in manifest.tensors.items() if len(tensor.extents) != 1]
    again = digest.compute(manifest, keys=cut, workers=workers)
    return {
        key: again[key] if key in again else str(journal.done[key, 0]["xxh3_128"]) for key in manifest.tensors
    }


def _facts(manifest: Manifest, journal: Journal) -> dict[Extent, Mapping[str, Any]]:
    """The checksums of each extent, as they were taken on the way."""
    return {
        extent: journal.done.get((key, i), {})
        for key, tensor in manifest.tensors.items()
        for i, extent in enumerate(tensor.extents)
    }


def _write_beside(job: Job, folder: Path, *, fsync: bool) -> dict[str, Any]:
    """The config that describes the weights, and what belongs to a model beside them; the config."""
    config = dict(job.source.config)
    dtypes = {spec.dtype for spec in job.target.specs}
    if len(dtypes) == 1:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = next(iter(dtypes))
    write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n", fsync=fsync)
    for name in _BESIDE:
        path = FORMATS[job.source.format].home(job.source.manifest) / name
        if path.is_file() and not path.is_symlink():
            shutil.copyfile(path, folder / name)
    return config
