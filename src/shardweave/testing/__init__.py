"""The public test kit: the marker probe, hypothesis strategies of the algebra, and worlds in memory.

``probe`` runs a partition function and gives its layout, ``probe_model`` one that cuts a whole model.
``shardweave.testing.strategies`` draws dims, boxes, meshes and layouts for property tests, and needs
hypothesis. ``shardweave.testing.world`` runs ranks as threads of one process.
"""

from __future__ import annotations

from shardweave.testing.found import Declared, Difference, Found, compare, expect
from shardweave.testing.model import probe_model
from shardweave.testing.probe import probe, probe_function, probe_loader, probe_shapes

__all__ = [
    "Declared",
    "Difference",
    "Found",
    "compare",
    "expect",
    "probe",
    "probe_function",
    "probe_loader",
    "probe_model",
    "probe_shapes",
]
