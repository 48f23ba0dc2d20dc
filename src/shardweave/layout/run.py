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
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardweave.errors import CutError, OutsideError

LABEL = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
"""A label is a word: it stands in the notation without quotes."""

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
        step = self.step if stop - start > 1 else 1
        return Run(self.label, self.start + start * self.step, stop - start, step)


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
        size = len(self)
        if not -size <= position < size:
            raise OutsideError(
                "a position lies inside its dim",
                where=f"dim {_brief(self)}",
                equation=f"position({position}) is not in {-size}..{size - 1}",
                hint="positions count what is stored, not the indices of the tensor",
            )
        left = position % size
        for run in self.runs:
            if left < run.count:
                return run.label, 0 if run.label is PAD else run.start + left * run.step
            left -= run.count
        raise AssertionError("the runs of a dim add up to its length")

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the tensors in this dim, in order of first appearance, without padding."""
        return tuple(dict.fromkeys(run.label for run in self.runs if run.label is not None))

    @property
    def positions(self) -> tuple[int, ...]:
        """The storage position at which each run begins."""
        return (0, *itertools.accumulate(run.count for run in self.runs))[: len(self.runs)]

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
    singles = _Singles()
    for stretch in _stretches(runs):
        if stretch.label is not PAD and (stretch.count == 1 or stretch.step > 1):
            yield from singles.add(stretch)
        else:
            yield from singles.close()
            yield stretch
    yield from singles.close()


def _stretches(runs: Iterable[Run]) -> Iterator[Run]:
    """The maximal stretches of step 1; single ones inside a stepped run stay together in one run."""
    left: Run | None = None
    for run in runs:
        _check_run(run)
        if not run.count:
            continue
        # Only the two ends of a stepped run can have a neighbour that is consecutive.
        ends = (0, run.count) if run.step == 1 else (0, 1, max(1, run.count - 1), run.count)
        for start, stop in itertools.pairwise(ends):
            if start >= stop:
                continue
            right = run.part(start, stop)
            if left is not None and _joins(left, right):
                left = Run(left.label, left.start, left.count + right.count)
                continue
            if left is not None:
                yield left
            left = right
    if left is not None:
        yield left


def _joins(left: Run, right: Run) -> bool:
    if left.label is PAD or right.label is PAD:
        return left.label is right.label
    single_steps = left.label == right.label and left.step == right.step == 1
    return single_steps and right.start == left.start + left.count


def _check_run(run: Run) -> None:
    if run.count < 0 or run.step < 1 or not 0 <= run.start <= max(run.start, run.last) < 1 << 63:
        raise CutError(
            "a run has start >= 0, count >= 0, step >= 1 and indices below 2**63",
            where=f"run of {run.label!r}",
            equation=f"start({run.start}), count({run.count}), step({run.step})",
            hint="write a reversed or repeated stretch as several runs",
        )
    if run.label and not _is_label(run.label):
        raise CutError(
            "the label of a run is a word",
            where="a run of a dim",
            equation=f"label({run.label!r}) does not match {LABEL.pattern}",
            hint="use letters, digits, '_', '.' and '-', a letter first",
        )


@functools.cache
def _is_label(label: str) -> bool:
    return LABEL.fullmatch(label) is not None


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
                yield from self.close()
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
            self.pending.append(one)
            run = run.part(1, run.count)

    def close(self) -> Iterator[Run]:
        if self.open is not None:
            yield self.open
        yield from self.pending
        self.open, self.pending = None, []


# --- ways of partitioning -----------------------------------------------------------------------


def whole(size: int, label: str = "") -> Dim:
    """All ``size`` indices of a dim, in order. Law: ``whole(n)[i] == ("", i)``."""
    return Dim((Run(label, 0, size),))


def concat(*dims: Dim) -> Dim:
    """The dims one after the other. Law: ``list(concat(a, b)) == list(a) + list(b)``."""
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
            "the sizes of a split are not negative and add up to its dim",
            where=f"dim {_brief(dim)}",
            equation=f"sum({_list(sizes)}) = {sum(sizes)} against len({len(dim)})",
            hint="give one size a part, zero where a part is empty",
        )
    _check_part(dim, len(sizes), part)
    start = sum(sizes[:part])
    return cut(dim, start, start + sizes[part])


def even(dim: Dim, parts: int, part: int, *, block: int = 1, what: str = "the dim") -> Dim:
    """Part number ``part`` of a dim cut into ``parts`` equal stretches of whole blocks.

    Law: ``even(d, n, i) == split(d, (len(d) // n,) * n, i)``, and ``n * block`` divides ``len(d)``.

    Raises:
        CutError: ``parts`` does not divide the blocks of the dim; ``what`` names it in the message.

    >>> print(even(whole(12), 2, 1, block=3))
    [6:12]
    """
    count = _blocks(dim, block)
    if parts < 1 or count % parts:
        rest = count % parts if parts > 0 else "undefined"
        raise CutError(
            "an even cut divides its dim",
            where=f"{what} {_brief(dim)}",
            equation=f"len({len(dim)}) / block({block}) % parts({parts}) = {rest} != 0",
            hint="use split() with explicit sizes, balanced() or chunk() for a rule, or pad() first",
        )
    _check_part(dim, parts, part)
    size = len(dim) // parts
    return cut(dim, part * size, (part + 1) * size)


def chunk(dim: Dim, parts: int, part: int, *, block: int = 1) -> Dim:
    """Part number ``part`` by the rule of ``torch.chunk``: equal stretches, the last ones short or empty.

    Law: the parts that are not empty are those of ``torch.chunk`` on the blocks, in order.

    >>> [len(chunk(whole(6), 4, i)) for i in range(4)]
    [2, 2, 2, 0]
    """
    _check_part(dim, parts, part)
    count = _blocks(dim, block)
    size = -(-count // parts)
    return cut(dim, min(part * size, count) * block, min((part + 1) * size, count) * block)


def balanced(dim: Dim, parts: int, part: int, *, block: int = 1) -> Dim:
    """Part number ``part`` by the rule of ``torch.tensor_split``: numbers of blocks differ by one at most.

    Law: the parts are those of ``torch.tensor_split`` on the blocks: the first ones are the longer ones.

    >>> [len(balanced(whole(30), 4, i)) for i in range(4)]
    [8, 8, 7, 7]
    """
    _check_part(dim, parts, part)
    size, longer = divmod(_blocks(dim, block), parts)
    start = part * size + min(part, longer)
    return cut(dim, start * block, (start + size + (part < longer)) * block)


def take(dim: Dim, ids: Sequence[int], block: int = 1) -> Dim:
    """The blocks of ``block`` indices named by ``ids``, in that order.

    Law: ``take(d, ids, b)[i * b + j] == d[ids[i] * b + j]``.

    >>> print(take(whole(12), (3, 0), 2))
    [6:8] [0:2]
    """
    count = _blocks(dim, block)
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

    The label of ``positions`` plays no part.

    Laws:
        ``select(d, p)[i] == d[p[i]]``; padding of ``positions`` stays padding.
        ``select(select(a, b), c) == select(a, select(b, c))``.

    >>> print(select(concat(whole(4, "q"), whole(8, "k")), Dim([Run("", 1, 4, 3)])))
    q[1:2] k[0:7:3]
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

    Law: with ``n`` dims, ``interleave(*dims, block=b)[(i * n + j) * b + k] == dims[j][i * b + k]``.

    >>> print(interleave(whole(4, "gate"), whole(4, "up"), block=2))
    gate[0:2] up[0:2] gate[2:4] up[2:4]
    """
    lengths = sorted({len(dim) for dim in dims})
    if len(lengths) != 1 or block < 1 or lengths[0] % block:
        raise CutError(
            "interleaved dims have one length, a multiple of the block",
            where=f"{len(dims)} dims",
            equation=f"lengths({_list(lengths)}), block({block})",
            hint="pad the shorter dim, or concat() what is not interleaved",
        )
    size = lengths[0]
    starts = (first + start for start in range(0, size, block) for first in range(0, size * len(dims), size))
    return select(concat(*dims), Dim(Run("", start, block) for start in starts))


def pad(dim: Dim, multiple: int) -> Dim:
    """The dim followed by as much padding as makes its length a multiple of ``multiple``.

    Law: ``cut(pad(d, m), 0, len(d)) == d``, and fewer than ``m`` places are padding.

    >>> print(pad(whole(7), 4))
    [0:7] pad[1]
    """
    if multiple < 1:
        raise CutError(
            "a dim is padded to a positive multiple",
            where=f"dim {_brief(dim)}",
            equation=f"multiple({multiple}) < 1",
            hint="use 1 for no padding",
        )
    return concat(dim, Dim((Run(PAD, 0, -len(dim) % multiple),)))


def repeat(dim: Dim, times: int, *, block: int) -> Dim:
    """Each block of ``block`` indices, ``times`` times in succession: heads held by several ranks.

    Law: ``even(repeat(kv, t, block=d), heads * t, r) == even(kv, heads, r // t)``.

    >>> [i for _, i in repeat(whole(4, "k"), 2, block=2)]
    [0, 1, 0, 1, 2, 3, 2, 3]
    """
    if times < 1:
        raise CutError(
            "blocks are repeated a positive number of times",
            where=f"dim {_brief(dim)}",
            equation=f"times({times}) < 1",
            hint="with fewer ranks than heads nothing is repeated: use times=1",
        )
    return take(dim, [i for i in range(_blocks(dim, block)) for _ in range(times)], block)


def relabel(dim: Dim, label: str) -> Dim:
    """The same indices, said of the tensor ``label``; padding stays padding.

    Law: ``relabel(d, t)[i] == (t, d[i][1])``.
    """
    return Dim(run if run.label is PAD else Run(label, run.start, run.count, run.step) for run in dim.runs)


def _blocks(dim: Dim, block: int) -> int:
    """How many blocks a dim has."""
    if block < 1 or len(dim) % block:
        raise CutError(
            "a dim falls into whole blocks",
            where=f"dim {_brief(dim)}",
            equation=f"len({len(dim)}) % block({block}) != 0",
            hint="choose a block that divides the dim: the head dim, the size of a scale group",
        )
    return len(dim) // block


def _check_part(dim: Dim, parts: int, part: int) -> None:
    if not 0 <= part < parts:
        raise CutError(
            "a part of a cut exists",
            where=f"dim {_brief(dim)}",
            equation=f"part({part}) is not in 0..{parts - 1} of {parts} parts",
            hint="parts are counted from 0",
        )


def _list(values: Sequence[int], most: int = 8) -> str:
    head = ", ".join(str(v) for v in values[:most])
    return head if len(values) <= most else f"{head}, ... {len(values)} in all"


def _brief(dim: Dim, most: int = 6) -> str:
    text = str(Dim(dim.runs[:most]))
    return text if len(dim.runs) <= most else f"{text} ... {len(dim.runs)} runs"
