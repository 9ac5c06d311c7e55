"""Signature: which calls are captured alike, and which states can be copied into each other's tensors."""

from __future__ import annotations

from typing import Any

import torch

from functional_fsdp import State, TreeError
from functional_fsdp._verbs.seams import torch_private

from .capturing import KEPT

__all__ = ["Kind", "signature", "structure"]

pytree = torch_private.pytree


class Kind:
    """What a captured step takes for granted of a state: equal by spec, layout, optimizer, and which buffers are each
    rank's own."""

    __slots__ = ("key",)

    def __init__(self, state: State) -> None:
        self.key = (state.spec, state.layout, state.optimizer, state.local_buffers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and all(a is b or a == b for a, b in zip(self.key, other.key, strict=True))

    def __hash__(self) -> int:
        return hash(self.key[1].hash)


def structure(state: State) -> Any:
    """Equal for states whose tensors can be copied into each other's."""
    trees = [getattr(state, name) for name in KEPT]
    return Kind(state), pytree.tree_structure(trees)


def signature(state: State, leaves: list[Any], treedef: Any) -> Any:
    """Equal for calls that are captured alike: shapes and dtypes of tensors, and everything else as it is; and the
    buckets of which the optimizer counts steps by leaf.

    Raises:
        TreeError: a State, or something without a hash (an array, say), which cannot be told from another.
    """
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append((tuple(leaf.shape), leaf.dtype))
        elif isinstance(leaf, State):
            raise TreeError("cuda_graph: a State among the batch; a captured step has one state, its first argument.")
        elif isinstance(leaf, float):
            found.append(leaf.hex())
        else:
            try:
                hash(leaf)
            except TypeError:
                raise TreeError(
                    f"cuda_graph: the batch has a {type(leaf).__name__}, which a captured step would take for the one "
                    "it saw first. Pass it as a tensor."
                ) from None
            found.append((type(leaf), leaf))
    counted = getattr(state.optimizer, "counted", None)  # what it counts steps of may become more
    return treedef, tuple(found), Kind(state), counted and counted(state.opt)
