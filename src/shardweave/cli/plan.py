"""``shardweave plan``: what would be copied, counted before a byte moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardweave.cli import options
from shardweave.cli.common import (
    format_bytes,
    parse_count,
    plural,
    print_block,
    print_facts,
    print_json,
    starred,
    stdout,
    table,
)
from shardweave.cli.sides import NOTATION, layout_of
from shardweave.cli.sources import named, parse_source
from shardweave.errors import GeometryError

if TYPE_CHECKING:
    from shardweave.convert import Job
    from shardweave.layout import Layout
    from shardweave.plan import Cost, Plan


def plan(
    src: Annotated[
        Path | None,
        typer.Argument(
            metavar="SRC", parser=parse_source, help="A checkpoint: a folder, one file, or a URL of one."
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="TO", help=f"{options.TARGETS}; with --model a layout."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="CONFIG.json",
            exists=True,
            help="Plan between layouts of this model, without files.",
            rich_help_panel="Without files",
        ),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="LAYOUT",
            help=f"Where the weights are, {NOTATION}.",
            rich_help_panel="Without files",
        ),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-node",
            parser=parse_count,
            metavar="N",
            help="Tells bytes inside nodes from bytes between them.",
            rich_help_panel="Without files",
        ),
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option(
            "--load", metavar="plan.swp", exists=True, dir_okay=False, help="Prove and print a stored plan."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="plan.swp", help="Store the plan.")
    ] = None,
    config: options.Config = None,
    layout: options.LayoutFile = None,
    to_layout: options.ToLayout = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    ep: options.Ep = None,
    etp: options.Etp = None,
    vpp: options.Vpp = None,
    stages: options.Stages = None,
    spec: options.Spec = None,
    layer_keys: options.LayerKeys = None,
    vocab_divisor: options.VocabDivisor = None,
    zero: options.Zero_ = None,
    dp: options.Dp = None,
    tp_grain: options.TpGrain = None,
    only: options.Only = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            parser=options.parse_dtype,
            metavar="DTYPE",
            help="Of the weights in the target; with --model, of the weights on both sides.",
        ),
    ] = None,
    stacked_experts: options.StackedExperts = False,
    weights_only: options.WeightsOnly = False,
    max_file_size: options.MaxFileSize = "5GB",  # type: ignore[assignment]
    cache: options.Cache = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Count what would be copied; no weight is read or written.

    From a checkpoint: plan SRC --to megatron --tp 4. Between running jobs:
    plan --model CONFIG.json --from megatron:tp=8,pp=2 --to vllm:tp=4.
    """
    given = dict(tp=tp, pp=pp, ep=ep, etp=etp, vpp=vpp, spec=spec)  # noqa: C408 - names are the values
    given |= {"layer_keys": layer_keys, "vocab_divisor": vocab_divisor}
    given |= {"zero": zero, "dp": dp, "tp_grain": tp_grain}
    _check_one_source(src, model, from_, load, to, {**given, "stages": stages})
    if src is not None:
        job = options.prepared(
            src,
            to=to or "",
            config=config,
            layout=layout,
            to_layout=to_layout,
            stages=stages,
            dtype=dtype,
            stacked_experts=stacked_experts,
            max_file_bytes=max_file_size,
            weights_only=weights_only,
            only=only,
            **given,
        )
        found, report = job.plan, job_report(job)
    else:
        found = (
            _stored(load) if load is not None else _live(model, dtype, from_ or "", to or "", ranks_per_node)
        )
        report = live_report(found, ranks_per_node)
    if output is not None:
        from shardweave.plan import save

        save(found, output)
        report["stored"] = str(output)
    if as_json:
        print_json(report)
    else:
        print_report(report)


def _check_one_source(
    src: Path | None,
    model: Path | None,
    from_: str | None,
    load: Path | None,
    to: str | None,
    geometry: Mapping[str, Any],
) -> None:
    ways = [name for name, value in (("SRC", src), ("--model", model), ("--load", load)) if value is not None]
    missing = [] if to or load else ["--to"]
    if model is not None and from_ is None:
        missing.append("--from")
    flags = [f"--{key.replace('_', '-')}" for key, value in geometry.items() if value is not None]
    equation = ""
    if len(ways) != 1:
        equation = f"given {' and '.join(ways)}" if ways else "none of SRC, --model and --load is given"
    elif missing:
        equation = f"{ways[0]} without {' and '.join(missing)}"
    elif from_ is not None and model is None:
        equation = f"--from with {ways[0]}"
    elif flags and src is None:
        equation = f"{ways[0]} with {', '.join(flags)}"
    elif load is not None and to is not None:
        equation = "--load with --to"
    if equation:
        raise GeometryError(
            "a plan is of a checkpoint, of two layouts, or a stored one",
            equation=equation,
            hint="plan SRC --to FORMAT, --model CONFIG.json --from LAYOUT --to LAYOUT, or --load FILE",
        )


def _stored(path: Path) -> Plan:
    from shardweave.plan import load

    return load(path)


def _live(model: Path | None, dtype: str | None, src: str, dst: str, ranks_per_node: int | None) -> Plan:
    from shardweave.models import from_config
    from shardweave.plan import plan as planned

    assert model is not None
    described = from_config(model, dtype=dtype or "")
    return planned(
        layout_of(src, described),
        layout_of(dst, described),
        ranks_per_node=ranks_per_node,
        allow_casts="dtype=" in dst,
    )


# --- reports ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    tensor: str
    dtype: str
    boxes: int
    copies: int
    bytes: int


def _rows(plan: Plan) -> Iterator[_Row]:
    """One row a tensor, in the plan's order."""
    import numpy as np

    from shardweave.layout.dtype import itemsize

    found: dict[str, _Row] = {}
    for family in plan.families:
        src, dst = plan.src.rules[family.src_rule], plan.dst.rules[family.dst_rule]
        walked = [
            d
            for d in range(family.tensor.num_dims)
            if d not in (src.stacked or ()) or d not in (dst.stacked or ())
        ]
        arrays = np.prod(family.count[:, walked], axis=1)[family.box]
        row = found.get(family.tensor.name, _Row(family.tensor.name, dst.dtype, 0, 0, 0))
        found[family.tensor.name] = _Row(
            row.tensor,
            row.dtype,
            row.boxes + len(family.count),
            row.copies + int(arrays.sum()),
            row.bytes + int(family.numel[family.box].sum()) * itemsize(dst.dtype),
        )
    yield from found.values()


def _cost(found: Cost) -> dict[str, Any]:
    return {
        "bytes": found.num_bytes,
        "needed_bytes": found.needed_bytes,
        "local_bytes": found.local_bytes,
        "node_bytes": found.node_bytes,
        "world_bytes": found.world_bytes,
        "pairs": len(found.pairs),
        "copies": found.num_copies,
        "descriptors": found.num_descriptors,
        "send_imbalance": round(found.send_imbalance, 4),
        "receive_imbalance": round(found.receive_imbalance, 4),
        "peak_staging_bytes": found.peak_staging_bytes,
    }


def _families(plan: Plan) -> list[dict[str, Any]]:
    return [{name: getattr(row, name) for name in _Row.__slots__} for row in _rows(plan)]


def live_report(found: Plan, ranks_per_node: int | None = None) -> dict[str, Any]:
    """A plan between layouts, as plain values."""
    from shardweave.plan import cost

    return {
        "source": _side(found.src),
        "target": _side(found.dst),
        "ranks_per_node": ranks_per_node,
        "families": _families(found),
        "cost": _cost(cost(found, ranks_per_node=ranks_per_node)),
    }


def _side(layout: Layout) -> dict[str, Any]:
    return {
        "layout": layout.name,
        "mesh": str(layout.mesh),
        "ranks": layout.mesh.size,
        "first_rank": layout.mesh.offset,
        "buffers": len(layout.rules),
    }


def job_report(job: Job) -> dict[str, Any]:
    """A conversion that is decided, as plain values."""
    from shardweave.plan import cost
    from shardweave.store.safetensors import files_of

    source, wanted = job.source, job.target
    stored = list(source.stored.values())
    report: dict[str, Any] = {
        "source": {
            "path": named(source.manifest.root),
            "format": source.format,
            "family": source.model.family,
            "arrays": len(stored),
            "files": len(source.manifest.files),
            "bytes": sum(tensor.num_bytes for tensor in stored),
            "dtypes": sorted({tensor.dtype for tensor in stored}),
        },
        "target": {
            "format": wanted.format,
            "arrays": len(wanted.specs),
            "bytes": job.num_bytes,
            "dtypes": sorted({spec.dtype for spec in wanted.specs}),
            "max_file_bytes": wanted.max_file_bytes,
        },
        "part": part_report(job),
        "optimizer": optimizer_report(job),
        "families": _families(job.plan),
        "cost": _cost(cost(job.plan)),
    }
    if wanted.format == "hf":
        groups = files_of(wanted.specs, max_file_bytes=wanted.max_file_bytes)
        report["files"] = {name: sum(spec.num_bytes for spec in group) for name, group in groups.items()}
    return report


def part_report(job: Job) -> dict[str, Any] | None:
    """Which part of a model is converted, as plain values; ``None`` where it is a whole one."""
    if not job.source.only:
        return None
    tensors = sum(1 for tensor in job.source.model.tensors for _ in tensor.names())
    return {"only": [list(patterns) for patterns in job.source.only], "tensors": tensors}


def described_part(report: Mapping[str, Any] | None) -> dict[str, str]:
    """The same for people: a row, or none."""
    if report is None:
        return {}
    patterns = "\nof these ".join(", ".join(few) for few in report["only"])
    return {"part": f"{plural(report['tensors'], 'tensor')}: {patterns}"}


def optimizer_report(job: Job) -> dict[str, Any] | None:
    """What goes along of the state of an optimizer, as plain values; ``None`` where the source has none."""
    kept = job.kept
    if kept is None:
        return {"left_out": job.no_state} if job.no_state else None
    return {
        "weights": kept.num_weights,
        "states": dict(kept.states),
        "updates": list(kept.counts) if kept.counts is not None else None,
        "groups": kept.num_groups,
        "masters": kept.masters,
        "summary": [str(kept), kept.masters_said],
    }


def described_optimizer(report: Mapping[str, Any] | None) -> dict[str, str]:
    """The same for people: a row, or none."""
    if report is None:
        return {}
    said = report.get("summary") or [f"left out: {report['left_out']}"]
    return {"optimizer": "\n".join(said)}


# --- printing -----------------------------------------------------------------------------------

_FILES = dict.fromkeys(("megatron", "dcp"), "__*_0.distcp") | {"native": "rank_*.safetensors"}
"""What files are called whose number is not known beforehand; others are one for a weight or a rank."""


def print_report(report: Mapping[str, Any]) -> None:
    """A report of either kind, for people."""
    console = stdout()
    stored = "path" in report["source"]
    described = _described_files if stored else _described_ranks
    sides = {side: described(report[side]) for side in ("source", "target")}
    print_facts(
        {
            **sides,
            **described_part(report.get("part")),
            **described_optimizer(report.get("optimizer")),
        }
    )
    console.print()
    shown = table("tensor", ">boxes", ">copies", ">bytes")
    for row in report["families"]:
        counts = (f"{row['boxes']:,}", f"{row['copies']:,}", format_bytes(row["bytes"]))
        shown.add_row(starred(row["tensor"]), *counts)
    print_block(shown)
    console.print()
    print_facts(_costs(report, stored))


def _described_files(side: Mapping[str, Any]) -> str:
    path = f"{side['path']}\n" if "path" in side else ""
    files = f" in {plural(side['files'], 'file')}" if "files" in side else ""
    return (
        f"{path}{side['format']}, {plural(side['arrays'], 'array')}{files}, "
        f"{format_bytes(side['bytes'])} of {', '.join(side['dtypes'])}"
    )


def _described_ranks(side: Mapping[str, Any]) -> str:
    last = side["first_rank"] + side["ranks"] - 1
    ranks = f"ranks {side['first_rank']}..{last}" if side["ranks"] > 1 else f"rank {last}"
    mesh = f" as {side['mesh']}" if side["mesh"] else ""
    return f"{side['layout']}, {ranks}{mesh}"


def _costs(report: Mapping[str, Any], stored: bool) -> dict[str, str]:
    cost = report["cost"]
    ratio = cost["bytes"] / cost["needed_bytes"] if cost["needed_bytes"] else 1.0
    rows = {"bytes": f"{format_bytes(cost['bytes'])}, {ratio:.3f} of what the target needs"}
    if not stored:
        rows["  on one rank"] = format_bytes(cost["local_bytes"])
        if report["ranks_per_node"]:
            rows["  in a node"] = format_bytes(cost["node_bytes"])
            rows["  across nodes"] = format_bytes(cost["world_bytes"])
        else:
            rows["  between ranks"] = format_bytes(cost["node_bytes"] + cost["world_bytes"])
    rows["copies"] = f"{cost['copies']:,}, {cost['descriptors']:,} contiguous stretches"
    if not stored:
        rows["pairs of ranks"] = f"{cost['pairs']:,}"
        rows["busiest rank"] = (
            f"sends {cost['send_imbalance']:.2f} of the mean, receives {cost['receive_imbalance']:.2f}"
        )
        rows["most staged"] = f"{format_bytes(cost['peak_staging_bytes'])} on a rank"
    elif "files" in report:
        first, *more = report["files"]
        rows["files"] = f"{1 + len(more)}, from {first} on" if more else first
    elif report["target"]["format"] in _FILES:
        most = format_bytes(report["target"]["max_file_bytes"])
        rows["files"] = f"{_FILES[report['target']['format']]}, each of at most {most}"
    if "stored" in report:
        rows["stored"] = report["stored"]
    return rows
