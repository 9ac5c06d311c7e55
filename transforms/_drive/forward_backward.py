"""What drives a model: `forward_backward`, `apply`, and both in a step that is traced.

    forward_backward   any module's loss and gradients, gathered, reduced and released unit by unit
    apply              its forward without gradients, for evaluation and generation
    TracedDriver       what both have where a graph is made of a step
    Whole              what the first has where gradients of gradients are taken

`Whole`: a private copy of a module that has all of its weights at once, so that gradients of gradients are right.

    Driver    one unit at a time   its unit calls gather again in a backward, once: a backward of that one would find
                                   other units' bytes
    Whole     every unit           gathered before the forward, plain leaves of autograd's graph, until the outer
                                   gradient is there

For `forward_backward` it is what a `Driver` is: the same names, the same transaction.

`TracedDriver`: the same unit calls and uses, with nothing in flight.

    eager     unshard, release and reduce as they come; the backward's gather goes where the forward's was
    traced    they are operations of the graph; where the backward has gathered a unit again a mark says so, and what
              would be read from the forward's gather is read from this one (`_graph.graph`)

Each graph has a copy of the model of its own: what a forward leaves in a module, as a cache, is of no use to others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload

import torch
import torch.nn as nn

from functional_fsdp import Layout, ScheduleError, SpecError, State, TreeError, reduce, unshard
from functional_fsdp._seams import (
    GraphBuild,
    base_of,
    changed,
    coordinate_of,
    expect,
    full_tensor,
    given_in,
    note_activations,
    spoilt,
    torch_private,
    tracing_now,
)
from functional_fsdp.extend import Session, alone, begin_round, end_round, evolve, ranks_of, refuse, traced_as

from .._compile.compile_units import Options
from .._modules import copy_of, find_unit_modules, map_tensors, refuse_shapes, slots_of
from .._seed import seeded
from ..norms import NonfiniteError, NonfiniteWatch
from .buffers import Buffers, Rule, WriteWatch, clear, place, version, written
from .driver import Driver, NoSession, Tensors, caller, foreign_tracer, refuse_nesting
from .settings import Settings
from .unit_uses import Gradients, UnitUse, check_dtypes, precisions, values


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


class TracedDriver(Driver):
    """A driver whose verbs are operations of a graph."""

    def __init__(self, model: nn.Module, graph: GraphBuild) -> None:
        super().__init__(model)
        self.graph = graph

    @contextmanager
    def running(self, state: State, verb: str, trains: bool = False) -> Iterator[int]:
        """As `Driver.running`; there is no lineage to advance."""
        refuse_nesting(self.caller)
        self._stop()
        with torch_private.disable_current_modes():  # what is made is not of the graph
            self.attach(state)
            for unit_call in self.unit_calls:
                unit_call.rebound = []  # fake weights have nothing to point to
        self.debug = False
        try:
            self.caller, self.state, self.session = caller(), state, NoSession()
            yield 0
            self.look_back()
            self.release()
            if trains:
                self.graph.orders.setdefault(state.layout.hash, (*self.trace[0], *self.trace[1]))
        finally:
            self._stop()

    def refuse_tracer(self) -> None:
        """Refuse Dynamo, as in a branch of `torch.cond`; another tracer is the package's own."""
        if foreign_tracer() == "torch.compile":
            super().refuse_tracer()

    def regathered(self, call: UnitUse) -> None:
        """Leave the mark: from here on this gather stands for the forward's."""
        assert call.unit_call is not None
        pairs = [(a, b) for a, b in zip(call.lent, self.tensors(call.unit_call.leaves), strict=True) if a.numel()]
        if pairs:  # in the step's own graph, and of no use there: tracing keeps it, and the pass takes it out
            first, second = ([*map(torch.Tensor.detach, found)] for found in zip(*pairs, strict=True))
            torch.ops.functional_fsdp.again(second[0], first, second)

    def note(self, path: str, copied: torch.Tensor) -> None:
        """As `Driver.note`; nothing is alive while a graph is made."""
        self.copies.append((path, copied, copied._version))


class Writes(torch_private.OperationMode):
    """Notes which storages operations write to, by what they say of themselves. Versions do not tell: the one of batch
    norm that is traced leaves them as they are. And has them refuse dtypes as they do when they run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Any] = {}  # and keeps them, so that no other gets their name

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        check_dtypes(func, args)
        for value in written(func, args, kwargs):
            self.found[place(value)[0]] = value
        return func(*args, **kwargs)


class TracedBuffers(Buffers):
    """Buffers whose values nobody can look at: one that an operation writes to has changed."""

    writes: Writes | None = None

    def lend(self, state: State, device: torch.device, collects: bool = True, compares: bool = True) -> None:
        super().lend(state, device, collects, compares)
        self.writes = Writes()
        self.writes.__enter__()

    def restore(self) -> None:
        if self.writes is not None:
            self.writes.__exit__(None, None, None)
            self.writes = None
        super().restore()

    def note(self) -> None:
        self.live = set()
        self.before = {path: (held[name], held[name]._version, None)
                       for path, (held, name) in self.rest.items() if path not in self.places}  # fmt: skip

    def spoilt(self, t: torch.Tensor, counted: int, copied: torch.Tensor | None) -> bool:
        assert self.writes is not None
        return t._version != counted or place(t)[0] in self.writes.found

    def move(self, device: torch.device, given: Collection[str]) -> None:
        with torch_private.disable_current_modes():
            super().move(device, given)

    def compare(self, state: State) -> None:
        pass  # values are no part of a graph; the same model compares when it runs eagerly

    def told(self, t: torch.Tensor | None, path: str) -> bool:
        return t is None or t is not self.lent[path] or self.spoilt(t, self.versions[path], None)

    def other(self, t: torch.Tensor, path: str) -> bool:
        return True

    def coordinate(self, state: State) -> Mapping[str, int]:
        return coordinate_of(state)


class Twin(NamedTuple):
    """What a transform drives while a graph is made."""

    driver: TracedDriver
    buffers: TracedBuffers

    def begin_round(self, state: State) -> None:
        """As `extend.begin_round`."""
        if given_in(state) and base_of(state) in self.driver.graph.rounds:
            raise ScheduleError(
                "forward_backward: this State has the gradients of a whole round already (the call before had "
                "last_microbatch=True, the default), and no step has taken them: they would count twice. Take the "
                "step. Where microbatches add up, say last_microbatch=False in all calls but the last."
            )

    def end_round(self, state: State, last: bool) -> None:
        rounds = self.driver.graph.rounds
        (rounds.add if last else rounds.discard)(base_of(state))


def graph_for(verb: str) -> GraphBuild:
    """The graph that is being made. T.compile and `lower` trace what runs, and make one; torch.compile reads Python,
    and cannot follow a driver."""
    graph = tracing_now()
    if graph is None:
        said = (
            f"{verb} drives the schedule from Python, as it runs, which torch.compile cannot trace. Compile the step "
            "with T.compile(train_step); or compile units: T.forward_backward(..., compile=True)."
        )
        refuse("ScheduleError", said)
    return graph


def traced(graph: GraphBuild, transform: Any, driver: Driver, rule: Rule, settings: Settings) -> Twin:
    """The twin of a transform's driver for this graph, which holds for the model's modes."""
    if transform not in graph.driven:
        with torch_private.disable_current_modes():

            def modes() -> list[bool]:
                settings.follow()
                return settings.training

            graph.guards.append(modes)
            modes()
            own = TracedDriver(driver.bare(), graph)
            graph.driven[transform] = Twin(own, TracedBuffers(own.model, rule))
    found: Twin = graph.driven[transform]
    return found


Out = TypeVar("Out")  # what a function of a model returns


@overload
def apply(
    model: nn.Module, fn: Callable[..., Out], *, training: bool = False, compile: bool | Options = False
) -> Callable[..., tuple[State, Out]]: ...
@overload
def apply(
    model: nn.Module, fn: None = None, *, training: bool = False, compile: bool | Options = False
) -> Callable[..., tuple[State, Any]]: ...
def apply(
    model: nn.Module, fn: Callable[..., Any] | None = None, *, training: bool = False, compile: bool | Options = False
) -> Callable[..., tuple[State, Any]]:
    """A function that computes with the model: `f(state, *args, **kwargs) -> state, fn(model, *args, **kwargs)`.

    Args:
        model: as for `forward_backward`: copied, never touched.
        fn: what to do with it; by default it is called. It may call the model, or its methods, as often as it likes,
            also inside transforms of torch.func that differentiate by inputs.
        training: False puts the copy into evaluation mode, True follows the modes that the model has.
        compile: as for `forward_backward`. In generation lengths change: leave it out.

    Between steps the state is as good afterwards as before: it is returned as it was, with nothing gathered.

    Every rank must use the same units in the same order: in generation, let all ranks make the same number of tokens
    (in Hugging Face models `generate(..., synced_gpus=True)`, or equal lengths).

    Random numbers are those of (state.rng, step, rank), as in `forward_backward`. So every call on one state draws the
    same, as do states of one seed and step; the caller's own go on as they were. To sample anew, seed in `fn`: see the
    example.

    Collective: as `unshard` for each unit that is used; in the first call on a state of `shard(src=)` an exchange on
    the host, by which ranks compare buffers that are not in the state.

    Example:
        >>> predict = T.apply(model)
        >>> state, logits = predict(state, tokens)
        >>> generate = T.apply(model, lambda model, ids: model.generate(ids, max_new_tokens=20))
        >>> state, ids = generate(state, ids)
        >>> def sample(model, ids, seed):
        ...     torch.manual_seed(seed)  # for as long as `fn` runs
        ...     return model.generate(ids, max_new_tokens=20, do_sample=True)
        >>> state, ids = T.apply(model, sample)(state, ids, extend.seeds(state, "sample")(k, rank))
    """
    expect("apply(fn)", fn, Callable | None, "a function of (model, ...), or None")
    driven = Forward("apply", model, training, compile)

    def compute(model: nn.Module, args: Any, kwargs: Any) -> Any:
        return values(model(*args, **kwargs) if fn is None else fn(model, *args, **kwargs))

    def in_graph(state: State, *args: Any, **kwargs: Any) -> Any:
        """Where a graph is made of the step: on a copy of the model for this graph. What was gathered ahead, and is not
        used if the state goes back to what it was, is no part of the graph."""
        twin = traced(graph_for("apply"), applied, driven.driver, "local", driven.settings)
        with twin.driver.running(state, "apply"), torch.no_grad():
            twin.buffers.lend(state, twin.driver.device)
            try:
                out = compute(twin.driver.model, args, kwargs)
            finally:
                twin.buffers.restore()
            twin.driver.release()
            return state if state.between_steps else twin.driver.state, out

    @traced_as(in_graph)
    def applied(state: State, *args: Any, **kwargs: Any) -> tuple[State, Any]:
        return run(state, torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad, args, kwargs)

    def forward(state: State, mode: Callable[[], AbstractContextManager[Any]], args: Any, kwargs: Any) -> Any:
        """`mode`: in which the model computes; what is kept is made outside it."""
        with driven.running(state) as driver:
            with mode():
                out = compute(driver.model, args, kwargs)
            driver.release()
            session, state = driver.session, driver.state
        return session.rest(state), out

    run = alone(forward, "apply")
    return applied


class Forward:
    """A module that is driven, of whose buffers nothing is kept.

    Args:
        training: the copy follows the model's modes; else it is in evaluation mode.
    """

    def __init__(self, verb: str, model: nn.Module, training: bool = True, compile: bool | Options = False) -> None:
        self.verb, self.driver = verb, Driver(model, compile)
        if not training:
            self.driver.model.eval()
        self.buffers = Buffers(self.driver.model, "local")
        self.settings = Settings(verb, model, self.driver.model, modes=training)

    @contextmanager
    def running(self, state: State) -> Iterator[Driver]:
        """Within, the driver's model has this state's weights and buffers; the driver's state goes on from it."""
        self.settings.follow()
        driver = self.driver
        with driver.running(state, self.verb) as number, seeded(state, number), torch.no_grad():
            self.lend(state)
            try:
                yield driver
            finally:
                self.buffers.restore()

    def lend(self, state: State) -> None:
        """New copies of the state's buffers: within a level of torch.func's, such as may be changed there."""
        self.buffers.lend(state, self.driver.device, collects=False)


pytree = torch_private.pytree
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
