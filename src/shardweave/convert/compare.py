"""Comparing stored state through a plan: the same elements, wherever and in whatever form they lie."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardweave.convert.checkpoint import Checkpoint, OptimizerState
from shardweave.convert.execute import by_stored_keys, cast
from shardweave.convert.slabs import slabs
from shardweave.convert.states import MASTER, owners, trained_part
from shardweave.errors import ReplicaError
from shardweave.layout import Box, BufferRule
from shardweave.layout.dtype import itemsize
from shardweave.layout.holders import first_holders
from shardweave.plan import Copy, Plan, plan
from shardweave.store.manifest import Manifest
from shardweave.store.read import Reader

_SLAB_BYTES = 1 << 20
"""Of each side at once: small enough to stay in cache from the reading to the comparison."""


@dataclass(frozen=True, slots=True)
class Difference:
    """An element that two checkpoints hold differently.

    Attributes:
        tensor: The canonical name of the member.
        index: Its place in the member.
        left, right: The stored words, as hexadecimal text; NaNs and signed zeros are told apart.
        left_key, right_key: Where they are stored.
        num_elements: How many elements of the tensor differ in the compared block.
    """

    tensor: str
    index: tuple[int, ...]
    left: str
    right: str
    left_key: str
    right_key: str
    num_elements: int


def differences(
    compared: Plan, left: Manifest, right: Manifest, *, progress: Callable[[int], None] | None = None
) -> Iterator[Difference]:
    """Every block of the plan whose bits differ, as its first differing element.

    A block is of one member of its tensor: of one layer, of one expert. Where the left is of another dtype,
    it is rounded to that of the right first, and what is no number is alike, whichever of its words it has.

    Args:
        compared: From the left's arrays to the right's.
        left: Where the plan reads.
        right: Where the plan would write.
        progress: Told of bytes compared.
    """
    with Reader(left) as mine, Reader(right) as other:
        a, b = _Side(mine), _Side(other)
        for copy in compared.copies():
            copy = by_stored_keys(compared, copy)
            if left is right and copy.src_name == copy.dst_name:
                continue
            for block in _by_member(copy):
                found = _compare(block, a, b)
                if progress is not None:
                    progress(block.dst_box.numel * itemsize(right.tensors[block.dst_name].dtype))
                if found is not None:
                    yield found


def _by_member(copy: Copy) -> Iterator[Copy]:
    """A copy as one copy for each member of its tensor, where the arrays have several stacked."""
    split = range(len(copy.family.tensor.index))
    for turn in itertools.product(*(range(len(copy.elements.dims[d])) for d in split)):
        yield replace(
            copy,
            src_box=_only(copy.src_box, copy.src_dims, turn),
            dst_box=_only(copy.dst_box, copy.dst_dims, turn),
            elements=_only(copy.elements, range(len(copy.elements.dims)), turn),
        )


def _only(box: Box, dims: Sequence[int], turn: tuple[int, ...]) -> Box:
    """A box at one position of each index dim; ``dims`` says which dim of the tensor each of its dims is."""
    return Box(
        tuple(
            mine[turn[d] : turn[d] + 1] if d < len(turn) else mine
            for d, mine in zip(dims, box.dims, strict=True)
        )
    )


def _compare(copy: Copy, a: _Side, b: _Side) -> Difference | None:
    dtypes = [
        side.reader.manifest.tensors[key].dtype for side, key in ((a, copy.src_name), (b, copy.dst_name))
    ]
    most = _SLAB_BYTES // max(map(itemsize, dtypes))
    first: Difference | None = None
    for slab in slabs((0,) * len(copy.dst_box.dims), copy.dst_box.shape, most):
        positions = dict(zip(copy.dst_dims, slab.dims, strict=True))
        mine = a.block(copy.src_name, copy.src_box, [positions.get(d, range(1)) for d in copy.src_dims])
        other = b.block(copy.dst_name, copy.dst_box, list(slab.dims))
        mine = copy.to_destination(mine)
        if dtypes[0] != dtypes[1]:
            mine = _rounded(mine, other, dtypes[0], dtypes[1])
        if np.array_equal(mine, other):
            continue
        different = np.argwhere(mine != other)
        if first is None:
            at = tuple(int(i) for i in different[0])
            name, index = _element(copy, {d: slab.dims[i][at[i]] for i, d in enumerate(copy.dst_dims)})
            first = Difference(
                name, index, _hex(mine[at]), _hex(other[at]), copy.src_name, copy.dst_name, len(different)
            )
        else:
            first = replace(first, num_elements=first.num_elements + len(different))
    return first


def _rounded(mine: np.ndarray, other: np.ndarray, source: str, target: str) -> np.ndarray:
    """Words in another dtype; where neither side is a number, those of the other side."""
    rounded = cast(mine, source, target).view(other.dtype)
    none = _is_nan(rounded, target) & _is_nan(other, target)
    return np.where(none, other, rounded) if none.any() else rounded


def _is_nan(words: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (words & 0x7FFF) > 0x7F80
    return np.isnan(words.view(np.dtype(dtype))) if dtype.startswith("float") else np.zeros(words.shape, bool)


class _Side:
    """One of two checkpoints, and a buffer that is used again: fresh memory is slow to touch."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._buffer = np.empty(_SLAB_BYTES, np.uint8)

    def block(self, key: str, box: Box, positions: list[range]) -> np.ndarray:
        """The stored words at some positions of a box of an array; good until the next ones are asked for."""
        wanted = [
            range(mine[p[0]], mine[p[-1]] + 1, mine.step) for mine, p in zip(box.dims, positions, strict=True)
        ]
        offset, shape = [r.start for r in wanted], [r[-1] - r[0] + 1 for r in wanted]
        item = itemsize(self.reader.manifest.tensors[key].dtype)
        size = math.prod(shape) * item
        if size > len(self._buffer):
            hull = self.reader.load_box(key, offset, shape).view(f"<u{item}")
        else:
            hull = self._buffer[:size].view(f"<u{item}").reshape(shape)
            self.reader.fill(key, offset, hull)
        # The ellipsis keeps a view where there are no dims, and numpy would give a number.
        at: tuple[Any, ...] = tuple(slice(None, None, r.step) for r in wanted)
        return hull[(*at, ...)]


def _element(copy: Copy, position: dict[int, int]) -> tuple[str, tuple[int, ...]]:
    """The member and index of an element of a copy, by its place in the copied block."""
    tensor = copy.family.tensor
    elements = copy.elements.dims
    numbers = [elements[d][position.get(d, 0)] for d in range(tensor.num_dims)]
    split = len(tensor.index)
    member = tensor.member({name: n for (name, _), n in zip(tensor.index, numbers, strict=False)})
    return member, tuple(numbers[split:])


def _hex(word: np.generic) -> str:
    return f"0x{int(word):0{2 * word.itemsize}x}"


def check_replicas(checkpoint: Checkpoint, *, workers: int = 1) -> int:
    """Compare every stored copy of a tensor with the one that owns it; returns the bytes of copies.

    Args:
        checkpoint: Of any format.
        workers: Threads; reading and comparing run without the interpreter's lock.

    Raises:
        ReplicaError: They differ; the message names the first element.
    """
    layout, manifest = checkpoint.layout, checkpoint.manifest
    first = first_holders(layout)
    kept = set(first.rules)
    copies = tuple(rule for rule in layout.rules if rule not in kept)
    if not copies:
        return 0

    def share(number: int) -> tuple[Difference | None, int]:
        sizes: list[int] = []
        compared = plan(first, replace(layout, rules=copies[number::workers]))
        return next(differences(compared, manifest, manifest, progress=sizes.append), None), sum(sizes)

    with ThreadPoolExecutor(max_workers=workers) as pool:
        shares = list(pool.map(share, range(min(workers, len(copies)))))
    for found in (one for one, _ in shares if one is not None):
        raise ReplicaError(
            "replicas hold the same bytes",
            where=f"tensor {found.tensor!r} at {found.index}{_ranks(found)}",
            equation=f"{found.left} in {found.left_key!r} != {found.right} in {found.right_key!r}, "
            f"{found.num_elements} elements differ",
            hint="copies of a tied tensor, or of ranks, drifted apart; decide which is right and store that",
        )
    return sum(size for _, size in shares)


def _ranks(found: Difference) -> str:
    """Which ranks hold the two, where keys say it."""
    ranks = [key.rpartition("@")[2] for key in (found.left_key, found.right_key) if "@" in key]
    return f", ranks {' and '.join(ranks)}" if len(ranks) == 2 else ""


def check_masters(checkpoint: Checkpoint, state: OptimizerState) -> int:
    """Compare every weight that is stored beside its master with the master, rounded; returns their elements.

    Raises:
        ReplicaError: They differ; the message names the first element.
    """
    layout = checkpoint.layout
    of = {(rule.name, rule.parts[0].tensor): rule for rule in state.layout.rules}
    masters, weights = list[BufferRule](), list[BufferRule]()
    for rule in owners(layout):
        tensor = state.states_of(rule.parts[0].tensor).get(MASTER)
        if tensor is not None:
            kept, _ = next(trained_part(layout, rule, state))
            masters.append(replace(of[f"optim/{rule.name}/{MASTER}", tensor], parts=kept.parts))
            weights.append(kept)
    if not weights:
        return 0
    compared = plan(
        first_holders(replace(layout, rules=tuple(masters))),
        replace(layout, rules=tuple(weights)),
        allow_casts=True,
    )
    for found in differences(compared, checkpoint.manifest, checkpoint.manifest):
        raise ReplicaError(
            "a master rounds to its weight",
            where=f"tensor {found.tensor!r} at {found.index}{_ranks(found)}",
            equation=f"{found.left} of {found.left_key!r}, rounded, != {found.right} in {found.right_key!r}, "
            f"{found.num_elements} elements differ",
            hint="the state is of other weights than those beside it: save both again, or convert weights "
            "alone with --weights-only",
        )
    return sum(tensor.numel for tensor in replace(layout, rules=tuple(weights)).tensors)
