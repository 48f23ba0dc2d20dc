"""A training that goes on: saved by torch on four ranks, converted here, loaded by torch on two.

Whether it is the same training is asked three ways. The state that torch loads is the state that it saved, to
the last bit. The next losses are, to the last bit, those of a run that loads what torch itself saved. And
they are those of a run that was never interrupted, to what the number of ranks alone makes of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run
from safetensors.torch import load_file

from shardweave.convert import convert, prepare
from shardweave.errors import ModelError, OutsideError

pytestmark = [
    pytest.mark.peer("transformers"), pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300),
]  # fmt: skip

SCRIPT = Path(__file__).with_name("dcp_resume_ranks.py")
MODELS = "transformers.modeling_utils"
HALF, STEPS, DOCUMENTS, LENGTH = 3, 6, 8, 12

# Neither 2 nor 4 divides the vocabulary, the inner size or the number of experts.
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 36, "intermediate_size": 71, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"config": {**SIZES, "model_type": "llama"}, "optimizer": "adamw"},
    "amsgrad": {
        "config": {**SIZES, "model_type": "qwen3", "tie_word_embeddings": True}, "optimizer": "amsgrad",
    },
    "sgd": {
        "config": {
            **SIZES, "model_type": "qwen3_moe", "moe_intermediate_size": 22, "num_experts": 5,
            "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [1],
        },
        "optimizer": "sgd",
    },
    "frozen": {"config": {**SIZES, "model_type": "llama"}, "optimizer": "adamw", "frozen": "embed_tokens"},
}  # fmt: skip


def play(place: Path, world_size: int, cases: list[dict[str, Any]]) -> None:
    run(SCRIPT, cases, place, world_size=world_size, limit_s=200, preload=MODELS)
    (place / "store").unlink()


def said(place: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / f"{name}.json").read_text())
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of all cases: what torch saved, and everything that goes on from it."""
    place = tmp_path_factory.mktemp("resume")
    chance = torch.Generator().manual_seed(3)
    ids = torch.randint(0, SIZES["vocab_size"], (STEPS, DOCUMENTS, LENGTH), generator=chance)
    ids[:, :, 1::2] = ids[:, :, ::2]  # half of the tokens can be learned
    documents = place / "documents.json"
    documents.write_text(json.dumps(ids.tolist()))

    def case(name: str, what: str, steps: tuple[int, int], **more: Any) -> dict[str, Any]:
        return {**CASES[name], "name": f"{name} {what}", "documents": str(documents), "steps": steps, **more}

    whole = [case(name, "whole", (0, STEPS)) for name in CASES]
    saved = [
        case(
            name, "saved", (0, HALF), save=str(place / f"{name} torch"), shards=str(place / f"{name} shards")
        )
        for name in CASES
    ]
    play(place, 4, [*whole, *saved])
    for name, one in CASES.items():
        (place / f"{name}.config").mkdir()
        (place / f"{name}.config" / "config.json").write_text(json.dumps(one["config"]))
        source, native = place / f"{name} torch", place / f"{name} native"
        convert(prepare(source, to="native", config=place / f"{name}.config"), native, fsync=False)
        convert(prepare(native, to="dcp"), place / f"{name} back", fsync=False)
        weights = prepare(native, to="hf", weights_only=True, stacked_experts=True)
        convert(weights, place / f"{name} hf", fsync=False)
    cases = [case(name, "two", (0, STEPS)) for name in CASES]
    for name in CASES:
        folder = {kind: str(place / f"{name} {kind}") for kind in ("torch", "back", "hf")}
        more: dict[str, dict[str, str]] = {
            "from torch": {"load": folder["torch"]},
            "from back": {"load": folder["back"]},
            "from hf": {"hf": folder["hf"], "load": folder["back"]},
            "afresh": {"hf": folder["hf"]},
        }
        cases += [case(name, what, (HALF, STEPS), **loads) for what, loads in more.items()]
    play(place, 2, cases)
    play(place, 4, [case(name, "four", (HALF, STEPS), load=str(place / f"{name} back")) for name in CASES])
    return place


def bits(folder: Path) -> dict[str, torch.Tensor]:
    return {key: v.contiguous().view(torch.int32) for key, v in load_file(folder).items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("what", ["from torch", "from back", "from hf", "four"])
def test_the_state_is_the_one_that_was_saved(place: Path, name: str, what: str) -> None:
    wanted = bits(place / f"{name} saved.end.safetensors")
    found = bits(place / f"{name} {what}.loaded.safetensors")
    states = {key.rpartition("/")[2] for key in wanted if key.startswith("optim/")}
    assert (
        states
        == {
            "adamw": {"step", "exp_avg", "exp_avg_sq"},
            "frozen": {"step", "exp_avg", "exp_avg_sq"},
            "amsgrad": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
            "sgd": {"momentum_buffer"},
        }[name]
    )
    assert (name == "frozen") != any(key.startswith("optim/model.embed_tokens") for key in wanted)
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert torch.equal(found[key], values), key


@pytest.mark.parametrize("name", CASES)
def test_the_settings_are_those_that_were_saved(place: Path, name: str) -> None:
    wanted = said(place, f"{name} saved")["groups"]
    assert [group["lr"] for group in wanted] == [1e-2, 3e-3]
    for what in ("from torch", "from back", "four"):
        assert said(place, f"{name} {what}")["groups"] == wanted, what


@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_of_a_run_that_was_not_interrupted(place: Path, name: str) -> None:
    four, two = said(place, f"{name} whole")["losses"], said(place, f"{name} two")["losses"]
    noise = max(abs(a - b) for a, b in zip(four, two, strict=True))
    assert noise < 2e-6, "what the number of ranks makes of losses, in fp32"
    back = said(place, f"{name} from back")["losses"]
    print(f"{name}: losses {[round(x, 6) for x in four]}, 4 ranks against 2: {noise:.1e}, resumed against "
          f"4 ranks: {max(abs(a - b) for a, b in zip(back, four[HALF:], strict=True)):.1e}")  # fmt: skip
    assert back == said(place, f"{name} from torch")["losses"]
    assert back == said(place, f"{name} from hf")["losses"]
    assert max(abs(a - b) for a, b in zip(back, four[HALF:], strict=True)) <= max(2 * noise, 1e-6)
    assert said(place, f"{name} four")["losses"] == four[HALF:], "on as many ranks, to the last bit"
    # And it would be seen: weights alone do not go on so.
    afresh = said(place, f"{name} afresh")["losses"]
    assert abs(afresh[0] - back[0]) <= max(2 * noise, 1e-6)
    assert max(abs(a - b) for a, b in zip(afresh, back, strict=True)) > 100 * max(noise, 1e-6)
    weights = load_file(place / f"{name} from back.end.safetensors")
    whole = load_file(place / f"{name} whole.end.safetensors")
    assert max(float((weights[key] - whole[key]).abs().max()) for key in whole) < 1e-3


@pytest.mark.parametrize("name", CASES)
def test_shards_in_safetensors_files_are_the_same_weights(place: Path, name: str, tmp_path: Path) -> None:
    shards, config = place / f"{name} shards", place / f"{name}.config"
    assert len(list(shards.glob("shard-0000[1-4]-model-00001-of-00001.safetensors"))) == 4
    convert(prepare(shards, to="hf", config=config, stacked_experts=True), tmp_path / "hf", fsync=False)
    wanted = bits(place / f"{name} hf" / "model.safetensors")
    found = bits(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    damaged = Path(shutil.copytree(shards, tmp_path / "damaged"))
    next(damaged.glob("shard-00004-*")).unlink()
    with pytest.raises(OutsideError, match="has the shape that the model says"):
        prepare(damaged, to="hf", config=config)
    with pytest.raises(ModelError, match="how large the tensors are"):
        prepare(damaged, to="hf", config=Path("none"))
