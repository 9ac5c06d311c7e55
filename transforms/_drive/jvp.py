"""jvp, pullback, linearize: derivatives of a driven model by its weights, with vectors that are sharded as the weights.

    jvp         v  ─▶  J v       forward: beside each unit its part of v is gathered
    pullback    c  ─▶  Jᵀ c      forward and backward: each unit's part is reduced, as gradients are

Such a vector is `{bucket: FlatBuffer}`, as gradients and main weights are, so sums and products of vectors are those of
shards. J is of this rank's data, and Jᵀ c is averaged over the data ranks, as gradients are.

Lifted: the weights of a driven model as a level of torch.func's has them, inside of a loss function.

    Tangents    of a jvp     dual numbers: a weight, and its part of a vector that is sharded as the weights are
    Members     of a vmap    leaves [E, ...] as one of their E members has them
    Samples     of a vmap    leaves of which each sample has one, so that gradients are each sample's
    Primals     of a vjp     in a jvp: leaves whose gradients move, by which the Hessian is multiplied

A unit is gathered outside of all levels, see `unit_calls`. Its weights are lifted where they enter a call. What a lift
gathers for that lies beside the unit, from each of its gathers to its release; in a backward at the same address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from functional_fsdp import FlatBuffer, ScheduleError, SpecError, State, TreeError
from functional_fsdp._seams import expect, torch_private
from functional_fsdp.extend import Session, alone, lineage_of, separate_gradients, shards

from .._modules import Leaf
from ..norms import Buffers, check_tree
from .driver import Driver, eager_only
from .forward_backward import Forward, apply, forward_backward
from .unit_calls import outside_levels
from .unit_uses import Gradients, WeightPlaceholder, no_output, values

pytree = torch_private.pytree
OPERATORS = torch_private.OpOverload, torch_private.OpOverloadPacket


def moved(fn: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """`fn(model, *args)` of a driven model, as its weights move: `run(model, tangents, *args) -> out, tangent of out`.

    Args:
        fn: returns a pytree of tensors.
    """

    def run(model: nn.Module, tangents: Buffers, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        driver = driver_of(model)
        zero = torch.zeros((), device=driver.device)  # torch's jvp wants an input

        def inside(_: torch.Tensor) -> Any:
            along = Tangents(driver, tangents)
            with driver.levels.lifting(along, driver.weights), Operators(along) if driver.operators else nullcontext():
                return values(fn(model, *args, **kwargs))

        try:
            out, along = torch.func.jvp(inside, (zero,), (zero,))  # type: ignore[misc]
        except RuntimeError as error:
            if "out of bounds for storage of size 0" in str(error):  # of tangents that were released
                raise ScheduleError(
                    "a gradient came to the inside of a unit by a tensor that is no output of its module: one kept in "
                    "an attribute, say. Return the tensor."
                ) from error
            raise
        return out, along

    return run


def vmap(
    fn: Callable[..., Any], in_dims: Any = None, out_dims: Any = 0, randomness: str = "different"
) -> Callable[..., Any]:
    """`fn(model, *args)` for each member of an ensemble, whose leaves are stacked: inside of a driven function.

    Args:
        fn: a function of one member, and of what else it is given. It returns tensors.
        in_dims: for each of `args` what torch.func.vmap takes; None: all members are given the same.
        out_dims: as of torch.func.vmap: where the members are in the results.
        randomness: as of torch.func.vmap, for dropout.

    Returns:
        `run(model, *args)`, with the results of the E members stacked, [E, ...]. It is for the functions that `apply`,
        `forward_backward` and `jvp` are given.

    The state is made of the skeleton of one member and of leaves [E, ...], as by `torch.stack` or
    `torch.func.stack_module_state`. A unit of all members is gathered at once, and its gradients are reduced at once.
    Buffers are the same for all.

    Raises:
        TreeError: leaves that are not [E, *shape in the module]. ScheduleError: a model that is not driven.

    Collective: none of its own.

    Example:
        >>> params = {path: torch.stack([leaf, leaf * 0.5]) for path, leaf in fsdp.full_params(state).items()}
        >>> both = fsdp.shard(params, state.spec, fsdp.sgd(lr=1e-2))
        >>> losses = T.vmap(loss_fn)
        >>> both, loss = T.forward_backward(model, lambda model, batch: losses(model, batch).sum())(both, batch)
    """

    expect("vmap(fn)", fn, Callable, "a function of (model, ...)")
    if randomness not in ("error", "different", "same"):
        raise SpecError(f"vmap(randomness={randomness!r}): expected 'error', 'different' or 'same'.")

    def run(model: nn.Module, *args: Any) -> Any:
        driver = driver_of(model)
        size = members_of(driver, model)
        dims = (None,) * len(args) if in_dims is None else in_dims if isinstance(in_dims, tuple) else (in_dims,)

        def inside(_: torch.Tensor, *args: Any) -> Any:
            with each_in(driver, Members()):
                return values(fn(model, *args))

        each = torch.zeros(size, device=driver.device)
        return torch.func.vmap(inside, (0, *dims), out_dims, randomness)(each, *args)

    return run


def driver_of(model: nn.Module) -> Driver:
    """Who drives this copy of a module, whose weights are placeholders."""
    for p in model.parameters():
        if type(p) is WeightPlaceholder and p.home[0].state is not None:
            return p.home[0]
    raise ScheduleError(
        f"T.vmap: a {type(model).__name__} that is not driven. Call it inside of a function of T.forward_backward, "
        "T.apply or T.jvp, with the model that this is given."
    )


def members_of(driver: Driver, model: nn.Module) -> int:
    """How many members an ensemble has: leaves are [E, *shape in the module]."""
    size = 0
    leaves = driver.state.layout.leaves
    for path, p in model.named_parameters():
        if type(p) is not WeightPlaceholder or path not in leaves:  # tied leaves have one of their paths
            continue
        shape = tuple(leaves[path].shape)
        size = size or (shape[0] if shape else 0)
        if not size or shape != (size, *p.shape):
            raise TreeError(
                f"T.vmap: the leaf {path!r} has shape {shape}, and {tuple(p.shape)} in the module; expected "
                f"{(size or 'E', *p.shape)}: the leaves of E members, stacked along dim 0 (torch.stack)."
            )
    return size


@contextmanager
def at_level(level: int) -> Iterator[None]:
    """Within, this level of torch.func's is the innermost one."""
    with ExitStack() as stack:
        while (here := torch_private.func_interpreter()) is not None and here.level() > level:
            stack.enter_context(torch_private.without_innermost_level())
        yield


class Tangents:
    """Weights move along a vector: they are dual numbers of the jvp that is the innermost level where this is made.

    torch wants a tangent to lie in its storage as the weight does, or makes one that does, of all of the storage. So a
    dual number is made of a copy of the weight, in a storage like the tangent's. A release frees both storages, and a
    gather fills them again, under the tensors that residuals have.
    """

    def __init__(self, driver: Driver, vector: Buffers) -> None:
        self.driver, self.vector = driver, vector
        self.level = torch_private.func_interpreter().level()
        self.units: dict[str, Moving] = {}

    def gather(self, units: Sequence[str]) -> None:
        """Their tangents are needed.

        Collective: an all-gather for each bucket that trains, which compute waits for.
        """
        for name in units:
            if name not in self.units:
                self.units[name] = Moving(self.driver.state.layout.by_name[name], self.vector, self.driver.device)
            self.units[name].fill(self.driver.weights[name])

    def release(self, units: Sequence[str]) -> None:
        """They are not needed until they are gathered again."""
        for name in units:
            self.units[name].free()

    def lift(self, tensors: Sequence[torch.Tensor], leaves: Sequence[Leaf], copied: bool = False) -> list[torch.Tensor]:
        """These weights, as dual numbers where they train. `copied`: they are copies, which outlive the release."""
        lifted = [*tensors]
        with at_level(self.level), torch_private.forward_ad._set_fwd_grad_enabled(True):
            for i, (unit, key) in enumerate(leaves):
                if key in self.units[unit].pairs:
                    weight, tangent = self.units[unit].pairs[key]
                    pair = (tensors[i], tangent.clone()) if copied else (weight, tangent)
                    lifted[i] = torch_private.forward_ad.make_dual(*pair)
        return lifted

    def both(self, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A tensor, and how it moves."""
        while torch_private.is_wrapped(t) and torch_private.level_of(t) > self.level:
            t = torch_private.unwrapped(t)
        with at_level(self.level), torch_private.forward_ad._set_fwd_grad_enabled(True):
            return torch_private.forward_ad.unpack_dual(t)

    def lent(self, t: torch.Tensor) -> bool:
        """Whether a tensor, or how it moves, lies in bytes that a release frees: `x + w` moves as `w` does."""
        both = self.both(t)
        bases = [torch_private.base_of(t) for t in both if t is not None]
        dense = [t for t in bases if t.layout is torch.strided and not t._is_zerotensor()]
        places = {t.untyped_storage()._cdata for t in dense}
        return any(not places.isdisjoint(unit.places) for unit in self.units.values())


class Operators(TorchFunctionMode):
    """Within, an operator of torch.library that has no forward-mode derivative is refused, if what it is given moves:
    torch takes what it gives to stand still (torch 2.13). A model whose first call has none is not watched any more, as
    that takes a quarter of the host's time."""

    def __init__(self, tangents: Tangents) -> None:
        super().__init__()
        self.tangents, self.found = tangents, False

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self.tangents.driver.note_operators(self.found or error is not None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not isinstance(func, OPERATORS) or str(func).startswith("aten."):
            return out
        self.found = True
        by_rule = not torch_private.forward_ad._is_fwd_grad_enabled()  # of an autograd.Function around it
        numbers = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        indices = bool(numbers) and not any(t.is_floating_point() for t in numbers)  # these have no derivative
        if not (by_rule or indices) and self.moves((args, kwargs)) and not self.moves(numbers):
            raise ScheduleError(
                f"T.jvp, T.hvp: the operator {str(func)!r} has no forward-mode derivative, and what it is given moves "
                "with the weights: torch would take what it gives to stand still. Call it in the forward of a "
                "torch.autograd.Function that has a jvp; or give it x.detach(), if it is to stand still."
            )
        return out

    def moves(self, tree: Any) -> bool:
        """Whether a tensor in it moves."""
        tensors = [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        return any(self.tangents.both(t)[1] is not None for t in tensors)


class Moving:
    """A unit's weights that train, copied, and their tangents, in storages that are there from `fill` to `free`.

    Attributes:
        pairs: {key: (weight, tangent)}.
    """

    def __init__(self, unit: Any, vector: Buffers, device: torch.device) -> None:
        self.pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.wholes: list[tuple[FlatBuffer, torch.Tensor, torch.Tensor]] = []
        keys = dict(zip(unit.paths, unit.keys, strict=True))
        for bucket in unit.buckets:
            if bucket.trainable:
                weights, tangents = (torch.empty(bucket.numel, dtype=bucket.compute, device=device) for _ in range(2))
                for leaf in bucket.leaves:
                    a, b = (t.narrow(0, leaf.offset, leaf.numel).view(leaf.shape) for t in (weights, tangents))
                    self.pairs[keys[leaf.path]] = a, b
                # Written by tensors of another version: residuals are what they were.
                self.wholes.append((vector[bucket.name], weights.data, tangents.data))
        self.copies = [weight.data for weight, _ in self.pairs.values()]
        self.places = {t.untyped_storage()._cdata for _, *both in self.wholes for t in both}
        self.sizes = [weights.nbytes for _, weights, _ in self.wholes]
        self.there = False

    def fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Gather the tangents, beside a unit that is gathered."""
        if self.there:
            return
        self.there = True
        for (vector, *both), size in zip(self.wholes, self.sizes, strict=True):
            for whole in both:
                whole.untyped_storage().resize_(size)
            vector.gather(both[1])
        if self.copies:
            torch_private.foreach_copy_(self.copies, [weights[key] for key in self.pairs])

    def free(self) -> None:
        """Their bytes are given back."""
        self.there = False
        for _, *both in self.wholes:
            for whole in both:
                whole.untyped_storage().resize_(0)


class Members:
    """Leaves [E, ...], each as one of E members has it: batched by the vmap that is the innermost level where this is
    made. Nothing lies beside them."""

    def __init__(self) -> None:
        self.level = torch_private.func_interpreter().level()

    def gather(self, units: Sequence[str]) -> None: ...

    def release(self, units: Sequence[str]) -> None: ...

    def lent(self, t: torch.Tensor) -> bool:
        return False

    def lift(self, tensors: Sequence[torch.Tensor], leaves: Sequence[Leaf], copied: bool = False) -> list[torch.Tensor]:
        """These weights, as one member's."""
        with at_level(self.level):
            return [torch_private.add_batch_dim(t, 0, self.level) for t in tensors]


class Samples(Members):
    """Leaves of which each of B samples has one, as `Driver.spread` makes them, so that gradients are each sample's."""

    def lift(self, tensors: Sequence[torch.Tensor], leaves: Sequence[Leaf], copied: bool = False) -> list[torch.Tensor]:
        """These weights, as one sample's where they are differentiated."""
        with at_level(self.level):
            return [torch_private.add_batch_dim(t, 0, self.level) if t.requires_grad else t for t in tensors]


@contextmanager
def each_in(driver: Driver, members: Members) -> Iterator[None]:
    """Within, inside of a vmap, the model computes with the weights of each member, or sample."""
    with driver.levels.lifting(members, driver.weights), PaddedEmbeddings():
        yield


class PaddedEmbeddings(TorchFunctionMode):
    """Within, `F.embedding` gives its row at `padding_idx` no gradient, whatever is batched: torch's vmap forgets
    `padding_idx` where weights and indices are both batched (torch 2.13)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return _padded(out, *args, **(kwargs or {})) if func is F.embedding else out


def _padded(
    out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    if padding_idx is None:
        return out
    found: torch.Tensor = WithoutGradient.apply(out, (input == padding_idx % weight.size(0)).unsqueeze(-1))
    return found


class WithoutGradient(torch.autograd.Function):
    """A tensor [..., n] as it is, whose gradient is zero where `which` [..., 1] says. It moves as it does."""

    @staticmethod
    def forward(t: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return t.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.masked_fill(ctx.saved_tensors[0], 0), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return tangent.clone()

    @staticmethod
    def vmap(info: Any, dims: Any, t: torch.Tensor, which: torch.Tensor) -> Any:
        if dims[0] is None:
            t = t.expand(info.batch_size, *t.shape)
        first = [one if dim is None else one.movedim(dim, 0) for one, dim in ((t, dims[0] or 0), (which, dims[1]))]
        return WithoutGradient.apply(*first), 0


class Primals(Members):
    """Weights are what the vjp is taken by that is the innermost level where this is made, inside of a jvp: what comes
    back to them moves, and its tangents are the driver's to reduce, in the place of gradients."""

    def __init__(self, driver: Driver, anchor: torch.Tensor) -> None:
        super().__init__()
        self.driver, self.anchor = driver, anchor

    def lift(self, tensors: Sequence[torch.Tensor], leaves: Sequence[Leaf], copied: bool = False) -> list[torch.Tensor]:
        """These weights, as this level differentiates by them where they train."""
        lifted, trained = [*tensors], [i for i, leaf in enumerate(leaves) if self.driver.trains(leaf)]
        if trained:
            use = Use(self.driver, [leaves[i] for i in trained], copied)
            with at_level(self.level):
                found = Primal.apply(use, self.anchor, *[tensors[i] for i in trained])
            for i, t in zip(trained, found, strict=True):
                lifted[i] = t
        return lifted


class Use:
    """Weights as they went into a level once; and the tangents of the gradients that came back."""

    def __init__(self, driver: Driver, leaves: Sequence[Leaf], copied: bool) -> None:
        self.driver, self.leaves, self.copied = driver, leaves, copied
        self.units = tuple(dict.fromkeys(unit for unit, _ in leaves))
        self.moved: Gradients = [None] * len(leaves)
        driver.await_gradients(self.units)

    def done(self) -> None:
        """All of them are there."""
        driver = self.driver
        if not self.copied and not all(unit in driver.weights for unit in self.units):
            raise no_output(next(call for call in driver.unit_calls if {*self.units} <= {*call.units}))
        found: dict[str, Gradients] = {unit: [None] * len(driver.keys[unit]) for unit in self.units}
        for (unit, key), t in zip(self.leaves, self.moved, strict=True):
            found[unit][driver.keys[unit].index(key)] = t
        with outside_levels():
            for unit, grads in found.items():
                driver.collect(unit, grads)


class Primal(torch.autograd.Function):
    """Weights as they are. Its backward hands the tangents of their gradients on."""

    @staticmethod
    def forward(use: Use, anchor: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([t.detach() for t in weights])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.use = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        there = [i for i, t in enumerate(grads) if t is not None]
        if there:
            Moved.apply(ctx.use, there, *[grads[i] for i in there])
        ctx.use.done()
        return None, None, *[None] * len(grads)

    @staticmethod
    def jvp(ctx: Any, use: None, anchor: None, *tangents: torch.Tensor | None) -> Any:
        return tangents


class Moved(torch.autograd.Function):
    """Gradients that move: their tangents go to the use."""

    @staticmethod
    def forward(use: Use, which: Sequence[int], *grads: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device="cpu")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.use, ctx.which = inputs[:2]
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, use: None, which: None, *tangents: torch.Tensor | None) -> Any:
        for i, t in zip(ctx.which, tangents, strict=True):
            if t is not None and not (base := torch_private.base_of(t))._is_zerotensor():
                ctx.use.moved[i] = base
        return torch.zeros((), device="cpu")


Function = Callable[..., Any]  # of a model and what else it is given


def jvp(model: nn.Module, fn: Function | None = None) -> Callable[..., tuple[State, tuple[Any, Any]]]:
    """A function that computes with the model, and how the result moves as the weights move along a vector.

    Args:
        model: as for `forward_backward`: any module, copied, never touched; its modes are followed.
        fn: `fn(model, *args, **kwargs)` returns a tensor or a pytree of tensors; by default the model is called. It may
            use torch.func itself (`grad`, `jvp`, `vmap`, ..., nested), by inputs.

    Returns:
        `f(state, tangents, *args, **kwargs) -> state, (out, tangent of out)`, both of this rank. `tangents` is
        `{bucket: FlatBuffer}`, flat shards as those of main weights: whole gradients, or the `main` of a state of this
        layout. What is frozen does not move. The state is as good afterwards as before.

    A unit's tangents are there from its gather to its release. Buffers are the state's, and what the forward makes of
    them is dropped; dropout draws as in `apply`. Every operation needs a forward-mode derivative (for attention: the
    math backend), and modules that recompute (`remat`) are refused. A `T.budget` has no part in it: nothing is kept for
    a backward.

    Raises:
        TreeError: a vector that lacks a bucket, or is sharded otherwise. ScheduleError: in a graph; an operator of
        torch.library without a forward-mode derivative is given something that moves.

    Collective: as `apply`, and for each gather of a unit an all-gather for each of its buckets that train, which
    compute waits for. Every rank uses the same units in the same order.

    Example:
        >>> along = T.jvp(model, loss_fn)
        >>> state, (loss, slope) = along(state, state.main, batch)  # how the loss changes as all weights grow
    """
    driven, of = Forward("jvp", model), _called if fn is None else fn

    def f(state: State, tangents: Buffers, *args: Any, **kwargs: Any) -> tuple[State, tuple[Any, Any]]:
        check_tree(state, tangents, "jvp: the vector", state.layout.trainable)
        shards(state, tangents)  # waits for gradients under way

        def inside(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            driven.lend(state)
            return of(model, *args, **kwargs)

        with driven.running(state) as driver:
            moving = moved(inside)(driver.model, tangents, *args, **kwargs)
            driver.release()
            session, state = driver.session, driver.state
        return session.rest(state), moving

    return alone(f, "jvp", traced=eager_only("jvp"))


def pullback(
    model: nn.Module, fn: Function | None = None
) -> Callable[..., tuple[State, tuple[Any, dict[str, FlatBuffer]]]]:
    """A function that computes with the model, and pulls cotangents of the result back to the weights.

    Args:
        model: as for `forward_backward`.
        fn: as for `jvp`.

    Returns:
        `f(state, cotangents, *args, **kwargs) -> state, (out, product)`. `cotangents` are like `out`, this rank's (of
        a tensor [] a number);
        `product` is their sum with the derivatives of `out` by the weights, averaged over the data ranks: `{bucket:
        FlatBuffer}`, sharded as gradients are. The state is as good afterwards as before, with the gradients that it
        had; in the middle of a step this counts as one of its forwards, for dropout.

    Raises:
        TreeError: cotangents of another structure or shape than the result. ScheduleError: in a graph; what
        `forward_backward` refuses.

    Collective: as `forward_backward`, and twice what `finish_reductions` issues.

    Example: a Gauss-Newton product.
        >>> model_of = lambda model, batch: model(batch)
        >>> state, (out, along) = T.jvp(model, model_of)(state, state.main, batch)
        >>> state, (out, product) = T.pullback(model, model_of)(state, along / along.numel(), batch)
    """
    of = _called if fn is None else fn

    def paired(model: nn.Module, cotangents: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        out = of(model, *args, **kwargs)
        (ours, structure), (theirs, found) = pytree.tree_flatten(out), pytree.tree_flatten(cotangents)
        shapes = [[tuple(getattr(t, "shape", ())) for t in leaves] for leaves in (ours, theirs)]
        if structure != found or shapes[0] != shapes[1]:
            raise TreeError(
                f"pullback: cotangents of structure {found} and shapes {shapes[1]}; the function returned {structure} "
                f"and shapes {shapes[0]}. Give a tensor for each, of its shape."
            )
        return torch.stack([(c * t).sum() for c, t in zip(theirs, ours, strict=True)]).sum(), out

    backward = forward_backward(model, paired, has_aux=True)

    def f(state: State, cotangents: Any, *args: Any, **kwargs: Any) -> tuple[State, tuple[Any, dict[str, FlatBuffer]]]:
        session = Session(state, "pullback")
        state, (_, out), found = separate_gradients(
            state, "pullback", lambda state: backward(state, cotangents, *args, **kwargs)
        )
        return session.rest(state), (out, found)

    return alone(f, "pullback", traced=eager_only("pullback"))


def linearize(model: nn.Module, fn: Function | None = None) -> Callable[..., tuple[State, tuple[Any, Any]]]:
    """A function that computes with the model, and returns the result's linear map of tangents of the weights.

    Args:
        model, fn: as for `jvp`.

    Returns:
        `f(state, *args, **kwargs) -> state, (out, push)`, and `push(state, tangents) -> state, tangent of out`, for as
        long as no step has changed the weights. Nothing is kept for it but the arguments: each call gathers unit by
        unit and computes as `jvp` does, since a torch.func.linearize would keep all of the weights.

    Raises (from push):
        ScheduleError: the weights are not those of the call any more. What `jvp` raises.

    Collective: as `apply`; each `push` as `jvp`.

    Example:
        >>> state, (loss, push) = T.linearize(model, loss_fn)(state, batch)
        >>> state, slope = push(state, state.main)
    """
    driven, along = apply(model, fn, training=True), jvp(model, fn)

    def f(state: State, *args: Any, **kwargs: Any) -> tuple[State, tuple[Any, Any]]:
        state, out = driven(state, *args, **kwargs)
        lineage = lineage_of(state)
        base = lineage.base

        def push(state: State, tangents: Buffers) -> tuple[State, Any]:
            if lineage_of(state) is not lineage or lineage.base != base:
                raise ScheduleError(
                    "linearize: its linear map was called with a state of other weights than it was taken at. Take it "
                    "again: state, (out, push) = T.linearize(model, fn)(state, ...)."
                )
            state, (_, found) = along(state, tangents, *args, **kwargs)
            return state, found

        return state, (out, push)

    return alone(f, "linearize", traced=eager_only("linearize"))


def _called(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)
