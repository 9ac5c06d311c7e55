"""Whole: a private copy of a module that has all of its weights at once, so that gradients of gradients are right.

    Driver    one unit at a time   its unit calls gather again in a backward, once: a backward of that one would find
                                   other units' bytes
    Whole     every unit           gathered before the forward, plain leaves of autograd's graph, until the outer
                                   gradient is there

For `forward_backward` it is what a `Driver` is: the same names, the same transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.nn as nn

from functional_fsdp import Layout, ScheduleError, SpecError, State, reduce, unshard
from functional_fsdp._seams import changed, spoilt, torch_private
from functional_fsdp.extend import Session, ranks_of

from .._modules.unit_modules import copy_of, find_unit_modules, refuse_shapes, slots_of
from .buffers import WriteWatch, clear, version
from .driver import Tensors, caller, refuse_nesting
from .placeholders import precisions
from .unit_uses import Gradients


class Whole:
    """A module's copy, and what it is doing: one forward and its gradient at a time.

    Attributes:
        model: the copy, of the user's own class; weights are in it only while something runs.
        state: the state as it is now; None when nothing runs.
        leaves: {path that holds the leaf: weight}, while something runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = copy_of(model)
        for path, part in self.model.named_modules():
            if "_part" in vars(part) and vars(part)["_part"].fate == "offload":
                raise SpecError(
                    f"forward_backward(second_order=True): what {path!r} keeps would be moved to the host's memory "
                    "(T.offload, T.remat(offload=)), and whole weights with it. Leave one of them out."
                )
        self.slots = [(path, held, name, held[name]) for path, held, name in slots_of(self.model)]
        if dtensor := next((path for path, _, _, p in self.slots if getattr(p, "form", None)), None):
            raise SpecError(
                f"forward_backward(second_order=True): the weight {dtensor!r} is a DTensor in the model, of which "
                "torch has no derivatives of derivatives. Cut the model by Spec(own=) and T.collectives instead."
            )
        self.layout: Layout | None = None
        self.watched = False  # whether it ran, and what it does to weights was looked at
        self.state: Any = None
        self.caller: FrameType | None = None  # whose `with` it is that runs
        self.leaves: dict[str, torch.Tensor] = {}
        self.watch: Callable[[str, Any], None] | None = None  # what sees gradients before they are reduced
        self.reduce: Callable[..., State] = reduce

    def deliver(self, reduce: Callable[..., State], watch: Callable[[str, Any], None] | None) -> None:
        """Gradients of the backward that comes go to `reduce`; before that `watch` sees them."""
        self.reduce, self.watch = reduce, watch

    @contextmanager
    def running(self, state: State, verb: str, trains: bool = True) -> Iterator[int]:
        """Within, the model has this state's weights, all of them; `self.state` goes on from it.

        Gives the number of this forward in its step.
        """
        refuse_nesting(self.caller)
        if state.layout is not self.layout:
            find_unit_modules(self.model, state.layout)  # raises if the state is of another model
            if not state.spec.own:
                refuse_shapes(type(self.model).__name__, {path: p for path, *_, p in self.slots}, state.layout)
            if any(inputs for _, inputs in precisions(state).values()):
                raise SpecError(
                    "Precision(inputs=True) with forward_backward(second_order=True): inputs are cast where a module "
                    "is gathered, and here all are gathered at once. Cast the batch in the loss function."
                )
            self.device = ranks_of(state).device
            self.trained = {
                path for unit in state.layout.units
                for path, shape in zip(unit.paths, unit.trains, strict=True) if shape is not None
            }  # fmt: skip
            self.layout = state.layout
        session = Session(state, verb)
        state, params = unshard(state)
        if trains:
            session.count()
        weights = dict(zip(state.layout.source, torch_private.pytree.tree_leaves(params), strict=True))
        del params
        try:
            self.caller, self.state = caller(), state
            self.leaves = {path: t.detach().requires_grad_(path in self.trained) for path, t in weights.items()}
            home = dict(zip(state.layout.paths, state.layout.source, strict=True))
            for path, held, name, _ in self.slots:
                held[name] = self.leaves[home[path]]
            before = [(version(t), t.data_ptr()) for t in self.leaves.values()]
            watch = not self.watched or state.spec.schedule.debug
            with torch_private.parametrized_anew(), WriteWatch(self.leaves) if watch else nullcontext():
                yield session.number
            self.watched = True
            self._check(session, before, home)
        finally:
            for _, held, name, placeholder in self.slots:
                held[name] = placeholder
            self.leaves = {}
            self.state = self.caller = None

    def _check(self, session: Session, before: list[tuple[int, int]], home: dict[str, str]) -> None:
        """The weights are what they were; see `_distributed`."""
        now = [(version(t), t.data_ptr()) for t in self.leaves.values()]
        paths = [path for path, new, old in zip(self.leaves, now, before, strict=True) if new[1] != old[1]]
        if paths:
            raise changed(paths, "by .data =")
        paths = [path for path, new, old in zip(self.leaves, now, before, strict=True) if new != old]
        if paths:
            session.spoil(self.state, self.state.units, spoilt("the model"))
            raise changed(paths, "in place")
        for path, held, name, _ in self.slots:
            if held.get(name) is not self.leaves[home[path]]:
                clear(self.model, held, name)
                raise changed([path], "by assignment")

    def differentiate(self, loss: torch.Tensor, scale: torch.Tensor, last: bool, inputs: Tensors = ()) -> Gradients:
        """The gradient of the loss, with respect to every weight at once; reduced unit by unit. Returns the gradients
        of the inputs."""
        state: State = self.state
        wanted = {path: leaf for path, leaf in self.leaves.items() if path in self.trained}
        with torch.autograd.set_multithreading_enabled(False):  # on this thread, as a driver
            found = torch.autograd.grad(loss, [*wanted.values(), *inputs], scale, allow_unused=True)
        grads = dict(zip(wanted, found[: len(wanted)], strict=True))
        if left := next((path for path, leaf in self.leaves.items() if leaf.grad is not None), None):
            raise ScheduleError(
                f"a backward inside the loss function, the model or one of its autograd.Functions left a gradient in "
                f".grad of the weight {left!r}, where it would be lost. Take it by torch.autograd.grad; a Function is "
                "given the weights, and returns their gradients."
            )
        if self.watch is not None:
            for unit in state.layout.units:
                self.watch(unit.name, [grads.get(path) for path in unit.paths])
        tree = state.treedef.unflatten([grads.pop(path, None) for path in state.layout.source])  # tied ones once
        self.state = self.reduce(state, tree, last_microbatch=last)
        return [*found[len(wanted) :]]

    def release(self) -> None:
        """Nothing is borrowed: the weights go when the last of them is let go."""
