"""The kernels of codecs on a CPU without Triton: one program after the other, and what they call in torch's operations.

A load or a store outside of a tensor's storage is an error, as is a number in float64, which Triton's exact division
does not take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from functional_fsdp.codecs import kernels

NAMES = ("_pack", "_unpack", "_update"), ("_power", "_value", "_whole", "_number", "_read", "_moment")


class Value(torch.Tensor):
    """What a kernel computes with."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)


def value(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(Value)


class Pointer:
    """Elements of a tensor's storage, from its first one on."""

    def __init__(self, base: torch.Tensor, at: Any = 0) -> None:
        self.base, self.at = base, at
        self.dtype = SimpleNamespace(element_ty=base.dtype)

    def __add__(self, at: Any) -> Pointer:
        return Pointer(self.base, self.at + at)

    def to(self, dtype: torch.dtype) -> Pointer:
        whole = self.base[: self.base.numel() // dtype.itemsize * dtype.itemsize]
        assert not torch.as_tensor(self.at % dtype.itemsize).any()
        return Pointer(whole.view(dtype), self.at // dtype.itemsize)

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.as_tensor(self.at).as_subclass(torch.Tensor)
        at, mask = torch.broadcast_tensors(at, torch.as_tensor(True if mask is None else mask))
        mask = mask.as_subclass(torch.Tensor)
        assert not mask.any() or 0 <= int(at[mask].min()) <= int(at[mask].max()) < self.base.numel()
        return at, mask


def pointer(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    first = argument.storage_offset()
    last = argument.untyped_storage().nbytes() // argument.itemsize
    return Pointer(argument.as_strided((last - first,), (1,), first))


def load(place: Pointer, mask: Any = None, other: Any = 0) -> torch.Tensor:
    assert place.base.dtype is not torch.float64
    at, mask = place.places(mask)
    found = torch.full(at.shape, other, dtype=place.base.dtype)
    found[mask] = place.base[at[mask]]
    return value(found)


def store(place: Pointer, values: Any, mask: Any = None) -> None:
    at, mask = place.places(mask)
    place.base[at[mask]] = values.as_subclass(torch.Tensor).expand(at.shape)[mask].to(place.base.dtype)


def divided(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    assert x.dtype is by.dtype is torch.float32
    return x / by


TL = SimpleNamespace(
    arange=lambda first, last: value(torch.arange(first, last)), load=load, store=store, where=torch.where,
    full=lambda shape, number, dtype: value(torch.full(shape, number, dtype=dtype)), split=lambda x: x.unbind(-1),
    zeros=lambda shape, dtype: value(torch.zeros(shape, dtype=dtype)), static_range=range, reshape=torch.reshape,
    max=torch.amax, minimum=lambda x, most: x.clamp(max=most), broadcast_to=torch.broadcast_to,
    clamp=lambda x, least, most, propagate_nan=None: x.clamp(least, most), pointer_type=lambda dtype: dtype,
    math=SimpleNamespace(div_rn=divided, sqrt_rn=torch.sqrt), PropagateNan=SimpleNamespace(ALL=None),
    float32=torch.float32, int32=torch.int32, int64=torch.int64, uint8=torch.uint8, int8=torch.int8,
    float8e4nv=torch.float8_e4m3fn,
)  # fmt: skip


class Launched:
    """A kernel, of which it counts the launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = getattr(kernel, "fn", kernel), 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*args: Any, enable_fp_fusion: bool) -> None:
            assert not enable_fp_fusion
            self.launches += 1
            for i in range(*grid):
                with patch.object(TL, "program_id", lambda axis: value(torch.tensor(i)), create=True):  # noqa: B023
                    self.kernel(*map(pointer, args))

        return run


@contextmanager
def by_kernels() -> Iterator[dict[str, Launched]]:
    """Within, the kernels pack and unpack what is on the CPU; by name what they launch."""
    launched = {name: Launched(getattr(kernels, name)) for name in NAMES[0]}
    others: dict[str, Any] = {name: getattr(kernels, name) for name in NAMES[1]}
    others = {name: getattr(one, "fn", one) for name, one in others.items()} | {"tl": TL}
    others |= {name: lambda tensor: tensor.device.type == "cpu" for name in ("runs_triton", "casts_float8")}
    others["triton"] = SimpleNamespace(cdiv=lambda n, by: -(-n // by))
    with ExitStack() as all_of_it:
        for name, one in (others | launched).items():
            all_of_it.enter_context(patch.object(kernels, name, one))
        yield launched
