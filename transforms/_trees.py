"""Trees of FlatBuffers that a caller gives: whether they are sharded as the main weights of a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from functional_fsdp import FlatBuffer, State, TreeError

__all__ = ["Buffers", "check_tree", "widest"]

Buffers = Mapping[str, FlatBuffer]  # by bucket


def check_tree(state: State, tree: Any, what: str, names: Iterable[str]) -> None:
    """Raise TreeError unless `tree` has a buffer like that of the main weights for each of these buckets.

    Args:
        what: the function, and what the tree is to it, for errors.
    """
    for name in names:
        want, got = state.main.get(name), tree.get(name) if isinstance(tree, Mapping) else None
        if want is None:
            raise TreeError(f"{what} has the bucket {name!r}; the state has {', '.join(map(repr, state.main))}.")
        if not isinstance(got, FlatBuffer) or got.local.shape != want.local.shape or got.states != want.states:
            text = f"{tuple(got.local.shape)} elements, {got.states}" if isinstance(got, FlatBuffer) else f"{got!r}"
            raise TreeError(
                f"{what} has {text} for the bucket {name!r}; expected {tuple(want.local.shape)} elements, "
                f"{want.states}. Give whole gradients, fsdp.finish_reductions(state).grads, or the `main` of "
                "a state of the same layout."
            )


def widest(*trees: Buffers) -> torch.dtype:
    """The dtype to compute with: float32, or wider if one of their buffers is."""
    dtype = torch.float32
    for tree in trees:
        for buffer in tree.values():
            dtype = torch.promote_types(dtype, buffer.local.dtype)
    return dtype
