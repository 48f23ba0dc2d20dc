"""A guard for tests: while it is open, a module that communicates beyond the groups of its grid is refused.

A job with two grids goes wrong quietly when something takes a group of the other one, or the default group of
torch: the sum is over other ranks, and a number comes out. Within ``guard`` it is an error before a byte is
sent, with the names of both.

What is seen, in any thread, also in the backward of what was computed outside:

- a collective or message of this package over a ``Group`` of another grid, also where that has the same ranks
  and so the same communicator, and where it has this rank alone and would send nothing;
- every method that communicates, of every backend of torch and of ``torch.distributed.ProcessGroup``, and of
  the communicators of a world in memory, on what is not a communicator of the grid: so all functions of
  ``torch.distributed`` with such a group;
- every function of ``torch.distributed`` that comes to the default group: collectives and messages without a
  group or with ``group.WORLD``, ``get_rank()``, ``get_world_size()``, ``new_group()``, ``barrier()``;
- operators of torch that communicate (``torch.ops.c10d``, functional collectives, DTensor).

What is not seen: ``torch.distributed.is_initialized()``; numbers that are read of a group, such as its size;
a communicator of the grid itself that is used for another purpose; a method of a backend of torch that was
bound before the guard was opened; what goes over shared memory or a library of its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, _resolve_process_group
from torch.distributed import c10d_logger, distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from shardweave.errors import GeometryError
from shardweave.layout.layout import format_ranks
from shardweave.testing.communicator import Communicator
from shardweave.train.grid import Group, Groups

_DEFAULT = "the default group of torch"

# fmt: off
_LOCAL = frozenset({
    "name", "rank", "size", "abort", "shutdown", "set_timeout", "boxed", "unbox", "allocate_tensor",
    "create_device", "create_default_device", "get_group_store", "memory_stats", "_pybind11_conduit_v1_",
    "_backend_id", "_enable_collectives_timing", "_get_backend", "_get_backend_name",
    "_get_sequence_number_for_group", "_has_hooks", "_id", "_register_backend",
    "_register_on_completion_hook", "_set_default_backend", "_set_default_timeout", "_set_group_desc",
    "_set_group_name", "_set_sequence_number_for_group", "_wait_for_pending_works", "get_error",
    "setUsePgForSymmMemRendezvous", "supports_tensor_alloc", "use_pg_for_symm_mem_rendezvous",
})
"""Methods of communicators that ask no other rank. One that is not known here counts as one that does."""

_NAMESPACES = frozenset({
    "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem",
})
"""Of operators of torch that communicate."""
# fmt: on


@contextmanager
def guard(groups: Groups) -> Iterator[None]:
    """Refuse whatever communicates in a group that is not one of these.

    Of two guards in each other the inner one holds. Threads that are started within have none of their own,
    and are held to those that are open: a communicator of torch has to be allowed by one of them, one of a
    world in memory by that of its rank. When the last guard is closed, nothing of it is left.

    Args:
        groups: Those of the module, ``groups.of("vision")``; or all of a plan, to refuse the default group
            and what nobody planned.

    Raises:
        GeometryError: In whatever communicates within: which group it was, and which grid is declared.

    >>> from shardweave.layout import Mesh
    >>> from shardweave.testing.world import run_world
    >>> from shardweave.train.collectives import sum_all
    >>> from shardweave.train.grid import plan_groups
    >>> grids = {"vision": Mesh((("tp", 2),)), "language": Mesh((("tp", 2), ("dp", 2)))}
    >>> names = {grid: {axis: (axis,) for axis, _ in mesh.axes} for grid, mesh in grids.items()}
    >>> def work(groups):
    ...     if groups.member("vision"):
    ...         with guard(groups.of("vision")):
    ...             sum_all(torch.ones(1), group=groups.get("language", "tp"))
    >>> import torch
    >>> try:
    ...     run_world(work, plan=plan_groups(grids, names))
    ... except GeometryError as error:
    ...     print(error.equation)
    group language.tp of ranks 0, 1 on grid language(tp=2,dp=2) is not of grid vision(tp=2)
    """
    own = _Guard(groups)
    _open(own)
    _HERE.guards.append(own)
    try:
        with _HERE.mode if len(_HERE.guards) == 1 else nullcontext():
            yield
    finally:
        _HERE.guards.remove(own)
        _close(own)


class _Guard:
    """What is allowed in the groups of one rank, and what is of other grids."""

    def __init__(self, groups: Groups) -> None:
        own, every = list(groups.every()), list(groups.whole.every())
        self.groups = groups
        self.foreign = {id(group): group for group in every if not any(group is one for one in own)}
        # Each with its communicator, so that nothing else comes to have its number.
        self._allowed = {id(comm): comm for group in own for comm in _comms(group)}
        self._names: dict[int, tuple[Any, list[Group]]] = {}
        for group in every:
            for comm in _comms(group):
                self._names.setdefault(id(comm), (comm, []))[1].append(group)

    def allows(self, comm: Any) -> bool:
        """Whether it is a communicator of these groups."""
        return id(comm) in self._allowed

    def knows(self, comm: Any) -> bool:
        """Whether it is a communicator of this rank."""
        return id(comm) in self._names

    def refusal(self, used: str, act: str) -> GeometryError:
        """What is raised, with both groups in it."""
        groups, plan = self.groups, self.groups.whole.plan
        names = [groups.grid] if groups.grid else list(plan.grids)
        said = ", ".join(f"{name}({plan.grids[name]})" for name in names)
        return GeometryError(
            "a module communicates in groups of its own grid",
            where=f"rank {groups.rank}, {act}",
            equation=f"{used} is not of grid{'s' * (len(names) > 1)} {said}",
            hint="pass it the groups of its grid, groups.of(name), and each call the group that it is for",
        )

    def said(self, comm: Any) -> str:
        """A communicator in an error."""
        if self.knows(comm):
            return " = ".join(map(self.named, self._names[id(comm)][1]))
        for group, ranks in distributed_c10d._world.pg_group_ranks.items():
            if any(comm is one for one in (group, *_backends(group))):
                is_default = group is _torchs_default()
                return _DEFAULT if is_default else f"a group of {format_ranks(tuple(ranks), 8)}, of no grid,"
        return f"a group of {comm.size()} ranks, of no grid,"

    def named(self, group: Group) -> str:
        """A group in an error."""
        grid, _, _ = group.name.rpartition(".")
        plan = self.groups.whole.plan
        on = f" on grid {grid}({plan.grids[grid]})" if grid in plan.grids else ""
        return f"group {group.name} of {format_ranks(group.ranks, 8)}{on}"


def _comms(group: Group) -> Iterator[Any]:
    """The communicator of a group, and the backends that it sends with."""
    comm = _COMM.__get__(group, Group)
    if comm is not None:
        yield comm
        yield from _backends(comm)


def _backends(comm: Any) -> Iterator[Any]:
    if isinstance(comm, dist.ProcessGroup):
        yield from (comm._get_backend(device) for device in comm._device_types)


# --- who is judged ------------------------------------------------------------------------------


class _Mode(TorchDispatchMode):
    """Looks at operators that communicate. Autograd takes it to the threads in which it computes."""

    def __init__(self, guards: list[_Guard]) -> None:
        super().__init__()
        self.guards = guards

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operator imports all of torch's compiler, a second on each rank

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func.namespace in _NAMESPACES:
            for each in (*args, *given.values()):
                comm = _comm_of(each)
                if comm is not None:
                    _judge(comm, f"torch.ops.{func}")
        return func(*args, **given)


def _comm_of(given: Any) -> Any:
    """The process group that an argument of an operator is, or is the name of."""
    if isinstance(given, str):
        try:
            return _resolve_process_group(given)  # type: ignore[arg-type]
        except (LookupError, RuntimeError, ValueError):
            return None  # the name of something else, such as of the operation
    try:
        return dist.ProcessGroup.unbox(given)
    except (RuntimeError, TypeError):
        return None


class _Here(threading.local):
    """The guards of a thread, the innermost last."""

    def __init__(self) -> None:
        self.guards: list[_Guard] = []
        self.mode = _Mode(self.guards)


_HERE = _Here()


def _own() -> _Guard | None:
    """The guard that holds in this thread: its own, or that of whoever computes the backward in it."""
    if _HERE.guards:
        return _HERE.guards[-1]
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Mode) and mode.guards]
    return modes[-1].guards[-1] if modes else None


def _judge(comm: Any, act: str) -> None:
    """Refuse what is sent in a communicator that the guard of this thread does not allow."""
    own = _own()
    if own is not None:
        held = [own]
    elif isinstance(comm, Communicator):
        held = [each for each in tuple(_OPEN) if each.knows(comm)]
    else:
        held = list(_OPEN)
    if held and not any(each.allows(comm) for each in held):
        raise held[-1].refusal(held[-1].said(comm), act)


def _comm(group: Group) -> Any:
    """What reading ``Group.comm`` is while a guard is open."""
    own = _own()
    for each in (own,) if own is not None else tuple(_OPEN):
        if id(group) in each.foreign and each.foreign[id(group)] is group:
            raise each.refusal(each.named(group), "a collective")
    return _COMM.__get__(group, Group)


def _torchs_default() -> Any:
    """The default group of torch, which the guard knows so as to refuse it; ``None`` where there is none."""
    # shardweave: allow[SW202] it is compared with, and nothing is ever sent over it
    return distributed_c10d.GroupMember.WORLD


def _default_group() -> Any:
    """What ``torch.distributed`` asks for its default group while a guard is open."""
    caller = sys._getframe(1)
    world = _torchs_default()
    given = caller.f_locals.get("group")
    if caller.f_code is dist.get_rank.__code__ and given is not None and given is not world:
        return world  # it looks up this rank in the group that was given
    if _is_below(caller, c10d_logger._get_msg_dict.__code__):
        return world  # it logs an error, which shall stay what it is
    own = _own()
    held = [own] if own is not None else list(_OPEN)
    if held:
        while caller.f_code.co_name.startswith("_") and caller.f_back is not None:
            caller = caller.f_back
        raise held[-1].refusal(_DEFAULT, f"torch.distributed.{caller.f_code.co_name}")
    return _REAL_DEFAULT()


def _is_below(frame: FrameType | None, code: CodeType) -> bool:
    """Whether a frame was called by some code, over few others."""
    for _ in range(5):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code


# --- what is watched ----------------------------------------------------------------------------

_COMM: Any = vars(Group)["comm"]
_REAL_DEFAULT = distributed_c10d._get_default_group
_OPEN: list[_Guard] = []
_LOCK = threading.Lock()
_CHANGED: list[tuple[Any, str, Any]] = []


def _open(own: _Guard) -> None:
    with _LOCK:
        _OPEN.append(own)
        if len(_OPEN) > 1:
            return
        for of in _classes():
            for name, method in list(vars(of).items()):
                if _communicates(name, method):
                    _change(of, name, _watched(name, method))
        _change(Group, "comm", property(_comm, _COMM.__set__))
        _change(distributed_c10d, "_get_default_group", _default_group)


def _close(own: _Guard) -> None:
    with _LOCK:
        _OPEN.remove(own)
        if not _OPEN:
            while _CHANGED:
                of, name, value = _CHANGED.pop()
                setattr(of, name, value)


def _change(of: Any, name: str, value: Any) -> None:
    _CHANGED.append((of, name, vars(of)[name]))
    setattr(of, name, value)


def _classes() -> list[type]:
    """Communicators: those of torch, with all backends that are loaded, and those of a world in memory."""
    found: list[type] = []
    waiting: list[type] = [dist.ProcessGroup, Backend, Communicator]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.append(one)
            waiting += one.__subclasses__()
    return found


def _communicates(name: str, method: Any) -> bool:
    is_special = name.startswith("__") or isinstance(method, (type, property, staticmethod, classmethod))
    return callable(method) and not is_special and name not in _LOCAL


def _watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def watched(self: Any, *args: Any, **given: Any) -> Any:
        _judge(self, f"{type(self).__name__}.{name}")
        return method(self, *args, **given)

    return watched
