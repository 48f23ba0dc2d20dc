"""Two models that one piece of code built: which object of one is which of the other.

An engine keeps more than parameters: packed copies, kernel objects, closures over handles. Nobody outside
can list them. What can be seen is which objects a model is made of, before and after its engine derived
them: modules, the plain objects that they hold, dicts, lists, closures, tensors. ``Pairs`` walks two models
in step, remembers what the second one was made of, says what has changed since, and puts it back.
"""

from __future__ import annotations

import enum
import functools
import logging
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardweave.errors import ModelError

VALUES = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, range, slice,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip
CLOSED = (type, types.ModuleType, types.BuiltinFunctionType, logging.Logger)
ABSENT: Any = object()
"""In place of what an object does not have."""


@dataclass(frozen=True, slots=True)
class Node:
    """Something changeable that both models have: its place, and what the twin's held at first."""

    path: str
    live: Any
    twin: Any
    before: Any


@dataclass(frozen=True, slots=True)
class Place:
    """An entry that both models have: of a dict or list of each, under one key."""

    live: Any
    twin: Any
    key: Any


@dataclass(slots=True)
class Kept:
    """A tensor object that the twin had at first.

    Attributes:
        path: Where it is.
        twin: The tensor object.
        memory: Its memory and shape at first; what it is put back to.
        values: What it held at first, unless it sees what is staged anew each time.
        places: Where it is held. None where only closures hold it.
    """

    path: str
    twin: torch.Tensor
    memory: torch.Tensor
    values: torch.Tensor | None
    places: list[Place]

    @property
    def place(self) -> Place | None:
        """A place that still holds it, if one does."""
        return next((place for place in self.places if _at(place.twin, place.key) is self.twin), None)

    @property
    def live(self) -> Any:
        """What the live model has in its place; ``None`` where it has none."""
        place = self.place
        return None if place is None else _at(place.live, place.key)

    def replaced(self) -> bool:
        """Whether the tensor has been given other memory, or another shape of it."""
        return not same_memory(self.twin.detach(), self.memory)

    def changed(self) -> bool:
        """Whether it is another tensor by now than at first."""
        return self.replaced() or not (self.values is None or same_bits(self.memory, self.values))


class Pairs:
    """A live model and its twin, which was built alike and has not been derived yet."""

    def __init__(
        self,
        live: torch.nn.Module,
        twin: torch.nn.Module,
        *,
        staged: Iterable[torch.Tensor],
        ours: Collection[str] = (),
    ) -> None:
        """Walk both in step. What is one and the same object in both is shared, and left alone.

        Args:
            live: The model that is served.
            twin: The other one. Nothing of it may be derived yet.
            staged: The tensors of the twin whose content is given anew for each version. The content of all
                others is remembered, but for those that see the same memory.
            ours: Names of attributes that the live model has for itself.

        Raises:
            ModelError: One object of the twin stands for two of the live model: they are not built alike.
        """
        self.live, self.twin, self.ours = live, twin, ours
        self.nodes: list[Node] = []
        self._kept: dict[int, Kept] = {}
        self._counterpart: dict[int, Any] = {}
        self._shared: set[int] = set()
        self.shared_memory: set[int] = set()
        self._alive: list[Any] = []  # ids stay those of these objects
        shared: list[Any] = []
        given = {storage_of(tensor) for tensor in staged}
        # The modules first, so that what several lead to is called by its module's name.
        queue: deque[tuple[str, Any, Any, Place | None]] = deque(self._modules())
        while queue:
            path, one, two, place = queue.popleft()
            if one is two:
                shared.append(one)
                continue
            if isinstance(two, VALUES + CLOSED) or type(one) is not type(two):
                continue
            if id(two) in self._counterpart:
                if isinstance(two, torch.Tensor):
                    self._kept[id(two)].places += [place] if place else []
                elif self._counterpart[id(two)] is not one:
                    self._not_alike(path)
                continue
            self._counterpart[id(two)] = one
            self._alive.append((one, two))
            if isinstance(two, torch.Tensor):
                memory = two.detach()
                values = None if storage_of(two) in given else memory.clone()
                self._kept[id(two)] = Kept(path, two, memory, values, [place] if place else [])
            there, here = contents_of(one), contents_of(two)
            if here is not None:
                self.nodes.append(Node(path, there, here, here.copy()))
            theirs = dict(children(one))
            for name, value in children(two):
                if name in theirs:
                    inner = None if here is None else Place(there, here, name)
                    queue.append((joined(path, name), theirs[name], value, inner))
        self._note_shared(shared)

    def _modules(self) -> Iterator[tuple[str, Any, Any, None]]:
        theirs = dict(self.live.named_modules())
        for name, module in self.twin.named_modules():
            if name not in theirs:
                self._not_alike(name)
            yield name, theirs[name], module, None

    def _not_alike(self, path: str) -> None:
        raise ModelError(
            "a second model of the engine is built like the one that it serves",
            where=f"{path!r}",
            equation="one object of the second model stands where the served one has another, or none",
            hint="something has changed the served model since it was loaded; adapters do, for one",
        )

    def _note_shared(self, roots: list[Any]) -> None:
        stack = roots
        while stack:
            value = stack.pop()
            if isinstance(value, VALUES + CLOSED) or id(value) in self._shared:
                continue
            self._shared.add(id(value))
            self._alive.append(value)
            if isinstance(value, torch.Tensor):
                self.shared_memory.add(storage_of(value))
            else:
                stack.extend(child for _, child in children(value))

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The tensor objects that the twin had at first."""
        return tuple(self._kept.values())

    def is_old(self, value: Any) -> bool:
        """Whether the twin had an object at first; else it was made since."""
        return id(value) in self._counterpart or id(value) in self._shared

    def reset(self) -> None:
        """Make the twin what it was at first: its objects, and where its tensors are."""
        for node in self.nodes:
            contents = node.twin
            if _differs(contents, node.before):
                contents.clear()
                (contents.extend if isinstance(contents, list) else contents.update)(node.before)
        for kept in self.kept:
            if kept.replaced():
                kept.twin.data = kept.memory
            if kept.values is not None and not same_bits(kept.memory, kept.values):
                kept.memory.copy_(kept.values)

    def changes(self) -> Iterator[tuple[Node, Any, Any]]:
        """What the twin's objects hold by now and did not at first: node, key, value or ``ABSENT``.

        Lists and sets are given whole, with the key ``None``. Tensors that are still the same object are not
        among them, whatever they hold: they are in ``kept``.
        """
        for node in self.nodes:
            if not isinstance(node.twin, dict):
                if _differs(node.twin, node.before):
                    yield node, None, node.twin
                continue
            for key, value in node.twin.items():
                if node.before.get(key, ABSENT) is not value:
                    yield node, key, value
            for key in node.before.keys() - node.twin.keys():
                yield node, key, ABSENT

    def rebound(self, value: Any, seen: dict[int, Any], *, path: str) -> Any:
        """A value of the twin as the live model may hold it: every object of the twin replaced by its own.

        What was made anew is changed in place, and is the live model's from now on.

        Args:
            value: What the twin holds.
            seen: What has been rebound already; grows.
            path: Where the twin holds it, for messages.
        """
        if isinstance(value, VALUES + CLOSED) or id(value) in self._shared:
            return value
        if id(value) in self._counterpart and not isinstance(value, torch.Tensor):
            return self._counterpart[id(value)]
        if id(value) in seen:
            return seen[id(value)]
        if id(value) in self._kept and isinstance(live := self._kept[id(value)].live, torch.Tensor):
            return live
        seen[id(value)] = value
        result = seen[id(value)] = self._rebuilt(value, seen, path)
        return result

    def _rebuilt(self, value: Any, seen: dict[int, Any], path: str) -> Any:
        def again(child: Any, name: Any) -> Any:
            return self.rebound(child, seen, path=joined(path, name))

        if isinstance(value, types.MethodType):
            owner = again(value.__self__, "__self__")
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            func, args = again(value.func, "func"), tuple(again(arg, i) for i, arg in enumerate(value.args))
            named = {key: again(arg, key) for key, arg in value.keywords.items()}
            return functools.partial(func, *args, **named)
        if isinstance(value, types.FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if (new := again(cell.cell_contents, name)) is not cell.cell_contents:
                    cell.cell_contents = new
            if (defaults := again(value.__defaults__, "__defaults__")) is not value.__defaults__:
                value.__defaults__ = defaults
            return value
        if isinstance(value, tuple):
            parts = [again(child, i) for i, child in enumerate(value)]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        contents = contents_of(value)
        if isinstance(contents, dict):
            for key, child in list(contents.items()):
                if (new := again(child, key)) is not child:
                    contents[key] = new
        elif isinstance(contents, list):
            for i, child in enumerate(contents):
                if (new := again(child, i)) is not child:
                    contents[i] = new
        elif isinstance(contents, set) and any(id(child) in self._counterpart for child in contents):
            raise ModelError(
                "what an engine derives names objects of its model where they can be replaced",
                where=f"{path!r}",
                equation="a set holds objects of the model",
                hint="this engine or model needs rules of its own",
            )
        return value


def _at(contents: Any, key: Any) -> Any:
    if isinstance(contents, dict):
        return contents.get(key)
    return contents[key] if isinstance(contents, list) and key < len(contents) else None


def contents_of(value: Any) -> Any:
    """What an object holds that can change: itself for a dict, list or set, else its attributes."""
    if isinstance(value, (dict, list, set)):
        return value
    if isinstance(value, (*VALUES, *CLOSED, types.FunctionType, types.MethodType, tuple)):
        return None
    return getattr(value, "__dict__", None)


def children(value: Any) -> Iterator[tuple[Any, Any]]:
    """What an object leads to, by attribute, key or number."""
    if isinstance(value, types.MethodType):
        yield "__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield "func", value.func
        yield "args", value.args
        yield "keywords", value.keywords
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield name, cell.cell_contents
        yield "__defaults__", value.__defaults__
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif isinstance(contents := contents_of(value), dict):
        yield from list(contents.items())


def joined(path: str, name: Any) -> str:
    """The place of what is held under a name."""
    if name in ("_parameters", "_buffers", "_modules"):
        return path
    return f"{path}.{name}" if path else str(name)


def storage_of(tensor: torch.Tensor) -> int:
    """The memory that a tensor is a view of, by its address."""
    return tensor.untyped_storage().data_ptr()


def same_memory(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors are one stretch of memory, seen alike."""
    return (
        one.data_ptr() == two.data_ptr()
        and one.shape == two.shape
        and one.dtype == two.dtype
        and one.stride() == two.stride()
    )


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors of one device have one shape and dtype and the same bits."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(bits_of(one), bits_of(two))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as integers, so that NaNs and signs of zero are compared as well."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    held = tensor.detach()
    if held.is_complex():
        held = torch.view_as_real(held)
    return held.contiguous().view(words[held.element_size()])


def _differs(now: Any, before: Any) -> bool:
    """Whether a container holds other objects than before."""
    if isinstance(now, set):
        return bool(now != before)
    if len(now) != len(before):
        return True
    if isinstance(now, list):
        return any(a is not b for a, b in zip(now, before, strict=True))
    return any(before.get(key, ABSENT) is not value for key, value in now.items())
