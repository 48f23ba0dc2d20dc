"""Schedules of pipelines: every microbatch through every chunk, no ring of waiting, bubbles as computed."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.errors import GapError, GeometryError, OverlapError, PlanError
from shardweave.train.schedule import (
    Action,
    Message,
    PipelinePlan,
    check_order,
    plan_pipeline,
    prove,
    schedule,
    stages_of,
)

CASES = [
    (kind, stages, virtual, microbatches)
    for stages in (1, 2, 3, 4, 5)
    for microbatches in (*range(1, 10), 17)
    for kind, virtual in (
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 3),
        ("forward", 1),
        ("forward", 3),
    )
    if stages > 1 or virtual == 1
]


def times(kind: str) -> int:
    return 1 if kind == "forward" else 2


def played(plan: PipelinePlan) -> tuple[int, int]:
    """Slow reference: time goes by one by one, messages lie in one queue a pair. Returns the makespan and
    how many inputs were kept at once at most."""
    stages, last = plan.stages, plan.stages * plan.virtual - 1
    todo = [deque(events) for events in plan.events]
    busy = [0] * stages
    running: list[Action | None] = [None] * stages
    sent: dict[tuple[int, int], deque[tuple[str, int, int]]] = {}
    asked: dict[tuple[int, int], deque[tuple[str, int, int]]] = {}
    have: list[set[tuple[str, int, int]]] = [set() for _ in range(stages)]
    done: list[set[Action]] = [set() for _ in range(stages)]
    made: list[set[tuple[str, int, int]]] = [set() for _ in range(stages)]
    kept = [0] * stages
    most = time = 0
    while any(todo) or any(running):
        assert time < 10_000, "the pipeline stands still"
        for stage in range(stages):
            action = running[stage]
            if action is not None and busy[stage] == time:
                done[stage].add(action)
                place = action.chunk * stages + stage + (1 if action.kind == "forward" else -1)
                made[stage].add((action.kind, action.microbatch, place // stages))
                kept[stage] += 1 if action.kind == "forward" else -1
                most = max(most, kept[stage])
                running[stage] = None
        for stage in range(stages):
            while todo[stage] and running[stage] is None and isinstance(todo[stage][0], tuple):
                for m in todo[stage].popleft():
                    key = m.kind, m.microbatch, m.chunk
                    if m.src == stage:
                        made[stage].remove(key)
                        sent.setdefault((m.src, m.dst), deque()).append(key)
                    else:
                        asked.setdefault((m.src, m.dst), deque()).append(key)
        for pair, keys in sent.items():
            # What is received is the next of its pair, whatever was asked for.
            while keys and asked.get(pair):
                assert asked[pair].popleft() == keys[0]
                have[pair[1]].add(keys.popleft())
        for stage in range(stages):
            if running[stage] is None and todo[stage] and isinstance(todo[stage][0], Action):
                action = todo[stage][0]
                assert isinstance(action, Action)
                place = action.chunk * stages + stage
                outside = place not in (0,) if action.kind == "forward" else place != last
                if (
                    action.kind == "backward"
                    and Action("forward", action.microbatch, action.chunk) not in done[stage]
                ):
                    continue
                if not outside or (action.kind, action.microbatch, action.chunk) in have[stage]:
                    running[stage] = action
                    busy[stage] = time + times(action.kind)
                    todo[stage].popleft()
        time += 1
    return max(busy), most


@pytest.mark.parametrize(("kind", "stages", "virtual", "microbatches"), CASES)
def test_each_microbatch_goes_through_each_chunk_once(
    kind: str, stages: int, virtual: int, microbatches: int
) -> None:
    plan = plan_pipeline(kind, stages=stages, virtual=virtual, microbatches=microbatches)
    kinds = ["forward"] if kind == "forward" else ["forward", "backward"]
    wanted = {(k, m, c) for k in kinds for m in range(microbatches) for c in range(virtual)}
    for stage, actions in enumerate(plan.actions):
        found = [(action.kind, action.microbatch, action.chunk) for action in actions]
        assert len(found) == len(set(found)) and set(found) == wanted
        assert actions == schedule(
            kind, stages=stages, virtual=virtual, microbatches=microbatches, stage=stage
        )
        if kind != "forward":
            for _, microbatch, chunk in wanted:
                assert found.index(("forward", microbatch, chunk)) < found.index(
                    ("backward", microbatch, chunk)
                )
    made = [m for events in plan.events for event in events if isinstance(event, tuple) for m in event]
    # Each border is crossed once by each microbatch and way, and each message has two ends.
    assert len(made) == 2 * len(kinds) * microbatches * (stages * virtual - 1)
    makespan, most = played(plan)
    assert makespan == plan.makespan
    if kind != "forward":
        assert most == max(plan.in_flight)


@given(st.integers(2, 8), st.integers(1, 5), st.integers(1, 30))
def test_any_number_of_microbatches_is_proved(stages: int, virtual: int, microbatches: int) -> None:
    kind = "1f1b" if virtual == 1 else "interleaved"
    plan = plan_pipeline(kind, stages=stages, virtual=virtual, microbatches=microbatches)
    for stage, kept in enumerate(plan.in_flight):
        ahead = stages - stage if virtual == 1 else 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
        assert kept <= min(ahead, virtual * microbatches)
    if virtual == 1 or microbatches % stages == 0:
        assert plan.bubble == pytest.approx((stages - 1) / (virtual * microbatches + stages - 1), abs=1e-12)


def test_interleaving_makes_the_bubble_smaller() -> None:
    bubbles = [plan_pipeline("1f1b", stages=4, microbatches=8).bubble]
    for virtual in (2, 3, 4):
        bubbles.append(plan_pipeline("interleaved", stages=4, virtual=virtual, microbatches=8).bubble)
    assert bubbles == pytest.approx([3 / 11, 3 / 19, 3 / 27, 3 / 35], abs=1e-12)


def test_fault_13_a_stage_that_waits_too_early_is_refused() -> None:
    """A stage that goes back before it has fed those after it: the hang of a missing prefetch."""
    actions = [list(one) for one in plan_pipeline("1f1b", stages=3, microbatches=4).actions]
    assert [str(action) for action in actions[0][:4]] == ["F0", "F1", "F2", "B0"]
    prove("mutated", actions, virtual=1, microbatches=4)
    actions[2][0], actions[2][2] = actions[2][2], actions[2][0]  # F1 B0 F0: back before forward
    with pytest.raises(PlanError, match=r"no stage waits for one that waits for it: stage 0 at .*stage 2"):
        prove("mutated", actions, virtual=1, microbatches=4)


def test_what_is_left_out_or_done_twice_is_refused() -> None:
    actions = [list(one) for one in plan_pipeline("1f1b", stages=2, microbatches=3).actions]
    with pytest.raises(GapError, match="stage 1: backward of microbatch 2, chunk 0 is missing"):
        prove("mutated", [actions[0], actions[1][:-1]], virtual=1, microbatches=3)
    with pytest.raises(OverlapError, match="stage 0: forward of microbatch 0, chunk 0: 2 times of 1"):
        prove("mutated", [[*actions[0], Action("forward", 0)], actions[1]], virtual=1, microbatches=3)
    with pytest.raises(OverlapError, match="chunk 1: 1 times of 0"):
        prove("mutated", [[*actions[0], Action("forward", 0, 1)], actions[1]], virtual=1, microbatches=3)


def test_messages_that_overtake_each_other_are_refused() -> None:
    plan = plan_pipeline("1f1b", stages=2, microbatches=4)
    check_order(plan.events)
    mine = list(plan.events[1])
    sends = [at for at, event in enumerate(mine) if isinstance(event, tuple)]
    mine[sends[0]], mine[sends[1]] = mine[sends[1]], mine[sends[0]]
    with pytest.raises(PlanError, match="messages are asked for in the order in which they are sent"):
        check_order([plan.events[0], mine])


def test_rings_of_messages_are_refused() -> None:
    """Each pair has its order, and yet each of three stages waits for the next."""
    ring = [Message(1, at, (at + 1) % 3, "forward", 0, 0) for at in range(3)]
    events = [((ring[at],), (ring[at - 1],)) for at in range(3)]
    with pytest.raises(PlanError, match=r"stages\(0, 1, 2\) wait for each other"):
        check_order(events)
    check_order([(tuple(sorted((ring[at], ring[at - 1]), key=str)),) for at in range(3)])


@pytest.mark.parametrize(
    ("kind", "given_", "says"),
    [
        ("gpipe", {}, "kind('gpipe')"),
        ("1f1b", {"virtual": 2}, "virtual(2) with stages(2)"),
        ("interleaved", {}, "virtual(1) with stages(2)"),
        ("forward", {"stages": 1, "virtual": 2}, "virtual(2) with stages(1)"),
        ("1f1b", {"microbatches": 0}, "microbatches(0)"),
        ("1f1b", {"stage": 2}, "stage(2) is not in 0..1"),
    ],
)
def test_what_makes_no_schedule_is_refused(kind: str, given_: dict[str, int], says: str) -> None:
    with pytest.raises(GeometryError) as caught:
        schedule(kind, **{"stages": 2, "virtual": 1, "microbatches": 3, "stage": 0, **given_})
    assert says in str(caught.value)


def test_layers_of_stages() -> None:
    assert stages_of(10, stages=4) == (((0, 1, 2),), ((3, 4, 5),), ((6, 7),), ((8, 9),))
    assert stages_of(5, stages=2, virtual=2) == (((0, 1), (3,)), ((2,), (4,)))
    assert stages_of(3, stages=2, sizes=(0, 3)) == (((),), ((0, 1, 2),))
    assert stages_of(3, stages=2, layers=[[0], [1, 2]]) == (((0,),), ((1, 2),))
    # What the ends cost is taken off their layers.
    assert [len(chunks[0]) for chunks in stages_of(13, stages=4, embedding=1, head=2)] == [3, 4, 4, 2]


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"sizes": (1, 3)}, r"layers\(4\) of 5, on no stage: 4"),
        ({"layers": [[0, 1], [1, 2, 3, 4]]}, "on two: 1"),
        ({"layers": [[0, 2], [1, 3, 4]]}, "in the order of the model"),
        ({"layers": [[0, 1, 2, 3, 4]]}, r"stretches\(1\) of 2"),
        ({"layers": [[0, 1], [3, 4]]}, "on no stage: 2"),
        ({"sizes": (5, 0), "layers": [[0], [1]]}, "given in one way"),
        ({"virtual": 3}, "every chunk of a stage has a layer"),
        ({"head": 4}, "every chunk of a stage has a layer"),
    ],
)
def test_a_layer_on_no_stage_is_refused(given_: dict[str, object], says: str) -> None:
    with pytest.raises(GeometryError, match=says):
        stages_of(5, stages=2, **given_)  # type: ignore[arg-type]
