"""Who constructs a class, or a subclass that reaches its ``__init__``, and what happens to one argument.

Signatures decide, bound as Python binds them, and the order in which Python looks through bases (C3):
never how many arguments there are, and never a list of names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardweave.errors import ConfigError
from shardweave.lint.binding import Bound
from shardweave.lint.cache import Cache
from shardweave.lint.class_cache import OWN, FileIndex, load
from shardweave.lint.class_rows import Site
from shardweave.lint.facts import Facts
from shardweave.lint.files import Source, find, read
from shardweave.lint.finding import Finding
from shardweave.lint.hierarchy import Hierarchy, Initialiser, Node
from shardweave.lint.names import Tree
from shardweave.lint.suppress import suppressed

__all__ = ["DIRECT", "KINDS", "Inventory", "inventory"]

_CODE_OF = {
    "keyword": "SW300", "positional": "SW300", "missing": "SW301", "none": "SW302", "args": "SW303",
    "kwargs": "SW303", "twice": "SW304", "rejected": "SW304", "not-accepted": "SW305", "supplied": "SW305",
    "spec": "SW306", "partial-bound": "SW307", "partial": "SW307", "escape": "SW308",
}  # fmt: skip
DIRECT = ("keyword", "positional", "missing", "none", "args", "kwargs", "twice", "rejected",
          "not-accepted", "supplied")  # fmt: skip
"""Kinds of a call of the class itself."""
_PASSED = ("keyword", "positional", "args", "kwargs", "supplied")
KINDS = (*_CODE_OF, *(f"super-{kind}" for kind in DIRECT))
"""Every kind that a finding has."""
_WORST = ("twice", "rejected", "missing", "none", "args", "kwargs", "not-accepted", "supplied", "positional",
          "keyword")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a tree does with one argument of one class."""

    cls: str
    """Dotted name."""
    argument: str
    init: str
    """``path:line`` of the ``__init__`` that takes it."""
    family: tuple[str, ...]
    """The class and the subclasses that reach that ``__init__``, by dotted name."""
    apart: tuple[str, ...]
    """Subclasses that do not."""
    findings: tuple[Finding, ...]
    """Sorted; `Finding.name` is the dotted name of the class that is constructed."""
    num_files: int
    unread: tuple[str, ...] = ()
    """Files that are no Python, with the reason."""
    allowed: frozenset[int] = frozenset()
    """Indices of the `findings` that comments of the code allow."""

    def counts(self, name: str = "") -> dict[str, int]:
        """How many findings there are of each kind, in the order of `KINDS`.

        Args:
            name: Of this class of the family; of all of them by default.
        """
        kinds = [finding.kind for finding in self.findings if name in ("", finding.name)]
        return {kind: kinds.count(kind) for kind in KINDS if kind in kinds}


def inventory(
    cls: str,
    argument: str,
    paths: Iterable[Path],
    *,
    root: Path = Path(),
    exclude: Sequence[str] = (),
    cache: Path | None = None,
    specs: Mapping[str, str] | None = None,
) -> Inventory:
    """Find every place of a tree that constructs a class, and what it does with an argument.

    Args:
        cls: The class: its dotted name, the end of one that no other class has, or ``module:Class``.
        argument: The name of the parameter.
        paths: Files and folders.
        root: What paths are reported relative to.
        exclude: Files and folders to leave out, as a shell's patterns.
        cache: A folder for what files said, so that the next run reads only what changed.
        specs: What holds a class for somebody else to construct, where the tree does not define it, and the
            argument that is the class. A dataclass of the tree that is given a class as a field is one too.

    Raises:
        ConfigError: There is no such class, there are several, or its ``__init__`` has no such parameter.
        MissingFileError: A path is not there.
    """
    sources = find(paths, root=root, exclude=exclude)
    read(sources)
    search = _Search(sources, load(sources, cache=Cache(cache)), argument, specs or {"ModuleSpec": "module"})
    made = search.run(search.named(cls))
    # Of an inventory of one class, comments about others are not unused.
    left, _ = suppressed(
        made.findings, ((source.path, source.text) for source in sources), judged=lambda code: False
    )
    kept = set(left)
    allowed = (index for index, finding in enumerate(made.findings) if finding not in kept)
    return replace(made, allowed=frozenset(allowed))


@dataclass(slots=True)
class _Search:
    sources: Sequence[Source]
    index: Mapping[str, FileIndex]
    argument: str
    specs: Mapping[str, str]
    hierarchy: Hierarchy = field(init=False)
    init: Initialiser = field(init=False)
    family: dict[int, Node] = field(init=False, default_factory=dict)
    found: list[Finding] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        tree = Tree(self.sources, facts_of=self.facts_of, is_target=lambda dotted: False)
        self.hierarchy = Hierarchy(
            [
                (source, self.index[source.path].classes)
                for source in self.sources
                if source.path in self.index
            ],
            tree,
        )

    def facts_of(self, source: Source) -> Facts | None:
        found = self.index.get(source.path)
        return found.facts if found is not None else None

    # --- the class ------------------------------------------------------------------------------

    def named(self, cls: str) -> Node:
        """The class of a name."""
        dotted = cls.replace(":", ".")
        nodes = self.hierarchy.by_dotted.get(dotted, [])
        if not nodes and "." in dotted:
            module, _, name = dotted.rpartition(".")
            for source in self.sources:
                if source.module == module:
                    nodes = self.hierarchy.resolve([f"{module}:{name}"], source)
        if not nodes:
            nodes = [node for node in self.hierarchy.nodes if f".{node.dotted}".endswith(f".{dotted}")]
        if not nodes:
            raise ConfigError(
                "the class is one of the code that is looked at",
                where=cls,
                equation=f"found no class of that name in {len(self.sources)} files",
                hint="add the path of the file that defines it",
            )
        if len({node.dotted for node in nodes}) > 1:
            names = sorted({node.dotted for node in nodes})
            raise ConfigError(
                "a class is named so that it is one",
                where=cls,
                equation=f"classes of that name = {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
                hint=f"write {names[0]}",
            )
        return nodes[0]

    def run(self, target: Node) -> Inventory:
        init = self.hierarchy.initialiser(target)
        bound = None
        if init is not None:
            taken = {part.name for part in init.parameters if part.kind not in "aw"}
            bound = self.argument in taken
        if init is None or not bound:
            raise ConfigError(
                "the __init__ of the class takes the argument",
                where=target.dotted,
                equation=f"--arg {self.argument!r}, parameters = "
                + (", ".join(part.name for part in init.parameters) or "none" if init else "unseen"),
                hint="name one of its parameters, or the base that takes it",
            )
        self.init = init
        below = self.hierarchy.below(target)
        self.family = {id(node): node for node in below if self.hierarchy.reaches(node, init)}
        apart = [node.dotted for node in below if id(node) not in self.family]
        names = self.names({node.name for node in self.family.values()})
        words = {name.encode() for name in (*names, OWN)}
        for source in self.sources:
            held = self.index.get(source.path)
            if held is not None and not words.isdisjoint(held.words.split(b" ")):
                for site in held.decode():
                    self.site(site, source, names)
        for node in self.family.values():
            self.passing(node)
        assert init.owner.source is not None
        return Inventory(
            target.dotted,
            self.argument,
            f"{init.owner.source.path}:{init.line}",
            (target.dotted, *sorted({n.dotted for n in self.family.values()} - {target.dotted})),
            tuple(sorted(apart)),
            tuple(sorted(set(self.found))),
            len(self.sources),
            tuple(f"{source.path}: {source.problem}" for source in self.sources if source.problem),
        )

    def names(self, names: set[str]) -> set[str]:
        """The names that the family has anywhere in the tree."""
        while True:
            more = {new for held in self.index.values() for old, new in held.renamed if old in names} - names
            if not more:
                return names
            names = names | more

    # --- sites ----------------------------------------------------------------------------------

    def site(self, site: Site, source: Source, names: set[str]) -> None:
        if site.form == "cls":
            self.own_class(site, source)
            return
        if not any(value.rpartition(":")[2].rpartition(".")[2] in names for value in site.values):
            return
        nodes = [node for node in self.hierarchy.resolve(site.values, source) if id(node) in self.family]
        if not nodes:
            return
        if site.form == "call":
            self.direct(site, source, nodes)
        elif site.form == "partial":
            for node in nodes[:1]:
                bound = self.bound(site, node)
                self.partial(site, source, node, bound)
        elif site.form == "arg":
            self.handed(site, source, nodes[0])
        else:
            self.escape(site, source, nodes[0], site.text)

    def bound(self, site: Site, node: Node) -> Bound:
        found = self.hierarchy.bind(site.shape, node, self.argument, self.init)
        if found.kind in ("not-accepted", "supplied") and self.argument in site.shape.keywords:
            return found._replace(kind="rejected")
        return found

    def direct(self, site: Site, source: Source, nodes: Sequence[Node], how: str = "") -> None:
        bounds = [(self.bound(site, node), node) for node in nodes]
        bound, node = min(bounds, key=lambda pair: _WORST.index(pair[0].kind))
        others = [other.name for other in nodes if other is not node]
        what = f"{node.name}{' or ' + ' or '.join(others) if others else ''}"
        self.add(site, source, node, bound.kind, f"{what} {_said(bound, self.argument)}{how}",
                 self.hint(bound, node))  # fmt: skip

    def own_class(self, site: Site, source: Source) -> None:
        """``cls(...)`` constructs the class around it, or any that inherits the method."""
        for owner in self.hierarchy.by_file.get((source.path, site.values[0]), ()):
            inheriting = [
                node
                for node in self.hierarchy.below(owner)
                if id(node) in self.family
                and next((n for n in self.hierarchy.mro(node) if n.row and site.text in n.row.methods), owner)
                is owner
            ]
            if inheriting:
                first = owner if owner in inheriting else inheriting[0]
                rest = len(inheriting) - 1
                more = f", here and in {rest} more that inherit {site.text}" if rest else ""
                self.direct(site, source, [first], f", through the class itself{more}")

    def partial(self, site: Site, source: Source, node: Node, bound: Bound) -> None:
        text = f"{node.name} in a partial that {_said(bound, self.argument)}"
        if bound.kind in ("keyword", "positional", "none"):
            self.add(site, source, node, "partial-bound", text, self.hint(bound, node))
        else:
            hint = f"look at who calls the partial: {self.argument} may be given there"
            self.add(site, source, node, "partial", text, hint)

    def handed(self, site: Site, source: Source, node: Node) -> None:
        callees = self.hierarchy.resolve(site.callee, source)
        holder = next((c for c in callees if c.row is not None and c.row.dataclass is not None), None)
        last = site.text.rpartition(".")[2]
        is_outside = not callees and last in self.specs and site.keyword in (self.specs[last], "0")
        if holder is None and not is_outside:
            self.escape(site, source, node, f"passed to {site.text}")
            return
        where = site.keyword
        if holder is not None and site.keyword.isdecimal():
            init = self.hierarchy.initialiser(holder)
            plain = [part.name for part in init.parameters if part.kind in "pb"] if init else []
            where = plain[int(site.keyword)] if int(site.keyword) < len(plain) else f"argument {site.keyword}"
        if self.argument in site.params:
            more, hint = f", whose params give {self.argument}", "nothing is to be added"
        else:
            more = ""
            hint = f"whoever builds it gives {self.argument}: look at the calls that build this spec"
        self.add(site, source, node, "spec", f"{node.name} as {where} of {last}{more}", hint)

    def escape(self, site: Site, source: Source, node: Node, how: str) -> None:
        self.add(site, source, node, "escape", f"{node.name} is {how}",
                 f"look at what is called there: it gives {self.argument} or does not")  # fmt: skip

    # --- subclasses -----------------------------------------------------------------------------

    def passing(self, node: Node) -> None:
        """What a subclass with an ``__init__`` of its own passes on."""
        init = self.hierarchy.initialiser(node)
        if init is None or init.owner is not node or node is self.init.owner or node.source is None:
            return
        for site, further in self.hierarchy.passes_on(node, init):
            if not self.hierarchy.reaches(node, self.init, further):
                continue
            bound = self.hierarchy.bind(site.shape, node, self.argument, self.init, further)
            takes = any(part.name == self.argument for part in init.parameters)
            if bound.kind == "missing":
                hint = f"add {self.argument}={self.argument} to the call" + (
                    "" if takes else f", and the parameter to {node.name}.__init__"
                )
            else:
                hint = self.hint(bound, further.owner)
            code = "SW310" if bound.kind in _PASSED else "SW309"
            text = f"{node.name}.__init__ {_said(bound, self.argument)} on the way to {self.init.owner.name}"
            self.add(site, node.source, node, f"super-{bound.kind}", text, hint, code)

    def hint(self, bound: Bound, node: Node) -> str:
        """What is to be added, or that nothing is."""
        name, position = self.argument, bound.position
        if bound.kind == "missing":
            if bound.is_keyword:
                return f"add {name}=..."
            return f"add it as argument {position}" if position else f"let {node.name}.__init__ take {name}"
        if bound.kind == "positional":
            return f"nothing is to be added: argument {position} is {name}, a keyword would be a second one"
        if bound.kind == "none":
            what = f"argument {position}" if bound.is_hidden else name
            return f"replace the None of {what}; add no second one"
        if bound.kind == "twice":
            return f"remove {name}=: argument {position} is {name} already"
        if bound.kind in ("args", "kwargs"):
            stars = "*" if bound.kind == "args" else "**"
            return f"add nothing before it is known what {stars} holds: a second value would be a TypeError"
        if bound.kind == "rejected":
            return f"remove {name}=, or let {node.name}.__init__ take it"
        if bound.kind == "supplied":
            return f"nothing is to be added: {node.name}.__init__ passes {name} on by itself"
        if bound.kind == "not-accepted":
            return f"nothing is to be added here: {node.name}.__init__ does not take {name}"
        return "nothing is to be added"

    def add(
        self, site: Site, source: Source, node: Node, kind: str, text: str, hint: str, code: str = ""
    ) -> None:
        self.found.append(
            Finding(
                source.path, site.line, site.column, site.end_line, site.end_column, code or _CODE_OF[kind],
                text, site.qualname, node.dotted, kind, hint,
            )
        )  # fmt: skip


def _said(bound: Bound, name: str) -> str:
    return {
        "keyword": f"gives {name} by keyword",
        "positional": f"gives {name} by position, as argument {bound.position}",
        "none": f"gives None for {name}",
        "args": f"may give {name} in *args",
        "kwargs": f"may give {name} in **kwargs",
        "twice": f"gives {name} twice, by position and by keyword",
        "missing": f"does not give {name}",
        "not-accepted": f"does not take {name}",
        "supplied": f"does not take {name}, and passes one on by itself",
        "rejected": f"does not take {name}, which is given",
    }[bound.kind]
