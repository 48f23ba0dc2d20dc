"""Universal checkpoints of DeepSpeed, laid out first and filled later: a folder a weight, a file a state.

``allocate`` lays out ``{tag}/zero/{name}/fp32.pt`` and one more file a state, each of them one array, so
that every byte is written once. ``finish`` seals them, and writes what is known beforehand,
``latest_universal`` last.

A tensor keeps its shape by default, which DeepSpeed 0.19.8 loads at every ZeRO stage, world size and
tensor-parallel degree. ``flat=True`` gives the form that its own converter writes from ZeRO-3, which only
stage 3 loads.

What DeepSpeed does at stage 3, and what is done about it: it takes the settings of the first group and one
count for *all* weights, and no states but ``exp_avg`` and ``exp_avg_sq``. Where that would change the
training, the entry that it reads them from is left out, so that stage 3 refuses the checkpoint (``KeyError:
'optimizer_state_dict'``) and the other stages load it; a flat one is refused here. No stage loads frozen
parameters or buffers from a universal checkpoint: they are in the file of model states, for whoever wants
them.

Source: deepspeed 0.19.8 ``checkpoint/universal_checkpoint.py``, ``checkpoint/ds_to_universal.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shardweave.errors import DtypeError, FormatError, MissingFileError
from shardweave.store import deepspeed_state, deepspeed_words, laid_out, torch_archive
from shardweave.store.deepspeed_state import MASTER, Description
from shardweave.store.laid_out import LaidOut
from shardweave.store.manifest import ITEMSIZE, Extent, Manifest, TensorSpec
from shardweave.store.paths import check_name
from shardweave.store.torch_archive import Bytes, Part, View

FORMAT: Final = "universal"
LATEST: Final = "latest_universal"
RECORDS: Final = (*deepspeed_state.RECORDS, "parts")
"""As `deepspeed_state.RECORDS`; and ``parts``: further entries of the files of a weight, by its name.
DeepSpeed reads ``cat_dim``, ``param_n_sub_params``, ``vocab_tensor`` and their like there, to cut the
weight for tensor parallelism."""

_STAGE3: Final = ("exp_avg", "exp_avg_sq")


def allocate(
    root: Path,
    tensors: Sequence[TensorSpec],
    *,
    records: Mapping[str, Any],
    tag: str = "universal",
    flat: bool = False,
) -> Manifest:
    """Lay out a universal checkpoint.

    Args:
        root: An existing folder; the checkpoint is the folder ``tag`` in it.
        tensors: Weights under the names of the training module, whole and in its order: trained ones in
            float32, which are the masters, others as they are; and states under ``optim/{name}/{state}``.
        records: As `RECORDS` says.
        tag: The name that ``load_checkpoint`` asks for.
        flat: Store tensors flat, as DeepSpeed's converter does from ZeRO-3.

    Returns:
        The manifest; the caller writes the row-major bytes of each extent at its ``start`` and then calls
        ``finish``. Its records are the given ones, ``tag`` and ``flat``.

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
    check_name(tag, where="tag")
    described = _described(tensors, records)
    if flat and (reason := _not_stage3(described)):
        raise FormatError(
            "a flat universal checkpoint is loaded by ZeRO-3, rightly",
            where=str(root),
            equation=reason,
            hint="DeepSpeed would train on with other settings; write it with shapes, or native ZeRO-3",
        )
    _beside(described, tag, flat)
    return laid_out.create(
        root,
        tensors,
        _files(described, tag, flat),
        format=FORMAT,
        records={**records, "tag": tag, "flat": flat},
    )


def finish(manifest: Manifest, checksums: Mapping[Extent, int] | None = None, *, fsync: bool = True) -> None:
    """Seal a checkpoint that ``allocate`` laid out; ``latest_universal`` comes last.

    It may be called again after it broke off.

    Args:
        manifest: As ``allocate`` returned it.
        checksums: ``zlib.crc32`` of extents' bytes where the caller has them; the others are read once.
        fsync: Wait until the disk has everything.

    Raises:
        MissingFileError, TruncatedError: A file is no longer as it was laid out.
    """
    records = dict(manifest.records)
    tag, flat = records.pop("tag"), records.pop("flat")
    specs = [TensorSpec(tensor.key, tensor.dtype, tensor.shape) for tensor in manifest.tensors.values()]
    described = _described(specs, records)
    laid_out.seal(manifest, _files(described, tag, flat), checksums, fsync=fsync)
    laid_out.write_beside(manifest.root, _beside(described, tag, flat), last=LATEST, fsync=fsync)


def _described(specs: Sequence[TensorSpec], records: Mapping[str, Any]) -> Description:
    described = deepspeed_state.describe(specs, records, known=RECORDS)
    for group in described.groups:
        if group.scalars:
            raise FormatError(
                "a state in a universal checkpoint is an array, or the count of updates",
                where=repr(group.names[0]),
                equation=f"its group has {sorted(group.scalars)}",
                hint="DeepSpeed has no place for it there; write its own form",
            )
        for name in group.names:
            weight = described.ranks[0][name]
            if MASTER in weight.states or weight.spec.dtype != "float32":
                raise DtypeError(
                    "a universal checkpoint holds the float32 master of a weight, and nothing rounded",
                    where=repr(name),
                    equation=f"dtype({weight.spec.dtype}), states{tuple(weight.states)}",
                    hint="store the master under the weight's own name",
                )
    return described


def _files(described: Description, tag: str, flat: bool) -> Iterator[LaidOut]:
    """All files that hold arrays."""
    extra = described.records.get("parts", {})
    rank = described.ranks[0]
    for group in described.groups:
        for name in group.names:
            weight = rank[name]
            for file, spec in {"fp32": weight.spec, **weight.states}.items():
                shape = (math.prod(spec.shape),) if flat else spec.shape
                view = View(_whole(spec), spec.dtype, shape)
                value = view if flat else {**deepspeed_words.carried(extra.get(name, {})), "param": view}
                yield LaidOut(f"{tag}/zero/{name}/{file}.pt", torch_archive.lay_out(value))
    untrained = {
        name: View(_whole(rank[name].spec), rank[name].spec.dtype, rank[name].spec.shape)
        for name in rank
        if name in described.frozen or name in described.buffers
    }
    if untrained:
        value = _model_states(described, untrained)
        yield LaidOut(f"{tag}/mp_rank_00_model_states.pt", torch_archive.lay_out(value))


def _whole(spec: TensorSpec) -> Bytes:
    numel = math.prod(spec.shape)
    return Bytes(numel * ITEMSIZE[spec.dtype], (Part(spec.key, 0, numel, 0),) if numel else ())


def _model_states(described: Description, module: Mapping[str, Any]) -> dict[str, Any]:
    rank = described.ranks[0]
    return deepspeed_words.model_states(
        described,
        module=module,
        param_shapes=[
            {name: deepspeed_words.size(rank[name].spec.shape) for name in group.names}
            for group in described.groups
        ],
        dp=1,
        tp=1,
        config=deepspeed_words.config(described, dtype="", zero={}),
        frozen=None,
    )


def _beside(described: Description, tag: str, flat: bool) -> dict[str, bytes]:
    """The files whose bytes are known."""
    files: dict[str, bytes] = {}
    if not (described.frozen or described.buffers):
        files[f"{tag}/mp_rank_00_model_states.pt"] = torch_archive.stream(_model_states(described, {}))
    files[f"{tag}/zero_pp_rank_0_mp_rank_00_model_states.pt"] = torch_archive.stream(
        _model_states(described, {})
    )
    for group in described.groups:
        if group.count is not None and not flat:
            data = torch_archive.stream(deepspeed_words.step(group.count))
            files |= {f"{tag}/zero/{name}/step.pt": data for name in group.names}
    files[f"{tag}/zero/optimizer_state.pt"] = torch_archive.stream(_optimizer_state(described))
    files[LATEST] = tag.encode()
    return files


def _optimizer_state(described: Description) -> dict[str, Any]:
    """What is said once: for stages 1 and 2 a group's settings, for stage 3 those of all and the count."""
    groups = described.groups if any(group.settings for group in described.groups) else ()
    params = deepspeed_words.param_groups(groups, [[number] for number in range(len(groups))])
    value = {
        **deepspeed_words.optimizer_states(described, ""),
        "zero_stage": deepspeed_words.stage(1),
        "ds_version": deepspeed_words.VERSION,
        "param_groups": params,
    }
    if not _not_stage3(described):
        state = {"step": deepspeed_words.step(described.groups[0].count or 0)}
        value["optimizer_state_dict"] = {"state": {0: state}, "param_groups": params[:1]}
    return value


def _not_stage3(described: Description) -> str:
    """Why DeepSpeed would go on wrongly from this at stage 3; empty if it would not."""
    first, *others = described.groups
    for other in others:
        if other.settings != first.settings or other.count != first.count:
            return (
                f"groups differ in settings or counts: {_differ(first.settings, other.settings) or 'counts'}"
            )
    for group in described.groups:
        if group.count is None or set(group.states) != set(_STAGE3):
            return f"states{group.states}, updates({group.count}); it takes {_STAGE3} and a count"
    return "" if first.settings else "the settings of the optimizer are not known"


def _differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    return ", ".join(sorted(key for key in {*a, *b} if a.get(key) != b.get(key)))
