"""Live refit: a trainer's weights into a running engine, proved before a byte moves.

What is here: ``manifest``, what a publisher says that it owns, in a few hundred bytes; ``joining``, what
several say together: one source layout, or a refusal. What content comes to, so that a read is checked, is
``shardweave.layout.fingerprint``; ``device`` takes it of tensors that are on a GPU.
"""

from __future__ import annotations

from shardweave.refit.joining import merge
from shardweave.refit.manifest import Manifest, decode, encode, fingerprints_of, part_of

__all__ = ["Manifest", "decode", "encode", "fingerprints_of", "merge", "part_of"]
