"""``shardweave lint groups``: which code reads process groups from the state of a module."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardweave.cli.common import FINDING, stderr
from shardweave.errors import ConfigError

if TYPE_CHECKING:
    from shardweave.lint.config import Config
    from shardweave.lint.finding import Report

__all__ = ["groups"]

_BASELINE = "Baseline"
_REWRITE = "Rewrite"


def groups(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH...", help="Files and folders. Default: paths of the settings."),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="megatron, deepspeed, torch, vllm, sglang, veomni or torchtitan. Default: all of them.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="GLOB", help="Files or folders to leave out. May be repeated."),
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option("--select", metavar="CODE", help="Only codes that begin so. May be repeated."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="CODE", help="Leave out codes that begin so, and SW203."),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline", metavar="FILE", help="What is allowed to be there.", rich_help_panel=_BASELINE
        ),
    ] = None,
    begin: Annotated[
        bool,
        typer.Option(
            "--begin", help="Write the baseline, where there is none yet.", rich_help_panel=_BASELINE
        ),
    ] = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="Take out of the baseline what is gone. Nothing is added.",
            rich_help_panel=_BASELINE,
        ),
    ] = False,
    fail_on_slack: Annotated[
        bool,
        typer.Option(
            "--fail-on-slack",
            help="Exit with 1 where the baseline allows more than there is.",
            rich_help_panel=_BASELINE,
        ),
    ] = False,
    format: Annotated[
        str,
        typer.Option(
            "--format", metavar="NAME", help="text, stats, json, sarif, github, gitlab, markdown or junit."
        ),
    ] = "text",
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Replace reads where the group is at hand and cannot be unset. Needs the extra lint.",
            rich_help_panel=_REWRITE,
        ),
    ] = False,
    patch: Annotated[
        bool,
        typer.Option(
            "--patch",
            help="Print a patch to look through, with new keyword-only parameters. Nothing is written.",
            rich_help_panel=_REWRITE,
        ),
    ] = False,
    diff: Annotated[
        str | None,
        typer.Option(
            "--diff",
            metavar="BASE..HEAD",
            help="Compare two revisions of git. The working tree is not read.",
        ),
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option("--cache-dir", metavar="DIR", help="What files said, for the next run."),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Keep nothing for the next run.")] = False,
) -> None:
    """Find reads of global process groups, and collectives on the default group.

    Names are followed through imports and other names to where they are
    defined. Settings are the table tool.shardweave.lint of ./pyproject.toml.

    Exits with 0 where nothing is new, with 1 where something is.
    """
    from shardweave.lint import config as settings
    from shardweave.lint.cache import DEFAULT
    from shardweave.lint.finding import GROUPS
    from shardweave.lint.groups import Options, check
    from shardweave.lint.report import FORMATS

    root = Path()
    config = settings.load(root)
    if format not in FORMATS:
        raise ConfigError(
            "the result is said in a known form",
            equation=f"--format {format!r} is not one of {', '.join(FORMATS)}",
            hint="--format github in a workflow, --format json for a program",
        )
    presets = settings.presets_named(preset or config.presets)
    options = Options(
        presets=(*presets, *settings.own(config)),
        exclude=(*config.exclude, *(exclude or ())),
        select=settings.codes_named(select or settings.codes_of(config.select, among=GROUPS), among=GROUPS),
        ignore=(
            *settings.codes_named(ignore or settings.codes_of(config.ignore, among=GROUPS), among=GROUPS),
            *Options().ignore,
        ),
    )
    looked = paths or [Path(path) for path in config.paths]
    if not looked:
        raise ConfigError(
            "it is said which code to look at",
            equation="got no path, and no tool.shardweave.lint.paths",
            hint="write shardweave lint groups src",
        )
    folder = None if no_cache else cache_dir or Path(config.cache or DEFAULT)
    if diff is not None:
        _alone(
            {
                "--baseline": baseline is not None,
                "--begin": begin,
                "--update": update,
                "--fail-on-slack": fail_on_slack,
                "--fix": fix,
                "--patch": patch,
            }
        )
        from shardweave.lint.revisions import compare

        # What it keeps is apart, so that runs of both sorts stay quick.
        report = compare(diff, looked, root=root, options=options, cache=folder and folder / "diff")
        sys.stdout.write(FORMATS[format](report))
        if report.new:
            raise typer.Exit(FINDING)
        return
    report = check(looked, root=root, options=options, cache=folder)
    if fix and _rewritten(report, root):
        report = check(looked, root=root, options=options, cache=folder)
    if patch:
        from shardweave.lint import fix as fixing

        sys.stdout.write(fixing.fix(report.findings, root=root, review=True).patch())
        return
    file = baseline or (Path(config.baseline) if config.baseline else None)
    report = _judged(report, config, file, looked, begin=begin, update=update)
    sys.stdout.write(FORMATS[format](report))
    if report.new or (fail_on_slack and report.absent):
        raise typer.Exit(FINDING)


def _alone(others: Mapping[str, bool]) -> None:
    given = [option for option, is_given in others.items() if is_given]
    if given:
        raise ConfigError(
            "revisions are compared with each other, and nothing is written",
            equation=f"got --diff with {', '.join(given)}",
            hint="leave one of them out",
        )


def _rewritten(report: Report, root: Path) -> int:
    """Replace what can be replaced safely; how many files changed."""
    from shardweave.lint import fix as fixing

    fixes = fixing.fix(report.findings, root=root)
    count, done = fixing.write(fixes, root=root), len(fixes.done)
    stderr().print(
        f"{done} read{'s' * (done != 1)} replaced in {count} file{'s' * (count != 1)}, {len(fixes.left)} left"
    )
    return count


def _judged(
    report: Report, config: Config, file: Path | None, looked: Sequence[Path], *, begin: bool, update: bool
) -> Report:
    """The report against the baseline, which is written where that is asked for."""
    from shardweave.lint import baseline as allowed
    from shardweave.lint.files import covers

    if file is None:
        if begin or update:
            raise ConfigError(
                "a baseline that is written has a place",
                equation=f"got {'--begin' if begin else '--update'} without --baseline",
                hint="add --baseline FILE, or set tool.shardweave.lint.baseline",
            )
        return report
    entries = allowed.begin(file, report.findings) if begin else allowed.load(file)
    judged = allowed.judge(
        report.findings,
        entries,
        covers=covers(looked, root=Path()),
        is_there=lambda path: Path(path).is_file(),
    )
    if update and not begin:
        shrunk = allowed.shrunk(report.findings, entries, judged)
        if shrunk != entries:
            allowed.save(file, shrunk)
        judged = replace(judged, absent=())
    return replace(report, known=judged.known, absent=judged.absent, baseline=str(file))
