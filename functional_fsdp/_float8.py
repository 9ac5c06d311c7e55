"""Weights gathered in float8: their scales, their casts, and the linears of torchao that take them as they are.

`Float8Weight`: a weight that was gathered in float8. What compute sees of it: a tensor of the compute dtype.

    bits [n, m] float8, lent ──┐                     ┌── a linear that multiplies in float8 takes bits and scale
    scale [] float32 ──────────┴── Float8Weight ─────┤
                                   [n, m] bfloat16   └── any other operation reads bits / scale, in bfloat16

autograd casts a gradient to its leaf's dtype. That of a float8 leaf would be float8, and this one's is bfloat16.

`take_float8`: torchao's linears, in a skeleton, take a `Float8Weight` as it is, and do not cast it again.

    skeleton_of(module)    each Float8Linear gets a subclass of its class; a module of one's own is not touched
    its forward            Float8Weight ── differentiable, nothing is copied ──▶ torchao's own tensor of float8

torchao is not imported: it is there if one of its linears is.

`rescale`: scales of weights in float8, a number for each leaf, and the cast by it.

It follows from the largest number of the whole leaf, and all leaves of all buckets ask the other ranks for it at once:

    main ──▶ the largest number of each leaf's part ── all-reduce, max ──▶ scale ──▶ main · scale, cast

Main weights count as compute would see them, rounded to its dtype, and the numbers are those of torchao's dynamic
scaling of a whole tensor. So a weight that is gathered in float8 has the bits of one that is gathered in the compute
dtype and cast where it is used.

`cast_float8`: main weights, as compute would see them, times the scale of their leaf.

On a GPU of compute capability 9.0 on, one Triton kernel reads each weight once and writes its byte. Without Triton, and
elsewhere, it is an operation after the other, some rows at a time. Both give the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn as nn
from torch.utils.weak import WeakTensorKeyDictionary

from ._common.calls import provide
from ._common.errors import SpecError
from ._common.record import Collective, over_each_axis
from ._common.torch_names import foreach_copy_, make_wrapper
from ._plan.layout import ALIGN, Bucket
from ._runtime.runtime import runtime_of
from ._shared.device import casts_float8, tl, triton
from ._shared.torch_names import foreach_norm
from ._storage import FlatBuffer, PackedWeight, alias_of


class Float8Weight(PackedWeight):
    """A gathered matrix [n, m] that has the compute dtype to all who ask, and is bytes and a scale.

    Attributes:
        bits: [n, m], torch.float8_e4m3fn or torch.float8_e5m2: lent, as all gathered weights.
        scale: float32 [], by which the weight was multiplied before it was cast.

    Linears of torchao that multiply in float8 take both as they are. Every other operation is done with
    `dequantized()`, which is right, and slower. It cannot be changed in place.

    Example: `weights["weight"].bits`, of `state, weights = fsdp.unshard(state, unit)`.
    """

    scale: torch.Tensor
    _how = "was gathered in float8"

    @staticmethod
    def __new__(cls, bits: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Float8Weight:
        made: Float8Weight = make_wrapper(
            cls, bits.size(), strides=bits.stride(), storage_offset=bits.storage_offset(), dtype=dtype,
            layout=bits.layout, device=bits.device,
        )  # fmt: skip
        made.bits, made.scale = bits, scale
        return made

    def dequantized(self) -> torch.Tensor:
        """The weight in its dtype, as a new tensor: bits / scale, divided in float32."""
        return (self.bits.to(torch.float32) / self.scale).to(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        said = str(self.bits.dtype).removeprefix("torch.")
        return f"Float8Weight(shape={tuple(self.shape)}, dtype={self.dtype}, bits={said})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["bits", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], dtype: Any, size: Any, stride: Any) -> Float8Weight:
        return Float8Weight(inner["bits"], inner["scale"], dtype)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Float8Weight:
        return Float8Weight(func(self.bits, *args, **kwargs), self.scale, self.dtype)


HOME, NAME, TENSORS = "torchao.float8.float8_linear", "Float8Linear", "torchao.float8.float8_training_tensor"


def take_float8(skeleton: nn.Module) -> None:
    """Have the linears of torchao's that are in a skeleton take weights that were gathered in float8."""
    for path, part in skeleton.named_modules():
        cls = type(part)
        if cls not in _TAKING.values() and any((c.__module__, c.__name__) == (HOME, NAME) for c in cls.__mro__):
            part.__dict__["_float8"] = _casts(path, part.config)
            part.__class__ = _taking(cls)


def _casts(path: str, config: Any) -> tuple[torch.dtype, str]:
    """The dtype to which a linear casts its weight, and why it cannot take one that is cast already, if so."""
    whys = []
    for cast in (config.cast_config_weight, config.cast_config_weight_for_grad_input):
        if cast.scaling_type.name != "DYNAMIC" or cast.scaling_granularity.name != "TENSORWISE":
            whys.append(f"casts its weight {cast.scaling_type.value}, {cast.scaling_granularity.value}")
    if config.round_scales_to_power_of_2:
        whys.append("rounds scales to powers of 2")
    if not whys:
        return config.cast_config_weight.target_dtype, ""
    return config.cast_config_weight.target_dtype, f"the float8 linear {path!r} {whys[0]}"


class Seen:
    """What torchao's forward reads of a linear."""

    def __init__(self, linear: Any, weight: Any) -> None:
        self.weight, self.bias = weight, linear.bias
        self.config, self.linear_mm_config = linear.config, linear.linear_mm_config


_TAKING: dict[type[nn.Module], type[nn.Module]] = {}


def _taking(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a linear that takes a `Float8Weight`."""
    if cls not in _TAKING:
        hand_over = _hand_over()

        def forward(self: Any, input: torch.Tensor) -> Any:
            weight = self.weight
            if type(weight) is not Float8Weight:
                return cls.forward(self, input)
            dtype, why = self._float8
            if why or weight.bits.dtype is not dtype:
                _refuse(dtype, why, weight.bits.dtype)
            return cls.forward(Seen(self, hand_over(weight, self.linear_mm_config)), input)

        body = {
            "forward": forward,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__reduce_ex__": _reduced,
        }
        _TAKING[cls] = type(cls.__name__, (cls,), body)
    return _TAKING[cls]


def _refuse(dtype: torch.dtype, why: str, came: torch.dtype) -> None:
    said = why or f"a float8 linear casts its weight to {dtype}, and it was gathered as {came}"
    raise SpecError(
        f"Precision(gather={came}): {said}; expected one scale a matrix, of any value, and the same dtype. Convert it "
        "so, as torchao's Float8LinearConfig() does, or leave gather out for its weight."
    )


def _reduced(self: nn.Module, protocol: Any) -> Any:
    """Pickled as what it was made of: its class is made again where it is read."""
    return _again, (type(self).__mro__[1], {**self.__dict__})


def _again(cls: type[nn.Module], held: dict[str, Any]) -> nn.Module:
    part = cls.__new__(cls)
    part.__dict__.update(held)
    part.__class__ = _taking(cls)
    return part


@cache
def _hand_over() -> Any:
    """A differentiable function from a `Float8Weight` and a linear's settings to torchao's tensor of the same bytes."""
    tensors: Any = sys.modules[TENSORS]

    class HandOver(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Any, settings: Any) -> Any:
            role = tensors.GemmInputRole.WEIGHT
            return tensors.Float8TrainingTensor(weight.bits, weight.scale, weight.dtype, settings, role)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0], None

    return torch.compiler.allow_in_graph(HandOver).apply


ROWS = 1 << 17  # at once, where it is done by torch's operations: what is between is 16 Mi elements
BLOCK = 16  # rows of the kernel's


def cast_float8(
    source: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, seen: torch.dtype, begin: int, starts: tuple[int, ...]
) -> None:
    """Main weights [k, m] -> float8 [k, m]: `source` rounded to the dtype `seen`, times a scale, the same for a row.

    Args:
        scale: float32 [leaves].
        begin: the number of the first row; rows from `starts[i]` on have the scale `scale[i]`.
    """
    first = _tensor(starts, source.device)
    most = torch.finfo(out.dtype).max
    if triton is not None and casts_float8(source):
        if source.numel():
            grid = (triton.cdiv(len(source), BLOCK),)
            dtype, width = getattr(tl, str(seen).removeprefix("torch.")), source.shape[1]
            _kernel()[grid](source, out, scale, first, len(source), begin, len(first), most, dtype, width, BLOCK)
        return
    for at in range(0, len(source), ROWS):
        rows = source[at : at + ROWS]
        number = torch.arange(begin + at, begin + at + len(rows), device=source.device)
        by = scale.index_select(0, torch.bucketize(number, first, right=True) - 1)[:, None]
        out[at : at + ROWS].copy_((rows.to(seen).to(torch.float32) * by).clamp_(-most, most))


@lru_cache(maxsize=1 << 16)
def _tensor(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


_KERNEL: list[Any] = []


def _kernel() -> Any:
    """The kernel, made when it is first needed: where there is Triton but no GPU, it cannot be."""
    if not _KERNEL:

        @triton.jit  # type: ignore[untyped-decorator]
        def scaled(  # type: ignore[no-untyped-def]
            source, out, scale, starts, k, begin, LEAVES: tl.constexpr,
            MOST: tl.constexpr, SEEN: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
        ):  # fmt: skip
            row = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
            at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            inside = row[:, None] < k
            leaf = tl.full([SIZE], -1, tl.int32)
            for i in range(LEAVES):
                leaf += (tl.load(starts + i) <= row + begin).to(tl.int32)
            by = tl.load(scale + leaf)
            seen = tl.load(source + at, mask=inside, other=0.0).to(SEEN).to(tl.float32)
            found = tl.clamp(seen * by[:, None], -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
            tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)

        _KERNEL.append(scaled)
    return _KERNEL[0]


Span = tuple[int, int]
LEAST = 1e-12  # of the largest number of a leaf: torchao's, so that a leaf of zeros has a scale


def cast_scaled(main: FlatBuffer, own: torch.Tensor, scales: torch.Tensor) -> None:
    """Main weights, or a cut of them, in float8 into their part of the compute copy, by the scales of their leaves."""
    rows, begin = main.local.view(-1, ALIGN), main.span()[0] // ALIGN
    cast_float8(rows, own.view(-1, ALIGN), scales, main.bucket.compute, begin, main.bucket.rows)


def rescale(buffers: list[FlatBuffer], scales: Mapping[str, torch.Tensor]) -> None:
    """The scales of all leaves of these buckets, from their main weights."""
    if not buffers:
        return
    run = runtime_of(buffers[0].mesh)

    def reduced(axis: str, flat: torch.Tensor) -> torch.Tensor:
        run.now(Collective("all_reduce", axis, flat.numel(), flat.dtype, "max", "side", ""), flat, flat)
        return flat

    kinds: dict[tuple[torch.dtype, ...], list[FlatBuffer]] = {}
    for buffer in buffers:  # of one kind, nearly always
        kinds.setdefault((buffer.bucket.main, buffer.bucket.compute, buffer.bucket.gather), []).append(buffer)
    ordered = [buffer for some in kinds.values() for buffer in some]
    largest = [part for some in kinds.values() for part in _largest(some)]
    axes = [axis for axis, ranks in run.sizes.items() if ranks > 1]
    found = iter(over_each_axis(largest, [buffer.sharded() for buffer in ordered], axes, reduced))
    for (_, _, gather), some in kinds.items():
        most = torch.cat([next(found) for _ in some]).to(torch.float64)  # as torchao: compilers differ in float32
        new = (torch.finfo(gather).max / most.clamp_(min=LEAST)).to(torch.float32)
        own = [scales[buffer.bucket.name] for buffer in some]
        foreach_copy_(own, [*new.split([len(one) for one in own])])


def _largest(buffers: list[FlatBuffer]) -> Sequence[torch.Tensor]:
    """Of buckets of one kind, float32 [leaves] each: the largest number in this rank's part of a leaf, as compute would
    see it (rounding keeps the order, so it may come after); 0 where this rank has none."""
    counts = [len(buffer.bucket.leaves) for buffer in buffers]
    found = torch.zeros(sum(counts), dtype=torch.float32, device=buffers[0].local.device)
    views = [view for buffer in buffers for view in _views(buffer)]
    if views:
        where = _where(tuple([b.bucket for b in buffers]), tuple([b.span() for b in buffers]), found.device)
        most = torch.stack(foreach_norm(views, float("inf")))
        found.index_copy_(0, where, most.to(buffers[0].bucket.compute).to(torch.float32))
    return found.split(counts)


_VIEWS = WeakTensorKeyDictionary()  # of main weights: made once, and gone with them


def _views(buffer: FlatBuffer) -> list[torch.Tensor]:
    """This rank's part of each leaf of which it has one."""
    found: list[torch.Tensor] | None = _VIEWS.get(buffer.local)
    if found is None:
        found = _VIEWS[buffer.local] = [view for _, view in buffer.but(alias_of(buffer.local)).by_leaf()]
    return found


@lru_cache(maxsize=1 << 10)
def _where(buckets: tuple[Bucket, ...], spans: tuple[Span, ...], device: torch.device) -> torch.Tensor:
    """int64: of the parts that a rank has, which leaves they are of, if those of all buckets are counted on."""
    found, at = [], 0
    for bucket, (start, stop) in zip(buckets, spans, strict=True):
        held = [a < b for a, b in (leaf.within(start, stop) for leaf in bucket.leaves)]
        found += [at + i for i, here in enumerate(held) if here]
        at += len(held)
    return torch.tensor(found, dtype=torch.int64, device=device)


provide("float8", rescale, cast_scaled, Float8Weight)
