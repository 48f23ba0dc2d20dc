"""Runs and dims: what one dim of a stored array holds, as a list of strided stretches.

A ``Run`` is a strided stretch of one dim of one logical tensor. A ``Dim`` is a list of runs in
storage order, in canonical form: two dims are equal exactly when they hold the same indices in
the same order, however they were built. Every way of partitioning is a function from ``Dim`` to
``Dim``, and ways of partitioning compose as functions do.

The order matters, and this is the most common bug of the field: an even cut of a concatenation
is not a concatenation of even cuts. Here the two are two different expressions:

>>> q, k = whole(8, "q"), whole(4, "k")
>>> print(even(concat(q, k), 2, 0))
q[0:6]
>>> print(concat(even(q, 2, 0), even(k, 2, 0)))
q[0:4] k[0:2]
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardweave.errors import CutError

PAD = None
"""The label of padding: a stretch that belongs to no element, is never stored to a file and never sent."""


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` indices ``start, start + step, ...`` of the dim of the tensor named ``label``.

    The label ``""`` stands for the only tensor at hand, ``PAD`` for no tensor at all. ``step`` is
    at least 1; a run of one index has step 1, and padding starts at 0 with step 1.
    """

    label: str | None
    start: int
    count: int
    step: int = 1

    @property
    def last(self) -> int:
        """The last index of the run."""
        return self.start + (self.count - 1) * self.step

    def part(self, start: int, stop: int) -> Run:
        """The indices at positions ``start`` to ``stop`` of this run."""
        if self.label is PAD:
            return Run(PAD, 0, stop - start)
        return Run(self.label, self.start + start * self.step, stop - start, self.step)


@dataclass(frozen=True, slots=True)
class Dim:
    """A list of runs in storage order, made canonical on construction.

    Laws:
        ``Dim(a) == Dim(b)`` exactly when ``list(Dim(a)) == list(Dim(b))``.
        ``parse_dim(str(d)) == d``.

    >>> Dim([Run("", 0, 2), Run("", 2, 3)]) == whole(5)
    True
    >>> print(Dim([Run("", i, 1) for i in (0, 2, 4, 6)]))
    [0:7:2]
    """

    runs: tuple[Run, ...]

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        object.__setattr__(self, "runs", tuple(_canonical(runs)))

    def __len__(self) -> int:
        return sum(run.count for run in self.runs)

    def __iter__(self) -> Iterator[tuple[str | None, int]]:
        for run in self.runs:
            if run.label is PAD:
                yield from ((PAD, 0) for _ in range(run.count))
            else:
                yield from ((run.label, run.start + i * run.step) for i in range(run.count))

    def __getitem__(self, position: int) -> tuple[str | None, int]:
        for run in self.runs:
            if position < run.count:
                return run.label, 0 if run.label is PAD else run.start + position * run.step
            position -= run.count
        raise IndexError("position past the end of the dim")

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the tensors in this dim, in order of first appearance, without padding."""
        return tuple(dict.fromkeys(run.label for run in self.runs if run.label is not None))

    @property
    def positions(self) -> tuple[int, ...]:
        """The storage position at which each run begins."""
        return tuple(itertools.accumulate((run.count for run in self.runs[:-1]), initial=0)) if self.runs else ()

    def only(self, label: str) -> Dim:
        """The runs of one tensor, in storage order."""
        return Dim(run for run in self.runs if run.label == label)

    def __str__(self) -> str:
        from shardweave.layout.notation import format_dim

        return format_dim(self)


def _canonical(runs: Iterable[Run]) -> Iterator[Run]:
    """The unique list of runs for an index sequence.

    First the sequence falls into its maximal stretches of consecutive indices, which only the
    sequence decides. Then, among neighbouring stretches of a single index, the first three that
    form an arithmetic progression start a stepped run, which goes on as long as it can. Both
    rules look at indices alone, so the result does not depend on how the runs were given; both
    take a whole run at a time, so the cost is in runs and not in indices.
    """
    stretch: Run | None = None  # a stretch of step 1 that may still grow
    loose = _Singles()
    for run in itertools.chain(runs, (None,)):
        if run is not None:
            if run.count == 0:
                continue
            if run.count < 0 or run.step < 1 or run.start < 0:
                raise CutError(
                    "a run has start >= 0, count >= 0 and step >= 1",
                    equation=f"start={run.start}, count={run.count}, step={run.step}",
                    hint="write a reversed or repeated stretch as several runs",
                )
            if run.label is PAD:
                run = Run(PAD, 0, run.count)
            elif run.step != 1 and run.count > 1:
                # Each index is a stretch of its own, but the two at the ends may join a neighbour.
                head, body, tail = run.part(0, 1), run.part(1, run.count - 1), run.part(run.count - 1, run.count)
                if stretch is not None and _joins(stretch, head):
                    stretch = Run(stretch.label, stretch.start, stretch.count + 1)
                    yield from _flush(stretch, loose)
                elif stretch is not None:
                    yield from _flush(stretch, loose)
                    yield from loose.add(head)
                else:
                    yield from loose.add(head)
                if body.count:
                    yield from loose.add(body)
                stretch = Run(tail.label, tail.start, 1)
                continue
        if stretch is not None and run is not None and _joins(stretch, run):
            stretch = Run(stretch.label, stretch.start, stretch.count + run.count)
            continue
        if stretch is not None:
            yield from _flush(stretch, loose)
        stretch = None if run is None else Run(run.label, run.start, run.count)
    yield from loose.close()


def _joins(left: Run, right: Run) -> bool:
    return left.label == right.label and (left.label is PAD or right.start == left.start + left.count)


def _flush(stretch: Run, loose: _Singles) -> Iterator[Run]:
    if stretch.count == 1 and stretch.label is not PAD:
        yield from loose.add(stretch)
    else:
        yield from loose.close()
        yield stretch


class _Singles:
    """Finds progressions among single indices; ``add`` takes a whole progression in constant time."""

    def __init__(self) -> None:
        self.pending: list[Run] = []  # at most two single indices, not yet part of a progression
        self.open: Run | None = None  # a progression of three or more that may still grow

    def add(self, run: Run) -> Iterator[Run]:
        while run.count:
            if self.open is not None:
                fits = run.label == self.open.label and run.start == self.open.last + self.open.step
                if fits:
                    taken = run.count if run.step == self.open.step else 1
                    self.open = Run(self.open.label, self.open.start, self.open.count + taken, self.open.step)
                    run = run.part(taken, run.count)
                    continue
                yield self.open
                self.open = None
            one = run.part(0, 1)
            if self.pending and self.pending[-1].label != one.label:
                yield from self.pending
                self.pending = []
            if len(self.pending) == 2:
                first, second = self.pending
                step = second.start - first.start
                if step > 1 and one.start - second.start == step:
                    self.open, self.pending = Run(first.label, first.start, 3, step), []
                    run = run.part(1, run.count)
                else:
                    yield first
                    self.pending = [second]
                continue
            self.pending.append(Run(one.label, one.start, 1))
            run = run.part(1, run.count)

    def close(self) -> Iterator[Run]:
        if self.open is not None:
            yield self.open
        yield from self.pending
        self.open, self.pending = None, []


# --- ways of partitioning -----------------------------------------------------------------------


def whole(size: int, label: str = "") -> Dim:
    """All ``size`` indices of a dim, in order."""
    return Dim((Run(label, 0, size),))


def concat(*dims: Dim) -> Dim:
    """The dims one after the other. Law: ``len(concat(a, b)) == len(a) + len(b)``."""
    return Dim(run for dim in dims for run in dim.runs)


def cut(dim: Dim, start: int, stop: int) -> Dim:
    """The indices at positions ``start`` to ``stop``. Law: ``cut(d, a, b)[i] == d[a + i]``."""
    if not 0 <= start <= stop <= len(dim):
        raise CutError(
            "a cut lies inside its dim",
            where=f"dim {_brief(dim)}",
            equation=f"0 <= start({start}) <= stop({stop}) <= len({len(dim)}) does not hold",
            hint="check the sizes that the cut was computed from",
        )
    return Dim(_cut_runs(dim.runs, start, stop))


def _cut_runs(runs: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    at = 0
    for run in runs:
        low, high = max(start - at, 0), min(stop - at, run.count)
        if low < high:
            yield run.part(low, high)
        at += run.count
        if at >= stop:
            return


def split(dim: Dim, sizes: Sequence[int], part: int) -> Dim:
    """Part number ``part`` of a dim cut into stretches of explicit ``sizes``.

    Law: ``concat(*(split(d, sizes, i) for i in range(len(sizes)))) == d``.

    Raises:
        CutError: The sizes do not add up to the dim, or there is no such part.

    >>> print(split(whole(10), (4, 0, 6), 2))
    [4:10]
    """
    if sum(sizes) != len(dim) or min(sizes, default=0) < 0:
        raise CutError(
            "the sizes of a split add up to its dim",
            where=f"dim {_brief(dim)}",
            equation=f"sum({_list(sizes)}) = {sum(sizes)} != len({len(dim)})",
            hint="give one size a part, zero where a part is empty",
        )
    _check_part(len(sizes), part)
    start = sum(sizes[:part])
    return cut(dim, start, start + sizes[part])


def even(dim: Dim, parts: int, part: int, *, what: str = "the dim") -> Dim:
    """Part number ``part`` of a dim cut into ``parts`` equal stretches.

    Raises:
        CutError: ``parts`` does not divide the dim; ``what`` names it in the message.
    """
    if parts < 1 or len(dim) % parts:
        raise CutError(
            "an even cut divides its dim",
            where=f"{what} {_brief(dim)}",
            equation=f"len({len(dim)}) % parts({parts}) = {len(dim) % parts if parts > 0 else 'undefined'} != 0",
            hint="use split() with explicit sizes, chunk() for torch's rule, or pad() first",
        )
    _check_part(parts, part)
    size = len(dim) // parts
    return cut(dim, part * size, (part + 1) * size)


def chunk(dim: Dim, parts: int, part: int) -> Dim:
    """Part number ``part`` under the rule of ``torch.chunk``: equal stretches, the last ones short or empty.

    >>> [len(chunk(whole(6), 4, i)) for i in range(4)]
    [2, 2, 2, 0]
    """
    _check_part(parts, part)
    size = -(-len(dim) // parts)
    start = min(part * size, len(dim))
    return cut(dim, start, min(start + size, len(dim)))


def take(dim: Dim, ids: Sequence[int], block: int = 1) -> Dim:
    """The blocks of ``block`` indices named by ``ids``, in that order.

    Law: ``take(d, ids, b)[i * b + j] == d[ids[i] * b + j]``.

    >>> print(take(whole(12), (3, 0), 2))
    [6:8] [0:2]
    """
    if block < 1 or len(dim) % block:
        raise CutError(
            "a dim falls into whole blocks",
            where=f"dim {_brief(dim)}",
            equation=f"len({len(dim)}) % block({block}) != 0",
            hint="choose a block that divides the dim",
        )
    count = len(dim) // block
    for i in ids:
        if not 0 <= i < count:
            raise CutError(
                "a block id names a block of the dim",
                where=f"dim {_brief(dim)}",
                equation=f"id({i}) is not in 0..{count - 1} = len({len(dim)}) / block({block})",
                hint="ids count blocks, not indices",
            )
    return select(dim, Dim(Run("", i * block, block) for i in ids))


def select(dim: Dim, positions: Dim) -> Dim:
    """The composition of two dims: ``positions`` says which positions of ``dim`` to hold.

    Law: ``select(d, p)[i] == d[p[i]]``; padding of ``positions`` stays padding.
    """
    starts = dim.positions
    size = len(dim)
    runs: list[Run] = []
    for run in positions.runs:
        if run.label is PAD:
            runs.append(run)
            continue
        if run.last >= size:
            raise CutError(
                "a position lies inside its dim",
                where=f"dim {_brief(dim)}",
                equation=f"position({run.last}) >= len({size})",
                hint="compose dims of matching sizes",
            )
        at = run.start
        left = run.count
        j = bisect.bisect_right(starts, at) - 1
        while left:
            base = dim.runs[j]
            inside = at - starts[j]
            n = min(left, (base.count - inside - 1) // run.step + 1)
            if base.label is PAD:
                runs.append(Run(PAD, 0, n))
            else:
                runs.append(Run(base.label, base.start + inside * base.step, n, base.step * run.step))
            left -= n
            at += n * run.step
            while left and j + 1 < len(starts) and starts[j + 1] <= at:
                j += 1
    return Dim(runs)


def interleave(*dims: Dim, block: int = 1) -> Dim:
    """Blocks of ``block`` indices of each dim in turn.

    >>> print(interleave(whole(4, "gate"), whole(4, "up"), block=2))
    gate[0:2] up[0:2] gate[2:4] up[2:4]
    """
    lengths = {len(dim) for dim in dims}
    if len(lengths) != 1 or block < 1 or next(iter(lengths)) % block:
        raise CutError(
            "interleaved dims have one length, a multiple of the block",
            equation=f"lengths({_list(sorted(lengths))}), block({block})",
            hint="pad the shorter dim, or concat() what is not interleaved",
        )
    size = next(iter(lengths))
    return Dim(
        run
        for start in range(0, size, block)
        for dim in dims
        for run in _cut_runs(dim.runs, start, start + block)
    )


def pad(dim: Dim, multiple: int) -> Dim:
    """The dim followed by as much padding as makes its length a multiple of ``multiple``.

    >>> print(pad(whole(7), 4))
    [0:7] pad[1]
    """
    if multiple < 1:
        raise CutError(
            "a dim is padded to a positive multiple", equation=f"multiple({multiple}) < 1", hint="use 1 for none"
        )
    return concat(dim, Dim((Run(PAD, 0, -len(dim) % multiple),)))


def repeat(dim: Dim, times: int, *, block: int) -> Dim:
    """Each block of ``block`` indices, ``times`` times in succession: heads held by several ranks.

    Law: ``even(repeat(kv, t, block=d), heads * t, r) == even(kv, heads, r // t)``.

    >>> [i for _, i in repeat(whole(4, "k"), 2, block=2)]
    [0, 1, 0, 1, 2, 3, 2, 3]
    """
    if times < 1 or block < 1 or len(dim) % block:
        raise CutError(
            "whole blocks are repeated a positive number of times",
            where=f"dim {_brief(dim)}",
            equation=f"len({len(dim)}) % block({block}) != 0 or times({times}) < 1",
            hint="the block of KV replication is the head dim",
        )
    return take(dim, [i for i in range(len(dim) // block) for _ in range(times)], block)


def relabel(dim: Dim, label: str) -> Dim:
    """The same indices, said of the tensor ``label``; padding stays padding."""
    return Dim(run if run.label is PAD else Run(label, run.start, run.count, run.step) for run in dim.runs)


def _check_part(parts: int, part: int) -> None:
    if not 0 <= part < parts:
        raise CutError(
            "a part of a cut exists",
            equation=f"part({part}) is not in 0..{parts - 1}",
            hint="parts are counted from 0",
        )


def _list(values: Sequence[int], most: int = 8) -> str:
    head = ", ".join(str(v) for v in values[:most])
    return head if len(values) <= most else f"{head}, ... {len(values)} in all"


def _brief(dim: Dim, most: int = 6) -> str:
    text = str(Dim(dim.runs[:most]))
    return text if len(dim.runs) <= most else f"{text} ... {len(dim.runs)} runs"
