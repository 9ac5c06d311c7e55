"""What a call is given, and the parts of it that do not run again.

What a call is given: where it computes, which storages it has, what must stay as it is.

Parts: modules and functions that are not run again where what is around them recomputes, and what runs now.

A part asks which call is the innermost of its thread: a forward notes its output, a recomputation gives it that output
again. Elsewhere only what is to be moved makes a difference.

Kept outputs: what one call of a part has returned, for recomputations of what comes after it.

forward          the part's output goes on, and is noted with its versions
its end          kept as it is, moved, or let go: nothing after it is computed again, or others have changed it
recomputation    the output once more, differentiable as it was; if it is not there, the part is run again
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn

from functional_fsdp import FsdpError, ScheduleError
from functional_fsdp._seams import torch_private
from functional_fsdp.extend import HostBuffers, computes_on

from .._drive.buffers import version
from .._modules import Remake, contents_by_id, each_leaf, map_tensors, written
from .moves import MovedTensor, MoveGroup, copied, storage_of


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


Fate = Literal["save", "offload"]


class Owner:
    """What the calls of one transformed model, or function, have in common."""

    def __init__(self) -> None:
        self.buffers = HostBuffers()


class PartCall:
    """A call of a part: with what, and whose it is."""

    def __init__(
        self, part: KeptPart, fn: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module | None
    ) -> None:
        self.part, self.fn, self.args, self.kwargs, self.module = part, fn, args, kwargs, module

    @property
    def who(self) -> Any:
        """The same in each recomputation: the module, or the function's code."""
        return self.module if self.module is not None else code_of(self.fn)

    def __call__(self) -> Any:
        return self.fn(*self.args, **self.kwargs)


class Running(Protocol):
    """A forward or a recomputation that is under way.

    Attributes:
        products: `run(fn, args, kwargs)` calls a module whose products are kept.
    """

    products: Any

    def called(self, call: PartCall) -> Any:
        """What a part returns that is called in it."""


class RunningStack(threading.local):
    """What runs on this thread, the innermost last; None within a part."""

    def __init__(self) -> None:
        self.calls: list[Running | None] = []


RUNNING = RunningStack()


@contextmanager
def running(call: Running | None) -> Iterator[None]:
    """Within, this is the innermost call."""
    RUNNING.calls.append(call)
    try:
        yield
    finally:
        RUNNING.calls.pop()


class KeptPart:
    """A module or a function that is not run again in a call that recomputes: what becomes of what it keeps."""

    def __init__(self, fate: Fate, owner: Owner) -> None:
        self.fate, self.owner = fate, owner
        self.copies = False  # others change its output in place, so a copy of it is kept

    def __call__(self, fn: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module | None = None) -> Any:
        """`fn(*args, **kwargs)`.

        Args:
            module: whose call it is.
        """
        call = RUNNING.calls[-1] if RUNNING.calls else None
        if call is not None and torch_private.func_interpreter() is None:  # whose tensors are not for keeping
            return call.called(PartCall(self, fn, args, kwargs, module))
        if self.fate == "save" or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        stays = storages_in((args, kwargs), lambda t: not t.requires_grad)
        moves = MoveGroup(self.owner.buffers, computes_on(each_leaf((args, kwargs))), stays)
        with moves.moving(module):
            out = fn(*args, **kwargs)
        moves.end()
        return out


_OF_FUNCTIONS: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def of_function(fn: Any, name: str, make: Callable[[], Any]) -> Any:
    """What belongs to a function, and to all that have its code: stages are often wrapped in each call anew."""
    try:
        found = _OF_FUNCTIONS.setdefault(code_of(fn), {})
    except TypeError:  # there are no weak references to it
        return make()
    if name not in found:
        found[name] = make()
    return found[name]


def part_of(fn: Any, fate: Fate) -> KeptPart:
    """The part that a function is."""
    return of_function(fn, fate, lambda: KeptPart(fate, Owner()))


LOST: Any = object()  # in the place of an output that is not there as it was


class Again(torch.autograd.Function):
    """Outputs of a part in a recomputation: they hang on its inputs, as in the forward, though no gradient comes
    through: the part's backward is in the forward's graph."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([out.detach() for out in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        raise ScheduleError(
            "remat: a gradient is taken inside of what is computed again, through a part that is saved or moved, and "
            "would have to be computed again too. Leave that part out of save= and offload= (T.saved, T.offload)."
        )


def differentiable(out: Any, trains: list[bool], call: PartCall) -> Any:
    """An output whose tensors have gradients where they had them, and hang on what the part was given."""
    which = iter(trains)
    outs = [t for t in each_leaf(out) if isinstance(t, torch.Tensor) and next(which)]
    if not outs:
        return out
    given = [t for t in each_leaf((call.args, call.kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    token = torch.zeros((), device="cpu", requires_grad=True)
    through: Iterator[torch.Tensor] = iter(Again.apply(token, len(outs), *outs, *given))
    which = iter(trains)
    return map_tensors(lambda t: next(through) if next(which) else t, out)


class KeptOutput:
    """The output of one call of a part.

    Args:
        out: as it came; until the forward's end it is held as it is.
        copies: whether to keep a copy, since others change it in place.
    """

    def __init__(self, out: Any, copies: bool = False) -> None:
        made: dict[int, torch.Tensor] = {}
        self.trains: list[bool] = []  # which of its tensors have gradients
        self.live: list[torch.Tensor] = []  # its tensors, in the forward
        for t in each_leaf(out):
            if isinstance(t, torch.Tensor):
                self.trains.append(t.requires_grad)
                self.live.append(copied(t, made) if copies else t)
        self.versions = [*map(version, self.live)]
        self.kept: list[torch.Tensor | MovedTensor] = []
        self.form = map_tensors(lambda t: torch.empty(0, device="cpu"), out)  # others may change its containers
        self.lost = False

    def changed(self) -> bool:
        """Whether others have changed it since it came."""
        return [*map(version, self.live)] != self.versions

    def keep(self, moves: MoveGroup | None) -> None:
        """At the end of the forward: keep it, or move it."""
        self.kept = [(moves and moves.take(t)) or t.detach() for t in self.live]
        self.live = []

    def let_go(self) -> None:
        """It will not be needed, or is of no use."""
        self.form, self.live, self.kept, self.lost = None, [], [], True

    def again(self, call: PartCall) -> Any:
        """The output once more, for this call; LOST if it is not there as it was."""
        values = [] if self.lost else self._values()
        if values is None or self.lost:
            return LOST
        left = iter(values)
        return differentiable(map_tensors(lambda t: next(left), self.form), self.trains, call)

    def _values(self) -> list[torch.Tensor] | None:
        values = []
        for one, before in zip(self.kept or self.live, self.versions, strict=True):
            t = one.value() if isinstance(one, MovedTensor) else one if version(one) == before else None
            if t is None:
                return None
            values.append(t.detach())
        return values
