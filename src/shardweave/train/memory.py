"""What each rank keeps in memory to train a model, from shapes alone: no process, no group, no weight.

| kind | bytes |
|---|---|
| ``weights`` | of the rank's arrays, padding included |
| ``gradients`` | as many elements; those of shares in float32 at least, as sums of many fetches |
| ``masters`` | the values in float32 of arrays that are narrower, of the rank's part of the state |
| ``moments`` | two for each element of that part |
| ``wholes`` | the most of shared weights that are whole at once |
| ``whole_gradients`` | the most of their gradients that are whole at once |

The first four are there from step to step. The last two come and go, and do not grow with the layers: an
operation has its own weights whole, and where they are fetched ahead the next one is on its way. Gradients of
wholes are those of one operation, and the one before it whose sum is under way.

For ``P`` elements of matrices that ``T`` ranks of ``tp`` cut and ``W`` ranks share, with ``R`` copies of each
share that cut its state, ``b`` bytes for a weight and ``P`` divisible, that is ``P / (T * W) * (b + 4)`` for
weights and gradients and ``12 * P / (T * W * R)`` for masters and moments. ``W * R`` are all ranks that need
the weight: whom weights are cut over changes the first, and never the second.

Activations are not counted; nor is what messages and the update need for a moment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import prod
from typing import Any

from shardweave.layout.dtype import itemsize
from shardweave.train.arrays import held_arrays
from shardweave.train.decoder import EMBEDDING
from shardweave.train.optimizer import Settings, state_bytes
from shardweave.train.parallel import Parallel
from shardweave.train.reads import Planned, Use, planned


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a rank by kind, see above.

    Attributes:
        weights, gradients, masters, moments, wholes, whole_gradients: As above.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    wholes: int
    whole_gradients: int

    @property
    def kept(self) -> int:
        """What is there from step to step."""
        return self.weights + self.gradients + self.masters + self.moments

    @property
    def total(self) -> int:
        """All kinds together: what is there at the worst time, or more."""
        return sum(astuple(self))


def memory(
    config: Mapping[str, Any],
    parallel: Parallel,
    *,
    sharded: bool,
    dtype: str = "",
    stage_sizes: Sequence[int] | None = None,
    mtp: int = 0,
    trains_mtp: bool = True,
    multiple: int = 1,
    recompute: bool = False,
    ahead: bool = True,
    microbatches: int = 2,
    settings: Settings | None = None,
    ranks: Iterable[int] | None = None,
) -> dict[int, Memory]:
    """What each rank keeps in memory while it trains.

    Args:
        config: The Hugging Face config.
        parallel: The degrees.
        sharded: Whether replicas share the state of the optimizer.
        dtype: Of the weights; that of the config by default.
        stage_sizes: As ``build`` takes it.
        mtp: Heads for further tokens.
        trains_mtp: Whether their term has a weight; otherwise they have no gradients.
        multiple: As ``build`` takes it.
        recompute: As ``build`` takes it.
        ahead: As ``build`` takes it. What is expected is taken to come.
        microbatches: Of a step; it matters whether there is more than one.
        settings: Of the optimizer; AdamW of any settings by default.
        ranks: Of whom it is asked; all by default.

    Laws:
        ``weights``, ``gradients``, ``masters`` and ``moments`` are the bytes of the tensors that a run has.
        ``masters + moments``, summed over all ranks, do not depend on ``parallel.weight_axes`` where
        ``sharded``, but for padding.

    Raises:
        ModelError, GeometryError: As ``build`` raises them.

    Eight ranks with replicas, in shares over ``cp``, and over all:

    >>> config = {
    ...     "model_type": "qwen3", "dtype": "bfloat16", "vocab_size": 1024, "hidden_size": 64, "head_dim": 16,
    ...     "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...     "intermediate_size": 96, "tie_word_embeddings": False,
    ... }
    >>> for axes in ((), ("cp",), ("cp", "dp")):
    ...     found = memory(config, Parallel(cp=2, dp=4, weight_axes=axes), sharded=True, ranks=[0])[0]
    ...     print(len(axes), found.weights, found.gradients, found.masters + found.moments, found.wholes)
    0 509312 509312 381696 0
    1 255360 509312 381984 143360
    2 64896 128384 381984 143360
    """
    return memory_of(
        planned(config, parallel, dtype=dtype, stage_sizes=stage_sizes, mtp=mtp, multiple=multiple),
        sharded=sharded,
        trains_mtp=trains_mtp,
        recompute=recompute,
        ahead=ahead,
        microbatches=microbatches,
        settings=settings,
        ranks=ranks,
    )


def memory_of(
    model: Planned,
    *,
    sharded: bool,
    trains_mtp: bool = True,
    recompute: bool = False,
    ahead: bool = True,
    microbatches: int = 2,
    settings: Settings | None = None,
    ranks: Iterable[int] | None = None,
) -> dict[int, Memory]:
    """``memory`` of what is planned, of which more may be asked."""
    depth = model.maths.depth if trains_mtp else 0
    told = {}
    for rank in model.mesh.ranks if ranks is None else ranks:
        sizes, listed = model.sizes(rank), model.uses(rank, depth=depth)
        weights = gradients = masters = moments = 0
        for name, held in held_arrays(model.layout, rank).items():
            numel, item = prod(held.shape), itemsize(held.buffer.dtype)
            weights += numel * item
            if _is_trained(name, model, rank, depth):
                gradients += numel * (max(4, item) if name in sizes else item)
        for bucket in (plan := model.plan(rank)).buckets:
            start, stop = plan.own(bucket) if sharded else (0, bucket.numel)
            wide = max(4, itemsize(bucket.dtype))
            moments += 2 * wide * (stop - start)
            masters += wide * (stop - start) * (wide != itemsize(bucket.dtype))
        if settings is not None:
            moments = state_bytes(plan, settings, sharded=sharded) - masters
        of = {name: size.whole * itemsize(model.maths.model.dtype) for name, size in sizes.items()}
        told[rank] = Memory(
            weights,
            gradients,
            masters,
            moments,
            _most_wholes(listed, of, recompute=recompute, ahead=ahead),
            _most_gradients(listed, of, several=microbatches * model.parallel.vp > 1),
        )
    return told


def _is_trained(name: str, model: Planned, rank: int, depth: int) -> bool:
    """Whether a step leaves a gradient: not in heads that are not computed, nor in what is there for them."""
    found = model.maths
    if depth or not found.depth:
        return True
    if name == EMBEDDING:
        return found.model.tied or model.mesh.coordinate(rank)["pp"] == 0
    heads = range(found.num_layers, found.num_layers + found.depth)
    return not any(name.startswith(f"model.layers.{layer}.") for layer in heads)


# --- what comes and goes ------------------------------------------------------------------------


def _most_wholes(
    listed: Sequence[Sequence[Use]], size: Mapping[str, int], *, recompute: bool, ahead: bool
) -> int:
    """The most that is whole at once: what an operation reads, and the first that the next one does."""
    most = 0
    for chunk in listed:
        for way in ([use.names for use in chunk], list(_way_back(chunk, recompute=recompute))):
            for here, following in itertools.zip_longest(way, way[1:], fillvalue=()):
                more = following[:1] if ahead else ()
                # Of two reads of one weight on end, each has its own.
                most = max(most, sum(size[name] for name in (*here, *more)))
    return most


def _way_back(chunk: Sequence[Use], *, recompute: bool) -> Iterator[tuple[str, ...]]:
    """What is whole at the same time on the way back, in order; a layer may come forward once more before."""
    for layer, those in itertools.groupby(reversed(chunk), lambda use: use.layer):
        of_layer = list(those)
        if recompute and layer is not None:
            yield from (use.names for use in reversed(of_layer))
        for use in of_layer:
            if use.reads_back:
                yield from _read_back(use)


def _read_back(use: Use) -> Iterator[tuple[str, ...]]:
    """What the way back has whole at once of a use, in order."""
    if use.at_once:
        yield use.names
    else:
        yield from ((name,) for name in reversed(use.names))


def _most_gradients(listed: Sequence[Sequence[Use]], size: Mapping[str, int], *, several: bool) -> int:
    """The most gradients of wholes at once: those of an operation, and the last one before them."""
    most, firsts, lasts = 0, [0], [0]
    for chunk in listed:
        before = 0
        for use in reversed(chunk):
            here = sum(size[name] for name in use.names)
            most, before = max(most, before + here), size[use.names[0]]
        if chunk:
            firsts.append(sum(size[name] for name in chunk[-1].names))
            lasts.append(before)
    return max(most, max(lasts) + max(firsts)) if several else most
