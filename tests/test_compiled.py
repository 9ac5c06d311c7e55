"""Compiled units: one compilation for all that are alike, the eager step's numbers, and no silence where it is eager."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from models import CASES, VOCABULARY, Stack, batch_of, entropy, hf, made, own_loss
from problems import batch, full_grads, loss_fn, mesh_and_placement, net, on
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T

Tree = dict[str, torch.Tensor]
RANKS = 2


def start(model: nn.Module, preset: str = "zero3", **spec: Any) -> tuple[fsdp.State, nn.Module]:
    mesh, placement = mesh_and_placement(preset)
    params, skeleton = fsdp.functionalize(model)
    schedule = fsdp.Schedule(debug=True)  # released bytes are NaN: a backward must read what was gathered again
    spec = {"schedule": schedule, **spec}
    optimizer = fsdp.adamw(lr=1e-2, weight_decay=0.1)
    return fsdp.shard(params, fsdp.Spec(mesh, placement, **spec), optimizer, buffers=fsdp.buffers(model)), skeleton


def counting(backend: str = "aot_eager") -> Any:
    """A backend that counts graphs in `frame_count`."""
    return CompileCounterWithBackend(backend)


def apart(a: Tree, b: Tree) -> float:
    assert a.keys() == b.keys()
    return max((a[key].double() - b[key].double()).abs().max().item() for key in a if a[key].numel())


# ---------------------------------------------------------------- driven


def driven(compile: Any, preset: str, model: nn.Module, steps: int = 3, **spec: Any) -> tuple[list[float], Tree, Tree]:
    """Losses, the last gradients and the weights of a few steps of two microbatches, on this rank's own data."""
    state, skeleton = start(model, preset, **spec)
    forward_backward = T.forward_backward(skeleton, loss_fn, compile=compile)
    losses, grads = [], {}
    for step in range(steps):
        for k in range(2):
            data = on(state, batch(step, dist.get_rank(), k))
            state, loss = forward_backward(state, data, last=k == 1)
            losses.append(loss.item())
        grads = full_grads(fsdp.finish(state))
        state = fsdp.step(state)
    return losses, grads, fsdp.full_params(state)


def beside_eager(backend: str, preset: str, options: dict[str, Any]) -> tuple[float, float, int, int]:
    losses, grads, _ = driven(False, preset, net(torch.float32), steps=2)
    counter = counting(backend)
    found, theirs, _ = driven({"backend": counter, **options}, preset, net(torch.float32), steps=2)
    return max(abs(a - b) for a, b in zip(losses, found, strict=True)), apart(grads, theirs), counter.frame_count, 0


@pytest.mark.parametrize(("backend", "preset"), [("aot_eager", "zero3"), ("aot_eager", "zero2"), ("inductor", "zero3")])
def test_as_eager(backend: str, preset: str) -> None:
    for loss, grad, count, _ in launch(beside_eager, RANKS, backend, preset, {}):
        assert loss < 1e-5
        assert grad < 1e-5
        assert count == 4  # embed, one for all blocks, head, tail
