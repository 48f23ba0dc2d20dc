"""``shardweave probe``: a function of a user's module, named and run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_driver import Run

MODULE = '''
import numpy as np
import torch

def rows(x, rank, tp):
    return x.chunk(tp)[rank]

def heads(q, k, v, rank, tp):
    """Cut each, then fuse; k and v are shared where there are more ranks than heads."""
    kv = min(tp, 2)
    share = rank // (tp // kv)
    return torch.cat([q.chunk(tp)[rank], k.chunk(kv)[share], v.chunk(kv)[share]])

def strided(x, rank, tp):
    return x[rank::tp]

def adds(x, rank, tp):
    return x.chunk(tp)[rank] + 1
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_to_probe.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])


def test_found(sw: Run) -> None:
    done = sw("probe", "mine_to_probe:rows", "--shape", "10,3", "--tp", "2")
    assert (done.code, done.err) == (0, "")
    assert done.out == "rank 0: [0:5] x [0:3]\nrank 1: [5:10] x [0:3]\n"
    said = json.loads(sw("probe", "mine_to_probe:strided", "--shape", "6,2", "--tp", "2", "--json").out)
    assert said == {
        "tensors": {"": [6, 2]},
        "ranks": [["[0:5:2]", "[0:2]"], ["[1:6:2]", "[0:2]"]],
        "order": [0, 1],
        "cut": [0],
        "flat": False,
    }


QKV = ("--shape", "q=32,6", "--shape", "k=8,6", "--shape", "v=8,6", "--tp", "4")
KEYS = "num_heads=8,num_kv_heads=2,head_dim=4"


def test_expected(sw: Run, golden) -> None:
    rows = ("probe", "mine_to_probe:rows", "--shape", "48,6", "--tp", "4", "--expect")
    heads = ("probe", "mine_to_probe:heads", *QKV, "--expect")
    for command in [
        (*rows, "megatron:rows"),
        (*rows, "deepspeed:column"),
        (*rows, "[0:12] | [12:24] | [24:36] | [36:48]"),
        (*heads, f"vllm:qkv,{KEYS}"),
        ("probe", "mine_to_probe:strided", "--shape", "6,2", "--tp", "2", "--expect", "[0:5:2] | [1:6:2]"),
    ]:
        done = sw(*command)
        assert (done.code, done.err) == (0, ""), command
        assert done.out.endswith("\nAs expected.\n")
    shown = []
    for command in [
        (*rows, f"vllm:qkv,{KEYS}"),
        (*rows, "megatron:gate_up"),
        (*rows, "deepspeed:glm,num_heads=4,num_kv_heads=4"),
        (*heads, f"megatron:qkv,{KEYS}"),
        ("probe", "mine_to_probe:adds", "--shape", "6,2", "--tp", "2"),
        ("probe", "mine_to_probe:nothing", "--shape", "6,2", "--tp", "2"),
    ]:
        done = sw(*command)
        assert done.code == 1, command
        shown.append(done.err)
    golden("probe_findings", "\n".join(shown))


# --- a whole model ------------------------------------------------------------------------------

FRAMEWORK = '''
import numpy as np

def shards(tensors, rank, tp):
    """Q, K and V of a rank as one array, the rest in even parts; norms whole."""
    found = {}
    for name, x in tensors.items():
        if ".q_proj" in name:
            three = (tensors[name.replace("q_proj", one)] for one in ("q_proj", "k_proj", "v_proj"))
            found[name.replace("q_proj", "qkv")] = np.concatenate([np.split(y, tp)[rank] for y in three])
        elif ".k_proj" not in name and ".v_proj" not in name:
            found[name] = x if x.ndim == 1 else np.array_split(x, tp)[rank]
    return found

def loses(tensors, rank, tp):
    return {name: x for name, x in shards(tensors, rank, tp).items() if "norm" not in name}
'''


@pytest.fixture
def tiny(data_dir: Path, tmp_path: Path) -> Path:
    (tmp_path / "framework_to_probe.py").write_text(FRAMEWORK)
    return data_dir / "configs" / "tiny" / "llama.json"


def test_a_whole_model_is_probed_and_its_shards_are_converted(
    sw: Run, golden: Callable[..., None], tiny: Path, tmp_path: Path
) -> None:
    import framework_to_probe
    import numpy as np
    from safetensors.numpy import load_file, save_file

    from shardweave.models import from_config

    probe = ("probe", "framework_to_probe:shards", "--config", str(tiny), "--tp", "2", "--arrays", "numpy")
    done = sw(*probe, "--out", "shards.layout")
    assert (done.code, done.err) == (0, "")
    golden("probe_model", done.out)
    assert sw(*probe, "--json").code == 0
    assert json.loads(sw(*probe, "--json").out)["layout"] == Path("shards.layout").read_text()

    rng = np.random.default_rng(4)
    model = from_config(tiny)
    tensors = {
        name: rng.random(tensor.shape, np.float32) for tensor in model.tensors for name in tensor.names()
    }
    (tmp_path / "saved").mkdir()
    for rank in range(2):
        held = framework_to_probe.shards(tensors, rank, 2)
        contiguous = {name: np.ascontiguousarray(array) for name, array in held.items()}
        save_file(contiguous, tmp_path / "saved" / f"rank_{rank}.safetensors")
    with_config = ("--config", str(tiny), "--layout", "shards.layout")
    assert sw("check", "saved", *with_config).code == 0
    assert sw("plan", "saved", "--to", "hf", *with_config).code == 0
    done = sw("convert", "saved", "whole", "--to", "hf", *with_config, "--no-fsync")
    assert (done.code, done.err) == (0, "")
    found = load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
    done = sw("convert", "whole", "again", "--to", "ranks", "--to-layout", "shards.layout", "--no-fsync")
    assert (done.code, done.err) == (0, "")
    for rank in range(2):
        file = f"rank_{rank}.safetensors"
        again, before = (load_file(tmp_path / folder / file) for folder in ("again", "saved"))
        assert again.keys() == before.keys()
        assert all(np.array_equal(again[name], before[name]) for name in before)


def test_a_whole_model_that_is_not_whole(sw: Run, golden: Callable[..., None], tiny: Path) -> None:
    rows = ("probe", "mine_to_probe:rows", "--tp", "2")
    model = ("probe", "framework_to_probe:shards", "--config", str(tiny), "--tp", "2")
    Path("there.layout").touch()
    shown = []
    for code, command in [
        (1, ("probe", "framework_to_probe:loses", "--config", str(tiny), "--tp", "2")),
        (1, (*model[:-1], "5")),
        (2, rows),
        (2, (*rows, "--shape", "4,4", "--config", str(tiny))),
        (2, (*rows, "--shape", "4,4", "--sampled")),
        (2, (*model, "--flat")),
        (2, (*model, "--out", "there.layout")),
    ]:
        done = sw(*command)
        assert done.code == code, (command, done.err)
        shown.append(done.err)
    golden("probe_model_refusals", "\n".join(shown))
