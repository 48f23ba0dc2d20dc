"""Classes of a tree and how they inherit: which ``__init__`` a construction runs, and what it passes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardweave.lint.binding import Bound, bind, leftover
from shardweave.lint.class_rows import ClassRow, Parameter, Shape, Site
from shardweave.lint.files import Source
from shardweave.lint.names import Tree

__all__ = ["Hierarchy", "Initialiser", "Node"]

_DEEPEST = 40


@dataclass(slots=True, eq=False)
class Node:
    """A class. Without a row it is one from outside the tree."""

    dotted: str
    row: ClassRow | None = None
    source: Source | None = None
    bases: list[Node] = field(default_factory=list)
    order: list[Node] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return self.dotted

    @property
    def name(self) -> str:
        """The last part of its name."""
        return self.dotted.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Initialiser:
    """The ``__init__`` that the construction of a class runs first."""

    owner: Node
    parameters: tuple[Parameter, ...]
    line: int
    is_generated: bool
    """Made by ``dataclass``."""


class Hierarchy:
    """The classes of some files.

    Args:
        rows: Each file and its classes.
        tree: Follows names through imports.
    """

    def __init__(self, rows: Sequence[tuple[Source, Sequence[ClassRow]]], tree: Tree) -> None:
        self.tree = tree
        self.nodes: list[Node] = []
        self.by_dotted: dict[str, list[Node]] = {}
        self.by_file: dict[tuple[str, str], list[Node]] = {}
        self.outside: dict[str, Node] = {}
        for source, classes in rows:
            for row in classes:
                dotted = f"{source.module}.{row.qualname}" if source.module else row.qualname
                node = Node(dotted, row, source)
                self.nodes.append(node)
                self.by_dotted.setdefault(dotted, []).append(node)
                self.by_file.setdefault((source.path, row.qualname), []).append(node)
        for node in self.nodes:
            node.bases = list(self._bases(node))
        self.subclasses: dict[int, list[Node]] = {}
        for node in self.nodes:
            for base in node.bases:
                self.subclasses.setdefault(id(base), []).append(node)

    # --- names ----------------------------------------------------------------------------------

    def resolve(self, values: Sequence[str], source: Source) -> list[Node]:
        """The classes of the tree that some values of a file may be."""
        found: dict[int, Node] = {}
        for value in values:
            for node in self._one(value, source):
                found[id(node)] = node
        return list(found.values())

    def _one(self, value: str, source: Source) -> Sequence[Node]:
        module, colon, attrs = value.lstrip("*").partition(":")
        if not colon:
            return ()
        if module == source.module and (source.path, attrs) in self.by_file:
            return self.by_file[source.path, attrs]
        nodes = [
            node for dotted in self.tree.resolve(value, source) for node in self.by_dotted.get(dotted, ())
        ]
        files = {node.source.path for node in nodes if node.source}
        if len(files) > 1 and not any(node.source.package for node in nodes if node.source):
            # Scripts of one name in several folders: those beside the file are meant.
            return [node for node in nodes if node.source and node.source.folder == source.folder]
        return nodes

    def _bases(self, node: Node) -> Iterator[Node]:
        assert node.row is not None and node.source is not None
        for values in node.row.bases:
            nodes = [found for found in self.resolve(values, node.source) if found is not node]
            if nodes:
                # Of several, such as one in each arm of a try, the first is the one that is meant to be had.
                yield nodes[0]
            else:
                text = values[0].replace(":", ".") if values else "?"
                yield self.outside.setdefault(text, Node(text))

    # --- inheritance ----------------------------------------------------------------------------

    def mro(self, node: Node) -> list[Node]:
        """The order in which Python looks through a class and its bases (C3)."""
        if node.order is None:
            node.order = [node]  # a circle ends here
            rows = [list(self.mro(base)) for base in node.bases]
            rows.append(list(node.bases))
            merged = [node]
            while any(rows):
                rows = [row for row in rows if row]
                head = next(
                    (row[0] for row in rows if not any(row[0] in other[1:] for other in rows)), rows[0][0]
                )
                merged.append(head)
                rows = [[part for part in row if part is not head] for row in rows]
            node.order = merged
        return node.order

    def below(self, node: Node) -> list[Node]:
        """The class and all that inherit from it."""
        found: dict[int, Node] = {id(node): node}
        waiting = [node]
        while waiting:
            for child in self.subclasses.get(id(waiting.pop()), ()):
                if id(child) not in found:
                    found[id(child)] = child
                    waiting.append(child)
        return list(found.values())

    # --- signatures -----------------------------------------------------------------------------

    def initialiser(self, node: Node, after: Node | None = None) -> Initialiser | None:
        """The first ``__init__`` in the order of a class; None where the tree has none.

        Args:
            node: The class.
            after: Look behind this one, as ``super()`` in it does.
        """
        order = self.mro(node)
        if after is not None:
            order = order[order.index(after) + 1 :] if after in order else []
        for owner in order:
            row = owner.row
            if row is None:
                continue
            if row.init is not None:
                return Initialiser(owner, tuple(row.init.parameters), row.init.line, False)
            if row.dataclass is not None and row.dataclass.get("init", True):
                return Initialiser(owner, tuple(self._generated(owner)), row.line, True)
        for owner in order:
            row = owner.row
            if row is not None and row.new is not None:
                return Initialiser(owner, tuple(row.new.parameters), row.new.line, False)
            if row is not None and any(base.name == "NamedTuple" and not base.row for base in owner.bases):
                fields = [Parameter(part.name, "b", part.default) for part in row.fields]
                return Initialiser(owner, tuple(fields), row.line, True)
        return None

    def _generated(self, node: Node) -> list[Parameter]:
        fields: dict[str, Parameter | None] = {}
        for owner in reversed(self.mro(node)):
            row = owner.row
            if row is None or row.dataclass is None:
                continue
            is_keyword = row.dataclass.get("kw_only", False)
            for part in row.fields:
                if part.is_marker:
                    is_keyword = True
                    continue
                kind = "k" if is_keyword or part.is_keyword else "b"
                fields[part.name] = Parameter(part.name, kind, part.default) if part.is_init else None
        found = [part for part in fields.values() if part is not None]
        return sorted(found, key=lambda part: part.kind == "k")

    # --- what is passed on ----------------------------------------------------------------------

    def passes_on(self, node: Node, init: Initialiser) -> list[tuple[Site, Initialiser]]:
        """The calls of further ``__init__`` in one, for a construction of a class."""
        row = init.owner.row
        found = []
        for site in row.chains if row is not None else ():
            if site.text not in ("__init__", "__post_init__", "__new__"):
                continue
            if site.form == "super":
                further = self.initialiser(node, after=init.owner)
                if further is not None:
                    found.append((site, further))
            elif init.owner.source is not None:
                for base in self.resolve(site.values, init.owner.source):
                    further = self.initialiser(base)
                    if further is not None:
                        found.append((site, further))
        return found

    def reaches(
        self, node: Node, target: Initialiser, init: Initialiser | None = None, depth: int = 0
    ) -> bool:
        """Whether the construction of a class runs an ``__init__``."""
        init = init or self.initialiser(node)
        if init is None or depth > _DEEPEST:
            return False
        if init.owner is target.owner:
            return True
        if init.is_generated and target.is_generated and target.owner in self.mro(init.owner):
            # It calls no other, but takes the fields that it inherits.
            return True
        return any(
            self.reaches(node, target, further, depth + 1)
            for _, further in self.passes_on(node, init)
            if further.owner is not init.owner
        )

    def bind(
        self, shape: Shape, node: Node, name: str, target: Initialiser, init: Initialiser | None = None
    ) -> Bound:
        """How a construction of a class gives an argument that an ``__init__`` on its way takes.

        The first ``__init__`` of the class's order binds; where it has no such parameter and hands
        ``*args`` and ``**kwargs`` on, the next one does.

        Args:
            shape: The call.
            node: The class.
            name: The argument.
            target: The ``__init__`` that takes it.
            init: Where to begin; the first one by default.
        """
        init = init or self.initialiser(node)
        if init is None:
            return Bound("not-accepted", is_keyword=False)
        bound = bind(shape, init.parameters, name)
        if bound is not None:
            return bound
        rest = leftover(shape, init.parameters)
        ways = [
            (site, further)
            for site, further in self.passes_on(node, init)
            if further.owner is not init.owner and self.reaches(node, target, further)
        ]
        kinds: Mapping[str, bool] = {kind: True for part in init.parameters for kind in part.kind}
        for site, further in ways[:1]:
            written = Shape(
                site.shape.positional.replace("a", ""),
                {key: letter for key, letter in site.shape.keywords.items() if letter != "k"},
            )
            alone = self.bind(written, node, name, target, further)
            if alone.kind in ("keyword", "positional", "supplied"):
                return Bound("supplied", is_keyword=False)
            if alone.kind == "none":
                break  # what the subclass gives is None, and nobody who constructs it can mend that
            takes_args, takes_kwargs = "a" in site.shape.positional, site.shape.keywords.get("**") == "k"
            if not (takes_args and "a" in kinds) and not (takes_kwargs and "w" in kinds):
                break
            whole = Shape(
                site.shape.positional.replace("a", rest.positional if takes_args else ""),
                {**written.keywords, **(rest.keywords if takes_kwargs else {})},
            )
            found = self.bind(whole, node, name, target, further)
            own = sum(part.kind in "pb" for part in init.parameters)
            position = 0
            if found.position and takes_args and site.shape.positional.endswith("a"):
                position = found.position - (len(site.shape.positional) - 1) + own
            return found._replace(
                position=max(position, 0), is_keyword=found.is_keyword and takes_kwargs and "w" in kinds
            )
        return Bound("not-accepted", is_keyword=False)
