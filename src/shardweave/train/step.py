"""One step: microbatches forward and backward through the stages, and what all ranks agree on about it.

The scale is one number for each term of the objective, known before the first backward: a term's weight
over what counts in the whole step. Gradients are left in the weights, each rank's own part of the sum over
the ranks that hold an element; ``train/gradients.py`` takes that sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardweave.train.agreement import check_step, named
from shardweave.train.batch import Microbatch
from shardweave.train.collectives import gather_parts, sum_all
from shardweave.train.decoder import View, embedded, final, through, tokens_of, view
from shardweave.train.experts import Routing
from shardweave.train.grid import Group
from shardweave.train.loss import Loss, Report, Term, count_targets, cross_entropy, report, term, total
from shardweave.train.maths import Maths
from shardweave.train.mtp import ahead, further
from shardweave.train.pipeline import Boundary, Output, run
from shardweave.train.runtime import GRID, Runtime
from shardweave.train.schedule import plan_pipeline

MAIN, BALANCE, ROUTER_Z = "loss", "balance", "router_z"
"""The terms of an objective, beside those of heads for further tokens, ``mtp_1`` and so on."""


@dataclass(frozen=True)
class Objective:
    """What is trained on.

    Attributes:
        loss: Of the tokens.
        balance: The weight of how unevenly documents use experts: 1 where they use them evenly, a mean over
            the tokens and the sparse layers. Megatron sums over layers; its coefficient is this one over
            their number.
        router_z: The weight of the router's z-loss, a mean likewise.
        mtp: The weight of all heads for further tokens together, where the model has some: each of ``D`` has
            a ``D``th of it. With 0 they are not computed.
        temperature: What logits are divided by.
        entropy: Whether the loss is given entropies.
    """

    loss: Loss = cross_entropy
    balance: float = 0.0
    router_z: float = 0.0
    mtp: float = 0.1
    temperature: float = 1.0
    entropy: bool = False


@dataclass(frozen=True)
class Inserted:
    """Hidden states that a microbatch has in place of embeddings: those of images between words.

    Attributes:
        at: Which of this rank's own slots, bool, in their shape.
        rows: What they have, in the order of the slots, ``(number, hidden)``; its gradient comes back in it.
    """

    at: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Stepped:
    """What came of a step, the same on every rank.

    Attributes:
        report: The loss and its terms, of all ranks and microbatches.
        logprobs: For each microbatch of this data rank the log-probability of each token, given those before
            it, 0 for the first of a document; where it was asked for.
        per_expert: How many tokens of all ranks went to each expert, all sparse layers together.
    """

    report: Report
    logprobs: tuple[Tensor, ...] | None = None
    per_expert: tuple[int, ...] = field(default=())


def forward_backward(
    runtime: Runtime,
    batches: Sequence[Microbatch],
    objective: Objective | None = None,
    *,
    step: int = 0,
    inserted: Sequence[Inserted] | None = None,
) -> Stepped:
    """Run microbatches forward and backward, and add their gradients to those of the weights.

    Args:
        runtime: The model.
        batches: This data rank's microbatches; the same on all ranks of it, and equally many on all data
            ranks.
        objective: What is trained on.
        step: The number of the step, for dropout.
        inserted: For each microbatch what stands in place of embeddings, on ranks of the first stage.

    Raises:
        PlanError, DtypeError, UnknownNameError: Ranks do not agree on the step, or one cannot take it; see
            ``agreement.check_step``. Raised on all ranks, before anything is computed.
    """
    kind = "interleaved" if runtime.parallel.vp > 1 else "1f1b"
    return _run(
        runtime, batches, objective or Objective(), kind=kind, step=step, keep=False, inserted=inserted
    )


def evaluate(
    runtime: Runtime,
    batches: Sequence[Microbatch],
    objective: Objective | None = None,
    *,
    keep_logprobs: bool = False,
    inserted: Sequence[Inserted] | None = None,
) -> Stepped:
    """Run microbatches forward only.

    Args:
        runtime: The model; see ``evaluated`` for one that drops nothing.
        batches: As of ``forward_backward``.
        objective: What is reported.
        keep_logprobs: Whether every rank gets the log-probabilities of its data rank's tokens.
        inserted: As of ``forward_backward``.
    """
    with torch.no_grad():
        return _run(
            runtime,
            batches,
            objective or Objective(),
            kind="forward",
            step=0,
            keep=keep_logprobs,
            inserted=inserted,
        )


def _run(
    runtime: Runtime,
    batches: Sequence[Microbatch],
    objective: Objective,
    *,
    kind: str,
    step: int,
    keep: bool,
    inserted: Sequence[Inserted] | None,
) -> Stepped:
    common = {"step": step, **vars(objective), "loss": named(objective.loss), "keep_logprobs": keep}
    common["inserted"] = inserted is not None
    check_step(runtime, batches, kind="evaluate" if kind == "forward" else "forward_backward", common=common)
    decoder = replace(runtime.decoder, balance=bool(objective.balance))
    parallel, groups = runtime.parallel, runtime.groups
    everybody, stage, pp = (groups.get(GRID, name) for name in ("all", "replicas", "pp"))
    views = [view(decoder, batch, dtype=runtime.dtype, step=step) for batch in batches]
    depth = decoder.maths.depth if objective.mtp else 0
    heads = [ahead(decoder, batch, seen, depth) for batch, seen in zip(batches, views, strict=True)]
    counts = _counts(decoder.maths, views, heads, objective, group=stage)
    said: list[Term] = []
    routed: list[Routing] = []
    found: dict[int, Tensor] = {}
    first, last = pp.rank == 0, pp.rank == pp.size - 1

    weights = runtime.reading

    def forward(number: int, chunk: int, x: Tensor | None) -> Output:
        with weights.saving():
            found = computed(number, chunk, x)
            # Every weight that was read has a way back from what goes on, or from the loss at the end.
            if found.hidden is not None:
                return replace(found, hidden=weights.joined(found.hidden))
            return found if found.loss is None else replace(found, loss=weights.joined(found.loss))

    def computed(number: int, chunk: int, x: Tensor | None) -> Output:
        """A microbatch through a chunk: the hidden state that goes on, and the objective that is due here."""
        seen = views[number]
        if first and chunk == 0:
            x = embedded(decoder, weights, seen)
            x = x if inserted is None else _with(x, inserted[number])
        assert x is not None
        x, routings = through(decoder, weights, x, runtime.chunks[chunk], seen)
        terms = _balance_terms(routings, seen, objective)
        routed.extend(routings)
        if not (last and chunk == parallel.vp - 1):
            said.extend(_detached(terms))
            return Output(x, total(terms, counts) if any(each.weight for each in terms) else None)
        x = final(decoder, weights, x)
        tokens = tokens_of(
            decoder, weights, x, seen, temperature=objective.temperature, entropy=objective.entropy
        )
        if keep:
            found[number] = tokens.logprobs.detach()
        terms = [term(objective.loss, tokens, name=MAIN), *terms]
        for k, head in enumerate(further(decoder, weights, x, heads[number])):
            terms.append(term(cross_entropy, head.tokens, name=_head(k), weight=objective.mtp / depth))
            terms += _balance_terms(head.routings, heads[number][k], objective)
            routed.extend(head.routings)
        said.extend(_detached(terms))
        return Output(loss=total(terms, counts))

    def boundary(number: int) -> Boundary:
        layout = batches[number].layout
        shape = (*layout.local_shape(split_tp=True), decoder.maths.hidden_size)
        return Boundary(shape, runtime.dtype, layout.digest)

    plan = plan_pipeline(kind, stages=pp.size, virtual=parallel.vp, microbatches=len(batches))
    run(plan, pp=pp, forward=forward, boundary=boundary)
    weights.finish()
    values = report(said, counts, group=everybody)
    per_expert = sum_all(_per_expert(routed, decoder.maths.num_experts), group=everybody)
    kept = tuple(_whole(runtime, batch, found.get(i)) for i, batch in enumerate(batches)) if keep else None
    return Stepped(values, kept, tuple(per_expert.tolist()))


def _counts(
    maths: Maths,
    views: Sequence[View],
    heads: Sequence[Sequence[View]],
    objective: Objective,
    *,
    group: Group,
) -> dict[str, int]:
    """N of each term: targets, and of those of routers tokens times the sparse layers that they go to."""
    sparse = sum(len(block.layers) for block in maths.model.decoder.of("moe"))
    all_sparse = sum(len(block.layers) for block in maths.model.of("moe"))
    masks = {MAIN: [seen.own.mask for seen in views]}
    for k in range(maths.depth if objective.mtp else 0):
        masks[_head(k)] = [each[k].own.mask for each in heads]
    if not (sparse and _weights(objective)):
        return count_targets(masks, group=group)
    masks["tokens"] = [seen.own.is_real for seen in views]
    masks["further"] = [seen.own.is_real for each in heads for seen in each]
    counts = count_targets(masks, group=group)
    routed = counts.pop("tokens") * sparse + counts.pop("further") * (all_sparse > sparse)
    return counts | dict.fromkeys(_weights(objective), routed)


def _with(x: Tensor, inserted: Inserted) -> Tensor:
    """Hidden states with some rows replaced."""
    places = inserted.at.reshape(-1).nonzero().view(-1)
    return x.flatten(0, -2).index_copy(0, places, inserted.rows).view(x.shape)


def _head(k: int) -> str:
    """The term of a head, counted from 1."""
    return f"mtp_{k + 1}"


def _balance_terms(routings: Sequence[Routing], seen: View, objective: Objective) -> list[Term]:
    """What the sparse layers of a chunk add to the objective, as this rank's tokens have it."""
    if not routings:
        return []
    count = seen.own.is_real.sum() * len(routings)
    balance = torch.stack([routing.aux_sum for routing in routings]).sum()
    z = torch.stack([routing.z_sum for routing in routings]).sum()
    sums = {BALANCE: balance, ROUTER_Z: z}
    return [Term(name, sums[name], count, weight) for name, weight in _weights(objective).items()]


def _weights(objective: Objective) -> dict[str, float]:
    """The terms of the router that have a weight; the others cost nothing and are not reported."""
    weights = {BALANCE: objective.balance, ROUTER_Z: objective.router_z}
    return {name: weight for name, weight in weights.items() if weight}


def _detached(terms: Sequence[Term]) -> list[Term]:
    return [Term(each.name, each.sum.detach(), each.count, each.weight) for each in terms]


def _per_expert(routed: Sequence[Routing], num_experts: int) -> Tensor:
    tokens = [routing.tokens for routing in routed]
    return torch.stack(tokens).sum(0).cpu() if tokens else torch.zeros(num_experts, dtype=torch.int64)


def _whole(runtime: Runtime, batch: Microbatch, own: Tensor | None) -> Tensor:
    """The log-probabilities of a microbatch's tokens from the parts of its ranks; each of its target."""
    layout, document = batch.layout, runtime.groups.get(GRID, "document")
    shape = layout.local_shape(split_tp=True)
    if own is None:  # of another stage, in the dtype that log-probabilities have there
        own = torch.zeros(shape, dtype=torch.promote_types(runtime.dtype, torch.float32))
    parts = gather_parts(own, group=document)
    real = layout.real(layout.join(parts, split_tp=True))
    # Only the last stage has any; the others have zeros.
    real = sum_all(real, group=runtime.groups.get(GRID, "pp"))
    start, found = 0, torch.zeros_like(real)
    for length in layout.lengths:
        found[start + 1 : start + length] = real[start : start + max(length - 1, 0)]
        start += length
    return found
