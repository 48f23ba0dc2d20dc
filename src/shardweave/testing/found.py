"""What a probe found: the dims of every rank, and whether they are the declared ones."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardweave.errors import ProbeError
from shardweave.layout import (
    PAD,
    Box,
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Run,
    Sharded,
    Tensor,
    flat_boxes,
    whole,
)
from shardweave.layout.run import LABEL
from shardweave.testing.markers import Shape


@dataclass(frozen=True)
class Found:
    """Which elements of which tensors each rank holds, and where.

    Attributes:
        sources: Name and shape of each tensor that is held.
        ranks: For each rank its dims, in the order of the tensor's dims; ``None`` where it has no
            array. With ``flat`` one dim, over flat row-major indices.
        order: The tensor's dims in storage order; not ascending where the array is transposed.
        flat: Whether some result is no product of dims, so that all are given flat.
        aliased: The ranks whose array shares memory with the tensor that it was cut from.
        name: What a loader calls the array.
    """

    sources: tuple[tuple[str, Shape], ...]
    ranks: tuple[tuple[Dim, ...] | None, ...]
    order: tuple[int, ...]
    flat: bool = False
    aliased: tuple[int, ...] = ()
    name: str = "array"

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the tensors in the dims: ``""`` for a single one, else words made of the names."""
        return labels_of([name for name, _ in self.sources])

    @property
    def cut(self) -> tuple[int, ...]:
        """The dims that are not the same on all ranks, or not whole."""
        held = [dims for dims in self.ranks if dims is not None]
        return tuple(d for d in range(len(self.order)) if any(dims[d] != self._whole(d) for dims in held))

    def _whole(self, d: int) -> Dim:
        size = math.prod(self.sources[0][1]) if self.flat else self.sources[0][1][d]
        return whole(size)

    def boxes(self, rank: int) -> list[tuple[str, Box]]:
        """What a rank holds, as boxes of each tensor by name, in storage order of the tensor's dims."""
        dims = self.ranks[rank]
        boxes: list[tuple[str, Box]] = []
        for label, (name, shape) in zip(self.labels, self.sources, strict=True):
            if dims is None:
                continue
            columns = [
                [run for run in dim.runs if run.label == (label if dim.labels != ("",) else "")]
                for dim in dims
            ]
            if self.flat:
                for run in columns[0]:
                    stretches = (
                        [(run.start, run.count)] if run.step == 1 else [(i, 1) for i in range(*_ends(run))]
                    )
                    boxes += [
                        (name, box) for start, n in stretches for box in flat_boxes(shape, start, start + n)
                    ]
            else:
                boxes += [
                    (name, Box(tuple(range(*_ends(run)) for run in runs)))
                    for runs in itertools.product(*columns)
                ]
        return boxes

    def layout(self, name: str = "probed", *, axis: str = "tp", dtype: str = "float32") -> Layout:
        """The layout that was found, on a mesh of one axis.

        Elements that two ranks were found to hold are declared replicas.

        Raises:
            ProbeError: The arrays are no product of dims, or more than one dim is cut along the axis.
        """
        if self.flat:
            raise ProbeError(
                "the buffers of a layout are products of dims",
                equation="what was found is flat indices",
                hint="read boxes() of each rank, or describe the flat buffer and what lies below it apart",
            )
        columns = [[None if dims is None else dims[d] for dims in self.ranks] for d in range(len(self.order))]
        same = [next((dim for dim in column if dim is not None), Dim()) for column in columns]
        varying = [d for d, column in enumerate(columns) if any(dim not in (None, same[d]) for dim in column)]
        if len(varying) > 1:
            raise ProbeError(
                "a mesh axis cuts one dim",
                where=f"axis {axis!r}",
                equation=f"dims {varying} differ between ranks",
                hint="probe each axis on its own, with the others at one coordinate",
            )
        rule_dims: list[Dim | Sharded] = [*same]
        shared = set[str]()
        # A rank without an array holds nothing of the dim that is cut.
        for d in varying or ([0] if None in self.ranks else []):
            cut = tuple(dim or Dim() for dim in columns[d])
            rule_dims[d] = Sharded((axis,), cut)
            held = Counter(element for dim in cut for element in dim if element[0] is not PAD)
            shared = {label or "" for (label, _), times in held.items() if times > 1}
        parts = tuple(
            Part(Tensor(source or "tensor", shape, dtype), label, replica=label in shared or "" in shared)
            for label, (source, shape) in zip(self.labels, self.sources, strict=True)
        )
        mesh = Mesh(((axis, len(self.ranks)),))
        return Layout(name, mesh, (BufferRule(self.name, parts, tuple(rule_dims), stacked=self.order),))

    def __str__(self) -> str:
        lines = []
        for rank, dims in enumerate(self.ranks):
            if dims is None:
                lines.append(f"rank {rank}: nothing")
            else:
                said = " x ".join(str(dims[d]) for d in self.order)
                lines.append(f"rank {rank}: {'flat ' if self.flat else ''}{said}")
        if tuple(sorted(self.order)) != self.order:
            lines.append(f"stored in the order of dims {', '.join(map(str, self.order))}")
        return "\n".join(lines)


# --- comparing ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which a found layout is not the declared one.

    Attributes:
        rank: The rank.
        dim: The dim of the tensor, or ``None`` where the arrays differ as such.
        position: Position in the dim, or ``None``.
        expected, got: What was declared and what was found there.
    """

    rank: int
    dim: int | None
    position: int | None
    expected: str
    got: str

    def __str__(self) -> str:
        at = "" if self.dim is None else f", dim {self.dim}"
        at += "" if self.position is None else f", position {self.position}"
        return f"rank {self.rank}{at}: expected {self.expected}, got {self.got}"


Declared = Found | Layout | Sharded | Sequence[Dim]


def compare(found: Found, declared: Declared, *, dim: int = 0) -> Difference | None:
    """The first difference between what was found and what was declared, or ``None``.

    Args:
        found: What a probe found.
        declared: Another finding; a layout of one buffer over the same ranks; or, for the dim
            ``dim``, a sharded dim or one dim for each rank, all other dims being whole.
        dim: See ``declared``.

    >>> from shardweave.layout import even
    >>> from shardweave.testing import probe
    >>> found = probe(lambda x, rank, world: x[rank::world], (6, 2), ranks=2)
    >>> print(compare(found, [even(whole(6), 2, rank) for rank in range(2)]))
    rank 0, dim 0, position 1: expected [1], got [2]
    """
    expected, order = _expected(found, declared, dim)
    if len(expected) != len(found.ranks):
        last = min(len(expected), len(found.ranks))
        return Difference(last, None, None, f"{len(expected)} ranks", f"{len(found.ranks)} ranks")
    for rank, (want, got) in enumerate(zip(expected, found.ranks, strict=True)):
        if want is None or got is None or len(want) != len(got):
            if want != got:
                return Difference(rank, None, None, _said(want), _said(got))
            continue
        for d, (want_dim, got_dim) in enumerate(zip(want, got, strict=True)):
            if want_dim != got_dim:
                return _first(rank, d, want_dim, got_dim)
    if order != found.order:
        return Difference(0, None, None, f"dims stored {list(order)}", f"dims stored {list(found.order)}")
    return None


def expect(found: Found, declared: Declared, *, dim: int = 0) -> None:
    """Raises ``ProbeError`` with the first difference; see ``compare``."""
    difference = compare(found, declared, dim=dim)
    if difference is not None:
        at = "" if difference.dim is None else f", dim {difference.dim}"
        raise ProbeError(
            "a partition function has the layout that is declared for it",
            where=f"rank {difference.rank}{at}"
            + ("" if difference.position is None else f", position {difference.position}"),
            equation=f"expected({difference.expected}) != got({difference.got})",
            hint="correct the declaration, or the function; print(found) shows all ranks",
        )


def _expected(
    found: Found, declared: Declared, dim: int
) -> tuple[Sequence[tuple[Dim, ...] | None], tuple[int, ...]]:
    if isinstance(declared, Found):
        return declared.ranks, declared.order
    if isinstance(declared, Layout):
        if len(declared.rules) != 1 or declared.rules[0].index:
            raise ProbeError(
                "a probed array is compared with a layout of one buffer without index dims",
                where=f"layout {declared.name!r}",
                equation=f"buffers({len(declared.rules)})",
                hint="build a Layout of the one buffer",
            )
        (rule,) = declared.rules
        buffers = [rule.at(declared.mesh, rank) for rank in declared.mesh.ranks]
        return [None if buffer is None else buffer.dims for buffer in buffers], rule.stacked or ()
    rows = declared.dims if isinstance(declared, Sharded) else declared
    others = [found._whole(d) for d in range(len(found.order))]
    return [(*others[:dim], row, *others[dim + 1 :]) for row in rows], tuple(range(len(others)))


def _first(rank: int, d: int, want: Dim, got: Dim) -> Difference:
    for position, (a, b) in enumerate(itertools.zip_longest(want, got)):
        if a != b:
            return Difference(rank, d, position, _index(a), _index(b))
    raise AssertionError("two dims that hold the same are equal")


def _index(element: tuple[str | None, int] | None) -> str:
    if element is None:
        return "the end"
    label, index = element
    return "padding" if label is PAD else f"{label}[{index}]"


def _said(dims: tuple[Dim, ...] | None) -> str:
    return "nothing" if dims is None else f"{len(dims)} dims"


def labels_of(names: Sequence[str]) -> tuple[str, ...]:
    """The labels that tensors of these names have in a fused dim; ``""`` for a single one."""
    if len(names) == 1:
        return ("",)
    words = tuple(name if LABEL.fullmatch(name) else "_" + re.sub(r"\W", "_", name) for name in names)
    return words if len(set(words)) == len(words) else tuple(f"{word}_{i}" for i, word in enumerate(words))


def _ends(run: Run) -> tuple[int, int, int]:
    return run.start, run.last + 1, run.step
