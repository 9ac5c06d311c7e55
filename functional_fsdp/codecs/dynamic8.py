"""dynamic8: eight bits an element by the dynamic data type, and a maximum for each block; for moments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import torch

from .._spec.precision import Codec, Planes, Shape
from .blocks import by_most, check_block, spread
from .four_bits import table
from .kernels import Blocked

__all__ = ["Dynamic8", "dynamic8"]


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
