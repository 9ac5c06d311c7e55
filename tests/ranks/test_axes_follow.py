"""What follows of leaves along axes of the model's own: each element counts once, and a wrong rule is found."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from support import tensor_parallel as cut
from support.driven import raised, refused
from support.ranks import by_rank
from support.tables import FULL

import functional_fsdp as fsdp
from functional_fsdp import simulate
from functional_fsdp import transforms as T
from functional_fsdp.transforms import collectives as C

Tree = dict[str, torch.Tensor]
MATRICES = {f"*.{name}.weight": "matrix" for name in ("qkv", "out", "up", "down")}


def made(sequence: bool = True, optimizer: Any = None, own: Any = None, **more: Any) -> tuple[Any, fsdp.State, Any]:
    mesh = fsdp.local_mesh()
    spec = fsdp.Spec(mesh, own=own or cut.own(sequence), **more)
    params, model = fsdp.functionalize(cut.cut(mesh["tp"], sequence), spec)
    return mesh, fsdp.shard(params, spec, optimizer or fsdp.adamw(lr=0.01)), model


def stepped(state: fsdp.State, model: Any, mesh: Any, steps: int = 1) -> fsdp.State:
    forward_backward = T.forward_backward(model, cut.loss_fn)
    for step in range(steps):
        state, _ = forward_backward(state, cut.batch(step, mesh.get_local_rank("data")))
        state = fsdp.step(state)
    return state


# ---------------------------------------------------------------- each element once


def counted() -> tuple[list[float], list[float]]:
    mesh, state, model = made()
    state, _ = T.forward_backward(model, cut.loss_fn)(state, cut.batch(0, mesh.get_local_rank("data")))
    found = []
    for ord in (1, 2, inf):
        state, norm = T.global_norm(state, ord)
        found.append(norm.item())
    state, of_leaf = T.norms(state)
    state, of_weights = T.norms(state, state.main)
    state, product = T.dot(state, state.grads, state.main)
    mine = fsdp.local_shards(state, unique=True).values()
    state, square = fsdp.psum(state, sum(part.square().sum() for part in mine), ("data", "tp"))
    names = ("embed.weight", "blocks.1.attention.qkv.weight", "norm.weight", "blocks.0.mlp.down.bias")
    leaves = [found[name].item() for found in (of_leaf, of_weights) for name in names]
    return [*found, product.item(), square.item()], leaves


def test_norms_products_and_sums_count_each_element_once() -> None:
    model = cut.plain()
    torch.stack([cut.loss_fn(model, cut.batch(0, rank)) for rank in range(2)]).mean().backward()
    named = dict(model.named_parameters())
    grads = [p.grad for p in named.values() if p.grad is not None]
    want = [torch.nn.utils.get_total_norm(grads, ord).item() for ord in (1, 2, inf)]
    want += [sum(float((p.grad * p.detach()).sum()) for p in named.values() if p.grad is not None)]
    want += [sum(float(p.detach().square().sum()) for p in named.values())]
    names = ("embed.weight", "blocks.1.attention.qkv.weight", "norm.weight", "blocks.0.mlp.down.bias")
    leaves = [float(t.norm()) for name in names if (t := named[name].grad) is not None]
    leaves += [float(named[name].detach().norm()) for name in names]
    with simulate(data=2, tp=2) as ranks:
        for found, of_leaves in by_rank(ranks(counted)):
            assert found == pytest.approx(want, abs=1e-10)
            assert of_leaves == pytest.approx(leaves, abs=1e-10)


class Mlp(torch.nn.Module):
    """Two layers that are cut along an axis, and one that is not."""

    def __init__(self, tp: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tp = tp
        self.stem, self.up, self.down = (
            torch.nn.Linear(n, m, dtype=torch.float64) for n, m in ((3, 4), (4, 8), (8, 2))
        )

    def part(self, stem: Any, up: Any, down: Any, x: torch.Tensor) -> torch.Tensor:
        h = stem(x)
        h = down(up(h if self.tp is None else C.pvary(h, self.tp)).tanh())
        return h if self.tp is None else C.psum(h, self.tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.stem, self.up, lambda h: F.linear(h, self.down.weight), x).square().sum()


def by_sample(by_hand: bool, own: Any) -> Any:
    mesh = fsdp.local_mesh()
    rules = {"up.*": ("tp", 0), "down.weight": ("tp", 1), "*": own}
    spec = fsdp.Spec(mesh, own=rules, trainable={"down.bias": False}, schedule=fsdp.Schedule(order="recorded"))
    params, model = fsdp.functionalize(Mlp(mesh["tp"]), spec)
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))
    given: Any = (model, lambda m, x: m(x))
    if by_hand:
        units = ("stem", "up", "down")

        def all_of(w: Any, _: Any, x: torch.Tensor) -> torch.Tensor:
            stem, up = (fsdp.bind(getattr(model, unit), w[unit]) for unit in units[:2])
            return model.part(stem, up, lambda h: F.linear(h, w["down"]["weight"]), x).square().sum()

        given = ({units: all_of},)
    x = torch.arange(12.0, dtype=torch.float64).view(4, 3).sin() * (1 + mesh.get_local_rank("data"))
    state, (_, norms) = T.per_sample_norms(*given, chunk=3)(state, x)
    state, _ = T.clipped_gradients(*given, max_norm=0.5)(state, x)
    return norms, fsdp.full_params(fsdp.step(state)), mesh.get_local_rank("data")


@pytest.mark.parametrize("by_hand", [False, True])
def test_norms_by_sample_are_those_of_whole_leaves(by_hand: bool) -> None:
    model = Mlp(None)
    trained = {name: p for name, p in model.named_parameters() if name != "down.bias"}
    x = torch.arange(12.0, dtype=torch.float64).view(4, 3).sin()
    grads = [torch.autograd.grad(model(row), [*trained.values()]) for row in torch.cat((x, 2 * x))]
    norms = torch.stack([torch.cat([grad.flatten() for grad in some]).norm() for some in grads])
    want = {
        name: p.detach()
        - 0.1 * sum(some[i] * min(1, 0.5 / float(norm)) for some, norm in zip(grads, norms, strict=True)) / 8
        for i, (name, p) in enumerate(trained.items())
    }
    with simulate(data=2, tp=2) as ranks:
        for found, weights, row in by_rank(ranks(by_sample, by_hand, "tp")):
            torch.testing.assert_close(found, norms[4 * row : 4 * row + 4], rtol=0, atol=1e-12)
            for name, leaf in want.items():
                torch.testing.assert_close(weights[name], leaf, rtol=0, atol=1e-12)
        with pytest.raises(
            fsdp.LaunchError, match=r"the gradient of 'stem.weight' is not of its own samples: along 'tp'"
        ):
            ranks(by_sample, by_hand, fsdp.Along("tp", grads="sum"))


def spoilt(leaf: str) -> tuple[bool, str, int, int]:
    mesh, state, model = made()
    state, _ = T.forward_backward(model, cut.loss_fn)(state, cut.batch(0, mesh.get_local_rank("data")))
    state = fsdp.finish_reductions(state)
    if mesh.get_rank() == 3:
        fsdp.local_shards(state, "grads")[leaf].fill_(float("nan"))
    state, bad = T.any_nonfinite(state)
    state, found = T.find_nonfinite(state)
    (one,) = found
    return bool(bad), one.leaf, one.rank, int(T.skip_nonfinite(fsdp.step)(state).count)


@pytest.mark.parametrize("leaf", ["blocks.1.mlp.up.weight", "blocks.1.mlp.down.bias"])  # cut; equal, but for the fault
def test_a_nan_on_one_rank_is_found_and_stops_every_rank(leaf: str) -> None:
    with simulate(data=2, tp=2) as ranks:
        assert set(by_rank(ranks(spoilt, leaf))) == {(True, leaf, 3, 0)}


def orthogonal(whole: bool) -> Any:
    optimizer = fsdp.partition({"matrix": fsdp.muon(lr=0.02, ns_dtype=torch.float64), "default": fsdp.adamw(lr=0.01)})
    if not whole:
        mesh, state, model = made(True, optimizer, labels=MATRICES)
        return fsdp.full_params(stepped(state, model, mesh, 3))
    params, model = fsdp.functionalize(cut.plain())
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), labels=MATRICES), optimizer)
    forward_backward = T.forward_backward(model, lambda m, rows: torch.stack([m(*row) for row in rows]).mean())
    for step in range(3):
        state, _ = forward_backward(state, [cut.batch(step, rank) for rank in range(2)])
        state = fsdp.step(state)
    return fsdp.full_params(state)


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.large)])
def test_muon_has_whole_matrices(tp: int) -> None:
    want = orthogonal(True)
    with simulate(data=2, tp=tp) as ranks:
        for found in ranks(orthogonal, False).get():
            for name in want:
                torch.testing.assert_close(found[name], want[name], rtol=0, atol=1e-9)


def kept() -> tuple[Tree, Tree, Tree]:
    mesh, state, model = made()
    state = stepped(state, model, mesh)
    told = fsdp.optimizer_state(state)
    again = fsdp.load_optimizer_state(state, told)
    moments = [
        {path: one["mean"] for path, one in some.items() if path} for some in (told, fsdp.optimizer_state(again))
    ]
    return moments[0], moments[1], fsdp.state_dict(state, model)


def test_optimizer_states_and_state_dicts_are_whole() -> None:
    shapes = {name: p.shape for name, p in cut.plain().named_parameters()}
    with simulate(data=2, tp=2) as ranks:
        for told, again, weights in by_rank(ranks(kept)):
            assert {path: one.shape for path, one in told.items()} == shapes
            assert {path: one.shape for path, one in weights.items()} == shapes
            assert all(torch.equal(again[path], one) for path, one in told.items())


def test_weights_are_replaced_frozen_and_thawed() -> None:
    def replaced() -> None:
        mesh, state, model = made()
        state = stepped(state, model, mesh)
        whole = fsdp.full_params(state)
        there = fsdp.replace_params(state, whole)
        parts = fsdp.replace_params(state, fsdp.local_shards(state))
        frozen = fsdp.unfreeze(fsdp.freeze(state, "embed*"), "embed*")
        for one in (there, parts, frozen):
            torch.testing.assert_close(fsdp.full_params(one), whole, rtol=0, atol=0)

    with simulate(data=2, tp=2) as ranks:
        ranks(replaced).get()


def drawn(p: float) -> tuple[torch.Tensor, torch.Tensor]:
    mesh, state, model = made(False)
    x = torch.ones(2, 6)

    def both(model: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.dropout(x, p), C.dropout(torch.ones(2, 3), p, mesh["tp"], 1)], 1)

    state, y = T.apply(model, both)(state, x)
    return y[:, :6], y[:, 6:]


def test_ranks_along_the_axis_draw_the_same_and_those_of_the_data_do_not() -> None:
    with simulate(data=2, tp=2) as ranks:
        equal, parts = zip(*by_rank(ranks(drawn, 0.5)), strict=True)
    assert torch.equal(equal[0], equal[1])
    assert torch.equal(equal[2], equal[3])
    assert not torch.equal(equal[0], equal[2])
    assert not torch.equal(parts[0], parts[1]) or not torch.equal(parts[2], parts[3])
    assert {float(x) for part in parts for x in part.flatten()} <= {0.0, 2.0}


def test_optimizers_of_whole_leaves_are_refused() -> None:
    def made_with() -> None:
        optimizer = fsdp.from_torch(torch.optim.Adafactor, lr=0.01)
        refused((lambda: made(True, optimizer), "it wants whole leaves", "'embed.weight' is cut along 'tp'"))

    with simulate(data=1, tp=2) as ranks:
        ranks(made_with).get()


def test_print_says_the_rules() -> None:
    spec = fsdp.Spec({"data": 4, "tp": 2}, own=cut.own(True))
    said = str(spec)
    assert "*.qkv.*: cut along tp in dim 0, each of 3 parts" in said
    assert "*: equal along tp, gradients summed" in said
    with torch.device("meta"):
        shapes, _ = fsdp.functionalize(cut.plain())
    half, plain = fsdp.make_layout(shapes, spec), fsdp.make_layout(shapes, fsdp.Spec({"data": 4}))
    leaf = {leaf.path: leaf for bucket in half.buckets.values() for leaf in bucket.leaves}["blocks.0.mlp.up.weight"]
    assert (leaf.shape, leaf.whole) == ((16, 8), (32, 8))
    cut_, whole = (sum(leaf.numel for b in one.buckets.values() for leaf in b.leaves) for one in (half, plain))
    assert cut_ < 0.6 * whole


# ---------------------------------------------------------------- wrong rules

A = fsdp.Along
#: what is wrong, how it is said, and what the error says
SAID: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no such axis": (lambda own: {**own, "*": "tensor"}, "names the axis 'tensor', which the mesh does not have"),
    "no such axis, cut": (lambda own: {**own, "head.*": ("model", 0)}, "names the axis 'model'"),
    "an axis twice": (lambda own: {**own, "head.*": [("tp", 0), ("tp", 1)]}, "names the axis 'tp' twice"),
    "no rule": (lambda own: None, "maps to None"),
    "a dim without an axis": (lambda own: 0, "maps to 0; expected 'tp' for a leaf"),
    "dims as text": (lambda own: ("tp", "0"), "names the axis '0'"),
    "a leaf without a rule": (lambda own: {k: v for k, v in own.items() if k != "*"}, "nothing says how 'place' lies"),
    "a pattern of nothing": (lambda own: {"*.wq.*": ("tp", 0), **own}, "the pattern '*.wq.*' matches nothing"),
    "no such dim": (lambda own: {"norm.weight": ("tp", 1), **own}, "has no dim 1"),
    "no such dim from the end": (lambda own: {"norm.weight": ("tp", -2), **own}, "has no dim -2"),
    "five rows": (lambda own: {"five": ("tp", 0), **own}, "which does not divide"),
    "parts that do not divide": (lambda own: {"*.up.weight": A("tp", 0, parts=5), **own}, "into parts"),
    "parts too small": (lambda own: {"*.up.weight": A("tp", 0, parts=32), **own}, "elements of its parts"),
    "no part": (lambda own: A("tp", 0, parts=0), "from 1 on"),
    "parts of no dim": (lambda own: A("tp", parts=3), "it has parts and no dim"),
    "a rule that there is not": (lambda own: A("tp", grads="max"), "expected grads to be one of"),
    "a rule for what is cut": (lambda own: A("tp", 0, grads="sum"), "a rule for gradients of a leaf that is cut"),
    "the data's axis, cut": (lambda own: {"head.*": [("tp", 0), ("data", 0)], **own}, "averages over 'data'"),
    "the data's axis, equal": (lambda own: {"head.*": [("tp", 0), "data"], **own}, "averages over 'data'"),
}
FORWARD: dict[str, Any] = {  # the model has other shapes: torch says so in the first forward
    "rows for columns": {"*.up.weight": ("tp", 1)}, "columns for rows": {"*.down.weight": ("tp", 0)},
    "a norm that is cut": {"*.norm1.weight": ("tp", 0)}, "a bias that is cut": {"*.down.bias": ("tp", 0)},
    "a weight that is not cut": {"*.up.weight": "tp"}, "a bias that is not cut": {"*.up.bias": "tp"},
    "a vocabulary that is cut in the other dim": {"embed.weight": ("tp", 1)},
}  # fmt: skip
FIRST_STEP: dict[str, tuple[bool, Any, str]] = {  # found by what gradients are
    "a sum that is said to be equal": (True, {"*.norm1.weight": "tp"}, "ranks came to different gradients"),
    "a bias whose tokens are cut": (True, {"*.out.bias": "tp"}, "ranks came to different gradients"),
    "places of cut tokens": (True, {"place": "tp"}, "ranks came to different gradients"),
    "a head that is not cut": (False, {"head.weight": "tp"}, "ranks came to different gradients"),
    "the last norm": (True, {"norm.*": "tp"}, "ranks came to different gradients"),
    "equal, said to be a sum": (False, {"*.norm2.*": A("tp", grads="sum")}, "ranks came to the same one"),
    "places, said to be a sum": (False, {"place": A("tp", grads="sum")}, "ranks came to the same one"),
    "a bias, said to be a sum": (False, {"*.down.bias": A("tp", grads="sum")}, "ranks came to the same one"),
}


def first(rules: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    return {**rules, **{pattern: rule for pattern, rule in others.items() if pattern not in rules}}


def planted(what: str) -> str:
    mesh = fsdp.local_mesh()
    own = SAID[what][0](cut.own(False))
    own = own if isinstance(own, dict) else {**cut.own(False), "*": own}
    params = {**fsdp.functionalize(cut.plain())[0], **({"five": torch.ones(5)} if "five" in own else {})}
    return raised(lambda: fsdp.shard(params, fsdp.Spec(mesh, fsdp.zero3("data"), own=own)))


def planted_forward(what: str) -> str:
    mesh, state, model = made(False, own=first(FORWARD[what], cut.own(False)))
    try:
        T.forward_backward(model, cut.loss_fn)(state, cut.batch(0, mesh.get_local_rank("data")))
    except (RuntimeError, fsdp.FsdpError, IndexError) as error:
        return str(error)
    return ""


def planted_step(what: str) -> tuple[str, bool]:
    sequence, rule, _ = FIRST_STEP[what]
    mesh, state, model = made(sequence, own=first(rule, cut.own(sequence)), schedule=fsdp.Schedule(debug=True))
    before = fsdp.full_params(state)
    middle, _ = T.forward_backward(model, cut.loss_fn)(state, cut.batch(0, mesh.get_local_rank("data")))
    said = raised(lambda: fsdp.step(middle))
    return said, all(torch.equal(before[name], one) for name, one in fsdp.full_params(state).items())


def test_a_wrong_own_is_refused_or_found_in_the_first_step() -> None:
    assert len(SAID) + len(FORWARD) + len(FIRST_STEP) >= 30
    step = 1 if FULL else 2
    with simulate(data=2, tp=2) as ranks:
        for what, (_, text) in [*SAID.items()][::step]:
            try:
                found = ranks(planted, what).get()
            except fsdp.LaunchError as error:  # an Along that cannot be
                found = [str(error)]
            assert all("SpecError" in said and text in said for said in found), (what, found)
    with simulate(data=2 if FULL else 1, tp=2) as ranks:  # of ranks along tp, one group is as good as two
        for what in [*FORWARD][::step]:
            assert all(ranks(planted_forward, what).get()), what
        for what, (*_, text) in [*FIRST_STEP.items()][::step]:
            for said, same in by_rank(ranks(planted_step, what)):
                assert text in said, (what, said)
                assert same


def equal_but_on_one_rank() -> str:
    mesh = fsdp.local_mesh()
    spec = fsdp.Spec(mesh, fsdp.zero3("data"), own={"w": "tp"}, schedule=fsdp.Schedule(debug=True))
    state, params = fsdp.unshard(fsdp.shard({"w": torch.ones(4)}, spec, fsdp.sgd(lr=0.1)))
    grads = {"w": params["w"] * (2.0 if mesh.get_rank() == 3 else 1.0)}
    return raised(lambda: fsdp.step(fsdp.reduce(state, grads)))


def test_a_gradient_that_differs_in_one_group_stops_every_rank() -> None:
    with simulate(data=2, tp=2) as ranks:
        assert all("ranks came to different gradients" in said for said in ranks(equal_but_on_one_rank).get())


def not_finite_at_first(wrong: bool) -> tuple[int, str, str]:
    """What is said of gradients of two steps, the first of which one data rank has as NaN."""
    mesh = fsdp.local_mesh()
    spec = fsdp.Spec(mesh, fsdp.zero3("data"), own={"w": "tp"}, schedule=fsdp.Schedule(debug=True))
    state = fsdp.shard({"w": torch.ones(4)}, spec, fsdp.sgd(lr=0.1))
    said = ["", ""]
    for i, by in enumerate(
        (float("nan") if mesh.get_local_rank("data") else 1.0, 1.0 + (wrong and mesh.get_rank() == 3))
    ):
        state, params = fsdp.unshard(state)
        state = fsdp.reduce(state, {"w": params["w"] * by})
        try:
            state = T.skip_nonfinite(fsdp.step)(state)
        except fsdp.SpecError as error:
            said[i] = str(error)
    return int(state.extras["skipped"]), said[0], said[1]


@pytest.mark.parametrize("wrong", [False, True])
def test_gradients_that_are_not_finite_are_compared_in_a_later_step(wrong: bool) -> None:
    with simulate(data=2, tp=2) as ranks:
        for skipped, before, said in by_rank(ranks(not_finite_at_first, wrong)):
            assert (skipped, before) == (1, "")
            assert ("ranks came to different gradients" in said) is wrong


def test_ranks_that_say_other_rules_are_refused() -> None:
    def parted() -> None:
        mesh = fsdp.local_mesh()
        spec = fsdp.Spec(mesh, own=cut.own(mesh.get_rank() == 1))  # one rank says that gradients are summands
        refused((
            lambda: fsdp.shard(fsdp.functionalize(cut.plain())[0], spec),
            "SpecError: shard: ranks have different", "grads",
        ))  # fmt: skip

    with simulate(data=1, tp=2) as ranks:
        ranks(parted).get()


def right_step(sequence: bool) -> int:
    mesh, state, model = made(sequence, schedule=fsdp.Schedule(debug=True))
    return stepped(state, model, mesh, 2).steps


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.large), True])
def test_a_right_own_is_not_refused(sequence: bool) -> None:
    with simulate(data=2, tp=2) as ranks:
        assert ranks(right_step, sequence).get() == [2] * 4


# ---------------------------------------------------------------- what a forward sees of a weight


class Squares(torch.autograd.Function):
    """x times w, squared."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w.T).square()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        x, w = ctx.saved_tensors
        return None, (2 * (x @ w.T) * grad).T @ x


class Rows(nn.Module):
    """Weights outside of modules, whose shapes decide: a mean over rows, of each rank's and then of all ranks'."""

    def __init__(self, tp: Any) -> None:
        super().__init__()
        self.tp = tp
        self.w, self.tied = nn.Parameter(torch.randn(4, 3)), nn.Embedding(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, seen = self.w.shape[0], self.tied.weight
        assert rows == len(self.w) == self.w.numel() // self.w.size(-1) == (self.w * 1).shape[0] == seen.shape[0]
        mine = C.pvary(x, self.tp)
        found = (Squares.apply(mine, self.w) * seen.sum(1)).sum() / rows
        return C.psum(found, self.tp) / self.tp.size()


def rows_trained(way: str) -> Any:
    mesh = fsdp.local_mesh()
    torch.manual_seed(0)
    spec = fsdp.Spec(mesh, own={"*": ("tp", 0)})
    params, model = fsdp.functionalize(Rows(mesh["tp"]).double(), spec)
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(mesh.get_local_rank("data"))).double()
    if way == "driven":
        state, loss = T.forward_backward(model, lambda model, x: model(x))(state, x)
    else:
        state, leaves = fsdp.unshard(state)
        grads, loss = torch.func.grad_and_value(lambda p: by_hand(p, mesh["tp"], x))(leaves)
        state = fsdp.reduce(state, grads)
    state, loss = fsdp.pmean(state, loss)
    return loss, fsdp.full_params(fsdp.step(state))


def by_hand(p: Any, tp: Any, x: torch.Tensor) -> torch.Tensor:
    found = ((C.pvary(x, tp) @ p["w"].T).square() * p["tied.weight"].sum(1)).sum() / p["w"].shape[0]
    return C.psum(found, tp) / tp.size()


def test_a_weight_that_is_cut_has_the_shape_of_a_ranks_part_in_a_driven_forward() -> None:
    """Also where the module that holds it is not called."""
    found: list[Any] = []
    for tp, way in ((1, "by hand"), (2, "by hand"), (2, "driven")):
        with simulate(data=2, tp=tp) as ranks:
            found += zip(*(handle.get() for handle in ranks(rows_trained, way)), strict=True)
    for seen in found[1:]:
        torch.testing.assert_close(seen, found[0], rtol=1e-12, atol=1e-12)


def rows_and_output(model: nn.Linear, x: torch.Tensor) -> tuple[int, int]:
    return model.weight.shape[0], model(x).shape[1]


def parts_then_whole() -> list[tuple[int, int]]:
    parts = fsdp.Spec(fsdp.local_mesh(), own={"*": ("tp", 0)})
    params, model = fsdp.functionalize(nn.Linear(3, 4), parts)
    of_both = T.apply(model, rows_and_output)
    states = [fsdp.shard(params, spec) for spec in (parts, fsdp.Spec(fsdp.local_mesh()), parts)]
    return [of_both(state, torch.ones(5, 3))[1] for state in states]


def test_a_model_that_computed_with_parts_takes_a_state_of_whole_leaves() -> None:
    with simulate(data=1, tp=2) as ranks:
        assert ranks(parts_then_whole).get() == [[(2, 2), (4, 4), (2, 2)]] * 2
