"""What all verbs share: errors and exit codes, sizes, tables, progress."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from shardweave import errors
from shardweave.cli.sources import any_copied, local, named

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FINDING, USAGE, STOPPED = 1, 2, 130

_USAGE_ERRORS = (
    errors.GeometryError,
    errors.MeshError,
    errors.CutError,
    errors.NotationError,
    errors.ExistsError,
    errors.JournalError,
    errors.MissingPackageError,
    errors.ConfigError,
)
"""What another command line would heal; every other error is about the data."""


def exit_code(error: errors.ShardweaveError) -> int:
    """2 where the command was wrong, 1 where the data is."""
    return USAGE if isinstance(error, _USAGE_ERRORS) else FINDING


# --- errors -------------------------------------------------------------------------------------


class App(TyperGroup):
    """The command itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options."""
        return _without_types_of_flags(super().get_params(ctx))


class Verb(TyperCommand):
    """A command that ends with an error text and an exit code.

    Its options ``--debug`` (a traceback too) and ``--cache`` (for sources at URLs) are read here.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options."""
        return _without_types_of_flags(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; errors become texts on stderr."""
        try:
            with local(ctx.params):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            lost = any_copied() and ctx.params["cache"] is None
            print_error(
                "stopped",
                hint="the copy of the source is gone; with --cache DIR the same command would go on"
                if lost
                else "run the same command to go on",
            )
            raise typer.Exit(STOPPED) from None
        except errors.ShardweaveError as error:
            _trace(ctx)
            print_finding(error)
            raise typer.Exit(exit_code(error)) from None
        except BrokenPipeError:
            raise
        except OSError as error:
            _trace(ctx)
            print_error(
                ": ".join(str(part) for part in (error.strerror or error, error.filename) if part),
                hint="put it right and run the same command again",
            )
            raise typer.Exit(FINDING) from None


def _without_types_of_flags(params: list[Any]) -> list[Any]:
    """A flag takes no value, so its help shows no type."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def _trace(ctx: Any) -> None:
    if ctx.params.get("debug"):
        traceback.print_exc()


def print_finding(error: errors.ShardweaveError) -> None:
    """An error as two lines on stderr."""
    print_error(
        ": ".join(part for part in (error.rule, error.where, error.equation) if part), hint=error.hint
    )


def print_error(text: str, *, hint: str) -> None:
    """``error: text`` and ``hint: hint``, each on its own line."""
    console = stderr()
    for word, style, rest in (("error:", "bold red", text), ("hint:", "bold cyan", hint)):
        console.print(f"[{style}]{word}[/]", end=" ")
        console.print(named(rest), markup=False, soft_wrap=True)


# --- output -------------------------------------------------------------------------------------


def stdout() -> Console:
    """The console for results. It honours NO_COLOR, FORCE_COLOR and COLUMNS."""
    return _console(sys.stdout)


def stderr() -> Console:
    """The console for progress and errors."""
    return _console(sys.stderr)


def _console(file: Any) -> Console:
    from rich.console import Console

    return Console(file=file, highlight=False, emoji=False)


def print_json(value: object) -> None:
    """One JSON object, alone on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def table(*columns: str, title: str = "") -> Table:
    """A table without lines. A column that begins with ``>`` is of numbers, one with ``~`` is muted."""
    from rich.table import Table

    made = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        title=title or None,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        show_header=any(column.strip(">~") for column in columns),
    )
    for column in columns:
        made.add_column(
            column.lstrip(">~"),
            justify="right" if column.startswith(">") else "left",
            style="dim" if column.startswith("~") else None,
            no_wrap=column.startswith(">"),
            overflow="fold",
        )
    return made


def print_block(shown: Any) -> None:
    """Print a table or a picture without the blanks that would fill its lines."""
    console = stdout()
    with console.capture() as captured:
        console.print(shown)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def print_facts(rows: Mapping[str, str]) -> None:
    """Names and values, one a line; further lines of a value are indented below it."""
    from rich.text import Text

    console, width = stdout(), max(map(len, rows)) + 2
    for name, value in rows.items():
        first, *more = value.split("\n")
        console.print(Text.assemble((name.ljust(width), "dim"), first), soft_wrap=True)
        for line in more:
            console.print(" " * width + line, markup=False, soft_wrap=True)


def starred(name: str) -> str:
    """The name of a family with its index dims as ``*``, as a shell would match its members.

    >>> starred("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight")
    'model.layers.*.mlp.experts.*.up_proj.weight'
    """
    return re.sub(r"\{\w+\}", "*", name)


def printable(text: str, most: int = 2000) -> str:
    r"""A text from elsewhere as it may be shown: escape sequences spelled out, and no more than so much.

    >>> printable("a\x1b[31mb"), printable("long", most=3)
    ('a\\x1b[31mb', 'lon...')
    """
    shown = text[: most + 1]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
    return shown if len(shown) <= most else f"{shown[:most]}..."


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names and how many more there are."""
    head = ", ".join(names[:most])
    return head if len(names) <= most else f"{head}, ... {len(names)} in all"


# --- sizes --------------------------------------------------------------------------------------

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**n for n, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}iB": 1024**n for n, prefix in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of a size.

    >>> parse_size("512MiB"), parse_size("5GB"), parse_size("1.5 KiB"), parse_size("4096")
    (536870912, 5000000000, 1536, 4096)
    """
    match = _SIZE.fullmatch(text.strip())
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise typer.BadParameter(f"{text!r} is no size; write 512MiB (2^20) or 5GB (10^9)")
    found = int(float(match[1]) * units[match[2].lower()]) if "." in match[1] else None
    found = int(match[1]) * units[match[2].lower()] if found is None else found
    if not found:
        raise typer.BadParameter(f"{text!r} is nothing")
    return found


def parse_count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or not int(text):
        raise typer.BadParameter(f"{text!r} is no whole number from 1")
    return int(text)


def parse_seconds(text: str) -> float:
    """A number of seconds, up to an hour.

    >>> parse_seconds("2.5")
    2.5
    """
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 3600:
        raise typer.BadParameter(f"{text!r} is no number of seconds above 0, up to 3600")
    return found


def format_bytes(count: float) -> str:
    """Bytes for people.

    >>> format_bytes(17), format_bytes(559616), format_bytes(5 * 10**9)
    ('17 B', '546.5 KiB', '4.7 GiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 1024 or unit == "TiB":
            break
    return f"{count:.1f} {unit}"


def plural(count: int, word: str) -> str:
    """``1 file``, ``2 files``, with thousands set apart.

    >>> plural(1, "file"), plural(12345, "array")
    ('1 file', '12,345 arrays')
    """
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


# --- progress -----------------------------------------------------------------------------------


@contextmanager
def progress(
    what: str, total: int | None = None, *, quiet: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on stderr, with rate and time left; nothing where stderr is no terminal.

    Yields:
        To be told ``(bytes done, bytes in all)``, from any thread.
    """
    console = stderr()
    wanted = console.is_terminal and not quiet
    if not wanted or {"NO_COLOR", "SHARDWEAVE_NO_PROGRESS"} & set(os.environ):
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeLeft(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)
