"""What ``--explain`` prints: a run that would be, on 100 columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardweave.cli.common import format_bytes, plural, print_facts, stdout, table

if TYPE_CHECKING:
    from rich.table import Table

    from shardweave.train.config import TrainConfig
    from shardweave.train.explain import Explained, Family
    from shardweave.train.memory import Memory


_WIDTH = 100
"""Columns that tables have also where a terminal is narrower: it breaks lines better than cells break."""


def print_explained(found: Explained, config: TrainConfig) -> None:
    """Print facts, groups, weights, stages and other ways to hold the weights."""
    print_facts(
        {
            "model": f"{found.family}, {plural(found.numel, 'parameter')}, {config.model.dtype}",
            "ranks": f"{found.mesh.size}",
            "mesh": str(found.mesh),
            "shares": found.shares,
            "step": f"{plural(config.batch.documents, 'document')} of at most "
            f"{plural(config.batch.sequence_length, 'token')}, {found.microbatches}",
            "full step": f"stages wait {found.bubble:.1%} of the time; attention on the busiest context rank "
            f"is {found.imbalance:.2f} of the mean",
        }
    )
    console = stdout()
    console.print()
    console.print(str(found.groups), markup=False, soft_wrap=True)
    _print_weights(found)
    _print_stages(found)
    _print_schemes(found)


def _print(shown: Table | str) -> None:
    console = stdout()
    console.width = max(console.width, _WIDTH)
    with console.capture() as captured:
        console.print(shown)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _print_weights(found: Explained) -> None:
    stdout().print()
    shown = table("weight", "whole", "on a rank", "cut", "shared", "copies", ">filled up")
    for each in found.families:
        shown.add_row(
            _short(each.name),
            _shape(each.whole),
            _shape(each.shape),
            " ".join(each.cut),
            " ".join(each.shared),
            " ".join((*each.copies, *(("ends",) if each.is_at_ends else ()))),
            _filled(each),
        )
    _print(shown)
    from rich.markup import escape

    for warning in found.warnings:
        _print(f"[bold yellow]warning:[/] {escape(_short(warning))}")
    if found.warnings:
        _print("[bold cyan]hint:[/] lower parallel.weight_multiple, or share over fewer ranks")


def _short(name: str) -> str:
    """A name, or a text with names, without what all have in common."""
    return name.replace("model.layers.*.", "*.").replace("model.", "").replace(".weight", "")


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _filled(each: Family) -> str:
    size = 1
    for dim in each.whole:
        size *= dim
    return f"{each.filled / size:.1%}" if each.filled else ""


_KINDS = (">weights", ">gradients", ">optimizer", ">whole", ">in all", ">sent")


def _bytes(of: Memory, sent: int) -> list[str]:
    """Cells of ``_KINDS``."""
    whole = of.wholes + of.whole_gradients
    sizes = (of.weights, of.gradients, of.masters + of.moments, whole, of.total, sent)
    return [format_bytes(size) for size in sizes]


def _print_stages(found: Explained) -> None:
    stdout().print()
    shown = table(">stage", ">ranks", "layers", *_KINDS)
    for stage in found.stages:
        first, last = stage.first_rank, stage.last_rank
        shown.add_row(
            str(stage.number),
            f"{first}-{last}" if last > first else str(first),
            stage.layers,
            *_bytes(stage.memory, stage.sent_bytes),
        )
    _print(shown)


def _print_schemes(found: Explained) -> None:
    if found.mesh.size == 1:
        return
    stdout().print()
    shown = table(f"a rank of stage {found.fullest}", ">shares", *_KINDS)
    for cost in found.costs:
        scheme = cost.scheme
        style = "bold" if scheme.is_this else None
        mark = "> " if scheme.is_this else "  "
        shown.add_row(
            f"{mark}{scheme.name}",
            str(scheme.parallel.num_shares),
            *_bytes(cost.memory, cost.sent_bytes),
            style=style,
        )
    _print(shown)
    for line in (
        "whole: the most of shared weights and their gradients that is whole at once",
        "sent: to other ranks in a full step, of experts about",
    ):
        stdout().print(line, style="dim")
