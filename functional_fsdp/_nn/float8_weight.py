"""Float8Weight: a weight that was gathered in float8. What compute sees of it: a tensor of the compute dtype.

    bits [n, m] float8, lent ──┐                     ┌── a linear that multiplies in float8 takes bits and scale
    scale [] float32 ──────────┴── Float8Weight ─────┤
                                   [n, m] bfloat16   └── any other operation reads bits / scale, in bfloat16

autograd casts a gradient to its leaf's dtype. That of a float8 leaf would be float8, and this one's is bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch

from .._common.errors import ScheduleError
from .._common.torch_names import disabled_torch_function, make_wrapper, pytree

__all__ = ["Float8Weight"]

aten = torch.ops.aten
VIEWS = frozenset((aten.detach.default, aten.alias.default, aten.t.default, aten.transpose.int))


class Float8Weight(torch.Tensor):
    """A gathered matrix [n, m] that has the compute dtype to all who ask, and is bytes and a scale.

    Attributes:
        bits: [n, m], torch.float8_e4m3fn or torch.float8_e5m2: lent, as all gathered weights.
        scale: float32 [], by which the weight was multiplied before it was cast.

    Linears of torchao that multiply in float8 take both as they are. Every other operation is done with
    `dequantized()`, which is right, and slower. It cannot be changed in place.

    Example: `weights["weight"].bits`, of `state, weights = fsdp.unshard(state, unit)`.
    """

    bits: torch.Tensor
    scale: torch.Tensor

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

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in VIEWS:
            weight = args[0]
            bits = func(weight.bits, *args[1:], **kwargs)
            if torch.is_inference_mode_enabled() and not weight.is_inference():
                with torch.inference_mode(False):  # a view is what its base is
                    return cls(bits, weight.scale, weight.dtype)
            return cls(bits, weight.scale, weight.dtype)
        if func._schema.is_mutable:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            for argument in func._schema.arguments:
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and any(isinstance(t, cls) for t in pytree.tree_leaves(given.get(argument.name))):
                    raise ScheduleError(
                        f"{func} would write to a weight that was gathered in float8. It is lent: compute with a "
                        "changed copy, as weight.clone(); or change weights between steps: fsdp.replace_params(state, "
                        "params)."
                    )
        plain = pytree.tree_map_only(cls, cls.dequantized, (args, kwargs))
        return func(*plain[0], **plain[1])
