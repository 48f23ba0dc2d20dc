"""Settings: frozen dataclasses from which files, command lines and a reference page are read and made.

A setting is a field of a section, and a section a field of the whole. Its type says what it may be, and the
docstring of its section says what it means: there is no second list of either. All that is wrong is found in
one pass and said together.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from shardweave.errors import ConfigError, FormatError, MissingFileError

Whole = TypeVar("Whole")

_MOST_BYTES = 1 << 20
_NULL = ("null", "none", "~")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number may be.

    Attributes:
        least: The least value.
        most: The greatest value.
        over: Whether ``least`` itself is too little.
    """

    least: float
    most: float = math.inf
    over: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.least < value if self.over else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        low = f"above {self.least:g}" if self.over else f"from {self.least:g}"
        return low if self.most == math.inf else f"{low} to {self.most:g}"


Count = Annotated[int, Bounds(1)]
"""A number of things that there are."""
Natural = Annotated[int, Bounds(0)]
"""A number, 0 included."""
Amount = Annotated[float, Bounds(0)]
"""A number from 0."""
Positive = Annotated[float, Bounds(0, over=True)]
"""A number above 0."""


# --- what there is ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        key: Section and name, with a dot between.
        hint: Its type, as annotated.
        default: Its value where nothing is said; ``MISSING`` of dataclasses where something has to be.
        meaning: One line from the docstring of its section.
    """

    key: str
    hint: Any
    default: Any
    meaning: str

    @property
    def type(self) -> str:
        """Its type, for people."""
        return _type_text(self.hint)


@cache
def settings(whole: type) -> tuple[Setting, ...]:
    """All settings of a whole, in order."""
    found = []
    for name, section in typing.get_type_hints(whole).items():
        hints, meanings = typing.get_type_hints(section, include_extras=True), _meanings(section)
        for field in dataclasses.fields(section):
            key = f"{name}.{field.name}"
            found.append(Setting(key, hints[field.name], field.default, meanings.get(field.name, "")))
    return tuple(found)


def _meanings(section: type) -> dict[str, str]:
    """The attributes of a docstring, each on one line."""
    text = inspect.cleandoc(section.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^    (?=\w+: )", text, flags=re.MULTILINE)[1:]
    return {name: " ".join(rest.split()) for name, _, rest in (entry.partition(":") for entry in entries)}


def _type_text(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return f"{_type_text(arguments[0])} {arguments[1]}"
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin is types.UnionType or origin is typing.Union:
        return " or ".join("null" if part is type(None) else _type_text(part) for part in arguments)
    if origin is tuple:
        return f"list of {_type_text(arguments[0])}"
    return {int: "whole number", float: "number", bool: "true or false", str: "text"}[hint]


def reference(whole: type) -> str:
    """The settings of a whole as tables in Markdown, one a section."""
    lines: list[str] = []
    for name, section in typing.get_type_hints(whole).items():
        about = inspect.cleandoc(section.__doc__ or "").partition("\n\nAttributes:")[0]
        lines += [f"## {name}", "", about, "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for setting in settings(whole):
            if setting.key.startswith(f"{name}."):
                default = (
                    "needed" if setting.default is dataclasses.MISSING else f"`{shown(setting.default)}`"
                )
                meaning = setting.meaning.replace("``", "`")
                lines.append(f"| `{setting.key}` | {setting.type} | {default} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A value as a file would have it.

    >>> shown(None), shown(True), shown(1e-5), shown((8, 7)), shown("ring")
    ('null', 'true', '1e-05', '8,7', 'ring')
    """
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, tuple):
        return ",".join(map(shown, value))
    return str(value)


def plain(whole: Any) -> dict[str, dict[str, Any]]:
    """All values by section and name, as JSON has them."""
    return {
        section.name: {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in dataclasses.fields(getattr(whole, section.name))
            for value in (getattr(getattr(whole, section.name), field.name),)
        }
        for section in dataclasses.fields(whole)
    }


# --- reading ------------------------------------------------------------------------------------


def load(path: Path) -> Mapping[str, Any]:
    """What a file says: JSON where it ends in ``.json``, else YAML.

    Raises:
        MissingFileError: There is no such file.
        FormatError: It is no mapping, gives a key twice, or is no JSON or YAML at all.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise MissingFileError(
            "a run has a file of settings", where=str(path), hint="give the path of a .yaml or .json file"
        ) from None
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError(f"bytes({len(data)}) > {_MOST_BYTES}")
        value = json.loads(data, object_pairs_hook=_once) if path.suffix == ".json" else _yaml(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            "settings are one mapping with each key once",
            where=str(path),
            equation=" ".join(str(error).split()),
            hint="correct it at that place",
        ) from None
    if value is not None and not isinstance(value, Mapping):
        raise FormatError(
            "settings are one mapping",
            where=str(path),
            equation=f"got a {type(value).__name__}",
            hint="write sections, such as model:, and below each its settings",
        )
    return value or {}


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is given twice")
        found[key] = value
    return found


def _yaml(data: bytes) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Plain values only, and no key twice."""

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        loader.flatten_mapping(node)
        pairs = ((loader.construct_object(k, True), loader.construct_object(v, True)) for k, v in node.value)
        return _once(list(pairs))

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    try:
        return yaml.load(data, Loader)  # a SafeLoader
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError(str(error)) from None


def read(
    whole: Callable[..., Whole],
    said: Mapping[str, Any],
    overrides: Sequence[tuple[str, str]] = (),
    *,
    where: str = "",
) -> tuple[Whole | None, list[ConfigError]]:
    """Settings from what a file and a command line say, and all that is wrong with it.

    Args:
        whole: The class of the whole.
        said: Mappings by section.
        overrides: Keys and values from a command line, as texts; they win over the file.
        where: How messages call the file.

    Returns:
        The settings, ``None`` where something is wrong; and what is wrong.
    """
    assert isinstance(whole, type)
    known = {setting.key: setting for setting in settings(whole)}
    given, wrong = {}, []
    for key, value in _flat(whole, said):
        if key in known:
            given[key] = _value(known[key].hint, value, text=False)
        else:
            wrong.append(_unknown(key, known, where, value))
    for key, text in overrides:
        if key in known:
            given[key] = _value(known[key].hint, text, text=True)
        else:
            wrong.append(_unknown(key, known, "the command line"))
    for key, value in given.items():
        if isinstance(value, _Wrong):
            from_line = any(key == other for other, _ in overrides)
            wrong.append(
                ConfigError(
                    "a setting has a value of its type",
                    where="the command line" if from_line else where,
                    equation=f"{key}={value.value!r:.80}, wanted: {known[key].type}",
                    hint=f"{key}: {known[key].meaning.rstrip('.')}",
                )
            )
    for key, setting in known.items():
        if setting.default is dataclasses.MISSING and key not in given:
            wrong.append(
                ConfigError(
                    "a setting that has no default is given",
                    where=where,
                    equation=f"{key} is not there",
                    hint=f"{key}: {setting.meaning.rstrip('.')}",
                )
            )
    if wrong:
        return None, wrong
    sections = {
        name: section(**{k.partition(".")[2]: v for k, v in given.items() if k.startswith(f"{name}.")})
        for name, section in typing.get_type_hints(whole).items()
    }
    return whole(**sections), []


def _flat(whole: type, said: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    sections = typing.get_type_hints(whole)
    for section, values in said.items():
        if isinstance(values, Mapping) and section in sections:
            yield from ((f"{section}.{name}", value) for name, value in values.items())
        elif values is not None or section not in sections:
            yield str(section), values


def _unknown(key: str, known: Mapping[str, Setting], where: str, value: Any = None) -> ConfigError:
    names: dict[str, str] = {k.partition(".")[2]: k for k in known}
    if isinstance(value, Mapping):
        close = difflib.get_close_matches(key, {k.partition(".")[0]: None for k in known}, 1)
    else:
        close = difflib.get_close_matches(key, known, 1)
    if not close:
        near = difflib.get_close_matches(key.rpartition(".")[2], names, 1)
        close = [names[near[0]]] if near else []
    return ConfigError(
        "every setting is known",
        where=where,
        equation=f"{key} is not a setting",
        hint=f"did you mean {close[0]}?" if close else "shardweave train --keys lists all",
    )


@dataclass(frozen=True, slots=True)
class _Wrong:
    value: Any


def _value(hint: Any, value: Any, *, text: bool) -> Any:
    """A value of a type, from what a file says or from the text of a command line; or ``_Wrong``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    wrong = _Wrong(value)
    if origin is Annotated:
        found = _value(arguments[0], value, text=text)
        return found if not isinstance(found, _Wrong) and found in arguments[1] else wrong
    if origin is Literal:
        return value if isinstance(value, str) and value in arguments else wrong
    if origin is types.UnionType or origin is typing.Union:
        if type(None) in arguments and (value is None or (text and value.lower() in _NULL)):
            return None
        tried = (_value(part, value, text=text) for part in arguments if part is not type(None))
        return next((found for found in tried if not isinstance(found, _Wrong)), wrong)
    if origin is tuple:
        parts = value.split(",") if text else value
        if not isinstance(parts, list) or not parts:
            return wrong
        items = tuple(_value(arguments[0], part, text=text) for part in parts)
        return wrong if any(isinstance(item, _Wrong) for item in items) else items
    return _plain_value(hint, value, text=text)


def _plain_value(hint: Any, value: Any, *, text: bool) -> Any:
    wrong = _Wrong(value)
    if hint is str:
        return value if isinstance(value, str) and value else wrong
    if hint is bool:
        named = {"true": True, "false": False}
        return named.get(value.lower(), wrong) if text else value if type(value) is bool else wrong
    if hint is int:
        if text and re.fullmatch(r"-?\d{1,18}", value.replace("_", ""), re.ASCII):
            return int(value)
        return value if type(value) is int else wrong
    # YAML 1.1 takes 1e-4 for a text.
    if isinstance(value, str) and re.fullmatch(
        r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", value, re.ASCII | re.IGNORECASE
    ):
        value = float(value)
    if type(value) not in (int, float) or not math.isfinite(value):
        return wrong
    return float(value)
