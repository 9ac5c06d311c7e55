"""Skeletons: copies of modules with their structure and buffers but no weights.

Each parameter is a placeholder on the meta device that says "bind weights first" when it is used; those of a tied leaf
know of each other. One that lies elsewhere, too (`self.weights = [self.a, self.b]`), is the weight of
its slot. Hooks, functions and weak references are copied along, see `_nn.copies`; what a copy would drop or get wrong
without a word is refused.

Those that another library has taken over, and that have to be given without it.

class of a part             from                        what it has done
FSDPModule                  fully_shard                 parameters are DTensors, sharded already, with hooks
FullyShardedDataParallel    FSDP                        parameters are views of a flat one
DistributedDataParallel     DDP                         averages gradients by itself
DDP                         replicate                   the same
AbstractGradSampleModule    opacus                      counts on attributes of parameters, which no state keeps

Ties: one leaf at several paths, to the module that uses it and to torch.func.

    params      {"embed.weight": w, "head.weight": w}                        one tensor, two leaves to torch.func
    bind        the module uses the one at the first path, at both places
    gradients   {"embed.weight": the whole gradient, "head.weight": 0}
    inner step  {"embed.weight": w - lr · g, "head.weight": w}               bind takes the first: still one leaf

So weights that a step inside a loss function has changed stay tied, however many steps there are, and `reduce` adds up
what the paths got. What has no module to know its ties, a pytree of one's own, has `tie`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from operator import is_not
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch.nn.parameter import UninitializedParameter

from .._axes import by_rules, dtensor_form
from .._common.calls import outside_inference
from .._common.errors import TreeError, expect
from .._common.torch_names import pytree
from .._common.tree import flatten
from .._float8 import take_float8
from .._shared.torch_names import NoTorchFunction
from .._state.shard import is_dtensor
from .copies import Copier, Span, span_of


class Tie:
    """What the placeholders of one tied leaf have in common. Copies of a skeleton have ties of their own."""


def aliases_of(module: nn.Module) -> dict[str, str]:
    """{path: the first path of the same leaf} for the further paths of tied parameters."""
    return aliases_among(module.named_parameters(remove_duplicate=False))


def aliases_among(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """As `aliases_of`, of a module's parameters at all of their paths."""
    first: dict[Any, str] = {}
    found = {}
    for path, param in named:
        one = getattr(param, "tie", None) or param
        if one in first:
            found[path] = first[one]
        else:
            first[one] = path
    return found


def tied(weights: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> Mapping[str, torch.Tensor]:
    """The weights of a module with one tensor at all paths of a tied leaf: the first path's."""
    return {
        **weights,
        **{path: weights[first] for path, first in aliases.items() if path in weights and first in weights},
    }


def tie(state: Any, grads: Any) -> Any:
    """The same gradients, with the sum of all paths of a tied leaf at each of them. Pure; within transforms too.

    For steps on weights inside a loss function that takes a pytree of one's own, whose ties torch.func cannot know:
    it gives one gradient for each path. (`bind` keeps the ties of a module's weights by itself.)

    Args:
        state: any state of the parameters.
        grads: a tree as the parameters; None is zero.

    Returns:
        the same structure.

    Example, a step of gradient descent inside a loss:
        >>> inner = torch.func.grad(loss)(params)
        >>> params = tree_map(lambda p, g: p - lr * g, params, fsdp.tie(state, inner))
    """
    paths, leaves, treedef = flatten(grads)
    home = dict(zip(state.layout.paths, state.layout.source, strict=True))
    total: dict[str, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        before = total.get(home.get(path, path))
        total[home.get(path, path)] = leaf if before is None else before if leaf is None else before + leaf
    return treedef.unflatten([total[home.get(path, path)] for path in paths])


INSIDE = "Give the module that it was made from."
TAKEN: dict[tuple[str, str], tuple[str, str]] = {  # (package, class): by what a part was taken over, and what to do
    ("torch", "FSDPModule"): (
        "torch's fully_shard, which has sharded its parameters",
        "Leave fully_shard out: the spec says how to shard. Weights of such a model come from its state dict, or from "
        "its checkpoint.",
    ),
    ("torch", "FullyShardedDataParallel"): ("torch's FSDP, which has flattened its parameters", INSIDE),
    ("torch", "DistributedDataParallel"): ("torch's DDP, which averages gradients by itself", INSIDE),
    ("torch", "DDP"): (
        "torch's replicate, which averages gradients by itself",
        "Leave replicate out: fsdp.ddp() is a placement of the spec.",
    ),
    ("opacus", "AbstractGradSampleModule"): (
        "opacus, which keeps gradients of samples at the parameters",
        f"{INSIDE} What opacus does is T.clipped_gradients here, and T.per_sample_norms.",
    ),
}


def refuse_wrapped(path: str, part: nn.Module) -> None:
    """Raise the TreeError for a part, at this path, that a library has taken over."""
    for cls in type(part).__mro__:
        if taken := TAKEN.get((cls.__module__.partition(".")[0], cls.__name__)):
            where = f"the module {path!r}" if path else "the model"
            raise TreeError(f"{where}, a {type(part).__name__}, was taken over by {taken[0]}. {taken[1]}")


M = TypeVar("M", bound=nn.Module)
TRAINS = "What trains is the state's to say: fsdp.freeze(state, pattern), or Spec(trainable={pattern: False})."
KINDS = "Weights are on the mesh's device, in the spec's dtypes: Precision(main=, compute=)."
VALUES = "Values are the state's: fsdp.load_weights(state, weights), or fsdp.replace_params(state, params)."
WHOLE = "All weights of a state are fsdp.state_dict(state, model), or fsdp.full_params(state)."
#: what to do, beside binding weights, where this was called on a placeholder, by name; state_dict() calls detach
REMEDIES = dict.fromkeys(["to", "cuda", "cpu", "bfloat16", "half", "double", "float"], KINDS)
REMEDIES |= dict.fromkeys(["copy_", "zero_", "fill_", "normal_", "uniform_"], VALUES)
REMEDIES |= {"requires_grad_": TRAINS, "detach": WHOLE, "clone": WHOLE}


class Placeholder(nn.Parameter):
    """Where a weight belongs in a skeleton: has a shape and a dtype, and refuses everything else."""

    tie: Tie | None = None  # what the places of one tied leaf have in common
    part: torch.Size | None = None  # the shape of a rank's part, of a leaf that is cut along axes of the model's own
    form: Any = None  # of a weight that the module's own code sees as a DTensor
    place: tuple[dict[str, Any], str] | None = None  # the slot whose weight it is, of one that lies elsewhere, too
    #: functions that only look at metadata, by name: of these it is what it seems to be
    answers = frozenset((
        "__get__", "__set__", "__hash__", "__repr__", "__len__", "__format__", "size", "dim", "ndimension", "numel",
        "nelement", "stride", "is_floating_point", "is_complex", "element_size", "storage_offset", "is_contiguous",
        "type", "is_inference", "_is_view", "is_neg", "is_conj", "untyped_storage",  # the last four: for torch.compile
    ))  # fmt: skip

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__set__" and func.__self__.__name__ == "requires_grad" and bool(args[1]) is not _trains(args[0]):
            raise TreeError(
                f"requires_grad of a parameter of shape {_shape(args)} was set after its module was split. {TRAINS}"
            )
        if name in Placeholder.answers:
            first = args[0]
            if type(first) is Placeholder and first.place and name != "__hash__" and first.lent() is not first:
                return func(first.lent(), *args[1:], **(kwargs or {}))
            with NoTorchFunction():
                return func(*args, **(kwargs or {}))
        given = args, kwargs or {}
        lent = pytree.tree_map_only(Placeholder, Placeholder.lent, given)
        if any(map(is_not, pytree.tree_leaves(lent), pytree.tree_leaves(given))):
            return func(*lent[0], **lent[1])
        more = f" {REMEDIES[name]}" if name in REMEDIES else ""
        raise TreeError(
            f"bind weights first: this is a skeleton, its parameters have no values ({name or func} was called on one "
            f"of shape {_shape((*args, *(kwargs or {}).values()))}). Call fsdp.bind(model, weights)(...), with weights "
            f"from unshard; or have a module with weights: fsdp.as_module(model, weights).{more}"
        )

    def lent(self) -> torch.Tensor:
        """The weight that is in its slot, of one that lies elsewhere; itself where there is none."""
        held, name = self.place or ({}, "")
        weight = held.get(name)
        return self if weight is None or type(weight) is Placeholder else weight

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        if id(self) not in memo:
            made = memo[id(self)] = _placeholder(self, copy.deepcopy(self.tie, memo))
            made.place = copy.deepcopy(self.place, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = _rebuild, (tuple(self.shape), self.dtype, self.requires_grad, self.tie, self.part, self.form)
        return made if self.place is None else (*made, self.place)

    def __setstate__(self, place: Any) -> None:
        self.place = place


def _trains(t: torch.Tensor) -> bool:
    with NoTorchFunction():
        return t.requires_grad


def _shape(args: Any) -> Any:
    return next((tuple(a.shape) for a in args if isinstance(a, Placeholder)), "?")


def _rebuild(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, tie: Tie | None = None,
    part: torch.Size | None = None, form: Any = None,
) -> Placeholder:  # fmt: skip
    made = Placeholder(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=requires_grad)
    made.tie, made.part, made.form = tie, part, form
    return made


def form_of(t: Any) -> Any:
    """How a DTensor lies, or the one that a placeholder stands for; None of other tensors."""
    return t.form if isinstance(t, Placeholder) else dtensor_form(t) if is_dtensor(t) else None


def _placeholder(param: torch.Tensor, tie: Tie | None = None) -> Placeholder:
    form = form_of(param)
    part = param.part if isinstance(param, Placeholder) else form and form.part
    return _rebuild(tuple(param.shape), param.dtype, param.requires_grad, tie, part, form)


@outside_inference
def skeleton_of(module: M, spec: Any = None) -> M:
    """A copy of the module, of its own class, whose parameters are `Placeholder`s. Buffers are copied, weights never.

    Args:
        spec: a Spec by which some leaves are cut along axes of the model's own: weights that are bound have the shapes
            of this rank's parts. None: whole ones.

    Raises:
        TreeError: what a copy cannot have: hooks on parameters, tensors in the middle of a graph, parameters that are
            made later, what goes on with the original, see `_nn.copies`.

    Example: `model = extend.skeleton_of(nn.Linear(2, 3))`; `fsdp.bind(model, weights)(x)` computes with it.
    """
    needs_module("a model", module)
    _refuse(module)
    memo: dict[int, Any] = {id(p): _placeholder(p) for p in module.parameters()}
    copier = Copier(module, memo)
    skeleton = copier.run()
    aliases = aliases_of(module)
    ties = {first: Tie() for first in aliases.values()}
    params = dict(module.named_parameters(remove_duplicate=False))
    made = dict(skeleton.named_parameters(remove_duplicate=False))
    if params.keys() != made.keys():
        raise TreeError(
            f"a copy of {type(module).__name__} has other parameters than it has: {sorted(params.keys() ^ made.keys())}"
            ". A part of it makes itself anew when it is copied (__deepcopy__, __setstate__)."
        )
    for path, param in params.items():
        owner, _, name = path.rpartition(".")  # a placeholder for each path
        held = skeleton.get_submodule(owner)._parameters
        made_ = held[name] = _placeholder(param, ties.get(aliases.get(path, path)))
        if spec is not None and spec.own and made_.form is not None:
            made_.form = by_rules(made_.form, spec.own, path)
        elif spec is not None and spec.own:
            made_.part = torch.Size(spec.part_of(path, tuple(param.shape)))
        if id(param) in copier.met and memo[id(param)].place is None:
            memo[id(param)].place = held, name
    take_float8(skeleton)
    return skeleton


def needs_module(what: str, given: Any) -> None:
    """Refuse what is no module."""
    expect(what, given, nn.Module, "a module, as Net()", TreeError)


def _refuse(module: nn.Module) -> None:
    for path, part in module.named_modules():
        refuse_wrapped(path, part)
    _refuse_overlaps({path: p for path, p in module.named_parameters() if not is_dtensor(p)})
    for path, param in module.named_parameters(remove_duplicate=False):
        if isinstance(param, UninitializedParameter):
            raise TreeError(
                f"the parameter {path!r} has no shape yet: its module is lazy. Run the module once, on a batch, first."
            )
        if getattr(param, "_backward_hooks", None) or getattr(param, "_post_accumulate_grad_hooks", None):
            raise TreeError(
                f"the parameter {path!r} has a hook of its own (register_hook, register_post_accumulate_grad_hook), "
                "which no gradient would meet: weights are gathered and gradients reduced outside of it. Remove it. "
                "To mask gradients, change fsdp.local_shards(state, 'grads') between the backward and step; to freeze "
                "leaves, Spec(trainable={pattern: False})."
            )
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and any(True for _ in part.parameters()):
            raise TreeError(
                f"the module {path!r} is a torch.jit module, which keeps its weights to itself. Give the module that "
                "it was made from."
            )
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                raise TreeError(
                    f"the attribute {f'{path}.{name}'.lstrip('.')!r} is a tensor computed from others that require "
                    "gradients, which cannot be copied. Compute it in the forward; instead of torch.nn.utils."
                    "weight_norm, spectral_norm and prune use torch.nn.utils.parametrizations."
                )


def _refuse_overlaps(params: Mapping[str, nn.Parameter]) -> None:
    """Raise for parameters that share memory, unless they are one leaf: the same bytes, seen and trained alike."""
    spans = {path: span for path, p in params.items() if (span := span_of(p))}
    before, last = "", Span(0, 0, 0, True)
    for path, span in sorted(spans.items(), key=lambda item: item[1][:2]):
        if span.meets(last):
            a, b = params[before], params[path]
            if (span, a.shape, a.stride(), a.dtype) != (last, b.shape, b.stride(), b.dtype):
                how = "in other ways: they would be leaves of their own, and come apart"
            elif a.requires_grad is not b.requires_grad:
                how = f"and of the one leaf that they are {path if b.requires_grad else before!r} trains alone"
            else:
                continue
            raise TreeError(
                f"the parameters {before!r} and {path!r} share memory, {how}. Keep one of them, and compute the other "
                "in the forward."
            )
        if span.storage != last.storage or span.last > last.last:
            before, last = path, span


def every_buffer(module: nn.Module, persistent: bool = False) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(path, dict of buffers, name in it) of each buffer of a module; or of those that a state dict has."""
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and not (persistent and name in part._non_persistent_buffers_set):
                yield f"{path}.{name}" if path else name, part._buffers, name
