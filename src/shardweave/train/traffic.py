"""What each rank sends in one training step, from shapes alone: no process, no group, no weight.

Formulas are those of the messages between pairs that gloo takes for groups of up to 16 ranks. A gather sends
a rank's part to each other rank, a sum sends each other rank its part; a sum that all ranks get is one of
each, or, where it is small, every rank's whole to every other one. Devices' collectives work as rings, of the
same bytes but for small sums.

| part | over | in a step, for each microbatch, of ``n`` ranks |
|---|---|---|
| ``fetch`` | ``shares``, ``expert_shares`` | ``(n - 1) * own rows * row``, for each read of a weight |
| ``share gradients`` | the same | ``(rows - own rows) * row``, for each use of a weight |
| ``linears`` | ``tp`` | ``(n - 1) * own slots * H`` in each of: column and row, forward and backward |
| ``embedding`` | ``tp`` | the same, forward and backward |
| ``kv heads`` | ``tp`` | ``4 * (n - 1) * slots * rows of K``, where KV heads do not divide |
| ``attention`` | ``cp`` | ``attention.wire_bytes`` |
| ``logprobs`` | ``tp`` | ``(n - 1) * (3 * slots + own slots)`` numbers of a wide dtype |
| ``experts`` | ``ep``, ``etp`` | ``2 * H`` values and the experts of a token, for each row there and back |
| ``routing`` | ``document`` | a count for each document and expert, where balance has a weight |
| ``pipeline`` | ``pp`` | own slots ``* H`` and a header, for each message of the plan |
| ``gradients`` | holders | once: each bucket summed, or its parts where the state is sharded |
| ``weights`` | holders | once, where the state is sharded: own part to each other holder |
| ``matrices`` | ranks of a stage | once, where Muon updates them: blocks to the owner of a matrix, and back |
| ``agreement`` | ``all``, ``replicas`` | once: what is compared, counted and reported |

Where layers are computed once more, what they send forward they send once more: of ``fetch`` a read, and of
``linears`` to ``routing`` all that is not a gradient. Rows are those of the model: padding of shares stays
where it is. Summed over the ranks, a weight of ``P`` elements and ``b`` bytes each that ``W`` ranks share and
``k`` reads fetch costs each of them ``(W - 1) / W * P * b * k``, and the sum of its gradients as much as one.

All of it is exact but for one. How many rows a token makes over several ``ep`` ranks is how many ranks its
experts are on, which the router says: give the numbers, or they are those of a router that chooses evenly and
at random.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shardweave.errors import PlanError
from shardweave.layout.dtype import itemsize
from shardweave.train.attention import wire_bytes
from shardweave.train.collectives import SMALL_BYTES
from shardweave.train.decoder import read_heads
from shardweave.train.grid import Group, GroupPlan, Ranks
from shardweave.train.maths import Maths
from shardweave.train.matrix_plan import plan_matrices
from shardweave.train.optimizer import Settings
from shardweave.train.parallel import Parallel
from shardweave.train.pipeline import HEADER_WORDS
from shardweave.train.reads import Planned, counts, planned
from shardweave.train.runtime import GRID
from shardweave.train.schedule import PipelinePlan, plan_pipeline
from shardweave.train.sequence import SequenceLayout
from shardweave.train.step import Objective

Routed = Mapping[tuple[int, int, int], Sequence[int]]
"""By layer, microbatch and rank: how many of the rank's tokens go to each rank of its ``ep`` group."""

PARTS = (
    *("fetch", "share gradients"),
    *("embedding", "linears", "kv heads", "attention", "logprobs", "experts", "routing"),
    *("pipeline", "gradients", "weights", "matrices", "agreement"),
)
"""The parts of a step that send something."""

_INT = 8
_AGREEMENT_WORDS = 9
"""What a rank says of itself before a step and before an update, see ``agreement``."""


@dataclass(frozen=True)
class Traffic:
    """What ranks send to others in one step.

    Attributes:
        sent: For each rank the bytes by part and group, in the order of ``PARTS``; what is 0 is left out. Of
            groups of the same ranks, holders go by the name of the first.
        exact: Whether every byte is known, and not only how many to expect.
    """

    sent: Mapping[int, Mapping[tuple[str, str], int]]
    exact: bool

    def total(self, rank: int) -> int:
        """All bytes that a rank sends."""
        return sum(self.sent[rank].values())

    def by_group(self, rank: int) -> dict[str, int]:
        """The bytes that a rank sends over each group, by its name."""
        return _added((group, size) for (_, group), size in self.sent[rank].items())

    def by_part(self, rank: int) -> dict[str, int]:
        """The bytes that a rank sends for each part of the step."""
        return _added((part, size) for (part, _), size in self.sent[rank].items())

    def __str__(self) -> str:
        about = "" if self.exact else "about "
        lines = []
        for rank, sent in self.sent.items():
            lines.append(f"rank {rank}: {about}{self.total(rank):,} bytes")
            lines += [f"  {part} over {group}: {size:,}" for (part, group), size in sent.items()]
        return "\n".join(lines)


def _added(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in sizes:
        found[name] = found.get(name, 0) + size
    return found


def traffic(
    config: Mapping[str, Any],
    parallel: Parallel,
    batches: Sequence[Sequence[SequenceLayout]],
    objective: Objective | None = None,
    *,
    sharded: bool,
    dtype: str = "",
    stage_sizes: Sequence[int] | None = None,
    cp_method: str = "ring",
    mtp: int = 0,
    multiple: int = 1,
    recompute: bool = False,
    settings: Settings | None = None,
    routed: Routed | None = None,
    ranks: Iterable[int] | None = None,
) -> Traffic:
    """What each rank sends in ``forward_backward`` and an update that is made.

    Args:
        config: The Hugging Face config.
        parallel: The degrees.
        batches: The microbatches of each data rank.
        objective: What is trained on.
        sharded: Whether replicas share the state of the optimizer.
        dtype: Of the weights; that of the config by default.
        stage_sizes: As ``build`` takes it.
        cp_method: As ``build`` takes it.
        mtp: Heads for further tokens.
        multiple: As ``build`` takes it.
        recompute: As ``build`` takes it.
        settings: Of the optimizer; by default none that needs whole matrices.
        routed: What routers chose, for exact numbers of experts on several ``ep`` ranks.
        ranks: Of whom it is asked; all by default.

    Raises:
        PlanError: Microbatches are not those of these degrees, or ``routed`` leaves something out.
        ModelError, GeometryError: As ``build`` raises them.

    >>> config = {
    ...     "model_type": "qwen3", "dtype": "bfloat16", "vocab_size": 1024, "hidden_size": 64, "head_dim": 16,
    ...     "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...     "intermediate_size": 96,
    ... }
    >>> batches = [[SequenceLayout((256,), tp=2)] * 3]
    >>> print(traffic(config, Parallel(tp=2, pp=2), batches, sharded=True, ranks=[2]))
    rank 2: 946,680 bytes
      linears over tp: 884,736
      logprobs over tp: 10,752
      pipeline over pp: 49,480
      gradients over tp: 768
      weights over tp: 384
      agreement over all: 552
      agreement over replicas: 8
    """
    return traffic_of(
        planned(config, parallel, dtype=dtype, stage_sizes=stage_sizes, mtp=mtp, multiple=multiple),
        batches,
        objective,
        sharded=sharded,
        cp_method=cp_method,
        recompute=recompute,
        settings=settings,
        routed=routed,
        ranks=ranks,
    )


def traffic_of(
    model: Planned,
    batches: Sequence[Sequence[SequenceLayout]],
    objective: Objective | None = None,
    *,
    sharded: bool,
    cp_method: str = "ring",
    recompute: bool = False,
    settings: Settings | None = None,
    routed: Routed | None = None,
    ranks: Iterable[int] | None = None,
) -> Traffic:
    """``traffic`` of what is planned, of which more may be asked."""
    _check(batches, parallel := model.parallel)
    step = _Step(model, batches, objective or Objective(), cp_method, recompute, routed)
    sent = {}
    for rank in model.mesh.ranks if ranks is None else ranks:
        meter = _Meter(model.groups, rank)
        step.shares(meter)
        step.layers(meter, [layer for chunk in model.chunks[meter.at["pp"]] for layer in chunk])
        step.ends(meter)
        step.stages(meter)
        step.agreement(meter)
        for bucket in (plan := model.plan(rank)).buckets:
            narrow = itemsize(bucket.dtype)
            start, stop = plan.own(bucket)
            over, ends = meter.name_of(bucket.over), meter.name_of(bucket.ends)
            if not sharded:
                meter.sum_all("gradients", over, bucket.numel, max(4, narrow))
                meter.sum_all("gradients", ends, bucket.numel, max(4, narrow))
                continue
            if over:
                meter.add("gradients", over, (bucket.numel - (stop - start)) * max(4, narrow))
            meter.sum_all("gradients", ends, stop - start, max(4, narrow))
            meter.gather("weights", over, stop - start, narrow)
        if settings is not None:
            matrices = plan_matrices(plan, settings, sharded=sharded)
            size = matrices.sent_bytes(rank)
            meter.add("matrices", meter.group_around(matrices.ranks), size)
        order = sorted(meter.sent, key=lambda key: (PARTS.index(key[0]), key[1]))
        sent[rank] = {key: round(meter.sent[key]) for key in order if meter.sent[key]}
    sparse = parallel.ep > 1 and bool(step.sparse)
    return Traffic(sent, exact=routed is not None or not sparse)


def imbalance(layouts: Iterable[SequenceLayout]) -> float:
    """The work of attention on the busiest context rank over the mean: 1 where all have the same.

    Work is pairs of a token and one that it sees; ranks wait for each other in each microbatch.

    >>> for order in ("zigzag", "contiguous"):
    ...     print(order, round(imbalance([SequenceLayout((4096, 512), "thd", cp=4, order=order)]), 4))
    zigzag 1.0
    contiguous 1.7498
    """
    most, mean = 0, 0.0
    for layout, count in Counter(layouts).items():
        work = [layout.work(rank) for rank in range(layout.cp)]
        most += count * max(work)
        mean += count * sum(work) / layout.cp
    return most / mean if mean else 1.0


def _check(batches: Sequence[Sequence[SequenceLayout]], parallel: Parallel) -> None:
    counts = [len(each) for each in batches]
    degrees = {(layout.cp, layout.tp) for each in batches for layout in each}
    if len(counts) != parallel.num_data or len(set(counts)) > 1 or degrees - {(parallel.cp, parallel.tp)}:
        raise PlanError(
            "each data rank has equally many microbatches, cut over the degrees of the model",
            where=f"data ranks={parallel.num_data}, cp={parallel.cp}, tp={parallel.tp}",
            equation=f"microbatches({counts}), cut over (cp, tp)({sorted(degrees)})",
            hint="give a list of SequenceLayouts for each data rank",
        )


# --- one rank -----------------------------------------------------------------------------------


@dataclass
class _Meter:
    """What one rank sends, added up."""

    groups: GroupPlan
    rank: int
    sent: dict[tuple[str, str], float] = field(default_factory=dict)

    @cached_property
    def at(self) -> dict[str, int]:
        """Its place on the axes."""
        return dict(self.groups.grids[GRID].coordinate(self.rank))

    @cached_property
    def ranks(self) -> dict[str, Ranks]:
        """Its groups by name; itself alone where it is in none of that name."""
        names = self.groups.names[GRID]
        return {name: self.groups.ranks(self.rank, GRID, name) or (self.rank,) for name in names}

    def others(self, group: str) -> int:
        """How many other ranks a group has."""
        return len(self.ranks[group]) - 1

    def name_of(self, ranks: Ranks) -> str:
        """The group of these ranks, as ``gradients.group_of`` finds it; none where the rank is alone."""
        if ranks == (self.rank,):
            return ""
        return next(name for name, those in self.ranks.items() if those == ranks)

    def group_around(self, ranks: Ranks) -> str:
        """The smallest group that has all these ranks, as ``matrices`` finds it; none where it is alone."""
        if ranks == (self.rank,):
            return ""
        fit = [name for name, those in self.ranks.items() if set(ranks) <= set(those)]
        return min(fit, key=lambda name: len(self.ranks[name]))

    def add(self, part: str, group: str, size: float) -> None:
        self.sent[part, group] = self.sent.get((part, group), 0) + size

    def gather(self, part: str, group: str, numel: int, item: int) -> None:
        """A part of so many elements to each other rank, or one from each: both send as much."""
        if group:
            self.add(part, group, self.others(group) * numel * item)

    def sum_all(self, part: str, group: str, numel: int, item: int) -> None:
        """A sum that all ranks get."""
        if not group:
            return
        if numel * item <= SMALL_BYTES:
            self.gather(part, group, numel, item)
        else:
            self.gather(part, group, 2 * -(-numel // (self.others(group) + 1)), item)


# --- a step -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """The formulas of a step."""

    model: Planned
    batches: Sequence[Sequence[SequenceLayout]]
    objective: Objective
    cp_method: str
    recompute: bool
    routed: Routed | None
    _tokens: dict[tuple[SequenceLayout, int, int, int], int] = field(default_factory=dict)
    _known: dict[tuple[int, int, int], tuple[tuple[float, float], tuple[float, float]]] = field(
        default_factory=dict
    )

    @property
    def maths(self) -> Maths:
        return self.model.maths

    @property
    def parallel(self) -> Parallel:
        return self.model.parallel

    @property
    def groups(self) -> GroupPlan:
        return self.model.groups

    @cached_property
    def sparse(self) -> frozenset[int]:
        """The layers that have experts, those of heads for further tokens included."""
        return frozenset(layer for block in self.maths.model.of("moe") for _, layer in block.layers)

    @property
    def item(self) -> int:
        """Bytes of an element of the weights, and of what is computed from them."""
        return itemsize(self.maths.model.dtype)

    @property
    def wide(self) -> int:
        """Bytes of what is summed in float32 at least."""
        return max(4, self.item)

    @property
    def depth(self) -> int:
        """Heads for further tokens that are computed."""
        return self.maths.depth if self.objective.mtp else 0

    @property
    def there(self) -> int:
        """How often a layer is computed forward."""
        return 1 + self.recompute

    def batches_of(self, rank: int) -> Sequence[SequenceLayout]:
        """The microbatches that a rank works on."""
        at = self.model.mesh.coordinate(rank)
        return self.batches[at["remat"] + self.parallel.remat * at["dp"]]

    # --- shares ---

    def shares(self, meter: _Meter) -> None:
        """Weights that are fetched, and their gradients that are summed, for each microbatch."""
        sizes, microbatches = self.model.sizes(meter.rank), len(self.batches[0])
        listed = self.model.uses(meter.rank, depth=self.depth)
        for name, (fetches, sums) in counts(listed, recompute=self.recompute).items():
            of = sizes[name]
            meter.gather("fetch", of.group, microbatches * fetches * of.own, self.item)
            meter.add("share gradients", of.group, microbatches * sums * (of.whole - of.own) * self.item)

    # --- layers ---

    def layers(self, meter: _Meter, layers: Sequence[int]) -> None:
        """The layers of a stage; on the last one those of heads too."""
        further = range(self.maths.num_layers, self.maths.num_layers + self.depth)
        layers = [*layers, *(further if meter.at["pp"] == self.parallel.pp - 1 else ())]
        for number, layout in enumerate(self.batches_of(meter.rank)):
            for layer in layers:
                self._attention(meter, layout)
                if layer in self.sparse:
                    self._experts(meter, layout, layer, number)
                else:
                    self._linears(meter, layout, "linears", 2, self.there)

    def _linears(self, meter: _Meter, layout: SequenceLayout, part: str, count: int, there: int = 1) -> None:
        """Column or row linears: own slots forward, and backward their gradients, gathered or summed."""
        own = math.prod(layout.local_shape(split_tp=True))
        meter.gather(part, "tp", (there + 1) * count * own * self.maths.hidden_size, self.item)

    def _attention(self, meter: _Meter, layout: SequenceLayout) -> None:
        of, tp = self.maths, self.parallel.tp
        self._linears(meter, layout, "linears", 2, self.there)
        kv_heads = of.num_kv_heads // tp
        if of.num_kv_heads % tp:
            rows = of.num_kv_heads * of.head_dim // tp
            numel = 2 * (self.there + 1) * math.prod(layout.local_shape()) * rows
            meter.gather("kv heads", "tp", numel, self.item)
            kv_heads = len(read_heads(of, Group("tp", tuple(range(tp)), meter.at["tp"])))
        there, back = wire_bytes(
            self.cp_method,
            layout,
            heads=of.num_heads // tp,
            kv_heads=kv_heads,
            dim=of.head_dim,
            item_bytes=self.item,
        )
        meter.add("attention", "cp", self.there * there + back)

    def ends(self, meter: _Meter) -> None:
        """The embedding on the first stage and wherever heads need it; logits on the last one."""
        slots_of = self.batches_of(meter.rank)
        is_last = meter.at["pp"] == self.parallel.pp - 1
        looks = (meter.at["pp"] == 0) + (self.depth if is_last else 0)
        for layout in slots_of:
            self._linears(meter, layout, "embedding", looks)
            if not is_last:
                continue
            self._linears(meter, layout, "linears", 1 + self.depth)
            slots, own = (math.prod(layout.local_shape(split_tp=split)) for split in (False, True))
            more = int(self.objective.entropy)
            numbers = (3 + more) * slots + (1 + more) * own + self.depth * (3 * slots + own)
            meter.gather("logprobs", "tp", numbers, self.wide)

    # --- experts ---

    def _experts(self, meter: _Meter, layout: SequenceLayout, layer: int, number: int) -> None:
        """Rows with what is said of them there, rows back, and the gradients of both."""
        of = self.maths
        row, said = of.hidden_size * self.item, 2 * of.top_k * self.wide
        for group, (own, theirs) in zip(("ep", "etp"), self._rows(meter.rank, layer, number), strict=True):
            for _ in range(self.there):
                # How many rows there will be, to each of the others; and the rows.
                meter.gather("experts", group, 1, _INT)
                meter.add("experts", group, own * (row + said) + theirs * row)
            meter.add("experts", group, own * row + theirs * (row + said))
        for _ in range(self.there if self.objective.balance else 0):
            meter.sum_all("routing", "document", len(layout.lengths) * of.num_experts, _INT)

    def _rows(self, rank: int, layer: int, number: int) -> tuple[tuple[float, float], tuple[float, float]]:
        """The rows that go over ``ep`` and ``etp``: a rank's own to others, and theirs back to them."""
        alike = layer, number
        if self.routed is None:  # what is expected of one layer and microbatch is expected of all like it
            alike = max(0, layer - self.maths.num_layers + 1), self.alike[number]
        key = rank, *alike
        if key not in self._known:
            ep, etp = (self.groups.ranks(rank, GRID, name) or (rank,) for name in ("ep", "etp"))
            mine, held = (
                self._sent(rank, layer, number),
                {other: self._got(other, layer, number) for other in etp},
            )
            here = mine[ep.index(rank)]
            theirs = sum(rows for other, rows in held.items() if other != rank)
            self._known[key] = (
                (sum(mine) - here, held[rank] - here),
                ((len(etp) - 1) * held[rank], theirs),
            )
        return self._known[key]

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each microbatch the first that has the same layout on every data rank."""
        first: dict[tuple[SequenceLayout, ...], int] = {}
        return tuple(
            first.setdefault(each, number) for number, each in enumerate(zip(*self.batches, strict=True))
        )

    def _got(self, rank: int, layer: int, number: int) -> float:
        """How many rows a rank has after the exchange over ``ep``, its own included."""
        ep = self.groups.ranks(rank, GRID, "ep") or (rank,)
        return sum(self._sent(other, layer, number)[ep.index(rank)] for other in ep)

    def _sent(self, rank: int, layer: int, number: int) -> Sequence[float]:
        """How many of a rank's tokens go to each rank of its ``ep`` group."""
        of, ep = self.maths, self.parallel.ep
        if ep == 1 or self.routed is None:
            # A token stays away from a rank when all its experts are elsewhere.
            local = of.num_experts // ep
            away = math.comb(of.num_experts - local, of.top_k) / math.comb(of.num_experts, of.top_k)
            tokens = self._num_tokens(rank, number, max(0, layer - of.num_layers + 1))
            return [tokens if ep == 1 else tokens * (1 - away)] * ep
        found = self.routed.get((layer, number, rank))
        if found is None or len(found) != ep:
            raise PlanError(
                "of each layer of experts, microbatch and rank is known where its tokens go",
                where=f"layer {layer}, microbatch {number}, rank {rank}",
                equation=f"routed({found}) has not {ep} numbers, one for each rank of ep",
                hint="give all of them, or None for what is to be expected",
            )
        return found

    def _num_tokens(self, rank: int, number: int, ahead: int) -> int:
        """The tokens of a rank that are routed: for a head that looks ahead, those that have a target."""
        at = self.groups.grids[GRID].coordinate(rank)
        layout = self.batches_of(rank)[number]
        key = layout, at["cp"], at["tp"], ahead
        if key not in self._tokens:
            real = np.ones(layout.num_tokens, dtype=np.bool_)
            if ahead:
                real = layout.shifted(real, ahead + 1, fill=False)
            self._tokens[key] = int(layout.local(layout.place(real, fill=False), at["cp"], at["tp"]).sum())
        return self._tokens[key]

    # --- once a step ---

    @cached_property
    def plan(self) -> PipelinePlan:
        return plan_pipeline(
            "interleaved" if self.parallel.vp > 1 else "1f1b",
            stages=self.parallel.pp,
            virtual=self.parallel.vp,
            microbatches=len(self.batches[0]),
        )

    def stages(self, meter: _Meter) -> None:
        """The messages of the pipeline, each with its header, and the comparison before the first."""
        layouts = self.batches_of(meter.rank)
        stage, neighbours = meter.at["pp"], set()
        for event in self.plan.events[stage]:
            for message in event if isinstance(event, tuple) else ():
                neighbours.add(message.src + message.dst - stage)
                if message.src == stage:
                    own = math.prod(layouts[message.microbatch].local_shape(split_tp=True))
                    size = own * self.maths.hidden_size * self.item
                    meter.add("pipeline", "pp", HEADER_WORDS * _INT + size)
        meter.add("pipeline", "pp", len(neighbours) * 2 * _INT)

    def agreement(self, meter: _Meter) -> None:
        """What is compared before the step and the update, N of each term, their sums, counts, the norm."""
        what, model = self.objective, self.maths.model
        weights = (what.balance, what.router_z) if list(model.decoder.of("moe")) else ()
        routers = sum(1 for weight in weights if weight)
        terms = 1 + self.depth
        meter.sum_all("agreement", "replicas", terms + (2 if routers else 0), _INT)
        numbers = 2 * _AGREEMENT_WORDS + 3 * (terms + routers) + self.maths.num_experts
        meter.gather("agreement", "all", numbers, _INT)
        meter.gather("agreement", meter.name_of(tuple(self.model.mesh.ranks)), 2, _INT)
