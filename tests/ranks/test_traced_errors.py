"""Traced steps that cannot work say so; and leaves that get no gradient in them."""

from __future__ import annotations

import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.problems import batch, net
from support.tables import FULL, marked
from support.traced import compiled, few
from torch.fx.experimental.proxy_tensor import make_fx

import functional_fsdp as fsdp
from functional_fsdp import ScheduleError, SpecError, launch
from functional_fsdp import transforms as T
from functional_fsdp._launch.launch import stop_workers

# ---------------------------------------------------------------- what cannot work says so


def state_of() -> fsdp.State:
    params = {"first.weight": torch.ones(5, 3), "tail.scale": torch.tensor(1.5), "tail.pair": torch.tensor([0.5, -0.5])}
    spec = fsdp.Spec(fsdp.local_mesh(), units=["first", "tail"])
    return fsdp.shard({path: p.double() for path, p in params.items()}, spec, fsdp.sgd(lr=0.1))


@pytest.fixture
def state() -> fsdp.State:
    """A fresh one, and nothing compiled yet."""
    torch._dynamo.reset()
    return state_of()


STAGES: dict[str, Any] = {"0": lambda w, h, x: x @ w["weight"], "1": lambda w, h, x: (h @ w["weight"]).sum()}


@pytest.mark.parametrize(
    "call",
    [
        lambda state: T.hvp(STAGES)(state, state.main, torch.ones(2, 2)),
        lambda state: T.per_sample_norms(STAGES)(state, torch.ones(2, 2)),
        lambda state: T.clipped_gradients(STAGES, max_norm=1.0)(state, torch.ones(2, 2)),
    ],
)
def test_what_calls_the_verbs_itself_is_not_traced(call: Any) -> None:
    torch._dynamo.reset()
    params = {"0": {"weight": torch.ones(2, 2)}, "1": {"weight": torch.ones(2, 2)}}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    with pytest.raises(Exception, match="drives the schedule from Python, as it runs, and cannot be traced"):
        torch.compile(call, fullgraph=True, backend="eager")(state)


def turned(tree: Any) -> Any:
    """The same with the keys of every dict in reverse."""
    return {key: turned(tree[key]) for key in reversed(tree)} if isinstance(tree, dict) else tree


def in_another_order(way: str, lacks: str = "") -> list[torch.Tensor]:
    params = {"a": {"w": torch.arange(8.0).view(4, 2), "b": torch.zeros(2)}, "c": {"w": torch.ones(2, 3)}}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(0.1))

    def train_step(state: fsdp.State, x: torch.Tensor) -> fsdp.State:
        state, weights = fsdp.unshard(state)
        grads = torch.func.grad(lambda w: ((x @ w["a"]["w"] + w["a"]["b"]) @ w["c"]["w"]).square().mean())(weights)
        return fsdp.step(fsdp.reduce(state, {k: g for k, g in turned(grads).items() if k != lacks}))

    run: Any = torch.compile(train_step, fullgraph=True, backend="aot_eager") if way == "traced" else train_step
    full = fsdp.full_params(run(state, torch.ones(3, 4) + dist.get_rank()))
    return [full["a"]["w"], full["a"]["b"], full["c"]["w"]]


def test_gradients_may_come_with_their_keys_in_another_order() -> None:
    for eager, traced in zip(*(few(in_another_order, how)[0] for how in ("eager", "traced")), strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-6, atol=1e-6)
    with pytest.raises(Exception, match="grads has the structure"):
        few(in_another_order, "traced", "c")


def recomputed(way: str) -> Any:
    """The loss and the weights after a step whose first stage recomputes, by the model's own module."""
    torch.manual_seed(0)
    params, model = fsdp.functionalize(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    model = T.remat(model, "0") if way else model
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))

    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, weights = fsdp.unshard(state)
        grads, loss = torch.func.grad_and_value(lambda w: fsdp.bind(model, w)(x).square().mean())(weights)
        return fsdp.step(fsdp.reduce(state, grads)), loss

    torch._dynamo.reset()
    state, loss = torch.compile(train_step, fullgraph=True, backend="eager")(state, torch.ones(4, 8))
    return loss, fsdp.full_params(state)


def test_in_a_graph_remat_is_left_to_the_compiler() -> None:
    plain, again = (few(recomputed, way)[0] for way in ("", "remat"))
    assert torch.equal(plain[0], again[0])
    assert all(torch.equal(plain[1][path], again[1][path]) for path in plain[1])


@pytest.mark.parametrize("whole", [True, False])
def test_a_graph_that_breaks_within_a_step_is_an_error(whole: bool, state: fsdp.State) -> None:
    rest = torch._dynamo.disable(lambda state: fsdp.unshard(state, "tail"))  # as whatever torch cannot trace

    def broken(state: fsdp.State) -> Any:
        return rest((fsdp.unshard(state) if whole else fsdp.unshard(state, "tail"))[0])

    with pytest.raises(ScheduleError, match=r"used eagerly: .* the graph broke \(fullgraph=True says where\)"):
        torch.compile(broken, backend="eager")(state)
    assert torch._dynamo.disable(fsdp.unshard)(state)[0].cursor is not None  # the state before it is good


def test_a_compiled_step_begins_between_steps(state: fsdp.State) -> None:
    def train_step(state: fsdp.State) -> fsdp.State:
        state, weights = fsdp.unshard(state)
        return fsdp.step(fsdp.reduce(state, weights))

    ways: list[Any] = [torch.compile(train_step, fullgraph=True, backend="eager"), T.compile(train_step, "aot_eager")]
    state = ways[0](state)
    middle, _ = fsdp.unshard(state, "tail")
    for step, text in zip(ways, ("is under way eagerly", "in the middle of a step"), strict=True):
        with pytest.raises(ScheduleError, match=text):
            step(middle)
    with pytest.raises(ScheduleError, match=r"under way eagerly.*drop_gradients"):
        ways[0](state)
    state = ways[0](fsdp.drop_gradients(middle))
    fsdp.unshard(state)  # which leaves nothing under way
    state = ways[0](state)
    fsdp.reduce(state, fsdp.unshard(state)[1])  # which T.compile drops
    assert ways[1](state).steps == 4


def test_a_state_that_leaves_a_compiled_function_midway_says_so(state: fsdp.State) -> None:
    middle = torch.compile(lambda s: fsdp.unshard(s, "tail")[0], fullgraph=True, backend="eager")(state)
    with pytest.raises(ScheduleError, match=r"used eagerly: it was returned before step\(\)"):
        fsdp.step(middle)


def test_gradients_around_a_compiled_step_are_refused(state: fsdp.State) -> None:
    def total(state: fsdp.State) -> torch.Tensor:
        _, params = fsdp.unshard(state)
        return params["tail.scale"] * 2

    def outer(x: torch.Tensor, step: Any) -> torch.Tensor:
        return step(state) * x

    with pytest.raises(ScheduleError, match=r"inside a torch.func transform"):
        torch.func.grad(outer)(torch.tensor(1.0, dtype=torch.float64), T.compile(total, "aot_eager"))
    with pytest.raises(Exception, match=r"torch.func.grad\(compiled_fn\)|inside a torch.func transform"):
        torch.func.grad(outer)(torch.tensor(1.0, dtype=torch.float64), torch.compile(total, backend="aot_eager"))


def test_a_collective_inside_a_transform_is_refused_when_compiled(state: fsdp.State) -> None:
    def inside(state: fsdp.State, x: torch.Tensor) -> Any:
        return torch.func.grad(lambda x: fsdp.pmean(state, x.sum())[1])(x)

    with pytest.raises(Exception, match=r"inside a torch.func transform"):
        torch.compile(inside, fullgraph=True, backend="eager")(state, torch.ones(2, dtype=torch.float64))


class Tripled(torch.autograd.Function):
    """The identity, with three times the gradient."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 3 * grad


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_custom_backward_is_refused_because_the_compiler_drops_it() -> None:
    """If the first assertion fails, torch has changed: compile(func.grad) does not drop custom backwards any more."""
    torch._dynamo.reset()
    x = torch.ones(2)
    gradient = torch.func.grad(lambda x: Tripled.apply(x).sum())
    right, found = gradient(x), torch.compile(gradient, fullgraph=True, backend="eager")(x)
    assert (right.tolist(), found.tolist()) == ([3.0, 3.0], [1.0, 1.0])

    state = state_of()

    def train_step(state: fsdp.State) -> Any:
        state, params = fsdp.unshard(state)
        grads = torch.func.grad(lambda p: Tripled.apply(p["tail.scale"]))(params)
        return fsdp.step(fsdp.reduce(state, grads))

    with pytest.raises(ScheduleError, match=r"torch.autograd.Function.*Tripled"):
        T.compile(train_step, "aot_eager")(state)


def test_a_step_that_cannot_be_searched_for_custom_backwards_says_so(state: fsdp.State) -> None:
    def train_step(state: fsdp.State, flag: torch.Tensor) -> Any:
        state, params = fsdp.unshard(state)
        if not torch.compiler.is_compiling():
            flag.item()
        grads = torch.func.grad(lambda p: p["tail.scale"] * 2)(params)
        return fsdp.step(fsdp.reduce(state, grads))

    with pytest.warns(RuntimeWarning, match="could not be searched for torch.autograd.Functions"):
        after = T.compile(train_step, "aot_eager")(state, torch.tensor(1.0))
    assert after.steps == 1


def test_what_drives_the_schedule_itself_cannot_be_traced() -> None:
    torch._dynamo.reset()
    params, model = fsdp.functionalize(net(depth=1))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    forward_backward = T.forward_backward(model, lambda model, x: model(x).sum())
    with pytest.raises(Exception, match=r"forward_backward drives the schedule .* torch.compile cannot trace"):
        torch.compile(forward_backward, fullgraph=True, backend="eager")(state, batch(0, 0)[0])
    with pytest.raises(Exception, match=r"apply drives the schedule .* torch.compile cannot trace"):
        torch.compile(T.apply(model), fullgraph=True, backend="eager")(state, batch(0, 0)[0])


class Loose(nn.Module):
    """Units, and a weight that is used before them, outside of any. Its `body` is compiled where `eager` is False."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.eager = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(x * self.w) if self.eager else self.body(x)

    def both(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    @torch.compile(backend="eager")
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(x)


def half_compiled() -> nn.Module:
    model = Loose()
    model.eager = False
    return model


def plainly(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x)


def scripted(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.jit.script(model)(x)


def in_sequence() -> nn.Module:
    return nn.Sequential(*Loose().blocks)


TRACERS: list[tuple[str, Any, Any]] = [
    ("torch.func.linearize", Loose, lambda model, x: torch.func.linearize(model, x)[1](x)),
    ("make_fx", in_sequence, lambda model, x: make_fx(model)(x)(x)),
    ("make_fx", in_sequence, lambda model, x: make_fx(model, pre_dispatch=True)(x)(x)),
    ("torch.jit.trace", Loose, lambda model, x: torch.jit.trace(model, x)(x)),
    ("torch.jit.trace", in_sequence, lambda model, x: torch.jit.trace(model, x)(x)),
    ("torch.jit.script", in_sequence, scripted),
    ("torch.export", Loose, lambda model, x: torch.export.export(model, (x,)).module()(x)),
    ("torch.compile", Loose, lambda model, x: torch.compile(model, backend="eager")(x)),
    ("torch.compile", in_sequence, lambda model, x: torch.compile(model, backend="eager", fullgraph=True)(x)),
    ("torch.compile", half_compiled, plainly),
    ("torch.compile", lambda: torch.compile(in_sequence(), backend="eager"), plainly),
]


def foreign(presets: tuple[str, ...], tracers: list[Any] = TRACERS) -> list[str]:
    """What is wrong with each tool that traces a driven model: nothing, if it is refused and the state goes on."""
    wrong = []
    x = torch.ones(3, 4)
    for preset in presets:
        for tool, build, fn in tracers:
            torch._dynamo.reset()
            params, model = fsdp.functionalize(build())
            spec = fsdp.Spec(fsdp.local_mesh(), getattr(fsdp, preset)("data"))
            state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))
            for call in (T.apply(model, fn), T.forward_backward(model, lambda m, x, fn=fn: fn(m, x).sum())):
                said = "nothing was raised"
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of torch.jit
                        call(state, x)
                except ScheduleError as error:
                    said = str(error)
                if f"{tool} " not in said.replace(",", "") or "as_module(model, state)" not in said:
                    wrong.append(f"{preset}, {tool}: {said}")
                state = fsdp.drop_gradients(state)
                if fn is not plainly:
                    got = T.apply(model)(state, x)[1]
                    if not torch.equal(got, build()(x)):
                        wrong.append(f"{preset}, {tool}: the next call is wrong")
            if not all(torch.equal(leaf, params[path]) for path, leaf in fsdp.full_params(state).items()):
                wrong.append(f"{preset}, {tool}: weights changed")
    return wrong


def test_a_tool_that_traces_a_driven_model_is_refused_by_name() -> None:
    assert foreign(("zero3", "ddp") if FULL else ("ddp",)) == []


def test_before_anything_is_sent() -> None:
    assert launch(foreign, (("zero3",), TRACERS if FULL else TRACERS[::3]), nprocs=2) == [[], []]


def test_other_weights_for_a_pullback_are_an_error_and_the_function_again(state: fsdp.State) -> None:
    def train_step(state: fsdp.State) -> Any:
        state, w = fsdp.unshard(state, "tail")
        out, pullback = T.vjp(lambda w: (w["scale"] * w["pair"].sum()).exp(), w)
        dw, *_ = pullback({key: 2 * value for key, value in w.items()}, torch.ones_like(out))
        return fsdp.step(fsdp.release(fsdp.reduce(state, dw, "tail"), "tail"))

    with pytest.raises(Exception, match="a pullback was given other weights than its forward had"):
        T.compile(train_step, "aot_eager")(state)
    torch._dynamo.reset()
    state = state_of()
    after = torch.compile(train_step, fullgraph=True, backend="eager")(state)
    expected = 1.5 - 0.1 * 0  # of the scale: the pair adds up to nothing
    assert fsdp.full_params(after)["tail.scale"].item() == pytest.approx(expected)


def test_a_step_is_searched_for_custom_backwards_for_each_kind_of_call(state: fsdp.State) -> None:
    def train_step(state: fsdp.State, tripled: bool) -> Any:
        state, params = fsdp.unshard(state)
        grads = torch.func.grad(lambda p: Tripled.apply(p["tail.scale"]) if tripled else p["tail.scale"] * 1)(params)
        return fsdp.step(fsdp.reduce(state, grads))

    step = T.compile(train_step, "aot_eager")
    state = step(state, False)
    with pytest.raises(ScheduleError, match="Tripled"):
        step(state, True)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SpecError, match=r"transport='nvlink'.*'collective', .*'copy_engine', 'auto'"):
        fsdp.Spec({"data": 2}, transport="nvlink")
    with pytest.raises(SpecError, match=r"backend='cudagraphs'.*'inductor', 'aot_eager'"):
        T.compile(lambda state: state, "cudagraphs")
    with pytest.raises(SpecError, match=r"got a tuple first; expected a State"):
        T.compile(lambda pair: pair, "aot_eager")((1, 2))


# ---------------------------------------------------------------- leaves without a gradient


SMALL = {"u.a": (5,), "u.b": (130,), "w": (4,), "never": (3,)}


def compiled_without(optimizer: Any, late: bool) -> tuple[list[dict[str, torch.Tensor]], int, list[str]]:
    """Steps in which `u.a` gets a gradient only after the first two, if `late`, and the unit `never` is not reduced."""
    params = {name: torch.ones(shape, dtype=torch.float64) for name, shape in SMALL.items()}
    spec = fsdp.Spec(fsdp.local_mesh(), units=["u", "w", "never"])
    state = fsdp.shard(params, spec, optimizer)

    def train_step(state: fsdp.State, scale: torch.Tensor, come: bool) -> fsdp.State:
        state, w = fsdp.unshard(state)
        one = {name: p * scale for name, p in w.items()}
        state = fsdp.reduce(state, {"a": one["u.a"] if come else None, "b": one["u.b"]}, "u")
        return fsdp.step(fsdp.reduce(state, {"w": one["w"]}, "w"))

    step, count = compiled("eager", train_step)
    seen = []
    for i in range(4):
        state = step(state, torch.tensor(1.0 + i + dist.get_rank(), dtype=torch.float64), i > 1 or not late)
        seen.append(fsdp.full_params(state))
    return seen, count(), sorted(getattr(state.opt, "missed", ()))


@pytest.mark.parametrize(
    ("which", "late"), marked([*itertools.product(("adamw", "sgd"), (False, True))], [("adamw", True)])
)
def test_a_compiled_step_leaves_alone_what_gets_no_gradient_in_it(which: str, late: bool) -> None:
    pairs: dict[str, tuple[Any, Any]] = {
        "adamw": (fsdp.adamw(lr=0.1, weight_decay=0.2), torch.optim.AdamW),
        "sgd": (fsdp.sgd(lr=0.1, momentum=0.9, weight_decay=0.2), partial(torch.optim.SGD, momentum=0.9)),
    }
    mine, torchs = pairs[which]
    plain = {name: torch.nn.Parameter(torch.ones(shape, dtype=torch.float64)) for name, shape in SMALL.items()}
    optimizer = torchs([*plain.values()], lr=0.1, weight_decay=0.2)
    ranks = few(compiled_without, mine, late)
    for i in range(4):
        for name, p in plain.items():
            lacks = name == "never" or (name == "u.a" and late and i < 2)
            p.grad = None if lacks else p.detach() * ((1 + len(ranks)) / 2 + i)
        optimizer.step()
        for seen, _, _ in ranks:
            for name, p in plain.items():
                torch.testing.assert_close(seen[i][name], p.detach(), rtol=0, atol=1e-9)
    for _, count, missed in ranks:
        assert count == (1 + late + (which == "adamw"))  # counts that come make another state
        assert missed == (["never"] + ["u"] * late if which == "adamw" else [])


def parted() -> str:
    params = {"a": torch.ones(5), "b": torch.ones(5)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    mine = dist.get_rank() == 1

    def train_step(state: fsdp.State) -> fsdp.State:
        state, w = fsdp.unshard(state)
        return fsdp.step(fsdp.reduce(state, {"a": w["a"], "b": w["b"] if mine else None}))

    with pytest.raises(
        fsdp.ScheduleError, match=r"the leaf 'b' gets a gradient on some ranks only.*Give zeros in the place of"
    ):
        compiled("eager", train_step)[0](state)
    return str(fsdp.full_params(state)["a"].tolist())


def one_that_never_compiles() -> str:
    state = fsdp.shard({"a": torch.ones(7)}, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))

    def train_step(state: fsdp.State) -> fsdp.State:
        state, w = fsdp.unshard(state)
        return fsdp.step(fsdp.reduce(state, w))

    if dist.get_rank():
        return ""
    with pytest.raises(fsdp.CommError) as caught:
        compiled("eager", train_step)[0](state)
    return str(caught.value)


def test_an_error_of_communication_while_a_step_is_compiled_is_itself() -> None:
    stop_workers()  # groups that are there keep their timeout
    said, _ = launch(one_that_never_compiles, nprocs=2, timeout=2)
    assert "after 2 s ranks [1] have not come" in said
    stop_workers()  # those that come next have the usual timeout


def test_ranks_that_compile_steps_with_other_gradients_hear_of_it() -> None:
    assert launch(parted, nprocs=2) == ["[1.0, 1.0, 1.0, 1.0, 1.0]"] * 2


def test_a_step_compiled_by_itself_knows_which_leaves_have_gradients() -> None:
    torch._dynamo.reset()
    params = {"a": torch.ones(5), "b": torch.ones(5)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1, weight_decay=0.1))

    def gradients(state: fsdp.State, all_of_them: bool) -> fsdp.State:
        state, w = fsdp.unshard(state)
        return fsdp.finish_reductions(fsdp.reduce(state, {"a": w["a"], "b": w["b"] if all_of_them else None}))

    first = torch.compile(gradients, fullgraph=True, backend="eager")
    second = torch.compile(fsdp.step, fullgraph=True, backend="eager")
    state = second(first(state, True))
    before = fsdp.full_params(state)
    after = fsdp.full_params(second(first(state, False)))
    assert torch.equal(after["b"], before["b"])
    assert not torch.equal(after["a"], before["a"])
