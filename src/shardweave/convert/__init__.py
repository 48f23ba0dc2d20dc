"""From one checkpoint to another: open, decide, prove, carry out, account.

``prepare`` does all that needs no weights and gives a ``Job``; ``convert`` carries it out. Checking one
checkpoint is in ``check``, comparing two in ``diff``.
"""

from __future__ import annotations

from shardweave.convert.accounting import Account, account
from shardweave.convert.checkpoint import Checkpoint, OptimizerState, Settings, Weight
from shardweave.convert.compare import Difference, check_replicas, differences
from shardweave.convert.convert import Job, Report, convert, prepare, states
from shardweave.convert.formats import FORMATS, detect
from shardweave.convert.formats.native import GROUPS
from shardweave.convert.source import open_checkpoint
from shardweave.convert.target import Geometry, Target, Wanted, Zero
from shardweave.convert.together import Company

__all__ = [
    "FORMATS",
    "GROUPS",
    "Account",
    "Checkpoint",
    "Company",
    "Difference",
    "Geometry",
    "Job",
    "OptimizerState",
    "Report",
    "Settings",
    "Target",
    "Wanted",
    "Weight",
    "Zero",
    "account",
    "check_replicas",
    "convert",
    "detect",
    "differences",
    "open_checkpoint",
    "prepare",
    "states",
]
