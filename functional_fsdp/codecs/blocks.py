"""Codecs that are ready: blocks with a scale, four bits, eight bits of moments.

Eight bits an element, and a scale for each block: `int8`, `fp8_block`, `mxfp8`.

nf4: four bits an element, by a codebook whose entries a normal distribution uses alike (QLoRA, Dettmers 2023).

    absmax [blocks] float32       data [n / 2] bytes: two numbers in a byte, the first one in its upper half
    with `nested`: absmax [blocks] bytes by a codebook of 256, and a maximum for each 256 of them, less their mean

int4: whole numbers from -7 to 7, two in a byte, and a maximum for each block.

dynamic8: eight bits an element by the dynamic data type, and a maximum for each block; for moments.

Weights that other packages have quantized, taken over as they are: bitsandbytes' modules, torchao's tensors.

    Linear4bit, Linear8bitLt             nn.Linear with a PackedWeight of the same bytes, by the codec nf4 or int8
    nn.Linear with a tensor of torchao   the same with a PackedWeight of what that tensor holds, by the codec Wrapped

Neither package is imported: it is there if one of its weights is. What a forward sees are the numbers that the own
`dequantize` of the package gives. The multiplication is torch's; LLM.int8 quantizes activations, too, this does not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F

from .._common.calls import traced_as
from .._common.errors import SpecError, expect
from .._nn.skeleton import needs_module
from .._shared.torch_names import disable_current_modes
from .._spec.precision import Codec, Form, Planes, Shape
from .._storage import PackedWeight
from .kernels import Blocked

E4M3 = torch.float8_e4m3fn
MOST = 448.0  # the largest number of float8_e4m3fn
BIAS = 127  # of an exponent in 8 bits
OF_E4M3 = 8  # the exponent of its largest power of 2


def in_blocks(tensor: torch.Tensor, block: int) -> torch.Tensor:
    """A tensor, flattened, in float32: [blocks, block], with zeros behind the last element."""
    flat = tensor.reshape(-1).to(torch.float32)
    more = -flat.numel() % block
    return (F.pad(flat, (0, more)) if more else flat).view(-1, block)


def by_most(tensor: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor's elements, each over the largest absolute one of its block (-1 to 1; a block of zeros stays), in
    float32 [n]; and these largest ones [blocks]."""
    rows = in_blocks(tensor, block)
    most = rows.abs().amax(dim=1)
    return (rows / torch.where(most == 0, 1, most)[:, None]).view(-1)[: tensor.numel()], most


def spread(data: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    """data [n], times the scale of its block [blocks], in float32, rounded to a dtype: [n]."""
    n, more = data.numel(), -data.numel() % block
    values = data.to(torch.float32)
    values = (F.pad(values, (0, more)) if more else values).view(-1, block)
    return values.mul_(scale[:, None]).view(-1)[:n].to(dtype)


def in_halves(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits, uint8 [n] -> [n / 2] bytes: two in a byte, the first one in its upper half."""
    numbers = F.pad(numbers, (0, numbers.numel() % 2))
    return (numbers[::2] << 4) | numbers[1::2]


def of_halves(data: torch.Tensor, n: int) -> torch.Tensor:
    """The first n numbers of `in_halves`: uint8 [n]."""
    return torch.stack((data >> 4, data & 15), dim=1).view(-1)[:n]


def check_block(name: str, block: int) -> None:
    if not isinstance(block, int) or isinstance(block, bool) or block < 2 or block & (block - 1):
        raise SpecError(f"{name}(block={block!r}): expected a power of 2, as 64: elements that have one scale.")


@dataclass(frozen=True)
class Int8(Blocked):
    """See `int8`."""

    block: int = 0
    kind: ClassVar[str] = "int8"

    def planes(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        n = prod(shape)
        rows = -(-n // self.block) if self.block else n // max(shape[-1], 1) if shape else 1
        return {"data": ((n,), torch.int8), "absmax": ((rows,), torch.float32)}

    def by_operations(self, tensor: torch.Tensor) -> Planes:
        width = self.shared(tuple(tensor.shape))
        rows = in_blocks(tensor, width) if width else tensor.new_zeros((0, 1), dtype=torch.float32)
        most = rows.abs().amax(dim=1)
        data = torch.round(rows * (127.0 / most)[:, None]).nan_to_num_(nan=0.0).clamp_(-127, 127).to(torch.int8)
        return {"data": data.view(-1)[: tensor.numel()], "absmax": most}

    def shared(self, shape: Shape) -> int:
        return self.block or (shape[-1] if shape else 1)

    def of_operations(self, planes: Planes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        values = spread(planes["data"], planes["absmax"], max(self.shared(shape), 1), torch.float32)
        return values.mul_(1 / 127).to(dtype).view(shape)

    def __str__(self) -> str:
        return f"int8(block={self.block})" if self.block else "int8()"


def int8(block: int = 0) -> Codec:
    """8-bit integers with an absolute maximum in float32 for each row, or each block: x = data · absmax / 127.

    Args:
        block: elements, flattened, that share a maximum; a power of 2. 0: a row of the last dim, as LLM.int8 has it
            (Dettmers et al., 2022); only `Precision(main=)` takes that.

    Returns:
        a codec: 1 byte an element and 4 bytes a row or block. A block that holds NaN or infinity is NaN throughout.

    Example: `fsdp.Precision(main=fsdp.int8(), compute=torch.bfloat16)`.
    """
    if block:
        check_block("int8", block)
    return Int8(block)


@dataclass(frozen=True)
class Fp8Block(Blocked):
    """See `fp8_block`."""

    block: int = 256
    tile: tuple[int, int] | None = None
    kind: ClassVar[str] = "fp8"

    def __post_init__(self) -> None:
        if self.tile is None:
            check_block("fp8_block", self.block)

    def planes(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        n = prod(shape)
        if self.tile is None:
            return {"data": ((n,), E4M3), "scale": ((-(-n // self.block),), torch.float32)}
        if len(shape) < 2:
            raise SpecError(f"{self}: the shape {shape} has no tiles; expected a matrix [n, m]. Name matrices only.")
        tiles = tuple(-(-size // one) for size, one in zip(shape[-2:], self.tile, strict=True))
        return {"data": (shape, E4M3), "scale": ((*shape[:-2], *tiles), torch.float32)}

    def by_operations(self, tensor: torch.Tensor) -> Planes:
        if self.tile is not None:
            tiles = self._tiles(tensor.to(torch.float32))
            scale = _scales(tiles.abs().amax(dim=(-3, -1)))
            data = (tiles / scale[..., :, None, :, None]).clamp_(-MOST, MOST)
            n, m = tensor.shape[-2:]
            whole = data.flatten(-2).flatten(-3, -2)[..., :n, :m]
            return {"data": whole.to(E4M3), "scale": scale}
        rows = in_blocks(tensor, self.block)
        scale = _scales(rows.abs().amax(dim=1))
        data = (rows / scale[:, None]).clamp_(-MOST, MOST).to(E4M3)
        return {"data": data.view(-1)[: tensor.numel()], "scale": scale}

    def _tiles(self, tensor: torch.Tensor) -> torch.Tensor:
        """[..., n, m] -> [..., n / tile, tile, m / tile, tile], with zeros behind the last row and column."""
        (high, wide), (n, m) = self.tile or (1, 1), tensor.shape[-2:]
        padded = F.pad(tensor, (0, -m % wide, 0, -n % high))
        return padded.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high))

    def of_operations(self, planes: Planes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        data, scale = planes["data"], planes["scale"]
        if self.tile is None:
            return spread(data, scale, self.block, dtype).view(shape)
        (high, wide), (n, m) = self.tile, shape[-2:]
        by = scale.repeat_interleave(high, dim=-2)[..., :n, :].repeat_interleave(wide, dim=-1)[..., :m]
        return (data.to(torch.float32) * by).to(dtype)

    def __str__(self) -> str:
        return f"fp8_block(block={self.block})" if self.tile is None else f"fp8_block(tile={self.tile})"


def _scales(most: torch.Tensor) -> torch.Tensor:
    """What a block is divided by, so that its largest number becomes float8's; 1 for a block of zeros."""
    scale = most / most.new_full((), MOST)  # by a number a GPU multiplies with its inverse, which it rounds
    return torch.where(scale == 0, 1, scale)


def fp8_block(block: int = 256, tile: tuple[int, int] | None = None) -> Codec:
    """float8_e4m3fn with a scale in float32 for each block, or for each tile of a matrix: x = data · scale.

    Args:
        block: elements, flattened, that share a scale; a power of 2. With 256 it is 0.508 of the bytes of bfloat16.
        tile: rows and columns that share one, as (128, 128) in checkpoints of DeepSeek-V3; in the place of `block`,
            and for `Precision(main=)` only.

    Returns:
        a codec: 1 byte an element and 4 bytes a block or tile. A block that holds NaN or infinity is NaN throughout.

    Example: `fsdp.Precision(compute=torch.bfloat16, wire=fsdp.fp8_block(), feedback=True)`.
    """
    if tile is None:
        return Fp8Block(block)
    sizes = (*expect("fp8_block(tile)", tile, Iterable, said := "rows and columns"),)
    if len(sizes) != 2 or isinstance(tile, str):
        raise SpecError(f"fp8_block(tile={tile!r}): expected {said}, as (128, 128).")
    return Fp8Block(0, (int(sizes[0]), int(sizes[1])))


@dataclass(frozen=True)
class Mxfp8(Blocked):
    """See `mxfp8`."""

    block: int = 32
    kind: ClassVar[str] = "mx"

    def planes(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        n = prod(shape)
        return {"data": ((n,), E4M3), "scale": ((-(-n // self.block),), torch.uint8)}

    def by_operations(self, tensor: torch.Tensor) -> Planes:
        rows = in_blocks(tensor, self.block)
        most = rows.abs().amax(dim=1)
        exponent = (most.view(torch.int32) >> 23) - BIAS - OF_E4M3  # its floor; of zeros the least
        finite = torch.isfinite(most)
        scale = torch.where(finite, exponent.clamp(-BIAS, BIAS) + BIAS, 255).to(torch.uint8)
        data = (rows / _power(scale)[:, None]).clamp_(-MOST, MOST).to(E4M3)
        return {"data": data.view(-1)[: tensor.numel()], "scale": scale}

    def of_operations(self, planes: Planes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return spread(planes["data"], _power(planes["scale"]), self.block, dtype).view(shape)

    def __str__(self) -> str:
        return "mxfp8()"


def _power(scale: torch.Tensor) -> torch.Tensor:
    """Biased exponents [blocks] -> powers of 2 in float32; NaN for 255, as the format says. By bits, which compilers
    know: of 0 it is the number below the least normal one."""
    bits = torch.where(scale == 0, 1 << 22, scale.to(torch.int32) << 23)
    return torch.where(scale == 255, 0x7FC00000, bits).view(torch.float32)


def mxfp8() -> Codec:
    """float8_e4m3fn with a power of 2 for each 32 elements (OCP Microscaling Formats v1.0, 2023): x = data · 2^scale.

    A scale is the power of 2 at or below a block's largest number, less that of the largest float8; what is then too
    large is the largest float8. Scales are e8m0 in bytes. Blocks are of 32 elements of the flattened tensor: those of a
    row where rows have a multiple of 32. Computed by torch's operations on any device.

    Returns:
        a codec: 1 byte an element and 1 byte for 32. A block that holds NaN or infinity is NaN throughout.

    Example: `fsdp.Precision(main=fsdp.mxfp8(), compute=torch.bfloat16)`.
    """
    return Mxfp8()


MOST_4 = 7.0


@dataclass(frozen=True)
class Int4(Blocked):
    """See `int4`."""

    block: int = 64
    kind: ClassVar[str] = "int4"

    def planes(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        n = prod(shape)
        return {"data": ((-(-n // 2),), torch.uint8), "absmax": ((-(-n // self.block),), torch.float32)}

    def by_operations(self, tensor: torch.Tensor) -> Planes:
        rows = in_blocks(tensor, self.block)
        most = rows.abs().amax(dim=1)
        numbers = torch.round(rows * (MOST_4 / most)[:, None]).nan_to_num_(nan=0.0).clamp_(-MOST_4, MOST_4).add_(8)
        return {"data": in_halves(numbers.to(torch.uint8).view(-1)[: tensor.numel()]), "absmax": most}

    def of_operations(self, planes: Planes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        numbers = of_halves(planes["data"], prod(shape))
        values = spread(numbers.to(torch.float32).sub_(8), planes["absmax"], self.block, torch.float32)
        return values.mul_(1 / MOST_4).to(dtype).view(shape)

    def __str__(self) -> str:
        return f"int4(block={self.block})"


def int4(block: int = 64) -> Codec:
    """Whole numbers from -7 to 7 with an absolute maximum in float32 for each block: x = data · absmax / 7.

    Args:
        block: elements, flattened, that share a maximum; a power of 2.

    Returns:
        a codec: half a byte an element and 4 bytes a block. A block that holds NaN or infinity is NaN throughout.

    Example: `fsdp.pmean(state, tree, axis="replica", wire=fsdp.int4)`.
    """
    check_block("int4", block)
    return Int4(block)


#: QLoRA's appendix E: 0 and 15 quantiles of the normal distribution, in float32
CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
NESTED = 256  # maxima that share one


@traced_as(lambda name, like: _made(name, like.device))
def table(name: str, like: torch.Tensor) -> torch.Tensor:
    """A codebook, "nf4", "dynamic" or "dynamic unsigned", where a tensor is."""
    if type(like) is torch.Tensor:
        return _kept(name, like.device)
    found: torch.Tensor = torch.ops.functional_fsdp.codebook(name, like.device)  # with constants on GPUs torch keeps no
    return found  # graph on disk


def _made(name: str, device: torch.device) -> torch.Tensor:
    return torch.tensor(CODES[name], dtype=torch.float32, device=device)


_kept = cache(_made)


@torch.library.custom_op("functional_fsdp::codebook", mutates_args=())
def _copied(name: str, device: torch.device) -> torch.Tensor:
    return _kept(name, device).clone()


@_copied.register_fake
def _(name: str, device: torch.device) -> torch.Tensor:
    return torch.empty(len(CODES[name]), dtype=torch.float32, device=device)


@disable_current_modes()
def dynamic_map(signed: bool = True) -> tuple[float, ...]:
    """The 256 numbers of the dynamic 8-bit data type, ascending (8-bit Optimizers via Block-wise Quantization, 2022).

    7 decades; in the decade 10^-k there are 2^(6 - k) fractions on each side of zero, or twice as many on one: the
    middles of as many steps from 0.1 to 1. With them 0 and 1.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        steps = torch.linspace(0.1, 1, count + 1, dtype=torch.float32, device="cpu")
        middles = ((steps[:-1] + steps[1:]) / 2.0 * 10.0 ** (decade - 6)).tolist()
        found += middles + ([-x for x in middles] if signed else [])
    return tuple(sorted(found))


#: made here, and not where a compiler looks on or tensors have no numbers
CODES = {"nf4": CODE, "dynamic": dynamic_map(), "dynamic unsigned": dynamic_map(signed=False)}


def _nearest(values: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """Which entry of an ascending codebook is nearest to each value."""
    return torch.bucketize(values, (code[1:] + code[:-1]) / 2)


@dataclass(frozen=True)
class Nf4(Blocked):
    """See `nf4`."""

    size: int = 64
    nested: bool = False
    kind: ClassVar[str] = "nf4"

    @property
    def block(self) -> int:  # type: ignore[override]
        return 0 if self.nested else self.size

    def planes(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        n = prod(shape)
        data, blocks = ((-(-n // 2),), torch.uint8), -(-n // self.size)
        if not self.nested:
            return {"data": data, "absmax": ((blocks,), torch.float32)}
        outer = ((-(-blocks // NESTED),), torch.float32)
        return {"data": data, "absmax": ((blocks,), torch.uint8), "outer": outer, "mean": ((1,), torch.float32)}

    def code(self, like: torch.Tensor) -> torch.Tensor:
        return table("nf4", like)

    def nested_code(self, like: torch.Tensor) -> torch.Tensor | None:
        return table("dynamic", like) if self.nested else None

    def shared(self, shape: Shape) -> int:
        return self.size

    def by_operations(self, tensor: torch.Tensor) -> Planes:
        scaled, most = by_most(tensor, self.size)
        data = in_halves(_nearest(scaled, table("nf4", tensor)).to(torch.uint8))
        if not self.nested:
            return {"data": data, "absmax": most}
        mean = most.mean() if most.numel() else most.new_zeros(())
        scaled, outer = by_most(most - mean, NESTED)
        inner = _nearest(scaled, table("dynamic", tensor)).to(torch.uint8)
        return {"data": data, "absmax": inner, "outer": outer, "mean": mean.view(1)}

    def absmax(self, planes: Planes) -> torch.Tensor:
        """The maximum of each block, float32 [blocks]."""
        if not self.nested:
            return planes["absmax"]
        values = table("dynamic", planes["data"])[planes["absmax"].to(torch.int32)]
        return spread(values, planes["outer"], NESTED, torch.float32) + planes["mean"]

    def unpack(self, planes: Planes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        if self.nested:
            return Nf4(self.size).unpack({"data": planes["data"], "absmax": self.absmax(planes)}, shape, dtype)
        return super().unpack(planes, shape, dtype)

    def of_operations(self, planes: Planes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        values = table("nf4", planes["data"])[of_halves(planes["data"], prod(shape)).to(torch.int32)]
        return spread(values, planes["absmax"], self.size, dtype).view(shape)

    def __str__(self) -> str:
        said = [f"block={self.size}"] * (self.size != 64) + ["nested=True"] * self.nested
        return f"nf4({', '.join(said)})"


def nf4(block: int = 64, nested: bool = False) -> Codec:
    """4-bit NormalFloat (QLoRA, Dettmers et al., 2023): x = code[data] · absmax, in float32, rounded.

    Args:
        block: elements, flattened, that share a maximum; a power of 2.
        nested: pack the maxima, too, in 8 bits: 0.127 bits an element in the place of 0.5. It needs all of the tensor
            at once, so only `Precision(main=)` takes it.

    Returns:
        a codec: half a byte an element, and 4 bytes a block. Its bytes are those of bitsandbytes.

    Example: `fsdp.Precision(main=fsdp.nf4(), compute=torch.bfloat16)`, for a frozen base.
    """
    check_block("nf4", block)
    return Nf4(block, nested)


@dataclass(frozen=True)
class Dynamic8(Blocked):
    """See `dynamic8`."""

    block: int = 128
    signed: bool = True
    kind: ClassVar[str] = "dynamic"

    def planes(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        n = prod(shape)
        return {"data": ((n,), torch.uint8), "absmax": ((-(-n // self.block),), torch.float32)}

    def code(self, like: torch.Tensor) -> torch.Tensor:
        return table(self._name, like)

    def by_operations(self, tensor: torch.Tensor) -> Planes:
        (values, most), code = by_most(tensor, self.block), self.code(tensor)
        below = (torch.bucketize(values, code, right=True) - 1).clamp_(0, 255)
        above = (below + 1).clamp_(max=255)
        low, high = code[below], code[above]
        data = torch.where(values - low >= (high - low) * 0.5, above, below).to(torch.uint8)
        return {"data": data, "absmax": most}

    def of_operations(self, planes: Planes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        values = self.code(planes["data"])[planes["data"].to(torch.int32)]
        return spread(values, planes["absmax"], self.block, dtype).view(shape)

    def nonnegative(self) -> Dynamic8:
        return replace(self, signed=False)

    @property
    def _name(self) -> str:
        return "dynamic" if self.signed else "dynamic unsigned"

    def __str__(self) -> str:
        said = [f"block={self.block}"] * (self.block != 128) + ["signed=False"] * (not self.signed)
        return f"dynamic8({', '.join(said)})"


def dynamic8(block: int = 128, signed: bool = True) -> Codec:
    """The dynamic 8-bit data type, block by block (8-bit Optimizers via Block-wise Quantization, Dettmers et al.,
    2022): x = code[data] · absmax, of a codebook of 256 numbers that reaches over seven decades.

    Args:
        block: elements, flattened, that share a maximum; a power of 2. For moments one that divides 128.
        signed: whether numbers may be negative. Second moments are packed by the codebook without a sign.

    Returns:
        a codec: 1 byte an element and 4 bytes a block. A block that holds NaN or infinity is NaN throughout.

    Example: `fsdp.adamw(lr=1e-4, moments=fsdp.dynamic8)`.
    """
    check_block("dynamic8", block)
    return Dynamic8(block, signed)


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
    return _made_of(nf4(state.blocksize, bool(state.nested)), tuple(state.shape), dtype, planes)


def _eight_bits(path: str, part: Any, weight: Any, compute: torch.dtype | None) -> PackedWeight:
    places: list[Any] = [weight, getattr(part, "state", None)]  # its first forward moves them
    found = [(one.CB, one.SCB) for one in places if getattr(one, "SCB", None) is not None]
    data, absmax = found[0] if found else (weight.data, weight.data)
    if not found or data.dtype is not torch.int8:
        raise SpecError(f"from_quantized: the weight of {path!r} is not quantized yet. Move the model to its device.")
    return _made_of(int8(), tuple(data.shape), compute or torch.float32, {"data": data, "absmax": absmax})


def _of_torchao(path: str, weight: Any, compute: torch.dtype | None) -> PackedWeight:
    names, context = weight.__tensor_flatten__()
    planes = {name: getattr(weight, name) for name in names}
    odd = [name for name, plane in planes.items() if type(plane) is not torch.Tensor or not plane.is_contiguous()]
    if odd:
        raise SpecError(f"from_quantized: {path!r} has a {type(weight).__name__} whose {odd[0]!r} is no plain tensor.")
    held = tuple((name, tuple(plane.shape), plane.dtype) for name, plane in planes.items())
    return _made_of(Wrapped(type(weight), context, held), tuple(weight.shape), compute or _float(weight.dtype), planes)


def _float(dtype: Any) -> torch.dtype:
    return dtype if dtype in FLOATS else torch.float32


def _made_of(codec: Codec, shape: Shape, dtype: torch.dtype, planes: Planes) -> PackedWeight:
    form = Form(codec, shape, dtype)
    return PackedWeight(form.bits_of(planes, next(iter(planes.values())).device), form)
