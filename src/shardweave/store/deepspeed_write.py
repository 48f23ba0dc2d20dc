"""DeepSpeed's own checkpoints of ZeRO 1, 2 and 3, laid out first and filled later.

``allocate`` lays out the files of every rank of a run: model states, and optimizer states in flat groups,
padded and cut as ZeRO cuts them. ``finish`` seals them and writes ``latest`` last. The engine that loads
them has the same stage, degrees and dtype, the same groups of parameters, and the same options as the
`Zero` says.

Files of mixtures of experts (``layer_*_expert_*``) and of pipelines (``layer_*-model_states``) are not
written.

Source: deepspeed 0.19.8 ``runtime/engine.py``, ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final

from shardweave.errors import ConfigError, DtypeError, FormatError, MissingFileError
from shardweave.store import deepspeed_state, deepspeed_words, laid_out, torch_archive
from shardweave.store.deepspeed_flat import (
    FlatGroup,
    Piece,
    SlicedGroup,
    round_robin,
    sliced,
    sub_groups,
    weight_alignment,
)
from shardweave.store.deepspeed_state import MASTER, Description, Group, Weight
from shardweave.store.laid_out import LaidOut
from shardweave.store.manifest import ITEMSIZE, Extent, Manifest, TensorSpec
from shardweave.store.paths import check_name
from shardweave.store.torch_archive import Bytes, Part, View

FORMAT: Final = "deepspeed"
LATEST: Final = "latest"
RECORDS: Final = deepspeed_state.RECORDS
_DTYPES: Final = ("bfloat16", "float16", "float32")
_OPTIONS: Final = ("sub_group_size", "round_robin_gradients", "parameter_alignment")
_MASTER_BYTES: Final = ITEMSIZE["float32"]


@dataclass(frozen=True, slots=True)
class Zero:
    """The run that loads a checkpoint.

    Attributes:
        stage: Of ZeRO, 1 to 3.
        dp: Ranks that optimizer states are cut over: data-parallel, times sequence-parallel.
        tp: Tensor-parallel ranks.
        dtype: Of the weights in training.
        sub_group_size: As in ``zero_optimization``; of stage 3.
        round_robin_gradients: As in ``zero_optimization``; of stages 1 and 2.
        parameter_alignment: As in ``zero_optimization``; of stages 1 and 2.
    """

    stage: int
    dp: int
    tp: int = 1
    dtype: str = "bfloat16"
    sub_group_size: int = 1_000_000_000
    round_robin_gradients: bool = False
    parameter_alignment: bool = False

    def __post_init__(self) -> None:
        wrong = (
            f"stage({self.stage}) is not 1, 2 or 3" if self.stage not in (1, 2, 3)
            else f"dp({self.dp}), tp({self.tp}): a degree is below 1" if min(self.dp, self.tp) < 1
            else f"dtype({self.dtype}) is not one of {', '.join(_DTYPES)}" if self.dtype not in _DTYPES
            else f"sub_group_size({self.sub_group_size}) < 0" if self.sub_group_size < 0
            else "options of stages 1 and 2 at stage 3"
            if self.stage == 3 and (self.round_robin_gradients or self.parameter_alignment)
            else ""
        )  # fmt: skip
        if wrong:
            raise ConfigError(
                "a ZeRO checkpoint is of a run that DeepSpeed can start",
                equation=wrong,
                hint="give the degrees and options of the configuration that will load it",
            )


def allocate(
    root: Path,
    tensors: Sequence[TensorSpec],
    *,
    zero: Zero,
    records: Mapping[str, Any],
    tag: str = "",
) -> Manifest:
    """Lay out a checkpoint of a ZeRO run.

    Args:
        root: An existing folder; the checkpoint is the folder ``tag`` in it.
        tensors: Weights under the names of the training module, in its order, and states under
            ``optim/{name}/{state}`` in float32, among them ``master``; of tensor-parallel rank k, where
            there are several, ``{name}@{k}`` and ``optim/{name}/{state}@{k}``. At stages 1 and 2 trained
            weights have the dtype of the run; without any master only weights are written, which an engine
            loads with ``load_optimizer_states=False``. At stage 3 trained weights are the float32 masters
            themselves, and there is no ``master``.
        zero: The run that will load it.
        records: As `deepspeed_state.RECORDS` says.
        tag: The name that ``load_checkpoint`` asks for; by default ``global_step`` with the number of
            updates.

    Returns:
        The manifest; the caller writes the row-major bytes of each extent at its ``start`` and then calls
        ``finish``. Its records are the given ones, ``tag`` and ``zero``.

    Raises:
        MissingFileError, ExistsError: The folder is not there, or holds such a checkpoint.
        FormatError, UnknownNameError, DtypeError, PathError: The format cannot hold the tensors or records.
            Nothing was written.
    """
    root = Path(root)
    if not root.is_dir():
        raise MissingFileError(
            "a checkpoint is laid out in an existing folder", where=str(root), hint="create it first"
        )
    described = deepspeed_state.describe(tensors, records, tp=zero.tp)
    _check(described, zero)
    counts = [group.count for group in described.groups if group.count is not None]
    tag = tag or f"global_step{max(counts, default=0)}"
    check_name(tag, where="tag")
    return laid_out.create(
        root,
        tensors,
        _files(described, zero, tag),
        format=FORMAT,
        records={**records, "tag": tag, "zero": asdict(zero)},
    )


def finish(manifest: Manifest, checksums: Mapping[Extent, int] | None = None, *, fsync: bool = True) -> None:
    """Seal a checkpoint that ``allocate`` laid out; ``latest`` comes last.

    It may be called again after it broke off.

    Args:
        manifest: As ``allocate`` returned it.
        checksums: ``zlib.crc32`` of extents' bytes where the caller has them; the others are read once.
        fsync: Wait until the disk has everything.

    Raises:
        MissingFileError, TruncatedError: A file is no longer as it was laid out.
    """
    records = dict(manifest.records)
    tag, zero = records.pop("tag"), Zero(**records.pop("zero"))
    specs = [TensorSpec(tensor.key, tensor.dtype, tensor.shape) for tensor in manifest.tensors.values()]
    described = deepspeed_state.describe(specs, records, tp=zero.tp)
    laid_out.seal(manifest, _files(described, zero, tag), checksums, fsync=fsync)
    laid_out.write_beside(manifest.root, {LATEST: tag.encode()}, last=LATEST, fsync=fsync)


def _check(described: Description, zero: Zero) -> None:
    """Refuse what the engine of such a run would not load, or load as something else."""
    for rank in described.ranks:
        for name in rank:
            if "deepspeed_moe." in name:
                raise FormatError(
                    "weights of a ZeRO checkpoint are those of a dense model",
                    where=repr(name),
                    equation="it belongs to a mixture of experts of DeepSpeed's own",
                    hint="its experts lie in files of their own, which are not written; store it as HF",
                )
        for group in described.groups:
            for name in group.names:
                _check_trained(name, rank[name], bool(group.states), zero)
    for group in described.groups:
        if group.states and "lr" not in group.settings:
            raise FormatError(
                "states of an optimizer go with its settings",
                where=repr(group.names[0]),
                equation=f"the settings of its group are {sorted(group.settings)}",
                hint="DeepSpeed takes them from the checkpoint; give lr, betas, eps and weight_decay",
            )
    if not any(group.names for group in described.groups):
        raise FormatError(
            "a ZeRO checkpoint has weights that are trained",
            equation="no group holds a weight",
            hint="an engine without an optimizer writes plain model states; export the model to HF",
        )
    if len({_with_masters(described, group.names) for group in described.groups}) > 1:
        raise FormatError(
            "all groups of a ZeRO checkpoint have masters, or none has",
            equation="some have",
            hint="a master is the weight in float32 where training had no other",
        )


def _check_trained(name: str, weight: Weight, states: bool, zero: Zero) -> None:
    expected = "float32" if zero.stage == 3 else zero.dtype
    if weight.spec.dtype != expected or (zero.stage == 3 and MASTER in weight.states):
        raise DtypeError(
            f"a trained weight at stage {zero.stage} "
            + ("is its float32 master" if zero.stage == 3 else "has the dtype of the run"),
            where=repr(weight.spec.key),
            equation=f"dtype({weight.spec.dtype}) != {expected}, or a master beside it",
            hint="convert it, or name another dtype of the run",
        )
    if states and zero.stage < 3 and MASTER not in weight.states:
        raise FormatError(
            "states at stages 1 and 2 go with a float32 master",
            where=repr(weight.spec.key),
            equation=f"states{tuple(weight.states)}",
            hint="the master of a weight is the weight in float32 where training had no other",
        )


def _with_masters(described: Description, names: Sequence[str]) -> bool:
    return all(MASTER in described.ranks[0][name].states for name in names)


# --- files ------------------------------------------------------------------------------------------


def _files(described: Description, zero: Zero, tag: str) -> Iterator[LaidOut]:
    prefix = "bf16_" if zero.dtype == "bfloat16" else ""
    optimizer = zero.stage == 3 or _with_masters(described, described.groups[0].names)
    model = _model3 if zero.stage == 3 else _model12
    states = _optimizer3 if zero.stage == 3 else _optimizer12
    for tp_rank, weights in enumerate(described.ranks):
        of_tp = f"mp_rank_{tp_rank:02d}"
        for rank in range(zero.dp):
            if not rank or zero.stage == 3:
                name = f"zero_pp_rank_{rank}_{of_tp}" if zero.stage == 3 else of_tp
                value = model(described, weights, zero, rank)
                yield LaidOut(f"{tag}/{name}_model_states.pt", torch_archive.lay_out(value))
            if optimizer:
                value = {
                    "optimizer_state_dict": states(described, weights, zero, rank),
                    "ds_config": _config(described, zero),
                    "ds_version": deepspeed_words.VERSION,
                }
                name = f"{prefix}zero_pp_rank_{rank}_{of_tp}_optim_states.pt"
                yield LaidOut(f"{tag}/{name}", torch_archive.lay_out(value))


def _config(described: Description, zero: Zero) -> dict[str, Any]:
    """The configuration, in which what decides how weights lie is true of these files."""
    given = described.records.get(deepspeed_state.MODEL_STATES, {}).get("ds_config")
    before = given.get("zero_optimization") if isinstance(given, Mapping) else None
    named = before if isinstance(before, Mapping) else {}
    options = {
        field.name: getattr(zero, field.name)
        for field in fields(Zero)
        if field.name in _OPTIONS and (field.name in named or getattr(zero, field.name) != field.default)
    }
    return deepspeed_words.config(described, dtype=zero.dtype, zero={"stage": zero.stage, **options})


def _whole(weight: Weight, *, copy: bool = False) -> View:
    spec, numel = weight.spec, weight.numel
    parts = (Part(spec.key, 0, numel, 0, copy),) if numel else ()
    return View(Bytes(numel * ITEMSIZE[spec.dtype], parts), spec.dtype, spec.shape)


def _shapes(weights: Mapping[str, Weight], names: Sequence[str]) -> dict[str, Any]:
    return {name: deepspeed_words.size(weights[name].spec.shape) for name in names}


def _model12(described: Description, weights: Mapping[str, Weight], zero: Zero, rank: int) -> dict[str, Any]:
    """Model states at stages 1 and 2: all weights, and from stage 2 on the frozen ones once more by name."""
    module = {name: _whole(weight) for name, weight in weights.items()}
    frozen = _shapes(weights, described.frozen), {name: module[name] for name in described.frozen}
    return deepspeed_words.model_states(
        described,
        module=module,
        param_shapes=[_shapes(weights, names) for names in _orders(described, zero)],
        dp=zero.dp,
        tp=zero.tp,
        config=_config(described, zero),
        frozen=frozen if zero.stage == 2 else None,
    )


def _model3(described: Description, weights: Mapping[str, Weight], zero: Zero, rank: int) -> dict[str, Any]:
    """Model states of a rank at stage 3: of parameters only the places, of frozen ones the rank's ranges."""
    fragments: dict[str, View] = {}
    module: dict[str, View] = {}
    for name, weight in weights.items():
        if name in described.buffers:
            module[name] = _whole(weight, copy=rank > 0)
            continue
        frozen, slot = name in described.frozen, sliced(weight.numel, zero.dp)
        dtype = weight.spec.dtype if frozen else zero.dtype
        module[name] = View(Bytes(0), dtype, (0,))
        if frozen:
            start, stop = rank * slot, min((rank + 1) * slot, weight.numel)
            parts = (Part(weight.spec.key, start, stop, 0),) if start < stop else ()
            fragments[name] = View(Bytes(slot * ITEMSIZE[dtype], parts), dtype, (slot,))
    return deepspeed_words.model_states(
        described,
        module=module,
        param_shapes=[_shapes(weights, names) for _, names in _sub_groups(described, weights, zero)],
        dp=zero.dp,
        tp=zero.tp,
        config=_config(described, zero),
        frozen=(_shapes(weights, described.frozen), fragments),
    )


def _orders(described: Description, zero: Zero) -> list[tuple[str, ...]]:
    """The weights of each flat group at stages 1 and 2, in their order there."""
    if not zero.round_robin_gradients:
        return [group.names for group in described.groups]
    return [
        tuple(group.names[number] for number in round_robin(len(group.names), zero.dp))
        for group in described.groups
    ]


def _sub_groups(
    described: Description, weights: Mapping[str, Weight], zero: Zero
) -> list[tuple[int, tuple[str, ...]]]:
    """The sub-groups of stage 3, each with the number of its group."""
    return [
        (number, group.names[found.start : found.stop])
        for number, group in enumerate(described.groups)
        for found in sub_groups(
            [weights[name].numel for name in group.names], dp=zero.dp, size=zero.sub_group_size
        )
    ]


def _flat(
    weights: Mapping[str, Weight], names: Sequence[str], pieces: Sequence[Piece], numel: int, state: str
) -> View:
    """A range of a flat group of ``numel`` elements, of one state of its weights; of ``""`` the weights."""
    parts = []
    for piece in pieces:
        weight = weights[names[piece.number]]
        spec = weight.states[state] if state else weight.spec
        parts.append(Part(spec.key, piece.start, piece.stop, piece.at * _MASTER_BYTES))
    return View(Bytes(numel * _MASTER_BYTES, tuple(parts)), "float32", (numel,))


def _state(group: Group, views: Callable[[str], View]) -> dict[str, Any]:
    """What the optimizer keeps of one flat tensor."""
    count = {} if group.count is None else {"step": deepspeed_words.step(group.count)}
    scalars = deepspeed_words.carried(group.scalars)
    return {**count, **{state: views(state) for state in group.states}, **scalars}


def _optimizer12(
    described: Description, weights: Mapping[str, Weight], zero: Zero, rank: int
) -> dict[str, Any]:
    """Optimizer states of a rank at stages 1 and 2; masters are without padding, states with it."""
    alignment = weight_alignment(zero.dtype) if zero.parameter_alignment else 1
    masters, paddings, alignments, slices = [], [], [], []
    states: dict[int, dict[str, Any]] = {}
    for number, (group, names) in enumerate(zip(described.groups, _orders(described, zero), strict=True)):
        flat = FlatGroup.of([weights[name].numel for name in names], dp=zero.dp, alignment=alignment)
        pieces, padding = list(flat.pieces(rank)), flat.padding(rank)
        view = partial(_flat, weights, names, pieces)
        masters.append(view(flat.range_numel - padding, MASTER))
        paddings.append(padding)
        alignments.append(list(flat.paddings))
        slices.append({names[p.number]: deepspeed_words.fragment(p.stop - p.start, p.at) for p in pieces})
        if group.states:
            states[number] = _state(group, partial(view, flat.range_numel))
    count = len(described.groups)
    return {
        **deepspeed_words.optimizer_states(described, zero.dtype),
        **deepspeed_words.info(described),
        "base_optimizer_state": {
            "state": states,
            "param_groups": deepspeed_words.param_groups(described.groups, [[n] for n in range(count)]),
        },
        "single_partition_of_fp32_groups": masters,
        "zero_stage": deepspeed_words.stage(zero.stage),
        "group_paddings": paddings,
        "param_alignment_paddings": alignments,
        "partition_count": [zero.dp] * count,
        "ds_version": deepspeed_words.VERSION,
        "param_slice_mappings": slices,
    }


def _optimizer3(
    described: Description, weights: Mapping[str, Weight], zero: Zero, rank: int
) -> dict[str, Any]:
    """Optimizer states of a rank at stage 3, where a flat tensor is a sub-group."""
    masters: list[View] = []
    states: dict[int, dict[str, Any]] = {}
    numbers: list[list[int]] = [[] for _ in described.groups]
    for sub_group, (number, names) in enumerate(_sub_groups(described, weights, zero)):
        group = described.groups[number]
        flat = SlicedGroup(tuple(weights[name].numel for name in names), zero.dp)
        view = partial(_flat, weights, names, list(flat.pieces(rank)), flat.range_numel)
        numbers[number].append(sub_group)
        masters.append(view(""))
        if group.states:
            states[sub_group] = _state(group, view)
    return {
        "loss_scaler": deepspeed_words.loss_scaler(zero.dtype),
        "dynamic_loss_scale": zero.dtype == "float16",
        "overflow": False,
        **deepspeed_words.optimizer_states(described, zero.dtype),
        "zero_stage": deepspeed_words.stage(zero.stage),
        "partition_count": zero.dp,
        "optimizer_state_dict": {
            "state": states,
            "param_groups": deepspeed_words.param_groups(described.groups, numbers),
        },
        "fp32_flat_groups": masters,
    }
