"""Functions of torch.autograd that are given weights outside of the modules that hold them, each another kind.

All compute `x * w * k` or something as small, so that one model can use any of them at any place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.autograd.function import once_differentiable


class Explicit(torch.autograd.Function):
    """Saves what it is given, and an input that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, note: Any, k: float) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.k = k
        return x * w * k

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w * ctx.k, (grad * x * ctx.k).sum(0), None, None


class SetUp(Explicit):
    """The newer form, without gradients that are zeros."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor, note: Any, k: float) -> torch.Tensor:  # type: ignore[override]
        return x * w * k

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:2])
        ctx.k = inputs[3]


class Once(Explicit):
    """Cannot be differentiated twice."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Explicit.backward(ctx, grad)


class Attributes(Explicit):
    """Keeps what it is given in attributes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, note: Any, k: float) -> torch.Tensor:
        ctx.saved_tensors_, ctx.k = (x, w), k
        return x * w * k

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors_
        return grad * w * ctx.k, (grad * x * ctx.k).sum(0), None, None


class Through(torch.autograd.Function):
    """Returns the weight itself, as a straight-through estimator does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, note: Any, k: float) -> torch.Tensor:
        return w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad, None, None


class Untouched(torch.autograd.Function):
    """Computes nothing with the weight, and has a gradient of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, note: Any, k: float) -> torch.Tensor:
        assert w.shape == (4,)
        assert w.device.type == "cpu"
        assert w.is_contiguous()
        assert w.is_leaf
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad, (grad * x).sum(0), None, None


class Replays(Explicit):
    """Takes gradients within its backward, of copies."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = (t.detach().clone().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = x * w * ctx.k
        return (*torch.autograd.grad(out, (x, w), grad), None, None)


@torch.library.custom_op("functional_fsdp_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, w: torch.Tensor, k: float) -> torch.Tensor:
    return x * w * k


def _saves(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.k = inputs[2]


scaled.register_autograd(lambda ctx, grad: Explicit.backward(ctx, grad)[:3], setup_context=_saves)


class Operator:
    """An operator of torch.library."""

    @staticmethod
    def apply(x: torch.Tensor, w: torch.Tensor, note: Any, k: float) -> Any:
        return scaled(x, w, k)


KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Explicit, SetUp, Once, Attributes, Through, Untouched, Replays, Operator)
}  # fmt: skip
PLACES = ("first", "of the next unit", "middle", "of a later unit", "tied", "last", "twice")


class Placed(nn.Module):
    """A model in which one kind of function is given weights at some of these places."""

    def __init__(self, kind: str, *places: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.places = kind, places
        self.w = nn.Parameter(torch.randn(4))
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.b.bias = self.norm.bias

    def given(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return KINDS[self.kind].apply(x, w, None, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "first" in self.places:  # what it is given beside the weight needs no gradient
            x = self.given(x, self.w)
        if "of the next unit" in self.places:
            x = self.given(x, self.a.bias)
        x = self.a(x).tanh()
        if "middle" in self.places:
            x = x + self.given(x, self.w)
        if "of a later unit" in self.places:
            x = x + self.given(x, self.norm.weight)
        if "tied" in self.places:
            x = x + self.given(x, self.norm.bias) + self.given(x, self.b.bias)
        x = self.norm(self.b(x)) * self.w
        if "last" in self.places:
            x = self.given(x, self.w)
        if "twice" in self.places:
            x = self.given(x, self.w) + self.given(x, self.w) * self.w
        return x
