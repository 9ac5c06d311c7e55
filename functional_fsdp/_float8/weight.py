"""Float8Weight: a weight that was gathered in float8. What compute sees of it: a tensor of the compute dtype.

    bits [n, m] float8, lent ──┐                     ┌── a linear that multiplies in float8 takes bits and scale
    scale [] float32 ──────────┴── Float8Weight ─────┤
                                   [n, m] bfloat16   └── any other operation reads bits / scale, in bfloat16

autograd casts a gradient to its leaf's dtype. That of a float8 leaf would be float8, and this one's is bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch

from .._common.torch_names import make_wrapper
from .._nn.packed_weight import PackedWeight

__all__ = ["Float8Weight"]


class Float8Weight(PackedWeight):
    """A gathered matrix [n, m] that has the compute dtype to all who ask, and is bytes and a scale.

    Attributes:
        bits: [n, m], torch.float8_e4m3fn or torch.float8_e5m2: lent, as all gathered weights.
        scale: float32 [], by which the weight was multiplied before it was cast.

    Linears of torchao that multiply in float8 take both as they are. Every other operation is done with
    `dequantized()`, which is right, and slower. It cannot be changed in place.

    Example: `weights["weight"].bits`, of `state, weights = fsdp.unshard(state, unit)`.
    """

    scale: torch.Tensor
    _how = "was gathered in float8"

    @staticmethod
    def __new__(cls, bits: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Float8Weight:
        made: Float8Weight = make_wrapper(
            cls, bits.size(), strides=bits.stride(), storage_offset=bits.storage_offset(), dtype=dtype,
            layout=bits.layout, device=bits.device,
        )  # fmt: skip
        made.bits, made.scale = bits, scale
        return made

    def dequantized(self) -> torch.Tensor:
        """The weight in its dtype, as a new tensor: bits / scale, divided in float32."""
        return (self.bits.to(torch.float32) / self.scale).to(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        said = str(self.bits.dtype).removeprefix("torch.")
        return f"Float8Weight(shape={tuple(self.shape)}, dtype={self.dtype}, bits={said})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["bits", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], dtype: Any, size: Any, stride: Any) -> Float8Weight:
        return Float8Weight(inner["bits"], inner["scale"], dtype)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Float8Weight:
        return Float8Weight(func(self.bits, *args, **kwargs), self.scale, self.dtype)
