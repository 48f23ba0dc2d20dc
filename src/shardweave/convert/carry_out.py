"""Carrying out a conversion: stage, fill, seal and publish, by one process or by several together.

Process 0 stages, lays out, seals and publishes. What takes long is done by all, each for its part: comparing
the source with its digests, filling extents, and reading again what is cut. The bytes of the target do not
depend on how many they are.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardweave.convert import part as part_file
from shardweave.convert.compare import check_replicas
from shardweave.convert.execute import execute, facts_of
from shardweave.convert.formats import FORMATS
from shardweave.convert.journal import Journal
from shardweave.convert.masters import as_read
from shardweave.convert.share import Task, check_borders, tasks_of, tensors_of
from shardweave.convert.staging import Part, Staging, reserve, write_text
from shardweave.convert.together import Company
from shardweave.errors import JournalError
from shardweave.layout import format_layout
from shardweave.store import digest, native, torch_crc
from shardweave.store.manifest import Extent, Manifest
from shardweave.store.paths import inside
from shardweave.store.strict_json import read_json
from shardweave.store.sync import sync

if TYPE_CHECKING:
    from shardweave.convert.convert import Job

BESIDE = (
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


@dataclass(frozen=True, slots=True)
class How:
    """How a conversion runs; the arguments of ``convert``."""

    force: bool
    memory_bytes: int
    workers: int
    digests: bool
    fsync: bool
    progress: Callable[[int, int], None] | None


def carry_out(job: Job, dst: Path, how: How, company: Company) -> int:
    """Stage and publish; returns how many extents an earlier run had written, of all processes."""
    identity, resumed = identity_of(job), 0
    _meet_on(company, identity, what=str(dst.resolve()))
    with ExitStack() as held:
        staging = held.enter_context(Staging(dst, force=how.force)) if company.leads else None
        ready = company.meet(decide=lambda _: b"+" if staging is not None and staging.ready else b"")
        if not ready:
            # Before anything is staged: a source that contradicts itself leaves nothing behind.
            _verify(job, how, company)
            company.meet()
        if staging is not None:
            staging.take_up(identity)
            ready = b"+" if staging.ready else b""
        ready = company.meet(decide=lambda _: ready)
        if not ready:
            resumed = _fill(job, dst, how, company, identity)
        if staging is not None:
            company.check()
            company.seal()
            staging.publish(fsync=how.fsync)
        company.meet()
    return resumed


def _meet_on(company: Company, identity: Mapping[str, str], *, what: str) -> None:
    """All processes have to mean the same conversion."""
    mine = _fingerprint([dict(identity), what]).encode()

    def decide(said: Sequence[bytes]) -> bytes:
        others = [rank for rank, one in enumerate(said) if one != said[0]]
        if others:
            raise JournalError(
                "all processes carry out the same conversion",
                where=f"ranks 0 and {', '.join(map(str, others[:8]))}",
                equation=f"source, options and target: {said[0].decode()} and {said[others[0]].decode()}",
                hint="start all with the same command and version, on one file system that all of them see",
            )
        return b""

    company.meet(mine, decide=decide)


def _verify(job: Job, how: How, company: Company) -> None:
    """Compare this process's part of the source with its digests or CRCs, and copies in it."""
    if how.digests:
        _verify_crcs(job, how, company)
    read = as_read(job.source.manifest)
    if job.source.only:
        wanted = job.source.layout.stored().keys() | job.source.read
        read = replace(read, tensors={key: one for key, one in read.tensors.items() if key in wanted})
    if how.digests and job.source.format == "native":
        native.verify(replace(read, tensors=tensors_of(read.tensors, company.size)[company.rank]))
    elif how.digests and (job.source.manifest.root / digest.SIDECAR).exists():
        read = FORMATS[job.source.format].as_stored(read)
        recorded = digest.read_sidecar(read.root)
        if job.source.only:
            recorded = {key: said for key, said in recorded.items() if key in read.tensors}
        if company.size > 1 and recorded.keys() == read.tensors.keys():
            mine = tensors_of(read.tensors, company.size)[company.rank]
            read, recorded = replace(read, tensors=mine), {key: recorded[key] for key in mine}
        digest.verify(read, recorded, workers=how.workers)
    if company.leads:
        check_replicas(job.source, workers=how.workers)


def _verify_crcs(job: Job, how: How, company: Company) -> None:
    """Compare what torch saved and is read with its CRCs, but for arrays whose digests are compared."""
    manifest = as_read(job.source.manifest)
    read = set(job.source.layout.stored()) | job.source.read
    if (manifest.root / digest.SIDECAR).exists():
        read = set()
    torch_crc.verify(
        manifest, skip=manifest.tensors.keys() - read, part=(company.rank, company.size), workers=how.workers
    )


def _fill(job: Job, dst: Path, how: How, company: Company, identity: Mapping[str, str]) -> int:
    """Write all extents, each process its part, and seal the files; returns how many were there."""
    part, total, done = Part(dst, company.rank), job.num_bytes, 0

    def show() -> None:
        if how.progress is not None:
            how.progress(min(total, done + company.done_elsewhere), total)

    def tell(count: int) -> None:
        nonlocal done
        done += count
        company.tell(done)
        show()

    with part, ExitStack() as held:
        manifest, journal = None, None
        if company.leads:
            journal = held.enter_context(Journal(part.journal, others=part.others()))
            manifest = _lay_out(job, part, fresh=not journal.done)
        company.meet()
        if journal is None or manifest is None:
            journal = held.enter_context(Journal(part.journal, others=part.others()))
            manifest = replace(_allocate(job, part.aside), root=part.data)
            shutil.rmtree(part.aside)
        parts = tasks_of(manifest, company.size)
        mine = parts[company.rank]
        sidecar = how.digests and not job.target.own_digests
        on_the_way: dict[str, str] = {}
        kept = execute(
            job.plan,
            job.source.manifest,
            manifest,
            journal,
            memory_bytes=how.memory_bytes,
            workers=how.workers,
            crc=job.target.crc,
            progress=tell,
            mine=mine if company.size > 1 else None,
            digests=on_the_way if sidecar and company.size == 1 else None,
        )
        if company.leads:
            _write_constants(job, manifest, journal, tell)
        elif how.fsync:
            # What another host has not written yet, a host cannot wait for.
            for file in sorted(_files_of(manifest, mine)):
                sync(manifest.root / file)
        _check_unchanged(job, identity)
        resumed = int(
            company.meet(b"%d" % kept, decide=lambda all_: b"%d" % sum(map(int, all_)), meanwhile=show)
        )
        if company.leads:
            done = total
            show()
        if company.size > 1:
            for rank in range(company.size):
                if rank != company.rank:
                    journal.take_in(Part(dst, rank).journal)
            check_borders(manifest, parts, company.rank, journal.done)
        again = on_the_way
        if sidecar:
            again = {**on_the_way, **_digests_of_cut(manifest, company, how.workers, known=on_the_way)}
        if sidecar and not company.leads:
            write_text(part.digests, json.dumps(again), fsync=False)
    company.meet(meanwhile=show)
    if company.leads:
        for rank in range(1, company.size) if sidecar else ():
            path = Part(dst, rank).digests
            again |= read_json(path, where=str(path))
        if sidecar:
            found = {key: again.get(key) or journal.done[key, 0]["xxh3_128"] for key in manifest.tensors}
            digest.write_sidecar(part.data / _folder(manifest), found)
        _check_unchanged(job, identity)
        config = _write_beside(job, part.data, fsync=how.fsync)
        job.target.finish(manifest, _facts(manifest, journal), config=config, fsync=how.fsync)
    return resumed


# --- what makes two conversions the same --------------------------------------------------------


def identity_of(job: Job) -> dict[str, str]:
    """What makes two conversions the same: the source's bytes as far as files say, and the target's form."""
    manifest = job.source.manifest
    stats = {
        name: [size, (manifest.root / name).stat().st_mtime_ns]
        for name, size in sorted(manifest.files.items())
    }
    specs = [[spec.key, spec.dtype, spec.shape, spec.chunks] for spec in job.target.specs]
    beside = [[key, data.hex()] for key, data in [*job.target.fixed.items(), *job.target.constants.items()]]
    return {
        "source": str(manifest.root.resolve()),
        "source files": _fingerprint(stats),
        "source layout": _fingerprint(format_layout(job.source.layout)),
        "config": _fingerprint(dict(job.source.config)),
        "format": job.target.format,
        "target layout": _fingerprint(format_layout(job.target.layout)),
        "target arrays": _fingerprint([specs, job.target.max_file_bytes, beside]),
    }


def _fingerprint(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _check_unchanged(job: Job, identity: Mapping[str, str]) -> None:
    """A trainer may write its next step over the files that are being read: never publish a mixture."""
    now = identity_of(job)["source files"]
    if now != identity["source files"]:
        raise JournalError(
            "a source stays as it is while it is converted",
            where=str(job.source.manifest.root),
            equation=f"sizes and times of its files: {identity['source files']} at the start, {now} now",
            hint="convert a checkpoint that nobody writes to any more; start over with --force",
        )


# --- files --------------------------------------------------------------------------------------


def _allocate(job: Job, aside: Path) -> Manifest:
    """Where everything lies, which follows from the target alone; laid out in a folder made for it."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    return job.target.allocate(aside)


def _lay_out(job: Job, part: Part, *, fresh: bool) -> Manifest:
    """The staged files at their full size; those of an earlier run where there are any."""
    folder, aside = part.data, part.aside
    if fresh and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    # Laid out aside, so that what an earlier run has written stays, and what it lost is replaced.
    manifest = _allocate(job, aside)
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            path.parent.mkdir(parents=True, exist_ok=True)
            (aside / name).replace(path)
    shutil.rmtree(aside)
    for name in manifest.files:
        reserve(folder / name)
    return replace(manifest, root=folder)


def _folder(manifest: Manifest) -> Path:
    """The folder of the one save that is written, where a format may have several side by side."""
    tops = {Path(name).parts[0] if len(Path(name).parts) > 1 else "" for name in manifest.files}
    return Path(*tops) if len(tops) == 1 else Path()


def _files_of(manifest: Manifest, mine: set[Task]) -> set[str]:
    """The files that a part writes into."""
    keys = {key for key, _ in mine}
    return {extent.file for key in keys for extent in manifest.tensors[key].extents}


def _write_constants(job: Job, manifest: Manifest, journal: Journal, tell: Callable[[int], None]) -> None:
    """What the target says of the state as a whole, each a few bytes."""
    for key, data in job.target.constants.items():
        extent = manifest.tensors[key].extents[0]
        with inside(manifest.root, extent.file, where=str(manifest.root)).open("r+b") as file:
            file.seek(extent.start)
            file.write(data)
        journal.add(key, 0, facts_of(data, crc=job.target.crc))
        tell(len(data))


def _digests_of_cut(
    manifest: Manifest, company: Company, workers: int, *, known: Collection[str]
) -> dict[str, str]:
    """The digests of this part of the arrays that are cut and not known; others are taken on the way."""
    cut = {
        key: tensor
        for key, tensor in manifest.tensors.items()
        if len(tensor.extents) != 1 and key not in known
    }
    mine = tensors_of(cut, company.size)[company.rank]
    return digest.compute(manifest, keys=mine, workers=workers)


def _facts(manifest: Manifest, journal: Journal) -> dict[Extent, Mapping[str, Any]]:
    """The checksums of each extent, as they were taken on the way."""
    return {
        extent: journal.done.get((key, i), {})
        for key, tensor in manifest.tensors.items()
        for i, extent in enumerate(tensor.extents)
    }


def _write_beside(job: Job, folder: Path, *, fsync: bool) -> dict[str, Any]:
    """The config that describes the weights, and what belongs to a model beside them; the config.

    A part of a model has none, so that nobody takes it for one; a model that nobody describes has none.
    """
    config = dict(job.source.config)
    if job.source.only:
        write_text(folder / part_file.FILE, part_file.written(config, job.source.only) + "\n", fsync=fsync)
        return {}
    if not config:
        return {}
    dtypes = {spec.dtype for spec in job.target.specs}
    if len(dtypes) == 1:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = next(iter(dtypes))
    write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n", fsync=fsync)
    for name in BESIDE:
        path = FORMATS[job.source.format].home(job.source.manifest) / name
        if path.is_file() and not path.is_symlink():
            shutil.copyfile(path, folder / name)
    return config
