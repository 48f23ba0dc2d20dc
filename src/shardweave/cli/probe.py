"""``shardweave probe``: the layout of a partition function, found by running it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardweave.cli import options
from shardweave.cli.common import parse_count, print_json, stdout
from shardweave.cli.expected import expected
from shardweave.errors import NotationError

if TYPE_CHECKING:
    from shardweave.testing import Found


def probe(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION", help="Called as FUNCTION(*tensors, rank, tp); gives a rank's array."
        ),
    ],
    shape: Annotated[
        list[str],
        typer.Option(
            "--shape", metavar="[NAME=]64,16", help="The shape of its tensor; once for each of several."
        ),
    ],
    tp: Annotated[int, typer.Option("--tp", parser=parse_count, metavar="N", help="The number of ranks.")],
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="DIMS|RULE",
            help="What ranks shall hold of the dim that is cut: '[0:16] | [16:32]', or a rule such as "
            "megatron:qkv, vllm:qkv or deepspeed:NAME.",
        ),
    ] = None,
    dim: Annotated[int, typer.Option("--dim", metavar="D", help="The dim that --expect is about.")] = 0,
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="Of the markers.")] = "int64",
    arrays: Annotated[str, typer.Option("--arrays", metavar="numpy|torch", help="Kind of array.")] = "torch",
    pad: Annotated[
        float | None, typer.Option("--pad", metavar="VALUE", help="The value of padding, such as 0 or nan.")
    ] = None,
    duplicates: Annotated[
        bool, typer.Option("--duplicates", help="A rank may hold an element twice.")
    ] = False,
    flat: Annotated[
        bool, typer.Option("--flat", help="Say what is no product of dims by flat indices.")
    ] = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Run a partition function on numbered tensors and say who got what.

    The function is not read or trusted; what it did with each element is read
    back. With --expect, exits with 1 where that is not what was declared.
    """
    from shardweave.testing import expect as must_be
    from shardweave.testing import probe_function

    # As for ``python -m``: modules of the current folder can be named.
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - a string is wanted
    shapes = _shapes(shape)
    declared = (
        None if expect is None else expected(expect, {n: sizes[dim] for n, sizes in shapes.items()}, tp)
    )
    found = probe_function(
        function,
        shape=shapes,
        tp=tp,
        dtype=dtype,
        arrays=arrays,
        pad=pad,
        duplicates=duplicates,
        flat=flat,
    )
    if as_json:
        print_json(_plain(found))
    else:
        stdout().print(str(found), markup=False, soft_wrap=True)
    if declared is not None:
        must_be(found, declared, dim=dim)
        if not as_json:
            stdout().print("\nAs expected.")


def _shapes(texts: list[str]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, sizes = text.rpartition("=")
        try:
            shapes[name] = tuple(int(size) for size in sizes.split(","))
        except ValueError:
            raise NotationError(
                "a shape is numbers",
                equation=f"--shape {text!r}",
                hint="write --shape 64,16 or --shape q=64,16",
            ) from None
    if len(shapes) != len(texts) or (len(shapes) > 1 and "" in shapes):
        raise NotationError(
            "each of several tensors has a name of its own",
            equation=f"--shape {' --shape '.join(texts)}",
            hint="write --shape q=64,16 --shape k=16,16",
        )
    return shapes


def _plain(found: Found) -> dict[str, Any]:
    return {
        "tensors": {name: list(shape) for name, shape in found.sources},
        "ranks": [None if dims is None else [str(dim) for dim in dims] for dims in found.ranks],
        "order": list(found.order),
        "cut": list(found.cut),
        "flat": found.flat,
    }
