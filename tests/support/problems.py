"""What multi-rank tests share: an awkward small model, data by rank, the plain reference, the sharded loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from support.presets import TWO_AXES

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

VOCABULARY, WIDTH, DEPTH = 11, 7, 3
Batch = tuple[torch.Tensor, torch.Tensor]
Tree = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd sizes; a tied leaf, a frozen one, a 0-dim one, an empty one, one smaller than the world."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.tail = Tail()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.tail(self.head(x))


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.full((1, 3), 0.25), requires_grad=False)
        self.pair = nn.Parameter(torch.tensor([0.5, -0.5]))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift.mean() * self.pair.sum().exp() + self.nothing.sum() + self.pair[0] * x.tanh()


def net(dtype: torch.dtype = torch.float64, depth: int = DEPTH) -> Net:
    torch.manual_seed(0)
    return Net(depth).to(dtype)


def batch(step: int, rank: int, micro: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    x, y = (torch.randint(0, VOCABULARY, (2, 5), generator=generator) for _ in range(2))
    return x, y


def on(state: fsdp.State, data: Batch) -> Batch:
    """The batch on the state's device."""
    x, y = (t.to(state.count.device) for t in data)
    return x, y


def loss_fn(model: Callable[..., torch.Tensor], data: Batch) -> torch.Tensor:
    return F.cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten())


def mesh_and_placement(preset: str) -> tuple[Any, fsdp.Placement]:
    make = getattr(fsdp, preset)
    if preset in TWO_AXES:
        world = fsdp.local_mesh().size()
        return fsdp.local_mesh(replica=2 if world % 2 == 0 else 1, shard=-1), make("replica", "shard")
    return fsdp.local_mesh(), make("data")


def reference(
    world: int,
    steps: int,
    micro: int,
    dtype: torch.dtype = torch.float64,
    average: str = "mean",
    depth: int = DEPTH,
) -> Iterator[tuple[float, Tree, Tree]]:
    """The plain module on each rank's batches, gradients averaged: (rank 0's loss, gradients, weights after) a step."""
    model = net(dtype, depth)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        losses = []
        optimizer.zero_grad()
        for rank in range(world):
            for k in range(micro):
                loss = loss_fn(model, batch(step, rank, k))
                (loss / world if average == "mean" else loss).backward()
                losses.append(loss.item())
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        yield losses[micro - 1], grads, {name: p.detach().clone() for name, p in model.named_parameters()}


def whole_tree(model: nn.Module, state: fsdp.State, data: Batch, last: bool) -> tuple[fsdp.State, torch.Tensor]:
    """Way 1: gather everything, plain torch.func, reduce everything."""
    data = on(state, data)
    state, params = fsdp.unshard(state)
    grads, loss = torch.func.grad_and_value(lambda p: loss_fn(fsdp.bind(model, p), data))(params)
    return fsdp.reduce(state, grads, last_microbatch=last), loss


def by_unit(model: Any, state: fsdp.State, data: Batch, last: bool) -> tuple[fsdp.State, torch.Tensor]:
    """Way 2: gather, use, release and reduce one unit at a time; the tied leaf is a unit with two users."""
    tokens, targets = on(state, data)
    blocks = [name for name in state.units if name.startswith("blocks.")]
    pullbacks: dict[str, Any] = {}

    def block(i: int, w: Tree, x: torch.Tensor) -> torch.Tensor:
        return fsdp.bind(model.blocks[i], w)(x)

    def head(w: dict[str, Tree], x: torch.Tensor) -> torch.Tensor:
        logits = fsdp.bind(model.tail, w["tail"])(fsdp.bind(model.head, w["embed.weight"])(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    state, w = fsdp.unshard(state, "embed.weight")
    x, pullbacks["embed"] = T.vjp(lambda w: F.embedding(tokens, w["weight"]), w)
    state = fsdp.release(state, "embed.weight")
    for i, unit in enumerate(blocks):
        state, w = fsdp.unshard(state, unit)
        x, pullbacks[unit] = T.vjp(partial(block, i), w, x)
        state = fsdp.release(state, unit)
    state, both = fsdp.unshard(state, ["embed.weight", "tail"])
    loss, pullback = T.vjp(head, both, x)
    dw, dx = pullback(both, torch.ones_like(loss))
    state = fsdp.reduce(state, dw["tail"], "tail", last_microbatch=last)
    state = fsdp.release(state, ["embed.weight", "tail"])
    for unit in reversed(blocks):
        state, w = fsdp.unshard(state, unit)
        dblock, dx = pullbacks.pop(unit)(w, dx)
        state = fsdp.reduce(state, dblock, unit, last_microbatch=last)
        state = fsdp.release(state, unit)
    state, w = fsdp.unshard(state, "embed.weight")
    (dembed,) = pullbacks.pop("embed")(w, dx)
    tied = {"weight": dembed["weight"] + dw["embed.weight"]["weight"]}
    state = fsdp.reduce(state, tied, "embed.weight", last_microbatch=last)
    return fsdp.release(state, "embed.weight"), loss


LOOPS = {"whole": whole_tree, "by_unit": by_unit}


def full_grads(state: fsdp.State) -> Tree:
    """Finished gradients at their global shapes, on every rank: each rank's parts, put together by hand."""
    parts: list[Any] = [None] * dist.get_world_size()
    mine = {}
    for name, buffer in state.grads.items():
        mine[name] = (*buffer.span(), buffer.local.cpu())
    dist.all_gather_object(parts, mine)
    whole = {}
    for name, bucket in state.layout.trainable.items():
        flat = torch.full((bucket.numel,), torch.nan, dtype=bucket.grads)
        for part in parts:
            start, stop, local = part[name]
            flat[start:stop] = local
        for leaf in bucket.leaves:
            whole[leaf.path] = flat[leaf.offset : leaf.offset + leaf.numel].view(leaf.shape)
    return whole


def sharded(
    preset: str,
    loop: str,
    steps: int,
    micro: int,
    dtype: torch.dtype = torch.float64,
    flags: tuple[bool, ...] | None = None,
    **spec: Any,
) -> list[tuple[float, Tree, Tree]]:
    """As `reference`, on this rank of a sharded run: (this rank's loss, gradients, weights after) a step."""
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net(dtype))
    state = fsdp.shard(params, fsdp.Spec(mesh, placement, **spec), fsdp.adamw(lr=1e-2, weight_decay=0.1))
    rank, seen = dist.get_rank(), []
    for step in range(steps):
        for k in range(micro):
            state, loss = LOOPS[loop](model, state, batch(step, rank, k), flags[k] if flags else k == micro - 1)
        state = fsdp.finish_reductions(state)
        grads = full_grads(state)
        state = fsdp.step(state)
        seen.append((loss.item(), grads, {key: p.cpu() for key, p in fsdp.full_params(state).items()}))
    return seen


class Stack(nn.Module):
    """Equal layers, and nothing awkward."""

    def __init__(self, width: int = 32, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))


def through_the_stack(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
    """Way 2 over `Stack`: the mean square of what comes out, and its gradients."""
    pullbacks = {}

    def layer(w: Tree, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(h, w["weight"], w["bias"]))

    for unit in state.units:
        state, w = fsdp.unshard(state, unit)
        x, pullbacks[unit] = T.vjp(layer, w, x)
        state = fsdp.release(state, unit)
    loss, dh = x.square().mean(), 2 * x / x.numel()
    for unit in reversed(state.units):
        state, w = fsdp.unshard(state, unit)
        dw, dh = pullbacks.pop(unit)(w, dh)
        state = fsdp.reduce(state, dw, unit)
        state = fsdp.release(state, unit)
    return state, loss


def largest(a: Tree, b: Tree) -> float:
    return max([(a[key].double() - b[key].double()).abs().max().item() for key in b if b[key].numel()])
