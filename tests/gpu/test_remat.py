"""What a backward needs, computed again, kept or in the host's memory: the same bits, eagerly and captured; memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from gpu.machine import deterministic
from support.attention import CHANGES, Blocks

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic matrix products
pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("fresh_workers")]
RANKS = 2
MIB = 2**20
STEPS = 8


@deterministic()
def trained(name: str, graph: bool, kind: Any = Blocks) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights after some steps of two microbatches, in batches of two shapes."""
    spec = fsdp.Spec(fsdp.local_mesh(), fsdp.zero3("data"))
    state, model = fsdp.init(lambda: kind(64), spec, fsdp.adamw(lr=1e-2), seed=0)
    changed = change_of(name)(model)
    forward_backward = T.accumulate(T.forward_backward(changed, lambda model, x: model(x).square().mean()), 2)

    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    step = T.cuda_graph(train_step, warmup=2) if graph else train_step
    losses = []
    for i in range(STEPS):
        generator = torch.Generator().manual_seed(10 * i + dist.get_rank())
        x = torch.randn(4, 16 if i % 2 else 48, 64, generator=generator)
        state, loss = step(state, x.to(state.count.device))
        losses.append(loss)
    if graph:
        assert len(step.graphs) == 2  # type: ignore[attr-defined]
    return [float(loss) for loss in losses], [p.cpu() for p in fsdp.full_params(state).values()]


def change_of(name: str) -> Any:
    """Of `CHANGES`, or with a part that is saved or moved."""
    if name.startswith("part "):
        parts: dict[str, Any] = {name.split()[1]: ("part",)}
        return lambda m: T.remat(m, "blocks.*", **parts)
    return CHANGES[name][0] if name else lambda m: m


@pytest.fixture(scope="module")
def plain() -> Any:
    return launch(trained, ("", False), nprocs=RANKS)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", CHANGES)
def test_the_same_bits_as_without(name: str, graph: bool, plain: Any) -> None:
    """With dropout in the parts and between them."""
    for (losses, weights), (expected, right) in zip(launch(trained, (name, graph), nprocs=RANKS), plain, strict=True):
        assert losses == expected
        assert len({*losses}) == STEPS
        assert all(map(torch.equal, weights, right))


class DropsInPlace(nn.Module):
    """Returns its input, too, which others change in place: it has to be run again."""

    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return h.detach(), nn.functional.dropout(h, 0.2)


class ChangedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.part = nn.Linear(width, width), DropsInPlace()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        there, y = self.part(h)
        with torch.no_grad():
            h.mul_(2)
        return x + nn.functional.dropout((y * there).tanh(), 0.1)


class ChangedBlocks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(ChangedBlock(width), ChangedBlock(width)), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


@pytest.mark.parametrize("fate", ["save", "offload"])
def test_a_part_that_is_run_again_draws_again(fate: str) -> None:
    """Eagerly, and where each place from which numbers come again has a generator in the graph."""
    found = [launch(trained, (name, graph, ChangedBlocks), nprocs=RANKS)
             for name, graph in (("", False), (f"part {fate}", False), (f"part {fate}", True))]  # fmt: skip
    for (losses, weights), *others in zip(*found, strict=True):
        for mine, changed in others:
            assert mine == losses
            assert all(map(torch.equal, changed, weights))


@deterministic()
def by_hand(graph: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Stages whose parts are saved and moved, without dropout: in a captured step by hand nothing is drawn again."""
    spec = fsdp.Spec(fsdp.local_mesh())
    state, _ = fsdp.init(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), spec, fsdp.sgd(lr=0.1), seed=0)
    first = T.saved(lambda w, h: (h @ w["weight"]).relu())
    second = T.offload(lambda w, h: (h @ w["weight"].t()).tanh() + w["bias"])
    stage = T.remat(lambda w, h: second(w, first(w, h).sigmoid()).tanh(), preserve_rng_state=False)

    def train_step(state: fsdp.State, h: torch.Tensor) -> Any:
        pullbacks = {}
        for unit in state.units:
            state, w = fsdp.unshard(state, unit)
            h, pullbacks[unit] = T.vjp(stage, w, h)
            state = fsdp.release(state, unit)
        loss, dh = h.square().mean(), h
        for unit in reversed(state.units):
            state, w = fsdp.unshard(state, unit)
            dw, dh = pullbacks.pop(unit)(w, dh)
            state = fsdp.reduce(state, dw, unit)
            state = fsdp.release(state, unit)
        return fsdp.step(state), loss

    step = T.cuda_graph(train_step, warmup=2) if graph else train_step
    losses = []
    for i in range(5):
        h = torch.randn(128, 64, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))
        state, loss = step(state, h.to(state.count.device))
        losses.append(loss)
    return [float(loss) for loss in losses], [p.cpu() for p in fsdp.full_params(state).values()]


def test_stages_by_hand_are_captured() -> None:
    eager, graph = (launch(by_hand, (captured,), nprocs=RANKS) for captured in (False, True))
    for (losses, weights), (others, mine) in zip(eager, graph, strict=True):
        assert losses == others
        assert len({*losses}) == 5
        assert all(map(torch.equal, weights, mine))


# ---------------------------------------------------------------- memory

WIDTH, TOKENS, DEEP = 256, 65536, 8  # few weights, whose gradients would blur it
KEPT = 9 * WIDTH * TOKENS * 4  # bytes that an MLP saves: its input, and what goes into gelu and the second layer


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Linears()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Residuals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(DEEP))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def peaks(graph: bool) -> dict[str, tuple[int, int, int]]:
    """Bytes at the end of the forward, beside those before it; the step's peak, above what is there before it; and
    the peak that is predicted, with what is there."""
    found = {}
    for name, change in {
        "save": lambda m: T.remat(m, "blocks.*", save=("mlp",)),
        "offload": lambda m: T.remat(m, "blocks.*", offload=("mlp",)),
        "remat": lambda m: T.remat(m, "blocks.*"),
    }.items():
        state, model = fsdp.init(Residuals, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=1e-3), seed=0)
        seen: list[int] = []

        def loss_fn(model: Any, x: torch.Tensor, seen: list[int] = seen) -> torch.Tensor:
            before = torch.cuda.memory_allocated()
            y = model(x)
            seen.append(torch.cuda.memory_allocated() - before)
            return y.sum() / y.numel()

        forward_backward = T.forward_backward(change(model), loss_fn)

        def train_step(state: fsdp.State, x: torch.Tensor, f: Any = forward_backward) -> Any:
            state, loss = f(state, x)
            return fsdp.step(state), loss

        step = T.cuda_graph(train_step, warmup=2) if graph else train_step
        x = torch.randn(TOKENS, WIDTH, device=state.count.device)
        predicted = int(T.step_memory(forward_backward, state, x).peak)
        seen.clear()
        for _ in range(4):
            torch.cuda.synchronize()
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            state, _ = step(state, x)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - base
        if graph:
            (one,) = step.graphs.values()  # type: ignore[attr-defined]
            peak = one.peak
        found[name] = seen[-1], peak, predicted
        del state, step, train_step, forward_backward, model
    return found


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_memory_falls_by_what_the_docstring_says(graph: bool) -> None:
    for found in launch(peaks, (graph,), nprocs=1):
        print({name: [n // MIB for n in some] for name, some in found.items()}, KEPT // MIB)
        (saved, save_peak, save_said), (moved, move_peak, move_said), (again, peak, said) = found.values()
        assert abs(saved - again - DEEP * KEPT) < 64 * MIB
        assert abs(saved - moved - (DEEP - 1) * KEPT) < 64 * MIB  # the last one's is on its way
        # in the backward the last two are there, and a gradient that the forward's end, where all is saved, has not
        assert abs(save_peak - move_peak - (save_said - move_said)) < 64 * MIB
        assert abs(save_peak - peak - (save_said - said)) < 64 * MIB
        assert abs(save_peak - move_peak - (DEEP - 2) * KEPT) < 2 * 4 * WIDTH * TOKENS
