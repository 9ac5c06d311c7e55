"""forward_backward beside the loop by hand: errors, interrupts, buffers, random numbers, the order of use."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from support.driven import Boom, Dropout, raised, start
from support.functions import KINDS, PLACES, Placed
from support.models import CASES, VOCABULARY, Layer, Routed, Stack, batch_of, entropy, made
from support.problems import batch, full_grads, largest, loss_fn, mesh_and_placement, net, on
from support.ranks import launch
from support.tables import each

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._extend.orders import combined
from functional_fsdp.transforms._drive.driver import Driver
from functional_fsdp.transforms._modules.unit_modules import find_unit_modules, order_of

Tree = dict[str, torch.Tensor]


@pytest.mark.parametrize("second_order", [False, True])
def test_the_callers_grad_mode_does_not_matter(second_order: bool) -> None:
    losses, grads = [], []
    for mode in (torch.no_grad, torch.enable_grad):
        state, model = start(net())
        forward_backward = T.forward_backward(model, loss_fn, second_order=second_order)
        with mode():
            state, loss = forward_backward(state, batch(0, 0, 0))
        losses.append(loss)
        grads.append(full_grads(fsdp.finish_reductions(state)))
    assert torch.equal(*losses)
    assert all(torch.equal(grads[0][path], grads[1][path]) for path in grads[1])


# ---------------------------------------------------------------- unit_modules, without a process group


def entries_of(model: nn.Module, **spec: Any) -> tuple[list[tuple[str, tuple[str, ...]]], Any]:
    params, skeleton = fsdp.functionalize(model)
    layout = fsdp.make_layout(params, fsdp.Spec({"data": 2}, **spec))
    unit_modules = find_unit_modules(skeleton, layout)
    return [(unit_module.path, unit_module.units) for unit_module in unit_modules], order_of(unit_modules, layout)


def test_entries_are_the_largest_modules_of_one_unit() -> None:
    unit_modules, order = entries_of(Stack())
    assert unit_modules == [
        ("embed", ("embed",)),
        ("layers.0", ("layers.0",)),
        ("layers.1", ("layers.1",)),
        ("layers.2", ("layers.2",)),
        ("norm", ("norm",)),
    ]
    forward = ("start", "embed", "layers.0", "layers.1", "layers.2", "norm")
    assert order == (*forward, *reversed(forward))


def test_tied_leaves_join_the_entries_that_use_them() -> None:
    unit_modules, order = entries_of(made(CASES["bert"]))
    tied = "bert.embeddings.word_embeddings.weight"
    assert unit_modules[0] == ("bert.embeddings", (tied, "bert.embeddings"))
    assert unit_modules[-1][0] == "cls"
    assert tied in unit_modules[-1][1]
    assert order[0] == (tied, "bert.embeddings")
    assert order[len(order) // 2] == order[len(order) // 2 - 1] == unit_modules[-1][1]


def test_a_model_of_one_unit_is_its_own_entry() -> None:
    assert entries_of(nn.Linear(2, 2), units={"all": "*"})[0] == [("", ("all",))]


def test_a_module_at_two_places_is_an_entry_at_both() -> None:
    layer = nn.Linear(2, 2)
    unit_modules, _ = entries_of(nn.ModuleDict({"a": layer, "b": nn.ReLU(), "c": layer}))
    assert unit_modules == [("a", ("a.weight", "a.bias")), ("c", ("a.weight", "a.bias"))]


def test_parts_of_a_unit_that_surround_another_are_entries_of_one_unit() -> None:
    units = {"rest": ("norm", "router", "mix"), "experts": "experts.*"}
    unit_modules, _ = entries_of(Routed(), units=units)
    assert [path for path, _ in unit_modules] == [
        "norm",
        "router",
        "mix",
        "experts.0",
        "experts.1",
        "experts.2",
        "experts.3",
    ]
    assert [units for _, units in unit_modules] == [("rest",)] * 3 + [("experts",)] * 4


def test_a_state_of_another_model() -> None:
    layout = fsdp.make_layout(fsdp.functionalize(Stack())[0], fsdp.Spec({"data": 2}))
    with pytest.raises(fsdp.TreeError, match=r"Linear has 2 parameters, the state 22 leaves; the model lacks 'embed"):
        find_unit_modules(nn.Linear(2, 2), layout)


# ---------------------------------------------------------------- by hand and driven


def waited() -> list[bool]:
    """Whether staging is a part of autograd's graph, after gradients by hand that require grad, out of turn, waited for
    a pass that is driven with grad mode on."""
    state, model = start(net(torch.float32))
    forward_backward = T.forward_backward(model, loss_fn)
    first = state.units[0]
    state, w = fsdp.unshard(state, first)
    grads = {key: torch.ones_like(value).requires_grad_() for key, value in w.items()}
    state = fsdp.reduce(fsdp.release(state, first), grads, first, last_microbatch=False)
    with torch.enable_grad():
        state, _ = forward_backward(state, on(state, batch(0, dist.get_rank(), 0)))
    stages = state._executor.reductions.staging.stages.values()
    found = [slot.whole.requires_grad for stage in stages for slot in stage.slots]
    fsdp.step(state)
    return found


def test_staging_is_no_part_of_a_graph() -> None:
    for found in launch(waited, nprocs=2):
        assert found
        assert not any(found)


def as_by_hand() -> tuple[bool, list[str], list[str]]:
    """Losses and weights bit for bit, and the same program."""
    from support.problems import by_unit

    states = []
    for way in ("by hand", "driven"):
        state, model = start(net(torch.float32))
        forward_backward = T.forward_backward(model, loss_fn)
        losses = []
        for step in range(4):
            for k in range(2):
                data = batch(step, dist.get_rank(), k)
                if way == "by hand":
                    state, loss = by_unit(model, state, data, last=k == 1)
                else:
                    state, loss = forward_backward(state, on(state, data), last_microbatch=k == 1)
                losses.append(loss)
            state = fsdp.step(state)
        states.append((losses, fsdp.full_params(state), [use.unit for use in state.cursor.plan.uses]))
    (a, wa, _), (b, wb, order) = states
    same = all(map(torch.equal, a, b)) and all(torch.equal(wa[key], wb[key]) for key in wa)
    return same, order, []


def test_as_by_hand_bit_for_bit() -> None:
    for same, order, _ in launch(as_by_hand, nprocs=2):
        assert same
        forward = ["embed.weight", "blocks.0", "blocks.1", "blocks.2", "embed.weight", "tail"]
        assert order == [*forward, *reversed(forward)]


def order_after(name: str, steps: int, skew: int = 0) -> tuple[list[list[str]], bool]:
    """The plan's order before the first step and after each. With `skew`, layers that hang on the data differ."""
    case = CASES[name]
    state, model = start(made(case), **case.spec)
    forward_backward = T.forward_backward(model, case.loss_fn)
    orders = []
    for step in range(steps):
        data = batch_of(case, step, dist.get_rank())
        if skew:
            data["source"][0, 0] += (data["source"].sum() + dist.get_rank()) % 2
            data["source"] %= VOCABULARY - 1
        state, _ = forward_backward(state, data)
        orders.append([use.unit for use in state.cursor.plan.uses])
        state = fsdp.step(state)
    return orders, state.cursor.idle


def test_the_order_of_use_is_what_the_first_step_shows() -> None:
    layers = ["layers.0", "layers.1", "layers.2"]
    for (first, second, third), idle in launch(order_after, ("a unit called twice", 3), nprocs=2):
        assert first == ["start", "embed", *layers, "norm", "norm", *reversed(layers), "embed", "start"]
        forward = ["embed", "start", *layers, "layers.0", "norm", "embed"]
        assert second == third
        assert second[: len(forward)] == forward
        assert second[len(forward) :] == ["norm", "layers.0", *reversed(layers), "embed"]  # a copy of "start" was kept
        assert idle


def test_what_only_one_rank_used_has_its_place_in_the_order() -> None:
    for orders, _ in launch(order_after, ("a unit called on one rank", 3, 1), nprocs=2):
        layers = ["layers.0", "layers.1", "layers.2"]
        assert orders[1] == ["embed", "start", *layers, "norm", "embed", "norm", *reversed(layers), "embed"]
        assert orders[1] == orders[2]


def test_orders_of_ranks_are_combined() -> None:
    planned = ("a", "b", "c", "d", "d", "c", "b", "a")
    assert combined([(("a", "b"), ("b", "a"), ())] * 2, planned) == (planned[:4], planned[4:])
    differ = combined([(("a", "d"), ("d",), ()), (("a", "c"), ("c",), ())], planned)
    assert differ == (("a", "b", "c", "d"), ("d", "c", "b"))
    seen = [(("m", "e1", "m"), ("m", "e1", "m"), ()), (("m", "e3", "m"), ("m", "e3", "m"), ())]
    both = combined(seen, ("m", "e1", "e2", "e3", "e3", "e2", "e1", "m"))
    assert both == (("m", "e3", "e1", "e2", "m"), ("m", "e2", "e1", "e3", "m"))  # between the uses of what is around
    detached = (tuple("abcd"), ("d", "c"), ("b", "a")), (tuple("abd"), ("d", "b"), ("a",))
    assert combined(detached, ())[1] == tuple("dcba"), "what no rank had in one backward is as in the forward"
    assert combined([(("a", "b"), (), ()), (("b", "a"), (), ())], planned) == ((), ())


def test_a_unit_without_a_gradient_keeps_its_place_in_the_backward() -> None:
    """It may get one in another step; but not where some rank had one, and used no weights for it."""
    planned = ("a", "b", "c", "c", "b", "a")
    assert combined([(planned[:3], ("c",), ("a", "b"))], planned) == (planned[:3], planned[3:])
    assert combined([(planned[:3], ("c", "b"), ("a",))] * 2, planned) == (planned[:3], planned[3:])
    assert combined([(planned[:3], ("c", "b"), ("a",)), (planned[:3], ("c", "b"), ())], planned)[1] == ("c", "b")


def test_a_schedule_with_an_order_is_kept() -> None:
    def kept() -> list[str]:
        state, model = two(("a", "b", "b", "a"))
        forward_backward = T.forward_backward(model, lambda model, x: model(x).sum())
        for _ in range(2):
            state, _ = forward_backward(state, torch.ones(1, 3))
            state = fsdp.step(state)
        return [use.unit for use in state.cursor.plan.uses]

    assert launch(kept, nprocs=2) == [["a", "b", "b", "a"]] * 2


def two(order: Any) -> tuple[fsdp.State, nn.Module]:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.a = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.b(self.a(x))
            return y

    return start(Two(), schedule=fsdp.Schedule(order=order))


# ---------------------------------------------------------------- transactions


class Breaks(Stack):
    """Raises in the forward, or in the backward, of a layer, when told to."""

    where = ""
    error: type[BaseException] = Boom

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1:
                x = _Break.apply(x)
        return x


class _Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if Breaks.where == "forward":
            raise Breaks.error("on purpose")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Breaks.where == "backward":
            raise Breaks.error("on purpose")
        return grad


def breaks(where: str, who: Sequence[int], error: type[BaseException]) -> tuple[Tree, list[str], bool]:
    torch.manual_seed(0)
    state, model = start(Breaks().double())
    forward_backward = T.forward_backward(model, entropy)
    said: list[str] = []
    step = 0
    while step < 3:
        batch = batch_of(CASES["loose parameters"], step, dist.get_rank())
        Breaks.error = error
        Breaks.where = where if step == 1 and not said and dist.get_rank() in who else ""
        try:
            after, _ = forward_backward(state, batch)
            state = fsdp.step(after)
            step += 1
        except (Boom, KeyboardInterrupt, fsdp.RestartError) as stopped:
            said.append(type(stopped).__name__)
        finally:
            Breaks.where = ""
    clean = not any(type(p) in (torch.Tensor, nn.Parameter) for p in forward_backward.driver.model.parameters())
    return fsdp.full_params(state), said, clean


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("who", [(0, 1), (1,)])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_inside_the_model_costs_nothing(where: str, who: tuple[int, ...], error: type[BaseException]) -> None:
    good, _, _ = launch(breaks, ("", (), error), nprocs=2, processes=True)[0]
    for rank, (weights, said, clean) in enumerate(launch(breaks, (where, who, error), nprocs=2, processes=True)):
        assert said == [error.__name__ if rank in who else "RestartError"]
        assert clean
        assert all(torch.equal(weights[key], good[key]) for key in good)


# ---------------------------------------------------------------- errors


def refused() -> dict[str, str]:
    state, model = start(made(CASES["loose parameters"]))
    data = batch_of(CASES["loose parameters"], 0, dist.get_rank())

    def attempt(fn: Callable[..., Any], **settings: Any) -> str:
        return raised(lambda: T.forward_backward(model, fn, **settings)(state, data))

    def penalty(model: Any, batch: Any) -> torch.Tensor:
        x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(model.layers[0](x).sum(), x, create_graph=True)
        return grad.square().sum()

    def inner(model: Any, batch: Any) -> torch.Tensor:
        x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(model.layers[0](x).sum(), x)
        return grad.sum() + entropy(model, batch)

    def aside(model: Any, batch: Any) -> torch.Tensor:
        kept = {}
        layer = model.layers[0]
        forward = type(layer.up).forward

        class Keeps(type(layer.up)):  # type: ignore[misc]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                kept["up"] = forward(self, x)
                up: torch.Tensor = kept["up"]
                return up

        before, layer.up.__class__ = layer.up.__class__, Keeps
        try:
            layer(torch.randn(2, 3, 8, dtype=torch.float64))
        finally:
            layer.up.__class__ = before
        return kept["up"].sum()

    checkpointed, inside = start(made(CASES["checkpoint around a layer"]))
    inside.reentrant = True  # type: ignore[assignment]
    other, _ = start(nn.Linear(2, 2))
    again: Any = T.forward_backward(model, lambda model, batch: again(state, batch)[1])
    return {
        "scalar": attempt(lambda model, batch: model(batch["source"])),
        "number": attempt(lambda model, batch: 3.0),
        "aux": attempt(entropy, has_aux=True),
        "constant": attempt(lambda model, batch: torch.zeros(())),
        "penalty": attempt(penalty),
        "inner": attempt(inner),
        "aside": attempt(aside),
        "rule": attempt(entropy, buffers="median"),
        "reentrant": raised(lambda: T.forward_backward(inside, entropy)(checkpointed, data)),
        "model": raised(lambda: T.forward_backward(model, entropy)(other, data)),
        "again": raised(lambda: again(state, data)),
        "then": str(T.forward_backward(model, entropy)(state, data)[1].item() > 0),
    }


def test_what_cannot_work_says_so() -> None:
    for said in launch(refused, nprocs=2):
        assert "expected a tensor with 1 element" in said["scalar"]
        assert "a tensor of shape (2, 6, 37)" in said["scalar"]
        assert "loss_fn returned float" in said["number"]
        assert "with has_aux=True expected (loss, aux)" in said["aux"]
        assert "does not depend on any weight that trains" in said["constant"]
        assert "ScheduleError: a gradient of a gradient was asked for" in said["penalty"]
        assert "a backward was run inside the loss function" in said["inner"]
        assert "no output of the module 'layers.0'" in said["aside"]
        assert "expected 'mean'" in said["rule"]
        assert "use_reentrant=False" in said["reentrant"]
        assert "this state is of another model" in said["model"]
        assert "called again from within its own loss function" in said["again"]
        assert said["then"] == "True"


# ---------------------------------------------------------------- functions that are given weights


def functions(preset: str) -> dict[str, float]:
    """How far weights are from those of the plain module on all ranks' data; ranks use functions at other places."""
    found = {}
    fsdp.local_mesh()  # first: it starts the process group
    for kind in KINDS:
        modules = [Placed(kind, *PLACES[:: rank + 2]) for rank in range(dist.get_world_size())]
        state, model = start(modules[dist.get_rank()], preset, units=["a", "b", "norm"])
        plain = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
        state = fsdp.shard(dict(modules[0].named_parameters(remove_duplicate=False)), state.spec, fsdp.sgd(lr=0.1))
        forward_backward = T.forward_backward(model, lambda model, x: model(x).square().mean())
        data = [torch.randn(5, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(len(modules))]
        for _ in range(4):
            state, _ = forward_backward(state, data[dist.get_rank()])
            state = fsdp.step(state)
            for module, x in zip(modules, data, strict=True):
                module.zero_grad()
                module(x).square().mean().backward()
            every = [[torch.zeros_like(p) if p.grad is None else p.grad for p in m.parameters()] for m in modules]
            average = [torch.stack([*grads]).mean(0) for grads in zip(*every, strict=True)]
            for module, optimizer in zip(modules, plain, strict=True):
                for p, grad in zip(module.parameters(), average, strict=True):
                    p.grad = grad.clone()
                optimizer.step()
        got = fsdp.full_params(state)
        found[kind] = max((got[path] - p).abs().max().item() for path, p in modules[0].named_parameters())
    return found


@pytest.mark.parametrize("preset", ["zero3", "ddp"])
def test_ranks_give_weights_to_functions_at_other_places(preset: str) -> None:
    for found in launch(functions, (preset,), nprocs=2):
        assert found.keys() == KINDS.keys()
        assert max(found.values()) < 1e-5


# ---------------------------------------------------------------- what the loss function gets


def sees() -> dict[str, bool]:
    module = made(CASES["loose parameters"])
    module.note = "mine"  # type: ignore[assignment]
    state, model = start(module)
    found = {}

    def look(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        found["class"] = isinstance(model, Stack) and all(isinstance(layer, Layer) for layer in model.layers)
        found["attribute"] = model.note == "mine" and model.layers[0].norm.eps == 1e-5
        found["metadata"] = model.start.shape == (8,) and model.start.device.type == "cpu"
        found["dtype"] = next(model.parameters()).dtype is torch.float64
        hidden = model.run(model.embed(batch["source"]))
        return hidden.square().mean(), {"hidden": [hidden, "text"], "none": None}

    forward_backward = T.forward_backward(model, look, has_aux=True)
    state, (loss, aux) = forward_backward(state, batch_of(CASES["loose parameters"], 0, 0))
    found["detached"] = not loss.requires_grad and not aux["hidden"][0].requires_grad and aux["hidden"][1] == "text"
    found["module"] = module.note == "mine" and type(module) is Stack
    found["beside"] = bool(module(torch.zeros(1, 2, dtype=torch.long)).isfinite().all())
    return found


def test_the_model_in_the_loss_function_behaves_as_the_module() -> None:
    for found in launch(sees, nprocs=2):
        assert all(found.values()), found


# ---------------------------------------------------------------- buffers


def buffers_by(rule: Any, folder: str) -> tuple[Tree, Tree, Tree, bool]:
    case = CASES["resnet"]
    state, model = start(made(case))
    before = {key: t.clone() for key, t in state.buffers.items()}
    forward_backward = T.forward_backward(model, case.loss_fn, buffers=rule)
    middle, _ = forward_backward(state, batch_of(case, 0, dist.get_rank()))
    untouched = all(torch.equal(before[key], t) for key, t in state.buffers.items())
    state = fsdp.step(middle)
    fsdp.save(state, folder)
    fresh, _ = start(made(case))
    return before, dict(state.buffers), dict(fsdp.load(folder, like=fresh).buffers), untouched


@pytest.mark.parametrize("rule", ["mean", "first", "local"])
def test_buffers_ride_in_the_state(rule: str, tmp_path: Any) -> None:
    case = CASES["resnet"]
    plain = []
    for rank in range(2):
        model = made(case)
        case.loss_fn(model, batch_of(case, 0, rank))
        plain.append({key: b.clone() for key, b in model.named_buffers()})
    ranks = launch(buffers_by, (rule, str(tmp_path / "saved")), nprocs=2)
    for rank, (before, after, loaded, untouched) in enumerate(ranks):
        assert untouched
        for key in after:
            mean = (plain[0][key].double() + plain[1][key].double()) / 2
            want = {"mean": mean, "first": plain[0][key], "local": plain[rank][key]}[rule]
            assert (after[key].double() - want.double()).abs().max() < 1e-12
            assert torch.equal(loaded[key], ranks[0][1][key])
        assert any(not torch.equal(before[key], after[key]) for key in before)


def without_buffers() -> str:
    case = CASES["resnet"]
    params, model = fsdp.functionalize(made(case))
    state = fsdp.shard(params, fsdp.Spec(mesh_and_placement("zero3")[0]), fsdp.sgd(lr=0.1))
    return raised(lambda: T.forward_backward(model, case.loss_fn)(state, batch_of(case, 0, 0)))


def test_a_buffer_that_changes_and_is_not_in_the_state() -> None:
    for said in launch(without_buffers, nprocs=2):
        assert "the forward changed the buffer 'stem.1.running_mean', which is not in the state" in said
        assert "buffers=fsdp.buffers(model)" in said


class Notes(nn.Module):
    """Changes the buffers that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        for name in ("one", "other", "small"):
            self.register_buffer(name, torch.zeros(2 if name == "small" else 3))

    def forward(self, x: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        for name in names:
            self.get_buffer(name).add_(1)
        out: torch.Tensor = self.layer(x)
        return out


def changes_of_ranks(names: Sequence[Sequence[str]], rule: Any) -> tuple[str, list[float]]:
    state, model = start(Notes().eval())
    forward_backward = T.forward_backward(model, lambda model, x, names: model(x, names).sum(), buffers=rule)
    done = [state]

    def step() -> None:
        done[0] = fsdp.step(forward_backward(state, torch.ones(2, 3), names[dist.get_rank()])[0])

    return raised(step), [float(done[0].buffers[name].sum()) for name in ("one", "other", "small")]


@pytest.mark.parametrize("names", [(["one"], []), (["one"], ["other"]), (["one"], ["one", "small"])])
def test_ranks_that_change_other_buffers_are_told_which(names: Any) -> None:
    told = [said for said, _ in launch(changes_of_ranks, (names, "mean"), nprocs=2)]
    assert all(told)
    assert "buffers({'one': 'float32 [3]'})" in told[0]
    assert "Every rank must change the same ones" in told[0]
    assert not names[1] or (f"rank 1 has buffers({{'{names[1][0]}': 'float32 [3]'" in told[1])
    for rank, (said, sums) in enumerate(launch(changes_of_ranks, (names, "local"), nprocs=2)):
        assert not said
        sizes = {"one": 3.0, "other": 3.0, "small": 2.0}
        assert sums == [size * (name in names[rank]) for name, size in sizes.items()]


# ---------------------------------------------------------------- random numbers


def dropped(remat: bool = False) -> dict[str, Any]:
    torch.manual_seed(5)
    state, model = start(Dropout().double())
    if remat:
        model = T.remat(model, "layers.*")
    masks: list[torch.Tensor] = []

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        masks.append((F.dropout(torch.ones(64), 0.5) > 0).float())
        out: torch.Tensor = model(x).square().mean()
        return out

    forward_backward = T.forward_backward(model, loss_fn)
    x = torch.ones(2, 3, dtype=torch.long)
    torch.manual_seed(dist.get_rank())
    outside = torch.random.get_rng_state()
    losses = []
    for _ in range(2):
        middle, loss = forward_backward(state, x, last_microbatch=False)
        losses.append(loss)
    middle, loss = forward_backward(middle, x)
    losses.append(loss)
    same = torch.equal(outside, torch.random.get_rng_state())
    state = fsdp.step(middle)
    grads = fsdp.full_params(state)
    forward_backward(state, x)
    return {"masks": masks, "losses": losses, "outside": same, "weights": grads}


def test_dropout_differs_by_rank_step_and_microbatch_and_comes_again() -> None:
    first, second = launch(dropped, nprocs=2)
    again = launch(dropped, nprocs=2)[0]
    a, b, c, d = first["masks"]
    assert torch.equal(a, b)
    assert torch.equal(first["losses"][0], first["losses"][1])
    assert not torch.equal(a, c)
    assert not torch.equal(a, d)
    assert not torch.equal(a, second["masks"][0])
    assert all(map(torch.equal, first["masks"], again["masks"]))
    assert all(map(torch.equal, first["losses"], again["losses"]))
    assert first["outside"]


def test_recomputation_sees_the_same_masks() -> None:
    for plain, recomputed in zip(launch(dropped, nprocs=2), launch(dropped, (True,), nprocs=2), strict=True):
        assert all(map(torch.equal, plain["losses"], recomputed["losses"]))
        assert largest(recomputed["weights"], plain["weights"]) < 1e-14


# ---------------------------------------------------------------- nothing stays behind


def lingers(name: str) -> tuple[int, int]:
    """How many tensors the garbage collector would have to find, in a step that it does not run in."""
    import gc

    state, model = start(made(CASES[name]))
    forward_backward = T.forward_backward(model, entropy)
    for step in range(2):
        state, _ = forward_backward(state, batch_of(CASES["loose parameters"], step, 0))
        state = fsdp.step(state)
    for _ in range(3):  # of what tests before left: a tensor comes back to life once when it is collected
        gc.collect()
    gc.disable()
    try:
        state, _ = forward_backward(state, batch_of(CASES["loose parameters"], 2, 0))
        state = fsdp.step(state)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return sum(isinstance(x, torch.Tensor) for x in gc.garbage), len(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("name", ["a unit called twice", "a unit called never", "one adapter"])
def test_a_step_leaves_no_cycles_that_hold_tensors(name: str) -> None:
    for tensors, _ in launch(lingers, (name,), nprocs=2, processes=True):
        assert tensors == 0


def test_a_driver_is_a_copy() -> None:
    module = made(CASES["loose parameters"])
    driver = Driver(module)
    assert driver.model is not module
    assert type(driver.model) is type(module)
    assert module.embed.weight.shape[0] == VOCABULARY  # type: ignore[union-attr,index]


# ---------------------------------------------------------------- several passes, skipped units, shared outputs


class Siamese(Stack):
    """Two passes through the model, and one through a part of it, in one loss function."""

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        first = super().forward(source)
        with torch.no_grad():
            target = super().forward(source.flip(0))
        part = self.layers[0](self.embed(source))
        return first + target + F.linear(self.norm(part), self.embed.weight)


class Skips(Stack):
    """Returns its input instead of calling a layer's code, where the data say so: the layer is called all the same."""

    def __init__(self) -> None:
        super().__init__(3, Skipping)


class Skipping(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if (x.detach().sum() * 1000).int() % 2 else super().forward(x)


class Detached(Stack):
    """The trunk gets no gradient on some ranks."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        y = super().run(x)
        return y.detach() if dist.is_initialized() and dist.get_rank() == 1 else y


AGAIN = {"siamese": Siamese, "skips": Skips, "detached": Detached}


def several(name: str, order: Any, clip: bool) -> list[Tree]:
    """Gradients of four steps, the last of which is taken again by another function."""
    torch.manual_seed(0)
    state, model = start(AGAIN[name]().double(), schedule=fsdp.Schedule(order=order, debug=True))
    forward_backward, other = T.forward_backward(model, entropy), T.forward_backward(model, entropy)
    seen = []
    for step in range(4):
        data = batch_of(CASES["loose parameters"], step, dist.get_rank())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "unshard.* is not what the schedule expects here")
            middle, _ = forward_backward(state, data)
            if step == 3:
                middle, _ = other(state, data)
            if clip:
                middle, _ = T.clip_by_global_norm(middle, 1e9)
        middle = fsdp.finish_reductions(middle)
        seen.append(full_grads(middle))
        state = fsdp.step(middle)
    return seen


@pytest.mark.parametrize(
    ("passes", "clip"),
    each([("siamese", None), ("siamese", "recorded"), ("skips", None), ("detached", None)], [False, True]),
)
def test_more_passes_than_one_and_units_without_a_gradient(passes: tuple[str, Any], clip: bool) -> None:
    name, order = passes
    runs = launch(several, (name, order, clip), nprocs=2)
    torch.manual_seed(0)
    model = AGAIN[name]().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(4):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for rank in range(2):
            data = batch_of(CASES["loose parameters"], step, rank)
            if name == "detached" and rank == 1:
                x = Stack.run(model, model.embed(data["source"]) + model.start).detach()
                logits = F.linear(model.norm(x), model.embed.weight)
                loss = F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten())
            else:
                loss = entropy(model, data)
            (loss / 2).backward()
        for seen in runs:
            assert largest(seen[step], {k: p.grad for k, p in model.named_parameters() if p.grad is not None}) < 1e-9
        optimizer.step()


class Shared(Stack):
    """Two outputs of a unit share memory, and one is changed in place."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, part = layer(x)
            part.mul_(2)
        return x


class Splitting(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, y[..., :2]


class Registers(Stack):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("cache", x.detach(), persistent=False)
        if self.training:
            self.register_buffer("seen", x.detach().mean())
        return super().run(x)


def odd_ones() -> list[str]:
    said = []
    data = batch_of(CASES["loose parameters"], 0, fsdp.local_mesh().get_rank())
    for make in (lambda: Shared(3, Splitting), Registers):
        torch.manual_seed(0)
        state, model = start(make().double())
        forward_backward = T.forward_backward(model, entropy)
        said += [raised(lambda f=forward_backward, s=state: f(s, data)) for _ in range(2)]  # type: ignore[misc]
    return said


def test_what_cannot_be_followed_says_so() -> None:
    for shared, again, registers, once_more in launch(odd_ones, nprocs=2):
        assert "outputs of the module 'layers.2' share memory, or one does with an input" in shared
        assert again == shared
        assert "the forward registered the buffer 'seen', which the state cannot know of" in registers
        assert once_more == registers


def test_accumulate_cuts_mappings_that_are_no_pytrees() -> None:
    seen = []

    def record(state: Any, batch: Any, *, last_microbatch: bool, scale: float) -> Any:
        seen.append((batch["a"], last_microbatch, scale))
        return state, torch.zeros(())

    state: Any = SimpleNamespace(spec=SimpleNamespace(average="mean"))
    T.accumulate(record, 2)(state, UserDict(a=torch.arange(4)))
    assert [(a.tolist(), last, scale) for a, last, scale in seen] == [([0, 1], False, 0.5), ([2, 3], True, 0.5)]
