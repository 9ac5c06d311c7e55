"""Ties: one leaf at several paths, to the module that uses it and to torch.func.

    params      {"embed.weight": w, "head.weight": w}                        one tensor, two leaves to torch.func
    bind        the module uses the one at the first path, at both places
    gradients   {"embed.weight": the whole gradient, "head.weight": 0}
    inner step  {"embed.weight": w - lr · g, "head.weight": w}               bind takes the first: still one leaf

So weights that a step inside a loss function has changed stay tied, however many steps there are, and `reduce` adds up
what the paths got. What has no module to know its ties, a pytree of one's own, has `tie`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn

from .._common.tree import flatten

__all__ = ["Tie", "aliases_of", "tie", "tied"]


class Tie:
    """What the placeholders of one tied leaf have in common. Copies of a skeleton have ties of their own."""


def aliases_of(module: nn.Module) -> dict[str, str]:
    """{path: the first path of the same leaf} for the further paths of tied parameters."""
    first: dict[Any, str] = {}
    found = {}
    for path, param in module.named_parameters(remove_duplicate=False):
        one = getattr(param, "tie", None) or param
        if one in first:
            found[path] = first[one]
        else:
            first[one] = path
    return found


def tied(weights: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> Mapping[str, torch.Tensor]:
    """The weights of a module with one tensor at all paths of a tied leaf: the first path's."""
    return {
        **weights,
        **{path: weights[first] for path, first in aliases.items() if path in weights and first in weights},
    }


def tie(state: Any, grads: Any) -> Any:
    """The same gradients, with the sum of all paths of a tied leaf at each of them. Pure; within transforms too.

    For steps on weights inside a loss function that takes a pytree of one's own, whose ties torch.func cannot know:
    it gives one gradient for each path. (`bind` keeps the ties of a module's weights by itself.)

    Args:
        state: any state of the parameters.
        grads: a tree as the parameters; None is zero.

    Returns:
        the same structure.

    Example, a step of gradient descent inside a loss:
        >>> inner = torch.func.grad(loss)(params)
        >>> params = tree_map(lambda p, g: p - lr * g, params, fsdp.tie(state, inner))
    """
    paths, leaves, treedef = flatten(grads)
    home = dict(zip(state.layout.paths, state.layout.source, strict=True))
    total: dict[str, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        before = total.get(home.get(path, path))
        total[home.get(path, path)] = leaf if before is None else before if leaf is None else before + leaf
    return treedef.unflatten([total[home.get(path, path)] for path in paths])
