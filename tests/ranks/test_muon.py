"""Muon, whose matrices travel to owners, beside the same rule on whole matrices."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from einops import rearrange
from support.presets import PRESETS, TWO_AXES, ranks_of
from support.problems import mesh_and_placement
from support.tables import marked

import functional_fsdp as fsdp
from functional_fsdp import Schedule, Spec, SpecError, launch
from functional_fsdp import transforms as T

Tree = dict[str, torch.Tensor]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
PATTERNS: dict[str, tuple[str, dict[str, int]]] = {
    "qkv": ("(k rows) columns -> k rows columns", {"k": 3}),
    "experts": ("e rows columns -> e rows columns", {}),
    "woven": ("rows (columns k) -> k rows columns", {"k": 2}),
}


class Net(nn.Module):
    """Odd shapes, a tied matrix, fused and stacked ones; biases and a norm, which are no matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 21)
        self.qkv = nn.Linear(21, 9, bias=False)
        self.norm = nn.LayerNorm(9)
        self.experts = nn.Parameter(torch.randn(3, 9, 5) / 3)
        self.woven = nn.Parameter(torch.randn(5, 14) / 3)
        self.out = nn.Linear(14, 12)
        self.back = nn.Linear(12, 21, bias=False)
        self.back.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.qkv(torch.tanh(self.inner(x) + self.back(x.flip(-1)))))
        h = torch.tanh(torch.einsum("bi,eio->bo", h, self.experts)) @ self.woven
        return torch.as_tensor(self.out(torch.tanh(h)))


LABELS = {"*.bias": "vector", "norm.*": "vector", "qkv.*": "qkv", "experts": "experts", "woven": "woven"}


def label_of(path: str) -> str:
    if path.endswith("bias") or path.startswith("norm"):
        return "vector"
    return path.split(".")[0] if path.split(".")[0] in PATTERNS else "default"


def model(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(1000 * step + rank)
    return torch.randn(5, 12).to(dtype)


def newton_schulz(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """As the reference of the method has it, of one matrix."""
    a, b, c = COEFFICIENTS
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def reference(ranks: int, steps: int, dtype: torch.dtype, skipped: int = -1, missing: int = -1) -> Tree:
    """Whole matrices, on one rank; vectors by plain gradient descent."""
    net = model(dtype)
    params = dict(net.named_parameters())
    kept = {path: torch.zeros_like(p) for path, p in params.items()}
    for step in range(steps):
        grads: dict[str, Any] = dict.fromkeys(params)
        for rank in range(ranks):
            found = torch.autograd.grad(net(batch(step, rank, dtype)).square().mean(), list(params.values()))
            for path, g in zip(params, found, strict=True):
                have = grads[path]
                grads[path] = g / ranks if have is None else have + g / ranks
        if step == skipped:
            continue
        with torch.no_grad():
            for path, p in params.items():
                g = grads[path]
                if step == missing and path in ("woven", "norm.weight"):
                    continue
                if label_of(path) == "vector":
                    p.sub_(LR * g)
                    continue
                kept[path].lerp_(g, 1 - MOMENTUM)
                update = g.lerp(kept[path], MOMENTUM)
                pattern, sizes = PATTERNS.get(label_of(path), ("rows columns -> () rows columns", {}))
                stack = rearrange(update, pattern, **sizes)
                rows, columns = stack.shape[-2:]
                done = torch.stack([newton_schulz(one) for one in stack])
                left, right = pattern.split("->")
                change = rearrange(done, f"{right} -> {left}")
                p.mul_(1 - LR * DECAY).sub_(LR * math.sqrt(max(1, rows / columns)) * change)
    return {path: p.detach() for path, p in params.items()}


def optimizer(dtype: torch.dtype) -> Any:
    muon = fsdp.muon(lr=LR, weight_decay=DECAY, momentum=MOMENTUM, ns_dtype=dtype, matrices=PATTERNS)
    return fsdp.partition({"vector": fsdp.sgd(lr=LR), "default": muon})


def begun(preset: str, dtype: torch.dtype, **spec: Any) -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    precision = fsdp.Precision(main=dtype, compute=dtype)
    params, skeleton = fsdp.functionalize(model(dtype))
    made = Spec(mesh, placement, precision=precision, units=["inner", "qkv", "*"], labels=LABELS, **spec)
    return fsdp.shard(params, made, optimizer(dtype)), skeleton


def step_of(skeleton: Any, skips: bool = False) -> Any:
    def train_step(state: fsdp.State, x: torch.Tensor, skip: torch.Tensor | None = None) -> fsdp.State:
        state, params = fsdp.unshard(state)
        grads = torch.func.grad(lambda params: loss_of(skeleton, params, x))(params)
        return fsdp.step(fsdp.reduce(state, grads), skip=skip if skips else None)

    return train_step


def loss_of(skeleton: Any, params: Tree, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.func.functional_call(skeleton, params, (x,))
    return out.square().mean()


def trained(
    preset: str, way: str, dtype: torch.dtype, steps: int, skipped: int = -1, missing: int = -1
) -> dict[str, torch.Tensor]:
    state, skeleton = begun(preset, dtype, schedule=Schedule(overlap_update=way == "overlapped"))
    wraps: dict[str, Any] = {
        "torch.compile": lambda f: torch.compile(f, fullgraph=True),
        "aot_eager": lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"),
        "T.compile": T.compile,
    }
    train_step = wraps.get(way, lambda f: f)(step_of(skeleton, skipped >= 0))
    for step in range(steps):
        x = batch(step, dist.get_rank(), dtype)
        if step == missing:
            state, params = fsdp.unshard(state)
            found = torch.func.grad(partial(loss_of, skeleton))(params, x)
            grads = {path: None if path in ("woven", "norm.weight") else g for path, g in found.items()}
            state = fsdp.step(fsdp.reduce(state, grads))
        elif skipped >= 0:
            state = train_step(state, x, torch.tensor(step == skipped))
        else:
            state = train_step(state, x)
    params = fsdp.full_params(state)
    return {path: params[path] for path in dict(model(dtype).named_parameters())}


def differ(found: Tree, expected: Tree) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[path] - expected[path]).abs().max()) for path in expected)


WAYS = ("eager", "overlapped", "torch.compile", "T.compile", "aot_eager")
ROWS = [
    (preset, way, ranks) for preset in PRESETS for way in WAYS for ranks in ((4,) if preset in TWO_AXES else (1, 2, 4))
]
QUICK = [
    ("zero3", "eager", 2),
    ("hfsdp", "eager", 4),
    ("zero2", "aot_eager", 2),
    ("ddp", "eager", 1),
    ("hsdp", "eager", 4),
]


@pytest.mark.parametrize(("preset", "way", "ranks"), marked(ROWS, QUICK))
def test_twenty_steps_are_those_on_whole_matrices(preset: str, way: str, ranks: int) -> None:
    for dtype, most in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        if dtype is torch.float32 and way not in ("eager", "overlapped"):
            continue  # two compilations say no more
        expected = reference(ranks, 20, dtype)
        for found in launch(trained, (preset, way, dtype, 20), nprocs=ranks):
            assert differ(found, expected) < most


@pytest.mark.parametrize("preset", ["zero3", "hfsdp"])
def test_a_skipped_step_changes_nothing_and_leaves_without_gradients_stay(preset: str) -> None:
    ranks = ranks_of(preset)
    skipped, missing = reference(ranks, 5, torch.float64, skipped=2), reference(ranks, 5, torch.float64, missing=2)
    for found in launch(trained, (preset, "eager", torch.float64, 5, 2), nprocs=ranks):
        assert differ(found, skipped) < 1e-9
    for found in launch(trained, (preset, "eager", torch.float64, 5, -1, 2), nprocs=ranks):
        assert differ(found, missing) < 1e-9


def saved(folder: str) -> None:
    state, skeleton = begun("zero3", torch.float64)
    for step in range(3):
        state = step_of(skeleton)(state, batch(step, dist.get_rank() % 2, torch.float64))
    fsdp.save(state, folder)


def resumed(folder: str, preset: str) -> tuple[Tree, Tree]:
    """Three more steps, after a load and after a redistribution; all ranks with the batches of two."""
    begin, skeleton = begun(preset, torch.float64)
    state = fsdp.load(folder, like=begin)
    precision = fsdp.Precision(main=torch.float64, compute=torch.float64)
    spec = Spec(fsdp.local_mesh(), precision=precision, labels=LABELS)
    other = fsdp.redistribute(fsdp.load(folder, like=begin), spec)
    found = []
    for one in (state, other):
        for step in range(3, 6):
            one = step_of(skeleton)(one, batch(step, dist.get_rank() % 2, torch.float64))
        found.append({path: p.clone() for path, p in fsdp.full_params(one).items() if path != "back.weight"})
    return found[0], found[1]


@pytest.mark.parametrize("preset", ["zero3", "hsdp"])
def test_a_checkpoint_goes_on_on_any_ranks(preset: str, tmp_path: Path) -> None:
    launch(saved, (str(tmp_path / "x"),), nprocs=2)
    expected = reference(2, 6, torch.float64)
    for loaded, moved in launch(resumed, (str(tmp_path / "x"), preset), nprocs=4):
        assert differ(loaded, expected) < 1e-9
        assert differ(moved, expected) < 1e-9


def test_in_bfloat16_it_is_as_near_to_torchs_as_another_order_of_sums() -> None:
    """Beside torch.optim.Muon, one step: our difference is within what permuted columns make of torch's own, which adds
    up the same products in another order."""
    torch.manual_seed(0)
    weight, grad = torch.randn(300, 700), torch.randn(300, 700)
    theirs = [after(weight, grad, order) for order in (torch.arange(700), *(torch.randperm(700) for _ in range(8)))]
    spread = max(float((one - theirs[0]).abs().max()) for one in theirs[1:])
    state = fsdp.shard({"w": weight}, Spec(fsdp.local_mesh()), fsdp.muon(lr=0.1))
    state, _ = fsdp.unshard(state)
    state = fsdp.step(fsdp.reduce(state, {"w": grad}))
    ours = float((fsdp.full_params(state)["w"] - theirs[0]).abs().max())
    assert 0 < spread < 0.01
    assert ours <= spread


def after(weight: torch.Tensor, grad: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    p = nn.Parameter(weight[:, order].clone())
    p.grad = grad[:, order].clone()
    torch.optim.Muon([p], lr=0.1).step()
    return p.detach()[:, order.argsort()]


def refused() -> str:
    with pytest.raises(SpecError) as error:
        fsdp.shard({"w": torch.ones(4, 4), "b": torch.ones(4)}, Spec(fsdp.local_mesh()), fsdp.muon())
    return str(error.value)


def test_a_leaf_that_is_no_matrix_is_refused_on_every_rank() -> None:
    for said in launch(refused, nprocs=2):
        assert "the leaf 'b' has shape [4]; expected a matrix [rows, columns]" in said
        assert "fsdp.partition" in said


def left_behind() -> tuple[str, float]:
    """One rank fails where the matrices are exchanged. What the other one says, and after how many seconds."""
    state, params = fsdp.unshard(begun("zero3", torch.float64)[0])
    state = fsdp.reduce(state, {path: torch.ones_like(p) for path, p in params.items()})
    run, begin = state._executor.run, time.monotonic()
    if dist.get_rank() == 0:

        def failing(*_: Any) -> None:
            raise MemoryError("no room for what this rank owns")

        run.__dict__["now"] = failing
    with pytest.raises((MemoryError, fsdp.CommError)) as error:
        fsdp.step(state)
    return f"{type(error.value).__name__}: {error.value}", time.monotonic() - begin


def test_an_owner_that_fails_is_an_error_on_every_rank() -> None:
    (mine, _), (theirs, seconds) = launch(left_behind, nprocs=2)
    assert mine == "MemoryError: no room for what this rank owns"
    assert theirs.startswith("CommError")
    assert "no room for what this rank owns" in theirs
    assert seconds < 30
