"""Modules that have the weights of a state, for what wants an nn.Module.

as_module: a state, or weights, as a module of the model's own class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn as nn

from ._common.errors import TreeError
from ._common.torch_names import func_interpreter, pytree
from ._common.tree import flatten
from ._export import full_params
from ._nn.module import Bound, forms_among, validate
from ._nn.skeleton import aliases_among, aliases_of, every_buffer, needs_module, skeleton_of, tied
from ._state.state import State

M = TypeVar("M", bound=nn.Module)


def as_module(model: M, weights: State | Mapping[str, torch.Tensor]) -> M:
    """A module of the model's own class, with these weights for its parameters, for what wants an nn.Module.

    `bind(model, weights)` is a function: it lends weights to the model for one call. This is a module that has them,
    for torch.export, torch.func.functional_call, libraries of curvature, `isinstance`, to merge adapters, and for what
    runs a part of the model again in a backward. It has a copy of the model's structure and buffers: make it once, not
    in each step.

    Args:
        model: a skeleton, or any module (its own weights are not used).
        weights: a State: the module gets whole parameters in `Precision.main` and the state's buffers, tensors of its
            own. Or `{path: tensor}`, as for `bind`: its parameters have the same bytes, so they are good as long as
            these weights are, and must not be changed.

    Returns:
        the module. Weights that require gradients, or that a torch.func transform follows, are its parameters
        themselves, so gradients go to them. Others become leaves, which require gradients where they train in the
        state, or in the model. What is tied is one parameter.

    Raises:
        TreeError: weights that do not fit, see `bind`; a State with two leaves where the model has one weight.

    Collective: of a State as `full_params`, every rank must call it; else none.

    Example: `torch.export.export(fsdp.as_module(model, state).eval(), (x,))`.
    """
    model = model._module if isinstance(model, Bound) else model
    needs_module("as_module(model, weights)", model)
    if not isinstance(weights, State | Mapping):
        raise TreeError(f"as_module: weights is a {type(weights).__name__}; expected a State, or {{path: tensor}}.")
    if not isinstance(weights, State):
        return _filled(model, weights)
    found = dict(zip(weights.layout.paths, pytree.tree_leaves(full_params(weights)), strict=True))
    module = _filled(model, found)
    home = dict(zip(weights.layout.paths, weights.layout.source, strict=True))
    untied = [(path, first) for path, first in aliases_of(model).items() if home[path] != home[first]]
    if untied:
        raise TreeError(
            f"as_module: the model has one weight at {untied[0][1]!r} and {untied[0][0]!r}, and in this state these "
            "are two leaves. Make the model without the tie, or shard weights that are tied."
        )
    trained = {path for unit in weights.layout.units for path, on in zip(unit.paths, unit.trains, strict=True) if on}
    for path, source in zip(weights.layout.paths, weights.layout.source, strict=True):
        module.get_parameter(path).requires_grad_(source in trained)
    paths, values, _ = flatten(weights.buffers)
    kept = dict(zip(paths, values, strict=True))
    for path, held, name in every_buffer(module):
        if path in kept:
            held[name] = kept[path].clone()
    return module


def _filled(model: M, weights: Mapping[str, torch.Tensor]) -> M:
    """A copy of a module, of its own class, whose parameters are these weights; see `as_module`."""
    wanted = dict(model.named_parameters(remove_duplicate=False))
    validate(model, weights, wanted, "as_module")
    aliases, forms = aliases_among(wanted.items()), forms_among(wanted)
    weights = tied(weights, aliases) if aliases else weights
    weights = {path: forms[path](weight) if path in forms else weight for path, weight in weights.items()}
    module = skeleton_of(model)
    made: dict[str, Any] = {}
    for path, placeholder in [*module.named_parameters(remove_duplicate=False)]:
        owner, _, name = path.rpartition(".")
        leaf = aliases.get(path, path)
        if leaf not in made:
            made[leaf] = _parameter(weights[path], placeholder.requires_grad)
        module.get_submodule(owner)._parameters[name] = made[leaf]
    return module


def _parameter(weight: torch.Tensor, trains: bool) -> Any:
    """A weight as a module's parameter: itself where gradients go to it, else one that has the same bytes."""
    if isinstance(weight, nn.Parameter) or weight.requires_grad or func_interpreter() is not None:
        return weight
    return nn.Parameter(weight, requires_grad=trains and weight.dtype.is_floating_point)
