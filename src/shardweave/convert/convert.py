"""``convert``: from one checkpoint to another, whatever their formats."""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardweave.convert.accounting import Account, account
from shardweave.convert.carry_out import How, carry_out
from shardweave.convert.checkpoint import Checkpoint, OptimizerState, Settings
from shardweave.convert.execute import unwritable
from shardweave.convert.formats import FORMATS, Format, written
from shardweave.convert.kept import Kept, kept
from shardweave.convert.masters import with_states
from shardweave.convert.part import part_of_checkpoint
from shardweave.convert.source import open_checkpoint
from shardweave.convert.target import Target, Wanted
from shardweave.convert.together import ALONE, Company
from shardweave.errors import DtypeError, GeometryError, PathError
from shardweave.layout import Layout
from shardweave.plan import Plan, needed_bytes, plan

_NO_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion that is decided and proved, before a byte moves.

    Attributes:
        source: What is read; where a state goes along, with it.
        target: What is written.
        plan: From the one to the other.
        state: The state of the optimizer that goes along.
        no_state: Why none does, where the source has one.
    """

    source: Checkpoint
    target: Target
    plan: Plan
    state: OptimizerState | None = None
    no_state: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of weights to write, padding included."""
        return sum(spec.num_bytes for spec in self.target.specs)

    @property
    def kept(self) -> Kept | None:
        """What of the state of the optimizer goes along."""
        return None if self.state is None else kept(self.state, self.target.layout)


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did.

    Attributes:
        dst: The target.
        num_tensors: Arrays written.
        written_bytes: Bytes of arrays written.
        needed_bytes: Bytes of weights in them, padding excepted.
        resumed: Extents that an earlier run had finished, of all processes.
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
    only: Collection[str] = (),
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
        only: Patterns of the names of tensors that are wanted; all by default. See ``models.chosen``.
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
    no_state = _no_state(form, asked, weights_only=weights_only)
    if not no_state:
        state = states(source, settings=settings)
    elif not _may_have_state(source):
        no_state = ""
    _check_part(form, source, only)
    if only:
        source, state = part_of_checkpoint(source, state, tuple(only))
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
    planned = plan(source.layout, made.layout, allow_casts=asked.dtype is not None)
    return Job(source, made, planned, state, no_state)


def _check_part(form: Format, source: Checkpoint, only: Collection[str]) -> None:
    """A part is written where tensors are whole and found by their names."""
    if (only or source.only) and not form.takes_part:
        takers = ", ".join(one.name for one in FORMATS.values() if one.takes_part)
        raise GeometryError(
            "a part of a model is written in a format that stores whole tensors under their names",
            where=str(source.manifest.root),
            equation=f"to={form.name}, and "
            + (f"only({', '.join(only)})" if only else "the source is a part of a model"),
            hint=f"write one of {takers}, or convert the whole model",
        )


def _no_state(form: Format, wanted: Wanted, *, weights_only: bool) -> str:
    """Why a target gets no state; empty where it gets what there is."""
    if not form.takes_states:
        return f"{form.name} has no place for it"
    if weights_only:
        return "weights alone were asked for"
    if wanted.dtype is not None and form.masters(wanted) == "only":
        # Rounded weights would be those that a run goes on with.
        return f"weights in {wanted.dtype} were asked for, and {form.name} keeps no masters beside them"
    return ""


def _may_have_state(source: Checkpoint) -> bool:
    """Whether something of an optimizer is stored, by the names; it is not read."""
    has_place = FORMATS[source.format].states is not None
    return has_place and any(key.startswith(("optim", "chained_")) for key in source.left_out)


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
    company: Company = ALONE,
) -> Report:
    """Carry out a conversion.

    The target appears whole or not at all. A conversion that is killed goes on where it was when it
    is started again in the same way, also by another number of processes.

    Args:
        job: From ``prepare``.
        dst: The target folder; made where it does not exist.
        force: Whether to replace all that is there, be it an unfinished conversion of something else.
        memory_bytes: The most that buffers may take.
        workers: Threads; by default one a core, at most 8.
        digests: Whether to compare the source with the digests recorded beside it, where there are
            any, and to record one of every array beside the target.
        fsync: Whether to wait until the disk has everything.
        progress: Told ``(bytes done, bytes in all)``, by one thread at a time; process 0 knows of all.
        company: The processes that carry it out together, each of which calls this with the same job, inside
            the block of its company. All see the files of source and target under the same paths.

    Raises:
        ExistsError: The target holds something, or another conversion runs into it.
        JournalError: An unfinished conversion of something else is there; or processes do not mean the same.
        ReplicaError: Stored copies of one tensor differ.
        DigestError: The source does not have its digests.
        WriteError: The disk is full, or the target may not be written.
        TransportError, TransportTimeoutError: A process is gone, or does not come.
    """
    start = time.monotonic()
    _check_apart(job.source.manifest.root, dst)
    books = account(job.source, job.plan)
    try:
        how = How(force, memory_bytes, workers or min(8, os.cpu_count() or 1), digests, fsync, progress)
        resumed = carry_out(job, dst, how, company)
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
