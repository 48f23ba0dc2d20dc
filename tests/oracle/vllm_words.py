"""The words of recorded vLLM parameters, and ours: what the tests of its layouts compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from shardweave.layout import PAD, Buffer, Dim, Layout, Run


def by_case(cases: Sequence[Mapping[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


def word(name: str) -> str:
    """The name of a tensor as the label of a run."""
    return name.replace("{expert}", "expert")


def said(entry: Mapping[str, Any]) -> tuple[tuple[int, ...], list[Dim] | None]:
    """Shape and dims of a recorded parameter, a fused dim labelled by the full names of its tensors."""
    if entry["dims"] is None:
        return tuple(entry["shape"]), None
    label = {None: PAD, -1: "", **{i: word(name) for i, name in enumerate(entry["of"])}}
    dims = [
        Dim(Run(label[i], start, count, step) for i, start, count, step in runs) for runs in entry["dims"]
    ]
    return tuple(entry["shape"]), dims


def held(buffer: Buffer, positions: Sequence[int]) -> tuple[tuple[int, ...], list[Dim], set[str]]:
    """The same of one array of ours, and the tensors that it may hold."""
    tensor = buffer.parts[0].tensor
    index = [name for name, _ in tensor.index]
    at = {index[i]: buffer.dims[i][p][1] for i, p in zip(buffer.separate, positions, strict=True)}
    full = {part.label: part.tensor.name for part in buffer.parts}
    for name, number in at.items():
        full = {label: text.replace(f"{{{name}}}", str(number)) for label, text in full.items()}
    fused = len(buffer.parts) > 1

    def labelled(dim: Dim) -> Dim:
        if not fused or dim.labels in ((), ("",)):
            return dim
        return Dim(
            run if run.label is PAD else Run(word(full[run.label]), run.start, run.count, run.step)
            for run in dim.runs
        )

    return buffer.shape, [labelled(buffer.dims[i]) for i in buffer.stacked], set(full.values())


def compare(layout: Layout, rank: int, recorded: Mapping[str, Mapping[str, Any]]) -> None:
    ours = layout.arrays(rank)
    assert set(ours) == set(recorded), f"rank {rank}"
    for name, (buffer, positions) in ours.items():
        shape, dims, tensors = held(buffer, positions)
        recorded_shape, recorded_dims = said(recorded[name])
        assert shape == recorded_shape, f"rank {rank}, {name}"
        if recorded_dims is None:
            assert any(dim == Dim([Run(PAD, 0, len(dim))]) for dim in dims), f"rank {rank}, {name}: {dims}"
        else:
            assert dims == recorded_dims, f"rank {rank}, {name}"
            assert tensors == set(recorded[name]["of"]), f"rank {rank}, {name}"


def ranks_of(case: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    size = int(np.prod([case["deployment"].get(axis, 1) for axis in ("tp", "pp", "dp")]))
    for rank in range(size):
        yield (
            rank,
            {
                name: entry
                for name, entries in case["parameters"].items()
                for entry in entries
                if rank in entry["ranks"]
            },
        )
