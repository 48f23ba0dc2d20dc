"""``shardweave refit status``: which version every receiver of a session serves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardweave.cli import options
from shardweave.cli.common import (
    FINDING,
    App,
    Verb,
    format_bytes,
    parse_seconds,
    plural,
    print_block,
    print_facts,
    print_json,
    printable,
    stdout,
    table,
)

if TYPE_CHECKING:
    from shardweave.refit.notes import Note, Planned
    from shardweave.refit.status import Status

refit = typer.Typer(
    name="refit",
    cls=App,
    help="Look at the refits between a trainer and its engines.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EVERY_S = 2.0
_MOST_ROWS = 64
"""Ranks that a table shows; those that are not as the others come first."""
_STEPS = ("hello", "seal", "stage", "verify", "derive", "vote", "commit")


@refit.command(cls=Verb)
def status(
    place: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT|FILE", help="The session's store: of a TCPStore, or the file of a FileStore."
        ),
    ],
    watch: Annotated[
        bool, typer.Option("--watch", help=f"Look again every {_EVERY_S:g} seconds, until Ctrl-C.")
    ] = False,
    prefix: Annotated[
        str,
        typer.Option("--prefix", metavar="NAME", help="Of a PrefixStore that the session was given, if any."),
    ] = "",
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            parser=parse_seconds,
            metavar="S",
            help="The longest wait for an answer, in seconds.",
        ),
    ] = "5",  # type: ignore[assignment]  # what the parser reads
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Say which version every receiver serves, and what each rank did last.

    Reads what ranks left in the store of their session, and writes nothing.
    Exits with 0 where all receivers serve one version and no last refit failed,
    else with 1.
    """
    from shardweave.refit.places import open_place
    from shardweave.refit.status import look

    store = open_place(place, prefix=prefix, timeout_s=timeout)
    while True:
        found = look(store)
        if as_json:
            print_json(_plain(found, place))
        else:
            _print(found, place)
        if not watch:
            break
        try:
            time.sleep(_EVERY_S)
        except KeyboardInterrupt:
            break
        if stdout().is_terminal:
            stdout().clear()
        store.refresh()
    if not found.is_well:
        raise typer.Exit(FINDING)


# --- for people ---------------------------------------------------------------------------------


def _print(found: Status, place: str) -> None:
    members, console = found.members, stdout()
    rows = {
        "session": f"{printable(place)}, {printable(members.transport)}, timeout {members.timeout_s:g} s",
        "publishers": _side(found, members.publishers),
        "receivers": _side(found, members.receivers),
    }
    if found.plans:
        rows["plan"] = "\n".join(map(_plan, found.plans.values()))
    if found.last is not None:
        rows["last turn"] = _last(found)
    rows["open turn"] = _open(found)
    print_facts(rows)
    console.print()
    print_block(_ranks(found))
    if any(note.seconds for note in found.notes.values()):
        console.print()
        print_block(_seconds(found))
    for rank in found.failed:
        note = found.notes[rank]
        offered = "" if note.offered is None else f", offered version {note.offered}"
        console.print(f"\nrank {rank}, turn {note.failed_turn}{offered}:", style="bold red")
        console.print(printable(note.error), markup=False, soft_wrap=True)
    for key, what in found.damaged.items():
        console.print(f"\nunreadable: {printable(key)}: {printable(what)}", style="yellow", markup=False)
    console.print()
    console.print(_verdict(found), style="bold green" if found.is_well else "bold red", markup=False)


def _side(found: Status, ranks: Sequence[int]) -> str:
    layouts = dict.fromkeys(
        printable(found.notes[rank].layout) or "?" for rank in ranks if rank in found.notes
    )
    said = "; ".join(list(layouts)[:4]) + (" ..." if len(layouts) > 4 else "")
    return f"{_numbers(ranks)}{f': {said}' if said else ''}"


def _numbers(ranks: Sequence[int]) -> str:
    """Ranks as stretches.

    >>> _numbers((0, 1, 2, 3, 8)), _numbers((5,)), _numbers(())
    ('ranks 0-3, 8', 'rank 5', 'none')
    """
    from shardweave.refit.notes import stretches

    found = [
        str(first) if count == 1 else f"{first}-{first + count - 1}" for first, count in stretches(ranks)
    ]
    more = f", ... {len(ranks)} in all" if len(found) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(found[:8])}{more}" if found else "none"


def _plan(planned: Planned) -> str:
    to = _numbers(range(planned.first_rank, planned.first_rank + min(planned.num_ranks, 1 << 20)))
    steps = f", {plural(planned.steps, 'buffer')} converted" if planned.steps else ""
    ratio = planned.bytes / planned.needed_bytes if planned.needed_bytes else 1.0
    return (
        f"to {to}: {planned.families:,} tensors, {planned.copies:,} copies, "
        f"{format_bytes(planned.bytes)}, {ratio:.3f} of what is needed{steps};\n"
        f"  the busiest rank sends {planned.send_imbalance:.2f} of the mean, "
        f"receives {planned.receive_imbalance:.2f}"
    )


def _last(found: Status) -> str:
    assert found.last is not None
    if found.last.error is None:
        return f"{found.turn - 1}, committed"
    again = ", and tried again" if found.last.kind == "again" else ""
    return f"{found.turn - 1}, ended by rank {found.last.rank}{again}: {printable(str(found.last.error))}"


def _open(found: Status) -> str:
    if not found.phase:
        return f"{found.turn}, nobody is in it yet"
    if not found.missing:
        return f"{found.turn}, every rank is ready"
    return f"{found.turn}, {found.phase}: waits for {_numbers(found.missing)}"


def _ranks(found: Status) -> Any:
    now = time.time()
    shown = table(">rank", "role", ">version", ">turn", ">tries", ">age", ">bytes", ">per second", "where")
    ranks = _first_those_that_differ(found)
    for rank in ranks[:_MOST_ROWS]:
        shown.add_row(str(rank), *_row(found.notes.get(rank), rank in found.members.receivers, now))
    if len(ranks) > _MOST_ROWS:
        shown.add_row("...", f"{len(ranks) - _MOST_ROWS} more; --json lists all")
    return shown


def _row(note: Note | None, receives: bool, now: float) -> tuple[str, ...]:
    from rich.text import Text

    role = "receiver" if receives else "publisher"
    if note is None:
        return (role, "-", "-", "-", "never", "-", "-", "")
    failed = bool(note.error)
    known = "?" if note.version is None and (failed or note.turn >= 0) else "-"
    version = str(note.version) if note.version is not None else known
    cells: list[Any] = [
        role,
        Text(version, style="bold red" if failed else "bold green" if note.version is not None else ""),
        "-" if note.turn < 0 else str(note.turn),
        str(note.tries or "-"),
        _ago(now - note.time),
        format_bytes(note.bytes_moved) if note.changed else "-",
        f"{format_bytes(note.bytes_per_s)}/s" if note.bytes_per_s else "-",
        Text(f"{printable(note.host, 40)} {note.pid}", style="dim"),
    ]
    return tuple(cells)


def _seconds(found: Status) -> Any:
    steps = [step for step in _STEPS if any(step in note.seconds for note in found.notes.values())]
    shown = table(">rank", *(f">{step}" for step in steps), ">seconds")
    ranks = [rank for rank in _first_those_that_differ(found) if (n := found.notes.get(rank)) and n.seconds]
    for rank in ranks[:_MOST_ROWS]:
        seconds = found.notes[rank].seconds
        cells = (f"{seconds[step]:.3f}" if step in seconds else "" for step in steps)
        shown.add_row(str(rank), *cells, f"{sum(seconds.values()):.3f}")
    return shown


def _first_those_that_differ(found: Status) -> list[int]:
    """All ranks, in order; where there are many, those that failed or serve what few serve come first."""
    ranks = sorted({*found.members.publishers, *found.members.receivers})
    if len(ranks) <= _MOST_ROWS:
        return ranks
    versions = found.versions
    size = {rank: len(group) for group in versions.values() for rank in group}
    failed = set(found.failed)
    return sorted(ranks, key=lambda rank: (rank not in failed, size.get(rank, len(ranks)), rank))


def _ago(seconds: float) -> str:
    """How long ago, in one unit.

    >>> _ago(3.2), _ago(250), _ago(7380), _ago(200_000), _ago(-1)
    ('3 s', '4 min', '2 h', '2 d', '0 s')
    """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _verdict(found: Status) -> str:
    versions, count = found.versions, len(found.members.receivers)
    if found.one_version is not None:
        who = "The receiver serves" if count == 1 else f"All {count:,} receivers serve"
        failed = f"; the last refit failed on {_numbers(found.failed)}" if found.failed else ""
        damaged = f"; {plural(len(found.damaged), 'note')} cannot be read" if found.damaged else ""
        return f"{who} version {found.one_version}{failed}{damaged}."
    if set(versions) == {None}:
        return "No receiver is known to serve a version."
    told = [
        f"{'none known' if version is None else f'version {version}'} on {_numbers(ranks)}"
        for version, ranks in sorted(versions.items(), key=lambda item: (item[0] is None, item[0]))
    ]
    return f"Not one version: {'; '.join(told[:8])}{'; ...' if len(told) > 8 else ''}."


# --- for programs -------------------------------------------------------------------------------


def _plain(found: Status, place: str) -> dict[str, Any]:
    import msgspec

    from shardweave.cli.check import plain_error

    last = found.last
    return {
        "place": place,
        "well": found.is_well,
        "version": found.one_version,
        "publishers": list(found.members.publishers),
        "receivers": list(found.members.receivers),
        "transport": found.members.transport,
        "timeout_s": found.members.timeout_s,
        "plans": [msgspec.structs.asdict(planned) for planned in found.plans.values()],
        "last": None
        if last is None
        else {
            "turn": found.turn - 1,
            "outcome": last.kind,
            "rank": last.rank,
            "error": None if last.error is None else plain_error(last.error),
        },
        "open": {"turn": found.turn, "phase": found.phase, "missing": list(found.missing)},
        "ranks": [
            {"rank": rank, **msgspec.structs.asdict(note), "bytes_per_s": note.bytes_per_s}
            for rank, note in found.notes.items()
        ],
        "damaged": dict(found.damaged),
    }
