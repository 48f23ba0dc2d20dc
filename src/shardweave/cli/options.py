"""Options that several verbs have, and the values that they make together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardweave.cli.common import parse_count, parse_size
from shardweave.cli.sides import KEYS_OF_DCP, keys_of
from shardweave.errors import GeometryError

if TYPE_CHECKING:
    from shardweave.convert import Geometry, Job
    from shardweave.layout import Layout
    from shardweave.store.torch_dcp import Keys

FORMATS: Mapping[str, str] = {
    "hf": "hf", "megatron": "megatron", "torch_dist": "megatron", "native": "native", "dcp": "dcp",
    "torch_dcp": "dcp", "ranks": "ranks",
}  # fmt: skip
"""Formats by the names that a command may give them."""

_GEOMETRY = "Megatron target"
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def parse_dtype(text: str) -> str:
    """A dtype that weights can be rounded to; integers and 8-bit floats would need scales.

    >>> parse_dtype("bfloat16")
    'bfloat16'
    """
    if text not in _DTYPES:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(_DTYPES)}")
    return text


def _degree(flag: str, text: str) -> Any:
    return typer.Option(flag, parser=parse_count, metavar="N", help=text, rich_help_panel=_GEOMETRY)


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="CONFIG.json",
        exists=True,
        help="The model's Hugging Face config, or the folder that holds it. Default: the one in the source.",
    ),
]
LayoutFile = Annotated[
    Path | None,
    typer.Option(
        "--layout",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="What the shards of ranks are, where a format does not say: what probe --out wrote.",
    ),
]
ToLayout = Annotated[
    Path | None,
    typer.Option(
        "--to-layout",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="The same for a target of shards of ranks.",
    ),
]
Tp = Annotated[int | None, _degree("--tp", "Tensor parallel degree.")]
Pp = Annotated[int | None, _degree("--pp", "Pipeline stages.")]
Ep = Annotated[int | None, _degree("--ep", "Expert parallel degree.")]
Etp = Annotated[int | None, _degree("--etp", "Expert tensor parallel degree; needed with --ep and --tp.")]
Vpp = Annotated[int | None, _degree("--vpp", "Virtual chunks a pipeline stage.")]
Stages = Annotated[
    str | None,
    typer.Option(
        "--stages",
        metavar="8,8,7,7",
        help="Layers of each stage and chunk, in layer order. Default: even.",
        rich_help_panel=_GEOMETRY,
    ),
]
Spec = Annotated[
    str | None,
    typer.Option(
        "--spec",
        metavar="te|local",
        help="The layer spec, which names some norms. Default: te.",
        rich_help_panel=_GEOMETRY,
    ),
]
LayerKeys = Annotated[
    str | None,
    typer.Option(
        "--layer-keys",
        metavar="KIND",
        help="auto, stacked, per_layer or singleton: how layers are keyed. Default: auto.",
        rich_help_panel=_GEOMETRY,
    ),
]
VocabDivisor = Annotated[
    int | None, _degree("--vocab-divisor", "The vocabulary is padded to a multiple of N * tp. Default: 128.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        parser=parse_dtype,
        metavar="DTYPE",
        help="Store all weights in this dtype, rounding where it is narrower.",
    ),
]
StackedExperts = Annotated[
    bool, typer.Option("--stacked-experts", help="hf: the experts of a layer as one array.")
]
WeightsOnly = Annotated[
    bool, typer.Option("--weights-only", help="native, dcp: leave out the state of the optimizer.")
]
MaxFileSize = Annotated[
    int,
    typer.Option(
        "--max-file-size", parser=parse_size, metavar="SIZE", help="Start another file beyond this."
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        file_okay=False,
        help="Keep the copy of a source at a URL there, for the next run. Default: it is removed.",
    ),
]
"""Read by the class of the command, not by the verb."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
"""Read by the class of the command, not by the verb."""


def format_named(text: str) -> tuple[str, Keys | None]:
    """The format that a text names, and the keys that it gives.

    >>> format_named("dcp:optim=optimizer")
    ('dcp', Keys(model='model', optim='optimizer', flat=False))

    Raises:
        GeometryError: There is none, or it takes no such keys.
    """
    name, _, rest = text.partition(":")
    if name not in FORMATS:
        raise GeometryError(
            "a checkpoint is written in a known format",
            equation=f"--to {text!r} is not one of {', '.join(FORMATS)}",
            hint="--to hf, --to megatron, --to native, --to dcp or --to ranks",
        )
    if not rest:
        return FORMATS[name], None
    if FORMATS[name] != "dcp":
        raise GeometryError(
            "a format is named without keys, but for dcp",
            equation=f"--to {text!r}",
            hint=f"write --to {name}",
        )
    from shardweave.store.torch_dcp import Keys

    return "dcp", Keys(**keys_of("dcp", rest, KEYS_OF_DCP, where=repr(text)))


def geometry(to: str, stages: str | None, **given: Any) -> Geometry | None:
    """The geometry of a Megatron target; ``None`` where nothing of it is given.

    Raises:
        GeometryError: Something is given for a format without geometry, or ``stages`` is no list.
    """
    from shardweave.convert import Geometry

    values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if stages is not None:
        try:
            values["stages"] = tuple(int(size) for size in stages.split(","))
        except ValueError:
            raise GeometryError(
                "the stages of a pipeline are numbers of layers",
                equation=f"--stages {stages!r}",
                hint="write --stages 8,8,7,7",
            ) from None
    if to != "megatron" and values:
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in values)
        raise GeometryError(
            f"a {'Hugging Face' if to == 'hf' else to} checkpoint stores whole tensors",
            equation=f"--to {to} with {flags}",
            hint=f"leave out {flags}, or write --to megatron",
        )
    return Geometry(**values) if values else None


def prepared(
    src: Path,
    *,
    to: str,
    config: Path | None,
    stages: str | None,
    dtype: str | None,
    stacked_experts: bool,
    max_file_bytes: int,
    weights_only: bool = False,
    layout: Path | None = None,
    to_layout: Path | None = None,
    **given: Any,
) -> Job:
    """The conversion that a command asks for, decided and proved."""
    from shardweave.convert import prepare

    name, keys = format_named(to)
    if name != "hf" and stacked_experts:
        raise GeometryError(
            "only Hugging Face targets choose how experts are stored here",
            equation=f"--to {to} with --stacked-experts",
            hint="choose --layer-keys for Megatron",
        )
    return prepare(
        src,
        to=name,
        config=config,
        geometry=geometry(name, stages, **given),
        dtype=dtype,
        stacked_experts=stacked_experts,
        max_file_bytes=max_file_bytes,
        weights_only=weights_only,
        layout=read_layout(layout),
        to_layout=read_layout(to_layout),
        keys=keys,
        settings=_settings_of,
    )


def read_layout(file: Path | None) -> Layout | None:
    """The layout in a file; ``None`` where none is given."""
    if file is None:
        return None
    from shardweave.store import layout_file

    return layout_file.read_layout(file)


def _settings_of(*given: Any) -> Any:
    from shardweave.train.interchange import settings_of  # brings torch

    return settings_of(*given)
