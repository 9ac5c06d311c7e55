"""Stages read off a module, for hvp, per_sample_norms and clipped_gradients: beside those that are cut by hand."""

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
from support.problems import Tree, batch, full_grads
from support.staged import loss_fn, stages, start
from support.tables import marked
from torch.nn.attention import SDPBackend, sdpa_kernel

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T


def samples(rank: int) -> Any:
    """Six of them."""
    return tuple(torch.cat(parts) for parts in zip(*(batch(0, rank, micro) for micro in range(3)), strict=True))


def both(preset: str, **spec: Any) -> dict[str, Any]:
    """Of the module, and of its stages."""
    state, model = start(preset, **spec)
    data = samples(dist.get_rank())
    found: dict[str, Any] = {}
    for how, given in (("module", (model, loss_fn)), ("stages", (stages(model),))):
        state, (loss, hv) = T.hvp(*given)(state, dict(state.main), data)
        assert state.between_steps
        state, (losses, norms) = T.per_sample_norms(*given, chunk=4)(state, data)
        assert state.between_steps
        middle, again = T.clipped_gradients(*given, max_norm=11.0, noise=0.1)(state, data)
        grads = full_grads(fsdp.finish_reductions(middle))
        product = full_grads(state._evolve(grads=hv))
        found[how] = {"loss": loss, "losses": losses, "norms": norms, "again": again, **grads,
                      **{f"H·{path}": t for path, t in product.items()}}  # fmt: skip
    return found


@pytest.mark.parametrize(("preset", "ranks"), marked([(p, ranks_of(p)) for p in PRESETS], [("zero3", 2)]))
def test_a_module_is_the_same_as_its_stages(preset: str, ranks: int) -> None:
    for found in launch(both, (preset,), nprocs=ranks):
        torch.testing.assert_close(found["module"], found["stages"], rtol=1e-10, atol=1e-13)


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
    return torch.randn(rows, 3, generator=g, dtype=torch.float64), torch.randn(
        rows, 2, generator=g, dtype=torch.float64
    )


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


# ---------------------------------------------------------------- what is no chain


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
    return m.c(m.b(h) + h)


def skips_to_the_loss(m: Any, x: torch.Tensor) -> Any:
    h = m.a(x)
    return m.c(m.b(h)) + h.sum()


def looks(m: Any, x: torch.Tensor) -> Any:
    h = m.a(x)
    return m.c(m.b(h.abs() if bool(h.sum() > 0) else h))


WRONG: list[tuple[Callable[[Any, torch.Tensor], Any], str]] = [
    (skips, "'c' was called with what a unit before the last one returned"),
    (skips_to_the_loss, "the loss was made of what a unit before the last one returned"),
    (looks, "what an earlier unit returned has no value any more, and was asked for it"),
    (lambda m, x: m.c(m.a(m.b(x))), "'b' was called after 0 other units; as they lie in it, it is number 2"),
    (lambda m, x: m.c(m.b(m.b(m.a(x)))), "'b' was called after 2 other units"),
    (lambda m, x: m.c(m.a(x)), "'c' was called after 1 other units"),
    (lambda m, x: m.a(x)[:, :2], "loss_fn called 1 of its 3 units, and not 'b'"),
]


@pytest.mark.parametrize(("how", "said"), WRONG)
def test_what_is_no_chain_says_so(how: Callable[[Any, torch.Tensor], Any], said: str) -> None:
    state, model = world_of_one(Branches(how).double())
    calls: list[Callable[[], Any]] = [lambda: T.hvp(model, squared)(state, state.main, data_of())]
    if how is not looks:  # which vmap refuses by itself
        calls.append(lambda: T.per_sample_norms(model, squared)(state, data_of()))
    for call in calls:
        text = raised(call)
        assert "Branches is no chain of units, in which each is called once" in text
        assert said in text
        assert "Cut it by hand" in text


class Keeps(nn.Linear):
    """Keeps tensors in attributes: one for the loss, and one that nobody reads."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.parts: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)
        self.parts, self.cache = [h.square().mean()], h.detach()
        return h


def with_what_units_keep(model: Any, data: Any) -> torch.Tensor:
    out: torch.Tensor = squared(model, data)
    return out + model[0].parts[0]


def test_what_a_unit_keeps_in_an_attribute_is_no_constant() -> None:
    def fresh() -> tuple[fsdp.State, Any]:
        torch.manual_seed(0)
        return world_of_one(nn.Sequential(Keeps(), Keeps(), nn.Linear(3, 2)).double())

    state, model = fresh()
    for call in (
        lambda: T.hvp(model, with_what_units_keep)(state, state.main, data_of()),
        lambda: T.per_sample_norms(model, with_what_units_keep)(state, data_of()),
    ):
        assert "the loss was made of what a unit before the last one returned" in raised(call)
    norms = []
    for kind in (Keeps, nn.Linear):  # nobody reads it
        torch.manual_seed(0)
        first = Keeps() if kind is Keeps else nn.Linear(3, 3)
        state, model = world_of_one(nn.Sequential(first, nn.Linear(3, 3), nn.Linear(3, 2)).double())
        for _ in range(2):
            state, (_, found) = T.per_sample_norms(model, squared)(state, data_of())
        norms.append(found)
    assert torch.equal(*norms)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3))
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.a(x + self.table))


class Whole(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).long()


def test_other_errors_say_what_is_expected() -> None:
    state, model = world_of_one(Positions().double())
    assert "the weight 'table' is used by a module that holds several units" in raised(
        lambda: T.hvp(model, squared)(state, state.main, data_of())
    )
    state, model = world_of_one(nn.Sequential(Whole(3, 3), nn.Linear(3, 2)).double())
    assert "'0' returned a torch.int64; from unit to unit go floating tensors" in raised(
        lambda: T.hvp(model, squared)(state, state.main, data_of())
    )
    for call in (T.hvp, T.per_sample_norms, lambda *a: T.clipped_gradients(*a, max_norm=1.0)):
        text = raised(lambda: call(model))  # noqa: B023
        assert "loss_fn is None; with a module expected a function of (model, batch)" in text
        text = raised(lambda: call({"a": squared}, squared))  # noqa: B023
        assert "(stages, loss_fn): expected a module, got a dict" in text
