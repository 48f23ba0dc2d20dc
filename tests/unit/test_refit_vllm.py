"""What the vLLM side of a refit decides without vLLM: the loader check, and what is refused at start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shardweave.dialects import vllm
from shardweave.errors import DtypeError, GeometryError, ModelError, ProbeError, UnknownNameError
from shardweave.layout import Layout
from shardweave.models import Model, from_config
from shardweave.plan.simulate import materialise
from shardweave.refit.engines.vllm.check import check_loader, check_parameters
from shardweave.refit.engines.vllm.describe import addresses_stay, layout_of, model_of, rank_of

CONFIG = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 24, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 199, "intermediate_size": 40, "num_experts": 6,
    "moe_intermediate_size": 24, "mlp_only_layers": [1], "decoder_sparse_step": 1, "dtype": "float32",
}  # fmt: skip

# The arrays of a rank by name: what a fused name is made of is stated once more here, in plain slices.
Arrays = dict[str, torch.Tensor]


def empty(layout: Layout, rank: int) -> Arrays:
    return {
        name: torch.empty(buffer.shape, dtype=getattr(torch, buffer.dtype))
        for name, (buffer, _) in layout.arrays(rank).items()
    }


class Loader:
    """A loader written by hand for the model above: by name, one tensor at a time, in plain slices."""

    def __init__(self, arrays: Arrays, tp: int, rank: int) -> None:
        self.arrays, self.tp, self.rank = arrays, tp, rank

    def __call__(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.one(name, weight)

    def one(self, name: str, w: torch.Tensor) -> None:
        r, tp, d = self.rank, self.tp, 4
        if "norm" in name or ".mlp.gate." in name:
            self.arrays[name].copy_(w)
        elif "embed" in name or "lm_head" in name:
            self.vocabulary(name, w)
        elif ".q_proj" in name:
            rows = 6 // tp * d
            self.arrays[name.replace(".q_proj", ".qkv_proj")][:rows].copy_(w[r * rows : (r + 1) * rows])
        elif ".k_proj" in name or ".v_proj" in name:
            q, n = 6 // tp * d, max(2 // tp, 1) * d
            head = r * n if tp <= 2 else r // (tp // 2) * n
            at = q + (n if ".v_proj" in name else 0)
            fused = name.replace(".k_proj", ".qkv_proj").replace(".v_proj", ".qkv_proj")
            self.arrays[fused][at : at + n].copy_(w[head : head + n])
        elif ".o_proj" in name:
            columns = w.shape[1] // tp
            self.arrays[name].copy_(w[:, r * columns : (r + 1) * columns])
        elif ".experts." in name:
            self.expert(name, w)
        elif ".down_proj" in name:
            columns = w.shape[1] // tp
            self.arrays[name].copy_(w[:, r * columns : (r + 1) * columns])
        else:
            rows, up = w.shape[0] // tp, ".up_proj" in name
            fused = name.replace(".gate_proj", ".gate_up_proj").replace(".up_proj", ".gate_up_proj")
            self.arrays[fused][up * rows : (up + 1) * rows].copy_(w[r * rows : (r + 1) * rows])

    def vocabulary(self, name: str, w: torch.Tensor) -> None:
        rows = 256 // self.tp
        mine = w[self.rank * rows : (self.rank + 1) * rows]
        self.arrays[name][: len(mine)].copy_(mine)
        self.arrays[name][len(mine) :].zero_()

    def expert(self, name: str, w: torch.Tensor) -> None:
        head, _, tail = name.partition(".experts.")
        number, kind, r = int(tail.split(".")[0]), tail.split(".")[1], self.rank
        stacked = f"{head}.experts.routed_experts.{'w2' if kind == 'down_proj' else 'w13'}_weight"
        size = 24 // self.tp
        if kind == "down_proj":
            self.arrays[stacked][number].copy_(w[:, r * size : (r + 1) * size])
        else:
            at = size if kind == "up_proj" else 0
            self.arrays[stacked][number, at : at + size].copy_(w[r * size : (r + 1) * size])


def checked(
    tp: int, rank: int, dtype: str = "", *, kind: Callable[[Arrays, int, int], Loader] = Loader
) -> tuple[Model, Layout]:
    model = from_config(CONFIG)
    layout = vllm.layout(model, vllm.mesh(tp=tp, offset=3), dtype=dtype)
    arrays = empty(layout, 3 + rank)
    check_loader(kind(arrays, tp, rank), arrays, model=model, layout=layout, rank=3 + rank)
    return model, layout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_loader_that_does_what_the_layout_says_passes(tp: int, rank: int, dtype: str) -> None:
    checked(tp, rank, dtype)


def test_the_loader_written_by_hand_is_what_the_layout_says() -> None:
    model = from_config(CONFIG)
    layout = vllm.layout(model, vllm.mesh(tp=2))
    generator = np.random.default_rng(0)
    values = {
        t: generator.standard_normal([len(d) for d in t.dims]).astype(np.float32) for t in layout.tensors
    }
    state = materialise(layout, values)
    for rank in range(2):
        arrays = {name: torch.full_like(a, np.nan) for name, a in empty(layout, rank).items()}
        load = Loader(arrays, 2, rank)
        for tensor, whole in values.items():
            flat = whole.reshape(-1, *tensor.shape)
            load(zip(tensor.names(), map(torch.from_numpy, flat), strict=True))
        for name, array in arrays.items():
            assert np.array_equal(array.numpy(), state[rank][name]), name


class SwappedKV(Loader):
    def one(self, name: str, w: torch.Tensor) -> None:
        swap = {".k_proj": ".v_proj", ".v_proj": ".k_proj"}
        super().one(next((name.replace(a, b) for a, b in swap.items() if a in name), name), w)


class WrongRows(Loader):
    """Interleaved rows where a stretch is declared, of one layer."""

    def one(self, name: str, w: torch.Tensor) -> None:
        if name == "model.layers.3.self_attn.q_proj.weight":
            w = w.reshape(2, -1, w.shape[1]).transpose(0, 1).reshape(w.shape)
        super().one(name, w)


class WrongColumns(Loader):
    def one(self, name: str, w: torch.Tensor) -> None:
        super().one(name, w.flip(1) if ".experts.5.down_proj" in name and ".3." in name else w)


class OtherLayer(Loader):
    """Two layers of one kind taken for each other, neither the first nor the last."""

    def one(self, name: str, w: torch.Tensor) -> None:
        swap = {"layers.1.input": "layers.2.input", "layers.2.input": "layers.1.input"}
        super().one(next((name.replace(a, b) for a, b in swap.items() if a in name), name), w)


class OtherExpert(Loader):
    def expert(self, name: str, w: torch.Tensor) -> None:
        super().expert(name.replace(".experts.4.", ".experts.x.").replace(".experts.2.", ".experts.4.")
                       .replace(".experts.x.", ".experts.2."), w)  # fmt: skip


class FilledPadding(Loader):
    def vocabulary(self, name: str, w: torch.Tensor) -> None:
        super().vocabulary(name, w)
        self.arrays[name][-1].fill_(1)


class Forgotten(Loader):
    def one(self, name: str, w: torch.Tensor) -> None:
        if name != "model.layers.2.post_attention_layernorm.weight":
            super().one(name, w)


class Scaled(Loader):
    def one(self, name: str, w: torch.Tensor) -> None:
        super().one(name, w + 1 if name == "model.norm.weight" else w)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "array"),
    [
        (SwappedKV, "model.layers.0.self_attn.qkv_proj.weight"),
        (WrongRows, "model.layers.3.self_attn.qkv_proj.weight"),
        (WrongColumns, "model.layers.3.mlp.experts.routed_experts.w2_weight"),
        (OtherLayer, "model.layers.1.input_layernorm.weight"),
        (OtherExpert, "model.layers.0.mlp.experts.routed_experts.w13_weight"),
        (FilledPadding, "lm_head.weight"),
        (Forgotten, "model.layers.2.post_attention_layernorm.weight"),
        (Scaled, "model.norm.weight"),
    ],
)
def test_a_loader_that_does_something_else_is_refused(
    kind: Callable[[Arrays, int, int], Loader], array: str, dtype: str
) -> None:
    with pytest.raises(ProbeError) as refused:
        checked(2, 1, dtype, kind=kind)
    named = "model.embed_tokens.weight" if kind is FilledPadding else array
    assert f"array {named!r}" in str(refused.value)


def test_a_refusal_names_the_tensors() -> None:
    with pytest.raises(ProbeError) as refused:
        checked(2, 1, kind=SwappedKV)
    assert str(refused.value) == (
        "the engine's loader puts every element where the layout says: rank 4, array "
        "'model.layers.0.self_attn.qkv_proj.weight', position [12, 0]: the tensor: "
        "'model.layers.0.self_attn.k_proj.weight' != 'model.layers.0.self_attn.v_proj.weight', "
        "192 elements differ. "
        "hint: this version of the engine lays this model out differently; nothing was changed"
    )


def test_parameters_are_those_of_the_layout() -> None:
    model = from_config(CONFIG)
    layout = vllm.layout(model, vllm.mesh(tp=2))
    arrays = empty(layout, 1)
    check_parameters(layout, 1, arrays)
    with pytest.raises(UnknownNameError, match=r"'model.rotary.scale'.*only the engine's model has it"):
        check_parameters(layout, 1, {**arrays, "model.rotary.scale": torch.ones(1)})
    with pytest.raises(UnknownNameError, match=r"'model.norm.weight'.*the engine's model lacks it"):
        check_parameters(layout, 1, {n: a for n, a in arrays.items() if n != "model.norm.weight"})
    with pytest.raises(GeometryError, match=r"'model.norm.weight'.*shape\(25,\) != shape\(24,\)"):
        check_parameters(layout, 1, {**arrays, "model.norm.weight": torch.ones(25)})
    with pytest.raises(DtypeError, match=r"'model.norm.weight'.*dtype\(float64\) != dtype\(float32\)"):
        check_parameters(layout, 1, {**arrays, "model.norm.weight": torch.ones(24).double()})


# --- the config ---------------------------------------------------------------------------------


def config(
    *, parallel: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **more: Any
) -> Any:
    """As much of a ``VllmConfig`` as is read."""
    sizes = {
        "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 3,
        "data_parallel_index": 2, "world_size": 4, "enable_expert_parallel": False, "enable_eplb": False,
        "prefill_context_parallel_size": 1,
    }  # fmt: skip
    described = {
        "quantization": None, "word_embeddings_untied_by_checkpoint": False, "dtype": torch.bfloat16,
        "enable_sleep_mode": False, "hf_config": SimpleNamespace(to_dict=lambda: CONFIG),
    }  # fmt: skip
    none = SimpleNamespace(name="NONE")
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**described, **(model or {})}),
        parallel_config=SimpleNamespace(**{**sizes, **(parallel or {})}),
        compilation_config=SimpleNamespace(cudagraph_mode=none, mode=none),
        **{"lora_config": None, "offload_config": None, **more},
    )


def described(given: Any, module: torch.nn.Module | None = None, *, first_rank: int = 5) -> Layout:
    return layout_of(given, model_of(given), module or torch.nn.Module(), first_rank=first_rank)


def test_the_layout_is_read_off_the_config() -> None:
    given = config()
    layout = described(given)
    assert layout.mesh == vllm.mesh(tp=2, pp=2, dp=3, offset=5)
    assert {rule.dtype for rule in layout.rules} == {"bfloat16"}
    assert {tensor.dtype for tensor in layout.tensors} == {"float32"}
    # The third replica's second worker of the second stage.
    assert rank_of(given, worker_rank=3, first_rank=5) == 5 + 2 * 4 + 3


def test_what_a_kernel_made_of_the_config_is_read_off_the_module() -> None:
    module = torch.nn.Module()
    module.moe_config = SimpleNamespace(
        intermediate_size_per_partition=32, intermediate_size_per_partition_unpadded=24
    )
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    layout = described(config(parallel={**sizes, "enable_expert_parallel": True}), module)
    assert layout.arrays(5)["model.layers.0.mlp.experts.routed_experts.w13_weight"][0].shape == (6, 64, 24)
    module.expert_map_manager = SimpleNamespace(placement_strategy="round_robin")
    sizes["tensor_parallel_size"] = 2
    layout = described(config(parallel={**sizes, "enable_expert_parallel": True}), module)
    experts = layout.arrays(6)["model.layers.0.mlp.experts.routed_experts.w2_weight"][0].dims[1]
    assert [number for _, number in experts] == [1, 3, 5]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (config(model={"quantization": "fp8"}), "quantization"),
        (config(lora_config=object()), "lora_config"),
        (config(model={"word_embeddings_untied_by_checkpoint": True}), "ties the head"),
        (config(parallel={"enable_eplb": True}), r"enable_eplb\(True\)"),
        (config(parallel={"prefill_context_parallel_size": 2}), r"prefill_context_parallel_size\(2\) > 1"),
        (config(offload_config=SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=1))), "offloaded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_described_is_refused(given: Any, said: str) -> None:
    with pytest.raises((ModelError, GeometryError), match=said):
        described(given)


def test_addresses_stay_for_compiled_and_captured_code_and_for_pools() -> None:
    assert not addresses_stay(config())
    assert addresses_stay(config(model={"enable_sleep_mode": True}))
    for name in ("cudagraph_mode", "mode"):
        given = config()
        setattr(given.compilation_config, name, SimpleNamespace(name="FULL"))
        assert addresses_stay(given)
