"""A Llama, and three ways to train it on data × tp, for benchmark_axes.py. All have the same loss on the same batches.

theirs      FSDP2, and `parallelize_module` by torchtitan's plan (sequence parallel norms, cut vocabulary)
ours        this package, with `Spec(own=)` and `T.collectives`
dtensors    this package, of the module that `parallelize_module` has cut by that plan
"""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp.transforms import collectives as C

OWN: dict[str, Any] = {
    "*.wq.*": ("tp", 0), "*.wk.*": ("tp", 0), "*.wv.*": ("tp", 0), "*.wo.*": ("tp", 1), "*.w1.*": ("tp", 0),
    "*.w3.*": ("tp", 0), "*.w2.*": ("tp", 1), "embed.*": ("tp", 0), "output.*": ("tp", 0),
    "*": fsdp.Along("tp", grads="sum"),
}  # fmt: skip


SUMS = {
    "*norm*": fsdp.Along("tp", grads="sum")
}  # of DTensors: norms meet cut sequences, and are added up with the rest


class Config(NamedTuple):
    width: int = 64
    heads: int = 8
    hidden: int = 128
    depth: int = 2
    vocab: int = 128
    length: int = 32
    rows: int = 2


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head = c.width // c.heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(c.width, c.width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(_turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(c.width, c.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, c: Config, tp: Any) -> None:
        super().__init__()
        self.tp = tp
        self.norm1, self.attention = nn.RMSNorm(c.width, eps=1e-5), Attention(c)
        self.norm2, self.mlp = nn.RMSNorm(c.width, eps=1e-5), MLP(c)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if self.tp is None:
            x = x + self.attention(self.norm1(x), cos, sin)
            return x + self.mlp(self.norm2(x))
        x = x + C.reduce_scatter(self.attention(C.all_gather(self.norm1(x), self.tp, 1), cos, sin), self.tp, 1)
        return x + C.reduce_scatter(self.mlp(C.all_gather(self.norm2(x), self.tp, 1)), self.tp, 1)


class Llama(nn.Module):
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, c: Config, tp: Any = None) -> None:
        super().__init__()
        self.tp, self.part = tp, c.vocab // (tp.size() if tp else 1)
        self.embed = nn.Embedding(c.vocab, c.width)
        self.layers = nn.ModuleList(Layer(c, tp) for _ in range(c.depth))
        self.norm, self.output = nn.RMSNorm(c.width, eps=1e-5), nn.Linear(c.width, c.vocab, bias=False)
        half = c.width // c.heads // 2
        angles = torch.outer(torch.arange(c.length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) if self.tp is None else self.embedded(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        logits: torch.Tensor = self.output(x if self.tp is None else C.all_gather(x, self.tp, 1))
        return logits

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        mine = tokens - self.tp.get_local_rank() * self.part
        here = (mine >= 0) & (mine < self.part)
        return C.reduce_scatter(F.embedding(mine.where(here, 0), self.embed.weight) * here[..., None], self.tp, 1)


def cut_loss(logits: torch.Tensor, targets: torch.Tensor, tp: Any) -> torch.Tensor:
    """Cross entropy of logits [n, vocabulary / tp]."""
    logits, part = logits.float(), logits.shape[-1]
    top = C.pmax(logits.amax(-1), tp)
    total = C.psum((logits - top[:, None]).exp().sum(-1), tp)
    mine = targets - tp.get_local_rank() * part
    here = (mine >= 0) & (mine < part)
    chosen = C.psum(logits.gather(-1, mine.where(here, 0)[:, None])[:, 0] * here, tp)
    return (total.log() + top - chosen).mean()


def loss_fn(model: Any, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    logits = model(data[0]).flatten(0, 1)
    if model.tp is None:
        return F.cross_entropy(logits.float(), data[1].flatten())
    return cut_loss(logits, data[1].flatten(), model.tp)


def batch(c: Config, step: int, rank: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows = torch.randint(0, c.vocab, (c.rows, c.length + 1), generator=generator)
    return rows[:, :-1].to(device), rows[:, 1:].to(device)


def make(c: Config, tp: Any = None) -> Llama:
    torch.manual_seed(0)
    model = Llama(c, tp)
    for p in model.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=0.02)
    return model


class Found(NamedTuple):
    """Losses; seconds of a step, the median; bytes allocated at most."""

    losses: list[float]
    seconds: float
    peak: int


def measured(step: Any, steps: int, device: torch.device) -> Found:
    losses, times = [], []
    cuda = device.type == "cuda"
    for i in range(steps):
        if cuda:
            torch.cuda.synchronize()
            if i == steps // 3:
                torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss = step(i)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        losses.append(float(loss))
    late = sorted(times[steps // 3 :])
    return Found(losses, late[len(late) // 2], torch.cuda.max_memory_allocated() if cuda else 0)


def ours(
    c: Config, axes: dict[str, int], steps: int, compute: torch.dtype | None = None, dtensors: bool = False, **how: Any
) -> Found:
    """By this package. how: transport=, graph=True, compiled="units" or "step", debug=True."""
    mesh = fsdp.local_mesh(**axes)
    precision = fsdp.Precision(compute=compute) if compute else fsdp.Precision()
    spec = fsdp.Spec(
        mesh, own=SUMS if dtensors else OWN, precision=precision, transport=how.get("transport", "collective"),
        schedule=fsdp.Schedule(debug=how.get("debug", False)),
    )  # fmt: skip
    with torch.device(mesh.device_type):
        module = cut(make(c), mesh["tp"]) if dtensors else make(c, mesh["tp"])
    params, model = fsdp.functionalize(module, spec)
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-3), buffers=fsdp.buffers(model))
    del params, module
    model = T.compile_units(model, "layers.*") if how.get("compiled") == "units" else model
    forward_backward = T.forward_backward(model, loss_fn)

    def train_step(state: fsdp.State, data: Any) -> Any:
        with in_parallel(dtensors and mesh["tp"].size() > 1):
            state, loss = forward_backward(state, data)
        return fsdp.step(state), loss

    run: Any = train_step
    if how.get("compiled") == "step":
        run = T.compile(train_step)
    if how.get("graph"):
        run = T.cuda_graph(train_step, pass_through=True)
    held = [state]

    def step(i: int) -> Any:
        held[0], loss = run(held[0], batch(c, i, mesh.get_local_rank("data"), state.count.device))
        held[0], loss = fsdp.pmean(held[0], loss)
        return loss

    found = measured(step, steps, state.count.device)
    graphs = getattr(run, "graphs", {}).values()  # what a replay takes is not allocated anew
    most = torch.cuda.memory_allocated() + max(graph.peak for graph in graphs) if graphs else 0
    return found._replace(peak=max(found.peak, most) + held[0].shared_bytes)


dtensors = partial(ours, dtensors=True)


def in_parallel(cut: bool) -> Any:
    """Within, cross entropy is that of logits which are cut."""
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel() if cut else nullcontext()


def cut(model: nn.Module, tp: Any) -> nn.Module:
    """The model by torchtitan's plan."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan: Any = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }  # fmt: skip
    parallelize_module(model, tp, plan)
    gather: Any = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    inner: Any = {"input_layouts": (Shard(1), None, None), "desired_input_layouts": (Replicate(), None, None)}
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, tp, {
            "norm1": SequenceParallel(), "norm2": SequenceParallel(),
            "attention": PrepareModuleInput(**inner), "mlp": PrepareModuleInput(**gather),
            **{f"attention.{w}": ColwiseParallel() for w in ("wq", "wk", "wv")},
            **{w: RowwiseParallel(output_layouts=Shard(1)) for w in ("attention.wo", "mlp.w2")},
            "mlp.w1": ColwiseParallel(), "mlp.w3": ColwiseParallel(),
        })  # fmt: skip
    return model


def theirs(
    c: Config, axes: dict[str, int], steps: int, compute: torch.dtype | None = None, compiled: bool = False
) -> Found:
    """By FSDP2 over "data", and parallelize_module over "tp"."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    warnings.simplefilter("ignore")
    mesh = fsdp.local_mesh(**axes)
    device = torch.empty(0, device=mesh.device_type).device
    tp = mesh["tp"]
    with torch.device(mesh.device_type):
        model = cut(make(c), tp)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute) if compute else MixedPrecisionPolicy()
    for layer in model.layers:  # type: ignore[union-attr]
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh["data"], mp_policy=policy)
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda", weight_decay=0.01)

    def step(i: int) -> Any:
        tokens, targets = batch(c, i, mesh.get_local_rank("data"), device)
        with in_parallel(tp.size() > 1):
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        value = value.detach().clone()
        torch.distributed.all_reduce(value, group=mesh["data"].get_group())
        return value / mesh["data"].size()

    return measured(step, steps, device)
