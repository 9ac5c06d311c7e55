"""nf4: four bits an element, by a codebook whose entries a normal distribution uses alike (QLoRA, Dettmers 2023).

    absmax [blocks] float32       data [n / 2] bytes: two numbers in a byte, the first one in its upper half
    with `nested`: absmax [blocks] bytes by a codebook of 256, and a maximum for each 256 of them, less their mean

int4: whole numbers from -7 to 7, two in a byte, and a maximum for each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import ClassVar

import torch

from .._common.calls import traced_as
from .._common.torch_names import disable_current_modes
from .._spec.precision import Codec, Planes, Shape
from .blocks import by_most, check_block, in_blocks, in_halves, of_halves, spread
from .kernels import Blocked

__all__ = ["Int4", "Nf4", "dynamic_map", "int4", "nf4", "table"]

MOST = 7.0


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
        numbers = torch.round(rows * (MOST / most)[:, None]).nan_to_num_(nan=0.0).clamp_(-MOST, MOST).add_(8)
        return {"data": in_halves(numbers.to(torch.uint8).view(-1)[: tensor.numel()]), "absmax": most}

    def of_operations(self, planes: Planes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        numbers = of_halves(planes["data"], prod(shape))
        values = spread(numbers.to(torch.float32).sub_(8), planes["absmax"], self.block, torch.float32)
        return values.mul_(1 / MOST).to(dtype).view(shape)

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
