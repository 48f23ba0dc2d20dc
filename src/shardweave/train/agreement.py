"""What ranks must have in common before they take a step, compared before its first message.

One message to all at the begin of a step: which kind of step it is, a digest of everything that is the same
on all ranks, and digests of what is the same on the ranks of a data rank. A rank that computes another
objective, model or batch than its peers would not fail but give a wrong number, or send messages that nobody
waits for. So it is refused here, on every rank alike, and every communicator stays as it is. What differs is
asked for only where something does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from hashlib import blake2b

import torch
from torch import Tensor

from shardweave.errors import DtypeError, PlanError, UnknownNameError
from shardweave.train.batch import Microbatch
from shardweave.train.collectives import gather_parts
from shardweave.train.grid import Group, Groups
from shardweave.train.runtime import GRID, Runtime
from shardweave.train.together import agree

KINDS = ("evaluate", "forward_backward", "update")
"""What all ranks do at the same time, and say before they do it."""

_OF_DATA = ("layouts", "tokens", "masks", "numbers of documents", "extras")
_MOST_TEXT = 200
_Plain = str | int | float | bool | None


def check_step(
    runtime: Runtime, batches: Sequence[Microbatch], *, kind: str, common: Mapping[str, object]
) -> None:
    """Refuse a step that ranks do not agree on, or that some rank cannot take; on every rank alike.

    Args:
        runtime: The model.
        batches: This data rank's microbatches.
        kind: One of ``KINDS``.
        common: What else all ranks have in common, by name; as text where it differs.

    Raises:
        PlanError: Ranks take steps of two kinds, have different objectives, models or numbers of
            microbatches; ranks of one data rank have different microbatches; a batch is not of this model's
            degrees or has tokens that its vocabulary has not.
        DtypeError: Tokens, a mask or a weight are of another dtype than they shall be.
        UnknownNameError: A rank has not the weights of its layout.
    """
    everybody = runtime.groups.get(GRID, "all")
    device = next((weight.device for weight in runtime.weights.values()), torch.device("cpu"))
    wrong: Exception | None = None
    alike, content = {}, [0] * len(_OF_DATA)
    try:
        _check_weights(runtime)
        for number, batch in enumerate(batches):
            _check_batch(runtime, batch, number)
        alike = {**_facts(runtime), **{name: f"{value}" for name, value in common.items()}}
        content = _content(batches)
    except Exception as error:
        wrong = error
    rows = _said(kind, alike, [len(batches), *content], wrong, group=everybody, device=device)
    _check_data(rows, runtime, everybody)


def check_update(
    groups: Groups, *, common: Mapping[str, object], of_stage: Iterable[str], device: torch.device
) -> None:
    """Refuse an update of the weights that ranks do not agree on, or that some do not take part in.

    Args:
        groups: Those of the model. Where no group of all ranks was planned, nothing is compared.
        common: What all ranks have in common, by name.
        of_stage: What the ranks of a stage have in common: the settings of each array.
        device: Where groups send from.

    Raises:
        PlanError: As above.
    """
    if "all" not in groups.plan.names.get(GRID, {}):
        return
    everybody, columns = groups.get(GRID, "all"), groups.plan.grids[GRID].columns
    alike = {name: f"{value}" for name, value in common.items()}
    content = [_digest(of_stage), *[0] * len(_OF_DATA)]
    rows = _said("update", alike, content, None, group=everybody, device=device)
    stages = columns["pp"] if "pp" in columns else [0] * len(rows)
    _check_alike(
        {
            (f"stage {stage}", "settings of arrays"): [
                (at, rows[at][0]) for at in range(len(rows)) if stages[at] == stage
            ]
            for stage in sorted(set(map(int, stages)))
        },
        everybody,
        "the ranks of a stage update with the same settings",
        "give every rank the same settings: replicas of a weight would be no more",
    )


def named(function: Callable[..., object]) -> str:
    """A function as ranks compare it: its name, and the plain values that it was made with.

    >>> from shardweave.train.loss import cross_entropy, policy_gradient
    >>> named(cross_entropy)
    'cross_entropy'
    >>> named(policy_gradient(clip=0.25, kl=0.5))
    '_policy_gradient(low=0.75, high=1.25, kl=0.5, entropy=0.0)'
    """
    if not isinstance(function, functools.partial):
        return str(getattr(function, "__qualname__", type(function).__qualname__))
    given = {**{str(at): value for at, value in enumerate(function.args)}, **function.keywords}
    said = ", ".join(
        f"{name}={value if isinstance(value, _Plain) else type(value).__name__}"
        for name, value in given.items()
    )
    return f"{named(function.func)}({said})"


# --- what a rank says of itself -----------------------------------------------------------------


def _facts(runtime: Runtime) -> dict[str, str]:
    """What is the same on all ranks of a model, by name."""
    decoder, maths, parallel = runtime.decoder, runtime.decoder.maths, runtime.parallel
    own = ("cp_method", "dropout", "seed", "recompute")
    return {
        **{each.name: f"{getattr(parallel, each.name)}" for each in fields(parallel)},
        **{each.name: f"{getattr(maths, each.name)}" for each in fields(maths) if each.name != "model"},
        **{name: f"{getattr(decoder, name)}" for name in own},
        # How shares are sent: ranks that differ here would wait for messages that nobody sends.
        **{name: f"{getattr(runtime, name)}" for name in ("multiple", "ordered", "ahead")},
        "layers of stages": f"{runtime.stages}",
        "dtype": f"{runtime.dtype}",
        "tensors": f"{_digest([repr(maths.model)]) % (1 << 64):016x}",
    }


def _check_weights(runtime: Runtime) -> None:
    held, weights = runtime.held, runtime.weights
    where = f"rank {runtime.rank}"
    different = sorted(set(held) ^ set(weights))
    if different:
        raise UnknownNameError(
            "a rank has the weights that its layout says",
            where=where,
            equation=f"{', '.join(different[:3])} are weights or in the layout, and not both",
            hint="keep runtime.weights as build() made it; load values into it",
        )
    for name, weight in weights.items():
        held[name].check(tuple(weight.shape))
        if weight.dtype != getattr(torch, held[name].buffer.dtype):
            raise DtypeError(
                "a weight has the dtype that its layout says",
                where=f"{where}, weight {name!r}",
                equation=f"dtype({weight.dtype}) != dtype(torch.{held[name].buffer.dtype})",
                hint="build the model with the dtype that it is to be computed in",
            )


def _check_batch(runtime: Runtime, batch: Microbatch, number: int) -> None:
    parallel, vocab_size = runtime.parallel, runtime.decoder.maths.vocab_size
    where = f"rank {runtime.rank}, microbatch {number}"
    if (batch.layout.cp, batch.layout.tp) != (parallel.cp, parallel.tp):
        raise PlanError(
            "a microbatch is cut over the degrees of its model",
            where=where,
            equation=f"its SequenceLayout has cp={batch.layout.cp}, tp={batch.layout.tp}, the model "
            f"cp={parallel.cp}, tp={parallel.tp}",
            hint="make it with microbatch(..., cp=parallel.cp, tp=parallel.tp)",
        )
    for name, values, dtype in (("ids", batch.ids, torch.int64), ("mask", batch.mask, torch.bool)):
        if values.dtype != dtype:
            raise DtypeError(
                "tokens are int64 and masks are bool",
                where=f"{where}, {name}",
                equation=f"dtype({values.dtype}) != dtype({dtype})",
                hint="convert them before a batch is made of them",
            )
    if batch.ids.numel() and not 0 <= int(batch.ids.min()) <= int(batch.ids.max()) < vocab_size:
        raise PlanError(
            "a token is of the vocabulary",
            where=f"{where}, ids",
            equation=f"ids {int(batch.ids.min())}..{int(batch.ids.max())} not in 0..{vocab_size - 1}",
            hint="use the tokenizer of the model",
        )


def _content(batches: Sequence[Microbatch]) -> list[int]:
    """A digest for each of ``_OF_DATA``."""
    return [
        _digest(batch.layout.digest for batch in batches),
        _digest(_bytes(batch.ids) for batch in batches),
        _digest(_bytes(batch.mask) for batch in batches),
        _digest(f"{batch.numbers}" for batch in batches),
        _digest(
            part
            for batch in batches
            for name in sorted(batch.extras)
            for part in (name, _bytes(batch.extras[name]))
        ),
    ]


def _bytes(values: Tensor) -> bytes:
    return values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _digest(parts: Iterable[str | bytes]) -> int:
    found = blake2b(digest_size=8)
    for part in parts:
        said = part.encode() if isinstance(part, str) else part
        found.update(len(said).to_bytes(8, "little"))
        found.update(said)
    return int.from_bytes(found.digest(), "little", signed=True)


# --- what ranks said ----------------------------------------------------------------------------


def _said(
    kind: str,
    alike: Mapping[str, str],
    more: Sequence[int],
    wrong: Exception | None,
    *,
    group: Group,
    device: torch.device,
) -> list[list[int]]:
    """What each rank says at the begin, in the order of the group: always a message of one size."""
    whole = _digest(f"{name}={value}" for name, value in alike.items())
    row = torch.tensor([KINDS.index(kind), wrong is not None, whole, *more], device=device)
    rows: list[list[int]] = torch.stack(gather_parts(row, group=group)).tolist()
    _check_kind(rows, group)
    if any(each[1] for each in rows):
        agree(wrong, group=group, device=device)
    if len({each[2] for each in rows}) > 1:
        _raise_unlike(alike, group, device)
    return [each[3:] for each in rows]


def _check_kind(rows: Sequence[Sequence[int]], everybody: Group) -> None:
    if len({row[0] for row in rows}) > 1:
        said = {
            kind: [everybody.ranks[at] for at, row in enumerate(rows) if row[0] == number]
            for number, kind in enumerate(KINDS)
        }
        raise PlanError(
            "all ranks take the same step",
            where="all ranks",
            equation="; ".join(f"{kind}: ranks {ranks}" for kind, ranks in said.items() if ranks),
            hint="let the number of a step say what is done in it, the same on every rank",
        )


def _raise_unlike(alike: Mapping[str, str], everybody: Group, device: torch.device) -> None:
    """Ask for what differs, and raise the first thing that does."""
    # Ranks of another version have other names; then these are what differs.
    names = _digest(alike)
    digests = [len(alike), names, *(_digest([value]) for value in alike.values())]
    told = torch.zeros(64, dtype=torch.int64)
    told[: len(digests)] = torch.tensor(digests)
    rows = torch.stack(gather_parts(told.to(device), group=everybody)).tolist()
    odd = next(at for at in range(len(told)) if len({row[at] for row in rows}) > 1)
    name = "names of settings" if odd < 2 else list(alike)[odd - 2]
    text = ", ".join(alike) if odd < 2 else alike[name]
    padded = torch.tensor(list(text.encode()[:_MOST_TEXT].ljust(_MOST_TEXT, b"\0")), dtype=torch.uint8)
    parts = gather_parts(padded.to(device), group=everybody)
    texts = [bytes(part.tolist()).rstrip(b"\0").decode(errors="replace") for part in parts]
    said: dict[tuple[str, int], list[int]] = {}
    for at, value in enumerate(texts):
        said.setdefault((value, rows[at][odd]), []).append(everybody.ranks[at])
    raise PlanError(
        "all ranks compute one model and one objective",
        where=f"all ranks, {name}",
        equation="; ".join(f"ranks {ranks}: {value}" for (value, _), ranks in said.items()),
        hint="give every rank the same settings: no gradient of different ones would be that of either",
    )


def _check_data(rows: Sequence[Sequence[int]], runtime: Runtime, everybody: Group) -> None:
    if len({row[0] for row in rows}) > 1:
        raise PlanError(
            "all data ranks have equally many microbatches",
            where="all ranks",
            equation=f"microbatches by rank: {[row[0] for row in rows]}",
            hint="pad with empty microbatches: experts are shared by ranks of different data",
        )
    parallel = runtime.parallel
    data = [parallel.data_rank(rank) for rank in parallel.mesh.ranks]
    _check_alike(
        {
            (f"data rank {dp}", what): [(at, row[number]) for at, row in enumerate(rows) if data[at] == dp]
            for dp in range(parallel.num_data)
            for number, what in enumerate(_OF_DATA, start=1)
        },
        everybody,
        "the ranks of one data rank work on the same tokens",
        "load a batch by its data rank, parallel.data_rank(rank), not by the global rank",
    )


def _check_alike(
    said: Mapping[tuple[str, str], Sequence[tuple[int, int]]], everybody: Group, rule: str, hint: str
) -> None:
    """Refuse ranks that said different things where they shall say the same: by place and by what it is."""
    for (where, what), each in said.items():
        held: dict[int, list[int]] = {}
        for at, value in each:
            held.setdefault(value, []).append(everybody.ranks[at])
        if len(held) > 1:
            raise PlanError(
                rule,
                where=f"all ranks, {where}",
                equation=f"{what} of ranks " + " != ".join(str(ranks) for ranks in held.values()),
                hint=hint,
            )
