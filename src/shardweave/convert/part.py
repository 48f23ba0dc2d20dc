"""A part of a checkpoint: some tensors of its model, with the states that they have.

A target that has a part says so in a file, and has no ``config.json``: nothing that loads models takes it for
one. Who reads it here takes the patterns from that file, and proves the part as a whole model is proved.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from shardweave.convert.accounting import NOT_ASKED, arrays_of
from shardweave.convert.checkpoint import Checkpoint, OptimizerState
from shardweave.errors import BufferRuleError, FormatError, GeometryError, UnknownNameError
from shardweave.layout import BufferRule, Layout, Tensor, narrowed
from shardweave.layout.subset import only as only_numbers
from shardweave.models.chosen import chosen

FILE: Final = "shardweave.part.json"
"""What says that a folder has a part of a model, in place of its config."""

Patterns = tuple[str, ...]


def part_of_checkpoint(
    source: Checkpoint, state: OptimizerState | None, patterns: Sequence[str]
) -> tuple[Checkpoint, OptimizerState | None]:
    """The part of a checkpoint that some patterns match, with its states.

    Args:
        source: The whole.
        state: Its state.
        patterns: Of names; see ``models.chosen``.

    Raises:
        UnknownNameError: A pattern matches nothing.
        GeometryError: The source has members that are chosen and others in one array, differently by layer.
    """
    found = chosen(source.model, patterns)
    layout = narrowed_to(source.layout, found.groups)
    before, after = _held(source.layout), _held(layout)
    if state is not None:
        before |= _held(state.layout)
        state = _of_state(state, found.groups)
        after |= _held(state.layout) if state is not None else {}
    part = replace(
        source,
        model=found.model,
        layout=layout,
        left_out={**source.left_out, **{key: NOT_ASKED for key in before if key not in after}},
        only=(*source.only, tuple(patterns)),
        in_part=frozenset(key for key, count in after.items() if count < before[key]),
    )
    return part, state


def _held(layout: Layout) -> dict[str, int]:
    """How many elements each array has that are of a tensor."""
    return {key: sum(elements.values()) for key, _, elements in arrays_of(layout)}


def _of_state(state: OptimizerState, groups: Sequence[Mapping[Tensor, Tensor]]) -> OptimizerState | None:
    """The states of what is chosen; the counts and settings of other weights are dropped."""
    wanted = [
        {
            of: small
            for tensor, kept in group.items()
            for of in state.states_of(tensor).values()
            for small in [_common(of, kept)]
            if small is not None
        }
        for group in groups
    ]
    layout = narrowed_to(state.layout, wanted)
    names = {name for group in groups for kept in group.values() for name in kept.names()}
    weights = {name: weight for name, weight in state.weights.items() if name in names}
    if not weights:
        return None
    return replace(
        state,
        layout=layout,
        weights=weights,
        counts={name: count for name, count in state.counts.items() if name in weights},
        settings={name: said for name, said in state.settings.items() if name in weights},
    )


def _common(state: Tensor, kept: Tensor) -> Tensor | None:
    """A state of the members that are chosen; frozen members have none."""
    index = tuple(
        (axis, only_numbers(dim, {n for _, n in wanted}))
        for (axis, dim), (_, wanted) in zip(state.index, kept.index, strict=True)
    )
    return replace(state, index=index) if all(len(dim) for _, dim in index) else None


def narrowed_to(layout: Layout, groups: Sequence[Mapping[Tensor, Tensor]]) -> Layout:
    """The arrays that hold something of what is wanted; what else they hold is padding, and never read.

    Args:
        layout: The whole.
        groups: Tensors with the members that are wanted; those that one buffer has fused in one group.

    Raises:
        GeometryError: Members of several groups are in one array.
    """
    of: dict[Tensor, list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        for tensor in group:
            of[tensor].append(number)
    rules = [one for rule in layout.rules for one in _rules(layout, rule, groups, of)]
    held = replace(layout, rules=tuple(rules))
    try:
        held.stored()
    except UnknownNameError as error:
        raise _uneven(str(error.where)) from error
    return held


def _rules(
    layout: Layout,
    rule: BufferRule,
    groups: Sequence[Mapping[Tensor, Tensor]],
    of: Mapping[Tensor, Sequence[int]],
) -> Iterator[BufferRule]:
    numbers = {part.tensor: of.get(part.tensor, ()) for part in rule.parts}
    wanted = [
        {tensor: groups[few[0]][tensor] for tensor, few in numbers.items() if few}
        if all(len(few) <= 1 for few in numbers.values())
        else {}
    ]
    if not wanted[0]:
        found = sorted({number for few in numbers.values() for number in few})
        wanted = [{t: groups[number][t] for t in numbers if t in groups[number]} for number in found]
    for few in wanted:
        if few == {tensor: tensor for tensor in numbers}:
            yield rule
            continue
        try:
            yield from narrowed(replace(layout, rules=(rule,)), few).rules
        except BufferRuleError as error:
            raise _uneven(f"array {rule.name!r}") from error


def _uneven(where: str) -> GeometryError:
    return GeometryError(
        "what is chosen of an array is the same in all layers that it holds",
        where=where,
        equation="the source has several layers in one array, and patterns match different tensors of them",
        hint="convert the whole to a format with an array for each weight first, such as native",
    )


# --- what says that a folder has a part -----------------------------------------------------------


def read(folder: Path) -> tuple[Mapping[str, Any] | None, tuple[Patterns, ...]] | None:
    """The config of the whole model, and which part of it a folder has; ``None`` where nothing says so.

    The config is ``None`` where nobody describes the model.

    Raises:
        FormatError: The file is not what this version writes.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        said = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        said = str(error)
    only = said.get("only") if isinstance(said, dict) else None
    config = said.get("config") if isinstance(said, dict) else None
    if not (
        isinstance(only, list)
        and only
        and all(isinstance(few, list) and few and all(isinstance(one, str) for one in few) for few in only)
        and (config is None or isinstance(config, dict))
    ):
        raise FormatError(
            "a part of a model says which part it is, and the config of the whole",
            where=str(path),
            equation=f"found {type(said).__name__}" if not isinstance(said, dict) else f"only({only!r:.80})",
            hint="convert the part again, or give --config none to take the tensors as they are named",
        )
    return config, tuple(tuple(few) for few in only)


def written(config: Mapping[str, Any], only: Collection[Patterns]) -> str:
    """The content of the file."""
    return json.dumps(
        {"only": [list(few) for few in only], "config": config or None}, indent=2, sort_keys=True
    )
