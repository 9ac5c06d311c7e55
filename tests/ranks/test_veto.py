"""Vetoes: steps that one rank's device takes back, and all ranks then take again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.presets import PRESETS, ranks_of
from support.problems import mesh_and_placement
from support.ranks import each_rank
from support.tables import marked

import functional_fsdp as fsdp
from functional_fsdp import ScheduleError, Spec
from functional_fsdp import transforms as T
from functional_fsdp._export import come_to_look
from functional_fsdp._seams import Capture, Veto, Vetoed
from functional_fsdp.extend import ranks_of as ranks_of_state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 1)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.up(self.norm(x)).tanh()))


def made(preset: str) -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    spec = Spec(mesh, placement, units=["norm", "up", "down"])
    state, model = fsdp.init(Net, spec, fsdp.adamw(lr=1e-2), seed=3)
    forward_backward = T.forward_backward(model, lambda model, x, y: (model(x) - y).square().mean())
    step = T.skip_nonfinite(fsdp.step)

    def train_step(state: fsdp.State, x: torch.Tensor, y: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, x, y)
        return step(state), loss

    return state, train_step


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return x, x.sum(1, keepdim=True) / (step != 2)  # the third one is skipped


def look(state: fsdp.State) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves((state.main, state.opt, state.buffers, state.extras, state.count))
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def flag(vetoes: bool) -> torch.Tensor:
    return torch.full((1,), int(vetoes), dtype=torch.int32)


def same(state: fsdp.State, as_it_was: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(look(state), as_it_was, strict=True))


ROWS = marked([(preset, ranks_of(preset)) for preset in PRESETS], [("zero3", 2), ("ddp", 2)])


@pytest.mark.parametrize(("preset", "ranks"), ROWS)
@each_rank("ranks")
def test_a_step_that_is_taken_back_is_taken_again_with_the_same_bits(preset: str, ranks: int) -> None:
    """Four steps, each of which one rank takes back first; and four that nobody takes back."""
    state, train_step = made(preset)
    right, _ = made(preset)
    vetoed = 0
    with pytest.raises(ScheduleError, match="different orders so far"), Veto(state, flag(True), flag(False)).holds():
        train_step(state, *batch(9))
    state, right = train_step(state, *batch(9))[0], train_step(right, *batch(9))[0]  # which has the order
    for i in range(4):
        before = look(state)
        for vetoes in (dist.get_rank() == i % ranks, False):  # the device of one rank finds that a read has changed
            veto = Veto(state, flag(vetoes), flag(False))
            capture = Capture(state)
            with capture.recording(), veto.holds():
                new, _ = train_step(state, *batch(i))
            assert veto.asked

            def launched(veto: Veto = veto) -> None:
                if veto.host.item():
                    raise Vetoed

            try:
                capture.first(launched)
            except Vetoed:
                vetoed += 1
                assert state.between_steps
                assert same(state, before)
        state = new
        right, _ = train_step(right, *batch(i))
    assert vetoed == state.steps - 1 == 4
    assert same(state, look(right))


@each_rank(2)
def test_a_replay_that_is_taken_back_leaves_the_state_as_it_was() -> None:
    """It is taken back on both ranks, twice, then launched again."""
    state, train_step = made("zero3")
    capture = Capture(state)
    with capture.recording():
        state, _ = train_step(state, *batch(0))
    capture.first(lambda: None)
    before = look(state)

    def vetoing() -> None:
        raise Vetoed

    for _ in range(2):
        with pytest.raises(Vetoed):
            capture.again(state, vetoing)
    new = capture.again(state, lambda: None)
    assert same(new, before)
    assert train_step(new, *batch(1))[0].steps == 3


@each_rank(2)
def test_any_is_so_on_every_rank_where_it_is_on_one() -> None:
    ranks = ranks_of_state(made("zero3")[0])
    assert [ranks.any(dist.get_rank() == one, "a rank") for one in (0, 1, 2)] == [True, True, False]


@each_rank(2)
def test_ranks_that_ask_after_an_abandoned_step_meet_first() -> None:
    """One rank abandons a step in which the other waits, then both ask before they take it."""
    state, train_step = made("zero3")
    state = train_step(state, *batch(1))[0]
    asked = lambda: ranks_of_state(state).any(dist.get_rank() == 0, "a rank")  # noqa: E731
    come_to_look(state)
    assert asked()
    if dist.get_rank() == 1:
        fsdp.unshard(state, "norm")
    else:
        with pytest.raises(fsdp.RestartError):
            train_step(state, *batch(0))
    come_to_look(state)
    assert asked()
    assert train_step(state, *batch(0))[0].steps == 2
