"""Every format into every format, at two layouts each, with the state of AdamW where the format has it.

A cell is a conversion. What it wrote is read again and compared with the truth, bit for bit; what cannot be
said is refused, with its reason. What real software reads of what is written here, each in its own test:
``test_deepspeed_resume``, ``test_megatron_optimizer``, ``test_dcp_resume``, ``test_convert``.

The table of docs/conversions.md is what this run saw: ``SHARDWEAVE_UPDATE_GOLDEN=1`` writes it.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import MODELS, NO_DECAY, STATES, STEP, Node, Truth, nodes, save_dcp, save_hf, truth

from shardweave.convert import Checkpoint, convert, open_checkpoint, prepare, states
from shardweave.errors import ShardweaveError
from shardweave.layout import Layout
from shardweave.store.read import Reader
from shardweave.store.torch_dcp import Keys

pytestmark = [pytest.mark.peer("transformers")]

PAGE = Path(__file__).parents[2] / "docs" / "conversions.md"
BEGIN, END = "<!-- made by tests/oracle/test_conversions.py -->", "<!-- end -->"


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A checkpoint of each row, made from those that torch and safetensors wrote."""
    config, place = MODELS[request.param], tmp_path_factory.mktemp(request.param)
    values = truth(config)
    first = save_dcp(place / "torch", values)
    (first / "config.json").write_text(json.dumps(config))
    found: dict[str, Any] = {"config": config, "truth": values, "rows": {}, "why": {}, "model": request.param}
    for node in nodes(request.param):
        folder = place / node.name.replace(" ", "_")
        if node.name == "hf":
            save_hf(folder, values)
            (folder / "config.json").write_text(json.dumps(config))
        elif node.name == "dcp by groups":
            folder = first
        else:
            try:
                go(first, folder, node)
            except ShardweaveError as error:
                found["why"][node.name] = error
                continue
        found["rows"][node.name] = folder
    return found


def go(src: Path, dst: Path, node: Node) -> Any:
    options = dict(node.options)
    if options.get("keys") == "flat":
        options["keys"] = Keys(flat=True)
    return convert(prepare(src, to=node.format, **options), dst, fsync=False)


def compare(source: Checkpoint, layout: Layout, wanted: dict[str, dict[str, torch.Tensor]]) -> set[str]:
    """Every element of every stored array with the truth, by plain indexing; the kinds that are there.

    Args:
        source: The checkpoint.
        layout: Its weights, or its states.
        wanted: By kind, the tensors by name.
    """
    seen: dict[str, dict[str, torch.Tensor]] = {}
    with Reader(source.manifest) as reader:
        for key, (buffer, positions) in layout.stored().items():
            array = words(
                torch.from_numpy(reader.load(key))
                if buffer.dtype != "bfloat16"
                else torch.from_numpy(reader.load(key).view("i2"))
            )
            separate = dict(zip(buffer.separate, positions, strict=True))
            for piece in buffer.pieces():
                index = len(piece.tensor.index)
                for turn in itertools.product(*(range(len(r)) for r in piece.box.dims[:index])):
                    at = [*(piece.at.dims[d][turn[d]] for d in range(index)), *piece.at.dims[index:]]
                    if any(at[d] != position for d, position in separate.items()):
                        continue
                    numbers = {n: piece.box.dims[d][turn[d]] for d, (n, _) in enumerate(piece.tensor.index)}
                    name, kind = named(piece.tensor.member(numbers), buffer.dtype)
                    box = piece.box.dims[index:]
                    found = array[
                        tuple(
                            at[d] if isinstance(at[d], int) else slice(at[d][0], at[d][-1] + 1)
                            for d in buffer.stacked
                        )
                    ]
                    expected = words(wanted[kind][name])
                    place = tuple(slice(r[0], r[-1] + 1, r.step) for r in box)
                    assert torch.equal(found, expected[place]), (key, name, kind, box)
                    masks = seen.setdefault(kind, {})
                    masks.setdefault(name, torch.zeros(expected.shape, dtype=torch.bool))[place] = True
    for kind, masks in seen.items():
        assert masks.keys() == wanted[kind].keys(), kind
        assert all(bool(mask.all()) for mask in masks.values()), kind
    return set(seen)


def words(values: torch.Tensor) -> torch.Tensor:
    """The bits of values, so that NaNs and signed zeros are told apart."""
    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])


def named(name: str, dtype: str) -> tuple[str, str]:
    """The weight and the kind of value that a tensor of a layout is."""
    if not name.startswith("optim/"):
        return name, "master" if dtype == "float32" else "weight"
    weight, _, state = name.removeprefix("optim/").rpartition("/")
    return weight, state


def outcome(folder: Path, node: Node, values: Truth, *, with_state: bool) -> str:
    """What is in a checkpoint, all of it compared with the truth."""
    source = open_checkpoint(folder)
    state = states(source)
    if state is None:
        assert not (node.state and with_state), "the state was lost"
        # What a row without masters has in full precision is what it has rounded.
        full = (
            values["master"] if with_state else {name: one.float() for name, one in values["weight"].items()}
        )
        compare(source, source.layout, {**values, "master": full})
        return "weights"
    kinds = compare(source, source.layout, values)
    kinds |= compare(source, state.layout, values)
    assert {*STATES, "master"} <= kinds, kinds
    assert ("weight" in kinds) == node.rounded, kinds
    assert set(state.counts.values()) == {STEP} and state.counts.keys() == state.weights.keys()
    for name, said in state.settings.items():
        decay = NO_DECAY["weight_decay"] if values["master"][name].dim() == 1 else 0.1
        assert (said["lr"], said["weight_decay"], said["eps"]) == (1e-3, decay, 1e-8), name
        assert tuple(said["betas"]) == (0.9, 0.95)
    assert state.settings.keys() == state.weights.keys()
    return "all"


SEEN: dict[tuple[str, str], set[str]] = {}


def kind(node: Node) -> str:
    """A format, or a stage of DeepSpeed's."""
    return node.name.split()[0] if node.format == "deepspeed" else node.format


@pytest.mark.parametrize("number", range(15))
def test_a_row(made: dict[str, Any], number: int, tmp_path: Path) -> None:
    """From one format and layout to all of them."""
    columns = nodes(made["model"])
    row = columns[number]
    if row.name in made["why"]:
        error = made["why"][row.name]
        assert error.hint, row.name
        SEEN.setdefault((kind(row), ""), set()).add(f"{made['model']}, {row.name}: {error.rule}")
        return
    src = made["rows"][row.name]
    outcome(src, row, made["truth"], with_state=row.state)
    for column in columns:
        dst = tmp_path / column.name.replace(" ", "_")
        if column.name in made["why"]:
            with pytest.raises(type(made["why"][column.name])):
                go(src, dst, column)
            assert not dst.exists()
            continue
        go(src, dst, column)
        found = outcome(dst, column, made["truth"], with_state=row.state)
        assert found == ("all" if row.state and column.state else "weights")
        SEEN.setdefault((kind(row), kind(column)), set()).add(found)


def test_the_page_says_what_was_seen(request: pytest.FixtureRequest) -> None:
    """Runs last in this file, when every row has been seen."""
    if len({row for row, column in SEEN if column}) < len({kind(node) for node in nodes("dense")}):
        pytest.skip("the rows of the matrix did not run in this process: run the whole file")
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    table = "\n" + shown() + "\n"
    if os.environ.get("SHARDWEAVE_UPDATE_GOLDEN"):
        PAGE.write_text(text[:begin] + table + text[end:])
    assert table == text[begin:end], "SHARDWEAVE_UPDATE_GOLDEN=1 accepts the new table"


def shown() -> str:
    """The table, formats by formats, and what is refused."""
    formats = list(dict.fromkeys(kind(node) for node in nodes("dense")))
    lines = ["| from \\ to | " + " | ".join(formats) + " |", "|---" * (len(formats) + 1) + "|"]
    for row in formats:
        cells = ["/".join(sorted(SEEN.get((row, column), {"refused"}))) for column in formats]
        lines.append(f"| **{row}** | " + " | ".join(cells) + " |")
    refused = sorted(one for (_, column), said in SEEN.items() if not column for one in said)
    return "\n".join(
        [*lines, "", "Refused, with the reason that the format gives:", "", *(f"- {one}" for one in refused)]
    )
