"""Main weights and optimizer state in pinned host memory, on GPUs: bits, order of streams, memory."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn as nn
from gpu.machine import RANKS

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._common.device import clone_as, in_host_memory
from functional_fsdp._host_memory import _GONE, host_memory

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("fresh_workers")]

WIDTH, LAYERS, STEPS = 2048, 8, 8
HOST = "pinned_host"


def memory_of_the_host() -> list[bool]:
    device = torch.device("cuda", torch.cuda.current_device())
    numbers = torch.randn(1 << 20, device=device)
    far = host_memory(1 << 20, torch.float32, device).copy_(numbers)
    shared = torch.empty(1 << 20, device="cpu").share_memory_().copy_(far, non_blocking=True)
    found = [far.is_cuda, torch.equal(far.clone(), numbers), torch.equal(far.cpu(), numbers.cpu())]
    found += [in_host_memory(clone_as(far)), torch.equal(clone_as(far), numbers), not in_host_memory(far + 1)]
    far.mul_(2)
    part = far[5:77]
    del far  # the bytes live as long as a view of them
    found += [torch.equal(part, 2 * numbers[5:77]), torch.equal(pickle.loads(pickle.dumps(part)), part)]
    torch.cuda.synchronize()
    return [*found, torch.equal(shared, numbers.cpu())]


def test_a_tensor_of_the_device_over_the_host_s_bytes() -> None:
    assert all(all(found) for found in launch(memory_of_the_host, nprocs=RANKS))


def gone_while_captured() -> list[bool]:
    device = torch.device("cuda", torch.cuda.current_device())
    held, x = [host_memory(1 << 20, torch.float32, device)], torch.ones(8, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        held.clear()
    waits = len(_GONE)
    graph.replay()
    host_memory(8, torch.float32, device)
    return [waits == 1, not _GONE, bool((x == 2).all())]


def test_what_goes_while_a_graph_is_captured_does_not_end_the_capture() -> None:
    assert all(all(found) for found in launch(gone_while_captured, nprocs=RANKS))


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def trained(preset: str, kind: str, overlap: bool, way: str) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    mesh = fsdp.local_mesh()
    placement = getattr(fsdp, preset)("data", memory_kind=kind)
    precision, schedule = fsdp.Precision(compute=torch.bfloat16), fsdp.Schedule(overlap_update=overlap)
    spec = fsdp.Spec(mesh, placement, precision=precision, schedule=schedule)
    before = torch.cuda.memory_allocated()
    state, model = fsdp.init(layers, spec, fsdp.adamw(lr=1e-3), seed=0)
    alive = torch.cuda.memory_allocated() - before
    forward_backward = T.forward_backward(model, lambda m, x: (m(x) - x).float().square().mean())
    step = T.skip_nonfinite(fsdp.step) if way == "skipping" else fsdp.step

    def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, x)
        if way == "clipped":
            state, _ = T.clip_by_global_norm(state, 0.1)
        return step(state), loss

    run: Any = T.cuda_graph(train_step) if way == "graph" else train_step
    generator = torch.Generator().manual_seed(mesh.get_rank())
    torch.cuda.reset_peak_memory_stats()
    for i in range(STEPS):
        x = torch.randn(32, WIDTH, generator=generator).cuda().bfloat16()
        if way == "skipping" and i == 3:
            x.fill_(float("inf"))
        state, _ = run(state, x)
    weights = {path: p.cpu() for path, p in fsdp.full_params(state).items()}  # at once: stores are under way
    if way == "copied":
        weights = {path: p.cpu() for path, p in fsdp.full_params(copy.deepcopy(state)).items()}
    trees = (state.main, state.opt.mean, state.opt.square)
    far = {in_host_memory(buffer.local) for tree in trees for buffer in tree.values()}
    peak = torch.cuda.max_memory_allocated() - before
    streamed = state._executor.sink.streams
    del state, run
    return {"weights": weights, "far": far, "alive": alive, "peak": peak, "buffers": streamed and streamed.nbytes}


@pytest.mark.parametrize("way", ["eager", "graph", "clipped", "skipping", "copied"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("preset", ["zero3", "zero1", "ddp"])
def test_the_device_s_bits(preset: str, overlap: bool, way: str) -> None:
    device = launch(trained, (preset, "device", overlap, way), nprocs=RANKS)
    host = launch(trained, (preset, HOST, overlap, way), nprocs=RANKS)
    for theirs, ours in zip(device, host, strict=True):
        assert theirs["far"] == {False}
        assert ours["far"] == {True}
        for path, weight in theirs["weights"].items():
            assert torch.equal(weight, ours["weights"][path]), path


def test_what_lies_there_is_no_memory_of_the_device() -> None:
    """A step takes what it takes beside the state, and then two buffers."""
    launch(trained, ("zero3", "device", False, "eager"), nprocs=RANKS)  # what a process has once: cuBLAS's workspaces
    for theirs, ours in zip(
        launch(trained, ("zero3", "device", False, "eager"), nprocs=RANKS),
        launch(trained, ("zero3", HOST, False, "eager"), nprocs=RANKS),
        strict=True,
    ):
        saved = 16 * LAYERS * WIDTH * WIDTH // RANKS  # main weights, two moments and main gradients in float32
        assert abs(theirs["alive"] - ours["alive"] - saved * 3 // 4) < 4 << 20
        beside = theirs["peak"] - saved
        assert ours["buffers"] <= ours["peak"] <= beside + ours["buffers"]
