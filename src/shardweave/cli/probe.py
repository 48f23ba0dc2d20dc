"""``shardweave probe``: the layout of a partition function, found by running it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardweave.cli import options
from shardweave.cli.common import parse_count, plural, print_facts, print_json, stdout
from shardweave.cli.expected import expected
from shardweave.errors import GeometryError, NotationError

if TYPE_CHECKING:
    from shardweave.layout import BufferRule, Dim, Layout, Sharded
    from shardweave.testing import Found

_MODEL = "A whole model"


def probe(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Called as FUNCTION(*tensors, rank, tp), it gives a rank's array; with --config as "
            "FUNCTION(tensors, rank, tp), both by name.",
        ),
    ],
    tp: Annotated[int, typer.Option("--tp", parser=parse_count, metavar="N", help="The number of ranks.")],
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape", metavar="[NAME=]64,16", help="The shape of its tensor; once for each of several."
        ),
    ] = None,
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
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the layout there, for convert --layout FILE."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="CONFIG.json",
            exists=True,
            help="Probe all tensors of this model, a layer at a time.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    sampled: Annotated[
        bool,
        typer.Option(
            "--sampled",
            help="Run the first and the last of layers that have the same tensors, and take the others to be "
            "like them.",
            rich_help_panel=_MODEL,
        ),
    ] = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Run a partition function on numbered tensors and say who got what.

    The function is not read or trusted; what it did with each element is read
    back. With --expect, exits with 1 where that is not what was declared.
    """
    # As for ``python -m``: modules of the current folder can be named.
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - a string is wanted
    how: dict[str, Any] = {"dtype": dtype, "arrays": arrays, "pad": pad, "duplicates": duplicates}
    _check(shape, config, only_shape={"--expect": expect is not None, "--flat": flat}, sampled=sampled)
    if config is not None:
        _probe_model(function, config, tp, out, as_json=as_json, sampled=sampled, **how)
        return
    from shardweave.testing import expect as must_be
    from shardweave.testing import probe_function

    shapes = _shapes(shape or [])
    declared = (
        None if expect is None else expected(expect, {n: sizes[dim] for n, sizes in shapes.items()}, tp)
    )
    found = probe_function(function, shape=shapes, tp=tp, flat=flat, **how)
    if out is not None:
        _write(found.layout(), out)
    if as_json:
        print_json(_plain(found))
    else:
        stdout().print(str(found), markup=False, soft_wrap=True)
    if declared is not None:
        must_be(found, declared, dim=dim)
        if not as_json:
            stdout().print("\nAs expected.")


def _check(
    shape: list[str] | None, config: Path | None, *, only_shape: dict[str, bool], sampled: bool
) -> None:
    given = [flag for flag, said in only_shape.items() if said]
    if bool(shape) == (config is not None):
        raise GeometryError(
            "a probe is of tensors of given shapes, or of all tensors of a model",
            equation="--shape and --config" if shape else "neither --shape nor --config",
            hint="write --shape 64,16, or --config config.json",
        )
    if (config is not None and given) or (config is None and sampled):
        flags = given if config is not None else ["--sampled"]
        raise GeometryError(
            f"a probe with {'--config' if config is not None else '--shape'} has the options that go with it",
            equation=", ".join(flags),
            hint=f"leave out {', '.join(flags)}",
        )


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


# --- a whole model ------------------------------------------------------------------------------


def _probe_model(
    function: str, config: Path, tp: int, out: Path | None, *, as_json: bool, **how: Any
) -> None:
    from shardweave.models import from_config
    from shardweave.testing import probe_model
    from shardweave.testing.probe import function_named

    model = from_config(config)
    layout = probe_model(function_named(function), model, ranks=tp, name=function.rpartition(":")[2], **how)
    if out is not None:
        _write(layout, out)
    if as_json:
        print_json({"layout": str(layout), "out": None if out is None else str(out)})
        return
    print_facts(
        {
            "model": f"{model.family}, {plural(model.numel, 'parameter')}",
            "ranks": f"{tp}",
            "arrays": plural(len(layout.stored()), "array") + " of all ranks",
            **({} if out is None else {"written": str(out)}),
        }
    )
    stdout().print()
    for rule in layout.rules:
        stdout().print(f"{rule.name}{_said(rule, layout)}", markup=False, highlight=False, soft_wrap=True)
        stdout().print(f"    {_held(rule)}", markup=False, highlight=False, soft_wrap=True, style="dim")


def _write(layout: Layout, out: Path) -> None:
    from shardweave.store.layout_file import write_layout

    write_layout(layout, out)


def _said(rule: BufferRule, layout: Layout) -> str:
    """What an array is of, where its name does not say it, and who else has it."""
    names = [part.tensor.name for part in rule.parts]
    of = ", ".join(part.label for part in rule.parts) if len(names) > 1 else names[0]
    said = "" if of == rule.name else f" of {of}"
    if layout.mesh.size > 1 and not rule.axes:
        return f"{said}, on all ranks"
    copies = [part.label or "copies" for part in rule.parts if part.replica]
    return f"{said}, shared: {', '.join(copies)}" if copies else said


def _held(rule: BufferRule) -> str:
    """The dims of a stored array in storage order; of the one that is cut, what each rank has."""
    assert rule.stacked is not None
    return " x ".join(_dim(rule.dims[d]) for d in rule.stacked) or "one element"


def _dim(dim: Dim | Sharded, most: int = 8) -> str:
    from shardweave.layout.buffer import table_of

    shown = [str(one) for one in table_of(dim)]
    if len(shown) == 1:
        return shown[0]
    return f"({' | '.join([*shown[:most], *(['...'] if len(shown) > most else [])])})"
