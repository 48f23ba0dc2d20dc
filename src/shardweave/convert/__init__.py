"""From one checkpoint to another: open, decide, prove, carry out, account.

``prepare`` does all that needs no weights and gives a ``Job``; ``convert`` carries it out. Checking one
checkpoint is in ``check``, comparing two in ``diff``.
"""

from __future__ import annotations

from shardweave.convert.accounting import Account, account
from shardweave.convert.compare import Difference, check_replicas, differences
from shardweave.convert.convert import Job, Report, convert, prepare
from shardweave.convert.source import FORMATS, Checkpoint, detect, open_checkpoint
from shardweave.convert.states import OptimizerState, Settings, Weight, states
from shardweave.convert.target import Geometry, Target, target

__all__ = [
    "FORMATS",
    "Account",
    "Checkpoint",
    "Difference",
    "Geometry",
    "Job",
    "OptimizerState",
    "Report",
    "Settings",
    "Target",
    "Weight",
    "account",
    "check_replicas",
    "convert",
    "detect",
    "differences",
    "open_checkpoint",
    "prepare",
    "states",
    "target",
]
