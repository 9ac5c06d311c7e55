"""Codecs in gathers, and what of a precision cannot be packed.

`Rows`: the planes of a codec with blocks, row by row, so that a slice of a tensor's elements is a slice of its bytes.

    elements [rows · width] ──pack──▶ bytes [rows, nbytes]: in each row the planes of its blocks, one after the other

A rank packs its part of a bucket without a look at others', and an all-gather of the bytes has every leaf ready to be
read. A row is of as many blocks as it takes for each of its planes to begin at a multiple of 16 bytes.

What cannot be packed is refused where a precision is made (`check_precision`), and where a layout is planned
(`refuse_gather`, `refuse_wire`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm, prod

import torch

from .._common.calls import provide
from .._common.errors import SpecError
from .._plan.layout import LeafInfo
from .._spec.placement import Placement
from .._spec.precision import FLOAT8S, START, Codec, Form, LeafPrecision, Planes, Precision, Shape, WireAlong
from .._spec.spec import Spec
from .kernels import fused, pack, unpack

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


def check_precision(precision: Precision) -> None:
    """Refuse what a `Precision` says of codecs, and of gathers in another dtype, that cannot be.

    Raises:
        SpecError: a codec without blocks, feedback without a codec, a dtype that is not gathered.
    """
    _check_wire(precision)
    _check_gather(precision)


def _check_wire(precision: Precision) -> None:
    """Refuse what cannot travel in few bits."""
    if not isinstance(precision.feedback, bool):
        raise SpecError(f"Precision(feedback={precision.feedback!r}): expected True or False.")
    codec = precision.wire.codec if isinstance(precision.wire, WireAlong) else precision.wire
    if not isinstance(codec, Codec):
        if precision.feedback:
            raise SpecError(
                f"Precision(wire={precision.wire}, feedback=True): feedback is of wires in a codec, whose errors it "
                "keeps for the next step. Give one, as wire=fsdp.fp8_block, or leave feedback out."
            )
        return
    if not codec.block:
        raise SpecError(
            f"Precision(wire={precision.wire}): it packs all of a tensor at once, and ranks are sent parts. Give a "
            "codec with blocks, as fsdp.fp8_block or fsdp.int8(64)."
        )
    one, two = (codec.planes((blocks * codec.block,)) for blocks in (1, 2))
    for name, (shape, _) in two.items():
        first = tuple(one[name][0])
        if not first or tuple(shape) != (2 * first[0], *first[1:]):
            raise SpecError(
                f"Precision(wire={precision.wire}): its plane {name!r} is {list(first)} of one block ({codec.block} "
                f"elements), and {list(shape)} of two. Ranks are sent runs of blocks, which are cut along dim 0: have "
                "twice as many there, and nothing else that grows."
            )
    if precision.sum == "native" and isinstance(precision.wire, Codec):
        raise SpecError(
            f"Precision(wire={precision.wire}, sum='native'): backends do not add up packed numbers. Leave sum out: "
            "they are added up in float32, in the order of ranks."
        )


def _check_gather(precision: Precision) -> None:
    """Refuse what cannot be gathered."""
    if isinstance(precision.gather, Codec):
        if not precision.gather.block:
            raise SpecError(
                f"Precision(gather={precision.gather}): it packs all of a tensor at once, and each rank has a part. "
                "Give a codec with blocks, as fsdp.mxfp8 or fsdp.fp8_block."
            )
    elif precision.gather is not None and precision.gather not in FLOAT8S and precision.gather is not precision.compute:
        raise SpecError(
            f"Precision(gather={precision.gather}, compute={precision.compute}): expected one of "
            f"{', '.join(map(str, FLOAT8S))}; or a codec with blocks, as fsdp.mxfp8; or the dtype of compute, "
            "named there, too; or None: then gathers cast main weights to the dtype of compute."
        )


def refuse_gather(leaf: LeafInfo, placement: Placement, dtypes: LeafPrecision) -> None:
    """What cannot be gathered in float8, or in a codec."""
    said = f"Precision(gather={dtypes.gather_codec or dtypes.gather}) of the leaf {leaf.path!r}"
    if dtypes.gather_codec is None and len(leaf.shape) != 2:
        raise SpecError(
            f"{said}, of shape {leaf.shape}: expected a matrix [n, m], of a linear that multiplies in float8. Name the "
            f"weights of such linears only, or give this leaf a rule before that one, {{{leaf.path!r}: Precision()}}."
        )
    if placement.on_host:
        raise SpecError(
            f"{said}: its state lies in the host's memory ({placement}), through which scales cannot follow an update. "
            'Use memory_kind="device" for it, or leave gather out.'
        )


def refuse_wire(leaf: LeafInfo, placement: Placement, dtypes: LeafPrecision, spec: Spec) -> None:
    """What does not send gradients in few bits."""
    codec, axis = dtypes.codec, dtypes.codec_axis
    if axis and axis not in placement.data:
        raise SpecError(
            f"Precision(wire={{{axis!r}: {codec}}}) of the leaf {leaf.path!r}: its gradients are reduced along "
            f"{', '.join(map(repr, placement.data)) or 'no axis'}. Name one of these, or leave wire out for this leaf."
        )
    second = bool(axis) and prod(spec.axes[one] for one in placement.hops[: placement.hops.index(axis)]) > 1
    if spec.transport.name != "collective" and not (second and spec.transport.exact):
        raise SpecError(
            f"Precision(wire={codec}) of the leaf {leaf.path!r}: the transport {spec.transport.name!r} does not move "
            "packed gradients. Use Spec(transport='collective')."
        )
    if placement.on_host:
        raise SpecError(
            f"Precision(wire={codec}) of the leaf {leaf.path!r}: its state lies in the host's memory ({placement}), "
            'and what is left of packing would not. Use memory_kind="device" for it, or another wire.'
        )


provide("codecs", check_precision, refuse_gather, refuse_wire)
