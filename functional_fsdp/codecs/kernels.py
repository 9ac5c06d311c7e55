"""One pass over memory: Triton kernels that pack a tensor, and that unpack and add up what ranks have sent.

    values [n] + lost [n] ──pack──▶ data, scales; lost [n]       what packing loses of them, where it is asked for
    data, scales of ranks ──unpack──▶ out [n]                    the sum, in the order of ranks, in float32, rounded

Planes lie flat, or in rows of `width` elements (see `rows`). The bits are those of each codec's torch operations, which
serve on CPUs, without Triton and in traces: divisions round, and nothing is multiplied and added at once.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeGuard

import torch

from .._common.calls import traced_as
from .._shared.device import casts_float8, runs_triton, tl, triton
from .._spec.precision import Codec, Form, Planes, Shape

SIZE, UPDATED = 2048, 1024  # elements of a program
FLOAT8 = ("fp8", "mx")  # kinds whose numbers a kernel must not read after its own cast: ptxas 12.8 then errs
jit: Any = triton.jit if triton is not None else lambda kernel: kernel


class Blocked(Codec):
    """A codec of two planes, "data" and scales of blocks, that the kernels know. Its own operations are `by_operations`
    and `of_operations`.

    Attributes:
        kind: what the kernels call it.
    """

    kind: ClassVar[str]

    def code(self, like: torch.Tensor) -> torch.Tensor:
        """The codebook, where a tensor is; of codecs without one any tensor."""
        return like

    def nested_code(self, like: torch.Tensor) -> torch.Tensor | None:
        """That of the scales, where these are packed, too."""
        return None

    def shared(self, shape: Shape) -> int:
        """How many elements of a tensor of this shape, flattened, have one scale; 0: that is said by tiles."""
        return self.block

    def pack(self, tensor: torch.Tensor) -> Planes:
        if not fused(self, tensor):
            return self.by_operations(tensor)
        shapes = self.planes(tuple(tensor.shape))
        planes = {name: tensor.new_empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        pack(self, tensor.contiguous().view(-1), planes)
        return planes

    def unpack(self, planes: Planes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        data = planes["data"]
        if not fused(self, data):
            return self.of_operations(planes, shape, dtype)
        out = torch.empty(shape, dtype=dtype, device=data.device)
        unpack(self, *both(planes), out)
        return out

    def of_bits(self, bits: torch.Tensor, form: Form) -> torch.Tensor:
        block = self.shared(form.shape)
        if not block or not fused(self, bits, block):
            return super().of_bits(bits, form)
        out = torch.empty(form.shape, dtype=form.dtype, device=bits.device)
        bits = bits.contiguous()
        unpack(self, bits, bits, out, block, form.starts)
        return out

    def by_operations(self, tensor: torch.Tensor) -> Planes:
        raise NotImplementedError

    def of_operations(self, planes: Planes, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError


@traced_as(lambda codec, tensor, block=0: False)
def fused(codec: Codec, tensor: torch.Tensor, block: int = 0) -> TypeGuard[Blocked]:
    """Whether the kernels do it, by this codec and where this tensor is. block: elements that have one scale."""
    if triton is None or not isinstance(codec, Blocked) or not (block or codec.block):
        return False
    runs = casts_float8 if codec.kind in FLOAT8 else runs_triton
    return type(tensor) is torch.Tensor and runs(tensor)


def pack(
    codec: Blocked, values: torch.Tensor, planes: Planes, width: int = 0,
    feedback: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Elements [n] -> planes: flat, or rows of `width` elements.

    feedback: what was lost before [n], which is added; and where what is lost now is put [n]. Not of `FLOAT8`.
    """
    (scales,) = (plane for name, plane in planes.items() if name != "data")
    data = planes["data"].view(torch.uint8)
    before, after = feedback or (values, values)
    if n := values.numel():
        _pack[(triton.cdiv(n, max(SIZE, codec.block)),)](
            values, before, after, data, scales, codec.code(values), n, data.stride(0), scales.stride(0), codec.kind,
            feedback is not None, width, codec.block, max(SIZE // codec.block, 1), enable_fp_fusion=False,
        )  # fmt: skip


def unpack(
    codec: Blocked, data: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, block: int = 0,
    starts: tuple[int, ...] = (0, 0), width: int = 0, row: int = 0, ranks: int = 1, stride: int = 0, mean: bool = False,
) -> None:  # fmt: skip
    """Bytes -> out [n], in its dtype: of several ranks the sum, or that divided by their number.

    Args:
        data, scales: uint8, in which the planes lie, perhaps the same. starts: where, from the first byte: numbers,
            scales, and of packed scales their own and their mean.
        block: elements that have one scale; 0: as the codec says. width: of planes in rows, elements of one; and `row`
            the bytes from one to the next. stride: bytes from the planes of a rank to those of the next.
    """
    if n := out.numel():
        code, nested = codec.code(out), codec.nested_code(out)
        _unpack[(triton.cdiv(n, SIZE),)](
            data, scales, code, code if nested is None else nested, out, n, starts[0], starts[1], starts[-2],
            starts[-1], row, stride, codec.kind, width, block or codec.block, ranks, mean, nested is not None, SIZE,
            enable_fp_fusion=False,
        )  # fmt: skip


def both(planes: Planes) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of numbers, and those of scales."""
    data, scales = (planes[name].contiguous().view(torch.uint8) for name in sorted(planes, key="data".__ne__))
    return data, scales


@jit
def _power(scale):  # type: ignore[no-untyped-def]
    """As `blocks._power`."""
    bits = tl.where(scale == 0, 1 << 22, scale.to(tl.int32) << 23)
    return tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit  # type: ignore[untyped-decorator]
def _value(number, scale, code, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a number stands for, by the scale of its block, in float32."""
    if KIND == "fp8" or KIND == "mx":
        value = number.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    elif KIND == "int8":
        value = number.to(tl.int8, bitcast=True).to(tl.float32) * scale * (1 / 127)
    elif KIND == "int4":
        value = (number.to(tl.float32) - 8.0) * scale * (1 / 7)
    else:
        value = tl.load(code + number.to(tl.int32)) * scale
    return value


@jit  # type: ignore[untyped-decorator]
def _whole(x, factor, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nearest whole number to x · factor, the even one of two; of NaN 0."""
    scaled = x * factor
    scaled = tl.clamp(tl.where(scaled == scaled, scaled, 0.0), -MOST, MOST)
    return (scaled + 12582912.0) - 12582912.0  # 1.5 · 2^23: nothing is left behind the point


@jit  # type: ignore[untyped-decorator]
def _number(x, code, KIND: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Blocks [COUNT, BLOCK] -> their numbers, the scales that are kept [COUNT], and these in float32."""
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)  # NaN is the largest
    one = tl.full([COUNT], 1.0, tl.float32)
    kept = most
    scale = most
    if KIND == "fp8":
        scale = tl.math.div_rn(most, one * 448.0)
        scale = tl.where(scale == 0, 1.0, scale)
        kept = scale
    elif KIND == "mx":
        exponent = tl.clamp((((most.to(tl.int32, bitcast=True) >> 23) - 135).to(tl.float32)), -127.0, 127.0)
        kept = tl.where(most < float("inf"), exponent.to(tl.int32) + 127, 255).to(tl.uint8)
        scale = _power(kept)
    if KIND == "fp8" or KIND == "mx":
        divided = tl.math.div_rn(x, tl.broadcast_to(scale[:, None], [COUNT, BLOCK]))
        divided = tl.clamp(divided, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        number = divided.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif KIND == "int8":
        number = _whole(x, (tl.math.div_rn(one, most) * 127.0)[:, None], 127.0).to(tl.int8).to(tl.uint8, bitcast=True)
    elif KIND == "int4":
        number = (_whole(x, (tl.math.div_rn(one, most) * 7.0)[:, None], 7.0) + 8.0).to(tl.uint8)
    else:
        by = tl.where(most == 0, 1.0, most)
        divided = tl.math.div_rn(x, tl.broadcast_to(by[:, None], [COUNT, BLOCK]))
        found = tl.zeros([COUNT, BLOCK], tl.int32)
        if KIND == "nf4":  # how many middles between two numbers of the codebook are below; of NaN all
            for i in tl.static_range(15):
                middle = (tl.load(code + i) + tl.load(code + i + 1)) * 0.5
                found += tl.where(middle >= divided, 0, 1)
        else:  # the last number of the codebook that is not above, or the next one
            for i in tl.static_range(8):
                tried = found + (128 >> i)
                found = tl.where(tl.load(code + tried) > divided, found, tried)
            above = tl.minimum(found + 1, 255)
            low = tl.load(code + found)
            found = tl.where(divided - low >= (tl.load(code + above) - low) * 0.5, above, found)
        number = found.to(tl.uint8)
    return number, kept, scale


@jit  # type: ignore[untyped-decorator]
def _pack(  # type: ignore[no-untyped-def]
    values, before, after, data, scales, code, n, data_row, scale_row, KIND: tl.constexpr, FEEDBACK: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < n
    x = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    if FEEDBACK:
        x += tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
    number, kept, scale = _number(x, code, KIND, BLOCK, COUNT)
    if FEEDBACK:
        tl.store(after + at, (x - _value(number, scale[:, None], code, KIND)).to(after.dtype.element_ty), mask=inside)
    first = block * BLOCK  # of the flat planes, or of their row
    if WIDTH:
        row = first // WIDTH
        data += row[:, None] * data_row
        scales += row * scale_row
        first -= row * WIDTH
    tl.store(scales + first // BLOCK, kept, mask=block * BLOCK < n)
    if KIND == "int4" or KIND == "nf4":
        pairs = tl.reshape(tl.where(inside, number, 0), [COUNT, BLOCK // 2, 2])
        high, low = tl.split(pairs)
        place = tl.arange(0, BLOCK // 2)[None, :]
        there = block[:, None] * BLOCK + 2 * place < n
        tl.store(data + (first[:, None] // 2 + place), (high << 4) | low, mask=there)
    else:
        tl.store(data + (first[:, None] + tl.arange(0, BLOCK)[None, :]), number, mask=inside)


@jit  # type: ignore[untyped-decorator]
def _unpack(  # type: ignore[no-untyped-def]
    data, scales, code, nested, out, n, data_start, scale_start, outer_start, mean_start, row_bytes, rank_bytes,
    KIND: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr, MEAN: tl.constexpr,
    NESTED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    place = at
    outer = scales + outer_start
    mean = scales + mean_start
    data += data_start
    scales += scale_start
    if WIDTH:
        row = at // WIDTH
        data += row * row_bytes
        scales += row * row_bytes
        place = at - row * WIDTH
    total = _read(data, scales, code, nested, outer, mean, place, inside, KIND, BLOCK, NESTED)
    for _ in range(1, RANKS):
        data += rank_bytes
        scales += rank_bytes
        total += _read(data, scales, code, nested, outer, mean, place, inside, KIND, BLOCK, NESTED)
    if MEAN:
        total = tl.math.div_rn(total, tl.full([SIZE], RANKS, tl.float32))
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@jit  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]
    data, scales, code, nested, outer, mean, place, inside, KIND: tl.constexpr, BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
):  # fmt: skip
    block = place // BLOCK
    if KIND == "mx":
        scale = _power(tl.load(scales + block, mask=inside, other=0))
    elif NESTED:  # of 256 of them the largest, and what was taken off all
        most = tl.load(outer.to(tl.pointer_type(tl.float32)) + block // 256, mask=inside, other=0.0)
        scale = tl.load(nested + tl.load(scales + block, mask=inside, other=0).to(tl.int32)) * most
        scale += tl.load(mean.to(tl.pointer_type(tl.float32)))
    else:
        scale = tl.load(scales.to(tl.pointer_type(tl.float32)) + block, mask=inside, other=0.0)
    if KIND == "int4" or KIND == "nf4":
        number = tl.load(data + place // 2, mask=inside, other=0)
        number = tl.where(place % 2 == 0, number >> 4, number & 15)
    else:
        number = tl.load(data + place, mask=inside, other=0)
    return _value(number, scale, code, KIND)


def update(
    codec: Codec, p: torch.Tensor, g: torch.Tensor, moments: tuple[Planes, Planes], taken: torch.Tensor,
    settings: tuple[Any, ...], skip: torch.Tensor | None, rates: dict[torch.Tensor, tuple[torch.Tensor, ...]],
) -> bool:  # fmt: skip
    """AdamW of weights [n] by gradients [n] and packed moments, of which the second ones have no sign: one launch, in
    which moments are unpacked, changed in float32, and packed. False, and nothing is done, if there is no kernel.

    Args:
        taken: the steps that were taken, float32 []. settings: lr, betas, eps and weight decay. rates: what is computed
            of both on the device, by `taken`, is kept there.
    """
    lr, betas, eps, decay = settings
    if not fused(codec, p) or codec.kind in ("int4", "nf4") or p.dtype.itemsize > 4:
        return False
    if taken not in rates:
        root = (1 - betas[1] ** taken).sqrt()
        found = torch.ones_like(taken) - lr * decay, lr / (1 - betas[0] ** taken), root
        rates[taken] = tuple(rate.float() for rate in found)  # whatever dtype a function's lr has
    torch.autograd.graph.increment_version([p, *moments[0].values(), *moments[1].values()])
    (mean, mean_scale), (square, square_scale) = ([some.pop("data"), *some.values()] for some in map(dict, moments))
    unsigned: Any = codec.nonnegative()
    if n := p.numel():
        _update[(triton.cdiv(n, UPDATED),)](
            p, g, mean, mean_scale, square, square_scale, codec.code(p), unsigned.code(p), *rates[taken],
            p if skip is None else skip, n, eps, 1 - betas[0], betas[1], 1 - betas[1], codec.kind, skip is not None,
            codec.block, UPDATED // codec.block, enable_fp_fusion=False,
        )  # fmt: skip
    return True


@jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    weights, grads, means, mean_scales, squares, square_scales, mean_code, square_code, keeps, step, root, skip, n,
    eps, mean_rate, square_kept, square_rate, KIND: tl.constexpr, SKIPS: tl.constexpr, BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < n
    there = block * BLOCK < n
    if SKIPS:
        there = there & (tl.load(skip) == 0)
        inside = inside & (tl.load(skip) == 0)
    grad = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32)
    mean = _moment(means, mean_scales, mean_code, at, block, inside, there, KIND)
    mean += mean_rate * (grad - mean)
    square = _moment(squares, square_scales, square_code, at, block, inside, there, KIND)
    square = square_kept * square + square_rate * grad * grad
    divided = tl.math.sqrt_rn(square)
    divided = tl.math.div_rn(divided, tl.full([COUNT, BLOCK], 1.0, tl.float32) * tl.load(root)) + eps
    weight = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    weight = weight * tl.load(keeps) - tl.math.div_rn(tl.load(step) * mean, divided)
    tl.store(weights + at, weight.to(weights.dtype.element_ty), mask=inside)
    number, kept, _ = _number(mean, mean_code, KIND, BLOCK, COUNT)
    tl.store(means + at, number, mask=inside)
    tl.store(mean_scales + block, kept, mask=there)
    number, kept, _ = _number(square, square_code, KIND, BLOCK, COUNT)
    tl.store(squares + at, number, mask=inside)
    tl.store(square_scales + block, kept, mask=there)


@jit  # type: ignore[untyped-decorator]
def _moment(data, scales, code, at, block, inside, there, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    scale = tl.load(scales + block, mask=there, other=0)
    if KIND == "mx":
        scale = _power(scale)
    value = _value(tl.load(data + at, mask=inside, other=0), scale[:, None], code, KIND)
    return tl.where(inside, value, 0.0)  # of a codebook number 0 is the least one
