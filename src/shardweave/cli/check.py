"""``shardweave check``: is a checkpoint whole and consistent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardweave.cli import options
from shardweave.cli.common import (
    FINDING,
    print_block,
    print_facts,
    print_finding,
    print_json,
    progress,
    stdout,
    table,
)
from shardweave.cli.sources import named, parse_source

if TYPE_CHECKING:
    from shardweave.convert.check import Checked
    from shardweave.errors import ShardweaveError

_STYLES = {"proved": "green", "failed": "bold red", "skipped": "yellow"}


def check(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", parser=parse_source, help="The checkpoint: a folder, one file, or a URL of one."
        ),
    ],
    config: options.Config = None,
    layout: options.LayoutFile = None,
    no_digests: Annotated[
        bool, typer.Option("--no-digests", help="Do not read the weights to compare digests and masters.")
    ] = False,
    cache: options.Cache = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Prove that a checkpoint is whole and consistent.

    Its files and index, its names and shapes against the model, the state of
    its optimizer, every byte accounted for, copies compared, masters that
    round to their weights, recorded digests verified.
    Exits with 1 where something is wrong.
    """
    from shardweave.convert.check import check as look

    with progress("reading", quiet=as_json) as tell:
        checked = look(
            path,
            config=config,
            layout=options.read_layout(layout),
            digests=not no_digests,
            settings=options.settings_of,
            progress=tell,
        )
    if as_json:
        print_json(_plain(checked))
    else:
        _print(checked)
    for finding in checked.findings:
        print_finding(finding)
    if not checked.whole:
        raise typer.Exit(FINDING)


def _print(checked: Checked) -> None:
    found = f"{checked.format} checkpoint" if checked.format else "no known checkpoint"
    print_facts({"path": f"{named(checked.root)}\n{found}"})
    console = stdout()
    console.print()
    shown = table("", "", "")
    for step in checked.steps:
        shown.add_row(step.name, f"[{_STYLES[step.state]}]{step.state}[/]", step.detail)
    print_block(shown)
    console.print()
    if checked.whole:
        left = [step.name for step in checked.steps if step.state == "skipped"]
        console.print(f"Nothing is wrong{'; not looked at: ' + ', '.join(left) if left else ''}.")


def _plain(checked: Checked) -> dict[str, Any]:
    return {
        "path": named(checked.root),
        "format": checked.format,
        "whole": checked.whole,
        "steps": [{"name": step.name, "state": step.state, "detail": step.detail} for step in checked.steps],
        "findings": [plain_error(finding) for finding in checked.findings],
    }


def plain_error(error: ShardweaveError) -> dict[str, str]:
    """An error as plain values."""
    return {
        "error": type(error).__name__,
        "rule": error.rule,
        "where": named(error.where),
        "equation": named(error.equation),
        "hint": error.hint,
    }
