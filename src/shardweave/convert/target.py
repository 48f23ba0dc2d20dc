"""What a conversion writes: the form of the target, its arrays, and how they are cut into files."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardweave import __version__
from shardweave.convert.source import FORMATS, Checkpoint
from shardweave.convert.states import ADAM, COUNT, GROUPS, STEP, OptimizerState, members, state_rule
from shardweave.dialects import hf, megatron
from shardweave.errors import DtypeError, FormatError, GeometryError, UnknownNameError
from shardweave.layout import BufferRule, Layout, Tensor
from shardweave.layout.dtype import itemsize
from shardweave.models import Model
from shardweave.store import native_files, safetensors, torch_dist_write, torch_save
from shardweave.store.manifest import Extent, Manifest, TensorSpec
from shardweave.store.native_manifest import About
from shardweave.store.torch_dcp import Keys, key_of
from shardweave.store.torch_dcp import Path as Way

_EMPTY = torch_save.stream([None])
"""An object without a value, as Megatron stores the extra state of a module that has none."""
_CHUNK_BYTES = 64 << 20
"""torch reads a chunk whole where it needs a part of it."""


@dataclass(frozen=True, slots=True)
class Target:
    """What to write.

    Attributes:
        format: One of ``FORMATS``.
        layout: Which array holds what; the arrays of rank 0.
        specs: The arrays, with the boxes that they are stored in.
        max_file_bytes: Where files end.
        objects: The streams of objects that are stored beside the arrays, by key.
        constants: The bytes of arrays that are in no layout, by key: how many updates were made.
        ways: The way to each key, as torch records it.
        about: What a native target says beside its tensors.
    """

    format: str
    layout: Layout
    specs: tuple[TensorSpec, ...]
    max_file_bytes: int
    objects: Mapping[str, bytes] = field(default_factory=dict)
    constants: Mapping[str, bytes] = field(default_factory=dict)
    ways: Mapping[str, Way] = field(default_factory=dict)
    about: About = field(default_factory=About)

    def allocate(self, root: Path) -> Manifest:
        """Lay out the files in an empty folder."""
        if self.format == "hf":
            return safetensors.allocate(root, self.specs, max_file_bytes=self.max_file_bytes)
        if self.format == "native":
            return native_files.allocate(root, self.specs, max_file_bytes=self.max_file_bytes)
        records: dict[str, Any] = {"objects": dict(self.objects)}
        if self.format == "dcp":
            records |= {"metadata": None, "planner_data": dict(self.ways)}
        return torch_dist_write.allocate(
            root, self.specs, records=records, max_file_bytes=self.max_file_bytes
        )

    def finish(
        self,
        manifest: Manifest,
        facts: Mapping[Extent, Mapping[str, Any]],
        *,
        config: Mapping[str, Any],
        fsync: bool,
    ) -> None:
        """Seal the files, with the checksums of each extent and the config that describes the weights."""
        if self.format == "hf":
            safetensors.finish(manifest, fsync=fsync)
        elif self.format == "native":
            digests = {extent: bytes.fromhex(one["xxh3_128"]) for extent, one in facts.items()}
            about = replace(self.about, config=config, software=f"shardweave {__version__}")
            native_files.finish(manifest, digests, about, fsync=fsync)
        else:
            checksums = {extent: int(one["crc32"]) for extent, one in facts.items() if "crc32" in one}
            torch_dist_write.finish(manifest, checksums, fsync=fsync)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a Megatron job that reads the target is laid out; it decides how arrays are cut into files.

    A Megatron checkpoint loads at any geometry; ranks read whole shards where it matches theirs.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    spec: str = "te"
    layer_keys: str = "auto"
    stages: tuple[int, ...] | None = None
    vpp: int = 1
    vocab_divisor: int = 128


def target(
    source: Checkpoint,
    *,
    to: str,
    geometry: Geometry | None = None,
    dtype: str | None = None,
    stacked_experts: bool = False,
    max_file_bytes: int = 5_000_000_000,
    state: OptimizerState | None = None,
    keys: Keys | None = None,
) -> Target:
    """Decide what to write.

    Args:
        source: What is converted.
        to: The format.
        geometry: Of a Megatron target. Other targets have none, and refuse one.
        dtype: Store all weights in this dtype; by default in the source's.
        stacked_experts: Whether a Hugging Face target stores the experts of a layer as one array.
        max_file_bytes: Start another file where one would grow beyond this.
        state: The optimizer's state, where it is converted too.
        keys: Under which keys a target of torch.distributed.checkpoint has what.
    """
    if to not in FORMATS:
        raise GeometryError(
            "the target format is known",
            equation=f"{to!r} is not one of {', '.join(FORMATS)}",
            hint="name one",
        )
    model = source.model
    keys = keys or Keys()
    chunks: Mapping[str, tuple[megatron.Shard, ...]] = {}
    objects: Mapping[str, bytes] = {}
    if to != "megatron":
        if geometry is not None:
            raise GeometryError(
                f"a {'Hugging Face' if to == 'hf' else to} checkpoint stores whole tensors",
                equation=f"to={to} with {geometry}",
                hint="leave out --tp, --pp, --ep and the like, or convert --to megatron",
            )
        if stacked_experts and to != "hf":
            raise GeometryError(
                "only a Hugging Face checkpoint stores the experts of a layer as one array",
                equation=f"to={to} with stacked_experts(True)",
                hint="leave it out: each expert has its own key",
            )
        # As modules hold them: stacked, and a tied weight under each of its names.
        as_held = to == "dcp" and not model.scaled
        layout = hf.layout(model, stacked_experts=stacked_experts or as_held, with_aliases=as_held)
    else:
        layout, chunks, objects = _megatron(model, geometry or Geometry())
    if dtype and model.scaled:
        raise DtypeError(
            "a dtype is asked of weights whose values are their own",
            where=str(source.manifest.root),
            equation=f"dtype({dtype}), and weights are float8_e4m3fn with scales of blocks",
            hint="leave --dtype out: quantised weights and their scales stay as they are",
        )
    rules = list(layout.rules)
    if state is not None:
        rules += _state_rules(layout, state, to, keys)
    if to == "dcp":
        rules[: len(layout.rules)] = [
            replace(rule, name=key_of(keys.weight(rule.name))) for rule in layout.rules
        ]
    whole = _with_dtypes(replace(layout, rules=tuple(rules)), source, dtype)
    specs = [
        TensorSpec(
            name,
            buffer.dtype,
            buffer.shape,
            tuple((shard.offset, shard.shape) for shard in chunks.get(name, ()))
            if to != "dcp"
            else tuple(_rows(buffer.shape, itemsize(buffer.dtype))),
        )
        for name, (buffer, _) in whole.arrays(0).items()
    ]
    made = Target(to, whole, tuple(specs), max_file_bytes, objects)
    if to == "dcp":
        return _with_settings(made, layout, state, keys, where=str(source.manifest.root))
    return _with_count(made, source, state) if to == "native" and state is not None else made


def _rows(shape: tuple[int, ...], item: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A tensor in chunks of whole rows."""
    if not shape or not math.prod(shape):
        return
    step = max(1, _CHUNK_BYTES // (math.prod(shape[1:]) * item))
    for low in range(0, shape[0], step):
        yield (low, *(0 for _ in shape[1:])), (min(step, shape[0] - low), *shape[1:])


# --- the state of an optimizer ------------------------------------------------------------------


def _state_rules(weights: Layout, state: OptimizerState, to: str, keys: Keys) -> Iterator[BufferRule]:
    """The states of the weights of a target."""
    for rule in weights.rules:
        if any(part.replica for part in rule.parts):
            continue
        has = {part.tensor.name: state.states_of(part.tensor.name) for part in rule.parts}
        if len(set(has.values())) > 1:
            (one, first), (other, second) = list(has.items())[:2]
            raise UnknownNameError(
                "weights that are stored as one have the same states",
                where=f"{rule.name!r}",
                equation=f"{', '.join(first)} of {one!r} != {', '.join(second)} of {other!r}",
                hint="convert the weights alone with --weights-only",
            )
        for one in next(iter(has.values())):
            yield state_rule(rule, one, name=key_of(keys.state(rule.name, one)) if to == "dcp" else "")


def _with_count(made: Target, source: Checkpoint, state: OptimizerState) -> Target:
    """A native target with the number of updates and the settings."""
    if state.count is None:
        raise FormatError(
            "a native checkpoint says how many updates were made",
            where=str(source.manifest.root),
            equation="no weight has a count of them",
            hint="convert the weights alone with --weights-only",
        )
    count = state.count
    spec = TensorSpec(COUNT, "int64", ())
    before: About | None = source.manifest.records.get("about")
    if before is not None:
        about = before
    else:
        groups: dict[tuple[tuple[str, Any], ...], list[str]] = {}
        for name, said in state.settings.items():
            _check_settings(name, said, where=str(source.manifest.root))
            groups.setdefault(tuple(said.items()), []).append(name)
        extras = {GROUPS: [{**dict(said), "params": names} for said, names in groups.items()]}
        about = About(step=count, extras=extras)
    constants = {COUNT: struct.pack("<q", count)}
    return replace(made, specs=(*made.specs, spec), constants=constants, about=about)


def _check_settings(name: str, said: Mapping[str, Any], *, where: str) -> None:
    """Refuse what the runtime's optimizer does not do."""
    odd = {key: said[key] for key in ("amsgrad", "maximize") if said.get(key)}
    if said.get("weight_decay") and said.get("decoupled_weight_decay") is False:
        odd["decoupled_weight_decay"] = False
    if odd:
        raise UnknownNameError(
            "a native checkpoint goes on with AdamW or Muon",
            where=f"{where}, settings of {name!r}",
            equation=", ".join(f"{key}({value})" for key, value in odd.items()),
            hint="train it with AdamW, or convert the weights alone with --weights-only",
        )


def _with_settings(
    made: Target, weights: Layout, state: OptimizerState | None, keys: Keys, *, where: str
) -> Target:
    """A target of torch with the number of updates of each weight, the settings, and the way to each key."""
    ways = {key_of(way): way for name in weights.arrays(0) for way in [keys.weight(name)]}
    if state is None:
        return replace(made, ways=ways)
    settings, constants = dict[str, Mapping[str, Any]](), dict[str, bytes]()
    for array, held in members(weights):
        has = {state.weights[name].states for name, _ in held}
        said = [state.settings.get(name) for name, _ in held]
        if said[0] is None or any(one != said[0] for one in said):
            raise FormatError(
                "the settings of an optimizer are known, one for each weight",
                where=f"{where}, {array!r}",
                equation="none are recorded" if None in said else "its parts have different ones",
                hint="convert a checkpoint that a run saved, or the weights alone with --weights-only",
            )
        settings[array] = said[0]
        for one in (*next(iter(has)), *([STEP] if has == {ADAM} else [])):
            ways |= {key_of(way): way for way in [keys.state(array, one)]}
            if one == STEP:
                constants[key_of(keys.state(array, one))] = _step(state.count, where)
    objects: dict[str, bytes] = {}
    for group, params, said_of in _groups(settings, flat=keys.flat):
        named = said_of if keys.flat else {**said_of, "params": params}
        for setting, value in named.items():
            way = keys.setting(group, setting)
            ways[key_of(way)], objects[key_of(way)] = way, torch_save.stream(value)
    specs = (*made.specs, *(TensorSpec(key, "float32", ()) for key in constants))
    return replace(made, specs=specs, objects=objects, constants=constants, ways=ways)


def _step(count: int | None, where: str) -> bytes:
    if count is None or count > 1 << 24:
        raise FormatError(
            "torch counts updates in float32",
            where=where,
            equation=f"count({count})" + ("" if count is None else f" > {1 << 24}"),
            hint="convert the weights alone with --weights-only",
        )
    return struct.pack("<f", count)


def _groups(
    settings: Mapping[str, Mapping[str, Any]], *, flat: bool
) -> Iterator[tuple[int | str, list[str], Mapping[str, Any]]]:
    """Groups of arrays with equal settings, or each array on its own."""
    if flat:
        yield from ((array, [array], said) for array, said in settings.items())
        return
    found: list[tuple[Mapping[str, Any], list[str]]] = []
    for array, said in settings.items():
        same = next((names for other, names in found if other == said), None)
        if same is None:
            found.append((said, [array]))
        else:
            same.append(array)
    yield from ((number, names, said) for number, (said, names) in enumerate(found))


# --- weights ------------------------------------------------------------------------------------


def _megatron(
    model: Model, geometry: Geometry
) -> tuple[Layout, Mapping[str, tuple[megatron.Shard, ...]], Mapping[str, bytes]]:
    """What a job of this geometry stores, how its ranks cut it, and the objects that it asks for."""
    mesh = megatron.mesh(tp=geometry.tp, pp=geometry.pp, ep=geometry.ep, etp=geometry.etp)
    pipeline = megatron.stages(model.num_layers, geometry.pp, vpp=geometry.vpp, sizes=geometry.stages)
    vocab = next(block.sizes["vocab_size"] for block in model.of("embedding"))
    padded = megatron.padded_vocab_size(vocab, tp=geometry.tp, divisor=geometry.vocab_divisor)
    # The ranks' own layout refuses a geometry that the model cannot be cut by.
    megatron.layout(model, mesh, pipeline=pipeline, vocab_divisor=geometry.vocab_divisor)
    layer_keys = geometry.layer_keys
    if layer_keys == "auto":
        layer_keys = "stacked" if megatron.layers_alike(model) else "per_layer"
    form: dict[str, Any] = {"spec": geometry.spec, "layer_keys": layer_keys}
    return (
        megatron.checkpoint(model, padded_vocab=padded, **form),
        megatron.shards(model, mesh, pipeline=pipeline, padded_vocab=padded, **form),
        dict.fromkeys(megatron.extra_states(model, **form), _EMPTY),
    )


def _with_dtypes(layout: Layout, source: Checkpoint, dtype: str | None) -> Layout:
    """Each buffer in the asked dtype, or in the one that the source stores its tensors in."""
    stored: dict[Tensor, str] = {
        part.tensor: rule.dtype for rule in source.layout.rules for part in rule.parts
    }
    own = source.model.own_dtype
    return replace(
        layout,
        rules=tuple(
            replace(
                rule,
                dtype=(dtype if rule.parts[0].tensor not in own else None)
                or stored.get(rule.parts[0].tensor, rule.dtype),
            )
            for rule in layout.rules
        ),
    )
