"""forward_backward: any module's loss and gradients, gathered, reduced and released unit by unit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar, overload

import torch
import torch.nn as nn

from functional_fsdp import ScheduleError, SpecError, State, TreeError, reduce
from functional_fsdp._seams import expect, full_tensor, note_activations, torch_private
from functional_fsdp.extend import alone, begin_round, end_round, evolve

from .._compile.compile_units import Options
from .._modules.unit_modules import map_tensors
from .._seed import seeded
from ..nonfinite import NonfiniteError, NonfiniteWatch
from .buffers import Buffers, Rule
from .driver import Driver
from .placeholders import values
from .second_order import Whole
from .settings import Settings
from .traced_driver import graph_for, traced
from .unit_uses import Gradients

pytree = torch_private.pytree
Out = TypeVar("Out")  # what a loss function returns
Reduce = Callable[..., State]
NODES = 4096  # of the graph of a loss, in which parameters are looked for


@overload
def forward_backward(
    model: nn.Module, loss_fn: Callable[..., Out], has_aux: bool = False, *, buffers: Rule = "mean",
    compile: bool | Options = False, second_order: bool = False, find_nonfinite: bool = False,
    input_grads: Literal[False] = False, reduce: Reduce = reduce,
) -> ForwardBackward[Out]: ...  # fmt: skip
@overload
def forward_backward(
    model: nn.Module, loss_fn: Callable[..., Any], has_aux: bool = False, *, buffers: Rule = "mean",
    compile: bool | Options = False, second_order: bool = False, find_nonfinite: bool = False,
    input_grads: Literal[True], reduce: Reduce = reduce,
) -> ForwardBackward[tuple[torch.Tensor, Any]]: ...  # fmt: skip
def forward_backward(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    has_aux: bool = False,
    *,
    buffers: Rule = "mean",
    compile: bool | Options = False,
    second_order: bool = False,
    find_nonfinite: bool = False,
    input_grads: bool = False,
    reduce: Reduce = reduce,
) -> ForwardBackward[Any]:
    """A function that computes the loss and adds the averaged gradients to the state, unit by unit.

    Args:
        model: the skeleton that `init` or `functionalize` gave, or any module (its weights are not used). It is copied
            and never touched. Its training and evaluation modes are followed; other settings (a dropout rate, a flag)
            are those that it has now, and to change one later is an error.
        loss_fn: `loss_fn(model, *args, **kwargs)` returns a scalar tensor; the model that it gets is of the same class,
            with all methods and attributes. It may take derivatives by inputs, of the model or of its
            parts: torch.func (`grad`, `vjp`, `jvp`, `vmap`, `jacrev`, `jacfwd`, `hessian`, nested) and dual numbers.
        has_aux: `loss_fn` returns `(loss, aux)`.
        buffers: what is kept of buffers that the forward changes (BatchNorm statistics): "mean" over the data ranks,
            the "first" rank's, or "local", each rank's own (exports and checkpoints then have the first rank's). Along
            an axis whose ranks have leaves of their own, as experts, they have the buffers beside these of their own,
            too. What `shard(local_buffers=)` names is each rank's own by any rule.
        compile: True, or options of torch.compile: what units compute is compiled, once for all that are alike. Of
            these, units of a class that comes again, as layers do; where none does, all but torch's own layers.
            `T.compile_units` chooses modules itself, and `T.compile_report` says whether it pays.
        second_order: `loss_fn` may take gradients itself, with `torch.autograd.grad(..., create_graph=True)`, of inputs
            or of `model.parameters()` (a gradient penalty). Then all units are gathered before the forward, which waits
            for them, and stay until the loss is differentiated: a rank holds the whole model, and for a moment its
            whole gradient.
        find_nonfinite: look at every gradient before it is reduced, and raise `NonfiniteError` on all ranks, naming
            rank, unit and leaf, if one is inf or NaN. For debugging: it waits for the device at the end of each call.
        input_grads: return the gradients of what this rank gives as well, as a stage of a pipeline hands them back.
        reduce: what is called with this rank's gradients in the place of `fsdp.reduce`, and calls it: `reduce(state,
            grads, unit, last_microbatch=) -> state`. It may look at them (their norms), change them, or change extras;
            some may be None. With `second_order` they come all at once, without `unit`.

    Returns:
        `f(state, *args, **kwargs) -> state, loss`, or `state, (loss, aux)`; loss and aux are this rank's and detached.
        Two keywords are its own: `last_microbatch=False` says that more microbatches follow, `scale` multiplies the
        gradients. With `input_grads` it returns `state, (loss, grads)`, or `state, (loss, (aux, grads))`: a tuple like
        `args` (not `kwargs`), pytrees with a gradient, of the same shape and dtype, in the place of each floating
        tensor, zeros if the loss does not depend on it, and None elsewhere. They are this rank's, times `scale`, and
        not averaged over ranks.

    The order of use is found from the module's structure, and corrected after the first step by what all ranks did. A
    unit that is used more often (a second pass through the model) is gathered beside the schedule, with a warning once
    the order is known; then every rank must do so.

    Random numbers are those of (state.rng, step, microbatch, rank): dropout differs by rank and comes again.
    Activation checkpointing works if it is not reentrant. Inside `T.compile` and `fsdp.lower` all of it is part of the
    graph, and `compile` is of no account.

    Raises (from f):
        TreeError: the state is of another model, the loss is no floating scalar, or with `input_grads` there is no
        floating tensor in `args`.
        ScheduleError: the gradients of a whole round (`last_microbatch=True`) are there and no step has taken them, see
            `fsdp.drop_gradients`; nothing to differentiate; `torch.autograd.grad` inside `loss_fn` without
            `second_order`; reentrant checkpointing; a loss that hangs on a unit other than by what its module returns;
            outputs of a unit that share memory and of which one is changed in place.
        SpecError: a buffer that changes, or comes, in the forward and is not in the state; units that do not compile; a
            setting of the model that was changed; inputs of another dtype than the weights.
        NonfiniteError: see `find_nonfinite`.

    A weight that the forward changes in place (a clamp, `max_norm`) is a ScheduleError, in whatever call. Writes
    through `weight.data` are seen in the first call of each module, and with `Schedule(debug=True)` in every call.

    Collective: as `unshard` and `reduce` for each unit that is used; one small all-reduce if buffers changed; with
    `find_nonfinite` a gather of the findings on the host.

    Example:
        >>> forward_backward = T.forward_backward(model, lambda model, x: model(x).square().mean())
        >>> state, loss = forward_backward(state, batch)
    """
    return ForwardBackward(model, loss_fn, has_aux, buffers, compile, second_order, find_nonfinite, input_grads, reduce)


class ForwardBackward(Generic[Out]):
    """What `forward_backward` returns."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Out], has_aux: bool, buffers: Rule,
        compile: bool | Options = False, second_order: bool = False, find_nonfinite: bool = False,
        input_grads: bool = False, reduce: Reduce = reduce,
    ) -> None:  # fmt: skip
        expect("forward_backward(loss_fn)", loss_fn, Callable, "a function of (model, ...) that gives the loss")
        expect("forward_backward(reduce)", reduce, Callable, "a function, as fsdp.reduce")
        if second_order and compile is not False:
            raise SpecError(
                "forward_backward(compile=..., second_order=True): torch does not differentiate compiled code twice. "
                "Leave one of them out."
            )
        self.budget: Any = getattr(model, "_budget", None)  # what of it is still to be chosen, see `T.budget`
        self.choice: Any = None
        self.compile = compile
        if self.budget is not None and second_order:
            raise SpecError(
                "forward_backward(second_order=...) of a model of T.budget: what units keep is not the budget's to "
                "choose there. Leave one of them out."
            )
        self.driver: Driver | Whole = Whole(model) if second_order else Driver(model, compile)
        self.buffers = Buffers(self.driver.model, buffers)
        self.settings = Settings("forward_backward", model, self.driver.model)
        self.loss_fn = loss_fn
        self.has_aux = has_aux
        self.find_nonfinite = find_nonfinite
        self.input_grads = input_grads
        self.reduce = reduce
        self.others: list[nn.Parameter] | None = None  # not the model's, in the graph of the first loss

    def __call__(
        self, state: State, *args: Any, last_microbatch: bool = True, scale: float | torch.Tensor = 1.0, **kwargs: Any
    ) -> tuple[State, Out]:
        return run(self, state, args, kwargs, last_microbatch, scale)

    def _run(self, state: State, args: Any, kwargs: Any, last: bool, scale: float | torch.Tensor) -> tuple[State, Any]:
        if self.budget is not None:
            self._settle(state, args, kwargs)
        if self.choice is not None:
            note_activations(state, self.choice.ways)
        driver = self.driver
        begin_round(state, "forward_backward")
        if state.between_steps:
            self.settings.follow()
        with driver.running(state, "forward_backward", trains=True) as number, seeded(state, number):
            watch = NonfiniteWatch(state) if self.find_nonfinite else None
            look = watch.look if watch else None
            out, kept = self._round(driver, self.buffers, args, kwargs, last, scale, look)
            if watch and (bad := watch.found()):
                raise NonfiniteError(bad)
            end_round(driver.state, last)
            state = driver.state
        if others := self.others:
            self.others = []
            warnings.warn(
                f"forward_backward: the loss depends on parameters that are not the model's ({len(others)}, as "
                f"one of shape {tuple(others[0].shape)}): they get no gradient. Make a module of both, and give "
                "that to init or functionalize; if they shall not train, requires_grad_(False) of them.",
                stacklevel=4,
            )
        return self._result(state, out, kept)

    def plain(self) -> nn.Module:
        """A copy of the model as it is, without what is still to be chosen."""
        assert isinstance(self.driver, Driver)
        model = self.driver.bare()
        vars(model).pop("_budget", None)
        return model

    def like(self, model: nn.Module) -> ForwardBackward[Any]:
        """The same of another model."""
        return ForwardBackward(
            model, self.loss_fn, self.has_aux, self.buffers.rule, self.compile, False, self.find_nonfinite,
            self.input_grads, self.reduce,
        )  # fmt: skip

    def on_paper(self, state: State, args: Any) -> ForwardBackward[Any]:
        """The same, with what its model's budget leaves open chosen without a device; see `rehearse`."""
        if self.budget is None:
            return self
        trial, ways = self.budget.locally(self, state, args, {}, True)
        return self.like(trial.changed(ways))

    def _settle(self, state: State, args: Any, kwargs: Any) -> None:
        """Choose what the model's budget leaves open. Collective."""
        model, self.choice = self.budget.settle(self, state, args, kwargs)
        self.budget, self.driver = None, Driver(model, self.compile)
        self.buffers = Buffers(self.driver.model, self.buffers.rule)
        self.settings.copies = [*self.driver.model.modules()]

    def _traced(
        self, state: State, args: Any, kwargs: Any, last: bool, scale: float | torch.Tensor
    ) -> tuple[State, Any]:
        """Where a graph is made of the step: the same, on a copy of the model for this graph."""
        graph = graph_for("forward_backward")
        if self.budget is not None:
            raise ScheduleError(
                "T.budget: a graph is made of this step, in which the compiler chooses what is kept. Use T.cuda_graph, "
                "whose warm-up chooses; or leave the budget out."
            )
        if self.find_nonfinite or isinstance(self.driver, Whole):
            which, why = ("find_nonfinite", "it waits for the device to say what it found")
            if not self.find_nonfinite:
                which, why = ("second_order", "it takes gradients of gradients, of the whole model at once")
            raise ScheduleError(
                f"forward_backward({which}=True) was called where a graph is made of the step, and {why}. Leave it "
                "out, or run this step eagerly."
            )
        twin = traced(graph, self, self.driver, self.buffers.rule, self.settings)
        twin.begin_round(state)
        with twin.driver.running(state, "forward_backward", trains=True):
            out, kept = self._round(twin.driver, twin.buffers, args, kwargs, last, scale)
            state = twin.driver.state
        twin.end_round(state, last)
        return self._result(state, out, kept)

    def _round(
        self, driver: Driver | Whole, buffers: Buffers, args: Any, kwargs: Any, last: bool,
        scale: float | torch.Tensor, watch: Callable[[str, Any], None] | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """The forward and its backward: what is returned for the user, and the buffers. `watch` sees gradients."""
        state = driver.state
        args, inputs, like = _leaves(args) if self.input_grads else (args, [], None)
        driver.deliver(self.reduce, watch)
        buffers.lend(state, driver.device)
        try:
            loss, aux = self._loss(driver, args, kwargs)
            if self.others is None and driver is self.driver:
                own = {*driver.model.parameters()}  # which a frozen weight may be, given to a function
                self.others = [p for p in parameters_of(loss) if p not in own]
            factor = scale.to(loss) if isinstance(scale, torch.Tensor) else torch.full_like(loss, scale)
            grads = self._differentiate(driver, loss, factor.expand(loss.shape), last, inputs)
            kept = buffers.collect(driver.state)
        finally:
            buffers.restore()
        driver.release()
        rest = [map_tensors(torch.Tensor.detach, aux)] if self.has_aux else []
        if self.input_grads:
            found = (torch.zeros_like(t) if grad is None else grad for t, grad in zip(inputs, grads, strict=True))
            rest.append(pytree.tree_map(lambda there: next(found) if there else None, like))
        loss = loss.detach()
        return (loss, rest[0] if len(rest) == 1 else (*rest,)) if rest else loss, kept

    def rehearse(self, driver: Driver, args: Any, kwargs: Any) -> None:
        """A forward and its backward on this driver, of which nothing is kept."""
        buffers = Buffers(driver.model, self.buffers.rule)
        buffers.lend(driver.state, driver.device, collects=False, compares=False)
        try:
            loss, _ = self._loss(driver, args, kwargs)
            self._differentiate(driver, loss, torch.ones_like(loss), True, [])
        finally:
            buffers.restore()

    def _result(self, state: State, out: Any, kept: Any) -> tuple[State, Any]:
        return state if kept is state.buffers else evolve(state, buffers=kept), out

    def _loss(self, driver: Driver | Whole, args: Any, kwargs: Any) -> tuple[torch.Tensor, Any]:
        """The loss function's loss, and what else it returns."""
        with torch.enable_grad():
            out = values(self.loss_fn(driver.model, *args, **kwargs))
        if self.has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TreeError(
                f"forward_backward: loss_fn returned a {type(out).__name__}; with has_aux=True expected (loss, aux)."
            )
        loss, aux = out if self.has_aux else (out, None)
        if type(loss) is not torch.Tensor:
            loss = full_tensor(loss)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TreeError(
                f"forward_backward: loss_fn returned {got}; expected a tensor with 1 element. Reduce it, as with "
                ".mean(), and return what else there is with has_aux=True."
            )
        if not loss.is_floating_point():
            raise TreeError(
                f"forward_backward: loss_fn returned a loss of {loss.dtype}, which has no gradient that a step could "
                "take; expected a floating tensor. Is it a count (an accuracy), or was it rounded? Return it with "
                "has_aux=True. Of a complex one take .real, or .abs()."
            )
        if not loss.requires_grad:
            raise ScheduleError(
                "forward_backward: the loss does not depend on any weight that trains. Is everything frozen, or was "
                "the model called under torch.no_grad()? For a forward only, use T.apply(model)."
            )
        return loss, aux

    def _differentiate(
        self, driver: Driver | Whole, loss: torch.Tensor, factor: torch.Tensor, last: bool, inputs: list[torch.Tensor]
    ) -> Gradients:
        try:
            return driver.differentiate(loss, factor, last, inputs)
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                raise ScheduleError(
                    "forward_backward: the model uses reentrant activation checkpointing, which needs .backward(). Use "
                    "checkpoint(..., use_reentrant=False); in Hugging Face models "
                    "gradient_checkpointing_enable({'use_reentrant': False})."
                ) from error
            raise


def parameters_of(loss: torch.Tensor) -> list[nn.Parameter]:
    """The parameters in the graph of a loss: none of them is driven, since those are views of what was gathered.

    Only the nodes next to the loss are looked at. Nodes that Python has seen are freed by recursion, and a chain of
    40,000 takes more than the stack.
    """
    nodes: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = {None, *nodes}
    for node in nodes:  # which grow
        for before, _ in node.next_functions:
            if before not in seen and len(nodes) < NODES:
                seen.add(before)
                nodes.append(before)
    return [node.variable for node in nodes if isinstance(getattr(node, "variable", None), nn.Parameter)]


def _leaves(args: Any) -> tuple[Any, list[torch.Tensor], Any]:
    """The arguments with leaves of a graph in the place of floating tensors; these; and whether there is one."""
    leaves, treedef = pytree.tree_flatten(args)
    there = [isinstance(t, torch.Tensor) and t.is_floating_point() for t in leaves]
    if not any(there):
        raise TreeError(
            "forward_backward(input_grads=True): there is no floating tensor in the positional arguments, so there is "
            "nothing to differentiate by. Give inputs by position, in tuples, lists or dicts; or leave it out."
        )
    own = [t.clone() if on and t.is_inference() else t for t, on in zip(leaves, there, strict=True)]
    given = [t.detach().requires_grad_() if on else t for t, on in zip(own, there, strict=True)]
    inputs = [t for t, on in zip(given, there, strict=True) if on]
    return treedef.unflatten(given), inputs, treedef.unflatten(there)


run = alone(ForwardBackward._run, "forward_backward", at=1, traced=ForwardBackward._traced)
