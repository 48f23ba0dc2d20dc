"""Weights in full precision and rounded: which of the two a target has, and where it comes from.

Formats differ in what they call a weight. Some keep it rounded, as the model computes with it, and a master
in full precision beside it; the others have one of the two. A conversion never rounds what it need not round,
and what a rounded weight is rounded from goes with the optimizer's state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

from shardweave.convert.checkpoint import Checkpoint, OptimizerState
from shardweave.convert.states import MASTER, keys_of, owners, part_of, state_rule, trained_part
from shardweave.layout import BufferRule, Part, Tensor
from shardweave.layout.dtype import itemsize
from shardweave.layout.subset import only
from shardweave.store.manifest import Manifest, StoredTensor

Masters = Literal["only", "beside", "always"]
"""What a target has in full precision: only masters, in place of weights; masters beside weights that are
rounded; or a master beside every trained weight, rounded or not."""

ROUNDED: Final = "rounded from its master, which is converted in its place"
AGAIN: Final = "again/"
"""What begins the names of arrays that are read once more, as another one."""


def with_states(
    source: Checkpoint, state: OptimizerState, *, masters: Masters, dtype: str | None
) -> tuple[Checkpoint, OptimizerState]:
    """The source with the states among what it holds.

    Args:
        source: The checkpoint.
        state: The state of its optimizer.
        masters: What the target has in full precision. Where it has only masters, the weights that were
            rounded from them are left out.
        dtype: The dtype that weights are asked for in. Masters are what the source has in full precision.
    """
    # Families of one name are told apart by their tensors.
    kept = {(rule.name, rule.parts[0].tensor): rule for rule in state.layout.rules}
    made: list[BufferRule] = []
    rounded = set[Tensor]()
    weights: list[BufferRule] = []
    stored = dict(source.manifest.tensors)
    left_out = {key: why for key, why in source.left_out.items() if key not in state.read}
    owned = {id(rule) for rule in owners(source.layout)}
    for rule in source.layout.rules:
        at = f"optim/{rule.name}/{MASTER}", state.states_of(rule.parts[0].tensor).get(MASTER)
        master = None if at[1] is None else kept.get((at[0], at[1]))
        trained = next(trained_part(source.layout, rule, state), None) if id(rule) in owned else None
        if trained is None:
            weights.append(rule)
        elif master is not None and (masters == "only" or dtype == master.dtype):
            # The weight is the master: what was rounded from it is not needed.
            left_out |= dict.fromkeys(keys_of(source.layout, trained[0]), ROUNDED)
            rounded |= {part.tensor for part in rule.parts}
            if masters == "always":
                stored |= _again(source, master, stored)
                weights.append(replace(master, name=f"{AGAIN}{master.name}", parts=rule.parts))
            else:
                del kept[master.name, master.parts[0].tensor]
                weights.append(replace(master, parts=rule.parts))
            weights += _untrained(source, rule, trained[0])
        elif master is None and (
            masters == "always"
            or (masters == "beside" and dtype is not None and itemsize(dtype) < itemsize(rule.dtype))
        ):
            # The weight may be rounded, and its master is what it is rounded from: the same bytes once more.
            again = state_rule(trained[0], MASTER, name=f"{AGAIN}{rule.name}")
            stored |= _again(source, trained[0], stored)
            made.append(again)
            weights.append(rule)
        else:
            weights.append(rule)
    for rule in source.layout.rules:
        if id(rule) not in owned and all(part.tensor in rounded for part in rule.parts):
            # What files hold once more is rounded too.
            weights = [other for other in weights if other is not rule]
            left_out |= dict.fromkeys(keys_of(source.layout, rule), ROUNDED)
    rules = (*kept.values(), *made)
    manifest = replace(source.manifest, tensors=stored)
    layout = replace(source.layout, rules=(*weights, *rules))
    for key in layout.stored():
        left_out.pop(key, None)
    return (
        replace(source, manifest=manifest, layout=layout, left_out=left_out, read=state.read),
        replace(state, layout=replace(state.layout, rules=rules)),
    )


def as_read(manifest: Manifest) -> Manifest:
    """The manifest of a source without the arrays that ``with_states`` names once more."""
    kept = {key: tensor for key, tensor in manifest.tensors.items() if not key.startswith(AGAIN)}
    return replace(manifest, tensors=kept)


def _again(source: Checkpoint, rule: BufferRule, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The arrays of a rule under further keys."""
    return {
        f"{AGAIN}{key}": replace(stored[key], key=f"{AGAIN}{key}") for key in keys_of(source.layout, rule)
    }


def _untrained(source: Checkpoint, rule: BufferRule, trained: BufferRule) -> list[BufferRule]:
    """The members of the families of a buffer that are not trained, as a buffer of the same families."""
    of = {part.label: part.tensor for part in trained.parts}
    wanted = {}
    for part in rule.parts:
        kept = {name: {n for _, n in dim} for name, dim in of[part.label].index}
        index = tuple(
            (name, only(dim, {n for _, n in dim} - kept[name]) if i == 0 else dim)
            for i, (name, dim) in enumerate(part.tensor.index)
        )
        if not index or not len(index[0][1]):
            return []
        wanted[part.tensor] = replace(part.tensor, index=index)
    rest = part_of(source.layout, rule, wanted, where=source.layout.name)
    full = {part.label: part.tensor for part in rule.parts}
    return [replace(rest, parts=tuple(Part(full[p.label], p.label, p.replica) for p in rest.parts))]
