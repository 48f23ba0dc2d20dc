"""Ask the real vLLM what a rank holds of hybrid models: delta nets, gated attention, Mamba2 mixers.

The question, the words of the answer and what is replaced are those of ``make_vllm_layouts.py``. Two things
are new. vLLM stores ``A = -exp(A_log)``, so the markers of ``A_log`` come first, are small, and are read back
by a logarithm; such a parameter has a ``transform``. And a convolution has a dim of one element between its
channels and its steps, left out while markers are read. The module of Qwen3.5 imports torchvision for
images, which take no part in loading: where it is not there, a package of empty classes stands in for it.

    python tests/oracle/make_vllm_hybrid.py --write     write tests/data/vllm_hybrid.json
    python tests/oracle/make_vllm_hybrid.py             compare with it
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

RECORDING = Path(__file__).parents[1] / "data" / "vllm_hybrid.json"
Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]


def _script() -> ModuleType:
    """``make_vllm_layouts.py`` beside this file, which is not in a package."""
    path = Path(__file__).with_name("make_vllm_layouts.py")
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem]


ASK = _script()

_NO_IMAGES = """
import importlib.abc, importlib.machinery, sys, types
class _Any(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls
class Nothing(metaclass=_Any):
    pass
class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing
class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return _Module(spec.name)
    def exec_module(self, module):
        pass
sys.meta_path.append(_Finder())
__version__ = "0.0"
"""


@cache
def without_images() -> None:
    """Let vLLM's module of Qwen3.5 be imported, here and in the processes that vLLM looks at modules in."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    package = Path(folder) / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(_NO_IMAGES)
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), folder)))


# --- the cases ----------------------------------------------------------------------------------


def _common(family: str, architecture: str, layers: int, hidden: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": family,
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "dtype": "float32",
        "tie_word_embeddings": False,
    }


def qwen(
    family: str, kinds: str, *, heads: int = 8, kv: int = 4, key: int = 4, value: int = 8, **more: Any
) -> Config:
    """Layers are ``d`` (delta net) or ``a`` (attention); sizes as small as the question allows."""
    names = {"qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"}
    words = {"d": "linear_attention", "a": "full_attention"}
    sparse = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 28,
    }
    return {
        **_common(family, f"{names[family]}ForCausalLM", len(kinds), 20, 71),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 6,
        "intermediate_size": 24,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0},
        "layer_types": [words[kind] for kind in kinds],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
        "linear_num_key_heads": key,
        "linear_num_value_heads": value,
        **({} if family == "qwen3_5_text" else sparse),
        **more,
    }


def nemotron(pattern: str, *, heads: int = 8, groups: int = 4, **more: Any) -> Config:
    return {
        **_common("nemotron_h", "NemotronHForCausalLM", len(pattern), 20, 71),
        "hybrid_override_pattern": pattern,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 24,
        "mamba_num_heads": heads,
        "mamba_head_dim": 5,
        "n_groups": groups,
        "ssm_state_size": 7,
        "conv_kernel": 3,
        "use_bias": False,
        "mlp_bias": False,
        "use_conv_bias": True,
        "max_position_embeddings": 64,
        "layer_norm_epsilon": 1e-5,
        "chunk_size": 8,
        **more,
    }


def mamba(**more: Any) -> Config:
    return {
        **_common("mamba2", "Mamba2ForCausalLM", 2, 20, 71),
        "num_heads": 8,
        "head_dim": 5,
        "expand": 2,
        "n_groups": 1,
        "state_size": 7,
        "conv_kernel": 3,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "chunk_size": 8,
        **more,
    }


def cases() -> Iterator[tuple[str, Config, Config]]:
    yield "qwen3_next, tp 2, a dense layer", qwen("qwen3_next", "dad", mlp_only_layers=[1]), {"tp": 2}
    yield "qwen3_next, tp 4, experts spread", qwen("qwen3_next", "da"), {"tp": 4, "expert_parallel": True}
    yield "qwen3_next, kv heads repeated, pp 2", qwen("qwen3_next", "dad", kv=2), {"tp": 4, "pp": 2}
    yield "qwen3_5, tp 2", qwen("qwen3_5_text", "da"), {"tp": 2}
    yield (
        "qwen3_5, tied, tp 4, pp 2",
        qwen("qwen3_5_text", "dad", tie_word_embeddings=True),
        {"tp": 4, "pp": 2},
    )
    yield "qwen3_5, as many value heads as key heads", qwen("qwen3_5_text", "d", key=8), {"tp": 2}
    yield "qwen3_5_moe, tp 2, pp 2", qwen("qwen3_5_moe_text", "ad"), {"tp": 2, "pp": 2}
    yield "nemotron_h, tp 2, pp 2", nemotron("M*-M"), {"tp": 2, "pp": 2}
    yield "nemotron_h, all biases, tp 4", nemotron("M-*", use_bias=True, mlp_bias=True), {"tp": 4}
    yield "nemotron_h, one group, tp 4", nemotron("M", groups=1), {"tp": 4}
    yield "mamba2, one group, tp 2", mamba(), {"tp": 2}
    yield (
        "mamba2, groups, tied, no bias",
        mamba(n_groups=4, use_conv_bias=False, tie_word_embeddings=True),
        {"tp": 4},
    )
    yield "mamba2, one rank", mamba(use_bias=True), {}


def refusals() -> Iterator[tuple[str, Config, Config]]:
    """What vLLM cannot hold; where its ``error`` is empty it goes on without a word."""
    yield "fewer key heads than ranks", qwen("qwen3_5_text", "d", key=2), {"tp": 4}
    yield "fewer key heads than ranks, fused", qwen("qwen3_next", "d", key=2), {"tp": 4}
    yield "value heads over ranks", qwen("qwen3_5_text", "d", key=3, value=3), {"tp": 2}
    yield "a gated query with biases", qwen("qwen3_next", "a", attention_bias=True), {"tp": 2}
    yield "a head that is tied and not", qwen("qwen3_next", "d", tie_word_embeddings=True), {"tp": 2}
    yield "two groups over four ranks", nemotron("M", groups=2), {"tp": 4}
    yield "heads over ranks", nemotron("M", heads=6, groups=3), {"tp": 4}
    yield "one group, a bias of the projection", nemotron("M", groups=1, use_bias=True), {"tp": 2}
    yield "one group, no bias of the convolution", nemotron("M", groups=1, use_conv_bias=False), {"tp": 2}
    yield "ffn over ranks", nemotron("-", intermediate_size=26), {"tp": 4}


# --- the checkpoint -----------------------------------------------------------------------------


def checkpoint(model: Config) -> dict[str, np.ndarray]:
    """The tensors of a model under their Hugging Face names; element by element 1, 2, 3, ..., A_log first."""
    shapes = _nemotron(model) if "conv_kernel" in model else _qwen(model)
    order = sorted(shapes, key=lambda name: not name.endswith("A_log"))
    ends = np.cumsum([0, *(int(np.prod(shapes[name])) for name in order)])
    assert ends[-1] < 2**24, "a marker is a whole number in float32"
    return {
        name: np.arange(start + 1, start + 1 + np.prod(shapes[name]), dtype=np.float32).reshape(shapes[name])
        for name, start in zip(order, ends[:-1].tolist(), strict=True)
    }


def _gated(prefix: str, ffn: int, hidden: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (ffn, hidden),
        f"{prefix}up_proj.weight": (ffn, hidden),
        f"{prefix}down_proj.weight": (hidden, ffn),
    }


def _qwen(model: Config) -> Shapes:
    hidden, vocab, d = model["hidden_size"], model["vocab_size"], model["head_dim"]
    nk, nv = model["linear_num_key_heads"], model["linear_num_value_heads"]
    k, v = nk * model["linear_key_head_dim"], nv * model["linear_value_head_dim"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not model["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i, kind in enumerate(model["layer_types"]):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        if kind == "full_attention":
            rows = {"q": 2 * model["num_attention_heads"] * d, "k": model["num_key_value_heads"] * d}
            rows["v"] = rows["k"]
            shapes |= {f"{at}self_attn.{name}_proj.weight": (n, hidden) for name, n in rows.items()}
            shapes[f"{at}self_attn.o_proj.weight"] = (hidden, rows["q"] // 2)
            shapes |= {f"{at}self_attn.{name}_norm.weight": (d,) for name in "qk"}
            if model.get("attention_bias"):
                shapes |= {f"{at}self_attn.{name}_proj.bias": (n,) for name, n in rows.items()}
        else:
            mixer = f"{at}linear_attn."
            fused = model["model_type"] == "qwen3_next"
            rows = (
                {"qkvz": 2 * (k + v), "ba": 2 * nv} if fused else {"qkv": 2 * k + v, "z": v, "b": nv, "a": nv}
            )
            shapes |= {f"{mixer}in_proj_{name}.weight": (n, hidden) for name, n in rows.items()}
            shapes |= {
                f"{mixer}conv1d.weight": (2 * k + v, 1, model["linear_conv_kernel_dim"]),
                f"{mixer}A_log": (nv,),
                f"{mixer}dt_bias": (nv,),
                f"{mixer}norm.weight": (model["linear_value_head_dim"],),
                f"{mixer}out_proj.weight": (hidden, v),
            }
        if "num_experts" not in model or i in model.get("mlp_only_layers", ()):
            shapes |= _gated(f"{at}mlp.", model["intermediate_size"], hidden)
            continue
        shapes[f"{at}mlp.gate.weight"] = (model["num_experts"], hidden)
        shapes[f"{at}mlp.shared_expert_gate.weight"] = (1, hidden)
        shapes |= _gated(f"{at}mlp.shared_expert.", model["shared_expert_intermediate_size"], hidden)
        for e in range(model["num_experts"]):
            shapes |= _gated(f"{at}mlp.experts.{e}.", model["moe_intermediate_size"], hidden)
    return shapes


def _nemotron(model: Config) -> Shapes:
    hidden, vocab = model["hidden_size"], model["vocab_size"]
    shapes: Shapes = {"backbone.embeddings.weight": (vocab, hidden), "backbone.norm_f.weight": (hidden,)}
    if not model["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    heads = model.get("mamba_num_heads", model.get("num_heads", 0))
    inner = heads * model.get("mamba_head_dim", model["head_dim"])
    groups = model["n_groups"] * model.get("ssm_state_size", model.get("state_size", 0))
    channels = inner + 2 * groups
    for i, kind in enumerate(model.get("hybrid_override_pattern", "M" * model["num_hidden_layers"])):
        at = f"backbone.layers.{i}.mixer."
        shapes[f"backbone.layers.{i}.norm.weight"] = (hidden,)
        if kind == "M":
            shapes |= {
                f"{at}in_proj.weight": (inner + channels + heads, hidden),
                f"{at}conv1d.weight": (channels, 1, model["conv_kernel"]),
                f"{at}A_log": (heads,),
                f"{at}D": (heads,),
                f"{at}dt_bias": (heads,),
                f"{at}norm.weight": (inner,),
                f"{at}out_proj.weight": (hidden, inner),
            }
            if model["use_conv_bias"]:
                shapes[f"{at}conv1d.bias"] = (channels,)
            if model["use_bias"]:
                shapes |= {f"{at}in_proj.bias": (inner + channels + heads,), f"{at}out_proj.bias": (hidden,)}
        elif kind == "*":
            d = model["head_dim"]
            rows = {"q": model["num_attention_heads"] * d, "k": model["num_key_value_heads"] * d}
            shapes |= {f"{at}{name}_proj.weight": (rows[name.replace("v", "k")], hidden) for name in "qkv"}
            shapes[f"{at}o_proj.weight"] = (hidden, rows["q"])
        else:
            ffn = model["intermediate_size"]
            shapes |= {f"{at}up_proj.weight": (ffn, hidden), f"{at}down_proj.weight": (hidden, ffn)}
            if model["mlp_bias"]:
                shapes |= {f"{at}up_proj.bias": (ffn,), f"{at}down_proj.bias": (hidden,)}
    return shapes


# --- asking and reading -------------------------------------------------------------------------


@contextmanager
def _ours() -> Iterator[None]:
    """The other script with the checkpoints of this one."""
    before = ASK.checkpoint
    ASK.checkpoint = checkpoint
    try:
        yield
    finally:
        ASK.checkpoint = before


def ask(model: Config, deployment: Config, rank: int) -> dict[str, dict[str, Any]]:
    """What one rank holds, in the words of the recording."""
    without_images()
    given = {**ASK.DEPLOYMENT, **deployment}
    with ASK._groups(given["tp"], given["pp"], given["dp"], rank), _ours():
        return describe(model, ASK.load(model, deployment))


def describe(model: Config, parameters: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """As in the other script, with a transform where there is one, and the dim of one element put back."""
    flat = {
        name: x.reshape(x.shape[0], -1) if x.ndim == 3 and x.shape[1] == 1 else x
        for name, x in parameters.items()
    }
    transformed = [name for name in parameters if name.endswith(".A")]
    for name in transformed:
        # -exp of a small whole number: a logarithm gives it back.
        values = np.log(-parameters[name].astype(np.float64))
        assert np.allclose(values, np.round(values), atol=1e-5), "a marker is a whole number"
        flat[name] = np.round(values)
    full = checkpoint

    def narrow(config: Config) -> dict[str, np.ndarray]:
        return {n: x.reshape(x.shape[0], -1) if x.ndim == 3 else x for n, x in full(config).items()}

    before, ASK.checkpoint = ASK.checkpoint, narrow
    try:
        found: dict[str, dict[str, Any]] = ASK.describe(model, flat)
    finally:
        ASK.checkpoint = before
    for name, entry in found.items():
        if parameters[name].shape != tuple(entry["shape"]):
            entry["shape"].insert(1, 1)
            entry["dims"].insert(1, [[-1, 0, 1, 1]])
        if name in transformed:
            entry["transform"] = "neg_exp"
    return found


def dtypes(model: Config) -> dict[str, str]:
    """The parameters that are not of the engine's dtype, here bfloat16, with the dtype that they have."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = ASK._vllm_config(json.dumps(model))
    config.compilation_config.static_forward_context.clear()
    with (
        ASK._groups(1, 1, 1, 0),
        ASK._kernel(ASK.DEPLOYMENT),
        set_current_vllm_config(config),
        set_default_torch_dtype(torch.bfloat16),
    ):
        built = initialize_model(config)
    return {
        name: str(parameter.dtype).removeprefix("torch.")
        for name, parameter in built.named_parameters()
        if parameter.dtype != torch.bfloat16
    }


def record() -> dict[str, Any]:
    import torch
    import vllm

    done = []
    for name, model, deployment in cases():
        size = int(np.prod([deployment.get(axis, 1) for axis in ("tp", "pp", "dp")]))
        parameters = ASK.by_parameter({rank: ask(model, deployment, rank) for rank in range(size)})
        entry = {"name": name, "config": model, "deployment": deployment, "dtypes": dtypes(model)}
        done.append({**entry, "parameters": parameters})
        print(f"{name}: {size} ranks, {len(parameters)} parameters, {entry['dtypes']}", file=sys.stderr)
    refused = []
    for name, model, deployment in refusals():
        try:
            ask(model, deployment, 0)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        else:
            said = ""
        refused.append({"name": name, "config": model, "deployment": deployment, "error": said})
        print(f"{name}: {said}", file=sys.stderr)
    return {
        "format": "vllm_hybrid/1",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "cases": done,
        "refusals": refused,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {RECORDING.name}")
    text = ASK.dumps(record()) if (arguments := parser.parse_args()) else ""
    if arguments.write:
        RECORDING.write_text(text)
        return 0
    if text != RECORDING.read_text():
        print(f"{RECORDING.name} says something else", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
