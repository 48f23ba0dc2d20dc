"""``shardweave diff``: two checkpoints compared as models."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardweave.cli import options
from shardweave.cli.common import (
    FINDING,
    format_bytes,
    listed,
    plural,
    print_block,
    print_facts,
    print_json,
    progress,
    starred,
    stdout,
    table,
)
from shardweave.cli.sources import named, parse_source

if TYPE_CHECKING:
    from shardweave.convert.diff import Comparison

_MOST = 10


def diff(
    left: Annotated[
        Path,
        typer.Argument(metavar="A", parser=parse_source, help="A checkpoint of any format, or a URL of one."),
    ],
    right: Annotated[Path, typer.Argument(metavar="B", parser=parse_source, help="The other.")],
    config: options.Config = None,
    config_a: Annotated[
        Path | None,
        typer.Option(
            "--config-a", metavar="CONFIG.json", parser=options.parse_config, help="Config of A alone."
        ),
    ] = None,
    config_b: Annotated[
        Path | None,
        typer.Option(
            "--config-b", metavar="CONFIG.json", parser=options.parse_config, help="Config of B alone."
        ),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave out the states of optimizers.")
    ] = False,
    cache: options.Cache = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Compare two checkpoints element by element, in any two formats.

    Bits are compared, so that NaNs and signed zeros count. Where both have the
    state of an optimizer, states, masters, updates and settings are compared too.
    Exits with 0 where the two hold the same, with 1 where they differ.
    """
    from shardweave.convert.diff import compare

    with progress("comparing", quiet=as_json) as tell:
        found = compare(
            left,
            right,
            left_config=config_a or config,
            right_config=config_b or config,
            weights_only=weights_only,
            settings=options.settings_of,
            progress=tell,
        )
    if as_json:
        print_json(_plain(left, right, found))
    else:
        _print(left, right, found)
    if not found.equal:
        raise typer.Exit(FINDING)


def _plain(left: Path, right: Path, found: Comparison) -> dict[str, Any]:
    return {
        "a": named(left),
        "b": named(right),
        "equal": found.equal,
        "compared": {
            "tensors": found.num_tensors,
            "states": found.num_states,
            "bytes": found.num_bytes,
            "as_masters": list(found.as_masters),
        },
        "has_state": {"a": found.has_state[0], "b": found.has_state[1]},
        "missing": list(found.missing),
        "extra": list(found.extra),
        "dtypes": {name: {"a": a, "b": b} for name, (a, b) in found.dtypes.items()},
        "shapes": {name: {"a": list(a), "b": list(b)} for name, (a, b) in found.shapes.items()},
        "updates": {name: {"a": a, "b": b} for name, (a, b) in found.counts.items()},
        "settings": [
            {"setting": one.name, "a": one.left, "b": one.right, "weights": list(one.weights)}
            for one in found.settings
        ],
        "differences": [
            {
                "tensor": name,
                "elements": found.num_elements[name],
                "index": list(first.index),
                "a": {"key": first.left_key, "word": first.left, "value": _json_number(first.left, dtype)},
                "b": {"key": first.right_key, "word": first.right, "value": _json_number(first.right, dtype)},
            }
            for name, first in found.first.items()
            for dtype in [found.stored[name]]
        ],
    }


def _json_number(word: str, dtype: str) -> float | int | bool | str:
    """A number as JSON has it; what JSON has no number for is text."""
    from shardweave.convert.diff import value_of

    value = value_of(word, dtype)
    return value if isinstance(value, int) or (isinstance(value, float) and isfinite(value)) else str(value)


def _print(left: Path, right: Path, found: Comparison) -> None:
    from shardweave.convert.diff import value_of

    console = stdout()
    print_facts({"a": named(left), "b": named(right)})
    console.print()
    states = f", {plural(found.num_states, 'state')} of weights among them" if found.num_states else ""
    tensors = f"{plural(found.num_tensors, 'tensor')}{states}"
    rows = {"compared": f"{tensors}, {format_bytes(found.num_bytes)}, bit by bit"}
    for a, b in sorted(set(found.as_masters.values())):
        rows["masters"] = f"weights are in {a} in a and in {b} in b: compared in full precision"
    if found.has_state[0] != found.has_state[1]:
        rows["optimizer"] = f"only {'a' if found.has_state[0] else 'b'} has its state; not compared"
    if found.missing:
        rows["only in a"] = f"{plural(len(found.missing), 'tensor')}: {listed(found.missing)}"
    if found.extra:
        rows["only in b"] = f"{plural(len(found.extra), 'tensor')}: {listed(found.extra)}"
    for name, (a, b) in found.dtypes.items():
        rows[f"{starred(name)}"] = f"{a} in a, {b} in b; values not compared"
    for name, shapes in found.shapes.items():
        rows[f"{starred(name)}"] = f"{shapes[0]} in a, {shapes[1]} in b; values not compared"
    if found.counts:
        name, counts = next(iter(found.counts.items()))
        rows["updates"] = (
            f"{plural(len(found.counts), 'weight')}, first {name}: {counts[0]:,} in a, {counts[1]:,} in b"
        )
    if found.settings:
        rows["settings"] = "\n".join(
            f"{one.name}: {one.left} in a, {one.right} in b, of {plural(len(one.weights), 'weight')}"
            for one in found.settings
        )
    if found.first:
        elements = sum(found.num_elements.values())
        rows["different"] = f"{plural(len(found.first), 'tensor')}, {plural(elements, 'element')}"
    print_facts(rows)
    if found.equal:
        console.print("\nThe two hold the same.")
        return
    if not found.first:
        return
    console.print()
    name, first = next(iter(found.first.items()))
    dtype = found.stored[name]
    print_facts(
        {
            "first": f"{name}{list(first.index)}, {dtype}",
            "  in a": f"{value_of(first.left, dtype)} ({first.left}) under {first.left_key}",
            "  in b": f"{value_of(first.right, dtype)} ({first.right}) under {first.right_key}",
        }
    )
    console.print()
    shown = table("tensor", ">elements", ">first at")
    for name, first in list(found.first.items())[:_MOST]:
        shown.add_row(name, f"{found.num_elements[name]:,}", str(list(first.index)))
    print_block(shown)
    if len(found.first) > _MOST:
        console.print(f"... and {plural(len(found.first) - _MOST, 'tensor')} more; --json lists all")
