"""Placeholders: what stands in a parameter's place in a driven module while its weight is not there.

Shape, dtype and device are the weight's. Used in an operation outside its unit module (a tied head that reads
`self.embed.weight`, a class token), it is the weight: gathered, copied for this use, and released.

An `autograd.Function` takes the placeholder itself for its input: torch asks no tensor's class about it. So a
placeholder of a weight that trains hangs in a graph of its own, made once, and its gradient arrives there:

    token ──▶ Origin ──▶ `Placeholders` of each unit ──▶ placeholders ──▶ a Function, in some forward

Inputs of unit modules: their dtype beside that of the weights.

`Precision(inputs=True)` casts floating inputs to the dtype that the unit module computes in. Without it they are left
alone, and where torch then refuses to compute, the error says which module, which dtypes and what to do.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from functional_fsdp import FsdpError, SpecError, State
from functional_fsdp._seams import changed, local_part, torch_private
from functional_fsdp.extend import Placeholder

from .._modules.unit_modules import Leaf, UnitModule, map_tensors, tensors_in
from .buffers import version
from .unit_uses import Gradients, refuse_inner_gradient, refuse_second_order

if TYPE_CHECKING:
    from .driver import Driver


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
