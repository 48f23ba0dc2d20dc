"""A part of a layout: some tensors, some layers, some experts, as a layout that is proved like any other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NoReturn

from shardweave.errors import BufferRuleError, UnknownNameError
from shardweave.layout.buffer import BufferRule, Part, Sharded, table_of
from shardweave.layout.layout import Layout
from shardweave.layout.run import PAD, Dim, Run
from shardweave.layout.tensor import Tensor


def subset(layout: Layout, *, keep: Callable[[str], bool] | None = None, **numbers: Iterable[int]) -> Layout:
    """The part of a layout that holds some of its tensors, and some members of their families.

    Buffers are taken whole or left out: what is received into a fused or stacked one is all of it.

    Laws:
        Its arrays are arrays of ``layout``, of the same names, shapes and dtypes.
        ``subset(layout) == layout``.

    Args:
        layout: The whole.
        keep: Whether a tensor of that name (``model.layers.{layer}.mlp.up_proj.weight``) is in it; all by
            default.
        numbers: For index dims, by name, the numbers that are in it: ``layer=range(4, 8)``. Families without
            that index dim stay; use ``keep`` to leave them out.

    Raises:
        UnknownNameError: No tensor has that index dim, or nothing is left.
        BufferRuleError: A buffer would be in it only in part.

    >>> from shardweave.layout import Mesh, whole
    >>> up = Tensor("layers.{layer}.up", (4, 3), "float32", (("layer", whole(6)),))
    >>> rule = BufferRule("layers.{layer}.up", (Part(up),), up.dims)
    >>> print(*subset(Layout("one", Mesh(()), (rule,)), layer=(1, 4)).arrays(0))
    layers.1.up layers.4.up
    """
    known = {name for tensor in layout.tensors for name, _ in tensor.index}
    strange = sorted(set(numbers) - known)
    allowed = {name: set(wanted) for name, wanted in numbers.items()}
    wanted: dict[Tensor, Tensor] = {}
    for tensor in layout.tensors:
        index = tuple((name, only(dim, allowed.get(name))) for name, dim in tensor.index)
        if (keep is None or keep(tensor.name)) and all(len(dim) for _, dim in index):
            wanted[tensor] = replace(tensor, index=index)
    if strange or not wanted:
        raise UnknownNameError(
            "a subset names what there is",
            where=f"layout {layout.name!r}",
            equation=f"index dims({', '.join(strange)}) are not among {', '.join(sorted(known))}"
            if strange
            else f"nothing is left of {len(layout.tensors)} tensors",
            hint="look at the tensors of the layout: print(*layout.tensors)",
        )
    return narrowed(layout, wanted, in_part=False)


def narrowed(layout: Layout, wanted: Mapping[Tensor, Tensor], *, in_part: bool = True) -> Layout:
    """A layout without what is not wanted of its tensors.

    Args:
        layout: The whole.
        wanted: For each tensor that stays the same one with fewer members.
        in_part: Whether buffers may stay in part. What is left out of them is padding then, which is never
            read; so that is for sources.

    Raises:
        BufferRuleError: A buffer would stay in part, and that was not allowed.
    """
    rules = (_narrowed(rule, wanted, in_part) for rule in layout.rules)
    return replace(layout, rules=tuple(rule for rule in rules if rule is not None))


def only(dim: Dim, allowed: set[int] | None) -> Dim:
    """The numbers of an index dim that are allowed, in its order; ``None`` allows all."""
    return dim if allowed is None else Dim(Run("", n, 1) for _, n in dim if n in allowed)


def _narrowed(rule: BufferRule, wanted: Mapping[Tensor, Tensor], in_part: bool) -> BufferRule | None:
    parts = tuple(
        Part(wanted[part.tensor], part.label, part.replica) for part in rule.parts if part.tensor in wanted
    )
    if not parts:
        return None
    gone = {part.label for part in rule.parts if part.tensor not in wanted}
    index = parts[0].tensor.index
    if any(part.tensor.index != index for part in parts) or (gone and not in_part):
        _refuse(rule, f"parts({', '.join(part.tensor.name for part in parts)}) of {len(rule.parts)}")
    dims, printed = list(rule.dims), dict(rule.numbers)
    for i, (name, dim) in enumerate(index):
        allowed = {number for _, number in dim}
        if all(number in allowed for each in table_of(dims[i]) for _, number in each):
            continue
        if i in (rule.stacked or ()):
            if not in_part:
                _refuse(rule, f"it is stacked over {name!r}, of which {dim} is wanted")
            dims[i] = _each(dims[i], functools.partial(_only_members, allowed=allowed))
            continue
        places = [[at for at, (_, n) in enumerate(each) if n in allowed] for each in table_of(dims[i])]
        if name in printed:
            printed[name] = _at(printed[name], places)
        dims[i] = _at(dims[i], places)
        if not any(places):
            return None
    for i in rule.fused if gone else ():
        dims[i] = _each(dims[i], functools.partial(_without, labels=gone))
    numbers = tuple((name, printed[name]) for name, _ in rule.numbers)
    return replace(rule, parts=parts, dims=tuple(dims), numbers=numbers)


def _at(dim: Dim | Sharded, places: list[list[int]]) -> Dim | Sharded:
    """Some positions of each entry of a dim."""
    left = iter(places)
    return _each(dim, lambda entry: Dim(Run("", entry[at][1], 1) for at in next(left)))


def _only_members(dim: Dim, *, allowed: set[int]) -> Dim:
    """A stacked index dim with padding in place of members that are not allowed."""
    return Dim(Run("", n, 1) if n in allowed and label is not PAD else Run(PAD, 0, 1) for label, n in dim)


def _without(dim: Dim, *, labels: set[str]) -> Dim:
    """A fused dim with padding in place of the runs of some tensors."""
    return Dim(Run(PAD, 0, run.count) if run.label in labels else run for run in dim.runs)


def _each(dim: Dim | Sharded, of: Callable[[Dim], Dim]) -> Dim | Sharded:
    """A function of a dim at every coordinate."""
    return Sharded(dim.axes, tuple(map(of, dim.dims))) if isinstance(dim, Sharded) else of(dim)


def _refuse(rule: BufferRule, equation: str) -> NoReturn:
    raise BufferRuleError(
        "a buffer is in a subset as a whole or not at all",
        where=f"buffer {rule.name!r}",
        equation=equation,
        hint="take all that it holds, or describe its members as arrays of their own, such as views w[i]",
    )
