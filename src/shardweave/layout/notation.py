"""The text notation of dims, boxes, meshes, tensors and layouts: parsed and printed without loss.

=========  ===========================================================================
dim        ``q[0:8] k[0:2] pad[3]``: runs in storage order; ``[0:7:2]`` has a step
box        ``[0:4, 8:15:2]``: one range a dim
mesh       ``tp=2,pp=2 | etp=1,ep=2,pp=2 @ 8``: axes, other factorisations, first rank
tensor     ``model.layers.{layer[0:4]}.up_proj.weight (96, 64) bfloat16``
layout     the mesh, then the tensors, then the buffers, one statement a line
=========  ===========================================================================

The run of a dim whose tensor is understood has no label. An empty dim is ``[]``.

Law: ``parse_x(format_x(value)) == value`` for every value of every kind. A text that is no notation,
or says something that contradicts itself, is a ``NotationError`` and nothing else.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

from shardweave.errors import NotationError, ShardweaveError
from shardweave.layout.box import Box
from shardweave.layout.buffer import BufferRule, Part, Sharded
from shardweave.layout.layout import Layout
from shardweave.layout.mesh import Axes, Mesh
from shardweave.layout.run import LABEL, PAD, Dim, Run
from shardweave.layout.tensor import Tensor, placeholders
from shardweave.layout.transform import IDENTITY, Transform

_RANGE = r"(\d+):(\d+)(?::(\d+))?"
_RUN = re.compile(rf"pad\[(\d+)\]|({LABEL.pattern})?\[{_RANGE}\]", re.ASCII)
_BOX_DIM = re.compile(_RANGE, re.ASCII)
_AXIS = re.compile(rf"({LABEL.pattern})=(\d+)", re.ASCII)
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)([^{}]*)\}", re.ASCII)
_TENSOR = re.compile(r"((?:[^\s{}]|\{[^{}]*\})+) \((\d+(?:, \d+)*)?\) (\w+)(?: by ([\w,]+))?", re.ASCII)
_HOLDS = re.compile(rf"(\d+)(?: as ({LABEL.pattern}))?( replica)?", re.ASCII)

_EXAMPLES = {
    "dim": "'q[0:8] k[0:2] pad[3]', with a step '[0:7:2]', empty '[]'",
    "box": "'[0:4, 8:15:2]', one range a dim, each ending one past its last index",
    "mesh": "'tp=2,pp=2 | etp=1,ep=2,pp=2 @ 8': axes, other factorisations, first rank",
    "tensor": "'model.layers.{layer[0:4]}.up_proj.weight (96, 64) bfloat16'",
    "layout": "format_layout() does, one statement a line",
}

T = TypeVar("T")


def _refuse(what: str, text: str, why: str) -> NoReturn:
    shown = text if len(text) <= 80 else text[:77] + "..."
    raise NotationError(
        f"a text is the notation of a {what}",
        where=repr(shown),
        equation=why,
        hint=f"write it as {_EXAMPLES[what]}",
    )


def _reads(what: str) -> Callable[[Callable[[str], T]], Callable[[str], T]]:
    """Makes a parser refuse by NotationError, also where the values that it builds refuse themselves."""

    def wrap(parse: Callable[[str], T]) -> Callable[[str], T]:
        @functools.wraps(parse)
        def read(text: str) -> T:
            try:
                return parse(text)
            except NotationError:
                raise
            # OverflowError and ValueError: numbers of more digits than Python reads or counts with.
            except (ShardweaveError, OverflowError, ValueError) as error:
                _refuse(what, text, str(error))

        return read

    return wrap


def _range(start: str, stop: str, step: str | None) -> range | None:
    """The range that three numbers are, or ``None`` where they do not end one past the last index."""
    if step is not None and not int(step):
        return None
    found = range(int(start), int(stop), int(step or 1))
    end = found[-1] + 1 if found else found.start
    return found if end == found.stop else None


# --- dims ---------------------------------------------------------------------------------------


def format_dim(dim: Dim) -> str:
    """``q[0:8] k[0:2] pad[3]``."""
    return " ".join(_format_run(run) for run in dim.runs) or "[]"


def _format_run(run: Run) -> str:
    if run.label is PAD:
        return f"pad[{run.count}]"
    step = f":{run.step}" if run.step != 1 else ""
    return f"{run.label}[{run.start}:{run.last + 1}{step}]"


@_reads("dim")
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
        size, label, *numbers = match.groups()
        if size is not None:
            runs.append(Run(PAD, 0, int(size)))
            continue
        stretch = _range(*numbers)
        if not stretch:
            _refuse("dim", text, f"{word!r} does not end one past its last index")
        runs.append(Run(label or "", stretch.start, len(stretch), stretch.step))
    if not runs:
        _refuse("dim", text, "no run; an empty dim is []")
    return Dim(runs)


# --- boxes --------------------------------------------------------------------------------------


def format_box(box: Box) -> str:
    """``[0:4, 8:15:2]``."""
    return "[" + ", ".join(_format_range(dim) for dim in box.dims) + "]"


def _format_range(dim: range) -> str:
    return f"{dim.start}:{dim.stop}" + (f":{dim.step}" if dim.step != 1 else "")


@_reads("box")
def parse_box(text: str) -> Box:
    """The box that ``format_box`` writes.

    >>> parse_box("[0:4, 1:6:2]").shape
    (4, 3)
    """
    inner = text.strip()
    if not (inner.startswith("[") and inner.endswith("]")):
        _refuse("box", text, "no brackets")
    dims: list[range] = []
    for word in inner[1:-1].split(",") if inner != "[]" else ():
        match = _BOX_DIM.fullmatch(word.strip())
        dim = _range(*match.groups()) if match else None
        if dim is None:
            _refuse("box", text, f"{word.strip()!r} is not a range that ends one past its last index")
        dims.append(dim)
    return Box(tuple(dims))


# --- meshes -------------------------------------------------------------------------------------


def format_mesh(mesh: Mesh) -> str:
    """``tp=2,pp=2 | etp=1,ep=2,pp=2 @ 8``."""
    views = " | ".join(",".join(f"{name}={n}" for name, n in view) for view in (mesh.axes, *mesh.views))
    return views + (f" @ {mesh.offset}" if mesh.offset else "")


@_reads("mesh")
def parse_mesh(text: str) -> Mesh:
    """The mesh that ``format_mesh`` writes.

    >>> print(parse_mesh("tp=2,cp=1,dp=2,pp=2 | etp=1,ep=4,edp=1,pp=2"))
    tp=2,cp=1,dp=2,pp=2 | etp=1,ep=4,edp=1,pp=2
    """
    body, at, offset = text.partition("@")
    views: list[Axes] = []
    for view in body.split("|"):
        axes: list[tuple[str, int]] = []
        for word in view.split(",") if view.strip() else ():
            match = _AXIS.fullmatch(word.strip())
            if match is None:
                _refuse("mesh", text, f"{word.strip()!r} is not axis=size")
            axes.append((match[1], int(match[2])))
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
    said = f" by {','.join(order)}" if order != placeholders(tensor.name) else ""
    return f"{name} {_format_shape(tensor.shape)} {tensor.dtype}{said}"


def _format_shape(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(str(size) for size in shape) + ")"


@_reads("tensor")
def parse_tensor(text: str) -> Tensor:
    """The tensor that ``format_tensor`` writes.

    >>> parse_tensor("layers.{layer[0:2]}.norm.weight (64) float32").numel
    128
    """
    match = _TENSOR.fullmatch(text.strip())
    if match is None:
        _refuse("tensor", text, "it is not 'name (shape) dtype'")
    name, shape, dtype, by = match.groups()
    index = {found[1]: parse_dim(found[2]) for found in _PLACEHOLDER.finditer(name)}
    order = by.split(",") if by else list(index)
    if sorted(order) != sorted(index):
        _refuse("tensor", text, f"'by {by}' does not list the index dims")
    return Tensor(
        _PLACEHOLDER.sub(r"{\1}", name),
        tuple(int(size) for size in shape.split(", ")) if shape else (),
        dtype,
        tuple((placeholder, index[placeholder]) for placeholder in order),
    )


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
        if rule.transform != IDENTITY:
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
    names = tuple(axis for axis in axes.split(",") if axis)
    return Sharded(names, tuple(parse_dim(entry) for entry in entries.split(" | ")))


@_reads("layout")
def parse_layout(text: str) -> Layout:
    """The layout that ``format_layout`` writes."""
    head: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    blocks: list[list[tuple[str, str]]] = []
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        match word:
            case "layout" | "mesh" if word not in head:
                head[word] = rest
            case "tensor" if rest.partition(" ")[0] not in tensors:
                number, _, tensor = rest.partition(" ")
                tensors[number] = parse_tensor(tensor)
            case "buffer":
                blocks.append([(word, rest)])
            case "holds" | "dim" | "stacked" | "number" | "where" | "transform" if blocks:
                blocks[-1].append((word, rest))
            case "":
                pass
            case _:
                _refuse("layout", line, f"{word!r} starts no statement here")
    if "layout" not in head or "mesh" not in head:
        _refuse("layout", text, "it has no line 'layout name' or no line 'mesh axes'")
    rules = tuple(_parse_rule(block, tensors) for block in blocks)
    return Layout(head["layout"], parse_mesh(head["mesh"]), rules)


def _parse_rule(block: list[tuple[str, str]], tensors: dict[str, Tensor]) -> BufferRule:
    def all_of(word: str) -> list[str]:
        return [rest for found, rest in block if found == word]

    def one(word: str) -> str | None:
        found = all_of(word)
        if len(found) > 1:
            _refuse("layout", block[0][1], f"the buffer has {len(found)} lines {word!r}")
        return found[0] if found else None

    def part(rest: str) -> Part:
        match = _HOLDS.fullmatch(rest)
        if match is None or match[1] not in tensors:
            _refuse("layout", rest, "it is not 'holds number [as label] [replica]' of a declared tensor")
        return Part(tensors[match[1]], match[2] or "", bool(match[3]))

    name, _, dtype = block[0][1].rpartition(" ")
    printed = (rest.partition(" ")[::2] for rest in all_of("number"))
    where = (rest.partition(" ")[::2] for rest in all_of("where"))
    stacked = one("stacked")
    kind, _, constant = (one("transform") or "identity 0").partition(" ")
    return BufferRule(
        name,
        tuple(part(rest) for rest in all_of("holds")),
        tuple(_parse_sharded(rest) for rest in all_of("dim")),
        stacked=None if stacked is None else _ints(stacked),
        numbers=tuple((placeholder, _parse_sharded(text)) for placeholder, text in printed),
        where=tuple((axis, _ints(values)) for axis, values in where),
        dtype=dtype,
        transform=Transform(kind, float(constant)),
    )


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)
