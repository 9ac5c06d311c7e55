"""What `step` asks of an optimizer, eagerly and traced: the update itself, and whether its result fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree

from ._errors import ScheduleError, TreeError
from ._flat import FlatBuffer

if TYPE_CHECKING:
    from ._state import State

__all__ = ["check", "may_step", "put", "update"]


def may_step(state: State, skip: torch.Tensor | None) -> None:
    """Refuse a step that cannot be taken."""
    if skip is not None and (skip.dtype is not torch.bool or skip.dim()):
        raise TreeError(f"step: skip has shape {tuple(skip.shape)} and dtype {skip.dtype}; expected [] and torch.bool.")
    if state.optimizer is None:
        raise ScheduleError(
            "step: this state has no optimizer. Give one to shard(params, spec, optimizer), as fsdp.adamw(lr=3e-4)."
        )


def update(state: State, reduced: Any, main: Any, skip: torch.Tensor | None) -> tuple[Any, Any]:
    """The optimizer's update of these main weights; with `skip`, of which only what the tensor says is there after."""
    optimizer, opt = state.optimizer, state.opt
    grads = {name: _cast(reduced[name], buffer.local.dtype) for name, buffer in main.items()}
    if skip is None:
        return optimizer.update(grads, opt, main, state.count)
    if hasattr(optimizer, "update_unless"):
        return optimizer.update_unless(skip, grads, opt, main, state.count)
    before = pytree.tree_map_only(torch.Tensor, torch.clone, (main, opt))
    after = optimizer.update(grads, opt, main, state.count)

    def choose(old: Any, new: Any) -> Any:
        return torch.where(skip, old, new) if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor) else new

    return pytree.tree_map(choose, before, after)


def _cast(buffer: FlatBuffer, dtype: torch.dtype) -> FlatBuffer:
    return buffer if buffer.local.dtype is dtype else buffer.but(buffer.local.to(dtype))


def put(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], owned: Iterable[torch.Tensor]) -> None:
    """Copy the second tensor of each pair into the first, which is one of `owned`, and so may the second be (a history
    that moves along): then it is read before any is written."""
    storages = {tensor.untyped_storage()._cdata for tensor in owned} if pairs else ()
    read = [new.clone() if new.untyped_storage()._cdata in storages else new for _, new in pairs]
    for (old, _), new in zip(pairs, read, strict=True):
        old.copy_(new)


def check(old: Any, new: Any, what: str) -> None:
    """Refuse an optimizer's result that does not fit, before anything is written."""
    old_leaves, old_def = pytree.tree_flatten(old)
    new_leaves, new_def = pytree.tree_flatten(new)
    if old_def != new_def:
        raise TreeError(
            f"step: the optimizer's update returned another structure for {what}: {new_def}; expected {old_def}."
        )
    for a, b in zip(old_leaves, new_leaves, strict=True):
        if isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            raise TreeError(f"step: the optimizer's update returned a {type(b).__name__} in {what}; expected a tensor.")
        if isinstance(a, torch.Tensor) and (a.shape != b.shape or a.dtype != b.dtype):
            raise TreeError(
                f"step: the optimizer's update returned {what} of shape {tuple(b.shape)} and dtype {b.dtype}; "
                f"expected {tuple(a.shape)} and {a.dtype}."
            )
