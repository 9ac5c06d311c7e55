"""One module at several paths of a model: within a unit, and as several of its layers; against the plain module."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.ranks import each_rank, launch
from support.tables import marked

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

RATE = 0.1


class Block(nn.Module):
    """A layer that it calls by two names."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = self.first if again else nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.second(torch.tanh(self.first(x))))


class Net(nn.Module):
    def __init__(self, shared: str) -> None:
        super().__init__()
        one = Block(again=False)
        several = [one] * 3 if shared == "blocks" else [Block(shared == "in a block") for _ in range(3)]
        self.blocks, self.head = nn.ModuleList(several), nn.Linear(6, 1)
        if shared == "a part elsewhere":
            self.extra: nn.Module = several[1].first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.extra(x) if hasattr(self, "extra") else x)
        return out


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def trained(shared: str, way: str) -> None:
    """Two steps, one with the head frozen, and one with it again; then a step of another state."""
    torch.manual_seed(0)
    module = Net(shared).double()
    plain = copy.deepcopy(module)
    params, model = fsdp.functionalize(module)
    spec = fsdp.Spec(fsdp.local_mesh(), fsdp.zero3("data"))
    if way == "compiled units":
        model = T.compile_units(model, "blocks.*", backend="aot_eager")
    forward_backward = T.forward_backward(model, loss_fn)

    def one(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    step = T.compile(one, backend="aot_eager") if way == "compiled" else one
    for attempt in range(2):
        state = fsdp.shard(params, spec, fsdp.sgd(lr=RATE))
        reference = copy.deepcopy(plain)
        for i in range(4):
            if i == 2 and way != "compiled":
                state = fsdp.freeze(state, "head.*")
            if i == 3 and way != "compiled":
                state = fsdp.unfreeze(state, "head.*")
            x = batch(10 * attempt + i)
            state, _ = step(state, x.chunk(2)[dist.get_rank()])
            trains = [p for n, p in reference.named_parameters() if way == "compiled" or i != 2 or "head" not in n]
            grads = torch.autograd.grad(loss_fn(reference, x), trains)
            with torch.no_grad():
                for p, g in zip(trains, grads, strict=True):
                    p.sub_(RATE * g)
            found = fsdp.full_params(state)
            assert all((found[n] - p).abs().max() < 1e-12 for n, p in reference.named_parameters())


ROWS = [*itertools.product(("blocks", "in a block", "a part elsewhere"), ("eager", "compiled", "compiled units"))]


@pytest.mark.parametrize(("shared", "way"), marked(ROWS, [ROWS[2], ROWS[4], ROWS[6], ROWS[8]]))
def test_a_module_at_several_paths(shared: str, way: str) -> None:
    if (shared, way) == ("a part elsewhere", "compiled units"):  # it gathers what a compiled module around it computes
        text = r"'blocks\.1' \(Block\) is compiled and holds a part that is gathered alone: 'extra'"
        with pytest.raises(fsdp.LaunchError, match=text):
            launch(trained, (shared, way), nprocs=2, processes=True)
        return
    launch(trained, (shared, way), nprocs=2, processes=way != "eager")


class Normed(nn.Module):
    """A norm at two paths, one without leaves in a block at two paths, and a tied weight of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False))
        self.more = nn.ModuleList([self.first, self.block])
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.other.weight
        self.other.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.first, self.other, self.block, *self.more):
            x = part(x)
        out: torch.Tensor = self.tied(x)
        return out


@each_rank(2)
def test_a_state_dict_has_the_buffers_of_a_module_at_each_of_its_paths() -> None:
    torch.manual_seed(0)
    module = Normed().double()
    params, model = fsdp.functionalize(module)
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1), buffers=fsdp.buffers(module))
    state, _ = T.forward_backward(model, loss_fn)(state, batch(dist.get_rank()))
    state = fsdp.step(state)
    into = Normed().double()
    for one in (module, model):
        into.load_state_dict(fsdp.state_dict(state, one))  # every key, and no other
    assert all(torch.equal(into.get_buffer(path), buffer) for path, buffer in state.buffers.items())
    assert state.buffers["block.1.running_mean"].any()
    assert "more.0.running_mean" not in fsdp.state_dict(state)
