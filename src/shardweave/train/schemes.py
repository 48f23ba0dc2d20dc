"""Other ways to hold the weights of one model on the same ranks, and what each costs a rank.

None of them changes what is computed: which documents a rank has depends on the data ranks alone. So all ways
stand beside each other, with the bytes that a rank keeps and those that it sends in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardweave.train.memory import Memory
from shardweave.train.parallel import Parallel
from shardweave.train.reads import Planned
from shardweave.train.traffic import Traffic

NODE = 8
"""The most ranks that a share is cut over where a run has no ``remat`` and HSDP is to be compared."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to hold the weights.

    Attributes:
        name: What it is.
        parallel: Its degrees.
        sharded: Whether copies of a weight share the state of the optimizer.
        is_this: Whether it is that of the run.
    """

    name: str
    parallel: Parallel
    sharded: bool
    is_this: bool

    @property
    def effective(self) -> tuple[object, ...]:
        """What two schemes have in common that are one: axes of one rank do nothing."""
        of = self.parallel
        axes = {axis for axis in of.dense_axes if getattr(of, axis) > 1}
        data = {axis for axis in ("remat", "dp") if getattr(of, axis) > 1}
        some = "all" if axes >= data else tuple((axis, getattr(of, axis)) for axis in sorted(axes & data))
        return "cp" in axes, some if axes & data else (), of.num_expert_shares, self.sharded


@dataclass(frozen=True, slots=True)
class Cost:
    """What a scheme costs one rank.

    Attributes:
        scheme: The scheme.
        memory: Bytes by kind.
        sent_bytes: Sent to others in a full step.
    """

    scheme: Scheme
    memory: Memory
    sent_bytes: int


def schemes(parallel: Parallel, *, sharded: bool) -> tuple[Scheme, ...]:
    """The ways that there are on these ranks, that of the run first where it is none of the known ones.

    Args:
        parallel: The degrees of the run.
        sharded: Whether its copies share the state.

    >>> for scheme in schemes(Parallel(cp=2, remat=2, dp=3), sharded=True):
    ...     print(scheme.name, scheme.parallel.num_shares, "this run" if scheme.is_this else "")
    replicas (DP) 1
    replicas (ZeRO-1) 1
    remat (GTP_remat) 2 this run
    remat and cp 4
    remat (HSDP) 2
    dp (FSDP) 6
    dp and cp (FSDP) 12
    """
    this = Scheme("as here", parallel, sharded, True)
    found: dict[tuple[object, ...], Scheme] = {}
    for name, degrees, state in _known(_with_remat(parallel), sharded):
        scheme = Scheme(name, degrees, state, False)
        if scheme.effective == this.effective:
            scheme = replace(this, name=name)
        found.setdefault(scheme.effective, scheme)
    listed = tuple(found.values())
    return listed if any(scheme.is_this for scheme in listed) else (this, *listed)


def _known(of: Parallel, sharded: bool) -> Iterator[tuple[str, Parallel, bool]]:
    def over(*axes: str) -> Parallel:
        return replace(of, weight_axes=axes)

    yield "replicas (DP)", over(), False
    yield "replicas (ZeRO-1)", over(), True
    if of.remat > 1:
        yield "remat (GTP_remat)", over("remat"), True
    if of.cp > 1:
        yield "remat and cp" if of.remat > 1 else "cp", over("remat", "cp"), True
    if of.remat > 1:
        yield "remat (HSDP)", over("remat"), False
    yield "dp (FSDP)", over("remat", "dp"), sharded
    if of.cp > 1:
        yield "dp and cp (FSDP)", over("cp", "remat", "dp"), sharded


def _with_remat(of: Parallel) -> Parallel:
    """The same ranks with some of ``dp`` as ``remat``, where there is none: those of a node."""
    some = [size for size in range(2, min(NODE, of.dp - 1) + 1) if of.dp % size == 0]
    return replace(of, remat=some[-1], dp=of.dp // some[-1]) if of.remat == 1 and some else of


def compared(
    listed: Sequence[Scheme],
    model_of: Callable[[Parallel], Planned],
    memory_of: Callable[[Planned, bool], Memory],
    traffic_of: Callable[[Planned, bool], Traffic],
    rank: int,
) -> tuple[Cost, ...]:
    """What each scheme costs a rank.

    Args:
        listed: The schemes.
        model_of: The model on some degrees.
        memory_of: What the rank keeps of it, with the state shared or not.
        traffic_of: What it sends.
        rank: The rank.
    """
    found, models = [], dict[Parallel, Planned]()
    for scheme in listed:
        if scheme.parallel not in models:
            models[scheme.parallel] = model_of(scheme.parallel)
        model = models[scheme.parallel]
        sent = traffic_of(model, scheme.sharded).total(rank)
        found.append(Cost(scheme, memory_of(model, scheme.sharded), sent))
    return tuple(found)
