"""Engines that a refit goes into: they derive and load by their own code wherever that is possible.

``pairs`` and ``exchange`` know modules and no engine: two models that one piece of code built, which object
of one is which of the other, and how what one derived gets into the other at once. ``vllm`` is the engine.
"""

from __future__ import annotations
