"""Experts sharded over one axis of the mesh, the rest over both: gradients, norms and checkpoints, on 2 × 2 ranks."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import moe
import pytest
import torch
import torch.distributed as dist
from support.driven import refused
from support.ranks import each_rank, launch

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp.transforms._drive.buffers import shared_axes

Tree = dict[str, torch.Tensor]


def windows(rank: int) -> torch.Tensor:
    return torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(rank))


def trained(steps: int, clip: bool, folder: str) -> tuple[Tree, list[float], Tree]:
    """Weights on this rank after some steps, norms, and weights after reading a checkpoint of them."""
    mesh = fsdp.local_mesh(expert=2, data=2)
    state, model = moe.sharded(mesh, fsdp.sgd(lr=0.5))
    forward_backward = T.forward_backward(model, moe.loss_fn)
    norms = []
    for step in range(steps):
        state, _ = forward_backward(state, windows(10 * step + dist.get_rank()))
        state, norm = T.clip_by_global_norm(state, 0.1 if clip else 1e9)
        state = fsdp.step(state)
        norms.append(norm.item())
    fsdp.save(state, folder)
    fresh, _ = moe.sharded(mesh, fsdp.sgd(lr=0.5))
    return fsdp.full_params(state), norms, fsdp.full_params(fsdp.load(folder, like=fresh))


def reference(steps: int, clip: bool) -> tuple[Tree, list[float]]:
    """One process with all experts, the mean loss of four ranks."""
    moe.GROUP = None
    model = moe.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([moe.loss_fn(model, windows(10 * step + rank)) for rank in range(4)]).mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 if clip else 1e9).item())
        optimizer.step()
    return dict(model.named_parameters()), norms


@pytest.mark.parametrize("clip", [pytest.param(False, marks=pytest.mark.large), True])
def test_every_leaf_has_the_gradient_of_the_mean_over_all_ranks(clip: bool, tmp_path: Path) -> None:
    weights, norms = reference(3, clip)
    for rank, (got, found, loaded) in enumerate(
        launch(trained, (3, clip, str(tmp_path / "saved")), nprocs=4, processes=True)
    ):
        assert found == pytest.approx(norms, abs=1e-5)
        for key, weight in got.items():
            want = weights[key][2 * (rank // 2) : 2 * (rank // 2) + 2] if "experts" in key else weights[key]
            assert (weight - want).abs().max() < 1e-5
            assert torch.equal(loaded[key], weight)


@each_rank(4)
def test_only_experts_may_differ() -> None:
    mesh = fsdp.local_mesh(expert=2, data=2)
    rules = {"experts": fsdp.zero3("data"), "*": fsdp.zero3("expert", "data")}
    mine = torch.full((4,), float(mesh.get_local_rank("expert")))
    good = fsdp.shard({"experts": mine, "rest": torch.ones(4)}, fsdp.Spec(mesh, rules))
    assert torch.equal(fsdp.full_params(good)["experts"], mine)
    text = "ranks have different values. The first leaf that differs: rank 0 has rest checksum"
    bad = {"experts": torch.ones(4), "rest": mine}
    refused((lambda: fsdp.shard(bad, fsdp.Spec(mesh, rules)), text, "rank 2 has rest checksum"))


def test_the_example_learns() -> None:
    for losses in launch(moe.main, (8,), nprocs=4, processes=True):
        assert losses[-1] < losses[0] - 0.5


# ---------------------------------------------------------------- buffers of experts


class Counted(torch.nn.Module):
    """Counts what it sees; it has no leaves."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().mean(0)
        return x


class Normed(torch.nn.Module):
    """Norms that all ranks share, and norms of experts; each kind with and without leaves."""

    place: torch.Tensor

    def __init__(self, place: int) -> None:
        super().__init__()
        norm = torch.nn.BatchNorm1d
        self.stem = torch.nn.Sequential(torch.nn.Linear(3, 3), norm(3))
        self.experts = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(3, 3), norm(3), norm(3, affine=False))])
        self.after, self.plain = Counted(), norm(3, affine=False)
        self.register_buffer("place", torch.full((), float(place)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for expert in self.experts:
            x = x + expert(x)
        out: torch.Tensor = self.plain(self.after(x))
        return out * (1 + self.place)


def normed(rank: int) -> Normed:
    torch.manual_seed(0)
    module = Normed(rank).double()
    with torch.no_grad():
        for p in module.experts.parameters():
            p.add_(rank // 2)
    return module


def rows(rank: int) -> torch.Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * (1 + rank)


def squared(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def buffered(rule: Any, compiled: bool, how: str, folder: str) -> tuple[Tree, Tree]:
    mesh, rank = fsdp.local_mesh(expert=2, data=2), dist.get_rank()
    params, model = fsdp.functionalize(module := normed(rank))
    rules = {"experts.*.weight": fsdp.zero3("data"), "experts.*.bias": fsdp.ddp("data")}
    spec = fsdp.Spec(mesh, {**rules, "*": fsdp.zero3("expert", "data")})
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.0), buffers=fsdp.buffers(module), local_buffers=["place"])
    if how == "copied":
        state = copy.deepcopy(pickle.loads(pickle.dumps(state)))
    elif how == "moved":
        state = fsdp.redistribute(state, fsdp.Spec(mesh, {**rules, "*": fsdp.zero1("expert", "data")}))
    elif how == "replaced":
        state = fsdp.replace_params(state, fsdp.full_params(state))
    forward_backward = T.forward_backward(model, squared, buffers=rule)

    def train_step(state: fsdp.State, x: torch.Tensor) -> fsdp.State:
        return fsdp.step(forward_backward(state, x)[0])

    run = T.compile(train_step, "aot_eager") if compiled else train_step
    state = run(state, rows(rank))
    fsdp.save(state, folder)
    return dict(state.buffers), dict(fsdp.load(folder, like=state).buffers)


@pytest.mark.parametrize(
    ("rule", "compiled", "how"),
    [*((rule, False, "") for rule in ("mean", "first", "local")), ("mean", True, ""),
     *(("mean", False, how) for how in ("copied", "moved", "replaced"))],
)  # fmt: skip
def test_experts_keep_their_own_buffers(rule: str, compiled: bool, how: str, tmp_path: Path) -> None:
    """What ranks along "expert" have of their own is averaged along "data" only; all else over the four."""
    plain: list[Tree] = []
    for rank in range(4):
        squared(module := normed(rank), rows(rank))
        plain.append({path: b.clone() for path, b in module.named_buffers()})
    args = (rule, compiled, how, str(tmp_path / "saved"))
    for rank, (got, loaded) in enumerate(launch(buffered, args, nprocs=4, processes=compiled)):
        assert got.keys() == plain[rank].keys()
        for path, buffer in got.items():
            row = [rank // 2 * 2, rank // 2 * 2 + 1]
            among = [rank] if path == "place" or rule == "local" else row if "experts" in path else [0, 1, 2, 3]
            among = among[:1] if rule == "first" else among
            want = torch.stack([plain[other][path].double() for other in among]).mean(0)
            assert (buffer - want).abs().max() < 1e-12, path
            assert rule == "local" or path == "place" or torch.equal(loaded[path], buffer), path


def test_along_which_axes_a_buffer_is_shared() -> None:
    params = {"gain": torch.ones(2), **dict(normed(0).named_parameters())}
    rules = {"experts.0.0*": fsdp.zero3("data"), "experts.0.1.weight": fsdp.zero3("data"), "gain": fsdp.ddp("data")}
    spec = fsdp.Spec({"expert": 2, "data": 2}, {**rules, "*": fsdp.zero3("expert", "data")})
    paths = ["stem.1.n", "experts.0.1.n", "experts.0.2.n", "after.n", "n", "stem.0.inner.deep.n", "experts.0.0.part.n"]
    both, data = ("expert", "data"), ("data",)
    layout = fsdp.make_layout(params, spec)
    assert shared_axes(paths, layout, spec) == dict(zip(paths, (both, data, both, both, data, both, data), strict=True))


# ---------------------------------------------------------------- means over tokens


@each_rank(2)
def test_a_mean_over_tokens() -> None:
    """Of which ranks have different numbers."""
    params, model = fsdp.functionalize(plain := torch.nn.Linear(5, 1, dtype=torch.float64))
    data = [
        torch.randn(3 + 2 * r, 5, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(2)
    ]
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), average="sum"), fsdp.sgd(lr=1.0))
    x = data[dist.get_rank()]
    state, _ = T.forward_backward(model, squared)(state, x)
    state, n = fsdp.psum(state, torch.tensor(len(x)))
    assert float(n) == 8.0
    weights = fsdp.full_params(fsdp.step(T.divide(state, n)))
    grads = torch.autograd.grad(plain(torch.cat(data)).square().mean(), [*plain.parameters()])
    for (key, p), grad in zip(plain.named_parameters(), grads, strict=True):
        assert (weights[key] - (p.detach() - grad)).abs().max() < 1e-12
