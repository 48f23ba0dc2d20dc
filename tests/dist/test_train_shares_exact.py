"""Weights in shares, to the bit: a model whose gradients are integers, in memory, against one process.

Sums of integers do not depend on their order, so that every layout, folded or not, has to come to the same
bits. Each wrong prescale and each wrong group that is known of such runtimes is put in, and seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from share_worlds import (
    FOLDED,
    LAYOUTS,
    LINEAR,
    PAIRS,
    Way,
    cell,
    forward,
    in_world,
    integers,
    linear_runtime,
    plain,
    same,
    walk,
)
from torch import Tensor
from train_cells import Cell
from train_ranks import as_numpy, assembled, fill, parts_of

from shardweave.errors import GapError, HolderError, PlanError, TransportTimeoutError
from shardweave.train import collectives, gathered
from shardweave.train import reduction as reduction_module
from shardweave.train.gathered import Gathered
from shardweave.train.gradients import measure, sum_gradients, weight_norm
from shardweave.train.grid import Groups
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import Runtime

pytestmark = pytest.mark.timeout(120)

ALL = [name for name, one in LAYOUTS.items() if (one.pp == 1 and one.ep == 1) or "C3" in name]
WAYS = {
    "once": Way(),
    "a layer twice, two microbatches": Way((0, 1, 1, 2), 2),
    "a layer three times, three microbatches, recomputed": Way((1, 0, 1, 1, 2), 3, recompute=True),
    "a layer skipped, another order": Way((2, 0)),
    "a rank without a loss": Way(microbatches=2, silent=(0,)),
    "no loss at all": Way(silent=(0, 1, 2, 3)),
}


@dataclass(frozen=True)
class Told:
    """What a rank says of a step."""

    loss: float
    norm: float
    zeros: int
    weight_norm: float
    own: dict[str, Any]
    parts: list[Any]


def told_of(runtime: Runtime, loss: float) -> Told:
    plan = reduce_plan(runtime.layout, runtime.rank)
    own = {name: weight.grad for name, weight in runtime.weights.items()}
    for name, grad in own.items():
        assert grad is None or grad.shape == runtime.weights[name].shape
    summed = sum_gradients(own, plan, runtime.groups)
    norm, zeros = measure(summed, runtime.groups)
    raw = {name: as_numpy(grad) for name, grad in own.items() if grad is not None}
    size = weight_norm(runtime.weights, plan, runtime.groups)
    return Told(loss, norm, zeros, size, raw, parts_of(runtime, summed.arrays()))


def step(
    of: Cell, way: Way = WAYS["once"], *, tied: bool = True, strict: bool = False, **more: Any
) -> list[Told]:
    """A step on every rank of a layout."""

    def work(groups: Groups) -> Told:
        runtime = linear_runtime(of, groups, tied=tied, **more)
        return told_of(runtime, walk(runtime, way))

    return in_world(of, work, strict=strict)


@cache
def truth(way: Way, num_data: int, cp: int, tied: bool = True) -> tuple[float, Mapping[str, Tensor]]:
    return plain(way, num_data, cp, tied)


def check(told: list[Told], of: Cell, way: Way = WAYS["once"], *, tied: bool = True) -> None:
    """The loss, each element of each gradient, norms and zeros: those of one process, to the bit."""
    loss, grads = truth(way, of.num_data, of.cp, tied)
    assert sum(one.loss for one in told) == loss
    same(assembled({rank: one.parts for rank, one in enumerate(told)}), grads)
    squares = sum(grad.square().sum().item() for grad in grads.values())
    assert {one.norm for one in told} == {squares**0.5} or told[0].norm == pytest.approx(squares**0.5, 1e-15)
    size = sum(weight.square().sum().item() for weight in integers(tied).values())
    (found,) = {one.weight_norm for one in told}
    assert found == pytest.approx(size**0.5, rel=1e-14), "roots of exact sums, squared and added up"
    assert {one.zeros for one in told} == {sum(int((grad == 0).sum()) for grad in grads.values())}


def test_the_reference_has_gradients_of_every_weight_that_is_read() -> None:
    _, grads = truth(WAYS["once"], 4, 3)
    unread = ("k_proj.weight", "v_proj.weight", "post_attention_layernorm.weight")
    assert all(bool(grad.any()) != name.endswith(unread) for name, grad in grads.items())
    # They are integers that doubles hold, also before they are added up.
    assert all(torch.equal(grad, grad.round()) for grad in grads.values())
    for way in WAYS.values():
        _, grads = truth(way, 4, 3)
        assert max(grad.abs().max().item() for grad in grads.values()) < 2**45, way


@pytest.mark.parametrize("name", ALL)
def test_gradients_norm_and_zeros_are_those_of_one_process(name: str) -> None:
    check(step(LAYOUTS[name]), LAYOUTS[name])


USES = [("G2 C2 folded", way) for way in WAYS if way != "once"] + [
    ("C3 D2 over all", "a layer three times, three microbatches, recomputed"),
    ("T2 G2 C2 folded", "a layer twice, two microbatches"),
    ("C3 D2 folded", "a rank without a loss"),
]


@pytest.mark.parametrize(("name", "way"), USES)
def test_weights_used_again_and_again_and_not_at_all(name: str, way: str) -> None:
    check(step(LAYOUTS[name], WAYS[way], strict=True), LAYOUTS[name], WAYS[way])


@pytest.mark.parametrize("name", ["G2 C3 D2 folded", "T2 C2 folded"])
def test_an_embedding_that_is_not_tied(name: str) -> None:
    check(step(LAYOUTS[name], tied=False), LAYOUTS[name], tied=False)


@pytest.mark.parametrize("folded", PAIRS)
def test_folded_or_not_the_bits_are_the_same(folded: str) -> None:
    on = LAYOUTS[folded]
    off = replace(on, weight_axes=("remat",))
    found = [assembled({r: one.parts for r, one in enumerate(step(of, WAYS["once"]))}) for of in (on, off)]
    same(*found)


def test_twenty_four_ranks() -> None:
    of = cell(tp=2, remat=2, cp=3, dp=2, weight_axes=FOLDED)
    check(step(of), of)


@pytest.mark.parametrize("multiple", [16, 32])
def test_shares_of_padding_alone(multiple: int) -> None:
    """28 rows in 6 shares of 16: the last four ranks hold nothing but padding, and take part."""
    of = LAYOUTS["C3 D2 over all"]
    found = step(of, multiple=multiple)
    check(found, of)
    held = [one.own["model.layers.0.mlp.gate_proj.weight"] for one in found]
    assert [one.shape[0] for one in held] == [multiple] * 6
    rows = [max(0, min(multiple, 28 - multiple * at)) for at in range(6)]
    assert rows[-1] == 0 and all(not one[count:].any() for one, count in zip(held, rows, strict=True))


# --- the same bits at every run -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_again_and_whatever_is_fetched_ahead(dtype: str) -> None:
    """Weights and tokens that are no integers, so that another order of a sum is seen."""
    of, way = LAYOUTS["C3 D2 folded" if dtype == "float32" else "G2 C2 folded"], Way((0, 1, 1, 2), 2)

    def run(**more: Any) -> list[Told]:
        def work(groups: Groups) -> Told:
            runtime = linear_runtime(of, groups, dtype=dtype, **more)
            chance = {name: value * (1 + 0.37 * value.sin()) / 7 for name, value in integers().items()}
            fill(runtime, chance)
            return told_of(runtime, walk(runtime, way))

        return in_world(of, work)

    first = run()
    assert len({one.own["model.norm.weight"].tobytes() for one in first}) == of.world_size
    for other in (run(), run(ahead=False), run(ahead=False, ordered=False)):
        for a, b in zip(first, other, strict=True):
            assert a.own.keys() == b.own.keys()
            assert all(a.own[name].tobytes() == b.own[name].tobytes() for name in a.own)
            assert (a.loss, a.norm, a.zeros) == (b.loss, b.norm, b.zeros)


@pytest.mark.parametrize("ordered", [True, False])
def test_collectives_of_the_backend_have_the_same_bits_as_pairs(ordered: bool) -> None:
    """What devices and large groups use in place of messages between pairs."""
    with patch.object(collectives, "_MOST_PAIRS", {"memory": 0}):
        for name in ("C3 D2 folded", "C3 D2 over all"):
            check(
                step(LAYOUTS[name], Way((0, 1, 1, 2), 2), ordered=ordered),
                LAYOUTS[name],
                Way((0, 1, 1, 2), 2),
            )


def test_sums_of_narrow_weights_are_taken_in_float32() -> None:
    """In bfloat16 256 + 1 is 256: no sum over ranks or microbatches may be taken in it."""
    of = cell(remat=3)

    def work(groups: Groups) -> Tensor:
        runtime = linear_runtime(of, groups, dtype="bfloat16")
        name = "model.layers.0.mlp.gate_proj.weight"
        for _ in range(3):
            with runtime.reading.saving():
                whole = runtime.reading[name]
                (whole * (256.0 if runtime.rank == 1 else 1.0)).sum().backward()
        runtime.reading.finish()
        grad = runtime.weights[name].grad
        assert grad is not None and grad.dtype == torch.float32
        return grad

    for grad, rows in zip(in_world(of, work, strict=True), (10, 10, 8), strict=True):
        assert (grad[:rows] == 3 * 258).all() and not grad[rows:].any()


# --- order is a hint ----------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [True, False])
def test_layers_in_another_order_at_each_step(ahead: bool) -> None:
    """What was expected and is not asked for is never taken for something else."""
    of = LAYOUTS["C3 D2 folded"]
    orders = [(0, 1, 2), (2, 1, 0), (0, 2), (1,), (1, 1, 0, 2), (0, 1, 2)]

    def work(groups: Groups) -> list[Told]:
        runtime = linear_runtime(of, groups, ahead=ahead)
        found = []
        for order in orders:
            for weight in runtime.weights.values():
                weight.grad = None
            found.append(told_of(runtime, walk(runtime, Way(order))))
        return found

    for number, told in enumerate(zip(*in_world(of, work, strict=True), strict=True)):
        check(list(told), of, Way(orders[number]))


def test_two_models_of_a_process_that_take_turns_and_are_built_again() -> None:
    """Both go forward before either goes back; then another model takes the place of one."""
    of = LAYOUTS["G2 C2 folded"]

    def work(groups: Groups) -> list[Told]:
        def new(tied: bool) -> Runtime:
            return linear_runtime(of, groups, tied=tied)

        one, two, found = new(True), new(False), []
        for order in ((0, 1, 2), (2, 0)):
            for weight in (*one.weights.values(), *two.weights.values()):
                weight.grad = None
            first, second = Way((0, 1, 1, 2)), Way(order)
            a = forward(one, first, one.reading)
            b = forward(two, second, two.reading)
            a.backward()
            b.backward()
            one.reading.finish()
            two.reading.finish()
            found += [told_of(one, a.item()), told_of(two, b.item())]
            one = new(True)
        return found

    ranks = in_world(of, work, strict=True)
    ways = [
        (Way((0, 1, 1, 2)), True),
        (Way((0, 1, 2)), False),
        (Way((0, 1, 1, 2)), True),
        (Way((2, 0)), False),
    ]
    for told, (way, tied) in zip(zip(*ranks, strict=True), ways, strict=True):
        check(list(told), of, way, tied=tied)


# --- weights that changed -----------------------------------------------------------------------

GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize("recompute", [False, True])
def test_a_weight_that_changed_before_its_way_back_is_refused(recompute: bool) -> None:
    of = LAYOUTS["C3 D2 folded"]

    def work(groups: Groups) -> Told:
        runtime = linear_runtime(of, groups)
        loss = forward(runtime, Way(recompute=recompute), runtime.reading)
        with torch.no_grad():
            runtime.weights[GATE].fill_(torch.nan)
        loss.backward()
        runtime.reading.finish()
        return told_of(runtime, loss.item())

    with pytest.raises(
        PlanError, match="stay as they are between the way forward and the way back"
    ) as caught:
        in_world(of, work)
    assert repr(GATE) in str(caught.value)


@pytest.mark.parametrize("ahead", [True, False])
def test_what_was_fetched_before_an_update_is_not_read_after_it(ahead: bool) -> None:
    """Weights are NaN in the step before; a buffer of then would be seen in every number of the next one."""
    of = LAYOUTS["C3 D2 folded"]

    def work(groups: Groups) -> Told:
        runtime = linear_runtime(of, groups, ahead=ahead)
        walk(runtime, Way())  # the order is known now
        with torch.no_grad():
            for weight in runtime.weights.values():
                weight.fill_(torch.nan)
        assert walk(runtime, Way((0, 1))) != 0
        fill(runtime, integers())
        for weight in runtime.weights.values():
            weight.grad = None
        return told_of(runtime, walk(runtime, Way()))

    check(in_world(of, work, strict=True), of)


def test_a_weight_that_changes_while_it_is_fetched_ahead_is_fetched_again() -> None:
    of = LAYOUTS["C3 D2 folded"]

    def work(groups: Groups) -> Tensor:
        runtime = linear_runtime(of, groups)
        reading, names = runtime.reading, ["model.layers.0.mlp.gate_proj.weight", GATE]
        with torch.no_grad():
            for _ in range(2):
                for name in names:
                    reading[name]
                reading._turn(back=False)
            reading[names[0]]  # GATE is under way
            assert GATE in reading._coming
            runtime.weights[GATE].fill_(7.0)
            return reading[GATE]

    for whole in in_world(of, work):
        assert whole.shape == (28, 24) and (whole == 7).all()


# --- a rank that does not depend on a weight ----------------------------------------------------


def read_and_not_used(groups: Groups) -> list[Any]:
    """A weight that all ranks read, and one alone uses."""
    runtime = linear_runtime(LAYOUTS["G2 C2 folded"], groups)
    reading, names = runtime.reading, ["model.embed_tokens.weight", GATE]
    with reading.saving():
        wholes = [reading[name] for name in names]
        loss = torch.zeros((), dtype=torch.float64, requires_grad=True) * 1
        if runtime.rank == 2:
            loss = loss + sum(whole.sum() for whole in wholes)
        reading.joined(loss).backward()
    reading.finish()
    return [runtime.weights[name].grad for name in names]


def test_a_rank_that_reads_a_weight_and_does_not_use_it_adds_nothing() -> None:
    for rank, (embedding, gate) in enumerate(
        in_world(LAYOUTS["G2 C2 folded"], read_and_not_used, strict=True)
    ):
        assert (gate == 1).all() and gate.shape == (7, 24)
        rows = (10, 10, 10, 7)[rank]
        assert embedding.shape == (10, 24) and (embedding[:rows] == 1).all() and not embedding[rows:].any()


def test_without_a_place_in_the_graph_it_would_stop_all_others() -> None:
    with (
        patch.object(Gathered, "joined", lambda self, output, **more: output),
        pytest.raises(TransportTimeoutError, match="every rank comes to what others wait for"),
    ):
        in_world(LAYOUTS["G2 C2 folded"], read_and_not_used)


# --- mistakes that such runtimes are known for --------------------------------------------------

Change = Callable[[Cell], Any]


def scaled(by: Callable[[Cell], float], where: Callable[[str], bool] = lambda name: True) -> Change:
    """A prescale of the sums over the ranks that share a weight."""

    def change(of: Cell) -> Any:
        end = Gathered._end_sum

        def ended(self: Gathered) -> None:
            if self._sum is not None and where(self._sum[0]):
                name, pending = self._sum
                self._sum = name, replace(pending, end=lambda: pending.end() * by(of))
            end(self)

        return patch.object(Gathered, "_end_sum", ended)

    return change


def replicas(axes: Callable[[Cell], tuple[str, ...]], *, shared: bool) -> Change:
    """Gradients of shares, or of what is not shared, summed over other axes than the layout says."""
    plain_replicas = reduction_module._replicas

    def change(of: Cell) -> Any:
        def over(layout: Any, rule: Any, rank: int) -> tuple[int, ...]:
            is_shared = bool({"cp", "remat"} & set(rule.axes))
            if is_shared != shared:
                return plain_replicas(layout, rule, rank)
            at = layout.mesh.coordinate(rank)
            kept = {axis: c for axis, c in at.items() if axis in ("tp", "cp", "remat", "dp", "pp")}
            return tuple(
                layout.mesh.where({axis: c for axis, c in kept.items() if axis not in axes(of)}).tolist()
            )

        return patch.object(reduction_module, "_replicas", over)

    return change


def last_use_only(of: Cell) -> Any:
    """The sum of a weight that is used again takes the place of the one before."""
    end = Gathered._end_sum

    def ended(self: Gathered) -> None:
        if self._sum is not None:
            self.shares[self._sum[0]].grad = None
        end(self)

    return patch.object(Gathered, "_end_sum", ended)


def no_strip(of: Cell) -> Any:
    """The first ranks' rows are taken for as many as a share has, and the last ones' padding for rows."""
    return patch.object(gathered.Shared, "lengths", lambda self, share: (share,) * self.group.size)


def reversed_ranks(of: Cell) -> Any:
    """Shares joined in the order of another axis first, as where two places disagree on which is faster."""
    lengths = gathered.begin_fetch

    def fetch(part: Tensor, dim: int, sizes: Any, *, group: Any, tag: int) -> Any:
        pending = lengths(part, dim, sizes, group=group, tag=tag)
        size = of.remat * of.cp

        def end() -> Tensor:
            parts = pending.end().split(list(sizes), dim)
            order = [r * of.cp + c for c in range(of.cp) for r in range(of.remat)]
            return torch.cat([parts[i] for i in order], dim) if len(parts) == size else torch.cat(parts, dim)

        return replace(pending, end=end)

    return patch.object(gathered, "begin_fetch", fetch)


# What is done, and what says so: a plan that is refused before a message, or numbers that differ.
MISTAKES: dict[str, tuple[Change, type[Exception]]] = {
    "a mean over the shares": (scaled(lambda of: 1 / (of.remat * of.cp)), AssertionError),
    "a folded sum, and the bucket's divisor as if unfolded: 1/C": (
        scaled(lambda of: 1 / of.cp),
        AssertionError,
    ),
    "an unfolded divisor of a folded sum: C": (scaled(lambda of: of.cp), AssertionError),
    "some weights by another group's size: G/EG": (
        scaled(lambda of: of.remat, lambda name: "mlp" in name),
        AssertionError,
    ),
    "different rows added up: a share in the bucket of data and context": (
        replicas(lambda of: ("dp", "cp"), shared=True),
        HolderError,
    ),
    "a share not summed over its copies": (replicas(lambda of: (), shared=True), GapError),
    "a norm not summed over the shards": (replicas(lambda of: ("dp", "cp"), shared=False), GapError),
    "a norm summed over the folded group only": (
        replicas(lambda of: ("cp", "remat"), shared=False),
        GapError,
    ),
    "the last use only": (last_use_only, AssertionError),
    "padding taken for rows": (no_strip, PlanError),
    "axes the other way round": (reversed_ranks, AssertionError),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    of, way = LAYOUTS["G2 C3 D2 folded"], Way((0, 1, 1, 2), 2)
    change, error = MISTAKES[mistake]
    with change(of), pytest.raises(error):
        check(step(of, way), of, way)


def test_the_layout_of_the_mistakes_is_right_without_them() -> None:
    of, way = LAYOUTS["G2 C3 D2 folded"], Way((0, 1, 1, 2), 2)
    check(step(of, way), of, way)


def test_zeros_of_padding_would_be_counted() -> None:
    of = LAYOUTS["C3 D2 over all"]
    with (
        patch.object(reduction_module.Bucket, "num_padding", lambda self, start, stop: 0),
        pytest.raises(AssertionError),
    ):
        check(step(of, multiple=16), of)


def test_padding_is_there_to_be_counted() -> None:
    assert LINEAR["vocab_size"] % 6 and LINEAR["intermediate_size"] % 6
