"""The probe over a whole model: the layout of everything that a framework's ranks hold, found by running it.

A function is called a layer at a time, with the tensors of the layer by their names, and once with those
outside the layers; it gives what a rank holds, under the names that the framework has for it. What is found
for arrays that differ only by the number of their layer or expert becomes one rule, as a dialect would say.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardweave.errors import ProbeError
from shardweave.layout import PAD, BufferRule, Dim, Layout, Mesh, Part, Run, Sharded, Tensor, prove
from shardweave.layout.buffer import table_of
from shardweave.models import Model
from shardweave.testing.found import Found
from shardweave.testing.probe import probe_loader

Partition = Callable[[dict[str, Any], int, int], Mapping[str, Any]]
Numbers = tuple[int, ...]


def probe_model(
    partition: Partition,
    model: Model,
    *,
    ranks: int,
    name: str = "probed",
    axis: str = "tp",
    sampled: bool = False,
    **options: Any,
) -> Layout:
    """The layout of ``partition(tensors, rank, ranks)`` for all tensors of a model, proved.

    Law: ``prove(probe_model(...))`` holds, and the layout's tensors are the model's.

    Memory: markers of one layer at a time, or of what lies outside the layers.

    Args:
        partition: The function. ``tensors`` are those of one layer, or those outside the layers, by name; it
            gives arrays by the framework's name. An array may hold several tensors of the layer, and has
            the layer's number in its name.
        model: The model.
        ranks: The number of ranks.
        name: What the layout is called.
        axis: What its mesh axis is called.
        sampled: Whether of layers with the same tensors only the first and the last are run, and those
            between are taken to be like them; it is refused where these two are not alike.
        options: ``dtype``, ``arrays``, ``pad`` and ``duplicates``, see ``probe``.

    Raises:
        ProbeError: As for ``probe_loader``; or an array of a layer does not say its number.
        GapError, OverlapError: The arrays are not the whole model, or have something more than once.

    >>> import numpy as np
    >>> from shardweave.models import from_config
    >>> sizes = {"hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 6}
    >>> model = from_config({"model_type": "llama", "dtype": "float32", "vocab_size": 8, **sizes})
    >>> cut = lambda tensors, rank, tp: {name: np.split(x, tp)[rank] for name, x in tensors.items()}
    >>> found = probe_model(cut, model, ranks=2)
    >>> rule = next(rule for rule in found.rules if "gate_proj" in rule.name)
    >>> print(rule.name, *rule.dims[1].dims)
    model.layers.{layer}.mlp.gate_proj.weight [0:3] [3:6]
    """
    owners = {
        member: (tensor, numbers, role)
        for block in model.blocks
        for role, tensor in block.tensors.items()
        for member, numbers in _members(tensor)
    }
    mesh = Mesh(((axis, ranks),))
    arrays: list[_Array] = []
    run = _layers(owners, sampled=sampled)
    for members in _groups(owners, run):
        shapes = {member: owners[member][0].shape for member in members}
        found = probe_loader(
            lambda rank, tensors: partition(tensors, rank, ranks),
            shapes,
            ranks=ranks,
            ignored=members,  # said below, in words of a model
            **options,
        )
        _check_held(members, found.values(), where=f"{name}, {ranks} ranks")
        arrays += (_array(one, owners, axis) for one in found.values())
    layout = Layout(name, mesh, tuple(_once(_merged(arrays, run if sampled else None))))
    prove(layout)
    return layout


def _check_held(members: Sequence[str], found: Iterable[Found], *, where: str) -> None:
    held = {source for one in found for source, _ in one.sources}
    lost = [member for member in members if member not in held]
    if lost:
        raise ProbeError(
            "the ranks of a framework hold every tensor of the model",
            where=where,
            equation=f"{len(lost)} of {len(members)} tensors reach no rank: {', '.join(lost[:3])}",
            hint="give each tensor to some rank; a tied head is no tensor of its own",
        )


Owners = Mapping[str, tuple[Tensor, Numbers, str]]
"""Of each member its family, its numbers, and its role in its block."""


def _members(tensor: Tensor) -> Iterator[tuple[str, Numbers]]:
    keys = [name for name, _ in tensor.index]
    for numbers in itertools.product(*((i for _, i in dim) for _, dim in tensor.index)):
        yield tensor.member(dict(zip(keys, numbers, strict=True))), numbers


def _layers(owners: Owners, *, sampled: bool) -> frozenset[int]:
    """The layers that are run."""
    kinds: dict[int, dict[Tensor, None]] = {}
    for tensor, numbers, _ in owners.values():
        if numbers:
            kinds.setdefault(numbers[0], {})[tensor] = None
    alike: dict[tuple[Tensor, ...], list[int]] = {}
    for layer in sorted(kinds):
        alike.setdefault(tuple(kinds[layer]), []).append(layer)
    return frozenset(layer for few in alike.values() for layer in ((few[0], few[-1]) if sampled else few))


def _groups(owners: Owners, run: frozenset[int]) -> Iterator[Sequence[str]]:
    """The names that are probed together."""
    groups: dict[int, list[str]] = {}
    for name, (_, numbers, _) in owners.items():
        layer = numbers[0] if numbers else -1
        if layer < 0 or layer in run:
            groups.setdefault(layer, []).append(name)
    for layer in sorted(groups):
        yield groups[layer]


@dataclass(frozen=True)
class _Array:
    """One array of one layer: its rule without index dims, and which members of which families it holds."""

    name: str
    parts: tuple[Part, ...]
    numbers: Numbers
    dims: tuple[Dim | Sharded, ...]
    stacked: tuple[int, ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        return self.parts, self.dims, self.stacked


def _array(found: Found, owners: Owners, axis: str) -> _Array:
    (rule,) = found.layout(axis=axis).rules
    families = [owners[part.tensor.name] for part in rule.parts]
    numbers = {numbers for _, numbers, _ in families}
    if len(numbers) > 1:
        raise ProbeError(
            "an array holds tensors of one layer, and of one expert",
            where=f"array {found.name!r}",
            equation=", ".join(part.tensor.name for part in rule.parts[:4]),
            hint="give the arrays of each expert on their own; stacked experts are not described by a probe",
        )
    roles = [role for _, _, role in families]
    unique = len(set(roles)) == len(roles)
    words = {
        part.label: part.label and (role if unique else f"{role}_{i}")
        for i, (part, role) in enumerate(zip(rule.parts, roles, strict=True))
    }
    parts = tuple(
        Part(family, words[part.label], part.replica)
        for part, (family, _, _) in zip(rule.parts, families, strict=True)
    )
    assert rule.stacked is not None
    dims = tuple(_relabelled(dim, words) for dim in rule.dims)
    return _Array(found.name, parts, numbers.pop(), dims, rule.stacked)


def _relabelled(dim: Dim | Sharded, words: Mapping[str, str]) -> Dim | Sharded:
    def one(dim: Dim) -> Dim:
        return Dim(
            run if run.label is PAD else replace(run, label=words[run.label] if run.label else "")
            for run in dim.runs
        )

    return one(dim) if isinstance(dim, Dim) else Sharded(dim.axes, tuple(one(each) for each in dim.dims))


# --- arrays of many layers as one rule ----------------------------------------------------------


def _merged(arrays: Sequence[_Array], run: frozenset[int] | None) -> Iterator[BufferRule]:
    """The rules of the arrays, those that differ only by their numbers as one; ``run`` are sampled layers."""
    kinds: dict[tuple[Any, ...], list[_Array]] = {}
    for array in arrays:
        kinds.setdefault(array.kind, []).append(array)
    for alike in kinds.values():
        first = alike[0]
        if not first.numbers:
            yield from (BufferRule(a.name, a.parts, a.dims, stacked=a.stacked) for a in alike)
            continue
        templates: dict[str, list[_Array]] = {}
        for array in alike:
            templates.setdefault(_template(array, alike), []).append(array)
        for template, few in templates.items():
            for held in _products([array.numbers for array in few]):
                yield _rule(template, few[0], held, run)


def _rule(template: str, first: _Array, held: Sequence[Dim], run: frozenset[int] | None) -> BufferRule:
    """One rule for arrays of a family: ``held`` are the layers, and the experts, that have it."""
    index = first.parts[0].tensor.index
    if run is not None:
        layers = index[0][1]
        sampled = _numbers(layer for _, layer in layers if layer in run)
        if held[0] != sampled:
            raise ProbeError(
                "layers with the same tensors are cut alike",
                where=f"array {template!r}",
                equation=f"so are layers {held[0]}, of {layers}",
                hint="probe every layer: leave out sampled=True, or --sampled",
            )
        held = [layers, *held[1:]]
    n = len(index)
    names = {f"{i}": name for i, (name, _) in enumerate(index)}
    named = re.sub(r"\{(\d)\}", lambda match: f"{{{names[match[1]]}}}", template)
    return BufferRule(
        named, first.parts, (*held, *first.dims), stacked=tuple(n + axis for axis in first.stacked)
    )


def _template(array: _Array, alike: Sequence[_Array]) -> str:
    """The name of an array with ``{0}`` for its first number and ``{1}`` for its second."""
    found = _templates(array.name, array.numbers)
    # Which of several equal numbers in a name is the layer's is said by the other layers.
    for other in alike:
        both = [one for one in found if one in _templates(other.name, other.numbers)]
        found = both or found
    if not found:
        raise ProbeError(
            "an array of a layer has the layer's number in its name, and an expert's its own",
            where=f"array {array.name!r}",
            equation=f"numbers({', '.join(map(str, array.numbers))}) are not all in it",
            hint="give it a name with the numbers that the model's tensors have, counted from 0",
        )
    return found[0]


def _templates(name: str, numbers: Numbers) -> list[str]:
    words = re.split(r"(\d+)", name)
    places = [[i for i in range(1, len(words), 2) if words[i] == str(number)] for number in numbers]
    return [
        "".join(f"{{{at.index(i)}}}" if i in at else word for i, word in enumerate(words))
        for at in itertools.product(*places)
        if list(at) == sorted(set(at))
    ]


def _products(numbers: Sequence[Numbers]) -> Iterator[tuple[Dim, ...]]:
    """The numbers as products of dims, layers with the same experts together.

    >>> for product in _products([(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)]):
    ...     print(*product)
    [0:2] [0:2]
    [2:3] [1:2]
    """
    if len(numbers[0]) == 1:
        yield (_numbers(n for (n,) in numbers),)
        return
    rest: dict[int, list[Numbers]] = {}
    for one in numbers:
        rest.setdefault(one[0], []).append(one[1:])
    same: dict[tuple[Numbers, ...], list[int]] = {}
    for first, held in rest.items():
        same.setdefault(tuple(sorted(held)), []).append(first)
    for few, layers in same.items():
        for product in _products(few):
            yield (_numbers(layers), *product)


def _numbers(numbers: Iterable[int]) -> Dim:
    return Dim(Run("", number, 1) for number in sorted(numbers))


def _once(rules: Iterator[BufferRule]) -> Iterator[BufferRule]:
    """The rules, those that hold again what an earlier one has declared as replicas of it."""
    held: set[tuple[Tensor, tuple[Dim, ...]]] = set()
    for rule in rules:
        n = len(rule.index)
        index = tuple(table_of(dim)[0] for dim in rule.dims[:n])
        again = [(part.tensor, index) in held for part in rule.parts]
        held |= {(part.tensor, index) for part in rule.parts}
        parts = tuple(
            replace(part, replica=part.replica or twice)
            for part, twice in zip(rule.parts, again, strict=True)
        )
        yield replace(rule, parts=parts)
