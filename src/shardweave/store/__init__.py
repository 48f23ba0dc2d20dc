"""How files hold sharded state: where each stored tensor's bytes lie, for every format alike.

A format is a module (``safetensors``; ``torch_dist`` and ``torch_dist_write``) that turns a folder into
a ``manifest.Manifest`` and lays out a new one. Reading values (``read``), the proof that chunks tile
their tensor (``tiling``) and digests (``digest``) are the same for all. No framework is imported.
"""
