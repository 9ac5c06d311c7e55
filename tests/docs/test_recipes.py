"""The short examples that are imported: each beside plain torch, unsharded, on the batches of all ranks."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.presets import AXES, PRESETS, placement_of, ranks_of
from support.ranks import launch
from torch.func import functional_call, vmap

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

Tree = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]
SOME = [pytest.param(preset, marks=() if preset in ("zero3", "zero1") else pytest.mark.large) for preset in PRESETS]


class Net(nn.Module):
    """Odd widths, so that shards end in the middle of rows; and a leaf of three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 13)
        self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))
        self.mixed = nn.Parameter(0.3 * torch.randn(2, 13, 11))
        self.head = nn.Linear(11, 1)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.inp(x))
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        out: torch.Tensor = self.head(self.drop(h) @ self.mixed.sum(0))
        return out[..., 0]


def net(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    model = Net().double()
    nn.init.zeros_(model.inp.bias)
    model.drop.p = dropout
    return model


def batch(step: int, rank: int, n: int = 6) -> Batch:
    g = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(n, 5, generator=g, dtype=torch.float64)
    return x, torch.sin((1 + rank) * x.sum(-1))


def loss_fn(model: Any, data: Batch) -> torch.Tensor:
    return (model(data[0]) - data[1]).square().mean()


def spec_of(preset: str, **more: Any) -> fsdp.Spec:
    sizes = dict.fromkeys(AXES[preset], 2) if len(AXES[preset]) == 2 else {"data": -1}
    return fsdp.Spec(fsdp.local_mesh(**sizes), placement_of(preset), **more)


def begin(preset: str, optimizer: Any = None, dropout: float = 0.0) -> tuple[fsdp.State, nn.Module]:
    params, model = fsdp.functionalize(net(dropout))
    return fsdp.shard(params, spec_of(preset), optimizer), model


def weights_of(model: nn.Module) -> Tree:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def mean_gradients(model: nn.Module, step: int, ranks: int) -> list[torch.Tensor]:
    losses = [loss_fn(model, batch(step, rank)) for rank in range(ranks)]
    return list(torch.autograd.grad(sum(losses) / ranks, list(model.parameters())))  # type: ignore[arg-type]


def largest(got: Tree, want: Tree) -> float:
    assert got.keys() == want.keys()
    return max((got[name] - want[name]).abs().max().item() for name in want)


# ---------------------------------------------------------------- Adafactor


def with_adafactor(preset: str, folder: str, compiled: bool = False) -> tuple[Tree, Tree, Tree, int]:
    from adafactor import Adafactor

    state, model = begin(preset, Adafactor(lr=0.05))
    forward_backward = T.forward_backward(model, loss_fn)

    def train_step(state: fsdp.State, data: Batch) -> fsdp.State:
        state, _ = forward_backward(state, data)
        return fsdp.step(state)

    taken = T.compile(train_step) if compiled else train_step
    for step in range(3):
        state = taken(state, batch(step, dist.get_rank()))
    fsdp.save(state, folder)
    other = fsdp.load(folder, spec_of("zero2" if preset == "zero3" else "zero3"), Adafactor(lr=0.05))
    moved = fsdp.redistribute(fsdp.load(folder, like=state), spec_of("ddp"))
    trees = []
    for one in (state, other, moved):
        trees.append(fsdp.full_params(fsdp.step(forward_backward(one, batch(3, dist.get_rank()))[0])))
    return trees[0], trees[1], trees[2], sum(t.numel() for pair in state.opt.values() for t in pair)


def plain_adafactor(ranks: int, by_sgd: str = "nothing") -> tuple[Tree, int]:
    model = net()
    params = list(model.parameters())
    seen = [p.detach().flatten(0, -2) if p.dim() > 2 else p.detach() for p in params]  # torch's is one a matrix
    names = [name for name, _ in model.named_parameters()]
    chosen = [p for p, name in zip(seen, names, strict=True) if by_sgd not in name]
    optimizer = torch.optim.Adafactor(chosen, lr=0.05, eps=(1e-30, 1e-3))
    for step in range(4):
        grads = mean_gradients(model, step, ranks)
        for p, name, g in zip(seen, names, grads, strict=True):
            p.grad = g.reshape(p.shape)
            if by_sgd in name:
                p.sub_(0.1 * p.grad)
        optimizer.step()
    kept = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    return weights_of(model), sum(t.numel() for t in kept)


@pytest.mark.parametrize("preset", SOME)
def test_adafactor_is_torchs(preset: str, tmp_path: Path) -> None:
    want, kept = plain_adafactor(ranks_of(preset))
    for got, loaded, moved, numel in launch(with_adafactor, (preset, str(tmp_path / "saved")), nprocs=ranks_of(preset)):
        assert largest(got, want) < 1e-9
        assert largest(loaded, want) < 1e-9  # by another strategy, from a checkpoint
        assert largest(moved, want) < 1e-9
        assert kept <= numel <= kept + len(want)  # a vector has one number more


@pytest.mark.parametrize(
    ("preset", "axes"), [("zero3", 1), pytest.param("ddp", 0, marks=pytest.mark.large), ("hfsdp", 2)]
)
def test_adafactor_adds_up_twice_along_each_axis_that_shards(preset: str, axes: int) -> None:
    from adafactor import Adafactor

    spec = fsdp.Spec(dict.fromkeys(AXES[preset], 4), placement_of(preset))
    state = fsdp.abstract_state(weights_of(net()), spec, Adafactor())

    def train_step(state: fsdp.State) -> fsdp.State:
        state, weights = fsdp.unshard(state)
        return fsdp.step(fsdp.reduce(state, weights))

    kinds = [one.kind for one in fsdp.lower(train_step, state).collectives if one.bucket == "the optimizer's sums"]
    assert kinds == ["all_reduce"] * 2 * axes


def one_of_several(preset: str) -> tuple[Tree, Tree, Tree]:
    from adafactor import Adafactor

    params, model = fsdp.functionalize(net())
    optimizer = fsdp.partition({"vector": fsdp.sgd(lr=0.1), "default": Adafactor(lr=0.05)})
    state = fsdp.shard(params, spec_of(preset, labels={"*bias": "vector"}), optimizer)
    forward_backward, step = T.forward_backward(model, loss_fn), T.skip_nonfinite(fsdp.step)
    for k in range(4):
        state = step(forward_backward(state, batch(k, dist.get_rank()))[0])
    before, kept = fsdp.full_params(state), [t.clone() for pair in state.opt["default"].values() for t in pair]
    x, y = batch(4, dist.get_rank())
    state = step(forward_backward(state, (x, y / (dist.get_rank() - 1)))[0])  # not finite, on one rank
    assert all(map(torch.equal, kept, [t for pair in state.opt["default"].values() for t in pair]))
    return before, fsdp.full_params(state), plain_adafactor(2, by_sgd="bias")[0]


@pytest.mark.parametrize("preset", ["zero3", "zero1"])
def test_adafactor_of_some_leaves_skips_what_is_not_finite(preset: str) -> None:
    for got, skipped, want in launch(one_of_several, (preset,), nprocs=2):
        assert largest(got, want) < 1e-9
        assert largest(skipped, got) == 0


def sent() -> list[float]:
    """What an update with a Sender adds up, and what it gave stays."""
    found: list[torch.Tensor] = []

    class Sums:
        communicates = True

        def init(self, main: Any) -> Any:
            return {}

        def update(self, grads: Any, opt: Any, main: Any, count: torch.Tensor, sender: fsdp.extend.Sender) -> Any:
            mine = [torch.tensor(1.0 + dist.get_rank()), torch.full((2, 2), 10.0), torch.tensor(5.0)]
            found.extend(sender.sum(mine, [("data",), ("data",), ()]))
            found.extend(mine)
            return main, opt

    state = fsdp.shard({"w": torch.ones(3)}, fsdp.Spec(fsdp.local_mesh()), Sums())
    fsdp.step(fsdp.reduce(state, {"w": torch.ones(3)}))
    assert found[1].shape == (2, 2)
    return [t.sum().item() for t in found]


def test_an_update_adds_up_over_ranks() -> None:
    assert launch(sent, nprocs=2) == [[3, 80, 5, 1, 40, 5], [3, 80, 5, 2, 40, 5]]


@pytest.mark.large
def test_adafactor_in_a_compiled_step(tmp_path: Path) -> None:
    want, _ = plain_adafactor(2)
    for got, *_ in launch(with_adafactor, ("zero3", str(tmp_path / "saved"), True), nprocs=2, processes=True):
        assert largest(got, want) < 1e-9


# ---------------------------------------------------------------- sharpness-aware minimization


def sharp(preset: str, n: int = 1) -> Tree:
    import sam

    state, model = begin(preset, fsdp.sgd(lr=0.1))
    forward_backward = sam.sharpness_aware(T.accumulate(T.forward_backward(model, loss_fn), n), rho=0.1)
    for step in range(3):
        here = T.apply(model, loss_fn)(state, batch(step, dist.get_rank()))[1]
        state, loss = forward_backward(state, batch(step, dist.get_rank()))
        assert abs(loss - here) < 1e-12  # not that of the weights up the slope
        state = fsdp.step(state)
    return fsdp.full_params(state)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("preset", SOME)
def test_sharpness_aware_minimization_beside_plain_torch(preset: str, n: int) -> None:
    model, ranks = net(), ranks_of(preset)
    trained = list(model.parameters())
    for step in range(3):
        old, first = weights_of(model), mean_gradients(model, step, ranks)
        norm = torch.cat([g.flatten() for g in first]).norm()
        with torch.no_grad():
            for p, g in zip(trained, first, strict=True):
                p.add_(0.1 * g / norm)
        second = mean_gradients(model, step, ranks)
        with torch.no_grad():
            for p, before, g in zip(trained, old.values(), second, strict=True):
                p.copy_(before - 0.1 * g)
    for got in launch(sharp, (preset, n), nprocs=ranks):
        assert largest(got, weights_of(model)) < 1e-9


def same_masks() -> tuple[float, float]:
    import sam

    state, model = begin("zero3", fsdp.sgd(lr=0.1), dropout=0.5)
    data = batch(0, dist.get_rank())
    forward_backward = T.forward_backward(model, loss_fn)
    once, _ = forward_backward(state, data)
    norms = [T.global_norm(once)[1]]
    once = fsdp.drop_gradients(once)
    near, _ = sam.sharpness_aware(forward_backward, rho=1e-7)(once, data)
    return norms[0].item(), T.global_norm(near)[1].item()


def test_both_passes_of_sam_have_the_same_dropout() -> None:
    for here, near in launch(same_masks, nprocs=2):
        assert here == pytest.approx(near, rel=1e-4)


# ---------------------------------------------------------------- soups


def counting(load: Any, counts: list[int]) -> Any:
    """fsdp.load that notes of how many states that it gave to its rank each call finds weights."""
    alive: dict[int, list[weakref.ref[torch.Tensor]]] = {}

    def counted(*args: Any, **kwargs: Any) -> fsdp.State:
        gc.collect()
        mine = alive.setdefault(dist.get_rank(), [])
        counts.append(sum(one() is not None for one in mine))
        found = load(*args, **kwargs)
        assert not found.opt
        mine.append(weakref.ref(next(iter(found.main.values())).local))
        return found

    return counted


def cooked(preset: str, folder: str) -> tuple[list[Tree], Tree, Tree]:
    import soups

    state, model = begin(preset, fsdp.adamw(lr=0.1))
    forward_backward = T.forward_backward(model, loss_fn)
    folders, seen = [], []
    for step in range(4):
        state = fsdp.step(forward_backward(state, batch(step, dist.get_rank()))[0])
        folders.append(f"{folder}/{step}")
        fsdp.save(state, folders[-1])
        seen.append(fsdp.full_params(state))
    del state

    def score(state: fsdp.State) -> float:
        _, loss = T.apply(model, loss_fn)(state, batch(9, 0))
        return -loss.item()

    whole = fsdp.full_params(soups.uniform(folders, spec_of(preset)))
    best = fsdp.full_params(soups.greedy(folders[::-1], spec_of(preset), score))
    return seen, whole, best


@pytest.mark.parametrize("preset", SOME)
def test_soups_are_averages(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = net(), list[int]()
    monkeypatch.setattr(fsdp, "load", counting(fsdp.load, counts))

    def score(weights: Tree) -> float:
        x, y = batch(9, 0)
        return -(functional_call(model, weights, (x,)) - y).square().mean().item()

    for seen, whole, best in fsdp.launch(cooked, (preset, str(tmp_path)), nprocs=ranks_of(preset), simulate=True):
        assert largest(whole, {k: torch.stack([one[k] for one in seen]).mean(0) for k in whole}) < 1e-12
        taken, had = [seen[-1]], score(seen[-1])
        for one in seen[-2::-1]:
            mean = {k: torch.stack([w[k] for w in (*taken, one)]).mean(0) for k in one}
            if score(mean) >= had:
                taken, had = [*taken, one], score(mean)
        assert 1 <= len(taken) < 4
        assert largest(best, {k: torch.stack([w[k] for w in taken]).mean(0) for k in best}) < 1e-12
    assert max(counts) == 1  # while the next is read


# ---------------------------------------------------------------- MAML


def tasks(step: int, rank: int) -> tuple[Batch, Batch]:
    """Three tasks, each with a support and a query."""
    parts = [batch(10 * step + k, rank, n=8) for k in range(3)]
    x, y = (torch.stack(some) for some in zip(*parts, strict=True))
    return (x[:, :4], y[:, :4]), (x[:, 4:], y[:, 4:])


def meta_trained(preset: str, first_order: bool) -> tuple[Tree, Tree]:
    import maml

    state, model = begin(preset, fsdp.sgd(lr=0.1))
    meta_gradients = maml.meta_gradients(model, loss_fn, lr=0.02, steps=2, first_order=first_order)
    for step in range(3):
        state, loss = meta_gradients(state, tasks(step, dist.get_rank()))
        assert not loss.requires_grad
        state = fsdp.step(state)
    state, weights = fsdp.unshard(state)
    near = maml.adapted(lambda w, data: loss_fn(fsdp.bind(model, w), data), weights, batch(9, 0), lr=0.02, steps=1)
    return fsdp.full_params(state), near


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("preset", SOME)
def test_maml_beside_plain_torch(preset: str, first_order: bool) -> None:
    model, ranks = net(), ranks_of(preset)
    params: Tree = dict(model.named_parameters())

    def loss(weights: Tree, data: Batch) -> torch.Tensor:
        return (functional_call(model, weights, (data[0],)) - data[1]).square().mean()

    def inner(weights: Tree, data: Batch) -> Tree:
        grads = torch.autograd.grad(loss(weights, data), list(weights.values()), create_graph=not first_order)
        return {k: w - 0.02 * g for (k, w), g in zip(weights.items(), grads, strict=True)}

    for step in range(3):
        total = torch.zeros((), dtype=torch.float64)
        for rank in range(ranks):
            (x, y), (to_x, to_y) = tasks(step, rank)
            for k in range(3):
                total = total + loss(inner(inner(params, (x[k], y[k])), (x[k], y[k])), (to_x[k], to_y[k]))
        grads = torch.autograd.grad(total / (3 * ranks), list(params.values()))
        with torch.no_grad():
            for p, g in zip(params.values(), grads, strict=True):
                p.sub_(0.1 * g)
    for got, near in launch(meta_trained, (preset, first_order), nprocs=ranks):
        assert largest(got, weights_of(model)) < 1e-9
        assert largest(near, {k: w.detach() for k, w in inner(params, batch(9, 0)).items()}) < 1e-9


def with_dropout() -> float:
    import maml

    state, model = begin("zero3", fsdp.sgd(lr=0.1), dropout=0.5)
    state, _ = maml.meta_gradients(model, loss_fn, lr=0.02, steps=2)(state, tasks(0, dist.get_rank()))
    return T.global_norm(state)[1].item()


def test_maml_of_a_model_that_draws_random_numbers() -> None:
    (one, other) = launch(with_dropout, nprocs=2)
    assert 0 < one == other < float("inf")


# ---------------------------------------------------------------- the gradient noise scale


def noisy(preset: str, way: str, n: int) -> tuple[list[float], Tree]:
    import noise_scale

    state, model = begin(preset, fsdp.sgd(lr=0.05))
    state, found = noise_scale.begin(state), []
    second = way == "second order"
    driven = T.forward_backward(model, loss_fn, reduce=noise_scale.reduce, second_order=second)

    def train_step(state: fsdp.State, data: Batch) -> tuple[fsdp.State, torch.Tensor]:
        state, _ = driven(state, data)
        state, scale = noise_scale.measured(state, examples=6, decay=0.5)
        return fsdp.step(state), scale

    whole = T.compile(train_step)
    for step in range(3):
        data = batch(step, dist.get_rank())
        if way == "compiled":
            state, scale = whole(state, data)
        elif way == "torch.func":
            state, weights = fsdp.unshard(state)
            grads = torch.func.grad(lambda w, data: loss_fn(fsdp.bind(model, w), data))(weights, data)
            state = noise_scale.reduce(state, grads)
        else:
            state, _ = T.accumulate(driven, n)(state, data)
        if way != "compiled":
            state, scale = noise_scale.measured(state, examples=6 // n, microbatches=n, decay=0.5)
            state = fsdp.step(state)
        found.append(scale.item())
    return found, fsdp.full_params(state)


@pytest.mark.parametrize(
    ("way", "n"),
    [
        ("driven", 1),
        ("driven", 2),
        ("torch.func", 1),
        *(pytest.param(*row, marks=pytest.mark.large) for row in (("second order", 2), ("compiled", 1))),
    ],
)
@pytest.mark.parametrize("preset", SOME)
def test_the_noise_scale_of_the_gradients_of_ranks(preset: str, way: str, n: int) -> None:
    model, ranks = net(), ranks_of(preset)
    params, want, signal, noise = list(model.parameters()), [], 0.0, 0.0
    for step in range(3):
        some = []
        for x, y in (batch(step, rank) for rank in range(ranks)):
            for data in zip(x.chunk(n), y.chunk(n), strict=True):
                grads = torch.autograd.grad(loss_fn(model, data), params)
                some.append(torch.cat([g.flatten() for g in grads]))
        small, large = 6 // n, 6 * ranks
        g_small, g_large = torch.stack(some).square().sum(1).mean(), torch.stack(some).mean(0).square().sum()
        signal = 0.5 * signal + 0.5 * float((large * g_large - small * g_small) / (large - small))
        noise = 0.5 * noise + 0.5 * float((g_small - g_large) / (1 / small - 1 / large))
        want.append(noise / signal)
        with torch.no_grad():
            for p, g in zip(params, torch.stack(some).mean(0).split([p.numel() for p in params]), strict=True):
                p.sub_(0.05 * g.view(p.shape))
    for got, weights in launch(noisy, (preset, way, n), nprocs=ranks, processes=way == "compiled"):
        assert got == pytest.approx(want, rel=1e-5)
        assert largest(weights, weights_of(model)) < 1e-9


# ---------------------------------------------------------------- learning rates


def lambda_lr(shape: str) -> list[float]:
    """What torch's LambdaLR gives, step by step: 5 steps up, 20 in all."""
    import math

    def factor(k: int) -> float:
        if k < 5:
            return (k + 1) / 5
        if shape == "cosine":
            return 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, (k - 5) / 15))) / 2
        done = min(1.0, max(0.0, (k - 12) / 8))
        return 1 - 0.9 * (math.sqrt(done) if shape == "sqrt" else done)

    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.03)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    found = []
    for _ in range(24):
        found.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return found


def schedule_of(shape: str) -> Any:
    import schedules

    if shape == "cosine":
        return schedules.WarmupCosine(peak=0.03, warmup=5, total=20, floor=0.003)
    return schedules.WarmupStableDecay(peak=0.03, warmup=5, total=20, decay=8, floor=0.003, sqrt=shape == "sqrt")


@pytest.mark.parametrize("shape", ["cosine", "linear", "sqrt"])
def test_schedules_are_those_of_lambda_lr(shape: str) -> None:
    schedule = schedule_of(shape)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    want = lambda_lr(shape)
    got = [schedule(torch.tensor(k)).item() for k in range(24)]
    assert got == pytest.approx(want, rel=1e-5)
    assert vmap(schedule)(torch.arange(24)).tolist() == pytest.approx(want, rel=1e-5)  # .item() would be an error
    whole = torch.compile(schedule, fullgraph=True, backend="eager")
    assert [whole(torch.tensor(k)).item() for k in range(24)] == got


def scheduled(preset: str, shape: str, compiled: bool) -> Tree:
    state, model = begin(preset, fsdp.adamw(lr=schedule_of(shape)))
    forward_backward = T.forward_backward(model, loss_fn)

    def train_step(state: fsdp.State, data: Batch) -> fsdp.State:
        return fsdp.step(forward_backward(state, data)[0])

    taken = T.compile(train_step) if compiled else train_step
    for step in range(24):
        state = taken(state, batch(step, dist.get_rank()))
    again = pickle.loads(pickle.dumps(state))
    assert largest(fsdp.full_params(again), fsdp.full_params(state)) == 0
    return fsdp.full_params(state)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.large)])
@pytest.mark.parametrize(("preset", "shape"), [("zero3", "cosine"), ("zero1", "linear")])
def test_training_by_a_schedule_beside_plain_torch(preset: str, shape: str, compiled: bool) -> None:
    model, rates = net(), lambda_lr(shape)
    optimizer = torch.optim.AdamW(model.parameters())
    for step, rate in enumerate(rates):
        for p, g in zip(model.parameters(), mean_gradients(model, step, 2), strict=True):
            p.grad = g
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    for got in launch(scheduled, (preset, shape, compiled), nprocs=2, processes=compiled):
        assert largest(got, weights_of(model)) < 1e-5


# ---------------------------------------------------------------- derivatives by inputs


class Velocity(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inp, self.mid, self.out = torch.nn.Linear(6, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        self.double()

    def forward(self, z: torch.Tensor, r: torch.Tensor | None = None, t: torch.Tensor | None = None) -> torch.Tensor:
        times = z.new_zeros(*z.shape[:-1], 2) if r is None or t is None else torch.cat([r, t], -1)
        h = torch.tanh(self.inp(torch.cat([z, times], -1)))
        return self.out(h + torch.tanh(self.mid(h)))


def by_inputs(name: str) -> list[float]:
    import derivatives

    loss = getattr(derivatives, name)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "physics": [(5, 4), (5,)],
        "mean_flow": [(5, 4), (5, 4), (5, 1), (5, 1)],
        "critic": [(5, 4), (5, 4), (5, 1)],
        "score": [(5, 4), (5, 4)],
    }

    def data(step: int, rank: int) -> tuple[torch.Tensor, ...]:
        draws = torch.Generator().manual_seed(10 * step + rank)
        return tuple(torch.rand(shape, generator=draws, dtype=torch.float64) for shape in shapes[name])

    module = Velocity()
    params, model = fsdp.functionalize(Velocity())
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.01))
    forward_backward = T.forward_backward(model, loss)
    plain = torch.optim.SGD(module.parameters(), lr=0.01)
    for step in range(3):
        state, _ = forward_backward(state, data(step, dist.get_rank()))
        state = fsdp.step(state)
        plain.zero_grad()
        ((loss(module, data(step, 0)) + loss(module, data(step, 1))) / 2).backward()
        plain.step()
    got = fsdp.full_params(state)
    return [float((got[path] - p.detach()).abs().max()) for path, p in module.named_parameters()]


@pytest.mark.parametrize("name", ["physics", "mean_flow", "critic", "score"])
def test_losses_with_derivatives_beside_plain_torch(name: str) -> None:
    for apart in launch(by_inputs, (name,), nprocs=2):
        assert max(apart) < 1e-9


def averaged(folder: str) -> tuple[Tree, Tree, Tree]:
    """Of weights of bfloat16, beside a leaf that is packed and one of integers."""
    import ema
    import soups

    params = {"base": nn.Parameter(torch.ones(8, 64)), "w": torch.ones(64, dtype=torch.bfloat16), "n": torch.arange(3)}
    precision = {"base": fsdp.Precision(main=fsdp.nf4), "w": fsdp.Precision(main=torch.bfloat16), "*": fsdp.Precision()}
    state = ema.with_ema(fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu"), precision=precision), fsdp.sgd(lr=0.5)))
    folders = [fsdp.save(state, f"{folder}/0")]
    for _ in range(100):
        state, weights = fsdp.unshard(state)
        state = fsdp.reduce(state, {"base": None, "w": torch.ones_like(weights["w"]) / 50, "n": None})
        state = ema.update(fsdp.step(state), decay=0.999)
    folders.append(fsdp.save(state, f"{folder}/1"))
    soup = soups.uniform(folders, state.spec)
    return tuple(fsdp.full_params(one) for one in (ema.averaged(state), state, soup))


def test_averages_of_narrow_weights_move_and_others_stay(tmp_path: Path) -> None:
    for average, now, soup in fsdp.launch(averaged, (str(tmp_path),), nprocs=2, simulate=True):
        want, w = 1.0, torch.ones((), dtype=torch.bfloat16)
        for _ in range(100):
            w = w - 0.5 * torch.tensor(0.02).bfloat16()
            want = 0.999 * want + 0.001 * float(w)
        torch.testing.assert_close(now["w"], w.expand(64))
        torch.testing.assert_close(average["w"], torch.tensor(want).bfloat16().expand(64))
        torch.testing.assert_close(soup["w"], ((1 + w) / 2).expand(64))
        for one in (average, soup):
            assert torch.equal(one["base"].bits, now["base"].bits)  # type: ignore[attr-defined]
            assert torch.equal(one["n"], now["n"])
