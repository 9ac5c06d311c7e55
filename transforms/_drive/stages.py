"""Stages: a model that was cut into pure functions by hand, one for each unit, and the walk over them.

    {"embed": fn, "blocks.0": fn, ..., "head": fn}      fn(weights, h, batch) -> h, in order of use

    forward     h = None ──embed──▶ h ──blocks.0──▶ h ── ... ──head──▶ loss
    backward    the other way round

The first stage gets None for `h`; from stage to stage goes a pytree of floating tensors, and the last returns the loss.
A key that is a tuple of units is a stage that uses them at once, `weights` is then `{unit: weights}`; a tied leaf is a
unit that several stages name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.nn as nn

from functional_fsdp import ScheduleError, SpecError, State, TreeError, release, unshard
from functional_fsdp._seams import torch_private

Key = str | tuple[str, ...]
Weights = dict[str, dict[str, torch.Tensor]]  # by unit and key


def check_given(verb: str, model: Any, loss_fn: Any) -> None:
    """Raise TreeError unless these are a module and its loss function, or stages without one."""
    if isinstance(model, nn.Module) and not callable(loss_fn):
        raise TreeError(
            f"{verb}(model, loss_fn): loss_fn is {loss_fn!r}; with a module expected a function of (model, batch) "
            "that returns the loss, as for forward_backward."
        )
    if not isinstance(model, nn.Module) and loss_fn is not None:
        raise TreeError(
            f"{verb}(stages, loss_fn): expected a module, got a {type(model).__name__}. Of stages that are cut by hand "
            "the last returns the loss: leave loss_fn out."
        )


def check_loss(verb: str, who: str, loss: Any) -> None:
    """Raise TreeError if this is no loss, a tensor []."""
    if not isinstance(loss, torch.Tensor) or loss.dim():
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TreeError(f"{verb}: {who} returned {got}; expected the loss, a tensor []. Reduce it, as with .mean().")


class Stage:
    """One function, and the units whose weights it gets.

    Attributes:
        opens: of its units, those that no earlier stage uses: in the backward their gradients are complete here.
    """

    def __init__(self, key: Key, fn: Callable[..., Any]) -> None:
        self.key = key
        self.fn = fn
        self.units = (key,) if isinstance(key, str) else tuple(key)
        if len(set(self.units)) != len(self.units):
            raise SpecError(f"stages: the key {key!r} names a unit twice; expected each once.")
        self.opens: tuple[str, ...] = ()

    def gather(self, state: State) -> tuple[State, Weights]:
        if isinstance(self.key, str):
            state, w = unshard(state, self.key)
            return state, {self.key: w}
        return unshard(state, self.units)

    def release(self, state: State) -> State:
        return release(state, self.key)

    def given(self, w: Weights) -> Any:
        """Weights as the function gets them."""
        return w[self.key] if isinstance(self.key, str) else w

    def run(self, w: Weights, trained: Weights, h: Any, batch: Any) -> Any:
        """The function of these weights, some of which are replaced: those that are differentiated."""
        return self.fn(self.given({unit: {**w[unit], **trained[unit]} for unit in w}), h, batch)


class Stages:
    """All of them, in order of use. `verb` is whose they are, for errors."""

    def __init__(self, verb: str, stages: Mapping[Any, Callable[..., Any]]) -> None:
        if not isinstance(stages, Mapping) or not stages or not all(map(callable, stages.values())):
            raise TreeError(
                f"{verb}: stages is {stages!r}; expected {{unit: function of (weights, h, batch)}}, at least 1, in "
                "order of use."
            )
        self.verb = verb
        self.forward = [Stage(key, fn) for key, fn in stages.items()]
        seen: set[str] = set()
        for stage in self.forward:
            stage.opens = tuple(unit for unit in stage.units if unit not in seen)
            seen.update(stage.units)
        self.backward = self.forward[::-1]
        self.checked: Hashable = None

    def fit(self, state: State) -> None:
        """A walk goes on from this state.

        Raises:
            ScheduleError: a unit that is not there, or one that trains and that no stage uses.
        """
        layout = state.layout
        if layout is not self.checked:
            used = {unit for stage in self.forward for unit in stage.units}
            trains = [unit.name for unit in layout.units if unit.trained]
            unknown = [unit for unit in used if unit not in layout.by_name]
            missing = [unit for unit in trains if unit not in used]
            if unknown or missing:
                what = f"there is no unit {unknown[0]!r}" if unknown else f"no stage uses the unit {missing[0]!r}"
                raise ScheduleError(
                    f"{self.verb}: {what}. Give a stage for each of the {len(trains)} units that train: "
                    f"{', '.join(map(repr, trains))}."
                )
            self.checked = layout

    def trained(self, state: State, w: Weights) -> Weights:
        """Of weights, those that train."""
        units = state.layout.by_name
        return {
            name: {
                key: some[key]
                for key, shape in zip(units[name].keys, units[name].trains, strict=True)
                if shape is not None
            }
            for name, some in w.items()
        }


def dims(tree: Any) -> Any:
    """`in_dims` of vmap: 0 for each tensor with a dim, None for all else."""
    return torch_private.pytree.tree_map(lambda t: 0 if isinstance(t, torch.Tensor) and t.dim() else None, tree)


def rows(verb: str, *trees: Any) -> int:
    """How many samples there are: the size of dim 0, the same for all tensors that have one.

    Raises:
        TreeError: there is none, or two that differ.
    """
    sizes = [tuple(t.shape) for t in torch_private.pytree.tree_leaves(trees) if isinstance(t, torch.Tensor) and t.dim()]
    if not sizes:
        raise TreeError(f"{verb}: nothing in the batch has a leading dim of samples. Give tensors of shape [B, ...].")
    for shape in sizes:
        if shape[0] != sizes[0][0]:
            raise TreeError(
                f"{verb}: tensors of the batch have shapes {sizes[0]} and {shape}; expected the same number of samples "
                f"in dim 0, got {sizes[0][0]} and {shape[0]}."
            )
    if not sizes[0][0]:
        raise TreeError(f"{verb}: a batch without samples: a tensor of shape {sizes[0]}; expected at least 1 in dim 0.")
    return sizes[0][0]
