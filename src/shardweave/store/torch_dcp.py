"""Training state as torch.distributed.checkpoint folders hold it, under the names of the model.

A script saves ``{"model": ..., "optim": ...}`` from ``get_state_dict``, and the keys of a folder are the
paths through it: ``model.{fqn}``, ``optim.state.{fqn}.{state}`` and, of each group of parameters,
``optim.param_groups.{number}.{setting}``, or ``optim.param_groups.{fqn}.{setting}`` where the state dict of
the optimizer was flattened. What stands before them is the script's own choice; it is found by the names
that follow, and never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final

from shardweave.errors import FormatError, UnknownNameError
from shardweave.store.manifest import Manifest, StoredTensor
from shardweave.store.strict_json import some

FORMAT: Final = "dcp"
OTHER: Final = "other/"
"""What begins the names of what is neither a weight nor of the optimizer."""

Path = tuple[int | str, ...]
"""The way to a value through nested dicts and lists; torch records it beside the key."""

_GROUPS = re.compile(r"((?:.*?\.)?)param_groups\.")
_KEY = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Keys:
    """Where a script keeps what in the state that it saves.

    Attributes:
        model: The key of the weights.
        optim: The key of the optimizer's state.
        flat: Whether the settings of the optimizer are keyed by parameter, as
            ``StateDictOptions(flatten_optimizer_state_dict=True)`` asks for them, and not by group.
    """

    model: str = "model"
    optim: str = "optim"
    flat: bool = False

    def __post_init__(self) -> None:
        wrong = [key for key in (self.model, self.optim) if not _KEY.fullmatch(key)]
        if wrong or self.model == self.optim:
            raise FormatError(
                "weights and the optimizer's state are under keys of their own",
                equation=f"model({self.model!r}), optim({self.optim!r})",
                hint="give the keys of the dict that the training script loads: words, with dots between",
            )

    def weight(self, name: str) -> Path:
        """The way to a weight."""
        return *self.model.split("."), name

    def state(self, name: str, state: str) -> Path:
        """The way to a state of a weight.

        >>> key_of(Keys(optim="optimizer").state("model.norm.weight", "exp_avg"))
        'optimizer.state.model.norm.weight.exp_avg'
        """
        ends = (f"state.{name}.{state}",) if self.flat else ("state", name, state)
        return *self.optim.split("."), *ends

    def setting(self, group: int | str, setting: str) -> Path:
        """The way to a setting of a group of parameters, or of one parameter where they are flat."""
        ends = (f"param_groups.{group}.{setting}",) if self.flat else ("param_groups", group, setting)
        return *self.optim.split("."), *ends


def key_of(path: Path) -> str:
    """The key of what lies at the end of a way."""
    return ".".join(map(str, path))


# --- reading ------------------------------------------------------------------------------------


def named(manifest: Manifest, names: Collection[str]) -> Manifest:
    """The same folder with its weights under the model's names, states under ``optim/{name}/{state}``.

    All else has a name that begins with ``other/``. The ``records`` get ``keys``, the stored key by name, and
    ``optim``, what begins the keys of the optimizer (``None`` where there are none).

    Args:
        manifest: From ``torch_dist.read``.
        names: The names that arrays of the model may have.

    Raises:
        UnknownNameError: No key ends in a name of the model.
        FormatError: Weights or states are there twice, under different keys.
    """
    shown = str(manifest.root)
    states = {key: state for key in manifest.tensors if (state := _state(key, names)) is not None}
    rest = [key for key in manifest.tensors if key not in states]
    model = _only({begin for key in rest if (begin := _begin(key, names)) is not None}, "weights", shown)
    optim = _only({begin for begin, _, _ in states.values()}, "states of an optimizer", shown)
    if model is None:
        raise UnknownNameError(
            "a folder of torch.distributed.checkpoint holds the weights of the model",
            where=shown,
            equation=f"no key of {len(manifest.tensors)} ends in a name of the model, such as "
            f"{some(map(repr, manifest.tensors), limit=2)}",
            hint="take the config that belongs to the weights; the names are those of Hugging Face",
        )
    return _renamed(manifest, model, optim, {key: state for key, (_, *state) in states.items()})


def unnamed(manifest: Manifest) -> Manifest:
    """As ``named``, of a model that nobody describes: what the folder says of itself tells weights apart.

    The optimizer is where groups of parameters are; weights are what it has states of, and what lies beside
    them. Without an optimizer, weights are what was saved as ``model``, or all there is in one place.

    Args:
        manifest: From ``torch_dist.read``.

    Raises:
        FormatError: There are two optimizers, or several places where the weights may be.
    """
    shown = str(manifest.root)
    every = [*manifest.tensors, *manifest.records.get("objects", {})]
    groups = {match[1] for key in every if (match := _GROUPS.match(key)) is not None}
    optim = _only(groups, "states of an optimizer", shown)
    states: dict[str, list[str]] = {}
    for key in manifest.tensors:
        if optim is not None and key.startswith(f"{optim}state."):
            name, _, state = key.removeprefix(f"{optim}state.").rpartition(".")
            states[key] = [name, state]
    rest = {key for key in manifest.tensors if optim is None or not key.startswith(optim or "state.")}
    begins = _begins(manifest, rest, {name for name, _ in states.values()})
    default = key_of(Keys().weight(""))
    model = default if default in begins and not states else _only(begins, "weights", shown)
    return _renamed(manifest, model or "", optim, states)


def _begins(manifest: Manifest, keys: Set[str], trained: Collection[str]) -> set[str]:
    """What may stand before the names of weights."""
    if trained:
        some_name = min(trained)
        found = {key.removesuffix(some_name) for key in keys if key.endswith(some_name)}
        return {begin for begin in found if all(f"{begin}{name}" in keys for name in trained)}
    # Where torch flattened what it was given, it wrote down the way to each value.
    ways = manifest.records.get("planner_data") or {}
    return {key.removesuffix(str(ways[key][-1])) if ways.get(key) else "" for key in keys}


def _renamed(
    manifest: Manifest, model: str, optim: str | None, states: Mapping[str, Sequence[str]]
) -> Manifest:
    """The manifest under other names; ``states`` is the weight and which state, by key."""
    shown = str(manifest.root)
    keys: dict[str, str] = {}
    for key in manifest.tensors:
        if key in states:
            keys["optim/" + "/".join(states[key])] = key
        elif optim is not None and key.startswith(f"{optim}state."):  # of no weight of the model
            name, _, last = key.removeprefix(f"{optim}state.").rpartition(".")
            keys[f"optim/{name}/{last}"] = key
        elif key.startswith(model) and not (optim and key.startswith(optim)):
            keys[key.removeprefix(model)] = key
        else:
            keys[f"{OTHER}{key}"] = key
    lost = sorted(set(manifest.tensors) - set(keys.values()))
    if lost:
        raise FormatError(
            "no two keys come to one name",
            where=shown,
            equation=f"{len(lost)} come to that of another one: {some(map(repr, lost))}",
            hint="torch saves no such keys; do not use it before you know where it comes from",
        )
    tensors = {name: replace(manifest.tensors[key], key=name) for name, key in keys.items()}
    records = {**manifest.records, "keys": keys, "optim": optim}
    return replace(manifest, format=FORMAT, tensors=tensors, records=records)


def as_stored(manifest: Manifest) -> Manifest:
    """What ``named`` was made from, under the stored keys."""
    keys: Mapping[str, str] = manifest.records["keys"]
    tensors: dict[str, StoredTensor] = {
        keys[name]: replace(tensor, key=keys[name]) for name, tensor in manifest.tensors.items()
    }
    return replace(manifest, tensors=tensors)


def _state(key: str, names: Collection[str]) -> tuple[str, str, str] | None:
    """What begins the key of a state, the weight that it is of, and which one it is."""
    for match in re.finditer(r"(?:^|\.)state\.", key):
        name, _, state = key[match.end() :].rpartition(".")
        if name in names:
            return key[: match.end() - len("state.")], name, state
    return None


def _begin(key: str, names: Collection[str]) -> str | None:
    """What stands before the longest name that a key ends in."""
    for at in (0, *(match.end() for match in re.finditer(r"\.", key))):
        if key[at:] in names:
            return key[:at]
    return None


def _only(begins: set[str], what: str, where: str) -> str | None:
    if len(begins) > 1:
        raise FormatError(
            f"{what} are in a folder once",
            where=where,
            equation=f"they are under {some(map(repr, sorted(begins)))}",
            hint="load and save it once more with the one that is meant",
        )
    return next(iter(begins), None)


def settings(manifest: Manifest) -> Iterator[tuple[str, str, str]]:
    """The stored settings of the optimizer: their key, the group or parameter, and what they are of.

    Args:
        manifest: From ``named``.
    """
    begin = f"{manifest.records['optim']}param_groups."
    stored = [*manifest.records.get("objects", {}), *manifest.records["keys"].values()]
    ways = manifest.records.get("planner_data") or {}
    for key in stored:
        if key.startswith(begin):
            rest = key.removeprefix(begin)
            number, _, setting = rest.partition(".")
            name, _, last = rest.rpartition(".")
            # A name may begin with a number, too; where torch flattened the state, it says so.
            flat = key in ways and str(ways[key][-1]).startswith("param_groups.")
            yield (key, number, setting) if number.isdecimal() and not flat else (key, name, last)


def plain_setting(value: Any) -> bool:
    """Whether a setting is a number, a text, a truth value, nothing, or a few of them."""
    if isinstance(value, (list, tuple)):
        return all(plain_setting(one) for one in value)
    return value is None or isinstance(value, (bool, int, float, str))
