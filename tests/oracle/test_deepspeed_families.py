"""Layers of Falcon, Phi-3, ChatGLM and Yuan under DeepSpeed's own AutoTP: what every rank has of them.

AutoTP parses the model for the layers that sum, walks a block and puts its own layers in the place of the
linear ones, as ``init_inference`` and a training engine have it do; each layer cuts its weight when it is
built. Weights are markers, their own numbers, so that what a rank has says where it comes from. Ranks are
built one after the other in this process: the group that they are given only counts.

ChatGLM and Yuan have remote code. What stands for them here has the names, sizes and class names of theirs,
which is all that AutoTP looks at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from shardweave.dialects import deepspeed
from shardweave.layout import Layout, Mesh
from shardweave.models import from_config
from shardweave.store.layout_file import read_layout, write_layout
from shardweave.testing import probe_model

pytestmark = pytest.mark.peer("deepspeed")

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Group:
    """As much of a process group as layers ask for: how many ranks, and which is asking."""

    tp: int
    rank: int


@pytest.fixture(autouse=True)
def _groups_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from deepspeed import comm

    monkeypatch.setattr(comm, "get_world_size", lambda group=None: group.tp if group else 1)
    monkeypatch.setattr(comm, "get_rank", lambda group=None: group.rank if group else 0)
    yield


# --- the models ---------------------------------------------------------------------------------


def of_transformers(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values))


class Part(nn.Module):
    """A module of the given children, called what its class is called."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class GLMBlock(Part): ...


class ChatGLMModel(Part): ...


class ChatGLMForConditionalGeneration(Part): ...


class YuanAttention(Part): ...


class YuanDecoderLayer(Part): ...


class YuanModel(Part): ...


class YuanForCausalLM(Part): ...


def chatglm(config: dict[str, Any]) -> nn.Module:
    hidden, ffn, rows = config["hidden_size"], config["ffn_hidden_size"], config["padded_vocab_size"]
    q = config["num_attention_heads"] * config["kv_channels"]
    kv = config["multi_query_group_num"] * config["kv_channels"]

    def block() -> GLMBlock:
        return GLMBlock(
            input_layernorm=nn.RMSNorm(hidden),
            self_attention=Part(
                query_key_value=nn.Linear(hidden, q + 2 * kv), dense=nn.Linear(q, hidden, bias=False)
            ),
            post_attention_layernorm=nn.RMSNorm(hidden),
            mlp=Part(
                dense_h_to_4h=nn.Linear(hidden, 2 * ffn, bias=False),
                dense_4h_to_h=nn.Linear(ffn, hidden, bias=False),
            ),
        )

    layers = nn.ModuleList(block() for _ in range(config["num_layers"]))
    return ChatGLMForConditionalGeneration(
        transformer=ChatGLMModel(
            embedding=Part(word_embeddings=nn.Embedding(rows, hidden)),
            encoder=Part(layers=layers, final_layernorm=nn.RMSNorm(hidden)),
            output_layer=nn.Linear(hidden, rows, bias=False),
        )
    )


def yuan(config: dict[str, Any]) -> nn.Module:
    hidden, ffn, rows = config["hidden_size"], config["intermediate_size"], config["vocab_size"]

    def linear(columns: int, rows: int) -> nn.Module:
        return nn.Linear(columns, rows, bias=False)

    def block() -> YuanDecoderLayer:
        lf_gate = Part(
            conv1=nn.Conv2d(hidden, hidden // 2, (2, 1)),
            conv2=nn.Conv2d(hidden // 2, hidden, (2, 1)),
            output_layernorm=nn.RMSNorm(hidden),
        )
        projections = {f"{name}_proj": linear(hidden, hidden) for name in "vqko"}
        return YuanDecoderLayer(
            self_attn=YuanAttention(lf_gate=lf_gate, **projections),
            mlp=Part(
                up_proj=linear(hidden, ffn), gate_proj=linear(hidden, ffn), down_proj=linear(ffn, hidden)
            ),
            input_layernorm=nn.RMSNorm(hidden),
            post_attention_layernorm=nn.RMSNorm(hidden),
        )

    layers = nn.ModuleList(block() for _ in range(config["num_hidden_layers"]))
    model = YuanModel(embed_tokens=nn.Embedding(rows, hidden), layers=layers, norm=nn.RMSNorm(hidden))
    return YuanForCausalLM(model=model, lm_head=linear(hidden, rows))


@dataclass(frozen=True)
class Case:
    """A model to cut: its family, what its tiny config is changed by, how it is built, and the degrees."""

    family: str
    config: Mapping[str, Any]
    build: Callable[[dict[str, Any]], Any]
    tp: tuple[int, ...]


_MHA = {"new_decoder_architecture": False, "num_kv_heads": 6, "bias": True, "parallel_attn": False}
CASES = {
    # 3 KV groups of 2 queries each over 2 and 4 ranks: uneven, and one rank without any.
    "falcon": Case("falcon", {"num_kv_heads": 3, "bias": True}, of_transformers, (2, 3, 4)),
    "falcon-mha": Case("falcon", _MHA, of_transformers, (2, 4)),
    "phi3": Case(
        "phi3", {"hidden_size": 36, "head_dim": ..., "num_key_value_heads": 3}, of_transformers, (2, 3, 4)
    ),
    "chatglm": Case("chatglm", {"hidden_size": 48}, chatglm, (2, 3)),
    "yuan": Case("yuan", {"hidden_size": 48, "num_attention_heads": 8}, yuan, (2, 4)),
    # 3 heads a rank: the middle ones are held by two.
    "yuan-odd": Case("yuan", {}, yuan, (2,)),
}


@pytest.fixture
def configs(data_dir: Path) -> Callable[[Case], dict[str, Any]]:
    def read(case: Case) -> dict[str, Any]:
        path = data_dir / "configs" / "tiny" / f"{case.family}.json"
        config = json.loads(path.read_text()) | dict(case.config)
        return {key: value for key, value in config.items() if value is not ...}

    return read


# --- both sides ---------------------------------------------------------------------------------


def marked(model: Any) -> dict[str, np.ndarray]:
    """Every parameter filled with numbers that no other element of it has; returns them."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape))
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def theirs(model: nn.Module, config: dict[str, Any], tp: int, rank: int) -> dict[str, np.ndarray]:
    """What a rank has of the layers after AutoTP has been over them."""
    from deepspeed.module_inject.auto_tp import AutoTP as Peer

    read = type("Config", (), config)()
    for block_class, sums in Peer.tp_parser(model):
        for block in model.modules():
            if isinstance(block, block_class):
                peer = Peer(block, sums, "", None, None, None, model_config=read)
                peer.mp_size, peer.mp_group = tp, Group(tp, rank)
                peer.update_linear_policies()
                peer._replace_module(block)
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def ours(layout: Layout, arrays: Arrays, rank: int) -> dict[str, np.ndarray]:
    """The same from the layout, for every array that it has."""
    found: dict[str, np.ndarray] = {}
    for buffer in layout.buffers(rank):
        for name, _ in buffer.members():
            array = arrays[name]
            for axis, dim in enumerate(buffer.dims[len(buffer.separate) :]):
                array = np.take(array, [i for _, i in dim], axis=axis)
            found[name] = array
    return found


def _layer(name: str) -> bool:
    return ".layers." in name or ".h." in name


def differing(case: Case, config: dict[str, Any], tp: int) -> list[str]:
    """Which arrays of which rank are not what the layouts say."""
    layout = deepspeed.layout(from_config(config), Mesh((("tp", tp),)), way=deepspeed.INFERENCE)
    wrong = []
    for rank in range(tp):
        built = case.build(config)
        arrays = marked(built)
        cut = theirs(built, config, tp, rank)
        # The head is put in by another walk; the layers are what is asked here.
        expected = {name: array for name, array in ours(layout, arrays, rank).items() if _layer(name)}
        assert set(expected) == {name for name in arrays if _layer(name)}
        wrong += [
            f"{name} of rank {rank}"
            for name, array in expected.items()
            if array.shape != cut[name].shape or not np.array_equal(array, cut[name])
        ]
    return wrong


@pytest.mark.parametrize(("name", "tp"), [(name, tp) for name, case in CASES.items() for tp in case.tp])
def test_every_rank_has_what_the_layouts_say(
    configs: Callable[[Case], dict[str, Any]], name: str, tp: int
) -> None:
    assert differing(CASES[name], configs(CASES[name]), tp) == []


HOOKS = {
    "fused_LinearLayer": ("qkv", "qkv_bias"),
    "GateUpPack_LinearLayer": ("gate_up", "gate_up_bias"),
    "Yuan_LinearLayer": ("v",),
    "Yuan_LinearAllreduce": ("o",),
}
"""DeepSpeed's layers that know how a weight is fused, or how heads share, and the roles that they cut."""


HOOKED = {
    "falcon": ("fused_LinearLayer",),
    "falcon-mha": ("fused_LinearLayer",),
    "phi3": ("fused_LinearLayer", "GateUpPack_LinearLayer"),
    "chatglm": ("fused_LinearLayer", "GateUpPack_LinearLayer"),
    "yuan": ("Yuan_LinearLayer", "Yuan_LinearAllreduce"),
    "yuan-odd": ("Yuan_LinearLayer", "Yuan_LinearAllreduce"),
}


@pytest.mark.parametrize(("name", "hook"), [(name, hook) for name in CASES for hook in HOOKED[name]])
def test_a_layer_that_is_not_put_in_is_seen(
    configs: Callable[[Case], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, name: str, hook: str
) -> None:
    """Where a layer is left as it was, exactly what it would have cut differs, on every rank."""
    from deepspeed.module_inject import auto_tp

    case, tp = CASES[name], CASES[name].tp[0]
    monkeypatch.setattr(auto_tp, hook, lambda child, *_, **__: child)
    config = configs(case)
    tensors = [(role, t) for block in from_config(config).blocks for role, t in block.tensors.items()]
    missed = {member for role, tensor in tensors if role in HOOKS[hook] for member in tensor.names()}
    assert missed and sorted(differing(case, config, tp)) == sorted(
        f"{member} of rank {rank}" for member in missed for rank in range(tp)
    )


@pytest.mark.parametrize(("name", "tp"), [("falcon", 2), ("phi3", 3), ("chatglm", 2), ("yuan-odd", 2)])
def test_a_probe_of_autotp_finds_the_layout_of_the_dialect(
    configs: Callable[[Case], dict[str, Any]], tmp_path: Path, name: str, tp: int
) -> None:
    """AutoTP as a function that nobody has described: what is found, and kept in a file, is what is said."""
    import torch

    case = CASES[name]
    config = configs(case)
    model = from_config(config)

    def partition(tensors: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
        if not any(_layer(key) for key in tensors):
            return tensors
        built = case.build(config)
        with torch.no_grad():
            for key, parameter in built.named_parameters():
                if key in tensors:
                    parameter.copy_(tensors[key])
        return {key: array for key, array in theirs(built, config, ranks, rank).items() if key in tensors}

    found = probe_model(partition, model, ranks=tp, dtype="float32", arrays="torch")
    write_layout(found, tmp_path / "autotp.layout")
    said = deepspeed.layout(model, Mesh((("tp", tp),)), way=deepspeed.INFERENCE)
    rules = {rule.name: rule for rule in said.rules if "{layer}" in rule.name}
    kept = {rule.name: rule for rule in read_layout(tmp_path / "autotp.layout").rules if rule.name in rules}
    assert kept == rules
