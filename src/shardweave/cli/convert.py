"""``shardweave convert``: from one checkpoint to another."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardweave.cli import options
from shardweave.cli.common import (
    format_bytes,
    parse_count,
    parse_seconds,
    parse_size,
    plural,
    print_block,
    print_facts,
    print_json,
    progress,
    stdout,
    table,
)
from shardweave.cli.company import company, default_workers, is_silent
from shardweave.cli.plan import (
    described_optimizer,
    described_part,
    job_report,
    optimizer_report,
    part_report,
    print_report,
)
from shardweave.cli.sources import TargetUrl, named, parse_source, parse_target
from shardweave.cli.targets import held, landing

if TYPE_CHECKING:
    from shardweave.convert import Account, Job, Report

_RUN = "How it runs"
_NOT_ASKED = "not asked for"
"""As `convert.accounting` has it, which a command does not load for its help."""


def convert(
    src: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", parser=parse_source, help="The checkpoint: a folder, one file, or a URL of one."
        ),
    ],
    dst: Annotated[
        Path,
        typer.Argument(
            metavar="DST",
            parser=parse_target,
            help="The folder to write, or a URL of one; it appears whole or not at all.",
        ),
    ],
    to: options.To,
    config: options.Config = None,
    layout: options.LayoutFile = None,
    to_layout: options.ToLayout = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    ep: options.Ep = None,
    etp: options.Etp = None,
    vpp: options.Vpp = None,
    stages: options.Stages = None,
    spec: options.Spec = None,
    layer_keys: options.LayerKeys = None,
    vocab_divisor: options.VocabDivisor = None,
    zero: options.Zero_ = None,
    dp: options.Dp = None,
    tp_grain: options.TpGrain = None,
    only: options.Only = None,
    dtype: options.Dtype = None,
    stacked_experts: options.StackedExperts = False,
    weights_only: options.WeightsOnly = False,
    max_file_size: options.MaxFileSize = "5GB",  # type: ignore[assignment]
    memory: Annotated[
        int,
        typer.Option(
            "--memory",
            parser=parse_size,
            metavar="SIZE",
            help="The most that buffers take.",
            rich_help_panel=_RUN,
        ),
    ] = "128MiB",  # type: ignore[assignment]
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            parser=parse_count,
            metavar="N",
            help="Threads. Default: one a core, at most 8.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace what DST holds; start an unfinished run over.", rich_help_panel=_RUN
        ),
    ] = False,
    no_digests: Annotated[
        bool,
        typer.Option("--no-digests", help="Neither compare digests nor record them.", rich_help_panel=_RUN),
    ] = False,
    no_fsync: Annotated[
        bool, typer.Option("--no-fsync", help="Do not wait for the disk.", rich_help_panel=_RUN)
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and write nothing.", rich_help_panel=_RUN)
    ] = False,
    cache: options.Cache = None,
    as_json: options.Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            parser=parse_seconds,
            metavar="S",
            help="Of several processes: how long one may be silent, in seconds.",
            rich_help_panel=_RUN,
        ),
    ] = "60",  # type: ignore[assignment]  # what the parser reads
    debug: options.Debug = False,
) -> None:
    """Convert a checkpoint, from and to hf, megatron, deepspeed, universal, dcp, native or ranks.

    The source's format is recognised; its model is read from its config.
    The conversion is proved before a byte moves. One that was stopped goes on
    when the same command is run again. The state of the optimizer goes along
    where both formats have one: megatron, deepspeed, universal, dcp (folders
    of torch.distributed.checkpoint) and native.
    """
    from shardweave.convert import convert as carry_out

    speaks = not is_silent()
    quiet = quiet or not speaks
    with company(timeout_s=timeout) as together:
        job = options.prepared(
            src,
            to=to,
            config=config,
            layout=layout,
            to_layout=to_layout,
            stages=stages,
            dtype=dtype,
            stacked_experts=stacked_experts,
            max_file_bytes=max_file_size,
            weights_only=weights_only,
            only=only,
            tp=tp,
            pp=pp,
            ep=ep,
            etp=etp,
            vpp=vpp,
            spec=spec,
            layer_keys=layer_keys,
            vocab_divisor=vocab_divisor,
            zero=zero,
            dp=dp,
            tp_grain=tp_grain,
        )
        if dry_run:
            _print_dry(job, dst, as_json=as_json and speaks, quiet=quiet)
            return
        with landing(dst, job, together, cache=cache, force=force, quiet=quiet or as_json) as where:
            report = where.converted
            if report is None:
                with progress("converting", job.num_bytes, quiet=quiet) as tell:
                    report = carry_out(
                        job,
                        where.folder,
                        force=where.force,
                        memory_bytes=memory,
                        workers=workers or default_workers(),
                        digests=not no_digests,
                        fsync=not no_fsync,
                        progress=tell,
                        company=together,
                    )
    if as_json and speaks:
        print_json(_plain(job, report))
    elif not quiet:
        _print(job, report)


def _print_dry(job: Job, dst: Path | TargetUrl, *, as_json: bool, quiet: bool) -> None:
    shown, names = (dst.shown if isinstance(dst, TargetUrl) else str(dst)), held(dst)
    if as_json:
        print_json({**job_report(job), "path": shown, "held": names})
    elif not quiet:
        print_report(job_report(job))
        console = stdout()
        console.print()
        console.print("Nothing was written: this was a dry run.")
        if names:
            console.print(f"{shown} holds {plural(len(names), 'file')}; --force would replace them.")


def _plain(job: Job, report: Report) -> dict[str, Any]:
    books = report.account
    return {
        "source": {"path": named(job.source.manifest.root), "format": job.source.format},
        "target": {"path": named(report.dst), "format": job.target.format, "arrays": report.num_tensors},
        "part": part_report(job),
        "optimizer": optimizer_report(job),
        "account": {
            "used": books.used,
            "replica": books.replica,
            "padding": dict(books.padding),
            "left_out": {
                key: {"bytes": size, "reason": books.reasons.get(key, "")}
                for key, size in books.left_out.items()
            },
            "format": books.format,
            "total": books.total,
        },
        "written_bytes": report.written_bytes,
        "needed_bytes": report.needed_bytes,
        "resumed_extents": report.resumed,
        "seconds": round(report.seconds, 6),
    }


def _print(job: Job, report: Report) -> None:
    console, books = stdout(), report.account
    print_facts(
        {
            "source": f"{named(job.source.manifest.root)} ({job.source.format})",
            "target": f"{named(report.dst)} ({job.target.format})",
            **described_part(part_report(job)),
            **described_optimizer(optimizer_report(job)),
        }
    )
    console.print()
    shown = table("read", ">bytes", ">share", "~")

    def row(name: str, size: int, why: str = "") -> None:
        shown.add_row(name, format_bytes(size), f"{size / books.total:.1%}", why)

    row("used", books.used)
    if books.replica:
        row("replicas", books.replica, "compared, equal")
    for name, size in books.padding.items():
        row("padding", size, name)
    reasons = _by_reason(books)
    for why, keys in reasons.items():
        row("left out", sum(keys.values()), f"{plural(len(keys), 'key')}, {_told(why)}")
    row("format", books.format, "headers, indexes, alignment")
    row("total", books.total)
    print_block(shown)
    console.print()
    for why, keys in reasons.items():
        if why == _NOT_ASKED:
            continue  # it was said which part is wanted
        console.print(f"left out, {why}:", style="dim")
        for key in _alike(keys):
            console.print(f"  {key}", markup=False, soft_wrap=True)
        console.print()
    ratio = report.written_bytes / report.needed_bytes if report.needed_bytes else 1.0
    rate = report.written_bytes / report.seconds / 2**30 if report.seconds else 0.0
    rows = {
        "written": f"{format_bytes(report.written_bytes)} in {plural(report.num_tensors, 'array')}, "
        f"{ratio:.3f} of what is needed{', padding included' if ratio > 1 else ''}",
        "time": f"{report.seconds:.2f} s, {rate:.3f} GiB/s",
    }
    if report.resumed:
        rows["resumed"] = f"{plural(report.resumed, 'extent')} of an earlier run kept"
    print_facts(rows)


def _told(why: str) -> str:
    return why if why == _NOT_ASKED else "named below"


def _by_reason(books: Account) -> dict[str, dict[str, int]]:
    """What was left out, by the reason."""
    found: dict[str, dict[str, int]] = {}
    for key, size in books.left_out.items():
        found.setdefault(books.reasons.get(key, "stored twice"), {})[key] = size
    return found


def _alike(keys: Iterable[str]) -> list[str]:
    """Keys with their numbers as ``*``, each once."""
    return list(dict.fromkeys(re.sub(r"\d+", "*", key) for key in keys))
