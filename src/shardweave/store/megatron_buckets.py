"""Flat buckets of Megatron's distributed optimizer as states of whole weights.

A folder with ``dp_reshardable`` states stores of each bucket of each group of ranks one array of one dim:

    ``optimizer.distributed.dp_group_idx_{g}.gbuf_idx_{b}.dtype_({t}, {u}).bucket_idx_{n}.{state}``

with ``chained_{k}.`` before it where optimizers are chained, and ``.cp_rank_{c}`` before the state where
ranks of a context group share matrices, so that each has other rows. Which parameter lies where in it is
geometry, given by the caller. It is held against what is stored, and becomes boxes of the arrays of the
weights:

    - every stored chunk lies within one parameter or within padding, as Megatron cuts them;
    - copies of a parameter on several ranks have the same bits;
    - the boxes of every state tile the weight, each element once;
    - masters round to the weights (``prove_masters``).

Source: megatron-core 0.16.1, ``DistributedOptimizer.sharded_param_state_dp_reshardable``. No release up to it
writes keys with ``cp_rank``: they are what Megatron-LM's public change for folded context ranks describes.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from shardweave.errors import DtypeError, FormatError, GapError, IndexMismatchError, ReplicaError
from shardweave.layout import Box, flat_boxes, intersect
from shardweave.store.manifest import ITEMSIZE, Extent, Manifest, StoredTensor
from shardweave.store.megatron_groups import MASTER, MASTERS
from shardweave.store.read import Reader
from shardweave.store.tiling import prove_tiling

_KEY = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(torch\.(\w+), torch\.\w+\)\.bucket_idx_(\d+)(?:\.cp_rank_(\d+))?\.(\w+)"
)
_SAMPLE: Final = 4096
"""Elements at each end of a box that are compared with the weight."""
_WHOLE: Final = "copy the whole folder; every rank of the save wrote files of its own"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket as it is stored.

    Attributes:
        chained: The number of its optimizer among those that are chained; ``None`` for the only one.
        group: The number of the ranks that share it: those of one place in the model.
        buffer: The number of its buffer.
        number: Its number in the buffer.
        dtype: The dtype of its parameters.
        states: Its arrays by state, ``master`` among them.
        cp_rank: The rank of the context group whose rows it has; ``None`` where these ranks have the same.
    """

    chained: int | None
    group: int
    buffer: int
    number: int
    dtype: str
    states: Mapping[str, StoredTensor]
    cp_rank: int | None = None

    @property
    def size(self) -> int:
        """Elements without the padding at its end."""
        return next(iter(self.states.values())).shape[0]

    def __str__(self) -> str:
        chained = "" if self.chained is None else f"chained_{self.chained}, "
        of_cp = "" if self.cp_rank is None else f" of cp rank {self.cp_rank}"
        at = f"{chained}group {self.group}, buffer {self.buffer} of {self.dtype}"
        return f"{at}, bucket {self.number}{of_cp}"


Part = tuple[str, Box, Box]
"""An array, a box of it, and the box of a parameter that this is."""


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter in a bucket.

    Attributes:
        name: Its name, for messages.
        start: Its first element in the bucket.
        shape: Its shape on its rank.
        parts: Which boxes of arrays it is.
        replica: Whether another one stands for it.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    parts: Sequence[Part]
    replica: bool = False


def buckets(manifest: Manifest) -> list[Bucket]:
    """The buckets of a folder, in order.

    Raises:
        FormatError: Buckets of a kind that is not read, or arrays of several sizes.
        GapError: Numbers of buckets, or of ranks of a context group, with gaps.
    """
    found: dict[tuple[int, int, int, int, int, str], dict[str, StoredTensor]] = {}
    for key, tensor in manifest.tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            if ".gbuf_idx_" in key:
                raise FormatError(
                    "keys of flat buckets are those of Megatron's distributed optimizer",
                    where=str(manifest.root),
                    equation=f"{key!r:.200} is of another form",
                    hint="it was saved by a version that is not known here; convert the weights alone with "
                    "--weights-only",
                )
            continue
        chained, group, buffer, dtype, number, cp_rank, state = match.groups()
        if dtype == "uint8":
            raise FormatError(
                "buckets hold parameters of one dtype",
                where=f"{manifest.root}, {key!r}",
                equation="fp8 parameters: their weights are no rounded masters",
                hint="save the optimizer with --dist-ckpt-optim-fully-reshardable",
            )
        of_cp = -1 if cp_rank is None else int(cp_rank)
        at = (-1 if chained is None else int(chained), int(group), int(buffer), of_cp, int(number), dtype)
        states = found.setdefault(at, {})
        states[MASTER if state in MASTERS else state] = tensor
    made = []
    for (chain, group_, buffer_, of_cp, number_, dtype), states in sorted(found.items()):
        sizes = {(tensor.shape, tensor.dtype) for tensor in states.values()}
        chained_, cp_rank_ = (None if n < 0 else n for n in (chain, of_cp))
        bucket = Bucket(chained_, group_, buffer_, number_, dtype, states, cp_rank_)
        if len(sizes) != 1 or any(len(shape) != 1 for shape, _ in sizes) or MASTER not in states:
            raise FormatError(
                "the states of a bucket are of one size, masters among them",
                where=f"{manifest.root}, {bucket}",
                equation=", ".join(f"{state}{tensor.shape}" for state, tensor in states.items()),
                hint=_WHOLE,
            )
        made.append(bucket)
    for last, bucket in zip([None, *made], made, strict=False):
        same = last is not None and (last.chained, last.group, last.buffer, last.cp_rank) == (
            bucket.chained, bucket.group, bucket.buffer, bucket.cp_rank,
        )  # fmt: skip
        if bucket.number != (last.number + 1 if same and last is not None else 0):
            raise GapError(
                "the buckets of a buffer are numbered from 0 on",
                where=f"{manifest.root}, {bucket}",
                equation=f"bucket({last.number if same and last is not None else 'none'}) comes before it",
                hint=_WHOLE,
            )
    _prove_context(manifest, made)
    return made


def context_ranks(stored: Sequence[Bucket]) -> int:
    """How many ranks of a context group have rows of their own; 1 where all of them have the same."""
    return 1 + max((one.cp_rank for one in stored if one.cp_rank is not None), default=0)


def _prove_context(manifest: Manifest, stored: Sequence[Bucket]) -> None:
    """Every rank of a context group has stored equal shares of a buffer, or none has any of its own."""
    count = context_ranks(stored)
    buffers: dict[tuple[int | None, int, int], dict[int | None, list[tuple[str, int]]]] = {}
    for one in stored:
        of = buffers.setdefault((one.chained, one.group, one.buffer), {})
        of.setdefault(one.cp_rank, []).append((one.dtype, one.size))
    for (_, group, buffer), of in buffers.items():
        if set(of) not in ({None}, set(range(count))):
            raise GapError(
                "each rank of a context group has stored its share of a folded buffer",
                where=f"{manifest.root}, group {group}, buffer {buffer}",
                equation=f"cp ranks({', '.join('none' if c is None else str(c) for c in of)}) of {count}",
                hint=_WHOLE,
            )
        if len({tuple(sizes) for sizes in of.values()}) != 1:
            raise FormatError(
                "shares of a folded buffer are of one size",
                where=f"{manifest.root}, group {group}, buffer {buffer}",
                equation="; ".join(f"cp rank {c}: {sizes}" for c, sizes in of.items()),
                hint=_WHOLE,
            )


def assembled(
    manifest: Manifest,
    held: Sequence[tuple[Bucket, Sequence[Held]]],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    borders: bool = True,
) -> dict[str, StoredTensor]:
    """The states ``optim/{array}/{state}`` of whole weights, as boxes of the files.

    Args:
        manifest: The folder.
        held: Every bucket, and which parameters lie where in it. A state without a name is the weight itself,
            under the name of its array.
        shapes: The whole shape of each array.
        borders: Whether no stored chunk reaches from one parameter into another.

    Raises:
        IndexMismatchError: A stored chunk crosses the border of a parameter.
        ReplicaError: Copies of a parameter differ.
        GapError, OverlapError: The states do not tile a weight.
    """
    extents: dict[tuple[str, str, str], list[Extent]] = {}
    for bucket, parameters in held:
        for state, stored in bucket.states.items():
            # In order, those of a parameter are found without a look at the others.
            tensor = replace(stored, extents=tuple(sorted(stored.extents, key=lambda one: one.offset)))
            if borders:
                _prove_borders(manifest, bucket, tensor, parameters)
            for one in parameters:
                if one.replica:
                    continue
                for array, extent in _extents(tensor, one):
                    extents.setdefault((array, state, tensor.dtype), []).append(extent)
    made = {
        name: StoredTensor(name, dtype, shapes[array], tuple(boxes))
        for (array, state, dtype), boxes in extents.items()
        for name in [_name(array, state)]
    }
    prove_tiling(made.values(), root=manifest.root)
    buckets_of = {_flat(one.key): one for bucket, _ in held for one in bucket.states.values()}
    _prove_replicas(replace(manifest, tensors={**made, **buckets_of}), held)
    return made


def _name(array: str, state: str) -> str:
    return f"optim/{array}/{state}" if state else array


def _flat(key: str) -> str:
    """A name for a bucket beside the arrays that are made of it, which may have the same key."""
    return f"flat/{key}"


def _prove_borders(
    manifest: Manifest, bucket: Bucket, tensor: StoredTensor, parameters: Sequence[Held]
) -> None:
    for one in parameters:
        start, stop = one.start, one.start + math.prod(one.shape)
        for extent in _within(tensor, start, stop):
            low, high = extent.offset[0], extent.offset[0] + extent.shape[0]
            if not start <= low <= high <= stop:
                raise IndexMismatchError(
                    "a stored chunk of a bucket is of one parameter, or of padding",
                    where=f"{manifest.root}, {bucket}",
                    equation=f"chunk [{low}:{high}] and {one.name!r} at [{start}:{stop}]",
                    hint="it was saved by a job of other degrees, stages or another layer spec",
                )


def _within(tensor: StoredTensor, start: int, stop: int) -> Iterator[Extent]:
    """The chunks of a bucket, in order, that share an element with a stretch of it."""
    first = bisect_right(tensor.extents, start, key=lambda one: one.offset[0] + one.shape[0])
    for extent in tensor.extents[first:]:
        if extent.offset[0] >= stop:
            return
        yield extent


def _extents(tensor: StoredTensor, one: Held) -> Iterator[tuple[str, Extent]]:
    """A parameter of a bucket as boxes of arrays."""
    item = ITEMSIZE[tensor.dtype]
    for extent in _within(tensor, one.start, one.start + math.prod(one.shape)):
        low = max(extent.offset[0] - one.start, 0)
        high = min(extent.offset[0] + extent.shape[0] - one.start, math.prod(one.shape))
        first = extent.start + (one.start + low - extent.offset[0]) * item
        for box in flat_boxes(one.shape, low, high):
            for array, whole, at in one.parts:
                common = intersect(box, at)
                if common is None:
                    continue
                strides = _row_major(box.shape)
                inner = [dim.start - base.start for dim, base in zip(common.dims, box.dims, strict=True)]
                begin = first + item * sum(n * step for n, step in zip(inner, strides, strict=True))
                fixed = len(whole.dims) - len(at.dims)
                moved = [
                    w.start + c.start - a.start
                    for w, c, a in zip(whole.dims[fixed:], common.dims, at.dims, strict=True)
                ]
                dense = strides == _row_major(common.shape)
                yield (
                    array,
                    Extent(
                        (*whole.offset[:fixed], *moved),
                        (*whole.shape[:fixed], *common.shape),
                        extent.file,
                        begin,
                        None if dense else (*(strides[0] * box.shape[0],) * fixed, *strides),
                    ),
                )
            first += box.numel * item


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _prove_replicas(manifest: Manifest, held: Sequence[tuple[Bucket, Sequence[Held]]]) -> None:
    with Reader(manifest) as reader:
        for bucket, parameters in held:
            for one in parameters:
                if not one.replica:
                    continue
                for state, tensor in bucket.states.items():
                    mine = reader.load_box(_flat(tensor.key), (one.start,), (math.prod(one.shape),))
                    mine = mine.reshape(one.shape)
                    for array, box, at in one.parts:
                        theirs = reader.load_box(_name(array, state), box.offset, box.shape)
                        here = np.ascontiguousarray(mine[tuple(slice(d.start, d.stop) for d in at.dims)])
                        if here.tobytes() != theirs.tobytes():
                            raise ReplicaError(
                                "ranks that hold the same parameter have the same values of it",
                                where=f"{manifest.root}, {bucket}",
                                equation=f"{state or 'values'} of {one.name!r} differ from those elsewhere",
                                hint="the ranks of the run drifted apart, or files of two saves were mixed",
                            )


# --- masters ------------------------------------------------------------------------------------


def prove_masters(manifest: Manifest) -> None:
    """Prove that masters are those of the weights: at both ends of each of their boxes they round to them.

    A state at a wrong place is shifted as a whole, so ends show it.

    Args:
        manifest: With states ``optim/{array}/master`` beside the weights.

    Raises:
        ReplicaError: A master does not round to its weight.
        DtypeError: The weights of masters are of a dtype that is not rounded.
    """
    # Two readers: each remembers which array it has proved.
    with Reader(manifest) as masters, Reader(manifest) as weights:
        for name, tensor in manifest.tensors.items():
            array, _, state = name.removeprefix("optim/").rpartition("/")
            if not name.startswith("optim/") or state != MASTER:
                continue
            weight = manifest.tensors[array]
            for extent in tensor.extents:
                for offset, shape in _ends(extent):
                    expected = _rounded(masters.load_box(name, offset, shape), weight.dtype, name)
                    found = weights.load_box(array, offset, shape)
                    # Which of the words for no number it is depends on who rounded.
                    nan = _is_nan(found, weight.dtype) & _is_nan(expected, weight.dtype)
                    wrong = (found.view(expected.dtype) != expected) & ~nan
                    if wrong.any():
                        raise ReplicaError(
                            "a master rounds to its weight",
                            where=f"{manifest.root}, {name!r}, box at {offset} of {shape}",
                            equation=f"{int(wrong.sum())} of {wrong.size} elements differ in {weight.dtype}",
                            hint="the state is of other weights or lies at a wrong place; save it again, or "
                            "convert the weights alone with --weights-only",
                        )


def _ends(extent: Extent) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes at the begin and at the end of an extent."""
    shape = list(extent.shape)
    for d, size in enumerate(shape):
        rest = math.prod(shape[d + 1 :])
        keep = max(1, min(size, _SAMPLE // max(1, rest)))
        shape[d] = keep if rest < _SAMPLE else 1
    low = extent.offset
    high = tuple(o + full - n for o, full, n in zip(low, extent.shape, shape, strict=True))
    yield low, tuple(shape)
    if high != low:
        yield high, tuple(shape)


def _rounded(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """fp32 values rounded to nearest, ties to even, as words of a dtype."""
    if dtype == "float32":
        return values.view("<u4")
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype("<f2").view("<u2")
    if dtype != "bfloat16":
        raise DtypeError(
            "masters are of weights in float32, bfloat16 or float16",
            where=repr(name),
            equation=f"the weight is {dtype}",
            hint="convert the weights alone with --weights-only",
        )
    words = values.view("<u4").astype(np.uint64)
    rounded = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype("<u2")
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_nan(words: np.ndarray, dtype: str) -> np.ndarray:
    nan: np.ndarray
    if dtype == "bfloat16":
        nan = (words.view("<u2") & 0x7FFF) > 0x7F80
    else:
        nan = np.isnan(words.view({"float32": "<f4", "float16": "<f2"}[dtype]))
    return nan
