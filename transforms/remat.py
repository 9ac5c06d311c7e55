"""remat, and recomputation across torch.func.jvp.

A region or a part inside of jvp: outside of the level it is a function of values and of tangents.

inside      x, ẋ  ─▶  fn  ─▶  y, ẏ                    dual numbers of the level
outside     (x, ẋ) ─▶ jvp(fn) in a level of its own ─▶ (y, ẏ)        kept, moved or computed again as any other

remat: recompute in the backward instead of keeping activations; some of them kept, or moved to the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import combinations, product
from typing import Any, TypeVar, cast, overload

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from functional_fsdp import ScheduleError, SpecError, TreeError
from functional_fsdp._seams import as_names, torch_private
from functional_fsdp.extend import refuse, traced_as

from ._compile.compile_units import called
from ._modules import (
    Remake,
    contents_by_id,
    copy_of,
    each_leaf,
    map_tensors,
    on_copies,
    once_a_class,
    outermost,
    subclass,
    written,
)
from ._remat.parts import KeptPart, Owner, of_function, part_of
from ._remat.region import Habits, Region, generators_of, in_products

forward_ad = torch_private.forward_ad


def keeps_nothing() -> bool:
    """Whether no graph is made of what is computed: neither here nor in a level of torch.func's."""
    return not torch.is_grad_enabled() and torch_private.saved_hooks_allowed()


def in_one_jvp() -> bool:
    """Whether one jvp is the only transform that is under way."""
    levels = torch_private.func_levels()
    return len(levels) == 1 and levels[0].key() == torch_private.JVP


class Structure:
    """What a function returned, without the tensors that move: in their places are empty ones. Nobody looks into it."""

    def __init__(self, out: Any, moving: dict[int, torch.Tensor]) -> None:
        places = {t: torch.empty(0, device="meta") for t in moving}
        self.out = map_tensors(lambda t: places.get(id(t), t), out)
        self.number = {id(place): i for i, place in enumerate(places.values())}


def across_jvp(run: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any, what: str) -> Any:
    """`fn(*args, **kwargs)` inside of a jvp, by `run(fn, *tensors)` outside of it: fn as one of tensors, values first,
    and then tangents.

    Raises:
        ScheduleError: `what` was called inside of more than one transform, or of another than jvp; fn writes to a
            container that it is given.
    """
    levels = torch_private.func_levels()
    if not in_one_jvp():
        names = ", ".join(str(level.key()).rpartition(".")[2].lower() for level in levels)
        raise ScheduleError(
            f"{what} inside of torch.func's transforms ({names}), other than one jvp: gradients of torch.func's forbid "
            f"saved-tensor hooks, by which it works (torch {torch.__version__}). Take gradients by "
            "T.vjp(T.remat(stage), w, h) or T.forward_backward. Where a loss takes derivatives by torch.func, give it "
            "a model that does not recompute."
        )
    before = contents_by_id(args, kwargs)
    level = levels[0].level()
    values: list[torch.Tensor] = []  # of what is dual
    tangents: list[torch.Tensor] = []
    others: dict[int, torch.Tensor] = {}
    number: dict[int, int] = {}

    def take_apart(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in number and id(t) not in others:
            value, tangent = forward_ad.unpack_dual(t) if t.is_floating_point() or t.is_complex() else (t, None)
            value = torch_private.unwrap_for_grad(value, level)
            if tangent is None:
                others[id(t)] = value
            else:
                number[id(t)] = len(values)
                values.append(value)
                tangents.append(torch_private.unwrap_for_grad(tangent, level))
        return t

    map_tensors(take_apart, (args, kwargs))

    def outside(*given: torch.Tensor) -> Any:
        structure: Any = None

        def inside(*duals: torch.Tensor) -> Any:
            def put(item: Any) -> Any:
                return duals[number[id(item)]] if id(item) in number else others.get(id(item), item)

            made = Remake(put, before)
            given = made(args), made(kwargs)
            found = contents_by_id(*given)
            out = fn(*given[0], **given[1])
            for key in written(found):
                raise ScheduleError(
                    f"{what.partition(':')[0]}: a module in a jvp writes to a {type(found[key][0]).__name__} that it "
                    "was given, and what it writes is of a level that ends with it. Have it return what it writes."
                )
            moving: dict[int, torch.Tensor] = {}

            def look(t: torch.Tensor) -> torch.Tensor:
                if t.is_floating_point() or t.is_complex():
                    moving[id(t)] = t
                return t

            map_tensors(look, out)
            nonlocal structure
            structure = Structure(out, moving)
            return (*moving.values(),)

        n = len(values)
        out, along = torch.func.jvp(inside, given[:n], given[n:])  # type: ignore[misc]
        return structure, *out, *along

    if not values:  # nothing in it moves
        with torch_private.without_func_levels():
            return on_copies(lambda args, kwargs: run(fn, *args, **kwargs), lambda t: others[id(t)], args, kwargs)
    with torch_private.without_func_levels():
        structure, *results = run(outside, *values, *tangents)
    n = len(results) // 2
    duals = [forward_ad.make_dual(*pair) for pair in zip(results[:n], results[n:], strict=True)]

    def put_back(t: torch.Tensor) -> torch.Tensor:
        i = structure.number.get(id(t))
        if i is not None:
            return duals[i]
        while torch_private.is_wrapped(t):  # of the level that is over
            t = torch_private.unwrapped(t)
        return t

    return map_tensors(put_back, structure.out)


M = TypeVar("M", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])
PARTS = (
    "remat: save= and offload= name parts of a model's modules by their paths, and this is a function. In it wrap what "
    "is not to run again: T.saved(attn)(w, h), T.offload(mlp)(w, h)."
)


@overload
def remat(
    what: M, *patterns: str, save: Sequence[str] = (), offload: Sequence[str] = (), products: Sequence[str] = (),
    preserve_rng_state: bool = True,
) -> M: ...  # fmt: skip
@overload
def remat(what: F, *, preserve_rng_state: bool = True) -> F: ...
def remat(
    what: Any, *patterns: str, save: Sequence[str] = (), offload: Sequence[str] = (), products: Sequence[str] = (),
    preserve_rng_state: bool = True,
) -> Any:  # fmt: skip
    """Keep only the inputs of a function, or of some of a model's modules; the rest is computed again in the backward.

    Args:
        what: a function, as a stage that goes to `T.vjp`; or a model, as `init` or `functionalize` gave it.
        patterns: of a model, the paths of the modules that recompute (`"blocks.*"`; the outermost that match).
        save: parts of these modules that do not run again, by their paths in the module (`"attn"`; the outermost that
            match). What such a part keeps for its own backward stays, and its output.
        offload: the same, in the host's memory: it is copied there when the part has run, and comes back while the
            backward is at the module after this one. In a function say `T.saved(fn)` and `T.offload(fn)` of its parts.
        products: parts in which matrix products, convolutions and attention do not run again: their outputs stay, and
            what is between them, as norms and activations, is computed again. What draws random numbers runs again.
        preserve_rng_state: random numbers come again in the recomputation: those of torch's default generators, of
            generators (of torch, numpy or Python) that are given or that a function or a module brings along, and
            Python's and numpy's own: of a module where its first call draws from them. False saves time where there
            are none (no dropout), and is what a captured step by hand needs; in `T.forward_backward` both work in CUDA
            graphs.

    Returns:
        the function, or a copy of the model (a skeleton), that does so. Values and gradients are the same, and so are
        random numbers, buffers, attributes, and lists and dicts that it is given: what the forward makes of these is
        made once, and recomputations find them as it did; of a function, those of modules that it calls by `bind`. A
        container (list, dict, set, deque, ..., within each other) that a module holds, of more than 64 items, goes on
        once if the first call changes it; objects of other classes are not looked into. Within a unit the recomputation
        uses the weights that are gathered for its backward anyway. Such a model is for `T.forward_backward` and
        `T.apply`; around `bind`, wrap the function that binds.

    Bytes that a module which recomputes keeps on the device between its forward and its backward:

        remat(model, "blocks.*")    its inputs
        save=("attn",)              its inputs, what `attn` saves for its backward (what its linear layers are given,
                                    queries, keys and values), and its output if something after it is computed again
        offload=("mlp",)            its inputs. In the host's memory: what `mlp` saves, and its output, as above
        products=("attn", "mlp")    its inputs, and outputs of products, but for those after which nothing is needed

    Of what is saved a storage counts once, whatever views of it there are. Weights and buffers do not count, lent or
    not, and are never moved; nor is what lies on a storage of the module's inputs, or has less than 1024 bytes. Until
    the next module that moves something has ended its forward, what a module has moved is still on the device; in the
    backward that of two modules is. Where only some units of a driven model move something, it stays there as long as
    the units that move nothing leave room for it, and comes back as soon as they and the main gradients do: known from
    the second step on, and counted in units; those that recompute leave what `T.budget` says of them, else nothing.
    Buffers in the host's memory are pinned (on the CPU they are plain memory), used from step to step, and are as many
    as are full at once; CUDA graphs have their own. A part whose output others change in place is run again; from the
    next call on a copy of its output is kept, if it shares no memory with what the part was given. A product whose
    output is changed in place runs again; a change is not seen if it is made outside of the part, to an output that
    left it within a list or another container and is gone then.

    In compiled code (`T.compile`, `torch.compile`, T.compile_units around the module) what is kept is the compiler's
    choice: `remat`, `save` and `products` mean nothing, `offload` is an error. A part may be compiled itself. With
    `compile=True` a unit that recomputes or is moved does so around its compiled code; of one with parts the innermost
    parts are compiled, and what is between them is not. Parts of a unit that itself keeps everything are in its
    compiled code.

    Raises:
        SpecError: a pattern that matches no module, or no part of a module; a module that is never called, as a
            ModuleList; one that is named twice; parts of a function. When it runs: with `second_order=True`, if parts
            are moved.
        ScheduleError: when it runs, for such a model bound by hand; for torch.func around a checkpoint (torch forbids
            saved-tensor hooks there); for `offload` in compiled code; for what was changed in place after it was saved,
            inputs among it; for parts that are called in another order the second time; for a gradient that is taken
            in what is computed again, through a part that is not; for a large buffer that no call has changed before.

    Source: torch.utils.checkpoint, `use_reentrant=False`; the idea is Chen et al. 2016 (arXiv:1604.06174), which parts
    to choose Korthikanti et al. 2022 (arXiv:2205.05198), to move what is kept Rhu et al. 2016 (arXiv:1602.08124).

    Example:
        >>> stage = lambda w, h: fsdp.bind(model.blocks[0], w)(h)
        >>> out, pullback = T.vjp(T.remat(stage), w, batch)
        >>> model = T.remat(model, "blocks.*", save=("attn",), offload=("mlp",))
        >>> forward_backward = T.forward_backward(model, loss_fn)
    """
    inner = {"save": save, "offload": offload, "products": products}
    for name, given in inner.items():
        inner[name] = as_names(f"remat({name})", given)
        if isinstance(given, str):
            raise SpecError(f"remat({name}={given!r}): expected several patterns, as {name}=({given!r},).")
    if not isinstance(what, nn.Module):
        if patterns:
            raise SpecError(f"remat: {', '.join(map(repr, patterns))} are paths in a model, and this is a function.")
        if any(inner.values()):
            raise SpecError(PARTS)
        again = partial(_checkpointed, what, preserve_rng_state)
        again.__wrapped__ = what  # type: ignore[attr-defined]
        return again
    model, owner = copy_of(what), Owner()
    if not patterns:
        raise SpecError("remat(model): name the modules that recompute, as remat(model, 'blocks.*').")
    for path, module in outermost("remat", model, patterns):
        parts = {name: outermost(f"remat({name}=) in {path!r}", module, (*given,)) for name, given in inner.items()}
        _check(path, {name: [one for one, _ in found] for name, found in parts.items()})
        for one, part in parts.pop("products"):
            _become_products(f"{path}.{one}", part)
        for fate, found in parts.items():
            for one, part in found:
                _become_part(f"remat({fate}=)", f"{path}.{one}", part, KeptPart(fate, owner))  # type: ignore[arg-type]
        _become_recomputed(path, module, Habits(owner), preserve_rng_state)
    return model


@overload
def offload(what: M, *patterns: str) -> M: ...
@overload
def offload(what: F) -> F: ...
def offload(what: Any, *patterns: str) -> Any:
    """Move what a function, or some of a model's modules, keep for their backward to the host's memory meanwhile.

    Nothing is computed again: of a call that is so wrapped autograd saves what it always does. It is copied to the host
    at the end of the call, and back while the backward is at the call after it. What is moved, and when memory is free,
    is said at `T.remat`; here inputs are moved, too, where they have gradients.

    Args:
        what: a function, as a stage that goes to `T.vjp`, or a part of one; or a model, as `init` or `functionalize`
            gave it. In a function that recomputes (`T.remat(stage)`) what is so wrapped does not run again.
        patterns: of a model, the paths of the modules (`"blocks.*.mlp"`; the outermost that match).

    Returns:
        the function, or a copy of the model (a skeleton), that does so. Of modules that recompute the inputs are moved:
        `T.offload(T.remat(model, "blocks.*"), "blocks.*")` keeps next to nothing on the device.

    Raises:
        SpecError: a pattern that matches no module. When it runs: ScheduleError under torch.func and in compiled code,
        and for what was changed in place after it was saved; SpecError with `second_order=True`.

    Example:
        >>> model = T.offload(model, "blocks.*.mlp")
        >>> stage = T.remat(lambda w, h: T.offload(mlp)(w["mlp"], T.saved(attn)(w["attn"], h)))
    """
    if not isinstance(what, nn.Module):
        if patterns:
            raise SpecError(f"offload: {', '.join(map(repr, patterns))} are paths in a model, and this is a function.")
        return _wrapped(what, part_of(what, "offload"))
    if not patterns:
        raise SpecError("offload(model): name the modules, as offload(model, 'blocks.*').")
    model, owner = copy_of(what), Owner()
    for path, module in outermost("offload", model, patterns):
        _become_part("offload", path, module, KeptPart("offload", owner))
    return model


def saved(fn: F) -> F:
    """A function that is not run again in one that recomputes: what it keeps for its backward stays, and its output.

    It is for parts of a stage, `T.remat(stage)`; elsewhere it is the function itself. Of a model's modules say so by
    `T.remat(model, "blocks.*", save=("attn",))`.

    Example:
        >>> attn = lambda w, h: h @ w["attn.weight"]
        >>> mlp = lambda w, h: h @ w["mlp.weight"]
        >>> stage = lambda w, h: mlp(w, h + T.saved(attn)(w, h))
        >>> out, pullback = T.vjp(T.remat(stage), w, batch)
    """
    if isinstance(fn, nn.Module):
        raise SpecError("saved: this is a module. Name it by its path: T.remat(model, 'blocks.*', save=('attn',)).")
    return cast(F, _wrapped(fn, part_of(fn, "save")))


FATES = {"save": "saved", "offload": "moved", "products": "one whose products are kept"}


def _check(path: str, parts: dict[str, list[str]]) -> None:
    for (fate, some), (another, others) in combinations(parts.items(), 2):
        for one, other in product(some, others):
            if one == other or one.startswith(f"{other}.") or other.startswith(f"{one}."):
                raise SpecError(
                    f"remat: in {path!r} the part {one!r} is {FATES[fate]} and {other!r} is {FATES[another]}, which "
                    "are one, or one lies in the other. Name each part once."
                )


# ---------------------------------------------------------------- calls


def _in_graph(fn: Callable[..., Any], draws: bool, /, *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


@traced_as(_in_graph)
def _checkpointed(fn: Callable[..., Any], draws: bool, /, *args: Any, **kwargs: Any) -> Any:
    """In a graph `T.vjp` and the compiler say what is kept, and torch has no checkpoints."""
    habits = of_function(fn, "habits", lambda: Habits(Owner()))
    return _checkpoint(fn, None, habits, generators_of(fn, each_leaf((args, kwargs))) if draws else None, args, kwargs)


def _checkpoint(
    fn: Callable[..., Any], module: nn.Module | None, habits: Habits, generators: list[Any] | None,
    args: Any, kwargs: Any,
) -> Any:  # fmt: skip
    if torch_private.func_interpreter() is not None:
        if keeps_nothing():
            return fn(*args, **kwargs)
        again = partial(_checkpoint, module=module, habits=habits, generators=generators)
        run = lambda fn, *args, **kwargs: again(fn, args=args, kwargs=kwargs)  # noqa: E731
        return across_jvp(run, fn, args, kwargs, "remat: nothing is computed again")
    dual = torch_private.forward_ad._current_level >= 0 and not torch_private.func_transforms.JVP_NESTING
    if dual and torch.is_grad_enabled():
        raise ScheduleError(
            "remat: what is computed again, in the backward, is outside of the level of dual numbers, and has no "
            "tangents. Use torch.func.jvp in the place of torch.autograd.forward_ad, or leave remat out."
        )
    region = Region(fn, module, habits, generators)
    return checkpoint(region, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _bound(cls: type[nn.Module], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run a module, whose weights are gone when it runs again if `bind` lent them for the forward."""
    try:
        return called(cls, module, *args, **kwargs)
    except TreeError as error:
        if torch_private.autograd_node() is None:  # it is the forward
            raise
        raise ScheduleError(
            "remat(model, ...) was bound by hand, and its weights are gone when it recomputes. Wrap the function that "
            "binds them, as T.vjp(T.remat(stage), w, h), or use T.forward_backward."
        ) from error


@traced_as(lambda cls, draws, /, *args, **kwargs: _bound(cls, *args, **kwargs))
def _module(cls: type[nn.Module], draws: bool, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    habits = vars(module)["_remat"]
    generators = habits.generators(module) + generators_of(None, each_leaf((args, kwargs))) if draws else None
    return _checkpoint(partial(_bound, cls, module), module, habits, generators, args, kwargs)


def _part_in_graph(part: KeptPart, fn: Callable[..., Any], args: Any, kwargs: Any, module: Any = None) -> Any:
    if part.fate == "offload":
        said = (
            "offload: compiled code keeps what its compiler chooses, and moves nothing to the host's memory. Leave "
            "offload out, compile the part itself (T.compile_units), or run this eagerly."
        )
        refuse("ScheduleError", said)
    return fn(*args, **kwargs)


@traced_as(_part_in_graph)
def _part(part: KeptPart, fn: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module | None = None) -> Any:
    if torch_private.func_interpreter() is not None:
        if keeps_nothing() or (part.fate == "save" and not in_one_jvp()):
            return fn(*args, **kwargs)
        across = partial(part, module=module)
        run = lambda fn, *args, **kwargs: across(fn, args, kwargs)  # noqa: E731
        return across_jvp(run, fn, args, kwargs, "offload: nothing is moved")
    return part(fn, args, kwargs, module)


@traced_as(lambda fn, args, kwargs: fn(*args, **kwargs))
def _products(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """In compiled code the compiler says what is kept."""
    return in_products(fn, args, kwargs)


def _wrapped(fn: Callable[..., Any], part: KeptPart) -> Callable[..., Any]:
    @wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return _part(part, fn, args, kwargs)

    return call


# ---------------------------------------------------------------- classes


def _become_recomputed(path: str, module: nn.Module, habits: Habits, draws: bool) -> None:
    """Have a module's calls be those of one that recomputes."""
    _refuse("remat", path, module, "_remat", "recomputes already")
    module.__dict__["_remat"] = habits
    module.__class__ = _recomputed(type(module), draws)


@once_a_class
def _recomputed(cls: type[nn.Module], draws: bool) -> type[nn.Module]:
    """The class of a module that recomputes."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _module(cls, draws, self, *args, **kwargs)

    return subclass(cls, __call__=__call__, _around=cls)


def _become_part(verb: str, path: str, module: nn.Module, part: KeptPart) -> None:
    """Have a module's calls be those of a part."""
    there = vars(module).get("_part")
    if there is not None and (there.owner, there.fate) == (part.owner, part.fate):  # shared by two that recompute
        return
    _refuse(verb, path, module, "_part", "is saved or moved already")
    module.__dict__["_part"] = part
    module.__class__ = _as_part(type(module))


@once_a_class
def _as_part(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a module whose calls are those of a part."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _part(vars(self)["_part"], partial(called, cls, self), args, kwargs, self)

    return subclass(cls, __call__=__call__, _around=cls)


def _become_products(path: str, module: nn.Module) -> None:
    """Have a module's products be kept within what recomputes."""
    if "_products" not in vars(module):  # else shared by two that recompute
        _refuse("remat(products=)", path, module, "_part", "is saved or moved already")
        module.__dict__["_products"] = True
        module.__class__ = _with_products(type(module))


@once_a_class
def _with_products(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a module whose products are kept."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _products(partial(called, cls, self), args, kwargs)

    return subclass(cls, __call__=__call__, _around=cls)


def _refuse(verb: str, path: str, module: nn.Module, mark: str, already: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):  # whose calls cannot be others
        raise SpecError(f"{verb}: {path!r} is a torch.jit module. Name a module around it, or give the one it is of.")
    if type(module).forward is nn.Module.forward:
        raise SpecError(
            f"{verb}: {path!r} is a {type(module).__name__}, which is never called. Name what is in it, as "
            f"{path + '.*'!r}."
        )
    if mark in vars(module):
        raise SpecError(f"{verb}: the module {path!r} {already}. Name it once.")
