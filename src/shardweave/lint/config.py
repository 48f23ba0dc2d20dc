"""What ``[tool.shardweave.lint]`` of a pyproject.toml says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardweave.errors import ConfigError
from shardweave.lint.finding import CODES
from shardweave.lint.presets import PRESETS, Preset, Target

__all__ = ["Config", "codes_named", "codes_of", "load", "own", "presets_named"]

_KEYS = ("paths", "presets", "exclude", "select", "ignore", "baseline", "cache", "target")
_TARGET_KEYS = ("modules", "names", "code", "hint", "chained", "reexports")


@dataclass(frozen=True, slots=True)
class Config:
    """Settings; empty ones leave the default."""

    paths: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()
    exclude: tuple[str, ...] = ()
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    baseline: str = ""
    cache: str = ""


def load(root: Path) -> Config:
    """The settings in ``pyproject.toml`` of a folder; none where it has none.

    Raises:
        ConfigError: A setting is unknown or of another type, or the file is no TOML.
    """
    path = root / "pyproject.toml"
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return Config()
    import tomllib  # a run without settings is spared it

    try:
        read = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            "pyproject.toml is TOML", where=str(path), equation=f"got {error}", hint="put it right"
        ) from None
    table = read.get("tool", {}).get("shardweave", {}).get("lint", {})
    for key in table:
        if key not in _KEYS:
            raise _odd(path, key, f"keys are {', '.join(_KEYS)}", repr(table[key]))
    lists = {
        key: _texts(path, key, table.get(key, []))
        for key in ("paths", "presets", "exclude", "select", "ignore")
    }
    presets_named(lists["presets"])
    for key in ("select", "ignore"):
        codes_named(lists[key])
    targets = table.get("target", [])
    if not isinstance(targets, list):
        raise _odd(path, "target", "an array of tables [[tool.shardweave.lint.target]]", repr(targets))
    return Config(
        **lists,
        targets=tuple(_target(path, target) for target in targets),
        baseline=_text(path, "baseline", table.get("baseline", "")),
        cache=_text(path, "cache", table.get("cache", "")),
    )


def presets_named(names: Sequence[str]) -> tuple[Preset, ...]:
    """The presets of some names; all where there are none.

    Raises:
        ConfigError: There is no preset of a name.
    """
    for name in names:
        if name not in PRESETS:
            raise ConfigError(
                "a preset is one of those that there are",
                equation=f"preset {name!r} is not one of {', '.join(PRESETS)}",
                hint="describe other code in [[tool.shardweave.lint.target]] of pyproject.toml",
            )
    return tuple(PRESETS[name] for name in dict.fromkeys(names)) or tuple(PRESETS.values())


def own(config: Config) -> tuple[Preset, ...]:
    """The preset that the targets of the settings make; their modules themselves are not looked at."""
    if not config.targets:
        return ()
    modules = tuple(dict.fromkeys(target.module for target in config.targets))
    return (Preset("own", targets=config.targets, definitions=modules),)


def codes_named(beginnings: Sequence[str], *, among: tuple[str, ...] = ("",)) -> tuple[str, ...]:
    """Beginnings of codes, each of some code.

    Args:
        beginnings: What was asked for.
        among: What the codes that may be meant begin with.

    Raises:
        ConfigError: No code begins so.
    """
    known = [code for code in CODES if code.startswith(among)]
    for text in beginnings:
        if not text or not codes_of((text,), among=among):
            raise ConfigError(
                "a code is one of those that there are, or the beginning of some",
                equation=f"code {text!r} is not one of {', '.join(known)}",
                hint="write SW1 for all reads of groups, SW2 for the default group",
            )
    return tuple(beginnings)


def codes_of(beginnings: Sequence[str], *, among: tuple[str, ...]) -> tuple[str, ...]:
    """Those beginnings that some code of a check has.

    >>> codes_of(("SW1", "SW301"), among=("SW3",))
    ('SW301',)
    """
    of_check = [code for code in CODES if code.startswith(among)]
    return tuple(text for text in beginnings if any(code.startswith(text) for code in of_check))


def _target(path: Path, table: Any) -> Target:
    where = "target"
    if not isinstance(table, dict) or not {"modules", "names"} <= set(table):
        raise _odd(path, where, "a table with modules and names", repr(table))
    for key in table:
        if key not in _TARGET_KEYS:
            raise _odd(path, f"{where}.{key}", f"keys are {', '.join(_TARGET_KEYS)}", repr(table[key]))
    names = _text(path, f"{where}.names", table["names"])
    try:
        re.compile(names)
    except re.error as error:
        raise _odd(path, f"{where}.names", "a regular expression", f"{names!r} ({error})") from None
    modules = _texts(path, f"{where}.modules", table["modules"])
    code = _text(path, f"{where}.code", table.get("code", "SW101"))
    if not modules or code not in ("SW101", "SW102", "SW103"):
        raise _odd(path, where, "at least one module, and the code SW101, SW102 or SW103", repr(table))
    reexports = _texts(path, f"{where}.reexports", table.get("reexports", []))
    made = Target(
        modules, names, code=code, is_chained=bool(table.get("chained", False)), reexports=reexports
    )
    return replace(made, hint=_text(path, "hint", table["hint"])) if "hint" in table else made


def _texts(path: Path, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _odd(path, key, "a list of texts", repr(value))
    return tuple(value)


def _text(path: Path, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _odd(path, key, "a text", repr(value))
    return value


def _odd(path: Path, key: str, wanted: str, got: str) -> ConfigError:
    return ConfigError(
        "a setting is known and of its type",
        where=f"{path}, tool.shardweave.lint.{key}",
        equation=f"wanted: {wanted}; got {got}",
        hint="put it right in pyproject.toml",
    )
