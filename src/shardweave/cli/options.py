"""Options that several verbs have, and the values that they make together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardweave.cli.common import parse_count, parse_size
from shardweave.cli.sides import KEYS_OF_DCP, keys_of
from shardweave.errors import GeometryError

if TYPE_CHECKING:
    from shardweave.convert import Geometry, Job, Zero
    from shardweave.layout import Layout
    from shardweave.store.torch_dcp import Keys

FORMATS: Mapping[str, str] = {
    "hf": "hf", "megatron": "megatron", "torch_dist": "megatron", "deepspeed": "deepspeed",
    "universal": "universal", "dcp": "dcp", "torch_dcp": "dcp", "native": "native", "ranks": "ranks",
}  # fmt: skip
"""Formats by the names that a command may give them."""

TARGETS = "hf, megatron (alias torch_dist), deepspeed, universal, dcp, native or ranks"
"""The formats for people."""
NO_CONFIG = "none"
"""What ``--config`` is given where nobody describes the model."""

_GEOMETRY, _DEEPSPEED = "Megatron target", "DeepSpeed target"
_OF_DEEPSPEED = ("zero", "dp", "tp", "tp_grain")
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def parse_dtype(text: str) -> str:
    """A dtype that weights can be rounded to; integers and 8-bit floats would need scales.

    >>> parse_dtype("bfloat16")
    'bfloat16'
    """
    if text not in _DTYPES:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(_DTYPES)}")
    return text


def parse_config(text: str) -> Path:
    """A path that exists, or ``none``; a file of that name is ``./none``.

    >>> parse_config("none")
    PosixPath('none')
    """
    if text == NO_CONFIG:
        return Path(NO_CONFIG)
    if not Path(text).exists():
        raise typer.BadParameter(f"path {text!r} does not exist")
    return Path(text).absolute() if Path(text) == Path(NO_CONFIG) else Path(text)


def parse_stage(text: str) -> int:
    """A stage of ZeRO that has state of its own."""
    if text not in ("1", "2", "3"):
        raise typer.BadParameter(f"{text!r} is not one of 1, 2, 3")
    return int(text)


def _degree(flag: str, text: str, panel: str = _GEOMETRY) -> Any:
    return typer.Option(flag, parser=parse_count, metavar="N", help=text, rich_help_panel=panel)


To = Annotated[
    str,
    typer.Option("--to", metavar="FORMAT", help=f"{TARGETS}."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="CONFIG.json",
        parser=parse_config,
        help="The model's Hugging Face config, or the folder that holds it. Default: the one in the source. "
        f"{NO_CONFIG}: the tensors are those that the source names.",
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
Tp = Annotated[int | None, _degree("--tp", "Tensor parallel degree; of a DeepSpeed target too.")]
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
Zero_ = Annotated[
    int | None,
    typer.Option(
        "--zero",
        parser=parse_stage,
        metavar="1|2|3",
        help="ZeRO stage of the job. Default: 1.",
        rich_help_panel=_DEEPSPEED,
    ),
]
Dp = Annotated[
    int | None, _degree("--dp", "Data-parallel ranks, the only number that loads it. Default: 1.", _DEEPSPEED)
]
TpGrain = Annotated[
    int | None, _degree("--tp-grain", "tp_grain_size of the DeepSpeed config. Default: 1.", _DEEPSPEED)
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="PATTERN",
        help="A part of the model: tensors whose names match, with their states, such as "
        "'model.layers.3.*' or '*.experts.{0..7}.*'. May be given several times.",
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        parser=parse_dtype,
        metavar="DTYPE",
        help="Store all weights in this dtype, rounding where it is narrower. With --zero 3: what the run "
        "computes in; masters are stored.",
    ),
]
StackedExperts = Annotated[
    bool, typer.Option("--stacked-experts", help="hf: the experts of a layer as one array.")
]
WeightsOnly = Annotated[bool, typer.Option("--weights-only", help="Leave out the state of the optimizer.")]
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
            hint="convert --help lists what each of them takes",
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
        GeometryError: ``stages`` is no list.
    """
    from shardweave.convert import Geometry

    if to != "megatron":
        return None
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
    return Geometry(**values) if values else None


def zero(
    to: str,
    *,
    dtype: str | None,
    zero: int | None,
    dp: int | None,
    tp: int | None,
    tp_grain: int | None,
) -> Zero | None:
    """The job of a DeepSpeed target; ``None`` where the target is none."""
    from shardweave.convert import Zero

    if to != "deepspeed":
        return None
    stage = zero or 1
    computes_in = dtype if stage == 3 else None
    return Zero(stage=stage, dp=dp or 1, tp=tp or 1, grain=tp_grain or 1, dtype=computes_in)


def _refuse_foreign(name: str, to: str, given: Mapping[str, Any]) -> None:
    """Refuse flags that a target has no use for."""
    of_deepspeed = set(_OF_DEEPSPEED)
    used = {"megatron": set(given) - (of_deepspeed - {"tp"}), "deepspeed": of_deepspeed}.get(name, set())
    flags = [
        f"--{key.replace('_', '-')}" for key, value in given.items() if value is not None and key not in used
    ]
    if not flags:
        return
    said, hint = {
        "megatron": (
            "a Megatron checkpoint loads at any number of data-parallel ranks",
            "or write --to deepspeed",
        ),
        "deepspeed": (
            "a DeepSpeed checkpoint is of a ZeRO stage and of data- and tensor-parallel ranks",
            "or write --to megatron",
        ),
        "ranks": ("a layout says what the shards of ranks are", "and give it with --to-layout FILE"),
    }.get(
        name,
        (
            f"a {'Hugging Face' if name == 'hf' else name} checkpoint stores whole tensors",
            "or write --to "
            + ("deepspeed" if of_deepspeed >= {_key(flag) for flag in flags} else "megatron"),
        ),
    )
    shown = ", ".join(flags)
    raise GeometryError(said, equation=f"--to {to} with {shown}", hint=f"leave out {shown}, {hint}")


def _key(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


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
    only: Sequence[str] | None = None,
    **given: Any,
) -> Job:
    """The conversion that a command asks for, decided and proved.

    Raises:
        GeometryError: A flag is given that the format does not have.
    """
    from shardweave.convert import prepare

    name, keys = format_named(to)
    _refuse_foreign(name, to, {**given, "stages": stages})
    of_deepspeed = {key: given.pop(key) for key in ("zero", "dp", "tp_grain")}
    job = zero(name, dtype=dtype, tp=given["tp"], **of_deepspeed)
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
        zero=job,
        dtype=None if job is not None and job.stage == 3 else dtype,
        stacked_experts=stacked_experts,
        max_file_bytes=max_file_bytes,
        weights_only=weights_only,
        only=only or (),
        layout=read_layout(layout),
        to_layout=read_layout(to_layout),
        keys=keys,
        settings=settings_of,
    )


def read_layout(file: Path | None) -> Layout | None:
    """The layout in a file; ``None`` where none is given."""
    if file is None:
        return None
    from shardweave.store import layout_file

    return layout_file.read_layout(file)


def settings_of(*given: Any) -> Any:
    """What reads the settings of an optimizer off a checkpoint that a run of shardweave saved."""
    from shardweave.train.interchange import settings_of  # brings torch

    return settings_of(*given)
