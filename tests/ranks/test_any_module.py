"""hvp, per_sample_norms and clipped_gradients of any module: beside stages that are cut by hand, and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from support.driven import raised
from support.models import CASES, batch_of, made
from support.presets import PRESETS, ranks_of
from support.problems import Tree, batch, full_grads, mesh_and_placement
from support.ranks import each_rank
from support.staged import loss_fn, stages, start
from support.tables import marked
from torch.nn.attention import SDPBackend, sdpa_kernel

import functional_fsdp as fsdp
from functional_fsdp import transforms as T


def samples(rank: int) -> Any:
    """Six of them."""
    return tuple(torch.cat(parts) for parts in zip(*(batch(0, rank, micro) for micro in range(3)), strict=True))


@pytest.mark.parametrize(("preset", "ranks"), marked([(p, ranks_of(p)) for p in PRESETS], [("zero3", 2)]))
@each_rank("ranks")
def test_a_module_is_the_same_as_its_stages(preset: str, ranks: int) -> None:
    state, model = start(preset)
    data, found = samples(dist.get_rank()), []
    for given in ((model, loss_fn), (stages(model),)):
        state, (loss, hv) = T.hvp(*given)(state, dict(state.main), data)
        assert state.between_steps
        state, (losses, norms) = T.per_sample_norms(*given, chunk=4)(state, data)
        assert state.between_steps
        middle, again = T.clipped_gradients(*given, max_norm=11.0, noise=0.1)(state, data)
        grads = full_grads(fsdp.finish_reductions(middle))
        found.append([loss, losses, norms, again, grads, full_grads(state._evolve(grads=hv))])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-13)


# ---------------------------------------------------------------- modules of a world of one


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, table: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x + torch.tanh(self.linear(x) * mask) * table}


class Glued(nn.Module):
    """Code of its own between units, some of it on devices and shapes of what came before; outputs that are dicts."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 1.0, -1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x.sum(-1, keepdim=True) > 0).to(x.dtype) + 0.5
        h = torch.tanh(self.embed(x)) * self.scale
        table = torch.arange(h.shape[-1], device=h.device, dtype=h.dtype)
        if h.dim() != 2 or h.device.type == "meta":
            raise AssertionError("it was asked in vain")
        for layer in self.layers:
            h = layer(h, table=table, mask=mask)["x"]
            h = F.gelu(h) if layer is not self.layers[1] else h.sin()
        out: torch.Tensor = self.head(h)
        return out.cos()


def squared(model: Any, data: Any) -> torch.Tensor:
    return (model(data[0]) - data[1]).square().sum(-1).mean()


def world_of_one(module: nn.Module, **spec: Any) -> tuple[fsdp.State, nn.Module]:
    params, model = fsdp.functionalize(module)
    made = fsdp.Spec(fsdp.local_mesh(), **spec)
    return fsdp.shard(params, made, fsdp.sgd(lr=0.1), buffers=fsdp.buffers(module)), model


def data_of(rows: int = 5) -> Any:
    g = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, width, generator=g, dtype=torch.float64) for width in (3, 2))


def plain(module: nn.Module, data: Any) -> tuple[Tree, torch.Tensor]:
    """By torch.func: the Hessian times the weights, and the norm of each sample's gradient."""
    params = {path: p.detach() for path, p in module.named_parameters()}

    def loss(params: Any, data: Any) -> torch.Tensor:
        buffers = {path: b.clone() for path, b in module.named_buffers()}
        return squared(lambda x: torch.func.functional_call(module, (params, buffers), (x,)), data)

    hv: Tree = torch.func.jvp(lambda p: torch.func.grad(loss)(p, data), (params,), (params,))[1]
    if any(isinstance(part, nn.BatchNorm1d) for part in module.modules()):
        return hv, torch.zeros(())
    one = [t.unsqueeze(1) for t in data]
    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, one)
    return hv, torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()


def computed(module: nn.Module, data: Any, **spec: Any) -> tuple[Tree, torch.Tensor]:
    state, model = world_of_one(module, **spec)
    state, (_, hv) = T.hvp(model, squared)(state, state.main, data)
    state, (_, norms) = T.per_sample_norms(model, squared)(state, data)
    return fsdp.full_params(fsdp.replace_params(state, hv)), norms


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)))


@pytest.mark.parametrize("units", [None, {"all": "*"}], ids=["units", "one unit"])
@pytest.mark.parametrize("make", [Glued, sequential])
def test_code_between_units_is_the_modules_own(make: Callable[[], nn.Module], units: Any) -> None:
    torch.manual_seed(0)
    module, data = make().double(), data_of()
    hv, norms = computed(module, data, units=units)
    want, right = plain(module, data)
    torch.testing.assert_close(dict(hv), want, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(norms, right, rtol=1e-10, atol=1e-13)


def test_buffers_are_the_states_and_stay() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    state, model = world_of_one(module)
    before = {path: b.clone() for path, b in state.buffers.items()}
    product = T.hvp(model, squared)
    state, (_, hv) = product(state, state.main, data_of())
    torch.testing.assert_close(dict(fsdp.full_params(fsdp.replace_params(state, hv))), plain(module, data_of())[0])
    assert all(torch.equal(state.buffers[path], b) for path, b in before.items())
    model.eval()  # modes are followed, and these are the state's statistics
    state = fsdp.extend.evolve(state, buffers={path: b * 3 + 1 for path, b in before.items()})
    state, (_, hv) = product(state, state.main, data_of())
    module.load_state_dict(dict(state.buffers), strict=False)
    want = plain(module.eval(), data_of())[0]
    torch.testing.assert_close(dict(fsdp.full_params(fsdp.replace_params(state, hv))), want)


def test_dropout_draws_the_same_in_every_pass() -> None:
    """Else the product were of no matrix: this one is symmetric."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 2))
    state, model = world_of_one(module.double())
    product = T.hvp(model, squared)
    other = {name: buffer.but(buffer.local.sin()) for name, buffer in state.main.items()}
    drawn = torch.random.get_rng_state()
    state, (loss, hu) = product(state, state.main, data_of())
    state, (again, hv) = product(state, other, data_of())
    assert loss == again
    assert torch.equal(drawn, torch.random.get_rng_state())
    state, a = T.dot(state, other, hu)
    state, b = T.dot(state, state.main, hv)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_a_model_of_hugging_faces_as_it_is(name: str) -> None:
    case = CASES[name]
    module, data = made(case).eval(), batch_of(case, 0, 0)
    weights = dict(module.named_parameters())
    params, model = fsdp.functionalize(module)
    state = fsdp.shard(
        params, fsdp.Spec(fsdp.local_mesh(), **case.spec), fsdp.sgd(lr=0.1), buffers=fsdp.buffers(module)
    )
    with sdpa_kernel(SDPBackend.MATH):
        state, (losses, norms) = T.per_sample_norms(model, case.loss_fn)(state, data)
        if name == "vit":  # torch has no forward-mode derivative of silu's backward
            state, (loss, hv) = T.hvp(model, case.loss_fn)(state, state.main, data)
            right = case.loss_fn(module, data)
            grads = torch.autograd.grad(right, [*weights.values()], create_graph=True)
            along = torch.stack([(g * w.detach()).sum() for g, w in zip(grads, weights.values(), strict=True)]).sum()
            want = dict(zip(weights, torch.autograd.grad(along, [*weights.values()]), strict=True))
            torch.testing.assert_close(loss, right.detach(), rtol=1e-10, atol=0)
            found = fsdp.full_params(fsdp.replace_params(state, hv))
            torch.testing.assert_close({path: found[path] for path in want}, want, rtol=1e-8, atol=1e-11)
        for i in range(len(losses)):
            one = case.loss_fn(module, {key: t[i : i + 1] for key, t in data.items()})
            norm = nn.utils.get_total_norm(torch.autograd.grad(one, [*weights.values()]))
            torch.testing.assert_close((losses[i], norms[i]), (one.detach(), norm.to(norms)), rtol=1e-5, atol=0)


# ---------------------------------------------------------------- modules whose units are no chain


class Branches(nn.Module):
    """What it does with its three units is what it is told."""

    def __init__(self, how: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        return self.how(self, x)


def skips(m: Any, x: torch.Tensor) -> Any:
    h = m.a(x)
    return m.c(m.b(h).sin() + h)


def again(m: Any, x: torch.Tensor) -> Any:
    return m.c(m.b(m.b(m.a(x)).tanh()).tanh() + m.a(x.cos()))


def by_weights(m: Any, x: torch.Tensor) -> Any:
    """Of two units, outside of their modules."""
    return m.c(F.linear(m.b(x).tanh(), m.a.weight * m.b.weight))


def by_inputs(m: Any, x: torch.Tensor) -> Any:
    """A derivative of its own."""
    slope = torch.func.grad(lambda x: m.b(m.a(x).tanh()).sin().sum())(x)
    return m.c(slope + torch.func.jvp(m.a, (x,), (x.sin(),))[1].tanh())


def unused(m: Any, x: torch.Tensor) -> Any:
    return m.a(x)[..., :2].sin()


HOW = [skips, again, by_weights, by_inputs, unused, lambda m, x: m.c(m.a(m.b(x)).tanh()) + x.sum()]


@pytest.mark.parametrize("how", HOW)
def test_modules_whose_units_are_no_chain(how: Callable[[Any, torch.Tensor], Any]) -> None:
    torch.manual_seed(0)
    module, data = Branches(how).double(), data_of()
    hv, norms = computed(module, data, schedule=fsdp.Schedule(debug=True))
    want, right = plain(module, data)
    torch.testing.assert_close(dict(hv), want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(norms, right, rtol=1e-9, atol=1e-12)


class Tied(nn.Module):
    """Two modules have a weight; one leaf is frozen, and one is of the module that holds units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.linspace(-1, 1, 3))
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.double()
        self.b.weight = self.a.weight
        self.b.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x + self.table).tanh()
        return self.c(self.b(h).tanh() + h * self.table)


def clipped_by_hand(module: nn.Module, ranks: int, bound: float) -> tuple[list[torch.Tensor], Tree]:
    """By torch.func, vmap of grad: norms of each rank's samples, and the mean of clipped gradients."""
    trained = {path: p.detach() for path, p in module.named_parameters() if p.requires_grad}
    norms, found = [], []
    for rank in range(ranks):
        data = [t.unsqueeze(1) for t in rows_of(rank)]
        loss = lambda p, data: squared(lambda x: torch.func.functional_call(module, p, (x,)), data)  # noqa: E731
        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(trained, data)
        norms.append(torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt())
        by = (bound / norms[-1]).clamp(max=1)
        found.append({path: torch.einsum("b,b...->...", by, g) / len(by) for path, g in grads.items()})
    return norms, {path: sum(one[path] for one in found) / ranks for path in trained}  # type: ignore[misc]


def rows_of(rank: int) -> Any:
    return [t[rank:][:5] for t in data_of(8)]


@pytest.mark.parametrize(("preset", "ranks", "chunk"), [("zero3", 2, None), ("zero2", 2, 2), ("hsdp", 4, None)])
@each_rank("ranks")
def test_each_samples_gradient_is_clipped(preset: str, ranks: int, chunk: int | None) -> None:
    mesh, placement = mesh_and_placement(preset)
    norms, grads = clipped_by_hand(Tied(), ranks, 0.5)
    params, model = fsdp.functionalize(Tied())
    state = fsdp.shard(params, fsdp.Spec(mesh, placement, schedule=fsdp.Schedule(debug=True)), fsdp.sgd(lr=0.1))
    data, want = rows_of(dist.get_rank()), norms[dist.get_rank()]
    after, (losses, found) = T.per_sample_norms(model, squared, chunk=chunk)(state, data)
    assert after is state
    state, again = T.clipped_gradients(model, squared, max_norm=0.5, chunk=chunk)(state, data)
    assert torch.equal(losses, again)
    assert (want > 0.5).any()
    torch.testing.assert_close(found, want, rtol=1e-9, atol=0)
    clipped = full_grads(fsdp.finish_reductions(state))
    torch.testing.assert_close({path: clipped[path] for path in grads}, grads, rtol=1e-9, atol=1e-13)


class Keeps(nn.Sequential):
    """Keeps a tensor in an attribute, which the loss may read."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = super().forward(x)
        self.kept = h.square().mean()
        return h


def test_what_a_unit_keeps_in_an_attribute() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Keeps(), Keeps(), nn.Linear(3, 2)).double()
    state, model = world_of_one(module, units=["0", "1", "2"], schedule=fsdp.Schedule(debug=True))
    alone = lambda m, data: (m(data[0]), m[0].kept)[1]  # noqa: E731
    assert "by a tensor that is no output" in raised(lambda: T.hvp(model, alone)(state, state.main, data_of()))
    assert "by a tensor that is no output" in raised(lambda: T.per_sample_norms(model, alone)(state, data_of()))


# ---------------------------------------------------------------- what cannot be


def looks(m: Any, x: torch.Tensor) -> Any:
    h = m.a(x)
    return m.c(m.b(h.abs() if bool(h.sum() > 0) else h))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2), nn.Dropout())),
                "per_sample_norms: the module '1' draws random numbers (dropout)"),
    "statistics": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Sequential(Spread(), nn.Linear(3, 2))),
                   "per_sample_norms: the module '1' normalizes by the batch (BatchNorm in training mode)"),
    "no rule": (lambda: nn.Sequential(nn.Linear(3, 3), Recurrent()),
                "per_sample_norms: the module '1' uses an operation that torch's vmap cannot run for each sample"),
    "control": (lambda: Branches(looks), "per_sample_norms: loss_fn decides by a value"),
}  # fmt: skip


class Spread(nn.BatchNorm1d):
    """Of two values for a sample."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([x, -x]))[: len(x)]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.rnn(x.unsqueeze(1))[0][:, 0]
        return out


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_gradient_of_each_sample_is_named(name: str) -> None:
    make, said = REFUSED[name]
    state, model = world_of_one(make().double())
    assert said in raised(lambda: T.per_sample_norms(model, squared)(state, data_of()))
    assert said.replace("per_sample_norms", "clipped_gradients") in raised(
        lambda: T.clipped_gradients(model, squared, max_norm=1.0)(state, data_of())
    )


def test_arguments_of_the_wrong_kind_are_named() -> None:
    _, model = world_of_one(nn.Linear(3, 2).double())
    for call in (T.hvp, T.per_sample_norms, lambda *a: T.clipped_gradients(*a, max_norm=1.0)):
        text = raised(lambda: call(model))  # noqa: B023
        assert "loss_fn is None; with a module expected a function of (model, batch)" in text
        text = raised(lambda: call({"a": squared}, squared))  # noqa: B023
        assert "(stages, loss_fn): expected a module, got a dict" in text
