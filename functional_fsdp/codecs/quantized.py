"""Weights that other packages have quantized, taken over as they are: bitsandbytes' modules, torchao's tensors.

    Linear4bit, Linear8bitLt             nn.Linear with a PackedWeight of the same bytes, by the codec nf4 or int8
    nn.Linear with a tensor of torchao   the same with a PackedWeight of what that tensor holds, by the codec Wrapped

Neither package is imported: it is there if one of its weights is. What a forward sees are the numbers that the own
`dequantize` of the package gives. The multiplication is torch's; LLM.int8 quantizes activations, too, this does not.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn as nn

from .._common.errors import SpecError
from .._nn.packed_weight import PackedWeight
from .._nn.skeleton import needs_module
from .._spec.precision import Codec, Form, Planes, Shape
from .blocks import int8, nf4

M = TypeVar("M", bound=nn.Module)
FLOATS = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Wrapped(Codec):
    """What a tensor subclass of another package holds: its own tensors are the planes, its `dequantize` reads them.

    Attributes:
        cls: the subclass, which has `__tensor_flatten__`, as torchao's have. context: what that says beside tensors.
        held: (name, shape, dtype) of the tensors.
    """

    cls: type
    context: Any
    held: tuple[tuple[str, Shape, torch.dtype], ...]

    def __hash__(self) -> int:
        return hash((self.cls, self.held))  # a context may be a dict

    def planes(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        return {name: (own, dtype) for name, own, dtype in self.held}

    def pack(self, tensor: torch.Tensor) -> Planes:
        raise SpecError(f"{self}: it was taken over from a tensor, and packs no others. Use a codec of fsdp's.")

    def unpack(self, planes: Planes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        made: Any = self.cls.__tensor_unflatten__(planes, self.context, torch.Size(shape), None)  # type: ignore[attr-defined]
        plain: torch.Tensor = made.dequantize()
        return plain.to(dtype)

    def __str__(self) -> str:
        return self.cls.__name__


def from_quantized(model: M, compute: torch.dtype | None = None) -> M:
    """A copy of a model in which weights that bitsandbytes or torchao has quantized are `PackedWeight`s of linears.

    Then `functionalize` and `shard` keep them packed, and shard their bytes: nothing is quantized anew. The model is
    not changed; all its other weights and buffers are shared with the copy.

    Args:
        model: as `from_pretrained(..., quantization_config=...)` makes it, perhaps in `peft.get_peft_model`. Of
            bitsandbytes `Linear4bit` (nf4, with or without nested scales) and `Linear8bitLt`; of torchao linears whose
            weights are its tensors.
        compute: the dtype of these weights to all who ask; None: that of the package: `compute_dtype` of bitsandbytes,
            or what was quantized, float32 in the place of float16.

    Returns:
        the copy. Its linears see what the package's `dequantize` gives. `Linear8bitLt` computes with quantized inputs,
        and the copy does not.

    Raises:
        SpecError: weights in fp4; that bitsandbytes has reordered for inference on CPUs; none that is quantized.

    Example: `params, model = fsdp.functionalize(fsdp.from_quantized(AutoModelForCausalLM.from_pretrained(...)))`.
    """
    needs_module("from_quantized(model)", model)
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    found = 0
    for path, part in model.named_modules():
        packed = _packed(path, part, compute)
        if packed is None:
            continue
        found += 1
        weight = nn.Parameter(packed, requires_grad=False)
        if type(part) is nn.Linear:
            memo[id(part.weight)] = weight
            continue
        rows, columns = packed.shape
        plain = nn.Linear(columns, rows, bias=False, device="meta")
        plain.weight, plain.training = weight, part.training
        plain.register_parameter("bias", part._parameters.get("bias"))
        memo[id(part)] = plain
    if not found:
        raise SpecError(
            f"from_quantized: {type(model).__name__} has no weight that bitsandbytes or torchao has quantized. Others "
            "are packed when they are sharded: Precision(main=fsdp.nf4)."
        )
    return copy.deepcopy(model, memo)


def _packed(path: str, part: nn.Module, compute: torch.dtype | None) -> PackedWeight | None:
    """A module's weight, if it is quantized."""
    weight: Any = part._parameters.get("weight")  # its own: adapters give the one of what they wrap
    kind = type(weight).__name__
    if kind == "Params4bit":
        return _four_bits(path, part, weight, compute)
    if kind == "Int8Params":
        return _eight_bits(path, part, weight, compute)
    if type(part) is nn.Linear and type(weight).__module__.startswith("torchao."):
        return _of_torchao(path, weight, compute)
    return None


def _four_bits(path: str, part: Any, weight: Any, compute: torch.dtype | None) -> PackedWeight:
    state: Any = weight.quant_state
    if state is None or state.quant_type != "nf4":
        raise SpecError(
            f"from_quantized: the weight of {path!r} is {'not quantized yet' if state is None else state.quant_type}; "
            "expected nf4, quantized when the model is moved to a device: bnb_4bit_quant_type='nf4'."
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise SpecError(
            f"from_quantized: the weight of {path!r} has its bytes in another order, which bitsandbytes gives them in "
            "a forward without gradients on CPUs. Take the model over before it is called so."
        )
    planes = {"data": weight.data.reshape(-1).view(torch.uint8), "absmax": state.absmax}
    if state.nested:
        if state.state2.blocksize != 256:
            raise SpecError(f"from_quantized: {path!r} has nested blocks of {state.state2.blocksize}; expected 256.")
        planes |= {"outer": state.state2.absmax, "mean": state.offset.view(1)}
    dtype = compute or _float(getattr(part, "compute_dtype", None) or state.dtype)
    return _made(nf4(state.blocksize, bool(state.nested)), tuple(state.shape), dtype, planes)


def _eight_bits(path: str, part: Any, weight: Any, compute: torch.dtype | None) -> PackedWeight:
    places: list[Any] = [weight, getattr(part, "state", None)]  # its first forward moves them
    found = [(one.CB, one.SCB) for one in places if getattr(one, "SCB", None) is not None]
    data, absmax = found[0] if found else (weight.data, weight.data)
    if not found or data.dtype is not torch.int8:
        raise SpecError(f"from_quantized: the weight of {path!r} is not quantized yet. Move the model to its device.")
    return _made(int8(), tuple(data.shape), compute or torch.float32, {"data": data, "absmax": absmax})


def _of_torchao(path: str, weight: Any, compute: torch.dtype | None) -> PackedWeight:
    names, context = weight.__tensor_flatten__()
    planes = {name: getattr(weight, name) for name in names}
    odd = [name for name, plane in planes.items() if type(plane) is not torch.Tensor or not plane.is_contiguous()]
    if odd:
        raise SpecError(f"from_quantized: {path!r} has a {type(weight).__name__} whose {odd[0]!r} is no plain tensor.")
    held = tuple((name, tuple(plane.shape), plane.dtype) for name, plane in planes.items())
    return _made(Wrapped(type(weight), context, held), tuple(weight.shape), compute or _float(weight.dtype), planes)


def _float(dtype: Any) -> torch.dtype:
    return dtype if dtype in FLOATS else torch.float32


def _made(codec: Codec, shape: Shape, dtype: torch.dtype, planes: Planes) -> PackedWeight:
    form = Form(codec, shape, dtype)
    return PackedWeight(form.bits_of(planes, next(iter(planes.values())).device), form)
