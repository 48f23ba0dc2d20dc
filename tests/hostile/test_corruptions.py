"""Damaged, mixed, lying and hostile checkpoints of every format, as conversions meet them.

Each case is drawn by a seed, which is in its name. A damage is *detected*: a named error with a hint, nothing
written, the source as it was, nothing executed. Or it is *harmless*: the target has the bytes that it has
without it. Or it is *carried*: nothing in the format could tell, and what arrives is what other software
reads of the damaged files. Where that is allowed is said in ``CARRIED``, with the reason.

The table in docs/concepts/converting.md is what this file saw: ``SHARDWEAVE_UPDATE_GOLDEN=1`` writes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
import tracemalloc
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from corruption_samples import (
    MODELS,
    STATES,
    Sample,
    as_module,
    bits,
    safetensors_of,
    samples,
    streams_of,
    values_of,
)
from corruptions import DAMAGES, TIMES

from shardweave.convert import Geometry, convert, prepare
from shardweave.convert.check import check
from shardweave.errors import DigestError, ShardweaveError

DATA = Path(__file__).parents[1] / "data"
BUCKETS = DATA / "mc_opt_tp1dp2_dp_reshardable/torch_dist"
BUCKETS_CONFIG = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "head_dim": 12,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32, "rope_theta": 1e4, "tie_word_embeddings": False, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
NAMES = {
    "dense": ("hf", "hf index", "hf dcp", "ranks", "megatron", "buckets", "legacy", "zero1", "zero2", "zero3",
              "universal", "dcp", "dcp flat", "native"),
    "moe": ("hf", "hf index", "hf dcp", "ranks", "megatron", "legacy", "zero1", "zero2", "zero3", "universal",
            "dcp", "dcp flat", "native"),
}  # fmt: skip
MORE = int(os.environ.get("SHARDWEAVE_CORRUPTIONS", "1"))
"""How many times as many cases are drawn; 8 when something changed in what a store believes."""
CASES = [
    (model, name, damage, turn)
    for model, names in NAMES.items()
    for name in names
    for damage in DAMAGES
    for turn in range(TIMES.get(damage, 1) * MORE)
]
NO_SUMS = ("bit of a value", "zeros", "saves mixed", "lie")
BY_INDEX = ("files swapped", "saves mixed", "lie")
CARRIED: dict[str, tuple[tuple[str, ...], str]] = {
    "hf": (
        NO_SUMS,
        "safetensors has no checksums: a value that changed is a value, and a header that says another dtype "
        "of the same size, or exchanges two places of one size, is a header",
    ),
    "hf-dcp": (NO_SUMS, "as hf; and nothing in a shard says of which save it is"),
    "ranks": ((*NO_SUMS, "files swapped"), "as hf; and only its name says which rank a file is of"),
    "torch_dist": (
        BY_INDEX,
        "streams have CRCs and no names: the index alone says which is which, and one file says what all "
        "ranks share",
    ),
    "dcp": (BY_INDEX, "as torch_dist; and each weight has a count of its own"),
    "ZeRO-3": (
        ("files swapped",),
        "files of optimizer states differ in nothing but their values: only names say of which rank they are",
    ),
    "universal": (
        ("files swapped", "saves mixed"),
        "a file holds one state of one weight, and nothing says of which weight, state or save; shapes and "
        "counts are compared",
    ),
}
"""Damages that nothing in the files of a format may tell from what was saved, and why."""
EXECUTION = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pickle.find_class",
             "socket.connect")  # fmt: skip
WATCHED: list[str] = []
WATCHING = False
SEEN: dict[tuple[str, str], list[str]] = defaultdict(list)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if WATCHING and event in EXECUTION:
        WATCHED.append(f"{event} {args!r:.200}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.addaudithook(_hook)  # stays for the life of the process, and hears nothing unless it is asked to
    return tmp_path_factory.mktemp("samples")


@pytest.fixture(scope="module")
def made(place: Path) -> dict[str, dict[str, Sample]]:
    """The samples by model and name, with what each of them comes to beside it."""
    buckets = Path(shutil.copytree(BUCKETS, place / "buckets"))
    buckets.chmod(0o755)
    (buckets / "config.json").write_text(json.dumps(BUCKETS_CONFIG))
    found = {model: {one.name: one for one in samples(model, place / model, buckets)} for model in MODELS}
    assert {model: set(few) for model, few in found.items()} == {m: set(names) for m, names in NAMES.items()}
    return found


ROUNDED = ("torch_dist", "torch_dist buckets", "mp_rank", "ZeRO-1", "ZeRO-2")
"""Formats with rounded weights beside their masters; a target that has both reads both."""
GOOD: dict[tuple[str, str], dict[str, str]] = {}


def go(sample: Sample, src: Path, dst: Path) -> None:
    """The conversion that damages meet: fused and cut in another way, with the state where there is one."""
    target: dict[str, Any] = {"to": "native" if sample.kind in ROUNDED else "dcp"}
    if sample.kind in ("hf", "hf-dcp", "ranks"):
        target = {"to": "megatron", "geometry": Geometry(tp=2)}
    convert(prepare(src, **sample.opens, **target), dst, fsync=False, workers=2)


def tree(folder: Path, *, but: tuple[str, ...] = ()) -> dict[str, str]:
    """What a folder holds."""
    return {
        str(path.relative_to(folder)): f"-> {path.readlink()}" if path.is_symlink()
        else hashlib.blake2b(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*")) if path.name not in but
    }  # fmt: skip


def good(made: dict[str, dict[str, Sample]], model: str, name: str) -> dict[str, str]:
    """What a sample comes to without damage."""
    if (model, name) not in GOOD:
        sample = made[model][name]
        dst = sample.root.with_name(f"{sample.root.name}.converted")
        go(sample, sample.root, dst)
        GOOD[model, name] = tree(dst, but=("config.json",))
    return GOOD[model, name]


@pytest.mark.parametrize(
    ("model", "name"),
    [(model, name) for model, names in NAMES.items() for name in names if name != "buckets"],
)
def test_what_is_not_damaged_is_the_truth(
    made: dict[str, dict[str, Sample]], tmp_path: Path, model: str, name: str
) -> None:
    """Every element of weights and states, read by torch. Of flat buckets the truth is with their fixture."""
    sample, values = made[model][name], values_of(MODELS[model], seed=7)
    good(made, model, name)
    if sample.contents is not None:
        convert(prepare(sample.root, **sample.opens, **sample.again), tmp_path / "again", fsync=False)
        assert sample.contents(tmp_path / "again") == sample.contents(sample.root)
    if sample.kind in ("hf", "hf-dcp", "ranks"):
        convert(prepare(sample.root, to="hf", **sample.opens), tmp_path / "hf", fsync=False)
        found = safetensors_of(tmp_path / "hf")
        assert found == {key: bits(value) for key, value in values["weight"].items()}
        return
    folder = sample.root.with_name(f"{sample.root.name}.converted")
    if sample.kind in ROUNDED:
        convert(prepare(folder, to="dcp"), tmp_path / "dcp", fsync=False)
        folder = tmp_path / "dcp"
    found = streams_of(folder)
    for kind in ("master", *STATES):
        for key, value in as_module(values[kind], MODELS[model]).items():
            name = f"model.{key}" if kind == "master" else f"optim.state.{key}.{kind}"
            assert found.pop(name) == bits(value), name
    assert found and all(name.endswith(".step") for name in found)
    assert set(found.values()) == {bits(torch.tensor(1234.0))}


@pytest.mark.parametrize(
    ("model", "name", "damage", "turn"),
    CASES,
    ids=["-".join(map(str, case)).replace(" ", "_") for case in CASES],
)
def test_a_damage(
    made: dict[str, dict[str, Sample]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    model: str, name: str, damage: str, turn: int,
) -> None:  # fmt: skip
    sample, seed = made[model][name], f"{model}/{name}/{damage}/{turn}"
    expected = good(made, model, name)
    chance = Random(seed)
    src, dst = tmp_path / "src", tmp_path / "dst"
    for _ in range(20):
        shutil.rmtree(src, ignore_errors=True)
        shutil.copytree(sample.root, src)
        what = DAMAGES[damage](sample, src, chance)
        if what is not None and tree(src) != tree(sample.root):
            break
    else:
        SEEN[sample.kind, damage].append("none")
        return  # one file cannot be swapped
    monkeypatch.chdir(tmp_path)
    print(f"{seed}: {what}")
    outcome, message = result(sample, src, dst, expected, bounded=damage == "attack")
    SEEN[sample.kind, damage].append(outcome)
    print(outcome, message)
    if outcome == "carried":
        allowed = CARRIED.get(sample.kind, ((), ""))[0]
        assert damage in allowed, f"{seed}: {what}: it arrived, and nobody was told"


def result(
    sample: Sample, src: Path, dst: Path, expected: dict[str, str], *, bounded: bool
) -> tuple[str, str]:
    """What a conversion of a damaged copy comes to: ``detected``, ``harmless`` or ``carried``."""
    global WATCHING
    before, start = tree(src.parent), time.process_time()
    error: ShardweaveError | None = None
    WATCHED.clear()
    if bounded:
        tracemalloc.start()
    WATCHING = True
    try:
        go(sample, src, dst)
    except ShardweaveError as raised:
        error = raised
    finally:
        WATCHING = False
        peak = tracemalloc.get_traced_memory()[1] if bounded else 0
        tracemalloc.stop()
    assert not WATCHED, WATCHED
    assert time.process_time() - start < 20, "seconds of processors"
    assert peak < 96 << 20, f"{peak:,} bytes"
    if error is not None:
        assert tree(src.parent) == before, "nothing is written, and the source is as it was"
        assert error.hint and error.rule, error
        assert len(str(error)) < 3000, error
        return "detected", f"{type(error).__name__}: {str(error)[:300]}"
    after = tree(src.parent)
    assert {name: one for name, one in after.items() if name.partition("/")[0] != "dst"} == before
    if tree(dst, but=("config.json",)) == expected:
        return "harmless", ""
    if sample.contents is None:
        pytest.fail("other bytes arrived than were saved, and the format has digests")
    again = dst.with_name("again")
    convert(prepare(src, **sample.opens, **sample.again), again, fsync=False)
    assert sample.contents(again) == sample.contents(src), "what arrived is not what was stored"
    return "carried", ""


@pytest.mark.parametrize(
    "name", ["megatron", "buckets", "legacy", "zero1", "zero3", "universal", "dcp", "dcp flat", "native"]
)
def test_a_check_sees_a_bit_of_a_value(made: dict[str, dict[str, Sample]], tmp_path: Path, name: str) -> None:
    """What conversions refuse, a check finds: by digests or by the CRCs that torch saved."""
    sample = made["dense"][name]
    src = Path(shutil.copytree(sample.root, tmp_path / "src"))
    assert check(src).whole
    print(DAMAGES["bit of a value"](sample, src, Random(name)))
    assert any(isinstance(one, DigestError) for one in check(src).findings)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("dcp", b"optim.param_groups.0.lr", b"optim.param_groups.0.lq"),
        ("dcp", b"optim.param_groups.1.maximize", b"optim.param_grou`s.1.maximize"),
        ("dcp", b"optim.state.model.norm.weight.exp_avg_sq", b"optim.state.model.norm.weight.exp_avg_sp"),
        (
            "dcp flat",
            b"optim.param_groups.model.norm.weight.eps",
            b"optim.param_groups.model.norm.weight.epr",
        ),
        ("megatron", b"optimizer.state.param.output_layer", b"optimizer.state\x0eparam.output_layer"),
        ("megatron", b"optimizer.state.exp_avg.output_layer", b"optimizer.state.exp_awg.output_layer"),
        ("buckets", b"bucket_idx_0.exp_avg", b"bucket_idx_0.exp_awg"),
    ],
)
def test_a_name_that_is_damaged_in_one_place_for_all(
    made: dict[str, dict[str, Sample]], tmp_path: Path, name: str, old: bytes, new: bytes
) -> None:
    """A pickle has a text once, however often it is used: one bit renames a key wherever an index has it."""
    sample = made["dense"][name]
    expected = good(made, "dense", name)
    src = Path(shutil.copytree(sample.root, tmp_path / "src"))
    data = (src / ".metadata").read_bytes()
    assert old in data
    (src / ".metadata").write_bytes(data.replace(old, new, 1))
    assert result(sample, src, tmp_path / "dst", expected, bounded=False)[0] == "detected"


# --- what was seen --------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "converting.md"
BEGIN, END = "<!-- made by tests/hostile/test_corruptions.py -->", "<!-- end -->"


def test_the_page_says_what_was_seen() -> None:
    """Runs last in this file. Counts are of the run that wrote the page; what may be carried is compared."""
    table = shown()
    print(f"\n{table}")
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if os.environ.get("SHARDWEAVE_UPDATE_GOLDEN"):
        assert sum(map(len, SEEN.values())) >= len(CASES), (
            "not all cases ran in this process: run the whole file"
        )
        PAGE.write_text(f"{text[:begin]}\n{table}\n{text[end:]}")
        return
    assert REASONS in text[begin:end], "SHARDWEAVE_UPDATE_GOLDEN=1 writes what may be carried, and why"
    lines = [line.strip("| ").split(" | ") for line in text[begin:end].splitlines() if line.startswith("| ")]
    cells = {
        (kind, row[0]): cell for row in lines[1:] for kind, cell in zip(lines[0][1:], row[1:], strict=True)
    }
    assert {damage for _, damage in cells} == set(DAMAGES) and {kind for kind, _ in cells} >= {
        k for k, _ in SEEN
    }


REASONS = "\n".join(f"- {kind}: {', '.join(damages)}: {why}." for kind, (damages, why) in CARRIED.items())


def shown() -> str:
    """How many cases of each kind were detected, were harmless and were carried, and why the last."""
    kinds = list(dict.fromkeys(kind for kind, _ in SEEN))
    short = {"detected": "d", "harmless": "h", "carried": "**c**"}
    lines = ["| damage | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for damage in DAMAGES:
        cells = []
        for kind in kinds:
            seen = SEEN.get((kind, damage), [])
            cells.append(" ".join(f"{seen.count(one)}{short[one]}" for one in short if one in seen) or "-")
        lines.append(f"| {damage} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "What may be carried, and why:", "", REASONS])
