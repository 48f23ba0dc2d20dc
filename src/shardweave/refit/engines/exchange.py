"""What a twin has derived, put into the live model at once.

Two ways. Where the addresses of what is served may change, objects and memory are exchanged: the live
model gets what the twin derived, the twin gets memory to stage the next version in. Where addresses have to
stay, because compiled or captured code holds them, values are copied into the memory that is served. Either
way everything that can fail is decided by ``prepare``, before anything is touched.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shardweave.errors import ModelError
from shardweave.refit.engines.pairs import (
    ABSENT,
    CLOSED,
    VALUES,
    Kept,
    Pairs,
    bits_of,
    children,
    contents_of,
    joined,
    same_bits,
    same_memory,
    storage_of,
)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two models are not alike, and how."""

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass(frozen=True, slots=True)
class _Put:
    """One entry of a dict, or all of a list or set, of the live model."""

    path: str
    contents: Any
    key: Any
    value: Any

    def do(self) -> Any:
        """Make the entry what it shall be; returns what it was."""
        contents = self.contents
        if isinstance(contents, dict):
            before = contents.get(self.key, ABSENT)
            if self.value is ABSENT:
                contents.pop(self.key, None)
            else:
                contents[self.key] = self.value
            return before
        before = contents.copy()
        contents.clear()
        (contents.extend if isinstance(contents, list) else contents.update)(self.value)
        return before

    def undo(self, before: Any) -> None:
        """Make it what it was."""
        _Put(self.path, self.contents, self.key, before).do()

    def holds(self) -> bool:
        """Whether it still is what it was made."""
        if isinstance(self.contents, dict):
            return self.contents.get(self.key, ABSENT) is self.value
        if isinstance(self.contents, set):
            return bool(self.contents == self.value)
        now, made = self.contents, self.value
        return len(now) == len(made) and all(a is b for a, b in zip(now, made, strict=True))


@dataclass(frozen=True, slots=True)
class _Point:
    """A tensor object of the live model, given other memory."""

    path: str
    live: torch.Tensor
    memory: torch.Tensor

    def do(self) -> Any:
        """Give it the memory; returns what it had."""
        before = self.live.detach()
        self.live.data = self.memory
        return before

    def undo(self, before: Any) -> None:
        """Give it back what it had."""
        self.live.data = before

    def holds(self) -> bool:
        """Whether it still has the memory."""
        return same_memory(self.live.detach(), self.memory)


@dataclass(slots=True)
class _Copy:
    """A tensor of the live model whose memory stays where it is."""

    path: str
    live: torch.Tensor
    values: torch.Tensor | None
    address: int

    def do(self) -> Any:
        """Copy the values, and let go of them."""
        assert self.values is not None
        self.live.detach().copy_(self.values)
        self.values = None

    def undo(self, before: Any) -> None:
        """Values that were overwritten are gone; ``prepare`` has seen to it that no copy fails."""

    def holds(self) -> bool:
        """Whether the tensor is still where it was."""
        return self.live.data_ptr() == self.address


@dataclass(slots=True)
class Exchange:
    """What has to be done so that the live model is what its twin is by now."""

    steps: list[_Put | _Point | _Copy]
    memory: list[tuple[Kept, torch.Tensor]] = field(default_factory=list)

    def commit(self) -> None:
        """Do it: assignments and pointers, or copies. What is served before and after is whole."""
        done: list[tuple[_Put | _Point | _Copy, Any]] = []
        try:
            for step in self.steps:
                done.append((step, step.do()))
        except BaseException:
            for step, before in reversed(done):
                step.undo(before)
            raise
        for kept, memory in self.memory:
            kept.memory = memory

    def broken(self) -> str:
        """The first place that is not what ``commit`` made it, or nothing."""
        return next((step.path for step in self.steps if not step.holds()), "")


def prepare(pairs: Pairs, *, stay: bool = False) -> Exchange:
    """What has to be done so that the live model is what the twin is by now. Touches nothing of either.

    Objects that were made since the twin's beginning become the live model's, so the twin is to be ``reset``
    before it is used again, whether or not the exchange is committed.

    Args:
        pairs: The two models, the twin derived.
        stay: Addresses of what is served stay; values are copied.

    Raises:
        ModelError: The live model is not built like the derived twin, or something that was derived cannot be
            copied into its place.
    """
    if stay:
        return Exchange(_copies(pairs))
    _check_strangers(pairs)
    steps: list[_Put | _Point | _Copy] = []
    seen: dict[int, Any] = {}
    given: set[int] = set()  # memory that becomes the live model's
    spare: list[torch.UntypedStorage] = []  # memory that it no longer needs, likeliest first
    for node, key, value in pairs.changes():
        path = node.path if key is None else joined(node.path, key)
        if key is None:
            new = type(value)(pairs.rebound(child, seen, path=path) for child in value)
        else:
            new = value if value is ABSENT else pairs.rebound(value, seen, path=path)
            old = node.live.get(key)
            if isinstance(old, torch.Tensor):
                spare.append(old.untyped_storage())
        steps.append(_Put(path, node.live, key, new))
    given |= {storage_of(value) for value in seen.values() if isinstance(value, torch.Tensor)}
    still = set(pairs.shared_memory)  # memory that stays the live model's
    for kept in pairs.kept:
        # Where nothing holds it any more, what does is among the changes.
        changed = kept.place is not None and (kept.values is None or kept.changed())
        if not changed:
            still |= {storage_of(kept.live)} if isinstance(kept.live, torch.Tensor) else set()
            continue
        live, now = _counterpart(kept), kept.twin.detach()
        spare.insert(0, live.untyped_storage())
        steps.append(_Point(kept.path, live, now))
        given.add(storage_of(now))
    spare = [old for old in spare if old.data_ptr() not in still | given]
    others: dict[int, torch.UntypedStorage] = {}  # by what they stand in for, as several tensors may see it
    memory: list[tuple[Kept, torch.Tensor]] = []
    for kept in pairs.kept:
        address = storage_of(kept.memory)
        if address in given and address:
            if address not in others:
                others[address] = _other(kept.memory.untyped_storage(), spare)
            memory.append((kept, _seen_alike(kept.memory, others[address])))
    return Exchange(steps, memory)


def _check_strangers(pairs: Pairs) -> None:
    """The live model has no tensor of its own, which could have been made of weights after it was loaded."""
    for node in pairs.nodes:
        for key, value in node.live.items() if isinstance(node.live, dict) else ():
            ours = key in pairs.ours or isinstance(node.twin.get(key), torch.Tensor)
            if isinstance(value, torch.Tensor) and not ours:
                raise ModelError(
                    "the served model holds what was derived when it was loaded",
                    where=f"{joined(node.path, key)!r}",
                    equation="only the served model has this tensor",
                    hint="it was made while the engine ran; made of weights, it would be out of date",
                )


def _counterpart(kept: Kept) -> torch.Tensor:
    live, now = kept.live, kept.twin
    found = _form(live) if isinstance(live, torch.Tensor) else type(live).__name__
    if found != _form(now):
        raise ModelError(
            "the served model was derived as its twin is",
            where=f"{kept.path!r}",
            equation=f"served: {found} != derived: {_form(now)}",
            hint="the served model was changed after it was loaded, or derives differently by values",
        )
    assert isinstance(live, torch.Tensor)
    return live


def _form(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{type(tensor).__name__}{list(tensor.shape)} {dtype} strides{list(tensor.stride())}"


def _other(memory: torch.UntypedStorage, spare: list[torch.UntypedStorage]) -> torch.UntypedStorage:
    """Memory like the given one: what the live model no longer needs where it fits, as it is warm."""
    for i, old in enumerate(spare):
        if old.nbytes() == memory.nbytes() and old.device == memory.device:
            del spare[i : i + 1]
            # Several tensors may have seen it; it is taken once.
            spare[:] = [each for each in spare if each.data_ptr() != old.data_ptr()]
            return old
    return torch.UntypedStorage(memory.nbytes(), device=memory.device)


def _seen_alike(tensor: torch.Tensor, memory: torch.UntypedStorage) -> torch.Tensor:
    """Memory seen as a tensor sees its own."""
    seen = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return seen.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


# --- in step ------------------------------------------------------------------------------------


def same_form(path: str, live: torch.Tensor, twin: torch.Tensor) -> str:
    """Why two tensors are not of one form: class, shape, dtype and strides."""
    return "" if _form(live) == _form(twin) else f"{_form(live)} != {_form(twin)}"


def same_values(path: str, live: torch.Tensor, twin: torch.Tensor) -> str:
    """Why two tensors are not the same bit by bit."""
    if said := same_form(path, live, twin):
        return said
    if same_bits(live, twin):
        return ""
    return f"{int((bits_of(live) != bits_of(twin)).sum())} of {live.numel()} elements differ"


def differences(
    live: Any,
    twin: Any,
    *,
    compare: Callable[[str, torch.Tensor, torch.Tensor], str] = same_form,
    opaque: Callable[[Any], bool] = lambda _: False,
    ours: Collection[str] = (),
) -> Iterator[Difference]:
    """Where two models are not alike, walked in step.

    What only the first model has is no difference unless it is a tensor, or a container of some: engines
    note things and compile code while they run.

    Args:
        live: One.
        twin: The other one.
        compare: Says of two tensors at one place why they are not alike, or nothing.
        opaque: Whether an object of the second model that shows nothing of what it holds, such as a handle or
            an event, is passed over; else it is a difference.
        ours: Names of attributes that each model has for itself.
    """
    seen: set[tuple[int, int]] = set()
    others = dict(twin.named_modules())
    # The modules first, so that what several lead to is called by its module's name.
    queue: deque[tuple[str, Any, Any]] = deque(
        (name, module, others.get(name)) for name, module in live.named_modules()
    )
    while queue:
        path, one, two = queue.popleft()
        if one is two or (id(one), id(two)) in seen:
            continue
        seen.add((id(one), id(two)))
        if type(one) is not type(two):
            yield Difference(path, f"{type(one).__name__} != {type(two).__name__}")
        elif isinstance(one, torch.Tensor):
            if said := compare(path, one, two):
                yield Difference(path, said)
        elif not (_is_closed(two) and opaque(two)):
            if said := _unlike(one, two):
                yield Difference(path, said)
                continue
            mine, other = dict(children(one)), dict(children(two))
            for name in (name for name in (*mine, *other) if (name in mine) != (name in other)):
                if name not in ours and (name in other or _has_tensors(mine[name])):
                    yield Difference(
                        joined(path, name), f"only the {'served' if name in mine else 'second'} model has it"
                    )
            queue.extend(
                (joined(path, name), mine[name], other[name])
                for name in mine
                if name in other and name not in ours
            )


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple, set)):
        return any(map(_has_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)


def _unlike(one: Any, two: Any) -> str:
    """Why two things of one class that are no tensors are not alike, as far as themselves say."""
    if isinstance(one, types.FunctionType):
        return "" if one.__code__ is two.__code__ else f"{one.__qualname__} != {two.__qualname__}"
    if isinstance(one, (dict, list, tuple, types.MethodType, functools.partial)):
        return ""
    if isinstance(one, (*VALUES, set)):
        alike = one == two or (one != one and two != two)
        return "" if alike else f"{one!r} != {two!r}"
    return f"{type(one).__name__} shows nothing of what it holds" if _is_closed(one) else ""


def _is_closed(value: Any) -> bool:
    """Whether an object shows nothing of what it holds, or holds something that has to be given back."""
    if isinstance(value, (*VALUES, tuple, torch.Tensor, types.FunctionType, types.MethodType)):
        return False
    return contents_of(value) is None or isinstance(value, CLOSED) or hasattr(type(value), "__del__")


def _copies(pairs: Pairs) -> list[_Put | _Point | _Copy]:
    found: list[_Put | _Point | _Copy] = []

    def copy(path: str, live: torch.Tensor, twin: torch.Tensor) -> str:
        if not (said := same_form(path, live, twin)) and live.numel():
            found.append(_Copy(path, live, twin.detach(), live.data_ptr()))
        return said

    for difference in differences(pairs.live, pairs.twin, compare=copy, opaque=pairs.is_old, ours=pairs.ours):
        raise ModelError(
            "what is derived can be copied into what is served, where addresses have to stay",
            where=f"{difference.path!r}",
            equation=difference.what,
            hint="start the engine with enforce_eager=True, so that nothing holds addresses",
        )
    return found
