"""int4: whole numbers from -7 to 7, two in a byte, and a maximum for each block."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from .._spec.codec import Codec, Planes, Shape
from .blocks import check_block, in_blocks, in_halves, of_halves, spread

__all__ = ["Int4", "int4"]

MOST = 7.0


@dataclass(frozen=True)
class Int4(Codec):
    """See `int4`."""

    block: int = 64

    def planes(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        n = prod(shape)
        return {"data": ((-(-n // 2),), torch.uint8), "absmax": ((-(-n // self.block),), torch.float32)}

    def pack(self, tensor: torch.Tensor) -> Planes:
        rows = in_blocks(tensor, self.block)
        most = rows.abs().amax(dim=1)
        numbers = torch.round(rows * (MOST / most)[:, None]).nan_to_num_(nan=0.0).clamp_(-MOST, MOST).add_(8)
        return {"data": in_halves(numbers.to(torch.uint8).view(-1)[: tensor.numel()]), "absmax": most}

    def unpack(self, planes: Planes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
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
