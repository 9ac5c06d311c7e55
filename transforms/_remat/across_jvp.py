"""A region or a part inside of jvp: outside of the level it is a function of values and of tangents.

inside      x, ẋ  ─▶  fn  ─▶  y, ẏ                    dual numbers of the level
outside     (x, ẋ) ─▶ jvp(fn) in a level of its own ─▶ (y, ẏ)        kept, moved or computed again as any other
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functional_fsdp import ScheduleError
from functional_fsdp._seams import torch_private

from .._modules.containers import Remake, contents_by_id, on_copies, written
from .._modules.unit_modules import map_tensors

__all__ = ["across_jvp", "in_one_jvp", "keeps_nothing"]

forward_ad = torch_private.forward_ad


def keeps_nothing() -> bool:
    """Whether no graph is made of what is computed: neither here nor in a level of torch.func's."""
    return not torch.is_grad_enabled() and torch_private.saved_hooks_allowed()


def in_one_jvp() -> bool:
    """Whether one jvp is the only transform that is under way."""
    levels = torch_private.func_levels()
    return len(levels) == 1 and levels[0].key() == torch_private.JVP


class Structure:
    """What a function returned, without the tensors that move: in their places are empty ones. Nobody looks into it."""

    def __init__(self, out: Any, moving: dict[int, torch.Tensor]) -> None:
        places = {t: torch.empty(0, device="meta") for t in moving}
        self.out = map_tensors(lambda t: places.get(id(t), t), out)
        self.number = {id(place): i for i, place in enumerate(places.values())}


def across_jvp(run: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any, what: str) -> Any:
    """`fn(*args, **kwargs)` inside of a jvp, by `run(fn, *tensors)` outside of it: fn as one of tensors, values first,
    and then tangents.

    Raises:
        ScheduleError: `what` was called inside of more than one transform, or of another than jvp; fn writes to a
            container that it is given.
    """
    levels = torch_private.func_levels()
    if not in_one_jvp():
        names = ", ".join(str(level.key()).rpartition(".")[2].lower() for level in levels)
        raise ScheduleError(
            f"{what} inside of torch.func's transforms ({names}), other than one jvp: gradients of torch.func's forbid "
            f"saved-tensor hooks, by which it works (torch {torch.__version__}). Take gradients by "
            "T.vjp(T.remat(stage), w, h) or T.forward_backward. Where a loss takes derivatives by torch.func, give it "
            "a model that does not recompute."
        )
    before = contents_by_id(args, kwargs)
    level = levels[0].level()
    values: list[torch.Tensor] = []  # of what is dual
    tangents: list[torch.Tensor] = []
    others: dict[int, torch.Tensor] = {}
    number: dict[int, int] = {}

    def take_apart(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in number and id(t) not in others:
            value, tangent = forward_ad.unpack_dual(t) if t.is_floating_point() or t.is_complex() else (t, None)
            value = torch_private.unwrap_for_grad(value, level)
            if tangent is None:
                others[id(t)] = value
            else:
                number[id(t)] = len(values)
                values.append(value)
                tangents.append(torch_private.unwrap_for_grad(tangent, level))
        return t

    map_tensors(take_apart, (args, kwargs))

    def outside(*given: torch.Tensor) -> Any:
        structure: Any = None

        def inside(*duals: torch.Tensor) -> Any:
            def put(item: Any) -> Any:
                return duals[number[id(item)]] if id(item) in number else others.get(id(item), item)

            made = Remake(put, before)
            given = made(args), made(kwargs)
            found = contents_by_id(*given)
            out = fn(*given[0], **given[1])
            for key in written(found):
                raise ScheduleError(
                    f"{what.partition(':')[0]}: a module in a jvp writes to a {type(found[key][0]).__name__} that it "
                    "was given, and what it writes is of a level that ends with it. Have it return what it writes."
                )
            moving: dict[int, torch.Tensor] = {}

            def look(t: torch.Tensor) -> torch.Tensor:
                if t.is_floating_point() or t.is_complex():
                    moving[id(t)] = t
                return t

            map_tensors(look, out)
            nonlocal structure
            structure = Structure(out, moving)
            return (*moving.values(),)

        n = len(values)
        out, along = torch.func.jvp(inside, given[:n], given[n:])  # type: ignore[misc]
        return structure, *out, *along

    if not values:  # nothing in it moves
        with torch_private.without_func_levels():
            return on_copies(lambda args, kwargs: run(fn, *args, **kwargs), lambda t: others[id(t)], args, kwargs)
    with torch_private.without_func_levels():
        structure, *results = run(outside, *values, *tangents)
    n = len(results) // 2
    duals = [forward_ad.make_dual(*pair) for pair in zip(results[:n], results[n:], strict=True)]

    def put_back(t: torch.Tensor) -> torch.Tensor:
        i = structure.number.get(id(t))
        if i is not None:
            return duals[i]
        while torch_private.is_wrapped(t):  # of the level that is over
            t = torch_private.unwrapped(t)
        return t

    return map_tensors(put_back, structure.out)
