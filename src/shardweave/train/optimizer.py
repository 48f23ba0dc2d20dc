"""AdamW and Muon over the arrays of a rank, their state whole on every replica or cut over them.

Sharded, a rank updates the part of each bucket that is its own, and the replicas gather the new values with
one message a bucket: the state costs memory once and not once a replica, and no bit of the result differs.
Arrays that are narrower than float32 have masters in float32 beside them, from which they are rounded.
Muon needs whole matrices for a moment, which come together and go apart again in between (``matrices.py``).

The state is named by array, state and box. Nothing in it says how many ranks there were or how buckets were
cut, so that it can be stored, and continued in another layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from shardweave.errors import DtypeError, PlanError, UnknownNameError
from shardweave.layout import Box
from shardweave.train.agreement import check_update
from shardweave.train.arrays import Held
from shardweave.train.gradients import Gradients, gather_stretches, group_of, measure, sum_gradients
from shardweave.train.grid import Groups
from shardweave.train.matrices import Matrices
from shardweave.train.muon import Muon, MuonRule
from shardweave.train.reduction import Bucket, ReducePlan
from shardweave.train.schedules import Schedule

MASTER, FIRST, SECOND = "master", "exp_avg", "exp_avg_sq"
"""The names of states: the values in full precision, and the moments of AdamW."""

_CHUNK = 1 << 16
"""Elements that are updated at once on a processor: what they need stays in its caches."""


# --- settings -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay; the formula is that of ``torch.optim.AdamW``.

    Attributes:
        lr: The learning rate, or a function of the number of the update.
        beta1, beta2: How much of the moments stays.
        eps: Added to the root of the second moment.
        weight_decay: The share of a weight that it loses, times the learning rate.
    """

    lr: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    states: ClassVar[tuple[str, ...]] = (FIRST, SECOND)

    def rate(self, step: int) -> float:
        """The learning rate of an update, counted from 1."""
        return self.lr(step) if callable(self.lr) else self.lr

    def rule(self, held: Held) -> AdamW:
        """How an array is updated: like any other."""
        return self

    def prepare(self, grad: Tensor, first: Tensor, second: Tensor) -> None:
        """Nothing: no element of an update depends on the gradients of others."""

    def update(self, values: Tensor, grad: Tensor, first: Tensor, second: Tensor, *, step: int) -> None:
        """One update in place."""
        adamw(values, grad, first, second, self, step=step)


Settings = Callable[[str, tuple[int, ...]], AdamW | Muon]
"""The settings of an array by its name and shape."""

NO_LAYER_MATRIX = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
"""How the names of matrices end that map tokens or choices and not states: embeddings, heads and routers."""


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether an array has two dims or more: no norm and no bias, also not those of experts in a stack."""
    return len(shape) > 1 and not name.endswith(".bias")


def decayed(settings: AdamW, *, where: Callable[[str, tuple[int, ...]], bool] = is_matrix) -> Settings:
    """Settings whose weight decay is for the arrays of which ``where(name, shape)`` holds only."""
    still = replace(settings, weight_decay=0.0)
    return lambda name, shape: settings if where(name, shape) else still


def muon_for_matrices(muon: Muon, adamw: AdamW) -> Settings:
    """Muon for the matrices of layers, AdamW for embeddings, heads, routers, norms and biases.

    >>> choose = muon_for_matrices(Muon(), AdamW())
    >>> for name in ("self_attn.q_proj.weight", "mlp.experts.up_proj.weight", "mlp.gate.weight"):
    ...     print(name, type(choose(f"model.layers.0.{name}", (4, 6))).__name__)
    self_attn.q_proj.weight Muon
    mlp.experts.up_proj.weight Muon
    mlp.gate.weight AdamW
    """
    rest = decayed(adamw)

    def choose(name: str, shape: tuple[int, ...]) -> AdamW | Muon:
        return muon if is_matrix(name, shape) and not name.endswith(NO_LAYER_MATRIX) else rest(name, shape)

    return choose


# --- values -------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What an update came to; the same on all ranks.

    Attributes:
        ok: Whether it was made: not where a gradient of any rank is infinite or no number.
        grad_norm: Of all gradients, before clipping.
        num_zeros: Gradients that are 0.
    """

    ok: bool
    grad_norm: float
    num_zeros: int


@dataclass(frozen=True, slots=True)
class StateBox:
    """A box of a state.

    Attributes:
        held: The array that it is of.
        state: ``"master"``, ``"exp_avg"``, ``"exp_avg_sq"`` or ``"momentum_buffer"``.
        box: Which elements of the rank's array.
        values: Their state, a view in the shape of the box: what is written into it is loaded.
    """

    held: Held
    state: str
    box: Box
    values: Tensor

    @property
    def name(self) -> str:
        """The name of the array."""
        return self.held.name


@dataclass(frozen=True, slots=True)
class _Shard:
    """The state of a stretch of a bucket, and how each array in it is updated. All have the same states."""

    bucket: Bucket
    start: int
    stop: int
    states: Mapping[str, Tensor]
    rules: tuple[AdamW | MuonRule, ...]


class Optimizer:
    """The optimizer of one rank.

    Attributes:
        params: The arrays by name.
        plan: How their gradients are summed.
        groups: The groups of this rank.
        sharded: Whether replicas share the state.
        max_norm: The norm that gradients are clipped to, if any.
        count: Updates that were made.

    Laws:
        Sharded and replicated give the same bits.
        The boxes of a state that ranks own are all elements of the model, each once.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        *,
        plan: ReducePlan,
        groups: Groups,
        settings: AdamW | Muon | Settings,
        sharded: bool = True,
        max_norm: float | None = None,
    ) -> None:
        """Make the state: masters from the arrays, moments 0.

        Args:
            params: The arrays of the rank by name. They are changed in place.
            plan: How their gradients are summed.
            groups: The groups of this rank.
            settings: For all arrays, or a function of their names and shapes.
            sharded: Whether the replicas of an array share its state.
            max_norm: The norm that gradients are clipped to; ``None`` for no clipping.

        Raises:
            UnknownNameError: The arrays are not those of the plan, or ranks that hold parts of a matrix for
                Muon have no group.
            PlanError: An array has another shape than its layout says, is not contiguous, or is to be updated
                by Muon and holds no matrices.
            GapError: Muon is for a part of a matrix only.
            DtypeError: An array has another dtype than its layout says.
        """
        _check(params, plan)
        self.params, self.plan, self.groups = dict(params), plan, groups
        self.sharded, self.max_norm, self.count = sharded, max_norm, 0
        choose: Settings = settings if callable(settings) else lambda name, shape: settings
        self._shards = tuple(
            tuple(self._cut(bucket, *self._stretch(bucket), choose)) for bucket in plan.buckets
        )
        self._matrices = Matrices(plan, choose, groups, sharded=sharded)
        self._names: dict[AdamW | Muon, list[str]] = {}
        for name, array in params.items():
            self._names.setdefault(choose(name, tuple(array.shape)), []).append(name)
        self.reset_masters()

    def _stretch(self, bucket: Bucket) -> tuple[int, int]:
        """The stretch of a bucket whose state this rank has."""
        return self.plan.own(bucket) if self.sharded else (0, bucket.numel)

    def _cut(self, bucket: Bucket, start: int, stop: int, choose: Settings) -> Iterator[_Shard]:
        """A stretch cut where arrays begin that have other states."""
        like = self.params[bucket.arrays[0].name]
        wide = torch.promote_types(like.dtype, torch.float32)
        ruled = [(choose(held.name, held.shape).rule(held), at) for held, at, _ in bucket.slices(start, stop)]
        for states, group in itertools.groupby(ruled, lambda item: item[0].states):
            some = list(group)
            first, last = start + some[0][1].start, start + some[-1][1].stop
            names = states if like.dtype == wide else (MASTER, *states)
            made = {name: torch.zeros(last - first, dtype=wide, device=like.device) for name in names}
            yield _Shard(bucket, first, last, made, tuple(rule for rule, _ in some))

    def reset_masters(self) -> None:
        """Take the masters from the arrays, as after weights were loaded without their state."""
        for shard in itertools.chain(*self._shards):
            if MASTER in shard.states:
                for values, places in self._values(shard):
                    shard.states[MASTER][places].copy_(values)

    def _values(self, shard: _Shard) -> Iterator[tuple[Tensor, slice]]:
        """Views of the arrays in a shard, and their places in its states."""
        for held, places, inside in shard.bucket.slices(shard.start, shard.stop):
            yield self.params[held.name].detach().view(-1)[inside], places

    # --- a step ---

    def step(self, grads: Mapping[str, Tensor | None]) -> Step:
        """Sum gradients over the ranks, clip them, and update the arrays in place.

        Every rank calls it at the same time. Where a gradient of any rank is infinite or no number, no rank
        changes anything.

        Args:
            grads: What this rank contributes to the gradient of each array, by name; ``None`` for nothing.

        Raises:
            PlanError: Ranks do something else at this time, or update in another way; on all ranks, before
                anything is changed.
        """
        return self.update(*self.sum(grads))

    @torch.no_grad()
    def sum(self, grads: Mapping[str, Tensor | None]) -> tuple[Gradients, Step]:
        """The first half of a step: the sums, and what they come to. Nothing is changed.

        Models that are trained together on grids of their own have one norm, taken between the halves.
        """
        device = next((p.device for p in self.params.values()), torch.device("cpu"))
        common = {"sharded": self.sharded, "max_norm": self.max_norm, "update": self.count + 1}
        check_update(self.groups, common=common, of_stage=self._said(), device=device)
        found = sum_gradients(grads, self.plan, self.groups, sharded=self.sharded, device=device)
        norm, zeros = measure(found, self.groups)
        return found, Step(math.isfinite(norm), norm, zeros)

    @torch.no_grad()
    def update(self, found: Gradients, measured: Step) -> Step:
        """The second half: clip by the norm that is given, and update.

        Args:
            found: From ``sum``; its values are used up.
            measured: From ``sum``, or with the norm of all models that are trained together.
        """
        if not measured.ok:
            return measured
        scale = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (measured.grad_norm + 1e-6))
        self.count += 1
        for shards, flat in zip(self._shards, found.flats, strict=True):
            if scale < 1:
                flat.mul_(scale)
            for shard in shards:
                self._prepare(shard, self._part(flat, shard))
        self._matrices.orthogonalise(found.flats)
        for bucket, shards, flat in zip(self.plan.buckets, self._shards, found.flats, strict=True):
            for shard in shards:
                self._update(shard, self._part(flat, shard))
            self._share(bucket)
        return measured

    def _said(self) -> Iterator[str]:
        """How arrays are updated next, as ranks compare it."""
        for each, names in self._names.items():
            yield f"{replace(each, lr=each.rate(self.count + 1))}: {names}"
        yield self._matrices.group.name

    def _part(self, flat: Tensor, shard: _Shard) -> Tensor:
        start, _ = self._stretch(shard.bucket)
        return flat[shard.start - start : shard.stop - start]

    def _prepare(self, shard: _Shard, grad: Tensor) -> None:
        """What is done to gradients before matrices come together."""
        places = (places for _, places, _ in shard.bucket.slices(shard.start, shard.stop))
        for rule, group in itertools.groupby(zip(shard.rules, places, strict=True), lambda item: item[0]):
            some = [at for _, at in group]
            at = slice(some[0].start, some[-1].stop)
            rule.prepare(grad[at], *(shard.states[name][at] for name in rule.states))

    def _update(self, shard: _Shard, grad: Tensor) -> None:
        states = shard.states
        alike = zip(shard.rules, self._values(shard), strict=True)
        for rule, group in itertools.groupby(alike, lambda item: item[0]):
            some = [item for _, item in group]
            if MASTER in states:  # neighbours lie side by side in one array
                places = slice(some[0][1].start, some[-1][1].stop)
                some = [(states[MASTER][places], places)]
            for values, at in some:
                rule.update(values, grad[at], *(states[name][at] for name in rule.states), step=self.count)
        if MASTER in states:
            for values, at in self._values(shard):
                values.copy_(states[MASTER][at])

    def _share(self, bucket: Bucket) -> None:
        """Bring new values from their owners to all replicas."""
        if not self.sharded or len(bucket.over) == 1:
            return
        start, stop = self.plan.own(bucket)
        part = self.params[bucket.arrays[0].name].new_empty(stop - start)
        for held, places, inside in bucket.slices(start, stop):
            part[places] = self.params[held.name].detach().view(-1)[inside]
        whole = gather_stretches(part, bucket.cuts, group=group_of(self.groups, bucket.over))
        for held, places, _ in bucket.slices(0, bucket.numel):
            self.params[held.name].detach().view(-1).copy_(whole[places])

    # --- state ---

    def states(self) -> Iterator[StateBox]:
        """All state that this rank has, as boxes: what has to be filled when a state is loaded.

        A box may hold padding; ``held.parts`` says which elements of the model it has.
        """
        for shard in itertools.chain(*self._shards):
            yield from _boxes(shard, shard.start, shard.stop)

    def owned(self) -> Iterator[StateBox]:
        """The state that this rank stands for, as boxes: what it has to store.

        Law: over all ranks these are all elements of the model for each state, each once.
        """
        for shard in itertools.chain(*self._shards):
            if self.plan.counts(shard.bucket):
                start, stop = self.plan.own(shard.bucket)
                yield from _boxes(shard, max(start, shard.start), min(stop, shard.stop))


def _boxes(shard: _Shard, start: int, stop: int) -> Iterator[StateBox]:
    for fragment in shard.bucket.fragments(start, stop) if start < stop else ():
        for name, state in shard.states.items():
            values = state[start - shard.start :][fragment.places].view(fragment.box.shape)
            yield StateBox(fragment.held, name, fragment.box, values)


def state_bytes(plan: ReducePlan, settings: Settings, *, sharded: bool) -> int:
    """The bytes of masters and other states that an optimizer of these settings has on the rank of a plan."""
    total = 0
    for bucket in plan.buckets:
        dtype: torch.dtype = getattr(torch, bucket.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        start, stop = plan.own(bucket) if sharded else (0, bucket.numel)
        for held, places, _ in bucket.slices(start, stop):
            num_states = len(settings(held.name, held.shape).rule(held).states) + (dtype != wide)
            total += (places.stop - places.start) * num_states * wide.itemsize
    return total


def adamw(values: Tensor, grad: Tensor, first: Tensor, second: Tensor, settings: AdamW, *, step: int) -> None:
    """One update in place, of flat tensors of one dtype.

    Element by element, so that no bit depends on how they are cut.

    Args:
        values: What is updated.
        grad: Its gradient.
        first: Its first moment.
        second: Its second moment.
        settings: The settings.
        step: The number of the update, from 1.
    """
    rate = settings.rate(step)
    correction = 1 - settings.beta1**step
    root = math.sqrt(1 - settings.beta2**step)
    chunk = _CHUNK if values.device.type == "cpu" else max(1, len(values))
    for start in range(0, len(values), chunk):
        p, g, m, v = (each[start : start + chunk] for each in (values, grad, first, second))
        p.mul_(1 - rate * settings.weight_decay)
        m.lerp_(g, 1 - settings.beta1)
        v.mul_(settings.beta2).addcmul_(g, g, value=1 - settings.beta2)
        p.addcdiv_(m, (v.sqrt() / root).add_(settings.eps), value=-rate / correction)


def _check(params: Mapping[str, Tensor], plan: ReducePlan) -> None:
    where = f"rank {plan.rank}, layout {plan.layout.name!r}"
    different = sorted(set(params) ^ set(plan.arrays))
    if different:
        raise UnknownNameError(
            "an optimizer has the arrays of its rank",
            where=where,
            equation=f"{', '.join(different[:3])} are arrays or in the plan, and not both",
            hint="give all arrays of the rank, under the names of the layout",
        )
    for name, array in params.items():
        held = plan.arrays[name].held
        held.check(tuple(array.shape))
        if array.dtype != getattr(torch, held.buffer.dtype):
            raise DtypeError(
                "an array has the dtype that its layout says",
                where=f"{where}, array {name!r}",
                equation=f"dtype({array.dtype}) != dtype({held.buffer.dtype})",
                hint="make the layout with the dtype of the parameters",
            )
        if not array.is_contiguous():
            raise PlanError(
                "arrays are updated where they lie, a row after the other",
                where=f"{where}, array {name!r}",
                equation=f"stride{tuple(array.stride())} of shape{tuple(array.shape)}",
                hint="keep parameters contiguous and transpose where they are used",
            )
