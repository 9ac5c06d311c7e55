"""A model of matrices of all kinds, trained by Muon on ranks and, whole, on one."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from einops import rearrange

import functional_fsdp as fsdp
from functional_fsdp import Schedule, Spec
from functional_fsdp import transforms as T

from .problems import mesh_and_placement

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
        "compiled": lambda f: torch.compile(f, fullgraph=True, backend="eager"),
        "T.compile": T.compile,
        "graph": T.cuda_graph,
    }
    torch.compiler.reset()  # the rows of a table compile the same code, which torch does eight times and no more
    train_step = wraps.get(way, lambda f: f)(step_of(skeleton, skipped >= 0))
    for step in range(steps):
        x = batch(step, dist.get_rank(), dtype).to(state.count.device)
        if step == missing:
            state, params = fsdp.unshard(state)
            found = torch.func.grad(partial(loss_of, skeleton))(params, x)
            grads = {path: None if path in ("woven", "norm.weight") else g for path, g in found.items()}
            state = fsdp.step(fsdp.reduce(state, grads))
        elif skipped >= 0:
            state = train_step(state, x, torch.tensor(step == skipped, device=x.device))
        else:
            state = train_step(state, x)
    params = fsdp.full_params(state)
    return {path: params[path].cpu() for path in dict(model(dtype).named_parameters())}


def differ(found: Tree, expected: Tree) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[path] - expected[path]).abs().max()) for path in expected)
