"""Fifteen faults that runtimes were reported to have, each put back into this one.

A fault is a function of the runtime that is exchanged for another one in the processes of the ranks, and a
small scene in which it can show. `test_train_faults.py` plays them and says what sees them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from train_cells import Cell
from train_ranks import CONFIG, full_weights

from shardweave.train import blocks as blocks_module
from shardweave.train import decoder, experts, gradients, loss, mtp, optimizer, pipeline, ring
from shardweave.train import step as step_module
from shardweave.train.batch import Local, Microbatch, local
from shardweave.train.collectives import sum_all
from shardweave.train.grid import Group, Groups
from shardweave.train.loss import Term, Tokens, cross_entropy
from shardweave.train.reduction import Bucket, ReducePlan
from shardweave.train.runtime import GRID
from shardweave.train.schedule import FORWARD, Action, PipelinePlan
from shardweave.train.sequence import SequenceLayout
from shardweave.train.step import MAIN

# --- scenes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """A cell, and its documents: lengths of each data rank and microbatch."""

    cell: Cell
    lengths: tuple[tuple[tuple[int, ...], ...], ...]
    mtp: int = 0
    logprobs: bool = True

    @property
    def config(self) -> dict[str, Any]:
        """Sparse layers and a dense one."""
        return {**CONFIG, "num_hidden_layers": max(3, self.cell.pp)}

    @property
    def documents(self) -> tuple[list[list[list[Tensor]]], list[list[list[Tensor]]]]:
        """Tokens and masks of each data rank, microbatch and document."""
        chance = torch.Generator().manual_seed(5)
        ids, masks = [], []
        for data, batches in enumerate(self.lengths):
            ids.append(
                [[torch.randint(0, CONFIG["vocab_size"], (n,), generator=chance) for n in b] for b in batches]
            )
            masks.append([[torch.ones(n, dtype=torch.bool) for n in b] for b in batches])
            for number, each in enumerate(masks[-1]):
                for i, mask in enumerate(each):
                    if self.cell.mask == "one":
                        mask[:] = False
                        mask[len(mask) // 2] = (data, number, i) == (0, 0, 0)
                    elif self.cell.mask == "prompt":
                        mask[: len(mask) // 3] = False
        return ids, masks


def _cell(form: str, *, cp: int = 1, dp: int = 1, pp: int = 1, ep: int = 1, mask: str = "prompt") -> Cell:
    return Cell(form, 1, cp, dp, pp, ep, 1, 1, False, mask, "ragged", "ring")


PACKED = Scene(_cell("thd", cp=2, dp=2, ep=2), (((7, 5), (11,)), ((3, 6), (9, 2))))
ONE = dataclasses.replace(PACKED, cell=_cell("thd", cp=2, dp=2, ep=2, mask="one"))
ROWS = Scene(_cell("bshd", cp=2, pp=2), (((16, 16), (16, 16)),))
UNKEPT = Scene(_cell("bshd", cp=2, dp=2), (((16, 16), (16, 16)),) * 2, logprobs=False)
STAGES = Scene(_cell("thd", pp=4), (((7,),) * 5,))
AHEAD = dataclasses.replace(PACKED, mtp=1)


def weights_of(scene: Scene) -> dict[str, Tensor]:
    """Whole weights; the head for further tokens has a layer like the last one."""
    config, last = scene.config, scene.config["num_hidden_layers"]
    found = full_weights(config, torch.float64)
    if scene.mtp:
        more = full_weights(
            {**config, "num_hidden_layers": last + 1, "mlp_only_layers": [2, 3]}, torch.float64
        )
        here, hidden = f"model.layers.{last}.", config["hidden_size"]
        found |= {name: values for name, values in more.items() if name.startswith(here)}
        norms = "enorm", "hnorm", "shared_head.norm"
        found |= {
            f"{here}{name}.weight": more[f"{here}input_layernorm.weight"].roll(i)
            for i, name in enumerate(norms)
        }
        chance = torch.Generator().manual_seed(3)
        found[f"{here}eh_proj.weight"] = 0.25 * torch.randn(
            hidden, 2 * hidden, generator=chance, dtype=torch.float64
        )
    return found


# --- faults -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault put in.

    Attributes:
        reports: Where it was reported.
        what: What is done in place of what is right.
        scene: In what it is played.
        put_in: Exchanges a function for another one.
        objective: What else the objective has.
    """

    reports: str
    what: str
    scene: Scene
    put_in: Callable[[], AbstractContextManager[Any]]
    objective: Mapping[str, Any] = field(default_factory=dict)


def _local(
    change: Callable[[Local, Microbatch], Local], module: Any = decoder
) -> AbstractContextManager[Any]:
    """What a rank sees of a microbatch, changed."""

    def changed(batch: Microbatch, cp_rank: int, tp_rank: int | None = None) -> Local:
        return change(local(batch, cp_rank, tp_rank), batch)

    return patch.object(module, "local", changed)


def whole_rows() -> AbstractContextManager[Any]:
    def change(part: Local, batch: Microbatch) -> Local:
        alone = dataclasses.replace(batch.layout, cp=1)
        assert alone.padded == batch.layout.padded
        whole = local(dataclasses.replace(batch, layout=alone), 0)
        return dataclasses.replace(whole, layout=batch.layout)

    return _local(change)


def whole_rows_for_parts() -> AbstractContextManager[Any]:
    """As it was reported without a pipeline: rows pass for parts of rows that are longer by cp."""

    def change(part: Local, batch: Microbatch) -> Local:
        alone = dataclasses.replace(batch.layout, cp=1)
        longer = dataclasses.replace(
            batch.layout, lengths=tuple(batch.layout.cp * n for n in batch.layout.lengths)
        )
        whole = local(dataclasses.replace(batch, layout=alone), 0)
        positions = torch.from_numpy(longer.local(longer.positions, part.cp_rank))
        return dataclasses.replace(whole, layout=longer, positions=positions)

    return _local(change)


def whole_labels() -> AbstractContextManager[Any]:
    def change(part: Local, batch: Microbatch) -> Local:
        alone = dataclasses.replace(batch.layout, cp=1)
        return dataclasses.replace(part, labels=local(dataclasses.replace(batch, layout=alone), 0).labels)

    return _local(change)


def zigzag_of_the_row() -> AbstractContextManager[Any]:
    """All that is aligned is cut alike, but as one row and not document by document."""

    def change(part: Local, batch: Microbatch) -> Local:
        layout = batch.layout
        row = SequenceLayout((sum(layout.padded),), "thd", layout.cp)
        alone = dataclasses.replace(layout, cp=1)
        padded = SequenceLayout(layout.padded, "thd")
        values = local(dataclasses.replace(batch, layout=alone), 0)

        def cut(tokens: Tensor, fill: float) -> Tensor:
            placed = layout.place(alone.real(tokens), fill=fill)
            found: Tensor = row.local(placed, part.cp_rank)
            return found

        return dataclasses.replace(
            part,
            ids=cut(values.ids, 0),
            labels=cut(values.labels, -100),
            mask=cut(values.mask, False),
            positions=torch.from_numpy(row.local(padded.positions, part.cp_rank)),
            is_real=torch.from_numpy(row.local(layout.is_real, part.cp_rank)),
            documents=torch.from_numpy(row.local(padded.documents, part.cp_rank)),
        )

    return _local(change)


def _scaled(scale: Callable[[Term, Mapping[str, int]], float]) -> AbstractContextManager[Any]:
    """What is differentiated, each term times a factor; what is reported stays."""

    def total(terms: Sequence[Term], counts: Mapping[str, int]) -> Tensor:
        return loss.total(
            [dataclasses.replace(each, sum=each.sum * scale(each, counts)) for each in terms], counts
        )

    return patch.object(step_module, "total", total)


def count_of_this_rank() -> AbstractContextManager[Any]:
    ranks, batches = 4, 2
    return _scaled(
        lambda each, counts: (
            counts[each.name] / (max(int(each.count), 1) * ranks * batches) if each.name == MAIN else 1.0
        )
    )


def mean_of_rank(tokens: Tokens) -> tuple[Tensor, Tensor]:
    summed, count = cross_entropy(tokens)
    return summed / count.clamp(min=1), torch.ones_like(count)


def factor_of_cp() -> AbstractContextManager[Any]:
    return _scaled(lambda each, counts: 2.0)


def routers_without_n() -> AbstractContextManager[Any]:
    return _scaled(lambda each, counts: 1.0 if each.name == MAIN else float(counts[each.name]))


def counted_over_dp() -> AbstractContextManager[Any]:
    def counted(masks: Any, *, group: Group) -> dict[str, int]:
        mine = torch.tensor([int(sum(mask.sum() for mask in each)) for each in masks.values()])
        every = torch.zeros((group.size, len(mine)), dtype=torch.int64)
        every[group.rank] = mine
        # Ranks of one place on cp, which is the fastest axis of the two.
        alike = sum_all(every, group=group)[group.rank % 2 :: 2]
        return dict(zip(masks, alike.sum(0).tolist(), strict=True))

    return patch.object(step_module, "count_targets", counted)


def counted_over_dp_unchecked() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(counted_over_dp())
    stack.enter_context(patch.object(loss, "_check", lambda found, counts: None))
    return stack


class _Scaled(torch.autograd.Function):
    """The same value, and another gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


def balance_without_cp() -> AbstractContextManager[Any]:
    right = experts.balance_sum

    def wrong(*given: Any, group: Group, **more: Any) -> Tensor:
        return _Scaled.apply(right(*given, group=group, **more), 1 / group.size)

    return patch.object(experts, "balance_sum", wrong)


def rolled_at_real_ends() -> AbstractContextManager[Any]:
    def shifted(self: SequenceLayout, values: Any, by: int = 1, *, fill: Any = -100) -> Any:
        row = self.place(values).reshape(-1)
        found = row.clone()
        for start, stop in itertools.pairwise((0, *itertools.accumulate(self.lengths))):
            found[start:stop] = fill
            found[start : max(stop - by, start)] = row[start + by : max(stop, start + by)]
        return self.real(found.reshape(self.shape))

    def changed(*given: Any, **more: Any) -> Local:
        with patch.object(SequenceLayout, "shifted", shifted):
            return local(*given, **more)

    return patch.object(mtp, "local", changed)


def floor_of_lengths() -> AbstractContextManager[Any]:
    right = blocks_module.stretches.__wrapped__

    def stretches(layout: SequenceLayout, rank: int) -> tuple[Any, ...]:
        left = [length // layout.cp for length in layout.lengths]
        found = []
        for each in right(dataclasses.replace(layout, lengths=layout.padded), rank):
            size = min(each.size, left[each.document])
            left[each.document] -= size
            if size:
                found.append(dataclasses.replace(each, size=size))
        return tuple(found)

    def blocks(*given: Any) -> Any:
        with patch.object(blocks_module, "stretches", stretches):
            return blocks_module.blocks.__wrapped__(*given)

    return patch.object(ring, "blocks", blocks)


def one_document() -> AbstractContextManager[Any]:
    right = ring.blocks

    def blocks(layout: SequenceLayout, rank: int, source: int) -> Any:
        return right(SequenceLayout((sum(layout.padded),), "thd", layout.cp), rank, source)

    return patch.object(ring, "blocks", blocks)


def first_keys() -> AbstractContextManager[Any]:
    right, first = ring._backward, {}

    def backward(*given: Any) -> None:
        *before, (seen, kv), scale, dq, dkv = given
        if first.get("dq") is not dq:
            first.update(dq=dq, kv=kv)
        right(*before, (seen, first["kv"]), scale, dq, dkv)

    return patch.object(ring, "_backward", backward)


def own_sums() -> AbstractContextManager[Any]:
    right = ring.block_backward

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Any:
        causal, scale = given[2:]
        return right(grad, q, k, v, *ring.block_forward(q, k, v, causal, scale), causal, scale)

    return patch.object(ring, "block_backward", backward)


def merged_in_bfloat16() -> AbstractContextManager[Any]:
    right = ring.merge

    def merge(out: Tensor, *given: Tensor) -> None:
        right(out, *given)
        out.copy_(out.bfloat16())

    return patch.object(ring, "merge", merge)


def contiguous_positions() -> AbstractContextManager[Any]:
    def change(part: Local, batch: Microbatch) -> Local:
        positions = torch.zeros_like(part.positions)
        for document in range(len(batch.layout.lengths)):
            here = part.documents == document
            positions[here] = torch.arange(int(here.sum()))
        return dataclasses.replace(part, positions=positions)

    return _local(change)


def one_buffer() -> AbstractContextManager[Any]:
    right, memory = pipeline._Mail.take, {}

    def take(self: Any, kind: str, microbatch: int, chunk: int) -> Tensor:
        tensor = right(self, kind, microbatch, chunk)
        if kind != FORWARD:
            return tensor
        buffer = memory.setdefault(tensor.shape, torch.empty_like(tensor))
        buffer.data.copy_(tensor)
        return buffer.detach()

    return patch.object(pipeline._Mail, "take", take)


def other_order() -> AbstractContextManager[Any]:
    right = step_module.plan_pipeline

    def planned(*given: Any, **more: Any) -> PipelinePlan:
        plan = right(*given, **more)
        mine = list(plan.events[0])
        actions = [at for at, event in enumerate(mine) if isinstance(event, Action)]
        sends = [at for at, event in enumerate(mine) if isinstance(event, tuple)]
        for one, other in (actions[:2], sends[:2]):
            mine[one], mine[other] = mine[other], mine[one]
        return dataclasses.replace(plan, events=(tuple(mine), *plan.events[1:]))

    return patch.object(step_module, "plan_pipeline", planned)


def gradients_times_ep() -> AbstractContextManager[Any]:
    right = experts._Mlp.backward

    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, *weights, last = right(ctx, *grads)
        return rows, *(2 * grad for grad in weights), last

    return patch.object(experts._Mlp, "backward", backward)


def norm_without_experts() -> AbstractContextManager[Any]:
    right = ReducePlan.counts

    def counts(self: ReducePlan, bucket: Bucket) -> bool:
        return right(self, bucket) and not any(".experts." in held.name for held in bucket.arrays)

    return patch.object(ReducePlan, "counts", counts)


def router_without_outputs() -> AbstractContextManager[Any]:
    right = experts.route

    def route(*given: Any, **more: Any) -> Any:
        choices = right(*given, **more)
        return dataclasses.replace(choices, weights=choices.weights.detach() + 0 * choices.weights)

    return patch.object(experts, "route", route)


@contextmanager
def summed_over_dp() -> Iterator[None]:
    right = gradients.sum_gradients

    def summed(grads: Any, plan: ReducePlan, groups: Groups, **more: Any) -> Any:
        def over(groups: Groups, ranks: Any) -> Group:
            return groups.get(GRID, "dp") if len(ranks) > 1 else Group("alone", ranks, 0)

        with patch.object(gradients, "group_of", over):
            return right(grads, plan, groups, **more)

    with patch.object(gradients, "sum_gradients", summed), patch.object(optimizer, "sum_gradients", summed):
        yield


FAULTS = {
    "1": Fault("Megatron-LM #5617", "rows reach the layers whole", ROWS, whole_rows),
    "1b": Fault("Megatron-LM #5617", "labels reach the loss whole", ROWS, whole_labels),
    "1c": Fault(
        "Megatron-LM #5617",
        "rows pass for parts of longer ones, and no log-probabilities are put together",
        UNKEPT,
        whole_rows_for_parts,
    ),
    "1d": Fault(
        "Megatron-LM #5661",
        "a packed row is cut as one document, and put together as several",
        PACKED,
        zigzag_of_the_row,
    ),
    "1e": Fault(
        "Megatron-LM #5617",
        "rows pass for parts of longer ones",
        dataclasses.replace(UNKEPT, logprobs=True),
        whole_rows_for_parts,
    ),
    "2": Fault("Megatron-LM #7513", "what is differentiated is a mean on each rank", ONE, count_of_this_rank),
    "2b": Fault("Megatron-LM #7513", "a loss returns a mean", ONE, ExitStack, {"loss": mean_of_rank}),
    "3": Fault("Megatron-LM #673, #906", "a factor of cp too much", PACKED, factor_of_cp),
    "4": Fault("verl #6609", "terms of the router without their N", PACKED, routers_without_n),
    "4b": Fault(
        "verl #6609",
        "a loss without its count",
        PACKED,
        ExitStack,
        {"loss": lambda tokens: tokens.sum(-tokens.logprobs)},
    ),
    "5": Fault("verl #5983", "N is counted over dp only", PACKED, counted_over_dp),
    "5b": Fault("verl #5983", "the same, and nobody compares counts", PACKED, counted_over_dp_unchecked),
    "6": Fault(
        "Megatron-LM #7498, #1652", "the balance of experts loses a factor of cp", PACKED, balance_without_cp
    ),
    "7": Fault(
        "Megatron-LM #4495, #6205",
        "further tokens are looked up at real ends in a padded row",
        AHEAD,
        rolled_at_real_ends,
    ),
    "8": Fault(
        "TransformerEngine #3331, #1930", "real tokens of a rank are length // cp", PACKED, floor_of_lengths
    ),
    "9": Fault("axolotl #3608", "attention takes a packed row for one document", PACKED, one_document),
    "10": Fault("diffusers #14265", "the way back uses the first keys at every step", PACKED, first_keys),
    "10b": Fault("Megatron-LM #1465", "the way back uses the sums of each block", PACKED, own_sums),
    "11": Fault("ring-flash-attention #42", "blocks are merged in bfloat16", PACKED, merged_in_bfloat16),
    "12": Fault("Megatron-LM #5243", "positions of a rank are counted from 0", PACKED, contiguous_positions),
    "13": Fault("Megatron-LM #5876", "one buffer for all that a stage receives", STAGES, one_buffer),
    "13b": Fault(
        "Megatron-LM #5100", "a stage has its first two microbatches in another order", STAGES, other_order
    ),
    "14": Fault("DeepSpeed #5259", "gradients of experts times ep", PACKED, gradients_times_ep),
    "14b": Fault("Megatron-LM #5916", "the norm leaves experts out", PACKED, norm_without_experts),
    "14c": Fault(
        "transformers #48687", "outputs give the router no gradient", PACKED, router_without_outputs
    ),
    "15": Fault("VeOmni #1059", "gradients are summed over dp only", PACKED, summed_over_dp),
}
"""By their number in the list of reports; a letter is another way of the same."""

SCENES = {
    str(scene.cell) + " ahead" * scene.mtp: scene for scene in (PACKED, ONE, ROWS, UNKEPT, STAGES, AHEAD)
}
