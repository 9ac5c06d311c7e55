"""`step` as torch.compile sees it: the optimizer's update in plain operations, written into the state's own buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ._errors import TreeError
from ._functional import through
from ._given import Lacking
from ._ledger import GRAPHED, Token
from ._torch import pytree
from ._trace import base_of, given_in, recipes_of
from ._traced import finish
from ._tracing import refuse
from ._update import check, counting, keep, may_step, put_back, update

if TYPE_CHECKING:
    from ._state import State

__all__ = ["step"]


def step(state: State, *, skip: torch.Tensor | bool | None = None) -> State:
    recipes = recipes_of(state, "step")
    skip = may_step(state, skip)
    base, noted = base_of(state), given_in(state)
    state = finish(state)
    (kind, said), given, anywhere = recipes.lacking(tuple([noted.get(unit, 0) for unit in recipes.trained if noted]))
    if said:
        refuse(kind, said, torch.compiler.is_dynamo_compiling())
    lacking = Lacking(dict(given), anywhere)
    main, opt = {name: state.main[name] for name in state.layout.trainable}, counting(state, lacking)
    state = state._evolve(opt=opt)
    before = keep(state, lacking.given)
    new_main, new_opt = update(state, state.grads, main, skip, lacking.given)
    check(main, new_main, "main")
    check(opt, new_opt, "opt")
    _write((main, opt), (new_main, new_opt))
    put_back(before)
    for unit in recipes.units.values():
        for one in unit.buckets:
            if one.copied and one.bucket.trainable:
                local = state.main[one.bucket.name].local.to(one.bucket.compute)
                state.weights[one.bucket.name].local.copy_(through(recipes, one.records.step, local))
    state.count.add_(1 if skip is None else ~skip)
    ledger = base.ledger
    if skip is not None and ledger.offset is not None:
        ledger.offset.add_(skip)
    base.spent, ledger.epoch = True, GRAPHED  # see `_ledger`: nothing is read that changes from step to step
    return state._evolve(grads=(), token=Token(ledger))


def _write(old: Any, new: Any) -> None:
    """Put the optimizer's results into the state's own buffers, where they are not there already."""
    have, values = pytree.tree_leaves(old), pytree.tree_leaves(new)
    found = []
    for buffer, value in zip(have, values, strict=True):
        if not isinstance(buffer, torch.Tensor):
            raise TreeError(
                f"step: the optimizer's state has a {type(buffer).__name__}; in a compiled step all of it must be "
                "tensors. Make it one: torch.tensor(...)."
            )
        moved = value is not buffer and any(value is other for other in have)  # one buffer's values in another's place
        found.append(value.clone() if moved else value)
    for buffer, value in zip(have, found, strict=True):
        if buffer is not value:
            buffer.copy_(value)
