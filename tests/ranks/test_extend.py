"""What transforms are made of: shards that count once, changes to gradients and weights, gradients apart, sessions."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from support.commands import code_under
from support.driven import raised, refused
from support.presets import PRESETS
from support.problems import batch, by_unit, full_grads, largest, loss_fn, mesh_and_placement, net, on, whole_tree
from support.ranks import each_rank, launch
from support.scenario import SGD, Scenario, Seen, alike, plain, run
from support.tables import FULL, marked
from support.traced import compiled

import functional_fsdp as fsdp
from functional_fsdp import extend
from functional_fsdp import transforms as T

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
BLOCKS = 1  # to trace them is what takes time
Tree = dict[str, torch.Tensor]


def made(preset: str, optimizer: Any = None, **spec: Any) -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net(depth=BLOCKS))
    return fsdp.shard(params, fsdp.Spec(mesh, placement, **spec), optimizer or fsdp.sgd(lr=0.1)), model


# ---------------------------------------------------------------- the transform of the guide


def of_the_guide() -> Callable[[fsdp.State], fsdp.State]:
    """`centralize`, as it stands in CONTRIBUTING.md."""
    block = code_under("A transform of your own")
    script = sys.modules["a_transform"] = ModuleType("a_transform")  # where the compiler looks for what it refers to
    exec(compile(block, "CONTRIBUTING.md", "exec"), script.__dict__)
    return script.centralize


def test_the_guides_transform_is_short() -> None:
    block = code_under("A transform of your own")
    assert block.count("\n") <= 30
    assert "_" not in {name[0] for name in re.findall(r"(?:fsdp|extend)\.(\w+)", block)}


@pytest.mark.parametrize("preset", ["zero3", "ddp"])
@each_rank(2)
def test_no_reduction_that_is_under_way_overwrites_a_change(preset: str) -> None:
    """Weights are what they were after a step without gradients, unfinished reductions or not."""
    state, model = made(preset)
    before = fsdp.full_params(state)
    state, _ = by_unit(model, state, batch(0, dist.get_rank()), True)
    assert state.grads
    after = fsdp.full_params(fsdp.step(extend.change(state, "zeroed()", lambda: scale(state, 0.0))))
    assert all(torch.equal(before[path], leaf) for path, leaf in after.items())


def scale(state: fsdp.State, by: float) -> None:
    for buffers in extend.shards(state).values():
        for buffer in buffers:
            buffer.local.mul_(by)


def small() -> nn.Module:
    return net(depth=BLOCKS)


def guided(one: Scenario, way: str) -> Seen:
    """With the guide's transform before each update; compiled once."""
    centralize, counts = of_the_guide(), []

    def compile(step: Any) -> Any:
        fn, count = compiled(way, step)
        counts.append(count)
        return fn

    update = lambda state: fsdp.step(centralize(state))  # noqa: E731
    seen = run(replace(one, update=update, compile=None if way == "eager" else compile))
    assert all(count() == 1 for count in counts)
    return seen


def centralized(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        if p.grad is not None and p.dim() > 1 and p.numel():
            p.grad -= p.grad.mean(dim=1, keepdim=True)
    optimizer.step()


ROWS = [
    *((*one, way, "by_unit") for one in ((2, "zero1"), (2, "zero3"), (4, "hsdp"))
      for way in ("eager", "aot_eager", "T.aot_eager")),
    *((2, "zero3", way, "whole") for way in ("inductor", "T.inductor")),
    (1, "zero3", "T.aot_eager", "by_unit"),  # each rank traces the same
]  # fmt: skip
FEW = [ROWS[-1], (4, "hsdp", "eager", "by_unit")]


@pytest.mark.parametrize(("ranks", "preset", "way", "loop"), marked(ROWS, FEW))
def test_the_guides_transform_runs_eagerly_and_compiled(ranks: int, preset: str, way: str, loop: str) -> None:
    one = Scenario(model=small, preset=preset, optimizer=SGD, loop=loop, steps=3, plain_update=centralized)
    found = launch(guided, (one, way), nprocs=ranks, processes=way != "eager")
    for seen, want in zip(found, plain(one, ranks), strict=True):
        alike(seen, want)  # but for sums in another order


# ---------------------------------------------------------------- shards


@pytest.mark.parametrize("key", [("dta",), "data", ("data", "model"), 0])
def test_sums_are_along_axes_of_the_mesh(key: Any) -> None:
    state = fsdp.shard({"w": torch.ones(4)}, fsdp.Spec(fsdp.local_mesh()))
    for verb in (extend.total, extend.over_shards):
        with pytest.raises(fsdp.TreeError, match=r"is no tuple of axes of the mesh, which are \['data'\]"):
            verb(state, {("data",): torch.ones(()), key: torch.ones(())})


@pytest.mark.parametrize(("ranks", "preset"), [*((2, preset) for preset in PRESETS), (4, "hsdp"), (4, "hfsdp")])
@each_rank("ranks")
def test_each_element_counts_once(ranks: int, preset: str) -> None:
    state, model = made(preset)
    state, _ = T.forward_backward(model, loss_fn)(state, batch(0, dist.get_rank()))
    state = fsdp.finish_reductions(state)
    whole = full_grads(state)
    ones, sums = {}, {}
    for axes, buffers in extend.shards(state).items():
        parts = [part for buffer in buffers for part in extend.leaf_shards(buffer)]
        ones[axes] = torch.tensor(float(sum(part.local.numel() for part in parts)))
        sums[axes] = sum((buffer.local.sum() for buffer in buffers), torch.zeros((), dtype=torch.float64))
        for leaf, start, local in parts:
            assert torch.equal(local, whole[leaf.path].reshape(-1)[start : start + local.numel()])
    assert extend.total(state, ones).item() == sum(g.numel() for g in whole.values())
    assert abs(extend.total(state, sums).item() - sum(g.sum().item() for g in whole.values())) < 1e-9  # another order
    assert [leaf.path for b in state.grads.values() for leaf, _, _ in extend.leaf_shards(b)] == [
        leaf.path for name in state.grads for leaf in state.layout.buckets[name].leaves
    ]
    gathered = {path: t for b in state.grads.values() for path, t in extend.gather_leaves(b).items()}
    assert gathered.keys() == whole.keys()
    assert all(torch.equal(gathered[path], whole[path]) for path in whole)
    half = extend.gather_leaves(state.main["blocks.0"], torch.float16)
    assert {t.dtype for t in half.values()} == {torch.float16}
    shards = extend.shards(state, state.main).items()
    main = {axes: sum((b.local.sum() for b in some), torch.zeros(())) for axes, some in shards}
    weights = fsdp.full_params(state)
    held = sum(weights[path].sum().item() for path in dict.fromkeys(state.layout.source))
    assert abs(extend.total(state, main).item() - held) < 1e-4  # in float32 here and there


@pytest.mark.parametrize("last", [True, False])
@each_rank(2)
def test_gradients_that_are_under_way_or_partial_are_not_gathered(last: bool) -> None:
    state, model = made("zero1", average="sum")
    state, _ = T.forward_backward(model, loss_fn)(state, batch(0, dist.get_rank()), last_microbatch=last)
    name = next(iter(state.grads))
    with pytest.raises(fsdp.ScheduleError, match=f"the gradients of '{name}' may be on their way still, or partial"):
        extend.gather_leaves(state.grads[name])
    twin = {k: buffer.but(buffer.local.clone()) for k, buffer in state.main.items()}
    assert extend.gather_leaves(twin[name])  # what is no gradient is
    state = fsdp.finish_reductions(state)
    found = extend.gather_leaves(state.grads[name])
    assert all(torch.equal(found[path], full_grads(state)[path]) for path in found)


@each_rank(2)
def test_gradients_by_unit_are_as_reduce_takes_them() -> None:
    state, _ = made("zero3")
    unit, paths = state.layout.by_name["tail"], {unit.name: unit.paths for unit in state.layout.units}
    grads = {path: torch.full_like(p, 2.0) for path, p in fsdp.full_params(state).items()}
    mine = {key: torch.ones(shape or ()) for key, shape in zip(unit.keys, unit.trains, strict=True)}
    whole: Any = extend.by_unit(state, "look", grads)
    one = extend.by_unit(state, "look", mine, "tail")
    assert {name: len(some) for name, some in whole.items()} == {name: len(some) for name, some in paths.items()}
    tied = dict(zip(paths["embed.weight"], whole["embed.weight"], strict=True))
    assert (tied["embed.weight"] == 4).all()  # those of both users
    assert dict(zip(paths["tail"], whole["tail"], strict=True))["tail.shift"] is None  # it is frozen
    assert [*one] == ["tail"]
    assert [g is None for g in one["tail"]] == [path == "tail.shift" for path in paths["tail"]]
    refused(
        (lambda: extend.by_unit(state, "look", {}, "tail"), "lacks"),
        (lambda: extend.by_unit(state, "look", mine, "tails"), "look: there is no unit 'tails'"),
    )


# ---------------------------------------------------------------- numbers of all ranks


@each_rank(4)
def test_numbers_are_reduced_over_any_axes() -> None:
    mesh = fsdp.local_mesh(replica=2, shard=2)
    state = fsdp.shard({"w": torch.ones(8)}, fsdp.Spec(mesh, fsdp.hsdp("replica", "shard")), fsdp.sgd(lr=0.1))
    ranks, rank = extend.ranks_of(state), dist.get_rank()
    assert (ranks.rank, ranks.index, ranks.size) == (rank, rank, 4)
    assert ranks.coordinate == {"replica": rank // 2, "shard": rank % 2}
    mine = [torch.tensor([[float(rank), 1.0]]), torch.tensor(rank)]
    for axes, others in (
        (None, [0, 1, 2, 3]), ("replica", [rank, (rank + 2) % 4]), (("shard",), [rank, rank ^ 1]), ((), [rank])
    ):  # fmt: skip
        found = [t.tolist() for t in extend.all_reduce(state, mine, "sum", axis=axes)]
        assert found == [[[float(sum(others)), float(len(others))]], sum(others)]
        assert [t.tolist() for t in mine] == [[[float(rank), 1.0]], rank]
    assert extend.all_reduce(state, mine[:1], "mean", what="means")[0].tolist() == [[1.5, 1.0]]
    (most,) = extend.all_reduce(state, mine[1:], "max")
    assert (most.item(), most.dtype) == (3, torch.int64)
    assert ranks.everyone(rank, "ranks") == [0, 1, 2, 3]
    refused(
        (lambda: extend.all_reduce(state, mine, "sum", ["data"]), "'data' is not one of 'replica', 'shard'"),
        (lambda: extend.all_reduce(state, [torch.ones(1 + ranks.index % 2)], "sum", ["shard"]), "TreeError"),
    )
    seed = extend.seeds(state, "noise")
    seeds = seed("a", 1), seed("a", 2), extend.seeds(state)("a", 1)
    assert seed("a", 1) == seeds[0]
    assert len({*seeds}) == 3
    assert len({*ranks.everyone(seeds, "seeds")}) == 1


# ---------------------------------------------------------------- changes


@pytest.mark.parametrize("preset", ["zero3", "zero1"])
@each_rank(2)
def test_a_change_consumes_the_state_and_can_be_abandoned(preset: str) -> None:
    state, model = made(preset)
    forward_backward = T.forward_backward(model, loss_fn)
    begun, _ = forward_backward(state, batch(0, dist.get_rank()))
    begun = fsdp.finish_reductions(begun)
    before = full_grads(begun)
    after = extend.change(begun, "halve()", lambda: scale(begun, 0.5))
    assert largest(full_grads(after), {path: g / 2 for path, g in before.items()}) == 0
    refused((lambda: fsdp.step(begun), "consumed by halve()"))
    fsdp.step(after)

    def fails() -> None:
        raise ValueError("stopped")

    state = fsdp.newest(state)
    refused((lambda: extend.change(state, "halve()", lambda: None), "halve(): this state has no gradients"))
    part, _ = forward_backward(state, batch(1, dist.get_rank()), last_microbatch=False)
    said = raised(lambda: extend.change(part, "halve()", lambda: None))
    assert ("not all gradients are whole" in said) == (preset == "zero1")
    other, _ = forward_backward(fsdp.newest(state), batch(1, dist.get_rank()))
    other = fsdp.finish_reductions(other)
    refused((lambda: extend.change(other, "halve()", fails), "stopped"), (lambda: fsdp.step(other), "StaleStateError"))
    again, _ = forward_backward(fsdp.newest(state), batch(1, dist.get_rank()))
    assert fsdp.step(again).steps == 2


@each_rank(2)
def test_ranks_compare_what_they_changed() -> None:
    state, model = made("zero3")
    state, _ = T.forward_backward(model, loss_fn)(state, batch(0, dist.get_rank()))
    state = extend.change(fsdp.finish_reductions(state), "scale()", lambda: None, by=1.0 + dist.get_rank())
    refused((lambda: fsdp.step(state), "changed its gradients in other ways"))


def filled(way: str, every_leaf: bool) -> Tree:
    """A step of decay in which one leaf got no gradient."""
    params = {"a": torch.ones(4, dtype=torch.float64), "b": torch.ones(6, dtype=torch.float64)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), units=["a", "b"]), fsdp.sgd(lr=0.1, weight_decay=0.5))

    def train_step(state: fsdp.State, x: torch.Tensor) -> Any:
        state = fsdp.reduce(state, {"a": x, "b": None})
        state = fsdp.finish_reductions(state)
        return fsdp.step(extend.change(state, "noise()", lambda: None, every_leaf=every_leaf)), x.sum()

    step, _ = compiled(way, train_step) if way != "eager" else (train_step, 0)
    state, _ = step(state, torch.zeros(4, dtype=torch.float64))
    return fsdp.full_params(state)


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_a_change_may_give_every_leaf_a_gradient(way: str) -> None:
    for every in (False, True):
        for found in launch(filled, (way, every), nprocs=2 if way == "eager" else 1, processes=way != "eager"):
            assert (found["a"] == 1 - 0.1 * 0.5).all()
            assert (found["b"] == (1 - 0.1 * 0.5 if every else 1)).all()


# ---------------------------------------------------------------- weights


def clamped(preset: str, way: str) -> tuple[Tree, Tree, dict[str, Any]]:
    """Steps, after each of which weights are clamped: weights, what compute sees of them, and what is said."""
    state, model = made(preset, precision=fsdp.Precision(compute=torch.float32))

    def clamp(state: fsdp.State, bound: float) -> fsdp.State:
        def work() -> None:
            for buffers in extend.shards(state, state.main).values():
                for buffer in buffers:
                    buffer.local.clamp_(-bound, bound)

        return extend.change_weights(state, "clamp()", work, bound)

    def train_step(state: fsdp.State, data: Any) -> Any:
        state, loss = whole_tree(model, state, data, True)
        return clamp(fsdp.step(state), 0.3), loss

    step, _ = compiled(way, train_step) if way != "eager" else (train_step, 0)
    for k in range(2):
        state, _ = step(state, batch(k, dist.get_rank()))
    weights = {path: p.clone() for path, p in fsdp.full_params(state).items()}
    found: dict[str, Any] = {"steps": state.steps, "between": state.between_steps}
    middle, lent = fsdp.unshard(state)
    seen = {path: p.clone() for path, p in lent.items()}
    found["middle"] = raised(lambda: clamp(middle, 1.0))
    later = clamp(state, 0.2)
    found["stale"] = raised(lambda: clamp(state, 0.1))
    found["newest"] = fsdp.newest(later).version.serial == later.version.serial
    again, _ = step(later, batch(2, dist.get_rank()))
    found["consumed"] = raised(lambda: clamp(later, 0.1))
    found["goes on"] = again.steps
    return weights, seen, found


def clamp_plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    for p in model.parameters():
        p.data.clamp_(-0.3, 0.3)


WAYS = [
    *((preset, "eager") for preset in PRESETS),
    pytest.param("zero1", "aot_eager", marks=pytest.mark.large),
    ("zero3", "T.aot_eager"),
]


@pytest.mark.parametrize(("preset", "way"), WAYS)
def test_weights_are_changed_between_steps(preset: str, way: str) -> None:
    ranks = 2 if FULL or way == "eager" else 1
    want = plain(Scenario(model=small, optimizer=SGD, plain_update=clamp_plainly), ranks)[0].weights[-1]
    for weights, seen, found in launch(clamped, (preset, way), nprocs=ranks, processes=way != "eager"):
        assert largest(weights, {path: want[path] for path in weights}) < 1e-6  # computed in float32
        assert (found["steps"], found["between"]) == (2, True)
        assert all(torch.equal(seen[path], weights[path].float()) for path in weights)
        assert "in the middle of a step" in found["middle"]
        assert "consumed by clamp()" in found["stale"]
        assert "consumed by" in found["consumed"]
        assert found["newest"]
        assert found["goes on"] == 3


@each_rank(2)
def test_weights_that_are_half_changed_are_of_no_more_use() -> None:
    state, _ = made("zero3")

    def fails() -> None:
        raise ValueError("stopped")

    def fails_late() -> None:
        next(iter(state.main.values())).local.zero_()
        fails()

    refused((lambda: extend.change_weights(state, "clamp()", fails), "stopped"))
    middle, _ = fsdp.unshard(state)  # nothing has changed: it is good
    refused(
        (lambda: extend.change_weights(fsdp.drop_gradients(middle), "clamp()", fails_late), "stopped"),
        (lambda: fsdp.unshard(middle), "clamp() was stopped by ValueError while it changed the weights"),
    )


# ---------------------------------------------------------------- gradients apart


@pytest.mark.parametrize("begun", [False, True])
@each_rank(2)
def test_gradients_apart_leave_those_that_are_there(begun: bool) -> None:
    state, model = made("zero3")
    forward_backward = T.forward_backward(model, loss_fn)
    penalty = T.forward_backward(model, lambda model, data: 3.0 * loss_fn(model, data))
    mine, other = batch(0, dist.get_rank()), batch(1, dist.get_rank())
    want, _ = penalty(state, other)
    want_other = full_grads(fsdp.finish_reductions(want))
    want, _ = forward_backward(fsdp.drop_gradients(want), mine)
    want_mine = full_grads(fsdp.finish_reductions(want))
    state = fsdp.drop_gradients(want)
    if begun:
        state, _ = forward_backward(state, mine)
    state, loss, grads = extend.separate_gradients(state, "beside", lambda state: penalty(state, other))
    assert largest(full_grads(state._evolve(grads=grads)), want_other) < 1e-12
    assert loss.dim() == 0
    if begun:
        refused((lambda: forward_backward(state, mine), "would count twice"))
    else:
        assert not state.grads
        state, _ = forward_backward(state, mine)
    assert largest(full_grads(fsdp.finish_reductions(state)), want_mine) < 1e-12
    assert fsdp.step(state).steps == 1


COMPILED = {
    "apart": "ScheduleError: penalty keeps gradients apart, which a compiled step cannot",
    "seeds": "ScheduleError: seeds: reads state.rng on the host, which a compiled step cannot",
    "weights": "ScheduleError: clamp() changes weights, and this State is in the middle of a step",
}


@pytest.mark.parametrize("which", COMPILED)
def test_what_a_compiled_step_cannot_do_is_said(which: str) -> None:
    state, _ = made("zero3")

    def train_step(state: fsdp.State, data: Any) -> Any:
        if which == "seeds":
            extend.seeds(state, "noise")
        if which == "weights":
            state, _ = fsdp.unshard(state, "tail")
            return extend.change_weights(state, "clamp()", lambda: None), data[0].sum()
        return extend.separate_gradients(state, "penalty", lambda state: (state, data[0].sum()))[0], data[0].sum()

    step = torch.compile(train_step, fullgraph=True, backend="aot_eager")
    assert raised(lambda: step(state, batch(0, dist.get_rank()))).startswith(COMPILED[which])


def by_hand(x: torch.Tensor) -> tuple[torch.Tensor, str]:
    return x + 1, "graph"


@extend.traced_as(by_hand)
def by_kernel(x: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Adds 1."""
    return torch.from_numpy(x.numpy() + 1), "kernel"


def test_a_function_has_a_way_of_its_own_in_a_graph() -> None:
    x, ways = torch.zeros(2), []

    def step(state: fsdp.State, x: torch.Tensor) -> torch.Tensor:
        y, way = by_kernel(x)
        ways.append(way)
        return y

    assert by_kernel.__doc__ == "Adds 1."
    assert by_kernel(x)[1] == "kernel"
    assert torch.compile(by_kernel, fullgraph=True, backend="eager")(x)[1] == "graph"
    fsdp.lower(step, made("zero3")[0], x)
    assert ways == ["graph"]


# ---------------------------------------------------------------- sessions


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@each_rank(2)
def test_a_session_drives_what_a_third_party_has() -> None:
    """A model driven by hand through a session, whose order is other than the layout's; beside `forward_backward`."""
    mesh = fsdp.local_mesh()  # first: it starts the process group, which other tests may not have done
    torch.manual_seed(0)
    module = Layers().double()
    params, model = fsdp.functionalize(module)
    units = ["layers.2", "layers.0"]  # layers.1 is used by rank 1 only

    def used() -> list[str]:
        return [units[0], "layers.1", units[1]] if dist.get_rank() else units

    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    order = ("layers.2", "layers.1", "layers.0", "layers.0", "layers.1", "layers.2")

    def step(state: fsdp.State) -> tuple[fsdp.State, torch.Tensor, int]:
        session = extend.Session(state, "by hand", order)
        state = session.begin(state)
        h, pullbacks = x, {}
        for unit in used():
            state, w = fsdp.unshard(state, unit)
            h, pullbacks[unit] = T.vjp(lambda w, h: F.linear(h, w["weight"], w["bias"]).tanh(), w, h)
            state = fsdp.release(state, unit)
        session.turn(state, last_microbatch=True)
        session.expect(state, tuple(used()), used())
        dh = torch.ones_like(h)
        for unit in reversed(used()):
            state, w = fsdp.unshard(state, unit)
            dw, dh = pullbacks.pop(unit)(w, dh)
            state = fsdp.reduce(state, dw, unit)
            state = fsdp.release(state, unit)
        session.all_done(state)
        session.end(state, tuple(used()), tuple(reversed(used())))
        return state, h.sum(), session.number

    def total(model: Any, x: torch.Tensor) -> torch.Tensor:
        for unit in used():
            x = model.get_submodule(unit)(x).tanh()
        return x.sum()

    state, other = (fsdp.shard(params, fsdp.Spec(mesh), fsdp.sgd(lr=0.1)) for _ in range(2))
    forward_backward = T.forward_backward(model, total)
    for _ in range(3):
        state, loss, number = step(state)
        other, expected = forward_backward(other, x)
        assert number == 0
        assert (loss - expected).abs().item() < 1e-12
        uses = [use.unit for use in state.cursor.plan.uses]
        state, other = fsdp.step(state), fsdp.step(other)
    assert uses == [*order]
    assert largest(fsdp.full_params(state), fsdp.full_params(other)) < 1e-12

    session = extend.Session(state, "look")
    looked, _ = fsdp.unshard(state, "layers.2")
    looked = fsdp.release(looked, "layers.2")
    assert session.rest(looked) is state
    assert state.between_steps
    assert state.cursor.idle
    refused((lambda: fsdp.release(looked, "layers.2"), "look()"))
    refused((lambda: session.unshard(state, ["layers.9"]), "Session.unshard: there is no unit 'layers.9'"))
    begun, _, _ = step(state)
    session = extend.Session(begun, "look")
    assert session.rest(begun) is begun
    assert session.number == 1
    refused((lambda: extend.Session(looked, "look"), "StaleStateError", "look: "))


@pytest.mark.parametrize(
    ("preset", "said"), [("ddp", "StaleStateError: unshard: somebody has changed it."), ("zero3", "")]
)
@each_rank(2)
def test_weights_that_were_changed_spoil_a_state_that_owns_them(preset: str, said: str) -> None:
    state, _ = made(preset)
    extend.Session(state, "spoil").spoil(state, ["blocks.0"], "somebody has changed it.")
    assert raised(lambda: fsdp.unshard(state)) == said


@each_rank(2)
def test_a_lineage_is_one_object() -> None:
    state, model = made("zero3")
    mine = extend.lineage_of(state)
    after, _ = T.forward_backward(model, loss_fn)(state, on(state, batch(0, dist.get_rank())))
    new = fsdp.step(after)
    other = fsdp.replace_params(new, fsdp.full_params(new))
    assert extend.lineage_of(new) is mine
    assert (mine.commits, mine.broken) == (1, "")
    assert extend.lineage_of(other) is not mine
