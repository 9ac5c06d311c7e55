"""What a call is given: where it computes, which storages it has, what must stay as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from functional_fsdp import FsdpError, ScheduleError
from functional_fsdp.extend import computes_on

from .._drive.buffers import version
from .._modules.containers import Remake, contents_by_id, written
from .._modules.unit_modules import each_leaf
from .moves import storage_of

__all__ = ["GivenInputs", "code_of", "storages_in"]


class GivenInputs:
    """The inputs of a call that recomputes.

    torch's checkpoint looks after tensors that are arguments by position. What lies deeper, or has a keyword, is
    looked after here: the recomputation is given the same object.

    Attributes:
        device: where the call computes.
        storages: on which tensors among them lie.
        containers: lists, mappings and dataclasses among them, and what they had.
        writes: the ids of those that the forward has written to, as the recomputation will.
        caches: objects that keep keys and values of attention (Hugging Face's `Cache`).
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        deeper = [x for x in args if not isinstance(x, torch.Tensor)]
        leaves = [*each_leaf((deeper, kwargs))]
        self.later = [(t, version(t)) for t in leaves if isinstance(t, torch.Tensor)]
        tensors = [x for x in args if isinstance(x, torch.Tensor)] + [t for t, _ in self.later]
        self.device = computes_on(tensors)
        self.storages = {*map(storage_of, tensors)}
        self.containers = contents_by_id(*deeper, *kwargs.values())
        self.writes: set[int] = set()
        self.caches = [x for x in leaves if hasattr(x, "get_seq_length")]

    def end(self) -> None:
        """The forward is over."""
        self.writes = written(self.containers)

    def refuse_caches(self, error: RuntimeError) -> None:
        """Raise what an error of the recomputation means if the forward has put keys and values into a cache.

        Raises:
            ScheduleError: it has.
        """
        for cache in self.caches:
            if not isinstance(error, FsdpError) and cache.get_seq_length():
                raise ScheduleError(
                    f"remat: the forward put its keys and values into the {type(cache).__name__} that it was given, "
                    "and what is computed again finds them there. Training needs no such cache: call the model with "
                    "use_cache=False, or set use_cache = False in its config (of T5 in its decoder's, too)."
                ) from error

    def again(self) -> Remake:
        """Makes of arguments what the recomputation is given: these, as the forward found them.

        Raises:
            ScheduleError: one was changed in place.
        """
        for t, before in self.later:
            if version(t) != before:
                raise ScheduleError(
                    f"remat: an input of shape {tuple(t.shape)} was changed in place since the forward, and what is "
                    "computed again from it would be something else. Change a copy: .clone()."
                )
        return Remake(before=self.containers, anew=self.writes)


def storages_in(tree: Any, which: Callable[[torch.Tensor], bool] = lambda t: True) -> set[int]:
    """The storages of tensors in this."""
    return {storage_of(t) for t in each_leaf(tree) if isinstance(t, torch.Tensor) and which(t)}


def code_of(fn: Any) -> Any:
    """What stays the same of a function that is made anew for each call: a lambda, a `partial`, a method."""
    while True:
        inner = getattr(fn, "__wrapped__", None) or (fn.func if isinstance(fn, partial) else None)
        if inner is None:
            break
        fn = inner
    fn = getattr(fn, "__func__", fn)
    return getattr(fn, "__code__", fn)
