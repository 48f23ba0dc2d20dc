"""In which order the stages of a pipeline work, as data: made, proved and timed without torch.

A model is cut into ``stages * virtual`` stretches of layers. Stretch ``chunk * stages + stage`` is chunk
``chunk`` of ``stage``, so that activations go round the stages ``virtual`` times. ``schedule`` says what one
stage does one after the other; ``plan_pipeline`` adds when messages are posted, and proves the whole:

- Every microbatch goes forward through every stretch once, and backward once after it.
- No order of waiting can close a ring. All stages are played through at once, and each message gets the time
  at which it is ready there. Every stage posts its messages in order of these times, both ends of a message
  at the same one, so that each waits only for what has an earlier time. This holds if no message is ever
  buffered, and if the messages of a pair arrive strictly in order, as they do on NCCL.

>>> [str(action) for action in schedule("1f1b", stages=2, microbatches=3, stage=0)]
['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
>>> plan = plan_pipeline("1f1b", stages=4, microbatches=8)
>>> plan.in_flight, round(plan.bubble, 4)
((4, 3, 2, 1), 0.2727)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from shardweave.errors import GapError, GeometryError, OverlapError, PlanError

KINDS = ("1f1b", "interleaved", "forward")
FORWARD, BACKWARD = "forward", "backward"
_TIMES = {FORWARD: 1, BACKWARD: 2}

# --- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Action:
    """One microbatch through one chunk of a stage.

    Attributes:
        kind: ``"forward"`` or ``"backward"``.
        microbatch: Which one, from 0.
        chunk: Which stretch of the stage's layers, from 0.
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor on its way between two stages.

    Attributes:
        time: When it is ready, in forward passes through a chunk since the begin; backward counts twice.
        src: The stage that sends it.
        dst: The stage that gets it.
        kind: ``"forward"`` for activations, ``"backward"`` for their gradient.
        microbatch: Of which microbatch.
        chunk: The chunk of ``dst`` that it is for.
    """

    time: int
    src: int
    dst: int
    kind: str
    microbatch: int
    chunk: int


Event = Action | tuple[Message, ...]
"""What a stage does next: an action, or all messages of one time, which are posted together."""


def schedule(
    kind: str, *, stages: int, virtual: int = 1, microbatches: int, stage: int
) -> tuple[Action, ...]:
    """What one stage does, one after the other.

    Args:
        kind: ``"1f1b"``: a stage keeps at most one microbatch for each stage from itself to the last.
            ``"interleaved"``: the same over ``virtual`` chunks a stage, for a bubble that is as many times
            smaller; any number of microbatches. ``"forward"``: no way back.
        stages: The number of stages.
        virtual: Chunks of each stage; 1 in ``"1f1b"``.
        microbatches: How many go through.
        stage: Which one, from 0.

    Raises:
        GeometryError: The kind is unknown, a number is not positive, or chunks do not fit to the kind.
    """
    _check_kind(kind, stages, virtual, microbatches)
    if not 0 <= stage < stages:
        raise GeometryError(
            "a stage is one of the pipeline",
            equation=f"stage({stage}) is not in 0..{stages - 1}",
            hint="give the rank in the pp group, not the global one",
        )
    # Interleaved stages go round in full rounds. A plan for these holds for part of the microbatches: what
    # is left out waits for nobody.
    rounds = microbatches if virtual == 1 else -(-microbatches // stages) * stages
    order = [
        (microbatch, chunk)
        for first in range(0, rounds, stages)
        for chunk in range(virtual)
        for microbatch in range(first, min(first + stages, rounds))
    ]
    forward = [Action(FORWARD, microbatch, chunk) for microbatch, chunk in order]
    backward = [Action(BACKWARD, microbatch, virtual - 1 - chunk) for microbatch, chunk in order]
    if kind == "forward":
        return tuple(action for action in forward if action.microbatch < microbatches)
    # How many are on the way there and back behind this stage, and before the last chunk of the first round.
    ahead = stages - 1 - stage
    if virtual > 1:
        ahead = 2 * ahead + (virtual - 1) * stages
    ahead = min(ahead, len(forward))
    steady = itertools.chain.from_iterable(zip(forward[ahead:], backward, strict=False))
    actions = (*forward[:ahead], *steady, *backward[len(forward) - ahead :])
    return tuple(action for action in actions if action.microbatch < microbatches)


def _check_kind(kind: str, stages: int, virtual: int, microbatches: int) -> None:
    if kind not in KINDS or min(stages, virtual, microbatches) < 1:
        raise GeometryError(
            "a schedule is of a known kind, and its numbers are positive",
            equation=f"kind({kind!r}), stages({stages}), virtual({virtual}), microbatches({microbatches})",
            hint=f"use one of {', '.join(KINDS)}",
        )
    if (virtual > 1 and (kind == "1f1b" or stages == 1)) or (virtual == 1 and kind == "interleaved"):
        raise GeometryError(
            "chunks are interleaved over several stages",
            where=f"schedule {kind!r}",
            equation=f"virtual({virtual}) with stages({stages})",
            hint="use '1f1b' for one chunk a stage, 'interleaved' for more, on two stages at least",
        )


# --- the whole pipeline -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A proved schedule of all stages.

    Attributes:
        kind: As given.
        virtual: Chunks of each stage.
        microbatches: How many go through.
        actions: For each stage its actions.
        events: For each stage its actions and the messages in between, in the order of doing and posting.
        in_flight: For each stage how many chunks' inputs it keeps for the way back, at most.
        makespan: When the last action ends, in forward passes through a chunk; backward counts twice.
    """

    kind: str
    virtual: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    events: tuple[tuple[Event, ...], ...]
    in_flight: tuple[int, ...]
    makespan: int

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.actions)

    @property
    def bubble(self) -> float:
        """The share of time in which a stage waits.

        In ``1f1b``: ``(stages - 1) / (microbatches + stages - 1)``; interleaved, where stages divide the
        microbatches: ``(stages - 1) / (virtual * microbatches + stages - 1)``.
        """
        work = sum(_TIMES[action.kind] for action in self.actions[0])
        return 1 - work / self.makespan

    def is_last(self, stage: int, chunk: int) -> bool:
        """Whether a chunk is the end of the model."""
        return (stage, chunk) == (self.stages - 1, self.virtual - 1)

    def __str__(self) -> str:
        most = max(map(len, itertools.chain(*[map(str, actions) for actions in self.actions])))
        lines = [f"{self.kind}: {self.microbatches} microbatches, bubble {self.bubble:.1%}"]
        for stage, actions in enumerate(self.actions):
            lines.append(f"{stage}: " + " ".join(str(action).ljust(most) for action in actions).rstrip())
        return "\n".join(lines)


def plan_pipeline(kind: str, *, stages: int, virtual: int = 1, microbatches: int) -> PipelinePlan:
    """The schedules of all stages, with their messages, proved.

    Args:
        kind: As ``schedule`` takes it.
        stages: The number of stages.
        virtual: Chunks of each stage.
        microbatches: How many go through.

    Raises:
        GeometryError: See ``schedule``.

    >>> print(plan_pipeline("interleaved", stages=2, virtual=2, microbatches=2))
    interleaved: 2 microbatches, bubble 20.0%
    0: F0   F1   F0.1 F1.1 B0.1 B1.1 B0   B1
    1: F0   F1   F0.1 B0.1 F1.1 B1.1 B0   B1
    """
    every = range(stages)
    actions = tuple(
        schedule(kind, stages=stages, virtual=virtual, microbatches=microbatches, stage=stage)
        for stage in every
    )
    return prove(kind, actions, virtual=virtual, microbatches=microbatches)


def prove(kind: str, actions: Sequence[Sequence[Action]], *, virtual: int, microbatches: int) -> PipelinePlan:
    """A plan of given schedules, which may come from anywhere.

    Args:
        kind: ``"forward"`` where there is no way back; else a name.
        actions: For each stage what it does.
        virtual: Chunks of each stage.
        microbatches: How many go through.

    Raises:
        GapError: A microbatch does not go through some chunk.
        OverlapError: It does so twice.
        PlanError: Stages would wait for each other for ever.
    """
    stages = len(actions)
    kinds = (FORWARD,) if kind == "forward" else (FORWARD, BACKWARD)
    wanted = {
        Action(which, microbatch, chunk)
        for which in kinds
        for microbatch in range(microbatches)
        for chunk in range(virtual)
    }
    for stage, mine in enumerate(actions):
        _check_complete(stage, mine, wanted)
    ends = _play(actions, virtual)
    events = tuple(_events(stage, actions, ends, virtual) for stage in range(stages))
    check_order(events)
    return PipelinePlan(
        kind,
        virtual,
        microbatches,
        tuple(map(tuple, actions)),
        events,
        tuple(map(_most_kept, actions)),
        max(max(times.values()) for times in ends),
    )


def _check_complete(stage: int, actions: Sequence[Action], wanted: set[Action]) -> None:
    counts = Counter(actions)
    for action in sorted(wanted - counts.keys(), key=str):
        raise GapError(
            "every microbatch goes through every chunk",
            where=f"stage {stage}",
            equation=f"{action.kind} of microbatch {action.microbatch}, chunk {action.chunk} is missing",
            hint="make the schedule with schedule()",
        )
    for action, count in counts.items():
        if count > 1 or action not in wanted:
            raise OverlapError(
                "every microbatch goes through every chunk once",
                where=f"stage {stage}",
                equation=f"{action.kind} of microbatch {action.microbatch}, chunk {action.chunk}: "
                f"{count} times of {int(action in wanted)}",
                hint="make the schedule with schedule()",
            )


def _play(actions: Sequence[Sequence[Action]], virtual: int) -> list[dict[Action, int]]:
    """When each action of each stage ends, if each starts as soon as it can."""
    stages = len(actions)
    ends: list[dict[Action, int]] = [{} for _ in actions]
    at = [0] * stages
    free = [0] * stages
    goes_on = True
    while goes_on:
        goes_on = False
        for stage, mine in enumerate(actions):
            while at[stage] < len(mine):
                action = mine[at[stage]]
                needs = _needs(stage, action, stages, virtual)
                if any(need not in ends[where] for where, need in needs):
                    break
                ready = max((ends[where][need] for where, need in needs), default=0)
                free[stage] = max(free[stage], ready) + _TIMES[action.kind]
                ends[stage][action] = free[stage]
                at[stage] += 1
                goes_on = True
    if any(done < len(mine) for done, mine in zip(at, actions, strict=True)):
        _raise_stuck(actions, at)
    return ends


def _needs(stage: int, action: Action, stages: int, virtual: int) -> list[tuple[int, Action]]:
    """What must be done before an action, and on which stage."""
    place = action.chunk * stages + stage
    if action.kind == FORWARD:
        before = [] if place == 0 else [place - 1]
    else:
        before = [] if place == stages * virtual - 1 else [place + 1]
    needs = [(at % stages, Action(action.kind, action.microbatch, at // stages)) for at in before]
    if action.kind == BACKWARD:
        needs.append((stage, Action(FORWARD, action.microbatch, action.chunk)))
    return needs


def _raise_stuck(actions: Sequence[Sequence[Action]], at: Sequence[int]) -> NoReturn:
    stuck = [
        f"stage {stage} at {mine[done]}"
        for stage, (mine, done) in enumerate(zip(actions, at, strict=True))
        if done < len(mine)
    ]
    raise PlanError(
        "no stage waits for one that waits for it",
        equation=", ".join(stuck[:8]),
        hint="a stage must go forward for all that later stages need before it goes back",
    )


def _events(
    stage: int, actions: Sequence[Sequence[Action]], ends: Sequence[dict[Action, int]], virtual: int
) -> tuple[Event, ...]:
    """A stage's actions by the times of their ends, and behind those of a time the messages of that time."""
    stages, messages = len(actions), []
    for dst in {(stage - 1) % stages, stage, (stage + 1) % stages}:
        for action in actions[dst]:
            for src, need in _needs(dst, action, stages, virtual):
                if src != dst and stage in (src, dst):
                    time = ends[src][need]
                    messages.append(Message(time, src, dst, action.kind, action.microbatch, action.chunk))
    messages.sort(key=lambda message: (message.time, message.src))
    by_time = {time: tuple(of) for time, of in itertools.groupby(messages, lambda message: message.time)}
    timed: list[tuple[int, int, Event]] = [(time, 1, of) for time, of in by_time.items()]
    timed += [(ends[stage][action], 0, action) for action in actions[stage]]
    return tuple(event for _, _, event in sorted(timed, key=lambda item: item[:2]))


def check_order(events: Sequence[Sequence[Event]]) -> None:
    """Prove that events of stages can be done if no message is buffered and none overtakes another.

    Every stage does its events one after the other and starts the next only when the messages that it has
    posted are through, which both ends must have posted. What holds then holds for any looser backend.

    Raises:
        PlanError: Two stages post the messages between them in other orders, or stages wait in a ring.
    """
    at = [0] * len(events)
    sides: dict[tuple[int, int], tuple[list[Message], list[Message]]] = {}
    for stage, mine in enumerate(events):
        for message in itertools.chain.from_iterable(map(_messages, mine)):
            ends = sides.setdefault((message.src, message.dst), ([], []))
            ends[stage == message.dst].append(message)
    for (src, dst), (sent, asked) in sides.items():
        for one, other in itertools.zip_longest(sent, asked):
            if one != other:
                raise PlanError(
                    "messages are asked for in the order in which they are sent",
                    where=f"from stage {src} to stage {dst}",
                    equation=f"sent({one}) != asked({other})",
                    hint="make the events with plan_pipeline()",
                )
    posts = {
        (message, stage): number
        for stage, mine in enumerate(events)
        for number, event in enumerate(mine)
        for message in _messages(event)
    }
    goes_on = True
    while goes_on:
        goes_on = False
        for stage, mine in enumerate(events):
            while at[stage] < len(mine) and all(
                at[other] >= posts[message, other]
                for message in _messages(mine[at[stage]])
                for other in (message.src, message.dst)
            ):
                at[stage] += 1
                goes_on = True
    if any(done < len(mine) for done, mine in zip(at, events, strict=True)):
        stuck = [stage for stage, mine in enumerate(events) if at[stage] < len(mine)]
        raise PlanError(
            "stages post messages without waiting in a ring",
            equation=f"stages({', '.join(map(str, stuck))}) wait for each other",
            hint="make the events with plan_pipeline()",
        )


def _messages(event: Event) -> tuple[Message, ...]:
    return event if isinstance(event, tuple) else ()


def _most_kept(actions: Sequence[Action]) -> int:
    kept = itertools.accumulate(1 if action.kind == FORWARD else -1 for action in actions)
    return max(kept, default=0) if any(action.kind == BACKWARD for action in actions) else 1


# --- layers of stages ---------------------------------------------------------------------------


def stages_of(
    num_layers: int,
    *,
    stages: int,
    virtual: int = 1,
    sizes: Sequence[int] | None = None,
    layers: Sequence[Sequence[int]] | None = None,
    embedding: int = 0,
    head: int = 0,
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The layers of each chunk of each stage.

    Args:
        num_layers: How many there are in all.
        stages: The number of stages.
        virtual: Chunks of each stage.
        sizes: How many layers each stretch has, in the order of the model; as even as possible by default.
        layers: The layers of each stretch, in the order of the model.
        embedding: For how many layers the embedding counts, where they are cut evenly.
        head: For how many the head counts.

    Returns:
        ``found[stage][chunk]``: layer numbers, ascending.

    Raises:
        GeometryError: A layer is on no stage, on two, or out of order; sizes do not add up; there are fewer
            layers than stretches.

    >>> stages_of(6, stages=2, virtual=2, sizes=(1, 2, 2, 1))
    (((0,), (3, 4)), ((1, 2), (5,)))
    >>> stages_of(7, stages=2, embedding=1, head=2)
    (((0, 1, 2, 3),), ((4, 5, 6),))
    """
    count = stages * virtual
    if sizes is not None and layers is not None:
        raise GeometryError(
            "layers of stages are given in one way",
            equation=f"sizes({len(sizes)}) and layers({len(layers)})",
            hint="give sizes or layers",
        )
    if layers is None:
        if sizes is None:
            sizes = _even_sizes(num_layers, count, embedding, head)
        ends = list(itertools.accumulate(sizes, initial=0))
        layers = [range(begin, end) for begin, end in itertools.pairwise(ends)]
    held = [layer for stretch in layers for layer in stretch]
    if len(layers) != count or held != list(range(num_layers)):
        missing = sorted(set(range(num_layers)) - set(held))
        twice = sorted(layer for layer, times in Counter(held).items() if times > 1)
        raise GeometryError(
            "every layer is on one stage, in the order of the model",
            where=f"{stages} stages of {virtual} chunks",
            equation=f"stretches({len(layers)}) of {count}, layers({len(held)}) of {num_layers}"
            + (f", on no stage: {_some(missing)}" if missing else "")
            + (f", on two: {_some(twice)}" if twice else ""),
            hint="give one stretch for each chunk of each stage, first the first chunks of all stages",
        )
    return tuple(
        tuple(tuple(layers[chunk * stages + stage]) for chunk in range(virtual)) for stage in range(stages)
    )


def _even_sizes(num_layers: int, count: int, embedding: int, head: int) -> list[int]:
    base, more = divmod(num_layers + embedding + head, count)
    sizes = [base + (at < more) for at in range(count)]
    sizes[0] -= embedding
    sizes[-1] -= head
    if min(sizes) < 1:
        raise GeometryError(
            "every chunk of a stage has a layer",
            equation=f"layers({num_layers}) + embedding({embedding}) + head({head}) over {count} stretches: "
            f"{min(sizes)} of a stretch",
            hint="use fewer stages or chunks, or give sizes, where a stretch may have none",
        )
    return sizes


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
