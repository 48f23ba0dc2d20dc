"""The twin of a served model, with a model and a loader in place of vLLM's."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardweave.errors import ModelError, TransportError
from shardweave.layout import Layout
from shardweave.models import from_config
from shardweave.plan.simulate import materialise
from shardweave.refit.engines.exchange import differences, same_values
from shardweave.refit.engines.vllm import BACKEND, Twin, refit, register
from shardweave.refit.engines.vllm.describe import layout_of, model_of

CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 199, "intermediate_size": 40, "dtype": "float32",
}  # fmt: skip


def config(**more: Any) -> Any:
    """As much of a ``VllmConfig`` as is read."""
    mode = SimpleNamespace(name=more.pop("mode", "NONE"))
    return SimpleNamespace(
        model_config=SimpleNamespace(
            quantization=None,
            word_embeddings_untied_by_checkpoint=False,
            dtype=torch.float32,
            enable_sleep_mode=False,
            hf_config=SimpleNamespace(to_dict=lambda: CONFIG),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
            world_size=1,
            enable_expert_parallel=False,
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(name="NONE"),
            mode=mode,
            static_forward_context={},
            static_all_moe_layers=[],
        ),
        lora_config=None,
        **more,
    )


LAYOUT: Layout = layout_of(config(), from_config(CONFIG), nn.Module(), first_rank=2)


class Served(nn.Module):
    """A model with the parameters of the layout, by its names."""

    def __init__(self) -> None:
        super().__init__()
        for name, (buffer, _) in LAYOUT.arrays(2).items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(torch.empty(buffer.shape), requires_grad=False))
        self.model.kv_cache = torch.empty(0)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """As the rules of one rank are: fused by kind, in order, the vocabulary padded."""
        arrays = dict(self.named_parameters())
        fused = {".q_proj": (".qkv_proj", 0), ".k_proj": (".qkv_proj", 24), ".v_proj": (".qkv_proj", 32),
                 ".gate_proj": (".gate_up_proj", 0), ".up_proj": (".gate_up_proj", 40)}  # fmt: skip
        for name, weight in weights:
            short, at = next(((v[0], v[1]) for k, v in fused.items() if k in name), ("", 0))
            key = next((name.replace(k, short) for k in fused if k in name), name)
            arrays[key].detach()[at : at + len(weight)].copy_(weight)
            if weight.shape[0] == 199:
                arrays[key].detach()[199:].zero_()


def derive(model: Any, *_: object) -> None:
    """Linear weights become packed copies that only a function reads."""
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.cpu_linear = _product(module.weight.detach().t().contiguous())
            module.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def _product(packed: torch.Tensor) -> Any:
    return lambda x, weight, bias: x @ packed


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM's functions, of which the twin uses four."""
    names: dict[str, Any] = {
        "initialize_model": lambda config, model_config: Served(),
        "process_weights_after_loading": derive,
        "set_current_vllm_config": lambda config: contextlib.nullcontext(),
        "set_default_torch_dtype": lambda dtype: contextlib.nullcontext(),
    }
    places = {
        "vllm.model_executor.model_loader.utils": ("initialize_model", "process_weights_after_loading"),
        "vllm.config": ("set_current_vllm_config",),
        "vllm.utils.torch_utils": ("set_default_torch_dtype",),
    }
    for path, functions in places.items():
        module = ModuleType(path)
        for name in functions:
            setattr(module, name, lambda *args, _name=name, **more: names[_name](*args, **more))
        monkeypatch.setitem(sys.modules, path, module)
    for path in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader", "vllm.utils"):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    return names


def values(seed: int) -> dict[str, torch.Tensor]:
    """The load-time parameters of the rank, cut from random tensors by the reference."""
    generator = np.random.default_rng(seed)
    whole = {
        tensor: generator.standard_normal([len(dim) for dim in tensor.dims]).astype(np.float32)
        for tensor in LAYOUT.tensors
    }
    return {name: torch.from_numpy(array) for name, array in materialise(LAYOUT, whole)[2].items()}


def fresh(seed: int) -> Served:
    model = Served()
    for name, parameter in model.named_parameters():
        parameter.detach().copy_(values(seed)[name])
    derive(model)
    return model.eval()


def unlike(model: nn.Module, seed: int) -> list[str]:
    found = differences(model, fresh(seed), compare=same_values, ours=("kv_cache",))
    return [str(difference) for difference in found]


def twin_of(model: nn.Module, **more: Any) -> Twin:
    return Twin(model, config(**more), device=torch.device("cpu"), worker_rank=0, first_rank=2)


def fill(twin: Twin, seed: int) -> None:
    for array in twin.stage().values():
        array.fill_(torch.nan)
    held = values(seed)
    for name, array in twin.stage().items():
        # A plan writes what is not padding.
        rows = 199 if array.shape[0] == 256 else len(array)
        array[:rows].copy_(held[name][:rows])


def test_a_version_is_staged_derived_and_served(vllm: dict[str, Any]) -> None:
    live = fresh(1)
    live.model.kv_cache = cache = torch.ones(3)
    twin = twin_of(live)
    assert unlike(live, 1) == [] and twin.broken() == ""
    for seed in (1, 2, 3):
        fill(twin, seed)
        twin.derive()
        twin.commit()
        assert unlike(live, seed) == [] and twin.broken() == ""
        audit = twin.audit()
        assert audit.different == () and audit.compared >= len(LAYOUT.arrays(2))
        assert unlike(live, seed) == []
    assert live.model.kv_cache is cache


def test_staging_has_the_names_of_the_layout_and_zero_padding(vllm: dict[str, Any]) -> None:
    twin = twin_of(fresh(1))
    for _ in range(2):
        staged = twin.stage()
        assert {name: tuple(array.shape) for name, array in staged.items()} == {
            name: buffer.shape for name, (buffer, _) in LAYOUT.arrays(2).items()
        }
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert not staged[name][199:].any()
        for array in staged.values():
            array.fill_(5)
        assert all(
            a.data_ptr() == b.data_ptr() for a, b in zip(staged.values(), twin.stage().values(), strict=True)
        )
        assert bool((twin.stage()["lm_head.weight"][:199] == 5).all())


def test_what_fails_leaves_what_is_served(vllm: dict[str, Any]) -> None:
    live = fresh(1)
    twin = twin_of(live)

    def broken(model: nn.Module, *_: object) -> None:
        derive(model)
        raise RuntimeError("no room")

    vllm["process_weights_after_loading"] = broken
    fill(twin, 2)
    with pytest.raises(RuntimeError, match="no room"):
        twin.derive()
    twin.discard()
    assert unlike(live, 1) == []
    vllm["process_weights_after_loading"] = derive
    fill(twin, 2)
    twin.derive()
    twin.discard()
    assert unlike(live, 1) == []
    fill(twin, 3)
    twin.derive()
    twin.commit()
    assert unlike(live, 3) == []


def test_addresses_stay_where_code_was_compiled(vllm: dict[str, Any]) -> None:
    live = fresh(1)
    addresses = [parameter.data_ptr() for parameter in live.parameters()]
    kernel = live.model.layers.get_submodule("0").self_attn.o_proj.cpu_linear  # type: ignore[union-attr]
    twin = twin_of(live, mode="VLLM_COMPILE")
    for seed in (2, 3):
        fill(twin, seed)
        twin.derive()
        twin.commit()
        assert unlike(live, seed) == [] and twin.audit().different == ()
        assert [parameter.data_ptr() for parameter in live.parameters()] == addresses
        assert live.model.layers.get_submodule("0").self_attn.o_proj.cpu_linear is kernel  # type: ignore[union-attr]


def test_an_audit_sees_what_was_written_into_served_weights(vllm: dict[str, Any]) -> None:
    live = fresh(1)
    twin = twin_of(live)
    with pytest.raises(ModelError, match="nothing was committed"):
        twin.audit()
    fill(twin, 2)
    twin.derive()
    twin.commit()
    kernel = live.model.layers.get_submodule("1").mlp.down_proj.cpu_linear  # type: ignore[union-attr]
    kernel.__closure__[0].cell_contents[0, 0] += 1
    assert twin.broken() == ""
    found = twin.audit().different
    assert len(found) == 2 and all(
        each.startswith("model.layers.1.mlp.down_proj.cpu_linear") for each in found
    )
    twin.stage()
    with pytest.raises(ModelError, match="something was staged since"):
        twin.audit()


def test_a_model_loaded_in_another_way_is_seen(vllm: dict[str, Any]) -> None:
    live = fresh(1)
    twin = twin_of(live)
    fill(twin, 2)
    twin.derive()
    twin.commit()
    module = live.model.layers.get_submodule("2").mlp.gate_up_proj  # type: ignore[union-attr]
    module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    assert twin.broken() == "model.layers.2.mlp.gate_up_proj.weight"


def test_a_model_that_is_not_what_was_loaded_is_refused_at_start(vllm: dict[str, Any]) -> None:
    packed = fresh(1)
    packed.model.norm.weight = nn.Parameter(torch.ones(24, 1), requires_grad=False)
    with pytest.raises(ModelError, match=r"'model.norm.weight': Parameter\[24, 1\].*!= Parameter\[24\]"):
        twin_of(packed)
    raw = Served().eval()
    with pytest.raises(ModelError, match=r"'model.layers.0.self_attn.qkv_proj.cpu_linear': only the second"):
        twin_of(raw)


def test_a_second_model_is_registered_apart(vllm: dict[str, Any]) -> None:
    given, seen = config(), []
    given.compilation_config.static_forward_context["model.layers.0.attn"] = object()

    def build(config: Any, model_config: Any) -> nn.Module:
        seen.append(config)
        config.compilation_config.static_forward_context["model.layers.0.attn"] = "the twin's"
        return Served()

    vllm["initialize_model"] = build
    before = copy.copy(given.compilation_config.static_forward_context)
    Twin(fresh(1), given, device=torch.device("cpu"), worker_rank=0, first_rank=2)
    assert given.compilation_config.static_forward_context == before and seen[0] is not given
    assert seen[0].model_config is given.model_config


# --- asking an engine ---------------------------------------------------------------------------


def asked(states: list[dict[str, Any]]) -> Any:
    return SimpleNamespace(collective_rpc=lambda name: states if name == "refit" else None)


def test_a_refit_of_an_engine_gives_the_version_of_all_its_workers() -> None:
    good = {"rank": 2, "version": 7, "changed": "", "error": ""}
    assert refit(asked([good, {**good, "rank": 3}])) == 7
    bad = {"rank": 3, "version": 6, "changed": "", "error": "TransportError: rank 0 is gone"}
    with pytest.raises(TransportError, match="rank 3: TransportError: rank 0 is gone"):
        refit(asked([good, bad]))


def test_the_backend_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Factory:
        _registry: dict[str, Any] = {}  # noqa: RUF012

        @classmethod
        def register_engine(cls, name: str, module: str, kind: str) -> None:
            assert name not in cls._registry
            cls._registry[name] = f"{module}.{kind}"

    path = "vllm.distributed.weight_transfer"
    for name in ("vllm", "vllm.distributed", path):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    factory = ModuleType(f"{path}.factory")
    factory.WeightTransferEngineFactory = Factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"{path}.factory", factory)
    register()
    register()
    assert Factory._registry == {BACKEND: "shardweave.refit.engines.vllm.engine.ShardweaveEngine"}


def test_the_model_is_the_one_of_the_config() -> None:
    assert model_of(config()).tensors == from_config(CONFIG).tensors
