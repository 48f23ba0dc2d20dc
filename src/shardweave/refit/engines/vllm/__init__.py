"""vLLM: the weights of a running engine, exchanged for those of a trainer.

A user sets ``weight_transfer_config={"backend": "shardweave"}``; vLLM finds the backend by the entry point
``vllm.general_plugins``, which is ``register``. See ``docs/refit-vllm.md``.
"""

from __future__ import annotations

from shardweave.refit.engines.vllm.twin import Audit, Twin

BACKEND = "shardweave"
"""The name of the backend in vLLM's ``WeightTransferConfig``."""

__all__ = ["BACKEND", "Audit", "Twin", "register"]


def register() -> None:
    """Make the backend known to vLLM; called by vLLM in each of its processes, several times in some."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "shardweave.refit.engines.vllm.engine", "ShardweaveEngine"
        )
