"""``shardweave lint constructors``: who constructs a class, and what happens to an argument."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardweave.cli.common import FINDING, USAGE, print_finding
from shardweave.errors import ConfigError, FormatError

__all__ = ["constructors"]

_FORMATS = ("text", "json", "sarif", "github", "markdown")


def constructors(
    cls: Annotated[
        str, typer.Argument(metavar="CLASS", help="Its dotted name, or the end of one that is the only one.")
    ],
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders.")],
    arg: Annotated[str, typer.Option("--arg", metavar="NAME", help="A parameter of its __init__.")],
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="GLOB", help="Files or folders to leave out. May be repeated."),
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option("--fail-on", metavar="KIND,...", help="Exit with 1 for these, as missing,none."),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option("--recorded", metavar="FILE", help="What python -m shardweave.lint.record wrote."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List the places that give the argument too.")] = False,
    spec: Annotated[
        list[str] | None,
        typer.Option(
            "--spec",
            metavar="NAME=ARG",
            help="What holds a class for others to construct. Default: ModuleSpec=module, and any dataclass.",
        ),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", metavar="NAME", help="text, json, sarif, github or markdown.")
    ] = "text",
    cache_dir: Annotated[
        Path | None,
        typer.Option("--cache-dir", metavar="DIR", help="What files said, for the next run."),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Keep nothing for the next run.")] = False,
) -> None:
    """Find who constructs a class, and what happens to an argument.

    Subclasses that reach its __init__ count too. Arguments are bound by
    signatures, and each place is told what to add, or that nothing is.

    Exits with 0, or with 1 where a kind of --fail-on was found.
    """
    from shardweave.lint import config as settings
    from shardweave.lint.cache import DEFAULT
    from shardweave.lint.constructors import KINDS, inventory
    from shardweave.lint.finding import CONSTRUCTIONS, Report
    from shardweave.lint.groups import Options
    from shardweave.lint.inventory_report import as_json, as_markdown, as_text
    from shardweave.lint.recorded import join, read_recording
    from shardweave.lint.report import as_github, as_sarif

    _known(format, _FORMATS, "--format", "the result is said in a known form")
    kinds = [kind.strip() for kind in fail_on.split(",")] if fail_on else []
    for kind in kinds:
        _known(kind, KINDS, "--fail-on", "what fails is a kind of construction")
    found = inventory(
        cls,
        arg,
        paths,
        exclude=exclude or (),
        cache=None if no_cache else cache_dir or Path(DEFAULT),
        specs=dict(map(_spec, spec)) if spec else None,
    )
    joined = None
    if recorded is not None:
        try:
            joined = join(found, read_recording(recorded, inventory=found))
        except FormatError as error:
            # For every other verb this is about the data; here it is the command's evidence.
            print_finding(error)
            raise typer.Exit(USAGE) from None
    config = settings.load(Path())
    options = Options(
        select=settings.codes_of(config.select, among=CONSTRUCTIONS),
        ignore=settings.codes_of(config.ignore, among=CONSTRUCTIONS),
    )
    unwanted = frozenset(index for index, f in enumerate(found.findings) if not options.wants(f.code))
    wanted = [f for n, f in enumerate(found.findings) if n not in unwanted and n not in found.allowed]
    failing = tuple(finding for finding in wanted if finding.kind in kinds)
    if format == "text":
        sys.stdout.write(as_text(found, joined, every=every, unwanted=unwanted))
    elif format == "markdown":
        sys.stdout.write(as_markdown(found, every=every, unwanted=unwanted))
    elif format == "json":
        sys.stdout.write(as_json(found, joined))
    else:
        report = Report("constructors", failing if kinds else tuple(wanted), num_files=found.num_files)
        sys.stdout.write(as_github(report) if format == "github" else as_sarif(report))
    if failing:
        raise typer.Exit(FINDING)


def _known(word: str, words: tuple[str, ...], option: str, rule: str) -> None:
    if word not in words:
        raise ConfigError(
            rule,
            equation=f"{option} {word!r} is not one of {', '.join(words)}",
            hint="name one of them",
        )


def _spec(text: str) -> tuple[str, str]:
    name, _, argument = text.partition("=")
    if not name or not argument:
        raise ConfigError(
            "a spec is a name and the argument that is the class",
            equation=f"--spec {text!r} is not NAME=ARG",
            hint="write --spec ModuleSpec=module",
        )
    return name, argument
