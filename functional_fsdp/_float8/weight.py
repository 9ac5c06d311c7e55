"""Float8Weight: a weight that was gathered in float8. What compute sees of it: a tensor of the compute dtype.

    bits [n, m] float8, lent ──┐                     ┌── a linear that multiplies in float8 takes bits and scale
    scale [] float32 ──────────┴── Float8Weight ─────┤
                                   [n, m] bfloat16   └── any other operation reads bits / scale, in bfloat16

autograd casts a gradient to its leaf's dtype. That of a float8 leaf would be float8, and this one's is bfloat16.

Float8 linears: torchao's linears, in a skeleton, take a `Float8Weight` as it is, and do not cast it again.

    skeleton_of(module)    each Float8Linear gets a subclass of its class; a module of one's own is not touched
    its forward            Float8Weight ── differentiable, nothing is copied ──▶ torchao's own tensor of float8

torchao is not imported: it is there if one of its linears is.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
import torch.nn as nn

from .._common.errors import SpecError
from .._common.torch_names import make_wrapper
from .._nn.packed_weight import PackedWeight

__all__ = ["Float8Weight", "take_float8"]


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


HOME, NAME, TENSORS = "torchao.float8.float8_linear", "Float8Linear", "torchao.float8.float8_training_tensor"


def take_float8(skeleton: nn.Module) -> None:
    """Have the linears of torchao's that are in a skeleton take weights that were gathered in float8."""
    for path, part in skeleton.named_modules():
        cls = type(part)
        if cls not in _TAKING.values() and any((c.__module__, c.__name__) == (HOME, NAME) for c in cls.__mro__):
            part.__dict__["_float8"] = _casts(path, part.config)
            part.__class__ = _taking(cls)


def _casts(path: str, config: Any) -> tuple[torch.dtype, str]:
    """The dtype to which a linear casts its weight, and why it cannot take one that is cast already, if so."""
    whys = []
    for cast in (config.cast_config_weight, config.cast_config_weight_for_grad_input):
        if cast.scaling_type.name != "DYNAMIC" or cast.scaling_granularity.name != "TENSORWISE":
            whys.append(f"casts its weight {cast.scaling_type.value}, {cast.scaling_granularity.value}")
    if config.round_scales_to_power_of_2:
        whys.append("rounds scales to powers of 2")
    if not whys:
        return config.cast_config_weight.target_dtype, ""
    return config.cast_config_weight.target_dtype, f"the float8 linear {path!r} {whys[0]}"


class Seen:
    """What torchao's forward reads of a linear."""

    def __init__(self, linear: Any, weight: Any) -> None:
        self.weight, self.bias = weight, linear.bias
        self.config, self.linear_mm_config = linear.config, linear.linear_mm_config


_TAKING: dict[type[nn.Module], type[nn.Module]] = {}


def _taking(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a linear that takes a `Float8Weight`."""
    if cls not in _TAKING:
        hand_over = _hand_over()

        def forward(self: Any, input: torch.Tensor) -> Any:
            weight = self.weight
            if type(weight) is not Float8Weight:
                return cls.forward(self, input)
            dtype, why = self._float8
            if why or weight.bits.dtype is not dtype:
                _refuse(dtype, why, weight.bits.dtype)
            return cls.forward(Seen(self, hand_over(weight, self.linear_mm_config)), input)

        body = {
            "forward": forward,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__reduce_ex__": _reduced,
        }
        _TAKING[cls] = type(cls.__name__, (cls,), body)
    return _TAKING[cls]


def _refuse(dtype: torch.dtype, why: str, came: torch.dtype) -> None:
    said = why or f"a float8 linear casts its weight to {dtype}, and it was gathered as {came}"
    raise SpecError(
        f"Precision(gather={came}): {said}; expected one scale a matrix, of any value, and the same dtype. Convert it "
        "so, as torchao's Float8LinearConfig() does, or leave gather out for its weight."
    )


def _reduced(self: nn.Module, protocol: Any) -> Any:
    """Pickled as what it was made of: its class is made again where it is read."""
    return _again, (type(self).__mro__[1], {**self.__dict__})


def _again(cls: type[nn.Module], held: dict[str, Any]) -> nn.Module:
    part = cls.__new__(cls)
    part.__dict__.update(held)
    part.__class__ = _taking(cls)
    return part


@cache
def _hand_over() -> Any:
    """A differentiable function from a `Float8Weight` and a linear's settings to torchao's tensor of the same bytes."""
    tensors: Any = sys.modules[TENSORS]

    class HandOver(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Any, settings: Any) -> Any:
            role = tensors.GemmInputRole.WEIGHT
            return tensors.Float8TrainingTensor(weight.bits, weight.scale, weight.dtype, settings, role)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0], None

    return torch.compiler.allow_in_graph(HandOver).apply
