"""Numbers, ranks and names as a picture says them: short, and the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardweave.layout import PAD, Dim, Tensor

_ROLES: Mapping[str, str] = {
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "embed_tokens": "embed",
    "lm_head": "head",
}


def span(noun: str, start: int, stop: int, step: int = 1) -> str:
    """A stretch in words: ``rows 0-63``, ``expert 3``, ``layers 0-6 step 2``."""
    if stop - start == 1:
        return f"{noun.removesuffix('s')} {start}"
    return f"{noun} {start}-{stop - 1}" + (f" step {step}" if step > 1 else "")


def numbers(values: Iterable[int], most: int = 4) -> str:
    """A list of numbers in few words: ``0-3``, ``0, 2``, ``0, 8, ... 64 in all``."""
    stretches: list[list[int]] = []
    values = list(values)
    for value in values:
        if stretches and value == stretches[-1][1] + 1:
            stretches[-1][1] = value
        else:
            stretches.append([value, value])
    words = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in stretches]
    return ", ".join(words if len(words) <= most else [*words[:2], f"... {len(values)} in all"])


def ranks_named(ranks: Sequence[int]) -> str:
    """Ranks in words: ``rank 3``, ``ranks 0, 2``, ``128 ranks from 5``."""
    named = numbers(ranks)
    if "..." in named:
        return f"{len(ranks)} ranks from {ranks[0]}"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}"


def short(name: str) -> str:
    """The last two words of a dotted name, which tell buffers of a layer apart."""
    return ".".join(name.split(".")[-2:])


def role(tensor: Tensor) -> str:
    """What a tensor is called in a picture, from its canonical name: ``q`` of ``...q_proj.weight``."""
    words = [word for word in tensor.name.split(".") if word not in ("weight", "bias")]
    return _ROLES.get(words[-1], words[-1].removesuffix("_proj"))


def dim_names(tensor: Tensor) -> tuple[str, ...]:
    """The names of the dims of a tensor, index dims first: ``layers``, ``experts``, ``rows``, ``columns``.

    A scalar is drawn as a dim of one element.
    """
    if not tensor.num_dims:
        return ("elements",)
    index = [f"{name}s" for name, _ in tensor.index]
    shape = [f"dim {i}" for i in range(len(tensor.shape))]
    return (*index, *{1: ["elements"], 2: ["rows", "columns"]}.get(len(shape), shape))


def indices(noun: str, dim: Dim) -> str:
    """What a dim holds, in words."""
    held = [span("", run.start, run.last + 1, run.step).strip() for run in dim.runs if run.label is not PAD]
    if len(dim) == 1:
        noun = noun.removesuffix("s")
    return f"{noun} {', '.join(held[:4])}{', ...' if len(held) > 4 else ''}" if held else f"no {noun}"


def size(num_bytes: int) -> str:
    """A number of bytes, to three digits.

    >>> size(1023), size(1536), size(5 << 30)
    ('1023 B', '1.5 KiB', '5 GiB')
    """
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{num_bytes} B" if units[0] == "B" else f"{value:.{3 if value < 1000 else 4}g} {units[0]}"
