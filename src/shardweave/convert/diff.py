"""Comparing two checkpoints as models, whatever their formats: names, dtypes, every bit, and states.

Formats that keep weights rounded have masters beside them; in others the weights are the masters. What both
have in full precision is compared as that, and weights as they are stored where both store them alike.
"""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardweave.convert.checkpoint import Checkpoint, OptimizerState, Settings
from shardweave.convert.compare import Difference, check_masters, check_replicas, differences
from shardweave.convert.convert import states
from shardweave.convert.masters import AGAIN, with_states
from shardweave.convert.part import narrowed_to
from shardweave.convert.source import open_checkpoint
from shardweave.convert.staging import require_finished
from shardweave.convert.states import MASTER
from shardweave.errors import ModelError
from shardweave.layout import Layout, Tensor
from shardweave.layout.dtype import itemsize
from shardweave.layout.subset import only
from shardweave.plan import plan

_OF_RANKS: Final = frozenset({"is_expert_parallel"})
"""Settings that say how a job is laid out, not how it goes on."""
_BRACES: Final = re.compile(r"(\{\w+\})")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of an optimizer that two checkpoints have differently.

    Attributes:
        name: What it is called.
        left, right: Its values.
        weights: The weights that have them.
    """

    name: str
    left: object
    right: object
    weights: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two checkpoints differ.

    States of weights are tensors ``optim/{name}/{state}``, masters among them.

    Attributes:
        missing: Tensors that only the left has, by canonical name.
        extra: Tensors that only the right has.
        dtypes: Families that both have in different dtypes, which are not compared further.
        first: The first differing element of each tensor, in order.
        num_elements: Differing elements of each tensor.
        num_tensors: Tensors whose bits were compared.
        num_bytes: Bytes that were compared.
        stored: The dtype of each tensor that differs.
        shapes: Families that both have in different shapes, which are not compared further.
        as_masters: Families of weights that both have in full precision, though not both as weights.
        has_state: Whether the left, and the right, has the state of an optimizer.
        num_states: States of weights that were compared; they are among ``num_tensors``.
        counts: The numbers of updates of weights that were updated unequally often.
        settings: The settings of weights that differ, of those that both sides know.
    """

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    dtypes: Mapping[str, tuple[str, str]]
    first: Mapping[str, Difference]
    num_elements: Mapping[str, int]
    num_tensors: int
    num_bytes: int
    stored: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    as_masters: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    has_state: tuple[bool, bool] = (False, False)
    num_states: int = 0
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    settings: tuple[Setting, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        differ = self.missing or self.extra or self.dtypes or self.shapes or self.first
        return not (differ or self.counts or self.settings)


def compare(
    left: Path,
    right: Path,
    *,
    left_config: Path | Mapping[str, Any] | None = None,
    right_config: Path | Mapping[str, Any] | None = None,
    weights_only: bool = False,
    settings: Settings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two checkpoints of any format, element by element and bit by bit.

    The state of an optimizer is compared where both have one.

    Args:
        left: A folder, or one safetensors file.
        right: The other.
        left_config: The model's Hugging Face config; by default the one in the folder.
        right_config: The same of the other.
        weights_only: Whether to leave states out.
        settings: What reads the settings of the optimizer off a native checkpoint that a run saved.
        progress: Told ``(bytes compared, bytes in all)``.

    Raises:
        ReplicaError: One of the two contradicts itself.
        ShardweaveError: One of the two cannot be understood.
    """
    a, b = _open(left, left_config), _open(right, right_config)
    of_a, of_b = (None if weights_only else states(one, settings=settings) for one in (a, b))
    left_side, right_side = a, b
    has_state = of_a is not None, of_b is not None
    if of_a is not None and of_b is not None:
        masters = {tensor.name for one in (of_a, of_b) for tensor in one.layout.tensors if _is_master(tensor)}
        a, b = (_with_states(one, of, masters) for one, of in ((a, of_a), (b, of_b)))
    ours, theirs = _names(a.layout), _names(b.layout)
    shapes = _shapes(a.layout, b.layout)
    first_layout, second_layout = _in_common(a.layout, b.layout)
    _check_seen((ours & theirs) - _names(first_layout), shapes)
    mine, others = _families(first_layout), _families(second_layout)
    dtypes = {
        tensor.name: (mine[tensor], others[tensor]) for tensor in mine if mine[tensor] != others[tensor]
    }
    alike = {tensor for tensor in mine if mine[tensor] == others[tensor]}
    # Weights that one side has rounded are not compared, and their masters are.
    full = {tensor.name for tensor in alike if _is_master(tensor)}
    as_masters = {name: both for name, both in dtypes.items() if f"optim/{name}/{MASTER}" in full}
    if as_masters:
        for one, of in ((left_side, of_a), (right_side, of_b)):
            if of is not None:
                check_masters(one, of)  # then what is rounded is alike where masters are
    compared = plan(_bare_layout(first_layout, mine), _bare_layout(second_layout, others), allow_casts=True)
    compared = replace(compared, families=tuple(f for f in compared.families if f.tensor in alike))
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, compared.num_bytes)

    first: dict[str, Difference] = {}
    count: Counter[str] = Counter()
    for found in differences(compared, a.manifest, b.manifest, progress=tell):
        first.setdefault(found.tensor, _as_stored(found))
        count[found.tensor] += found.num_elements
    counts, words = dict[str, tuple[int, int]](), tuple[Setting, ...]()
    if of_a is not None and of_b is not None:
        counts, words = _counts(of_a, of_b), _settings(of_a, of_b)
    return Comparison(
        missing=tuple(sorted(ours - theirs)),
        extra=tuple(sorted(theirs - ours)),
        dtypes={name: both for name, both in dtypes.items() if name not in as_masters},
        first=first,
        num_elements=count,
        num_tensors=sum(1 for tensor in alike for _ in tensor.names()),
        num_bytes=compared.num_bytes,
        stored={name: mine[tensor] for tensor in alike for name in tensor.names() if name in first},
        shapes=shapes,
        as_masters=as_masters,
        has_state=has_state,
        num_states=sum(1 for tensor in alike if _is_state(tensor) for _ in tensor.names()),
        counts=counts,
        settings=words,
    )


def _open(root: Path, config: Path | Mapping[str, Any] | None) -> Checkpoint:
    require_finished(root)
    found = open_checkpoint(root, config=config)
    check_replicas(found)
    return found


def _with_states(source: Checkpoint, state: OptimizerState, masters: Collection[str]) -> Checkpoint:
    """Weights, states, and a master of each weight that one of the two sides has one of."""
    whole, _ = with_states(source, state, masters="always", dtype=None)
    check_replicas(replace(source, layout=state.layout))
    rules = (
        rule
        for rule in whole.layout.rules
        if not _is_master(rule.parts[0].tensor) or rule.parts[0].tensor.name in masters
    )
    return replace(whole, layout=replace(whole.layout, rules=tuple(rules)))


def _is_state(tensor: Tensor) -> bool:
    return tensor.name.startswith("optim/")


def _is_master(tensor: Tensor) -> bool:
    return _is_state(tensor) and tensor.name.endswith(f"/{MASTER}")


def _as_stored(found: Difference) -> Difference:
    """With the keys that are in files, also where a weight was read as its own master."""
    return replace(
        found,
        left_key=found.left_key.removeprefix(AGAIN),
        right_key=found.right_key.removeprefix(AGAIN),
    )


# --- states -------------------------------------------------------------------------------------


def _counts(a: OptimizerState, b: OptimizerState) -> dict[str, tuple[int, int]]:
    both = {name: (a.counts[name], b.counts[name]) for name in sorted(a.counts.keys() & b.counts.keys())}
    return {name: (left, right) for name, (left, right) in both.items() if left != right}


def _settings(a: OptimizerState, b: OptimizerState) -> tuple[Setting, ...]:
    """What differs of the settings that both sides have, weights with the same values together."""
    found: dict[tuple[str, str, str], tuple[object, object, list[str]]] = {}
    for name in a.settings.keys() & b.settings.keys():
        mine, other = a.settings[name], b.settings[name]
        for word in sorted((mine.keys() & other.keys()) - _OF_RANKS):
            left, right = (tuple(v) if isinstance(v, list) else v for v in (mine[word], other[word]))
            if left != right:
                key = word, repr(left), repr(right)
                found.setdefault(key, (left, right, []))[2].append(name)
    return tuple(
        Setting(word, left, right, tuple(sorted(names)))
        for (word, _, _), (left, right, names) in sorted(found.items(), key=operator.itemgetter(0))
    )


# --- what both have -----------------------------------------------------------------------------


def _names(layout: Layout) -> set[str]:
    return {name for tensor in layout.tensors for name in tensor.names()}


def _shapes(a: Layout, b: Layout) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Families of one name that differ in the shape of their members."""
    by_name = {tensor.name: tensor for tensor in b.tensors}
    return {
        tensor.name: (tensor.shape, other.shape)
        for tensor in a.tensors
        for other in [by_name.get(tensor.name)]
        if other is not None and tensor.shape != other.shape and any(_common(tensor, other))
    }


def _check_seen(names: Collection[str], shapes: Collection[str]) -> None:
    """Nothing that both have is passed over: families are compared with families, and names with names."""
    rest = [name for name in sorted(names) if not any(_is_of(name, family) for family in shapes)]
    if rest:
        raise ModelError(
            "both sides of a comparison are described in the same way",
            where=repr(rest[0]),
            equation=f"{len(rest)} tensors are of a family on one side, and of none on the other",
            hint="give the config of the model for both sides, or --config none for both",
        )


def _is_of(name: str, family: str) -> bool:
    pattern = "".join(
        re.escape(part) if i % 2 == 0 else r"\d+" for i, part in enumerate(_BRACES.split(family))
    )
    return re.fullmatch(pattern, name) is not None


def _in_common(a: Layout, b: Layout) -> tuple[Layout, Layout]:
    """Both layouts with the members of families that both have; a part has some of a whole."""
    by_name: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in b.tensors:
        by_name[tensor.name].append(tensor)
    pairs = [
        (mine, other, common)
        for mine in a.tensors
        for other in by_name[mine.name]
        if mine.shape == other.shape
        for common in _common(mine, other)
    ]
    return (
        narrowed_to(a, [{mine: common} for mine, _, common in pairs]),
        narrowed_to(b, [{other: replace(common, dtype=other.dtype)} for _, other, common in pairs]),
    )


def _common(mine: Tensor, other: Tensor) -> Iterator[Tensor]:
    index = tuple(
        (axis, only(dim, {n for _, n in theirs}))
        for (axis, dim), (_, theirs) in zip(mine.index, other.index, strict=True)
    )
    if all(len(dim) for _, dim in index):
        yield replace(mine, index=index)


def _families(layout: Layout) -> dict[Tensor, str]:
    """Each family, without a dtype of its own, and the dtype that it is stored in."""
    return {_bare(part.tensor): rule.dtype for rule in layout.rules for part in rule.parts}


def _bare(tensor: Tensor) -> Tensor:
    return replace(tensor, dtype="float32")


def _bare_layout(layout: Layout, tensors: Collection[Tensor]) -> Layout:
    """The buffers of a layout that hold nothing but the given tensors, all of one dtype."""
    rules = (
        replace(rule, parts=tuple(replace(part, tensor=_bare(part.tensor)) for part in rule.parts))
        for rule in layout.rules
    )
    kept = (rule for rule in rules if all(part.tensor in tensors for part in rule.parts))
    return replace(layout, rules=tuple(kept))


def value_of(word: str, dtype: str) -> float | int | bool | complex:
    """The number that a stored word, as hexadecimal text, is in a dtype.

    >>> value_of("0x3f800000", "float32"), value_of("0x4049", "bfloat16"), value_of("0xff", "int8")
    (1.0, 3.140625, -1)
    """
    size = itemsize(dtype)
    data = int(word, 16).to_bytes(size, "little")
    if dtype == "bfloat16":
        return float(np.frombuffer(b"\0\0" + data, "<f4")[0])
    if dtype.startswith("float8"):
        import torch

        return float(torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))[0])
    value: float | int | bool | complex = np.frombuffer(data, np.dtype(dtype)).item()
    return value
