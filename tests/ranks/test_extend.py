"""What transforms are made of: shards that count once, changes to gradients and weights, gradients apart, sessions."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from support.commands import code_under
from support.driven import raised
from support.presets import PRESETS
from support.problems import batch, by_unit, full_grads, largest, loss_fn, mesh_and_placement, net, on, whole_tree
from support.ranks import launch
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


def zeroed(preset: str) -> tuple[bool, bool]:
    """Whether gradients were there, and weights are what they were after a step without any, unfinished reductions or
    not."""
    state, model = made(preset)
    before = fsdp.full_params(state)
    state, _ = by_unit(model, state, batch(0, dist.get_rank()), True)
    there = bool(state.grads)

    def work() -> None:
        for buffers in extend.shards(state).values():
            for buffer in buffers:
                buffer.local.zero_()

    after = fsdp.full_params(fsdp.step(extend.change(state, "zeroed()", work)))
    return there, all(torch.equal(before[path], leaf) for path, leaf in after.items())


@pytest.mark.parametrize("preset", ["zero3", "ddp"])
def test_no_reduction_that_is_under_way_overwrites_a_change(preset: str) -> None:
    assert launch(zeroed, (preset,), nprocs=2) == [(True, True)] * 2


def centralized(preset: str, way: str, loop: Any) -> tuple[list[float], Tree, int]:
    centralize = of_the_guide()
    state, model = made(preset)

    def train_step(state: fsdp.State, data: Any) -> Any:
        state, loss = loop(model, state, data, True)
        return fsdp.step(centralize(state)), loss

    step, count = compiled(way, train_step) if way != "eager" else (train_step, lambda: 1)
    losses = []
    for k in range(3):
        state, loss = step(state, batch(k, dist.get_rank()))
        losses.append(loss.item())
    return losses, fsdp.full_params(state), count()


def plain(ranks: int) -> tuple[list[list[float]], Tree]:
    """The plain module, its gradients centralized by hand: losses by rank, and weights."""
    model = net(depth=BLOCKS)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for k in range(3):
        found = [loss_fn(model, batch(k, rank)) for rank in range(ranks)]
        for one, loss in zip(losses, found, strict=True):
            one.append(loss.item())
        trained = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(torch.stack(found).mean(), trained)
        with torch.no_grad():
            for p, g in zip(trained, grads, strict=True):
                p.sub_(0.1 * (g - g.mean(dim=1, keepdim=True) if g.dim() > 1 and g.numel() else g))
    return losses, {path: p.detach() for path, p in model.named_parameters(remove_duplicate=False)}


ROWS = [
    (*one, way) for one in ((2, "zero1"), (2, "zero3"), (4, "hsdp")) for way in ("eager", "aot_eager", "T.aot_eager")
]
FEW = [(2, "zero3", "T.aot_eager"), (4, "hsdp", "eager")]


@pytest.mark.parametrize(("ranks", "preset", "way"), marked(ROWS, FEW))
def test_the_guides_transform_runs_eagerly_and_compiled(ranks: int, preset: str, way: str) -> None:
    losses, weights = plain(ranks)
    for mine, (seen, found, count) in zip(
        losses, launch(centralized, (preset, way, by_unit), nprocs=ranks, processes=way != "eager"), strict=True
    ):
        assert count == 1
        torch.testing.assert_close(seen, mine, rtol=1e-9, atol=1e-9)  # sums in another order
        assert largest(found, {path: weights[path] for path in found}) < 1e-9


@pytest.mark.large
@pytest.mark.parametrize("way", ["inductor", pytest.param("T.inductor", marks=pytest.mark.large)])
def test_the_guides_transform_runs_in_inductors_code(way: str) -> None:
    losses, weights = plain(2)
    for mine, (seen, found, count) in zip(
        losses, launch(centralized, ("zero3", way, whole_tree), nprocs=2, processes=True), strict=True
    ):
        assert count == 1
        torch.testing.assert_close(seen, mine, rtol=1e-9, atol=1e-9)
        assert largest(found, {path: weights[path] for path in found}) < 1e-9


# ---------------------------------------------------------------- shards


def counted(preset: str) -> dict[str, Any]:
    state, model = made(preset)
    state, _ = T.forward_backward(model, loss_fn)(state, batch(0, dist.get_rank()))
    state = fsdp.finish_reductions(state)
    whole = full_grads(state)
    found: dict[str, Any] = {"elements": sum(g.numel() for g in whole.values())}
    ones, sums = {}, {}
    for axes, buffers in extend.shards(state).items():
        parts = [part for buffer in buffers for part in extend.leaf_shards(buffer)]
        ones[axes] = torch.tensor(float(sum(part.local.numel() for part in parts)))
        sums[axes] = sum((buffer.local.sum() for buffer in buffers), torch.zeros((), dtype=torch.float64))
    found["once"] = extend.total(state, ones).item()
    found["sum"] = extend.total(state, sums).item() - sum(g.sum().item() for g in whole.values())
    found["same"] = all(
        torch.equal(local, whole[leaf.path].reshape(-1)[start : start + local.numel()])
        for buffers in extend.shards(state).values() for buffer in buffers
        for leaf, start, local in extend.leaf_shards(buffer)
    )  # fmt: skip
    found["leaves"] = [leaf.path for b in state.grads.values() for leaf, _, _ in extend.leaf_shards(b)] == [
        leaf.path for name in state.grads for leaf in state.layout.buckets[name].leaves
    ]
    gathered = {path: t for b in state.grads.values() for path, t in extend.gather_leaves(b).items()}
    found["gathered"] = gathered.keys() == whole.keys() and all(torch.equal(gathered[p], whole[p]) for p in whole)
    half = extend.gather_leaves(state.main["blocks.0"], torch.float16)
    found["dtype"] = {t.dtype for t in half.values()} == {torch.float16}
    main = {axes: sum((b.local.sum() for b in some), torch.zeros(())) for axes, some in
            extend.shards(state, state.main).items()}  # fmt: skip
    weights = fsdp.full_params(state)
    held = {path: weights[path] for path in dict.fromkeys(state.layout.source)}
    found["main"] = extend.total(state, main).item() - sum(p.sum().item() for p in held.values())
    return found


@pytest.mark.parametrize("key", [("dta",), "data", ("data", "model"), 0])
def test_sums_are_along_axes_of_the_mesh(key: Any) -> None:
    state = fsdp.shard({"w": torch.ones(4)}, fsdp.Spec(fsdp.local_mesh()))
    for verb in (extend.total, extend.over_shards):
        with pytest.raises(fsdp.TreeError, match=r"is no tuple of axes of the mesh, which are \['data'\]"):
            verb(state, {("data",): torch.ones(()), key: torch.ones(())})


@pytest.mark.parametrize(("ranks", "preset"), [*((2, preset) for preset in PRESETS), (4, "hsdp"), (4, "hfsdp")])
def test_each_element_counts_once(ranks: int, preset: str) -> None:
    for found in launch(counted, (preset,), nprocs=ranks):
        assert found["once"] == found["elements"]
        assert abs(found["sum"]) < 1e-9  # added up in another order
        assert abs(found["main"]) < 1e-4  # in float32 here and there
        assert all(found[what] for what in ("same", "leaves", "gathered", "dtype"))


def by_units() -> list[Any]:
    state, model = made("zero3")
    grads = {path: torch.full_like(p, 2.0) for path, p in fsdp.full_params(state).items()}
    one = {key: torch.ones(shape or ()) for key, shape in
           zip(state.layout.by_name["tail"].keys, state.layout.by_name["tail"].trains, strict=True)}  # fmt: skip
    found: list[Any] = [extend.by_unit(state, "look", grads), extend.by_unit(state, "look", one, "tail")]
    paths = {unit.name: unit.paths for unit in state.layout.units}
    del model
    return [*found, paths, raised(lambda: extend.by_unit(state, "look", {}, "tail")),
            raised(lambda: extend.by_unit(state, "look", one, "tails"))]  # fmt: skip


def test_gradients_by_unit_are_as_reduce_takes_them() -> None:
    for whole, one, paths, wrong, unknown in launch(by_units, nprocs=2):
        assert {name: len(some) for name, some in whole.items()} == {name: len(some) for name, some in paths.items()}
        tied = dict(zip(paths["embed.weight"], whole["embed.weight"], strict=True))
        assert (tied["embed.weight"] == 4).all()  # those of both users
        assert dict(zip(paths["tail"], whole["tail"], strict=True))["tail.shift"] is None  # it is frozen
        assert [*one] == ["tail"]
        assert [g is None for g in one["tail"]] == [path == "tail.shift" for path in paths["tail"]]
        assert "lacks" in wrong
        assert "look: there is no unit 'tails'" in unknown


# ---------------------------------------------------------------- numbers of all ranks


def reduced() -> dict[str, Any]:
    mesh = fsdp.local_mesh(replica=2, shard=2)
    state = fsdp.shard({"w": torch.ones(8)}, fsdp.Spec(mesh, fsdp.hsdp("replica", "shard")), fsdp.sgd(lr=0.1))
    ranks = extend.ranks_of(state)
    mine = [torch.tensor([[float(ranks.rank), 1.0]]), torch.tensor(ranks.rank)]
    found: dict[str, Any] = {"rank": ranks.rank, "place": ranks.coordinate, "index": ranks.index, "size": ranks.size}
    for name, axes in (("all", None), ("replica", "replica"), ("shard", ("shard",)), ("none", ())):
        found[name] = [t.tolist() for t in extend.all_reduce(state, mine, "sum", axis=axes)]
    found["mean"] = extend.all_reduce(state, mine[:1], "mean", what="means")[0].tolist()
    found["kept"] = [t.tolist() for t in mine]
    (largest,) = extend.all_reduce(state, mine[1:], "max")
    found["largest"] = largest.item(), largest.dtype
    found["everyone"] = ranks.everyone(ranks.rank, "ranks")
    found["unknown"] = raised(lambda: extend.all_reduce(state, mine, "sum", ["data"]))
    found["shapes"] = raised(lambda: extend.all_reduce(state, [torch.ones(1 + ranks.index % 2)], "sum", ["shard"]))
    seed = extend.seeds(state, "noise")
    found["seeds"] = seed("a", 1), seed("a", 1), seed("a", 2), extend.seeds(state)("a", 1)
    return found


def test_numbers_are_reduced_over_any_axes() -> None:
    found = launch(reduced, nprocs=4)
    for rank, one in enumerate(found):
        other = {"replica": (rank + 2) % 4, "shard": rank ^ 1}
        assert (one["rank"], one["index"], one["size"]) == (rank, rank, 4)
        assert one["place"] == {"replica": rank // 2, "shard": rank % 2}
        assert one["all"] == [[[6.0, 4.0]], 6]
        assert one["replica"] == [[[float(rank + other["replica"]), 2.0]], rank + other["replica"]]
        assert one["shard"] == [[[float(rank + other["shard"]), 2.0]], rank + other["shard"]]
        assert one["none"] == one["kept"] == [[[float(rank), 1.0]], rank]
        assert one["mean"] == [[1.5, 1.0]]
        assert one["largest"] == (3, torch.int64)
        assert one["everyone"] == [0, 1, 2, 3]
        assert "'data' is not one of 'replica', 'shard'" in one["unknown"]
        assert "TreeError" in one["shapes"]
        first, again, second, other_seed = one["seeds"]
        assert first == again
        assert len({first, second, other_seed}) == 3
    assert len({one["seeds"] for one in found}) == 1


# ---------------------------------------------------------------- changes


def changed(preset: str) -> dict[str, Any]:
    state, model = made(preset)
    found: dict[str, Any] = {}
    begun, _ = T.forward_backward(model, loss_fn)(state, batch(0, dist.get_rank()))
    begun = fsdp.finish_reductions(begun)
    before = full_grads(begun)

    def halve() -> None:
        for buffers in extend.shards(begun).values():
            for buffer in buffers:
                buffer.local.mul_(0.5)

    after = extend.change(begun, "halve()", halve)
    found["grads"] = largest(full_grads(after), {path: g / 2 for path, g in before.items()})
    found["stale"] = raised(lambda: fsdp.step(begun))
    fsdp.step(after)

    def fails() -> None:
        raise ValueError("stopped")

    state = fsdp.newest(state)
    found["none"] = raised(lambda: extend.change(state, "halve()", halve))
    begun, _ = T.forward_backward(model, loss_fn)(state, batch(1, dist.get_rank()), last_microbatch=False)
    found["partial"] = raised(lambda: extend.change(begun, "halve()", halve))
    state = fsdp.newest(state)
    begun, _ = T.forward_backward(model, loss_fn)(state, batch(1, dist.get_rank()))
    begun = fsdp.finish_reductions(begun)
    found["raised"] = raised(lambda: extend.change(begun, "halve()", fails))
    found["abandoned"] = raised(lambda: fsdp.step(begun))
    begun, _ = T.forward_backward(model, loss_fn)(state, batch(1, dist.get_rank()))
    found["again"] = fsdp.step(begun).steps
    return found


@pytest.mark.parametrize("preset", ["zero3", "zero1"])
def test_a_change_consumes_the_state_and_can_be_abandoned(preset: str) -> None:
    for found in launch(changed, (preset,), nprocs=2):
        assert found["grads"] == 0
        assert "consumed by halve()" in found["stale"]
        assert "stopped" in found["raised"]
        assert "StaleStateError" in found["abandoned"]
        assert found["again"] == 2
        assert "halve(): this state has no gradients" in found["none"]
        assert ("not all gradients are whole" in found["partial"]) == (preset == "zero1")


def other_numbers() -> str:
    state, model = made("zero3")
    state, _ = T.forward_backward(model, loss_fn)(state, batch(0, dist.get_rank()))
    state = extend.change(fsdp.finish_reductions(state), "scale()", lambda: None, by=1.0 + dist.get_rank())
    return raised(lambda: fsdp.step(state))


def test_ranks_compare_what_they_changed() -> None:
    for said in launch(other_numbers, nprocs=2):
        assert "changed its gradients in other ways" in said


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


def plain_clamped(ranks: int) -> Tree:
    model = net(depth=BLOCKS)
    for k in range(2):
        trained = [p for p in model.parameters() if p.requires_grad]
        grads = [torch.autograd.grad(loss_fn(model, batch(k, rank)), trained) for rank in range(ranks)]
        with torch.no_grad():
            for p, *some in zip(trained, *grads, strict=True):
                p.sub_(0.1 * torch.stack(some).mean(0))
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)
    return {path: p.detach() for path, p in model.named_parameters(remove_duplicate=False)}


WAYS = [
    *((preset, "eager") for preset in PRESETS),
    pytest.param("zero1", "aot_eager", marks=pytest.mark.large),
    ("zero3", "T.aot_eager"),
]


@pytest.mark.parametrize(("preset", "way"), WAYS)
def test_weights_are_changed_between_steps(preset: str, way: str) -> None:
    ranks = 2 if FULL or way == "eager" else 1
    want = plain_clamped(ranks)
    for weights, seen, found in launch(clamped, (preset, way), nprocs=ranks, processes=way != "eager"):
        assert largest(weights, {path: want[path] for path in weights}) < 1e-6  # computed in float32
        assert (found["steps"], found["between"]) == (2, True)
        assert all(torch.equal(seen[path], weights[path].float()) for path in weights)
        assert "in the middle of a step" in found["middle"]
        assert "consumed by clamp()" in found["stale"]
        assert "consumed by" in found["consumed"]
        assert found["newest"]
        assert found["goes on"] == 3


def half_changed() -> list[str]:
    state, _ = made("zero3")

    def fails() -> None:
        raise ValueError("stopped")

    def fails_late() -> None:
        next(iter(state.main.values())).local.zero_()
        raise ValueError("stopped")

    said = [raised(lambda: extend.change_weights(state, "clamp()", fails))]
    state, _ = fsdp.unshard(state)  # nothing has changed: it is good
    said.append(raised(lambda: extend.change_weights(fsdp.drop_gradients(state), "clamp()", fails_late)))
    said.append(raised(lambda: fsdp.unshard(state)))
    return said


def test_weights_that_are_half_changed_are_of_no_more_use() -> None:
    for first, late, after in launch(half_changed, nprocs=2):
        assert "stopped" in first
        assert "stopped" in late
        assert "clamp() was stopped by ValueError while it changed the weights" in after


# ---------------------------------------------------------------- gradients apart


def beside(begun: bool) -> dict[str, Any]:
    state, model = made("zero3")
    forward_backward = T.forward_backward(model, loss_fn)
    penalty = T.forward_backward(model, lambda model, data: 3.0 * loss_fn(model, data))
    mine, other = batch(0, dist.get_rank()), batch(1, dist.get_rank())
    found: dict[str, Any] = {}
    want, _ = penalty(state, other)
    want_other = full_grads(fsdp.finish_reductions(want))
    want, _ = forward_backward(fsdp.drop_gradients(want), mine)
    want_mine = full_grads(fsdp.finish_reductions(want))
    state = fsdp.drop_gradients(want)
    if begun:
        state, _ = forward_backward(state, mine)
    state, loss, grads = extend.separate_gradients(state, "beside", lambda state: penalty(state, other))
    found["apart"] = largest(full_grads(state._evolve(grads=grads)), want_other)
    found["loss"] = loss.dim()
    if not begun:
        found["none"] = not state.grads
        state, _ = forward_backward(state, mine)
    else:
        found["none"] = "would count twice" in raised(lambda: forward_backward(state, mine))
    found["kept"] = largest(full_grads(fsdp.finish_reductions(state)), want_mine)
    found["steps"] = fsdp.step(state).steps
    return found


@pytest.mark.parametrize("begun", [False, True])
def test_gradients_apart_leave_those_that_are_there(begun: bool) -> None:
    for found in launch(beside, (begun,), nprocs=2):
        assert found["apart"] < 1e-12
        assert found["kept"] < 1e-12
        assert found["none"]
        assert (found["loss"], found["steps"]) == (0, 1)


def refused(which: str) -> str:
    state, _ = made("zero3")

    def train_step(state: fsdp.State, data: Any) -> Any:
        if which == "seeds":
            extend.seeds(state, "noise")
        if which == "weights":
            state, _ = fsdp.unshard(state, "tail")
            return extend.change_weights(state, "clamp()", lambda: None), data[0].sum()
        return extend.separate_gradients(state, "penalty", lambda state: (state, data[0].sum()))[0], data[0].sum()

    step = torch.compile(train_step, fullgraph=True, backend="aot_eager")
    return raised(lambda: step(state, batch(0, dist.get_rank())))


def test_what_a_compiled_step_cannot_do_is_said() -> None:
    for said in launch(refused, ("apart",), nprocs=2):
        assert said.startswith("ScheduleError: penalty keeps gradients apart, which a compiled step cannot")
    for said in launch(refused, ("seeds",), nprocs=2):
        assert said.startswith("ScheduleError: seeds: reads state.rng on the host, which a compiled step cannot")
    for said in launch(refused, ("weights",), nprocs=2):
        assert said.startswith("ScheduleError: clamp() changes weights, and this State is in the middle of a step")


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


def driven() -> dict[str, Any]:
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

    found: dict[str, Any] = {}
    state = fsdp.shard(params, fsdp.Spec(mesh), fsdp.sgd(lr=0.1))
    other = fsdp.shard(params, fsdp.Spec(mesh), fsdp.sgd(lr=0.1))
    forward_backward = T.forward_backward(model, total)
    found["numbers"], found["loss"], found["uses"] = [], [], []
    for _ in range(3):
        state, loss, number = step(state)
        other, expected = forward_backward(other, x)
        found["numbers"].append(number)
        found["loss"].append((loss - expected).abs().item())
        found["uses"].append([use.unit for use in state.cursor.plan.uses])
        state, other = fsdp.step(state), fsdp.step(other)
    found["weights"] = largest(fsdp.full_params(state), fsdp.full_params(other))

    session = extend.Session(state, "look")
    looked, _ = fsdp.unshard(state, "layers.2")
    looked = fsdp.release(looked, "layers.2")
    found["rest"] = session.rest(looked) is state and state.between_steps and state.cursor.idle
    found["consumed"] = raised(lambda: fsdp.release(looked, "layers.2"))
    begun, _, _ = step(state)
    session = extend.Session(begun, "look")
    found["middle"] = session.rest(begun) is begun
    found["second"] = session.number
    found["stale"] = raised(lambda: extend.Session(looked, "look"))
    return found


def test_a_session_drives_what_a_third_party_has() -> None:
    for found in launch(driven, nprocs=2):
        assert found["numbers"] == [0, 0, 0]
        assert max(found["loss"]) < 1e-12
        assert found["weights"] < 1e-12
        assert found["uses"][-1] == ["layers.2", "layers.1", "layers.0", "layers.0", "layers.1", "layers.2"]
        assert found["rest"]
        assert "look()" in found["consumed"]
        assert found["middle"]
        assert found["second"] == 1
        assert "StaleStateError" in found["stale"]
        assert "look: " in found["stale"]


def spoilt(preset: str) -> str:
    state, _ = made(preset)
    session = extend.Session(state, "spoil")
    session.spoil(state, ["blocks.0"], "somebody has changed it.")
    return raised(lambda: fsdp.unshard(state))


def test_weights_that_were_changed_spoil_a_state_that_owns_them() -> None:
    assert launch(spoilt, ("ddp",), nprocs=2) == ["StaleStateError: unshard: somebody has changed it."] * 2
    assert launch(spoilt, ("zero3",), nprocs=2) == [""] * 2


def lineages() -> list[bool]:
    state, model = made("zero3")
    mine = extend.lineage_of(state)
    after, _ = T.forward_backward(model, loss_fn)(state, on(state, batch(0, dist.get_rank())))
    new = fsdp.step(after)
    other = fsdp.replace_params(new, fsdp.full_params(new))
    return [extend.lineage_of(new) is mine, mine.commits == 1, mine.broken == "", extend.lineage_of(other) is not mine]


def test_a_lineage_is_one_object() -> None:
    assert launch(lineages, nprocs=2) == [[True] * 4] * 2
