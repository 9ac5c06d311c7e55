"""Derivatives by inputs inside a driven step, against the plain module in float64, on different data per rank."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils._pytree as pytree
from support.chains import mean_square
from support.derivatives import WIDTH, Net, numbers
from support.driven import refused, start
from support.problems import full_grads
from support.ranks import each_rank
from support.tables import FULL
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp.transforms._seed import seeded

Tree = dict[str, torch.Tensor]
Loss = Callable[[Any, int], torch.Tensor]

with warnings.catch_warnings():  # torch loads torch.jit, which it deprecates, when forward mode is first used
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.func.jvp(torch.sin, (torch.ones(()),), (torch.ones(()),))


def plain_grads(state: fsdp.State, module: nn.Module, loss: Loss, data: Sequence[int]) -> Tree:
    """Of the plain module with this state's weights, on the data of each microbatch, averaged over the ranks."""
    module.load_state_dict(fsdp.full_params(state))
    trained = {path: p for path, p in module.named_parameters() if p.requires_grad}
    total: Any = 0.0
    for number, seed in enumerate(data):
        with seeded(state, number):
            total = total + loss(module, seed)
    found = torch.autograd.grad(total, [*trained.values()], allow_unused=True)
    mine = {path: torch.zeros_like(p) if g is None else g for (path, p), g in zip(trained.items(), found, strict=True)}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {path: sum(one[path] for one in every) / len(every) for path in mine}


def driven_apart(module: Callable[[], nn.Module], loss: Loss, preset: str, microbatches: int = 1, **spec: Any) -> float:
    """How far a driven step's gradients are from the plain module's, at most, in two steps."""
    state, model = start(module(), preset, **spec)
    forward_backward = T.forward_backward(model.train(), loss)
    most = 0.0
    for step in range(2):
        data = [1000 * step + 100 * dist.get_rank() + 10 * n for n in range(microbatches)]
        want, middle = plain_grads(state, module(), loss, data), state
        for n, seed in enumerate(data):
            middle, _ = forward_backward(middle, seed, last_microbatch=n == microbatches - 1)
        middle = fsdp.finish_reductions(middle)
        most = max(most, apart(full_grads(middle), want))
        state = fsdp.step(middle)
    return most


def apart(got: Tree, want: Tree) -> float:
    """The largest difference, beside the largest value."""
    most = max([1.0, *(float(g.abs().max()) for g in want.values())])
    return max(float((got[path] - g).abs().max()) for path, g in want.items()) / most


# ---------------------------------------------------------------- losses that people write


class Then(nn.Module):
    """A linear layer, and another module or a function, called in a way of its own."""

    def __init__(self, b: Any, call: Callable[[Any, torch.Tensor], torch.Tensor] = lambda b, x: b(x)) -> None:
        super().__init__()
        self.a, self.b, self.call = nn.Linear(WIDTH, WIDTH), b, call
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.b, self.a(x))


class Smooth(nn.Module):
    """The last unit is not linear: its inner backward reads what its call kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net(2)
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1), nn.Softplus())
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.net(x))


def penalty(model: Any, seed: int) -> torch.Tensor:
    """WGAN-GP's, of nothing else."""
    x = numbers(3, WIDTH, seed=seed)
    return (grad(lambda x: model(x).sum())(x).norm(dim=1) - 1).square().mean()


def pinn(model: Any, seed: int) -> torch.Tensor:
    def laplacian(x: torch.Tensor) -> torch.Tensor:
        return hessian(lambda x: model(x).sum())(x).diagonal().sum()

    return vmap(laplacian)(numbers(3, WIDTH, seed=seed)).square().mean()


def mean_flow(model: Any, seed: int) -> torch.Tensor:
    x, t = numbers(3, WIDTH, seed=seed), numbers(3, WIDTH, seed=seed + 1)
    u, along = jvp(model, (x,), (t,))  # type: ignore[misc]
    return (u - (t.mean(1, keepdim=True) - 0.5 * along).detach()).square().mean()


def score(model: Any, seed: int) -> torch.Tensor:
    """Score matching: the trace of the Jacobian, by jacrev and jacfwd."""
    x = numbers(3, WIDTH, seed=seed)
    field = lambda x: model.net(x)  # noqa: E731
    traces = [vmap(of(field))(x).diagonal(dim1=1, dim2=2).sum(1) for of in (jacrev, jacfwd)]
    return (traces[0] + traces[1] + model.net(x).square().sum(1)).mean()


def of_dual_numbers(model: Any, seed: int) -> torch.Tensor:
    x = numbers(3, WIDTH, seed=seed)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.sin())))
        assert found.tangent is not None
        total: torch.Tensor = found.primal.square().mean() + found.tangent.square().mean()
    return total


def through_weights(model: Any, seed: int) -> torch.Tensor:
    """A weight outside of its module, beside a constant inner gradient."""
    x = numbers(3, WIDTH, seed=seed)
    with torch.no_grad():
        push = grad(lambda x: model(x).sum())(x)
    return vmap(lambda row: row * model.net.scale)(model.net(x + 0.1 * push)).square().mean()


LOSSES = [penalty, pinn, mean_flow, score, of_dual_numbers, through_weights]


@pytest.mark.parametrize(("preset", "ranks"), [
    *(pytest.param(*row, marks=pytest.mark.large) for row in (("zero2", 2), ("hsdp", 4), ("ddp", 2))), ("zero3", 2),
])  # fmt: skip
@each_rank("ranks")
def test_losses_that_people_write(preset: str, ranks: int) -> None:
    for loss in LOSSES:
        assert driven_apart(Smooth, loss, preset, schedule=fsdp.Schedule(debug=True)) < 1e-9, loss


@each_rank(2)
def test_tangents_need_no_gather_of_their_own_and_an_inner_backward_needs_one() -> None:
    """What the schedule gathers, once it knows the order, for each loss."""
    losses: dict[str, Loss] = {"plain": lambda m, seed: m(numbers(3, WIDTH, seed=seed)).sum(), "jvp": mean_flow}
    found = {}
    for name, loss in (losses | {"grad": penalty}).items():
        state, model = start(Smooth())
        forward_backward = T.forward_backward(model, loss)
        for seed in range(2):
            state = fsdp.step(forward_backward(state, seed)[0])
        forward_backward(state, 2)
        found[name] = [use.unit for use in state.cursor.plan.uses]
    assert found["jvp"] == found["plain"]
    assert len(found["grad"]) > 1.5 * len(found["plain"])
    assert found["grad"].count("net.blocks.0") > found["plain"].count("net.blocks.0")


# ---------------------------------------------------------------- jvp of what recomputes, or is moved

CALLS: list[int] = []


class Counted(nn.Tanh):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        return super().forward(x)


class Recomputing(Smooth):
    """With dropout, and what is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(2, rate=0.3)
        for block in self.net.blocks:
            block.up = nn.Sequential(block.up, Counted(), nn.Linear(5, 5, dtype=torch.float64))  # type: ignore[arg-type]


def along(model: Any, seed: int) -> torch.Tensor:
    x, t = numbers(3, WIDTH, seed=seed), numbers(3, WIDTH, seed=seed + 1)
    u, moved = jvp(model, (x,), (t,))  # type: ignore[misc]
    return u.square().mean() + moved.sin().square().mean()


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda m: m,
    "remat": lambda m: T.remat(m, "net.blocks.*"),
    "offload": lambda m: T.offload(m, "net.blocks.*"),
    "part saved": lambda m: T.remat(m, "net.blocks.*", save=("up",)),
    "part moved": lambda m: T.remat(m, "net.blocks.*", offload=("up",)),
}


@each_rank(1)
def test_jvp_through_modules_that_recompute_or_are_moved() -> None:
    calls = {}
    for name, change in CHANGES.items():
        state, model = start(Recomputing(), schedule=fsdp.Schedule(debug=True))
        want = plain_grads(state, Recomputing(), along, [dist.get_rank()])
        CALLS.clear()
        state, _ = T.forward_backward(change(model).train(), along)(state, dist.get_rank())
        calls[name] = len(CALLS)
        assert apart(full_grads(fsdp.finish_reductions(state)), want) < 1e-9, name
    assert calls == dict.fromkeys(CHANGES, calls["plain"]) | {"remat": 2 * calls["plain"]}
    state, model = start(Recomputing(), schedule=fsdp.Schedule(debug=True))
    state, (_, slope) = T.jvp(model, along)(state, state.main, 1)
    state, (_, same) = T.jvp(CHANGES["remat"](model), along)(state, state.main, 1)
    assert float((slope - same).abs()) < 1e-9


# ---------------------------------------------------------------- without gradients by weights


def pulled(m: Any, x: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    return vjp(m, x)[1](cotangent)[0]


def moved(m: Any, x: torch.Tensor, t: torch.Tensor) -> Any:
    return jvp(m, (x,), (t,))


def summed(m: Any) -> Any:
    return lambda x: m(x).sum()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.large), 2])
@each_rank("ranks")
def test_apply(ranks: int) -> None:
    state, model = start(Smooth().eval(), schedule=fsdp.Schedule(debug=True))
    module = Smooth().eval()
    x, t = numbers(3, WIDTH, seed=1), numbers(3, WIDTH, seed=2)
    functions: list[Callable[[Any], Any]] = [
        lambda m: grad(summed(m))(x), lambda m: moved(m, x, t), lambda m: pulled(m, x, t[:, :1]),
        lambda m: vmap(hessian(summed(m)))(x), lambda m: vmap(jacfwd(jacrev(grad(summed(m)))))(x),
    ]  # fmt: skip
    for function in functions:
        state, got = T.apply(model, function)(state)
        for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(function(module)), strict=True):
            assert not a.requires_grad
            assert float((a - b).detach().abs().max()) < 1e-9
    threads: list[bool] = []

    def watched(m: Any) -> Any:
        found = grad(summed(m))(x)
        threads.append(torch._C._is_multithreading_enabled())
        return found

    with torch.autograd.set_multithreading_enabled(True):
        T.apply(model, watched)(state)
        assert torch._C._is_multithreading_enabled()  # again
    assert threads == [False]


@each_rank(1)
def test_what_cannot_work_says_so() -> None:
    state, model = start(Smooth())
    kept: list[Any] = []

    def keeps(m: Any, seed: int) -> torch.Tensor:
        y, back = vjp(m, numbers(3, WIDTH, seed=seed))  # type: ignore[misc]
        kept.append(lambda: back(torch.ones_like(y)))
        return y.sum()

    def late(m: Any, seed: int) -> torch.Tensor:
        if kept:
            kept[0]()
        return keeps(m, seed)

    in_place = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    changed, changes = start(Then(in_place), units=["a", "b"])

    def around(state: fsdp.State) -> Any:
        return grad(lambda x: T.apply(model, lambda m: m(x).sum())(state)[1])(numbers(3, WIDTH, seed=0))

    def by_weights(m: Any, seed: int) -> torch.Tensor:
        of = lambda p: torch.func.functional_call(m, p, (numbers(3, WIDTH, seed=seed),)).sum()  # noqa: E731
        return sum(g.square().sum() for g in grad(of)(dict(m.named_parameters())).values())

    def taken(state: fsdp.State, model: Any, loss: Any) -> Callable[[], Any]:
        return lambda: T.forward_backward(model, loss)(state, 0)

    taken(state, model, keeps)()
    remat, linearized = T.remat(model, "net.blocks.*"), lambda m: torch.func.linearize(m, numbers(3, WIDTH, seed=0))
    refused(
        (taken(state, model, by_weights), "was given weights of its own inside of a transform of torch's"),
        (taken(state, model, late), "a pullback through the module"),
        (lambda: around(state), "apply was called inside a torch.func transform"),
        (taken(changed, changes, penalty),
         "the module 'b' changes an input in place, inside of a gradient of torch.func's"),
        (taken(state, remat, penalty), "forbid saved-tensor hooks",
         "remat: nothing is computed again inside of torch.func's transforms (grad)"),
        (taken(state, remat, of_dual_numbers), "Use torch.func.jvp in the place of torch.autograd.forward_ad"),
        (lambda: T.apply(model, linearized)(state), "torch.func.linearize"),
    )  # fmt: skip


@each_rank(1)
def test_units_that_are_compiled_run_eagerly_inside_of_transforms() -> None:
    for loss in (mean_flow, of_dual_numbers, penalty, pinn):
        state, model = start(Smooth())
        want = plain_grads(state, Smooth(), loss, [1])
        with pytest.warns(match="runs eagerly under a torch.func transform"):
            state, _ = T.forward_backward(model, loss, compile={"backend": "aot_eager"})(state, 1)
        assert apart(full_grads(fsdp.finish_reductions(state)), want) < 1e-9


INSIDE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "grad": lambda m, x: grad(lambda x: m(x).sin().sum())(x).square().mean(),
    "vjp": lambda m, x: pulled(m, x, x[:, :1]).square().mean(),
    "jvp": lambda m, x: moved(m, x, x)[1].square().mean(),
    "vmap": lambda m, x: vmap(m, randomness="different")(x).square().mean(),
    "jacrev": lambda m, x: vmap(jacrev(m), randomness="same")(x).square().mean(),
    "jacfwd": lambda m, x: jacfwd(m)(x[0]).square().mean(),
    "hessian": lambda m, x: hessian(summed(m))(x[0]).square().mean(),
    "grad of grad": lambda m, x: grad(lambda x: grad(summed(m))(x).square().sum())(x).square().mean(),
    "dual numbers": lambda m, x: of_dual_numbers(m, 0),
}
FEW = ["vjp", "jvp", "hessian", "grad of grad", "dual numbers"]  # jacfwd is in hessian, the others in the row below
INSIDE["three of them"] = lambda m, x: INSIDE["grad"](m, x) + INSIDE["jvp"](m, x) + INSIDE["vmap"](m, x)


def steps_of(way: str, model: Any, loss: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    forward_backward = T.forward_backward(model, loss)

    def first(state: fsdp.State, x: torch.Tensor) -> Any:
        state, params = fsdp.unshard(state)
        grads, value = torch.func.grad_and_value(lambda p: loss(fsdp.bind(model, p), x))(params)
        return fsdp.step(fsdp.reduce(state, grads)), value

    def second(state: fsdp.State, x: torch.Tensor) -> Any:
        """The loss takes its derivatives by what the first unit gives."""
        state, w = fsdp.unshard(state, "0")
        h, back = T.vjp(lambda w, x: fsdp.bind(model[0], w)(x), w, x)
        state, w = fsdp.unshard(fsdp.release(state, "0"), "2")
        value, pull = T.vjp(lambda w, h: loss(lambda h: fsdp.bind(model[2], w)(torch.tanh(h)), h), w, h)
        dw, dh = pull(w, torch.ones_like(value))
        state = fsdp.release(fsdp.reduce(state, dw, "2"), "2")
        state, w = fsdp.unshard(state, "0")
        dw, _ = back(w, dh)
        return fsdp.step(fsdp.release(fsdp.reduce(state, dw, "0"), "0")), value

    def third(state: fsdp.State, x: torch.Tensor) -> Any:
        state, value = forward_backward(state, x)
        return fsdp.step(state), value

    return {"first": first, "second": second, "third": third}[way]


def compiled(way: str, compiler: str, losses: Sequence[str], rate: float = 0.0) -> dict[str, float]:
    """How far compiled steps are from eager ones."""

    def model_of() -> nn.Module:
        torch.manual_seed(0)
        last = [nn.Linear(WIDTH, 1)] if not rate else [nn.Sequential(nn.Linear(WIDTH, 1), nn.Dropout(rate))]
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *last).double()

    mesh, found = fsdp.local_mesh(), {}
    x, drawn = (numbers(3, WIDTH, seed=seed) for seed in (mesh.get_rank(), 0))  # outside of the step
    for name in losses:
        after: list[Tree] = []
        for compiles in (False, True):
            params, model = fsdp.functionalize(model_of())
            state = fsdp.shard(params, fsdp.Spec(mesh, units=["0", "2"]), fsdp.sgd(lr=1.0))
            step = steps_of(way, model.train(), INSIDE[name])
            if compiles:
                whole = partial(torch.compile, fullgraph=True) if compiler == "torch.compile" else T.compile
                step = whole(step, backend="aot_eager")
            with mock.patch.object(sys.modules[__name__], "numbers", return_value=drawn):
                for _ in range(2):
                    state, value = step(state, x)
            after.append({**fsdp.full_params(state), "loss": value})
        found[name] = max(float((a - after[1][path]).detach().abs().max()) for path, a in after[0].items())
    return found


@pytest.mark.parametrize(("way", "compiler", "losses", "rate", "nprocs"), [
    ("first", "torch.compile", ["three of them"], 0.0, 1),
    pytest.param("second", "T.compile", ["three of them"], 0.0, 1, marks=pytest.mark.large),
    pytest.param("third", "T.compile", [*INSIDE][:-1] if FULL else FEW, 0.0, 1, marks=pytest.mark.large),
    ("third", "T.compile", ["grad", "vmap", "jacrev"], 0.5, 1),
    *(pytest.param(*row, marks=pytest.mark.large) for row in [
        ("first", "T.compile", ["three of them"], 0.0, 2), ("second", "torch.compile", ["three of them"], 0.0, 2),
        ("third", "T.compile", [*INSIDE], 0.0, 2),
    ]),
])  # fmt: skip
def test_transforms_in_compiled_steps(way: str, compiler: str, losses: list[str], rate: float, nprocs: int) -> None:
    for found in launch(compiled, (way, compiler, losses, rate), nprocs=nprocs, simulate=nprocs == 1):
        assert len(found) == len(losses)
        assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("loss", ["jvp", pytest.param("jacfwd", marks=pytest.mark.large), "hessian"])
def test_zero_tangents_of_a_graph_have_memory(loss: str) -> None:
    """Inductor's kernels would read it."""
    params, skeleton = fsdp.functionalize(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    state = fsdp.abstract_state(params, fsdp.Spec({"data": 2}), fsdp.sgd(lr=0.1))
    graph = fsdp.lower(steps_of("third", skeleton, INSIDE[loss]), state, torch.empty(3, 8)).graph
    assert not [node.target for node in graph.graph.nodes if "zerotensor" in str(node.target)]


@pytest.mark.parametrize("loss", [pytest.param("grad", marks=pytest.mark.large), "jvp", "grad of grad"])
def test_graphs_gather_a_unit_anew_for_each_inner_backward(loss: str) -> None:
    """Of gathered weights a step's graph has at most those of two units at once."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    params, skeleton = fsdp.functionalize(model)
    state = fsdp.abstract_state(params, fsdp.Spec({"data": 4}), fsdp.sgd(lr=0.1))
    memory = fsdp.lower(steps_of("third", skeleton, INSIDE[loss]), state, torch.empty(2, 64)).memory_analysis()
    assert memory.gathered <= 2 * 4 * max(sum(b.numel for b in unit.buckets) for unit in state.layout.units)


def test_what_cannot_be_compiled_says_so_and_leaves_torch_as_it_was() -> None:
    x = numbers(3, WIDTH, seed=1)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)).double()
    state, model = start(net, units=["0", "1", "2"])
    for name in ("jvp", "hessian"):
        step = T.compile(steps_of("third", model, INSIDE[name]), "aot_eager")
        said = f"compile: torch {torch.__version__} cannot trace a forward-mode derivative"
        refused((lambda: step(state, x), said))  # noqa: B023
        assert grad(lambda x: jvp(torch.sin, (x,), (x,))[1].sum())(x).isfinite().all()
    state, _ = steps_of("third", model, INSIDE["jvp"])(state, x)  # the state goes on
    with pytest.raises(RuntimeError, match="forward_backward drives the schedule from Python"):
        torch.compile(T.forward_backward(model, INSIDE["grad"]), fullgraph=True, backend="aot_eager")(state, x)


def attends(b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return b(x[None], x[None], x[None], need_weights=False)[0]


def looks_up(b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return b(torch.zeros(2, 3, dtype=torch.int64), per_sample_weights=x[:2, :3])


SAMPLES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "jvp": INSIDE["jvp"],
    "vmap": lambda m, x: vmap(lambda x: m(x[None]))(x).square().mean(),
    "grad": INSIDE["grad"],
}
#: modules that some transform of torch's has no rule for
GAPS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: Then(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))), "vmap"),
    *((lambda: Then(nn.MultiheadAttention(WIDTH, 2, batch_first=True), attends), name) for name in ("jvp", "grad")),
    (lambda: Then(nn.LSTM(WIDTH, WIDTH), lambda b, x: b(x)[0]), "vmap"),
    *((lambda: Then(nn.EmbeddingBag(5, WIDTH, mode="sum"), looks_up), name) for name in ("jvp", "grad")),
]


@each_rank(1)
def test_operators_without_a_rule_fail_as_in_plain_torch_and_the_unit_is_named() -> None:
    for make, transform in GAPS:
        x, module, loss = numbers(3, WIDTH, seed=1), make(), SAMPLES[transform]
        with pytest.raises(RuntimeError) as plain:  # NotImplementedError is one
            loss(module, x).backward()
        state, model = start(module, units=["a", "b"])
        with pytest.raises(RuntimeError) as driven:
            T.forward_backward(model, loss)(state, x)
        assert type(plain.value) is type(driven.value)
        assert str(driven.value).splitlines()[0] == str(plain.value).splitlines()[0]
        assert "module 'b'" in " ".join(getattr(driven.value, "__notes__", []))
        state, _ = T.forward_backward(model, mean_square)(state, x)  # the state goes on


@torch.library.custom_op("tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def _kept(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)


def _doubled(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return 2 * ctx.saved_tensors[0] * grad


@torch.library.custom_op("tests::signs", mutates_args=())
def signs(x: torch.Tensor) -> torch.Tensor:
    """Whole numbers, which have no derivative."""
    return x.sign().long()


square.register_autograd(_doubled, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Square(torch.autograd.Function):
    """The operator, with a rule for tangents beside it."""

    setup_context, backward, jvp = staticmethod(_kept), staticmethod(_doubled), staticmethod(_doubled)

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return square(x)


@each_rank(1)
def test_tangents_of_an_operator_of_torch_library_take_a_function_around_it() -> None:
    """Without it torch loses them, and jvp refuses the operator, unless what it is given stands still."""
    x, slopes = numbers(3, WIDTH, seed=1), []
    for fn in (torch.square, Square.apply, lambda h: h.square() + square(h.detach()), lambda h: h.square() + signs(h)):
        torch.manual_seed(0)
        state, model = start(Then(fn))
        along = T.jvp(model)
        slopes += [along(state, state.main, x)[1][1] for _ in range(2)]
    right, *others = slopes
    assert right.all()
    for other in others:
        torch.testing.assert_close(other, right)
    state, model = start(Then(square))
    along = T.jvp(model)
    for _ in range(2):
        refused((lambda: along(state, state.main, x), "the operator 'tests.square.default' has no forward-mode deriv"))


class Statistics(nn.Module):
    """Assigns a buffer."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("mean", torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().reshape(-1, WIDTH).mean(0)
        return self.linear(x) * self.mean


@each_rank(1)
def test_buffers_by_sample_are_named() -> None:
    state, model = start(nn.Sequential(nn.Linear(WIDTH, WIDTH), Statistics()).double())
    x = numbers(3, WIDTH, seed=0)
    said = "the forward assigned the buffer '1.mean' inside of vmap, and it is another one for each sample"
    refused((lambda: T.forward_backward(model, lambda m: vmap(m)(x).square().mean())(state), said))
    changed, _ = T.forward_backward(model, lambda m: grad(lambda x: m(x).sum())(x).square().mean())(state)
    assert changed.buffers["1.mean"].shape == (WIDTH,)


class ByAttribute(nn.Module):
    """Hands a tensor on by an attribute, and not as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.told = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), torch.zeros(())

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(h)) * torch.sin(self.told))) + h


class Tells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(ByAttribute() for _ in range(3))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for block in self.blocks:
            block.told = h * x
            h = block(h)
            block.told = torch.zeros(())
        return h


def told(m: Any, seed: int) -> torch.Tensor:
    x = numbers(3, WIDTH, seed=seed)
    inner = grad(lambda x: m(x).sin().sum())(x).square().mean() + jvp(m, (x,), (x,))[1].square().mean()
    return inner + m(x).mean()


@pytest.mark.parametrize("preset", ["zero3", "zero2"])
@each_rank(2)
def test_tensors_that_come_by_attributes(preset: str) -> None:
    assert driven_apart(Tells, told, preset, schedule=fsdp.Schedule(debug=True)) < 1e-9


# ---------------------------------------------------------------- another order in each step


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)).double()

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        for i in order:
            x = self.blocks[i](x)
        return x


def in_turn(m: Any, seed: int) -> torch.Tensor:
    order = ((0, 1, 2, 3), (3, 0, 3, 1))[seed // 1000]
    pushed: torch.Tensor = grad(lambda x: m(x, order).square().sum())(numbers(3, WIDTH, seed=seed))
    return pushed.square().mean()


@pytest.mark.parametrize("prefetch", [0, 2])
@each_rank(2)
def test_an_inner_backward_of_an_order_that_the_schedule_does_not_know(prefetch: int) -> None:
    """Its visits read their weights where the calls had them, wherever the units are gathered for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of uses that are not what the schedule expects
        assert driven_apart(Turns, in_turn, "zero3", schedule=fsdp.Schedule(prefetch=prefetch, debug=True)) < 1e-9
