"""Vetoes: steps that one rank's device takes back, and all ranks then take again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.presets import PRESETS, ranks_of
from support.problems import mesh_and_placement
from support.tables import marked

import functional_fsdp as fsdp
from functional_fsdp import ScheduleError, Spec, launch
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
        y: torch.Tensor = self.down(self.drop(self.up(self.norm(x)).tanh()))
        return y


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


def with_vetoes(preset: str) -> tuple[int, list[torch.Tensor], list[torch.Tensor], int]:
    """Four steps, each of which one rank takes back first; and four that nobody takes back."""
    state, train_step = made(preset)
    right, _ = made(preset)
    rank, size, vetoed = dist.get_rank(), dist.get_world_size(), 0
    with pytest.raises(ScheduleError, match="different orders so far"), Veto(state, flag(True), flag(False)).holds():
        train_step(state, *batch(9))
    state, right = train_step(state, *batch(9))[0], train_step(right, *batch(9))[0]  # which has the order
    for i in range(4):
        before = look(state)
        for vetoes in (rank == i % size, False):  # the device of one rank finds that a read has changed
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
                assert all(torch.equal(a, b) for a, b in zip(look(state), before, strict=True))
        state = new
        right, _ = train_step(right, *batch(i))
    return vetoed, look(state), look(right), state.steps


@pytest.mark.parametrize("preset", marked([(p,) for p in PRESETS], [("zero3",), ("ddp",)]))
def test_a_step_that_is_taken_back_is_taken_again_with_the_same_bits(preset: str) -> None:
    for vetoed, mine, right, steps in launch(with_vetoes, (preset,), nprocs=ranks_of(preset)):
        assert vetoed == steps - 1 == 4
        assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


def replays() -> tuple[list[str], int, bool]:
    """A replay that is taken back on both ranks, then launched again."""
    state, train_step = made("zero3")
    capture = Capture(state)
    with capture.recording():
        state, _ = train_step(state, *batch(0))
    capture.first(lambda: None)
    said, before = [], look(state)

    def vetoing() -> None:
        raise Vetoed

    for launched in (vetoing, vetoing, lambda: None):
        try:
            new = capture.again(state, launched)
        except Vetoed:
            said.append("taken back")
    same = all(torch.equal(a, b) for a, b in zip(look(new), before, strict=True))
    new, _ = train_step(new, *batch(1))
    return said, new.steps, same


def test_a_replay_that_is_taken_back_leaves_the_state_as_it_was() -> None:
    assert launch(replays, nprocs=2) == [(["taken back", "taken back"], 3, True)] * 2


def asked() -> list[bool]:
    state, _ = made("zero3")
    ranks = ranks_of_state(state)
    return [ranks.any(dist.get_rank() == one, "a rank") for one in (0, 1, 2)]


def test_any_is_so_on_every_rank_where_it_is_on_one() -> None:
    assert launch(asked, nprocs=2) == [[True, True, False]] * 2


def abandoned() -> tuple[str, bool, int]:
    """One rank abandons a step in which the other waits, then both ask before they take it."""
    state, train_step = made("zero3")
    state, said = train_step(state, *batch(1))[0], ""
    for _ in range(2):
        try:
            come_to_look(state)
            found = ranks_of_state(state).any(dist.get_rank() == 0, "a rank")
            if dist.get_rank() == 1 and not said:
                fsdp.unshard(state, "norm")
                raise ValueError("bad data")
            state, _ = train_step(state, *batch(0))
            break
        except (ValueError, fsdp.RestartError) as error:
            said = type(error).__name__
    return said, found, state.steps


def test_ranks_that_ask_after_an_abandoned_step_meet_first() -> None:
    assert launch(abandoned, nprocs=2) == [("RestartError", True, 2), ("ValueError", True, 2)]
