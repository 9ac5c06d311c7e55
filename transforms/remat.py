"""remat: recompute in the backward instead of keeping activations, by torch's activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, overload

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from functional_fsdp import ScheduleError, SpecError, TreeError
from functional_fsdp.extend import skeleton_of, torch_private, traced_as

from ._drive.watch import version
from ._modules.patterns import outermost

__all__ = ["remat"]

M = TypeVar("M", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])


@overload
def remat(what: M, *patterns: str, preserve_rng_state: bool = True) -> M: ...
@overload
def remat(what: F, *, preserve_rng_state: bool = True) -> F: ...
def remat(what: Any, *patterns: str, preserve_rng_state: bool = True) -> Any:
    """Keep only the inputs of a function, or of some of a model's modules; the rest is computed again in the backward.

    Args:
        what: a function, as a stage that goes to `T.vjp`; or a model, as `init` or `functionalize` gave it.
        patterns: of a model, the paths of the modules that recompute (`"blocks.*"`; the outermost that match).
        preserve_rng_state: random numbers come again in the recomputation. False saves time where there are none
            (no dropout), and is what `T.cuda_graph` needs.

    Returns:
        the function, or a copy of the model (a skeleton), that does so. Values and gradients are the same, and so are
        random numbers and buffers: what the forward makes of them is made once. Within a unit the recomputation uses
        the weights that are gathered for its backward anyway. Such a model is for `T.forward_backward` and `T.apply`;
        around `bind`, wrap the function that binds.

    Raises:
        SpecError: a pattern that matches no module. When it runs: ScheduleError for such a model bound by hand, and
            for torch.func around a checkpoint.

    Source: torch.utils.checkpoint, `use_reentrant=False`; the idea is Chen et al. 2016 (arXiv:1604.06174).

    Example:
        >>> out, pullback = T.vjp(T.remat(stage), w, h)  # doctest: +SKIP
        >>> forward_backward = T.forward_backward(T.remat(model, "blocks.*"), loss_fn)  # doctest: +SKIP
    """
    if not isinstance(what, nn.Module):
        if patterns:
            raise SpecError(f"remat: {', '.join(map(repr, patterns))} are paths in a model, and this is a function.")
        return partial(_checkpointed, what, preserve_rng_state)
    model = skeleton_of(what)
    if not patterns:
        raise SpecError("remat(model): name the modules that recompute, as remat(model, 'blocks.*').")
    for _, module in outermost("remat", model, patterns):
        module.__dict__["_remat_stays"] = set()  # buffers, by number, that its forward leaves as they are
        module.__class__ = _recomputed(type(module), preserve_rng_state)
    return model


@traced_as(lambda fn, preserve_rng_state, /, *args, **kwargs: fn(*args, **kwargs))
def _checkpointed(fn: Callable[..., Any], preserve_rng_state: bool, /, *args: Any, **kwargs: Any) -> Any:
    """In a graph `T.vjp` and the compiler say what is kept, and torch has no checkpoints."""
    if torch_private.func_interpreter() is not None:
        raise ScheduleError(
            "remat: torch's checkpoints do not run under torch.func's transforms (grad, vjp, ...). Use T.vjp(T.remat("
            "stage), w, h), or T.forward_backward."
        )
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)


def _bound(cls: type[nn.Module], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run a module, whose weights are gone when it runs again if `bind` lent them for the forward."""
    try:
        return cls.__call__(module, *args, **kwargs)
    except TreeError as error:
        if torch_private.autograd_node() is None:  # it is the forward
            raise
        raise ScheduleError(
            "remat(model, ...) was bound by hand, and its weights are gone when it recomputes. Wrap the function that "
            "binds them, as T.vjp(T.remat(stage), w, h), or use T.forward_backward."
        ) from error


@traced_as(lambda cls, preserve_rng_state, /, *args, **kwargs: _bound(cls, *args, **kwargs))
def _module(cls: type[nn.Module], preserve_rng_state: bool, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    run = Runs(cls, module) if any(part._buffers for part in module.modules()) else partial(_bound, cls, module)
    return _checkpointed(run, preserve_rng_state, *args, **kwargs)


class Runs:
    """One call of a module that recomputes: its forward, and the same again, which leaves the buffers as they are.

    What the forward made of them (running statistics, the vectors of a power iteration) must not be made of them
    twice, and the recomputation must find them as the forward did.
    """

    def __init__(self, cls: type[nn.Module], module: nn.Module) -> None:
        self.cls, self.module = cls, module
        self.places = [(part._buffers, name, part.training) for part in module.modules() for name in part._buffers]
        self.before: list[torch.Tensor | None] | None = None  # the buffers as the forward found them

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = [held.get(name) for held, name, _ in self.places]
        if self.before is None:
            return self._forward(now, args, kwargs)
        for t, old, (held, name, _) in zip(now, self.before, self.places, strict=True):
            held[name] = old.clone() if old is not None and old is not t else old
        try:
            return _bound(self.cls, self.module, *args, **kwargs)
        finally:
            for t, (held, name, _) in zip(now, self.places, strict=True):
                held[name] = t

    def _forward(self, now: list[torch.Tensor | None], args: Any, kwargs: Any) -> Any:
        """Keeps copies of what may change: of all buffers in the module's first call, then of those that did change,
        and of floating ones in training mode, which kernels write without telling."""
        stays: set[int] = self.module.__dict__["_remat_stays"]
        self.before = [
            t if t is None or (i in stays and not (trains and t.is_floating_point())) else t.clone()
            for i, (t, (_, _, trains)) in enumerate(zip(now, self.places, strict=True))
        ]
        versions = [t if t is None else version(t) for t in now]
        first = not stays
        out = _bound(self.cls, self.module, *args, **kwargs)
        for i, (t, before, (held, name, _)) in enumerate(zip(now, versions, self.places, strict=True)):
            if held.get(name) is not t or (t is not None and version(t) != before):
                stays.discard(i)
            elif first:
                stays.add(i)
        return out


_RECOMPUTED: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}


def _recomputed(cls: type[nn.Module], preserve_rng_state: bool) -> type[nn.Module]:
    """The class of a module that recomputes."""
    if (cls, preserve_rng_state) not in _RECOMPUTED:

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _module(cls, preserve_rng_state, self, *args, **kwargs)

        body = {"__call__": __call__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _RECOMPUTED[cls, preserve_rng_state] = type(cls.__name__, (cls,), body)
    return _RECOMPUTED[cls, preserve_rng_state]
