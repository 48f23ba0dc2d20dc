"""Texts: read back as they were written, and refused by one exception where they are none."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import boxes, dims, layouts, meshes, tensors

from shardweave.errors import BufferRuleError, ModelError, NotationError, TransformError
from shardweave.layout import (
    Box,
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Run,
    Sharded,
    Tensor,
    Transform,
    format_box,
    format_dim,
    format_layout,
    format_mesh,
    format_tensor,
    parse_box,
    parse_dim,
    parse_layout,
    parse_mesh,
    parse_tensor,
    whole,
)


@given(dims())
def test_dims(dim: Dim) -> None:
    assert parse_dim(format_dim(dim)) == dim
    assert str(dim) == format_dim(dim)


@given(st.integers(0, 4).flatmap(boxes))
def test_boxes(box: Box) -> None:
    assert parse_box(format_box(box)) == box
    assert str(box) == format_box(box)


@given(meshes())
def test_meshes(mesh: Mesh) -> None:
    assert parse_mesh(format_mesh(mesh)) == mesh
    assert str(mesh) == format_mesh(mesh)


@given(tensors())
def test_tensors(tensor: Tensor) -> None:
    assert parse_tensor(format_tensor(tensor)) == tensor
    assert str(tensor) == format_tensor(tensor)


@given(layouts())
def test_layouts(layout: Layout) -> None:
    assert parse_layout(format_layout(layout)) == layout
    assert str(layout) == format_layout(layout)


def test_what_is_written() -> None:
    assert format_dim(Dim([Run("q", 0, 8), Run(None, 0, 3), Run("", 0, 4, 2), Run("pad", 0, 2)])) == (
        "q[0:8] pad[3] [0:7:2] pad[0:2]"
    )
    assert format_dim(Dim()) == "[]"
    assert format_box(Box((range(4), range(8, 15, 2), range(0)))) == "[0:4, 8:15:2, 0:0]"
    assert format_box(Box(())) == "[]"
    assert (
        format_mesh(Mesh((("tp", 2), ("pp", 2)), ((("ep", 2), ("pp", 2)),), 8)) == "tp=2,pp=2 | ep=2,pp=2 @ 8"
    )
    family = Tensor(
        "e.{expert}.l.{layer}", (), "int64", (("layer", whole(2)), ("expert", Dim([Run("", 4, 2)])))
    )
    assert format_tensor(family) == "e.{expert[4:6]}.l.{layer[0:2]} () int64 by layer,expert"


def test_a_whole_layout_as_a_person_writes_it() -> None:
    text = """
        layout by hand
        mesh tp=2,pp=2 @ 4
        tensor 0 q (4, 3) bfloat16
        tensor 1 k (2, 3) bfloat16
        buffer qkv bfloat16
          holds 0 as q
          holds 1 as k replica
          dim tp: q[0:2] k[0:2] | q[2:4] k[0:2]
          dim [0:3]
          where pp 1
          transform scale 0.5
    """
    layout = parse_layout(text)
    q, k = Tensor("q", (4, 3), "bfloat16"), Tensor("k", (2, 3), "bfloat16")
    fused = Sharded(("tp",), (parse_dim("q[0:2] k[0:2]"), parse_dim("q[2:4] k[0:2]")))
    rule = BufferRule(
        "qkv",
        (Part(q, "q"), Part(k, "k", replica=True)),
        (fused, whole(3)),
        stacked=(0, 1),
        where=(("pp", (1,)),),
        transform=Transform("scale", 0.5),
    )
    assert layout == Layout("by hand", Mesh((("tp", 2), ("pp", 2)), offset=4), (rule,))
    assert [rank for rank in layout.mesh.ranks if list(layout.buffers(rank))] == [6, 7]
    assert layout.exists(rule).tolist() == [False, False, True, True]


PARSERS: dict[str, tuple[Callable[[str], object], Callable[..., str]]] = {
    "dim": (parse_dim, format_dim),
    "box": (parse_box, format_box),
    "mesh": (parse_mesh, format_mesh),
    "tensor": (parse_tensor, format_tensor),
    "layout": (parse_layout, format_layout),
}


def read_or_refuse(kind: str, text: str) -> None:
    parse, form = PARSERS[kind]
    try:
        value = parse(text)
    except NotationError as error:
        assert all([error.rule, error.where, error.equation, error.hint])
        return
    assert parse(form(value)) == value


@given(st.sampled_from(sorted(PARSERS)), st.text())
@example("dim", "[0:" + "9" * 5000 + "]")
@example("dim", "[0:" + "9" * 30 + "]")
@example("dim", "[5:9223372036854775809]")
@example("dim", "pad[" + "9" * 30 + "]")
@example("box", "[0:" + "9" * 30 + "]")
@example("box", "[0:4:00]")
@example("mesh", "tp=0")
@example("mesh", "tp=2,tp=2")
@example("mesh", "tp=" + "9" * 5000)
@example("mesh", "tp=2 @ -1")
@example("mesh", "tp=٣")
@example("tensor", "{a[0:2]}{a[0:2]} () int8")
@example("tensor", "{layer[0:" + "9" * 12 + "]} () int8")
@example("tensor", "{1[0:2]} () int8")
@example("tensor", "w (1,,2) int8")
@example("layout", "layout a\nmesh tp=2\nbuffer w int8\n  holds")
@example("layout", "layout a\nmesh tp=2\ntensor 0 w () int8\nbuffer w int8\n  holds 0\n  stacked x")
@example("layout", "layout a\nmesh tp=2\ntensor 0 w () int8\nbuffer w int8\n  holds 0\n  transform scale nan")
@example("layout", "layout a\nmesh tp=2\ntensor 0 w () int8\nbuffer w int8\n  holds 0\n  where tp 0,2")
@example("layout", "layout a\nmesh tp=2\ntensor 0 w () int8\nbuffer w int8\n  holds 0\n  number layer [0:2]")
@example("layout", "layout a\nmesh tp=2\nmesh tp=2")
def test_texts_are_read_or_refused(kind: str, text: str) -> None:
    read_or_refuse(kind, text)


@given(st.data())
def test_damaged_texts_are_read_or_refused(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(PARSERS)))
    values = {"dim": dims(), "box": boxes(2), "mesh": meshes(), "tensor": tensors(), "layout": layouts()}
    text = PARSERS[kind][1](data.draw(values[kind]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        until = data.draw(st.integers(at, min(len(text), at + 12)))
        text = text[:at] + data.draw(st.text("0123:[]{}=|@, \nqpad-.", max_size=3)) + text[until:]
    read_or_refuse(kind, text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_dim, ""),
        (parse_dim, "q"),
        (parse_dim, "q[0]"),
        (parse_dim, "q[4:2]"),
        (parse_dim, "q[2:2]"),
        (parse_dim, "q[0:8:3]"),
        (parse_dim, "q[0:8:0]"),
        (parse_dim, "q[-1:4]"),
        (parse_dim, "pad[0:4"),
        (parse_dim, "1q[0:4]"),
        (parse_box, "0:4"),
        (parse_box, "[0:4,]"),
        (parse_box, "[0:8:3]"),
        (parse_box, "[4:2]"),
        (parse_mesh, "tp"),
        (parse_mesh, "tp=2,"),
        (parse_mesh, "tp=2 | ep=4"),
        (parse_mesh, "tp=2 @ x"),
        (parse_tensor, "w (2)"),
        (parse_tensor, "w (2 3) int8"),
        (parse_tensor, "{layer} () int8"),
        (parse_tensor, "l.{layer[0:2] [1:3]} () int8"),
        (parse_tensor, "l.{layer[0:2]} () int8 by expert"),
        (parse_layout, ""),
        (parse_layout, "layout a"),
        (parse_layout, "mesh tp=2"),
        (parse_layout, "layout a\nmesh tp=2\nholds 0"),
        (parse_layout, "layout a\nmesh tp=2\ntensor 0 w () int8\ntensor 0 v () int8"),
        (parse_layout, "layout a\nmesh tp=2\nbuffer w int8\n  holds 0"),
        (parse_layout, "layout a\nmesh tp=2\nbuffer w int8"),
        (
            parse_layout,
            "layout a\nmesh tp=2\ntensor 0 w () int8\nbuffer w int8\n  holds 0\n  stacked\n  stacked",
        ),
    ],
)
def test_malformed(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(NotationError):
        parse(text)


def test_values_without_a_notation_are_not_made() -> None:
    for name, dtype in (("two words", "int8"), ("a{b", "int8"), ("{1}", "int8"), ("w", ""), ("", "int8")):
        with pytest.raises(ModelError):
            Tensor(name, (2,), dtype)
    tensor = Tensor("w", (2,), "int8")
    with pytest.raises(BufferRuleError, match="is a word"):
        BufferRule("two words", (Part(tensor),), (whole(2),))
    for name in ("two\nlines", " a"):
        with pytest.raises(BufferRuleError, match="one line"):
            Layout(name, Mesh(()), ())


def test_transforms_that_say_the_same_are_equal() -> None:
    assert Transform("scale", 1) == Transform("shift", 0) == Transform()
    assert Transform("scale", 2).constant == 2.0 and Transform("scale", -0.25).exact
    assert not Transform("scale", 0.1).exact and not Transform("neg_exp").exact
    for kind, constant in (
        ("scale", 0.0),
        ("scale", math.nan),
        ("shift", math.inf),
        ("neg_exp", 1.0),
        ("identity", 2.0),
        ("square", 0.0),
    ):
        with pytest.raises(TransformError):
            Transform(kind, constant)
