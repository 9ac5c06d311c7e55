"""Graphs whose steps update weights where gradients arrive: the bits of those that do not, memory, refusals."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from gpu.layers import Layer
from gpu.machine import RANKS, deterministic

import functional_fsdp as fsdp
from functional_fsdp import ScheduleError, launch
from functional_fsdp import transforms as T
from functional_fsdp._capture import PIECE

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic matrix products
pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("fresh_workers")]

WIDTH, DEPTH, STEPS, MIB = 2048, 6, 8, 2**20
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: fsdp.adamw(lr=lambda count: 1e-3 * ((count + 1) / 4).clamp(max=1.0), weight_decay=0.1),
    "partition": lambda: fsdp.partition({"matrix": fsdp.sgd(1e-3, 0.9), "default": fsdp.adamw(lr=1e-3)}),
}


def layers() -> nn.Module:
    return nn.Sequential(*(Layer(WIDTH) for _ in range(DEPTH)))


def made(transport: Any, optimizer: str, overlap: bool, **precision: Any) -> tuple[fsdp.State, Any]:
    spec = fsdp.Spec(
        fsdp.local_mesh(), precision=fsdp.Precision(compute=torch.bfloat16, **precision), transport=transport,
        schedule=fsdp.Schedule(overlap_update=overlap), labels={"*.up.weight": "matrix"},
    )  # fmt: skip
    state, model = fsdp.init(layers, spec, OPTIMIZERS[optimizer](), seed=0)
    return state, T.forward_backward(model, lambda m, x: (m(x) - x).float().square().mean())


@deterministic()
def trained(transport: Any, optimizer: str, grads: torch.dtype, overlap: bool, **precision: Any) -> dict[str, Any]:
    state, forward_backward = made(transport, optimizer, overlap, grads=grads, **precision)

    def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    run: Any = T.cuda_graph(train_step)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        state, loss = run(state, torch.randn(64, WIDTH, generator=generator).cuda().bfloat16())
        losses.append(float(loss))
    (graph,) = run.graphs.values()
    leaves = torch.utils._pytree.tree_leaves((state.main, state.opt, state.count))
    tensors = [leaf.cpu() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return {"losses": losses, "tensors": tensors, "peak": graph.peak, "grads": state.layout.nbytes("grads")}


ROWS = [
    ("copy_engine", "adamw", torch.float32), ("copy_engine", "partition", torch.bfloat16),
    ("copy_engine", "adamw", torch.bfloat16), ("collective", "adamw", torch.float32),
]  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Of each row whether losses and all that the state has are the same, and what is saved."""
    found = []
    for row in ROWS:
        arriving, plain = (trained(*row, overlap) for overlap in (True, False))
        same = [arriving["losses"] == plain["losses"], *map(torch.equal, arriving["tensors"], plain["tensors"])]
        found.append({"same": same, "saved": plain["peak"] - arriving["peak"], "grads": plain["grads"]})
    return found


def test_bits_are_those_of_updates_at_the_end_without_main_gradients() -> None:
    for found in launch(rows, nprocs=RANKS):
        for (transport, optimizer, _), row in zip(ROWS, found, strict=True):
            assert all(row["same"])
            print(f"{transport} {optimizer}: saved {row['saved'] / MIB:.1f} MiB of {row['grads'] / MIB:.1f}")
            before = row["grads"] * (DEPTH - 1) // DEPTH  # the peak is in the backward of the first layer
            assert row["saved"] >= before - PIECE - 16 * MIB


def cast_once() -> list[list[bool]]:
    """Of each transport and time of updates whether shards kept in bfloat16 change losses or anything that trains."""
    found = []
    for transport, overlap in itertools.product(("copy_engine", "collective"), (True, False)):
        often = trained(transport, "adamw", torch.float32, overlap)
        once = trained(transport, "adamw", torch.float32, overlap, gather=torch.bfloat16)
        same = map(torch.equal, once["tensors"], often["tensors"])
        found.append([once["losses"] == often["losses"], len(once["tensors"]) == len(often["tensors"]), *same])
    return found


def test_bits_are_the_same_where_shards_are_cast_once() -> None:
    for found in launch(cast_once, nprocs=RANKS):
        assert len(found) == 4
        for same in found:
            assert all(same)


def values(state: fsdp.State) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in torch.utils._pytree.tree_leaves((state.main, state.opt, state.count))]


def looked_at(finished: bool) -> tuple[str, bool]:
    state, forward_backward = made("copy_engine", "adamw", True)

    def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, _ = forward_backward(state, x)
        if finished:
            state = fsdp.finish_reductions(state)
        return fsdp.step(state), torch.stack([b.local.norm() for b in state.grads.values()]).norm()

    run: Any = T.cuda_graph(train_step)
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
    try:
        for _ in range(5):
            before = values(state)
            state, norm = run(state, x)
        return "", bool(norm > 0)
    except ScheduleError as error:
        said = str(error)
    same = all(map(torch.equal, values(state), before))
    state, loss = forward_backward(state, x)  # the state before is good
    fsdp.step(state)
    return said, same and bool(loss.isfinite())


def test_who_reads_gradients_says_so_before() -> None:
    for said, good in launch(looked_at, (True,), nprocs=RANKS):
        assert not said
        assert good
    for said, good in launch(looked_at, (False,), nprocs=RANKS):
        assert "finish_reductions" in said
        assert good
