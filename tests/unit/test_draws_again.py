"""Random numbers that are drawn again: eagerly a generator is set back, in a captured step others stand in for it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp.transforms import _seed
from functional_fsdp.transforms._seed import DrawPosition, Microbatch, check_draws

CPU = torch.device("cpu")


class Device:
    """A generator as a GPU has it: numbers follow from (seed, offset); which state it draws from can be exchanged."""

    def __init__(self, seed: int = 0, offset: int = 0) -> None:
        self.now = SimpleNamespace(seed=seed, offset=offset)

    def draw(self) -> tuple[int, int]:
        self.now.offset += 4
        return self.now.seed, self.now.offset

    def get_offset(self) -> int:
        return int(self.now.offset)

    def get_state(self) -> Any:
        return self.now.seed, self.now.offset

    def set_state(self, state: Any) -> None:
        self.now.seed, self.now.offset = state

    def graphsafe_get_state(self) -> Device:
        found = Device()
        found.now = self.now
        return found

    def graphsafe_set_state(self, other: Device) -> None:
        self.now = other.now


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device(seed=7)
    monkeypatch.setattr(_seed, "default_generator", lambda device: made)
    yield made
    assert not _seed.RUNNING


def ranks_with(default: Device, capturing: bool) -> Any:
    return SimpleNamespace(generator=default, generators={}, draws={}, again={}, capturing=capturing)


def step(default: Device, ranks: Any, own: Device) -> tuple[list[Any], list[Any]]:
    """A microbatch with a region: it draws, a part draws, it draws again; then the same without the part, and a last
    draw. What the region drew, and drew again."""
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(own)
    _seed.RUNNING.append(Microbatch(ranks, 0, own))
    try:
        default.draw()
        start = DrawPosition(CPU)
        drawn = [default.draw()]
        start.end()
        default.draw()  # of the part
        after = DrawPosition(CPU)
        drawn.append(default.draw())
        after.end()
        quiet = DrawPosition(CPU)
        quiet.end()
        default.draw()
        with start.resumed():
            again = [default.draw()]
            after.go()
            again.append(default.draw())
        again.append(default.draw())
    finally:
        _seed.RUNNING.pop().end()
        default.graphsafe_set_state(before)
    return drawn, again


def test_a_recomputation_draws_again_and_others_go_on(default: Device) -> None:
    ranks, own = ranks_with(default, False), Device(seed=3)
    ranks.generators[0] = own
    drawn, again = step(default, ranks, own)
    assert drawn == again[:2] == [(3, 8), (3, 16)]
    assert again[2] == (3, 24)  # as if nothing had been drawn again
    assert default.get_state() == (7, 0)
    assert ranks.draws == {(0, 1): 4, (0, 2): 12, (0, 0): 24}  # nothing for the place from which nothing was drawn


def test_in_a_captured_step_each_place_has_a_generator(default: Device) -> None:
    eager, own = ranks_with(default, False), Device(seed=3)
    right = step(default, eager, own)
    ranks, again = ranks_with(default, True), Device(seed=3)
    ranks.generators[0] = again
    ranks.again.update({place: Device(3, offset) for place, offset in eager.draws.items() if place[1]})
    assert step(default, ranks, again) == right
    assert not ranks.draws
    check_draws(ranks, eager.draws)
    again.draw()
    with pytest.raises(fsdp.ScheduleError, match="draws random numbers as far as 28, and the one before it, 24"):
        check_draws(ranks, eager.draws)


def test_a_place_is_kept_from_which_a_part_will_draw_again(default: Device) -> None:
    """A part whose output others change is run again: its numbers come after those of what was before it, if any."""
    ranks, own = ranks_with(default, False), Device(seed=3, offset=8)
    default.graphsafe_set_state(own)
    _seed.RUNNING.append(Microbatch(ranks, 0, own))
    before = DrawPosition(CPU)
    before.end()
    default.draw()  # of the part
    before.keep()
    _seed.RUNNING.pop()
    assert ranks.draws == {(0, 1): 8}


def test_the_place_before_a_part_that_is_run_again_is_noted(default: Device) -> None:
    def part(h: torch.Tensor) -> torch.Tensor:
        drawn.append(default.draw())
        return h.detach()

    def stage(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        there = kept(h)
        with torch.no_grad():
            h.mul_(2)  # which `there` lies on
        return (h * there).sin()

    drawn: list[Any] = []
    kept = T.saved(part)
    ranks, own = ranks_with(default, False), Device(seed=3, offset=8)
    default.graphsafe_set_state(own)
    _seed.RUNNING.append(Microbatch(ranks, 0, own))
    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(T.remat(stage)(x).sum(), x)
    _seed.RUNNING.pop()
    assert drawn == [(3, 12)] * 2
    assert ranks.draws == {(0, 1): 8}


def test_by_hand_a_generator_is_set_back(default: Device) -> None:
    start = DrawPosition(CPU)
    host = torch.rand(3)
    drawn = default.draw()
    start.end()
    with start.resumed():
        assert default.draw() == drawn
        assert torch.equal(torch.rand(3), host)
    assert default.draw() == (7, 8)
    assert not torch.equal(torch.rand(3), host)
