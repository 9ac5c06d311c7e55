"""Where a unit's weights are used: placeholders, and one use of a unit module.

    WeightPlaceholder, Placeholders    what stands in a parameter's place while its weight is not there
    cast_to, check_dtypes              inputs of unit modules, and their dtypes
    UnitUse, Weights, Outputs          one use in a forward, and what the backward does when it comes to it
    Uses                               how far a pass is

Placeholders: what stands in a parameter's place in a driven module while its weight is not there.

Shape, dtype and device are the weight's. Used in an operation outside its unit module (a tied head that reads
`self.embed.weight`, a class token), it is the weight: gathered, copied for this use, and released.

An `autograd.Function` takes the placeholder itself for its input: torch asks no tensor's class about it. So a
placeholder of a weight that trains hangs in a graph of its own, made once, and its gradient arrives there:

    token ──▶ Origin ──▶ `Placeholders` of each unit ──▶ placeholders ──▶ a Function, in some forward

Inputs of unit modules: their dtype beside that of the weights.

`Precision(inputs=True)` casts floating inputs to the dtype that the unit module computes in. Without it they are left
alone, and where torch then refuses to compute, the error says which module, which dtypes and what to do.

`UnitUse`: one use of a unit module in a forward, and what the backward does when it comes to it.

    its weights    went in through `Weights`, whose backward has all of their gradients:    reduce(state, grads, unit)
    its outputs    went out through `Outputs`, whose backward comes before anything in it:  unshard(state, units)

autograd runs what was made last first, so between a unit module's `Outputs` and its `Weights` there is nothing but the
unit module, and what its residuals point at is there.

`Uses`: how far a pass is, for what goes by that. A driver says it at each use of a unit.

USES[device].used(driver, forward, backward, gradients)   the so many-th use of its forward, and of its backward
                                                          (0: not yet); bytes of main gradients that a use leaves
USES[device].used(driver, 0, 0, 0)                        the pass is over
USES[device].recomputes(keeps)                            in the use that runs a region does, which keeps this share

Only units that have at least half of the mean of weights count: what a norm keeps is no measure of what a block does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn as nn
from torch.autograd.profiler import record_function

from functional_fsdp import FsdpError, Layout, ScheduleError, SpecError, State
from functional_fsdp._seams import changed, local_part, torch_private
from functional_fsdp.extend import Placeholder

from .._modules import Leaf, UnitModule, map_tensors, tensors_in
from .buffers import version

if TYPE_CHECKING:
    from .driver import Driver
    from .unit_calls import UnitCall

Precisions = dict[str, tuple[torch.dtype, bool]]


def precisions(state: State) -> Precisions:
    """By path, tied ones included: the dtype in which a leaf computes, and whether inputs are cast to it."""
    compute = {leaf.path: b.seen_dtype(leaf) for b in state.layout.buckets.values() for leaf in b.leaves}
    names: dict[str, list[str]] = {}
    for path, source in zip(state.layout.paths, state.layout.source, strict=True):
        names.setdefault(source, [source]).append(path)
    inputs = {source: state.spec.precision_of(*dict.fromkeys(paths)).inputs for source, paths in names.items()}
    return {p: (compute[s], inputs[s]) for p, s in zip(state.layout.paths, state.layout.source, strict=True)}


def dtypes_of(unit_module: UnitModule, precisions: Precisions) -> tuple[tuple[torch.dtype, ...], torch.dtype | None]:
    """The floating dtypes that a unit module computes in, and the one to which its inputs are cast.

    Raises:
        SpecError: they would have to be cast to two.
    """
    found = [precisions[path] for path, _ in unit_module.leaves if precisions[path][0].is_floating_point]
    cast = [*dict.fromkeys(dtype for dtype, inputs in found if inputs)]
    if len(cast) > 1:
        raise SpecError(
            f"Precision(inputs=True): the module {unit_module.path!r} has weights that compute in {cast[0]} and in "
            f"{cast[1]}, so its inputs cannot be cast to both. Say inputs=True in one of the rules only."
        )
    return tuple(dict.fromkeys(dtype for dtype, _ in found)), cast[0] if cast else None


def cast_to(dtype: torch.dtype, t: torch.Tensor) -> torch.Tensor:
    """A floating tensor in this dtype; another one as it is."""
    return t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t


def refuse_dtypes(
    error: Exception, given: Any, dtypes: tuple[torch.dtype, ...], where: str, module: nn.Module | None = None,
    path: str = "",
) -> None:  # fmt: skip
    """Raise what an error means if it comes from inputs, or buffers of the module at this path, of another floating
    dtype than the weights have.

    Raises:
        SpecError: it does.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, FsdpError) or not dtypes:
        return
    if not any(word in str(error) for word in SAID):
        return
    others = [t.dtype for t in tensors_in(given) if t.is_floating_point() and t.dtype not in dtypes]
    if others:
        raise SpecError(
            f"{where} computes in {' and '.join(map(_name, dtypes))} and was given {_name(others[0])}. Cast the batch, "
            f"as x.to({dtypes[0]}); or have the floating inputs of modules cast: Precision(compute={dtypes[0]}, "
            "inputs=True)."
        ) from error
    for name, buffer in module.named_buffers() if module is not None else ():
        if buffer.is_floating_point() and buffer.dtype not in dtypes:
            part = ".".join(filter(None, (path, name.rpartition(".")[0], "*")))
            raise SpecError(
                f"the module {path!r} computes in {' and '.join(map(_name, dtypes))} and has the buffer {name!r} in "
                f"{_name(buffer.dtype)}: buffers keep their dtype. Have the leaves that meet it compute in "
                f"{_name(buffer.dtype)}, by a rule before the others: Spec(precision={{{part!r}: Precision(), "
                f"'*': Precision(compute={dtypes[0]})}}), which takes inputs in {_name(buffer.dtype)}; or cast it in "
                f"the forward. torch says: {str(error).splitlines()[0]}"
            ) from error


def note_module(error: Exception, path: str, given: Any) -> None:
    """Have an error of a module's own code say in which unit it was raised, and what that was called with.

    The innermost unit is named.
    """
    tensors = [f"{_name(t.dtype)} {[*t.shape]}" for t in tensors_in(given)]
    where = f"the module {path!r}" if path else "the model itself"
    note_place(error, f"In {where}, called with {', '.join(tensors) or 'no tensors'}.")


def note_place(error: Exception, where: str) -> None:
    """Have an error say where it was raised, if nothing does. Errors of this package say it by themselves; Python 3.10
    has no notes."""
    if not isinstance(error, FsdpError) and not getattr(error, "__notes__", None) and hasattr(error, "add_note"):
        error.add_note(where)


def check_dtypes(func: Any, args: Any) -> None:
    """Raise torch's RuntimeError for a product of tensors of several dtypes, which fake tensors let pass."""
    if func in PRODUCTS:
        found = [*dict.fromkeys(t.dtype for t in args if isinstance(t, torch.Tensor))]
        if len(found) > 1:
            raise RuntimeError(f"{func}: tensors must have the same dtype, but got {' and '.join(map(_name, found))}")


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.mv.default,
            torch.ops.aten.addmv.default}  # fmt: skip
SAID = ("dtype", "scalar type", "Input type", "data type")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


VALUES = ("T", "H", "mT", "mH", "data", "real", "imag")  # attributes that are more than metadata
LEAF = {"is_leaf": True, "grad_fn": None, "output_nr": 0}  # attributes of a parameter, whatever graph it is in


class WeightPlaceholder(Placeholder):
    """A parameter's place: metadata as it is, and a weight of its own for each operation."""

    home: tuple[Driver, Leaf]
    path: str

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype, requires_grad: bool = False) -> WeightPlaceholder:
        """A tensor that nothing can read but through its class."""
        made: WeightPlaceholder = torch_private.make_wrapper(
            WeightPlaceholder, tuple(shape), dtype=dtype, device="meta", requires_grad=requires_grad
        )
        return made

    def value(self) -> torch.Tensor:
        """A copy of the weight, differentiable where it trains."""
        driver, leaf = self.home
        copied = driver.leaf(leaf)
        driver.note(self.path, copied)
        return copied if self.form is None else self.form(copied)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        attribute = func.__self__.__name__ if name in ("__get__", "__set__") else ""
        if name == "__get__":
            if attribute in ("device", "is_cuda", "is_cpu", "is_meta"):
                with torch_private.NoTorchFunction():
                    device = args[0].home[0].device
                return device if attribute == "device" else attribute == f"is_{device.type}"
            if attribute in LEAF:
                return LEAF[attribute]
            if attribute == "grad_dtype":
                return args[0].dtype
            known = attribute not in VALUES
        else:
            known = name in cls.answers
        if name == "__set__" and attribute == "data":
            raise changed([args[0].path], "by .data =")
        if func is torch.autograd.grad:
            refuse_inner_gradient()
        if known:
            return super().__torch_function__(func, types, args, kwargs)

        copies: list[tuple[torch.Tensor, int, WeightPlaceholder]] = []

        def value(t: torch.Tensor) -> torch.Tensor:
            if type(t) is not cls:
                return t
            driver, leaf = t.home
            copies.append((copied := driver.leaf(leaf), version(copied), t))
            return copied if t.form is None else t.form(copied)

        given = map_tensors(value, args), map_tensors(value, kwargs or {})
        try:
            out = func(*given[0], **given[1])
        except RuntimeError as error:
            if copies:
                refuse_dtypes(error, given, (copies[0][0].dtype,), f"the weight {copies[0][2].path!r}")
            raise
        for copied, before, placeholder in copies:
            if version(copied) != before:
                raise changed([placeholder.path], f"in place, by {name}")
            placeholder.home[0].note(placeholder.path, local_part(out) if attribute == "data" else copied)
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """An operation of torch's own code, as on an input that a Function returns: autograd has done its part."""

        def value(t: torch.Tensor) -> torch.Tensor:
            return t.home[0].leaf(t.home[1]).detach() if type(t) is cls else t

        return func(*map_tensors(value, args), **map_tensors(value, kwargs or {}))


# ---------------------------------------------------------------- gradients


class Places:
    """The placeholders of a driver, by path, and the nodes of the graph in which those of weights that train hang.

    Args:
        wanted: {path: (leaf, shape, dtype, whether it requires a gradient if it does not train)}.
    """

    def __init__(self, driver: Driver, wanted: Mapping[str, tuple[Leaf, Sequence[int], torch.dtype, bool]]) -> None:
        self.token = torch.zeros((), device="cpu", requires_grad=True)  # on the host: no stream has to do with it
        self.nodes: dict[str, Any] = {}
        self.at: dict[str, WeightPlaceholder] = {}
        trained: dict[str, list[str]] = {}
        for path, (leaf, shape, dtype, requires_grad) in wanted.items():
            if driver.trains(leaf):
                trained.setdefault(leaf[0], []).append(path)
            else:
                self.at[path] = WeightPlaceholder.of(shape, dtype, requires_grad)
        origins = Origin.apply(self.token, len(trained))
        self.origin = origins[0].grad_fn if origins else None
        for (unit, paths), origin in zip(trained.items(), origins, strict=True):
            keys = [driver.keys[unit].index(wanted[path][0][1]) for path in paths]
            found = Placeholders.apply(origin, weakref.ref(driver), unit, keys, [wanted[path][1:3] for path in paths])
            with torch_private.NoTorchFunction():
                self.nodes[unit] = found[0].grad_fn
            self.at.update(zip(paths, found, strict=True))
        for path, placeholder in self.at.items():
            placeholder.home, placeholder.path = (driver, wanted[path][0]), path

    def given(self) -> list[str]:
        """In a backward that has begun: the units of which a Function was given a weight outside of its module."""
        if self.origin is None or not torch_private.will_execute(self.origin):
            return []
        return [unit for unit, node in self.nodes.items() if torch_private.will_execute(node)]


class Origin(torch.autograd.Function):
    """What all nodes of a driver's placeholders hang on: it runs if one of them does."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, units: int) -> tuple[torch.Tensor, ...]:
        return tuple([torch.zeros((), device="cpu") for _ in range(units)])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


class Placeholders(torch.autograd.Function):
    """Makes the placeholders of one unit. Its backward has the gradients of weights that Functions were given."""

    @staticmethod
    def forward(ctx: Any, origin: torch.Tensor, driver: Any, unit: str, keys: list[int], like: list[Any]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.driver, ctx.unit, ctx.keys = driver, unit, keys
        return tuple([WeightPlaceholder.of(*one) for one in like])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            refuse_second_order()
        driver = ctx.driver()
        if not driver.backward:
            refuse_inner_gradient()
        total: Gradients = [None] * len(driver.keys[ctx.unit])
        for i, grad in zip(ctx.keys, grads, strict=True):  # tied leaves have several places
            if grad is not None:
                total[i] = grad if (before := total[i]) is None else before + grad
        driver.collect(ctx.unit, total)
        return (None,) * 5


def values(tree: Any) -> Any:
    """The same with copies of weights where placeholders stand."""
    return map_tensors(lambda t: t.value() if type(t) is WeightPlaceholder else t, tree)


Gradients = list[torch.Tensor | None]
Trained = Mapping[str, Sequence[tuple[int, int]]]
Inputs = dict[int, tuple[torch.Tensor, int]]  # by id: inputs that are differentiated, and their versions when they came

SECOND = (
    "units that are gathered one at a time. Keep all of them gathered for that: T.forward_backward(model, loss_fn, "
    "second_order=True). By inputs torch.func.grad and its like need no option."
)


def opened(name: str) -> Callable[[], None]:
    """Begin a range that does not end where it began. Returns what ends it, once."""
    held = [record_function(f"fsdp {name}")]
    held[0].__enter__()

    def close() -> None:
        while held:
            held.pop().__exit__(None, None, None)

    return close


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
        "Nothing was gathered for the trace, and the state goes on. torch.cond traces its branches: call units outside "
        "of them. To compile units: T.forward_backward(..., compile=True), or T.compile_units; the whole step: "
        "T.compile. To export or trace the model: fsdp.as_module(model, state). For derivatives of derivatives: "
        "T.forward_backward(..., second_order=True)."
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


USES: dict[torch.device, Any] = {}  # who is told, by the device that computes


class Uses:
    """The uses of a driver's passes, on a device that is in `USES`."""

    def __init__(self, layout: Layout) -> None:
        sizes = {unit.name: sum(bucket.numel for bucket in unit.buckets) for unit in layout.units}
        self.large = {name for name, size in sizes.items() if 2 * size * len(sizes) >= sum(sizes.values())}
        trained = [b for b in layout.trainable.values() if b.unit in self.large and not b.grads_on_host]
        finished = sum(b.numel // b.slices("main") * b.grads.itemsize for b in trained)
        self.gradients = finished // max(len(self.large), 1)  # bytes that a large unit leaves on the device
        self.fresh = True
        self.passed = [0, 0]

    def begin(self, fresh: bool) -> None:
        """A pass begins. fresh: its gradients are the first of their step; later ones add to what there is."""
        self.fresh = fresh

    def count(self, driver: Any, units: Sequence[str], backward: bool) -> None:
        """These units are used, in the forward or in the backward."""
        if not self.large.isdisjoint(units):
            self.passed[backward] += 1
            forward, backwards = self.passed
            USES[driver.device].used(driver, forward, backwards, self.fresh * self.gradients)

    def end(self, driver: Any) -> None:
        """The pass is over."""
        self.passed = [0, 0]
        USES[driver.device].used(driver, 0, 0, 0)
