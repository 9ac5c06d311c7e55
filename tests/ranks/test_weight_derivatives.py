"""Derivatives by sharded weights, against the plain module in float64: jvp, pullback, linearize, ensembles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ranks.test_derivatives import LOSSES, Smooth, mean_flow, penalty
from support.derivatives import WIDTH, Net, numbers
from support.driven import refused, start
from support.problems import full_grads, mesh_and_placement
from support.ranks import each_rank, launch
from torch.func import grad
from torch.nn.utils.stateless import _reparametrize_module

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp.transforms._drive.jvp import Tangents
from functional_fsdp.transforms._seed import seeded

Tree = dict[str, torch.Tensor]
Loss = Callable[[Any, int], torch.Tensor]
COTANGENT = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)


def vector(state: fsdp.State) -> dict[str, fsdp.FlatBuffer]:
    """One that is sharded as the weights: another at each element."""
    return {name: buffer.but((9 * buffer.local).sin()) for name, buffer in state.main.items()}


def whole(state: fsdp.State, buffers: Any) -> Tree:
    """A vector at its global shapes, on every rank."""
    return full_grads(fsdp.extend.evolve(state, grads={name: buffers[name] for name in state.layout.trainable}))


def mean(tree: Tree) -> Tree:
    """Over the ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, tree)
    return {path: sum(one[path] for one in every) / len(every) for path in tree}


def of_plain(state: fsdp.State, module: nn.Module, fn: Callable[[Any], Any], number: int = 0) -> Any:
    """`fn` of the plain module with this state's weights, as a function of those that train; and these."""
    module.load_state_dict(fsdp.full_params(state))
    at = {path: p.detach() for path, p in module.named_parameters() if p.requires_grad}

    def of(params: Tree) -> Any:
        with _reparametrize_module(module, params, tie_weights=True), seeded(state, number):
            return fn(module)

    return of, at


def of_autograd(of: Any, at: Tree, cotangent: torch.Tensor) -> tuple[torch.Tensor, Tree]:
    """The value, and its pullback, averaged over the ranks. (Within a vjp of torch.func's losses may not use duals.)"""
    leaves = {path: t.clone().requires_grad_() for path, t in at.items()}
    out = of(leaves)
    found = torch.autograd.grad(out, [*leaves.values()], cotangent, allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    return out.detach(), mean({path: torch.zeros_like(t) if g is None else g for (path, t), g in pairs})


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).abs().max() / want.abs().max().clamp(min=1.0)).detach())


def apart(
    state: fsdp.State, model: nn.Module, module: nn.Module, loss: Loss, data: int
) -> tuple[fsdp.State, dict[str, float]]:
    """How far jvp and pullback of three numbers are from the plain module's."""
    fn = lambda m, seed: loss(m, seed) * COTANGENT.cos()  # noqa: E731
    of, at = of_plain(state, module, lambda m: fn(m, data))
    before, v = state, vector(state)
    tangents = {path: t for path, t in whole(state, v).items() if path in at}
    state, (out, along) = T.jvp(model, fn)(state, v, data)
    want, moved = torch.func.jvp(of, (at,), (tangents,))  # type: ignore[misc]
    state, (again, product) = T.pullback(model, fn)(state, COTANGENT, data)
    plain, pulled = of_autograd(of, at, COTANGENT)
    got = whole(state, product)
    assert state is before
    return state, {
        "out": max(far(out, want), far(again, plain)),
        "jvp": far(along, moved),
        "pullback": max(far(got[path], t) for path, t in pulled.items()),
    }


# ---------------------------------------------------------------- losses that people write, and products


@pytest.mark.parametrize(("preset", "processes"), [
    pytest.param("zero3", False, marks=pytest.mark.large), ("ddp", False),
    pytest.param("zero3", True, marks=pytest.mark.large),
])  # fmt: skip
def test_losses_that_people_write(preset: str, processes: bool) -> None:
    launch(of_losses, (preset,), nprocs=2, processes=processes)


def of_losses(preset: str) -> None:
    state, model = start(Smooth(), preset, schedule=fsdp.Schedule(debug=True))
    for loss in LOSSES:
        if loss.__name__ != "of_dual_numbers":  # torch has none within jvp
            state, found = apart(state, model, Smooth(), loss, 10 * dist.get_rank())
            assert max(found.values()) < 1e-9, (loss, found)


def output(m: Any, seed: int) -> torch.Tensor:
    y: torch.Tensor = m(numbers(3, WIDTH, seed=seed))
    return y


@pytest.mark.parametrize("nprocs", [1, 2])
@each_rank("nprocs")
def test_gauss_newton_products_in_the_middle_of_a_step(nprocs: int) -> None:
    """Of two microbatches, with dropout and what is frozen."""
    case = {"rate": 0.3, "tied": True, "frozen": ("blocks.0.up",)}
    state, model = start(Net(**case))  # type: ignore[arg-type]
    module, rank = Net(**case), dist.get_rank()  # type: ignore[arg-type]
    v = vector(state)
    tangents = whole(state, v)
    squared = lambda m, seed: output(m, seed).square().mean()  # noqa: E731
    forward_backward = T.forward_backward(model, squared)
    first, _ = forward_backward(state, rank)
    want = full_grads(fsdp.finish_reductions(first))
    first, _ = forward_backward(state, rank, last_microbatch=False)  # again, from before
    middle, (out, along) = T.jvp(model, output)(first, v, rank)
    middle, (_, product) = T.pullback(model, output)(middle, 2 * along / along.numel(), rank)
    of, at = of_plain(state, module, lambda m: output(m, rank), number=1)
    given = {path: tangents[path] for path in at}
    plain_out, plain_along = torch.func.jvp(of, (at,), (given,))  # type: ignore[misc]
    pulled = of_autograd(of, at, 2 * plain_along / along.numel())[1]
    got, kept = whole(state, product), full_grads(fsdp.finish_reductions(middle))
    assert max(far(out, plain_out), far(along, plain_along)) < 1e-9
    assert max(far(got[path], t) for path, t in pulled.items()) < 1e-9
    assert max(far(kept[path], t) for path, t in want.items()) < 1e-9


@each_rank(2)
def test_a_linear_map_is_that_of_its_weights() -> None:
    state, model = start(Smooth())
    loss = lambda m, seed: penalty(m, seed)  # noqa: E731
    state, (out, push) = T.linearize(model, loss)(state, 3)
    v = vector(state)
    state, (want, slope) = T.jvp(model, loss)(state, v, 3)
    state, once = push(state, v)
    state, twice = push(state, {name: buffer.but(-2 * buffer.local) for name, buffer in v.items()})
    assert max(far(out, want), far(once, slope), far(twice, -2 * slope)) < 1e-12
    other, random = start(nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.5)).double())
    v2, x = vector(other), numbers(2, WIDTH, seed=1)
    other, (value, drawn) = T.linearize(random)(other, x)
    for _ in range(2):  # each call drops what the value's has dropped
        assert (drawn(other, v2)[1] != 0).equal(value != 0)
    middle, _ = T.forward_backward(model, loss)(state, 3)
    state = fsdp.step(middle)
    said = "its linear map was called with a state of other weights than it was taken at"
    refused((lambda: push(state, v), said))


class Lends(nn.Module):
    """Returns its weight, a view of it, or what moves as it does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight
        return {"weight": lambda: w, "view": lambda: w.view(1, -1).expand(x.shape), "moves": lambda: x + w}[self.how]()


@each_rank(1)
def test_outputs_that_lie_or_move_where_weights_do() -> None:
    for how in ("weight", "view", "moves"):
        for loss in (lambda m, seed: m(numbers(3, WIDTH, seed=seed)).cos().mean(), penalty, mean_flow):
            layers = [Lends(how), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Lends(how), nn.Linear(WIDTH, 1)]
            module = nn.Sequential(*layers).double()
            state, model = start(module, units=["0", "1", "3", "4"], schedule=fsdp.Schedule(debug=True))
            v = vector(state)
            of, at = of_plain(state, module, lambda m, loss=loss: loss(m, 1))  # type: ignore[misc]
            given = {path: t for path, t in whole(state, v).items() if path in at}
            want = torch.func.jvp(of, (at,), (given,))[1]
            assert far(T.jvp(model, loss)(state, v, 1)[1][1], want) < 1e-9, (how, loss)
            right = torch.func.jvp(grad(of), (at,), (given,))[1]
            got = whole(state, T.hvp(model, loss)(state, v, 1)[1][1])
            assert max(far(got[path], t) for path, t in right.items()) < 1e-9, (how, loss)


# ---------------------------------------------------------------- memory and traffic


class Blocks(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(depth))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@each_rank(1)
def test_one_unit_has_its_tangents_at_a_time() -> None:
    """Bytes of tangents that there are at most, and gathers, for jvp without and with an inner backward."""
    state, model = start(Blocks())
    unit = max(sum(b.numel for b in unit.buckets) for unit in state.layout.units) * 8
    x, units = numbers(3, 32, seed=1), len(state.units)
    gather, most, gathers = Tangents.gather, [0], [0]

    def counted(self: Any, units: Sequence[str]) -> None:
        gather(self, units)
        gathers[0] += len(units)
        tangents = [whole for unit in self.units.values() for _, _, whole in unit.wholes]
        most[0] = max(most[0], sum(whole.untyped_storage().size() for whole in tangents))

    inner = lambda m, x: grad(lambda x: m(x).sin().sum())(x).sum()  # noqa: E731
    with mock.patch.object(Tangents, "gather", counted):
        for loss, wanted in ((lambda m, x: m(x).sum(), units), (inner, 2 * units - 1)):  # the last one is still there
            most[0] = gathers[0] = 0
            state, _ = T.jvp(model, loss)(state, state.main, x)
            assert most[0] <= unit
            assert gathers[0] == wanted


# ---------------------------------------------------------------- ensembles


def nudged(nets: list[Any]) -> list[Any]:
    """Other weights each."""
    for i, net in enumerate(nets):
        for p in net.parameters():
            p.data += 0.1 * numbers(*p.shape, seed=i)
    return nets


@pytest.mark.parametrize(("preset", "nprocs"), [
    ("zero3", 2), pytest.param("zero2", 2, marks=pytest.mark.large), pytest.param("hsdp", 4, marks=pytest.mark.large),
])  # fmt: skip
@each_rank("nprocs")
def test_an_ensemble_is_its_members(preset: str, nprocs: int) -> None:
    """In two steps of two microbatches."""
    nets = nudged([Smooth() for _ in range(2)])
    stacked = {
        path: torch.stack([n.get_parameter(path).detach() for n in nets]) for path, _ in Smooth().named_parameters()
    }
    mesh, placement = mesh_and_placement(preset)
    model = fsdp.functionalize(Smooth())[1]
    spec, optimizer = fsdp.Spec(mesh, placement, schedule=fsdp.Schedule(debug=True)), fsdp.sgd(lr=0.1)
    for loss in (output_of, penalty, mean_flow):
        state = fsdp.shard(stacked, spec, optimizer)
        alone = [fsdp.shard(fsdp.functionalize(net)[0], spec, optimizer) for net in nets]
        of_all, single = T.vmap(loss, randomness="same"), T.forward_backward(model, loss)
        together = T.forward_backward(model, lambda m, seed, f=of_all: f(m, seed).sum())
        for n in range(2):
            data, last = dist.get_rank() + n, n == 1
            state, total = together(state, data, last_microbatch=last)
            pairs = [single(one, data, last_microbatch=last) for one in alone]
            alone = [one for one, _ in pairs]
        state, alone = fsdp.step(state), [fsdp.step(one) for one in alone]
        got, want = fsdp.full_params(state), [fsdp.full_params(one) for one in alone]
        assert max(far(got[path][i], one[path]) for i, one in enumerate(want) for path in one) < 1e-9, loss
        assert far(total, torch.stack([value for _, value in pairs]).sum()) < 1e-9, loss
    x = numbers(2, WIDTH, seed=5)
    state, each = T.apply(model, T.vmap(lambda m, x: m(x), in_dims=0))(state, x)  # a row each
    rows = [T.apply(model)(one, x[i])[1] for i, one in enumerate(alone)]
    assert far(each, torch.stack(rows)) < 1e-9
    state, (_, slopes) = T.jvp(model, T.vmap(penalty, randomness="same"))(state, state.main, 3)
    assert far(slopes, torch.stack([T.jvp(model, penalty)(one, one.main, 3)[1][1] for one in alone])) < 1e-9


def output_of(m: Any, seed: int) -> torch.Tensor:
    return output(m, seed).square().mean()


@each_rank(2)
def test_members_with_a_tied_leaf_and_one_outside_of_modules() -> None:
    nets = nudged([Net(2, tied=True) for _ in range(2)])
    every = [dict(net.named_parameters(remove_duplicate=False)) for net in nets]
    stacked = {path: torch.stack([one[path].detach() for one in every]) for path in every[0]}
    stacked["head.weight"] = stacked["inp.weight"]
    mesh, placement = mesh_and_placement("zero3")
    model = fsdp.functionalize(Net(2, tied=True))[1]
    state = fsdp.shard(stacked, fsdp.Spec(mesh, placement), fsdp.sgd(lr=0.1))
    of_all = T.vmap(output_of, randomness="same")
    state, _ = T.forward_backward(model, lambda m, seed: of_all(m, seed).sum())(state, 1)
    got = full_grads(fsdp.finish_reductions(state))
    for net in nets:
        output_of(net, 1).backward()
    for i, net in enumerate(nets):
        assert all(far(got[path][i], p.grad) < 1e-9 for path, p in net.named_parameters() if p.grad is not None)


@each_rank(2)
def test_members_are_gathered_at_once() -> None:
    stacked = {path: torch.stack([p.detach()] * 4) for path, p in Smooth().named_parameters()}
    mesh, placement = mesh_and_placement("zero3")
    state = fsdp.shard(stacked, fsdp.Spec(mesh, placement), fsdp.sgd(lr=0.1))
    model = fsdp.functionalize(Smooth())[1]
    together = T.forward_backward(model, lambda m, seed: T.vmap(output_of, randomness="same")(m, seed).sum())
    for seed in range(2):
        state = fsdp.step(together(state, seed)[0])
    uses = [use.unit for use in together(state, 2)[0].cursor.plan.uses]
    assert max(uses.count(unit) for unit in uses) <= 2  # forward and backward


# ---------------------------------------------------------------- errors


@each_rank(1)
def test_what_is_wrong_is_said() -> None:
    state, model = start(Smooth())
    x = numbers(3, WIDTH, seed=0)
    stacked, small = T.vmap(lambda m, x: m(x)), {name: b.but(b.local[:2]) for name, b in state.main.items()}
    compiled = T.compile(lambda s: T.jvp(model)(s, s.main, x), backend="aot_eager")
    refused(
        (lambda: T.jvp(model)(state, {}, x), "jvp: the vector has None for the bucket"),
        (lambda: T.jvp(model)(state, small, x), "jvp: the vector has (2,) elements"),
        (lambda: T.pullback(model)(state, torch.ones(2), x), "pullback: cotangents of structure"),
        (lambda: T.apply(model, stacked)(state, x), "the leaves of E members, stacked along dim 0"),
        (lambda: stacked(Smooth(), x), "T.vmap: a Smooth that is not driven"),
        (lambda: compiled(state), "jvp drives the schedule from Python"),
    )
    assert T.jvp(model)(state, state.main, x)[1][1].isfinite().all()
