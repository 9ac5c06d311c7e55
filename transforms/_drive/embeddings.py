"""Embeddings by member: torch's vmap forgets `padding_idx` where weights and indices are both batched (torch 2.13).

The row at `padding_idx` gets no gradient from a lookup. Where gradients are taken outside of the vmap, as of ensembles
and of samples, it would get one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["PaddedEmbeddings"]


class PaddedEmbeddings(TorchFunctionMode):
    """Within, `F.embedding` gives its row at `padding_idx` no gradient, whatever is batched."""

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
