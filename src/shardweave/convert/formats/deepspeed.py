"""What DeepSpeed's engine saves at any ZeRO stage, and universal checkpoints: how they are read.

Flat ranges are put together by the store. What is left to say is how weights are cut over tensor-parallel
ranks, and that is what the checkpoint says, or the user: a cut is not guessed from shapes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from shardweave.convert.checkpoint import Checkpoint, OptimizerState, Settings
from shardweave.convert.formats import deepspeed_target, ranks
from shardweave.convert.formats.format import Format
from shardweave.convert.states import MASTER, recorded
from shardweave.convert.target import (
    Zero,
)
from shardweave.dialects import affine_text, deepspeed, hf
from shardweave.errors import GeometryError, UnknownNameError
from shardweave.layout import BufferRule, Dim, Layout, Mesh, Part, Run, Sharded, Tensor
from shardweave.layout.affine import AffineMap
from shardweave.layout.affine_layout import layout_of, map_of
from shardweave.models import Model
from shardweave.models.plain import FAMILY as PLAIN
from shardweave.store import deepspeed as native
from shardweave.store import deepspeed_universal
from shardweave.store.deepspeed_state import INFO
from shardweave.store.manifest import Manifest, StoredTensor
from shardweave.store.megatron_buckets import prove_masters
from shardweave.store.pickles import brief
from shardweave.store.strict_json import some

_PATTERNS: Final = {
    "parameter_with_row_parallelism_patterns": 1,
    "tp_replicated_parameter_patterns": None,
}
"""What patterns of names say of the dim that is cut."""
_UNDESCRIBED: Final = "autotp_unsupported_parameter_patterns"
"""Under which AutoTP lists the weights whose cut it does not describe, each with its reason."""


# --- reading ------------------------------------------------------------------------------------


def _home(manifest: Manifest) -> Path:
    """Beside the folder of a save, where a run keeps what belongs to all of them; or in it."""
    return manifest.root if (manifest.root / "config.json").is_file() else manifest.root.parent


def _buffers(manifest: Manifest) -> Collection[str]:
    own = manifest.records.get("deepspeed") or manifest.records.get("universal") or {}
    found: Collection[str] = own.get("buffers", ())
    return found


def _ranks(stored: Collection[str]) -> int:
    return 1 + max((int(rank) for key in stored for _, at, rank in [key.rpartition("@")] if at), default=0)


def _layout(
    stored: Mapping[str, StoredTensor], model: Model, manifest: Manifest, given: Layout | None
) -> Layout:
    """Weights are whole at one tensor-parallel rank, else the checkpoint or the user says how."""
    tp, where = _ranks(stored), str(manifest.root)
    if given is not None:
        return ranks.of_stored(given, stored, model, ranks=tp, where=where)
    if tp == 1:
        return hf.variant(stored, model)
    mesh = Mesh((("tp", tp),))
    info, maps = _said(manifest, tp)
    if not maps and not any(info.get(key) for key in _PATTERNS):
        raise GeometryError(
            "a checkpoint of several tensor-parallel ranks says how its weights are cut",
            where=where,
            equation=f"tp({tp}), and {INFO} has no affine map and no patterns",
            hint="give the layout with --layout FILE, as shardweave probe writes it; a guess may be wrong",
        )
    if model.family == PLAIN:
        return _of_maps(model, maps, mesh)
    expected = deepspeed.layout(model, mesh)
    _check_patterns(expected, info, maps, where)
    return _with_maps(expected, model, maps)


def _said(manifest: Manifest, tp: int) -> tuple[Mapping[str, Any], Mapping[str, AffineMap]]:
    """What a checkpoint says of how its weights are cut, and the maps in it.

    Raises:
        GeometryError: It says of a weight that its cut cannot be described.
        FormatError and its kin: As ``affine_text.read``.
    """
    info: Mapping[str, Any] = manifest.records.get(INFO) or {}
    if undescribed := info.get(_UNDESCRIBED):
        weights = some(map(repr, undescribed)) if isinstance(undescribed, Mapping) else brief(undescribed)
        raise GeometryError(
            "a checkpoint of several tensor-parallel ranks says how each of its weights is cut",
            where=str(manifest.root),
            equation=f"tp({tp}), and {_UNDESCRIBED} lists {weights}",
            hint="give the layout with --layout FILE, as shardweave probe writes it; a guess may be wrong",
        )
    return info, affine_text.read(info["affine_map"], tp=tp) if info.get("affine_map") else {}


def _shapes(stored: Mapping[str, StoredTensor], manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """The shapes of weights that no config describes: as they are, or as their maps say."""
    tp = _ranks(stored)
    if tp == 1:
        return {key: tensor.shape for key, tensor in stored.items()}
    _, maps = _said(manifest, tp)
    lost = sorted({key.rpartition("@")[0] for key in stored} - set(maps))
    if lost:
        raise GeometryError(
            "a checkpoint of several tensor-parallel ranks says how each of its weights is cut",
            where=str(manifest.root),
            equation=f"tp({tp}), and {INFO} has no map of {len(lost)}: {some(map(repr, lost))}",
            hint="give the config of the model with --config, or the layout with --layout FILE",
        )
    return {name: found.shape for name, found in maps.items() if f"{name}@0" in stored}


def _of_maps(model: Model, maps: Mapping[str, AffineMap], mesh: Mesh) -> Layout:
    tensors = {tensor.name: tensor for tensor in model.tensors}
    rules = [rule for name, one in tensors.items() for rule in layout_of(maps[name], one, mesh).rules]
    return Layout("deepspeed", mesh, tuple(rules))


def _with_maps(expected: Layout, model: Model, maps: Mapping[str, AffineMap]) -> Layout:
    """The layout of AutoTP, but for weights whose maps say something else."""
    rules: list[BufferRule] = []
    for rule in expected.rules:
        part = rule.parts[0]
        named = [part.tensor.member(dict(numbers)) for numbers in _members(part.tensor)]
        other = {name: maps[name] for name in named if name in maps}
        if len(rule.parts) > 1 or not other:
            rules.append(rule)
            continue
        alike = map_of(replace(expected, rules=(rule,)), part.tensor)
        if all(found == alike for found in other.values()):
            rules.append(rule)
            continue
        for numbers in _members(part.tensor):
            # One rule a member: what differs between layers has to be said of each.
            name = part.tensor.member(dict(numbers))
            if name not in maps:
                raise UnknownNameError(
                    "weights of a family are all cut as maps say, or none is",
                    where=f"weight {name!r}",
                    equation="it has no map, others of its family have one",
                    hint="give the layout with --layout FILE",
                )
            rules += _of_member(maps[name], part, numbers, expected.mesh)
    return replace(expected, rules=tuple(rules))


def _of_member(found: AffineMap, part: Part, numbers: Mapping[str, int], mesh: Mesh) -> Iterator[BufferRule]:
    """The buffers of one member of a family, whose map is its own."""
    index = tuple((name, Dim((Run("", numbers[name], 1),))) for name, _ in part.tensor.index)
    for rule in layout_of(found, replace(part.tensor, index=index), mesh).rules:
        yield replace(rule, parts=tuple(replace(one, tensor=part.tensor) for one in rule.parts))


def _members(tensor: Tensor) -> Iterator[Mapping[str, int]]:
    names = [name for name, _ in tensor.index]
    for turn in itertools.product(*([n for _, n in dim] for _, dim in tensor.index)):
        yield dict(zip(names, turn, strict=True))


def _check_patterns(expected: Layout, info: Mapping[str, Any], maps: Collection[str], where: str) -> None:
    """Compare which dim of a weight is cut with what the checkpoint's patterns say, where they say it."""
    said = {key: [re.compile(text) for text in info.get(key) or ()] for key in _PATTERNS}
    for rule in expected.rules:
        cut = [d - len(rule.index) for d, dim in enumerate(rule.dims) if isinstance(dim, Sharded)]
        tensor = rule.parts[0].tensor
        for numbers in _members(tensor):
            name = tensor.member(numbers)
            told = [key for key, patterns in said.items() if any(one.match(name) for one in patterns)]
            if not told or name in maps:
                continue
            wanted = [dim for key in told for dim in [_PATTERNS[key]] if dim is not None]
            if wanted != cut:
                raise GeometryError(
                    "what a checkpoint says of a weight is how AutoTP cuts it",
                    where=f"{where}, weight {name!r}",
                    equation=f"{', '.join(told)}, and AutoTP cuts dims({', '.join(map(str, cut)) or 'none'})",
                    hint="give the layout that was trained with, with --layout FILE",
                )


def _states(source: Checkpoint, settings: Settings | None) -> OptimizerState | None:
    """Its states, if masters are those of the weights, which lie in other files."""
    prove_masters(_masters_by_weight(source.manifest))
    return recorded(source, ordered=True)


def _masters_by_weight(manifest: Manifest) -> Manifest:
    """The weights that have masters beside them, and these, with the rank in the name of the weight."""
    found: dict[str, StoredTensor] = {}
    for key, tensor in manifest.tensors.items():
        if not key.startswith("optim/"):
            found[key] = tensor
            continue
        name, _, state = key.removeprefix("optim/").rpartition("/")
        state, at, rank = state.partition("@")
        if state == MASTER and tensor.dtype == "float32":
            found[f"optim/{name}{at}{rank}/{MASTER}"] = tensor
    return replace(manifest, tensors=found)


FORMAT = Format(
    name="deepspeed",
    holds="latest and the folder that it names, or *mp_rank_*_model_states.pt",
    recognise=lambda root, names: native.is_deepspeed(root),
    read=native.read,
    layout=_layout,
    shapes=_shapes,
    target=deepspeed_target.native,
    beside=("optim/",),
    states=_states,
    takes_states=True,
    takes_layout=True,
    masters=lambda wanted: "only" if (wanted.zero or Zero()).stage == 3 else "always",
    buffers=_buffers,
    home=_home,
)

UNIVERSAL = Format(
    name="universal",
    holds="latest_universal and the folder that it names, or zero/*/fp32.pt",
    recognise=lambda root, names: deepspeed_universal.is_universal(root),
    read=deepspeed_universal.read,
    layout=_layout,
    target=deepspeed_target.universal,
    beside=("optim/",),
    states=_states,
    takes_states=True,
    takes_part=True,
    buffers=_buffers,
    home=_home,
)
