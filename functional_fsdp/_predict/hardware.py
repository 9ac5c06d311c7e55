"""What kernels there are, and what a GPU and its links do a second.

Operations: what a step computes between two gathers, as counts of kernels by size; and the seconds of that.

A `Counter` sees each operation that runs. What only gives another view costs the host's time. Of the others a matrix
product or an attention takes the longer of its arithmetic and its bytes, and all else its bytes. Compiled code joins
what is elementwise, or reduces, into kernels: there a tensor between two of them is never written.

Hardware: what a GPU computes and moves a second, and the links between GPUs, as values. Pure.

Peaks are those of the vendor's data sheets, dense. What of them a step reaches is fitted to the runs in
docs/benchmarks.md, which are of H100 and H200; `tools/predicted.py` prints what is left of error. Other GPUs have the
efficiencies of the H100, which nobody measured: their `measured` is False.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from .._common.errors import SpecError
from .._common.torch_names import pytree
from .._shared.device import device_name
from .._shared.torch_names import TorchDispatchMode

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
        self.begin()

    def begin(self) -> None:
        """A rehearsal begins."""
        self.kernels: list[Kernel] = []
        self.issued = 0
        self.virtual: dict[int, int] = {}  # bytes that compiled code has not written, by storage
        self.read: set[int] = set()  # storages that joined kernels have read in this lap
        self.log: list[Logged] = []
        self.use = self.made = 0
        self.numbers: dict[int, int] = {}  # of tensors, by storage

    def lap(self) -> Work:
        found = Work(tuple(Counts(self.kernels).items()), self.issued)
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


GIB = 1 << 30


@dataclass(frozen=True)
class Link:
    """A way between GPUs.

    Attributes:
        latency: seconds from one rank to the next.
        bandwidth: bytes a second that a rank receives in a large all-gather or reduce-scatter.
    """

    latency: float
    bandwidth: float

    def seconds(self, received: int, hops: int) -> float:
        """Of a collective in which a rank receives so many bytes in so many hops."""
        return self.latency * hops + received / self.bandwidth if hops else 0.0


@dataclass(frozen=True)
class Hardware:
    """A GPU, its host, and its links. Frozen; `dataclasses.replace` changes it.

    Attributes:
        name: of the GPU.
        flops: the peak by dtype, operations a second.
        memory: bytes of the device.
        bandwidth: bytes a second of its memory.
        inside, outside: the links within a host (or NVLink domain) and between hosts, each rank's own.
        node: GPUs of a host.
        products, attention, moves: what large matrix products, attention's kernels and kernels that only move memory
            reach of the peaks.
        half: operations of a matrix product that reaches half of that.
        kernel: seconds between kernels.
        operation, use: seconds of the host for an operation of torch's, and for gather, release and reduction of a
            unit, in an eager step.
        replay: seconds of the host for the replay of a CUDA graph.
        beside: seconds that compute takes longer for each second that memory is moved beside it.
        taken: the share of compute that a collective's kernels take while they run; copies take none.
        to_host: bytes a second between the device and the host's memory, each way.
        copies: bytes a second that copy engines bring from GPUs of the same host.
        launch: seconds of a collective before bytes move.
        measured: whether the shares were fitted to runs.
    """

    name: str
    flops: Mapping[torch.dtype, float] = field(hash=False)
    memory: int
    bandwidth: float
    inside: Link
    outside: Link
    node: int = 8
    products: float = 0.64
    attention: float = 0.52
    moves: float = 0.66
    half: float = 2e9
    kernel: float = 4e-6
    operation: float = 7.7e-6
    use: float = 420e-6
    replay: float = 0.5e-3
    beside: float = 1.0
    taken: float = 0.30
    to_host: float = 50e9
    copies: float = 340e9
    launch: float = 30e-6
    measured: bool = False

    @staticmethod
    def named(said: str | Hardware) -> Hardware:
        """By name, or itself.

        Raises:
            SpecError: there is none of that name.

        Example: `dataclasses.replace(fsdp.Hardware.named("H100"), node=4)`.
        """
        if isinstance(said, Hardware):
            return said
        if said not in HARDWARE:
            raise SpecError(
                f"hardware={said!r}: expected one of {', '.join(map(repr, HARDWARE))}, or a fsdp.Hardware, as "
                "dataclasses.replace(fsdp.Hardware.named('H100'), node=4)."
            )
        return HARDWARE[said]

    @staticmethod
    def names() -> tuple[str, ...]:
        """H100 and H200 (NVLink 4 within 8 GPUs, 400 Gbit/s a GPU between hosts), A100 (NVLink 3, 200 Gbit/s) and B200
        (NVLink 5, 400 Gbit/s). The last two have nobody's measurements."""
        return tuple(HARDWARE)

    @staticmethod
    def here() -> Hardware:
        """That of this process's GPU, by its name; the H100's where there is none, or another."""
        name = device_name()
        return next((one for key, one in HARDWARE.items() if key in name), H100)

    def counter(self) -> Any:
        """A dispatch mode that counts what runs in it: `counter.lap()` gives `Work`, whose `seconds(hardware)` are
        those of the device."""
        return Counter()

    def peak(self, dtype: torch.dtype) -> float:
        """Operations a second of matrix products of this dtype."""
        return self.flops.get(dtype) or self.flops[torch.float32]

    def link(self, ranks: int, stride: int) -> tuple[Link, int]:
        """The link of a group of ranks that are `stride` apart, and its hops: within a host, or across hosts, where all
        of its ranks in a host send at once."""
        if ranks * stride <= self.node:
            return self.inside, ranks - 1
        here = max(1, self.node // stride)  # ranks of the group in a host
        hosts = -(-ranks // here)
        bandwidth = min(self.inside.bandwidth, self.outside.bandwidth * here)
        hops = ranks - 1
        latency = (self.outside.latency * (hosts - 1) + self.inside.latency * (hops - hosts + 1)) / max(hops, 1)
        return Link(latency, bandwidth), hops


def _hopper(name: str, memory: int, bandwidth: float, **more: float) -> Hardware:
    flops = {torch.bfloat16: 989e12, torch.float16: 989e12, torch.float8_e4m3fn: 1979e12, torch.float32: 67e12}
    inside, outside = Link(2e-6, 206e9), Link(6e-6, 45e9)
    return Hardware(name, flops, memory, bandwidth, inside, outside, measured=True, **more)  # type: ignore[arg-type]


H100 = _hopper("H100", 80 * 10**9, 3.35e12)
HARDWARE: dict[str, Hardware] = {
    "H100": H100,
    "H200": _hopper("H200", 141 * 10**9, 4.8e12, to_host=53e9),
    "A100": replace(
        H100, name="A100", flops={torch.bfloat16: 312e12, torch.float16: 312e12, torch.float32: 19.5e12},
        memory=80 * 10**9, bandwidth=2.04e12, inside=Link(2e-6, 160e9), outside=Link(6e-6, 22e9), measured=False,
    ),
    "B200": replace(
        H100, name="B200", flops={torch.bfloat16: 2250e12, torch.float16: 2250e12, torch.float8_e4m3fn: 4500e12,
        torch.float32: 80e12}, memory=180 * 10**9, bandwidth=8e12, inside=Link(2e-6, 560e9), measured=False,
    ),
}  # fmt: skip
