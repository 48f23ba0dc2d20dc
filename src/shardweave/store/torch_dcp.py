"""Training state as torch.distributed.checkpoint folders hold it, under the names of the model.

A script saves ``{"model": ..., "optim": ...}`` from ``get_state_dict``, and the keys of a folder are the
paths through it: ``model.{fqn}``, ``optim.state.{fqn}.{state}`` and, of each group of parameters,
``optim.param_groups.{number}.{setting}``, or ``optim.param_groups.{fqn}.{setting}`` where the state dict of
the optimizer was flattened. What stands before them is the script's own choice; it is found by the names
that follow, and never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
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
    keys: dict[str, str] = {}
    for key in manifest.tensors:
        if key in states:
            keys[f"optim/{states[key][1]}/{states[key][2]}"] = key
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
    for key in stored:
        if key.startswith(begin):
            rest = key.removeprefix(begin)
            number, _, setting = rest.partition(".")
            name, _, last = rest.rpartition(".")
            yield (key, number, setting) if number.isdecimal() else (key, name, last)


def plain_setting(value: Any) -> bool:
    """Whether a setting is a number, a text, a truth value, nothing, or a few of them."""
    if isinstance(value, (list, tuple)):
        return all(plain_setting(one) for one in value)
    return value is None or isinstance(value, (bool, int, float, str))
