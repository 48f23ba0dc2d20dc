"""The search for reads of groups: which files to read, where names lead, and what is said of each use."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardweave.lint.cache import Cache, digest, own_digest
from shardweave.lint.collectives import COLLECTIVES, QUERIES, WORLDS, misses_group
from shardweave.lint.facts import Class, Facts, Function, Member, Use, facts_from
from shardweave.lint.files import Source
from shardweave.lint.finding import READS, REEXPORTED, Finding
from shardweave.lint.many import cores, each
from shardweave.lint.names import Tree
from shardweave.lint.presets import Target
from shardweave.lint.read import read_facts

if TYPE_CHECKING:
    from shardweave.lint.groups import Options

__all__ = ["Search"]


@dataclass(frozen=True, slots=True)
class _Hit:
    """What a use turned out to be."""

    target: Target
    dotted: str
    name: str


class Search:
    """One search."""

    def __init__(self, sources: Sequence[Source], options: Options, cache: Cache) -> None:
        self.sources, self.options, self.cache = sources, options, cache
        presets = options.presets
        self.targets = [target for preset in presets for target in preset.targets]
        self.collections = [collection for preset in presets for collection in preset.collections]
        self.collectives = tuple(module for preset in presets for module in preset.collectives)
        self.definitions = {module for preset in presets for module in preset.definitions}
        self.state = {target.module.rpartition(".")[2] for target in self.targets} | {
            module.rpartition(".")[2] for target in self.targets for module in target.everywhere
        }
        self.facts: dict[str, Facts | None] = {}
        self.broken: list[Finding] = []
        self.matched: dict[str, _Hit | None] = {}
        self.loaded = cache.rows("facts")
        self.saved: dict[str, bytes] = {}
        self.own = own_digest() if cache.folder is not None else ""
        self.tree = Tree(sources, facts_of=self.facts_of, is_target=self.is_target)

    # --- facts of files -------------------------------------------------------------------------

    def facts_of(self, source: Source) -> Facts | None:
        """The facts of a file, read when first asked for; None where it is no Python."""
        if source.place in self.facts:
            return self.facts[source.place]
        self.facts[source.place] = None
        key = self.key(source)
        if key in self.loaded:
            return self.take(source, self.loaded[key])
        try:
            # Python warns of odd escapes in other people's texts; that is not our matter.
            tree = _parse(source.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None) or 1
            self.broken.append(_broken(source, line, f"no Python: {getattr(error, 'msg', None) or error}"))
            return None
        try:
            found = read_facts(tree, package=source.package, module=source.module, text=source.text)
        except RecursionError:
            self.broken.append(_broken(source, 1, "nested too deeply to be read"))
            return None
        self.facts[source.place] = found
        if key:
            self.saved[key] = _row(found)
        return found

    def key(self, source: Source) -> str:
        """What the facts of a file are kept under; empty where nothing is kept."""
        if self.cache.folder is None:
            return ""
        return digest(self.own, source.module, source.package, source.text)

    def take(self, source: Source, row: bytes) -> Facts:
        """Facts of a file that were written down."""
        found = self.facts[source.place] = facts_from(json.loads(row))
        if self.cache.folder is not None:
            self.saved[self.key(source)] = row
        return found

    def read_all(self, sources: Sequence[Source]) -> None:
        """Read many files, on all cores where that is worth it."""
        unread = [source for source in sources if self.key(source) not in self.loaded]
        sizes = [len(source.text) for source in unread]
        if cores(sizes) > 1:

            def row(source: Source) -> bytes:
                facts = self.facts_of(source)
                return b"" if facts is None else _row(facts)

            for source, made in zip(unread, each(row, unread, sizes=sizes), strict=True):
                if made and source.place not in self.facts:
                    self.take(source, made)
        for source in sources:
            self.facts_of(source)

    def read_with(self, names: Iterable[str]) -> bool:
        """Read the files that may use one of the names, and say whether there were any.

        Args:
            names: Functions as words, methods as ``Class.method``: a file that calls one names both.
        """
        pairs: dict[bytes, set[bytes]] = {}
        for name in names:
            head, _, last = name.encode().rpartition(b".")
            pairs.setdefault(head.rpartition(b".")[2] or last, set()).add(last)
        if not pairs:
            return False
        pattern = re.compile(rb"\b(?:" + b"|".join(map(re.escape, sorted(pairs))) + rb")\b")
        fresh = [
            source
            for source in self.sources
            if source.place not in self.facts
            and any(last in source.text for head in set(pattern.findall(source.text)) for last in pairs[head])
        ]
        for source in fresh:
            self.facts_of(source)
        return bool(fresh)

    # --- targets --------------------------------------------------------------------------------

    def is_target(self, dotted: str) -> bool:
        """Whether a dotted name is one that is looked for."""
        return self.match(dotted) is not None or self.collective(dotted) is not None

    def match(self, dotted: str) -> _Hit | None:
        """The target that a dotted name is."""
        if dotted not in self.matched:
            self.matched[dotted] = None
            module, _, name = dotted.rpartition(".")
            for target in self.targets:
                if module in target.everywhere and target.pattern.fullmatch(name):
                    self.matched[dotted] = _Hit(target, f"{target.module}.{name}", name)
                    break
        return self.matched[dotted]

    def hit(self, use: Use, source: Source) -> _Hit | None:
        """The target that a use leads to."""
        for value in use.values:
            for dotted in self.tree.resolve(value, source):
                found = self.match(dotted)
                if found is not None:
                    return found
        return None

    def is_definition(self, source: Source) -> bool:
        """Whether the file is the state itself."""
        return source.module in self.definitions

    # --- the run --------------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        """All that is found, in no order."""
        for source in self.sources:
            if source.problem:
                self.broken.append(_broken(source, 1, source.problem))
        first = re.compile("|".join(f"(?:{target.names})" for target in self.targets) or r"(?!)")
        words = re.compile(
            rb"\b(?:" + b"|".join(target.names.encode() for target in self.targets) + rb")\b"
            if self.targets
            else rb"(?!)"
        )
        state = b"|".join(word.encode() for word in sorted(self.state))
        imported = re.compile(rb"^[ \t]*(?:from|import)\b[^\n]*\b(?:" + state + rb")\b", re.MULTILINE)
        owned = re.compile(rb"hasattr\(|\.\w+ = ")
        owners = [name.encode() for c in self.collections for name in (*c.owners, c.cls.rpartition(".")[2])]
        self.read_all(
            [
                source
                for source in self.sources
                for text in [source.text]
                if words.search(text)
                or (self.targets and _COMPUTED.search(text) and imported.search(text))
                or (self.collectives and b"distributed" in text and _COLLECTIVE.search(text))
                or (any(owner in text for owner in owners) and owned.search(text))
            ]
        )
        hidden, carriers = self.spread(first)
        for source in self.sources:
            facts = self.facts.get(source.place)
            if facts is not None and not self.is_definition(source):
                for use in facts.uses:
                    yield from self.of_use(use, source, first, hidden, carriers)
                for member in facts.members:
                    yield from self.of_member(member, source)
        if self.options.wants("SW001"):
            yield from self.broken
        if self.saved.keys() != self.loaded.keys():
            self.cache.keep("facts", self.saved)

    def spread(self, first: re.Pattern[str]) -> tuple[dict[str, str], set[str]]:
        """Names under which accessors go on, and functions whose result is one, to the end of the chain.

        Returns:
            Where each hiding function is, by its dotted name, and the words to look for.
        """
        hidden: dict[str, str] = {}
        carriers: set[str] = set()
        wanted: set[str] = set()
        while True:
            before = -1
            while before != len(carriers):
                before = len(carriers)
                for source in self.sources:
                    facts = self.facts.get(source.place)
                    if facts is not None and not self.is_definition(source):
                        for key, values in facts.exports.items():
                            name = key.rpartition(".")[2]
                            if (
                                name not in carriers
                                and not first.fullmatch(name)
                                and any(self.leads(value, source, first, carriers) for value in values)
                            ):
                                carriers.add(name)
                                wanted.add(key)
            grew = True
            while grew:
                grew = False
                for source in self.sources:
                    facts = self.facts.get(source.place)
                    if facts is None or self.is_definition(source):
                        continue
                    for qualname, function in facts.functions.items():
                        dotted = f"{source.module}.{qualname}"
                        if dotted not in hidden and any(
                            self.carries(facts.uses[index], source, hidden, first, carriers)
                            for index in function.flows
                        ):
                            hidden[dotted] = f"{source.path}:{function.line}"
                            carriers.add(qualname.rpartition(".")[2])
                            wanted.add(qualname)
                            grew = True
            if not self.read_with(name for name in wanted if ".__" not in name):
                return hidden, carriers

    def leads(self, value: str, source: Source, first: re.Pattern[str], words: set[str]) -> bool:
        """Whether a value is an accessor, under whatever name."""
        last = re.split("[.:]", value)[-1]
        return bool(last in words or first.fullmatch(last)) and any(
            self.match(dotted) is not None for dotted in self.tree.resolve(value, source)
        )

    def carries(
        self, use: Use, source: Source, hidden: Mapping[str, str], first: re.Pattern[str], words: set[str]
    ) -> bool:
        """Whether what a use gives is a read."""
        if use.form not in ("call", "ref") or not self.might(use, first, words):
            return False
        if self.hit(use, source) is not None:
            return use.form == "call"
        return self.wrapper(use, source, hidden) is not None

    def might(self, use: Use, first: re.Pattern[str], words: set[str]) -> bool:
        """Whether the last name of a use can be one of interest; following names is dear."""
        for value in use.values:
            last = re.split("[.:]", value)[-1]
            if last in words or first.fullmatch(last):
                return True
        return False

    def wrapper(self, use: Use, source: Source, hidden: Mapping[str, str]) -> str | None:
        """The hiding function that a use calls."""
        for value in use.values:
            for dotted in self.tree.resolve(value, source):
                if dotted in hidden:
                    if use.form == "call":
                        return dotted
                    facts = self.facts_at(dotted)
                    if facts is not None and facts.is_property:
                        return dotted
        return None

    def facts_at(self, dotted: str) -> Function | None:
        """The function of a dotted name."""
        parts = dotted.split(".")
        for count in range(len(parts) - 1, 0, -1):
            source = self.tree.module(".".join(parts[:count]))
            if source is not None:
                facts = self.facts.get(source.place)
                return facts.functions.get(".".join(parts[count:])) if facts else None
        return None

    # --- what is found --------------------------------------------------------------------------

    def of_use(
        self,
        use: Use,
        source: Source,
        first: re.Pattern[str],
        hidden: Mapping[str, str],
        words: set[str],
    ) -> Iterator[Finding]:
        """What is said of one use."""
        kind = "fallback" if use.fallback else "unconditional"
        yield from self.of_default(use, source, kind)
        might = self.might(use, first, words)
        hit = self.hit(use, source) if might else None
        if hit is not None:
            name = f"{hit.name}().{use.chain}" if hit.target.is_chained and use.chain else hit.name
            text, hint = f"{name} of {hit.target.module}", hit.target.hint
            if use.form == "call":
                code, said = hit.target.code, f"{text} is a global group's"
                through = self.through(use, source, hit) if code in READS else ""
                if through:
                    code, said = REEXPORTED, f"{said}, read through {through}"
                yield from self.made(use, source, code, name, kind, said, hint)
            elif use.form == "ref":
                yield from self.made(use, source, "SW104", name, kind, f"{text} is handed on", hint)
            yield from self.dead(use, source, hit.dotted)
        elif might and use.form in ("call", "ref"):
            found = self.wrapper(use, source, hidden)
            if found is not None:
                name = found.rpartition(".")[2]
                text = f"{found} ({hidden[found]}) reads a global group"
                yield from self.made(use, source, "SW105", name, kind, text, "give it the group")
        if hit is None:
            yield from self.of_state(use, source, kind)

    def through(self, use: Use, source: Source, hit: _Hit) -> str:
        """The module that hands on what a use reads; empty where the file names one that has it."""
        written = [name for value in use.values if value for name in self.tree.written(value, source)]
        modules = [name.rpartition(".")[0] for name in written]
        return "" if set(modules) & set(hit.target.modules) else next(iter(modules), "")

    def of_state(self, use: Use, source: Source, kind: str) -> Iterator[Finding]:
        """A computed name of the module, or one that it may not have."""
        for value in use.values:
            parts = [part for part in re.split("[.:]", value) if part]
            near = parts[-1:] if use.form == "dynamic" else parts[-2:-1]
            if not parts or not set(near) & self.state:
                continue
            for dotted in self.tree.resolve(value, source):
                modules = {module for target in self.targets for module in target.everywhere}
                if use.form == "dynamic" and dotted in modules:
                    text = f"a computed name of {dotted} is read"
                    yield from self.made(use, source, "SW104", "getattr", kind, text, _HINT)
                    return
                if use.form != "dynamic":
                    yield from self.dead(use, source, dotted)

    def dead(self, use: Use, source: Source, dotted: str) -> Iterator[Finding]:
        """Said of a name that the module of the state does not define."""
        module, _, name = dotted.rpartition(".")
        known = {target.module for target in self.targets}
        if module not in known or use.guarded or self.tree.module(module) is None:
            return
        if not self.tree.defines(module, name):
            kind, what = ("fallback", "this fallback") if use.fallback else ("unconditional", "this")
            text = f"{module} defines no {name}: {what} can only fail"
            yield from self.made(use, source, "SW106", name, kind, text, "name what is there, or take it out")

    def collective(self, dotted: str) -> str | None:
        """The collective, or name of the default group, that a dotted name is."""
        for module in self.collectives:
            if dotted.startswith(module + "."):
                name = dotted[len(module) + 1 :]
                if name in COLLECTIVES or name in QUERIES or name in WORLDS:
                    return name
        return None

    def of_default(self, use: Use, source: Source, kind: str) -> Iterator[Finding]:
        """What is said of a use of torch.distributed."""
        for value in use.values if self.collectives else ():
            if not (_COLLECTIVE_TEXT.search(value)):
                continue
            for dotted in self.tree.resolve(value, source):
                name = self.collective(dotted)
                if name is None or use.form == "import":
                    continue
                if name in WORLDS:
                    # A variable that holds it is no further read of it.
                    is_called = use.form == "call" or not name.startswith("_get")
                    if is_called and _stands(name.rpartition(".")[2], use, source):
                        text = f"{name} is every rank of the job"
                        yield from self.made(use, source, "SW202", name, kind, text, _HINT)
                elif use.form == "call" and misses_group(use, name):
                    what = "query" if name in QUERIES else "collective"
                    code = "SW203" if use.logged and what == "query" else "SW201"
                    text = f"{name} without a group is over every rank of the job"
                    yield from self.made(use, source, code, name, what, text, "pass group=")
                return

    def of_member(self, member: Member, source: Source) -> Iterator[Finding]:
        """What is said of an attribute of a collection."""
        for collection in self.collections:
            short = collection.cls.rpartition(".")[2]
            last = {re.split("[.:]", value)[-1] for value in member.types}
            if not (short in last or (not last and member.owner in collection.owners)):
                continue
            declared = self.class_of(collection.cls)
            if declared is None:
                return
            place = (source.path, member.line, member.column, member.end_line, member.end_column)
            what = f"{member.owner}.{member.name}"
            if member.form == "has" and (
                declared.getattr == "all" or (declared.getattr == "some" and member.name in declared.fields)
            ):
                code, text = "SW107", f"hasattr of {what} is always true: {short} answers for every field"
                hint = f"compare {what} with None"
            elif member.form == "set" and member.name not in declared.fields:
                code, text = "SW108", f"{short} declares no field {member.name}"
                hint = "declare it, or use a declared field"
            else:
                return
            if self.options.wants(code):
                yield Finding(*place, code, text, member.qualname, member.name, "", hint)
            return

    def class_of(self, dotted: str) -> Class | None:
        """The class of a dotted name, where its file is in the tree."""
        module, _, name = dotted.rpartition(".")
        source = self.tree.module(module)
        facts = self.facts_of(source) if source is not None else None
        return facts.classes.get(name) if facts is not None else None

    def made(
        self, use: Use, source: Source, code: str, name: str, kind: str, message: str, hint: str
    ) -> Iterator[Finding]:
        """The finding of a use, if it is wanted."""
        if self.options.wants(code):
            yield Finding(source.path, use.line, use.column, use.end_line, use.end_column, code, message,
                          use.qualname, name, kind, hint)  # fmt: skip


_COMPUTED = re.compile(rb"getattr\([^,\n]+,\s*(?![\"'])")
_HINT = "take the group as an argument"
_NAMES = sorted({*COLLECTIVES, *QUERIES, "WORLD", "_get_default_group", "default_pg"}, key=len, reverse=True)
_COLLECTIVE = re.compile(rb"\b(?:" + "|".join(_NAMES).encode() + rb")\b")
_COLLECTIVE_TEXT = re.compile(r"[.:](?:" + "|".join(_NAMES) + r")$")


def _row(facts: Facts) -> bytes:
    return json.dumps(facts, separators=(",", ":")).encode()


def _parse(text: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _stands(name: str, use: Use, source: Source) -> bool:
    """Whether the place of a use ends with a name."""
    line = source.text.splitlines()[use.end_line - 1].decode(errors="replace")
    return line[: use.end_column - 1].endswith(name)


def _broken(source: Source, line: int, why: str) -> Finding:
    return Finding(
        source.path, line, 1, line, 1, "SW001", why, "<module>", "", "", "put it right, or exclude it"
    )
