"""The command ``shardweave``: one module for each verb.

Verbs import what they need when they run, so that ``--help`` answers at once: it loads neither
torch nor numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command

from shardweave import __version__
from shardweave.cli import check, convert, diff, lint, plan, probe, refit, show, tokenize, train
from shardweave.cli.common import USAGE, App, Verb, print_error

__all__ = ["app", "main"]

app = typer.Typer(
    name="shardweave",
    cls=App,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 a finding or a mismatch, 2 wrong usage, 130 stopped.",
)
app.command(cls=Verb)(convert.convert)
app.command(cls=Verb)(plan.plan)
app.command(cls=Verb)(check.check)
app.command(cls=Verb)(diff.diff)
app.command(cls=Verb)(show.show)
app.command(cls=Verb)(probe.probe)
app.command(cls=Verb, context_settings=train.ANY_SETTING)(train.train)
app.command(cls=Verb, context_settings=train.ANY_SETTING)(train.evaluate)
app.command(cls=Verb)(tokenize.tokenize)
app.add_typer(refit.refit)
app.add_typer(lint.lint)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardweave {__version__}")
        raise typer.Exit


@app.callback()
def shardweave(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Which element of which tensor lives where: convert, prove and compare sharded checkpoints."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; those of the process by default.
    """
    command: Any = get_command(app)
    try:
        result = command.main(args=argv, prog_name="shardweave", standalone_mode=False)
    except Exception as error:
        # Typer and click keep their usage errors in places that change with their versions.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "shardweave"
        text = error.format_message()
        if text:
            print_error(text.rstrip("."), hint=f"{path} --help lists what there is")
        return USAGE
    sys.stdout.flush()
    return result if isinstance(result, int) else 0
