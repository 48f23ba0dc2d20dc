"""``shardweave plan``: figures against a count of their own, plans that are stored and proved again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_driver import Run

from shardweave.cli.sides import layout_of, parse_side
from shardweave.dialects import fsdp, megatron, vllm
from shardweave.errors import GeometryError
from shardweave.layout import prove
from shardweave.models import from_config
from shardweave.plan import load

Checkpoint = Callable[[str], tuple[Path, Path]]
LIVE = ("--from", "megatron:tp=4,pp=2,stages=3+1", "--to", "vllm:tp=2 @ 16", "--ranks-per-node", "8")


def test_of_a_checkpoint(sw: Run, checkpoint: Checkpoint, golden, data_dir: Path) -> None:
    src, config = checkpoint("mc_moe_tp2ep2_etp1")
    done = sw("plan", src, "--to", "megatron", "--layer-keys", "singleton", "--config", config)
    assert (done.code, done.err) == (0, "")
    golden("plan_files", done.out, data=data_dir)


def test_between_layouts(sw: Run, checkpoint: Checkpoint, golden, tmp_path: Path) -> None:
    _, config = checkpoint("mc_gqa_tp1")
    done = sw("plan", "--model", config, "--dtype", "bfloat16", *LIVE, "-o", tmp_path / "plan.swp")
    assert (done.code, done.err) == (0, "")
    golden("plan_live", done.out, tmp=tmp_path)


def test_figures(sw: Run, checkpoint: Checkpoint) -> None:
    _, config = checkpoint("mc_gqa_tp1")
    said = json.loads(sw("plan", "--model", config, "--dtype", "bfloat16", *LIVE, "--json").out)
    rows = {row["tensor"]: row for row in said["families"]}
    # vLLM TP 2 with 2 KV heads: norms whole on both ranks, all else cut in two; 2 bytes each.
    assert rows["model.layers.{layer}.input_layernorm.weight"]["bytes"] == 2 * 4 * 64 * 2
    assert rows["model.layers.{layer}.self_attn.k_proj.weight"]["bytes"] == 4 * 16 * 64 * 2
    assert rows["model.embed_tokens.weight"]["bytes"] == 192 * 64 * 2
    cost = said["cost"]
    assert cost["bytes"] == cost["needed_bytes"] == sum(row["bytes"] for row in said["families"])
    assert cost["copies"] == sum(row["copies"] for row in said["families"])
    # Ranks 0..7 are one node, 16 and 17 another.
    assert cost["world_bytes"] == cost["bytes"]
    assert (said["target"]["first_rank"], said["target"]["ranks"]) == (16, 2)


def test_stored_plans_are_proved(sw: Run, checkpoint: Checkpoint, tmp_path: Path) -> None:
    _, config = checkpoint("mc_gqa_tp1")
    path = tmp_path / "plan.swp"
    live = sw("plan", "--model", config, "--dtype", "bfloat16", *LIVE, "--json", "-o", path)
    said = json.loads(live.out)
    assert said.pop("stored") == str(path)
    again = json.loads(sw("plan", "--load", path, "--json").out)
    assert again["families"] == said["families"]
    assert again["cost"]["bytes"] == load(path).num_bytes
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    done = sw("plan", "--load", path)
    assert (done.code, done.out) == (1, "")
    assert "digest" in done.err


@pytest.mark.parametrize(
    ("text", "build"),
    [
        (
            "megatron:tp=2,pp=2,dp=2,first=1 @ 8",
            lambda model: megatron.layout(
                model, megatron.mesh(tp=2, pp=2, dp=2, offset=8), pipeline=((1, 3),)
            ),
        ),
        (
            "megatron:pp=2,vpp=2,spec=local,vocab_divisor=1",
            lambda model: megatron.layout(
                model, megatron.mesh(pp=2), pipeline=((1, 1), (1, 1)), spec="local", vocab_divisor=1
            ),
        ),
        (
            "vllm:tp=2,pp=2,stages=1+3,vocab_multiple=32",
            lambda model: vllm.layout(
                model, vllm.mesh(tp=2, pp=2), layer_partition=(1, 3), vocab_multiple=32
            ),
        ),
        ("fsdp", lambda model: fsdp.layout(model, fsdp.mesh(dp=1))),
        ("fsdp:dp=4 @ 2", lambda model: fsdp.layout(model, fsdp.mesh(dp=4, offset=2))),
        (
            "fsdp:tp=2,dp=4,outer=dp",
            lambda model: fsdp.layout(model, fsdp.mesh(dp=4, tp=2), tp="tp", outer="dp"),
        ),
        (
            "fsdp:dp=3,replicate=2,tp=2",
            lambda model: fsdp.layout(
                model, fsdp.mesh(replicate=2, dp=3, tp=2), replicate=("replicate",), tp="tp"
            ),
        ),
    ],
)
def test_a_text_is_the_layout_that_it_names(checkpoint: Checkpoint, text: str, build: Callable) -> None:
    model = from_config(checkpoint("mc_gqa_tp1")[1], dtype="bfloat16")
    assert layout_of(text, model) == build(model)
    prove(layout_of(text, model))


def test_experts_of_vllm(checkpoint: Checkpoint) -> None:
    model = from_config(checkpoint("mc_moe_ep2")[1], dtype="bfloat16")
    whole = vllm.layout(model, vllm.mesh(tp=2, ep=2), expert_parallel=True)
    assert layout_of("vllm:tp=2,ep=2", model) == whole
    rows = vllm.layout(model, vllm.mesh(tp=2), expert_parallel=False)
    assert layout_of("vllm:tp=2", model) == rows != whole


@pytest.mark.parametrize("text", ["", "hf:", "hf", "hf @ 3", "hf:aliases,stacked_experts=false"])
def test_texts_of_hf(text: str) -> None:
    if not text:
        with pytest.raises(GeometryError):
            parse_side(text)
    else:
        assert parse_side(text)[0] == "hf"
