"""A budget of bytes: what blocks keep follows it, on all ranks alike, and gradients are those of the plain module."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.chains import mean_square as loss_fn
from support.tables import marked

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp.transforms.budget import KEPT, Budget, Cost, Trial, Way, best
from functional_fsdp.transforms.step_memory import rehearse

WIDTH, BLOCKS, ROWS = 32, 2, 256


class Part(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).tanh()
        out: torch.Tensor = self.down(h * h)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = Part(WIDTH), Part(4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.narrow(x)
        out: torch.Tensor = x + self.wide(x)
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def data(rank: int) -> torch.Tensor:
    """More rows on rank 1."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS * (1 + rank), WIDTH, dtype=torch.float64, generator=generator)


@cache
def most() -> int:
    """Bytes that a step of rank 1 takes if everything is kept."""
    params, model = fsdp.functionalize(net())
    state = fsdp.abstract_state(params, fsdp.Spec({"data": 2}), fsdp.sgd(lr=0.1))
    return T.step_memory(T.forward_backward(model, loss_fn), state, data(1)).peak


def made(nbytes: int, moves: bool, **options: Any) -> tuple[fsdp.State, Any]:
    params, model = fsdp.functionalize(net())
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    return state, T.forward_backward(T.budget(model, nbytes, moves=moves), loss_fn, **options)


def trained(nbytes: int, moves: bool, folder: str) -> tuple[Any, int, dict[str, torch.Tensor], str]:
    """The choice, the peak that rank 1 has by it, weights after a step, and the plan's hash after another one, which
    goes on from a checkpoint by the same choice."""
    state, forward_backward = made(nbytes, moves)
    state, _ = forward_backward(state, data(dist.get_rank()))
    choice = forward_backward.choice
    state = fsdp.step(state)
    weights = {path: w.clone() for path, w in fsdp.full_params(state).items()}
    peak = T.step_memory(forward_backward, state, data(1)).peak if dist.get_rank() else 0
    state = fsdp.load(fsdp.save(state, f"{folder}/one"), like=state)
    state, _ = forward_backward(state, data(dist.get_rank()))
    assert forward_backward.choice is choice
    state = fsdp.step(state)
    fsdp.save(state, f"{folder}/again")
    plan = state.cursor.plan
    assert plan.activations == (*choice.ways.items(),)
    assert ("activations: " in repr(plan)) is bool(choice.ways)
    return choice, peak, weights, plan.hash


@pytest.mark.parametrize(
    ("share", "moves"), marked([(2.0, True), (0.7, False), (0.7, True)], [(2.0, True), (0.7, True)])
)
def test_a_budget_is_kept_on_all_ranks_alike_with_the_gradients_of_the_module(
    share: float, moves: bool, tmp_path: Path
) -> None:
    found = fsdp.launch(trained, (int(share * most()), moves, str(tmp_path)), nprocs=2, simulate=True)
    module = net()
    losses = [loss_fn(module, data(rank)) for rank in range(2)]
    right = torch.autograd.grad(sum(losses) / 2, [*module.parameters()])  # type: ignore[arg-type]
    choice, _, _, plan = found[0]
    for other, peak, weights, same in found:
        assert (other, same) == (choice, plan)
        assert peak <= choice.nbytes
        for (path, before), grad in zip(module.named_parameters(), right, strict=True):
            torch.testing.assert_close(weights[path], before.detach() - 0.1 * grad, rtol=1e-9, atol=1e-12)
    for name in ("one", "again"):
        said = json.loads((tmp_path / name / "layout.json").read_text())
        assert said.get("activations", {}) == choice.ways
    if share > 1:
        assert not choice.ways
        assert "nothing is changed" in repr(choice)
    else:
        assert choice.before > choice.nbytes >= choice.peak
        assert [*choice.ways] == [f"blocks.{i}" for i in range(BLOCKS)]
        assert any("recomputed" in way or "moved" in way for way in choice.ways.values())
        assert moves or not any("moved" in way for way in choice.ways.values())
        assert f"peak {choice.peak / 2**30:.2f} GiB" in repr(choice)


def test_the_choice_is_the_same_where_units_are_compiled() -> None:
    found = []
    for compile in (False, {"backend": "aot_eager"}):
        torch._dynamo.reset()
        state, forward_backward = made(int(0.7 * most()), False, compile=compile)
        for _ in range(2):
            state, _ = forward_backward(state, data(1))
            state = fsdp.step(state)
        units = [call for call in forward_backward.driver.unit_calls if call.path.startswith("blocks")]
        assert all((call.compiled is not None or call.within != []) is bool(compile) for call in units)
        found.append((forward_backward.choice, fsdp.full_params(state)))
    (choice, weights), (other, compiled) = found
    assert choice == other
    assert choice.ways
    for path, w in weights.items():
        torch.testing.assert_close(compiled[path], w, rtol=1e-9, atol=1e-12)


@pytest.mark.large
def test_derivatives_of_a_model_that_recomputes_are_those_of_the_model_as_it_is() -> None:
    """And of a loss with one inside."""
    x = data(0)

    def bent(model: Any, x: torch.Tensor) -> torch.Tensor:
        value, along = torch.func.jvp(model, (x,), (x.cos(),))  # type: ignore[misc]
        return loss_fn(lambda x: value + along, x)

    params, model = fsdp.functionalize(net())
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    found, most = [], T.step_memory(T.forward_backward(model, bent), state, x).peak
    for budget in (False, True):
        given = T.budget(model, int(0.7 * most), moves=False) if budget else model
        forward_backward = T.forward_backward(given, bent)
        state, loss = forward_backward(state, x)
        if budget:
            assert "recomputed" in forward_backward.choice.ways.values()
        state, (_, product) = T.hvp(given, bent)(state, state.main, x)
        state, (_, slope) = T.jvp(given, bent)(state, state.main, x)
        state, (_, pulled) = T.pullback(given, bent)(state, 1.0, x)
        state = fsdp.finish_reductions(state)
        trees = state.grads, product, pulled
        found.append([loss, slope, *[one.local.clone() for tree in trees for one in tree.values()]])
        state = fsdp.drop_gradients(state)
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def refused() -> str:
    state, forward_backward = made(most() // 20, False)
    with pytest.raises(fsdp.ScheduleError, match=r"budget: expected at most [\d,]+ bytes, and the least that") as error:
        forward_backward(state, data(dist.get_rank()))
    state, _ = T.forward_backward(net(), loss_fn)(state, data(0))  # the state goes on
    fsdp.step(state)
    return str(error.value)


def test_a_budget_that_nothing_fits_is_refused_on_all_ranks() -> None:
    one, other = fsdp.launch(refused, nprocs=2, simulate=True)
    assert one == other
    assert "Take a smaller batch, more ranks" in one


def test_less_is_recomputed_where_the_budget_is_larger() -> None:
    costs = {KEPT: Cost(0, 0, 0), Way(True): Cost(100, 10, 0), Way(True, ("wide",)): Cost(40, 1, 0)}
    hardware = fsdp.Hardware.named("H100")
    few = best(costs, [*[0] * 4, 30], 1.0, hardware)
    assert few == (Way(True, ("wide",)), *(KEPT,) * 3)
    assert best(costs, [*[0] * 4, 120], 1.0, hardware) == (*(Way(True, ("wide",)),) * 3, KEPT)
    mixed = best(costs, [*[0] * 4, 200], 1.0, hardware)
    assert mixed == (Way(True), *(Way(True, ("wide",)),) * 3)
    assert best(costs, [*[0] * 4, 401], 1.0, hardware) is None


def test_up_to_three_groups_of_blocks_are_mixed() -> None:
    """As few are moved as fit beside compute, the others are treated in the least time that frees enough."""
    moved, cheap = Way(False, (), ("",)), Way(True, products=("wide",))
    costs = {
        KEPT: Cost(0, 0, 0), Way(True): Cost(1e9, 0.010, 0), cheap: Cost(0.5e9, 0.001, 0), moved: Cost(1e9, 0, 1e9),
    }  # fmt: skip
    hardware = fsdp.Hardware.named("H100")
    found = best(costs, [*[0] * 8, 6e9], 0.045, hardware)  # whose 43 ms hide two blocks' copies at 50 GB/s
    assert found == (moved, moved, *(Way(True),) * 2, *(cheap,) * 4)


def test_what_is_moved_costs_what_the_forward_does_not_hide() -> None:
    moved = Way(False, (), ("",))
    costs = {KEPT: Cost(0, 0, 0), Way(True): Cost(1e9, 0.010, 0), moved: Cost(1e9, 0, 1e9)}
    hardware = fsdp.Hardware.named("H100")
    assert best(costs, [*[0] * 4, 4e9], 1.0, hardware) == (moved,) * 4  # a second of forward hides 50 GB
    assert best(costs, [*[0] * 4, 4e9], 0.001, hardware) == (Way(True),) * 4


def test_what_is_moved_comes_back_late_where_main_gradients_take_the_room() -> None:
    """Four of 12 blocks take 128 ms each way, beside a forward of 140; the backward of other blocks frees nothing."""
    moved, cheap = Way(False, (), ("",)), Way(True, products=("wide",))
    costs = {KEPT: Cost(0, 0, 0), cheap: Cost(0.8e9, 0.002, 0), moved: Cost(1.6e9, 0, 1.6e9)}
    hardware = replace(fsdp.Hardware.named("H200"), to_host=50e9)
    assert best(costs, [*[0] * 12, 6.4e9], 0.140, hardware, gradients=0.2e9) == (*(moved,) * 4, *(KEPT,) * 8)
    assert best(costs, [*[0] * 12, 6.4e9], 0.140, hardware, gradients=1.6e9) == (*(cheap,) * 8, *(KEPT,) * 4)


def test_the_first_blocks_free_enough_for_those_after_them() -> None:
    """Where main gradients grow faster than blocks free, the peak is in the backward: by the first two blocks 165 bytes
    are needed, as by all four."""
    again, cheap = Way(True), Way(True, ("wide",))
    costs = {KEPT: Cost(0, 0, 0), again: Cost(100, 5, 0), cheap: Cost(60, 1, 0)}
    hardware = fsdp.Hardware.named("H100")
    assert best(costs, [0, 0, 0, 0, 165], 1.0, hardware) == (cheap, cheap, cheap, KEPT)
    assert best(costs, [0, 0, 165, 0, 165], 1.0, hardware) == (again, again, KEPT, KEPT)
    assert best(costs, [0, 0, 201, 0, 165], 1.0, hardware) is None


def test_a_choice_that_is_over_the_budget_is_not_tried_again() -> None:
    """Of two blocks more is expected than is needed, and a little too little comes: three are enough."""
    again, gib = Way(True), 1 << 30
    trial: Any = Trial.__new__(Trial)
    trial.costs = {KEPT: Cost(0, 0, 0), again: Cost(gib, 0.01, 0)}
    trial.lower, trial.forward, trial.gradients = [*[10 * gib] * 8, 0], 1.0, 0.0
    trial.budget, trial.hardware = Budget(8 * gib, ("block",) * 8, False, None), fsdp.Hardware.named("H100")
    seen = []

    def peak(ways: tuple[Way, ...]) -> int:
        seen.append(ways)
        return 10 * gib - ways.count(again) * gib * 3 // 4

    found, *_ = trial.fitting(10 * gib, 10 * gib - gib * 31 // 20, peak)
    assert found == (*(again,) * 3, *(KEPT,) * 5)
    assert seen == [(*(again,) * 2, *(KEPT,) * 6), found]


@pytest.mark.parametrize(("limit", "blocks"), [(5, 5), (6, 4), (9, 1), (2, 8)])
def test_where_no_estimate_fits_no_more_blocks_recompute_than_have_to(limit: int, blocks: int) -> None:
    """A block is taken to free nothing that counts, and frees a GiB."""
    again, gib = Way(True), 1 << 30
    trial: Any = Trial.__new__(Trial)
    trial.costs = {KEPT: Cost(0, 0, 0), again: Cost(gib / 16, 0.01, 0)}
    trial.lower, trial.forward, trial.gradients = [0] * 9, 1.0, 0.0
    trial.budget, trial.hardware = Budget(limit * gib, ("block",) * 8, False, None), fsdp.Hardware.named("H100")
    found, *_ = trial.fitting(10 * gib, limit * gib, lambda ways: (10 - ways.count(again)) * gib)
    assert found == (*(again,) * blocks, *(KEPT,) * (8 - blocks))


@pytest.mark.parametrize("units", [["blocks.*"], [("blocks.0", "blocks.1")], ["blocks.*.*"]])
def test_as_few_blocks_recompute_whatever_the_units_are(units: Any) -> None:
    params, model = fsdp.functionalize(net())
    state = fsdp.abstract_state(params, fsdp.Spec({"data": 2}, units=units), fsdp.sgd(lr=0.1))
    before = T.step_memory(T.forward_backward(model, loss_fn), state, data(1)).peak
    forward_backward = T.forward_backward(T.budget(model, before - 1, moves=False), loss_fn)
    assert T.step_memory(forward_backward, state, data(1)).peak < before
    assert forward_backward.choice.ways["blocks.1"] == "kept"


def test_where_no_estimate_fits_blocks_are_not_moved_if_that_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(best.__globals__, "TRIES", 0)
    params, model = fsdp.functionalize(net())
    state = fsdp.abstract_state(params, fsdp.Spec({"data": 2}), fsdp.sgd(lr=0.1))
    least = T.step_memory(T.forward_backward(T.remat(model, "blocks.*"), loss_fn), state, data(1)).peak
    nbytes, slow = (least + most()) // 2, replace(fsdp.Hardware.named("H100"), to_host=1e3)
    forward_backward = T.forward_backward(T.budget(model, nbytes, hardware=slow), loss_fn)
    assert T.step_memory(forward_backward, state, data(1)).peak <= nbytes
    assert forward_backward.choice.seconds < 1, forward_backward.choice


def test_what_cannot_be_chosen_is_refused() -> None:
    _, model = fsdp.functionalize(net())
    with pytest.raises(fsdp.SpecError, match=r"budget\(nbytes=-1\): expected bytes, more than 0"):
        T.budget(model, -1)
    with pytest.raises(fsdp.SpecError, match=r"budget: Linear has no list of modules of one class"):
        T.budget(nn.Linear(2, 2), 100)
    with pytest.raises(fsdp.SpecError, match=r"hardware='abacus': expected one of 'H100'"):
        T.budget(model, 100, hardware="abacus")
    with pytest.raises(fsdp.SpecError, match=r"forward_backward\(second_order=...\) of a model of T.budget"):
        T.forward_backward(T.budget(model, 100), loss_fn, second_order=True)
    params, _ = fsdp.functionalize(net())
    state = fsdp.abstract_state(params, fsdp.Spec({"data": 2}), fsdp.sgd(lr=0.1))
    with pytest.raises(fsdp.ScheduleError, match=r"T.budget: a graph is made of this step"):
        fsdp.lower(T.forward_backward(T.budget(model, 100), loss_fn), state, data(0))


def test_the_choice_is_known_on_paper_and_the_first_call_makes_the_same() -> None:
    nbytes = int(0.7 * most())
    params, model = fsdp.functionalize(net())
    forward_backward: Any = T.forward_backward(T.budget(model, nbytes, moves=False), loss_fn)
    on_paper = fsdp.abstract_state(params, fsdp.Spec({"data": 2}), fsdp.sgd(lr=0.1))
    peak = T.step_memory(forward_backward, on_paper, data(1)).peak
    choice = forward_backward.choice
    assert choice.peak == peak <= nbytes
    assert set(choice.ways.values()) != {str(KEPT)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.sgd(lr=0.1))
    forward_backward(state, data(1))
    assert forward_backward.choice is not choice
    again: Any = T.forward_backward(T.budget(model, nbytes, moves=False), loss_fn)
    again(state, data(1))
    assert forward_backward.choice == again.choice  # what was said on paper is nothing for a run


def test_on_paper_what_was_chosen_is_not_rehearsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    most()
    seen: list[str] = []
    whole = rehearse.__globals__["_rehearse"]

    def counted(*given: Any) -> Any:
        seen.append(given[4])
        return whole(*given)

    monkeypatch.setitem(rehearse.__globals__, "_rehearse", counted)
    params, model = fsdp.functionalize(net())
    on_paper = fsdp.abstract_state(params, fsdp.Spec({"data": 2}), fsdp.sgd(lr=0.1))
    T.step_memory(T.forward_backward(T.budget(model, 2 * most()), loss_fn), on_paper, data(1))
    assert seen == ["budget"]


class Waves(Part):
    """Keeps less where it is compiled: of the cosine its input alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).cos().sin())
        return out


def test_a_prediction_of_compiled_units_chooses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it rehearses twice, the second time with what compiled code keeps less."""
    model = net()
    for block in model.blocks:
        block.wide = Waves(4 * WIDTH).double()
    chosen: list[Any] = []
    whole = Trial.choose

    def choose(trial: Trial) -> Any:
        chosen.append(trial)
        return whole(trial)

    monkeypatch.setattr(Trial, "choose", choose)
    said = T.budget(model, 1 << 30), loss_fn, data(1), fsdp.Spec({"data": 2}), fsdp.sgd(lr=0.1)
    assert fsdp.predict(*said, compiled=True).peak < fsdp.predict(*said).peak
    assert len(chosen) == 2


class Other(nn.Module):
    """A block whose parts have other names than those of `Block`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Part(2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.inner(x)
        return out


class Two(Net):
    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(Other() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for block in self.others:
            x = block(x)
        return x


def test_a_model_with_two_kinds_of_blocks_has_a_budget_for_all_of_them() -> None:
    """As an encoder and a decoder: what the first one's parts are called is nothing for the others."""
    params, model = fsdp.functionalize(Two().double())
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.sgd(lr=0.1))
    before = T.step_memory(T.forward_backward(model, loss_fn), state, data(0)).peak
    forward_backward = T.forward_backward(T.budget(model, int(0.7 * before), moves=False), loss_fn)
    forward_backward(state, data(0))
    assert forward_backward.choice.peak <= 0.7 * before
    assert [*forward_backward.choice.ways] == [f"{kind}.{i}" for kind in ("blocks", "others") for i in range(BLOCKS)]
