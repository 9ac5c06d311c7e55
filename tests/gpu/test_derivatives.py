"""Jvp through a driven GPT of 24 layers, by inputs and by weights: time and peak beside those of the whole tree. Losses
with derivatives in captured and in compiled steps.

`pytest tests/gpu/test_derivatives.py -s` prints the figures.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from gpu.machine import own_gpus
from ranks.test_derivatives import INSIDE, steps_of
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fresh_workers")]
RANKS = 2
DEPTH, WIDTH, HEADS, VOCABULARY, LENGTH, ROWS, REPEATS = 24, 1536, 12, 1536, 512, 4, 6

Loss = Callable[[Any, Any], Any]
Way = Callable[[fsdp.State, Any], tuple[fsdp.State, Any]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.second, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):  # of attention's kernels the one that has a forward-mode derivative
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return x


class GPT(nn.Module):
    def __init__(
        self, depth: int = DEPTH, width: int = WIDTH, heads: int = HEADS, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Of embedded tokens [B, T, W]."""
    for block in model.blocks:
        x = block(x)
    return model.head(model.norm(x)).log_softmax(-1).square().mean()


def embedded(model: Any, batch: Any) -> torch.Tensor:
    return loss_of(model, model.embed(batch[0]))


def moved(model: Any, batch: Any) -> Any:
    """The loss, and how it moves as the embedded tokens do."""
    return jvp(lambda x: loss_of(model, x), (model.embed(batch[0]),), (batch[1],))


def ways(model: nn.Module) -> dict[str, tuple[Way, Way]]:
    """By name: driven, and of the whole tree."""
    by_inputs, by_weights = T.apply(model, moved), T.jvp(model, embedded)

    def tree_by_inputs(state: fsdp.State, batch: Any) -> Any:
        state, params = fsdp.unshard(state)
        return state, moved(fsdp.bind(model, params), batch)

    def tree_by_weights(state: fsdp.State, batch: Any) -> Any:
        tangents = {path: t for buffer in state.main.values() for path, t in fsdp.extend.gather_leaves(buffer).items()}
        state, params = fsdp.unshard(state)
        return state, jvp(lambda p: embedded(fsdp.bind(model, p), batch), (params,), (tangents,))

    return {
        "by inputs": (by_inputs, tree_by_inputs),
        "by weights": (lambda state, batch: by_weights(state, state.main, batch), tree_by_weights),
    }


def start(**sizes: int) -> tuple[fsdp.State, nn.Module]:
    return fsdp.init(lambda: GPT(**sizes), fsdp.Spec(fsdp.local_mesh(), fsdp.zero3("data")), fsdp.sgd(lr=1e-2), seed=0)


def batch_for(state: fsdp.State, length: int, width: int, vocabulary: int) -> Any:
    generator = torch.Generator().manual_seed(fsdp.extend.ranks_of(state).index)
    tokens = torch.randint(0, vocabulary, (ROWS, length), generator=generator)
    return tokens.to(state.count.device), torch.randn(ROWS, length, width, generator=generator).to(state.count.device)


def equal_values(**sizes: int) -> dict[str, float]:
    """How far the ways are apart, of a small model."""
    far = {}
    state, model = start(**sizes)
    batch = batch_for(state, 8, sizes["width"], sizes["vocabulary"])
    with torch.no_grad():
        for name, (driven, tree) in ways(model).items():
            state, got = driven(state, batch)
            state, want = tree(state, batch)
            far[name] = max(float(abs(a - b) / (1 + abs(b))) for a, b in zip(got, want, strict=True))
    return far


def measured() -> dict[str, dict[str, float]]:
    """Seconds and bytes above the state, of each way; the best of some calls, one way after the other."""
    found = {}
    with torch.no_grad():
        for name in ("by inputs", "by weights"):
            for i, which in enumerate(("driven", "tree")):
                torch.cuda.synchronize()
                gc.collect()
                torch.cuda.empty_cache()
                before = torch.cuda.memory_allocated()
                state, model = start()
                held = sum(b.local.numel() * b.local.element_size() for b in state.main.values())
                batch = batch_for(state, LENGTH, WIDTH, VOCABULARY)
                held += sum(t.numel() * t.element_size() for t in batch)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                way, seconds = ways(model)[name][i], []
                for _ in range(REPEATS):
                    began = time.perf_counter()
                    state, _ = way(state, batch)
                    torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - began)
                peak = torch.cuda.max_memory_allocated() - before - held
                found[f"{name}, {which}"] = {"seconds": min(seconds[1:]), "bytes": float(peak)}
                del state, model, way
    return found


def test_the_ways_agree_on_gpus() -> None:
    for far in launch(equal_values, kwargs={"depth": 2, "width": 32, "heads": 2, "vocabulary": 16}, nprocs=RANKS):
        assert max(far.values()) < 1e-4, far


@own_gpus
def test_jvp_through_a_gpt() -> None:
    found = launch(measured, nprocs=RANKS)[0]
    for name in ("by inputs", "by weights"):
        driven, tree = found[f"{name}, driven"], found[f"{name}, tree"]
        time_ratio, peak_ratio = driven["seconds"] / tree["seconds"], driven["bytes"] / tree["bytes"]
        print(
            f"\njvp {name}: {driven['seconds'] * 1e3:.1f} ms, whole tree {tree['seconds'] * 1e3:.1f} ms, ratio "
            f"{time_ratio:.3f}; peak {driven['bytes'] / 2**20:.0f} MiB, whole tree {tree['bytes'] / 2**20:.0f} MiB, "
            f"ratio {peak_ratio:.3f}"
        )
        assert time_ratio < 1.1, found
        assert peak_ratio < 1 / 3, found


def of_three_layers(rate: float) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Sequential(nn.Linear(32, 1), nn.Dropout(rate))).double()


STEPS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda step: step,
    "captured": lambda step: T.cuda_graph(step),
    "compiled": lambda step: T.compile(step),
    "both": lambda step: T.cuda_graph(T.compile(step)),
}


def in_graphs(name: str, how: str) -> tuple[list[float], int]:
    """The losses of eight steps, and how many graphs there are after them."""
    warnings.filterwarnings("ignore", "`torch._prims_common.check` is deprecated")  # Inductor itself calls it, in 2.11
    spec = fsdp.Spec(fsdp.local_mesh(), units=["0", "2"])
    state, model = fsdp.init(lambda: of_three_layers(0.2 * (name != "hessian")), spec, fsdp.sgd(lr=0.1), seed=0)
    step, losses = STEPS[how](steps_of("third", model.train(), INSIDE[name])), []
    for k in range(8):
        generator = torch.Generator().manual_seed(100 * k + fsdp.extend.ranks_of(state).index)
        x = torch.randn(3, 32, generator=generator, dtype=torch.float64)
        state, loss = step(state, x.to(state.count.device))
        losses.append(float(loss))
    return losses, len(getattr(step, "graphs", ()))


@pytest.mark.parametrize("name", ["grad", "jvp", "vmap", "hessian", "grad of grad"])
def test_derivatives_in_captured_and_compiled_steps(name: str) -> None:
    found = {how: launch(in_graphs, (name, how), nprocs=RANKS) for how in STEPS}
    for rank, (eager, _) in enumerate(found["eager"]):
        assert found["captured"][rank][0] == pytest.approx(eager, rel=1e-9)
        assert found["both"][rank][0] == pytest.approx(found["compiled"][rank][0], rel=1e-9)
        assert [found[how][rank][1] for how in ("captured", "both")] == [1, 1]
