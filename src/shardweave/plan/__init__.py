"""From two layouts to the copies between them: planning, proof, cost, simulation, file form.

A plan is data and moves nothing; it needs no device. ``simulate`` carries one out in numpy and is the
reference of every executor; ``assemble`` puts whole tensors together and compares replicas.
"""

from __future__ import annotations

from shardweave.plan.assemble import assemble
from shardweave.plan.cost import Cost, cost, needed_bytes
from shardweave.plan.file import decode, encode, load, save
from shardweave.plan.plan import Copy, Family, Plan
from shardweave.plan.planner import plan
from shardweave.plan.proof import prove_plan
from shardweave.plan.simulate import empty, materialise, simulate

__all__ = [
    "Copy",
    "Cost",
    "Family",
    "Plan",
    "assemble",
    "cost",
    "decode",
    "empty",
    "encode",
    "load",
    "materialise",
    "needed_bytes",
    "plan",
    "prove_plan",
    "save",
    "simulate",
]
