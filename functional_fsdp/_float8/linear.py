"""Float8 linears: torchao's linears, in a skeleton, take a `Float8Weight` as it is, and do not cast it again.

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
from .weight import Float8Weight

__all__ = ["take_float8"]

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
