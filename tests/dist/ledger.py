"""The most bytes of whole weights, and of gradients of whole weights, that there are at once on a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardweave.train.gathered import Gathered


class Coming:
    """A fetch under way whose whole is noted when it is there."""

    def __init__(self, pending: Any, there: Callable[[Tensor], None]) -> None:
        self._pending, self._there = pending, there

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)

    def wait(self) -> Tensor:
        whole: Tensor = self._pending.wait()
        self._there(whole)
        return whole


class Ledger(TorchDispatchMode):
    """The most bytes of wholes, and of gradients of wholes, that there are at once on a rank.

    A whole is there from the begin of its fetch until nothing holds its storage; a gradient from the
    operation that makes its storage until its sum is added to the share.
    """

    def __init__(self, reading: Gathered) -> None:
        super().__init__()
        self.most_wholes = 0
        self._reading, self._clock = reading, 0
        self._wholes: list[tuple[int, list[StorageWeakRef]]] = []
        self._born: dict[int, int] = {}
        self._changes: list[tuple[int, int]] = []
        self._summing = 0

    @property
    def most_gradients(self) -> int:
        most = now = 0
        for _, change in sorted(self._changes):
            now += change
            most = max(most, now)
        assert now == 0
        return most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._clock += 1
        out = func(*args, **(kwargs or {}))
        held = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (at := tensor.untyped_storage()._cdata) not in held:
                self._born[at] = self._clock
        return out

    @contextmanager
    def watching(self) -> Iterator[None]:
        of = self._reading
        begin, begin_sum, end_sum = of._begin, of._begin_sum, of._end_sum

        def began(name: str) -> Any:
            self._wholes = [each for each in self._wholes if not any(ref.expired() for ref in each[1])]
            pending, there = begin(name), []
            size = of.shared[name].size * of.shares[name].nbytes // of.shares[name].shape[of.shared[name].dim]
            self._wholes.append((size, there))
            self.most_wholes = max(self.most_wholes, sum(each for each, _ in self._wholes))
            return Coming(pending, lambda whole: there.append(StorageWeakRef(whole.untyped_storage())))

        def began_sum(name: str, grad: Tensor) -> None:
            self._changes.append((self._born[grad.untyped_storage()._cdata], grad.nbytes))
            begin_sum(name, grad)
            self._summing = grad.nbytes

        def ended_sum() -> None:
            end_sum()
            self._clock += 1
            self._changes.append((self._clock, -self._summing))
            self._summing = 0

        with ExitStack() as all_of:
            for name, put in (("_begin", began), ("_begin_sum", began_sum), ("_end_sum", ended_sum)):
                all_of.enter_context(patch.object(of, name, put))
            all_of.enter_context(self)
            yield
