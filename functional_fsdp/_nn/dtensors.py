"""DTensors: a weight of a module that `parallelize_module` has cut, from this rank's part of it, and how it lies.

    leaf         DTensor [n, m], Shard(0) on mesh["tp"]      whole in a state's files, [n / tp, m] in its buffers
    placeholder  has the DTensor's `Form`
    forward      the module's own code sees a DTensor again, made from the part that was gathered: nothing is sent
    backward     torch brings the gradient to the leaf's placements, and gives its part

Source: torch's DTensor.from_local, whose gradient has the placements of the forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch

from .._common.errors import TreeError
from .._common.torch_names import func_interpreter
from .._common.tree import first_match

__all__ = ["Form", "by_rules", "form_of", "full_tensor", "is_dtensor", "local_part"]


def is_dtensor(t: Any) -> bool:
    """Whether it is one. Where nobody has imported them, which takes seconds, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


class Form(NamedTuple):
    """How a DTensor lies on its mesh, without its values.

    Attributes:
        shape, stride: of the whole leaf. part: the shape that this rank has.
        summed: axes along which each rank's gradient is to stay a summand.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    part: torch.Size
    summed: tuple[str, ...] = ()

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """The DTensor of this rank's part, or of the whole leaf, differentiable. A DTensor stays as it is."""
        if is_dtensor(weight):
            return weight
        if func_interpreter() is not None:
            raise TreeError(
                "the model has DTensors, which torch.func does not know (grad, vjp, jvp, vmap). Use T.forward_backward "
                "or, of weights that you have gathered, T.vjp."
            )
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if weight.shape != self.part:
            every: Any = DTensor.from_local(weight, self.mesh, [Replicate()] * len(self.placements), run_check=False)
            return every.redistribute(placements=self.placements)
        how: dict[str, Any] = {"run_check": False, "shape": self.shape, "stride": self.stride}
        if self.summed:
            names = self.mesh.mesh_dim_names
            grads = [Partial() if n in self.summed else p for n, p in zip(names, self.placements, strict=True)]
            if not _takes_grad_placements():
                made: torch.Tensor = _Summed.apply(weight, grads, lambda t: self._replace(summed=())(t))
                return made
            how["grad_placements"] = grads
        return DTensor.from_local(weight, self.mesh, self.placements, **how)


@cache
def _parameters() -> frozenset[str]:
    from torch.distributed.tensor import DTensor

    return frozenset(signature(DTensor.from_local).parameters)


def _takes_grad_placements() -> bool:
    """Whether torch's own from_local says how gradients are to lie, as it does not in torch 2.11."""
    return "grad_placements" in _parameters()


_takes_grad_placements._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Summed(torch.autograd.Function):
    """A part as a DTensor, whose gradient has placements of its own."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, grads: Any, made: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        ctx.grads = grads
        return made(weight)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.redistribute(placements=ctx.grads).to_local(), None, None


def by_rules(form: Form | None, own: Any, path: str) -> Form | None:
    """The form of a leaf whose rules, of `Spec.own`, may say that gradients of what is equal are summands."""
    if form is None:
        return None
    summed = [one.axis for one in first_match(own, (path,)) or () if one.grads == "sum"]
    pairs = zip(form.mesh.mesh_dim_names or (), form.placements, strict=False)
    return form._replace(summed=tuple(axis for axis, placed in pairs if placed.is_replicate() and axis in summed))


def form_of(t: Any) -> Form | None:
    """Of a DTensor; None of another tensor."""
    if not is_dtensor(t):
        return None
    return Form(t.device_mesh, tuple(t.placements), t.shape, t.stride(), local_part(t).shape)


@torch.no_grad()
def local_part(t: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, without a graph; another tensor itself."""
    return t.to_local() if is_dtensor(t) else t  # type: ignore[attr-defined]


def full_tensor(t: Any) -> Any:
    """A DTensor as a plain tensor, differentiable; anything else itself. Collective, where it is cut or partial."""
    return t.full_tensor() if is_dtensor(t) else t
