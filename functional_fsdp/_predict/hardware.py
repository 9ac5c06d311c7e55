"""Hardware: what a GPU computes and moves a second, and the links between GPUs, as values. Pure.

Peaks are those of the vendor's data sheets, dense. What of them a step reaches is fitted to the runs in
docs/benchmarks.md, which are of H100 and H200; `tools/predicted.py` prints what is left of error. Other GPUs have the
efficiencies of the H100, which nobody measured: their `measured` is False.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .._common.device import device_name
from .._common.errors import SpecError
from .operations import Counter

__all__ = ["HARDWARE", "Hardware", "Link"]

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
