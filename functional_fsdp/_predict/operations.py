"""Operations: what a step computes between two gathers, as counts of kernels by size; and the seconds of that.

A `Counter` sees each operation that runs. What only gives another view costs the host's time. Of the others a matrix
product or an attention takes the longer of its arithmetic and its bytes, and all else its bytes. Compiled code joins
what is elementwise, or reduces, into kernels: there a tensor between two of them is never written.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from .._common.torch_names import TorchDispatchMode, pytree

__all__ = ["Counter", "Kernel", "Logged", "Work"]

FREE = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "alias")
JOINED = (
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "clone", "copy_", "_to_copy", "zeros", "zeros_like", "full", "fill_", "zero_", "ones",
    "ones_like", "arange", "scalar_tensor", "cat", "where", "slice_backward", "select_backward", "stack",
)  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """A kernel: "product", "attention" or "move"; operations; bytes read and written, eagerly and in compiled code.
    `hardware`, here and below, is a `Hardware`."""

    kind: str
    dtype: torch.dtype
    flops: int
    nbytes: int
    compiled: int

    def seconds(self, hardware: Any, compiled: bool) -> float:
        moved = (self.compiled if compiled else self.nbytes) / (hardware.bandwidth * hardware.moves)
        if self.kind == "move":
            return moved + hardware.kernel if moved else 0.0
        share = hardware.attention
        if self.kind == "product":
            share = hardware.products * self.flops / (self.flops + hardware.half)
        return max(moved, self.flops / (hardware.peak(self.dtype) * share)) + hardware.kernel if self.flops else 0.0


@dataclass(frozen=True)
class Work:
    """Kernels between two gathers, each with how often it runs; operations that the host issues for it; and the seconds
    that all of it took, where that was measured."""

    kernels: tuple[tuple[Kernel, int], ...] = ()
    issued: int = 0
    measured: float | None = None

    @property
    def flops(self) -> int:
        return sum(kernel.flops * times for kernel, times in self.kernels)

    def seconds(self, hardware: Any, compiled: bool = False) -> float:
        """Of the device."""
        if self.measured is not None:
            return self.measured
        return sum(kernel.seconds(hardware, compiled) * times for kernel, times in self.kernels)

    def host_seconds(self, hardware: Any, compiled: bool = False) -> float:
        """Of the host in an eager step. Compiled code issues a kernel for each product, and few between."""
        if not compiled:
            return self.issued * hardware.operation
        products = sum(times for kernel, times in self.kernels if kernel.kind != "move")
        return 2 * products * hardware.operation

    @staticmethod
    def of(some: Iterable[Kernel], issued: int) -> Work:
        return Work(tuple(Counts(some).items()), issued)


class Logged(NamedTuple):
    """An operation that wrote something: in which use, whether compiled code joins it with others, and the tensors that
    it read and made, by numbers, with bytes."""

    use: int
    joined: bool
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]


class Counter(TorchDispatchMode):
    """Counts what runs within it; `lap()` gives what ran since the last one. `log` has all operations since `begin`."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.issued = 0
        self.virtual: dict[int, int] = {}  # bytes that compiled code has not written, by storage
        self.read: set[int] = set()  # storages that joined kernels have read in this lap
        self.begin()

    def begin(self) -> None:
        """A rehearsal begins."""
        self.kernels, self.issued, self.read, self.virtual = [], 0, set(), {}
        self.log: list[Logged] = []
        self.use = self.made = 0
        self.numbers: dict[int, int] = {}  # of tensors, by storage

    def lap(self) -> Work:
        found = Work.of(self.kernels, self.issued)
        self.kernels, self.issued, self.read = [], 0, set()
        self.use += 1
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "prim":
            return out
        self.issued += 1
        name = func.__name__.partition(".")[0]
        if func.is_view or name in FREE:
            return out
        given = {id(t): t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.numel()]
        inputs, dtype = [*given.values()], made[0].dtype if made else torch.float32
        formula = flop_registry.get(func._overloadpacket)
        if "attention" in name:
            flops = _attention(args, name.endswith("_backward"))
            self._add("attention", dtype, flops, inputs, made, joined=False)
        elif formula is not None:
            flops = int(formula(*args, **kwargs, out_val=out))
            self._add("product", dtype, flops, inputs, made, joined=False)
        elif name == "_grouped_mm":
            a, b = inputs[0], inputs[1]
            flops = 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]
            self._add("product", dtype, flops, inputs, made, joined=False)
        else:
            tags = func.tags
            joined = torch.Tag.pointwise in tags or torch.Tag.reduction in tags or name in JOINED
            self._add("move", dtype, 0, inputs if name != "embedding" else made, made, joined)
        return out

    def _add(self, kind: str, dtype: torch.dtype, flops: int, inputs: list[Any], made: list[Any], joined: bool) -> None:
        before = {t.untyped_storage()._cdata for t in inputs}
        given = tuple(self.numbers[key] for key in before if key in self.numbers)
        outputs = []
        for t in made:
            storage = t.untyped_storage()
            if storage._cdata not in before or storage._cdata not in self.numbers:
                self.made += 1
                self.numbers[storage._cdata] = self.made
            outputs.append((self.numbers[storage._cdata], storage.nbytes()))
        self.log.append(Logged(self.use, joined, given, tuple(outputs)))
        read, written = sum(map(_nbytes, inputs)), sum(map(_nbytes, made))
        compiled = 0
        for t in inputs:
            key = t.untyped_storage()._cdata
            if joined and (key in self.virtual or key in self.read):
                continue  # in registers
            compiled += _nbytes(t) + self.virtual.pop(key, 0)
            if joined:
                self.read.add(key)
        for t in made:
            key = t.untyped_storage()._cdata
            self.read.discard(key)
            if joined:
                self.virtual[key] = _nbytes(t)
            else:
                self.virtual.pop(key, None)
                compiled += _nbytes(t)
        self.kernels.append(Kernel(kind, dtype, flops, read + written, compiled))


def _attention(args: Any, backward: bool) -> int:
    """Operations: two products in the forward and five in the backward; half of them where it is causal. There may be
    fewer heads of keys and values than of queries."""
    query, key, value = args[1:4] if backward else args[:3]
    inner, outer = query.shape[-1], value.shape[-1]
    each = 3 * inner + 2 * outer if backward else inner + outer
    flops = 2 * query.shape[:-1].numel() * key.shape[-2] * each
    return flops // 2 if any(arg is True for arg in args) else flops


def _nbytes(t: torch.Tensor) -> int:
    elements = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        elements *= size if stride else 1  # what is expanded is read once
    return elements * t.dtype.itemsize
