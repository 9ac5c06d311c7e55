"""Regions: one call of something that recomputes, and the calls in it that are not run again.

    forward     [x] norm ─▶ attn ─▶ + ─▶ norm ─▶ mlp ─▶ +          torch's checkpoint keeps x
                            └── a part: autograd keeps for it what it always does, and the region its output
    backward    [x] norm ─▶ its output ─▶ + ─▶ norm                as far as something is needed

The nodes of autograd's graph are those of the forward, so a part's own backward is in it already. That its output was
kept lets what comes after it be computed again. Where nothing that comes after it keeps a tensor, the output is let go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn as nn

from functional_fsdp import ScheduleError
from functional_fsdp.extend import HostBuffers, torch_private

from .._modules.outputs import map_tensors
from .._seed import DrawPosition
from .moves import Moved, MoveGroup, storage_of

__all__ = ["Fate", "KeptPart", "Owner", "Region", "storages_in"]

Fate = Literal["save", "offload"]


class Running(threading.local):
    """The regions that run on this thread, innermost last; None within a part."""

    def __init__(self) -> None:
        self.regions: list[Region | None] = []


RUNNING = Running()


@contextmanager
def running(region: Region | None) -> Iterator[None]:
    RUNNING.regions.append(region)
    try:
        yield
    finally:
        RUNNING.regions.pop()


class Owner:
    """What the calls of one transformed model, or function, have in common."""

    def __init__(self) -> None:
        self.buffers = HostBuffers()


class KeptPart:
    """A module or a function that is not run again in a region: what becomes of what it keeps."""

    def __init__(self, fate: Fate, owner: Owner) -> None:
        self.fate, self.owner = fate, owner
        self.copies = False  # others change its output in place, so a copy of it is kept

    def __call__(self, fn: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module | None = None) -> Any:
        """`fn(*args, **kwargs)`; outside of a region only what is to be moved makes a difference.

        Args:
            module: whose call it is.
        """
        region = RUNNING.regions[-1] if RUNNING.regions else None
        if region is not None:
            return region.repeat(self, fn, args, kwargs) if region.again else region.keep(self, fn, args, kwargs)
        if self.fate == "save" or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        stays = storages_in((args, kwargs), lambda t: not t.requires_grad)
        if module is not None:
            stays.update(map(storage_of, module.buffers()))
        moves = MoveGroup(self.owner.buffers, stays)
        with moves.hooks():
            out = fn(*args, **kwargs)
        moves.end()
        return out


def storages_in(tree: Any, which: Callable[[torch.Tensor], bool] = lambda t: True) -> set[int]:
    """The storages of tensors in this."""
    found: set[int] = set()

    def look(t: torch.Tensor) -> torch.Tensor:
        if which(t):
            found.add(storage_of(t))
        return t

    map_tensors(look, tree)
    return found


class Again(torch.autograd.Function):
    """Outputs of a part in a recomputation: they have a gradient, as in the forward, though nothing comes of it."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, *outs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([out.detach() for out in outs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return (None,) * (1 + len(grads))


class PartCall:
    """One call of a part: its output, as it came and then as it is kept, and where random numbers go on after it."""

    def __init__(self, part: KeptPart, out: Any, packed: int, after: DrawPosition | None) -> None:
        self.part, self.packed, self.after = part, packed, after
        self.trains: list[bool] = []  # which of its tensors have gradients
        self.versions: list[int] = []
        self.kept: list[Moved | torch.Tensor] = []
        self.lost = False

        def look(t: torch.Tensor) -> torch.Tensor:
            self.trains.append(t.requires_grad)
            t = t.detach().clone() if part.copies else t
            self.versions.append(t._version)
            return t

        self.out = map_tensors(look, out)

    def keep(self, moves: MoveGroup | None) -> None:
        """At the end of the forward: keep what there is of it, or move it, unless others have changed it meanwhile."""
        versions = iter(self.versions)

        def keep(t: torch.Tensor) -> torch.Tensor:
            if t._version != next(versions):
                self.lost = self.part.copies = True  # from the next call on
            self.kept.append((moves and not self.lost and moves.take(t)) or t.detach())
            return t.new_empty(0)

        self.out = map_tensors(keep, self.out)
        if self.lost:
            self.let_go()

    def let_go(self) -> None:
        """Nothing that is computed again comes after it."""
        self.out, self.kept, self.lost = None, [], True

    def again(self) -> Any:
        """The output once more; None if it is not there as it was."""
        if self.lost:
            return None
        values = []
        for one, version in zip(self.kept, self.versions, strict=True):
            t = one.value() if isinstance(one, Moved) else one if one._version == version else None
            if t is None:
                self.part.copies = True
                return None
            values.append(t)
        left = iter(values)
        return self.differentiable(map_tensors(lambda t: next(left), self.out))

    def differentiable(self, out: Any) -> Any:
        """An output whose tensors have gradients where they had them."""
        which = iter(self.trains)
        found: list[torch.Tensor] = []

        def look(t: torch.Tensor) -> torch.Tensor:
            if next(which):
                found.append(t)
            return t

        map_tensors(look, out)
        if not found:
            return out
        through = Again.apply(torch.zeros((), device="cpu", requires_grad=True), *found)
        passed = {id(t): new for t, new in zip(found, through, strict=True)}
        return map_tensors(lambda t: passed.get(id(t), t), out)


class Region:
    """One call of `fn`: called once for the forward, and again for each recomputation.

    Args:
        buffers: storages of buffers, which stay.
        draws: whether random numbers come again.
    """

    def __init__(self, fn: Callable[..., Any], owner: Owner, buffers: set[int], draws: bool) -> None:
        self.fn, self.owner, self.draws = fn, owner, draws
        self.buffers = buffers
        self.moves: MoveGroup | None = None  # made when a part asks for it
        self.calls: list[PartCall] = []
        self.again = False
        self.at = 0  # in a recomputation, which call comes next
        self.packed = 0  # how many tensors were saved after the first part, to be computed again
        self.counts = False
        self.hooks: Any = None  # those of torch's checkpoint, in the forward
        self.start: DrawPosition | None = None
        self.now: DrawPosition | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.fn(*args, **kwargs)
        if self.again:
            return self._again(args, kwargs)
        self.hooks = torch_private.top_saved_hooks()
        if self.draws:
            self.device = _device_in((args, kwargs))
            self.start = self.now = DrawPosition(self.device)
        self.inputs: Any = args, kwargs
        with running(self):
            out = self.fn(*args, **kwargs)
        self.inputs = self.hooks = None
        self.again = True
        if self.now is not None:
            self.now.end()
        for call in self.calls:
            if call.packed == self.packed:
                call.let_go()
            else:
                call.keep(self.moves if call.part.fate == "offload" else None)
        if self.moves is not None:
            self.moves.end()
        return out

    def _again(self, args: Any, kwargs: Any) -> Any:
        if self.moves is not None:
            self.moves.arrive()
        self.at = 0
        with running(self), self.start.resumed() if self.start else nullcontext():
            return self.fn(*args, **kwargs)

    def keep(self, part: KeptPart, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A part's call in the forward: what is saved in it is no matter of torch's checkpoint."""
        if self.now is not None:
            self.now.end()
        if part.fate == "offload" and self.moves is None:
            self.moves = MoveGroup(part.owner.buffers, self.buffers | storages_in(self.inputs))
        moves = self.moves if part.fate == "offload" else None
        with running(None), self._outside(), moves.hooks() if moves is not None else nullcontext():
            out = fn(*args, **kwargs)
        if moves is not None:
            moves.send()
        if self.draws:
            self.now = DrawPosition(self.device)
        self.calls.append(PartCall(part, out, self.packed, self.now))
        return out

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Inside, the checkpoint's hooks are not there. After it they count what they are given."""
        top = torch_private.top_saved_hooks()
        if top is None or self.hooks is None or top[0] is not self.hooks[0]:  # others are on top of them
            with torch.autograd.graph.saved_tensors_hooks(_whole, MoveGroup.unpack):
                yield
            self.packed += 1  # nobody knows
            return
        torch_private.pop_saved_hooks()
        if not self.counts:
            pack, self.counts = top[0], True

            def counted(t: torch.Tensor) -> Any:
                self.packed += 1
                return pack(t)

            self.hooks = top = counted, top[1]
        try:
            yield
        finally:
            torch_private.push_saved_hooks(*top)

    def repeat(self, part: KeptPart, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A part's call in a recomputation: its output, or if that is not there, the same again."""
        if self.at == len(self.calls):
            raise ScheduleError(
                f"remat: a part was called for the {self.at + 1}th time when its module was computed again, and in the "
                f"forward there were {self.at} calls. Have the module do the same each time."
            )
        call = self.calls[self.at]
        self.at += 1
        out = call.again()
        if out is None:
            with torch.no_grad(), running(None):
                out = fn(*args, **kwargs)
            out = call.differentiable(out)
        if call.after is not None:
            call.after.go()
        return out


def _whole(t: torch.Tensor) -> Any:
    return t.detach(), t._version


def _device_in(tree: Any) -> torch.device:
    """Where the first tensor in this is."""
    found: list[torch.device] = []

    def look(t: torch.Tensor) -> torch.Tensor:
        found.append(t.device)
        return t

    map_tensors(look, tree)
    return next((device for device in found if device.type != "meta"), torch.device("cpu"))
