"""Compiled train steps of the small net, and how often they were compiled: what tests of traced steps share."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.compile_fx  # ranks are forked: what is imported here, they need not import
import torch.distributed as dist
from support.problems import DEPTH, LOOPS, batch, mesh_and_placement, net
from support.tables import FULL

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

STEPS = 3
BLOCKS = DEPTH if FULL else 1  # to trace them is what takes time


def few(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """On two ranks with LAWS=full, else here: others would trace the same."""
    if FULL:
        return fsdp.launch(fn, args, nprocs=2)
    fsdp.local_mesh("cpu")
    return [fn(*args)]


class Counted:
    """A backend of torch's that counts what it compiles."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.count += 1
        return torch._dynamo.lookup_backend(self.name)(module, inputs)


def compiled(way: str, step: Any) -> tuple[Any, Any]:
    """The compiled step, and how many compilations there were."""
    if way.startswith("graph"):  # of the step as it is, or of a compiled one
        inner, count = compiled(way.removeprefix("graph "), step) if " " in way else (step, lambda: 0)
        return T.cuda_graph(inner, warmup=1, pass_through=True), count
    torch._dynamo.reset()
    if way.startswith("T."):
        begun = dict(torch._dynamo.utils.counters["stats"])
        fn = T.compile(step, way.removeprefix("T."))
        return fn, lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"] - begun.get("unique_graphs", 0)
    backend = Counted(way)
    return torch.compile(step, fullgraph=True, backend=backend), lambda: backend.count


def trained(
    preset: str, loop: str, way: str, steps: int = STEPS, micro: int = 2, dtype: torch.dtype = torch.float64,
    precision: Any = None, depth: int = DEPTH,
) -> tuple[list[Any], int]:  # fmt: skip
    """(loss, weights) after each compiled step on this rank, and the number of compilations."""
    warnings.filterwarnings("ignore", "TensorFloat32")  # that it could be used
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net(dtype, depth))
    spec = fsdp.Spec(mesh, placement, precision=precision)
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2, weight_decay=0.1))

    def train_step(state: fsdp.State, batches: Any) -> Any:
        for k, data in enumerate(batches):
            state, loss = LOOPS[loop](model, state, data, k == len(batches) - 1)
        return fsdp.step(state), loss

    step, count = compiled(way, train_step) if way != "lanes" else (train_step, lambda: 0)
    seen = []
    for i in range(steps):
        state, loss = step(state, [batch(i, dist.get_rank(), k) for k in range(micro)])
        seen.append((loss.item(), {path: p.cpu() for path, p in fsdp.full_params(state).items()}))
    assert state.steps == steps
    assert f"step {steps}, between steps" in repr(state)
    return seen, count()


def in_order(code: str) -> tuple[list[str], list[str]]:
    """What Inductor's code does, in order: collectives and waits by number, products; and, of each product, the buffers
    of gathers that it reads."""
    names: dict[str, str] = {}
    found, read = [], []
    for line in code[code.index("def call(") :].splitlines():
        issued = re.search(r"(\w+) = torch\.ops\._c10d_functional\.(all_gather|reduce_scatter)", line)
        waited = re.search(r"wait_tensor\.default\((\w+)\)", line)
        if issued:
            names[issued[1]] = f"{issued[2]} {sum(name.startswith(issued[2]) for name in names.values())}"
            found.append(names[issued[1]])
        elif waited:
            found.append(f"wait {names[waited[1]]}")
        elif re.search(r"extern_kernels\.(mm|addmm)\(", line):
            found.append("product")
            read.append(" ".join(name for buffer, name in names.items() if re.search(rf"\b{buffer}\b", line)))
    return found, read
