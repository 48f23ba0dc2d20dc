"""The marker probe: which layout does a partition function have, found by running it.

Fill tensors with their own indices, run the function for every rank, read back who got what. The
function is not read, trusted or guessed at, and what comes out is a layout like any other: it can
be proved, drawn, compared with a declared one, and planned with.

>>> found = probe(lambda x, rank, world: np.array_split(x, world)[rank], (7, 3), ranks=2)
>>> print(found)
rank 0: [0:4] x [0:3]
rank 1: [4:7] x [0:3]
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import ProbeError
from shardweave.layout.table import Ints
from shardweave.testing.describe import describe, locate
from shardweave.testing.found import Found
from shardweave.testing.markers import PADDING, Numbering, Shape, numberings, shares_memory, values_of

Call = Callable[[int, dict[str, Any]], Mapping[str, Any]]

_RESULT = "array"  # the name of the one array that a partition function gives back


def probe(
    partition: Callable[..., Any],
    shape: Shape | Mapping[str, Shape],
    *,
    ranks: int,
    dtype: str = "int64",
    arrays: str = "numpy",
    pad: float | None = None,
    duplicates: bool = False,
    flat: bool = False,
) -> Found:
    """The layout of ``partition(*tensors, rank, ranks)``, which gives one array or ``None``.

    The function is run several times for each rank, in more than one order, so that one that keeps
    something between calls, computes with values or looks at them is found out.

    Args:
        partition: The function.
        shape: The shape of its tensor, or the shapes of several by label, in order of its arguments.
        ranks: The number of ranks.
        dtype: The dtype of the tensors; small ones take several passes.
        arrays: ``numpy`` or ``torch``.
        pad: The value of padding; ``nan`` is one. Without it there is none.
        duplicates: Whether one rank may hold an element twice.
        flat: Whether a result that is no product of dims may be given by flat row-major indices.

    Raises:
        ProbeError: The function does not only move values: it computes, pads with something that was
            not declared, changes its input or an earlier result, or is no product of dims.
    """
    shapes: dict[str, Shape] = dict(shape) if isinstance(shape, Mapping) else {"": shape}

    def call(rank: int, tensors: dict[str, Any]) -> dict[str, Any]:
        result = partition(*tensors.values(), rank, ranks)
        return {} if result is None else {_RESULT: result}

    runs = _Runs(call, shapes, ranks=ranks, dtype=dtype, arrays=arrays, pad=pad)
    return runs.found(_RESULT, duplicates=duplicates, flat=flat)


def probe_loader(
    load: Callable[[int, dict[str, Any]], Mapping[str, Any]],
    shapes: Mapping[str, Shape],
    *,
    ranks: int,
    dtype: str = "int64",
    arrays: str = "numpy",
    pad: float | None = None,
    duplicates: bool = False,
    flat: bool = False,
    ignored: Collection[str] = (),
) -> dict[str, Found]:
    """The layout of every array that ``load(rank, tensors)`` gives, by name.

    Both sides are arrays by name; one array may hold several tensors, and a rank may lack an array.
    The tensors of an array keep their names as labels.

    Args:
        load: The loader.
        shapes: The shapes of the tensors to load.
        ignored: Tensors that no rank has to load.
        ranks: The number of ranks.
        dtype: See ``probe``.
        arrays: See ``probe``.
        pad: See ``probe``.
        duplicates: See ``probe``.
        flat: See ``probe``.

    Raises:
        ProbeError: As for ``probe``; or a tensor reaches no rank.
    """
    runs = _Runs(load, shapes, ranks=ranks, dtype=dtype, arrays=arrays, pad=pad)
    found = {name: runs.found(name, duplicates=duplicates, flat=flat) for name in runs.names}
    loaded = {label for one in found.values() for label, _ in one.sources}
    lost = [label for label in shapes if label not in loaded and label not in ignored]
    if lost:
        raise ProbeError(
            "a loader loads every tensor",
            where=f"tensor {lost[0]!r}",
            equation=f"{len(lost)} of {len(shapes)} tensors reach no rank",
            hint="name what is left out on purpose in ignored=",
        )
    return found


def probe_shapes(
    partition: Callable[..., Any], shapes: Sequence[Shape], *, ranks: int, **options: Any
) -> tuple[Found, ...]:
    """``probe`` for several shapes, of a function whose layout may not hang on the shape.

    Raises:
        ProbeError: Different dims are cut, or stored in different order, for different shapes: the
            function guesses.
    """
    found = tuple(probe(partition, shape, ranks=ranks, **options) for shape in shapes)
    for shape, one in zip(shapes, found, strict=True):
        if (one.cut, one.order, one.flat) != (found[0].cut, found[0].order, found[0].flat):
            raise ProbeError(
                "a layout does not hang on the shape",
                where=f"{ranks} ranks",
                equation=(
                    f"shape {shapes[0]}: cut dims {list(found[0].cut)}, stored {list(found[0].order)}; "
                    f"shape {shape}: cut dims {list(one.cut)}, stored {list(one.order)}"
                ),
                hint="say which dim is cut; a size that happens to fit says nothing",
            )
    return found


def probe_function(spec: str, *, shape: Shape | Mapping[str, Shape], tp: int, **options: Any) -> Found:
    """``probe`` for a function named ``MODULE:FUNCTION``, called as ``FUNCTION(*tensors, rank, tp)``.

    Options are those of ``probe``.

    Raises:
        ProbeError: There is no such function; or as for ``probe``.
    """
    return probe(function_named(spec), shape, ranks=tp, **options)


def function_named(spec: str) -> Callable[..., Any]:
    """The function that ``MODULE:FUNCTION`` names.

    Raises:
        ProbeError: There is none.
    """
    module, colon, path = spec.partition(":")
    try:
        target = importlib.import_module(module) if module and colon else None
        for name in path.split("."):
            target = getattr(target, name)
    except (ImportError, AttributeError) as error:
        raise ProbeError(
            "a probed function is named MODULE:FUNCTION and can be imported",
            where=repr(spec),
            equation=f"{type(error).__name__}: {error}",
            hint="put its folder on PYTHONPATH; write package.module:function",
        ) from error
    if not callable(target):
        raise ProbeError(
            "a probed function can be called",
            where=repr(spec),
            equation=f"got {type(target).__name__}({str(target)[:80]})",
            hint="name a function",
        )
    found: Callable[..., Any] = target
    return found


# --- running ------------------------------------------------------------------------------------


class _Runs:
    """What a function gave to every rank, as element numbers, agreed by all passes."""

    def __init__(
        self,
        call: Call,
        shapes: Mapping[str, Shape],
        *,
        ranks: int,
        dtype: str,
        arrays: str,
        pad: float | None,
    ) -> None:
        if ranks < 1:
            raise ProbeError("a probe has ranks", equation=f"ranks({ranks}) < 1", hint="give at least one")
        self.call, self.shapes, self.ranks, self.arrays, self.pad = call, shapes, ranks, arrays, pad
        self.aliased: set[tuple[int, str]] = set()
        first, second = (
            self._pass(numbering, order)
            for numbering, order in zip(
                numberings(shapes, dtype), (range(ranks), range(ranks - 1, -1, -1)), strict=True
            )
        )
        for rank in range(ranks):
            self._agree(rank, first[rank], second[rank])
        self.elements = first

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays that some rank has, in order of first appearance."""
        return tuple(dict.fromkeys(name for rank in range(self.ranks) for name in self.elements[rank]))

    def found(self, name: str, *, duplicates: bool, flat: bool) -> Found:
        """The layout of one array."""
        results = [self.elements[rank].get(name) for rank in range(self.ranks)]
        for rank, elements in enumerate(results):
            if elements is not None and not duplicates:
                self._check_once(rank, name, elements)
        aliased = tuple(rank for rank in range(self.ranks) if (rank, name) in self.aliased)
        return describe(results, self.shapes, flat=flat, aliased=aliased, name=name)

    def _pass(self, numbering: Numbering, order: Sequence[int]) -> dict[int, dict[str, Ints]]:
        read: dict[int, dict[str, list[NDArray[Any]]]] = {}
        for digit in range(numbering.num_digits):
            tensors = numbering.tensors(digit, self.arrays)
            before = {name: values_of(tensor) for name, tensor in tensors.items()}
            results = {rank: self._one(rank, tensors, before) for rank in order}
            for rank, (result, values) in results.items():
                for name, value in values.items():
                    if not np.array_equal(values_of(result[name]), value, equal_nan=value.dtype.kind == "f"):
                        raise ProbeError(
                            "a result stays as it was given",
                            where=_where(rank, name),
                            equation="its values changed while other ranks were cut",
                            hint="copy before returning: the function hands out one buffer several times",
                        )
                    read.setdefault(rank, {}).setdefault(name, []).append(value)
        return {
            rank: {
                name: numbering.read(digits, pad=self.pad, where=_where(rank, name))
                for name, digits in read.get(rank, {}).items()
            }
            for rank in range(self.ranks)
        }

    def _one(
        self, rank: int, tensors: dict[str, Any], before: dict[str, NDArray[Any]]
    ) -> tuple[Mapping[str, Any], dict[str, NDArray[Any]]]:
        try:
            result = self.call(rank, dict(tensors))
        except ProbeError:
            raise
        except Exception as error:
            raise ProbeError(
                "a partition function cuts for every rank",
                where=f"rank {rank} of {self.ranks}",
                equation=f"{type(error).__name__}: {error}",
                hint="probe a shape and a number of ranks that the function supports",
            ) from error
        values = self._checked(rank, result)
        for name, tensor in tensors.items():
            if not np.array_equal(values_of(tensor), before[name]):
                raise ProbeError(
                    "a partition function leaves its input alone",
                    where=f"rank {rank}" + (f", tensor {name!r}" if name else ""),
                    equation="the tensor changed during the call",
                    hint="copy before writing; other ranks or tied weights may read the same memory",
                )
            self.aliased |= {(rank, key) for key, value in result.items() if shares_memory(value, tensor)}
        return result, values

    def _checked(self, rank: int, result: Any) -> dict[str, NDArray[Any]]:
        if not isinstance(result, Mapping):
            raise ProbeError(
                "a loader gives arrays by name",
                where=f"rank {rank}",
                equation=f"got {type(result).__name__}",
                hint="return a dict of arrays",
            )
        values = {name: values_of(value) for name, value in result.items()}
        for name, value in values.items():
            if value.dtype.kind not in "iuf":
                raise ProbeError(
                    "a partition function gives arrays of numbers",
                    where=_where(rank, name),
                    equation=f"got {type(result[name]).__name__} of dtype {value.dtype}",
                    hint="return one array of numpy or torch; probe a loader by name with probe_loader()",
                )
        return values

    def _agree(self, rank: int, first: dict[str, Ints], second: dict[str, Ints]) -> None:
        if list(first) != list(second) or any(first[name].shape != second[name].shape for name in first):
            raise ProbeError(
                "a partition function does the same every time",
                where=f"rank {rank}",
                equation=f"{_shapes(first)} != {_shapes(second)}",
                hint="let the result hang on shape and rank alone, not on values or earlier calls",
            )
        for name, elements in first.items():
            differs = np.argwhere(elements != second[name])
            if len(differs):
                position = tuple(int(i) for i in differs[0])
                raise ProbeError(
                    "a partition function only moves values, the same ones every time",
                    where=f"{_where(rank, name)}, position {list(position)}",
                    equation=f"{self._name(elements[position])} != {self._name(second[name][position])}",
                    hint="probe the cut alone: no arithmetic, no choice by values, no state between calls",
                )

    def _check_once(self, rank: int, name: str, elements: Ints) -> None:
        numbers, counts = np.unique(elements[elements != PADDING], return_counts=True)
        if len(numbers) and int(counts.max()) > 1:
            element = int(numbers[np.argmax(counts > 1)])
            first, second = (list(map(int, position)) for position in np.argwhere(elements == element)[:2])
            raise ProbeError(
                "a rank holds an element once",
                where=_where(rank, name),
                equation=f"{self._name(element)} lies at {first} and at {second}",
                hint="allow it with duplicates=True where heads are repeated on purpose",
            )

    def _name(self, element: int) -> str:
        if element == PADDING:
            return "padding"
        owner, local = locate(np.array([element]), tuple(self.shapes.values()))
        label = list(self.shapes)[int(owner[0])]
        return f"{label}{[int(i) for i in np.unravel_index(int(local[0]), self.shapes[label])]}"


def _where(rank: int, name: str) -> str:
    return f"rank {rank}" + (f", array {name!r}" if name != _RESULT else "")


def _shapes(arrays: Mapping[str, Ints]) -> str:
    return ", ".join(f"{name}{list(values.shape)}" for name, values in arrays.items()) or "nothing"
