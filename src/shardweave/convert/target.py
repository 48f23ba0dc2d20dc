"""What a conversion writes: what is asked for, and the arrays that this comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardweave.convert.checkpoint import Checkpoint, OptimizerState
from shardweave.convert.states import owners, state_rule, trained_part
from shardweave.errors import GeometryError
from shardweave.layout import Buffer, BufferRule, Layout, Tensor
from shardweave.layout.dtype import floating, lossless
from shardweave.store.manifest import Extent, Manifest, TensorSpec
from shardweave.store.torch_dcp import Keys

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of one box of an array."""


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


@dataclass(frozen=True, slots=True)
class Zero:
    """The DeepSpeed job that goes on from the target.

    Attributes:
        stage: The ZeRO stage, 1 to 3.
        dp: Data-parallel ranks; a native checkpoint loads at this number only.
        tp: Tensor-parallel ranks of AutoTP.
        grain: ``tp_grain_size`` of the DeepSpeed config.
        dtype: What the run computes in, at stage 3, where what is stored are masters; by default what the
            source stores its weights in, or its config names.
    """

    stage: int = 1
    dp: int = 1
    tp: int = 1
    grain: int = 1
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a target beside its format.

    Attributes:
        geometry: Of a Megatron target. Other targets have none, and refuse one.
        zero: Of a DeepSpeed target.
        keys: Under which keys a target of torch.distributed.checkpoint has what.
        dtype: Store all weights in this dtype; by default in the source's.
        stacked_experts: Whether a Hugging Face target stores the experts of a layer as one array.
        max_file_bytes: Start another file where one would grow beyond this.
        layout: Which shard of a rank holds what, where a target stores shards of ranks.
    """

    geometry: Geometry | None = None
    zero: Zero | None = None
    keys: Keys | None = None
    dtype: str | None = None
    stacked_experts: bool = False
    max_file_bytes: int = 5_000_000_000
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What to write.

    Attributes:
        format: The name of the format.
        layout: Which array holds what; as in a ``Checkpoint``.
        specs: The arrays, with the boxes that they are stored in.
        max_file_bytes: Where files end.
        allocate: Lays out the files in an empty folder.
        finish: Seals them, given their manifest, the checksums of each extent, the config that describes the
            weights (``config=``), and whether to wait for the disk (``fsync=``).
        constants: The bytes of arrays that are in no layout, by key: how many updates were made.
        fixed: All else that is written and known beforehand, by key; it makes two conversions the same.
        crc: Whether the files have a CRC-32 of each extent.
        own_digests: Whether the files have digests of their own.
    """

    format: str
    layout: Layout
    specs: tuple[TensorSpec, ...]
    max_file_bytes: int
    allocate: Callable[[Path], Manifest] = field(compare=False)
    finish: Callable[..., None] = field(compare=False)
    constants: Mapping[str, bytes] = field(default_factory=dict)
    fixed: Mapping[str, bytes] = field(default_factory=dict)
    crc: bool = False
    own_digests: bool = False


Facts = Mapping[Extent, Mapping[str, Any]]
"""The checksums of each extent, by their names."""


def specs_of(layout: Layout, boxes: Callable[[str, Buffer], Iterator[Box]] | None = None) -> list[TensorSpec]:
    """The arrays of a layout, and the boxes that each is stored in, which by default is one."""
    return [
        TensorSpec(key, buffer.dtype, buffer.shape, tuple(boxes(key, buffer)) if boxes else ())
        for key, (buffer, _) in layout.stored().items()
    ]


def with_dtypes(layout: Layout, source: Checkpoint, dtype: str | None) -> Layout:
    """Each buffer in the dtype that the source stores its tensors in, or weights in the one asked for."""
    stored: dict[Tensor, str] = {}
    for rule in source.layout.rules:
        for part in rule.parts:
            # Where only some weights of a family have a master, the others are stored as wide.
            before = stored.get(part.tensor, rule.dtype)
            stored[part.tensor] = before if lossless(rule.dtype, before) else rule.dtype
    # Integers never go through floats, and buffers are not computed in what weights are.
    weights = {
        tensor
        for tensor in set(source.model.tensors) - source.model.own_dtype
        if floating(stored.get(tensor, tensor.dtype)) and tensor.name not in source.buffers
    }
    return replace(
        layout,
        rules=tuple(
            replace(
                rule,
                dtype=(dtype if rule.parts[0].tensor in weights else None)
                or stored.get(rule.parts[0].tensor, rule.dtype),
            )
            for rule in layout.rules
        ),
    )


def state_rules(
    weights: Layout, state: OptimizerState, name: Callable[[str, str], str] = lambda rule, state: ""
) -> Iterator[BufferRule]:
    """The buffers of the states of the weights of a target.

    Args:
        weights: The weights as the target has them.
        state: The states that there are.
        name: What a buffer is called, from that of the weights and the state; by default
            ``optim/{name}/{state}``.

    Raises:
        UnknownNameError: Weights that the target stores as one have different states.
    """
    for rule in owners(weights):
        for kept, which in trained_part(weights, rule, state):
            yield state_rule(kept, which, name=name(rule.name, which))


def refuse_geometry(to: str, wanted: Wanted) -> None:
    """Refuse what only a Megatron target has, or only one of Hugging Face."""
    if wanted.geometry is not None:
        raise GeometryError(
            f"a {'Hugging Face' if to == 'hf' else to} checkpoint stores whole tensors",
            equation=f"to={to} with {wanted.geometry}",
            hint="leave out --tp, --pp, --ep and the like, or convert --to megatron",
        )
    refuse_stacked(to, wanted)


def refuse_stacked(to: str, wanted: Wanted) -> None:
    """Refuse what only a Hugging Face target chooses."""
    if wanted.stacked_experts and to != "hf":
        raise GeometryError(
            "only a Hugging Face checkpoint stores the experts of a layer as one array",
            equation=f"to={to} with stacked_experts(True)",
            hint="leave it out: each expert has its own key",
        )
