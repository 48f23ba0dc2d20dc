"""Ask the real vLLM which block scales a rank holds: load markers as scales, read the parameters back.

As ``make_vllm_layouts.py``, whose groups and reading of markers it uses: every scale of a checkpoint is
another whole number. Weights are float8 and cannot be marked, but must have the shapes and dtypes recorded.

Beside what is replaced there, so is the choice of a float8 kernel, for dense layers and for experts: on a CPU
vLLM asks for an instruction set that few have. The kernels take no part in loading.

    python tests/oracle/make_vllm_scales.py --write      write tests/data/vllm_scales.json
    python tests/oracle/make_vllm_scales.py              compare with it
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_vllm_layouts as layouts
import numpy as np
from make_vllm_layouts import Config, Entry

RECORDING = layouts.RECORDING.with_name("vllm_scales.json")


def config(**more: Any) -> dict[str, Any]:
    """Two layers, one dense; heads of 128 + 64 and 128, so that kv_a ends in half a block."""
    given: dict[str, Any] = {
        "n_shared_experts": 3, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_size": 384, "intermediate_size": 512,
        "moe_intermediate_size": 256, "n_routed_experts": 3, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "torch_dtype": "bfloat16",
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                "weight_block_size": [128, 128]},
    }  # fmt: skip
    found = layouts.latent(2, 4, **{**given, **more})
    del found["dtype"]
    return found


def cases() -> Iterator[tuple[str, Config, Config]]:
    """Name, config and deployment; where vLLM refuses one, its error is recorded."""
    yield "scales, tp 2 over experts", config(), {"tp": 2}
    yield "scales, whole experts, ep 2", config(), {"tp": 2, "expert_parallel": True}
    yield (
        "experts of 192 rows",
        config(moe_intermediate_size=192, n_shared_experts=4),
        {"tp": 2, "expert_parallel": True},
    )
    yield (
        "scales, plain queries, layers for further tokens",
        config(q_lora_rank=None, num_nextn_predict_layers=1),
        {"tp": 2},
    )
    yield "heads of 112 and 128 over 2 ranks", config(qk_nope_head_dim=112), {"tp": 2}
    yield "a shared expert of 576 over 2 ranks", config(moe_intermediate_size=192), {"tp": 2}
    yield "a feed-forward of 640 over 2 ranks", config(intermediate_size=640), {"tp": 2}


def scales(model: Config) -> dict[str, np.ndarray]:
    """The scales under their names in files, element by element 1, 2, 3, ..."""
    shapes = {
        name + "_scale_inv": (-(-shape[0] // 128), -(-shape[1] // 128))
        for name, shape in layouts.latent_shapes(model).items()
        if (name.endswith("_proj.weight") and "eh_proj" not in name) or "with_mqa.weight" in name
    }
    return layouts.marked(shapes)


def load(model: Config, deployment: Config, rank: int) -> dict[str, Any]:
    """The parameters of a rank, as vLLM's own loader fills them; those that it leaves are NaN."""
    import torch
    from vllm.config import DeviceConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    given = {**layouts.DEPLOYMENT, **deployment}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        built = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
        whole = VllmConfig(
            model_config=built, parallel_config=ParallelConfig(), device_config=DeviceConfig("cpu")
        )
    whole.parallel_config.enable_expert_parallel = given["expert_parallel"]
    before = fp8.init_fp8_linear_kernel, fp8.select_fp8_moe_backend
    fp8.init_fp8_linear_kernel = lambda **_: SimpleNamespace()
    fp8.select_fp8_moe_backend = lambda **_: (Fp8MoeBackend.TRITON, None)
    try:
        with (
            layouts._groups(given["tp"], given["pp"], given["dp"], rank),
            layouts._kernel(given),
            set_current_vllm_config(whole),
            set_default_torch_dtype(torch.bfloat16),
        ):
            engine = initialize_model(whole)
            for parameter in engine.parameters():
                parameter.data.fill_(float("nan"))
            marked = scales(model)
            weights = {
                name: torch.zeros(
                    shape, dtype=torch.float8_e4m3fn if name + "_scale_inv" in marked else torch.bfloat16
                )
                for name, shape in layouts.latent_shapes(model).items()
            }
            weights |= {name: torch.from_numpy(value) for name, value in marked.items()}
            engine.load_weights(weights.items())
    finally:
        fp8.init_fp8_linear_kernel, fp8.select_fp8_moe_backend = before
    return dict(engine.named_parameters())


def ask(model: Config, deployment: Config, rank: int) -> dict[str, Entry]:
    """What one rank holds: of scales their runs, of weights with scales shape and dtype."""
    full = scales(model)
    names = list(full)
    starts = np.array([x.flat[0] for x in full.values()], dtype=np.int64)
    found: dict[str, Entry] = {}
    for name, value in load(model, deployment, rank).items():
        dtype = str(value.dtype).removeprefix("torch.")
        if name.endswith("_scale_inv"):
            found[name] = layouts._describe(value.detach().numpy(), full, names, starts) | {"dtype": dtype}
        elif "float8" in dtype:
            found[name] = {"shape": list(value.shape), "dtype": dtype}
    return found


def record() -> str:
    lines = []
    for name, model, deployment in cases():
        case: dict[str, Any] = {"name": name, "config": model, "deployment": deployment}
        try:
            asked = {rank: ask(model, deployment, rank) for rank in range(deployment["tp"])}
            case["parameters"] = layouts.by_parameter(asked)
        except (ValueError, RuntimeError) as error:
            case["error"] = str(error)
        lines.append(json.dumps(case))
        print(name, case.get("error", ""), file=sys.stderr)
    return "[\n" + ",\n".join(lines) + "\n]\n"


def main() -> int:
    text = record()
    if "--write" in sys.argv:
        RECORDING.write_text(text)
        return 0
    if text != RECORDING.read_text():
        print(f"{RECORDING.name} says something else", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
