"""``shardweave lint paired``: are the tests of one run no worse than those of another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardweave.cli.common import FINDING, USAGE, print_error, print_finding
from shardweave.errors import ConfigError, FormatError, MissingFileError

__all__ = ["paired"]

_FORMATS = ("text", "json", "markdown")


def paired(
    base: Annotated[
        Path, typer.Argument(metavar="BASE", help="The run before: a report, or a folder of one a rank.")
    ],
    head: Annotated[Path, typer.Argument(metavar="HEAD", help="The run after.")],
    repeat: Annotated[
        list[Path] | None,
        typer.Option(
            "--repeat",
            metavar="PATH",
            help="One more run of the base, to know what is flaky. May be repeated.",
        ),
    ] = None,
    removed: Annotated[
        list[str] | None,
        typer.Option(
            "--removed", metavar="GLOB", help="Tests that were taken out on purpose. May be repeated."
        ),
    ] = None,
    killed: Annotated[
        bool,
        typer.Option(
            "--killed",
            help="Read report logs that break off: what was running hung, what did not run is lost.",
        ),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for CHANGED and FLAKY too.")] = False,
    format: Annotated[
        str, typer.Option("--format", metavar="text|json|markdown", help="How to say it.")
    ] = "text",
) -> None:
    """Compare two test runs, test by test.

    Reads JUnit XML and pytest's report log. A run is one file, or a folder with
    one file for each rank: of each test the worst outcome counts.

    Exits with 0 where HEAD is no worse, with 1 where a test REGRESSED or is LOST,
    with 2 where a report cannot be used.
    """
    from shardweave.lint import paired_report
    from shardweave.lint.paired import compare
    from shardweave.lint.runs import read_run

    if format not in _FORMATS:
        raise ConfigError(
            "the result is said in a known form",
            equation=f"--format {format!r} is not one of {', '.join(_FORMATS)}",
            hint="--format markdown for the summary of a CI, --format json for a program",
        )
    try:
        pairing = compare(
            read_run(base, killed=killed),
            read_run(head, killed=killed),
            repeats=[read_run(path, killed=killed) for path in repeat or ()],
            removed=removed or (),
        )
    except (FormatError, MissingFileError) as error:
        # For every other verb this is about the data; here the data are the command's evidence.
        print_finding(error)
        raise typer.Exit(USAGE) from None
    except OSError as error:
        print_error(f"{error.filename}: {error.strerror}", hint="put it right and run the same command again")
        raise typer.Exit(USAGE) from None
    say = {
        "text": paired_report.as_text,
        "json": paired_report.as_json,
        "markdown": paired_report.as_markdown,
    }[format]
    sys.stdout.write(say(pairing, strict=strict))
    if pairing.worse(strict=strict):
        raise typer.Exit(FINDING)
