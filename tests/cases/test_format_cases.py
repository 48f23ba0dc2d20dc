"""What DeepSpeed 0.19.8 converts without a word, converted right here or refused before a byte is written.

Each test is a line of one list: a save that its converter takes, what comes of it there, and what comes of it
here. Lists of all reports and their tests: ``tests/cases/README.md``. Lines on affine maps alone are in
``tests/oracle/test_affine.py``, with what its classes do.
"""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed_folder import ADAM, Rank, patterns, rows_map, save, state_of

from shardweave.convert import convert, open_checkpoint, prepare
from shardweave.errors import (
    DtypeError,
    FormatError,
    GeometryError,
    OutsideError,
    OverlapError,
    ReplicaError,
    ShardweaveError,
)
from shardweave.store.read import Reader

pytestmark = [pytest.mark.peer("deepspeed"), pytest.mark.filterwarnings("ignore::FutureWarning")]

NAMED = Path("none")
PLAIN = {"universal_checkpoint_version": 0.4}
W = torch.arange(32.0).view(8, 4) + 1
HALVES = (W[:4].clone(), W[4:].clone())
ROWS = rows_map((8, 4), [(0, 4, [0]), (4, 4, [1])])
BOTH = rows_map((4,), [(0, 4, [0, 1]), (0, 4, [0, 1])])
BIG = 2**24 + 1
NORM = torch.tensor([1.5, 2.0, -0.0, 4.0])


def theirs(src: Path, dst: Path, **options: Any) -> dict[str, Any]:
    """What ``ds_to_universal`` makes of a save: by weight and state."""
    from deepspeed.checkpoint import ds_to_universal

    said = {
        "input_folder": str(src), "output_folder": str(dst), "num_extract_workers": 1, "num_merge_workers": 1,
        "keep_temp_folder": False, "strict": True, "inject_missing_state": False, **options,
    }  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(Namespace(**said))
    found = {}
    for path in (dst / "zero").glob("*/*.pt"):
        value = torch.load(path, weights_only=False)
        found[f"{path.parent.name}/{path.stem}"] = value["param"] if isinstance(value, dict) else value
    return found


def ours(src: Path, dst: Path, to: str) -> dict[str, np.ndarray[Any, Any]]:
    """What is stored after a conversion."""
    convert(prepare(src, to=to, config=NAMED), dst, fsync=False)
    source = open_checkpoint(dst, config=NAMED)
    with Reader(source.manifest) as reader:
        return {key: reader.load(key) for key in source.manifest.tensors}


def holds(found: dict[str, np.ndarray[Any, Any]], wanted: dict[str, torch.Tensor]) -> None:
    """Every array to the bit; some formats store a count of updates, and masters beside equal weights."""
    masters = [key for key in found if key.endswith("/master")]
    wanted = wanted | {key: wanted[key.removeprefix("optim/").removesuffix("/master")] for key in masters}
    counts = [found.pop(key) for key in list(found) if key.endswith("/step")]
    assert all(count == 7 for count in counts)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.numpy().dtype and found[key].shape == tuple(value.shape), key
        assert found[key].tobytes() == value.numpy().tobytes(), key


def trained(name: str, value: torch.Tensor, states: tuple[str, ...] = ADAM) -> dict[str, torch.Tensor]:
    return {name: value} | {f"optim/{name}/{state}": state_of(value, state) for state in states}


def refused(src: Path, dst: Path, error: type[ShardweaveError], match: str) -> None:
    for to in ("universal", "dcp", "native"):
        with pytest.raises(error, match=match):
            ours(src, dst, to)
        assert not dst.exists() or not any(dst.iterdir())


# --- what is converted right ----------------------------------------------------------------------


@pytest.mark.parametrize("to", ["universal", "dcp", "native"])
def test_a_frozen_weight_of_two_ranks_is_whole(to: str, tmp_path: Path) -> None:
    """DeepSpeed#3090: its converter writes rank 0's shard as the whole weight, though the map is there."""
    frozen = torch.arange(16.0).view(4, 4) + 100
    info = patterns(w=ROWS, f=rows_map((4, 4), [(0, 2, [0]), (2, 2, [1])]))
    ranks = [Rank({"w": HALVES[i]}, frozen={"f": frozen[2 * i : 2 * i + 2].clone()}) for i in range(2)]
    src = save(tmp_path / "src", ranks, info=info)
    lost = theirs(src, tmp_path / "theirs")["f/fp32"]
    assert torch.equal(lost, frozen[:2])
    holds(ours(src, tmp_path / "ours", to), trained("w", W) | {"f": frozen})


@pytest.mark.parametrize("to", ["universal", "dcp", "native"])
def test_an_integer_is_no_float(to: str, tmp_path: Path) -> None:
    """A buffer of 2**24 + 1: its converter makes a float32 of all that has no master, 16777216."""
    seen = torch.tensor([BIG, 3])
    src = save(tmp_path / "src", [Rank({"w": W}, buffers={"seen": seen})], info=PLAIN)
    assert theirs(src, tmp_path / "theirs")["seen/fp32"].tolist() == [BIG - 1, 3]
    holds(ours(src, tmp_path / "ours", to), trained("w", W) | {"seen": seen})


@pytest.mark.parametrize("to", ["universal", "dcp", "native"])
def test_a_state_of_any_name_goes_along(to: str, tmp_path: Path) -> None:
    """AMSGrad: its converter writes two states of three."""
    states = (*ADAM, "max_exp_avg_sq")
    src = save(tmp_path / "src", [Rank({"w": W})], info=PLAIN, states=states, settings={"amsgrad": True})
    assert theirs(src, tmp_path / "theirs").keys() == {f"w/{one}" for one in ("fp32", "step", *ADAM)}
    holds(ours(src, tmp_path / "ours", to), trained("w", W, states))


@pytest.mark.parametrize("to", ["universal", "dcp", "native"])
def test_momentum_of_sgd_goes_along(to: str, tmp_path: Path) -> None:
    """Its converter asks for two moments whatever the optimizer is."""
    states = ("momentum_buffer",)
    src = save(tmp_path / "src", [Rank({"w": W})], info=PLAIN, states=states)
    with pytest.raises(KeyError, match="exp_avg"):
        theirs(src, tmp_path / "theirs")
    holds(ours(src, tmp_path / "ours", to), trained("w", W, states))


def norms(folder: Path, first: torch.Tensor, second: torch.Tensor) -> Path:
    """A weight that is cut, and a norm that both ranks hold."""
    ranks = [Rank({"w": half, "ln": norm}) for half, norm in zip(HALVES, (first, second), strict=True)]
    return save(folder, ranks, info=patterns(w=ROWS, ln=BOTH))


def test_replicas_of_the_same_bits_agree_whatever_they_mean(tmp_path: Path) -> None:
    """No number is unequal to itself, and its converter refuses equal ranks for it."""
    norm = NORM.clone()
    norm[1] = torch.nan
    src = norms(tmp_path / "src", norm, norm.clone())
    with pytest.raises(ValueError, match="hold different data"):
        theirs(src, tmp_path / "theirs")
    holds(ours(src, tmp_path / "ours", "dcp"), trained("w", W) | trained("ln", norm))


# --- what is refused ------------------------------------------------------------------------------


def test_replicas_of_other_bits_are_refused(tmp_path: Path) -> None:
    """0.0 beside -0.0 is a drift of one bit, and taken there; so is the other of two words of no number."""
    src = norms(tmp_path / "zero", NORM, NORM + 0.0)
    assert theirs(src, tmp_path / "theirs").keys() >= {"ln/fp32"}
    refused(src, tmp_path / "a", ReplicaError, r"'ln' at \(2,\).* 0x80000000 .* != 0x00000000")
    drifted = NORM.clone()
    drifted[3] = torch.nextafter(drifted[3], torch.tensor(9.0))
    refused(norms(tmp_path / "drift", NORM, drifted), tmp_path / "b", ReplicaError, r"'ln' at \(3,\)")
    words = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    one, other = NORM.clone(), NORM.clone()
    one[0], other[0] = words[0], words[1]
    assert one.numpy().tobytes() != other.numpy().tobytes()
    # Arithmetic of the helper may quiet a NaN in the states; the weights are compared first.
    refused(norms(tmp_path / "nan", one, other), tmp_path / "c", ReplicaError, r"'ln' at \(0,\)")


def test_a_weight_that_nothing_is_said_of_is_not_guessed(tmp_path: Path) -> None:
    """DeepSpeed#5430, #5405: a norm (4,) of two ranks comes out as (8,) there."""
    ranks = [Rank({"w": half, "ln": NORM}) for half in HALVES]
    src = save(tmp_path / "some", ranks, info=patterns(w=ROWS))
    assert theirs(src, tmp_path / "theirs")["ln/fp32"].shape == (8,)
    refused(src, tmp_path / "a", GeometryError, "has no map of 1: 'ln'")
    src = save(tmp_path / "none", ranks)
    with pytest.raises(AssertionError, match="universal_checkpoint_info"):
        theirs(src, tmp_path / "theirs2")
    assert theirs(src, tmp_path / "theirs3", inject_missing_state=True)["ln/fp32"].shape == (8,)
    refused(src, tmp_path / "b", GeometryError, r"tp\(2\), and universal_checkpoint_info has no map of 2")
    # With a map that says that both have it, it stays (4,).
    src = save(tmp_path / "right", ranks, info=patterns(w=ROWS, ln=BOTH))
    holds(ours(src, tmp_path / "c", "universal"), trained("w", W) | trained("ln", NORM))


def test_shards_of_two_dtypes_are_not_joined(tmp_path: Path) -> None:
    """Rank 0 in bfloat16 and rank 1 in float32: there all of it gets the dtype of the first."""
    dtypes = (torch.bfloat16, torch.float32)
    ranks = [Rank({"w": half}, dtype=d, flat_dtype=d) for half, d in zip(HALVES, dtypes, strict=True)]
    src = save(tmp_path / "src", ranks, info=patterns(w=ROWS))
    merged = theirs(src, tmp_path / "theirs")["w/exp_avg"]
    assert merged.dtype == torch.bfloat16 and not torch.equal(merged.float(), state_of(W, "exp_avg"))
    refused(src, tmp_path / "ours", DtypeError, "'w': stored as bfloat16, float32")
    # Weights that are alike, with masters that are not.
    ranks = [Rank({"w": half}, flat_dtype=d) for half, d in zip(HALVES, dtypes, strict=True)]
    src = save(tmp_path / "masters", ranks, info=patterns(w=ROWS))
    refused(src, tmp_path / "more", DtypeError, "bfloat16, float32")


def test_a_shape_of_the_same_size_is_another_shape(tmp_path: Path) -> None:
    """Shards of an (8, 4) under the map of a (4, 8): there sizes are compared, and rows are torn."""
    src = save(
        tmp_path / "src", [Rank({"w": half}) for half in HALVES],
        info=patterns(w=rows_map((4, 8), [(0, 2, [0]), (2, 2, [1])])),
    )  # fmt: skip
    assert theirs(src, tmp_path / "theirs")["w/fp32"].shape == (4, 8)
    refused(src, tmp_path / "ours", OutsideError, r"array 'w@0': stored \(4, 4\) != \(2, 8\)")


def test_rows_of_nobody_and_rows_of_two_owners(tmp_path: Path) -> None:
    """A map with a gap, and one whose owners disagree: there memory as it lay, and the last writer."""
    src = save(
        tmp_path / "gap", [Rank({"w": half}) for half in HALVES],
        info=patterns(w=rows_map((8, 4), [(0, 4, [0]), (0, 4, [1])])),
    )  # fmt: skip
    full = theirs(src, tmp_path / "theirs")["w/fp32"]
    assert full.shape == (8, 4) and torch.equal(full[:4], HALVES[1])
    refused(src, tmp_path / "a", OverlapError, r"element \(0, 0\): rank 0 declares \(0\); rank 1 declares")
    src = save(
        tmp_path / "two", [Rank({"w": W[:4].clone()}), Rank({"w": -W[2:]})],
        info=patterns(w=rows_map((8, 4), [(0, 4, [0]), (2, 6, [1])])),
    )  # fmt: skip
    assert torch.equal(theirs(src, tmp_path / "theirs2")["w/fp32"][2:], -W[2:])
    refused(src, tmp_path / "b", OverlapError, r"element \(2, 0\)")


def test_a_map_of_other_ranks(tmp_path: Path) -> None:
    """Four ranks in the map and two in the save, and the other way round."""
    src = save(
        tmp_path / "four", [Rank({"w": half}) for half in HALVES],
        info=patterns(w=rows_map((8, 4), [(2 * i, 2, [i]) for i in range(4)])),
    )  # fmt: skip
    with pytest.raises(ValueError, match="the map describes 8"):
        theirs(src, tmp_path / "theirs")
    refused(src, tmp_path / "a", GeometryError, r"map of 'w': ranks of the map\(4\) != tp\(2\)")
    quarters = [Rank({"w": W[2 * i : 2 * i + 2].clone()}) for i in range(4)]
    src = save(tmp_path / "two", quarters, info=patterns(w=ROWS))
    refused(src, tmp_path / "b", GeometryError, r"map of 'w': ranks of the map\(2\) != tp\(4\)")


def test_the_begin_of_a_name_is_no_name(tmp_path: Path) -> None:
    """A pattern "w" without an end is taken there for each name that begins so."""
    ranks = [Rank({"w": half, "w_of_another": -half}) for half in HALVES]
    src = save(tmp_path / "src", ranks, info={"affine_map": {"version": 1, "params": {"w": ROWS}}})
    assert torch.equal(theirs(src, tmp_path / "theirs")["w_of_another/fp32"], -W)
    refused(src, tmp_path / "ours", FormatError, r"pattern\('w'\)")


def test_a_version_that_nobody_knows(tmp_path: Path) -> None:
    src = save(
        tmp_path / "src", [Rank({"w": half}) for half in HALVES],
        info={"affine_map": {"version": 2, "params": {"^w$": ROWS}}},
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="version 2"):
        theirs(src, tmp_path / "theirs")
    refused(src, tmp_path / "ours", FormatError, r"version\(2\) != 1")


def test_a_cut_that_the_save_does_not_describe(tmp_path: Path) -> None:
    """AutoTP lists what it has no words for; a shape that fits is no description."""
    info = patterns(w=ROWS) | {"autotp_unsupported_parameter_patterns": {r"^b$": "its blocks interleave"}}
    src = save(tmp_path / "src", [Rank({"w": half}) for half in HALVES], info=info)
    with pytest.raises(ValueError, match="its blocks interleave"):
        theirs(src, tmp_path / "theirs")
    refused(src, tmp_path / "ours", GeometryError, r"autotp_unsupported_parameter_patterns lists '\^b\$'")


@pytest.mark.parametrize("lists", [["^b$"], "^b$", 3])
def test_a_list_of_another_form_is_refused_too(lists: object, tmp_path: Path) -> None:
    info = patterns(w=ROWS) | {"autotp_unsupported_parameter_patterns": lists}
    src = save(tmp_path / "src", [Rank({"w": half}) for half in HALVES], info=info)
    refused(src, tmp_path / "ours", GeometryError, "autotp_unsupported_parameter_patterns lists")
