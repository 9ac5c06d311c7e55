"""What travels: numbers of collectives and bytes on the wire in a step, for each placement, beside the arithmetic.

The transport's collectives are replaced by doubles that count, and then do the same. n: elements of all units, padded.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn as nn
from problems import mesh_and_placement
from tables import product

import functional_fsdp as fsdp
from functional_fsdp import _runtime, launch
from functional_fsdp import transforms as T

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


def counted(preset: str, micro: int, precision: fsdp.Precision) -> tuple[list[Traffic], dict[str, int], int]:
    """The traffic of each microbatch and of the step after them; bytes that the state holds; padded elements."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    real = {name: getattr(_runtime, name) for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")}

    def double(name: str) -> Any:
        def counting(out: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            larger = max(t.numel() * t.element_size() for t in (out, *args) if isinstance(t, torch.Tensor))
            if larger > 64:  # not votes
                counts[name] += 1
                sizes[name] += larger
            return real[name](out, *args, **kwargs)

        return counting

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
    try:
        for name in real:
            setattr(_runtime, name, double(name))
        for k in range(micro):
            state, _ = forward_backward(state, x, last=k == micro - 1)
            if k == micro - 1:
                state = fsdp.finish(state)  # on the CPU the second hop of the last reduction is issued by whoever waits
            seen.append(since())
        held = {
            kind: sum(buffer.local.nbytes for buffer in (getattr(state, kind) or {}).values())
            for kind in ("main", "weights", "grads")
        }
        held["opt"] = sum(t.nbytes for tree in state.opt for t in (buffer.local for buffer in tree.values()))
        fsdp.step(state)
        seen.append(since())
    finally:
        for name, function in real.items():
            setattr(_runtime, name, function)
    return seen, held, sum(bucket.numel for bucket in state.layout.buckets.values())


UNITS = 4
GATHERS = 2 * UNITS - 1  # forward and backward; the last unit stays gathered


def expected(preset: str, micro: int, last: bool, n: int, compute: int, wire: int, exact: bool) -> Traffic:
    """Of one microbatch, on 4 ranks (2 × 2 for hsdp and hfsdp)."""
    found: Traffic = {}
    unit = n // UNITS
    if preset in ("zero3", "hsdp", "hfsdp"):
        found["all_gather"] = (GATHERS, GATHERS * unit * compute)
    first = "all_to_all" if exact else "reduce_scatter"
    if preset in ("zero3", "zero2", "hsdp", "hfsdp") or (preset == "zero1" and last):
        found[first] = (UNITS, n * wire)
    later = 4 if exact else wire  # on further axes an exact sum carries float32
    if preset == "ddp" and last:
        found["all_to_all" if exact else "all_reduce"] = (UNITS, n * wire)
        if exact:
            found["all_gather"] = (UNITS, n * 4)
    if preset == "hsdp" and last:
        found["all_reduce"] = (UNITS, n // 2 * later)
    if preset == "hfsdp" and last:
        count, size = found.get("reduce_scatter", (0, 0))
        found["reduce_scatter"] = (count + UNITS, size + n // 2 * later)
    return found


PRESETS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")
PRECISIONS = {
    "float32": fsdp.Precision(),
    "bf16 compute": fsdp.Precision(compute=BF16, wire=F32),
    "exact": fsdp.Precision(wire=BF16, sum="fp32"),
}


@pytest.mark.parametrize(("preset", "name", "micro"), product(PRESETS, PRECISIONS, (1, 3)))
def test_collectives_bytes_and_memory_are_the_arithmetic(preset: str, name: str, micro: int) -> None:
    precision = PRECISIONS[name]
    main, compute, grads, wire, added = precision.resolve(F32)
    for seen, held, n in launch(counted, 4, preset, micro, precision):
        *batches, step = seen
        for k, found in enumerate(batches):
            want = expected(preset, micro, k == micro - 1, n, compute.itemsize, wire.itemsize, added == "fp32")
            assert found == want
        refresh = preset in ("zero1", "zero2", "hfsdp")  # weights are less sharded than main weights
        cut = {"hfsdp": 2}.get(preset, 1)
        assert step == ({"all_gather": (UNITS, n // cut * compute.itemsize)} if refresh else {})
        shards = {"ddp": (1, 1, 1), "zero1": (1, 4, 4), "zero2": (1, 4, 4), "zero3": (4, 4, 4), "hsdp": (2, 2, 2),
                  "hfsdp": (2, 4, 4)}[preset]  # fmt: skip
        copies = refresh or (preset == "ddp" and compute is not main)
        assert held == {
            "main": n // shards[2] * main.itemsize,
            "opt": 2 * n // shards[2] * main.itemsize,
            "grads": n // shards[1] * grads.itemsize,
            "weights": n // shards[0] * compute.itemsize if copies else 0,
        }
