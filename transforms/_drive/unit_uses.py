"""Unit uses: one use of a unit module in a forward, and what the backward does when it comes to it.

    its weights    went in through `Weights`, whose backward has all of their gradients:    reduce(state, grads, unit)
    its outputs    went out through `Outputs`, whose backward comes before anything in it:  unshard(state, units)

autograd runs what was made last first, so between a unit module's `Outputs` and its `Weights` there is nothing but the
unit module, and what its residuals point at is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from functional_fsdp import ScheduleError
from functional_fsdp._seams import opened, torch_private

from .._modules.unit_modules import Leaf

if TYPE_CHECKING:
    from .driver import Driver
    from .unit_calls import UnitCall


Gradients = list[torch.Tensor | None]
Trained = Mapping[str, Sequence[tuple[int, int]]]
Inputs = dict[int, tuple[torch.Tensor, int]]  # by id: inputs that are differentiated, and their versions when they came

SECOND = (
    "units that are gathered one at a time. Keep all of them gathered for that: T.forward_backward(model, loss_fn, "
    "second_order=True). By inputs torch.func.grad and its like need no option."
)


class UnitUse:
    """One call of a unit module in the forward; without a unit call, one use of a single weight outside of it.

    Args:
        trained: for each unit that gets gradients: (which of the weights that went in, which of its keys).
        records: whether a graph records it.

    Attributes:
        in_backward: it is a call that the backward makes. Activation checkpointing only looks at what it saves.
            Gradients through it would find the bytes of other units.
    """

    def __init__(self, driver: Driver, unit_call: UnitCall | None, trained: Trained, records: bool = True) -> None:
        self.driver, self.unit_call, self.trained, self.records = driver, unit_call, trained, records
        self.in_backward = driver.backward
        self.parents = list(driver.stack)
        self.given: Inputs = {}
        self.lent: tuple[torch.Tensor, ...] = ()  # the unit call's weights, as they were gathered
        self.firsts: list[torch.Tensor] = []  # of these, one of each bucket
        self.versions: list[int] = []
        self.tensors: list[torch.Tensor] = []  # weights as they went in
        self.shared: list[tuple[torch.Tensor, int]] = []  # outputs that share memory with something else, and versions
        self.off_plan: Set[str] = frozenset()  # units that it had off the plan
        self.undo: list[Callable[[], None]] = []  # what puts back what lay where its weights are needed
        self.idle = False  # whether its backward runs, and not that of its weights
        self.close: Callable[[], None] | None = None  # what ends its backward's range in a profile
        self.node: Any = None  # of Weights, in the graph
        self.outs: list[Any] = []  # of Outputs: one, or two where hooks see the first

    def storages(self) -> list[int]:
        """Where its weights lie."""
        return [t.untyped_storage()._cdata for t in self.firsts]

    def begin(self, grads: Gradients) -> Gradients:
        """The backward comes to this call, with gradients of its outputs: its weights are needed again."""
        driver, unit_call = self.driver, self.unit_call
        assert unit_call is not None
        if self.in_backward or not driver.backward:  # else by the step's own backward, of calls of its forward
            refuse_inner_gradient()
        if self in driver.active:
            return grads
        if self.shared:
            self.refuse_changed()
            self.shared = []
        if driver.active:
            driver.end_others(self.parents)
        if torch_private.profiler._is_profiler_enabled:
            self.close = opened(f"backward {unit_call.unit_module.path}")
        driver.gather(unit_call.units, self.parents, self.off_plan)
        driver.regathered(self)
        driver.active.append(self)
        unit_call.put([*map(self.readable, unit_call.leaves, self.tensors)] if driver.alone else self.tensors)
        if self.idle:
            self.without_gradients()
        return grads

    def without_gradients(self) -> None:
        """Its backward has come, and needs its weights, which get no gradient."""
        self.idle = False
        for unit in self.trained:
            self.driver.collect(unit, None)

    def refuse_changed(self) -> None:
        """Refuse outputs that share memory, if they were changed."""
        if any(t._version != version for t, version in self.shared):
            assert self.unit_call is not None
            raise ScheduleError(
                f"outputs of the module {self.unit_call.unit_module.path!r} share memory, or one does with an input, "
                "and it was changed in place outside of the module, which gradients cannot follow. Return a copy: "
                ".clone()."
            )

    def readable(self, leaf: Leaf, tensor: torch.Tensor) -> torch.Tensor:
        """A weight for the slots of its module: a copy if the forward uses it outside, too. A recomputation around this
        call may read it here for such a use, whose backward comes when the unit is released."""
        if leaf not in self.driver.alone or torch_private.is_wrapped(tensor):  # in levels nothing is recomputed
            return tensor
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    def bring(self, unit: str, off_plan: bool) -> None:
        """One of its units has to lie off the plan, or where the plan has it, too, until this ends."""
        session = self.driver.session
        if off_plan:
            session.copy_to_fallback(unit)
            return
        undo = session.copy_to_planned(unit)
        if undo is None:
            raise ScheduleError(
                f"the unit {unit!r} is used more often than the schedule says, and was gathered to another place "
                "for the backward. Give the order: Schedule(order=[...])."
            )
        self.undo.append(undo)

    def put_back(self) -> None:
        """What lay where its weights were needed lies there again."""
        while self.undo:
            self.undo.pop()()

    def end(self) -> None:
        if self.unit_call is not None and self.tensors:
            self.tensors = []
            self.unit_call.take()
            if self.undo:
                self.put_back()
        if self.close is not None:
            self.close()

    def clear(self) -> None:
        """Nothing runs any more: what holds each other is let go."""
        if self.close is not None:
            self.close()
        self.node, self.outs = None, []
        self.lent, self.firsts, self.tensors, self.shared = (), [], [], []

    def gradients(self, grads: Sequence[torch.Tensor | None]) -> None:
        """All gradients of this call's weights are there."""
        driver = self.driver
        if self.in_backward or not driver.backward:
            refuse_inner_gradient()
        if self.unit_call is not None:
            self.end()
            driver.active.remove(self)
        for unit, which in self.trained.items():
            full: Gradients = [None] * len(driver.keys[unit])
            for i, k in which:
                full[k] = grads[i]
            driver.collect(unit, full)


# ---------------------------------------------------------------- autograd


def no_output(unit_call: UnitCall) -> ScheduleError:
    """The error for gradients that come to the inside of a unit module by something else than its outputs."""
    return ScheduleError(
        f"the loss hangs on the units {', '.join(map(repr, unit_call.units))} by a tensor that is no output of the "
        f"module {unit_call.unit_module.path!r}: one kept in an attribute, or by a hook inside it, or returned in an "
        "object of another class than tuples, lists, mappings and dataclasses, into which nobody looks. Return the "
        "tensor; or make the module that computes it a unit of its own: Spec(units=[...])."
    )


def refuse_second_order() -> NoReturn:
    """Refuse a backward that is itself to be differentiated."""
    raise ScheduleError(f"a gradient of a gradient was asked for (create_graph=True), through {SECOND}")


def refuse_inner_gradient() -> NoReturn:
    """Refuse a gradient that the loss function, the model or one of its Functions takes by itself."""
    raise ScheduleError(
        "a backward was run inside the loss function, the model, or the backward of an autograd.Function in it (an "
        f"adjoint method, a reversible block), through {SECOND}"
    )


def refuse_transform(verb: str) -> NoReturn:
    """Refuse a transform of torch's around all of a call that drives a model."""
    raise ScheduleError(
        f"{verb} was called inside a torch.func transform (grad, vjp, vmap, ...), which cannot see through a "
        "collective. Call the transform inside the function that it is given, of the model by its inputs."
    )


def traced_by(tool: str) -> str:
    """What is said where another tool traces a driven model."""
    return (
        f"{tool} traces a model that T.apply or T.forward_backward drives: inside the function that they were given, "
        "or inside the model. A trace keeps weights to use them later, and these are gathered for one call at a time. "
        "Nothing was gathered for the trace, and the state goes on. To compile units: T.forward_backward(..., "
        "compile=True), or T.compile_units; the whole step: T.compile. To export or trace the model: "
        "fsdp.as_module(model, state). For derivatives of derivatives: T.forward_backward(..., second_order=True)."
    )


class Start(torch.autograd.Function):
    """The loss. Its backward is the first thing that runs."""

    @staticmethod
    def forward(ctx: Any, driver: Driver, loss: torch.Tensor) -> torch.Tensor:
        ctx.driver = driver
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> Any:
        ctx.driver.begin()
        return None, dloss


class Weights(torch.autograd.Function):
    """Weights as they go into an unit_module. Its backward runs when all of their gradients are there."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, call: UnitUse, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(map(torch.Tensor.detach, weights))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            refuse_second_order()
        ctx.call.gradients(grads)
        return (None,) * (2 + len(grads))


class Outputs(torch.autograd.Function):
    """What a unit module returns. Its backward runs before anything in the unit module."""

    @staticmethod
    def forward(ctx: Any, call: UnitUse, *outs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(map(torch.Tensor.detach, outs))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            refuse_second_order()
        return None, *ctx.call.begin([*grads])
