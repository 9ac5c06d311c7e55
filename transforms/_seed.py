"""Random numbers of a step, the same whenever it is taken again.

On a GPU each microbatch has a generator of its own, which stands in for the default one while it runs: a captured step
draws from the same generators when it is replayed, seeded anew before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from functional_fsdp import ScheduleError, State
from functional_fsdp.extend import Ranks, default_generator, ranks_of, seeds

Place = tuple[int, int]  # microbatch, number in it
ALL = 0  # in the place of a number: the microbatch's end
RUNNING: list[Microbatch] = []


@contextmanager
def seeded(state: State, microbatch: int, step: int | None = None) -> Iterator[None]:
    """Random numbers from (state.rng, steps taken, microbatch, the rank that draws); the caller's own go on afterwards.

    Args:
        step: how many steps were taken, where the lineage does not know.
    """
    ranks = ranks_of(state)
    seed = seeds(state, step=step)(microbatch, ranks.drawer)
    host = torch.default_generator
    before = host.get_state()
    host.manual_seed(seed)
    try:
        if ranks.generator is None:
            yield
        else:
            with _standing_in(ranks, microbatch, seed):
                yield
    finally:
        host.set_state(before)


@contextmanager
def _standing_in(ranks: Ranks, microbatch: int, seed: int) -> Iterator[None]:
    if microbatch not in ranks.generators:
        if ranks.capturing:
            raise ScheduleError(
                f"cuda_graph: microbatch {microbatch} of a step that is captured; the steps before had fewer. Run the "
                "model as often in every step."
            )
        ranks.generators[microbatch] = torch.Generator(ranks.device)
    own = ranks.generators[microbatch]
    if not ranks.capturing:  # else it is seeded before each replay
        own.manual_seed(seed)
    default = ranks.generator
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(own)
    RUNNING.append(Microbatch(ranks, microbatch, own))
    try:
        yield
    finally:
        RUNNING.pop().end()
        default.graphsafe_set_state(before)


def reseed(state: State, again: Mapping[Place, torch.Generator], draws: Mapping[Place, int]) -> None:
    """Before the replay of a step from `state`: what its microbatches draw, and draw again, from these offsets."""
    ranks = ranks_of(state)
    seed = seeds(state)
    for microbatch, generator in ranks.generators.items():
        generator.manual_seed(seed(microbatch, ranks.drawer))
    for place, generator in again.items():
        generator.manual_seed(seed(place[0], ranks.drawer))
        generator.set_offset(draws[place])


# ---------------------------------------------------------------- numbers that are drawn again


class Microbatch:
    """The draws of one microbatch on a GPU, as far as they may come again in a recomputation.

    eagerly     a generator is set back to where it was: Philox numbers follow from (seed, offset)
    captured    a generator cannot be set back, so each place from which numbers come again has a generator of its own,
                which begins there: at the offset that the eager step before has noted
    """

    def __init__(self, ranks: Ranks, number: int, own: Any) -> None:
        self.ranks, self.number, self.own = ranks, number, own
        self.places = 0

    def place(self) -> Place:
        """The next place."""
        self.places += 1
        return self.number, self.places

    def note(self, place: Place, offset: int) -> None:
        """Numbers were drawn from this place on."""
        self.ranks.draws[place] = offset

    def end(self) -> None:
        """How far it came in all."""
        if not self.ranks.capturing and self.places:
            self.ranks.draws[self.number, ALL] = self.own.get_offset()

    def stand_in(self, place: Place) -> None:
        """In a captured step: draw from this place on."""
        self.ranks.generator.graphsafe_set_state(self.ranks.again.get(place, self.own))


def again_from(draws: Mapping[Place, int], device: torch.device) -> dict[Place, torch.Generator]:
    """Generators for a step that is captured, by the places that one like it has noted."""
    return {place: torch.Generator(device) for place in draws if place[1] != ALL}


def check_draws(ranks: Ranks, draws: Mapping[Place, int]) -> None:
    """After a first replay: whether the captured step draws as many numbers as the eager one did.

    Raises:
        ScheduleError: it does not, so that recomputations have drawn others.
    """
    for (microbatch, number), offset in draws.items():
        now = ranks.generators[microbatch].get_offset() if number == ALL else offset
        if now != offset:
            raise ScheduleError(
                f"cuda_graph: microbatch {microbatch} of the captured step draws random numbers as far as {now}, and "
                f"the one before it, {offset}: what is computed again has drawn others than the forward. Decide "
                "nothing at random in Python, or leave T.remat out."
            )


class DrawPosition:
    """Where the default generators stand, of the host and of a device."""

    def __init__(self, device: torch.device) -> None:
        self.host = torch.default_generator.get_state()
        self.generator: Any = default_generator(device)
        self.place: Place | None = None
        self.state: Any = None
        if self.generator is None:
            return
        self.microbatch = RUNNING[-1] if RUNNING and RUNNING[-1].ranks.generator is self.generator else None
        if self.microbatch is not None:
            self.place = self.microbatch.place()
            if self.microbatch.ranks.capturing:
                return
            self.offset = self.generator.get_offset()
        self.state = self.generator.get_state()

    def end(self) -> None:
        """Numbers that are drawn from now on do not count."""
        if self.place is not None and self.state is not None and self.generator.get_offset() != self.offset:
            self.keep()

    def keep(self) -> None:
        """Numbers may be drawn from here again, whether some were so far or not."""
        if self.place is not None and self.state is not None:
            assert self.microbatch is not None
            self.microbatch.note(self.place, self.offset)

    def go(self) -> None:
        """Draw from here again. On a device within `resumed`."""
        torch.default_generator.set_state(self.host)
        if self.state is not None:
            self.generator.set_state(self.state)
        elif self.place is not None:
            assert self.microbatch is not None
            self.microbatch.stand_in(self.place)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Within, numbers come from here on; afterwards generators go on where they were."""
        host = torch.default_generator.get_state()
        own: Any = self.generator
        captured = self.place is not None and self.state is None
        before = own and (own.graphsafe_get_state() if captured else own.get_state())
        self.go()
        try:
            yield
        finally:
            torch.default_generator.set_state(host)
            if captured:
                own.graphsafe_set_state(before)
            elif own is not None:
                own.set_state(before)
