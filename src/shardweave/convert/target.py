"""What a conversion writes: the form of the target, its arrays, and how they are cut into files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardweave import __version__
from shardweave.convert.source import FORMATS, Checkpoint
from shardweave.dialects import hf, megatron
from shardweave.errors import DtypeError, GeometryError
from shardweave.layout import Layout, Tensor
from shardweave.models import Model
from shardweave.store import native_files, safetensors, torch_dist_write, torch_save
from shardweave.store.manifest import Extent, Manifest, TensorSpec
from shardweave.store.native_manifest import About

_EMPTY = torch_save.stream([None])
"""An object without a value, as Megatron stores the extra state of a module that has none."""


@dataclass(frozen=True, slots=True)
class Target:
    """What to write.

    Attributes:
        format: ``"hf"``, ``"megatron"`` or ``"native"``.
        layout: Which array holds what; the arrays of rank 0.
        specs: The arrays, with the boxes that they are stored in.
        max_file_bytes: Where files end.
        objects: Keys of empty objects that are stored beside the arrays.
    """

    format: str
    layout: Layout
    specs: tuple[TensorSpec, ...]
    max_file_bytes: int
    objects: tuple[str, ...] = ()

    def allocate(self, root: Path) -> Manifest:
        """Lay out the files in an empty folder."""
        if self.format == "hf":
            return safetensors.allocate(root, self.specs, max_file_bytes=self.max_file_bytes)
        if self.format == "native":
            return native_files.allocate(root, self.specs, max_file_bytes=self.max_file_bytes)
        records = {"objects": dict.fromkeys(self.objects, _EMPTY)}
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
            about = About(config=config, software=f"shardweave {__version__}")
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
) -> Target:
    """Decide what to write.

    Args:
        source: What is converted.
        to: The format.
        geometry: Of a Megatron target. Other targets have none, and refuse one.
        dtype: Store all weights in this dtype; by default in the source's.
        stacked_experts: Whether a Hugging Face target stores the experts of a layer as one array.
        max_file_bytes: Start another file where one would grow beyond this.
    """
    if to not in FORMATS:
        raise GeometryError(
            "the target format is known",
            equation=f"{to!r} is not one of {', '.join(FORMATS)}",
            hint="name one",
        )
    model = source.model
    chunks: Mapping[str, tuple[megatron.Shard, ...]] = {}
    objects: tuple[str, ...] = ()
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
        layout = hf.layout(model, stacked_experts=stacked_experts)
    else:
        layout, chunks, objects = _megatron(model, geometry or Geometry())
    if dtype and model.scaled:
        raise DtypeError(
            "a dtype is asked of weights whose values are their own",
            where=str(source.manifest.root),
            equation=f"dtype({dtype}), and weights are float8_e4m3fn with scales of blocks",
            hint="leave --dtype out: quantised weights and their scales stay as they are",
        )
    layout = _with_dtypes(layout, source, dtype)
    specs = [
        TensorSpec(
            name,
            buffer.dtype,
            buffer.shape,
            tuple((shard.offset, shard.shape) for shard in chunks.get(name, ())),
        )
        for name, (buffer, _) in layout.arrays(0).items()
    ]
    return Target(to, layout, tuple(specs), max_file_bytes, objects)


def _megatron(
    model: Model, geometry: Geometry
) -> tuple[Layout, Mapping[str, tuple[megatron.Shard, ...]], tuple[str, ...]]:
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
        tuple(megatron.extra_states(model, **form)),
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
