"""Codec: how a tensor is packed into bytes, and read again. What a stage of a leaf's life may be in a dtype's place.

    tensor ── pack ──▶ planes {name: tensor} ── end to end ──▶ bytes [n] uint8      what is stored, and what travels
    tensor ◀── unpack ── planes ◀── views ── bytes [n]                              what compute sees, rounded

A codec knows no ranks. A `Form` is a codec of one tensor: its shape, its dtype, and where each plane lies in the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

START = 16  # bytes: each plane begins at a multiple of it, so that it can be read in its dtype

Shape = tuple[int, ...]
Planes = dict[str, torch.Tensor]


class Codec:
    """How a tensor is packed into a few planes. A base class: a frozen dataclass of yours says the rest.

    What is stored and travels are the planes. What is the same for all tensors, a codebook say, is no plane: keep it in
    the codec. Ranks compare codecs by their fields.

    Attributes:
        block: how many elements of a tensor, flattened, are packed together, without a look at others. 0: all of them.
            Only codecs with blocks can be on the wire: `Precision(wire=)`.

    Example: see the guide's page on codecs, which has one of 30 lines.
    """

    block: int = 0

    def planes(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        """The shape and the dtype of each plane of a tensor of this shape. Pure. Raises SpecError if there are none."""
        raise NotImplementedError

    def pack(self, tensor: torch.Tensor) -> Planes:
        """The planes of a floating tensor, on its device. The same bits for the same numbers."""
        raise NotImplementedError

    def unpack(self, planes: Planes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """The tensor that the planes stand for, as a new one of this shape and dtype. Changes nothing."""
        raise NotImplementedError

    def of_bits(self, bits: torch.Tensor, form: Form) -> torch.Tensor:
        """`unpack`, of the bytes in which all planes lie. Another one where a kernel reads them as they are."""
        return self.unpack(form.planes(bits), form.shape, form.dtype)

    def nonnegative(self) -> Codec:
        """The codec for tensors without negative numbers, as second moments. By default the same."""
        return self

    def __str__(self) -> str:
        return type(self).__name__


class Plane(NamedTuple):
    """Where a plane lies in the bytes of a leaf: `nbytes` from `start` on, of this shape and dtype."""

    name: str
    shape: Shape
    dtype: torch.dtype
    start: int
    nbytes: int


@dataclass(frozen=True)
class Form:
    """What the bytes of a packed tensor are: by which codec, of which shape, and of which dtype it looks.

    >>> from functional_fsdp import nf4
    >>> form = Form(nf4(), (64, 128), torch.bfloat16)
    >>> form.nbytes, form.numel  # half a byte an element, and 4 bytes for 64 of them
    (4608, 8192)
    """

    codec: Codec
    shape: Shape
    dtype: torch.dtype

    @cached_property
    def places(self) -> tuple[Plane, ...]:
        found, at = [], 0
        for name, (shape, dtype) in self.codec.planes(self.shape).items():
            nbytes = prod(shape) * dtype.itemsize
            found.append(Plane(name, tuple(shape), dtype, at, nbytes))
            at += -(-nbytes // START) * START
        return tuple(found)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where the planes begin, "data" first."""
        return tuple(place.start for place in sorted(self.places, key=lambda place: place.name != "data"))

    @cached_property
    def nbytes(self) -> int:
        """Bytes that are stored: those of all planes."""
        return self.places[-1].start + self.places[-1].nbytes if self.places else 0

    @cached_property
    def strides(self) -> Shape:
        """Of a contiguous tensor of this shape."""
        return tuple(prod(max(size, 1) for size in self.shape[i + 1 :]) for i in range(len(self.shape)))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this shape -> its bytes, uint8 [nbytes]."""
        return self.bits_of(self.codec.pack(tensor.detach().view(self.shape)), tensor.device)

    def bits_of(self, planes: Planes, device: torch.device) -> torch.Tensor:
        """Planes -> the bytes that have them, uint8 [nbytes]."""
        bits = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        for name, own in self.planes(bits).items():
            own.copy_(planes[name].view(own.shape))
        return bits

    def planes(self, bits: torch.Tensor) -> Planes:
        """The planes, as views of the bytes."""
        return {
            place.name: bits[place.start : place.start + place.nbytes].view(place.dtype).view(place.shape)
            for place in self.places
        }

    def unpack(self, bits: torch.Tensor) -> torch.Tensor:
        """Bytes, uint8 [nbytes] -> the tensor that they stand for."""
        return self.codec.of_bits(bits, self)

    def __str__(self) -> str:
        return f"{self.codec} of {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
