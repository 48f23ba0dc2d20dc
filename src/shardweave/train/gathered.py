"""Weights that lie in shares, one on each rank, and are whole only while they are used.

A rank reads its weights by name. Where it holds a share of one (see ``Parallel.weight_axes``), the others'
are fetched when it is read, and let go of when nothing uses the whole any more: the graph does not keep it,
and the way back fetches it once more. The gradient of the whole is summed over the ranks and cut back into
shares, so that a step leaves in each share its own gradient and nothing else.

The two are adjoint, as all collectives of the runtime: what a share's gradient is summed over afterwards are
the ranks that hold the same share. A weight that is read ``k`` times is fetched and summed ``k`` times.

- The order in which weights were read before says which one is fetched ahead: what followed the same read on
  a way forward, or on a way back, of which layers that are computed once more are a part. It is a hint: what
  is fetched has the tag of its weight, and what nobody asks for is never taken for something else.
- A share that changed between a way forward and its way back is an error, not another gradient.
- Every weight that was read takes part in the way back, also where a rank's loss does not depend on it: its
  gradient is 0 there, and no rank waits for a sum that another one skips. A loss that is a constant still has
  to hang on what was computed (``loss.term`` sees to it): others fetch weights on the way back to it.
- Sums are taken in the order of ranks, in float32 where weights are narrower: the same bits at every run.

All state is in one object, so that two models of a process have nothing in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardweave.errors import PlanError
from shardweave.layout import Layout
from shardweave.layout.buffer import axes_of
from shardweave.train.collectives import Pending, begin_fetch, begin_sum
from shardweave.train.grid import Group


@dataclass(frozen=True, slots=True)
class Shared:
    """How a weight lies in shares.

    Attributes:
        name: Of the weight.
        dim: The dim of the array that is cut.
        size: Its size in the whole.
        group: The ranks that share it, in the order of their shares.
        tag: Of its messages; the same on all ranks.
    """

    name: str
    dim: int
    size: int
    group: Group
    tag: int

    def lengths(self, share: int) -> tuple[int, ...]:
        """How much of the dim each rank has, where a share is so long; the last ones may have padding.

        >>> Shared("w", 0, 7, Group("shares", (0, 1, 2, 3), 0), 1).lengths(3)
        (3, 3, 1, 0)
        """
        return tuple(min(max(self.size - share * at, 0), share) for at in range(self.group.size))


def shared_weights(
    layout: Layout, whole: Layout, rank: int, groups: Mapping[tuple[str, ...], Group]
) -> dict[str, Shared]:
    """Which weights of a rank lie in shares.

    Args:
        layout: What ranks hold.
        whole: What they compute with: the same rules, and the dims that are shared not cut for it.
        rank: The rank.
        groups: For each list of axes that weights are shared over, this rank's group.
    """
    found: dict[str, Shared] = {}
    sizes = {name: buffer.shape for name, (buffer, _) in whole.arrays(rank).items()}
    for rule in layout.rules:
        buffer = rule.at(layout.mesh, rank)
        for d, dim in enumerate(rule.dims if buffer is not None else ()):
            group = next((g for axes, g in groups.items() if axes and set(axes) <= set(axes_of(dim))), None)
            if group is None or group.size == 1:
                continue
            assert buffer is not None
            at = buffer.stacked.index(d)
            for name, _ in buffer.members():
                # Ranks that share weights are of one stage, and list the same ones.
                found[name] = Shared(name, at, sizes[name][at], group, 1 + 2 * len(found))
    return found


@dataclass(frozen=True, slots=True)
class _Handle:
    """A whole that can be fetched once more, as long as its share is what it was."""

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class _View:
    """What a graph keeps in place of a whole, or of a view of it."""

    handle: _Handle
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


_Read = tuple[bool, str, int]
"""Whether on a way back, which weight, and for which time on this way."""


class Gathered(Mapping[str, Tensor]):
    """The weights of a rank as they are computed with: by name, whole.

    Reading one fetches it, which all ranks that share it have to do. What is read within ``saving`` is not
    kept by the graph; after a way back, ``finish`` leaves all gradients in the shares.

    Laws:
        What is read are the bits of the model, whatever the axes that share it; padding is cut off.
        The gradients of the shares, joined, are the gradient of the whole.
    """

    def __init__(
        self,
        shares: Mapping[str, Tensor],
        shared: Mapping[str, Shared],
        *,
        ahead: bool = True,
        ordered: bool = True,
    ) -> None:
        """Read nothing yet.

        Args:
            shares: What this rank holds, by name.
            shared: What of it are shares.
            ahead: Whether the weight that is expected next is fetched while another one is used.
            ordered: As of ``begin_sum``.
        """
        self.shares, self.shared = shares, shared
        self._ahead, self._ordered = ahead, ordered
        self._live: dict[int, tuple[StorageWeakRef, _Handle]] = {}
        self._anchors: list[Tensor] = []
        self._is_back = False
        self._after: dict[_Read, str | None] = {}
        self._before: _Read | None = None
        self._reads: dict[str, int] = {}
        self._coming: dict[str, tuple[int, Pending]] = {}
        self._last: tuple[_Handle, Tensor] | None = None
        self._sum: tuple[str, Pending] | None = None
        for name in shared:
            share = shares[name]
            if share.is_leaf and share.requires_grad:
                share.grad_dtype = torch.promote_types(share.dtype, torch.float32)

    # --- as a mapping ---

    def __iter__(self) -> Iterator[str]:
        return iter(self.shares)

    def __len__(self) -> int:
        return len(self.shares)

    def __contains__(self, name: object) -> bool:
        return name in self.shares

    def __getitem__(self, name: str) -> Tensor:
        share = self.shares[name]
        if name not in self.shared:
            return share
        if not (share.requires_grad and torch.is_grad_enabled()):
            return self._fetched(name)
        whole: Tensor
        whole, anchor = _Whole.apply(share, self, name)
        self._anchors.append(anchor)
        return whole

    # --- a way forward and back ---

    @contextmanager
    def saving(self, *, again: bool = False) -> Iterator[None]:
        """Let a graph that is made keep no whole weight.

        Args:
            again: Whether it is made on a way back, by what is computed once more.
        """
        if not self.shared:
            yield
            return
        if not (again and self._is_back):
            self._turn(back=again)
        outer, self._anchors = self._anchors, []
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._anchors = outer
            if not again:
                self._turn(back=False)

    def joined(self, output: Tensor, *, again: bool = False) -> Tensor:
        """The same, with every weight that was read since ``saving`` began as something it depends on.

        Args:
            output: What a way back begins with.
            again: As of ``saving``.
        """
        anchors, self._anchors = self._anchors, []
        # Layers that are computed once more leave no anchors, and yet a way back begins with their output.
        if not output.requires_grad or not (anchors or (self.shared and not again)):
            return output
        found: Tensor = _Join.apply(output, None if again else self, *anchors)
        return found

    def finish(self) -> None:
        """Bring the gradients of a way back to an end, and let go of what was fetched ahead for nothing."""
        self._end_sum()
        self._turn(back=False)
        for _, pending in self._coming.values():
            pending.wait()
        self._coming.clear()
        self._live.clear()

    def versions(self) -> dict[str, int]:
        """A number for each weight that grows when it is changed; nothing is fetched."""
        return {name: share._version for name, share in self.shares.items()}

    def check_unchanged(self, versions: Mapping[str, int]) -> None:
        """Refuse a way back of weights that are no longer what they were on the way forward.

        Raises:
            PlanError: The first that was changed.
        """
        for name, then in versions.items():
            if (now := self._version(name)) != then:
                raise PlanError(
                    "weights stay as they are between the way forward and the way back",
                    where=f"weight {name!r}",
                    equation=f"version({now}) != version({then}) when it was read",
                    hint="update weights after the backward of all that was computed with them",
                )

    def _turn(self, *, back: bool) -> None:
        """Begin a way. Nothing follows the last weight of the one before."""
        if self._before is not None:
            self._after[self._before] = None
        self._is_back, self._before, self._last = back, None, None
        self._reads.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        found = self._live.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        if found is None:
            return tensor
        return _View(found[1], tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def _unpack(self, kept: Tensor | _View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        handle = kept.handle
        self.check_unchanged({handle.name: handle.version})
        if not self._is_back:
            self._turn(back=True)
        if self._last is None or self._last[0] != handle:
            self._last = None  # before the next one is there, so that one at most is kept
            self._last = handle, self._fetched(handle.name)
        return self._last[1].as_strided(kept.size, kept.stride, kept.offset)

    # --- messages ---

    def _version(self, name: str) -> int:
        return self.shares[name]._version

    def _fetched(self, name: str) -> Tensor:
        """The whole of a weight, and the next one begun."""
        version = self._version(name)
        begun = self._coming.pop(name, None)
        pending = begun[1] if begun is not None else self._begin(name)
        whole = pending.wait()
        if begun is not None and begun[0] != version:
            whole = self._begin(name).wait()
        if self._before is not None:
            self._after[self._before] = name
        number = self._reads.get(name, 0)
        self._before, self._reads[name] = (self._is_back, name, number), number + 1
        following = self._after.get(self._before)
        if self._ahead and following is not None and not self._coming:
            self._coming[following] = self._version(following), self._begin(following)
        self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}
        storage = whole.untyped_storage()
        self._live[storage._cdata] = StorageWeakRef(storage), _Handle(name, version)
        return whole

    def _begin(self, name: str) -> Pending:
        of, share = self.shared[name], self.shares[name].detach()
        return begin_fetch(share, of.dim, of.lengths(share.shape[of.dim]), group=of.group, tag=of.tag)

    def _begin_sum(self, name: str, grad: Tensor) -> None:
        self._end_sum()
        if self._last is not None and self._last[0].name == name:
            self._last = None
        of, share = self.shared[name], self.shares[name]
        self._sum = (
            name,
            begin_sum(
                grad,
                of.dim,
                of.lengths(share.shape[of.dim]),
                dtype=torch.promote_types(share.dtype, torch.float32),
                group=of.group,
                tag=of.tag + 1,
                ordered=self._ordered,
            ),
        )

    def _end_sum(self) -> None:
        """Wait for the sum that is under way, and add it to the gradient of its share."""
        if self._sum is None:
            return
        (name, pending), self._sum = self._sum, None
        total, share, dim = pending.wait(), self.shares[name], self.shared[name].dim
        if share.grad is None and total.shape == share.shape:
            share.grad = total
            return
        if share.grad is None:
            share.grad = torch.zeros_like(share, dtype=total.dtype)
        share.grad.narrow(dim, 0, total.shape[dim]).add_(total)


class _Whole(torch.autograd.Function):
    """The whole of a weight. Its gradient goes to the share by way of ``_begin_sum``."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, gathered: Gathered, name: str) -> tuple[Tensor, Tensor]:
        ctx.gathered, ctx.name = gathered, name
        return gathered._fetched(name), share.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.gathered._begin_sum(ctx.name, grads[0])
        return None, None, None


class _Join(torch.autograd.Function):
    """An output, and what else it shall depend on."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, begins: Gathered | None, *anchors: Tensor) -> Tensor:
        ctx.begins = begins
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.begins is not None:
            ctx.begins._turn(back=True)
        nothing = grads[0].new_empty(0)
        return grads[0], None, *(nothing for _ in ctx.needs_input_grad[2:])
