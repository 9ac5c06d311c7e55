"""forward_backward beside the loop by hand: errors, interrupts, buffers, random numbers, the order of use."""

from __future__ import annotations

import gc
import warnings
from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from support.chains import mean_square
from support.driven import Boom, Dropout, raised, refused, start
from support.functions import KINDS, PLACES, Placed
from support.models import CASES, VOCABULARY, Layer, Routed, Stack, batch_of, entropy, made
from support.problems import batch, full_grads, largest, loss_fn, mesh_and_placement, net, on
from support.ranks import each_rank, launch
from support.scenario import Scenario, all_alike, plain
from support.tables import each

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._extend import combined
from functional_fsdp.transforms._modules import find_unit_modules, order_of

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


def entries_of(model: nn.Module, **spec: Any) -> tuple[dict[str, tuple[str, ...]], Any]:
    params, skeleton = fsdp.functionalize(model)
    layout = fsdp.make_layout(params, fsdp.Spec({"data": 2}, **spec))
    found = find_unit_modules(skeleton, layout)
    return {one.path: one.units for one in found}, order_of(found, layout)


LAYERS = ("layers.0", "layers.1", "layers.2")


def test_entries_are_the_largest_modules_of_one_unit() -> None:
    forward = ("embed", *LAYERS, "norm")
    entries, order = entries_of(Stack())
    assert [*entries.items()] == [(path, (path,)) for path in forward]
    assert order == ("start", *forward, *reversed(("start", *forward)))
    assert entries_of(nn.Linear(2, 2), units={"all": "*"})[0] == {"": ("all",)}


def test_tied_leaves_join_the_entries_that_use_them() -> None:
    entries, order = entries_of(made(CASES["bert"]))
    tied = "bert.embeddings.word_embeddings.weight"
    (first, *_, last), units = entries, [*entries.values()]
    assert (first, units[0]) == ("bert.embeddings", (tied, "bert.embeddings"))
    assert last == "cls"
    assert tied in units[-1]
    assert order[0] == (tied, "bert.embeddings")
    assert order[len(order) // 2] == order[len(order) // 2 - 1] == units[-1]


def test_entries_of_shared_modules_and_of_units_that_surround_others() -> None:
    layer = nn.Linear(2, 2)
    entries, _ = entries_of(nn.ModuleDict({"a": layer, "b": nn.ReLU(), "c": layer}))
    assert [*entries.items()] == [(path, ("a.weight", "a.bias")) for path in "ac"]
    units = {"rest": ("norm", "router", "mix"), "experts": "experts.*"}
    entries, _ = entries_of(Routed(), units=units)
    rest = dict.fromkeys(("norm", "router", "mix"), ("rest",))
    assert [*entries.items()] == [*(rest | {f"experts.{i}": ("experts",) for i in range(4)}).items()]


def test_a_state_of_another_model() -> None:
    layout = fsdp.make_layout(fsdp.functionalize(Stack())[0], fsdp.Spec({"data": 2}))
    with pytest.raises(fsdp.TreeError, match=r"Linear has 2 parameters, the state 22 leaves; the model lacks 'embed"):
        find_unit_modules(nn.Linear(2, 2), layout)


# ---------------------------------------------------------------- by hand and driven


@each_rank(2)
def test_staging_is_no_part_of_a_graph() -> None:
    """After gradients by hand that require grad, out of turn, waited for a pass that is driven with grad mode on."""
    state, model = start(net(torch.float32))
    forward_backward = T.forward_backward(model, loss_fn)
    first = state.units[0]
    state, w = fsdp.unshard(state, first)
    grads = {key: torch.ones_like(value).requires_grad_() for key, value in w.items()}
    state = fsdp.reduce(fsdp.release(state, first), grads, first, last_microbatch=False)
    with torch.enable_grad():
        state, _ = forward_backward(state, on(state, batch(0, dist.get_rank(), 0)))
    stages = state._executor.reductions.staging.stages.values()
    buckets = [one for stage in stages for one in stage.buckets]
    assert buckets
    assert not any(one.whole.requires_grad for one in buckets)
    fsdp.step(state)


def test_as_by_hand_bit_for_bit() -> None:
    """And by the same program."""
    one = Scenario(steps=4, micro=3)
    forward = ["embed.weight", "blocks.0", "blocks.1", "blocks.2", "embed.weight", "tail"]
    by_hand = all_alike(replace(one, loop="by_unit"))
    for seen, other in zip(all_alike(one, other=by_hand, within=0), by_hand, strict=True):
        assert seen.order == [*forward, *reversed(forward)]
        assert seen.traffic == other.traffic


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


@each_rank(2)
def test_the_order_of_use_is_what_the_first_step_shows() -> None:
    (first, second, third), idle = order_after("a unit called twice", 3)
    assert first == ["start", "embed", *LAYERS, "norm", "norm", *reversed(LAYERS), "embed", "start"]
    assert second == third
    backward = ["norm", "layers.0", *reversed(LAYERS), "embed"]  # a copy of "start" was kept
    assert second == ["embed", "start", *LAYERS, "layers.0", "norm", "embed", *backward]
    assert idle


@each_rank(2)
def test_what_only_one_rank_used_has_its_place_in_the_order() -> None:
    (_, second, third), _ = order_after("a unit called on one rank", 3, 1)
    assert second == third == ["embed", "start", *LAYERS, "norm", "embed", "norm", *reversed(LAYERS), "embed"]


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


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.a = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x))
        return y


@each_rank(2)
def test_a_schedule_with_an_order_is_kept() -> None:
    state, model = start(Two(), schedule=fsdp.Schedule(order=("a", "b", "b", "a")))
    forward_backward = T.forward_backward(model, lambda model, x: model(x).sum())
    for _ in range(2):
        state, _ = forward_backward(state, torch.ones(1, 3))
        state = fsdp.step(state)
    assert [use.unit for use in state.cursor.plan.uses] == ["a", "b", "b", "a"]


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


def broken(where: str, who: Sequence[int], error: type[BaseException]) -> Tree:
    """Weights after three steps, the second of which these ranks stop there, and all take again."""
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
    assert not any(type(p) in (torch.Tensor, nn.Parameter) for p in forward_backward.driver.model.parameters())
    assert said == ([] if not where else [error.__name__ if dist.get_rank() in who else "RestartError"])
    return fsdp.full_params(state)


@each_rank(2, processes=True)
def test_an_error_inside_the_model_costs_nothing() -> None:
    good = broken("", (), Boom)
    for where, who, error in product(("forward", "backward"), ((0, 1), (1,)), (Boom, KeyboardInterrupt)):
        weights = broken(where, who, error)
        assert all(torch.equal(weights[key], good[key]) for key in good), (where, who, error)


# ---------------------------------------------------------------- errors


@each_rank(2)
def test_what_cannot_work_says_so() -> None:
    state, model = start(made(CASES["loose parameters"]))
    data = batch_of(CASES["loose parameters"], 0, dist.get_rank())

    def attempt(fn: Callable[..., Any], **settings: Any) -> Callable[[], Any]:
        return lambda: T.forward_backward(model, fn, **settings)(state, data)

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
    two = "ScheduleError: a gradient of a gradient was asked for"
    refused(
        (attempt(lambda model, batch: model(batch["source"])), "a tensor with 1 element", "of shape (2, 6, 37)"),
        (attempt(lambda model, batch: 3.0), "loss_fn returned float"),
        (attempt(entropy, has_aux=True), "with has_aux=True expected (loss, aux)"),
        (attempt(lambda model, batch: torch.zeros(())), "does not depend on any weight that trains"),
        (attempt(penalty), two), (attempt(inner), "a backward was run inside the loss function"),
        (attempt(aside), "no output of the module 'layers.0'"), (attempt(entropy, buffers="median"), "expected 'mean'"),
        (lambda: T.forward_backward(inside, entropy)(checkpointed, data), "use_reentrant=False"),
        (lambda: T.forward_backward(model, entropy)(other, data), "this state is of another model"),
        (lambda: again(state, data), "called again from within its own loss function"),
    )  # fmt: skip
    assert T.forward_backward(model, entropy)(state, data)[1].item() > 0


# ---------------------------------------------------------------- functions that are given weights


@pytest.mark.parametrize("preset", ["zero3", pytest.param("ddp", marks=pytest.mark.large)])
@each_rank(2)
def test_ranks_give_weights_to_functions_at_other_places(preset: str) -> None:
    """Weights are those of the plain module on all ranks' data."""
    fsdp.local_mesh()  # first: it starts the process group
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = [torch.randn(5, 4, generator=torch.Generator().manual_seed(other)) for other in range(ranks)]
    for kind in KINDS:
        modules = [Placed(kind, *PLACES[:: other + 2]) for other in range(ranks)]
        state, model = start(modules[rank], preset, units=["a", "b", "norm"])
        state = fsdp.shard(dict(modules[0].named_parameters(remove_duplicate=False)), state.spec, fsdp.sgd(lr=0.1))
        forward_backward = T.forward_backward(model, mean_square)
        for _ in range(4):
            state = fsdp.step(forward_backward(state, data[rank])[0])
            every = [
                torch.autograd.grad(mean_square(m, x), [*m.parameters()], allow_unused=True)
                for m, x in zip(modules, data, strict=True)
            ]
            for k, ps in enumerate(zip(*(m.parameters() for m in modules), strict=True)):
                mean = sum(torch.zeros(()) if grads[k] is None else grads[k] for grads in every) / ranks
                for p in ps:
                    p.data -= 0.1 * mean
        got = fsdp.full_params(state)
        assert all((got[path] - p).abs().max() < 1e-5 for path, p in modules[0].named_parameters()), kind


# ---------------------------------------------------------------- what the loss function gets


@each_rank(2)
def test_the_model_in_the_loss_function_behaves_as_the_module() -> None:
    module = made(CASES["loose parameters"])
    module.note = "mine"  # type: ignore[assignment]
    state, model = start(module)

    def look(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        assert isinstance(model, Stack)
        assert all(isinstance(layer, Layer) for layer in model.layers)
        assert model.note == "mine"
        assert model.layers[0].norm.eps == 1e-5  # type: ignore[union-attr]
        assert (model.start.shape, model.start.device.type) == ((8,), "cpu")
        assert next(model.parameters()).dtype is torch.float64
        hidden = model.run(model.embed(batch["source"]))
        return hidden.square().mean(), {"hidden": [hidden, "text"], "none": None}

    forward_backward = T.forward_backward(model, look, has_aux=True)
    state, (loss, aux) = forward_backward(state, batch_of(CASES["loose parameters"], 0, 0))
    assert not loss.requires_grad
    assert not aux["hidden"][0].requires_grad
    assert aux["hidden"][1] == "text"
    assert module.note == "mine"
    assert type(module) is Stack
    assert module(torch.zeros(1, 2, dtype=torch.long)).isfinite().all()


# ---------------------------------------------------------------- buffers


@pytest.mark.parametrize("rule", ["mean", "first", "local"])
@each_rank(2)
def test_buffers_ride_in_the_state(rule: Any, tmp_path: Any) -> None:
    case, plain = CASES["resnet"], []
    state, model = start(made(case))
    for rank in range(2):
        module = made(case)
        case.loss_fn(module, batch_of(case, 0, rank))
        plain.append({key: b.clone() for key, b in module.named_buffers()})
    before = {key: t.clone() for key, t in state.buffers.items()}
    middle, _ = T.forward_backward(model, case.loss_fn, buffers=rule)(state, batch_of(case, 0, dist.get_rank()))
    assert all(torch.equal(before[key], t) for key, t in state.buffers.items())
    state = fsdp.step(middle)
    fsdp.save(state, tmp_path / "saved")
    loaded = fsdp.load(tmp_path / "saved", like=start(made(case))[0]).buffers
    every: list[Any] = [None, None]
    dist.all_gather_object(every, dict(state.buffers))
    for key, after in state.buffers.items():
        mean = (plain[0][key].double() + plain[1][key].double()) / 2
        want = {"mean": mean, "first": plain[0][key], "local": plain[dist.get_rank()][key]}[rule]
        assert (after.double() - want.double()).abs().max() < 1e-12
        assert torch.equal(loaded[key], every[0][key])
    assert any(not torch.equal(before[key], after) for key, after in state.buffers.items())


@each_rank(2)
def test_a_buffer_that_changes_and_is_not_in_the_state() -> None:
    case = CASES["resnet"]
    params, model = fsdp.functionalize(made(case))
    state = fsdp.shard(params, fsdp.Spec(mesh_and_placement("zero3")[0]), fsdp.sgd(lr=0.1))
    refused((
        lambda: T.forward_backward(model, case.loss_fn)(state, batch_of(case, 0, 0)), "buffers=fsdp.buffers(model)",
        "the forward changed the buffer 'stem.1.running_mean', which is not in the state",
    ))  # fmt: skip


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


@pytest.mark.parametrize("names", [(["one"], []), (["one"], ["other"]), (["one"], ["one", "small"])])
@each_rank(2)
def test_ranks_that_change_other_buffers_are_told_which(names: Any) -> None:
    rank = dist.get_rank()
    state, model = start(Notes().eval())

    def stepped(rule: Any) -> fsdp.State:
        forward_backward = T.forward_backward(model, lambda model, x, names: model(x, names).sum(), buffers=rule)
        return fsdp.step(forward_backward(state, torch.ones(2, 3), names[rank])[0])

    words = ["buffers({'one': 'float32 [3]'})", "Every rank must change the same ones"]
    if rank:
        words = [f"rank 1 has buffers({{'{names[1][0]}': 'float32 [3]'"] if names[1] else ["Error"]
    refused((lambda: stepped("mean"), *words))
    after = stepped("local").buffers
    for name, size in {"one": 3.0, "other": 3.0, "small": 2.0}.items():
        assert float(after[name].sum()) == size * (name in names[rank])


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
    for kept, recomputed in zip(launch(dropped, nprocs=2), launch(dropped, (True,), nprocs=2), strict=True):
        assert all(map(torch.equal, kept["losses"], recomputed["losses"]))
        assert largest(recomputed["weights"], kept["weights"]) < 1e-14


# ---------------------------------------------------------------- nothing stays behind


@pytest.mark.parametrize("name", ["a unit called twice", "a unit called never", "one adapter"])
@each_rank(2, processes=True)
def test_a_step_leaves_no_cycles_that_hold_tensors(name: str) -> None:
    """None that the garbage collector would have to find, in a step that it does not run in."""
    state, model = start(made(CASES[name]))
    forward_backward = T.forward_backward(model, entropy)

    def stepped(state: fsdp.State, step: int) -> fsdp.State:
        return fsdp.step(forward_backward(state, batch_of(CASES["loose parameters"], step, 0))[0])

    state = stepped(stepped(state, 0), 1)
    for _ in range(3):  # of what tests before left: a tensor comes back to life once when it is collected
        gc.collect()
    gc.disable()
    try:
        state = stepped(state, 2)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not any(isinstance(x, torch.Tensor) for x in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


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

    def forward(self, source: torch.Tensor, stops: bool) -> torch.Tensor:  # type: ignore[override]
        x = self.run(self.embed(source) + self.start)
        return F.linear(self.norm(x.detach() if stops else x), self.embed.weight)


AGAIN = {"siamese": Siamese, "skips": Skips, "detached": Detached}


def passes_of(name: str, step: int, rank: int) -> Any:
    return batch_of(CASES["loose parameters"], step, rank) | ({"stops": rank == 1} if name == "detached" else {})


def several(name: str, order: Any, clip: bool) -> list[Tree]:
    """Gradients of four steps, the last of which is taken again by another function."""
    torch.manual_seed(0)
    state, model = start(AGAIN[name]().double(), schedule=fsdp.Schedule(order=order, debug=True))
    forward_backward, other = T.forward_backward(model, entropy), T.forward_backward(model, entropy)
    seen = []
    for step in range(4):
        data = passes_of(name, step, dist.get_rank())
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
    data = lambda step, rank, micro: passes_of(name, step, rank)  # noqa: E731
    one = Scenario(model=lambda: AGAIN[name]().double(), loss_fn=entropy, data=data, steps=4)
    for seen, want in zip(launch(several, (name, order, clip), nprocs=2), plain(one, 2), strict=True):
        assert all(largest(found, wanted) < 1e-9 for found, wanted in zip(seen, want.grads, strict=True))


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


@each_rank(2)
def test_what_cannot_be_followed_says_so() -> None:
    data = batch_of(CASES["loose parameters"], 0, fsdp.local_mesh().get_rank())
    for make, said in (
        (lambda: Shared(3, Splitting), "outputs of the module 'layers.2' share memory, or one does with an input"),
        (Registers, "the forward registered the buffer 'seen', which the state cannot know of"),
    ):
        torch.manual_seed(0)
        state, model = start(make().double())
        forward_backward = T.forward_backward(model, entropy)
        first, again = (raised(lambda: forward_backward(state, data)) for _ in range(2))  # noqa: B023
        assert said in first
        assert again == first


def test_accumulate_cuts_mappings_that_are_no_pytrees() -> None:
    seen = []

    def record(state: Any, batch: Any, *, last_microbatch: bool, scale: float) -> Any:
        seen.append((batch["a"], last_microbatch, scale))
        return state, torch.zeros(())

    state: Any = SimpleNamespace(spec=SimpleNamespace(average="mean"))
    T.accumulate(record, 2)(state, UserDict(a=torch.arange(4)))
    assert [(a.tolist(), last, scale) for a, last, scale in seen] == [([0, 1], False, 0.5), ([2, 3], True, 0.5)]
