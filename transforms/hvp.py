"""hvp: the Hessian of the loss times a vector, one unit at a time, forward over reverse: a jvp of a pullback.

    any module    one jvp around one pullback, through all units: driven, as `T.jvp` is; residuals stay in between
    stages        forward      h, ḣ    through each, by jvp              its input and that input's tangent are kept
                  backward     c, ċ    through each, by jvp of its vjp   a unit gives dw, and its tangent: H·v

It is no pullback of `T.jvp`: gradients of a jvp are wrong, without an error, through torch 2.13's layer_norm.
A vector is what gradients are: `{bucket: FlatBuffer}`, flat shards, of which a unit's are gathered beside its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from functional_fsdp import FlatBuffer, State, reduce
from functional_fsdp._seams import torch_private
from functional_fsdp.extend import Session, alone, gather_leaves, separate_gradients

from ._drive.driver import eager_only
from ._drive.forward_backward import Forward
from ._drive.jvp import Primals, moved
from ._drive.stages import Stage, Stages, Weights, check_given, check_loss
from ._drive.unit_uses import values
from .norms import Buffers, check_tree

vjp_of: Any = torch.func.vjp
jvp_of: Any = torch.func.jvp


def hvp(
    model: nn.Module | Mapping[Any, Callable[..., Any]], loss_fn: Callable[..., torch.Tensor] | None = None
) -> Callable[[State, Buffers, Any], tuple[State, tuple[torch.Tensor, dict[str, FlatBuffer]]]]:
    """A function that multiplies the Hessian of the loss, averaged over the data ranks, with a vector.

    Args:
        model: any module, as for `forward_backward`: copied, never touched; its modes are followed. Or stages cut by
            hand: `{unit: fn(weights, h, batch)}` in order of use, pure. The first gets None for `h`, the others what
            the one before returned, floating tensors; the last returns the loss, a tensor []. A key that is a tuple of
            units is a stage that uses them at once: its weights are `{unit: weights}`. Every unit that trains has a
            stage; a tied one has several.
        loss_fn: with a module, `loss_fn(model, batch)`, as for `forward_backward`; it returns the loss, a tensor [].

    Returns:
        `f(state, v, batch) -> state, (loss, Hv)`. `v` and `Hv` are `{bucket: FlatBuffer}`, sharded as main weights: as
        `state.grads` are when they are whole, or the `main` of a state of the same layout; what is frozen is left out.
        The state is as good afterwards as before, with the gradients that it had.

    Buffers are the state's, and what a forward makes of them is dropped; dropout draws the same for every vector.
    Every operation needs a forward-mode derivative (for attention: the math backend).

    What a module's units compute is kept from the forward to the backward, with its tangents; modules that recompute
    (`remat`) are refused, and a model of `T.budget` is taken as it is without one. Stages keep their inputs and these
    inputs' tangents alone; functions run three times.

    Raises:
        TreeError: stages of the wrong kind; a vector that lacks a bucket, or is sharded otherwise; a loss that is no
        scalar. ScheduleError: a unit without a stage, or the other way round; in a graph; a gradient that comes to the
        inside of a unit by a tensor that its module does not return.

    Collective: as `unshard` for each use of a unit, forward and backward, and an all-gather for each bucket of `v`,
    which compute waits for; as `reduce` for each unit.

    Source: Pearlmutter 1994.

    Example:
        >>> product = T.hvp(model, loss_fn)
        >>> state, (loss, hv) = product(state, state.main, batch)  # along the weights
    """
    check_given("hvp", model, loss_fn)
    if isinstance(model, nn.Module):
        products = _driven(Forward("hvp", model), loss_fn)
    else:
        products = partial(_products, Stages("hvp", model))

    @torch.no_grad()
    def f(state: State, v: Buffers, batch: Any) -> tuple[State, tuple[torch.Tensor, dict[str, FlatBuffer]]]:
        check_tree(state, v, "hvp: the vector", state.layout.trainable)
        session = Session(state, "hvp")
        state, loss, found = separate_gradients(state, "hvp", lambda state: products(state, v, batch))
        return session.rest(state), (loss, found)

    return alone(f, "hvp", traced=eager_only("hvp"))


def _driven(driven: Forward, loss_fn: Any) -> Callable[[State, Buffers, Any], tuple[State, torch.Tensor]]:
    """Of any module: the jvp of its pullback. The products are the new state's gradients."""

    def products(state: State, v: Buffers, batch: Any) -> tuple[State, torch.Tensor]:
        with driven.running(state) as driver:
            driver.deliver(reduce, None)

            def gradient(model: nn.Module, batch: Any) -> torch.Tensor:
                def inside(anchor: torch.Tensor) -> Any:
                    driven.lend(state)
                    with driver.levels.lifting(Primals(driver, anchor), driver.weights):
                        return values(loss_fn(model, batch))

                loss, back = vjp_of(inside, torch.zeros((), device=driver.device))
                check_loss("hvp", "loss_fn", loss)
                back(torch.ones_like(loss))
                return loss

            loss, _ = moved(gradient)(driver.model, v, batch)
            driver.finish()
            return driver.state, loss

    return products


def _products(walk: Stages, state: State, v: Buffers, batch: Any) -> tuple[State, torch.Tensor]:
    """The walk, forward and backward. The products are the new state's gradients."""
    walk.fit(state)
    h: Any = ()  # a tuple of what a stage is given: nothing in the first
    dot: Any = ()
    inputs: list[tuple[Any, Any]] = []
    for stage in walk.forward:
        state, w = stage.gather(state)
        inputs.append((h, dot))
        trained = walk.trained(state, w)
        if h or any(trained.values()):
            out, along = jvp_of(_of(stage, w, batch), (trained, *h), (_tangents(state, v, stage), *dot))
        else:  # frozen, as all before it: nothing moves
            out = stage.run(w, trained, None, batch)
            along = torch_private.pytree.tree_map(torch.zeros_like, out)
        h, dot = (out,), (along,)
        state = stage.release(state)
    loss = h[0]
    check_loss("hvp", f"the last stage, {walk.forward[-1].key!r},", loss)
    c: Any = torch.ones_like(loss)
    dot_c: Any = torch.zeros_like(loss)
    product: Weights
    tied: Weights = {}
    for stage in walk.backward:
        state, w = stage.gather(state)
        h, dot = inputs.pop()
        trained, product = walk.trained(state, w), {}
        if h or any(trained.values()):
            at, along = (c, trained, *h), (dot_c, _tangents(state, v, stage), *dot)
            (_, *back), (product, *dot_back) = jvp_of(_pullback(_of(stage, w, batch)), at, along)
            if back:
                (c,), (dot_c,) = back, dot_back
        for unit, some in product.items():
            before = tied.pop(unit, {})
            total = {key: before[key] + t if key in before else t for key, t in some.items()}
            if unit not in stage.opens:
                tied[unit] = total
            elif total:
                state = reduce(state, {key: total.get(key) for key in w[unit]}, unit)
        state = stage.release(state)
    return state, loss


def _of(stage: Stage, w: Weights, batch: Any) -> Callable[..., Any]:
    """A stage as a function of what trains and of its input."""
    return lambda trained, h=None: stage.run(w, trained, h, batch)


def _pullback(fn: Callable[..., Any]) -> Callable[..., Any]:
    """As a function of everything: the cotangent, and where it is taken."""
    return lambda c, *at: vjp_of(fn, *at)[1](c)


def _tangents(state: State, v: Buffers, stage: Stage) -> Weights:
    """The vector's part for the weights of a stage that train, gathered."""
    found: Weights = {}
    for name in stage.units:
        unit = state.layout.by_name[name]
        views: dict[str, torch.Tensor] = {}
        for bucket in unit.buckets:
            if bucket.trainable:
                views |= gather_leaves(v[bucket.name], bucket.compute)
        found[name] = {key: views[path] for key, path in zip(unit.keys, unit.paths, strict=True) if path in views}
    return found
