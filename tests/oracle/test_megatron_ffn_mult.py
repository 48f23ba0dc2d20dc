"""The size that a feed-forward multiplier of Nemotron-NAS means, against megatron-core."""

from __future__ import annotations

import pytest

from shardweave.models.nemotron_nas import ffn_size


@pytest.mark.peer("megatron.core")
def test_a_multiplier_means_what_it_means_to_megatron() -> None:
    from megatron.core.transformer.heterogeneous.heterogeneous_config import MLPConfig

    for multiplier in (0.4875, 0.5, 0.975, 1.0, 1.3125, 1.4625, 1.95, 2.625, 3.28125, 4.875, 5.25):
        for hidden_size in (30, 4096, 8192, 16384):
            expected = MLPConfig.ffn_mult_to_intermediate_size(multiplier, hidden_size)
            assert ffn_size(multiplier, hidden_size) == expected
