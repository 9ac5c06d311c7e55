"""Memory of the host as a device's tensors: what lies there by `Placement.memory_kind`, and main gradients in it.

Main gradients that lie in the host's memory keep it from step to step.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from .._common.calls import provide
from .._common.device import pin, unpin
from .._common.errors import SpecError
from .._common.torch_names import storage_at, uses_of
from .._plan.layout import Bucket
from .._runtime.runtime import Runtime

ALONE = 2  # who knows a storage that is only kept: its tensor, and Python's name for it


class HostBytes:
    """Bytes of the host that a device's tensors lie in; it goes when their storage does."""

    def __init__(self, host: torch.Tensor, pinned: bool) -> None:
        self.host, self.pinned = host, pinned

    def __del__(self) -> None:
        if self.pinned:
            with suppress(Exception):  # the process may be ending
                _GONE.append(self.host)
                _let_go()


_GONE: list[torch.Tensor] = []  # pinned bytes that nobody uses any more


def _let_go() -> None:
    """Unpin what is gone. While a CUDA graph is captured that would end the capture, so it waits for the next time."""
    if _GONE and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()  # who is given these bytes next shall not meet a kernel that still reads them
        while _GONE:
            unpin(_GONE.pop())


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [numel] in pinned memory of the host, as a tensor of `device`: kernels and copies reach the bytes over the
    bus, in the order of streams, as if they were the device's own (CUDA programming guide, "mapped memory"). What is
    computed from it lies on the device. On a CPU it is a tensor like any other, but `in_host_memory` knows it."""
    host = torch.zeros(numel * dtype.itemsize, dtype=torch.uint8, device="cpu")
    if device.type == "cuda":
        torch.cuda.init()
        _let_go()
        pinned = numel > 0 and pin(host)
        if numel > 0 and not pinned:
            raise SpecError(
                f"memory_kind='pinned_host': {host.nbytes:,} bytes of the host's memory could not be pinned. See the "
                "system's limit (ulimit -l) and its free memory, or give fewer leaves such a placement."
            )
        storage = storage_at(host.data_ptr(), device, host.nbytes) if numel else torch.UntypedStorage(0, device=device)
        made = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))
    else:
        made, pinned = host.view(dtype), False
        host = host.new_empty(0)  # not itself: nobody could free it
    kept: Any = made.untyped_storage()  # which lives, with its attributes, as long as any view of it
    kept.host_bytes = HostBytes(host, pinned)
    return made


#: memory of eager steps, and of those that graphs replay, by elements and dtype
Pool = dict[tuple[int, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]]


def gradients_on_host(pool: Pool, run: Runtime, bucket: Bucket, numel: int) -> torch.Tensor:
    """Memory for main gradients: what nobody holds any more of the steps before. What a captured step has is its
    graph's from then on: a replay writes there, unasked."""
    eager, graphs = pool.setdefault((numel, bucket.grads), ([], []))
    mine, also = (graphs, eager) if run.capturing else (eager, [])
    for kept in (mine, also):
        for i, memory in enumerate(kept):
            if uses_of(memory.untyped_storage()) == ALONE:
                if kept is also:
                    mine.append(kept.pop(i))
                return memory.detach()
    mine.append(host_memory(numel, bucket.grads, run.device))
    return mine[-1].detach()


provide("host_memory", host_memory, gradients_on_host)
