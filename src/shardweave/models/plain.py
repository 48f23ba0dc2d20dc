"""A model that nobody describes: the tensors that a checkpoint names, each as it is.

Nothing is known of such a model but what the checkpoint says, so nothing can be said to be missing from it,
and it can be laid out in one way only: every tensor whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardweave.layout import Dim, Tensor
from shardweave.models.spec import Block, Model

FAMILY = "plain"


def plain(shapes: Mapping[str, tuple[int, ...]], *, dtypes: Mapping[str, str]) -> Model:
    """The model of some tensors.

    Args:
        shapes: Their shapes, by name.
        dtypes: Their dtypes, by name.

    >>> model = plain({"up.weight": (53, 37)}, dtypes={"up.weight": "float32"})
    >>> print(*model.tensors)
    up.weight (53, 37) float32
    """
    tensors = {name: Tensor(name, shape, dtypes[name]) for name, shape in shapes.items()}
    dtype = next(iter(dtypes.values()), "float32")
    return Model(FAMILY, 0, dtype, (Block(FAMILY, Dim(), {}, tensors),))
