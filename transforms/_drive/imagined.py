"""Imagined kernels: within this mode tensors on the meta device go through the operations that a GPU would choose.

Without it attention and RMSNorm on the meta device are what a CPU makes of them: many operations, and more that is kept
for the backward. Of each operation here shapes, dtypes and what is kept for the backward are those of the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from functional_fsdp._seams import torch_private

__all__ = ["ImaginedKernels"]

HALF = (torch.bfloat16, torch.float16)


class ImaginedKernels(TorchFunctionMode):
    """See the top of this file. What is made on no device in particular is on this one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.made = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        if func in (torch.rms_norm, F.rms_norm):
            return rms_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def __enter__(self) -> Any:
        self.made.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        try:
            return super().__exit__(*error)
        finally:
            self.made.__exit__(*error)


def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Flash attention in half precision, without a mask; else the memory-efficient one."""
    if attn_mask is None and query.dtype in HALF:  # which takes fewer heads of keys and values as they are
        return torch_private.flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    shape = (*query.shape[:-1], key.shape[-2])
    bias = None if attn_mask is None else attn_mask.to(query.dtype).expand(shape)
    keeps = any(t.requires_grad for t in (query, key, value))
    return torch_private.efficient_attention(query, key, value, bias, keeps, dropout_p, is_causal, scale=scale)[0]


def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    """One kernel, which keeps its input and a number for each row."""
    return Norm.apply(input, weight, len(normalized_shape))


class Norm(torch.autograd.Function):
    """What a fused norm reads, writes and keeps."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, dims: int) -> Any:
        rows = x.new_empty(x.shape[:-dims], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return x * rows[(..., *[None] * dims)].to(x.dtype) if weight is None else x * weight

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return grad * x, None if weight is None else torch.empty_like(weight), None
