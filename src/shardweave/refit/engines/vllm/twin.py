"""A second model in each worker of vLLM: staged in its load-time parameters, derived by vLLM's own code."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardweave.errors import ModelError
from shardweave.layout import PAD
from shardweave.refit.engines.exchange import Difference, Exchange, differences, prepare, same_values
from shardweave.refit.engines.pairs import Kept, Pairs
from shardweave.refit.engines.vllm.check import check_loader, check_parameters
from shardweave.refit.engines.vllm.describe import (
    addresses_stay,
    layout_of,
    model_of,
    rank_of,
)

OURS = frozenset(
    {
        "kv_cache", "vllm_config", "compilation_config", "compiled", "first_compile", "aot_compiled_fn",
        "_compiled_callable", "_compiled_bytecode", "_bytecode_hook_handle",
        "was_aot_compile_fn_loaded_from_disk",
    }
)  # fmt: skip
"""Attributes that each model has for itself: what it remembers and how it was compiled, not what it loaded.

Source: vllm 0.32.0, compilation/{decorators,wrapper}.py for what compiling leaves on a model.
"""

_HANDLES = frozenset({"CPUDNNLGEMMHandler"})
"""Classes of vLLM whose objects stand for packed weights that cannot be looked at."""


@dataclass(frozen=True)
class Audit:
    """What was found by deriving the served weights once more.

    Attributes:
        compared: How many tensors and functions were compared.
        different: Where what is served is not what a fresh derivation gives; empty is what should be.
    """

    compared: int
    different: tuple[str, ...]


class Twin:
    """The target of a refit in a worker of vLLM.

    The worker's model gets a twin: built by vLLM from the same config, never run. Its parameters, as they are
    before vLLM derives anything from them, are what is staged. ``derive`` runs vLLM's own
    ``process_weights_after_loading`` over the twin, and ``commit`` puts what came out into the served model.
    What is served is therefore what a fresh engine would have computed from the same weights.

    Attributes:
        layout: Where the state of all ranks of the engine is.
        rank: The global rank of this worker in it.
    """

    def __init__(
        self, model: torch.nn.Module, config: Any, *, device: torch.device, worker_rank: int, first_rank: int
    ) -> None:
        """Build the twin, check the layout against vLLM's loader, and derive once to see that it can be.

        Args:
            model: The model that the worker serves, loaded by vLLM and not changed since.
            config: Its ``VllmConfig``.
            device: Where it is.
            worker_rank: The rank of the worker in its replica.
            first_rank: The global rank of the engine's first worker.

        Raises:
            ModelError: The model is not described, or is not what vLLM loaded.
            GeometryError: The deployment is not described, or a parameter has another shape than declared.
            UnknownNameError: The model has a parameter that nothing fills, or lacks one.
            DtypeError: A parameter has another dtype than declared.
            ProbeError: vLLM's loader puts something elsewhere than the layout says.
        """
        described = model_of(config)
        self._device, self._stay = device, addresses_stay(config)
        self._config = _own_config(config)
        self._twin = self._built()
        self.layout = layout_of(config, described, self._twin, first_rank=first_rank)
        self.rank = rank_of(config, worker_rank=worker_rank, first_rank=first_rank)
        self._staged = dict(self._twin.named_parameters())
        check_parameters(self.layout, self.rank, self._staged)
        self._columns = {
            name: (module.weight.shape[1], module.weight.dtype)
            for name, module in self._twin.named_modules()
            if isinstance(getattr(module, "weight", None), torch.nn.Parameter) and module.weight.ndim == 2
        }
        with self._as_vllm():
            check_loader(
                self._twin.load_weights,
                self._arrays(),
                model=described,
                layout=self.layout,
                rank=self.rank,
            )
        # What loading leaves behind besides weights is the twin's beginning, as it was the served model's.
        self._pairs = Pairs(model, self._twin, staged=self._staged.values(), ours=OURS)
        self._exchange: Exchange | None = None
        self._served: Exchange | None = None
        self._given: list[tuple[Kept, torch.Tensor]] = []
        self._holds_served = False
        self._clean = True
        self._rehearse()

    # --- the protocol ---------------------------------------------------------------------------

    def stage(self) -> Mapping[str, torch.Tensor]:
        """The load-time parameters of the twin, to be filled. See ``Target.stage``."""
        self._restore()
        self._holds_served = False
        arrays = self._arrays()
        for name, (buffer, _) in self.layout.arrays(self.rank).items():
            for place, dim in enumerate(buffer.stacked):
                for run, at in zip(buffer.dims[dim].runs, buffer.dims[dim].positions, strict=True):
                    if run.label is PAD:
                        arrays[name].narrow(place, at, run.count).zero_()
        return arrays

    def derive(self) -> None:
        """Let vLLM derive the twin, and see that the served model can take it over. See ``Target.derive``.

        Raises:
            ModelError: The served model is not what it was when the twin was built.
        """
        self._clean = False
        with self._as_vllm():
            self._derive()
        self._exchange = prepare(self._pairs, stay=self._stay)

    def commit(self) -> None:
        """Serve what was derived. See ``Target.commit``."""
        assert self._exchange is not None, "derive() comes first"
        self._given = [(kept, kept.memory) for kept, _ in self._exchange.memory]
        self._exchange.commit()
        self._served, self._exchange, self._holds_served = self._exchange, None, True
        self._restore()
        self._synchronise()

    def discard(self) -> None:
        """Forget what was staged or derived. See ``Target.discard``."""
        self._exchange = None
        self._restore()

    # --- what is served -------------------------------------------------------------------------

    def broken(self) -> str:
        """Where the served model is no longer what the last commit made it, or nothing.

        Objects and addresses are looked at: what was loaded in another way is seen, what was written into
        the served memory is not; ``audit`` sees it. See ``Target.broken``.
        """
        return self._served.broken() if self._served is not None else ""

    def audit(self) -> Audit:
        """Derive the served weights once more and compare everything, bit for bit.

        Takes as long as ``derive`` and changes nothing. What only a kernel can read is compared by running.

        Raises:
            ModelError: Nothing to compare with: no version was committed, or another was staged since.
        """
        if not self._holds_served:
            raise ModelError(
                "an audit derives from the weights that are served",
                where=f"rank {self.rank}",
                equation="nothing was committed, or something was staged since",
                hint="audit between a commit and the next version",
            )
        self._restore()
        for kept, memory in self._given:
            kept.memory.copy_(memory)
        self._clean = False
        compared: list[str] = []

        def compare(path: str, live: torch.Tensor, twin: torch.Tensor) -> str:
            compared.append(path)
            return same_values(path, live, twin)

        try:
            with self._as_vllm():
                self._derive()
                live = self._pairs.live
                found = [
                    *differences(live, self._twin, compare=compare, opaque=self._is_compared, ours=OURS),
                    *self._kernels(compared),
                ]
        finally:
            self._restore()
        return Audit(len(compared), tuple(str(difference) for difference in found))

    def _is_compared(self, value: Any) -> bool:
        """Whether what shows nothing is no weight, as the twin had it at first, or is compared by running."""
        return self._pairs.is_old(value) or type(value).__name__ in _HANDLES

    def _kernels(self, compared: list[str]) -> Iterator[Difference]:
        """Compare the functions that vLLM makes for a CPU by what they compute.

        Source: vllm 0.32.0, model_executor/layers/utils.py: dispatch_cpu_unquantized_gemm.
        """
        twins = dict(self._twin.named_modules())
        for name, live in self._pairs.live.named_modules():
            kernel, other = (getattr(m, "cpu_linear", None) for m in (live, twins[name]))
            if kernel is None or other is None or name not in self._columns:
                continue
            columns, dtype = self._columns[name]
            x = torch.rand(3, columns, generator=torch.Generator().manual_seed(0)).to(dtype) - 0.5
            one, two = (f(x, m.weight, None) for f, m in ((kernel, live), (other, twins[name])))
            compared.append(f"{name}.cpu_linear")
            if said := same_values("", one, two):
                yield Difference(f"{name}.cpu_linear", said)

    # --- vLLM -----------------------------------------------------------------------------------

    def _built(self) -> Any:
        from vllm.model_executor.model_loader.utils import initialize_model

        with self._as_vllm(), self._device:
            return initialize_model(self._config, model_config=self._config.model_config).eval()

    def _derive(self) -> None:
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        process_weights_after_loading(self._twin, self._config.model_config, self._device)

    def _rehearse(self) -> None:
        """Derive once from zeros, and see that the served model is built like what comes out."""
        self._restore()
        for array in self._arrays().values():
            array.zero_()
        self._clean = False
        with self._as_vllm():
            self._derive()
        for difference in differences(self._pairs.live, self._twin, opaque=lambda _: True, ours=OURS):
            raise ModelError(
                "the served model is what vLLM derives when it loads one",
                where=f"rank {self.rank}, {difference.path!r}",
                equation=difference.what,
                hint="init the refit of an engine whose model nothing else has changed",
            )
        prepare(self._pairs, stay=self._stay)
        self._restore()

    @contextmanager
    def _as_vllm(self) -> Iterator[None]:
        """The circumstances in which vLLM builds, loads and derives a model."""
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        with (
            torch.inference_mode(False),
            torch.no_grad(),
            set_current_vllm_config(self._config),
            set_default_torch_dtype(self._config.model_config.dtype),
        ):
            yield

    def _arrays(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._staged.items()}

    def _restore(self) -> None:
        if not self._clean:
            self._pairs.reset()
            self._clean = True

    def _synchronise(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _own_config(config: Any) -> Any:
    """The config of an engine for a second model: layers of the same names are registered apart."""
    own = copy.copy(config)
    own.compilation_config = copy.copy(config.compilation_config)
    own.compilation_config.static_forward_context = {}
    own.compilation_config.static_all_moe_layers = []
    return own
