"""`step` as torch.compile sees it: the optimizer's update in plain operations, written into the state's own buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree

from ._errors import ScheduleError, TreeError
from ._functional import run
from ._traced import base_of, finish, recipes_of

if TYPE_CHECKING:
    from ._state import State

__all__ = ["step"]


def step(state: State, *, skip: torch.Tensor | None = None) -> State:
    recipes = recipes_of(state, "step")
    if state.optimizer is None:
        raise ScheduleError(
            "step: this state has no optimizer. Give one to shard(params, spec, optimizer), as fsdp.adamw(lr=3e-4)."
        )
    base = base_of(state)
    state = finish(state)
    main, grads = {}, {}
    for name in state.layout.trainable:
        buffer = state.grads[name]
        main[name] = state.main[name]
        grads[name] = buffer.but(buffer.local.to(main[name].local.dtype))
    optimizer, opt = state.optimizer, state.opt
    if skip is None:
        new_main, new_opt = optimizer.update(grads, opt, main, state.count)
    elif hasattr(optimizer, "update_unless"):
        new_main, new_opt = optimizer.update_unless(skip, grads, opt, main, state.count)
    else:
        before = pytree.tree_map_only(torch.Tensor, torch.clone, (main, opt))
        after = optimizer.update(grads, opt, main, state.count)
        new_main, new_opt = pytree.tree_map(lambda a, b: torch.where(skip, a, b), before, after)
    _write((main, opt), (new_main, new_opt))
    for unit in recipes.units.values():
        for one in unit.buckets:
            if one.copied and one.bucket.trainable:
                local = state.main[one.bucket.name].local.to(one.bucket.compute)
                for exchange in one.refresh:
                    local = run(exchange, local)
                state.weights[one.bucket.name].local.copy_(local)
    state.count.add_(1 if skip is None else ~skip)
    return state.evolve(grads=(), token=base)


def _write(old: Any, new: Any) -> None:
    """Put the optimizer's results into the state's own buffers, where they are not there already."""
    have, before = pytree.tree_flatten(old)
    values, after = pytree.tree_flatten(new)
    if before != after:
        raise TreeError("step: the optimizer returned trees of another structure than it was given.")
    found = []
    for buffer, value in zip(have, values, strict=True):
        if not isinstance(buffer, torch.Tensor) or not isinstance(value, torch.Tensor):
            raise TreeError(
                f"step: the optimizer's state has a {type(buffer).__name__}, and got a {type(value).__name__}; in a "
                "compiled step all of it must be tensors. Make it one: torch.tensor(...)."
            )
        if value.shape != buffer.shape or value.dtype != buffer.dtype:
            raise TreeError(
                f"step: the optimizer returned a tensor of shape {tuple(value.shape)} and dtype {value.dtype}; "
                f"expected {tuple(buffer.shape)} and {buffer.dtype}."
            )
        moved = value is not buffer and any(value is other for other in have)  # one buffer's values in another's place
        found.append(value.clone() if moved else value)
    for buffer, value in zip(have, found, strict=True):
        if buffer is not value:
            buffer.copy_(value)
