"""What an element is at each stage of a weight's and a gradient's life: a dtype, or a codec.

    Precision, LeafPrecision     what was asked for; what it comes to for one leaf
    Codec                        how a tensor is packed into bytes, and read again
    Form                         a codec of one tensor: its shape, its dtype, and where each plane lies in the bytes

    tensor ── pack ──▶ planes {name: tensor} ── end to end ──▶ bytes [n] uint8      what is stored, and what travels
    tensor ◀── unpack ── planes ◀── views ── bytes [n]                              what compute sees, rounded

A codec knows no ranks. Those that are ready are in `codecs/blocks.py`; what they do on the wire is
`codecs/packed_reductions.py`, in gathers `codecs/rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch

from .._common.calls import provided
from .._common.errors import SpecError, expect

START = 16  # bytes: each plane begins at a multiple of it, so that it can be read in its dtype
FLOATS = (torch.float64, torch.float32, torch.bfloat16)
FLOAT8S = (torch.float8_e4m3fn, torch.float8_e5m2)
_check_codecs = provided("codecs.check_precision")

Shape = tuple[int, ...]
Planes = dict[str, torch.Tensor]


class Codec:
    """How a tensor is packed into a few planes. A base class: a frozen dataclass of yours says the rest.

    What is stored and travels are the planes. What is the same for all tensors, a codebook say, is no plane: keep it in
    the codec. Ranks compare codecs by their fields.

    Attributes:
        block: how many elements of a tensor, flattened, are packed together, without a look at others. 0: all of them.
            Only codecs with blocks can be on the wire, `Precision(wire=)`, gathered of leaves that train, or moments.
            Parts of whole blocks are then packed apart: `pack` gets float32 [k * block], and dim 0 of each plane goes
            over elements or blocks in order, so that the planes of some blocks are a slice of those of all.

    Example: see the guide's page on codecs, "A codec of your own", which has one for leaves and one for wires.
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


def _dtype(given: Any) -> torch.dtype | None:
    """What was given, if it is a dtype."""
    return given if isinstance(given, torch.dtype) else None


def _name(dtype: torch.dtype | None) -> str:
    return "-" if dtype is None else str(dtype).removeprefix("torch.")


class WireAlong(NamedTuple):
    """A codec for what travels along one axis of the mesh."""

    axis: str
    codec: Codec

    def __str__(self) -> str:
        return f"{self.codec} over {self.axis}"


class LeafPrecision(NamedTuple):
    """The dtype of each stage of one leaf, and where its gradients are summed: "native" or "fp32".

    copy: whether shards are kept in the dtype of `gather` beside main weights, which have another one. packed: by which
    codec the leaf is stored and gathered, frozen; then all dtypes but `seen`, which compute sees, are those of bytes.
    codec: in which gradients of the dtype `wire` travel. feedback: whether what that loses is kept for the next step.
    gather_codec: in which main weights are gathered; then `gather` is the dtype of bytes. codec_axis: along which axis
    of the mesh gradients travel in the codec; "": along the first.
    """

    main: torch.dtype
    compute: torch.dtype
    grads: torch.dtype
    wire: torch.dtype
    sum: str
    gather: torch.dtype
    copy: bool = False
    packed: Codec | None = None
    seen: torch.dtype | None = None
    codec: Codec | None = None
    feedback: bool = False
    gather_codec: Codec | None = None
    codec_axis: str = ""

    def __str__(self) -> str:
        if self.packed is not None:
            return f"main {self.packed}, compute {_name(self.seen)}, frozen"
        said = [f"{kind} {_name(getattr(self, kind))}" for kind in ("main", "compute", "grads", "wire")]
        if self.codec is not None:
            packed = f"{self.codec}{' with feedback' * self.feedback}"
            said[3] = f"{said[3]}, over {self.codec_axis} {packed}" if self.codec_axis else f"wire {packed}"
        if self.copy:
            said.insert(2, f"gather {self.gather_codec or _name(self.gather)}")
        return f"{', '.join(said)}, sum {self.sum}"


_NO_SUM = (
    "Precision(sum='fp32') of a float64 wire would lose digits. Sums in float32 are of bfloat16 or float32 wires; "
    "leave sum out, or set wire=torch.float32."
)


@dataclass(frozen=True)
class Precision:
    """The dtype of each stage of a weight's and a gradient's life.

    Attributes:
        main: main weights and optimizer state. None: float32, or float64 for float64 leaves. Or a codec, as
            `fsdp.nf4()`, of frozen leaves: they are packed when they are sharded, and stored, gathered and saved so.
            Compute sees a `PackedWeight` of the dtype `compute`. None keeps leaves packed that are.
        compute: gathered weights, and so compute. None: as `main` if that was given, else each leaf's own dtype.
        gather: what is gathered, of which each rank keeps its shard beside main weights: `step` casts it once, and
            gathers cast nothing. The dtype `compute`, which is then named, too: 2 bytes an element of bfloat16, divided
            by the ranks that shard weights. Or torch.float8_e4m3fn or torch.float8_e5m2, for the matrices of linears
            that multiply in float8: a byte an element, with one scale a matrix. Compute sees a `Float8Weight`, whose
            dtype is `compute`, and so is that of its gradient. Or a codec with blocks, as `fsdp.mxfp8`, for leaves of
            any shape: each rank packs its part of main weights once, after the update, and gathers move the bytes.
            Compute sees a `PackedWeight` of the dtype `compute`; gradients go to main weights as if it were these
            (straight through). None: main weights, cast by each gather.
        grads: main gradients, in which reduced gradients are accumulated. None: as `main`. `step` casts them to `main`
            for the optimizer, so fused kernels never see a mix.
        wire: what travels in a reduction: gradients are cast to it once, when they are staged. None: as `compute`. Or a
            codec with blocks, as `fsdp.fp8_block`: gradients are staged in `compute`, packed, and sent by blocks; each
            rank adds up its part in float32 in the order of ranks. A sum that stays whole on each rank is packed again.
            Or a mapping of one axis of the mesh to such a codec, as `{"replica": fsdp.fp8_block}`: what travels along
            that axis is packed, and along others it is as without.
        sum: where a reduction is added up. "native": by the backend, in the wire's dtype and its own order. "fp32":
            each rank gets the summands of its part (an all-to-all) and adds them up in float32 in the order of the
            ranks, ((r0 + r1) + r2) + ..., the same bits in every run; further axes carry float32. What a rank gets
            takes as many bytes as the staging once more. "auto": "fp32" where the transport adds up itself, as
            copy_engine does, else "native".
        feedback: with a codec for `wire`: what packing loses of a gradient is added to the next one (error feedback,
            Seide et al., 2014). It takes as many elements of the dtype `compute` as a rank packs, in `State.residual`:
            those of the whole leaf, whatever the strategy, but along a second axis only those of its shard. And as
            many again in a step.
        inputs: cast floating inputs of a driven model's parts to the dtype that they compute in, as FSDP2 does.

    Integer and boolean leaves keep their dtype throughout.

    Raises:
        SpecError: for float16 (use bfloat16, which needs no loss scaling), for other dtypes than float64, float32 and
            bfloat16, for a `gather` that is neither float8 nor `compute` nor a codec with blocks, and for `sum="fp32"`
            of a float64 wire.

    >>> print(Precision(compute=torch.bfloat16).resolve(torch.float32))
    main float32, compute bfloat16, grads float32, wire bfloat16, sum native
    """

    main: torch.dtype | Codec | Callable[..., Codec] | None = None
    compute: torch.dtype | None = None
    grads: torch.dtype | None = None
    wire: torch.dtype | Codec | Callable[..., Codec] | Mapping[str, Codec | Callable[..., Codec]] | None = None
    sum: str = "auto"
    inputs: bool = False
    gather: torch.dtype | Codec | Callable[..., Codec] | None = None
    feedback: bool = False

    def __post_init__(self) -> None:
        for kind in ("main", "wire", "gather"):
            made: Any = getattr(self, kind)
            if callable(made):  # as fsdp.nf4, without brackets
                object.__setattr__(self, kind, made())
        if isinstance(self.wire, Mapping):
            object.__setattr__(self, "wire", WireAlong(*self._along(self.wire)))
        for kind in ("main", "compute", "grads", "wire"):
            dtype = getattr(self, kind)
            if kind in ("main", "wire") and isinstance(dtype, Codec | WireAlong):
                continue
            if dtype is torch.float16:
                raise SpecError(
                    f"Precision({kind}=torch.float16): float16 needs loss scaling, which is not supported. "
                    f"Use torch.bfloat16, which has float32's range."
                )
            if dtype is not None and dtype not in FLOATS:
                raise SpecError(f"Precision({kind}={dtype}): expected one of {', '.join(map(str, FLOATS))} or None.")
        if self.gather is not None or self.feedback is not False or isinstance(self.wire, Codec | WireAlong):
            _check_codecs(self)
        if self.sum not in ("auto", "native", "fp32"):
            raise SpecError(f"Precision(sum={self.sum!r}): expected 'auto', 'native' or 'fp32'.")
        expect("Precision(inputs)", self.inputs, bool, "True or False")
        if self.sum == "fp32" and (_dtype(self.wire) or self.compute or self.main) is torch.float64:
            raise SpecError(_NO_SUM)
        if isinstance(self.main, Codec) and (self.gather is not None or self.grads is not None):
            raise SpecError(
                f"Precision(main={self.main}) is of frozen leaves, whose bytes are gathered as they are: they have no "
                f"gradients. Leave gather={self.gather} and grads={self.grads} out."
            )

    @staticmethod
    def _along(wire: Mapping[str, Any]) -> tuple[str, Codec]:
        """The axis of a mapping, and its codec."""
        each = [(axis, made() if callable(made) else made) for axis, made in wire.items()]
        if len(each) != 1 or not isinstance(each[0][0], str) or not isinstance(each[0][1], Codec):
            raise SpecError(
                f"Precision(wire={dict(wire)}): expected one axis of the mesh and a codec, as "
                "{'replica': fsdp.fp8_block}. What travels along other axes has the dtype compute."
            )
        return each[0]

    def resolve(self, leaf: torch.dtype, exact: bool = False) -> LeafPrecision:
        """The dtypes of a leaf whose own dtype is `leaf`; nothing is left to be decided."""
        if not leaf.is_floating_point:
            return LeafPrecision(leaf, leaf, leaf, leaf, "native", leaf)
        if isinstance(self.main, Codec):
            return self.stored(self.main, leaf)
        own = _dtype(self.main)
        main = own or torch.promote_types(leaf, torch.float32)
        compute = self.compute or own or leaf
        axis, codec = self.wire if isinstance(self.wire, WireAlong) else ("", self.wire)
        codec = codec if isinstance(codec, Codec) else None
        wire = _dtype(self.wire) or compute
        if codec is not None and wire is torch.float64:
            raise SpecError(
                f"Precision(wire={codec}) of a leaf that compute sees in float64: it is packed from float32. Give "
                "compute=torch.float32 or torch.bfloat16, or leave wire out."
            )
        if self.sum == "fp32" and wire is torch.float64:
            raise SpecError(_NO_SUM)
        exact = self.sum == "fp32" or (self.sum == "auto" and exact and wire is not torch.float64)
        packing = self.gather if isinstance(self.gather, Codec) else None
        gather = torch.uint8 if packing is not None else _dtype(self.gather) or compute
        copy = self.gather is not None and gather is not main
        exact = exact or (codec is not None and not axis)
        kept = self.feedback and codec is not None
        said = "fp32" if exact else "native"
        return LeafPrecision(
            main, compute, self.grads or main, wire, said, gather, copy, None, None, codec, kept, packing, axis
        )

    def stored(self, codec: Codec, leaf: torch.dtype) -> LeafPrecision:
        """The dtypes of a leaf of this dtype that is packed by a codec, and frozen."""
        bits = torch.uint8
        return LeafPrecision(bits, bits, bits, bits, "native", bits, False, codec, self.compute or leaf)

    def __str__(self) -> str:
        if isinstance(self.main, Codec):
            return f"main {self.main}, compute {_name(self.compute) if self.compute else 'as the leaf'}, frozen"
        main = _name(_dtype(self.main)) if self.main else "float32 (float64 where leaves are)"
        compute = _name(self.compute) if self.compute else "as main" if self.main else "as the leaf"
        wire = (_name(_dtype(self.wire)) if _dtype(self.wire) else str(self.wire)) if self.wire else "as compute"
        wire += " with feedback" * self.feedback
        grads = _name(self.grads) if self.grads else "as main"
        added = "as the transport does" if self.sum == "auto" else self.sum
        gather = _name(_dtype(self.gather)) if _dtype(self.gather) else str(self.gather)
        compute += " (inputs too)" * self.inputs + (f", gather {gather}" if self.gather else "")
        return f"main {main}, compute {compute}, grads {grads}, wire {wire}, sum {added}"
