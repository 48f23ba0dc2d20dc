"""``shardweave show``: pictures of who holds what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardweave.cli import options
from shardweave.cli.common import print_block, stderr, stdout
from shardweave.cli.sides import NOTATION, layout_of
from shardweave.cli.sources import parse_source
from shardweave.errors import GeometryError

if TYPE_CHECKING:
    from shardweave.layout import Layout
    from shardweave.models import Model


def show(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH|CONFIG.json",
            parser=parse_source,
            help="A checkpoint, a model's config, or a URL of one.",
        ),
    ],
    as_: Annotated[
        str | None,
        typer.Option("--as", metavar="LAYOUT", help=f"Lay the model out like this: {NOTATION}."),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="LAYOUT", help="Where it goes from there, with --as.")
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(
            "--select", metavar="NAME", help="A buffer or tensor, or a part of a name, such as qkv."
        ),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE.svg", help="Write the picture there instead.")
    ] = None,
    config: options.Config = None,
    cache: options.Cache = None,
    debug: options.Debug = False,
) -> None:
    """Draw which ranks hold which rows, fused weights too.

    A checkpoint is drawn as it is stored; with --as, as ranks would hold it;
    with --as and --to, where every row goes.
    """
    from shardweave.plan import plan
    from shardweave.show import svg as pages
    from shardweave.show import text

    model, stored = _model(path, config, as_ is None)
    layout = layout_of(as_, model) if as_ is not None else stored
    if layout is None:
        raise GeometryError(
            "a config alone has no ranks",
            equation="neither a checkpoint nor --as is given",
            hint="say how the model is laid out: --as megatron:tp=4,pp=2",
        )
    head_dim = next((block.sizes["head_dim"] for block in model.of("attention")), 0)
    how: dict[str, Any] = {"select": select, "head_dim": head_dim}
    if svg is None:
        how["width"] = stdout().width
    drawer: Any = text if svg is None else pages
    if to is None:
        picture = drawer.layout_picture(layout, **how)
    else:
        planned = plan(layout, layout_of(to, model), allow_casts="dtype=" in to)
        picture = drawer.plan_picture(planned, **how)
    if svg is None:
        print_block(picture)
    else:
        svg.write_text(picture, encoding="utf-8")
        stderr().print(f"drawn to {svg}", markup=False, soft_wrap=True)


def _model(path: Path, config: Path | None, checkpoint: bool) -> tuple[Model, Layout | None]:
    """The model at a path, and how it is stored there where it is a checkpoint."""
    from shardweave.convert import open_checkpoint
    from shardweave.models import from_config

    folder_of_config = path.is_dir() and not checkpoint and (path / "config.json").is_file()
    if path.suffix == ".json" or folder_of_config:
        # A picture is the same in every dtype, and many configs name none.
        return from_config(path, dtype="bfloat16"), None
    found = open_checkpoint(path, config=config)
    return found.model, found.layout
