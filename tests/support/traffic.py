"""What travels in a step, as it is counted on any device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from support.problems import mesh_and_placement

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._common.record import Collective

F32, BF16 = torch.float32, torch.bfloat16
Traffic = dict[str, tuple[int, int]]  # kind: (how many, elements times bytes of the larger side)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@contextmanager
def issued(state: fsdp.State, see: Callable[[Collective, torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """Each collective of this rank's lanes is seen, with what it fills and what it is given, and then issued."""
    lanes: Any = state._executor.run.lanes
    real = lanes.collective

    def collective(hop: Collective, out: torch.Tensor, given: torch.Tensor, group: Any) -> Any:
        see(hop, out, given)
        return real(hop, out, given, group)

    lanes.collective = collective
    try:
        yield
    finally:
        del lanes.collective


def counted(preset: str, micro: int, precision: fsdp.Precision) -> tuple[list[Traffic], dict[str, int], int]:
    """The traffic of each microbatch and of the step after them; bytes that the state holds; padded elements."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()

    def since() -> Traffic:
        found = {name: (counts[name], sizes[name]) for name in counts}
        counts.clear()
        sizes.clear()
        return found

    mesh, placement = mesh_and_placement(preset)
    torch.manual_seed(0)
    params, model = fsdp.functionalize(Stack())
    spec = fsdp.Spec(mesh, placement, precision=precision)
    state = fsdp.shard(params, spec, fsdp.adamw())
    forward_backward = T.forward_backward(model, lambda model, x: model(x).float().square().mean())
    x = torch.ones(2, 32, dtype=precision.compute or F32, device=state.count.device)
    state = fsdp.step(forward_backward(state, x)[0])  # the first step looks at the order of use
    seen = []

    def counting(hop: Collective, out: torch.Tensor, given: torch.Tensor) -> None:
        larger = max(t.numel() * t.element_size() for t in (out, given))
        if larger > 64:  # no metrics
            counts[hop.kind] += 1
            sizes[hop.kind] += larger

    with issued(state, counting):
        for k in range(micro):
            state, _ = forward_backward(state, x, last_microbatch=k == micro - 1)
            if k == micro - 1:
                # On the CPU the second hop of the last reduction is issued by whoever waits. (No placement here has one
                # in an earlier microbatch: for one with gradients sharded over two axes, wait in each.)
                state = fsdp.finish_reductions(state)
            seen.append(since())
        held = {
            kind: sum(buffer.local.nbytes for buffer in (getattr(state, kind) or {}).values())
            for kind in ("main", "weights", "grads")
        }
        held["opt"] = sum(t.nbytes for tree in state.opt for t in (buffer.local for buffer in tree.values()))
        fsdp.step(state)
        seen.append(since())
    return seen, held, sum(bucket.numel for bucket in state.layout.buckets.values())
