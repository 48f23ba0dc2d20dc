"""A name followed through the imports of a tree of files to where it is defined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from shardweave.lint.facts import Facts
from shardweave.lint.files import Source

__all__ = ["Tree"]

_LONGEST = 30


class Tree:
    """Files as modules. Facts of a file are read when a name first leads to it.

    Args:
        sources: The files, with their modules.
        facts_of: Reads the facts of a file; None where it is no Python.
        is_target: Whether a dotted name outside the tree is known to be there, for star imports.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        facts_of: Callable[[Source], Facts | None],
        is_target: Callable[[str], bool],
    ) -> None:
        self.facts_of, self.is_target = facts_of, is_target
        self.modules: dict[str, list[Source]] = {}
        for source in sources:
            self.modules.setdefault(source.module, []).append(source)
        self.known: dict[tuple[str, str], tuple[str, ...]] = {}

    def module(self, name: str, folder: str = "") -> Source | None:
        """The file of a module. Scripts of one name in several folders are told apart by who imports them."""
        found = self.modules.get(name)
        if not found:
            return None
        if len(found) == 1 and found[0].package:
            return found[0]
        beside = [source for source in found if source.folder == folder or source.package]
        return beside[0] if len(beside) == 1 else None

    def resolve(self, value: str, source: Source) -> tuple[str, ...]:
        """The dotted names that a value of a file stands for; empty where it is something else.

        Args:
            value: As in `shardweave.lint.facts`.
            source: The file.
        """
        key = (value, "" if source.package else source.folder)
        if key not in self.known:
            self.known[key] = ()  # a circle ends here
            module, _, attrs = value.lstrip("*").partition(":")
            found = self._follow(
                module, attrs.split(".") if attrs else [], source.folder, value.startswith("*"), 0
            )
            self.known[key] = tuple(dict.fromkeys(found))
        return self.known[key]

    def written(self, value: str, source: Source) -> Iterator[str]:
        """The dotted names that a value has by its own file alone, before any other is asked."""
        todo, seen = [value], {value}
        while todo:
            module, _, attrs = todo.pop().lstrip("*").partition(":")
            parts = attrs.split(".") if attrs else []
            facts = self.facts_of(source) if module == source.module else None
            leads: list[str] = []
            for count in range(len(parts) if facts is not None else 0, 0, -1):
                head = ".".join(parts[:count])
                if facts is not None and head in facts.exports:
                    rest = "".join(f".{part}" for part in parts[count:])
                    known = (lead for lead in facts.exports[head] if lead and lead != f"{module}:{head}")
                    leads = [f"{lead}{rest}".replace(":.", ":") for lead in known]
                    break
            if not leads:
                yield ".".join([module, *parts])
            todo += [lead for lead in leads if lead not in seen]
            seen.update(leads)

    def defines(self, module: str, name: str) -> bool:
        """Whether a module of the tree has the name; true where that cannot be known."""
        source = self.module(module)
        facts = self.facts_of(source) if source is not None else None
        if facts is None or facts.is_dynamic:
            return True
        if name in facts.exports or f"{module}.{name}" in self.modules or name.startswith("__"):
            return True
        return any(self.module(star) is None or self._offers(star, name, 0) for star in facts.stars)

    def _follow(
        self, module: str, attrs: Sequence[str], folder: str, if_there: bool, depth: int
    ) -> Iterable[str]:
        source = self.module(module, folder)
        if depth > _LONGEST or module.startswith("?"):
            return ()
        if source is None:
            dotted = ".".join([module, *attrs])
            return () if if_there and not self.is_target(dotted) else (dotted,)
        if not attrs:
            return (module,)
        facts = self.facts_of(source)
        if facts is None or (if_there and not self._offers(module, attrs[0], depth)):
            return ()
        for count in range(len(attrs), 0, -1):
            key = ".".join(attrs[:count])
            values = facts.exports.get(key)
            if values is not None:
                found: list[str] = []
                for value in values:
                    if value == f"{source.module}:{key}":
                        found.append(".".join([source.module, *attrs]))
                    elif value:
                        found += self._next(value, attrs[count:], source, depth)
                return found
        below = f"{module}.{attrs[0]}"
        if below in self.modules:
            return self._follow(below, attrs[1:], folder, False, depth + 1)
        for star in reversed(facts.stars):
            if self._offers(star, attrs[0], 0):
                return self._follow(star, attrs, source.folder, False, depth + 1)
        return () if if_there else (".".join([module, *attrs]),)

    def _next(self, value: str, rest: Sequence[str], source: Source, depth: int) -> Iterable[str]:
        module, _, attrs = value.lstrip("*").partition(":")
        parts = [*(attrs.split(".") if attrs else ()), *rest]
        return self._follow(module, parts, source.folder, value.startswith("*"), depth + 1)

    def _offers(self, module: str, name: str, depth: int) -> bool:
        """Whether a star import of the module brings the name."""
        source = self.module(module)
        if source is None:
            return self.is_target(f"{module}.{name}")
        facts = self.facts_of(source)
        if facts is None or depth > _LONGEST:
            return False
        if facts.public is not None:
            return name in facts.public
        if name.startswith("_"):
            return False
        return name in facts.exports or any(self._offers(star, name, depth + 1) for star in facts.stars)
