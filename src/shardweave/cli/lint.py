"""``shardweave lint``: checks of anybody's code, a module for each."""

from __future__ import annotations

import typer

from shardweave.cli import lint_constructors, lint_groups, lint_paired
from shardweave.cli.common import App, Verb

__all__ = ["lint"]

lint = typer.Typer(
    name="lint",
    cls=App,
    help="Check anybody's code for global process groups, and compare its test runs.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
lint.command(cls=Verb)(lint_groups.groups)
lint.command(cls=Verb)(lint_constructors.constructors)
lint.command(cls=Verb)(lint_paired.paired)
