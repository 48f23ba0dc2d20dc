"""The text notation of dims, boxes, meshes, tensors and layouts: parsed and printed without loss.

=========  ===========================================================================
dim        ``q[0:8] k[0:2] pad[3]``: runs in storage order; ``[0:7:2]`` has a step
box        ``[0:4, 8:16:2]``: one range a dim
mesh       ``tp=2,pp=2 | etp=1,ep=2,pp=2 @ 8``: axes, other factorisations, first rank
tensor     ``model.layers.{layer[0:4]}.up_proj.weight (96, 64) bfloat16``
layout     the mesh, then the tensors, then the buffers, one statement a line
=========  ===========================================================================

The run of a dim whose tensor is understood has no label. An empty dim is ``[]``.

Law: ``parse_x(format_x(value)) == value`` for every value of every kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NoReturn

from shardweave.errors import NotationError
from shardweave.layout.box import Box
from shardweave.layout.buffer import BufferRule, Part, Sharded
from shardweave.layout.layout import Layout
from shardweave.layout.mesh import Axes, Mesh
from shardweave.layout.run import PAD, Dim, Run
from shardweave.layout.tensor import Tensor
from shardweave.layout.transform import Transform

_RUN = re.compile(r"(?:(pad)\[(\d+)\]|([A-Za-z_]\w*)?\[(\d+):(\d+)(?::(\d+))?\])")
_RANGE = re.compile(r"(\d+):(\d+)(?::(\d+))?")
_LABEL = re.compile(r"[A-Za-z_]\w*")


def _refuse(what: str, text: str, why: str) -> NoReturn:
    shown = text if len(text) <= 80 else text[:77] + "..."
    raise NotationError(
        f"a text is the notation of a {what}", equation=f"{shown!r}: {why}", hint=__doc__.split("\n\n")[1]
    )


# --- dims ---------------------------------------------------------------------------------------


def format_dim(dim: Dim) -> str:
    """``q[0:8] k[0:2] pad[3]``."""
    return " ".join(_format_run(run) for run in dim.runs) or "[]"


def _format_run(run: Run) -> str:
    if run.label is PAD:
        return f"pad[{run.count}]"
    step = f":{run.step}" if run.step != 1 else ""
    return f"{run.label}[{run.start}:{run.last + 1}{step}]"


def parse_dim(text: str) -> Dim:
    """The dim that ``format_dim`` writes.

    >>> parse_dim("q[0:4] q[4:8]") == parse_dim("q[0:8]")
    True
    """
    if text.strip() == "[]":
        return Dim()
    runs: list[Run] = []
    for word in text.split():
        match = _RUN.fullmatch(word)
        if match is None:
            _refuse("dim", text, f"{word!r} is not a run")
        pad, size, label, start, stop, step = match.groups()
        if pad:
            runs.append(Run(PAD, 0, int(size)))
            continue
        stretch = range(int(start), int(stop), int(step or 1)) if int(step or 1) else range(0)
        if not len(stretch) or stretch[-1] + 1 != int(stop):
            _refuse("dim", text, f"{word!r} does not end one past its last index")
        runs.append(Run(label or "", stretch.start, len(stretch), stretch.step))
    if not runs:
        _refuse("dim", text, "no run; an empty dim is []")
    return Dim(runs)


# --- boxes --------------------------------------------------------------------------------------


def format_box(box: Box) -> str:
    """``[0:4, 8:16:2]``."""
    return "[" + ", ".join(_format_range(dim) for dim in box.dims) + "]"


def _format_range(dim: range) -> str:
    return f"{dim.start}:{dim.stop}" + (f":{dim.step}" if dim.step != 1 else "")


def parse_box(text: str) -> Box:
    """The box that ``format_box`` writes."""
    inner = text.strip()
    if not (inner.startswith("[") and inner.endswith("]")):
        _refuse("box", text, "no brackets")
    dims: list[range] = []
    for word in inner[1:-1].split(",") if inner != "[]" else ():
        match = _RANGE.fullmatch(word.strip())
        if match is None or match[3] == "0":
            _refuse("box", text, f"{word.strip()!r} is not a range")
        dims.append(range(int(match[1]), int(match[2]), int(match[3] or 1)))
    return Box(tuple(dims))


# --- meshes -------------------------------------------------------------------------------------


def format_mesh(mesh: Mesh) -> str:
    """``tp=2,pp=2 | etp=1,ep=2,pp=2 @ 8``."""
    views = " | ".join(",".join(f"{name}={n}" for name, n in view) for view in (mesh.axes, *mesh.views))
    return views + (f" @ {mesh.offset}" if mesh.offset else "")


def parse_mesh(text: str) -> Mesh:
    """The mesh that ``format_mesh`` writes.

    >>> print(parse_mesh("tp=2,cp=1,dp=2,pp=2 | etp=1,ep=4,edp=1,pp=2"))
    tp=2,cp=1,dp=2,pp=2 | etp=1,ep=4,edp=1,pp=2
    """
    body, at, offset = text.partition("@")
    if at and not offset.strip().isdecimal():
        _refuse("mesh", text, f"{offset.strip()!r} is not a rank")
    views: list[Axes] = []
    for view in body.split("|"):
        axes: list[tuple[str, int]] = []
        for word in view.split(",") if view.strip() else ():
            name, equals, size = word.strip().partition("=")
            if not (equals and _LABEL.fullmatch(name) and size.isdecimal()):
                _refuse("mesh", text, f"{word.strip()!r} is not axis=size")
            axes.append((name, int(size)))
        views.append(tuple(axes))
    return Mesh(views[0], tuple(views[1:]), int(offset) if at else 0)


# --- tensors ------------------------------------------------------------------------------------


def format_tensor(tensor: Tensor) -> str:
    """``model.layers.{layer[0:4]}.up_proj.weight (96, 64) bfloat16``."""
    name = tensor.name
    for placeholder, dim in tensor.index:
        name = name.replace(f"{{{placeholder}}}", f"{{{placeholder}{format_dim(dim)}}}")
    # Placeholders stand in the name in any order; the order of the index dims is said where it differs.
    order = [placeholder for placeholder, _ in tensor.index]
    said = f" by {','.join(order)}" if order != re.findall(r"\{(\w+)\}", tensor.name) else ""
    return f"{name} {_format_shape(tensor.shape)} {tensor.dtype}{said}"


def _format_shape(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(str(size) for size in shape) + ")"


_TENSOR = re.compile(r"(?P<name>(?:[^\s{}]|\{[^{}]*\})+) \((?P<shape>[\d, ]*)\) (?P<dtype>\w+)(?: by (?P<by>[\w,]+))?")


def parse_tensor(text: str) -> Tensor:
    """The tensor that ``format_tensor`` writes."""
    match = _TENSOR.fullmatch(text.strip())
    if match is None:
        _refuse("tensor", text, "no 'name (shape) dtype'")
    index: dict[str, Dim] = {}

    def plain(found: re.Match[str]) -> str:
        inner = found[1]
        placeholder = _LABEL.match(inner)
        if placeholder is None:
            _refuse("tensor", text, f"{{{inner}}} names no index dim")
        index[placeholder[0]] = parse_dim(inner[placeholder.end() :])
        return f"{{{placeholder[0]}}}"

    name = re.sub(r"\{([^{}]*)\}", plain, match["name"])
    shape = tuple(int(word) for word in match["shape"].split(",") if word.strip())
    order = match["by"].split(",") if match["by"] else list(index)
    if sorted(order) != sorted(index):
        _refuse("tensor", text, f"'by {match['by']}' does not list the index dims")
    return Tensor(name, shape, match["dtype"], tuple((placeholder, index[placeholder]) for placeholder in order))


# --- layouts ------------------------------------------------------------------------------------


def format_layout(layout: Layout) -> str:
    """The whole layout, one statement a line; see ``parse_layout``."""
    numbers = {tensor: i for i, tensor in enumerate(layout.tensors)}
    lines = [f"layout {layout.name}", f"mesh {format_mesh(layout.mesh)}"]
    lines += [f"tensor {i} {format_tensor(tensor)}" for tensor, i in numbers.items()]
    for rule in layout.rules:
        lines.append(f"buffer {rule.name} {rule.dtype}")
        for part in rule.parts:
            label = f" as {part.label}" if part.label else ""
            lines.append(f"  holds {numbers[part.tensor]}{label}{' replica' if part.replica else ''}")
        for dim in rule.dims:
            lines.append(f"  dim {_format_sharded(dim)}")
        assert rule.stacked is not None
        lines.append(f"  stacked {','.join(str(i) for i in rule.stacked)}".rstrip())
        for name, printed in rule.numbers:
            lines.append(f"  number {name} {_format_sharded(printed)}")
        for axis, values in rule.where:
            lines.append(f"  where {axis} {','.join(str(v) for v in values)}".rstrip())
        if rule.transform.kind != "identity":
            lines.append(f"  transform {rule.transform.kind} {rule.transform.constant!r}")
    return "\n".join(lines) + "\n"


def _format_sharded(dim: Dim | Sharded) -> str:
    if isinstance(dim, Dim):
        return format_dim(dim)
    return f"{','.join(dim.axes)}: {' | '.join(format_dim(d) for d in dim.dims)}"


def _parse_sharded(text: str) -> Dim | Sharded:
    axes, colon, entries = text.partition(": ")
    if not colon:
        return parse_dim(text)
    return Sharded(tuple(axes.split(",")), tuple(parse_dim(entry) for entry in entries.split(" | ")))


def parse_layout(text: str) -> Layout:
    """The layout that ``format_layout`` writes."""
    name, mesh = "", Mesh(())
    tensors: dict[str, Tensor] = {}
    blocks: list[list[tuple[str, str]]] = []
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        match word:
            case "layout":
                name = rest
            case "mesh":
                mesh = parse_mesh(rest)
            case "tensor":
                number, _, tensor = rest.partition(" ")
                tensors[number] = parse_tensor(tensor)
            case "buffer":
                blocks.append([(word, rest)])
            case "holds" | "dim" | "stacked" | "number" | "where" | "transform" if blocks:
                blocks[-1].append((word, rest))
            case "":
                pass
            case _:
                _refuse("layout", line, f"{word!r} starts no statement")
    return Layout(name, mesh, tuple(_parse_rule(block, tensors) for block in blocks))


def _parse_rule(block: list[tuple[str, str]], tensors: dict[str, Tensor]) -> BufferRule:
    def all_of(word: str) -> Iterator[str]:
        return (rest for found, rest in block if found == word)

    name, _, dtype = block[0][1].rpartition(" ")
    parts: list[Part] = []
    for rest in all_of("holds"):
        words = rest.split()
        if words[0] not in tensors:
            _refuse("layout", rest, f"tensor {words[0]} is not declared")
        label = words[words.index("as") + 1] if "as" in words[1:] else ""
        parts.append(Part(tensors[words[0]], label, "replica" in (words[3:] if label else words[1:])))
    numbers = []
    for rest in all_of("number"):
        placeholder, _, printed = rest.partition(" ")
        numbers.append((placeholder, _parse_sharded(printed)))
    where = []
    for rest in all_of("where"):
        axis, _, values = rest.partition(" ")
        where.append((axis, tuple(int(v) for v in values.split(",") if v)))
    transform = Transform()
    for rest in all_of("transform"):
        kind, _, constant = rest.partition(" ")
        transform = Transform(kind, float(constant))
    stacked = next(all_of("stacked"), "")
    return BufferRule(
        name,
        tuple(parts),
        tuple(_parse_sharded(rest) for rest in all_of("dim")),
        stacked=tuple(int(i) for i in stacked.split(",") if i),
        numbers=tuple(numbers),
        where=tuple(where),
        dtype=dtype,
        transform=transform,
    )
