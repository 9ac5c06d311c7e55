"""GradientMemory: where main gradients lie: the device's memory, or the host's, which is kept from step to step."""

from __future__ import annotations

import torch

from .._common.device import host_memory
from .._common.torch_names import uses_of
from .._plan.layout import Bucket
from .._runtime.runtime import Runtime

__all__ = ["GradientMemory"]

ALONE = 2  # who knows a storage that is only kept: its tensor, and Python's name for it


class GradientMemory:
    """Memory for main gradients; of the host where their placement says so, and then what nobody holds any more of the
    steps before. What a captured step has is its graph's from then on: a replay writes there, unasked."""

    def __init__(self, run: Runtime) -> None:
        self.run = run
        #: the host's: of eager steps, and of those that graphs replay
        self.pool: dict[tuple[int, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def make(self, bucket: Bucket, numel: int) -> torch.Tensor:
        if not bucket.grads_on_host:
            return torch.empty(numel, dtype=bucket.grads, device=self.run.device)
        eager, graphs = self.pool.setdefault((numel, bucket.grads), ([], []))
        mine, also = (graphs, eager) if self.run.capturing else (eager, [])
        for pool in (mine, also):
            for i, memory in enumerate(pool):
                if uses_of(memory.untyped_storage()) == ALONE:
                    if pool is also:
                        mine.append(pool.pop(i))
                    return memory.detach()
        mine.append(host_memory(numel, bucket.grads, self.run.device))
        return mine[-1].detach()
