"""One step of a pipeline: what a stage does and what it sends, after a plan, for any stages at all.

Nothing here knows a model. A callback takes one microbatch through one chunk of this stage; this module
brings it what the stage before made, takes what it made to the next, and brings gradients back.

Both ends of a message derive its shape, dtype and layout on their own, from their ``SequenceLayout``. They
compare all of a step before its first message, and each message has a header that is compared once more when
it is there. So a stage that would cut or order its microbatches in another way is named by both its
neighbours, and no tensor is ever taken for another one.

What is received lies in memory of its own. What is sent is let go of when it is through: a stage keeps the
way back through its graph, and not its own output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from shardweave.errors import GeometryError, PlanError, ShardweaveError
from shardweave.move import named_error
from shardweave.train.grid import Group
from shardweave.train.schedule import BACKWARD, FORWARD, Action, Message, PipelinePlan

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MAX_DIMS = 6
HEADER_WORDS = 7 + _MAX_DIMS
"""Numbers of a header."""
_MAX_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class Boundary:
    """What stages hand each other of a microbatch.

    Attributes:
        shape: The whole shape: that of a rank's slots, ``layout.local_shape(split_tp=True)``, and the width.
        dtype: Of activations and of their gradients.
        digest: ``SequenceLayout.digest``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: str = "0"


@dataclass(frozen=True, slots=True)
class Output:
    """What a chunk made of a microbatch.

    Attributes:
        hidden: For the next chunk; ``None`` from the last one.
        loss: A scalar that the step differentiates, of any chunk: the loss, or what routing adds to it.
    """

    hidden: Tensor | None = None
    loss: Tensor | None = None


Forward = Callable[[int, int, Tensor | None], Output]
"""``forward(microbatch, chunk, hidden)``; ``hidden`` is ``None`` for the first chunk of the first stage."""


def run(
    plan: PipelinePlan,
    *,
    pp: Group,
    forward: Forward,
    boundary: Callable[[int], Boundary],
    device: str | torch.device = "cpu",
) -> None:
    """Take all microbatches through this rank's stage. Every rank of the group calls it with the same plan.

    Gradients are added to ``.grad`` of whatever ``forward`` used. Without a way back no graph is made.

    Args:
        plan: From ``plan_pipeline``.
        pp: The stages, in their order.
        forward: One microbatch through one chunk. What it is given is its own; what it returns as ``hidden``
            is let go of.
        boundary: What is handed on of a microbatch, by its number.
        device: Where tensors are.

    Raises:
        GeometryError: The group has not as many ranks as the plan has stages.
        PlanError: A stage expects other messages than its neighbour sends, or made another tensor than it
            announced.
        TransportError, TransportTimeoutError: A stage is gone or does not come.
    """
    if plan.stages != pp.size:
        raise GeometryError(
            "each stage of a pipeline is a rank of its group",
            where=f"group {pp.name}",
            equation=f"stages({plan.stages}) != ranks({pp.size})",
            hint="plan the pipeline for the size of the pp group",
        )
    limits = [boundary(microbatch) for microbatch in range(plan.microbatches)]
    mail = _Mail(plan, pp, limits, torch.device(device))
    mail.compare()
    stage = _Stage(plan, pp, forward, mail)
    for event in plan.events[pp.rank]:
        if isinstance(event, tuple):
            mail.post(event)
        elif event.kind == FORWARD:
            stage.go_forward(event)
        else:
            stage.go_back(event)
    mail.finish()


# --- one stage ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the way back of a microbatch through a chunk needs: its input and where its graph begins."""

    hidden: Tensor | None
    edge: Any
    loss: Tensor | None


class _Stage:
    def __init__(self, plan: PipelinePlan, pp: Group, forward: Forward, mail: _Mail) -> None:
        self._plan, self._pp, self._forward, self._mail = plan, pp, forward, mail
        self._goes_back = any(action.kind == BACKWARD for action in plan.actions[pp.rank])
        self._kept: dict[tuple[int, int], _Kept] = {}

    def go_forward(self, action: Action) -> None:
        microbatch, chunk = action.microbatch, action.chunk
        hidden = None
        if (self._pp.rank, chunk) != (0, 0):
            hidden = self._mail.take(FORWARD, microbatch, chunk)
            if self._goes_back:
                hidden.requires_grad_()
        with nullcontext() if self._goes_back else torch.no_grad():
            output = self._forward(microbatch, chunk, hidden)
        is_last = self._plan.is_last(self._pp.rank, chunk)
        if (output.hidden is None) != is_last:
            raise PlanError(
                "every chunk but the last one hands something on",
                where=f"{_place(self._pp)}, microbatch {microbatch}, chunk {chunk}",
                equation=f"hidden is {'None' if output.hidden is None else 'a tensor'}, is_last({is_last})",
                hint="return Output(hidden=...), and Output(loss=...) from the last chunk",
            )
        edge = None
        if output.hidden is not None:
            self._mail.give(FORWARD, microbatch, chunk, output.hidden.detach())
            if self._goes_back and output.hidden.requires_grad:
                edge = torch.autograd.graph.get_gradient_edge(output.hidden)
        if self._goes_back:
            self._kept[microbatch, chunk] = _Kept(hidden, edge, output.loss)

    def go_back(self, action: Action) -> None:
        microbatch, chunk = action.microbatch, action.chunk
        kept = self._kept.pop((microbatch, chunk))
        roots: list[Any] = []
        grads: list[Tensor | None] = []
        if not self._plan.is_last(self._pp.rank, chunk):
            grad = self._mail.take(BACKWARD, microbatch, chunk)
            if kept.edge is not None:
                roots.append(kept.edge)
                grads.append(grad)
        if kept.loss is not None and kept.loss.requires_grad:
            roots.append(kept.loss)
            grads.append(None)
        if roots:
            torch.autograd.backward(roots, grads)
        if kept.hidden is not None:
            back = kept.hidden.grad if kept.hidden.grad is not None else torch.zeros_like(kept.hidden)
            self._mail.give(BACKWARD, microbatch, chunk, back)


# --- messages -----------------------------------------------------------------------------------


class _Mail:
    """The messages of one stage, in the order of the plan."""

    def __init__(
        self, plan: PipelinePlan, pp: Group, limits: Sequence[Boundary], device: torch.device
    ) -> None:
        self._plan, self._pp, self._limits, self._device = plan, pp, limits, device
        self._out: dict[tuple[str, int, int], Tensor] = {}
        self._in: dict[tuple[str, int, int], tuple[Any, Message, Tensor, Tensor]] = {}
        self._unread: list[tuple[Message, Tensor]] = []
        self._sent: deque[tuple[Message, Any, tuple[Tensor, ...]]] = deque()
        self._together = device.type != "cpu"

    def give(self, kind: str, microbatch: int, chunk: int, tensor: Tensor) -> None:
        """What this stage made, for whoever is next on the way.

        Raises:
            PlanError: It is not what the stage announced.
        """
        limit = self._limits[microbatch]
        if tuple(tensor.shape) != limit.shape or tensor.dtype != limit.dtype:
            raise PlanError(
                "a stage hands on what its neighbour expects",
                where=f"{_place(self._pp)}, {kind} of microbatch {microbatch}, chunk {chunk}",
                equation=f"shape{tuple(tensor.shape)} {tensor.dtype} != shape{limit.shape} {limit.dtype}",
                hint="the tensor is not a rank's part of this microbatch: slice it with its SequenceLayout",
            )
        stages, step = self._plan.stages, 1 if kind == FORWARD else -1
        place = chunk * stages + self._pp.rank + step
        self._out[kind, microbatch, place // stages] = tensor.contiguous()

    def take(self, kind: str, microbatch: int, chunk: int) -> Tensor:
        """What another stage made for this one, when it is there."""
        work, message, header, tensor = self._in.pop((kind, microbatch, chunk))
        with self._named(message):
            for one in work:
                one.wait()
        if self._together:
            self._unread.append((message, header))
        else:
            self._read(message, header)
        return tensor

    def post(self, messages: Sequence[Message]) -> None:
        """Post all messages of one time: the devices' backends do them as one."""
        posts: list[tuple[Message, Tensor, Tensor]] = []
        for message in messages:
            limit = self._limits[message.microbatch]
            if message.src == self._pp.rank:
                header = torch.tensor(self._row(message), dtype=torch.int64, device=self._device)
                tensor = self._out.pop((message.kind, message.microbatch, message.chunk))
            else:
                header = torch.empty(HEADER_WORDS, dtype=torch.int64, device=self._device)
                tensor = _fresh(limit, self._device)
            posts.append((message, header, tensor))
        with self._named(messages[0]):
            works = self._post([(m.src, m.dst, (h, t)) for m, h, t in posts])
        for (message, header, tensor), work in zip(posts, works, strict=True):
            if message.src == self._pp.rank:
                self._sent.append((message, work, (header, tensor)))
            else:
                self._in[message.kind, message.microbatch, message.chunk] = work, message, header, tensor
        # What an earlier time sent is through, or will be without anything more from here.
        self._settle(2 * self._plan.stages)

    def finish(self) -> None:
        """Wait for what was sent, and read the headers that are not read yet."""
        self._settle(0)
        for message, header in self._unread:
            self._read(message, header)

    def compare(self) -> None:
        """Compare with each neighbour which messages are to come.

        Raises:
            PlanError: The two do not agree; both raise it.
        """
        me = self._pp.rank
        tables: dict[int, list[list[int]]] = {}
        for event in self._plan.events[me]:
            if not isinstance(event, Action):
                for message in event:
                    other = message.src + message.dst - me
                    tables.setdefault(other, []).append(self._row(message))
        mine = {other: torch.tensor(rows, dtype=torch.int64) for other, rows in sorted(tables.items())}
        sums = {other: _sum(table) for other, table in mine.items()}
        theirs = self._swap(sums, {other: sums[other].shape for other in sums})
        odd = [other for other in mine if not torch.equal(sums[other], theirs[other])]
        if not odd:
            return
        for other in odd:
            self._check_rows(other, int(theirs[other][1]))
        shapes = {other: torch.Size((int(theirs[other][1]), HEADER_WORDS)) for other in odd}
        found = self._swap({other: mine[other] for other in odd}, shapes)
        for other in odd:
            self._raise_unlike(other, mine[other].tolist(), found[other].tolist())

    def _swap(self, mine: dict[int, Tensor], shapes: dict[int, torch.Size]) -> dict[int, Tensor]:
        """Small tables against those of neighbours."""
        me = self._pp.rank
        into = {
            other: torch.empty(shape, dtype=torch.int64, device=self._device)
            for other, shape in shapes.items()
        }
        posts = [(me, other, (table.to(self._device),)) for other, table in mine.items()]
        posts += [(other, me, (table,)) for other, table in into.items()]
        posts.sort(key=lambda post: post[:2])
        with self._named():
            for work in self._post(posts):
                for one in work:
                    one.wait()
        return {other: table.cpu() for other, table in into.items()}

    def _post(self, posts: Sequence[tuple[int, int, tuple[Tensor, ...]]]) -> list[list[Any]]:
        """Post tensors from one stage to another; what to wait for, of each."""
        comm, me = self._pp.comm, self._pp.rank
        if self._together:
            comm._start_coalescing()
        works: list[list[Any]] = []
        for src, dst, tensors in posts:
            act, other = (comm.send, dst) if src == me else (comm.recv, src)
            works.append([act([tensor], other, 0) for tensor in tensors if tensor.numel()])
        if self._together:
            whole = comm._end_coalescing()
            return [[whole] for _ in posts]
        return works

    def _settle(self, most: int) -> None:
        """Wait for the oldest messages sent until at most so many are under way, and let go of them."""
        while len(self._sent) > most:
            message, work, _ = self._sent.popleft()
            with self._named(message):
                for one in work:
                    one.wait()

    def _row(self, message: Message) -> list[int]:
        """A message as numbers: what its header says, and what its receiver derives on its own."""
        limit = self._limits[message.microbatch]
        if len(limit.shape) > _MAX_DIMS or limit.dtype not in _DTYPES:
            raise PlanError(
                "a message has a header",
                where=f"{_place(self._pp)}, microbatch {message.microbatch}",
                equation=f"dims({len(limit.shape)}) > {_MAX_DIMS} or {limit.dtype} is not among "
                + ", ".join(map(str, _DTYPES)),
                hint="hand on floating point tensors of few dims",
            )
        digest = int.from_bytes(int(limit.digest, 16).to_bytes(8, "little"), "little", signed=True)
        padded = (*limit.shape, *[-1] * (_MAX_DIMS - len(limit.shape)))
        is_back = int(message.kind == BACKWARD)
        numbers = message.src, message.dst, is_back, message.microbatch, message.chunk
        return [*numbers, _DTYPES.index(limit.dtype), digest, *padded]

    def _read(self, message: Message, header: Tensor) -> None:
        """Compare the header of a message that is there with what this stage derives."""
        found, wanted = header.tolist(), self._row(message)
        if found != wanted:
            raise PlanError(
                "a stage receives the message that it waits for",
                where=_place(self._pp),
                equation=f"stage {message.src} sent ({_say(found)}), stage {message.dst} expects "
                f"({_say(wanted)})",
                hint="both stages need the same microbatches in the same order",
            )

    def _check_rows(self, other: int, rows: int) -> None:
        if not 0 <= rows <= _MAX_ROWS:
            raise PlanError(
                "neighbours of a pipeline say how many messages they expect",
                where=_place(self._pp),
                equation=f"stage {other} says {rows}, of at most {_MAX_ROWS}",
                hint="all stages must call run() of the same version",
            )

    def _raise_unlike(self, other: int, mine: list[list[int]], theirs: list[list[int]]) -> None:
        me, low = self._pp.rank, min(self._pp.rank, other)
        sides = {me: mine, other: theirs}
        first, second = (sides.pop(low), *sides.values())
        for number in range(max(len(first), len(second))):
            one, two = (rows[number] if number < len(rows) else None for rows in (first, second))
            if one != two:
                raise PlanError(
                    "two stages of a pipeline expect the same messages between them",
                    where=f"group {self._pp.name}, ranks {self._pp.ranks[low]} and "
                    f"{self._pp.ranks[max(me, other)]}, message {number}",
                    equation=f"stage {low} has ({_say(one)}), stage {max(me, other)} has ({_say(two)})",
                    hint="all stages need the same plan, and the same SequenceLayout of each microbatch",
                )

    @contextmanager
    def _named(self, message: Message | None = None) -> Iterator[None]:
        """Errors of a backend by name, with the message that they broke."""
        try:
            yield
        except ShardweaveError:
            raise
        except RuntimeError as error:
            what = (
                "comparing messages"
                if message is None
                else f"{message.kind} of microbatch {message.microbatch}, chunk {message.chunk}, "
                f"from stage {message.src} to stage {message.dst}, "
                f"ranks {self._pp.ranks[message.src]} and {self._pp.ranks[message.dst]}"
            )
            raise named_error(error, f"{_place(self._pp)}, {what}") from error


def _fresh(limit: Boundary, device: torch.device) -> Tensor:
    """Memory for one tensor to come. It is never used twice: a graph may keep it for as long as it lives."""
    return torch.empty(limit.shape, dtype=limit.dtype, device=device)


def _sum(table: Tensor) -> Tensor:
    """A table in two numbers: its digest and its rows."""
    digest = blake2b(table.numpy().tobytes(), digest_size=8).digest()
    return torch.tensor([int.from_bytes(digest, "little", signed=True), len(table)], dtype=torch.int64)


def _say(row: Sequence[int] | None) -> str:
    """A header in words; its numbers may be anything."""
    if row is None:
        return "no message"
    src, dst, is_back, microbatch, chunk, dtype, digest, *shape = row
    name = str(_DTYPES[dtype]) if 0 <= dtype < len(_DTYPES) else f"dtype {dtype}"
    sizes = tuple(size for size in shape if size >= 0)
    kind = {0: FORWARD, 1: BACKWARD}.get(is_back, f"kind {is_back}")
    return (
        f"{kind} of microbatch {microbatch} for chunk {chunk}, stage {src} to {dst}: shape{sizes} {name}, "
        f"layout {digest % (1 << 64):016x}"
    )


def _place(pp: Group) -> str:
    return f"rank {pp.global_rank(pp.rank)}, stage {pp.rank} of group {pp.name}"
