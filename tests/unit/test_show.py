"""Pictures: what they say is what the layout says, and what they look like is on file.

python tests/unit/test_show.py     writes the golden files anew
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from shardweave.dialects import hf, megatron, vllm
from shardweave.errors import UnknownNameError
from shardweave.layout import (
    PAD,
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Run,
    Tensor,
    along,
    chunk,
    concat,
    even,
    pad,
    take,
    whole,
)
from shardweave.layout.buffer import table_of
from shardweave.models import Model, from_config
from shardweave.plan import Plan, cost, plan
from shardweave.show import svg, text
from shardweave.show.choose import drawn_dim
from shardweave.show.flow import flow
from shardweave.show.grids import area_drawing
from shardweave.show.model import Band, Panel, drawing, panels, rows_of
from shardweave.show.words import dim_names, numbers

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/data/golden/show"
SVG = "{http://www.w3.org/2000/svg}"


def dense() -> Model:
    return from_config(ROOT / "tests/data/mc_gqa_truth_hf/config.json", dtype="float32")


def sparse(experts: int = 6) -> Model:
    config = json.loads((ROOT / "tests/data/mc_moe_truth_hf/config.json").read_text())
    return from_config(config | {"num_local_experts": experts}, dtype="float32")


def uneven() -> Layout:
    """Uneven, empty, padded and shared parts, stepped experts, and a scalar, over 4 x 2 ranks."""
    mesh = Mesh((("tp", 4), ("ep", 2)))
    index = (("layer", Dim([Run("", 3, 5)])), ("expert", whole(7)))
    experts = Tensor("layers.{layer}.experts.{expert}.w2.weight", (5, 6), "float32", index)
    q, kv = Tensor("q_proj.weight", (12, 6), "float32"), Tensor("kv.weight", (5, 6), "float32")
    vocab = Tensor("embed_tokens.weight", (19, 6), "float32")

    def fused(r: int) -> Dim:
        return concat(chunk(whole(12, "q"), 4, r, block=4), whole(5, "kv"))

    rules = (
        BufferRule(
            "fused", (Part(q, "q"), Part(kv, "kv", replica=True)), (along(mesh, "tp", fused), whole(6))
        ),
        BufferRule(
            "vocab", (Part(vocab),), (along(mesh, "tp", lambda r: even(pad(whole(19), 24), 4, r)), whole(6))
        ),
        BufferRule(
            "experts.{layer}.{expert}",
            (Part(experts),),
            (index[0][1], along(mesh, "ep", lambda r: take(whole(7), range(r, 7, 2))), whole(5), whole(6)),
        ),
        BufferRule(
            "short",
            (Part(Tensor("short.bias", (6,), "float32")),),
            (along(mesh, "tp", lambda r: chunk(whole(6), 4, r)),),
        ),
        BufferRule("scale", (Part(Tensor("scale", (), "float32")),), ()),
    )
    return Layout("uneven", mesh, rules)


def layouts() -> dict[str, Layout]:
    return {
        "uneven": uneven(),
        "hf": hf.layout(dense()),
        "hf stacked": hf.layout(sparse(), stacked_experts=True),
        "torch_dist": megatron.checkpoint(dense(), padded_vocab=256),
        "megatron": megatron.layout(dense(), megatron.mesh(tp=4, pp=2, dp=2)),
        "megatron moe": megatron.layout(sparse(), megatron.mesh(tp=2, dp=3, ep=3, etp=2)),
        "vllm": vllm.layout(dense(), vllm.mesh(tp=4, pp=2, offset=5)),
        "vllm moe": vllm.layout(
            sparse(), vllm.mesh(tp=4, ep=4), expert_parallel=True, placement="round_robin", vocab_multiple=64
        ),
    }


def reshard() -> Plan:
    src = megatron.layout(dense(), megatron.mesh(tp=4, dp=2))
    return plan(src, vllm.layout(dense(), vllm.mesh(tp=2, pp=2, offset=3)))


# --- what a picture says ------------------------------------------------------------------------


def spelled(band: Band) -> list[tuple[str | None, int]]:
    if band.label is PAD:
        return [(PAD, 0)] * band.count
    return [(band.label, band.start + i * band.step) for i in range(band.count)]


@pytest.mark.parametrize("name", layouts())
def test_rows_say_what_each_rank_stores(name: str) -> None:
    layout = layouts()[name]
    for rule in layout.rules:
        for d in range(rule.parts[0].tensor.num_dims):
            seen: list[int] = []
            for row in rows_of(layout, rule, d):
                said = [item for band in row.bands for item in spelled(band)]
                assert [band.at for band in row.bands] == [
                    sum(b.count for b in row.bands[:i]) for i in range(len(row.bands))
                ]
                for rank in row.ranks:
                    buffer = rule.at(layout.mesh, rank)
                    assert buffer is not None
                    stored = list(buffer.dims[d])
                    assert [i for _, i in said] == [i for _, i in stored]
                    assert [label is PAD for label, _ in said] == [label is PAD for label, _ in stored]
                    if d in rule.fused:
                        assert said == stored
                seen += row.ranks
            assert sorted(seen) == [r for r in layout.mesh.ranks if rule.at(layout.mesh, r) is not None]


@pytest.mark.parametrize("name", layouts())
def test_a_replica_is_what_two_rows_hold(name: str) -> None:
    layout = layouts()[name]
    for rule in layout.rules:
        d = drawn_dim(rule)
        held = Counter(item for dim in set(table_of(rule.dims[d]) if rule.dims else ()) for item in set(dim))
        for row in rows_of(layout, rule, d):
            for band in row.bands:
                if band.label is not PAD and band.step == 1:
                    label = band.label if d in rule.fused else ""
                    assert {held[label, i] > 1 for _, i in spelled(band)} == {band.replica}, (rule.name, band)


def test_ranks_without_kv_are_said_to_have_none() -> None:
    sizes = {"num_attention_heads": 64, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 512}
    config = json.loads((ROOT / "tests/data/mc_gqa_truth_hf/config.json").read_text()) | sizes
    layout = megatron.layout(from_config(config, dtype="float32"), megatron.mesh(tp=8))
    (panel,) = panels(layout, select="linear_qkv.weight", head_dim=128)
    assert [row.missing for row in panel.rows] == [("k", "v")] * 3 + [()] + [("k", "v")] * 3 + [()]
    assert [band.what for band in panel.rows[0].bands] == ["q 8.5 heads from 0"]
    assert [band.what for band in panel.rows[7].bands] == ["q 6.5 heads from 57.5", "k head 1", "v head 1"]


def test_ribbons_join_the_same_elements_and_fill_every_destination() -> None:
    found = flow(reshard(), select="qkv_proj.weight", most_sections=9)
    assert [section.title for section in found.sections] == ["layers 0-1", "layers 2-3"]
    for section in found.sections:
        filled: Counter[tuple[int, int]] = Counter()
        for one in section.ribbons:
            src, dst = (
                [item for band in block.row.bands for item in spelled(band)]
                for block in (section.src[one.src], section.dst[one.dst])
            )
            taken = src[one.src_at : one.src_at + one.src_size]
            assert taken == dst[one.dst_at : one.dst_at + one.dst_size]
            assert {label for label, _ in taken} == {one.label}
            filled.update((one.dst, place) for place in range(one.dst_at, one.dst_at + one.dst_size))
        assert filled == Counter((i, p) for i, block in enumerate(section.dst) for p in range(block.row.size))


def test_a_plan_of_anything_is_drawn_whole() -> None:
    """Scalars, stepped experts, padding and shared parts on their way to one rank."""
    src = uneven()
    made = plan(
        src, Layout("whole", Mesh(()), tuple(BufferRule(t.name, (Part(t),), t.dims) for t in src.tensors))
    )
    found = flow(made, most_sections=99)
    assert found.hidden == 0
    labels = {one.label for section in found.sections for one in section.ribbons}
    assert labels == {"q", "kv", "embed", "down", "short", "scale"}
    ET.fromstring(svg.plan_picture(made))
    assert "scale" in text.plain(text.plan_picture(made, "scale"))


def test_copies_that_are_not_drawn_are_counted() -> None:
    found = flow(reshard(), select="qkv_proj.weight", most=2, most_sections=1)
    whole_flow = flow(reshard(), select="qkv_proj.weight")
    assert found.hidden == 1
    assert found.sections[0].hidden + len(found.sections[0].ribbons) == len(whole_flow.sections[0].ribbons)
    assert found.sections[0].hidden > 0


def test_rows_that_are_not_drawn_are_counted() -> None:
    layout = megatron.layout(dense(), megatron.mesh(tp=4, pp=4))
    (panel,) = panels(layout, select="linear_qkv.weight", most=5)
    assert (len(panel.rows), panel.hidden) == (5, 11)
    assert "… 11 more rows" in text.plain(text.layout_picture(layout, select="linear_qkv.weight", most=5))
    assert "… 11 more rows" in svg.layout_picture(layout, select="linear_qkv.weight", most=5)


def test_placed_bands_lie_at_their_indices() -> None:
    (panel,) = panels(uneven(), select="experts.{layer}.{expert}")
    assert panel.placed
    assert [[at for at, _ in panel.places(row)] for row in panel.rows] == [[0, 2, 4, 6], [1, 3, 5]]
    (panel,) = panels(uneven(), select="vocab")
    assert [(at, band.what) for at, band in panel.places(panel.rows[3])] == [
        (18, "embed row 18"),
        (19, "pad 5"),
    ]
    (panel,) = panels(layouts()["megatron"], select="embed")
    assert [(at, band.what) for at, band in panel.places(panel.rows[2])] == [(192, "pad 128")]


def test_a_rank_that_holds_nothing_has_a_row() -> None:
    (panel,) = panels(uneven(), select="short")
    assert [band.what for row in panel.rows for band in row.bands] == [
        f"short elements {n}" for n in ("0-1", "2-3", "4-5")
    ]
    assert (panel.rows[3].name, panel.rows[3].bands) == ("tp 3 (ranks 3, 7)", ())


def test_a_dim_is_chosen_by_name() -> None:
    rule = uneven().rules[2]
    assert dim_names(rule.parts[0].tensor) == ("layers", "experts", "rows", "columns")
    assert [drawn_dim(rule, dim) for dim in (None, "layers", "columns")] == [1, 0, 3]
    with pytest.raises(UnknownNameError, match="'heads' is not among layers, experts, rows, columns"):
        drawn_dim(rule, "heads")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([3], "3"),
        ([0, 1], "0, 1"),
        ([0, 1, 2, 5], "0-2, 5"),
        (range(0, 80, 8), "0, 8, ... 10 in all"),
        ([], ""),
    ],
)
def test_numbers_in_few_words(values: list[int], said: str) -> None:
    assert numbers(values) == said


# --- choosing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("select", "names"),
    [
        ("q", ["fused"]),
        ("kv", ["fused"]),
        ("embed", ["vocab"]),
        ("w2", ["experts.{layer}.{expert}"]),
        ("weight", ["fused", "vocab", "experts.{layer}.{expert}"]),
        ("cal", ["scale"]),
    ],
)
def test_a_word_selects(select: str, names: list[str]) -> None:
    assert [panel.title for panel in panels(uneven(), select=select)] == names


def test_an_area_shows_two_dims() -> None:
    drawn = area_drawing(layouts()["megatron moe"], "down", ("experts", "columns"), title="two", width=400)
    root = ET.fromstring(f"<svg>{''.join(drawn.shapes)}</svg>")
    tips = [node.text for node in root.iter("title")]
    assert tips == [f"experts {e}, columns {c}" for e in ("0-1", "2-3", "4-5") for c in ("0-19", "20-39")]


def test_an_unknown_word_is_refused_with_the_near_ones() -> None:
    layout = megatron.layout(dense(), megatron.mesh(tp=2))
    draw = (
        lambda: text.layout_picture(layout, select="linear_qvk"),
        lambda: svg.layout_picture(layout, select="linear_qvk"),
        lambda: text.plan_picture(reshard(), "linear_qvk"),
        lambda: svg.plan_picture(reshard(), "linear_qvk"),
    )
    for one in draw:
        with pytest.raises(
            UnknownNameError, match=r"'linear_qvk' is in none of \d+ names; near are linear_qkv"
        ):
            one()


def test_a_plan_is_selected_by_names_of_either_side() -> None:
    by_src = flow(reshard(), select="linear_qkv.weight")
    assert by_src.sections == flow(reshard(), select="qkv_proj.weight").sections
    only_k = flow(reshard(), select="k")
    assert {one.label for section in only_k.sections for one in section.ribbons} == {"k"}


# --- what a picture looks like ------------------------------------------------------------------


GOLDENS = [
    "uneven.txt",
    "fused.txt",
    "experts.txt",
    "plan.txt",
    "cost.txt",
    "mesh.txt",
    "uneven.svg",
    "plan.svg",
    "mesh.svg",
]


@functools.cache
def goldens() -> dict[str, str]:
    parts, made = uneven(), reshard()
    moe = layouts()["megatron moe"]
    return {
        "uneven.txt": text.plain(text.layout_picture(parts)),
        "fused.txt": text.plain(
            text.layout_picture(layouts()["megatron"], select="linear_qkv.weight", head_dim=8)
        ),
        "experts.txt": text.plain(text.layout_picture(moe, select="down", dim="experts")),
        "plan.txt": text.plain(text.plan_picture(made, "qkv_proj.weight", head_dim=8)),
        "cost.txt": text.plain(text.cost_table(made)),
        "mesh.txt": text.plain(text.mesh_table(moe.mesh)),
        "uneven.svg": svg.layout_picture(parts),
        "plan.svg": svg.plan_picture(made, "qkv_proj.weight", head_dim=8),
        "mesh.svg": svg.mesh_picture(moe.mesh),
    }


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str) -> None:
    assert goldens()[name] == (GOLDEN / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", layouts())
def test_any_layout_fits_in_80_columns_and_is_well_formed(name: str) -> None:
    layout = layouts()[name]
    for width in (60, 80, 120):
        drawn = text.plain(text.layout_picture(layout, width=width), width=300)
        bars = [line for line in drawn.splitlines() if "│" in line]
        assert bars or name == "hf"
        # A name is never shortened where it stands alone; bars always fit.
        assert max(map(len, bars if width < 80 else drawn.splitlines()), default=0) <= width
    root = ET.fromstring(svg.layout_picture(layout))
    assert root.tag == f"{SVG}svg"


@pytest.mark.parametrize("name", list(layouts()))
def test_nothing_is_drawn_outside_the_page(name: str) -> None:
    root = ET.fromstring(svg.layout_picture(layouts()[name], head_dim=8))
    width, height = (float(root.attrib[key]) for key in ("width", "height"))
    for x, y, w, h in _rectangles(root, 0, 0):
        assert min(x, y, w, h) >= 0
        assert x + w <= width + 0.2 and y + h <= height + 0.2


def _rectangles(node: ET.Element, x: float, y: float) -> list[tuple[float, float, float, float]]:
    if node.tag == f"{SVG}defs":
        return []
    if "transform" in node.attrib:
        dx, dy = node.attrib["transform"].removeprefix("translate(").removesuffix(")").split()
        x, y = x + float(dx), y + float(dy)
    found = [one for child in node for one in _rectangles(child, x, y)]
    if node.tag == f"{SVG}rect":
        left, top, w, h = (float(node.attrib[key]) for key in ("x", "y", "width", "height"))
        found.append((x + left, y + top, w, h))
    return found


def test_every_band_has_a_tooltip_in_words() -> None:
    root = ET.fromstring(svg.layout_picture(layouts()["megatron"], select="linear_qkv.weight", head_dim=8))
    tips = {node.text for node in root.iter(f"{SVG}title")}
    assert "tp 1 (ranks 1, 5): k head 0" in tips


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = text.layout_picture(uneven(), select="fused")

    def printed() -> str:
        out = io.StringIO()
        Console(file=out, force_terminal=True, color_system="truecolor", width=80).print(picture)
        return out.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "48;2;" in printed()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "48;2;" not in printed() and "38;2;" not in printed()


def test_names_are_escaped() -> None:
    tensor = Tensor('a<b>&"c', (4,), "float32")
    layout = Layout("x & <y>", Mesh(()), (BufferRule('a<b>&"c', (Part(tensor),), (whole(4),)),))
    root = ET.fromstring(svg.layout_picture(layout, select="a<b>"))
    assert any('a<b>&"c' in (node.text or "") for node in root.iter(f"{SVG}text"))


def test_a_cost_is_the_same_as_its_plan() -> None:
    made = reshard()
    assert text.plain(text.cost_table(made)) == text.plain(text.cost_table(cost(made)))


def test_a_cut_is_marked_where_it_is() -> None:
    panel: Panel = replace(drawing("cut", {"": whole(12, "q")}), cuts=(3, 6))
    marks = [
        shape
        for shape in svg.panel_drawing(panel, width=220, gutter=100, scale=10).shapes
        if 'class="cut"' in shape
    ]
    assert ['x1="130"' in marks[0], 'x1="160"' in marks[1]] == [True, True]


# --- the documentation's pictures ---------------------------------------------------------------


def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pictures_make", ROOT / "docs/pictures/make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", make().PICTURES)
def test_documentation_pictures_are_what_the_script_draws(name: str) -> None:
    drawn = make().PICTURES[name]()
    ET.fromstring(drawn)
    assert (ROOT / f"docs/pictures/{name}.svg").read_bytes() == drawn.encode(), "run docs/pictures/make.py"


def test_documentation_has_no_other_picture() -> None:
    # examples/train_curves.py draws them from what it trained
    measured = {"train-curves", "train-curves-shared"}
    found = {path.stem for path in (ROOT / "docs/pictures").glob("*.svg")}
    assert found == set(make().PICTURES) | measured


if __name__ == "__main__":
    for name, drawn in goldens().items():
        (GOLDEN / name).write_text(drawn, encoding="utf-8", newline="\n")
