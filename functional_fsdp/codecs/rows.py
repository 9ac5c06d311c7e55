"""Rows: the planes of a codec with blocks, row by row, so that a slice of a tensor's elements is a slice of its bytes.

    elements [rows · width] ──pack──▶ bytes [rows, nbytes]: in each row the planes of its blocks, one after the other

A rank packs its part of a bucket without a look at others', and an all-gather of the bytes has every leaf ready to be
read. A row is of as many blocks as it takes for each of its planes to begin at a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm, prod

import torch

from .._common.calls import provide
from .._spec.precision import START, Codec, Form, Planes, Shape
from .kernels import fused, pack, unpack

__all__ = ["Rows"]

MOST = 1 << 23  # elements that are packed at once: what is between is some float32 tensors of so many


@dataclass(frozen=True)
class Rows(Codec):
    """A codec whose planes lie row by row.

    Attributes:
        codec: one with blocks.
    """

    codec: Codec

    @cached_property
    def width(self) -> int:
        """Elements of a row."""
        block = self.codec.block
        return block * lcm(*(START // gcd(START, nbytes) for nbytes in _sizes(self.codec, block).values()))

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Where the planes lie in a row: [first, last) byte."""
        found, at = {}, 0
        for name, nbytes in _sizes(self.codec, self.width).items():
            found[name] = at, at + nbytes
            at += nbytes
        return found

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return sum(_sizes(self.codec, self.width).values())

    def bytes_of(self, numel: int) -> int:
        """Bytes of so many elements, whole rows of them."""
        return -(-numel // self.width) * self.nbytes

    def planes(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        return {"rows": ((-(-prod(shape) // self.width), self.nbytes), torch.uint8)}

    def pack(self, tensor: torch.Tensor) -> Planes:
        flat = tensor.contiguous().view(-1)
        more = -flat.numel() % self.width
        flat = torch.cat((flat, flat.new_zeros(more))) if more else flat
        rows = torch.empty(flat.numel() // self.width, self.nbytes, dtype=torch.uint8, device=tensor.device)
        self.pack_into(flat, rows.view(-1))
        return {"rows": rows}

    def pack_into(self, values: torch.Tensor, bits: torch.Tensor) -> None:
        """Elements [rows · width] -> their bytes, uint8 [rows · nbytes]."""
        if fused(self.codec, values):
            pack(self.codec, values, self._planes(bits.view(-1, self.nbytes)), self.width)
            return
        for start, stop in _pieces(values.numel(), self.width):
            rows = bits[start // self.width * self.nbytes : stop // self.width * self.nbytes].view(-1, self.nbytes)
            planes = self.codec.pack(values[start:stop].to(torch.float32))
            for name, (first, last) in self.places.items():
                rows[:, first:last].copy_(planes[name].view(torch.uint8).view(len(rows), -1))

    def unpack(self, planes: Planes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        rows, found = planes["rows"], {}
        if fused(self.codec, rows):
            return self.of_bits(rows.reshape(-1), Form(self, shape, dtype))
        for name, (own, kind) in self.codec.planes(shape).items():
            first, last = self.places[name]
            found[name] = rows[:, first:last].reshape(-1).view(kind)[: prod(own)].view(own)
        return self.codec.unpack(found, shape, dtype)

    def of_bits(self, bits: torch.Tensor, form: Form) -> torch.Tensor:
        if not fused(self.codec, bits):
            return super().of_bits(bits, form)
        out = torch.empty(form.shape, dtype=form.dtype, device=bits.device)
        bits = bits.contiguous()
        unpack(self.codec, bits, bits, out, 0, self.starts, self.width, self.nbytes)
        return out

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where in a row the planes begin, "data" first."""
        return tuple(first for _, (first, _) in sorted(self.places.items(), key=lambda place: place[0] != "data"))

    def _planes(self, rows: torch.Tensor) -> Planes:
        """The planes within rows, uint8 [rows, nbytes]: a row for each."""
        kinds = self.codec.planes((self.width,))
        return {name: rows[:, first:last].view(kinds[name][1]) for name, (first, last) in self.places.items()}

    def __str__(self) -> str:
        return str(self.codec)


def _sizes(codec: Codec, numel: int) -> dict[str, int]:
    """Bytes of each plane of so many elements."""
    return {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in codec.planes((numel,)).items()}


def _pieces(numel: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(MOST // width, 1) * width
    return ((start, min(start + step, numel)) for start in range(0, numel, step))


provide("codecs", Rows)
