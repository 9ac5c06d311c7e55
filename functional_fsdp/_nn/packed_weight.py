"""PackedWeight: a weight that is a few bytes, and a tensor of the compute dtype to all who ask.

    bits [n] uint8, lent ── PackedWeight [n, m] bfloat16 ── an operation reads what the bytes stand for

What autograd keeps of such a weight are its bytes: a backward unpacks them again. `Float8Weight` is one whose bytes
linears of torchao take as they are.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .._common.errors import ScheduleError
from .._common.torch_names import disabled_torch_function, make_wrapper, pytree

aten = torch.ops.aten
SAME = frozenset((aten.detach.default, aten.alias.default))
VIEWS = SAME | {aten.t.default, aten.transpose.int}


class PackedWeight(torch.Tensor):
    """A matrix, or any tensor, that a codec has packed: bytes, and the dtype of compute to all who ask.

    Attributes:
        bits: uint8 [n], all planes of the codec; lent, as all gathered weights.
        form: the codec, the shape, the dtype, and where the planes lie: `weight.form.planes(weight.bits)`.

    An operation is done with `dequantized()`, which lives as long as it needs it. It cannot be changed in place.

    Example: `fsdp.full_params(state)["blocks.0.up.weight"].form.codec`.
    """

    bits: torch.Tensor
    form: Any
    flipped: bool
    _how: ClassVar[str] = "is packed by a codec"

    @staticmethod
    def __new__(cls, bits: torch.Tensor, form: Any, flipped: bool = False) -> PackedWeight:
        shape, strides = form.shape, form.strides
        if flipped:
            shape, strides = shape[::-1], strides[::-1]
        made: PackedWeight = make_wrapper(
            cls, shape, strides=strides, dtype=form.dtype, layout=torch.strided, device=bits.device
        )
        made.bits, made.form, made.flipped = bits, form, flipped
        return made

    def dequantized(self) -> torch.Tensor:
        """The weight in its dtype, as a new tensor."""
        whole: torch.Tensor = self.form.unpack(self.bits)
        return whole.t() if self.flipped else whole

    def _view(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """A detached, aliased or transposed view of it, of the same bytes."""
        if func in SAME:
            return PackedWeight(func(self.bits), self.form, self.flipped)
        dims = {dim % 2 for dim in (*args, *kwargs.values())} if self.dim() == 2 else {0}
        if self.dim() == 2 and (func is aten.t.default or len(dims) == 2):
            return PackedWeight(aten.alias.default(self.bits), self.form, not self.flipped)
        return func(self.dequantized(), *args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, codec={self.form.codec})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["bits"], (self.form, self.flipped)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], kept: Any, size: Any, stride: Any) -> PackedWeight:
        return PackedWeight(inner["bits"], *kept)

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in VIEWS:
            weight = args[0]
            if torch.is_inference_mode_enabled() and not weight.is_inference():
                with torch.inference_mode(False):  # a view is what its base is
                    return weight._view(func, args[1:], kwargs)
            return weight._view(func, args[1:], kwargs)
        if func._schema.is_mutable:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            for argument in func._schema.arguments:
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and any(isinstance(t, PackedWeight) for t in pytree.tree_leaves(given.get(argument.name))):
                    raise ScheduleError(
                        f"{func} would write to a weight that {cls._how}. It is lent: compute with a "
                        "changed copy, as weight.clone(); or change weights between steps: fsdp.replace_params(state, "
                        "params)."
                    )
        return func(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})


def _plain(value: Any) -> Any:
    """What an operation is given, with unpacked weights: a tensor, another value, or a list of them."""
    if isinstance(value, PackedWeight):
        return value.dequantized()
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value
