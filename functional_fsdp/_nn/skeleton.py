"""Skeletons: copies of modules with their structure and buffers but no weights.

Each parameter is a placeholder on the meta device that says "bind weights first" when it is used; those of a tied leaf
know of each other, see `_nn.ties`. Hooks and functions in attributes are copied along, see
`_nn.closures`; what a copy would drop or get wrong without a word is refused.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch.nn.parameter import UninitializedParameter

from .._common.calls import outside_inference
from .._common.errors import SpecError, TreeError
from .._common.torch_names import NoTorchFunction
from .closures import HOOKS, Functions
from .float8_linear import take_float8
from .ties import Tie, aliases_of
from .wrapped import refuse_wrapped

M = TypeVar("M", bound=nn.Module)

__all__ = ["Placeholder", "every_buffer", "persistent", "refuse_meta", "skeleton_of"]


class Placeholder(nn.Parameter):
    """Where a weight belongs in a skeleton: has a shape and a dtype, and refuses everything else."""

    tie: Tie | None = None  # what the places of one tied leaf have in common
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
                f"requires_grad of a parameter of shape {_shape(args)} was set after its module had been split: what "
                "trains is the state's to say. Set it before functionalize, or freeze leaves by "
                "Spec(trainable={pattern: False})."
            )
        if name in Placeholder.answers:
            with NoTorchFunction():
                return func(*args, **(kwargs or {}))
        raise TreeError(
            f"bind weights first: this is a skeleton, its parameters have no values ({name or func} was called on one "
            f"of shape {_shape((*args, *(kwargs or {}).values()))}). Call fsdp.bind(model, weights)(...), with weights "
            "from unshard; or have a module with weights: fsdp.as_module(model, weights)."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        return memo.setdefault(id(self), _placeholder(self, copy.deepcopy(self.tie, memo)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (tuple(self.shape), self.dtype, self.requires_grad, self.tie)


def _trains(t: torch.Tensor) -> bool:
    with NoTorchFunction():
        return t.requires_grad


def _shape(args: Any) -> Any:
    return next((tuple(a.shape) for a in args if isinstance(a, Placeholder)), "?")


def _rebuild(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, tie: Tie | None = None) -> Placeholder:
    made = Placeholder(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=requires_grad)
    made.tie = tie
    return made


def _placeholder(param: torch.Tensor, tie: Tie | None = None) -> Placeholder:
    return _rebuild(tuple(param.shape), param.dtype, param.requires_grad, tie)


@outside_inference
def skeleton_of(module: M) -> M:
    """A copy of the module, of its own class, whose parameters are `Placeholder`s. Buffers are copied, weights never.

    Raises:
        TreeError: what a copy cannot have: hooks on parameters, tensors in the middle of a graph, parameters that are
            made later, functions that go on with the original.

    Example: `model = extend.skeleton_of(nn.Linear(2, 3))`; `fsdp.bind(model, weights)(x)` computes with it.
    """
    parts = dict(module.named_modules())
    _refuse(module, parts)
    memo: dict[int, Any] = {id(p): _placeholder(p) for p in module.parameters()}
    tables = [(path, part, vars(part).get(name)) for path, part in parts.items() for name in HOOKS]
    found = [(path, table) for path, _, table in tables if table]
    for _, table in found:
        memo[id(table)] = OrderedDict()
    skeleton = copy.deepcopy(module, memo)
    functions = Functions(module, memo)
    for path, part in parts.items():
        functions.methods(path, type(part))
        functions.attributes(path, memo[id(part)])
    for path, table in found:
        for number, hook in table.items():
            memo[id(table)][number] = functions.of(hook, path)
    aliases = aliases_of(module)
    ties = {first: Tie() for first in aliases.values()}
    for path, param in list(skeleton.named_parameters(remove_duplicate=False)):
        owner, _, name = path.rpartition(".")  # a placeholder for each path
        skeleton.get_submodule(owner)._parameters[name] = _placeholder(param, ties.get(aliases.get(path, path)))
    take_float8(skeleton)
    return skeleton


def _refuse(module: nn.Module, parts: dict[str, nn.Module]) -> None:
    for path, part in parts.items():
        refuse_wrapped(path, part)
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
    for path, part in parts.items():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                raise TreeError(
                    f"the attribute {f'{path}.{name}'.lstrip('.')!r} is a tensor computed from others that require "
                    "gradients, which cannot be copied. Compute it in the forward; instead of torch.nn.utils."
                    "weight_norm and prune use torch.nn.utils.parametrizations."
                )


def persistent(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(path, dict of buffers, name in it) of each buffer that a state dict has."""
    return every_buffer(module, persistent=True)


def every_buffer(module: nn.Module, persistent: bool = False) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(path, dict of buffers, name in it) of each buffer of a module; or of those that a state dict has."""
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and not (persistent and name in part._non_persistent_buffers_set):
                yield f"{path}.{name}" if path else name, part._buffers, name


def refuse_meta(path: str) -> None:
    """Raise the SpecError for a buffer, at this path, that has no values: its module was built on the meta device."""
    raise SpecError(
        f"the buffer {path!r} is on the meta device and has no values: its module was built there. Build the model by "
        "init(lambda: Model(config), spec), whose skeleton has real buffers, or functionalize one that was built on a "
        "real device; persistent ones may come from the state: shard(params, spec, optimizer, buffers={path: tensor})."
    )
