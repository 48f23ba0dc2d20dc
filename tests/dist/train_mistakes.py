"""Mistakes of one rank in a real step of the runtime, for `test_train_no_hang.py`.

A mistake is a function that changes what its rank gives to a step, or what happens to it on the way. All
ranks of a layout are the same processes for many mistakes; each has groups of its own.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, PrefixStore
from train_ranks import CONFIG

from shardweave.train import decoder as decoder_module
from shardweave.train.batch import Microbatch, microbatch
from shardweave.train.collectives import sum_all
from shardweave.train.grid import connect
from shardweave.train.loop import require_finite
from shardweave.train.loss import Tokens, cross_entropy
from shardweave.train.optimizer import AdamW, Optimizer, decayed
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import GRID, Runtime, build, group_plan
from shardweave.train.step import Objective, evaluate, forward_backward
from shardweave.train.together import Together

MODEL = {**CONFIG, "num_hidden_layers": 4}
LAYOUTS = {
    "tp2 cp2 pp2 ep2": Parallel(tp=2, cp=2, pp=2, ep=2),
    "dp2 pp2 ep2 vp2": Parallel(dp=2, pp=2, ep=2, vp=2),
    "etp2 tp2 dp2 ep2": Parallel(tp=2, dp=2, ep=2, etp=2),
}


def loss_of(given: Given) -> Callable[[Tokens], tuple[Tensor, Tensor]]:
    """The loss of all ranks, which does what a mistake says on its rank."""

    def loss(tokens: Tokens) -> tuple[Tensor, Tensor]:
        return given.spoil_loss(tokens)

    return loss


@dataclass
class Given:
    """What a rank gives to a step, and what happens at some places of it."""

    runtime: Runtime
    optimizer: Optimizer
    batches: list[Microbatch]
    objective: Objective = field(default_factory=Objective)
    step: int = 1
    spoil_loss: Callable[[Tokens], tuple[Tensor, Tensor]] = cross_entropy
    act: Callable[[], Any] | None = None
    """In place of the whole step."""
    between: Callable[[], Any] = lambda: None
    """After the way back, before the update."""
    grads: Callable[[dict[str, Tensor | None]], dict[str, Tensor | None]] = lambda grads: grads

    def play(self) -> float:
        if self.act is not None:
            self.act()
            return 0.0
        # A rank may be through with an update that another one fails in; it hears of it in the next step.
        for step in (self.step, self.step + 1):
            found = forward_backward(self.runtime, self.batches, self.objective, step=step)
            require_finite(found.report.loss, step=step)
            self.between()
            self.optimizer.step(self.grads({n: w.grad for n, w in self.runtime.weights.items()}))
        return found.report.loss


Act = Callable[[Given], None]


@dataclass(frozen=True)
class Mistake:
    """What goes wrong, on which layout and rank, and as which error it ends on all ranks."""

    name: str
    layout: str
    rank: int
    error: str
    act: Act


MISTAKES: list[Mistake] = []


def mistake(name: str, layout: str, rank: int, error: str) -> Callable[[Act], Act]:
    def add(act: Act) -> Act:
        MISTAKES.append(Mistake(name, {each.split()[0]: each for each in LAYOUTS}[layout], rank, error, act))
        return act

    return add


def documents(lengths: Sequence[int], seed: int = 3) -> list[Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randint(0, MODEL["vocab_size"], (length,), generator=chance) for length in lengths]


def batches(parallel: Parallel, dp_rank: int) -> list[Microbatch]:
    return [batch(parallel, documents((9, 6 + i, 11), 10 * dp_rank + i)) for i in range(2)]


def batch(parallel: Parallel, ids: Sequence[Tensor], **more: Any) -> Microbatch:
    return microbatch(ids, **{"cp": parallel.cp, "tp": parallel.tp, **more})


def rebuilt(given: Given, config: dict[str, Any] | None = None, **more: Any) -> None:
    runtime = given.runtime
    parallel = more.pop("parallel", runtime.parallel)
    given.runtime = build(
        {**MODEL, **(config or {})}, parallel=parallel, groups=runtime.groups, **{"dropout": 0.2, **more}
    )


# --- batches ------------------------------------------------------------------------------------


@mistake("ids of another shape than the layout says", "tp2", 1, "PlanError")
def _(given: Given) -> None:
    old = given.batches[1]
    given.act = lambda: replace(old, ids=old.ids[:-1])


@mistake("a batch for other degrees", "tp2", 5, "PlanError")
def _(given: Given) -> None:
    given.batches[0] = batch(Parallel(), documents((9, 6, 11), 0))


@mistake("contiguous parts where the others have a zigzag", "tp2", 2, "PlanError")
def _(given: Given) -> None:
    given.batches[0] = batch(given.runtime.parallel, documents((9, 6, 11), 0), order="contiguous")


@mistake("rows where the others have packed documents", "tp2", 0, "PlanError")
def _(given: Given) -> None:
    given.batches[0] = batch(given.runtime.parallel, documents((9, 6, 11), 0), form="bshd")


for _rank, _where in ((1, "tensor"), (2, "context"), (4, "pipeline")):

    @mistake(f"other lengths on one {_where} rank", "tp2", _rank, "PlanError")
    def _(given: Given) -> None:
        given.batches[1] = batch(given.runtime.parallel, documents((9, 4, 14), 1))


@mistake("a microbatch less", "dp2", 1, "PlanError")
def _(given: Given) -> None:
    given.batches.pop()


@mistake("a microbatch more", "dp2", 2, "PlanError")
def _(given: Given) -> None:
    given.batches.append(given.batches[0])


@mistake("microbatches in another order", "dp2", 3, "PlanError")
def _(given: Given) -> None:
    given.batches.reverse()


@mistake("the batch of another data rank", "dp2", 2, "PlanError")
def _(given: Given) -> None:
    given.batches = batches(given.runtime.parallel, 1)


@mistake("other tokens of the same lengths", "tp2", 6, "PlanError")
def _(given: Given) -> None:
    given.batches[0].ids[[3, 4]] = given.batches[0].ids[[4, 3]] + torch.tensor([1, 0])


@mistake("a token outside the vocabulary", "tp2", 3, "PlanError")
def _(given: Given) -> None:
    given.batches[1].ids[5] = MODEL["vocab_size"]


@mistake("tokens as int32", "etp2", 1, "DtypeError")
def _(given: Given) -> None:
    old = given.batches[0]
    given.batches[0] = replace(old, ids=old.ids.int())


@mistake("a mask of numbers", "dp2", 1, "DtypeError")
def _(given: Given) -> None:
    old = given.batches[0]
    given.batches[0] = replace(old, mask=old.mask.float())


@mistake("a mask with as many targets at other places", "etp2", 1, "PlanError")
def _(given: Given) -> None:
    for at, mine in enumerate(given.batches):
        mask = mine.mask.clone()
        mask[2 + (given.runtime.rank == 1)] = False
        given.batches[at] = replace(mine, mask=mask)


@mistake("other numbers of documents", "etp2", 1, "PlanError")
def _(given: Given) -> None:
    given.batches[0] = replace(given.batches[0], numbers=(5, 6, 7))


@mistake("other advantages", "dp2", 2, "PlanError")
def _(given: Given) -> None:
    given.batches[0] = replace(given.batches[0], extras={"advantages": torch.ones(len(given.batches[0].ids))})


@mistake("an odd length in a tensor cut by hand", "tp2", 3, "PlanError")
def _(given: Given) -> None:
    real = given.runtime.weights[decoder_module.EMBEDDING] if given.runtime.rank < 4 else None
    assert real is not None
    given.act = lambda: odd(given.runtime)


def odd(runtime: Runtime) -> None:
    """A head made by hand, as all ranks call it; the last slot is lost on one."""
    from shardweave.train.linear import embed

    ids = torch.zeros(7, dtype=torch.int64)
    maths = runtime.decoder.maths
    embed(ids, runtime.weights[decoder_module.EMBEDDING], tp=runtime.decoder.tp, vocab_size=maths.vocab_size)


# --- losses -------------------------------------------------------------------------------------


@mistake("a loss that returns a mean", "tp2", 5, "PlanError")
def _(given: Given) -> None:
    given.spoil_loss = lambda tokens: (-tokens.sum(tokens.logprobs) / tokens.count, torch.tensor(1))


@mistake("a loss that returns no count", "tp2", 6, "PlanError")
def _(given: Given) -> None:
    given.spoil_loss = lambda tokens: -tokens.sum(tokens.logprobs)  # type: ignore[assignment, return-value]


@mistake("a loss that returns one number for each token", "dp2", 3, "PlanError")
def _(given: Given) -> None:
    given.spoil_loss = lambda tokens: (tokens.logprobs, tokens.count)


@mistake("a loss that raises", "tp2", 7, "TransportError")
def _(given: Given) -> None:
    given.spoil_loss = lambda tokens: {}["reward"]


@mistake("a loss that reads what its batch has not", "dp2", 2, "UnknownNameError")
def _(given: Given) -> None:
    given.spoil_loss = lambda tokens: (tokens.sum(tokens["rewards"]), tokens.count)


@mistake("a loss of NaN", "tp2", 4, "NonFiniteError")
def _(given: Given) -> None:
    given.spoil_loss = lambda tokens: (tokens.sum(tokens.logprobs) * torch.nan, tokens.count)


@mistake("a loss without gradient", "dp2", 3, "PlanError")
def _(given: Given) -> None:
    given.spoil_loss = lambda tokens: (-tokens.sum(tokens.logprobs.detach()), tokens.count)


@mistake("another loss", "dp2", 0, "PlanError")
def _(given: Given) -> None:
    given.objective = replace(given.objective, loss=functools.partial(scaled, by=2.0))


def scaled(tokens: Tokens, *, by: float) -> tuple[Tensor, Tensor]:
    return -by * tokens.sum(tokens.logprobs), tokens.count


# --- objectives and settings --------------------------------------------------------------------


@mistake("experts are balanced", "etp2", 2, "PlanError")
def _(given: Given) -> None:
    given.objective = replace(given.objective, balance=0.01)


@mistake("another weight of the router's z-loss", "dp2", 3, "PlanError")
def _(given: Given) -> None:
    given.objective = replace(given.objective, router_z=1e-3)


@mistake("another temperature", "tp2", 4, "PlanError")
def _(given: Given) -> None:
    given.objective = replace(given.objective, temperature=0.7)


@mistake("another number of the step", "dp2", 1, "PlanError")
def _(given: Given) -> None:
    given.step = 2


@mistake("another seed of the dropout", "etp2", 1, "PlanError")
def _(given: Given) -> None:
    given.runtime = replace(given.runtime, decoder=replace(given.runtime.decoder, seed=7))


@mistake("another share of the dropout", "dp2", 1, "PlanError")
def _(given: Given) -> None:
    given.runtime = replace(given.runtime, decoder=replace(given.runtime.decoder, dropout=0.1))


@mistake("another method of attention", "tp2", 3, "PlanError")
def _(given: Given) -> None:
    given.runtime = replace(given.runtime, decoder=replace(given.runtime.decoder, cp_method="gather"))


@mistake("another number of experts for a token", "etp2", 1, "PlanError")
def _(given: Given) -> None:
    rebuilt(given, {"num_experts_per_tok": 2})


@mistake("another epsilon of the norms", "dp2", 1, "PlanError")
def _(given: Given) -> None:
    rebuilt(given, {"rms_norm_eps": 1e-6})


@mistake("one stretch of layers a stage where the others have two", "dp2", 2, "PlanError")
def _(given: Given) -> None:
    rebuilt(given, parallel=replace(given.runtime.parallel, vp=1))


@mistake("other sizes of stages", "tp2", 6, "PlanError")
def _(given: Given) -> None:
    rebuilt(given, stage_sizes=(1, 3))


@mistake("another dtype of the model", "tp2", 7, "PlanError")
def _(given: Given) -> None:
    rebuilt(given, dtype="float32")


@mistake("log-probabilities are asked for", "dp2", 0, "PlanError")
def _(given: Given) -> None:
    given.act = lambda: evaluate(given.runtime, given.batches, keep_logprobs=True)


@mistake("an evaluation while the others train", "tp2", 3, "PlanError")
def _(given: Given) -> None:
    given.act = lambda: evaluate(given.runtime, given.batches, given.objective)


# --- weights ------------------------------------------------------------------------------------


def _norm(runtime: Runtime) -> str:
    return next(name for name in runtime.weights if name.endswith("q_norm.weight"))


@mistake("a weight of another shape", "tp2", 5, "PlanError")
def _(given: Given) -> None:
    weights = given.runtime.weights
    # One that would broadcast.
    weights[_norm(given.runtime)] = torch.ones(1, dtype=torch.float64, requires_grad=True)


@mistake("a weight of another dtype", "dp2", 2, "DtypeError")
def _(given: Given) -> None:
    weights = given.runtime.weights
    weights[_norm(given.runtime)] = weights[_norm(given.runtime)].detach().float().requires_grad_()


@mistake("a weight that is missing", "etp2", 2, "UnknownNameError")
def _(given: Given) -> None:
    del given.runtime.weights[_norm(given.runtime)]


# --- on the way ---------------------------------------------------------------------------------


class Spoiled(dict[str, Tensor]):
    """Weights of which one does something when it is read."""

    def __init__(self, weights: dict[str, Tensor], name: str, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__(weights)
        self._name, self._act = name, act

    def __getitem__(self, name: str) -> Tensor:
        found = super().__getitem__(name)
        return self._act(found) if name == self._name else found


def in_layer(given: Given, act: Callable[[Tensor], Tensor], which: int = 1) -> None:
    """Something happens in a layer of this rank's stage, as its weights are read."""
    layers = [layer for chunk in given.runtime.chunks for layer in chunk]
    name = f"model.layers.{layers[which]}.post_attention_layernorm.weight"
    given.runtime = replace(given.runtime, weights=Spoiled(given.runtime.weights, name, act))


def raises(_: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("no room for 7 bytes")


for _layout, _rank in (("tp2", 0), ("tp2", 7), ("dp2", 3)):

    @mistake(f"rank {_rank} raises in a layer", _layout, _rank, "TransportError")
    def _(given: Given) -> None:
        in_layer(given, raises)


class Fails(torch.autograd.Function):
    """Nothing forward; an error on the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ZeroDivisionError("on the way back")


for _layout, _rank in (("tp2", 4), ("etp2", 1), ("dp2", 0)):

    @mistake(f"rank {_rank} raises on the way back", _layout, _rank, "TransportError")
    def _(given: Given) -> None:
        in_layer(given, Fails.apply)


@mistake("a rank raises between the way back and the update", "etp2", 2, "TransportError")
def _(given: Given) -> None:
    given.between = lambda: [].pop()


@mistake("a rank raises in the update", "dp2", 1, "TransportError")
def _(given: Given) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room for moments")

    given.optimizer._update = fail  # type: ignore[method-assign]


@mistake("a gradient of another shape", "etp2", 1, "PlanError")
def _(given: Given) -> None:
    name = _norm(given.runtime)
    given.grads = lambda grads: {**grads, name: torch.ones(2, dtype=torch.float64)}


@mistake("a rank takes a step where the others update", "dp2", 2, "PlanError")
def _(given: Given) -> None:
    given.between = lambda: forward_backward(given.runtime, given.batches, given.objective, step=2)


@mistake("a rank updates without the way back", "tp2", 0, "PlanError")
def _(given: Given) -> None:
    given.act = lambda: given.optimizer.step(dict.fromkeys(given.runtime.weights))


@mistake("an optimizer that clips at another norm", "dp2", 1, "PlanError")
def _(given: Given) -> None:
    given.optimizer = optimizer_of(given.runtime, max_norm=0.25)


@mistake("an optimizer of another rate", "etp2", 1, "PlanError")
def _(given: Given) -> None:
    given.optimizer = optimizer_of(given.runtime, lr=0.03)


@mistake("an optimizer that is not sharded", "dp2", 1, "PlanError")
def _(given: Given) -> None:
    given.optimizer = optimizer_of(given.runtime, sharded=False)


# --- ranks that are gone: the last of their processes ---------------------------------------------


def _kill(_: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _stop(weight: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGSTOP)
    return weight


GONE = (
    Mistake(
        "a rank is killed in a layer", "dp2 pp2 ep2 vp2", 2, "TransportError", lambda g: in_layer(g, _kill)
    ),
    Mistake("a rank ends before the step", "dp2 pp2 ep2 vp2", 1, "TransportError", lambda g: os._exit(0)),
    Mistake(
        "a rank stands still in a layer",
        "dp2 pp2 ep2 vp2",
        1,
        "TransportTimeoutError",
        lambda g: in_layer(g, _stop),
    ),
)

ALL = (*MISTAKES, *GONE)

# --- ranks --------------------------------------------------------------------------------------


def optimizer_of(
    runtime: Runtime, *, lr: float = 0.02, max_norm: float = 0.5, sharded: bool = True
) -> Optimizer:
    return Optimizer(
        runtime.weights,
        plan=reduce_plan(runtime.layout, runtime.rank),
        groups=runtime.groups,
        settings=decayed(AdamW(lr=lr, weight_decay=0.1)),
        sharded=sharded,
        max_norm=max_norm,
    )


Said = tuple[str, str, float]
"""The class and the text of an error, both empty without one, and seconds."""


def play(rank: int, *, layout: str, numbers: Sequence[int], folder: Path, timeout_s: float) -> list[Said]:
    """Steps of one rank, each with a mistake of some rank, each in groups of its own; -1 is none."""
    return [one(rank, layout, number, folder=folder, timeout_s=timeout_s) for number in numbers]


def one(rank: int, layout: str, number: int, *, folder: Path, timeout_s: float) -> Said:
    parallel, wrong = LAYOUTS[layout], ALL[number] if number >= 0 else None
    store = PrefixStore(f"{number}", FileStore(str(folder / "store"), parallel.world_size))
    groups = connect(group_plan(parallel), rank=rank, store=store, timeout_s=timeout_s)
    runtime = build(MODEL, parallel=parallel, groups=groups, dropout=0.2)
    given = Given(runtime, optimizer_of(runtime), batches(parallel, parallel.data_rank(rank)))
    given.objective = Objective(loss=loss_of(given))
    sum_all(torch.zeros(1), group=groups.get(GRID, "all"))
    begin = time.monotonic()
    try:
        with Together(store, rank=rank, groups=groups):
            if wrong is not None and rank == wrong.rank:
                wrong.act(given)
            given.play()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    finally:
        groups.close()
    return "", "", time.monotonic() - begin
